//! [`Reply`]: who waits for an answer to a message.
//!
//! It travels beside the message, and beside whatever an operator makes of it. Each request has one [`Caller`]; every
//! message that goes back to it shares that one, and when the last share is gone without an answer the request fails.
//!
//! A message in a cycle (state that an operator sends to itself) goes on with the callers of each run that it was part
//! of. So a caller that has its answer, or that went away, is forgotten: what a run sends is merged of the callers that
//! still wait, and is as long as the requests in flight are many. The span of a message yields to newer ones for the same
//! reason: see [`Origin`].

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
    sync::{Discarded, assert_unlocked, logged},
};

/// Who waits for an answer to a message that an operator took, and from where it was asked for (the caller's
/// [`Span`]). From [`Cx::take_replies`](crate::Cx::take_replies), for
/// [`Output::send_for`](crate::Output::send_for).
///
/// Of a message that nobody waits for it is [empty](Self::is_empty), and to send for it is to send. A clone is the same
/// callers once more: whichever message reaches them first is their answer. When the last one is dropped, and no message
/// for them is under way, they get an error of the kind [`Unanswered`](crate::ErrorKind::Unanswered).
#[derive(Clone, Default)]
#[must_use = "dropping it leaves a caller without an answer"]
pub struct Reply {
    /// In the order of their numbers.
    callers: Callers,
    /// There were callers, and maybe none of them waits any more.
    asked: bool,
    pub(crate) origin: Option<Origin>,
}

/// Callers that a message goes back to.
pub(crate) type Callers = SmallVec<[Arc<dyn Caller>; 1]>;

/// The span that a message entered the flow in, and the message's number there.
///
/// The numbers tell a message that an operator has not worked on before from one that comes round in a cycle.
#[derive(Clone)]
pub(crate) struct Origin {
    /// Shared, so that a clone of this calls no subscriber: it may be made while a lock is held. The last one closes the span,
    /// which calls the subscriber: a panic of it ends there, also where the message's own destructor unwinds.
    span: Arc<Discarded<Span>>,
    pub(crate) number: u64,
}

/// One who waits for an answer, whatever that is.
pub(crate) trait Caller: Any + Send + Sync {
    /// Requests are numbered in the order of asking.
    fn number(&self) -> u64;
    /// It has no answer yet, and has not gone away.
    fn is_waiting(&self) -> bool;
    /// There will be no answer.
    fn fail(&self, error: Error);
    /// Code of the user's has the reply, and may answer from anywhere.
    fn taken_over(&self);
    /// An operator has taken a message of its.
    fn seen_by(&self, operator: &Arc<str>);
}

/// The number of what enters a flow: greater than all before, in the whole process.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// What calls the span's subscriber, which is user code: with no lock held, and a panic of it ends there.
impl Origin {
    fn new(span: Span, number: u64) -> Self {
        Self { span: Arc::new(Discarded::new(span)), number }
    }

    /// Enters the span, without a guard: it may be exited elsewhere.
    pub(crate) fn enter(&self) {
        self.tell(|(id, dispatch)| dispatch.enter(id));
    }

    pub(crate) fn exit(&self) {
        self.tell(|(id, dispatch)| dispatch.exit(id));
    }

    /// The span comes after the other, if it is another one.
    pub(crate) fn follows_from(&self, earlier: &Self) {
        if self.span.get() != earlier.span.get() {
            self.tell(|(id, dispatch)| {
                earlier.tell(|(earlier, _)| dispatch.record_follows_from(id, earlier));
            });
        }
    }

    fn tell(&self, call: impl FnOnce((&Id, &Dispatch))) {
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
        let origin = span.map(|span| Origin::new(span, number));
        Self { callers: SmallVec::from_buf([caller]), asked: true, origin }
    }

    /// Of a message without a caller, which enters the flow in this span.
    pub(crate) fn of_span(span: Option<Span>) -> Self {
        Self::of_origin(span.map(|span| Origin::new(span, next_number())))
    }

    pub(crate) fn of_origin(origin: Option<Origin>) -> Self {
        Self { callers: SmallVec::new(), asked: false, origin }
    }

    /// True for a message that no request has led to.
    pub fn is_empty(&self) -> bool {
        !self.asked
    }

    /// True if requests have led to this message, and all of them are answered or given up by now: the work may be saved.
    pub fn is_abandoned(&self) -> bool {
        self.asked && !self.is_waited_for()
    }

    /// Answers with an error, and the flow goes on: the request is at fault, and not the flow.
    ///
    /// The callers get this error as it is, its causes included: it is the way to give them a text of your own. An error
    /// that was written for the log (one that a call of wakeline has returned, say) is not for them: write another.
    pub fn fail(self, error: Error) {
        self.callers.iter().for_each(|caller| caller.fail(error.again()));
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

    /// The callers of all of these that still wait, each once.
    pub(crate) fn merged<'a>(origin: Option<Origin>, replies: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::of_origin(origin);
        let mut messages = 0;
        for reply in replies.into_iter().filter(|reply| reply.asked) {
            all.asked = true;
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
            // What goes here is shared with one of those that it was merged of: no caller is dropped.
            all.callers.dedup_by_key(|caller| caller.number());
        }
        all
    }

    /// It says nothing at all.
    pub(crate) fn is_nothing(&self) -> bool {
        !self.asked && self.origin.is_none()
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Origin").field("span", &self.span.get()).field("number", &self.number).finish()
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("callers", &self.callers.len()).finish_non_exhaustive()
    }
}
