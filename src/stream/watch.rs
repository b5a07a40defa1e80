//! The state of the completion monitor's checks: [`WatchFlag`], whether a stream or a heap is checked; [`WatchList`],
//! the streams of a device and whether the ticks run; and [`FaultWatch`], whether a device is polled for faults.
//!
//! ```text
//!   WatchFlag         there is something to check: start        nothing is left: stop
//!            off ──────────────────────────────────────> on ─────────────────────────> off ──> still nothing? done
//!             ^                                          ^                                      │ something was added
//!             └──────────────────────────────────────────┴──────────────────────────────────────┘ start, once
//!
//!   WatchList   idle ── begin ──> ticking ── [ take ──> check each ──> finish ]* ── nothing is left ──> idle
//!
//!   FaultWatch    off ── a task waits: waiter_added ──> ticking ── no task waits ──────────────────> off
//!                                             │   ^
//!                        no work is in flight v   │ work is enqueued: work_added
//!                                             armed
//! ```
//!
//! The subject of a check, a waiter or parked memory, is under a lock of its own. It is first added under this lock,
//! and then `start` is called; `stop` first clears the flag, and then checks under the lock. So whichever acquires the
//! lock later sees the other, and exactly one of them continues: each stream or heap is listed once.
//!
//! The thread for which `begin` returns true runs the ticks. A stream that is added during a tick is listed at once,
//! and `finish` sees it under the same lock under which it decides whether to end.
//!
//! A `FaultWatch` is for tasks that wait for other tasks (for memory or chunks) and are only notified of a loss. A
//! fault arises from work in flight: while there is none, the ticks end although tasks wait, and the next enqueue
//! restarts them. Waiters and work are each added under a lock of their own before `waiter_added` or `is_armed` is
//! called, and a tick changes the state before its second check under that lock. So again, whichever comes later sees
//! the other.
//!
//! This file does not use the device: `tests/loom/monitor.rs` and `tests/loom/memory.rs` include it unchanged.

use crate::sync::{AtomicBool, AtomicUsize, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct WatchFlag(AtomicBool);

impl WatchFlag {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Called after a subject to check was added. A `false` that is read under the lock is current; a `true` may be
    /// about to be cleared, by a `stop` that will see the added subject.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the flag: there is something to check. True if the caller must register the check with the monitor.
    #[must_use]
    pub(crate) fn start(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Clears the flag: a tick has found nothing to check. True if the checks must continue nevertheless, since
    /// `is_needed` reports an addition and no other thread has called `start`.
    #[must_use]
    pub(crate) fn stop(&self, is_needed: impl FnOnce() -> bool) -> bool {
        self.0.store(false, Ordering::Release);
        is_needed() && self.start()
    }

    /// Clears the flag as no tick can run. The next addition starts the checks again.
    pub(crate) fn forget(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct FaultWatch(AtomicUsize);

impl FaultWatch {
    const OFF: usize = 0;
    const ARMED: usize = 1;
    const TICKING: usize = 2;

    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(Self::OFF))
    }

    /// Called by a waiter that has registered. True if the caller must start the ticks.
    #[inline]
    #[must_use]
    pub(crate) fn waiter_added(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OFF && self.begin(Self::OFF)
    }

    /// Called under the lock under which work was added. If true, `work_added` must follow once the lock is released.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::ARMED
    }

    /// Called after work was enqueued. True if the caller must start the ticks.
    #[must_use]
    pub(crate) fn work_added(&self) -> bool {
        self.begin(Self::ARMED)
    }

    /// Runs one tick. True if another one must follow.
    #[must_use]
    pub(crate) fn tick(&self, waits: impl Fn() -> bool, works: impl Fn() -> bool) -> bool {
        if !waits() {
            return self.end(Self::OFF, waits);
        }
        works() || self.end(Self::ARMED, works)
    }

    fn end(&self, state: usize, is_needed: impl FnOnce() -> bool) -> bool {
        self.0.store(state, Ordering::Release);
        is_needed() && self.begin(state)
    }

    fn begin(&self, from: usize) -> bool {
        self.0.compare_exchange(from, Self::TICKING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Guarded by the completion monitor's lock.
#[derive(Debug)]
pub(crate) struct WatchList<S> {
    streams: Vec<S>,
    ticking: bool,
}

impl<S> Default for WatchList<S> {
    fn default() -> Self {
        Self { streams: Vec::new(), ticking: false }
    }
}

impl<S> WatchList<S> {
    pub(crate) fn add(&mut self, stream: S) {
        self.streams.push(stream);
    }

    /// Notes that there is something to do at a tick. True if the caller must run the ticks.
    #[must_use]
    pub(crate) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.ticking, true)
    }

    /// Called if the ticks cannot run. Returns the streams, which are no longer watched.
    pub(crate) fn abandon(&mut self) -> Vec<S> {
        self.ticking = false;
        std::mem::take(&mut self.streams)
    }

    /// Begins a tick: takes the streams, to be checked with the lock released.
    pub(crate) fn take(&mut self) -> Vec<S> {
        std::mem::take(&mut self.streams)
    }

    /// Ends a tick. True if another one must follow: streams are left or were added during the tick, or `more` reports
    /// other work.
    #[must_use]
    pub(crate) fn finish(&mut self, mut left: Vec<S>, more: bool) -> bool {
        self.streams.append(&mut left);
        self.ticking = more || !self.streams.is_empty();
        self.ticking
    }
}
