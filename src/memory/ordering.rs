//! The order of the uses of a piece of memory: each use makes its stream wait for the uses that it must come after, and is
//! then noted.

use std::ops::Deref;

use smallvec::SmallVec;

use super::{HostAccess, Memory, uses::query_readers};
use crate::{
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::Deferred,
};

impl Memory {
    pub(crate) fn before_read(&self, stream: &Stream) -> Result<()> {
        self.check_copy_path(stream)?;
        if let Some(capture) = stream.capture() {
            return self.before_captured(stream, capture, false);
        }
        self.check_not_captured(stream, false)?;
        if !self.device.tracked() {
            return self.before_untracked(stream, false);
        }
        if mutants::is(Mutant::MissingWait) {
            return Ok(());
        }
        // Not under the lock: a wait may wake tasks.
        let uses = self.uses().before_reads();
        uses.before_read(stream, self.survives_other_devices())
    }

    /// Makes `stream` wait for the uses that a write must come after. The write may read the contents, or leave a part
    /// of them unchanged.
    #[inline]
    pub(crate) fn before_write(&mut self, stream: &Stream) -> Result<()> {
        self.before_write_of(stream, false)
    }

    /// Like [`before_write`](Self::before_write), for a write that overwrites the first `bytes` bytes without reading
    /// them.
    #[inline]
    pub(crate) fn before_overwrite(&mut self, stream: &Stream, bytes: usize) -> Result<()> {
        self.before_write_of(stream, bytes >= self.bytes)
    }

    #[inline]
    fn before_write_of(&mut self, stream: &Stream, whole: bool) -> Result<()> {
        if self.shared.get().is_some() {
            return self.before_shared_write_of(stream, whole);
        }
        if self.is_ordered_elsewhere(stream)? {
            return Ok(());
        }
        let outlives = self.survives_other_devices();
        self.uses_mut().before_write(stream, whole, outlives)
    }

    /// Like [`before_write_of`](Self::before_write_of), for memory with [shared uses](Self::shared_uses), whose users
    /// hold the use lock.
    fn before_shared_write_of(&self, stream: &Stream, whole: bool) -> Result<()> {
        if self.is_ordered_elsewhere(stream)? {
            return Ok(());
        }
        // Not under the lock: a wait may wake tasks.
        let uses = self.uses().clone();
        uses.before_write(stream, whole, self.survives_other_devices())
    }

    /// Checks that a stream may write, and orders the write if that is not up to the memory's own uses: in a capture, or
    /// on an untracked device. Returns whether it is ordered.
    #[inline]
    fn is_ordered_elsewhere(&self, stream: &Stream) -> Result<bool> {
        self.check_copy_path(stream)?;
        if let Some(capture) = stream.capture() {
            return self.before_captured(stream, capture, true).map(|()| true);
        }
        self.check_not_captured(stream, true)?;
        if !self.device.tracked() {
            return self.before_untracked(stream, true).map(|()| true);
        }
        Ok(false)
    }

    /// Called before a write or a read if the test hook has disabled tracking on the memory's device. Two streams on
    /// untracked devices are not ordered, so that the race checker finds the race. The race checker does not see
    /// streams of an unchecked handle, so these are ordered nevertheless.
    #[cold]
    fn before_untracked(&self, stream: &Stream, write: bool) -> Result<()> {
        let open: SmallVec<[Ticket; 3]> = if write { self.uses().all() } else { self.uses().before_reads().all() };
        let is_tracked = |ticket: &&Ticket| stream.device().tracked() || ticket.stream().device().tracked();
        open.iter().filter(is_tracked).try_for_each(|ticket| stream.wait(ticket))
    }

