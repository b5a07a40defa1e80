//! Emulated and simulated devices, their streams and wrapped memory, whose users hand them wakers, functions and owners that
//! panic.

#![forbid(unsafe_code)]

#[path = "common/alone.rs"]
mod alone;

use std::{
    future::pending,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use alone::{in_a_process, within_bound};
use wakeline::{
    Buffer, Stream,
    device::{Device, Emulated, Faults, Simulation},
    graph::{Graph, GraphEvent},
    hub::ChunkHub,
    prelude::*,
    stream::Event,
};

type Deed = Box<dyn Fn() + Send + Sync>;

/// A waker that does one thing when it is woken, and another when it is dropped.
#[derive(Default)]
struct Hostile {
    woken: Option<Deed>,
    dropped: Option<Deed>,
}

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        self.woken.iter().for_each(|deed| deed());
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.dropped.iter().for_each(|deed| deed());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Polls a simulation until it has nothing to do: from then on a change wakes this waker.
fn wait_with<'s>(simulation: &'s Simulation, waker: &Waker) -> Pin<Box<dyn Future<Output = ()> + 's>> {
    let mut run: Pin<Box<dyn Future<Output = ()> + 's>> = Box::pin(simulation.run(pending::<()>()));
    for _ in 0..3 {
        assert!(run.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    }
    run
}

/// Work that a simulation's waker is woken by, and panics, is work all the same: the stream counts it and the memory is in
/// use until it is done.
#[test]
fn a_copy_counts_though_the_waker_of_its_simulation_panics() {
    within_bound(|| {
        let runtime = runtime();
        let _in = runtime.enter();
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let from = Buffer::from_slice(&stream, &[7_u32; 8]).unwrap();
        stream.synchronize_blocking().unwrap();
        let mut here = Buffer::<u32>::pinned(&device, 8).unwrap();
        here.as_mut_slice().unwrap().fill(1);

        let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(|| panic!("a waker"))), dropped: None }));
        let _run = wait_with(&simulation, &waker);
        let before = stream.ticket().number();
        let copied = catch_unwind(AssertUnwindSafe(|| stream.copy(&from, &mut here)));
        assert!(copied.is_ok_and(|copied| copied.is_ok()), "a panic of a waker ends there");
        assert_eq!(stream.ticket().number(), before + 1);
        assert!(here.as_slice().is_err(), "the copy is still to write it");
        stream.synchronize_blocking().unwrap();
        assert_eq!(here.as_slice().unwrap(), [7; 8]);
    });
}

/// Every call that enqueues may wake a simulation: the waker runs with no lock held, so it may enqueue too.
#[test]
fn a_waker_of_a_simulation_may_enqueue() {
    within_bound(|| {
        let runtime = runtime();
        let _in = runtime.enter();
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let called = Arc::new(AtomicUsize::new(0));
        let (of_waker, calls) = (stream.clone(), called.clone());
        let enqueue = move || {
            of_waker.host_function(|| ()).unwrap();
            calls.fetch_add(1, Ordering::SeqCst);
        };
        let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(enqueue)), dropped: None }));
        let mut buffer = Buffer::<u32>::new(&device, 1).unwrap();
        let mut acts: Vec<Box<dyn FnMut()>> = vec![
            Box::new(|| stream.fill(&mut buffer, 1).unwrap()),
            Box::new(|| stream.host_function(|| ()).unwrap()),
            Box::new(|| {
                other.host_function(|| ()).unwrap();
                stream.wait_for(&other).unwrap();
            }),
            Box::new(|| {
                stream.host_function(|| ()).unwrap();
                let _ = pin!(stream.completed()).poll(&mut Context::from_waker(Waker::noop()));
            }),
        ];
        for (at, act) in acts.iter_mut().enumerate() {
            let before = called.load(Ordering::SeqCst);
            let run = wait_with(&simulation, &waker);
            act();
            drop(run);
            assert!(called.load(Ordering::SeqCst) > before, "act {at} has woken it");
            stream.synchronize_blocking().unwrap();
            other.synchronize_blocking().unwrap();
        }
    });
}

/// The waker that a simulation, or the join of one of its tasks, had before is dropped with no lock held; a panic of its
/// destructor ends there.
#[test]
fn a_waker_that_a_simulation_replaces_may_call_it_as_it_is_dropped() {
    within_bound(|| {
        let runtime = runtime();
        let _in = runtime.enter();
        let simulation = Arc::new(Simulation::new(1));
        let task = Arc::new(Mutex::new(simulation.spawn("task", pending::<()>())));
        let dropped = Arc::new(AtomicUsize::new(0));
        let hostile = || {
            let (simulation, dropped) = (simulation.clone(), dropped.clone());
            let deed = move || {
                simulation.steps();
                drop(simulation.spawn("another", async {}));
                dropped.fetch_add(1, Ordering::SeqCst);
                panic!("a waker's destructor");
            };
            Waker::from(Arc::new(Hostile { woken: None, dropped: Some(Box::new(deed)) }))
        };
        let mut run = Box::pin(simulation.run(pending::<()>()));
        let waker = hostile();
        assert!(run.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // Two of it are left: the simulation's and this one.
        drop(waker);
        assert!(run.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(dropped.load(Ordering::SeqCst), 1);

        let waker = hostile();
        let mut join = lock(&task);
        assert!(Pin::new(&mut *join).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        assert!(Pin::new(&mut *join).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(dropped.load(Ordering::SeqCst), 2);
    });
}

/// A task whose destructors panic ends alone: the simulation and its other tasks go on.
#[test]
fn a_task_that_panics_as_it_is_dropped_ends_alone() {
    within_bound(|| {
        let runtime = runtime();
        let simulation = Simulation::new(1);
        let (dropped, bomb) = bombs();
        let (first, second) = (bomb(), bomb());
        let aborted = simulation.spawn("aborted", async move {
            let _first = first;
            pending::<()>().await;
        });
        let ends = simulation.spawn("ends", {
            let mut second = Some(second);
            std::future::poll_fn(move |_| {
                let _ = &mut second;
                std::task::Poll::Ready(())
            })
        });
        aborted.abort();
        runtime.block_on(simulation.run(async {
            assert!(aborted.await.is_err());
            let _ = ends.await;
        }));
        assert_eq!(dropped.load(Ordering::SeqCst), 2);
        assert!(simulation.unfinished().is_empty());
    });
}

#[kernel]
fn nap(data: &mut [u32]) {
    std::thread::sleep(Duration::from_millis(8));
    data[0] += 1;
}

/// A task that waits for a device with threads within a simulation leaves that device its lookout: whoever waits there later
/// is woken, and memory that was parked is found again.
#[test]
fn a_simulation_that_ends_takes_no_other_device_its_lookout() {
    within_bound(|| {
        let runtime = runtime();
        let device = Device::emulated(Emulated::new().workers(2));
        let stream = Stream::new(&device).unwrap();
        let mut data = Buffer::<u32>::new(&device, 1).unwrap();
        let simulation = Simulation::new(1);
        runtime.block_on(simulation.run(async {
            nap::launch(&stream, &mut data).unwrap();
            stream.completed().await.unwrap();
            nap::launch(&stream, &mut data).unwrap();
            // Still waited for as the simulation stands still.
            assert!(futures::poll!(pin!(stream.completed())).is_pending());
        }));
        drop(simulation);
        runtime.block_on(async {
            for _ in 0..20 {
                nap::launch(&stream, &mut data).unwrap();
                stream.completed().await.unwrap();
            }
        });
        drop(data);
        while device.memory_stats().waiting > 0 {
            std::thread::yield_now();
        }
    });
}

/// Who was polled within a simulation and waits outside learns that its device is lost with it.
#[test]
fn a_simulation_that_ends_wakes_those_who_wait_for_its_devices() {
    within_bound(|| {
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let runtime = runtime();
        let mut wait = Box::pin({
            let stream = stream.clone();
            async move { stream.completed().await }
        });
        stream.host_function(|| ()).unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let count = woken.clone();
        let deed = move || _ = count.fetch_add(1, Ordering::SeqCst);
        let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(deed)), dropped: None }));
        runtime.block_on(simulation.run(async {
            assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }));
        let before = woken.load(Ordering::SeqCst);
        drop(simulation);
        assert!(woken.load(Ordering::SeqCst) > before, "it is woken");
        assert!(runtime.block_on(wait).unwrap_err().is_device_lost());
    });
}

