//! [`Paths`]: how long messages take from their source to where they end, and where that time goes.
//!
//! The journeys of sampled messages ([`Journey`](crate::hub::journey::Journey)) end in the flow's log. The observer takes
//! them from there, waits until the times of their device work are known, and adds each to the histogram of its path.
//!
//! ```text
//!   sent by the source                                                      end of the last run, or of its device work
//!     │ queued   host         queued    host      queued                      │
//!     ├────────┬──────────┬──────────┬─────────┬────────┬───────────┬──────────┤
//!              └ taken    └ sent     └ taken   └ sent   └ taken     └ run ends
//!     │        │  [ device ]    [ copy ]       │        │      [ device ]      │
//! ```
//!
//! Each instant counts for one part: for device work of its runs if there is any, else for a copy, else for a run on the
//! host, and otherwise as queued.

use std::{
    cmp::Reverse,
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant as SystemInstant},
};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::histogram::Histogram;
use crate::{
    hub::journey::{FinishedJourney, JourneyLog, JourneyStage},
    operator::control::Control,
    stream::Spans,
    sync::{Level, Mutex, lock},
};

/// The maximum number of paths that are distinguished.
const MOST: usize = 64;
/// Slow messages that are kept, of each path and slice.
const SLOWEST: usize = 5;
/// The number of slices into which the kept time is divided.
const SLICES: u32 = 5;
/// Journeys that wait for the times of their device work.
const MOST_WAITING: usize = 65_536;
/// How long they wait at most.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// One path through a flow, from a source to where its messages end, with how long its messages took. Only sampled
/// messages are measured: see [`Observe::paths`](super::Observe::paths).
///
/// The time of a message begins when its source sends it, and ends with the run that took it last, or with that run's
/// device work. Where a run takes several messages, the oldest one continues, and a path ends at an operator that
/// sends nothing in the run.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathSnapshot {
    /// The names of its operators in the order of their first visits. Empty for the sum of all further
    /// paths, once there are 64.
    pub operators: Vec<Arc<str>>,
    /// The number of messages that were measured since the flow's begin.
    pub count: u64,
    /// Of the messages in the window that were measured, half took at most this time. All percentiles are exact or at most
    /// 6.25 % too high, and zero if there was no message.
    pub p50: Duration,
    /// 90 % took at most this time.
    pub p90: Duration,
    /// 99 % took at most this time.
    pub p99: Duration,
    /// 99.9 % took at most this time.
    pub p999: Duration,
    /// The longest time.
    pub max: Duration,
    /// Where the time of an average message went.
    pub parts: PathParts,
    /// The slowest messages in the window, slowest first.
    pub slowest: Vec<SlowMessage>,
}

/// The parts of a message's time, whose sum it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathParts {
    /// It waited: in a queue, for room, for an envelope, for a worker thread.
    pub queued: Duration,
    /// An operator had it, and neither computed on a device nor was it copied.
    pub host: Duration,
    /// A device worked for one of its runs. Zero unless device times are
    /// [recorded](super::Observe::device_times); work on streams other than the operators' own does not count.
    pub device: Duration,
    /// A hub copied its envelopes.
    pub copy: Duration,
}

/// A slow message of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SlowMessage {
    /// The number of the run of its source, counted from zero. Of a message from outside, its own number.
    pub number: u64,
    /// How long ago it was sent by its source.
    pub ago: Duration,
    /// How long it took.
    pub latency: Duration,
    /// Where that time went.
    pub parts: PathParts,
}

/// How many messages are measured, and how many of those have no path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PathCounts {
    /// One message in so many is measured; zero if none is.
    pub every: u32,
    /// Measured messages that a hub dropped, that a newer value replaced before they were read, or that were left in a
    /// queue.
    pub dropped: u64,
    /// Measured messages of which too much was to be recorded: they went through more than 256 runs, or too many ended at
    /// once.
    pub lost: u64,
}

impl PathParts {
    /// The sum.
    pub fn total(&self) -> Duration {
        self.queued + self.host + self.device + self.copy
    }

