//! Scenario F6: random flows with random faults, in an order that a seed determines, race-checked.
//!
//! A seed determines a [plan](plan::Plan): operators of many kinds on one to three simulated devices, some of them
//! replayed as a graph, hubs of all kinds between them, faults, and the end: by itself, by a stop or by an abort. Each
//! message identifies itself ([`data`]). A run must end without a race, with each message at its destination, once, in
//! order, and unchanged; or with the error that its fault implies. Afterwards no memory, stream or task may be left.
//!
//! A failure prints its seed and its plan, and the smallest flow of that seed that fails too. To repeat it, with the
//! same log line by line:
//!
//! ```sh
//! WAKELINE_SEEDS=4711 cargo test -p wakeline-tests --test random_flows random_flows -- --nocapture
//! WAKELINE_SEEDS=0..100000 cargo test -p wakeline-tests --release --test random_flows random_flows -- --nocapture
//! ```
//!
//! With `WAKELINE_SEEDS_GO_ON=1` the run continues after the first failure: each is printed in a line, and the lowest
//! in full.

#![cfg_attr(wakeline_mutants, allow(dead_code, reason = "only the mutants are run, and no seed is shown"))]

mod by_hand;
mod chunks;
mod data;
mod ends;
mod flow;
mod hostile;
mod loops;
mod maker;
#[cfg(wakeline_mutants)]
mod mutants;
mod operators;
mod plan;
mod run;
#[cfg(not(wakeline_mutants))]
mod seeds;
mod services;

#[cfg(wakeline_mutants)]
extern crate wakeline_mutants as wakeline;

use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use run::{Failure, Verdict};

/// Does not print panics that a seed has planned.
fn quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
            if text != Some(hostile::ON_PURPOSE) {
                others(panic);
            }
        }));
    });
}

/// A mutant is active in the whole process: the tests run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    quietly();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs seeds on all cores until one fails, or all of them if requested. Returns the lowest failure.
fn first_failure(seeds: Range<u64>) -> Option<Failure> {
    let (next, failed) = (AtomicU64::new(seeds.start), Mutex::new(None::<Failure>));
    let goes_on = std::env::var("WAKELINE_SEEDS_GO_ON").is_ok();
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || (failed.lock().unwrap().is_some() && !goes_on) {
                return;
            }
            if let Verdict::Fails(failure) = run::seed(seed, plan::Limits::default()) {
                if goes_on {
                    println!("seed {seed}: {}", failure.first());
                }
                let mut failed = failed.lock().unwrap();
                if failed.as_ref().is_none_or(|other| other.seed > failure.seed) {
                    *failed = Some(*failure);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |cores| cores.get()) {
            scope.spawn(work);
        }
    });
    failed.into_inner().unwrap()
}
