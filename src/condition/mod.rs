//! Conditions: when may an operator run?
//!
//! A condition is level-triggered and asking it changes nothing: the same question gets the same answer until somebody
//! acts. All conditions of an operator are and-ed. When one pass finds all of them ready, what the run needs is claimed
//! at once, without an await; a claim that fails gives all of it back and waits on.
//!
//! By default every input waits for a message and every output for room (and, where its hub has blank envelopes, for
//! one of those). An input can wait for more than a message: for the work that wrote it (`#[input(done)]`, [`stream`]),
//! or for an event that it carries (`#[input(event = "name")]`, [`event`]). An operator can wait for a buffer of its own
//! ([`buffer`]).

mod buffer;
mod event;
mod front;
mod message;
mod room;
mod stream;

pub(crate) use buffer::{Awaited, buffers};
pub use event::{EventField, knows_event};
pub(crate) use front::{Front, Wanted};
pub(crate) use message::message;
pub(crate) use room::{Room, look_for_room, room};

/// The answer of a condition, or of all of them together.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[must_use]
pub enum Readiness {
    /// The operator may run.
    Ready,
    /// Not until another operator acts. A waker has been kept.
    Wait,
    /// Not until something happens that needs no other operator: the device does what it was told to. A waker has been
    /// kept. It will happen, so a flow that waits for it is not at rest.
    WaitEvent,
    /// Never again: the operator ends.
    Never,
}

impl Readiness {
    /// Both: `Never` before `WaitEvent` before `Wait` before `Ready`.
    pub fn and(self, other: Self) -> Self {
        self.max(other)
    }
}

impl From<crate::hub::queue::Answer> for Readiness {
    fn from(answer: crate::hub::queue::Answer) -> Self {
        match answer {
            crate::hub::queue::Answer::Yes => Self::Ready,
            crate::hub::queue::Answer::Wait => Self::Wait,
            crate::hub::queue::Answer::Never => Self::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Readiness::{Never, Ready, Wait, WaitEvent};

    #[test]
    fn the_first_of_never_wait_event_wait_ready_wins() {
        let order = [Never, WaitEvent, Wait, Ready];
        for (at, first) in order.into_iter().enumerate() {
            for later in &order[at..] {
                assert_eq!(first.and(*later), first, "{first:?} and {later:?}");
                assert_eq!(later.and(first), first, "{later:?} and {first:?}");
            }
        }
    }
}
