//! Memory across streams: when it is handed out again, to whom, and what is said where there is none. Section M.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::{add_one, emulated_with, freed, hold, increment, on_both, streams, until, within};
use futures::{FutureExt, executor::block_on};
use wakeline::{
    device::{Emulated, Faults},
    graph::Graph,
    memory::{Allocator, MemoryStats},
    prelude::*,
};

const LEN: usize = 1024;
const BYTES: u64 = 4 * LEN as u64;

/// An allocator of its own: nobody else's memory is in its numbers.
fn own(device: &Device) -> Allocator {
    Allocator::unbounded(device).maximum(64 << 20)
}

fn waiting(stats: MemoryStats) -> (u64, u64) {
    (stats.in_use, stats.waiting)
}

// Freed while another stream, which is held up, still reads it: neither that stream's neighbours nor the host get it.
on_both!(m1_memory_that_a_stream_still_uses_is_not_handed_out, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let mut out = memory.alloc::<u32>(&b, LEN).unwrap();
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    let held = hold(&b);
    add_one::launch(&b, &data, &mut out).unwrap();
    drop(data);
    assert_eq!(waiting(memory.stats()), (BYTES, BYTES));
    // As much again, on the stream that it was made for: it is other memory.
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

// The stream is ordered after all uses: it gets it at once, though nothing has passed.
on_both!(m1_a_stream_that_comes_after_gets_it_at_once, async |device: Device| {
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

// Used by `b` before the wait and after it: the wait drops the first of the two bindings, the second stays.
on_both!(m2_a_wait_back_drops_what_came_before_it, async |device: Device| {
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
    assert_eq!(memory.stats().from_driver, 2, "the early one");
    let second = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "not the late one");
    // Another wait, for all of it.
    a.wait_for(&b).unwrap();
    let third = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 3, "the late one");
    drop(held);
    drop((first, second, third));
    freed(&device).await;
});

// `c` waits for `b`, which has waited for `a`.
on_both!(m3_so_do_transitive_waits, async |device: Device| {
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

// And what it is used for elsewhere comes after its old life, too.
on_both!(m3_memory_takes_its_past_along, takes_its_past_along);

async fn takes_its_past_along(device: Device) {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    // On the same stream at once; but then it is another stream that uses it.
    let mut again = memory.alloc::<u32>(&a, LEN).unwrap();
    assert_eq!(memory.stats().from_driver, 1);
    b.fill(&mut again, 9).unwrap();
    assert!(b.completed().now_or_never().is_none(), "it waits for `a`");
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [9; LEN]);
    drop(again);
    freed(&device).await;
}

/// The same where no checker asks for more: what the memory takes along is all that orders it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU"]
async fn m3_memory_takes_its_past_along_unchecked() {
    let _alone = common::alone().await;
    // With its kernels loaded.
    let _checked = common::cuda();
    let device = Device::cuda(0).unwrap();
    takes_its_past_along(device.clone()).await;
    common::at_rest(&device).await;
}

on_both!(m4_the_same_stream_gets_it_at_once_and_the_driver_is_not_called, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let held = hold(&a);
    // What others have freed meanwhile stands in nobody's way.
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
    until("it is idle", || memory.stats().cached == BYTES).await;
    assert!(memory.stats().is_at_rest());
    assert_eq!(memory.trim(), BYTES);
    assert_eq!(memory.stats().cached, 0);
    freed(&device).await;
});

// Two thirds of it are bound and too small: the driver has to get them back before there is so much in one piece.
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
    // What nobody could ever have is not waited for.
    let error = memory.alloc_when_free::<u32>(&a, 3 * LEN + 1).await.unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(all);
    freed(&device).await;
});

