//! Hostile user code wherever the crate keeps some of it: wakers and closures that panic, call back, drop a buffer, a stream or
//! a flow, when they are woken and when they are dropped. Whatever they do, the other waiters are resolved.
//!
//! A body runs on a thread of its own; where it hangs, a watchdog ends the process and names it.

#![forbid(unsafe_code)]

use std::{
    future::{Future, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
};

use common::alone::case_within_bound;
use futures::{FutureExt, executor::block_on};
use wakeline::{
    Egress, Ingress,
    device::{Emulated, Faults},
    graph::{Exec, Graph},
    memory::Allocator,
    prelude::*,
    stream::{CompletionMode, Event},
};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds a stream up until what it returns is dropped.
#[must_use]
fn hold(stream: &Stream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel::<()>();
    stream.host_function(move || _ = held.recv()).unwrap();
    go
}

type Deed = Box<dyn FnOnce() + Send>;

/// User code that does something when it is woken, and something else when it is dropped.
struct Hostile {
    woken: Mutex<Option<Deed>>,
    dropped: Mutex<Option<Deed>>,
    was_woken: Arc<AtomicBool>,
}

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.was_woken.store(true, Ordering::SeqCst);
        let deed = lock(&self.woken).take();
        if let Some(deed) = deed {
            deed();
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let deed = lock(&self.dropped).take();
        if let Some(deed) = deed {
            deed();
        }
    }
}

/// What they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Panics,
    CallsBack,
    DropsABuffer,
    DropsAStream,
    PanicsWhenDropped,
    CallsBackWhenDropped,
    DropsABufferWhenDropped,
    DropsAStreamWhenDropped,
}

const MANNERS: [Manner; 8] = [
    Manner::Panics,
    Manner::CallsBack,
    Manner::DropsABuffer,
    Manner::DropsAStream,
    Manner::PanicsWhenDropped,
    Manner::CallsBackWhenDropped,
    Manner::DropsABufferWhenDropped,
    Manner::DropsAStreamWhenDropped,
];

/// A buffer with open work on a stream that it was not allocated on, so that its drop marks that work, under the stream's lock.
fn in_use(device: &Device, stream: &Stream) -> Buffer<u32> {
    let mut buffer = Buffer::new(device, 64).unwrap();
    stream.fill(&mut buffer, 7).unwrap();
    buffer
}

/// Uses what can be used of the device.
fn call_back(device: &Device, stream: &Stream) {
    let _ = Buffer::<u32>::new(device, 64).and_then(|mut buffer| stream.fill(&mut buffer, 1));
    let _ = stream.host_function(|| ());
    let mut done = Box::pin(stream.completed());
    let _ = done.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let _ = Event::new().record(stream);
    let _ = Stream::new(device);
}

impl Manner {
    fn deed(self, device: &Device, stream: &Stream) -> Deed {
        let (device, stream) = (device.clone(), stream.clone());
        match self {
            Self::Panics | Self::PanicsWhenDropped => Box::new(|| panic!("from a hostile user's code")),
            Self::CallsBack | Self::CallsBackWhenDropped => Box::new(move || call_back(&device, &stream)),
            Self::DropsABuffer | Self::DropsABufferWhenDropped => {
                let buffer = in_use(&device, &stream);
                Box::new(move || drop(buffer))
            }
            Self::DropsAStream | Self::DropsAStreamWhenDropped => {
                let other = Stream::named(&device, "other").unwrap();
                let buffer = in_use(&device, &other);
                Box::new(move || drop((buffer, other)))
            }
        }
    }

    fn is_of_a_drop(self) -> bool {
        matches!(
            self,
            Self::PanicsWhenDropped
                | Self::CallsBackWhenDropped
                | Self::DropsABufferWhenDropped
                | Self::DropsAStreamWhenDropped
        )
    }

    fn waker(self, device: &Device, stream: &Stream) -> (Waker, Arc<AtomicBool>) {
        let was_woken = Arc::new(AtomicBool::new(false));
        let (woken, dropped) = match self.is_of_a_drop() {
            true => (None, Some(self.deed(device, stream))),
            false => (Some(self.deed(device, stream)), None),
        };
        let hostile = Hostile { woken: Mutex::new(woken), dropped: Mutex::new(dropped), was_woken: was_woken.clone() };
        (Arc::new(hostile).into(), was_woken)
    }

