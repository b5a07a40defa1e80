//! The stream condition, `#[input(done)]`: a message counts once the work that wrote it is done.
//!
//! By default an operator runs as soon as a message is there, while the device may still be at work on it: what the
//! operator enqueues comes after that by itself, and nobody waits. An operator that must not wait even when it looks at
//! the data, one that reads it on the host, or has a time limit of its own, asks for the message when it is done.
//!
//! Readiness is per message, never per stream: each envelope knows the ticket of its last write, and the message counts
//! when all of those have passed, whatever else their streams have to do. An envelope that was copied to where the
//! reader is has the copy as its last write, and that came after what it copied. An envelope that no stream has written is
//! done. A message without envelopes is done when the stream that it came with has done what it was given before the
//! message was sent, and at once if it came with none, as from an operator on the host.
//!
//! Where others look at the state of a message's buffer (Holoscan's `CudaBufferAvailableCondition`) and wait for "data
//! available", that is this same condition here: the state follows from the tracked uses, and nobody sets it. What is
//! left of it, a buffer that no message carries, is in [`buffer`](super::buffer).

use crate::{hub::Message, stream::Ticket};

/// The last write of every envelope; where it has none, the message's stamp.
pub(super) fn written<M: Message>(message: &mut M, stamp: Option<&Ticket>, visit: &mut dyn FnMut(&Ticket)) {
    let mut any = false;
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |envelope| {
            any = true;
            if let Some(write) = envelope.memory().last_write() {
                visit(&write);
            }
        });
    }
    if let (false, Some(stamp)) = (any, stamp) {
        visit(stamp);
    }
}
