//! [`BufferState`]: whether a device is reading or writing a piece of memory.
//!
//! It is derived from the recorded uses: the last write and the reads since.

use super::Memory;
use crate::{error::Result, stream::Ticket};

/// What a device is doing with a [`Buffer`](crate::Buffer) or an [`Envelope`](crate::Envelope) now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferState {
    /// No enqueued work uses it.
    Idle,
    /// It is being written: the data is not available yet. The write is enqueued and might not have started.
    Writing,
    /// It is being read: the data is available, and must not be written yet.
    Reading,
}

impl BufferState {
    /// True unless the data is being written. A buffer that was never written is available too, with unknown contents.
    pub fn is_available(self) -> bool {
        self != Self::Writing
    }
}

impl Memory {
    /// Queries the device without waiting for it.
    pub(crate) fn state(&self) -> Result<BufferState> {
        let (writes, all) = {
            let uses = self.uses();
            (uses.open(false), uses.open(true))
        };
        for (write, taint_matters) in writes {
            if is_open(write, taint_matters)? {
                return Ok(BufferState::Writing);
            }
        }
        // A write among these was just found to be over.
        for (read, taint_matters) in all {
            if is_open(read, taint_matters)? {
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

/// With `taint_matters`, a tainted ticket is an error.
fn is_open(mut ticket: Ticket, taint_matters: bool) -> Result<bool> {
    let passed = ticket.query()?;
    if passed && taint_matters {
        ticket.check_taint()?;
    }
    Ok(!passed)
}
