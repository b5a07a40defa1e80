//! [`Reservation`]: memory that is reserved for an operator's run.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    task::Context,
};

use super::{
    Allocator, Buffer, MAX_BYTES, Plain,
    accounting::Accounting,
    bytes_of,
    heap::{Heap, HeapKind, Request},
    wait_queue::WaitSlot,
    waiting::OldestWait,
};
use crate::{
    error::Result,
    stream::{Stream, Streams},
    sync::{Mutex, lock},
};

impl Heap {
    /// The reason why a reservation for an operator of this flow is not possible now.
    pub(super) fn blocker(&self, bytes: u64, flow: usize) -> ReserveBlocker {
        let others = self.spare_in_other_heaps();
        let state = lock(&self.state);
        if self.fits(&state.accounting, bytes, others) {
            return ReserveBlocker::Nothing;
        }
        let counts = &state.accounting;
        let parked = if self.has_blocks() && !self.is_host() { 0 } else { counts.parked() };
        let limit = self.capacity().unwrap_or(u64::MAX);
        if parked > 0 && counts.blocks_in_use().saturating_add(counts.reserved()).saturating_add(bytes) <= limit {
            return ReserveBlocker::Streams;
        }
        let whole = if self.limit().is_some() || self.is_host() {
            counts.in_use()
        } else {
            self.ledger.totals.in_use().saturating_add(others)
        };
        if counts.owned(flow) >= whole.saturating_add(counts.reserved()) {
            ReserveBlocker::OwnFlow
        } else {
            ReserveBlocker::Others
        }
    }

    /// Bytes in unused blocks of the device's other allocators. Called without a heap's lock.
    fn spare_in_other_heaps(&self) -> u64 {
        if self.limit().is_some() || self.is_host() { 0 } else { self.ledger.spare_blocks() }
    }

    fn fits(&self, counts: &Accounting, bytes: u64, others: u64) -> bool {
        match self.limit() {
            Some(_) => counts.has_room(bytes, 0),
            // The other allocators of the device count, too.
            None => {
                let used = if self.is_host() {
                    counts.blocks_in_use() + counts.parked()
                } else {
                    self.ledger.totals.in_use().saturating_add(others)
                };
                let taken = used.saturating_add(counts.reserved()).saturating_add(bytes);
                self.capacity().is_none_or(|capacity| taken <= capacity)
            }
        }
    }

    fn reserve(&self, bytes: u64, flow: usize) -> bool {
        let others = self.spare_in_other_heaps();
        let mut state = lock(&self.state);
        let counts = &mut state.accounting;
        let fits = counts.reserved().checked_add(bytes).is_some() && self.fits(counts, bytes, others);
        if fits {
            counts.reserve(flow, bytes);
        }
        fits
    }

    /// Returns the unused rest of a reservation.
    fn unreserve(&self, bytes: u64, flow: usize) {
        if bytes > 0 {
            lock(&self.state).accounting.unreserve(flow, bytes);
            self.ledger.notify();
        }
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }
}

/// The reason why a reservation is not possible now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReserveBlocker {
    Nothing,
    /// Streams might still be using the memory. This resolves without any operator.
    Streams,
    /// Only operators of the same flow hold the memory.
    OwnFlow,
    /// An owner that may be outside of the flow holds the memory.
    Others,
}

/// Memory that is reserved for an operator's runs, one run at a time.
#[doc(hidden)]
#[derive(Debug)]
pub struct Reservation {
    allocator: Allocator,
    asked: u64,
    /// Rounded up to whole blocks, if the allocator has blocks.
    bytes: u64,
    /// The bytes that the current run has not drawn.
    left: Mutex<u64>,
    /// The flow of the operator.
    flow: AtomicUsize,
}

impl Reservation {
    pub(crate) fn new(allocator: &Allocator, asked: u64) -> Self {
        let bytes = match allocator.heap().kind {
            HeapKind::Blocks { bytes, .. } => asked.checked_next_multiple_of(bytes).unwrap_or(u64::MAX),
            _ => asked,
        };
        Self { allocator: allocator.clone(), asked, bytes, left: Mutex::new(0), flow: AtomicUsize::new(0) }
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }

    /// The memory that the operator waits for, and the usage of the allocator.
    pub(crate) fn describe(&self) -> String {
        format!("{} bytes of {} ({})", self.asked, self.allocator, self.allocator.heap().used_in_words())
    }

    /// A usage error, for the operator's report.
    pub(crate) fn problem(&self) -> Option<String> {
        let (asked, allocator) = (self.asked, &self.allocator);
        if asked == 0 {
            return Some(format!("waits for 0 bytes of {allocator}: ask for at least 1"));
        }
        let capacity = allocator.heap().capacity().unwrap_or(u64::MAX).min(MAX_BYTES as u64);
        if self.bytes <= capacity {
            return None;
        }
        Some(format!("waits for {asked} bytes of {allocator}, which never has more than {capacity}"))
    }

