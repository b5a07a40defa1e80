//! Sharing streams with cudarc and with libraries built on it (candle, burn), in both directions.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use crate::{
    device::{Device, backend::RawStream},
    error::{Error, ErrorKind, Result},
    stream::{DriverStream, Stream},
};

impl Stream {
    /// Wraps a stream of cudarc. It is kept alive as long as a handle of the wrapper is.
    ///
    /// Work that goes through wakeline (including [`external`](Self::external)) is ordered and tracked as on any
    /// stream. Work that is enqueued directly is in the same queue, before or after it, and wakeline does not see what
    /// it accesses: it must not access wakeline's memory, which only [`external`](Self::external) may hand out. A wait
    /// for the stream ([`wait_for`](Self::wait_for), [`join`](Self::join), [`completed`](Self::completed)) includes
    /// that work.
    ///
    /// The null stream gives [`Stream::default_of`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `device` is not a CUDA device, if the stream is not of its primary context, and
    /// for the per-thread default stream, which is a different stream on each thread;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    ///
    /// # Safety
    /// The stream is not captured ([`CudaStream::begin_capture`]) while this one is in use: work captured into a graph
    /// would run again with memory that has another owner by then. Work that is enqueued directly does not access
    /// wakeline's memory.
    pub unsafe fn from_cudarc(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        device.check()?;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at("a stream of cudarc's"));
        let Some(context) = device.backend().cuda_context() else {
            return wrong(format!("{device} is not a CUDA device"));
        };
        if context.cu_ctx() != stream.context().cu_ctx() {
            let ordinal = stream.context().ordinal();
            return wrong(format!("its context on device {ordinal} is not the primary context of {device}"));
        }
        match stream.cu_stream().expose_provenance() {
            0 | LEGACY => Self::default_of(device),
            PER_THREAD => {
                wrong("the per-thread default stream is a different one on each thread: create a stream".into())
            }
            raw => {
                let name = format!("cudarc {raw:#x}");
                let held = DriverStream::of_other(device, RawStream(raw as u64), stream);
                device.backend().stream_rename(held.raw, &name);
                Self::over(device, name, held)
            }
        }
    }

    /// This stream as a stream of cudarc, for its calls and for libraries built on it. cudarc does not destroy it.
    ///
    /// To share a stream without this function's contract, create it with cudarc and wrap it with
    /// [`from_cudarc`](Self::from_cudarc).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the stream is not on a CUDA device.
    ///
    /// # Safety
    /// This stream, or a clone, outlives the returned one and everything that keeps that one. Work that is enqueued
    /// through it does not access wakeline's memory: use [`external`](Self::external) for that.
    pub unsafe fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
        let Some(context) = self.device().backend().cuda_context() else {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} is not a CUDA device: cudarc has no stream there", self.device()),
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
