//! [`OperatorTask`]: an operator's task as seen by its wakers.
//!
//! Every waker of an operator goes through its node, which wakes the tokio task and keeps the [tokens](super::quiet)
//! correct. The node also carries requests from outside: end after this run, pause, abort. The operator's future is
//! polled with the node's [probe waker](probe_waker).

mod probe_waker;

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use self::probe_waker::ProbeGuard;
use super::{
    only_others::OnlyOthers,
    permit::Permit,
    quiet::{Parking, Tokens, Woken},
    status_cell::{InRun, StatusCell},
    watchers::Watchers,
};
use crate::{
    condition::Status,
    error::{Error, ErrorKind, Result},
    hub::external_guard::Quiescence,
    sync::{Mutex, WakerCell, wake_shared},
};

/// The state that all nodes of a flow share.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) tokens: Tokens,
    /// The flow's own task: woken when the last token is returned.
    pub(crate) flow: WakerCell,
    /// A task that steps through the flow: woken when no envelope or link of the flow is outside any more.
    pub(crate) stepper: WakerCell,
    /// Receive notifications of what operators wait for.
    pub(crate) watchers: Watchers,
    /// The number of operators that have not ended.
    left: AtomicUsize,
    /// One of [`parks`].
    parks: AtomicU8,
    /// The number of envelopes that are outside the flow, plus links by hand to its hubs of chunks.
    outside: AtomicUsize,
}

/// Whether the flow's task is to be notified when an operator parks.
mod parks {
    pub(super) const IGNORED: u8 = 0;
    pub(super) const AWAITED: u8 = 1;
    /// An operator has parked since.
    pub(super) const SEEN: u8 = 2;
}

pub(crate) struct OperatorTask {
    /// The waker of the task that polls the node first: tokio's wakers of one task are all equal.
    task: OnceLock<Arc<Waker>>,
    /// Set if the task's waker changes nevertheless: `other`, `within` and `dispatcher` are woken as well.
    changed: AtomicBool,
    other: WakerCell,
    /// The waker of a combinator within the operator's future that polls the wait for the next run with a waker of its
    /// own.
    within: WakerCell,
    /// For a worker: the node of its operator. `changed` is set as well.
    dispatcher: OnceLock<Arc<OperatorTask>>,
    parking: Parking,
    rest: Arc<Rest>,
    /// Bits of [`flags`].
    flags: AtomicU8,
    /// Controls the operator's runs while a task steps through the flow.
    permit: OnceLock<Permit>,
    ended: AtomicBool,
    /// The methods that the operator does not override: one bit for each.
    defaults: AtomicU8,
    asked: AtomicU8,
    agreed: AtomicBool,
    /// The address of the current probe waker; 0 if there is none.
    probe_addr: AtomicUsize,
    /// Decides whether it waits only for other operators in the middle of a run.
    only_others: OnlyOthers,
    /// What the current poll waits for in the middle of a run. Used only by its own task.
    in_poll: Mutex<Option<InRun>>,
    /// No more messages arrive, though the other end of its hub still exists.
    released: AtomicBool,
    /// The current streak of runs began in the current poll. Used only by its own task.
    began_here: AtomicBool,
    operator: usize,
    pub(super) status: StatusCell,
    /// The number of watcher registrations at the previous poll.
    watched: AtomicUsize,
}

/// Reasons why the next run does not begin by itself, or never begins: one word, so that an operator without any of
/// them does a single load.
mod flags {
    pub(super) const PAUSED: u8 = 1;
    pub(super) const STEPPED: u8 = 2;
    pub(super) const HELD: u8 = PAUSED | STEPPED;
    pub(super) const FINISHING: u8 = 4;
    pub(super) const ABORTED: u8 = 8;
}

/// A method that an operator may override.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    Run = 1,
    MayRun = 2,
    After = 4,
}

