//! [`OperatorTask`]: an operator's task as seen by its wakers.
//!
//! Every waker of an operator goes through its `OperatorTask`, which wakes the tokio task and keeps the
//! [tokens](super::idle) correct. It also carries requests from outside: end after this run, pause, abort. The
//! operator's future is polled with its [probe waker](probe_waker).

pub(super) mod probe_waker;

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Instant,
};

use smallvec::SmallVec;

use self::probe_waker::ProbeGuard;
use super::{
    activity::FlowActivity,
    idle::{NotedWaits, Parking, Woken},
    pacing::Pacing,
    permit::Permit,
    spinning::Spinning,
    status_cell::{RunWait, StatusCell},
};
use crate::{
    condition::Status,
    error::{Error, ErrorKind, Result},
    sync::{KeptWaker, Mutex, Waited, WakerCell, discard, take_wait},
    tracepoint::TracedPolls,
};

/// The fields that every wake and poll needs come first, those that a waking thread reads before those that the
/// operator's own task writes: each hop between operators touches two cache lines here, and not six.
#[repr(C, align(64))]
pub(crate) struct OperatorTask {
    /// Bits of [`state`].
    state: AtomicU32,
    spinning: Spinning,
    parking: Parking,
    activity: Arc<FlowActivity>,
    /// The waker of the tokio task, from the first poll: tokio's wakers of one task are all equal.
    waker: OnceLock<KeptWaker>,
    poll: CurrentPoll,
    pub(super) status: StatusCell,
    operator: usize,
    /// What the operator waits for in the middle of a run.
    in_run: Mutex<Option<RunWait>>,
    wakers: MoreWakers,
    /// Controls the operator's runs while a task steps through the flow.
    permit: OnceLock<Permit>,
    /// Set if the operator expects messages from outside.
    pacing: OnceLock<Arc<Pacing>>,
    /// If its runs are concurrent: the tasks of its workers, for observers.
    workers: OnceLock<Vec<Weak<OperatorTask>>>,
    /// Set if its polls are traced.
    traced: OnceLock<TracedPolls>,
}

/// The other wakers that are woken with an operator.
struct MoreWakers {
    /// The waker of the latest poll, if it differs from the first one.
    other: WakerCell,
    /// The waker of a combinator within the operator's future, if it polls the wait for the next run with a waker of
    /// its own.
    within: WakerCell,
    /// For a worker: the task of its operator.
    dispatcher: OnceLock<Arc<OperatorTask>>,
}

/// What a task does, for observers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenTask {
    /// What its latest poll that has ended waited for, besides its ports.
    pub(crate) waited: Waited,
    pub(crate) in_poll: bool,
    /// The number of polls that have ended.
    pub(crate) polls: u32,
    /// It was woken, and waits to be polled.
    pub(crate) is_woken: bool,
}

/// The operator's own view of its current poll. Written only by its own task.
struct CurrentPoll {
    /// The address of the current probe waker; 0 if there is none.
    probe_addr: AtomicUsize,
    /// Decides whether the operator waits only for other operators in the middle of a run.
    waits: NotedWaits,
    /// The current streak of runs began in this poll.
    began_here: AtomicBool,
    /// The number of watcher registrations at the previous poll.
    watched: AtomicUsize,
    /// The bits of [`doing`].
    doing: AtomicU32,
}

/// What an operator's poll does, for observers.
mod doing {
    /// The [`Waited`](crate::sync::Waited) with which the latest poll ended.
    pub(super) const WAITED: u32 = 3;
    /// The operator's future is being polled.
    pub(super) const IN_POLL: u32 = 1 << 2;
    /// The bits above count the polls.
    pub(super) const POLL: u32 = 1 << 3;
}

