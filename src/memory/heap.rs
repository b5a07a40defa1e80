//! A heap: the driver memory of one allocator, in use or free for reuse; and the [`Ledger`] of all heaps of a device.
//!
//! [`alloc`](super::alloc) decides which memory a request gets, [`reclaim`](super::reclaim) handles memory that is
//! dropped, and [`accounting`](super::accounting) counts both.

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::{
    Location, MAX_BYTES, Memory, MemoryStats,
    accounting::{Accounting, DeviceTotals},
    free_lists::{Block, FreeLists, Users},
    wait_queue::{WaitQueue, WaiterCount},
};
use crate::{
    device::{Device, LossObserver, WeakDevice, backend::Backend},
    error::{Error, ErrorKind, Result},
    stream::{Stream, WatchFlag},
    sync::{Level, Mutex, later, lock},
};

/// The source of a heap's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeapKind {
    /// The driver, whenever more is needed.
    Unbounded,
    /// `count` blocks of `bytes` bytes, allocated at creation.
    Blocks { bytes: u64, count: usize },
    /// The driver's own pool, on the streams themselves.
    StreamOrdered,
}

/// See the [module](self).
pub(crate) struct Heap {
    pub(super) device: WeakDevice,
    /// The place that messages name: `cuda:0`, `the host, page-locked for cuda:0`.
    pub(super) place: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) kind: HeapKind,
    /// True for page-locked host memory.
    host: bool,
    /// The maximum number of bytes that the heap holds of the driver's memory.
    limit: Option<u64>,
    granularity: u64,
    pub(super) wants_recycled: bool,
    pub(super) state: Mutex<HeapState>,
    pub(super) queue: WaitQueue,
    /// Set while the completion monitor sweeps the heap at each tick, which it does as long as memory is parked.
    pub(super) swept: WatchFlag,
}

/// The kind of a request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Answered at once. `drawn` is the number of bytes that were reserved for the request.
    Immediate { drawn: u64 },
    /// Waits in the queue if no memory is free.
    Queued,
}

impl Request {
    /// Answered at once, with nothing reserved for it.
    pub(super) const UNRESERVED: Self = Self::Immediate { drawn: 0 };

    #[inline]
    pub(super) fn drawn(self) -> u64 {
        match self {
            Self::Immediate { drawn } => drawn,
            Self::Queued => 0,
        }
    }
}

/// The memory of a heap that is not in use, and the accounting of all of it.
pub(super) struct HeapState {
    pub(super) free_lists: FreeLists<Box<Memory>>,
    /// Memory of the driver's own pool that was dropped and is not yet returned, since the queue of its stream was
    /// full. It counts as parked.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    pub(super) unreturned: Vec<(Stream, Box<Memory>)>,
    pub(super) accounting: Accounting,
}

impl HeapState {
    /// Takes out free blocks of at least `bytes` bytes in all, or all free blocks if there are fewer, with their sizes.
    /// They count as leaving until they are released.
    pub(super) fn evict(&mut self, bytes: u64) -> Vec<(u64, Location)> {
        let mut sum = 0;
        let evicted = self.free_lists.drain_free(|size| {
            sum += size;
            sum >= bytes
        });
        self.accounting.evict(sum);
        evicted
    }

    /// Takes out parked memory that leaks.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    pub(super) fn leak_parked(&mut self, which: impl Fn(&Memory) -> bool) -> Vec<Box<Memory>> {
        let leaked = self.free_lists.drain_parked(|memory| which(memory));
        leaked.iter().for_each(|memory| self.accounting.leak_parked(memory.extent()));
        leaked
    }
}

impl Block for Box<Memory> {
    /// Only the location: a free block must not keep alive the device and the heap, which own it.
    type Free = Location;

    #[inline]
    fn size(&self) -> u64 {
        self.size
    }

    #[inline]
    fn users(&mut self) -> Users {
        self.uses_mut().users()
    }

    fn forget_passed(&mut self) {
        self.uses_mut().forget_done();
    }

    #[inline]
    fn blocker(&mut self) -> (u64, u64) {
        self.uses_mut().last().unwrap_or_default()
    }
}

impl Heap {
    /// Creates a heap and registers it with the device. [`allocate_blocks`](Self::allocate_blocks) allocates its
    /// blocks.
    pub(super) fn new(
        device: &Device,
        ledger: &Arc<Ledger>,
        kind: HeapKind,
        host: bool,
        limit: Option<u64>,
    ) -> Arc<Self> {
        let backend = device.backend().clone();
        let limit = match kind {
            HeapKind::Blocks { bytes, count } => Some(bytes.saturating_mul(count as u64)),
            _ => limit,
        };
        let hands_out_parked = matches!(kind, HeapKind::Blocks { .. }) && !host;
        let state = HeapState {
            free_lists: FreeLists::new(),
            unreturned: Vec::new(),
            accounting: Accounting::new(&ledger.totals, host, limit, hands_out_parked),
        };
        let heap = Arc::new(Self {
            device: device.downgrade(),
            place: match (host, device.is_host()) {
                (_, true) => "the host".into(),
                (true, false) => format!("the host, page-locked for {device}"),
                (false, false) => device.to_string(),
            },
            ledger: ledger.clone(),
            kind,
            host,
            // A limit is exact to the byte.
            granularity: if host || limit.is_some() { 1 } else { backend.granularity() },
            limit,
            wants_recycled: !host && backend.wants_recycled(),
            backend,
            state: Mutex::at(Level::Heap, state),
            queue: WaitQueue::new(),
            swept: WatchFlag::new(),
        });
        ledger.register(&heap);
        heap
    }

