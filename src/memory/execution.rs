//! An instantiated graph: its launches are ordered with all other uses of its memory, and it is destroyed once they are
//! done.
//!
//! ```text
//!   launch on s    take the use lock ──> s waits for the uses of all its memory ──> enqueued ──> its ticket is noted
//!   update, set    the device accepts ──> launches from now on use the new resources;
//!                  the replaced ones are dropped once the launches until now are done
//!   drop           launches are done: destroyed at once; otherwise at the monitor's tick that finds them done
//! ```
//!
//! All devices share the use lock, and a change takes a time that grows with the graph: so a change does not take it.
//!
//! Locks are taken in this order: the use lock, the exec's uses, a recorder's state. Values that may have user-defined
//! destructors (memory, callbacks) are dropped with none of them held.

mod open;

use std::{
    cell::Cell,
    collections::HashSet,
    fmt, iter,
    sync::{Arc, Weak},
};

pub(crate) use open::{Given, Opening};
use open::{OpenEnd, raw_of};
use smallvec::SmallVec;

use super::{
    Buffer, Location, Memory, Plain, View,
    accounting::Extent,
    arena::Arena,
    bytes_of,
    graph_memory::GraphMemory,
    graphs::{self, DroppedExec},
    heap::Ledger,
    piece::Origin,
    shared_uses::{SharedUses, UseLock},
};
use crate::{
    device::{
        Device,
        backend::{Address, Backend, GraphCondition, NodeWork, RawExec, Refused},
        graph_ir::{Kind, NodeSet},
        recorder::Recorder,
        work_item::WorkItem,
    },
    error::{Error, ErrorKind, Result},
    stream::{
        Launched, Stream, Streams, Ticket,
        capture::{Capture, KeptAlive},
    },
    sync::{Deferred, Level, Mutex, discard, discard_all, lock},
};

/// See the [module](self).
pub(crate) struct Execution {
    device: Device,
    raw: RawExec,
    /// One thread launches or changes it at a time. Shared with the completion monitor, which drops replaced resources.
    uses: Arc<Mutex<Uses>>,
}

/// What launches use.
#[derive(Default)]
struct Uses {
    /// The resources of the graph that it was instantiated from, and of graphs within.
    graph: Use,
    /// The resources of the graph of the last update.
    update: Option<Use>,
    /// The resources of nodes that were set since.
    nodes: Vec<(usize, Use)>,
    /// Replaced resources, with the launches that use them: those that were open at the change.
    before: Vec<(Use, Open)>,
    /// The completion monitor sweeps this.
    is_swept: bool,
    /// The memory that launches from now on use, without duplicates.
    graph_memories: SmallVec<[Arc<GraphMemory>; 2]>,
    /// How often these have changed.
    changes: u64,
    ends: Vec<OpenEnd>,
}

/// What some of its nodes use.
#[derive(Default)]
pub(crate) struct Use {
    pub(crate) graph_memories: SmallVec<[Arc<GraphMemory>; 1]>,
    /// Other than memory: events, a graph.
    #[allow(dead_code, reason = "held")]
    pub(crate) kept: KeptAlive,
    /// The nodes' work. Kept so that the device is not the last owner of a callback.
    pub(crate) work_item: Option<WorkItem>,
}

/// Launches that are not known to be done.
type Open = SmallVec<[Ticket; 3]>;

impl Use {
    fn open(&self) -> Open {
        self.graph_memories.iter().flat_map(|graph_memory| graph_memory.open_launches()).collect()
    }
}

impl Uses {
    fn new(graph: Use, ends: Vec<OpenEnd>) -> Self {
        let mut uses = Self { graph, ends, ..Self::default() };
        uses.changed(None);
        uses
    }

    /// Collects what launches from now on use, and keeps the replaced resources for earlier launches.
    fn changed(&mut self, gone: impl IntoIterator<Item = Use>) {
        let all = iter::once(&self.graph).chain(&self.update).chain(self.nodes.iter().map(|(_, of)| of));
        self.changes += 1;
        let mut known = HashSet::new();
        let graph_memories =
            all.flat_map(|of| &of.graph_memories).filter(|graph_memory| known.insert(Arc::as_ptr(graph_memory)));
        self.graph_memories = graph_memories.cloned().collect();
        self.before.extend(gone.into_iter().map(|gone| {
            let open = gone.open();
            (gone, open)
        }));
    }