    /// A value whose drop does it.
    fn value(self, device: &Device, stream: &Stream) -> Hostile {
        Hostile {
            woken: Mutex::new(None),
            dropped: Mutex::new(Some(self.deed(device, stream))),
            was_woken: Arc::default(),
        }
    }
}

type Waits = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future that two honest waiters and two hostile ones wait for in turn. Whatever the hostile ones do, the honest resolve.
///
/// `wait` makes a future of the place; `release` lets all of them resolve.
fn two_and_two(
    what: &str,
    faults: Faults,
    from_a_thread_that_ends: bool,
    wait: impl Fn(&Device, &Stream, usize) -> Waits + Send + Copy + 'static,
) {
    for manner in MANNERS {
        let faults = faults.clone();
        let what = format!("{what}, {manner:?}");
        case_within_bound(&what.clone(), move || {
            let device = Device::emulated(Emulated::new().workers(4).faults(faults));
            let stream = Stream::named(&device, "held").unwrap();
            let beside = Stream::named(&device, "beside").unwrap();
            let held = hold(&stream);
            // Fails, where that is planned, once the stream goes on.
            let (from, mut to) = (Buffer::<u32>::new(&device, 4).unwrap(), Buffer::<u32>::new(&device, 4).unwrap());
            stream.copy(&from, &mut to).unwrap();
            let mut waits: Vec<Waits> = (0..4).map(|at| wait(&device, &stream, at)).collect();
            let mut hostile = Vec::new();
            for wait in [0, 2] {
                let (waker, _) = manner.waker(&device, &beside);
                // A place may not register a waker the first time that it is asked.
                let _ = waits[wait].as_mut().poll(&mut Context::from_waker(&waker));
                hostile.push(waker);
            }
            let honest: Vec<Waits> = {
                let mut all: Vec<Option<Waits>> = waits.drain(..).map(Some).collect();
                let honest = [1, 3].map(|at| all[at].take().unwrap());
                let left: Vec<Waits> = all.into_iter().flatten().collect();
                if from_a_thread_that_ends {
                    // Their places are given up as a thread ends.
                    thread_local!(static LEFT: Mutex<Vec<Waits>> = const { Mutex::new(Vec::new()) });
                    thread::spawn(move || LEFT.with(|kept| lock(kept).extend(left))).join().unwrap();
                } else {
                    waits = left;
                }
                honest.into()
            };
            // From here on what is kept of them is the crate's alone.
            drop_each(hostile);
            let (sender, resolved) = mpsc::channel();
            let waiters: Vec<_> = honest
                .into_iter()
                .map(|wait| {
                    let sender = sender.clone();
                    thread::spawn(move || {
                        block_on(wait);
                        let _ = sender.send(());
                    })
                })
                .collect();
            drop(held);
            drop(from);
            drop(to);
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
            assert_eq!(resolved.try_iter().count(), 2);
            // What is left is the hostile ones' own.
            drop_each(waits);
        });
    }
}

/// Each, whatever another's drop does.
fn drop_each<T>(values: impl IntoIterator<Item = T>) {
    for value in values {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(value)));
    }
}

/// Good weather, and a device that faults while they wait; in both from a thread that ends, too.
fn in_all_weathers(what: &str, wait: impl Fn(&Device, &Stream, usize) -> Waits + Send + Copy + 'static) {
    for ends in [false, true] {
        two_and_two(&format!("{what}, thread ends: {ends}"), Faults::new(), ends, wait);
        two_and_two(&format!("{what}, after a fault, thread ends: {ends}"), Faults::new().fail_copy(1), ends, wait);
    }
}

#[test]
fn hostile_wakers_of_completions_strand_nobody() {
    in_all_weathers("completed", |_, stream, _| {
        let done = stream.completed();
        Box::pin(async move { drop(done.await) })
    });
}

#[test]
fn hostile_wakers_of_several_tickets_strand_nobody() {
    in_all_weathers("tickets", |_, stream, _| {
        let _ = stream.host_function(|| ());
        let done = stream.completed();
        Box::pin(async move { drop(done.await) })
    });
}

