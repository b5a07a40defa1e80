//! Scenarios Q4, C4 and the ends of Q6: one output with several readers.

use std::{
    future::ready,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use common::*;
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use tokio::sync::oneshot;
use wakeline::{
    Fork, Message, Stream,
    condition::room,
    device::Emulated,
    hub::{Copier, Outcome, RawEnvelope},
    operator::{InputHandle, concurrent},
    prelude::*,
};

/// Sends the numbers 0 to `last`, exclusive.
fn numbers(last: u64) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut next = 0..last;
    source(move || ready(Ok(next.next())))
}

async fn q4_all(readers: usize) {
    let mut flow = Flow::new("q4");
    let write = flow.add("write", numbers(1000));
    let all: Vec<_> = (0..readers).map(|_| shared()).collect();
    let inputs: Vec<InputHandle<u64>> =
        all.iter().enumerate().map(|(at, seen)| flow.add(format!("read {at}"), keep(seen)).input).collect();
    flow.connect_with(write.output, inputs, HubOptions::bounded(3));
    let report = within(flow.run()).await.unwrap();
    let wanted: Vec<_> = (0..1000).collect();
    all.iter().for_each(|seen| assert_eq!(*lock(seen), wanted, "each once, in order"));
    assert_eq!(report.operator("write").unwrap().messages_out, 1000, "a send counts once for all readers");
    assert_eq!(report.operator("write").unwrap().bytes_out, 8000);
    assert_eq!(report.untaken, 0);
}

/// The size of a derived message includes the data that its fields point to.
#[tokio::test]
async fn q4_the_report_counts_what_a_message_carries() {
    #[derive(Message)]
    struct Samples(Box<[f32]>);
    #[derive(Message)]
    struct Named {
        name: String,
        samples: Samples,
    }
    let mut flow = Flow::new("q4");
    let mut left = 1000;
    let write = flow.add(
        "write",
        source(move || {
            left -= 1;
            let samples = Samples(vec![0.0; 100].into());
            ready(Ok((left >= 0).then(|| Named { name: "some".into(), samples })))
        }),
    );
    let read = flow.add("read", sink(async |_: Named| Ok(())));
    flow.connect(write.output, read.input);
    let report = within(flow.run()).await.unwrap();
    let wanted = 1000 * (size_of::<Named>() as u64 + 4 + 400);
    assert_eq!(report.operator("write").unwrap().bytes_out, wanted);
    assert_eq!(report.operator("read").unwrap().bytes_in, wanted);
}

