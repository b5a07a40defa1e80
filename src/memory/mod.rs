//! Memory on devices and page-locked memory of the host, used by any stream, never raced.
//!
//! Each piece of memory knows its last write and the reads since, each as a ticket. Whoever uses it on a stream first
//! makes that stream wait, on the device, for what must come before: a read for the last write, a write for the reads
//! too. The host reads and writes only after `.await`, or where nothing is in flight.
//!
//! ```text
//!   write on a:  a waits for the last write and all reads;   last write = a's ticket, no reads
//!   read  on b:  b waits for the last write;                 reads += b's ticket
//!   drop:        back to its heap, which hands it out again to whoever comes after its last uses (see `heap`)
//! ```
//!
//! A write that came after work of another device is worth nothing if that device is lost: what reads it is worth nothing, too. A
//! write of all of the memory only comes after it, and so does the first use of memory that was freed, or of an envelope that came
//! home: the memory is sound again.
//!
//! A set of reads, not one: re-recording one "read" event forgets the earlier of two readers.

mod access;
mod account;
mod allocator;
mod buffer;
mod capacity;
#[cfg(feature = "cuda")]
mod cudarc;
pub(crate) mod execution;
mod external;
mod heap;
pub(crate) mod hold;
pub(crate) mod launch;
mod ledger;
mod line;
mod ordered;
mod owned;
mod reclaim;
mod reserve;
mod shelves;
mod staging;
mod state;
mod stats;
mod stock;
pub(crate) mod transfer;
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
pub use external::{Addresses, EmulatedSlice, External, Room};
use heap::{Asker, Heap};
use hold::{Hold, Tie};
use ledger::Arena;
pub(crate) use owned::Owned;
#[doc(hidden)]
pub use reserve::Reservation;
pub(crate) use reserve::{Lacks, Wait};
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
        backend::{Address, MOST_ALIGNMENT, Place},
    },
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::{Deferred, Mutex, MutexGuard, lock},
};

/// Plain data: any bit pattern is a value, there is no padding, and it can be copied byte by byte. Derive
/// [`bytemuck::Pod`] and [`bytemuck::Zeroable`] for your own types.
///
/// # Size and alignment
/// Elements have at least one byte, and an alignment of at most 256: the addresses of device memory are multiples of 256
/// (CUDA C++ Programming Guide, *Device Memory Accesses*: an address that an allocation routine of the driver or the
/// runtime returns is aligned to at least 256 bytes), and the page-locked memory and the emulated devices of wakeline keep
/// to the same. A buffer, an envelope or a hub of chunks of other elements does not compile:
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
    /// Evaluated wherever memory is made for elements of the type: an error of the compiler for one that no memory is
    /// aligned for, or that has no size.
    #[doc(hidden)]
    const FITS: () = {
        assert!(size_of::<Self>() > 0, "elements of no size need no memory");
        assert!(
            align_of::<Self>() <= MOST_ALIGNMENT,
            "the elements of device memory have an alignment of at most 256 bytes"
        );
    };
}

impl<T: bytemuck::Pod + Send + Sync + 'static> Plain for T {}

/// The elements in these bytes.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage) if the memory is not aligned for them, or is no whole number of them: it was made for elements
/// of another type.
pub(crate) fn elements<T: Plain>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|error| not_of::<T>(error, bytes))
}

/// As [`elements`], to write to.
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
        "{bytes} bytes of memory at {:?} hold no elements of `{}` ({} bytes each, aligned to {}): {error}; it was made for \
         elements of another type",
        at.start,
        std::any::type_name::<T>(),
        size_of::<T>(),
        align_of::<T>()
    );
    Error::new(ErrorKind::Usage, text)
}

/// No request for more is looked at: it is beyond any address space, and sums of such numbers would overflow.
pub(crate) const MOST_BYTES: usize = (isize::MAX as usize) >> 15;

/// Where a piece of memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Device(Address),
    Host(NonNull<u8>),
}

// SAFETY: it says where memory lies, and whoever goes there has that memory.
unsafe impl Send for Home {}
// SAFETY: as above.
unsafe impl Sync for Home {}

/// Untyped memory, and what is known of its uses: [`Owned`], or on the shelf of its heap while streams may still use it.
pub(crate) struct Memory {
    device: Device,
    home: Home,
    /// As it was asked for.
    bytes: usize,
    /// Of its block.
    size: u64,
    /// The number of the stream that it was asked for on, 0 for none.
    lane: u64,
    uses: Mutex<Uses>,
    /// Graphs use it, too: then its uses are there.
    tie: OnceLock<Arc<Tie>>,
    /// What has come for it, where no device copies to it by itself.
    staging: Staging,
    /// Whose it is counted as.
    account: Option<Arc<Account>>,
    origin: Origin,
}

