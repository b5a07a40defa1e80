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
        let (write, all) = {
            let uses = self.uses();
            (uses.write.clone(), uses.all())
        };
        let reads = all.into_iter().skip(usize::from(write.is_some()));
        if let Some(write) = write
            && is_open(write)?
        {
            return Ok(BufferState::Writing);
        }
        for read in reads {
            if is_open(read)? {
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

fn is_open(mut ticket: Ticket) -> Result<bool> {
    let passed = ticket.look()?;
    if passed {
        ticket.sound()?;
    }
    Ok(!passed)
}
