//! No call waits because another thread launches faster than the device works.
//!
//! A driver's queue for a stream is bounded, and a call that finds it full blocks. Here a host function blocks a
//! stream, one thread keeps that stream's queue full, and another thread drops, allocates, awaits and launches. All of
//! its calls must return while the stream is blocked. The tests run on a GPU and on an emulated device with bounded
//! queues.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Wake, Waker},
    thread::JoinHandle,
    time::Duration,
};

use common::*;
use wakeline::{
    Stream,
    device::Emulated,
    graph::{Exec, Graph},
    memory::Allocator,
    prelude::*,
    stream::{CompletionMode, Event},
};

/// Uses no memory, so no record of use keeps the stream's handle alive.
#[kernel(unsafe(cuda = "kernels/nothing.cu"))]
fn nothing(_n: u32) {}

/// Capacity of each queue of the emulated device, in operations.
const DEPTH: u64 = 256;
/// More operations than any queue holds.
const MANY: usize = 3_000;
/// Repetitions of each action beside the full stream.
const ROUNDS: usize = 64;

/// Like `on_both!`, but the emulated device has bounded queues.
macro_rules! on_both_bounded {
    ($name:ident, $body:expr) => {
        mod $name {
            use super::*;

            async fn body(device: Device) {
                common::within($body(device.clone())).await;
                common::at_rest(&device).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn emulated() {
                body(common::emulated_with(Emulated::new().workers(4).queue_depth(DEPTH))).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "needs a GPU"]
            async fn cuda() {
                let _alone = common::alone().await;
                body(common::cuda()).await;
            }
        }
    };
}

/// A blocked stream, and a thread that enqueues work there until it blocks, too.
struct Full {
    hold: Option<Hold>,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Full {
    async fn of(hold: Hold, mut work: impl FnMut() + Send + 'static) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = std::thread::spawn({
            let (stop, done) = (stop.clone(), done.clone());
            move || {
                while done.load(Ordering::Relaxed) < MANY && !stop.load(Ordering::Relaxed) {
                    work();
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let full = Self { hold: Some(hold), stop, done, thread: Some(thread) };
        // The thread is blocked if it makes no progress during thousands of polls.
        let (mut last, mut same) = (0, 0);
        until("the queue is full", || {
            let now = full.done.load(Ordering::Relaxed);
            same = if now == last { same + 1 } else { 0 };
            last = now;
            now > 0 && same > 20_000
        })
        .await;
        full
    }

    /// Runs `round` repeatedly on another thread, which must finish while the stream is still blocked.
    async fn beside(&self, what: &str, round: impl FnMut(usize) + Send + 'static) {
        let rounds = tokio::task::spawn_blocking(move || (0..ROUNDS).for_each(round));
        self.within(what, async { rounds.await.unwrap() }).await;
    }

    async fn within(&self, what: &str, future: impl Future<Output = ()>) {
        if tokio::time::timeout(Duration::from_secs(20), future).await.is_err() {
            panic!("{what}: blocked by a stream that another thread keeps full");
        }
        assert!(self.done.load(Ordering::Relaxed) < MANY, "{what}: the stream was never full");
    }

    async fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.hold = None;
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(|| thread.join()).await.unwrap().unwrap();
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn increments(stream: &Stream) -> impl FnMut() + Send + 'static {
    let (stream, mut data) = (stream.clone(), stream.alloc::<u32>(64).unwrap());
    stream.fill(&mut data, 0).unwrap();
    move || increment::launch(&stream, &mut data).unwrap()
}

// With host memory that is not page-locked, `cuMemcpyAsync` itself waits for all work on its stream.
on_both_bounded!(copies_of_pageable_host_memory_are_enqueued, async |device: Device| {
    /// Larger than the driver's staging: `cuMemcpyAsync` copies up to 64 KiB immediately.
    const LEN: usize = 1 << 18;
    let [stream] = streams(&device);
    let held = hold(&stream);
    let copies = tokio::task::spawn_blocking({
        let stream = stream.clone();
        move || {
            let mut near = Buffer::<u32>::pinned(&Device::host(), LEN).unwrap();
            near.as_mut_slice().unwrap().iter_mut().zip(0..).for_each(|(value, number)| *value = number);
            let [mut there, mut again] = [(); 2].map(|()| stream.alloc::<u32>(LEN).unwrap());
            stream.copy(&near, &mut there).unwrap();
            // The data were staged, so the host may use the memory already.
            near.as_mut_slice().unwrap().fill(0);
            let [mut back, mut last] = [(); 2].map(|()| Buffer::<u32>::pinned(&Device::host(), LEN).unwrap());
            stream.copy(&there, &mut back).unwrap();
            assert!(back.as_slice().is_err(), "the copy is in flight");
            // Copy onwards before the data have reached the host.
            stream.copy(&back, &mut again).unwrap();
            stream.copy(&again, &mut last).unwrap();
            [back, last]
        }
    });
    let copied = tokio::time::timeout(Duration::from_secs(20), copies).await;
    drop(held);
    let copied = copied.expect("a copy waits for its stream").unwrap();
    for copied in copied {
        assert!(copied.read().await.unwrap().iter().copied().eq(0..LEN as u32));
    }
});

on_both_bounded!(streams_and_events_are_made_used_and_dropped, async |device: Device| {
    let [a, b] = streams(&device);
    let work = increments(&a);
    let full = Full::of(hold(&a), work).await;
    let (of, on) = (device.clone(), b.clone());
    full.beside("streams and events", move |_| {
        let stream = Stream::new(&of).unwrap();
        let event = Event::timed();
        event.record(&on).unwrap();
        event.wait(&stream).unwrap();
    })
    .await;
    full.end().await;
    a.completed().await.unwrap();
});

// Each free takes a slot in the queue. Frees that find the queue full are enqueued once there is room.
on_both_bounded!(stream_ordered_memory_is_dropped_while_the_queue_is_full, async |device: Device| {
    let [a] = streams::<1>(&device);
    let pool = Allocator::stream_ordered(&device);
    let mut memory = Vec::new();
    for _ in 0..MANY {
        memory.push(pool.alloc::<u32>(&a, 4).unwrap());
    }
    a.completed().await.unwrap();
    let full = Full::of(hold(&a), increments(&a)).await;
    full.beside("a drop of stream-ordered memory", move |round| memory.truncate(MANY - MANY * (round + 1) / ROUNDS))
        .await;
    full.end().await;
    until("all of the memory is freed", || pool.stats().waiting == 0).await;
});

// A flow that lacks memory waits without blocking its thread.
#[tokio::test]
async fn a_flow_waits_for_memory_that_was_dropped_while_the_queue_was_full() {
    let device = emulated_with(Emulated::new().workers(4).queue_depth(DEPTH).memory(64 << 10));
    let [a] = streams(&device);
    let large = Allocator::stream_ordered(&device).alloc::<u8>(&a, 48 << 10).unwrap();
    a.completed().await.unwrap();
    let full = Full::of(hold(&a), increments(&a)).await;
    drop(large);
    let seen = shared();
    let mut flow = Flow::new("waits for memory");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let increment = flow.add("increment", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, increment.input, HubOptions::bounded(1).envelope_bytes(24 << 10));
    flow.connect(increment.output, consume.input);
    let flow = tokio::spawn(async move { flow.run().await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!flow.is_finished(), "the flow lacks memory");
    full.end().await;
    within(flow).await.unwrap().unwrap();
    assert_eq!(*lock(&seen), [[2]]);
}

/// Creates and drops streams and events beside a full default stream whose handles are dropped and created again.
async fn the_default_stream_is_full(device: &Device, handles: Vec<Device>) {
    let default = Stream::default_of(device).unwrap();
    nothing::launch(&default, 0).unwrap();
    default.completed().await.unwrap();
    let held = hold(&default);
    drop(default);
    let mut next = handles.into_iter().cycle();
    let full = Full::of(held, move || {
        let default = Stream::default_of(&next.next().unwrap()).unwrap();
        nothing::launch(&default, 0).unwrap();
    })
    .await;
    let of = device.clone();
    full.beside("streams and events", move |_| {
        let event = Event::timed();
        event.record(&Stream::new(&of).unwrap()).unwrap();
    })
    .await;
    full.end().await;
    Stream::default_of(device).unwrap().completed().await.unwrap();
}

on_both_bounded!(handles_of_the_default_stream_are_dropped, async |device: Device| {
    the_default_stream_is_full(&device, vec![device.clone()]).await;
});

// Handles with and without the race checker share one default stream.
on_both_bounded!(handles_with_the_race_checker_and_without_fill_one_queue, async |device: Device| {
    let plain = if device.is_cuda() {
        Device::cuda(0).unwrap()
    } else {
        Device::emulated(Emulated::new().workers(4).queue_depth(DEPTH))
    };
    let handles = vec![plain.clone().race_checked(), plain.clone(), plain.clone().race_checked()];
    // Keeps every handle, so that none of them loses its counters.
    let _kept: Vec<_> = handles.iter().map(|handle| Stream::default_of(handle).unwrap()).collect();
    the_default_stream_is_full(&plain, handles).await;
});

on_both_bounded!(memory_that_the_full_stream_uses_is_dropped, async |device: Device| {
    let [a, b] = streams(&device);
    let work = increments(&a);
    let mut many: Vec<_> = (0..ROUNDS).map(|_| b.alloc::<u32>(64).unwrap()).collect();
    let held = hold(&a);
    many.iter_mut().for_each(|buffer| a.fill(buffer, 7).unwrap());
    let full = Full::of(held, work).await;
    full.beside("a drop", move |_| drop(many.pop())).await;
    full.end().await;
    a.completed().await.unwrap();
});

on_both_bounded!(memory_is_allocated_while_the_full_stream_still_uses_some, async |device: Device| {
    let [a, b] = streams(&device);
    let work = increments(&a);
    let mut used = a.alloc::<u32>(64).unwrap();
    let held = hold(&a);
    a.fill(&mut used, 7).unwrap();
    drop(used);
    let full = Full::of(held, work).await;
    let (of, on) = (device.clone(), b.clone());
    full.beside("an allocation", move |round| {
        let mut fresh = on.alloc::<u32>(64).unwrap();
        on.fill(&mut fresh, 1).unwrap();
        // A size that was not used before requires new host memory.
        let pinned = Buffer::<u8>::pinned(&of, (round + 3) << 13).unwrap();
        let _ = Allocator::unbounded(&of).stats();
        drop((fresh, pinned));
    })
    .await;
    full.end().await;
    a.completed().await.unwrap();
    b.completed().await.unwrap();
});

on_both_bounded!(work_on_another_stream_is_awaited, async |device: Device| {
    let [a, b, c] = streams(&device);
    let work = increments(&a);
    let mut data = b.alloc::<u32>(64).unwrap();
    b.fill(&mut data, 0).unwrap();
    let held = hold(&a);
    // Makes the device's completion monitor query the full stream, too.
    let waits = tokio::spawn(a.completed());
    let full = Full::of(held, work).await;
    // Runs on another thread: the test could not report a failure if its own thread were blocked.
    let on = [b.clone(), c.clone()];
    let each = tokio::spawn(async move {
        let [b, c] = on;
        for round in 0..20 {
            // In each mode, and after another stream.
            c.set_completion_mode(
                [CompletionMode::Adaptive, CompletionMode::LowLatency, CompletionMode::Quiet][round % 3],
            );
            increment::launch(&b, &mut data).unwrap();
            increment::launch(&c, &mut data).unwrap();
            c.completed().await.unwrap();
        }
        data
    });
    let mut data = None;
    full.within("another stream's work", async { data = Some(each.await.unwrap()) }).await;
    full.end().await;
    waits.await.unwrap().unwrap();
    assert_eq!(data.unwrap().to_vec(&b).await.unwrap(), [40; 64]);
});

/// Instantiates a graph that increments a buffer of its own.
async fn graph(device: &Device) -> Exec {
    let stream = Stream::new(device).unwrap();
    let mut data = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    stream.completed().await.unwrap();
    let (graph, ()) = Graph::capture(device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
    graph.instantiate().unwrap()
}

on_both_bounded!(graphs_are_launched_on_other_streams_and_devices, async |device: Device| {
    let [a, b] = streams(&device);
    let other = common::emulated();
    let c = Stream::new(&other).unwrap();
    let (first, second, third) = (graph(&device).await, graph(&device).await, graph(&other).await);
    let on = a.clone();
    let full = Full::of(hold(&a), move || _ = first.launch(&on).unwrap()).await;
    let on = [b.clone(), c.clone()];
    full.beside("another graph's launch", move |_| {
        second.launch(&on[0]).unwrap();
        third.launch(&on[1]).unwrap();
    })
    .await;
    full.end().await;
    for stream in [a, b, c] {
        stream.completed().await.unwrap();
    }
    at_rest(&other).await;
});

// However many threads launch at once, none waits for room in a queue while it holds a lock that others need.
on_both_bounded!(many_threads_fill_the_queue_and_a_graph_is_launched_beside_them, async |device: Device| {
    // On an H200 this exceeds what the queue accepts beyond the bound at which a launch waits.
    let threads = if device.is_cuda() { 400 } else { 64 };
    let device = if device.is_cuda() { device } else { common::emulated_with(Emulated::new().queue_depth(16)) };
    let [a, b] = streams(&device);
    let other = common::emulated();
    let c = Stream::new(&other).unwrap();
    let (first, second, third) = (Arc::new(graph(&device).await), graph(&device).await, graph(&other).await);
    let held = hold(&a);
    let (stop, waiting) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let launching: Vec<_> = (0..threads)
        .map(|_| {
            let (a, first, stop, waiting) = (a.clone(), first.clone(), stop.clone(), waiting.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    waiting.fetch_add(1, Ordering::SeqCst);
                    first.launch(&a).unwrap();
                    waiting.fetch_sub(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    while waiting.load(Ordering::SeqCst) < threads {
        tokio::task::yield_now().await;
    }
    let on = [b.clone(), c.clone()];
    let beside = tokio::task::spawn_blocking(move || {
        for _ in 0..ROUNDS {
            second.launch(&on[0]).unwrap();
            third.launch(&on[1]).unwrap();
        }
    });
    let beside = tokio::time::timeout(Duration::from_secs(5), beside).await;
    stop.store(true, Ordering::SeqCst);
    drop(held);
    launching.into_iter().for_each(|thread| thread.join().unwrap());
    for stream in [a, b, c] {
        stream.completed().await.unwrap();
    }
    drop(first);
    at_rest(&device).await;
    at_rest(&other).await;
    beside.expect("a launch waits for room on another stream").unwrap();
});

on_both_bounded!(page_locked_memory_is_allocated_and_dropped_while_the_device_works, async |device: Device| {
    const MIB: usize = 1 << 20;
    if !device.is_cuda() {
        // The emulated device's memory returns freed blocks without waiting.
        return;
    }
    // More than is cached in sizes that are not requested again.
    drop(Buffer::<u8>::pinned(&device, 300 * MIB).unwrap());
    let [a] = streams::<1>(&device);
    let held = hold(&a);
    let of = device.clone();
    let allocated = tokio::task::spawn_blocking(move || {
        let all = [400, 3, 100].map(|size| Buffer::<u8>::pinned(&of, size * MIB).unwrap());
        assert!(all.iter().all(|buffer| buffer.as_slice().is_ok()));
    });
    let allocated = tokio::time::timeout(Duration::from_secs(20), allocated).await;
    drop(held);
    allocated.expect("an allocation waits for all work on the device").unwrap();
    a.completed().await.unwrap();
});

// The closure of external work runs with no lock held, even where a graph uses its memory, so another graph can be
// launched meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn a_closure_of_external_work_blocks_no_other_device() {
    let _alone = common::alone().await;
    let device = common::cuda();
    let [a] = streams::<1>(&device);
    let mut data = Buffer::from_slice(&a, &[0_u32; 64]).unwrap();
    a.completed().await.unwrap();
    let (tied, ()) = Graph::capture(&device, |capture| increment::launch(capture.stream(), &mut data)).unwrap();
    let _exec = tied.instantiate().unwrap();
    let other = common::emulated();
    let on = Stream::new(&other).unwrap();
    let third = graph(&other).await;
    let (inside, is_inside) = std::sync::mpsc::channel();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let calls = tokio::task::spawn_blocking(move || {
        // SAFETY: the closure enqueues nothing.
        unsafe {
            a.external("waits").write(&mut data).enqueue(|_, _| {
                inside.send(()).unwrap();
                let _ = wait.recv();
                Ok(())
            })
        }
        .unwrap();
        (a, data)
    });
    tokio::task::spawn_blocking(move || is_inside.recv()).await.unwrap().unwrap();
    let launched = tokio::task::spawn_blocking(move || third.launch(&on).map(drop));
    let launched = tokio::time::timeout(Duration::from_secs(5), launched).await;
    drop(go);
    let (a, data) = calls.await.unwrap();
    a.completed().await.unwrap();
    drop(data);
    launched.expect("a launch on another device waits for it").unwrap().unwrap();
}

/// The waker of an executor that polls its task from `wake`. The task enqueues work until an error is returned.
struct Enqueues {
    stream: Stream,
    data: Mutex<Option<Buffer<u32>>>,
    tell: Mutex<Option<tokio::sync::oneshot::Sender<Error>>>,
}

impl Wake for Enqueues {
    fn wake(self: Arc<Self>) {
        let (mut data, tell) = (lock(&self.data), lock(&self.tell).take());
        let (Some(data), Some(tell)) = (&mut *data, tell) else { return };
        let error = loop {
            if let Err(error) = self.stream.fill(data, 7) {
                break error;
            }
        };
        tell.send(error).unwrap();
    }
}

on_both_bounded!(a_waker_on_a_devices_thread_does_not_wait_for_room, async |device: Device| {
    let [a, b, c] = streams(&device);
    a.set_completion_mode(CompletionMode::Quiet);
    let data = b.alloc::<u32>(64).unwrap();
    let held_a = hold(&a);
    // CUDA has one thread for all host functions and refuses every call there, so `b` need not be full.
    let held_b = device.is_emulated().then(|| hold(&b));
    let (tell, receiver) = tokio::sync::oneshot::channel();
    let waker = Arc::new(Enqueues { stream: b.clone(), data: Mutex::new(Some(data)), tell: Mutex::new(Some(tell)) });
    let mut done = Box::pin(a.completed());
    assert!(done.as_mut().poll(&mut Context::from_waker(&Waker::from(waker.clone()))).is_pending());
    drop(held_a);
    let error = receiver.await.unwrap();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("wake a task of a runtime"), "{error}");
    // The device still works.
    c.host_function(|| ()).unwrap();
    c.completed().await.unwrap();
    drop(held_b);
    b.completed().await.unwrap();
    done.await.unwrap();
    let data = lock(&waker.data).take();
    drop(data);
});

on_both_bounded!(a_host_function_that_synchronizes_is_refused, async |device: Device| {
    let [a, b] = streams(&device);
    let (tell, receiver) = tokio::sync::oneshot::channel();
    let (go, ready) = std::sync::mpsc::channel::<()>();
    let waits = b.clone();
    let function = move || {
        let _ = ready.recv();
        tell.send(waits.synchronize_blocking()).unwrap();
    };
    a.host_function(function).unwrap();
    // The host function waits for work behind itself. CUDA has one thread for all host functions, so a second one
    // cannot block the stream here.
    b.wait_for(&a).unwrap();
    drop(go);
    let error = receiver.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    a.completed().await.unwrap();
    b.completed().await.unwrap();
});

on_both_bounded!(a_wait_for_what_was_enqueued_does_not_wait_for_later_work, async |device: Device| {
    let [stream] = streams(&device);
    stream.host_function(|| ()).unwrap();
    let done = stream.completed();
    let held = hold(&stream);
    done.await.unwrap();
    drop(held);
    stream.completed().await.unwrap();
});
