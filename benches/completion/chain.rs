//! Cost of completions for the stream: kernels back to back, without an await and with every one awaited.

use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt, stream::FuturesOrdered};
use tokio::task::JoinSet;
use wakeline::stream::CompletionMode;

use crate::{
    Bench,
    figure::{figure, median},
    source::{BareWaiter, OurWaiter, Source},
};

const KERNELS: usize = 2000;
const LENGTH: Duration = Duration::from_micros(10);
const ROUNDS: usize = 5;
/// The maximum of kernels enqueued and not yet known to be done.
const AHEAD: usize = 64;

#[derive(Clone, Copy)]
enum Awaited {
    No,
    /// In the task that launches, in order.
    Here,
    /// In a task for each.
    There,
}

/// Microseconds per kernel.
fn per_kernel(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e6 / KERNELS as f64
}

async fn bare(waiter: BareWaiter) -> (BareWaiter, f64) {
    let began = Instant::now();
    (0..KERNELS).for_each(|_| waiter.launch(LENGTH));
    waiter.stream.synchronize();
    let took = per_kernel(began);
    (waiter, took)
}

async fn ours(mut waiter: OurWaiter, awaited: Awaited) -> (OurWaiter, f64) {
    let began = Instant::now();
    match awaited {
        Awaited::No => {
            (0..KERNELS).for_each(|_| waiter.launch(LENGTH));
            waiter.stream.synchronize_blocking().expect("a device that works");
        }
        Awaited::Here => {
            let mut open = FuturesOrdered::new();
            for _ in 0..KERNELS {
                waiter.launch(LENGTH);
                open.push_back(waiter.stream.completed());
                // Each is polled after its own launch, even while there is room for more.
                let done = if open.len() < AHEAD { open.next().now_or_never().flatten() } else { open.next().await };
                done.transpose().expect("a device that works");
            }
            while let Some(done) = open.next().await {
                done.expect("a device that works");
            }
        }
        Awaited::There => {
            let mut open = JoinSet::new();
            for _ in 0..KERNELS {
                waiter.launch(LENGTH);
                open.spawn(waiter.stream.completed());
                if open.len() == AHEAD {
                    open.join_next().await.expect("one").expect("no panic").expect("a device that works");
                }
            }
            while let Some(done) = open.join_next().await {
                done.expect("no panic").expect("a device that works");
            }
        }
    }
    let took = per_kernel(began);
    (waiter, took)
}

pub(crate) fn run(bench: &Bench) {
    let modes = bench.sources.iter().filter_map(|source| match source {
        Source::Ours(mode) => Some((source.name(), *mode)),
        _ => None,
    });
    let mut variants = vec![("ours".to_owned(), CompletionMode::default(), Awaited::No)];
    for (name, mode) in modes {
        variants.push((name.to_owned(), mode, Awaited::Here));
        variants.push((format!("{name}.tasks"), mode, Awaited::There));
    }
    let mut waiter = bench.bare.as_ref().map(|bare| BareWaiter::new(Source::Sync, bare));
    let mut each: Vec<_> = variants
        .into_iter()
        .map(|(name, mode, awaited)| (name, Some(OurWaiter::new(&bench.device, mode)), awaited, Vec::new()))
        .collect();
    let mut limits = Vec::new();
    for round in 0..=ROUNDS {
        if let Some(own) = waiter.take() {
            let (own, took) = bench.runtime.block_on(bench.runtime.spawn(bare(own))).expect("no panic");
            waiter = Some(own);
            if round > 0 {
                limits.push(took);
            }
        }
        for (_, place, awaited, times) in &mut each {
            let own = place.take().expect("it is returned after each turn");
            let (own, took) = bench.runtime.block_on(bench.runtime.spawn(ours(own, *awaited))).expect("no panic");
            *place = Some(own);
            if round > 0 {
                times.push(took);
            }
        }
    }
    let limit = if limits.is_empty() { 0.0 } else { median(limits.clone()) };
    for (name, _, _, times) in each {
        if !limits.is_empty() {
            let ratios = times.iter().zip(&limits).map(|(ours, bare)| ours / bare).collect();
            figure(&format!("completion.chain.{name}.ratio"), median(ratios), "x", 1.0);
        }
        figure(&format!("completion.chain.{name}"), median(times), "us", limit);
    }
}
