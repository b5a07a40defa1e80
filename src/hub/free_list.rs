//! [`FreeList`]: a pool's free items, in the order of their return, and the tasks that wait for one.
//!
//! ```text
//!   take: one is there ──> taken                              put ──> in the list ──> every task that waits is woken
//!   poll: none is there ──> registered ──> woken, by any put ──> poll again
//! ```
//!
//! A waker is registered under the lock under which items are put back: either the poll finds the item, or `put`
//! finds the waker. The number of items is also stored outside the lock, as a hint for the many callers that only
//! read it; a task that goes to sleep does not rely on it. `put` wakes all waiters and the first to take gets the item,
//! so nothing is lost if a woken waiter is dropped. Each waiter has a number and at most one waker here, the latest,
//! until it is woken or [leaves](FreeList::leave): a future that is polled with changing wakers does not accumulate
//! them.
//!
//! Does not depend on any device: `tests/loom/pool.rs` includes this file unchanged.

use std::{collections::VecDeque, task::Waker};

use crate::sync::{AtomicUsize, Mutex, Ordering, WakeList, discard, lock};

/// See the [module](self).
pub(super) struct FreeList<T> {
    state: Mutex<State<T>>,
    /// Written under the lock.
    len: AtomicUsize,
}

struct State<T> {
    items: VecDeque<T>,
    /// By the waiter's number.
    waiting: Vec<(u64, Waker)>,
    number: u64,
}

impl<T> FreeList<T> {
    pub(super) fn new() -> Self {
        Self::of_len(0)
    }

    /// An empty list that reports an unlimited number of items: they are made as they are taken.
    pub(super) fn endless() -> Self {
        Self::of_len(usize::MAX)
    }

    fn of_len(len: usize) -> Self {
        let state = State { items: VecDeque::new(), waiting: Vec::new(), number: 0 };
        Self { state: Mutex::new(state), len: AtomicUsize::new(len) }
    }

    /// The number of items, as a hint.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn take(&self) -> Option<T> {
        let mut state = lock(&self.state);
        let item = state.items.pop_front()?;
        self.len.store(state.items.len(), Ordering::Release);
        Some(item)
    }

    #[inline]
    pub(super) fn put(&self, item: T) {
        self.extend([item]);
    }

    #[inline]
    pub(super) fn extend(&self, items: impl IntoIterator<Item = T>) {
        let mut state = lock(&self.state);
        state.items.extend(items);
        self.len.store(state.items.len(), Ordering::Release);
        if state.waiting.is_empty() {
            return;
        }
        let woken: WakeList = state.waiting.drain(..).map(|(_, waker)| waker).collect();
        drop(state);
        woken.wake();
    }

    /// Assigns a number to a new waiter, which ends with [`leave`](Self::leave).
    pub(super) fn waiter(&self) -> u64 {
        let mut state = lock(&self.state);
        state.number += 1;
        state.number
    }

    /// Whether there is an item. Otherwise registers the waker for the next one, in place of the waiter's previous
    /// waker.
    pub(super) fn poll_some(&self, waiter: u64, waker: &Waker) -> bool {
        let state = lock(&self.state);
        let is_known = |(of, known): &(u64, Waker)| *of == waiter && known.will_wake(waker);
        if !state.items.is_empty() || state.waiting.iter().any(is_known) {
            return !state.items.is_empty();
        }
        drop(state);
        // Cloned with no lock held. The second check finds items that were returned since.
        let mut new = waker.clone();
        let mut state = lock(&self.state);
        let is_there = !state.items.is_empty();
        if !is_there {
            match state.waiting.iter_mut().find(|(of, _)| *of == waiter) {
                Some((_, known)) => std::mem::swap(known, &mut new),
                None => {
                    state.waiting.push((waiter, new));
                    return false;
                }
            }
        }
        drop(state);
        discard(new);
        is_there
    }

    /// Removes a waiter and drops its waker.
    pub(super) fn leave(&self, waiter: u64) {
        let mut state = lock(&self.state);
        let at = state.waiting.iter().position(|(of, _)| *of == waiter);
        let gone = at.map(|at| state.waiting.swap_remove(at));
        drop(state);
        discard(gone);
    }
}
