//! Section M: memory across streams: when and where it is reused, and the errors when none is free.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{add_one, emulated_with, freed, hold, increment, on_both, streams, until, within};
use futures::{FutureExt, executor::block_on};
use wakeline::{
    Stream,
    device::{Emulated, Faults},
    graph::Graph,
    memory::{Allocator, MemoryStats},
    prelude::*,
};

const LEN: usize = 1024;
const BYTES: u64 = 4 * LEN as u64;

/// A separate allocator, whose statistics include no other memory.
fn own(device: &Device) -> Allocator {
    Allocator::unbounded(device).maximum(64 << 20)
}

fn waiting(stats: MemoryStats) -> (u64, u64) {
    (stats.in_use, stats.waiting)
}

// Freed while another stream, which is held, still reads it: neither other streams nor the host get it.
on_both!(m1_memory_that_a_stream_still_uses_is_not_reused, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let mut out = memory.alloc::<u32>(&b, LEN).unwrap();
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    let held = hold(&b);
    add_one::launch(&b, &data, &mut out).unwrap();
    drop(data);
    assert_eq!(waiting(memory.stats()), (BYTES, BYTES));
    // An allocation of the same size on the same stream gets other memory.
    let mut mess = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut mess, 1000).unwrap();
    a.completed().await.unwrap();
    assert_eq!(memory.stats().from_driver, 3);
    drop(held);
    assert_eq!(out.to_vec(&b).await.unwrap(), [2; LEN]);
    assert_eq!(mess.to_vec(&a).await.unwrap(), [1000; LEN]);
    drop((mess, out));
    freed(&device).await;
});

// A stream that is ordered after all uses gets the memory at once, although no use has completed.
on_both!(m1_a_stream_that_is_ordered_after_gets_it_at_once, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    b.wait_for(&a).unwrap();
    let mut again = memory.alloc::<u32>(&b, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 1);
    b.fill(&mut again, 7).unwrap();
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [7; LEN]);
    drop(again);
    freed(&device).await;
});

// `b` uses two buffers, one before and one after the wait: the wait removes the first binding, the second stays.
on_both!(m2_a_wait_removes_earlier_bindings_only, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let (mut early, mut late) = (memory.alloc::<u32>(&a, LEN).unwrap(), memory.alloc::<u32>(&a, LEN).unwrap());
    let held = hold(&b);
    b.fill(&mut early, 1).unwrap();
    a.wait_for(&b).unwrap();
    b.fill(&mut late, 1).unwrap();
    drop((early, late));
    assert_eq!(waiting(memory.stats()), (0, 2 * BYTES));
    let first = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 2, "the early buffer is reused");
    let second = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "the late buffer is not reused");
    // Another wait, which covers all work.
    a.wait_for(&b).unwrap();
    let third = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "the late buffer is reused");
    drop(held);
    drop((first, second, third));
    freed(&device).await;
});

// `c` waits for `b`, which has waited for `a`.
on_both!(m3_transitive_waits_count, async |device: Device| {
    let [a, b, c] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    b.wait_for(&a).unwrap();
    c.wait_for(&b).unwrap();
    drop(data);
    let mut again = memory.alloc::<u32>(&c, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 1);
    c.fill(&mut again, 3).unwrap();
    drop(held);
    assert_eq!(again.to_vec(&c).await.unwrap(), [3; LEN]);
    drop(again);
    freed(&device).await;
});

// Uses of reused memory on other streams come after its earlier uses too.
on_both!(m3_reused_memory_keeps_its_dependencies, keeps_its_dependencies);

async fn keeps_its_dependencies(device: Device) {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    // Reused on the same stream at once, and then used by another stream.
    let mut again = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 1);
    b.fill(&mut again, 9).unwrap();
    assert!(b.completed().now_or_never().is_none(), "`b` waits for `a`");
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [9; LEN]);
    drop(again);
    freed(&device).await;
}