    /// Drops what no launch uses any more. True if some is left; if not, the completion monitor stops sweeping it.
    fn tidy(this: &Mutex<Self>) -> bool {
        let _later = Deferred::new();
        let mut uses = lock(this);
        let gone = uses.take_over(are_over);
        let is_left = !uses.before.is_empty();
        uses.is_swept &= is_left;
        drop(uses);
        discard_all(gone);
        is_left
    }

    /// The memory of launches from now on, and of earlier ones.
    fn all(&self) -> impl Iterator<Item = &Arc<GraphMemory>> {
        let before = self.before.iter().map(|(of, _)| of);
        let now = [&self.graph].into_iter().chain(&self.update).chain(self.nodes.iter().map(|(_, of)| of));
        now.chain(before).flat_map(|of| &of.graph_memories)
    }

    /// Takes what no launch uses any more, to be dropped without a lock.
    #[inline]
    fn take_over(&mut self, mut is_over: impl FnMut(&mut Open) -> bool) -> Vec<Use> {
        if self.before.is_empty() {
            return Vec::new();
        }
        self.before.extract_if(.., |(_, open)| is_over(open)).map(|(gone, _)| gone).collect()
    }
}

impl Execution {
    pub(crate) fn new(device: &Device, recorder: &Recorder, graph: Use, open: &[Opening]) -> Result<Self> {
        device.check()?;
        let ends = open.iter().map(|opening| OpenEnd::new(recorder, opening)).collect::<Result<_>>()?;
        // If a device can have only one exec of a graph, this need not wait for the completion monitor.
        graphs::destroy_done(|exec| exec.is_on(device.backend()));
        let made = {
            let state = recorder.state();
            device.backend().graph_instantiate(state.graph)
        };
        let raw = Streams::of(device).observe(made)?;
        Ok(Self { device: device.clone(), raw, uses: Arc::new(Mutex::at(Level::ExecUses, Uses::new(graph, ends))) })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    fn may_be_on(&self, stream: &Stream) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
        if stream.device() != &self.device {
            return wrong(format!(
                "a graph of {} cannot run on stream `{}` of {}",
                self.device,
                stream.name(),
                stream.device()
            ));
        }
        if stream.capture().is_some() {
            return wrong(
                "a graph cannot be launched into a capture: build a graph with it as a child, `Builder::child`".into(),
            );
        }
        Ok(())
    }

