//! [`Timer`]: measures device time.

use std::{fmt, time::Duration};

use super::{Completed, Stream, Ticket};
use crate::{device::backend::RawEvent, error::Result};

/// Measures the device's time between two points of a stream.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, stream::Timer};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let mut buffer = Buffer::<u8>::new(&device, 1 << 20)?;
/// let timer = Timer::start(&stream)?;
/// stream.fill(&mut buffer, 0)?;
/// let took = timer.stop()?.await?;
/// println!("{took:?}");
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Timer {
    stream: Stream,
    from: RawEvent,
    to: RawEvent,
}

impl Timer {
    /// Starts measuring, from the stream's current end.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) for a captured stream: time the launches of the graph instead.
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault.
    pub fn start(stream: &Stream) -> Result<Self> {
        // The graph's nodes would record events that are destroyed with the timer.
        stream.not_captured()?;
        let backend = stream.device().backend();
        let streams = stream.streams();
        let from = streams.observe(backend.event_create(true))?;
        let to = streams.observe(backend.event_create(true)).inspect_err(|_| backend.event_destroy(from))?;
        let timer = Self { stream: stream.clone(), from, to };
        stream.enqueue_point(|backend, raw| backend.event_record(from, raw))?;
        Ok(timer)
    }

    /// Ends the measurement at the stream's current end. The future resolves once the device has reached that point.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault.
    pub fn stop(self) -> Result<impl Future<Output = Result<Duration>> + Send> {
        let end: Ticket = self.stream.enqueue_point(|backend, raw| backend.event_record(self.to, raw))?;
        let done: Completed = end.completed();
        Ok(async move {
            done.await?;
            self.stream.streams().observe(self.stream.device().backend().event_elapsed(self.from, self.to))
        })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let backend = self.stream.device().backend();
        backend.event_destroy(self.from);
        backend.event_destroy(self.to);
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").field("stream", &self.stream).finish_non_exhaustive()
    }
}
