//! Simulations: wakers and tasks that panic, and a simulation that ends.

use super::*;

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

/// A task that waits for a device with threads within a simulation leaves that device its completion monitor: a later task
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

/// A run that a runtime has polled goes on on another executor, whether that runtime has ended or only polls no more: its device is
/// asked for faults there.
#[test]
fn a_run_goes_on_on_another_executor() {
    for ended in [false, true] {
        within_bound(move || {
            let simulation = Simulation::new(1);
            let device = Device::simulated(&simulation, Emulated::new().faults(Faults::new().fail_copy(3)));
            let stream = Stream::new(&device).unwrap();
            let (go, wait) = futures::channel::oneshot::channel::<()>();
            let mut run = Box::pin(simulation.run(async {
                let data = Buffer::from_slice(&stream, &[1_u32; 8]).unwrap();
                assert_eq!(data.to_vec(&stream).await.unwrap(), [1; 8]);
                wait.await.unwrap();
                data.to_vec(&stream).await.unwrap_err()
            }));
            let runtime = runtime();
            assert!(runtime.block_on(async { futures::poll!(run.as_mut()) }).is_pending());
            let runtime = (!ended).then_some(runtime);
            go.send(()).unwrap();
            assert!(futures::executor::block_on(run).is_device_lost());
            drop(runtime);
        });
    }
}

/// A task that waits for memory hears that the simulation of its device is gone, though nothing is in flight whose end would say so.
#[test]
fn a_wait_for_memory_ends_with_the_simulation() {
    for began_before in [true, false] {
        within_bound(move || {
            let simulation = Simulation::new(1);
            let device = Device::simulated(&simulation, Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let block = wakeline::memory::Allocator::blocks(&device, 64, 1).unwrap();
            let _held = block.alloc::<u32>(&stream, 16).unwrap();
            let mut waits = Box::pin(block.alloc_when_free::<u32>(&stream, 16));
            if began_before {
                assert!(waits.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            }
            drop(simulation);
            assert!(runtime().block_on(waits).unwrap_err().is_device_lost(), "began before: {began_before}");
        });
    }
}
