//! What an observer says of flows: the sentence for planted bottlenecks, snapshots of a run and of its end, metrics, and
//! what an observer costs a flow: nothing that it could notice.

use std::{
    thread,
    time::{Duration, Instant},
};

use common::*;
use wakeline::{
    Running, Stream,
    condition::{Gate, every, memory},
    memory::Allocator,
    observe::{Activity, Bottleneck, FlowState, Observe, Reason, Snapshot},
    operator::{map_with, sink_with},
    prelude::*,
};

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

/// The bottleneck of a running flow that was observed for half a second.
async fn observed(running: &Running) -> Bottleneck {
    let began = Instant::now();
    loop {
        let snapshot = running.snapshot();
        match snapshot.bottleneck {
            Some(found) if snapshot.window >= ms(500) => return found,
            _ => assert!(began.elapsed() < Duration::from_secs(60), "no bottleneck is found: {snapshot}"),
        }
        tokio::time::sleep(ms(20)).await;
    }
}

/// Runs the flow until its bottleneck is known.
async fn bottleneck(mut flow: Flow) -> Bottleneck {
    flow.observe(&watch());
    let running = flow.spawn().unwrap();
    let found = observed(&running).await;
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
    let began = Instant::now();
    let found = loop {
        let snapshot = running.snapshot();
        match snapshot.bottleneck {
            Some(found) if snapshot.window >= ms(800) => break found,
            _ => assert!(began.elapsed() < Duration::from_secs(60), "{snapshot}"),
        }
        thread::yield_now();
    };
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_is_the_state_of_a_flow() {
    let gate = Gate::paused();
    let mut flow = Flow::new("state");
    let read = flow.add("read", numbers());
    let write = flow.add("write", sink(async |_: u32| Ok(()))).when(gate.clone());
    flow.connect_with(read.output, write.input, HubOptions::bounded(3));
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    until("the queue is full", || {
        handle.snapshot().hub("read.output -> write.input").is_some_and(|hub| hub.queued == 3)
    })
    .await;
    let full = |snapshot: &Snapshot| snapshot.operator("read").is_some_and(|read| read.activity == Activity::Room);
    until("the writer waits for room", || full(&handle.snapshot())).await;
    let snapshot = handle.snapshot();
    assert_eq!((&*snapshot.flow, snapshot.state), ("state", FlowState::Running));
    assert_eq!(snapshot.operator("write").unwrap().activity, Activity::Condition);
    let hub = snapshot.hub("read.output -> write.input").unwrap();
    assert_eq!((hub.capacity, hub.passed, hub.full, &*hub.from, &*hub.to), (3, 0, None, "read", "write"));
    assert_eq!((snapshot.bottleneck.is_none(), snapshot.window), (true, Duration::ZERO), "it is not observed");
    let text = snapshot.to_string();
    assert!(text.contains("waits for room") && text.contains("3 of 3"), "{text}");

    handle.pause();
    until("the flow is paused", || handle.snapshot().state == FlowState::Paused).await;
    handle.resume();
    handle.stop();
    assert_eq!(handle.snapshot().state, FlowState::Stopping);
    gate.resume();
    running.await.unwrap();
    let over = handle.snapshot();
    assert_eq!(over.state, FlowState::Ended);
    assert!(over.operators.iter().all(|operator| operator.activity == Activity::Ended), "{over}");
}

/// The snapshot at the end of an observed flow has the numbers of its report.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_snapshot_has_the_numbers_of_the_report() {
    let mut left = 0..100_u32;
    let mut flow = chain(source(move || std::future::ready(Ok(left.next()))), [ms(0), ms(0)]);
    let watch = watch();
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let report = running.await.unwrap();
    for last in [handle.snapshot(), watch.snapshots().remove(0)] {
        assert_eq!((last.state, last.hubs.len()), (FlowState::Ended, report.hubs.len()));
        for (hub, of_report) in last.hubs.iter().zip(&report.hubs) {
            assert_eq!((&hub.name, hub.passed, hub.dropped), (&of_report.name, of_report.passed, of_report.dropped));
        }
        for operator in &report.operators {
            assert_eq!(last.operator(&operator.name).unwrap().runs, operator.runs, "{}", operator.name);
        }
    }
}

