//! The user's own memory as a buffer, by value and without a copy: a `Vec`, a mapped file, `Bytes`, another library's
//! pointer.
//!
//! ```text
//!              wrap                                  dropped, anywhere
//!   owner ──────────────> buffer, envelope, ... ─────────────────────────┐
//!     ^                                                                  v
//!     └── `into_inner().await`: the streams that use it are done,  ── kept until then
//!         and data from devices was transferred into it
//! ```
//!
//! The owner is in a box that is not accessed until it is returned. So its memory stays at its address, even if the
//! buffer is moved or forgotten. The memory is [staged](super::host).

use std::{any::Any, fmt, marker::PhantomData, mem::ManuallyDrop, ptr::NonNull, sync::Arc};

use tokio::sync::oneshot;

use super::{
    Buffer, HostAccess, Location, Memory, Plain,
    accounting::Extent,
    arena::Arena,
    bytes_of, host,
    memory::{Arrivals, Origin},
    uses::Uses,
};
use crate::{
    device::{Device, backend::Address},
    error::{Error, ErrorKind, Result},
    stream::{Streams, Ticket},
    sync::{DiscardOnDrop, Mutex, discard, lock, proxied},
};

/// A handle that returns the user's memory that a buffer was made from, once the buffer is dropped.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let there = Buffer::from_slice(&stream, &[1_u32, 2, 3])?;
/// let (mut mine, wrapped) = Buffer::wrap(vec![0_u32; 3])?;
/// stream.copy(&there, &mut mine)?;
/// drop(mine);                                   // here, or at the far end of a flow
/// assert_eq!(wrapped.into_inner().await?, [1, 2, 3]);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "without it the memory is dropped with its buffer"]
pub struct Wrapped<O> {
    /// `DiscardOnDrop`: the returned memory may own memory that is returned in the same way, and so on.
    back: DiscardOnDrop<oneshot::Receiver<Returned>>,
    of: PhantomData<fn() -> O>,
}

/// The origin of a buffer over the user's memory.
struct UserOrigin(Mutex<Option<(BoxedOwner, oneshot::Sender<Returned>)>>);

/// The boxed owner, as a raw pointer. Moving a `Box` would assert that no other pointer to it exists, but there is one
/// to its data.
struct BoxedOwner(NonNull<dyn Any + Send>);

// SAFETY: it owns the value that it points to, which is `Send`.
unsafe impl Send for BoxedOwner {}

impl BoxedOwner {
    fn new<O: Send + 'static>(owner: O) -> (Self, NonNull<O>) {
        let first = NonNull::from(Box::leak(Box::new(owner)));
        (Self(first), first)
    }

    /// The owner, if it is an `O`.
    ///
    /// # Safety
    /// The owner keeps device memory, so no pointer to the owner's own data is in use.
    #[cfg(feature = "cuda")]
    unsafe fn get<O: Send + 'static>(&self) -> Option<&O> {
        // SAFETY: leaked in `new`, and not turned back into a box while `self` is borrowed.
        unsafe { self.0.as_ref() }.downcast_ref()
    }

    /// Drops the owner with its device current, which a library's destructor may require.
    fn drop_on(self, device: &Device) {
        if !device.is_host() {
            // After a fault, or on the driver's own thread, the destructor's calls fail too.
            let _ = device.backend().make_current();
        }
        drop(self);
    }

    /// Called once nothing else uses the owner.
    fn into_box(self) -> Box<dyn Any + Send> {
        let owner = ManuallyDrop::new(self);
        // SAFETY: leaked in `new`; turned into a box either here or in `drop`, not both.
        unsafe { Box::from_raw(owner.0.as_ptr()) }
    }
}

impl Drop for BoxedOwner {
    fn drop(&mut self) {
        // SAFETY: as in `into_box`.
        let owner = unsafe { Box::from_raw(self.0.as_ptr()) };
        // The destructor is user code, and may drop memory that was wrapped in the same way.
        discard(owner);
    }
}

/// An owner whose memory streams might still be using, and the arrivals that are not yet transferred to it.
struct Returned {
    owner: Option<BoxedOwner>,
    device: Device,
    location: Location,
    bytes: usize,
    uses: Uses,
    arrivals: Arrivals,
}

// SAFETY: `location` points to the owner's memory, which nothing else accesses; only the holder of this value writes
// through it.
unsafe impl Send for Returned {}

