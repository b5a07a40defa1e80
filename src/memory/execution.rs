//! A graph as it is launched: in order with everybody who uses its memory, and ended only when its launches are done.
//!
//! ```text
//!   launch on s    the turn ──> s waits for the uses of all that it touches ──> enqueued ──> its ticket is a use of all that
//!   drop           its launches are done: ended at once; otherwise at the lookout's beat that finds them so
//! ```

use std::{
    fmt,
    sync::{Arc, Mutex, OnceLock},
};

use smallvec::SmallVec;

use super::{
    Buffer, Home, Memory, Origin, Owned, Plain,
    buffer::{View, bytes_of},
    hold::{Hold, Turn},
};
use crate::{
    device::{
        Device,
        backend::{Address, Backend, Condition, NodeWork, RawExec, RawNode, Refused},
        draft::{Few, Kind},
        recorder::Recorder,
    },
    error::{Error, ErrorKind, Result},
    stream::{Stream, Streams, Ticket},
    sync::lock,
};

/// See the [module](self).
pub(crate) struct Execution {
    device: Device,
    raw: RawExec,
    /// Of its graph, of that graph's children, and of those that it was updated with. One thread launches or changes it at
    /// a time.
    holds: Mutex<Holds>,
}

type Holds = SmallVec<[Arc<Hold>; 1]>;

