//! [`Node`]: an operator's task as its wakers see it.
//!
//! Whatever wakes an operator does it by its node, which wakes the tokio task behind it and keeps the [tokens](super::quiet)
//! right. The node also carries the words from outside: end after this run, pause, abort. The operator's future is polled
//! with the node's [face].

mod face;

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use self::face::Worn;
use super::{
    only_others::OnlyOthers,
    permit::Permit,
    quiet::{Parking, Tokens, Woken},
    shown::{InRun, Shown},
    watchers::Watchers,
};
use crate::{
    condition::Status,
    error::{Error, ErrorKind, Result},
    hub::abroad::Lender,
    sync::{Mutex, WakerCell, wake_shared},
};

/// What all nodes of a flow share.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) tokens: Tokens,
    /// The flow's own task: woken when the last token is given back.
    pub(crate) flow: WakerCell,
    /// A task that steps through the flow: woken when nothing of the flow is outside any more.
    pub(crate) stepper: WakerCell,
    /// Those who want to hear what operators wait for.
    pub(crate) watchers: Watchers,
    /// Operators that have not ended.
    left: AtomicUsize,
    /// One of [`parks`].
    parks: AtomicU8,
    /// Envelopes of the flow that are outside of it, and links by hand to its hubs of chunks.
    outside: AtomicUsize,
}

/// Whether the flow's task is to be notified when an operator parks.
mod parks {
    pub(super) const IGNORED: u8 = 0;
    pub(super) const AWAITED: u8 = 1;
    /// One has parked since.
    pub(super) const SEEN: u8 = 2;
}

/// One operator's task.
pub(crate) struct Node {
    /// The waker of the task that polls it first: tokio's are the same for all of a task's life.
    task: OnceLock<Arc<Waker>>,
    /// For a task whose waker changes all the same.
    changed: AtomicBool,
    other: WakerCell,
    /// Of a combinator within the operator's future, which polls the wait for the next run with a waker of its own.
    within: WakerCell,
    /// Of a worker: the node of the operator that it is one of. `changed` is set where there is one.
    dispatcher: OnceLock<Arc<Node>>,
    parking: Parking,
    rest: Arc<Rest>,
    /// Bits of [`flags`].
    flags: AtomicU8,
    /// Whoever steps through its runs asks here.
    permit: OnceLock<Permit>,
    ended: AtomicBool,
    /// The methods of the operator that are the trait's own: a bit for each.
    defaults: AtomicU8,
    asked: AtomicU8,
    agreed: AtomicBool,
    /// The address of its face, while it wears one.
    face: AtomicUsize,
    /// Whether it waits for others alone in the middle of a run.
    only_others: OnlyOthers,
    /// What the present poll waits for in the middle of a run. Its own task's.
    in_poll: Mutex<Option<InRun>>,
    /// Nothing comes to it any more, though the other end of its hub is there.
    released: AtomicBool,
    /// The runs that it is at, one after the other, began in its present poll. Its own task's.
    began_here: AtomicBool,
    operator: usize,
    pub(super) shown: Shown,
    /// How many had come to watch when it was polled last.
    watched: AtomicUsize,
}

/// Why its next run does not begin by itself, or never: one word, so that an operator of which nothing is asked looks once.
mod flags {
    pub(super) const PAUSED: u8 = 1;
    pub(super) const STEPPED: u8 = 2;
    pub(super) const HELD: u8 = PAUSED | STEPPED;
    pub(super) const FINISHING: u8 = 4;
    pub(super) const ABORTED: u8 = 8;
}

/// A method that an operator may write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    Run = 1,
    MayRun = 2,
    After = 4,
}

/// What the operator's `may_run` said. One that says no may depend on what others do, and nobody wakes it for that: if
/// others were still at work then, it is asked once more when all are at rest; and if one that had said no says yes
/// (`agreed`), all the others again.
///
/// ```text
///             no                 at rest             no
///   ALLOWED ─────────> REFUSED ─────────> AGAIN ─────────> REFUSED_AGAIN    all of these: there is no reason to ask
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

    /// The flow's task is notified when the next operator parks, or ends. Call it before a look at which ones are parked: an operator
    /// that parks meanwhile is seen there, or notifies.
    pub(crate) fn await_park(&self) {
        self.parks.store(parks::AWAITED, Ordering::SeqCst);
    }

    /// Whether one has parked, or ended, since [`await_park`](Self::await_park). True once.
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

    /// A message from outside has been accepted and is not in its queue yet.
    pub(crate) fn has_message_entering(&self) -> bool {
        self.tokens.lent() != self.outside()
    }

    /// Envelopes that are outside, and links by hand.
    pub(crate) fn outside(&self) -> usize {
        self.outside.load(Ordering::SeqCst)
    }
}

