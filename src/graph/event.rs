//! [`GraphEvent`]: a point within a graph that others wait for.

use std::{fmt, sync::Arc};

use crate::{
    device::{
        Device,
        backend::{Backend, RawEvent, RawStream},
    },
    error::{Error, ErrorKind, Result},
    stream::{Stream, Streams},
};

/// A point within a graph that others wait for, at each launch anew: streams, or other graphs.
///
/// Work on buffers is ordered without it, but after the whole of a launch: this is for whoever need not wait for all of it
/// and orders by himself what wakeline does not see. Recorded on a stream of a capture, or in [`Builder::add`](super::Builder::add), it is
/// a node, and so is a wait.
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
/// halfway.wait(&side)?;               // what comes next on `side` comes after the first half
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
    /// One that nobody has recorded: whoever waits for it waits for nothing.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn new(device: &Device) -> Result<Self> {
        if device.is_host() {
            let text = "the host has no events: choose a device, `Device::first()` say";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let raw = Streams::of(device).heed(device.backend().event_create(false))?;
        Ok(Self(Arc::new(Inner { device: device.clone(), raw })))
    }

    /// Records the stream's present end; in a graph, at each launch, what its node comes after.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a stream of another device; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if *stream.device() != self.0.device {
            let text = format!("an event of {} on a stream of {}", self.0.device, stream.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.enqueued(stream, |backend, raw| backend.event_record(self.0.raw, raw))
    }

    /// Work enqueued into the stream from now on waits for the last record as it is now; in a graph, what comes after its
    /// node waits for the last record before each launch.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices are of different makes; [`DeviceLost`](ErrorKind::DeviceLost) after a
    /// fault.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        if !stream.device().copies_with(&self.0.device) {
            let text =
                format!("{} cannot wait for {}: they are devices of different makes", stream.device(), self.0.device);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.0.device.check()?;
        let waited = self.enqueued(stream, |backend, raw| backend.stream_wait(raw, self.0.raw));
        // Either device may be the one that is lost.
        if waited.is_err() {
            return stream.streams().heed(Streams::of(&self.0.device).heed(waited));
        }
        waited
    }

    /// Asks the device whether the last record has passed.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn query(&self) -> Result<bool> {
        self.0.device.check()?;
        Streams::of(&self.0.device).heed(self.0.device.backend().event_query(self.0.raw))
    }

    /// Enqueues a use of it. A graph keeps it for a node of its own.
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
