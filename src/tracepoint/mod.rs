//! [`Tracepoints`]: the points in a flow's run at which observers are called, with a [`TraceEvent`] each.
//!
//! A flow that no observer traces pays a bit in words that it loads anyway: the state of an operator's task, what its runs
//! prepare, and a flag of each hub. All else is behind calls that are not inlined.
//!
//! ```text
//!   poll of a task    OperatorTask::poll       TracedOperator ─┐
//!   run               Cx::begin_run, end_run   TracedRuns ─────┤
//!   message           HubCore::push, take      TracedHub ──────┼──> Tracepoints ──> each TraceSink
//!   stall, failure    supervisor, Control      ────────────────┘
//! ```

mod clock;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

pub(crate) use clock::{TraceAxis, TraceClock, tokio_nanos};

/// What happens in a flow at one instant. Operators and hubs are numbers, counted from zero in the flow's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceEvent {
    /// A run begins. Runs of one operator may overlap, each on its own task: their numbers differ.
    RunBegan {
        operator: u32,
        run: u64,
    },
    RunEnded {
        operator: u32,
        run: u64,
    },
    /// The task of an operator, or of one of its workers, is polled. Polls of one operator that overlap are on different
    /// threads. A section's task is polled as its first operator.
    PollBegan {
        operator: u32,
    },
    PollEnded {
        operator: u32,
    },
    /// A message is in its hub's queue. `message` is its number there, counted from one: `Sent` and `Taken` of one hub and
    /// one number are the same message. `operator`: [`OUTSIDE`] if it comes from outside.
    Sent {
        operator: u32,
        hub: u32,
        message: u64,
    },
    /// A message was taken, or the newest one of a latest-value hub was read, perhaps once more.
    Taken {
        operator: u32,
        hub: u32,
        message: u64,
    },
    /// Operators wait only for each other.
    Stalled,
    /// The flow fails. `operator`: [`OUTSIDE`] if it was not the failure of one operator.
    Failed {
        operator: u32,
    },
}

/// In place of an operator's number: outside of the flow, or unknown.
pub(crate) const OUTSIDE: u32 = u32::MAX;

/// What is called at the tracepoints of a flow's run, on the thread where the event happens. It must not block, call into the
/// flow, or panic.
pub(crate) trait TraceSink: Send + Sync + fmt::Debug {
    /// `at`: the time by the flow's [`TraceClock`].
    fn record(&self, at: u64, event: TraceEvent);
}

/// The sinks of one flow's run. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Tracepoints(Arc<TracepointsState>);

#[derive(Debug)]
struct TracepointsState {
    clock: TraceClock,
    sinks: Box<[Arc<dyn TraceSink>]>,
    /// By operator, if its runs may overlap: the number of its runs.
    runs: Box<[AtomicU64]>,
}

impl Tracepoints {
    /// `None` without a sink.
    pub(crate) fn new(clock: TraceClock, sinks: Vec<Arc<dyn TraceSink>>, operators: usize) -> Option<Self> {
        let runs = (0..operators).map(|_| AtomicU64::new(0)).collect();
        (!sinks.is_empty()).then(|| Self(Arc::new(TracepointsState { clock, sinks: sinks.into(), runs })))
    }

    /// For code that is not inlined where nothing is traced.
    #[inline]
    pub(crate) fn record(&self, event: TraceEvent) {
        self.record_at(self.now(), event);
    }

    pub(crate) fn clock(&self) -> &TraceClock {
        &self.0.clock
    }

    fn now(&self) -> u64 {
        self.0.clock.now()
    }

    fn record_at(&self, at: u64, event: TraceEvent) {
        self.0.sinks.iter().for_each(|sink| sink.record(at, event));
    }

    pub(crate) fn operator(&self, operator: usize) -> TracedOperator {
        TracedOperator { points: self.clone(), operator: number(operator) }
    }