#[test]
fn hostile_wakers_of_the_hosts_access_strand_nobody() {
    in_all_weathers("host access", |device, stream, _| {
        let mut buffer = Buffer::<u32>::pinned(device, 64).unwrap();
        let from = Buffer::<u32>::new(device, 64).unwrap();
        stream.copy(&from, &mut buffer).unwrap();
        Box::pin(async move { drop(buffer.read().await.map(|_| ())) })
    });
}

#[test]
fn hostile_wakers_of_events_strand_nobody() {
    in_all_weathers("events", |_, stream, _| {
        let event = Event::new();
        event.record(stream).unwrap();
        Box::pin(async move { drop((&event).await) })
    });
}

#[test]
fn hostile_wakers_of_a_full_allocator_strand_nobody() {
    in_all_weathers("alloc_when_free", |device, stream, at| {
        // Of a heap each: who is first in one and never takes keeps nobody else waiting.
        let heap = Allocator::blocks(device, 256, 1).unwrap();
        let mut taken = heap.alloc::<u8>(stream, 256).unwrap();
        stream.fill(&mut taken, at as u8).unwrap();
        let other = Stream::named(device, "allocates").unwrap();
        drop(taken);
        Box::pin(async move { drop(heap.alloc_when_free::<u8>(&other, 256).await) })
    });
}

#[test]
fn hostile_wakers_of_a_chunk_hub_strand_nobody() {
    for manner in MANNERS {
        case_within_bound(&format!("chunk hub, {manner:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let hub = ChunkHub::<u32>::builder("hub").elements(4).host_envelopes(2).build().unwrap();
            let host = Device::host();
            let mut produce = hub.produce(&host).unwrap();
            let mut bad: Vec<_> = (0..2).map(|_| hub.peek(&host).unwrap()).collect();
            let good: Vec<_> = (0..2).map(|_| hub.peek(&host).unwrap()).collect();
            for link in &mut bad {
                // Asked twice, with other wakers: the first is replaced and dropped.
                for _ in 0..2 {
                    let (waker, _) = manner.waker(&device, &stream);
                    let mut next = Box::pin(link.next());
                    assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                    drop_each([waker]);
                }
            }
            let readers: Vec<_> = good
                .into_iter()
                .map(|mut link| thread::spawn(move || drop(block_on(link.next()).unwrap().unwrap())))
                .collect();
            block_on(produce.with(async |blank| blank.fill_from(&[1; 4]).await)).unwrap();
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            drop_each(bad);
        });
    }
}

/// `numbers -> double -> doubled`.
fn doubling(places: usize) -> (Flow, Ingress<u32>, Egress<u32>) {
    let mut flow = Flow::new("doubling");
    let double = flow.add("double", wakeline::operator::map(|n: u32| ready(Ok(2 * n))));
    let numbers = flow.ingress_with("numbers", double.input, Hub::bounded(places));
    let doubled = flow.egress("doubled", double.output);
    (flow, numbers, doubled)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn hostile_wakers_at_an_egress_leave_the_flow_whole() {
    for manner in MANNERS {
        case_within_bound(&format!("egress, {manner:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let (flow, numbers, mut doubled) = doubling(1);
            let runtime = runtime();
            let _inside = runtime.enter();
            let running = flow.spawn().unwrap();
            for _ in 0..2 {
                let (waker, _) = manner.waker(&device, &stream);
                let mut next = Box::pin(doubled.recv());
                let _ = next.as_mut().poll(&mut Context::from_waker(&waker));
                drop_each([waker]);
            }
            let seen = runtime.block_on(async move {
                let sends = tokio::spawn(async move {
                    for n in 0..10 {
                        numbers.send(n).await.unwrap();
                    }
                });
                let mut seen = Vec::new();
                while let Some(n) = doubled.recv().await {
                    seen.push(n);
                }
                sends.await.unwrap();
                drop_each([doubled]);
                seen
            });
            assert_eq!(seen, (0..10).map(|n| 2 * n).collect::<Vec<_>>());
            runtime.block_on(running).unwrap();
        });
    }
}

#[test]
fn hostile_wakers_at_an_ingress_leave_the_flow_whole() {
    for manner in MANNERS {
        for stop in [false, true] {
            case_within_bound(&format!("ingress, {manner:?}, stopped: {stop}"), move || {
                let device = Device::emulated(Emulated::new());
                let stream = Stream::new(&device).unwrap();
                let (flow, numbers, mut doubled) = doubling(1);
                let runtime = runtime();
                let _inside = runtime.enter();
                let running = flow.spawn().unwrap();
                // Nobody takes what comes out, so places run out.
                let mut bad: Vec<Waits> = Vec::new();
                for n in 0..8 {
                    let numbers = numbers.clone();
                    let mut send: Waits = Box::pin(async move { drop(numbers.send(n).await) });
                    let (waker, _) = manner.waker(&device, &stream);
                    if send.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                        bad.push(send);
                    }
                    drop_each([waker]);
                }
                if stop {
                    running.handle().stop();
                } else {
                    // They go on no more, and what they wait for goes to the next.
                    drop_each(bad.drain(..));
                    let sends = numbers.clone();
                    let sent = runtime.spawn(async move { sends.send(100).await.unwrap() });
                    runtime.block_on(async { while doubled.recv().await != Some(200) {} });
                    runtime.block_on(sent).unwrap();
                }
                drop(numbers);
                runtime.block_on(async move { while doubled.recv().await.is_some() {} });
                runtime.block_on(running).unwrap();
                drop_each(bad);
            });
        }
    }
}

