//! [`Records`]: what the last seconds of a run were like, from samples of its state.
//!
//! The [sampler](super::sampler) looks at each operator and hub where they are, and counts what it finds. Shares and rates
//! are not derived from events, which could get lost, and a flow that is not observed pays nothing.
//!
//! The counts of [`BUCKETS`] stretches of time are kept, the oldest of which is replaced by the next.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{
    activity::Activity,
    flight::FlowSink,
    hooks::{Hook, WarningQueue},
    long_waits::Look,
    paths::{PathCounts, PathSnapshot, Paths},
    recording::Recording,
    sample::FlowSample,
    sampler,
    snapshot::{self, Snapshot, path_name},
    timeline::Timeline,
    triggers::{Happened, Triggers},
    warnings::{Warning, WarningCounts},
    watchdogs::{Begun, Limits, Watchdogs},
};
#[cfg(feature = "page")]
use crate::sync::AtomicU64;
use crate::{
    operator::{
        Handle,
        control::{Control, Hubs},
    },
    stream::SpanReader,
    sync::{Deferred, Level, Mutex, lock, logged},
};

/// The number of stretches into which the kept time is divided.
const BUCKETS: u32 = 20;
const KINDS: usize = Activity::ALL.len();

/// How a flow is observed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampling {
    pub(super) every: Duration,
    pub(super) keep: Duration,
    /// One message in so many of each source is followed; zero for none.
    pub(super) paths: u32,
    pub(super) device_times: bool,
    pub(super) limits: Limits,
}

/// The records of one run.
pub(super) struct Records {
    /// Counts the runs of the process that were observed.
    #[cfg(feature = "page")]
    pub(super) number: u64,
    sampling: Sampling,
    pub(super) control: Weak<Control>,
    recent: Mutex<Recent>,
    /// `None` also for a second observer of the run.
    paths: Option<Paths>,
    warnings: Arc<WarningQueue>,
    /// The flow's observer owns them: one may own a handle of the run.
    hooks: Weak<Vec<Hook>>,
    /// Of several observers of a flow the first one logs.
    logs: bool,
    /// Set if device work is timed: read by the first observer.
    reader: Mutex<Option<Arc<SpanReader>>>,
    /// Set if the run is recorded.
    recording: Option<Recording>,
    triggers: Arc<Triggers>,
    /// Threads that save traces.
    saves: Mutex<Vec<JoinHandle<()>>>,
    /// Calls that may be about to add one.
    firing: AtomicUsize,
    /// Set when the run has ended.
    last: Mutex<Option<Arc<Snapshot>>>,
}

struct Recent {
    buckets: VecDeque<Bucket>,
    operators: Vec<Now>,
    watchdogs: Watchdogs,
    /// The latest sample. Its memory is used again.
    sample: FlowSample,
}

/// What an operator does now.
#[derive(Clone, Copy)]
struct Now {
    activity: Activity,
    since: Instant,
    /// Its runs when it began that.
    runs: u64,
    /// The number of the poll that it is in, and since when that was seen.
    poll: Option<(u32, Instant)>,
}

struct Bucket {
    began: Instant,
    samples: u32,
    operators: Box<[OperatorBucket]>,
    hubs: Box<[HubBucket]>,
}

#[derive(Clone, Copy, Default)]
struct OperatorBucket {
    counts: [u32; KINDS],
    /// Its runs at the beginning.
    runs: u64,
    /// The longest time for which one run was seen in one poll.
    poll: Duration,
}

#[derive(Clone, Copy, Default)]
struct HubBucket {
    full: u32,
    room: u32,
    envelope: u32,
    message: u32,
    /// Messages that had passed at the beginning.
    passed: u64,
}

/// The sums of all buckets.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    pub(super) window: Duration,
    pub(super) samples: u32,
    pub(super) operators: Vec<OperatorSummary>,
    pub(super) hubs: Vec<HubSummary>,
    pub(super) warnings: Vec<Warning>,
    pub(super) warning_counts: WarningCounts,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OperatorSummary {
    pub(super) shares: [f32; KINDS],
    /// Runs at the beginning of the window.
    pub(super) runs: u64,
    pub(super) longest_poll: Duration,
    /// How long it has done what it does now.
    pub(super) since: Duration,
}

/// Shares of the time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HubSummary {
    pub(super) full: f64,
    pub(super) room: f64,
    pub(super) envelope: f64,
    pub(super) message: f64,
    pub(super) passed: u64,
}