    pub(crate) fn runs(&self, operator: usize, may_overlap: bool) -> TracedRuns {
        TracedRuns {
            operator: self.operator(operator),
            may_overlap,
            hands_over: AtomicBool::new(false),
            next: AtomicU64::new(0),
            current: AtomicU64::new(0),
        }
    }

    /// A hub between two operators.
    pub(crate) fn hub(&self, hub: usize, from: usize, to: usize) -> TracedHub {
        let (hub, from, to) = (number(hub), number(from), number(to));
        TracedHub { points: self.clone(), hub, from, to, sent: AtomicU64::new(0) }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(OUTSIDE)
}

/// The tracepoints of an operator's task.
#[derive(Clone, Debug)]
pub(crate) struct TracedOperator {
    points: Tracepoints,
    operator: u32,
}

impl TracedOperator {
    pub(crate) fn poll_begins(&self) {
        self.points.record(TraceEvent::PollBegan { operator: self.operator });
    }

    pub(crate) fn poll_ends(&self) {
        self.points.record(TraceEvent::PollEnded { operator: self.operator });
    }
}

/// The tracepoints of one task's runs of an operator.
#[derive(Debug)]
pub(crate) struct TracedRuns {
    operator: TracedOperator,
    may_overlap: bool,
    /// Its workers' runs are traced instead.
    hands_over: AtomicBool,
    next: AtomicU64,
    current: AtomicU64,
}

impl TracedRuns {
    /// Called before the first run of an operator whose task hands each run to a worker.
    pub(crate) fn hand_over(&self) {
        self.hands_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn begin(&self) {
        if self.hands_over.load(Ordering::Relaxed) {
            return;
        }
        let TracedOperator { points, operator } = &self.operator;
        let shared = points.0.runs.get(*operator as usize).filter(|_| self.may_overlap);
        let run = match shared {
            Some(runs) => runs.fetch_add(1, Ordering::Relaxed),
            // Only the operator's own task executes this.
            None => {
                let run = self.next.load(Ordering::Relaxed);
                self.next.store(run + 1, Ordering::Relaxed);
                run
            }
        };
        self.current.store(run, Ordering::Relaxed);
        points.record(TraceEvent::RunBegan { operator: *operator, run });
    }

    /// The number of the run in progress.
    pub(crate) fn current(&self) -> u64 {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn end(&self) {
        if self.hands_over.load(Ordering::Relaxed) {
            return;
        }
        let TracedOperator { points, operator } = &self.operator;
        points.record(TraceEvent::RunEnded { operator: *operator, run: self.current() });
    }
}

/// The tracepoints of a hub.
#[derive(Debug)]
pub(crate) struct TracedHub {
    points: Tracepoints,
    hub: u32,
    from: u32,
    to: u32,
    /// Messages that were accepted. Written by the hub's one writer: the same number as the queue's own.
    sent: AtomicU64,
}

impl TracedHub {
    /// Calls `push`, which returns whether the queue has accepted a message. The reader may take it before `push` returns,
    /// so the time is read before.
    pub(crate) fn send<R>(&self, is_outside: bool, push: impl FnOnce() -> R, is_sent: impl FnOnce(&R) -> bool) -> R {
        let at = self.points.now();
        let pushed = push();
        if is_sent(&pushed) {
            let message = self.sent.load(Ordering::Relaxed) + 1;
            self.sent.store(message, Ordering::Relaxed);
            let operator = if is_outside { OUTSIDE } else { self.from };
            self.points.record_at(at, TraceEvent::Sent { operator, hub: self.hub, message });
        }
        pushed
    }

    pub(crate) fn taken(&self, message: u64) {
        self.points.record(TraceEvent::Taken { operator: self.to, hub: self.hub, message });
    }
}

/// For another run of the flow.
impl Clone for TracedHub {
    fn clone(&self) -> Self {
        let Self { points, hub, from, to, .. } = self;
        Self { points: points.clone(), hub: *hub, from: *from, to: *to, sent: AtomicU64::new(0) }
    }
}
