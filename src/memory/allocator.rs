//! [`Allocator`]: a source of device memory or page-locked host memory.

use std::{fmt, sync::Arc};

use super::{
    Buffer, MemoryStats, Plain,
    arena::Arena,
    bytes_of,
    heap::{Heap, HeapKind, Request},
};
use crate::{
    device::{Device, backend::MAX_ALIGNMENT},
    error::{Error, ErrorKind, Result},
    stream::Stream,
};

/// Allocates memory on one device, or page-locked host memory for it, and takes the memory back when it is dropped. A
/// cheap handle: clones refer to the same allocator.
///
/// | | source | use |
/// |---|---|---|
/// | [`unbounded`](Self::unbounded) | the driver, as needed; freed memory is cached | the default |
/// | [`blocks`](Self::blocks) | reserved at creation | a fixed amount |
/// | [`stream_ordered`](Self::stream_ordered) | the driver's own pool, on the streams | for sharing it with other libraries |
/// | [`pinned`](Self::pinned), [`pinned_blocks`](Self::pinned_blocks) | page-locked host memory | for copies |
///
/// Freed memory is reused at once on the stream that used it and on streams ordered after it, and elsewhere once the
/// device is done with it. Memory that enqueued work might still access is never handed out.
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
    /// The device's default allocator: allocates from the driver as needed, and caches freed memory. It returns the
    /// cached memory when memory runs out, when it is [trimmed](Self::trim), and when the device is dropped.
    pub fn unbounded(device: &Device) -> Self {
        Self { device: device.clone(), heap: Arena::of(device).device_heap(device).clone() }
    }

    /// `count` blocks of `block_bytes` bytes, reserved now. Each allocation takes one block, however small.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the device does not have that much memory;
    /// [`Usage`](ErrorKind::Usage) for 0 blocks or bytes.
    pub fn blocks(device: &Device, block_bytes: u64, count: usize) -> Result<Self> {
        Self::reserved(device, block_bytes, count, false)
    }

    /// The driver's own pool, with `cuMemAllocFromPoolAsync` and `cuMemFreeAsync` on the streams themselves: memory is
    /// valid from one point of a stream to another. Nothing is cached here; freed memory stays in the driver's pool.
    ///
    /// It allocates only for a stream: use [`alloc`](Self::alloc), which is an error on a CUDA device without memory
    /// pools.
    pub fn stream_ordered(device: &Device) -> Self {
        Self::of_kind(device, HeapKind::StreamOrdered, false, None)
    }

    /// Page-locked host memory, which the device copies to and from asynchronously. It is reused once all work that
    /// used it has passed.
    pub fn pinned(device: &Device) -> Self {
        Self { device: device.clone(), heap: Arena::of(device).pinned_heap(device).clone() }
    }

    /// Like [`blocks`](Self::blocks), in page-locked host memory.
    ///
    /// # Errors
    /// Those of [`blocks`](Self::blocks).
    pub fn pinned_blocks(device: &Device, block_bytes: u64, count: usize) -> Result<Self> {
        Self::reserved(device, block_bytes, count, true)
    }

    fn reserved(device: &Device, block_bytes: u64, count: usize, host: bool) -> Result<Self> {
        if block_bytes == 0 || count == 0 {
            let text = format!(
                "asked for {count} blocks of {block_bytes} bytes: ask for at least one block of at least one byte"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let kind = HeapKind::Blocks { bytes: block_bytes, count };
        let place = |error: Error| error.at(format!("{count} blocks of {block_bytes} bytes"));
        check_capacity(device, host || device.is_host(), block_bytes, count).map_err(place)?;
        let made = Self::of_kind(device, kind, host, None);
        made.heap.allocate_blocks(device).map_err(place)?;
        Ok(made)
    }

    fn of_kind(device: &Device, kind: HeapKind, host: bool, limit: Option<u64>) -> Self {
        let heap = Heap::new(device, &Arena::of(device).ledger, kind, host, limit);
        Self { device: device.clone(), heap }
    }

    /// Another allocator of the same kind that never holds more than `bytes`. An allocator of blocks already has a
    /// maximum, and keeps it.
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
            HeapKind::Blocks { .. } => self.clone(),
            kind => Self::of_kind(&self.device, kind, self.heap.is_host(), Some(bytes)),
        }
    }

    /// The device of its memory, or the device that the memory is page-locked for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Current usage and counters. Queries the device, without blocking, for freed memory whose uses are done: memory
    /// that was dropped before a flow's [`run`](crate::Flow::run) returned is not counted as waiting.
    pub fn stats(&self) -> MemoryStats {
        self.heap.sweep();
        self.heap.stats()
    }

    /// Returns cached memory to the driver, except for blocks. Returns the number of bytes.
    pub fn trim(&self) -> u64 {
        self.heap.trim()
    }

    /// Allocates memory for `len` elements, with unknown contents, for work that is enqueued on `stream` from now on.
    /// Other streams can use it too if they are ordered after this point.
    ///
    /// If no memory is free, this may make the stream wait, on the device, for freed memory that is still in use. The
    /// host does not wait.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers; [`Usage`](ErrorKind::Usage) for 0 elements or a stream
    /// on another device; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn alloc<T: Plain>(&self, stream: &Stream, len: usize) -> Result<Buffer<T>> {
        let bytes = len.saturating_mul(size_of::<T>()) as u64;
        self.alloc_for(Some(stream), len).map_err(|error| self.heap.advise(error, bytes))
    }

    /// Like [`alloc`](Self::alloc); without a stream, for use on any stream.
    pub(crate) fn alloc_for<T: Plain>(&self, stream: Option<&Stream>, len: usize) -> Result<Buffer<T>> {
        let memory = self.heap.alloc(&self.device, bytes_of::<T>(len)?, stream, Request::UNRESERVED)?;
        Ok(Buffer::of_memory(memory, len))
    }

    /// True for page-locked host memory.
    pub fn is_host(&self) -> bool {
        self.heap.is_host()
    }

    /// Like [`alloc`](Self::alloc), but waits until memory is free. Requests are served first come, first served.
    ///
    /// It waits until other owners drop their memory. If the waiting task itself owns memory of this allocator, it may
    /// deadlock, and the deadlock is not detected: request all memory at once. A wait within an operator's run is never
    /// reported as a stall, since code outside the flow might free memory. To have stalls detected, give the operator a
    /// [`memory`](crate::condition::memory) condition instead: if operators wait for each other's memory, the flow ends
    /// with [`Stalled`](ErrorKind::Stalled), and the error says which operator waits for what.
    ///
    /// # Errors
    /// Those of [`alloc`](Self::alloc). [`OutOfMemory`](ErrorKind::OutOfMemory) is returned only if the request exceeds
    /// the capacity, or if no memory is in use that could be freed.
    ///
    /// # Cancel safety
    /// Dropping the future gives up its place in the queue and has no other effect. A future that has been polled keeps
    /// its place until it resolves or is dropped: if it is not polled again, it blocks all requests behind it until the
    /// device is lost.
    pub async fn alloc_when_free<T: Plain>(&self, stream: &Stream, len: usize) -> Result<Buffer<T>> {
        let memory = self.heap.alloc_when_free(&self.device, bytes_of::<T>(len)?, Some(stream)).await?;
        Ok(Buffer::of_memory(memory, len))
    }

    pub(crate) fn heap(&self) -> &Arc<Heap> {
        &self.heap
    }
}

