//! [`Watched`]: what observers want to know of a flow's runs besides its state; [`ObservedRuns`]: of one operator's.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use smallvec::SmallVec;

use super::operator_streams::OperatorStreams;
use crate::{
    hub::journey::{JourneyLog, PathSource},
    stream::{DeviceTimes, OpenSpans, SpanOwner, SpanReader, Stream},
    tracepoint::{TraceClock, TraceSink, TracedRuns, Tracepoints},
};

/// What is recorded of one run of a flow.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// What is called at the tracepoints.
    pub(crate) sinks: Vec<Box<dyn TraceSink>>,
    /// What observers find again when the run begins.
    pub(crate) recordings: Vec<Arc<dyn Any + Send + Sync>>,
    /// Set from `sinks` when the run begins.
    pub(super) traced: Option<Tracepoints>,
    pub(crate) paths: Option<WatchedPaths>,
    pub(crate) work: Option<WatchedWork>,
}

/// One message in `every` of each source has a journey.
#[derive(Clone, Debug)]
pub(crate) struct WatchedPaths {
    pub(crate) log: Arc<JourneyLog>,
    pub(crate) every: u32,
}

/// The device work of each run that a journey goes through is timed, and of one run in `every` without one.
#[derive(Debug)]
pub(crate) struct WatchedWork {
    pub(crate) reader: Arc<SpanReader>,
    pub(crate) every: u32,
    /// By operator.
    pub(crate) times: Vec<Arc<DeviceTimes>>,
}

impl Watched {
    /// Called when all that is wanted is known.
    pub(super) fn seal(&mut self, operators: usize) {
        let sinks = std::mem::take(&mut self.sinks);
        if !sinks.is_empty() {
            self.traced = Tracepoints::new(TraceClock::here(), sinks, operators);
        }
    }

    /// `None` if nothing traces the flow.
    pub(crate) fn traced(&self) -> Option<&Tracepoints> {
        self.traced.as_ref()
    }

    /// What a flow records whose report has device times.
    pub(crate) fn add_report(&mut self, operators: usize) {
        let work = self.work.get_or_insert_with(|| WatchedWork::new(SpanReader::new(), 1, operators));
        work.every = 1;
        work.reader.reads_before_runs();
    }

    /// What is recorded of one operator. `samples`: the messages of its runs begin paths.
    pub(crate) fn of_operator(
        &self,
        operator: usize,
        is_worker: bool,
        samples: bool,
        streams: Option<&Arc<OperatorStreams>>,
    ) -> Option<ObservedRuns> {
        let source = self.paths.as_ref().map(|paths| PathSource::new(&paths.log, operator, paths.every));
        let traced = self.traced.as_ref().map(|traced| Arc::new(traced.runs(operator, is_worker)));
        let work = self.work.as_ref().zip(streams).and_then(|(work, streams)| {
            let WatchedWork { reader, every, times } = work;
            Some(TimedRuns {
                reader: reader.clone(),
                times: times.get(operator)?.clone(),
                every: *every,
                untimed_left: AtomicU32::new(0),
                streams: streams.clone(),
                traced: traced.clone(),
            })
        });
        let samples = samples && source.is_some();
        let is_any = source.is_some() || work.is_some() || traced.is_some();
        is_any.then_some(ObservedRuns { operator, source, samples, work, traced })
    }
}

impl WatchedWork {
    pub(crate) fn new(reader: Arc<SpanReader>, every: u32, operators: usize) -> Self {
        let times = (0..operators).map(|_| Arc::new(DeviceTimes::default())).collect();
        Self { reader, every: every.max(1), times }
    }
}

/// What is recorded of one operator's runs.
#[derive(Debug)]
pub(crate) struct ObservedRuns {
    pub(crate) operator: usize,
    /// Begins the paths of messages that are sent in the operator's place from outside, and of its runs' if it samples.
    pub(crate) source: Option<PathSource>,
    pub(crate) samples: bool,
    /// Set if its device work is timed.
    pub(crate) work: Option<TimedRuns>,
    pub(crate) traced: Option<Arc<TracedRuns>>,
}

/// Times the work on an operator's own stream.
pub(crate) struct TimedRuns {
    reader: Arc<SpanReader>,
    times: Arc<DeviceTimes>,
    every: u32,
    /// The number of runs until the next one that is timed without a journey.
    untimed_left: AtomicU32,
    streams: Arc<OperatorStreams>,
    traced: Option<Arc<TracedRuns>>,
}

impl TimedRuns {
    /// The operator's own stream, if it has one.
    pub(crate) fn stream(&self) -> Option<&Stream> {
        self.streams.own()
    }

    /// Called before a run, by the task that runs: true if it is to be timed, since none of the last ones was.
    pub(crate) fn is_due(&self) -> bool {
        let left = self.untimed_left.load(Ordering::Relaxed);
        self.untimed_left.store(if left == 0 { self.every - 1 } else { left - 1 }, Ordering::Relaxed);
        left == 0
    }

    /// Begins to time a run.
    pub(crate) fn begin(&self, stream: &Stream, spans: Option<OpenSpans>) {
        // In a trace, its device work has the number of the run.
        let run = self.traced.as_ref().map_or_else(|| self.times.begin(), |traced| traced.current());
        let spans: SmallVec<[OpenSpans; 1]> = spans.into_iter().collect();
        let (reader, times) = (self.reader.clone(), self.times.clone());
        stream.begin_run(SpanOwner { reader, run, times, spans });
    }

    /// Has the spans of the current run go to `spans`. True if a run begins to be timed for it.
    pub(crate) fn add(&self, stream: &Stream, spans: &OpenSpans) -> bool {
        if stream.add_spans(spans) {
            return false;
        }
        self.untimed_left.store(self.every - 1, Ordering::Relaxed);
        self.begin(stream, Some(spans.clone()));
        true
    }

    /// Reads what was timed, after the operator's last run.
    pub(crate) fn settle(&self) {
        self.reader.settle(&self.times);
    }

    pub(crate) fn times(&self) -> &Arc<DeviceTimes> {
        &self.times
    }
}

/// Times the rounds of a section that are replayed.
#[derive(Debug)]
pub(crate) struct TimedRounds {
    reader: Arc<SpanReader>,
    times: Arc<DeviceTimes>,
    every: u32,
    untimed_left: u32,
    round: u64,
}

impl TimedRounds {
    pub(crate) fn new(work: &WatchedWork, times: &Arc<DeviceTimes>) -> Self {
        let (reader, times) = (work.reader.clone(), times.clone());
        Self { reader, times, every: work.every, untimed_left: 0, round: 0 }
    }

    /// The owner of the next round's work, if that is timed: for its journeys, or since its turn has come.
    pub(crate) fn next(&mut self, spans: SmallVec<[OpenSpans; 1]>) -> Option<SpanOwner> {
        self.round += 1;
        if self.untimed_left > 0 && spans.is_empty() {
            self.untimed_left -= 1;
            return None;
        }
        self.untimed_left = self.every - 1;
        let (reader, times) = (self.reader.clone(), self.times.clone());
        Some(SpanOwner { reader, run: self.round, times, spans })
    }
}

impl fmt::Debug for TimedRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimedRuns").field("every", &self.every).finish_non_exhaustive()
    }
}
