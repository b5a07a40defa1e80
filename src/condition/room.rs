//! Downstream affordable: an output's condition.
//!
//! Ready while there is room for a message, and a blank envelope where the hub has such; `#[output(room = 3)]` asks for
//! more room. When the reader is gone it is `Never`.

use std::task::Context;

use super::Readiness;
use crate::hub::{Message, link::Sender};

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
