//! [`Envelope`]: memory lent by a hub, with a valid part.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Range, RangeBounds},
    sync::Weak,
};

use super::{Carries, EnvelopeCount, Message, pool::RawEnvelope};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{
        Buffer, BufferState, DeviceSlice, DeviceSliceMut, HostAccess, Plain, Sealed, Slice, SliceMut, View, ViewMut,
        checked_range, elements, elements_mut,
    },
};

/// Memory for elements of one type, on a device or on the host. The first [`len`](Self::len) elements are its valid
/// part: the part that kernels see, that copies move and that the host reads.
///
/// An operator gets it in a message, or blank from its output ([`Output::blank`](crate::Output::blank)). Kernels take it
/// as a slice argument. The host reads and writes it through `.await`, if it is in host memory.
///
/// It belongs to the hub that allocated it. Dropping it returns it to the hub, where it is reused; its next use is
/// ordered after work that is still in flight on it. Sending it on ([`Output::send`](crate::Output::send)) lends it
/// to the next reader.
///
/// An operator that gives an envelope to a task or thread of its own should await its return within `compute`. A flow
/// does not know about such a use, and assumes that the envelope will never return if nothing else makes progress.
///
/// An envelope in the response of a [service](crate::Service) belongs to the caller and to no hub: dropping it frees
/// the memory, a small one together with its [neighbours](crate::HubOptions::envelopes), and the flow does not wait for it.
///
/// The errors of an envelope that came in a response, and of a blank envelope of a service or an
/// [ingress](crate::Ingress), do not name the flow's operators and streams. They have the kind of the original error
/// and a general message; the log has the details.
pub struct Envelope<T: Plain> {
    raw: RawEnvelope,
    of: PhantomData<fn() -> T>,
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

    /// The number of elements of the valid part.
    pub fn len(&self) -> usize {
        self.raw.bytes / size_of::<T>()
    }

    /// Returns true if the valid part is empty.
    pub fn is_empty(&self) -> bool {
        self.raw.bytes == 0
    }

    /// The number of elements that it has room for, which is fixed.
    pub fn capacity(&self) -> usize {
        self.raw.memory().bytes() / size_of::<T>()
    }

    /// Sets the number of valid elements.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it exceeds the capacity.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity() {
            return Err(self.too_long(len));
        }
        self.raw.bytes = len * size_of::<T>();
        Ok(())
    }

    #[cold]
    fn too_long(&self, len: usize) -> Error {
        let capacity = self.capacity();
        let pool = self.raw.pool().upgrade();
        let text = match pool.as_ref().filter(|_| self.raw.external_guards.errors().is_none()) {
            Some(pool) => format!(
                "an envelope of hub `{}` has room for {capacity} elements, not for {len}: raise the hub's envelope size, \
                 with `HubOptions::envelope_bytes` or, for a hub of chunks, `.elements(..)`",
                pool.hub()
            ),
            // No name of a flow is given to its callers.
            None => format!("this envelope has room for {capacity} elements, not for {len}: use a larger one"),
        };
        Error::new(ErrorKind::Usage, text)
    }

    /// The location of its memory: `cuda:0`, `the host`.
    pub fn location(&self) -> &str {
        self.raw.memory().location()
    }

    /// Returns true if it is in host memory.
    pub fn is_host(&self) -> bool {
        self.raw.memory().is_host()
    }

    /// The device whose memory it is in or, for host memory, the device for whose copies it is page-locked.
    pub fn device(&self) -> &Device {
        self.raw.memory().device()
    }

    /// Reads the valid part on the host, after all enqueued writes to it have completed.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is in device memory; [`DeviceLost`](ErrorKind::DeviceLost) if the device is
    /// lost before the write completes.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn read(&self) -> impl Future<Output = Result<&[T]>> + Send {
        async move {
            self.raw.host_access(false).wait().await?;
            self.as_slice()
        }
    }

    /// Gives write access to the valid part on the host, once nothing uses it any more.
    ///
    /// # Errors
    /// The same as for [`Envelope::read`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn write(&mut self) -> impl Future<Output = Result<&mut [T]>> + Send {
        async move {
            self.idle().await?;
            self.as_mut_slice()
        }
    }

    /// Gives write access to the full capacity on the host, once nothing uses it any more. Call
    /// [`set_len`](Self::set_len) afterwards to set how much of it is valid.
    ///
    /// # Errors
    /// The same as for [`Envelope::read`].
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn space(&mut self) -> impl Future<Output = Result<&mut [T]>> + Send {
        async move {
            self.idle().await?;
            self.as_mut_space()
        }
    }

    /// Copies `data` into the envelope on the host, as its valid part.
    ///
    /// ```
    /// # use wakeline::{Envelope, Result};
    /// # async fn fill(mut envelope: Envelope<u8>) -> Result<()> {
    /// envelope.fill_from(b"hello").await?;
    /// assert_eq!(envelope.len(), 5);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `data` exceeds the capacity, or if the envelope is in device memory; the failure of
    /// earlier work on it.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves changes nothing.
    pub async fn fill_from(&mut self, data: &[T]) -> Result<()> {
        if data.len() > self.capacity() {
            return Err(self.too_long(data.len()));
        }
        self.space().await?[..data.len()].copy_from_slice(data);
        self.set_len(data.len())
    }

    /// Swaps the contents of two envelopes of the same size at the same location: their memory and their valid parts.
    /// Nothing is copied.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if their sizes or locations differ, or if one of them wraps a user's buffer, which
    /// cannot be moved.
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
            return refuse(format!("one is on {}, the other on {}", self.location(), other.location()));
        }
        if [&self.raw, &other.raw].iter().any(|raw| raw.pool.ptr_eq(&Weak::new())) {
            return refuse("one of them wraps a user's buffer".into());
        }
        std::mem::swap(&mut self.raw.memory, &mut other.raw.memory);
        std::mem::swap(&mut self.raw.bytes, &mut other.raw.bytes);
        // The marks stay, since each envelope still returns to its own hub.
        self.raw.external_guards.hide_as(&other.raw.external_guards);
        other.raw.external_guards.hide_as(&self.raw.external_guards);
        Ok(())
    }

    /// What a device is doing with it. Queries the device without waiting for it.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn state(&self) -> Result<BufferState> {
        self.raw.redacted(self.raw.memory().state())
    }

    /// Resolves when its data is available: all writes to it that are enqueued so far have completed.
    pub fn available(&self) -> HostAccess {
        self.raw.host_access(false)
    }

    /// Resolves when no enqueued work uses it any more. The host may then access it on any thread, through the
    /// methods that do not wait.
    pub fn idle(&self) -> HostAccess {
        self.raw.host_access(true)
    }

    /// The valid part on the host, without waiting.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is in device memory, or while a write is in flight.
    pub fn as_slice(&self) -> Result<&[T]> {
        let valid = self.len() * size_of::<T>();
        let slice = self.raw.memory().host_slice().and_then(|bytes| elements(&bytes[..valid]));
        self.raw.redacted(slice)
    }

    /// Write access to the valid part on the host, without waiting.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is in device memory, or while anything uses it.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        let len = self.len();
        Ok(&mut self.as_mut_space()?[..len])
    }

    /// Write access to the full capacity on the host, without waiting.
    ///
    /// # Errors
    /// The same as for [`Envelope::as_mut_slice`].
    pub fn as_mut_space(&mut self) -> Result<&mut [T]> {
        let whole = self.capacity() * size_of::<T>();
        let (errors, is_host) = (self.raw.external_guards.errors().cloned(), self.is_host());
        let space = self.raw.memory_mut().host_slice_mut().and_then(|bytes| elements_mut(&mut bytes[..whole]));
        space.map_err(|error| match errors {
            Some(errors) => errors.of_memory(error, is_host),
            None => error,
        })
    }
}

