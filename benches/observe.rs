//! What the flight recorder costs: an event, beside a bare reading of the system's clock in the same process; the export of
//! a trace; and 10,000 operators that wait while they are recorded.
//!
//! `cargo bench -p wakeline-benches --bench observe`

#[path = "support/allocations.rs"]
mod allocations;
#[path = "support/cpu.rs"]
mod cpu;
#[path = "support/figure.rs"]
mod figure;

use std::{
    hint::black_box,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use figure::figure;
use futures::StreamExt;
use tokio::runtime::Runtime;
use wakeline::{
    condition::{Gate, Status},
    observe::Observe,
    operator::{map, sink, source},
    prelude::*,
};

const CHAIN: usize = 8;
const MESSAGES: u64 = 500;
const ROUNDS: usize = 300;
/// Events of a thread: as many as a user has, and so many that none is lost.
const RING: usize = 65_536;
const EVENTS: usize = 1 << 20;
const EXPORTED: usize = 100_000;
/// What an event may take beside one reading of the clock, in nanoseconds.
const BESIDE: f64 = 5.0;
const LEAST_EXPORTED: f64 = 2e6;

const OPERATORS: usize = 10_000;
const IDLE: Duration = Duration::from_secs(20);
const MOST_BYTES: f64 = 8192.0;
const MOST_PERCENT: f64 = 1.0;

/// Messages through a chain, on one thread. Returns the time from the first to the last, in nanoseconds.
fn chain(runtime: &Runtime, watch: &Observe) -> f64 {
    let mut flow = Flow::new("chain");
    let mut next = 0;
    let began = Arc::new(OnceLock::new());
    let begins = began.clone();
    let first = flow.add(
        "first",
        source(move || {
            if next == 0 {
                let _ = begins.set(Instant::now());
            }
            next += 1;
            std::future::ready(Ok((next <= MESSAGES).then_some(next)))
        }),
    );
    let mut output = first.output;
    for n in 0..CHAIN {
        let pass = flow.add(format!("pass {n}"), map(|number: u64| std::future::ready(Ok(number))));
        flow.connect(output, pass.input);
        output = pass.output;
    }
    let took = Arc::new(OnceLock::new());
    let ends = took.clone();
    let last = flow.add(
        "last",
        sink(move |number: u64| {
            if number == MESSAGES {
                let _ = ends.set(began.get().expect("it began").elapsed());
            }
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(output, last.input);
    flow.observe(watch);
    runtime.block_on(flow.run()).expect("a flow that works");
    took.get().expect("it ended").as_secs_f64() * 1e9
}

/// One reading of the clock, in nanoseconds.
fn clock() -> f64 {
    const READINGS: u32 = 10_000;
    let began = Instant::now();
    for _ in 0..READINGS {
        black_box(Instant::now());
    }
    began.elapsed().as_secs_f64() * 1e9 / f64::from(READINGS)
}

fn median(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<_> = all.collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// The sampling thread sees the same in both flows.
fn watch() -> Observe {
    Observe::new().paths(0).device_times(false)
}

/// Medians of many short rounds, in each of which the three follow each other: others may use the machine, and its clock
/// frequency varies.
fn event_and_export() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let counted = watch().record(EVENTS);
    chain(&runtime, &counted);
    let events = counted.trace(Duration::MAX).expect("a trace").len() as f64;
    let (plain, recorded) = (watch(), watch().record(RING));
    let rounds = (0..ROUNDS).map(|_| {
        let (bare, traced) = (chain(&runtime, &plain), chain(&runtime, &recorded));
        ((traced - bare) / events, clock(), bare)
    });
    let rounds: Vec<_> = rounds.collect();
    let [event, reading, bare] = [
        median(rounds.iter().map(|round| round.0)),
        median(rounds.iter().map(|round| round.1)),
        median(rounds.iter().map(|round| round.2)),
    ];
    figure("observe.event", event, "ns", reading + BESIDE);
    println!(
        "a reading of the clock takes {reading:.1} ns; {events} events beside the {:.0} us of a flow without them",
        bare / 1e3
    );

    let full = watch().record(EVENTS);
    while full.trace(Duration::MAX).map_or(0, |trace| trace.len()) < EXPORTED {
        chain(&runtime, &full);
    }
    let (mut best, mut bytes, mut events) = (f64::INFINITY, 0, 0);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let trace = full.trace(Duration::MAX).expect("a trace");
        bytes = trace.to_bytes().len();
        events = trace.len();
        best = best.min(began.elapsed().as_secs_f64() / events as f64);
    }
    figure("observe.export", 1.0 / best, "events/s", LEAST_EXPORTED);
    println!("{:.1} bytes for an event, of {events}", bytes as f64 / events as f64);
}

async fn waiting(watch: &Observe) -> (wakeline::Running, Gate) {
    let gate = Gate::paused();
    let mut flow = Flow::new("waiting");
    for pair in 0..OPERATORS / 2 {
        let numbers = flow.add(format!("source {pair}"), source(async || Ok(Some(0_u64)))).when(gate.clone());
        let end = flow.add(format!("sink {pair}"), sink(async |_: u64| Ok(())));
        flow.connect(numbers.output, end.input);
    }
    flow.observe(watch);
    let running = flow.spawn().expect("a valid flow");
    let (mut left, mut changes) = (OPERATORS, running.handle().changes());
    while left > 0 {
        let operator = changes.next().await.expect("the flow runs");
        left -= usize::from(matches!(operator.status, Status::Wait | Status::WaitEvent));
    }
    (running, gate)
}

fn idle() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let watch = Observe::new().record(65_536);
    allocations::begin();
    let (running, gate) = runtime.block_on(waiting(&watch));
    // The first samples allocate, too.
    std::thread::sleep(IDLE / 20);
    let bytes = allocations::held() as f64 / OPERATORS as f64;
    allocations::end();
    let used = cpu::used();
    std::thread::sleep(IDLE);
    let percent = (cpu::used() - used).as_secs_f64() / IDLE.as_secs_f64() * 100.0;
    gate.end();
    runtime.block_on(running).expect("the flow ends");
    figure("observe.idle.bytes_per_operator", bytes, "B", MOST_BYTES);
    figure("observe.idle.cpu_percent", percent, "%", MOST_PERCENT);
}

fn main() {
    if figure::asked() {
        event_and_export();
        idle();
    }
}
