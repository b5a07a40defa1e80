//! `crate::sync` of the model checks: loom's primitives in place of std's.

#![allow(dead_code, unused_imports, reason = "each model uses only a part")]

#[path = "../../src/sync/wakes.rs"]
mod wakes;

pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
};
pub(crate) use wakes::*;

/// Checks every interleaving with at most this many preemptions. The limit is two unless `WAKELINE_MODELS=long` is set,
/// as in `.ci/full`: the third takes most of the time.
pub(crate) fn model(preemptions: usize, check: impl Fn() + Send + Sync + 'static) {
    model_short(preemptions.min(2), preemptions, check);
}

/// The same, with `few` preemptions unless `WAKELINE_MODELS=long` is set.
pub(crate) fn model_short(few: usize, preemptions: usize, check: impl Fn() + Send + Sync + 'static) {
    let is_long = std::env::var("WAKELINE_MODELS").is_ok_and(|value| value == "long");
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(if is_long { preemptions } else { few });
    builder.check(check);
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no model panics with a lock held")
}

/// Corresponds to the crate's own.
pub(crate) struct Condvar(pub(crate) loom::sync::Condvar);

impl Condvar {
    pub(crate) fn wait_with_others<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).expect("no model panics with a lock held")
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

pub(crate) fn assert_unlocked() {}

// No model calls user code.
pub(crate) fn suspend() {}

pub(crate) fn resume() {}

pub(crate) fn strands_others() -> bool {
    false
}

pub(crate) fn is_unlocked() -> bool {
    true
}

/// The crate's own mutex asserts the lock order; loom finds deadlocks itself.
pub(crate) enum Level {
    Hub,
}

pub(crate) fn mutex_at<T>(_: Level, value: T) -> Mutex<T> {
    Mutex::new(value)
}
