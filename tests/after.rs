//! Scenarios L1, L7 and L8: `may_run` is called before a run and `after` once the run's device work has completed;
//! every method may query and end the flow.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use common::*;
use tokio::sync::oneshot;
use wakeline::{
    Stream,
    condition::Status,
    device::{Emulated, Faults, Simulation},
    flow::{Handle, OperatorStatus},
    memory::BufferState,
    prelude::*,
};

/// Records the number of each step, including that of the device work.
struct Steps {
    steps: Shared<u32>,
    runs: u32,
}

impl Steps {
    fn note(&self, step: u32) {
        lock(&self.steps).push(step);
    }
}

impl Operator for Steps {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        self.note(1);
        Ok(())
    }

    fn may_run(&mut self, _ports: &(), _cx: &Cx) -> bool {
        self.note(2);
        self.runs < 3
    }

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        self.runs += 1;
        self.note(3);
        if !cx.device().is_host() {
            let steps = self.steps.clone();
            cx.stream()?.host_function(move || lock(&steps).push(4))?;
        }
        Ok(())
    }

    async fn after(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        self.note(5);
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.note(6);
        Ok(())
    }
}

// After the third run `may_run` returns false while the rest of the flow is idle, so the flow ends.
on_both!(l1_the_order_of_everything, async |device: Device| {
    for on_device in [true, false] {
        let steps = shared();
        let mut flow = Flow::new("l1");
        let added = flow.add("steps", Steps { steps: steps.clone(), runs: 0 });
        let _ = if on_device { added.on(&device) } else { added };
        let report = flow.run().await.unwrap();
        // A late wake-up for the last device work may cause one more call of `may_run`.
        lock(&steps).dedup();
        let wanted: &[u32] = if on_device {
            &[1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 5, 2, 6]
        } else {
            &[1, 2, 3, 5, 2, 3, 5, 2, 3, 5, 2, 6]
        };
        assert_eq!(*lock(&steps), wanted);
        assert_eq!(report.operator("steps").unwrap().runs, 3);
    }
});

/// Blocks its stream in every run, and records the runs and the buffer's state in `after`.
struct Works {
    after: Shared<(u32, BufferState)>,
    before: Shared<u32>,
    buffer: Buffer<u32>,
    held: tokio::sync::mpsc::UnboundedSender<Hold>,
    runs: u32,
}

impl Operator for Works {
    type Ports = SinkPorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.runs += 1;
        lock(&self.before).push(self.runs);
        let stream = cx.stream()?;
        self.held.send(hold(stream)).expect("the test receives");
        increment::launch(stream, &mut self.buffer)
    }

    async fn after(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        lock(&self.after).push((self.runs, self.buffer.state()?));
        Ok(())
    }
}

on_both!(l7_after_is_called_once_when_the_work_is_done, async |device: Device| {
    let buffer = Buffer::from_slice(&Stream::new(&device).unwrap(), &[0_u32; 64]).unwrap();
    buffer.available().await.unwrap();
    let (before, after) = (shared(), shared());
    let (held, mut is_held) = tokio::sync::mpsc::unbounded_channel();
    let mut flow = Flow::new("l7");
    let mut numbers = 0..3_u32;
    let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
    let works = flow.add("works", Works { after: after.clone(), before: before.clone(), buffer, held, runs: 0 });
    let works = works.on(&device);
    flow.connect_with(count.output, works.input, HubOptions::bounded(3));
    let running = flow.spawn().unwrap();
    for run in 1..=3 {
        let hold = is_held.recv().await.unwrap();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        // Messages are queued and no other operator has work. The flow must not count as idle, and the next run must
        // not begin.
        assert_eq!((lock(&before).len(), lock(&after).len()), (run, run - 1), "the run's device work is blocked");
        drop(hold);
    }
    let report = running.await.unwrap();
    assert_eq!(*lock(&after), [1, 2, 3].map(|run| (run, BufferState::Idle)));
    assert_eq!(report.operator("works").unwrap().runs, 3);
});

/// Sends each result from `after`, once the device work has completed.
struct Sums {
    sum: Buffer<u32>,
    fails: bool,
}

#[derive(Ports)]
struct SumsPorts {
    #[input]
    numbers: Input<Envelope<u32>>,
    #[output]
    sums: Output<u32>,
}

impl Operator for Sums {
    type Ports = SumsPorts;

    async fn compute(&mut self, ports: &mut SumsPorts, cx: &mut Cx) -> Result<()> {
        let numbers = ports.numbers.take()?;
        let mut there = Buffer::<u32>::new(cx.device(), 1)?;
        let stream = cx.stream()?;
        sum::launch(stream, &numbers, &mut there)?;
        stream.copy(&there, &mut self.sum)
    }