#[test]
fn hostile_wakers_of_a_running_flow_leave_it_whole() {
    for manner in MANNERS {
        case_within_bound(&format!("running, {manner:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let (flow, numbers, mut doubled) = doubling(1);
            let runtime = runtime();
            let _inside = runtime.enter();
            let mut running = Box::pin(flow.spawn().unwrap());
            for _ in 0..2 {
                let (waker, _) = manner.waker(&device, &stream);
                assert!(running.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                drop_each([waker]);
            }
            runtime.block_on(async { numbers.send(1).await.unwrap() });
            drop(numbers);
            assert_eq!(runtime.block_on(doubled.recv()), Some(2));
            assert_eq!(runtime.block_on(doubled.recv()), None);
            runtime.block_on(running).unwrap();
        });
    }
}

#[test]
fn hostile_wakers_of_a_service_strand_no_other_caller() {
    for manner in MANNERS {
        case_within_bound(&format!("service, {manner:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let mut flow = Flow::new("service");
            let double = flow.add("double", wakeline::operator::map(|n: u32| ready(Ok(2 * n))));
            let service = flow.service_with("service", double.input, double.output, Hub::bounded(2));
            let runtime = runtime();
            let _inside = runtime.enter();
            let running = flow.spawn().unwrap();
            let mut bad: Vec<Waits> = Vec::new();
            for n in 0..6 {
                let service = service.clone();
                let mut ask: Waits = Box::pin(async move { drop(service.ask(n).await) });
                let (waker, _) = manner.waker(&device, &stream);
                if ask.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                    bad.push(ask);
                }
                drop_each([waker]);
            }
            drop_each(bad);
            for n in 0..4 {
                assert_eq!(runtime.block_on(service.ask(n)).unwrap(), 2 * n);
            }
            drop(service);
            runtime.block_on(running).unwrap();
        });
    }
}

/// A device that is lost, and nothing has noticed: its fault came on a worker, and no call has met it since.
///
/// The buffers are to be kept until it may be noticed: a drop of theirs would.
fn lost_and_not_noticed(held: impl FnOnce(&Device, &Stream)) -> (Device, Stream, [Buffer<u32>; 2]) {
    let device = Device::emulated(Emulated::new().workers(4).faults(Faults::new().fail_copy(1)));
    let stream = Stream::named(&device, "faults").unwrap();
    let hold = hold(&stream);
    let (from, mut to) = (Buffer::<u32>::new(&device, 4).unwrap(), Buffer::<u32>::new(&device, 4).unwrap());
    stream.copy(&from, &mut to).unwrap();
    held(&device, &stream);
    // Dropped uncalled when the device faults.
    let (alive, faulted) = mpsc::channel::<()>();
    stream.host_function(move || drop(alive)).unwrap();
    drop(hold);
    assert!(faulted.recv().is_err());
    (device, stream, [from, to])
}

/// What a drop does. The drop of a buffer comes first: where a lock is held, that hangs.
const OF_DROPS: [Manner; 4] = [Manner::DropsABuffer, Manner::DropsAStream, Manner::CallsBack, Manner::Panics];

