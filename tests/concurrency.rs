//! Scenarios L7 and E4: several concurrent runs of one operator.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::*;
use tokio::sync::{Barrier, Notify};
use wakeline::{ErrorKind, condition::predicate, operator::concurrent, prelude::*};

fn numbers(count: u32) -> impl Operator<Ports = SourcePorts<u32>> {
    let mut numbers = 0..count;
    source(move || std::future::ready(Ok(numbers.next())))
}

/// Runs a flow through the operator and returns its output, in order.
async fn through<O>(flow_of: u32, operator: O, connect: impl FnOnce(&mut Flow, O) -> Ends) -> Result<Vec<u32>> {
    let mut flow = Flow::new("concurrent");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let all = seen.clone();
    let from = flow.add("numbers", numbers(flow_of));
    let (input, output) = connect(&mut flow, operator);
    let to = flow.add(
        "collect",
        sink(move |n: u32| {
            all.lock().unwrap().push(n);
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(from.output, input);
    flow.connect(output, to.input);
    flow.run().await?;
    Ok(std::mem::take(&mut *seen.lock().unwrap()))
}

type Ends = (wakeline::operator::InputHandle<u32>, wakeline::operator::OutputHandle<u32>);

fn add<O: Operator<Ports = MapPorts<u32, u32>>>(flow: &mut Flow, operator: O) -> Ends {
    let added = flow.add("work", operator);
    (added.input, added.output)
}

/// Blocks its first run until all others have ended.
#[derive(Clone)]
struct SlowFirst {
    others: Arc<AtomicUsize>,
    all: Arc<Notify>,
    count: usize,
}

impl Operator for SlowFirst {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        if number == 0 {
            self.all.notified().await;
        } else if self.others.fetch_add(1, Ordering::SeqCst) + 1 == self.count - 1 {
            self.all.notify_one();
        }
        ports.output.send(number).await?;
        Ok(())
    }
}

fn slow_first(count: usize) -> SlowFirst {
    SlowFirst { others: Arc::default(), all: Arc::default(), count }
}

#[tokio::test]
async fn l7_runs_are_concurrent_and_their_order_is_kept() {
    within(async {
        // The first of four runs ends last. With fewer than four concurrent runs, or if one blocked the others, it
        // would never end.
        let seen = through(4, concurrent(4, slow_first(4)), add).await.unwrap();
        assert_eq!(seen, [0, 1, 2, 3]);
    })
    .await;
}

#[tokio::test]
async fn l7_unordered_messages_arrive_as_runs_end() {
    within(async {
        let seen = through(20, concurrent(4, slow_first(20)).unordered(), add).await.unwrap();
        assert_eq!(seen.len(), 20);
        assert_eq!(seen.last(), Some(&0), "{seen:?}");
        assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 20);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_every_worker_runs_and_nothing_is_lost() {
    within(async {
        let meet = Arc::new(Barrier::new(3));
        let work = map(move |n: u32| {
            let meet = meet.clone();
            async move {
                meet.wait().await;
                Ok(n)
            }
        });
        // `map`'s function is cloned with the operator.
        let seen = through(999, concurrent(3, work), add).await.unwrap();
        assert_eq!(seen, (0..999).collect::<Vec<_>>());
    })
    .await;
}

#[tokio::test]
async fn l7_a_run_that_fails_ends_the_flow_though_an_earlier_one_hangs() {
    within(async {
        let work = map(async |n: u32| match n {
            0 => std::future::pending().await,
            1 => Err("planned".into()),
            n => Ok(n),
        });
        let error = through(9, concurrent(2, work), add).await.unwrap_err();
        assert_eq!(error.to_string(), "operator `work`: planned");

        let work = map(async |n: u32| if n == 1 { panic!("planned") } else { std::future::pending().await });
        let error = through(9, concurrent(2, work), add).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Panicked);
    })
    .await;
}

/// Counts its live clones.
struct Alive(Arc<AtomicUsize>);

impl Clone for Alive {
    fn clone(&self) -> Self {
        self.0.fetch_add(1, Ordering::SeqCst);
        Self(self.0.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct Lives {
    alive: Alive,
    begun: Arc<Notify>,
    at_stop: Arc<Mutex<Option<usize>>>,
}

impl Operator for Lives {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
        let _ = ports.input.take()?;
        self.begun.notify_one();
        std::future::pending().await
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        *self.at_stop.lock().unwrap() = Some(self.alive.0.load(Ordering::SeqCst));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_an_abort_drops_all_workers_before_stop() {
    within(async {
        let (alive, begun, at_stop) = (Arc::new(AtomicUsize::new(1)), Arc::new(Notify::new()), Arc::default());
        let lives = Lives { alive: Alive(alive.clone()), begun: begun.clone(), at_stop: Arc::clone(&at_stop) };
        let mut flow = Flow::new("abort");
        let from = flow.add("numbers", numbers(9));
        let (input, output) = add(&mut flow, concurrent(3, lives));
        let to = flow.add("end", sink(async |_: u32| Ok(())));
        flow.connect(from.output, input);
        flow.connect(output, to.input);
        let running = flow.spawn().unwrap();
        begun.notified().await;
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        assert_eq!(*at_stop.lock().unwrap(), Some(1), "all workers were dropped");
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    })
    .await;
}

#[derive(Ports)]
struct FillPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output(envelope_bytes = 64, envelopes = 3)]
    output: Output<Envelope<u32>>,
}

/// Writes each input element plus one into an envelope of its output.
#[derive(Clone)]
struct AddOne {
    after: Arc<AtomicUsize>,
}

#[kernel]
fn add_one(from: &[u32], to: &mut [u32]) {
    for (from, to) in from.iter().zip(to) {
        *to = from + 1;
    }
}

impl Operator for AddOne {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, cx: &mut Cx) -> Result<()> {
        let from = ports.input.take()?;
        let mut to = ports.output.blank().await?;
        to.set_len(from.len())?;
        cx.insert_metadata("worker", cx.name().to_string());
        add_one::launch(cx.stream()?, &from, &mut to)?;
        ports.output.send(to).await?;
        Ok(())
    }

    async fn after(&mut self, _ports: &mut FillPorts, _cx: &mut Cx) -> Result<()> {
        self.after.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[derive(Ports)]
struct MakePorts {
    #[output(envelope_bytes = 64)]
    output: Output<Envelope<u32>>,
}

struct Make(u32);

impl Operator for Make {
    type Ports = MakePorts;

    async fn compute(&mut self, ports: &mut MakePorts, cx: &mut Cx) -> Result<()> {
        let mut numbers = ports.output.blank().await?;
        numbers.set_len(16)?;
        numbers.write().await?.fill(self.0);
        self.0 += 1;
        if self.0 == 100 {
            cx.finish();
        }
        ports.output.send(numbers).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct CheckPorts {
    #[input]
    input: Input<Envelope<u32>>,
}

struct Check {
    next: u32,
    workers: HashSet<String>,
}

impl Operator for Check {
    type Ports = CheckPorts;

    async fn compute(&mut self, ports: &mut CheckPorts, cx: &mut Cx) -> Result<()> {
        let numbers = ports.input.take()?;
        self.next += 1;
        assert_eq!(numbers.read().await?, [self.next; 16]);
        self.workers.extend(cx.metadata().get::<String>("worker").cloned());
        if self.next == 100 {
            assert!(self.workers.iter().all(|worker| worker.starts_with("work #")), "{:?}", self.workers);
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_workers_have_streams_of_their_own_and_share_the_hubs_envelopes() {
    within(async {
        let device = emulated();
        let after = Arc::new(AtomicUsize::new(0));
        let mut flow = Flow::new("device");
        let make = flow.add("make", Make(0));
        let work = flow.add("work", concurrent(3, AddOne { after: after.clone() })).on(&device);
        let check = flow.add("check", Check { next: 0, workers: HashSet::new() });
        flow.connect(make.output, work.input);
        flow.connect(work.output, check.input);
        let report = flow.run().await.unwrap();
        let work = report.operator("work").unwrap();
        assert_eq!((work.runs, work.messages_in, work.messages_out), (100, 100, 100));
        assert_eq!(after.load(Ordering::SeqCst), 100);
        drop(flow);
        assert_eq!(device.memory_in_use(), 0);
    })
    .await;
}

#[derive(Ports)]
struct BlankMapPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 4)]
    output: Output<Envelope<u32>>,
}

/// The first run asks for a blank envelope only after two later runs have ended.
#[derive(Clone)]
struct LateBlank {
    ended: Arc<AtomicUsize>,
    two: Arc<Notify>,
}

impl Operator for LateBlank {
    type Ports = BlankMapPorts;

    async fn compute(&mut self, ports: &mut BlankMapPorts, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        if n == 0 {
            self.two.notified().await;
        }
        let mut blank = ports.output.blank().await?;
        blank.space().await?[0] = n;
        blank.set_len(1)?;
        ports.output.send(blank).await?;
        if n > 0 && self.ended.fetch_add(1, Ordering::SeqCst) == 1 {
            self.two.notify_one();
        }
        Ok(())
    }
}

/// Runs [`LateBlank`] with three concurrent runs and the given hub.
async fn late_blank(hub: HubOptions) -> Result<Vec<u32>> {
    let seen = shared();
    let mut flow = Flow::new("blanks");
    let from = flow.add("numbers", numbers(6));
    let work = flow.add("work", concurrent(3, LateBlank { ended: Arc::default(), two: Arc::default() }));
    let to = flow.add("collect", Collect(seen.clone()));
    flow.connect(from.output, work.input);
    flow.connect_with(work.output, to.input, hub);
    within(flow.run()).await?;
    let seen = lock(&seen).concat();
    Ok(seen)
}

/// Later runs keep the envelopes that they have filled. The hub must have enough for the first run as well, or the
/// setup is an error.
#[tokio::test]
async fn l7_later_runs_leave_the_first_its_blank_envelope() {
    for hub in [HubOptions::bounded(1), HubOptions::bounded(1).envelopes(3)] {
        assert_eq!(late_blank(hub).await.unwrap(), [0, 1, 2, 3, 4, 5]);
    }
    let error = late_blank(HubOptions::bounded(1).envelopes(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("`work` has 3 runs at a time, which keep 3 envelopes"), "{error}");
}

#[tokio::test]
async fn e4_concurrent_runs_have_no_thread_of_their_own() {
    let mut flow = Flow::new("threads");
    let from = flow.add("numbers", numbers(1));
    let work = flow.add("work", concurrent(1, sink(async |_: u32| Ok(()))));
    flow.connect(from.output, work.input);
    let _work = work.on_own_thread();
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("`on_own_thread` or `concurrent`"), "{error}");
}

/// A run's messages are fixed when it begins: `recv` yields no others, although the source sends more.
#[tokio::test]
async fn l7_recv_in_a_run_yields_only_its_messages() {
    #[derive(Clone)]
    struct TakeAll(Shared<Vec<u32>>);

    #[derive(Ports)]
    struct PairsPorts {
        #[input(at_least = 2, capacity = 4)]
        numbers: Input<u32>,
    }

    impl Operator for TakeAll {
        type Ports = PairsPorts;

        async fn compute(&mut self, ports: &mut PairsPorts, _cx: &mut Cx) -> Result<()> {
            let mut all = Vec::new();
            while let Some(number) = ports.numbers.recv().await? {
                all.push(number);
            }
            lock(&self.0).push(all);
            Ok(())
        }
    }

    let seen = shared();
    let mut flow = Flow::new("recv");
    let from = flow.add("numbers", numbers(8));
    let work = flow.add("work", concurrent(2, TakeAll(seen.clone())));
    flow.connect(from.output, work.numbers);
    within(flow.run()).await.unwrap();
    let mut seen = lock(&seen).clone();
    seen.sort();
    assert_eq!(seen, [[0, 1], [2, 3], [4, 5], [6, 7]]);
}

/// A message that a run does not take goes to no other run and counts as untaken.
#[tokio::test]
async fn l7_messages_that_a_run_leaves_are_counted() {
    #[derive(Clone)]
    struct TakeFirst(Shared<u32>);

    #[derive(Ports)]
    struct TwoPorts {
        #[input(at_least = 2, capacity = 4)]
        numbers: Input<u32>,
        #[input(optional)]
        others: Inputs<u32>,
    }

    impl Operator for TakeFirst {
        type Ports = TwoPorts;

        async fn compute(&mut self, ports: &mut TwoPorts, _cx: &mut Cx) -> Result<()> {
            lock(&self.0).push(ports.numbers.take()?);
            Ok(())
        }
    }

    let seen = shared();
    let mut flow = Flow::new("leaves");
    let from = flow.add("numbers", numbers(6));
    let other = flow.add("other", numbers(5));
    let work = flow.add("work", concurrent(1, TakeFirst(seen.clone())));
    flow.connect(from.output, work.numbers);
    flow.connect(other.output, work.others);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [0, 2, 4]);
    let of = |hub: &str| report.hubs.iter().find(|found| found.name.starts_with(hub)).unwrap();
    assert_eq!((of("numbers").passed, of("numbers").untaken), (3, 3), "{report}");
    assert_eq!((of("other").passed, of("other").dropped), (0, 0), "{report}");
    assert_eq!(report.untaken, 3 + of("other").untaken, "{report}");
    assert_eq!(report.operator("work").unwrap().messages_in, 3, "{report}");
}

/// Waits in each run for all concurrent runs.
#[derive(Clone)]
struct Together(Arc<Barrier>);

impl Operator for Together {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        self.0.wait().await;
        ports.output.send(number).await?;
        Ok(())
    }
}

#[tokio::test]
async fn q8_a_stall_behind_concurrent_runs_that_have_ended_is_reported() {
    for runs in [2, 3, 4] {
        let mut flow = Flow::new("stall");
        let from = flow.add("numbers", numbers(runs as u32));
        let work = flow.add("work", concurrent(runs, Together(Arc::new(Barrier::new(runs)))));
        let to = flow.add("never", sink(async |_: u32| Ok(()))).when(predicate(|| false));
        flow.connect(from.output, work.input);
        flow.connect(work.output, to.input);
        let error = within(flow.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
        assert!(error.to_string().contains("hub `work.output -> never.input`"), "{error}");
    }
}

/// Messages that a run sent before it closed its output are delivered, and so are those of the other active runs.
#[tokio::test]
async fn q6_an_output_that_a_concurrent_run_closes_ends_after_the_others() {
    #[derive(Clone)]
    struct Closes(Arc<Barrier>);

    impl Operator for Closes {
        type Ports = MapPorts<u32, u32>;

        async fn compute(&mut self, ports: &mut MapPorts<u32, u32>, _cx: &mut Cx) -> Result<()> {
            let number = ports.input.take()?;
            self.0.wait().await;
            ports.output.send(number).await?;
            if number == 0 {
                ports.output.close();
            }
            Ok(())
        }
    }

    let operator = || Closes(Arc::new(Barrier::new(3)));
    let seen = within(through(100, concurrent(3, operator()), add)).await.unwrap();
    assert_eq!(seen, [0, 1, 2]);
    let mut seen = within(through(100, concurrent(3, operator()).unordered(), add)).await.unwrap();
    seen.sort();
    assert_eq!(seen, [0, 1, 2]);
}

/// B4-8: the ports of a run are values that it may swap. The messages that it leaves are then counted at the other hub,
/// but never more than were taken there.
#[tokio::test]
async fn a_run_that_swaps_its_inputs_ends() {
    #[derive(Ports)]
    struct BothPorts {
        #[input]
        few: Input<u32>,
        #[input(at_least = 3)]
        many: Input<u32>,
    }

    #[derive(Clone)]
    struct Swaps;
    impl Operator for Swaps {
        type Ports = BothPorts;

        async fn compute(&mut self, ports: &mut BothPorts, _cx: &mut Cx) -> Result<()> {
            std::mem::swap(&mut ports.few, &mut ports.many);
            Ok(())
        }
    }

    let mut flow = Flow::new("swapped");
    let few = flow.add("few", numbers(1));
    let many = flow.add("many", numbers(3));
    let swaps = flow.add("swaps", concurrent(1, Swaps));
    flow.connect(few.output, swaps.few);
    flow.connect_with(many.output, swaps.many, HubOptions::bounded(4));
    let report = within(flow.run()).await.unwrap();
    assert!(report.hubs.iter().all(|hub| hub.passed <= 3 && hub.untaken <= 3), "{report}");
}

/// B4-7: a run that waits for more blank envelopes than exist is a stall, as in an operator without concurrency.
#[tokio::test]
async fn a_stall_within_a_run_is_reported() {
    #[derive(Ports)]
    struct TwoPorts {
        #[input]
        numbers: Input<u32>,
        #[output(envelope_bytes = 4)]
        out: Output<Envelope<u8>>,
    }

    #[derive(Clone)]
    struct Blanks(usize);
    impl Operator for Blanks {
        type Ports = TwoPorts;

        async fn compute(&mut self, ports: &mut TwoPorts, _cx: &mut Cx) -> Result<()> {
            ports.numbers.take()?;
            let mut blanks = Vec::new();
            for _ in 0..self.0 {
                blanks.push(ports.out.blank().await?);
            }
            for blank in blanks {
                ports.out.send(blank).await?;
            }
            Ok(())
        }
    }

    for (runs, count, each, envelopes) in [(1, 1, 2, 1), (1, 3, 2, 1), (2, 1, 3, 2), (2, 4, 3, 2), (2, 8, 2, 4)] {
        let mut flow = Flow::new("two");
        let from = flow.add("numbers", numbers(count));
        let two = flow.add("two", concurrent(runs, Blanks(each)));
        let to = flow.add("sink", sink(async |_: Envelope<u8>| Ok(())));
        flow.connect(from.output, two.numbers);
        flow.connect_with(two.out, to.input, HubOptions::bounded(4).envelopes(envelopes));
        let outcome = within(flow.run()).await;
        if each > envelopes {
            let stalled = outcome.unwrap_err();
            assert_eq!(stalled.kind(), ErrorKind::Stalled, "{stalled}");
            assert!(stalled.to_string().contains("`two` waits for a blank envelope"), "{stalled}");
        } else {
            assert_eq!(outcome.unwrap().hubs[1].passed, 16);
        }
    }
}

/// Takes no message, and records the number of its messages' streams before each run.
#[derive(Clone)]
struct LooksAndLeaves(Shared<usize>);

impl Operator for LooksAndLeaves {
    type Ports = SinkPorts<u32>;

    fn may_run(&mut self, ports: &SinkPorts<u32>, _cx: &Cx) -> bool {
        lock(&self.0).push(ports.input.streams().count());
        true
    }

    async fn compute(&mut self, _ports: &mut SinkPorts<u32>, _cx: &mut Cx) -> Result<()> {
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

/// Messages that concurrent runs have left do not count as messages of the next run.
#[tokio::test]
async fn streams_of_a_run_exclude_messages_left_by_others() {
    let seen = shared();
    let mut flow = Flow::new("leaves");
    let mut next = 0..6_u32;
    let numbers = flow.add("numbers", source(move || std::future::ready(Ok(next.next()))));
    let leaves = flow.add("leaves", concurrent(3, LooksAndLeaves(seen.clone())));
    flow.connect_with(numbers.output, leaves.input, HubOptions::bounded(8));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.untaken, 6);
    let of_leaves = report.operator("leaves").unwrap();
    assert_eq!((of_leaves.runs, of_leaves.messages_in), (6, 0));
    let seen = lock(&seen);
    assert!(!seen.is_empty() && seen.iter().all(|streams| *streams <= 1), "{seen:?}");
}

/// The dispatcher's own waits are not in it: both runs together take at most twice the time of the flow.
#[tokio::test]
async fn the_time_in_runs_is_that_of_the_workers() {
    let slow = map(|n: u32| async move {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        Ok(n)
    });
    let mut flow = Flow::new("busy");
    let numbers = flow.add("numbers", numbers(20));
    let work = flow.add("work", concurrent(2, slow));
    let end = flow.add("end", sink(async |_: u32| Ok(())));
    flow.connect(numbers.output, work.input);
    flow.connect(work.output, end.input);
    let report = flow.run().await.unwrap();
    let busy = report.operator("work").unwrap().busy;
    assert!(busy <= report.elapsed.mul_f64(2.05), "{busy:?} of {:?}", report.elapsed);
}
