//! A user's own memory as a buffer, by value and without a copy: a `Vec`, a mapped file, `Bytes`, another library's pointer.
//!
//! ```text
//!              wrap                                  dropped, wherever it has gone
//!   owner ──────────────> buffer, envelope, ... ────────────────────────────────────┐
//!     ^                                                                             v
//!     └── `into_inner().await`: the streams that use it are done, what came from a device is in it ── kept until then
//! ```
//!
//! The owner is moved into a box that nobody touches until it is given back: so its memory stays where it is, whoever holds
//! the buffer, and whatever they forget. It is [staged](super::staging).

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{
    Buffer, Home, HostAccess, Memory, Origin, Owned, Plain,
    access::Uses,
    buffer::bytes_of,
    ledger::Arena,
    staging::{self, Staging},
};
use crate::{
    device::{Device, backend::Address},
    error::{Error, ErrorKind, Result},
    stream::{Streams, Ticket},
    sync::{Discarded, discard, proxied},
};

/// The handle to memory of the user's that a buffer was made of: it gives that back.
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
    /// What has come back may own memory that comes back here, and so on.
    back: Discarded<oneshot::Receiver<Returned>>,
    of: PhantomData<fn() -> O>,
}

/// Where a buffer of the user's memory goes to.
pub(super) struct User {
    owner: Option<Owner>,
    tell: Option<oneshot::Sender<Returned>>,
    read_only: bool,
}

/// The owner in a box, of which this is the only pointer but for the one to its data. Not a `Box`: whoever moves one of
/// those says that nobody else has a pointer into it.
struct Owner(NonNull<dyn Any + Send>);

// SAFETY: it owns what it points to, which is `Send`.
unsafe impl Send for Owner {}

impl Owner {
    fn new<O: Send + 'static>(owner: O) -> (Self, NonNull<O>) {
        let first = NonNull::from(Box::leak(Box::new(owner)));
        (Self(first), first)
    }

    /// It is used by nobody else any more.
    fn into_box(self) -> Box<dyn Any + Send> {
        let owner = ManuallyDrop::new(self);
        // SAFETY: leaked in `new`; it is made a box of here or in `drop`, and not in both.
        unsafe { Box::from_raw(owner.0.as_ptr()) }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: as in `into_box`.
        let owner = unsafe { Box::from_raw(self.0.as_ptr()) };
        // The destructor is user code, and may drop memory that was wrapped in the same way.
        discard(owner);
    }
}

/// An owner whose memory streams may still use; what it lacks is still to be brought over.
struct Returned {
    owner: Option<Owner>,
    device: Device,
    home: Home,
    bytes: usize,
    uses: Uses,
    arrivals: SmallVec<[Arc<Owned>; 1]>,
}

// SAFETY: `home` points to the owner's memory, which nobody else touches; it is written through by whoever holds the value.
unsafe impl Send for Returned {}

