//! [`Pool`] and [`RawEnvelope`]: the envelopes of one hub at one location.
//!
//! They are allocated when the hub is made and then reused, in the order of their return: the envelope that has been
//! free longest is lent first, so that work that was still in flight on it has had the most time to complete. A stream
//! might still be using the memory of a returned envelope. The memory's record of uses orders the next user after that
//! work, so returning and taking an envelope waits for nothing.
//!
//! ```text
//!   take ──> RawEnvelope: filled, sent, moved, read ──drop──> its uses are committed ──> put: the hub's listener is called
//! ```
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

use smallvec::SmallVec;

use super::{
    external_guard::{ExternalGuard, ExternalGuards},
    free_list::FreeList,
};
use crate::{
    device::Device,
    error::Result,
    memory::{HostAccess, Memory, Owned, check_capacity},
    mutants::{self, Mutant},
    stream::{Stream, Ticket},
    sync::{Chain, limit_depth},
};

/// The size of one copy for several envelopes: the first of them arrives with the last, 10 us later at 50 GB/s than alone.
/// The host needs 2.1 us for each further copy (`guide/facts.md`).
const MAX_JOINED_BYTES: usize = 512 << 10;

/// The size of one allocation for several envelopes. It is freed with the last of them, which may belong to a caller of
/// the flow by then.
const SLAB_BYTES: usize = 2 << 20;

/// The maximum number of envelopes in one copy.
pub(super) const MAX_JOINED: usize = 8;

/// Called when an envelope was returned.
type Listener = Box<dyn Fn() + Send + Sync>;

/// Envelopes of one size at one location.
pub(crate) struct Pool {
    hub: Arc<str>,
    count: AtomicUsize,
    bytes: usize,
    /// The free envelopes. Tasks that take from this pool without being the hub's writer wait here.
    free: FreeList<Owned>,
    listener: OnceLock<Listener>,
    /// In a capture: the stream on which the taker works.
    captured: Option<Stream>,
    /// Its messages may be moved together.
    is_joined: bool,
}

impl Pool {
    /// Allocates `count` envelopes of `bytes` bytes in the memory of `at` or, if that is the host, page-locked for
    /// `near`.
    pub(crate) fn new(hub: &Arc<str>, count: usize, bytes: usize, at: &Device, near: &Device) -> Result<Arc<Self>> {
        let pool = Self::empty(hub, bytes);
        pool.add(count, at, near)?;
        Ok(Arc::new(pool))
    }

    /// Like [`new`](Self::new), for messages that may be moved together: small envelopes lie one behind the other, as long
    /// as they are used in the order in which they were allocated.
    pub(super) fn joined(hub: &Arc<str>, count: usize, bytes: usize, at: &Device, near: &Device) -> Result<Arc<Self>> {
        let pool = Self { is_joined: true, ..Self::empty(hub, bytes) };
        pool.add(count, at, near)?;
        Ok(Arc::new(pool))
    }

    fn empty(hub: &Arc<str>, bytes: usize) -> Self {
        Self {
            hub: hub.clone(),
            count: AtomicUsize::new(0),
            bytes,
            free: FreeList::new(),
            listener: OnceLock::new(),
            captured: None,
            is_joined: false,
        }
    }

    /// A pool for users that work on a captured stream. It never runs out of envelopes.
    pub(crate) fn captured(hub: &Arc<str>, bytes: usize, stream: &Stream) -> Arc<Self> {
        let (count, free) = (AtomicUsize::new(usize::MAX), FreeList::endless());
        Arc::new(Self { count, free, captured: Some(stream.clone()), ..Self::empty(hub, bytes) })
    }

    /// A pool of one envelope that uses this memory.
    pub(crate) fn of_one(hub: &Arc<str>, memory: Owned) -> Arc<Self> {
        let pool = Self { count: AtomicUsize::new(1), ..Self::empty(hub, memory.bytes()) };
        pool.free.put(memory);
        Arc::new(pool)
    }

    /// Adds `count` envelopes: all of them or, on error, none. The caller must wake the hub's writer.
    pub(crate) fn add(&self, count: usize, at: &Device, near: &Device) -> Result<()> {
        check_capacity(if at.is_host() { near } else { at }, at.is_host(), self.bytes as u64, count)?;
        let make = |bytes| if at.is_host() { Memory::pinned(near, bytes) } else { Memory::on(at, bytes) };
        let mut more = Vec::with_capacity(count);
        if self.most_joined_of(count) > 1 {
            let pieces = (SLAB_BYTES / self.bytes.max(1)).clamp(MAX_JOINED, 4 * MAX_JOINED);
            for left in (1..=count).rev().step_by(pieces) {
                // Where there is no memory in one piece, there may be some in several.
                more.extend(Memory::slab(left.min(pieces), self.bytes, make).into_iter().flatten());
            }
        }
        while more.len() < count {
            more.push(make(self.bytes)?);
        }
        self.count.fetch_add(count, Ordering::AcqRel);
        self.free.extend(more);
        Ok(())
    }

