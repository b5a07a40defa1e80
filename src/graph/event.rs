//! [`GraphEvent`]: a point within a graph that streams and other graphs can wait for.

use std::{fmt, sync::Arc};

use crate::{
    device::{
        Device,
        backend::{Backend, RawEvent, RawStream},
    },
    error::{Error, ErrorKind, Result},
    stream::{Stream, Streams},
};

/// A point within a graph that streams and other graphs can wait for. Each launch records it again.
///
/// Work on buffers needs no event, but is ordered after the whole launch. Use an event to wait for only a part of a
/// launch, and to order work that wakeline does not track. In a capture and in [`Builder::add`](super::Builder::add), a
/// record becomes a node, and so does a wait.
///
/// ```
/// use wakeline::{Stream, device::{Device, Emulated}, graph::{Graph, GraphEvent}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let (stream, side) = (Stream::new(&device)?, Stream::new(&device)?);
/// let halfway = GraphEvent::new(&device)?;
/// let (graph, ()) = Graph::capture(&device, |capture| {
///     capture.stream().host_callback(|| println!("first half"))?;
///     halfway.record(capture.stream())?;
///     capture.stream().host_callback(|| println!("second half"))
/// })?;
/// graph.instantiate()?.launch(&stream)?;
/// halfway.wait(&side)?;               // later work on `side` comes after the first half
/// # stream.completed().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct GraphEvent(Arc<Inner>);

struct Inner {
    device: Device,
    raw: RawEvent,
}

impl GraphEvent {
    /// Creates an event that is not recorded yet: a wait for it has no effect.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn new(device: &Device) -> Result<Self> {
        if device.is_host() {
            let text = "the host has no events: choose a device, for example with `Device::first()`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let raw = Streams::of(device).observe(device.backend().event_create(false))?;
        Ok(Self(Arc::new(Inner { device: device.clone(), raw })))
    }

    /// Records the current end of the stream. In a graph, the record is a node, which each launch repeats.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a stream on another device; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if *stream.device() != self.0.device {
            let text = format!(
                "an event of {} cannot be recorded on a stream on {}: create the event for the stream's device",
                self.0.device,
                stream.device()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.enqueued(stream, |backend, raw| backend.event_record(self.0.raw, raw))
    }

    /// Makes work that is enqueued into the stream from now on wait for the most recent record. In a graph, nodes after
    /// the wait's node wait for the most recent record before each launch.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices have different backends; [`DeviceLost`](ErrorKind::DeviceLost)
    /// after a fault.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        if !stream.device().copies_with(&self.0.device) {
            let text = format!(
                "a stream on {} cannot wait for work on {}: the devices have different backends",
                stream.device(),
                self.0.device
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.0.device.check()?;
        let waited = self.enqueued(stream, |backend, raw| backend.stream_wait(raw, self.0.raw));
        // Either device may be lost.
        if waited.is_err() {
            return stream.streams().observe(Streams::of(&self.0.device).observe(waited));
        }
        waited
    }

    /// True if the device has reached the most recent record.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn query(&self) -> Result<bool> {
        self.0.device.check()?;
        Streams::of(&self.0.device).observe(self.0.device.backend().event_query(self.0.raw))
    }

    /// Enqueues a use of the event. A graph keeps the event alive for its node.
    fn enqueued(&self, stream: &Stream, work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>) -> Result<()> {
        if let Some(capture) = stream.capture() {
            capture.keep(self.0.clone());
        }
        let ticket = stream.enqueue_point(work);
        if let (Some(capture), Err(_)) = (stream.capture(), &ticket) {
            capture.release(&self.0);
        }
        ticket.map(drop)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.backend().event_destroy(self.raw);
    }
}

impl fmt::Debug for GraphEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphEvent").field("device", &self.0.device.name()).field("raw", &self.0.raw).finish()
    }
}
