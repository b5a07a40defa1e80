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
//! Work of another library is enqueued by a function of the user's, for which no lock may be held. So its memory is **lent**:
//! its turn is interrupted while the function runs, and whatever touches memory that is lent waits until it is returned.
//!
//! ```text
//!   take ──> look, wait on the stream, lend ──> drop ──> the user's function ──> take ──> note the ticket, return ──> drop
//! ```
//!
//! Knows no graph: `tests/loom/turn.rs` includes it as it stands.

use crate::sync::{AtomicUsize, Condvar, Deferred, Mutex, MutexGuard, Ordering, lock};

/// See the [module](self).
pub(crate) struct Turns {
    pub(crate) lock: Mutex<()>,
    /// How many pieces of memory are lent: changed within a turn only.
    pub(crate) lent: AtomicUsize,
    pub(crate) returned: Condvar,
}

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
        let taken = if mine(true) { None } else { Some(lock(&self.lock)) };
        Turn { taken, mine, _later }
    }

    /// The same, as soon as nothing of what the turn is for is lent to another thread. That is asked within the turn.
    pub(crate) fn take_when(&self, mine: fn(bool) -> bool, is_lent: impl Fn() -> bool) -> Turn<'_> {
        let mut turn = self.take(mine);
        while self.lent.load(Ordering::Relaxed) > 0 && is_lent() {
            // Within another turn of this thread that one has waited.
            let Some(taken) = turn.taken.take() else { break };
            turn.taken = Some(self.returned.wait_with_others(taken));
        }
        turn
    }

    /// A piece of memory is lent. Within a turn.
    pub(crate) fn lend(&self) {
        self.lent.fetch_add(1, Ordering::Relaxed);
    }

    /// A piece is returned. Within a turn.
    pub(crate) fn give_back(&self) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
        self.returned.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.taken.is_some() {
            (self.mine)(false);
        }
    }
}