/// Of forty runs the last ones are kept.
#[tokio::test]
async fn ended_flows_are_forgotten() {
    let watch = watch();
    for run in 0..40 {
        let mut flow = Flow::new(format!("run {run}"));
        let none = flow.add("none", source(async || Ok(None::<u32>)));
        let take = flow.add("take", sink(async |_: u32| Ok(())));
        flow.connect(none.output, take.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
    }
    let names: Vec<_> = watch.snapshots().iter().map(|snapshot| snapshot.flow.to_string()).collect();
    assert_eq!(names.len(), 16, "{names:?}");
    assert_eq!(names.last().unwrap(), "run 39");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_open_metrics() {
    let watch = watch();
    let mut left = 0..10_u32;
    let mut flow = chain(source(move || std::future::ready(Ok(left.next()))), [ms(0), ms(0)]);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let text = watch.open_metrics();
    for line in [
        "# TYPE wakeline_operator_runs counter",
        "wakeline_operator_runs_total{flow=\"chain\",operator=\"work\"} 10",
        "wakeline_hub_passed_messages_total{flow=\"chain\",hub=\"read.output -> work.input\"} 10",
        "wakeline_flow_state{flow=\"chain\",wakeline_flow_state=\"ended\"} 1",
        "wakeline_flow_state{flow=\"chain\",wakeline_flow_state=\"running\"} 0",
        "# UNIT wakeline_operator_busy_seconds seconds",
    ] {
        assert!(text.lines().any(|other| other == line), "`{line}` is missing in:\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    // Every sample is of the metric above it, has its labels in order and a number.
    let mut metric = String::new();
    let mut seen = std::collections::HashSet::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.split(' ');
            let (kind, name) = (words.next().unwrap(), words.next().unwrap());
            assert!(["TYPE", "UNIT", "HELP"].contains(&kind), "{line}");
            if kind == "TYPE" {
                metric = name.into();
                assert!(seen.insert(metric.clone()), "{line}: a second time");
            }
            assert_eq!(name, metric);
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap();
        assert!(name == metric || name.strip_suffix("_total") == Some(&metric), "{line}");
        let (_, value) = rest.rsplit_once("} ").unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
        assert!(seen.insert(line.rsplit_once("} ").unwrap().0.into()), "{line}: a second time");
    }
}

/// The workers of a concurrent operator compute in other tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_concurrent_operator() {
    let slow = map(move |n: u32| async move {
        tokio::time::sleep(ms(10)).await;
        Ok(n)
    });
    let mut flow = Flow::new("concurrent");
    let read = flow.add("read", numbers());
    let work = flow.add("work", wakeline::operator::concurrent(2, slow));
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    is(&bottleneck(flow).await, "work", Reason::Host);
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

/// A flow whose `stop` fails has failed; one that was cut off by its runtime has failed as well, and is forgotten.
#[test]
fn the_state_of_a_flow_that_did_not_end_well() {
    struct Stops;
    impl Operator for Stops {
        type Ports = SinkPorts<u32>;

        async fn compute(&mut self, ports: &mut SinkPorts<u32>, _cx: &mut Cx) -> Result<()> {
            ports.input.take().map(drop)
        }

        async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
            Err("cannot stop".into())
        }
    }
    let watch = watch();
    let flow = |name: &str, left: u32| {
        let mut left = 0..left;
        let mut flow = Flow::new(name);
        let read = flow.add("read", source(move || std::future::ready(Ok(left.next()))));
        let take = flow.add("take", Stops);
        flow.connect(read.output, take.input);
        flow.observe(&watch);
        // Twice is once.
        flow.observe(&watch);
        flow
    };
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let running = runtime();
    let handle = running.block_on(async {
        let flow = flow("stops", 3).spawn().unwrap();
        let handle = flow.handle();
        flow.await.unwrap_err();
        handle
    });
    assert_eq!(handle.snapshot().state, FlowState::Failed);
    assert_eq!(watch.snapshots().iter().map(|snapshot| snapshot.state).collect::<Vec<_>>(), [FlowState::Failed]);

    let cut_off = runtime();
    let running = {
        let _inside = cut_off.enter();
        flow("cut off", u32::MAX).spawn().unwrap()
    };
    let handle = running.handle();
    cut_off.shutdown_timeout(Duration::from_secs(10));
    assert_eq!(handle.snapshot().state, FlowState::Failed);
    drop((running, handle));
    assert_eq!(watch.snapshots().len(), 1);
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