/// The same without the race checker: the dependencies that the memory keeps are its only ordering.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn m3_reused_memory_keeps_its_dependencies_unchecked() {
    let _alone = common::alone().await;
    // Loads the kernels.
    let _checked = common::cuda();
    let device = Device::cuda(0).unwrap();
    keeps_its_dependencies(device.clone()).await;
    common::at_rest(&device).await;
}

on_both!(m4_the_same_stream_gets_it_at_once_and_the_driver_is_not_called, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    // Memory that other streams free meanwhile does not interfere.
    let others: Vec<_> = (0..40).map(|_| memory.alloc::<u32>(&b, LEN).unwrap()).collect();
    let stuck = hold(&b);
    for mut other in others {
        b.fill(&mut other, 1).unwrap();
    }
    for round in 0..1000 {
        let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
        if round % 100 == 0 {
            a.fill(&mut data, 1).unwrap();
        }
    }
    let stats = memory.stats();
    assert_eq!((stats.from_driver, stats.allocations), (41, 1040));
    assert_eq!(stats.reused, 999);
    drop((stuck, held));
    freed(&device).await;
});

on_both!(m5_freed_while_bound_counts_as_waiting, async |device: Device| {
    let [a] = streams(&device);
    let memory = own(&device);
    let before = device.memory_stats();
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    assert_eq!(waiting(memory.stats()), (BYTES, 0));
    drop(data);
    let stats = memory.stats();
    assert_eq!((stats.in_use, stats.waiting, stats.cached, stats.peak), (0, BYTES, 0, BYTES));
    assert_eq!(device.memory_stats().waiting - before.waiting, BYTES);
    assert_eq!(device.memory_in_use(), BYTES);
    drop(held);
    until("the memory is idle", || memory.stats().cached == BYTES).await;
    assert!(memory.stats().is_at_rest());
    assert_eq!(memory.trim(), BYTES);
    assert_eq!(memory.stats().cached, 0);
    freed(&device).await;
});

// Two thirds of the memory are in bound blocks that are too small: they must go back to the driver before there is
// enough in one piece.
on_both!(m6_out_of_memory_waits_for_the_bound_and_retries, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::unbounded(&device).maximum(3 * BYTES);
    let mut data = [0, 1].map(|_| memory.alloc::<u32>(&a, LEN).unwrap());
    let held = hold(&a);
    data.iter_mut().for_each(|data| a.fill(data, 1).unwrap());
    drop(data);
    let error = memory.alloc::<u32>(&a, 3 * LEN).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    for number in [3 * BYTES, 2 * BYTES, 0] {
        assert!(error.to_string().contains(&number.to_string()), "{error}");
    }
    assert!(error.to_string().contains("alloc_when_free"), "{error}");
    let mut waits = Box::pin(memory.alloc_when_free::<u32>(&a, 3 * LEN));
    assert!((&mut waits).now_or_never().is_none());
    drop(held);
    let all = waits.await.unwrap();
    assert_eq!(waiting(memory.stats()), (3 * BYTES, 0));
    // A size that can never be available fails at once.
    let error = memory.alloc_when_free::<u32>(&a, 3 * LEN + 1).await.unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(all);
    freed(&device).await;
});

