//! Scenario C9: memory as a condition of an operator's runs; and the parts of M13 on flows.

use std::{sync::Arc, task::Context};

use common::{
    Shared, SinkPorts, SourcePorts, emulated, emulated_with, freed, hold, lock, on_both, shared, until, within,
};
use futures::FutureExt;
use tokio::sync::{Semaphore, mpsc};
use wakeline::{
    Stream,
    condition::{Condition, IntoCondition, MemoryAvailable, Status, When, all_of, any_of, count, memory},
    device::Emulated,
    memory::Allocator,
    operator::{concurrent, map, sink, source},
    prelude::*,
};

const BLOCK: u64 = 4096;
const LEN: usize = BLOCK as usize;

/// Sends pages of its own memory, filled with the page's number.
struct Pages {
    next: u8,
    each: usize,
}

impl Operator for Pages {
    type Ports = SourcePorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut page = cx.alloc::<u8>(self.each)?;
        self.next += 1;
        cx.stream()?.fill(&mut page, self.next)?;
        ports.output.send(page.into()).await?;
        Ok(())
    }
}

fn pages(each: usize) -> Pages {
    Pages { next: 0, each }
}

/// Keeps the pages that it receives, and drops one per permit of `go`.
fn keep(go: &Arc<Semaphore>, seen: &Shared<u8>) -> impl Operator<Ports = SinkPorts<Envelope<u8>>> + use<> {
    let (go, seen) = (go.clone(), seen.clone());
    sink(move |page: Envelope<u8>| {
        let (go, seen) = (go.clone(), seen.clone());
        async move {
            go.acquire().await.unwrap().forget();
            let first = page.read().await?[0];
            lock(&seen).push(first);
            Ok(())
        }
    })
}

/// Runs a flow of three pages, each of which is copied to the host, and returns its outcome.
async fn three_pages(device: &Device, allocator: &Allocator, bytes: u64, each: usize) -> Result<Report> {
    let (seen, go) = (shared(), Arc::new(Semaphore::new(8)));
    let mut flow = Flow::new("pages");
    let write = flow.add("write", pages(each)).on(device).when(memory(allocator, bytes)).when(count(3));
    let read = flow.add("read", keep(&go, &seen));
    flow.connect_with(write.output, read.input, HubOptions::bounded(4).envelope_bytes(each));
    let report = within(flow.run()).await?;
    assert_eq!(*lock(&seen), [1, 2, 3]);
    Ok(report)
}

on_both!(c9_a_condition_on_all_memory_runs, async |device: Device| {
    let all = Allocator::unbounded(&device).maximum(1000);
    let report = three_pages(&device, &all, 1000, 1000).await.unwrap();
    assert_eq!(report.operator("write").unwrap().runs, 3);
    assert_eq!(report.operator("write").unwrap().memory_peak, 1000);
    // The run has returned: nothing else is pending.
    assert!(all.stats().is_at_rest(), "{:?}", all.stats());
    freed(&device).await;
});

