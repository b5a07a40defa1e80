//! [`RunLoop`]: the state of an operator from one run to the next. It waits, claims what a run needs, runs, and ends
//! the run.
//!
//! ```text
//!          ┌──────────────── not ready: idle until a waker is woken ─────────────────┐
//!          v                                                                         │
//!   ┌──> WAIT: finished, aborted, held? ──> ports and conditions ──> `may_run` ──────┤
//!   │      │                                                            │ yes        │
//!   │      │                                                            v            │
//!   │      │                                                          CLAIM: all or nothing ── lost: poll again
//!   │      │                                                            │
//!   │      │ it is to end, or can never run again                       v
//!   │      └───────────────────────────> STOP                         RUN: `compute` ──> error: the flow fails
//!   │                                                                   │
//!   └──── END OF RUN: chunks committed, device work done, `after` <─────┘
//! ```
//!
//! All ways to run an operator use it. They differ in what waits and in what calls `compute`:
//!
//! | | waits with [`next_run`](next_run::next_run) | runs |
//! |---|---|---|
//! | an operator's own task | the operator, for its ports | the macro `all_runs`, or the operator's own `run` with [`Cx::ready`](super::Cx::ready) |
//! | [`Steps`](crate::flow::Steps) | the same; its [`Permit`](super::permit::Permit) holds it back until a step is requested | the same |
//! | [concurrent](fn@super::concurrent) runs | the dispatcher, for the operator's ports | a worker, for which the dispatcher has claimed |
//! | a section | the section's task, for the ports at the section's boundary | each operator in turn, or one graph |
//!
//! A run of a worker or in a section begins with [`Cx::begin_claimed`](super::Cx) instead of a wait of its own.

pub(crate) mod next_run;

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use super::{
    busy::{BusyClock, MAX_STREAK, SpinDetector},
    input_wait::InputWait,
    operator_task::{Method, OperatorTask},
    ports::{AllPorts, Flush, Ports},
    status_cell::RunWait,
};
use crate::{
    condition::{self, Awaited, Conditions, PortState, Readiness, Status, When},
    device::ticks::Ticks,
    error::{Error, Result},
    memory::HostAccess,
    mutants::{self, Mutant},
    stream::Ticket,
    sync::{contained, wake_again},
};

/// The state of the loop of one operator, or of one section. The fields that each run uses come first: two cache lines.
#[repr(C)]
pub(crate) struct RunLoop {
    pub(super) task: Arc<OperatorTask>,
    /// The task's own waker, which the conditions of its runs keep. `None` while they are polled.
    waker: Option<Waker>,
    /// The conditions of every run besides its ports.
    conditions: Option<Box<Conditions>>,
    runs: u64,
    /// The number of polls until it yields to other tasks.
    polls_left: u32,
    /// Its ports describe waits that their hubs do not know.
    pub(super) ports_notify: bool,
    /// Some of its ports are linked to hubs of chunks.
    pub(super) linked: bool,
    /// Its published status lists what it waits for besides its hubs.
    has_lacks: bool,
    /// Its wait for the next run might be one of several concurrent waits.
    among_others: bool,
    /// Its own work continues in other tasks: it is not idle, whatever it waits for.
    holds_token: bool,
    /// Whether the operator's `may_run` and `after` are called: true until they are known not to be overridden.
    asks_may_run: bool,
    calls_after: bool,
    running: bool,
    finished: bool,
    /// It has waited since a claim was last refused.
    waited: bool,
    /// The buffers that the next run waits for.
    awaited: Awaited,
    /// Runs from the first run since the operator last waited.
    pub(super) busy: BusyClock,
    spin_detector: SpinDetector,
    /// The error with which it failed between two runs.
    failure: Option<Error>,
    pub(super) name: Arc<str>,
}

impl RunLoop {
    /// `may_block`: no warning is logged when it blocks its thread.
    pub(crate) fn new(name: &Arc<str>, task: &Arc<OperatorTask>, conditions: Vec<When>, may_block: bool) -> Self {
        Self {
            name: name.clone(),
            waker: Some(Waker::from(task.clone())),
            task: task.clone(),
            ports_notify: false,
            linked: false,
            conditions: Conditions::new(conditions),
            awaited: Awaited::new(),
            has_lacks: false,
            among_others: false,
            holds_token: false,
            asks_may_run: true,
            calls_after: true,
            running: false,
            finished: false,
            waited: false,
            failure: None,
            runs: 0,
            polls_left: MAX_STREAK,
            spin_detector: SpinDetector::default(),
            busy: BusyClock::new(may_block),
        }
    }

    /// For an operator with a loop of its own, which might wait for other things at the same time. Its `may_run` is not
    /// called.
    pub(super) fn is_one_of_several_waits(&mut self) {
        self.asks_may_run = false;
        self.among_others = true;
        // A wait that was leaked (`mem::forget`) has kept the previous waker.
        self.waker.get_or_insert_with(|| Waker::from(self.task.clone()));
    }

