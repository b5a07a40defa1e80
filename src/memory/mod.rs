//! Device memory and page-locked host memory, usable by any stream without races.
//!
//! Each piece of memory records its last write and the reads since, each as a ticket. An operation first makes its
//! stream wait, on the device, for the uses that it must come after: a read for the last write, a write for the reads
//! too. The host reads and writes only after `.await`, or where nothing is in flight.
//!
//! ```text
//!   write on a:  a waits for the last write and all reads;   last write = a's ticket, no reads
//!   read  on b:  b waits for the last write;                 reads += b's ticket
//!   drop:        back to its heap, which hands it out again for work that comes after its last uses (see `heap`)
//! ```
//!
//! If a device is lost, every write that was ordered after its work is tainted, and so is all work that reads the
//! result. A write that overwrites all of the memory is ordered after the tainted write, but not tainted by it: the
//! memory is valid again. The same holds for the first use of memory that was freed, and of an envelope that returned
//! to its pool.
//!
//! The reads are a set: re-recording a single "read" event would forget the earlier of two readers.

mod access;
mod account;
mod allocator;
mod buffer;
mod capacity;
#[cfg(feature = "cuda")]
mod cudarc;
pub(crate) mod execution;
mod external;
mod free_lists;
pub(crate) mod graph_memory;
mod heap;
mod heap_state;
pub(crate) mod launch;
mod ledger;
mod ordered;
mod owned;
mod reclaim;
mod reserve;
mod staging;
mod state;
mod stats;
pub(crate) mod transfer;
mod wait_queue;
mod waiting;
mod wrapped;

use std::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::{Arc, OnceLock, Weak},
};

pub use access::HostAccess;
use access::Uses;
pub(crate) use account::Account;
pub use allocator::Allocator;
pub use buffer::{Buffer, DeviceSlice, DeviceSliceMut, View, ViewMut};
pub(crate) use buffer::{Sealed, bytes_of};
pub(crate) use capacity::can_hold;
pub use external::{Addresses, EmulatedSlice, External, RoomForSlice};
use graph_memory::{GraphMemory, SharedUses};
use heap::{Heap, RequestKind};
use ledger::Arena;
pub(crate) use owned::Owned;
#[doc(hidden)]
pub use reserve::Reservation;
pub(crate) use reserve::{ReserveBlocker, Wait};
use staging::Staging;
pub use state::BufferState;
pub use stats::MemoryStats;
pub(crate) use waiting::memory_passes;
use wrapped::User;
pub use wrapped::Wrapped;

use smallvec::SmallVec;

use crate::{
    device::{
        Device,
        backend::{Address, Endpoint, MOST_ALIGNMENT},
    },
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::{Deferred, Mutex, MutexGuard, lock},
};

/// Plain data: any bit pattern is a valid value, there is no padding, and values can be copied byte by byte. Derive
/// [`bytemuck::Pod`] and [`bytemuck::Zeroable`] for your own types.
///
/// # Size and alignment
/// Elements have at least one byte and an alignment of at most 256. The addresses of device memory are multiples of 256
/// (CUDA C++ Programming Guide, *Device Memory Accesses*: an address that an allocation routine of the driver or the
/// runtime returns is aligned to at least 256 bytes), and so are those of wakeline's page-locked memory and emulated
/// devices. A buffer, an envelope or a hub of chunks of other elements does not compile:
///
/// ```compile_fail,E0080
/// #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
/// #[repr(C, align(512))]
/// struct Wide([u8; 512]);
///
/// let device = wakeline::Device::host();
/// let buffer = wakeline::Buffer::<Wide>::pinned(&device, 1)?;
/// # Ok::<(), wakeline::Error>(())
/// ```
///
/// ```compile_fail,E0080
/// let device = wakeline::Device::host();
/// let buffer = wakeline::Buffer::<()>::pinned(&device, 1)?;
/// # Ok::<(), wakeline::Error>(())
/// ```
pub trait Plain: bytemuck::Pod + Send + Sync + 'static {
    /// Evaluated wherever memory is allocated for elements of the type: a compile error for a type of size 0, or of an
    /// alignment that memory does not have.
    #[doc(hidden)]
    const FITS: () = {
        assert!(size_of::<Self>() > 0, "elements of size 0 are not supported");
        assert!(
            align_of::<Self>() <= MOST_ALIGNMENT,
            "the elements of device memory have an alignment of at most 256 bytes"
        );
    };
}