on_both!(c9_one_byte_over_is_an_error, async |device: Device| {
    for (allocator, bytes) in [
        (Allocator::unbounded(&device).maximum(1000), 1001),
        (Allocator::unbounded(&device), device.memory().unwrap().total + 1),
        (Allocator::blocks(&device, BLOCK, 2).unwrap(), 2 * BLOCK + 1),
    ] {
        let error = three_pages(&device, &allocator, bytes, 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
        let expected = format!("operator `write` waits for {bytes} bytes of {allocator}, which never has more than");
        assert!(error.to_string().contains(&expected), "{error}");
    }
    let error = three_pages(&device, &Allocator::unbounded(&device), 0, 1).await.unwrap_err();
    assert!(error.to_string().contains("waits for 0 bytes"), "{error}");
    freed(&device).await;
});

on_both!(c9_two_of_two_blocks_run_and_three_never_do, async |device: Device| {
    let blocks = Allocator::blocks(&device, BLOCK, 2).unwrap();
    let report = three_pages(&device, &blocks, 2 * BLOCK, LEN).await.unwrap();
    assert_eq!(report.operator("write").unwrap().runs, 3);
    assert_eq!(blocks.stats().from_driver, 2);
    let error = three_pages(&device, &blocks, 3 * BLOCK, LEN).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
    assert!(error.to_string().contains("never has more than 8192"), "{error}");
    until("all blocks are returned", || blocks.stats().is_at_rest()).await;
    freed(&device).await;
});

fn status(running: &wakeline::Running, name: &str) -> wakeline::flow::OperatorStatus {
    running.status().into_iter().find(|status| &*status.name == name).unwrap()
}

/// The number of pages that were written while none was dropped, and the peak memory.
async fn ahead(device: &Device, count_of_blocks: usize) -> (u64, u64) {
    let blocks = Allocator::blocks(device, BLOCK, count_of_blocks).unwrap();
    let (seen, go) = (shared(), Arc::new(Semaphore::new(0)));
    let mut flow = Flow::new("ahead");
    let write = flow.add("write", pages(LEN)).on(device).when(memory(&blocks, BLOCK)).when(count(4));
    let pass = flow.add("pass", hold_back(&go, &seen)).on(device);
    flow.connect_with(write.output, pass.input, HubOptions::bounded(4));
    let running = flow.spawn().unwrap();
    let write = || status(&running, "write");

    until("it waits for memory", || {
        blocks.stats().in_use == count_of_blocks as u64 * BLOCK && write().status == Status::Wait
    })
    .await;
    let ahead = write().runs;
    let waits_for = write().waits_for;
    assert!(waits_for.iter().any(|text| text.contains("4096 bytes of")), "{waits_for:?}");
    go.add_permits(8);
    let report = within(running).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2, 3, 4]);
    assert_eq!(report.operator("write").unwrap().runs, 4);
    (ahead, report.operator("write").unwrap().memory_peak)
}

/// Runs on the device: reads each page and drops it, one per permit of `go`.
fn hold_back(go: &Arc<Semaphore>, seen: &Shared<u8>) -> impl Operator<Ports = SinkPorts<Envelope<u8>>> + use<> {
    struct HoldBack(Arc<Semaphore>, Shared<u8>);
    impl Operator for HoldBack {
        type Ports = SinkPorts<Envelope<u8>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let page = ports.input.take()?;
            let mut here = Buffer::<u8>::pinned(cx.device(), page.len())?;
            cx.stream()?.copy(&page, &mut here)?;
            self.0.acquire().await.unwrap().forget();
            drop(page);
            let first = here.read().await?[0];
            lock(&self.1).push(first);
            Ok(())
        }
    }
    HoldBack(go.clone(), seen.clone())
}

// The report shows the peak.
on_both!(m13_with_one_block_the_next_run_waits_with_two_they_overlap, async |device: Device| {
    assert_eq!(ahead(&device, 1).await, (1, BLOCK));
    assert_eq!(ahead(&device, 2).await, (2, 2 * BLOCK));
    freed(&device).await;
});

// The waiting run begins when the block is dropped, and its work comes after the other stream's.
on_both!(c9_a_run_waits_on_the_device_for_a_block_that_a_stream_still_uses, async |device: Device| {
    let blocks = Allocator::blocks(&device, BLOCK, 1).unwrap();
    let other = Stream::named(&device, "other").unwrap();
    let mut page = blocks.alloc::<u8>(&other, LEN).unwrap();
    let held = hold(&other);
    other.fill(&mut page, 77).unwrap();
    let seen = shared();
    let go = Arc::new(Semaphore::new(8));
    let mut flow = Flow::new("one");
    let write = flow.add("write", pages(LEN)).on(&device).when(memory(&blocks, BLOCK)).when(count(1));
    let pass = flow.add("pass", hold_back(&go, &seen)).on(&device);
    flow.connect(write.output, pass.input);
    let running = flow.spawn().unwrap();
    let write = || status(&running, "write");
    // A holder outside the flow has the block: the run waits for it.
    until("the operator waits", || write().status == Status::WaitEvent).await;
    drop(page);
    until("the operator has run", || write().runs == 1).await;
    assert!(lock(&seen).is_empty(), "its work waits on the device");
    drop(held);
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [1]);
    until("all blocks are returned", || blocks.stats().is_at_rest()).await;
    freed(&device).await;
});