#[tokio::test]
async fn q4_every_reader_gets_every_message() {
    for readers in [1, 2, 7] {
        q4_all(readers).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q4_every_reader_gets_every_message_on_two_threads() {
    for _ in 0..20 {
        q4_all(3).await;
    }
}

/// An output may be connected repeatedly, for example when readers are added in a loop.
#[tokio::test]
async fn q4_an_output_connected_in_a_loop() {
    let mut flow = Flow::new("q4");
    let write = flow.add("write", numbers(3));
    let all = [shared(), shared()];
    for (at, seen) in all.iter().enumerate() {
        let read = flow.add(format!("read {at}"), keep(seen));
        flow.connect(write.output, [read.input]);
    }
    within(flow.run()).await.unwrap();
    all.iter().for_each(|seen| assert_eq!(*lock(seen), [0, 1, 2]));
}

#[tokio::test]
async fn q4_a_slow_branch_with_a_bounded_hub_blocks_the_fast_one() {
    let (go, may_go) = oneshot::channel();
    let (fast, slow) = (shared(), shared());
    let mut flow = Flow::new("q4");
    let write = flow.add("write", numbers(100));
    let reads_fast = flow.add("fast", keep(&fast));
    let reads_slow = flow.add("slow", held(2, may_go, &slow));
    flow.connect(write.output, (reads_fast.input, reads_slow.input.with(HubOptions::bounded(5))));
    let running = flow.spawn().unwrap();
    until("the slow one's queue is full", || lock(&fast).len() == 7).await;
    // One thread, and all tasks have been polled: nothing else can change.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!((lock(&fast).len(), lock(&slow).len()), (7, 2), "two were taken, five are queued");
    go.send(()).unwrap();
    within(running).await.unwrap();
    let wanted: Vec<_> = (0..100).collect();
    assert_eq!((&*lock(&fast), &*lock(&slow)), (&wanted, &wanted));
}

/// Takes `count` messages and ends.
fn first(count: usize, seen: &Shared<u64>) -> impl Operator<Ports = SinkPorts<u64>> + use<> {
    let seen = seen.clone();
    task(move |ports: &mut SinkPorts<u64>, _| {
        let seen = seen.clone();
        async move {
            for _ in 0..count {
                let number = ports.input.recv().await?;
                lock(&seen).extend(number);
            }
            Ok(())
        }
        .boxed()
    })
}

/// Holds for every reader: the one that is sent the message itself and those that are sent a clone.
#[tokio::test]
async fn q6_a_reader_that_has_ended_is_skipped() {
    for early in 0..3 {
        let all = [shared(), shared(), shared()];
        let mut flow = Flow::new("q6");
        let write = flow.add("write", numbers(50));
        let inputs: Vec<_> = all
            .iter()
            .enumerate()
            .map(|(at, seen)| match at {
                at if at == early => flow.add(format!("read {at}"), first(5, seen)).input,
                _ => flow.add(format!("read {at}"), keep(seen)).input,
            })
            .collect();
        flow.connect(write.output, inputs);
        let report = within(flow.run()).await.unwrap();
        for (at, seen) in all.iter().enumerate() {
            assert_eq!(lock(seen).len(), if at == early { 5 } else { 50 }, "reader {at}, {early} ends early");
        }
        assert_eq!(report.operator("write").unwrap().messages_out, 50);
        assert!(report.untaken <= 1, "{}", report.untaken);
    }
}

#[tokio::test]
async fn q6_the_writer_ends_when_all_its_readers_have() {
    let (left, right) = (shared(), shared());
    let mut flow = Flow::new("q6");
    let write = flow.add("write", numbers(u64::MAX));
    let few = flow.add("few", first(3, &left));
    let more = flow.add("more", first(30, &right));
    flow.connect(write.output, [few.input, more.input]);
    within(flow.run()).await.unwrap();
    assert_eq!((lock(&left).len(), lock(&right).len()), (3, 30));
}

/// The operator in the middle waits for a message and always has room: it ends as soon as its reader has.
#[tokio::test]
async fn q6_the_end_propagates_upstream_past_an_operator_that_waits_for_a_message() {
    // A combinator uses its own waker, which may be the first one registered.
    for (readers, combined) in [(1, false), (2, false), (1, true), (2, true)] {
        let mut flow = Flow::new("q6");
        let quiet = flow.add(
            "quiet",
            task(|ports: &mut SourcePorts<u64>, _| {
                async move {
                    ports.output.send(1).await?;
                    until("its reader has ended", || ports.output.is_closed()).await;
                    Ok(())
                }
                .boxed()
            }),
        );
        let pass = flow.add(
            "pass",
            task(move |ports: &mut MapPorts<u64, u64>, cx| {
                async move {
                    if combined {
                        let ready: Option<bool> = FuturesUnordered::from_iter([cx.ready(ports)]).next().await;
                        assert_eq!(ready, Some(true));
                    }
                    while cx.ready(ports).await {
                        let number = ports.input.take()?;
                        ports.output.send(number).await?;
                    }
                    Ok(())
                }
                .boxed()
            }),
        );
        flow.connect(quiet.output, pass.input);
        let inputs: Vec<_> = (0..readers).map(|at| flow.add(format!("end {at}"), first(1, &shared())).input).collect();
        flow.connect_with(pass.output, inputs, HubOptions::bounded(8));
        within(flow.run()).await.unwrap();
    }
}

#[tokio::test]
async fn q6_what_was_not_taken_is_counted_for_each_reader() {
    let ended = Arc::new(AtomicU64::new(0));
    let mut flow = Flow::new("q6");
    let write = flow.add("write", numbers(4));
    let reader = |takes: u64| {
        let ended = ended.clone();
        task(move |ports: &mut SinkPorts<u64>, _| {
            let ended = ended.clone();
            async move {
                until("all have arrived", || ports.input.len() == 4).await;
                for number in 0..takes {
                    assert_eq!(ports.input.take()?, number);
                }
                ended.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            .boxed()
        })
    };
    let (one, three) = (flow.add("one", reader(1)), flow.add("three", reader(3)));
    flow.connect_with(write.output, [one.input, three.input], HubOptions::bounded(4));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(ended.load(Ordering::Relaxed), 2);
    assert_eq!(report.untaken, 3 + 1);
    assert_eq!(report.operator("write").unwrap().messages_out, 4);
}

// Each reader has its own envelope and does not see what another one writes.
on_both!(q4_an_envelope_goes_to_readers_on_the_device_and_on_the_host, async |device: Device| {
    let (here, there) = ([shared(), shared()], shared());
    let mut flow = Flow::new("q4");
    let produce = flow.add("produce", SendEach::new((0..20_u32).map(|n| vec![n; 64])));
    let first = flow.add("first", Increment).on(&device);
    let second = flow.add("second", Increment).on(&device);
    let third = flow.add("third", Increment).on(&device);
    let on_host = flow.add("on host", Collect(there.clone()));
    let ends = [flow.add("end 2", Collect(here[0].clone())), flow.add("end 3", Collect(here[1].clone()))];
    flow.connect_with(produce.output, first.input, HubOptions::default().envelope_bytes(256));
    flow.connect(first.output, [second.input, on_host.input, third.input]);
    flow.connect(second.output, ends[0].input);
    flow.connect(third.output, ends[1].input);

    let checked = flow.check().unwrap();
    let [copied] = &checked.copies[..] else { panic!("{checked}") };
    assert_eq!(&*copied.hub, "first.output -> third.input", "the second has the envelope itself, the host its copy");
    assert_eq!((&copied.device, copied.envelope_bytes), (&device, 256));
    assert!(checked.to_string().contains("256 B"), "{checked}");

    let report = flow.run().await.unwrap();
    let wanted = |plus: u32| (0..20).map(|n| vec![n + plus; 64]).collect::<Vec<_>>();
    assert_eq!(*lock(&there), wanted(1));
    here.iter().for_each(|seen| assert_eq!(*lock(seen), wanted(2), "each reader adds to its own envelope"));
    assert_eq!(report.operator("first").unwrap().messages_out, 20);
    assert_eq!(report.operator("first").unwrap().bytes_out, 20 * 256);
    // Two envelopes for arriving messages, and two for the third operator's copies.
    assert_eq!(device.memory_peak(), 4 * 256);
    drop(flow);
    freed(&device).await;
});

// From the host to two readers on a device and one on the host: one copy per reader on the device, none on the host.
on_both!(q4_host_envelopes_go_to_readers_on_a_device_and_on_the_host, async |device: Device| {
    let (stays, goes) = (shared(), [shared(), shared()]);
    let mut flow = Flow::new("q4");
    let produce = flow.add("produce", SendEach::new((0..20_u32).map(|n| vec![n; 16])));
    let there = [flow.add("one", Increment).on(&device), flow.add("other", Increment).on(&device)];
    let here = flow.add("here", Collect(stays.clone()));
    let ends = [flow.add("end 0", Collect(goes[0].clone())), flow.add("end 1", Collect(goes[1].clone()))];
    let hub = HubOptions::default().envelope_bytes(64);
    flow.connect_with(produce.output, [there[0].input, there[1].input, here.input], hub);
    flow.connect(there[0].output, ends[0].input);
    flow.connect(there[1].output, ends[1].input);
    let copies = flow.check().unwrap().copies;
    assert_eq!(copies.len(), 1, "the device could have had one copy for both: {copies:?}");
    flow.run().await.unwrap();
    let wanted = |plus: u32| (0..20).map(|n| vec![n + plus; 16]).collect::<Vec<_>>();
    assert_eq!(*lock(&stays), wanted(0));
    goes.iter().for_each(|seen| assert_eq!(*lock(seen), wanted(1)));
    assert_eq!(device.memory_peak(), 2 * 2 * 64);
    drop(flow);
    freed(&device).await;
});

// An envelope from the device is forwarded before its data has arrived; the host copies it once it has.
on_both!(q4_the_host_copies_after_the_data_has_arrived, async |device: Device| {
    let seen = [shared(), shared()];
    let mut flow = Flow::new("q4");
    let produce = flow.add("produce", SendEach::new((0..20_u32).map(|n| vec![n; 16])));
    let add = flow.add("add", Increment).on(&device);
    let pass = flow.add("pass", pass_on::<Envelope<u32>>());
    let ends = [flow.add("end 0", Collect(seen[0].clone())), flow.add("end 1", Collect(seen[1].clone()))];
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(64));
    flow.connect(add.output, pass.input);
    flow.connect_with(pass.output, [ends[0].input, ends[1].input], HubOptions::bounded(2).envelopes(3));
    flow.run().await.unwrap();
    let wanted: Vec<_> = (0..20).map(|n| vec![n + 1; 16]).collect();
    seen.iter().for_each(|seen| assert_eq!(*lock(seen), wanted));
    drop(flow);
    freed(&device).await;
});

// This includes the reader that is sent the messages themselves.
on_both!(q6_readers_of_envelopes_end_one_after_the_other, async |device: Device| {
    for early in 0..3 {
        let seen = [shared(), shared(), shared()];
        let mut flow = Flow::new("q6");
        let produce = flow.add("produce", SendEach::new((0..30_u32).map(|n| vec![n; 4])));
        let add = flow.add("add", Increment).on(&device);
        flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(16));
        let mut inputs = Vec::new();
        for (at, seen) in seen.iter().enumerate() {
            let mut left = if at == early { 3 } else { 1000 };
            let short = task(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
                async move {
                    while left > 0 && cx.ready(ports).await {
                        left -= 1;
                        let envelope = ports.input.take()?;
                        ports.output.send(envelope).await?;
                    }
                    Ok(())
                }
                .boxed()
            });
            let pass = flow.add(format!("pass {at}"), short);
            let pass = if at < 2 { pass.on(&device) } else { pass };
            let end = flow.add(format!("end {at}"), Collect(seen.clone()));
            flow.connect(pass.output, end.input);
            inputs.push(pass.input);
        }
        flow.connect(add.output, inputs);
        flow.run().await.unwrap();
        for (at, seen) in seen.iter().enumerate() {
            let wanted: Vec<_> = (1..=if at == early { 3 } else { 30 }).map(|n| vec![n; 4]).collect();
            assert_eq!(*lock(seen), wanted, "reader {at}, {early} ends early");
        }
        drop(flow);
        freed(&device).await;
    }
});

