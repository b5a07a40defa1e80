//! Locks, and what must not happen while one is held.
//!
//! - [`Mutex`]: every lock of the crate. A debug build asserts the [order](Level) in which a thread acquires them.
//! - [`WakeList`], [`wake`], [`WakerCell`], [`discard`]: the only way to wake a waker, or to drop a value of the user's where a lock may be
//!   held. User code runs with no lock held, and a panic of it ends there.
//! - [`log`]: a `tracing` event where a lock may be held.
//! - [`Deferred`]: a scope that holds back the wakes, drops and logs of its thread until the locks within it are released.
//! - [`on_user_code`]: what a thread is in the middle of, a capture, is left while user code of another task runs there.
//! - [`limit_depth`]: a call that may lead to another one like it, and so on, without an end to the stack. What is woken and
//!   discarded is limited in the same way.
//!
//! The protocols that are model-checked use nothing else of the crate: `stream/completion.rs`, `stream/watch.rs`,
//! `hub/queue.rs`, `hub/waking.rs`, `hub/free_list.rs`, `flow/blank_queue.rs`, `memory/line.rs`, `memory/hold/turn.rs`,
//! `condition/told.rs`, `operator/quiet.rs`, `operator/only_others.rs`, `operator/watchers.rs`,
//! `device/emulated/simulation/wakeup.rs`. The model checks in `tests/loom` include those files and [`wakes`] as they stand,
//! beside a module of this name with loom's primitives in it.

use crate::mutants::{self, Mutant};

mod aside;
mod cell;
mod mutex;
mod proxy;
mod wakes;

#[cfg(test)]
mod tests;

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

pub(crate) use aside::{on_user_code, step_back, step_out};
pub(crate) use cell::WakerCell;
pub(crate) use mutex::{Condvar, Level, Mutex, MutexGuard, assert_unlocked, is_unlocked};
pub(crate) use proxy::{ProxyWaker, proxied};
pub(crate) use wakes::{
    Chain, Deferred, Discarded, WakeList, assert_may_wake, contained, discard, discard_all, discard_cause, later,
    limit_depth, log, logged, wake, wake_again, wake_shared,
};

/// [`Mutex::at`], for the protocols, whose model checks have another mutex.
#[inline]
pub(crate) const fn mutex_at<T>(level: Level, value: T) -> Mutex<T> {
    Mutex::at(level, value)
}

/// A mutant: a waker that panics strands those after it.
#[inline]
pub(crate) fn strands_others() -> bool {
    mutants::is(Mutant::WakersStranded)
}

/// Acquires a lock. A poisoned one is acquired as well: the protocols keep their state whole at every step.
#[inline]
#[track_caller]
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
