//! [`DriverStream`]: a raw stream of the device, with its owner.
//!
//! Several [`Stream`](super::Stream)s may refer to one raw stream, one after the other or at once: a pool reuses it
//! under another name, and all handles of the default stream share it. The operations of a raw stream run in order in
//! any case, so an untracked order between these `Stream`s costs a redundant wait, never a race.
//!
//! A [`DriverStream`] counts the work in the driver's queue (its [`Backlog`]), so it must exist as long as the device
//! has the stream. The `DriverStream` of the default stream lives as long as the device, and handles with and without
//! the race checker share it. The backlog of another library's stream is kept, and found by the raw stream, until its
//! work is done.

#[cfg(feature = "cuda")]
use std::any::Any;
use std::{fmt, sync::Arc};

use super::backlog::Backlog;
#[cfg(feature = "cuda")]
use crate::sync::{Deferred, Level, Mutex, lock};
use crate::{
    device::{
        Device,
        backend::{Backend, RawStream, StreamSpec},
        recorder::Recorder,
    },
    error::Result,
};

pub(crate) struct DriverStream {
    backend: Arc<dyn Backend>,
    pub(crate) raw: RawStream,
    /// The requested priority, which the device clamps.
    pub(crate) priority: i32,
    /// The pending work, where the driver's queue is bounded.
    backlog: Option<Arc<Backlog>>,
    owner: StreamOwner,
}

enum StreamOwner {
    /// Created by wakeline, and destroyed with the `DriverStream`.
    Here,
    /// The device's own default stream.
    Device,
    /// Another library's stream, which the library may destroy once this is dropped.
    #[cfg(feature = "cuda")]
    Other(Arc<dyn Any + Send + Sync>),
}

impl DriverStream {
    /// A new stream.
    pub(crate) fn new(device: &Device, spec: &StreamSpec) -> Result<Arc<Self>> {
        device.check()?;
        device.check_process()?;
        let raw = device.backend().stream_create(spec)?;
        Ok(Arc::new(Self::of(device.backend().clone(), raw, spec.priority, StreamOwner::Here)))
    }

    /// The device's default stream: the same value at every call, so that the pending work stays known after all
    /// handles are dropped.
    pub(super) fn default_of(device: &Device) -> Arc<Self> {
        device.unchecked().extension(|device| {
            Arc::new(Self::of(device.backend().clone(), RawStream::DEFAULT, 0, StreamOwner::Device))
        })
    }

    /// Creates the stream of a capture.
    pub(crate) fn captured(recorder: &Arc<Recorder>, raw: RawStream) -> Arc<Self> {
        Arc::new(Self::of(recorder.clone(), raw, 0, StreamOwner::Here))
    }

    /// Another library's stream, which `owner` keeps alive.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_other(device: &Device, raw: RawStream, owner: Arc<dyn Any + Send + Sync>) -> Arc<Self> {
        let device = device.unchecked();
        let backend = device.backend().clone();
        let backlog = device.extension(|_| Arc::<ForeignBacklogs>::default()).backlog_of(raw, &*backend);
        Arc::new(Self { backend, raw, priority: 0, backlog, owner: StreamOwner::Other(owner) })
    }

    fn of(backend: Arc<dyn Backend>, raw: RawStream, priority: i32, owner: StreamOwner) -> Self {
        let backlog = Backlog::of(&*backend);
        Self { backend, raw, priority, backlog, owner }
    }

    /// The pending work, and the backend to query about it.
    #[inline]
    pub(super) fn backlog(&self) -> Option<(&Backlog, &dyn Backend)> {
        self.backlog.as_deref().map(|backlog| (backlog, &*self.backend))
    }

    #[inline]
    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// True if code outside of wakeline may enqueue into the stream.
    pub(crate) fn is_shared(&self) -> bool {
        !matches!(self.owner, StreamOwner::Here)
    }

    /// True for a stream of wakeline, and for another library's stream that `owner` keeps alive.
    #[cfg(feature = "cuda")]
    pub(super) fn is_kept_by<O>(&self, owner: &Arc<O>) -> bool {
        match &self.owner {
            StreamOwner::Here => true,
            StreamOwner::Device => false,
            StreamOwner::Other(own) => std::ptr::addr_eq(Arc::as_ptr(own), Arc::as_ptr(owner)),
        }
    }

    /// Sets the stream's name that tools show.
    pub(crate) fn rename(&self, name: &str) {
        self.backend.stream_rename(self.raw, name);
    }
}

