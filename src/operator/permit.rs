//! [`Permit`]: one run at a time of an operator that is stepped through.
//!
//! ```text
//!             ask               a run begins             it has ended
//!   NONE ───────────> ASKED ───────────────────> BEGUN ────────────────> RAN
//!    ^                  │ its conditions are       │ it waits in its        │
//!    │                  v not ready                v middle: told, and      │
//!    ├──────────── REFUSED                           BEGUN it stays         │
//!    └── outcome ───────────────────────────────────────────────────────────┘
//! ```
//!
//! Used only where somebody steps, and by one at a time: a lock for each word costs nobody anything.

use std::task::{Context, Poll, Waker};

use crate::{
    stream::Ticket,
    sync::{Mutex, MutexGuard, discard, lock, wake},
};

/// What an operator waits for that has not been asked.
pub(crate) const TURN: &str = "its turn to be stepped";

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Permit(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: State,
    /// It waits for its next run, and asks here before that.
    at_door: bool,
    /// It has asked in the present poll. A wait that is kept and not polled does not learn that it may run.
    asks: bool,
    /// It has a loop of its own, and may wait for something else beside its next run.
    among_others: bool,
    /// It waits for nothing else.
    alone: bool,
    /// It has had a new waker since it came here: what keeps a clone is still waited for.
    has_new_waker: bool,
    /// The last work of the run.
    last: Vec<Ticket>,
    /// The run waits for others.
    waits: bool,
    /// It was woken by something else than the question whether it may run, or what it had begun before has ended.
    stirred: bool,
    /// The operator has ended: its last run is told first.
    ended: bool,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    None,
    Asked,
    Refused,
    Begun,
    Ran,
}

/// What became of it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It cannot run now; or it has no runs, and does by itself what it does.
    Refused,
    /// A run has begun, and waits in its middle for others.
    Waits,
    /// It has run; this is its last work.
    Ran(Vec<Ticket>),
    /// It has ended.
    Ended,
}

impl Permit {
    /// One run, if its conditions are ready. One that is under way goes on.
    pub(crate) fn ask(&self) {
        let mut inner = lock(&self.0);
        match inner.state {
            State::None => inner.state = State::Asked,
            // Whether it waits still is known from its next poll.
            State::Begun => inner.waits = false,
            _ => {}
        }
    }

    /// It wants to run. True if it may. `among_others`: it may wait for something else, too. `busy`: not all of its last run has
    /// ended; otherwise `last` is that one's work.
    pub(super) fn come(&self, among_others: bool, busy: bool, last: impl FnOnce() -> Vec<Ticket>) -> bool {
        let mut inner = lock(&self.0);
        (inner.at_door, inner.asks, inner.among_others, inner.alone) = (true, true, among_others, false);
        match inner.state {
            State::Asked => return true,
            State::Begun if !busy => {
                // Not under the lock: it asks the operator's streams. The operator alone comes here, so it is still so.
                drop(inner);
                let last = last();
                inner = lock(&self.0);
                (inner.last, inner.state, inner.stirred) = (last, State::Ran, true);
            }
            State::Begun => {}
            State::None | State::Refused | State::Ran => inner.stirred = true,
        }
        tell(inner);
        false
    }

    /// Its conditions are ready.
    pub(super) fn begin(&self) {
        let mut inner = lock(&self.0);
        (inner.state, inner.at_door, inner.asks, inner.waits) = (State::Begun, false, false, false);
        inner.has_new_waker = false;
    }

    /// Its conditions are not ready: told once it has been polled.
    pub(super) fn refuse(&self) {
        let mut inner = lock(&self.0);
        if inner.state == State::Asked {
            inner.state = State::Refused;
        }
    }

    /// It waits for its next run no more: the wait was given up, or there is no next run.
    pub(super) fn go_away(&self) {
        let mut inner = lock(&self.0);
        (inner.at_door, inner.asks, inner.has_new_waker) = (false, false, false);
    }

    /// It was polled, and is pending; `waits`: in the middle of a run, for others; `is_kept`: clones of its waker are. True if it is to
    /// have a new waker for its next poll: what keeps a clone of this one may be waited for no more.
    pub(super) fn polled(&self, waits: bool, is_kept: bool) -> bool {
        let mut inner = lock(&self.0);
        inner.at_door = std::mem::take(&mut inner.asks);
        inner.alone = inner.at_door && !(inner.among_others && is_kept);
        let renews = inner.at_door && !inner.alone && !inner.has_new_waker;
        // Once: it is asked again for every other operator that moves.
        inner.has_new_waker = inner.at_door && (inner.has_new_waker || renews);
        match inner.state {
            // Not since it was asked: something else has woken it.
            State::Begun => inner.stirred |= std::mem::replace(&mut inner.waits, waits),
            // To be asked once more, with that.
            _ if renews => inner.stirred = true,
            State::Refused if inner.at_door => {}
            _ if inner.at_door => return false,
            // It has a loop of its own, and does something else than wait for its next run.
            State::Asked => inner.state = State::Refused,
            _ => inner.stirred = true,
        }
        tell(inner);
        renews
    }

    /// That was its last run, and it is about to end.
    pub(super) fn leave(&self, last: Vec<Ticket>) {
        lock(&self.0).last = last;
    }

    pub(super) fn end(&self) {
        let mut inner = lock(&self.0);
        (inner.ended, inner.stirred) = (true, true);
        if inner.state == State::Begun {
            inner.state = State::Ran;
        }
        tell(inner);
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.0).ended
    }

    /// It waits for the question whether it may run, and for nothing else.
    pub(crate) fn is_at_door(&self) -> bool {
        let inner = lock(&self.0);
        inner.at_door && inner.alone
    }

    /// What became of the run that was asked for.
    pub(crate) fn poll_outcome(&self, cx: &mut Context<'_>) -> Poll<Outcome> {
        self.poll(cx, |inner| match inner.state {
            State::Refused if !inner.ended => {
                inner.state = State::None;
                Poll::Ready(Outcome::Refused)
            }
            State::Ran => {
                inner.state = State::None;
                Poll::Ready(Outcome::Ran(std::mem::take(&mut inner.last)))
            }
            _ if inner.ended => Poll::Ready(Outcome::Ended),
            State::Begun if inner.waits => Poll::Ready(Outcome::Waits),
            _ => Poll::Pending,
        })
    }

    /// What woke it before this is known.
    pub(crate) fn calm(&self) {
        lock(&self.0).stirred = false;
    }

    /// Something has woken it.
    pub(crate) fn poll_stirred(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll(cx, |inner| if inner.stirred { Poll::Ready(()) } else { Poll::Pending })
    }

    /// Keeps the waker where `ask` has no answer.
    fn poll<T>(&self, cx: &mut Context<'_>, ask: impl FnOnce(&mut Inner) -> Poll<T>) -> Poll<T> {
        // Cloned before the lock, and the one that it replaces is dropped after it: both are user code.
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

/// Wakes who waits for an answer, after the lock.
fn tell(mut inner: MutexGuard<'_, Inner>) {
    let waker = inner.waker.take();
    drop(inner);
    waker.into_iter().for_each(wake);
}
