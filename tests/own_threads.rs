//! Scenario E4: operators that block or need a thread of their own.

use std::{
    future::ready,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, ThreadId},
    time::Duration,
};

use common::*;
use futures::FutureExt;
use tokio::{runtime, sync::oneshot};
use wakeline::{device::Simulation, prelude::*};

/// Runs `body` on a current-thread runtime and on a multi-thread runtime.
fn on_both_runtimes<F: Future<Output = ()>>(body: impl Fn() -> F) {
    for mut builder in [runtime::Builder::new_current_thread(), runtime::Builder::new_multi_thread()] {
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(within(body()));
    }
}

/// Counts the threads of this process with this name. Linux keeps the first 15 bytes of a name.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|found| found.trim_end() == name).count()
}

/// Waits until no thread has this name. The system may list a thread for a short time after its end.
async fn gone(name: &str) {
    until("the thread has ended", || threads_named(name) == 0).await;
}

type Log = Shared<(&'static str, ThreadId)>;

fn note(log: &Log, event: &'static str) {
    lock(log).push((event, thread::current().id()));
}

struct NotesItsDrop(Log, &'static str);

impl Drop for NotesItsDrop {
    fn drop(&mut self) {
        note(&self.0, self.1);
    }
}

/// Notes each phase, and waits for ever in its third run.
struct Phases {
    log: Log,
    waits: Option<oneshot::Sender<()>>,
    runs: u32,
    _drop: NotesItsDrop,
}

impl Phases {
    fn new(log: &Log, waits: oneshot::Sender<()>) -> Self {
        let _drop = NotesItsDrop(log.clone(), "drop");
        Self { log: log.clone(), waits: Some(waits), runs: 0, _drop }
    }
}

impl Operator for Phases {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        note(&self.log, "start");
        tokio::task::yield_now().await;
        note(&self.log, "started");
        Ok(())
    }

    fn may_run(&mut self, _ports: &(), _cx: &Cx) -> bool {
        note(&self.log, "may run");
        true
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        self.runs += 1;
        note(&self.log, "compute");
        if self.runs == 3 {
            let _interrupted = NotesItsDrop(self.log.clone(), "interrupted");
            self.waits.take().unwrap().send(()).unwrap();
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_micros(1)).await;
        note(&self.log, "computed");
        Ok(())
    }

    async fn after(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        note(&self.log, "after");
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        note(&self.log, "stop");
        Ok(())
    }
}

#[test]
fn e4_all_phases_of_an_operator_run_on_its_own_thread() {
    on_both_runtimes(|| async {
        let (log, (waits, does_wait)) = (shared(), oneshot::channel());
        let mut flow = Flow::new("e4");
        let _ = flow.add("e4 all phases", Phases::new(&log, waits)).on_own_thread();
        let running = flow.spawn().unwrap();
        does_wait.await.unwrap();
        assert_eq!(threads_named("e4 all phases"), 1, "named after the operator");
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        gone("e4 all phases").await;

        let (events, threads): (Vec<_>, Vec<_>) = lock(&log).iter().copied().unzip();
        let run = ["may run", "compute", "computed", "after"];
        let expected = [&["start", "started"][..], &run, &run, &run[..2], &["interrupted", "stop", "drop"]].concat();
        assert_eq!(events, expected);
        assert!(threads.iter().all(|thread| *thread == threads[0]), "{:?}", lock(&log));
        assert_ne!(threads[0], thread::current().id());
    });
}

/// Blocks the thread that polls it until it receives a number.
struct Blocks {
    go: mpsc::Receiver<u32>,
    blocked: Arc<AtomicBool>,
}

impl Operator for Blocks {
    type Ports = SourcePorts<u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        self.blocked.store(true, Ordering::SeqCst);
        let number = self.go.recv_timeout(Duration::from_secs(20)).map_err(Error::other)?;
        if number == 3 {
            cx.finish();
        }
        ports.output.send(number).await?;
        Ok(())
    }
}

#[test]
fn e4_an_operator_that_blocks_its_own_thread_blocks_no_other_task() {
    on_both_runtimes(|| async {
        let (send, go) = mpsc::channel();
        let blocked = Arc::new(AtomicBool::new(false));
        let seen = shared();
        let noted = seen.clone();
        let mut flow = Flow::new("e4");
        let blocks = flow.add("blocks", Blocks { go, blocked: blocked.clone() }).on_own_thread();
        let sink = flow.add(
            "sink",
            sink(move |number: u32| {
                lock(&noted).push(number);
                ready(Ok(()))
            }),
        );
        flow.connect(blocks.output, sink.input);
        let running = flow.spawn().unwrap();
        for number in 1..=3 {
            until("it blocks", || blocked.swap(false, Ordering::SeqCst)).await;
            // This task runs on, even on the current-thread runtime.
            send.send(number).unwrap();
            until("the number has arrived", || lock(&seen).contains(&number)).await;
        }
        running.await.unwrap();
        assert_eq!(*lock(&seen), [1, 2, 3]);
    });
}

