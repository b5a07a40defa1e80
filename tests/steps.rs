//! L5: stepping through a flow, and its log.

use std::{
    io::Write,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use common::{chunks::Drain, *};
use futures::FutureExt;
use tokio::{sync::Notify, time::Instant};
use wakeline::{
    condition::{count, every},
    flow::{LocalFlow, Step, Steps},
    operator::concurrent,
    prelude::*,
};

/// Makes all remaining steps of a flow and returns them.
async fn remaining_steps(steps: &mut Steps) -> Vec<String> {
    let mut made = Vec::new();
    while let Some(step) = within(steps.next()).await {
        made.push(step.to_string());
    }
    made
}

fn numbers(up_to: u32) -> impl Operator<Ports = SourcePorts<u32>> {
    let mut numbers = 1..=up_to;
    source(move || std::future::ready(Ok(numbers.next())))
}

/// A log that the test reads.
#[derive(Clone, Default)]
struct Lines(Shared<u8>);

impl Lines {
    /// The lines, without the times.
    fn get(&self) -> Vec<String> {
        let text = String::from_utf8(lock(&self.0).clone()).unwrap();
        text.lines().map(|line| line.split(" (").next().unwrap_or_default().to_string()).collect()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Adds one on the device, behind a hold that the test releases.
struct IncrementOnHold {
    holds: Shared<Hold>,
    enqueued: Arc<AtomicBool>,
}

impl Operator for IncrementOnHold {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        lock(&self.holds).push(hold(cx.stream()?));
        increment::launch(cx.stream()?, &mut envelope)?;
        self.enqueued.store(true, Ordering::SeqCst);
        ports.output.send(envelope).await?;
        Ok(())
    }
}

on_both!(l5_operators_step_in_the_order_of_adding_and_copies_are_steps, async |device: Device| {
    let (seen, log, hub) = (shared(), Lines::default(), Lines::default());
    let mut flow = Flow::new("l5");
    let produce = flow.add("produce", SendEach::new([vec![1_u32], vec![2]]));
    let add = flow.add("add", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelopes(2).envelope_bytes(4));
    flow.connect_with(add.output, consume.input, HubOptions::bounded(2).envelopes(2));
    let steps = flow.steps().unwrap().log_to(log.clone());
    let mut steps = steps.log_hub_to("add.output -> consume.input", hub.clone()).unwrap();
    let made = remaining_steps(&mut steps).await;
    assert_eq!(
        made,
        [
            "produce: run 1",
            "produce.output -> add.input: moved 4 B",
            "produce: run 2",
            "produce: ended",
            "add: run 1",
            "produce.output -> add.input: moved 4 B",
            "add.output -> consume.input: moved 4 B",
            "add: run 2",
            "consume: run 1",
            "add.output -> consume.input: moved 4 B",
            "add: ended",
            "consume: run 2",
            "consume: ended",
        ]
    );
    let report = steps.run_on().await.unwrap();
    assert_eq!(*lock(&seen), [[2], [3]]);
    assert_eq!(report.operator("add").unwrap().runs, 2);

    let log = log.get();
    assert_eq!(
        log[..8],
        [
            "generation 1",
            "  produce: run 1",
            "    produce.output -> add.input: 1 in: 1 queued",
            "  add: waits for hub `produce.output -> add.input` to move a message",
            "  consume: waits for a message in hub `add.output -> consume.input`",
            "  produce.output -> add.input: moved 4 B",
            "generation 2",
            "  produce: run 2",
        ]
    );
    assert_eq!(log.last().unwrap(), "the flow has ended");
    assert_eq!(
        hub.get(),
        [
            "generation 2: 1 in: 1 queued",
            "generation 2: add.output -> consume.input: moved 4 B",
            "generation 3: 1 in: 2 queued",
            "generation 3: 1 taken: 1 queued",
            "generation 3: add.output -> consume.input: moved 4 B",
            "generation 4: 1 taken: 0 queued",
        ]
    );
});

on_both!(l5_a_step_waits_for_its_device_work, async |device: Device| {
    let (holds, enqueued, seen) = (shared(), Arc::new(AtomicBool::new(false)), shared());
    let mut flow = Flow::new("l5");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let add = flow.add("add", IncrementOnHold { holds: holds.clone(), enqueued: enqueued.clone() }).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, add.input, HubOptions::bounded(1).envelope_bytes(4));
    flow.connect(add.output, consume.input);
    let mut steps = flow.steps().unwrap();
    assert_eq!(steps.next().await.unwrap().to_string(), "produce: run 1");
    assert_eq!(steps.next().await.unwrap().to_string(), "produce: ended");
    assert_eq!(steps.next().await.unwrap().to_string(), "produce.output -> add.input: moved 4 B");
    // `next` is cancel safe: dropping its future, as a `select!` does, loses nothing.
    until("the kernel is enqueued", || {
        assert!(steps.next().now_or_never().is_none(), "the step's device work is held up");
        enqueued.load(Ordering::SeqCst)
    })
    .await;
    for _ in 0..100 {
        assert!(steps.next().now_or_never().is_none(), "the step's device work is held up");
        tokio::task::yield_now().await;
    }
    lock(&holds).clear();
    assert_eq!(steps.next().await.unwrap().to_string(), "add: run 1");
    within(steps.run_on()).await.unwrap();
    assert_eq!(*lock(&seen), [[2]]);
});

#[tokio::test]
async fn l5_stepping_stops_at_a_step_and_run_on_runs_the_rest() {
    let seen = shared();
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(1000));
    let middle = flow.add("middle", pass_on::<u32>());
    let sink = flow.add("sink", keep(&seen));
    flow.connect(source.output, middle.input);
    flow.connect(middle.output, sink.input);
    let mut steps = flow.steps().unwrap();
    while let Some(step) = within(steps.next()).await {
        if step == (Step::Ran { operator: "sink".into(), run: 3 }) {
            break;
        }
    }
    assert_eq!(steps.generation(), 3);
    assert_eq!(*lock(&seen), [1, 2, 3], "nothing runs between steps");
    let report = within(steps.run_on()).await.unwrap();
    assert_eq!(report.operator("sink").unwrap().runs, 1000);
    assert_eq!(*lock(&seen), (1..=1000).collect::<Vec<_>>());
}

