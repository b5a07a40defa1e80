//! Functions, subscribers, owners and wakers that panic or block when they run or are dropped.

use super::*;

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

/// Functions behind a fault are dropped one by one, each waiter gets the error, and the worker goes on.
#[test]
fn functions_behind_a_fault_may_panic_when_dropped() {
    in_a_process("hostile_devices::functions::functions_behind_a_fault_may_panic_when_dropped", || {
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

/// Waiters get the error of a fault before the functions behind it are dropped: the destructor of a function may wait for one.
#[test]
fn a_fault_is_reported_before_the_functions_behind_it_are_dropped() {
    in_a_process("hostile_devices::functions::a_fault_is_reported_before_the_functions_behind_it_are_dropped", || {
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
        let (release, wait) = mpsc::channel();
        let waits = Waits(wait);
        stream.host_function(move || _ = &waits).unwrap();
        let waiter = std::thread::spawn(move || other.wait_for(&stream).and_then(|()| other.synchronize_blocking()));
        drop(go);
        assert!(waiter.join().unwrap().unwrap_err().is_device_lost());
        release.send(()).unwrap();
    });
}

/// A device drops the functions of graphs, and host functions that it has lost, one by one.
#[test]
fn functions_that_a_device_owns_may_panic_when_dropped() {
    in_a_process("hostile_devices::functions::functions_that_a_device_owns_may_panic_when_dropped", || {
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
        assert_eq!(dropped.load(Ordering::SeqCst), 2, "the graph's functions");
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

/// A worker survives panics of a host function, of the destructor of its captures, and of the subscriber that logs them.
#[test]
fn a_worker_survives_a_subscriber_that_panics() {
    in_a_process("hostile_devices::functions::a_worker_survives_a_subscriber_that_panics", || {
        subscribe_with_panics();
        let device = Device::emulated(Emulated::new().workers(1));
        let stream = Stream::new(&device).unwrap();
        stream.host_function(|| panic!("a host function")).unwrap();
        let (dropped, bomb) = bombs();
        let bomb = bomb();
        stream.host_function(move || _ = &bomb).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
        // Waiters get the error of a loss although the subscriber panics.
        let mut data = Buffer::<u32>::new(&device, 1).unwrap();
        traps::launch(&stream, &mut data).unwrap();
        assert!(runtime().block_on(stream.completed()).unwrap_err().is_device_lost());
    });
}

/// The payload of a panic panics when dropped, and so does the subscriber: two panics at once would abort.
#[test]
fn a_payload_and_a_subscriber_that_panic_do_not_abort() {
    in_a_process("hostile_devices::functions::a_payload_and_a_subscriber_that_panic_do_not_abort", || {
        subscribe_with_panics();
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        let (dropped, bomb) = bombs();
        let bomb = bomb();
        stream.host_function(move || std::panic::panic_any(bomb)).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    });
}

/// The drop of the device does not wait: the destructor may itself wait for a lock that the owner holds.
#[test]
fn a_device_may_be_dropped_while_a_refused_function_blocks_its_worker() {
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
        // Without a buffer, which the lost device would keep, and which would keep the device alive.
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

/// The progress of the kernel `looks`.
static LOOKS: (Mutex<Progress>, Condvar) =
    (Mutex::new(Progress { began: false, ends: false, seen: 0 }), Condvar::new());

#[kernel]
fn looks(data: &mut [u32]) {
    data.fill(1);
    let (progress, change) = &LOOKS;
    lock(progress).began = true;
    change.notify_all();
    let mut progress = change.wait_while(lock(progress), |progress| !progress.ends).unwrap();
    progress.seen = std::hint::black_box(&*data)[0];
    drop(progress);
    change.notify_all();
}

/// A fault does not stop a kernel that already runs: work of another device is still ordered after it.
#[test]
fn memory_of_a_kernel_that_runs_on_a_lost_device_is_not_written() {
    within_bound(|| {
        let (a, b) = (Device::emulated(Emulated::new().workers(2)), Device::emulated(Emulated::new().workers(1)));
        let [runs, parked, faults] = [&a; 3].map(|a| Stream::new(a).unwrap());
        let [waits, later] = [&b; 2].map(|b| Stream::new(b).unwrap());
        let mut data = Buffer::<u32>::new(&a, 16).unwrap();
        let from = Buffer::from_slice(&waits, &[9_u32; 16]).unwrap();
        looks::launch(&runs, &mut data).unwrap();
        // `parked` comes after the kernel, and the other device waits for `parked` alone.
        parked.fill(&mut data, 5).unwrap();
        waits.copy(&from, &mut data).unwrap();
        let (progress, change) = &LOOKS;
        drop(change.wait_while(lock(progress), |progress| !progress.began).unwrap());
        traps_alone::launch(&faults, 1).unwrap();
        assert!(runtime().block_on(faults.completed()).unwrap_err().is_device_lost());
        // After this the only worker of `b` has done all work that may run.
        later.host_function(|| ()).unwrap();
        later.synchronize_blocking().unwrap();
        lock(progress).ends = true;
        change.notify_all();
        let seen = change.wait_while(lock(progress), |progress| progress.seen == 0).unwrap().seen;
        assert_eq!(seen, 1, "the memory is written while the kernel has a `&mut` slice of it");
        // The wait ends with the kernel, and its result is tainted.
        assert!(runtime().block_on(waits.completed()).unwrap_err().is_device_lost());
    });
}

/// A launch observes the loss of its device and logs it. The subscriber waits until another thread has launched a graph on
/// another device.
#[test]
fn a_subscriber_may_wait_for_a_launch_on_another_thread() {
    in_a_process("hostile_devices::functions::a_subscriber_may_wait_for_a_launch_on_another_thread", || {
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
        let (sender, launched) = mpsc::channel();
        *lock(&LAUNCHED) = Some(launched);
        std::thread::spawn(move || {
            let (exec, stream, _data) = graph(&other);
            launches.recv().unwrap();
            exec.launch(&stream).unwrap();
            sender.send(()).unwrap();
        });
        // The launch must be the first call that observes the fault, so the trap is behind a gate.
        let (open, gate) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let done = NotifiesWhenDropped(done);
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

struct NotifiesWhenDropped(mpsc::Sender<()>);

impl Drop for NotifiesWhenDropped {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_waker_that_panics_twice_does_not_abort() {
    in_a_process("hostile_devices::functions::a_waker_that_panics_twice_does_not_abort", || {
        let waker = Waker::from(Arc::new(Hostile {
            woken: Some(Box::new(|| panic!("a waker"))),
            dropped: Some(Box::new(|| panic!("a waker's destructor"))),
        }));
        let stream = Stream::new(&Device::emulated(Emulated::new().workers(1))).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let mut wait = Box::pin(stream.completed());
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // The future holds the last clone.
        drop(waker);
        drop(go);
        runtime().block_on(stream.completed()).unwrap();
        runtime().block_on(wait).unwrap();
    });
}

/// Recording the uses of recycled memory takes no place in a bounded queue: while a stream is blocked, others can be created.
#[test]
fn recycled_memory_takes_no_place_in_a_queue() {
    within_bound(|| {
        let device = Device::emulated(Emulated::new().workers(2).queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        // The stream still uses the memory, which is thus bound to it.
        let mut used = stream.alloc::<u32>(16).unwrap();
        stream.fill(&mut used, 1).unwrap();
        drop(used);
        (0..40).for_each(|_| drop(stream.alloc::<u32>(16).unwrap()));
        let (sender, begins) = mpsc::channel();
        let fills = std::thread::spawn({
            let stream = stream.clone();
            move || {
                let mut data = stream.alloc::<u32>(16).unwrap();
                sender.send(()).unwrap();
                (0..40).for_each(|_| stream.fill(&mut data, 1).unwrap());
            }
        });
        begins.recv().unwrap();
        // Long enough for the other thread to wait for a place in the queue.
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

/// A worker that exits runs the user's thread-local destructors, which may block. The drop of its device does not wait.
#[test]
fn dropping_a_device_does_not_wait_for_its_worker_to_exit() {
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

/// The buffer's destructor wakes the waiter for wrapped memory. If the waker panics while another panic unwinds, nothing aborts.
#[test]
fn a_waker_that_panics_does_not_unwind_out_of_a_buffers_drop() {
    in_a_process("hostile_devices::functions::a_waker_that_panics_does_not_unwind_out_of_a_buffers_drop", || {
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

/// An owner is dropped with its buffer if the handle that would return it is gone. A panic of the owner's destructor does not
/// leave the buffer's drop.
#[test]
fn an_owner_that_panics_does_not_unwind_out_of_a_buffers_drop() {
    in_a_process("hostile_devices::functions::an_owner_that_panics_does_not_unwind_out_of_a_buffers_drop", || {
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