/// The answer of the operator's `may_run`. A `false` may depend on what other operators do, which does not wake this
/// one. If others were still active at that time, the method is called once more when all are idle. If an operator that
/// had answered `false` now answers `true` (`agreed`), all the others are asked again.
///
/// ```text
///             no                  idle              no
///   ALLOWED ─────────> REFUSED ─────────> AGAIN ─────────> REFUSED_AGAIN    if all are here, there is no reason to ask
///      ^                  │ yes             │ yes               │ yes
///      └──────────────────┴─────────────────┴───────────────────┘ agreed
/// ```
mod asked {
    pub(super) const ALLOWED: u8 = 0;
    pub(super) const REFUSED: u8 = 1;
    pub(super) const AGAIN: u8 = 2;
    pub(super) const REFUSED_AGAIN: u8 = 3;
}

impl Rest {
    pub(crate) fn new(operators: usize) -> Arc<Self> {
        let (flow, stepper, watchers) = (WakerCell::new(), WakerCell::new(), Watchers::default());
        let (tokens, left) = (Tokens::new(operators), AtomicUsize::new(operators));
        let (parks, outside) = (AtomicU8::new(parks::IGNORED), AtomicUsize::new(0));
        Arc::new(Self { tokens, flow, stepper, watchers, left, parks, outside })
    }

    /// Requests that the flow's task is notified when the next operator parks or ends. Call it before checking which
    /// operators are parked: an operator that parks meanwhile is either seen by the check or notifies.
    pub(crate) fn await_park(&self) {
        self.parks.store(parks::AWAITED, Ordering::SeqCst);
    }

    /// Whether an operator has parked or ended since [`await_park`](Self::await_park). True only once.
    pub(crate) fn has_parked(&self) -> bool {
        let (from, to) = (parks::SEEN, parks::IGNORED);
        self.parks.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    fn notify_of_park(&self) {
        let (from, to) = (parks::AWAITED, parks::SEEN);
        if self.parks.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.flow.wake();
        }
    }

    /// A message from outside was accepted and is not in its queue yet.
    pub(crate) fn has_message_entering(&self) -> bool {
        self.tokens.lent() != self.outside()
    }

    /// The number of envelopes that are outside, plus links by hand.
    pub(crate) fn outside(&self) -> usize {
        self.outside.load(Ordering::SeqCst)
    }
}

impl Quiescence for Rest {
    fn lend(&self) {
        self.outside.fetch_add(1, Ordering::SeqCst);
        self.tokens.lend();
    }

    fn regain(&self) {
        let last = self.tokens.regain();
        let none_is_outside = self.outside.fetch_sub(1, Ordering::SeqCst) == 1;
        if last {
            self.flow.wake();
        }
        if none_is_outside {
            self.stepper.wake();
        }
    }

