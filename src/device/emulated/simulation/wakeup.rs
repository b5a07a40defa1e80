//! How a simulation's loop sleeps, and how a change wakes it.
//!
//! The loop returns `Pending` when it has found nothing to do. A change that comes between its last check and that
//! return must not be lost; one that comes during a poll needs no waker, as the loop checks again before it sleeps.
//!
//! ```text
//!   loop:    begin ──► observe ──► look ──► found: do it ──► observe ...
//!                         ▲          └────► nothing: may_sleep ── yes ──► Pending
//!                         └───── no: changed since `observe` ──┘
//!   others:  change ──► notify: marks the change, and wakes the loop if it sleeps
//! ```
//!
//! Only the loop clears the mark, so `observe` is a method of [`LoopPoll`]: a call that waits for a stream runs work on
//! its own thread, and sees streams but no tasks. Code that makes a task ready or a stream runnable notifies the loop
//! after that.
//!
//! Independent of devices: `tests/loom/wakeup.rs` includes this file.

use std::task::Waker;

use crate::sync::{Mutex, discard, lock, wake};

/// The state of the loop as seen by what notifies it.
pub(crate) struct Wakeup(Mutex<State>);

struct State {
    /// The loop is in a poll and checks again by itself; otherwise it needs its waker.
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

    /// Begins a poll of the loop; `waker` is for a change that comes after it.
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

    /// The waker of the last poll, if it was not used. The caller [discards](discard) it.
    pub(crate) fn take_waker(&self) -> Option<Waker> {
        lock(&self.0).waker.take()
    }
}

impl LoopPoll<'_> {
    /// Called before the loop checks for work: a change from now on may be missed by that check, and keeps the loop
    /// awake.
    pub(crate) fn observe(&self) {
        lock(&self.0.0).changed = false;
    }

    /// Called after a check that has found nothing. If true the poll returns `Pending`, and the next change wakes the
    /// loop.
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
