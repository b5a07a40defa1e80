//! [`Carry`]: what the messages of an operator's run brought with them, and what those that it sends take along.
//!
//! Three things: named values, who waits for an answer, and the span that the first of the messages was sent in. The
//! operator is inside that span while it works on them. A message that the operator has worked for before (it came round
//! in a cycle) yields to one that is new to it: otherwise all runs would be in the first message's span for ever.
//!
//! ```text
//!   take ──> begins anew, if it is the first of a run ──> merged ──> span entered ─┐
//!                                                                                 │ left, and entered again, around
//!   let go <── before the next run is waited for <── send: a copy goes along <────┘ each await
//! ```
//!
//! Shared by an operator and its ports, and used by its task alone. Where no message ever had any, a run costs a few looks
//! at a flag.

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

use super::{node::Node, shown::InRun};
use crate::{
    condition::Readiness,
    error::Result,
    hub::{
        MergePolicy, Metadata, Reply,
        baggage::{Baggage, Load},
        reply::Origin,
    },
    mutants::{self, Mutant},
    sync::{Mutex, discard, discard_all, lock},
};

/// Messages with callers that are remembered in one run, at least; above it those are forgotten whose callers have their
/// answers. For an operator that takes messages without end in a single run.
const REMEMBERED: usize = 1024;

/// The load of one operator's present run.
#[derive(Debug)]
pub(crate) struct Carry {
    operator: Arc<str>,
    node: Arc<Node>,
    /// The node's own: for its ports to keep.
    waker: Waker,
    policy: MergePolicy,
    any: AtomicBool,
    /// A run is under way; otherwise each message that is taken begins anew.
    running: AtomicBool,
    /// Messages taken in this run, or since it was last asked who waits for them.
    taken: AtomicUsize,
    /// The greatest number of the origins of earlier runs.
    newest: AtomicU64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    metadata: Metadata,
    /// Of the messages that somebody waits for: which of those taken it was, and who that is.
    replies: Replies,
    /// Those that the operator has taken over: what it drops in a run is dropped when that has ended. If it fails, its
    /// callers hear of that, and not of a reply that was dropped.
    given: Replies,
    /// Of the first message that is new to the operator, or else of the first.
    origin: Option<Origin>,
    /// The greatest number of the origins of this run.
    newest: u64,
    /// The span is entered.
    inside: bool,
}

/// Who waits for answers to some of the messages, with their numbers in the run.
#[derive(Debug, Default)]
struct Replies {
    all: SmallVec<[(usize, Reply); 1]>,
    /// From this many on the answered ones are forgotten.
    most: usize,
}