// A limit in bytes is counted in bytes: memory that a stream may still use is not available, and becomes so by itself.
on_both!(c9_bytes_that_a_stream_still_uses_are_waited_for_as_an_event, async |device: Device| {
    let all = Allocator::unbounded(&device).maximum(1000);
    let other = Stream::named(&device, "other").unwrap();
    let mut some = all.alloc::<u8>(&other, 600).unwrap();
    let held = hold(&other);
    other.fill(&mut some, 1).unwrap();
    drop(some);
    let seen = shared();
    let go = Arc::new(Semaphore::new(8));
    let mut flow = Flow::new("bytes");
    let write = flow.add("write", pages(1000)).on(&device).when(memory(&all, 1000)).when(count(1));
    let pass = flow.add("pass", hold_back(&go, &seen)).on(&device);
    flow.connect(write.output, pass.input);
    let running = flow.spawn().unwrap();
    let write = || status(&running, "write");
    until("the operator waits", || write().status == Status::WaitEvent).await;
    assert!(write().waits_for.iter().any(|text| text.contains("600 wait for streams")), "{:?}", write());
    drop(held);
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [1]);
    freed(&device).await;
});

// Of two operators that are ready for the same memory one gets it. The part that its run does not use is returned.
on_both!(c9_reserved_memory_belongs_to_one_operator, async |device: Device| {
    let all = Allocator::unbounded(&device).maximum(1000);
    let runs = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (most, seen) = (Arc::new(std::sync::atomic::AtomicU64::new(0)), shared());
    let mut flow = Flow::new("two");
    for name in ["left", "right"] {
        let (runs, most, all2) = (runs.clone(), most.clone(), all.clone());
        let one = flow
            .add(
                name,
                source(move || {
                    let (runs, most, all) = (runs.clone(), most.clone(), all2.clone());
                    async move {
                        runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        most.fetch_max(all.stats().reserved, std::sync::atomic::Ordering::Relaxed);
                        tokio::task::yield_now().await;
                        Ok(Some(0_u8))
                    }
                }),
            )
            .on(&device)
            .when(memory(&all, 600))
            .when(count(50));
        let end = flow.add(format!("{name} end"), common::keep::<u8>(&seen));
        flow.connect(one.output, end.input);
    }
    within(flow.run()).await.unwrap();
    use std::sync::atomic::Ordering::Relaxed;
    assert_eq!((runs.load(Relaxed), most.load(Relaxed)), (100, 600));
    assert!(all.stats().is_at_rest());
});

/// An operator of the flow keeps the memory: the flow reports which operator waits for what.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c9_memory_that_never_comes_back_is_a_stall() {
    struct Hoard(Vec<Buffer<u8>>);
    impl Operator for Hoard {
        type Ports = SourcePorts<u8>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            self.0.push(cx.alloc(LEN)?);
            ports.output.send(0).await?;
            Ok(())
        }
    }
    let device = emulated();
    let blocks = Allocator::blocks(&device, BLOCK, 2).unwrap();
    let seen = shared();
    let mut flow = Flow::new("hoard");
    let hoard = flow.add("hoard", Hoard(Vec::new())).on(&device).when(memory(&blocks, BLOCK));
    let end = flow.add("end", common::keep::<u8>(&seen));
    flow.connect(hoard.output, end.input);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stalled, "{error}");
    assert!(error.to_string().contains("`hoard` waits for 4096 bytes of 2 blocks of 4096 bytes on"), "{error}");
    assert!(error.to_string().contains("(2 of 2 blocks are in use, 0 wait for streams)"), "{error}");
    drop(flow);
    freed(&device).await;
}

