//! Scenarios Q2, Q3 and Q4: hubs that never block their writer and that count dropped messages.

use std::{future::ready, marker::PhantomData};

use common::*;
use futures::FutureExt;
use tokio::sync::oneshot;
use wakeline::{
    Stream,
    condition::{Status, any_of, at_least, at_most, each, predicate, sum},
    hub::Outcome,
    operator::{Consume, Produce},
    prelude::*,
};

/// Sends the numbers 0 to `last`, exclusive, and then signals `sent`.
fn numbers(last: u64, sent: oneshot::Sender<()>) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut sent = Some(sent);
    task(move |ports: &mut SourcePorts<u64>, cx| {
        let sent = sent.take().unwrap();
        async move {
            for number in 0..last {
                assert!(cx.ready(ports).await);
                ports.output.try_send(number)?;
            }
            // Not every test keeps the receiver.
            let _ = sent.send(());
            Ok(())
        }
        .boxed()
    })
}

async fn q3(hub: HubOptions) -> (Vec<u64>, Report) {
    let (sent, is_sent) = oneshot::channel();
    let seen = shared();
    let mut flow = Flow::new("q3");
    let write = flow.add("write", numbers(10, sent));
    let read = flow.add("read", held(0, is_sent, &seen));
    flow.connect_with(write.output, read.input, hub);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("write").unwrap().messages_out, 10);
    (std::mem::take(&mut *lock(&seen)), report)
}

#[tokio::test]
async fn q3_drop_oldest_counts_exactly() {
    let (seen, report) = q3(HubOptions::drop_oldest(3)).await;
    assert_eq!(seen, [7, 8, 9], "the newest are kept");
    let hub = report.hub("write.output -> read.input").unwrap();
    assert_eq!((hub.passed, hub.dropped, hub.untaken), (3, 7, 0));
    assert!(report.to_string().contains("hub `write.output -> read.input`: 3 messages passed, 7 dropped"), "{report}");
}

#[tokio::test]
async fn q3_drop_newest_counts_exactly() {
    let (seen, report) = q3(HubOptions::drop_newest(3)).await;
    assert_eq!(seen, [0, 1, 2], "the oldest are kept");
    let hub = report.hub("write.output -> read.input").unwrap();
    assert_eq!((hub.passed, hub.dropped, hub.untaken), (3, 7, 0));
}

#[tokio::test]
async fn q3_a_bounded_hub_drops_nothing() {
    let seen = shared();
    let mut flow = Flow::new("q3");
    let mut next = 0..10;
    let write = flow.add("write", source(move || ready(Ok(next.next()))));
    let noted = seen.clone();
    let read = flow.add(
        "read",
        sink(move |number: u64| {
            lock(&noted).push(number);
            ready(Ok(()))
        }),
    );
    flow.connect_with(write.output, read.input, HubOptions::bounded(3));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..10).collect::<Vec<_>>());
    let hub = report.hub("write.output -> read.input").unwrap();
    assert_eq!((hub.passed, hub.dropped, hub.untaken), (10, 0, 0));
    assert!(!report.to_string().contains("dropped"), "{report}");
}

/// Takes one message in each run; its condition guarantees that there is one.
struct TakesOne(Shared<u64>);

impl Operator for TakesOne {
    type Ports = SinkPorts<u64>;

    async fn compute(&mut self, ports: &mut SinkPorts<u64>, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        lock(&self.0).push(number);
        Ok(())
    }
}

/// Writer and reader run on separate threads: a message that made a run ready is there, whatever is sent meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q3_what_a_run_was_promised_is_not_dropped() {
    const SENT: u64 = 40_000;
    for hub in
        [HubOptions::drop_oldest(1), HubOptions::drop_oldest(4), HubOptions::drop_newest(1), HubOptions::drop_newest(4)]
    {
        let seen = shared();
        let mut flow = Flow::new("q3");
        let write = flow.add("write", numbers(SENT, oneshot::channel().0));
        let read = flow.add("read", TakesOne(seen.clone()));
        flow.connect_with(write.output, read.input, hub);
        let _write = write.on_own_thread();
        let report = within(flow.run()).await.unwrap();
        let seen = lock(&seen);
        assert!(seen.is_sorted_by(|one, next| one < next), "in order, without duplicates");
        let counts = &report.hubs[0];
        assert_eq!(counts.passed, seen.len() as u64);
        assert_eq!(counts.passed + counts.dropped, SENT, "{hub:?}");
        if hub == HubOptions::drop_oldest(1) || hub == HubOptions::drop_oldest(4) {
            assert_eq!(seen.last(), Some(&(SENT - 1)), "the newest is never lost");
        }
    }
}