impl Stream {
    /// Allocates memory for `len` elements, with unknown contents, from the device's default [`Allocator`], for work
    /// that is enqueued on this stream from now on.
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
    /// Those of [`Allocator::alloc`].
    pub fn alloc<T: Plain>(&self, len: usize) -> Result<Buffer<T>> {
        let device = self.device();
        let memory = Arena::of(device).device_heap(device).alloc(
            device,
            bytes_of::<T>(len)?,
            Some(self),
            Request::UNRESERVED,
        )?;
        Ok(Buffer::of_memory(memory, len))
    }
}

impl PartialEq for Allocator {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.heap, &other.heap)
    }
}

impl Eq for Allocator {}

/// Source and size: `2 blocks of 1048576 bytes on cuda:0`.
impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.heap.place();
        match (self.heap.kind, self.heap.limit()) {
            (HeapKind::Blocks { bytes, count: 1 }, _) => write!(f, "1 block of {bytes} bytes on {place}"),
            (HeapKind::Blocks { bytes, count }, _) => write!(f, "{count} blocks of {bytes} bytes on {place}"),
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

/// The maximum number of pieces in one allocator, or in one hub at one place: each piece is a separate allocation from
/// the driver.
const MAX_PIECES: usize = 1 << 20;

/// The minimum size of a piece.
const MIN_BYTES: u64 = MAX_ALIGNMENT as u64;

/// Below this size, the host's memory size is not queried.
const SMALL: u64 = 1 << 30;

/// Fails if `count` pieces of `bytes` bytes can never be available in the memory of `device` or, with `host`, in host
/// memory.
///
/// The amount of memory that is free now does not matter: other users may free some.
///
/// # Errors
/// [`OutOfMemory`](ErrorKind::OutOfMemory) with the numbers.
pub(crate) fn check_capacity(device: &Device, host: bool, bytes: u64, count: usize) -> Result<()> {
    let refuse = |text: String| Err(Error::new(ErrorKind::OutOfMemory, text));
    if count > MAX_PIECES {
        return refuse(format!(
            "asked for {count} pieces of {bytes} bytes, and the limit is {MAX_PIECES} pieces: ask for fewer, larger \
             pieces"
        ));
    }
    let all = bytes.max(MIN_BYTES).checked_mul(count as u64);
    let on_device = if host { None } else { device.backend().memory().ok().map(|info| info.total) };
    // The memory of an emulated device is host memory.
    let on_host = if host || device.is_emulated() { host_bytes(all.unwrap_or(u64::MAX)) } else { None };
    let most = on_device.into_iter().chain(on_host).min().unwrap_or(u64::MAX);
    match all {
        Some(all) if all <= most => Ok(()),
        _ => {
            let place = if host { "the host" } else { device.name() };
            refuse(format!(
                "asked for {count} pieces of {bytes} bytes (each takes at least {MIN_BYTES}), and {place} never has \
                 more than {most}: ask for less"
            ))
        }
    }
}

/// The size of host memory, if `wanted` is large enough for it to matter and the system reports it.
fn host_bytes(wanted: u64) -> Option<u64> {
    if wanted < SMALL { None } else { crate::device::host_memory() }
}
