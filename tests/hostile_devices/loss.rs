//! Devices that end or are lost: what they hold up, and what they keep.

use super::*;

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

/// Work of another device is to read memory of a lost one: that is there until the work is done, though its last owner drops it, and
/// goes then.
#[test]
fn a_lost_device_is_kept_while_others_use_its_memory() {
    within_bound(|| {
        let healthy = Device::emulated(Emulated::new());
        let own = Stream::new(&healthy).unwrap();
        let (alive, mut here) = (Arc::new(AtomicUsize::new(0)), Buffer::<u32>::new(&healthy, 4).unwrap());
        let (lost, its) = counted(&alive);
        let mut there = Buffer::<u32>::new(&lost, 4).unwrap();
        own.copy(&Buffer::from_slice(&own, &[7; 4]).unwrap(), &mut there).unwrap();
        own.synchronize_blocking().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        own.host_function(move || _ = wait.recv()).unwrap();
        own.copy(&there, &mut here).unwrap();
        let second = Stream::new(&lost).unwrap();
        traps::launch(&second, &mut Buffer::from_slice(&second, &[0]).unwrap()).unwrap();
        assert!(second.synchronize_blocking().unwrap_err().is_device_lost());
        drop((there, its, second, lost));
        // Another one, of which no other device uses anything, is lost and dropped after it, and goes.
        let unused = Arc::new(AtomicUsize::new(0));
        let (other, its) = counted(&unused);
        traps::launch(&its, &mut Buffer::from_slice(&its, &[0]).unwrap()).unwrap();
        assert!(its.synchronize_blocking().unwrap_err().is_device_lost());
        drop((its, other));
        while unused.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 1, "it goes while its memory is in use");
        drop(go);
        own.synchronize_blocking().unwrap();
        assert!(healthy.lost().is_none() && Stream::new(&healthy).is_ok());
        drop(own);
        while alive.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
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
        // The completion monitor queries it, or the allocation below.
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

/// A device that the first `increment` ends, and a hub of so many chunks there and on the host.
fn fragile_hub(queue: usize) -> (Device, ChunkHub<u32>) {
    let device = Device::emulated(Emulated::new().faults(Faults::new().trap_kernel("increment", 1)));
    let hub = ChunkHub::builder("numbers").elements(1).queue(queue);
    let hub = hub.host_envelopes(queue).envelopes(&device, 1).build().unwrap();
    (device, hub)
}

/// A hub of chunks goes on without a device that it has lost, and so does a flow that begins after that.
#[tokio::test]
async fn a_flow_is_not_failed_by_what_its_hub_lost_before() {
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
    // Lost, or as it was before, if the loss was known in time.
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

/// Takes out what there is; what is lost, it puts up with.
struct PutsUp;

impl Operator for PutsUp {
    type Ports = common::chunks::DrainPorts;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        match ports.numbers.get() {
            Err(error) if error.is_device_lost() => Ok(()),
            chunk => chunk?.read().await.map(drop),
        }
    }
}

/// The links of a hub are notified one after the other of a device's loss. While the first one's waker takes its time, the links
/// by hand go: the operators that are to be notified next have not stalled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_that_are_to_hear_of_a_loss_have_not_stalled() {
    use common::{chunks::Fill, until, within};
    let (device, hub) = fragile_hub(1);
    let (mut first, mut second) = (hub.modify(&device).unwrap(), hub.modify(&device).unwrap());
    let mut flow = Flow::new("on the host");
    let (fill, drain) = (flow.add("fill", Fill::each(0..5)), flow.add("puts up", PutsUp));
    flow.link(fill.numbers, &hub);
    flow.link(drain.numbers, &hub);
    let running = flow.spawn().unwrap();
    let chunk = within(first.next()).await.unwrap().unwrap();
    let ((notify, notified), (go, waits)) = (mpsc::channel(), mpsc::channel::<()>());
    let waits = Mutex::new(waits);
    let holds_up = move || {
        let _ = notify.send(());
        let _ = lock(&waits).recv();
    };
    let waker = Waker::from(Arc::new(Hostile { woken: Some(Box::new(holds_up)), dropped: None }));
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
    // Were it at rest, it would be found so: the operators' tasks have nothing else to do.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    drop(go);
    within(running).await.unwrap();
}

/// A chunk that was lost is the error of the run that it was for, also of one that does not look at it.
#[tokio::test]
async fn a_loss_that_a_run_does_not_look_at_is_the_runs_own_error() {
    use common::{chunks::DrainPorts, within};
    /// Looks at nothing.
    struct LooksAway;
    impl Operator for LooksAway {
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
    // Known only once the chunk is committed: what lay on the host is outdated then.
    let held = held_up(&stream);
    within(modify.with(async |chunk| common::increment::launch(&stream, chunk))).await.unwrap();
    drop(held);
    assert!(within(stream.completed()).await.is_err());
    drop((modify, produce));
    let mut flow = Flow::new("looks away");
    let away = flow.add("away", LooksAway);
    flow.link(away.numbers, &hub);
    drop(consume);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("operator `away`"), "{error}");
}

static BEGAN: AtomicBool = AtomicBool::new(false);
static GOES_ON: AtomicBool = AtomicBool::new(false);

#[kernel]
fn runs_until_it_may_end(data: &mut [u32]) {
    BEGAN.store(true, Ordering::SeqCst);
    while !GOES_ON.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    data[0] = 1;
}

/// Memory of a healthy device that a lost one was to read is free once that runs nothing any more, whatever it ran as it was lost.
#[test]
fn memory_of_a_healthy_device_comes_back_from_a_lost_one() {
    within_bound(|| {
        const LEN: usize = 1 << 10;
        let healthy = Device::emulated(Emulated::new().memory(LEN as u64 * 4));
        let own = Stream::new(&healthy).unwrap();
        let lost = Device::emulated(Emulated::new().workers(3));
        let [reads, runs, fails] = [(); 3].map(|()| Stream::new(&lost).unwrap());
        let mut data = Buffer::<u32>::new(&healthy, LEN).unwrap();
        own.fill(&mut data, 1).unwrap();
        own.synchronize_blocking().unwrap();
        let held = held_up(&reads);
        reads.copy(&data, &mut Buffer::new(&lost, LEN).unwrap()).unwrap();
        runs_until_it_may_end::launch(&runs, &mut Buffer::from_slice(&runs, &[0]).unwrap()).unwrap();
        while !BEGAN.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        traps::launch(&fails, &mut Buffer::from_slice(&fails, &[0]).unwrap()).unwrap();
        assert!(fails.synchronize_blocking().unwrap_err().is_device_lost());
        drop((data, held));
        assert!(Buffer::<u32>::new(&healthy, LEN).unwrap_err().is_out_of_memory(), "the lost device may read it");
        GOES_ON.store(true, Ordering::SeqCst);
        while Buffer::<u32>::new(&healthy, LEN).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(healthy.memory_leaked(), 0);
    });
}
