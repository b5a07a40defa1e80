//! [`Observe`], and how it takes part in a flow's runs.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use super::{
    Snapshot, Trace, Warning,
    flight::FlightRecorder,
    hooks::{Hook, WarningQueue},
    metrics,
    records::{Records, Sampling},
    snapshot,
    timeline::Timeline,
    triggers::{TriggerCause, Triggers},
    watchdogs::Limits,
};
use crate::{
    Flow,
    error::{Error, ErrorKind, Result},
    flow::{FlowObserver, LocalFlow},
    hub::journey::JourneyLog,
    operator::{
        Handle,
        control::Control,
        observed_runs::{Watched, WatchedPaths, WatchedWork},
    },
    stream::SpanReader,
    sync::{Level, Mutex, lock, logged},
};

/// Ended flows whose last snapshot is kept.
const ENDED: usize = 16;
/// One message in so many is followed.
const MEASURED: u32 = 64;
/// Events of each thread that are kept for triggers.
pub(super) const RECORDED: usize = 65_536;
/// The bounds of the interval between two samples, and of the time that is kept.
const EVERY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));
const KEEP: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// Observes flows: give it to each with [`Flow::observe`] before it runs. See the [module](super).
///
/// Clones are one observer. Dropping all of them does not end the observation of a flow that has it.
#[derive(Clone)]
pub struct Observe {
    sampling: Sampling,
    hooks: Arc<Vec<Hook>>,
    /// Set if the runs of flows are recorded.
    recorder: Option<Arc<FlightRecorder>>,
    pub(super) shared: Arc<ObservedFlows>,
}

pub(super) struct ObservedFlows {
    pub(super) flows: Mutex<Vec<Arc<Records>>>,
    warnings: Arc<WarningQueue>,
    triggers: Arc<Triggers>,
}

impl Observe {
    /// An observer that samples every 10 ms, keeps 10 s, follows one message in 64, and times the device work of those.
    pub fn new() -> Self {
        let (every, keep) = (Duration::from_millis(10), Duration::from_secs(10));
        let sampling = Sampling { every, keep, paths: MEASURED, device_times: true, limits: Limits::default() };
        let shared = ObservedFlows {
            flows: Mutex::at(Level::Records, Vec::new()),
            warnings: Arc::default(),
            triggers: Arc::default(),
        };
        Self { sampling, hooks: Arc::default(), recorder: None, shared: Arc::new(shared) }
    }

    /// Sets the interval between two samples, between 1 ms and a minute, for flows that it is given from now on. The thread
    /// that samples takes about 1 % of a core at most, and up to 4 % where less than 10 s are [kept](Self::keep): with many
    /// operators, or in a debug build, the interval is longer.
    #[must_use]
    pub fn every(mut self, interval: Duration) -> Self {
        self.sampling.every = interval.clamp(EVERY.0, EVERY.1);
        self
    }

    /// Sets how much of the past is kept, between 100 ms and an hour, for flows that it is given from now on: the
    /// window of all shares and rates. It takes some 1,700 bytes for an operator, 700 for a hub and at most
    /// 20,000 for a path, however long.
    #[must_use]
    pub fn keep(mut self, time: Duration) -> Self {
        self.sampling.keep = time.clamp(KEEP.0, KEEP.1);
        self
    }

    /// Sets that one message in `every` of each source is followed from there to where it ends, for flows that it is
    /// given from now on: see [`PathSnapshot`](super::PathSnapshot). With zero none is. What an operator sends is followed if one of the
    /// messages that it took in the same run is. Chunks are not messages.
    #[must_use]
    pub fn paths(mut self, every: u32) -> Self {
        self.sampling.paths = every;
        self
    }

    /// Sets whether the device work of operators is timed, for flows that it is given from now on: of runs that a followed
    /// message goes through, and of one run in as many as there are messages to a followed one if none of those was
    /// timed. Only work on the operator's own stream and copies by hubs are timed. Two timed events cost a run 2.6 us
    /// where it is timed (H200, `guide/facts.md`).
    #[must_use]
    pub fn device_times(mut self, on: bool) -> Self {
        self.sampling.device_times = on;
        self
    }

