//! [`WakerCell`]: the one waker of a task that waits.

use std::task::Waker;

use super::{Mutex, discard, lock, wake};

/// Keeps the latest waker of one task, for others to wake. As `AtomicWaker`, with a lock: a waker whose clone or drop panics,
/// or calls back, leaves it whole.
#[derive(Debug, Default)]
pub(crate) struct WakerCell(Mutex<Option<Waker>>);

impl Drop for WakerCell {
    fn drop(&mut self) {
        discard(self.0.get_mut().take());
    }
}

impl WakerCell {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Keeps this waker until the next wake. What is changed before a wake is seen after the registration that misses it.
    pub(crate) fn register(&self, waker: &Waker) {
        if lock(&self.0).as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            return;
        }
        // Cloned and dropped without the lock.
        let new = waker.clone();
        let old = lock(&self.0).replace(new);
        discard(old);
    }

    /// Wakes the one that is kept, if any.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.0).take();
        waker.into_iter().for_each(wake);
    }
}