/// Queued messages are replaced by newer ones. `recv` waits for these, and returns `None` only at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q3_recv_continues_after_dropped_messages() {
    const SENT: u64 = 300_000;
    let seen = shared();
    let mut flow = Flow::new("q3");
    let write = flow.add("write", numbers(SENT, oneshot::channel().0));
    let (go, may_go) = oneshot::channel();
    go.send(()).unwrap();
    let read = flow.add("read", held(0, may_go, &seen));
    flow.connect_with(write.output, read.input, HubOptions::drop_oldest(1));
    let _write = write.on_own_thread();
    let report = within(flow.run()).await.unwrap();
    assert_eq!(lock(&seen).last(), Some(&(SENT - 1)), "the newest is never lost");
    let counts = &report.hubs[0];
    assert_eq!((counts.passed + counts.dropped, counts.untaken), (SENT, 0));
}

/// Sends `chunks` envelopes, each as soon as one is available, and then signals `sent`.
fn chunks(chunks: u32, sent: oneshot::Sender<()>) -> impl Operator<Ports = SourcePorts<Envelope<u32>>> {
    let mut sent = Some(sent);
    task(move |ports: &mut SourcePorts<Envelope<u32>>, _| {
        let sent = sent.take().unwrap();
        async move {
            for chunk in 0..chunks {
                let mut envelope = ports.output.blank().await?;
                envelope.space().await?.fill(chunk);
                envelope.set_len(envelope.capacity())?;
                ports.output.send(envelope).await?;
            }
            sent.send(()).unwrap();
            Ok(())
        }
        .boxed()
    })
}

/// Adds one to each envelope on its device. Holds the first one until `go` is signalled.
fn held_increment(go: oneshot::Receiver<()>) -> impl Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>> {
    let mut go = Some(go);
    task(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
        let mut go = go.take();
        async move {
            while cx.ready(ports).await {
                let mut envelope = ports.input.take()?;
                if let Some(go) = go.take() {
                    go.await.unwrap();
                }
                increment::launch(cx.stream()?, &mut envelope)?;
                ports.output.send(envelope).await?;
            }
            Ok(())
        }
        .boxed()
    })
}

on_both!(q3_dropped_envelopes_return_to_the_pool, async |device: Device| {
    for (hub, wanted) in [(HubOptions::drop_oldest(2), [0, 18, 19]), (HubOptions::drop_newest(2), [0, 1, 2])] {
        let (sent, is_sent) = oneshot::channel();
        let seen = shared();
        let mut flow = Flow::new("q3");
        let produce = flow.add("produce", chunks(20, sent));
        let add = flow.add("add", held_increment(is_sent)).on(&device);
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, add.input, hub.envelope_bytes(64));
        flow.connect(add.output, consume.input);
        let report = flow.run().await.unwrap();
        let first: Vec<_> = lock(&seen).iter().map(|chunk: &Vec<u32>| chunk[0]).collect();
        let counts = &report.hubs[0];
        assert_eq!(counts.passed as usize, first.len());
        assert_eq!(counts.passed + counts.dropped, 20);
        // The reader may take its first message after any number of sends; the last three are the same.
        assert!(first.len() <= 3 && first.last() >= Some(&(wanted[2] + 1 - u32::from(first.len() < 3))), "{first:?}");
        lock(&seen).iter().for_each(|chunk| assert!(chunk.iter().all(|x| *x == chunk[0]), "torn: {chunk:?}"));
        assert_eq!(device.memory_peak(), 4 * 64, "two in the queue, one for the writer and one for the reader");
        drop(flow);
        freed(&device).await;
    }
});

/// How the reader of a hub that drops the oldest receives its messages.
#[derive(Clone, Copy, PartialEq)]
enum Reads {
    /// In runs whose condition guarantees a message.
    Runs,
    /// In a `recv` loop.
    Waits,
}

/// As between operators on the host, except that only a message whose copy has been enqueued can be taken.
async fn q3_while_copying(device: Device, reads: Reads) {
    const SENT: u32 = quick_or_long(4_000, 100_000);
    let (sent, _is_sent) = oneshot::channel();
    let mut flow = Flow::new("q3");
    let produce = flow.add("produce", chunks(SENT, sent));
    let read = flow.add(
        "read",
        task(move |ports: &mut SinkPorts<Envelope<u32>>, cx| {
            async move {
                while reads == Reads::Runs && cx.ready(ports).await {
                    ports.input.take()?;
                }
                while ports.input.recv().await?.is_some() {}
                Ok(())
            }
            .boxed()
        }),
    );
    let read = read.on(&device);
    flow.connect_with(produce.output, read.input, HubOptions::drop_oldest(1).envelope_bytes(4));
    let _produce = produce.on_own_thread();
    let report = flow.run().await.unwrap();
    let counts = &report.hubs[0];
    assert_eq!((counts.passed + counts.dropped, counts.untaken), (u64::from(SENT), 0), "the reader saw no early end");
    drop(flow);
    freed(&device).await;
}