    /// Sets how long one poll of an operator may occupy a worker thread of the runtime before there is a
    /// [warning](Warning), for flows that it is given from now on: one second by default, never with `Duration::MAX`. It is
    /// as exact as [`every`](Self::every), and a poll is seen in three samples at least. Operators with a [thread of their
    /// own](crate::flow::Added::on_own_thread) may block it.
    #[must_use]
    pub fn warn_blocked(mut self, limit: Duration) -> Self {
        self.sampling.limits.blocked = limit;
        self
    }

    /// Sets how long an operator may wait before there is a [warning](Warning), for flows that it is given from now on: 30
    /// seconds by default, never with `Duration::MAX`. It is checked eight times in the limit.
    ///
    /// Of operators that wait for each other there is one warning, for the one that the others wait for. There is none
    /// for a wait until a point in time or for callers outside of the flow, nor for the operators behind it.
    #[must_use]
    pub fn warn_waiting(mut self, limit: Duration) -> Self {
        self.sampling.limits.waiting = limit;
        self
    }

    /// Sets whether there is a [warning](Warning) when operators wait only for each other, for flows that it is given from
    /// now on: by default there is. What the flow does then is up to its [`OnStall`](crate::flow::OnStall), which says
    /// how soon that is detected.
    #[must_use]
    pub fn warn_stalled(mut self, on: bool) -> Self {
        self.sampling.limits.stalled = on;
        self
    }

    /// Adds a function that is called once with each [warning](Warning) that begins, for flows that it is given from now
    /// on. It runs on a thread of its own, `wakeline-warnings`, and may do what it likes: block, abort the flow, take a
    /// snapshot. While it blocks, up to 256 warnings wait for it; further ones are [counted](super::WarningCounts::lost). A panic
    /// of it is logged. The log has one line in ten seconds for an operator and a kind; the function is called each time.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wakeline::observe::Observe;
    ///
    /// let watch = Observe::new()
    ///     .warn_blocked(Duration::from_millis(100))
    ///     .warn_waiting(Duration::from_secs(5))
    ///     .on_warning(|warning| eprintln!("{}: {warning}", warning.flow));
    /// ```
    #[must_use]
    pub fn on_warning(mut self, hook: impl Fn(&Warning) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.hooks).push(Hook::new(hook));
        self
    }

    /// Records what happens in flows that it is given from now on, for [`trace`](Self::trace): polls and runs of operators,
    /// and the way of each message. So many `events` are kept of each thread, rounded up to a power of two between 1,024 and
    /// 16,777,216; with zero nothing is recorded. An event takes 24 bytes, which are allocated as they are needed, and are
    /// freed when the thread has ended and its events are older than what is [kept](Self::keep).
    ///
    /// An event costs as much as a reading of the system's clock: 29 to 45 ns on hosts of H200s (bench `observe`). A message
    /// has two, and so have each run and each poll of an operator. Chunks are not messages.
    ///
    /// Device work is in the trace where it is timed ([`device_times`](Self::device_times)), which is where a message is
    /// followed ([`paths`](Self::paths)): with `paths(1)` all of it is.
    #[must_use]
    pub fn record(mut self, events: usize) -> Self {
        self.recorder = (events > 0).then(|| FlightRecorder::new(events));
        self
    }

    /// Saves the last seconds of a flow in `file`, [as a trace](Trace), when a followed message takes longer than `limit`
    /// on the path of this [name](super::PathSnapshot::name): `read > upper > write`. A flow that has no such path is never
    /// slow; if it has only some of its operators, it logs a warning. Of several observers of a flow only the first one knows its paths.
    ///
    /// A trigger saves its file at most once a minute, and replaces the one before. It is noticed by the thread that
    /// samples, every 10 ms, and saved on a thread of its own; at the end of a flow before that ends. Errors are logged.
    /// If this observer does not [record](Self::record) yet, it records 65,536 events of each thread from now on. Triggers
    /// are shared by all clones of an observer, and look at the flows that are recorded.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wakeline::observe::Observe;
    ///
    /// let watch = Observe::new()
    ///     .when_slower("read > upper > write", Duration::from_millis(20), "slow.pftrace")
    ///     .when_failed("failed.pftrace");
    /// ```
    #[must_use]
    pub fn when_slower(self, path: impl Into<String>, limit: Duration, file: impl Into<PathBuf>) -> Self {
        self.when(TriggerCause::Slower(path.into(), limit), file.into())
    }

    /// The same, when operators have [stalled](crate::ErrorKind::Stalled), whether that fails the flow or not.
    #[must_use]
    pub fn when_stalled(self, file: impl Into<PathBuf>) -> Self {
        self.when(TriggerCause::Stalled, file.into())
    }

    /// The same, when a flow fails whose operators have started; not when it is aborted.
    #[must_use]
    pub fn when_failed(self, file: impl Into<PathBuf>) -> Self {
        self.when(TriggerCause::Failed, file.into())
    }

    /// The same, when an operator was seen in one poll for longer than `limit`: meanwhile it blocks a thread of
    /// the runtime. An interval between two samples is the error. Operators with a [thread of their
    /// own](crate::flow::Added::on_own_thread) may block it, and the workers of [concurrent](fn@crate::operator::concurrent)
    /// runs are not seen.
    #[must_use]
    pub fn when_blocked(self, limit: Duration, file: impl Into<PathBuf>) -> Self {
        self.when(TriggerCause::Blocked(limit), file.into())
    }

    fn when(mut self, cause: TriggerCause, file: PathBuf) -> Self {
        self.recorder.get_or_insert_with(|| FlightRecorder::new(RECORDED));
        self.shared.triggers.add(cause, file);
        self
    }

    /// What has happened in the last seconds, at most as many as are [kept](Self::keep), in all flows that it records:
    /// those that run, and, up to their end, the last 16 that have ended.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it records none.
    pub fn trace(&self, last: Duration) -> Result<Trace> {
        let timelines = self.timeline(last);
        if timelines.is_empty() {
            let text = "no flow is recorded: call `Observe::record(65_536)` before `Flow::observe`, and run the flow";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Ok(Trace::new(timelines))
    }

    /// One for each flow.
    pub(super) fn timeline(&self, last: Duration) -> Vec<Timeline> {
        let flows = lock(&self.shared.flows).clone();
        flows.iter().filter_map(|records| records.timeline(last)).collect()
    }

    /// The snapshots of all flows that it observes, in the order of their begin: those that run, and the last snapshot
    /// of each of the last 16 that have ended.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        let flows = lock(&self.shared.flows).clone();
        flows.iter().filter_map(|records| records.snapshot()).collect()
    }

    /// The metrics of all flows that it observes, as text in the OpenMetrics format, which ends with `# EOF`. The
    /// content type is `application/openmetrics-text; version=1.0.0; charset=utf-8`. If two flows have one name, the
    /// one that began last counts.
    pub fn open_metrics(&self) -> String {
        metrics::text(self.snapshots())
    }
}