impl Lender for Rest {
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

impl Node {
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
            face: AtomicUsize::new(0),
            only_others: OnlyOthers::new(),
            in_poll: Mutex::new(None),
            released: AtomicBool::new(false),
            began_here: AtomicBool::new(false),
            operator,
            shown: Shown::new(),
            watched: AtomicUsize::new(0),
        })
    }

    /// For work beside a flow's runs: no other operator's rest depends on it.
    pub(crate) fn alone() -> Arc<Self> {
        Self::new(0, &Rest::new(1))
    }

    /// Of a worker of a concurrent operator: that operator's node is woken when this one is parked and when it is woken.
    pub(super) fn of_worker(dispatcher: &Arc<Self>) -> Arc<Self> {
        let node = Self::alone();
        let _ = node.dispatcher.set(dispatcher.clone());
        node.changed.store(true, Ordering::Release);
        node
    }

    /// Its number in its flow.
    pub(crate) fn operator(&self) -> usize {
        self.operator
    }

    pub(crate) fn rest(&self) -> &Arc<Rest> {
        &self.rest
    }

    /// Before the ports are asked, and when nobody waits at them any longer, whoever says so.
    #[inline]
    pub(crate) fn resume(&self) {
        self.parking.resume(&self.rest.tokens);
    }

    /// Nothing was ready.
    pub(crate) fn park(&self) {
        let last = self.parking.park(&self.rest.tokens);
        if last || self.rest.parks.load(Ordering::SeqCst) == parks::AWAITED {
            self.parked(last);
        }
    }

    /// The flow's task is notified. Apart, as is what follows a change of the task: what a hop between operators calls stays
    /// short.
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
        // It holds its flow's token for this one, and holds it before the one that wakes gives its own back.
        self.wake_dispatcher();
    }

    fn wake_dispatcher(&self) {
        if let Some(dispatcher) = self.dispatcher.get() {
            dispatcher.wake_by_ref();
        }
    }

    /// The wait for the next run is polled with this waker: it is woken with the node, by whatever lets runs begin again or ends
    /// the operator. Before either is asked.
    #[cold]
    pub(super) fn register_within(&self, waker: &Waker) {
        self.changed.store(true, Ordering::Release);
        self.within.register(waker);
    }

    /// Everything was ready, but the operator itself said no.
    pub(super) fn park_refused(&self) {
        // All others are at rest: that is no reason to ask it again.
        if self.parking.is_last(&self.rest.tokens) {
            self.asked.store(asked::REFUSED_AGAIN, Ordering::Release);
        }
        self.park();
    }

    /// A run begins, the first since it waited.
    #[inline]
    pub(super) fn begin_busy(&self) {
        self.began_here.store(true, Ordering::Relaxed);
    }

    /// None of its runs since then has waited in its middle.
    pub(super) fn began_in_this_poll(&self) -> bool {
        self.began_here.load(Ordering::Relaxed)
    }

    /// For all to see: why it does not run.
    #[inline]
    pub(super) fn show(&self, status: Status) {
        if self.shown.show(status) {
            self.rest.watchers.tell(self.operator);
        }
    }

    /// For all to see: it runs.
    #[inline]
    pub(super) fn show_running(&self) {
        if self.shown.running() {
            self.rest.watchers.tell(self.operator);
        }
    }

    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// Nothing but another operator of its flow will wake it: it is parked; or it waits for its [permit](super::permit), its last run
    /// was refused for that reason, and it has not been woken since.
    pub(crate) fn rests(&self) -> bool {
        let refused = |permit: &Permit| permit.is_at_door() && self.shown.status().0 == Status::Wait;
        self.is_parked() || (self.permit().is_some_and(refused) && self.parking.is_calm())
    }

    /// It was woken and has not looked since, or is in a run that does not wait for others.
    pub(crate) fn is_at_work(&self) -> bool {
        !self.parking.is_calm() || (self.shown.status().1 && !self.is_parked())
    }

    /// As `is_parked`, for a caller whose writes before this its next poll is to see.
    pub(crate) fn is_parked_until_it_sees(&self) -> bool {
        self.parking.is_parked_until_it_sees()
    }

    /// No run after the present one.
    pub(crate) fn finish(self: &Arc<Self>) {
        self.set_flag(flags::FINISHING, true);
        self.wake_by_ref();
    }

    pub(crate) fn is_finishing(&self) -> bool {
        self.has_flag(flags::FINISHING)
    }

    /// No run begins while it is paused. Wake the node afterwards: this does not.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.set_flag(flags::PAUSED, paused);
    }

    /// No run begins unless its permit says so.
    pub(crate) fn set_stepped(self: &Arc<Self>, stepped: bool) {
        if stepped {
            self.permit.get_or_init(Permit::default);
        }
        self.set_flag(flags::STEPPED, stepped);
        self.wake_by_ref();
    }

    /// Drops what it is doing.
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

    /// Its next run begins as soon as its conditions are ready: it is not held, and neither finishing nor aborted.
    #[inline]
    pub(super) fn runs_by_itself(&self) -> bool {
        self.flags.load(Ordering::Acquire) == 0
    }

    /// Where it is stepped through.
    pub(crate) fn permit(&self) -> Option<&Permit> {
        self.permit.get().filter(|_| self.has_flag(flags::STEPPED))
    }

    /// No run begins by itself.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.has_flag(flags::HELD)
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.has_flag(flags::ABORTED)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.has_flag(flags::PAUSED)
    }

    /// The operator has ended: its token goes for good.
    pub(crate) fn end(&self) {
        if self.shown.show(Status::Never) {
            self.rest.watchers.tell_last(self.operator);
        }
        // It may keep the face, and so this node.
        self.within.wake();
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.rest.left.fetch_sub(1, Ordering::AcqRel);
            if self.parking.end(&self.rest.tokens) {
                self.rest.flow.wake();
            }
            // Operators may have waited for this one that wait for each other alone now.
            self.rest.notify_of_park();
        }
        // Last: a task that steps through the flow looks at `ended` as it is woken.
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

    /// What was said of the methods was another operator's: one node may be several operators'.
    pub(super) fn forget_defaults(&self) {
        self.defaults.store(0, Ordering::Relaxed);
    }

    pub(crate) fn is_default(&self, method: Method) -> bool {
        self.defaults.load(Ordering::Relaxed) & method as u8 != 0
    }

    /// Its `may_run` has answered.
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

    /// It waits for nothing but its own `may_run`.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_parked() && self.has_refused()
    }

    /// It has said no, the last time it was asked.
    pub(crate) fn has_refused(&self) -> bool {
        matches!(self.asked.load(Ordering::Acquire), asked::REFUSED | asked::REFUSED_AGAIN)
    }

    /// If it has said no even when all were at rest: that was another rest.
    pub(crate) fn may_be_asked_again(&self) {
        let (from, to) = (asked::REFUSED_AGAIN, asked::REFUSED);
        let _ = self.asked.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// All are at rest: asks those again who have said no, if there is a reason to. False if there is none.
    pub(crate) fn ask_again(nodes: &[Arc<Self>]) -> bool {
        let mut reason = false;
        for node in nodes {
            // One that has ended is not asked any more, and would be a reason for ever.
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

    /// Polls the operator's future, with its face. Once it is aborted, an error in its place.
    pub(super) fn poll<T>(
        &self,
        worn: &mut Worn,
        task: &mut Context<'_>,
        future: impl FnOnce(&mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        if !self.task.get_or_init(|| Arc::new(task.waker().clone())).will_wake(task.waker()) {
            self.changed.store(true, Ordering::Release);
            self.other.register(task.waker());
        }
        self.began_here.store(false, Ordering::Relaxed);
        // From here on a wake is a reason for another poll. After the waker is kept: one that came before is seen below.
        self.parking.begin(&self.rest.tokens);
        self.rest.watchers.look(self.operator, &self.watched);
        if self.is_aborted() {
            return Poll::Ready(Err(Error::new(ErrorKind::Cancelled, "the flow was aborted")));
        }
        let polled = future(&mut Context::from_waker(&worn.waker));
        let says = !self.only_others.is_noted() || self.end_wait(polled.is_pending(), worn);
        if self.is_held()
            && says
            && polled.is_pending()
            && let Some(permit) = self.permit()
        {
            let renews = permit.polled(self.shown.in_run().is_some(), worn.clones() > 0);
            if renews {
                worn.renew();
            }
        }
        polled
    }
}

impl Wake for Node {
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

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("parking", &self.parking).field("ended", &self.ended).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    /// Notes whether the node had ended as this was woken.
    struct Notes(Arc<Node>, AtomicU8);

    impl Wake for Notes {
        fn wake(self: Arc<Self>) {
            self.1.store(1 + u8::from(self.0.has_ended()), Ordering::Relaxed);
        }
    }

    /// Who steps through a flow is told of an operator's end once it can see it: it looks at once, and is not told again.
    #[test]
    fn an_end_is_told_once_it_can_be_seen() {
        let node = Node::new(0, &Rest::new(1));
        node.set_stepped(true);
        let notes = Arc::new(Notes(node.clone(), AtomicU8::new(0)));
        let permit = node.permit().unwrap();
        assert!(permit.poll_outcome(&mut Context::from_waker(&Waker::from(notes.clone()))).is_pending());
        node.end();
        assert_eq!(notes.1.load(Ordering::Relaxed), 2);
    }
}
