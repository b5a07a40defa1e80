//! [`Predicate`], `.when(predicate(|| ..))`: a function without a waker.
//!
//! Nothing reports a change of the function's answer. So it is called last, once every condition with a waker is ready.
//! After a `false` it is called again when a message arrives at one of the operator's inputs, when an output gains
//! room, and when the whole flow has become idle, since another operator might have changed the answer. It is the
//! external form of [`Operator::may_run`](crate::Operator::may_run).

use std::{borrow::Cow, fmt, task::Context};

use super::{Condition, Status};

/// The condition that [`predicate`] creates.
pub struct Predicate<F>(F);

/// Lets the operator run only if `function`, called right before a run would begin, returns `true`. The function should
/// have no side effects: it might be called more often than the operator runs.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use wakeline::{Flow, condition::predicate, operator::source};
///
/// static WARM: AtomicBool = AtomicBool::new(false);
///
/// let mut flow = Flow::new("oven");
/// let bread = flow.add("bread", source(async || Ok(Some("bread"))));
/// let bread = bread.when(predicate(|| WARM.load(Ordering::Relaxed)));
/// ```
///
/// To keep track of the runs, implement [`Condition`] with [`is_polled_last`](Condition::is_polled_last) instead.
pub fn predicate<F: FnMut() -> bool + Send + 'static>(function: F) -> Predicate<F> {
    Predicate(function)
}

impl<F: FnMut() -> bool + Send + 'static> Condition for Predicate<F> {
    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        if (self.0)() { Status::Ready } else { Status::Wait }
    }

    fn is_polled_last(&self) -> bool {
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