/// An allocator of another device and several runs at a time are both errors before running.
#[tokio::test]
async fn c9_impossible_conditions_are_errors_before_running() {
    let (device, other) = (emulated(), emulated_with(Emulated::new().name("other")));
    let blocks = Allocator::blocks(&other, BLOCK, 1).unwrap();
    let mut flow = Flow::new("wrong");
    let write = flow.add("write", pages(1)).on(&device).allocator(&blocks);
    let both = concurrent(2, map(async |page: Envelope<u8>| Ok(page)));
    let pass = flow.add("pass", both).on(&other).when(memory(&blocks, 1));
    let _ = flow.add("scratch", Scratch(1)).on(&device).when(memory(&blocks, 1));
    let (seen, go) = (shared(), Arc::new(Semaphore::new(8)));
    let read = flow.add("read", keep(&go, &seen));
    flow.connect_with(write.output, pass.input, HubOptions::default().envelope_bytes(1));
    flow.connect(pass.output, read.input);
    let error = flow.run().await.unwrap_err();
    assert!(error.to_string().contains("operator `write` is on emulated"), "{error}");
    assert!(error.to_string().contains("but is given 1 block of"), "{error}");
    assert!(error.to_string().contains("but waits for memory of 1 block of"), "{error}");
    assert!(error.to_string().contains("operator `pass` has several runs at a time"), "{error}");
}

/// A run would consume the memory that it waits for: one error before running.
#[tokio::test]
async fn c9_several_conditions_on_one_allocator_are_an_error_before_running() {
    let device = emulated();
    let blocks = Allocator::blocks(&device, BLOCK, 1).unwrap();
    let again = || memory(&blocks.clone(), 70);
    let expected = "operator `write` waits for 60 and for 70 bytes of 1 block of 4096 bytes on";
    type Shape = fn(MemoryAvailable, MemoryAvailable) -> (When, Option<When>);
    let shapes: [Shape; 4] = [
        |one, other| (one.into_condition(), Some(other.into_condition())),
        |one, other| (any_of(one, other), None),
        |one, other| (all_of(one, other), None),
        |one, other| (any_of(one, count(1)), Some(other.into_condition())),
    ];
    for shape in shapes {
        let mut flow = Flow::new("twice");
        let (first, second) = shape(memory(&blocks, 60), again());
        let mut write = flow.add("write", Scratch(1)).on(&device).when(first);
        if let Some(second) = second {
            write = write.when(second);
        }
        let _ = write;
        let error = within(flow.run()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
        assert_eq!(error.to_string().matches(expected).count(), 1, "{error}");
        assert!(error.to_string().contains("combine them into one `.when(memory(..))`"), "{error}");
    }
    // Conditions on different allocators are allowed.
    let others = Allocator::blocks(&device, BLOCK, 1).unwrap();
    let mut flow = Flow::new("once");
    let _ =
        flow.add("write", Scratch(1)).on(&device).when(memory(&blocks, 60)).when(memory(&others, 60)).when(count(1));
    within(flow.run()).await.unwrap();
}

// A run allocates from the memory reserved for it, first of the operator's own allocator, then of the other; and after
// that from its own allocator.
on_both!(c9_a_run_allocates_from_all_memory_reserved_for_it, async |device: Device| {
    /// Allocates three pages, and sends how many of them are of the first allocator and of the second.
    struct Three([Allocator; 2], mpsc::UnboundedSender<[u64; 2]>);
    impl Operator for Three {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
            let mut pages = Vec::new();
            for _ in 0..3 {
                pages.push(cx.alloc::<u8>(LEN)?);
                let _ = self.1.send(self.0.each_ref().map(|from| from.stats().in_use / BLOCK));
            }
            Ok(())
        }
    }
    let both = [2, 2].map(|count| Allocator::blocks(&device, BLOCK, count).unwrap());
    let [one, other] = &both;
    type Given = fn(&Allocator, &Allocator) -> (Option<Allocator>, Vec<MemoryAvailable>);
    let cases: [(Given, [[u64; 2]; 3]); 4] = [
        // Its own allocator has no condition: the memory reserved of the other comes first.
        (|one, other| (Some(one.clone()), vec![memory(other, BLOCK)]), [[0, 1], [1, 1], [2, 1]]),
        (|one, other| (Some(one.clone()), vec![memory(other, BLOCK), memory(one, BLOCK)]), [[1, 0], [1, 1], [2, 1]]),
        (|one, other| (None, vec![memory(other, BLOCK), memory(one, BLOCK)]), [[0, 1], [1, 1], [1, 2]]),
        (|one, other| (None, vec![memory(one, 2 * BLOCK), memory(other, BLOCK)]), [[1, 0], [2, 0], [2, 1]]),
    ];
    for (given, expected) in cases {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let (own, conditions) = given(one, other);
        let mut flow = Flow::new("three");
        let mut three = flow.add("three", Three(both.clone(), sender)).on(&device).when(count(1));
        if let Some(own) = own {
            three = three.allocator(&own);
        }
        let _ = conditions.into_iter().fold(three, |three, condition| three.when(condition));
        within(flow.run()).await.unwrap();
        let drawn: Vec<_> = std::iter::from_fn(|| receiver.try_recv().ok()).collect();
        assert_eq!(drawn, expected);
        assert!(both.iter().all(|from| from.stats().is_at_rest()));
    }
    drop(both);
    freed(&device).await;
});

