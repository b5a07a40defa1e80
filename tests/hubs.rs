//! Scenarios H: hubs and envelopes.

use std::{
    collections::HashSet,
    sync::atomic::{AtomicBool, Ordering},
};

use common::*;
use futures::FutureExt;
use tokio::sync::oneshot;
use wakeline::{
    Stream,
    condition::{IntoCondition, PortId, When, any_of, at_least, each, sum},
    device::Emulated,
    prelude::*,
};

on_both!(h1_produce_increment_peek, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("h1");
    let produce = flow.add("produce", SendEach::new([vec![1_u32], vec![2], vec![3]]));
    let add = flow.add("add", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    // One envelope on each side of each hub is enough, without overlap.
    flow.connect_with(produce.output, add.input, HubOptions::bounded(1).envelopes(1).envelope_bytes(4));
    flow.connect_with(add.output, consume.input, HubOptions::bounded(1).envelopes(1));
    let report = flow.run().await.unwrap();

    assert_eq!(*lock(&seen), [[2], [3], [4]]);
    assert_eq!(report.operator("consume").unwrap().messages_in, 3);
    assert_eq!(report.operator("consume").unwrap().bytes_in, 12);
    assert_eq!(report.untaken, 0);
    assert_eq!(device.memory_peak(), 4, "one envelope on the device");
    freed(&device).await;
});

/// Sends `chunks` envelopes of equal numbers, and notes the address of each blank.
struct Stamp {
    next: u32,
    chunks: u32,
    addresses: Shared<usize>,
}