impl Records {
    /// Begins to record a run.
    pub(super) fn begin(
        sampling: Sampling,
        (warnings, hooks): (Arc<WarningQueue>, Weak<Vec<Hook>>),
        triggers: Arc<Triggers>,
        recorder: Option<Arc<FlowSink>>,
        flow: &Handle,
    ) -> Arc<Self> {
        #[cfg(feature = "page")]
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let control = &flow.0;
        let is_first = control.records.get().is_none();
        let work = control.watched().and_then(|watched| watched.work.as_ref()).filter(|_| is_first);
        let watchdogs = Watchdogs::new(sampling.limits);
        let recent =
            Recent { buckets: VecDeque::new(), operators: Vec::new(), watchdogs, sample: FlowSample::default() };
        let records = Arc::new(Self {
            #[cfg(feature = "page")]
            number: BEGUN.fetch_add(1, Ordering::Relaxed),
            sampling,
            control: Arc::downgrade(control),
            recent: Mutex::at(Level::Records, recent),
            warnings,
            hooks,
            logs: is_first,
            paths: is_first.then(|| Paths::of(control, sampling.keep)).flatten(),
            reader: Mutex::new(work.map(|work| work.reader.clone())),
            recording: recorder.and_then(|recorder| Recording::begin(control, recorder)),
            triggers,
            saves: Mutex::default(),
            firing: AtomicUsize::new(0),
            last: Mutex::default(),
        });
        let known: Arc<dyn std::any::Any + Send + Sync> = records.clone();
        let _ = control.records.set(known);
        sampler::add(&records);
        records
    }

    pub(super) fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Those of the first observer of the flow.
    pub(super) fn of(control: &Control) -> Option<Arc<Self>> {
        control.records.get().and_then(|records| records.clone().downcast().ok())
    }

    pub(super) fn paths(&self, control: &Control) -> Option<(Vec<PathSnapshot>, PathCounts)> {
        self.paths.as_ref().map(|paths| paths.snapshot(control))
    }

    /// Reads device work, and collects what has ended on the paths. Has what the triggers wait for saved. `polled`: the
    /// operator that was seen in one poll for longest.
    pub(super) fn collect(self: &Arc<Self>, control: &Control, polled: Option<(usize, Duration)>, is_last: bool) {
        // Before anything is taken that a trigger may be interested in: the last call waits for it.
        let firing = Firing::begin(&self.firing);
        let reader = if is_last { lock(&self.reader).take() } else { lock(&self.reader).clone() };
        match reader {
            Some(reader) if is_last => reader.close(),
            Some(reader) => {
                reader.read(None);
                // Most of the next spans are later than this anchor: one comparison each.
                reader.adjust();
            }
            None => {}
        }
        let mut happened = Happened::default();
        let looks = self.recording.is_some() && self.triggers.look_at_paths();
        let mut slowest = FxHashMap::<Box<[usize]>, Duration>::default();
        let mut note = |operators: &[usize], took: Duration| {
            if looks {
                match slowest.get_mut(operators) {
                    Some(most) => *most = took.max(*most),
                    None => drop(slowest.insert(operators.into(), took)),
                }
            }
        };
        self.paths.iter().for_each(|paths| paths.collect(is_last, &mut note));
        let Some(recording) = &self.recording else { return };
        let name = |operator: &usize| control.names[*operator].clone();
        let path = |operators: &[usize]| path_name(&operators.iter().map(name).collect::<Vec<_>>());
        happened.slowest = slowest.iter().map(|(operators, took)| (path(operators), *took)).collect();
        happened.stalled = recording.sink().take_stall();
        happened.blocked = polled.map(|(operator, took)| (name(&operator), took));
        if is_last {
            recording.end();
            happened.failed = control.failure().is_some_and(|failure| !failure.is_cancelled());
        }
        self.triggers.fire(&happened, self, is_last);
        drop(firing);
        if is_last {
            // What the observer's thread has noticed a moment ago is saved as well.
            while self.firing.load(Ordering::Acquire) > 0 {
                thread::yield_now();
            }
            let saves = std::mem::take(&mut *lock(&self.saves));
            // Their panics are contained.
            saves.into_iter().for_each(|save| drop(save.join()));
        }
    }

