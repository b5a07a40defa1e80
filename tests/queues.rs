//! Scenarios Q: queues, ends, cycles, stalls.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use common::*;
use futures::FutureExt;
use tokio::sync::oneshot;
use wakeline::{Inputs, condition::Status, prelude::*};

/// The number of messages: fewer in a debug build, which is slower.
const MANY: u64 = quick_or_long(200_000, 10_000_000);

fn count(census: &Census, last: u64) -> impl Operator<Ports = SourcePorts<Counted>> {
    let (census, mut next) = (census.clone(), 0);
    source(move || {
        next += 1;
        ready(Ok((next <= last).then(|| census.message(next - 1))))
    })
}

async fn q1(capacity: usize) {
    let census = Census::default();
    let (mut expected, in_order) = (0, Arc::new(AtomicU64::new(0)));
    let seen = in_order.clone();
    let mut flow = Flow::new("q1");
    let source = flow.add("source", count(&census, MANY));
    let middle = flow.add("middle", pass_on::<Counted>());
    let sink = flow.add(
        "sink",
        sink(move |message: Counted| {
            assert_eq!(message.number, expected);
            expected += 1;
            seen.store(expected, Ordering::Relaxed);
            ready(Ok(()))
        }),
    );
    flow.connect_with(source.output, middle.input, HubOptions::bounded(capacity));
    flow.connect_with(middle.output, sink.input, HubOptions::bounded(capacity));
    let began = Instant::now();
    let report = within(flow.run()).await.unwrap();
    eprintln!("{MANY} messages through two hubs of {capacity}: {:?}", began.elapsed());

    assert_eq!(in_order.load(Ordering::Relaxed), MANY, "each message once, in order");
    assert_eq!(report.operator("sink").unwrap().messages_in, MANY);
    // The messages in the two queues, and one in each of the three operators.
    assert!(census.most() <= 2 * capacity + 3, "{} messages alive at once", census.most());
    assert_eq!(census.live(), 0);
}

mod q1_a_bounded_hub_applies_back_pressure_in_constant_memory {
    use super::*;

