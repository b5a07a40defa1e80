//! [`Forecast`]: when will a stream's next work be done?
//!
//! A stream's work tends to take as long as it took before. For each mark that somebody waited for, the time is taken
//! from when the stream could begin with it (the end of the one before, or the begin of the wait if that is later) to its
//! end. A moving average and its mean deviation are kept; a prediction is as good as the deviation is small.
//!
//! An end is noticed some time after the last look that found the work not done. Where that is long, the work may have
//! ended at any moment in between. If it took longer than expected, the sleeper was woken by a callback, which comes soon
//! after: the whole time is believed. If it may have taken less, the average is pulled down, more each time, so that the
//! next look comes earlier: an average that is too high would never be found out otherwise.

use std::time::{Duration, Instant};

/// How soon a new sample is believed: a weight of 1/4.
const WEIGHT: f64 = 0.25;
/// Average deviation over average duration above which nothing can be foretold.
const HOPELESS: f64 = 0.5;
/// An end is noticed in time if it was looked for so short a time before, or for so small a part of what the work took.
const IN_TIME: (f64, f64) = (30e-6, 0.02);
/// What the average is pulled down by at first, in seconds.
const PULL: f64 = 250e-6;

/// Marks that are counted between two ends: many that nobody waited for need not take as long as those that somebody did,
/// and a sleeper that is woken too early only looks once more.
const MOST: u64 = 32;

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
    /// How long the last one took.
    last: f64,
    /// How many ends in a row may have come earlier than they were noticed.
    late: i32,
}

impl Known {
    fn new(took: f64) -> Self {
        Self { mean: took, deviation: took / 8.0, last: took, late: 0 }
    }

    fn learn(self, took: f64) -> Self {
        // Two alike that are nothing like the average: the work has become another.
        if (took - self.last).abs() < took / 4.0 && (took - self.mean).abs() > took / 2.0 {
            return Self::new(took);
        }
        let off = took - self.mean;
        let mean = self.mean + WEIGHT * off;
        Self { mean, deviation: self.deviation + WEIGHT * (off.abs() - self.deviation), last: took, late: 0 }
    }
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

    /// A waiter that had waited since `began`, and at `asked` had found the mark not done, has `now` found it done.
    pub(super) fn found(&mut self, number: u64, began: Instant, asked: Option<Instant>, now: Instant) {
        let (start, marks) = self.start(number, began);
        let seconds = |moment: Instant| moment.saturating_duration_since(start).as_secs_f64() / marks;
        let (least, most) = (asked.map_or(0.0, seconds), seconds(now));
        let in_time = asked.is_some() && most - least <= IN_TIME.0.max(IN_TIME.1 * most);
        self.last = in_time.then_some((now, number));
        self.known = Some(match self.known {
            // The first may be a callback's: late, but not by much.
            None => Known::new(most),
            Some(known) if in_time || known.mean < least => known.learn(most),
            Some(known) => {
                let most = known.mean.min(most);
                let mean = (most - PULL * 2.0_f64.powi(known.late.min(8))).max(most / 2.0);
                Known { mean, late: known.late + 1, ..known }
            }
        });
    }

    /// When the stream could begin with what lies before this mark, and how many marks that is.
    fn start(&self, number: u64, began: Instant) -> (Instant, f64) {
        match self.last {
            Some((end, last)) if end > began && last < number => (end, (number - last).min(MOST) as f64),
            _ => (began, 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    /// Work of these lengths, one after the other, each waited for from its begin: looked for from a while before its
    /// expected end until a while after, woken `late` where that finds nothing. How many ends were seen as they came?
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
            let (asked, found) = match () {
                () if end <= from => (began, from + late),
                () if end <= until => (end - MICRO, end),
                () => (until, end + late),
            };
            forecast.found(number, began, Some(asked), found);
            count += u32::from(found == end);
            now = found;
        }
        count
    }

    #[test]
    fn work_of_one_length_is_foretold_after_a_few() {
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
    fn what_varies_without_measure_is_not_foretold() {
        let mut forecast = Forecast::default();
        in_time(&mut forecast, (0..200).map(|n| if n % 2 == 0 { 10 } else { 20_000 }));
        assert_eq!(forecast.expect(1000, Instant::now()), None);
    }

    #[test]
    fn several_that_are_enqueued_at_once_follow_each_other() {
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
        /// Whatever it is told, it foretells nothing before the begin and nothing absurd after it.
        #[test]
        fn it_stays_within_what_was_seen(lengths in prop::collection::vec((1..100_000_u32, any::<bool>()), 1..50)) {
            let mut forecast = Forecast::default();
            let mut now = Instant::now();
            for (number, (length, prompt)) in lengths.iter().enumerate() {
                let began = now;
                now += *length * MICRO;
                let asked = if *prompt { now - MICRO } else { began };
                forecast.found(number as u64 + 1, began, Some(asked), now);
            }
            let longest = lengths.iter().map(|(length, _)| *length).max().unwrap_or(0);
            if let Some(expected) = forecast.expect(lengths.len() as u64 + 1, now) {
                prop_assert!(expected.at >= now);
                prop_assert!(expected.at <= now + longest * MICRO + MICRO);
            }
        }
    }
}