    /// Uploads it to the device, so that its first launch need not.
    pub(crate) fn upload(&self, stream: &Stream) -> Result<()> {
        self.may_be_on(stream)?;
        let (room, _uses) = stream.make_room(|| {
            let later = Deferred::new();
            (lock(&self.uses), later)
        })?;
        stream.enqueue(room, |backend, raw| backend.exec_upload(self.raw, raw)).map(drop)
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<Ticket> {
        self.launch_with(stream, &mut [])
    }

    /// Launches it with the memory at its open ends.
    pub(crate) fn launch_with(&self, stream: &Stream, given: &mut [Given<'_>]) -> Result<Ticket> {
        self.may_be_on(stream)?;
        given.iter().filter(|given| given.written).try_for_each(|given| given.memory.writable())?;
        // Declared before the locks, so that it is dropped after them.
        let _gone;
        let (room, _use_lock, mut uses) = loop {
            let looked_at = Cell::new(None);
            let (room, use_lock) = stream.make_room(|| {
                UseLock::take_when(|| {
                    let uses = lock(&self.uses);
                    looked_at.set(Some(uses.changes));
                    uses.graph_memories.iter().any(|graph_memory| graph_memory.is_lent())
                        || given.iter().any(|given| given.memory.is_lent())
                })
            })?;
            let uses = lock(&self.uses);
            // A change does not take the use lock: since the check, there may be new memory here that is lent.
            if looked_at.get().is_none_or(|changes| changes == uses.changes) {
                break (room, use_lock, uses);
            }
        };
        _gone = uses.take_over(|open| open.iter().all(Ticket::has_passed));
        uses.ends.iter().try_for_each(|end| end.is_covered(given))?;
        for Given { memory, written, .. } in given.iter_mut() {
            if *written { memory.before_write(stream) } else { memory.before_read(stream) }?;
        }
        uses.graph_memories.iter().try_for_each(|graph_memory| graph_memory.is_not_captured(stream))?;
        uses.graph_memories.iter().try_for_each(|graph_memory| graph_memory.before_launch(stream))?;
        // SAFETY: all memory that its nodes use is held by `uses`, which live until the launch is done: on drop they
        // are given to the completion monitor until then, and what a change replaces is kept until then, too. The
        // memory at its open ends is in `given`, as was just checked, and memory with an open ticket is not freed: the
        // ticket is noted below, before any other code can drop it.
        let ticket = stream
            .enqueue_launch(room, Launched::Graph, |backend, raw| unsafe { backend.exec_launch(self.raw, raw) })?;
        uses.graph_memories.iter().for_each(|graph_memory| graph_memory.note_launch(&ticket));
        for Given { memory, written, .. } in given {
            if *written { memory.note_write(&ticket) } else { memory.note_read(&ticket) }
        }
        Ok(ticket)
    }

    /// Launches from now on copy `bytes` bytes to or from this memory at an open end, and must be given it. False if
    /// the node cannot do so: then they copy nothing there.
    pub(crate) fn set_open_end(&self, end: usize, memory: &Memory, bytes: usize) -> Result<bool> {
        self.device.check()?;
        let set = {
            let mut uses = lock(&self.uses);
            match uses.ends.get_mut(end) {
                Some(end) => end.set(&self.device, self.raw, memory, bytes),
                None => Err(Error::new(ErrorKind::Usage, "the exec has no such open end")),
            }
        };
        if set.is_err() { Streams::of(&self.device).observe(set) } else { set }
    }

    /// Launches from now on do what this graph's nodes do, which use `with`.
    pub(crate) fn update(&self, recorder: &Recorder, with: Use) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let updated = {
            let _later = Deferred::new();
            let mut uses = lock(&self.uses);
            let state = recorder.state();
            // SAFETY: the memory that the graph's nodes use is held by `with`, which is kept from here on.
            let updated = unsafe { self.device.backend().exec_update(self.raw, state.graph) };
            drop(state);
            if let Ok(Ok(())) = updated {
                let before = uses.update.replace(with);
                let nodes = std::mem::take(&mut uses.nodes);
                uses.changed(before.into_iter().chain(nodes.into_iter().map(|(_, of)| of)));
            }
            updated
        };
        self.tidy();
        Streams::of(&self.device).observe(updated)
    }

    /// Launches from now on run the work item in `with` at this node. Takes `with` if the device accepts it, and leaves
    /// it otherwise.
    pub(crate) fn set(&self, recorder: &Recorder, node: usize, with: &mut Use) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let Some(new) = &with.work_item else { return Ok(Ok(())) };
        let set = {
            let _later = Deferred::new();
            let mut uses = lock(&self.uses);
            let state = recorder.state();
            let (raw, kind) = match raw_of(&state, node) {
                Ok(known) => known,
                Err(refused) => return Ok(Err(refused)),
            };
            if !new.is(kind) {
                return Ok(Err(Refused { node: Some(raw), why: format!("a {} cannot replace it", new.name()) }));
            }
            // SAFETY: what the work uses is held by `with`, which is kept from here on.
            let set = new.with(|work| unsafe { self.device.backend().exec_set(self.raw, raw, work) });
            drop(state);
            if let Ok(Ok(())) = set {
                let with = std::mem::take(with);
                let at = uses.nodes.iter().position(|(set, _)| *set == node);
                let before = at.map(|at| uses.nodes.swap_remove(at).1);
                uses.nodes.push((node, with));
                uses.changed(before);
            }
            set
        };
        self.tidy();
        Streams::of(&self.device).observe(set)
    }

