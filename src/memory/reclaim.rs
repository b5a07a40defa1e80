//! Reclaim: what happens to memory when its owner drops it.
//!
//! ```text
//!             no work uses it                          kept: for the next allocation; otherwise returned to the driver
//!   dropped ───────────────────> idle ─────────────>
//!      │ work uses it               ^
//!      v                            │ its uses have passed: found by an allocation, or at the monitor's tick
//!    bound ─────────────────────────┤
//!      │                            └ or handed out before that, to a stream that comes after them
//!      │ the device is lost
//!      └──> leaked, and counted
//! ```
//!
//! A drop never blocks, and does not query the device.

use std::{collections::HashMap, sync::Arc};

use smallvec::SmallVec;

use super::{Home, Memory, Origin, access::Uses, free_lists::Bound, heap::Heap, heap_state::HeapState};
use crate::{
    mutants::{self, Mutant},
    stream::{Streams, Ticket, capture::Capture},
    sync::{Deferred, lock, log},
};

impl Memory {
    /// Returns it to its heap.
    #[inline]
    pub(super) fn go_back(mut self: Box<Self>) {
        let lane = self.lane;
        let mut uses = self.own_uses();
        uses.forget_passed();
        if mutants::is(Mutant::EarlyReuse) {
            *uses = Uses::default();
        }
        let mut bound = uses.bound();
        let is_simple = |bound| bound == Bound::Idle || bound == Bound::To(lane);
        if !is_simple(bound) && uses.any_is(Ticket::has_ended) {
            uses.forget_done();
            bound = uses.bound();
        }
        drop(uses);
        if self.device.is_lost() {
            return self.leak();
        }
        if !is_simple(bound) {
            // Other streams have to wait for these uses, and a mark that is made now covers no later work. On the
            // stream that the memory was allocated for, it is reused without a mark.
            let _ = self.commit();
        }
        match bound {
            Bound::Idle => self.shelve_idle(),
            Bound::To(stream) => self.shelve(Some(stream)),
            Bound::ToSeveral => self.shelve(None),
        }
    }

    /// Puts it in the free lists, bound to this stream or, without one, to several.
    #[inline]
    pub(super) fn shelve(self: Box<Self>, to: Option<u64>) {
        self.bind(|state, memory| state.shelves.put_bound(memory, to));
    }

    /// Counts it as bound from now on, and stores it with `keep`.
    #[inline]
    pub(super) fn bind(self: Box<Self>, keep: impl FnOnce(&mut HeapState, Box<Self>)) {
        // Owned: once the memory is in the free lists, other threads may take it and drop their handle of the heap.
        let Some(heap) = self.origin.heap().cloned() else { return };
        let mut state = lock(&heap.state);
        state.binds(&self);
        // Under the lock: a task that becomes hungry after this, and a sweep that stops, find the memory in the free
        // lists.
        let must_notify = heap.must_notify();
        keep(&mut state, self);
        drop(state);
        if must_notify {
            heap.keep_sweeping();
            heap.ledger.notify();
        }
    }

    fn shelve_idle(&self) {
        let Some(heap) = self.origin.heap() else { return };
        let (home, size, asked) = (self.home, self.size, self.bytes as u64);
        let _gives = (!heap.keeps()).then(|| heap.ledger.returning());
        let mut state = lock(&heap.state);
        if heap.keeps() {
            state.idle += size;
            state.use_instead(asked, 0);
            state.shelves.put_idle(size, home);
            drop(state);
        } else {
            state.gone(size, asked);
            state.leaving += size;
            drop(state);
            heap.release([(size, home)]);
        }
        heap.forget(asked);
        heap.ledger.notify();
    }

    /// True if a use will never be known to be over: it is on a lost device. Exception: a lost emulated device other
    /// than the memory's own is known to run nothing any more once it has stopped.
    fn is_never_free(&self) -> bool {
        let own = self.device.is_lost();
        self.uses().any_is(|ticket| {
            let device = ticket.stream().device();
            device.is_lost() && (own || device.is_cuda()) && !ticket.is_done()
        })
    }

