//! What an observer says of flows: snapshots of a run and of its end, and metrics.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use common::*;
use wakeline::{
    condition::Gate,
    observe::{Activity, FlowState, Observe, Snapshot},
    prelude::*,
};

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn watch() -> Observe {
    Observe::new().every(ms(1)).keep(Duration::from_secs(2))
}

fn numbers() -> impl Operator<Ports = SourcePorts<u32>> {
    source(async || Ok(Some(1)))
}

/// A source, a map and a sink.
fn chain(source: impl Operator<Ports = SourcePorts<u32>>) -> Flow {
    let mut flow = Flow::new("chain");
    let read = flow.add("read", source);
    let work = flow.add("work", map(async |n: u32| Ok(n)));
    let write = flow.add("write", sink(async |_: u32| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    flow
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
    let does = |snapshot: &Snapshot, name: &str| snapshot.operator(name).map(|operator| operator.activity);
    let full = |snapshot: &Snapshot| does(snapshot, "read") == Some(Activity::Room);
    let closed = |snapshot: &Snapshot| does(snapshot, "write") == Some(Activity::Condition);
    let mut snapshot = handle.snapshot();
    until("the writer waits for room, and the reader for the gate", || {
        snapshot = handle.snapshot();
        full(&snapshot) && closed(&snapshot)
    })
    .await;
    assert_eq!((&*snapshot.flow, snapshot.state), ("state", FlowState::Running));
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
    let mut flow = chain(source(move || std::future::ready(Ok(left.next()))));
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
    let mut flow = chain(source(move || std::future::ready(Ok(left.next()))));
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

/// Runs a flow whose sink waits for the end of the standard input.
#[test]
#[ignore = "a process of its own"]
fn child_whose_environment_asks_for_snapshots() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let until_closed = |_: u32| async {
        tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())).await.unwrap()?;
        Ok(())
    };
    let mut left = 1..=1;
    let mut flow = Flow::new("printed");
    let read = flow.add("read", source(move || std::future::ready(Ok(left.next()))));
    let write = flow.add("write", sink(until_closed));
    flow.connect(read.output, write.input);
    tokio::runtime::Runtime::new().unwrap().block_on(flow.run()).unwrap();
}

const CHILD: &str = "WAKELINE_TEST_STATUS";

/// On the standard error, while it runs and at its end.
#[test]
fn the_environment_asks_for_snapshots_of_every_flow() {
    common::alone::within_bound(|| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let name = "observe::child_whose_environment_asks_for_snapshots";
        program.args([name, "--exact", "--ignored", "--nocapture"]).env(CHILD, "1").env("WAKELINE_STATUS", "20ms");
        program.env_remove("WAKELINE_TRACE").env_remove("WAKELINE_PAGE");
        let mut child = program.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("flow `printed` is running")), "it is printed while it runs");
        drop(child.stdin.take());
        let rest: Vec<_> = lines.collect();
        assert!(child.wait().unwrap().success());
        assert!(rest.iter().any(|line| line.starts_with("write ") && line.contains(" ended")), "{rest:#?}");
    });
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
