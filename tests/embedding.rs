//! Scenario E3: flows on every kind of runtime, several at once, on one thread, and in `select!`.

use std::{
    cell::RefCell,
    future::ready,
    ops::AsyncFn,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use common::*;
use futures::FutureExt;
use tokio::{
    runtime::{Builder, LocalRuntime},
    sync::oneshot,
    task::LocalSet,
};
use wakeline::{device::Simulation, flow::LocalFlow, operator::LocalOperator, prelude::*};

/// Runs the body wherever a single-threaded flow can run: in a `LocalSet` on a current-thread and on a multi-thread
/// runtime, and on a `LocalRuntime`.
fn on_one_thread(body: impl AsyncFn()) {
    for mut builder in [Builder::new_current_thread(), Builder::new_multi_thread()] {
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        LocalSet::new().block_on(&runtime, within(body()));
    }
    LocalRuntime::new().unwrap().block_on(within(body()));
}

/// State that the operators of one flow share.
#[derive(Default)]
struct Board {
    numbers: Vec<u32>,
    phases: Vec<String>,
    dropped: u32,
}

type Shares = Rc<RefCell<Board>>;

/// Forwards each number and records it on the shared board without a lock, as all operators run on one thread.
struct Writes {
    board: Shares,
    most: usize,
}

impl LocalOperator for Writes {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        self.board.borrow_mut().numbers.push(number);
        tokio::task::yield_now().await;
        self.most = self.most.max(self.board.borrow().numbers.len());
        ports.output.send(number).await?;
        Ok(())
    }
}

/// `count -> a -> b -> last`, where `a` and `b` share a board.
fn shared_board(to: u32, board: &Shares) -> (LocalFlow, Shared<u32>) {
    let seen = shared();
    let (noted, mut numbers) = (seen.clone(), 1..=to);
    let mut flow = LocalFlow::new("board");
    let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
    let a = flow.add_local("a", Writes { board: board.clone(), most: 0 });
    let b = flow.add_local("b", Writes { board: board.clone(), most: 0 });
    let last = flow.add(
        "last",
        sink(move |n: u32| {
            lock(&noted).push(n);
            ready(Ok(()))
        }),
    );
    flow.connect(count.output, a.input);
    flow.connect_with(a.output, b.input, HubOptions::bounded(3));
    flow.connect(b.output, last.input);
    (flow, seen)
}

#[test]
fn e3_operators_on_one_thread_share_state_without_locks() {
    on_one_thread(async || {
        let board = Shares::default();
        let (mut flow, seen) = shared_board(100, &board);
        assert_eq!(flow.name(), "board");
        let report = flow.run().await.unwrap();
        assert_eq!(*lock(&seen), (1..=100).collect::<Vec<_>>());
        let mut written = std::mem::take(&mut board.borrow_mut().numbers);
        written.sort();
        assert_eq!(written, (1..=100).flat_map(|n| [n, n]).collect::<Vec<_>>());
        assert_eq!(report.operator("a").unwrap().runs, 100);
        assert_eq!(report.operator("b").unwrap().messages_out, 100);
        drop(flow);
        assert_eq!(Rc::strong_count(&board), 1, "the flow has dropped its clones");
    });
}

/// Records each of its phases, and fails in the one given by `fails`, if any: `true` panics, `false` is an error.
struct Phases {
    board: Shares,
    fails: Option<(&'static str, bool)>,
    /// Notified when the second run starts to wait for ever, to be interrupted there.
    interrupted: Option<oneshot::Sender<()>>,
    runs: u32,
}

impl Phases {
    fn new(board: &Shares) -> Self {
        Self { board: board.clone(), fails: None, interrupted: None, runs: 0 }
    }