on_both!(q3_a_run_has_its_message_while_the_next_is_being_copied, async |device| {
    q3_while_copying(device, Reads::Runs).await;
});

on_both!(q3_recv_continues_while_the_next_message_is_being_copied, async |device| {
    q3_while_copying(device, Reads::Waits).await;
});

#[tokio::test]
async fn q3_too_few_envelopes_are_an_error_before_running() {
    let mut flow = Flow::new("q3");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let consume = flow.add("consume", Collect(shared()));
    flow.connect_with(produce.output, consume.input, HubOptions::drop_oldest(4).envelopes(3).envelope_bytes(4));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let message = error.to_string();
    assert!(message.contains("`produce.output -> consume.input`") && message.contains("with 3 envelopes"), "{message}");
    assert!(message.contains("it needs 6"), "{message}");
}

#[tokio::test]
async fn q3_a_capacity_of_zero_is_an_error_before_running() {
    for hub in [HubOptions::drop_oldest(0), HubOptions::drop_newest(0)] {
        let mut flow = Flow::new("q3");
        let write = flow.add("write", numbers(1, oneshot::channel().0));
        let read = flow.add("read", TakesOne(shared()));
        flow.connect_with(write.output, read.input, hub);
        let error = within(flow.run()).await.unwrap_err();
        assert!(error.to_string().contains("its capacity is 0"), "{error}");
    }
}

/// The fast reader receives every message while the slow one, whose hub drops messages, is stuck.
#[tokio::test]
async fn q4_a_slow_branch_that_drops_does_not_block_the_others() {
    for (hub, wanted) in [(HubOptions::drop_oldest(2), [8, 9]), (HubOptions::drop_newest(2), [0, 1])] {
        let (sent, is_sent) = oneshot::channel();
        let (fast, slow) = (shared(), shared());
        let mut flow = Flow::new("q4");
        let write = flow.add("write", numbers(10, sent));
        let reads_fast = flow.add("fast", TakesOne(fast.clone()));
        let reads_slow = flow.add("slow", held(0, is_sent, &slow));
        flow.connect(write.output, (reads_fast.input, reads_slow.input.with(hub)));
        let report = within(flow.run()).await.unwrap();
        assert_eq!(*lock(&fast), (0..10).collect::<Vec<_>>());
        assert_eq!(*lock(&slow), wanted);
        let counts: Vec<_> = report.hubs.iter().map(|hub| (hub.passed, hub.dropped)).collect();
        assert_eq!(counts, [(10, 0), (2, 8)]);
        assert_eq!(report.operator("write").unwrap().messages_out, 10);
    }
}

// The slow reader keeps the envelope that it has taken. The copies for it go to the envelopes that it has not taken.
on_both!(q4_a_slow_branch_of_envelopes_does_not_block_the_others, async |device: Device| {
    for hub in [HubOptions::drop_oldest(2), HubOptions::drop_newest(2)] {
        let (sent, is_sent) = oneshot::channel();
        let (fast, slow) = (shared(), shared());
        let mut flow = Flow::new("q4");
        let produce = flow.add("produce", chunks(20, sent));
        let pass = flow.add("pass", Increment).on(&device);
        let reads_fast = flow.add("fast", Collect(fast.clone()));
        let reads_slow = flow.add("slow", held_increment(is_sent)).on(&device);
        let end = flow.add("end", Collect(slow.clone()));
        flow.connect_with(produce.output, pass.input, HubOptions::bounded(1).envelope_bytes(64));
        flow.connect(pass.output, [reads_fast.input.into(), reads_slow.input.with(hub)]);
        flow.connect(reads_slow.output, end.input);
        let report = flow.run().await.unwrap();
        let wanted: Vec<_> = (1..=20).map(|n| vec![n; 16]).collect();
        assert_eq!(*lock(&fast), wanted, "the fast reader gets all");
        let slow_hub = report.hub("pass.output -> slow.input").unwrap();
        assert_eq!(slow_hub.passed + slow_hub.dropped, 20);
        assert_eq!(lock(&slow).len() as u64, slow_hub.passed);
        assert!(lock(&slow).iter().all(|chunk| chunk.iter().all(|x| *x == chunk[0])), "no chunk mixes two messages");
        assert!(lock(&slow).is_sorted());
        drop(flow);
        freed(&device).await;
    }
});