// Of blocks the numbers are in blocks, however little of them was asked for; and what nobody can have is no matter of waiting.
on_both!(m6_blocks_are_counted_in_blocks, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::blocks(&device, BYTES, 2).unwrap();
    let mut first = memory.alloc::<u8>(&a, 1).unwrap();
    let second = memory.alloc::<u8>(&a, 1).unwrap();
    let told = |len: usize| memory.alloc::<u8>(&a, len).unwrap_err().to_string();
    let advice = "; `alloc_when_free` waits until there is some";
    let expected = format!("asked for 1 bytes; 2 of 2 blocks are in use, 0 wait for streams{advice}");
    assert!(told(1).ends_with(&expected), "{}", told(1));
    assert!(told(BYTES as usize + 1).ends_with("make them larger"), "{}", told(BYTES as usize + 1));
    let little = Allocator::unbounded(&device).maximum(1000);
    let all = little.alloc::<u8>(&a, 1000).unwrap();
    let never = little.alloc::<u8>(&a, 1001).unwrap_err().to_string();
    assert!(never.ends_with("asked for 1001 bytes; 1000 are in use, 0 wait for streams, of 1000"), "{never}");
    // What was freed counts as done as soon as it is.
    let held = hold(&a);
    a.fill(&mut first, 1).unwrap();
    drop((first, second));
    assert_eq!(waiting(memory.stats()), (0, 1));
    drop((held, all));
    a.completed().await.unwrap();
    assert!(memory.stats().is_at_rest(), "{:?}", memory.stats());
    freed(&device).await;
});

/// The device itself is full: of what is kept in other sizes, of what others keep, and of what is bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m6_a_full_device_gives_back_what_is_kept() {
    let device = emulated_with(Emulated::new().memory(4096).workers(4));
    let [a, b] = streams(&device);
    let other = Allocator::unbounded(&device).maximum(1024);
    drop((0..8).map(|_| a.alloc::<u8>(256).unwrap()).collect::<Vec<_>>());
    drop(other.alloc::<u8>(&a, 1024).unwrap());
    assert_eq!(device.memory_stats().cached, 2048 + 1024);
    assert_eq!(device.memory().unwrap().free, 4096, "what is kept is free");
    let all = a.alloc::<u8>(4096).expect("what was kept was given back");
    let error = b.alloc::<u8>(1).unwrap_err();
    let told = "asked for 1 bytes; 4096 are in use, 0 wait for streams, of 4096; the driver has 0 left";
    assert!(error.to_string().ends_with(told), "{error}");
    drop(all);
    // And where it is bound, the next stream comes after that, on the device.
    let held = hold(&a);
    let mut all = a.alloc::<u8>(4096).unwrap();
    a.fill(&mut all, 1).unwrap();
    drop(all);
    let mut again = b.alloc::<u8>(4096).unwrap();
    b.fill(&mut again, 2).unwrap();
    assert!(b.completed().now_or_never().is_none(), "it waits for `a`");
    drop(held);
    assert_eq!(again.to_vec(&b).await.unwrap(), [2; 4096]);
    drop(again);
    freed(&device).await;
}

on_both!(m7_what_the_host_saw_pass_is_free_for_everybody, async |device: Device| {
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

// Nobody waited for the other stream, but it is done: the device is asked before the driver is.
on_both!(m7_what_has_passed_is_found_by_asking, async |device: Device| {
    let [a, b] = streams(&device);
    let memory = own(&device);
    let mut data = memory.alloc::<u32>(&a, LEN).unwrap();
    a.fill(&mut data, 1).unwrap();
    drop(data);
    let (tell, told) = tokio::sync::oneshot::channel();
    a.host_function(move || _ = tell.send(())).unwrap();
    told.await.unwrap();
    until("it is handed out", || {
        let again = memory.alloc::<u32>(&b, LEN).unwrap();
        drop(again);
        memory.stats().reused > 0
    })
    .await;
    freed(&device).await;
});

// A wait for an older point, or for the same again, frees nothing more and takes nothing back.
on_both!(m8_an_older_or_repeated_wait_is_nothing, async |device: Device| {
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
    assert_eq!(memory.stats().from_driver, 3, "the early one is");
    drop(held);
    drop((other, again));
    freed(&device).await;
});

// Three streams, four sizes, freed in the middle of it all.
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
        until("nothing is used or waits", || memory.stats().is_at_rest()).await;
        assert_eq!(memory.stats().allocations, 20);
    }
    until("pinned memory too", || device.pinned_memory_stats().is_at_rest()).await;
    freed(&device).await;
});

