//! [`RunContext`]: the data that came with the messages of an operator's run, and that the messages it sends carry on.
//!
//! There are four kinds: named values, the callers that wait for a response, the [journey](crate::hub::journey) of a
//! sampled message, and the tracing span of the first message. The operator is inside that span while it works on the messages. The span of a message that the operator
//! has processed before (it came back through a cycle) is replaced by that of a new message: otherwise all runs would
//! be in the first message's span for ever.
//!
//! ```text
//!   take ──> reset, if it is the first of a run ──> merged ──> span entered ─┐
//!                                                                            │ left, and entered again, around
//!   release <── before the wait for the next run <── send: a copy goes along <┘ each await
//! ```
//!
//! A request that the operator drops in a run without an answer does not fail at once: the run might still fail, and the
//! caller then gets its failure. So while a thread polls an operator, it knows the operator's context, which keeps the
//! request until it is released. By then a failure of the run has been recorded.
//!
//! The context is shared by an operator and its ports, and used only by the operator's task. If no message carries any
//! of these, a run costs a few loads of a flag.

use std::{
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use super::{activity::FlowActivity, observed_runs::ObservedRuns, operator_task::OperatorTask, status_cell::RunWait};
use crate::{
    condition::Readiness,
    error::Result,
    hub::{
        MergePolicy, Metadata, Reply,
        journey::{Arrived, Journey},
        parcel::{Header, Load, Parcel},
        reply::{Caller, RequestOrigin},
    },
    mutants::{self, Mutant},
    stream::{OpenSpans, Spans, Stream},
    sync::{Mutex, discard, discard_all, lock},
};

/// At least this many messages with callers are recorded in one run; beyond it, entries whose callers have their
/// responses are discarded. It bounds the memory of an operator that takes messages without limit in a single run.
const REMEMBERED: usize = 1024;

scoped_tls::scoped_thread_local! {
    /// The context of the operator that this thread polls; of the innermost, if that operator polls another flow.
    static POLLED: RunContext
}

/// True if this thread polls an operator of the flow, which is in a run.
pub(crate) fn is_in_run_of(flow: &Arc<FlowActivity>) -> bool {
    POLLED.is_set()
        && POLLED.with(|polled| !polled.is_in(phase::BETWEEN_RUNS) && Arc::ptr_eq(polled.task.flow_activity(), flow))
}

/// Keeps a request, whose drop fails it, until the run that this thread polls has ended.
pub(crate) fn defer(request: Arc<dyn Caller>) {
    if POLLED.is_set() {
        POLLED.with(|polled| polled.keep_dropped(request));
    }
}

/// The context of one operator's current run. What each run reads and writes comes first.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct RunContext {
    any: AtomicBool,
    /// One of [`phase`].
    phase: AtomicU8,
    /// Messages taken in this run, or since the last [`take_replies`](Self::take_replies).
    taken: AtomicUsize,
    task: Arc<OperatorTask>,
    /// The task's own waker, which the operator's ports keep.
    waker: Waker,
    operator: Arc<str>,
    policy: MergePolicy,
    observed: Option<Box<ObservedRuns>>,
    /// The greatest number among the origins of earlier runs.
    newest: AtomicU64,
    data: Mutex<ContextData>,
}

mod phase {
    /// Each message that is taken resets the context.
    pub(super) const BETWEEN_RUNS: u8 = 0;
    pub(super) const RUN: u8 = 1;
    /// The same as between two runs, but an operator with a loop of its own has taken a message and does not wait for
    /// the next one.
    pub(super) const MESSAGE: u8 = 2;
}

#[derive(Debug, Default)]
struct ContextData {
    metadata: Metadata,
    /// The callers that wait for a response to a message, with the number of the message in the run.
    replies: Replies,
    /// The requests that were dropped without an answer in this run: they fail when they are dropped here.
    dropped: Replies,
    /// The origin of the first message that is new to the operator, or else of the first message.
    origin: Option<RequestOrigin>,
    /// The greatest number among the origins of this run.
    newest: u64,
    /// The origin's span is entered.
    inside: bool,
    /// The oldest journey among the messages.
    journey: Option<Arrived>,
    /// The number and the device work of a source's run whose messages are sampled.
    sampled: Option<(u64, OpenSpans)>,
    /// The operator's stream is timed for the journey.
    is_timing: bool,
}