#[tokio::test]
async fn q3_an_offer_reports_what_was_dropped() {
    let (sent, is_sent) = oneshot::channel();
    let mut sent = Some(sent);
    let seen = [shared(), shared()];
    let mut flow = Flow::new("q3");
    let offers = flow.add(
        "offers",
        task(move |ports: &mut SourcePorts<u64>, _| {
            let sent = sent.take().unwrap();
            async move {
                assert_eq!(ports.output.offer(0)?.outcomes, [Outcome::Sent, Outcome::Sent]);
                let offer = ports.output.offer(1)?;
                assert_eq!(offer.outcomes, [Outcome::Full, Outcome::Dropped]);
                assert_eq!(offer.kept, None, "one reader has ended");
                sent.send(()).unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    let (go, may_go) = oneshot::channel();
    let one = flow.add("one", held(0, is_sent, &seen[0]));
    let other = flow.add("other", held(0, may_go, &seen[1]));
    flow.connect(offers.output, [one.input.into(), other.input.with(HubOptions::drop_newest(1))]);
    let running = flow.spawn().unwrap();
    go.send(()).unwrap();
    within(running).await.unwrap();
    assert_eq!(*lock(&seen[0]), [0]);
}

#[derive(Ports)]
struct DonePorts {
    #[input(done)]
    input: Input<Envelope<u32>>,
}

// The first message's work is held. The second message replaces it, its work completes, and the reader takes it.
on_both!(q3_a_message_whose_work_is_awaited_may_be_dropped, async |device: Device| {
    let (got, has_got) = oneshot::channel::<()>();
    let (mut got, mut has_got) = (Some(got), Some(has_got));
    let mut flow = Flow::new("q3");
    let write = flow.add(
        "write",
        task(move |ports: &mut SourcePorts<Envelope<u32>>, cx| {
            let has_got = has_got.take().unwrap();
            async move {
                let (stuck, free) = (cx.stream_named("stuck")?, cx.stream_named("free")?);
                let held = hold(&stuck);
                for (number, stream) in [(1, &stuck), (2, &free)] {
                    let mut buffer = Buffer::new(cx.device(), 4)?;
                    stream.fill(&mut buffer, number)?;
                    ports.output.send(buffer.into()).await?;
                    // Lets the reader poll the message and wait.
                    for _ in 0..100 {
                        tokio::task::yield_now().await;
                    }
                }
                has_got.await.unwrap();
                drop(held);
                Ok(())
            }
            .boxed()
        }),
    );
    let write = write.on(&device);
    let read = flow.add(
        "read",
        task(move |ports: &mut DonePorts, cx| {
            let got = got.take().unwrap();
            async move {
                assert!(cx.ready(ports).await);
                let envelope = ports.input.take()?;
                got.send(()).unwrap();
                let mut here = Buffer::<u32>::pinned(cx.device(), 4)?;
                cx.stream()?.copy(&envelope, &mut here)?;
                assert_eq!(here.read().await?, [2; 4]);
                Ok(())
            }
            .boxed()
        }),
    );
    let read = read.on(&device);
    flow.connect_with(write.output, read.input, HubOptions::drop_oldest(1));
    let report = flow.run().await.unwrap();
    let counts = &report.hubs[0];
    assert_eq!((counts.passed, counts.dropped, counts.untaken), (1, 1, 0));
    freed(&device).await;
});

#[derive(Ports)]
struct TwoDonePorts {
    #[input(done, at_least = 2)]
    input: Input<Envelope<u32>>,
}

/// Records how many messages each run takes.
struct TwoDone(Shared<usize>);

impl Operator for TwoDone {
    type Ports = TwoDonePorts;

    async fn compute(&mut self, ports: &mut TwoDonePorts, _cx: &mut Cx) -> Result<()> {
        let count = ports.input.take_batch()?.len();
        lock(&self.0).push(count);
        Ok(())
    }
}

// Two messages are done. Before the run begins, a third one replaces one of them, and its work is not done: the run
// waits for it.
on_both!(q3_a_run_waits_again_if_a_drop_makes_its_batch_too_small, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let write = move |stream: &Stream, number| {
        let mut buffer = Buffer::<u32>::new(stream.device(), 4).unwrap();
        stream.fill(&mut buffer, number).unwrap();
        Envelope::from(buffer)
    };
    let (runs, holds) = (shared(), shared());
    let mut flow = Flow::new("q3");
    let read = flow.add("read", TwoDone(runs.clone())).on(&device);
    let ingress = flow.ingress_with("write", read.input, HubOptions::drop_oldest(2).envelope_bytes(16));
    let mut third = Some((ingress.clone(), stream.clone(), holds.clone()));
    // Polled once all other conditions are ready.
    let _read = read.when(predicate(move || {
        if let Some((ingress, stream, holds)) = third.take() {
            lock(&holds).push(hold(&stream));
            assert!(ingress.try_send(write(&stream, 3)).is_ok());
        }
        true
    }));
    let running = flow.spawn().unwrap();
    for number in [1, 2] {
        ingress.send(write(&stream, number)).await.unwrap();
    }
    drop(ingress);
    until("it waits for the third", || !lock(&holds).is_empty() && running.status()[0].status == Status::WaitEvent)
        .await;
    lock(&holds).clear();
    let report = running.await.unwrap();
    assert_eq!(*lock(&runs), [2]);
    assert_eq!((report.hubs[0].passed, report.hubs[0].dropped), (2, 1));
    drop(stream);
    freed(&device).await;
});

#[derive(Ports)]
struct DrivePorts {
    #[output]
    setting: Output<u64>,
    #[output]
    tick: Output<u64>,
    #[input]
    done: Input<u64>,
}

#[derive(Ports)]
struct FollowPorts {
    #[input]
    setting: Input<u64>,
    #[input]
    tick: Input<u64>,
    #[output]
    done: Output<u64>,
}

/// Records the setting at each tick.
struct Follow(Shared<(u64, u64)>);

impl Operator for Follow {
    type Ports = FollowPorts;

    async fn compute(&mut self, ports: &mut FollowPorts, _cx: &mut Cx) -> Result<()> {
        let (setting, tick) = (ports.setting.take()?, ports.tick.take()?);
        assert_eq!(ports.setting.take()?, setting, "a latest value can be taken repeatedly");
        assert_eq!(ports.setting.try_take()?, None, "it is new only once");
        lock(&self.0).push((setting, tick));
        ports.done.send(tick).await?;
        Ok(())
    }
}

#[tokio::test]
async fn q2_the_reader_has_the_latest_and_may_read_it_again() {
    let seen = shared();
    let mut flow = Flow::new("q2");
    let drive = flow.add(
        "drive",
        task(|ports: &mut DrivePorts, _| {
            async move {
                let plan: [&[u64]; 5] = [&[1], &[], &[2, 3], &[], &[4, 5, 6]];
                for (tick, settings) in plan.iter().enumerate() {
                    for setting in *settings {
                        ports.setting.try_send(*setting)?;
                    }
                    ports.tick.send(tick as u64).await?;
                    ports.done.recv().await?;
                }
                // The reader never takes it.
                ports.setting.send(7).await?;
                Ok(())
            }
            .boxed()
        }),
    );
    let follow = flow.add("follow", Follow(seen.clone()));
    flow.connect_with(drive.setting, follow.setting, HubOptions::latest());
    flow.connect(drive.tick, follow.tick);
    flow.connect(follow.done, drive.done);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [(1, 0), (1, 1), (3, 2), (3, 3), (6, 4)]);
    let hub = report.hub("drive.setting -> follow.setting").unwrap();
    assert_eq!((hub.passed, hub.dropped, hub.untaken), (3, 3, 1), "each counts once, however often it was read");
    assert_eq!(report.untaken, 1);
}

#[derive(Ports)]
struct ScalePorts {
    #[input]
    factor: Input<u64>,
    #[input]
    number: Input<u64>,
}

struct Scale(Shared<u64>);

impl Operator for Scale {
    type Ports = ScalePorts;

    async fn compute(&mut self, ports: &mut ScalePorts, _cx: &mut Cx) -> Result<()> {
        lock(&self.0).push(ports.factor.take()? * ports.number.take()?);
        Ok(())
    }
}

/// The writer sends one value and ends long before the value's last use.
#[tokio::test]
async fn q2_the_newest_outlasts_its_writer() {
    let seen = shared();
    let mut flow = Flow::new("q2");
    let (mut once, mut next) = (Some(3), 0..100);
    let factor = flow.add("factor", source(move || ready(Ok(once.take()))));
    let number = flow.add("number", source(move || ready(Ok(next.next()))));
    let scale = flow.add("scale", Scale(seen.clone()));
    flow.connect_with(factor.output, scale.factor, HubOptions::latest());
    flow.connect(number.output, scale.number);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..100).map(|n| 3 * n).collect::<Vec<_>>());
}

