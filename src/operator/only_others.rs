//! [`OnlyOthers`]: whether an operator that waits in the middle of a run can be woken by other operators of its flow alone.
//! If so, it gives its [token](super::quiet) back while it waits; if not, the flow is not at rest.
//!
//! ```text
//!   a poll begins ──> waits at a port: note ──> the poll is over: decide
//!                                                  │ it waits for something else ──────────────> keeps its token
//!                                                  │ it came to several waits ─────────────────> polled again, once
//!                                                  │ no clone of its waker is kept ────────────> parks
//!                                                  │ a clone is kept, the waker is old ────────> polled again, with a new waker
//!                                                  └ a clone is kept, of this poll's waker ────> keeps its token
//! ```
//!
//! Everything that the operator's future awaits keeps a clone of the waker that the future is polled with, except for the
//! operator's own ports. So while no clone is kept, nothing but another operator can wake it. A clone may have been left
//! behind by a wait that is over; a new waker, which only what is still waited for is polled with, shows that. So does another
//! poll where the operator came to several waits: all but the last may have been given up within the poll.
//!
//! The last clone may go after it was used to wake. The wake comes before that, so whoever sees that the clone has gone sees
//! the wake as well, and does not park.
//!
//! Knows no tokio: `tests/loom/face.rs` includes it as it stands.

use crate::sync::{AtomicUsize, Ordering, fence};

/// See the [module](self). All of it is the operator's own task's.
#[derive(Debug)]
pub(crate) struct OnlyOthers {
    /// What the present poll has come to wait at: one of [`at_port`], with [`at_port::NEW`] or without.
    at_port: AtomicUsize,
}

mod at_port {
    pub(super) const NOTHING: usize = 0;
    /// The waker was made for this poll. The lowest bit: whatever is more is a wait.
    pub(super) const NEW: usize = 1;
    /// For other operators of the flow.
    pub(super) const OTHERS: usize = 2;
    /// For something else.
    pub(super) const MORE: usize = 4;
    /// At several, one of them for something else.
    pub(super) const SEVERAL: usize = 6;
    /// At several, all for other operators.
    pub(super) const SEVERAL_OTHERS: usize = 8;
}

/// What follows from a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Decision {
    KeepToken,
    Park,
    /// The future gets a new waker, and is polled again: what it waits for is noted anew.
    Renew,
}

impl OnlyOthers {
    pub(crate) fn new() -> Self {
        Self { at_port: AtomicUsize::new(at_port::NOTHING) }
    }

    /// The present poll waits at a port; `for_others`: for nothing but other operators of the flow.
    pub(crate) fn note(&self, for_others: bool) {
        let before = self.at_port.load(Ordering::Relaxed);
        let now = match (before & !at_port::NEW, for_others) {
            (at_port::NOTHING, true) => at_port::OTHERS,
            (at_port::NOTHING, false) => at_port::MORE,
            (at_port::OTHERS | at_port::SEVERAL_OTHERS, true) => at_port::SEVERAL_OTHERS,
            _ => at_port::SEVERAL,
        };
        self.at_port.store(before & at_port::NEW | now, Ordering::Relaxed);
    }

    /// The present poll waits at a port, or was made to see what is still waited for: it is to be decided upon.
    #[inline]
    pub(crate) fn is_noted(&self) -> bool {
        self.at_port.load(Ordering::Relaxed) != at_port::NOTHING
    }

    /// The present poll waits at a port.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.at_port.load(Ordering::Relaxed) > at_port::NEW
    }

    /// A wait has ended in the present poll: what it comes to next, it has not been polled for again.
    #[inline]
    pub(crate) fn end_of_wait(&self) {
        self.at_port.store(self.at_port.load(Ordering::Relaxed) & !at_port::NEW, Ordering::Relaxed);
    }

    /// The poll is over. `clones`: how many of the waker are kept.
    pub(crate) fn decide(&self, pending: bool, clones: impl FnOnce() -> usize) -> Decision {
        let at = self.at_port.load(Ordering::Relaxed);
        self.at_port.store(at_port::NOTHING, Ordering::Relaxed);
        // By the next poll what keeps a clone may have been given up, and another wait begun.
        let (at, is_new) = (at & !at_port::NEW, at & at_port::NEW != 0);
        if !pending || matches!(at, at_port::NOTHING | at_port::MORE) {
            return Decision::KeepToken;
        }
        // Of several waits one may have been given up within the poll.
        let waits_for_all = at == at_port::OTHERS || at == at_port::SEVERAL_OTHERS && is_new;
        if waits_for_all && clones() == 0 {
            // With the release by which the last clone has gone.
            fence(Ordering::Acquire);
            return Decision::Park;
        }
        if is_new {
            return Decision::KeepToken;
        }
        self.at_port.store(at_port::NEW, Ordering::Relaxed);
        Decision::Renew
    }
}
