//! Conditions: they decide when an operator may run.
//!
//! A condition is level-triggered, and polling it has no side effect: the answer stays the same until something acts.
//! The answer is a [`Status`]. While a condition is not ready it keeps a waker, and nothing polls it. The conditions of
//! an operator are combined with "and"; [`any_of`] combines with "or". When one pass finds all of them ready, each
//! claims what the run needs, without an await in between; if one claim fails, all claims are given back and the
//! operator waits again.
//!
//! By default every input waits for a message and every output for room (and, if its hub has blank envelopes, for one
//! of them). Attributes on ports, and conditions given when an operator is added, change, replace or extend that:
//!
//! | ready when | on a port | when adding |
//! |---|---|---|
//! | a message is queued | by default; [`Inputs`](crate::Inputs): one from each connection | [`at_least`]`(op.input, 1)` |
//! | n messages are queued | `#[input(at_least = 4)]` | [`at_least`]`(op.input, 4)` |
//! | at most n are queued | `#[input(at_most = 8)]` | [`at_most`]`(op.input, 8)` |
//! | n are queued, or the oldest has waited for a time | `#[input(batch = 8, within = "5ms")]` | [`batch`]`(op.input, 8, time)` |
//! | n are queued at several inputs together | `#[ports(sum(left, right) = 3)]` | [`sum`]`([..], 3)` |
//! | a number is queued at each of several inputs | `#[ports(each(left = 2, right = 1))]` | [`each`]`([..])` |
//! | so many are queued, or an interval has passed | `#[ports(sum(left, right) = 3, or_after = "10ms")]` | [`sum`]`(..).`[`or_after`](OnPorts::or_after)`(time)` |
//! | always | `#[input(optional)]`, `#[output(optional)]` | |
//! | there is room for n | `#[output(room = 2)]` | [`room`](fn@room)`(op.output, 2)` |
//! | the hub has a chunk, or a blank chunk | `#[consume]`, `#[peek]`, `#[modify]`, `#[produce]` | |
//! | the work that wrote a message is done | `#[input(done)]` | |
//! | an event that a message carries has passed | `#[input(event = "decoded")]` | |
//! | a buffer's data is available | | [`Cx::run_after`](crate::Cx::run_after) |
//! | memory can be allocated | | [`memory`](fn@memory)`(&allocator, 1 << 20)` |
//! | runs are left | | [`count`](fn@count)`(100)` |
//! | a gate is open | | a [`Gate`] |
//! | a period has passed | | [`every`]`(time)` |
//! | work elsewhere is done | | an [`Asynchronous`] |
//! | a future has resolved | | [`until`]`(..)` |
//! | a function returns true | [`Operator::may_run`](crate::Operator::may_run) | [`predicate`](fn@predicate)`(..)` |
//! | either of two is ready | | [`any_of`]`(a, b)` |
//! | your own code decides | | a [`Condition`] |
//!
//! A port that is named by a condition given when the operator is added loses its default condition; the other ports
//! keep theirs. An operator without any condition runs again and again, and yields to other tasks in between. So does
//! an operator whose inputs are all `optional`: let it call [`Cx::finish`](crate::Cx::finish) once they [have
//! ended](crate::Input::has_ended).

mod alarm;
mod asynchronous;
mod buffer;
mod combine;
mod conditions;
mod count;
mod event;
mod future;
mod gate;
mod memory;
mod message;
mod periodic;
mod port;
mod predicate;
mod ready_prefix;
mod room;
mod status;
mod stream;
mod watch;

use std::{borrow::Cow, task::Context};

#[doc(inline)]
pub use crate::hub::Since;
pub(crate) use alarm::{Alarm, after};
pub use asynchronous::{AsyncState, Asynchronous};
pub(crate) use buffer::{Awaited, poll_buffers};
pub use combine::{IntoCondition, When, all_of, any_of};
pub(crate) use combine::{needing_timers, reservations};
pub(crate) use conditions::Conditions;
pub use count::{Count, count};
pub use event::EventField;
pub use future::{Until, Verdict, until};
pub use gate::Gate;
pub(crate) use gate::Gates;
pub use memory::{MemoryAvailable, memory};
#[doc(hidden)]
pub use message::Counted;
pub(crate) use message::Need;
pub use periodic::{Every, MissedTicks, every};
#[doc(hidden)]
pub use port::PortState;
pub use port::{OnPorts, PortId, at_least, at_most, batch, each, room, sum};
pub(crate) use port::{PortFacts, count_at, named_ports};
pub use predicate::{Predicate, predicate};
pub(crate) use ready_prefix::{MessageRequirement, ReadyPrefix};
pub(crate) use room::{Room, room_problem};
#[doc(hidden)]
pub use status::Readiness;
pub use status::Status;

