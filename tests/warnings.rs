//! Warnings of observed flows: an operator that blocks a worker thread, one that waits for too long, and operators that wait
//! only for each other. Each is an item of the snapshot while it lasts, a call of the hooks and a line of the log.

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use common::*;
use tokio::sync::oneshot;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
};
use wakeline::{
    Running,
    condition::{Gate, every},
    flow::OnStall,
    observe::{Observe, Snapshot, Warning, WarningKind},
    operator::concurrent,
    prelude::*,
};

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// An observer with these limits, and what its hook was called with.
fn watch(blocked: Duration, waiting: Duration) -> (Observe, Receiver<Warning>) {
    let (called, calls) = channel();
    let watch = Observe::new()
        .every(ms(1))
        .warn_blocked(blocked)
        .warn_waiting(waiting)
        .on_warning(move |warning| _ = called.send(warning.clone()));
    (watch, calls)
}

fn next(calls: &Receiver<Warning>) -> Warning {
    calls.recv_timeout(Duration::from_secs(60)).expect("there is a warning")
}

/// The operators of a warning.
fn of(warning: &Warning) -> Vec<&str> {
    warning.operators.iter().map(|name| &**name).collect()
}

/// Looks until the snapshot is so.
async fn snapshot(running: &Running, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let began = Instant::now();
    loop {
        let snapshot = running.snapshot();
        if is_so(&snapshot) {
            return snapshot;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{snapshot}");
        tokio::time::sleep(ms(2)).await;
    }
}

async fn end(running: Running) {
    running.abort();
    let _ = running.await;
}

/// A lock that a test holds, to block operators.
#[derive(Clone, Default)]
struct Block(Arc<Mutex<()>>);

impl Block {
    fn pass(&self) {
        drop(self.0.lock().unwrap());
    }
}

/// A source that sends nothing, a sink, and operators in between.
fn chain(flow: &mut Flow, first: impl Operator<Ports = SourcePorts<u32>>, between: &[&'static str]) {
    let first = flow.add("read", first);
    let mut last = first.output;
    for name in between {
        let map = flow.add(*name, map(async |n: u32| Ok(n)));
        flow.connect(last, map.input);
        last = map.output;
    }
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(last, write.input);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_worker_thread_is_a_warning_until_the_poll_has_ended() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("blocked");
    let (passes, mut sends) = (block.clone(), 0);
    let source = source(move || {
        passes.pass();
        sends += 1;
        let more = sends < 3;
        async move { if more { Ok(Some(1)) } else { pending().await } }
    });
    chain(&mut flow, source, &[]);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();

    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["read"]), "{warning}");
    assert!(warning.sentence.contains("`read` blocks a worker thread"), "{warning}");
    assert!(warning.sentence.contains("`.on_own_thread()`"), "{warning}");
    assert!(warning.since >= ms(50), "{warning:?}");
    let seen = running.snapshot();
    assert_eq!(seen.warnings.len(), 1, "{seen}");
    assert_eq!((seen.warnings[0].number, seen.warnings[0].began), (warning.number, warning.began));
    assert!(seen.warnings[0].since >= warning.since);
    assert!(seen.to_string().contains("\nwarning for "), "{seen}");
    // It goes on, and is the same warning.
    snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > warning.since + ms(50))).await;

    drop(held);
    let seen = snapshot(&running, |seen| seen.warnings.is_empty()).await;
    assert_eq!((seen.warning_counts.blocked, seen.warning_counts.waiting, seen.warning_counts.lost), (1, 0, 0));
    end(running).await;
    assert!(calls.try_recv().is_err(), "one occurrence is one warning");
}

/// Two runs of a concurrent operator block two threads: the operator cannot have a thread of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_blocked_run_of_a_concurrent_operator() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("concurrent");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let passes = block.clone();
    let work = sink(move |_: u32| {
        passes.pass();
        std::future::ready(Ok(()))
    });
    let write = flow.add("write", concurrent(2, work));
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["write"]), "{warning}");
    assert!(!warning.sentence.contains("on_own_thread"), "{warning}");
    assert!(warning.sentence.contains("spawn_blocking"), "{warning}");
    drop(held);
    end(running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_on_its_own_thread_may_block_and_others_wait_for_it() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(20), ms(150));
    let mut flow = Flow::new("own thread");
    let passes = block.clone();
    let read = flow
        .add(
            "read",
            source(move || {
                passes.pass();
                std::future::ready(Ok(Some(1)))
            }),
        )
        .on_own_thread();
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["write"]), "{warning}");
    assert!(warning.sentence.contains("`write` waits for a message in hub `read.output -> write.input`"), "{warning}");
    assert!(warning.sentence.contains("`read`, which runs, would have to send one"), "{warning}");
    drop(held);
    end(running).await;
}