impl ObservedFlows {
    /// Forgets the oldest flows that have ended.
    fn forget(&self) {
        let mut flows = lock(&self.flows);
        let ended: Vec<_> = (0..flows.len()).filter(|at| flows[*at].last().is_some()).collect();
        let gone: Vec<_> = match ended.len().checked_sub(ENDED) {
            Some(surplus) => ended[..surplus].iter().rev().map(|at| flows.remove(*at)).collect(),
            None => Vec::new(),
        };
        drop(flows);
        drop(gone);
    }
}

type AtEnd = fn(&Snapshot, Option<&Arc<Records>>);

/// The observer of one flow's runs.
pub(super) struct FlowRecords {
    pub(super) observe: Observe,
    /// Called at each end, with the last snapshot.
    pub(super) at_end: Option<AtEnd>,
}

impl FlowObserver for FlowRecords {
    fn watches(&self, flow: &Control, watched: &mut Watched) {
        let operators = flow.names.len();
        let Observe { sampling, recorder, .. } = &self.observe;
        let Sampling { paths, device_times, .. } = *sampling;
        if device_times && watched.work.is_none() {
            let reader = SpanReader::new();
            reader.has_thread();
            let every = if paths == 0 { MEASURED } else { paths };
            watched.work = Some(WatchedWork::new(reader, every, operators));
        }
        if paths > 0 && watched.paths.is_none() {
            let reader = watched.work.as_ref().map(|work| work.reader.clone());
            watched.paths = Some(WatchedPaths { log: JourneyLog::new(reader), every: paths });
        }
        if let Some(recorder) = recorder {
            watched.work.iter().for_each(|work| work.reader.keep());
            let sink = recorder.flow();
            watched.sinks.push(Box::new(sink.clone()));
            watched.recordings.push(sink);
        }
    }