/// An operator whose inputs all keep the latest value ends when all of their writers have ended.
#[tokio::test]
async fn q2_readers_of_latest_values_only_end_with_the_last_writer() {
    for last in 0..2 {
        let seen = shared();
        let mut flow = Flow::new("q2");
        let scale = flow.add("scale", Scale(seen.clone()));
        for (at, input) in [scale.factor, scale.number].into_iter().enumerate() {
            let (seen, count) = (seen.clone(), if at == last { 5 } else { 1 });
            let write = flow.add(
                format!("write {at}"),
                task(move |ports: &mut SourcePorts<u64>, _| {
                    let seen = seen.clone();
                    async move {
                        for number in 1..=count {
                            ports.output.send(number).await?;
                            // The other writer has sent its only message.
                            until("it is read", || lock(&seen).last() >= Some(&number)).await;
                        }
                        Ok(())
                    }
                    .boxed()
                }),
            );
            flow.connect_with(write.output, input, HubOptions::latest());
        }
        let report = within(flow.run()).await.unwrap();
        assert_eq!(lock(&seen).last(), Some(&5), "the last of each was read");
        assert_eq!(report.untaken, 0);
    }
}

#[derive(Ports)]
struct LatestOrQueued {
    #[input]
    latest: Input<u64>,
    #[input(optional)]
    queued: Input<u64>,
}