    async fn after(&mut self, ports: &mut SumsPorts, _cx: &mut Cx) -> Result<()> {
        if self.fails {
            return Err("meant to fail afterwards".into());
        }
        // The result is readable without an await.
        ports.sums.send(self.sum.as_slice()?[0]).await?;
        Ok(())
    }
}

fn sums(device: &Device, fails: bool) -> (Flow, Shared<u32>) {
    let (seen, sum) = (shared(), Buffer::pinned(device, 1).unwrap());
    let noted = seen.clone();
    let mut flow = Flow::new("l7");
    let produce = flow.add("produce", SendEach::new((0..6).map(|n| vec![n; 10])));
    let sums = flow.add("sums", Sums { sum, fails }).on(device);
    let keep = flow.add(
        "keep",
        sink(move |sum: u32| {
            lock(&noted).push(sum);
            ready(Ok(()))
        }),
    );
    flow.connect_with(produce.output, sums.numbers, HubOptions::default().envelope_bytes(40));
    flow.connect(sums.sums, keep.input);
    (flow, seen)
}

on_both!(l7_after_may_look_at_the_results_and_send_them, async |device: Device| {
    let (mut flow, seen) = sums(&device, false);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), [0, 10, 20, 30, 40, 50]);
});

#[tokio::test(start_paused = true)]
async fn l7_under_simulation() {
    for seed in 0..30 {
        let simulation = Simulation::new(seed);
        let seen = simulation
            .run(async {
                let device = Device::simulated(&simulation, Emulated::new()).race_checked();
                let (mut flow, seen) = sums(&device, false);
                flow.run().await.unwrap();
                seen
            })
            .await;
        assert_eq!(*lock(&seen), [0, 10, 20, 30, 40, 50], "seed {seed}");
    }
}

/// An error from `after` fails the flow like an error from a run. After a device fault or a failed run, `after` is not
/// called.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_when_something_fails() {
    let device = emulated();
    let (mut flow, seen) = sums(&device, true);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.to_string(), "operator `sums`: meant to fail afterwards");
    assert!(lock(&seen).is_empty());

    let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("sum", 3)));
    let (mut flow, seen) = sums(&device, false);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    assert!(error.to_string().contains("`sums`"), "{error}");
    assert!(lock(&seen).len() <= 2, "the third result cannot have arrived: {seen:?}");

    struct Fails(Arc<AtomicUsize>);

    impl Operator for Fails {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            Err("meant to fail".into())
        }

        async fn after(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    let called = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("l7");
    let _ = flow.add("fails", Fails(called.clone()));
    within(flow.run()).await.unwrap_err();
    assert_eq!(called.load(Ordering::Relaxed), 0);
}

/// Aborts at every await point between a run and its `after`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_abort_between_a_run_and_its_after() {
    let device = emulated();
    let mut aborted = 0;
    for steps in 0..300 {
        let (flow, _) = sums(&device, false);
        let running = flow.spawn().unwrap();
        for _ in 0..steps {
            tokio::task::yield_now().await;
        }
        running.abort();
        match within(running).await {
            Ok(_) => {}
            Err(error) => {
                assert!(error.is_cancelled(), "after {steps} steps: {error}");
                aborted += 1;
            }
        }
    }
    assert!(aborted > 0, "no flow was aborted in time");
    freed(&device).await;
}

/// The operator takes messages in threes. Each message that arrives causes a new call of `may_run`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_may_run_is_called_again_after_a_message() {
    struct Threes(Shared<[u32; 3]>);

    impl Operator for Threes {
        type Ports = SinkPorts<u32>;

        fn may_run(&mut self, ports: &Self::Ports, _cx: &Cx) -> bool {
            ports.input.len() >= 3
        }

        async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            let three = [ports.input.take()?, ports.input.take()?, ports.input.take()?];
            lock(&self.0).push(three);
            Ok(())
        }
    }

    for left in 0..2 {
        let seen = shared();
        let mut flow = Flow::new("l7");
        let mut numbers = 0..9 + left;
        let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
        let threes = flow.add("threes", Threes(seen.clone()));
        flow.connect_with(count.output, threes.input, HubOptions::bounded(4));
        let outcome = within(flow.run()).await;
        assert_eq!(*lock(&seen), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]);
        match left {
            0 => _ = outcome.unwrap(),
            _ => {
                let error = outcome.unwrap_err();
                assert!(error.is_stalled(), "{error}");
                assert!(error.to_string().contains("`threes` waits for its own `may_run` to allow it"), "{error}");
            }
        }
    }
}