// The numbers of a block allocator are in blocks, whatever the request's size; and a size that can never be available
// fails at once.
on_both!(m6_blocks_are_counted_in_blocks, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::blocks(&device, BYTES, 2).unwrap();
    let mut first = memory.alloc::<u8>(&a, 1).unwrap();
    let second = memory.alloc::<u8>(&a, 1).unwrap();
    let refusal = |len: usize| memory.alloc::<u8>(&a, len).unwrap_err().to_string();
    let advice = "; `alloc_when_free` waits for memory";
    let expected = format!("asked for 1 bytes; 2 of 2 blocks are in use, 0 wait for streams{advice}");
    assert!(refusal(1).ends_with(&expected), "{}", refusal(1));
    assert!(refusal(BYTES as usize + 1).ends_with("use larger blocks"), "{}", refusal(BYTES as usize + 1));
    let little = Allocator::unbounded(&device).maximum(1000);
    let all = little.alloc::<u8>(&a, 1000).unwrap();
    let never = little.alloc::<u8>(&a, 1001).unwrap_err().to_string();
    assert!(never.ends_with("asked for 1001 bytes; 1000 are in use, 0 wait for streams, of 1000"), "{never}");
    // Freed memory counts as available as soon as its work is done.
    let held = hold(&a);
    a.fill(&mut first, 1).unwrap();
    drop((first, second));
    assert_eq!(waiting(memory.stats()), (0, 1));
    drop((held, all));
    a.completed().await.unwrap();
    assert!(memory.stats().is_at_rest(), "{:?}", memory.stats());
    freed(&device).await;
});

/// The device itself is full: of cached memory of other sizes, of other allocators' caches, and of bound memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m6_a_full_device_releases_cached_memory() {
    let device = emulated_with(Emulated::new().memory(4096).workers(4));
    let [a, b] = streams(&device);
    let other = Allocator::unbounded(&device).maximum(1024);
    drop((0..8).map(|_| a.alloc::<u8>(256).unwrap()).collect::<Vec<_>>());
    drop(other.alloc::<u8>(&a, 1024).unwrap());
    assert_eq!(device.memory_stats().cached, 2048 + 1024);
    assert_eq!(device.memory().unwrap().free, 4096, "cached memory counts as free");
    let all = a.alloc::<u8>(4096).expect("the cache was released");
    let error = b.alloc::<u8>(1).unwrap_err();
    let expected = "asked for 1 bytes; 4096 are in use, 0 wait for streams, of 4096; the driver has 0 left";
    assert!(error.to_string().ends_with(expected), "{error}");
    drop(all);
    // If the memory is bound, the next stream waits for it on the device.
    let held = hold(&a);
    let mut all = a.alloc::<u8>(4096).unwrap();
    a.fill(&mut all, 1).unwrap();
    drop(all);
    let mut again = b.alloc::<u8>(4096).unwrap();
    b.fill(&mut again, 2).unwrap();
    assert!(b.completed().now_or_never().is_none(), "`b` waits for `a`");
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [2; 4096]);
    drop(again);
    freed(&device).await;
}

on_both!(m7_memory_is_free_for_all_streams_once_the_host_saw_completion, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    a.completed().await.unwrap();
    let again = memory.alloc::<u32>(&b, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 1);
    drop(again);
    freed(&device).await;
});

// No stream waited for the other one, but its work is done: the device is queried before more memory is requested from
// the driver.
on_both!(m7_completed_work_is_found_by_a_query, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    a.host_function(move || _ = sender.send(())).unwrap();
    receiver.await.unwrap();
    until("the memory is reused", || {
        let again = memory.alloc::<u32>(&b, LEN).unwrap();
        drop(again);
        memory.stats().reused > 0
    })
    .await;
    freed(&device).await;
});

// A wait for an older point, or a repeated wait, has no effect.
on_both!(m8_an_older_or_repeated_wait_has_no_effect, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&b);
    let mut data = [0, 1].map(|_| memory.alloc::<u32>(&a, LEN).unwrap());
    b.fill(&mut data[0], 1).unwrap();
    let old = wakeline::stream::Event::new();
    old.record(&b).unwrap();
    b.fill(&mut data[1], 1).unwrap();
    let [early, late] = data;
    drop(late);
    for _ in 0..3 {
        old.wait(&a).unwrap();
    }
    let other = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "the late one is not covered");
    drop(early);
    let again = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "the early one is covered");
    drop(held);
    drop((other, again));
    freed(&device).await;
});

