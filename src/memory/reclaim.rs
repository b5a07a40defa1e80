//! Reclaim: what becomes of memory when its owner is gone.
//!
//! ```text
//!             nothing uses it                          kept: for whoever asks next; otherwise the driver's
//!   dropped ───────────────────> idle ─────────────>
//!      │ it is used                 ^
//!      v                            │ its uses have passed: seen by an allocation, or at the lookout's beat
//!    bound ─────────────────────────┤
//!      │                            └ or handed out before that, to a stream that comes after them
//!      │ the device is lost
//!      └──> leaked, and counted
//! ```
//!
//! A drop never blocks, and asks the device nothing.

use std::{collections::HashMap, sync::Arc};

use smallvec::SmallVec;

use super::{Home, Memory, Origin, access::Uses, heap::Heap, shelves::Bound, stock::Stock};
use crate::{
    mutants::{self, Mutant},
    stream::{Streams, Ticket, capture::Capture},
    sync::{Deferred, lock, log},
};

impl Memory {
    /// Back to its heap.
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
            // Others have to wait for it, and a mark that is made now covers no more than is there now. On the stream that it
            // was made for it is used again without one.
            let _ = self.commit();
        }
        match bound {
            Bound::Idle => self.shelve_idle(),
            Bound::To(stream) => self.shelve(Some(stream)),
            Bound::ToSeveral => self.shelve(None),
        }
    }

    /// On the shelf, while this stream may still use it, or, without one, several.
    #[inline]
    pub(super) fn shelve(self: Box<Self>, to: Option<u64>) {
        self.bind(|state, memory| state.shelves.put_bound(memory, to));
    }

    /// It counts as bound from now on, and is kept there.
    #[inline]
    pub(super) fn bind(self: Box<Self>, keep: impl FnOnce(&mut Stock, Box<Self>)) {
        // A handle: once it is on the shelf, others may take it from there and let go of the heap.
        let Some(heap) = self.origin.heap().cloned() else { return };
        let mut state = lock(&heap.state);
        state.binds(&self);
        // Under the lock: a task that counts as hungry after this, and a beat that stops, finds the memory on the shelf.
        let has_to_tell = heap.has_to_tell();
        keep(&mut state, self);
        drop(state);
        if has_to_tell {
            heap.keep_sweeping();
            heap.ledger.tell();
        }
    }

    fn shelve_idle(&self) {
        let Some(heap) = self.origin.heap() else { return };
        let (home, size, asked) = (self.home, self.size, self.bytes as u64);
        let _gives = (!heap.keeps()).then(|| heap.ledger.gives());
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
        heap.ledger.tell();
    }

    /// Some of its uses are never known to be over. Those on another device than its own that is lost are so once that runs nothing
    /// any more, where it says so.
    fn is_never_free(&self) -> bool {
        let own = self.device.is_lost();
        self.uses().any_is(|ticket| {
            let device = ticket.stream().device();
            device.is_lost() && (own || device.is_cuda()) && !ticket.is_done()
        })
    }

    /// The device may still touch it, and nobody will know when not.
    #[cold]
    pub(super) fn leak(&self) {
        let Some(heap) = self.origin.heap() else { return };
        lock(&heap.state).gone(self.size, self.bytes as u64);
        heap.leaked(self);
    }
}

impl Heap {
    /// It is in use no more, nor waits.
    fn forget(&self, asked: u64) {
        if !self.is_host() {
            self.ledger.change(asked, 0);
        }
    }

    /// Somebody has to hear of memory that is bound from now on: the lookout, or who waits for some.
    #[inline]
    fn has_to_tell(&self) -> bool {
        !self.swept.is_on() || self.ledger.is_hungry()
    }

    /// Sees to it that the lookout sweeps while anything is bound.
    #[cold]
    fn keep_sweeping(self: &Arc<Self>) {
        if self.swept.start()
            && let Some(device) = self.device.upgrade()
        {
            // It keeps itself as long as anything is bound. What another sweep finds first is the driver's again at once.
            let (heap, ledger) = (Arc::downgrade(self), self.ledger.clone());
            let beat = move || {
                let _gives = ledger.gives();
                heap.upgrade().is_some_and(|heap| heap.beat())
            };
            Streams::of(&device).lookout().sweep(Box::new(beat));
        }
    }

    /// True while anything is bound.
    fn beat(&self) -> bool {
        self.sweep();
        self.has_bound() || self.swept.stop(|| self.has_bound())
    }

    pub(super) fn has_bound(&self) -> bool {
        lock(&self.state).bound > 0
    }

