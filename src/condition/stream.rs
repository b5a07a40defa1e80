//! The stream condition, `#[input(done)]`: a message counts once the work that wrote it is done.
//!
//! By default an operator runs as soon as a message arrives, while the device might still be working on it: work that
//! the operator enqueues is ordered after it automatically. An operator that must not wait when it accesses the data,
//! since it reads the data on the host or has a deadline, requires messages that are done.
//!
//! Readiness is per message, not per stream: each envelope knows the ticket of its last write, and the message counts
//! when all of these tickets have passed, whatever other work their streams have. For an envelope that was copied to
//! the reader's location, the last write is the copy, which is ordered after its source. An envelope that no stream has
//! written is done. A message without envelopes is done when its sender's stream has finished the work enqueued before
//! the message was sent. If it came without a stream, for example from an operator on the host, it is done at once.
//!
//! It also covers Holoscan's `CudaBufferAvailableCondition`, which checks a buffer's state for "data available": here
//! the state follows from the tracked uses, and is never set by hand. A buffer that no message carries has a condition
//! of its own, in [`buffer`](super::buffer).

use crate::{hub::Message, stream::Ticket};

/// Visits the last write of every envelope; without envelopes, the message's ticket.
pub(super) fn visit_writes<M: Message>(message: &mut M, ticket: Option<&Ticket>, visit: &mut dyn FnMut(&Ticket)) {
    let mut any = false;
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |envelope| {
            any = true;
            if let Some(write) = envelope.memory().last_write() {
                visit(&write);
            }
        });
    }
    if let (false, Some(ticket)) = (any, ticket) {
        visit(ticket);
    }
}