// Three streams, four sizes, freed while work is in flight.
on_both!(m9_statistics_return_to_zero, async |device: Device| {
    let [a, b, c] = streams(&device);
    let memories =
        [own(&device), Allocator::blocks(&device, 4 * BYTES, 8).unwrap(), Allocator::stream_ordered(&device)];
    for memory in &memories {
        for round in 0..20 {
            let streams = [&a, &b, &c];
            let (on, other) = (streams[round % 3], streams[(round + 1) % 3]);
            let mut data = memory.alloc::<u32>(on, LEN * (1 + round % 4)).unwrap();
            on.fill(&mut data, 1).unwrap();
            increment::launch(other, &mut data).unwrap();
        }
        assert!(memory.stats().peak >= BYTES, "{:?}", memory);
    }
    for memory in &memories {
        until("no memory is used or bound", || memory.stats().is_at_rest()).await;
        assert_eq!(memory.stats().allocations, 20);
    }
    until("pinned memory too", || device.pinned_memory_stats().is_at_rest()).await;
    freed(&device).await;
});

/// Memory in use is leaked, counted and never reused, and waits for memory fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m11_after_a_fault_memory_is_leaked_and_counted() {
    let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 2)));
    let [a] = streams(&device);
    let memory = Allocator::blocks(&device, BYTES, 2).unwrap();
    let mut data = [0, 1].map(|_| memory.alloc::<u32>(&a, LEN).unwrap());
    let held = hold(&a);
    data.iter_mut().for_each(|data| increment::launch(&a, data).unwrap());
    let [first, second] = data;
    let mut waits = Box::pin(memory.alloc_when_free::<u32>(&a, LEN));
    assert!((&mut waits).now_or_never().is_none());
    drop(held);
    assert!(a.completed().await.unwrap_err().is_device_lost());
    drop((first, second));
    assert!(within(waits).await.unwrap_err().is_device_lost());
    assert_eq!(device.memory_leaked(), 2 * BYTES);
    assert!(memory.stats().is_at_rest(), "{:?}", memory.stats());
    assert_eq!(device.memory_in_use(), 0);
    assert!(memory.alloc::<u32>(&a, LEN).unwrap_err().is_device_lost());
}

// Without tracking, memory is reused without regard to its uses: the checker names the unfinished work.
on_both!(m12_without_tracking_the_checker_finds_the_early_reuse, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    increment::launch(&a, &mut data).unwrap();
    drop(data);
    device.switch_tracking_off();
    let error = memory.alloc::<u32>(&b, LEN).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Race, "{error}");
    for part in ["reuse of memory on stream `b`", "kernel `increment` on stream `a`"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    drop(held);
    freed(&device).await;
});

on_both!(m13_the_number_of_blocks_is_fixed, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::blocks(&device, BYTES, 2).unwrap();
    assert_eq!((memory.stats().cached, memory.stats().capacity), (2 * BYTES, Some(2 * BYTES)));
    assert_eq!(memory.to_string(), format!("2 blocks of {BYTES} bytes on {device}"));
    let one = memory.alloc::<u8>(&a, 1).unwrap();
    let other = memory.alloc::<u32>(&a, LEN).unwrap();
    let error = memory.alloc::<u8>(&a, 1).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let error = memory.alloc::<u32>(&a, LEN + 1).unwrap_err();
    assert!(error.to_string().contains("the blocks have 4096 bytes"), "{error}");
    assert_eq!(memory.trim(), 0, "blocks are not trimmed");
    // Waiters are served in order, and a dropped one does not block the others.
    let mut first = Box::pin(memory.alloc_when_free::<u8>(&a, 1));
    let mut second = Box::pin(memory.alloc_when_free::<u8>(&a, 2));
    let mut third = Box::pin(memory.alloc_when_free::<u8>(&a, 3));
    assert!((&mut first).now_or_never().is_none());
    assert!((&mut second).now_or_never().is_none());
    assert!((&mut third).now_or_never().is_none());
    drop(one);
    assert!((&mut second).now_or_never().is_none(), "the block goes to the first waiter");
    drop(first);
    let second = second.await.unwrap();
    assert!((&mut third).now_or_never().is_none());
    drop(other);
    let third = third.await.unwrap();
    assert_eq!((second.len(), third.len()), (2, 3));
    assert_eq!(memory.stats().from_driver, 2);
    drop((second, third));
    freed(&device).await;
});

