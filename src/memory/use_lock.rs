//! [`UseLock`]: serialises the uses of memory that graphs share, or that is used in parts; [`UseLockGuard`] is its guard.
//!
//! ```text
//!   acquire ──> check the uses of the memory, and make the stream wait for them ──> enqueue ──> note ──> drop
//!     │
//!     └── no effect if this thread holds the lock already
//! ```
//!
//! A launch does not borrow its memory, and two parts of one memory may be borrowed on two threads. If another use was enqueued between a launch's check and its note, neither
//! would wait for the other. So the lock is held from check to note, and acquired before the other locks: the resources
//! of an exec, the uses of a piece of memory, a stream's order.
//!
//! External work is enqueued by a user's function, which is called with no lock held. So its memory is **lent**: the
//! lock is released while the function runs, and every use of lent memory waits until the memory is returned.
//!
//! ```text
//!   acquire ──> check, lend ──> drop ──> the user's function ──> acquire ──> note, return ──> drop
//! ```
//!
//! This file does not use graphs: `tests/loom/use_lock.rs` includes it unchanged.

use crate::sync::{AtomicUsize, Condvar, Deferred, Mutex, MutexGuard, Ordering, lock};

/// See the [module](self).
pub(crate) struct UseLock {
    pub(crate) lock: Mutex<()>,
    /// The number of pieces of memory that are lent. Changed only with the lock held.
    pub(crate) lent: AtomicUsize,
    pub(crate) returned: Condvar,
}

/// See the [module](self).
#[must_use]
pub(crate) struct UseLockGuard<'a> {
    /// `None` while an outer guard of this thread holds the lock.
    taken: Option<MutexGuard<'a, ()>>,
    mine: fn(bool) -> bool,
    /// Wakers that become due while the lock is held run after it is released. Declared below the guard, so that it is
    /// dropped later.
    _later: Deferred,
}

impl UseLock {
    /// Acquires the lock unless this thread holds it. `mine` records for this thread whether it holds the lock, and
    /// returns the previous record.
    pub(crate) fn acquire(&self, mine: fn(bool) -> bool) -> UseLockGuard<'_> {
        let _later = Deferred::new();
        let taken = if mine(true) { None } else { Some(lock(&self.lock)) };
        UseLockGuard { taken, mine, _later }
    }

    /// Like [`acquire`](Self::acquire), but waits until `is_lent`, which is called with the lock held, is false.
    pub(crate) fn acquire_when(&self, mine: fn(bool) -> bool, is_lent: impl Fn() -> bool) -> UseLockGuard<'_> {
        let mut use_lock = self.acquire(mine);
        while self.lent.load(Ordering::Relaxed) > 0 && is_lent() {
            // An outer guard on this thread has waited already.
            let Some(taken) = use_lock.taken.take() else { break };
            use_lock.taken = Some(self.returned.wait_with_others(taken));
        }
        use_lock
    }

    /// Counts a piece of memory as lent. Called with the lock held.
    pub(crate) fn lend(&self) {
        self.lent.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a piece of memory as returned. Called with the lock held.
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
