//! [`EventPool`]: timed events that are used again. Once enough exist, timing a run allocates nothing.

use std::{fmt, sync::Arc};

use crate::{
    device::backend::{Backend, RawEvent},
    error::Result,
    sync::{Mutex, lock},
};

/// A timed event, which returns to its pool.
pub(super) struct PooledEvent {
    pub(super) raw: RawEvent,
    pub(super) pool: Arc<EventPool>,
}

/// The unused timed events of a device.
pub(super) struct EventPool {
    pub(super) backend: Arc<dyn Backend>,
    idle: Mutex<Vec<RawEvent>>,
}

impl EventPool {
    /// Unused events that are kept.
    const MOST: usize = 1024;

    pub(super) fn new(backend: &Arc<dyn Backend>) -> Arc<Self> {
        Arc::new(Self { backend: backend.clone(), idle: Mutex::default() })
    }

    pub(super) fn take(self: &Arc<Self>) -> Result<PooledEvent> {
        let idle = lock(&self.idle).pop();
        let raw = idle.map_or_else(|| self.backend.event_create(true), Ok)?;
        Ok(PooledEvent { raw, pool: self.clone() })
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        let mut idle = lock(&self.pool.idle);
        if idle.len() < EventPool::MOST {
            return idle.push(self.raw);
        }
        drop(idle);
        self.pool.backend.event_destroy(self.raw);
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut *lock(&self.idle));
        idle.into_iter().for_each(|event| self.backend.event_destroy(event));
    }
}

impl fmt::Debug for EventPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventPool").field("idle", &lock(&self.idle).len()).finish_non_exhaustive()
    }
}