on_both!(m13_page_locked_memory_is_reused_when_all_work_is_done, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::pinned_blocks(&device, BYTES, 1).unwrap();
    let mut there = Buffer::<u32>::new(&device, LEN).unwrap();
    let held = hold(&a);
    let mut here = memory.alloc::<u32>(&a, LEN).unwrap();
    assert!(here.is_host());
    here.as_mut_slice().unwrap().fill(5);
    a.copy(&here, &mut there).unwrap();
    drop(here);
    // The host may write to it at once, whatever stream it is for.
    let error = memory.alloc::<u32>(&a, LEN).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(held);
    let mut here = within(memory.alloc_when_free::<u32>(&a, LEN)).await.unwrap();
    here.as_mut_slice().unwrap().fill(6);
    assert_eq!(there.to_vec(&a).await.unwrap(), [5; LEN]);
    drop((here, there));
    until("the allocator is at rest", || memory.stats().is_at_rest()).await;
    let unbounded = Allocator::pinned(&device);
    drop(unbounded.alloc::<u32>(&a, LEN).unwrap());
    until("pinned memory too", || device.pinned_memory_stats().is_at_rest()).await;
    freed(&device).await;
});

// The driver's pool, or its emulation: the memory exists from one point of the stream to another.
on_both!(m13_stream_ordered_memory_is_allocated_and_freed_in_stream_order, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = Allocator::stream_ordered(&device).maximum(2 * BYTES);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    let mut out = memory.alloc::<u32>(&b, LEN).unwrap();
    // `b` comes after the allocation and the fill; and the free, on `a`, after `b`.
    add_one::launch(&b, &data, &mut out).unwrap();
    drop(data);
    assert_eq!(waiting(memory.stats()), (BYTES, BYTES));
    assert!(memory.alloc::<u32>(&a, LEN).unwrap_err().is_out_of_memory());
    drop(held);
    let again = within(memory.alloc_when_free::<u32>(&a, LEN)).await.unwrap();
    assert_eq!(out.to_vec(&b).await.unwrap(), [2; LEN]);
    drop((again, out));
    until("the allocator is at rest", || memory.stats().is_at_rest()).await;
    freed(&device).await;
});

// Threads free memory of an allocator without handles, and scan all freed memory meanwhile: the allocator is destroyed
// with its last memory, whichever thread frees it.
#[tokio::test]
async fn m13_an_allocator_is_destroyed_with_the_last_of_its_memory() {
    let device = Device::emulated(Emulated::new());
    let [a] = streams(&device);
    for _ in 0..200 {
        let memory = own(&device);
        let both = [(); 2].map(|()| memory.alloc::<u32>(&a, LEN).unwrap());
        drop(memory);
        std::thread::scope(|scope| {
            for mut data in both {
                let (a, device) = (&a, &device);
                a.fill(&mut data, 1).unwrap();
                scope.spawn(move || {
                    drop(data);
                    // No device has this much memory, so the allocator first scans for completed work.
                    assert!(Buffer::<u8>::new(device, 1 << 45).unwrap_err().is_out_of_memory());
                });
            }
        });
    }
    // Each allocator has returned its cache to the driver.
    until("nothing is cached", || device.memory_stats().cached == 0).await;
    freed(&device).await;
}