/// The replies of messages with callers, with the messages' numbers in the run.
#[derive(Debug, Default)]
struct Replies {
    all: SmallVec<[(usize, Reply); 1]>,
    /// From this length on, answered entries are discarded.
    most: usize,
}

impl RunContext {
    pub(crate) fn new(operator: Arc<str>, policy: MergePolicy, task: Arc<OperatorTask>) -> Self {
        Self {
            operator,
            waker: Waker::from(task.clone()),
            task,
            policy,
            observed: None,
            any: AtomicBool::new(false),
            phase: AtomicU8::new(phase::BETWEEN_RUNS),
            taken: AtomicUsize::new(0),
            newest: AtomicU64::new(0),
            data: Mutex::default(),
        }
    }

    /// Has its runs observed.
    pub(super) fn observe(&mut self, observed: Option<ObservedRuns>) {
        self.observed = observed.map(Box::new);
    }

    pub(super) fn observed(&self) -> Option<&ObservedRuns> {
        self.observed.as_deref()
    }

    pub(super) fn policy(&self) -> MergePolicy {
        self.policy
    }

    pub(crate) fn operator_task(&self) -> &Arc<OperatorTask> {
        &self.task
    }

    /// Polls a wait at one of the operator's ports, possibly in the middle of a run. See [`OperatorTask::poll_port`].
    pub(super) fn poll_port<T>(
        &self,
        what: RunWait,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> std::result::Result<T, Readiness>,
    ) -> Poll<T> {
        self.task.poll_port(&self.waker, what, task, wait)
    }

    /// Awaits `own`, a future of the operator itself, which keeps the task's own waker like the ports do. The operator
    /// declares separately that it holds a token for this future.
    pub(super) async fn await_as_port<T>(&self, own: impl Future<Output = T>) -> T {
        let mut own = pin!(own);
        poll_fn(|task| {
            let ours = self.task.is_probe_waker(task.waker());
            if ours { own.as_mut().poll(&mut Context::from_waker(&self.waker)) } else { own.as_mut().poll(task) }
        })
        .await
    }

    #[inline]
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    #[inline]
    fn is_in(&self, phase: u8) -> bool {
        self.phase.load(Ordering::Relaxed) == phase
    }

