//! Message available: an input's default condition.
//!
//! Ready while there is a message to take. When the last sender is gone, what is left is handed out, and then it is
//! `Never`.

use std::task::Context;

use super::Readiness;
use crate::hub::{Message, receiver::Receiver};

pub(crate) fn message<M: Message>(input: &Receiver<M>, cx: &mut Context<'_>) -> Readiness {
    input.poll_message(cx.waker()).into()
}