/// The operator that the others wait for is named, and they are named with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_waits_is_one_warning() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let (answer, answered) = oneshot::channel::<u32>();
    let mut answered = Some(answered);
    let source = source(move || {
        let answered = answered.take();
        async move {
            match answered {
                Some(answered) => Ok(answered.await.ok()),
                None => pending().await,
            }
        }
    });
    let mut flow = Flow::new("chain");
    chain(&mut flow, source, &["a", "b", "c"]);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["read"]), "{warning}");
    assert!(warning.sentence.contains("waits for a future that its run awaits"), "{warning}");
    assert!(warning.sentence.ends_with("`a`, `b`, `c` and `write` wait for it"), "{warning}");
    assert!(warning.since >= ms(150));
    let seen = snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(400))).await;
    assert_eq!((seen.warnings.len(), seen.warning_counts.waiting), (1, 1), "{seen}");

    // A second wait is a second warning.
    answer.send(1).unwrap();
    let second = next(&calls);
    assert_eq!((of(&second), second.number), (vec!["read"], 1), "{second}");
    assert!(second.began > warning.began);
    let seen = running.snapshot();
    assert_eq!((seen.warnings.len(), seen.warning_counts.waiting), (1, 2), "{seen}");
    end(running).await;
    assert!(calls.try_recv().is_err(), "there were two waits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_gate_is_named_by_the_operator_behind_it() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let gate = Gate::paused();
    let mut flow = Flow::new("gate");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let work = flow.add("work", map(async |n: u32| Ok(n))).when(gate.clone());
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!(of(&warning), ["work"], "{warning}");
    assert!(warning.sentence.contains("gate"), "{warning}");
    assert!(warning.sentence.ends_with("; `read` and `write` wait for it"), "{warning}");
    gate.resume();
    snapshot(&running, |seen| seen.warnings.is_empty()).await;
    end(running).await;
}

/// It waits as it should: for callers, for a time, and while the flow is paused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_that_are_meant_are_no_warnings() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("meant");
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    let feed = flow.ingress::<u32>("feed", write.input);
    let tick = flow.add("tick", source(async || Ok(Some(1)))).when(every(Duration::from_secs(3600)));
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(tick.output, tock.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    snapshot(&running, |seen| seen.window > ms(400)).await;
    running.pause();
    let seen = snapshot(&running, |seen| seen.window > ms(800)).await;
    assert!(seen.warnings.is_empty() && calls.try_recv().is_err(), "{seen}");
    drop(feed);
    end(running).await;
}

#[derive(Ports)]
struct JoinPorts {
    #[input]
    left: Input<u32>,
    #[input]
    right: Input<u32>,
    #[output]
    out: Output<u32>,
}

/// Takes one of each, and sends their sum.
struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        let (left, right) = (ports.left.take()?, ports.right.take()?);
        ports.out.send(left + right).await?;
        Ok(())
    }
}

