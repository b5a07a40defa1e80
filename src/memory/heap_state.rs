//! [`HeapState`]: the numbers of a [heap](super::heap): memory handed out, bound and idle, and its owners.

use smallvec::SmallVec;

use super::{Home, Memory, free_lists::FreeLists};

/// See the [module](self).
pub(super) struct HeapState {
    pub(super) shelves: FreeLists<Box<Memory>>,
    /// Of the driver's own pool: dropped and not yet returned, since the stream's queue was full. It counts as bound.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    pub(super) aside: Vec<Box<Memory>>,
    /// Bytes of blocks: of all; of those that were freed and are bound; of those that are idle. The others are handed
    /// out.
    pub(super) held: u64,
    pub(super) bound: u64,
    pub(super) idle: u64,
    /// Bytes that left this heap and have not reached the driver yet.
    pub(super) leaving: u64,
    /// Reserved for runs that have started.
    pub(super) reserved: u64,
    /// Bytes as requested: of what is handed out or bound; of what is bound.
    pub(super) used: u64,
    pub(super) waiting: u64,
    pub(super) peak: u64,
    pub(super) reused: u64,
    pub(super) from_driver: u64,
    /// How often idle memory was given up, and how often a request that does not wait was refused.
    pub(super) given_up: u64,
    pub(super) refused: u64,
    /// Bytes that are in use by, or reserved for, the operators of each flow.
    owners: SmallVec<[(usize, u64); 1]>,
}

impl HeapState {
    pub(super) fn new() -> Self {
        Self {
            shelves: FreeLists::new(),
            aside: Vec::new(),
            held: 0,
            bound: 0,
            idle: 0,
            leaving: 0,
            reserved: 0,
            used: 0,
            waiting: 0,
            peak: 0,
            reused: 0,
            from_driver: 0,
            given_up: 0,
            refused: 0,
            owners: SmallVec::new(),
        }
    }

    pub(super) fn out(&self) -> u64 {
        self.held - self.bound - self.idle
    }

    /// Bytes that are handed out, as requested.
    pub(super) fn in_use(&self) -> u64 {
        self.used - self.waiting
    }

    /// Counts memory that is being allocated from the driver.
    pub(super) fn count(&mut self, size: u64, bytes: u64, drawn: u64) {
        self.held += size;
        self.used += bytes;
        self.reserved -= drawn;
    }

    /// The allocation failed.
    pub(super) fn uncount(&mut self, size: u64, bytes: u64, drawn: u64) {
        self.gone(size, bytes);
        self.reserved += drawn;
    }

    pub(super) fn came_from_driver(&mut self) {
        self.from_driver += 1;
        self.peak = self.peak.max(self.used);
    }

    #[inline]
    pub(super) fn use_instead(&mut self, before: u64, after: u64) {
        if before != after {
            self.used = self.used - before + after;
            self.peak = self.peak.max(self.used);
        }
    }

    /// Memory that was handed out or bound leaves this heap.
    pub(super) fn gone(&mut self, size: u64, bytes: u64) {
        self.held -= size;
        self.used -= bytes;
    }

    #[inline]
    pub(super) fn binds(&mut self, memory: &Memory) {
        self.bound += memory.size;
        self.waiting += memory.bytes as u64;
    }

    pub(super) fn unbinds(&mut self, memory: &Memory) {
        self.bound -= memory.size;
        self.waiting -= memory.bytes as u64;
    }

    pub(super) fn own(&mut self, flow: usize, bytes: u64) {
        match self.owners.iter_mut().find(|(owner, _)| *owner == flow) {
            Some((_, owned)) => *owned += bytes,
            None => self.owners.push((flow, bytes)),
        }
    }

    pub(super) fn disown(&mut self, flow: usize, bytes: u64) {
        if let Some((_, owned)) = self.owners.iter_mut().find(|(owner, _)| *owner == flow) {
            *owned -= bytes;
        }
        self.owners.retain(|(_, owned)| *owned > 0);
    }

    pub(super) fn owned(&self, flow: usize) -> u64 {
        self.owners.iter().find(|(owner, _)| *owner == flow).map_or(0, |(_, owned)| *owned)
    }

    /// With their sizes. They count as leaving until they are released.
    pub(super) fn drain_idle(&mut self, bytes: u64) -> Vec<(u64, Home)> {
        let mut sum = 0;
        let drained = self.shelves.drain_idle(|size| {
            sum += size;
            sum >= bytes
        });
        self.idle -= sum;
        self.held -= sum;
        self.leaving += sum;
        self.given_up += u64::from(sum > 0);
        drained
    }

    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    pub(super) fn drain_bound(&mut self, which: impl Fn(&Memory) -> bool) -> Vec<Box<Memory>> {
        let drained = self.shelves.drain_bound(|memory| which(memory));
        for memory in &drained {
            self.unbinds(memory);
            self.gone(memory.size, memory.bytes as u64);
        }
        drained
    }
}