    fn phase(&self, phase: &str) -> Result<()> {
        self.board.borrow_mut().phases.push(phase.into());
        match self.fails {
            Some((at, true)) if at == phase => panic!("meant to fail"),
            Some((at, false)) if at == phase => Err("meant to fail".into()),
            _ => Ok(()),
        }
    }
}

struct CountsItsDrop(Shares);

impl Drop for CountsItsDrop {
    fn drop(&mut self) {
        self.0.borrow_mut().dropped += 1;
    }
}

impl LocalOperator for Phases {
    type Ports = ();

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        self.phase("start")
    }

    fn may_run(&mut self, _ports: &(), _cx: &Cx) -> bool {
        self.phase("may run").is_ok()
    }

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        self.runs += 1;
        self.phase("compute")?;
        if self.runs == 2 {
            let _held = CountsItsDrop(self.board.clone());
            match self.interrupted.take() {
                Some(waits) => {
                    waits.send(()).unwrap();
                    std::future::pending().await
                }
                None => cx.finish(),
            }
        }
        Ok(())
    }

    async fn after(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
        self.phase("after")
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.phase("stop")
    }
}

fn phases(board: &Shares) -> Vec<String> {
    std::mem::take(&mut board.borrow_mut().phases)
}

#[test]
fn e3_a_local_operator_has_all_phases() {
    on_one_thread(async || {
        let board = Shares::default();
        let mut flow = LocalFlow::new("e3");
        let _ = flow.add_local("phases", Phases::new(&board));
        let report = flow.run().await.unwrap();
        let run = ["may run", "compute", "after"];
        assert_eq!(phases(&board), [&["start"][..], &run, &run, &["stop"]].concat());
        assert_eq!(report.operator("phases").unwrap().runs, 2);
    });
}

#[test]
fn e3_a_failure_of_a_local_operator_is_named_and_all_operators_stop() {
    on_one_thread(async || {
        for at in ["start", "compute", "after", "stop"] {
            for panics in [false, true] {
                let board = Shares::default();
                let mut flow = LocalFlow::new("e3");
                let _ = flow.add_local("fails", Phases { fails: Some((at, panics)), ..Phases::new(&board) });
                let _ = flow.add_local("well", Phases::new(&board));
                let error = flow.run().await.unwrap_err();
                assert_eq!(error.kind(), if panics { ErrorKind::Panicked } else { ErrorKind::Operator });
                assert!(error.to_string().starts_with("operator `fails`: "), "{error}");
                let stops = phases(&board).iter().filter(|phase| *phase == "stop").count();
                assert_eq!(stops, 2, "{at}");
                drop(flow);
                assert_eq!(Rc::strong_count(&board), 1);
            }
        }
    });
}

/// A local operator with its own `run` and other methods, which would never be called, is an error.
#[test]
fn e3_a_local_operators_run_is_checked() {
    struct RunsItself;

    impl LocalOperator for RunsItself {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            Ok(())
        }

        async fn after(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            Ok(())
        }

        async fn run(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
            Ok(())
        }
    }

    on_one_thread(async || {
        let mut flow = LocalFlow::new("e3");
        let _ = flow.add_local("itself", RunsItself);
        let error = flow.run().await.unwrap_err();
        assert!(error.to_string().contains("never called its `after`"), "{error}");
    });
}

#[test]
fn e3_abort_stop_and_drop_on_one_thread() {
    on_one_thread(async || {
        for how in ["abort", "drop", "drop elsewhere", "drop the run"] {
            let board = Shares::default();
            let (waits, does_wait) = oneshot::channel();
            let mut flow = LocalFlow::new("e3");
            let _ = flow.add_local("phases", Phases { interrupted: Some(waits), ..Phases::new(&board) });
            if how == "drop the run" {
                tokio::select! {
                    _ = flow.run() => panic!("an endless flow ended"),
                    waits = does_wait => waits.unwrap(),
                }
            } else {
                let running = flow.spawn().unwrap();
                does_wait.await.unwrap();
                match how {
                    "abort" => {
                        running.abort();
                        assert!(running.await.unwrap_err().is_cancelled());
                    }
                    "drop" => drop(running),
                    _ => thread::spawn(move || drop(running)).join().unwrap(),
                }
            }
            until("the operators are dropped", || Rc::strong_count(&board) == 1).await;
            assert_eq!(board.borrow().dropped, 1, "{how}: the interrupted run is dropped");
            assert_eq!(phases(&board).last().unwrap(), "stop", "{how}");
        }

        let board = Shares::default();
        let (flow, seen) = shared_board(u32::MAX, &board);
        let running = flow.spawn().unwrap();
        until("the flow runs", || lock(&seen).len() > 20).await;
        running.stop();
        let report = running.await.unwrap();
        assert_eq!(report.operator("count").unwrap().messages_out, lock(&seen).len() as u64, "drained");
        assert_eq!(Rc::strong_count(&board), 1, "the operators are dropped when the flow has ended");
    });
}

