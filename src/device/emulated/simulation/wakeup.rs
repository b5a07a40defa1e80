//! How a simulation's loop sleeps, and how a change wakes it.
//!
//! The loop returns `Pending` when it has found nothing to do. A change between its last check and that return must not
//! be lost. A change during a poll needs no waker, as the loop checks again before it sleeps.
//!
//! ```text
//!   loop:    begin ──► observe ──► check ─► found: do it ──► observe ...
//!                         ▲          └────► nothing: may_sleep ── yes ──► Pending
//!                         └───── no: changed since `observe` ──┘
//!   others:  change ──► notify: marks the change, and wakes the loop if it sleeps
//! ```
//!
//! Only the loop clears the mark, so `observe` is a method of [`LoopPoll`]: a call that waits for a stream runs work on
//! its own thread, but checks only streams and no tasks. Code that makes a task ready or a stream runnable notifies the
//! loop afterwards.
//!
//! Independent of devices: `tests/loom/wakeup.rs` includes this file.

use std::task::Waker;

use crate::sync::{Mutex, discard, lock, wake};

/// The state of the loop that notifying threads see.
pub(crate) struct Wakeup(Mutex<State>);

struct State {
    /// The loop is being polled and will check again; otherwise it needs its waker.
    polling: bool,
    /// Something has changed since the loop last checked.
    changed: bool,
    waker: Option<Waker>,
}

pub(crate) struct LoopPoll<'a>(&'a Wakeup);

impl Wakeup {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { polling: false, changed: false, waker: None }))
    }

    /// Begins a poll of the loop. `waker` is woken by the first change after the poll.
    pub(crate) fn begin(&self, waker: Waker) -> LoopPoll<'_> {
        let mut state = lock(&self.0);
        state.polling = true;
        let old = state.waker.replace(waker);
        drop(state);
        discard(old);
        LoopPoll(self)
    }

    pub(crate) fn notify(&self) {
        let mut state = lock(&self.0);
        state.changed = true;
        let waker = if state.polling { None } else { state.waker.take() };
        drop(state);
        waker.into_iter().for_each(wake);
    }

    /// The waker of the last poll, if it was not woken. The caller [discards](discard) it.
    pub(crate) fn take_waker(&self) -> Option<Waker> {
        lock(&self.0).waker.take()
    }
}

impl LoopPoll<'_> {
    /// Called before the loop checks for work. A change from now on keeps the loop awake, as the check might miss it.
    pub(crate) fn observe(&self) {
        lock(&self.0.0).changed = false;
    }

    /// Called after a check that found nothing. If this returns true, the poll must return `Pending`, and the next
    /// change wakes the loop.
    pub(crate) fn may_sleep(&self) -> bool {
        let mut state = lock(&self.0.0);
        state.polling = state.changed;
        !state.changed
    }
}

impl Drop for LoopPoll<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).polling = false;
    }
}
