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
    sync::{Waited, lock, note_wait},
};

/// A place in the queue, given up on drop.
struct Queued<'a> {
    heap: &'a Heap,
    slot: WaitSlot,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        if self.heap.queue.leave(&self.heap.ledger.waiters, &mut self.slot) {
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
        let mut own = Queued { heap: self, slot: WaitSlot::default() };
        let (mut oldest, retry) = (OldestWait::default(), Arc::new(AtomicBool::new(false)));
        let outcome = poll_fn(|cx| {
            let is_first = self.queue.join(&self.ledger.waiters, &mut own.slot, cx.waker());
            // The task is registered before this check: a loss that the check misses wakes the whole queue, not only
            // the first task, which might never be polled again.
            if let Err(lost) = device.check() {
                return Poll::Ready(Err(lost));
            }
            if !is_first {
                Streams::waiter_added(device);
                note_wait(Waited::Memory);
                return Poll::Pending;
            }
            loop {
                // Read before the attempt: if the mark is the same afterwards, no memory was handed out in between.
                let before = self.ledger.idle_mark(self.is_host());
                let error = match self.alloc(device, bytes, stream, Request::Queued) {
                    Err(error) if error.is_out_of_memory() => error,
                    outcome => return Poll::Ready(outcome),
                };
                // The heap can never hold that many bytes: an error, not a wait.
                if self.size_for(bytes as u64).is_err() || !self.may_ever_hold(bytes) {
                    return Poll::Ready(Err(error));
                }
                let after = self.ledger.idle_mark(self.is_host());
                if after.is_some() {
                    // No memory is in use that could become free.
                    if after == before {
                        return Poll::Ready(Err(error));
                    }
                    // But memory was counted in between: it was returned since, or belonged to a request that was
                    // refused.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                // The memory in use belongs to other tasks, which might not be waiting for a stream.
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
                let freed = oldest.poll(self, cx);
                if freed.is_pending() {
                    note_wait(Waited::Memory);
                }
                ready!(freed);
            }
        })
        .await;
        if outcome.is_err() {
            // Until now the request counted as memory in use, also for tasks in other queues.
            drop(own);
            self.ledger.notify();
        }
        outcome
    }

    /// True if the driver was out of memory but may have memory later without a drop in this process: it refused
    /// although memory is free, or another process may free some. So the driver is asked again at the next tick.
    fn may_come_unnotified(&self, device: &Device, bytes: usize) -> bool {
        let Ok(size) = self.size_for(bytes as u64) else { return false };
        let is_there = || device.backend().memory().is_ok_and(|memory| memory.free >= size);
        !self.has_blocks() && lock(&self.state).accounting.has_room(size, 0) && (device.is_cuda() || is_there())
    }

    /// Registers the waker beside the queue until `unwatch` is called.
    pub(super) fn watch(&self, slot: &mut WaitSlot, waker: &Waker) {
        self.queue.watch(&self.ledger.waiters, slot, waker);
    }

    pub(super) fn unwatch(&self, slot: &mut WaitSlot) {
        let _ = self.queue.leave(&self.ledger.waiters, slot);
    }

    /// True while a task waits in the queue. Watchers take no memory as long as it does.
    pub(super) fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }
}

/// Waits until parked memory of the device has become free. Resolves to false if no memory is parked, or if the
/// device's progress cannot be determined.
///
/// # Cancel safety
/// Dropping the future changes nothing.
pub(crate) async fn wait_for_reusable_memory(device: &Device) -> bool {
    let heaps = Arena::of(device).ledger.heaps(false);
    let Some(heap) = heaps.iter().find(|heap| heap.has_parked()) else { return false };
    // If the completion monitor was quicker, the memory is already free.
    if let Some(first) = heap.oldest().first() {
        // If the device is lost, so is the memory: the next attempt returns the error.
        if first.completed().await.is_err_and(|error| !error.is_device_lost()) {
            return false;
        }
        heap.sweep();
    }
    true
}

/// A wait for the memory that was parked first.
#[derive(Debug, Default)]
pub(super) struct OldestWait(Option<HostAccess>);

impl OldestWait {
    /// Resolves when parked memory has become free. If no memory is parked, stays pending: an owner that drops its
    /// memory notifies.
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
            // The uses have not passed. They are queried again at the next poll, not in an endless loop within one
            // poll.
            Err(error) if !error.is_device_lost() => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            // If the device is lost, so is the memory: the sweep has leaked it.
            _ => Poll::Ready(()),
        }
    }

    pub(super) fn reset(&mut self) {
        self.0 = None;
    }
}
