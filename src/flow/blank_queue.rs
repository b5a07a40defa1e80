//! [`BlankQueue`]: callers that wait for blank envelopes, in the order of their calls.
//!
//! ```text
//!   a caller:     registers ──> checks ── too few ──> waits        the operator:  polled ──> enough in the pool?
//!                     ^                                 │                             ^           │ yes: wakes the first
//!                     └────────── is woken <────────────┘                             └───────────┘ caller that needs no
//!                                                                                                   more than those
//! ```
//!
//! A caller takes all envelopes that it needs in one step, or none: callers that each hold some of them and wait for
//! the rest would wait for each other forever.
//!
//! One caller is woken at a time, and then the operator checks again: while there are enough envelopes for a further
//! caller, it is woken too. So no wake is lost if a caller that was woken is dropped or not polled. If another caller
//! takes the envelopes first, the woken caller keeps its place. A caller registers before it checks: if an envelope is
//! returned after the check, the caller is found here. Among callers that need the same number, the first is woken
//! first.
//!
//! Does not depend on a device: `tests/loom/blanks.rs` includes this file unchanged.

use std::{collections::BTreeMap, task::Waker};

use crate::sync::{Mutex, WakeList, discard, lock, wake};

/// See the [module](self).
pub(super) struct BlankQueue(Mutex<QueuedCallers>);

struct QueuedCallers {
    /// By the number of envelopes that they need, then by their own numbers. A caller that is woken is removed until it
    /// registers again. No entry is empty.
    callers: BTreeMap<usize, BTreeMap<u64, Waker>>,
    /// The last number that was assigned.
    number: u64,
}

/// A caller's place in the queue. Its waker is dropped with it.
pub(super) struct QueuedCaller<'a> {
    queue: &'a BlankQueue,
    needs: usize,
    number: u64,
}

impl QueuedCallers {
    fn remove(&mut self, needs: usize, number: u64) -> Option<Waker> {
        let same = self.callers.get_mut(&needs)?;
        let waker = same.remove(&number);
        if same.is_empty() {
            self.callers.remove(&needs);
        }
        waker
    }

    /// The first of the callers that need no more than `free` envelopes.
    fn first_within(&self, free: usize) -> Option<(usize, u64)> {
        let firsts = self.callers.range(..=free).filter_map(|(needs, same)| Some((*needs, *same.first_key_value()?.0)));
        firsts.min_by_key(|(_, number)| *number)
    }
}

impl BlankQueue {
    pub(super) fn new() -> Self {
        Self(Mutex::new(QueuedCallers { callers: BTreeMap::new(), number: 0 }))
    }

    /// The place of a caller that needs this many envelopes at the same time.
    pub(super) fn join(&self, needs: usize) -> QueuedCaller<'_> {
        let mut waiting = lock(&self.0);
        waiting.number += 1;
        QueuedCaller { queue: self, needs, number: waiting.number }
    }

    /// The smallest number of envelopes that a caller needs. `None` if no caller waits.
    pub(super) fn least_needed(&self) -> Option<usize> {
        lock(&self.0).callers.first_key_value().map(|(needs, _)| *needs)
    }

    /// Wakes the first caller that needs no more than `free` envelopes. False if there is none.
    pub(super) fn wake_first(&self, free: usize) -> bool {
        let mut waiting = lock(&self.0);
        let first = waiting.first_within(free).and_then(|(needs, number)| waiting.remove(needs, number));
        drop(waiting);
        first.map(wake).is_some()
    }

    /// Wakes all callers: no envelope will be returned any more.
    pub(super) fn wake_all(&self) {
        let all = std::mem::take(&mut lock(&self.0).callers);
        all.into_values().flat_map(BTreeMap::into_values).collect::<WakeList>().wake();
    }
}

impl QueuedCaller<'_> {
    /// Registers the waker. The caller must check for its envelopes after this.
    pub(super) fn register(&self, waker: &Waker) {
        let is_known = |same: &BTreeMap<u64, Waker>| same.get(&self.number).is_some_and(|known| known.will_wake(waker));
        if lock(&self.queue.0).callers.get(&self.needs).is_some_and(is_known) {
            return;
        }
        // Cloned and dropped with no lock held.
        let new = waker.clone();
        let old = lock(&self.queue.0).callers.entry(self.needs).or_default().insert(self.number, new);
        discard(old);
    }
}

impl Drop for QueuedCaller<'_> {
    fn drop(&mut self) {
        let waker = lock(&self.queue.0).remove(self.needs, self.number);
        discard(waker);
    }
}