/// The state of an operator's task, in one word: an operator without any request does a single load before a run.
mod state {
    // Requests from outside. The next run does not begin by itself, or never begins.
    pub(super) const PAUSED: u32 = 1;
    pub(super) const STEPPED: u32 = 1 << 1;
    pub(super) const FINISHING: u32 = 1 << 2;
    pub(super) const ABORTED: u32 = 1 << 3;
    pub(super) const HELD: u32 = PAUSED | STEPPED;
    pub(super) const REQUESTS: u32 = HELD | FINISHING | ABORTED;
    /// The operator has ended.
    pub(super) const ENDED: u32 = 1 << 4;
    /// No more messages arrive, though the other end of its hub still exists.
    pub(super) const RELEASED: u32 = 1 << 5;
    /// Other wakers are registered besides that of the first poll.
    pub(super) const MORE_WAKERS: u32 = 1 << 6;
    /// See [`answer`](super::answer).
    pub(super) const AGREED: u32 = 1 << 7;
    /// The two bits of the last answer of `may_run`, one of [`answer`](super::answer).
    pub(super) const ANSWER: u32 = 3 << 8;
    /// Shifts the bits of the [methods](super::Method) that the operator does not override.
    pub(super) const DEFAULTS_SHIFT: u32 = 10;
    pub(super) const DEFAULTS: u32 = 7 << DEFAULTS_SHIFT;
    /// Its polls are traced.
    pub(super) const TRACED: u32 = 1 << 13;
}

/// A method that an operator may override.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    Run = 1,
    MayRun = 2,
    After = 4,
}

/// The last answer of the operator's `may_run`. A `false` might depend on what other operators do, which does not wake
/// this one. If others were still active at that time, the method is called once more when all are idle. If an operator
/// that had answered `false` now answers `true` (`agreed`), all others that answered `false` are asked again.
///
/// ```text
///             no                  idle              no
///   ALLOWED ─────────> REFUSED ─────────> AGAIN ─────────> REFUSED_AGAIN    if all are here, there is no reason to ask
///      ^                  │ yes             │ yes               │ yes
///      └──────────────────┴─────────────────┴───────────────────┘ agreed
/// ```
mod answer {
    pub(super) const ALLOWED: u32 = 0;
    pub(super) const REFUSED: u32 = 1 << 8;
    pub(super) const AGAIN: u32 = 2 << 8;
    pub(super) const REFUSED_AGAIN: u32 = 3 << 8;
}

impl OperatorTask {
    pub(crate) fn new(operator: usize, activity: &Arc<FlowActivity>) -> Arc<Self> {
        Arc::new(Self {
            operator,
            state: AtomicU32::new(answer::ALLOWED),
            parking: Parking::new(&activity.tokens, operator),
            activity: activity.clone(),
            waker: OnceLock::new(),
            wakers: MoreWakers { other: WakerCell::new(), within: WakerCell::new(), dispatcher: OnceLock::new() },
            poll: CurrentPoll {
                probe_addr: AtomicUsize::new(0),
                waits: NotedWaits::new(),
                began_here: AtomicBool::new(false),
                watched: AtomicUsize::new(0),
                doing: AtomicU32::new(Waited::Other as u32),
            },
            in_run: Mutex::new(None),
            permit: OnceLock::new(),
            pacing: OnceLock::new(),
            workers: OnceLock::new(),
            traced: OnceLock::new(),
            spinning: Spinning::new(),
            status: StatusCell::new(),
        })
    }

    /// A task for work that is independent of a flow's runs: it has tokens of its own.
    pub(crate) fn alone() -> Arc<Self> {
        Self::new(0, &FlowActivity::new(1))
    }

    /// The task of a worker of a concurrent operator: the operator's own task is woken when this one parks and when it
    /// is woken.
    pub(super) fn of_worker(dispatcher: &Arc<Self>) -> Arc<Self> {
        let task = Self::alone();
        let _ = task.wakers.dispatcher.set(dispatcher.clone());
        task.set(state::MORE_WAKERS, true);
        dispatcher.traced.get().cloned().into_iter().for_each(|traced| task.trace(traced));
        task
    }

    /// Shows the tasks of the operator's workers to observers.
    pub(super) fn show_workers(&self, workers: &[Arc<Self>]) {
        let _ = self.workers.set(workers.iter().map(Arc::downgrade).collect());
    }