/// A host function that captured a buffer is refused, and its drop takes the stream's lock.
#[test]
fn a_host_function_that_is_refused_is_dropped_without_the_streams_lock() {
    for manner in OF_DROPS {
        case_within_bound(&format!("a refused host function, {manner:?}"), move || {
            let mut value = None;
            let mut waits: Option<Waits> = None;
            let (device, stream, _kept) = lost_and_not_noticed(|device, stream| {
                value = Some(manner.value(device, stream));
                let done = stream.completed();
                waits = Some(Box::pin(async move { drop(done.await) }));
            });
            let value = value.unwrap();
            let noticed = device.lost().is_some();
            let error = stream.host_function(move || drop(value)).unwrap_err();
            assert!(error.is_device_lost() && !noticed, "{error}");
            block_on(waits.unwrap());
            assert!(device.lost().is_some());
        });
    }
}

#[test]
fn a_host_callback_that_is_refused_is_dropped_without_the_streams_lock() {
    for manner in OF_DROPS {
        case_within_bound(&format!("a refused host callback, {manner:?}"), move || {
            let mut value = None;
            let (device, stream, _kept) =
                lost_and_not_noticed(|device, stream| value = Some(manner.value(device, stream)));
            let value = value.unwrap();
            let noticed = device.lost().is_some();
            let error = stream.host_callback(move || _ = &value).unwrap_err();
            assert!(error.is_device_lost() && !noticed, "{error}");
            assert!(block_on(stream.completed()).is_err());
            assert!(device.lost().is_some());
        });
    }
}

/// Host functions that wait in a stream when its device faults are dropped by the worker, whatever their drops do.
#[test]
fn what_a_fault_drops_in_the_queue_may_be_hostile() {
    for manner in OF_DROPS {
        case_within_bound(&format!("dropped by a fault, {manner:?}"), move || {
            let (device, stream, _kept) = lost_and_not_noticed(|device, stream| {
                let beside = Stream::named(device, "beside").unwrap();
                for _ in 0..3 {
                    let value = manner.value(device, &beside);
                    stream.host_function(move || drop(value)).unwrap();
                }
            });
            assert!(block_on(stream.completed()).is_err());
            // The workers live: another device's stream passes.
            let other = Device::emulated(Emulated::new());
            block_on(Stream::new(&other).unwrap().completed()).unwrap();
            drop(device);
        });
    }
}

/// A graph's callback, and its memory, go with the exec, whatever their drops do.
#[test]
fn what_a_graph_has_kept_may_be_hostile() {
    for manner in OF_DROPS {
        for fault in [false, true] {
            case_within_bound(&format!("a graph's callback, {manner:?}, after a fault: {fault}"), move || {
                let faults = if fault { Faults::new().fail_copy(1) } else { Faults::new() };
                let device = Device::emulated(Emulated::new().workers(4).faults(faults));
                let (stream, beside) = (Stream::new(&device).unwrap(), Stream::named(&device, "beside").unwrap());
                let value = manner.value(&device, &beside);
                let captured = Graph::capture(&device, |capture| capture.stream().host_callback(move || _ = &value));
                let exec = captured.unwrap().0.instantiate().unwrap();
                exec.launch(&stream).unwrap();
                let (from, mut to) = (Buffer::<u32>::new(&device, 4).unwrap(), Buffer::<u32>::new(&device, 4).unwrap());
                stream.copy(&from, &mut to).unwrap();
                let done = stream.completed();
                drop_each([exec]);
                assert_eq!(block_on(done).is_err(), fault);
            });
        }
    }
}

/// A waker may drop the flow that wakes it, with all of its handles.
#[test]
fn a_waker_may_drop_the_flow() {
    case_within_bound("a waker that drops the flow", || {
        let (flow, numbers, mut doubled) = doubling(1);
        let runtime = runtime();
        let _inside = runtime.enter();
        let running = flow.spawn().unwrap();
        let (dropped, wait) = mpsc::channel();
        let handle = running.handle();
        let sender = numbers.clone();
        let hostile = Hostile {
            woken: Mutex::new(Some(Box::new(move || {
                drop((running, numbers));
                let _ = dropped.send(());
            }))),
            dropped: Mutex::new(None),
            was_woken: Arc::default(),
        };
        let waker: Waker = Arc::new(hostile).into();
        {
            let mut next = Box::pin(doubled.recv());
            assert!(matches!(next.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending));
        }
        runtime.block_on(async { drop(sender.send(1).await) });
        wait.recv().unwrap();
        drop(sender);
        runtime.block_on(async move { while doubled.recv().await.is_some() {} });
        drop(handle);
    });
}