/// A subscriber of this process that panics at each event.
fn subscribe_with_panics() {
    struct Writer;
    impl std::io::Write for Writer {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            panic!("a subscriber");
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    tracing_subscriber::fmt().with_writer(|| Writer).init();
}

/// Panics as it is dropped, which it counts.
struct Bomb(Arc<AtomicUsize>);

impl Drop for Bomb {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("a destructor");
    }
}

fn bombs() -> (Arc<AtomicUsize>, impl Fn() -> Bomb) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = dropped.clone();
    (dropped, move || Bomb(count.clone()))
}

#[kernel]
fn traps_alone(_number: u32) {
    panic!("a trap");
}

#[kernel]
fn traps(data: &mut [u32]) {
    data[0] = 1;
    panic!("a trap");
}

/// Functions behind a fault are dropped one by one, whoever waits learns of the fault, and the worker lives.
#[test]
fn functions_behind_a_fault_may_panic_as_they_are_dropped() {
    in_a_process("functions_behind_a_fault_may_panic_as_they_are_dropped", || {
        for workers in [1, 2] {
            let device = Device::emulated(Emulated::new().workers(workers));
            let stream = Stream::new(&device).unwrap();
            let mut data = Buffer::<u32>::new(&device, 1).unwrap();
            let (go, held) = mpsc::channel::<()>();
            stream.host_function(move || _ = held.recv()).unwrap();
            traps::launch(&stream, &mut data).unwrap();
            let (dropped, bomb) = bombs();
            for _ in 0..3 {
                let bomb = bomb();
                stream.host_function(move || _ = &bomb).unwrap();
            }
            drop(go);
            assert!(stream.synchronize_blocking().unwrap_err().is_device_lost());
            assert!(runtime().block_on(stream.completed()).unwrap_err().is_device_lost());
            drop((stream, data, device));
            while dropped.load(Ordering::SeqCst) < 3 {
                std::thread::yield_now();
            }
        }
    });
}

/// Who waits for the device has learnt of its fault when the functions behind it are dropped: a destructor of one may wait for
/// that.
#[test]
fn a_fault_is_known_when_the_functions_behind_it_are_dropped() {
    in_a_process("a_fault_is_known_when_the_functions_behind_it_are_dropped", || {
        struct Waits(mpsc::Receiver<()>);
        impl Drop for Waits {
            fn drop(&mut self) {
                let _ = self.0.recv();
            }
        }
        let device = Device::emulated(Emulated::new().workers(1));
        let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let mut data = Buffer::<u32>::new(&device, 1).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        traps::launch(&stream, &mut data).unwrap();
        let (learnt, wait) = mpsc::channel();
        let waits = Waits(wait);
        stream.host_function(move || _ = &waits).unwrap();
        // It listens before the fault.
        let listener = std::thread::spawn(move || other.wait_for(&stream).and_then(|()| other.synchronize_blocking()));
        drop(go);
        assert!(listener.join().unwrap().unwrap_err().is_device_lost());
        learnt.send(()).unwrap();
    });
}

/// A device lets go of what graphs, and host functions that it has lost, have captured, one by one.
#[test]
fn functions_that_a_device_keeps_may_panic_as_they_are_dropped() {
    in_a_process("functions_that_a_device_keeps_may_panic_as_they_are_dropped", || {
        let (dropped, bomb) = bombs();
        let device =
            Device::emulated(Emulated::new().faults(Faults::new().lose_host_function(1).lose_host_function(2)));
        let stream = Stream::new(&device).unwrap();
        for _ in 0..2 {
            let bomb = bomb();
            stream.host_function(move || _ = &bomb).unwrap();
        }
        stream.synchronize_blocking().unwrap();
        let mut graph = Graph::builder(&device).unwrap();
        for _ in 0..2 {
            let bomb = bomb();
            graph.host(&[], move || _ = &bomb).unwrap();
        }
        let graph = graph.build().unwrap();
        drop(graph.instantiate().unwrap());
        drop(graph);
        assert_eq!(dropped.load(Ordering::SeqCst), 2, "of the graph");
        let builder = {
            let mut builder = Graph::builder(&device).unwrap();
            let bomb = bomb();
            builder.host(&[], move || _ = &bomb).unwrap();
            builder
        };
        drop(builder);
        drop((stream, device));
        // A worker of the device drops what was lost.
        while dropped.load(Ordering::SeqCst) < 5 {
            std::thread::yield_now();
        }
    });
}

