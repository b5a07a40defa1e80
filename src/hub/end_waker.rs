//! [`EndWaker`]: one end of a queue, as seen by the other end, which wakes it.
//!
//! The first waker of an end is kept for the end's whole life. An operator's waker is always the same, so no waker is
//! cloned per message; a flag says whether the end waits. The queue's lock orders all changes. Frequent queries are
//! answered without it.
//!
//! ```text
//!   no waker ──register──> registered ──notify, notify_always: wake──> idle ──register, mark_waiting──> registered
//!      └───register_for_close────────────────────────────────────────────^ │ notify_always: wake
//!                                                                        └─┘
//! ```
//!
//! Does not depend on any device, like [`queue`](super::queue), and is model-checked with it in
//! `tests/loom/queue.rs`.

use crate::sync::{AtomicBool, KeptWaker, Ordering, discard, wake};
use std::{
    sync::{Arc, OnceLock},
    task::Waker,
};

/// What a waker is registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// The change that its task waits for, and the close of the other end.
    Change,
    /// The close of the other end only: the task waits for something else, and polls again after that.
    Close,
}

/// One end, as seen by the other.
#[derive(Debug)]
pub(super) struct EndWaker {
    closed: AtomicBool,
    /// The first waker that the end was polled with. An operator's waker is always the same, so it is kept here and
    /// never cloned per message.
    waker: OnceLock<KeptWaker>,
    /// Whether the next change wakes the first waker. Written under the lock and read without it: a caller that reads
    /// `true` will also be woken for changes that were made before the read.
    waits: AtomicBool,
}

/// A second waker, for an end that is polled with different ones.
#[derive(Debug, Default)]
pub(super) struct SecondWaker(Option<Waker>);

/// Clones of a waker that is not the end's first one, made before the queue's lock is taken. After the lock is released
/// it contains the wakers to drop.
#[must_use]
pub(super) struct UnknownWaker {
    waker: Option<Waker>,
    /// For a waker that might become the first one.
    shared: Option<Arc<Waker>>,
}

impl SecondWaker {
    pub(super) fn take(&mut self) -> Option<Waker> {
        self.0.take()
    }
}

// These may be dropped by the other end, which must not be affected by a panic of a waker's destructor.
impl Drop for SecondWaker {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(discard);
    }
}

impl Drop for EndWaker {
    fn drop(&mut self) {
        self.waker.take().into_iter().for_each(KeptWaker::discard);
    }
}

impl Drop for UnknownWaker {
    #[inline]
    fn drop(&mut self) {
        // Present only for the first message of an end.
        if let Some(waker) = self.waker.take() {
            discard(waker);
        }
        if let Some(shared) = self.shared.take() {
            discard(shared);
        }
    }
}

/// A wake-up to deliver after the lock is released.
#[must_use]
pub(super) struct PendingWake<'a> {
    first: Option<&'a KeptWaker>,
    other: Option<Waker>,
}

impl EndWaker {
    pub(super) fn new() -> Self {
        Self { closed: AtomicBool::new(false), waker: OnceLock::new(), waits: AtomicBool::new(false) }
    }

    /// Marks the end as closed. Called under the lock, as for all changes.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether a waker is registered for `interest`. Called without the lock; false negatives are
    /// possible.
    #[inline]
    pub(super) fn is_registered(&self, waker: &Waker, interest: Interest) -> bool {
        match interest {
            Interest::Change => self.is_registered_for_change(waker),
            Interest::Close => self.is_first_waker(waker),
        }
    }

    /// Whether the next change will wake this waker. Called without the lock; false negatives are possible.
    #[inline]
    pub(super) fn is_registered_for_change(&self, waker: &Waker) -> bool {
        self.is_waiting() && self.is_first_waker(waker)
    }

    /// Whether the next change will wake the first waker. Called without the lock; false negatives are possible.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.waits.load(Ordering::Acquire)
    }

    /// Whether this is the waker that is woken by everything that concerns the end, whatever it waits for.
    #[inline]
    pub(super) fn is_first_waker(&self, waker: &Waker) -> bool {
        self.waker.get().is_some_and(|first| first.will_wake(waker))
    }

    /// Registers the first waker for the next change: the end has taken the last message, and its next poll will wait.
    #[inline]
    pub(super) fn mark_waiting(&self) {
        self.waits.store(true, Ordering::Release);
    }

    /// A clone of `waker`, unless it is the first one. Called before the lock is taken, since cloning and dropping a waker
    /// runs user code.
    #[inline]
    pub(super) fn clone_unknown(&self, waker: &Waker) -> UnknownWaker {
        match self.waker.get() {
            Some(first) if first.will_wake(waker) => UnknownWaker { waker: None, shared: None },
            Some(_) => UnknownWaker { waker: Some(waker.clone()), shared: None },
            None => UnknownWaker { waker: Some(waker.clone()), shared: Some(Arc::new(waker.clone())) },
        }
    }

    /// Registers `waker` for the next change. `clone` is of the same waker.
    pub(super) fn register(&self, other: &mut SecondWaker, waker: &Waker, clone: &mut UnknownWaker) {
        if self.is_first_waker(waker) || self.set_first_waker(clone) {
            self.waits.store(true, Ordering::Release);
        } else if !other.0.as_ref().is_some_and(|kept| kept.will_wake(waker)) && clone.waker.is_some() {
            std::mem::swap(&mut other.0, &mut clone.waker);
        }
    }

    /// Registers `waker` for the other end's close and for errors, but not for every change.
    pub(super) fn register_for_close(&self, other: &mut SecondWaker, waker: &Waker, clone: &mut UnknownWaker) {
        if !self.is_first_waker(waker) && !self.set_first_waker(clone) {
            self.register(other, waker, clone);
        }
    }

    /// Stores the first waker, which is kept from then on. Called under the lock. Returns true if this was the first.
    fn set_first_waker(&self, clone: &mut UnknownWaker) -> bool {
        let UnknownWaker { waker, shared } = clone;
        // Both, or neither: without a shared copy there was a first waker before the lock was taken.
        if self.waker.get().is_some() || shared.is_none() {
            return false;
        }
        let first =
            waker.take().zip(shared.take()).map(|(waker, shared)| self.waker.set(KeptWaker::new(waker, shared)));
        first.is_some()
    }

    /// Notifies this end of a change: wakes it if it waits for one.
    #[inline]
    pub(super) fn notify(&self, other: &mut SecondWaker) -> PendingWake<'_> {
        let mut first = None;
        if self.waits.load(Ordering::Acquire) {
            self.waits.store(false, Ordering::Release);
            first = self.waker.get();
        }
        PendingWake { first, other: other.take() }
    }

    /// Notifies this end of a close or an error: wakes it whatever it waits for.
    pub(super) fn notify_always(&self, other: &mut SecondWaker) -> PendingWake<'_> {
        self.waits.store(false, Ordering::Release);
        PendingWake { first: self.waker.get(), other: other.take() }
    }
}

impl PendingWake<'_> {
    /// Called after the lock is released.
    #[inline]
    pub(super) fn wake(self) {
        if let Some(first) = self.first {
            first.wake();
        }
        if let Some(other) = self.other {
            wake(other);
        }
    }
}
