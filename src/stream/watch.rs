//! What the lookout looks at, at every beat: [`Watched`], the flag of a stream or a heap, [`Visits`], the streams of a
//! device and whether a beat is kept at all, and [`Vigil`], whether a device is asked for its fault.
//!
//! ```text
//!   Watched         there is something to look at: start        nothing is there: stop
//!            off ────────────────────────────────────────> on ───────────────────────────> off ──> still nothing? done
//!             ^                                            ^                                        │ something came
//!             └────────────────────────────────────────────┴────────────────────────────────────────┘ start, once
//!
//!   Visits   idle ── begin ──> beating ── [ take ──> each is looked at ──> finish ]* ── nothing is left ──> idle
//!
//!   Vigil    off ── a task waits: attend ──> beating ── no task waits ──────────────────> off
//!                                             │   ^
//!                        no work is in flight v   │ work is enqueued: stir
//!                                             armed
//! ```
//!
//! What there is to look at, a waiter or memory that is bound, is kept under a lock of its own. It is added under that lock
//! first, and `start` is called then; `stop` turns the flag off first, and looks under the lock then. So of the two,
//! whichever has the lock later sees the other, and exactly one of them goes on: what is watched is listed once.
//!
//! The thread for which `begin` returns true keeps the beat. One that comes while a beat is under way is listed at once, and
//! `finish` sees it under the lock under which it decides to end.
//!
//! A vigil is for tasks that wait for what other tasks bring (memory, chunks) and only hear of a loss. A fault comes out of
//! work in flight: while there is none, the beat ends although tasks wait, and the next enqueue starts it. Waiters and work
//! are each added under a lock of their own, before `attend` and `is_armed` are asked, and a beat changes the state before
//! its second look under that lock: again, whichever is later sees the other.
//!
//! Knows no device: `tests/loom/lookout.rs` and `tests/loom/memory.rs` include it as it stands.

use crate::sync::{AtomicBool, AtomicUsize, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Watched(AtomicBool);

impl Watched {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Asked by one that has added something to look at. A `false` is current if that was under the lock; a `true` may be
    /// about to be turned off, by a `stop` that will see what was added.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// There is something to look at. True if it is for the caller to have that done at every beat.
    #[must_use]
    pub(crate) fn start(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// A beat has found nothing to look at. True if it goes on all the same: `is_needed` says that something came, and no
    /// other has started.
    #[must_use]
    pub(crate) fn stop(&self, is_needed: impl FnOnce() -> bool) -> bool {
        self.0.store(false, Ordering::Release);
        is_needed() && self.start()
    }

    /// No beat can be kept: the next one that comes starts again.
    pub(crate) fn forget(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Vigil(AtomicUsize);

impl Vigil {
    const OFF: usize = 0;
    const ARMED: usize = 1;
    const BEATING: usize = 2;

    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(Self::OFF))
    }

    /// Called by a waiter that has registered. True if the caller is to start the beat.
    #[inline]
    #[must_use]
    pub(crate) fn attend(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OFF && self.begin(Self::OFF)
    }

    /// Asked under the lock under which work was added. If true, `stir` follows once that is released.
    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::ARMED
    }

    /// Work was enqueued. True if the caller is to start the beat.
    #[must_use]
    pub(crate) fn stir(&self) -> bool {
        self.begin(Self::ARMED)
    }

    /// A beat. True if another one follows.
    #[must_use]
    pub(crate) fn beat(&self, waits: impl Fn() -> bool, works: impl Fn() -> bool) -> bool {
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
        self.0.compare_exchange(from, Self::BEATING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// Kept under the lookout's lock.
#[derive(Debug)]
pub(crate) struct Visits<S> {
    streams: Vec<S>,
    beating: bool,
}

impl<S> Default for Visits<S> {
    fn default() -> Self {
        Self { streams: Vec::new(), beating: false }
    }
}

impl<S> Visits<S> {
    pub(crate) fn add(&mut self, stream: S) {
        self.streams.push(stream);
    }

    /// There is something to do at a beat. True if it is for the caller to keep it.
    #[must_use]
    pub(crate) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.beating, true)
    }

    /// The caller cannot keep it. The streams are not watched any more.
    pub(crate) fn abandon(&mut self) -> Vec<S> {
        self.beating = false;
        std::mem::take(&mut self.streams)
    }

    /// A beat: the streams to look at, with the lock released.
    pub(crate) fn take(&mut self) -> Vec<S> {
        std::mem::take(&mut self.streams)
    }

    /// The beat is over. True if another one follows: streams are left, or came meanwhile, or `more` says so of what else
    /// there is to do.
    #[must_use]
    pub(crate) fn finish(&mut self, mut left: Vec<S>, more: bool) -> bool {
        self.streams.append(&mut left);
        self.beating = more || !self.streams.is_empty();
        self.beating
    }
}