impl<T: bytemuck::Pod + Send + Sync + 'static> Plain for T {}

/// Casts bytes to elements.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage) if the memory is not aligned for them or its length is not a multiple of their size: it
/// was allocated for elements of another type.
pub(crate) fn elements<T: Plain>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| not_of::<T>(error, bytes))
}

pub(crate) fn elements_mut<T: Plain>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let range = bytes.as_ptr_range();
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| cannot_hold::<T>(error, range))
}

#[cold]
fn not_of<T>(error: bytemuck::PodCastError, bytes: &[u8]) -> Error {
    cannot_hold::<T>(error, bytes.as_ptr_range())
}

#[cold]
fn cannot_hold<T>(error: bytemuck::PodCastError, at: std::ops::Range<*const u8>) -> Error {
    let bytes = at.end.addr() - at.start.addr();
    let text = format!(
        "{bytes} bytes of memory at {:?} cannot hold elements of `{}` ({} bytes each, aligned to {}): {error}; it was \
         allocated for elements of another type",
        at.start,
        std::any::type_name::<T>(),
        size_of::<T>(),
        align_of::<T>()
    );
    Error::new(ErrorKind::Usage, text)
}

/// Larger requests are refused: no address space is as large, and sums of such numbers could overflow.
pub(crate) const MOST_BYTES: usize = (isize::MAX as usize) >> 15;

/// The location of a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Device(Address),
    Host(NonNull<u8>),
}

// SAFETY: a plain location. Code that accesses it must own or borrow the memory.
unsafe impl Send for Home {}
// SAFETY: as above.
unsafe impl Sync for Home {}

/// Untyped memory and its recorded uses: [`Owned`], or in the free lists of its heap while streams may still use it.
pub(crate) struct Memory {
    device: Device,
    home: Home,
    /// As requested.
    bytes: usize,
    /// The size of its block.
    size: u64,
    /// The id of the stream that it was allocated for, 0 for none.
    lane: u64,
    uses: Mutex<Uses>,
    /// If graphs use the memory too: its uses are recorded there.
    shared_uses: OnceLock<Arc<SharedUses>>,
    /// Data on its way to it, where no device copies to it directly.
    staging: Staging,
    /// The account that it is charged to.
    account: Option<Arc<Account>>,
    origin: Origin,
}

/// Where the memory came from and returns to.
enum Origin {
    /// A block of a heap.
    Heap(Arc<Heap>),
    /// The driver's own pool, through this stream.
    Ordered { heap: Arc<Heap>, stream: Stream },
    /// The user's own memory.
    User(Box<User>),
    /// Allocated for a graph, which keeps it. Afterwards it returns to its origin.
    Graph { graph_memory: Weak<GraphMemory>, origin: Box<Origin> },
    /// A node of a graph allocates it at each launch, and another node frees it.
    Node,
    /// In transition between two of these.
    Detached,
}

impl Origin {
    fn heap(&self) -> Option<&Arc<Heap>> {
        match self {
            Self::Heap(heap) | Self::Ordered { heap, .. } => Some(heap),
            Self::Graph { origin, .. } => origin.heap(),
            Self::User(_) | Self::Node | Self::Detached => None,
        }
    }
}

