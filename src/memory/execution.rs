//! An instantiated graph. Its launches are ordered with all other uses of its memory, and it is destroyed once its
//! launches are done.
//!
//! ```text
//!   launch on s    acquire the use lock ──> s waits for the uses of all memory ──> enqueue ──> note the ticket
//!   update, set    the device accepts ──> launches from now on use the new resources;
//!                  the replaced ones are dropped once the launches until now are done
//!   drop           launches are done: destroyed at once; otherwise at the monitor's tick that finds them done
//! ```
//!
//! All devices share the use lock, and the time of a change grows with the graph. So a change does not take the use
//! lock.
//!
//! Locks are acquired in this order: the use lock, the exec's resources, a recorder's state. Values that may have
//! user-defined destructors (memory, callbacks) are dropped with none of them held.

mod open;

use std::{
    cell::Cell,
    collections::{BTreeMap, HashSet},
    fmt, iter,
    sync::{Arc, Weak},
};

pub(crate) use open::{LaunchMemory, Opening};
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
    memory::Origin,
    shared_uses::SharedUses,
    use_lock::UseLockGuard,
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
    /// Locked by a launch and by a change. Shared with the completion monitor, which drops replaced resources.
    resources: Arc<Mutex<ExecResources>>,
}

/// The resources of an exec's launches.
#[derive(Default)]
struct ExecResources {
    /// The resources of the graph that the exec was instantiated from, and of its child graphs.
    graph: NodeResources,
    /// The resources of the graph of the last update.
    update: Option<NodeResources>,
    /// The resources of the nodes that were set since the last update.
    nodes: BTreeMap<usize, NodeResources>,
    /// Replaced resources, each with the launches that use it: those that were in flight at the change.
    replaced: Vec<(NodeResources, OpenLaunches)>,
    /// The completion monitor sweeps this.
    is_swept: bool,
    /// The memory that future launches use, without duplicates.
    graph_memories: SmallVec<[Arc<GraphMemory>; 2]>,
    /// How often the resources have changed.
    changes: u64,
    ends: Vec<OpenEnd>,
}

/// The resources of some nodes of an exec.
#[derive(Default)]
pub(crate) struct NodeResources {
    pub(crate) graph_memories: SmallVec<[Arc<GraphMemory>; 1]>,
    /// Resources other than memory: events, a graph.
    #[allow(dead_code, reason = "held")]
    pub(crate) kept: KeptAlive,
    /// The nodes' work, kept so that the device is not the last owner of a callback.
    pub(crate) work_item: Option<WorkItem>,
}

/// Launches that are not known to be done.
type OpenLaunches = SmallVec<[Ticket; 3]>;

impl NodeResources {
    fn open(&self) -> OpenLaunches {
        self.graph_memories.iter().flat_map(|graph_memory| graph_memory.open_launches()).collect()
    }
}

impl ExecResources {
    fn new(graph: NodeResources, ends: Vec<OpenEnd>) -> Self {
        let mut resources = Self { graph, ends, ..Self::default() };
        resources.replace(None);
        resources
    }

    /// Collects the memory that future launches use, and keeps the replaced resources for earlier launches.
    fn replace(&mut self, gone: impl IntoIterator<Item = NodeResources>) {
        let all = iter::once(&self.graph).chain(&self.update).chain(self.nodes.values());
        self.changes += 1;
        let mut known = HashSet::new();
        let graph_memories =
            all.flat_map(|of| &of.graph_memories).filter(|graph_memory| known.insert(Arc::as_ptr(graph_memory)));
        self.graph_memories = graph_memories.cloned().collect();
        self.replaced.extend(gone.into_iter().map(|gone| {
            let open = gone.open();
            (gone, open)
        }));
    }

    /// Drops the replaced resources that no launch uses any more. True if some are left; if not, the completion monitor
    /// stops sweeping the exec.
    fn release_unused(this: &Mutex<Self>) -> bool {
        let _later = Deferred::new();
        let mut resources = lock(this);
        let gone = resources.take_unused(are_done);
        let is_left = !resources.replaced.is_empty();
        resources.is_swept &= is_left;
        drop(resources);
        discard_all(gone);
        is_left
    }

    /// The memory of future launches and of earlier launches in flight.
    fn all(&self) -> impl Iterator<Item = &Arc<GraphMemory>> {
        let before = self.replaced.iter().map(|(of, _)| of);
        let now = [&self.graph].into_iter().chain(&self.update).chain(self.nodes.values());
        now.chain(before).flat_map(|of| &of.graph_memories)
    }

