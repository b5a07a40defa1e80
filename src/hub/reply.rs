//! [`Reply`]: the callers that wait for an answer to a message.
//!
//! It travels beside the message, and beside everything that operators make of it. Each request has one [`Caller`],
//! shared by all messages that lead back to it. When the last reference is dropped without an answer, the request
//! fails.
//!
//! A message in a cycle (state that an operator sends to itself) accumulates the callers of every run that it takes
//! part in. Callers that are answered or that went away are therefore removed: what a run sends has only the callers
//! that still wait, so its size is bounded by the number of requests in flight. For the same reason a message's span
//! yields to newer ones: see [`RequestOrigin`].

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use smallvec::SmallVec;
use tracing::{Dispatch, Span, span::Id};

use crate::{
    error::Error,
    mutants::{self, Mutant},
    sync::{DiscardOnDrop, assert_unlocked, logged},
};

/// The callers that wait for an answer to a message that an operator took, and the [`Span`][span] in which it was asked
/// for. Obtained from [`Cx::take_replies`](crate::Cx::take_replies) and passed to
/// [`Output::send_for`](crate::Output::send_for).
///
/// For a message without callers it is [empty](Self::is_empty); sending for it then equals a plain send. A clone
/// refers to the same callers: the first message that reaches them is their answer. When the last clone is dropped
/// and no message for the callers is in flight, they get an error of kind
/// [`Unanswered`](crate::ErrorKind::Unanswered). If an operator drops it in a run, they get the error when the run has
/// ended, or the flow's failure if the run fails.
///
/// [span]: https://docs.rs/tracing/0.1/tracing/struct.Span.html
#[derive(Clone, Default)]
#[must_use = "dropping it leaves a caller without an answer"]
pub struct Reply {
    /// Sorted by their numbers.
    callers: Callers,
    /// Whether there ever were callers, even if none of them waits any more.
    had_callers: bool,
    pub(crate) origin: Option<RequestOrigin>,
}

/// The callers of a message.
pub(crate) type Callers = SmallVec<[Arc<dyn Caller>; 1]>;

/// The span in which a message entered the flow, and the message's number there.
///
/// The numbers distinguish a message that is new to an operator from one that comes back in a cycle.
#[derive(Clone)]
pub(crate) struct RequestOrigin {
    /// Shared, so that cloning calls no subscriber and is allowed while a lock is held. Dropping the last clone
    /// closes the span, which calls the subscriber. A panic of the subscriber is caught there, also while the
    /// message's own destructor unwinds.
    span: Arc<DiscardOnDrop<Span>>,
    pub(crate) number: u64,
}

/// A party that waits for an answer of any type.
pub(crate) trait Caller: Any + Send + Sync {
    /// Requests are numbered in the order in which they are made.
    fn number(&self) -> u64;
    /// Whether the caller has no answer yet and has not gone away.
    fn is_waiting(&self) -> bool;
    /// Reports that there will be no answer.
    fn fail(&self, error: Error);
    /// User code has taken the reply and may answer from anywhere.
    fn taken_over(&self);
    /// An operator has taken a message of this caller.
    fn seen_by(&self, operator: &Arc<str>);
}

/// The number for a message that enters a flow: greater than all earlier ones in the process.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Calls to the span's subscriber run user code: no lock is held, and a panic is caught.
impl RequestOrigin {
    fn new(span: Span, number: u64) -> Self {
        Self { span: Arc::new(DiscardOnDrop::new(span)), number }
    }

    /// Enters the span, without a guard: it may be exited elsewhere.
    pub(crate) fn enter(&self) {
        self.with_subscriber(|(id, dispatch)| dispatch.enter(id));
    }

    pub(crate) fn exit(&self) {
        self.with_subscriber(|(id, dispatch)| dispatch.exit(id));
    }

    /// Records that this span follows from `earlier`, if they differ.
    pub(crate) fn follows_from(&self, earlier: &Self) {
        if self.span.get() != earlier.span.get() {
            self.with_subscriber(|(id, dispatch)| {
                earlier.with_subscriber(|(earlier, _)| dispatch.record_follows_from(id, earlier));
            });
        }
    }

    fn with_subscriber(&self, call: impl FnOnce((&Id, &Dispatch))) {
        assert_unlocked();
        logged(|| {
            if let Some(span) = self.span.get() {
                span.with_subscriber(call);
            }
        });
    }
}

impl Reply {
    pub(crate) fn to(caller: Arc<dyn Caller>, span: Option<Span>) -> Self {
        let number = caller.number();
        let origin = span.map(|span| RequestOrigin::new(span, number));
        Self { callers: SmallVec::from_buf([caller]), had_callers: true, origin }
    }

    /// The reply of a message without a caller that enters the flow in this span.
    pub(crate) fn of_span(span: Option<Span>) -> Self {
        Self::of_origin(span.map(|span| RequestOrigin::new(span, next_number())))
    }

    pub(crate) fn of_origin(origin: Option<RequestOrigin>) -> Self {
        Self { callers: SmallVec::new(), had_callers: false, origin }
    }

    /// Returns true for a message that no request has led to.
    pub fn is_empty(&self) -> bool {
        !self.had_callers
    }

    /// Returns true if requests have led to this message and all of them are answered or given up: the work can be
    /// skipped.
    pub fn is_abandoned(&self) -> bool {
        self.had_callers && !self.is_waited_for()
    }

    /// Answers with an error, which fails the request but not the flow.
    ///
    /// The callers get this error unchanged, including its causes: use it to give them a text of your own. Do not
    /// pass on an error that was written for the log, such as one returned by a call to wakeline; create a new one.
    pub fn fail(self, error: Error) {
        self.callers.iter().for_each(|caller| caller.fail(error.clone()));
    }

    pub(crate) fn callers(&self) -> &[Arc<dyn Caller>] {
        &self.callers
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.callers.iter().any(|caller| caller.is_waiting())
    }

    pub(crate) fn taken_over(&self) {
        self.callers.iter().for_each(|caller| caller.taken_over());
    }

    pub(crate) fn seen_by(&self, operator: &Arc<str>) {
        self.callers.iter().for_each(|caller| caller.seen_by(operator));
    }

    /// The callers of all `replies` that still wait, each once.
    pub(crate) fn merged<'a>(origin: Option<RequestOrigin>, replies: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::of_origin(origin);
        let mut messages = 0;
        for reply in replies.into_iter().filter(|reply| reply.had_callers) {
            all.had_callers = true;
            let before = all.callers.len();
            let goes_on = |caller: &&Arc<dyn Caller>| caller.is_waiting() || mutants::is(Mutant::CallersKept);
            all.callers.extend(reply.callers.iter().filter(goes_on).cloned());
            messages += usize::from(all.callers.len() > before);
        }
        if messages > 1 && mutants::is(Mutant::CallersLost) {
            all.callers.clear();
        }
        if messages > 1 {
            all.callers.sort_unstable_by_key(|caller| caller.number());
            // Each removed entry is shared with one of the merged replies, so no caller is dropped here.
            all.callers.dedup_by_key(|caller| caller.number());
        }
        all
    }

    /// Whether it has neither callers nor an origin.
    pub(crate) fn is_nothing(&self) -> bool {
        !self.had_callers && self.origin.is_none()
    }
}

impl fmt::Debug for RequestOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestOrigin").field("span", &self.span.get()).field("number", &self.number).finish()
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("callers", &self.callers.len()).finish_non_exhaustive()
    }
}
