//! Operators that block a worker thread of the runtime.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::await_holding_lock, reason = "it blocks another task on purpose")]
async fn a_blocked_worker_thread_is_a_warning_until_the_poll_has_ended() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("blocked");
    let (passes, mut sends) = (block.clone(), 0);
    let source = source(move || {
        passes.pass();
        sends += 1;
        let more = sends < 3;
        async move { if more { Ok(Some(1)) } else { pending().await } }
    });
    chain(&mut flow, source, &[]);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();

    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["read"]), "{warning}");
    assert!(warning.sentence.contains("`read` blocks a worker thread"), "{warning}");
    assert!(warning.sentence.contains("`.on_own_thread()`"), "{warning}");
    assert!(warning.since >= ms(50), "{warning:?}");
    let seen = running.snapshot();
    assert_eq!(seen.warnings.len(), 1, "{seen}");
    assert_eq!((seen.warnings[0].number, seen.warnings[0].began), (warning.number, warning.began));
    assert!(seen.warnings[0].since >= warning.since);
    assert!(seen.to_string().contains("\nwarning for "), "{seen}");
    // It goes on, and is the same warning.
    snapshot(&running, |seen| seen.warnings.iter().any(|now| now.since > warning.since + ms(50))).await;

    drop(held);
    let seen = snapshot(&running, |seen| seen.warnings.is_empty()).await;
    assert_eq!((seen.warning_counts.blocked, seen.warning_counts.waiting, seen.warning_counts.lost), (1, 0, 0));
    end(running).await;
    assert!(calls.try_recv().is_err(), "one occurrence is one warning");
}

/// Two runs of a concurrent operator block two threads: the operator cannot have a thread of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_blocked_run_of_a_concurrent_operator() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("concurrent");
    let read = flow.add("read", source(async || Ok(Some(1))));
    let passes = block.clone();
    let work = sink(move |_: u32| {
        passes.pass();
        std::future::ready(Ok(()))
    });
    let write = flow.add("write", concurrent(2, work));
    flow.connect(read.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["write"]), "{warning}");
    assert!(!warning.sentence.contains("on_own_thread"), "{warning}");
    assert!(warning.sentence.contains("spawn_blocking"), "{warning}");
    drop(held);
    end(running).await;
}

/// An operator of a flow on one thread blocks all others, and the observer sees it.
#[test]
fn a_blocked_thread_of_a_local_flow() {
    let block = Block::default();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let passes = block.clone();
    let held = block.0.lock().unwrap();
    let thread = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let mut flow = LocalFlow::new("local");
            let mut left = 0..3;
            let read = flow.add("read", source(move || ready(Ok(left.next()))));
            let write = flow.add(
                "write",
                sink(move |_: i32| {
                    passes.pass();
                    ready(Ok(()))
                }),
            );
            flow.connect(read.output, write.input);
            flow.observe(&watch);
            flow.run().await.map(drop)
        })
    });
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["write"]), "{warning}");
    drop(held);
    thread.join().unwrap().unwrap();
}

/// Sends one envelope after the other.
struct Load;

impl Operator for Load {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut data = ports.output.blank().await?;
        data.set_len(4)?;
        data.write().await?.fill(1);
        ports.output.send(data).await?;
        Ok(())
    }
}

struct Increment(Block);

impl Operator for Increment {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut data = ports.input.take()?;
        self.0.pass();
        increment::launch(cx.stream()?, &mut data)?;
        ports.output.send(data).await?;
        Ok(())
    }
}

/// The operators of a section are one task, which cannot have a thread of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_section_that_blocks() {
    let (block, device) = (Block::default(), emulated());
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), Duration::MAX);
    let mut flow = Flow::new("section");
    let load = flow.add("load", Load);
    let one = flow.add("one", Increment(block.clone()));
    let two = flow.add("two", Increment(Block::default()));
    let (one, two) = (one.on(&device), two.on(&device));
    let write = flow.add("write", sink(async |_: Envelope<u32>| Ok(())));
    flow.replay("net", (&one, &two));
    flow.connect_with(load.output, one.input, HubOptions::bounded(2).envelope_bytes(16));
    flow.connect(one.output, two.input);
    flow.connect(two.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["one", "two"]), "{warning}");
    assert!(warning.sentence.starts_with("section `net` blocks a worker thread"), "{warning}");
    drop(held);
    end(running).await;
}

/// Those that wait for the blocked thread, and for the operator's messages, have no warnings of their own.
#[test]
fn others_that_wait_for_a_blocked_thread_are_silent() {
    let block = Block::default();
    let held = block.0.lock().unwrap();
    let (watch, calls) = watch(ms(50), ms(150));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut flow = Flow::new("one worker");
    let passes = block.clone();
    let mut count = 0;
    // Once the others run.
    let blocks = source(move || {
        count += 1;
        if count == 10 {
            passes.pass();
        }
        ready(Ok(Some(1)))
    });
    chain(&mut flow, blocks, &["work"]);
    let tick = flow.add("tick", source(async || Ok(Some(1))));
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(tick.output, tock.input);
    flow.observe(&watch);
    let running = {
        let _inside = runtime.enter();
        flow.spawn().unwrap()
    };
    let warning = next(&calls);
    assert_eq!((warning.kind, of(&warning)), (WarningKind::Blocked, vec!["read"]), "{warning}");
    let began = Instant::now();
    let seen = loop {
        let seen = running.snapshot();
        if seen.warnings[0].since > ms(600) {
            break seen;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{seen}");
        thread::yield_now();
    };
    assert_eq!((seen.warnings.len(), seen.warning_counts.waiting), (1, 0), "{seen}");
    drop(held);
    runtime.block_on(end(running));
}
