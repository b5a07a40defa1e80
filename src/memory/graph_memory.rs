//! The memory that a graph keeps, and its order with all other uses of that memory.
//!
//! The addresses in a graph are fixed, so the memory that it uses must stay allocated, even if its owner drops it.
//! There are two kinds:
//!
//! ```text
//!   allocated in the capture   the graph's own. When dropped, it goes to the graph's free memory and, during the
//!                              capture, to requests for as much on streams that come after its uses, ordered by edges
//!   allocated before           shared with the graph: its owner may drop it, and then its `SharedUses` keeps it
//! ```
//!
//! Captured work has not run, so it is no use of the memory. The uses within a capture are recorded here, for its
//! edges, and each launch counts as a read or a write of all shared memory. Unlike a kernel launch, a graph launch
//! borrows nothing: so each use of shared memory, and each launch, takes the [`UseLock`].
//!
//! The graph's own memory that has no owner is used by launches only, one after the other.

mod memory;
mod shared_uses;
mod use_lock;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Weak},
};

pub(super) use shared_uses::{LentUses, SharedUses, UseLock};
use smallvec::SmallVec;

use super::{
    Home, Memory, Origin, Owned,
    access::{Uses, ask_readers},
    buffer::View,
    heap::{Heap, RequestKind},
};
use crate::{
    device::{
        Device,
        backend::{Address, Endpoint},
    },
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket, capture::Capture},
    sync::{Deferred, Level, Mutex, lock},
};

/// See the [module](self).
pub(crate) struct GraphMemory {
    this: Weak<Self>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tied: Vec<Tied>,
    /// The graph's own memory that has no owner.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    shelf: Vec<Box<Memory>>,
    /// Launches, as uses of the memory on the shelf.
    launches: Uses,
    /// The launch that is being prepared comes after all of those, which are forgotten once it is enqueued. Decided
    /// once per launch, as the shelf may get its first memory in between.
    after_all: bool,
    /// Other uses of the memory on the shelf, whose results launches read: copies of inputs, and uses from before its
    /// owner dropped it.
    fed: Vec<(Home, Uses)>,
    /// Memory is not reused: copies of inputs are made before the launch, and must stay.
    keeps_apart: bool,
    /// Some was reused.
    used_again: bool,
    /// Memory that nodes allocate and that no node frees yet.
    made: Vec<(Arc<SharedUses>, Address)>,
    /// Other tickets that launches come after, collected when the graph was captured; each with whether it taints the
    /// launch.
    outside: Vec<(Ticket, bool)>,
    /// The capture is over.
    over: bool,
}

/// Memory that nodes use, or may use.
struct Tied {
    shared_uses: Arc<SharedUses>,
    /// A node uses it, and is counted as a reader.
    used: bool,
    /// A node writes it, and is counted as a writer.
    writes: bool,
    /// Allocated in the capture.
    own: bool,
    /// The label of the node that used it last, if it has one.
    by: Option<Arc<str>>,
    /// Within the capture.
    uses: Uses,
}

impl GraphMemory {
    pub(crate) fn new(capture: &Capture) -> Arc<Self> {
        let graph_memory =
            Arc::new_cyclic(|this| Self { this: this.clone(), state: Mutex::at(Level::GraphMemory, State::default()) });
        // The streams of a capture may outlive its graph.
        let weak = Arc::downgrade(&graph_memory);
        let _ = capture.extension(move || Arc::new(weak));
        graph_memory
    }

    /// The graph memory of a captured stream.
    fn of(capture: &Capture) -> Result<Arc<Self>> {
        let graph_memory =
            capture.extension(|| Arc::new(Weak::<Self>::new())).and_then(|graph_memory| graph_memory.upgrade());
        graph_memory.filter(|_| !capture.is_over()).ok_or_else(is_over)
    }

    /// The graph memory that serves requests for this stream or, without one, on this thread.
    #[inline]
    pub(super) fn asked(device: &Device, stream: Option<&Stream>) -> Result<Option<Arc<Self>>> {
        match stream {
            Some(stream) => stream.capture().map(|capture| Self::of(capture)).transpose(),
            None => match Capture::current() {
                Some(capture) if capture.device() == device => Self::of(&capture).map(Some),
                _ => Ok(None),
            },
        }
    }