/// A flow whose hub copies three envelopes from the host to the reader's device.
fn copies_to(device: &Device) -> Flow {
    let mut left = 3;
    let mut flow = Flow::new("l5");
    let read = flow.add(
        "read",
        source(move || {
            let more = left > 0;
            left -= 1;
            std::future::ready(more.then(|| Buffer::<u8>::pinned(&Device::host(), 16).map(Envelope::from)).transpose())
        }),
    );
    let end = flow.add("end", sink(async |_: Envelope<u8>| Ok(()))).on(device);
    flow.connect_with(read.output, end.input, HubOptions::bounded(2).envelope_bytes(16));
    flow
}

/// Hubs that are made after `run_on` run by themselves, too.
#[tokio::test]
async fn l5_run_on_before_the_flow_has_made_its_hubs() {
    let device = emulated();
    for polls_first in [false, true] {
        let mut steps = copies_to(&device).steps().unwrap();
        if polls_first {
            assert!(steps.next().now_or_never().is_none(), "the flow's task has not been polled yet");
        }
        let report = within(steps.run_on()).await.unwrap();
        assert_eq!(report.operator("end").unwrap().runs, 3);
    }
}

#[derive(Ports)]
struct ThricePorts {
    #[input]
    input: Input<u32>,
    #[output]
    output: Output<u32>,
}

/// Sends each number three times: more than its condition guarantees room for.
struct Thrice;

impl Operator for Thrice {
    type Ports = ThricePorts;

    async fn compute(&mut self, ports: &mut ThricePorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        for _ in 0..3 {
            ports.output.send(number).await?;
        }
        Ok(())
    }
}

