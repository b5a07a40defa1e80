//! [`Envelope`]: a piece of memory lent by a hub, with a valid part.

use std::{
    fmt,
    marker::PhantomData,
    sync::{Arc, Weak},
};

use smallvec::SmallVec;

use super::{
    Message,
    abroad::{Abroad, Marks},
    pool::Pool,
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{
        Buffer, BufferState, DeviceSlice, DeviceSliceMut, HostAccess, Memory, Owned, Plain, Sealed, View, ViewMut,
        elements, elements_mut,
    },
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
};

/// Memory for elements of one type, at one place: a device or the host. The first [`len`](Self::len) elements are its
/// valid part: what kernels see, what copies move, what the host reads.
///
/// It belongs to the hub that allocated it. Dropping it sends it home, where it is used again as soon as what is still
/// in flight on it is ordered before; passing it on ([`Output::send`](crate::Output::send)) lends it further.
///
/// An operator that gives one away to a task or thread of its own should await its return within `compute`: a flow does
/// not know of it, and takes an envelope that is out while nothing else moves for one that never comes home.
///
/// One that came in a [service's](crate::Service) response belongs to the caller and to no hub: dropping it frees the memory,
/// and the flow does not wait for it.
///
/// The errors of one that came in a response, or is a blank one of a service or an [ingress](crate::Ingress), do not name the
/// flow's operators and streams: they have the kind of what happened and a general message, and the log has the rest.
///
/// Kernels take it as a slice argument. The host reads and writes it through `.await`, if it lies on the host.
pub struct Envelope<T: Plain> {
    raw: RawEnvelope,
    of: PhantomData<fn() -> T>,
}

/// An envelope whatever its elements are; what a hub moves: a few words, and the rest behind a pointer.
#[doc(hidden)]
pub struct RawEnvelope {
    /// Only gone while it is dropped.
    memory: Option<Owned>,
    /// Of the valid part.
    bytes: usize,
    home: Weak<Pool>,
    /// The point of its sender's stream at which it was written, while it is on its way.
    stamp: Option<Ticket>,
    /// The flows that it is outside of. Dropped after it has come home.
    marks: Marks,
}

/// What an envelope leaves behind that no longer belongs to a hub.
#[must_use = "the pool waits for its memory"]
pub(super) struct LeftPool {
    replaced: Option<(Arc<Pool>, Owned)>,
    /// The flows that waited for it.
    marks: SmallVec<[Abroad; 1]>,
}

impl LeftPool {
    /// The pool has an envelope as before, and wakes those that wait for one. With no lock held.
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
        Self { memory: Some(memory), bytes: 0, home, stamp: None, marks: Marks::default() }
    }

    /// One without a home, for work on this stream.
    pub(crate) fn on(stream: &Stream, bytes: usize) -> Result<Self> {
        Ok(Self::new(stream.alloc::<u8>(bytes)?.into_memory(), Weak::new()))
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        match &self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope has its memory until it is dropped"),
        }
    }

    #[inline]
    pub(crate) fn memory_mut(&mut self) -> &mut Memory {
        match &mut self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope has its memory until it is dropped"),
        }
    }

    /// Bytes of the valid part.
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

    /// Makes its memory the holder's own, which no flow waits for. Its pool, if there is one, needs other memory in its place.
    ///
    /// # Errors
    /// Those of the allocation. Then nothing has changed.
    pub(super) fn leave_pool(&mut self, no_pool: &Weak<Pool>) -> Result<LeftPool> {
        let mut replaced = None;
        if let Some(pool) = self.home.upgrade() {
            replaced = pool.replacement(self.memory())?.map(|memory| (pool, memory));
            self.home = no_pool.clone();
        }
        Ok(LeftPool { replaced, marks: self.marks.take_lending() })
    }

    pub(super) fn marks_mut(&mut self) -> &mut Marks {
        &mut self.marks
    }

    /// An error of its memory, as its holder gets it: with the kind alone, if that is a caller of a flow.
    fn given<T>(&self, outcome: Result<T>) -> Result<T> {
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

    /// True if all work that was enqueued on it is done: that is forgotten then.
    ///
    /// # Errors
    /// What that work has failed with.
    pub(super) fn forget_work(&mut self) -> Result<bool> {
        let done = self.memory_mut().forget_work();
        self.given(done)
    }

    /// Its uses are marked, for whoever comes after them elsewhere.
    pub(super) fn mark(&self) -> Result<()> {
        self.memory().commit_shared()
    }

    /// It is sent, by an operator with this stream: its uses are marked, for whoever comes after them elsewhere.
    #[inline]
    pub(super) fn depart(&mut self, stream: Option<&Stream>) -> Result<()> {
        let write = self.memory_mut().commit_by(stream)?;
        self.stamp = stream.map(|stream| write.unwrap_or_else(|| stream.beginning()));
        Ok(())
    }

    /// This one takes the other's place in a message.
    pub(super) fn relieve(&mut self, other: &mut Self) {
        self.bytes = other.bytes;
        self.stamp = other.stamp.take();
    }

    /// This one is a copy of the other, for another reader.
    pub(super) fn stand_in_for(&mut self, other: &Self) {
        self.bytes = other.bytes;
        self.stamp = other.stamp.clone();
    }

    #[inline]
    pub(super) fn take_stamp(&mut self) -> Option<Ticket> {
        self.stamp.take()
    }
}