#[test]
fn e4_an_abort_waits_for_the_next_await_of_a_blocking_operator() {
    on_both_runtimes(|| async {
        let (send, go) = mpsc::channel();
        let blocked = Arc::new(AtomicBool::new(false));
        let mut flow = Flow::new("e4");
        let blocks = flow.add("blocks", Blocks { go, blocked: blocked.clone() }).on_own_thread();
        let sink = flow.add("sink", sink(|_: u32| std::future::pending()));
        flow.connect(blocks.output, sink.input);
        let mut running = flow.spawn().unwrap();
        until("it blocks", || blocked.load(Ordering::SeqCst)).await;
        running.abort();
        for _ in 0..50 {
            assert!((&mut running).now_or_never().is_none(), "the operator still blocks");
            tokio::task::yield_now().await;
        }
        send.send(1).unwrap();
        assert!(running.await.unwrap_err().is_cancelled());
    });
}

struct NeverStarts(Log, Option<oneshot::Sender<()>>);

impl Operator for NeverStarts {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        let _interrupted = NotesItsDrop(self.0.clone(), "interrupted");
        self.1.take().unwrap().send(()).unwrap();
        std::future::pending().await
    }

    async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        note(&self.0, "stop");
        Ok(())
    }
}

#[test]
fn e4_an_abort_interrupts_start_on_an_own_thread() {
    on_both_runtimes(|| async {
        let (log, (starts, has_begun)) = (shared(), oneshot::channel());
        let mut flow = Flow::new("e4");
        let _ = flow.add("never", NeverStarts(log.clone(), Some(starts))).on_own_thread();
        let running = flow.spawn().unwrap();
        has_begun.await.unwrap();
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        let (events, threads): (Vec<_>, Vec<_>) = lock(&log).iter().copied().unzip();
        assert_eq!(events, ["interrupted", "stop"]);
        assert!(threads[0] == threads[1] && threads[0] != thread::current().id());
    });
}

#[test]
fn e4_stop_drains_operators_on_their_own_threads() {
    on_both_runtimes(|| async {
        let (log, taken) = (Log::default(), Arc::new(AtomicUsize::new(0)));
        let (noted, seen) = (log.clone(), taken.clone());
        let mut flow = Flow::new("e4");
        let endless = flow
            .add("endless", source(move || ready(Ok(Some(NotesItsDrop(noted.clone(), "message"))))))
            .on_own_thread();
        let sink = flow.add(
            "sink",
            sink(move |_: NotesItsDrop| {
                seen.fetch_add(1, Ordering::SeqCst);
                ready(Ok(()))
            }),
        );
        let sink = sink.on_own_thread();
        flow.connect_with(endless.output, sink.input, HubOptions::bounded(4));
        let running = flow.spawn().unwrap();
        until("it runs", || taken.load(Ordering::SeqCst) > 20).await;
        running.stop();
        let report = running.await.unwrap();
        let sent = report.operator("endless").unwrap().messages_out;
        assert_eq!(report.operator("sink").unwrap().messages_in, sent);
        assert_eq!((report.untaken, lock(&log).len() as u64), (0, sent));
    });
}

impl wakeline::Message for NotesItsDrop {}

/// Timers, sockets and tasks work, as do calls that panic on a worker of the runtime because they block.
#[test]
fn e4_the_runtime_is_available_on_an_own_thread() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    on_both_runtimes(|| async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answers = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let byte = socket.read_u8().await.unwrap();
            socket.write_u8(byte + 1).await.unwrap();
        });
        let mut flow = Flow::new("e4");
        let all = task(move |_: &mut (), _| {
            async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                let mut socket = tokio::net::TcpStream::connect(address).await?;
                socket.write_u8(41).await?;
                assert_eq!(socket.read_u8().await?, 42);
                let (send, mut receive) = tokio::sync::mpsc::channel(1);
                let sends = tokio::spawn(async move { send.send(thread::current().id()).await });
                let other = receive.blocking_recv().unwrap();
                assert_ne!(other, thread::current().id());
                sends.await.map_err(Error::other)?.map_err(Error::other)?;
                let nested = tokio::runtime::Handle::current();
                nested.block_on(tokio::time::sleep(Duration::from_millis(1)));
                Ok(())
            }
            .boxed()
        });
        let _ = flow.add("all", all).on_own_thread();
        flow.run().await.unwrap();
        answers.await.unwrap();
    });
}