/// Two operators without ports depend on each other's runs and alternate, though nothing wakes them explicitly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_may_run_may_depend_on_what_others_did() {
    struct Turns {
        even: bool,
        turn: Arc<AtomicUsize>,
        own: Shared<usize>,
    }

    impl Operator for Turns {
        type Ports = ();

        fn may_run(&mut self, _ports: &(), _cx: &Cx) -> bool {
            let turn = self.turn.load(Ordering::Acquire);
            turn < 20 && turn.is_multiple_of(2) == self.even
        }

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            let turn = self.turn.fetch_add(1, Ordering::AcqRel);
            lock(&self.own).push(turn);
            Ok(())
        }
    }

    for _ in 0..100 {
        let (turn, evens, odds) = (Arc::new(AtomicUsize::new(0)), shared(), shared());
        let mut flow = Flow::new("l7");
        let _ = flow.add("evens", Turns { even: true, turn: turn.clone(), own: evens.clone() });
        let _ = flow.add("odds", Turns { even: false, turn: turn.clone(), own: odds.clone() });
        within(flow.run()).await.unwrap();
        assert_eq!(*lock(&evens), (0..20).step_by(2).collect::<Vec<_>>());
        assert_eq!(*lock(&odds), (1..20).step_by(2).collect::<Vec<_>>());
    }
}

/// A task outside the flow changes what `may_run` depends on and wakes the operator, while others are busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_may_run_is_called_again_after_a_wake_from_outside() {
    struct Gated {
        open: Arc<AtomicBool>,
        asked: Option<oneshot::Sender<std::task::Waker>>,
        ran: Option<oneshot::Sender<()>>,
    }

    impl Operator for Gated {
        type Ports = ();

        fn may_run(&mut self, _ports: &(), cx: &Cx) -> bool {
            if let Some(asked) = self.asked.take() {
                asked.send(cx.waker()).expect("the test receives");
            }
            self.open.load(Ordering::Acquire)
        }

        async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
            cx.finish();
            self.ran.take().expect("one run").send(()).expect("the test receives");
            Ok(())
        }
    }

    let open = Arc::new(AtomicBool::new(false));
    let ((asked, is_asked), (ran, has_run)) = (oneshot::channel(), oneshot::channel());
    let mut flow = Flow::new("l7");
    let endless = flow.add("endless", source(|| ready(Ok(Some(1_u32)))));
    let sink = flow.add("sink", sink(|_: u32| ready(Ok(()))));
    let _ = flow.add("gated", Gated { open: open.clone(), asked: Some(asked), ran: Some(ran) });
    flow.connect(endless.output, sink.input);
    let running = flow.spawn().unwrap();
    let waker = within(is_asked).await.unwrap();
    open.store(true, Ordering::Release);
    waker.wake_by_ref();
    within(has_run).await.unwrap();
    running.stop();
    let report = within(running).await.unwrap();
    assert_eq!(report.operator("gated").unwrap().runs, 1);
    // The operator no longer exists: waking it has no effect.
    waker.wake();
}

/// An operator that implements `run` without calling its own `after` is a usage error.
#[tokio::test]
async fn l7_a_method_that_would_never_be_called_is_an_error() {
    struct Loops;

    impl Operator for Loops {
        type Ports = SinkPorts<u32>;

        async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            ports.input.take().map(drop)
        }

        async fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            while cx.ready(ports).await {
                self.compute(ports, cx).await?;
            }
            Ok(())
        }

        async fn after(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
            Ok(())
        }
    }

    let mut flow = Flow::new("l7");
    let mut numbers = 0..3_u32;
    let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
    let loops = flow.add("loops", Loops);
    flow.connect(count.output, loops.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let message = error.to_string();
    assert!(message.starts_with("operator `loops`: ") && message.contains("never called its `after`"), "{message}");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    MayRun,
    Compute,
    After,
    Stop,
}

/// The method in which an operator acts on its flow, and the call that it makes.
type Action = (Phase, fn(&Handle));
type Turn<P> = dyn FnMut(&mut P, &mut Cx) -> Result<()> + Send;

/// Queries the flow's status in one of its methods, and ends the flow.
struct Probe<P> {
    at: Option<Action>,
    statuses: Shared<Vec<OperatorStatus>>,
    stopped: Arc<AtomicUsize>,
    turn: Box<Turn<P>>,
}

impl<P> Probe<P> {
    fn act(&mut self, phase: Phase, cx: &Cx) {
        if let Some((_, call)) = self.at.filter(|(at, _)| *at == phase) {
            lock(&self.statuses).push(cx.flow().status());
            call(&cx.flow());
        }
    }
}