    /// What the operator's workers do, if its runs are concurrent. A worker's task may be dropped here: not with a lock held,
    /// unless the drop is [deferred](crate::sync::Deferred).
    pub(crate) fn workers(&self) -> SmallVec<[SeenTask; 4]> {
        let seen = self.workers.get().into_iter().flatten().filter_map(Weak::upgrade).map(|worker| {
            let seen = worker.seen();
            discard(worker);
            seen
        });
        seen.collect()
    }

    /// Has its polls traced, and those of workers that it has from now on.
    pub(crate) fn trace(&self, traced: TracedPolls) {
        let _ = self.traced.set(traced);
        self.set(state::TRACED, true);
    }

    pub(crate) fn operator(&self) -> usize {
        self.operator
    }

    pub(super) fn is_worker(&self) -> bool {
        self.wakers.dispatcher.get().is_some()
    }

    pub(crate) fn activity(&self) -> &Arc<FlowActivity> {
        &self.activity
    }

    /// The activity of the operator's flow: a worker's own is that of its runs alone.
    pub(super) fn flow_activity(&self) -> &Arc<FlowActivity> {
        self.wakers.dispatcher.get().map_or(&self.activity, |dispatcher| dispatcher.activity())
    }

    /// Takes a token if the operator is parked. Called before the ports are polled, and when a wait at them is dropped.
    #[inline]
    pub(crate) fn resume(&self) {
        self.parking.resume(&self.activity.tokens);
    }

    /// Returns the operator's token, after nothing was ready.
    pub(crate) fn park(&self) {
        let last = self.parking.park(&self.activity.tokens);
        if last || self.activity.is_park_awaited() {
            self.parked(last);
        }
    }

    /// Notifies the flow's task. Not inlined, like `wake_changed`: it keeps the code of a hop between operators short.
    #[cold]
    fn parked(&self, last: bool) {
        if last {
            self.activity.flow.wake();
            self.wake_dispatcher();
        }
        self.activity.notify_of_park();
    }

    #[cold]
    fn wake_changed(&self) {
        self.wakers.other.wake();
        self.wakers.within.wake();
        // The dispatcher holds its flow's token on behalf of this worker, and must take it before the waking operator
        // returns its own.
        self.wake_dispatcher();
    }

    fn wake_dispatcher(&self) {
        if let Some(dispatcher) = self.wakers.dispatcher.get() {
            dispatcher.wake_by_ref();
        }
    }

    /// Registers a waker that the wait for the next run is polled with: it is woken with the operator, also when runs
    /// may begin again or the operator is to end. Must be called before these are checked.
    #[cold]
    pub(super) fn register_within(&self, waker: &Waker) {
        self.set(state::MORE_WAKERS, true);
        self.wakers.within.register(waker);
    }

    /// Parks an operator for which everything was ready, except that its `may_run` returned false.
    pub(super) fn park_refused(&self) {
        // If all others are idle, there is no reason to call it again.
        if self.parking.is_last(&self.activity.tokens) {
            self.set_answer(answer::REFUSED_AGAIN);
        }
        self.park();
    }

    /// Records that a streak of runs began in this poll.
    #[inline]
    pub(super) fn begin_busy(&self) {
        self.poll.began_here.store(true, Ordering::Relaxed);
    }

    /// True if no run of the current streak has waited in its middle.
    pub(super) fn began_in_this_poll(&self) -> bool {
        self.poll.began_here.load(Ordering::Relaxed)
    }

    /// Publishes why the operator does not run.
    #[inline]
    pub(super) fn publish(&self, status: Status) {
        if self.status.set_status(status) {
            self.activity.watchers.notify(self.operator);
        }
    }

    /// Publishes that the operator runs.
    #[inline]
    pub(super) fn publish_running(&self) {
        if self.status.set_running() {
            self.activity.watchers.notify(self.operator);
        }
    }