    #[inline]
    fn set_phase(&self, phase: u8) {
        self.phase.store(phase, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn begin(&self) {
        self.set_phase(phase::RUN);
        self.taken.store(0, Ordering::Relaxed);
    }

    /// Ends the run. Messages that the operator sends afterwards still carry everything along.
    #[inline]
    pub(crate) fn end(&self) {
        self.set_phase(phase::BETWEEN_RUNS);
    }

    /// Extends the run that has ended: what the operator takes and sends until the next run begins belongs to it.
    #[inline]
    pub(super) fn extend_run(&self) {
        self.set_phase(phase::RUN);
    }

    /// Clears the context, before the operator waits for more messages.
    #[inline]
    pub(crate) fn release_unneeded(&self) {
        self.set_phase(phase::BETWEEN_RUNS);
        if self.any() && !mutants::is(Mutant::MetadataKept) {
            self.clear();
        }
    }

    /// Like [`release_unneeded`](Self::release_unneeded), unless a run is in progress: for a wait that can also be in
    /// the middle of a run.
    #[inline]
    pub(super) fn release_between_runs(&self) {
        if !self.is_in(phase::RUN) {
            self.set_phase(phase::BETWEEN_RUNS);
            if self.any() {
                self.clear();
            }
        }
    }

    #[cold]
    fn clear(&self) {
        self.any.store(false, Ordering::Relaxed);
        let mut data = mem::take(&mut *lock(&self.data));
        data.leave().iter().for_each(RequestOrigin::exit);
        // Only one thread at a time executes this.
        self.newest.store(self.newest.load(Ordering::Relaxed).max(data.newest), Ordering::Relaxed);
        let ContextData { metadata, replies, dropped, origin, journey, sampled, is_timing, .. } = data;
        if let Some(stream) = self.timed_stream().filter(|_| is_timing) {
            stream.end_run();
        }
        if let (Some(journey), Some(observed)) = (journey, &self.observed) {
            journey.end(observed.operator);
        }
        drop(sampled);
        // Requests that are left without a response fail here, with no lock held, and one by one, since a tracing
        // subscriber is called for each.
        discard_all(replies.all);
        discard_all(dropped.all);
        discard(origin);
        drop(metadata);
    }

    /// Merges the header of a message that was taken.
    #[inline]
    pub(super) fn receive(&self, header: Option<Box<Header>>) -> Result<()> {
        if !self.is_in(phase::RUN) {
            self.release_unneeded();
            self.set_phase(phase::MESSAGE);
            self.taken.store(0, Ordering::Relaxed);
        }
        // Only one thread at a time executes this.
        let number = self.taken.load(Ordering::Relaxed);
        self.taken.store(number + 1, Ordering::Relaxed);
        match header.and_then(|header| header.load) {
            None => Ok(()),
            Some(load) => self.merge(load, number, true),
        }
    }

    /// Merges the load of a message that was taken in the operator's place, or is on its way to it, outside of a run.
    #[inline]
    pub(crate) fn gather(&self, load: Option<Load>) -> Result<()> {
        load.map_or(Ok(()), |load| self.merge(load, 0, false))
    }

    #[cold]
    fn merge(&self, load: Load, number: usize, enters: bool) -> Result<()> {
        let Load { metadata, reply, journey } = load;
        if metadata.is_empty() && reply.is_nothing() {
            journey.into_iter().for_each(|journey| self.arrive(*journey));
            return Ok(());
        }
        reply.seen_by(&self.operator);
        let newest = self.newest.load(Ordering::Relaxed);
        let origin = reply.origin.clone();
        let (merged, joined, forgotten) = self.change_data(|data| {
            let merged = data.metadata.merge_and_replace(&metadata, self.policy);
            let joined = origin.map(|origin| data.join_origin(origin, newest));
            let answered = if reply.is_empty() { Replies::default() } else { data.replies.push(number, reply) };
            (merged, joined, answered)
        });
        if let Some(joined) = joined {
            self.join(&joined, enters);
            discard(joined);
        }
        if let Some(journey) = journey {
            self.arrive(*journey);
        }
        discard(metadata);
        discard(forgotten);
        merged.map(discard_all)
    }

    /// Adds the journey of a message: the oldest one continues.
    fn arrive(&self, journey: Journey) {
        let arrived = journey.arrive(Spans::begin());
        let other = self.change_data(|data| match &data.journey {
            Some(first) if !arrived.is_older(first) => Some(arrived),
            _ => data.journey.replace(arrived),
        });
        if let Some(other) = other {
            other.merge();
        }
        self.time_work();
    }

    /// Samples the messages of a source's run that begins.
    #[cold]
    pub(super) fn begin_sampled(&self, number: u64) {
        self.change_data(|data| data.sampled = Some((number, Spans::begin())));
        self.time_work();
    }

    /// Times the operator's work for the journey of the run, if there is one.
    pub(super) fn time_work(&self) {
        let Some((work, stream)) = self.observed().and_then(|observed| observed.work.as_ref()).zip(self.timed_stream())
        else {
            return;
        };
        let spans = {
            let data = lock(&self.data);
            let sampled = data.sampled.as_ref().map(|(_, work)| work);
            data.journey.as_ref().map(Arrived::work).or(sampled).cloned()
        };
        if let Some(spans) = spans
            && work.add(stream, &spans)
        {
            lock(&self.data).is_timing = true;
        }
    }

    /// Traces a run that is replayed without the operator.
    pub(crate) fn trace_replay(&self, ends: bool) {
        if let Some(traced) = self.observed().and_then(|observed| observed.traced.as_ref()) {
            if ends { traced.end() } else { traced.begin() }
        }
    }

    fn timed_stream(&self) -> Option<&Stream> {
        self.observed.as_ref()?.work.as_ref()?.stream()
    }

    /// The device work of the run's journey.
    pub(crate) fn journey_work(&self) -> Option<OpenSpans> {
        if !self.any() {
            return None;
        }
        lock(&self.data).journey.as_ref().map(|journey| journey.work().clone())
    }

    /// Whether messages that are sent from outside in the operator's place are sampled.
    #[inline]
    pub(super) fn samples_external(&self) -> bool {
        self.observed.as_ref().is_some_and(|observed| observed.source.is_some())
    }

    /// Begins the journey of a message that is sent from outside in the operator's place, if it is sampled.
    pub(crate) fn begin_external_journey(&self) -> Option<Journey> {
        self.observed.as_ref()?.source.as_ref()?.begin_external()
    }

    /// Updates the spans after the run's origin was joined with that of a message.
    fn join(&self, joined: &JoinedOrigin, enters: bool) {
        match (&joined.other, joined.replaces) {
            (Some(first), true) => joined.origin.follows_from(first),
            (Some(first), false) => return first.follows_from(&joined.origin),
            (None, _) => {}
        }
        if joined.was_inside {
            joined.other.iter().for_each(RequestOrigin::exit);
        }
        if enters {
            self.enter();
        }
    }

    /// A copy of the load, for a message that is sent.
    #[inline]
    pub(crate) fn load(&self) -> Option<Load> {
        if self.any() { Some(self.copy(None)) } else { None }
    }

    /// A copy of the load, for a message that responds only to the callers in `reply`.
    pub(super) fn load_for(&self, reply: Reply) -> Load {
        self.copy(Some(reply))
    }

    fn copy(&self, reply: Option<Reply>) -> Load {
        let mut data = lock(&self.data);
        let metadata = data.metadata.clone();
        let reply = reply
            .unwrap_or_else(|| Reply::merged(data.origin.clone(), data.replies.all.iter().map(|(_, reply)| reply)));
        let journey = self.observed.as_ref().and_then(|observed| match (&mut data.journey, &observed.source) {
            (Some(journey), _) => journey.send(observed.operator),
            (None, Some(source)) => data.sampled.as_ref().map(|(number, work)| source.begin(*number, work)),
            _ => None,
        });
        Load { metadata, reply, journey: journey.map(Box::new) }
    }

    /// The message of a parcel that was not sent. Its journey stays in the run.
    #[inline]
    pub(super) fn take_back<M>(&self, mut parcel: Parcel<M>) -> M {
        if let Some(journey) = parcel.take_journey() {
            self.keep_journey(*journey);
        }
        parcel.message
    }

    #[cold]
    fn keep_journey(&self, journey: Journey) {
        journey.unsent();
        if let Some(journey) = &mut lock(&self.data).journey {
            journey.unsent();
        }
    }

    /// Takes the replies for the messages taken: one entry each, in the order of taking.
    pub(crate) fn take_replies(&self) -> Vec<Reply> {
        let taken = self.taken.swap(0, Ordering::Relaxed);
        let mut replies = vec![Reply::default(); taken];
        if self.any() {
            let handed_on = self.change_data(|data| {
                let all = mem::take(&mut data.replies.all).into_iter();
                // The number of a message taken between two runs is reset by the next message taken there, so it might
                // be too high: such a reply stays with the run, and no later call takes it for one of its own.
                let (handed_on, kept): (SmallVec<_>, SmallVec<_>) = all.partition(|(number, _)| *number < taken);
                data.replies.all = kept;
                data.replies.all.iter_mut().for_each(|(number, _)| *number = usize::MAX);
                handed_on
            });
            for (number, reply) in handed_on {
                replies[number] = reply;
            }
        }
        replies
    }

    pub(super) fn metadata(&self) -> Metadata {
        lock(&self.data).metadata.clone()
    }

    /// Changes the metadata under the lock: `change` must not drop a value.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Metadata) -> R) -> R {
        self.change_data(|data| change(&mut data.metadata))
    }

    fn change_data<R>(&self, change: impl FnOnce(&mut ContextData) -> R) -> R {
        let mut data = lock(&self.data);
        let changed = change(&mut data);
        self.any.store(!data.is_empty(), Ordering::Relaxed);
        changed
    }

    /// Polls a future of the operator, and drops it, [within](Self::within) the context.
    pub(super) async fn run<T>(&self, future: impl Future<Output = T>) -> T {
        struct DropWithin<'a, F>(&'a RunContext, Pin<&'a mut Option<F>>);

        impl<F> Drop for DropWithin<'_, F> {
            fn drop(&mut self) {
                self.0.within(|| self.1.set(None));
            }
        }

        let future = pin!(Some(future));
        let mut future = DropWithin(self, future);
        poll_fn(|task| {
            let Some(future) = future.1.as_mut().as_pin_mut() else { return Poll::Pending };
            let polled = self.within(|| future.poll(task));
            // Otherwise the end of the run releases them.
            if polled.is_pending() && self.any() && self.is_in(phase::BETWEEN_RUNS) {
                self.fail_dropped();
            }
            polled
        })
        .await
    }

