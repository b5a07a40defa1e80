//! Many waiting tasks, each on a stream of its own, one await in flight per task.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    Bench, cpu,
    figure::{figure, median},
    source::{Source, Waiter},
};

const TASKS: [usize; 4] = [1, 8, 64, 512];
/// Microseconds that each kernel runs.
const LENGTHS: [u64; 3] = [5, 20, 200];
const ROUNDS: usize = 3;
const WARM: Duration = Duration::from_millis(60);
const MEASURED: Duration = Duration::from_millis(200);

#[derive(Default)]
struct Outcome {
    /// Awaits per second.
    rates: Vec<f64>,
    /// Microseconds of processor time per await.
    cpus: Vec<f64>,
}

/// Runs all waiters for a while; returns awaits per second, and microseconds of processor time per await.
fn turn(bench: &Bench, waiters: &mut Vec<Waiter>, length: Duration) -> (f64, f64) {
    let (done, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let tasks: Vec<_> = waiters
        .drain(..)
        .map(|mut waiter| {
            let (done, stop) = (done.clone(), stop.clone());
            bench.runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    waiter.once(length).await;
                    done.fetch_add(1, Ordering::Relaxed);
                    // An await that never waits must still let the other tasks run.
                    tokio::task::consume_budget().await;
                    if let Waiter::Bare(bare) = &waiter
                        && bare.blocks()
                    {
                        tokio::task::yield_now().await;
                    }
                }
                waiter
            })
        })
        .collect();
    thread::sleep(WARM);
    let (before, cpu, began) = (done.load(Ordering::Relaxed), cpu::used(), Instant::now());
    thread::sleep(MEASURED);
    let (after, cpu, took) = (done.load(Ordering::Relaxed), cpu::used() - cpu, began.elapsed());
    stop.store(true, Ordering::Relaxed);
    waiters.extend(tasks.into_iter().map(|task| bench.runtime.block_on(task).expect("no panic")));
    let awaits = (after - before) as f64;
    (awaits / took.as_secs_f64(), cpu.as_secs_f64() * 1e6 / awaits.max(1.0))
}

pub(crate) fn run(bench: &Bench) {
    for tasks in TASKS {
        for micros in LENGTHS {
            let length = Duration::from_micros(micros);
            let mut each: Vec<_> = bench
                .sources
                .iter()
                .map(|source| {
                    let waiters: Vec<_> = (0..tasks).map(|_| bench.waiter(*source)).collect();
                    (*source, waiters, Outcome::default())
                })
                .collect();
            for _ in 0..ROUNDS {
                for (_, waiters, outcome) in &mut each {
                    let (rate, cpu) = turn(bench, waiters, length);
                    outcome.rates.push(rate);
                    outcome.cpus.push(cpu);
                }
            }
            print(
                &format!("{tasks}x{micros}us"),
                each.into_iter().map(|(source, _, outcome)| (source, outcome)).collect(),
            );
        }
    }
}

fn print(combination: &str, each: Vec<(Source, Outcome)>) {
    let rate = |outcome: &Outcome| median(outcome.rates.clone());
    let bare = each.iter().filter(|(source, _)| source.is_bare());
    let best = bare.max_by(|(_, a), (_, b)| rate(a).total_cmp(&rate(b))).map(|(_, outcome)| outcome);
    let limits = best.map_or((0.0, 0.0), |best| (rate(best), median(best.cpus.clone())));
    for (source, outcome) in &each {
        let name = format!("completion.{}.{combination}", source.name());
        figure(&format!("{name}.rate"), rate(outcome), "1/s", limits.0);
        figure(&format!("{name}.cpu"), median(outcome.cpus.clone()), "us", limits.1);
        if let Some(best) = best {
            let ratios = outcome.rates.iter().zip(&best.rates).map(|(ours, best)| ours / best).collect();
            figure(&format!("{name}.ratio"), median(ratios), "x", 1.0);
        }
    }
}
