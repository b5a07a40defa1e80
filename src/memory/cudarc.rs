//! Sharing streams with cudarc and with libraries built on it (candle, burn), in both directions.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use crate::{
    device::{Device, backend::RawStream},
    error::{Error, ErrorKind, Result},
    stream::{DriverStream, Stream},
};

impl Stream {
    /// Wraps a stream of cudarc, which is kept alive as long as a handle of the wrapper exists.
    ///
    /// Work that goes through wakeline (including [`external`](Self::external)) is ordered and tracked as on any
    /// stream. Work that is enqueued directly runs in the same stream, but wakeline does not see which memory it
    /// accesses: it must not access wakeline's memory. Use [`external`](Self::external) for work that does. A wait for
    /// the stream ([`wait_for`](Self::wait_for), [`join`](Self::join), [`completed`](Self::completed)) includes that
    /// work.
    ///
    /// For the null stream, this returns [`Stream::default_of`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `device` is not a CUDA device, if the stream does not belong to the device's
    /// primary context, and for the per-thread default stream, which is a different stream on each thread;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    ///
    /// # Safety
    /// The stream is not captured ([`CudaStream::begin_capture`]) while the returned stream is in use: work captured
    /// into a graph would run again when its memory has another owner. Work that is enqueued directly does not access
    /// wakeline's memory.
    pub unsafe fn from_cudarc(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        device.check()?;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at("stream of cudarc"));
        let Some(context) = device.backend().cuda_context() else {
            return wrong(format!("{device} is not a CUDA device"));
        };
        if context.cu_ctx() != stream.context().cu_ctx() {
            let ordinal = stream.context().ordinal();
            return wrong(format!(
                "its context on device {ordinal} is not the primary context of {device}: create the stream in the \
                 primary context"
            ));
        }
        match stream.cu_stream().expose_provenance() {
            0 | LEGACY => Self::default_of(device),
            PER_THREAD => {
                wrong("the per-thread default stream is a different stream on each thread: create a stream".into())
            }
            raw => {
                let name = format!("cudarc {raw:#x}");
                let held = DriverStream::of_other(device, RawStream(raw as u64), stream);
                device.backend().stream_rename(held.raw, &name);
                Self::over(device, name, held)
            }
        }
    }

    /// This stream as a stream of cudarc, for cudarc's calls and for libraries built on cudarc. cudarc does not destroy
    /// it.
    ///
    /// To share a stream without this function's contract, create it with cudarc and wrap it with
    /// [`from_cudarc`](Self::from_cudarc).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the stream is not on a CUDA device.
    ///
    /// # Safety
    /// This stream, or a clone, outlives the returned stream and everything that holds it. Work that is enqueued
    /// through the returned stream does not access wakeline's memory: use [`external`](Self::external) for work that
    /// does.
    pub unsafe fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
        let Some(context) = self.device().backend().cuda_context() else {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} is not a CUDA device: cudarc has no stream on it", self.device()),
            ));
        };
        let raw = std::ptr::with_exposed_provenance_mut(self.raw().0 as usize);
        // SAFETY: the handle is that of a live stream of this context. By this function's contract its owner keeps it
        // alive, and the caller keeps the order between its two users.
        Ok(unsafe { context.wrap_borrowed_stream(raw) })
    }
}

/// An operator's own error, with cudarc's error as its cause.
impl From<DriverError> for Error {
    fn from(cause: DriverError) -> Self {
        Self::other(cause)
    }
}
