//! An end of a queue, as the other wakes it.
//!
//! The end's first waker is kept for good: an operator's is always the same, so nothing is cloned for a message, and whether
//! it waits is a flag. The queue's lock orders all changes; what is asked again and again is asked without it.
//!
//! ```text
//!   unknown ──keep──> known, waits ──due, told: wake──> known ──keep, will_wait──> known, waits
//!      └───introduce──────────────────────────────────────^ │ told: wake
//!                                                         └─┘
//! ```
//!
//! Knows no device, as [`queue`](super::queue), and is model-checked with it, in `tests/loom_queue.rs`.

use crate::sync::{AtomicBool, Ordering};
use std::{sync::OnceLock, task::Waker};

/// One end, as the other sees it.
#[derive(Debug)]
pub(super) struct End {
    gone: AtomicBool,
    /// The waker that it came with first. An operator's is always the same, so it is kept here for good and nothing is
    /// cloned for a message.
    waker: OnceLock<Waker>,
    /// That one is to be woken by the next change. Written under the lock, read without: whoever finds it set will be
    /// woken, for what was changed before it was read as well.
    waits: AtomicBool,
}

/// Another waker of an end that is polled in more than one way.
pub(super) type Others = Option<Waker>;

/// A wake that is due, once the lock has gone.
#[must_use]
pub(super) struct Due<'a> {
    first: Option<&'a Waker>,
    other: Option<Waker>,
}

impl End {
    pub(super) fn new() -> Self {
        Self { gone: AtomicBool::new(false), waker: OnceLock::new(), waits: AtomicBool::new(false) }
    }

    /// Under the lock, as all that changes anything.
    pub(super) fn go(&self) {
        self.gone.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Will this waker be woken by the next change? Asked without the lock; it may not know of one that will.
    #[inline]
    pub(super) fn is_kept(&self, waker: &Waker) -> bool {
        self.waits.load(Ordering::Acquire) && self.is_known(waker)
    }

    /// Will this waker be woken by what concerns the end, whatever it waits for?
    #[inline]
    pub(super) fn is_known(&self, waker: &Waker) -> bool {
        self.waker.get().is_some_and(|kept| kept.will_wake(waker))
    }

    /// What this end has just done is the last that it could do.
    #[inline]
    pub(super) fn will_wait(&self) {
        self.waits.store(true, Ordering::Release);
    }

    pub(super) fn keep(&self, other: &mut Others, waker: &Waker) {
        if self.waker.get_or_init(|| waker.clone()).will_wake(waker) {
            self.waits.store(true, Ordering::Release);
        } else if !other.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            *other = Some(waker.clone());
        }
    }

    /// This waker is told what concerns the end, and no more.
    pub(super) fn introduce(&self, other: &mut Others, waker: &Waker) {
        if !self.waker.get_or_init(|| waker.clone()).will_wake(waker) {
            self.keep(other, waker);
        }
    }

    /// There is something new for this end.
    #[inline]
    pub(super) fn due(&self, other: &mut Others) -> Due<'_> {
        let mut first = None;
        if self.waits.load(Ordering::Acquire) {
            self.waits.store(false, Ordering::Release);
            first = self.waker.get();
        }
        Due { first, other: other.take() }
    }

    /// There is something that concerns this end, whatever it waits for.
    pub(super) fn told(&self, other: &mut Others) -> Due<'_> {
        self.waits.store(false, Ordering::Release);
        Due { first: self.waker.get(), other: other.take() }
    }
}

impl Due<'_> {
    /// Called without the lock.
    #[inline]
    pub(super) fn wake(self) {
        if let Some(first) = self.first {
            first.wake_by_ref();
        }
        if let Some(other) = self.other {
            other.wake();
        }
    }
}