    /// The number of its envelopes that may be copied to by one copy: 1 if they are copied one by one.
    #[inline]
    pub(super) fn most_joined(&self) -> usize {
        self.most_joined_of(self.count())
    }

    fn most_joined_of(&self, count: usize) -> usize {
        let by_size = MAX_JOINED_BYTES / self.bytes.max(1);
        if self.is_joined { (count / 4).min(by_size).clamp(1, MAX_JOINED) } else { 1 }
    }

    pub(super) fn listen(&self, listener: Listener) {
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
        format!(
            "an envelope with {bytes} valid bytes does not fit into the hub's envelopes of {} bytes: increase `envelope_bytes`",
            self.bytes
        )
    }

    pub(crate) fn has(&self, count: usize) -> bool {
        self.free.len() >= count
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
        self.free.len()
    }

    /// Takes a free envelope, if there is one. Its valid part is empty.
    ///
    /// # Errors
    /// In a capture, the errors of the allocation.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Option<RawEnvelope>> {
        let Some(mut memory) = self.free.take() else { return self.make() };
        memory.discard_contents();
        Ok(Some(RawEnvelope::new(memory, Arc::downgrade(self))))
    }

    #[cold]
    fn make(self: &Arc<Self>) -> Result<Option<RawEnvelope>> {
        let Some(stream) = &self.captured else { return Ok(None) };
        let memory = stream.alloc::<u8>(self.bytes)?.into_memory();
        Ok(Some(RawEnvelope::new(memory, Arc::downgrade(self))))
    }

    /// Allocates memory to replace this one, of the same size and at the same location; on the host, page-locked for
    /// `near`. Returns `None` if no replacement is needed.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory); [`DeviceLost`](crate::ErrorKind::DeviceLost).
    fn replacement(&self, memory: &Memory, near: &Device) -> Result<Option<Owned>> {
        if self.captured.is_some() {
            return Ok(None);
        }
        let made =
            if memory.is_host() { Memory::pinned(near, self.bytes) } else { Memory::on(memory.device(), self.bytes) };
        made.map(Some).map_err(|error| error.at(format!("hub `{}`", self.hub)))
    }

    /// Makes the memory free again. Call [`call_listener`](Self::call_listener) after it.
    fn put(&self, memory: Owned) {
        if self.captured.is_some() {
            return;
        }
        self.free.put(memory);
    }

    /// Called after envelopes were returned, with no lock held.
    fn call_listener(self: Arc<Self>) {
        if self.captured.is_none() && self.listener.get().is_some() {
            // The hub may now move a message, whose old envelope returns to the previous hub, and so on along the
            // flow.
            limit_depth(Chain::Listeners, move || {
                if let Some(returned) = self.listener.get() {
                    returned();
                }
            });
        }
    }

    /// A waiter for an envelope of this pool that is not the hub's writer. A pool can have several.
    pub(super) fn waiter(self: &Arc<Self>) -> Waiter {
        Waiter { pool: self.clone(), number: self.free.waiter() }
    }
}

/// See [`Pool::waiter`]. Dropping it drops its waker.
pub(super) struct Waiter {
    pool: Arc<Pool>,
    number: u64,
}

