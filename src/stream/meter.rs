//! [`Meter`]: measures the device time of each run of an operator.
//!
//! A run's work is a number of operations on its stream, with waits for other streams between them. Timed events
//! enclose the operations but not the waits, so that a run is not charged for pending work on another operator's
//! stream:
//!
//! ```text
//!   begin_run     wait   launch   launch   wait   copy   end_run
//!                       [ span of the run ]      [ span ]
//! ```
//!
//! Recorded spans are read back later, once the device is known to have passed them; they are never waited for. The
//! number of spans is fixed: if the device is so far behind that all are in use, a run is not measured and counts as
//! missed. Events are reused: once enough exist, a run allocates nothing.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use crate::{
    device::backend::{Backend, RawEvent, RawStream},
    error::Result,
};

/// The device time spent on the runs of one operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceTime {
    /// The total of all measured runs.
    pub total: Duration,
    /// The longest measured run.
    pub longest: Duration,
    /// How many runs were measured: those that enqueued work into the operator's stream.
    pub runs: u64,
    /// Runs that were not measured, because the device was too far behind or was lost.
    pub missed: u64,
}

impl DeviceTime {
    /// The average device time of a run; zero if none was measured.
    pub fn mean(&self) -> Duration {
        if self.runs == 0 { Duration::ZERO } else { self.total.div_f64(self.runs as f64) }
    }
}

pub(super) struct Meter {
    backend: Arc<dyn Backend>,
    phase: Phase,
    run: u64,
    /// Recorded spans, oldest first.
    spans: VecDeque<Span>,
    idle: Vec<RawEvent>,
    sums: DeviceTime,
    /// The run that is being read back, with its time so far.
    reading: Option<(u64, Duration)>,
}

#[derive(Clone, Copy)]
enum Phase {
    /// Between two runs, or in a run that is not measured.
    Off,
    /// The next operation begins a span.
    Armed,
    /// In a span.
    In(RawEvent),
}

struct Span {
    run: u64,
    from: RawEvent,
    to: RawEvent,
}

impl Meter {
    /// The maximum number of spans. Their events take a few hundred bytes each.
    const MAX_SPANS: usize = 128;

    pub(super) fn new(backend: &Arc<dyn Backend>) -> Box<Self> {
        Box::new(Self {
            backend: backend.clone(),
            phase: Phase::Off,
            run: 0,
            spans: VecDeque::with_capacity(Self::MAX_SPANS),
            idle: Vec::with_capacity(2 * Self::MAX_SPANS),
            sums: DeviceTime::default(),
            reading: None,
        })
    }

    pub(super) fn begin_run(&mut self) {
        self.run += 1;
        if self.spans.len() >= Self::MAX_SPANS / 2 {
            self.read_back();
        }
        self.phase = if self.spans.len() < Self::MAX_SPANS { Phase::Armed } else { Phase::Off };
        self.sums.missed += u64::from(self.spans.len() >= Self::MAX_SPANS);
    }

    /// Ends the run. True if the run has recorded spans in the stream.
    pub(super) fn end_run(&mut self, stream: RawStream) -> bool {
        let spans = self.spans.len();
        self.end_span(stream);
        self.phase = Phase::Off;
        self.spans.len() > spans
    }

    pub(super) fn work(&mut self, stream: RawStream) {
        if let Phase::Armed = self.phase {
            match self.record(stream) {
                Ok(event) => self.phase = Phase::In(event),
                Err(_) => self.give_up(),
            }
        }
    }

    /// Called before a wait for another stream. If there is no room for a span after it, the current one continues.
    pub(super) fn wait(&mut self, stream: RawStream) {
        if self.spans.len() + 1 < Self::MAX_SPANS {
            self.end_span(stream);
        }
    }

    fn end_span(&mut self, stream: RawStream) {
        let Phase::In(from) = self.phase else { return };
        match self.record(stream) {
            Ok(to) => {
                self.spans.push_back(Span { run: self.run, from, to });
                self.phase = Phase::Armed;
            }
            Err(_) => {
                self.idle.push(from);
                self.give_up();
            }
        }
    }

    fn record(&mut self, stream: RawStream) -> Result<RawEvent> {
        let backend = &self.backend;
        let event = match self.idle.pop() {
            Some(event) => event,
            None => backend.event_create(true)?,
        };
        backend.event_record(event, stream).map(|()| event).inspect_err(|_| self.idle.push(event))
    }

    /// Stops measuring this run, as a call failed. Users of the device get the error from their own calls.
    fn give_up(&mut self) {
        self.phase = Phase::Off;
        self.sums.missed += 1;
    }

    fn read_back(&mut self) {
        while let Some(span) = self.spans.front() {
            let backend = &self.backend;
            match backend.event_query(span.to) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return self.discard_spans(),
            }
            match backend.event_elapsed(span.from, span.to) {
                Ok(took) => {
                    if let Some(Span { run, from, to }) = self.spans.pop_front() {
                        self.idle.extend([from, to]);
                        self.add(run, took);
                    }
                }
                Err(_) => return self.discard_spans(),
            }
        }
    }

    fn add(&mut self, run: u64, took: Duration) {
        match &mut self.reading {
            Some((of, so_far)) if *of == run => *so_far += took,
            _ => {
                self.close();
                self.reading = Some((run, took));
            }
        }
    }

    /// Adds the run that was read back, as it has no more spans.
    fn close(&mut self) {
        if let Some((_, took)) = self.reading.take() {
            self.sums.runs += 1;
            self.sums.total += took;
            self.sums.longest = self.sums.longest.max(took);
        }
    }

    /// Counts the remaining spans as missed: their times cannot be read.
    fn discard_spans(&mut self) {
        let begun = self.spans.front().map(|span| span.run);
        if self.reading.is_some_and(|(run, _)| Some(run) != begun) {
            self.close();
        }
        let mut last = None;
        while let Some(Span { run, from, to }) = self.spans.pop_front() {
            self.sums.missed += u64::from(last != Some(run));
            last = Some(run);
            self.idle.extend([from, to]);
        }
        self.reading = None;
    }

    /// The sums after the last run.
    pub(super) fn sums(&mut self) -> DeviceTime {
        self.read_back();
        if self.spans.is_empty() {
            self.close();
        } else {
            self.discard_spans();
        }
        self.sums
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let backend = &self.backend;
        if let Phase::In(event) = self.phase {
            backend.event_destroy(event);
        }
        let recorded = self.spans.iter().flat_map(|span| [span.from, span.to]);
        self.idle.iter().copied().chain(recorded).for_each(|event| backend.event_destroy(event));
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("sums", &self.sums).field("spans", &self.spans.len()).finish_non_exhaustive()
    }
}