impl Drop for RawEnvelope {
    fn drop(&mut self) {
        let Some(mut memory) = self.memory.take() else { return };
        // A hub that is gone has no use for it: the memory is freed once nothing uses it.
        if let Some(home) = self.home.upgrade().filter(|_| !mutants::is(Mutant::EnvelopeLost)) {
            // Marked by whoever used it, for whoever is given it next; what is wrong with the device, that one learns.
            let _ = memory.commit();
            home.put(memory);
        }
    }
}

impl<T: Plain> Envelope<T> {
    pub(crate) fn of_raw(raw: RawEnvelope) -> Self {
        const { T::FITS }
        Self { raw, of: PhantomData }
    }

    pub(super) fn raw(&self) -> &RawEnvelope {
        &self.raw
    }

    pub(super) fn raw_mut(&mut self) -> &mut RawEnvelope {
        &mut self.raw
    }

    /// Swaps what lies in two envelopes of one size at one place: their memory, and what of it is valid. Nothing is copied.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if their sizes or places differ, or if one of them wraps a buffer of the user's, which
    /// stays where it is.
    pub fn swap(&mut self, other: &mut Self) -> Result<()> {
        let refuse =
            |why: String| Err(Error::new(ErrorKind::Usage, format!("these envelopes cannot be swapped: {why}")));
        if self.capacity() != other.capacity() {
            return refuse(format!(
                "one has room for {} elements, the other for {}",
                self.capacity(),
                other.capacity()
            ));
        }
        let (mine, theirs) = (self.raw.memory(), other.raw.memory());
        if mine.is_host() != theirs.is_host() || (!mine.is_host() && mine.device() != theirs.device()) {
            return refuse(format!("one lies on {}, the other on {}", self.location(), other.location()));
        }
        if [&self.raw, &other.raw].iter().any(|raw| raw.home.ptr_eq(&Weak::new())) {
            return refuse("one wraps a buffer of the user's".into());
        }
        std::mem::swap(&mut self.raw.memory, &mut other.raw.memory);
        std::mem::swap(&mut self.raw.bytes, &mut other.raw.bytes);
        // The marks stay, since each comes home to where it belongs.
        self.raw.marks.hide_as(&other.raw.marks);
        other.raw.marks.hide_as(&self.raw.marks);
        Ok(())
    }

    /// Elements of the valid part.
    pub fn len(&self) -> usize {
        self.raw.bytes / size_of::<T>()
    }

    /// True if nothing in it is valid.
    pub fn is_empty(&self) -> bool {
        self.raw.bytes == 0
    }

    /// Elements that it has room for; fixed.
    pub fn capacity(&self) -> usize {
        self.raw.memory().bytes() / size_of::<T>()
    }

