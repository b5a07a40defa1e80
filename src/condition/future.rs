//! [`Until`], `.when(until(|| async { .. }))`: an operator runs once a future has resolved.
//!
//! A future resolves once, but a condition is polled repeatedly. So the future is created by a function, which is
//! called when the operator waits for a run and no future is pending. A resolved future counts as ready until the run
//! that it allows; the next run has a new future.
//!
//! ```text
//!            polled: the function is called            resolved
//!   NONE ──────────────────────────────> PENDING ─────────────────> READY      false: NEVER
//!     ^                                                               │ a run begins
//!     └───────────────────────────────────────────────────────────────┘
//! ```
//!
//! A pending future counts as an event: while its operator waits for nothing else, the flow is not idle. If the
//! operator also waits for a message, the flow can be idle, since the future alone would not let the operator run.

use std::{
    borrow::Cow,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use super::{Condition, Status};
use crate::sync::DiscardOnDrop;

/// The output of a future of [`until`]: `()` or `bool`. Sealed.
pub trait Verdict: sealed::Sealed + Send + 'static {
    /// True if the operator may run; otherwise it never runs again.
    fn allows(self) -> bool;
}

mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed {}
}

impl sealed::Sealed for () {}
impl sealed::Sealed for bool {}

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

/// The condition that [`until`] creates.
pub struct Until<F: 'static, R: 'static> {
    make: DiscardOnDrop<F>,
    state: State<R>,
}

/// The future and the function are user code: a panic of one destructor does not affect the other.
enum State<R: 'static> {
    None,
    Pending(DiscardOnDrop<Pin<Box<R>>>),
    Ready,
    Never,
}

/// Before each run, waits for a future that `make` returns. If its output is `false`, the operator ends.
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
/// If an operator stops waiting for its next run ([`Cx::ready`](crate::Cx::ready)), the future is kept, and polled on
/// when the operator waits again. It is dropped with the operator, or when the flow is run again.
pub fn until<F, R>(make: F) -> Until<F, R>
where
    F: FnMut() -> R + Send + 'static,
    R: Future<Output: Verdict> + Send + 'static,
{
    Until { make: DiscardOnDrop::new(make), state: State::None }
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
            self.state = State::Pending(DiscardOnDrop::new(Box::pin(make())));
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
        "the future of its `until` condition".into()
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