#[derive(Ports)]
struct PilesPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 64)]
    out: Output<Envelope<u32>>,
}

/// Polls for a blank envelope that is not there, with another waker each time.
#[derive(Clone)]
struct Piles;

impl Operator for Piles {
    type Ports = PilesPorts;

    async fn compute(&mut self, ports: &mut PilesPorts, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let mut kept = Vec::new();
        while let Poll::Ready(blank) = futures::poll!(std::pin::pin!(ports.out.blank())) {
            kept.push(blank?);
        }
        let idle = Arc::new(());
        // Of one future, and of many.
        let mut one = Box::pin(ports.out.blank());
        for _ in 0..16 {
            // Wakers of different allocations: none wakes another's task.
            let waker = Waker::from(Arc::new(Shares(idle.clone())));
            assert!(one.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert!(Arc::strong_count(&idle) <= 2, "one waker is kept");
        drop(one);
        assert_eq!(Arc::strong_count(&idle), 1, "it goes with its future");
        for _ in 0..16 {
            let waker = Waker::from(Arc::new(Shares(idle.clone())));
            let mut blank = Box::pin(ports.out.blank());
            assert!(blank.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(Arc::strong_count(&idle), 1);
        // One that waits again is woken.
        drop(kept.pop());
        drop(ports.out.blank().await?);
        Ok(())
    }
}

/// A waker that shares something, to see whether it is there.
struct Shares(#[allow(dead_code, reason = "counted")] Arc<()>);

impl Wake for Shares {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn wakers_of_a_workers_blanks_do_not_pile_up() {
    case_within_bound("wakers of blanks", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut flow = Flow::new("flow");
            let mut once = Some(1);
            let source = flow.add("source", wakeline::operator::source(move || ready(Ok(once.take()))));
            let piles = flow.add("piles", wakeline::operator::concurrent(1, Piles));
            let end = flow.add("end", wakeline::operator::sink(async |_: Envelope<u32>| Ok(())));
            flow.connect(source.output, piles.input);
            flow.connect(piles.out, end.input);
            flow.run().await.unwrap();
        });
    });
}

/// A task of an executor that ends a task where it is woken: its waker drops its own future.
struct EndsWhenWoken {
    future: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
    ended: Arc<AtomicUsize>,
}

impl Wake for EndsWhenWoken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let future = lock(&self.future).take();
        self.ended.fetch_add(usize::from(future.is_some()), Ordering::SeqCst);
        drop(future);
    }
}

/// Wakes the first of so many tasks that wait side by side, each of which is woken by the end of the one before it.
fn end_one_after_the_other<F: Future<Output = ()> + Send + 'static>(count: usize, mut wait: impl FnMut() -> F) {
    let ended = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..count)
        .map(|_| {
            let task = Arc::new(EndsWhenWoken { future: Mutex::default(), ended: ended.clone() });
            let mut future: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(wait());
            assert!(future.as_mut().poll(&mut Context::from_waker(&task.clone().into())).is_pending());
            *lock(&task.future) = Some(future);
            task
        })
        .collect();
    tasks[0].wake_by_ref();
    assert_eq!(ended.load(Ordering::SeqCst), count, "all have ended when the first wake has returned");
}

/// Futures beside each other. A wake within each wake would use up the stack.
const SIDE_BY_SIDE: usize = 20_000;

#[test]
fn a_chain_of_wakers_at_a_stream_has_a_stack_of_any_size() {
    case_within_bound("wakers at a stream", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        stream.set_completion_mode(CompletionMode::Quiet);
        let go = hold(&stream);
        end_one_after_the_other(SIDE_BY_SIDE, || stream.completed().map(|done| done.unwrap()));
        drop(go);
        block_on(stream.completed()).unwrap();
    });
}

