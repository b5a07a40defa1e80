//! [`Buffer`]: owned device memory or page-locked host memory for elements of one type.

use std::{fmt, marker::PhantomData, sync::Arc};

use super::{
    Account, BufferState, HostAccess, Memory, Owned, Plain, bytes_of, elements, elements_mut, ordering::MemoryMut,
};
use crate::{
    device::{Device, backend::Address},
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket},
};

/// Owned memory for `len` elements, on a device or on the host.
///
/// Streams can use it in any order: each use waits, on the device, for the uses that it must come after. Dropping it
/// never blocks: memory that a stream might still access is kept until that work is done.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let there = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0])?;
/// assert_eq!(there.to_vec(&stream).await?, [1.0, 2.0, 3.0]);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Buffer<T: Plain> {
    memory: Owned,
    len: usize,
    of: PhantomData<fn() -> T>,
}

impl<T: Plain> Buffer<T> {
    /// Device memory for `len` elements, contents unknown.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers; [`Usage`](ErrorKind::Usage) for 0 elements, or for the
    /// host: use [`Buffer::pinned`] there.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        Ok(Self { memory: Memory::on(device, bytes_of::<T>(len)?)?, len, of: PhantomData })
    }

    /// Page-locked host memory for `len` elements, which `device` and all other devices of its kind copy to and from
    /// asynchronously.
    ///
    /// For [`Device::host`] the buffer is ordinary memory, which is cheaper to allocate but slower to copy: each copy
    /// to or from a device goes through page-locked memory, and the host performs a part of the copy.
    ///
    /// # Errors
    /// Those of [`Buffer::new`].
    pub fn pinned(device: &Device, len: usize) -> Result<Self> {
        Ok(Self { memory: Memory::pinned(device, bytes_of::<T>(len)?)?, len, of: PhantomData })
    }

    /// Device memory with a copy of `data`, which is enqueued on `stream`.
    ///
    /// # Errors
    /// Those of [`Buffer::new`].
    pub fn from_slice(stream: &Stream, data: &[T]) -> Result<Self> {
        let (bytes, len) = (bytes_of::<T>(data.len())?, data.len());
        let mut staged = Self::of_memory(Memory::pinned_for(stream, bytes)?, len);
        staged.as_mut_slice()?.copy_from_slice(data);
        let mut there = Self::of_memory(Memory::on_for(stream, bytes)?, len);
        stream.copy(&staged, &mut there)?;
        Ok(there)
    }

    /// Copies the elements to the host, on `stream`, and waits for the copy.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault, [`OutOfMemory`](ErrorKind::OutOfMemory) if no page-locked
    /// memory is available for the copy.
    ///
    /// # Cancel safety
    /// Dropping the future discards the copy. The elements are not changed.
    pub async fn to_vec(&self, stream: &Stream) -> Result<Vec<T>> {
        let mut here = Self::of_memory(Memory::pinned_for(stream, bytes_of::<T>(self.len)?)?, self.len);
        stream.copy(self, &mut here)?;
        Ok(here.read().await?.to_vec())
    }

    #[inline]
    pub(super) fn of_memory(memory: Owned, len: usize) -> Self {
        Self { memory, len, of: PhantomData }
    }

    /// Charges the memory to this account from now on.
    pub(crate) fn charged_to(mut self, account: &Arc<Account>) -> Self {
        self.memory.charge(account);
        self
    }

    pub(crate) fn into_memory(self) -> Owned {
        self.memory
    }

    #[cfg(feature = "cuda")]
    pub(super) fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a buffer has at least one element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device of its memory, or the device that the memory is page-locked for.
    pub fn device(&self) -> &Device {
        self.memory.device()
    }

    /// True for host memory.
    pub fn is_host(&self) -> bool {
        self.memory.is_host()
    }

    /// Its address in the device's memory, for other libraries: a `CUdeviceptr`. wakeline does not order work that is
    /// enqueued with this address; to have it ordered, use [`Stream::external`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for host memory.
    pub fn device_address(&self) -> Result<u64> {
        self.memory.address().map(|address| address.0)
    }

    /// What a device is doing with the buffer. Queries the device without waiting for it.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn state(&self) -> Result<BufferState> {
        self.memory.state()
    }

    /// Resolves when the data is available: when all writes enqueued so far are done. The future may also wait for work
    /// that is enqueued on the writing stream before its first poll. Await it, or make it a condition of an operator's
    /// next run with [`Cx::run_after`](crate::Cx::run_after).
    ///
    /// ```
    /// use wakeline::{Buffer, Stream, device::{Device, Emulated}, memory::BufferState};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let device = Device::emulated(Emulated::new());
    /// let stream = Stream::new(&device)?;
    /// let weights = Buffer::from_slice(&stream, &[0.5_f32; 1024])?;
    /// weights.available().await?;
    /// assert_eq!(weights.state()?, BufferState::Idle);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn available(&self) -> HostAccess {
        self.memory.host_access(false)
    }

    /// The elements, once no write to them is in flight. For host memory only.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory; [`DeviceLost`](ErrorKind::DeviceLost) if the writing device was
    /// lost.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn read(&self) -> impl Future<Output = Result<&[T]>> + Send {
        async move {
            self.memory.host_access(false).wait().await?;
            self.as_slice()
        }
    }

    /// The elements for writing, once no use of them is in flight. For host memory only.
    ///
    /// # Errors
    /// Those of [`Buffer::read`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub fn write(&mut self) -> impl Future<Output = Result<&mut [T]>> + Send {
        async move {
            self.memory.host_access(true).wait().await?;
            self.as_mut_slice()
        }
    }

    /// The elements, without waiting. For host memory only.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory, or while a write is in flight.
    pub fn as_slice(&self) -> Result<&[T]> {
        elements(self.memory.host_slice()?)
    }

    /// The elements for writing, without waiting. For host memory only.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory, or while a use of the elements is in flight.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        elements_mut(self.memory.host_slice_mut()?)
    }
}