    pub(crate) fn status_cell(&self) -> &StatusCell {
        &self.status
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// What the task does.
    pub(crate) fn seen(&self) -> SeenTask {
        const DEVICE: u32 = Waited::Device as u32;
        const MEMORY: u32 = Waited::Memory as u32;
        let word = self.poll.doing.load(Ordering::Relaxed);
        let waited = match word & doing::WAITED {
            DEVICE => Waited::Device,
            MEMORY => Waited::Memory,
            _ => Waited::Other,
        };
        SeenTask { waited, in_poll: word & doing::IN_POLL != 0, polls: word / doing::POLL, is_woken: self.is_woken() }
    }

    /// True if it was woken, and waits to be polled.
    pub(crate) fn is_woken(&self) -> bool {
        !self.parking.is_polled_since_wake()
    }

    /// True if only another operator of its flow will wake it: it is parked; or it waits for its
    /// [permit](super::permit), its last step was refused because it waits for other operators, and it has not been
    /// woken since.
    pub(crate) fn is_idle(&self) -> bool {
        let refused = |permit: &Permit| permit.awaits_only_permit() && self.status.status().0 == Status::Wait;
        self.is_parked() || (self.permit().is_some_and(refused) && self.parking.is_polled_since_wake())
    }

    /// True if it was woken and has not been polled since, or is in a run that does not wait for others.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.parking.is_polled_since_wake() || (self.status.status().1 && !self.is_parked())
    }

    /// Like `is_parked`, and makes the caller's earlier writes visible to the operator's next poll.
    pub(crate) fn publish_and_check_parked(&self) -> bool {
        self.parking.publish_and_check_parked()
    }

    /// Makes the operator expect the messages of one ingress. False if it expects those of another one.
    pub(super) fn expect_messages(&self, pacing: &Arc<Pacing>) -> bool {
        self.pacing.set(pacing.clone()).is_ok()
    }

    #[inline]
    pub(super) fn pacing(&self) -> Option<&Arc<Pacing>> {
        self.pacing.get()
    }

    /// Spins within a poll of the operator. True if it was woken by `until`: it is to be polled again.
    pub(super) fn spin_until(&self, until: Instant) -> bool {
        self.spinning.begin();
        if self.parking.is_polled_since_wake() {
            while self.spinning.is_on() && Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        self.spinning.end()
    }

    /// Lets no run begin after the current one.
    pub(crate) fn finish(self: &Arc<Self>) {
        self.set(state::FINISHING, true);
        self.wake_by_ref();
    }

    pub(crate) fn is_finishing(&self) -> bool {
        self.has(state::FINISHING)
    }

    /// No run begins while the operator is paused. This does not wake it: do that afterwards.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.set(state::PAUSED, paused);
    }

    /// While `stepped`, no run begins unless the permit allows it.
    pub(crate) fn set_stepped(self: &Arc<Self>, stepped: bool) {
        if stepped {
            self.permit.get_or_init(Permit::default);
        }
        self.set(state::STEPPED, stepped);
        self.wake_by_ref();
    }

    /// Requests that the operator's future is dropped at its next poll.
    pub(crate) fn abort(self: &Arc<Self>) {
        self.set(state::ABORTED, true);
        self.wake_by_ref();
    }

    fn set(&self, bits: u32, set: bool) {
        if set {
            self.state.fetch_or(bits, Ordering::AcqRel);
        } else {
            self.state.fetch_and(!bits, Ordering::AcqRel);
        }
    }

    /// Clears a bit. True if it was set.
    fn take(&self, bit: u32) -> bool {
        self.state.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    #[inline]
    fn has(&self, bits: u32) -> bool {
        self.state.load(Ordering::Acquire) & bits != 0
    }

    fn answer(&self) -> u32 {
        self.state.load(Ordering::Acquire) & state::ANSWER
    }

    fn set_answer(&self, answer: u32) {
        let _ =
            self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| Some(word & !state::ANSWER | answer));
    }

    /// True if the next run begins as soon as its conditions are ready: the operator is not paused, stepped, finishing
    /// or aborted.
    #[inline]
    pub(super) fn runs_by_itself(&self) -> bool {
        !self.has(state::REQUESTS)
    }