#[test]
fn a_chain_of_wakers_at_an_allocator_has_a_stack_of_any_size() {
    case_within_bound("wakers at an allocator", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let blocks = Allocator::blocks(&device, 256, 1).unwrap();
        let taken = blocks.alloc::<u8>(&stream, 1).unwrap();
        end_one_after_the_other(SIDE_BY_SIDE, || {
            let (blocks, stream) = (blocks.clone(), stream.clone());
            async move { _ = blocks.alloc_when_free::<u8>(&stream, 1).await }
        });
        drop(taken);
        block_on(blocks.alloc_when_free::<u8>(&stream, 1)).unwrap();
    });
}

/// Each drops a buffer when it is woken, and so wakes the next.
#[test]
fn a_chain_of_wakers_that_drop_buffers_has_a_stack_of_any_size() {
    const CHAIN: usize = 400;
    let body = || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let allocators: Vec<_> = (0..CHAIN).map(|_| Allocator::blocks(&device, 256, 1).unwrap()).collect();
        let mut taken: Vec<_> = allocators.iter().map(|one| one.alloc::<u8>(&stream, 1).unwrap()).collect();
        let first = taken.remove(0);
        let wakers: Vec<(Waker, _)> = taken
            .into_iter()
            .map(|buffer| {
                let was_woken = Arc::new(AtomicBool::new(false));
                let woken: Deed = Box::new(|| drop(buffer));
                let (woken, dropped) = (Mutex::new(Some(woken)), Mutex::default());
                (Arc::new(Hostile { woken, dropped, was_woken: was_woken.clone() }).into(), was_woken)
            })
            .collect();
        let mut waits: Vec<_> = allocators.iter().map(|one| Box::pin(one.alloc_when_free::<u8>(&stream, 1))).collect();
        for (wait, (waker, _)) in waits.iter_mut().zip(&wakers) {
            assert!(wait.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
        }
        drop(first);
        let all = wakers.iter().all(|(_, woken)| woken.load(Ordering::SeqCst));
        assert!(all, "all were woken when the drop has returned");
    };
    case_within_bound("wakers that drop buffers", move || {
        thread::Builder::new().stack_size(256 << 10).spawn(body).unwrap().join().unwrap();
    });
}

/// The task of another, whose executor goes on with it where it is woken: it allocates, enqueues and launches a graph.
struct GoesOn {
    device: Device,
    stream: Stream,
    exec: Exec,
    did: Mutex<Vec<Result<Buffer<u8>>>>,
}

impl Wake for GoesOn {
    fn wake(self: Arc<Self>) {
        let fill = || {
            let mut buffer = Buffer::new(&self.device, 1 << 20)?;
            self.stream.fill(&mut buffer, 1)?;
            self.exec.launch(&self.stream)?;
            Ok(buffer)
        };
        let did = fill();
        lock(&self.did).push(did);
    }
}

#[test]
fn a_task_that_is_woken_within_a_capture_is_no_part_of_it() {
    case_within_bound("woken in a capture", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let mut shared = Buffer::from_slice(&stream, &[0_u8; 4]).unwrap();
        let (theirs, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 7)).unwrap();
        let exec = theirs.instantiate().unwrap();
        let task = Arc::new(GoesOn { device: device.clone(), stream: stream.clone(), exec, did: Mutex::default() });
        let slow = Stream::new(&device).unwrap();
        slow.set_completion_mode(CompletionMode::Quiet);
        let held = hold(&slow);
        let mut first = Some(Box::pin(slow.completed()));
        assert!(first.as_mut().unwrap().as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let mut second = Box::pin(slow.completed());
        assert!(second.as_mut().poll(&mut Context::from_waker(&Waker::from(task.clone()))).is_pending());
        let (graph, own) = Graph::capture(&device, |capture| {
            capture.stream().fill(&mut shared, 1)?;
            // A wait is given up, and the next one's task is woken, here.
            drop(first.take());
            // Still in it.
            Buffer::<u8>::new(&device, 4096)
        })
        .unwrap();
        let did = std::mem::take(&mut *lock(&task.did));
        assert!(!did.is_empty());
        let theirs: Vec<_> = did.into_iter().map(|did| did.expect("it is no part of the capture")).collect();
        stream.synchronize_blocking().unwrap();
        drop(theirs);
        assert_eq!(graph.own_bytes(), 0, "of another's task");
        drop(own);
        assert_eq!(graph.own_bytes(), 4096);
        drop(held);
        slow.synchronize_blocking().unwrap();
    });
}