impl Operator for Stamp {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.output.blank().await?;
        let space = envelope.space().await?;
        space.fill(self.next);
        lock(&self.addresses).push(space.as_ptr().addr());
        let all = space.len();
        // The last is half as long: only the valid part travels.
        self.next += 1;
        let last = self.next == self.chunks;
        envelope.set_len(if last { all / 2 } else { all })?;
        if last {
            cx.finish();
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Expects the numbers of [`Stamp`], each plus one, and notes the address of each envelope.
struct Check {
    next: u32,
    addresses: Shared<usize>,
}

impl Operator for Check {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        let data = envelope.read().await?;
        self.next += 1;
        assert!(data.iter().all(|x| *x == self.next), "chunk {} is wrong", self.next);
        lock(&self.addresses).push(data.as_ptr().addr());
        Ok(())
    }
}

async fn h13(device: Device) {
    const CHUNK: usize = 64 << 10;
    const CHUNKS: u32 = 512; // 32 MiB in all
    let (sent, arrived) = (shared(), shared());
    let mut flow = Flow::new("h13");
    let stamp = flow.add("stamp", Stamp { next: 0, chunks: CHUNKS, addresses: sent.clone() });
    let add = flow.add("add", Increment).on(&device);
    let check = flow.add("check", Check { next: 0, addresses: arrived.clone() });
    flow.connect_with(stamp.output, add.input, HubOptions::default().envelope_bytes(CHUNK));
    flow.connect(add.output, check.input);
    let report = within(flow.run()).await.unwrap();

    let bytes = u64::from(CHUNKS) * CHUNK as u64 - CHUNK as u64 / 2;
    assert_eq!(report.operator("check").unwrap().messages_in, u64::from(CHUNKS));
    assert_eq!(report.operator("check").unwrap().bytes_in, bytes);
    assert_eq!(device.memory_peak(), 2 * CHUNK as u64, "two envelopes on the device, for any amount of data");
    for addresses in [sent, arrived] {
        let distinct: HashSet<usize> = lock(&addresses).iter().copied().collect();
        assert_eq!(distinct.len(), 2, "two envelopes on the host, for any amount of data");
    }
    drop(flow);
    freed(&device).await;
}

mod h13_larger_than_the_device {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn emulated() {
        let device = emulated_with(Emulated::new().memory(256 << 10));
        h13(device.clone()).await;
        assert_eq!(device.memory().unwrap().free, 256 << 10, "all memory is free again");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "needs a GPU"]
    async fn cuda() {
        h13(common::cuda()).await;
    }
}

/// Returns how many messages a writer can send before its reader takes one.
async fn sent_ahead(hub: Option<HubOptions>) -> usize {
    let ahead = shared();
    let (full, is_full) = oneshot::channel();
    let (mut full, mut is_full) = (Some(full), Some(is_full));
    let noted = ahead.clone();
    let mut flow = Flow::new("ahead");
    let write = flow.add(
        "write",
        task(move |ports: &mut SourcePorts<u32>, _| {
            let (full, noted) = (full.take().unwrap(), noted.clone());
            async move {
                let mut accepted = 0;
                while fits(ports.output.try_send(accepted))? {
                    accepted += 1;
                }
                lock(&noted).push(accepted as usize);
                full.send(()).unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    let read = flow.add(
        "read",
        task(move |ports: &mut SinkPorts<u32>, _| {
            let is_full = is_full.take().unwrap();
            async move {
                is_full.await.unwrap();
                while ports.input.recv().await?.is_some() {}
                Ok(())
            }
            .boxed()
        }),
    );
    match hub {
        None => flow.connect(write.output, read.input),
        Some(hub) => flow.connect_with(write.output, read.input, hub),
    }
    within(flow.run()).await.unwrap();
    lock(&ahead)[0]
}

#[tokio::test]
async fn h14_plain_connect_is_a_queue_of_one() {
    assert_eq!(sent_ahead(None).await, 1);
    assert_eq!(sent_ahead(Some(HubOptions::bounded(3))).await, 3);
}

#[derive(Ports)]
struct DeclaredPorts {
    #[output(envelope_bytes = 96)]
    output: Output<Envelope<u32>>,
}

on_both!(h14_plain_connect_has_two_envelopes_of_the_declared_size, async |device: Device| {
    let mut flow = Flow::new("h14");
    let produce = flow.add(
        "produce",
        task(|ports: &mut DeclaredPorts, _| {
            async move {
                let (mut one, two) = (ports.output.blank().await?, ports.output.blank().await?);
                assert_eq!((one.capacity(), two.capacity()), (24, 24));
                assert!(ports.output.blank().now_or_never().is_none(), "there are only two");
                drop(two);
                assert!(ports.output.blank().now_or_never().is_some(), "the second one is back");
                one.space().await?[..3].copy_from_slice(&[1, 2, 3]);
                one.set_len(3)?;
                assert!(one.set_len(25).is_err(), "its capacity is fixed");
                ports.output.send(one).await?;
                Ok(())
            }
            .boxed()
        }),
    );
    let add = flow.add("add", Increment).on(&device);
    let seen = shared();
    let noted = seen.clone();
    let consume = flow.add(
        "consume",
        sink(move |envelope: Envelope<u32>| {
            let noted = noted.clone();
            async move {
                let data = envelope.read().await?.to_vec();
                assert!(envelope.is_host());
                assert_eq!(envelope.location(), "the host");
                lock(&noted).push((envelope.capacity(), data));
                Ok(())
            }
        }),
    );
    flow.connect(produce.output, add.input);
    // The size is that of the envelopes that `add` passes on.
    flow.connect(add.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [(24, vec![2, 3, 4])]);
    assert_eq!(device.memory_peak(), 2 * 96, "two envelopes on the device");
    freed(&device).await;
});

struct NotStarted(std::sync::Arc<AtomicBool>);

impl Operator for NotStarted {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

#[tokio::test]
async fn h14_an_unknown_size_is_an_error_before_running() {
    let device = emulated();
    let started = std::sync::Arc::new(AtomicBool::new(false));
    let mut flow = Flow::new("h14");
    let produce = flow.add("produce", NotStarted(started.clone()));
    let add = flow.add("add", Increment).on(&device);
    let consume = flow.add("consume", Collect(shared()));
    flow.connect(produce.output, add.input);
    flow.connect(add.output, consume.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    assert!(text.contains("`produce.output -> add.input`") && text.contains("envelope_bytes"), "{text}");
    assert!(!started.load(Ordering::Relaxed), "no operator has started");
    assert_eq!(device.memory_peak(), 0, "nothing was allocated");
}

on_both!(h15_passed_on_envelopes_return_after_their_last_reader, async |device: Device| {
    let (took, has_taken) = oneshot::channel::<()>();
    let (release, may_release) = oneshot::channel::<()>();
    let (mut took, mut has_taken, mut release, mut may_release) =
        (Some(took), Some(has_taken), Some(release), Some(may_release));
    let mut flow = Flow::new("h15");
    let produce = flow.add(
        "produce",
        task(move |ports: &mut SourcePorts<Envelope<u32>>, cx| {
            let (has_taken, release) = (has_taken.take().unwrap(), release.take().unwrap());
            async move {
                let mut first = ports.output.blank().await?;
                first.set_len(1)?;
                cx.stream()?.fill(&mut first, 0)?;
                increment::launch(cx.stream()?, &mut first)?;
                ports.output.send(first).await?;
                has_taken.await.unwrap();
                assert!(ports.output.blank().now_or_never().is_none(), "the reader, two hubs downstream, still has it");
                release.send(()).unwrap();
                let again = ports.output.blank().await?;
                assert_eq!(again.len(), 0, "it has no valid data");
                Ok(())
            }
            .boxed()
        }),
    );
    let produce = produce.on(&device);
    let pass = flow.add("pass", pass_on::<Envelope<u32>>()).on(&device);
    let consume = flow.add(
        "consume",
        task(move |ports: &mut SinkPorts<Envelope<u32>>, _| {
            let (took, may_release) = (took.take().unwrap(), may_release.take().unwrap());
            async move {
                let taken = ports.input.recv().await?.unwrap();
                took.send(()).unwrap();
                may_release.await.unwrap();
                drop(taken);
                assert!(ports.input.recv().await?.is_none());
                Ok(())
            }
            .boxed()
        }),
    );
    let consume = consume.on(&device);
    flow.connect_with(produce.output, pass.input, HubOptions::bounded(1).envelopes(1).envelope_bytes(64));
    flow.connect(pass.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(device.memory_peak(), 64, "the second hub needed no envelope of its own");
    freed(&device).await;
});

struct Keep(Shared<Envelope<u32>>);

impl Operator for Keep {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        lock(&self.0).push(envelope);
        Ok(())
    }
}

on_both!(h15_an_envelope_outlives_its_hub, async |device: Device| {
    let kept = shared();
    let mut flow = Flow::new("h15");
    let produce = flow.add("produce", SendEach::new([vec![1_u32, 2], vec![3, 4]]));
    let add = flow.add("add", Increment).on(&device);
    let keep = flow.add("keep", Keep(kept.clone())).on(&device);
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(8));
    flow.connect(add.output, keep.input);
    flow.run().await.unwrap();
    drop(flow);

    // Both hubs are gone; their envelopes are intact and on their device.
    let stream = Stream::named(&device, "afterwards").unwrap();
    let mut envelopes = std::mem::take(&mut *lock(&kept));
    assert_eq!(device.memory_in_use(), 16);
    let mut data = Vec::new();
    for envelope in &mut envelopes {
        assert_eq!((envelope.len(), envelope.location()), (2, device.name()));
        increment::launch(&stream, envelope).unwrap();
        let mut here = Buffer::<u32>::pinned(&device, 2).unwrap();
        stream.copy(envelope, &mut here).unwrap();
        data.extend_from_slice(here.read().await.unwrap());
    }
    assert_eq!(data, [3, 4, 5, 6]);
    drop(envelopes);
    freed(&device).await;
});

on_both!(h15_starvation_names_both_hubs, async |device: Device| {
    let kept = shared();
    let mut flow = Flow::new("h15");
    let produce = flow.add("produce", SendEach::new((0..10).map(|n| vec![n])));
    let pass = flow.add("pass", pass_on::<Envelope<u32>>()).on(&device);
    let keep = flow.add("keep", Keep(kept.clone())).on(&device);
    flow.connect_with(produce.output, pass.input, HubOptions::default().envelope_bytes(4));
    flow.connect(pass.output, keep.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    assert!(text.contains("`produce.output -> pass.input`"), "the hub that owns the envelopes: {text}");
    assert!(text.contains("`pass.output -> keep.input`"), "the hub that delivered them: {text}");
    assert!(text.contains("2 of the 2 envelopes"), "their number: {text}");
    assert_eq!(lock(&kept).len(), 2);
    lock(&kept).clear();
    drop(flow);
    freed(&device).await;
});

#[derive(Ports)]
struct FourPorts {
    #[input(at_least = 4)]
    left: Input<u32>,
    #[input(optional)]
    right: Input<u32>,
}

#[derive(Ports)]
#[ports(sum(left, right) = 4)]
struct SumPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
}

#[derive(Ports)]
struct EitherPorts {
    #[input(optional)]
    left: Input<u32>,
    #[input(optional)]
    right: Input<u32>,
}

#[derive(Ports)]
struct BatchPorts {
    #[input(batch = 4, within = "1h")]
    left: Input<u32>,
    #[input(optional)]
    right: Input<u32>,
}

#[derive(Ports)]
struct RoomPorts {
    #[output(room = 3)]
    output: Output<u32>,
}

/// Returns how many messages each run of an operator takes from both ports. All come from `send`.
async fn taken_in_each_run<P: Ports>(
    read: fn(&mut P) -> [&mut Input<u32>; 2],
    add: impl FnOnce(&mut Flow, TakesAll<P>) -> [wakeline::operator::InputHandle<u32>; 2],
) -> Vec<usize> {
    let (seen, mut numbers) = (shared(), 0..10);
    let mut flow = Flow::new("h14");
    let send = flow.add("send", source(move || std::future::ready(Ok(numbers.next()))));
    let silent = flow.add("silent", source(|| std::future::ready(Ok(None::<u32>))));
    let [left, right] = add(&mut flow, TakesAll { read, seen: seen.clone() });
    flow.connect(send.output, left);
    flow.connect(silent.output, right);
    within(flow.run()).await.unwrap();
    std::mem::take(&mut *lock(&seen))
}

struct TakesAll<P> {
    read: fn(&mut P) -> [&mut Input<u32>; 2],
    seen: Shared<usize>,
}

impl<P: Ports> Operator for TakesAll<P> {
    type Ports = P;

    async fn compute(&mut self, ports: &mut P, _cx: &mut Cx) -> Result<()> {
        let mut taken = 0;
        for input in (self.read)(ports) {
            while input.try_take()?.is_some() {
                taken += 1;
            }
        }
        lock(&self.seen).push(taken);
        Ok(())
    }
}

/// By default a queue holds as many messages as its reader waits for, with any kind of condition.
#[tokio::test]
async fn h14_plain_connect_holds_as_many_messages_as_its_reader_waits_for() {
    let four = taken_in_each_run(
        |ports: &mut FourPorts| [&mut ports.left, &mut ports.right],
        |flow, operator| {
            let added = flow.add("take", operator);
            [added.left, added.right]
        },
    );
    assert_eq!(four.await, [4, 4, 2]);
    let batch = taken_in_each_run(
        |ports: &mut BatchPorts| [&mut ports.left, &mut ports.right],
        |flow, operator| {
            let added = flow.add("take", operator);
            [added.left, added.right]
        },
    );
    assert_eq!(batch.await, [4, 4, 2]);
    let together = taken_in_each_run(
        |ports: &mut SumPorts| [&mut ports.left, &mut ports.right],
        |flow, operator| {
            let added = flow.add("take", operator);
            [added.left, added.right]
        },
    );
    assert_eq!(together.await, [4, 4, 2]);
    let whens: [fn(PortId, PortId) -> When; 4] = [
        |left, _| at_least(left, 4).into_condition(),
        |left, _| each([(left, 4)]).into_condition(),
        |left, right| sum([left, right], 4).into_condition(),
        |left, right| any_of(at_least(right, 1), at_least(left, 4)),
    ];
    for (at, when) in whens.into_iter().enumerate() {
        let outside = taken_in_each_run(
            |ports: &mut EitherPorts| [&mut ports.left, &mut ports.right],
            |flow, operator| {
                let added = flow.add("take", operator);
                let added = added.clone().when(when(added.left.into(), added.right.into()));
                [added.left, added.right]
            },
        );
        assert_eq!(outside.await, [4, 4, 2], "condition {at}");
    }
}

/// The same for room at an output, and for envelopes, of which there is one more.
#[tokio::test]
async fn h14_plain_connect_has_the_room_and_the_envelopes_that_are_waited_for() {
    let seen = shared();
    let noted = seen.clone();
    let mut flow = Flow::new("h14");
    let send = flow.add(
        "send",
        task(|ports: &mut RoomPorts, cx: &mut Cx| {
            Box::pin(async move {
                for _ in 0..3 {
                    assert!(cx.ready(ports).await);
                    for number in 0..3 {
                        ports.output.try_send(number)?;
                    }
                }
                Ok(())
            })
        }),
    );
    let take = flow.add(
        "take",
        sink(move |number: u32| {
            lock(&noted).push(number);
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(send.output, take.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [0, 1, 2, 0, 1, 2, 0, 1, 2]);

    #[derive(Ports)]
    struct EnvelopesPorts {
        #[input(at_least = 4)]
        input: Input<Envelope<u32>>,
    }

    struct Batches(Shared<Vec<u32>>);

    impl Operator for Batches {
        type Ports = EnvelopesPorts;

        async fn compute(&mut self, ports: &mut EnvelopesPorts, _cx: &mut Cx) -> Result<()> {
            let mut batch = Vec::new();
            for envelope in ports.input.take_batch()? {
                batch.extend_from_slice(envelope.read().await?);
            }
            lock(&self.0).push(batch);
            Ok(())
        }
    }

    for (hub, wanted) in [
        (HubOptions::default().envelope_bytes(4), None),
        (HubOptions::bounded(6).envelope_bytes(4), None),
        (
            HubOptions::default().envelope_bytes(4).envelopes(3),
            Some("waits for 4 messages, but the hub has 3 envelopes"),
        ),
    ] {
        let seen = shared();
        let device = emulated();
        let mut flow = Flow::new("h14");
        let produce = flow.add("produce", SendEach::new((0..10).map(|n| vec![n])));
        let add = flow.add("add", Increment).on(&device);
        let batches = flow.add("batches", Batches(seen.clone()));
        flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(4).envelopes(8));
        flow.connect_with(add.output, batches.input, hub);
        match (within(flow.run()).await, wanted) {
            (Ok(_), None) => assert_eq!(*lock(&seen), [vec![1, 2, 3, 4], vec![5, 6, 7, 8], vec![9, 10]]),
            (Err(error), Some(wanted)) => assert!(error.to_string().contains(wanted), "{error}"),
            (outcome, _) => panic!("{hub:?}: {outcome:?}"),
        }
    }
}

struct Window {
    kept: Vec<Envelope<u32>>,
    sums: Shared<u32>,
}

impl Operator for Window {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.kept.push(ports.input.take()?);
        if self.kept.len() == 4 {
            self.kept.remove(0);
            let mut sum = 0;
            for envelope in &self.kept {
                sum += envelope.read().await?[0];
            }
            lock(&self.sums).push(sum);
        }
        Ok(())
    }
}

/// `pass`, in between, keeps no envelope, so the stall must not name it.
#[tokio::test]
async fn h15_a_stall_names_the_operators_that_keep_envelopes() {
    let mut flow = Flow::new("h15");
    let produce = flow.add("produce", SendEach::new((0..9).map(|n| vec![n])));
    let pass = flow.add("pass", pass_on::<Envelope<u32>>());
    let window = flow.add("window", Window { kept: Vec::new(), sums: shared() });
    flow.connect_with(produce.output, pass.input, HubOptions::default().envelope_bytes(4).envelopes(2));
    flow.connect(pass.output, window.input);
    let error = within(flow.run()).await.unwrap_err().to_string();
    let wanted = "2 of the 2 envelopes of hub `produce.output -> pass.input` at this location are in use; `window` keeps 2 of \
                  them: set `.envelopes(4)`";
    assert!(error.contains(wanted), "{error}");
}

struct Hoard;

impl Operator for Hoard {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut blanks = Vec::new();
        for _ in 0..4 {
            blanks.push(ports.output.blank().await?);
        }
        Ok(())
    }
}

/// A writer that waits for another blank during a run may itself keep the missing envelopes.
#[tokio::test]
async fn h15_a_writer_that_keeps_its_blanks_is_named() {
    let mut flow = Flow::new("h15");
    let hoard = flow.add("hoard", Hoard);
    let end = flow.add("end", sink(async |_: Envelope<u32>| Ok(())));
    flow.connect_with(hoard.output, end.input, HubOptions::default().envelope_bytes(4).envelopes(3));
    let error = within(flow.run()).await.unwrap_err().to_string();
    assert!(
        error.contains(
            "3 of the 3 envelopes of hub `hoard.output -> end.input` at this location are in use; `hoard` keeps 3"
        ),
        "{error}"
    );
}

/// With the number of envelopes that the stall names, the flow runs.
#[tokio::test]
async fn h15_a_stall_names_the_number_of_envelopes_that_a_window_needs() {
    for (hub, fails) in [(HubOptions::default(), true), (HubOptions::default().envelopes(4), false)] {
        let sums = shared();
        let mut flow = Flow::new("h15");
        let produce = flow.add("produce", SendEach::new((0..9).map(|n| vec![n])));
        let window = flow.add("window", Window { kept: Vec::new(), sums: sums.clone() });
        flow.connect_with(produce.output, window.input, hub.envelope_bytes(4));
        match within(flow.run()).await {
            Err(error) if fails => assert_eq!(
                error.to_string(),
                "stalled: no operator can make progress:\n  \
                 - `produce` waits for a blank envelope: 2 of the 2 envelopes of hub `produce.output -> window.input` at this \
                 location are in use; `window` keeps 2 of them: set `.envelopes(4)`\n  \
                 - `window` waits for a message in hub `produce.output -> window.input`"
            ),
            Ok(_) if !fails => assert_eq!(*lock(&sums), [6, 9, 12, 15, 18, 21]),
            other => panic!("{other:?}"),
        }
    }
}