/// A latest value and an optional queue: the operator ends when both writers have, after it has drained the queue.
#[tokio::test]
async fn q2_the_newest_beside_an_optional_queue_ends_with_both() {
    for condition in [false, true] {
        let seen = shared();
        let mut flow = Flow::new("q2");
        let latest = flow.add("latest", sends([1]));
        let queued = flow.add("queued", sends([2, 3, 4]));
        let notes = seen.clone();
        let both = flow.add(
            "both",
            in_runs(move |ports: &mut LatestOrQueued| {
                assert_eq!(ports.latest.take()?, 1);
                lock(&notes).extend(ports.queued.try_take()?);
                Ok(())
            }),
        );
        let either = any_of(at_least(both.queued, 1), at_least(both.latest, 1));
        let both = if condition { both.when(either) } else { both };
        flow.connect_with(latest.output, both.latest, HubOptions::latest());
        flow.connect(queued.output, both.queued);
        let report = within(flow.run()).await.unwrap();
        assert_eq!(*lock(&seen), [2, 3, 4]);
        assert_eq!(report.untaken, 0);
    }
}

/// Sends these numbers and ends.
fn sends(numbers: impl Into<Vec<u64>>) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut numbers = numbers.into().into_iter();
    source(move || ready(Ok(numbers.next())))
}

/// Calls the closure with its ports in each run.
struct InRuns<P, F>(F, PhantomData<fn(P)>);

impl<P: Ports, F: FnMut(&mut P) -> Result<()> + Send + 'static> Operator for InRuns<P, F> {
    type Ports = P;

    async fn compute(&mut self, ports: &mut P, _cx: &mut Cx) -> Result<()> {
        (self.0)(ports)
    }
}

fn in_runs<P: Ports, F: FnMut(&mut P) -> Result<()> + Send + 'static>(run: F) -> InRuns<P, F> {
    InRuns(run, PhantomData)
}

#[derive(Ports)]
struct AtMostPorts {
    #[input(at_most = 1)]
    input: Input<u64>,
}

#[derive(Ports)]
struct AtMostDonePorts {
    #[input(done, at_most = 1)]
    input: Input<u64>,
}

#[derive(Ports)]
struct AtMostsPorts {
    #[input(at_most = 2)]
    input: Inputs<u64>,
}

/// `at_most` on a plain port, on one that waits for work, and on one with several connections: the operator ends with
/// its writer.
#[tokio::test]
async fn q2_a_port_with_at_most_ends_with_the_writer_of_the_latest() {
    let seen: [Shared<u64>; 3] = Default::default();
    let mut flow = Flow::new("q2");
    let notes = seen.clone();
    let one = flow.add(
        "one",
        in_runs(move |ports: &mut AtMostPorts| {
            lock(&notes[0]).push(ports.input.take()?);
            Ok(())
        }),
    );
    let notes = seen.clone();
    let done = flow.add(
        "done",
        in_runs(move |ports: &mut AtMostDonePorts| {
            lock(&notes[1]).push(ports.input.take()?);
            Ok(())
        }),
    );
    let notes = seen.clone();
    let several = flow.add(
        "several",
        in_runs(move |ports: &mut AtMostsPorts| {
            lock(&notes[2]).extend(ports.input.try_take_any()?.map(|(_, number)| number));
            Ok(())
        }),
    );
    for (at, input) in [one.input, done.input, several.input, several.input].into_iter().enumerate() {
        let write = flow.add(format!("write {at}"), sends([7]));
        flow.connect_with(write.output, input, HubOptions::latest());
    }
    within(flow.run()).await.unwrap();
    for seen in seen {
        assert_eq!(lock(&seen).last(), Some(&7));
    }
}

/// Conditions on ports that keep the latest value: each operator ends when all of its writers have.
#[tokio::test]
async fn q2_conditions_on_the_newest_end_with_its_writers() {
    for which in 0..4 {
        let seen = shared();
        let mut flow = Flow::new("q2");
        let write = flow.add("write", sends([7]));
        let read = flow.add("read", TakesOne(seen.clone()));
        let input = read.input;
        let read = read.when(match which {
            0 => at_most(input, 1),
            1 => at_least(input, 1),
            2 => sum([input.into()], 1),
            _ => each([(input.into(), 1)]),
        });
        flow.connect_with(write.output, read.input, HubOptions::latest());
        within(flow.run()).await.unwrap();
        assert_eq!(lock(&seen).last(), Some(&7), "condition {which}");
    }
}

