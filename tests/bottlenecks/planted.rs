//! The sentence for bottlenecks that were planted, of each kind that an observer knows.

use std::{
    thread,
    time::{Duration, Instant},
};

use common::*;
use wakeline::{
    Running, Stream,
    condition::{Gate, every, memory},
    memory::Allocator,
    observe::{Bottleneck, Observe, Reason},
    operator::{map_with, sink_with},
    prelude::*,
};

use crate::ALONE;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Computes for a while, on the host.
fn compute(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        thread::yield_now();
    }
}

fn watch() -> Observe {
    Observe::new().every(ms(1)).keep(Duration::from_secs(2))
}

/// The bottleneck of a running flow that was observed for so long.
async fn observed(running: &Running, window: Duration) -> Bottleneck {
    let began = Instant::now();
    loop {
        let snapshot = running.snapshot();
        match snapshot.bottleneck {
            Some(found) if snapshot.window >= window => return found,
            _ => assert!(began.elapsed() < Duration::from_secs(60), "no bottleneck is found: {snapshot}"),
        }
        tokio::time::sleep(ms(20)).await;
    }
}

/// Runs the flow until its bottleneck is known.
async fn bottleneck(mut flow: Flow) -> Bottleneck {
    let _alone = ALONE.lock().await;
    flow.observe(&watch());
    let running = flow.spawn().unwrap();
    let found = observed(&running, ms(500)).await;
    running.abort();
    let _ = running.await;
    found
}

#[track_caller]
fn is(found: &Bottleneck, at: &str, reason: Reason) {
    assert_eq!((&*found.at, found.reason), (at, reason), "{found}");
    assert!(found.sentence.contains(at), "{found}");
}

fn numbers() -> impl Operator<Ports = SourcePorts<u32>> {
    source(async || Ok(Some(1)))
}

