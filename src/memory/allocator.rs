//! [`Allocator`]: where memory comes from, and where it goes when it is dropped.

use std::{fmt, sync::Arc};

use super::{
    Buffer, MemoryStats, Plain,
    buffer::bytes_of,
    can_hold,
    heap::{Asker, Heap, Kind},
    ledger::Arena,
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    stream::Stream,
};

/// Hands out memory of one device, or page-locked memory of the host near it, and takes it back when it is dropped. A
/// cheap handle: clones are the same allocator.
///
/// | | where from | |
/// |---|---|---|
/// | [`unbounded`](Self::unbounded) | the driver, as needed; what is freed is kept | what everything uses that names no other |
/// | [`blocks`](Self::blocks) | reserved at once | never more, never less |
/// | [`stream_ordered`](Self::stream_ordered) | the driver's own pool, on the streams | to share it with other libraries |
/// | [`pinned`](Self::pinned), [`pinned_blocks`](Self::pinned_blocks) | page-locked memory of the host | for copies |
///
/// Memory that was freed is used again at once on the stream that used it, and on one that comes after that; elsewhere
/// when the device is done with it. Nobody ever gets memory that somebody else's work may still touch.
///
/// ```
/// use wakeline::{Stream, device::{Device, Emulated}, memory::Allocator};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let two = Allocator::blocks(&device, 1 << 20, 2)?;
/// let first = two.alloc::<f32>(&stream, 1 << 18)?;
/// let second = two.alloc::<f32>(&stream, 1000)?;
/// assert!(two.alloc::<u8>(&stream, 1).unwrap_err().is_out_of_memory());
/// drop(first);
/// let third = two.alloc_when_free::<u8>(&stream, 1).await?;
/// assert_eq!(two.stats().from_driver, 2);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Allocator {
    device: Device,
    heap: Arc<Heap>,
}

impl Allocator {
    /// The device's own: takes what it needs from the driver, and keeps what is freed for whoever asks next. It gives that
    /// back when memory runs out, when it is [trimmed](Self::trim), and with the device.
    pub fn unbounded(device: &Device) -> Self {
        Self { device: device.clone(), heap: Arena::of(device).own(device).clone() }
    }

    /// `count` blocks of `block_bytes` bytes, reserved now. Each allocation is a block, however small.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the device has not so much; [`Usage`](ErrorKind::Usage) for none.
    pub fn blocks(device: &Device, block_bytes: u64, count: usize) -> Result<Self> {
        Self::reserved(device, block_bytes, count, false)
    }

    /// The driver's own pool, by `cuMemAllocFromPoolAsync` and `cuMemFreeAsync` on the streams themselves: memory is there
    /// from one point of a stream on until another. Nothing is kept here; what is freed stays in the driver's pool.
    ///
    /// It allocates on streams alone: [`alloc`](Self::alloc). A CUDA device without memory pools says so there.
    pub fn stream_ordered(device: &Device) -> Self {
        Self::of_kind(device, Kind::StreamOrdered, false, None)
    }

    /// Page-locked memory of the host, which the device copies to and from without a pause. It is used again when all that
    /// used it has passed.
    pub fn pinned(device: &Device) -> Self {
        Self { device: device.clone(), heap: Arena::of(device).pinned(device).clone() }
    }

    /// As [`blocks`](Self::blocks), in page-locked memory of the host.
    ///
    /// # Errors
    /// As [`blocks`](Self::blocks).
    pub fn pinned_blocks(device: &Device, block_bytes: u64, count: usize) -> Result<Self> {
        Self::reserved(device, block_bytes, count, true)
    }