    /// Calls code of the operator inside the span of the messages that it works on.
    #[inline]
    pub(crate) fn within<R>(&self, call: impl FnOnce() -> R) -> R {
        /// Leaves the span even if the operator panics: its thread continues with other tasks.
        struct Leave<'a>(&'a RunContext);

        impl Drop for Leave<'_> {
            #[inline]
            fn drop(&mut self) {
                if self.0.any() {
                    self.0.leave();
                }
            }
        }

        if self.any() {
            self.enter();
        }
        let _leave = Leave(self);
        POLLED.set(self, call)
    }

    #[cold]
    fn keep_dropped(&self, request: Arc<dyn Caller>) {
        let forgotten = self.change_data(|data| data.dropped.push(0, Reply::to(request, None)));
        drop(forgotten);
    }

    /// Fails the dropped requests, where no run is in progress.
    #[cold]
    fn fail_dropped(&self) {
        discard_all(self.change_data(|data| mem::take(&mut data.dropped)).all);
    }

    #[cold]
    fn enter(&self) {
        // The span's subscriber is called without the lock, here and below.
        let entered = lock(&self.data).enter();
        entered.iter().for_each(RequestOrigin::enter);
        discard(entered);
    }

    #[cold]
    fn leave(&self) {
        let left = lock(&self.data).leave();
        left.iter().for_each(RequestOrigin::exit);
        discard(left);
    }
}