// SAFETY: `home` is the only field that is not `Send + Sync` by itself: a pointer to memory that this value owns
// exclusively. The host accesses it through `host_slice` (shared, `&self`) and `host_slice_mut` (exclusive, `&mut
// self`), so Rust's rules for references graph_memory across threads as they would for a `Box<[u8]>`. The device accesses it in
// the order that `uses` maintains.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Device memory, contents unknown.
    pub(crate) fn on(device: &Device, bytes: usize) -> Result<Owned> {
        if device.is_host() {
            let text = "the host has no device memory: choose a device, `Device::first()` say, or `Buffer::pinned`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Arena::of(device).own(device).alloc(device, bytes, None, RequestKind::Call(0))
    }

    /// Page-locked host memory that `device` copies to and from at full speed.
    pub(crate) fn pinned(device: &Device, bytes: usize) -> Result<Owned> {
        Arena::of(device).pinned(device).alloc(device, bytes, None, RequestKind::Call(0))
    }

    /// As [`on`](Self::on), for work that is about to be enqueued on `stream`: the memory belongs to a graph only if
    /// that stream is captured, whatever else the thread captures.
    pub(crate) fn on_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).own(device).alloc_for(stream, bytes)
    }

    /// As [`on_for`](Self::on_for), page-locked on the host.
    pub(crate) fn pinned_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).pinned(device).alloc_for(stream, bytes)
    }

    #[inline]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn count_for(&mut self, account: &Arc<Account>) {
        account.take(self.bytes as u64);
        if let Some(heap) = self.origin.heap() {
            lock(&heap.state).own(account.flow(), self.bytes as u64);
            // Tasks that wait for memory may decide differently now.
            heap.ledger.notify();
        }
        self.account = Some(account.clone());
    }

    #[inline]
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.home, Home::Host(_))
    }

    /// Its location, for messages.
    pub(crate) fn location(&self) -> &str {
        if self.is_host() { "the host" } else { self.device.name() }
    }

    /// True if `device` uses it without a copy.
    #[inline]
    pub(crate) fn is_at(&self, device: &Device) -> bool {
        if self.is_host() { device.is_host() } else { self.device == *device }
    }

    /// Its address for the backend. Host memory has none.
    #[inline]
    pub(crate) fn address(&self) -> Result<Address> {
        match self.home {
            Home::Device(address) => Ok(address),
            Home::Host(_) => Err(Error::new(
                ErrorKind::Usage,
                "a kernel or a fill needs device memory, and this is host memory: copy it to the device first",
            )),
        }
    }

    /// One end of a copy. It may be written through only in the order that `uses` maintains.
    fn place(&self) -> Endpoint {
        match self.home {
            Home::Device(address) => Endpoint::Device(address),
            Home::Host(pointer) => Endpoint::Host(pointer.as_ptr()),
        }
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        if let Some(shared_uses) = self.shared_uses.get() {
            return lock(&shared_uses.uses);
        }
        let uses = lock(&self.uses);
        match self.shared_uses.get() {
            None => uses,
            // It was set meanwhile.
            Some(shared_uses) => {
                drop(uses);
                lock(&shared_uses.uses)
            }
        }
    }

    /// As `uses()`, with exclusive access: lock-free unless graphs use the memory.
    #[inline]
    fn own_uses(&mut self) -> OwnUses<'_> {
        match self.shared_uses.get() {
            None => OwnUses::Own(self.uses.get_mut()),
            Some(shared_uses) => OwnUses::Tied(lock(&shared_uses.uses)),
        }
    }

    pub(crate) fn before_read(&self, stream: &Stream) -> Result<()> {
        self.on_known_device(stream)?;
        if let Some(capture) = stream.capture() {
            return self.before_captured(stream, capture, false);
        }
        self.is_not_captured(stream)?;
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
    /// of them.
    #[inline]
    pub(crate) fn before_write(&mut self, stream: &Stream) -> Result<()> {
        self.before_write_of(stream, false)
    }

    /// The same for a write that overwrites the first `bytes` bytes without reading them.
    #[inline]
    pub(crate) fn before_overwrite(&mut self, stream: &Stream, bytes: usize) -> Result<()> {
        self.before_write_of(stream, bytes >= self.bytes)
    }

    #[inline]
    fn before_write_of(&mut self, stream: &Stream, whole: bool) -> Result<()> {
        self.on_known_device(stream)?;
        if let Some(capture) = stream.capture() {
            return self.before_captured(stream, capture, true);
        }
        self.is_not_captured(stream)?;
        if !self.device.tracked() {
            return self.before_untracked(stream, true);
        }
        if self.shared_uses.get().is_some() {
            // Not under the lock: a wait may wake tasks.
            let uses = self.uses().clone();
            return uses.before_write(stream, whole, self.survives_other_devices());
        }
        let outlives = self.survives_other_devices();
        self.own_uses().before_write(stream, whole, outlives)
    }

    /// The contents are not needed from now on: the memory is about to be handed out again.
    #[inline]
    pub(crate) fn discard_contents(&mut self) {
        if self.is_staged() {
            return self.forget_arrivals();
        }
        self.own_uses().discard_contents();
    }

    /// Called before a write or a read if the test hook has disabled the tracking of the memory's device. The order of
    /// two streams on untracked devices is left to the race checker. It does not see streams of an unchecked handle, so
    /// those are ordered all the same.
    #[cold]
    fn before_untracked(&self, stream: &Stream, write: bool) -> Result<()> {
        let open: SmallVec<[Ticket; 3]> = if write { self.uses().all() } else { self.uses().before_reads().all() };
        let is_tracked = |ticket: &&Ticket| stream.device().tracked() || ticket.stream().device().tracked();
        open.iter().filter(is_tracked).try_for_each(|ticket| stream.wait(ticket))
    }

    #[inline]
    fn on_known_device(&self, stream: &Stream) -> Result<()> {
        if self.device.copies_with(stream.device()) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Usage,
            format!("{} cannot reach memory of {}: copy it through the host", stream.device(), self.device),
        ))
    }

    pub(crate) fn note_read(&self, ticket: &Ticket) {
        match ticket.stream().capture() {
            None => {
                // The forgotten tickets are dropped without the lock.
                let noted = self.uses().read_by(ticket);
                if noted.are_many {
                    access::ask_readers(|with| with(&mut self.uses()));
                }
            }
            Some(capture) => self.note_captured(ticket, capture, false),
        }
    }

    #[inline]
    pub(crate) fn note_write(&mut self, ticket: &Ticket) {
        match ticket.stream().capture() {
            None => self.own_uses().written_by(ticket),
            Some(capture) => self.note_captured(ticket, capture, true),
        }
    }

    /// Marks its uses now, for work elsewhere that will be ordered after them.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let _later = Deferred::new();
        self.own_uses().commit()
    }

    /// As [`commit`](Self::commit), for one of several readers.
    pub(crate) fn commit_shared(&self) -> Result<()> {
        let _later = Deferred::new();
        self.uses().commit()
    }

    /// As [`commit`](Self::commit); returns the last write if it is of this stream.
    #[inline]
    pub(crate) fn commit_by(&mut self, stream: Option<&Stream>) -> Result<Option<Ticket>> {
        let _later = Deferred::new();
        let mut uses = self.own_uses();
        uses.commit()?;
        let write = uses.write.as_ref().filter(|write| stream.is_some_and(|stream| write.stream().is(stream)));
        Ok(write.map(Ticket::point))
    }

    /// True if the contents survive the loss of another device that wrote them.
    #[inline]
    fn survives_other_devices(&self) -> bool {
        self.is_host() || !self.device.is_lost()
    }

    /// An error if the contents are known to be lost with a device. Queries no device.
    pub(crate) fn check_contents(&self) -> Result<()> {
        self.uses().check_contents(self.survives_other_devices())
    }

    /// What the host must wait for before it reads or, with `write`, writes.
    pub(crate) fn host_access(&self, write: bool) -> HostAccess {
        let captured = GraphMemory::captured_uses(self, write);
        let uses = self.uses();
        let open = uses.open(write);
        drop(uses);
        HostAccess::of(captured.into_iter().map(|ticket| (ticket, true)).chain(open))
    }

    /// True if all enqueued work on it is done and valid. Those uses are then forgotten, together with what their
    /// streams are ordered after. Queries the device without waiting for it.
    ///
    /// # Errors
    /// The error of that work.
    pub(crate) fn forget_work(&mut self) -> Result<bool> {
        // Kept until the end, so that no ticket is dropped under the lock.
        let all = self.own_uses().all();
        let open = self.own_uses().open(true);
        for (mut ticket, counts) in open {
            if !ticket.look()? {
                return Ok(false);
            }
            // Whether a read is tainted does not matter for the memory.
            if counts {
                ticket.sound()?;
            }
        }
        if !all.is_empty() {
            self.own_uses().forget_passed();
            self.forget_work_on_arrivals();
        }
        Ok(true)
    }

    pub(crate) fn host_range(&self) -> Result<std::ops::Range<usize>> {
        let start = self.host_pointer()?.addr().get();
        Ok(start..start + self.bytes)
    }

    fn host_pointer(&self) -> Result<NonNull<u8>> {
        match self.home {
            Home::Host(pointer) => Ok(pointer),
            Home::Device(_) => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "the host cannot access memory of {}: send the envelope to an operator on the host, or copy to \
                     `Buffer::pinned` with `Stream::copy`",
                    self.device
                ),
            )),
        }
    }

    /// The bytes, for reading by the host. An error if a write is in flight.
    pub(crate) fn host_slice(&self) -> Result<&[u8]> {
        let pointer = self.host_pointer()?;
        self.check_not_in_graph(false)?;
        self.settled(false)?;
        self.transfer_arrivals()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, false)?;
        self.is_borrowed(pointer, false);
        // SAFETY: the memory is owned by this value, `bytes` long and initialised (`Backend` requires it). The device
        // does not write to it while `&self` is borrowed: no write is in flight; no node of a graph, or of a capture
        // that may become one, writes it (`check_not_in_graph`: a node is counted from before it is added until no launch of
        // it can come any more); and a new write, or a new node that writes, needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.bytes) })
    }

    /// The bytes, for writing by the host. An error if anything is in flight.
    pub(crate) fn host_slice_mut(&mut self) -> Result<&mut [u8]> {
        let pointer = self.host_pointer()?;
        self.writable()?;
        self.check_not_in_graph(true)?;
        self.settled(true)?;
        self.transfer_arrivals()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, true)?;
        self.is_borrowed(pointer, true);
        // SAFETY: as in `host_slice`. The device neither reads nor writes it, no node of a graph or of a capture uses
        // it, and any new use needs this value, which is borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), self.bytes) })
    }

    fn settled(&self, write: bool) -> Result<()> {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut uses = self.uses();
        uses.forget_settled();
        let open = uses.open(write);
        drop(uses);
        for (mut ticket, counts) in open {
            if ticket.look()? {
                if counts {
                    ticket.sound()?;
                }
            } else {
                let stream = ticket.stream().name().to_string();
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "the host would access memory that stream `{stream}` still uses: await `read()` or `write()` first"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Exclusive access to the uses.
enum OwnUses<'a> {
    Own(&'a mut Uses),
    Tied(MutexGuard<'a, Uses>),
}

impl Deref for OwnUses<'_> {
    type Target = Uses;

    #[inline]
    fn deref(&self) -> &Uses {
        match self {
            Self::Own(uses) => uses,
            Self::Tied(uses) => uses,
        }
    }
}

impl DerefMut for OwnUses<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Uses {
        match self {
            Self::Own(uses) => uses,
            Self::Tied(uses) => uses,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("at", &self.location()).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
