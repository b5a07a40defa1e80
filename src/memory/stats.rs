//! [`MemoryStats`]: usage and counters of an allocator or a device.

use std::{fmt, sync::Arc};

use super::{heap::Heap, ledger::Arena};
use crate::{
    device::{Device, MemoryInfo},
    error::Result,
};

/// Usage and counters of an [`Allocator`](super::Allocator) or a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes in use, as requested: an allocation smaller than its block counts with its own size.
    pub in_use: u64,
    /// Bytes that were freed and that a stream may still use.
    pub waiting: u64,
    /// Bytes that were freed and are cached for the next allocation.
    pub cached: u64,
    /// Bytes that are reserved for operators' runs.
    pub reserved: u64,
    /// The largest number of bytes that were in use or waiting at once.
    pub peak: u64,
    /// The upper limit in bytes, if it is known.
    pub capacity: Option<u64>,
    /// The number of allocations.
    pub allocations: u64,
    /// Allocations that reused freed memory.
    pub reused: u64,
    /// Allocations from the driver.
    pub from_driver: u64,
}

impl MemoryStats {
    /// True if nothing is in use, waiting or reserved; memory may be cached.
    ///
    /// Only the work need be awaited: once a flow's [`run`](crate::Flow::run) has returned, or the streams are
    /// [done](crate::Stream::completed), and everything is dropped, the next `stats()` is at rest.
    pub fn is_at_rest(&self) -> bool {
        self.in_use + self.waiting + self.reserved == 0
    }

    fn sum(heaps: &[Arc<Heap>], peak: Option<u64>, capacity: Option<u64>) -> Self {
        let mut sum = Self { capacity, ..Self::default() };
        for heap in heaps {
            let own = heap.stats();
            sum.in_use += own.in_use;
            sum.waiting += own.waiting;
            sum.cached += own.cached;
            sum.reserved += own.reserved;
            sum.peak += own.peak;
            sum.allocations += own.allocations;
            sum.reused += own.reused;
            sum.from_driver += own.from_driver;
        }
        sum.peak = peak.unwrap_or(sum.peak);
        sum
    }
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { in_use, waiting, cached, peak, .. } = self;
        write!(f, "{in_use} bytes in use, {waiting} waiting for streams, {cached} cached, {peak} at peak")
    }
}

impl Device {
    /// Free and total bytes of its memory as the driver reports them. Memory that wakeline caches counts as free,
    /// [blocks](super::Allocator::blocks) do not.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault, [`Driver`](crate::ErrorKind::Driver) if the driver
    /// does not report it.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let info = self.backend().memory()?;
        let kept = |heap: &Arc<Heap>| if heap.has_blocks() { 0 } else { heap.stats().cached };
        let kept: u64 = Arena::of(self).ledger.visit(false, |heaps| heaps.iter().map(kept).sum());
        Ok(MemoryInfo { free: info.free.saturating_add(kept).min(info.total), ..info })
    }

    /// The sum over all allocators of its memory.
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
        arena.ledger.visit(false, |heaps| MemoryStats::sum(heaps, Some(arena.ledger.peak()), capacity))
    }

    /// The same for page-locked host memory near it.
    pub fn pinned_memory_stats(&self) -> MemoryStats {
        let arena = Arena::of(self);
        arena.ledger.sweep(true);
        arena.ledger.visit(true, |heaps| MemoryStats::sum(heaps, None, None))
    }

    /// Returns the cached device memory to the driver, and the number of bytes to the caller.
    pub fn trim_memory(&self) -> u64 {
        Arena::of(self).ledger.trim(false)
    }

    /// Bytes of device memory that wakeline has in use now: allocated, or freed while a stream may still use them.
    pub fn memory_in_use(&self) -> u64 {
        Arena::of(self).ledger.in_use()
    }

    /// Bytes of device and host memory that were leaked when the device was lost: memory that it may still access is
    /// not reused.
    pub fn memory_leaked(&self) -> u64 {
        Arena::of(self).ledger.leaked()
    }

    /// The largest number of bytes of device memory that wakeline had in use at once.
    pub fn memory_peak(&self) -> u64 {
        Arena::of(self).ledger.peak()
    }
}
