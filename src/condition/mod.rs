//! Conditions: when may an operator run?
//!
//! A condition is level-triggered and asking it changes nothing: the same question gets the same answer until somebody
//! acts. It answers a [`Status`]; while it is not ready it keeps a waker, and nothing polls. All conditions of an operator
//! are and-ed; [`any_of`] or-s. When one pass finds all of them ready, what the run needs is claimed at once, without an
//! await; a claim that fails gives all of it back and waits on.
//!
//! By default every input waits for a message and every output for room (and, where its hub has blank envelopes, for
//! one of those). Attributes on ports and values when adding change, replace or add to that:
//!
//! | ready when | on a port | when adding |
//! |---|---|---|
//! | a message is there | by default; [`Inputs`](crate::Inputs): one of each connection | [`at_least`]`(op.input, 1)` |
//! | n messages are there | `#[input(at_least = 4)]` | [`at_least`]`(op.input, 4)` |
//! | no more than n lie there | `#[input(at_most = 8)]` | [`at_most`]`(op.input, 8)` |
//! | n, or the oldest has waited | `#[input(batch = 8, within = "5ms")]` | [`batch`]`(op.input, 8, time)` |
//! | n at several inputs together | `#[ports(sum(left, right) = 3)]` | [`sum`]`([..], 3)` |
//! | so many at each of several | `#[ports(each(left = 2, right = 1))]` | [`each`]`([..])` |
//! | these, or an interval has passed | `#[ports(sum(left, right) = 3, or_after = "10ms")]` | [`sum`]`(..).`[`or_after`](OnPorts::or_after)`(time)` |
//! | always: none | `#[input(optional)]`, `#[output(optional)]` | |
//! | there is room for n | `#[output(room = 2)]` | [`room`]`(op.output, 2)` |
//! | a chunk of its hub is there, or a blank one | `#[consume]`, `#[peek]`, `#[modify]`, `#[produce]` | |
//! | the work that wrote a message is done | `#[input(done)]` | |
//! | an event that a message carries has passed | `#[input(event = "decoded")]` | |
//! | a buffer's data is available | | [`Cx::run_after`](crate::Cx::run_after) |
//! | so much memory can be had | | [`memory`]`(&allocator, 1 << 20)` |
//! | so many runs are left | | [`count`]`(100)` |
//! | somebody allows it | | a [`Gate`] |
//! | a period has passed | | [`every`]`(time)` |
//! | work elsewhere is done | | an [`Asynchronous`] |
//! | a future has resolved | | [`until`]`(..)` |
//! | a question is answered yes | [`Operator::may_run`](crate::Operator::may_run) | [`predicate`]`(..)` |
//! | either of two is | | [`any_of`]`(a, b)` |
//! | whatever you write | | a [`Condition`] |
//!
//! A port that is named when adding loses its default, the others keep theirs. An operator without any condition runs again
//! and again, and lets others have their turns in between. So does one whose inputs are all `optional`: it ends when it says so,
//! with [`Cx::finish`](crate::Cx::finish) once they [have ended](crate::Input::has_ended).

mod alarm;
mod asynchronous;
mod buffer;
mod combine;
mod count;
mod event;
mod front;
mod future;
mod gate;
mod memory;
mod message;
mod periodic;
mod port;
mod predicate;
mod room;
mod set;
mod status;
mod stream;
mod told;

use std::{borrow::Cow, task::Context};

pub use crate::hub::Since;
pub(crate) use alarm::{Alarm, after};
pub use asynchronous::{AsyncState, Asynchronous};
pub(crate) use buffer::{Awaited, buffers};
pub use combine::{IntoCondition, When, all_of, any_of};
pub(crate) use combine::{needing_timers, reservations};
pub use count::{Count, count};
pub use event::{EventField, EventNames, knows_event};
pub(crate) use front::{Front, Wanted};
pub use future::{Until, Verdict, until};
pub use gate::Gate;
pub(crate) use gate::Gates;
pub use memory::{MemoryThere, memory};
#[doc(hidden)]
pub use message::Counted;
pub(crate) use message::Need;
pub use periodic::{Every, MissedTicks, every};
#[doc(hidden)]
pub use port::PortState;
pub use port::{OnPorts, PortId, at_least, at_most, batch, each, room, sum};
pub(crate) use port::{PortFacts, count_at, named};
pub use predicate::{Predicate, predicate};
pub(crate) use room::{Room, look_for_room, room_for, room_problem};
pub(crate) use set::Conditions;
#[doc(hidden)]
pub use status::Readiness;
pub use status::Status;

