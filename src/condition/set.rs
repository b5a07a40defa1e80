//! [`Conditions`]: those that an operator was given when it was added, as its task asks them.

use std::task::Context;

use tokio::time::Instant;

use super::{Readiness, Status, When, port::Show};

/// Beside those of its ports.
#[derive(Debug)]
pub(crate) struct Conditions {
    /// Those with a waker, then those that are asked last.
    all: Vec<When>,
    last: usize,
    /// What they answered; what was not asked is ready.
    answers: Vec<Status>,
    running: bool,
}

impl Conditions {
    /// `None` if there are none.
    pub(crate) fn new(all: Vec<When>) -> Option<Box<Self>> {
        if all.is_empty() {
            return None;
        }
        let (asked_last, mut all): (Vec<_>, Vec<_>) = all.into_iter().partition(When::asked_last);
        let last = all.len();
        all.extend(asked_last);
        let answers = vec![Status::Ready; all.len()];
        Some(Box::new(Self { all, last, answers, running: false }))
    }

    /// The flow begins.
    pub(crate) fn start(&mut self) {
        self.all.iter_mut().for_each(When::start);
    }

    /// Asks all that have a waker, so that each keeps it.
    pub(crate) fn poll(&mut self, show: Show<'_>, cx: &mut Context<'_>) -> Readiness {
        self.answers.fill(Status::Ready);
        self.ask(0..self.last, show, cx)
    }

    pub(crate) fn any_last(&self) -> bool {
        self.last < self.all.len()
    }

    /// Asks those that are asked when all others are ready.
    pub(crate) fn poll_last(&mut self, show: Show<'_>, cx: &mut Context<'_>) -> Readiness {
        self.ask(self.last..self.all.len(), show, cx)
    }

    fn ask(&mut self, which: std::ops::Range<usize>, show: Show<'_>, cx: &mut Context<'_>) -> Readiness {
        let mut asked = Readiness::READY;
        for at in which {
            let status = self.all[at].poll(show, cx);
            self.answers[at] = status;
            asked = asked | status.into();
        }
        asked
    }

    /// The latest moment that one of them waits for.
    pub(crate) fn due(&self) -> Option<Instant> {
        let due = |status: &Status| if let Status::WaitTime(due) = status { Some(*due) } else { None };
        self.answers.iter().filter_map(due).max()
    }

    /// What is waited for, in words.
    pub(crate) fn lacks(&self) -> Vec<String> {
        let all = self.all.iter().zip(&self.answers);
        all.filter(|(_, status)| **status != Status::Ready).map(|(when, _)| when.describe().into_owned()).collect()
    }

    /// A run begins, if all can give what it needs.
    pub(crate) fn claim(&mut self) -> bool {
        for at in 0..self.all.len() {
            if !self.all[at].claim() {
                self.all[..at].iter_mut().rev().for_each(When::give_back);
                return false;
            }
        }
        self.running = true;
        true
    }

    /// The run that was claimed does not take place.
    pub(crate) fn give_back(&mut self) {
        self.running = false;
        self.all.iter_mut().rev().for_each(When::give_back);
    }

    /// The run has ended.
    pub(crate) fn ended(&mut self) {
        if std::mem::take(&mut self.running) {
            self.all.iter_mut().for_each(When::ended);
        }
    }

    /// They are not waited for, until they are asked again.
    pub(crate) fn rest(&mut self) {
        self.all.iter_mut().for_each(When::rest);
    }

    pub(crate) fn into_all(mut self) -> Vec<When> {
        self.rest();
        self.all
    }
}
