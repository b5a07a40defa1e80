//! The primitives that the protocols are written with.
//!
//! `stream/completion.rs`, `hub/queue.rs`, `operator/quiet.rs` and `operator/watchers.rs` use nothing else of the crate. The model checks in
//! `tests/loom_*.rs` include those files as they stand, beside a module of this name with loom's primitives in it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    task::Waker,
};

pub(crate) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
};

/// Locks, whatever a panicking thread left behind: the protocols keep their state whole at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Wakers that were taken out under a lock, to be woken after it. Each is woken, even where another panics.
#[derive(Debug, Default)]
#[must_use = "it wakes when `wake` is called"]
pub(crate) struct WakeList(smallvec::SmallVec<[Waker; 4]>);

impl WakeList {
    pub(crate) fn new() -> Self {
        Self(smallvec::SmallVec::new())
    }

    #[inline]
    pub(crate) fn push(&mut self, waker: Waker) {
        self.0.push(waker);
    }

    /// Wakes all, with no lock held.
    #[inline]
    pub(crate) fn wake(mut self) {
        if !self.0.is_empty() {
            self.0.drain(..).for_each(|waker| contained(|| waker.wake()));
        }
    }
}

impl FromIterator<Waker> for WakeList {
    fn from_iter<I: IntoIterator<Item = Waker>>(wakers: I) -> Self {
        Self(wakers.into_iter().collect())
    }
}

impl Drop for WakeList {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            self.0.drain(..).for_each(discard);
        }
    }
}

/// Drops a value whose destructor is the user's, with no lock held.
pub(crate) fn discard<T: 'static>(value: T) {
    contained(|| drop(value));
}

/// Calls user code. A panic of it ends here and is logged.
pub(crate) fn contained(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        // Its destructor is user code, too.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(payload))).map_err(std::mem::forget);
        tracing::error!("a waker or a destructor panicked");
    }
}
