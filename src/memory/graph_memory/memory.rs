//! The methods of [`Memory`] that concern graphs.

use std::{ptr::NonNull, sync::Arc};

use super::{
    super::{Memory, Origin, execution},
    GraphMemory,
    shared_uses::{SharedState, SharedUses, UseLock},
    takes_no_part,
};
use crate::{
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket, capture::Capture},
    sync::{AtomicUsize, Deferred, Mutex, lock},
};

impl Memory {
    /// Its uses as shared with graphs. Created at the first call; from then on its uses are recorded there.
    pub(super) fn shared_uses(&self) -> &Arc<SharedUses> {
        if let Some(shared_uses) = self.shared_uses.get() {
            return shared_uses;
        }
        let mut uses = lock(&self.uses);
        self.shared_uses.get_or_init(|| {
            let uses = std::mem::take(&mut *uses).locked();
            let kept = Mutex::new(SharedState { graphs: 0, readers: 0, writers: 0, memory: None });
            Arc::new(SharedUses { home: self.home, bytes: self.bytes, uses, kept, lent_to: AtomicUsize::new(0) })
        })
    }

    /// An error for memory that the host and graphs would both access: a launch borrows nothing, and would write what
    /// the host reads, or read what it writes.
    #[inline]
    pub(in crate::memory) fn check_not_in_graph(&self, write: bool) -> Result<()> {
        match self.shared_uses.get() {
            Some(shared_uses) if !mutants::is(Mutant::HostSliceLent) => shared_uses.is_the_hosts(write).or_else(|_| {
                // A graph that was dropped keeps it until its launches are known to be done: they may be done by now.
                execution::destroy_finished(shared_uses);
                shared_uses.is_the_hosts(write)
            }),
            _ => Ok(()),
        }
    }

    /// True if a launch of a graph may use it at any time, or if a node of a graph allocates it for that graph's
    /// launches.
    pub(crate) fn is_in_graph(&self) -> bool {
        matches!(self.origin, Origin::Node) || self.check_not_in_graph(true).is_err()
    }

    /// True if this thread can enqueue work on it only through graphs: a capture that it is in uses the memory, or a
    /// node of a graph allocates it.
    pub(crate) fn is_in_capture(&self) -> bool {
        matches!(self.origin, Origin::Node) || self.shared_uses.get().is_some_and(GraphMemory::is_used_by_current)
    }

    /// Called when the host gets a slice of it. The race checker need not know of slices of memory that no graph has
    /// used so far: adding a node that uses it ends the borrow.
    #[inline]
    pub(in crate::memory) fn is_borrowed(&self, start: NonNull<u8>, exclusive: bool) {
        if self.shared_uses.get().is_some() {
            self.device.backend().host_borrow(start.as_ptr(), self.bytes, exclusive);
        }
    }

    /// The use lock, if graphs use the memory.
    #[inline]
    pub(in crate::memory) fn use_lock(&self) -> Option<UseLock> {
        UseLock::at(std::iter::once(self))
    }

    /// Whether it is lent to another thread. Call it with the use lock held.
    pub(in crate::memory) fn is_lent(&self) -> bool {
        self.shared_uses.get().is_some_and(|shared_uses| shared_uses.is_lent())
    }

    #[cold]
    pub(in crate::memory) fn before_captured(&self, stream: &Stream, capture: &Capture, write: bool) -> Result<()> {
        let _later = Deferred::new();
        GraphMemory::of(capture)?.before(self, stream, write)
    }

    /// An error for work that is not captured, on a thread that is in a capture that uses the memory.
    #[inline]
    pub(in crate::memory) fn is_not_captured(&self, stream: &Stream) -> Result<()> {
        match self.shared_uses.get() {
            None => Ok(()),
            Some(shared_uses) => self.is_outside(shared_uses, stream),
        }
    }

    #[cold]
    fn is_outside(&self, shared_uses: &Arc<SharedUses>, stream: &Stream) -> Result<()> {
        if matches!(self.origin, Origin::Node) {
            let text = format!(
                "stream `{}` would use memory that a node of a graph allocates: it exists only during its launches",
                stream.name()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if GraphMemory::is_used_by_current(shared_uses) { Err(takes_no_part(stream)) } else { Ok(()) }
    }

    /// If the capture is over, nothing was recorded, and the enqueue has returned the error.
    #[cold]
    pub(in crate::memory) fn note_captured(&self, ticket: &Ticket, capture: &Capture, write: bool) {
        if let Ok(graph_memory) = GraphMemory::of(capture) {
            graph_memory.note(self, ticket, write, capture.recorder().label());
        }
    }

    /// Called when its owner drops it. Returns it, unless a graph keeps it.
    #[cold]
    pub(in crate::memory) fn unless_kept(mut self: Box<Self>) -> Option<Box<Self>> {
        if let Origin::Graph { graph_memory, .. } = &self.origin {
            if let Some(graph_memory) = graph_memory.upgrade() {
                graph_memory.put(self);
                return None;
            }
            if let Origin::Graph { origin, .. } = std::mem::replace(&mut self.origin, Origin::Detached) {
                self.origin = *origin;
            }
        }
        let Some(shared_uses) = self.shared_uses.get().cloned() else { return Some(self) };
        let mut kept = lock(&shared_uses.kept);
        if kept.graphs > 0 {
            kept.memory = Some(self);
            return None;
        }
        drop(kept);
        self.shared_uses.take();
        self.uses = std::mem::take(&mut *lock(&shared_uses.uses)).locked();
        Some(self)
    }
}