/// A sum over several ports: the last value of each is read, also where one port never receives any or has a queue.
#[tokio::test]
async fn q2_a_sum_ends_with_the_writers_of_the_newest() {
    for least in [1, 2] {
        for factors in [0, 1] {
            for hub in [None, Some(HubOptions::bounded(2))] {
                let seen = shared();
                let mut flow = Flow::new("q2");
                let number = flow.add("number", sends([7]));
                let factor = flow.add("factor", sends(vec![2; factors]));
                let notes = seen.clone();
                let scale = flow.add(
                    "scale",
                    in_runs(move |ports: &mut ScalePorts| {
                        lock(&notes).extend(ports.number.try_take()?);
                        lock(&notes).extend(ports.factor.try_take()?);
                        Ok(())
                    }),
                );
                let (a, b) = (scale.number, scale.factor);
                let scale = scale.when(sum([a.into(), b.into()], least));
                flow.connect_with(number.output, scale.number, HubOptions::latest());
                match hub {
                    None => flow.connect_with(factor.output, scale.factor, HubOptions::latest()),
                    Some(hub) => flow.connect_with(factor.output, scale.factor, hub),
                }
                let report = within(flow.run()).await.unwrap();
                assert!(lock(&seen).contains(&7), "{least} {factors} {hub:?}");
                assert_eq!(report.untaken, 0);
            }
        }
    }
}

#[derive(Ports)]
struct FactorsPorts {
    #[input]
    factors: Inputs<u64>,
    #[input]
    number: Input<u64>,
}

/// The latest value of each connection of a port stays readable until the other input ends.
#[tokio::test]
async fn q2_the_newest_of_several_connections_outlasts_its_writers() {
    let seen = shared();
    let mut flow = Flow::new("q2");
    let notes = seen.clone();
    let scale = flow.add(
        "scale",
        in_runs(move |ports: &mut FactorsPorts| {
            let factor: u64 = ports.factors.take()?.product();
            lock(&notes).push(factor * ports.number.take()?);
            Ok(())
        }),
    );
    for factor in [2, 3] {
        let write = flow.add(format!("factor {factor}"), sends([factor]));
        flow.connect_with(write.output, scale.factors, HubOptions::latest());
    }
    let mut next = 0..100;
    let number = flow.add("number", source(move || ready(Ok(next.next()))));
    flow.connect(number.output, scale.number);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..100).map(|n| 6 * n).collect::<Vec<_>>());
}

#[derive(Ports)]
struct ScaledPorts {
    #[consume]
    numbers: Consume<u64>,
    #[input]
    factor: Input<u64>,
}

struct Scaled(Shared<u64>);

impl Operator for Scaled {
    type Ports = ScaledPorts;

    async fn compute(&mut self, ports: &mut ScaledPorts, _cx: &mut Cx) -> Result<()> {
        let factor = ports.factor.take()?;
        let number = ports.numbers.get()?.read().await?[0];
        lock(&self.0).push(factor * number);
        Ok(())
    }
}

#[derive(Ports)]
struct CountedPorts {
    #[produce]
    numbers: Produce<u64>,
}

struct CountsTo(u64);

impl Operator for CountsTo {
    type Ports = CountedPorts;

    async fn compute(&mut self, ports: &mut CountedPorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.numbers.get_mut()?.fill_from(&[self.0]).await
    }
}

/// The other input is a chunk hub.
#[tokio::test]
async fn q2_the_newest_outlasts_its_writer_while_chunks_come() {
    let seen = shared();
    let hub = ChunkHub::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut flow = Flow::new("q2");
    let factor = flow.add("factor", sends([10]));
    let count = flow.add("count", CountsTo(5));
    let scale = flow.add("scale", Scaled(seen.clone()));
    flow.link(count.numbers, &hub);
    flow.link(scale.numbers, &hub);
    flow.connect_with(factor.output, scale.factor, HubOptions::latest());
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [40, 30, 20, 10, 0]);
    assert_eq!(report.untaken, 0);
}

/// The writer ends without sending: there is no value to read, and none will come.
#[tokio::test]
async fn q2_a_writer_that_never_sends_ends_its_reader() {
    let seen = shared();
    let mut flow = Flow::new("q2");
    let mut next = 0_u64..;
    let factor = flow.add("factor", source(|| ready(Ok(None))));
    let number = flow.add("number", source(move || ready(Ok(next.next()))));
    let scale = flow.add("scale", Scale(seen.clone()));
    flow.connect_with(factor.output, scale.factor, HubOptions::latest());
    flow.connect(number.output, scale.number);
    within(flow.run()).await.unwrap();
    assert!(lock(&seen).is_empty());
}

