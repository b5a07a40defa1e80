//! Scenarios L1, L7 and L8: `may_run` before a run, `after` when its device work is done, and a word to the flow from any
//! method.

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
    condition::Status,
    device::{Emulated, Faults, Simulation},
    flow::{Handle, OperatorStatus},
    memory::BufferState,
    prelude::*,
};

/// Writes the number of each step; its work on the device does so as well.
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

// It says no after its third run, when all else is at rest: that is the end.
on_both!(l1_the_order_of_everything, async |device: Device| {
    for on_device in [true, false] {
        let steps = shared();
        let mut flow = Flow::new("l1");
        let added = flow.add("steps", Steps { steps: steps.clone(), runs: 0 });
        let _ = if on_device { added.on(&device) } else { added };
        let report = flow.run().await.unwrap();
        // A wake that comes late, of its last work, may have it asked once more.
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

/// Holds its stream up in every run, and notes what it sees before and after.
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
        self.held.send(hold(stream)).expect("the test listens");
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
    flow.connect_with(count.output, works.input, Hub::bounded(3));
    let running = flow.spawn().unwrap();
    for run in 1..=3 {
        let hold = is_held.recv().await.unwrap();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        // Messages wait, and nobody else has anything to do: neither is the flow at rest, nor does the next run begin.
        assert_eq!((lock(&before).len(), lock(&after).len()), (run, run - 1), "its work is held up");
        drop(hold);
    }
    let report = running.await.unwrap();
    assert_eq!(*lock(&after), [1, 2, 3].map(|run| (run, BufferState::Idle)));
    assert_eq!(report.operator("works").unwrap().runs, 3);
});

/// Sends what it has computed when it is there.
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
        // No await, and it is there.
        ports.sums.send(self.sum.as_slice()?[0]).await
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
    flow.connect_with(produce.output, sums.numbers, Hub::default().envelope_bytes(40));
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

/// What fails afterwards fails as a run does; after a fault, or a run that failed, it is not called.
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
    assert!(lock(&seen).len() <= 2, "the third never came: {seen:?}");

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

/// Every await point between a run and what comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_abort_between_a_run_and_what_comes_after() {
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
    assert!(aborted > 0, "none was aborted");
    freed(&device).await;
}

/// Takes messages in threes: a message is a reason to ask again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_may_run_is_asked_again_after_a_message() {
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
        flow.connect_with(count.output, threes.input, Hub::bounded(4));
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

/// Two operators without ports that depend on each other: nobody wakes them, and yet each has its turns.
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

/// Somebody outside changes what it depends on, while others are busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_may_run_is_asked_again_from_outside() {
    struct Gated {
        open: Arc<AtomicBool>,
        asked: Option<oneshot::Sender<std::task::Waker>>,
        ran: Option<oneshot::Sender<()>>,
    }

    impl Operator for Gated {
        type Ports = ();

        fn may_run(&mut self, _ports: &(), cx: &Cx) -> bool {
            if let Some(asked) = self.asked.take() {
                asked.send(cx.waker()).expect("the test listens");
            }
            self.open.load(Ordering::Acquire)
        }

        async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
            cx.finish();
            self.ran.take().expect("one run").send(()).expect("the test listens");
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
    // Nobody is there any more.
    waker.wake();
}

/// A loop of its own, and beside it a method that nobody would call.
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
    let told = error.to_string();
    assert!(told.starts_with("operator `loops`: ") && told.contains("never called its `after`"), "{told}");
}

/// The methods of an operator's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    MayRun,
    Compute,
    After,
    Stop,
}

/// Where somebody speaks, and what.
type Speech = (Phase, fn(&Handle));
type Turn<P> = dyn FnMut(&mut P, &mut Cx) -> Result<()> + Send;

/// In one of its methods it asks how its flow stands, and ends it.
struct Speaks<P> {
    at: Option<Speech>,
    heard: Shared<Vec<OperatorStatus>>,
    stopped: Arc<AtomicUsize>,
    turn: Box<Turn<P>>,
}

impl<P> Speaks<P> {
    fn speak(&mut self, phase: Phase, cx: &Cx) {
        if let Some((_, word)) = self.at.filter(|(at, _)| *at == phase) {
            lock(&self.heard).push(cx.flow().status());
            word(&cx.flow());
        }
    }
}

