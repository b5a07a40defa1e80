//! [`Records`]: what the last seconds of a run were like, from samples of its state.
//!
//! One thread of the process, `wakeline-observer`, looks at each operator and hub of each observed flow now and then,
//! where they are, and counts what it finds. Nothing is recorded by the flow itself, so nothing is lost, and a flow
//! that is not observed pays nothing. The thread is not one of the runtime's: it also runs while all workers are
//! blocked. It ends with the last observed flow.
//!
//! The counts of [`BUCKETS`] stretches of time are kept, the oldest of which is replaced by the next.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{
    activity::{Activity, activity, reader_waits, writer_waits},
    snapshot::Snapshot,
};
use crate::{
    operator::{
        Handle,
        control::{Control, Hubs},
    },
    sync::{Level, Mutex, lock},
};

/// The number of stretches into which the kept time is divided.
const BUCKETS: u32 = 20;
/// The thread sleeps at least this number of times as long as it has worked: it takes at most 1 % of a core.
const REST: u32 = 99;
const KINDS: usize = Activity::ALL.len();

/// How a flow is observed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sampling {
    pub(super) every: Duration,
    pub(super) keep: Duration,
}

/// The records of one run.
pub(super) struct Records {
    sampling: Sampling,
    control: Weak<Control>,
    recent: Mutex<Recent>,
    /// Set when the run has ended.
    last: Mutex<Option<Arc<Snapshot>>>,
}

#[derive(Default)]
struct Recent {
    buckets: VecDeque<Bucket>,
    operators: Vec<Now>,
}

/// What an operator does now.
#[derive(Clone, Copy)]
struct Now {
    activity: Activity,
    since: Instant,
    /// Its runs when it began that.
    runs: u64,
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
    /// The longest time for which one poll was seen.
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
    pub(super) fn begin(sampling: Sampling, flow: &Handle) -> Arc<Self> {
        let control = &flow.0;
        let records = Arc::new(Self {
            sampling,
            control: Arc::downgrade(control),
            recent: Mutex::at(Level::Records, Recent::default()),
            last: Mutex::default(),
        });
        let known: Arc<dyn std::any::Any + Send + Sync> = records.clone();
        let _ = control.records.set(known);
        Sampler::add(&records);
        records
    }

    /// Those of the first observer of the flow.
    pub(super) fn of(control: &Control) -> Option<Arc<Self>> {
        control.records.get().and_then(|records| records.clone().downcast().ok())
    }

    /// The snapshot at the end of the run.
    pub(super) fn last(&self) -> Option<Arc<Snapshot>> {
        lock(&self.last).clone()
    }

    pub(super) fn set_last(&self, last: Snapshot) {
        let before = lock(&self.last).replace(Arc::new(last));
        drop(before);
    }

    pub(super) fn flow(&self) -> Option<Handle> {
        self.control.upgrade().map(Handle)
    }

    fn sample(&self, now: Instant) {
        let Some(control) = self.control.upgrade() else { return };
        let hubs = control.hubs();
        let mut recent = lock(&self.recent);
        let Recent { buckets, operators } = &mut *recent;
        if buckets.back().is_none_or(|bucket| now - bucket.began >= self.sampling.keep / BUCKETS) {
            if buckets.len() > BUCKETS as usize {
                buckets.pop_front();
            }
            buckets.push_back(Bucket::new(&control, &hubs, now));
        }
        let Some(bucket) = buckets.back_mut() else { return };
        bucket.samples += 1;
        for (number, counts) in bucket.operators.iter_mut().enumerate() {
            let activity = activity(&control, &hubs, number);
            counts.counts[activity as usize] += 1;
            let runs = control.tasks[number].status_cell().runs();
            if operators.len() == number {
                operators.push(Now { activity, since: now, runs });
            }
            let before = &mut operators[number];
            if before.activity != activity || activity == Activity::Runs && before.runs != runs {
                *before = Now { activity, since: now, runs };
            } else if activity == Activity::Runs {
                counts.poll = counts.poll.max(now - before.since);
            }
        }
        for (hub, counts) in hubs.all.iter().zip(&mut bucket.hubs) {
            let fill = hub.state.fill();
            counts.full += u32::from(fill.queued >= fill.capacity);
            match writer_waits(hub) {
                Some(Activity::Room) => counts.room += 1,
                Some(_) => counts.envelope += 1,
                None => {}
            }
            match reader_waits(hub, false) {
                Some(Activity::Message) => counts.message += 1,
                Some(Activity::Envelope) => counts.envelope += 1,
                _ => {}
            }
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let recent = lock(&self.recent);
        let Recent { buckets, operators } = &*recent;
        let Some(first) = buckets.front() else { return Summary::default() };
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
        Summary { window: now - first.began, samples, operators: operators.collect(), hubs: hubs.collect() }
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

/// The flows that are sampled.
struct Sampler {
    records: Vec<(Weak<Records>, Instant)>,
    has_thread: bool,
}

static SAMPLER: Mutex<Sampler> = Mutex::new(Sampler { records: Vec::new(), has_thread: false });

impl Sampler {
    fn add(records: &Arc<Records>) {
        let mut sampler = lock(&SAMPLER);
        sampler.records.push((Arc::downgrade(records), Instant::now()));
        if std::mem::replace(&mut sampler.has_thread, true) {
            return;
        }
        drop(sampler);
        if let Err(error) = thread::Builder::new().name("wakeline-observer".into()).spawn(Self::run) {
            lock(&SAMPLER).has_thread = false;
            tracing::error!(%error, "cannot spawn the thread that observes flows: they run on, without shares");
        }
    }

    fn run() {
        let mut cost = Duration::ZERO;
        loop {
            let now = Instant::now();
            let Some(due) = Self::due(now) else { return };
            for records in due {
                records.sample(now);
            }
            let next = lock(&SAMPLER).records.iter().map(|(_, next)| *next).min().unwrap_or(now);
            // A round in which the thread was preempted says little about its cost.
            let took = now.elapsed();
            cost = if took < cost { took } else { cost + (took - cost) / 16 };
            thread::sleep((cost * REST).max(next.saturating_duration_since(Instant::now())));
        }
    }

    /// The records to sample now. `None` if there are none at all, and the thread ends.
    fn due(now: Instant) -> Option<Vec<Arc<Records>>> {
        let mut sampler = lock(&SAMPLER);
        let (mut due, mut gone) = (Vec::new(), Vec::new());
        sampler.records.retain_mut(|(records, next)| {
            let Some(records) = records.upgrade() else { return false };
            let over = records.control.upgrade().is_none_or(|control| control.has_ended());
            if over {
                gone.push(records);
                return false;
            }
            if *next <= now {
                *next = now + records.sampling.every;
                due.push(records);
            }
            true
        });
        sampler.has_thread = !sampler.records.is_empty();
        let more = sampler.has_thread;
        drop(sampler);
        drop(gone);
        more.then_some(due)
    }
}