    fn add(&mut self, other: &Self) {
        self.queued += other.queued;
        self.host += other.host;
        self.device += other.device;
        self.copy += other.copy;
    }

    fn div(&self, count: u64) -> Self {
        let of = |part: Duration| part.div_f64(count.max(1) as f64);
        Self { queued: of(self.queued), host: of(self.host), device: of(self.device), copy: of(self.copy) }
    }
}

/// The paths of one run of a flow.
pub(super) struct Paths {
    log: Arc<JourneyLog>,
    every: u32,
    keep: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(SystemInstant, FinishedJourney)>,
    paths: FxHashMap<Box<[usize]>, Path>,
    other: Path,
    lost: u64,
}

#[derive(Default)]
struct Path {
    count: u64,
    slices: VecDeque<PathSlice>,
}

struct PathSlice {
    began: SystemInstant,
    latencies: Histogram,
    parts: PathParts,
    slowest: Vec<Slow>,
}

#[derive(Clone, Copy)]
struct Slow {
    number: u64,
    at: Instant,
    latency: Duration,
    parts: PathParts,
}

impl Paths {
    /// Those of a flow, if they are recorded.
    pub(super) fn of(control: &Control, keep: Duration) -> Option<Self> {
        let watched = control.watched()?;
        let paths = watched.paths.as_ref()?;
        let state = Mutex::at(Level::Paths, State::default());
        Some(Self { log: paths.log.clone(), every: paths.every, keep, state })
    }

    /// Takes what has ended, and calls `slow` with the path and the time of each. At the end of a flow, also that of which
    /// some times are missing.
    pub(super) fn collect(&self, is_last: bool, slow: &mut dyn FnMut(&[usize], Duration)) {
        let mut done = Vec::new();
        let mut state = lock(&self.state);
        // With the lock held: what another thread takes is there when this one collects the last.
        let (ended, now) = (self.log.take(), SystemInstant::now());
        state.waiting.extend(ended.into_iter().map(|ended| (now, ended)));
        let surplus = state.waiting.len().saturating_sub(MOST_WAITING);
        done.extend(state.waiting.drain(..surplus));
        state.lost += surplus as u64;
        let mut open = VecDeque::new();
        while let Some((since, ended)) = state.waiting.pop_front() {
            if is_last || now - since >= LONGEST_WAIT || stages(&ended.last).all(JourneyStage::is_known) {
                state.add(&ended, now, self.keep, slow);
                done.push((since, ended));
            } else {
                open.push_back((since, ended));
            }
        }
        state.waiting = open;
        drop(state);
        drop(done);
    }

    pub(super) fn snapshot(&self, control: &Control) -> (Vec<PathSnapshot>, PathCounts) {
        let state = lock(&self.state);
        let mut paths: Vec<_> = state.paths.iter().map(|(operators, path)| (&**operators, path)).collect();
        paths.sort_by_key(|(operators, _)| *operators);
        if state.other.count > 0 {
            paths.push((&[], &state.other));
        }
        let names = |operators: &[usize]| operators.iter().map(|number| control.names[*number].clone()).collect();
        let all = paths.into_iter().map(|(operators, path)| path.snapshot(names(operators), self.keep)).collect();
        let [dropped, lost] = self.log.counts();
        (all, PathCounts { every: self.every, dropped, lost: lost + state.lost })
    }
}

impl State {
    fn add(
        &mut self,
        ended: &FinishedJourney,
        now: SystemInstant,
        keep: Duration,
        slow: &mut dyn FnMut(&[usize], Duration),
    ) {
        let mut operators: SmallVec<[usize; 16]> = stages(&ended.last).map(|stage| stage.operator).collect();
        operators.reverse();
        let mut seen = SmallVec::<[usize; 16]>::new();
        operators.retain(|operator| {
            let is_new = !seen.contains(operator);
            seen.push(*operator);
            is_new
        });
        let is_full = self.paths.len() >= MOST;
        let path = match self.paths.get_mut(&*operators) {
            Some(path) => path,
            None if is_full => &mut self.other,
            None => self.paths.entry(operators.as_slice().into()).or_default(),
        };
        let (latency, parts) = measure(ended);
        slow(&operators, latency);
        path.add(Slow { number: ended.origin.number, at: ended.origin.at, latency, parts }, now, keep);
    }
}