    /// The device may still access it, and it will never be known when it no longer does.
    #[cold]
    pub(super) fn leak(&self) {
        let Some(heap) = self.origin.heap() else { return };
        lock(&heap.state).gone(self.size, self.bytes as u64);
        heap.leaked(self);
    }
}

impl Heap {
    /// It is neither in use nor waiting any more.
    fn forget(&self, asked: u64) {
        if !self.is_host() {
            self.ledger.change(asked, 0);
        }
    }

    /// True if newly bound memory must be announced: to the completion monitor, or to tasks that wait for memory.
    #[inline]
    fn must_notify(&self) -> bool {
        !self.swept.is_on() || self.ledger.is_hungry()
    }

    /// Makes the completion monitor sweep this heap while anything is bound.
    #[cold]
    fn keep_sweeping(self: &Arc<Self>) {
        if self.swept.start()
            && let Some(device) = self.device.upgrade()
        {
            // The heap keeps itself alive as long as anything is bound. What another sweep finds first is returned to
            // the driver at once.
            let (heap, ledger) = (Arc::downgrade(self), self.ledger.clone());
            let tick = move || {
                let _gives = ledger.returning();
                heap.upgrade().is_some_and(|heap| heap.tick())
            };
            Streams::of(&device).monitor().sweep(Box::new(tick));
        }
    }

    /// True while anything is bound.
    fn tick(&self) -> bool {
        self.sweep();
        self.has_bound() || self.swept.stop(|| self.has_bound())
    }

    pub(super) fn has_bound(&self) -> bool {
        lock(&self.state).bound > 0
    }

    /// Queries the progress of the streams that memory is bound to. Memory whose uses have passed becomes idle.
    pub(super) fn sweep(&self) {
        self.retry_frees();
        let last: SmallVec<[Ticket; 4]> = last_of_each(lock(&self.state).shelves.ends());
        if !last.is_empty() {
            self.observe(last, None);
        }
    }

    /// The only place where a heap queries the device. During a capture it does not: this thread may be capturing a
    /// library's calls, and a query would invalidate the capture. Memory that is known to have passed is found even
    /// then.
    ///
    /// `size`: only blocks of this size are inspected.
    pub(super) fn observe(&self, tickets: SmallVec<[Ticket; 4]>, size: Option<u64>) {
        let may_ask = Capture::may_query_device();
        let mut lost = false;
        for mut ticket in tickets {
            lost |= match may_ask {
                // Any other error: it is queried again later.
                true => ticket.recheck().is_err_and(|error| error.is_device_lost()),
                false => ticket.stream().device().is_lost(),
            };
        }
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        let (mut sizes, mut asked, mut kept) = (0, 0, 0);
        let mut passed: SmallVec<[Box<Memory>; 8]> = SmallVec::new();
        state.shelves.settle(size, |memory| {
            sizes += memory.size;
            asked += memory.bytes as u64;
            // Memory of the driver's own pool was already freed there.
            let home = matches!(memory.origin, Origin::Heap(_)).then_some(memory.home);
            kept += home.map_or(0, |_| memory.size);
            passed.push(memory);
            home
        });
        state.bound -= sizes;
        state.waiting -= asked;
        state.gone(sizes - kept, asked);
        state.idle += kept;
        let given_up = if self.keeps() { Vec::new() } else { state.drain_idle(u64::MAX) };
        let leaked = if lost { state.drain_bound(Memory::is_never_free) } else { Vec::new() };
        drop(state);
        // Their handles of the device and of this heap are not dropped under the lock.
        drop(passed);
        self.forget(asked);
        self.release(given_up);
        leaked.iter().for_each(|memory| self.leaked(memory));
        if sizes > 0 {
            self.ledger.notify();
        }
    }

    /// Returns idle memory to the driver, and the number of bytes to the caller.
    pub(super) fn trim(&self) -> u64 {
        if self.has_blocks() {
            return 0;
        }
        let given_up = lock(&self.state).drain_idle(u64::MAX);
        let bytes = given_up.iter().map(|(size, _)| size).sum();
        self.release(given_up);
        if bytes > 0 {
            self.ledger.notify_later();
        }
        bytes
    }

