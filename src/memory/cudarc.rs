//! Sharing streams and memory with cudarc and with libraries built on it (candle, burn), in both directions.
//!
//! ```text
//!   CudaStream  ──> Stream::from_cudarc          Stream ──> Stream::to_cudarc
//!   CudaSlice   ──> Buffer::from_cudarc          Buffer ──> Buffer::into_cudarc
//!   CudaView    <── External::enqueue_cudarc     any buffer or envelope, for the duration of one call
//! ```
//!
//! cudarc orders the uses of a [`CudaSlice`] by two events, if the slice's context has its event tracking on: the last
//! write and the last read. A slice becomes a buffer by value, so no cudarc call uses it any more, and what is left is
//! work in flight. The slice's own stream is made to wait for both events; its end is then after all uses that cudarc
//! knows, and is noted in the buffer as a write. On the way back the slice's stream waits for the buffer's uses, and the
//! slice's event is recorded behind them.
//!
//! cudarc waits for the events and records them only while its context has a stream that cudarc created: the default stream
//! does not count, and a dropped stream no longer does. A slice of a default stream may have been used on a stream that
//! was dropped since. So its import forks a stream for a moment, which, unlike `CudaContext::new_stream`, does not
//! synchronize the context.
//!
//! cudarc forgets the earlier of two reads on different streams, and uses on streams of a context whose tracking is off.
//! wakeline's own context ([`Stream::to_cudarc`]) has it off.

use std::{fmt, marker::PhantomData, mem::ManuallyDrop, sync::Arc};

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtrMut, DriverError, sys::CUstreamCaptureStatus,
};

use super::{
    Addresses, Buffer, External, Memory, Plain, Wrapped,
    external::{Declaration, check_declared_write},
};
use crate::{
    device::{Device, backend::RawStream},
    error::{Error, ErrorKind, Result},
    stream::{DriverStream, Stream, Streams},
};

impl Stream {
    /// Wraps a stream of cudarc, which is kept alive as long as a handle of the wrapper exists. While one exists, every
    /// call with a clone of the same `Arc` returns the same wrapper.
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
    /// The stream is not captured (`CudaStream::begin_capture`) while the returned stream is in use: work captured
    /// into a graph would run again when its memory has another owner. Work that is enqueued directly does not access
    /// wakeline's memory.
    pub unsafe fn from_cudarc(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        Self::over_cudarc(device, &stream).map_err(|error| error.at("stream of cudarc"))
    }

    /// Like [`from_cudarc`](Self::from_cudarc). The caller enqueues only waits and events.
    fn over_cudarc(device: &Device, stream: &Arc<CudaStream>) -> Result<Self> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        device.check()?;
        let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what));
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
                let raw = RawStream(raw as u64);
                if let Some(known) = Streams::of(device).over_other(raw, stream) {
                    return Ok(known);
                }
                let name = format!("cudarc {:#x}", raw.0);
                let held = DriverStream::of_other(device, raw, stream.clone());
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
    /// does. cudarc tracks no events in wakeline's context: a `CudaSlice` that is used on the returned stream and on
    /// another one is ordered, and kept until its last use, by the caller.
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

