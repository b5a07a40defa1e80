//! Scenarios L: lifecycle and errors.

use std::{
    fmt,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use common::*;
use futures::FutureExt;
use tokio::sync::oneshot;
use wakeline::prelude::*;

/// An operator that records the calls of its methods, and fails in a given phase.
struct Diary<P> {
    name: &'static str,
    pages: Shared<String>,
    fails: Option<(Phase, Way)>,
    runs: u32,
    census: Census,
    of: std::marker::PhantomData<fn(P)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    Compute,
    Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Error,
    Panic,
}

/// The original cause of a failure.
#[derive(Debug)]
struct Cause(Phase);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "meant to fail in {:?}", self.0)
    }
}

impl std::error::Error for Cause {}

impl<P> Diary<P> {
    fn new(name: &'static str, pages: &Shared<String>, census: &Census) -> Self {
        Self { name, pages: pages.clone(), fails: None, runs: 0, census: census.clone(), of: std::marker::PhantomData }
    }

    fn fails(mut self, phase: Phase, way: Way) -> Self {
        self.fails = Some((phase, way));
        self
    }

    fn note(&self, what: &str) {
        lock(&self.pages).push(format!("{} {what}", self.name));
    }

    fn is_time(&self, phase: Phase) -> Result<()> {
        // In `compute`: the third run, when messages are in flight.
        match self.fails {
            Some((at, way)) if at == phase && (phase != Phase::Compute || self.runs == 3) => match way {
                Way::Error => Err(Error::other(Cause(phase))),
                Way::Panic => panic!("meant to panic in {phase:?}"),
            },
            _ => Ok(()),
        }
    }
}

/// How a `Diary` uses its ports.
trait Turn: wakeline::operator::Ports {
    fn turn(&mut self, run: u32, census: &Census, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send;
}

impl Turn for SourcePorts<Counted> {
    async fn turn(&mut self, run: u32, census: &Census, cx: &mut Cx) -> Result<()> {
        if run == 3 {
            cx.finish();
        }
        self.output.send(census.message(u64::from(run))).await?;
        Ok(())
    }
}

impl Turn for MapPorts<Counted, Counted> {
    async fn turn(&mut self, _run: u32, _census: &Census, _cx: &mut Cx) -> Result<()> {
        let message = self.input.take()?;
        self.output.send(message).await?;
        Ok(())
    }
}

impl Turn for SinkPorts<Counted> {
    async fn turn(&mut self, _run: u32, _census: &Census, _cx: &mut Cx) -> Result<()> {
        self.input.take().map(drop)
    }
}

impl<P: Turn> Operator for Diary<P> {
    type Ports = P;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        self.note("start");
        self.is_time(Phase::Start)
    }

    async fn compute(&mut self, ports: &mut P, cx: &mut Cx) -> Result<()> {
        self.runs += 1;
        self.note("compute");
        self.is_time(Phase::Compute)?;
        ports.turn(self.runs, &self.census, cx).await
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.note("stop");
        self.is_time(Phase::Stop)
    }
}

/// `a -> b -> c`, one of which fails.
fn diaries(fails: Option<(&str, Phase, Way)>, census: &Census) -> (Flow, Shared<String>) {
    fn made<P: Turn>(
        name: &'static str,
        fails: Option<(&str, Phase, Way)>,
        pages: &Shared<String>,
        census: &Census,
    ) -> Diary<P> {
        let diary = Diary::new(name, pages, census);
        match fails {
            Some((who, phase, way)) if who == name => diary.fails(phase, way),
            _ => diary,
        }
    }
    let pages = shared();
    let mut flow = Flow::new("diaries");
    let a = flow.add("a", made::<SourcePorts<Counted>>("a", fails, &pages, census));
    let b = flow.add("b", made::<MapPorts<Counted, Counted>>("b", fails, &pages, census));
    let c = flow.add("c", made::<SinkPorts<Counted>>("c", fails, &pages, census));
    flow.connect(a.output, b.input);
    flow.connect_with(b.output, c.input, HubOptions::bounded(2));
    (flow, pages)
}

