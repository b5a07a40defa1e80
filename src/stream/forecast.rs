//! When to query a stream, and for which mark: [`Forecast`] predicts when the stream's next work will be done,
//! [`Stride`] how many marks have passed already.
//!
//! A stream's work tends to take as long as before. For each mark that was waited for, the duration is measured from
//! when the stream could begin with the mark's work (the end of the previous mark's work, or the start of the wait if
//! that is later) to its end. A moving average and its mean deviation are kept; the smaller the deviation, the better
//! the prediction.
//!
//! The end of work is detected some time after the last query that found it not done. If this gap is long, the work may
//! have ended at any moment in it. If the work took longer than expected, the sleeper was woken by a callback, which
//! comes soon after the end: the whole duration is used. If it might have taken less, the average is reduced, by more
//! each time, so that the next query comes earlier: otherwise an average that is too high would never be detected.

use std::{
    sync::atomic::{AtomicI32, Ordering},
    time::{Duration, Instant},
};

/// The weight of a new sample: 1/4.
const WEIGHT: f64 = 0.25;
/// The deviation, relative to the mean, above which no prediction is made.
const MAX_RELATIVE_DEVIATION: f64 = 0.5;
/// An end is detected in time if the last query before it was at most this many seconds, or this fraction of the
/// duration, earlier.
const IN_TIME: (f64, f64) = (30e-6, 0.02);
/// The first reduction of the average, in seconds.
const FIRST_REDUCTION: f64 = 250e-6;

/// The maximum number of marks counted between two ends: marks that were not waited for may take less time than marks
/// that were, and a sleeper that is woken too early only queries once more.
const MAX_MARKS: u64 = 32;

/// The durations of a stream's earlier work.
#[derive(Debug, Default)]
pub(super) struct Forecast {
    /// The last end that was detected in time, and the number of its mark.
    last: Option<(Instant, u64)>,
    known: Option<Estimate>,
}

#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// Seconds from one mark to the next.
    mean: f64,
    deviation: f64,
    /// The last duration.
    last: f64,
    /// The number of consecutive ends that might have come before they were detected.
    late: i32,
}

impl Estimate {
    fn new(took: f64) -> Self {
        Self { mean: took, deviation: took / 8.0, last: took, late: 0 }
    }

