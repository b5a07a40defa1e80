//! The transition from one run of an operator to the next: polls and claims its conditions, and publishes what it waits
//! for.
//!
//! ```text
//!   until_ready ──> the last run ends ──> ended, aborted, held? ──> ports, conditions ──> `may_run` ──> claim ──> run
//!        ^                                                              │ not ready        │ no          │ lost
//!        └── woken: all of it again ──── parked, unless it wakes by itself <───────────────┴─────────────┘
//! ```

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use smallvec::SmallVec;

use super::Cx;
use crate::{
    condition::{self, PortState, Readiness, Status},
    device::ticks::Ticks,
    error::{Error, Result},
    memory::HostAccess,
    mutants::{self, Mutant},
    operator::{
        Ports, blocking,
        input_wait::InputWait,
        node::{Method, OperatorTask},
        permit::{Permit, TURN},
        ports::AllPorts,
    },
    stream::Ticket,
    sync::{contained, wake_again},
};

/// The number of runs in a row, equal to the number of operations in a row that tokio allows a task.
pub(in crate::operator) const LONGEST_STREAK: u32 = 128;

impl Cx {
    /// Waits until the operator may run, and begins the run: all conditions are ready and what they promise is claimed.
    /// False if the operator can never run again. For operators that override [`run`](crate::Operator::run).
    ///
    /// # Cancel safety
    /// Nothing is taken from a port before it resolves; dropping it changes nothing. While the operator waits only for
    /// this, and not also for a timer or a channel (in a `select!`, say), it counts as waiting for other operators: a
    /// flow in which every operator does so ends.
    pub async fn ready<P: Ports>(&mut self, ports: &mut P) -> bool {
        // If this fails, the next run gets the error.
        let _ = self.commit(ports);
        self.asks_may_run = false;
        self.among_others = true;
        // A wait that was leaked (`mem::forget`) has kept the previous one.
        self.waker.get_or_insert_with(|| Waker::from(self.node.clone()));
        self.until_ready(ports, |_, _| true).await
    }

    /// A run has succeeded: its chunks of linked hubs are committed.
    #[inline]
    pub(in crate::operator) fn commit(&mut self, ports: &mut dyn AllPorts) -> Result<()> {
        if self.linked && self.running { commit(ports) } else { Ok(()) }
    }

    /// Whether a run has ended and [`after`](Self::after) must be called.
    #[inline]
    pub(in crate::operator) fn has_run(&self) -> bool {
        self.calls_after && self.running
    }

    pub(in crate::operator) fn end_of_run(&mut self) -> EndOfRun {
        self.end_run();
        self.context.goes_on();
        self.stop_clock();
        let last = self.streams.as_ref().map(|streams| streams.run_ends()).unwrap_or_default();
        EndOfRun { node: self.node.clone(), last }
    }

    pub(in crate::operator) fn calls_after(&mut self, calls: bool) {
        self.calls_after = calls;
    }