    fn reserved(device: &Device, block_bytes: u64, count: usize, host: bool) -> Result<Self> {
        if block_bytes == 0 || count == 0 {
            let text = format!("{count} blocks of {block_bytes} bytes: at least one of at least one byte");
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let kind = Kind::Blocks { bytes: block_bytes, count };
        let place = |error: Error| error.at(format!("{count} blocks of {block_bytes} bytes"));
        can_hold(device, host || device.is_host(), block_bytes, count).map_err(place)?;
        let made = Self::of_kind(device, kind, host, None);
        made.heap.reserve_blocks(device).map_err(place)?;
        Ok(made)
    }

    fn of_kind(device: &Device, kind: Kind, host: bool, limit: Option<u64>) -> Self {
        let heap = Heap::new(device, &Arena::of(device).ledger, kind, host, limit);
        Self { device: device.clone(), heap }
    }

    /// Another allocator of the same kind that never holds more than `bytes`. Blocks have their maximum already, and keep
    /// it.
    ///
    /// ```
    /// use wakeline::{Stream, device::{Device, Emulated}, memory::Allocator};
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let stream = Stream::new(&device)?;
    /// let little = Allocator::unbounded(&device).maximum(1000);
    /// let all = little.alloc::<u8>(&stream, 1000)?;
    /// assert!(little.alloc::<u8>(&stream, 1).unwrap_err().is_out_of_memory());
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    #[must_use]
    pub fn maximum(&self, bytes: u64) -> Self {
        match self.heap.kind {
            Kind::Blocks { .. } => self.clone(),
            kind => Self::of_kind(&self.device, kind, self.heap.is_host(), Some(bytes)),
        }
    }

    /// The device that its memory lies on, or is page-locked for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it holds and has done. The device is asked what of the memory that waits for streams is done, and not waited
    /// for: so what was dropped before a flow's [`run`](crate::Flow::run) has returned is at rest.
    pub fn stats(&self) -> MemoryStats {
        self.heap.sweep();
        self.heap.stats()
    }

    /// Gives the driver back what is kept for whoever asks next: so many bytes. Blocks stay.
    pub fn trim(&self) -> u64 {
        self.heap.trim()
    }

    /// Memory for `len` elements, for work on this stream from now on; contents unknown. Other streams may use it too, and
    /// come after.
    ///
    /// Where there is none left, the stream may be made to wait, on the device, for memory that was freed and is not yet
    /// done with. The host waits for nothing.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers; [`Usage`](ErrorKind::Usage) for no elements, or for a stream
    /// of another device; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn alloc<T: Plain>(&self, stream: &Stream, len: usize) -> Result<Buffer<T>> {
        let bytes = len.saturating_mul(size_of::<T>()) as u64;
        self.alloc_for(Some(stream), len).map_err(|error| self.heap.advise(error, bytes))
    }

    /// Without a stream: for whoever.
    pub(crate) fn alloc_for<T: Plain>(&self, stream: Option<&Stream>, len: usize) -> Result<Buffer<T>> {
        let memory = self.heap.alloc(&self.device, bytes_of::<T>(len)?, stream, Asker::Call(0))?;
        Ok(Buffer::of_memory(memory, len))
    }

    /// True for page-locked memory of the host.
    pub fn is_host(&self) -> bool {
        self.heap.is_host()
    }

    /// As [`alloc`](Self::alloc), as soon as there is some: those who wait are served in the order of their coming.
    ///
    /// It waits for whoever has the memory to drop it, and nobody finds out if that is the one who waits. So hold none of the
    /// allocator's memory while you wait for more of it: ask for all at once. In an operator's run it holds the flow up as
    /// any other future does that somebody outside may resolve, and is never reported as a stall. Where a flow is to find
    /// out, give the operator a [`memory`](crate::condition::memory) condition instead: operators that wait for each
    /// other's memory end the flow with [`Stalled`](ErrorKind::Stalled), which says who waits for what.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc): [`OutOfMemory`](ErrorKind::OutOfMemory) if there can never be so much, or if nobody has any
    /// that could come back.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the line, and nothing else. One that was polled keeps its place until it is
    /// dropped: if it is not polled again, it holds up all requests behind it, until the device is lost.
    pub async fn alloc_when_free<T: Plain>(&self, stream: &Stream, len: usize) -> Result<Buffer<T>> {
        let memory = self.heap.alloc_when_free(&self.device, bytes_of::<T>(len)?, Some(stream)).await?;
        Ok(Buffer::of_memory(memory, len))
    }

    pub(crate) fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }
}

impl Stream {
    /// Memory of the device's own [`Allocator`] for `len` elements, for work on this stream from now on; contents unknown.
    ///
    /// ```
    /// use wakeline::{Stream, device::{Device, Emulated}};
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let stream = Stream::new(&device)?;
    /// for _ in 0..3 {
    ///     let mut scratch = stream.alloc::<f32>(1 << 10)?;       // the same memory, each time
    ///     stream.fill(&mut scratch, 0.0)?;
    /// }
    /// assert_eq!(device.memory_stats().from_driver, 1);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    pub fn alloc<T: Plain>(&self, len: usize) -> Result<Buffer<T>> {
        let device = self.device();
        let memory = Arena::of(device).own(device).alloc(device, bytes_of::<T>(len)?, Some(self), Asker::Call(0))?;
        Ok(Buffer::of_memory(memory, len))
    }
}

impl PartialEq for Allocator {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.heap, &other.heap)
    }
}

impl Eq for Allocator {}

/// What it hands out, and how much of it: `2 blocks of 1048576 bytes on cuda:0`.
impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.heap.place();
        match (self.heap.kind, self.heap.limit()) {
            (Kind::Blocks { bytes, count: 1 }, _) => write!(f, "1 block of {bytes} bytes on {place}"),
            (Kind::Blocks { bytes, count }, _) => write!(f, "{count} blocks of {bytes} bytes on {place}"),
            (_, Some(limit)) => write!(f, "{limit} bytes on {place}"),
            (_, None) => write!(f, "the memory of {place}"),
        }
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator")
            .field("of", &self.to_string())
            .field("stats", &self.heap.stats())
            .finish_non_exhaustive()
    }
}
