//! Functions, subscribers, owners and wakers that panic or wait as they run or are dropped.

use super::*;

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

/// Functions behind a fault are dropped one by one, whoever waits learns of the fault, and the worker lives.
#[test]
fn functions_behind_a_fault_may_panic_as_they_are_dropped() {
    in_a_process("hostile_devices::functions::functions_behind_a_fault_may_panic_as_they_are_dropped", || {
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
    in_a_process("hostile_devices::functions::a_fault_is_known_when_the_functions_behind_it_are_dropped", || {
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
    in_a_process("hostile_devices::functions::functions_that_a_device_keeps_may_panic_as_they_are_dropped", || {
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
        // Those who wait learn of a loss, whatever the subscriber does.
        let mut data = Buffer::<u32>::new(&device, 1).unwrap();
        traps::launch(&stream, &mut data).unwrap();
        assert!(runtime().block_on(stream.completed()).unwrap_err().is_device_lost());
    });
}

/// A panic whose payload panics as it is dropped, with a subscriber that panics: two panics at a time would be an abort.
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
    in_a_process("hostile_devices::functions::a_subscriber_waits_for_another_threads_launch", || {
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

/// An owner that is not wanted back is dropped with its buffer, or with the handle that was to give it back; a panic of its
/// destructor ends there where it is the buffer's.
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
