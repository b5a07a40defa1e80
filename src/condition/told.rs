//! [`Told`]: a value that somebody else sets and a condition looks at.
//!
//! Whoever holds a [`Told`] may still say something, so an operator that waits for that waits for an event. When the last
//! one is dropped it is woken, and from then on waits for nothing that comes by itself.
//!
//! One who listens hears of every change, whatever the value was when it asked: an operator that waits for something else
//! meanwhile shows at once that it is paused, and ends at once if it is to run no more.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Waker},
};

use slab::Slab;

use super::Status;
use crate::sync::{Deferred, Mutex, lock, wake};

/// One who may say something.
pub(crate) struct Told<T: Copy>(Arc<Shared<T>>);

/// One who listens; counts as nobody who may say something.
pub(crate) struct Heard<T: Copy> {
    shared: Arc<Shared<T>>,
    /// Where its waker is kept, and since which wake.
    kept: Option<(u64, usize)>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    now: T,
    /// How many may still say something.
    tellers: usize,
    waiting: Slab<Waker>,
    /// How often they were all woken.
    woken: u64,
}

impl<T: Copy> Told<T> {
    pub(crate) fn new(now: T) -> Self {
        Self(Arc::new(Shared { state: Mutex::new(State { now, tellers: 1, waiting: Slab::new(), woken: 0 }) }))
    }

    pub(crate) fn get(&self) -> T {
        lock(&self.0.state).now
    }

    /// Says what `change` makes of the present value.
    pub(crate) fn set(&self, change: impl FnOnce(T) -> T) {
        let _later = Deferred::new();
        let mut state = lock(&self.0.state);
        state.now = change(state.now);
        state.wake();
    }

    pub(crate) fn heard(&self) -> Heard<T> {
        Heard { shared: self.0.clone(), kept: None }
    }
}

impl<T> State<T> {
    /// With the lock: a waker only marks an operator's task.
    fn wake(&mut self) {
        self.woken += 1;
        self.waiting.drain().for_each(wake);
    }
}

impl<T: Copy> Heard<T> {
    pub(crate) fn teller(&self) -> Told<T> {
        lock(&self.shared.state).tellers += 1;
        Told(self.shared.clone())
    }

    /// What `status` says of the value, or, where that is `None`, a wait for another one.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, status: impl FnOnce(T) -> Option<Status>) -> Status {
        let _later = Deferred::new();
        let mut state = lock(&self.shared.state);
        match self.kept {
            Some((woken, at)) if woken == state.woken => state.waiting[at].clone_from(cx.waker()),
            _ => self.kept = Some((state.woken, state.waiting.insert(cx.waker().clone()))),
        }
        let nothing_yet = if state.tellers == 0 { Status::Wait } else { Status::WaitEvent };
        status(state.now).unwrap_or(nothing_yet)
    }

    /// Sets what `change` makes of the present value, where that is something, and gives it. Whoever listens is woken if
    /// `tells` says so of it.
    pub(crate) fn change(&self, change: impl FnOnce(T) -> Option<T>, tells: impl FnOnce(T) -> bool) -> Option<T> {
        let _later = Deferred::new();
        let mut state = lock(&self.shared.state);
        state.now = change(state.now)?;
        if tells(state.now) {
            state.wake();
        }
        Some(state.now)
    }
}

impl<T: Copy> Clone for Told<T> {
    fn clone(&self) -> Self {
        self.heard().teller()
    }
}

impl<T: Copy> Clone for Heard<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), kept: None }
    }
}

/// It does not leave its waker behind.
impl<T: Copy> Drop for Heard<T> {
    fn drop(&mut self) {
        let _later = Deferred::new();
        let mut state = lock(&self.shared.state);
        if let Some((woken, at)) = self.kept
            && woken == state.woken
        {
            state.waiting.try_remove(at);
        }
    }
}

impl<T: Copy> Drop for Told<T> {
    fn drop(&mut self) {
        let _later = Deferred::new();
        let mut state = lock(&self.0.state);
        state.tellers -= 1;
        if state.tellers == 0 {
            state.wake();
        }
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for Told<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for Heard<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        lock(&self.shared.state).now.fmt(f)
    }
}