#[tokio::test]
async fn l5_a_run_that_waits_in_its_middle_lets_other_operators_step() {
    let (seen, log) = (shared(), Lines::default());
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(1));
    let thrice = flow.add("thrice", Thrice);
    let sink = flow.add("sink", keep(&seen));
    flow.connect(source.output, thrice.input);
    flow.connect(thrice.output, sink.input);
    let mut steps = flow.steps().unwrap().log_to(log.clone());
    let made = remaining_steps(&mut steps).await;
    // The run continues as soon as the sink takes a message: its progress at its next turn is not deterministic.
    assert_eq!(made[..3], ["source: run 1", "thrice: run 1 waits in its middle", "sink: run 1"]);
    assert!(made.iter().filter(|step| *step == "thrice: run 1").count() == 1, "{made:?}");
    assert!(made.contains(&"sink: run 3".to_string()), "{made:?}");
    within(steps.run_on()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 1, 1]);
}

/// A generation without a step does not end a flow that waits for its next period.
#[tokio::test(start_paused = true)]
async fn l5_stepping_waits_for_the_next_period() {
    let (seen, start) = (shared(), Instant::now());
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(9)).when(every(Duration::from_secs(10))).when(count(3));
    let sink = flow.add("sink", keep(&seen));
    flow.connect(source.output, sink.input);
    let mut steps = flow.steps().unwrap();
    let mut times = Vec::new();
    while let Some(step) = steps.next().await {
        if matches!(&step, Step::Ran { operator, .. } if **operator == *"source") {
            times.push(start.elapsed().as_secs());
        }
    }
    steps.run_on().await.unwrap();
    assert_eq!(times, [0, 10, 20]);
    assert_eq!(*lock(&seen), [1, 2, 3]);
}

/// Waits in its run for another message, for a second at most.
struct WaitsInRun;

impl Operator for WaitsInRun {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let _ = tokio::time::timeout(Duration::from_secs(1), ports.input.recv()).await;
        Ok(())
    }
}

/// The end of a run that waited in its middle, and the end of an operator with its own loop, are steps as they happen.
#[tokio::test(start_paused = true)]
async fn l5_ends_between_steps_are_returned_at_once() {
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(2)).when(every(Duration::from_secs(1000)));
    let waits = flow.add("waits", WaitsInRun);
    flow.connect(source.output, waits.input);
    let _ = flow.add("own loop", task(|_: &mut (), _| tokio::time::sleep(Duration::from_secs(10)).map(Ok).boxed()));
    let (mut steps, start) = (flow.steps().unwrap(), Instant::now());
    let mut made = Vec::new();
    while made.len() < 4 {
        let step = steps.next().await.unwrap();
        made.push((step.to_string(), start.elapsed().as_secs()));
    }
    let expected =
        [("source: run 1", 0), ("waits: run 1 waits in its middle", 0), ("waits: run 1", 1), ("own loop: ended", 10)];
    assert_eq!(made, expected.map(|(step, at)| (step.to_string(), at)));
}

#[derive(Ports)]
struct LoopPorts {
    #[input(at_least = 1)]
    input: Inputs<u32>,
    #[output]
    back: Output<u32>,
    #[output]
    output: Output<u32>,
}

/// Sends a message round the loop as many times as its number.
struct Loop;

impl Operator for Loop {
    type Ports = LoopPorts;

    async fn compute(&mut self, ports: &mut LoopPorts, _cx: &mut Cx) -> Result<()> {
        match ports.input.try_take_any()? {
            Some((_, 0)) => Ok(ports.output.send(0).await?),
            Some((_, left)) => Ok(ports.back.send(left - 1).await?),
            None => Ok(()),
        }
    }
}

#[derive(Ports)]
struct RowPorts {
    #[input]
    parts: Inputs<u32>,
    #[output]
    sums: Output<u32>,
}

struct Row;

impl Operator for Row {
    type Ports = RowPorts;

    async fn compute(&mut self, ports: &mut RowPorts, _cx: &mut Cx) -> Result<()> {
        let sum = ports.parts.take()?.sum();
        ports.sums.send(sum).await?;
        Ok(())
    }
}