/// Leaked and counted, never used again, and whoever waits for some is told.
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

// Without the tracking memory is handed out as it comes: the checker says whose work it still is.
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
    for part in ["handing out again on stream `b`", "kernel `increment` on stream `a`"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    drop(held);
    freed(&device).await;
});

on_both!(m13_blocks_are_no_more_and_no_less, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::blocks(&device, BYTES, 2).unwrap();
    assert_eq!((memory.stats().cached, memory.stats().capacity), (2 * BYTES, Some(2 * BYTES)));
    assert_eq!(memory.to_string(), format!("2 blocks of {BYTES} bytes on {device}"));
    let one = memory.alloc::<u8>(&a, 1).unwrap();
    let other = memory.alloc::<u32>(&a, LEN).unwrap();
    let error = memory.alloc::<u8>(&a, 1).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let error = memory.alloc::<u32>(&a, LEN + 1).unwrap_err();
    assert!(error.to_string().contains("its blocks have 4096"), "{error}");
    assert_eq!(memory.trim(), 0, "they stay");
    // Those who wait are served in their order, and one that goes holds nobody up.
    let mut first = Box::pin(memory.alloc_when_free::<u8>(&a, 1));
    let mut second = Box::pin(memory.alloc_when_free::<u8>(&a, 2));
    let mut third = Box::pin(memory.alloc_when_free::<u8>(&a, 3));
    assert!((&mut first).now_or_never().is_none());
    assert!((&mut second).now_or_never().is_none());
    assert!((&mut third).now_or_never().is_none());
    drop(one);
    assert!((&mut second).now_or_never().is_none(), "it is the first one's");
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

on_both!(m13_page_locked_memory_is_used_again_when_all_has_passed, async |device: Device| {
    let [a] = streams(&device);
    let memory = Allocator::pinned_blocks(&device, BYTES, 1).unwrap();
    let mut there = Buffer::<u32>::new(&device, LEN).unwrap();
    let held = hold(&a);
    let mut here = memory.alloc::<u32>(&a, LEN).unwrap();
    assert!(here.is_host());
    here.as_mut_slice().unwrap().fill(5);
    a.copy(&here, &mut there).unwrap();
    drop(here);
    // The host would write to it at once, whatever stream it is for.
    let error = memory.alloc::<u32>(&a, LEN).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(held);
    let mut here = within(memory.alloc_when_free::<u32>(&a, LEN)).await.unwrap();
    here.as_mut_slice().unwrap().fill(6);
    assert_eq!(there.to_vec(&a).await.unwrap(), [5; LEN]);
    drop((here, there));
    until("it is at rest", || memory.stats().is_at_rest()).await;
    let unbounded = Allocator::pinned(&device);
    drop(unbounded.alloc::<u32>(&a, LEN).unwrap());
    until("pinned memory too", || device.pinned_memory_stats().is_at_rest()).await;
    freed(&device).await;
});

// The driver's pool, or what stands in for it: the memory is there from a point of the stream on, and until another.
on_both!(m13_stream_ordered_memory_comes_and_goes_with_its_stream, async |device: Device| {
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
    until("it is at rest", || memory.stats().is_at_rest()).await;
    freed(&device).await;
});

// Threads free memory of an allocator that nobody has a handle to any more, and look through all that is freed meanwhile: the
// allocator goes with the last of it, whoever comes last.
#[tokio::test]
async fn m13_an_allocator_goes_with_the_last_of_its_memory() {
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
                    // No device has so much: so whatever has passed is looked for first.
                    assert!(Buffer::<u8>::new(device, 1 << 45).unwrap_err().is_out_of_memory());
                });
            }
        });
    }
    // Each gave the driver back what it kept.
    until("nothing is kept", || device.memory_stats().cached == 0).await;
    freed(&device).await;
}

/// Asks for memory in a task of its own, and waits there.
async fn asks(memory: &Allocator, stream: &Stream, bytes: usize) -> tokio::task::JoinHandle<Result<()>> {
    let (memory, stream) = (memory.clone(), stream.clone());
    let task = tokio::spawn(async move { memory.alloc_when_free::<u8>(&stream, bytes).await.map(drop) });
    tokio::task::yield_now().await;
    assert!(!task.is_finished(), "there is none");
    task
}

