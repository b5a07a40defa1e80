//! Tests that one seed gives one order.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, atomic::AtomicUsize, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    task::yield_now,
    time::{Instant, sleep},
};

use super::*;
use crate::device::{
    backend::{Endpoint, RawStream, StreamSpec},
    check::checked,
    emulated::{
        Faults,
        tests::{fill, read},
    },
};

fn stream(device: &Arc<dyn Backend>, name: &str) -> RawStream {
    device.stream_create(&StreamSpec { name: name.into(), priority: 0, non_blocking: true }).unwrap()
}

fn done(device: &Arc<dyn Backend>, on: RawStream) -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    device.host_function(on, &mut Some(Box::new(move || _ = sender.send(())))).unwrap();
    receiver
}

/// Three tasks with streams of their own on two devices, which wait for each other now and then.
async fn busy(simulation: &Simulation) -> u8 {
    let devices = [simulation.device(Emulated::new()), simulation.device(Emulated::new())];
    let handle = current().unwrap();
    let meet = Arc::new(Notify::new());
    let tasks: Vec<_> = (0..3_u8)
        .map(|number| {
            let device = devices[usize::from(number) % 2].clone();
            let meet = meet.clone();
            handle.spawn(format!("task {number}"), async move {
                let on = stream(&device, &format!("s{number}"));
                let memory = device.alloc(8).unwrap();
                for round in 0..5 {
                    fill(&device, on, memory, number + round, 8);
                    done(&device, on).await.unwrap();
                    match round {
                        1 => sleep(Duration::from_millis(number.into())).await,
                        2 if number == 0 => meet.notify_waiters(),
                        3 => tokio::task::consume_budget().await,
                        _ => yield_now().await,
                    }
                }
                read(&device, on, memory, 8)[0]
            })
        })
        .collect();
    let mut sum = 0;
    for task in tasks {
        sum += task.await.unwrap();
    }
    sum
}

async fn log_of(seed: u64) -> Vec<String> {
    let simulation = Simulation::new(seed);
    assert_eq!(simulation.run(busy(&simulation)).await, 4 + 5 + 6);
    simulation.log()
}

#[tokio::test(start_paused = true)]
async fn one_seed_gives_one_order() {
    let mut orders = BTreeSet::new();
    for seed in 0..100 {
        let first = log_of(seed).await;
        assert_eq!(first, log_of(seed).await);
        orders.insert(first);
    }
    assert!(orders.len() > 95, "{} orders of 100 seeds", orders.len());
    let log = log_of(0).await;
    for line in ["root", "task 2 `task 1`", "simulated:1/s1: fill of 8 bytes", "simulated:0/s0: host function"] {
        assert!(log.iter().any(|entry| entry == line), "{line} in {log:#?}");
    }
}

#[test]
fn an_order_does_not_depend_on_the_runtime() {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(log_of(3))
    };
    let here = run();
    assert_eq!(here, std::thread::spawn(run).join().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_blocked_stream_continues() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed);
        let device = checked(simulation.device(Emulated::new()));
        let bytes = simulation
            .run(async {
                let (a, b) = (stream(&device, "a"), stream(&device, "b"));
                let memory = device.alloc(8).unwrap();
                let event = device.event_create(true).unwrap();
                fill(&device, a, memory, 1, 8);
                device.event_record(event, a).unwrap();
                device.stream_wait(b, event).unwrap();
                fill(&device, b, memory, 2, 8);
                done(&device, b).await.unwrap();
                read(&device, b, memory, 8)
            })
            .await;
        assert_eq!(bytes, [2; 8]);
        let log = simulation.log();
        let at = |line: &str| log.iter().position(|entry| entry == line).unwrap();
        assert!(at("simulated:0/a: record") < at("simulated:0/b: wait"), "{log:#?}");
    }
}

