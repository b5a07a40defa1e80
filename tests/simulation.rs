//! Simulated flows: no threads, virtual time, and each seed always gives the same events.

use std::{
    cell::RefCell,
    future::pending,
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use futures::{FutureExt, poll};
use tokio::time::sleep;
use wakeline::{
    Stream,
    condition::{Condition, Status},
    device::{Device, Emulated, Faults, Simulation},
    graph::Graph,
    memory::Allocator,
    prelude::*,
    stream::{Event, Timer},
};

#[kernel]
fn increment(numbers: &mut [u32]) {
    numbers.iter_mut().for_each(|n| *n += 1);
}

#[derive(Ports)]
struct NumbersPorts {
    #[output(envelope_bytes = 64)]
    numbers: Output<Envelope<u32>>,
}

/// Sends each number in an envelope of its own.
struct Numbers(std::ops::RangeInclusive<u32>);

impl Operator for Numbers {
    type Ports = NumbersPorts;

    async fn compute(&mut self, ports: &mut NumbersPorts, cx: &mut Cx) -> Result<()> {
        let Some(n) = self.0.next() else {
            cx.finish();
            return Ok(());
        };
        let mut envelope = ports.numbers.blank().await?;
        envelope.space().await?[0] = n;
        envelope.set_len(1)?;
        ports.numbers.send(envelope).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct IncrementPorts {
    #[input]
    numbers: Input<Envelope<u32>>,
    #[output]
    incremented: Output<Envelope<u32>>,
}

struct Increment;

impl Operator for Increment {
    type Ports = IncrementPorts;

    async fn compute(&mut self, ports: &mut IncrementPorts, cx: &mut Cx) -> Result<()> {
        let mut numbers = ports.numbers.take()?;
        increment::launch(cx.stream()?, &mut numbers)?;
        ports.incremented.send(numbers).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct CollectPorts {
    #[input]
    numbers: Input<Envelope<u32>>,
}

#[derive(Clone, Default)]
struct Collect(Arc<Mutex<Vec<u32>>>);

impl Operator for Collect {
    type Ports = CollectPorts;

    async fn compute(&mut self, ports: &mut CollectPorts, _cx: &mut Cx) -> Result<()> {
        let numbers = ports.numbers.take()?;
        let numbers = numbers.read().await?;
        self.0.lock().unwrap().extend(numbers);
        Ok(())
    }
}

/// Runs a source, three incrementing operators on two devices and a sink. Returns the outcome, the numbers and the log.
async fn chain(seed: u64, faults: Faults) -> (Result<Report>, Vec<u32>, Vec<String>) {
    let simulation = Simulation::new(seed);
    let collect = Collect::default();
    let collected = collect.0.clone();
    let outcome = simulation
        .run(async {
            let first = Device::simulated(&simulation, Emulated::new().faults(faults)).race_checked();
            let second = Device::simulated(&simulation, Emulated::new()).race_checked();
            let mut flow = Flow::new("chain");
            let source = flow.add("source", Numbers(1..=8));
            let a = flow.add("a", Increment).on(&first);
            let b = flow.add("b", Increment).on(&second);
            let c = flow.add("c", Increment).on(&second);
            let sink = flow.add("sink", collect);
            flow.connect(source.numbers, a.numbers);
            flow.connect(a.incremented, b.numbers);
            flow.connect_with(b.incremented, c.numbers, HubOptions::bounded(2));
            flow.connect(c.incremented, sink.numbers);
            flow.run().await
        })
        .await;
    let collected = collected.lock().unwrap().clone();
    (outcome, collected, simulation.log())
}

#[tokio::test(start_paused = true)]
async fn a_seed_decides_the_events_and_not_the_numbers() {
    let mut logs = std::collections::HashSet::new();
    for seed in 0..40 {
        let (outcome, numbers, log) = chain(seed, Faults::new()).await;
        outcome.unwrap();
        assert_eq!(numbers, (4..=11).collect::<Vec<_>>(), "seed {seed}");
        let (_, again, log_again) = chain(seed, Faults::new()).await;
        assert_eq!(numbers, again);
        assert_eq!(log, log_again, "seed {seed}");
        logs.insert(log);
    }
    assert!(logs.len() > 30, "{} different orders of 40", logs.len());
}

#[tokio::test(start_paused = true)]
async fn a_planned_trap_ends_the_flow_the_same_way_every_time() {
    for seed in 0..20 {
        let faults = || Faults::new().trap_kernel("increment", 3);
        let (outcome, numbers, log) = chain(seed, faults()).await;
        let error = outcome.unwrap_err();
        assert!(error.is_device_lost(), "seed {seed}: {error}");
        assert!(error.to_string().contains("`a`"), "seed {seed}: {error}");
        assert!(numbers.len() <= 2, "seed {seed}: {numbers:?}");
        let (again, _, log_again) = chain(seed, faults()).await;
        assert_eq!(error.to_string(), again.unwrap_err().to_string());
        assert_eq!(log, log_again, "seed {seed}");
    }
}

/// The destructors of work that a lost device drops are users' code: they run in the order in which its streams were created.
#[tokio::test(start_paused = true)]
async fn a_lost_device_drops_its_pending_work_in_the_same_order_every_time() {
    struct Dropped(usize, Arc<Mutex<Vec<usize>>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.1.lock().unwrap().push(self.0);
        }
    }
    // The ids of streams differ from run to run.
    for run in 0..8 {
        let simulation = Simulation::new(1);
        let dropped = Arc::new(Mutex::new(Vec::new()));
        simulation
            .run(async {
                let faults = Faults::new().fail_copy(1);
                let device = Device::simulated(&simulation, Emulated::new().faults(faults)).race_checked();
                let [first, waiting @ ..] = std::array::from_fn::<_, 7, _>(|_| Stream::new(&device).unwrap());
                let from = Buffer::from_slice(&first, &[7_u32; 16]).unwrap();
                for (n, stream) in waiting.iter().enumerate() {
                    stream.wait_for(&first).unwrap();
                    let pending = Dropped(n, dropped.clone());
                    stream.host_function(move || _ = &pending).unwrap();
                }
                assert!(first.completed().await.unwrap_err().is_device_lost());
                drop(from);
            })
            .await;
        assert_eq!(*dropped.lock().unwrap(), [0, 1, 2, 3, 4, 5], "run {run}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_callback_is_found_by_a_tick() {
    for seed in 0..10 {
        let start = tokio::time::Instant::now();
        let simulation = Simulation::new(seed);
        let outcome = simulation
            .run(async {
                let faults = Faults::new().lose_host_function(1);
                let device = Device::simulated(&simulation, Emulated::new().faults(faults)).race_checked();
                let stream = Stream::new(&device)?;
                let mut buffer = Buffer::<u32>::new(&device, 16)?;
                stream.fill(&mut buffer, 7)?;
                stream.completed().await
            })
            .await;
        outcome.unwrap();
        assert!(start.elapsed() < std::time::Duration::from_secs(1), "seed {seed}: {:?}", start.elapsed());
    }
}

/// Reused memory needs no allocation on the device, only a fill. The error of that fill marks the device as lost.
#[tokio::test(start_paused = true)]
async fn a_fault_first_noticed_by_an_allocation_loses_the_device() {
    let simulation = Simulation::new(1);
    simulation
        .run(async {
            let config = Emulated::new().faults(Faults::new().fail_copy(1));
            let device = Device::simulated(&simulation, config).race_checked();
            let stream = Stream::new(&device).unwrap();
            let [mut there, idle] = [(); 2].map(|()| Buffer::<u32>::new(&device, 16).unwrap());
            drop(idle);
            let from = Buffer::<u32>::pinned(&device, 16).unwrap();
            stream.copy(&from, &mut there).unwrap();
            // The copy fails, but no call queries the device.
            while !simulation.log().iter().any(|step| step.contains("copy")) {
                tokio::task::yield_now().await;
            }
            assert!(device.lost().is_none());
            let error = Buffer::<u32>::new(&device, 16).unwrap_err();
            assert!(error.is_device_lost(), "{error}");
            assert_eq!(device.lost().map(|lost| lost.to_string()), Some(error.to_string()));
        })
        .await;
}

/// A second run would take the wakeups of the first.
#[tokio::test(start_paused = true)]
async fn a_simulation_that_is_running_panics_when_it_is_run_again() {
    let simulation = Simulation::new(1);
    let mut first = pin!(simulation.run(async {
        sleep(Duration::from_secs(1)).await;
        "the first"
    }));
    assert!(poll!(&mut first).is_pending());
    for _ in 0..2 {
        assert!(AssertUnwindSafe(simulation.run(async { "another" })).catch_unwind().await.is_err());
    }
    assert_eq!(first.await, "the first");
    // A run ends when it is dropped or panics.
    assert!(pin!(simulation.run(pending::<()>())).now_or_never().is_none());
    assert!(AssertUnwindSafe(simulation.run(async { panic!("on purpose") })).catch_unwind().await.is_err());
    assert_eq!(simulation.run(async { "the last" }).await, "the last");
}

struct OnDrop(Option<Box<dyn FnOnce()>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|call| call());
    }
}

thread_local!(static AT_THREAD_EXIT: RefCell<OnDrop> = const { RefCell::new(OnDrop(None)) });

/// tokio's clock does not exist there any more. A panic in such a destructor would abort the process.
#[test]
fn the_destructor_of_a_thread_local_may_wait_for_a_timed_simulated_stream() {
    let (ended, end) = std::sync::mpsc::channel();
    let body = move || {
        // This is initialised before tokio's thread-local, so tokio's destructor runs first.
        AT_THREAD_EXIT.with_borrow_mut(|_| ());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let simulation = Simulation::new(1);
        let stream = Stream::new(&Device::simulated(&simulation, Emulated::new())).unwrap();
        let timer = runtime.block_on(simulation.run(async {
            let timer = Timer::start(&stream).unwrap();
            sleep(Duration::from_secs(1)).await;
            stream.completed().await.unwrap();
            timer
        }));
        let waits = move || {
            assert!(tokio::runtime::Handle::try_current().unwrap_err().is_thread_local_destroyed());
            let span = timer.stop().unwrap();
            stream.synchronize_blocking().unwrap();
            ended.send((span, simulation)).unwrap();
        };
        AT_THREAD_EXIT.with_borrow_mut(|last| last.0 = Some(Box::new(waits)));
    };
    thread::spawn(body).join().unwrap();
    let (span, _simulation) = end.recv().unwrap();
    // Without a clock, the last known time is the timer's end.
    span.now_or_never().expect("the work is done").unwrap();
}

/// The waker of a simulation, called within a call that enqueues work: it records the event behind other work.
struct RecordsOnWake(Arc<Event>, Stream);

impl Wake for RecordsOnWake {
    fn wake(self: Arc<Self>) {
        self.1.host_function(|| ()).unwrap();
        self.0.record(&self.1).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_outer_record_of_an_event_does_not_overwrite_a_nested_one() {
    for event in [Event::timed(), Event::new()] {
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let event = Arc::new(event);
        let mut run = pin!(simulation.run(pending::<()>()));
        let waker = Waker::from(Arc::new(RecordsOnWake(event.clone(), stream.clone())));
        assert!(run.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        event.record(&stream).unwrap();
        let last = format!("{:?}", stream.ticket());
        assert!(format!("{event:?}").contains(&last), "{event:?} is not recorded at {last}");
    }
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call on another thread, which waits only for `a`, runs `a`; `b` waits for `a`.
#[test]
fn a_call_on_another_thread_wakes_the_loop_for_a_runnable_stream() {
    for faults in [Faults::new(), Faults::new().trap_kernel("increment", 1)] {
        let simulation = Simulation::new(1);
        let [first, second] = [faults, Faults::new()]
            .map(|faults| Device::simulated(&simulation, Emulated::new().faults(faults)).race_checked());
        let (a, b) = (Stream::new(&first).unwrap(), Stream::new(&second).unwrap());
        let mut numbers = Buffer::<u32>::new(&first, 4).unwrap();
        let (started, starts) = mpsc::channel();
        let (hold, held) = mpsc::channel::<()>();
        let (done, waits) = futures::channel::oneshot::channel();
        a.host_function(move || {
            started.send(()).unwrap();
            _ = held.recv();
        })
        .unwrap();
        increment::launch(&a, &mut numbers).unwrap();
        b.wait_for(&a).unwrap();
        b.host_function(move || _ = done.send(())).unwrap();
        let other = thread::spawn(move || a.synchronize_blocking());
        starts.recv().unwrap();
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut run = pin!(simulation.run(waits));
        assert!(run.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(count.0.load(Ordering::Relaxed), 0, "the loop sleeps");
        drop(hold);
        _ = other.join().unwrap();
        assert!(count.0.load(Ordering::Relaxed) > 0, "a stream is runnable, but the loop was not woken");
        assert_eq!(run.poll(&mut Context::from_waker(&waker)), Poll::Ready(Ok(())));
    }
}

/// The stream's callback is lost. Without timers, the simulation itself provides the tick that polls the stream.
#[test]
fn a_simulation_ticks_on_an_executor_without_timers() {
    let faults = Faults::new().lose_host_function(1).lose_host_function(2);
    let simulation = Simulation::new(1);
    let waits = async || {
        let device = Device::simulated(&simulation, Emulated::new().faults(faults.clone())).race_checked();
        let stream = Stream::new(&device)?;
        let mut buffer = Buffer::<u32>::new(&device, 16)?;
        stream.fill(&mut buffer, 7)?;
        stream.completed().await
    };
    // A dropped wait leaves its tick to the next run, which uses another clock.
    let paused = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    paused().block_on(simulation.run(async {
        sleep(Duration::from_secs(3600)).await;
        assert!(poll!(pin!(waits())).is_pending());
    }));
    futures::executor::block_on(simulation.run(waits())).unwrap();
    paused().block_on(simulation.run(waits())).unwrap();
}

/// tokio's clock, the usual source of ticks, does not exist there any more.
#[test]
fn the_destructor_of_a_thread_local_may_run_a_simulation_that_waits() {
    let (ended, end) = mpsc::channel();
    let body = move || {
        AT_THREAD_EXIT.with_borrow_mut(|_| ());
        // Initialises tokio's thread-local.
        drop(tokio::runtime::Builder::new_current_thread().build().unwrap().enter());
        let waits = move || {
            assert!(tokio::runtime::Handle::try_current().unwrap_err().is_thread_local_destroyed());
            let simulation = Simulation::new(1);
            // The second host function is the wait's.
            let faults = Faults::new().lose_host_function(2);
            let stream = Stream::new(&Device::simulated(&simulation, Emulated::new().faults(faults))).unwrap();
            stream.host_function(|| ()).unwrap();
            let mut run = pin!(simulation.run(stream.completed()));
            let done = loop {
                match run.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(done) => break done,
                    Poll::Pending => thread::yield_now(),
                }
            };
            ended.send(done).unwrap();
        };
        AT_THREAD_EXIT.with_borrow_mut(|last| last.0 = Some(Box::new(waits)));
    };
    thread::spawn(body).join().unwrap();
    end.recv().unwrap().unwrap();
}

#[test]
fn two_threads_may_wait_for_the_same_simulated_work() {
    let simulation = Simulation::new(1);
    let device = Device::simulated(&simulation, Emulated::new());
    let stream = Stream::new(&device).unwrap();
    let (started, starts) = mpsc::channel();
    let (hold, held) = mpsc::channel::<()>();
    stream
        .host_function(move || {
            started.send(()).unwrap();
            _ = held.recv();
        })
        .unwrap();
    thread::scope(|scope| {
        let one = scope.spawn(|| stream.synchronize_blocking());
        starts.recv().unwrap();
        let (calls, called) = mpsc::channel();
        let stream = &stream;
        let two = scope.spawn(move || {
            calls.send(()).unwrap();
            stream.synchronize_blocking()
        });
        called.recv().unwrap();
        // Time for the second call to find the work in progress. The test is valid with any duration.
        (0..10_000).for_each(|_| thread::yield_now());
        drop(hold);
        one.join().unwrap().unwrap();
        two.join().unwrap().unwrap();
    });
}

/// A capture does not query the device. A wait for memory uses what is already known to be complete, and does not loop.
#[tokio::test(start_paused = true)]
async fn a_wait_for_memory_in_a_capture_finds_completed_memory() {
    let simulation = Simulation::new(1);
    let free = async |device: &Device| {
        let all = Allocator::unbounded(device).maximum(64);
        let stream = Stream::new(device).unwrap();
        let mut data = all.alloc::<u32>(&stream, 8).unwrap();
        stream.fill(&mut data, 0).unwrap();
        drop(data);
        // The work is complete, but the heap has not swept the memory yet.
        stream.completed().await.unwrap();
        all
    };
    simulation
        .run(async {
            let device = Device::simulated(&simulation, Emulated::new());
            let all = free(&device).await;
            let (_graph, found) = Graph::capture(&device, |capture| {
                Ok(all.alloc_when_free::<u32>(capture.stream(), 16).now_or_never().transpose()?.is_some())
            })
            .unwrap();
            assert!(found);
            let all = free(&device).await;
            let mut condition = wakeline::condition::memory(&all, 64);
            let (_graph, status) =
                Graph::capture(&device, |_| Ok(condition.poll_status(&mut Context::from_waker(Waker::noop()))))
                    .unwrap();
            assert_eq!(status, Status::Ready);
        })
        .await;
}