fn noted(pages: &Shared<String>, what: &str) -> Vec<String> {
    lock(pages).iter().filter(|page| page.ends_with(what)).cloned().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l1_starts_then_runs_then_stops() {
    let census = Census::default();
    let (mut flow, pages) = diaries(None, &census);
    let report = within(flow.run()).await.unwrap();
    let pages = std::mem::take(&mut *lock(&pages));
    assert_eq!(pages[..3], ["a start", "b start", "c start"], "all starts first, in the order of adding");
    assert_eq!(pages[pages.len() - 3..], ["a stop", "b stop", "c stop"], "all stops last, in the order of adding");
    let ticks = &pages[3..pages.len() - 3];
    assert_eq!(ticks.len(), 9, "{ticks:?}");
    assert!(ticks.iter().all(|tick| tick.ends_with("compute")), "{ticks:?}");
    for name in ["a", "b", "c"] {
        assert_eq!(report.operator(name).unwrap().runs, 3, "{name}");
    }
    assert_eq!(report.operators.iter().map(|operator| &*operator.name).collect::<Vec<_>>(), ["a", "b", "c"]);
}

#[tokio::test]
async fn l1_stop_runs_after_an_error() {
    let census = Census::default();
    let (mut flow, pages) = diaries(Some(("b", Phase::Compute, Way::Error)), &census);
    within(flow.run()).await.unwrap_err();
    let pages = std::mem::take(&mut *lock(&pages));
    assert_eq!(pages[pages.len() - 3..], ["a stop", "b stop", "c stop"]);
    assert_eq!(noted(&Shared::new(pages.into()), "stop").len(), 3, "each stops once");
}

/// An error and a panic, in each phase, of each operator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l2_errors_and_panics_are_named_and_all_operators_stop() {
    for who in ["a", "b", "c"] {
        for phase in [Phase::Start, Phase::Compute, Phase::Stop] {
            for way in [Way::Error, Way::Panic] {
                let case = format!("{way:?} in {phase:?} of {who}");
                let census = Census::default();
                let (mut flow, pages) = diaries(Some((who, phase, way)), &census);
                let error = within(flow.run()).await.expect_err(&case);
                let message = error.to_string();
                assert!(message.starts_with(&format!("operator `{who}`: ")), "{case}: {message}");
                assert!(message.contains(&format!("in {phase:?}")), "{case}: {message}");
                match way {
                    Way::Error => {
                        assert_eq!(error.kind(), ErrorKind::Operator, "{case}");
                        let cause = error.downcast_ref::<Cause>().expect(&case);
                        assert_eq!(cause.0, phase, "{case}");
                    }
                    Way::Panic => assert_eq!(error.kind(), ErrorKind::Panicked, "{case}"),
                }
                assert_eq!(noted(&pages, "stop"), ["a stop", "b stop", "c stop"], "{case}");
                if phase == Phase::Start {
                    assert!(noted(&pages, "compute").is_empty(), "{case}: nothing has run");
                    let before = ["a start", "b start", "c start"].into_iter().take_while(|at| !at.starts_with(who));
                    let starts: Vec<_> = before.map(String::from).chain([format!("{who} start")]).collect();
                    assert_eq!(noted(&pages, "start"), starts, "{case}: later operators do not start");
                }
                assert_eq!(census.live(), 0, "{case}: messages in flight are freed");
            }
        }
    }
}

/// The first failure is reported, not its consequences.
#[tokio::test]
async fn l2_the_first_failure_wins() {
    let census = Census::default();
    let pages = shared();
    let mut flow = Flow::new("l2");
    let a = flow.add("a", Diary::<SourcePorts<Counted>>::new("a", &pages, &census).fails(Phase::Stop, Way::Panic));
    let b = flow.add("b", Diary::<SinkPorts<Counted>>::new("b", &pages, &census).fails(Phase::Compute, Way::Error));
    flow.connect(a.output, b.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.downcast_ref::<Cause>().unwrap().0, Phase::Compute);
    assert!(error.to_string().starts_with("operator `b`: "), "{error}");
    assert_eq!(noted(&pages, "stop"), ["a stop", "b stop"]);
}

