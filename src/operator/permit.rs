//! [`Permit`]: one run at a time of an operator that is paused, for whoever steps through a flow.
//!
//! ```text
//!            ask                nothing ready
//!   NONE ──────────> ASKED ─────────────────────> REFUSED
//!    ^                 │ a run begins
//!    │                 v            the run has ended
//!    │               BEGUN ───────────────────────> RAN
//!    │                 │ the operator ends            │
//!    └── outcome ──────┴──> ENDED  (from all states)  │
//!    └── outcome ─────────────────────────────────────┘
//! ```

use std::{
    sync::Mutex,
    task::{Context, Poll, Waker},
};

use crate::{stream::Ticket, sync::lock};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    /// The last work of the run.
    ends: Vec<Ticket>,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    None,
    Asked,
    Begun,
    Refused,
    Ran,
    Ended,
}

/// What became of it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The operator's conditions are not ready.
    Refused,
    /// It has run; its last work is this.
    Ran(Vec<Ticket>),
    /// It has ended.
    Ended,
}

impl Permit {
    /// One run, if it may.
    pub(crate) fn ask(&self) {
        let mut inner = lock(&self.inner);
        if !matches!(inner.state, State::Ended | State::Begun) {
            inner.state = State::Asked;
        }
    }

    /// The operator is about to ask its conditions.
    pub(super) fn is_asked(&self) -> bool {
        lock(&self.inner).state == State::Asked
    }

    pub(super) fn has_begun(&self) -> bool {
        lock(&self.inner).state == State::Begun
    }

    pub(super) fn begin(&self) {
        lock(&self.inner).set(State::Begun);
    }

    pub(super) fn refuse(&self) {
        lock(&self.inner).set(State::Refused);
    }

    pub(super) fn ran(&self, ends: Vec<Ticket>) {
        let mut inner = lock(&self.inner);
        inner.ends = ends;
        inner.set(State::Ran);
    }

    pub(super) fn end(&self) {
        lock(&self.inner).set(State::Ended);
    }

    /// What became of the run that was asked for.
    pub(crate) fn poll_outcome(&self, cx: &mut Context<'_>) -> Poll<Outcome> {
        let mut inner = lock(&self.inner);
        let outcome = match inner.state {
            State::Refused => Outcome::Refused,
            State::Ran => Outcome::Ran(std::mem::take(&mut inner.ends)),
            State::Ended => return Poll::Ready(Outcome::Ended),
            State::None | State::Asked | State::Begun => {
                inner.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
        };
        inner.state = State::None;
        Poll::Ready(outcome)
    }
}

impl Inner {
    fn set(&mut self, state: State) {
        self.state = state;
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}
