//! What memory does about the graphs that use it.

use std::{ptr::NonNull, sync::Arc};

use super::{
    super::{Memory, Origin, execution},
    Hold, takes_no_part,
    tie::{Kept, Tie, Turn},
};
use crate::{
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket, capture::Capture},
    sync::{AtomicUsize, Deferred, Mutex, lock},
};

impl Memory {
    /// What it is tied to graphs with: made at the first call. From then on its uses are there.
    pub(super) fn tie(&self) -> &Arc<Tie> {
        if let Some(tie) = self.tie.get() {
            return tie;
        }
        let mut uses = lock(&self.uses);
        self.tie.get_or_init(|| {
            let uses = std::mem::take(&mut *uses).locked();
            let kept = Mutex::new(Kept { graphs: 0, readers: 0, writers: 0, memory: None });
            Arc::new(Tie { home: self.home, bytes: self.bytes, uses, kept, lent_to: AtomicUsize::new(0) })
        })
    }

    /// An error for memory that host and graphs would both touch: a launch borrows nothing, and would write what the host is
    /// looking at, or read what it writes.
    #[inline]
    pub(in crate::memory) fn not_of_graphs(&self, write: bool) -> Result<()> {
        match self.tie.get() {
            Some(tie) if !mutants::is(Mutant::HostSliceLent) => tie.is_the_hosts(write).or_else(|_| {
                // A graph that was dropped keeps it until its launches are known to be done: perhaps they are.
                execution::end_what_is_over(tie);
                tie.is_the_hosts(write)
            }),
            _ => Ok(()),
        }
    }

    /// True if a launch of a graph may use it at any time, or if a node of a graph makes it, for the launches of that alone.
    pub(crate) fn is_of_graphs(&self) -> bool {
        matches!(self.origin, Origin::Node) || self.not_of_graphs(true).is_err()
    }

    /// True if this thread can enqueue no work on it beside graphs: a capture that it is in uses the memory, or a node of a
    /// graph makes it.
    pub(crate) fn is_in_capture(&self) -> bool {
        matches!(self.origin, Origin::Node) || self.tie.get().is_some_and(Hold::is_used_by_current)
    }

    /// The host has a slice of it from here on. Of memory that no graph has used so far, the race checker need not know: to
    /// add a node that uses it ends the borrow.
    #[inline]
    pub(in crate::memory) fn is_borrowed(&self, start: NonNull<u8>, exclusive: bool) {
        if self.tie.get().is_some() {
            self.device.backend().host_borrow(start.as_ptr(), self.bytes, exclusive);
        }
    }

    /// A turn at it, if graphs use it.
    #[inline]
    pub(in crate::memory) fn turn(&self) -> Option<Turn> {
        Turn::at(std::iter::once(self))
    }

    /// Whether it is lent to another thread. Within a turn.
    pub(in crate::memory) fn is_lent(&self) -> bool {
        self.tie.get().is_some_and(|tie| tie.is_lent())
    }

    #[cold]
    pub(in crate::memory) fn before_captured(&self, stream: &Stream, capture: &Capture, write: bool) -> Result<()> {
        let _later = Deferred::new();
        Hold::of(capture)?.before(self, stream, write)
    }

    /// An error on the thread of a capture that has something to do with it, for work that is not captured.
    #[inline]
    pub(in crate::memory) fn is_not_captured(&self, stream: &Stream) -> Result<()> {
        match self.tie.get() {
            None => Ok(()),
            Some(tie) => self.is_outside(tie, stream),
        }
    }

    #[cold]
    fn is_outside(&self, tie: &Arc<Tie>, stream: &Stream) -> Result<()> {
        if matches!(self.origin, Origin::Node) {
            let text = format!(
                "stream `{}` would use memory that a node of a graph makes: it is there within its launches only",
                stream.name()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if Hold::is_used_by_current(tie) { Err(takes_no_part(stream)) } else { Ok(()) }
    }

    /// The capture may be over: then nothing was recorded, and the enqueue has said so.
    #[cold]
    pub(in crate::memory) fn note_captured(&self, ticket: &Ticket, capture: &Capture, write: bool) {
        if let Ok(hold) = Hold::of(capture) {
            hold.note(self, ticket, write, capture.recorder().label());
        }
    }

    /// Its owner has dropped it. Back, if no graph keeps it.
    #[cold]
    pub(in crate::memory) fn unless_kept(mut self: Box<Self>) -> Option<Box<Self>> {
        if let Origin::Graph { hold, .. } = &self.origin {
            if let Some(hold) = hold.upgrade() {
                hold.put(self);
                return None;
            }
            if let Origin::Graph { origin, .. } = std::mem::replace(&mut self.origin, Origin::Nobody) {
                self.origin = *origin;
            }
        }
        let Some(tie) = self.tie.get().cloned() else { return Some(self) };
        let mut kept = lock(&tie.kept);
        if kept.graphs > 0 {
            kept.memory = Some(self);
            return None;
        }
        drop(kept);
        self.tie.take();
        self.uses = std::mem::take(&mut *lock(&tie.uses)).locked();
        Some(self)
    }
}