    /// The permit, while the operator is stepped through.
    pub(crate) fn permit(&self) -> Option<&Permit> {
        self.permit.get().filter(|_| self.has(state::STEPPED))
    }

    /// True while the operator is paused or stepped: no run begins by itself.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.has(state::HELD)
    }

    /// The permit that its runs need, while it is held.
    #[inline]
    pub(super) fn held_by(&self) -> Option<&Permit> {
        if self.is_held() { self.permit() } else { None }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.has(state::ABORTED)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.has(state::PAUSED)
    }

    /// Records that the operator has ended, and returns its token for good.
    pub(crate) fn end(&self) {
        if self.status.set_status(Status::Never) {
            self.activity.watchers.notify_last(self.operator);
        }
        // The combinator that registered `within` might keep the probe waker, and so this task.
        self.wakers.within.wake();
        if self.state.fetch_or(state::ENDED, Ordering::AcqRel) & state::ENDED == 0 {
            self.activity.count_end();
            if self.parking.end(&self.activity.tokens) {
                self.activity.flow.wake();
            }
            // Operators that waited for this one might now wait only for each other.
            self.activity.notify_of_park();
        }
        // Last: a task that steps through the flow reads `ended` when it is woken.
        if let Some(permit) = self.permit.get() {
            permit.end();
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has(state::ENDED)
    }

    pub(super) fn set_default(&self, method: Method) {
        self.set((method as u32) << state::DEFAULTS_SHIFT, true);
    }

    /// Clears the recorded methods, which were another operator's: the operators of a section share one task.
    pub(super) fn forget_defaults(&self) {
        self.set(state::DEFAULTS, false);
    }

    pub(crate) fn is_default(&self, method: Method) -> bool {
        self.has((method as u32) << state::DEFAULTS_SHIFT)
    }

    pub(super) fn answered(&self, allowed: bool) {
        let answer = match (allowed, self.answer()) {
            (true, answer::ALLOWED) => return,
            (true, _) => {
                self.set(state::AGREED, true);
                answer::ALLOWED
            }
            (false, answer::AGAIN) => answer::REFUSED_AGAIN,
            (false, _) => answer::REFUSED,
        };
        self.set_answer(answer);
    }

    /// True if it waits only for its own `may_run`.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_parked() && self.has_refused()
    }

    /// True if the last answer of its `may_run` was false.
    pub(crate) fn has_refused(&self) -> bool {
        matches!(self.answer(), answer::REFUSED | answer::REFUSED_AGAIN)
    }

    /// Allows `may_run` to be called again even if it returned false while all were idle: the flow was active since.
    pub(crate) fn may_be_asked_again(&self) {
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            (word & state::ANSWER == answer::REFUSED_AGAIN).then_some(word & !state::ANSWER | answer::REFUSED)
        });
    }

    /// Called when all operators are idle: wakes those whose `may_run` returned false, if another answer is possible.
    /// Returns false if it is not.
    pub(crate) fn ask_again(tasks: &[Arc<Self>]) -> bool {
        let mut reason = false;
        for task in tasks {
            // An operator that has ended is not asked any more, and would be a reason for ever.
            reason |= task.is_parked() && task.answer() == answer::REFUSED;
            reason |= task.take(state::AGREED);
        }
        let refused: Vec<_> = tasks.iter().filter(|task| reason && task.is_refused()).collect();
        for task in &refused {
            task.set_answer(answer::AGAIN);
        }
        refused.iter().for_each(|task| task.wake_by_ref());
        !refused.is_empty()
    }

    /// Polls the operator's future, with its probe waker. Returns an error once the operator is aborted.
    pub(super) fn poll<T>(
        &self,
        probe: &mut ProbeGuard,
        task: &mut Context<'_>,
        future: impl FnOnce(&mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        let first = self.waker.get_or_init(|| KeptWaker::new(task.waker().clone(), Arc::new(task.waker().clone())));
        if !first.will_wake(task.waker()) {
            self.set(state::MORE_WAKERS, true);
            self.wakers.other.register(task.waker());
        }
        self.poll.began_here.store(false, Ordering::Relaxed);
        // From here on a wake causes another poll. After the waker is stored: an earlier wake is seen below.
        self.parking.begin(&self.activity.tokens);
        self.activity.watchers.notify_new(self.operator, &self.poll.watched);
        if self.has(state::ABORTED | state::TRACED) && !self.may_poll() {
            return Poll::Ready(Err(Error::new(ErrorKind::Cancelled, "the flow was aborted")));
        }
        let before = self.poll.doing.load(Ordering::Relaxed);
        self.poll.doing.store(before | doing::IN_POLL, Ordering::Relaxed);
        take_wait();
        let unwinds = EndPollOnDrop(self);
        let polled = future(&mut Context::from_waker(&probe.waker));
        std::mem::forget(unwinds);
        let polls = (before & !(doing::WAITED | doing::IN_POLL)).wrapping_add(doing::POLL);
        self.poll.doing.store(polls | take_wait() as u32, Ordering::Relaxed);
        let says = !self.poll.waits.is_noted() || self.end_wait(polled.is_pending(), probe);
        if self.has(state::HELD | state::TRACED) {
            self.polled(polled.is_pending(), says, probe);
        }
        polled
    }

    /// False if the operator is aborted. Traces the poll that begins.
    #[cold]
    #[inline(never)]
    fn may_poll(&self) -> bool {
        if self.is_aborted() {
            return false;
        }
        if let Some(traced) = self.traced.get() {
            traced.begin(self.seen().waited == Waited::Device);
        }
        true
    }

    /// Called after a poll of an operator that is held or traced. `says`: it has not returned after a wait in the middle of
    /// a run.
    #[cold]
    #[inline(never)]
    fn polled(&self, is_pending: bool, says: bool, probe: &mut ProbeGuard) {
        if let Some(traced) = self.traced.get() {
            traced.end(is_pending && self.seen().waited == Waited::Device);
        }
        // Last: it notifies the task that steps through the flow.
        if is_pending && says && self.is_held() {
            self.polled_while_held(probe);
        }
    }

    #[cold]
    #[inline(never)]
    fn polled_while_held(&self, probe: &mut ProbeGuard) {
        let Some(permit) = self.permit() else { return };
        let renews = permit.polled(self.status.in_run().is_some(), probe.clones() > 0);
        if renews {
            probe.renew();
        }
    }
}