    /// As [`ready`](Self::ready), but also calls the operator's own `may_run`.
    #[inline]
    pub(in crate::operator) async fn until_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        mut may_run: impl FnMut(&P, &Cx) -> bool,
    ) -> bool {
        self.context.release_unneeded();
        if self.linked {
            ports.visit(&mut |_, port| port.linked().into_iter().for_each(|port| port.release()));
        }
        let waker = self.waker.take();
        let mut asking = ReadyWait { cx: self, ports, waits: false, waker };
        poll_fn(|task| {
            let own = asking.waker.as_ref().filter(|_| asking.cx.node.is_probe_waker(task.waker()));
            if own.is_none() {
                asking.cx.node.register_within(task.waker());
                // Tokio must not get the user's waker.
                if !tokio::task::coop::has_budget_remaining() {
                    wake_again(task.waker());
                    return Poll::Pending;
                }
            }
            let task = &mut Context::from_waker(own.unwrap_or(task.waker()));
            let asked = asking.cx.poll_ready(asking.ports, &mut may_run, task);
            // If it does not have to wait, the end of one run is the beginning of the next.
            if asked != Poll::Ready(true) {
                // An operator that never runs again does not wait any longer either: what its ports hold for it is
                // released to others.
                asking.waits = true;
                asking.cx.stop_clock();
                return asked;
            }
            asking.waits = false;
            asked
        })
        .await
    }

    #[inline]
    fn poll_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        may_run: &mut impl FnMut(&P, &Cx) -> bool,
        task: &mut Context<'_>,
    ) -> Poll<bool> {
        self.end_run();
        if (self.finished || !self.node.runs_by_itself())
            && let Some(asked) = self.obey(ports, task)
        {
            return asked;
        }
        // An operator that is always ready yields to others now and then, even where tokio's budget is disabled.
        self.asks_left -= 1;
        if self.asks_left == 0 {
            self.asks_left = LONGEST_STREAK;
            let in_one_poll = self.node.began_in_this_poll();
            if let Some(error) = self.spin_detector.look(&self.name, self.runs, in_one_poll, ports, task) {
                return self.fail(error);
            }
            wake_again(task.waker());
            return Poll::Pending;
        }
        let budget = ready!(tokio::task::coop::poll_proceed(task));
        self.node.resume();
        let mut asked = ports.poll_ready(task);
        if self.conditions.is_some() || !self.awaited.is_empty() {
            asked = asked | self.poll_more(ports, task);
        }
        if !asked.is_ready() {
            return self.wait(asked, ports);
        }
        budget.made_progress();
        if self.asks_may_run || self.conditions.as_ref().is_some_and(|conditions| conditions.any_last()) {
            let asked = self.poll_last(ports, may_run, task);
            if !asked.is_ready() {
                return self.wait_refused(asked);
            }
        }
        if !self.claim(ports) {
            // Another task was faster: poll again, after it.
            let what = self.conditions.as_ref().and_then(|conditions| conditions.refused());
            if let Some(error) = self.spin_detector.refused(self.runs, what) {
                return self.fail(error);
            }
            wake_again(task.waker());
            return Poll::Pending;
        }
        if let Some(permit) = self.held_by() {
            permit.begin();
        }
        if self.among_others {
            self.node.end_of_wait();
        }
        self.begin();
        Poll::Ready(true)
    }

    /// It is to end, to be aborted, or held. `None`: it may run nevertheless.
    #[cold]
    fn obey(&mut self, ports: &mut dyn AllPorts, task: &Context<'_>) -> Option<Poll<bool>> {
        if self.finished || self.node.is_finishing() {
            if let Some(permit) = self.held_by() {
                permit.leave(self.last());
            }
            return Some(Poll::Ready(false));
        }
        if self.node.is_aborted() {
            // Its future is dropped at the next poll.
            wake_again(task.waker());
            return Some(Poll::Pending);
        }
        // Before the yield, which would not answer a step.
        if self.node.is_held() && !self.may_begin() {
            if self.linked {
                // Other links of a hub of chunks, perhaps of another flow, must not queue behind this one meanwhile.
                ports.visit_all(&mut |_, port| port.idle());
            }
            return Some(Poll::Pending);
        }
        None
    }

    /// The permit of the task that steps through its runs.
    #[inline]
    fn held_by(&self) -> Option<&Permit> {
        if self.node.is_held() { self.node.permit() } else { None }
    }

    /// It no longer waits for its next run, and does something else.
    #[cold]
    fn give_up(&mut self, ports: &mut dyn AllPorts) {
        ports.visit_all(&mut |_, port| port.idle());
        self.awaited.iter_mut().for_each(HostAccess::rest);
        // This runs in a destructor, perhaps of a task that panics.
        contained("a condition panicked as it was given up", || {
            self.conditions.iter_mut().for_each(|conditions| conditions.rest());
        });
        self.node.resume();
        if let Some(permit) = self.held_by() {
            permit.go_away();
        }
        self.publish_lacks(Vec::new(), false);
        self.node.show(Status::Ready);
    }

    /// It is paused or stepped through: may a run begin nevertheless?
    #[cold]
    fn may_begin(&mut self) -> bool {
        let paused = self.node.is_paused();
        let mut lacks = Vec::new();
        if let Some(permit) = self.node.permit() {
            if permit.come(self.among_others, self.holds_token, || self.last()) {
                if !paused {
                    return true;
                }
                permit.refuse();
            }
            lacks.push(TURN.into());
        }
        // Not idle: `resume`, or the next step, may let it continue. Noted, since the current poll may have dropped
        // another wait.
        self.publish_lacks(lacks, false);
        self.node.show(Status::WaitEvent);
        self.node.note_wait(false);
        false
    }

    #[inline]
    fn begin(&mut self) {
        if self.streams.is_some() {
            self.begin_on_device();
        }
        self.context.begin();
        // What it waited for before this run must not hide a stall within the run.
        self.publish_lacks(Vec::new(), false);
        self.node.show_running();
        self.running = true;
        if self.busy_since.is_none() {
            self.node.begin_busy();
            self.busy_since = Some(Ticks::now());
        }
    }

    #[inline(never)]
    fn begin_on_device(&mut self) {
        if self.streams.as_ref().is_some_and(|streams| streams.begin()) {
            self.stream = None;
        }
        if let Some(stream) = self.timed_stream() {
            stream.begin_run();
        }
    }

    /// A worker's run begins: its messages are already at its ports.
    pub(in crate::operator) fn begin_run(&mut self, ports: &mut dyn AllPorts) {
        let _ = ports.claim_all();
        self.begin();
    }

    /// Polls the conditions besides the ports.
    #[cold]
    fn poll_more(&mut self, ports: &mut dyn AllPorts, task: &mut Context<'_>) -> Readiness {
        let mut asked = condition::buffers(&mut self.awaited, task);
        if let Some(conditions) = &mut self.conditions {
            asked = asked | conditions.poll(&mut |port, ask| ask_port(ports, port, ask), task);
            // An operator that runs for a message or for something else would continue for the latter for ever.
            if self.flow.control.is_stopping() && have_ended(ports) {
                asked = Readiness::NEVER;
            }
        }
        asked
    }

    /// It ends with an error of its own, whatever its `run` returns.
    #[cold]
    fn fail(&mut self, error: Error) -> Poll<bool> {
        self.failure = Some(error);
        Poll::Ready(false)
    }

    /// It cannot run yet, or never again.
    #[inline]
    fn wait(&mut self, asked: Readiness, ports: &mut dyn AllPorts) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.spin_detector.waits();
        match asked {
            Readiness::WAIT if self.conditions.is_none() && !self.ports_notify => {
                if self.has_lacks {
                    self.publish_lacks(Vec::new(), false);
                }
                self.node.show(Status::Wait);
            }
            _ => self.show(asked, ports),
        }
        self.rest(asked, OperatorTask::park)
    }

    /// Returns its token, unless what it waits for may happen without another operator.
    #[inline]
    fn rest(&self, asked: Readiness, park: fn(&OperatorTask)) -> Poll<bool> {
        if let Some(permit) = self.held_by() {
            permit.refuse();
            self.node.note_wait(false);
            return Poll::Pending;
        }
        let for_others = asked.needs_others() && !self.holds_token || mutants::is(Mutant::TokenTooSoon);
        // The current poll may have dropped a wait at a port before it reached this one.
        if self.among_others || self.node.has_noted_wait() {
            self.node.note_wait(for_others);
        } else if for_others {
            park(&self.node);
        }
        Poll::Pending
    }

    #[cold]
    fn show(&mut self, asked: Readiness, ports: &mut dyn AllPorts) {
        let mut due = None;
        if asked == Readiness::WAIT_TIME {
            due = self.conditions.as_ref().and_then(|conditions| conditions.due());
            ports.visit_all(&mut |_, port| due = due.max(port.input_wait().and_then(InputWait::deadline)));
        }
        let mut lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        let mut elsewhere = self.conditions.as_ref().is_some_and(|conditions| conditions.wait_elsewhere());
        if !self.awaited.is_empty() {
            lacks.push("a buffer's data".into());
            elsewhere = true;
        }
        ports.visit_all(&mut |name, port| {
            lacks.extend(port.input_wait().and_then(InputWait::describe).map(|wait| format!("{wait} at `{name}`")));
        });
        self.publish_lacks(lacks, elsewhere);
        self.node.show(asked.status(due));
    }

    /// Publishes what it waits for besides its hubs.
    #[inline]
    fn publish_lacks(&mut self, lacks: Vec<String>, elsewhere: bool) {
        if self.has_lacks || elsewhere || !lacks.is_empty() {
            self.has_lacks = elsewhere || !lacks.is_empty();
            self.node.status.set_lacks(lacks, elsewhere);
        }
    }

    /// Polls the conditions without a waker and calls `may_run`, when everything else is ready.
    #[cold]
    fn poll_last<P: Ports>(
        &mut self,
        ports: &mut P,
        may_run: &mut impl FnMut(&P, &Cx) -> bool,
        task: &mut Context<'_>,
    ) -> Readiness {
        let (asked, lacks) = self.poll_without_waker(ports, task);
        let allowed = if asked.is_ready() && self.asks_may_run { Some(may_run(ports, self)) } else { None };
        self.asked_last(asked, allowed, lacks)
    }

    fn poll_without_waker(&mut self, ports: &mut dyn AllPorts, task: &mut Context<'_>) -> (Readiness, Vec<String>) {
        // A port that is ready keeps no waker, but its next message is a reason to poll again. Registered first, so
        // that no message is missed.
        ports.visit_all(&mut |_, port| port.watch(task.waker()));
        let mut asked = Readiness::READY;
        if let Some(conditions) = &mut self.conditions {
            asked = conditions.poll_last(&mut |port, ask| ask_port(ports, port, ask), task);
        }
        let lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        (asked, lacks)
    }

    /// `allowed`: the answer of its own `may_run`, if it was called.
    fn asked_last(&mut self, mut asked: Readiness, allowed: Option<bool>, mut lacks: Vec<String>) -> Readiness {
        if let Some(allowed) = allowed {
            if !allowed {
                asked = Readiness::WAIT;
                lacks.push("its own `may_run` to allow it".into());
            }
            self.asks_may_run = !self.node.is_default(Method::MayRun);
        }
        self.publish_lacks(lacks, !asked.is_ready());
        self.node.answered(asked.is_ready());
        asked
    }

    /// Everything was ready except for the conditions without a waker, or `may_run`.
    #[cold]
    fn wait_refused(&mut self, asked: Readiness) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.node.show(asked.status(self.conditions.as_ref().and_then(|conditions| conditions.due())));
        self.rest(asked, OperatorTask::park_refused)
    }

    /// Claims what the run needs, all of it or nothing.
    #[inline]
    fn claim<P: Ports>(&mut self, ports: &mut P) -> bool {
        let Some(conditions) = &mut self.conditions else { return ports.claim() };
        if !conditions.claim() {
            return false;
        }
        let claimed = ports.claim();
        if !claimed {
            conditions.give_back();
        }
        claimed
    }

    /// Ends the current run, if there is one.
    #[inline]
    pub(in crate::operator) fn end_run(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        self.runs += 1;
        self.context.end();
        self.node.status.ran(self.runs);
        if let Some(conditions) = &mut self.conditions {
            conditions.ended();
        }
        if let Some(stream) = self.timed_stream() {
            stream.end_run();
        }
    }

    #[inline]
    pub(in crate::operator) fn stop_clock(&mut self) {
        if let Some(since) = self.busy_since.take() {
            let busy = Ticks::now().since(since);
            self.busy += busy;
            if busy > blocking::LONG {
                self.was_busy_for_long(busy);
            }
        }
    }

    /// It may have blocked its worker.
    #[cold]
    fn was_busy_for_long(&mut self, busy: u64) {
        // Otherwise it has waited in between, and other tasks had their turn.
        if self.node.began_in_this_poll() {
            self.blocking.note(&self.name, busy);
        }
    }
}