    pub(crate) fn enable(&self, recorder: &Recorder, node: usize, enabled: bool) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let done = {
            let _uses = lock(&self.uses);
            let state = recorder.state();
            match raw_of(&state, node) {
                Ok((raw, _)) => self.device.backend().exec_enable(self.raw, raw, enabled),
                Err(refused) => return Ok(Err(refused)),
            }
        };
        Streams::of(&self.device).observe(done)
    }

    /// Drops the replaced resources whose launches are done. The others are dropped by a later launch or change, or by
    /// the completion monitor.
    fn tidy(&self) {
        if !Uses::tidy(&self.uses) {
            return;
        }
        let (uses, ledger) = (Arc::downgrade(&self.uses), Arc::downgrade(&Arena::of(&self.device).ledger));
        let begins = !std::mem::replace(&mut lock(&self.uses).is_swept, true);
        if begins {
            let sweep = move || {
                let (Some(uses), Some(ledger)) = (uses.upgrade(), ledger.upgrade()) else { return false };
                let goes_on = Uses::tidy(&uses);
                ledger.notify_later();
                goes_on
            };
            Streams::of(&self.device).monitor().sweep(Box::new(sweep));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> Open {
        // Before the lock: forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        lock(&self.uses).graph_memories.iter().flat_map(|graph_memory| graph_memory.open_launches()).collect()
    }
}

/// True if these launches are done, or never will be because the device is lost. Does not query the device within a
/// capture.
fn are_over(open: &mut Open) -> bool {
    let may_ask = Capture::may_query_device();
    let mut lost = false;
    open.retain(|ticket| {
        if !may_ask {
            return !ticket.has_passed();
        }
        match ticket.look() {
            Ok(done) => !done,
            Err(error) => {
                lost |= error.is_device_lost();
                true
            }
        }
    });
    lost || open.is_empty()
}

/// Adds a node that contains another graph.
pub(crate) fn add_child(recorder: &Recorder, after: NodeSet, child: &Recorder) -> Result<usize> {
    let child = child.child_state();
    // SAFETY: the memory that the child's nodes use is held by its graph's `GraphMemory`, which the caller keeps with
    // this graph's. The driver does not allow concurrent access to one graph: nothing else accesses it.
    unsafe { recorder.add(after, &NodeWork::Child(child.graph)) }
}

/// Adds a node that allocates memory at each launch. Returns the memory, for the nodes that come after it.
pub(crate) fn add_alloc<T: Plain>(
    recorder: &Recorder,
    graph_memory: &GraphMemory,
    stream: &Stream,
    len: usize,
) -> Result<(usize, Buffer<T>)> {
    let bytes = bytes_of::<T>(len)?;
    if bytes == 0 {
        return Err(Error::new(ErrorKind::Usage, "zero-length allocation: ask for at least one element"));
    }
    let mut address = Address(0);
    let name = format!("allocation of {bytes} bytes");
    let at = recorder.add_with(recorder.end_of(stream.raw()), Kind::Alloc, name, |backend, graph, before| {
        let (node, made) = backend.graph_add_alloc(graph, before, bytes as u64)?;
        address = made;
        Ok(node)
    })?;
    recorder.continue_after(stream.raw(), at);
    let (location, extent) = (Location::Device(address), Extent { size: bytes as u64, bytes: bytes as u64 });
    let mut memory = Memory::owned(stream.device().clone(), location, extent, 0, Arc::new(NodeOrigin));
    memory.shared = Arc::new(SharedUses::of_node(location, bytes)).into();
    graph_memory.node_allocates(&memory, address);
    let ticket = stream.enqueue_point(|_, _| Ok(()))?;
    memory.note_write(&ticket);
    Ok((at, Buffer::of_memory(memory, len)))
}

/// Memory that a node allocates at each launch is not returned: another node frees it.
struct NodeOrigin;

impl Origin for NodeOrigin {
    fn take_back(self: Arc<Self>, memory: Box<Memory>) {
        drop(memory.unless_shared(&self));
    }
}

/// Adds a node that frees memory that another node allocates, after all nodes that use it.
pub(crate) fn add_free<T: Plain>(
    recorder: &Recorder,
    graph_memory: &GraphMemory,
    stream: &Stream,
    buffer: Buffer<T>,
) -> Result<usize> {
    let address = graph_memory.take_allocated(&buffer.into_memory(), stream)?;
    let address = address.ok_or_else(|| {
        Error::new(ErrorKind::Usage, "no node of this graph allocates this memory: drop the buffer instead")
    })?;
    // SAFETY: a node of this graph allocates it. This node comes after that one and after all that use it, and its
    // owner has given it up.
    unsafe { recorder.add(recorder.end_of(stream.raw()), &NodeWork::Free(address)) }
}

/// Adds such nodes for all memory that no node frees yet.
pub(crate) fn add_frees(
    recorder: &Recorder,
    graph_memory: &GraphMemory,
    stream: impl Fn() -> Result<Stream>,
) -> Result<()> {
    loop {
        let stream = stream()?;
        let Some(address) = graph_memory.take_next_allocated(&stream)? else { return Ok(()) };
        // SAFETY: as above. No more nodes are added to this graph.
        unsafe { recorder.add(recorder.end_of(stream.raw()), &NodeWork::Free(address)) }?;
    }
}

/// Adds a node that runs another graph depending on the first of these elements. Returns the node and the recorder of
/// that graph.
pub(crate) fn add_conditional(
    recorder: &Arc<Recorder>,
    stream: &Stream,
    after: NodeSet,
    when: GraphCondition,
    flag: View<'_>,
) -> Result<(usize, Arc<Recorder>)> {
    if flag.len == 0 {
        return Err(Error::new(ErrorKind::Usage, "an empty flag: the condition is its first element"));
    }
    let address = flag.memory.address()?;
    if flag.memory.device() != stream.device() {
        let text = format!(
            "the flag is on {} and the graph on {}: use a flag on the graph's device",
            flag.memory.device(),
            stream.device()
        );
        return Err(Error::new(ErrorKind::Usage, text));
    }
    // SAFETY: the flag has at least four bytes, in this device's memory. The graph's `GraphMemory` keeps it, as the
    // caller notes its use.
    let (node, within) = unsafe { recorder.add_conditional(after, when, address) }?;
    Ok((node, Recorder::within(recorder, within)))
}

/// The rest of an exec that was dropped while launches of it run.
struct DroppedExecution {
    backend: Arc<dyn Backend>,
    ledger: Arc<Ledger>,
    /// `None` once it is destroyed.
    raw: Option<RawExec>,
    uses: Uses,
    open: Open,
    /// The ledger counts it.
    counts: bool,
}

impl DroppedExecution {
    /// True once it is destroyed.
    fn look(dropped: &Mutex<Self>) -> bool {
        let _later = Deferred::new();
        let mut this = lock(dropped);
        if this.raw.is_some() && !are_over(&mut this.open) {
            return false;
        }
        // Taken first, and dropped without the lock: a destructor in there may panic, or call this function again.
        if let Some(raw) = this.raw.take() {
            // SAFETY: its launches are done, or the device is lost and runs no more of them. It was taken, so nothing
            // can launch it again.
            unsafe { this.backend.exec_destroy(raw) };
        }
        let (uses, ledger) = (std::mem::take(&mut this.uses), this.ledger.clone());
        let counted = std::mem::take(&mut this.counts);
        drop(this);
        discard(uses);
        if counted {
            ledger.exec_has_ended();
        }
        ledger.notify_later();
        true
    }
}

impl DroppedExec for Mutex<DroppedExecution> {
    fn uses(&self, shared: &Arc<SharedUses>) -> bool {
        lock(self).uses.all().any(|graph_memory| graph_memory.keeps(shared))
    }

    fn is_on(&self, backend: &Arc<dyn Backend>) -> bool {
        Arc::ptr_eq(&lock(self).backend, backend)
    }

    fn destroy_if_done(&self) -> bool {
        DroppedExecution::look(self)
    }
}

/// A graph was destroyed, and the driver has the memory back that its nodes allocated, unless an exec still has it:
/// wakes the tasks that wait for memory.
pub(crate) fn graph_ended(device: &Device) {
    Arena::of(device).ledger.notify_later();
}

impl Drop for Execution {
    fn drop(&mut self) {
        let open = self.open_launches();
        let uses = std::mem::take(&mut *lock(&self.uses));
        let (backend, ledger) = (self.device.backend().clone(), Arena::of(&self.device).ledger.clone());
        ledger.exec_ends();
        let dropped = DroppedExecution { backend, ledger, raw: Some(self.raw), uses, open, counts: true };
        let dropped = Arc::new(Mutex::at(Level::EndingExec, dropped));
        if !DroppedExecution::look(&dropped) {
            let weak: Weak<Mutex<DroppedExecution>> = Arc::downgrade(&dropped);
            graphs::add_dropped(weak);
            Streams::of(&self.device).monitor().sweep(Box::new(move || !DroppedExecution::look(&dropped)));
        }
    }
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution").field("device", &self.device.name()).field("raw", &self.raw).finish_non_exhaustive()
    }
}
