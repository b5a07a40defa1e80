//! [`MemoryStats`]: what an allocator, or a device, holds and has done.

use std::{fmt, sync::Arc};

use super::{heap::Heap, ledger::Arena};
use crate::{
    device::{Device, MemoryInfo},
    error::Result,
};

/// What an [`Allocator`](super::Allocator), or a device, holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes that somebody has, as they were asked for: less than a block counts as what it is.
    pub in_use: u64,
    /// Bytes that were freed while a stream may still use them.
    pub waiting: u64,
    /// Bytes that are kept for whoever asks next.
    pub cached: u64,
    /// Bytes that are set apart for operators' runs.
    pub reserved: u64,
    /// The most bytes that were in use or waiting at once.
    pub peak: u64,
    /// Bytes that there can ever be, where that is known.
    pub capacity: Option<u64>,
    /// How often memory was handed out.
    pub allocations: u64,
    /// How often of these it was used again.
    pub reused: u64,
    /// How often the driver was asked for it.
    pub from_driver: u64,
}

impl MemoryStats {
    /// Nothing is held but what is kept for whoever asks next.
    ///
    /// There is nothing more to await than the work: once a flow's [`run`](crate::Flow::run) has returned, or the streams
    /// are [done](crate::Stream::completed), and everything is dropped, the next `stats()` says so.
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
        write!(f, "{in_use} bytes in use, {waiting} waiting for streams, {cached} kept, {peak} at most")
    }
}

impl Device {
    /// Free and total bytes of its memory, as the driver sees it; what wakeline keeps for whoever asks next is free, and
    /// [blocks](super::Allocator::blocks) are not.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault, [`Driver`](crate::ErrorKind::Driver) if the driver
    /// cannot say.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let info = self.backend().memory()?;
        let kept = |heap: &Arc<Heap>| if heap.has_blocks() { 0 } else { heap.stats().cached };
        let kept: u64 = Arena::of(self).ledger.visit(false, |heaps| heaps.iter().map(kept).sum());
        Ok(MemoryInfo { free: info.free.saturating_add(kept).min(info.total), ..info })
    }

    /// What all allocators of its memory hold and have done together.
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

    /// The same of page-locked memory of the host that is near it.
    pub fn pinned_memory_stats(&self) -> MemoryStats {
        let arena = Arena::of(self);
        arena.ledger.sweep(true);
        arena.ledger.visit(true, |heaps| MemoryStats::sum(heaps, None, None))
    }

    /// Gives the driver back what is kept of its memory for whoever asks next: so many bytes.
    pub fn trim_memory(&self) -> u64 {
        Arena::of(self).ledger.trim(false)
    }

    /// Bytes of device memory in use by wakeline now: what somebody has, and what was freed while a stream may still use
    /// it.
    pub fn memory_in_use(&self) -> u64 {
        Arena::of(self).ledger.in_use()
    }

    /// Bytes, of the device and of the host, that were left to the device when it was lost: what it may still touch is
    /// not used again.
    pub fn memory_leaked(&self) -> u64 {
        Arena::of(self).ledger.leaked()
    }

    /// The most bytes of device memory that were in use by wakeline at once.
    pub fn memory_peak(&self) -> u64 {
        Arena::of(self).ledger.peak()
    }
}
