//! Latency of one waiting task: from just before the launch until the await has returned, less the kernel's own time.

use std::time::{Duration, Instant};

use plotters::prelude::SeriesLabelPosition;
use wakeline::stream::CompletionMode;

use crate::{
    Bench, cpu,
    figure::figure,
    picture::{self, Labels, Line},
    source::{BareWaiter, Source, Waiter},
};

/// Run times of the kernel in microseconds, and the number of launches per source.
const LENGTHS: [(u64, usize); 5] = [(1, 1000), (20, 1000), (200, 1000), (1000, 600), (5000, 300)];
/// The sources alternate after so many launches.
const BATCH: usize = 20;
/// Launches at the beginning of each turn that are not measured.
const WARM: usize = 2;

#[derive(Default)]
struct Outcome {
    /// Microseconds.
    overheads: Vec<f64>,
    /// Seconds.
    wall: f64,
    cpu: f64,
}

impl Outcome {
    fn add(&mut self, batch: Outcome) {
        self.overheads.extend(batch.overheads);
        self.wall += batch.wall;
        self.cpu += batch.cpu;
    }

    fn percentile(&mut self, percent: usize) -> f64 {
        self.overheads.sort_by(f64::total_cmp);
        self.overheads[(self.overheads.len() * percent / 100).min(self.overheads.len() - 1)]
    }

    fn cores(&self) -> f64 {
        self.cpu / self.wall
    }
}

async fn batch(mut waiter: Waiter, length: Duration, own: f64) -> (Waiter, Outcome) {
    for _ in 0..WARM {
        waiter.once(length).await;
    }
    let mut overheads = Vec::with_capacity(BATCH);
    let (cpu, began) = (cpu::used(), Instant::now());
    for _ in 0..BATCH {
        let began = Instant::now();
        waiter.once(length).await;
        overheads.push(began.elapsed().as_secs_f64() * 1e6 - own);
    }
    let (wall, cpu) = (began.elapsed().as_secs_f64(), (cpu::used() - cpu).as_secs_f64());
    (waiter, Outcome { overheads, wall, cpu })
}

pub(crate) fn run(bench: &Bench) {
    let mut lines: Vec<Line> = bench.sources.iter().map(|source| (source.label(), Vec::new())).collect();
    for (micros, count) in LENGTHS {
        let length = Duration::from_micros(micros);
        let own = match &bench.bare {
            Some(bare) => BareWaiter::new(Source::Sync, bare).own_time(length),
            None => micros as f64,
        };
        figure(&format!("completion.kernel.{micros}us"), own, "us", micros as f64);
        let mut each: Vec<_> =
            bench.sources.iter().map(|source| (*source, Some(bench.waiter(*source)), Outcome::default())).collect();
        let rounds = count.div_ceil(BATCH);
        for round in 0..=rounds {
            for (_, place, outcome) in &mut each {
                let waiter = place.take().expect("it is returned after each turn");
                let (waiter, measured) =
                    bench.runtime.block_on(bench.runtime.spawn(batch(waiter, length, own))).expect("no panic");
                *place = Some(waiter);
                // The first turn is a warm-up, in which forecasts are learned.
                if round > 0 {
                    outcome.add(measured);
                }
            }
        }
        let mut each: Vec<_> = each.into_iter().map(|(source, _, outcome)| (source, outcome)).collect();
        print(micros, &mut each);
        for ((_, points), (_, outcome)) in lines.iter_mut().zip(&mut each) {
            points.push((micros as f64, outcome.percentile(99)));
        }
    }
    let labels = Labels {
        title: &format!("From the end of a kernel until the task that awaits it runs: {}", bench.device.description()),
        x: "the kernel's own time, in microseconds",
        y: "99th percentile, in microseconds",
        names: SeriesLabelPosition::UpperLeft,
    };
    let to = picture::draw("completion", &labels, &lines).expect("the picture");
    println!("completion.latency: {}", to.display());
}

fn print(micros: u64, each: &mut [(Source, Outcome)]) {
    let floor = each.iter_mut().find(|(source, _)| *source == Source::Sync);
    let floor = floor.map_or([0.0; 3], |(_, floor)| [floor.percentile(50), floor.percentile(99), floor.cores()]);
    for (source, outcome) in each {
        let name = format!("completion.{}.{micros}us", source.name());
        figure(&format!("{name}.p50"), outcome.percentile(50), "us", floor[0]);
        figure(&format!("{name}.p99"), outcome.percentile(99), "us", floor[1]);
        let spins = source.is_bare() || *source == Source::Ours(CompletionMode::LowLatency);
        // The target: under a fifth of a core for long work.
        let cores = if micros == 5000 && !spins { 0.2 } else { floor[2] };
        figure(&format!("{name}.cores"), outcome.cores(), "cores", cores);
    }
}
