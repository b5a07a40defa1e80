//! [`Reply`]: who waits for an answer to a message.
//!
//! It travels beside the message, and beside whatever an operator makes of it. Each request has one [`Caller`]; every
//! message that goes back to it shares that one, and when the last share is gone without an answer the caller is told so.

use std::{any::Any, fmt, sync::Arc};

use smallvec::SmallVec;
use tracing::Span;

use crate::error::Error;

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
    callers: SmallVec<[Arc<dyn Caller>; 1]>,
    pub(crate) span: Option<Span>,
}

/// One who waits for an answer, whatever that is.
pub(crate) trait Caller: Any + Send + Sync {
    /// There will be none.
    fn fail(&self, error: Error);
    /// Nobody listens any more.
    fn has_left(&self) -> bool;
    /// An operator has taken a message of its.
    fn seen_by(&self, operator: &Arc<str>);
}

impl Reply {
    pub(crate) fn to(caller: Arc<dyn Caller>, span: Option<Span>) -> Self {
        Self { callers: SmallVec::from_buf([caller]), span }
    }

    /// Of a message that nobody waits for.
    pub(crate) fn nobody(span: Option<Span>) -> Self {
        Self { callers: SmallVec::new(), span }
    }

    /// True if nobody waits.
    pub fn is_empty(&self) -> bool {
        self.callers.is_empty()
    }

    /// True if somebody asked and all who did have gone away: the work may be saved.
    pub fn is_abandoned(&self) -> bool {
        !self.is_empty() && self.callers.iter().all(|caller| caller.has_left())
    }

    /// Answers with an error, and nobody else is disturbed: the request is at fault, and not the flow.
    pub fn fail(self, error: Error) {
        self.callers.iter().for_each(|caller| caller.fail(error.again()));
    }

    pub(crate) fn callers(&self) -> &[Arc<dyn Caller>] {
        &self.callers
    }

    pub(crate) fn seen_by(&self, operator: &Arc<str>) {
        self.callers.iter().for_each(|caller| caller.seen_by(operator));
    }

    /// All callers of the two, each once.
    pub(crate) fn join(&mut self, other: &Self) {
        for caller in &other.callers {
            if !self.callers.iter().any(|known| Arc::ptr_eq(known, caller)) {
                self.callers.push(caller.clone());
            }
        }
    }

    /// It says nothing at all.
    pub(crate) fn is_nothing(&self) -> bool {
        self.callers.is_empty() && self.span.is_none()
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").field("callers", &self.callers.len()).finish_non_exhaustive()
    }
}