    /// Takes the replaced resources that no launch uses any more, to be dropped without a lock.
    #[inline]
    fn take_unused(&mut self, mut is_over: impl FnMut(&mut OpenLaunches) -> bool) -> Vec<NodeResources> {
        if self.replaced.is_empty() {
            return Vec::new();
        }
        self.replaced.extract_if(.., |(_, open)| is_over(open)).map(|(gone, _)| gone).collect()
    }
}

impl Execution {
    pub(crate) fn new(device: &Device, recorder: &Recorder, graph: NodeResources, open: &[Opening]) -> Result<Self> {
        device.check()?;
        let ends = open.iter().map(|opening| OpenEnd::new(recorder, opening)).collect::<Result<_>>()?;
        // If a graph can have only one exec, this makes room for the new one without waiting for the completion
        // monitor.
        graphs::destroy_done(|exec| exec.is_on(device.backend()));
        let made = {
            let state = recorder.state();
            device.backend().graph_instantiate(state.graph)
        };
        let raw = Streams::of(device).observe(made)?;
        Ok(Self {
            device: device.clone(),
            raw,
            resources: Arc::new(Mutex::at(Level::ExecUses, ExecResources::new(graph, ends))),
        })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
        if stream.device() != &self.device {
            return wrong(format!(
                "a graph on {} cannot be launched on stream `{}` of {}: use a stream on the graph's device",
                self.device,
                stream.name(),
                stream.device()
            ));
        }
        if stream.capture().is_some() {
            return wrong(
                "a graph cannot be launched on a captured stream: add it to a graph as a child with `Builder::child`"
                    .into(),
            );
        }
        Ok(())
    }

    /// Uploads the exec to the device, so that its first launch need not.
    pub(crate) fn upload(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        let (room, _resources) = stream.make_room(|| {
            let later = Deferred::new();
            (lock(&self.resources), later)
        })?;
        stream.enqueue(room, |backend, raw| backend.exec_upload(self.raw, raw)).map(drop)
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<Ticket> {
        self.launch_with(stream, &mut [])
    }

    /// Launches the exec with the memory at its open ends.
    pub(crate) fn launch_with(&self, stream: &Stream, given: &mut [LaunchMemory<'_>]) -> Result<Ticket> {
        self.check_stream(stream)?;
        given.iter().filter(|given| given.written).try_for_each(|given| given.memory.check_writable())?;
        // Declared before the locks, so that it is dropped after them.
        let _gone;
        let (room, _use_lock, mut resources) = loop {
            let looked_at = Cell::new(None);
            let (room, use_lock) = stream.make_room(|| {
                UseLockGuard::acquire_when(|| {
                    let resources = lock(&self.resources);
                    looked_at.set(Some(resources.changes));
                    resources.graph_memories.iter().any(|graph_memory| graph_memory.is_lent())
                        || given.iter().any(|given| given.memory.is_lent())
                })
            })?;
            let resources = lock(&self.resources);
            // A change does not take the use lock. Since the check, it may have added memory that is lent.
            if looked_at.get().is_none_or(|changes| changes == resources.changes) {
                break (room, use_lock, resources);
            }
        };
        _gone = resources.take_unused(|open| open.iter().all(Ticket::has_passed));
        resources.ends.iter().try_for_each(|end| end.check_given(given))?;
        for LaunchMemory { memory, written, .. } in given.iter_mut() {
            if *written { memory.before_write(stream) } else { memory.before_read(stream) }?;
        }
        resources.graph_memories.iter().try_for_each(|graph_memory| graph_memory.check_not_captured(stream))?;
        resources.graph_memories.iter().try_for_each(|graph_memory| graph_memory.before_launch(stream))?;
        // SAFETY: all memory that its nodes use is held by `resources`, which live until the launch is done: on drop
        // they are given to the completion monitor until then, and replaced resources are kept until then, too. The
        // memory at the open ends is in `given`, as was just checked, and memory with an open ticket is not freed: the
        // ticket is noted below, before any other code can drop the memory.
        let ticket = stream
            .enqueue_launch(room, Launched::Graph, |backend, raw| unsafe { backend.exec_launch(self.raw, raw) })?;
        resources.graph_memories.iter().for_each(|graph_memory| graph_memory.note_launch(&ticket));
        for LaunchMemory { memory, written, .. } in given {
            if *written { memory.note_write(&ticket) } else { memory.note_read(&ticket) }
        }
        Ok(ticket)
    }

    /// From now on, launches copy `bytes` bytes to or from this memory at an open end, and must be given the memory.
    /// False if the node cannot make this copy: launches then copy nothing at this end.
    pub(crate) fn set_open_end(&self, end: usize, memory: &Memory, bytes: usize) -> Result<bool> {
        self.device.check()?;
        let set = {
            let mut resources = lock(&self.resources);
            match resources.ends.get_mut(end) {
                Some(end) => end.set(&self.device, self.raw, memory, bytes),
                None => Err(Error::new(ErrorKind::Usage, format!("the exec has no open end {end}"))),
            }
        };
        if set.is_err() { Streams::of(&self.device).observe(set) } else { set }
    }

    /// From now on, launches run the work of this graph's nodes, which use the resources in `with`.
    pub(crate) fn update(&self, recorder: &Recorder, with: NodeResources) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let updated = {
            let _later = Deferred::new();
            let mut resources = lock(&self.resources);
            let state = recorder.state();
            // SAFETY: the memory that the graph's nodes use is held by `with`, which is kept from here on.
            let updated = unsafe { self.device.backend().exec_update(self.raw, state.graph) };
            drop(state);
            if let Ok(Ok(())) = updated {
                let before = resources.update.replace(with);
                let nodes = std::mem::take(&mut resources.nodes);
                resources.replace(before.into_iter().chain(nodes.into_values()));
            }
            updated
        };
        self.release_unused();
        Streams::of(&self.device).observe(updated)
    }

    /// From now on, launches run the work item in `with` at this node. Takes `with` if the device accepts the change,
    /// and leaves it unchanged otherwise.
    pub(crate) fn set(
        &self,
        recorder: &Recorder,
        node: usize,
        with: &mut NodeResources,
    ) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let Some(new) = &with.work_item else { return Ok(Ok(())) };
        let set = {
            let _later = Deferred::new();
            let mut resources = lock(&self.resources);
            let state = recorder.state();
            let (raw, kind) = match raw_of(&state, node) {
                Ok(known) => known,
                Err(refused) => return Ok(Err(refused)),
            };
            if !new.is(kind) {
                return Ok(Err(Refused { node: Some(raw), why: format!("a {} cannot replace its work", new.name()) }));
            }
            // SAFETY: `with` holds the resources of the work, and is kept from here on.
            let set = new.with(|work| unsafe { self.device.backend().exec_set(self.raw, raw, work) });
            drop(state);
            if let Ok(Ok(())) = set {
                let with = std::mem::take(with);
                let before = resources.nodes.insert(node, with);
                resources.replace(before);
            }
            set
        };
        self.release_unused();
        Streams::of(&self.device).observe(set)
    }