/// A user-defined message: its envelopes are copied, its fields are cloned, and its events are shared.
#[derive(Message)]
struct Frame {
    number: usize,
    #[envelope]
    left: Envelope<u32>,
    #[envelope]
    right: Option<Box<Envelope<u32>>>,
    #[event]
    filled: wakeline::stream::Event,
}

#[derive(Ports)]
struct ShowPorts {
    #[input(event = "filled", done)]
    frames: Input<Frame>,
}

/// Runs on the device, copies each message to the host and records it.
struct Show(Shared<(usize, u32, u32)>);

impl Operator for Show {
    type Ports = ShowPorts;

    async fn compute(&mut self, ports: &mut ShowPorts, cx: &mut Cx) -> Result<()> {
        let Frame { number, left, right, filled } = ports.frames.take()?;
        assert!(filled.query()?, "the input waits for it");
        let mut here = Buffer::<u32>::pinned(cx.device(), 1)?;
        cx.stream()?.copy(&left, &mut here)?;
        let left = here.read().await?[0];
        cx.stream()?.copy(&**right.as_ref().unwrap(), &mut here)?;
        let right = here.read().await?[0];
        lock(&self.0).push((number, left, right));
        Ok(())
    }
}

on_both!(q4_a_derived_message_goes_to_several, async |device: Device| {
    let seen = [shared(), shared()];
    let mut flow = Flow::new("q4");
    let make = flow.add(
        "make",
        task(|ports: &mut SourcePorts<Frame>, cx| {
            async move {
                for number in 0..10 {
                    let stream = cx.stream()?;
                    let (mut left, mut right) = (Buffer::new(stream.device(), 1)?, Buffer::new(stream.device(), 1)?);
                    stream.fill(&mut left, number)?;
                    stream.fill(&mut right, 2 * number)?;
                    let filled = wakeline::stream::Event::new();
                    filled.record(stream)?;
                    let (left, right) = (left.into(), Some(Box::new(right.into())));
                    ports.output.send(Frame { number: number as usize, left, right, filled }).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let make = make.on(&device);
    let shows = seen.each_ref().map(|seen| Show(seen.clone()));
    let mut inputs = Vec::new();
    for (at, show) in shows.into_iter().enumerate() {
        inputs.push(flow.add(format!("show {at}"), show).on(&device).frames);
    }
    flow.connect_with(make.output, inputs, HubOptions::bounded(2).envelopes(4).envelope_bytes(4));
    flow.run().await.unwrap();
    let wanted: Vec<_> = (0..10).map(|n| (n as usize, n, 2 * n)).collect();
    seen.iter().for_each(|seen| assert_eq!(*lock(seen), wanted));
    drop(flow);
    freed(&device).await;
});

#[tokio::test]
async fn q4_more_envelopes_than_can_be_copied_is_an_error() {
    let mut flow = Flow::new("q4");
    let mut once = Some(());
    let write = flow.add(
        "write",
        source(move || {
            let three = || (0..3).map(|_| Envelope::from(Buffer::<u8>::pinned(&Device::host(), 4).unwrap())).collect();
            ready(Ok(once.take().map(|()| three())))
        }),
    );
    let all = [shared::<Vec<Envelope<u8>>>(), shared()];
    let (one, other) = (flow.add("one", keep(&all[0])), flow.add("other", keep(&all[1])));
    flow.connect_with(write.output, [one.input, other.input], HubOptions::default().envelope_bytes(4));
    let error = within(flow.run()).await.unwrap_err();
    let message = error.to_string();
    assert!(message.contains("3 envelopes") && message.contains("`write.output -> other.input`"), "{message}");
    assert!(message.contains("HubOptions::envelopes"), "{message}");
}

/// A reader keeps every envelope, so its hub has none left to copy to: no reader is sent further messages.
#[tokio::test]
async fn q8_a_reader_that_keeps_its_envelopes_is_named() {
    let device = emulated();
    let (kept, seen) = (shared(), shared());
    let mut flow = Flow::new("q8");
    let produce = flow.add("produce", SendEach::new((0..9).map(|n| vec![n])));
    let pass = flow.add("pass", pass_on::<Envelope<u32>>());
    let keeps = flow.add("keeps", keep::<Envelope<u32>>(&kept)).on(&device);
    let reads = flow.add("reads", Collect(seen.clone()));
    flow.connect_with(produce.output, pass.input, HubOptions::default().envelope_bytes(4));
    flow.connect(pass.output, [keeps.input, reads.input]);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    let message = error.to_string();
    assert!(message.contains("`pass` waits for an envelope on emulated"), "{message}");
    assert!(
        message.contains("2 of the 2 envelopes of hub `pass.output -> keeps.input` at this location are in use"),
        "{message}"
    );
    lock(&kept).clear();
    drop(flow);
    freed(&device).await;
}

/// A reader keeps one of each two envelopes, and its hub's last envelope is not enough to copy the next two to.
#[tokio::test]
async fn q8_a_missing_second_envelope_is_a_stall() {
    let kept = shared();
    let mut flow = Flow::new("q8");
    let mut left = 5;
    let write = flow.add(
        "write",
        source(move || {
            left -= 1;
            let two = || (0..2).map(|_| Envelope::from(Buffer::<u8>::pinned(&Device::host(), 4).unwrap())).collect();
            ready(Ok((left > 0).then(two)))
        }),
    );
    let one = flow.add("one", sink(|_: Vec<Envelope<u8>>| ready(Ok(()))));
    let keeps = kept.clone();
    let half = flow.add(
        "half",
        sink(move |mut two: Vec<Envelope<u8>>| {
            lock(&keeps).extend(two.pop());
            ready(Ok(()))
        }),
    );
    flow.connect_with(write.output, [one.input, half.input], HubOptions::bounded(1).envelopes(3).envelope_bytes(4));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let message = error.to_string();
    assert!(
        message.contains("`write` waits for 2 envelopes on the host to copy to: 2 of the 3 envelopes"),
        "{message}"
    );
    assert_eq!(lock(&kept).len(), 2);
}

/// A copy for one reader fails: the flow fails with the hub's name in the error, and nothing hangs.
#[tokio::test]
async fn q4_a_copy_for_one_reader_that_fails_stops_the_flow() {
    let device = emulated_with(Emulated::new().faults(wakeline::device::Faults::new().fail_copy(3)));
    let seen = [shared(), shared()];
    let mut flow = Flow::new("q4");
    let produce = flow.add("produce", SendEach::new((0..9).map(|n| vec![n])));
    let here = flow.add("here", Collect(seen[0].clone()));
    let there = flow.add("there", Increment).on(&device);
    let end = flow.add("end", Collect(seen[1].clone()));
    flow.connect_with(produce.output, [here.input, there.input], HubOptions::default().envelope_bytes(4));
    flow.connect(there.output, end.input);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_device_lost(), "{error}");
}

/// Sends `count` messages in each run with `try_send`: there must be room for all.
fn bursts(count: u64, runs: Shared<u64>) -> impl FnMut(&mut BurstPorts) -> Result<()> {
    move |ports| {
        for number in 0..count {
            ports.output.try_send(number)?;
        }
        lock(&runs).push(count);
        Ok(())
    }
}

#[derive(Ports)]
struct BurstPorts {
    #[output(room = 3, capacity = 4)]
    output: Output<u64>,
}

struct Burst<F>(F, u64);

impl<F: FnMut(&mut BurstPorts) -> Result<()> + Send + 'static> Operator for Burst<F> {
    type Ports = BurstPorts;

    async fn compute(&mut self, ports: &mut BurstPorts, cx: &mut Cx) -> Result<()> {
        self.1 -= 1;
        if self.1 == 0 {
            cx.finish();
        }
        (self.0)(ports)
    }
}

#[tokio::test]
async fn c4_room_for_several_in_every_connected_input() {
    for readers in [1, 3] {
        let runs = shared();
        let mut flow = Flow::new("c4");
        let burst = flow.add("burst", Burst(bursts(3, runs.clone()), 50));
        let all: Vec<_> = (0..readers).map(|_| shared()).collect();
        let inputs: Vec<_> =
            all.iter().enumerate().map(|(at, seen)| flow.add(format!("read {at}"), keep(seen)).input).collect();
        flow.connect(burst.output, inputs);
        within(flow.run()).await.unwrap();
        assert_eq!(lock(&runs).len(), 50);
        let wanted: Vec<_> = (0..50).flat_map(|_| 0..3).collect();
        all.iter().for_each(|seen| assert_eq!(*lock(seen), wanted));
    }
}

#[tokio::test]
async fn c4_more_room_than_a_queue_has_is_an_error_before_running() {
    let runs = shared();
    let mut flow = Flow::new("c4");
    let burst = flow.add("burst", Burst(bursts(3, runs.clone()), 1));
    let (one, other) = (flow.add("one", keep(&shared())), flow.add("other", keep(&shared())));
    flow.connect(burst.output, [one.input.with(HubOptions::bounded(2)), other.input.into()]);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let message = error.to_string();
    assert!(
        message.contains("hub `burst.output -> one.input`: `burst.output` waits for room for 3 messages"),
        "{message}"
    );
    assert!(message.contains("its queue holds at most 2") && !message.contains("other"), "{message}");
    assert!(lock(&runs).is_empty());
}

/// A condition from outside replaces the attribute: room for fewer fits a smaller queue, and room for any number fits
/// a hub that drops messages.
#[tokio::test]
async fn c4_room_from_outside_replaces_the_attributes() {
    for (hub, wanted) in [(HubOptions::bounded(1), 1), (HubOptions::drop_oldest(1), 3)] {
        let (runs, seen) = (shared(), shared());
        let mut flow = Flow::new("c4");
        let burst = flow.add("burst", Burst(bursts(wanted, runs.clone()), 5));
        let read = flow.add("read", keep(&seen));
        flow.connect_with(burst.output, read.input, hub);
        let output = burst.output;
        let _burst = burst.when(room(output, wanted as usize));
        within(flow.run()).await.unwrap();
        assert_eq!(lock(&runs).len(), 5);
    }
}

#[tokio::test]
async fn c4_more_room_from_outside_than_there_are_envelopes_is_an_error_before_running() {
    let mut flow = Flow::new("c4");
    let make = flow.add("make", SendEach::new([vec![1_u32]]));
    let end = flow.add("end", Collect(shared()));
    flow.connect_with(make.output, end.input, HubOptions::bounded(3).envelopes(2).envelope_bytes(4));
    let output = make.output;
    let _make = make.when(room(output, 3));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let message = error.to_string();
    let wanted = "`make.output` waits for room for 3 messages, but the hub has 2 envelopes: set 3 or more";
    assert!(message.contains(wanted), "{message}");
}

#[derive(Ports)]
struct AnywayPorts {
    #[output(optional)]
    output: Output<u64>,
}

#[tokio::test]
async fn c4_an_offer_on_an_optional_output_reports_each_reader() {
    let (go, may_go) = oneshot::channel();
    let (ended, has_ended) = oneshot::channel::<()>();
    let (mut go, mut ended, mut has_ended) = (Some(go), Some(ended), Some(has_ended));
    let (slow, few) = (shared(), shared());
    let mut flow = Flow::new("c4");
    let offers = flow.add(
        "offers",
        task(move |ports: &mut AnywayPorts, cx| {
            let (go, has_ended) = (go.take().unwrap(), has_ended.take().unwrap());
            async move {
                use Outcome::{Closed, Full, Sent};
                for number in 0..2 {
                    assert!(cx.ready(ports).await);
                    assert_eq!(ports.output.offer(number)?.outcomes, [Sent, Sent]);
                }
                // The second reader takes only those two.
                has_ended.await.unwrap();
                until("the second end is seen", || matches!(ports.output.offer(7).unwrap().outcomes[1], Closed)).await;
                assert!(cx.ready(ports).await, "whether there is room or not");
                let offer = ports.output.offer(8)?;
                assert_eq!((&offer.outcomes[..], offer.kept), (&[Full, Closed][..], Some(8)));
                go.send(()).unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    let slow_one = flow.add("slow", held(0, may_go, &slow));
    let noted = few.clone();
    let few_one = flow.add(
        "few",
        task(move |ports: &mut SinkPorts<u64>, _| {
            let (ended, noted) = (ended.take().unwrap(), noted.clone());
            async move {
                for _ in 0..2 {
                    let number = ports.input.recv().await?;
                    lock(&noted).extend(number);
                }
                ended.send(()).unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect_with(offers.output, [slow_one.input, few_one.input], HubOptions::bounded(3));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&slow), [0, 1, 7]);
    assert_eq!(*lock(&few), [0, 1]);
    assert_eq!(report.operator("offers").unwrap().messages_out, 3);
    assert_eq!(report.untaken, 0);
}

/// When no reader is left to offer to, the operator ends, whatever else it waits for.
#[tokio::test]
async fn c4_an_optional_output_ends_with_its_readers() {
    struct Offers;
    impl Operator for Offers {
        type Ports = AnywayPorts;

        async fn compute(&mut self, ports: &mut AnywayPorts, _cx: &mut Cx) -> Result<()> {
            ports.output.offer(1)?;
            Ok(())
        }
    }
    let seen = [shared(), shared()];
    let mut flow = Flow::new("c4");
    let offers = flow.add("offers", Offers);
    let (two, three) = (flow.add("two", first(2, &seen[0])), flow.add("three", first(3, &seen[1])));
    flow.connect(offers.output, [two.input, three.input]);
    within(flow.run()).await.unwrap();
    assert_eq!((lock(&seen[0]).len(), lock(&seen[1]).len()), (2, 3));
}

/// A message whose second fork fails, if `Failure` is set.
struct Picky {
    data: Envelope<u32>,
    fails: Option<Failure>,
    forks: AtomicU64,
}

#[derive(Clone, Copy)]
enum Failure {
    Error,
    Panic,
}

impl Message for Picky {
    const CARRIES_ENVELOPES: bool = true;
    const ELEMENT_BYTES: usize = 4;

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        self.data.envelopes(visit);
    }
}

impl Fork for Picky {
    fn fork(&self, copier: &mut Copier<'_>) -> Result<Self> {
        match self.fails.filter(|_| self.forks.fetch_add(1, Ordering::Relaxed) % 2 == 1) {
            Some(Failure::Error) => return Err(Error::new(ErrorKind::Usage, "not for this one")),
            Some(Failure::Panic) => panic!("a fork"),
            None => {}
        }
        Ok(Self { data: self.data.fork(copier)?, fails: None, forks: AtomicU64::new(0) })
    }
}

#[derive(Ports)]
struct PickyPorts {
    #[output(optional)]
    output: Output<Picky>,
}

/// Sends three messages; the fork of the second fails.
struct SendsPicky(u32, Failure);

impl Operator for SendsPicky {
    type Ports = PickyPorts;

    async fn compute(&mut self, ports: &mut PickyPorts, cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        let data = Buffer::wrap(vec![self.0; 4])?.0.into();
        let fails = (self.0 == 2).then_some(self.1);
        let send = ports.output.send(Picky { data, fails, forks: AtomicU64::new(0) });
        let sent = AssertUnwindSafe(send).catch_unwind().await;
        assert_eq!(matches!(sent, Ok(Ok(()))), self.0 != 2);
        if self.0 == 3 {
            cx.finish();
        }
        Ok(())
    }
}

/// The envelopes of forks that were made before the failure return to their pool.
#[tokio::test]
async fn q4_a_failed_fork_loses_its_message_and_no_envelope() {
    for failure in [Failure::Error, Failure::Panic] {
        let mut flow = Flow::new("q4");
        let sends = flow.add("sends", SendsPicky(0, failure));
        let all = [(); 3].map(|()| shared());
        let readers = all.clone().map(|seen| {
            sink(move |message: Picky| {
                let seen = seen.clone();
                async move {
                    let number = message.data.read().await?[0];
                    lock(&seen).push(number);
                    Ok(())
                }
            })
        });
        let mut number = 0..;
        let inputs = readers.map(|reader| flow.add(format!("read {:?}", number.next()), reader).input);
        // One envelope per hub: a leaked one would stall the flow.
        flow.connect_with(sends.output, inputs, HubOptions::bounded(1).envelopes(1).envelope_bytes(16));
        within(flow.run()).await.unwrap();
        all.iter().for_each(|seen| assert_eq!(*lock(seen), [1, 3]));
    }
}

/// Sends an envelope on the host that a device has not written yet.
#[derive(Clone)]
struct SendsUnwritten(Stream);

#[derive(Ports)]
struct UnwrittenPorts {
    #[input]
    input: Input<u32>,
    #[output]
    output: Output<Envelope<u32>>,
}

impl Operator for SendsUnwritten {
    type Ports = UnwrittenPorts;

    async fn compute(&mut self, ports: &mut UnwrittenPorts, _cx: &mut Cx) -> Result<()> {
        let from = Buffer::from_slice(&self.0, &[ports.input.take()?; 4])?;
        let mut to = Buffer::<u32>::pinned(self.0.device(), 4)?;
        self.0.copy(&from, &mut to)?;
        ports.output.send(to.into()).await?;
        Ok(())
    }
}

/// The host copies for the second reader once the data has arrived. Until then the flow's tasks sleep: otherwise the
/// paused clock would not advance, and the hold on the device would never be released.
#[test]
fn q4_a_concurrent_operator_sleeps_until_the_host_can_copy() {
    common::alone::within_bound(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
            let held = hold(&stream);
            let mut flow = Flow::new("q4");
            let mut numbers = [7_u32].into_iter();
            let write = flow.add("write", source(move || ready(Ok(numbers.next()))));
            let sends = flow.add("sends", concurrent(1, SendsUnwritten(stream)));
            let all = [shared(), shared()];
            let [one, other] = all.clone().map(Collect);
            let (one, other) = (flow.add("one", one), flow.add("other", other));
            flow.connect(write.output, sends.input);
            flow.connect_with(sends.output, [one.input, other.input], HubOptions::bounded(1).envelope_bytes(16));
            let lets_go = async move {
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                drop(held);
            };
            tokio::join!(flow.run(), lets_go).0.unwrap();
            all.iter().for_each(|seen| assert_eq!(*lock(seen), [[7; 4]]));
        });
    });
}
