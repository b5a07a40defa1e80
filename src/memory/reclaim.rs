//! Reclaim: what happens to memory when its owner drops it.
//!
//! ```text
//!            no stream uses it
//!   dropped ───────────────────> free ─────────────> cached for the next allocation, or returned to the driver
//!      │ a stream uses it           ^
//!      v                            │ its uses have passed: found by an allocation, or at the monitor's tick
//!   parked ─────────────────────────┤
//!      │                            └ or handed out before that, to a stream that comes after them
//!      │ the device is lost
//!      └──> leaked, and counted
//! ```
//!
//! A drop never blocks, and does not query the device.

use std::{collections::HashMap, sync::Arc};

use smallvec::SmallVec;

use super::{
    Location, Memory,
    accounting::{Extent, Released},
    free_lists::Users,
    heap::{Heap, HeapKind, HeapState},
    memory::Origin,
    uses::Uses,
};
use crate::{
    mutants::{self, Mutant},
    stream::{Streams, Ticket, capture::Capture},
    sync::{Deferred, lock, log},
};

impl Origin for Heap {
    #[inline]
    fn take_back(self: Arc<Self>, memory: Box<Memory>) {
        let Some(mut memory) = memory.unless_shared(&self) else { return };
        if memory.is_staged() {
            memory.forget_arrivals();
        }
        let own = memory.stream;
        let mut uses = memory.uses_mut();
        uses.forget_passed();
        if mutants::is(Mutant::EarlyReuse) {
            *uses = Uses::default();
        }
        let mut users = uses.users();
        let is_simple = |users| users == Users::None || users == Users::One(own);
        if !is_simple(users) && uses.any_is(Ticket::has_ended) {
            uses.forget_done();
            users = uses.users();
        }
        drop(uses);
        if memory.device.is_lost() {
            return self.leak(&memory);
        }
        if !is_simple(users) {
            // Other streams have to wait for these uses, and a mark that is recorded now covers no later work. On the
            // stream that the memory was allocated for, it is reused without a mark.
            let _ = memory.commit();
        }
        match users {
            Users::None => self.return_free(&memory),
            Users::One(stream) => self.park(memory, Some(stream)),
            Users::Several => self.park(memory, None),
        }
    }

    fn own(&self, flow: usize, bytes: u64) {
        lock(&self.state).accounting.own(flow, bytes);
        // This may change what tasks that wait for memory decide.
        self.ledger.notify();
    }

    fn disown(&self, flow: usize, bytes: u64) {
        lock(&self.state).accounting.disown(flow, bytes);
    }
}

impl Heap {
    /// Puts the memory in the free lists, as memory that stream `to` or, if `to` is `None`, several streams might still
    /// be using.
    #[inline]
    fn park(self: Arc<Self>, mut memory: Box<Memory>, to: Option<u64>) {
        memory.origin = Some(self.clone());
        self.park_with(memory, |state, memory| state.free_lists.park(memory, to));
    }

    /// Counts the memory as parked, and stores it with `keep`.
    #[inline]
    pub(super) fn park_with(self: &Arc<Self>, memory: Box<Memory>, keep: impl FnOnce(&mut HeapState, Box<Memory>)) {
        let mut state = lock(&self.state);
        state.accounting.park(memory.extent());
        // Checked under the lock: a task that starts to wait after this check, and a sweep that stops after it, find
        // the memory in the free lists.
        let must_notify = self.must_notify();
        keep(&mut state, memory);
        drop(state);
        if must_notify {
            self.keep_sweeping();
            self.ledger.notify();
        }
    }

    fn return_free(&self, memory: &Memory) {
        let _gives = (!self.caches()).then(|| self.ledger.returning());
        let mut state = lock(&self.state);
        state.accounting.return_free(memory.extent());
        if self.caches() {
            state.free_lists.put_free(memory.size, memory.location);
            drop(state);
        } else {
            state.accounting.return_to_driver(memory.size);
            drop(state);
            self.release([(memory.size, memory.location)]);
        }
        self.ledger.notify();
    }

    /// Leaks the memory: the device might still access it, and it will never be known when it no longer does.
    #[cold]
    pub(super) fn leak(&self, memory: &Memory) {
        lock(&self.state).accounting.leak(memory.extent());
        self.leaked(memory);
    }