impl<P: wakeline::operator::Ports> Operator for Probe<P> {
    type Ports = P;

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        self.act(Phase::Start, cx);
        Ok(())
    }

    fn may_run(&mut self, _ports: &P, cx: &Cx) -> bool {
        self.act(Phase::MayRun, cx);
        true
    }

    async fn compute(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        self.act(Phase::Compute, cx);
        (self.turn)(ports, cx)
    }

    async fn after(&mut self, _ports: &mut P, cx: &mut Cx) -> Result<()> {
        self.act(Phase::After, cx);
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.act(Phase::Stop, cx);
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Runs a flow of three operators, one of which makes a call on the flow in one of its methods. The call ends the flow;
/// for `Phase::Stop` the source ends it. Returns the outcome, the first status that the operator saw and the number of
/// `stop`s.
async fn run_with(index: usize, at: Phase, call: fn(&Handle)) -> (Result<Report>, Vec<OperatorStatus>, usize) {
    let (statuses, stopped) = (shared(), Arc::new(AtomicUsize::new(0)));
    fn probe<P>(
        at: Option<Action>,
        statuses: &Shared<Vec<OperatorStatus>>,
        stopped: &Arc<AtomicUsize>,
        turn: impl FnMut(&mut P, &mut Cx) -> Result<()> + Send + 'static,
    ) -> Probe<P> {
        Probe { at, statuses: statuses.clone(), stopped: stopped.clone(), turn: Box::new(turn) }
    }
    let at = |number| (index == number).then_some((at, call));
    let ends = matches!(at(index), Some((Phase::Stop, _)));
    let mut sent = 0;
    let mut flow = Flow::new("l8");
    let first = flow.add(
        "first",
        probe(at(0), &statuses, &stopped, move |ports: &mut SourcePorts<u32>, cx| {
            sent += 1;
            if ends && sent == 100 {
                cx.finish();
            }
            Ok(ports.output.try_send(sent)?)
        }),
    );
    let second = flow.add(
        "second",
        probe(at(1), &statuses, &stopped, |ports: &mut MapPorts<u32, u32>, _cx| {
            let number = ports.input.take()?;
            Ok(ports.output.try_send(number)?)
        }),
    );
    let third = probe(at(2), &statuses, &stopped, |ports: &mut SinkPorts<u32>, _cx| ports.input.take().map(drop));
    let third = flow.add("third", third);
    flow.connect(first.output, second.input);
    flow.connect(second.output, third.input);
    let outcome = within(flow.run()).await;
    let statuses = lock(&statuses).first().cloned().expect("the phase was reached");
    (outcome, statuses, stopped.load(Ordering::Relaxed))
}

const PHASES: [Phase; 5] = [Phase::Start, Phase::MayRun, Phase::Compute, Phase::After, Phase::Stop];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l8_a_status_and_a_stop_from_each_method_of_each_operator() {
    for phase in PHASES {
        for index in 0..3 {
            let (outcome, statuses, stopped) = run_with(index, phase, Handle::stop).await;
            let case = format!("{phase:?} of operator {index}: {statuses:?}");
            let report = outcome.unwrap();
            let sent = report.operator("first").unwrap().messages_out;
            assert_eq!(report.operator("third").unwrap().messages_in, sent, "the flow is drained. {case}");
            assert_eq!((report.untaken, stopped), (0, 3), "{case}");
            assert_eq!(
                statuses.iter().map(|operator| &*operator.name).collect::<Vec<_>>(),
                ["first", "second", "third"]
            );
            let own = &statuses[index];
            match phase {
                Phase::Start => {
                    assert!(statuses.iter().all(|operator| (operator.running, operator.runs) == (false, 0)), "{case}")
                }
                Phase::Compute => assert!(own.running && own.status == Status::Ready, "{case}"),
                Phase::MayRun => assert!(!own.running && own.runs == 0, "the first run has not begun. {case}"),
                Phase::After => assert_eq!(own.runs, 1, "the run has ended. {case}"),
                Phase::Stop => assert!(statuses.iter().all(|operator| operator.status == Status::Never), "{case}"),
            }
        }
    }
}

/// The same with an abort: every operator's `stop` still runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_an_abort_from_each_method_of_each_operator() {
    for phase in PHASES {
        for index in 0..3 {
            let (outcome, _, stopped) = run_with(index, phase, Handle::abort).await;
            match phase {
                // The flow has ended by then.
                Phase::Stop => _ = outcome.unwrap(),
                _ => assert!(outcome.unwrap_err().is_cancelled(), "{phase:?} of operator {index}"),
            }
            assert_eq!(stopped, 3, "{phase:?} of operator {index}");
        }
    }
}
