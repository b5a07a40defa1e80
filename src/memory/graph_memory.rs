//! The memory that a graph keeps, and the order of the graph's launches with all other uses of that memory.
//!
//! The addresses in a graph are fixed, so the memory that a graph uses must stay allocated even if its owner drops it.
//! There are two kinds:
//!
//! ```text
//!   allocated in the capture   the graph's own. When dropped, it stays with the graph. During the capture, requests of
//!                              the same size get it, on streams that come after its uses, ordered by edges
//!   allocated before           shared with the graph: its owner may drop it, and then its `SharedUses` keeps it
//! ```
//!
//! Captured work does not run, so it does not count as a use of the memory. The uses within a capture are recorded
//! here, for the graph's edges, and each launch counts as a read or a write of all shared memory. Unlike a kernel
//! launch, a graph launch borrows nothing, so each launch and each other use of shared memory acquires the [use
//! lock](super::use_lock).
//!
//! Only launches use the graph's own memory that has no owner, and these launches run one after the other.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Weak},
};

use smallvec::SmallVec;

use super::{
    Location, Memory, Owned, View,
    graphs::{self, CaptureMemory, capture_over_error, is_used_by_current, not_captured_error},
    memory::Origin,
    shared_uses::{SharedUses, is_any_lent},
    use_lock::UseLockGuard,
    uses::{Uses, query_readers},
};
use crate::{
    device::backend::{Address, Endpoint},
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
    /// The uses of all memory that nodes use or are about to use.
    all: Vec<NodeUses>,
    /// The graph's own memory that has no owner.
    #[allow(clippy::vec_box, reason = "the boxes were there before")]
    unowned: Vec<(Arc<OwnOrigin>, Box<Memory>)>,
    /// The launches, as uses of the memory without an owner.
    launches: Uses,
    /// True if the launch that is being prepared comes after all of these launches, which are then forgotten once it is
    /// enqueued. Decided once per launch, as an owner may drop memory in between.
    after_all: bool,
    /// Other uses of the memory without an owner, whose results launches read: copies of inputs, and uses before the
    /// owner dropped the memory.
    inputs: Vec<(Location, Uses)>,
    /// True if memory is not reused: inputs are copied before the launch, and the copies must stay.
    no_reuse: bool,
    /// True if memory was reused.
    has_reused: bool,
    /// Memory that nodes allocate and that no node frees yet.
    allocated: Vec<(Arc<SharedUses>, Address)>,
    /// Tickets outside the graph that launches come after, collected during the capture, each with whether its taint
    /// matters to the launch.
    outside: Vec<(Ticket, bool)>,
    /// True once the capture is over.
    over: bool,
}

/// The uses of a piece of memory by nodes.
struct NodeUses {
    shared: Arc<SharedUses>,
    /// True if a node uses the memory and is counted as a reader.
    used: bool,
    /// True if a node writes the memory and is counted as a writer.
    writes: bool,
    /// True if the memory was allocated in the capture.
    own: bool,
    /// The label of the node that used the memory last.
    by: Option<Arc<str>>,
    /// The uses within the capture.
    uses: Uses,
}

impl GraphMemory {
    pub(crate) fn new(capture: &Capture) -> Arc<Self> {
        let graph_memory =
            Arc::new_cyclic(|this| Self { this: this.clone(), state: Mutex::at(Level::GraphMemory, State::default()) });
        let this: Weak<Self> = Arc::downgrade(&graph_memory);
        graphs::register(capture, this);
        graph_memory
    }

