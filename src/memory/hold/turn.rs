//! [`Turns`]: uses of memory that graphs use, too, one after the other; and the [`Turn`] of one of them.
//!
//! ```text
//!   take ──> look at the uses of all that is touched, and wait for them on the stream ──> enqueue ──> note the ticket ──> drop
//!     │
//!     └── within a turn of this thread: the same turn
//! ```
//!
//! A launch has no borrow of the memory that it touches. Were another use enqueued between its look and its note, neither
//! would wait for the other. A turn lasts over all of it, and is acquired before every other lock that this takes: what the
//! launches of an exec use, the uses of a piece of memory, a stream's order.
//!
//! Knows no graph: `tests/loom_turn.rs` includes it as it stands.

use crate::sync::{Deferred, Mutex, MutexGuard, lock};

/// See the [module](self).
pub(crate) struct Turns(pub(crate) Mutex<()>);

/// See the [module](self).
#[must_use]
pub(crate) struct Turn<'a> {
    /// `None` within another turn of this thread.
    taken: Option<MutexGuard<'a, ()>>,
    mine: fn(bool) -> bool,
    /// What is woken meanwhile is woken after it. Below the guard, so that it ends later.
    _later: Deferred,
}

impl Turns {
    /// `mine` notes for this thread whether it has a turn, and returns what was noted before.
    pub(crate) fn take(&self, mine: fn(bool) -> bool) -> Turn<'_> {
        let _later = Deferred::new();
        let taken = if mine(true) { None } else { Some(lock(&self.0)) };
        Turn { taken, mine, _later }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.taken.is_some() {
            (self.mine)(false);
        }
    }
}
