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
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
};

use super::{envelope::RawEnvelope, link::HubState};
use crate::{device::Device, error::Result, memory::Memory, sync::lock};

/// Called when an envelope has come home.
type Listener = Box<dyn Fn() + Send + Sync>;

/// Envelopes of one size at one place.
pub(crate) struct Pool {
    /// The hub's name, for people.
    hub: Arc<str>,
    count: usize,
    bytes: usize,
    home: Mutex<VecDeque<Box<Memory>>>,
    idle: AtomicUsize,
    listener: OnceLock<Listener>,
    /// Who takes from here without being a hub's writer.
    waiting: Mutex<Vec<Waker>>,
    waited_for: AtomicBool,
}

impl Pool {
    /// `count` envelopes of `bytes` bytes where `at` is: in its memory, or, if that is the host, page-locked for
    /// `near`.
    pub(crate) fn new(hub: &Arc<str>, count: usize, bytes: usize, at: &Device, near: &Device) -> Result<Arc<Self>> {
        let make = || if at.is_host() { Memory::pinned(near, bytes) } else { Memory::on(at, bytes) };
        let home = (0..count).map(|_| make().map(Box::new)).collect::<Result<VecDeque<_>>>()?;
        Ok(Arc::new(Self {
            hub: hub.clone(),
            count,
            bytes,
            home: Mutex::new(home),
            idle: AtomicUsize::new(count),
            listener: OnceLock::new(),
            waiting: Mutex::default(),
            waited_for: AtomicBool::new(false),
        }))
    }

    pub(crate) fn listen(&self, listener: Listener) {
        // A pool has one hub for all its life.
        let _ = self.listener.set(listener);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many at home?
    pub(crate) fn has(&self, count: usize) -> bool {
        self.idle.load(Ordering::Acquire) >= count
    }

    /// How many there are, wherever they are.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// An envelope with nothing valid in it, if one is at home.
    pub(crate) fn take(self: &Arc<Self>) -> Option<RawEnvelope> {
        let mut home = lock(&self.home);
        let memory = home.pop_front()?;
        self.idle.store(home.len(), Ordering::Release);
        drop(home);
        Some(RawEnvelope::new(memory, Arc::downgrade(self)))
    }

    pub(super) fn put(&self, memory: Box<Memory>) {
        let mut home = lock(&self.home);
        home.push_back(memory);
        self.idle.store(home.len(), Ordering::Release);
        drop(home);
        if let Some(came_home) = self.listener.get() {
            came_home();
        }
        if self.waited_for.swap(false, Ordering::SeqCst) {
            let waiting = std::mem::take(&mut *lock(&self.waiting));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Keeps the waker of one of several who take from here, until one comes home.
    pub(crate) fn wait(&self, waker: &Waker) {
        let mut waiting = lock(&self.waiting);
        if !waiting.iter().any(|kept| kept.will_wake(waker)) {
            waiting.push(waker.clone());
        }
        self.waited_for.store(true, Ordering::SeqCst);
    }

    /// `2 of the 2 envelopes of hub `a -> b` there are in use, 1 of them in hub `b -> c``
    pub(crate) fn whereabouts(self: &Arc<Self>, hubs: &mut dyn Iterator<Item = &dyn HubState>) -> String {
        let out = self.count - self.idle.load(Ordering::Acquire).min(self.count);
        let mut told = format!("{out} of the {} envelopes of hub `{}` there are in use", self.count, self.hub);
        for hub in hubs.filter(|hub| *hub.name() != self.hub) {
            let held = hub.holds(self);
            if held > 0 {
                told.push_str(&format!(", {held} of them in hub `{}`", hub.name()));
            }
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
