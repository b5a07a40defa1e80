//! [`RunContext`]: the data that came with the messages of an operator's run, and that goes along with those that it
//! sends.
//!
//! There are three kinds: named values, the callers that wait for a response, and the tracing span of the first of the
//! messages. The operator is inside that span while it works on them. The span of a message that the operator has
//! processed before (it came back through a cycle) is replaced by that of a new message: otherwise all runs would be in
//! the first message's span for ever.
//!
//! ```text
//!   take ──> reset, if it is the first of a run ──> merged ──> span entered ─┐
//!                                                                            │ left, and entered again, around
//!   release <── before the wait for the next run <── send: a copy goes along <┘ each await
//! ```
//!
//! Shared by an operator and its ports, and used only by its task. If no message has any of these, a run costs a few
//! loads of a flag.

use std::{
    future::poll_fn,
    mem,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use super::{node::OperatorTask, status_cell::InRun};
use crate::{
    condition::Readiness,
    error::Result,
    hub::{
        MergePolicy, Metadata, Reply,
        parcel::{Header, Load},
        reply::RequestOrigin,
    },
    mutants::{self, Mutant},
    sync::{Mutex, discard, discard_all, lock},
};

/// At least this many messages with callers are recorded in one run; above it, entries whose callers have their
/// responses are discarded. It is for an operator that takes an unlimited number of messages in a single run.
const REMEMBERED: usize = 1024;

/// The context of one operator's current run.
#[derive(Debug)]
pub(crate) struct RunContext {
    operator: Arc<str>,
    node: Arc<OperatorTask>,
    /// The node's own waker, which its ports keep.
    waker: Waker,
    policy: MergePolicy,
    any: AtomicBool,
    /// A run is in progress; otherwise each message that is taken resets the context.
    running: AtomicBool,
    /// Messages taken in this run, or since the last [`take_replies`](Self::take_replies).
    taken: AtomicUsize,
    /// The greatest number of the origins of earlier runs.
    newest: AtomicU64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    metadata: Metadata,
    /// The callers that wait for a response to a message, with the number of the message in the run.
    replies: Replies,
    /// Those that the operator has taken over: a reply that it drops in a run is dropped only when the run has ended.
    /// If the run fails, its callers get that error, and not that of a dropped reply.
    given: Replies,
    /// That of the first message that is new to the operator, or else that of the first message.
    origin: Option<RequestOrigin>,
    /// The greatest number of the origins of this run.
    newest: u64,
    inside: bool,
}

/// The replies of messages with callers, with the messages' numbers in the run.
#[derive(Debug, Default)]
struct Replies {
    all: SmallVec<[(usize, Reply); 1]>,
    /// From this length on, answered entries are discarded.
    most: usize,
}

impl RunContext {
    pub(crate) fn new(operator: Arc<str>, policy: MergePolicy, node: Arc<OperatorTask>) -> Self {
        Self {
            operator,
            waker: Waker::from(node.clone()),
            node,
            policy,
            any: AtomicBool::new(false),
            running: AtomicBool::new(false),
            taken: AtomicUsize::new(0),
            newest: AtomicU64::new(0),
            held: Mutex::default(),
        }
    }

    pub(super) fn policy(&self) -> MergePolicy {
        self.policy
    }

    pub(crate) fn node(&self) -> &Arc<OperatorTask> {
        &self.node
    }

    /// A wait of one of its ports, maybe in the middle of a run. See [`OperatorTask::poll_port`].
    pub(super) fn poll_port<T>(
        &self,
        what: InRun,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> std::result::Result<T, Readiness>,
    ) -> Poll<T> {
        self.node.poll_port(&self.waker, what, task, wait)
    }

    /// Polls `own`, a future of the operator itself, which keeps the node's waker as its ports do. The operator
    /// declares separately that it holds a token for it.
    pub(super) async fn attend<T>(&self, own: impl Future<Output = T>) -> T {
        let mut own = pin!(own);
        poll_fn(|task| {
            let ours = self.node.is_probe_waker(task.waker());
            if ours { own.as_mut().poll(&mut Context::from_waker(&self.waker)) } else { own.as_mut().poll(task) }
        })
        .await
    }

    #[inline]
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn begin(&self) {
        self.running.store(true, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
    }

    /// A run has ended. What it sends afterwards still carries everything along.
    #[inline]
    pub(crate) fn end(&self) {
        self.running.store(false, Ordering::Relaxed);
    }

    /// What the operator takes and sends until the next run begins belongs to the run that has ended.
    #[inline]
    pub(super) fn goes_on(&self) {
        self.running.store(true, Ordering::Relaxed);
    }

    /// Clears the context: the operator is done with what it took, and is about to wait for more.
    #[inline]
    pub(crate) fn release_unneeded(&self) {
        if self.any() && !mutants::is(Mutant::MetadataKept) {
            self.clear();
        }
    }

    /// Like [`release_unneeded`](Self::release_unneeded), unless a run is in progress: for a wait that an operator may
    /// make in the middle of one.
    #[inline]
    pub(super) fn release_between_runs(&self) {
        if self.any() && !self.running.load(Ordering::Relaxed) {
            self.clear();
        }
    }

    #[cold]
    fn clear(&self) {
        self.any.store(false, Ordering::Relaxed);
        let mut held = mem::take(&mut *lock(&self.held));
        held.leave().iter().for_each(RequestOrigin::exit);
        // Only one thread at a time executes this.
        self.newest.store(self.newest.load(Ordering::Relaxed).max(held.newest), Ordering::Relaxed);
        let Held { metadata, replies, given, origin, .. } = held;
        // Requests that are left without a response fail here, with no lock held. One by one, since a subscriber is
        // notified of each.
        discard_all(replies.all);
        discard_all(given.all);
        discard(origin);
        drop(metadata);
    }

    /// A message was taken, with its header.
    #[inline]
    pub(super) fn receive(&self, header: Option<Box<Header>>) -> Result<()> {
        if !self.running.load(Ordering::Relaxed) {
            self.release_unneeded();
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

    /// A message was taken in the operator's place, or is on its way to it: the operator does not run.
    #[inline]
    pub(crate) fn gather(&self, load: Option<Load>) -> Result<()> {
        load.map_or(Ok(()), |load| self.merge(load, 0, false))
    }

    #[cold]
    fn merge(&self, load: Load, number: usize, enters: bool) -> Result<()> {
        let Load { metadata, reply } = load;
        reply.seen_by(&self.operator);
        let newest = self.newest.load(Ordering::Relaxed);
        let origin = reply.origin.clone();
        let (merged, joined, forgotten) = self.change_held(|held| {
            let merged = held.metadata.merge_and_replace(&metadata, self.policy);
            let joined = origin.map(|origin| held.join_origin(origin, newest));
            let answered = if reply.is_empty() { Replies::default() } else { held.replies.push(number, reply) };
            (merged, joined, answered)
        });
        if let Some(joined) = joined {
            self.join(&joined, enters);
            discard(joined);
        }
        discard(metadata);
        discard(forgotten);
        merged.map(discard_all)
    }

    /// Updates the spans after the run's origin was joined with that of a message.
    fn join(&self, joined: &Joined, enters: bool) {
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

    /// A copy for a message that is sent.
    #[inline]
    pub(crate) fn load(&self) -> Option<Load> {
        if self.any() { Some(self.copy(None)) } else { None }
    }

    /// A copy for a message that is sent in response to some of the callers.
    pub(super) fn load_for(&self, reply: Reply) -> Load {
        self.copy(Some(reply))
    }

    fn copy(&self, reply: Option<Reply>) -> Load {
        let held = lock(&self.held);
        let metadata = held.metadata.clone();
        let reply = reply
            .unwrap_or_else(|| Reply::merged(held.origin.clone(), held.replies.all.iter().map(|(_, reply)| reply)));
        Load { metadata, reply }
    }

    /// Takes the replies for the messages taken: one entry each, in the order of taking.
    pub(crate) fn take_replies(&self) -> Vec<Reply> {
        let taken = self.taken.swap(0, Ordering::Relaxed);
        let mut replies = vec![Reply::default(); taken];
        if self.any() {
            let all = self.change_held(|held| mem::take(&mut held.replies)).all;
            for (number, reply) in &all {
                // The number of a message taken between two runs is reset by the next message taken there: it may be
                // too high.
                if let Some(place) = replies.get_mut(*number) {
                    place.clone_from(reply);
                }
            }
            let forgotten: SmallVec<[Replies; 1]> = self
                .change_held(|held| all.into_iter().map(|(number, reply)| held.given.push(number, reply)).collect());
            // Dropped where no lock is held.
            drop(forgotten);
        }
        replies
    }

    pub(super) fn metadata(&self) -> Metadata {
        lock(&self.held).metadata.clone()
    }

    /// Changes the metadata under the lock: `change` must not drop a value.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Metadata) -> R) -> R {
        self.change_held(|held| change(&mut held.metadata))
    }

    fn change_held<R>(&self, change: impl FnOnce(&mut Held) -> R) -> R {
        let mut held = lock(&self.held);
        let changed = change(&mut held);
        self.any.store(!held.is_empty(), Ordering::Relaxed);
        changed
    }

    /// Polls a future of the operator inside the span of the messages that it works on.
    #[inline]
    pub(crate) fn within<R>(&self, poll: impl FnOnce() -> R) -> R {
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
        poll()
    }

    #[cold]
    fn enter(&self) {
        // The span's subscriber is called without the lock, here and below.
        let entered = lock(&self.held).enter();
        entered.iter().for_each(RequestOrigin::enter);
        discard(entered);
    }

    #[cold]
    fn leave(&self) {
        let left = lock(&self.held).leave();
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

impl Held {
    fn is_empty(&self) -> bool {
        self.metadata.is_empty() && self.replies.all.is_empty() && self.given.all.is_empty() && self.origin.is_none()
    }

    /// Adds the origin of a message. The origin of the run is that of the first message; one that is new to the
    /// operator replaces one that is not.
    fn join_origin(&mut self, origin: RequestOrigin, newest: u64) -> Joined {
        self.newest = self.newest.max(origin.number);
        let replaces = self.origin.as_ref().is_none_or(|first| first.number <= newest && newest < origin.number);
        if !replaces {
            return Joined { origin, other: self.origin.clone(), replaces, was_inside: false };
        }
        let was_inside = mem::take(&mut self.inside);
        Joined { other: self.origin.replace(origin.clone()), origin, replaces, was_inside }
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
struct Joined {
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

    /// No operator takes messages between `release_unneeded` and the beginning of a run; hand-written ports that another thread
    /// uses may.
    #[test]
    fn the_reply_of_a_message_taken_before_the_run_is_not_used_as_an_index() {
        let context = RunContext::new("operator".into(), MergePolicy::Update, OperatorTask::alone());
        let load = Load { metadata: Metadata::default(), reply: Reply::to(Arc::new(Waits), None) };
        context.receive(Some(Box::new(Header { load: Some(load), ..Header::default() }))).unwrap();
        context.begin();
        assert!(context.take_replies().is_empty());
        assert!(context.any(), "its caller is the run's");
    }
}
