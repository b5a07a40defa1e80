//! [`Pool`]: the envelopes of one hub at one location.
//!
//! They are allocated when the hub is made and then reused, in the order of their return: the envelope that has been
//! free longest is lent first, so that work that was still in flight on it has had the most time to complete. The
//! memory of a returned envelope may still be in use by a stream. Its record of uses orders the next user after that,
//! so returning and taking an envelope waits for nothing.
//!
//! In a capture a pool works differently: each envelope is allocated when it is taken, on the stream that takes it,
//! and dropped when it returns. The memory belongs to the graph, which reuses it where its edges order the uses, and
//! only there.

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::Waker,
};

use super::{free_list::FreeList, raw_envelope::RawEnvelope};
use crate::{
    device::Device,
    error::Result,
    memory::{Memory, Owned, check_capacity},
    stream::Stream,
    sync::{Chain, limit_depth},
};

/// Called when an envelope was returned.
type Listener = Box<dyn Fn() + Send + Sync>;

/// Envelopes of one size at one location.
pub(crate) struct Pool {
    hub: Arc<str>,
    count: AtomicUsize,
    bytes: usize,
    /// The free envelopes. Tasks that take from this pool without being the hub's writer wait here.
    home: FreeList<Owned>,
    listener: OnceLock<Listener>,
    /// In a capture: the stream on which the taker works.
    captured: Option<Stream>,
}

impl Pool {
    /// Allocates `count` envelopes of `bytes` bytes in the memory of `at` or, if that is the host, page-locked for
    /// `near`.
    pub(crate) fn new(hub: &Arc<str>, count: usize, bytes: usize, at: &Device, near: &Device) -> Result<Arc<Self>> {
        let pool = Self::empty(hub, bytes);
        pool.add(count, at, near)?;
        Ok(Arc::new(pool))
    }

    fn empty(hub: &Arc<str>, bytes: usize) -> Self {
        Self {
            hub: hub.clone(),
            count: AtomicUsize::new(0),
            bytes,
            home: FreeList::new(),
            listener: OnceLock::new(),
            captured: None,
        }
    }

    /// A pool for users that work on a captured stream. It never runs out of envelopes.
    pub(crate) fn captured(hub: &Arc<str>, bytes: usize, stream: &Stream) -> Arc<Self> {
        let (count, home) = (AtomicUsize::new(usize::MAX), FreeList::endless());
        Arc::new(Self { count, home, captured: Some(stream.clone()), ..Self::empty(hub, bytes) })
    }

    /// A pool of one envelope that uses this memory.
    pub(crate) fn of_one(hub: &Arc<str>, memory: Owned) -> Arc<Self> {
        let pool = Self { count: AtomicUsize::new(1), ..Self::empty(hub, memory.bytes()) };
        pool.home.put(memory);
        Arc::new(pool)
    }

    /// Adds `count` envelopes: all of them or, on error, none. The caller must wake the hub's writer.
    pub(crate) fn add(&self, count: usize, at: &Device, near: &Device) -> Result<()> {
        check_capacity(if at.is_host() { near } else { at }, at.is_host(), self.bytes as u64, count)?;
        let make = || if at.is_host() { Memory::pinned(near, self.bytes) } else { Memory::on(at, self.bytes) };
        let more = (0..count).map(|_| make()).collect::<Result<Vec<_>>>()?;
        self.count.fetch_add(count, Ordering::AcqRel);
        self.home.extend(more);
        Ok(())
    }

    pub(crate) fn listen(&self, listener: Listener) {
        // A pool belongs to one hub for its whole life, so this is set once.
        let _ = self.listener.set(listener);
    }

    pub(crate) fn hub(&self) -> &Arc<str> {
        &self.hub
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The error text for an envelope whose valid part does not fit into one of these.
    pub(super) fn too_small_for(&self, bytes: usize) -> String {
        format!("{bytes} valid bytes do not fit into its envelopes of {} bytes: set `envelope_bytes`", self.bytes)
    }

    pub(crate) fn has(&self, count: usize) -> bool {
        self.home.len() >= count
    }

    /// The pool of envelopes that no longer belong to a hub.
    pub(super) fn none() -> Weak<Self> {
        Arc::downgrade(&Arc::new(Self::empty(&Arc::from(""), 0)))
    }

    /// The number of envelopes, free or in use.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(crate) fn idle(&self) -> usize {
        self.home.len()
    }

    /// Takes a free envelope, if there is one. Its valid part is empty.
    ///
    /// # Errors
    /// In a capture, those of the allocation.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Option<RawEnvelope>> {
        let Some(mut memory) = self.home.take() else { return self.make() };
        memory.discard_contents();
        Ok(Some(RawEnvelope::new(memory, Arc::downgrade(self))))
    }

    #[cold]
    fn make(self: &Arc<Self>) -> Result<Option<RawEnvelope>> {
        let Some(stream) = &self.captured else { return Ok(None) };
        let memory = stream.alloc::<u8>(self.bytes)?.into_memory();
        Ok(Some(RawEnvelope::new(memory, Arc::downgrade(self))))
    }

    /// Allocates memory to replace this one, of the same size and at the same location. Returns `None` if no
    /// replacement is needed.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory); [`DeviceLost`](crate::ErrorKind::DeviceLost).
    pub(super) fn replacement(&self, memory: &Memory) -> Result<Option<Owned>> {
        if self.captured.is_some() {
            return Ok(None);
        }
        let device = memory.device();
        let made = if memory.is_host() { Memory::pinned(device, self.bytes) } else { Memory::on(device, self.bytes) };
        made.map(Some).map_err(|error| error.at(format!("hub `{}`", self.hub)))
    }

    pub(super) fn put(self: Arc<Self>, memory: Owned) {
        if self.captured.is_some() {
            return;
        }
        self.home.put(memory);
        if self.listener.get().is_some() {
            // The hub may now move a message, whose old envelope returns to the previous hub, and so on along the
            // flow.
            limit_depth(Chain::Listeners, move || {
                if let Some(came_home) = self.listener.get() {
                    came_home();
                }
            });
        }
    }

    /// A waiter for an envelope of this pool, other than the hub's writer. There may be several.
    pub(super) fn waiter(self: &Arc<Self>) -> Waiter {
        Waiter { pool: self.clone(), number: self.home.waiter() }
    }
}

/// See [`Pool::waiter`]. Dropping it drops its waker.
pub(super) struct Waiter {
    pool: Arc<Pool>,
    number: u64,
}

impl Waiter {
    /// Whether an envelope is free. Otherwise registers the waker for the next one.
    pub(super) fn poll_home(&self, waker: &Waker) -> bool {
        self.pool.home.poll_some(self.number, waker)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.pool.home.leave(self.number);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("hub", &self.hub)
            .field("count", &self.count)
            .field("bytes", &self.bytes)
            .field("idle", &self.idle())
            .finish_non_exhaustive()
    }
}