/// The error carries a report with the counts up to the failure.
#[tokio::test]
async fn l2_the_error_of_a_failed_flow_has_its_report() {
    // `b` fails in its third run: `a` has sent three messages by then, and `c` has taken two.
    for way in [Way::Error, Way::Panic] {
        let census = Census::default();
        let (mut flow, _) = diaries(Some(("b", Phase::Compute, way)), &census);
        let error = within(flow.run()).await.unwrap_err();
        let report = error.report().expect("a report");
        let names: Vec<_> = report.operators.iter().map(|operator| &*operator.name).collect();
        assert_eq!(names, ["a", "b", "c"], "in the order of adding");
        let b = report.operator("b").unwrap();
        assert_eq!((b.runs, b.messages_in, b.messages_out), (3, 2, 2), "{report}");
        let (a, c) = (report.operator("a").unwrap(), report.operator("c").unwrap());
        let [first, second] = ["a.output -> b.input", "b.output -> c.input"].map(|name| report.hub(name).unwrap());
        assert_eq!((first.passed, first.passed + first.untaken), (b.messages_in, a.messages_out), "{report}");
        assert_eq!((second.passed, second.passed + second.untaken), (c.messages_in, b.messages_out), "{report}");
        assert_eq!(report.untaken, first.untaken + second.untaken);
        assert!(report.untaken > 0 && report.elapsed > report.setup, "{report}");
        // A copy of the error has the report too; the text stays one line.
        assert!(error.clone().report().is_some());
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    // A failure in `stop`: all runs are done.
    let census = Census::default();
    let (flow, _) = diaries(Some(("c", Phase::Stop, Way::Error)), &census);
    let error = within(flow.spawn().unwrap()).await.unwrap_err();
    let report = error.at("program").report().map(|report| report.operator("c").unwrap().runs);
    assert_eq!(report, Some(3), "also with a prefix in the message, and from a spawned flow");
    // A failure in `start`: nothing has run.
    let (mut flow, _) = diaries(Some(("b", Phase::Start, Way::Error)), &census);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.report().unwrap().operators.iter().all(|operator| operator.runs == 0));
    // Without a run there is no report.
    let mut flow = Flow::new("l2");
    let _ = flow.add("alone", sink(async |_: u32| Ok(())));
    assert!(flow.run().await.unwrap_err().report().is_none());
}

/// An abort and another flow's error carry a report like other failures.
#[tokio::test]
async fn l2_the_report_is_that_of_the_flow_that_was_awaited() {
    let census = Census::default();
    let (flow, _) = diaries(None, &census);
    let running = flow.spawn().unwrap();
    running.abort();
    let error = within(running).await.unwrap_err();
    assert!(error.is_cancelled() && error.report().is_some_and(|report| report.operators.len() == 3), "{error}");

    // The inner flow's error passes through an operator of the outer flow: the report is the outer flow's.
    let mut outer = Flow::new("outer");
    outer.add(
        "inner",
        task(|_: &mut (), _| {
            Box::pin(async {
                let mut inner = Flow::new("inner");
                inner.add("fails", task(|_: &mut (), _| Box::pin(async { Err("no more".into()) })));
                inner.run().await.map(drop)
            })
        }),
    );
    let error = within(outer.run()).await.unwrap_err();
    assert!(error.to_string().contains("operator `fails`: no more"), "{error}");
    assert_eq!(&*error.report().unwrap().operators[0].name, "inner");
}

/// A failure cancels unrelated operators that would never end.
#[tokio::test]
async fn l2_the_others_are_cancelled() {
    struct Waits(Arc<AtomicBool>);

    impl Operator for Waits {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            std::future::pending().await
        }

        async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
            self.0.store(true, Ordering::Relaxed);
            Ok(())
        }
    }

    struct Fails(Arc<AtomicUsize>);

    impl Operator for Fails {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            until("the others run", || self.0.load(Ordering::Relaxed) > 10).await;
            Err(Error::other(Cause(Phase::Compute)))
        }
    }

    let (census, waited) = (Census::default(), Arc::new(AtomicBool::new(false)));
    let (mut flow, stopped, seen) = endless_flow(&census);
    let _ = flow.add("waits", Waits(waited.clone()));
    let _ = flow.add("fails", Fails(seen));
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.to_string().starts_with("operator `fails`: "), "{error}");
    assert!(error.downcast_ref::<Cause>().is_some());
    assert_eq!((census.live(), stopped.load(Ordering::Relaxed)), (0, 1));
    assert!(waited.load(Ordering::Relaxed), "all stops have run");
}

/// An operator on a device that fails after `after` runs.
struct FailsAfter {
    after: u32,
    panics: bool,
}

