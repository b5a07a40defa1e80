//! [`WaitQueue`]: the tasks that wait for memory of one heap; and [`WaiterCount`]: the number of tasks that wait for
//! memory of a device.
//!
//! ```text
//!   in the queue:    join ──> first? ── yes ──> checks ── memory is free ──> leave, which wakes the next
//!                      ^        │ no              │ none
//!                      └── woken by leave, notify ─┘
//!   beside it:       watch ──> checks ── none ──> woken by notify ──> watch ──> ...
//! ```
//!
//! The queue is first come, first served, so that small requests cannot overtake a large one for ever. Conditions of
//! operators are watchers beside the queue: they take no memory until their run starts, and are woken by every change.
//!
//! A task is first counted and registered, and then checks the heap. Memory is first put back under the heap's lock,
//! and then `notify` checks for waiting tasks. So either the task sees the memory, or `notify` sees the task. Most
//! memory is freed while no task waits, which costs one load.
//!
//! A waker is removed when it is woken, and registered again by the next poll. It is cloned, woken and dropped with no
//! lock held.
//!
//! This file does not use a device: `tests/loom/memory.rs` includes it unchanged.

use std::{collections::BTreeMap, task::Waker};

use crate::sync::{AtomicUsize, Mutex, Ordering, WakeList, discard, lock};

/// The number of tasks that wait for memory of a device, in any of its heaps.
#[derive(Debug)]
pub(super) struct WaiterCount(AtomicUsize);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct WaitQueue(Mutex<State>);

#[derive(Debug)]
struct State {
    /// In order of arrival. `None` while the task is being woken.
    queue: BTreeMap<u64, Option<Waker>>,
    watchers: BTreeMap<u64, Option<Waker>>,
    /// The next key, for either map.
    next: u64,
}

/// The registration of a task in the queue or beside it, if it has one.
#[derive(Debug, Default)]
pub(super) struct WaitSlot(Option<WaitKey>);

#[derive(Clone, Copy, Debug)]
enum WaitKey {
    Queue(u64),
    Watcher(u64),
}

impl WaiterCount {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Default for WaiterCount {
    fn default() -> Self {
        Self::new()
    }
}

impl WaitQueue {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { queue: BTreeMap::new(), watchers: BTreeMap::new(), next: 0 }))
    }

    /// Registers the waker, at the queue's end if the task is not in it. True if the task is the first.
    pub(super) fn join(&self, waiters: &WaiterCount, slot: &mut WaitSlot, waker: &Waker) -> bool {
        self.register(waiters, slot, waker, |state, number| {
            state.queue.insert(number, None);
            WaitKey::Queue(number)
        })
    }

    pub(super) fn watch(&self, waiters: &WaiterCount, slot: &mut WaitSlot, waker: &Waker) {
        self.register(waiters, slot, waker, |state, number| {
            state.watchers.insert(number, None);
            WaitKey::Watcher(number)
        });
    }

    fn register(
        &self,
        waiters: &WaiterCount,
        slot: &mut WaitSlot,
        waker: &Waker,
        enter: fn(&mut State, u64) -> WaitKey,
    ) -> bool {
        let mut state = lock(&self.0);
        let mut replaced = None;
        if !state.waker_of(slot).is_some_and(|known| known.as_ref().is_some_and(|known| known.will_wake(waker))) {
            drop(state);
            let new = waker.clone();
            state = lock(&self.0);
            if slot.0.is_none() {
                let number = state.next;
                state.next += 1;
                slot.0 = Some(enter(&mut state, number));
                waiters.0.fetch_add(1, Ordering::SeqCst);
            }
            replaced = state.waker_of(slot).and_then(|known| known.replace(new));
        }
        let front = state.queue.first_key_value().map(|(front, _)| *front);
        let first = matches!((front, slot.0), (Some(front), Some(WaitKey::Queue(own))) if front == own);
        drop(state);
        replaced.into_iter().for_each(discard);
        first
    }

    /// Removes the registration. True if the task was in the queue: the caller must then wake the next task.
    #[must_use]
    pub(super) fn leave(&self, waiters: &WaiterCount, slot: &mut WaitSlot) -> bool {
        let Some(at) = slot.0.take() else { return false };
        let mut state = lock(&self.0);
        let left = match at {
            WaitKey::Queue(number) => state.queue.remove(&number),
            WaitKey::Watcher(number) => state.watchers.remove(&number),
        };
        drop(state);
        waiters.0.fetch_sub(1, Ordering::SeqCst);
        left.flatten().into_iter().for_each(discard);
        matches!(at, WaitKey::Queue(_))
    }

    /// Takes the wakers of the first task in the queue and of all watchers, to be woken.
    pub(super) fn first(&self) -> WakeList {
        let mut state = lock(&self.0);
        let State { queue, watchers, .. } = &mut *state;
        let first = queue.values_mut().next().and_then(Option::take);
        let woken: WakeList = first.into_iter().chain(watchers.values_mut().filter_map(Option::take)).collect();
        drop(state);
        woken
    }

    /// Wakes all tasks in the queue and all watchers, as their wait cannot succeed.
    pub(super) fn wake_all(&self) {
        let mut state = lock(&self.0);
        let State { queue, watchers, .. } = &mut *state;
        let woken: WakeList = queue.values_mut().chain(watchers.values_mut()).filter_map(Option::take).collect();
        drop(state);
        woken.wake();
    }

    pub(super) fn has_waiters(&self) -> bool {
        let state = lock(&self.0);
        !(state.queue.is_empty() && state.watchers.is_empty())
    }

    /// True if no task waits in the queue. Only then may watchers take memory.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).queue.is_empty()
    }
}

impl State {
    fn waker_of(&mut self, slot: &WaitSlot) -> Option<&mut Option<Waker>> {
        match slot.0? {
            WaitKey::Queue(number) => self.queue.get_mut(&number),
            WaitKey::Watcher(number) => self.watchers.get_mut(&number),
        }
    }
}
