//! The waits for memory of a heap: `alloc_when_free`, and what conditions of operators wait with.
//!
//! ```text
//!   alloc_when_free:  join ──> first in the line? ──yes──> there is some ──> leave, wake the next
//!                                   │ no                       │ none: the oldest bound memory is waited for,
//!                                   └── woken by one that left └── and memory that is put back wakes the first
//! ```
//!
//! Who is woken when: [`line`](super::line).

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
    heap::{Asker, Heap},
    ledger::Arena,
    line::Place,
};
use crate::{
    device::Device,
    error::Result,
    stream::{Stream, Streams, Ticket},
    sync::lock,
};

/// A place in the line. Given up when it is dropped.
struct InLine<'a> {
    heap: &'a Heap,
    place: Place,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        if self.heap.line.leave(&self.heap.ledger.hunger, &mut self.place) {
            self.heap.wake();
        }
    }
}

impl Heap {
    /// As `alloc`, as soon as there is some.
    pub(super) async fn alloc_when_free(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
    ) -> Result<Owned> {
        let mut own = InLine { heap: self, place: Place::default() };
        let (mut oldest, retry) = (Oldest::default(), Arc::new(AtomicBool::new(false)));
        let outcome = poll_fn(|cx| {
            let is_first = self.line.join(&self.ledger.hunger, &mut own.place, cx.waker());
            // Registered first: a loss that this misses wakes all of the line. The first may be one that is never polled again.
            if let Err(lost) = device.check() {
                return Poll::Ready(Err(lost));
            }
            if !is_first {
                Streams::attend(device);
                return Poll::Pending;
            }
            loop {
                // Before the attempt: what comes free after this is seen by it.
                let before = self.ledger.idle_mark(self.is_host());
                let error = match self.alloc(device, bytes, stream, Asker::Line) {
                    Err(error) if error.is_out_of_memory() => error,
                    outcome => return Poll::Ready(outcome),
                };
                // What will never be there is not waited for.
                if self.size_for(bytes as u64).is_err() || !self.may_ever_hold(bytes) {
                    return Poll::Ready(Err(error));
                }
                let after = self.ledger.idle_mark(self.is_host());
                if after.is_some() {
                    // No memory is out that could come back.
                    if after == before {
                        return Poll::Ready(Err(error));
                    }
                    // But some was in the way: given back by now, or that of a request that was refused.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                // Memory in use comes from other tasks, which may wait for no stream.
                Streams::attend(device);
                if self.may_come_unheard(device, bytes) && !retry.swap(true, Ordering::AcqRel) {
                    let (heap, retry) = (Arc::downgrade(self), retry.clone());
                    let wakes = move || {
                        retry.store(false, Ordering::Release);
                        if let Some(heap) = heap.upgrade() {
                            heap.wake();
                        }
                        false
                    };
                    Streams::of(device).lookout().sweep(Box::new(wakes));
                }
                ready!(oldest.poll(self, cx));
            }
        })
        .await;
        if outcome.is_err() {
            // What it asked for counted as in use meanwhile, for tasks in other lines, too.
            drop(own);
            self.ledger.tell();
        }
        outcome
    }

    /// It was the driver that had no memory, and it may have some again without a drop in this process: it refused what is there, or
    /// another process frees some. So it is asked again at the next beat.
    fn may_come_unheard(&self, device: &Device, bytes: usize) -> bool {
        let Ok(size) = self.size_for(bytes as u64) else { return false };
        let is_there = || device.backend().memory().is_ok_and(|memory| memory.free >= size);
        !self.has_blocks() && self.has_room(&lock(&self.state), size, Asker::Line) && (device.is_cuda() || is_there())
    }

    /// Wakes the first of the line, and all at its side.
    pub(super) fn wake(&self) {
        self.line.first().wake();
    }

    /// Wakes all of the line, and all at its side: the device is lost.
    pub(super) fn wake_all(&self) {
        self.line.wake_all();
    }

    /// At the line's side: the waker is kept, until `unwatch`.
    pub(super) fn watch(&self, place: &mut Place, waker: &Waker) {
        self.line.watch(&self.ledger.hunger, place, waker);
    }

    pub(super) fn unwatch(&self, place: &mut Place) {
        let _ = self.line.leave(&self.ledger.hunger, place);
    }

    /// True while a task stands in the line or at its side.
    pub(super) fn has_waiters(&self) -> bool {
        self.line.has_waiters()
    }

    /// True while a task stands in the line: then those at its side take nothing.
    pub(super) fn has_line(&self) -> bool {
        !self.line.is_empty()
    }
}

/// Resolves when memory of the device's that was freed, and that a stream may still use, has come free; false where there is
/// none, or where that is not found out.
///
/// # Cancel safety
/// Dropping the future changes nothing.
pub(crate) async fn memory_passes(device: &Device) -> bool {
    let heaps = Arena::of(device).ledger.heaps(false);
    let Some(heap) = heaps.iter().find(|heap| heap.has_bound()) else { return false };
    // Where the lookout was quicker, it has come free.
    if let Some(first) = heap.oldest().first() {
        // Where the device is lost the memory is, too: the next attempt says so.
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
    /// Resolves when some has passed that was bound, and is idle now. Pending for ever where none is bound: then somebody
    /// who has it in use tells.
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
            // It has not passed, and is asked again; but not for ever within one poll.
            Err(error) if !error.is_device_lost() => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            // Where the device is lost the memory is, too: the sweep has leaked it.
            _ => Poll::Ready(()),
        }
    }

    pub(super) fn rest(&mut self) {
        self.0 = None;
    }
}