/// Where it came from and goes to.
enum Origin {
    /// A block of a heap's.
    Heap(Arc<Heap>),
    /// The driver's pool, by this stream.
    Ordered { heap: Arc<Heap>, stream: Stream },
    /// The user's own.
    User(Box<User>),
    /// Made for a graph, which keeps it. Then it goes to where it came from.
    Graph { hold: Weak<Hold>, origin: Box<Origin> },
    /// A node of a graph makes it at each launch, and another gives it back.
    Node,
    /// On its way from one of these to another.
    Nobody,
}

impl Origin {
    fn heap(&self) -> Option<&Arc<Heap>> {
        match self {
            Self::Heap(heap) | Self::Ordered { heap, .. } => Some(heap),
            Self::Graph { origin, .. } => origin.heap(),
            Self::User(_) | Self::Node | Self::Nobody => None,
        }
    }
}

// SAFETY: `home` is the only field that is not `Send + Sync` by itself, a pointer to memory that this value owns alone.
// The host reaches it through `host_slice` (shared, `&self`) and `host_slice_mut` (exclusive, `&mut self`), so Rust's
// rules for references hold across threads as they would for a `Box<[u8]>`; the device reaches it in the order that
// `uses` keeps.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory of the device, contents unknown.
    pub(crate) fn on(device: &Device, bytes: usize) -> Result<Owned> {
        if device.is_host() {
            let text = "the host has no device memory: choose a device, `Device::first()` say, or `Buffer::pinned`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Arena::of(device).own(device).alloc(device, bytes, None, Asker::Call(0))
    }

    /// Page-locked memory of the host that `device` copies to and from at full speed.
    pub(crate) fn pinned(device: &Device, bytes: usize) -> Result<Owned> {
        Arena::of(device).pinned(device).alloc(device, bytes, None, Asker::Call(0))
    }

    /// The same, for work that is about to be put into `stream`: the memory belongs to a graph only if that stream is
    /// captured, whatever else the thread captures.
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
            // Whoever waits may see it differently now.
            heap.ledger.tell();
        }
        self.account = Some(account.clone());
    }

    /// True if the host can reach it.
    #[inline]
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.home, Home::Host(_))
    }

    /// Where it lies, for people.
    pub(crate) fn location(&self) -> &str {
        if self.is_host() { "the host" } else { self.device.name() }
    }

    /// True if `device` uses it without a copy.
    #[inline]
    pub(crate) fn is_at(&self, device: &Device) -> bool {
        if self.is_host() { device.is_host() } else { self.device == *device }
    }

    /// Its start, for the device's side of the seam. Host memory has no address there.
    #[inline]
    pub(crate) fn address(&self) -> Result<Address> {
        match self.home {
            Home::Device(address) => Ok(address),
            Home::Host(_) => Err(Error::new(
                ErrorKind::Usage,
                "a kernel or a fill needs device memory, and this lies on the host: copy it to the device first",
            )),
        }
    }

    /// One end of a copy. It may be written through only under the order that `uses` keeps.
    fn place(&self) -> Place {
        match self.home {
            Home::Device(address) => Place::Device(address),
            Home::Host(pointer) => Place::Host(pointer.as_ptr()),
        }
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        if let Some(tie) = self.tie.get() {
            return lock(&tie.uses);
        }
        let uses = lock(&self.uses);
        match self.tie.get() {
            None => uses,
            // Meanwhile.
            Some(tie) => {
                drop(uses);
                lock(&tie.uses)
            }
        }
    }

    /// The same, for whoever has it alone: no lock, unless graphs use it.
    #[inline]
    fn own_uses(&mut self) -> OwnUses<'_> {
        match self.tie.get() {
            None => OwnUses::Own(self.uses.get_mut()),
            Some(tie) => OwnUses::Tied(lock(&tie.uses)),
        }
    }

    /// Makes `stream` wait for what a read must come after.
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
        // Not under the lock: a wait may wake others.
        let uses = self.uses().before_reads();
        uses.before_read(stream, self.outlives_others())
    }

    /// Makes `stream` wait for what a write must come after that leaves some of what is there, or reads it.
    #[inline]
    pub(crate) fn before_write(&mut self, stream: &Stream) -> Result<()> {
        self.before_write_of(stream, false)
    }

    /// The same for a write of the first so many bytes, whatever they were.
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
        if self.tie.get().is_some() {
            // Not under the lock: a wait may wake others.
            let uses = self.uses().clone();
            return uses.before_write(stream, whole, self.outlives_others());
        }
        let outlives = self.outlives_others();
        self.own_uses().before_write(stream, whole, outlives)
    }

    /// What it holds is of no use from now on: it is given out anew.
    #[inline]
    pub(crate) fn discard_contents(&mut self) {
        if self.is_staged() {
            return self.forget_arrivals();
        }
        self.own_uses().discard_contents();
    }

    /// As before a write or a read, where the test hook has switched the tracking of its device off. Two streams whose devices
    /// have none are left to the race checker. It does not see an unchecked handle's streams: those are ordered all the same.
    #[cold]
    fn before_untracked(&self, stream: &Stream, write: bool) -> Result<()> {
        // Not under the lock: a wait may wake others.
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
                // What it forgets is dropped without the lock.
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

    /// Marks its uses now, for whoever comes after them elsewhere.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let _later = Deferred::new();
        self.own_uses().commit()
    }

    /// The same, for one of several who read it.
    pub(crate) fn commit_shared(&self) -> Result<()> {
        let _later = Deferred::new();
        self.uses().commit()
    }

    /// The same; and the last write, if it is this stream's.
    #[inline]
    pub(crate) fn commit_by(&mut self, stream: Option<&Stream>) -> Result<Option<Ticket>> {
        let _later = Deferred::new();
        let mut uses = self.own_uses();
        uses.commit()?;
        let write = uses.write.as_ref().filter(|write| stream.is_some_and(|stream| write.stream().is(stream)));
        Ok(write.map(Ticket::point))
    }

    /// The loss of a device that has written it leaves it as it is: it lies on the host, or on a device that is well.
    #[inline]
    fn outlives_others(&self) -> bool {
        self.is_host() || !self.device.is_lost()
    }

    /// An error if what it holds is known to be lost with a device. Asks no device.
    pub(crate) fn check_contents(&self) -> Result<()> {
        self.uses().check_contents(self.outlives_others())
    }

    /// What the host must wait for before it reads (`write`: or writes).
    pub(crate) fn host_access(&self, write: bool) -> HostAccess {
        let captured = Hold::captured_uses(self, write);
        let uses = self.uses();
        let open = uses.open(write);
        drop(uses);
        HostAccess::of(captured.into_iter().map(|ticket| (ticket, true)).chain(open))
    }

    /// True if all work that was enqueued on it is done and sound: those uses are forgotten then, and with them what else
    /// their streams come after. Asks the device, and does not wait for it.
    ///
    /// # Errors
    /// What that work has failed with.
    pub(crate) fn forget_work(&mut self) -> Result<bool> {
        // Kept until the end: none of them is dropped under the lock.
        let all = self.own_uses().all();
        let open = self.own_uses().open(true);
        for (mut ticket, counts) in open {
            if !ticket.look()? {
                return Ok(false);
            }
            // What a read was good for is no concern of the memory's.
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

    /// Where it lies, for the host.
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
                    "the host cannot look into memory of {}: send the envelope to an operator on the host, or copy to \
                     `Buffer::pinned` with `Stream::copy`",
                    self.device
                ),
            )),
        }
    }

    /// The bytes, for the host to read. An error if a write is in flight.
    pub(crate) fn host_slice(&self) -> Result<&[u8]> {
        let pointer = self.host_pointer()?;
        self.not_of_graphs(false)?;
        self.settled(false)?;
        self.bring_over()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, false)?;
        self.is_borrowed(pointer, false);
        // SAFETY: the memory is this value's own, `bytes` long and initialised (the seam says so). The device does not
        // write to it while `&self` is borrowed: no write is in flight; no node of a graph, or of a capture that may become
        // one, writes it (`not_of_graphs`: counted before the node is added, until no launch of it can come any more); and a
        // new write, or a new node that writes, needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.bytes) })
    }

    /// The bytes, for the host to write. An error if anything is in flight.
    pub(crate) fn host_slice_mut(&mut self) -> Result<&mut [u8]> {
        let pointer = self.host_pointer()?;
        self.writable()?;
        self.not_of_graphs(true)?;
        self.settled(true)?;
        self.bring_over()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, true)?;
        self.is_borrowed(pointer, true);
        // SAFETY: as in `host_slice`; the device neither reads nor writes it, no node of a graph or of a capture uses it, and
        // any new use needs this value, which is borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), self.bytes) })
    }

    fn settled(&self, write: bool) -> Result<()> {
        // Tickets that are forgotten under the lock may be the last to hold a stream.
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
                        "the host would touch memory that stream `{stream}` still uses: await `read()` or `write()` first"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// A look at uses by whoever has the memory alone.
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
