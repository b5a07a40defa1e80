//! Room downstream: an output's condition.
//!
//! Ready while every connected hub has room for a message, and a blank envelope if it has such. `#[output(room = 3)]`
//! asks for more of both, for an operator that sends several messages a run; `#[output(optional)]` disables it, for one
//! that [offers](crate::Output::offer) messages. Hubs whose readers have ended are ignored; when all readers have, it
//! is `Never`.

use crate::hub::ends::Demand;

/// What an output waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Room for this many messages.
    For(usize),
    /// Nothing, but the end of its readers.
    Unconditional,
}

impl Default for Room {
    fn default() -> Self {
        Self::For(1)
    }
}

impl Room {
    /// What the output's hubs are asked for.
    #[inline]
    pub(crate) fn demand(self) -> Demand {
        match self {
            Self::For(messages) => Demand::Room(messages),
            Self::Unconditional => Demand::Reader,
        }
    }
}

/// A configuration error, if it waits for `count` messages' room in a queue that holds `capacity`.
pub(crate) fn room_problem(count: usize, capacity: usize) -> Option<String> {
    match count {
        0 => Some("waits for room for 0 messages: ask for at least 1".into()),
        _ if count > capacity => Some(format!(
            "waits for room for {count} messages, and its queue holds {capacity}: give the hub a capacity of {count} or \
             more"
        )),
        _ => None,
    }
}
