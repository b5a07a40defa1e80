//! Figures: each is measured together with its limit, in one process, alternating.

#![allow(dead_code)]

/// `cargo bench` passes `--bench`; `cargo test --benches` does not, and then nothing is measured.
pub(crate) fn asked() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// Prints a machine-readable line.
pub(crate) fn figure(name: &str, value: f64, unit: &str, limit: f64) {
    println!("figure {name} = {value:.4} {unit} (limit {limit:.4})");
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) median: f64,
    /// The median of the measurement over the limit, round by round: a machine that slows down slows both.
    pub(crate) ratio: f64,
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the limit and the measurement alternately; the first round of each is discarded.
pub(crate) fn alternate(
    rounds: usize,
    mut limit: impl FnMut() -> f64,
    mut ours: impl FnMut() -> f64,
) -> (Sample, Sample) {
    let (mut limits, mut own, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (a, b) = if round % 2 == 0 {
            let a = limit();
            (a, ours())
        } else {
            let b = ours();
            (limit(), b)
        };
        if round > 0 {
            limits.push(a);
            own.push(b);
            ratios.push(b / a);
        }
    }
    (Sample { median: median(limits), ratio: 1.0 }, Sample { median: median(own), ratio: median(ratios) })
}
