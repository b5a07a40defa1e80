//! The envelopes of one hub at one place.
//!
//! They are allocated when the hub is made and lent again and again, the longest at home first: what was still in
//! flight on it has then had the most time to end. Memory that comes home may still be in use by a stream; its own
//! record of uses orders the next user after that, so nobody waits here.
//!
//! In a capture it is another thing: each envelope is made as it is taken, on the stream that takes it, and dropped as it
//! comes home. The memory is the graph's own, which hands it out again where its edges order the uses, and there alone.

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::Waker,
};

use super::{envelope::RawEnvelope, free_list::FreeList, link::Holders};
use crate::{
    device::Device,
    error::Result,
    memory::{Memory, Owned, can_hold},
    stream::Stream,
    sync::{Chain, limit_depth},
};

/// Called when an envelope has come home.
type Listener = Box<dyn Fn() + Send + Sync>;

/// Envelopes of one size at one place.
pub(crate) struct Pool {
    /// The hub's name, for people.
    hub: Arc<str>,
    count: AtomicUsize,
    bytes: usize,
    /// Those at home. Tasks that take from here without being a hub's writer wait there.
    home: FreeList<Owned>,
    listener: OnceLock<Listener>,
    /// In a capture: who takes from here works on this stream.
    captured: Option<Stream>,
}

impl Pool {
    /// `count` envelopes of `bytes` bytes where `at` is: in its memory, or, if that is the host, page-locked for
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

    /// For who works on a captured stream. It never runs out of envelopes.
    pub(crate) fn captured(hub: &Arc<str>, bytes: usize, stream: &Stream) -> Arc<Self> {
        let (count, home) = (AtomicUsize::new(usize::MAX), FreeList::endless());
        Arc::new(Self { count, home, captured: Some(stream.clone()), ..Self::empty(hub, bytes) })
    }

    /// The home of one envelope, which is lent with so many valid bytes.
    pub(crate) fn of_one(hub: &Arc<str>, memory: Owned) -> Arc<Self> {
        let pool = Self { count: AtomicUsize::new(1), ..Self::empty(hub, memory.bytes()) };
        pool.home.put(memory);
        Arc::new(pool)
    }

    /// So many more; all of them, or none. The hub's writer is for the caller to wake.
    pub(crate) fn add(&self, count: usize, at: &Device, near: &Device) -> Result<()> {
        can_hold(if at.is_host() { near } else { at }, at.is_host(), self.bytes as u64, count)?;
        let make = || if at.is_host() { Memory::pinned(near, self.bytes) } else { Memory::on(at, self.bytes) };
        let more = (0..count).map(|_| make()).collect::<Result<Vec<_>>>()?;
        self.count.fetch_add(count, Ordering::AcqRel);
        self.home.extend(more);
        Ok(())
    }

    pub(crate) fn listen(&self, listener: Listener) {
        // A pool has one hub for all its life.
        let _ = self.listener.set(listener);
    }

    pub(crate) fn hub(&self) -> &Arc<str> {
        &self.hub
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many at home?
    pub(crate) fn has(&self, count: usize) -> bool {
        self.home.len() >= count
    }

    /// The home of envelopes that belong to no hub any more.
    pub(super) fn none() -> Weak<Self> {
        Arc::downgrade(&Arc::new(Self::empty(&Arc::from(""), 0)))
    }

    /// How many there are, wherever they are.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// How many are at home.
    pub(crate) fn idle(&self) -> usize {
        self.home.len()
    }

    /// An envelope with nothing valid in it, if one is at home.
    ///
    /// # Errors
    /// In a capture, where it is made.
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

    /// Memory in place of this, of the same size and at the same location. `None`: there is no need for any.
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
            // The hub may move a message now, whose old envelope goes home to the hub before, and so on along the flow.
            limit_depth(Chain::Listeners, move || {
                if let Some(came_home) = self.listener.get() {
                    came_home();
                }
            });
        }
    }

    /// One of several that wait for an envelope here, beside the hub's writer.
    pub(super) fn waiter(self: &Arc<Self>) -> Waiter {
        Waiter { pool: self.clone(), number: self.home.waiter() }
    }

    /// `3 of the 3 envelopes of hub `a -> b` there are in use, 1 of them in hub `b -> c`; `c` keeps 2 of them: `.envelopes(5)``
    ///
    /// The latter where the pool's hub is the flow's: what no hub of the flow holds is with operators.
    pub(crate) fn whereabouts(self: &Arc<Self>, holders: &dyn Holders) -> String {
        let count = self.count();
        let out = count - self.idle().min(count);
        let mut told = format!("{out} of the {count} envelopes of hub `{}` there are in use", self.hub);
        let (mut queued, mut has_own) = (0, false);
        holders.each_hub(&mut |hub| {
            let (held, is_own) = (hub.holds(self), *hub.name() == self.hub);
            queued += held;
            has_own |= is_own;
            if held > 0 && !is_own {
                told.push_str(&format!(", {held} of them in hub `{}`", hub.name()));
            }
        });
        let kept = out.saturating_sub(queued);
        if has_own && kept > 0 {
            let enough = count.saturating_add(kept);
            let who = match &holders.keepers(&self.hub)[..] {
                [] => "if operators keep".into(),
                [one] => format!("{one} keeps"),
                several => format!("if {} keep", several.join(" or ")),
            };
            told.push_str(&format!("; {who} {kept} of them: `.envelopes({enough})`"));
        }
        told
    }
}

/// See [`Pool::waiter`]. Its waker is dropped with it.
pub(super) struct Waiter {
    pool: Arc<Pool>,
    number: u64,
}

impl Waiter {
    /// True if an envelope is at home. Otherwise the waker is kept until one is.
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