/// A worker survives a host function that panics, a destructor of what it has captured that does, and a subscriber that panics
/// as it hears of that.
#[test]
fn a_worker_survives_a_subscriber_that_panics() {
    in_a_process("a_worker_survives_a_subscriber_that_panics", || {
        subscribe_with_panics();
        let device = Device::emulated(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        stream.host_function(|| panic!("a host function")).unwrap();
        let (dropped, bomb) = bombs();
        let bomb = bomb();
        stream.host_function(move || _ = &bomb).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
        // Those who wait learn of a loss, whatever the subscriber does.
        let mut data = Buffer::<u32>::new(&device, 1).unwrap();
        traps::launch(&stream, &mut data).unwrap();
        assert!(runtime().block_on(stream.completed()).unwrap_err().is_device_lost());
    });
}

/// A panic whose payload panics as it is dropped, with a subscriber that panics: two panics at a time would be an abort.
#[test]
fn a_payload_and_a_subscriber_that_panic_do_not_abort() {
    in_a_process("a_payload_and_a_subscriber_that_panic_do_not_abort", || {
        subscribe_with_panics();
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        let (dropped, bomb) = bombs();
        let bomb = bomb();
        stream.host_function(move || std::panic::panic_any(bomb)).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    });
}

/// The owner of a device drops it under a lock for which a destructor waits on a worker of the device.
#[test]
fn a_device_is_dropped_while_a_refused_function_is() {
    within_bound(|| {
        struct Waits(mpsc::Sender<()>, mpsc::Receiver<()>);
        impl Drop for Waits {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
                let _ = self.1.recv();
            }
        }
        let device = Device::emulated(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        // Memory would be left to the lost device, and would keep it.
        traps_alone::launch(&stream, 1).unwrap();
        let (began, begins) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let waits = Mutex::new(Waits(began, ends));
        stream.host_function(move || _ = &waits).unwrap();
        drop(go);
        begins.recv().unwrap();
        drop((stream, device));
        drop(end);
    });
}

/// What the kernel of the next test waits for, and how far it is.
static LOOKS: (Mutex<Look>, Condvar) = (Mutex::new(Look { began: false, ends: false, seen: 0 }), Condvar::new());

struct Look {
    began: bool,
    ends: bool,
    seen: u32,
}

#[kernel]
fn looks(data: &mut [u32]) {
    data.fill(1);
    let (look, change) = &LOOKS;
    lock(look).began = true;
    change.notify_all();
    let mut look = change.wait_while(lock(look), |look| !look.ends).unwrap();
    look.seen = std::hint::black_box(&*data)[0];
    drop(look);
    change.notify_all();
}

/// A fault ends a device, and not what runs there at that time: what another device does after it still comes after it.
#[test]
fn a_kernel_that_runs_on_a_lost_device_has_its_memory_to_itself() {
    within_bound(|| {
        let (a, b) = (Device::emulated(Emulated::new().workers(2)), Device::emulated(Emulated::new().workers(1)));
        let [runs, parked, faults] = [&a; 3].map(|a| Stream::new(a).unwrap());
        let [waits, later] = [&b; 2].map(|b| Stream::new(b).unwrap());
        let mut data = Buffer::<u32>::new(&a, 16).unwrap();
        let from = Buffer::from_slice(&waits, &[9_u32; 16]).unwrap();
        looks::launch(&runs, &mut data).unwrap();
        // It comes after the kernel, and the other device after this alone.
        parked.fill(&mut data, 5).unwrap();
        waits.copy(&from, &mut data).unwrap();
        let (look, change) = &LOOKS;
        drop(change.wait_while(lock(look), |look| !look.began).unwrap());
        traps_alone::launch(&faults, 1).unwrap();
        assert!(runtime().block_on(faults.completed()).unwrap_err().is_device_lost());
        // By the end of this, the one worker of `b` has done all that it may do.
        later.host_function(|| ()).unwrap();
        later.synchronize_blocking().unwrap();
        lock(look).ends = true;
        change.notify_all();
        let seen = change.wait_while(lock(look), |look| look.seen == 0).unwrap().seen;
        assert_eq!(seen, 1, "it is written while the kernel has a `&mut` slice of it");
        // The wait ends with the kernel; what came of it is worth nothing.
        assert!(runtime().block_on(waits.completed()).unwrap_err().is_device_lost());
    });
}

/// A subscriber that hears of a lost device, from a launch that finds out, and waits until another thread has launched a graph
/// on another device.
#[test]
fn a_subscriber_waits_for_another_threads_launch() {
    in_a_process("a_subscriber_waits_for_another_threads_launch", || {
        static LAUNCH: Mutex<Option<mpsc::Sender<()>>> = Mutex::new(None);
        static LAUNCHED: Mutex<Option<mpsc::Receiver<()>>> = Mutex::new(None);
        struct Writer;
        impl std::io::Write for Writer {
            fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
                if let Some(launch) = lock(&LAUNCH).take() {
                    launch.send(()).unwrap();
                    lock(&LAUNCHED).take().unwrap().recv().unwrap();
                }
                Ok(text.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        tracing_subscriber::fmt().with_writer(|| Writer).init();
        let graph = |device: &Device| {
            let stream = Stream::new(device).unwrap();
            let mut data = Buffer::<u32>::new(device, 4).unwrap();
            let (graph, ()) = Graph::capture(device, |capture| capture.stream().fill(&mut data, 7)).unwrap();
            (graph.instantiate().unwrap(), stream, data)
        };
        let (lost, other) = (Device::emulated(Emulated::new().workers(1)), Device::emulated(Emulated::new()));
        let (exec, stream, _data) = graph(&lost);
        let (launch, launches) = mpsc::channel();
        let (tell, launched) = mpsc::channel();
        *lock(&LAUNCHED) = Some(launched);
        std::thread::spawn(move || {
            let (exec, stream, _data) = graph(&other);
            launches.recv().unwrap();
            exec.launch(&stream).unwrap();
            tell.send(()).unwrap();
        });
        // The trap is behind a gate, so that the host does not know of it before the launch.
        let (open, gate) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let done = Discards(done);
        stream.host_function(move || _ = gate.recv()).unwrap();
        traps_alone::launch(&stream, 1).unwrap();
        stream.host_function(move || _ = &done).unwrap();
        open.send(()).unwrap();
        is_done.recv().unwrap();
        *lock(&LAUNCH) = Some(launch);
        assert!(exec.launch(&stream).unwrap_err().is_device_lost());
        assert!(lock(&LAUNCH).is_none(), "the subscriber was not called");
    });
}

/// Says that it is dropped.
struct Discards(mpsc::Sender<()>);

impl Drop for Discards {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// A waker that panics as it is woken, and as it is dropped.
#[test]
fn a_waker_that_panics_twice_does_not_abort() {
    in_a_process("a_waker_that_panics_twice_does_not_abort", || {
        let waker = Waker::from(Arc::new(Hostile {
            woken: Some(Box::new(|| panic!("a waker"))),
            dropped: Some(Box::new(|| panic!("a waker's destructor"))),
        }));
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let mut wait = Box::pin(stream.completed());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // What is left is the one that waits.
        drop(waker);
        drop(go);
        runtime().block_on(stream.completed()).unwrap();
        runtime().block_on(wait).unwrap();
    });
}

/// Work that marks recycled memory takes no place in a queue that is bounded: while a stream is held up, another is made.
#[test]
fn memory_that_is_used_again_fills_no_queue() {
    within_bound(|| {
        let device = Device::emulated(Emulated::new().workers(2).queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        // In use on the stream, and so bound to it.
        let mut used = stream.alloc::<u32>(16).unwrap();
        stream.fill(&mut used, 1).unwrap();
        drop(used);
        (0..40).for_each(|_| drop(stream.alloc::<u32>(16).unwrap()));
        let (tell, begins) = mpsc::channel();
        let fills = std::thread::spawn({
            let stream = stream.clone();
            move || {
                let mut data = stream.alloc::<u32>(16).unwrap();
                tell.send(()).unwrap();
                (0..40).for_each(|_| stream.fill(&mut data, 1).unwrap());
            }
        });
        begins.recv().unwrap();
        // Long enough for that one to wait for room.
        (0..2000).for_each(|_| drop(Stream::new(&device).unwrap()));
        drop(go);
        fills.join().unwrap();
        stream.synchronize_blocking().unwrap();
    });
}

static LOCAL_GOES: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

#[kernel]
fn leaves_a_local(_number: u32) {
    struct Waits;
    impl Drop for Waits {
        fn drop(&mut self) {
            drop(LOCAL_GOES.1.wait_while(lock(&LOCAL_GOES.0), |goes| !*goes).unwrap());
        }
    }
    thread_local!(static LOCAL: std::cell::RefCell<Option<Waits>> = const { std::cell::RefCell::new(None) });
    LOCAL.set(Some(Waits));
}

/// A worker that ends has thread-locals of the user's, which may take their time to go: a drop of its device does not wait.
#[test]
fn the_end_of_a_worker_is_not_waited_for() {
    within_bound(|| {
        let device = Device::emulated(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        leaves_a_local::launch(&stream, 1).unwrap();
        stream.synchronize_blocking().unwrap();
        drop(stream);
        drop(device);
        *lock(&LOCAL_GOES.0) = true;
        LOCAL_GOES.1.notify_all();
    });
}

/// The waker of who waits for wrapped memory panics in the destructor of the buffer, which may run as another panic unwinds.
#[test]
fn a_waker_that_panics_does_not_unwind_out_of_a_buffers_drop() {
    in_a_process("a_waker_that_panics_does_not_unwind_out_of_a_buffers_drop", || {
        let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(|| panic!("a waker"))), dropped: None }));
        let (buffer, wrapped) = Buffer::<u32>::wrap(vec![1, 2, 3]).unwrap();
        let mut back = Box::pin(wrapped.into_inner());
        assert!(back.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            let _buffer = buffer;
            panic!("another");
        }));
        assert!(unwound.is_err());
        assert_eq!(runtime().block_on(back).unwrap(), [1, 2, 3]);
    });
}

