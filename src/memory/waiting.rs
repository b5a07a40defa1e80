//! Waiting for memory of a heap: `alloc_when_free`, and the waits of operators' conditions.
//!
//! ```text
//!   alloc_when_free:  join ──> first in the queue? ──yes──> memory is free ──> leave, wake the next
//!                                   │ no                       │ none: waits for the oldest parked memory,
//!                                   └── woken by one that left └── and memory that is put back wakes the first
//! ```
//!
//! [`wait_queue`](super::wait_queue) describes which task is woken when.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
};

use smallvec::SmallVec;

use super::{
    HostAccess, Owned,
    arena::Arena,
    heap::{Heap, Request},
    wait_queue::WaitSlot,
};
use crate::{
    device::Device,
    error::Result,
    stream::{Stream, Streams, Ticket},
    sync::lock,
};

/// A place in the queue. Given up when it is dropped.
struct Queued<'a> {
    heap: &'a Heap,
    place: WaitSlot,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        if self.heap.queue.leave(&self.heap.ledger.hunger, &mut self.place) {
            self.heap.wake();
        }
    }
}

impl Heap {
    pub(super) async fn alloc_when_free(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
    ) -> Result<Owned> {
        let mut own = Queued { heap: self, place: WaitSlot::default() };
        let (mut oldest, retry) = (Oldest::default(), Arc::new(AtomicBool::new(false)));
        let outcome = poll_fn(|cx| {
            let is_first = self.queue.join(&self.ledger.hunger, &mut own.place, cx.waker());
            // Registered first: a loss that this check misses wakes the whole queue. The first task may never be polled
            // again.
            if let Err(lost) = device.check() {
                return Poll::Ready(Err(lost));
            }
            if !is_first {
                Streams::waiter_added(device);
                return Poll::Pending;
            }
            loop {
                // Before the attempt, which sees all memory that becomes free after this.
                let before = self.ledger.idle_mark(self.is_host());
                let error = match self.alloc(device, bytes, stream, Request::Queued) {
                    Err(error) if error.is_out_of_memory() => error,
                    outcome => return Poll::Ready(outcome),
                };
                // There will never be that much: an error, not a wait.
                if self.size_for(bytes as u64).is_err() || !self.may_ever_hold(bytes) {
                    return Poll::Ready(Err(error));
                }
                let after = self.ledger.idle_mark(self.is_host());
                if after.is_some() {
                    // No memory is in use that could be freed.
                    if after == before {
                        return Poll::Ready(Err(error));
                    }
                    // But some was counted meanwhile: memory that was returned by now, or that of a request that was
                    // refused.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                // Memory in use belongs to other tasks, which may not be waiting for a stream.
                Streams::waiter_added(device);
                if self.may_come_unnotified(device, bytes) && !retry.swap(true, Ordering::AcqRel) {
                    let (heap, retry) = (Arc::downgrade(self), retry.clone());
                    let wakes = move || {
                        retry.store(false, Ordering::Release);
                        if let Some(heap) = heap.upgrade() {
                            heap.wake();
                        }
                        false
                    };
                    Streams::of(device).monitor().sweep(Box::new(wakes));
                }
                ready!(oldest.poll(self, cx));
            }
        })
        .await;
        if outcome.is_err() {
            // The request counted as in use meanwhile, also for tasks in other queues.
            drop(own);
            self.ledger.notify();
        }
        outcome
    }

    /// True if the driver had no memory and may have some later without a drop in this process: it refused although
    /// memory is free, or another process may free some. So it is asked again at the next tick.
    fn may_come_unnotified(&self, device: &Device, bytes: usize) -> bool {
        let Ok(size) = self.size_for(bytes as u64) else { return false };
        let is_there = || device.backend().memory().is_ok_and(|memory| memory.free >= size);
        !self.has_blocks() && lock(&self.state).accounting.has_room(size, 0) && (device.is_cuda() || is_there())
    }

    /// Registers the waker beside the queue, until `unwatch`.
    pub(super) fn watch(&self, place: &mut WaitSlot, waker: &Waker) {
        self.queue.watch(&self.ledger.hunger, place, waker);
    }

    pub(super) fn unwatch(&self, place: &mut WaitSlot) {
        let _ = self.queue.leave(&self.ledger.hunger, place);
    }

    /// True while a task waits in the queue: then tasks beside it take nothing.
    pub(super) fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }
}

/// Resolves when the device has passed the last use of freed memory that a stream might still have been using. Returns
/// false if the device has no such memory, or if the end of its use cannot be determined.
///
/// # Cancel safety
/// Dropping the future changes nothing.
pub(crate) async fn memory_passes(device: &Device) -> bool {
    let heaps = Arena::of(device).ledger.heaps(false);
    let Some(heap) = heaps.iter().find(|heap| heap.has_parked()) else { return false };
    // If the completion monitor was quicker, it is already free.
    if let Some(first) = heap.oldest().first() {
        // If the device is lost, so is the memory: the next attempt returns the error.
        if first.completed().await.is_err_and(|error| !error.is_device_lost()) {
            return false;
        }
        heap.sweep();
    }
    true
}

/// A wait for the memory that was freed first.
#[derive(Debug, Default)]
pub(super) struct Oldest(Option<HostAccess>);

impl Oldest {
    /// Resolves when parked memory has passed and is free. Pending for ever if none is parked: then the owner that drops
    /// its memory notifies.
    pub(super) fn poll(&mut self, heap: &Heap, cx: &mut Context<'_>) -> Poll<()> {
        let access = match &mut self.0 {
            Some(access) => access,
            None => {
                let first: SmallVec<[Ticket; 4]> = heap.oldest();
                let Some(first) = first.into_iter().next() else { return Poll::Pending };
                self.0.insert(HostAccess::new(SmallVec::from_iter([first])))
            }
        };
        let outcome = ready!(Pin::new(access).poll(cx));
        self.0 = None;
        heap.sweep();
        match outcome {
            // It has not passed, and is queried again, but not in an endless loop within one poll.
            Err(error) if !error.is_device_lost() => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            // If the device is lost, so is the memory: the sweep has leaked it.
            _ => Poll::Ready(()),
        }
    }

    pub(super) fn rest(&mut self) {
        self.0 = None;
    }
}
