//! [`OnlyOthers`]: decides whether an operator that waits in the middle of a run can be woken only by other operators
//! of its flow. If so, it returns its [token](super::quiet) while it waits; if not, the flow is not idle.
//!
//! ```text
//!   a poll begins ──> waits at a port: note ──> the poll is over: decide
//!                                                  │ it waits for something else ──────────────> keeps its token
//!                                                  │ it reached several waits ─────────────────> polled again, once
//!                                                  │ no clone of its waker is kept ────────────> parks
//!                                                  │ a clone is kept, the waker is old ────────> polled again, new waker
//!                                                  └ a clone is kept, of this poll's waker ────> keeps its token
//! ```
//!
//! Everything that the operator's future awaits keeps a clone of the waker that the future is polled with, except for
//! the operator's own ports. So while no clone is kept, only another operator of the flow can wake it. A clone may be
//! left over from a wait that has ended. A new waker shows that, since only the waits that are still pending are polled
//! with it. So does a second poll where the operator reached several waits: all but the last may have been dropped
//! within the poll.
//!
//! The last clone may be dropped after it was used to wake. The wake comes before the drop, so a task that sees that
//! the clone is dropped sees the wake as well, and does not park.
//!
//! Does not depend on tokio: `tests/loom/probe_waker.rs` includes this file unchanged.

use crate::sync::{AtomicUsize, Ordering, fence};

/// See the [module](self). Used only by the operator's own task.
#[derive(Debug)]
pub(crate) struct OnlyOthers {
    /// The waits that the current poll has reached: one of [`at_port`], with [`at_port::NEW`] or without.
    at_port: AtomicUsize,
}

mod at_port {
    pub(super) const NOTHING: usize = 0;
    /// The waker was made for this poll. This is the lowest bit: any greater value is a wait.
    pub(super) const NEW: usize = 1;
    /// One wait, for other operators of the flow.
    pub(super) const OTHERS: usize = 2;
    /// One wait, for something else.
    pub(super) const MORE: usize = 4;
    /// Several waits, at least one of them for something else.
    pub(super) const SEVERAL: usize = 6;
    /// Several waits, all for other operators.
    pub(super) const SEVERAL_OTHERS: usize = 8;
}

/// The result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Decision {
    KeepToken,
    Park,
    /// The future gets a new waker and is polled again: its waits are noted anew.
    Renew,
}

impl OnlyOthers {
    pub(crate) fn new() -> Self {
        Self { at_port: AtomicUsize::new(at_port::NOTHING) }
    }

    /// The current poll waits at a port. `for_others`: only for other operators of the flow.
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

    /// The current poll waits at a port, or was made to see which waits are still pending: [`decide`](Self::decide)
    /// must follow.
    #[inline]
    pub(crate) fn is_noted(&self) -> bool {
        self.at_port.load(Ordering::Relaxed) != at_port::NOTHING
    }

    /// The current poll waits at a port.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.at_port.load(Ordering::Relaxed) > at_port::NEW
    }

    /// A wait has ended in the current poll: the next wait has not been polled with the new waker before.
    #[inline]
    pub(crate) fn end_of_wait(&self) {
        self.at_port.store(self.at_port.load(Ordering::Relaxed) & !at_port::NEW, Ordering::Relaxed);
    }

    /// The poll is over. `clones`: the number of clones of the waker that are kept.
    pub(crate) fn decide(&self, pending: bool, clones: impl FnOnce() -> usize) -> Decision {
        let at = self.at_port.load(Ordering::Relaxed);
        self.at_port.store(at_port::NOTHING, Ordering::Relaxed);
        // By the next poll the holder of a clone may have been dropped, and another wait begun.
        let (at, is_new) = (at & !at_port::NEW, at & at_port::NEW != 0);
        if !pending || matches!(at, at_port::NOTHING | at_port::MORE) {
            return Decision::KeepToken;
        }
        // If there are several waits, one may have been dropped within the poll.
        let waits_for_all = at == at_port::OTHERS || at == at_port::SEVERAL_OTHERS && is_new;
        if waits_for_all && clones() == 0 {
            // Pairs with the release that dropped the last clone.
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