impl Carry {
    pub(crate) fn new(operator: Arc<str>, policy: MergePolicy, node: Arc<Node>) -> Self {
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

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// A wait of one of its ports, maybe in the middle of a run. See [`Node::poll_port`].
    pub(super) fn poll_port<T>(
        &self,
        what: InRun,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> std::result::Result<T, Readiness>,
    ) -> Poll<T> {
        self.node.poll_port(&self.waker, what, task, wait)
    }

    /// Something of the operator's own, which keeps the node's waker as its ports do: it says by itself that it holds a token.
    pub(super) async fn attend<T>(&self, own: impl Future<Output = T>) -> T {
        let mut own = pin!(own);
        poll_fn(|task| {
            let ours = self.node.is_face(task.waker());
            if ours { own.as_mut().poll(&mut Context::from_waker(&self.waker)) } else { own.as_mut().poll(task) }
        })
        .await
    }

    #[inline]
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// A run begins.
    #[inline]
    pub(crate) fn begin(&self) {
        self.running.store(true, Ordering::Relaxed);
        self.taken.store(0, Ordering::Relaxed);
    }

    /// A run has ended. What it sends afterwards still takes everything along.
    #[inline]
    pub(crate) fn end(&self) {
        self.running.store(false, Ordering::Relaxed);
    }

    /// What it takes and sends until the next run begins belongs to the one that has ended.
    #[inline]
    pub(super) fn goes_on(&self) {
        self.running.store(true, Ordering::Relaxed);
    }

    /// The operator is done with what it took, and is about to wait for more.
    #[inline]
    pub(crate) fn let_go(&self) {
        if self.any() && !mutants::is(Mutant::MetadataKept) {
            self.clear();
        }
    }

    /// As [`let_go`](Self::let_go), unless a run is under way: for a wait that an operator may make in the middle of one.
    #[inline]
    pub(super) fn let_go_between_runs(&self) {
        if self.any() && !self.running.load(Ordering::Relaxed) {
            self.clear();
        }
    }

    #[cold]
    fn clear(&self) {
        self.any.store(false, Ordering::Relaxed);
        let mut held = mem::take(&mut *lock(&self.held));
        held.leave().iter().for_each(Origin::exit);
        // Only one thread at a time is here.
        self.newest.store(self.newest.load(Ordering::Relaxed).max(held.newest), Ordering::Relaxed);
        let Held { metadata, replies, given, origin, .. } = held;
        // Requests that are left without an answer fail here, and no lock is held. One by one: a subscriber is told of each.
        discard_all(replies.all);
        discard_all(given.all);
        discard(origin);
        drop(metadata);
    }

    /// A message was taken, with what came beside it.
    #[inline]
    pub(super) fn receive(&self, baggage: Option<Box<Baggage>>) -> Result<()> {
        if !self.running.load(Ordering::Relaxed) {
            self.let_go();
            self.taken.store(0, Ordering::Relaxed);
        }
        // Only one thread at a time is here.
        let number = self.taken.load(Ordering::Relaxed);
        self.taken.store(number + 1, Ordering::Relaxed);
        match baggage {
            None => Ok(()),
            Some(baggage) => self.merge(baggage.load, number, true),
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

    /// Tells the spans what has become of the run's origin.
    fn join(&self, joined: &Joined, enters: bool) {
        match (&joined.other, joined.replaces) {
            (Some(first), true) => joined.origin.follows_from(first),
            (Some(first), false) => return first.follows_from(&joined.origin),
            (None, _) => {}
        }
        if joined.was_inside {
            joined.other.iter().for_each(Origin::exit);
        }
        if enters {
            self.enter();
        }
    }

    /// For a message that is sent.
    #[inline]
    pub(crate) fn load(&self) -> Option<Load> {
        if self.any() { Some(self.copy(None)) } else { None }
    }

    /// For a message that is sent to answer some of the callers.
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

    /// Who waits for answers to the messages taken: one entry each, in the order of taking.
    pub(crate) fn take_replies(&self) -> Vec<Reply> {
        let taken = self.taken.swap(0, Ordering::Relaxed);
        let mut replies = vec![Reply::default(); taken];
        if self.any() {
            let all = self.change_held(|held| mem::take(&mut held.replies)).all;
            for (number, reply) in &all {
                // A message taken between two runs has a number that the next message taken there resets: it may be too high.
                if let Some(place) = replies.get_mut(*number) {
                    place.clone_from(reply);
                }
            }
            let forgotten: SmallVec<[Replies; 1]> = self
                .change_held(|held| all.into_iter().map(|(number, reply)| held.given.push(number, reply)).collect());
            // Where no lock is held.
            drop(forgotten);
        }
        replies
    }

    pub(super) fn metadata(&self) -> Metadata {
        lock(&self.held).metadata.clone()
    }

    /// Changes the metadata under the lock: `change` drops no value.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut Metadata) -> R) -> R {
        self.change_held(|held| change(&mut held.metadata))
    }

    fn change_held<R>(&self, change: impl FnOnce(&mut Held) -> R) -> R {
        let mut held = lock(&self.held);
        let changed = change(&mut held);
        self.any.store(!held.is_empty(), Ordering::Relaxed);
        changed
    }

    /// Polls something of the operator's, inside the span of what it works on.
    #[inline]
    pub(crate) fn within<R>(&self, poll: impl FnOnce() -> R) -> R {
        /// Left also if the operator panics: its thread goes on with others.
        struct Leave<'a>(&'a Carry);

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
        entered.iter().for_each(Origin::enter);
        discard(entered);
    }

    #[cold]
    fn leave(&self) {
        let left = lock(&self.held).leave();
        left.iter().for_each(Origin::exit);
        discard(left);
    }
}

impl Replies {
    /// One more. What is forgotten for it comes back: those whose callers have their answers, once there are many.
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

    /// The origin of one more message. The run's is the first one's; one that is new to the operator takes the place of
    /// one that is not.
    fn join_origin(&mut self, origin: Origin, newest: u64) -> Joined {
        self.newest = self.newest.max(origin.number);
        let replaces = self.origin.as_ref().is_none_or(|first| first.number <= newest && newest < origin.number);
        if !replaces {
            return Joined { origin, other: self.origin.clone(), replaces, was_inside: false };
        }
        let was_inside = mem::take(&mut self.inside);
        Joined { other: self.origin.replace(origin.clone()), origin, replaces, was_inside }
    }

    /// The span to enter, if it is not entered.
    fn enter(&mut self) -> Option<Origin> {
        if self.inside {
            return None;
        }
        self.inside = self.origin.is_some();
        self.origin.clone()
    }

    /// The span to exit, if it is entered.
    fn leave(&mut self) -> Option<Origin> {
        if mem::take(&mut self.inside) { self.origin.clone() } else { None }
    }
}

/// What has become of the origin of one more message, for the spans.
struct Joined {
    origin: Origin,
    /// The run's until now.
    other: Option<Origin>,
    /// The message's is the run's now.
    replaces: bool,
    /// The run's until now was entered.
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

    /// No operator takes between `let_go` and the beginning of a run; hand-written ports that another thread uses may.
    #[test]
    fn the_reply_of_a_message_that_was_taken_before_the_run_is_no_index() {
        let carry = Carry::new("operator".into(), MergePolicy::Update, Node::alone());
        let load = Load { metadata: Metadata::default(), reply: Reply::to(Arc::new(Waits), None) };
        carry.receive(Some(Box::new(Baggage { since: None, load }))).unwrap();
        carry.begin();
        assert!(carry.take_replies().is_empty());
        assert!(carry.any(), "its caller is the run's");
    }
}