/// An owner that is not wanted back is dropped with its buffer, or with the handle that was to give it back; a panic of its
/// destructor ends there where it is the buffer's.
#[test]
fn an_owner_that_panics_does_not_unwind_out_of_a_buffers_drop() {
    in_a_process("an_owner_that_panics_does_not_unwind_out_of_a_buffers_drop", || {
        struct Owner(Vec<u32>, #[allow(dead_code, reason = "dropped")] Bomb);
        impl AsMut<[u32]> for Owner {
            fn as_mut(&mut self) -> &mut [u32] {
                &mut self.0
            }
        }
        let (dropped, bomb) = bombs();
        let (buffer, wrapped) = Buffer::<u32>::wrap(Owner(vec![1, 2, 3], bomb())).unwrap();
        drop(wrapped);
        let unwound = catch_unwind(AssertUnwindSafe(move || {
            let _buffer = buffer;
            panic!("another");
        }));
        assert!(unwound.is_err());
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    });
}

/// A device that ends with its last handle, which it counts.
fn counted(alive: &Arc<AtomicUsize>) -> (Device, Stream) {
    struct Alive(Arc<AtomicUsize>);
    impl Drop for Alive {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    alive.fetch_add(1, Ordering::SeqCst);
    let alive = Alive(alive.clone());
    // What it loses lives as long as the device.
    let device = Device::emulated(Emulated::new().workers(1).faults(Faults::new().lose_host_function(1)));
    let stream = Stream::new(&device).unwrap();
    stream.host_function(move || _ = &alive).unwrap();
    (device, stream)
}

/// A stream keeps another device no longer than until the work of that which it came after is known to be sound.
#[test]
fn a_stream_lets_go_of_the_devices_that_it_came_after() {
    within_bound(|| {
        let runtime = runtime();
        let home = Device::emulated(Emulated::new());
        let (stream, second) = (Stream::new(&home).unwrap(), Stream::new(&home).unwrap());
        let mut to = Buffer::<u32>::new(&home, 16).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        for round in 0..40 {
            let (_other, its) = counted(&alive);
            let from = Buffer::from_slice(&its, &[round; 16]).unwrap();
            if round % 2 == 0 {
                runtime.block_on(its.completed()).unwrap();
            }
            stream.copy(&from, &mut to).unwrap();
            second.wait_for(&stream).unwrap();
            runtime.block_on(async {
                stream.completed().await.unwrap();
                second.completed().await.unwrap();
            });
        }
        while alive.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    });
}

/// A stream that is never waited for looks by itself, as it comes after more and more devices.
#[test]
fn a_stream_that_is_never_waited_for_lets_go_of_devices_too() {
    within_bound(|| {
        let home = Device::emulated(Emulated::new());
        let stream = Stream::new(&home).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut made = 0;
        while made < 60 || alive.load(Ordering::SeqCst) > 20 {
            let (_other, its) = counted(&alive);
            its.host_function(|| ()).unwrap();
            stream.wait_for(&its).unwrap();
            stream.host_function(|| ()).unwrap();
            made += 1;
        }
    });
}

/// A device that is only kept by those who came after it is kept until they know whether it has faulted.
#[test]
fn a_fault_of_a_device_without_handles_reaches_those_who_came_after() {
    within_bound(|| {
        let runtime = runtime();
        let home = Device::emulated(Emulated::new());
        let (first, second) = (Stream::new(&home).unwrap(), Stream::new(&home).unwrap());
        let go = {
            let other = Device::emulated(Emulated::new().workers(1));
            let its = Stream::new(&other).unwrap();
            let mut data = Buffer::<u32>::new(&other, 1).unwrap();
            let (go, held) = mpsc::channel::<()>();
            its.host_function(move || _ = held.recv()).unwrap();
            traps::launch(&its, &mut data).unwrap();
            first.wait_for(&its).unwrap();
            go
        };
        second.wait_for(&first).unwrap();
        drop(go);
        assert!(runtime.block_on(second.completed()).unwrap_err().is_device_lost());
        assert!(runtime.block_on(first.completed()).unwrap_err().is_device_lost());
        assert!(runtime.block_on(first.completed()).unwrap_err().is_device_lost(), "and again");
        assert!(Stream::new(&home).is_ok(), "this device is well");
    });
}

/// A device that will be lost, a healthy one beside it, and a stream of each.
struct Beside {
    lost: Device,
    its: Stream,
    healthy: Device,
    own: Stream,
}

/// Enqueues a kernel that traps into a stream that is held up, lets it go, and returns once the device knows of the trap; the
/// host knows if it has asked.
fn lose(stream: &Stream, held: mpsc::Sender<()>, asks: bool) {
    let mut data = Buffer::<u32>::new(stream.device(), 1).unwrap();
    traps::launch(stream, &mut data).unwrap();
    let (never_called, dropped) = mpsc::channel::<()>();
    stream.host_function(move || _ = never_called.send(())).unwrap();
    drop(held);
    assert!(dropped.recv().is_err(), "what is behind the fault is dropped");
    if asks {
        assert!(stream.synchronize_blocking().unwrap_err().is_device_lost());
    }
}

/// `before` the fault and `after` it, whether or not the host knows of it by then. The healthy device stays healthy; the error
/// of the call names the lost one.
fn stays_healthy<T>(
    name: &str,
    before: impl Fn(&Beside) -> T,
    after: impl Fn(&Beside, T) -> Option<wakeline::Result<()>>,
) {
    for checked in [false, true] {
        for known in [false, true] {
            let device = |name| {
                let device = Device::emulated(Emulated::new().name(name));
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device("faulty"), device("healthy"));
            let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let beside = Beside { lost, its, healthy, own };
            let made = before(&beside);
            lose(&beside.its, held_up(&beside.its), known);
            let place = format!("{name}, known: {known}, checked: {checked}");
            if let Some(done) = after(&beside, made) {
                let error = done.expect_err(&place);
                assert!(error.is_device_lost() && error.to_string().contains("faulty"), "{place}: {error}");
                assert!(!error.to_string().contains("healthy takes no more work"), "{place}: {error}");
            }
            assert!(beside.healthy.lost().is_none(), "{place}: {:?}", beside.healthy.lost());
            let again = Stream::new(&beside.healthy).expect(&place);
            let data = Buffer::from_slice(&again, &[7_u32]).expect(&place);
            let read = runtime().block_on(data.to_vec(&again)).expect(&place);
            assert_eq!(read, [7], "{place}");
        }
    }
}

/// Holds a stream up until the sender is dropped.
fn held_up(stream: &Stream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel();
    stream.host_function(move || _ = held.recv()).unwrap();
    go
}

/// Only the device that has faulted is lost, whatever call of another device's has met the fault.
#[test]
fn a_lost_device_takes_no_other_with_it() {
    within_bound(|| {
        let recorded = |beside: &Beside| {
            let (event, go) = (Event::new(), held_up(&beside.its));
            event.record(&beside.its).unwrap();
            drop(go);
            event
        };
        stays_healthy("an event", recorded, |beside, event| {
            // Known to have passed, it is no longer waited for.
            event.wait(&beside.own).err().map(Err)
        });
        let behind = |beside: &Beside| {
            let (event, go) = (Event::new(), held_up(&beside.its));
            let mut data = Buffer::<u32>::new(&beside.lost, 1).unwrap();
            traps::launch(&beside.its, &mut data).unwrap();
            event.record(&beside.its).unwrap();
            drop((go, data));
            event
        };
        // Its fault has come already.
        for checked in [false, true] {
            let device = || {
                let device = Device::emulated(Emulated::new());
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device(), device());
            let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let beside = Beside { lost, its, healthy, own };
            let event = behind(&beside);
            while beside.its.host_function(|| ()).is_ok() {
                std::thread::yield_now();
            }
            assert!(event.wait(&beside.own).unwrap_err().is_device_lost());
            assert!(beside.healthy.lost().is_none() && Stream::new(&beside.healthy).is_ok());
        }
        let graph_event = |beside: &Beside| {
            let event = GraphEvent::new(&beside.lost).unwrap();
            event.record(&beside.its).unwrap();
            event
        };
        stays_healthy("a graph's event", graph_event, |beside, event| Some(event.wait(&beside.own)));
        let exec = |beside: &Beside| {
            let event = graph_event(beside);
            let (graph, ()) = Graph::capture(&beside.healthy, |capture| event.wait(capture.stream())).unwrap();
            let exec = graph.instantiate().unwrap();
            exec.launch(&beside.own).unwrap();
            exec
        };
        stays_healthy("a graph's launch", exec, |beside, exec| Some(exec.launch(&beside.own).map(drop)));
        stays_healthy("a capture", graph_event, |beside, event| {
            // A fault that the host does not know of yet is met by the launch.
            let captured = Graph::capture(&beside.healthy, |capture| event.wait(capture.stream()));
            captured.err().map(Err)
        });
        let written = |beside: &Beside| {
            let mut from = Buffer::from_slice(&beside.its, &[1_u32]).unwrap();
            beside.its.fill(&mut from, 2).unwrap();
            (from, Buffer::<u32>::new(&beside.healthy, 1).unwrap())
        };
        stays_healthy("a copy from it", written, |beside, (from, mut to)| {
            // Accepted where the write is known to be done; then the fault is found behind the copy.
            let copied = beside.own.copy(&from, &mut to);
            Some(copied.and_then(|()| runtime().block_on(beside.own.completed())))
        });
        stays_healthy("a copy to it", written, |beside, (mut to, from)| Some(beside.its.copy(&from, &mut to)));
    });
}

/// A device whose end drops a function that says so and then waits for the sender to go.
fn waits_at_its_end(device: impl FnOnce(Faults) -> Device) -> (Stream, mpsc::Receiver<()>, mpsc::Sender<()>) {
    struct Waits(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>);
    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.send(());
            let _ = lock(&self.1).recv();
        }
    }
    let (began, begins) = mpsc::channel();
    let (end, ends) = mpsc::channel();
    let waits = Waits(began, Mutex::new(ends));
    let stream = Stream::new(&device(Faults::new().lose_host_function(1))).unwrap();
    stream.host_function(move || _ = &waits).unwrap();
    (stream, begins, end)
}

