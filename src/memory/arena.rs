//! The [`Arena`] of a device: its ledger, its default heaps, and the operations on all of its heaps.

use std::{
    sync::{Arc, OnceLock, Weak, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    MemoryStats,
    heap::{Heap, HeapKind, Ledger},
};
use crate::{
    device::{Device, MemoryInfo},
    error::Result,
    sync::lock,
};

/// How long a refused request waits for another thread that is returning memory to the driver. The wait is bounded,
/// since the returning thread may be this thread, further up its stack, or may be blocked in a driver call that waits
/// for the device. The bound is ten times the scheduling delay of a thread on a machine with three times as many
/// threads as cores.
const RETURN_TIMEOUT: Duration = Duration::from_millis(100);

/// The ledger of a device, and its default heaps.
pub(super) struct Arena {
    pub(super) ledger: Arc<Ledger>,
    device_heap: OnceLock<Arc<Heap>>,
    pinned_heap: OnceLock<Arc<Heap>>,
}

impl Arena {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            let ledger: Arc<Ledger> = Arc::default();
            let observer: Weak<Ledger> = Arc::downgrade(&ledger);
            device.on_loss(observer);
            Arc::new(Self { ledger, device_heap: OnceLock::new(), pinned_heap: OnceLock::new() })
        })
    }

    pub(super) fn device_heap(&self, device: &Device) -> &Arc<Heap> {
        self.device_heap.get_or_init(|| Heap::new(device, &self.ledger, HeapKind::Unbounded, false, None))
    }

    pub(super) fn pinned_heap(&self, device: &Device) -> &Arc<Heap> {
        self.pinned_heap.get_or_init(|| Heap::new(device, &self.ledger, HeapKind::Unbounded, true, None))
    }
}

impl Ledger {
    /// Calls `with` with the heaps. A heap whose last owner drops it during the call is dropped here.
    pub(super) fn visit<R>(&self, host: bool, with: impl FnOnce(&[Arc<Heap>]) -> R) -> R {
        let _gives = self.returning();
        let heaps = self.heaps(host);
        with(&heaps)
    }

    /// Bytes of device memory in blocks that are not handed out. Other allocators cannot use them.
    pub(super) fn spare_blocks(&self) -> u64 {
        let spare = |heap: &Arc<Heap>| {
            heap.limit().map_or(0, |limit| limit.saturating_sub(lock(&heap.state).accounting.requested()))
        };
        self.visit(false, |heaps| heaps.iter().filter(|heap| heap.has_blocks()).map(spare).sum())
    }

    /// Queries the device for parked memory whose uses are done.
    pub(super) fn sweep(&self, host: bool) {
        self.visit(host, |heaps| heaps.iter().for_each(|heap| heap.sweep()));
    }

    /// Returns free memory to the driver. Returns the number of bytes.
    pub(super) fn trim(&self, host: bool) -> u64 {
        self.visit(host, |heaps| heaps.iter().map(|heap| heap.trim()).sum())
    }

    /// Called when the driver is out of memory. Returns cached memory, and freed memory whose uses are done, to the
    /// driver, including memory of dropped allocators. Waits at most [`RETURN_TIMEOUT`] for other threads that are
    /// returning memory. True if any was returned since `totals.returned()` was `before`.
    pub(super) fn make_room(&self, host: bool, before: u64) -> bool {
        self.sweep(host);
        self.trim(host);
        let until = Instant::now() + RETURN_TIMEOUT;
        while self.is_leaving() && Instant::now() < until {
            thread::yield_now();
        }
        self.totals.returned() > before
    }

    /// Returns a number if no memory is handed out. If two calls return the same number, no memory was handed out
    /// between them.
    pub(super) fn idle_mark(&self, host: bool) -> Option<u64> {
        let _gives = self.returning();
        let all = lock(&self.heaps).clone();
        let all: Vec<_> = all.iter().map(Weak::upgrade).collect();
        let is_leaving = self.dropped_execs.load(Ordering::SeqCst) > 0 || all.iter().any(Option::is_none);
        let of_kind = all.iter().flatten().filter(|heap| heap.is_host() == host);
        if is_leaving { None } else { of_kind.map(|heap| lock(&heap.state).accounting.idle_mark()).sum() }
    }

    /// True while a thread is returning memory to the driver or may be about to.
    fn is_leaving(&self) -> bool {
        self.returners.load(Ordering::SeqCst) > 0 || lock(&self.heaps).iter().any(|heap| heap.strong_count() == 0)
    }
}

impl Device {
    /// Free and total bytes of the device's memory as the driver reports them. Memory that wakeline caches counts as
    /// free; [blocks](super::Allocator::blocks) do not.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault, [`Driver`](crate::ErrorKind::Driver) if the driver
    /// does not report the numbers.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let info = self.backend().memory()?;
        let kept = |heap: &Arc<Heap>| if heap.has_blocks() { 0 } else { heap.stats().cached };
        let kept: u64 = Arena::of(self).ledger.visit(false, |heaps| heaps.iter().map(kept).sum());
        Ok(MemoryInfo { free: info.free.saturating_add(kept).min(info.total), ..info })
    }

    /// Usage and counters, summed over all allocators of the device's memory.
    ///
    /// ```
    /// use wakeline::{Buffer, device::{Device, Emulated}};
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let buffer = Buffer::<u8>::new(&device, 1 << 10)?;
    /// assert_eq!(device.memory_stats().in_use, 1 << 10);
    /// drop(buffer);
    /// assert_eq!(device.memory_stats().cached, 1 << 10);
    /// assert_eq!(device.trim_memory(), 1 << 10);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    pub fn memory_stats(&self) -> MemoryStats {
        let arena = Arena::of(self);
        arena.ledger.sweep(false);
        let capacity = self.backend().memory().ok().map(|info| info.total);
        let sum = arena.ledger.visit(false, |heaps| MemoryStats::sum(heaps.iter().map(|heap| heap.stats())));
        MemoryStats { capacity, peak: arena.ledger.totals.peak(), ..sum }
    }

    /// Like [`memory_stats`](Self::memory_stats), for page-locked host memory that was allocated for this device.
    pub fn pinned_memory_stats(&self) -> MemoryStats {
        let arena = Arena::of(self);
        arena.ledger.sweep(true);
        arena.ledger.visit(true, |heaps| MemoryStats::sum(heaps.iter().map(|heap| heap.stats())))
    }

    /// Returns the cached device memory to the driver. Returns the number of bytes.
    pub fn trim_memory(&self) -> u64 {
        Arena::of(self).ledger.trim(false)
    }

    /// Bytes of device memory that wakeline has in use now: allocated, or freed while a stream might still be using
    /// them.
    pub fn memory_in_use(&self) -> u64 {
        Arena::of(self).ledger.totals.in_use()
    }

    /// Bytes of device and host memory that were leaked when the device was lost: memory that the device might still
    /// access is not reused.
    pub fn memory_leaked(&self) -> u64 {
        Arena::of(self).ledger.totals.leaked()
    }

    /// The largest number of bytes of device memory that wakeline had in use at once.
    pub fn memory_peak(&self) -> u64 {
        Arena::of(self).ledger.totals.peak()
    }
}
