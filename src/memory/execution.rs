//! A graph as it is launched: in order with everybody who uses its memory, and ended only when its launches are done.
//!
//! ```text
//!   launch on s    the turn ──> s waits for the uses of all that it touches ──> enqueued ──> its ticket is a use of all that
//!   update, set    the device agrees ──> what it uses instead is used by launches from now on;
//!                  what it used before goes when the launches until now are done
//!   drop           its launches are done: ended at once; otherwise at the lookout's beat that finds them so
//! ```
//!
//! The turn is one for all devices, and a change takes a time that grows with the graph: so it takes none.
//!
//! Locks are taken in this order: the turn, what it uses, a recorder's state. What somebody may have given a destructor of
//! his own, memory, callbacks, is dropped with none of them held.

mod open;

use std::{
    cell::Cell,
    collections::HashSet,
    fmt, iter,
    sync::{Arc, OnceLock, Weak},
};

use open::End;
pub(crate) use open::{Given, Opening};
use smallvec::SmallVec;

use super::{
    Buffer, Home, Memory, Origin, Owned, Plain, Staging,
    buffer::{View, bytes_of},
    hold::{Hold, Tie, Turn},
    ledger::{Arena, Ledger},
};
use crate::{
    device::{
        Device,
        backend::{Address, Backend, Condition, NodeWork, RawExec, RawNode, Refused},
        draft::{Few, Kind},
        piece::Piece,
        recorder::{self, Recorder},
    },
    error::{Error, ErrorKind, Result},
    stream::{
        Launched, Stream, Streams, Ticket,
        capture::{Capture, Kept},
    },
    sync::{Deferred, Level, Mutex, discard, discard_all, lock},
};

/// See the [module](self).
pub(crate) struct Execution {
    device: Device,
    raw: RawExec,
    /// One thread launches or changes it at a time. Shared with the lookout, which lets go what a change has replaced.
    uses: Arc<Mutex<Uses>>,
}

/// What launches use.
#[derive(Default)]
struct Uses {
    /// That of the graph that it was made of, and of those within.
    graph: Use,
    /// That of the graph that it was updated with last.
    update: Option<Use>,
    /// That of the nodes that were set since.
    nodes: Vec<(usize, Use)>,
    /// What only launches before a change use: those that were open then.
    before: Vec<(Use, Open)>,
    /// The lookout looks after these.
    is_swept: bool,
    /// All that launches from now on use: each once.
    holds: SmallVec<[Arc<Hold>; 2]>,
    /// How often these have changed.
    changes: u64,
    ends: Vec<End>,
}

/// What some of its nodes use.
#[derive(Default)]
pub(crate) struct Use {
    pub(crate) holds: SmallVec<[Arc<Hold>; 1]>,
    /// Beside memory: events, a graph.
    #[allow(dead_code, reason = "held")]
    pub(crate) kept: Kept,
    /// What they do: so the device is not the last to have its callback.
    pub(crate) piece: Option<Piece>,
}

/// Launches that are not known to be done.
type Open = SmallVec<[Ticket; 3]>;

impl Use {
    fn open(&self) -> Open {
        self.holds.iter().flat_map(|hold| hold.open_launches()).collect()
    }
}

impl Uses {
    fn new(graph: Use, ends: Vec<End>) -> Self {
        let mut uses = Self { graph, ends, ..Self::default() };
        uses.changed(None);
        uses
    }

    /// Launches from now on use what is here, and this no more.
    fn changed(&mut self, gone: impl IntoIterator<Item = Use>) {
        let all = iter::once(&self.graph).chain(&self.update).chain(self.nodes.iter().map(|(_, of)| of));
        self.changes += 1;
        let mut known = HashSet::new();
        let holds = all.flat_map(|of| &of.holds).filter(|hold| known.insert(Arc::as_ptr(hold)));
        self.holds = holds.cloned().collect();
        self.before.extend(gone.into_iter().map(|gone| {
            let open = gone.open();
            (gone, open)
        }));
    }

    /// Drops what no launch uses any more. True if some is left; if not, the lookout no longer looks after it.
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

    /// Of launches from now on, and of those before.
    fn all(&self) -> impl Iterator<Item = &Arc<Hold>> {
        let before = self.before.iter().map(|(of, _)| of);
        let now = [&self.graph].into_iter().chain(&self.update).chain(self.nodes.iter().map(|(_, of)| of));
        now.chain(before).flat_map(|of| &of.holds)
    }

