//! [`DeviceTimes`]: the sums of the device times of one operator's runs, from their spans.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use crate::sync::{Mutex, lock};

/// The device time spent on the runs of one operator, between two timed events around each run's work, less what the device
/// takes to pass an event, where that is known. On an H200 the time of a kernel is too long by 0.3 us on average if the stream
/// was idle before it, by 1.4 us if it was busy; that of a single run may be wrong by some microseconds (`guide/facts.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceTime {
    /// The total of all measured runs.
    pub total: Duration,
    /// The longest measured run.
    pub longest: Duration,
    /// How many runs were measured: those that enqueued work into the operator's stream.
    pub runs: u64,
    /// Runs that were not measured, because the device was too far behind or was lost.
    pub missed: u64,
}

impl DeviceTime {
    /// The average device time of a run; zero if none was measured.
    pub fn mean(&self) -> Duration {
        if self.runs == 0 { Duration::ZERO } else { self.total.div_f64(self.runs as f64) }
    }
}

/// The device times of one operator's runs.
#[derive(Debug, Default)]
pub(crate) struct DeviceTimes {
    sums: Mutex<Sums>,
    /// Spans that wait to be read.
    pub(super) pending: AtomicUsize,
    /// The number of runs that were begun: also of the workers of one operator, none has the same number.
    begun: AtomicU64,
}

#[derive(Debug, Default)]
struct Sums {
    /// Of runs that were read, and of missed ones.
    all: DeviceTime,
    /// The runs that were read last, with their time so far; `None` if a run is missed. Spans of runs that overlap are read
    /// in any order.
    reading: VecDeque<(u64, Option<Duration>)>,
}

/// Runs that are read at once.
const READING: usize = 64;

impl DeviceTimes {
    /// The number of a run that begins.
    pub(crate) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    /// The sums of all runs that were read.
    pub(crate) fn sums(&self) -> DeviceTime {
        let sums = lock(&self.sums);
        let mut all = sums.all;
        sums.reading.iter().filter_map(|(_, took)| *took).for_each(|took| all.add(took));
        all
    }

    /// Adds the time of a span.
    pub(super) fn add(&self, run: u64, took: Duration) {
        if let Some(so_far) = lock(&self.sums).of(run) {
            *so_far += took;
        }
    }

    /// Counts a run whose time cannot be read. That of its other spans does not count.
    pub(super) fn miss(&self, run: u64) {
        let mut sums = lock(&self.sums);
        let so_far = sums.of(run);
        if so_far.take().is_some() {
            sums.all.missed += 1;
        }
    }
}

impl Sums {
    /// The time of a run so far; `None` if it is missed.
    fn of(&mut self, run: u64) -> &mut Option<Duration> {
        let known = self.reading.iter().rposition(|(reading, _)| *reading == run);
        let at = known.unwrap_or_else(|| {
            if self.reading.len() == READING
                && let Some((_, Some(took))) = self.reading.pop_front()
            {
                self.all.add(took);
            }
            self.reading.push_back((run, Some(Duration::ZERO)));
            self.reading.len() - 1
        });
        &mut self.reading[at].1
    }
}

impl DeviceTime {
    fn add(&mut self, took: Duration) {
        self.runs += 1;
        self.total += took;
        self.longest = self.longest.max(took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn runs_that_overlap_count_once_each() {
        let times = DeviceTimes::default();
        let [one, two] = [times.begin(), times.begin()];
        for run in [one, two, one, two, two] {
            times.add(run, MS);
        }
        assert_eq!(times.sums(), DeviceTime { total: 5 * MS, longest: 3 * MS, runs: 2, missed: 0 });
    }

    #[test]
    fn a_run_that_is_missed_in_part_is_missed_once_and_as_a_whole() {
        let times = DeviceTimes::default();
        let [one, two] = [times.begin(), times.begin()];
        times.add(one, MS);
        times.miss(one);
        times.miss(two);
        times.miss(one);
        times.add(one, MS);
        assert_eq!(times.sums(), DeviceTime { missed: 2, ..DeviceTime::default() });
    }

    #[test]
    fn every_run_counts_once() {
        let times = DeviceTimes::default();
        for _ in 0..1000 {
            let run = times.begin();
            times.add(run, MS);
            times.add(run, MS);
        }
        assert_eq!(times.sums(), DeviceTime { total: 2000 * MS, longest: 2 * MS, runs: 1000, missed: 0 });
    }
}