    fn has_ended(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

impl OperatorTask {
    pub(crate) fn new(operator: usize, rest: &Arc<Rest>) -> Arc<Self> {
        Arc::new(Self {
            task: OnceLock::new(),
            changed: AtomicBool::new(false),
            other: WakerCell::new(),
            within: WakerCell::new(),
            dispatcher: OnceLock::new(),
            parking: Parking::new(&rest.tokens, operator),
            rest: rest.clone(),
            flags: AtomicU8::new(0),
            permit: OnceLock::new(),
            ended: AtomicBool::new(false),
            defaults: AtomicU8::new(0),
            asked: AtomicU8::new(asked::ALLOWED),
            agreed: AtomicBool::new(false),
            probe_addr: AtomicUsize::new(0),
            only_others: OnlyOthers::new(),
            in_poll: Mutex::new(None),
            released: AtomicBool::new(false),
            began_here: AtomicBool::new(false),
            operator,
            status: StatusCell::new(),
            watched: AtomicUsize::new(0),
        })
    }

    /// A node for work that is independent of a flow's runs: it has tokens of its own.
    pub(crate) fn alone() -> Arc<Self> {
        Self::new(0, &Rest::new(1))
    }

    /// The node of a worker of a concurrent operator: the operator's node is woken when this one parks and when it is
    /// woken.
    pub(super) fn of_worker(dispatcher: &Arc<Self>) -> Arc<Self> {
        let node = Self::alone();
        let _ = node.dispatcher.set(dispatcher.clone());
        node.changed.store(true, Ordering::Release);
        node
    }

    pub(crate) fn operator(&self) -> usize {
        self.operator
    }

    pub(crate) fn rest(&self) -> &Arc<Rest> {
        &self.rest
    }

    /// Called before the ports are polled, and when a wait at them is dropped.
    #[inline]
    pub(crate) fn resume(&self) {
        self.parking.resume(&self.rest.tokens);
    }

    /// Called when nothing was ready.
    pub(crate) fn park(&self) {
        let last = self.parking.park(&self.rest.tokens);
        if last || self.rest.parks.load(Ordering::SeqCst) == parks::AWAITED {
            self.parked(last);
        }
    }

    /// Notifies the flow's task. Not inlined, like `wake_changed`: it keeps the code of a hop between operators short.
    #[cold]
    fn parked(&self, last: bool) {
        if last {
            self.rest.flow.wake();
            self.wake_dispatcher();
        }
        self.rest.notify_of_park();
    }

    #[cold]
    fn wake_changed(&self) {
        self.other.wake();
        self.within.wake();
        // The dispatcher holds its flow's token on behalf of this worker, and must take it before the waking operator
        // returns its own.
        self.wake_dispatcher();
    }

    fn wake_dispatcher(&self) {
        if let Some(dispatcher) = self.dispatcher.get() {
            dispatcher.wake_by_ref();
        }
    }

    /// The wait for the next run is polled with this waker: it is woken together with the node, by everything that lets
    /// runs begin again or ends the operator. Must be called before these are checked.
    #[cold]
    pub(super) fn register_within(&self, waker: &Waker) {
        self.changed.store(true, Ordering::Release);
        self.within.register(waker);
    }

    /// Everything was ready, but the operator's `may_run` returned false.
    pub(super) fn park_refused(&self) {
        // If all others are idle, there is no reason to ask it again.
        if self.parking.is_last(&self.rest.tokens) {
            self.asked.store(asked::REFUSED_AGAIN, Ordering::Release);
        }
        self.park();
    }

    /// Begins a run, the first since the operator waited.
    #[inline]
    pub(super) fn begin_busy(&self) {
        self.began_here.store(true, Ordering::Relaxed);
    }

    /// None of the runs since then has waited in its middle.
    pub(super) fn began_in_this_poll(&self) -> bool {
        self.began_here.load(Ordering::Relaxed)
    }

    /// Publishes why the operator does not run.
    #[inline]
    pub(super) fn show(&self, status: Status) {
        if self.status.show(status) {
            self.rest.watchers.notify(self.operator);
        }
    }

    /// Publishes that the operator runs.
    #[inline]
    pub(super) fn show_running(&self) {
        if self.status.running() {
            self.rest.watchers.notify(self.operator);
        }
    }

    pub(crate) fn status_cell(&self) -> &StatusCell {
        &self.status
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// Only another operator of its flow will wake it: it is parked; or it waits for its [permit](super::permit), its
    /// last run was refused for that reason, and it has not been woken since.
    pub(crate) fn rests(&self) -> bool {
        let refused = |permit: &Permit| permit.is_at_door() && self.status.status().0 == Status::Wait;
        self.is_parked() || (self.permit().is_some_and(refused) && self.parking.is_calm())
    }

    /// It was woken and has not been polled since, or is in a run that does not wait for others.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.parking.is_calm() || (self.status.status().1 && !self.is_parked())
    }

    /// As `is_parked`, for a caller whose earlier writes must be visible to the operator's next poll.
    pub(crate) fn is_parked_until_it_sees(&self) -> bool {
        self.parking.is_parked_until_it_sees()
    }

    /// No run begins after the current one.
    pub(crate) fn finish(self: &Arc<Self>) {
        self.set_flag(flags::FINISHING, true);
        self.wake_by_ref();
    }

    pub(crate) fn is_finishing(&self) -> bool {
        self.has_flag(flags::FINISHING)
    }

    /// No run begins while the node is paused. This does not wake the node: do that afterwards.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.set_flag(flags::PAUSED, paused);
    }

    /// No run begins unless the permit allows it.
    pub(crate) fn set_stepped(self: &Arc<Self>, stepped: bool) {
        if stepped {
            self.permit.get_or_init(Permit::default);
        }
        self.set_flag(flags::STEPPED, stepped);
        self.wake_by_ref();
    }

    /// The operator's future is dropped at its next poll.
    pub(crate) fn abort(self: &Arc<Self>) {
        self.set_flag(flags::ABORTED, true);
        self.wake_by_ref();
    }

    fn set_flag(&self, flag: u8, set: bool) {
        if set {
            self.flags.fetch_or(flag, Ordering::AcqRel);
        } else {
            self.flags.fetch_and(!flag, Ordering::AcqRel);
        }
    }

    #[inline]
    fn has_flag(&self, flag: u8) -> bool {
        self.flags.load(Ordering::Acquire) & flag != 0
    }

    /// The next run begins as soon as its conditions are ready: the node is neither held nor finishing nor aborted.
    #[inline]
    pub(super) fn runs_by_itself(&self) -> bool {
        self.flags.load(Ordering::Acquire) == 0
    }

    /// The permit, while the operator is stepped through.
    pub(crate) fn permit(&self) -> Option<&Permit> {
        self.permit.get().filter(|_| self.has_flag(flags::STEPPED))
    }

    /// No run begins by itself.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.has_flag(flags::HELD)
    }

