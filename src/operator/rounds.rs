//! [`Rounds`]: the wait of a section of operators for its next round.
//!
//! It is for the section what [`Cx::ready`](super::Cx::ready) is for an operator: all inputs and all outputs at the
//! edge are polled together, and while they are not ready the section is idle. All of its operators share one node.
//!
//! ```text
//!   next ──> the last round has ended ──> finishing, aborted, held? ──> the edge's ports ──> a round
//!      ^                                                                    │ not ready
//!      └── woken: all of it again ──── parked, unless it wakes by itself <──┘
//! ```

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use super::{cx::runs::LONGEST_STREAK, node::OperatorTask, permit::Permit, ports::Flush, status_cell::InRun};
use crate::{
    condition::{Readiness, Status},
    error::Result,
    stream::Ticket,
};

pub(crate) struct Rounds {
    node: Arc<OperatorTask>,
    /// The node's own waker, for ports to keep.
    waker: Waker,
    /// Rounds since the task last yielded.
    streak: u32,
}

impl Rounds {
    pub(crate) fn new(node: &Arc<OperatorTask>) -> Self {
        Self { waker: Waker::from(node.clone()), node: node.clone(), streak: 0 }
    }

    /// A round has ended; `rounds` is the number of rounds so far.
    pub(crate) fn ended(&self, rounds: u64) {
        self.node.status.ran(rounds);
    }

    /// Waits until another round may begin, and begins it. False if there will be none. `ask` polls everything that the
    /// section waits for; `last` returns the tickets of its work so far.
    pub(crate) async fn next<T>(
        &mut self,
        of: &mut T,
        last: impl Fn(&T) -> Vec<Ticket>,
        mut ask: impl FnMut(&mut T, &mut Context<'_>) -> Readiness,
    ) -> bool {
        poll_fn(|task| {
            if self.node.is_probe_waker(task.waker()) {
                let waker = self.waker.clone();
                self.poll_next(&mut Context::from_waker(&waker), of, &last, &mut ask)
            } else {
                self.poll_next(task, of, &last, &mut ask)
            }
        })
        .await
    }

    /// Waits in the middle of a round until its messages are sent.
    pub(crate) async fn until_sent(&mut self, mut flush: impl FnMut(&mut Context<'_>) -> Flush) -> Result<()> {
        poll_fn(|task| self.node.poll_port(&self.waker, InRun::SENDS, task, &mut flush)).await
    }

    fn poll_next<T>(
        &mut self,
        task: &mut Context<'_>,
        of: &mut T,
        last: &impl Fn(&T) -> Vec<Ticket>,
        ask: &mut impl FnMut(&mut T, &mut Context<'_>) -> Readiness,
    ) -> Poll<bool> {
        if self.node.is_finishing() {
            if let Some(permit) = self.held_by() {
                permit.leave(last(of));
            }
            return Poll::Ready(false);
        }
        // Before the yield below, which would not answer a step.
        if self.node.is_held() && !self.node.is_aborted() && !self.may_begin(|| last(of)) {
            return Poll::Pending;
        }
        self.streak += 1;
        if self.streak == LONGEST_STREAK || self.node.is_aborted() {
            self.streak = 0;
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        let budget = ready!(tokio::task::coop::poll_proceed(task));
        self.node.resume();
        let asked = ask(of, task);
        if asked.is_never() {
            return Poll::Ready(false);
        }
        if !asked.is_ready() {
            return self.wait(asked);
        }
        budget.made_progress();
        if let Some(permit) = self.held_by() {
            permit.begin();
        }
        self.node.show_running();
        Poll::Ready(true)
    }

    fn wait(&self, asked: Readiness) -> Poll<bool> {
        self.node.show(asked.status(None));
        match self.held_by() {
            Some(permit) => {
                permit.refuse();
                self.node.note_wait(false);
            }
            None if self.node.has_noted_wait() => self.node.note_wait(asked.needs_others()),
            None if asked.needs_others() => self.node.park(),
            None => {}
        }
        Poll::Pending
    }

    /// The permit of the task that steps through its rounds.
    fn held_by(&self) -> Option<&Permit> {
        if self.node.is_held() { self.node.permit() } else { None }
    }

    /// The section is paused or stepped through: may a round begin nevertheless?
    #[cold]
    fn may_begin(&self, last: impl Fn() -> Vec<Ticket>) -> bool {
        if let Some(permit) = self.node.permit()
            && permit.come(false, false, last)
        {
            if !self.node.is_paused() {
                return true;
            }
            permit.refuse();
        }
        // Not idle: it may be resumed.
        self.node.show(Status::WaitEvent);
        self.node.note_wait(false);
        false
    }
}
