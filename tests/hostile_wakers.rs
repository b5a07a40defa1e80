//! Hostile user code wherever the library stores it: wakers and closures that panic, call back into the library, or drop a
//! buffer, a stream or a flow, when they are woken or dropped. The other waiters must resolve.
//!
//! Each body runs on its own thread. If it hangs, a watchdog names it and aborts the process.

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
    Egress, Ingress, Stream,
    device::{Emulated, Faults},
    graph::{Exec, Graph},
    memory::Allocator,
    prelude::*,
    stream::{CompletionMode, Event},
};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks the stream until the returned sender is dropped.
#[must_use]
fn block(stream: &Stream) -> mpsc::Sender<()> {
    let (go, held) = mpsc::channel::<()>();
    stream.host_function(move || _ = held.recv()).unwrap();
    go
}

type Action = Box<dyn FnOnce() + Send>;

/// A waker with one action for its first wake and another for its drop.
struct Hostile {
    woken: Mutex<Option<Action>>,
    dropped: Mutex<Option<Action>>,
    was_woken: Arc<AtomicBool>,
}

impl Wake for Hostile {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.was_woken.store(true, Ordering::SeqCst);
        let action = lock(&self.woken).take();
        if let Some(action) = action {
            action();
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let action = lock(&self.dropped).take();
        if let Some(action) = action {
            action();
        }
    }
}

/// What hostile code does, when it is woken or when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    Panics,
    CallsBack,
    DropsABuffer,
    DropsAStream,
    PanicsWhenDropped,
    CallsBackWhenDropped,
    DropsABufferWhenDropped,
    DropsAStreamWhenDropped,
}

const BEHAVIOURS: [Behaviour; 8] = [
    Behaviour::Panics,
    Behaviour::CallsBack,
    Behaviour::DropsABuffer,
    Behaviour::DropsAStream,
    Behaviour::PanicsWhenDropped,
    Behaviour::CallsBackWhenDropped,
    Behaviour::DropsABufferWhenDropped,
    Behaviour::DropsAStreamWhenDropped,
];

/// A buffer with pending work on a stream that it was not allocated on: its drop records that work, under the stream's lock.
fn in_use(device: &Device, stream: &Stream) -> Buffer<u32> {
    let mut buffer = Buffer::new(device, 64).unwrap();
    stream.fill(&mut buffer, 7).unwrap();
    buffer
}

/// Calls the library for memory, work, completions, events and streams.
fn call_back(device: &Device, stream: &Stream) {
    let _ = Buffer::<u32>::new(device, 64).and_then(|mut buffer| stream.fill(&mut buffer, 1));
    let _ = stream.host_function(|| ());
    let mut done = Box::pin(stream.completed());
    let _ = done.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let _ = Event::new().record(stream);
    let _ = Stream::new(device);
}

impl Behaviour {
    fn action(self, device: &Device, stream: &Stream) -> Action {
        let (device, stream) = (device.clone(), stream.clone());
        match self {
            Self::Panics | Self::PanicsWhenDropped => Box::new(|| panic!("hostile code")),
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

    fn acts_when_dropped(self) -> bool {
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
        let (woken, dropped) = match self.acts_when_dropped() {
            true => (None, Some(self.action(device, stream))),
            false => (Some(self.action(device, stream)), None),
        };
        let hostile = Hostile { woken: Mutex::new(woken), dropped: Mutex::new(dropped), was_woken: was_woken.clone() };
        (Arc::new(hostile).into(), was_woken)
    }

    /// A value whose drop performs the action.
    fn value(self, device: &Device, stream: &Stream) -> Hostile {
        Hostile {
            woken: Mutex::new(None),
            dropped: Mutex::new(Some(self.action(device, stream))),
            was_woken: Arc::default(),
        }
    }
}

type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Makes four futures of the same kind, of which two are polled with hostile wakers. The two honest waiters must resolve.
///
/// `wait` makes the future of a waiter. All futures resolve once the stream goes on.
fn two_honest_and_two_hostile(
    what: &str,
    faults: Faults,
    from_a_thread_that_ends: bool,
    wait: impl Fn(&Device, &Stream, usize) -> BoxFuture + Send + Copy + 'static,
) {
    for behaviour in BEHAVIOURS {
        let faults = faults.clone();
        let what = format!("{what}, {behaviour:?}");
        case_within_bound(&what.clone(), move || {
            let device = Device::emulated(Emulated::new().workers(4).faults(faults));
            let stream = Stream::named(&device, "held").unwrap();
            let beside = Stream::named(&device, "beside").unwrap();
            let held = block(&stream);
            // `fail_copy` makes this copy fail once the stream goes on.
            let (from, mut to) = (Buffer::<u32>::new(&device, 4).unwrap(), Buffer::<u32>::new(&device, 4).unwrap());
            stream.copy(&from, &mut to).unwrap();
            let mut waits: Vec<BoxFuture> = (0..4).map(|at| wait(&device, &stream, at)).collect();
            let mut hostile = Vec::new();
            for wait in [0, 2] {
                let (waker, _) = behaviour.waker(&device, &beside);
                // Some of these futures register no waker at their first poll.
                let _ = waits[wait].as_mut().poll(&mut Context::from_waker(&waker));
                hostile.push(waker);
            }
            let honest: Vec<BoxFuture> = {
                let mut all: Vec<Option<BoxFuture>> = waits.drain(..).map(Some).collect();
                let honest = [1, 3].map(|at| all[at].take().unwrap());
                let of_hostile: Vec<BoxFuture> = all.into_iter().flatten().collect();
                if from_a_thread_that_ends {
                    // The exit of a thread drops the hostile futures.
                    thread_local!(static DROPPED_AT_EXIT: Mutex<Vec<BoxFuture>> = const { Mutex::new(Vec::new()) });
                    thread::spawn(move || DROPPED_AT_EXIT.with(|kept| lock(kept).extend(of_hostile))).join().unwrap();
                } else {
                    waits = of_hostile;
                }
                honest.into()
            };
            // The library then holds the last clones of the hostile wakers.
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
            drop_each(waits);
        });
    }
}

/// Drops every value, even if the drop of another one panics.
fn drop_each<T>(values: impl IntoIterator<Item = T>) {
    for value in values {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(value)));
    }
}