impl<T: Plain> Buffer<T> {
    /// Makes a buffer from your own memory, by value and without a copy: a `Vec<T>`, a `Box<[T]>`, a writable mapped
    /// file. The memory is not page-locked: copies to and from devices are staged through page-locked memory, so that
    /// no stream blocks.
    ///
    /// Like any buffer, it can become an envelope (`Envelope::from`). The handle returns the memory after its last use.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for 0 elements.
    pub fn wrap<O: AsMut<[T]> + Send + 'static>(owner: O) -> Result<(Self, Wrapped<O>)> {
        let (owner, mut pointer) = BoxedOwner::new(owner);
        // SAFETY: just created. The borrow ends when the buffer is dropped, before anything accesses the owner again.
        let data = unsafe { pointer.as_mut() }.as_mut();
        let (first, len) = (NonNull::from(&mut *data).cast::<u8>(), data.len());
        Self::of_user(Device::host(), Location::Host(first), len, owner, false)
    }

    /// Like [`wrap`](Self::wrap), for memory that is only read: `Bytes`, a mapped file, an `Arc<[T]>`. Writing to it is
    /// an error.
    ///
    /// To send parts of a large owner, such as a mapped file, share it: each part is an owner too.
    ///
    /// ```
    /// use std::{ops::Range, sync::Arc};
    /// use wakeline::{Buffer, Envelope};
    ///
    /// /// A part of a file in memory; an `Arc` of a mapped file does as well.
    /// struct Part(Arc<[u8]>, Range<usize>);
    ///
    /// impl AsRef<[u8]> for Part {
    ///     fn as_ref(&self) -> &[u8] {
    ///         &self.0[self.1.clone()]
    ///     }
    /// }
    ///
    /// let file: Arc<[u8]> = Arc::from(*b"one two six");
    /// for start in (0..file.len()).step_by(4) {
    ///     let (part, _) = Buffer::wrap_read_only(Part(file.clone(), start..start + 3))?;
    ///     let envelope = Envelope::from(part);                   // to be sent; nothing was copied
    ///     assert_eq!(envelope.len(), 3);
    /// }
    /// assert_eq!(Arc::strong_count(&file), 1, "all parts are dropped");
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for 0 elements.
    pub fn wrap_read_only<O: AsRef<[T]> + Send + 'static>(owner: O) -> Result<(Self, Wrapped<O>)> {
        let (owner, pointer) = BoxedOwner::new(owner);
        // SAFETY: as in `wrap`; nothing writes to it.
        let data = unsafe { pointer.as_ref() }.as_ref();
        let (first, len) = (NonNull::from(data).cast::<u8>(), data.len());
        Self::of_user(Device::host(), Location::Host(first), len, owner, true)
    }

    /// Makes a buffer from page-locked memory that another library allocated and `owner` keeps. The memory is not
    /// staged: `device` copies to and from it directly.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for 0 elements, for the host, which page-locks nothing, or for a pointer that is not
    /// aligned for the elements.
    ///
    /// # Safety
    /// At `memory` there are `len` initialised elements, page-locked for `device`. Nothing else accesses them until the
    /// owner is returned or dropped, and the owner keeps them at this address.
    pub unsafe fn from_page_locked<O: Send + 'static>(
        device: &Device,
        memory: NonNull<T>,
        len: usize,
        owner: O,
    ) -> Result<(Self, Wrapped<O>)> {
        if device.is_host() {
            let text =
                "the host page-locks no memory: pass the device that it is page-locked for, or use `Buffer::wrap`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if !memory.is_aligned() {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("pointer {memory:?} is not aligned to {} bytes, as the elements require", align_of::<T>()),
            ));
        }
        Self::of_user(device.clone(), Location::Host(memory.cast()), len, BoxedOwner::new(owner).0, false)
    }

    /// Makes a buffer from device memory that another library allocated and `owner` keeps.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for 0 elements, for the host, or for an address that is not aligned for them.
    ///
    /// # Safety
    /// At `address` (a `CUdeviceptr` or, on the emulated device, the address of a [`Buffer`](Self::device_address))
    /// there are `len` elements in the memory of `device`. Nothing else accesses them until the owner is returned or
    /// dropped, and the owner keeps them at this address. Earlier work on them is done.
    pub unsafe fn from_device_address<O: Send + 'static>(
        device: &Device,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<(Self, Wrapped<O>)> {
        if device.is_host() {
            let text = format!("the host has no device memory: pass the device that owns address {address:#x}");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Self::of_device_memory(device, address, len, owner)
    }

    /// A buffer over device memory that `owner` keeps. Fails as [`from_device_address`](Self::from_device_address)
    /// does.
    pub(super) fn of_device_memory<O: Send + 'static>(
        device: &Device,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<(Self, Wrapped<O>)> {
        if !address.is_multiple_of(align_of::<T>() as u64) {
            let text = format!(
                "device address {address:#x} is not aligned to {} bytes, as the elements require",
                align_of::<T>()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Self::of_user(device.clone(), Location::Device(Address(address)), len, BoxedOwner::new(owner).0, false)
    }

    fn of_user<O: Send + 'static>(
        device: Device,
        location: Location,
        len: usize,
        owner: BoxedOwner,
        read_only: bool,
    ) -> Result<(Self, Wrapped<O>)> {
        let bytes = bytes_of::<T>(len)?;
        if bytes == 0 {
            return Err(Error::new(ErrorKind::Usage, "zero-length buffer: wrap at least one element"));
        }
        let (sender, back) = oneshot::channel();
        let origin = UserOrigin(Mutex::new(Some((owner, sender))));
        let extent = Extent { size: bytes as u64, bytes: bytes as u64 };
        let mut memory = Memory::owned(device, location, extent, 0, Arc::new(origin));
        memory.read_only = read_only;
        Ok((Self::of_memory(memory, len), Wrapped { back: DiscardOnDrop::new(back), of: PhantomData }))
    }
}

impl<O: Send + 'static> Wrapped<O> {
    /// Returns the memory once its buffer is dropped, wherever it was sent, and no stream uses it any more. Data that
    /// was copied into the buffer is transferred first.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) if a device was lost that might still access the memory or that had data
    /// for it. The memory is not returned in this case.
    ///
    /// # Cancel safety
    /// Dropping the future drops the memory, after its last use.
    pub async fn into_inner(mut self) -> Result<O> {
        let gone = || {
            let text = "the memory is gone: `Buffer::into_cudarc` has taken it, or the program ended";
            Error::new(ErrorKind::Closed, text)
        };
        let back = self.back.take().ok_or_else(gone)?;
        let mut returned = proxied(back).await.map_err(|_| gone())?;
        returned.settled().await?;
        let owner = returned.owner.take().ok_or_else(gone)?;
        owner.into_box().downcast::<O>().map(|owner| *owner).map_err(|_| gone())
    }
}

