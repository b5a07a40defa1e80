//! [`Permit`]: allows one run at a time of an operator that is stepped through.
//!
//! ```text
//!             grant             a run begins             it has ended
//!   NONE ───────────> GRANTED ─────────────────> BEGUN ────────────────> RAN
//!    ^                  │ its conditions are       │ it waits in its        │
//!    │                  v not ready                v middle: reported,      │
//!    ├──────────── REFUSED                           and it stays BEGUN     │
//!    └── outcome ───────────────────────────────────────────────────────────┘
//! ```
//!
//! Used only while a flow is stepped, by one task at a time, so the cost of a lock per access does not matter.

use std::task::{Context, Poll, Waker};

use crate::{
    stream::Ticket,
    sync::{Mutex, MutexGuard, discard, lock, wake},
};

/// What an operator waits for until it is granted a step, in words.
pub(crate) const TURN: &str = "its turn to be stepped";

#[derive(Debug, Default)]
pub(crate) struct Permit(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: State,
    /// The operator waits for its next run, and has requested it here.
    awaits_run: bool,
    /// It has requested the run in the current poll. A wait that exists but is not polled does not see the permit.
    requested: bool,
    /// It has a loop of its own, and might wait for something else besides its next run.
    among_others: bool,
    /// It waits only for this permit.
    awaits_nothing_else: bool,
    /// It has had a new waker since its request: a kept clone of that waker is a wait that is still pending.
    has_new_waker: bool,
    /// The tickets of the last work of the run.
    last: Vec<Ticket>,
    /// The run waits for other operators.
    waits: bool,
    /// The operator was woken by something other than a step, or a run that began before the steps has ended.
    woken: bool,
    /// The operator has ended: its last run is reported first.
    ended: bool,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    None,
    Granted,
    Refused,
    Begun,
    Ran,
}

/// The result of a step.
#[derive(Debug)]
pub(crate) enum StepOutcome {
    /// The operator cannot run now; or it has a loop of its own, and does something other than wait for its next run.
    Refused,
    /// A run has begun, and waits for other operators in its middle.
    Waits,
    /// The run has ended; these are the tickets of its last work.
    Ran(Vec<Ticket>),
    Ended,
}

impl Permit {
    /// Permits one run, if the operator's conditions are ready. A run that is in progress continues.
    pub(crate) fn grant(&self) {
        let mut inner = lock(&self.0);
        match inner.state {
            State::None => inner.state = State::Granted,
            // Its next poll shows whether it still waits.
            State::Begun => inner.waits = false,
            _ => {}
        }
    }

    /// Requests the operator's next run. True if it may begin. `among_others`: the operator might wait for something
    /// else, too. `busy`: a part of its last run has not ended; otherwise `last` returns the tickets of that run's
    /// work.
    pub(super) fn request_run(&self, among_others: bool, busy: bool, last: impl FnOnce() -> Vec<Ticket>) -> bool {
        let mut inner = lock(&self.0);
        (inner.awaits_run, inner.requested, inner.among_others, inner.awaits_nothing_else) =
            (true, true, among_others, false);
        match inner.state {
            State::Granted => return true,
            State::Begun if !busy => {
                // Not under the lock, since `last` queries the operator's streams. Only the operator calls this, so the
                // state is unchanged afterwards.
                drop(inner);
                let last = last();
                inner = lock(&self.0);
                (inner.last, inner.state, inner.woken) = (last, State::Ran, true);
            }
            State::Begun => {}
            State::None | State::Refused | State::Ran => inner.woken = true,
        }
        notify(inner);
        false
    }

    /// Records that a run begins: the conditions were ready.
    pub(super) fn begin(&self) {
        let mut inner = lock(&self.0);
        (inner.state, inner.awaits_run, inner.requested, inner.waits) = (State::Begun, false, false, false);
        inner.has_new_waker = false;
    }

    /// Records that the conditions are not ready: the step is refused, which is reported after the poll.
    pub(super) fn refuse(&self) {
        let mut inner = lock(&self.0);
        if inner.state == State::Granted {
            inner.state = State::Refused;
        }
    }

