//! [`BlankQueue`]: callers that wait for a blank envelope, in the order of their calls.
//!
//! ```text
//!   a caller:     registers ──> checks ── none ──> waits           the operator:  polled ──> an envelope in the pool?
//!                     ^                              │                              ^           │ yes: wakes the first
//!                     └───────────── is woken <──────┘                              └───────────┘
//! ```
//!
//! One caller is woken per envelope, and then the operator checks again: while an envelope is still in the pool, the
//! next caller is woken. So no wake is lost if a caller that was woken is dropped or not polled. If another caller
//! takes the envelope first, the woken caller keeps its place. A caller registers before it checks: if an envelope is
//! returned after the check, the caller is found here.
//!
//! Does not depend on a device: `tests/loom/blanks.rs` includes this file unchanged.

use std::{collections::BTreeMap, task::Waker};

use crate::sync::{Mutex, WakeList, discard, lock, wake};

/// See the [module](self).
pub(super) struct BlankQueue(Mutex<QueuedCallers>);

struct QueuedCallers {
    /// By their numbers. A caller that is woken is removed until it registers again.
    callers: BTreeMap<u64, Waker>,
    /// The last number that was assigned.
    number: u64,
}

/// A caller's place in the queue. Its waker is dropped with it.
pub(super) struct QueuedCaller<'a> {
    queue: &'a BlankQueue,
    number: u64,
}

impl BlankQueue {
    pub(super) fn new() -> Self {
        Self(Mutex::new(QueuedCallers { callers: BTreeMap::new(), number: 0 }))
    }

    pub(super) fn join(&self) -> QueuedCaller<'_> {
        let mut waiting = lock(&self.0);
        waiting.number += 1;
        QueuedCaller { queue: self, number: waiting.number }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).callers.is_empty()
    }

    /// Wakes the first caller. False if there is none.
    pub(super) fn wake_first(&self) -> bool {
        let first = lock(&self.0).callers.pop_first();
        first.map(|(_, waker)| wake(waker)).is_some()
    }

    /// Wakes all callers: no envelope will be returned any more.
    pub(super) fn wake_all(&self) {
        let all = std::mem::take(&mut lock(&self.0).callers);
        all.into_values().collect::<WakeList>().wake();
    }
}

impl QueuedCaller<'_> {
    /// Registers the waker. The caller must check for an envelope after this.
    pub(super) fn register(&self, waker: &Waker) {
        if lock(&self.queue.0).callers.get(&self.number).is_some_and(|known| known.will_wake(waker)) {
            return;
        }
        // Cloned and dropped with no lock held.
        let new = waker.clone();
        let old = lock(&self.queue.0).callers.insert(self.number, new);
        discard(old);
    }
}

impl Drop for QueuedCaller<'_> {
    fn drop(&mut self) {
        let waker = lock(&self.queue.0).callers.remove(&self.number);
        discard(waker);
    }
}