/// Dropped only if the poll panics: a trace has an end for each poll.
struct EndPollOnDrop<'a>(&'a OperatorTask);

impl Drop for EndPollOnDrop<'_> {
    fn drop(&mut self) {
        self.0.traced.get().into_iter().for_each(|traced| traced.end(false));
    }
}

impl Wake for OperatorTask {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Woken { first, last } = self.parking.wake(&self.activity.tokens);
        if last {
            self.activity.flow.wake();
        }
        if !first {
            return;
        }
        if !self.spinning.wake()
            && let Some(task) = self.waker.get()
        {
            task.wake();
        }
        if self.has(state::MORE_WAKERS) {
            self.wake_changed();
        }
    }
}

impl fmt::Debug for OperatorTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorTask")
            .field("parking", &self.parking)
            .field("ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    /// Records whether the operator had ended when this was woken.
    struct Notes(Arc<OperatorTask>, AtomicU32);

    impl Wake for Notes {
        fn wake(self: Arc<Self>) {
            self.1.store(1 + u32::from(self.0.has_ended()), Ordering::Relaxed);
        }
    }

    /// A task that steps through a flow is notified of an operator's end only after the end is visible: it checks at
    /// once, and is not notified again.
    #[test]
    fn an_end_is_visible_before_it_is_notified() {
        let task = OperatorTask::new(0, &FlowActivity::new(1));
        task.set_stepped(true);
        let notes = Arc::new(Notes(task.clone(), AtomicU32::new(0)));
        let permit = task.permit().unwrap();
        assert!(permit.poll_outcome(&mut Context::from_waker(&Waker::from(notes.clone()))).is_pending());
        task.end();
        assert_eq!(notes.1.load(Ordering::Relaxed), 2);
    }
}
