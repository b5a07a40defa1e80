//! A watch value: [`WatchWriter`]s, its handles, set it, and a condition observes it through a [`WatchReader`].
//!
//! ```text
//!              poll                              set, or the last handle is dropped
//!   unknown ─────────> registered, in generation n ─────────────────────────────────> woken: unknown
//!      ^                    │ drop: deregistered                                        in generation n + 1
//!      └────────────────────┴──────────────────────────────────────────────────────────────┘
//! ```
//!
//! As long as a handle exists, the value can change from outside, so an operator that [waits](WatchValue::is_awaited)
//! for a change waits for an event. When the last handle is dropped, the observers are woken, since no event can end
//! their wait any more. When a handle exists again, they are woken again. If observers do not wait at the current
//! value, neither wakes them: a short-lived handle that only reads causes no wake-ups.
//!
//! Every change wakes every observer, whatever value it has polled: an operator that waits for something else publishes
//! at once that it is paused, and ends at once if its gate has ended.
//!
//! A waker is registered and the value is read under one lock, so a poll either sees a change or is woken by it. Wakers
//! are cloned, woken and dropped with no lock held: a poll with a new waker releases the lock to clone the waker, and
//! checks again.
//!
//! This file does not use operators: `tests/loom/watch.rs` includes it unchanged.

use std::{fmt, sync::Arc, task::Waker};

use slab::Slab;

use crate::sync::{Mutex, WakeList, discard, lock};

pub(crate) trait WatchValue: Copy {
    /// True if observers of this value wait for a change.
    fn is_awaited(self) -> bool;
}

/// A handle that sets the value.
pub(crate) struct WatchWriter<T: WatchValue>(Arc<Shared<T>>);

/// An observer of the value. It does not count as a handle that can change the value.
pub(crate) struct WatchReader<T: WatchValue> {
    shared: Arc<Shared<T>>,
    /// Where its waker is registered, if it is.
    registered: Option<WakerSlot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Observed<T> {
    pub(crate) value: T,
    /// True if a handle exists, so that the value can change.
    pub(crate) may_change: bool,
}

/// The slot of a waker in a generation of `wakers`.
#[derive(Clone, Copy)]
struct WakerSlot {
    generation: u64,
    at: usize,
}

struct Shared<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    value: T,
    handles: usize,
    wakers: Slab<Waker>,
    /// How often all wakers were taken out: slots of an earlier generation are void.
    generation: u64,
}

impl<T: WatchValue> WatchWriter<T> {
    pub(crate) fn new(value: T) -> Self {
        let state = State { value, handles: 1, wakers: Slab::new(), generation: 0 };
        Self(Arc::new(Shared { state: Mutex::new(state) }))
    }

    pub(crate) fn get(&self) -> T {
        lock(&self.0.state).value
    }

    /// Sets the value to the result of `change`, and wakes every observer.
    pub(crate) fn set(&self, change: impl FnOnce(T) -> T) {
        let mut state = lock(&self.0.state);
        state.value = change(state.value);
        let woken = state.take_wakers();
        drop(state);
        woken.wake();
    }

    pub(crate) fn reader(&self) -> WatchReader<T> {
        WatchReader { shared: self.0.clone(), registered: None }
    }
}

impl<T: WatchValue> State<T> {
    /// Takes the wakers, to be woken once the lock is released.
    fn take_wakers(&mut self) -> WakeList {
        self.generation += 1;
        self.wakers.drain().collect()
    }

    /// Takes the wakers if observers wait for a change. Called when the number of handles becomes 1 or 0.
    fn take_waiting(&mut self) -> WakeList {
        if self.value.is_awaited() { self.take_wakers() } else { WakeList::new() }
    }

    /// The registered waker, unless it was taken out.
    fn registered(&mut self, registered: Option<WakerSlot>) -> Option<&mut Waker> {
        let WakerSlot { generation, at } = registered?;
        if generation == self.generation { self.wakers.get_mut(at) } else { None }
    }
}

impl<T: WatchValue> WatchReader<T> {
    /// Creates a handle. If there was none, every waiting observer is woken, since the value can change again.
    pub(crate) fn writer(&self) -> WatchWriter<T> {
        let mut state = lock(&self.shared.state);
        state.handles += 1;
        let woken = if state.handles == 1 { state.take_waiting() } else { WakeList::new() };
        drop(state);
        let handle = WatchWriter(self.shared.clone());
        woken.wake();
        handle
    }

    /// Returns the value and registers the waker for the next change.
    pub(crate) fn poll(&mut self, waker: &Waker) -> Observed<T> {
        let mut state = lock(&self.shared.state);
        let mut replaced = None;
        if !state.registered(self.registered).is_some_and(|registered| registered.will_wake(waker)) {
            drop(state);
            let new = waker.clone();
            state = lock(&self.shared.state);
            // After a change in between, the slot is void, and the value read below is the new one.
            match state.registered(self.registered) {
                Some(registered) => replaced = Some(std::mem::replace(registered, new)),
                None => {
                    let (generation, at) = (state.generation, state.wakers.insert(new));
                    self.registered = Some(WakerSlot { generation, at });
                }
            }
        }
        let seen = Observed { value: state.value, may_change: state.handles > 0 };
        drop(state);
        replaced.into_iter().for_each(discard);
        seen
    }

    /// Sets the value to the result of `change`, if it is not `None`, and returns it. Wakes every observer if
    /// `notifies` returns true for the new value.
    pub(crate) fn change(&self, change: impl FnOnce(T) -> Option<T>, notifies: impl FnOnce(T) -> bool) -> Option<T> {
        let mut state = lock(&self.shared.state);
        let value = change(state.value)?;
        state.value = value;
        let woken = if notifies(value) { state.take_wakers() } else { WakeList::new() };
        drop(state);
        woken.wake();
        Some(value)
    }
}

impl<T: WatchValue> Clone for WatchWriter<T> {
    fn clone(&self) -> Self {
        self.reader().writer()
    }
}

impl<T: WatchValue> Clone for WatchReader<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), registered: None }
    }
}

impl<T: WatchValue> Drop for WatchReader<T> {
    fn drop(&mut self) {
        let Some(registered) = self.registered else { return };
        let mut state = lock(&self.shared.state);
        let current = registered.generation == state.generation;
        let left = if current { state.wakers.try_remove(registered.at) } else { None };
        drop(state);
        left.into_iter().for_each(discard);
    }
}

impl<T: WatchValue> Drop for WatchWriter<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.handles -= 1;
        let woken = if state.handles == 0 { state.take_waiting() } else { WakeList::new() };
        drop(state);
        woken.wake();
    }
}

impl<T: WatchValue + fmt::Debug> fmt::Debug for WatchWriter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: WatchValue + fmt::Debug> fmt::Debug for WatchReader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = lock(&self.shared.state).value;
        value.fmt(f)
    }
}
