//! What a graph keeps: the memory that its nodes use, and the order of that with everybody else's uses.
//!
//! The addresses in a graph are fixed, so what it uses has to stay, whoever drops it. Two kinds of memory:
//!
//! ```text
//!   made in the capture      the graph's own. Dropped, it goes to the graph's shelf, and during the capture from there to
//!                            whoever asks for as much on a stream that comes after its uses: edges order the two
//!   made before              tied to the graph: its owner may drop it, and then the tie keeps it
//! ```
//!
//! What is captured has not run, so it is no use of the memory: the uses of a capture are kept here, for its edges, and
//! each launch counts as a use of all that is tied, a read or a write. A launch has no borrow of that memory, as a kernel's
//! arguments have: so whoever uses tied memory, and every launch, takes its [`Turn`].
//!
//! Of the graph's own memory that nobody has, launches are the only users: one after the other.

mod memory;
mod tie;
mod turn;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Weak},
};

use smallvec::SmallVec;
pub(super) use tie::{Lent, Tie, Turn};

use super::{
    Home, Memory, Origin, Owned,
    access::{Uses, ask_readers},
    buffer::View,
    heap::{Asker, Heap},
};
use crate::{
    device::{
        Device,
        backend::{Address, Place},
    },
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket, capture::Capture},
    sync::{Deferred, Level, Mutex, lock},
};

/// See the [module](self).
pub(crate) struct Hold {
    this: Weak<Self>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tied: Vec<Tied>,
    /// The graph's own that nobody has.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    shelf: Vec<Box<Memory>>,
    /// Launches, as uses of what lies there.
    launches: Uses,
    /// The launch that is being prepared comes after all of those, which are forgotten once it is enqueued: decided once, as the
    /// shelf may get its first memory in between.
    after_all: bool,
    /// What was done with what lies there beside the launches, which read it: copies of inputs, and what was enqueued while
    /// memory of the capture had an owner.
    fed: Vec<(Home, Uses)>,
    /// Memory is not used again: copies of inputs are made before the launch, and stay.
    keeps_apart: bool,
    /// Some was.
    used_again: bool,
    /// Memory that nodes make and none gives back yet.
    made: Vec<(Arc<Tie>, Address)>,
    /// What launches come after beside that, as it was when it was captured; and whether they are spoilt if that is.
    outside: Vec<(Ticket, bool)>,
    /// The capture is.
    over: bool,
}

/// Memory that nodes use, or may use.
struct Tied {
    tie: Arc<Tie>,
    /// A node uses it, and counts as a reader of the tie.
    used: bool,
    /// A node writes it, and counts as a writer of the tie.
    writes: bool,
    /// Made in the capture.
    own: bool,
    /// Whose node used it last, where that was said.
    by: Option<Arc<str>>,
    /// Within the capture.
    uses: Uses,
}

impl Hold {
    /// For a capture.
    pub(crate) fn new(capture: &Capture) -> Arc<Self> {
        let hold =
            Arc::new_cyclic(|this| Self { this: this.clone(), state: Mutex::at(Level::GraphMemory, State::default()) });
        // The streams of a capture may outlive its graph.
        let weak = Arc::downgrade(&hold);
        let _ = capture.extension(move || Arc::new(weak));
        hold
    }

    /// That of a captured stream.
    fn of(capture: &Capture) -> Result<Arc<Self>> {
        let hold = capture.extension(|| Arc::new(Weak::<Self>::new())).and_then(|hold| hold.upgrade());
        hold.filter(|_| !capture.is_over()).ok_or_else(is_over)
    }

    /// Where memory comes from that is asked for on this stream; without one, on this thread.
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

