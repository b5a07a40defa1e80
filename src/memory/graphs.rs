//! The interface between memory and graphs: what the rest of this folder needs to know about graphs, as traits that
//! graphs implement.
//!
//! ```text
//!   a captured use      is ordered and noted by the capture's `CaptureMemory`, not by the memory's own uses
//!   a request           within a capture may get memory that the capture has freed, and becomes the graph's own
//!   shared memory       any launch of a graph may use it: other uses acquire the use lock, and the host gets no slice
//!                       that a node could write (`SharedUses`)
//!   a dropped exec      keeps its memory until its launches are done (`DroppedExec`)
//! ```
//!
//! [`graph_memory`](super::graph_memory) and [`execution`](super::execution) implement these traits.

use std::{
    ptr::NonNull,
    sync::{Arc, Weak},
};

use smallvec::SmallVec;

use super::{Memory, Owned, memory::Origin, shared_uses::SharedUses, use_lock::UseLockGuard};
use crate::{
    device::{
        Device,
        backend::{Address, Backend},
    },
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket, capture::Capture},
    sync::{Deferred, Mutex, lock},
};

/// The memory of a capture, and of the graph that it becomes.
pub(super) trait CaptureMemory: Send + Sync {
    /// Returns memory of exactly this size from `origin` that was freed in the capture and that `stream` can use.
    ///
    /// # Errors
    /// Fails if the capture is over.
    fn reuse(&self, origin: &dyn Origin, bytes: usize, stream: &Stream) -> Result<Option<Owned>>;

    /// Makes newly allocated memory the graph's own.
    ///
    /// # Errors
    /// Fails if the capture is over.
    fn adopt(&self, memory: &mut Memory) -> Result<()>;

    /// Makes a captured stream wait for the uses within the capture that a new use must come after, and launches for
    /// those outside the capture.
    fn before_use(&self, shared: &Arc<SharedUses>, stream: &Stream, write: bool) -> Result<()>;

    /// Notes a captured use. `label` is the label of its node.
    fn note_use(&self, shared: &Arc<SharedUses>, ticket: &Ticket, write: bool, label: Option<Arc<str>>);

    /// The uses within the capture that a read, or a write, must come after.
    fn open_uses(&self, shared: &Arc<SharedUses>, write: bool) -> SmallVec<[Ticket; 3]>;

    /// True if a node uses this memory.
    fn uses(&self, shared: &Arc<SharedUses>) -> bool;

    /// The last write, within the capture, of memory that starts here.
    fn last_write(&self, start: Address) -> Option<Ticket>;
}

/// The capture's extension. `Weak`, as the streams of a capture may outlive its graph.
struct CaptureExtension(Option<Weak<dyn CaptureMemory>>);

/// Sets the memory of a new capture.
pub(super) fn register(capture: &Capture, memory: Weak<dyn CaptureMemory>) {
    let _ = capture.extension(move || Arc::new(CaptureExtension(Some(memory))));
}

/// The memory of a capture.
pub(super) fn of(capture: &Capture) -> Result<Arc<dyn CaptureMemory>> {
    let extension = capture.extension(|| Arc::new(CaptureExtension(None)));
    let memory = extension.and_then(|extension| extension.0.as_ref()?.upgrade());
    memory.filter(|_| !capture.is_over()).ok_or_else(capture_over_error)
}

/// The memory of the capture that serves requests for `stream` or, without a stream, on this thread.
#[inline]
pub(super) fn serving(device: &Device, stream: Option<&Stream>) -> Result<Option<Arc<dyn CaptureMemory>>> {
    match stream {
        Some(stream) => stream.capture().map(|capture| of(capture)).transpose(),
        None => match Capture::current() {
            Some(capture) if capture.device() == device => of(&capture).map(Some),
            _ => Ok(None),
        },
    }
}

pub(super) fn capture_over_error() -> Error {
    Error::new(ErrorKind::Usage, "the capture of this stream is over: use another stream")
}

/// True if a node of a capture that this thread is in, at any level, uses this memory.
pub(super) fn is_used_by_current(shared: &Arc<SharedUses>) -> bool {
    Capture::entered().iter().any(|capture| of(capture).is_ok_and(|memory| memory.uses(shared)))
}

/// The error for work that is not captured, on a thread that is in a capture whose nodes use the same memory.
pub(super) fn not_captured_error(stream: &Stream) -> Error {
    let text = format!(
        "stream `{}` is not part of the capture whose nodes use the same memory, so its work would run now and not \
         at a launch: use a stream of the capture (in an operator, `cx.stream()`)",
        stream.name()
    );
    Error::new(ErrorKind::Usage, text)
}

/// An exec that was dropped, and whose launches might still be running.
pub(super) trait DroppedExec: Send + Sync {
    /// True if its launches use this memory.
    fn uses(&self, shared: &Arc<SharedUses>) -> bool;

    /// True if it is an exec of this device.
    fn is_on(&self, backend: &Arc<dyn Backend>) -> bool;

    /// Destroys it if its launches are done. True once it is destroyed.
    fn destroy_if_done(&self) -> bool;
}