#[tokio::test(start_paused = true)]
async fn time_is_virtual() {
    let simulation = Simulation::new(1);
    let device = simulation.device(Emulated::new());
    let before = std::time::Instant::now();
    let elapsed = simulation
        .run(async {
            let on = stream(&device, "s");
            let (from, to) = (device.event_create(true).unwrap(), device.event_create(true).unwrap());
            device.event_record(from, on).unwrap();
            done(&device, on).await.unwrap();
            sleep(Duration::from_secs(3600)).await;
            device.event_record(to, on).unwrap();
            done(&device, on).await.unwrap();
            device.event_elapsed(from, to).unwrap()
        })
        .await;
    assert_eq!(elapsed, Duration::from_secs(3600));
    assert!(before.elapsed() < Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn spawn_join_abort() {
    let simulation = Simulation::new(1);
    let kept = Arc::new(());
    simulation
        .run(async {
            let handle = current().unwrap();
            let inner = handle.spawn("outer", async {
                let inner = current().unwrap().spawn("inner", async { 7 });
                inner.await.unwrap() + 1
            });
            assert_eq!(inner.await.unwrap(), 8);
            let held = kept.clone();
            let endless = handle.spawn("endless", async move {
                let _held = held;
                std::future::pending::<()>().await;
            });
            yield_now().await;
            assert!(!endless.is_finished());
            endless.abort();
            assert!(matches!(endless.await, Err(Unfinished::Aborted)));
            assert_eq!(Arc::strong_count(&kept), 1);
            let panics = handle.spawn("panics", async { panic!("on purpose") });
            let Err(Unfinished::Panicked(panic)) = panics.await else { panic!("it did not") };
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
            // This one is detached, and runs all the same.
            let notify = Arc::new(Notify::new());
            let notifier = notify.clone();
            drop(handle.spawn("", async move { notifier.notify_one() }));
            notify.notified().await;
        })
        .await;
    assert!(current().is_none());
}

#[tokio::test(start_paused = true)]
async fn tasks_outlive_a_run_and_end_with_the_simulation() {
    let simulation = Simulation::new(1);
    let kept = Arc::new(());
    let held = kept.clone();
    let task = simulation.spawn("late", async move {
        let _held = held;
        sleep(Duration::from_secs(1)).await;
        std::future::pending::<()>().await;
    });
    simulation.run(async {}).await;
    simulation.run(sleep(Duration::from_secs(2))).await;
    assert_eq!(Arc::strong_count(&kept), 2);
    let device = simulation.device(Emulated::new());
    let handle = super::SimulationHandle { core: simulation.core.clone() };
    drop(simulation);
    assert_eq!(Arc::strong_count(&kept), 1);
    assert!(matches!(task.await, Err(Unfinished::Aborted)));
    assert!(matches!(handle.spawn("never", async {}).await, Err(Unfinished::Aborted)));
    assert!(device.memory().unwrap_err().is_device_lost());
}

#[tokio::test(start_paused = true)]
async fn a_blocking_wait_steps_the_streams() {
    let simulation = Simulation::new(1);
    let device = simulation.device(Emulated::new());
    let on = stream(&device, "s");
    let memory = device.alloc(4).unwrap();
    // This works outside of a run.
    fill(&device, on, memory, 9, 4);
    assert!(!device.stream_query(on).unwrap());
    assert_eq!(read(&device, on, memory, 4), [9; 4]);
    assert!(device.stream_query(on).unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_nothing_ends_is_an_error() {
    let (one, two) = (Simulation::new(1), crate::device::emulated::open(Emulated::new()));
    let device = one.device(Emulated::new());
    let on = stream(&device, "s");
    // An event of a device outside of the simulation cannot be waited for.
    let event = two.event_create(false).unwrap();
    assert!(device.stream_wait(on, event).is_err());
    device.stream_synchronize(on).unwrap();
    // Called from its own host function, the stream can never be done.
    let (again, outcome) = (device.clone(), Arc::new(Mutex::new(None)));
    let result = outcome.clone();
    let function = move || *result.lock().unwrap() = Some(again.stream_synchronize(on));
    device.host_function(on, &mut Some(Box::new(function))).unwrap();
    device.stream_synchronize(on).unwrap();
    let outcome = outcome.lock().unwrap().take().unwrap();
    assert!(outcome.unwrap_err().is_stalled());
}

#[tokio::test(start_paused = true)]
async fn ticks_come_while_nothing_happens() {
    let simulation = Simulation::new(1);
    let device = simulation.device(Emulated::new().faults(Faults::new().lose_host_function(1)));
    let ticks = Arc::new(AtomicUsize::new(0));
    let waited = simulation
        .run(async {
            let on = stream(&device, "s");
            let lost = done(&device, on);
            let notify = Arc::new(Notify::new());
            let (count, watch, notifier) = (ticks.clone(), device.clone(), notify.clone());
            let start = Instant::now();
            // A watchdog: queries the stream, since the callback is never called.
            let call = move || {
                if count.fetch_add(1, Ordering::Relaxed) == 4 && watch.stream_query(on).unwrap() {
                    notifier.notify_one();
                    return false;
                }
                true
            };
            current().unwrap().on_idle_every(Duration::from_millis(100), Box::new(call));
            notify.notified().await;
            drop(lost);
            start.elapsed()
        })
        .await;
    assert!((500..510).contains(&waited.as_millis()), "{waited:?}");
    assert_eq!(ticks.load(Ordering::Relaxed), 5);
}

#[tokio::test(start_paused = true)]
async fn a_trap_is_named_the_same_every_time() {
    let text = |seed| async move {
        let simulation = Simulation::new(seed);
        let device = simulation.device(Emulated::new().faults(Faults::new().fail_copy(1)));
        let on = stream(&device, "s");
        let (mut byte, memory) = (0_u8, device.alloc(1).unwrap());
        // SAFETY: `byte` outlives the wait.
        unsafe { device.copy(on, Endpoint::Host(&mut byte), Endpoint::Device(memory), 1) }.unwrap();
        device.stream_synchronize(on).unwrap_err().to_string()
    };
    assert_eq!(text(1).await, text(2).await);
    assert!(text(1).await.starts_with("simulated:0: device lost: copy to host of 1 byte on stream `s` failed"));
}

/// Work that comes from a real thread while the loop sleeps wakes it.
#[tokio::test]
async fn other_threads_wake_the_loop() {
    let simulation = Simulation::new(1);
    let device = simulation.device(Emulated::new());
    let on = stream(&device, "s");
    for _ in 0..100 {
        let device = device.clone();
        simulation
            .run(async {
                tokio::task::spawn_blocking(move || done(&device, on)).await.unwrap().await.unwrap();
            })
            .await;
    }
}

/// A call that waits runs streams on another thread, while the loop is between its check and its sleep. The test makes
/// that call in the poll of a tick's timer, which is at that point.
#[tokio::test(start_paused = true)]
async fn a_call_that_waits_on_another_thread_loses_no_wakeup_of_the_loop() {
    let simulation = Simulation::new(1);
    let device = simulation.device(Emulated::new());
    let on = stream(&device, "s");
    let polls = Arc::new(AtomicUsize::new(0));
    let (core, counted) = (simulation.core.clone(), polls.clone());
    let mut run = std::pin::pin!(simulation.run(std::future::poll_fn(move |cx| {
        if counted.fetch_add(1, Ordering::Relaxed) == 0 {
            let (mut waker, device) = (Some(cx.waker().clone()), device.clone());
            let sleep = std::future::poll_fn(move |_| {
                if let Some(waker) = waker.take() {
                    waker.wake();
                    drop(done(&device, on));
                    device.stream_synchronize(on).unwrap();
                }
                Poll::Pending
            });
            let due = Instant::now() + Duration::from_secs(1);
            let sleep: Option<(_, TaskFuture)> = Some((Handle::current().id(), Box::pin(sleep)));
            let tick = Tick { interval: Duration::from_secs(1), due, sleep, call: Box::new(|| false) };
            lock(&core.state).ticks.push(tick);
        }
        Poll::<()>::Pending
    })));
    assert!(futures::poll!(run.as_mut()).is_pending());
    assert_eq!(polls.load(Ordering::Relaxed), 2, "woken but not polled");
}

/// Streams of a simulation, and a thread that runs a host function of the first one until `end` is dropped.
struct Blocked {
    device: Arc<dyn Backend>,
    streams: [RawStream; 3],
    end: std::sync::mpsc::Sender<()>,
    call: std::thread::JoinHandle<crate::Result<()>>,
}

fn blocked(simulation: &Simulation) -> Blocked {
    let device = simulation.device(Emulated::new());
    let streams = ["a", "b", "c"].map(|name| stream(&device, name));
    let (end, held) = std::sync::mpsc::channel();
    let (begun, begins) = std::sync::mpsc::channel();
    let function = move || {
        begun.send(()).unwrap();
        _ = held.recv();
    };
    device.host_function(streams[0], &mut Some(Box::new(function))).unwrap();
    let call = std::thread::spawn({
        let device = device.clone();
        move || device.stream_synchronize(streams[0])
    });
    begins.recv().unwrap();
    Blocked { device, streams, end, call }
}

/// Waits for the second stream, behind the first, on a thread of its own, which then sleeps. The channel has the
/// outcome.
fn waits_for_b(simulation: &Simulation, blocked: &Blocked) -> std::sync::mpsc::Receiver<crate::Result<()>> {
    let Blocked { device, streams: [a, b, _], .. } = blocked;
    let event = device.event_create(false).unwrap();
    device.event_record(event, *a).unwrap();
    device.stream_wait(*b, event).unwrap();
    let (sender, outcomes) = std::sync::mpsc::channel();
    let (device, b) = (device.clone(), *b);
    std::thread::spawn(move || _ = sender.send(device.stream_synchronize(b)));
    while simulation.core.engine.waiting_calls() == 0 {
        std::thread::yield_now();
    }
    outcomes
}

/// Longer than any machine needs: exceeded only if the test fails.
const NEVER: Duration = Duration::from_secs(20);

#[test]
fn a_call_that_sleeps_runs_what_is_enqueued_meanwhile() {
    let simulation = Simulation::new(1);
    let blocked = blocked(&simulation);
    let outcomes = waits_for_b(&simulation, &blocked);
    let (ran, runs) = std::sync::mpsc::channel();
    let function = move || ran.send(()).unwrap();
    blocked.device.host_function(blocked.streams[2], &mut Some(Box::new(function))).unwrap();
    // The first function may wait for this one: nothing orders the two.
    assert!(runs.recv_timeout(NEVER).is_ok(), "a thread waits in the simulation, but the stream is not run");
    drop(blocked.end);
    blocked.call.join().unwrap().unwrap();
    outcomes.recv().unwrap().unwrap();
}

#[test]
fn a_call_that_sleeps_is_notified_of_the_end_of_its_simulation() {
    let simulation = Simulation::new(1);
    let blocked = blocked(&simulation);
    let outcomes = waits_for_b(&simulation, &blocked);
    drop(simulation);
    let outcome = outcomes.recv_timeout(NEVER).expect("its device is lost, and it waits for another thread's function");
    assert!(outcome.unwrap_err().is_device_lost());
    drop(blocked.end);
    assert!(blocked.call.join().unwrap().unwrap_err().is_device_lost());
}

#[test]
fn it_can_be_sent() {
    fn check<T: Send + Sync>() {}
    fn send<T: Send>(_: &T) {}
    check::<Simulation>();
    check::<SimulationHandle>();
    check::<Task<()>>();
    let simulation = Simulation::new(1);
    send(&simulation.run(async {}));
}
