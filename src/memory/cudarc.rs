//! Streams shared with cudarc, and with what is built on it (candle, burn): in and out.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use crate::{
    device::{Device, backend::RawStream},
    error::{Error, ErrorKind, Result},
    stream::{Held, Stream},
};

impl Stream {
    /// A stream of cudarc's, as one of wakeline's. It is kept as long as anybody has this one.
    ///
    /// What goes through wakeline ([`external`](Self::external) too) is ordered and tracked as on any stream. What others
    /// put into it themselves is in the same queue, before or behind, and wakeline does not see what that touches: who
    /// does so answers for it that it touches no memory of wakeline's, which only [`external`](Self::external) may hand
    /// out. Whoever waits for the stream ([`wait_for`](Self::wait_for), [`join`](Self::join),
    /// [`completed`](Self::completed)) waits for others' work too.
    ///
    /// The null stream gives [`Stream::default_of`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `device` is no CUDA device, if the stream is not of its primary context, and for
    /// the per-thread default stream, which is another one on each thread; [`DeviceLost`](ErrorKind::DeviceLost) after a
    /// fault.
    ///
    /// # Safety
    /// The stream is not captured ([`CudaStream::begin_capture`]) while this one is in use: work that goes into a graph would
    /// run again with memory that is somebody else's by then. What others put into it touches no memory of wakeline's.
    pub unsafe fn from_cudarc(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        device.check()?;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at("a stream of cudarc's"));
        let Some(context) = device.backend().cuda_context() else {
            return wrong(format!("{device} is no CUDA device"));
        };
        if context.cu_ctx() != stream.context().cu_ctx() {
            let ordinal = stream.context().ordinal();
            return wrong(format!("it is of a context of device {ordinal} that is not the primary one of {device}"));
        }
        match stream.cu_stream().expose_provenance() {
            0 | LEGACY => Self::default_of(device),
            PER_THREAD => {
                wrong("the per-thread default stream is another one on each thread: make one of your own".into())
            }
            raw => {
                let name = format!("cudarc {raw:#x}");
                let held = Held::of_other(device, RawStream(raw as u64), stream);
                device.backend().stream_rename(held.raw, &name);
                Self::over(device, name, held)
            }
        }
    }

    /// This stream as one of cudarc's, for its calls and for libraries built on it. cudarc does not end it.
    ///
    /// To share one without this function's contract, make it with cudarc and bring it in with
    /// [`from_cudarc`](Self::from_cudarc).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it is not on a CUDA device.
    ///
    /// # Safety
    /// This stream, or a clone, lives as long as the returned one and whatever keeps that. What is enqueued through it
    /// touches no memory of wakeline's: that goes through [`external`](Self::external).
    pub unsafe fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
        let Some(context) = self.device().backend().cuda_context() else {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} is no CUDA device: cudarc has no stream there", self.device()),
            ));
        };
        let raw = std::ptr::with_exposed_provenance_mut(self.raw().0 as usize);
        // SAFETY: the handle is that of a live stream of this context, its owner keeps it alive (this function's
        // contract), and order between the two users is that contract's too.
        Ok(unsafe { context.wrap_borrowed_stream(raw) })
    }
}

/// An operator's own error, with cudarc's as its cause.
impl From<DriverError> for Error {
    fn from(cause: DriverError) -> Self {
        Self::other(cause)
    }
}