/// A loop in which `join` waits for a message of `back`, and `back` for one of `join`; a timer runs beside it.
fn stalls(flow: &mut Flow) {
    let feed = flow.add("feed", source(async || Ok(Some(1))));
    let join = flow.add("join", Join);
    let back = flow.add("back", map(async |n: u32| Ok(n)));
    flow.connect(feed.output, join.left);
    flow.connect(join.out, back.input);
    flow.connect(back.output, join.right);
    let tick = flow.add("tick", source(async || Ok(Some(1)))).when(every(ms(5)));
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(tick.output, tock.input);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_is_a_warning_while_it_lasts() {
    let (watch, calls) = watch(Duration::MAX, Duration::from_secs(50));
    let mut flow = Flow::new("stalls");
    stalls(&mut flow);
    flow.set_on_stall(OnStall::Warn);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Stalled, vec!["feed", "join", "back"]), "{warning}");
    assert!(warning.sentence.contains("`back` waits for a message in hub `join.out -> back.input`"), "{warning}");
    let seen = snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(100))).await;
    assert_eq!((seen.warnings.len(), seen.warning_counts.stalled), (1, 1), "{seen}");
    end(running).await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_that_fails_the_flow_is_in_its_last_snapshot() {
    let (watch, calls) = watch(Duration::MAX, Duration::MAX);
    let mut flow = Flow::new("fails");
    stalls(&mut flow);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let error = running.await.unwrap_err();
    assert!(error.is_stalled(), "{error:#}");
    let warning = next(&calls);
    assert_eq!(warning.kind, WarningKind::Stalled);
    let last = handle.snapshot();
    assert_eq!(last.warnings.len(), 1, "{last}");
    assert_eq!(last.warning_counts.stalled, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_switched_off_is_silent() {
    let (watch, calls) = watch(Duration::MAX, Duration::MAX);
    let mut flow = Flow::new("silent");
    stalls(&mut flow);
    flow.observe(&watch.warn_stalled(false));
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    assert!(running.await.unwrap_err().is_stalled());
    let last = handle.snapshot();
    assert!(last.warnings.is_empty() && calls.try_recv().is_err(), "{last}");
}

/// A hook may do what it likes: panic, block, end the flow, take snapshots, drop the observer. The other hooks of the
/// observer are called, and so are those of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_hooks() {
    let (ended, ends) = channel::<()>();
    let ends = Mutex::new(ends);
    let (called, calls): (Sender<String>, _) = channel();
    let handle: Arc<Mutex<Option<wakeline::flow::Handle>>> = Arc::default();
    let of_hook = handle.clone();
    let own: Arc<Mutex<Option<Observe>>> = Arc::default();
    let drops = own.clone();
    let hostile = Observe::new().every(ms(1)).warn_waiting(ms(150)).on_warning(|_| panic!("on purpose")).on_warning(
        move |warning| {
            // Waits until the test has stored it.
            let handle = loop {
                match of_hook.lock().unwrap().clone() {
                    Some(handle) => break handle,
                    None => thread::yield_now(),
                }
            };
            let seen = handle.snapshot();
            let watch = drops.lock().unwrap().take();
            let of_all: usize = watch.iter().map(|watch| watch.snapshots().len()).sum();
            drop(watch);
            handle.abort();
            let _ = called.send(format!("{} {of_all} {}", seen.warnings.len(), of(warning)[0]));
            // Blocks until the flow has ended.
            let _ = ends.lock().unwrap().recv();
        },
    );
    let (other, of_other) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("hostile");
    chain(&mut flow, source(pending), &[]);
    flow.observe(&hostile);
    flow.observe(&other);
    *own.lock().unwrap() = Some(hostile);
    let running = flow.spawn().unwrap();
    *handle.lock().unwrap() = Some(running.handle());
    assert!(running.await.unwrap_err().is_cancelled());
    assert_eq!(calls.recv().unwrap(), "1 1 read");
    assert_eq!(of(&next(&of_other)), ["read"]);
    drop(ended);
}

/// The lines of the log that are about this flow.
#[derive(Clone)]
struct Lines(Sender<String>, &'static str);

struct Text(String, bool, &'static str);

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.1 |= field.name() == "flow" && value == self.2;
        self.0.push_str(&format!("{}={value} ", field.name()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut text = Text(format!("{} {} ", event.metadata().level(), event.metadata().target()), false, self.1);
        event.record(&mut text);
        if text.1 {
            let _ = self.0.send(text.0);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warning_is_logged_once() {
    let (line, lines) = channel();
    tracing::subscriber::set_global_default(Registry::default().with(Lines(line, "logged"))).unwrap();
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("logged");
    chain(&mut flow, source(pending), &[]);
    flow.observe(&watch);
    // Only the first observer of a flow logs.
    flow.observe(&Observe::new().every(ms(1)).warn_waiting(ms(150)));
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    let line = lines.recv().unwrap();
    assert!(line.starts_with("WARN wakeline::observe "), "{line}");
    assert!(line.contains(" flow=logged kind=waiting operator=read "), "{line}");
    assert!(line.contains(&warning.sentence), "{line}");
    snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(400))).await;
    assert_eq!(lines.try_iter().count(), 0, "it is one occurrence");
    end(running).await;
}