/// A flow's hubs need memory that a stream still uses: the flow waits for it. If no memory will be freed, the error
/// gives the numbers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m6_a_flow_waits_for_memory_that_a_stream_still_uses() {
    let device = emulated_with(Emulated::new().memory(2 * BLOCK).workers(4));
    let stream = Stream::new(&device).unwrap();
    let run = || {
        let seen = shared();
        let mut flow = Flow::new("full");
        let produce = flow.add("produce", common::SendEach::new([vec![1_u32; LEN / 4]]));
        let add = flow.add("add", common::Increment).on(&device);
        let collect = flow.add("collect", common::Collect(seen.clone()));
        flow.connect_with(produce.output, add.input, HubOptions::bounded(1).envelope_bytes(LEN));
        flow.connect(add.output, collect.input);
        (flow.spawn().unwrap(), seen)
    };
    let mut all = stream.alloc::<u8>(2 * LEN).unwrap();
    let error = within(run().0).await.unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains("8192 are in use"), "{error}");
    // Only once, and without advice that a hub cannot follow.
    assert_eq!(error.to_string().matches("asked for").count(), 1, "{error}");
    assert!(!error.to_string().contains("alloc_when_free"), "{error}");
    let held = hold(&stream);
    stream.fill(&mut all, 1).unwrap();
    drop(all);
    let (mut running, seen) = run();
    assert!((&mut running).now_or_never().is_none(), "the flow waits");
    drop(held);
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [[2_u32; LEN / 4]]);
    freed(&device).await;
}

// An operator without a condition uses the allocator that it was given, on its own stream; one on the host uses host
// memory.
on_both!(m13_operators_have_allocators, async |device: Device| {
    let blocks = Allocator::blocks(&device, BLOCK, 2).unwrap();
    let (seen, go) = (shared(), Arc::new(Semaphore::new(8)));
    let mut flow = Flow::new("given");
    let write = flow.add("write", pages(LEN)).on(&device).allocator(&blocks).when(count(2));
    let read = flow.add("read", keep(&go, &seen));
    flow.connect_with(write.output, read.input, HubOptions::bounded(4).envelope_bytes(LEN));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [1, 2]);
    assert_eq!(blocks.stats().allocations, 2);
    assert!(report.device(device.name()).unwrap().memory_peak >= BLOCK);
    assert!(report.to_string().contains("bytes of memory in use"), "{report}");

    let (sender, mut receiver) = mpsc::unbounded_channel();
    struct OnHost(mpsc::UnboundedSender<bool>);
    impl Operator for OnHost {
        type Ports = ();

        async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
            cx.finish();
            let mut scratch = cx.alloc::<u32>(8)?;
            scratch.as_mut_slice()?[0] = 1;
            let _ = self.0.send(scratch.is_host());
            Ok(())
        }
    }
    let mut flow = Flow::new("host");
    flow.add("host", OnHost(sender));
    let report = within(flow.run()).await.unwrap();
    assert_eq!(receiver.recv().now_or_never(), Some(Some(true)));
    assert_eq!(report.operator("host").unwrap().memory_peak, 32);
    until("all blocks are returned", || blocks.stats().is_at_rest()).await;
    freed(&device).await;
});

/// Allocates this many bytes in each run.
struct Scratch(usize);