    /// The permit that its runs need, while it is held.
    #[inline]
    pub(super) fn held_by(&self) -> Option<&Permit> {
        if self.is_held() { self.permit() } else { None }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.has_flag(flags::ABORTED)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.has_flag(flags::PAUSED)
    }

    /// The operator has ended: its token is returned for good.
    pub(crate) fn end(&self) {
        if self.status.show(Status::Never) {
            self.rest.watchers.notify_last(self.operator);
        }
        // What `within` belongs to may keep the probe waker, and so this node.
        self.within.wake();
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.rest.left.fetch_sub(1, Ordering::AcqRel);
            if self.parking.end(&self.rest.tokens) {
                self.rest.flow.wake();
            }
            // Operators that waited for this one may now wait only for each other.
            self.rest.notify_of_park();
        }
        // Last: a task that steps through the flow reads `ended` when it is woken.
        if let Some(permit) = self.permit.get() {
            permit.end();
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(super) fn set_default(&self, method: Method) {
        self.defaults.fetch_or(method as u8, Ordering::Relaxed);
    }

    /// The recorded methods were another operator's: several operators may share one node.
    pub(super) fn forget_defaults(&self) {
        self.defaults.store(0, Ordering::Relaxed);
    }

    pub(crate) fn is_default(&self, method: Method) -> bool {
        self.defaults.load(Ordering::Relaxed) & method as u8 != 0
    }

    pub(super) fn answered(&self, allowed: bool) {
        let before = self.asked.load(Ordering::Acquire);
        let now = match (allowed, before) {
            (true, asked::ALLOWED) => return,
            (true, _) => {
                self.agreed.store(true, Ordering::Release);
                asked::ALLOWED
            }
            (false, asked::AGAIN) => asked::REFUSED_AGAIN,
            (false, _) => asked::REFUSED,
        };
        self.asked.store(now, Ordering::Release);
    }

    /// It waits only for its own `may_run`.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_parked() && self.has_refused()
    }