impl Returned {
    /// Waits until no work uses the memory, and transfers all arrivals.
    async fn settled(&mut self) -> Result<()> {
        HostAccess::of(self.uses.open(true).into_iter()).wait().await?;
        // The memory of a lost device is not returned, whether or not the device has ended.
        if !self.uses.all_are(Ticket::has_passed) {
            self.device.check()?;
        }
        for arrival in &self.arrivals {
            arrival.memory.host_access(false).wait().await?;
        }
        self.uses = Uses::default();
        // SAFETY: this value holds the owner, so nothing else accesses its memory, and no stream uses it.
        unsafe { host::transfer_arrivals(self.location, self.bytes, &mut self.arrivals) }
    }
}

/// If the memory was not claimed, the owner is dropped once no stream uses its memory any more.
impl Drop for Returned {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        if self.device.is_lost() {
            self.uses.forget_passed()
        } else {
            self.uses.forget_done()
        }
        if !self.uses.is_empty() {
            park(&self.device, std::mem::take(&mut self.uses), self.bytes as u64, owner);
        } else {
            owner.drop_on(&self.device);
        }
    }
}

/// Keeps the owner until the uses have passed, or for ever if a device that might still be using the memory is lost
/// before.
fn park(device: &Device, mut uses: Uses, bytes: u64, owner: BoxedOwner) {
    let totals = Arena::of(device).ledger.totals.clone();
    // The completion monitor ends with its device, so the device is kept alive until the uses are over: they may be
    // another device's.
    let (of, mut owner) = (device.clone(), Some(owner));
    let mut tick = move || {
        let mut lost = of.is_lost();
        for mut ticket in uses.all() {
            let _ = ticket.query();
            lost |= ticket.stream().device().is_lost() && !ticket.is_done();
        }
        if lost {
            totals.leak(bytes);
            std::mem::forget(owner.take());
            return false;
        }
        uses.forget_done();
        if !uses.is_empty() {
            return true;
        }
        if let Some(owner) = owner.take() {
            owner.drop_on(&of);
        }
        false
    };
    if device.is_lost() {
        tick();
        return;
    }
    Streams::of(device).monitor().sweep(Box::new(tick));
}

