//! Who waits for memory of a heap: in a line, and at its side.
//!
//! ```text
//!   alloc_when_free:  join ──> first in the line? ──yes──> there is some ──> leave, wake the next
//!                                   │ no                       │ none: the oldest bound memory is waited for,
//!                                   └── woken by who leaves    └── and whoever gives some back wakes the first
//! ```
//!
//! The line is served in the order of coming, so that a large request is not overtaken for ever by small ones. Conditions
//! of operators ([`memory`](crate::condition::memory)) stand at its side: they take nothing until their run begins, and
//! are told whenever something has changed.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Waker, ready},
};

use slab::Slab;
use smallvec::SmallVec;

use super::{HostAccess, Owned, heap::Heap, ledger::Arena};
use crate::{
    device::Device,
    error::Result,
    stream::{Stream, Ticket},
    sync::{lock, wake},
};

/// Who waits.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    line: VecDeque<(u64, Waker)>,
    next: u64,
    aside: Slab<Waker>,
}

/// A place in the line. Given up when it is dropped.
struct Place<'a> {
    heap: &'a Heap,
    number: Option<u64>,
}

impl Place<'_> {
    /// True if it is the first. Its waker is kept.
    fn is_first(&mut self, waker: &Waker) -> bool {
        let mut state = lock(&self.heap.state);
        let waits = &mut state.waits;
        let mut old = None;
        match self.number.and_then(|number| waits.line.iter_mut().find(|(other, _)| *other == number)) {
            Some((_, kept)) if kept.will_wake(waker) => {}
            Some((_, kept)) => old = Some(std::mem::replace(kept, waker.clone())),
            None => {
                self.number = Some(waits.next);
                waits.line.push_back((waits.next, waker.clone()));
                waits.next += 1;
                self.heap.ledger.hungry.fetch_add(1, Ordering::SeqCst);
            }
        }
        let first = waits.line.front().map(|(first, _)| *first) == self.number;
        // What a waker holds may do anything as it goes.
        drop(state);
        drop(old);
        first
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut state = lock(&self.heap.state);
        let line = &mut state.waits.line;
        let left = line.iter().position(|(other, _)| *other == number).and_then(|at| line.remove(at));
        drop(state);
        drop(left);
        self.heap.ledger.hungry.fetch_sub(1, Ordering::SeqCst);
        self.heap.wake();
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
        let mut place = Place { heap: self, number: None };
        let mut oldest = Oldest::default();
        poll_fn(|cx| {
            if !place.is_first(cx.waker()) {
                return Poll::Pending;
            }
            loop {
                // Asked first: what comes free after this is seen by the attempt.
                let none_out = self.ledger.all_idle(self.is_host());
                let error = match self.alloc(device, bytes, stream, 0) {
                    Err(error) if error.is_out_of_memory() => error,
                    outcome => return Poll::Ready(outcome),
                };
                // What will never be there is not waited for; nor what somebody else has who never tells.
                let size = self.size_for(bytes as u64);
                let ever = size.is_ok() && self.capacity().is_none_or(|capacity| bytes as u64 <= capacity);
                if !ever || none_out {
                    return Poll::Ready(Err(error));
                }
                ready!(oldest.poll(self, cx));
            }
        })
        .await
    }

    /// Wakes the first of the line, and all at its side.
    pub(super) fn wake(&self) {
        let state = lock(&self.state);
        let first = state.waits.line.front().map(|(_, waker)| waker.clone());
        let aside: SmallVec<[Waker; 2]> = state.waits.aside.iter().map(|(_, waker)| waker.clone()).collect();
        drop(state);
        first.into_iter().chain(aside).for_each(wake);
    }

    /// Somebody at the side: keeps its waker, until it is taken back.
    pub(super) fn watch(&self, place: &mut Option<usize>, waker: &Waker) {
        let mut state = lock(&self.state);
        let old = match *place {
            Some(at) => Some(std::mem::replace(&mut state.waits.aside[at], waker.clone())),
            None => {
                *place = Some(state.waits.aside.insert(waker.clone()));
                self.ledger.hungry.fetch_add(1, Ordering::SeqCst);
                None
            }
        };
        drop(state);
        drop(old);
    }

    pub(super) fn unwatch(&self, place: &mut Option<usize>) {
        let Some(at) = place.take() else { return };
        let waker = lock(&self.state).waits.aside.try_remove(at);
        self.ledger.hungry.fetch_sub(1, Ordering::SeqCst);
        drop(waker);
    }

    /// True while somebody stands in the line: then nobody at its side takes anything.
    pub(super) fn has_line(&self) -> bool {
        !lock(&self.state).waits.line.is_empty()
    }
}

/// Resolves when memory of the device's that was freed, and that a stream may still use, has come free; false where there is
/// none.
///
/// # Cancel safety
/// Dropping the future changes nothing.
pub(crate) async fn memory_passes(device: &Device) -> bool {
    let heaps = Arena::of(device).ledger.heaps(false);
    let Some(heap) = heaps.iter().find(|heap| heap.has_bound()) else { return false };
    // Where the lookout was quicker, it has come free.
    if let Some(first) = heap.oldest().first() {
        // Where the device is lost the memory is, too: the next attempt says so.
        let _ = first.completed().await;
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
        // Where the device is lost the memory is, too: it is leaked by the sweep.
        let _ = ready!(Pin::new(access).poll(cx));
        self.0 = None;
        heap.sweep();
        Poll::Ready(())
    }

    pub(super) fn rest(&mut self) {
        self.0 = None;
    }
}
