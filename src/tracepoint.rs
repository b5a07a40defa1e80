//! [`Tracepoints`]: the points in a flow's run at which observers are called, with a [`TraceEvent`] each.
//!
//! A flow that no observer traces pays nothing but a bit in words that it loads anyway: in the state of an operator's
//! task, in its context, and in its hubs. All else is behind `#[cold]` calls.

use std::{fmt, sync::Arc};

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
    /// threads.
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
    /// The flow fails. `operator`: [`OUTSIDE`] if that is not known.
    Failed {
        operator: u32,
    },
}

/// In place of an operator's number: outside of the flow, or unknown.
pub(crate) const OUTSIDE: u32 = u32::MAX;

/// What is called at the tracepoints of a flow's run, on the thread where the event happens. It must not block, call into the
/// flow, or panic.
pub(crate) trait TraceSink: Send + Sync {
    /// `at`: the time by the flow's [`TraceClock`].
    fn record(&self, at: u64, event: TraceEvent);
}

/// The observers of one flow's run. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tracepoints(Arc<[Arc<dyn TraceSink>]>);

impl fmt::Debug for Tracepoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracepoints").field("sinks", &self.0.len()).finish()
    }
}