impl Path {
    fn add(&mut self, message: Slow, now: SystemInstant, keep: Duration) {
        let length = keep / SLICES;
        if self.slices.back().is_none_or(|last| now - last.began >= length) {
            self.slices.push_back(PathSlice {
                began: now,
                latencies: Histogram::default(),
                parts: PathParts::default(),
                slowest: Vec::with_capacity(SLOWEST + 1),
            });
        }
        while self.slices.front().is_some_and(|first| !first.is_recent(now, keep)) {
            self.slices.pop_front();
        }
        self.count += 1;
        let Some(slice) = self.slices.back_mut() else { return };
        slice.latencies.add(message.latency);
        slice.parts.add(&message.parts);
        keep_slowest(&mut slice.slowest, message);
    }

    fn snapshot(&self, operators: Vec<Arc<str>>, keep: Duration) -> PathSnapshot {
        let mut latencies = Histogram::default();
        let (mut parts, mut slowest) = (PathParts::default(), Vec::new());
        // Those of a path that has no messages any more are still there.
        for slice in self.slices.iter().filter(|slice| slice.is_recent(SystemInstant::now(), keep)) {
            latencies.merge(&slice.latencies);
            parts.add(&slice.parts);
            slice.slowest.iter().for_each(|message| keep_slowest(&mut slowest, *message));
        }
        let of = |share: f64| latencies.percentile(share);
        PathSnapshot {
            operators,
            count: self.count,
            p50: of(0.5),
            p90: of(0.9),
            p99: of(0.99),
            p999: of(0.999),
            max: latencies.max(),
            parts: parts.div(latencies.total()),
            slowest: slowest.into_iter().map(SlowMessage::from).collect(),
        }
    }
}

impl PathSlice {
    /// True if its messages may be in the window.
    fn is_recent(&self, now: SystemInstant, keep: Duration) -> bool {
        now.saturating_duration_since(self.began) <= keep + keep / SLICES
    }
}

fn keep_slowest(slowest: &mut Vec<Slow>, message: Slow) {
    let at = slowest.partition_point(|other| Reverse(other.latency) <= Reverse(message.latency));
    slowest.insert(at, message);
    slowest.truncate(SLOWEST);
}

impl From<Slow> for SlowMessage {
    fn from(Slow { number, at, latency, parts }: Slow) -> Self {
        Self { number, ago: crate::clock::now().saturating_duration_since(at), latency, parts }
    }
}

/// From the last one back to the source.
fn stages(last: &Arc<JourneyStage>) -> impl Iterator<Item = &JourneyStage> {
    std::iter::successors(Some(&**last), |stage| stage.before.as_deref())
}

impl JourneyStage {
    /// True if the times of its device work are known.
    fn is_known(&self) -> bool {
        self.work.are_known() && self.copies.as_deref().is_none_or(Spans::are_known)
    }
}

/// What a part of the time is spent with, in the order of their precedence.
const KINDS: usize = 3;