    /// What no launch uses any more, to be dropped without a lock.
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
        let ends = open.iter().map(|opening| End::new(recorder, opening)).collect::<Result<_>>()?;
        Ending::look_at_all(|ending| Arc::ptr_eq(&ending.backend, device.backend()));
        let made = {
            let state = recorder.state();
            device.backend().graph_instantiate(state.graph)
        };
        let raw = Streams::of(device).heed(made)?;
        Ok(Self { device: device.clone(), raw, uses: Arc::new(Mutex::at(Level::ExecUses, Uses::new(graph, ends))) })
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
            return wrong(
                "a graph is launched into a capture: a graph that is built has it as a child, `Builder::child`".into(),
            );
        }
        Ok(())
    }

    /// Brings it to the device, so that its first launch need not.
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

    /// With what lies at its open ends.
    pub(crate) fn launch_with(&self, stream: &Stream, given: &mut [Given<'_>]) -> Result<Ticket> {
        self.may_be_on(stream)?;
        given.iter().filter(|given| given.written).try_for_each(|given| given.memory.writable())?;
        // Before the locks, so that it is dropped after them.
        let _gone;
        let (room, _turn, mut uses) = loop {
            let looked_at = Cell::new(None);
            let (room, turn) = stream.make_room(|| {
                Turn::take_when(|| {
                    let uses = lock(&self.uses);
                    looked_at.set(Some(uses.changes));
                    uses.holds.iter().any(|hold| hold.is_lent()) || given.iter().any(|given| given.memory.is_lent())
                })
            })?;
            let uses = lock(&self.uses);
            // A change takes no turn: since it was looked, there may be memory here that is lent.
            if looked_at.get().is_none_or(|changes| changes == uses.changes) {
                break (room, turn, uses);
            }
        };
        _gone = uses.take_over(|open| open.iter().all(Ticket::has_passed));
        uses.ends.iter().try_for_each(|end| end.is_covered(given))?;
        for Given { memory, written, .. } in given.iter_mut() {
            if *written { memory.before_write(stream) } else { memory.before_read(stream) }?;
        }
        uses.holds.iter().try_for_each(|hold| hold.is_not_captured(stream))?;
        uses.holds.iter().try_for_each(|hold| hold.before_launch(stream))?;
        // SAFETY: all memory that its nodes use is held by `uses`, which live until the launch is done: dropped, this gives
        // them to the lookout for as long, and what a change replaces stays as long, too. What lies at its open ends is given,
        // as was just seen to, and memory with an open ticket is parked, not freed: the ticket is noted below, before anybody
        // else can drop it.
        let ticket = stream
            .enqueue_launch(room, Launched::Graph, |backend, raw| unsafe { backend.exec_launch(self.raw, raw) })?;
        uses.holds.iter().for_each(|hold| hold.note_launch(&ticket));
        for Given { memory, written, .. } in given {
            if *written { memory.note_write(&ticket) } else { memory.note_read(&ticket) }
        }
        Ok(ticket)
    }

    /// What its launches from now on do is what this graph's nodes do, which use `with`.
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
        Streams::of(&self.device).heed(updated)
    }

    /// What a node does from now on is the piece of work in `with`, which is taken if the device agrees, and left otherwise.
    pub(crate) fn set(&self, recorder: &Recorder, node: usize, with: &mut Use) -> Result<Result<(), Refused>> {
        self.device.check()?;
        let Some(new) = &with.piece else { return Ok(Ok(())) };
        let set = {
            let _later = Deferred::new();
            let mut uses = lock(&self.uses);
            let state = recorder.state();
            let (raw, kind) = match raw_of(&state, node) {
                Ok(known) => known,
                Err(refused) => return Ok(Err(refused)),
            };
            if !new.is(kind) {
                return Ok(Err(Refused { node: Some(raw), why: format!("a {} cannot take its place", new.name()) }));
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
        Streams::of(&self.device).heed(set)
    }

    /// Whether launches from now on run a node.
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
        Streams::of(&self.device).heed(done)
    }

    /// Lets go what was used before a change by launches that are done now. What others still use goes at the lookout's beat that
    /// finds them done, if no launch or change comes before.
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
                ledger.tell_later();
                goes_on
            };
            Streams::of(&self.device).lookout().sweep(Box::new(sweep));
        }
    }

    /// Launches that are not known to be done.
    pub(crate) fn open_launches(&self) -> Open {
        // Before the lock: tickets that are forgotten under it may be the last to hold a stream.
        let _later = Deferred::new();
        lock(&self.uses).holds.iter().flat_map(|hold| hold.open_launches()).collect()
    }
}

