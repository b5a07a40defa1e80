//! [`FreeList`]: what a pool has at hand, the longest there first, and the tasks that wait for some of it.
//!
//! ```text
//!   take: one is there ──> taken                              put ──> in the list ──> every task that waits is woken
//!   poll: none is there ──> registered ──> woken, by any put ──> poll again
//! ```
//!
//! A waker is registered under the lock under which an item is put back: so either the poll finds the item, or `put` finds
//! the waker. How many there are is also kept beside the lock, as a hint for the many who only look; a task that goes to
//! sleep does not rely on it. All are woken and the quickest has it, so one that is woken and dropped loses nothing. Each
//! waiter has a number and at most one waker here, the latest, until it is woken or [leaves](FreeList::leave): a future that
//! is polled with ever other wakers lets none pile up.
//!
//! Knows no device: `tests/loom/pool.rs` includes it as it stands.

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
    /// The number that was given out last.
    number: u64,
}

impl<T> FreeList<T> {
    pub(super) fn new() -> Self {
        Self::of_len(0)
    }

    /// An empty one that shows no end of items: they are made as they are taken.
    pub(super) fn endless() -> Self {
        Self::of_len(usize::MAX)
    }

    fn of_len(len: usize) -> Self {
        let state = State { items: VecDeque::new(), waiting: Vec::new(), number: 0 };
        Self { state: Mutex::new(state), len: AtomicUsize::new(len) }
    }

    /// How many there are: a hint.
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

    /// Puts one back.
    #[inline]
    pub(super) fn put(&self, item: T) {
        self.extend([item]);
    }

    /// So many more.
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

    /// A number for one more waiter, which gives it back with [`leave`](Self::leave).
    pub(super) fn waiter(&self) -> u64 {
        let mut state = lock(&self.state);
        state.number += 1;
        state.number
    }

    /// True if there is one. Otherwise the waker is registered for the next that comes back, in place of the waiter's last.
    pub(super) fn poll_some(&self, waiter: u64, waker: &Waker) -> bool {
        let state = lock(&self.state);
        let is_known = |(of, known): &(u64, Waker)| *of == waiter && known.will_wake(waker);
        if !state.items.is_empty() || state.waiting.iter().any(is_known) {
            return !state.items.is_empty();
        }
        drop(state);
        // Cloned with no lock held: what came back meanwhile is found by the second look.
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

    /// A waiter waits no longer: its waker is dropped.
    pub(super) fn leave(&self, waiter: u64) {
        let mut state = lock(&self.state);
        let at = state.waiting.iter().position(|(of, _)| *of == waiter);
        let gone = at.map(|at| state.waiting.swap_remove(at));
        drop(state);
        discard(gone);
    }
}