/// Memory that is bound to a stream keeps it, and so the devices that this has waited for. They end as it is seen to be free:
/// the heap is not locked meanwhile.
#[test]
fn a_device_that_ends_holds_up_no_heap() {
    within_bound(|| {
        let device = Device::emulated(Emulated::new());
        let (its, begins, end) = waits_at_its_end(|faults| Device::emulated(Emulated::new().faults(faults)));
        let go = held_up(&its);
        let stream = Stream::new(&device).unwrap();
        let mut data = stream.alloc::<u8>(4096).unwrap();
        stream.wait_for(&its).unwrap();
        stream.fill(&mut data, 1).unwrap();
        drop((data, stream, its));
        drop(go);
        // The lookout comes by, or the allocation below.
        begins.recv().unwrap();
        drop(Buffer::<u8>::new(&device, 4096).unwrap());
        drop(end);
    });
}

/// The same for what a graph comes after: all graphs of the process take turns.
#[test]
fn a_device_that_ends_holds_up_no_graph() {
    within_bound(|| {
        let [device, another] = [0, 1].map(|_| Device::emulated(Emulated::new()));
        let (its, begins, end) = waits_at_its_end(|faults| Device::emulated(Emulated::new().faults(faults)));
        let go = held_up(&its);
        let exec_of = |device: &Device, after: Option<&Stream>| {
            let mut data = Buffer::<u8>::new(device, 64).unwrap();
            let (graph, ()) = Graph::capture(device, |capture| {
                after.map_or(Ok(()), |after| capture.stream().wait_for(after))?;
                capture.stream().fill(&mut data, 1)
            })
            .unwrap();
            graph.instantiate().unwrap()
        };
        let (first, second) = (exec_of(&device, Some(&its)), exec_of(&another, None));
        let (stream, on_another) = (Stream::new(&device).unwrap(), Stream::new(&another).unwrap());
        drop(go);
        its.synchronize_blocking().unwrap();
        drop(its);
        let launches = std::thread::spawn(move || first.launch(&stream).map(drop));
        begins.recv().unwrap();
        second.launch(&on_another).unwrap();
        drop(end);
        launches.join().unwrap().unwrap();
    });
}

/// A device without workers ends on the thread that lets go of it: outside of the heap's lock.
#[test]
fn a_simulated_device_does_not_end_under_the_lock_of_a_heap() {
    struct Allocates(Device, mpsc::Sender<bool>);
    impl Drop for Allocates {
        fn drop(&mut self) {
            let _ = self.1.send(Buffer::<u8>::new(&self.0, 64).is_ok());
        }
    }
    within_bound(|| {
        let simulation = Simulation::new(1);
        let device = Device::simulated(&simulation, Emulated::new());
        let other = Emulated::new().faults(Faults::new().lose_host_function(1));
        let its = Stream::new(&Device::simulated(&simulation, other)).unwrap();
        let (tell, receiver) = mpsc::channel();
        let allocates = Mutex::new(Allocates(device.clone(), tell));
        its.host_function(move || _ = &allocates).unwrap();
        its.host_function(|| ()).unwrap();
        let stream = Stream::new(&device).unwrap();
        let mut data = stream.alloc::<u8>(4096).unwrap();
        stream.wait_for(&its).unwrap();
        stream.fill(&mut data, 1).unwrap();
        drop((data, its, stream));
        let allocated = runtime().block_on(simulation.run(async {
            loop {
                drop(Buffer::<u8>::new(&device, 4096).unwrap());
                if let Ok(allocated) = receiver.try_recv() {
                    return allocated;
                }
                tokio::task::yield_now().await;
            }
        }));
        assert!(allocated);
    });
}

#[kernel]
fn adds(data: &mut [u32], number: u32) {
    data.iter_mut().for_each(|n| *n += number);
}