/// Asks the device whether these launches are done, or never will be: then there are none of them left. Within a capture it
/// is not asked.
fn are_over(open: &mut Open) -> bool {
    let may_ask = Capture::may_ask_device();
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

/// A node that the driver knows as one.
fn raw_of(state: &recorder::State, node: usize) -> Result<(RawNode, Kind), Refused> {
    match state.draft.get(node).map(|node| (node.kind, &*node.raw)) {
        Some((kind, [raw])) if kind != Kind::External => Ok((*raw, kind)),
        _ => Err(Refused { node: None, why: "it is another library's, and perhaps several of the driver's".into() }),
    }
}

/// Adds a node that is all of another graph.
pub(crate) fn add_child(recorder: &Recorder, after: Few, child: &Recorder) -> Result<usize> {
    let child = child.child_state();
    // SAFETY: what the child's nodes use is held by the holds of its graph, which the caller keeps with this one's.
    // The driver does not let two look at one graph at once: nobody else does.
    unsafe { recorder.add(after, &NodeWork::Child(child.graph)) }
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
        uses: super::access::Uses::default().locked(),
        tie: OnceLock::new(),
        staging: Staging::default(),
        account: None,
        origin: Origin::Node,
    };
    let mut memory = Owned::new(Box::new(memory));
    hold.made(&memory, address);
    let ticket = stream.enqueue_point(|_, _| Ok(()))?;
    memory.note_write(&ticket);
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
    ledger: Arc<Ledger>,
    /// None once it is over.
    raw: Option<RawExec>,
    uses: Uses,
    open: Open,
    /// The ledger counts it.
    counts: bool,
}

/// Of all devices: whoever makes an exec of a graph that has one at a time need not wait for the lookout.
static ENDINGS: Mutex<Vec<Weak<Mutex<Ending>>>> = Mutex::new(Vec::new());

impl Ending {
    /// True once it is over.
    fn look(ending: &Mutex<Self>) -> bool {
        let _later = Deferred::new();
        let mut this = lock(ending);
        if this.raw.is_some() && !are_over(&mut this.open) {
            return false;
        }
        // Taken first, and dropped without the lock: a destructor in there may panic, or come here again.
        if let Some(raw) = this.raw.take() {
            // SAFETY: its launches are done, or the device is lost and runs no more of them; nobody has it to launch it
            // again, and it was taken.
            unsafe { this.backend.exec_destroy(raw) };
        }
        let (uses, ledger) = (std::mem::take(&mut this.uses), this.ledger.clone());
        let counted = std::mem::take(&mut this.counts);
        drop(this);
        discard(uses);
        if counted {
            ledger.exec_has_ended();
        }
        ledger.tell_later();
        true
    }

    fn look_at_all(is_one: impl Fn(&Self) -> bool) {
        let all: Vec<_> = {
            let mut endings = lock(&ENDINGS);
            endings.retain(|ending| ending.strong_count() > 0);
            endings.iter().filter_map(Weak::upgrade).collect()
        };
        for ending in all {
            let is_one = is_one(&lock(&ending));
            if is_one {
                Self::look(&ending);
            }
        }
    }
}

/// A graph was destroyed, and the driver has the memory back that its nodes made, unless an exec still has it: the tasks that
/// wait for memory look again.
pub(crate) fn graph_ended(device: &Device) {
    Arena::of(device).ledger.tell_later();
}

/// Ends what was dropped while its launches ran, as far as they are done by now: of what uses this memory, on all devices, since
/// memory that is page-locked for one may be used by the graphs of another.
pub(super) fn end_what_is_over(tie: &Arc<Tie>) {
    Ending::look_at_all(|ending| ending.uses.all().any(|hold| hold.keeps(tie)));
}

impl Drop for Execution {
    fn drop(&mut self) {
        let open = self.open_launches();
        let uses = std::mem::take(&mut *lock(&self.uses));
        let (backend, ledger) = (self.device.backend().clone(), Arena::of(&self.device).ledger.clone());
        ledger.exec_ends();
        let ending = Ending { backend, ledger, raw: Some(self.raw), uses, open, counts: true };
        let ending = Arc::new(Mutex::at(Level::EndingExec, ending));
        if !Ending::look(&ending) {
            let mut endings = lock(&ENDINGS);
            endings.retain(|ending| ending.strong_count() > 0);
            endings.push(Arc::downgrade(&ending));
            drop(endings);
            Streams::of(&self.device).lookout().sweep(Box::new(move || !Ending::look(&ending)));
        }
    }
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution").field("device", &self.device.name()).field("raw", &self.raw).finish_non_exhaustive()
    }
}