    /// Asks the device how far the streams are that memory is bound to; what has passed is idle then.
    pub(super) fn sweep(&self) {
        self.give_back_what_waits();
        let last: SmallVec<[Ticket; 4]> = last_of_each(lock(&self.state).shelves.ends());
        if !last.is_empty() {
            self.observe(last, None);
        }
    }

    /// The one place where a heap asks the device anything. In a capture it does not: a library's calls may be captured
    /// then, on this thread, and the driver takes a question amiss. What is known to have passed is found there, too.
    ///
    /// `size`: only blocks of that are looked at.
    pub(super) fn observe(&self, tickets: SmallVec<[Ticket; 4]>, size: Option<u64>) {
        let may_ask = Capture::may_ask_device();
        let mut lost = false;
        for mut ticket in tickets {
            lost |= match may_ask {
                // Of another kind: it is asked again.
                true => ticket.look_back().is_err_and(|error| error.is_device_lost()),
                false => ticket.stream().device().is_lost(),
            };
        }
        // Tickets that are forgotten under the lock may be the last to hold a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        let (mut sizes, mut asked, mut kept) = (0, 0, 0);
        let mut passed: SmallVec<[Box<Memory>; 8]> = SmallVec::new();
        state.shelves.settle(size, |memory| {
            sizes += memory.size;
            asked += memory.bytes as u64;
            // The driver has that of its own pool back already.
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
        // What they hold of the device and of this heap is not let go under the lock.
        drop(passed);
        self.forget(asked);
        self.release(given_up);
        leaked.iter().for_each(|memory| self.leaked(memory));
        if sizes > 0 {
            self.ledger.tell();
        }
    }

    /// Gives what is idle back to the driver: so many bytes.
    pub(super) fn trim(&self) -> u64 {
        if self.has_blocks() {
            return 0;
        }
        let given_up = lock(&self.state).drain_idle(u64::MAX);
        let bytes = given_up.iter().map(|(size, _)| size).sum();
        self.release(given_up);
        if bytes > 0 {
            self.ledger.tell_later();
        }
        bytes
    }

    /// Blocks of these sizes, which count as leaving: nothing uses them.
    pub(super) fn release(&self, blocks: impl IntoIterator<Item = (u64, Home)>) {
        let left = self.give_to_driver(blocks);
        if left > 0 {
            lock(&self.state).leaving -= left;
        }
    }

    /// Returns how many bytes these are. Takes no lock of the heap.
    pub(super) fn give_to_driver(&self, blocks: impl IntoIterator<Item = (u64, Home)>) -> u64 {
        let mut left = 0;
        for (size, home) in blocks {
            left += size;
            let freed = match home {
                // SAFETY: the address came from this backend's `alloc` (`ask_driver`), its owner is gone, and all its uses
                // have passed, so nothing enqueued touches it.
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

    /// It was this heap's. Work of other devices that is not done may still use it: the lost device is kept until then, since an
    /// emulated one frees its memory as it goes.
    fn leaked(&self, memory: &Memory) {
        let own = memory.device.unchecked();
        let is_open = |ticket: &Ticket| ticket.stream().device().unchecked() != own && !ticket.is_done();
        let mut open = memory.uses().all();
        open.retain(|ticket| is_open(ticket));
        if let Some(other) = open.first().map(|ticket| ticket.stream().device().clone()) {
            let device = memory.device.clone();
            let goes_on = move || {
                // A device that fails meanwhile is asked again, until it runs nothing any more.
                open.retain(|ticket| !ticket.look().is_ok_and(|done| done) && !ticket.is_done());
                let _kept = &device;
                !open.is_empty()
            };
            Streams::of(&other).lookout().sweep(Box::new(goes_on));
        }
        let asked = memory.bytes as u64;
        self.ledger.leak(asked);
        self.forget(asked);
        self.ledger.tell();
        // As the memory is dropped, be it under a lock.
        log(move || tracing::warn!(bytes = asked, "memory of a lost device is left to it"));
    }

    /// The uses of the memory that was freed first, if any is bound; otherwise what memory that waits to be given back waits for.
    pub(super) fn oldest(&self) -> SmallVec<[Ticket; 4]> {
        let first = first_of_each(lock(&self.state).shelves.firsts(None));
        if first.is_empty() { self.room_comes().into_iter().collect() } else { first }
    }
}

/// So many tickets are looked through one by one.
const FEW: usize = 16;

/// For each stream that these are bound to the ticket that comes first there.
pub(super) fn first_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new < known)
}

fn last_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new > known)
}

fn of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>, takes_over: fn(u64, u64) -> bool) -> SmallVec<[Ticket; 4]> {
    let mut tickets: SmallVec<[Ticket; 4]> = SmallVec::new();
    // Where they are, by their streams: looked through one by one while they are few.
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