/// The latency of a message, and its parts.
fn measure(ended: &FinishedJourney) -> (Duration, PathParts) {
    let (origin, last) = (ended.origin.at, &ended.last);
    let end = last.work.times().iter().map(|(_, end)| *end).fold(last.left, Instant::max);
    // Where one of three kinds begins or ends.
    let mut changes = vec![(end.max(origin), KINDS, 0)];
    let mut add = |kind: usize, (from, to): (Instant, Instant)| {
        let (from, to) = (from.clamp(origin, end.max(origin)), to.clamp(origin, end.max(origin)));
        changes.extend([(to, kind, -1), (from, kind, 1)]);
    };
    for stage in stages(last) {
        stage.work.times().into_iter().for_each(|span| add(0, span));
        stage.copies.iter().flat_map(|copies| copies.times()).for_each(|span| add(1, span));
        add(2, (stage.taken, stage.left));
    }
    // From the newest stage to the first one: reversed, they are nearly sorted.
    changes.reverse();
    changes.sort_unstable();
    let (mut open, mut at, mut sums) = ([0; KINDS + 1], origin, [Duration::ZERO; KINDS + 1]);
    for (next, kind, change) in changes {
        let first = open[..KINDS].iter().position(|count| *count > 0).unwrap_or(KINDS);
        sums[first] += next - at;
        open[kind] += change;
        at = next;
    }
    let [device, copy, host, queued] = sums;
    (at - origin, PathParts { queued, host, device, copy })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hub::journey::JourneyOrigin;

    const TICKS: u64 = 40;

    fn tick() -> impl Strategy<Value = (u64, u64)> {
        (0..TICKS, 0..TICKS).prop_map(|(one, other)| (one.min(other), one.max(other)))
    }

    proptest! {
        /// Runs, device work and copies in any place, also before the origin and after the end.
        #[test]
        fn each_instant_is_device_copy_host_or_queued_in_this_order(
            origin in 0..TICKS / 2,
            stages in prop::collection::vec(
                (tick(), prop::collection::vec(tick(), 0..3), prop::option::of(prop::collection::vec(tick(), 0..3))),
                1..4,
            ),
        ) {
            let zero = Instant::now();
            let at = |tick: u64| zero + Duration::from_micros(tick);
            let known = |ticks: &Vec<(u64, u64)>| Spans::known(ticks.iter().map(|(from, to)| (at(*from), at(*to))));
            let (mut last, mut spans) = (None, [(); KINDS].map(|()| Vec::new()));
            for ((taken, left), work, copies) in &stages {
                spans[0].extend(work);
                spans[1].extend(copies.iter().flatten());
                spans[2].push((*taken, *left));
                last = Some(JourneyStage::after(last, (at(*taken), at(*left)), known(work), copies.as_ref().map(known)));
            }
            // The device may work on after the last run.
            let (of_last, work) = stages.last().map(|((_, left), work, _)| (*left, work)).unwrap();
            let end = work.iter().map(|(_, to)| *to).fold(of_last, u64::max).max(origin);
            let mut parts = [0; KINDS + 1];
            for tick in origin..end {
                let is_in = |all: &Vec<(u64, u64)>| all.iter().any(|(from, to)| *from <= tick && tick < *to);
                parts[spans.iter().position(is_in).unwrap_or(KINDS)] += 1;
            }
            let [device, copy, host, queued] = parts.map(Duration::from_micros);
            let origin = JourneyOrigin { at: at(origin), number: 0 };
            let found = measure(&FinishedJourney { origin, last: last.unwrap() });
            prop_assert_eq!(found, (device + copy + host + queued, PathParts { queued, host, device, copy }));
        }
    }

    /// A path whose messages have ceased keeps its count, and no percentiles of what is past.
    #[test]
    fn what_is_older_than_the_window_is_not_shown() {
        const KEEP: Duration = Duration::from_secs(1);
        let mut path = Path::default();
        let latency = Duration::from_millis(3);
        let parts = PathParts { host: latency, ..PathParts::default() };
        let message = Slow { number: 7, at: Instant::now(), latency, parts };
        path.add(message, SystemInstant::now(), KEEP);
        let shown = path.snapshot(Vec::new(), KEEP);
        assert_eq!((shown.count, shown.max, shown.parts, shown.slowest[0].number), (1, latency, parts, 7));
        // As if it had been added two windows ago.
        let Some(past) = SystemInstant::now().checked_sub(2 * KEEP) else { return };
        path.slices[0].began = past;
        let shown = path.snapshot(Vec::new(), KEEP);
        assert_eq!((shown.count, shown.p50, shown.max, shown.slowest.len()), (1, Duration::ZERO, Duration::ZERO, 0));
    }
}