    /// Called when the capture has inputs, which are copied before a launch: from here on, the capture reuses no
    /// memory. Fails if it already has.
    pub(crate) fn forbid_reuse(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.has_reused {
            let text = "`Capturing::input` was called after the capture had reused memory: declare inputs first, so \
                        that the destination of an input has no other use";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        state.no_reuse = true;
        Ok(())
    }

    /// Keeps the host memory of an input or an output until the capture is over. The memory is identified by its
    /// address, so no other allocation may get this address.
    pub(crate) fn keep(&self, memory: &Memory) {
        let _ = lock(&self.state).uses_of(memory.shared_uses());
    }

    /// Forgets the reads of this host memory: the nodes that read it were removed.
    pub(crate) fn forget_reads(&self, of: &Range<usize>) {
        let mut state = lock(&self.state);
        let gone: Vec<_> = state.all.extract_if(.., |nodes| !nodes.writes && nodes.shared.lies_in(of)).collect();
        drop(state);
        drop(gone);
    }

    fn before_shared(&self, shared: &Arc<SharedUses>, stream: &Stream, write: bool) -> Result<()> {
        shared.check_not_lent(stream, write)?;
        let outside = lock(&shared.uses).open(write);
        let within = {
            // The memory is kept from here on: another thread may end the capture after the node is added and before
            // its use is noted.
            let mut state = lock(&self.state);
            if state.over {
                return Err(capture_over_error());
            }
            let nodes = state.uses_of(shared);
            nodes.count_use(write);
            nodes.uses.open(write)
        };
        within.iter().try_for_each(|(ticket, taint_matters)| match taint_matters {
            true => stream.wait(ticket),
            false => stream.wait_until_over(ticket),
        })?;
        // A use that is already tainted is an error here. If a use becomes tainted later and is still the last one, the
        // launches fail: each launch checks it.
        outside.iter().try_for_each(|(ticket, taint_matters)| {
            if *taint_matters {
                ticket.check_known_taint()?;
            }
            stream.wait_until_over(ticket)
        })
    }

    /// The label of the last node that used device memory of the graph's own that still has an owner, except for the
    /// memory in `beside`.
    pub(crate) fn kept_by(&self, beside: &[&Memory]) -> Option<Arc<str>> {
        let state = lock(&self.state);
        let mut kept = state.all.iter().filter(|nodes| nodes.own && !nodes.is_of(beside));
        kept.find_map(
            |nodes| if matches!(nodes.shared.location, Location::Device(_)) { nodes.by.clone() } else { None },
        )
    }

    /// True if an owner has dropped memory that was allocated before the capture.
    pub(crate) fn is_sole_owner(&self) -> bool {
        lock(&self.state).all.iter().any(|nodes| !nodes.own && lock(&nodes.shared.state).give_back.is_some())
    }

    /// The label of a node that uses memory allocated before the capture, except for the memory in `beside`, that no
    /// node of the other graph uses in the same way.
    pub(crate) fn differs_from(&self, beside: &[&Memory], other: &Self) -> Option<Arc<str>> {
        let theirs: Vec<_> = lock(&other.state).all.iter().map(|nodes| (nodes.shared.clone(), nodes.writes)).collect();
        let is_theirs = |nodes: &NodeUses| {
            theirs.iter().any(|(shared, writes)| Arc::ptr_eq(shared, &nodes.shared) && *writes == nodes.writes)
        };
        let state = lock(&self.state);
        let mut differ = state.all.iter().filter(|nodes| !nodes.own && !nodes.is_of(beside) && !is_theirs(nodes));
        differ.find_map(|nodes| nodes.by.clone())
    }

    /// Records that a node of this graph allocates this memory.
    pub(super) fn node_allocates(&self, memory: &Memory, address: Address) {
        lock(&self.state).allocated.push((memory.shared_uses().clone(), address));
    }

    /// Prepares a node after `stream` that frees the memory. Returns the address if a node of this graph allocates the
    /// memory.
    pub(super) fn take_allocated(&self, memory: &Memory, stream: &Stream) -> Result<Option<Address>> {
        let shared = memory.shared_uses();
        let mut state = lock(&self.state);
        let Some(at) = state.allocated.iter().position(|(known, _)| Arc::ptr_eq(known, shared)) else {
            return Ok(None);
        };
        let (shared, address) = state.allocated.swap_remove(at);
        drop(state);
        self.before_shared(&shared, stream, true)?;
        Ok(Some(address))
    }

    /// Like [`take_allocated`](Self::take_allocated), for the next piece of memory that no node frees.
    pub(super) fn take_next_allocated(&self, stream: &Stream) -> Result<Option<Address>> {
        let next = lock(&self.state).allocated.pop();
        next.map(|(shared, address)| self.before_shared(&shared, stream, true).map(|()| address)).transpose()
    }

    /// Prepares a node that uses all memory that the nodes of another graph use.
    pub(crate) fn before_all_of(&self, other: &Self, stream: &Stream) -> Result<()> {
        let all: Vec<_> = lock(&other.state).all.iter().map(|nodes| (nodes.shared.clone(), nodes.writes)).collect();
        all.iter().try_for_each(|(shared, write)| self.before_shared(shared, stream, *write))
    }

    /// Notes the uses of the node that [`before_all_of`](Self::before_all_of) prepared.
    pub(crate) fn note_all_of(&self, other: &Self, ticket: &Ticket) {
        let all: Vec<_> = lock(&other.state).all.iter().map(|nodes| (nodes.shared.clone(), nodes.writes)).collect();
        all.iter().for_each(|(shared, write)| self.note_use(shared, ticket, *write, None));
    }

    /// Called once the capture is over, when the tickets of its streams no longer have a meaning.
    pub(crate) fn capture_ended(&self, capture: &Capture) {
        // A forgotten ticket may be the last handle of its stream.
        let _later = Deferred::new();
        let outside = capture.take_outside();
        let mut state = lock(&self.state);
        state.over = true;
        state.outside.extend(outside);
        state.all.iter_mut().for_each(|nodes| nodes.uses = Uses::default());
        // No other work uses memory without an owner, so it needs no order with other uses.
        let State { all, unowned, .. } = &mut *state;
        let (mut forgotten, mut inputs) = (Vec::new(), Vec::new());
        for (_, memory) in unowned.iter_mut() {
            let Some(shared) = memory.shared.get().filter(|shared| lock(&shared.state).graphs == 1).cloned() else {
                continue;
            };
            let Some(at) = all.iter().position(|nodes| Arc::ptr_eq(&nodes.shared, &shared)) else { continue };
            forgotten.push(all.swap_remove(at));
            memory.shared.take();
            let uses = std::mem::take(&mut *lock(&shared.uses));
            // Streams used it before it was dropped.
            if !uses.is_empty() {
                inputs.push((memory.location, uses.clone()));
            }
            memory.uses = uses.locked();
        }
        state.inputs.extend(inputs);
        drop(state);
        drop(forgotten);
    }

    /// The size of the graph's own memory that has no owner, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.state).unowned.iter().map(|(_, memory)| memory.size).sum()
    }

