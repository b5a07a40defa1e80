//! Devices that end or are lost: they block no other device, and live while other devices use them, but no longer.

use super::*;

/// A device that `alive` counts while it exists.
fn counted(alive: &Arc<AtomicUsize>) -> (Device, Stream) {
    struct Alive(Arc<AtomicUsize>);
    impl Drop for Alive {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    alive.fetch_add(1, Ordering::SeqCst);
    let alive = Alive(alive.clone());
    // A lost host function is kept as long as its device.
    let device = Device::emulated(Emulated::new().workers(1).faults(Faults::new().lose_host_function(1)));
    let stream = Stream::new(&device).unwrap();
    stream.host_function(move || _ = &alive).unwrap();
    (device, stream)
}

/// A stream keeps another device alive only until the work that it waited for there is known to be sound.
#[test]
fn a_stream_releases_the_devices_that_it_has_waited_for() {
    within_bound(|| {
        let runtime = runtime();
        let home = Device::emulated(Emulated::new());
        let (stream, second) = (Stream::new(&home).unwrap(), Stream::new(&home).unwrap());
        let mut to = Buffer::<u32>::new(&home, 16).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        for round in 0..40 {
            let (_other, remote) = counted(&alive);
            let from = Buffer::from_slice(&remote, &[round; 16]).unwrap();
            if round % 2 == 0 {
                runtime.block_on(remote.completed()).unwrap();
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

/// A stream that is never awaited checks by itself, as it waits for more and more devices.
#[test]
fn a_stream_that_is_never_awaited_releases_devices_too() {
    within_bound(|| {
        let home = Device::emulated(Emulated::new());
        let stream = Stream::new(&home).unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut devices = 0;
        while devices < 60 || alive.load(Ordering::SeqCst) > 20 {
            let (_other, remote) = counted(&alive);
            remote.host_function(|| ()).unwrap();
            stream.wait_for(&remote).unwrap();
            stream.host_function(|| ()).unwrap();
            devices += 1;
        }
    });
}

/// A device without handles lives until the streams that waited for it know whether it has faulted.
#[test]
fn a_fault_of_a_device_without_handles_reaches_the_streams_that_waited_for_it() {
    within_bound(|| {
        let runtime = runtime();
        let home = Device::emulated(Emulated::new());
        let (first, second) = (Stream::new(&home).unwrap(), Stream::new(&home).unwrap());
        let go = {
            let other = Device::emulated(Emulated::new().workers(1));
            let remote = Stream::new(&other).unwrap();
            let mut data = Buffer::<u32>::new(&other, 1).unwrap();
            let (go, held) = mpsc::channel::<()>();
            remote.host_function(move || _ = held.recv()).unwrap();
            traps::launch(&remote, &mut data).unwrap();
            first.wait_for(&remote).unwrap();
            go
        };
        second.wait_for(&first).unwrap();
        drop(go);
        assert!(runtime.block_on(second.completed()).unwrap_err().is_device_lost());
        assert!(runtime.block_on(first.completed()).unwrap_err().is_device_lost());
        assert!(runtime.block_on(first.completed()).unwrap_err().is_device_lost(), "and again");
        assert!(Stream::new(&home).is_ok(), "the home device is healthy");
    });
}

/// A device that will be lost, a healthy one, and a stream of each.
struct Pair {
    lost: Device,
    remote: Stream,
    healthy: Device,
    local: Stream,
}

/// Calls `before`, loses the device, and calls `after`, with a loss that the host knows or does not know. The healthy device must
/// stay healthy, and an error of `after` must name the lost device.
fn stays_healthy<T>(name: &str, before: impl Fn(&Pair) -> T, after: impl Fn(&Pair, T) -> Option<wakeline::Result<()>>) {
    for checked in [false, true] {
        for known in [false, true] {
            let device = |name| {
                let device = Device::emulated(Emulated::new().name(name));
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device("faulty"), device("healthy"));
            let (remote, local) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let pair = Pair { lost, remote, healthy, local };
            let value = before(&pair);
            lose(&pair.remote, block(&pair.remote), known);
            let case = format!("{name}, known: {known}, checked: {checked}");
            if let Some(done) = after(&pair, value) {
                let error = done.expect_err(&case);
                assert!(error.is_device_lost() && error.to_string().contains("faulty"), "{case}: {error}");
                assert!(!error.to_string().contains("healthy takes no more work"), "{case}: {error}");
            }
            assert!(pair.healthy.lost().is_none(), "{case}: {:?}", pair.healthy.lost());
            let again = Stream::new(&pair.healthy).expect(&case);
            let data = Buffer::from_slice(&again, &[7_u32]).expect(&case);
            let read = runtime().block_on(data.to_vec(&again)).expect(&case);
            assert_eq!(read, [7], "{case}");
        }
    }
}

/// Only the device that has faulted is lost, whichever call on another device observes the fault.
#[test]
fn a_lost_device_does_not_lose_another() {
    within_bound(|| {
        let recorded = |pair: &Pair| {
            let (event, go) = (Event::new(), block(&pair.remote));
            event.record(&pair.remote).unwrap();
            drop(go);
            event
        };
        stays_healthy("an event", recorded, |pair, event| {
            // An event that is known to have completed is not waited for.
            event.wait(&pair.local).err().map(Err)
        });
        let behind = |pair: &Pair| {
            let (event, go) = (Event::new(), block(&pair.remote));
            let mut data = Buffer::<u32>::new(&pair.lost, 1).unwrap();
            traps::launch(&pair.remote, &mut data).unwrap();
            event.record(&pair.remote).unwrap();
            drop((go, data));
            event
        };
        // The device has faulted before the event is waited for.
        for checked in [false, true] {
            let device = || {
                let device = Device::emulated(Emulated::new());
                if checked { device.race_checked() } else { device }
            };
            let (lost, healthy) = (device(), device());
            let (remote, local) = (Stream::new(&lost).unwrap(), Stream::new(&healthy).unwrap());
            let pair = Pair { lost, remote, healthy, local };
            let event = behind(&pair);
            while pair.remote.host_function(|| ()).is_ok() {
                std::thread::yield_now();
            }
            assert!(event.wait(&pair.local).unwrap_err().is_device_lost());
            assert!(pair.healthy.lost().is_none() && Stream::new(&pair.healthy).is_ok());
        }
        let graph_event = |pair: &Pair| {
            let event = GraphEvent::new(&pair.lost).unwrap();
            event.record(&pair.remote).unwrap();
            event
        };
        stays_healthy("a graph's event", graph_event, |pair, event| Some(event.wait(&pair.local)));
        let exec = |pair: &Pair| {
            let event = graph_event(pair);
            let (graph, ()) = Graph::capture(&pair.healthy, |capture| event.wait(capture.stream())).unwrap();
            let exec = graph.instantiate().unwrap();
            exec.launch(&pair.local).unwrap();
            exec
        };
        stays_healthy("a graph's launch", exec, |pair, exec| Some(exec.launch(&pair.local).map(drop)));
        stays_healthy("a capture", graph_event, |pair, event| {
            // If the host does not know of the fault, the launch observes it instead.
            let captured = Graph::capture(&pair.healthy, |capture| event.wait(capture.stream()));
            captured.err().map(Err)
        });
        let written = |pair: &Pair| {
            let mut from = Buffer::from_slice(&pair.remote, &[1_u32]).unwrap();
            pair.remote.fill(&mut from, 2).unwrap();
            (from, Buffer::<u32>::new(&pair.healthy, 1).unwrap())
        };
        stays_healthy("a copy from it", written, |pair, (from, mut to)| {
            // Accepted if the write is known to be done. The copy's completion then reports the fault.
            let copied = pair.local.copy(&from, &mut to);
            Some(copied.and_then(|()| runtime().block_on(pair.local.completed())))
        });
        stays_healthy("a copy to it", written, |pair, (mut to, from)| Some(pair.remote.copy(&from, &mut to)));
    });
}

/// Memory of a lost device that another device is to read stays until the read is done, although its last owner has dropped it.
/// Then the lost device is freed.
#[test]
fn a_lost_device_lives_while_other_devices_use_its_memory() {
    within_bound(|| {
        let healthy = Device::emulated(Emulated::new());
        let local = Stream::new(&healthy).unwrap();
        let (alive, mut here) = (Arc::new(AtomicUsize::new(0)), Buffer::<u32>::new(&healthy, 4).unwrap());
        let (lost, remote) = counted(&alive);
        let mut there = Buffer::<u32>::new(&lost, 4).unwrap();
        local.copy(&Buffer::from_slice(&local, &[7; 4]).unwrap(), &mut there).unwrap();
        local.synchronize_blocking().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        local.host_function(move || _ = wait.recv()).unwrap();
        local.copy(&there, &mut here).unwrap();
        let second = Stream::new(&lost).unwrap();
        traps::launch(&second, &mut Buffer::from_slice(&second, &[0]).unwrap()).unwrap();
        assert!(second.synchronize_blocking().unwrap_err().is_device_lost());
        drop((there, remote, second, lost));
        // A second lost device, which no other device uses, is freed at once.
        let unused = Arc::new(AtomicUsize::new(0));
        let (other, remote) = counted(&unused);
        traps::launch(&remote, &mut Buffer::from_slice(&remote, &[0]).unwrap()).unwrap();
        assert!(remote.synchronize_blocking().unwrap_err().is_device_lost());
        drop((remote, other));
        while unused.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 1, "the device was freed while its memory is in use");
        drop(go);
        local.synchronize_blocking().unwrap();
        assert!(healthy.lost().is_none() && Stream::new(&healthy).is_ok());
        drop(local);
        while alive.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    });
}

/// A device whose end drops a host function. The destructor sends a message and blocks until the returned sender is dropped.
fn blocks_at_its_end(device: impl FnOnce(Faults) -> Device) -> (Stream, mpsc::Receiver<()>, mpsc::Sender<()>) {
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

/// Memory that is bound to a stream keeps the stream, and so the devices that the stream has waited for. When the memory is found
/// free, those devices end, and the heap is not locked meanwhile.
#[test]
fn a_device_that_ends_does_not_block_a_heap() {
    within_bound(|| {
        let device = Device::emulated(Emulated::new());
        let (remote, begins, end) = blocks_at_its_end(|faults| Device::emulated(Emulated::new().faults(faults)));
        let go = block(&remote);
        let stream = Stream::new(&device).unwrap();
        let mut data = stream.alloc::<u8>(4096).unwrap();
        stream.wait_for(&remote).unwrap();
        stream.fill(&mut data, 1).unwrap();
        drop((data, stream, remote));
        drop(go);
        // The completion monitor finds the memory free.
        begins.recv().unwrap();
        drop(Buffer::<u8>::new(&device, 4096).unwrap());
        drop(end);
    });
}

/// The same for the devices that a graph comes after: the graphs of the process share a lock.
#[test]
fn a_device_that_ends_does_not_block_a_graph() {
    within_bound(|| {
        let [device, another] = [0, 1].map(|_| Device::emulated(Emulated::new()));
        let (remote, begins, end) = blocks_at_its_end(|faults| Device::emulated(Emulated::new().faults(faults)));
        let go = block(&remote);
        let exec_of = |device: &Device, after: Option<&Stream>| {
            let mut data = Buffer::<u8>::new(device, 64).unwrap();
            let (graph, ()) = Graph::capture(device, |capture| {
                after.map_or(Ok(()), |after| capture.stream().wait_for(after))?;
                capture.stream().fill(&mut data, 1)
            })
            .unwrap();
            graph.instantiate().unwrap()
        };
        let (first, second) = (exec_of(&device, Some(&remote)), exec_of(&another, None));
        let (stream, on_another) = (Stream::new(&device).unwrap(), Stream::new(&another).unwrap());
        drop(go);
        remote.synchronize_blocking().unwrap();
        drop(remote);
        let launches = std::thread::spawn(move || first.launch(&stream).map(drop));
        begins.recv().unwrap();
        second.launch(&on_another).unwrap();
        drop(end);
        launches.join().unwrap().unwrap();
    });
}

/// A simulated device has no workers. It ends on the thread that releases it, outside the heap's lock.
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
        let remote = Stream::new(&Device::simulated(&simulation, other)).unwrap();
        let (sender, receiver) = mpsc::channel();
        let allocates = Mutex::new(Allocates(device.clone(), sender));
        remote.host_function(move || _ = &allocates).unwrap();
        remote.host_function(|| ()).unwrap();
        let stream = Stream::new(&device).unwrap();
        let mut data = stream.alloc::<u8>(4096).unwrap();
        stream.wait_for(&remote).unwrap();
        stream.fill(&mut data, 1).unwrap();
        drop((data, remote, stream));
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

/// A device that the first `increment` traps, and a hub of `queue` chunks with envelopes there and on the host.
fn fragile_hub(queue: usize) -> (Device, ChunkHub<u32>) {
    let device = Device::emulated(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let hub = ChunkHub::builder("numbers").elements(1).queue(queue);
    let hub = hub.host_envelopes(queue).envelopes(&device, 1).build().unwrap();
    (device, hub)
}

/// A chunk hub goes on without its lost device, and so do the flows that start after the loss.
#[tokio::test]
async fn a_flow_is_not_failed_by_an_earlier_loss_in_its_hub() {
    use common::{
        chunks::{Drain, Fill},
        shared, within,
    };
    let (host, (device, hub)) = (Device::host(), fragile_hub(2));
    let (mut produce, mut modify) = (hub.produce(&host).unwrap(), hub.modify(&device).unwrap());
    let mut consume = hub.consume(&host).unwrap();
    within(produce.with(async |blank| blank.fill_from(&[1]).await)).await.unwrap();
    let stream = Stream::new(&device).unwrap();
    let _ = within(modify.with(async |chunk| common::increment::launch(&stream, chunk))).await;
    assert!(within(stream.completed()).await.is_err());
    drop(modify);
    // The chunk is lost, or unchanged if the loss was known in time.
    while !hub.is_empty() {
        if let Ok(Some(chunk)) = within(consume.next()).await {
            let _ = within(chunk.read()).await;
            let _ = chunk.commit();
        }
    }
    drop((produce, consume));
    for _ in 0..2 {
        let seen = shared();
        let mut flow = Flow::new("on the host");
        let (fill, drain) = (flow.add("fill", Fill::each(0..5)), flow.add("drain", Drain(seen.clone())));
        flow.link(fill.numbers, &hub);
        flow.link(drain.numbers, &hub);
        within(flow.run()).await.unwrap();
        assert_eq!(lock(&seen).len(), 5);
    }
}

struct IgnoresLoss;

impl Operator for IgnoresLoss {
    type Ports = common::chunks::DrainPorts;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        match ports.numbers.get() {
            Err(error) if error.is_device_lost() => Ok(()),
            chunk => chunk?.read().await.map(drop),
        }
    }
}

/// A hub notifies its links of a device's loss one after the other. The first waker blocks, and the test's own links are dropped
/// meanwhile: the operators, which are not yet notified, have not stalled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_not_yet_notified_of_a_loss_have_not_stalled() {
    use common::{chunks::Fill, until, within};
    let (device, hub) = fragile_hub(1);
    let (mut first, mut second) = (hub.modify(&device).unwrap(), hub.modify(&device).unwrap());
    let mut flow = Flow::new("on the host");
    let (fill, drain) = (flow.add("fill", Fill::each(0..5)), flow.add("ignores loss", IgnoresLoss));
    flow.link(fill.numbers, &hub);
    flow.link(drain.numbers, &hub);
    let running = flow.spawn().unwrap();
    let chunk = within(first.next()).await.unwrap().unwrap();
    let ((notify, notified), (go, waits)) = (mpsc::channel(), mpsc::channel::<()>());
    let waits = Mutex::new(waits);
    let blocks = move || {
        let _ = notify.send(());
        let _ = lock(&waits).recv();
    };
    let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(blocks)), dropped: None }));
    let mut next = Box::pin(second.next());
    assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let waiting = || running.status().iter().all(|operator| !operator.running && !operator.waits_for.is_empty());
    until("the operators wait", waiting).await;
    let stream = Stream::new(&device).unwrap();
    let mut other = Buffer::from_slice(&stream, &[1_u32]).unwrap();
    common::increment::launch(&stream, &mut other).unwrap();
    tokio::task::spawn_blocking(move || notified.recv().unwrap()).await.unwrap();
    drop(next);
    drop((second, chunk, first));
    // Enough polls for a wrong stall to be detected: the operators' tasks have nothing else to do.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    drop(go);
    within(running).await.unwrap();
}

/// A lost chunk fails the run that it was taken for, even if the run does not read it.
#[tokio::test]
async fn a_lost_chunk_fails_the_run_that_does_not_read_it() {
    use common::{chunks::DrainPorts, within};
    struct ReturnsUnread;
    impl Operator for ReturnsUnread {
        type Ports = DrainPorts;

        async fn compute(&mut self, ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
            ports.numbers.give_back();
            Ok(())
        }
    }
    let (host, (device, hub)) = (Device::host(), fragile_hub(1));
    let (mut produce, mut modify) = (hub.produce(&host).unwrap(), hub.modify(&device).unwrap());
    let consume = hub.consume(&host).unwrap();
    within(produce.with(async |blank| blank.fill_from(&[1]).await)).await.unwrap();
    let stream = Stream::new(&device).unwrap();
    // The loss is known only after the commit, when the copy on the host is outdated.
    let held = block(&stream);
    within(modify.with(async |chunk| common::increment::launch(&stream, chunk))).await.unwrap();
    drop(held);
    assert!(within(stream.completed()).await.is_err());
    drop((modify, produce));
    let mut flow = Flow::new("looks away");
    let away = flow.add("away", ReturnsUnread);
    flow.link(away.numbers, &hub);
    drop(consume);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("operator `away`"), "{error}");
}

