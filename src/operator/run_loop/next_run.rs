//! [`next_run`]: waits until an operator may run, and begins the run.
//!
//! One pass polls the ports and conditions, asks `may_run`, claims, and begins. A pass that finds anything not ready
//! leaves the operator idle, until a waker starts the next pass.

use std::{
    future::poll_fn,
    task::{Context, Poll, Waker, ready},
};

use super::{
    super::{permit::TURN, ports::AllPorts},
    RunLoop,
};
use crate::{
    condition::{Readiness, Status},
    stream::Ticket,
    sync::wake_again,
};

/// What a loop runs: an operator with its ports, or a section.
pub(crate) trait Runnable {
    /// The loop and, for an operator, its ports.
    fn parts(&mut self) -> (&mut RunLoop, Option<&mut dyn AllPorts>);
    /// Polls the ports and conditions, with a waker.
    fn poll_ready(&mut self, task: &mut Context<'_>) -> Readiness;
    /// When everything else is ready: calls `may_run`, and polls the conditions that have no waker.
    fn poll_last(&mut self, task: &mut Context<'_>) -> Readiness;
    /// Claims what the run needs, all of it or nothing.
    fn claim(&mut self) -> bool;
    fn begin(&mut self);
    /// Ends the current run, if there is one.
    fn end(&mut self);
    /// The tickets of its last work on each stream.
    fn last_work(&self) -> Vec<Ticket>;
}

/// Waits until all conditions are ready, claims what they promise, and begins a run. False if there will be no other
/// run.
#[inline]
pub(crate) fn next_run(of: impl Runnable) -> impl Future<Output = bool> {
    let mut wait = NextRunWait::new(of);
    poll_fn(move |task| {
        let run_loop = wait.of.parts().0;
        let own = wait.waker.as_ref().filter(|_| run_loop.task.is_probe_waker(task.waker()));
        if own.is_none() {
            run_loop.task.register_within(task.waker());
            // Without budget, `poll_proceed` would hand the user's waker to tokio.
            if !tokio::task::coop::has_budget_remaining() {
                wake_again(task.waker());
                return Poll::Pending;
            }
        }
        let task = &mut Context::from_waker(own.unwrap_or(task.waker()));
        let begun = poll_next(&mut wait.of, task);
        // If the operator does not have to wait, one run ends where the next begins: the clock continues.
        if begun != Poll::Ready(true) {
            // Set also for an operator that never runs again: dropping the wait releases what its ports hold for it.
            wait.waits = true;
            wait.of.parts().0.stop_clock();
            return begun;
        }
        wait.waits = false;
        begun
    })
}

/// One pass of the loop, from the end of the last run to the beginning of the next.
#[allow(clippy::inline_always, reason = "measured: it has one call for each type of operator")]
#[inline(always)]
fn poll_next<R: Runnable>(of: &mut R, task: &mut Context<'_>) -> Poll<bool> {
    of.end();
    let run_loop = of.parts().0;
    if (run_loop.finished || !run_loop.task.runs_by_itself())
        && let Some(begun) = handle_requests(of, task)
    {
        return begun;
    }
    // An operator that is always ready yields to others now and then, even where tokio's budget is disabled.
    let (run_loop, ports) = of.parts();
    run_loop.polls_left -= 1;
    if run_loop.polls_left == 0 {
        return run_loop.yield_now(ports, task);
    }
    let budget = ready!(tokio::task::coop::poll_proceed(task));
    run_loop.task.resume();
    let asked = of.poll_ready(task);
    if !asked.is_ready() {
        let (run_loop, ports) = of.parts();
        return run_loop.wait(asked, ports);
    }
    budget.made_progress();
    let asked = of.poll_last(task);
    if !asked.is_ready() {
        return of.parts().0.wait_refused(asked);
    }
    if !of.claim() {
        return of.parts().0.poll_again(task);
    }
    let run_loop = of.parts().0;
    if let Some(permit) = run_loop.task.held_by() {
        permit.begin();
    }
    if run_loop.among_others {
        run_loop.task.end_of_wait();
    }
    of.begin();
    Poll::Ready(true)
}

/// Handles a request to end, abort, pause or step the operator. `None`: a run may begin nevertheless.
#[cold]
fn handle_requests(of: &mut dyn Runnable, task: &Context<'_>) -> Option<Poll<bool>> {
    let run_loop = of.parts().0;
    if run_loop.finished || run_loop.task.is_finishing() {
        let operator = run_loop.task.clone();
        if let Some(permit) = operator.held_by() {
            permit.leave(of.last_work());
        }
        return Some(Poll::Ready(false));
    }
    if run_loop.task.is_aborted() {
        // The operator's future is dropped at the next poll.
        wake_again(task.waker());
        return Some(Poll::Pending);
    }
    // Comes before the yield, which would not answer a step.
    if run_loop.task.is_held() && !may_begin(of) {
        if let (RunLoop { linked: true, .. }, Some(ports)) = of.parts() {
            // Other links to a hub of chunks, possibly from another flow, must not queue behind this one.
            ports.visit_all(&mut |_, port| port.idle());
        }
        return Some(Poll::Pending);
    }
    None
}

/// Whether a run of an operator that is paused or stepped through may begin nevertheless.
fn may_begin(of: &mut dyn Runnable) -> bool {
    let run_loop = of.parts().0;
    let (task, among_others, holds_token) = (run_loop.task.clone(), run_loop.among_others, run_loop.holds_token);
    let paused = task.is_paused();
    let mut lacks = Vec::new();
    if let Some(permit) = task.permit() {
        if permit.request_run(among_others, holds_token, || of.last_work()) {
            if !paused {
                return true;
            }
            permit.refuse();
        }
        lacks.push(TURN.into());
    }
    // Not idle, since `resume` or the next step can let it continue. Noted, since the current poll might have dropped
    // another wait.
    of.parts().0.publish_lacks(lacks, false);
    task.publish(Status::WaitEvent);
    task.note_wait(false);
    false
}

/// A wait for the next run. When it is dropped before a run begins, the operator stops waiting and does something else.
struct NextRunWait<R: Runnable> {
    of: R,
    waits: bool,
    waker: Option<Waker>,
}

impl<R: Runnable> NextRunWait<R> {
    fn new(mut of: R) -> Self {
        let waker = of.parts().0.waker.take();
        Self { of, waits: false, waker }
    }
}

impl<R: Runnable> Drop for NextRunWait<R> {
    #[inline]
    fn drop(&mut self) {
        let (run_loop, ports) = self.of.parts();
        run_loop.waker = self.waker.take();
        if self.waits {
            run_loop.stop_waiting(ports);
        }
    }
}