/// The end of an idle loop is a step, and the operators that waited for it continue to step.
#[tokio::test(start_paused = true)]
async fn l5_operators_behind_an_idle_loop_are_stepped() {
    let mut flow = Flow::new("l5");
    let (few, many) = (flow.add("few", numbers(2)), flow.add("many", numbers(10)));
    let (around, row) = (flow.add("loop", Loop), flow.add("row", Row));
    let end = flow.add("end", sink(async |_: u32| Ok(())));
    flow.connect(few.output, around.input);
    flow.connect_with(around.back, around.input, HubOptions::bounded(4));
    flow.connect(around.output, row.parts);
    flow.connect(many.output, row.parts);
    flow.connect(row.sums, end.input);
    let mut steps = flow.steps().unwrap();
    let made = remaining_steps(&mut steps).await;
    assert_eq!(made.iter().filter(|step| step.starts_with("end: run")).count(), 10, "{made:#?}");
    let ends = |name: &str| made.iter().filter(|step| **step == format!("{name}: ended")).count();
    assert_eq!(["few", "many", "loop", "row", "end"].map(ends), [1; 5], "{made:#?}");
    assert_eq!(within(steps.run_on()).await.unwrap().operator("end").unwrap().runs, 10);
}

/// Operators that wait only for each other end or stall, although messages may come from outside.
#[tokio::test(start_paused = true)]
async fn l5_an_idle_or_stalled_loop_is_found_beside_an_ingress() {
    // The ingress is dropped once the loop's egress has ended.
    let mut flow = Flow::new("l5");
    let (feed, around) = (flow.add("feed", numbers(3)), flow.add("loop", Loop));
    let end = flow.add("end", sink(async |_: u32| Ok(())));
    flow.connect(feed.output, around.input);
    flow.connect_with(around.back, around.input, HubOptions::bounded(4));
    let (mut egress, ingress) = (flow.egress("egress", around.output), flow.ingress("ingress", end.input));
    let forwards = tokio::spawn(async move {
        while let Some(number) = egress.recv().await {
            ingress.send(number).await.unwrap();
        }
    });
    let mut steps = flow.steps().unwrap();
    let made = within(remaining_steps(&mut steps)).await;
    assert!(made.contains(&"loop: ended".into()), "{made:#?}");
    within(steps.run_on()).await.unwrap();
    forwards.await.unwrap();

    // The loop has no room for its input.
    let mut flow = Flow::new("l5");
    let mut round = 0..4;
    let feed = flow.add("feed", source(move || std::future::ready(Ok(round.next().map(|_| 5)))));
    let (around, print) = (flow.add("loop", Loop), flow.add("print", sink(async |_: u32| Ok(()))));
    let other = flow.add("other", sink(async |_: u32| Ok(())));
    flow.connect(feed.output, around.input);
    flow.connect_with(around.back, around.input, HubOptions::bounded(1));
    flow.connect(around.output, print.input);
    let kept = flow.ingress("ingress", other.input);
    let mut steps = flow.steps().unwrap();
    within(remaining_steps(&mut steps)).await;
    assert!(within(steps.run_on()).await.unwrap_err().is_stalled());
    drop(kept);
}

/// Sends its only envelope this many times.
struct Fills(u32);

#[derive(Ports)]
struct FillsPorts {
    #[output(envelope_bytes = 4, envelopes = 1)]
    output: Output<Envelope<u8>>,
}

impl Operator for Fills {
    type Ports = FillsPorts;