/// Fails in one of its phases, with an error or a panic.
struct Fails {
    at: &'static str,
    panics: bool,
    stopped: Arc<AtomicUsize>,
}

impl Fails {
    fn fail_in(&self, phase: &'static str) -> Result<()> {
        match self.at == phase {
            true if self.panics => panic!("meant to fail"),
            true => Err("meant to fail".into()),
            false => Ok(()),
        }
    }
}

impl Operator for Fails {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        self.fail_in("start")
    }

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        cx.finish();
        self.fail_in("compute")
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.fetch_add(1, Ordering::SeqCst);
        self.fail_in("stop")
    }
}

impl Drop for Fails {
    fn drop(&mut self) {
        if self.at == "drop" && !thread::panicking() {
            panic!("meant to fail");
        }
    }
}

#[test]
fn e4_a_failure_on_an_own_thread_is_reported_as_on_any_other() {
    on_both_runtimes(|| async {
        for at in ["start", "compute", "stop", "drop"] {
            for panics in [false, true] {
                let stopped = Arc::new(AtomicUsize::new(0));
                let mut flow = Flow::new("e4");
                let _ = flow.add("fails", Fails { at, panics, stopped: stopped.clone() }).on_own_thread();
                let _ = flow.add("well", Fails { at: "", panics, stopped: stopped.clone() }).on_own_thread();
                let error = flow.spawn().unwrap().await.unwrap_err();
                let panicked = panics || at == "drop";
                assert_eq!(error.kind(), if panicked { ErrorKind::Panicked } else { ErrorKind::Operator });
                let text = error.to_string();
                assert!(text.contains("operator `fails`: ") && text.contains("meant to fail"), "{at}: {text}");
                assert_eq!(stopped.load(Ordering::SeqCst), 2, "{at}: every stop runs");
                gone("fails").await;
                gone("well").await;
            }
        }
    });
}

/// Counts its drops. As a thread-local value, it counts the threads that have ended.
struct CountsThreads(Arc<AtomicUsize>);