impl Drop for DriverStream {
    fn drop(&mut self) {
        match (&self.owner, &self.backlog) {
            // The backlog is kept for the next handle of the same stream.
            #[cfg(feature = "cuda")]
            (StreamOwner::Other(_), Some(backlog)) => backlog.mark_end(&*self.backend, self.raw),
            (_, Some(backlog)) => backlog.close(&*self.backend),
            (_, None) => {}
        }
        if let StreamOwner::Here = self.owner {
            self.backend.stream_destroy(self.raw);
        }
    }
}

/// The backlogs of other libraries' streams: one for each raw stream, however many handles it has. A backlog is kept
/// after the last handle is dropped, until the work is done.
#[cfg(feature = "cuda")]
struct ForeignBacklogs(Mutex<Vec<(RawStream, Arc<Backlog>)>>);

#[cfg(feature = "cuda")]
impl ForeignBacklogs {
    fn backlog_of(&self, raw: RawStream, backend: &dyn Backend) -> Option<Arc<Backlog>> {
        let _later = Deferred::new();
        let mut all = lock(&self.0);
        let over = |(_, backlog): &mut (RawStream, Arc<Backlog>)| {
            // One reference is in this list.
            Arc::strong_count(backlog) == 1 && backlog.is_over(backend)
        };
        all.extract_if(.., over).for_each(|(_, backlog)| backlog.close(backend));
        if let Some((_, known)) = all.iter().find(|(of, _)| *of == raw) {
            return Some(known.clone());
        }
        let new = Backlog::of(backend)?;
        all.push((raw, new.clone()));
        Some(new)
    }
}

#[cfg(feature = "cuda")]
impl Default for ForeignBacklogs {
    fn default() -> Self {
        Self(Mutex::at(Level::OtherStreams, Vec::new()))
    }
}

impl fmt::Debug for DriverStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverStream").field("raw", &self.raw).field("priority", &self.priority).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        device::{Emulated, backend::RawStream},
        stream::{Stream, Streams},
    };

    fn pending(others: &ForeignBacklogs, raw: RawStream) -> Option<Arc<Backlog>> {
        lock(&others.0).iter().find(|(of, _)| *of == raw).map(|(_, backlog)| backlog.clone())
    }

    #[test]
    fn handles_of_another_library_stream_count_its_work_together() {
        let plain = Device::emulated(Emulated::new().queue_depth(64));
        let checked = plain.clone().race_checked();
        let spec = StreamSpec { name: "theirs".into(), priority: 0, non_blocking: true };
        let raw = plain.backend().stream_create(&spec).unwrap();
        let handle = |device: &Device| DriverStream::of_other(device, raw, Arc::new(()));
        let others = plain.extension(|_| Arc::<ForeignBacklogs>::default());
        let (go, wait) = mpsc::channel::<()>();
        plain.backend().host_function(raw, &mut Some(Box::new(move || _ = wait.recv()))).unwrap();
        for round in 0..20 {
            let driver_stream = handle(if round % 2 == 0 { &plain } else { &checked });
            let (backlog, backend) = driver_stream.backlog().unwrap();
            backlog.reserve().unwrap().fill(backend, raw);
            assert_eq!(format!("{backlog:?}"), format!("Backlog {{ enqueued: {}, max: 48, .. }}", round + 1));
        }
        drop(go);
        plain.backend().stream_synchronize(raw).unwrap();
        // Once another handle is created, this stream is forgotten.
        let other = plain.backend().stream_create(&spec).unwrap();
        drop(DriverStream::of_other(&plain, other, Arc::new(())));
        assert!(pending(&others, raw).is_none() && pending(&others, other).is_some());
        [raw, other].into_iter().for_each(|raw| plain.backend().stream_destroy(raw));
    }

    #[test]
    fn a_stream_is_found_by_its_raw_stream_and_owner() {
        let device = Device::emulated(Emulated::new());
        let ours = Stream::new(&device).unwrap();
        let spec = StreamSpec { name: "theirs".into(), priority: 0, non_blocking: true };
        let raw = device.backend().stream_create(&spec).unwrap();
        let (owner, streams) = (Arc::new(1), Streams::of(&device));
        let theirs =
            Stream::over(&device, "theirs".into(), DriverStream::of_other(&device, raw, owner.clone())).unwrap();
        assert_eq!(streams.over_other(raw, &owner), Some(theirs.clone()));
        assert_eq!(streams.over_other(raw, &Arc::new(1)), None, "this owner may destroy the stream earlier");
        assert_eq!(streams.over_other(ours.raw(), &owner), Some(ours));
        drop(theirs);
        assert_eq!(streams.over_other(raw, &owner), None);
        device.backend().stream_destroy(raw);
    }
}
