//! A predicate, `.when(predicate(|| ..))`: a question of one's own, without a waker.
//!
//! Nobody says when its answer changes. So it is asked last, when all that has a waker is ready, and after a no again
//! whenever something happens that the operator could see: a message comes to one of its inputs or room to one of its
//! outputs, its own run has ended, or all of the flow has come to rest, since another operator may have changed the answer.
//! This is [`Operator::may_run`](crate::Operator::may_run) from outside.

use std::{borrow::Cow, fmt, task::Context};

use super::{Condition, Status};

/// See [`predicate`].
pub struct Predicate<F>(F);

/// The operator runs only if the function says `true`, asked right before the run would begin. It should change nothing:
/// it may be asked more often than the operator runs.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use wakeline::{Flow, condition::predicate, operator::source};
///
/// static WARM: AtomicBool = AtomicBool::new(false);
///
/// let mut flow = Flow::new("oven");
/// let bread = flow.add("bread", source(async || Ok(Some("bread")))).when(predicate(|| WARM.load(Ordering::Relaxed)));
/// ```
///
/// One that should keep books of the runs implements [`Condition`] and says that it is
/// [asked last](Condition::asked_last).
pub fn predicate<F: FnMut() -> bool + Send + 'static>(function: F) -> Predicate<F> {
    Predicate(function)
}

impl<F: FnMut() -> bool + Send + 'static> Condition for Predicate<F> {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        if (self.0)() { Status::Ready } else { Status::Wait }
    }

    fn asked_last(&self) -> bool {
        true
    }

    fn describe(&self) -> Cow<'static, str> {
        "its predicate to allow it".into()
    }
}

impl<F> fmt::Debug for Predicate<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Predicate")
    }
}
