//! [`RawEnvelope`]: an envelope of any element type, as hubs move it.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use smallvec::SmallVec;

use super::{
    external_guard::{ExternalGuard, Marks},
    pool::Pool,
};
use crate::{
    error::Result,
    memory::{HostAccess, Memory, Owned},
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
};

/// An envelope of any element type, as hubs move it: a few words, with the rest behind a pointer.
#[doc(hidden)]
pub struct RawEnvelope {
    /// `None` only while it is dropped.
    pub(super) memory: Option<Owned>,
    /// The size of the valid part.
    pub(super) bytes: usize,
    /// The point in its sender's stream at which it was last written, while it is in transit.
    pub(super) ticket: Option<Ticket>,
    pub(super) home: Weak<Pool>,
    /// The flows that it is outside of. Dropped after its memory was returned.
    pub(super) marks: Marks,
}

/// What remains to be done for a hub after an envelope has left it for good.
#[must_use = "the pool waits for its memory"]
pub(super) struct PoolReplacement {
    replaced: Option<(Arc<Pool>, Owned)>,
    /// The flows that waited for the envelope.
    marks: SmallVec<[ExternalGuard; 1]>,
}

impl PoolReplacement {
    /// Gives the pool its replacement, which wakes the tasks that wait for one. Call it with no lock held.
    pub(super) fn settle(self) {
        let Self { replaced, marks } = self;
        if let Some((pool, memory)) = replaced {
            pool.put(memory);
        }
        // Last: a moment of rest in between would be taken for a stall.
        drop(marks);
    }
}

impl RawEnvelope {
    pub(crate) fn new(memory: Owned, home: Weak<Pool>) -> Self {
        Self { memory: Some(memory), bytes: 0, ticket: None, home, marks: Marks::default() }
    }

    /// An envelope without a pool, for work on this stream.
    pub(crate) fn on(stream: &Stream, bytes: usize) -> Result<Self> {
        Ok(Self::new(stream.alloc::<u8>(bytes)?.into_memory(), Weak::new()))
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        match &self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope owns its memory until it is dropped"),
        }
    }

    #[inline]
    pub(crate) fn memory_mut(&mut self) -> &mut Memory {
        match &mut self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope owns its memory until it is dropped"),
        }
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn set_bytes(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    pub(crate) fn home(&self) -> &Weak<Pool> {
        &self.home
    }

    /// Makes the memory the holder's own, so that no flow waits for it. Its pool, if there is one, needs replacement
    /// memory.
    ///
    /// # Errors
    /// Those of the allocation; then nothing has changed.
    pub(super) fn leave_pool(&mut self, no_pool: &Weak<Pool>) -> Result<PoolReplacement> {
        let mut replaced = None;
        if let Some(pool) = self.home.upgrade() {
            replaced = pool.replacement(self.memory())?.map(|memory| (pool, memory));
            self.home = no_pool.clone();
        }
        Ok(PoolReplacement { replaced, marks: self.marks.take_lending() })
    }

    pub(super) fn marks_mut(&mut self) -> &mut Marks {
        &mut self.marks
    }

    /// Converts an error of its memory for its holder: if that is a caller of a flow, only the error's kind is kept.
    pub(super) fn given<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| match self.marks.errors() {
            Some(errors) => errors.of_memory(error, self.memory().is_host()),
            None => error,
        })
    }

    pub(super) fn host_access(&self, write: bool) -> HostAccess {
        let access = self.memory().host_access(write);
        match self.marks.errors() {
            Some(errors) => access.for_caller(errors),
            None => access,
        }
    }

    /// Returns true if all work that was enqueued on it is complete; its record of uses is then cleared.
    ///
    /// # Errors
    /// The failure of that work.
    pub(super) fn forget_work(&mut self) -> Result<bool> {
        let done = self.memory_mut().forget_work();
        self.given(done)
    }

    /// Commits its uses, so that users elsewhere can be ordered after them.
    pub(super) fn mark(&self) -> Result<()> {
        self.memory().commit_shared()
    }

    /// Called when it is sent by an operator with this stream. Commits its uses, so that users elsewhere can be
    /// ordered after them.
    #[inline]
    pub(super) fn depart(&mut self, stream: Option<&Stream>) -> Result<()> {
        let write = self.memory_mut().commit_by(stream)?;
        self.ticket = stream.map(|stream| write.unwrap_or_else(|| stream.beginning()));
        Ok(())
    }

    #[inline]
    pub(super) fn take_ticket(&mut self) -> Option<Ticket> {
        self.ticket.take()
    }
}

impl Drop for RawEnvelope {
    fn drop(&mut self) {
        let Some(mut memory) = self.memory.take() else { return };
        // If the hub no longer exists, the memory is freed once nothing uses it.
        if let Some(home) = self.home.upgrade().filter(|_| !mutants::is(Mutant::EnvelopeLost)) {
            // Committed by the last user, for the next. A failure of the device is reported to the next user.
            let _ = memory.commit();
            home.put(memory);
        }
    }
}

impl fmt::Debug for RawEnvelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawEnvelope").field("memory", &self.memory).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