impl<T: Plain> Buffer<T> {
    /// Makes a buffer from a slice of cudarc, by value and without a copy. Its first use comes, on the device, after the
    /// work that is in flight on the slice: all work of the slice's stream, and the uses on other streams that cudarc
    /// has tracked, including on streams that were dropped since. Nothing blocks, and no synchronisation is needed.
    ///
    /// [`into_cudarc`](Self::into_cudarc) returns the slice at once, ordered on the device. If the buffer is sent
    /// somewhere, as an envelope (`Envelope::from`), the handle returns the slice after the envelope's last use. A
    /// buffer that is dropped frees the slice on the slice's stream, after its last use.
    ///
    /// What cudarc does not track is not waited for: the earlier of two reads on different streams, uses of a slice that
    /// was allocated while its context's event tracking was off, uses on a stream of another `CudaContext` object while
    /// that object has no stream of its own (only its default stream), and a graph of cudarc that uses the slice's memory.
    /// Join such streams, and launch no such graph while the buffer exists.
    ///
    /// cudarc waits only in a context that has a stream other than the default stream. If it has none, this creates one
    /// with `CudaStream::fork` and drops it again, which takes some microseconds; a `CudaContext::new_stream` that
    /// another thread calls at the same time then does not synchronize the context. Keep a stream of the context to avoid
    /// both.
    ///
    /// To exchange many slices of one stream, keep the result of [`Stream::from_cudarc`]: each call then uses that
    /// wrapper, and creates none of its own.
    ///
    /// ```no_run
    /// use wakeline::{Buffer, Device, Stream, cudarc::driver::CudaContext};
    ///
    /// # async fn exchange() -> wakeline::Result<()> {
    /// let theirs = CudaContext::new(0)?.new_stream()?;
    /// let slice = theirs.clone_htod(&[1.0_f32, 2.0, 3.0])?;         // in flight on cudarc's stream
    ///
    /// let device = Device::cuda(0)?;
    /// let stream = Stream::new(&device)?;
    /// let (mut buffer, _) = Buffer::from_cudarc(&device, slice)?;
    /// stream.fill(&mut buffer, 0.5)?;                               // ordered after cudarc's copy
    /// let slice = buffer.into_cudarc()?;
    /// assert_eq!(theirs.clone_dtoh(&slice)?, [0.5; 3]);             // ordered after the fill
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `device` is not a CUDA device, if the slice does not belong to the device's
    /// primary context, if its stream is the per-thread default stream or is being captured, for 0 elements, and for an
    /// address that is not aligned for the elements; [`Driver`](ErrorKind::Driver) for an error that cudarc reports,
    /// also one that an earlier call of its context has left; [`DeviceLost`](ErrorKind::DeviceLost) after a fault. The
    /// slice is dropped then.
    pub fn from_cudarc(device: &Device, slice: CudaSlice<T>) -> Result<(Self, Wrapped<CudaSlice<T>>)> {
        Self::of_cudarc(device, slice).map_err(|error| error.at("slice of cudarc"))
    }

    fn of_cudarc(device: &Device, mut slice: CudaSlice<T>) -> Result<(Self, Wrapped<CudaSlice<T>>)> {
        let stream = Stream::over_cudarc(device, slice.stream())?;
        if slice.is_empty() {
            return Err(Error::new(ErrorKind::Usage, "zero-length slice: pass at least one element"));
        }
        let theirs = slice.stream().clone();
        let context = theirs.context();
        let address = loop {
            let forked = fork_if_only(&stream, &theirs)?;
            let address = order_after_events(&stream, &mut slice)?;
            // Otherwise another thread has dropped the last other stream in the meantime, perhaps before the wait.
            if forked.is_some() || !context.is_event_tracking() || context.is_in_multi_stream_mode() {
                break address;
            }
        };
        let mut ticket = stream.ticket_of_all()?;
        stream.streams().observe(ticket.commit())?;
        // Had a capture begun in the meantime, the ticket's event would be a part of it.
        check_not_captured(&stream, &theirs)?;
        let len = slice.len();
        let (mut buffer, wrapped) = Self::of_device_memory(device, address, len, slice)?;
        buffer.memory_mut().note_write(&ticket);
        Ok((buffer, wrapped))
    }

    /// Returns the slice of cudarc that this buffer was made from ([`from_cudarc`](Self::from_cudarc)). On the device,
    /// the slice's stream waits for the buffer's uses: work that cudarc enqueues there from now on comes after them, and
    /// so does work on other streams, if cudarc tracks the slice. Nothing blocks.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the buffer was not made from a slice (allocate one with cudarc, make it a buffer
    /// and copy into that), while a graph uses it, or while the slice's stream is being captured;
    /// [`Driver`](ErrorKind::Driver) for an error that cudarc reports; [`DeviceLost`](ErrorKind::DeviceLost) after a
    /// fault, also of another device whose work the contents depend on. The buffer is dropped then.
    pub fn into_cudarc(self) -> Result<CudaSlice<T>> {
        let mut memory = self.into_memory();
        take_cudarc(&mut memory).map_err(|error| error.at("slice of cudarc"))
    }
}

