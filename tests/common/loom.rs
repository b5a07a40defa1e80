//! `crate::sync` of the model checks: loom's primitives in place of std's.

#![allow(dead_code, unused_imports, reason = "each model takes from here what its files use")]

use std::task::Waker;

pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no model panics with a lock held")
}

/// No waker of a model panics.
#[derive(Debug, Default)]
pub(crate) struct WakeList(Vec<Waker>);

impl WakeList {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn push(&mut self, waker: Waker) {
        self.0.push(waker);
    }

    pub(crate) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}

impl FromIterator<Waker> for WakeList {
    fn from_iter<I: IntoIterator<Item = Waker>>(wakers: I) -> Self {
        Self(wakers.into_iter().collect())
    }
}

pub(crate) fn discard<T>(value: T) {
    drop(value);
}