/// With and without a fault while the futures wait, and with hostile futures that a thread's exit drops, or that stay.
fn with_and_without_a_fault(what: &str, wait: impl Fn(&Device, &Stream, usize) -> BoxFuture + Send + Copy + 'static) {
    for ends in [false, true] {
        two_honest_and_two_hostile(&format!("{what}, thread ends: {ends}"), Faults::new(), ends, wait);
        two_honest_and_two_hostile(
            &format!("{what}, after a fault, thread ends: {ends}"),
            Faults::new().fail_copy(1),
            ends,
            wait,
        );
    }
}

#[test]
fn hostile_wakers_of_completions_strand_no_other_waiter() {
    with_and_without_a_fault("completed", |_, stream, _| {
        let done = stream.completed();
        Box::pin(async move { drop(done.await) })
    });
}

#[test]
fn hostile_wakers_of_several_tickets_strand_no_other_waiter() {
    with_and_without_a_fault("tickets", |_, stream, _| {
        let _ = stream.host_function(|| ());
        let done = stream.completed();
        Box::pin(async move { drop(done.await) })
    });
}

#[test]
fn hostile_wakers_of_host_access_strand_no_other_waiter() {
    with_and_without_a_fault("host access", |device, stream, _| {
        let mut buffer = Buffer::<u32>::pinned(device, 64).unwrap();
        let from = Buffer::<u32>::new(device, 64).unwrap();
        stream.copy(&from, &mut buffer).unwrap();
        Box::pin(async move { drop(buffer.read().await.map(|_| ())) })
    });
}

#[test]
fn hostile_wakers_of_events_strand_no_other_waiter() {
    with_and_without_a_fault("events", |_, stream, _| {
        let event = Event::new();
        event.record(stream).unwrap();
        Box::pin(async move { drop((&event).await) })
    });
}

#[test]
fn hostile_wakers_of_a_full_allocator_strand_no_other_waiter() {
    with_and_without_a_fault("alloc_when_free", |device, stream, at| {
        // One heap for each future: a hostile first waiter never takes its memory and would block the others.
        let heap = Allocator::blocks(device, 256, 1).unwrap();
        let mut taken = heap.alloc::<u8>(stream, 256).unwrap();
        stream.fill(&mut taken, at as u8).unwrap();
        let other = Stream::named(device, "allocates").unwrap();
        drop(taken);
        Box::pin(async move { drop(heap.alloc_when_free::<u8>(&other, 256).await) })
    });
}

