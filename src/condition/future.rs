//! Any future, `.when(until(|| async { .. }))`: an operator runs once it has resolved.
//!
//! A future resolves once, and a condition is asked again and again: so it comes from a function, which is called when the
//! operator waits for a run and none of its futures is under way. Once it has resolved it counts as ready until the run
//! that it allowed; the run after that has a future of its own.
//!
//! ```text
//!            asked: the function is called             resolved
//!   NONE ──────────────────────────────> PENDING ─────────────────> READY      false: NEVER
//!     ^                                                               │ a run begins
//!     └───────────────────────────────────────────────────────────────┘
//! ```
//!
//! A future is a promise that something will happen: while it is all that its operator waits for, the flow is not at rest.
//! One that waits for a message, too, could not run for the future alone.

use std::{
    borrow::Cow,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{Condition, Status};
use crate::sync::Discarded;

/// What a future says at its end.
pub trait Verdict: Send + 'static {
    /// Whether the operator may run; if not, it never runs again.
    fn allows(self) -> bool;
}

/// The operator may run.
impl Verdict for () {
    fn allows(self) -> bool {
        true
    }
}

/// `true`: the operator may run. `false`: it never runs again.
impl Verdict for bool {
    fn allows(self) -> bool {
        self
    }
}

/// See [`until`].
pub struct Until<F: 'static, R: 'static> {
    make: Discarded<F>,
    state: State<R>,
}

/// The future is a user's, as the function is: a panic of one destructor leaves the other.
enum State<R: 'static> {
    None,
    Pending(Discarded<Pin<Box<R>>>),
    Ready,
    Never,
}

/// Before each run a future of the function's has to resolve. One that gives `false` is the operator's end.
///
/// ```
/// use std::sync::Arc;
/// use tokio::sync::Notify;
/// use wakeline::{Flow, condition::until, operator::source};
///
/// let button = Arc::new(Notify::new());
/// let pressed = button.clone();
/// let mut flow = Flow::new("photo booth");
/// let photo = flow.add("photo", source(async || Ok(Some(0_u8)))).when(until(move || {
///     let pressed = pressed.clone();
///     async move { pressed.notified().await }
/// }));
/// ```
///
/// # Cancel safety
/// An operator that gives up its wait for the next run ([`Cx::ready`](crate::Cx::ready)) keeps the future, and goes on with
/// it when it waits again. It is dropped with the operator, or when the flow is run again.
pub fn until<F, R>(make: F) -> Until<F, R>
where
    F: FnMut() -> R + Send + 'static,
    R: Future<Output: Verdict> + Send + 'static,
{
    Until { make: Discarded::new(make), state: State::None }
}

impl<F, R> Condition for Until<F, R>
where
    F: FnMut() -> R + Send + 'static,
    R: Future<Output: Verdict> + Send + 'static,
{
    fn start(&mut self) {
        self.state = State::None;
    }

    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        if let State::None = self.state {
            let Some(make) = self.make.get_mut() else { return Status::Never };
            self.state = State::Pending(Discarded::new(Box::pin(make())));
        }
        if let State::Pending(future) = &mut self.state
            && let Some(future) = future.get_mut()
        {
            match future.as_mut().poll(cx) {
                Poll::Pending => return Status::WaitEvent,
                Poll::Ready(verdict) => self.state = if verdict.allows() { State::Ready } else { State::Never },
            }
        }
        if let State::Never = self.state { Status::Never } else { Status::Ready }
    }

    fn claim(&mut self) -> bool {
        if let State::Ready = self.state {
            self.state = State::None;
        }
        true
    }

    fn give_back(&mut self) {
        if let State::None = self.state {
            self.state = State::Ready;
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        "a future of its own".into()
    }
}

impl<F, R> fmt::Debug for Until<F, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::None => "Until(not begun)",
            State::Pending(_) => "Until(pending)",
            State::Ready => "Until(ready)",
            State::Never => "Until(never)",
        })
    }
}