    fn learn(self, took: f64) -> Self {
        // Two similar samples far from the average: the work has changed.
        if (took - self.last).abs() < took / 4.0 && (took - self.mean).abs() > took / 2.0 {
            return Self::new(took);
        }
        let off = took - self.mean;
        let mean = self.mean + WEIGHT * off;
        Self { mean, deviation: self.deviation + WEIGHT * (off.abs() - self.deviation), last: took, late: 0 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expected {
    pub(super) at: Instant,
    /// The usual error of the prediction.
    pub(super) spread: Duration,
}

impl Forecast {
    /// When the mark with this number will be done, for a waiter since `began`.
    pub(super) fn expect(&self, number: u64, began: Instant) -> Option<Expected> {
        let known = self.known.filter(|known| known.deviation <= MAX_RELATIVE_DEVIATION * known.mean)?;
        let (start, marks) = self.start(number, began);
        let at = start + Duration::from_secs_f64(known.mean * marks);
        Some(Expected { at, spread: Duration::from_secs_f64(known.deviation) })
    }

    /// A waiter since `began` found the mark not done at `last_pending`, and done at `now`.
    pub(super) fn found(&mut self, number: u64, began: Instant, last_pending: Option<Instant>, now: Instant) {
        let (start, marks) = self.start(number, began);
        let seconds = |moment: Instant| moment.saturating_duration_since(start).as_secs_f64() / marks;
        let (shortest, longest) = (last_pending.map_or(0.0, seconds), seconds(now));
        let in_time = last_pending.is_some() && longest - shortest <= IN_TIME.0.max(IN_TIME.1 * longest);
        self.last = in_time.then_some((now, number));
        self.known = Some(match self.known {
            // The first end may be reported by a callback, which is late, but not by much.
            None => Estimate::new(longest),
            Some(known) if in_time || known.mean < shortest => known.learn(longest),
            Some(known) => {
                let longest = known.mean.min(longest);
                let mean = (longest - FIRST_REDUCTION * 2.0_f64.powi(known.late.min(8))).max(longest / 2.0);
                Estimate { mean, late: known.late + 1, ..known }
            }
        });
    }

    /// When the stream could begin with the work before this mark, and the number of marks that this work spans.
    fn start(&self, number: u64, began: Instant) -> (Instant, f64) {
        match self.last {
            Some((end, last)) if end > began && last < number => (end, (number - last).min(MAX_MARKS) as f64),
            _ => (began, 1.0),
        }
    }
}

/// The number of marks beyond a passed mark at which a stream is queried.
///
/// Each query costs a driver call, which holds a lock shared by all calls to a device for some 4,400 cycles (measured
/// on an H200). A task that is behind the device finds each mark passed; a task that keeps up finds that no further
/// mark has passed. So the stride doubles if the mark at that distance has passed, too, and halves if it has not; if
/// not even the next mark has passed, no further mark is queried for a while.
#[derive(Debug)]
pub(super) struct Stride(AtomicI32);

/// How many marks must be found passed before a further mark is queried again.
const PAUSE: i32 = 15;

const MAX_STRIDE: i32 = 32;

impl Stride {
    pub(super) fn new() -> Self {
        Self(AtomicI32::new(1))
    }

    /// Called when a mark has passed. Returns how many marks ahead to query, if any.
    pub(super) fn next(&self) -> Option<usize> {
        // This is a heuristic: one of two concurrent changes may be lost.
        let stride = self.0.load(Ordering::Relaxed);
        if stride <= 0 {
            self.0.store(stride + 1, Ordering::Relaxed);
        }
        usize::try_from(stride).ok().filter(|stride| *stride > 0)
    }

    /// Notes whether the mark that was queried ahead has passed.
    pub(super) fn found(&self, passed: bool) {
        let stride = self.0.load(Ordering::Relaxed).max(1);
        let next = match passed {
            true => (2 * stride).min(MAX_STRIDE),
            false if stride == 1 => -PAUSE,
            false => stride / 2,
        };
        self.0.store(next, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// Work of these lengths, one after the other, each waited for from its start: polled from a while before its
    /// expected end until a while after, and woken `late` after it otherwise. Returns how many ends were detected in
    /// time.
    fn in_time(forecast: &mut Forecast, lengths: impl IntoIterator<Item = u32>) -> u32 {
        let (lead, late) = (250 * MICRO, 400 * MICRO);
        let mut now = Instant::now();
        let mut count = 0;
        for (number, length) in lengths.into_iter().enumerate() {
            let (began, end) = (now, now + length * MICRO);
            let number = number as u64 + 1;
            let (from, until) = match forecast.expect(number, began) {
                Some(Expected { at, spread }) => {
                    let lead = lead + 2 * spread;
                    (at.checked_sub(lead).map_or(began, |at| at.max(began)), at + lead)
                }
                None => (began, began + lead),
            };
            let (last_pending, found) = match () {
                () if end <= from => (began, from + late),
                () if end <= until => (end - MICRO, end),
                () => (until, end + late),
            };
            forecast.found(number, began, Some(last_pending), found);
            count += u32::from(found == end);
            now = found;
        }
        count
    }

    #[test]
    fn work_of_constant_length_is_predicted_after_a_few_samples() {
        for length in [20, 200, 1000, 5000, 100_000] {
            let count = in_time(&mut Forecast::default(), [length; 100]);
            assert!(count >= 90, "{count} of 100 of {length} us");
        }
    }

    #[test]
    fn another_length_is_learnt() {
        let mut forecast = Forecast::default();
        in_time(&mut forecast, [5000; 50]);
        assert!(in_time(&mut forecast, [300; 50]) >= 40);
        assert!(in_time(&mut forecast, [20_000; 50]) >= 40);
    }

    #[test]
    fn irregular_work_is_not_predicted() {
        let mut forecast = Forecast::default();
        in_time(&mut forecast, (0..200).map(|n| if n % 2 == 0 { 10 } else { 20_000 }));
        assert_eq!(forecast.expect(1000, Instant::now()), None);
    }

    #[test]
    fn work_enqueued_at_once_is_predicted_in_sequence() {
        let mut forecast = Forecast::default();
        let began = Instant::now();
        for number in 1..=20 {
            let end = began + number as u32 * 100 * MICRO;
            forecast.found(number, began, Some(end - MICRO), end);
        }
        let expected = forecast.expect(25, began).expect("it never varied");
        let off = expected.at.duration_since(began).abs_diff(2500 * MICRO);
        assert!(off < 20 * MICRO, "{off:?}");
    }

    proptest! {
        /// For any input, it predicts nothing before the start and nothing absurd after it.
        #[test]
        fn it_stays_within_what_was_seen(lengths in prop::collection::vec((1..100_000_u32, any::<bool>()), 1..50)) {
            let mut forecast = Forecast::default();
            let mut now = Instant::now();
            for (number, (length, prompt)) in lengths.iter().enumerate() {
                let began = now;
                now += *length * MICRO;
                let last_pending = if *prompt { now - MICRO } else { began };
                forecast.found(number as u64 + 1, began, Some(last_pending), now);
            }
            let longest = lengths.iter().map(|(length, _)| *length).max().unwrap_or(0);
            if let Some(expected) = forecast.expect(lengths.len() as u64 + 1, now) {
                prop_assert!(expected.at >= now);
                prop_assert!(expected.at <= now + longest * MICRO + MICRO);
            }
        }
    }

    #[test]
    fn it_grows_where_marks_have_passed_and_pauses_where_not() {
        let stride = Stride::new();
        let mut grows = Vec::new();
        for _ in 0..7 {
            grows.extend(stride.next());
            stride.found(true);
        }
        assert_eq!(grows, [1, 2, 4, 8, 16, 32, 32]);
        let mut shrinks = Vec::new();
        for _ in 0..6 {
            shrinks.extend(stride.next());
            stride.found(false);
        }
        assert_eq!(shrinks, [32, 16, 8, 4, 2, 1]);
        let pause = std::iter::repeat_with(|| stride.next()).take_while(Option::is_none).count();
        assert_eq!(pause, PAUSE as usize + 1);
    }
}