    async fn compute(&mut self, ports: &mut FillsPorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        let envelope = ports.output.blank().await?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// The steps wait for envelopes that are outside of the flow, and for chunks of a link outside of it.
#[tokio::test(start_paused = true)]
async fn l5_stepping_waits_for_envelopes_and_chunks_from_outside() {
    let pause = || tokio::time::sleep(Duration::from_secs(1));
    let mut flow = Flow::new("l5");
    let fills = flow.add("fills", Fills(3));
    let mut egress = flow.egress("egress", fills.output);
    let mut steps = flow.steps().unwrap();
    let keeps = tokio::spawn(async move {
        while let Some(envelope) = egress.recv().await {
            pause().await;
            drop(envelope);
        }
    });
    let made = remaining_steps(&mut steps).await;
    let fills = made.iter().filter(|step| step.starts_with("fills")).collect::<Vec<_>>();
    assert_eq!(fills, ["fills: run 1", "fills: run 2", "fills: run 3", "fills: ended"]);
    keeps.await.unwrap();

    let hub = ChunkHub::<u32>::builder("hub").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut by_hand = hub.produce(&Device::host()).unwrap();
    let seen = shared();
    let mut flow = Flow::new("l5");
    let drain = flow.add("drain", Drain(seen.clone()));
    flow.link(drain.numbers, &hub);
    let mut steps = flow.steps().unwrap();
    let fills = tokio::spawn(async move {
        for number in 0..3 {
            pause().await;
            by_hand.with(async |blank| blank.fill_from(&[number]).await).await.unwrap().unwrap();
        }
        pause().await;
    });
    assert_eq!(remaining_steps(&mut steps).await, ["drain: run 1", "drain: run 2", "drain: run 3", "drain: ended"]);
    fills.await.unwrap();
    assert_eq!(*lock(&seen), [[0], [1], [2]]);
}

#[tokio::test]
async fn l5_messages_from_outside_are_stepped() {
    let seen = shared();
    let mut flow = Flow::new("l5");
    let sink = flow.add("sink", keep(&seen));
    let ingress = flow.ingress("ingress", sink.input);
    let mut steps = flow.steps().unwrap();
    let sending = tokio::spawn(async move {
        for number in 1..=3 {
            ingress.send(number).await.unwrap();
        }
    });
    let made = remaining_steps(&mut steps).await;
    sending.await.unwrap();
    let runs: Vec<_> = made.iter().filter(|step| step.starts_with("sink: run")).collect();
    assert_eq!(runs, ["sink: run 1", "sink: run 2", "sink: run 3"]);
    within(steps.run_on()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3]);
}

#[tokio::test]
async fn l5_run_on_returns_the_failure_or_the_stall() {
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(9));
    let sink = flow.add("sink", sink(|_: u32| std::future::ready(Err(Error::other("no more")))));
    flow.connect(source.output, sink.input);
    let log = Lines::default();
    let mut steps = flow.steps().unwrap().log_to(log.clone());
    let made = remaining_steps(&mut steps).await;
    assert_eq!(made[0], "source: run 1");
    assert!(log.get().last().unwrap().starts_with("the flow has failed: operator `sink`: no more"), "{:?}", log.get());
    let error = steps.run_on().await.unwrap_err();
    assert!(error.to_string().contains("operator `sink`: no more"), "{error}");

    // `pair` waits for its own first message.
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(2));
    let pair = flow.add("pair", Pair);
    flow.connect(source.output, pair.left);
    flow.connect(pair.back, pair.right);
    let mut steps = flow.steps().unwrap();
    assert_eq!(remaining_steps(&mut steps).await[0], "source: run 1");
    let error = steps.run_on().await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    assert!(error.to_string().contains("`pair` waits for a message in hub `pair.back -> pair.right`"), "{error}");
}

#[derive(Ports)]
struct PairPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[output]
    back: Output<u32>,
}

struct Pair;

impl Operator for Pair {
    type Ports = PairPorts;

    async fn compute(&mut self, ports: &mut PairPorts, _cx: &mut Cx) -> Result<()> {
        let sum = ports.left.take()? + ports.right.take()?;
        ports.back.send(sum).await?;
        Ok(())
    }
}

/// What an operator does with its wait for the next run while it waits for another operator.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wait {
    Dropped,
    /// Kept, but not polled.
    Kept,
    /// Ended: there is no next run.
    Over,
}

/// Waits once for a run of another operator: when `begin` is notified, or after its own last run.
struct Awaits {
    wait: Wait,
    begin: Arc<Notify>,
    other: Arc<Notify>,
    done: Arc<AtomicBool>,
}

impl Awaits {
    async fn wait_for_other(&self) {
        self.other.notified().await;
        self.done.store(true, Ordering::SeqCst);
    }
}

impl Operator for Awaits {
    type Ports = SinkPorts<u32>;

    async fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        loop {
            let mut ready = Box::pin(cx.ready(ports));
            let may_run = tokio::select! {
                biased;
                () = self.begin.notified(), if self.wait != Wait::Over => None,
                may_run = &mut ready => Some(may_run),
            };
            let may_run = match may_run {
                Some(may_run) => {
                    drop(ready);
                    may_run
                }
                None if self.wait == Wait::Kept => {
                    self.wait_for_other().await;
                    ready.await
                }
                None => {
                    drop(ready);
                    self.wait_for_other().await;
                    continue;
                }
            };
            if !may_run {
                break;
            }
            ports.input.take()?;
        }
        if self.wait == Wait::Over {
            self.wait_for_other().await;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }
}

