//! Runs the random flows of each seed.

use std::{ops::Range, time::Instant};

use super::{alone, first_failure, run};

/// The seeds that run by default.
const SEEDS: Range<u64> = 0..300;

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
fn f6_random_flows_end_as_planned() {
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
    println!("{count} seeds in {seconds:.1} s, {:.0} per second: no failure", count as f64 / seconds);
}

/// The same seed gives the same events and the same outcome.
#[test]
fn f6_a_seed_is_reproducible() {
    let _alone = alone();
    for seed in 0..20 {
        let (first, second) = (run::log(seed), run::log(seed));
        let differ = first.iter().zip(&second).position(|(one, other)| one != other);
        assert_eq!(differ, None, "seed {seed}: {:?} and {:?}", first[differ.unwrap()], second[differ.unwrap()]);
        assert_eq!(first.len(), second.len(), "seed {seed}");
    }
}

/// Loops that end, endless loops, and deadlocks, each stopped at a random moment: the flow ends in time, or the error
/// lists the operators that have not ended.
#[test]
fn f6_a_thousand_flows_with_loops_stop_on_request() {
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