/// A map and a sink that compute for so long.
fn chain(source: impl Operator<Ports = SourcePorts<u32>>, [map_takes, sink_takes]: [Duration; 2]) -> Flow {
    let mut flow = Flow::new("chain");
    let read = flow.add("read", source);
    let work = flow.add(
        "work",
        map(move |n: u32| async move {
            compute(map_takes);
            Ok(n)
        }),
    );
    let write = flow.add(
        "write",
        sink(move |_: u32| async move {
            compute(sink_takes);
            Ok(())
        }),
    );
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_host_operator() {
    is(&bottleneck(chain(numbers(), [ms(5), ms(0)])).await, "work", Reason::Host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_sink() {
    is(&bottleneck(chain(numbers(), [ms(1), ms(5)])).await, "write", Reason::Host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_source() {
    let slow = source(async || {
        tokio::time::sleep(ms(10)).await;
        Ok(Some(1))
    });
    is(&bottleneck(chain(slow, [ms(1), ms(1)])).await, "read", Reason::Future);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_with_a_period() {
    let mut flow = Flow::new("periodic");
    let read = flow.add("read", numbers()).when(every(ms(10)));
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, write.input);
    is(&bottleneck(flow).await, "read", Reason::Time);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_gate() {
    let mut flow = Flow::new("gate");
    let read = flow.add("read", numbers());
    // As long as it exists it can be resumed: the flow has not stalled.
    let gate = Gate::paused();
    let work = flow.add("work", map(async |n: u32| Ok(n))).when(gate.clone());
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    is(&bottleneck(flow).await, "work", Reason::Condition);
    drop(gate);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unbalanced_fan_out() {
    let mut flow = Flow::new("fan-out");
    let read = flow.add("read", numbers());
    let quick = flow.add("quick", sink(async |_: u32| Ok(())));
    let slow = flow.add(
        "slow",
        sink(async |_: u32| {
            compute(ms(4));
            Ok(())
        }),
    );
    flow.connect(read.output, [quick.input, slow.input]);
    is(&bottleneck(flow).await, "slow", Reason::Host);
}

#[derive(Ports)]
struct FeedPorts {
    #[output]
    out: Output<Envelope<u32>>,
}

/// Fills blank envelopes, which takes a while.
struct Feed(Duration);

impl Operator for Feed {
    type Ports = FeedPorts;

    async fn compute(&mut self, ports: &mut FeedPorts, _cx: &mut Cx) -> Result<()> {
        let mut blank = ports.out.blank().await?;
        blank.set_len(4)?;
        blank.write().await?.fill(1);
        compute(self.0);
        ports.out.send(blank).await?;
        Ok(())
    }
}

/// Work on a device takes a while. Its operator does not wait for it, but the sink does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_work_on_a_device() {
    let device = emulated();
    let mut flow = Flow::new("device");
    let read = flow.add("read", Feed(ms(0)));
    let slow = map_with(async |mut data: Envelope<u32>, cx: &mut Cx| {
        let stream = cx.stream()?;
        increment::launch(stream, &mut data)?;
        stream.host_function(|| thread::sleep(ms(5)))?;
        Ok(data)
    });
    let upper = flow.add("upper", slow).on(&device);
    let take = sink_with(async |data: Envelope<u32>, _cx: &mut Cx| data.read().await.map(drop));
    let write = flow.add("write", take);
    let hub = HubOptions::bounded(2).envelopes(3);
    flow.connect_with(read.out, upper.input, hub.envelope_bytes(16));
    flow.connect_with(upper.output, write.input, hub);
    let found = bottleneck(flow).await;
    is(&found, "upper", Reason::Device);
    assert!(found.sentence.contains("`write` waited for its work on emulated"), "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_envelope_too_few() {
    let mut flow = Flow::new("envelopes");
    let read = flow.add("read", Feed(ms(3)));
    let take = sink_with(async |data: Envelope<u32>, _cx: &mut Cx| {
        compute(ms(3));
        drop(data);
        Ok(())
    });
    let write = flow.add("write", take);
    flow.connect_with(read.out, write.input, HubOptions::bounded(2).envelopes(1).envelope_bytes(16));
    let found = bottleneck(flow).await;
    is(&found, "read.out -> write.input", Reason::Envelopes);
    assert!(found.sentence.contains("`.envelopes(2)`"), "{found}");
}

/// The writer has four messages at once, and the reader takes four at once: with room for one they take turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_hub() {
    /// Every fourth call takes a while.
    fn fourth() -> impl FnMut() -> Duration {
        let mut calls = 0_u32;
        move || {
            calls += 1;
            if calls.is_multiple_of(4) { ms(8) } else { ms(0) }
        }
    }
    let (mut reads, mut writes) = (fourth(), fourth());
    let mut flow = Flow::new("bursts");
    let bursts = source(move || {
        let pause = reads();
        async move {
            tokio::time::sleep(pause).await;
            Ok(Some(1))
        }
    });
    let read = flow.add("read", bursts);
    let slow = sink(move |_: u32| {
        let pause = writes();
        async move {
            tokio::time::sleep(pause).await;
            Ok(())
        }
    });
    let write = flow.add("write", slow);
    flow.connect_with(read.output, write.input, HubOptions::bounded(1));
    is(&bottleneck(flow).await, "read.output -> write.input", Reason::Capacity);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starved_memory() {
    let device = emulated();
    let stream = Stream::new(&device).unwrap();
    let allocator = Allocator::blocks(&device, 1 << 10, 1).unwrap();
    let _kept = allocator.alloc::<u8>(&stream, 1 << 10).unwrap();
    let mut flow = Flow::new("memory");
    let read = flow.add("read", numbers());
    let write = flow.add("write", sink(async |_: u32| Ok(()))).on(&device).when(memory(&allocator, 1 << 10));
    flow.connect(read.output, write.input);
    is(&bottleneck(flow).await, "write", Reason::Memory);
}

/// The only worker is blocked by an operator, and another flow waits for it. This test is on a thread of its own.
#[test]
fn a_blocked_worker() {
    let _alone = ALONE.blocking_lock();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let block = source(async || {
        thread::sleep(ms(250));
        Ok(Some(1))
    });
    let mut flow = Flow::new("blocked");
    let read = flow.add("read", block);
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    let tick = flow.add("tick", numbers());
    let tock = flow.add("tock", sink(async |_: u32| Ok(())));
    flow.connect(read.output, write.input);
    flow.connect(tick.output, tock.input);
    flow.observe(&watch());
    let running = {
        let _inside = runtime.enter();
        flow.spawn().unwrap()
    };
    let own = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let found = own.block_on(observed(&running, ms(800)));
    is(&found, "read", Reason::BlockedWorker);
    assert!(found.sentence.contains(".on_own_thread()"), "{found}");
    drop(running);
    runtime.shutdown_background();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_send_nothing() {
    let mut flow = Flow::new("idle");
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    let feed = flow.ingress::<u32>("feed", write.input);
    let found = bottleneck(flow).await;
    is(&found, "feed", Reason::Outside);
    drop(feed);
}

/// The runs of a concurrent operator are in other tasks.
fn concurrent<O: Operator<Ports = MapPorts<u32, u32>> + Clone>(work: O) -> Flow {
    let mut flow = Flow::new("concurrent");
    let read = flow.add("read", numbers());
    let work = flow.add("work", wakeline::operator::concurrent(2, work));
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_concurrent_operator_that_computes() {
    let slow = map(|n: u32| {
        compute(ms(5));
        std::future::ready(Ok(n))
    });
    is(&bottleneck(concurrent(slow)).await, "work", Reason::Host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_concurrent_operator_that_waits() {
    let slow = map(|n: u32| async move {
        tokio::time::sleep(ms(10)).await;
        Ok(n)
    });
    is(&bottleneck(concurrent(slow)).await, "work", Reason::Future);
}

/// A sink that takes eight messages at a time waits for its writer, not for a condition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_its_writer_keeps_waiting() {
    #[derive(Ports)]
    struct TakePorts {
        #[input(at_least = 8)]
        numbers: Input<u32>,
    }
    struct Take;
    impl Operator for Take {
        type Ports = TakePorts;

        async fn compute(&mut self, ports: &mut TakePorts, _cx: &mut Cx) -> Result<()> {
            (0..8).try_for_each(|_| ports.numbers.take().map(drop))
        }
    }
    let slow = source(async || {
        tokio::time::sleep(ms(5)).await;
        Ok(Some(1_u32))
    });
    let mut flow = Flow::new("batch");
    let read = flow.add("read", slow);
    let take = flow.add("take", Take);
    flow.connect_with(read.output, take.numbers, HubOptions::bounded(8));
    is(&bottleneck(flow).await, "read", Reason::Future);
}

/// A flow that begins is sampled at once, whatever the interval of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_interval_of_another_flow_does_not_matter() {
    let slowly = Observe::new().every(Duration::from_secs(60));
    let gate = Gate::paused();
    let mut other = Flow::new("other");
    let read = other.add("read", numbers()).when(gate.clone());
    let take = other.add("take", sink(async |_: u32| Ok(())));
    other.connect(read.output, take.input);
    other.observe(&slowly);
    let other = other.spawn().unwrap();
    until("the other flow is sampled", || other.snapshot().window > Duration::ZERO).await;
    is(&bottleneck(chain(numbers(), [ms(5), ms(0)])).await, "work", Reason::Host);
    drop(gate);
    other.abort();
    let _ = other.await;
}