/// The loss of a device spoils what another one's streams had enqueued behind a wait for it, until it was known, and the memory
/// that this has written. What comes later is sound, but for what reads that memory; and memory that is written anew is, too.
#[test]
fn a_loss_spoils_what_came_after_it_until_it_was_known() {
    within_bound(|| {
        let runtime = runtime();
        for (checked, known) in [(false, true), (false, false), (true, true), (true, false)] {
            let device = |name| {
                let device = Device::emulated(Emulated::new().name(name));
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device("faulty"), device("healthy"));
            let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let [mut spoilt, mut unrelated, read] =
                [1, 2, 3].map(|number| Buffer::from_slice(&own, &[number; 4]).unwrap());
            let mut pinned = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            own.synchronize_blocking().unwrap();
            let go = held_up(&its);
            let mut from = Buffer::<u32>::new(&lost, 4).unwrap();
            its.fill(&mut from, 2).unwrap();
            own.copy(&from, &mut spoilt).unwrap();
            let mut again = own.alloc::<u32>(4).unwrap();
            own.copy(&read, &mut again).unwrap();
            own.copy(&read, &mut pinned).unwrap();
            let event = Event::new();
            event.record(&own).unwrap();
            lose(&its, go, known);
            let names = |outcome: wakeline::Result<()>| {
                let error = outcome.expect_err("what is spoilt");
                assert!(error.is_device_lost() && error.to_string().contains("faulty"), "{error}");
            };
            names(runtime.block_on(own.completed()));
            names(runtime.block_on(own.completed()));
            names(runtime.block_on(event.completed()));

            // The same stream, and another.
            let fresh = Stream::new(&healthy).unwrap();
            for stream in [&own, &fresh] {
                adds::launch(stream, &mut unrelated, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert_eq!(runtime.block_on(unrelated.to_vec(&fresh)).unwrap(), [4; 4]);
            // What was read by what is spoilt.
            let mut read = read;
            adds::launch(&fresh, &mut read, 1).unwrap();
            assert_eq!(runtime.block_on(read.to_vec(&own)).unwrap(), [4; 4]);

            // What reads something spoilt is spoilt, and what comes after it is not.
            let mut copied = Buffer::<u32>::new(&healthy, 4).unwrap();
            for stream in [&own, &fresh] {
                let read = stream.copy(&spoilt, &mut copied);
                names(read.and_then(|()| runtime.block_on(stream.completed())));
                names(runtime.block_on(copied.to_vec(&fresh)).map(drop));
                let read = adds::launch(stream, &mut spoilt, 1);
                names(read.and_then(|()| runtime.block_on(stream.completed())));
                names(runtime.block_on(spoilt.to_vec(stream)).map(drop));
                names(runtime.block_on(spoilt.available()));
                names(Stream::new(&healthy).unwrap().wait_for(stream));
                adds::launch(stream, &mut unrelated, 0).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            names(event.wait(&fresh));
            names(runtime.block_on(pinned.read()).map(drop));
            runtime.block_on(fresh.completed()).unwrap();

            // Written anew it can be read again.
            fresh.fill(&mut spoilt, 7).unwrap();
            adds::launch(&own, &mut spoilt, 1).unwrap();
            assert_eq!(runtime.block_on(spoilt.to_vec(&own)).unwrap(), [8; 4]);
            own.copy(&spoilt, &mut pinned).unwrap();
            assert_eq!(runtime.block_on(pinned.read()).unwrap(), [8; 4]);

            // And memory that is used again, on the stream that it is bound to and elsewhere.
            drop(again);
            for stream in [&own, &fresh, &own] {
                let mut data = stream.alloc::<u32>(4).unwrap();
                if checked {
                    // The checker refuses a read of what was never written.
                    stream.fill(&mut data, 1).unwrap();
                }
                adds::launch(stream, &mut data, 1).unwrap();
                runtime.block_on(stream.completed()).unwrap();
            }
            assert!(healthy.lost().is_none());
        }
    });
}

/// Envelopes of a hub that have carried what a lost device has spoilt carry other chunks after that.
#[test]
fn envelopes_are_sound_when_they_come_home() {
    within_bound(|| {
        runtime().block_on(async {
            let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
            let hub = ChunkHub::<u32>::builder("hub").elements(4).queue(2).envelopes(&healthy, 2).host_envelopes(2);
            let hub = hub.build().unwrap();
            let host = Device::host();
            let (mut on_lost, mut on_host) = (hub.produce(&lost).unwrap(), hub.produce(&host).unwrap());
            let mut consume = hub.consume(&healthy).unwrap();
            let stream = Stream::new(&lost).unwrap();
            let mut odd = stream.alloc::<u32>(4).unwrap();
            let go = held_up(&stream);
            stream.fill(&mut odd, 1).unwrap();
            on_lost.send(odd, ()).await.unwrap();
            // Its copy is on its way.
            let chunk = consume.next().await.unwrap().unwrap();
            lose(&stream, go, true);
            let own = Stream::new(&healthy).unwrap();
            let mut arrives = Buffer::<u32>::pinned(&healthy, 4).unwrap();
            own.copy(&*chunk, &mut arrives).unwrap();
            assert!(arrives.read().await.unwrap_err().is_device_lost());
            chunk.commit().unwrap();
            for round in 0..6 {
                on_host.with(async |blank| blank.fill_from(&[round; 4]).await).await.unwrap();
                let chunk = consume.next().await.unwrap().unwrap();
                own.copy(&*chunk, &mut arrives).unwrap();
                assert_eq!(arrives.read().await.unwrap(), [round; 4]);
                chunk.commit().unwrap();
            }
            assert!(healthy.lost().is_none());
        });
    });
}

/// A launch reads what its graph's nodes write: it is spoilt while that is. What is only its own makes no difference.
#[test]
fn a_launch_is_spoilt_while_its_memory_is() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let (its, own) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
        let mut data = Buffer::from_slice(&own, &[1_u32; 4]).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let stream = capture.stream();
            let mut within = stream.alloc::<u32>(4)?;
            stream.copy(&data, &mut within)?;
            adds::launch(stream, &mut within, 1)?;
            stream.copy(&within, &mut data)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        let go = held_up(&its);
        own.wait_for(&its).unwrap();
        exec.launch(&own).unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(own.completed()).unwrap_err().is_device_lost());
        let fresh = Stream::new(&healthy).unwrap();
        for stream in [&own, &fresh] {
            exec.launch(stream).unwrap();
            assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost());
            own.fill(&mut data, 5).unwrap();
            exec.launch(stream).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(stream)).unwrap(), [6; 4]);
            exec.launch(&fresh).unwrap();
            assert_eq!(runtime.block_on(data.to_vec(&own)).unwrap(), [7; 4]);
            // Spoilt again, for the next stream.
            if stream == &own {
                let (lost, go) = {
                    let lost = Stream::new(&Device::emulated(Emulated::new())).unwrap();
                    let go = held_up(&lost);
                    (lost, go)
                };
                own.wait_for(&lost).unwrap();
                exec.launch(&own).unwrap();
                lose(&lost, go, true);
            }
        }
    });
}

/// A launch reads the inputs that were copied to the graph's own memory: it is spoilt from a spoilt copy until the next one.
#[test]
fn a_launch_is_spoilt_while_an_input_is() {
    within_bound(|| {
        let runtime = runtime();
        // Whether the memory of the input is the graph's own, and whether the loss is known before the input is copied.
        for (own_memory, known) in [(true, true), (true, false), (false, true), (false, false)] {
            let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
            let its = Stream::new(&lost).unwrap();
            let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
            let (sample, mut out) = (Buffer::pinned(&healthy, 4).unwrap(), Buffer::<u32>::new(&healthy, 4).unwrap());
            let captured = Graph::capture(&healthy, |capture| {
                capture.input(&sample)?;
                let mut within = capture.stream().alloc::<u32>(4)?;
                capture.stream().copy(&sample, &mut within)?;
                capture.stream().copy(&within, &mut out)?;
                Ok((!own_memory).then_some(within))
            });
            let (graph, _within) = captured.unwrap();
            let exec = graph.instantiate().unwrap();
            let (mut spoilt, mut sound) =
                (Buffer::<u32>::pinned(&healthy, 4).unwrap(), Buffer::<u32>::pinned(&healthy, 4).unwrap());
            sound.as_mut_slice().unwrap().fill(5);
            let go = held_up(&its);
            own.wait_for(&its).unwrap();
            own.copy(&sound, &mut spoilt).unwrap();
            if known {
                lose(&its, go, true);
                graph.inputs()[0].copy(&own, &spoilt).unwrap();
            } else {
                graph.inputs()[0].copy(&own, &spoilt).unwrap();
                lose(&its, go, true);
            }
            let place = format!("own memory: {own_memory}, known: {known}");
            assert!(runtime.block_on(own.completed()).unwrap_err().is_device_lost(), "{place}");
            for stream in [&own, &other, &own] {
                exec.launch(stream).unwrap();
                assert!(runtime.block_on(stream.completed()).unwrap_err().is_device_lost(), "{place}");
                assert!(runtime.block_on(out.to_vec(stream)).unwrap_err().is_device_lost(), "{place}");
            }
            graph.inputs()[0].copy(&other, &sound).unwrap();
            own.fill(&mut out, 0).unwrap();
            for stream in [&own, &other] {
                exec.launch(stream).unwrap();
                assert_eq!(runtime.block_on(out.to_vec(stream)).unwrap(), [5; 4], "{place}");
            }
        }
    });
}

