//! [`Asynchronous`], `.when(event.clone())`: for an operator whose work continues elsewhere, in a thread or a service.
//!
//! ```text
//!            the operator, in its run                  the thread that does the work
//!   Ready ──────────────────────────> EventWaiting ──────────────────────────> EventDone ──> the next run
//!     │                                                                            │
//!     └──> Wait (nothing requested yet)       Never (nothing more will come)    <──┘
//! ```
//!
//! The states are Holoscan's. A state changes only when it is set, and no state is polled. The first run begins at
//! once.

use std::{borrow::Cow, task::Context};

use super::{
    Condition, IntoCondition, Status, When,
    watch::{WatchReader, WatchValue, WatchWriter},
};

/// The state of the work elsewhere. See [`Asynchronous`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AsyncState {
    /// The operator may run: its first run is still to come.
    #[default]
    Ready,
    /// No work was requested yet; the operator waits for another state.
    Wait,
    /// Work was requested, and is not done.
    EventWaiting,
    /// The work is done: the operator may run.
    EventDone,
    /// The operator never runs again.
    Never,
}

/// A state that an operator waits for, and that any thread or task can set. It begins as [`AsyncState::Ready`].
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
///         done.set(AsyncState::EventWaiting);               // no run before the answer
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
/// While the operator waits, the flow does not end as long as a clone exists that can change the state, including one
/// that the operator keeps, as here. The thread that does the work must set the state even if the work has failed;
/// otherwise the flow waits until it is stopped.
#[derive(Clone, Debug)]
pub struct Asynchronous(WatchWriter<AsyncState>);

impl WatchValue for AsyncState {
    fn is_awaited(self) -> bool {
        matches!(self, Self::Wait | Self::EventWaiting)
    }
}

#[derive(Debug)]
struct Waits(WatchReader<AsyncState>);

impl Asynchronous {
    /// Creates an `Asynchronous` in the state [`AsyncState::Ready`].
    pub fn new() -> Self {
        Self(WatchWriter::new(AsyncState::Ready))
    }

    /// Sets the state, and wakes the operators that wait for it.
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

/// The condition holds a reader, which does not count as a clone that can change the state.
impl IntoCondition for Asynchronous {
    fn into_condition(self) -> When {
        When::boxed(Waits(self.0.reader()))
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
