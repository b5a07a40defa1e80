//! From one run of an operator to the next: what it waits for is asked, claimed, and shown where it is not there.
//!
//! ```text
//!   until_ready ──> the last run ends ──> ended, aborted, held? ──> ports, conditions ──> `may_run` ──> claim ──> run
//!        ^                                                              │ not ready        │ no          │ lost
//!        └── woken: all of it again ──── parked, unless it comes by itself <───────────────┴─────────────┘
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
        node::{Method, Node},
        permit::{Permit, TURN},
        ports::AllPorts,
    },
    stream::Ticket,
    sync::{contained, wake_again},
};

/// As many runs as tokio lets a task have operations at a stretch.
pub(in crate::operator) const LONGEST_STREAK: u32 = 128;

impl Cx {
    /// Waits until the operator may run, and begins the run: all conditions are ready and what they promise is claimed.
    /// False if it may never run again. For operators that override [`run`](crate::Operator::run).
    ///
    /// # Cancel safety
    /// Nothing is taken from a port before it resolves; dropping it changes nothing. While it waits, and for nothing else
    /// beside it (a timer, a channel: in a `select!`, say), the operator counts as one that waits for others: a flow of
    /// which all do is at its end.
    pub async fn ready<P: Ports>(&mut self, ports: &mut P) -> bool {
        // What goes wrong with it, the next run is told.
        let _ = self.commit(ports);
        self.asks_may_run = false;
        self.among_others = true;
        // A wait that was forgotten (`mem::forget`) has kept the other one.
        self.waker.get_or_insert_with(|| Waker::from(self.node.clone()));
        self.until_ready(ports, |_, _| true).await
    }

    /// A run has ended well: what it was given of hubs of chunks is committed.
    #[inline]
    pub(in crate::operator) fn commit(&mut self, ports: &mut dyn AllPorts) -> Result<()> {
        if self.linked && self.running { commit(ports) } else { Ok(()) }
    }

    /// Whether a run has ended after which [`after`](Self::after) is to be called.
    #[inline]
    pub(in crate::operator) fn has_run(&self) -> bool {
        self.calls_after && self.running
    }

    /// A run has ended.
    pub(in crate::operator) fn end_of_run(&mut self) -> EndOfRun {
        self.end_run();
        self.carry.goes_on();
        self.stop_clock();
        let last = self.lane.as_ref().map(|lane| lane.run_ends()).unwrap_or_default();
        EndOfRun { node: self.node.clone(), last }
    }

    /// From now on whether the operator's `after` is called.
    pub(in crate::operator) fn calls_after(&mut self, calls: bool) {
        self.calls_after = calls;
    }

