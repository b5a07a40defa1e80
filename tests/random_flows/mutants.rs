//! The random flows find each mutant, one at a time, within a thousand seeds.

use std::time::Instant;

use wakeline::mutants::{Mutant, activate};

const SEEDS: u64 = 1000;

/// Deactivates the mutant when dropped, even on a panic.
struct Active;

impl Drop for Active {
    fn drop(&mut self) {
        activate(None);
    }
}

#[test]
fn f6_random_flows_find_each_mutant() {
    let (_alone, _active) = (super::alone(), Active);
    let mut missed = Vec::new();
    let mut last = 0;
    for mutant in Mutant::ALL {
        activate(Some(mutant));
        let began = Instant::now();
        match super::first_failure(0..SEEDS) {
            Some(failure) => {
                let name = format!("{mutant:?}");
                let (seed, what) = (failure.seed, failure.first());
                println!("{name:16} seed {seed:3}, {:4.1} s: {what}", began.elapsed().as_secs_f64());
                last = last.max(seed);
            }
            None => missed.push(mutant),
        }
    }
    assert_eq!(missed, [], "not found within {SEEDS} seeds");
    activate(None);
    if let Some(failure) = super::first_failure(0..last + 1) {
        panic!("failed without a mutant: {failure}");
    }
}
