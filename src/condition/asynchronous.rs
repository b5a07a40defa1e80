//! Asynchronous, `.when(event.clone())`: an operator whose work goes on elsewhere, in a thread or a service of its own.
//!
//! ```text
//!            the operator, in its run                  whoever does the work
//!   Ready ──────────────────────────> EventWaiting ──────────────────────────> EventDone ──> the next run
//!     │                                                                            │
//!     └──> Wait (nothing asked for yet)        Never (nothing will be any more) <──┘
//! ```
//!
//! The states are Holoscan's, and whoever sets one is who knows: nothing changes it by itself. Nothing polls in any of
//! them. The first run is at once.

use std::{borrow::Cow, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    told::{Heard, Told, Value},
};

/// How the work elsewhere stands. See [`Asynchronous`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AsyncState {
    /// The operator may run: its first run is still to come.
    #[default]
    Ready,
    /// Nothing was asked for yet; it waits for somebody to change this.
    Wait,
    /// Something was asked for, and is not done.
    EventWaiting,
    /// It is done: the operator may run.
    EventDone,
    /// The operator never runs again.
    Never,
}

/// A state that anybody may set, from any thread or task, and that an operator waits for. It begins as
/// [`AsyncState::Ready`].
///
/// ```
/// use wakeline::{condition::{AsyncState, Asynchronous}, prelude::*};
///
/// struct Ask(Asynchronous);
///
/// impl Operator for Ask {
///     type Ports = ();
///
///     async fn compute(&mut self, _ports: &mut (), _cx: &mut Cx) -> Result<()> {
///         let done = self.0.clone();
///         done.set(AsyncState::EventWaiting);               // no run before the answer is there
///         std::thread::spawn(move || done.set(AsyncState::EventDone));
///         Ok(())
///     }
/// }
///
/// let event = Asynchronous::new();
/// let mut flow = Flow::new("ask");
/// flow.add("ask", Ask(event.clone())).when(event);
/// ```
///
/// While it waits, the flow does not end as long as somebody has a clone and may change that: the operator itself, too, if it
/// keeps one as this does. Whoever does the work sets it in any case, also where the work has failed; otherwise the flow
/// waits on until it is stopped.
#[derive(Clone, Debug)]
pub struct Asynchronous(Told<AsyncState>);

impl Value for AsyncState {
    fn is_awaited(self) -> bool {
        matches!(self, Self::Wait | Self::EventWaiting)
    }
}

/// The condition.
#[derive(Debug)]
struct Waits(Heard<AsyncState>);

impl Asynchronous {
    /// In the state [`AsyncState::Ready`].
    pub fn new() -> Self {
        Self(Told::new(AsyncState::Ready))
    }

    /// Sets the state, and wakes who waits for it.
    pub fn set(&self, now: AsyncState) {
        self.0.set(|_| now);
    }

    /// The state.
    pub fn state(&self) -> AsyncState {
        self.0.get()
    }
}

impl Default for Asynchronous {
    fn default() -> Self {
        Self::new()
    }
}

/// The condition itself is no clone that may change the state.
impl IntoCondition for Asynchronous {
    fn into_condition(self) -> When {
        When::own(Waits(self.0.heard()))
    }
}

impl Condition for Waits {
    fn poll_status(&mut self, cx: &mut Context<'_>) -> Status {
        let seen = self.0.poll(cx.waker());
        match seen.value {
            AsyncState::Ready | AsyncState::EventDone => Status::Ready,
            AsyncState::Wait | AsyncState::EventWaiting => Status::wait_for_event(seen.may_change),
            AsyncState::Never => Status::Never,
        }
    }

    fn describe(&self) -> Cow<'static, str> {
        "its event to be done".into()
    }
}
