//! Downstream affordable: an output's condition.
//!
//! Ready while there is room for a message, and a blank envelope where the hub has such; `#[output(room = 3)]` asks for
//! more room. When the reader is gone it is `Never`.

use std::task::Context;

use super::Readiness;
use crate::hub::{Message, link::Sender};

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
pub(crate) fn room_for<M: Message>(output: &Sender<M>, count: usize, cx: &mut Context<'_>) -> Readiness {
    if count > 1 {
        let room = Readiness::from(output.poll_room_for(count, cx.waker()));
        if !room.is_ready() {
            return room;
        }
    }
    output.poll_room(cx.waker()).into()
}
