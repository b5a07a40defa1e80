//! Downstream affordable: an output's condition.
//!
//! Ready while every hub that it is connected to has room for a message, and a blank envelope where there are such.
//! `#[output(room = 3)]` asks for more of both, for an operator that sends several messages a run;
//! `#[output(optional)]` switches it off, for one that [offers](crate::Output::offer) them. Hubs whose readers have
//! ended are passed over; when all have, it is `Never`.

use std::task::Context;

use super::Readiness;
use crate::hub::{Message, outlet::Outlet};

/// What an output waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Room for so many messages.
    For(usize),
    /// Nothing but its readers' end.
    Unconditional,
}

impl Default for Room {
    fn default() -> Self {
        Self::For(1)
    }
}

/// What is wrong with a wait for so much room in a queue that holds `capacity` messages.
pub(crate) fn room_problem(count: usize, capacity: usize) -> Option<String> {
    match count {
        0 => Some("waits for room for 0 messages: at least 1".into()),
        _ if count > capacity => Some(format!(
            "waits for room for {count} messages, and its queue holds {capacity}: give the hub a capacity of {count} or \
             more"
        )),
        _ => None,
    }
}

#[inline]
pub(crate) fn room_for<M: Message>(output: &Outlet<M>, room: Room, cx: &mut Context<'_>) -> Readiness {
    let answer = match room {
        Room::For(messages) => output.poll_room(messages, cx.waker()),
        Room::Unconditional => output.poll_open(cx.waker()),
    };
    answer.into()
}

/// As [`room_for`], of an operator that waits for something else and asks again after that.
#[inline]
pub(crate) fn look_for_room<M: Message>(output: &Outlet<M>, room: Room, cx: &mut Context<'_>) -> Readiness {
    let answer = match room {
        Room::For(messages) => output.look_for_room(messages, cx.waker()),
        Room::Unconditional => output.poll_open(cx.waker()),
    };
    answer.into()
}
