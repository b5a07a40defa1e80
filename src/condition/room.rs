//! [`Room`]: what an output waits for.
//!
//! An output is ready while every connected hub has room for a message and, if the hub has blank envelopes, as many free
//! ones as each message certainly holds, or one.
//! `#[output(room = 3)]` waits for three of both, for an operator that sends several messages in a run;
//! `#[output(optional)]` waits for neither, for an operator that [offers](crate::Output::offer) messages. Hubs whose
//! readers have ended are ignored; when all readers have ended, the output is `Never`.

use crate::hub::ends::Demand;

/// What an output waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Room for this many messages.
    For(usize),
    /// Nothing, except that a reader exists.
    Unconditional,
}

impl Default for Room {
    fn default() -> Self {
        Self::For(1)
    }
}

impl Room {
    /// The demand on the output's hubs.
    #[inline]
    pub(crate) fn demand(self) -> Demand {
        match self {
            Self::For(messages) => Demand::Room(messages),
            Self::Unconditional => Demand::Reader,
        }
    }
}

/// The configuration error, if any, of waiting for room for `count` messages in a queue that holds `capacity`.
pub(crate) fn room_problem(count: usize, capacity: usize) -> Option<String> {
    match count {
        0 => Some("waits for room for 0 messages: wait for room for at least 1".into()),
        _ if count > capacity => Some(format!(
            "waits for room for {count} messages, but its queue holds at most {capacity}: give the hub a capacity of \
             {count} or more"
        )),
        _ => None,
    }
}