    /// Sets the flow of its operator, identified by a number.
    pub(crate) fn set_flow(&self, flow: usize) {
        // A current reservation is counted for the previous flow.
        self.release();
        self.flow.store(flow, Ordering::Relaxed);
    }

    fn flow(&self) -> usize {
        self.flow.load(Ordering::Relaxed)
    }

    pub(crate) fn blocker(&self) -> ReserveBlocker {
        let heap = self.allocator.heap();
        // The run gets the error when it allocates.
        if self.allocator.device().lost().is_some() {
            return ReserveBlocker::Nothing;
        }
        // Tasks in the wait queue come first. The last one to leave notifies.
        if heap.has_queue() { ReserveBlocker::Others } else { heap.blocker(self.bytes, self.flow()) }
    }

    pub(crate) fn claim(&self) -> bool {
        if self.allocator.device().lost().is_some() {
            return true;
        }
        // One run at a time: a run that was requested by hand may have left the rest of an earlier reservation.
        self.release();
        let claimed = self.bytes <= MAX_BYTES as u64 && self.allocator.heap().reserve(self.bytes, self.flow());
        if claimed {
            *lock(&self.left) = self.bytes;
        }
        claimed
    }

    pub(crate) fn release(&self) {
        let left = std::mem::take(&mut *lock(&self.left));
        self.allocator.heap().unreserve(left, self.flow());
    }

    /// True if the rest of the reservation suffices for `len` elements.
    pub(crate) fn has<T: Plain>(&self, len: usize) -> bool {
        let size = bytes_of::<T>(len).and_then(|bytes| self.allocator.heap().size_for(bytes as u64));
        let left = *lock(&self.left);
        left > 0 && size.is_ok_and(|size| size <= left)
    }

    /// Allocates memory for `len` elements, drawn from the rest of the reservation as far as that suffices.
    pub(crate) fn alloc<T: Plain>(&self, stream: Option<&Stream>, len: usize) -> Result<Buffer<T>> {
        let bytes = bytes_of::<T>(len)?;
        let heap = self.allocator.heap();
        let drawn = {
            let mut left = lock(&self.left);
            let drawn = heap.size_for(bytes as u64)?.min(*left);
            *left -= drawn;
            drawn
        };
        let memory = heap.alloc(self.allocator.device(), bytes, stream, Request::Immediate { drawn });
        match memory {
            Ok(memory) => {
                lock(&heap.state).accounting.disown(self.flow(), drawn);
                Ok(Buffer::of_memory(memory, len))
            }
            Err(error) => {
                *lock(&self.left) += drawn;
                Err(error)
            }
        }
    }
}

/// An operator's wait for memory, which is notified when memory becomes free.
#[derive(Debug, Default)]
pub(crate) struct MemoryWait {
    slot: WaitSlot,
    oldest: OldestWait,
}

impl MemoryWait {
    /// Registers the waker until [`unwatch`](Self::unwatch) is called.
    pub(crate) fn watch(&mut self, allocator: &Allocator, cx: &mut Context<'_>) {
        allocator.heap().watch(&mut self.slot, cx.waker());
        Streams::waiter_added(allocator.device());
    }

    /// True if parked memory has passed.
    pub(crate) fn poll_oldest(&mut self, allocator: &Allocator, cx: &mut Context<'_>) -> bool {
        self.oldest.poll(allocator.heap(), cx).is_ready()
    }

    pub(crate) fn unwatch(&mut self, allocator: &Allocator) {
        self.oldest.reset();
        allocator.heap().unwatch(&mut self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Buffer,
        device::{Device, Emulated, Faults},
    };

    /// A block is free, and the device is found lost while the block is prepared: the reservation is returned once.
    #[test]
    fn a_reservation_that_a_lost_device_refuses_is_given_back_once() {
        let device = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let stream = Stream::new(&device).unwrap();
        let allocator = Allocator::blocks(&device, 64, 2).unwrap();
        let own = Reservation::new(&allocator, 64);
        assert!(own.claim());
        let [from, mut to] = [8, 8].map(|len| Buffer::<u8>::new(&device, len).unwrap());
        stream.copy(&from, &mut to).unwrap();
        // Known to the backend only.
        assert!(device.backend().stream_synchronize(stream.raw()).unwrap_err().is_device_lost());
        assert!(device.lost().is_none());
        assert!(own.alloc::<u8>(None, 64).unwrap_err().is_device_lost());
        own.release();
        assert_eq!(lock(&allocator.heap().state).accounting.reserved(), 0);
    }
}