/// `Running` may be awaited on another thread: the operators stay on their thread and are dropped there.
#[test]
fn e3_the_end_of_a_flow_on_one_thread_can_be_awaited_on_another() {
    on_one_thread(async || {
        let board = Shares::default();
        let (flow, _) = shared_board(20, &board);
        let running = flow.spawn().unwrap();
        let (sender, receiver) = oneshot::channel();
        let waits = thread::spawn(move || _ = sender.send(futures::executor::block_on(running)));
        assert_eq!(receiver.await.unwrap().unwrap().operator("a").unwrap().runs, 20);
        waits.join().unwrap();
        assert_eq!(Rc::strong_count(&board), 1);
    });
}

/// Running a local flow outside a `LocalSet` or `LocalRuntime` is an error, and so is `on_own_thread` for a local
/// operator.
#[tokio::test]
async fn e3_what_cannot_stay_on_one_thread_is_an_error() {
    let board = Shares::default();
    let (mut flow, seen) = shared_board(3, &board);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("LocalSet::new().run_until(flow.run())"), "{error}");
    assert!(lock(&seen).is_empty());
    LocalSet::new().run_until(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3], "the failed run lost no message");

    let mut flow = LocalFlow::new("e3");
    let _ = flow.add_local("stays", Phases::new(&board)).on_own_thread();
    let error = LocalSet::new().run_until(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("`stays` is set to run on its own thread"), "{error}");
}

/// An operator that is `Send` may have its own thread, and block there, in a flow with local operators.
#[test]
fn e3_a_send_operator_of_a_local_flow_may_have_its_own_thread() {
    on_one_thread(async || {
        let board = Shares::default();
        let here = thread::current().id();
        let mut numbers = (1..=20).collect::<Vec<u32>>().into_iter();
        let mut flow = LocalFlow::new("e3");
        let blocks = flow.add(
            "blocks",
            source(move || {
                assert_ne!(thread::current().id(), here);
                ready(Ok(numbers.next()))
            }),
        );
        let writes = flow.add_local("writes", Writes { board: board.clone(), most: 0 });
        let last = flow.add("last", sink(|_: u32| ready(Ok(()))));
        flow.connect(blocks.output, writes.input);
        flow.connect(writes.output, last.input);
        let _blocks = blocks.on_own_thread();
        flow.run().await.unwrap();
        assert_eq!(board.borrow().numbers, (1..=20).collect::<Vec<_>>());
    });
}

#[tokio::test(start_paused = true)]
async fn e3_a_flow_on_one_thread_can_be_simulated() {
    let run = async |seed| {
        let simulation = Simulation::new(seed);
        let board = Shares::default();
        let (mut flow, seen) = shared_board(5, &board);
        simulation.run(async { flow.run().await.unwrap() }).await;
        assert_eq!(*lock(&seen), [1, 2, 3, 4, 5]);
        (board.borrow().numbers.clone(), simulation.log())
    };
    let mut orders = std::collections::HashSet::new();
    for seed in 0..10 {
        assert_eq!(run(seed).await, run(seed).await, "seed {seed}");
        orders.insert(run(seed).await.0);
    }
    assert!(orders.len() > 1, "different seeds give different orders");
}

/// Adds a number from the shared board on the device.
struct AddsTheBoard(Shares);