    pub(super) fn is_host(&self) -> bool {
        self.host
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The upper limit; `None` if it is unknown.
    pub(super) fn capacity(&self) -> Option<u64> {
        self.limit.or_else(|| if self.host { None } else { Some(self.backend.memory().ok()?.total) })
    }

    /// True if `bytes` bytes can ever be free in this heap, as far as is known.
    pub(super) fn may_ever_hold(&self, bytes: usize) -> bool {
        let least = |bound: Option<u64>| bound.is_none_or(|bound| bytes as u64 <= bound);
        let of_device = || self.backend.memory().ok().map(|memory| memory.total);
        bytes <= MAX_BYTES && least(self.limit) && (self.host || least(of_device()))
    }

    /// True if the heap caches freed memory. If not, freed memory returns to the driver, which has its own cache.
    pub(super) fn caches(&self) -> bool {
        !self.host && self.kind == HeapKind::Unbounded || self.has_blocks()
    }

    pub(super) fn has_blocks(&self) -> bool {
        matches!(self.kind, HeapKind::Blocks { .. })
    }

    #[inline]
    pub(super) fn size_for(&self, bytes: u64) -> Result<u64> {
        match self.kind {
            HeapKind::Blocks { bytes: block, .. } if bytes > block => {
                let text =
                    format!("asked for {bytes} bytes, but the blocks have {block} bytes each: use larger blocks");
                Err(Error::new(ErrorKind::OutOfMemory, text).at(self.place.clone()))
            }
            HeapKind::Blocks { bytes: block, .. } => Ok(block),
            _ => Ok(size_of_class(bytes, self.granularity)),
        }
    }

    /// The error for a failed request, with the usage. For a heap of blocks, the numbers count blocks. `cause` is the
    /// driver's error.
    pub(super) fn exhausted(&self, bytes: u64, cause: Option<Error>) -> Error {
        let mut text = format!("asked for {bytes} bytes; {}", self.used_in_words());
        let stats = self.stats();
        if !self.has_blocks() {
            if stats.cached > 0 {
                text += &format!(", {} are cached", stats.cached);
            }
            if let Some(capacity) = stats.capacity {
                text += &format!(", of {capacity}");
            }
        }
        // The driver refused the request, not the allocator's limit: other processes may hold memory.
        let refused = cause.filter(|_| lock(&self.state).accounting.has_room(bytes, 0));
        let free = refused.as_ref().and_then(|_| self.backend.memory().ok()).map(|info| info.free);
        if let Some(free) = free {
            text += &format!("; the driver has {free} left");
        }
        let error = Error::new(ErrorKind::OutOfMemory, text).at(self.place.clone());
        match refused {
            // The driver has enough free memory, so its error has another cause.
            Some(cause) if free.is_none_or(|free| bytes <= free) => error.because(cause),
            _ => error,
        }
    }

    /// Adds advice where waiting helps.
    pub(super) fn advise(&self, error: Error, bytes: u64) -> Error {
        let stats = self.stats();
        let ever = self.size_for(bytes).is_ok() && stats.capacity.is_none_or(|capacity| bytes <= capacity);
        if error.is_out_of_memory() && ever && !stats.is_at_rest() {
            return error.advise("`alloc_when_free` waits for memory");
        }
        error
    }

    /// The usage, in words. For a heap of blocks, the numbers count blocks.
    pub(super) fn used_in_words(&self) -> String {
        let (in_use, waiting, reserved, of) = match self.kind {
            HeapKind::Blocks { bytes, count } => {
                let state = lock(&self.state);
                let of = &state.accounting;
                let [out, parked, reserved] = [of.blocks_in_use(), of.parked(), of.reserved()].map(|of| of / bytes);
                (out, parked, reserved, format!(" of {count} blocks"))
            }
            _ => {
                let MemoryStats { in_use, waiting, reserved, .. } = self.counts(None);
                (in_use, waiting, reserved, String::new())
            }
        };
        let mut text = format!("{in_use}{of} are in use, {waiting} wait for streams");
        if reserved > 0 {
            text += &format!(", {reserved} are reserved");
        }
        text
    }

    pub(super) fn stats(&self) -> MemoryStats {
        self.counts(self.capacity())
    }

    fn counts(&self, capacity: Option<u64>) -> MemoryStats {
        lock(&self.state).accounting.stats(capacity, self.has_blocks())
    }

    /// Wakes the first task in the queue, and all watchers.
    pub(super) fn wake(&self) {
        self.queue.first().wake();
    }

    /// Wakes all tasks in the queue and all watchers: the device is lost.
    pub(super) fn wake_all(&self) {
        self.queue.wake_all();
    }

    pub(super) fn has_waiters(&self) -> bool {
        self.queue.has_waiters()
    }
}

/// The heaps of a device, and their shared state.
#[derive(Default)]
pub(crate) struct Ledger {
    /// Includes a dropped heap until all of its memory is returned to the driver.
    pub(super) heaps: Mutex<Vec<Weak<Heap>>>,
    /// The number of dropped execs that hold memory of the driver until their launches are done.
    pub(super) dropped_execs: AtomicUsize,
    pub(super) totals: Arc<DeviceTotals>,
    /// The number of threads that may be about to return memory to the driver.
    pub(super) returners: AtomicUsize,
    pub(super) waiters: WaiterCount,
}

impl Ledger {
    pub(super) fn register(&self, heap: &Arc<Heap>) {
        lock(&self.heaps).push(Arc::downgrade(heap));
    }