impl Replies {
    /// Adds a reply. Returns the entries that are discarded in exchange: the answered ones, once there are many.
    fn push(&mut self, number: usize, reply: Reply) -> Self {
        let mut forgotten = Self::default();
        if self.all.len() >= self.most.max(REMEMBERED) {
            (self.all, forgotten.all) =
                mem::take(&mut self.all).into_iter().partition(|(_, reply)| reply.is_waited_for());
            self.most = 2 * self.all.len();
        }
        self.all.push((number, reply));
        forgotten
    }
}

impl ContextData {
    fn is_empty(&self) -> bool {
        let has_messages = !self.replies.all.is_empty() || !self.dropped.all.is_empty() || self.origin.is_some();
        self.metadata.is_empty() && !has_messages && self.journey.is_none() && self.sampled.is_none()
    }

    /// Adds the origin of a message. The origin of the run is that of the first message; an origin that is new to the
    /// operator replaces one that is not.
    fn join_origin(&mut self, origin: RequestOrigin, newest: u64) -> JoinedOrigin {
        self.newest = self.newest.max(origin.number);
        let replaces = self.origin.as_ref().is_none_or(|first| first.number <= newest && newest < origin.number);
        if !replaces {
            return JoinedOrigin { origin, other: self.origin.clone(), replaces, was_inside: false };
        }
        let was_inside = mem::take(&mut self.inside);
        JoinedOrigin { other: self.origin.replace(origin.clone()), origin, replaces, was_inside }
    }

    fn enter(&mut self) -> Option<RequestOrigin> {
        if self.inside {
            return None;
        }
        self.inside = self.origin.is_some();
        self.origin.clone()
    }

    fn leave(&mut self) -> Option<RequestOrigin> {
        if mem::take(&mut self.inside) { self.origin.clone() } else { None }
    }
}

/// The result of joining the origin of a message, for the spans.
struct JoinedOrigin {
    origin: RequestOrigin,
    /// The previous origin of the run.
    other: Option<RequestOrigin>,
    /// The message's origin is now that of the run.
    replaces: bool,
    /// The span of the previous origin was entered.
    was_inside: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::Error, hub::reply::Caller};

    struct Waits;

    impl Caller for Waits {
        fn number(&self) -> u64 {
            1
        }

        fn is_waiting(&self) -> bool {
            true
        }

        fn fail(&self, _error: Error) {}

        fn taken_over(&self) {}

        fn seen_by(&self, _operator: &Arc<str>) {}
    }

    /// No operator takes messages between `release_unneeded` and the beginning of a run, but hand-written ports that
    /// another thread uses can.
    #[test]
    fn the_reply_of_a_message_taken_before_the_run_is_not_used_as_an_index() {
        let context = RunContext::new("operator".into(), MergePolicy::Update, OperatorTask::alone());
        let load = Load { reply: Reply::to(Arc::new(Waits), None), ..Load::default() };
        context.receive(Some(Box::new(Header { load: Some(load), ..Header::default() }))).unwrap();
        context.begin();
        assert!(context.take_replies().is_empty());
        assert!(context.any(), "its caller is the run's");
    }
}