    /// Enqueues a copy from host memory, a view of bytes, to memory that the graph's nodes use. The copy comes after all earlier
    /// launches, and later launches come after the copy.
    pub(crate) fn copy_input(
        &self,
        stream: &Stream,
        to: Address,
        from: View<'_>,
        from_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let View { memory: from, offset: start, len: available } = from;
        if stream.capture().is_some() {
            let text = "an input cannot be copied on a captured stream: copy it on the stream that launches the graph";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        from.check_page_locked()?;
        if from_offset.checked_add(bytes).is_none_or(|end| end > available) {
            let text = format!(
                "cannot copy {bytes} bytes from offset {from_offset} of {available} bytes: the source is too short"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let from_start = from.host_pointer()?;
        let (room, _use_lock) = stream.make_room(|| UseLockGuard::acquire_when(|| self.is_lent() || from.is_lent()))?;
        from.before_read(stream)?;
        let mut state = lock(&self.state);
        let contains = |location: Location, size: usize| match location {
            Location::Device(start) => to.0 >= start.0 && to.0 + bytes as u64 <= start.0 + size as u64,
            Location::Host(_) => false,
        };
        let shared = state
            .all
            .iter()
            .find(|nodes| contains(nodes.shared.location, nodes.shared.bytes))
            .map(|nodes| nodes.shared.clone());
        shared.iter().try_for_each(|shared| shared.check_not_lent(stream, true))?;
        let unowned = || state.unowned.iter().find(|(_, memory)| contains(memory.location, memory.bytes));
        let place = match &shared {
            Some(shared) => Some((shared.location, shared.bytes)),
            None => unowned().map(|(_, memory)| (memory.location, memory.bytes)),
        };
        let Some((location, size)) = place else {
            return Err(Error::new(ErrorKind::Usage, "the destination of an input's copy is not memory of this graph"));
        };
        let launches = state.launches.all();
        let before = match &shared {
            Some(shared) => Some(lock(&shared.uses).clone()),
            None => state.inputs.iter().find(|(input, _)| *input == location).map(|(_, uses)| uses.clone()),
        };
        drop(state);
        launches.iter().try_for_each(|launch| stream.wait_until_over(launch))?;
        before.map_or(Ok(()), |uses| uses.before_write(stream, bytes >= size, false))?;
        // SAFETY: `to` is in memory that this graph keeps, as was just checked. The memory is not freed before the
        // ticket has passed, since the ticket is noted as its use. The view of `from`, which begins at `start`, has at least
        // `from_offset + bytes` bytes, and the ticket is noted in it.
        let ticket = stream.enqueue(room, |backend, raw| unsafe {
            let from = Endpoint::Host(from_start.as_ptr().wrapping_add(start + from_offset));
            backend.copy(raw, Endpoint::Device(to), from, bytes as u64)
        })?;
        from.note_read(&ticket);
        state = lock(&self.state);
        match shared {
            Some(shared) => lock(&shared.uses).written_by(&ticket),
            None => {
                let mut uses = Uses::default();
                uses.written_by(&ticket);
                state.inputs.retain(|(input, _)| *input != location);
                state.inputs.push((location, uses));
                state.launches.written_by(&ticket);
            }
        }
        Ok(())
    }

    /// True if memory that the nodes use is lent to another thread. Called with the use lock held.
    pub(super) fn is_lent(&self) -> bool {
        lock(&self.state).all.iter().any(|nodes| nodes.shared.is_lent())
    }

    /// Fails on a thread that is in a capture whose nodes use the same memory, or in a function that such memory is lent
    /// to.
    pub(super) fn check_not_captured(&self, stream: &Stream) -> Result<()> {
        if is_any_lent() {
            lock(&self.state).all.iter().try_for_each(|nodes| nodes.shared.check_not_lent(stream, nodes.writes))?;
        }
        if Capture::current().is_none() {
            return Ok(());
        }
        let all: Vec<_> = lock(&self.state).all.iter().map(|nodes| nodes.shared.clone()).collect();
        match all.iter().any(is_used_by_current) {
            true => Err(not_captured_error(stream)),
            false => Ok(()),
        }
    }

    pub(super) fn keeps(&self, shared: &Arc<SharedUses>) -> bool {
        lock(&self.state).find(shared).is_some()
    }

    /// Orders a launch after the uses of all memory that its nodes use. Called with the use lock held: a ticket that is
    /// forgotten here may be the last handle of its stream, and the `Deferred` scope of the use lock ends after all
    /// locks are released.
    pub(super) fn before_launch(&self, stream: &Stream) -> Result<()> {
        let mut open: SmallVec<[(Ticket, bool); 8]> = SmallVec::new();
        let mut add = |ticket: &Ticket, taint_matters: bool| {
            if !ticket.stream().is(stream) || (taint_matters && ticket.is_tainted()) {
                open.push((ticket.clone(), taint_matters));
            }
        };
        let mut state = lock(&self.state);
        // Launches do not read the data of earlier launches in the memory without an owner. If there is no such memory,
        // launches may run concurrently.
        state.after_all = !state.unowned.is_empty();
        state.launches.each_open(state.after_all, |launch, _| add(launch, false));
        for nodes in &state.all {
            lock(&nodes.shared.uses).each_open(nodes.writes, &mut add);
        }
        // But they read the inputs that were copied there.
        if !state.inputs.is_empty() {
            state.inputs.retain_mut(|(_, uses)| {
                uses.forget_settled();
                !uses.is_empty()
            });
            state.inputs.iter().for_each(|(_, uses)| uses.each_open(true, &mut add));
        }
        if !state.outside.is_empty() {
            state.outside.retain(
                |(ticket, taint_matters)| if *taint_matters { !ticket.is_settled() } else { !ticket.is_over() },
            );
            state.outside.iter().for_each(|(ticket, taint_matters)| add(ticket, *taint_matters));
        }
        drop(state);
        // Not under the lock: a wait may wake tasks.
        open.iter().try_for_each(|(ticket, taint_matters)| match taint_matters {
            true => stream.wait_to_read(ticket, false),
            false => stream.wait_until_over(ticket),
        })
    }

    /// Notes the launch that [`before_launch`](Self::before_launch) prepared and that is now enqueued. Called with the
    /// same use lock held.
    pub(super) fn note_launch(&self, ticket: &Ticket) {
        let mut are_many = false;
        let mut to_ask: SmallVec<[Arc<SharedUses>; 1]> = SmallVec::new();
        let mut state = lock(&self.state);
        if state.after_all {
            state.launches.written_by(ticket);
        } else {
            are_many = state.launches.read_by(ticket).are_many;
        }
        for nodes in &state.all {
            let mut uses = lock(&nodes.shared.uses);
            if nodes.writes {
                uses.written_by(ticket);
            } else if uses.read_by(ticket).are_many {
                to_ask.push(nodes.shared.clone());
            }
        }
        drop(state);
        if are_many {
            query_readers(|with| with(&mut lock(&self.state).launches));
        }
        for shared in to_ask {
            query_readers(|with| with(&mut lock(&shared.uses)));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> SmallVec<[Ticket; 3]> {
        // A forgotten ticket may be the last handle of its stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        state.launches.forget_passed();
        state.launches.all()
    }
}

impl CaptureMemory for GraphMemory {
    fn reuse(&self, origin: &dyn Origin, bytes: usize, stream: &Stream) -> Result<Option<Owned>> {
        let past = stream.ordered_after();
        let mut state = lock(&self.state);
        // Once the capture is over, launches use the memory without an owner, and no edge orders other work with them.
        if state.over {
            return Err(capture_over_error());
        }
        let State { all, unowned, no_reuse, has_reused, .. } = &mut *state;
        if *no_reuse {
            return Ok(None);
        }
        let at = unowned.iter().position(|(own, memory)| {
            let fits = memory.bytes == bytes && std::ptr::addr_eq(Arc::as_ptr(&own.origin), origin);
            let uses =
                || memory.shared.get().and_then(|shared| all.iter().find(|nodes| Arc::ptr_eq(&nodes.shared, shared)));
            // Nodes of another graph, for example of a capture within this capture, may use the memory at any time,
            // although it has no owner.
            let is_shared = memory.shared.get().is_some_and(|shared| lock(&shared.state).graphs > 1);
            fits && !is_shared && uses().is_none_or(|nodes| nodes.uses.all_are(&past))
        });
        *has_reused |= at.is_some();
        Ok(at.map(|at| {
            let (own, mut memory) = unowned.swap_remove(at);
            memory.origin = Some(own);
            Owned::new(memory)
        }))
    }

    fn adopt(&self, memory: &mut Memory) -> Result<()> {
        {
            let mut state = lock(&self.state);
            // Another thread may have ended the capture since it was looked up.
            if state.over {
                return Err(capture_over_error());
            }
            // Marks the memory as the capture's own before its first use.
            state.uses_of(memory.shared_uses()).own = true;
        }
        if let Some(origin) = memory.origin.take() {
            memory.origin = Some(Arc::new(OwnOrigin { graph_memory: self.this.clone(), origin }));
        }
        Ok(())
    }

    fn before_use(&self, shared: &Arc<SharedUses>, stream: &Stream, write: bool) -> Result<()> {
        if shared.of_node && !lock(&self.state).allocated.iter().any(|(known, _)| Arc::ptr_eq(known, shared)) {
            let text = "a node of another graph allocates this memory, or an earlier node frees it: use it only in \
                        nodes of the graph that allocates it, before it is freed";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.before_shared(shared, stream, write)
    }

    fn note_use(&self, shared: &Arc<SharedUses>, ticket: &Ticket, write: bool, label: Option<Arc<str>>) {
        // A forgotten ticket may be the last handle of its stream.
        let _later = Deferred::new();
        let mut state = lock(&self.state);
        if state.over {
            // The order within the capture is not needed any more.
            return;
        }
        let nodes = state.uses_of(shared);
        nodes.count_use(write);
        nodes.by = label;
        if write {
            nodes.uses.written_by(ticket);
        } else {
            let _ = nodes.uses.read_by(ticket);
        }
    }

    fn open_uses(&self, shared: &Arc<SharedUses>, write: bool) -> SmallVec<[Ticket; 3]> {
        let state = lock(&self.state);
        let open = state.find(shared).map(|nodes| nodes.uses.open(write));
        open.into_iter().flatten().map(|(ticket, _)| ticket).collect()
    }

    fn uses(&self, shared: &Arc<SharedUses>) -> bool {
        lock(&self.state).find(shared).is_some_and(|nodes| nodes.used)
    }

    fn last_write(&self, start: Address) -> Option<Ticket> {
        let state = lock(&self.state);
        let nodes = state.all.iter().find(|nodes| nodes.shared.location == Location::Device(start));
        nodes.and_then(|nodes| nodes.uses.write.clone())
    }
}

/// The origin of a graph's own memory. The memory returns to the graph or, if the graph was dropped, to its former
/// origin.
struct OwnOrigin {
    graph_memory: Weak<GraphMemory>,
    origin: Arc<dyn Origin>,
}

impl Origin for OwnOrigin {
    #[cold]
    fn take_back(self: Arc<Self>, memory: Box<Memory>) {
        match self.graph_memory.upgrade() {
            Some(graph_memory) => lock(&graph_memory.state).unowned.push((self, memory)),
            None => self.origin.clone().take_back(memory),
        }
    }

    fn own(&self, flow: usize, bytes: u64) {
        self.origin.own(flow, bytes);
    }

    fn disown(&self, flow: usize, bytes: u64) {
        self.origin.disown(flow, bytes);
    }
}

impl State {
    fn find(&self, shared: &Arc<SharedUses>) -> Option<&NodeUses> {
        self.all.iter().find(|nodes| Arc::ptr_eq(&nodes.shared, shared))
    }

    fn uses_of(&mut self, shared: &Arc<SharedUses>) -> &mut NodeUses {
        let at = self.all.iter().position(|nodes| Arc::ptr_eq(&nodes.shared, shared)).unwrap_or_else(|| {
            lock(&shared.state).graphs += 1;
            let (shared, uses) = (shared.clone(), Uses::default());
            self.all.push(NodeUses { shared, used: false, writes: false, own: false, by: None, uses });
            self.all.len() - 1
        });
        &mut self.all[at]
    }
}

impl NodeUses {
    /// Called before a node that uses the memory is added. From here on the host may not write the memory nor, if the
    /// node writes it, read it. A host slice that exists now is a shared borrow, and the node only reads, since adding
    /// the node borrows the memory in the same way. No later slice is made until this value is dropped, with the failed
    /// capture or with the graph and its last launch.
    fn count_use(&mut self, write: bool) {
        let (reads, writes) = (!self.used, write && !self.writes);
        if reads || writes {
            let mut shared = lock(&self.shared.state);
            shared.readers += usize::from(reads);
            shared.writers += usize::from(writes);
            self.used = true;
            self.writes |= write;
        }
    }

    fn is_of(&self, these: &[&Memory]) -> bool {
        these.iter().any(|memory| memory.shared.get().is_some_and(|shared| Arc::ptr_eq(shared, &self.shared)))
    }
}

impl Drop for NodeUses {
    fn drop(&mut self) {
        let mut shared = lock(&self.shared.state);
        shared.graphs -= 1;
        shared.readers -= usize::from(self.used);
        shared.writers -= usize::from(self.writes);
        let give_back = if shared.graphs == 0 { shared.give_back.take() } else { None };
        drop(shared);
        if let Some(give_back) = give_back {
            give_back();
        }
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let State { unowned, launches, .. } = self.state.get_mut();
        let launches = launches.all();
        for (own, mut memory) in unowned.drain(..) {
            for launch in &launches {
                let _forgotten = memory.uses_mut().read_by(launch);
            }
            own.take_back(memory);
        }
    }
}

impl fmt::Debug for GraphMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let (all, own) = (state.all.len(), state.unowned.len());
        drop(state);
        f.debug_struct("GraphMemory").field("shared", &all).field("own", &own).finish_non_exhaustive()
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
        device::{Device, Emulated, Faults},
        graph::Graph,
        memory::{DeviceSlice, arena::Arena, heap::Request, transfer},
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
                    while memory.shared.get().is_none() {
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

    /// Another thread has looked up the capture, and requests memory after the capture has ended.
    #[test]
    fn a_capture_that_has_ended_hands_out_no_memory_of_its_graph() {
        let device = Device::emulated(Emulated::new());
        let (graph, stream) = Graph::capture(&device, |capture| {
            let stream = capture.stream().clone();
            let mut scratch = stream.alloc::<u32>(16)?;
            stream.fill(&mut scratch, 1)?;
            Ok(stream.clone())
        })
        .unwrap();
        let graph_memory = graph.graph_memory();
        for bytes in [64, 128] {
            let heap = Arena::of(&device).device_heap(&device).clone();
            let asked = heap.alloc_captured(&**graph_memory, &device, bytes, Some(&stream), Request::UNRESERVED);
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
        let (graph, scratch) = Graph::capture(&device, |capture| capture.stream().alloc::<u32>(4)).unwrap();
        let graph_memory = graph.graph_memory();
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
            let _use_lock = UseLockGuard::acquire();
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
