//! [`Histogram`]: percentiles of durations, in fixed memory.

use std::time::Duration;

/// The bits of a value below its leading one that its bucket keeps: a bucket is at most 1/16, 6.25 %, as wide as its values.
const BITS: u32 = 4;
const WIDTH: usize = 1 << BITS;
/// Values above 2^44 ns, five hours, count as that.
const OCTAVES: usize = 44 - BITS as usize;
const BUCKETS: usize = (OCTAVES + 1) * WIDTH;

/// Counts of durations, by size.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Box<[u32; BUCKETS]>,
    total: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), total: 0, max: 0 }
    }
}

impl Histogram {
    pub(super) fn add(&mut self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = &mut self.counts[bucket(nanos)];
        *bucket = bucket.saturating_add(1);
        self.total += 1;
        self.max = self.max.max(nanos);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts.iter()).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// The smallest duration that so much of all, between 0 and 1, do not exceed: at most 6.25 % too high, and above five
    /// hours the maximum.
    pub(super) fn percentile(&self, share: f64) -> Duration {
        let rank = ((share * self.total as f64).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= rank {
                return Duration::from_nanos(highest(at).min(self.max));
            }
        }
        self.max()
    }
}

fn bucket(nanos: u64) -> usize {
    let octave = (u64::BITS - nanos.leading_zeros()).saturating_sub(BITS + 1) as usize;
    if octave >= OCTAVES {
        return BUCKETS - 1;
    }
    // Below 2 * WIDTH each value has a bucket of its own.
    octave * WIDTH + (nanos >> octave) as usize
}

/// The highest value of a bucket; the last one has no bound.
fn highest(bucket: usize) -> u64 {
    if bucket == BUCKETS - 1 {
        return u64::MAX;
    }
    if bucket < 2 * WIDTH {
        return bucket as u64;
    }
    let octave = bucket / WIDTH - 1;
    let mantissa = (bucket - octave * WIDTH) as u64;
    ((mantissa + 1) << octave) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bucket_holds_its_own_bounds() {
        for at in 0..BUCKETS - 1 {
            assert_eq!(bucket(highest(at)), at);
            assert_eq!(bucket(highest(at) + 1), at + 1);
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn more_than_five_hours_is_the_maximum() {
        let mut histogram = Histogram::default();
        [20, 30].iter().for_each(|hours| histogram.add(Duration::from_secs(hours * 3600)));
        assert_eq!(histogram.percentile(0.5), Duration::from_secs(30 * 3600));
    }

    proptest! {
        #[test]
        fn percentiles_are_exact_to_a_sixteenth(
            mut all in prop::collection::vec(0_u64..1 << 43, 1..200),
            share in 0.0_f64..=1.0,
        ) {
            let mut histogram = Histogram::default();
            all.iter().for_each(|nanos| histogram.add(Duration::from_nanos(*nanos)));
            all.sort_unstable();
            let rank = ((share * all.len() as f64).ceil() as usize).clamp(1, all.len());
            let (exact, found) = (all[rank - 1], histogram.percentile(share).as_nanos() as u64);
            prop_assert!(found >= exact && (found - exact) as f64 <= 0.0625 * exact as f64, "{found}, not {exact}");
            prop_assert_eq!(histogram.max().as_nanos() as u64, all[all.len() - 1]);
        }
    }
}