/// Parts of the valid part. They do not change its length.
impl<T: Plain> Envelope<T> {
    /// A part of the valid elements, for a kernel, a copy or another library to read: see [`Slice`].
    ///
    /// ```
    /// use wakeline::{Buffer, Envelope, Stream, prelude::*};
    ///
    /// /// The second of the two planes of a picture, copied to a buffer of its own.
    /// fn second(picture: &Envelope<u8>, plane: &mut Buffer<u8>, stream: &Stream) -> Result<()> {
    ///     stream.copy(&picture.slice(picture.len() / 2..)?, plane)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a range that is not within the valid part.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Slice<'_, T>> {
        Slice::of(self.view()).slice(self.valid_range(range)?)
    }

    /// A part of the valid elements, for a kernel, a copy, a fill or another library to write: see [`SliceMut`].
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice).
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<SliceMut<'_, T>> {
        let range = self.valid_range(range)?;
        SliceMut::of(self.view_mut()).into_slice(range)
    }

    /// The valid elements before `at`, and those from `at` on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `at` is greater than the length of the valid part.
    pub fn split_at(&self, at: usize) -> Result<(Slice<'_, T>, Slice<'_, T>)> {
        self.valid_range(at..)?;
        Slice::of(self.view()).split_at(at)
    }

    /// The valid elements before `at`, and those from `at` on, both for writing at the same time.
    ///
    /// # Errors
    /// Those of [`split_at`](Self::split_at).
    pub fn split_at_mut(&mut self, at: usize) -> Result<(SliceMut<'_, T>, SliceMut<'_, T>)> {
        self.valid_range(at..)?;
        SliceMut::of(self.view_mut()).split_at_mut(at)
    }

    /// The range as positions in the valid part.
    pub(super) fn valid_range(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>> {
        checked_range(range, self.len()).map_err(|error| {
            let capacity = self.capacity();
            error.at(format!(
                "the valid part of an envelope with room for {capacity} elements (see `Envelope::set_len`)"
            ))
        })
    }
}

/// Makes an envelope of a user's buffer, all of it valid. It belongs to no hub and is freed after its last use.
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
    const ENVELOPES: EnvelopeCount = EnvelopeCount::ONE;

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

impl<T: Plain> Carries<T> for Envelope<T> {}

impl<T: Plain> Sealed<T> for Envelope<T> {}

impl<T: Plain> DeviceSlice<T> for Envelope<T> {
    fn view(&self) -> View<'_> {
        View::of(self.raw.memory(), self.len())
    }
}

impl<T: Plain> DeviceSliceMut<T> for Envelope<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let len = self.len();
        ViewMut::of(self.raw.memory_mut(), len)
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