impl<T: Plain> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("of", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("at", &self.memory.location())
            .finish()
    }
}

/// Elements that a kernel or a copy can read: a [`Buffer`], an [`Envelope`](crate::Envelope), a chunk, or a
/// [`Slice`](crate::memory::Slice) of one.
///
/// Sealed: its implementors track the uses of their memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not hold elements of `{T}` that a kernel or a copy could read",
    label = "expected a `Buffer<{T}>` or an `Envelope<{T}>`"
)]
pub trait DeviceSlice<T: Plain>: Sealed<T> {
    #[doc(hidden)]
    fn view(&self) -> View<'_>;
}

/// Elements that a kernel or a copy can write.
///
/// Sealed, like [`DeviceSlice`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not hold elements of `{T}` that a kernel or a copy could write",
    label = "expected a `Buffer<{T}>` or an `Envelope<{T}>`"
)]
pub trait DeviceSliceMut<T: Plain>: DeviceSlice<T> {
    #[doc(hidden)]
    fn view_mut(&mut self) -> ViewMut<'_>;
}

// Restricts `DeviceSlice` to the types of this crate: a view of elements of another type would have the wrong length.
mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed<T> {}
}
pub(crate) use sealed::Sealed;

impl<T: Plain> Sealed<T> for Buffer<T> {}

/// Borrowed elements, for the duration of one enqueue.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub(crate) memory: &'a Memory,
    /// The position of the first element, in bytes. The elements lie within the memory.
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// Exclusively borrowed elements: no other view of these elements exists at the same time, so no launch gets the same
/// elements twice.
#[doc(hidden)]
#[derive(Debug)]
pub struct ViewMut<'a> {
    pub(crate) memory: MemoryMut<'a>,
    /// As in [`View`].
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl<'a> View<'a> {
    /// The first `len` elements.
    #[inline]
    pub(crate) fn of(memory: &'a Memory, len: usize) -> Self {
        Self { memory, offset: 0, len }
    }

    /// The same elements, as bytes.
    pub(crate) fn bytes<T>(self) -> Self {
        Self { len: self.len * size_of::<T>(), ..self }
    }

    /// Its address for the backend. Host memory has none.
    pub(super) fn address(&self) -> Result<Address> {
        self.memory.address().map(|start| Address(start.0 + self.offset as u64))
    }
}

impl<'a> ViewMut<'a> {
    /// The first `len` elements.
    #[inline]
    pub(crate) fn of(memory: &'a mut Memory, len: usize) -> Self {
        Self { memory: MemoryMut::Whole(memory), offset: 0, len }
    }

    /// The same elements, as bytes.
    pub(super) fn bytes<T>(self) -> Self {
        Self { len: self.len * size_of::<T>(), ..self }
    }
}

/// Elements that one operation uses, and how.
#[derive(Debug)]
pub(super) enum Access<'a> {
    Read(View<'a>),
    Write(ViewMut<'a>),
}

impl Access<'_> {
    pub(super) fn writes(&self) -> bool {
        matches!(self, Self::Write(_))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Read(view) => view.len,
            Self::Write(view) => view.len,
        }
    }

    /// Their address, for work on a stream of the same device.
    pub(super) fn reachable(&self, stream: &Stream) -> Result<Address> {
        let (memory, offset) = match self {
            Self::Read(view) => (view.memory, view.offset),
            Self::Write(view) => (&*view.memory, view.offset),
        };
        let address = memory.address()?;
        if memory.device() == stream.device() {
            return Ok(Address(address.0 + offset as u64));
        }
        Err(Error::new(
            ErrorKind::Usage,
            format!(
                "the stream is on {}, but an argument is on {}: copy the argument to the stream's device first",
                stream.device(),
                memory.device()
            ),
        ))
    }

    pub(super) fn memory(&self) -> &Memory {
        match self {
            Self::Read(view) => view.memory,
            Self::Write(view) => &view.memory,
        }
    }

    /// Makes the stream wait for the uses that this access must come after.
    pub(super) fn order(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Read(view) => view.memory.before_read(stream),
            Self::Write(view) => view.memory.before_write(stream),
        }
    }

    pub(super) fn note(&mut self, ticket: &Ticket) {
        match self {
            Self::Read(view) => view.memory.note_read(ticket),
            Self::Write(view) => view.memory.note_write(ticket),
        }
    }
}

impl<T: Plain> DeviceSlice<T> for Buffer<T> {
    fn view(&self) -> View<'_> {
        View::of(&self.memory, self.len)
    }
}

impl<T: Plain> DeviceSliceMut<T> for Buffer<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::of(&mut self.memory, self.len)
    }
}
