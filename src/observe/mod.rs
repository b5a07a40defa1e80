//! Seeing a flow run: what its operators do and wait for, how full its hubs are, and what limits it.
//!
//! [`Handle::snapshot`] is a picture of a flow as it is now, at no cost for a flow that nothing looks at. With an
//! [`Observe`], the picture also has the last seconds in it: of how much of the time each operator did what, messages
//! in a second, and one sentence about the [bottleneck](Bottleneck).
//!
//! ```
//! use std::time::Duration;
//! use wakeline::{observe::Observe, prelude::*};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! # let mut flow = Flow::new("ticks");
//! # let ticks = flow.add("ticks", source(async || Ok(Some(()))));
//! # let count = flow.add("count", sink(async |()| Ok(())));
//! # flow.connect(ticks.output, count.input);
//! let watch = Observe::new().keep(Duration::from_secs(5));
//! flow.observe(&watch);
//! let running = flow.spawn()?;
//! # tokio::task::yield_now().await;
//! for snapshot in watch.snapshots() {
//!     println!("{snapshot}");
//!     if let Some(bottleneck) = snapshot.bottleneck {
//!         println!("{bottleneck}");
//!     }
//! }
//! # running.stop();
//! # running.await?;
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```
//!
//! It prints, for example:
//!
//! ```text
//! flow `shout` is running after 12.4 s
//! `upper` is the bottleneck: its queue was full 93 % of the last 10 s; it computed 97 % of the time
//! operator on               runs    runs/s     ran    busy s  now
//! read     host             1244       100     8 %     12.31  waits for room for 0.1 s: room in hub `read.output -> upper.input`: its queue of 2 is full
//! upper    host             1241       100    97 %     12.11  runs for 0.0 s
//! write    host             1241       100     3 %      0.40  waits for a message for 0.0 s: a message in hub `upper.output -> write.input`
//! ```
//!
//! # Paths
//!
//! One message in 64 of each source is followed to where it ends ([`Observe::paths`]): a snapshot has the percentiles of each
//! path, and where the time goes: [queued, host, device, copy](PathParts). [`Observe::device_times`] times the device work
//! of those runs; it is placed on the host's axis, on a GPU to some microseconds.
//!
//! # From outside
//!
//! `WAKELINE_STATUS=2s` in the environment makes every flow of a program print its snapshot every two seconds to the
//! standard error, and once more at its end, which waits until it is written. Units are `ms`, `s` and `m`.
//!
//! # Metrics
//!
//! [`Observe::open_metrics`] is the text for a scraper, in the [OpenMetrics] format. It costs only when it is called. All
//! are labelled with `flow`; those of operators with `operator`, of hubs with `hub`, of sections with `section`, of
//! devices with `device`.
//!
//! | metric | type | meaning |
//! |---|---|---|
//! | `wakeline_flow_state` | stateset | what the flow does: the word of its [`FlowState`] |
//! | `wakeline_operator_activity` | stateset | what the operator does: the word of its [`Activity`] |
//! | `wakeline_operator_share` | gauge | of how much of the window it did that, by `activity`, as a ratio |
//! | `wakeline_operator_runs_total` | counter | runs that have ended |
//! | `wakeline_operator_busy_seconds_total` | counter | the host's time for its runs, with their waits |
//! | `wakeline_hub_queued_messages` | gauge | messages that were not taken |
//! | `wakeline_hub_capacity_messages` | gauge | messages that fit in the queue |
//! | `wakeline_hub_passed_messages_total` | counter | messages that were taken |
//! | `wakeline_hub_dropped_messages_total` | counter | messages that were dropped |
//! | `wakeline_hub_envelopes` | gauge | envelopes, by `side` (`writer` or `reader`) and `state` (`free` or `used`) |
//! | `wakeline_section_rounds_total` | counter | rounds, by `kind` (`replayed` or `streamed`) |
//! | `wakeline_section_captures_total` | counter | graphs that were captured |
//! | `wakeline_device_memory_bytes` | gauge | memory by `state` (`in_use`, `waiting`, `cached`) |
//! | `wakeline_device_memory_peak_bytes` | gauge | the most that was in use or waiting at once |
//!
//! # How it works, and what it costs
//!
//! The state of operators and hubs is never derived from events, which can get lost: a thread of its own,
//! `wakeline-observer`, looks at it every 10 ms. It takes no more than 1 % of a core: with very many operators it looks
//! less often. It is no thread of the runtime, and so sees what blocks the runtime's.
//!
//! Time is real time, also where tokio's clock is paused and in a simulation; only the times of paths are on tokio's clock.
//! A flow is observed from when its operators have started.
//!
//! Shares are shares of the samples. A share of 50 % in 1,000 samples, 10 s, is exact to 3 percentage points (two standard
//! deviations).
//!
//! [OpenMetrics]: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md

mod activity;
mod bottleneck;
mod environment;
mod histogram;
mod metrics;
mod paths;
mod records;
mod snapshot;
#[allow(dead_code, reason = "being built")]
mod timeline;

use std::{fmt, sync::Arc, time::Duration};