    /// As [`ready`](Self::ready), with what the operator's own `may_run` has to say.
    #[inline]
    pub(in crate::operator) async fn until_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        mut may_run: impl FnMut(&P, &Cx) -> bool,
    ) -> bool {
        self.carry.let_go();
        if self.linked {
            ports.visit(&mut |_, port| port.let_go());
        }
        let waker = self.waker.take();
        let mut asking = Asking { cx: self, ports, waits: false, waker };
        poll_fn(|task| {
            let own = asking.waker.as_ref().filter(|_| asking.cx.node.is_face(task.waker()));
            if own.is_none() {
                asking.cx.node.register_within(task.waker());
                // Tokio is not given the user's waker.
                if !tokio::task::coop::has_budget_remaining() {
                    wake_again(task.waker());
                    return Poll::Pending;
                }
            }
            let task = &mut Context::from_waker(own.unwrap_or(task.waker()));
            let asked = asking.cx.poll_ready(asking.ports, &mut may_run, task);
            // The end of one run is the beginning of the next, if it does not have to wait.
            if asked != Poll::Ready(true) {
                // One that never runs again waits no more, either: what its ports keep for it goes to others.
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
        // An operator that is always ready lets others have a turn now and then, also where tokio's budget is off.
        self.asks_left -= 1;
        if self.asks_left == 0 {
            self.asks_left = LONGEST_STREAK;
            let in_one_poll = self.node.began_in_this_poll();
            if let Some(error) = self.fruitless.look(&self.name, self.runs, in_one_poll, ports, task) {
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
            // Another task was quicker: look again, after it.
            let what = self.conditions.as_ref().and_then(|conditions| conditions.refused());
            if let Some(error) = self.fruitless.refused(self.runs, what) {
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

    /// It is to end, to be aborted, or held. None: it may run all the same.
    #[cold]
    fn obey(&mut self, ports: &mut dyn AllPorts, task: &Context<'_>) -> Option<Poll<bool>> {
        if self.finished || self.node.is_finishing() {
            if let Some(permit) = self.held_by() {
                permit.leave(self.last());
            }
            return Some(Poll::Ready(false));
        }
        if self.node.is_aborted() {
            // What it does is dropped at the next poll.
            wake_again(task.waker());
            return Some(Poll::Pending);
        }
        // Before the turn that is given up now and then: a step is not answered by that.
        if self.node.is_held() && !self.may_begin() {
            if self.linked {
                // Other links of a hub of chunks, which may be another flow's, do not wait behind it meanwhile.
                ports.visit_all(&mut |_, port| port.rest());
            }
            return Some(Poll::Pending);
        }
        None
    }

    /// Who steps through its runs.
    #[inline]
    fn held_by(&self) -> Option<&Permit> {
        if self.node.is_held() { self.node.permit() } else { None }
    }

    /// It waits for its next run no more, and does something else.
    #[cold]
    fn give_up(&mut self, ports: &mut dyn AllPorts) {
        ports.visit_all(&mut |_, port| port.rest());
        self.awaited.iter_mut().for_each(HostAccess::rest);
        // In a destructor, perhaps of a task that panics.
        contained("a condition panicked as it was given up", || {
            self.conditions.iter_mut().for_each(|conditions| conditions.rest());
        });
        self.node.resume();
        if let Some(permit) = self.held_by() {
            permit.go_away();
        }
        self.tell(Vec::new(), false);
        self.node.show(Status::Ready);
    }

    /// It is paused, or stepped through: may a run begin all the same?
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
        // Not at rest: `resume`, or the next step, may let it go on. Noted, since the present poll may have given up another wait.
        self.tell(lacks, false);
        self.node.show(Status::WaitEvent);
        self.node.note_wait(false);
        false
    }

    /// A run begins.
    #[inline]
    fn begin(&mut self) {
        if self.lane.is_some() {
            self.begin_on_device();
        }
        self.carry.begin();
        // What it waited for before this run keeps nothing from being a stall that happens in it.
        self.tell(Vec::new(), false);
        self.node.show_running();
        self.running = true;
        if self.busy_since.is_none() {
            self.node.begin_busy();
            self.busy_since = Some(Ticks::now());
        }
    }

    #[inline(never)]
    fn begin_on_device(&mut self) {
        if self.lane.as_ref().is_some_and(|lane| lane.begin()) {
            self.stream = None;
        }
        if let Some(stream) = self.timed_stream() {
            stream.begin_run();
        }
    }

    /// A worker's run begins: what it needs was handed to its ports.
    pub(in crate::operator) fn begin_run(&mut self, ports: &mut dyn AllPorts) {
        let _ = ports.claim_all();
        self.begin();
    }

    /// Asks what is waited for beside the ports.
    #[cold]
    fn poll_more(&mut self, ports: &mut dyn AllPorts, task: &mut Context<'_>) -> Readiness {
        let mut asked = condition::buffers(&mut self.awaited, task);
        if let Some(conditions) = &mut self.conditions {
            asked = asked | conditions.poll(&mut |port, ask| ask_port(ports, port, ask), task);
            // One that runs for a message or for something else would go on for the other for ever.
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

    /// It may not run yet, or never again.
    #[inline]
    fn wait(&mut self, asked: Readiness, ports: &mut dyn AllPorts) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.fruitless.waits();
        match asked {
            Readiness::WAIT if self.conditions.is_none() && !self.ports_tell => {
                if self.told {
                    self.tell(Vec::new(), false);
                }
                self.node.show(Status::Wait);
            }
            _ => self.show(asked, ports),
        }
        self.rest(asked, Node::park)
    }

    /// It gives its token back, if what it waits for does not come by itself.
    #[inline]
    fn rest(&self, asked: Readiness, park: fn(&Node)) -> Poll<bool> {
        if let Some(permit) = self.held_by() {
            permit.refuse();
            self.node.note_wait(false);
            return Poll::Pending;
        }
        let for_others = asked.needs_others() && !self.holds_token || mutants::is(Mutant::TokenTooSoon);
        // The present poll may have come here from a wait at a port that it has given up.
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
            ports.visit_all(&mut |_, port| due = due.max(port.due()));
        }
        let mut lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        let mut elsewhere = self.conditions.as_ref().is_some_and(|conditions| conditions.wait_elsewhere());
        if !self.awaited.is_empty() {
            lacks.push("a buffer's data".into());
            elsewhere = true;
        }
        ports.visit_all(&mut |name, port| lacks.extend(port.lacks().map(|lacks| format!("{lacks} at `{name}`"))));
        self.tell(lacks, elsewhere);
        self.node.show(asked.status(due));
    }

    /// For others to read: what it waits for beside its hubs.
    #[inline]
    fn tell(&mut self, lacks: Vec<String>, elsewhere: bool) {
        if self.told || elsewhere || !lacks.is_empty() {
            self.told = elsewhere || !lacks.is_empty();
            self.node.shown.set_lacks(lacks, elsewhere);
        }
    }

    /// Asks what has no waker, and the operator itself, when all else is ready.
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
        // A port that has what it waits for keeps no waker; but the next message is a reason to ask again. Kept first, so
        // that none comes unseen.
        ports.visit_all(&mut |_, port| port.watch(task.waker()));
        let mut asked = Readiness::READY;
        if let Some(conditions) = &mut self.conditions {
            asked = conditions.poll_last(&mut |port, ask| ask_port(ports, port, ask), task);
        }
        let lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        (asked, lacks)
    }

    /// `allowed`: what its own `may_run` has said, where it was asked.
    fn asked_last(&mut self, mut asked: Readiness, allowed: Option<bool>, mut lacks: Vec<String>) -> Readiness {
        if let Some(allowed) = allowed {
            if !allowed {
                asked = Readiness::WAIT;
                lacks.push("its own `may_run` to allow it".into());
            }
            self.asks_may_run = !self.node.is_default(Method::MayRun);
        }
        self.tell(lacks, !asked.is_ready());
        self.node.answered(asked.is_ready());
        asked
    }

    /// Everything was ready but what has no waker.
    #[cold]
    fn wait_refused(&mut self, asked: Readiness) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.node.show(asked.status(self.conditions.as_ref().and_then(|conditions| conditions.due())));
        self.rest(asked, Node::park_refused)
    }

    /// Takes what the run needs, all of it or nothing.
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

    /// The present run's end, if there is one.
    #[inline]
    pub(in crate::operator) fn end_run(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        self.runs += 1;
        self.carry.end();
        self.node.shown.ran(self.runs);
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
        // Else it has waited in between, and others had their turn.
        if self.node.began_in_this_poll() {
            self.blocking.note(&self.name, busy);
        }
    }
}

/// Shows one of the ports, by its number.
fn ask_port(ports: &mut dyn AllPorts, number: usize, ask: &mut dyn FnMut(&mut dyn PortState)) {
    let mut at = 0;
    ports.visit_all(&mut |_, port| {
        if at == number {
            ask(port.state());
        }
        at += 1;
    });
}

#[cold]
fn commit(ports: &mut dyn AllPorts) -> Result<()> {
    let mut committed = Ok(());
    ports.visit_all(&mut |name, port| {
        if committed.is_ok() {
            committed = port.run_ended().map_err(|error| error.at(format!("port `{name}`")));
        }
    });
    committed
}

/// What a run leaves behind: work of its device.
pub(in crate::operator) struct EndOfRun {
    node: Arc<Node>,
    last: SmallVec<[Ticket; 2]>,
}

impl EndOfRun {
    /// Waits for that work, if the operator does something once it is done: `after` was called, which runs nothing of an `async fn`,
    /// and says whether there is one. False if not.
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

/// It has inputs, and nothing will come to any of them.
fn have_ended(ports: &mut dyn AllPorts) -> bool {
    let (mut any, mut all) = (false, true);
    ports.visit_all(&mut |_, port| {
        any |= !port.is_output();
        all &= port.is_output() || port.has_ended();
    });
    any && all
}

/// A wait for the next run. Given up in the middle, it is no wait any more: the operator goes on with something else.
struct Asking<'a, P: Ports> {
    cx: &'a mut Cx,
    ports: &'a mut P,
    waits: bool,
    waker: Option<Waker>,
}

impl<P: Ports> Asking<'_, P> {
    #[cold]
    fn give_up(&mut self) {
        self.cx.give_up(self.ports);
    }
}

impl<P: Ports> Drop for Asking<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.cx.waker = self.waker.take();
        if self.waits {
            self.give_up();
        }
    }
}
