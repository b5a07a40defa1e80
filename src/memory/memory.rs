//! [`Memory`]: a piece of memory and its recorded uses; [`Owned`], its owner; and [`Origin`], the source that it
//! returns to.

use std::{
    any::Any,
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut, Range},
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::{Account, Location, accounting::Extent, shared_uses::SharedUses, uses::Uses};
use crate::{
    device::{
        Device,
        backend::{Address, Endpoint},
    },
    error::{Error, ErrorKind, Result},
    sync::{Mutex, MutexGuard, lock},
};

/// The maximum size of a request. No address space is larger, and sums of larger numbers could overflow.
pub(crate) const MAX_BYTES: usize = (isize::MAX as usize) >> 15;

/// Untyped memory and its recorded uses: [`Owned`], or in the free lists of its heap while streams might still be using
/// it.
pub(crate) struct Memory {
    pub(super) device: Device,
    pub(super) location: Location,
    /// The requested size.
    pub(super) bytes: usize,
    /// The size of its block.
    pub(super) size: u64,
    /// The id of the stream that it was allocated for, 0 for none.
    pub(super) stream: u64,
    /// True for memory of the user that must not be written.
    pub(super) read_only: bool,
    pub(super) uses: Mutex<Uses>,
    /// Set while graphs use the memory too, or parts of it are used: its uses are then recorded here. Reset by
    /// [`uses_mut`](Self::uses_mut).
    pub(super) shared: OnceLock<Arc<SharedUses>>,
    /// For staged memory (see [`host`](super::host)): copies from devices that are not yet transferred to it, oldest
    /// first. Allocated at the first copy.
    pub(super) arrivals: OnceLock<Box<Mutex<Arrivals>>>,
    /// The account that the memory is charged to.
    account: Option<Arc<Account>>,
    /// The origin that the memory returns to. Taken on return.
    pub(super) origin: Option<Arc<dyn Origin>>,
}

pub(super) type Arrivals = SmallVec<[StagedPart; 1]>;

/// A copy from a device that is not yet transferred to staged memory: its data, and its offset there in bytes.
#[derive(Clone)]
pub(super) struct StagedPart {
    pub(super) memory: Arc<Owned>,
    pub(super) offset: usize,
}

impl StagedPart {
    /// The bytes of the staged memory that it overwrites.
    pub(super) fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.memory.bytes()
    }
}

/// The source of a piece of memory, to which the memory returns.
pub(super) trait Origin: Any + Send + Sync {
    /// Takes memory back that its owner has dropped. Never blocks.
    fn take_back(self: Arc<Self>, memory: Box<Memory>);

    /// An operator of this flow now owns memory of this origin.
    fn own(&self, _flow: usize, _bytes: u64) {}

    /// The operator has dropped the memory.
    fn disown(&self, _flow: usize, _bytes: u64) {}
}