impl LocalOperator for AddsTheBoard {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        for _ in 0..self.0.borrow().numbers.len() {
            increment::launch(cx.stream()?, &mut envelope)?;
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

async fn a_device_on_one_thread(device: Device) {
    let board = Shares::default();
    board.borrow_mut().numbers.extend([0; 5]);
    let seen = shared();
    let mut flow = LocalFlow::new("e3");
    flow.set_completion_mode(wakeline::CompletionMode::Quiet);
    flow.set_device_times(true);
    let produce = flow.add("produce", SendEach::new((0..10).map(|n| vec![n; 64])));
    let adds = flow.add_local("adds", AddsTheBoard(board.clone())).on(&device);
    let again = flow.add_local("again", AddsTheBoard(board)).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, adds.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect(adds.output, again.input);
    flow.connect(again.output, consume.input);
    let report = flow.run().await.unwrap();
    assert_eq!(*lock(&seen), (10..20).map(|n| vec![n; 64]).collect::<Vec<_>>());
    assert_eq!(report.operator("adds").unwrap().device.unwrap().runs, 10);
    drop(flow);
    freed(&device).await;
}

#[test]
fn e3_a_flow_on_one_thread_uses_the_emulated_device() {
    on_one_thread(async || a_device_on_one_thread(emulated()).await);
}

#[test]
#[ignore = "needs a GPU"]
fn e3_a_flow_on_one_thread_uses_a_gpu() {
    let device = cuda();
    on_one_thread(async || a_device_on_one_thread(device.clone()).await);
}

/// A flow that sums the numbers up to `to`.
fn sums(name: &str, to: u64) -> (Flow, Arc<AtomicUsize>) {
    let (sum, mut numbers) = (Arc::new(AtomicUsize::new(0)), 1..=to);
    let summed = sum.clone();
    let mut flow = Flow::new(name);
    let count = flow.add("count", source(move || ready(Ok(numbers.next()))));
    let pass = flow.add("pass", pass_on::<u64>());
    let add = flow.add(
        "add",
        sink(move |n: u64| {
            summed.fetch_add(n as usize, Ordering::Relaxed);
            ready(Ok(()))
        }),
    );
    flow.connect(count.output, pass.input);
    flow.connect_with(pass.output, add.input, HubOptions::bounded(8));
    (flow, sum)
}

/// Several flows on each of three runtimes at once, all on one device: none affects another.
#[test]
fn e3_several_flows_in_one_process_on_every_runtime() {
    let device = emulated();
    let on_device = async |device: &Device, round: u32| {
        let seen = shared();
        let mut flow = Flow::new("e3");
        let produce = flow.add("produce", SendEach::new((0..4).map(|n| vec![n + round; 8])));
        let add = flow.add("add", Increment).on(device);
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelope_bytes(32));
        flow.connect(add.output, consume.input);
        flow.run().await.unwrap();
        assert_eq!(*lock(&seen), (1..5).map(|n| vec![n + round; 8]).collect::<Vec<_>>());
    };
    let several = async || {
        let flows = (1..=20).map(|n| sums("e3", 10 * n));
        let running: Vec<_> = flows.map(|(flow, sum)| (flow.spawn().unwrap(), sum)).collect();
        for (n, (running, sum)) in (1..).zip(running) {
            running.await.unwrap();
            assert_eq!(sum.load(Ordering::Relaxed), 10 * n * (10 * n + 1) / 2);
        }
        futures::future::join_all((0..5).map(|round| on_device(&device, round))).await;
    };
    thread::scope(|scope| {
        scope.spawn(|| Builder::new_current_thread().enable_all().build().unwrap().block_on(within(several())));
        scope.spawn(|| {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(2).enable_all().build().unwrap().block_on(within(several()));
        });
        scope.spawn(|| {
            on_one_thread(async || {
                let board = Shares::default();
                let (mut one, first) = shared_board(50, &board);
                let (mut two, second) = shared_board(50, &board);
                let (one, two, ()) = futures::join!(one.run(), two.run(), several());
                assert_eq!((one.unwrap().operators.len(), two.unwrap().operators.len()), (4, 4));
                assert_eq!((lock(&first).len(), lock(&second).len()), (50, 50));
                assert_eq!(board.borrow().numbers.len(), 200);
            });
        });
    });
    assert_eq!(freed_too_early(), [""; 0]);
}

#[derive(Ports)]
struct MergePorts {
    #[input]
    left: Input<Counted>,
    #[input(capacity = 4)]
    right: Input<Counted>,
    #[output]
    merged: Output<Counted>,
}

/// Forwards the message that arrives first. Polls its ports, a timer and its own channel in one `select!`, which drops
/// the other branches each time.
struct Merge {
    words: tokio::sync::mpsc::Receiver<&'static str>,
    heard: Shared<&'static str>,
}

impl Operator for Merge {
    type Ports = MergePorts;