    /// Withdraws the request for the next run: the wait was dropped, or there is no next run.
    pub(super) fn withdraw(&self) {
        let mut inner = lock(&self.0);
        (inner.awaits_run, inner.requested, inner.has_new_waker) = (false, false, false);
    }

    /// Called after a poll of the operator that was pending. `waits`: it waits in the middle of a run for other
    /// operators. `is_kept`: clones of its waker are kept. True if it needs a new waker for its next poll: a kept clone
    /// might be left over from a wait that was dropped.
    pub(super) fn polled(&self, waits: bool, is_kept: bool) -> bool {
        let mut inner = lock(&self.0);
        inner.awaits_run = std::mem::take(&mut inner.requested);
        inner.awaits_nothing_else = inner.awaits_run && !(inner.among_others && is_kept);
        let renews = inner.awaits_run && !inner.awaits_nothing_else && !inner.has_new_waker;
        // Once per request, since the operator is polled again whenever another operator moves.
        inner.has_new_waker = inner.awaits_run && (inner.has_new_waker || renews);
        match inner.state {
            // `grant` clears `waits`: only a poll that something else has caused counts as a wake.
            State::Begun => inner.woken |= std::mem::replace(&mut inner.waits, waits),
            // It is polled once more, with the new waker.
            _ if renews => inner.woken = true,
            State::Refused if inner.awaits_run => {}
            _ if inner.awaits_run => return false,
            // It has a loop of its own, and does something other than wait for its next run.
            State::Granted => inner.state = State::Refused,
            _ => inner.woken = true,
        }
        notify(inner);
        renews
    }

    /// Records the tickets of the last run's work, as the operator is about to end.
    pub(super) fn leave(&self, last: Vec<Ticket>) {
        lock(&self.0).last = last;
    }

    pub(super) fn end(&self) {
        let mut inner = lock(&self.0);
        (inner.ended, inner.woken) = (true, true);
        if inner.state == State::Begun {
            inner.state = State::Ran;
        }
        notify(inner);
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.0).ended
    }

    /// True if the operator waits for its permit and for nothing else.
    pub(crate) fn awaits_only_permit(&self) -> bool {
        let inner = lock(&self.0);
        inner.awaits_run && inner.awaits_nothing_else
    }

    /// Polls for the result of the step.
    pub(crate) fn poll_outcome(&self, cx: &mut Context<'_>) -> Poll<StepOutcome> {
        self.poll(cx, |inner| match inner.state {
            State::Refused if !inner.ended => {
                inner.state = State::None;
                Poll::Ready(StepOutcome::Refused)
            }
            State::Ran => {
                inner.state = State::None;
                Poll::Ready(StepOutcome::Ran(std::mem::take(&mut inner.last)))
            }
            _ if inner.ended => Poll::Ready(StepOutcome::Ended),
            State::Begun if inner.waits => Poll::Ready(StepOutcome::Waits),
            _ => Poll::Pending,
        })
    }

    /// Clears the record of earlier wakes.
    pub(crate) fn clear_woken(&self) {
        lock(&self.0).woken = false;
    }

    /// Ready once something has woken the operator.
    pub(crate) fn poll_woken(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll(cx, |inner| if inner.woken { Poll::Ready(()) } else { Poll::Pending })
    }

    /// Registers the waker if `ask` returns pending.
    fn poll<T>(&self, cx: &mut Context<'_>, ask: impl FnOnce(&mut Inner) -> Poll<T>) -> Poll<T> {
        // Cloned before the lock is taken, and the waker that it replaces is dropped after it is released: both are
        // user code.
        let mut waker = Some(cx.waker().clone());
        let mut inner = lock(&self.0);
        let answer = ask(&mut inner);
        if answer.is_pending() {
            std::mem::swap(&mut inner.waker, &mut waker);
        }
        drop(inner);
        discard(waker);
        answer
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        discard(self.waker.take());
    }
}

/// Wakes the waiting task, after the lock is released.
fn notify(mut inner: MutexGuard<'_, Inner>) {
    let waker = inner.waker.take();
    drop(inner);
    waker.into_iter().for_each(wake);
}
