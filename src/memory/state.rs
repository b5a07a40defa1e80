//! [`BufferState`]: what the device is doing with a piece of memory.
//!
//! Nobody sets it: it follows from the uses that are tracked anyway, the last write and the reads since.

use super::Memory;
use crate::{error::Result, stream::Ticket};

/// What a device is doing with a [`Buffer`](crate::Buffer) or an [`Envelope`](crate::Envelope) at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferState {
    /// Nothing: all that was enqueued on it is done.
    Idle,
    /// It is written: the data is not available yet. The write has been enqueued and may not have begun.
    Writing,
    /// It is read. The data is available, and must not be written yet.
    Reading,
}

impl BufferState {
    /// Whether the data is available: nothing writes it. A buffer that was never written is available too, with unknown
    /// contents.
    pub fn is_available(self) -> bool {
        self != Self::Writing
    }
}

impl Memory {
    /// Asks the device, and does not wait for it.
    pub(crate) fn state(&self) -> Result<BufferState> {
        let (writes, all) = {
            let uses = self.uses();
            (uses.open(false), uses.open(true))
        };
        for (write, counts) in writes {
            if is_open(write, counts)? {
                return Ok(BufferState::Writing);
            }
        }
        // A write among them has just been found to be over.
        for (read, counts) in all {
            if is_open(read, counts)? {
                return Ok(BufferState::Reading);
            }
        }
        Ok(BufferState::Idle)
    }

    /// The last write, unless it is over.
    pub(crate) fn last_write(&self) -> Option<Ticket> {
        self.uses().write.as_ref().filter(|write| !write.is_settled()).cloned()
    }
}

/// `counts`: what it wrote is looked at.
fn is_open(mut ticket: Ticket, counts: bool) -> Result<bool> {
    let passed = ticket.look()?;
    if passed && counts {
        ticket.sound()?;
    }
    Ok(!passed)
}
