//! [`Status`]: what an operator waits for, as published to users; and [`Readiness`], its internal form.

use std::{fmt, ops::BitOr};

use tokio::time::Instant;

use crate::hub::end_waker::Interest;

/// The answer of a condition, and the combined status that an operator publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// The operator may run.
    Ready,
    /// The operator may run from this moment on, by `tokio::time`'s clock, which tests can pause
    /// ([`Instant::from_std`] converts from the standard library's). If a condition answers this, the flow sets the
    /// timer, and once the moment has passed the answer counts as [`Ready`](Self::Ready).
    WaitTime(Instant),
    /// The operator may run once another operator of the flow has acted: sent or taken a message, or set a value.
    Wait,
    /// The operator may run after an event that needs no operator: a device is done, or code outside of the flow acts.
    WaitEvent,
    /// The operator never runs again.
    Never,
}

impl Status {
    /// Combines two conditions with "and": the first of `Never`, `WaitEvent`, `Wait`, `WaitTime` and `Ready` that is
    /// one of the two answers. Of two times the later one counts.
    ///
    /// ```
    /// use wakeline::condition::Status;
    ///
    /// assert_eq!(Status::Ready.and(Status::Wait), Status::Wait);
    /// assert_eq!(Status::WaitEvent.and(Status::Wait), Status::WaitEvent);
    /// assert_eq!(Status::Never.and(Status::Ready), Status::Never);
    /// ```
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::WaitTime(one), Self::WaitTime(other)) => Self::WaitTime(one.max(other)),
            _ if self.rank() >= other.rank() => self,
            _ => other,
        }
    }

    /// Combines two conditions with "or": ready when either is, `Never` only if both are. Of two times the earlier one
    /// counts, of two waits the one that needs no operator.
    ///
    /// ```
    /// use wakeline::condition::Status;
    ///
    /// assert_eq!(Status::Ready.or(Status::Never), Status::Ready);
    /// assert_eq!(Status::WaitEvent.or(Status::Wait), Status::WaitEvent);
    /// ```
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let by_itself = |status: Self| match status {
            Self::Ready => 0,
            Self::WaitTime(_) => 1,
            Self::WaitEvent => 2,
            Self::Wait => 3,
            Self::Never => 4,
        };
        match (self, other) {
            (Self::WaitTime(one), Self::WaitTime(other)) => Self::WaitTime(one.min(other)),
            _ if by_itself(self) <= by_itself(other) => self,
            _ => other,
        }
    }

    /// A wait for a value that is set from outside. If no handle is left that can set the value, the wait counts as one
    /// for other operators.
    pub(super) fn wait_for_event(may_change: bool) -> Self {
        if may_change { Self::WaitEvent } else { Self::Wait }
    }

    fn rank(self) -> u8 {
        match self {
            Self::Ready => 0,
            Self::WaitTime(_) => 1,
            Self::Wait => 2,
            Self::WaitEvent => 3,
            Self::Never => 4,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::WaitTime(_) => f.write_str("waits for a time"),
            Self::Wait => f.write_str("waits"),
            Self::WaitEvent => f.write_str("waits for an event"),
            Self::Never => f.write_str("never runs again"),
        }
    }
}

/// The combined answers of any number of conditions: the set of answers other than `Ready`. All of them are kept, since
/// an operator that waits for another operator and for an event has the status `WaitEvent`, but cannot run unless the
/// other operator acts.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Readiness(u8);

#[allow(missing_docs)]
impl Readiness {
    pub const READY: Self = Self(0);
    pub const WAIT_TIME: Self = Self(1);
    pub const WAIT: Self = Self(2);
    pub const WAIT_EVENT: Self = Self(4);
    pub const NEVER: Self = Self(8);

    #[inline]
    pub fn is_ready(self) -> bool {
        self == Self::READY
    }

    #[inline]
    pub(crate) fn is_never(self) -> bool {
        self.0 & Self::NEVER.0 != 0
    }

    /// True if another operator has to act.
    #[inline]
    pub(crate) fn needs_others(self) -> bool {
        self.0 & Self::WAIT.0 != 0
    }

    /// What an operator registers for at its next port, given the combined result of the ports before it.
    #[inline]
    pub(crate) fn interest(self) -> Interest {
        if self.needs_others() { Interest::Close } else { Interest::Change }
    }

    /// The status to publish. `due`: the latest moment that a condition waits for.
    pub(crate) fn status(self, due: Option<Instant>) -> Status {
        match (self, due) {
            _ if self.is_never() => Status::Never,
            _ if self.0 & Self::WAIT_EVENT.0 != 0 => Status::WaitEvent,
            _ if self.needs_others() => Status::Wait,
            (Self::WAIT_TIME, Some(due)) => Status::WaitTime(due),
            _ => Status::Ready,
        }
    }
}

/// Combines two results with "and".
impl BitOr for Readiness {
    type Output = Self;

    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl From<Status> for Readiness {
    fn from(status: Status) -> Self {
        match status {
            Status::Ready => Self::READY,
            Status::WaitTime(_) => Self::WAIT_TIME,
            Status::Wait => Self::WAIT,
            Status::WaitEvent => Self::WAIT_EVENT,
            Status::Never => Self::NEVER,
        }
    }
}

impl From<crate::hub::queue::Answer> for Readiness {
    #[inline]
    fn from(answer: crate::hub::queue::Answer) -> Self {
        match answer {
            crate::hub::queue::Answer::Yes => Self::READY,
            crate::hub::queue::Answer::Wait => Self::WAIT,
            crate::hub::queue::Answer::Never => Self::NEVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Status::*, *};

    #[test]
    fn and_is_the_first_of_never_wait_event_wait_wait_time_ready() {
        let now = Instant::now();
        let order = [Never, WaitEvent, Wait, WaitTime(now), Ready];
        for (at, first) in order.into_iter().enumerate() {
            for later in &order[at..] {
                assert_eq!(first.and(*later), first, "{first:?} and {later:?}");
                assert_eq!(later.and(first), first, "{later:?} and {first:?}");
                let both = Readiness::from(first) | Readiness::from(*later);
                assert_eq!(both.status(Some(now)), first);
            }
        }
        let later = now + Duration::from_secs(1);
        assert_eq!(WaitTime(now).and(WaitTime(later)), WaitTime(later));
    }

    #[test]
    fn or_is_the_first_that_needs_no_operator() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        assert_eq!(WaitTime(now).or(WaitTime(later)), WaitTime(now));
        let order = [Ready, WaitTime(now), WaitEvent, Wait, Never];
        for (at, first) in order.into_iter().enumerate() {
            for later in &order[at..] {
                assert_eq!(first.or(*later), first);
                assert_eq!(later.or(first), first);
            }
        }
    }

    #[test]
    fn one_that_waits_for_an_operator_and_an_event_needs_the_operator() {
        let both = Readiness::WAIT | Readiness::WAIT_EVENT;
        assert_eq!(both.status(None), WaitEvent);
        assert!(both.needs_others());
        assert!(!(Readiness::WAIT_EVENT | Readiness::WAIT_TIME).needs_others());
    }
}