    /// Removes a heap whose memory was returned to the driver.
    pub(super) fn deregister(&self, heap: &Heap) {
        lock(&self.heaps).retain(|known| !std::ptr::eq(known.as_ptr(), heap));
    }

    /// An exec was dropped. [`exec_destroyed`](Self::exec_destroyed) follows once the driver has its memory back.
    pub(super) fn exec_dropped(&self) {
        self.dropped_execs.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn exec_destroyed(&self) {
        self.dropped_execs.fetch_sub(1, Ordering::SeqCst);
    }

    /// The heaps of device memory, or of page-locked host memory.
    pub(super) fn heaps(&self, host: bool) -> Vec<Arc<Heap>> {
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|heap| heap.is_host() == host).collect()
    }

    /// A thread that may return memory to the driver holds the guard, starting before the memory is taken out of its
    /// heap.
    pub(super) fn returning(&self) -> ReturnGuard<'_> {
        self.returners.fetch_add(1, Ordering::SeqCst);
        ReturnGuard(self)
    }

    /// Memory became free: wakes the waiting tasks.
    #[inline]
    pub(super) fn notify(&self) {
        if self.has_waiting_tasks() {
            self.wake();
        }
    }

    /// Like [`notify`](Self::notify), for code that may hold a lock: runs at the end of the `Deferred` scope.
    pub(super) fn notify_later(self: &Arc<Self>) {
        if self.has_waiting_tasks() {
            let ledger = self.clone();
            later("a waker panicked", move || ledger.notify());
        }
    }

    #[inline]
    pub(super) fn has_waiting_tasks(&self) -> bool {
        self.waiters.is_any()
    }

    #[cold]
    fn wake(&self) {
        self.each(|heap| heap.wake());
    }

    fn each(&self, with: impl Fn(&Heap)) {
        let _gives = self.returning();
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|heap| with(heap));
    }
}

/// See [`Ledger::returning`].
pub(super) struct ReturnGuard<'a>(&'a Ledger);

impl Drop for ReturnGuard<'_> {
    fn drop(&mut self) {
        self.0.returners.fetch_sub(1, Ordering::SeqCst);
    }
}

impl LossObserver for Ledger {
    fn device_lost(&self) {
        self.each(Heap::wake_all);
    }

    fn has_waiters(&self) -> bool {
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.iter().any(|heap| heap.has_waiters())
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("totals", &self.totals).finish_non_exhaustive()
    }
}

/// The size class of a request: eight classes per power of two, so that at most an eighth is wasted; from 16 MiB on,
/// steps of 2 MiB. If the driver does not round sizes, neither does this function.
fn size_of_class(bytes: u64, granularity: u64) -> u64 {
    const LARGEST_STEP: u64 = 2 << 20;
    if granularity == 1 {
        return bytes;
    }
    let doubling = 1_u64 << bytes.max(1).ilog2();
    let step = (doubling / 8).clamp(granularity, LARGEST_STEP.max(granularity));
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("of", &self.place).field("kind", &self.kind).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::size_of_class;

    #[test]
    fn sizes_are_few_and_waste_little() {
        assert_eq!(size_of_class(1, 512), 512);
        assert_eq!(size_of_class(513, 512), 1024);
        assert_eq!(size_of_class(4 << 20, 512), 4 << 20);
        assert_eq!(size_of_class((1 << 20) + 1, 512), (1 << 20) + (128 << 10));
        assert_eq!(size_of_class((64 << 20) + 1, 512), 66 << 20);
        assert_eq!(size_of_class(1000, 1), 1000);
        assert_eq!(size_of_class(u64::MAX, 512), u64::MAX);
        for bytes in (4096..1 << 20).step_by(4099) {
            let size = size_of_class(bytes, 512);
            assert!(size >= bytes && size - bytes <= bytes / 8, "{bytes}: {size}");
            assert_eq!(size_of_class(size, 512), size);
        }
    }
}