#[test]
fn hostile_wakers_of_a_chunk_hub_strand_no_other_waiter() {
    for behaviour in BEHAVIOURS {
        case_within_bound(&format!("chunk hub, {behaviour:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let hub = ChunkHub::<u32>::builder("hub").elements(4).host_envelopes(2).build().unwrap();
            let host = Device::host();
            let mut produce = hub.produce(&host).unwrap();
            let mut bad: Vec<_> = (0..2).map(|_| hub.peek(&host).unwrap()).collect();
            let good: Vec<_> = (0..2).map(|_| hub.peek(&host).unwrap()).collect();
            for link in &mut bad {
                // The second poll replaces and drops the first waker.
                for _ in 0..2 {
                    let (waker, _) = behaviour.waker(&device, &stream);
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
    let numbers = flow.ingress_with("numbers", double.input, HubOptions::bounded(places));
    let doubled = flow.egress("doubled", double.output);
    (flow, numbers, doubled)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn hostile_wakers_at_an_egress_do_not_harm_the_flow() {
    for behaviour in BEHAVIOURS {
        case_within_bound(&format!("egress, {behaviour:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let (flow, numbers, mut doubled) = doubling(1);
            let runtime = runtime();
            let _inside = runtime.enter();
            let running = flow.spawn().unwrap();
            for _ in 0..2 {
                let (waker, _) = behaviour.waker(&device, &stream);
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
fn hostile_wakers_at_an_ingress_do_not_harm_the_flow() {
    for behaviour in BEHAVIOURS {
        for stop in [false, true] {
            case_within_bound(&format!("ingress, {behaviour:?}, stopped: {stop}"), move || {
                let device = Device::emulated(Emulated::new());
                let stream = Stream::new(&device).unwrap();
                let (flow, numbers, mut doubled) = doubling(1);
                let runtime = runtime();
                let _inside = runtime.enter();
                let running = flow.spawn().unwrap();
                // The egress is not read, so the queues fill up.
                let mut bad: Vec<BoxFuture> = Vec::new();
                for n in 0..8 {
                    let numbers = numbers.clone();
                    let mut send: BoxFuture = Box::pin(async move { drop(numbers.send(n).await) });
                    let (waker, _) = behaviour.waker(&device, &stream);
                    if send.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                        bad.push(send);
                    }
                    drop_each([waker]);
                }
                if stop {
                    running.handle().stop();
                } else {
                    // The places that the hostile senders wait for pass to the next sender.
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
fn hostile_wakers_of_a_running_flow_do_not_harm_it() {
    for behaviour in BEHAVIOURS {
        case_within_bound(&format!("running, {behaviour:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let (flow, numbers, mut doubled) = doubling(1);
            let runtime = runtime();
            let _inside = runtime.enter();
            let mut running = Box::pin(flow.spawn().unwrap());
            for _ in 0..2 {
                let (waker, _) = behaviour.waker(&device, &stream);
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
    for behaviour in BEHAVIOURS {
        case_within_bound(&format!("service, {behaviour:?}"), move || {
            let device = Device::emulated(Emulated::new());
            let stream = Stream::new(&device).unwrap();
            let mut flow = Flow::new("service");
            let double = flow.add("double", wakeline::operator::map(|n: u32| ready(Ok(2 * n))));
            let service = flow.service_with("service", double.input, double.output, HubOptions::bounded(2));
            let runtime = runtime();
            let _inside = runtime.enter();
            let running = flow.spawn().unwrap();
            let mut bad: Vec<BoxFuture> = Vec::new();
            for n in 0..6 {
                let service = service.clone();
                let mut ask: BoxFuture = Box::pin(async move { drop(service.ask(n).await) });
                let (waker, _) = behaviour.waker(&device, &stream);
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

/// A lost device whose loss is not known to the host: the fault came on a worker, and no call has observed it since.
///
/// The caller must keep the buffers until the loss may be noticed, since their drop would observe it.
fn lost_unnoticed(enqueue: impl FnOnce(&Device, &Stream)) -> (Device, Stream, [Buffer<u32>; 2]) {
    let device = Device::emulated(Emulated::new().workers(4).faults(Faults::new().fail_copy(1)));
    let stream = Stream::named(&device, "faults").unwrap();
    let blocked = block(&stream);
    let (from, mut to) = (Buffer::<u32>::new(&device, 4).unwrap(), Buffer::<u32>::new(&device, 4).unwrap());
    stream.copy(&from, &mut to).unwrap();
    enqueue(&device, &stream);
    let (alive, faulted) = mpsc::channel::<()>();
    stream.host_function(move || drop(alive)).unwrap();
    drop(blocked);
    assert!(faulted.recv().is_err());
    (device, stream, [from, to])
}

/// What a drop does. The drop of a buffer comes first, since it hangs if a lock is held.
const WHEN_DROPPED: [Behaviour; 4] =
    [Behaviour::DropsABuffer, Behaviour::DropsAStream, Behaviour::CallsBack, Behaviour::Panics];

/// The drop of a host function that captured a buffer acquires the stream's lock.
#[test]
fn a_refused_host_function_is_dropped_without_the_stream_lock() {
    for behaviour in WHEN_DROPPED {
        case_within_bound(&format!("a refused host function, {behaviour:?}"), move || {
            let mut value = None;
            let mut waits: Option<BoxFuture> = None;
            let (device, stream, _kept) = lost_unnoticed(|device, stream| {
                value = Some(behaviour.value(device, stream));
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
fn a_refused_host_callback_is_dropped_without_the_stream_lock() {
    for behaviour in WHEN_DROPPED {
        case_within_bound(&format!("a refused host callback, {behaviour:?}"), move || {
            let mut value = None;
            let (device, stream, _kept) =
                lost_unnoticed(|device, stream| value = Some(behaviour.value(device, stream)));
            let value = value.unwrap();
            let noticed = device.lost().is_some();
            let error = stream.host_callback(move || _ = &value).unwrap_err();
            assert!(error.is_device_lost() && !noticed, "{error}");
            assert!(block_on(stream.completed()).is_err());
            assert!(device.lost().is_some());
        });
    }
}

#[test]
fn host_functions_that_a_fault_discards_may_be_hostile() {
    for behaviour in WHEN_DROPPED {
        case_within_bound(&format!("dropped by a fault, {behaviour:?}"), move || {
            let (device, stream, _kept) = lost_unnoticed(|device, stream| {
                let beside = Stream::named(device, "beside").unwrap();
                for _ in 0..3 {
                    let value = behaviour.value(device, &beside);
                    stream.host_function(move || drop(value)).unwrap();
                }
            });
            assert!(block_on(stream.completed()).is_err());
            // The workers still run: a stream of another device completes.
            let other = Device::emulated(Emulated::new());
            block_on(Stream::new(&other).unwrap().completed()).unwrap();
            drop(device);
        });
    }
}

/// A graph's callback and memory are dropped with the exec.
#[test]
fn a_callback_that_a_graph_drops_may_be_hostile() {
    for behaviour in WHEN_DROPPED {
        for fault in [false, true] {
            case_within_bound(&format!("a graph's callback, {behaviour:?}, after a fault: {fault}"), move || {
                let faults = if fault { Faults::new().fail_copy(1) } else { Faults::new() };
                let device = Device::emulated(Emulated::new().workers(4).faults(faults));
                let (stream, beside) = (Stream::new(&device).unwrap(), Stream::named(&device, "beside").unwrap());
                let value = behaviour.value(&device, &beside);
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
struct PollsBlanksPorts {
    #[input]
    input: Input<u32>,
    #[output(envelope_bytes = 64)]
    out: Output<Envelope<u32>>,
}

/// Polls for a blank envelope while none is free, with a different waker each time.
#[derive(Clone)]
struct PollsBlanks;

impl Operator for PollsBlanks {
    type Ports = PollsBlanksPorts;

    async fn compute(&mut self, ports: &mut PollsBlanksPorts, _cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let mut kept = Vec::new();
        while let Poll::Ready(blank) = futures::poll!(std::pin::pin!(ports.out.blank())) {
            kept.push(blank?);
        }
        let idle = Arc::new(());
        // One future first, then many.
        let mut one = Box::pin(ports.out.blank());
        for _ in 0..16 {
            // Distinct allocations: no waker wakes the task of another.
            let waker = Waker::from(Arc::new(CountedWaker(idle.clone())));
            assert!(one.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert!(Arc::strong_count(&idle) <= 2, "more than one waker is stored");
        drop(one);
        assert_eq!(Arc::strong_count(&idle), 1, "a dropped future has left its waker");
        for _ in 0..16 {
            let waker = Waker::from(Arc::new(CountedWaker(idle.clone())));
            let mut blank = Box::pin(ports.out.blank());
            assert!(blank.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(Arc::strong_count(&idle), 1);
        // A new future is still woken.
        drop(kept.pop());
        drop(ports.out.blank().await?);
        Ok(())
    }
}

/// A waker whose clones are counted, to see whether one is stored.
struct CountedWaker(#[allow(dead_code, reason = "counted")] Arc<()>);

impl Wake for CountedWaker {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn wakers_that_wait_for_blanks_do_not_accumulate() {
    case_within_bound("wakers of blanks", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut flow = Flow::new("flow");
            let mut once = Some(1);
            let source = flow.add("source", wakeline::operator::source(move || ready(Ok(once.take()))));
            let piles = flow.add("piles", wakeline::operator::concurrent(1, PollsBlanks));
            let end = flow.add("end", wakeline::operator::sink(async |_: Envelope<u32>| Ok(())));
            flow.connect(source.output, piles.input);
            flow.connect(piles.out, end.input);
            flow.run().await.unwrap();
        });
    });
}

/// A task whose waker drops the task's own future.
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

/// Polls `count` futures with a task each, and wakes the first task. The drop of each future wakes the next task.
fn end_in_a_chain<F: Future<Output = ()> + Send + 'static>(count: usize, mut wait: impl FnMut() -> F) {
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
    assert_eq!(ended.load(Ordering::SeqCst), count, "all tasks have ended when the first wake returns");
}

/// The number of futures that wait at once. That many nested wakes would overflow the stack.
const WAITS_AT_ONCE: usize = 20_000;

#[test]
fn a_chain_of_wakers_at_a_stream_does_not_overflow_the_stack() {
    case_within_bound("wakers at a stream", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        stream.set_completion_mode(CompletionMode::Quiet);
        let go = block(&stream);
        end_in_a_chain(WAITS_AT_ONCE, || stream.completed().map(|done| done.unwrap()));
        drop(go);
        block_on(stream.completed()).unwrap();
    });
}

#[test]
fn a_chain_of_wakers_at_an_allocator_does_not_overflow_the_stack() {
    case_within_bound("wakers at an allocator", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let blocks = Allocator::blocks(&device, 256, 1).unwrap();
        let taken = blocks.alloc::<u8>(&stream, 1).unwrap();
        end_in_a_chain(WAITS_AT_ONCE, || {
            let (blocks, stream) = (blocks.clone(), stream.clone());
            async move { _ = blocks.alloc_when_free::<u8>(&stream, 1).await }
        });
        drop(taken);
        block_on(blocks.alloc_when_free::<u8>(&stream, 1)).unwrap();
    });
}

#[test]
fn a_chain_of_wakers_that_drop_buffers_does_not_overflow_the_stack() {
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
                let woken: Action = Box::new(|| drop(buffer));
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
        assert!(all, "all wakers were called when the drop returns");
    };
    case_within_bound("wakers that drop buffers", move || {
        thread::Builder::new().stack_size(256 << 10).spawn(body).unwrap().join().unwrap();
    });
}

/// A task that its waker runs at once: it allocates, enqueues and launches a graph.
struct RunsWhenWoken {
    device: Device,
    stream: Stream,
    exec: Exec,
    results: Mutex<Vec<Result<Buffer<u8>>>>,
}

impl Wake for RunsWhenWoken {
    fn wake(self: Arc<Self>) {
        let fill = || {
            let mut buffer = Buffer::new(&self.device, 1 << 20)?;
            self.stream.fill(&mut buffer, 1)?;
            self.exec.launch(&self.stream)?;
            Ok(buffer)
        };
        let result = fill();
        lock(&self.results).push(result);
    }
}

#[test]
fn work_of_a_task_woken_during_a_capture_is_not_captured() {
    case_within_bound("woken in a capture", || {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let mut shared = Buffer::from_slice(&stream, &[0_u8; 4]).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut shared, 7)).unwrap();
        let exec = graph.instantiate().unwrap();
        let task =
            Arc::new(RunsWhenWoken { device: device.clone(), stream: stream.clone(), exec, results: Mutex::default() });
        let slow = Stream::new(&device).unwrap();
        slow.set_completion_mode(CompletionMode::Quiet);
        let held = block(&slow);
        let mut first = Some(Box::pin(slow.completed()));
        assert!(first.as_mut().unwrap().as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let mut second = Box::pin(slow.completed());
        assert!(second.as_mut().poll(&mut Context::from_waker(&Waker::from(task.clone()))).is_pending());
        let (graph, own) = Graph::capture(&device, |capture| {
            capture.stream().fill(&mut shared, 1)?;
            // Dropping this wait wakes the task of the next one, within the capture.
            drop(first.take());
            // This thread still captures.
            Buffer::<u8>::new(&device, 4096)
        })
        .unwrap();
        let results = std::mem::take(&mut *lock(&task.results));
        assert!(!results.is_empty());
        let buffers: Vec<_> = results.into_iter().map(|result| result.expect("it is not captured")).collect();
        stream.synchronize_blocking().unwrap();
        drop(buffers);
        assert_eq!(graph.own_bytes(), 0, "the task's memory is not the graph's");
        drop(own);
        assert_eq!(graph.own_bytes(), 4096);
        drop(held);
        slow.synchronize_blocking().unwrap();
    });
}