    async fn compute(&mut self, _ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
        unreachable!("its `run` calls no `compute`")
    }

    async fn run(&mut self, ports: &mut MergePorts, _cx: &mut Cx) -> Result<()> {
        let (mut left, mut right) = (true, true);
        let mut tick = tokio::time::interval(Duration::from_micros(50));
        while left || right || lock(&self.heard).len() < 3 {
            let message = tokio::select! {
                message = ports.left.recv(), if left => {
                    left = message.as_ref().is_ok_and(Option::is_some);
                    message?
                }
                message = ports.right.recv(), if right => {
                    right = message.as_ref().is_ok_and(Option::is_some);
                    message?
                }
                Some(word) = self.words.recv() => {
                    lock(&self.heard).push(word);
                    None
                }
                _ = tick.tick() => None,
            };
            if let Some(message) = message {
                ports.merged.send(message).await?;
            }
        }
        Ok(())
    }
}

/// A flow in a `select!` continues after each other branch, and so do ports.
#[test]
fn e3_select_over_everything() {
    for mut builder in [Builder::new_current_thread(), Builder::new_multi_thread()] {
        let runtime = builder.worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(within(async {
            let (census, seen, heard) = (Census::default(), shared(), shared());
            let (say, words) = tokio::sync::mpsc::channel(4);
            let mut flow = Flow::new("e3");
            let sends = |from: u64| {
                let (census, mut numbers) = (census.clone(), from..from + 100);
                source(move || {
                    let message = numbers.next().map(|n| census.message(n));
                    tokio::task::yield_now().map(|()| Ok(message))
                })
            };
            let (left, right) = (flow.add("left", sends(0)), flow.add("right", sends(1000)));
            let merge = flow.add("merge", Merge { words, heard: heard.clone() });
            let noted = seen.clone();
            let last = flow.add(
                "last",
                sink(move |message: Counted| {
                    lock(&noted).push(message.number);
                    ready(Ok(()))
                }),
            );
            flow.connect(left.output, merge.left);
            flow.connect(right.output, merge.right);
            flow.connect(merge.merged, last.input);

            let mut running = flow.spawn().unwrap();
            let mut tick = tokio::time::interval(Duration::from_micros(100));
            let report = loop {
                tokio::select! {
                    report = &mut running => break report.unwrap(),
                    _ = tick.tick() => drop(say.try_send("word")),
                }
            };
            let (left, right): (Vec<u64>, Vec<u64>) = lock(&seen).iter().partition(|number| **number < 1000);
            assert_eq!(left, (0..100).collect::<Vec<_>>(), "none is lost or reordered");
            assert_eq!(right, (1000..1100).collect::<Vec<_>>());
            assert_eq!((report.operator("merge").unwrap().messages_in, report.untaken, census.live()), (200, 0, 0));
            assert!(lock(&heard).len() >= 3, "the operator's own channel is received too");
            let again = running.await.unwrap_err();
            assert_eq!(again.kind(), ErrorKind::Usage, "{again}");
        }));
    }
}
