//! Cost of an operator that only waits: 10,000 of them in one flow, 5,000 sources behind a gate and 5,000 sinks,
//! against as many bare tokio tasks that wait for a message. Measures the time to add and start one, the bytes that it
//! holds, and the processor time of two seconds of idling.
//!
//! `cargo bench -p wakeline-benches --bench idle`

#[path = "support/allocations.rs"]
mod allocations;
#[path = "support/cpu.rs"]
mod cpu;
#[path = "support/figure.rs"]
mod figure;

use std::time::{Duration, Instant};

use figure::figure;
use futures::StreamExt;
use tokio::{runtime::Runtime, sync::mpsc};
use wakeline::{
    condition::{Gate, Status},
    operator::{sink, source},
    prelude::*,
};

const OPERATORS: usize = 10_000;
const PAIRS: usize = OPERATORS / 2;
const IDLE: Duration = Duration::from_secs(2);

struct Cost {
    start_us: f64,
    bytes: f64,
    cpu_percent: f64,
    /// Voluntary context switches of all threads in the idle time.
    switches: f64,
}

/// `up` starts all tasks, and resolves once all wait; it returns the value that keeps them alive.
fn measure<T>(runtime: &Runtime, up: impl Future<Output = T>, down: impl AsyncFnOnce(T)) -> Cost {
    allocations::begin();
    let began = Instant::now();
    let kept = runtime.block_on(up);
    let start_us = began.elapsed().as_secs_f64() * 1e6 / OPERATORS as f64;
    let bytes = allocations::held() as f64 / OPERATORS as f64;
    allocations::end();
    let (used, switched) = (cpu::used(), switches());
    std::thread::sleep(IDLE);
    let cpu_percent = (cpu::used() - used).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    let switches = (switches() - switched) as f64;
    runtime.block_on(down(kept));
    Cost { start_us, bytes, cpu_percent, switches }
}

async fn ours() -> (wakeline::Running, Gate) {
    let gate = Gate::paused();
    let mut flow = Flow::new("idle");
    for pair in 0..PAIRS {
        let numbers = flow.add(format!("source {pair}"), source(async || Ok(Some(0_u64)))).when(gate.clone());
        let end = flow.add(format!("sink {pair}"), sink(async |_: u64| Ok(())));
        flow.connect(numbers.output, end.input);
    }
    let running = flow.spawn().expect("a valid flow");
    let mut waiting = 0;
    let mut changes = running.handle().changes();
    while waiting < OPERATORS {
        let operator = changes.next().await.expect("the flow runs");
        waiting += usize::from(matches!(operator.status, Status::Wait | Status::WaitEvent));
    }
    (running, gate)
}

async fn end_ours((running, gate): (wakeline::Running, Gate)) {
    gate.end();
    running.await.expect("the flow ends");
}

async fn bare() -> (Vec<mpsc::Sender<u64>>, Vec<tokio::task::JoinHandle<()>>) {
    let (mut senders, mut tasks) = (Vec::with_capacity(OPERATORS), Vec::with_capacity(OPERATORS));
    for _ in 0..OPERATORS {
        let (sender, mut receiver) = mpsc::channel::<u64>(1);
        senders.push(sender);
        tasks.push(tokio::spawn(async move { while receiver.recv().await.is_some() {} }));
    }
    // When a task that was spawned last has run, all others have run.
    tokio::spawn(async {}).await.expect("a task");
    (senders, tasks)
}

async fn end_bare((senders, tasks): (Vec<mpsc::Sender<u64>>, Vec<tokio::task::JoinHandle<()>>)) {
    drop(senders);
    for task in tasks {
        task.await.expect("no task panics");
    }
}

/// Voluntary context switches of all threads so far; 0 if the system does not report them.
fn switches() -> u64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let of_one = |status: String| {
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        line.split_whitespace().last()?.parse::<u64>().ok()
    };
    let each = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok());
    each.filter_map(of_one).sum()
}

fn main() {
    if !figure::asked() {
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    // Warms up what is created only once.
    measure(&runtime, ours(), end_ours);
    measure(&runtime, bare(), end_bare);
    let bare = measure(&runtime, bare(), end_bare);
    let ours = measure(&runtime, ours(), end_ours);
    figure("idle.cpu_percent", ours.cpu_percent, "%", bare.cpu_percent);
    figure("idle.switches", ours.switches, "", bare.switches);
    figure("idle.bytes_per_operator", ours.bytes, "B", bare.bytes);
    figure("idle.start_us_per_operator", ours.start_us, "us", bare.start_us);
}
