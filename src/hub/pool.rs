//! The envelopes of one hub at one place.
//!
//! They are allocated when the hub is made and lent again and again, the longest at home first: what was still in
//! flight on it has then had the most time to end. Memory that comes home may still be in use by a stream; its own
//! record of uses orders the next user after that, so nobody waits here.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::envelope::RawEnvelope;
use crate::{device::Device, error::Result, memory::Memory, sync::lock};

/// Called when an envelope has come home.
type Listener = Box<dyn Fn() + Send + Sync>;

/// Envelopes of one size at one place.
pub(crate) struct Pool {
    /// The hub's name, for people.
    hub: Arc<str>,
    count: usize,
    bytes: usize,
    home: Mutex<VecDeque<Memory>>,
    idle: AtomicUsize,
    /// In which other hubs its envelopes were last sent on: the names, for people, when it has run out.
    lent_to: Mutex<Vec<(Arc<str>, usize)>>,
    listener: OnceLock<Listener>,
}

impl Pool {
    /// `count` envelopes of `bytes` bytes where `at` is: in its memory, or, if that is the host, page-locked for
    /// `near`.
    pub(crate) fn new(hub: &Arc<str>, count: usize, bytes: usize, at: &Device, near: &Device) -> Result<Arc<Self>> {
        let make = || if at.is_host() { Memory::pinned(near, bytes) } else { Memory::on(at, bytes) };
        let home = (0..count).map(|_| make()).collect::<Result<VecDeque<_>>>()?;
        Ok(Arc::new(Self {
            hub: hub.clone(),
            count,
            bytes,
            home: Mutex::new(home),
            idle: AtomicUsize::new(count),
            lent_to: Mutex::default(),
            listener: OnceLock::new(),
        }))
    }

    pub(crate) fn listen(&self, listener: Listener) {
        // A pool has one hub for all its life.
        let _ = self.listener.set(listener);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn has_one(&self) -> bool {
        self.idle.load(Ordering::Acquire) > 0
    }

    /// An envelope with nothing valid in it, if one is at home.
    pub(crate) fn take(self: &Arc<Self>) -> Option<RawEnvelope> {
        let mut home = lock(&self.home);
        let memory = home.pop_front()?;
        self.idle.store(home.len(), Ordering::Release);
        drop(home);
        Some(RawEnvelope::new(memory, Arc::downgrade(self)))
    }

    pub(super) fn put(&self, memory: Memory) {
        let mut home = lock(&self.home);
        home.push_back(memory);
        self.idle.store(home.len(), Ordering::Release);
        drop(home);
        if let Some(came_home) = self.listener.get() {
            came_home();
        }
    }

    /// One of its envelopes went into the queue of another hub, or (`-1`) came out.
    pub(crate) fn lent(&self, hub: &Arc<str>, change: isize) {
        let mut lent = lock(&self.lent_to);
        match lent.iter_mut().find(|(name, _)| Arc::ptr_eq(name, hub)) {
            Some((_, number)) => *number = number.saturating_add_signed(change),
            None => lent.push((hub.clone(), usize::from(change > 0))),
        }
    }

    /// `all 2 envelopes of hub `a -> b` are in use, 1 of them in hub `b -> c``
    pub(crate) fn whereabouts(&self) -> String {
        let out = self.count - self.idle.load(Ordering::Acquire).min(self.count);
        let mut told = format!("{out} of the {} envelopes of hub `{}` there are in use", self.count, self.hub);
        for (hub, number) in lock(&self.lent_to).iter().filter(|(_, number)| *number > 0) {
            told.push_str(&format!(", {number} of them in hub `{hub}`"));
        }
        told
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("hub", &self.hub)
            .field("count", &self.count)
            .field("bytes", &self.bytes)
            .field("idle", &self.idle)
            .finish_non_exhaustive()
    }
}