/// What was enqueued before a graph was captured is spoilt after that: so are the launches, until the memory is written anew.
#[test]
fn a_launch_is_sound_when_what_came_before_its_capture_is_written_anew() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let its = Stream::new(&lost).unwrap();
        let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let [mut read, mut written, mut copied] = [(); 3].map(|()| Buffer::<u32>::new(&healthy, 4).unwrap());
        own.fill(&mut read, 1).unwrap();
        own.fill(&mut written, 1).unwrap();
        let go = held_up(&its);
        other.wait_for(&its).unwrap();
        // Both are spoilt: a write of what the graph reads, and a read of what it writes.
        other.fill(&mut read, 2).unwrap();
        other.copy(&written, &mut copied).unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().copy(&read, &mut written));
        let exec = captured.unwrap().0.instantiate().unwrap();
        let captured = Graph::capture(&healthy, |capture| capture.stream().fill(&mut written, 3));
        let fills = captured.unwrap().0.instantiate().unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        fills.launch(&own).unwrap();
        assert_eq!(runtime.block_on(written.to_vec(&own)).unwrap(), [3; 4], "only a read of it was spoilt");
        exec.launch(&own).unwrap();
        assert!(runtime.block_on(written.to_vec(&own)).unwrap_err().is_device_lost());
        for round in 4..7 {
            own.fill(&mut read, round).unwrap();
            own.fill(&mut written, 0).unwrap();
            exec.launch(&own).unwrap();
            assert_eq!(runtime.block_on(written.to_vec(&own)).unwrap(), [round; 4]);
        }
    });
}