/// Notifies in each run, until the flag is set.
struct Notifies(Arc<Notify>, Arc<AtomicBool>);

impl Operator for Notifies {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        self.0.notify_waiters();
        if self.1.load(Ordering::SeqCst) {
            cx.finish();
        }
        Ok(())
    }
}

#[tokio::test]
async fn l5_an_operator_that_waits_for_another_one_between_its_runs_is_skipped() {
    for wait in [Wait::Dropped, Wait::Kept, Wait::Over] {
        let (begin, other) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let done = Arc::new(AtomicBool::new(false));
        let (mut numbers, notify) = (1..=6, begin.clone());
        let notify_at_third = move || {
            let number = numbers.next();
            if number == Some(3) {
                notify.notify_one();
            }
            std::future::ready(Ok(number))
        };
        let mut flow = Flow::new("l5");
        let source = flow.add("source", source(notify_at_third));
        let awaits = flow.add("awaits", Awaits { wait, begin, other: other.clone(), done: done.clone() });
        flow.add("notifies", Notifies(other, done.clone()));
        flow.connect(source.output, awaits.input);
        let log = Lines::default();
        let mut steps = flow.steps().unwrap().log_to(log.clone());
        let made = remaining_steps(&mut steps).await;
        let runs = made.iter().filter(|step| step.starts_with("awaits: run")).count();
        assert_eq!((runs, done.load(Ordering::SeqCst)), (6, true), "{wait:?}: {made:?}");
        within(steps.run_on()).await.unwrap();
        let skipped = log.get().contains(&"  awaits: continues by itself".to_string());
        assert!(skipped || wait == Wait::Kept, "{wait:?}: {:?}", log.get());
    }
}

/// Operators on their own threads, with concurrent runs, and in a `LocalFlow`.
#[tokio::test]
async fn l5_any_kind_of_flow_can_be_stepped() {
    let seen = shared();
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(4)).on_own_thread();
    let middle = flow.add("middle", concurrent(2, map(|number: u32| std::future::ready(Ok(number)))));
    let sink = flow.add("sink", keep(&seen));
    flow.connect(source.output, middle.input);
    flow.connect(middle.output, sink.input);
    let mut steps = flow.steps().unwrap();
    let made = remaining_steps(&mut steps).await;
    assert_eq!(
        made[..6],
        ["source: run 1", "middle: run 1", "sink: run 1", "source: run 2", "middle: run 2", "sink: run 2"]
    );
    within(steps.run_on()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3, 4]);

    let seen = shared();
    let here = async {
        let mut flow = LocalFlow::new("l5");
        let source = flow.add("source", numbers(2));
        let sink = flow.add("sink", keep(&seen));
        flow.connect(source.output, sink.input);
        let mut steps = flow.steps().unwrap();
        let made = remaining_steps(&mut steps).await;
        assert_eq!(made[..4], ["source: run 1", "sink: run 1", "source: run 2", "sink: run 2"]);
        steps.run_on().await.unwrap();
    };
    tokio::task::LocalSet::new().run_until(within(here)).await;
    assert_eq!(*lock(&seen), [1, 2]);
}