/// `recv` waits for a new value, and ends when there will be none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q2_recv_returns_each_value_once() {
    for _ in 0..50 {
        let seen = shared();
        let mut flow = Flow::new("q2");
        let write = flow.add("write", numbers(100, oneshot::channel().0));
        let (go, may_go) = oneshot::channel();
        go.send(()).unwrap();
        let read = flow.add("read", held(0, may_go, &seen));
        flow.connect_with(write.output, read.input, HubOptions::latest());
        let report = within(flow.run()).await.unwrap();
        let seen = lock(&seen);
        assert!(seen.is_sorted_by(|one, next| one < next) && seen.last() == Some(&99), "{seen:?}");
        assert_eq!(report.hubs[0].passed, seen.len() as u64);
        assert_eq!(report.hubs[0].passed + report.hubs[0].dropped, 100);
    }
}

#[tokio::test]
async fn q2_waiting_for_two_messages_of_a_latest_hub_is_an_error_before_running() {
    let mut flow = Flow::new("q2");
    let write = flow.add("write", numbers(1, oneshot::channel().0));
    let read = flow.add("read", TakesOne(shared()));
    flow.connect_with(write.output, read.input, HubOptions::latest());
    let input = read.input;
    let _read = read.when(at_least(input, 2));
    let message = within(flow.run()).await.unwrap_err().to_string();
    assert!(
        message.contains("port `input` waits for 2 messages, but `HubOptions::latest` holds only the newest one"),
        "{message}"
    );
    assert!(message.contains("another hub, such as `HubOptions::bounded(2)`"), "{message}");
}

/// One branch keeps the latest message, the other receives all.
#[tokio::test]
async fn q4_one_branch_keeps_the_newest() {
    let (all, seen) = (shared(), shared());
    let mut flow = Flow::new("q4");
    let mut next = 0..20;
    let write = flow.add("write", source(move || ready(Ok(next.next()))));
    let reads_all = flow.add("all", TakesOne(all.clone()));
    let (go, may_go) = oneshot::channel();
    let reads_newest = flow.add("newest", held(0, may_go, &seen));
    flow.connect(write.output, (reads_all.input, reads_newest.input.with(HubOptions::latest())));
    let running = flow.spawn().unwrap();
    until("all have passed", || lock(&all).len() == 20).await;
    go.send(()).unwrap();
    let report = within(running).await.unwrap();
    assert_eq!(*lock(&seen), [19]);
    assert_eq!(report.hub("write.output -> newest.input").unwrap().dropped, 19);
}

#[derive(Ports)]
struct EachPorts {
    #[input]
    all: Inputs<u64>,
}

/// Records one message of each connection.
struct Each(Shared<Vec<u64>>);

impl Operator for Each {
    type Ports = EachPorts;

    async fn compute(&mut self, ports: &mut EachPorts, _cx: &mut Cx) -> Result<()> {
        let each = ports.all.take()?.collect();
        lock(&self.0).push(each);
        Ok(())
    }
}

/// Connections of one port may be of different kinds: one keeps the latest, one drops, one applies back pressure.
#[tokio::test]
async fn q5_connections_of_different_kinds_at_one_port() {
    let seen = shared();
    let mut flow = Flow::new("q5");
    let each = flow.add("each", Each(seen.clone()));
    let mut once = Some(7);
    let newest = flow.add("newest", source(move || ready(Ok(once.take()))));
    flow.connect_with(newest.output, each.all, HubOptions::latest());
    for (at, hub) in [HubOptions::drop_newest(100), HubOptions::bounded(1)].into_iter().enumerate() {
        let mut next = 0..10;
        let write = flow.add(format!("write {at}"), source(move || ready(Ok(next.next()))));
        flow.connect_with(write.output, each.all, hub);
    }
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (0..10).map(|n| vec![7, n, n]).collect::<Vec<_>>());
    assert_eq!(report.hubs.iter().map(|hub| hub.passed).collect::<Vec<_>>(), [1, 10, 10]);
}

/// The latest value stays readable while a newer one replaces it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q5_the_latest_is_readable_while_it_is_replaced() {
    let seen = shared();
    let mut flow = Flow::new("q5");
    let each = flow.add("each", Each(seen.clone()));
    let newest = flow.add("newest", numbers(300_000, oneshot::channel().0));
    let mut next = 0..10_000;
    let write = flow.add("write", source(move || ready(Ok(next.next()))));
    flow.connect_with(newest.output, each.all, HubOptions::latest());
    flow.connect_with(write.output, each.all, HubOptions::bounded(64));
    let _newest = newest.on_own_thread();
    within(flow.run()).await.unwrap();
    assert!(lock(&seen).is_sorted_by_key(|each| each[0]));
    assert_eq!(lock(&seen).iter().filter(|each| each.len() == 2).count(), 10_000);
}
