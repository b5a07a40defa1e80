//! The random flows find what is planted: each bug alone, within a thousand seeds.

use std::time::Instant;

use wakeline::planted::{Planted, plant};

/// How many seeds a bug has to hide in.
const SEEDS: u64 = 1000;

/// Takes it out again, whatever happens.
struct Bed;

impl Drop for Bed {
    fn drop(&mut self) {
        plant(None);
    }
}

#[test]
fn f6_random_flows_find_each_planted_bug() {
    let (_alone, _bed) = (super::alone(), Bed);
    let mut missed = Vec::new();
    let mut last = 0;
    for bug in Planted::ALL {
        plant(Some(bug));
        let began = Instant::now();
        match super::first_failure(0..SEEDS) {
            Some(failure) => {
                let name = format!("{bug:?}");
                let (seed, what) = (failure.seed, failure.first());
                println!("{name:16} seed {seed:3}, {:4.1} s: {what}", began.elapsed().as_secs_f64());
                last = last.max(seed);
            }
            None => missed.push(bug),
        }
    }
    assert_eq!(missed, [], "not found within {SEEDS} seeds");
    plant(None);
    if let Some(failure) = super::first_failure(0..last + 1) {
        panic!("found where nothing is planted: {failure}");
    }
}