/// The dropped execs of all devices: graphs of other devices may use memory that is page-locked for one device.
static DROPPED_EXECS: Mutex<Vec<Weak<dyn DroppedExec>>> = Mutex::new(Vec::new());

pub(super) fn add_dropped(exec: Weak<dyn DroppedExec>) {
    let mut execs = lock(&DROPPED_EXECS);
    execs.retain(|exec| exec.strong_count() > 0);
    execs.push(exec);
}

/// Destroys the dropped execs for which `which` is true and whose launches are done.
pub(super) fn destroy_done(which: impl Fn(&dyn DroppedExec) -> bool) {
    let all: Vec<_> = {
        let mut execs = lock(&DROPPED_EXECS);
        execs.retain(|exec| exec.strong_count() > 0);
        execs.iter().filter_map(Weak::upgrade).collect()
    };
    for exec in all.iter().filter(|exec| which(&***exec)) {
        exec.destroy_if_done();
    }
}

impl Memory {
    /// Fails for memory that the host and graphs would both access: a launch borrows nothing, and could write memory
    /// that the host reads, or read memory that the host writes.
    #[inline]
    pub(super) fn check_not_in_graph(&self, write: bool) -> Result<()> {
        match self.shared.get() {
            Some(shared) if !mutants::is(Mutant::HostSliceLent) => shared.check_host_access(write).or_else(|_| {
                // A dropped graph keeps the memory until its launches are known to be done, and they may be done by
                // now.
                destroy_done(|exec| exec.uses(shared));
                shared.check_host_access(write)
            }),
            _ => Ok(()),
        }
    }

    /// True if a node of a graph allocates the memory, for launches of that graph.
    fn is_of_node(&self) -> bool {
        self.shared.get().is_some_and(|shared| shared.of_node)
    }

    /// True if a launch of a graph may use the memory at any time, or if a node of a graph allocates it for that
    /// graph's launches.
    pub(crate) fn is_in_graph(&self) -> bool {
        self.is_of_node() || self.check_not_in_graph(true).is_err()
    }

    /// True if this thread can use the memory only through graphs: a capture that the thread is in uses the memory, or
    /// a node of a graph allocates it.
    pub(crate) fn is_in_capture(&self) -> bool {
        self.shared.get().is_some_and(|shared| shared.of_node || is_used_by_current(shared))
    }

    /// Reports to the race checker that the host gets a slice of the memory. Slices of memory that no graph has used so
    /// far need no report: adding a node that uses the memory ends the borrow.
    #[inline]
    pub(super) fn note_borrow(&self, start: NonNull<u8>, exclusive: bool) {
        if self.shared.get().is_some() {
            self.device.backend().host_borrow(start.as_ptr(), self.bytes, exclusive);
        }
    }

    /// The use lock, if graphs use the memory.
    #[inline]
    pub(super) fn use_lock(&self) -> Option<UseLockGuard<'static>> {
        UseLockGuard::for_memory(std::iter::once(self.shared.get()))
    }

    /// True if the memory is lent to another thread. Called with the use lock held.
    pub(super) fn is_lent(&self) -> bool {
        self.shared.get().is_some_and(|shared| shared.is_lent())
    }

    #[cold]
    pub(super) fn before_captured(&self, stream: &Stream, capture: &Capture, write: bool) -> Result<()> {
        let _later = Deferred::new();
        of(capture)?.before_use(self.shared_uses(), stream, write)
    }

    /// Fails for work that is not captured, on a thread that is in a capture that uses the memory, or in a function that
    /// the memory is lent to.
    #[inline]
    pub(super) fn check_not_captured(&self, stream: &Stream, write: bool) -> Result<()> {
        match self.shared.get() {
            None => Ok(()),
            Some(shared) => Self::check_uncaptured_use(shared, stream, write),
        }
    }

    #[cold]
    fn check_uncaptured_use(shared: &Arc<SharedUses>, stream: &Stream, write: bool) -> Result<()> {
        if shared.of_node {
            let text = format!(
                "stream `{}` would use memory that a node of a graph allocates, which exists only during the graph's \
                 launches: use it only in nodes of that graph",
                stream.name()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        shared.check_not_lent(stream, write)?;
        if is_used_by_current(shared) { Err(not_captured_error(stream)) } else { Ok(()) }
    }

    /// If the capture is over, nothing was recorded, and the enqueue returned an error.
    #[cold]
    pub(super) fn note_captured(&self, ticket: &Ticket, capture: &Capture, write: bool) {
        if let Ok(memory) = of(capture) {
            memory.note_use(self.shared_uses(), ticket, write, capture.recorder().label());
        }
    }

    /// The uses within the captures that this thread is in. Waiting for them is an error.
    pub(super) fn captured_uses(&self, write: bool) -> SmallVec<[Ticket; 3]> {
        let Some(shared) = self.shared.get() else { return SmallVec::new() };
        let captures = Capture::entered();
        captures
            .iter()
            .filter_map(|capture| of(capture).ok())
            .flat_map(|memory| memory.open_uses(shared, write))
            .collect()
    }
}
