//! [`WakerCell`]: the waker of a waiting task.

use std::task::Waker;

use super::{Mutex, discard, lock, wake};

/// Stores the latest waker of one task. Like `AtomicWaker`, but with a lock: a waker whose clone or drop panics or
/// calls back leaves the cell consistent.
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

    /// Stores this waker until the next wake. If a wake comes before the registration, the changes made before that
    /// wake are visible after the registration.
    pub(crate) fn register(&self, waker: &Waker) {
        if lock(&self.0).as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            return;
        }
        // Cloned and dropped outside the lock.
        let new = waker.clone();
        let old = lock(&self.0).replace(new);
        discard(old);
    }

    /// Takes the stored waker, if any, and wakes it.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.0).take();
        waker.into_iter().for_each(wake);
    }
}
