//! Operators that wait for too long.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_on_its_own_thread_may_block_and_others_wait_for_it() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(20), ms(150));
    let mut flow = Flow::new("own thread");
    let passes = block.clone();
    let read = flow
        .add(
            "read",
            source(move || {
                passes.pass();
                std::future::ready(Ok(Some(1)))
            }),
        )
        .on_own_thread();
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["write"]), "{warning}");
    assert!(warning.sentence.contains("`write` waits for a message in hub `read.output -> write.input`"), "{warning}");
    assert!(warning.sentence.contains("`read`, which runs, would have to send one"), "{warning}");
    drop(held);
    end(running).await;
}

/// The operator that the others wait for is named, and they are named with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_waits_is_one_warning() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let (answer, answered) = oneshot::channel::<u32>();
    let mut answered = Some(answered);
    let source = source(move || {
        let answered = answered.take();
        async move {
            match answered {
                Some(answered) => Ok(answered.await.ok()),
                None => pending().await,
            }
        }
    });
    let mut flow = Flow::new("chain");
    chain(&mut flow, source, &["a", "b", "c"]);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["read"]), "{warning}");
    assert!(warning.sentence.contains("waits for a future that its run awaits"), "{warning}");
    assert!(warning.sentence.ends_with("`a`, `b`, `c` and `write` wait for it"), "{warning}");
    assert!(warning.since >= ms(150));
    let seen = snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > ms(400))).await;
    assert_eq!((seen.warnings.len(), seen.warning_counts.waiting), (1, 1), "{seen}");

    // A second wait is a second warning.
    answer.send(1).unwrap();
    let second = next(&calls);
    assert_eq!((of(&second), second.number), (vec!["read"], 1), "{second}");
    assert!(second.began > warning.began);
    let seen = running.snapshot();
    assert_eq!((seen.warnings.len(), seen.warning_counts.waiting), (1, 2), "{seen}");
    end(running).await;
    assert!(calls.try_recv().is_err(), "there were two waits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_gate_is_named_by_the_operator_behind_it() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let gate = Gate::paused();
    let mut flow = Flow::new("gate");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let work = flow.add("work", map(async |n: u32| Ok(n))).when(gate.clone());
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!(of(&warning), ["work"], "{warning}");
    assert!(warning.sentence.contains("gate"), "{warning}");
    assert!(warning.sentence.ends_with("; `read` and `write` wait for it"), "{warning}");
    gate.resume();
    snapshot(&running, |seen| seen.warnings.is_empty()).await;
    end(running).await;
}

/// It waits as it should: for callers, for a time, and while the flow is paused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_that_are_meant_are_no_warnings() {
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("meant");
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    let feed = flow.ingress::<u32>("feed", write.input);
    let tick = flow.add("tick", source(async || Ok(Some(1)))).when(every(Duration::from_secs(3600)));
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(tick.output, tock.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    snapshot(&running, |seen| seen.window > ms(400)).await;
    running.pause();
    let seen = snapshot(&running, |seen| seen.window > ms(800)).await;
    assert!(seen.warnings.is_empty() && calls.try_recv().is_err(), "{seen}");
    drop(feed);
    end(running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_room_names_the_reader() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(20), ms(150));
    let mut flow = Flow::new("room");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let passes = block.clone();
    let write = flow.add(
        "write",
        sink(move |_: u32| {
            passes.pass();
            ready(Ok(()))
        }),
    );
    let write = write.on_own_thread();
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["read"]), "{warning}");
    assert!(warning.sentence.contains("room in hub `read.output -> write.input`"), "{warning}");
    assert!(warning.sentence.contains("`write`, which runs, would have to take a message"), "{warning}");
    drop(held);
    end(running).await;
}

/// Awaits work on a device.
struct Work(Block);

impl Operator for Work {
    type Ports = MapPorts<u32, u32>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (number, passes) = (ports.input.take()?, self.0.clone());
        cx.stream()?.host_function(move || passes.pass())?;
        cx.stream()?.completed().await?;
        ports.output.send(number).await?;
        Ok(())
    }
}

/// Work on a device does not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_device() {
    let (block, device) = (Block::default(), emulated());
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("device");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let work = flow.add("work", Work(block.clone()));
    let work = work.on(&device);
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["work"]), "{warning}");
    assert!(warning.sentence.contains("`work` waits for its work on a device"), "{warning}");
    drop(held);
    end(running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_memory() {
    let device = emulated();
    let stream = Stream::new(&device).unwrap();
    let allocator = Allocator::blocks(&device, 1 << 10, 1).unwrap();
    let kept = allocator.alloc::<u8>(&stream, 1 << 10).unwrap();
    let (watch, calls) = watch(Duration::MAX, ms(150));
    let mut flow = Flow::new("memory");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let write = flow.add("write", sink(async |_: u32| Ok(()))).on(&device).when(memory(&allocator, 1 << 10));
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Waiting, vec!["write"]), "{warning}");
    assert!(warning.sentence.contains("memory"), "{warning}");
    drop(kept);
    snapshot(&running, |seen| seen.warnings.is_empty()).await;
    end(running).await;
}

/// Every wait is too long, and nothing breaks: the flow ends, and what is listed and queued is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_zero() {
    let watch = Observe::new().every(ms(1)).warn_blocked(Duration::ZERO).warn_waiting(Duration::ZERO);
    let mut flow = Flow::new("zero");
    for at in 0..200 {
        let read = flow.add(format!("read {at}"), source(pending::<Result<Option<u32>>>));
        let write = flow.add(format!("write {at}"), sink(async |_: u32| Ok(())));
        flow.connect(read.output, write.input);
    }
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let seen = snapshot(&running, |seen| seen.warning_counts.waiting >= 200).await;
    assert_eq!(seen.warnings.len(), 64, "{seen}");
    assert!(seen.to_string().contains("and 56 more warnings"), "{seen}");
    end(running).await;
}