/// Spawns a task that waits for memory.
async fn asks(memory: &Allocator, stream: &Stream, bytes: usize) -> tokio::task::JoinHandle<Result<()>> {
    let (memory, stream) = (memory.clone(), stream.clone());
    let task = tokio::spawn(async move { memory.alloc_when_free::<u8>(&stream, bytes).await.map(drop) });
    tokio::task::yield_now().await;
    assert!(!task.is_finished(), "no memory is free");
    task
}

// Reserved memory goes back to the driver when its allocator is dropped, which wakes tasks of other allocators.
#[tokio::test]
async fn m13_waiters_are_woken_when_an_allocator_is_dropped() {
    let device = emulated_with(Emulated::new().memory(8192));
    let [a] = streams(&device);
    let blocks = Allocator::blocks(&device, 4096, 1).unwrap();
    let some = Buffer::<u8>::new(&device, 2048).unwrap();
    let waits = asks(&Allocator::unbounded(&device), &a, 4096).await;
    drop(blocks);
    within(waits).await.unwrap().unwrap();
    drop(some);
    common::at_rest(&device).await;
}

/// A graph whose nodes allocate 4,096 bytes and free them.
fn makes_memory(device: &Device) -> Graph {
    let mut graph = Graph::builder(device).unwrap();
    let (_, mut scratch) = graph.alloc::<u8>(&[], 4096).unwrap();
    graph.add(&[], |stream| stream.fill(&mut scratch, 1)).unwrap();
    graph.build().unwrap()
}

// The driver gets the memory of a graph's nodes back when the graph and its exec are dropped.
#[tokio::test]
async fn m13_waiters_are_woken_when_a_graph_frees_memory() {
    for last in ["exec", "graph", "launch", "builder"] {
        let device = emulated_with(Emulated::new().memory(8192));
        let [a, b] = streams(&device);
        let some = Buffer::<u8>::new(&device, 2048).unwrap();
        let all = Allocator::unbounded(&device);
        if last == "builder" {
            let mut graph = Graph::builder(&device).unwrap();
            let scratch = graph.alloc::<u8>(&[], 4096).unwrap();
            let waits = asks(&all, &a, 4096).await;
            drop((scratch, graph));
            within(waits).await.unwrap().unwrap();
            continue;
        }
        let graph = makes_memory(&device);
        let exec = graph.instantiate().unwrap();
        let held = hold(&b);
        if last == "launch" {
            exec.launch(&b).unwrap();
        }
        let waits = asks(&all, &a, 4096).await;
        match last {
            "graph" => drop((exec, graph)),
            _ => drop((graph, exec)),
        }
        // The memory is free only once the launch is done.
        drop(held);
        within(waits).await.unwrap().unwrap();
        drop(some);
        common::at_rest(&device).await;
    }
}

// The graph's memory is the only memory that can be freed.
#[tokio::test]
async fn m13_memory_of_a_graph_that_was_dropped_while_it_runs_is_waited_for() {
    let device = emulated_with(Emulated::new().memory(8192));
    let [a, b] = streams(&device);
    let graph = makes_memory(&device);
    let exec = graph.instantiate().unwrap();
    let held = hold(&b);
    exec.launch(&b).unwrap();
    drop((graph, exec));
    let waits = asks(&Allocator::unbounded(&device), &a, 8192).await;
    drop(held);
    within(waits).await.unwrap().unwrap();
    common::at_rest(&device).await;
}

// The wait fails although the owner of the memory does not drop it.
#[tokio::test]
async fn f1_a_wait_for_memory_of_a_lost_device_fails() {
    let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)));
    let [a] = streams(&device);
    let blocks = Allocator::blocks(&device, BYTES, 1).unwrap();
    let mut data = blocks.alloc::<u32>(&a, LEN).unwrap();
    let waits = asks(&blocks, &a, 1).await;
    a.fill(&mut data, 0).unwrap();
    increment::launch(&a, &mut data).unwrap();
    assert!(a.completed().await.unwrap_err().is_device_lost());
    assert!(within(waits).await.unwrap().unwrap_err().is_device_lost());
    drop(data);
}