    /// Memory of the graph's own.
    pub(super) fn alloc(
        &self,
        heap: &Arc<Heap>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        asker: Asker,
    ) -> Result<Owned> {
        if let Some(stream) = stream
            && stream.device() != device
            && !heap.is_host()
        {
            let text = format!("memory of {device} for a stream of {}: choose one of its own device", stream.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        // Host memory holds what the launches are to read: it is written now. And what was reserved is to be drawn.
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
            state.tied(memory.tie()).own = true;
        }
        let origin = std::mem::replace(&mut memory.origin, Origin::Nobody);
        memory.origin = Origin::Graph { hold: self.this.clone(), origin: Box::new(origin) };
        Ok(memory)
    }

    /// Memory on the shelf that `stream` may use, if there is some.
    ///
    /// # Errors
    /// The capture has ended: launches use the memory on the shelf from then on, and no edge orders anything else with them.
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
            let uses = || memory.tie.get().and_then(|tie| tied.iter().find(|tied| Arc::ptr_eq(&tied.tie, tie)));
            // The nodes of another graph, of a capture within this one say, use it at any time, though it has no owner.
            let is_shared = memory.tie.get().is_some_and(|tie| lock(&tie.kept).graphs > 1);
            fits && !is_shared && uses().is_none_or(|tied| tied.uses.all_are(&past))
        });
        *used_again |= at.is_some();
        Ok(at.map(|at| Owned::new(shelf.swap_remove(at))))
    }

    /// There are inputs, whose copies are made before a launch: so from here on no memory is used again within it. An error
    /// if some was.
    pub(crate) fn keep_apart(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.used_again {
            let text = "an input after memory of the capture was used again: say `input` first, so that what it is copied \
                        to is nobody else's";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        state.keeps_apart = true;
        Ok(())
    }

    /// This host memory is an input's or an output's: known by where it lies, so it is kept until the capture is over, and nothing
    /// else begins there.
    pub(crate) fn keep(&self, memory: &Memory) {
        let _ = lock(&self.state).tied(memory.tie());
    }

    /// Nodes read none of this host memory any more.
    pub(crate) fn reads_no_more(&self, of: &Range<usize>) {
        let mut state = lock(&self.state);
        let gone: Vec<_> = state.tied.extract_if(.., |tied| !tied.writes && tied.tie.lies_in(of)).collect();
        drop(state);
        drop(gone);
    }

    /// The graph's own memory, which nobody has any more.
    fn put(&self, memory: Box<Memory>) {
        lock(&self.state).shelf.push(memory);
    }

    /// A captured use of memory is about to be enqueued: it comes after those within the capture, by edges, and each launch
    /// after those outside.
    fn before(&self, memory: &Memory, stream: &Stream, write: bool) -> Result<()> {
        if matches!(memory.origin, Origin::Node)
            && !lock(&self.state).made.iter().any(|(made, _)| Arc::ptr_eq(made, memory.tie()))
        {
            let text = "memory that a node of another graph makes, or that is given back by now: it is there within the \
                        launches of its own graph only, and for what is added to that itself";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.before_tied(memory.tie(), stream, write)
    }

    fn before_tied(&self, tie: &Arc<Tie>, stream: &Stream, write: bool) -> Result<()> {
        let outside = lock(&tie.uses).open(write);
        let within = {
            // Kept from here on: another thread may end the capture after the node was added and before its use is noted.
            let mut state = lock(&self.state);
            if state.over {
                return Err(is_over());
            }
            let tied = state.tied(tie);
            tied.count(write);
            tied.uses.open(write)
        };
        within.iter().try_for_each(|(ticket, counts)| match counts {
            true => stream.wait(ticket),
            false => stream.wait_until_over(ticket),
        })?;
        // Spoilt now it is an error. Spoilt later it is one of the launches while it is the last use, which each looks at.
        outside.iter().try_for_each(|(ticket, counts)| {
            if *counts {
                ticket.check_known()?;
            }
            stream.wait_until_over(ticket)
        })
    }

    fn note(&self, memory: &Memory, ticket: &Ticket, write: bool, by: Option<Arc<str>>) {
        self.note_tied(memory.tie(), ticket, write, by);
    }

    fn note_tied(&self, tie: &Arc<Tie>, ticket: &Ticket, write: bool, by: Option<Arc<str>>) {
        // Tickets that are forgotten under the lock may be the last to hold a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        if state.over {
            // Its order within the capture is of no use any more.
            return;
        }
        let tied = state.tied(tie);
        tied.count(write);
        tied.by = by;
        if write {
            tied.uses.written_by(ticket);
        } else {
            let _ = tied.uses.read_by(ticket);
        }
    }

    /// Whether nodes of a capture write memory that begins here after one that does.
    pub(super) fn writes_after(capture: &Capture, start: Address, first: &Ticket) -> Result<bool> {
        let hold = Self::of(capture)?;
        let state = lock(&hold.state);
        let tied = state.tied.iter().find(|tied| tied.tie.home == Home::Device(start));
        let last = tied.and_then(|tied| tied.uses.write.as_ref());
        Ok(last.is_some_and(|last| !last.stream().is(first.stream()) || last.number() != first.number()))
    }

    /// Who used last what somebody has of the graph's own memory on the device, beside this: where it was said whose nodes
    /// they are.
    pub(crate) fn kept_by(&self, beside: &[&Memory]) -> Option<Arc<str>> {
        let state = lock(&self.state);
        let mut kept = state.tied.iter().filter(|tied| tied.own && !tied.is_of(beside));
        kept.find_map(|tied| if matches!(tied.tie.home, Home::Device(_)) { tied.by.clone() } else { None })
    }

    /// Whoever had some of the memory from before has dropped it.
    pub(crate) fn is_left_alone(&self) -> bool {
        lock(&self.state).tied.iter().any(|tied| !tied.own && lock(&tied.tie.kept).memory.is_some())
    }

    /// Who uses memory from before that no node of the other's uses, or uses in that way; beside what is each one's own.
    pub(crate) fn differs_from(&self, beside: &[&Memory], other: &Self) -> Option<Arc<str>> {
        let theirs: Vec<_> = lock(&other.state).tied.iter().map(|tied| (tied.tie.clone(), tied.writes)).collect();
        let is_theirs =
            |tied: &Tied| theirs.iter().any(|(tie, writes)| Arc::ptr_eq(tie, &tied.tie) && *writes == tied.writes);
        let state = lock(&self.state);
        let mut differ = state.tied.iter().filter(|tied| !tied.own && !tied.is_of(beside) && !is_theirs(tied));
        differ.find_map(|tied| tied.by.clone())
    }

    /// A node of this graph makes this memory.
    pub(super) fn made(&self, memory: &Memory, address: Address) {
        lock(&self.state).made.push((memory.tie().clone(), address));
    }

    /// A node that comes after `stream` is about to give it back. Its address, if a node of this graph makes it.
    pub(super) fn unmake(&self, memory: &Memory, stream: &Stream) -> Result<Option<Address>> {
        let tie = memory.tie();
        let mut state = lock(&self.state);
        let Some(at) = state.made.iter().position(|(made, _)| Arc::ptr_eq(made, tie)) else { return Ok(None) };
        let (tie, address) = state.made.swap_remove(at);
        drop(state);
        self.before_tied(&tie, stream, true)?;
        Ok(Some(address))
    }

    /// The same, for all that nobody has said it of.
    pub(super) fn unmake_next(&self, stream: &Stream) -> Result<Option<Address>> {
        let made = lock(&self.state).made.pop();
        made.map(|(tie, address)| self.before_tied(&tie, stream, true).map(|()| address)).transpose()
    }

    /// All that another graph's nodes use is about to be used by a node of this one.
    pub(crate) fn before_all_of(&self, other: &Self, stream: &Stream) -> Result<()> {
        let all: Vec<_> = lock(&other.state).tied.iter().map(|tied| (tied.tie.clone(), tied.writes)).collect();
        all.iter().try_for_each(|(tie, write)| self.before_tied(tie, stream, *write))
    }

    /// It is.
    pub(crate) fn note_all_of(&self, other: &Self, ticket: &Ticket) {
        let all: Vec<_> = lock(&other.state).tied.iter().map(|tied| (tied.tie.clone(), tied.writes)).collect();
        all.iter().for_each(|(tie, write)| self.note_tied(tie, ticket, *write, None));
    }

    /// Uses of memory within the captures that this thread is in: to wait for them is an error.
    pub(super) fn captured_uses(memory: &Memory, write: bool) -> SmallVec<[Ticket; 3]> {
        let Some(tie) = memory.tie.get() else { return SmallVec::new() };
        let of = |hold: Arc<Self>| lock(&hold.state).find(tie).map(|tied| tied.uses.open(write));
        let holds = Capture::entered().into_iter().filter_map(|capture| Self::of(&capture).ok());
        holds.filter_map(of).flatten().map(|(ticket, _)| ticket).collect()
    }

    /// The capture is over: its streams' tickets mean nothing any more.
    pub(crate) fn capture_ended(&self, capture: &Capture) {
        // Tickets that are forgotten under the lock may be the last to hold a stream.
        let _later = Deferred::new();
        let outside = capture.take_outside();
        let mut state = lock(&self.state);
        state.over = true;
        state.outside.extend(outside);
        state.tied.iter_mut().for_each(|tied| tied.uses = Uses::default());
        // What nobody has any more is in no need of an order with others.
        let State { tied, shelf, .. } = &mut *state;
        let (mut untied, mut fed) = (Vec::new(), Vec::new());
        for memory in shelf.iter_mut() {
            let Some(tie) = memory.tie.get().filter(|tie| lock(&tie.kept).graphs == 1).cloned() else { continue };
            let Some(at) = tied.iter().position(|tied| Arc::ptr_eq(&tied.tie, &tie)) else { continue };
            untied.push(tied.swap_remove(at));
            memory.tie.take();
            let uses = std::mem::take(&mut *lock(&tie.uses));
            // It was used by streams before it was dropped.
            if uses.any_is(|_| true) {
                fed.push((memory.home, uses.clone()));
            }
            memory.uses = uses.locked();
        }
        state.fed.extend(fed);
        drop(state);
        drop(untied);
    }

    /// Bytes that its graph keeps by itself: its own memory that nobody has.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.state).shelf.iter().map(|memory| memory.size).sum()
    }

    /// Enqueues a copy from host memory to what some of the graph's nodes use, after the launches so far; those that come
    /// then come after it.
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
            let text = "an input is copied on a captured stream: copy it where the graph is launched";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        from.is_page_locked()?;
        if from_offset.checked_add(bytes).is_none_or(|end| end > from.bytes) {
            let text = format!("a copy of {bytes} bytes from {from_offset} of memory of {} bytes", from.bytes);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let from_start = from.host_pointer()?;
        let (room, _turn) = stream.make_room(|| Turn::take_when(|| self.is_lent() || from.is_lent()))?;
        from.before_read(stream)?;
        let mut state = lock(&self.state);
        let holds = |home: Home, size: usize| match home {
            Home::Device(start) => to.0 >= start.0 && to.0 + bytes as u64 <= start.0 + size as u64,
            Home::Host(_) => false,
        };
        let tie = state.tied.iter().find(|tied| holds(tied.tie.home, tied.tie.bytes)).map(|tied| tied.tie.clone());
        let on_shelf = || state.shelf.iter().find(|memory| holds(memory.home, memory.bytes));
        let place = match &tie {
            Some(tie) => Some((tie.home, tie.bytes)),
            None => on_shelf().map(|memory| (memory.home, memory.bytes)),
        };
        let Some((home, size)) = place else {
            return Err(Error::new(ErrorKind::Usage, "a copy to memory that the graph does not have"));
        };
        let launches = state.launches.all();
        let before = match &tie {
            Some(tie) => Some(lock(&tie.uses).clone()),
            None => state.fed.iter().find(|(fed, _)| *fed == home).map(|(_, uses)| uses.clone()),
        };
        drop(state);
        launches.iter().try_for_each(|launch| stream.wait_until_over(launch))?;
        before.map_or(Ok(()), |uses| uses.before_write(stream, bytes >= size, false))?;
        // SAFETY: `to` lies in memory that this graph has, as was just looked up, and that is not given back before the
        // ticket has passed, since it is noted as its use; `from` is as long, and the ticket is noted in it.
        let ticket = stream.enqueue(room, |backend, raw| unsafe {
            let from = Place::Host(from_start.as_ptr().wrapping_add(from_offset));
            backend.copy(raw, Place::Device(to), from, bytes as u64)
        })?;
        from.note_read(&ticket);
        state = lock(&self.state);
        match tie {
            Some(tie) => lock(&tie.uses).written_by(&ticket),
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

    /// Whether some of what its nodes use is lent to another thread. Within a turn.
    pub(super) fn is_lent(&self) -> bool {
        lock(&self.state).tied.iter().any(|tied| tied.tie.is_lent())
    }

    /// An error on the thread of a capture whose nodes use the same memory.
    pub(super) fn is_not_captured(&self, stream: &Stream) -> Result<()> {
        if Capture::current().is_none() {
            return Ok(());
        }
        let ties: Vec<_> = lock(&self.state).tied.iter().map(|tied| tied.tie.clone()).collect();
        match ties.iter().any(Self::is_used_by_current) {
            true => Err(takes_no_part(stream)),
            false => Ok(()),
        }
    }

    /// Whether nodes of the graph use this memory.
    pub(super) fn keeps(&self, tie: &Arc<Tie>) -> bool {
        lock(&self.state).find(tie).is_some()
    }

    /// Whether a node of a capture that this thread is in, the innermost or one around it, uses this memory.
    fn is_used_by_current(tie: &Arc<Tie>) -> bool {
        let uses = |hold: Arc<Self>| lock(&hold.state).find(tie).is_some_and(|tied| tied.used);
        Capture::entered().iter().any(|capture| Self::of(capture).is_ok_and(uses))
    }

    /// Orders a launch after the uses of all that its nodes use.
    ///
    /// Within a turn, whose scope ends after all locks: tickets that are forgotten here may be the last to hold a stream.
    pub(super) fn before_launch(&self, stream: &Stream) -> Result<()> {
        let mut open: SmallVec<[(Ticket, bool); 8]> = SmallVec::new();
        let mut add = |ticket: &Ticket, counts: bool| {
            if !ticket.stream().is(stream) || (counts && ticket.is_spoilt()) {
                open.push((ticket.clone(), counts));
            }
        };
        let mut state = lock(&self.state);
        // Launches read nothing that earlier ones have left on the shelf. While that is empty they may run beside each other.
        state.after_all = !state.shelf.is_empty();
        state.launches.each_open(state.after_all, |launch, _| add(launch, false));
        for tied in &state.tied {
            lock(&tied.tie.uses).each_open(tied.writes, &mut add);
        }
        // They do read what was copied there for them.
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
        // A wait may wake others: not under the lock.
        open.iter().try_for_each(|(ticket, counts)| match counts {
            true => stream.wait_to_read(ticket, false),
            false => stream.wait_until_over(ticket),
        })
    }

    /// What [`before_launch`](Self::before_launch) was called for is enqueued. Within the same turn.
    pub(super) fn note_launch(&self, ticket: &Ticket) {
        let mut are_many = false;
        let mut to_ask: SmallVec<[Arc<Tie>; 1]> = SmallVec::new();
        let mut state = lock(&self.state);
        if state.after_all {
            state.launches.written_by(ticket);
        } else {
            are_many = state.launches.read_by(ticket).are_many;
        }
        for tied in &state.tied {
            let mut uses = lock(&tied.tie.uses);
            if tied.writes {
                uses.written_by(ticket);
            } else if uses.read_by(ticket).are_many {
                to_ask.push(tied.tie.clone());
            }
        }
        drop(state);
        if are_many {
            ask_readers(|with| with(&mut lock(&self.state).launches));
        }
        for tie in to_ask {
            ask_readers(|with| with(&mut lock(&tie.uses)));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> SmallVec<[Ticket; 3]> {
        // Tickets that are forgotten under the lock may be the last to hold a stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        state.launches.forget_passed();
        state.launches.all()
    }
}

fn is_over() -> Error {
    Error::new(ErrorKind::Usage, "its capture is over: take another stream")
}

fn takes_no_part(stream: &Stream) -> Error {
    let text = format!(
        "stream `{}` takes no part in the capture of what uses the same memory: what is enqueued there runs now, and at no \
         launch; take a stream of the capture, an operator `cx.stream()`",
        stream.name()
    );
    Error::new(ErrorKind::Usage, text)
}

impl State {
    fn find(&self, tie: &Arc<Tie>) -> Option<&Tied> {
        self.tied.iter().find(|tied| Arc::ptr_eq(&tied.tie, tie))
    }

    fn tied(&mut self, tie: &Arc<Tie>) -> &mut Tied {
        let at = self.tied.iter().position(|tied| Arc::ptr_eq(&tied.tie, tie)).unwrap_or_else(|| {
            lock(&tie.kept).graphs += 1;
            let (tie, uses) = (tie.clone(), Uses::default());
            self.tied.push(Tied { tie, used: false, writes: false, own: false, by: None, uses });
            self.tied.len() - 1
        });
        &mut self.tied[at]
    }
}

impl Tied {
    /// A node is about to use it. From here on the host may not write it and, if the node does, may not read it: a host slice
    /// that exists now is a shared borrow beside a read, since adding the node borrows the memory in the same way; and
    /// none is made later, until this is dropped with the capture that failed or with the graph and its last launch.
    fn count(&mut self, write: bool) {
        let (reads, writes) = (!self.used, write && !self.writes);
        if reads || writes {
            let mut kept = lock(&self.tie.kept);
            kept.readers += usize::from(reads);
            kept.writers += usize::from(writes);
            self.used = true;
            self.writes |= write;
        }
    }

    fn is_of(&self, these: &[&Memory]) -> bool {
        these.iter().any(|memory| memory.tie.get().is_some_and(|tie| Arc::ptr_eq(tie, &self.tie)))
    }
}

impl Drop for Tied {
    fn drop(&mut self) {
        let mut kept = lock(&self.tie.kept);
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

impl Drop for Hold {
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

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let (tied, own) = (state.tied.len(), state.shelf.len());
        drop(state);
        f.debug_struct("Hold").field("tied", &tied).field("own", &own).finish_non_exhaustive()
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

    /// Notes whether the uses of memory may be looked at when it is woken.
    struct Looks(Arc<Tie>, Mutex<Vec<bool>>);

    impl Wake for Looks {
        fn wake(self: Arc<Self>) {
            lock(&self.1).push(self.0.uses.try_lock().is_some());
        }
    }

    /// Locks of one level do not nest, also where both are looked at: the memory's own, and the tie's.
    #[test]
    fn the_uses_of_memory_are_looked_at_while_it_is_tied() {
        let device = Device::emulated(Emulated::new());
        let memories: Vec<_> = (0..200).map(|_| Memory::on(&device, 64).unwrap()).collect();
        let (memories, (begin, begun)) = (&memories, mpsc::channel());
        std::thread::scope(|scope| {
            let looks = scope.spawn(move || {
                for memory in memories {
                    begin.send(()).unwrap();
                    while memory.tie.get().is_none() {
                        assert!(!memory.uses().any_is(|_| true));
                    }
                }
            });
            for memory in memories {
                if begun.recv().is_ok() {
                    let _ = memory.tie();
                }
            }
            looks.join().unwrap();
        });
    }

    /// Another thread has found the capture, and asks for memory when it has ended.
    #[test]
    fn a_capture_that_has_ended_hands_out_no_memory_of_its_graph() {
        let device = Device::emulated(Emulated::new());
        let (graph, (stream, hold)) = Graph::capture(&device, |capture| {
            let stream = capture.stream().clone();
            let mut scratch = stream.alloc::<u32>(16)?;
            stream.fill(&mut scratch, 1)?;
            let Origin::Graph { hold, .. } = &scratch.view().memory.origin else { panic!("made in a capture") };
            Ok((stream.clone(), hold.upgrade().unwrap()))
        })
        .unwrap();
        for bytes in [64, 128] {
            let asked = hold.alloc(Arena::of(&device).own(&device), &device, bytes, Some(&stream), Asker::Call(0));
            assert_eq!(asked.map(|_| ()).unwrap_err().kind(), ErrorKind::Usage);
        }
        assert_eq!(graph.own_bytes(), hold.bytes(), "what its nodes use stays its own");
        assert!(hold.bytes() >= 64);
    }

    /// Memory of the graph's own is dropped between the look and the note of a launch: neither of two launches that run beside
    /// each other is forgotten.
    #[test]
    fn a_launch_forgets_no_other_that_it_is_not_ordered_after() {
        let device = Device::emulated(Emulated::new());
        let [one, two] = [0, 1].map(|_| Stream::new(&device).unwrap());
        let (_graph, scratch) = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(4)).unwrap();
        let Origin::Graph { hold, .. } = &scratch.view().memory.origin else { panic!("made in a capture") };
        let hold = hold.upgrade().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        one.host_function(move || _ = wait.recv()).unwrap();
        hold.before_launch(&one).unwrap();
        hold.note_launch(&one.ticket());
        hold.before_launch(&two).unwrap();
        drop(scratch);
        two.host_function(|| ()).unwrap();
        hold.note_launch(&two.ticket());
        assert!(hold.open_launches().iter().any(|open| open.stream().is(&one)), "{:?}", hold.open_launches());
        // The next one is ordered after both.
        hold.before_launch(&two).unwrap();
        assert!(lock(&hold.state).after_all);
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
        let hold = graph.hold();
        let launches = lock(&hold.state).launches.all().len();
        let reads = from.view().memory.uses().all().len();
        assert!(launches <= 33 && reads <= 33, "{launches} launches, {reads} uses");
    }

    /// A change of a graph takes a time that grows with it, and all launches on all devices take the turn.
    #[test]
    fn an_exec_is_changed_without_the_turn() {
        let device = Device::emulated(Emulated::new());
        let [mut data, mut other] = [0, 1].map(|_| Buffer::<u32>::new(&device, 4).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 1)).unwrap();
        let (exec, node) = (graph.instantiate().unwrap(), graph.nodes()[0].node);
        let (go, wait) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        let has_the_turn = std::thread::spawn(move || {
            let _turn = Turn::take();
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
    fn whoever_is_woken_by_a_wait_for_memory_of_a_graph_may_use_it() {
        let device = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let [one, two] = [0, 1].map(|_| Stream::new(&device).unwrap());
        let (from, mut to) = (Memory::on(&device, 64).unwrap(), Memory::on(&device, 64).unwrap());
        let looks = Arc::new(Looks(to.tie().clone(), Mutex::default()));
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
