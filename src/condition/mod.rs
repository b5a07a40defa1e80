//! Conditions: when may an operator run?
//!
//! A condition is level-triggered and asking it changes nothing: the same question gets the same answer until somebody
//! acts. All conditions of an operator are and-ed. When one pass finds all of them ready, what the run needs is claimed
//! at once, without an await; a claim that fails gives all of it back and waits on.
//!
//! By default every input waits for a message and every output for room (and, where its hub has blank envelopes, for
//! one of those).

mod message;
mod room;

pub(crate) use message::message;
pub(crate) use room::room;

/// The answer of a condition, or of all of them together.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Readiness {
    /// The operator may run.
    Ready,
    /// Not yet. A waker has been kept.
    Wait,
    /// Never again: the operator ends.
    Never,
}

impl Readiness {
    /// Both: `Never` before `Wait` before `Ready`.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Never, _) | (_, Self::Never) => Self::Never,
            (Self::Wait, _) | (_, Self::Wait) => Self::Wait,
            (Self::Ready, Self::Ready) => Self::Ready,
        }
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
    use super::Readiness::{Never, Ready, Wait};

    #[test]
    fn the_first_of_never_wait_ready_wins() {
        for (left, right, both) in [
            (Ready, Ready, Ready),
            (Ready, Wait, Wait),
            (Wait, Ready, Wait),
            (Wait, Never, Never),
            (Never, Wait, Never),
            (Never, Ready, Never),
        ] {
            assert_eq!(left.and(right), both, "{left:?} and {right:?}");
        }
    }
}
