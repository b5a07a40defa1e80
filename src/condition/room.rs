//! Downstream affordable: an output's default condition.
//!
//! Ready while there is room for a message, and a blank envelope where the hub has such. When the reader is gone it is
//! `Never`.

use std::task::Context;

use super::Readiness;
use crate::hub::{Message, link::Sender};

pub(crate) fn room<M: Message>(output: &Sender<M>, cx: &mut Context<'_>) -> Readiness {
    output.poll_room(cx.waker()).into()
}