// The first waiter may be one that is no longer polled.
#[tokio::test]
async fn f1_all_waits_for_memory_of_a_lost_device_fail() {
    let device = emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)));
    let [a] = streams(&device);
    let blocks = Allocator::blocks(&device, BYTES, 1).unwrap();
    let mut data = blocks.alloc::<u32>(&a, LEN).unwrap();
    let mut first = Box::pin(blocks.alloc_when_free::<u8>(&a, 1));
    assert!(first.as_mut().now_or_never().is_none());
    let waits = [asks(&blocks, &a, 1).await, asks(&blocks, &a, 1).await];
    a.fill(&mut data, 0).unwrap();
    increment::launch(&a, &mut data).unwrap();
    assert!(a.completed().await.unwrap_err().is_device_lost());
    for waits in waits {
        assert!(within(waits).await.unwrap().unwrap_err().is_device_lost());
    }
    assert!(
        within(blocks.alloc_when_free::<u8>(&a, 1)).await.unwrap_err().is_device_lost(),
        "a new wait fails at once"
    );
    assert!(within(first).await.unwrap_err().is_device_lost());
    drop(data);
}

#[tokio::test]
async fn m13_blocks_are_not_free_for_others() {
    let device = emulated_with(Emulated::new().memory(8192));
    let blocks = Allocator::blocks(&device, 4096, 1).unwrap();
    assert_eq!(device.memory().unwrap().free, 4096);
    assert!(Buffer::<u8>::new(&device, 8192).unwrap_err().is_out_of_memory());
    drop(blocks);
    assert_eq!(device.memory().unwrap().free, 8192);
}

/// Sizes that no allocator can ever hold are an error at once, and block no waiter.
#[tokio::test]
async fn m13_a_size_that_can_never_be_available_fails_at_once() {
    let device = Device::emulated(Emulated::new().memory(1 << 20));
    let stream = Stream::new(&device).unwrap();
    let (pinned, bounded) = (Allocator::pinned(&device), Allocator::unbounded(&device).maximum(1 << 40));
    for (allocator, never) in [(&pinned, usize::MAX), (&bounded, 1 << 30)] {
        let used = allocator.alloc::<u8>(&stream, 1).unwrap();
        let refused = within(allocator.alloc_when_free::<u8>(&stream, never)).await;
        assert!(refused.unwrap_err().is_out_of_memory());
        within(allocator.alloc_when_free::<u8>(&stream, 1)).await.unwrap();
        drop(used);
    }
}

// A request counts as in use until the driver has answered: a task that checks meanwhile must check again.
#[tokio::test(flavor = "multi_thread")]
async fn m13_a_request_that_the_driver_refuses_blocks_no_task() {
    let device = emulated_with(Emulated::new().memory(64 << 10));
    let stream = Stream::new(&device).unwrap();
    for memory in [Allocator::unbounded(&device), Allocator::stream_ordered(&device)] {
        let memory = memory.maximum(128 << 10);
        let done = Arc::new(AtomicBool::new(false));
        let asked = std::thread::spawn({
            let (memory, device, done) = (memory.clone(), device.clone(), done.clone());
            move || {
                let stream = Stream::new(&device).unwrap();
                while !done.load(Ordering::Relaxed) {
                    assert!(memory.alloc::<u8>(&stream, 100 << 10).unwrap_err().is_out_of_memory());
                }
            }
        });
        for _ in 0..3_000 {
            drop(within(memory.alloc_when_free::<u8>(&stream, 40 << 10)).await.unwrap());
        }
        done.store(true, Ordering::Relaxed);
        asked.join().unwrap();
    }
}