impl Execution {
    pub(crate) fn new(device: &Device, recorder: &Recorder, holds: Holds) -> Result<Self> {
        device.check()?;
        let state = recorder.state();
        let raw = Streams::of(device).heed(device.backend().graph_instantiate(state.graph))?;
        drop(state);
        Ok(Self { device: device.clone(), raw, holds: Mutex::new(holds) })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    fn may_be_on(&self, stream: &Stream) -> Result<()> {
        let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
        if stream.device() != &self.device {
            return wrong(format!("a graph of {} on stream `{}` of {}", self.device, stream.name(), stream.device()));
        }
        if stream.capture().is_some() {
            return wrong("a graph is launched into a capture: add it as a child, with `Builder::child`".into());
        }
        Ok(())
    }

    /// Brings it to the device, so that its first launch need not.
    pub(crate) fn upload(&self, stream: &Stream) -> Result<()> {
        self.may_be_on(stream)?;
        let _holds = lock(&self.holds);
        stream.enqueue(|backend, raw| backend.exec_upload(self.raw, raw)).map(drop)
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<Ticket> {
        self.may_be_on(stream)?;
        let _turn = Turn::take();
        let holds = lock(&self.holds);
        holds.iter().try_for_each(|hold| hold.is_not_captured(stream))?;
        holds.iter().try_for_each(|hold| hold.before_launch(stream))?;
        // SAFETY: all memory that its nodes use is held by `holds`, which live until the launch is done: dropped, this gives
        // them to the lookout for as long.
        let ticket = stream.enqueue(|backend, raw| unsafe { backend.exec_launch(self.raw, raw) })?;
        holds.iter().for_each(|hold| hold.note_launch(&ticket));
        Ok(ticket)
    }

    /// What its launches from now on do is what this graph's nodes do.
    pub(crate) fn update(
        &self,
        recorder: &Recorder,
        with: impl IntoIterator<Item = Arc<Hold>>,
    ) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let mut holds = lock(&self.holds);
        let graph = recorder.state().graph;
        // SAFETY: the memory that the graph's nodes use is held by its holds, which are kept from here on.
        let updated = unsafe { self.device.backend().exec_update(self.raw, graph) };
        let updated = Streams::of(&self.device).heed(updated)?;
        if updated.is_ok() {
            // What it did before may still run: that memory is kept, too.
            keep(&mut holds, with);
        }
        Ok(updated)
    }

    /// `work`, captured, is what `node` does from now on. What that uses is `hold`'s.
    pub(crate) fn set(
        &self,
        recorder: &Recorder,
        node: usize,
        hold: Arc<Hold>,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Result<(), Refused>>> {
        let mut holds = lock(&self.holds);
        let Some((raw, kind)) = raw_of(recorder, node) else { return Ok(None) };
        // What it did before may still run: that memory is kept, too.
        keep(&mut holds, [hold]);
        recorder.instead(self.raw, raw, kind, work)
    }

    /// Whether launches from now on run a node.
    pub(crate) fn enable(
        &self,
        recorder: &Recorder,
        node: usize,
        enabled: bool,
    ) -> Result<Option<Result<(), Refused>>> {
        self.device.check()?;
        let _holds = lock(&self.holds);
        let Some((raw, _)) = raw_of(recorder, node) else { return Ok(None) };
        let done = self.device.backend().exec_enable(self.raw, raw, enabled);
        Streams::of(&self.device).heed(done).map(Some)
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> SmallVec<[Ticket; 3]> {
        lock(&self.holds).iter().flat_map(|hold| hold.open_launches()).collect()
    }
}

fn keep(holds: &mut Holds, more: impl IntoIterator<Item = Arc<Hold>>) {
    for hold in more {
        if !holds.iter().any(|known| Arc::ptr_eq(known, &hold)) {
            holds.push(hold);
        }
    }
}

/// A node that the driver knows as one.
fn raw_of(recorder: &Recorder, node: usize) -> Option<(RawNode, Kind)> {
    let state = recorder.state();
    let node = state.draft.get(node)?;
    match (node.kind, &*node.raw) {
        (Kind::External, _) => None,
        (kind, [raw]) => Some((*raw, kind)),
        _ => None,
    }
}

/// Adds a node that is all of another graph.
pub(crate) fn add_child(recorder: &Recorder, after: Few, child: &Recorder) -> Result<usize> {
    let child = child.state().graph;
    // SAFETY: what the child's nodes use is held by the holds of its graph, which the caller keeps with this one's.
    unsafe { recorder.add(after, &NodeWork::Child(child)) }
}

/// Adds a node that makes memory at each launch, and the memory, for the nodes that come after it.
pub(crate) fn add_alloc<T: Plain>(
    recorder: &Recorder,
    hold: &Hold,
    stream: &Stream,
    len: usize,
) -> Result<(usize, Buffer<T>)> {
    let bytes = bytes_of::<T>(len)?;
    if bytes == 0 {
        return Err(Error::new(ErrorKind::Usage, "memory of 0 bytes: ask for at least one element"));
    }
    let mut address = Address(0);
    let name = format!("allocation of {bytes} bytes");
    let at = recorder.added(recorder.end_of(stream.raw()), Kind::Alloc, name, |backend, graph, before| {
        let (node, made) = backend.graph_add_alloc(graph, before, bytes as u64)?;
        address = made;
        Ok(node)
    })?;
    recorder.go_on_after(stream.raw(), at);
    let memory = Memory {
        device: stream.device().clone(),
        home: Home::Device(address),
        bytes,
        size: bytes as u64,
        lane: 0,
        uses: Mutex::default(),
        tie: OnceLock::new(),
        account: None,
        origin: Origin::Node,
    };
    let mut memory = Owned::new(Box::new(memory));
    hold.made(&memory, address);
    let ticket = stream.enqueue(|_, _| Ok(()))?;
    memory.note_write(ticket);
    Ok((at, Buffer::of_memory(memory, len)))
}

/// Adds a node that gives back what another makes, after all that uses it.
pub(crate) fn add_free<T: Plain>(
    recorder: &Recorder,
    hold: &Hold,
    stream: &Stream,
    buffer: Buffer<T>,
) -> Result<usize> {
    let address = hold.unmake(&buffer.into_memory(), stream)?;
    let address = address
        .ok_or_else(|| Error::new(ErrorKind::Usage, "memory that no node of this graph makes: drop it, simply"))?;
    // SAFETY: a node of this graph makes it; this one comes after that and after all that uses it, and whoever had it has
    // given it away.
    unsafe { recorder.add(recorder.end_of(stream.raw()), &NodeWork::Free(address)) }
}

/// Adds such nodes for all that no node gives back yet.
pub(crate) fn add_frees(recorder: &Recorder, hold: &Hold, stream: impl Fn() -> Result<Stream>) -> Result<()> {
    loop {
        let stream = stream()?;
        let Some(address) = hold.unmake_next(&stream)? else { return Ok(()) };
        // SAFETY: as above; nobody adds any more to this graph.
        unsafe { recorder.add(recorder.end_of(stream.raw()), &NodeWork::Free(address)) }?;
    }
}

/// Adds a node with a graph within it, that runs as the first of these elements says; and the recorder of that graph.
pub(crate) fn add_conditional(
    recorder: &Arc<Recorder>,
    stream: &Stream,
    after: Few,
    when: Condition,
    flag: View<'_>,
) -> Result<(usize, Arc<Recorder>)> {
    if flag.len == 0 {
        return Err(Error::new(ErrorKind::Usage, "a flag without elements: it is the first"));
    }
    let address = flag.memory.address()?;
    if flag.memory.device() != stream.device() {
        let text = format!("a flag on {} for a graph of {}", flag.memory.device(), stream.device());
        return Err(Error::new(ErrorKind::Usage, text));
    }
    // SAFETY: the flag has four bytes at least, in this device's memory; the graph's hold keeps it, as the caller notes its
    // use.
    let (node, within) = unsafe { recorder.add_conditional(after, when, address) }?;
    Ok((node, Recorder::within(recorder, within)))
}

/// What is left of one that was dropped while launches of it run.
struct Ending {
    backend: Arc<dyn Backend>,
    raw: RawExec,
    holds: Holds,
    open: SmallVec<[Ticket; 3]>,
}

impl Ending {
    /// True once it is over.
    fn look(&mut self) -> bool {
        let mut lost = false;
        self.open.retain(|ticket| match ticket.look() {
            Ok(done) => !done,
            Err(error) => {
                lost |= error.is_device_lost();
                true
            }
        });
        if !lost && !self.open.is_empty() {
            return false;
        }
        // SAFETY: its launches are done, or the device is lost and runs no more of them; nobody has it to launch it again.
        unsafe { self.backend.exec_destroy(self.raw) };
        self.holds.clear();
        true
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        let open = self.open_launches();
        let holds = std::mem::take(self.holds.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        let mut ending = Ending { backend: self.device.backend().clone(), raw: self.raw, holds, open };
        if !ending.look() {
            Streams::of(&self.device).lookout().sweep(Box::new(move || !ending.look()));
        }
    }
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution").field("device", &self.device.name()).field("raw", &self.raw).finish_non_exhaustive()
    }
}