impl Drop for CountsThreads {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

thread_local! {
    static KEPT: std::cell::RefCell<Option<CountsThreads>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn e4_many_runs_leave_no_thread() {
    on_both_runtimes(|| async {
        let threads = Arc::new(AtomicUsize::new(0));
        let (sender, sent, seen) = (threads.clone(), threads.clone(), shared());
        let (mut runs, noted) = (0, seen.clone());
        let mut flow = Flow::new("e4");
        let count = flow.add(
            "e4 count",
            source(move || {
                KEPT.set(Some(CountsThreads(sender.clone())));
                runs += 1;
                // Two numbers, then the end.
                ready(Ok((runs % 3 != 0).then_some(runs)))
            }),
        );
        let keep = flow.add(
            "e4 keep",
            sink(move |n: u32| {
                KEPT.set(Some(CountsThreads(sent.clone())));
                lock(&noted).push(n);
                ready(Ok(()))
            }),
        );
        flow.connect(count.output, keep.input);
        let _both = (count.on_own_thread(), keep.on_own_thread());
        for run in 1..=100 {
            flow.run().await.unwrap();
            // Three values on one thread and two on the other.
            assert_eq!(threads.load(Ordering::SeqCst), 5 * run, "all threads have ended when the flow has");
        }
        assert_eq!(*lock(&seen), (1..300).filter(|n| n % 3 != 0).collect::<Vec<_>>(), "the operators are reused");
        drop(flow.spawn().unwrap());
        gone("e4 count").await;
        gone("e4 keep").await;
    });
}

/// No task can wait for the operator any more: it is dropped, and its thread ends.
#[test]
fn e4_the_threads_end_with_the_runtime() {
    for mut builder in [runtime::Builder::new_current_thread(), runtime::Builder::new_multi_thread()] {
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        let (log, (waits, does_wait)) = (shared(), oneshot::channel());
        let mut flow = Flow::new("e4");
        let _ = flow.add("e4 orphan", Phases::new(&log, waits)).on_own_thread();
        let entered = runtime.enter();
        let running = flow.spawn().unwrap();
        drop(entered);
        runtime.block_on(does_wait).unwrap();
        drop(runtime);
        let error = running.now_or_never().expect("no operator is left").unwrap_err();
        assert!(error.is_cancelled(), "{error}");
        let begun = std::time::Instant::now();
        while threads_named("e4 orphan") > 0 {
            assert!(begun.elapsed() < Duration::from_secs(10), "the thread has not ended");
            thread::yield_now();
        }
        let last = lock(&log).iter().map(|(event, _)| *event).rev().take(2).collect::<Vec<_>>();
        assert_eq!(last, ["drop", "interrupted"]);
    }
}

/// The runtime's only blocking thread is occupied by the code that waits for the flow.
#[test]
fn e4_an_own_thread_ends_without_a_blocking_thread_of_the_runtime() {
    let runtime =
        runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(1).enable_all().build().unwrap();
    let (outcome, ended) = mpsc::channel();
    runtime.spawn_blocking(move || {
        let mut flow = Flow::new("f");
        let from = flow.add("from", source(|| ready(Ok(None::<u32>)))).on_own_thread();
        let to = flow.add("to", sink(async |_: u32| Ok(())));
        flow.connect(from.output, to.input);
        outcome.send(runtime::Handle::current().block_on(flow.run()).map(drop)).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(20)).expect("the flow ends").unwrap();
}

/// The cores that this process may use.
fn cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("Linux");
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_string();
    let ranges = list.split(',').map(|range| range.split_once('-').unwrap_or((range, range)));
    ranges.flat_map(|(from, to)| from.parse().unwrap()..=to.parse().unwrap()).collect()
}

#[tokio::test]
async fn e4_a_thread_is_pinned_to_its_core() {
    for core in cores() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let mut flow = Flow::new("e4");
        let pinned = task(move |_: &mut (), _| {
            *lock(&noted) = cores();
            ready(Ok(())).boxed()
        });
        let _ = flow.add("pinned", pinned).on_own_thread_pinned(core);
        flow.run().await.unwrap();
        assert_eq!(*lock(&seen), [core]);
    }
}

#[tokio::test]
async fn e4_a_missing_core_is_reported_with_all_other_errors() {
    let mut flow = Flow::new("e4");
    let ran = Arc::new(AtomicBool::new(false));
    for (name, core) in [("far", 1023), ("further", 1 << 20), ("furthest", usize::MAX)] {
        let run = ran.clone();
        let runs = task(move |_: &mut (), _| {
            run.store(true, Ordering::SeqCst);
            ready(Ok(())).boxed()
        });
        let _ = flow.add(name, runs).on_own_thread_pinned(core);
    }
    let _ = flow.add("lonely", sink(|_: u32| ready(Ok(()))));
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    let text = error.to_string();
    for part in ["`far` is set to be pinned to core 1023", "`further`", "`furthest`", "`lonely.input` is not connected"]
    {
        assert!(text.contains(part), "missing: {part}\nin: {text}");
    }
    assert!(!ran.load(Ordering::SeqCst), "no operator has run");
}

/// In a simulation the operator is an ordinary task, scheduled by the seed.
#[tokio::test(start_paused = true)]
async fn e4_a_simulation_has_no_threads() {
    let run = async |seed| {
        let simulation = Simulation::new(seed);
        let log = Log::default();
        let (noted, seen) = (log.clone(), log.clone());
        let outcome = simulation.run(async {
            let mut numbers = 0..4_u32;
            let mut flow = Flow::new("e4");
            let count = flow.add(
                "e4 simulated",
                source(move || {
                    note(&noted, "sent");
                    ready(Ok(numbers.next()))
                }),
            );
            let keep = flow.add(
                "keep",
                sink(move |_: u32| {
                    note(&seen, "taken");
                    tokio::time::sleep(Duration::from_secs(60)).map(Ok)
                }),
            );
            flow.connect(count.output, keep.input);
            let _both = (count.on_own_thread_pinned(1 << 20), keep.on_own_thread());
            flow.run().await
        });
        outcome.await.unwrap();
        assert!(lock(&log).iter().all(|(_, thread)| *thread == thread::current().id()));
        simulation.log()
    };
    for seed in 0..5 {
        assert_eq!(run(seed).await, run(seed).await);
    }
}

on_both!(e4_the_device_is_available_on_an_own_thread, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("e4");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64]))).on_own_thread();
    let first = flow.add("first", Increment).on(&device).on_own_thread();
    let second = flow.add("second", Increment).on(&device).on_own_thread();
    let third = flow.add("third", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone())).on_own_thread();
    flow.connect_with(produce.output, first.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect(first.output, second.input);
    flow.connect(second.output, third.input);
    flow.connect(third.output, consume.input);
    flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (3..23).map(|n| vec![n; 64]).collect::<Vec<_>>());
    drop(flow);
    freed(&device).await;
});
