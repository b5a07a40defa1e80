//! The stream condition, `#[input(done)]`: a message counts once the work that wrote it is done.
//!
//! By default an operator runs as soon as a message arrives, while the device may still be working on it: what the
//! operator enqueues is ordered after that automatically, without a wait. An operator that must not wait when it
//! accesses the data, because it reads it on the host or has a deadline, asks for messages that are done.
//!
//! Readiness is per message, not per stream: each envelope knows the ticket of its last write, and the message counts
//! when all of these have passed, whatever other work their streams have. For an envelope that was copied to the
//! reader's location the last write is the copy, which is ordered after its source. An envelope that no stream has
//! written is done. A message without envelopes is done when the stream that it came with has finished the work
//! enqueued before the message was sent; if it came with none, as from an operator on the host, at once.
//!
//! Holoscan's `CudaBufferAvailableCondition` checks the state of a message's buffer for "data available". Here that is
//! this same condition: the state follows from the tracked uses, and is never set by hand. The remaining case, a buffer
//! that no message carries, is in [`buffer`](super::buffer).

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