impl Operator for FailsAfter {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        increment::launch(cx.stream()?, &mut envelope)?;
        match self.after.checked_sub(1) {
            Some(left) => self.after = left,
            None if self.panics => panic!("while it owns an envelope"),
            None => return Err("while it owns an envelope".into()),
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

on_both!(l2_device_memory_in_flight_is_freed_after_a_failure, async |device: Device| {
    for after in 0..4 {
        for panics in [false, true] {
            let mut flow = Flow::new("l2");
            let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64])));
            let first = flow.add("first", Increment).on(&device);
            let fails = flow.add("fails", FailsAfter { after, panics }).on(&device);
            let consume = flow.add("consume", Collect(shared()));
            flow.connect_with(produce.output, first.input, HubOptions::bounded(2).envelopes(3).envelope_bytes(256));
            flow.connect(first.output, fails.input);
            flow.connect(fails.output, consume.input);
            let error = flow.run().await.unwrap_err();
            assert_eq!(error.kind(), if panics { ErrorKind::Panicked } else { ErrorKind::Operator });
            assert_eq!(device.memory_peak(), 3 * 256);
            freed(&device).await;
            assert!(device.lost().is_none(), "the failure is not the device's");
        }
    }
});

#[tokio::test]
async fn l3_a_second_run_continues_with_the_operators_state() {
    let seen = shared();
    let noted = seen.clone();
    let mut next = 0;
    let mut flow = Flow::new("l3");
    // Ends the run after every third number; the source itself is endless.
    let count = flow.add(
        "count",
        source(move || {
            next += 1;
            ready(Ok((next % 4 != 0).then_some(next)))
        }),
    );
    let keep = flow.add(
        "keep",
        sink(move |n: u32| {
            lock(&noted).push(n);
            ready(Ok(()))
        }),
    );
    flow.connect(count.output, keep.input);
    let first = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3]);
    let second = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3, 5, 6, 7]);
    for report in [first, second] {
        assert_eq!(report.operator("keep").unwrap().messages_in, 3, "each run counts from zero");
    }
}

#[tokio::test]
async fn l3_a_flow_that_failed_runs_again() {
    let census = Census::default();
    let (mut flow, pages) = diaries(Some(("b", Phase::Compute, Way::Panic)), &census);
    within(flow.run()).await.unwrap_err();
    lock(&pages).clear();
    // `b` fails only in its third run, when `a` has sent three messages. From its fourth run on, `a` sends for ever.
    tokio::select! {
        _ = flow.run() => panic!("it ended"),
        () = until("it computes again", || noted(&pages, "c compute").len() > 3) => (),
    }
    assert_eq!(noted(&pages, "start"), ["a start", "b start", "c start"]);
    drop(flow);
    until("all has stopped", || noted(&pages, "stop").len() == 3 && census.live() == 0).await;
}

on_both!(l3_many_runs_leave_no_memory, async |device: Device| {
    let free = device.memory().unwrap().free;
    for round in 0..200_u32 {
        let seen = shared();
        let mut flow = Flow::new("l3");
        let produce = flow.add("produce", SendEach::new((0..4).map(|n| vec![n + round; 8])));
        let add = flow.add("add", Increment).on(&device);
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelope_bytes(32));
        flow.connect(add.output, consume.input);
        flow.run().await.unwrap();
        assert_eq!(*lock(&seen), (1..5).map(|n| vec![n + round; 8]).collect::<Vec<_>>());
    }
    // Memory that was dropped while in use may be freed a little later, but it does not accumulate.
    let runs_at_once = device.memory_peak() / 64;
    assert!(runs_at_once < 20, "memory of {runs_at_once} runs at once");
    freed(&device).await;
    if device.is_emulated() {
        assert_eq!(device.memory().unwrap().free, free);
    }
});

/// An endless source.
fn endless(census: &Census) -> impl Operator<Ports = SourcePorts<Counted>> + use<> {
    let (census, mut next) = (census.clone(), 0);
    source(move || {
        next += 1;
        ready(Ok(Some(census.message(next))))
    })
}

/// Counts its stops.
struct Stopped<P> {
    stopped: Arc<AtomicUsize>,
    seen: Arc<AtomicUsize>,
    of: std::marker::PhantomData<fn(P)>,
}

