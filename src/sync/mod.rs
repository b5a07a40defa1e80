//! Locks, and the calls of user code that must not happen while a lock is held.
//!
//! - [`Mutex`]: every lock of the crate. A debug build asserts the [order](Level) in which a thread acquires them.
//! - [`WakeList`], [`wake`], [`WakerCell`], [`discard`]: the only way to wake a waker, or to drop a user's value where
//!   a lock may be held. User code runs with no lock held, and its panics are contained.
//! - [`log`]: a `tracing` event where a lock may be held.
//! - [`Deferred`]: a scope that defers the wakes, drops and logs of its thread until the locks within it are released.
//! - [`on_user_code`]: suspends an activity of a thread (a capture) while it runs user code of another task.
//! - [`limit_depth`]: a call that may recurse, with a bound on the stack. Wakes and discards are bounded in the same
//!   way.
//!
//! The model-checked protocols use nothing else of the crate: `stream/completion.rs`, `stream/watch.rs`,
//! `hub/queue.rs`, `hub/end_waker.rs`, `hub/when_full.rs`, `hub/free_list.rs`, `flow/blank_queue.rs`, `memory/wait_queue.rs`,
//! `memory/use_lock.rs`, `condition/watch.rs`, `operator/idle.rs`,
//! `operator/watchers.rs`, `observe/ring.rs`, `device/emulated/simulation/wakeup.rs`. The model checks in `tests/loom` include those files
//! and [`wakes`] unmodified, next to a module of this name with loom's primitives.

use crate::mutants::{self, Mutant};

mod cell;
mod mutex;
mod proxy;
mod suspend;
mod waited;
mod wakes;

#[cfg(test)]
mod tests;

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

pub(crate) use cell::WakerCell;
pub(crate) use mutex::{Condvar, Level, Mutex, MutexGuard, assert_unlocked, is_unlocked};
pub(crate) use proxy::{ProxyWaker, proxied};
pub(crate) use suspend::{on_user_code, resume, suspend};
pub(crate) use waited::{Waited, note_wait, take_wait};
pub(crate) use wakes::{
    Chain, Deferred, DiscardOnDrop, KeptWaker, WakeList, assert_may_wake, contained, discard, discard_all,
    discard_cause, later, limit_depth, log, logged, wake, wake_again, wake_shared,
};

/// [`Mutex::at`] for the protocols, whose model checks use another mutex.
#[inline]
pub(crate) const fn mutex_at<T>(level: Level, value: T) -> Mutex<T> {
    Mutex::at(level, value)
}

/// A mutant: if a waker panics, the remaining wakers are not woken.
#[inline]
pub(crate) fn strands_others() -> bool {
    mutants::is(Mutant::WakersStranded)
}

/// True in a runtime with several workers, where a task that occupies one does not stop all others.
pub(crate) fn has_more_workers() -> bool {
    tokio::runtime::Handle::try_current().is_ok_and(|runtime| runtime.metrics().num_workers() > 1)
}

/// Acquires a lock. Poisoning is ignored: the protocols keep their state consistent at every step.
#[inline]
#[track_caller]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