impl Operator for Scratch {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        let mut scratch = cx.alloc::<u8>(self.0)?;
        cx.stream()?.fill(&mut scratch, 1)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c9_a_condition_waits_for_blocks_of_another_operator() {
    let device = emulated_with(Emulated::new().memory(8192));
    let blocks = Allocator::blocks(&device, 4096, 1).unwrap();
    let mut flow = Flow::new("scratch");
    let _ = flow
        .add("scratch", Scratch(8192))
        .on(&device)
        .when(memory(&Allocator::unbounded(&device), 8192))
        .when(count(1));
    let running = flow.spawn().unwrap();
    until("the operator waits", || status(&running, "scratch").status == Status::WaitEvent).await;
    drop(blocks);
    within(running).await.unwrap();
}

/// Panics once, in `claim` or in `ended`.
struct PanicsOnce {
    in_claim: bool,
    in_ended: bool,
}

impl Condition for PanicsOnce {
    fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
        Status::Ready
    }

    fn claim(&mut self) -> bool {
        assert!(!std::mem::take(&mut self.in_claim), "once, in claim");
        true
    }

    fn ended(&mut self) {
        assert!(!std::mem::take(&mut self.in_ended), "once, in ended");
    }
}

/// B4-6: memory that was reserved before a condition panicked is available to another flow and to the next run.
#[tokio::test]
async fn a_condition_that_panics_leaves_no_memory_reserved() {
    type Conditions = fn(MemoryAvailable, PanicsOnce) -> [When; 2];
    let both: Conditions = |memory, panics| [memory.into_condition(), panics.into_condition()];
    let reversed: Conditions = |memory, panics| [panics.into_condition(), memory.into_condition()];
    let grouped: Conditions = |memory, panics| [all_of(memory, panics), count(9).into_condition()];
    let either: Conditions = |memory, panics| [any_of(memory, panics), count(9).into_condition()];
    for conditions in [both, reversed, grouped, either] {
        for in_claim in [true, false] {
            let device = emulated();
            let blocks = Allocator::blocks(&device, BLOCK, 1).unwrap();
            let make = |conditions: [When; 2]| {
                let (mut flow, mut left) = (Flow::new("reserved"), 2);
                let next = move || std::future::ready(Ok((left > 0).then(|| left -= 1)));
                let [one, other] = conditions;
                let source = flow.add("source", source(next)).on(&device).when(one).when(other);
                let sink = flow.add("sink", sink(async |()| Ok(())));
                flow.connect(source.output, sink.input);
                flow
            };
            let panics = PanicsOnce { in_claim, in_ended: !in_claim };
            let mut first = make(conditions(memory(&blocks, BLOCK), panics));
            let failed = within(first.run()).await.unwrap_err();
            assert_eq!(failed.kind(), ErrorKind::Panicked, "{failed}");
            assert_eq!(blocks.stats().reserved, 0);
            let mut other = make([memory(&blocks, BLOCK).into_condition(), count(9).into_condition()]);
            within(other.run()).await.unwrap();
            within(first.run()).await.unwrap();
            assert_eq!(blocks.stats().reserved, 0);
        }
    }
}

/// B4-6: when a condition panics, the others' claims are given back, and the others' `ended` is still called.
#[tokio::test]
async fn a_condition_that_panics_keeps_no_other_from_its_calls() {
    struct Notes(Shared<&'static str>);
    impl Condition for Notes {
        fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
            Status::Ready
        }

        fn claim(&mut self) -> bool {
            lock(&self.0).push("claimed");
            true
        }

        fn give_back(&mut self) {
            lock(&self.0).push("given back");
        }

        fn ended(&mut self) {
            lock(&self.0).push("ended");
        }
    }
    for (in_claim, expected) in [(true, ["claimed", "given back"]), (false, ["claimed", "ended"])] {
        let notes = shared();
        let mut flow = Flow::new("notes");
        let (own, panics) = (Notes(notes.clone()), PanicsOnce { in_claim, in_ended: !in_claim });
        let source = flow.add("source", source(async || Ok(Some(()))));
        // The condition that panics is called after the other's `claim`, and before the other's `ended`.
        let source = if in_claim { source.when(own).when(panics) } else { source.when(panics).when(own) };
        let sink = flow.add("sink", sink(async |()| Ok(())));
        flow.connect(source.output, sink.input);
        within(flow.run()).await.unwrap_err();
        assert_eq!(*lock(&notes), expected);
    }
}