    /// True if the completion monitor or waiting tasks must be notified of newly parked memory.
    #[inline]
    fn must_notify(&self) -> bool {
        !self.swept.is_on() || self.ledger.has_waiting_tasks()
    }

    /// Makes the completion monitor sweep this heap while anything is parked.
    #[cold]
    fn keep_sweeping(self: &Arc<Self>) {
        if self.swept.start()
            && let Some(device) = self.device.upgrade()
        {
            // The heap keeps itself alive as long as memory is parked. If another sweep settles that memory first, it
            // is returned to the driver at once.
            let (heap, ledger) = (Arc::downgrade(self), self.ledger.clone());
            let tick = move || {
                let _gives = ledger.returning();
                heap.upgrade().is_some_and(|heap| heap.tick())
            };
            Streams::of(&device).monitor().sweep(Box::new(tick));
        }
    }

    /// True while anything is parked.
    fn tick(&self) -> bool {
        self.sweep();
        self.has_parked() || self.swept.stop(|| self.has_parked())
    }

    pub(super) fn has_parked(&self) -> bool {
        lock(&self.state).accounting.parked() > 0
    }

    /// Queries the progress of the streams that might still be using parked memory. Memory whose uses have passed
    /// becomes free.
    pub(super) fn sweep(&self) {
        self.retry_frees();
        let last: SmallVec<[Ticket; 4]> = last_of_each(lock(&self.state).free_lists.ends());
        if !last.is_empty() {
            self.observe(last, None);
        }
    }

    /// The only place where a heap queries the device. During a capture it does not: this thread may be capturing a
    /// library's calls, and a query would invalidate the capture. Memory whose uses are known to have passed is found
    /// without a query.
    ///
    /// With `size`, only blocks of this size are inspected.
    pub(super) fn observe(&self, tickets: SmallVec<[Ticket; 4]>, size: Option<u64>) {
        let may_ask = Capture::may_query_device();
        let mut lost = false;
        for mut ticket in tickets {
            lost |= match may_ask {
                // After any other error, it is queried again later.
                true => ticket.query_progress().is_err_and(|error| error.is_device_lost()),
                false => ticket.stream().device().is_lost(),
            };
        }
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        let mut settled = Extent::default();
        let mut passed: SmallVec<[Box<Memory>; 8]> = SmallVec::new();
        // Memory of the driver's own pool was already freed there.
        let at_driver = self.kind == HeapKind::StreamOrdered;
        state.free_lists.settle(size, |memory| {
            settled.size += memory.size;
            settled.bytes += memory.bytes as u64;
            let location = (!at_driver).then_some(memory.location);
            passed.push(memory);
            location
        });
        state.accounting.settle(settled, at_driver);
        let evicted = if self.caches() { Vec::new() } else { state.evict(u64::MAX) };
        let leaked = if lost { state.leak_parked(is_never_free) } else { Vec::new() };
        drop(state);
        // Dropped without the lock: they hold handles of the device and of this heap.
        drop(passed);
        self.release(evicted);
        leaked.iter().for_each(|memory| self.leaked(memory));
        if settled.size > 0 {
            self.ledger.notify();
        }
    }

    /// Returns free memory to the driver. Returns the number of bytes.
    pub(super) fn trim(&self) -> u64 {
        if self.has_blocks() {
            return 0;
        }
        let evicted = lock(&self.state).evict(u64::MAX);
        let bytes = evicted.iter().map(|(size, _)| size).sum();
        self.release(evicted);
        if bytes > 0 {
            self.ledger.notify_later();
        }
        bytes
    }

    /// Returns blocks that count as leaving to the driver. Nothing uses them.
    pub(super) fn release(&self, blocks: impl IntoIterator<Item = (u64, Location)>) {
        let released = self.give_to_driver(blocks);
        if released.all > 0 {
            lock(&self.state).accounting.released(released);
        }
    }