    pub(super) fn alloc(
        &self,
        heap: &Arc<Heap>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        asker: RequestKind,
    ) -> Result<Owned> {
        if let Some(stream) = stream
            && stream.device() != device
            && !heap.is_host()
        {
            let text = format!("memory of {device} for a stream of {}: choose one of its own device", stream.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        // Host memory holds data that the launches read: it is written now, so it cannot be reused. And a reservation
        // must be drawn.
        if let (Some(stream), false, 0) = (stream, heap.is_host(), asker.drawn())
            && let Some(again) = self.reuse(heap, bytes, stream)?
        {
            return Ok(again);
        }
        let mut memory = heap.alloc_outside(device, bytes, None, asker)?;
        {
            let mut state = lock(&self.state);
            // Another thread may have ended the capture since it was found.
            if state.over {
                drop(state);
                return Err(is_over());
            }
            // So that it is known to be the capture's before its first use.
            state.tied(memory.shared_uses()).own = true;
        }
        let origin = std::mem::replace(&mut memory.origin, Origin::Detached);
        memory.origin = Origin::Graph { graph_memory: self.this.clone(), origin: Box::new(origin) };
        Ok(memory)
    }

    /// Takes memory from the shelf that `stream` may use, if there is some.
    ///
    /// # Errors
    /// The capture has ended: from then on launches use the memory on the shelf, and no edge orders other work with
    /// them.
    fn reuse(&self, heap: &Arc<Heap>, bytes: usize, stream: &Stream) -> Result<Option<Owned>> {
        let past = stream.past();
        let mut state = lock(&self.state);
        if state.over {
            return Err(is_over());
        }
        let State { tied, shelf, keeps_apart, used_again, .. } = &mut *state;
        if *keeps_apart {
            return Ok(None);
        }
        let at = shelf.iter().position(|memory| {
            let fits = memory.bytes == bytes && memory.origin.heap().is_some_and(|of| Arc::ptr_eq(of, heap));
            let uses = || {
                memory
                    .shared_uses
                    .get()
                    .and_then(|shared_uses| tied.iter().find(|tied| Arc::ptr_eq(&tied.shared_uses, shared_uses)))
            };
            // Nodes of another graph, for example of a capture within this one, use it at any time, though it has no
            // owner.
            let is_shared = memory.shared_uses.get().is_some_and(|shared_uses| lock(&shared_uses.kept).graphs > 1);
            fits && !is_shared && uses().is_none_or(|tied| tied.uses.all_are(&past))
        });
        *used_again |= at.is_some();
        Ok(at.map(|at| Owned::new(shelf.swap_remove(at))))
    }

    /// Called when the capture has inputs, whose copies are made before a launch: from here on no memory is reused
    /// within it. An error if some was.
    pub(crate) fn keep_apart(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.used_again {
            let text = "`input` was called after memory of the capture was reused: call `input` first, so that the memory \
                        it is copied to has no other use";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        state.keeps_apart = true;
        Ok(())
    }

    /// Keeps this host memory of an input or an output until the capture is over: it is identified by its address, so
    /// no other allocation may get that address.
    pub(crate) fn keep(&self, memory: &Memory) {
        let _ = lock(&self.state).tied(memory.shared_uses());
    }

    /// Nodes no longer read any of this host memory.
    pub(crate) fn reads_no_more(&self, of: &Range<usize>) {
        let mut state = lock(&self.state);
        let gone: Vec<_> = state.tied.extract_if(.., |tied| !tied.writes && tied.shared_uses.lies_in(of)).collect();
        drop(state);
        drop(gone);
    }

    /// Takes the graph's own memory when its owner drops it.
    fn put(&self, memory: Box<Memory>) {
        lock(&self.state).shelf.push(memory);
    }

    /// Prepares a captured use: edges order it after the uses within the capture, and launches come after those
    /// outside.
    fn before(&self, memory: &Memory, stream: &Stream, write: bool) -> Result<()> {
        if matches!(memory.origin, Origin::Node)
            && !lock(&self.state).made.iter().any(|(made, _)| Arc::ptr_eq(made, memory.shared_uses()))
        {
            let text = "a node of another graph allocates this memory, or it is freed by now: it exists only during \
                        launches of its own graph, for nodes that are added to that graph";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.before_tied(memory.shared_uses(), stream, write)
    }

    fn before_tied(&self, shared_uses: &Arc<SharedUses>, stream: &Stream, write: bool) -> Result<()> {
        let outside = lock(&shared_uses.uses).open(write);
        let within = {
            // Kept from here on: another thread may end the capture after the node is added and before its use is
            // noted.
            let mut state = lock(&self.state);
            if state.over {
                return Err(is_over());
            }
            let tied = state.tied(shared_uses);
            tied.count(write);
            tied.uses.open(write)
        };
        within.iter().try_for_each(|(ticket, counts)| match counts {
            true => stream.wait(ticket),
            false => stream.wait_until_over(ticket),
        })?;
        // If it is tainted now, this is an error. If it becomes tainted later, it is an error of the launches as long
        // as it is the last use: each launch checks it.
        outside.iter().try_for_each(|(ticket, counts)| {
            if *counts {
                ticket.check_known()?;
            }
            stream.wait_until_over(ticket)
        })
    }

    fn note(&self, memory: &Memory, ticket: &Ticket, write: bool, by: Option<Arc<str>>) {
        self.note_tied(memory.shared_uses(), ticket, write, by);
    }

    fn note_tied(&self, shared_uses: &Arc<SharedUses>, ticket: &Ticket, write: bool, by: Option<Arc<str>>) {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        if state.over {
            // The order within the capture is not needed any more.
            return;
        }
        let tied = state.tied(shared_uses);
        tied.count(write);
        tied.by = by;
        if write {
            tied.uses.written_by(ticket);
        } else {
            let _ = tied.uses.read_by(ticket);
        }
    }

    /// Whether nodes of a capture write memory that starts at `start` after the node of `first`.
    pub(super) fn writes_after(capture: &Capture, start: Address, first: &Ticket) -> Result<bool> {
        let graph_memory = Self::of(capture)?;
        let state = lock(&graph_memory.state);
        let tied = state.tied.iter().find(|tied| tied.shared_uses.home == Home::Device(start));
        let last = tied.and_then(|tied| tied.uses.write.as_ref());
        Ok(last.is_some_and(|last| !last.stream().is(first.stream()) || last.number() != first.number()))
    }

    /// The label of the node that last used own device memory of the graph, `beside` excepted, that still has an owner.
    pub(crate) fn kept_by(&self, beside: &[&Memory]) -> Option<Arc<str>> {
        let state = lock(&self.state);
        let mut kept = state.tied.iter().filter(|tied| tied.own && !tied.is_of(beside));
        kept.find_map(|tied| if matches!(tied.shared_uses.home, Home::Device(_)) { tied.by.clone() } else { None })
    }

    /// True if an owner has dropped memory that was allocated before the capture.
    pub(crate) fn is_left_alone(&self) -> bool {
        lock(&self.state).tied.iter().any(|tied| !tied.own && lock(&tied.shared_uses.kept).memory.is_some())
    }

    /// The label of a node that uses memory from before the capture, `beside` excepted, that no node of the other graph
    /// uses in the same way.
    pub(crate) fn differs_from(&self, beside: &[&Memory], other: &Self) -> Option<Arc<str>> {
        let theirs: Vec<_> =
            lock(&other.state).tied.iter().map(|tied| (tied.shared_uses.clone(), tied.writes)).collect();
        let is_theirs = |tied: &Tied| {
            theirs
                .iter()
                .any(|(shared_uses, writes)| Arc::ptr_eq(shared_uses, &tied.shared_uses) && *writes == tied.writes)
        };
        let state = lock(&self.state);
        let mut differ = state.tied.iter().filter(|tied| !tied.own && !tied.is_of(beside) && !is_theirs(tied));
        differ.find_map(|tied| tied.by.clone())
    }

    /// Records that a node of this graph allocates this memory.
    pub(super) fn made(&self, memory: &Memory, address: Address) {
        lock(&self.state).made.push((memory.shared_uses().clone(), address));
    }

    /// Prepares a node after `stream` that frees it. Returns the address, if a node of this graph allocates the memory.
    pub(super) fn unmake(&self, memory: &Memory, stream: &Stream) -> Result<Option<Address>> {
        let shared_uses = memory.shared_uses();
        let mut state = lock(&self.state);
        let Some(at) = state.made.iter().position(|(made, _)| Arc::ptr_eq(made, shared_uses)) else { return Ok(None) };
        let (shared_uses, address) = state.made.swap_remove(at);
        drop(state);
        self.before_tied(&shared_uses, stream, true)?;
        Ok(Some(address))
    }

    /// The same, for the next piece of memory that no node frees.
    pub(super) fn unmake_next(&self, stream: &Stream) -> Result<Option<Address>> {
        let made = lock(&self.state).made.pop();
        made.map(|(shared_uses, address)| self.before_tied(&shared_uses, stream, true).map(|()| address)).transpose()
    }

    /// A node of this graph is about to use all memory that another graph's nodes use.
    pub(crate) fn before_all_of(&self, other: &Self, stream: &Stream) -> Result<()> {
        let all: Vec<_> = lock(&other.state).tied.iter().map(|tied| (tied.shared_uses.clone(), tied.writes)).collect();
        all.iter().try_for_each(|(shared_uses, write)| self.before_tied(shared_uses, stream, *write))
    }

    /// That node was added.
    pub(crate) fn note_all_of(&self, other: &Self, ticket: &Ticket) {
        let all: Vec<_> = lock(&other.state).tied.iter().map(|tied| (tied.shared_uses.clone(), tied.writes)).collect();
        all.iter().for_each(|(shared_uses, write)| self.note_tied(shared_uses, ticket, *write, None));
    }

    /// Uses of memory within the captures that this thread is in: waiting for them is an error.
    pub(super) fn captured_uses(memory: &Memory, write: bool) -> SmallVec<[Ticket; 3]> {
        let Some(shared_uses) = memory.shared_uses.get() else { return SmallVec::new() };
        let of =
            |graph_memory: Arc<Self>| lock(&graph_memory.state).find(shared_uses).map(|tied| tied.uses.open(write));
        let graph_memories = Capture::entered().into_iter().filter_map(|capture| Self::of(&capture).ok());
        graph_memories.filter_map(of).flatten().map(|(ticket, _)| ticket).collect()
    }

    /// The capture is over: tickets of its streams have no meaning any more.
    pub(crate) fn capture_ended(&self, capture: &Capture) {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let outside = capture.take_outside();
        let mut state = lock(&self.state);
        state.over = true;
        state.outside.extend(outside);
        state.tied.iter_mut().for_each(|tied| tied.uses = Uses::default());
        // Memory without an owner needs no order with other uses.
        let State { tied, shelf, .. } = &mut *state;
        let (mut untied, mut fed) = (Vec::new(), Vec::new());
        for memory in shelf.iter_mut() {
            let Some(shared_uses) =
                memory.shared_uses.get().filter(|shared_uses| lock(&shared_uses.kept).graphs == 1).cloned()
            else {
                continue;
            };
            let Some(at) = tied.iter().position(|tied| Arc::ptr_eq(&tied.shared_uses, &shared_uses)) else { continue };
            untied.push(tied.swap_remove(at));
            memory.shared_uses.take();
            let uses = std::mem::take(&mut *lock(&shared_uses.uses));
            // Streams used it before it was dropped.
            if uses.any_is(|_| true) {
                fed.push((memory.home, uses.clone()));
            }
            memory.uses = uses.locked();
        }
        state.fed.extend(fed);
        drop(state);
        drop(untied);
    }

    /// Bytes of the graph's own memory that has no owner.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.state).shelf.iter().map(|memory| memory.size).sum()
    }

    /// Enqueues a copy from host memory to memory of the graph's nodes. It comes after the launches so far, and later
    /// launches come after it.
    pub(crate) fn feed(
        &self,
        stream: &Stream,
        to: Address,
        from: View<'_>,
        from_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let from = from.memory;
        if stream.capture().is_some() {
            let text = "an input cannot be copied on a captured stream: copy it on the stream that launches the graph";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        from.is_page_locked()?;
        if from_offset.checked_add(bytes).is_none_or(|end| end > from.bytes) {
            let text = format!("a copy of {bytes} bytes from offset {from_offset} of memory of {} bytes", from.bytes);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let from_start = from.host_pointer()?;
        let (room, _use_lock) = stream.make_room(|| UseLock::take_when(|| self.is_lent() || from.is_lent()))?;
        from.before_read(stream)?;
        let mut state = lock(&self.state);
        let graph_memories = |home: Home, size: usize| match home {
            Home::Device(start) => to.0 >= start.0 && to.0 + bytes as u64 <= start.0 + size as u64,
            Home::Host(_) => false,
        };
        let shared_uses = state
            .tied
            .iter()
            .find(|tied| graph_memories(tied.shared_uses.home, tied.shared_uses.bytes))
            .map(|tied| tied.shared_uses.clone());
        let on_shelf = || state.shelf.iter().find(|memory| graph_memories(memory.home, memory.bytes));
        let place = match &shared_uses {
            Some(shared_uses) => Some((shared_uses.home, shared_uses.bytes)),
            None => on_shelf().map(|memory| (memory.home, memory.bytes)),
        };
        let Some((home, size)) = place else {
            return Err(Error::new(ErrorKind::Usage, "the copy's target is not memory of this graph"));
        };
        let launches = state.launches.all();
        let before = match &shared_uses {
            Some(shared_uses) => Some(lock(&shared_uses.uses).clone()),
            None => state.fed.iter().find(|(fed, _)| *fed == home).map(|(_, uses)| uses.clone()),
        };
        drop(state);
        launches.iter().try_for_each(|launch| stream.wait_until_over(launch))?;
        before.map_or(Ok(()), |uses| uses.before_write(stream, bytes >= size, false))?;
        // SAFETY: `to` is in memory that this graph holds, as was just looked up. It is not freed before the ticket has
        // passed, since the ticket is noted as its use. `from` has at least that length, and the ticket is noted in it.
        let ticket = stream.enqueue(room, |backend, raw| unsafe {
            let from = Endpoint::Host(from_start.as_ptr().wrapping_add(from_offset));
            backend.copy(raw, Endpoint::Device(to), from, bytes as u64)
        })?;
        from.note_read(&ticket);
        state = lock(&self.state);
        match shared_uses {
            Some(shared_uses) => lock(&shared_uses.uses).written_by(&ticket),
            None => {
                let mut uses = Uses::default();
                uses.written_by(&ticket);
                state.fed.retain(|(fed, _)| *fed != home);
                state.fed.push((home, uses));
                state.launches.written_by(&ticket);
            }
        }
        Ok(())
    }

    /// Whether memory that its nodes use is lent to another thread. Call it with the use lock held.
    pub(super) fn is_lent(&self) -> bool {
        lock(&self.state).tied.iter().any(|tied| tied.shared_uses.is_lent())
    }

    /// An error on a thread that is in a capture whose nodes use the same memory.
    pub(super) fn is_not_captured(&self, stream: &Stream) -> Result<()> {
        if Capture::current().is_none() {
            return Ok(());
        }
        let ties: Vec<_> = lock(&self.state).tied.iter().map(|tied| tied.shared_uses.clone()).collect();
        match ties.iter().any(Self::is_used_by_current) {
            true => Err(takes_no_part(stream)),
            false => Ok(()),
        }
    }

    pub(super) fn keeps(&self, shared_uses: &Arc<SharedUses>) -> bool {
        lock(&self.state).find(shared_uses).is_some()
    }

    /// Whether a node of a capture that this thread is in, at any level, uses this memory.
    fn is_used_by_current(shared_uses: &Arc<SharedUses>) -> bool {
        let uses = |graph_memory: Arc<Self>| lock(&graph_memory.state).find(shared_uses).is_some_and(|tied| tied.used);
        Capture::entered().iter().any(|capture| Self::of(capture).is_ok_and(uses))
    }

    /// Orders a launch after the uses of all memory that its nodes use. Call it with the use lock held: tickets that
    /// are forgotten here may be the last handles of a stream, and its `Deferred` scope ends after all locks.
    pub(super) fn before_launch(&self, stream: &Stream) -> Result<()> {
        let mut open: SmallVec<[(Ticket, bool); 8]> = SmallVec::new();
        let mut add = |ticket: &Ticket, counts: bool| {
            if !ticket.stream().is(stream) || (counts && ticket.is_tainted()) {
                open.push((ticket.clone(), counts));
            }
        };
        let mut state = lock(&self.state);
        // Launches do not read what earlier ones left on the shelf. While it is empty, launches may run concurrently.
        state.after_all = !state.shelf.is_empty();
        state.launches.each_open(state.after_all, |launch, _| add(launch, false));
        for tied in &state.tied {
            lock(&tied.shared_uses.uses).each_open(tied.writes, &mut add);
        }
        // But they read what was copied there for them.
        if !state.fed.is_empty() {
            state.fed.retain_mut(|(_, uses)| {
                uses.forget_settled();
                uses.any_is(|_| true)
            });
            state.fed.iter().for_each(|(_, uses)| uses.each_open(true, &mut add));
        }
        if !state.outside.is_empty() {
            state.outside.retain(|(ticket, counts)| if *counts { !ticket.is_settled() } else { !ticket.is_over() });
            state.outside.iter().for_each(|(ticket, counts)| add(ticket, *counts));
        }
        drop(state);
        // A wait may wake tasks: not under the lock.
        open.iter().try_for_each(|(ticket, counts)| match counts {
            true => stream.wait_to_read(ticket, false),
            false => stream.wait_until_over(ticket),
        })
    }

    /// The launch that [`before_launch`](Self::before_launch) prepared is enqueued. Call it with the same use lock
    /// held.
    pub(super) fn note_launch(&self, ticket: &Ticket) {
        let mut are_many = false;
        let mut to_ask: SmallVec<[Arc<SharedUses>; 1]> = SmallVec::new();
        let mut state = lock(&self.state);
        if state.after_all {
            state.launches.written_by(ticket);
        } else {
            are_many = state.launches.read_by(ticket).are_many;
        }
        for tied in &state.tied {
            let mut uses = lock(&tied.shared_uses.uses);
            if tied.writes {
                uses.written_by(ticket);
            } else if uses.read_by(ticket).are_many {
                to_ask.push(tied.shared_uses.clone());
            }
        }
        drop(state);
        if are_many {
            ask_readers(|with| with(&mut lock(&self.state).launches));
        }
        for shared_uses in to_ask {
            ask_readers(|with| with(&mut lock(&shared_uses.uses)));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> SmallVec<[Ticket; 3]> {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        state.launches.forget_passed();
        state.launches.all()
    }
}

fn is_over() -> Error {
    Error::new(ErrorKind::Usage, "its capture is over: use another stream")
}

fn takes_no_part(stream: &Stream) -> Error {
    let text = format!(
        "stream `{}` is not part of the capture whose nodes use the same memory: its work would run now, and at no \
         launch; use a stream of the capture, in an operator `cx.stream()`",
        stream.name()
    );
    Error::new(ErrorKind::Usage, text)
}

impl State {
    fn find(&self, shared_uses: &Arc<SharedUses>) -> Option<&Tied> {
        self.tied.iter().find(|tied| Arc::ptr_eq(&tied.shared_uses, shared_uses))
    }

    fn tied(&mut self, shared_uses: &Arc<SharedUses>) -> &mut Tied {
        let at = self.tied.iter().position(|tied| Arc::ptr_eq(&tied.shared_uses, shared_uses)).unwrap_or_else(|| {
            lock(&shared_uses.kept).graphs += 1;
            let (shared_uses, uses) = (shared_uses.clone(), Uses::default());
            self.tied.push(Tied { shared_uses, used: false, writes: false, own: false, by: None, uses });
            self.tied.len() - 1
        });
        &mut self.tied[at]
    }
}

impl Tied {
    /// Called before a node that uses it is added. From here on the host may not write the memory nor, if the node
    /// writes it, read it. A host slice that exists now is a shared borrow, and the node only reads, since adding the
    /// node borrows the memory in the same way. No later slice is made until this value is dropped, with the failed
    /// capture or with the graph and its last launch.
    fn count(&mut self, write: bool) {
        let (reads, writes) = (!self.used, write && !self.writes);
        if reads || writes {
            let mut kept = lock(&self.shared_uses.kept);
            kept.readers += usize::from(reads);
            kept.writers += usize::from(writes);
            self.used = true;
            self.writes |= write;
        }
    }

    fn is_of(&self, these: &[&Memory]) -> bool {
        these.iter().any(|memory| {
            memory.shared_uses.get().is_some_and(|shared_uses| Arc::ptr_eq(shared_uses, &self.shared_uses))
        })
    }
}

impl Drop for Tied {
    fn drop(&mut self) {
        let mut kept = lock(&self.shared_uses.kept);
        kept.graphs -= 1;
        kept.readers -= usize::from(self.used);
        kept.writers -= usize::from(self.writes);
        let memory = if kept.graphs == 0 { kept.memory.take() } else { None };
        drop(kept);
        if let Some(memory) = memory {
            memory.give_back();
        }
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let State { shelf, launches, .. } = self.state.get_mut();
        let launches = launches.all();
        for mut memory in shelf.drain(..) {
            for launch in &launches {
                let _forgotten = memory.own_uses().read_by(launch);
            }
            memory.give_back();
        }
    }
}

impl fmt::Debug for GraphMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let (tied, own) = (state.tied.len(), state.shelf.len());
        drop(state);
        f.debug_struct("GraphMemory").field("tied", &tied).field("own", &own).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::mpsc,
        task::{Context, Wake},
        time::Duration,
    };

    use super::*;
    use crate::{
        Buffer,
        device::{Emulated, Faults},
        graph::Graph,
        memory::{DeviceSlice, ledger::Arena, transfer},
    };

    /// When woken, records whether the uses of memory can be locked.
    struct Inspected(Arc<SharedUses>, Mutex<Vec<bool>>);

    impl Wake for Inspected {
        fn wake(self: Arc<Self>) {
            lock(&self.1).push(self.0.uses.try_lock().is_some());
        }
    }

    /// Locks of one level do not nest: not even where both the memory's own uses and its shared uses are checked.
    #[test]
    fn uses_can_be_read_while_memory_becomes_shared() {
        let device = Device::emulated(Emulated::new());
        let memories: Vec<_> = (0..200).map(|_| Memory::on(&device, 64).unwrap()).collect();
        let (memories, (begin, begun)) = (&memories, mpsc::channel());
        std::thread::scope(|scope| {
            let looks = scope.spawn(move || {
                for memory in memories {
                    begin.send(()).unwrap();
                    while memory.shared_uses.get().is_none() {
                        assert!(!memory.uses().any_is(|_| true));
                    }
                }
            });
            for memory in memories {
                if begun.recv().is_ok() {
                    let _ = memory.shared_uses();
                }
            }
            looks.join().unwrap();
        });
    }

    /// Another thread has found the capture, and requests memory after it has ended.
    #[test]
    fn a_capture_that_has_ended_hands_out_no_memory_of_its_graph() {
        let device = Device::emulated(Emulated::new());
        let (graph, (stream, graph_memory)) = Graph::capture(&device, |capture| {
            let stream = capture.stream().clone();
            let mut scratch = stream.alloc::<u32>(16)?;
            stream.fill(&mut scratch, 1)?;
            let Origin::Graph { graph_memory, .. } = &scratch.view().memory.origin else {
                panic!("allocated in a capture")
            };
            Ok((stream.clone(), graph_memory.upgrade().unwrap()))
        })
        .unwrap();
        for bytes in [64, 128] {
            let asked = graph_memory.alloc(
                Arena::of(&device).own(&device),
                &device,
                bytes,
                Some(&stream),
                RequestKind::Call(0),
            );
            assert_eq!(asked.map(|_| ()).unwrap_err().kind(), ErrorKind::Usage);
        }
        assert_eq!(graph.own_bytes(), graph_memory.bytes(), "memory that its nodes use stays the graph's");
        assert!(graph_memory.bytes() >= 64);
    }

    /// Own memory of the graph is dropped between the check and the note of a launch: neither of two concurrent
    /// launches is forgotten.
    #[test]
    fn a_launch_forgets_no_other_that_it_is_not_ordered_after() {
        let device = Device::emulated(Emulated::new());
        let [one, two] = [0, 1].map(|_| Stream::new(&device).unwrap());
        let (_graph, scratch) = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(4)).unwrap();
        let Origin::Graph { graph_memory, .. } = &scratch.view().memory.origin else {
            panic!("allocated in a capture")
        };
        let graph_memory = graph_memory.upgrade().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        one.host_function(move || _ = wait.recv()).unwrap();
        graph_memory.before_launch(&one).unwrap();
        graph_memory.note_launch(&one.ticket());
        graph_memory.before_launch(&two).unwrap();
        drop(scratch);
        two.host_function(|| ()).unwrap();
        graph_memory.note_launch(&two.ticket());
        assert!(
            graph_memory.open_launches().iter().any(|open| open.stream().is(&one)),
            "{:?}",
            graph_memory.open_launches()
        );
        // The next launch is ordered after both.
        graph_memory.before_launch(&two).unwrap();
        assert!(lock(&graph_memory.state).after_all);
        drop(go);
        one.synchronize_blocking().unwrap();
    }

    #[test]
    fn launches_on_a_stream_each_leave_few_reads_behind() {
        let device = Device::emulated(Emulated::new());
        let main = Stream::new(&device).unwrap();
        let from = Buffer::from_slice(&main, &[1_u32; 4]).unwrap();
        let mut to = Buffer::<u32>::new(&device, 4).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().copy(&from, &mut to)).unwrap();
        let exec = graph.instantiate().unwrap();
        for _ in 0..200 {
            exec.launch(&Stream::new(&device).unwrap()).unwrap();
            main.copy(&to, &mut Buffer::new(&device, 4).unwrap()).unwrap();
            main.synchronize_blocking().unwrap();
        }
        let graph_memory = graph.graph_memory();
        let launches = lock(&graph_memory.state).launches.all().len();
        let reads = from.view().memory.uses().all().len();
        assert!(launches <= 33 && reads <= 33, "{launches} launches, {reads} uses");
    }

    /// A change of a graph takes a time that grows with it, and all launches on all devices take the lock.
    #[test]
    fn an_exec_is_changed_without_the_use_lock() {
        let device = Device::emulated(Emulated::new());
        let [mut data, mut other] = [0, 1].map(|_| Buffer::<u32>::new(&device, 4).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let (exec, node) = (graph.instantiate().unwrap(), graph.nodes()[0].node);
        let (go, wait) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        let has_the_turn = std::thread::spawn(move || {
            let _use_lock = UseLock::take();
            begin.send(()).unwrap();
            let _ = wait.recv();
        });
        begun.recv().unwrap();
        let (change, changed) = mpsc::channel();
        let changes = std::thread::spawn(move || {
            change.send(exec.update(&graph)).unwrap();
            change.send(exec.set(node, |stream| stream.fill(&mut other, 2))).unwrap();
        });
        let [updated, set] = [0, 1].map(|_| changed.recv_timeout(Duration::from_secs(10)));
        drop(go);
        has_the_turn.join().unwrap();
        changes.join().unwrap();
        updated.unwrap().unwrap();
        set.unwrap().unwrap();
    }

    #[test]
    fn a_task_woken_by_a_wait_for_memory_of_a_graph_may_use_it() {
        let device = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let [one, two] = [0, 1].map(|_| Stream::new(&device).unwrap());
        let (from, mut to) = (Memory::on(&device, 64).unwrap(), Memory::on(&device, 64).unwrap());
        let looks = Arc::new(Inspected(to.shared_uses().clone(), Mutex::default()));
        let (go, wait) = mpsc::channel::<()>();
        one.host_function(move || _ = wait.recv()).unwrap();
        transfer::copy(&one, &from, &mut to, 64).unwrap();
        let mut done = pin!(one.completed());
        assert!(done.as_mut().poll(&mut Context::from_waker(&looks.clone().into())).is_pending());
        drop(go);
        device.backend().stream_synchronize(one.raw()).unwrap_err();
        assert!(to.before_write(&two).unwrap_err().is_device_lost());
        let woken = lock(&looks.1).clone();
        assert!(!woken.is_empty() && woken.iter().all(|may| *may), "{woken:?}");
    }
}