/// Memory of the graph's own that a stream wrote before it was dropped: launches that read it are spoilt if that write is.
#[test]
fn a_launch_is_spoilt_by_what_was_written_to_memory_of_its_capture() {
    within_bound(|| {
        let runtime = runtime();
        let (lost, healthy) = (Device::emulated(Emulated::new()), Device::emulated(Emulated::new()));
        let its = Stream::new(&lost).unwrap();
        let [own, other] = [(); 2].map(|()| Stream::new(&healthy).unwrap());
        let mut out = Buffer::<u32>::new(&healthy, 4).unwrap();
        let go = held_up(&its);
        other.wait_for(&its).unwrap();
        let captured = Graph::capture(&healthy, |capture| {
            let mut within = capture.stream().alloc::<u32>(4)?;
            other.fill(&mut within, 7)?;
            capture.stream().copy(&within, &mut out)
        });
        let exec = captured.unwrap().0.instantiate().unwrap();
        lose(&its, go, true);
        assert!(runtime.block_on(other.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            own.fill(&mut out, 0).unwrap();
            exec.launch(&own).unwrap();
            assert!(runtime.block_on(out.to_vec(&own)).unwrap_err().is_device_lost());
        }
    });
}

/// An engine of another make knows no address of the graph's memory.
#[test]
fn an_input_is_copied_on_no_stream_of_another_make() {
    let simulation = Simulation::new(1);
    let (simulated, emulated) = (Device::simulated(&simulation, Emulated::new()), Device::emulated(Emulated::new()));
    let sample = Buffer::<u32>::pinned(&simulated, 4).unwrap();
    let mut out = Buffer::<u32>::new(&simulated, 4).unwrap();
    let captured = Graph::capture(&simulated, |capture| {
        capture.input(&sample)?;
        let mut within = capture.stream().alloc::<u32>(4)?;
        capture.stream().copy(&sample, &mut within)?;
        capture.stream().copy(&within, &mut out)
    });
    let graph = captured.unwrap().0;
    let from = Buffer::<u32>::pinned(&emulated, 4).unwrap();
    let stream = Stream::new(&emulated).unwrap();
    let error = graph.inputs()[0].copy(&stream, &from).unwrap_err();
    assert_eq!(error.kind(), wakeline::ErrorKind::Usage, "{error}");
    assert!(emulated.lost().is_none() && simulated.lost().is_none());
}

/// A source that waits for memory, and allocates it.
struct Allocates(wakeline::memory::Allocator);

#[derive(Ports)]
struct AllocatesPorts {}

impl Operator for Allocates {
    type Ports = AllocatesPorts;

    async fn compute(&mut self, _ports: &mut AllocatesPorts, cx: &mut Cx) -> Result<()> {
        let _memory = cx.alloc::<u8>(10)?;
        assert!(self.0.device().lost().is_none());
        cx.finish();
        Ok(())
    }
}

/// Tasks that wait for memory in use, or for a chunk, wait for no stream of the device: a fault that no call has met ends their
/// waits all the same, whether its kernel was enqueued before they waited or after.
#[test]
fn a_fault_ends_the_waits_for_memory_and_for_chunks() {
    type Waits = Box<dyn Fn(&Device, &Stream) -> Pin<Box<dyn Future<Output = Result<()>>>>>;
    fn held(device: &Device, stream: &Stream) -> (wakeline::memory::Allocator, Buffer<u8>) {
        let blocks = wakeline::memory::Allocator::blocks(device, 1024, 1).unwrap();
        let held = blocks.alloc::<u8>(stream, 10).unwrap();
        (blocks, held)
    }
    let waits: [fn() -> Waits; 4] = [
        || {
            Box::new(|device, stream| {
                let ((blocks, held), stream) = (held(device, stream), stream.clone());
                Box::pin(async move {
                    let _held = held;
                    blocks.alloc_when_free::<u8>(&stream, 10).await.map(drop)
                })
            })
        },
        // The second in the line.
        || {
            Box::new(|device, stream| {
                let ((blocks, held), stream) = (held(device, stream), stream.clone());
                Box::pin(async move {
                    let _held = held;
                    let mut first = pin!(blocks.alloc_when_free::<u8>(&stream, 10));
                    let mut cx = Context::from_waker(Waker::noop());
                    assert!(first.as_mut().poll(&mut cx).is_pending());
                    blocks.alloc_when_free::<u8>(&stream, 10).await.map(drop)
                })
            })
        },
        || {
            Box::new(|device, stream| {
                let (blocks, held) = held(device, stream);
                let mut flow = Flow::new("waits");
                let _ = flow
                    .add("waits", Allocates(blocks.clone()))
                    .on(device)
                    .when(wakeline::condition::memory(&blocks, 10));
                Box::pin(async move {
                    let _held = held;
                    flow.run().await.map(drop)
                })
            })
        },
        || {
            Box::new(|device, _| {
                let hub = ChunkHub::<u32>::builder("hub").elements(1).envelopes(device, 1).build().unwrap();
                let mut link = hub.consume(device).unwrap();
                let _produces = hub.produce(device).unwrap();
                Box::pin(async move {
                    let _produces = _produces;
                    link.next().await.map(drop)
                })
            })
        },
    ];
    for (number, waits) in waits.into_iter().enumerate() {
        for before in [false, true] {
            let case = format!("wait {number}, enqueued before: {before}");
            alone::case_within_bound(&case.clone(), move || {
                let device = Device::emulated(Emulated::new());
                let [stream, traps_on] = [&device; 2].map(|device| Stream::new(device).unwrap());
                let mut data = Buffer::<u32>::new(&device, 1).unwrap();
                let mut enqueue = Some(|| {
                    let go = held_up(&traps_on);
                    traps::launch(&traps_on, &mut data).unwrap();
                    go
                });
                let go = if before { enqueue.take().map(|mut enqueue| enqueue()) } else { None };
                runtime().block_on(async {
                    let mut waits = waits()(&device, &stream);
                    for _ in 0..10 {
                        assert!(futures::poll!(waits.as_mut()).is_pending(), "{case}");
                        tokio::task::yield_now().await;
                    }
                    drop(go.or_else(|| enqueue.take().map(|mut enqueue| enqueue())));
                    let error = waits.await.expect_err(&case);
                    assert!(error.is_device_lost(), "{case}: {error}");
                });
            });
        }
    }
}

/// Counts down as it is dropped, with the device that keeps it.
struct CountsDown(Arc<AtomicUsize>);

impl Drop for CountsDown {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Devices that read memory of another one and are lost then: once they run nothing any more the memory keeps none of them, and
/// may be written.
#[test]
fn memory_that_lost_devices_have_read_is_written_and_keeps_none_of_them() {
    for (checked, pinned) in [(false, false), (true, false), (false, true), (true, true)] {
        alone::case_within_bound(&format!("checked: {checked}, pinned: {pinned}"), move || {
            let made = |device: Device| if checked { device.race_checked() } else { device };
            let home = made(Device::emulated(Emulated::new()));
            let [main, side] = [&home; 2].map(|home| Stream::new(home).unwrap());
            let new = || if pinned { Buffer::<u32>::pinned(&home, 16) } else { Buffer::new(&home, 16) };
            let mut data = new().unwrap();
            let write = |value: u32, data: &mut Buffer<u32>| {
                main.copy(&Buffer::from_slice(&main, &[value; 16]).unwrap(), data).unwrap();
                main.synchronize_blocking().unwrap();
            };
            write(3, &mut data);
            let alive = Arc::new(AtomicUsize::new(0));
            let is_lost = |data: &Buffer<u32>| {
                // What it loses lives as long as the device.
                let faults = Faults::new().fail_copy(1).lose_host_function(1);
                let device = made(Device::emulated(Emulated::new().workers(1).faults(faults)));
                let its = Stream::new(&device).unwrap();
                alive.fetch_add(1, Ordering::SeqCst);
                let counts = CountsDown(alive.clone());
                its.host_function(move || _ = &counts).unwrap();
                its.copy(data, &mut Buffer::new(&device, 16).unwrap()).unwrap();
                assert!(its.synchronize_blocking().unwrap_err().is_device_lost());
            };
            for _ in 0..20 {
                is_lost(&data);
            }
            // The last one is kept until the next read of another stream, or a write.
            while alive.load(Ordering::SeqCst) > 1 {
                std::thread::yield_now();
            }
            write(4, &mut data);
            assert_eq!(runtime().block_on(data.to_vec(&side)).unwrap(), [4; 16]);
            while alive.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            is_lost(&data);
            if pinned {
                runtime().block_on(data.write()).unwrap().fill(5);
                assert_eq!(data.as_slice().unwrap(), [5; 16]);
                is_lost(&data);
            }
            // Memory that is freed is used again.
            drop(data);
            drop(new().unwrap());
            assert_eq!((home.memory_leaked(), home.lost().is_none()), (0, true));
        });
    }
}

static READS: (Mutex<Look>, Condvar) = (Mutex::new(Look { began: false, ends: false, seen: 0 }), Condvar::new());

#[kernel]
fn reads(data: &[u32]) {
    let (look, change) = &READS;
    let first = std::hint::black_box(data)[0];
    lock(look).began = true;
    change.notify_all();
    let mut look = change.wait_while(lock(look), |look| !look.ends).unwrap();
    look.seen = 1 + u32::from(std::hint::black_box(data)[0] == first);
    drop(look);
    change.notify_all();
}

/// Memory that a lost device still reads is written by no other one, however many reads of it there were; once nothing runs on the
/// lost one, it is.
#[test]
fn memory_that_a_lost_device_still_reads_is_not_written() {
    within_bound(|| {
        let (a, b) = (Device::emulated(Emulated::new().workers(2)), Device::emulated(Emulated::new().workers(1)));
        let [runs, faults] = [&a; 2].map(|a| Stream::new(a).unwrap());
        let [writes, other] = [&b; 2].map(|b| Stream::new(b).unwrap());
        let mut data = Buffer::from_slice(&runs, &[7_u32; 16]).unwrap();
        runs.synchronize_blocking().unwrap();
        let from = Buffer::from_slice(&writes, &[9_u32; 16]).unwrap();
        writes.synchronize_blocking().unwrap();
        reads::launch(&runs, &data).unwrap();
        // Others that never begin.
        for _ in 0..5 {
            let waits = Stream::new(&a).unwrap();
            waits.wait_for(&runs).unwrap();
            waits.copy(&data, &mut Buffer::new(&a, 16).unwrap()).unwrap();
        }
        let (look, change) = &READS;
        drop(change.wait_while(lock(look), |look| !look.began).unwrap());
        traps_alone::launch(&faults, 1).unwrap();
        assert!(runtime().block_on(faults.completed()).unwrap_err().is_device_lost());
        for _ in 0..2 {
            assert!(writes.copy(&from, &mut data).unwrap_err().is_device_lost());
            // With this the reads are looked through.
            other.copy(&data, &mut Buffer::new(&b, 16).unwrap()).unwrap();
        }
        lock(look).ends = true;
        change.notify_all();
        let seen = change.wait_while(lock(look), |look| look.seen == 0).unwrap().seen;
        assert_eq!(seen, 2, "it is written while a kernel has a slice of it");
        // The kernel is about to return.
        while writes.copy(&from, &mut data).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(runtime().block_on(data.to_vec(&writes)).unwrap(), [9; 16]);
    });
}

/// A stream that had waited for the device before it was lost knows that write as one that it came after.
#[test]
fn what_a_lost_device_was_to_write_is_an_error_on_a_stream_that_had_waited_for_it() {
    within_bound(|| {
        let well = Device::emulated(Emulated::new());
        let lost = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let (stream, other) = (Stream::new(&well).unwrap(), Stream::new(&lost).unwrap());
        let (mut data, mut copy) = (Buffer::<u32>::new(&well, 4).unwrap(), Buffer::<u32>::new(&well, 4).unwrap());
        stream.fill(&mut data, 1).unwrap();
        stream.synchronize_blocking().unwrap();
        let mut from = Buffer::<u32>::new(&lost, 4).unwrap();
        other.fill(&mut from, 2).unwrap();
        let (go, held) = mpsc::channel::<()>();
        other.host_function(move || _ = held.recv()).unwrap();
        other.copy(&from, &mut data).unwrap();
        stream.copy(&data, &mut copy).unwrap();
        drop(go);
        assert!(other.synchronize_blocking().unwrap_err().is_device_lost());
        for _ in 0..3 {
            let read = runtime().block_on(data.to_vec(&stream));
            assert!(read.unwrap_err().is_device_lost(), "the data is what it was before the lost write");
        }
        // What is written anew is sound.
        stream.fill(&mut data, 3).unwrap();
        assert_eq!(runtime().block_on(data.to_vec(&stream)).unwrap(), [3; 4]);
    });
}
