//! [`Conditions`]: the conditions that an operator was given when it was added, as its task polls them.

use std::{
    borrow::Cow,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    task::Context,
};

use tokio::time::Instant;

use super::{Readiness, Status, When, port::VisitPort};
use crate::sync::contained;

/// The conditions of an operator besides those of its ports.
#[derive(Debug)]
pub(crate) struct Conditions {
    /// The conditions that keep a waker, then those that are polled last.
    all: Vec<When>,
    last: usize,
    /// The last answers; a condition that was not polled counts as ready.
    answers: Vec<Status>,
    /// True while a run holds the claims.
    running: bool,
    /// The condition that rejected the last claim.
    refused: Option<usize>,
}

/// Calls user code for each element, even if a call panics: the first panic is resumed after the last call, later
/// panics are logged.
pub(super) fn for_each<T>(all: impl IntoIterator<Item = T>, mut call: impl FnMut(T)) {
    let mut first = None;
    for one in all {
        if first.is_none() {
            first = catch_unwind(AssertUnwindSafe(|| call(one))).err();
        } else {
            contained("a condition panicked after another one", || call(one));
        }
    }
    if let Some(panic) = first {
        resume_unwind(panic);
    }
}

/// Claims one condition after the other. If `claim` returns false, returns the index of that condition; then, and after
/// a panic, those before it are given back in reverse order. `None` if all claims succeeded.
pub(super) fn claim_all<T>(
    all: &mut [T],
    mut claim: impl FnMut(&mut T) -> bool,
    mut give_back: impl FnMut(&mut T),
) -> Option<usize> {
    let mut claimed = 0;
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        all.iter_mut().all(|one| {
            let has = claim(one);
            claimed += usize::from(has);
            has
        })
    }));
    let before = all.iter_mut().take(claimed).rev();
    match outcome {
        Ok(true) => None,
        Ok(false) => {
            for_each(before, give_back);
            Some(claimed)
        }
        Err(panic) => {
            before.for_each(|one| {
                contained("a condition panicked while giving back a claim", || give_back(one));
            });
            resume_unwind(panic)
        }
    }
}

impl Conditions {
    pub(crate) fn new(all: Vec<When>) -> Option<Box<Self>> {
        if all.is_empty() {
            return None;
        }
        let (polled_last, mut all): (Vec<_>, Vec<_>) = all.into_iter().partition(When::is_polled_last);
        let last = all.len();
        all.extend(polled_last);
        let answers = vec![Status::Ready; all.len()];
        Some(Box::new(Self { all, last, answers, running: false, refused: None }))
    }

    pub(crate) fn start(&mut self) {
        for_each(&mut self.all, When::start);
    }

    /// Polls all conditions that keep a waker, so that each registers it.
    pub(crate) fn poll(&mut self, visit: VisitPort<'_>, cx: &mut Context<'_>) -> Readiness {
        self.answers.fill(Status::Ready);
        self.ask(0..self.last, visit, cx)
    }

    pub(crate) fn has_polled_last(&self) -> bool {
        self.last < self.all.len()
    }

    /// Polls the conditions that are polled last, once all others are ready.
    pub(crate) fn poll_last(&mut self, visit: VisitPort<'_>, cx: &mut Context<'_>) -> Readiness {
        self.ask(self.last..self.all.len(), visit, cx)
    }

    fn ask(&mut self, which: std::ops::Range<usize>, visit: VisitPort<'_>, cx: &mut Context<'_>) -> Readiness {
        let mut asked = Readiness::READY;
        for at in which {
            let status = self.all[at].poll(visit, cx);
            self.answers[at] = status;
            asked = asked | status.into();
        }
        asked
    }

    /// The latest moment that a condition waits for.
    pub(crate) fn due(&self) -> Option<Instant> {
        let due = |status: &Status| if let Status::WaitTime(due) = status { Some(*due) } else { None };
        self.answers.iter().filter_map(due).max()
    }

    /// Describes the conditions that are not ready.
    pub(crate) fn lacks(&self) -> Vec<String> {
        let all = self.all.iter().zip(&self.answers);
        all.filter(|(_, status)| **status != Status::Ready).map(|(when, _)| when.describe().into_owned()).collect()
    }

    /// True if a condition that is not ready concerns more than the operator's ports.
    pub(crate) fn wait_elsewhere(&self) -> bool {
        let mut all = self.all.iter().zip(&self.answers);
        all.any(|(when, status)| *status != Status::Ready && !when.is_on_ports())
    }

    /// Claims all conditions for a run. False, and nothing is claimed, if one of them refuses.
    pub(crate) fn claim(&mut self) -> bool {
        self.refused = claim_all(&mut self.all, When::claim, When::give_back);
        self.running = self.refused.is_none();
        self.running
    }

    /// Describes the condition that rejected the last claim; `None` if a port did, or if the claim succeeded.
    pub(crate) fn refused(&self) -> Option<Cow<'static, str>> {
        self.refused.map(|at| self.all[at].describe())
    }

    pub(crate) fn give_back(&mut self) {
        if std::mem::take(&mut self.running) {
            for_each(self.all.iter_mut().rev(), When::give_back);
        }
    }

    pub(crate) fn ended(&mut self) {
        if std::mem::take(&mut self.running) {
            for_each(&mut self.all, When::ended);
        }
    }

    pub(crate) fn stop_waiting(&mut self) {
        for_each(&mut self.all, When::stop_waiting);
    }

    /// Gives back what is claimed and stops waiting, as no run follows until the flow is run again.
    pub(crate) fn close(&mut self) {
        for_each([Self::give_back, Self::stop_waiting], |end| end(self));
    }

    pub(crate) fn into_all(self) -> Vec<When> {
        self.all
    }
}