    #[tokio::test]
    async fn one_thread() {
        q1(64).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_threads() {
        q1(64).await;
    }
}

#[tokio::test]
async fn q1_a_slow_reader_blocks_the_source() {
    let census = Census::default();
    let (go, may_go) = oneshot::channel::<()>();
    let mut may_go = Some(may_go);
    let mut flow = Flow::new("q1");
    let source = flow.add("source", count(&census, 1000));
    let slow = flow.add(
        "slow",
        task(move |ports: &mut SinkPorts<Counted>, _| {
            let may_go = may_go.take().unwrap();
            async move {
                may_go.await.unwrap();
                let mut expected = 0;
                while let Some(message) = ports.input.recv().await? {
                    assert_eq!(message.number, expected);
                    expected += 1;
                }
                assert_eq!(expected, 1000);
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect_with(source.output, slow.input, HubOptions::bounded(5));
    let running = flow.spawn().unwrap();
    until("the queue is full", || census.live() == 5).await;
    // With one thread, this lets the source send as much as it can.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(census.most(), 5);
    go.send(()).unwrap();
    within(running).await.unwrap();
    assert_eq!(census.live(), 0);
}

on_both!(q6_the_flow_drains_after_its_source_has_ended, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("q6");
    let produce = flow.add("produce", SendEach::new((0..100_u32).map(|n| vec![n; 16])));
    let first = flow.add("first", Increment).on(&device);
    let second = flow.add("second", Increment).on(&device);
    let third = flow.add("third", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, first.input, HubOptions::bounded(4).envelopes(6).envelope_bytes(64));
    flow.connect(first.output, second.input);
    flow.connect_with(second.output, third.input, HubOptions::bounded(3));
    flow.connect(third.output, consume.input);
    let report = flow.run().await.unwrap();
    let wanted: Vec<_> = (0..100).map(|n| vec![n + 3; 16]).collect();
    assert_eq!(*lock(&seen), wanted, "each message arrives once");
    for name in ["first", "second", "third", "consume"] {
        assert_eq!(report.operator(name).unwrap().runs, 100, "{name}");
    }
    assert_eq!(report.untaken, 0);
    freed(&device).await;
});

#[derive(Ports)]
struct PairPorts {
    #[input]
    left: Input<Counted>,
    #[input]
    right: Input<Counted>,
}

struct Pair(Shared<(u64, u64)>);

impl Operator for Pair {
    type Ports = PairPorts;

    async fn compute(&mut self, ports: &mut PairPorts, _cx: &mut Cx) -> Result<()> {
        let (left, right) = (ports.left.take()?, ports.right.take()?);
        lock(&self.0).push((left.number, right.number));
        Ok(())
    }
}

/// An endless source. With `pause` it yields to the others between its condition and its send.
struct Endless {
    census: Census,
    next: u64,
    pause: bool,
}

impl Operator for Endless {
    type Ports = SourcePorts<Counted>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        if self.pause {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
        let message = self.census.message(self.next);
        self.next += 1;
        ports.output.send(message).await?;
        Ok(())
    }
}

async fn q6_two_inputs(pause: bool, capacity: usize) {
    let (census, seen) = (Census::default(), shared());
    let mut flow = Flow::new("q6");
    let short = flow.add("short", count(&census, 3));
    let endless = flow.add("endless", Endless { census: census.clone(), next: 0, pause });
    let passing = flow.add("passing", pass_on::<Counted>());
    let pair = flow.add("pair", Pair(seen.clone()));
    flow.connect(short.output, pair.left);
    flow.connect_with(endless.output, passing.input, HubOptions::bounded(capacity));
    flow.connect_with(passing.output, pair.right, HubOptions::bounded(capacity));
    // The flow is not stopped: the end of `short` ends `pair`, which ends `passing` and `endless`.
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [(0, 0), (1, 1), (2, 2)]);
    let of = |name: &str| report.operator(name).unwrap().clone();
    let sent = of("short").messages_out + of("endless").messages_out + of("passing").messages_out;
    let taken = of("pair").messages_in + of("passing").messages_in;
    assert_eq!(of("pair").messages_in, 6);
    assert_eq!(report.untaken, sent - taken, "messages that were sent and not taken are counted\n{report}");
    assert_eq!(census.live(), 0, "all messages are dropped");
}

#[tokio::test]
async fn q6_one_of_two_inputs_ends() {
    for capacity in [1, 2, 7] {
        q6_two_inputs(false, capacity).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q6_one_of_two_inputs_ends_on_two_threads() {
    for round in 0..200 {
        q6_two_inputs(false, 1 + round % 3).await;
    }
}

/// A reader that ends before a running `compute` has sent is not a failure.
#[tokio::test]
async fn q6_a_reader_ends_while_its_sender_computes() {
    for capacity in [1, 2, 7] {
        q6_two_inputs(true, capacity).await;
    }
}

#[tokio::test]
async fn q6_untaken_messages_are_counted() {
    let census = Census::default();
    let mut flow = Flow::new("q6");
    let (full, is_full) = oneshot::channel::<()>();
    let (mut full, mut is_full) = (Some(full), Some(is_full));
    let counted = census.clone();
    let write = flow.add(
        "write",
        task(move |ports: &mut SourcePorts<Counted>, _| {
            let (full, census) = (full.take().unwrap(), counted.clone());
            async move {
                for number in 0..5 {
                    ports.output.send(census.message(number)).await?;
                }
                full.send(()).unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    let read = flow.add(
        "read",
        task(move |ports: &mut SinkPorts<Counted>, _| {
            let is_full = is_full.take().unwrap();
            async move {
                is_full.await.unwrap();
                assert_eq!(ports.input.len(), 5);
                ports.input.take()?;
                ports.input.take()?;
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect_with(write.output, read.input, HubOptions::bounded(5));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.untaken, 3);
    assert!(report.to_string().contains("3 never taken"), "{report}");
    assert_eq!(census.live(), 0);
}

#[derive(Ports)]
struct LoopPorts {
    #[input]
    back: Input<u32>,
    #[output]
    forth: Output<u32>,
}

/// Sends the number `begin`, then returns each number that comes back, less one, down to zero.
struct Feed {
    begin: u32,
    rounds: Arc<AtomicU64>,
}

impl Operator for Feed {
    type Ports = LoopPorts;

    async fn compute(&mut self, _ports: &mut LoopPorts, _cx: &mut Cx) -> Result<()> {
        unreachable!("its `run` calls no `compute`")
    }

    async fn run(&mut self, ports: &mut LoopPorts, cx: &mut Cx) -> Result<()> {
        ports.forth.send(self.begin).await?;
        while cx.ready(ports).await {
            self.rounds.fetch_add(1, Ordering::Relaxed);
            match ports.back.take()? {
                0 => {}
                left => ports.forth.send(left - 1).await?,
            }
        }
        Ok(())
    }
}

/// One message circulates until its count is zero. No operator ends the flow explicitly.
#[tokio::test]
async fn q7_an_idle_cycle_ends() {
    let rounds = Arc::new(AtomicU64::new(0));
    let mut flow = Flow::new("q7");
    let feed = flow.add("feed", Feed { begin: 1000, rounds: rounds.clone() });
    let back = flow.add("back", pass_on::<u32>());
    flow.connect(feed.forth, back.input);
    flow.connect(back.output, feed.back);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(rounds.load(Ordering::Relaxed), 1001);
    assert_eq!(report.operator("back").unwrap().runs, 1001);
    assert_eq!(report.untaken, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q7_an_idle_cycle_ends_on_two_threads() {
    for _ in 0..200 {
        let rounds = Arc::new(AtomicU64::new(0));
        let mut flow = Flow::new("q7");
        let feed = flow.add("feed", Feed { begin: 10, rounds: rounds.clone() });
        let back = flow.add("back", pass_on::<u32>());
        flow.connect(feed.forth, back.input);
        flow.connect(back.output, feed.back);
        within(flow.run()).await.unwrap();
        assert_eq!(rounds.load(Ordering::Relaxed), 11);
    }
}

/// `double` sends two messages for each one that it takes.
#[tokio::test]
async fn q8_a_cycle_that_fills_up_is_a_stall() {
    let mut flow = Flow::new("q8");
    let double = flow.add(
        "double",
        task(|ports: &mut LoopPorts, cx| {
            async move {
                ports.forth.send(1).await?;
                while cx.ready(ports).await {
                    let number = ports.back.take()?;
                    ports.forth.send(number).await?;
                    // Waits for room before the second message, as its condition does before the first.
                    if cx.ready(ports).await {
                        ports.forth.send(number).await?;
                    }
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let back = flow.add("back", pass_on::<u32>());
    flow.connect(double.forth, back.input);
    flow.connect(back.output, double.back);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    let text = error.to_string();
    assert!(text.contains("`double` waits for"), "{text}");
    assert!(text.contains("`back` waits for"), "{text}");
    assert!(text.contains("`double.forth -> back.input`"), "{text}");
}

/// `pair` needs a message at each input, and gets two at one and none at the other.
#[tokio::test]
async fn q8_a_stall_names_each_waiting_operator_and_its_wait() {
    #[derive(Ports)]
    struct SplitPorts {
        #[output]
        left: Output<Counted>,
        #[output]
        right: Output<Counted>,
    }
    let census = Census::default();
    let sent = census.clone();
    let mut flow = Flow::new("q8");
    let split = flow.add(
        "split",
        task(move |ports: &mut SplitPorts, cx| {
            let census = sent.clone();
            async move {
                while cx.ready(ports).await {
                    ports.left.send(census.message(0)).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let pair = flow.add("pair", Pair(shared()));
    flow.connect_with(split.left, pair.left, HubOptions::bounded(2));
    flow.connect(split.right, pair.right);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    assert!(text.contains("`split` waits for room in hub `split.left -> pair.left`: its queue of 2 is full"), "{text}");
    assert!(text.contains("`pair` waits for a message in hub `split.right -> pair.right`"), "{text}");
    assert_eq!(census.live(), 0, "queued messages are dropped");
}

#[derive(Ports)]
struct RoomForTwoPorts {
    #[output(room = 2, envelope_bytes = 4)]
    output: Output<Envelope<u32>>,
}

struct RoomForTwo;

impl Operator for RoomForTwo {
    type Ports = RoomForTwoPorts;

    async fn compute(&mut self, ports: &mut RoomForTwoPorts, _cx: &mut Cx) -> Result<()> {
        let blank = ports.output.blank().await?;
        ports.output.send(blank).await?;
        Ok(())
    }
}

/// One of two blank envelopes is available; the other is kept for ever.
#[tokio::test]
async fn q8_room_for_two_that_never_becomes_available_is_a_stall() {
    let kept = shared();
    let mut flow = Flow::new("q8");
    let make = flow.add("make", RoomForTwo);
    let keeps = flow.add("keeps", keep::<Envelope<u32>>(&kept));
    flow.connect_with(make.output, keeps.input, HubOptions::bounded(2).envelopes(2));
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    let text = error.to_string();
    let wanted = "`make` waits for 2 blank envelopes: 1 of the 2 envelopes of hub `make.output -> keeps.input` at this location are";
    assert!(text.contains(wanted), "{text}");
    assert_eq!(lock(&kept).len(), 1);
}

struct InPairs;

#[derive(Ports)]
struct InPairsPorts {
    #[input(at_least = 2)]
    input: Input<Envelope<u32>>,
    #[output(room = 2)]
    output: Output<Envelope<u32>>,
}

impl Operator for InPairs {
    type Ports = InPairsPorts;

    async fn compute(&mut self, ports: &mut InPairsPorts, _cx: &mut Cx) -> Result<()> {
        let pair: Vec<_> = ports.input.take_batch()?.collect();
        for envelope in pair {
            ports.output.send(envelope).await?;
        }
        Ok(())
    }
}

/// The writer has ended, and its last message waits for an envelope on the device to be copied to. The reader waits for
/// this message, and then runs with an incomplete batch.
#[tokio::test]
async fn q6_the_last_batch_may_be_incomplete_but_waits_for_pending_copies() {
    let device = emulated();
    let (go, may_go) = oneshot::channel();
    let mut may_go = Some(may_go);
    let mut flow = Flow::new("q6");
    let make = flow.add("make", SendEach::new([vec![1_u32], vec![2], vec![3]]));
    let pairs = flow.add("pairs", InPairs).on(&device);
    let drain = flow.add(
        "drain",
        task(move |ports: &mut SinkPorts<Envelope<u32>>, _| {
            let may_go = may_go.take().unwrap();
            async move {
                // Both envelopes of the first pair are in use until then.
                may_go.await.unwrap();
                while ports.input.recv().await?.is_some() {}
                Ok(())
            }
            .boxed()
        }),
    );
    let drain = drain.on(&device);
    flow.connect_with(make.output, pairs.input, HubOptions::bounded(2).envelopes(2).envelope_bytes(4));
    flow.connect(pairs.output, drain.input);
    let running = flow.spawn().unwrap();
    until("the writer has ended", || running.status()[0].status == Status::Never).await;
    until("its reader waits", || running.status()[1].status == Status::Wait).await;
    go.send(()).unwrap();
    let report = within(running).await.unwrap();
    assert_eq!((report.operator("drain").unwrap().messages_in, report.untaken), (3, 0), "{report}");
    freed(&device).await;
}

/// The end is detected without a timeout: no time passes.
#[tokio::test(start_paused = true)]
async fn q6_run_returns_at_once() {
    let begun = tokio::time::Instant::now();
    q6_two_inputs(false, 2).await;
    let rounds = Arc::new(AtomicU64::new(0));
    let mut flow = Flow::new("q6");
    let feed = flow.add("feed", Feed { begin: 10, rounds });
    let back = flow.add("back", pass_on::<u32>());
    flow.connect(feed.forth, back.input);
    flow.connect(back.output, feed.back);
    within(flow.run()).await.unwrap();
    assert_eq!(begun.elapsed(), std::time::Duration::ZERO);
}

/// `first -> second -> first`: one message circulates for ever.
fn endless_loop() -> (Flow, Arc<AtomicU64>) {
    let rounds = Arc::new(AtomicU64::new(0));
    let counted = rounds.clone();
    let mut flow = Flow::new("q7");
    let mut begun = false;
    let first = flow.add(
        "first",
        task(move |ports: &mut LoopPorts, cx| {
            let rounds = counted.clone();
            let begin = !std::mem::replace(&mut begun, true);
            async move {
                if begin {
                    ports.forth.send(0).await?;
                }
                while cx.ready(ports).await {
                    rounds.fetch_add(1, Ordering::Relaxed);
                    let number = ports.back.take()?;
                    ports.forth.send(number + 1).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let second = flow.add("second", pass_on::<u32>());
    flow.connect(first.forth, second.input);
    flow.connect(second.output, first.back);
    (flow, rounds)
}

/// A loop without a source never ends by itself. A stop ends each of its operators after its current run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q7_an_endless_loop_can_be_stopped() {
    for round in 0..50 {
        let (flow, rounds) = endless_loop();
        let running = flow.spawn().unwrap();
        until("the message circulates", || rounds.load(Ordering::Relaxed) > 10 * round).await;
        running.stop();
        let report = within(running).await.unwrap();
        assert!(report.untaken <= 1, "only one message exists: {report}");

        let (flow, rounds) = endless_loop();
        let running = flow.spawn().unwrap();
        until("the message circulates", || rounds.load(Ordering::Relaxed) > 10 * round).await;
        running.abort();
        assert!(within(running).await.unwrap_err().is_cancelled());
    }
}

/// A loop of two operators behind a source: its message circulates after a stop, too, until an operator checks
/// `is_stopping`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q7_a_loop_behind_a_source_ends_when_it_checks_is_stopping() {
    #[derive(Ports)]
    struct JunctionPorts {
        #[input(at_least = 1)]
        any: wakeline::Inputs<u32>,
        #[output]
        forth: Output<u32>,
    }

    struct Junction(Arc<AtomicU64>);

    impl Operator for Junction {
        type Ports = JunctionPorts;

        async fn compute(&mut self, ports: &mut JunctionPorts, cx: &mut Cx) -> Result<()> {
            let Some((_, number)) = ports.any.try_take_any()? else { unreachable!("its condition was ready") };
            self.0.fetch_add(1, Ordering::Relaxed);
            if cx.flow().is_stopping() {
                return Ok(());
            }
            ports.forth.send(number).await?;
            Ok(())
        }
    }

    for round in 0..50 {
        let rounds = Arc::new(AtomicU64::new(0));
        let mut flow = Flow::new("q7");
        let mut once = Some(7);
        let begin = flow.add("begin", source(move || ready(Ok(once.take()))));
        let junction = flow.add("junction", Junction(rounds.clone()));
        let back = flow.add("back", pass_on::<u32>());
        flow.connect(begin.output, junction.any);
        flow.connect(junction.forth, back.input);
        flow.connect(back.output, junction.any);
        let running = flow.spawn().unwrap();
        until("the message circulates", || rounds.load(Ordering::Relaxed) > 10 * round).await;
        running.stop();
        let report = within(running).await.unwrap();
        assert_eq!(report.untaken, 0, "the loop is idle: {report}");
    }
}

#[derive(Ports)]
struct MergePorts {
    #[input]
    new: Input<u32>,
    #[input]
    back: Input<u32>,
    #[output]
    forth: Output<u32>,
}

#[derive(Ports)]
struct EitherPorts {
    #[input(at_least = 1)]
    either: Inputs<u32>,
    #[output]
    forth: Output<u32>,
}

struct Merge;

impl Operator for Merge {
    type Ports = MergePorts;

    async fn compute(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
        ports.forth.send(ports.new.take()? + ports.back.take()?).await?;
        Ok(())
    }
}

struct Either;

impl Operator for Either {
    type Ports = EitherPorts;

    async fn compute(&mut self, ports: &mut EitherPorts, _cx: &mut Cx) -> Result<()> {
        match ports.either.try_take_any()? {
            Some((_, left)) if left > 0 => Ok(ports.forth.send(left - 1).await?),
            _ => Ok(()),
        }
    }
}

/// A cycle in which each operator waits for another cannot begin. It once counted as idle, and its flow succeeded.
#[tokio::test]
async fn q7_a_cycle_that_cannot_begin_is_an_error() {
    let advice = |sender| {
        format!(
            "so that none ever ran: override `run` in {sender} to send first, or let an input of the cycle be \
             `#[input(optional)]`, or `Inputs` with `at_least = 1` that are also fed from outside"
        )
    };

    let mut flow = Flow::new("q7");
    let own = flow.add("own", pass_on::<u32>());
    flow.connect(own.output, own.input);
    assert_eq!(
        within(flow.run()).await.unwrap_err().to_string(),
        format!("stalled: `own` is connected to itself and waits for its own first message, {}", advice("it"))
    );

    let each = "form a cycle in which each waits for another's first message";
    for messages in [0, 1] {
        let mut flow = Flow::new("q7");
        let mut numbers = 0..messages;
        let source = flow.add("source", source(move || ready(Ok(numbers.next()))));
        let merge = flow.add("merge", Merge);
        let back = flow.add("back", pass_on::<u32>());
        flow.connect(source.output, merge.new);
        flow.connect(merge.forth, back.input);
        flow.connect(back.output, merge.back);
        let error = within(flow.run()).await.unwrap_err();
        assert!(error.is_stalled(), "{error}");
        // With a message, the stall lists the waits instead.
        if messages == 0 {
            assert_eq!(error.to_string(), format!("stalled: `merge`, `back` {each}, {}", advice("one")));
        }
    }

    // Fed from outside, and runs on a message of any connection.
    let mut flow = Flow::new("q7");
    let mut numbers = [3].into_iter();
    let source = flow.add("source", source(move || ready(Ok(numbers.next()))));
    let either = flow.add("either", Either);
    flow.connect(source.output, either.either);
    flow.connect_with(either.forth, either.either, HubOptions::bounded(2));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("either").unwrap().runs, 4);
}

#[tokio::test]
async fn q8_the_check_reports_the_capacity_and_the_inputs_of_each_cycle() {
    let mut flow = Flow::new("q8");
    let numbers = flow.add("numbers", source(async || Ok(Some(1_u32))));
    let either = flow.add("either", Either);
    let back = flow.add("back", pass_on::<u32>());
    flow.connect(numbers.output, either.either);
    flow.connect_with(either.forth, back.input, HubOptions::bounded(4));
    flow.connect(back.output, either.either);
    // Not a cycle: the responses leave the flow.
    let double = flow.add("double", pass_on::<u32>());
    let _service = flow.service("service", double.input, double.output);
    let dead = flow.add("dead", pass_on::<u32>());
    let ends = flow.add("ends", pass_on::<u32>());
    flow.connect_with(dead.output, ends.input, HubOptions::drop_oldest(2));
    flow.connect(ends.output, dead.input);
    let checked = flow.check().unwrap();
    assert_eq!(
        checked.to_string(),
        "`either`, `back` form a cycle, whose hubs hold 5 together; fed by `numbers.output -> either.either` with any number: it \
         stalls once they are full\n\
         `dead`, `ends` form a cycle, in which a hub drops messages: it does not fill up; nothing outside feeds it; each waits for a \
         message of the cycle: it begins only if one sends first, in a `run` of its own"
    );
    let [either, dead] = &checked.cycles[..] else { panic!("{checked}") };
    assert_eq!((either.holds, either.begins, either.fed_by.len()), (Some(5), true, 1));
    assert_eq!((dead.holds, dead.begins, dead.fed_by.len()), (None, false, 0));
}

#[derive(Ports)]
struct MergeEnvelopesPorts {
    #[input(at_least = 1)]
    either: Inputs<Envelope<u32>>,
    #[output]
    forth: Output<Envelope<u32>>,
}

struct MergeEnvelopes;

impl Operator for MergeEnvelopes {
    type Ports = MergeEnvelopesPorts;

    async fn compute(&mut self, ports: &mut MergeEnvelopesPorts, _cx: &mut Cx) -> Result<()> {
        match ports.either.try_take_any()? {
            Some((_, envelope)) => Ok(ports.forth.send(envelope).await?),
            None => Ok(()),
        }
    }
}

#[derive(Ports)]
struct BlanksPorts {
    #[output(envelope_bytes = 8)]
    numbers: Output<Envelope<u32>>,
}

struct Blanks;

impl Operator for Blanks {
    type Ports = BlanksPorts;

    async fn compute(&mut self, ports: &mut BlanksPorts, cx: &mut Cx) -> Result<()> {
        cx.finish();
        let blank = ports.numbers.blank().await?;
        ports.numbers.send(blank).await?;
        Ok(())
    }
}

/// A cycle that passes on a source's envelopes holds at most as many of them as the source's hub has. If the cycle
/// copies them, they return to that hub, and any number can enter.
#[tokio::test]
async fn q8_the_check_reports_how_many_envelopes_a_source_can_put_into_a_cycle() {
    let at_most = |count| format!("at most {count} envelopes at once");
    for (envelopes, copies, feeds, then) in [
        (5, false, at_most(5), "they have room for all"),
        (6, false, at_most(6), "it stalls once they are full"),
        (5, true, "any number".into(), "it stalls once they are full"),
    ] {
        let device = emulated();
        let mut flow = Flow::new("q8");
        let blanks = flow.add("blanks", Blanks);
        let merge = flow.add("merge", MergeEnvelopes);
        let mut back = flow.add("back", pass_on::<Envelope<u32>>());
        if copies {
            back = back.on(&device);
        }
        flow.connect_with(blanks.numbers, merge.either, HubOptions::bounded(2).envelopes(envelopes));
        flow.connect_with(merge.forth, back.input, HubOptions::bounded(4));
        flow.connect(back.output, merge.either);
        let text = flow.check().unwrap().to_string();
        let expected = format!(
            "`merge`, `back` form a cycle, whose hubs hold 5 together; fed by `blanks.numbers -> merge.either` with {feeds}: {then}"
        );
        assert_eq!(text, expected);
    }
}