// SAFETY: `location` is the only field that is not `Send + Sync` by itself: a pointer to memory that this value owns
// exclusively. The host accesses it through `host_slice` (shared, `&self`) and `host_slice_mut` (exclusive, `&mut
// self`), so Rust's rules for references hold across threads as they would for a `Box<[u8]>`. The device accesses it in
// the order that `uses` maintains.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `stream` is the id of the stream that the memory was allocated for, 0 for none.
    pub(super) fn owned(
        device: Device,
        location: Location,
        extent: Extent,
        stream: u64,
        origin: Arc<dyn Origin>,
    ) -> Owned {
        Owned::new(Box::new(Self {
            device,
            location,
            bytes: extent.bytes as usize,
            size: extent.size,
            stream,
            read_only: false,
            uses: Uses::default().locked(),
            shared: OnceLock::new(),
            arrivals: OnceLock::new(),
            account: None,
            origin: Some(origin),
        }))
    }

    #[inline]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The size of its block and the requested size.
    #[inline]
    pub(super) fn extent(&self) -> Extent {
        Extent { size: self.size, bytes: self.bytes as u64 }
    }

    /// Charges the memory to this account from now on.
    pub(super) fn charge(&mut self, account: &Arc<Account>) {
        account.charge(self.bytes as u64);
        if let Some(origin) = &self.origin {
            origin.own(account.flow(), self.bytes as u64);
        }
        self.account = Some(account.clone());
    }

    #[cold]
    fn discharge(&mut self) {
        let Some(account) = self.account.take() else { return };
        account.discharge(self.bytes as u64);
        if let Some(origin) = &self.origin {
            origin.disown(account.flow(), self.bytes as u64);
        }
    }

    #[inline]
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.location, Location::Host(_))
    }

    /// Its location, for messages.
    pub(crate) fn location(&self) -> &str {
        if self.is_host() { "the host" } else { self.device.name() }
    }

    /// True if `device` can use the memory without a copy.
    #[inline]
    pub(crate) fn is_at(&self, device: &Device) -> bool {
        if self.is_host() { device.is_host() } else { self.device == *device }
    }

    /// Its address for the backend. Host memory has none.
    #[inline]
    pub(crate) fn address(&self) -> Result<Address> {
        match self.location {
            Location::Device(address) => Ok(address),
            Location::Host(_) => Err(Error::new(
                ErrorKind::Usage,
                "a kernel or a fill needs device memory, but this is host memory: copy it to the device first",
            )),
        }
    }

    /// One end of a copy, this many bytes behind the start. The memory may be written through it only in the order that
    /// `uses` maintains.
    pub(super) fn endpoint(&self, offset: usize) -> Endpoint {
        self.location.endpoint(offset)
    }

    /// True for memory of the user that must not be written.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        if self.read_only {
            let text = "this memory is read-only (`Buffer::wrap_read_only`): copy it to a buffer first";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Ok(())
    }

    /// True if no device copies from or to it directly.
    #[inline]
    pub(crate) fn is_staged(&self) -> bool {
        self.device.is_host()
    }

    pub(super) fn uses(&self) -> MutexGuard<'_, Uses> {
        if let Some(shared) = self.shared.get() {
            return lock(&shared.uses);
        }
        let uses = lock(&self.uses);
        match self.shared.get() {
            None => uses,
            // It was set in between.
            Some(shared) => {
                drop(uses);
                lock(&shared.uses)
            }
        }
    }

    /// Like [`uses`](Self::uses), with exclusive access: lock-free unless graphs use the memory. Uses that are no longer
    /// shared move back into the memory.
    #[inline]
    pub(super) fn uses_mut(&mut self) -> UsesMut<'_> {
        match self.shared.get() {
            None => UsesMut::Own(self.uses.get_mut()),
            Some(_) => self.shared_uses_mut(),
        }
    }

    #[cold]
    fn shared_uses_mut(&mut self) -> UsesMut<'_> {
        // The memory is borrowed exclusively, so no part of it exists. A graph, a capture or external work that uses it
        // would have a reference of its own.
        if let Some(shared) = self.shared.get_mut().and_then(Arc::get_mut).filter(|shared| !shared.of_node) {
            self.uses = std::mem::take(shared.uses.get_mut()).locked();
            self.shared.take();
        }
        match self.shared.get() {
            None => UsesMut::Own(self.uses.get_mut()),
            Some(shared) => UsesMut::Shared(lock(&shared.uses)),
        }
    }

    /// The contents are no longer needed: the memory is about to be handed out again.
    #[inline]
    pub(crate) fn discard_contents(&mut self) {
        if self.is_staged() {
            return self.forget_arrivals();
        }
        self.uses_mut().discard_contents();
    }

    /// Discards the contents of staged memory and its arrivals. Nothing accesses the memory.
    pub(super) fn forget_arrivals(&mut self) {
        // Dropped without a lock.
        let uses = std::mem::take(&mut *self.uses_mut());
        drop((uses, std::mem::take(&mut self.arrivals)));
    }

    /// The uses that the memory shares with graphs, or its parts with each other. Created at the first call; from then on
    /// all uses are recorded there, until [`uses_mut`](Self::uses_mut) finds that they are no longer shared.
    pub(super) fn shared_uses(&self) -> &Arc<SharedUses> {
        if let Some(shared) = self.shared.get() {
            return shared;
        }
        let mut uses = lock(&self.uses);
        self.shared.get_or_init(|| Arc::new(SharedUses::new(self.location, self.bytes, std::mem::take(&mut *uses))))
    }

    /// Returns the memory to its origin, after its owner has dropped it. Never blocks.
    pub(super) fn give_back(mut self: Box<Self>) {
        if self.account.is_some() {
            self.discharge();
        }
        if let Some(origin) = self.origin.take() {
            origin.take_back(self);
        }
    }

    /// Returns the memory unless graphs use it. If they do, it returns to `origin` again after the last of these
    /// graphs.
    #[inline]
    pub(super) fn unless_shared(self: Box<Self>, origin: &Arc<impl Origin + 'static>) -> Option<Box<Self>> {
        match self.shared.get() {
            None => Some(self),
            Some(shared) => {
                let shared = shared.clone();
                self.unless_used_by(&shared, origin.clone())
            }
        }
    }

    #[cold]
    fn unless_used_by(mut self: Box<Self>, shared: &SharedUses, origin: Arc<dyn Origin>) -> Option<Box<Self>> {
        let mut state = lock(&shared.state);
        if state.graphs > 0 {
            state.give_back = Some(Box::new(move || origin.take_back(self)));
            return None;
        }
        drop(state);
        self.shared.take();
        self.uses = std::mem::take(&mut *lock(&shared.uses)).locked();
        Some(self)
    }
}

/// An owned piece of memory. When dropped, it returns to its origin.
///
/// It is one pointer. The box goes to the free list of its heap, with its last uses, and is reused from there, so that
/// reuse needs no host allocation.
pub(crate) struct Owned(ManuallyDrop<Box<Memory>>);

impl Owned {
    #[inline]
    pub(super) fn new(memory: Box<Memory>) -> Self {
        Self(ManuallyDrop::new(memory))
    }
}

impl Deref for Owned {
    type Target = Memory;

    #[inline]
    fn deref(&self) -> &Memory {
        &self.0
    }
}

impl DerefMut for Owned {
    #[inline]
    fn deref_mut(&mut self) -> &mut Memory {
        &mut self.0
    }
}

impl Drop for Owned {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken only here, and the value is not used after its drop.
        let memory = unsafe { ManuallyDrop::take(&mut self.0) };
        memory.give_back();
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Exclusive access to the uses of a piece of memory.
pub(super) enum UsesMut<'a> {
    Own(&'a mut Uses),
    Shared(MutexGuard<'a, Uses>),
}

impl Deref for UsesMut<'_> {
    type Target = Uses;

    #[inline]
    fn deref(&self) -> &Uses {
        match self {
            Self::Own(uses) => uses,
            Self::Shared(uses) => uses,
        }
    }
}

impl DerefMut for UsesMut<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Uses {
        match self {
            Self::Own(uses) => uses,
            Self::Shared(uses) => uses,
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("at", &self.location()).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