/// A condition of your own, for [`Added::when`](crate::flow::Added::when).
///
/// ```text
///   start ──> [ polled repeatedly ──> claimed ──> the run ──> ended ]*
///                                        └──> given back, if another condition's claim failed
/// ```
///
/// All methods are called from the operator's task.
///
/// ```
/// use std::{borrow::Cow, task::Context};
/// use wakeline::condition::{Condition, Status};
///
/// /// One run for each token received.
/// struct Tokens(futures::channel::mpsc::Receiver<()>, bool);
///
/// impl Condition for Tokens {
///     fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
///         use futures::StreamExt;
///         if self.1 {
///             return Status::Ready;           // polling again has no side effect
///         }
///         match self.0.poll_next_unpin(cx) {
///             std::task::Poll::Pending => Status::WaitEvent,
///             std::task::Poll::Ready(None) => Status::Never,
///             std::task::Poll::Ready(Some(())) => {
///                 self.1 = true;
///                 Status::Ready
///             }
///         }
///     }
///
///     fn claim(&mut self) -> bool {
///         std::mem::replace(&mut self.1, false)
///     }
///
///     fn give_back(&mut self) {
///         self.1 = true;
///     }
///
///     fn describe(&self) -> Cow<'static, str> {
///         "a token".into()
///     }
/// }
/// ```
pub trait Condition: Send + 'static {
    /// Called before the flow's operators run, each time that the flow is run.
    fn start(&mut self) {}

    /// Whether the operator may run. Polling has no side effect. Unless the answer is ready, never or a time, keep the
    /// waker, and wake it when the answer might have changed. A condition whose answer can change at any time always
    /// keeps the waker, so that an operator that waits for something else is notified at once.
    ///
    /// [`Status::Wait`] means that another operator has to act: a flow in which all operators wait like this has
    /// stalled or is at its end. [`Status::WaitEvent`] and [`Status::WaitTime`] mean that the wait ends without an
    /// operator.
    ///
    /// [`Status::WaitTime`] needs no waker: the flow sets a timer for that moment on `tokio::time`'s clock, and the
    /// operator may run once it has passed, whether or not this method is called again before [`claim`](Self::claim).
    /// The condition is polled again when something else changes, and can then answer an earlier or a later moment. The
    /// runtime must have its timers enabled (`enable_time`).
    ///
    /// ```
    /// use std::{task::Context, time::Duration};
    /// use tokio::time::Instant;
    /// use wakeline::condition::{Condition, Status};
    ///
    /// /// Doubles the time before each run.
    /// struct BackOff(Duration, Instant);
    ///
    /// impl Condition for BackOff {
    ///     fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
    ///         Status::WaitTime(self.1)
    ///     }
    ///
    ///     fn claim(&mut self) -> bool {
    ///         self.0 *= 2;
    ///         self.1 = Instant::now() + self.0;
    ///         true
    ///     }
    /// }
    /// ```
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status;

    /// Takes what the run needs, after all conditions were ready. Returns false if it is no longer available; the
    /// condition is then polled again. An operator whose condition is ready but rejects every claim fails.
    fn claim(&mut self) -> bool {
        true
    }

    /// Undoes [`claim`](Self::claim): the run does not take place.
    fn give_back(&mut self) {}

    /// Called when the run has ended: `compute` has returned, with or without an error. The next poll comes after this
    /// call.
    fn ended(&mut self) {}

    /// Called when the operator stops waiting for the condition, until it is polled again. Release resources that are
    /// held only for waiting.
    fn stop_waiting(&mut self) {}

    /// True for a condition that keeps no waker. It is polled last, once all other conditions are ready. After
    /// [`Status::Wait`] it is polled again when a message arrives at one of the operator's inputs, when an output gains
    /// room, and when the whole flow becomes idle. This method is called once, when the condition is given to its
    /// operator.
    fn is_polled_last(&self) -> bool {
        false
    }

    /// A configuration error, reported before the flow runs, as the rest of a sentence that begins with the operator:
    /// "runs every 0 seconds".
    fn problem(&self) -> Option<String> {
        None
    }

    /// What the operator waits for, as the rest of a sentence that begins with "waits for": "its gate to be resumed".
    fn describe(&self) -> Cow<'static, str> {
        std::any::type_name::<Self>().into()
    }

    /// True if the condition needs tokio's timers.
    #[doc(hidden)]
    fn needs_timers(&self) -> bool {
        false
    }

    /// The memory that the condition reserves for the operator's runs.
    #[doc(hidden)]
    fn reservation(&self) -> Option<&std::sync::Arc<crate::memory::Reservation>> {
        None
    }
}