fn take_cudarc<T: Plain>(memory: &mut Memory) -> Result<CudaSlice<T>> {
    let not_of_cudarc = || {
        let text = "the buffer was not made from a slice of cudarc: allocate one there, make it a buffer with \
                    `Buffer::from_cudarc`, and copy into that";
        Error::new(ErrorKind::Usage, text)
    };
    let theirs = memory.with_owner(|slice: &CudaSlice<T>| slice.stream().clone()).ok_or_else(not_of_cudarc)?;
    if memory.is_in_graph() {
        return Err(Error::new(ErrorKind::Usage, "a graph uses the buffer: drop the graph first"));
    }
    let stream = Stream::over_cudarc(memory.device(), &theirs)?;
    check_not_captured(&stream, &theirs)?;
    memory.check_contents()?;
    stream.streams().observe(memory.before_write(&stream))?;
    let mut slice = memory.take_owner::<CudaSlice<T>>().ok_or_else(not_of_cudarc)?;
    // Records the slice's event behind the waits.
    order_after_events(&stream, &mut slice)?;
    Ok(slice)
}

/// Orders the slice's stream after the uses on other streams that cudarc has tracked, and records the slice's event
/// there. Returns the slice's address.
fn order_after_events<T>(stream: &Stream, slice: &mut CudaSlice<T>) -> Result<u64> {
    let theirs = slice.stream().clone();
    // Fails for an error that an earlier call has left, as each call of cudarc does.
    check_not_captured(stream, &theirs)?;
    let (address, recorded) = slice.device_ptr_mut(&theirs);
    drop(recorded);
    observed(stream, theirs.context().check_err())?;
    Ok(address)
}

/// Forks a stream if cudarc tracks events in this context, but waits for none, as the context has no stream of its own.
/// While the fork exists, cudarc waits.
fn fork_if_only(stream: &Stream, theirs: &CudaStream) -> Result<Option<Arc<CudaStream>>> {
    let context = theirs.context();
    if !context.is_event_tracking() || context.is_in_multi_stream_mode() {
        return Ok(None);
    }
    // The fork waits for an event on the stream.
    check_not_captured(stream, theirs)?;
    observed(stream, theirs.fork()).map(Some)
}

/// Fails while cudarc's stream is being captured: a wait or an event would become a part of the capture.
fn check_not_captured(stream: &Stream, theirs: &CudaStream) -> Result<()> {
    // Refuses a call on the driver's own thread, in a forked process and after a fault.
    stream.device().check_process()?;
    stream.streams().observe(stream.device().backend().make_current())?;
    match observed(stream, theirs.capture_status())? {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => Err(Error::new(ErrorKind::Usage, "its stream is being captured: end the capture first")),
    }
}

/// cudarc's result as ours. If it reports a fault, the device is lost from here on.
fn observed<R>(stream: &Stream, result: std::result::Result<R, DriverError>) -> Result<R> {
    result.map_err(|cause| {
        // The next call that reaches the driver reports a fault.
        match stream.streams().observe(stream.device().backend().memory()) {
            Err(lost) if lost.is_device_lost() => lost,
            _ => Error::new(ErrorKind::Driver, format!("cudarc: {cause}")).at(stream.device().name()),
        }
    })
}

