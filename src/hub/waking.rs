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
//! Knows no device, as [`queue`](super::queue), and is model-checked with it, in `tests/loom/queue.rs`.

use crate::sync::{AtomicBool, Ordering, discard, wake, wake_shared};
use std::{
    sync::{Arc, OnceLock},
    task::Waker,
};

/// One end, as the other sees it.
#[derive(Debug)]
pub(super) struct End {
    gone: AtomicBool,
    /// The waker that it came with first. An operator's is always the same, so it is kept here for good and nothing is
    /// cloned for a message.
    waker: OnceLock<Arc<Waker>>,
    /// That one is to be woken by the next change. Written under the lock, read without: whoever finds it set will be
    /// woken, for what was changed before it was read as well.
    waits: AtomicBool,
}

/// Another waker of an end that is polled in more than one way.
#[derive(Debug, Default)]
pub(super) struct Others(Option<Waker>);

/// A clone of a waker that the end may not have, made before the queue's lock; after it, what is to be dropped.
#[must_use]
pub(super) struct Spare(Option<Waker>);

impl Others {
    pub(super) fn take(&mut self) -> Option<Waker> {
        self.0.take()
    }
}

// The other end may be the one that drops them: a panic of the waker's is none of its.
impl Drop for Others {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(discard);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.waker.take().into_iter().for_each(discard);
    }
}

impl Drop for Spare {
    #[inline]
    fn drop(&mut self) {
        // There is one for an end's first message only.
        if let Some(spare) = self.0.take() {
            discard(spare);
        }
    }
}

/// A wake that is due, once the lock has gone.
#[must_use]
pub(super) struct Due<'a> {
    first: Option<&'a Arc<Waker>>,
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

    /// Called before the lock: cloning a waker and dropping one is user code.
    #[inline]
    pub(super) fn spare(&self, waker: &Waker) -> Spare {
        Spare(if self.is_known(waker) { None } else { Some(waker.clone()) })
    }

    /// `spare` is of the same waker.
    pub(super) fn keep(&self, other: &mut Others, waker: &Waker, spare: &mut Spare) {
        if self.is_known(waker) || self.know(spare) {
            self.waits.store(true, Ordering::Release);
        } else if !other.0.as_ref().is_some_and(|kept| kept.will_wake(waker)) && spare.0.is_some() {
            std::mem::swap(&mut other.0, &mut spare.0);
        }
    }

    /// This waker is told what concerns the end, and no more.
    pub(super) fn introduce(&self, other: &mut Others, waker: &Waker, spare: &mut Spare) {
        if !self.is_known(waker) && !self.know(spare) {
            self.keep(other, waker, spare);
        }
    }

    /// The first waker is the one that is kept for good. Under the lock. True if it was this one.
    fn know(&self, spare: &mut Spare) -> bool {
        if self.waker.get().is_some() {
            return false;
        }
        let first = spare.0.take().map(|first| self.waker.set(Arc::new(first)));
        first.is_some()
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
            wake_shared(first);
        }
        if let Some(other) = self.other {
            wake(other);
        }
    }
}