// Neither task owns memory: each is refused, and does not count for the other as one that will free memory.
#[tokio::test]
async fn m13_two_tasks_do_not_wait_for_what_the_driver_refuses_both() {
    let device = emulated_with(Emulated::new().memory(64 << 10));
    let stream = Stream::new(&device).unwrap();
    // Requests exceed the free memory, but not the device's memory: the blocks take a part of it.
    let blocks = Allocator::blocks(&device, 16 << 10, 2).unwrap();
    // Both are kept to the end: dropping one would wake the other's waiter.
    let both = [1 << 20, 2 << 20].map(|maximum| Allocator::unbounded(&device).maximum(maximum));
    let tasks = both.clone().map(|memory| {
        let stream = stream.clone();
        tokio::task::spawn_blocking(move || {
            for _ in 0..3_000 {
                let refused = block_on(memory.alloc_when_free::<u8>(&stream, 40 << 10)).unwrap_err();
                assert!(refused.is_out_of_memory(), "{refused}");
            }
        })
    });
    for task in tasks {
        within(task).await.unwrap();
    }
    drop((blocks, both));
}

// The README's first example in a loop, with the device busy: a stream reuses its memory at once.
#[test]
fn m13_a_buffer_made_from_a_slice_is_reused_on_its_stream() {
    let device = emulated_with(Emulated::new().memory(1 << 20));
    let stream = Stream::new(&device).unwrap();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    stream.host_function(move || _ = wait.recv()).unwrap();
    for round in 0..100 {
        let mut x = Buffer::from_slice(&stream, &[round; 10_000]).unwrap();
        stream.fill(&mut x, round).unwrap();
    }
    assert_eq!(device.memory_stats().from_driver, 1);
    drop(go);
    stream.synchronize_blocking().unwrap();
}

/// The blocks of a dropped allocator are available to others as soon as the work on the last of them is done.
#[test]
fn m13_memory_of_a_dropped_allocator_is_available_at_once() {
    const BLOCK: u64 = 64 << 10;
    let device = emulated_with(Emulated::new().memory(16 * BLOCK));
    let stream = Stream::new(&device).unwrap();
    for _ in 0..5 {
        let held = hold(&stream);
        let blocks = Allocator::blocks(&device, BLOCK, 10).unwrap();
        let mut memory = blocks.alloc::<u8>(&stream, BLOCK as usize).unwrap();
        stream.fill(&mut memory, 1).unwrap();
        drop((memory, blocks));
        let refused = Allocator::blocks(&device, BLOCK, 10).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "its work is not done");
        drop(held);
        stream.synchronize_blocking().unwrap();
        Allocator::blocks(&device, BLOCK, 10).unwrap();
    }
    // The same for memory that is not a block, and while the thread that monitors the device's streams may be the one
    // that returns it.
    for _ in 0..1000 {
        let blocks = Allocator::blocks(&device, BLOCK, 10).unwrap();
        let mut memory = blocks.alloc::<u8>(&stream, BLOCK as usize).unwrap();
        stream.fill(&mut memory, 1).unwrap();
        drop((memory, blocks));
        stream.synchronize_blocking().unwrap();
        stream.alloc::<u8>(10 * BLOCK as usize).unwrap();
    }
}

/// The driver refuses free memory once, and no memory is in use that could be freed: the driver is asked again.
#[tokio::test]
async fn m13_a_wait_outlives_a_refusal_of_the_driver() {
    let device = emulated_with(Emulated::new().memory(1 << 20).faults(Faults::new().fail_alloc(2)));
    let stream = Stream::new(&device).unwrap();
    let weights = Buffer::<u32>::new(&device, LEN).unwrap();
    let memory = Allocator::unbounded(&device).maximum(1 << 19);
    let (first, second) = (memory.alloc_when_free::<u32>(&stream, 16), memory.alloc_when_free::<u32>(&stream, 16));
    let (first, second) = within(futures::future::join(first, second)).await;
    assert!(first.is_ok() && second.is_ok(), "the waiters behind the first are served too");
    drop(weights);
}