    /// The last answer of its `may_run` was false.
    pub(crate) fn has_refused(&self) -> bool {
        matches!(self.asked.load(Ordering::Acquire), asked::REFUSED | asked::REFUSED_AGAIN)
    }

    /// If it has refused even when all were idle, it may be asked again: the flow was active since.
    pub(crate) fn may_be_asked_again(&self) {
        let (from, to) = (asked::REFUSED_AGAIN, asked::REFUSED);
        let _ = self.asked.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// All operators are idle: asks those again that have refused, if there is a reason to. False if there is none.
    pub(crate) fn ask_again(nodes: &[Arc<Self>]) -> bool {
        let mut reason = false;
        for node in nodes {
            // An operator that has ended is not asked any more, and would be a reason for ever.
            reason |= node.is_parked() && node.asked.load(Ordering::Acquire) == asked::REFUSED;
            reason |= node.agreed.swap(false, Ordering::AcqRel);
        }
        let refused: Vec<_> = nodes.iter().filter(|node| reason && node.is_refused()).collect();
        for node in &refused {
            node.asked.store(asked::AGAIN, Ordering::Release);
        }
        refused.iter().for_each(|node| node.wake_by_ref());
        !refused.is_empty()
    }

    /// Polls the operator's future, with its probe waker. Returns an error once the operator is aborted.
    pub(super) fn poll<T>(
        &self,
        probe: &mut ProbeGuard,
        task: &mut Context<'_>,
        future: impl FnOnce(&mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        if !self.task.get_or_init(|| Arc::new(task.waker().clone())).will_wake(task.waker()) {
            self.changed.store(true, Ordering::Release);
            self.other.register(task.waker());
        }
        self.began_here.store(false, Ordering::Relaxed);
        // From here on a wake causes another poll. After the waker is stored: an earlier wake is seen below.
        self.parking.begin(&self.rest.tokens);
        self.rest.watchers.look(self.operator, &self.watched);
        if self.is_aborted() {
            return Poll::Ready(Err(Error::new(ErrorKind::Cancelled, "the flow was aborted")));
        }
        let polled = future(&mut Context::from_waker(&probe.waker));
        let says = !self.only_others.is_noted() || self.end_wait(polled.is_pending(), probe);
        if self.is_held()
            && says
            && polled.is_pending()
            && let Some(permit) = self.permit()
        {
            let renews = permit.polled(self.status.in_run().is_some(), probe.clones() > 0);
            if renews {
                probe.renew();
            }
        }
        polled
    }
}

impl Wake for OperatorTask {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Woken { first, last } = self.parking.wake(&self.rest.tokens);
        if last {
            self.rest.flow.wake();
        }
        if !first {
            return;
        }
        if let Some(task) = self.task.get() {
            wake_shared(task);
        }
        if self.changed.load(Ordering::Acquire) {
            self.wake_changed();
        }
    }
}

impl fmt::Debug for OperatorTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorTask")
            .field("parking", &self.parking)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    /// Records whether the node had ended when this was woken.
    struct Notes(Arc<OperatorTask>, AtomicU8);

    impl Wake for Notes {
        fn wake(self: Arc<Self>) {
            self.1.store(1 + u8::from(self.0.has_ended()), Ordering::Relaxed);
        }
    }

    /// A task that steps through a flow is notified of an operator's end only after the end is visible: it checks at
    /// once, and is not notified again.
    #[test]
    fn an_end_is_visible_before_it_is_notified() {
        let node = OperatorTask::new(0, &Rest::new(1));
        node.set_stepped(true);
        let notes = Arc::new(Notes(node.clone(), AtomicU8::new(0)));
        let permit = node.permit().unwrap();
        assert!(permit.poll_outcome(&mut Context::from_waker(&Waker::from(notes.clone()))).is_pending());
        node.end();
        assert_eq!(notes.1.load(Ordering::Relaxed), 2);
    }
}