impl Operator for Stopped<SinkPorts<Counted>> {
    type Ports = SinkPorts<Counted>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        self.seen.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// An endless flow, the number of stops of its sink, and the number of messages that the sink has seen.
fn endless_flow(census: &Census) -> (Flow, Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let (stopped, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("endless");
    let source = flow.add("source", endless(census));
    let middle = flow.add("middle", pass_on::<Counted>());
    let sink = Stopped { stopped: stopped.clone(), seen: seen.clone(), of: std::marker::PhantomData };
    let sink = flow.add("sink", sink);
    flow.connect_with(source.output, middle.input, HubOptions::bounded(8));
    flow.connect_with(middle.output, sink.input, HubOptions::bounded(8));
    (flow, stopped, seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_stop_drains() {
    for round in 0..50 {
        let census = Census::default();
        let (flow, stopped, seen) = endless_flow(&census);
        let running = flow.spawn().unwrap();
        until("the flow runs", || seen.load(Ordering::Relaxed) >= round).await;
        running.stop();
        let report = within(running).await.unwrap();
        let sent = report.operator("source").unwrap().messages_out;
        assert_eq!(report.operator("sink").unwrap().messages_in, sent, "every sent message has arrived");
        assert_eq!(seen.load(Ordering::Relaxed) as u64, sent);
        assert_eq!((report.untaken, census.live(), stopped.load(Ordering::Relaxed)), (0, 0, 1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_abort_ends_at_once() {
    for round in 0..50 {
        let census = Census::default();
        let (flow, stopped, seen) = endless_flow(&census);
        let running = flow.spawn().unwrap();
        until("the flow runs", || seen.load(Ordering::Relaxed) >= round).await;
        running.abort();
        let error = within(running).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        assert!(error.is_cancelled());
        assert_eq!((census.live(), stopped.load(Ordering::Relaxed)), (0, 1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_dropping_the_handle_aborts() {
    for round in 0..50 {
        let census = Census::default();
        let (flow, stopped, seen) = endless_flow(&census);
        let running = flow.spawn().unwrap();
        until("the flow runs", || seen.load(Ordering::Relaxed) >= round).await;
        drop(running);
        until("it has stopped, in the background", || stopped.load(Ordering::Relaxed) == 1 && census.live() == 0).await;
    }
}

#[tokio::test]
async fn l4_dropping_the_run_aborts_and_drops_the_operators() {
    let census = Census::default();
    let (mut flow, stopped, seen) = endless_flow(&census);
    tokio::select! {
        _ = flow.run() => panic!("an endless flow ended"),
        () = until("the flow runs", || seen.load(Ordering::Relaxed) > 10) => (),
    }
    until("it has stopped", || stopped.load(Ordering::Relaxed) == 1 && census.live() == 0).await;
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}

/// An operator that never returns can be aborted.
#[tokio::test]
async fn l4_abort_in_start_and_in_compute() {
    struct Sleeper {
        in_start: bool,
        asleep: Option<oneshot::Sender<()>>,
        stopped: Arc<AtomicBool>,
    }

    impl Operator for Sleeper {
        type Ports = ();

        async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
            if self.in_start {
                self.asleep.take().unwrap().send(()).unwrap();
                std::future::pending::<()>().await;
            }
            Ok(())
        }

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            self.asleep.take().unwrap().send(()).unwrap();
            std::future::pending().await
        }

        async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
            self.stopped.store(true, Ordering::Relaxed);
            Ok(())
        }
    }

    for in_start in [true, false] {
        let (asleep, is_asleep) = oneshot::channel();
        let stopped = Arc::new(AtomicBool::new(false));
        let mut flow = Flow::new("l4");
        flow.add("sleeper", Sleeper { in_start, asleep: Some(asleep), stopped: stopped.clone() });
        let running = flow.spawn().unwrap();
        within(is_asleep).await.unwrap();
        running.abort();
        assert!(within(running).await.unwrap_err().is_cancelled());
        assert!(stopped.load(Ordering::Relaxed), "its stop has run, in_start: {in_start}");
    }
}

on_both!(l4_abort_while_completions_are_pending, async |device: Device| {
    // The stream is held: its work cannot end before the flow has ended.
    let (held, is_held) = oneshot::channel::<Hold>();
    let mut held = Some(held);
    let mut flow = Flow::new("l4");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64])));
    let stuck = flow.add(
        "stuck",
        task(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
            let held = held.take().unwrap();
            async move {
                let _ = held.send(hold(cx.stream()?));
                while cx.ready(ports).await {
                    let mut envelope = ports.input.take()?;
                    increment::launch(cx.stream()?, &mut envelope)?;
                    ports.output.send(envelope).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let stuck = stuck.on(&device);
    let waits = Arc::new(AtomicBool::new(false));
    let waiting = waits.clone();
    let consume = flow.add(
        "consume",
        sink(move |envelope: Envelope<u32>| {
            waiting.store(true, Ordering::Relaxed);
            async move {
                envelope.read().await?;
                panic!("the stream is held")
            }
        }),
    );
    flow.connect_with(produce.output, stuck.input, HubOptions::bounded(1).envelope_bytes(256));
    flow.connect(stuck.output, consume.input);
    let running = flow.spawn().unwrap();
    let hold = is_held.await.unwrap();
    until("the operator waits for the device", || waits.load(Ordering::Relaxed)).await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert!(device.memory_in_use() >= 256, "memory that the device may still use is not freed");
    drop(hold);
    freed(&device).await;
});

/// `c -> a -> b`, added in every order.
#[tokio::test]
async fn l6_operators_added_in_any_order() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let seen = shared();
        let mut flow = Flow::new("l6");
        let (mut first, mut middle, mut last) = (None, None, None);
        for which in order {
            match which {
                0 => {
                    let mut numbers = 0..5_u32;
                    first = Some(flow.add("first", source(move || ready(Ok(numbers.next())))));
                }
                1 => middle = Some(flow.add("middle", map(|n: u32| ready(Ok(n * n))))),
                _ => {
                    let noted = seen.clone();
                    let keep = sink(move |n: u32| {
                        lock(&noted).push(n);
                        ready(Ok(()))
                    });
                    last = Some(flow.add("last", keep));
                }
            }
        }
        let (first, middle, last) = (first.unwrap(), middle.unwrap(), last.unwrap());
        flow.connect(middle.output, last.input);
        flow.connect(first.output, middle.input);
        within(flow.run()).await.unwrap();
        assert_eq!(*lock(&seen), [0, 1, 4, 9, 16], "{order:?}");
    }
}

/// The other flow has more operators than this one.
#[test]
fn l6_a_connection_to_another_flow_that_is_made_twice_is_an_error() {
    let mut other = Flow::new("other");
    other.add("first", sink(async |_: u32| Ok(())));
    let second = other.add("second", sink(async |_: u32| Ok(())));
    let mut flow = Flow::new("l6");
    let only = flow.add("only", source(async || Ok(None::<u32>)));
    flow.connect(only.output, second.input);
    flow.connect(only.output, second.input);
    let message = flow.check().unwrap_err().to_string();
    assert!(message.contains("port `only.output` is connected to a port of another flow"), "{message}");
    assert!(!message.contains("only.input"), "{message}");
}

#[tokio::test]
async fn l6_all_mistakes_are_reported_at_once_and_nothing_runs() {
    let (census, pages) = (Census::default(), shared());
    let a_source = || Diary::<SourcePorts<Counted>>::new("source", &pages, &census);
    let a_sink = || Diary::<SinkPorts<Counted>>::new("sink", &pages, &census);

    let mut other = Flow::new("other");
    let foreign = other.add("foreign", a_sink());

    let mut flow = Flow::new("l6");
    let twin = flow.add("twin", a_source());
    let same = flow.add("twin", a_sink());
    let lonely = flow.add("lonely", a_sink());
    let (twice, once) = (flow.add("twice", a_source()), flow.add("once", a_sink()));
    let abroad = flow.add("abroad", a_source());
    let (tight, narrow) = (flow.add("tight", a_source()), flow.add("narrow", a_sink()));
    let (empty, poor) = (flow.add("empty", SendEach::new([vec![1_u32]])), flow.add("poor", Collect(shared())));
    let (vague, far) = (flow.add("vague", SendEach::new([vec![1_u32]])), flow.add("far", Increment).on(&emulated()));
    let back = flow.add("back", Collect(shared()));

    flow.connect(twin.output, same.input);
    flow.connect(twice.output, once.input);
    flow.connect(twice.output, once.input);
    flow.connect(abroad.output, foreign.input);
    flow.connect_with(tight.output, narrow.input, HubOptions::bounded(0));
    flow.connect_with(empty.output, poor.input, HubOptions::bounded(1).envelopes(0).envelope_bytes(64));
    flow.connect(vague.output, far.input);
    flow.connect(far.output, back.input);

    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let message = error.to_string();
    assert!(message.starts_with("flow `l6`: "), "{message}");
    for what in [
        "two operators are named `twin`",
        "input `lonely.input` is not connected",
        "output `twice.output` is connected to input `once.input` more than once: connect the two once",
        "port `abroad.output` is connected to a port of another flow",
        "hub `tight.output -> narrow.input`: its capacity is 0",
        "hub `empty.output -> poor.input`: its number of envelopes is 0",
        "hub `vague.output -> far.input`: the size of its envelopes is not set",
    ] {
        assert!(message.contains(what), "missing: {what}\nin: {message}");
    }
    assert_eq!(message.matches("two operators are named").count(), 1, "each once: {message}");
    assert_eq!(
        message.matches("the size of its envelopes is not set").count(),
        2,
        "the hub itself and the next one: {message}"
    );
    assert!(lock(&pages).is_empty(), "nothing has run");
    let _ = lonely;

    // The same from `spawn`, at once.
    assert_eq!(flow.spawn().unwrap_err().kind(), ErrorKind::Setup);
}

/// `run` outside a tokio runtime is an error, not a panic.
#[test]
fn l6_no_runtime_is_an_error() {
    let (flow, _, _) = endless_flow(&Census::default());
    assert_eq!(flow.spawn().unwrap_err().kind(), ErrorKind::Usage);
}

#[derive(Clone, Copy, PartialEq)]
enum Where {
    Start,
    Rest,
}

struct Panics(Where);

impl wakeline::condition::Condition for Panics {
    fn start(&mut self) {
        assert!(self.0 != Where::Start, "at start");
    }

    fn poll_status(&mut self, _cx: &mut std::task::Context<'_>) -> wakeline::condition::Status {
        wakeline::condition::Status::Ready
    }

    fn stop_waiting(&mut self) {
        assert!(self.0 != Where::Rest, "at rest");
    }

    fn describe(&self) -> std::borrow::Cow<'static, str> {
        "a panic".into()
    }
}

struct CountsStops(Arc<AtomicUsize>);

impl Operator for CountsStops {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[tokio::test]
async fn l2_a_condition_that_panics_at_start_is_an_error() {
    let stopped = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("l2");
    let _ = flow.add("one", CountsStops(stopped.clone())).when(Panics(Where::Start));
    let out = std::panic::AssertUnwindSafe(flow.run()).catch_unwind().await;
    let error = out.expect("the panic of a condition comes out of `run`").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Panicked);
}

#[tokio::test]
async fn l2_a_condition_that_panics_at_its_end_does_not_prevent_stops() {
    let stopped = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("l2");
    let _ = flow.add("one", CountsStops(stopped.clone())).when(Panics(Where::Rest));
    flow.add("two", CountsStops(stopped.clone()));
    for run in 1..=2 {
        let error = within(flow.run()).await.unwrap_err();
        assert_eq!(stopped.load(Ordering::SeqCst), 2 * run, "{error}");
        assert_eq!(error.kind(), ErrorKind::Panicked, "the condition still exists in run {run}: {error}");
    }
}

#[derive(Ports)]
struct TwoOutPorts {
    #[output(optional)]
    a: Output<u32>,
    #[output]
    b: Output<u32>,
}

struct Elsewhere(wakeline::flow::Ingress<u32>);

impl Operator for Elsewhere {
    type Ports = TwoOutPorts;

    async fn compute(&mut self, ports: &mut TwoOutPorts, _cx: &mut Cx) -> Result<()> {
        while !ports.a.is_closed() {
            ports.a.offer(1)?;
            tokio::task::yield_now().await;
        }
        // The other flow is dropped, so the send is this operator's failure.
        self.0.send(1).await?;
        ports.b.send(1).await?;
        Ok(())
    }
}

#[tokio::test]
async fn l2_an_error_of_another_flow_does_not_count_as_the_operators_end() {
    let mut other = Flow::new("other");
    let print = other.add("print", sink(async |_: u32| Ok(())));
    let dead = other.ingress("in", print.input);
    drop(other);
    let mut flow = Flow::new("l2");
    let work = flow.add("work", Elsewhere(dead));
    let first = flow.add(
        "first",
        task(|ports: &mut SinkPorts<u32>, _cx| async move { ports.input.recv().await.map(drop) }.boxed()),
    );
    let rest = flow.add("rest", sink(async |_: u32| Ok(())));
    flow.connect(work.a, first.input);
    flow.connect(work.b, rest.input);
    let out = within(flow.run()).await;
    assert!(out.is_err(), "the operator failed with `Closed`, but the flow returned a report: {}", out.unwrap());
}