    fn begins(&self, flow: &Handle) {
        let Observe { sampling, hooks, recorder, shared } = &self.observe;
        let warnings = (shared.warnings.clone(), Arc::downgrade(hooks));
        let recorder = recorder.as_ref().and_then(|recorder| recorder.sink_of(&flow.0));
        shared.triggers.check_paths(flow.name(), &flow.0.names);
        let records = Records::begin(*sampling, warnings, shared.triggers.clone(), recorder, flow);
        lock(&shared.flows).push(records);
    }

    fn records_to(&self) -> *const () {
        Arc::as_ptr(&self.observe.shared).cast()
    }

    fn ends(&self, flow: &Handle) {
        let shared = &self.observe.shared;
        let records = lock(&shared.flows).iter().find(|records| records.is_of(flow)).cloned();
        records.iter().for_each(|records| records.collect(&flow.0, None, true));
        let summary = records.as_ref().map(|records| records.last_summary(flow)).unwrap_or_default();
        let last = Snapshot::new(flow, &summary, snapshot::devices(&flow.0)).with_failure(flow);
        if let Some(at_end) = self.at_end {
            at_end(&last, records.as_ref());
        }
        if let Some(records) = records {
            records.end(last);
        }
        shared.forget();
    }

    fn cut_off(&self, flow: &Handle) {
        let shared = &self.observe.shared;
        let records: Vec<_> = lock(&shared.flows).extract_if(.., |records| records.is_of(flow)).collect();
        records.iter().for_each(|records| records.cut_off());
    }
}

impl Flow {
    /// Has an observer record this flow's runs that begin from now on. The shares and rates in its
    /// [snapshots](Handle::snapshot) are those of the first observer. If it observes the flow already, itself or as a clone with
    /// other settings, nothing changes, and a `tracing` warning says so.
    pub fn observe(&mut self, watch: &Observe) {
        if !self.add_observer(Arc::new(FlowRecords { observe: watch.clone(), at_end: None })) {
            logged(|| {
                tracing::warn!(
                    target: "wakeline::observe",
                    flow = self.name(),
                    "the flow is observed by this `Observe` or by a clone of it already: settings of the second one are not used"
                );
            });
        }
    }
}

impl LocalFlow {
    /// See [`Flow::observe`].
    pub fn observe(&mut self, watch: &Observe) {
        self.flow_mut().observe(watch);
    }
}

impl Default for Observe {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Observe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flows = lock(&self.shared.flows).len();
        f.debug_struct("Observe")
            .field("sampling", &self.sampling)
            .field("recorder", &self.recorder)
            .field("flows", &flows)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::operator::{sink, source};

    /// A program that starts a runtime for each request keeps nothing of the earlier ones, also if it keeps their handles.
    #[test]
    fn a_run_that_its_runtime_cuts_off_is_forgotten() {
        let watch = Observe::new();
        let mut handles = Vec::new();
        for _ in 0..3 {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let (begun, begins) = oneshot::channel();
            let mut begun = Some(begun);
            let mut flow = Flow::new("cut off");
            let first = flow.add(
                "first",
                source(move || {
                    let _ = begun.take().map(|begun| begun.send(()));
                    std::future::pending::<crate::Result<Option<u32>>>()
                }),
            );
            let last = flow.add("last", sink(async |_: u32| Ok(())));
            flow.connect(first.output, last.input);
            flow.observe(&watch);
            let inside = runtime.enter();
            let running = flow.spawn().unwrap();
            handles.push(running.handle());
            drop(inside);
            runtime.block_on(begins).unwrap();
            assert_eq!(lock(&watch.shared.flows).len(), 1);
            drop(runtime);
            assert!(lock(&watch.shared.flows).is_empty());
            assert!(handles.iter().all(|handle| handle.has_ended()));
        }
    }
}
