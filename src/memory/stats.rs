//! [`MemoryStats`]: usage and counters of an allocator or a device.

use std::fmt;

/// Usage and counters of an [`Allocator`](super::Allocator) or a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Requested bytes in use: an allocation that is smaller than its block counts with its own size.
    pub in_use: u64,
    /// Bytes that were freed while a stream might still be using them.
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
    /// It suffices to await the work: once a flow's [`run`](crate::Flow::run) has returned or the streams are
    /// [done](crate::Stream::completed), and everything is dropped, the next `stats()` is at rest.
    pub fn is_at_rest(&self) -> bool {
        self.in_use + self.waiting + self.reserved == 0
    }

    /// Sums all numbers except the capacity.
    pub(super) fn sum(all: impl Iterator<Item = Self>) -> Self {
        all.fold(Self::default(), |sum, next| Self {
            in_use: sum.in_use + next.in_use,
            waiting: sum.waiting + next.waiting,
            cached: sum.cached + next.cached,
            reserved: sum.reserved + next.reserved,
            peak: sum.peak + next.peak,
            capacity: None,
            allocations: sum.allocations + next.allocations,
            reused: sum.reused + next.reused,
            from_driver: sum.from_driver + next.from_driver,
        })
    }
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { in_use, waiting, cached, peak, .. } = self;
        write!(f, "{in_use} bytes in use, {waiting} waiting for streams, {cached} cached, {peak} at peak")
    }
}