impl<T: Plain> Buffer<T> {
    /// A buffer of memory of one's own, taken by value, without a copy: a `Vec<T>`, a `Box<[T]>`, a writable mapped file. It
    /// lies on the host, and is not page-locked: copies to and from devices are staged, through page-locked memory of
    /// wakeline's, so that no stream ever stops for it.
    ///
    /// It becomes an envelope as any buffer does (`Envelope::from`). The handle gives the memory back after its last use.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for no elements.
    pub fn wrap<O: AsMut<[T]> + Send + 'static>(owner: O) -> Result<(Self, Wrapped<O>)> {
        let (owner, mut pointer) = Owner::new(owner);
        // SAFETY: it was just made; the borrow ends when the buffer is gone, before anybody touches the owner again.
        let data = unsafe { pointer.as_mut() }.as_mut();
        let (first, len) = (NonNull::from(&mut *data).cast::<u8>(), data.len());
        Self::of_user(Device::host(), Home::Host(first), len, owner, false)
    }

    /// As [`wrap`](Self::wrap), of memory that is only to be read: `Bytes`, a mapped file, an `Arc<[T]>`. Whoever writes to it
    /// gets an error.
    ///
    /// To send parts of a large owner, such as a mapped file, share it: each part is an owner too.
    ///
    /// ```
    /// use std::{ops::Range, sync::Arc};
    /// use wakeline::{Buffer, Envelope};
    ///
    /// /// A part of a file in memory; an `Arc` of a mapped file does as well.
    /// struct Piece(Arc<[u8]>, Range<usize>);
    ///
    /// impl AsRef<[u8]> for Piece {
    ///     fn as_ref(&self) -> &[u8] {
    ///         &self.0[self.1.clone()]
    ///     }
    /// }
    ///
    /// let file: Arc<[u8]> = Arc::from(*b"one two six");
    /// for start in (0..file.len()).step_by(4) {
    ///     let (piece, _) = Buffer::wrap_read_only(Piece(file.clone(), start..start + 3))?;
    ///     let envelope = Envelope::from(piece);                  // to be sent; nothing was copied
    ///     assert_eq!(envelope.len(), 3);
    /// }
    /// assert_eq!(Arc::strong_count(&file), 1, "the last piece is gone");
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for no elements.
    pub fn wrap_read_only<O: AsRef<[T]> + Send + 'static>(owner: O) -> Result<(Self, Wrapped<O>)> {
        let (owner, pointer) = Owner::new(owner);
        // SAFETY: as in `wrap`; nobody writes to it.
        let data = unsafe { pointer.as_ref() }.as_ref();
        let (first, len) = (NonNull::from(data).cast::<u8>(), data.len());
        Self::of_user(Device::host(), Home::Host(first), len, owner, true)
    }

    /// A buffer of page-locked memory that somebody else made and `owner` keeps: it is not staged, `device` copies to and
    /// from it itself.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for no elements, for the host, which page-locks nothing, or for a pointer that is not aligned for
    /// the elements.
    ///
    /// # Safety
    /// From `memory` on there are `len` initialised elements, page-locked for `device`, which nobody else touches until the
    /// owner is given back or dropped, and which the owner keeps where they are.
    pub unsafe fn from_page_locked<O: Send + 'static>(
        device: &Device,
        memory: NonNull<T>,
        len: usize,
        owner: O,
    ) -> Result<(Self, Wrapped<O>)> {
        if device.is_host() {
            let text = "the host page-locks no memory: say which device it is page-locked for, or take `Buffer::wrap`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if !memory.is_aligned() {
            return Err(Error::new(ErrorKind::Usage, format!("{memory:?} is not aligned for the elements")));
        }
        Self::of_user(device.clone(), Home::Host(memory.cast()), len, Owner::new(owner).0, false)
    }

    /// A buffer of device memory that another library made and `owner` keeps.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for no elements, for the host, or for an address that is not aligned for them.
    ///
    /// # Safety
    /// From `address` on (a `CUdeviceptr`, or, on the emulated device, one of a [`Buffer`](Self::device_address)'s) there
    /// are `len` elements in the memory of `device`, which nobody else touches until the owner is given back or dropped, and
    /// which the owner keeps where they are. What was done with it before is done.
    pub unsafe fn from_device_address<O: Send + 'static>(
        device: &Device,
        address: u64,
        len: usize,
        owner: O,
    ) -> Result<(Self, Wrapped<O>)> {
        if device.is_host() || !address.is_multiple_of(align_of::<T>() as u64) {
            let text = format!("{address:#x} is no address of elements in the memory of {device}");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Self::of_user(device.clone(), Home::Device(Address(address)), len, Owner::new(owner).0, false)
    }

    fn of_user<O: Send + 'static>(
        device: Device,
        home: Home,
        len: usize,
        owner: Owner,
        read_only: bool,
    ) -> Result<(Self, Wrapped<O>)> {
        let bytes = bytes_of::<T>(len)?;
        if bytes == 0 {
            return Err(Error::new(ErrorKind::Usage, "memory of 0 bytes: at least one element"));
        }
        let (tell, back) = oneshot::channel();
        let user = User { owner: Some(owner), tell: Some(tell), read_only };
        let origin = Origin::User(Box::new(user));
        let size = bytes as u64;
        let (uses, tie, staging) = (Uses::default().locked(), OnceLock::new(), Staging::default());
        let memory = Memory { device, home, bytes, size, lane: 0, uses, tie, staging, account: None, origin };
        Ok((
            Self::of_memory(Owned::new(Box::new(memory)), len),
            Wrapped { back: Discarded::new(back), of: PhantomData },
        ))
    }
}

