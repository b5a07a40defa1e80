//! A timeline as a page shows it: tracks of stretches, however many events there are.
//!
//! ```json
//! {"seconds": 2.0, "lost": 0, "left": 0,
//!  "tracks": [{"name": "upper", "device": false, "runs": [12.0, 1980.5, 1400.0], "polls": []}]}
//! ```
//!
//! Three numbers are a stretch: its begin and its end, in microseconds from the begin of the timeline, and for how long of
//! it there was work. Runs that are closer than [`GAP`] are one stretch.

use hyper::body::Bytes;
use rustc_hash::FxHashMap;
use serde::{Serialize, Serializer};

use super::super::timeline::Timeline;
use crate::tracepoint::{OUTSIDE, TraceEvent};

/// Shorter gaps than this part of the timeline are not shown.
const GAP: u64 = 1600;
/// The most tracks: those with most work.
const MOST: usize = 60;

#[derive(Serialize)]
struct Tracks {
    seconds: f64,
    lost: u64,
    /// Tracks that are not shown.
    left: usize,
    tracks: Vec<Track>,
}

#[derive(Serialize)]
struct Track {
    name: String,
    device: bool,
    runs: Stretches,
    /// When a thread polled the operator.
    polls: Stretches,
    #[serde(skip)]
    work: u64,
}

/// Stretches in the order of their begins. Times are nanoseconds.
#[derive(Default)]
struct Stretches {
    all: Vec<[u64; 3]>,
}

impl Stretches {
    /// Of intervals in any order.
    fn new(mut intervals: Vec<(u64, u64)>, gap: u64) -> Self {
        intervals.sort_unstable();
        let mut all: Vec<[u64; 3]> = Vec::new();
        for (began, ended) in intervals {
            match all.last_mut() {
                Some([_, end, work]) if began <= end.saturating_add(gap) => {
                    *work += ended.saturating_sub(began.max(*end));
                    *end = ended.max(*end);
                }
                _ => all.push([began, ended, ended - began]),
            }
        }
        Self { all }
    }

    fn work(&self) -> u64 {
        self.all.iter().map(|[_, _, work]| work).sum()
    }
}

impl Serialize for Stretches {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Tenths of microseconds are enough to draw.
        serializer.collect_seq(self.all.iter().flatten().map(|nanos| (*nanos as f64 / 100.0).round() / 10.0))
    }
}

pub(super) fn json(timeline: &Timeline) -> Option<Bytes> {
    serde_json::to_vec(&tracks(timeline)).ok().map(Bytes::from)
}

fn tracks(timeline: &Timeline) -> Tracks {
    // A flow that began later has nothing before.
    let first = timeline
        .events
        .first()
        .map(|event| event.at)
        .into_iter()
        .chain(timeline.device.first().map(|slice| slice.began));
    let (from, to) = (first.min().unwrap_or(0).clamp(timeline.from, timeline.to), timeline.to);
    let (length, gap) = (to - from, (to - from) / GAP);
    let at = |time: u64| time.clamp(from, to) - from;
    let (mut runs, mut polls) = intervals(timeline);
    let stretches = |all: &mut FxHashMap<u32, Vec<(u64, u64)>>, number: u32| {
        let all = all.remove(&number).unwrap_or_default();
        Stretches::new(all.into_iter().map(|(began, ended)| (at(began), at(ended).max(at(began)))).collect(), gap)
    };
    let mut tracks = Vec::new();
    for (number, name) in (0..).zip(&timeline.operators) {
        let (runs, polls) = (stretches(&mut runs, number), stretches(&mut polls, number));
        let work = runs.work().max(polls.work());
        tracks.push(Track { name: name.to_string(), device: false, runs, polls, work });
    }
    let mut slices = FxHashMap::<u32, Vec<(u64, u64)>>::default();
    for slice in &timeline.device {
        slices.entry(slice.stream).or_default().push((slice.began, slice.ended));
    }
    for (number, name) in (0..).zip(&timeline.streams) {
        let runs = stretches(&mut slices, number);
        if runs.work() > 0 {
            let work = runs.work();
            tracks.push(Track { name: name.clone(), device: true, runs, polls: Stretches::default(), work });
        }
    }
    let left = tracks.len().saturating_sub(MOST);
    if left > 0 {
        let mut work: Vec<_> = tracks.iter().map(|track| track.work).collect();
        work.sort_unstable();
        let least = work[left];
        tracks.retain(|track| track.work >= least);
        tracks.truncate(MOST);
    }
    Tracks { seconds: length as f64 / 1e9, lost: timeline.lost, left, tracks }
}

type Intervals = FxHashMap<u32, Vec<(u64, u64)>>;

/// The runs and the polls of each operator. One that has begun before, or not ended, counts from or up to the end of the
/// timeline.
fn intervals(timeline: &Timeline) -> (Intervals, Intervals) {
    let (mut runs, mut polls) = (Intervals::default(), Intervals::default());
    let (mut open_runs, mut open_polls) = (FxHashMap::default(), FxHashMap::default());
    for event in &timeline.events {
        let at = event.at;
        match event.event {
            TraceEvent::RunBegan { operator, run } => _ = open_runs.insert((operator, run), at),
            TraceEvent::RunEnded { operator, run } => {
                let began = open_runs.remove(&(operator, run)).unwrap_or(timeline.from);
                runs.entry(operator).or_default().push((began, at));
            }
            TraceEvent::PollBegan { operator } => _ = open_polls.insert((operator, event.thread), at),
            TraceEvent::PollEnded { operator } => {
                let began = open_polls.remove(&(operator, event.thread)).unwrap_or(timeline.from);
                polls.entry(operator).or_default().push((began, at));
            }
            TraceEvent::Sent { .. } | TraceEvent::Taken { .. } | TraceEvent::Stalled | TraceEvent::Failed { .. } => {}
        }
    }
    for ((operator, _), began) in open_runs {
        runs.entry(operator).or_default().push((began, timeline.to));
    }
    for ((operator, _), began) in open_polls {
        polls.entry(operator).or_default().push((began, timeline.to));
    }
    runs.remove(&OUTSIDE);
    (runs, polls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_that_are_close_are_one_stretch() {
        let all = Stretches::new(vec![(50, 60), (0, 10), (12, 20), (15, 18)], 5);
        assert_eq!(all.all, [[0, 20, 18], [50, 60, 10]]);
        assert_eq!(all.work(), 28);
        let all = Stretches::new(vec![(0, u64::MAX), (5, u64::MAX)], u64::MAX);
        assert_eq!(all.all, [[0, u64::MAX, u64::MAX]]);
    }
}
