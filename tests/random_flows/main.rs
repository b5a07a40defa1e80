//! Scenario F6: random flows with random faults, in the order that a seed decides, race-checked.
//!
//! A seed makes a [plan](plan::Plan): operators of many kinds on one to three simulated devices, some of them replayed as a
//! graph, hubs of all kinds between them, faults, and an end by itself or by somebody. Each message says itself who it is
//! ([`data`]). A run must end, without a race, with each message where it belongs, once, in order, and untouched; or with the
//! error that its fault means.
//! Afterwards no memory, stream or task is left.
//!
//! What fails prints its seed and its plan, and the smallest flow of that seed that fails too. Found again, with the same
//! log line by line:
//!
//! ```sh
//! WAKELINE_SEEDS=4711 cargo test --test random_flows random_flows -- --nocapture
//! WAKELINE_SEEDS=0..100000 cargo test --release --test random_flows random_flows -- --nocapture
//! ```
//!
//! With `WAKELINE_SEEDS_GO_ON=1` the first failure is not the last: each is told in a line, and the lowest in full.

mod by_hand;
mod chunks;
mod data;
mod ends;
mod flow;
mod hostile;
mod loops;
mod maker;
mod operators;
mod plan;
#[cfg(feature = "planted")]
mod planted;
mod run;
mod services;

use std::{
    ops::Range,
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use run::{Failure, Verdict};

/// What is run without being asked for more.
const SEEDS: Range<u64> = 0..500;

/// Panics that a seed has planned are not printed.
fn quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload_as_str() != Some(hostile::ON_PURPOSE) {
                others(panic);
            }
        }));
    });
}

/// A bug that is planted is there for the whole process: the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    quietly();
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs seeds on all cores until one fails, or all if that was asked for: the lowest that did.
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

/// `4711`, or `0..100000`.
fn wanted() -> Option<Range<u64>> {
    let text = std::env::var("WAKELINE_SEEDS").ok()?;
    let number = |text: &str| text.replace('_', "").parse().expect("WAKELINE_SEEDS is a seed, or a range: `0..100000`");
    match text.split_once("..") {
        Some((from, to)) => Some(number(from)..number(to)),
        None => Some(number(&text)..number(&text) + 1),
    }
}

#[test]
fn f6_random_flows_end_with_what_they_should() {
    let _alone = alone();
    let (seeds, began) = (wanted().unwrap_or(SEEDS), Instant::now());
    let count = seeds.end - seeds.start;
    if let Some(failure) = first_failure(seeds.clone()) {
        panic!("{}", failure.explained());
    }
    if count == 1 {
        run::show(seeds.start);
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{count} seeds in {seconds:.1} s, {:.0} a second: nothing found", count as f64 / seconds);
}

/// The same seed gives the same events and the same outcome.
#[test]
fn f6_a_seed_is_found_again() {
    let _alone = alone();
    for seed in 0..50 {
        let (first, second) = (run::log(seed), run::log(seed));
        let differ = first.iter().zip(&second).position(|(one, other)| one != other);
        assert_eq!(differ, None, "seed {seed}: {:?} and {:?}", first[differ.unwrap()], second[differ.unwrap()]);
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

/// Loops that end, others that never do, and deadlocks, each stopped at some moment: the flow ends in time, or the error lists what
/// has not.
#[test]
fn f6_a_thousand_flows_with_loops_stop_when_they_are_asked_to() {
    let _alone = alone();
    std::thread::scope(|scope| {
        for first in 0..4 {
            scope.spawn(move || {
                for seed in (first..1000).step_by(4) {
                    let (found, plan) = run::stopped(seed);
                    assert!(found.is_empty(), "seed {seed}: {found:#?}\n{plan}");
                }
            });
        }
    });
}