/// A condition of your own, for [`Added::when`](crate::flow::Added::when).
///
/// ```text
///   start ──> [ asked, again and again ──> claimed ──> the run ──> told that it has ended ]*
///                                             └──> given back, if another condition's claim failed
/// ```
///
/// Everything is called from the operator's task.
///
/// ```
/// use std::{borrow::Cow, task::Context};
/// use wakeline::condition::{Condition, Status};
///
/// /// No more than so many runs at a stretch; then somebody has to top it up.
/// struct Tokens(futures::channel::mpsc::Receiver<()>, bool);
///
/// impl Condition for Tokens {
///     fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
///         use futures::StreamExt;
///         if self.1 {
///             return Status::Ready;           // asking again changes nothing
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
    /// Before the flow's operators run: each time that the flow is run.
    fn start(&mut self) {}

    /// May the operator run? Asking changes nothing. Unless it is ready, never again, or waits for a time, the waker is kept,
    /// and woken when the answer may have changed. One that may change its answer at any time keeps it always: then an operator that waits
    /// for something else hears of it at once.
    ///
    /// [`Status::Wait`] says that another operator has to act, so that a flow in which all wait so has stalled, or is at its
    /// end; [`Status::WaitEvent`] and [`Status::WaitTime`] that it comes by itself.
    ///
    /// [`Status::WaitTime`] needs no waker: the flow sets a timer for that moment of [`tokio::time`]'s clock, and the operator
    /// may run once it has passed, whether or not this is called again before [`claim`](Self::claim). It is asked again when
    /// something else changes, and may then answer an earlier or a later moment. The runtime needs its timers (`enable_time`).
    ///
    /// ```
    /// use std::{task::Context, time::Duration};
    /// use tokio::time::Instant;
    /// use wakeline::condition::{Condition, Status};
    ///
    /// /// Twice the time before each run.
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

    /// A run begins, for which this and all other conditions were ready: takes what the run needs. False if that is not to
    /// be had any more: then the condition is asked again. An operator whose condition is ready and refuses each claim fails.
    fn claim(&mut self) -> bool {
        true
    }

    /// The run that was claimed does not take place.
    fn give_back(&mut self) {}

    /// The run has ended: `compute` has returned, with an error or without. The next question comes after it.
    fn ended(&mut self) {}

    /// Nobody waits for it, until it is asked again: what it keeps for that may go.
    fn rest(&mut self) {}

    /// True for a plain question without a waker: it is asked when all others are ready, and after [`Status::Wait`] again
    /// when a message or room comes to one of the operator's ports, or all of the flow has come to rest. Called once, when the
    /// condition is given to its operator.
    fn asked_last(&self) -> bool {
        false
    }

    /// What is wrong with it, told before the flow runs, as the rest of a sentence that begins with the operator:
    /// "runs every 0 seconds".
    fn problem(&self) -> Option<String> {
        None
    }

    /// What the operator waits for, as the rest of a sentence that begins with "waits for": "its gate to be resumed".
    fn describe(&self) -> Cow<'static, str> {
        std::any::type_name::<Self>().into()
    }

    /// It sets tokio's timers.
    #[doc(hidden)]
    fn needs_timers(&self) -> bool {
        false
    }

    /// Memory that it sets apart for the operator's runs.
    #[doc(hidden)]
    fn reservation(&self) -> Option<&std::sync::Arc<crate::memory::Reservation>> {
        None
    }
}
