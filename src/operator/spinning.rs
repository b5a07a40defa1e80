//! [`Spinning`]: a task that spins within a poll until it is woken, which costs its waker nothing.
//!
//! ```text
//!   the poll    begin ──> polled since the last wake? ── yes ──> spins while the flag is set ──> end: was it set?
//!   a waker     marks the task as woken ──────────────────────> is the flag set? clears it; otherwise wakes the task
//! ```
//!
//! Either `end` finds that a waker has cleared the flag, and the poll begins again; or the waker finds it cleared, and
//! wakes the task as always.
//!
//! Does not depend on tokio: `tests/loom/spinning.rs` includes this file unchanged.

use crate::sync::{AtomicBool, Ordering};

#[derive(Debug)]
pub(crate) struct Spinning(AtomicBool);

impl Spinning {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// From here on a wake ends the spinning. The caller then checks once that no wake came before.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// True if a wake has ended the spinning: the task was not woken otherwise, and must be polled again.
    pub(crate) fn end(&self) -> bool {
        !self.0.swap(false, Ordering::SeqCst)
    }

    /// Called by a waker that is to have the task polled, after it has marked it as woken. True if the task spins, and so
    /// notices that.
    #[inline]
    pub(crate) fn wake(&self) -> bool {
        self.0.load(Ordering::SeqCst) && self.0.swap(false, Ordering::SeqCst)
    }
}