    pub(crate) fn enable(&self, recorder: &Recorder, node: usize, enabled: bool) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let done = {
            let _resources = lock(&self.resources);
            let state = recorder.state();
            match raw_of(&state, node) {
                Ok((raw, _)) => self.device.backend().exec_enable(self.raw, raw, enabled),
                Err(refused) => return Ok(Err(refused)),
            }
        };
        Streams::of(&self.device).observe(done)
    }

    /// Drops the replaced resources whose launches are done. A later launch, a later change or the completion monitor
    /// drops the rest.
    fn release_unused(&self) {
        if !ExecResources::release_unused(&self.resources) {
            return;
        }
        let (resources, ledger) = (Arc::downgrade(&self.resources), Arc::downgrade(&Arena::of(&self.device).ledger));
        let begins = !std::mem::replace(&mut lock(&self.resources).is_swept, true);
        if begins {
            let sweep = move || {
                let (Some(resources), Some(ledger)) = (resources.upgrade(), ledger.upgrade()) else { return false };
                let goes_on = ExecResources::release_unused(&resources);
                ledger.notify_later();
                goes_on
            };
            Streams::of(&self.device).monitor().sweep(Box::new(sweep));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> OpenLaunches {
        // Declared before the lock: a forgotten ticket may be the last handle of its stream.
        let _later = Deferred::new();
        lock(&self.resources).graph_memories.iter().flat_map(|graph_memory| graph_memory.open_launches()).collect()
    }
}

/// True if these launches are done, or will never be done because the device is lost. Does not query the device within
/// a capture.
fn are_done(open: &mut OpenLaunches) -> bool {
    let may_ask = Capture::may_query_device();
    let mut lost = false;
    open.retain(|ticket| {
        if !may_ask {
            return !ticket.has_passed();
        }
        match ticket.query() {
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

/// The origin of memory that a node allocates at each launch. The memory is not returned: another node frees it.
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
    // SAFETY: a node of this graph allocates the memory. This node comes after that node and after all nodes that use
    // the memory, and the owner has given the memory up.
    unsafe { recorder.add(recorder.end_of(stream.raw()), &NodeWork::Free(address)) }
}

/// Adds nodes that free all memory that no node frees yet.
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

/// Adds a node that runs a body graph depending on the first element of `flag`. Returns the node and the recorder of
/// the body.
pub(crate) fn add_conditional(
    recorder: &Arc<Recorder>,
    stream: &Stream,
    after: NodeSet,
    when: GraphCondition,
    flag: View<'_>,
) -> Result<(usize, Arc<Recorder>)> {
    if flag.len == 0 {
        return Err(Error::new(
            ErrorKind::Usage,
            "the flag is empty, but its first element is the condition: use a flag with at least one element",
        ));
    }
    let address = flag.address()?;
    if flag.memory.device() != stream.device() {
        let text = format!(
            "the flag is on {} and the graph on {}: use a flag on the graph's device",
            flag.memory.device(),
            stream.device()
        );
        return Err(Error::new(ErrorKind::Usage, text));
    }
    // SAFETY: the flag has at least four bytes, in this device's memory. The graph's `GraphMemory` keeps the flag, as
    // the caller notes its use.
    let (node, within) = unsafe { recorder.add_conditional(after, when, address) }?;
    Ok((node, Recorder::within(recorder, within)))
}

/// An exec that was dropped while its launches were running.
struct DroppedExecution {
    backend: Arc<dyn Backend>,
    ledger: Arc<Ledger>,
    /// `None` once it is destroyed.
    raw: Option<RawExec>,
    resources: ExecResources,
    open: OpenLaunches,
    /// True while the ledger counts it.
    counts: bool,
}

impl DroppedExecution {
    /// Destroys the exec if its launches are done. True once it is destroyed.
    fn destroy_if_done(dropped: &Mutex<Self>) -> bool {
        let _later = Deferred::new();
        let mut this = lock(dropped);
        if this.raw.is_some() && !are_done(&mut this.open) {
            return false;
        }
        // Taken first, and dropped without the lock: a destructor in there may panic, or call this function again.
        if let Some(raw) = this.raw.take() {
            // SAFETY: its launches are done, or the device is lost and runs no more of them. The exec was taken, so
            // nothing can launch it again.
            unsafe { this.backend.exec_destroy(raw) };
        }
        let (resources, ledger) = (std::mem::take(&mut this.resources), this.ledger.clone());
        let counted = std::mem::take(&mut this.counts);
        drop(this);
        discard(resources);
        if counted {
            ledger.exec_destroyed();
        }
        ledger.notify_later();
        true
    }
}

impl DroppedExec for Mutex<DroppedExecution> {
    fn uses(&self, shared: &Arc<SharedUses>) -> bool {
        lock(self).resources.all().any(|graph_memory| graph_memory.keeps(shared))
    }

    fn is_on(&self, backend: &Arc<dyn Backend>) -> bool {
        Arc::ptr_eq(&lock(self).backend, backend)
    }

    fn destroy_if_done(&self) -> bool {
        DroppedExecution::destroy_if_done(self)
    }
}

/// Called when a graph was destroyed. The driver has the memory back that its nodes allocated, unless an exec still
/// holds it: wakes the tasks that wait for memory.
pub(crate) fn graph_ended(device: &Device) {
    Arena::of(device).ledger.notify_later();
}

impl Drop for Execution {
    fn drop(&mut self) {
        let open = self.open_launches();
        let resources = std::mem::take(&mut *lock(&self.resources));
        let (backend, ledger) = (self.device.backend().clone(), Arena::of(&self.device).ledger.clone());
        ledger.exec_dropped();
        let dropped = DroppedExecution { backend, ledger, raw: Some(self.raw), resources, open, counts: true };
        let dropped = Arc::new(Mutex::at(Level::EndingExec, dropped));
        if !DroppedExecution::destroy_if_done(&dropped) {
            let weak: Weak<Mutex<DroppedExecution>> = Arc::downgrade(&dropped);
            graphs::add_dropped(weak);
            Streams::of(&self.device).monitor().sweep(Box::new(move || !DroppedExecution::destroy_if_done(&dropped)));
        }
    }
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution").field("device", &self.device.name()).field("raw", &self.raw).finish_non_exhaustive()
    }
}
