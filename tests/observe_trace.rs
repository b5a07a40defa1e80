//! The flight recorder: what a trace has, what it counts as lost, and what has one saved.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;
use wakeline::{
    Device, Flow,
    flow::OnStall,
    observe::{Observe, Trace},
    prelude::*,
};

const LONG: Duration = Duration::from_secs(3600);

/// A folder of one test, which is removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("wakeline-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// So many numbers.
fn numbers(count: u64) -> impl FnMut() -> std::future::Ready<wakeline::Result<Option<u64>>> + Send + 'static {
    let mut next = 0;
    move || {
        next += 1;
        std::future::ready(Ok((next <= count).then_some(next)))
    }
}

/// A source with two readers.
fn fan_out(count: u64) -> Flow {
    let mut flow = Flow::new("fan-out");
    let from = flow.add("from", source(numbers(count)));
    for name in ["left", "right"] {
        let to = flow.add(name, sink(async |_: u64| Ok(())));
        flow.connect(from.output, to.input);
    }
    flow
}

fn is_trace(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|bytes| !bytes.is_empty())
}

#[tokio::test]
async fn a_trace_has_each_run_poll_and_message() {
    const COUNT: u64 = 100;
    let watch = Observe::new().record(65_536);
    let mut flow = fan_out(COUNT);
    flow.observe(&watch);
    let report = flow.run().await.unwrap();
    let trace = watch.trace(LONG).unwrap();
    assert_eq!(trace.lost(), 0);
    let runs: u64 = report.operators.iter().map(|operator| operator.runs).sum();
    // Each run and each message has two events, and at least one poll of each operator has.
    let least = 2 * runs + 2 * 2 * COUNT + 2 * 3;
    assert!(trace.len() as u64 >= least && !trace.is_empty(), "{} of {least}", trace.len());
    let mut written = Vec::new();
    trace.write(&mut written).unwrap();
    assert_eq!(written, trace.to_bytes());
    // Nothing has happened since.
    assert_eq!(watch.trace(LONG).unwrap().len(), trace.len());
}

#[tokio::test]
async fn what_found_no_room_is_counted() {
    let run = async |events: usize| {
        let watch = Observe::new().record(events);
        let mut flow = fan_out(5000);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.trace(LONG).unwrap()
    };
    let (all, last) = (run(65_536).await, run(1).await);
    assert_eq!(all.lost(), 0);
    // On this thread alone.
    assert_eq!((last.len(), last.lost()), (1024, all.len() as u64 - 1024));
}

#[tokio::test]
async fn nothing_is_recorded_unless_asked_for() {
    let watch = Observe::new().record(0);
    let mut flow = fan_out(5);
    flow.observe(&watch);
    assert!(watch.trace(LONG).unwrap_err().to_string().contains("`Observe::record(65_536)`"));
    flow.run().await.unwrap();
    assert!(watch.trace(LONG).is_err());
    // Two that are, and one that is not.
    let (one, other) = (Observe::new().record(usize::MAX), Observe::new().record(1));
    flow.observe(&one);
    flow.observe(&other);
    flow.run().await.unwrap();
    assert!(one.trace(LONG).unwrap().len() > 20 && other.trace(LONG).unwrap().len() > 20);
    assert_eq!(one.trace(Duration::ZERO).unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_a_runtime_and_threads_of_operators_are_recorded() {
    let watch = Observe::new().record(65_536);
    let mut flow = Flow::new("threads");
    let from = flow.add("from", source(numbers(1000)));
    let work = flow.add("work", wakeline::operator::concurrent(3, Add));
    let to = flow.add("to", sink(async |_: u64| Ok(())));
    flow.connect(from.output, work.input);
    flow.connect(work.output, to.input);
    to.own_thread();
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    // A trace may be taken at any time.
    while !running.handle().has_ended() {
        drop(watch.trace(LONG).map(|trace| trace.to_bytes()));
        tokio::task::yield_now().await;
    }
    running.await.unwrap();
    let trace = watch.trace(LONG).unwrap();
    assert_eq!(trace.lost(), 0);
    assert!(trace.len() >= 2 * 3000 + 2 * 2000, "{}", trace.len());
}

#[derive(Clone)]
struct Add;

impl Operator for Add {
    type Ports = wakeline::operator::MapPorts<u64, u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        Ok(ports.output.send(number + 1).await?)
    }
}
