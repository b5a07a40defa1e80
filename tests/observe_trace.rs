//! The flight recorder: what a trace has, what it counts as lost, and what has one saved.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::Warnings;
use tokio::sync::Notify;
use wakeline::{
    Device, Flow,
    flow::OnStall,
    observe::{Observe, Trace},
    prelude::*,
};

const LONG: Duration = Duration::from_secs(3600);

/// A folder of one test, which is removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wakeline-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// So many numbers.
fn numbers(count: u64) -> impl FnMut() -> std::future::Ready<wakeline::Result<Option<u64>>> + Send + 'static {
    let mut next = 0;
    move || {
        next += 1;
        std::future::ready(Ok((next <= count).then_some(next)))
    }
}

/// A source with two readers.
fn fan_out(count: u64) -> Flow {
    let mut flow = Flow::new("fan-out");
    let from = flow.add("from", source(numbers(count)));
    let [left, right] = ["left", "right"].map(|name| flow.add(name, sink(async |_: u64| Ok(()))));
    flow.connect(from.output, [left.input, right.input]);
    flow
}

fn is_trace(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| !bytes.is_empty())
}

#[tokio::test]
async fn a_trace_has_each_run_poll_and_message() {
    const COUNT: u64 = 100;
    let watch = Observe::new().record(65_536);
    let mut flow = fan_out(COUNT);
    flow.observe(&watch);
    let report = flow.run().await.unwrap();
    let trace = watch.trace(LONG).unwrap();
    assert_eq!(trace.lost(), 0);
    let runs: u64 = report.operators.iter().map(|operator| operator.runs).sum();
    // Each run and each message has two events, and at least one poll of each operator has.
    let least = 2 * runs + 2 * 2 * COUNT + 2 * 3;
    assert!(trace.len() as u64 >= least && !trace.is_empty(), "{} of {least}", trace.len());
    let mut written = Vec::new();
    trace.write(&mut written).unwrap();
    assert_eq!(written, trace.to_bytes());
    // Nothing has happened since.
    assert_eq!(watch.trace(LONG).unwrap().len(), trace.len());
}

#[tokio::test]
async fn what_found_no_room_is_counted() {
    let run = async |events: usize| {
        let watch = Observe::new().record(events);
        let mut flow = fan_out(1000);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.trace(LONG).unwrap()
    };
    let (all, last) = (run(65_536).await, run(1).await);
    assert_eq!(all.lost(), 0);
    // On this thread alone.
    assert_eq!((last.len(), last.lost()), (1024, all.len() as u64 - 1024));
}