    #[inline]
    fn check_copy_path(&self, stream: &Stream) -> Result<()> {
        if self.device.copies_with(stream.device()) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a stream on {} cannot access memory on {}: copy the data through the host",
                stream.device(),
                self.device
            ),
        ))
    }

    pub(crate) fn note_read(&self, ticket: &Ticket) {
        match ticket.stream().capture() {
            None => {
                // The forgotten tickets are dropped without the lock.
                let noted = self.uses().read_by(ticket);
                if noted.are_many {
                    query_readers(|with| with(&mut self.uses()));
                }
            }
            Some(capture) => self.note_captured(ticket, capture, false),
        }
    }

    #[inline]
    pub(crate) fn note_write(&mut self, ticket: &Ticket) {
        match ticket.stream().capture() {
            None => self.uses_mut().written_by(ticket),
            Some(capture) => self.note_captured(ticket, capture, true),
        }
    }

    /// Like [`note_write`](Self::note_write), for memory with [shared uses](Self::shared_uses), whose users hold the use
    /// lock.
    fn note_shared_write(&self, ticket: &Ticket) {
        match ticket.stream().capture() {
            None => self.uses().written_by(ticket),
            Some(capture) => self.note_captured(ticket, capture, true),
        }
    }

    /// Marks the uses now, for work on other streams that will be ordered after them.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let _later = Deferred::new();
        self.uses_mut().commit()
    }

    /// Like [`commit`](Self::commit), for one of several readers.
    pub(crate) fn commit_shared(&self) -> Result<()> {
        let _later = Deferred::new();
        self.uses().commit()
    }

    /// Like [`commit`](Self::commit). Returns the last write if it was made on `stream`.
    #[inline]
    pub(crate) fn commit_by(&mut self, stream: Option<&Stream>) -> Result<Option<Ticket>> {
        let _later = Deferred::new();
        let mut uses = self.uses_mut();
        uses.commit()?;
        let write = uses.write.as_ref().filter(|write| stream.is_some_and(|stream| write.stream().is(stream)));
        Ok(write.map(Ticket::unmarked))
    }

    /// Whether a read or, with `write`, a write that waits for the uses of this memory waits for nothing more if it also
    /// waits for those of `other`.
    pub(super) fn is_ready_no_sooner_than(&self, other: &Self, write: bool) -> bool {
        // Not with both locks.
        let before = other.uses().not_passed(write);
        before.is_empty() || before.iter().all(|ticket| self.uses().covers(ticket, write))
    }

    /// True if the contents survive the loss of another device that wrote them.
    #[inline]
    fn survives_other_devices(&self) -> bool {
        self.is_host() || !self.device.is_lost()
    }

    /// Fails if the contents are known to be lost with a device. Queries no device.
    pub(crate) fn check_contents(&self) -> Result<()> {
        self.uses().check_contents(self.survives_other_devices())
    }

    /// True if a device that is lost might still be using the memory, which itself is not lost.
    pub(crate) fn is_used_by_lost(&self) -> bool {
        self.survives_other_devices()
            && self.uses().any_is(|ticket| ticket.stream().device().is_lost() && !ticket.is_over())
    }

    /// A future that resolves once the host may read or, with `write`, write the memory.
    pub(crate) fn host_access(&self, write: bool) -> HostAccess {
        let captured = self.captured_uses(write);
        let uses = self.uses();
        let open = uses.open(write);
        drop(uses);
        HostAccess::of(captured.into_iter().map(|ticket| (ticket, true)).chain(open))
    }
}

/// Memory that may be written.
#[derive(Debug)]
pub(crate) enum MemoryMut<'a> {
    /// All of it is borrowed exclusively: its uses need no lock.
    Whole(&'a mut Memory),
    /// A part of it is borrowed exclusively, by [`SliceMut::split_at_mut`](super::SliceMut::split_at_mut). Other threads
    /// may use other parts at the same time, so its uses are [shared](Memory::shared_uses), and are serialised by the use
    /// lock like those of memory that graphs use.
    Part(&'a Memory),
}

impl<'a> MemoryMut<'a> {
    /// Memory of which several parts will be used at the same time.
    pub(super) fn part_of(memory: &'a Memory) -> Self {
        memory.shared_uses();
        Self::Part(memory)
    }

    #[inline]
    pub(super) fn reborrow(&mut self) -> MemoryMut<'_> {
        match self {
            Self::Whole(memory) => MemoryMut::Whole(memory),
            Self::Part(memory) => MemoryMut::Part(memory),
        }
    }

    #[inline]
    pub(super) fn into_shared(self) -> &'a Memory {
        match self {
            Self::Whole(memory) => memory,
            Self::Part(memory) => memory,
        }
    }

    /// See [`Memory::before_write`].
    #[inline]
    pub(super) fn before_write(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Whole(memory) => memory.before_write(stream),
            Self::Part(memory) => memory.before_shared_write_of(stream, false),
        }
    }

    /// See [`Memory::before_overwrite`]. The write overwrites `bytes` bytes from `offset` on.
    #[inline]
    pub(super) fn before_overwrite(&mut self, stream: &Stream, offset: usize, bytes: usize) -> Result<()> {
        match self {
            Self::Whole(memory) if offset == 0 => memory.before_overwrite(stream, bytes),
            _ => self.before_write(stream),
        }
    }

    /// See [`Memory::note_write`].
    #[inline]
    pub(super) fn note_write(&mut self, ticket: &Ticket) {
        match self {
            Self::Whole(memory) => memory.note_write(ticket),
            Self::Part(memory) => memory.note_shared_write(ticket),
        }
    }
}

impl Deref for MemoryMut<'_> {
    type Target = Memory;

    #[inline]
    fn deref(&self) -> &Memory {
        match self {
            Self::Whole(memory) => memory,
            Self::Part(memory) => memory,
        }
    }
}