/// The owner of the user's memory, by type.
#[cfg(feature = "cuda")]
impl Memory {
    /// Calls `with` with the owner, if it is an `O` that keeps device memory. `with` runs under a lock.
    pub(super) fn with_owner<O: Send + 'static, R>(&self, with: impl FnOnce(&O) -> R) -> Option<R> {
        let owner = lock(&self.user_origin()?.0);
        // SAFETY: the origin is that of device memory.
        unsafe { owner.as_ref()?.0.get() }.map(with)
    }

    /// Takes the owner, if it is an `O` that keeps device memory. The caller orders what it does with that memory after
    /// the memory's uses.
    pub(super) fn take_owner<O: Send + 'static>(&self) -> Option<O> {
        // SAFETY: the origin is that of device memory.
        let is_it = |(owner, _): &mut (BoxedOwner, _)| unsafe { owner.get::<O>() }.is_some();
        let (owner, sender) = lock(&self.user_origin()?.0).take_if(is_it)?;
        // Wakes a task that waits for the memory.
        discard(sender);
        owner.into_box().downcast().ok().map(|owner| *owner)
    }

    fn user_origin(&self) -> Option<&UserOrigin> {
        if self.is_host() {
            return None;
        }
        (self.origin.as_deref()? as &dyn Any).downcast_ref()
    }
}

impl Origin for UserOrigin {
    fn take_back(self: Arc<Self>, memory: Box<Memory>) {
        let Some(memory) = memory.unless_shared(&self) else { return };
        let Some((owner, sender)) = lock(&self.0).take() else { return };
        let Memory { device, location, bytes, uses, arrivals, .. } = *memory;
        // No stream accesses staged memory.
        let uses = if device.is_host() { Uses::default() } else { uses.into_inner() };
        let arrivals = arrivals.into_inner().map(|arrivals| arrivals.into_inner()).unwrap_or_default();
        let returned = Returned { owner: Some(owner), device, location, bytes, uses, arrivals };
        // Without the handle, the value is dropped here, and the user's memory with it.
        discard(sender.send(returned));
    }
}

impl<O> fmt::Debug for Wrapped<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapped").field("of", &std::any::type_name::<O>()).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::{device::Emulated, memory::Owned};

    #[test]
    fn the_owner_of_device_memory_is_found_by_its_type_and_taken_once() {
        let device = Device::emulated(Emulated::new());
        let theirs = Buffer::<u32>::new(&device, 4).unwrap();
        let address = theirs.device_address().unwrap();
        let (buffer, wrapped) = Buffer::<u32>::of_device_memory(&device, address, 4, theirs).unwrap();
        let memory = buffer.into_memory();
        let has = |memory: &Owned| memory.with_owner(|_: &Buffer<u32>| ()).is_some();
        assert!(has(&memory) && memory.with_owner(|_: &Buffer<f32>| ()).is_none());
        assert!(memory.take_owner::<Buffer<f32>>().is_none() && has(&memory), "not of this type");
        assert_eq!(memory.take_owner::<Buffer<u32>>().unwrap().len(), 4);
        assert!(memory.take_owner::<Buffer<u32>>().is_none() && !has(&memory), "taken before");
        drop(memory);
        let error = futures::executor::block_on(wrapped.into_inner()).unwrap_err();
        assert!(error.to_string().contains("`Buffer::into_cudarc` has taken it"), "{error}");
        // Memory of wakeline, and the user's memory on the host, whose owner is not accessed.
        let (host, _wrapped) = Buffer::wrap(vec![0_u32; 4]).unwrap();
        for memory in [of_wakeline(&device), host.into_memory()] {
            assert!(memory.with_owner(|_: &Vec<u32>| ()).is_none() && memory.take_owner::<Vec<u32>>().is_none());
        }
    }

    fn of_wakeline(device: &Device) -> Owned {
        Buffer::<u32>::new(device, 4).unwrap().into_memory()
    }
}