#[tokio::test]
async fn nothing_is_recorded_unless_asked_for() {
    let watch = Observe::new().record(0);
    let mut flow = fan_out(5);
    flow.observe(&watch);
    assert!(watch.trace(LONG).unwrap_err().to_string().contains("`Observe::record(65_536)`"));
    flow.run().await.unwrap();
    assert!(watch.trace(LONG).is_err());
    // Two that are, and one that is not.
    let (one, other) = (Observe::new().record(usize::MAX), Observe::new().record(1));
    let mut flow = fan_out(5);
    flow.observe(&one);
    flow.observe(&other);
    flow.run().await.unwrap();
    assert!(one.trace(LONG).unwrap().len() > 20 && other.trace(LONG).unwrap().len() > 20);
    assert_eq!(one.trace(Duration::ZERO).unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_a_runtime_and_threads_of_operators_are_recorded() {
    let watch = Observe::new().record(65_536);
    let mut flow = Flow::new("threads");
    let from = flow.add("from", source(numbers(1000)));
    let work = flow.add("work", wakeline::operator::concurrent(3, Add));
    let to = flow.add("to", sink(async |_: u64| Ok(()))).on_own_thread();
    flow.connect(from.output, work.input);
    flow.connect(work.output, to.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    // A trace may be taken at any time.
    while !running.handle().has_ended() {
        drop(watch.trace(LONG).map(|trace| trace.to_bytes()));
        tokio::task::yield_now().await;
    }
    running.await.unwrap();
    let trace = watch.trace(LONG).unwrap();
    assert_eq!(trace.lost(), 0);
    assert!(trace.len() >= 2 * 3000 + 2 * 2000, "{}", trace.len());
}

#[derive(Clone)]
struct Add;

impl Operator for Add {
    type Ports = wakeline::operator::MapPorts<u64, u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        Ok(ports.output.send(number + 1).await?)
    }
}

/// Waits for a message for ever: its gate has no handle.
fn stalled_flow() -> Flow {
    let mut flow = fan_out(3);
    let from = flow.add("more", source(numbers(3)));
    let to = flow.add("closed", sink(async |_: u64| Ok(()))).when(Gate::paused());
    flow.connect(from.output, to.input);
    flow
}

#[tokio::test(start_paused = true)]
async fn a_slow_path_is_saved() {
    let folder = Folder::new("slow");
    let watch = Observe::new().paths(1);
    const LIMIT: Duration = Duration::from_millis(20);
    let watch = watch
        .when_slower("from > to", LIMIT, folder.file("slow"))
        .when_slower("from > to", 10 * LIMIT, folder.file("slower"))
        .when_slower("from > other", Duration::ZERO, folder.file("other"))
        .when_stalled(folder.file("stalled"))
        .when_failed(folder.file("failed"));
    let mut flow = Flow::new("slow");
    let from = flow.add("from", source(numbers(3)));
    let to = flow.add(
        "to",
        sink(async |_: u64| {
            tokio::time::sleep(LIMIT + Duration::from_millis(1)).await;
            Ok(())
        }),
    );
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    flow.run().await.unwrap();
    assert!(is_trace(&folder.file("slow")));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "no other trigger has fired, and nothing is left");
}

#[tokio::test(start_paused = true)]
async fn a_clone_that_observes_a_flow_once_more_is_warned_of() {
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    let (watch, other) = (Observe::new(), Observe::new());
    let mut flow = fan_out(3);
    flow.observe(&watch);
    flow.observe(&other);
    assert!(warnings.messages().is_empty(), "{:?}", warnings.messages());
    flow.observe(&watch.clone().paths(1));
    let [warning] = &warnings.messages()[..] else { panic!("{:?}", warnings.messages()) };
    assert!(warning.contains("observed by this `Observe` or by a clone of it already"), "{warning}");
    flow.run().await.unwrap();
}

// A misspelt operator; not a path of another flow that the observer is given to.
#[tokio::test(start_paused = true)]
async fn a_path_that_a_flow_has_only_in_part_is_warned_of() {
    let folder = Folder::new("misspelt");
    let mut watch = Observe::new();
    for path in ["from > to", "from > too", "there > here"] {
        watch = watch.when_slower(path, LONG, folder.file("slow"));
    }
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    let mut flow = Flow::new("spelt");
    let from = flow.add("from", source(numbers(3)));
    let to = flow.add("to", sink(async |_: u64| Ok(())));
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let [warning] = &warnings.messages()[..] else { panic!("{:?}", warnings.messages()) };
    assert!(warning.contains("path `from > too`: this flow has no operator `too`"), "{warning}");
}

#[tokio::test]
async fn a_stall_is_saved_with_its_flow_once() {
    let folder = Folder::new("stall");
    let (stalled, failed) = (folder.file("stalled"), folder.file("failed"));
    let watch = Observe::new().when_stalled(&stalled).when_failed(&failed);
    for round in 0..2 {
        let mut flow = stalled_flow();
        flow.observe(&watch);
        assert_eq!(flow.run().await.unwrap_err().kind(), ErrorKind::Stalled);
        assert_eq!([is_trace(&stalled), is_trace(&failed)], [round == 0; 2], "at most once a minute");
        let _ = (std::fs::remove_file(&stalled), std::fs::remove_file(&failed));
    }
}

#[tokio::test]
async fn a_stall_that_is_only_warned_of_is_saved_while_the_flow_runs() {
    let folder = Folder::new("warned");
    let watch = Observe::new().when_stalled(folder.file("stalled"));
    let mut flow = stalled_flow();
    flow.set_on_stall(OnStall::Warn);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    while !is_trace(&folder.file("stalled")) {
        tokio::task::yield_now().await;
    }
    assert!(!running.handle().has_ended());
    running.abort();
    running.await.unwrap_err();
}

#[tokio::test]
async fn a_failure_is_saved_and_an_abort_is_not() {
    let folder = Folder::new("failed");
    let (file, none) = (folder.file("failed"), folder.file("none/failed"));
    let watch = Observe::new().when_failed(&file).when_failed(none);
    let mut flow = Flow::new("fails");
    let from = flow.add("from", source(numbers(u64::MAX)));
    let to = flow.add("to", sink(async |number: u64| if number == 3 { Err("three".into()) } else { Ok(()) }));
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    running.abort();
    assert_eq!(running.await.unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(!is_trace(&file));
    let mut flow = Flow::new("fails");
    let fails = flow.add("fails", source(|| std::future::ready(Err::<Option<u64>, _>("no".into()))));
    let to = flow.add("to", sink(async |_: u64| Ok(())));
    flow.connect(fails.output, to.input);
    flow.observe(&watch);
    assert_eq!(flow.run().await.unwrap_err().kind(), ErrorKind::Operator);
    assert!(is_trace(&file), "though another trigger could not save its file");
}

/// An operator that blocks its thread until its trace is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_worker_is_saved() {
    let folder = Folder::new("blocked");
    let file = folder.file("blocked");
    let watch = Observe::new().when_blocked(Duration::from_millis(20), &file);
    let mut flow = Flow::new("blocks");
    let from = flow.add("from", source(numbers(1)));
    let to = flow.add(
        "to",
        sink(move |_: u64| {
            while !is_trace(&file) {
                std::thread::yield_now();
            }
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    flow.run().await.unwrap();
}

/// In virtual time, on the thread of the simulation.
#[tokio::test(start_paused = true)]
async fn a_simulated_flow() {
    let simulation = wakeline::device::Simulation::new(1);
    let watch = Observe::new().paths(1).record(65_536);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new());
        let mut flow = Flow::new("simulated");
        let from = flow.add("from", source(numbers(10)));
        let to = sink(async |_: u64| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(())
        });
        let to = flow.add("to", to).on(&device);
        flow.connect(from.output, to.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
    };
    simulation.run(run).await;
    let (all, last) = (watch.trace(LONG).unwrap(), watch.trace(Duration::from_millis(2500)).unwrap());
    assert_eq!(all.lost(), 0);
    // Ten runs of a second each, of which the window has the end of the last three.
    assert!(last.len() < all.len() / 2 && last.len() >= 2 * 3, "{last:?} of {all:?}");
}

/// Hooks that look at the trace that they are in.
#[tokio::test]
async fn an_operator_takes_a_trace_of_itself_and_panics() {
    let watch = Observe::new().record(1024);
    let (own, taken) = (watch.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = taken.clone();
    let mut flow = Flow::new("own");
    let from = flow.add("from", source(numbers(10)));
    let to = flow.add(
        "to",
        sink(move |number: u64| {
            counted.fetch_add(own.trace(LONG).unwrap().len(), Ordering::Relaxed);
            assert!(number < 5, "planned");
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    drop(watch.clone());
    assert_eq!(flow.run().await.unwrap_err().kind(), ErrorKind::Panicked);
    assert!(taken.load(Ordering::Relaxed) > 0);
    assert!(!watch.trace(LONG).unwrap().to_bytes().is_empty());
}

#[test]
fn a_local_flow_on_a_thread_of_its_own_is_recorded_after_the_thread_has_ended() {
    let watch = Observe::new().record(1024);
    let own = watch.clone();
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let mut flow = wakeline::flow::LocalFlow::new("local");
            let from = flow.add("from", source(numbers(10)));
            let to = flow.add("to", sink(async |_: u64| Ok(())));
            flow.connect(from.output, to.input);
            flow.observe(&own);
            flow.run().await.unwrap();
        });
    };
    std::thread::spawn(run).join().unwrap();
    let trace = watch.trace(LONG).unwrap();
    assert!(trace.len() >= 40 && trace.lost() == 0, "{trace:?}");
}

/// A waker may run a flow's code while its thread ends.
#[test]
fn a_runtime_that_shuts_down_in_the_middle_leaves_a_trace() {
    let watch = Observe::new().record(1024);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let begun = Arc::new((Notify::new(), AtomicBool::new(false)));
    let notes = begun.clone();
    let context = runtime.enter();
    let mut flow = Flow::new("cut off");
    let from = flow.add("from", source(numbers(u64::MAX)));
    let to = flow.add(
        "to",
        sink(move |_: u64| {
            notes.1.store(true, Ordering::Relaxed);
            notes.0.notify_one();
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(from.output, to.input);
    flow.observe(&watch);
    let _running = flow.spawn().unwrap();
    drop(context);
    runtime.block_on(begun.0.notified());
    runtime.shutdown_timeout(LONG);
    assert!(begun.1.load(Ordering::Relaxed));
    // A run that was cut off has nothing to show, and nothing hangs.
    let _ = watch.trace(LONG);
}

#[test]
fn any_program_is_recorded_from_outside() {
    const VARIABLE: &str = "WAKELINE_TRACE";
    if std::env::var_os(VARIABLE).is_some() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        (0..2).for_each(|_| drop(runtime.block_on(fan_out(10).run()).unwrap()));
        return;
    }
    let folder = Folder::new("outside");
    let run = |value: &Path| {
        let name = std::thread::current().name().unwrap().to_string();
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        let output = program.args([&name, "--exact"]).env(VARIABLE, value).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    };
    run(&folder.file("flow.pftrace"));
    assert!(is_trace(&folder.file("flow.pftrace")) && is_trace(&folder.file("flow.2.pftrace")));
    // A value that is no file, or cannot be written, does not harm the program.
    for wrong in [folder.0.clone(), folder.file("none/flow.pftrace"), PathBuf::new()] {
        run(&wrong);
    }
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2);
}

fn _is_send_and_sync(trace: &Trace) -> &(dyn Send + Sync) {
    trace
}