    /// Has `save` run on a thread of its own, which the end of the flow waits for.
    pub(super) fn save(&self, save: impl FnOnce() + Send + 'static) {
        match thread::Builder::new().name("wakeline-trace".into()).spawn(save) {
            Ok(save) => {
                let mut saves = lock(&self.saves);
                let done: Vec<_> = saves.extract_if(.., |save| save.is_finished()).collect();
                saves.push(save);
                drop(saves);
                drop(done);
            }
            Err(error) => logged(|| tracing::error!(%error, "cannot spawn the thread that saves a trace")),
        }
    }

    /// The last `window` of the run. `None` if it is not recorded.
    pub(super) fn timeline(&self, window: Duration) -> Option<Timeline> {
        self.recording.as_ref().map(|recording| recording.timeline(window.min(self.sampling.keep)))
    }

    /// The snapshot at the end of the run.
    pub(super) fn last(&self) -> Option<Arc<Snapshot>> {
        lock(&self.last).clone()
    }

    /// The run has ended, and no sample is taken any more.
    pub(super) fn end(&self, last: Snapshot) {
        let before = lock(&self.last).replace(Arc::new(last));
        drop(before);
    }

    /// The run was cut off: there is nothing to show, and no device is kept open for it.
    pub(super) fn cut_off(&self) {
        let reader = lock(&self.reader).take();
        reader.iter().for_each(|reader| reader.close());
    }

    pub(super) fn is_of(&self, flow: &Handle) -> bool {
        std::ptr::eq(self.control.as_ptr(), Arc::as_ptr(&flow.0))
    }

    /// The run itself, if it has not ended.
    #[cfg(feature = "page")]
    pub(super) fn handle(&self) -> Option<Handle> {
        self.control.upgrade().map(Handle).filter(|flow| !flow.has_ended())
    }

    /// What the run looks like now, or at its end.
    pub(super) fn snapshot(&self) -> Option<Snapshot> {
        if let Some(last) = self.last() {
            return Some((*last).clone());
        }
        let flow = Handle(self.control.upgrade()?);
        let devices = snapshot::devices(&flow.0);
        let later = Deferred::new();
        let recent = lock(&self.recent);
        // As for a sample.
        if flow.has_ended() {
            drop(recent);
            drop(later);
            return self.last().map(|last| (*last).clone());
        }
        let snapshot = Snapshot::new(&flow, &recent.summary(&flow.0), devices);
        drop(recent);
        drop(later);
        Some(snapshot.with_failure(&flow))
    }

    /// What the run looks like at its end.
    pub(super) fn last_summary(&self, flow: &Handle) -> Summary {
        let begun = lock(&self.recent).watchdogs.end(&flow.0);
        self.hand_on(begun);
        lock(&self.recent).summary(&flow.0)
    }

    /// Has warnings logged and given to the hooks. No lock is held.
    fn hand_on(&self, begun: Vec<Begun>) {
        if begun.is_empty() {
            return;
        }
        let hooks = self.hooks.upgrade().unwrap_or_default();
        for Begun { warning, logs } in begun {
            if !self.warnings.offer(warning, logs && self.logs, &hooks) {
                lock(&self.recent).watchdogs.count_lost();
            }
        }
    }

