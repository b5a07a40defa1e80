//! [`Told`]: a watch value. Handles set it, and a condition observes it through a [`Heard`].
//!
//! ```text
//!              poll                              set, or the last handle is dropped
//!   unknown ─────────> registered, in generation n ─────────────────────────────────> woken: unknown
//!      ^                    │ drop: deregistered                                        in generation n + 1
//!      └────────────────────┴──────────────────────────────────────────────────────────────┘
//! ```
//!
//! As long as a handle exists the value may change from outside, so an operator that [waits](Value::is_awaited) for that waits for
//! an event. When the last handle is dropped the observers are woken, and from then on wait for nothing that comes by itself, until
//! there is a handle again, which wakes them. With a value that lets them go on, neither wakes any: a handle that is made for a look
//! is no news.
//!
//! An observer is woken by every change, whatever the value was when it polled: an operator that waits for something else
//! meanwhile shows at once that it is paused, and ends at once if its gate has ended.
//!
//! A waker is registered and the value read under one lock: so a change is either seen by the poll or wakes it. Wakers are
//! cloned, woken and dropped with no lock held; a poll with a new waker releases the lock to clone it, and looks again.
//!
//! Knows no operator: `tests/loom/watch.rs` includes it as it stands.

use std::{fmt, sync::Arc, task::Waker};

use slab::Slab;

use crate::sync::{Mutex, WakeList, discard, lock};

/// A value to be watched.
pub(crate) trait Value: Copy {
    /// Its observers wait for another one.
    fn is_awaited(self) -> bool;
}

/// A handle that sets the value.
pub(crate) struct Told<T: Value>(Arc<Shared<T>>);

/// An observer of the value. It is no handle: it keeps no other observer waiting.
pub(crate) struct Heard<T: Value> {
    shared: Arc<Shared<T>>,
    /// Where its waker is registered, and in which generation.
    registered: Option<Registered>,
}

/// What an observer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen<T> {
    pub(crate) value: T,
    /// A handle exists: the value may change.
    pub(crate) may_change: bool,
}

#[derive(Clone, Copy)]
struct Registered {
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
    /// Counts how often all wakers were taken out: places of an earlier generation are void.
    generation: u64,
}

impl<T: Value> Told<T> {
    pub(crate) fn new(value: T) -> Self {
        let state = State { value, handles: 1, wakers: Slab::new(), generation: 0 };
        Self(Arc::new(Shared { state: Mutex::new(state) }))
    }

    pub(crate) fn get(&self) -> T {
        lock(&self.0.state).value
    }

    /// Sets what `change` makes of the present value, and wakes every observer.
    pub(crate) fn set(&self, change: impl FnOnce(T) -> T) {
        let mut state = lock(&self.0.state);
        state.value = change(state.value);
        let woken = state.take_wakers();
        drop(state);
        woken.wake();
    }

    pub(crate) fn heard(&self) -> Heard<T> {
        Heard { shared: self.0.clone(), registered: None }
    }
}

impl<T: Value> State<T> {
    /// To be woken once the lock is released.
    fn take_wakers(&mut self) -> WakeList {
        self.generation += 1;
        self.wakers.drain().collect()
    }

    /// The same where observers wait for a change, and there is a handle again, or none any more.
    fn take_waiting(&mut self) -> WakeList {
        if self.value.is_awaited() { self.take_wakers() } else { WakeList::new() }
    }

    /// The registered waker, unless it was taken out.
    fn registered(&mut self, registered: Option<Registered>) -> Option<&mut Waker> {
        let Registered { generation, at } = registered?;
        if generation == self.generation { self.wakers.get_mut(at) } else { None }
    }
}

impl<T: Value> Heard<T> {
    /// A new handle. Where there was none, every observer that waits is woken: the value may change again.
    pub(crate) fn teller(&self) -> Told<T> {
        let mut state = lock(&self.shared.state);
        state.handles += 1;
        let woken = if state.handles == 1 { state.take_waiting() } else { WakeList::new() };
        drop(state);
        let handle = Told(self.shared.clone());
        woken.wake();
        handle
    }

    /// The value. The waker is registered for the next change.
    pub(crate) fn poll(&mut self, waker: &Waker) -> Seen<T> {
        let mut state = lock(&self.shared.state);
        let mut replaced = None;
        if !state.registered(self.registered).is_some_and(|registered| registered.will_wake(waker)) {
            drop(state);
            let new = waker.clone();
            state = lock(&self.shared.state);
            // A change may have come in between: then the place is void, and the value read below is the new one.
            match state.registered(self.registered) {
                Some(registered) => replaced = Some(std::mem::replace(registered, new)),
                None => {
                    let (generation, at) = (state.generation, state.wakers.insert(new));
                    self.registered = Some(Registered { generation, at });
                }
            }
        }
        let seen = Seen { value: state.value, may_change: state.handles > 0 };
        drop(state);
        replaced.into_iter().for_each(discard);
        seen
    }

    /// Sets what `change` makes of the present value, where that is something, and returns it. Every observer is woken if
    /// `notifies` says so of the new value.
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

impl<T: Value> Clone for Told<T> {
    fn clone(&self) -> Self {
        self.heard().teller()
    }
}

impl<T: Value> Clone for Heard<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), registered: None }
    }
}

/// Its waker is deregistered.
impl<T: Value> Drop for Heard<T> {
    fn drop(&mut self) {
        let Some(registered) = self.registered else { return };
        let mut state = lock(&self.shared.state);
        let current = registered.generation == state.generation;
        let left = if current { state.wakers.try_remove(registered.at) } else { None };
        drop(state);
        left.into_iter().for_each(discard);
    }
}

impl<T: Value> Drop for Told<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.handles -= 1;
        let woken = if state.handles == 0 { state.take_waiting() } else { WakeList::new() };
        drop(state);
        woken.wake();
    }
}

impl<T: Value + fmt::Debug> fmt::Debug for Told<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: Value + fmt::Debug> fmt::Debug for Heard<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = lock(&self.shared.state).value;
        value.fmt(f)
    }
}