impl<P: wakeline::operator::Ports> Operator for Speaks<P> {
    type Ports = P;

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        self.speak(Phase::Start, cx);
        Ok(())
    }

    fn may_run(&mut self, _ports: &P, cx: &Cx) -> bool {
        self.speak(Phase::MayRun, cx);
        true
    }

    async fn compute(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        self.speak(Phase::Compute, cx);
        (self.turn)(ports, cx)
    }

    async fn after(&mut self, _ports: &mut P, cx: &mut Cx) -> Result<()> {
        self.speak(Phase::After, cx);
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.speak(Phase::Stop, cx);
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Three operators, of which one says a word in one of its methods. The flow ends in the way that it says, and by itself
/// where it says it in the end: how it ended, what the operator has heard first, and how many `stop`s have run.
async fn spoken(who: usize, at: Phase, word: fn(&Handle)) -> (Result<Report>, Vec<OperatorStatus>, usize) {
    let (heard, stopped) = (shared(), Arc::new(AtomicUsize::new(0)));
    fn speaks<P>(
        at: Option<Speech>,
        heard: &Shared<Vec<OperatorStatus>>,
        stopped: &Arc<AtomicUsize>,
        turn: impl FnMut(&mut P, &mut Cx) -> Result<()> + Send + 'static,
    ) -> Speaks<P> {
        Speaks { at, heard: heard.clone(), stopped: stopped.clone(), turn: Box::new(turn) }
    }
    let at = |number| (who == number).then_some((at, word));
    let ends = matches!(at(who), Some((Phase::Stop, _)));
    let mut sent = 0;
    let mut flow = Flow::new("l8");
    let first = flow.add(
        "first",
        speaks(at(0), &heard, &stopped, move |ports: &mut SourcePorts<u32>, cx| {
            sent += 1;
            if ends && sent == 100 {
                cx.finish();
            }
            ports.output.try_send(sent).map(|refused| refused.expect("there is room"))
        }),
    );
    let second = flow.add(
        "second",
        speaks(at(1), &heard, &stopped, |ports: &mut MapPorts<u32, u32>, _cx| {
            let number = ports.input.take()?;
            ports.output.try_send(number).map(|refused| refused.expect("there is room"))
        }),
    );
    let third = speaks(at(2), &heard, &stopped, |ports: &mut SinkPorts<u32>, _cx| ports.input.take().map(drop));
    let third = flow.add("third", third);
    flow.connect(first.output, second.input);
    flow.connect(second.output, third.input);
    let outcome = within(flow.run()).await;
    let heard = lock(&heard).first().cloned().expect("it has come to that");
    (outcome, heard, stopped.load(Ordering::Relaxed))
}

const PHASES: [Phase; 5] = [Phase::Start, Phase::MayRun, Phase::Compute, Phase::After, Phase::Stop];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l8_a_status_and_a_stop_from_each_method_of_each_operator() {
    for phase in PHASES {
        for who in 0..3 {
            let (outcome, heard, stopped) = spoken(who, phase, Handle::stop).await;
            let case = format!("{phase:?} of operator {who}: {heard:?}");
            let report = outcome.unwrap();
            let sent = report.operator("first").unwrap().messages_out;
            assert_eq!(report.operator("third").unwrap().messages_in, sent, "it is drained. {case}");
            assert_eq!((report.untaken, stopped), (0, 3), "{case}");
            assert_eq!(heard.iter().map(|operator| &*operator.name).collect::<Vec<_>>(), ["first", "second", "third"]);
            let own = &heard[who];
            match phase {
                Phase::Start => {
                    assert!(heard.iter().all(|operator| (operator.running, operator.runs) == (false, 0)), "{case}")
                }
                Phase::Compute => assert!(own.running && own.status == Status::Ready, "{case}"),
                Phase::MayRun => assert!(!own.running && own.runs == 0, "its first run is still to come. {case}"),
                Phase::After => assert_eq!(own.runs, 1, "its run has ended. {case}"),
                Phase::Stop => assert!(heard.iter().all(|operator| operator.status == Status::Never), "{case}"),
            }
        }
    }
}

/// The other end, at once: every `stop` runs, and no method says a word twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_an_abort_from_each_method_of_each_operator() {
    for phase in PHASES {
        for who in 0..3 {
            let (outcome, _, stopped) = spoken(who, phase, Handle::abort).await;
            match phase {
                // It has ended by then.
                Phase::Stop => _ = outcome.unwrap(),
                _ => assert!(outcome.unwrap_err().is_cancelled(), "{phase:?} of operator {who}"),
            }
            assert_eq!(stopped, 3, "{phase:?} of operator {who}");
        }
    }
}