    /// Returns the operator that was seen in one poll for longest.
    pub(super) fn sample(&self, control: &Control, now: Instant) -> Option<(usize, Duration)> {
        let memory = self.recording.as_ref().map(|recording| recording.memory()).unwrap_or_default();
        let later = Deferred::new();
        // The run does not end before this sample, so that its hubs are dropped where it ends.
        let mut recent = lock(&self.recent);
        if control.has_ended() {
            return None;
        }
        let hubs = control.hubs();
        let mut longest: Option<(usize, Duration)> = None;
        let may_block = |number: usize| control.observed.get().is_some_and(|known| known.may_block[number]);
        let Recent { buckets, operators, watchdogs, sample } = &mut *recent;
        while buckets.get(1).is_some_and(|next| now - next.began >= self.sampling.keep) {
            buckets.pop_front();
        }
        if buckets.back().is_none_or(|bucket| now - bucket.began >= self.sampling.keep / BUCKETS) {
            buckets.push_back(Bucket::new(control, &hubs, now));
        }
        let bucket = buckets.back_mut()?;
        bucket.samples += 1;
        let began = self.recording.as_ref().map(Recording::now);
        sample.take(control, &hubs);
        let fills = sample.hubs.iter().map(|hub| hub.queued);
        if let Some((recording, began)) = self.recording.as_ref().zip(began) {
            recording.sample(began, fills, &memory, self.sampling.keep);
        }
        for (number, (seen, counts)) in sample.operators.iter().zip(&mut bucket.operators).enumerate() {
            let (activity, runs) = (seen.activity, seen.runs);
            counts.counts[activity as usize] += 1;
            if operators.len() == number {
                operators.push(Now { activity, since: now, runs, poll: None });
            }
            let before = &mut operators[number];
            if before.activity != activity || before.runs != runs {
                *before = Now { activity, since: now, runs, ..*before };
            }
            // `Runs` is also an operator whose workers are all busy, and one that is polled again and again.
            let known = before.poll;
            before.poll = seen.poll.filter(|_| activity == Activity::Runs).map(|poll| {
                let since = known.filter(|(same, _)| *same == poll).map_or(now, |(_, since)| since);
                (poll, since)
            });
            // A poll may contain many runs, and a run many polls.
            if let Some((_, since)) = before.poll {
                counts.poll = counts.poll.max(now - since.max(before.since));
            }
            if let Some((_, since)) = before.poll.filter(|(_, since)| *since < now && !may_block(number)) {
                longest = longest.filter(|(_, other)| *other >= now - since).or(Some((number, now - since)));
            }
        }
        for (hub, (seen, counts)) in hubs.all.iter().zip(sample.hubs.iter().zip(&mut bucket.hubs)) {
            let waits = |activity: Activity| u32::from(sample.waits_at(hub, seen, activity));
            counts.full += u32::from(seen.is_full);
            counts.room += waits(Activity::Room);
            counts.envelope += waits(Activity::Envelope);
            counts.message += waits(Activity::Message);
        }
        let look = Look { control, hubs: &hubs, seen: &sample.operators, now };
        let begun = watchdogs.look(look, self.sampling.every);
        drop(recent);
        drop(later);
        self.hand_on(begun);
        longest
    }
}

/// A call that fires triggers.
struct Firing<'a>(&'a AtomicUsize);

impl<'a> Firing<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Firing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Recent {
    fn summary(&self, control: &Control) -> Summary {
        let Self { buckets, operators, watchdogs, .. } = self;
        let (warnings, warning_counts) = (watchdogs.listed(control), watchdogs.counts());
        let Some(first) = buckets.front() else { return Summary { warnings, warning_counts, ..Summary::default() } };
        let now = Instant::now();
        let samples: u32 = buckets.iter().map(|bucket| bucket.samples).sum();
        let share = |count: u32| f64::from(count) / f64::from(samples.max(1));
        let operators = operators.iter().enumerate().map(|(at, doing)| {
            let mut counts = [0; KINDS];
            for bucket in buckets {
                counts.iter_mut().zip(bucket.operators[at].counts).for_each(|(sum, count)| *sum += count);
            }
            OperatorSummary {
                shares: counts.map(|count| share(count) as f32),
                runs: first.operators[at].runs,
                longest_poll: buckets.iter().map(|bucket| bucket.operators[at].poll).max().unwrap_or_default(),
                since: now - doing.since,
            }
        });
        let hubs = (0..first.hubs.len()).map(|at| {
            let sum = |of: fn(&HubBucket) -> u32| {
                share(buckets.iter().filter_map(|bucket| bucket.hubs.get(at)).map(of).sum())
            };
            HubSummary {
                full: sum(|hub| hub.full),
                room: sum(|hub| hub.room),
                envelope: sum(|hub| hub.envelope),
                message: sum(|hub| hub.message),
                passed: first.hubs[at].passed,
            }
        });
        Summary {
            window: now - first.began,
            samples,
            operators: operators.collect(),
            hubs: hubs.collect(),
            warnings,
            warning_counts,
        }
    }
}

impl Bucket {
    fn new(control: &Control, hubs: &Hubs, began: Instant) -> Self {
        let operators = control
            .tasks
            .iter()
            .map(|task| OperatorBucket { runs: task.status_cell().runs(), ..OperatorBucket::default() });
        let hubs = hubs.all.iter().map(|hub| HubBucket { passed: hub.state.counts().taken, ..HubBucket::default() });
        Self { began, samples: 0, operators: operators.collect(), hubs: hubs.collect() }
    }
}