    /// Acquires no lock of the heap.
    fn give_to_driver(&self, blocks: impl IntoIterator<Item = (u64, Location)>) -> Released {
        let mut released = Released::default();
        for (size, location) in blocks {
            released.all += size;
            let freed = match location {
                // SAFETY: the address came from `alloc` of this backend (`ask_driver`), its owner was dropped, and all
                // its uses have passed, so no enqueued work accesses it.
                Location::Device(address) => unsafe { self.backend.free(address) },
                // SAFETY: likewise from `alloc_host`, with this size.
                Location::Host(pointer) => unsafe { self.backend.free_host(pointer, size as usize) },
            };
            match freed {
                Ok(()) => released.returned += size,
                Err(error) if error.is_device_lost() => released.leaked += size,
                Err(error) => log(
                    move || tracing::error!(error = %format_args!("{error:#}"), bytes = size, "memory could not be given back"),
                ),
            }
        }
        released
    }

    /// Called once the memory counts as leaked. Unfinished work on other devices might still be using it: the lost
    /// device is kept alive until that work is done, since an emulated device frees its memory when it is dropped.
    pub(super) fn leaked(&self, memory: &Memory) {
        let own = memory.device.unchecked();
        let is_open = |ticket: &Ticket| ticket.stream().device().unchecked() != own && !ticket.is_done();
        let mut open = memory.uses().all();
        open.retain(|ticket| is_open(ticket));
        if let Some(other) = open.first().map(|ticket| ticket.stream().device().clone()) {
            let device = memory.device.clone();
            let goes_on = move || {
                // If a device fails, it is queried again until it no longer runs any work.
                open.retain(|ticket| !ticket.query().is_ok_and(|done| done) && !ticket.is_done());
                let _kept = &device;
                !open.is_empty()
            };
            Streams::of(&other).monitor().sweep(Box::new(goes_on));
        }
        let asked = memory.bytes as u64;
        self.ledger.notify();
        // Deferred: the memory may be dropped under a lock.
        log(move || tracing::warn!(bytes = asked, "memory of a lost device was leaked"));
    }

    /// The uses of the memory that was parked first. If none is parked, the end of a stream whose full queue delays a
    /// free.
    pub(super) fn oldest(&self) -> SmallVec<[Ticket; 4]> {
        let first = first_of_each(lock(&self.state).free_lists.firsts(None));
        if first.is_empty() { self.queue_end().into_iter().collect() } else { first }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // Nothing is parked: otherwise the completion monitor would hold this heap.
        let evicted = self.state.get_mut().evict(u64::MAX);
        // This may run under the lock of another heap, if that heap dropped the last ticket of a stream.
        let released = self.give_to_driver(evicted);
        self.state.get_mut().accounting.released(released);
        self.ledger.deregister(self);
        // The driver has the memory again, and waiters of other allocators may need it.
        self.ledger.notify();
    }
}

/// True if a use of this memory will never be known to be over, since it is on a lost device. Exception: if a lost
/// emulated device other than the memory's own has stopped, it is known to run no more work.
fn is_never_free(memory: &Memory) -> bool {
    let own = memory.device.is_lost();
    memory.uses().any_is(|ticket| {
        let device = ticket.stream().device();
        device.is_lost() && (own || device.is_cuda()) && !ticket.is_done()
    })
}

/// Up to this number of tickets, the search is linear.
const MAX_LINEAR: usize = 16;

/// The earliest ticket of each stream that might be using these pieces of memory.
pub(super) fn first_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new < known)
}

fn last_of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>) -> SmallVec<[Ticket; 4]> {
    of_each(all, |new, known| new > known)
}

fn of_each<'a>(all: impl Iterator<Item = &'a Box<Memory>>, takes_over: fn(u64, u64) -> bool) -> SmallVec<[Ticket; 4]> {
    let mut tickets: SmallVec<[Ticket; 4]> = SmallVec::new();
    // The index by stream, used for more than [`MAX_LINEAR`] tickets.
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
                    if tickets.len() == MAX_LINEAR {
                        places.extend(tickets.iter().enumerate().map(|(at, ticket)| (ticket.stream().id(), at)));
                    } else if tickets.len() > MAX_LINEAR {
                        places.insert(stream.id(), tickets.len() - 1);
                    }
                }
            }
            Ok(())
        });
    }
    tickets
}
