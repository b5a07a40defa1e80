//! [`Forecast`]: when will a stream's next work be done?
//!
//! A stream's work tends to take as long as it took before. For each mark that somebody waited for, the time is taken
//! from when the stream could begin with it (the end of the one before, or the begin of the wait if that is later) to its
//! end. A moving average and its mean deviation are kept; a prediction is as good as the deviation is small.
//!
//! An end that was noticed late (the first look found it done) tells only how long the work took at most. It pulls the
//! average down, so that the next look comes earlier: an average that is too high would never be found out otherwise.

use std::time::{Duration, Instant};

/// How soon a new sample is believed: a weight of 1/4.
const WEIGHT: f64 = 0.25;
/// Average deviation over average duration above which nothing can be foretold.
const HOPELESS: f64 = 0.5;

/// What a stream's work took before.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    /// The last end that was noticed in time, and the number of its mark.
    last: Option<(Instant, u64)>,
    known: Option<Known>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// Seconds from one mark to the next.
    mean: f64,
    deviation: f64,
}

/// When an end is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expected {
    pub(super) at: Instant,
    /// How far off it usually is.
    pub(super) spread: Duration,
}

impl Forecast {
    /// When the mark with this number will be done, for somebody who has waited for it since `began`.
    pub(super) fn expect(&self, number: u64, began: Instant) -> Option<Expected> {
        let known = self.known.filter(|known| known.deviation <= HOPELESS * known.mean)?;
        let (start, marks) = self.start(number, began);
        let at = start + Duration::from_secs_f64(known.mean * marks);
        Some(Expected { at, spread: Duration::from_secs_f64(known.deviation) })
    }

    /// A waiter that had waited since `began` found the mark done, `in_time` if it had just before found it not done.
    pub(super) fn found(&mut self, number: u64, began: Instant, now: Instant, in_time: bool) {
        let (start, marks) = self.start(number, began);
        let took = now.saturating_duration_since(start).as_secs_f64() / marks;
        self.known = Some(match self.known {
            None if in_time => Known { mean: took, deviation: took / 4.0 },
            None => Known { mean: took / 2.0, deviation: took / 8.0 },
            Some(Known { mean, deviation }) if in_time => {
                let off = took - mean;
                Known { mean: mean + WEIGHT * off, deviation: deviation + WEIGHT * (off.abs() - deviation) }
            }
            Some(Known { mean, deviation }) => Known { mean: mean.min(took) * (1.0 - WEIGHT), deviation },
        });
        self.last = in_time.then_some((now, number));
    }

    /// When the stream could begin with what lies before this mark, and how many marks that is.
    fn start(&self, number: u64, began: Instant) -> (Instant, f64) {
        match self.last {
            Some((end, last)) if end > began && last < number => (end, (number - last) as f64),
            _ => (began, 1.0),
        }
    }
}