// What is reserved goes back to the driver with its allocator, and others wait for just that.
#[tokio::test]
async fn m13_who_waits_hears_of_an_allocator_that_is_gone() {
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

/// A graph of which nodes make 4,096 bytes, and give them back.
fn makes_memory(device: &Device) -> Graph {
    let mut graph = Graph::builder(device).unwrap();
    let (_, mut scratch) = graph.alloc::<u8>(&[], 4096).unwrap();
    graph.add(&[], |stream| stream.fill(&mut scratch, 1)).unwrap();
    graph.build().unwrap()
}

// The driver has the memory of a graph's nodes back when the graph and its exec are gone.
#[tokio::test]
async fn m13_the_tasks_that_wait_are_woken_when_a_graph_gives_memory_back() {
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
        // Not before the launch is done.
        drop(held);
        within(waits).await.unwrap().unwrap();
        drop(some);
        common::at_rest(&device).await;
    }
}

// Nothing else is in use that could come back.
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

// Whoever has the memory need not drop it for that.
#[tokio::test]
async fn f1_who_waits_for_memory_of_a_lost_device_is_told() {
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

// The first of the line may be one that is not polled any more.
#[tokio::test]
async fn f1_all_who_wait_for_memory_of_a_lost_device_are_told() {
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
    assert!(within(blocks.alloc_when_free::<u8>(&a, 1)).await.unwrap_err().is_device_lost(), "it joins no line");
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

/// Sizes that no allocator can ever hold are an error at once, and hold up none of those who wait there.
#[tokio::test]
async fn m13_what_can_never_be_there_is_not_waited_for() {
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

// It counts as in use until the driver has answered: a task that looks meanwhile looks again.
#[tokio::test(flavor = "multi_thread")]
async fn m13_a_request_that_the_driver_refuses_holds_up_no_task() {
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

// Neither has any: each is refused, and is not taken by the other for one that will give some back.
#[tokio::test]
async fn m13_two_tasks_do_not_wait_for_what_the_driver_refuses_both() {
    let device = emulated_with(Emulated::new().memory(64 << 10));
    let stream = Stream::new(&device).unwrap();
    // More than there is, and not more than there could be.
    let blocks = Allocator::blocks(&device, 16 << 10, 2).unwrap();
    // One that goes would tell the other.
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

// The first example of README in a loop, with the device busy: memory for work on a stream comes back to it at once.
#[test]
fn m13_a_buffer_made_of_a_slice_is_used_again_on_its_stream() {
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

/// The blocks of an allocator that is gone are there for others as soon as work on the last of them is done.
#[test]
fn m13_what_an_allocator_had_that_is_gone_is_there_at_once() {
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
    // The same for memory that is no block; and while the thread that watches the device's streams may be the one that gives it back.
    for _ in 0..1000 {
        let blocks = Allocator::blocks(&device, BLOCK, 10).unwrap();
        let mut memory = blocks.alloc::<u8>(&stream, BLOCK as usize).unwrap();
        stream.fill(&mut memory, 1).unwrap();
        drop((memory, blocks));
        stream.synchronize_blocking().unwrap();
        stream.alloc::<u8>(10 * BLOCK as usize).unwrap();
    }
}

/// The driver refuses memory that is there, once, and nothing is in use that could come back: it is asked again.
#[tokio::test]
async fn m13_a_wait_outlives_a_refusal_of_the_driver() {
    let device = emulated_with(Emulated::new().memory(1 << 20).faults(Faults::new().fail_alloc(2)));
    let stream = Stream::new(&device).unwrap();
    let weights = Buffer::<u32>::new(&device, LEN).unwrap();
    let memory = Allocator::unbounded(&device).maximum(1 << 19);
    let (first, second) = (memory.alloc_when_free::<u32>(&stream, 16), memory.alloc_when_free::<u32>(&stream, 16));
    let (first, second) = within(futures::future::join(first, second)).await;
    assert!(first.is_ok() && second.is_ok(), "those behind the first have theirs, too");
    drop(weights);
}
