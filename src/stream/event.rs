//! Events from a pool.
//!
//! An event is owned by everybody who may still ask about it (an `Arc`), and goes back to its device's pool with the
//! last of them. So a pooled event is never recorded again under somebody who waits: waits that the device already has
//! keep the record they were given (CUDA's `cuStreamWaitEvent` captures it), and no generation number is needed.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use super::Streams;
use crate::{
    device::backend::{Backend, RawEvent},
    error::Result,
    sync::lock,
};

/// The idle events of one device.
#[derive(Debug, Default)]
pub(super) struct EventPool {
    idle: Mutex<Vec<RawEvent>>,
}

/// One event, in use.
pub(super) struct Event {
    raw: RawEvent,
    home: Arc<Streams>,
}

impl EventPool {
    /// An idle event, or a new one.
    pub(super) fn take(streams: &Arc<Streams>) -> Result<Event> {
        let idle = lock(&streams.events.idle).pop();
        let raw = match idle {
            Some(raw) => raw,
            None => streams.backend().event_create(false)?,
        };
        Ok(Event { raw, home: streams.clone() })
    }

    pub(super) fn clear(&self, backend: &dyn Backend) {
        lock(&self.idle).drain(..).for_each(|event| backend.event_destroy(event));
    }
}

impl Event {
    pub(super) fn raw(&self) -> RawEvent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        lock(&self.home.events.idle).push(self.raw);
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.raw)
    }
}