impl<O: Send + 'static> Wrapped<O> {
    /// The memory, once the buffer that was made of it is dropped, wherever it has gone, and no stream uses it any more.
    /// What was copied into it is there.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) if a device was lost that may still touch it, or had something for it: then it
    /// is not given back.
    ///
    /// # Cancel safety
    /// Dropping the future drops the memory, after its last use.
    pub async fn into_inner(self) -> Result<O> {
        let gone = || Error::new(ErrorKind::Closed, "the memory went with the program's end");
        let back = self.back.take().ok_or_else(gone)?;
        let mut returned = proxied(back).await.map_err(|_| gone())?;
        returned.settled().await?;
        let owner = returned.owner.take().ok_or_else(gone)?;
        owner.into_box().downcast::<O>().map(|owner| *owner).map_err(|_| gone())
    }
}

impl Returned {
    /// Resolves when nothing uses it, and all is in it that was on its way.
    async fn settled(&mut self) -> Result<()> {
        HostAccess::of(self.uses.open(true).into_iter()).wait().await?;
        // Memory of a lost device is left to that, whether or not it has ended.
        if !self.uses.all_are(Ticket::has_passed) {
            self.device.check()?;
        }
        for arrival in &self.arrivals {
            arrival.host_access(false).wait().await?;
        }
        self.uses = Uses::default();
        // SAFETY: the owner is here, so nobody else has its memory, and no stream uses it.
        unsafe { staging::bring_over(self.home, self.bytes, &mut self.arrivals) }
    }
}

/// Nobody wants it back: it goes when no stream uses it any more.
impl Drop for Returned {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        if self.device.is_lost() {
            self.uses.forget_passed()
        } else {
            self.uses.forget_done()
        }
        if self.uses.any_is(|_| true) {
            park(&self.device, std::mem::take(&mut self.uses), self.bytes as u64, owner);
        }
    }
}

/// Keeps the owner until the uses have passed; for ever, if a device that may still use the memory is lost before.
fn park(device: &Device, mut uses: Uses, bytes: u64, owner: Owner) {
    let ledger = Arena::of(device).ledger.clone();
    // The lookout that calls this ends with the device, which therefore lives until the uses are over: they may be another
    // device's.
    let (of, mut owner) = (device.clone(), Some(owner));
    let mut beat = move || {
        let mut lost = of.is_lost();
        for mut ticket in uses.all() {
            let _ = ticket.look();
            lost |= ticket.stream().device().is_lost() && !ticket.is_done();
        }
        if lost {
            ledger.leak(bytes);
            std::mem::forget(owner.take());
            return false;
        }
        uses.forget_done();
        if uses.any_is(|_| true) {
            return true;
        }
        drop(owner.take());
        false
    };
    if device.is_lost() {
        beat();
        return;
    }
    Streams::of(device).lookout().sweep(Box::new(beat));
}

impl User {
    /// The buffer is gone.
    pub(super) fn give_back(&mut self, device: &Device, home: Home, bytes: usize, uses: Uses, staging: Staging) {
        let owner = self.owner.take();
        // No stream touches what is staged.
        let uses = if device.is_host() { Uses::default() } else { uses };
        let returned = Returned { owner, device: device.clone(), home, bytes, uses, arrivals: staging.into_inner() };
        if let Some(tell) = self.tell.take() {
            // If nobody listens it is dropped here, and the user's memory with it.
            discard(tell.send(returned));
        }
    }
}

impl Memory {
    fn user(&self) -> Option<&User> {
        match &self.origin {
            Origin::User(user) => Some(user),
            _ => None,
        }
    }

    /// True for memory of the user's that must not be written.
    pub(crate) fn is_read_only(&self) -> bool {
        self.user().is_some_and(|user| user.read_only)
    }

    /// An error if it must not be written.
    pub(super) fn writable(&self) -> Result<()> {
        match self.user() {
            Some(user) if user.read_only => {
                let text =
                    "this memory was wrapped to be read only (`Buffer::wrap_read_only`): copy it to a buffer first";
                Err(Error::new(ErrorKind::Usage, text))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("read_only", &self.read_only).finish_non_exhaustive()
    }
}

impl<O> fmt::Debug for Wrapped<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrapped").field("of", &std::any::type_name::<O>()).finish_non_exhaustive()
    }
}