impl Waiter {
    /// Whether an envelope is free. Otherwise registers the waker for the next one.
    pub(super) fn poll_free(&self, waker: &Waker) -> bool {
        self.pool.free.poll_some(self.number, waker)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.pool.free.leave(self.number);
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

/// An envelope of any element type, as hubs move it: a few words, with the rest behind a pointer.
#[doc(hidden)]
pub struct RawEnvelope {
    /// `None` only while it is dropped, and while its hub copies to it together with others.
    pub(super) memory: Option<Owned>,
    /// The size of the valid part.
    pub(super) bytes: usize,
    /// The point in its sender's stream at which it was last written, while it is in transit.
    pub(super) ticket: Option<Ticket>,
    pub(super) pool: Weak<Pool>,
    /// The flows that it is outside of. Dropped after its memory was returned.
    pub(super) external_guards: ExternalGuards,
}

/// What remains to be done for a hub after an envelope has left it for good.
#[must_use = "the pool waits for its memory"]
pub(super) struct PoolReplacement {
    replaced: Option<(Arc<Pool>, Owned)>,
    /// The flows that waited for the envelope.
    external_guards: SmallVec<[ExternalGuard; 1]>,
}

impl PoolReplacement {
    /// Gives the pool its replacement, which wakes the tasks that wait for one. Call it with no lock held.
    pub(super) fn complete(self) {
        let Self { replaced, external_guards } = self;
        if let Some((pool, memory)) = replaced {
            pool.put(memory);
            pool.call_listener();
        }
        // Last: if the flow were idle for a moment in between, that would be reported as a stall.
        drop(external_guards);
    }
}

impl RawEnvelope {
    pub(crate) fn new(memory: Owned, pool: Weak<Pool>) -> Self {
        Self { memory: Some(memory), bytes: 0, ticket: None, pool, external_guards: ExternalGuards::default() }
    }

    /// An envelope without a pool, for work on this stream.
    pub(crate) fn on(stream: &Stream, bytes: usize) -> Result<Self> {
        Ok(Self::new(stream.alloc::<u8>(bytes)?.into_memory(), Weak::new()))
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Memory {
        match &self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope owns its memory until it is dropped"),
        }
    }

    #[inline]
    pub(crate) fn memory_mut(&mut self) -> &mut Memory {
        match &mut self.memory {
            Some(memory) => memory,
            None => unreachable!("an envelope owns its memory until it is dropped"),
        }
    }

    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn set_bytes(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    pub(crate) fn pool(&self) -> &Weak<Pool> {
        &self.pool
    }

    /// Gives the memory to the envelope's holder, so that no flow waits for it. Its pool, if there is one, gets replacement
    /// memory.
    ///
    /// # Errors
    /// The errors of the allocation. Nothing has changed then.
    pub(super) fn leave_pool(&mut self, no_pool: &Weak<Pool>) -> Result<PoolReplacement> {
        let mut replaced = None;
        if let Some(pool) = self.pool.upgrade() {
            replaced = pool.replacement(self.memory(), self.memory().device())?.map(|memory| (pool, memory));
            self.pool = no_pool.clone();
        }
        Ok(PoolReplacement { replaced, external_guards: self.external_guards.take_lending() })
    }

    /// Called with a blank envelope: if a lost device might still be using its memory, replaces the memory, because a
    /// wait for that device would fail. Host memory is page-locked for `near`. If the replacement cannot be
    /// allocated, the memory is kept, and its next user gets the error of that device.
    pub(super) fn replace_used_by_lost(&mut self, near: &Device) {
        if let Some(pool) = self.pool.upgrade()
            && self.memory().is_used_by_lost()
            && let Ok(Some(memory)) = pool.replacement(self.memory(), near)
        {
            self.memory = Some(memory);
        }
    }

    pub(super) fn external_guards_mut(&mut self) -> &mut ExternalGuards {
        &mut self.external_guards
    }

    /// Converts an error of its memory for its holder: if that is a caller of a flow, only the error's kind is kept.
    pub(super) fn redacted<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.map_err(|error| match self.external_guards.errors() {
            Some(errors) => errors.of_memory(error, self.memory().is_host()),
            None => error,
        })
    }

    pub(super) fn host_access(&self, write: bool) -> HostAccess {
        let access = self.memory().host_access(write);
        match self.external_guards.errors() {
            Some(errors) => access.for_caller(errors),
            None => access,
        }
    }

    /// Returns true if all work that was enqueued on it is complete; its record of uses is then cleared.
    ///
    /// # Errors
    /// The failure of that work.
    pub(super) fn forget_work(&mut self) -> Result<bool> {
        let done = self.memory_mut().forget_work();
        self.redacted(done)
    }

    /// Commits its uses, so that users elsewhere can be ordered after them.
    pub(super) fn commit_uses(&self) -> Result<()> {
        self.memory().commit_shared()
    }

    /// Called when it is sent by an operator with this stream. Commits its uses, so that users elsewhere can be
    /// ordered after them.
    #[inline]
    pub(super) fn depart(&mut self, stream: Option<&Stream>) -> Result<()> {
        let write = self.memory_mut().commit_by(stream)?;
        self.ticket = stream.map(|stream| write.unwrap_or_else(|| stream.beginning()));
        Ok(())
    }

    /// Returns the memory to its pool, whose listener the caller must call. If the hub no longer exists, the memory is
    /// freed once nothing uses it.
    fn put_back(&mut self) -> Option<Arc<Pool>> {
        let mut memory = self.memory.take()?;
        let pool = self.pool.upgrade().filter(|_| !mutants::is(Mutant::EnvelopeLost))?;
        // Committed by the last user, for the next. A failure of the device is reported to the next user.
        let _ = memory.commit();
        pool.put(memory);
        Some(pool)
    }

    #[inline]
    pub(super) fn take_ticket(&mut self) -> Option<Ticket> {
        self.ticket.take()
    }
}

/// Returns envelopes that were taken in vain, without a call of the listener: its hub would look for envelopes again.
pub(super) fn put_back(all: impl IntoIterator<Item = RawEnvelope>) {
    for mut envelope in all {
        drop(envelope.put_back());
    }
}

/// Returns envelopes to their pools like a drop of each, but calls a pool's listener only once for a row of its
/// envelopes: its hub can then move several messages together.
pub(super) fn return_all(all: impl Iterator<Item = RawEnvelope>) {
    let mut last: Option<Arc<Pool>> = None;
    let mut guards = SmallVec::<[ExternalGuards; MAX_JOINED]>::new();
    for mut envelope in all {
        guards.push(std::mem::take(&mut envelope.external_guards));
        let Some(pool) = envelope.put_back() else { continue };
        if last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &pool)) {
            last.replace(pool).into_iter().for_each(Pool::call_listener);
        }
    }
    last.into_iter().for_each(Pool::call_listener);
    // Last, as in the drop of one.
    drop(guards);
}

impl Drop for RawEnvelope {
    fn drop(&mut self) {
        self.put_back().into_iter().for_each(Pool::call_listener);
    }
}

impl fmt::Debug for RawEnvelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawEnvelope").field("memory", &self.memory).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