    /// Frees blocks of these sizes, which count as leaving. Nothing uses them.
    pub(super) fn release(&self, blocks: impl IntoIterator<Item = (u64, Home)>) {
        let left = self.give_to_driver(blocks);
        if left > 0 {
            lock(&self.state).leaving -= left;
        }
    }

    /// Returns the number of bytes. Takes no lock of the heap.
    pub(super) fn give_to_driver(&self, blocks: impl IntoIterator<Item = (u64, Home)>) -> u64 {
        let mut left = 0;
        for (size, home) in blocks {
            left += size;
            let freed = match home {
                // SAFETY: the address came from `alloc` of this backend (`ask_driver`), its owner was dropped, and all
                // its uses have passed, so no enqueued work accesses it.
                Home::Device(address) => unsafe { self.backend.free(address) },
                // SAFETY: likewise from `alloc_host`, with this size.
                Home::Host(pointer) => unsafe { self.backend.free_host(pointer, size as usize) },
            };
            match freed {
                Ok(()) => self.ledger.give_back(size),
                Err(error) if error.is_device_lost() => self.ledger.leak(size),
                Err(error) => log(move || tracing::error!(%error, bytes = size, "memory could not be given back")),
            }
        }
        left
    }

    /// Counts it as leaked. Unfinished work of other devices may still use it: the lost device is kept alive until
    /// then, since an emulated device frees its memory when it is dropped.
    fn leaked(&self, memory: &Memory) {
        let own = memory.device.unchecked();
        let is_open = |ticket: &Ticket| ticket.stream().device().unchecked() != own && !ticket.is_done();
        let mut open = memory.uses().all();
        open.retain(|ticket| is_open(ticket));
        if let Some(other) = open.first().map(|ticket| ticket.stream().device().clone()) {
            let device = memory.device.clone();
            let goes_on = move || {
                // A device that fails meanwhile is queried again, until it runs nothing any more.
                open.retain(|ticket| !ticket.look().is_ok_and(|done| done) && !ticket.is_done());
                let _kept = &device;
                !open.is_empty()
            };
            Streams::of(&other).monitor().sweep(Box::new(goes_on));
        }
        let asked = memory.bytes as u64;
        self.ledger.leak(asked);
        self.forget(asked);
        self.ledger.notify();
        // Deferred: the memory may be dropped under a lock.
        log(move || tracing::warn!(bytes = asked, "memory of a lost device was leaked"));
    }

    /// The uses of the memory that was freed first, if any is bound; otherwise what memory that waits to be freed on
    /// its stream waits for.
    pub(super) fn oldest(&self) -> SmallVec<[Ticket; 4]> {
        let first = first_of_each(lock(&self.state).shelves.firsts(None));
        if first.is_empty() { self.queue_end().into_iter().collect() } else { first }
    }
}

/// Up to this number, tickets are searched linearly.
const FEW: usize = 16;

/// For each stream that these are bound to, the earliest ticket.
pub(super) fn first_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new < known)
}

fn last_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new > known)
}

fn of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>, takes_over: fn(u64, u64) -> bool) -> SmallVec<[Ticket; 4]> {
    let mut tickets: SmallVec<[Ticket; 4]> = SmallVec::new();
    // Index by stream, used once there are more than a few.
    let mut places = HashMap::new();
    for memory in all {
        let _ = memory.uses().each(|ticket| {
            let stream = ticket.stream();
            let known = match places.is_empty() {
                true => tickets.iter().position(|known| known.stream().is(stream)),
                false => places.get(&stream.id()).copied(),
            };
            match known.map(|at| &mut tickets[at]) {
                Some(known) if takes_over(ticket.number(), known.number()) => *known = ticket.clone(),
                Some(_) => {}
                None => {
                    tickets.push(ticket.clone());
                    if tickets.len() == FEW {
                        places.extend(tickets.iter().enumerate().map(|(at, ticket)| (ticket.stream().id(), at)));
                    } else if tickets.len() > FEW {
                        places.insert(stream.id(), tickets.len() - 1);
                    }
                }
            }
            Ok(())
        });
    }
    tickets
}
