//! [`UseLock`]: serialises the uses of memory that graphs use, too; [`UseLockGuard`] is the guard.
//!
//! ```text
//!   take ──> check the uses of all memory that is used, and wait for them on the stream ──> enqueue ──> note ──> drop
//!     │
//!     └── if this thread holds the lock already: no effect
//! ```
//!
//! A launch does not borrow its memory. If another use was enqueued between a launch's check and its note, neither
//! would wait for the other. So the lock is held for all of it, and acquired before the other locks: the uses of an
//! exec, the uses of a piece of memory, a stream's order.
//!
//! A user's function enqueues work of another library, and is called with no lock held. So its memory is **lent**: the
//! lock is released while the function runs, and every use of lent memory waits until it is returned.
//!
//! ```text
//!   take ──> check, wait on the stream, lend ──> drop ──> the user's function ──> take ──> note, return ──> drop
//! ```
//!
//! This file does not use graphs: `tests/loom/use_lock.rs` includes it unchanged.

use crate::sync::{AtomicUsize, Condvar, Deferred, Mutex, MutexGuard, Ordering, lock};

/// See the [module](self).
pub(crate) struct UseLock {
    pub(crate) lock: Mutex<()>,
    /// How many pieces of memory are lent. Changed only with the lock held.
    pub(crate) lent: AtomicUsize,
    pub(crate) returned: Condvar,
}

/// See the [module](self).
#[must_use]
pub(crate) struct UseLockGuard<'a> {
    /// `None` while an outer guard of this thread holds the lock.
    taken: Option<MutexGuard<'a, ()>>,
    mine: fn(bool) -> bool,
    /// Wakers that are due meanwhile run after the lock is released. Declared below the guard, so that it is dropped
    /// later.
    _later: Deferred,
}

impl UseLock {
    /// `mine` records for this thread whether it holds the lock, and returns the previous record.
    pub(crate) fn acquire(&self, mine: fn(bool) -> bool) -> UseLockGuard<'_> {
        let _later = Deferred::new();
        let taken = if mine(true) { None } else { Some(lock(&self.lock)) };
        UseLockGuard { taken, mine, _later }
    }

    /// As [`acquire`](Self::acquire), once `is_lent`, which is called with the lock held, is false.
    pub(crate) fn acquire_when(&self, mine: fn(bool) -> bool, is_lent: impl Fn() -> bool) -> UseLockGuard<'_> {
        let mut use_lock = self.acquire(mine);
        while self.lent.load(Ordering::Relaxed) > 0 && is_lent() {
            // An outer guard of this thread has waited for it.
            let Some(taken) = use_lock.taken.take() else { break };
            use_lock.taken = Some(self.returned.wait_with_others(taken));
        }
        use_lock
    }

    /// A piece of memory is lent. Call it with the lock held.
    pub(crate) fn lend(&self) {
        self.lent.fetch_add(1, Ordering::Relaxed);
    }

    /// A piece of memory is returned. Call it with the lock held.
    pub(crate) fn take_back(&self) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
        self.returned.notify_all();
    }
}

impl Drop for UseLockGuard<'_> {
    fn drop(&mut self) {
        if self.taken.is_some() {
            (self.mine)(false);
        }
    }
}
