//! [`BlankQueue`]: callers that wait for a blank envelope, in the order of asking.
//!
//! ```text
//!   a caller:     registered ──> looks ── none ──> waits           the operator:  polled ──> an envelope at home?
//!                     ^                              │                              ^           │ yes: the first is woken
//!                     └────────────── woken <────────┘                              └───────────┘
//! ```
//!
//! One is woken for an envelope, and the operator looks again after that: while one is still at home the next caller is woken. So
//! nothing is lost with a caller that was woken and is dropped, or is not polled. A caller that another one was quicker than
//! keeps its place. It is registered before it looks: an envelope that it does not see finds it here.
//!
//! Knows no device: `tests/loom/blanks.rs` includes it as it stands.

use std::{collections::BTreeMap, task::Waker};

use crate::sync::{Mutex, WakeList, discard, lock, wake};

/// See the module.
pub(super) struct BlankQueue(Mutex<Waiting>);

struct Waiting {
    /// By their numbers. One that is woken is taken out, until it registers again.
    callers: BTreeMap<u64, Waker>,
    /// The number that was given out last.
    number: u64,
}

/// A caller's place. Its waker is dropped with it.
pub(super) struct Caller<'a> {
    queue: &'a BlankQueue,
    number: u64,
}

impl BlankQueue {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Waiting { callers: BTreeMap::new(), number: 0 }))
    }

    pub(super) fn join(&self) -> Caller<'_> {
        let mut waiting = lock(&self.0);
        waiting.number += 1;
        Caller { queue: self, number: waiting.number }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).callers.is_empty()
    }

    /// Wakes the first. False if there is none.
    pub(super) fn wake_first(&self) -> bool {
        let first = lock(&self.0).callers.pop_first();
        first.map(|(_, waker)| wake(waker)).is_some()
    }

    /// Wakes all: nothing will come any more.
    pub(super) fn wake_all(&self) {
        let all = std::mem::take(&mut lock(&self.0).callers);
        all.into_values().collect::<WakeList>().wake();
    }
}

impl Caller<'_> {
    /// Keeps the waker. The caller looks after that.
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

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let gone = lock(&self.queue.0).callers.remove(&self.number);
        discard(gone);
    }
}
