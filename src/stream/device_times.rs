//! [`DeviceTimes`]: the sums of the device times of one operator's runs, from their spans.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use crate::sync::{Mutex, lock};

/// The device time spent on the runs of one operator.
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
    all: DeviceTime,
    /// The run that is being read, with its time so far.
    reading: Option<(u64, Duration)>,
    last_missed: Option<u64>,
}

impl DeviceTimes {
    /// The number of a run that begins.
    pub(crate) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    /// The sums of all runs that were read.
    pub(crate) fn sums(&self) -> DeviceTime {
        let sums = lock(&self.sums);
        let mut all = sums.all;
        if let Some((_, took)) = sums.reading {
            all.add(took);
        }
        all
    }

    /// Adds the time of a span.
    pub(super) fn add(&self, run: u64, took: Duration) {
        let mut sums = lock(&self.sums);
        match &mut sums.reading {
            Some((of, so_far)) if *of == run => *so_far += took,
            _ => {
                if let Some((_, took)) = sums.reading.replace((run, took)) {
                    sums.all.add(took);
                }
            }
        }
    }

    /// Counts a run whose time cannot be read.
    pub(super) fn miss(&self, run: u64) {
        let mut sums = lock(&self.sums);
        if sums.last_missed != Some(run) {
            sums.last_missed = Some(run);
            sums.all.missed += 1;
            // Its time so far is not that of the whole run.
            sums.reading = sums.reading.filter(|(reading, _)| *reading != run);
        }
    }
}

impl DeviceTime {
    fn add(&mut self, took: Duration) {
        self.runs += 1;
        self.total += took;
        self.longest = self.longest.max(took);
    }
}