static BEGAN: AtomicBool = AtomicBool::new(false);
static MAY_END: AtomicBool = AtomicBool::new(false);

#[kernel]
fn runs_until_it_may_end(data: &mut [u32]) {
    BEGAN.store(true, Ordering::SeqCst);
    while !MAY_END.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    data[0] = 1;
}

/// Memory of a healthy device that a lost device was to read is freed once nothing runs on the lost device.
#[test]
fn memory_of_a_healthy_device_is_freed_after_a_lost_reader() {
    within_bound(|| {
        const LEN: usize = 1 << 10;
        let healthy = Device::emulated(Emulated::new().memory(LEN as u64 * 4));
        let local = Stream::new(&healthy).unwrap();
        let lost = Device::emulated(Emulated::new().workers(3));
        let [reads, runs, fails] = [(); 3].map(|()| Stream::new(&lost).unwrap());
        let mut data = Buffer::<u32>::new(&healthy, LEN).unwrap();
        local.fill(&mut data, 1).unwrap();
        local.synchronize_blocking().unwrap();
        let held = block(&reads);
        reads.copy(&data, &mut Buffer::new(&lost, LEN).unwrap()).unwrap();
        runs_until_it_may_end::launch(&runs, &mut Buffer::from_slice(&runs, &[0]).unwrap()).unwrap();
        while !BEGAN.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        traps::launch(&fails, &mut Buffer::from_slice(&fails, &[0]).unwrap()).unwrap();
        assert!(fails.synchronize_blocking().unwrap_err().is_device_lost());
        drop((data, held));
        assert!(Buffer::<u32>::new(&healthy, LEN).unwrap_err().is_out_of_memory(), "the lost device may still read it");
        MAY_END.store(true, Ordering::SeqCst);
        while Buffer::<u32>::new(&healthy, LEN).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(healthy.memory_leaked(), 0);
    });
}