impl<A: Addresses> External<'_, A> {
    /// Like [`enqueue`](Self::enqueue), for a function that is written against cudarc: it gets the stream as a
    /// `CudaStream`, and the slices as [`CudarcSlice`]s. Their [`as_view`](CudarcSlice::as_view) and
    /// [`as_view_mut`](CudarcSlice::as_view_mut) return a `CudaView` and a `CudaViewMut`, which cudarc's safe calls
    /// (`memcpy_dtod`, `launch_builder`, cuBLAS' `Gemm`) and traits (`DevicePtr`, `DevicePtrMut`) accept.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use wakeline::{Buffer, Result, Stream, cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut}};
    ///
    /// // Existing code.
    /// fn duplicate(
    ///     stream: &Arc<CudaStream>, from: &impl DevicePtr<f32>, to: &mut impl DevicePtrMut<f32>,
    /// ) -> Result<()> {
    ///     Ok(stream.memcpy_dtod(from, to)?)
    /// }
    ///
    /// # fn enqueue(stream: &Stream, a: &Buffer<f32>, b: &mut Buffer<f32>) -> Result<()> {
    /// let call = stream.external("duplicate").read(a).write(b).emulated(|[a, mut b]| {
    ///     b.as_mut_slice::<f32>().copy_from_slice(a.as_slice());
    /// });
    /// // SAFETY: one copy on this stream, between the declared slices and within both.
    /// unsafe { call.enqueue_cudarc(|stream, [a, mut b]| duplicate(stream, &a.as_view(), &mut b.as_view_mut())) }
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue). The function keeps no clone of the stream. cudarc tracks no events on it: a
    /// `CudaSlice` of cudarc's own that the function uses there is ordered, and kept until the work is done, by the
    /// caller. [`Buffer::from_cudarc`] makes it a declared slice instead.
    pub unsafe fn enqueue_cudarc(
        self,
        call: impl for<'s> FnOnce(&'s Arc<CudaStream>, A::Array<CudarcSlice<'s>>) -> Result<()>,
    ) -> Result<()> {
        let context = self.stream().device().backend().cuda_context().cloned();
        let declared = self.declarations();
        let call = |raw: *mut std::ffi::c_void, addresses: A| {
            // Only a CUDA device calls the function.
            let context = context.ok_or_else(|| Error::internal("external work without a context"))?;
            // SAFETY: the handle is that of the stream of this call, in this context. By this function's contract no
            // clone of the wrapper outlives the call, and its work is that of this call.
            let stream = unsafe { context.wrap_borrowed_stream(raw.cast()) };
            call(&stream, A::array(|at| CudarcSlice::new(&stream, addresses.address(at), declared[at])))
        };
        // SAFETY: guaranteed by the caller.
        unsafe { self.enqueue(call) }
    }
}

/// A declared slice of device memory, for a function that is written against cudarc. See [`External::enqueue_cudarc`].
pub struct CudarcSlice<'s> {
    /// Its bytes, which it does not own.
    bytes: ManuallyDrop<CudaSlice<u8>>,
    declared: Declaration,
    of: PhantomData<&'s mut [u8]>,
}

impl CudarcSlice<'_> {
    fn new(stream: &Arc<CudaStream>, address: u64, declared: Declaration) -> Self {
        // SAFETY: the declared slice has this many bytes at the address. The value is never dropped: it owns nothing.
        let bytes = unsafe { stream.upgrade_device_ptr::<u8>(address, declared.bytes) };
        Self { bytes: ManuallyDrop::new(bytes), declared, of: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.declared.len
    }

    /// True if it has no elements, as the slice of an empty envelope.
    pub fn is_empty(&self) -> bool {
        self.declared.len == 0
    }

    /// The elements, as cudarc's view.
    ///
    /// # Panics
    /// If the slice was declared with elements of another type.
    pub fn as_view<T: Plain>(&self) -> CudaView<'_, T> {
        self.declared.element.check::<T>();
        // SAFETY: the slice was declared with elements of this type.
        let view = unsafe { self.bytes.transmute(self.declared.len) };
        view.unwrap_or_else(|| unreachable!("the slice has the bytes of its elements"))
    }

    /// The elements, as cudarc's view for writing.
    ///
    /// # Panics
    /// If the slice was declared with elements of another type, or with `read`.
    pub fn as_view_mut<T: Plain>(&mut self) -> CudaViewMut<'_, T> {
        self.declared.element.check::<T>();
        check_declared_write(self.declared.writes);
        // SAFETY: the slice was declared with elements of this type.
        let view = unsafe { self.bytes.transmute_mut(self.declared.len) };
        view.unwrap_or_else(|| unreachable!("the slice has the bytes of its elements"))
    }
}

impl Drop for CudarcSlice<'_> {
    fn drop(&mut self) {
        // SAFETY: taken only here, and the value is not used after its drop.
        let bytes = unsafe { ManuallyDrop::take(&mut self.bytes) };
        // Frees what the value holds besides the memory: its handle of the stream.
        bytes.leak();
    }
}

impl fmt::Debug for CudarcSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Declaration { len, element, .. } = &self.declared;
        f.debug_struct("CudarcSlice").field("of", &element.name).field("len", len).finish_non_exhaustive()
    }
}

/// An operator's own error, with cudarc's error as its cause.
impl From<DriverError> for Error {
    fn from(cause: DriverError) -> Self {
        Self::other(cause)
    }
}