    /// Says how many elements are valid.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it has no room for so many.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity() {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{len} elements cannot be valid in an envelope for {}", self.capacity()),
            ));
        }
        self.raw.bytes = len * size_of::<T>();
        Ok(())
    }

    /// Where it lies: `cuda:0`, `the host`.
    pub fn location(&self) -> &str {
        self.raw.memory().location()
    }

    /// True if it lies on the host.
    pub fn is_host(&self) -> bool {
        self.raw.memory().is_host()
    }

    /// The device that it lies on, or whose copies it is page-locked for.
    pub fn device(&self) -> &Device {
        self.raw.memory().device()
    }

    /// The valid part, once what writes it is done. On the host.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it lies on a device; [`DeviceLost`](ErrorKind::DeviceLost) if the write never
    /// ends.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn read(&self) -> impl Future<Output = Result<&[T]>> + Send {
        async move {
            self.raw.host_access(false).wait().await?;
            self.as_slice()
        }
    }

    /// The valid part to write to, once nothing uses it any more. On the host.
    ///
    /// # Errors
    /// As [`Envelope::read`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn write(&mut self) -> impl Future<Output = Result<&mut [T]>> + Send {
        async move {
            self.idle().await?;
            self.as_mut_slice()
        }
    }

    /// All it has room for, to write to, once nothing uses it any more. On the host. [`set_len`](Self::set_len) then
    /// says how much of it is valid.
    ///
    /// # Errors
    /// As [`Envelope::read`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn space(&mut self) -> impl Future<Output = Result<&mut [T]>> + Send {
        async move {
            self.idle().await?;
            self.as_mut_space()
        }
    }

    /// What a device is doing with it. Asks the device, and does not wait for it.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn state(&self) -> Result<BufferState> {
        self.raw.given(self.raw.memory().state())
    }

    /// Resolves when its data is available: when all that was enqueued until now and writes to it is done.
    pub fn available(&self) -> HostAccess {
        self.raw.host_access(false)
    }

    /// Resolves when nothing that was enqueued uses it any more. Then the host may touch it, on any thread, through the
    /// methods that do not wait.
    pub fn idle(&self) -> HostAccess {
        self.raw.host_access(true)
    }

    /// The valid part, without waiting. On the host.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it lies on a device, or while a write is in flight.
    pub fn as_slice(&self) -> Result<&[T]> {
        let valid = self.len() * size_of::<T>();
        let slice = self.raw.memory().host_slice().and_then(|bytes| elements(&bytes[..valid]));
        self.raw.given(slice)
    }

    /// The valid part to write to, without waiting. On the host.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it lies on a device, or while anything uses it.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        let len = self.len();
        Ok(&mut self.as_mut_space()?[..len])
    }

    /// All it has room for, to write to, without waiting. On the host.
    ///
    /// # Errors
    /// As [`Envelope::as_mut_slice`].
    pub fn as_mut_space(&mut self) -> Result<&mut [T]> {
        let whole = self.capacity() * size_of::<T>();
        let (errors, is_host) = (self.raw.marks.errors().cloned(), self.is_host());
        let space = self.raw.memory_mut().host_slice_mut().and_then(|bytes| elements_mut(&mut bytes[..whole]));
        space.map_err(|error| match errors {
            Some(errors) => errors.of_memory(error, is_host),
            None => error,
        })
    }
}

/// A buffer of the user's own as an envelope, all of it valid. It has no home: it is freed after its last use.
impl<T: Plain> From<Buffer<T>> for Envelope<T> {
    fn from(buffer: Buffer<T>) -> Self {
        let bytes = buffer.len() * size_of::<T>();
        let mut raw = RawEnvelope::new(buffer.into_memory(), Weak::new());
        raw.set_bytes(bytes);
        Self::of_raw(raw)
    }
}

impl<T: Plain> Message for Envelope<T> {
    const CARRIES_ENVELOPES: bool = true;
    const VISITS_UNDER_LOCK: bool = true;
    const ELEMENT_BYTES: usize = size_of::<T>();

    fn envelopes(&mut self, visit: &mut dyn FnMut(&mut RawEnvelope)) {
        visit(&mut self.raw);
    }

    fn size_in_bytes(&self) -> usize {
        self.raw.bytes
    }

    fn heap_bytes(&self) -> usize {
        self.raw.bytes
    }

    const IS_ENVELOPE: bool = true;

    fn into_envelope(self) -> Option<RawEnvelope> {
        Some(self.raw)
    }

    fn of_envelope(envelope: RawEnvelope) -> Option<Self> {
        Some(Self::of_raw(envelope))
    }
}

impl<T: Plain> Sealed<T> for Envelope<T> {}

impl<T: Plain> DeviceSlice<T> for Envelope<T> {
    fn view(&self) -> View<'_> {
        View { memory: self.raw.memory(), len: self.len() }
    }
}

impl<T: Plain> DeviceSliceMut<T> for Envelope<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.len();
        ViewMut { memory: self.raw.memory_mut(), len }
    }
}

impl<T: Plain> fmt::Debug for Envelope<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Envelope")
            .field("of", &std::any::type_name::<T>())
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .field("at", &self.location())
            .finish()
    }
}

impl fmt::Debug for RawEnvelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawEnvelope").field("memory", &self.memory).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
