//! A stream as the device has it, and whose it is.
//!
//! Several [`Stream`]s may stand for one of these, one after the other or at once: a pool gives it out again under
//! another name, and the default stream is everybody's. What they enqueue runs one after the other all the same, so an
//! order between them that is not known here costs a wait and never a race.
//!
//! A [`Held`] counts what fills the driver's queue (its [`Backlog`]), so there is one for as long as the device has the
//! stream. The default stream's lives as long as the device, and is the same for handles with the race checker and without.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::{fmt, sync::Arc};

use super::{Stream, Streams, backlog::Backlog};
use crate::{
    device::{
        Device,
        backend::{Backend, RawStream, StreamSpec},
        recorder::Recorder,
    },
    error::{Error, ErrorKind, Result},
    sync::{Deferred, lock},
};

/// A stream of the device's.
pub(crate) struct Held {
    backend: Arc<dyn Backend>,
    pub(crate) raw: RawStream,
    /// As it was asked for; the device clamps it.
    pub(crate) priority: i32,
    /// How much it has to do, where a driver's queue is bounded.
    backlog: Option<Box<Backlog>>,
    owner: Owner,
}

enum Owner {
    /// Made here: ended with this.
    Here,
    /// The device's own default stream.
    Device,
    /// Another library's, which ends it once this is gone.
    #[cfg(feature = "cuda")]
    Other(#[allow(dead_code, reason = "held, never looked at")] Arc<dyn Any + Send + Sync>),
}

impl Held {
    /// A new stream.
    pub(crate) fn new(device: &Device, spec: &StreamSpec) -> Result<Arc<Self>> {
        device.check()?;
        device.check_process()?;
        let raw = Streams::of(device).heed(device.backend().stream_create(spec))?;
        Ok(Arc::new(Self::of(device.backend().clone(), raw, spec.priority, Owner::Here)))
    }

    /// The device's default stream: the same at every call, so that what it has to do is known when all handles are dropped.
    fn default_of(device: &Device) -> Arc<Self> {
        device
            .unchecked()
            .extension(|device| Arc::new(Self::of(device.backend().clone(), RawStream::DEFAULT, 0, Owner::Device)))
    }

    /// A stream of a capture.
    pub(crate) fn captured(recorder: &Arc<Recorder>, raw: RawStream) -> Arc<Self> {
        Arc::new(Self::of(recorder.clone(), raw, 0, Owner::Here))
    }

    /// Another library's stream, which `owner` keeps alive.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_other(device: &Device, raw: RawStream, owner: Arc<dyn Any + Send + Sync>) -> Arc<Self> {
        Arc::new(Self::of(device.backend().clone(), raw, 0, Owner::Other(owner)))
    }

    fn of(backend: Arc<dyn Backend>, raw: RawStream, priority: i32, owner: Owner) -> Self {
        let backlog = Backlog::of(&*backend);
        Self { backend, raw, priority, backlog, owner }
    }

    /// What it has to do, and the backend that is asked about that.
    #[inline]
    pub(super) fn backlog(&self) -> Option<(&Backlog, &dyn Backend)> {
        self.backlog.as_deref().map(|backlog| (backlog, &*self.backend))
    }

    #[inline]
    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// True if others put work into it, of which wakeline does not know.
    pub(crate) fn is_shared(&self) -> bool {
        !matches!(self.owner, Owner::Here)
    }

    /// From now on people know it by this name.
    pub(crate) fn rename(&self, name: &str) {
        self.backend.stream_rename(self.raw, name);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(backlog) = &self.backlog {
            backlog.close(&*self.backend);
        }
        if let Owner::Here = self.owner {
            self.backend.stream_destroy(self.raw);
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("raw", &self.raw).field("priority", &self.priority).finish_non_exhaustive()
    }
}

impl Stream {
    /// The device's legacy default stream, the one that a CUDA program without streams uses: the same at every call.
    /// Tickets and tracking are as with any other.
    ///
    /// It waits for all streams of the device that were not made non-blocking, and those wait for it; wakeline's own
    /// are non-blocking unless a [`StreamPool`](super::StreamPool) says otherwise.
    ///
    /// Whoever else in the process uses the default stream does so unseen. What is in it when somebody waits for it
    /// ([`wait_for`](Self::wait_for), [`join`](Self::join), [`completed`](Self::completed)) counts, whoever put it there.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has none; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn default_of(device: &Device) -> Result<Self> {
        if device.is_host() {
            return Err(Error::new(
                ErrorKind::Usage,
                "the host has no streams: choose a device, `Device::first()` say",
            ));
        }
        device.check()?;
        let streams = Streams::of(device);
        let _later = Deferred::new();
        let mut known = lock(&streams.default);
        if let Some(inner) = known.upgrade() {
            return Ok(Self(inner));
        }
        let stream = Self::over(device, "default".into(), Held::default_of(device))?;
        *known = Arc::downgrade(&stream.0);
        Ok(stream)
    }

    /// How urgent its work is: lower is more urgent. See [`Device::stream_priorities`].
    pub fn priority(&self) -> i32 {
        let range = self.device().stream_priorities();
        self.0.held.priority.clamp(*range.start(), *range.end())
    }
}