#[tokio::test]
async fn l5_an_unknown_hub_is_an_error_that_lists_the_hubs() {
    let mut flow = Flow::new("l5");
    let source = flow.add("source", numbers(2));
    let sink = flow.add("sink", keep(&shared()));
    flow.connect(source.output, sink.input);
    let steps = flow.steps().unwrap();
    let error = steps.log_hub_to("source -> sink", Lines::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let expected = "flow `l5` has no hub `source -> sink`: its hubs are `source.output -> sink.input`";
    assert!(error.to_string().contains(expected), "{error}");
}

struct Stops(Arc<AtomicU64>);

impl Operator for Stops {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.output.send(1).await?;
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[tokio::test]
async fn l5_a_drop_aborts_and_a_stop_drains() {
    for drains in [false, true] {
        let stops = Arc::new(AtomicU64::new(0));
        let mut flow = Flow::new("l5");
        let source = flow.add("source", Stops(stops.clone()));
        let sink = flow.add("sink", keep(&shared()));
        flow.connect(source.output, sink.input);
        let mut steps = flow.steps().unwrap();
        assert_eq!(steps.next().await.unwrap().to_string(), "source: run 1");
        if drains {
            steps.handle().stop();
            let made = remaining_steps(&mut steps).await;
            assert!(made.contains(&"sink: run 1".to_string()), "a stop drains the messages: {made:?}");
            within(steps.run_on()).await.unwrap();
        } else {
            drop(steps);
        }
        until("the operator has stopped", || stops.load(Ordering::SeqCst) == 1).await;
    }
}

#[derive(Ports)]
struct OwnLoopPorts {
    #[input(optional)]
    first: Input<u32>,
    #[input]
    back: Input<u32>,
    #[output]
    forth: Output<u32>,
}

/// An operator that waits for its next run or a timer has not ended. One that only left its waker in a channel is idle, and
/// so is its loop.
#[tokio::test(start_paused = true)]
async fn l5_a_wait_beside_the_wait_for_the_next_run_keeps_the_operator_alive() {
    for (waits, stepped) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut flow = Flow::new("l5");
        let source = flow.add("source", numbers(u32::from(waits))).when(every(Duration::from_millis(10)));
        let ready = Arc::new(Mutex::new(None));
        let result = ready.clone();
        let own = task(move |ports: &mut OwnLoopPorts, cx| {
            let result = result.clone();
            async move {
                let (_sender, mut channel) = tokio::sync::mpsc::channel::<()>(1);
                let ready = match waits {
                    true => tokio::time::timeout(Duration::from_millis(300), cx.ready(ports)).await.ok(),
                    false => {
                        assert!(channel.recv().now_or_never().is_none(), "polled once; the waker stays registered");
                        Some(cx.ready(ports).await)
                    }
                };
                *lock(&result) = Some((ready, ports.first.try_take()?));
                Ok(())
            }
            .boxed()
        });
        let own = flow.add("own", own);
        flow.connect(source.output, own.first);
        flow.connect(own.forth, own.back);
        if stepped {
            let mut steps = flow.steps().unwrap();
            let made = remaining_steps(&mut steps).await;
            assert!(made.contains(&"source: ended".to_string()), "waits {waits}: {made:?}");
            within(steps.run_on()).await.unwrap();
        } else {
            within(flow.run()).await.unwrap();
        }
        let ready = lock(&ready).unwrap();
        match waits {
            true => assert_eq!(ready, (None, Some(1)), "stepped {stepped}"),
            false => assert_eq!(ready, (Some(false), None), "stepped {stepped}"),
        }
    }
}

/// Two operators that wait for their next run or for a timer. Each is polled again only after a step, and not because the
/// other one was polled.
#[tokio::test(start_paused = true)]
async fn l5_operators_that_wait_for_a_timer_are_not_polled_forever() {
    let mut flow = Flow::new("l5");
    for runs in [0, 1] {
        let own = task(move |ports: &mut LoopOfOnePorts, cx| {
            async move {
                for number in 0..runs {
                    ports.forth.send(number).await?;
                }
                let mut ran = 0;
                while tokio::time::timeout(Duration::from_millis(300), cx.ready(ports)).await.is_ok_and(|ready| ready) {
                    ports.back.take()?;
                    ran += 1;
                }
                assert_eq!(ran, runs);
                Ok(())
            }
            .boxed()
        });
        let own = flow.add(format!("own {runs}"), own);
        flow.connect(own.forth, own.back);
    }
    let mut steps = flow.steps().unwrap();
    let made = remaining_steps(&mut steps).await;
    assert_eq!(made, ["own 1: run 1", "own 0: ended", "own 1: ended"]);
    assert!(steps.generation() < 10, "{} generations", steps.generation());
    within(steps.run_on()).await.unwrap();
}

#[derive(Ports)]
struct LoopOfOnePorts {
    #[input]
    back: Input<u32>,
    #[output(optional)]
    forth: Output<u32>,
}