    pub(super) fn holds_token(&mut self, holds: bool) {
        self.holds_token = holds;
    }

    #[cold]
    fn yield_now(&mut self, ports: Option<&mut dyn AllPorts>, task: &mut Context<'_>) -> Poll<bool> {
        self.polls_left = MAX_STREAK;
        let in_one_poll = self.task.began_in_this_poll();
        // A section takes a message at each input in every run: it does not spin.
        let error = ports.and_then(|ports| self.spin_detector.check(&self.name, self.runs, in_one_poll, ports, task));
        if let Some(error) = error {
            return self.fail(error);
        }
        wake_again(task.waker());
        Poll::Pending
    }

    /// Called when the claim failed, since another task was faster: polls again after that task.
    #[cold]
    fn poll_again(&mut self, task: &Context<'_>) -> Poll<bool> {
        let what = self.conditions.as_ref().and_then(|conditions| conditions.refused());
        let waited = std::mem::take(&mut self.waited);
        if let Some(error) = self.spin_detector.refused(self.runs, waited, what) {
            return self.fail(error);
        }
        wake_again(task.waker());
        Poll::Pending
    }

    /// Ends the operator with an error, whatever its `run` returns.
    #[cold]
    fn fail(&mut self, error: Error) -> Poll<bool> {
        self.failure = Some(error);
        Poll::Ready(false)
    }

    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// Called when the operator cannot run yet, or never again.
    #[inline]
    fn wait(&mut self, asked: Readiness, ports: Option<&mut dyn AllPorts>) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.waited = true;
        match asked {
            Readiness::WAIT if self.conditions.is_none() && !self.ports_notify => {
                if self.has_lacks {
                    self.publish_lacks(Vec::new(), false);
                }
                self.task.publish(Status::Wait);
            }
            _ => self.publish_status(asked, ports),
        }
        self.idle(asked, OperatorTask::park)
    }

    /// Called when everything was ready except for the conditions without a waker, or `may_run`.
    #[cold]
    fn wait_refused(&mut self, asked: Readiness) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.task.publish(asked.status(self.conditions.as_ref().and_then(|conditions| conditions.due())));
        self.idle(asked, OperatorTask::park_refused)
    }

    /// Returns the operator's token, unless its wait can end without another operator.
    #[inline]
    fn idle(&self, asked: Readiness, park: fn(&OperatorTask)) -> Poll<bool> {
        if let Some(permit) = self.task.held_by() {
            permit.refuse();
            self.task.note_wait(false);
            return Poll::Pending;
        }
        let for_others = asked.needs_others() && !self.holds_token || mutants::is(Mutant::TokenTooSoon);
        // The current poll might have dropped a wait at a port before it reached this one.
        if self.among_others || self.task.has_noted_wait() {
            self.task.note_wait(for_others);
        } else if for_others {
            park(&self.task);
        }
        Poll::Pending
    }

    #[cold]
    fn publish_status(&mut self, asked: Readiness, mut ports: Option<&mut dyn AllPorts>) {
        let mut due = None;
        if asked == Readiness::WAIT_TIME {
            due = self.conditions.as_ref().and_then(|conditions| conditions.due());
            ports.iter_mut().for_each(|ports| {
                ports.visit_all(&mut |_, port| due = due.max(port.input_wait().and_then(InputWait::deadline)))
            });
        }
        let mut lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        let mut elsewhere = self.conditions.as_ref().is_some_and(|conditions| conditions.wait_elsewhere());
        if !self.awaited.is_empty() {
            lacks.push("a buffer's data".into());
            elsewhere = true;
        }
        ports.iter_mut().for_each(|ports| {
            ports.visit_all(&mut |name, port| {
                lacks.extend(port.input_wait().and_then(InputWait::describe).map(|wait| format!("{wait} at `{name}`")));
            });
        });
        self.publish_lacks(lacks, elsewhere);
        self.task.publish(asked.status(due));
    }

    /// Publishes what the operator waits for besides its hubs.
    #[inline]
    fn publish_lacks(&mut self, lacks: Vec<String>, elsewhere: bool) {
        if self.has_lacks || elsewhere || !lacks.is_empty() {
            self.has_lacks = elsewhere || !lacks.is_empty();
            self.task.status.set_lacks(lacks, elsewhere);
        }
    }

    /// Called when the operator stops waiting for its next run, and does something else.
    #[cold]
    fn stop_waiting(&mut self, ports: Option<&mut dyn AllPorts>) {
        ports.into_iter().for_each(|ports| ports.visit_all(&mut |_, port| port.idle()));
        self.awaited.iter_mut().for_each(HostAccess::suspend);
        // This runs in a destructor, perhaps of a task that panics.
        contained("`stop_waiting` of a condition panicked", || {
            self.conditions.iter_mut().for_each(|conditions| conditions.stop_waiting());
        });
        self.task.resume();
        if let Some(permit) = self.task.held_by() {
            permit.withdraw();
        }
        self.publish_lacks(Vec::new(), false);
        self.task.publish(Status::Ready);
    }

    /// True if it has conditions besides its ports.
    #[inline]
    pub(super) fn has_conditions(&self) -> bool {
        self.conditions.is_some() || !self.awaited.is_empty()
    }

    /// Polls the conditions besides the ports. `is_stopping`: the flow is being drained.
    #[cold]
    pub(super) fn poll_conditions(
        &mut self,
        ports: &mut dyn AllPorts,
        is_stopping: bool,
        task: &mut Context<'_>,
    ) -> Readiness {
        let mut asked = condition::poll_buffers(&mut self.awaited, task);
        if let Some(conditions) = &mut self.conditions {
            asked = asked | conditions.poll(&mut |port, ask| ask_port(ports, port, ask), task);
            // An operator that runs for a message or for something else would run for the latter for ever.
            if is_stopping && have_ended(ports) {
                asked = Readiness::NEVER;
            }
        }
        asked
    }

    /// True if it has conditions without a waker, or a `may_run`.
    #[inline]
    pub(super) fn has_last_poll(&self) -> bool {
        self.asks_may_run || self.conditions.as_ref().is_some_and(|conditions| conditions.has_polled_last())
    }

    /// Polls the conditions without a waker. Also returns what they lack, and whether `may_run` is to be called.
    pub(super) fn poll_without_waker(
        &mut self,
        ports: &mut dyn AllPorts,
        task: &mut Context<'_>,
    ) -> (Readiness, Vec<String>, bool) {
        // A port that is ready keeps no waker, but its next message is a reason to poll again. Registered first, so
        // that no message is missed.
        ports.visit_all(&mut |_, port| port.watch(task.waker()));
        let mut asked = Readiness::READY;
        if let Some(conditions) = &mut self.conditions {
            asked = conditions.poll_last(&mut |port, ask| ask_port(ports, port, ask), task);
        }
        let lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        (asked, lacks, asked.is_ready() && self.asks_may_run)
    }

    /// Combines the results of the last poll. `allowed`: the answer of the operator's `may_run`, if it was called.
    pub(super) fn finish_last_poll(
        &mut self,
        mut asked: Readiness,
        mut lacks: Vec<String>,
        allowed: Option<bool>,
    ) -> Readiness {
        if let Some(allowed) = allowed {
            if !allowed {
                asked = Readiness::WAIT;
                lacks.push("its own `may_run` to allow it".into());
            }
            self.asks_may_run = !self.task.is_default(Method::MayRun);
        }
        self.publish_lacks(lacks, !asked.is_ready());
        self.task.answered(asked.is_ready());
        asked
    }

    /// Claims what the run needs, all of it or nothing.
    #[allow(clippy::inline_always, reason = "measured: see `poll_next`")]
    #[inline(always)]
    pub(super) fn claim<P: Ports>(&mut self, ports: &mut P) -> bool {
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

    #[allow(clippy::inline_always, reason = "measured: see `poll_next`")]
    #[inline(always)]
    pub(crate) fn begin(&mut self) {
        // A wait before this run must not hide a stall within the run.
        self.publish_lacks(Vec::new(), false);
        self.task.publish_running();
        self.running = true;
        if self.busy.start() {
            self.task.begin_busy();
        }
    }

    /// Ends the current run. False if there is none.
    #[allow(clippy::inline_always, reason = "measured: see `poll_next`")]
    #[inline(always)]
    pub(crate) fn end(&mut self) -> bool {
        if !std::mem::take(&mut self.running) {
            return false;
        }
        self.runs += 1;
        self.task.status.set_runs(self.runs);
        if let Some(conditions) = &mut self.conditions {
            conditions.ended();
        }
        true
    }

    /// Discards the current run without counting it: it found nothing to do, or was captured.
    pub(crate) fn discard_run(&mut self) {
        self.running = false;
    }

    /// Counts a run that was replayed without calling the operator.
    pub(super) fn count_run(&mut self) {
        self.runs += 1;
    }

    pub(super) fn runs(&self) -> u64 {
        self.runs
    }

    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// True if a run has ended and `after` must be called.
    #[inline]
    pub(super) fn has_run(&self) -> bool {
        self.calls_after && self.running
    }

    pub(super) fn calls_after(&mut self, calls: bool) {
        self.calls_after = calls;
    }

    /// Commits the chunks of linked hubs, after a run that has succeeded.
    #[inline]
    pub(super) fn commit(&mut self, ports: &mut dyn AllPorts) -> Result<()> {
        if self.linked && self.running { commit(ports) } else { Ok(()) }
    }

    #[inline]
    pub(super) fn stop_clock(&mut self) {
        if let Some((now, long)) = self.busy.stop() {
            self.task.status.set_stopped(self.busy.total(), now);
            if let Some(busy) = long {
                self.was_busy_for_long(busy);
            }
        }
    }

    /// Adds the time for which a worker of the operator was busy, in ticks.
    pub(super) fn add_busy(&mut self, busy: u64) {
        self.busy.add(busy);
        self.task.status.set_stopped(self.busy.total(), Ticks::now());
    }

    /// Called after a long stretch of runs, which might have blocked the worker thread.
    #[cold]
    fn was_busy_for_long(&mut self, busy: u64) {
        // Otherwise the operator has waited in between, and other tasks had their turn.
        if self.task.began_in_this_poll() {
            self.busy.blocked(&self.name, busy);
        }
    }

    /// Lets no run begin after the current one.
    pub(super) fn finish(&mut self) {
        self.finished = true;
    }

    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    pub(super) fn run_after(&mut self, available: HostAccess) {
        self.awaited.push(available);
    }

    /// Waits for the buffers of [`run_after`](Self::run_after), where no ports are polled.
    pub(super) async fn until_awaited(&mut self) {
        if !self.awaited.is_empty() {
            poll_fn(|task| match condition::poll_buffers(&mut self.awaited, task).is_ready() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
            .await;
        }
    }

    /// Waits in the middle of a run until its messages are sent.
    pub(crate) async fn until_sent(&mut self, mut flush: impl FnMut(&mut Context<'_>) -> Flush) -> Result<()> {
        let own = self.waker.get_or_insert_with(|| Waker::from(self.task.clone()));
        poll_fn(|task| self.task.poll_port(own, RunWait::SENDS, task, &mut flush)).await
    }

    /// Called before the operator's own `start`.
    pub(super) fn start_conditions(&mut self) {
        self.conditions.iter_mut().for_each(|conditions| conditions.start());
    }

    /// Called after the operator's own `stop`.
    pub(super) fn release_conditions(&mut self) {
        self.conditions.iter_mut().for_each(|conditions| conditions.stop_waiting());
    }

    /// Returns the conditions that it was given.
    pub(super) fn into_conditions(mut self) -> Vec<When> {
        self.conditions.take().map(|conditions| conditions.into_all()).unwrap_or_default()
    }

    /// Called when no further run follows until the flow is run again.
    pub(super) fn close(&mut self) {
        self.finished = false;
        self.awaited.clear();
        if let Some(conditions) = &mut self.conditions {
            conditions.close();
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

/// True if the operator has inputs, and no message will arrive at any of them.
fn have_ended(ports: &mut dyn AllPorts) -> bool {
    let (mut any, mut all) = (false, true);
    ports.visit_all(&mut |_, port| {
        any |= !port.is_output();
        all &= port.is_output() || port.has_ended();
    });
    any && all
}

/// The device work that a run leaves behind.
pub(super) struct EndOfRun {
    pub(super) task: Arc<OperatorTask>,
    pub(super) last: SmallVec<[Ticket; 2]>,
}

impl EndOfRun {
    /// Waits for that work, if the operator overrides `after`. The caller has called `after` before: unless it is
    /// overridden, the call sets a flag. The call executes nothing of an `async fn`. False if it is not overridden.
    pub(super) async fn done(self) -> Result<bool> {
        if self.task.is_default(Method::After) {
            return Ok(false);
        }
        for last in self.last {
            last.completed().await?;
        }
        Ok(true)
    }
}

/// The default `run`. A macro, since the futures of an `Operator` are `Send` and those of a `LocalOperator` are not.
macro_rules! all_runs {
    ($operator:ident, $ports:ident, $cx:ident) => {{
        $cx.uses_default($crate::operator::operator_task::Method::Run);
        async move {
            while $cx.until_ready($ports, |ports, cx| $operator.may_run(ports, cx)).await {
                $operator.compute($ports, $cx).await?;
                $cx.run_loop.commit($ports)?;
                $crate::operator::run_loop::after_run!($operator, $ports, $cx);
            }
            Ok(())
        }
    }};
}

/// After a run: awaits the run's device work and then calls the operator's `after`, if the operator overrides it.
macro_rules! after_run {
    ($operator:ident, $ports:ident, $cx:ident) => {
        if $cx.run_loop.has_run() {
            let end = $cx.end_of_run();
            let is_overridden = {
                let after = $operator.after($ports, $cx);
                let is_overridden = end.done().await?;
                if is_overridden {
                    after.await?;
                }
                is_overridden
            };
            $cx.run_loop.calls_after(is_overridden);
        }
    };
}

pub(super) use {after_run, all_runs};