pub use activity::{Activity, Shares};
pub use bottleneck::{Bottleneck, Reason};
pub use paths::{PathCounts, PathParts, PathSnapshot, SlowMessage};
pub use snapshot::{
    DeviceSnapshot, EnvelopesSnapshot, FlowState, HubSnapshot, OperatorSnapshot, SectionSnapshot, Snapshot,
};

pub(crate) use environment::from_environment;

use self::records::{Records, Sampling};
use crate::{
    Flow,
    flow::{FlowObserver, LocalFlow},
    hub::journey::JourneyLog,
    operator::{
        Handle,
        control::Control,
        observed_runs::{Watched, WatchedPaths, WatchedWork},
    },
    stream::SpanReader,
    sync::{Level, Mutex, lock},
};

/// Ended flows whose last snapshot is kept.
const ENDED: usize = 16;
/// One message in so many is followed.
const MEASURED: u32 = 64;
/// The bounds of the interval between two samples, and of the time that is kept.
const EVERY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(60));
const KEEP: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// Observes flows: give it to each with [`Flow::observe`] before it runs. See the [module](self).
///
/// Clones are one observer. Dropping all of them does not end the observation of a flow that has it.
#[derive(Clone)]
pub struct Observe {
    sampling: Sampling,
    shared: Arc<Shared>,
}

struct Shared {
    flows: Mutex<Vec<Arc<Records>>>,
}

impl Observe {
    /// An observer that samples every 10 ms, keeps 10 s, follows one message in 64, and times the device work of those.
    pub fn new() -> Self {
        let (every, keep) = (Duration::from_millis(10), Duration::from_secs(10));
        let sampling = Sampling { every, keep, paths: MEASURED, device_times: true };
        Self { sampling, shared: Arc::new(Shared { flows: Mutex::at(Level::Records, Vec::new()) }) }
    }

    /// Sets the interval between two samples, between 1 ms and a minute, for flows that it is given from now on. The thread
    /// that samples takes no more than 1 % of a core: with many operators the interval is longer.
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
    /// given from now on: see [`PathSnapshot`]. With zero none is. What an operator sends is followed if one of the
    /// messages that it took in the same run is. Chunks are not messages.
    #[must_use]
    pub fn paths(mut self, every: u32) -> Self {
        self.sampling.paths = every;
        self
    }

    /// Sets whether the device work of operators is timed, for flows that it is given from now on: of runs that a followed
    /// message goes through, and of one run in as many as there are messages to a followed one. Only work on the
    /// operator's own stream and copies by hubs are timed. Two timed events cost a run 2.6 us where it is timed
    /// (H100, `guide/facts.md`).
    #[must_use]
    pub fn device_times(mut self, on: bool) -> Self {
        self.sampling.device_times = on;
        self
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

impl Shared {
    /// Forgets the oldest flows that have ended.
    fn forget(&self) {
        let mut flows = lock(&self.flows);
        let void = flows.extract_if(.., |records| records.is_void()).collect::<Vec<_>>();
        let ended: Vec<_> = (0..flows.len()).filter(|at| flows[*at].last().is_some()).collect();
        let gone: Vec<_> = match ended.len().checked_sub(ENDED) {
            Some(surplus) => ended[..surplus].iter().rev().map(|at| flows.remove(*at)).collect(),
            None => Vec::new(),
        };
        drop(flows);
        drop((gone, void));
    }
}

/// The observer of one flow's runs.
struct FlowRecords {
    sampling: Sampling,
    shared: Arc<Shared>,
    /// Called with each last snapshot.
    at_end: Option<fn(&Snapshot)>,
}

impl FlowObserver for FlowRecords {
    fn watches(&self, flow: &Control, watched: &mut Watched) {
        let operators = flow.names.len();
        let Sampling { paths, device_times, .. } = self.sampling;
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
    }

    fn begins(&self, flow: &Handle) {
        let records = Records::begin(self.sampling, flow);
        lock(&self.shared.flows).push(records);
    }

    fn records_to(&self) -> *const () {
        Arc::as_ptr(&self.shared).cast()
    }

    fn ends(&self, flow: &Handle) {
        let records = lock(&self.shared.flows).iter().find(|records| records.is_of(flow)).cloned();
        records.iter().for_each(|records| records.collect(true));
        let summary = records.as_ref().map(|records| records.summary()).unwrap_or_default();
        let last = Snapshot::new(flow, &summary);
        if let Some(at_end) = self.at_end {
            at_end(&last);
        }
        if let Some(records) = records {
            records.end(last);
        }
        self.shared.forget();
    }
}

impl Flow {
    /// Has an observer record this flow's runs that begin from now on. The shares and rates in its
    /// [snapshots](Handle::snapshot) are those of the first observer.
    pub fn observe(&mut self, watch: &Observe) {
        let Observe { sampling, shared } = watch.clone();
        self.add_observer(Arc::new(FlowRecords { sampling, shared, at_end: None }));
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
        f.debug_struct("Observe").field("sampling", &self.sampling).field("flows", &flows).finish()
    }
}