/// Calls `ask` with one of the ports, by its number.
fn ask_port(ports: &mut dyn AllPorts, number: usize, ask: &mut dyn FnMut(&mut dyn PortState)) {
    let mut at = 0;
    ports.visit_all(&mut |_, port| {
        if at == number {
            ask(port);
        }
        at += 1;
    });
}

#[cold]
fn commit(ports: &mut dyn AllPorts) -> Result<()> {
    let mut committed = Ok(());
    ports.visit_all(&mut |name, port| {
        if committed.is_ok() {
            let commit = port.linked().map_or(Ok(()), |port| port.commit_run());
            committed = commit.map_err(|error| error.at(format!("port `{name}`")));
        }
    });
    committed
}

/// The device work that a run leaves behind.
pub(in crate::operator) struct EndOfRun {
    node: Arc<OperatorTask>,
    last: SmallVec<[Ticket; 2]>,
}

impl EndOfRun {
    /// Waits for that work, if the operator overrides `after`. That is known because `after` was called before: the
    /// call sets a flag unless it is overridden, and it executes nothing of an `async fn`. False if it is not
    /// overridden.
    pub(in crate::operator) async fn done(self) -> Result<bool> {
        if self.node.is_default(Method::After) {
            return Ok(false);
        }
        for last in self.last {
            last.completed().await?;
        }
        Ok(true)
    }
}

/// It has inputs, and no message will arrive at any of them.
fn have_ended(ports: &mut dyn AllPorts) -> bool {
    let (mut any, mut all) = (false, true);
    ports.visit_all(&mut |_, port| {
        any |= !port.is_output();
        all &= port.is_output() || port.has_ended();
    });
    any && all
}

/// A wait for the next run. If it is dropped, the operator does not wait any more and continues with something else.
struct ReadyWait<'a, P: Ports> {
    cx: &'a mut Cx,
    ports: &'a mut P,
    waits: bool,
    waker: Option<Waker>,
}

impl<P: Ports> ReadyWait<'_, P> {
    #[cold]
    fn give_up(&mut self) {
        self.cx.give_up(self.ports);
    }
}

impl<P: Ports> Drop for ReadyWait<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.cx.waker = self.waker.take();
        if self.waits {
            self.give_up();
        }
    }
}
