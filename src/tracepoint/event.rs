//! [`TraceEvent`]: what happens in a flow; [`PackedEvent`]: its encoding in two words, which sinks are called with, without
//! the operators of `Sent` and `Taken`.
//!
//! A tracepoint knows which event it records, so packing costs nothing there; the match that unpacks is made when a trace is
//! read.

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

/// `word`: 4 bits of the kind, 28 bits for the sink, 32 bits of the operator or hub. `number`: that of the run or message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedEvent {
    pub(crate) word: u64,
    pub(crate) number: u64,
}

const KIND_SHIFT: u32 = 60;
const FREE_SHIFT: u32 = 32;

mod kind {
    pub(super) const RUN_BEGAN: u64 = 1;
    pub(super) const RUN_ENDED: u64 = 2;
    pub(super) const POLL_BEGAN: u64 = 3;
    pub(super) const POLL_ENDED: u64 = 4;
    pub(super) const SENT: u64 = 5;
    pub(super) const SENT_FROM_OUTSIDE: u64 = 6;
    pub(super) const TAKEN: u64 = 7;
    pub(super) const STALLED: u64 = 8;
    pub(super) const FAILED: u64 = 9;
}

impl TraceEvent {
    #[allow(clippy::inline_always, reason = "only a caller that knows the event saves the match")]
    #[inline(always)]
    pub(crate) const fn pack(self) -> PackedEvent {
        use TraceEvent as E;
        let (kind, of, number) = match self {
            E::RunBegan { operator, run } => (kind::RUN_BEGAN, operator, run),
            E::RunEnded { operator, run } => (kind::RUN_ENDED, operator, run),
            E::PollBegan { operator } => (kind::POLL_BEGAN, operator, 0),
            E::PollEnded { operator } => (kind::POLL_ENDED, operator, 0),
            E::Sent { operator: OUTSIDE, hub, message } => (kind::SENT_FROM_OUTSIDE, hub, message),
            E::Sent { hub, message, .. } => (kind::SENT, hub, message),
            E::Taken { hub, message, .. } => (kind::TAKEN, hub, message),
            E::Stalled => (kind::STALLED, 0, 0),
            E::Failed { operator } => (kind::FAILED, operator, 0),
        };
        PackedEvent { word: kind << KIND_SHIFT | of as u64, number }
    }
}

impl PackedEvent {
    /// The sink's bits of `word`.
    pub(crate) const FREE: u64 = (1 << KIND_SHIFT) - (1 << FREE_SHIFT);

    #[inline]
    pub(crate) fn is_stall(self) -> bool {
        self.word >> KIND_SHIFT == kind::STALLED
    }

    /// A number in the sink's bits, as much of it as they hold.
    pub(crate) const fn free(number: u32) -> u64 {
        (number as u64) << FREE_SHIFT & Self::FREE
    }

    /// The event. `ends`: the writer and the reader of each hub, which are the operators of `Sent` and `Taken`. `None` for an
    /// unknown kind.
    pub(crate) fn unpack(self, ends: &[(u32, u32)]) -> Option<TraceEvent> {
        use TraceEvent as E;
        let (of, number) = ((self.word & u64::from(u32::MAX)) as u32, self.number);
        let (from, to) = ends.get(of as usize).copied().unwrap_or((OUTSIDE, OUTSIDE));
        Some(match self.word >> KIND_SHIFT {
            kind::RUN_BEGAN => E::RunBegan { operator: of, run: number },
            kind::RUN_ENDED => E::RunEnded { operator: of, run: number },
            kind::POLL_BEGAN => E::PollBegan { operator: of },
            kind::POLL_ENDED => E::PollEnded { operator: of },
            kind::SENT => E::Sent { operator: from, hub: of, message: number },
            kind::SENT_FROM_OUTSIDE => E::Sent { operator: OUTSIDE, hub: of, message: number },
            kind::TAKEN => E::Taken { operator: to, hub: of, message: number },
            kind::STALLED => E::Stalled,
            kind::FAILED => E::Failed { operator: of },
            _ => return None,
        })
    }
}
