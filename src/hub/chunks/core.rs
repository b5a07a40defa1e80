//! The core of a chunk hub: the [state machine](super::state) under a lock, the envelopes, the copies.
//!
//! A hub has no task of its own. The thread that causes an event also carries out its consequences, with no lock
//! held: it enqueues copies, returns envelopes to their pools and wakes tasks. The return of an envelope to its pool is
//! also an event.

mod locations;
mod log;
mod registration;
mod view;

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    io::Write,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::Waker,
};

pub(crate) use locations::makes_envelopes;
pub(super) use locations::place_name;
use locations::{Envelopes, HubLocations};
use log::EventLog;
pub(super) use registration::Registration;
use smallvec::SmallVec;
pub(crate) use view::{ChunkHubView, MissingResource};

use super::{
    roles::{LinkName, Role},
    state::{Actions, ChunkHubState, LinkId, LocationId, Move, TooFew},
};
use crate::{
    device::{Device, LossObserver, human},
    error::{Error, ErrorKind, Result},
    hub::{
        envelope::Envelope,
        external_guard::{Boundary, ExternalGuard, OutsideTracker},
        pool::Pool,
    },
    memory::{Plain, transfer},
    stream::Stream,
    sync::{Deferred, DiscardOnDrop, Level, Mutex, discard, discard_all, lock, logged, wake_shared},
};

/// A chunk's structure. It may itself contain chunk hubs.
pub(super) type Structure<S> = Arc<DiscardOnDrop<S>>;

/// The part of a hub that its handles, links and chunks share.
pub(crate) struct Core<T: Plain, S: 'static> {
    pub(super) name: Arc<str>,
    pub(super) bytes: usize,
    inner: Mutex<Inner<T, S>>,
    /// For the copies from one place to another.
    streams: Mutex<HashMap<(LocationId, LocationId), Stream>>,
    failed: OnceLock<Error>,
    log: EventLog,
    flows: Mutex<Flows>,
    counts: ChunkCounters,
    /// A reference to itself, for its envelopes to keep.
    own: Weak<Self>,
}

struct Inner<T: Plain, S: 'static> {
    state: ChunkHubState<Envelopes<T>, Structure<S>>,
    places: HubLocations<T>,
}

impl<T: Plain, S: 'static> Drop for Core<T, S> {
    fn drop(&mut self) {
        let state = &mut self.inner.get_mut().state;
        let (wakers, structures) = (state.drain_wakers(), state.drain_structures());
        discard_all(wakers);
        std::mem::take(&mut self.log).end(self.name.clone());
        drop(structures);
    }
}

#[derive(Debug, Default)]
struct ChunkCounters {
    produced: AtomicU64,
    consumed: AtomicU64,
    copied: AtomicU64,
    copied_bytes: AtomicU64,
}

/// The flows that have links here, and the guards that keep them from ending.
#[derive(Default)]
struct Flows {
    running: Vec<Arc<Boundary>>,
    outside: HashMap<LinkId, Vec<ExternalGuard>>,
    /// For each envelope that was taken out of the hub outside a flow, by the address of its [`TakenEnvelope`]: the
    /// flows that have begun since. Flows that ran at that time have a guard on the envelope instead.
    out: HashMap<usize, Vec<ExternalGuard>>,
}

/// An envelope that was taken out of the hub outside a flow, until it is returned.
struct TakenEnvelope<T: Plain, S: Clone + Send + Sync + 'static> {
    core: Weak<Core<T, S>>,
}

impl<T: Plain, S: Clone + Send + Sync + 'static> TakenEnvelope<T, S> {
    /// Unique and stable, since it is shared and never moves.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> OutsideTracker for TakenEnvelope<T, S> {
    fn lend(&self) {}

    fn regain(&self) {
        if let Some(core) = self.core.upgrade() {
            let held = lock(&core.flows).out.remove(&self.address());
            // Dropped without the lock, since this wakes a flow's task.
            drop(held);
        }
    }

    /// No flow that would wait for the envelope can begin any more.
    fn has_ended(&self) -> bool {
        self.core.strong_count() == 0
    }

    fn release(&self, is: &dyn Fn(&Boundary) -> bool) -> SmallVec<[ExternalGuard; 1]> {
        let mut taken = SmallVec::new();
        let Some(core) = self.core.upgrade() else { return taken };
        let held: SmallVec<[_; 2]> = lock(&core.flows)
            .out
            .get(&self.address())
            .into_iter()
            .flatten()
            .map(|held| held.boundary().clone())
            .collect();
        // Without the lock, since `is` may acquire another hub's lock.
        for boundary in held.into_iter().filter(|boundary| is(boundary)) {
            let mut flows = lock(&core.flows);
            let held = flows.out.get_mut(&self.address()).into_iter();
            taken.extend(held.flat_map(|held| held.extract_if(.., |held| Arc::ptr_eq(held.boundary(), &boundary))));
        }
        taken
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Core<T, S> {
    pub(super) fn new(name: Arc<str>, bytes: usize, capacity: usize) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            name,
            bytes,
            inner: Mutex::at(Level::Hub, Inner { state: ChunkHubState::new(capacity), places: HubLocations::new() }),
            streams: Mutex::at(Level::CopyStreams, HashMap::new()),
            failed: OnceLock::new(),
            log: EventLog::default(),
            flows: Mutex::default(),
            counts: ChunkCounters::default(),
            own: own.clone(),
        })
    }

    /// Allocates `count` more envelopes at a place, for the links that wait there.
    pub(super) fn add_envelopes(&self, device: &Device, count: usize, pinned_for: Option<&Device>) -> Result<()> {
        self.allocate(device, count, pinned_for)?;
        self.log_event(|| format!("{count} more envelopes on {}", place_name(device)));
        self.act(|_, _, _| ());
        Ok(())
    }

    /// Allocates the envelope without which no chunk could move, for the link that
    /// [claimed](ChunkHubState::claim_spare) it.
    fn add_spare(&self, device: &Device) -> Result<()> {
        let added = self.allocate(device, 1, None);
        if added.is_ok() {
            self.log_event(|| format!("1 more envelope on {}: all others hold later chunks", place_name(device)));
        }
        self.act(|state, _, _| state.spare_came());
        added
    }

    fn allocate(&self, device: &Device, count: usize, pinned_for: Option<&Device>) -> Result<()> {
        let at = || {
            format!(
                "hub `{}` needs {} of {}",
                self.name,
                human::count(count, "envelope"),
                human::bytes(self.bytes as u64)
            )
        };
        let (pool, pinned_for) = {
            let mut inner = lock(&self.inner);
            let place = self.place(&mut inner.places, device)?;
            let pinned_for = pinned_for.or(inner.places.healthy_device()).unwrap_or(device).clone();
            (inner.places.all[place].pool.clone(), pinned_for)
        };
        let failed = |error: Error| error.at(format!("{} on {}", at(), place_name(device)));
        match pool {
            Some(pool) => pool.add(count, device, &pinned_for).map_err(failed)?,
            None => {
                let pool = Pool::new(&self.name, count, self.bytes, device, &pinned_for).map_err(failed)?;
                let core = self.own.clone();
                pool.listen(Box::new(move || {
                    if let Some(core) = core.upgrade() {
                        core.act(|_, _, _| ());
                    }
                }));
                let mut inner = lock(&self.inner);
                let place = inner.places.number(device);
                // Another thread may have created the pool meanwhile. It is kept, and the envelopes are allocated
                // there instead.
                match &inner.places.all[place].pool {
                    None => inner.places.all[place].pool = Some(pool),
                    Some(pool) => {
                        let pool = pool.clone();
                        drop(inner);
                        pool.add(count, device, &pinned_for).map_err(failed)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The number of a location, after checking that there are copy paths to all others.
    fn place(&self, places: &mut HubLocations<T>, device: &Device) -> Result<LocationId> {
        if let Some(other) = places.all.iter().map(|place| &place.device).find(|other| !other.copies_with(device)) {
            let text = format!(
                "hub `{}`: there is no copy path between {device} and {other}: use devices of one backend, or one of them beside the host",
                self.name
            );
            return Err(Error::new(ErrorKind::Setup, text));
        }
        Ok(places.number(device))
    }

    pub(super) fn envelopes(&self, device: &Device) -> usize {
        let inner = lock(&self.inner);
        inner.places.find(device).map_or(0, |place| inner.places.count(place))
    }

    /// Registers a new link. `name`: for a port's link.
    pub(super) fn link(
        self: &Arc<Self>,
        role: Role,
        device: &Device,
        name: Option<LinkName>,
    ) -> Result<Registration<T, S>> {
        let (id, name, place, is_observed) = {
            let mut inner = lock(&self.inner);
            let place = self.place(&mut inner.places, device)?;
            let (id, name) = inner.state.link(role, place, name);
            // Keeps the flows from ending before their operators can wait for this link.
            if let LinkName::Standalone(_) = name {
                let mut flows = lock(&self.flows);
                let held = flows.running.iter().map(ExternalGuard::holding).collect();
                flows.outside.insert(id, held);
            }
            (id, name, place, std::mem::replace(&mut inner.places.all[place].loss_registered, true))
        };
        if !is_observed {
            let own: Weak<Self> = self.own.clone();
            device.on_loss(own);
        }
        self.act(|state, _, out| {
            // The device was lost before the hub was registered for the notification.
            if device.is_lost() {
                state.lose(place, out);
            }
            // Now that there is a producer, some waiting links may find that no data can get to them, and return an
            // error.
            if role == Role::Produce {
                state.wake_all(out);
            }
        });
        Ok(Registration {
            core: self.clone(),
            id,
            name,
            role,
            place,
            device: device.clone(),
            forgotten: Default::default(),
        })
    }

    /// Registers a running flow that has links here: links from outside may cause activity in it.
    pub(super) fn join(&self, flow: &Arc<dyn OutsideTracker>) {
        let boundary = Boundary::of_program(flow.clone());
        let mut flows = lock(&self.flows);
        let Flows { outside, out, .. } = &mut *flows;
        outside.values_mut().chain(out.values_mut()).for_each(|held| held.push(ExternalGuard::holding(&boundary)));
        flows.running.push(boundary);
    }

    /// Removes a flow that has ended.
    pub(super) fn leave(&self, flow: &Arc<dyn OutsideTracker>) {
        let mut gone = Vec::new();
        let mut flows = lock(&self.flows);
        let left: Vec<_> = flows.running.extract_if(.., |running| running.is_of(flow)).collect();
        let Flows { outside, out, .. } = &mut *flows;
        for held in outside.values_mut().chain(out.values_mut()) {
            gone.extend(held.extract_if(.., |held| held.holds(flow)));
        }
        drop(flows);
        drop((gone, left));
    }

    /// Called when an envelope is taken out of the hub outside a flow. Returns its guards: for the flows that run, and
    /// for those that begin before it is returned.
    fn envelope_taken(&self) -> SmallVec<[Arc<Boundary>; 2]> {
        let out = Arc::new(TakenEnvelope { core: self.own.clone() });
        let mut flows = lock(&self.flows);
        let before = flows.out.insert(out.address(), Vec::new());
        let running: SmallVec<[_; 2]> = flows.running.iter().cloned().collect();
        drop(flows);
        // Left by an earlier envelope at this address. Guards of a flow must not be dropped under the lock.
        drop(before);
        running.into_iter().chain([Boundary::of_program(out)]).collect()
    }

    /// Whether a guard of an envelope that enters the hub belongs to one of the hub's flows, or notes that the envelope
    /// was taken out of this hub.
    fn waits(&self, boundary: &Boundary) -> bool {
        let flows = lock(&self.flows);
        flows.running.iter().any(|flow| flow.has_flow_of(boundary)) || flows.out.contains_key(&boundary.address())
    }

    pub(super) fn set_flow(&self, flow: Option<Vec<LinkName>>) {
        self.log_event(|| match &flow {
            None => "data flows to all links".into(),
            Some(links) => format!("data flows to {} links only", links.len()),
        });
        self.act(|state, _, _| state.set_flow(flow));
    }

    // --- events

    /// Applies a change to the state and carries out the consequences.
    fn act<R>(
        &self,
        change: impl FnOnce(
            &mut ChunkHubState<Envelopes<T>, Structure<S>>,
            &mut HubLocations<T>,
            &mut Actions<Envelopes<T>>,
        ) -> R,
    ) -> R {
        let mut actions = Actions::default();
        let changed = {
            let Inner { state, places } = &mut *lock(&self.inner);
            state.lose_failed(places);
            let changed = change(state, places, &mut actions);
            state.settle(places, &mut actions);
            state.take_gone(&mut actions);
            changed
        };
        self.carry_out(actions);
        changed
    }

    fn carry_out(&self, mut actions: Actions<Envelopes<T>>) {
        loop {
            let Actions { moves, wakes, freed, gone } = actions;
            discard_all(gone);
            drop(freed);
            actions = Actions::default();
            for copy in moves {
                self.enqueue(copy, &mut actions);
            }
            wake_all(wakes);
            if actions.moves.is_empty()
                && actions.wakes.is_empty()
                && actions.freed.is_empty()
                && actions.gone.is_empty()
            {
                break;
            }
        }
        self.log.write(&self.name);
    }

    fn enqueue(&self, copy: Move<Envelopes<T>>, out: &mut Actions<Envelopes<T>>) {
        let Move { number, from, to, source, blank } = copy;
        let bytes = source.raw().bytes();
        let arrival = match self.copy(from, to, &source, blank) {
            Ok(arrival) => {
                self.counts.copied.fetch_add(1, Ordering::Relaxed);
                self.counts.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                let size = || human::bytes(bytes as u64);
                self.log_event(|| format!("chunk {number}: {} from {} to {}", size(), self.at(from), self.at(to)));
                Some(Arc::new(arrival))
            }
            Err(error) if error.is_device_lost() => {
                self.copy_lost(error, number, [from, to], out);
                None
            }
            Err(error) => {
                self.fail(error);
                None
            }
        };
        let failed = self.failed.get().is_some();
        let Inner { state, places } = &mut *lock(&self.inner);
        state.arrived(number, to, source, arrival, out);
        if failed {
            // A failed copy is not retried.
            state.wake_all(out);
        } else {
            state.settle(places, out);
        }
    }

    /// Handles a copy that failed because a device was lost: the copies on it are lost, and the hub continues without
    /// that place.
    #[cold]
    fn copy_lost(&self, error: Error, number: u64, [from, to]: [LocationId; 2], out: &mut Actions<Envelopes<T>>) {
        self.log_event(|| format!("chunk {number}: not copied from {} to {}: {error:#}", self.at(from), self.at(to)));
        let Inner { state, places } = &mut *lock(&self.inner);
        // Only the first one is kept.
        let _ = places.lost.set(error);
        let is_lost = |place: &LocationId| places.all[*place].device.is_lost();
        let lost: SmallVec<[LocationId; 2]> = [from, to].into_iter().filter(is_lost).collect();
        if lost.is_empty() {
            // Another device was lost while it wrote to the source.
            state.lose_copy(number, from);
        }
        lost.into_iter().for_each(|place| state.lose(place, out));
    }

    /// The error for a chunk whose only copy was lost at that place.
    fn lost_chunk(&self, number: u64, place: LocationId) -> Error {
        let known = {
            let places = &lock(&self.inner).places;
            let device = places.all.get(place).and_then(|place| place.device.lost());
            device.or_else(|| places.lost.get().cloned())
        };
        let cause = known.unwrap_or_else(|| Error::new(ErrorKind::DeviceLost, "its device is lost"));
        cause.at(format!("hub `{}`: the only copy of chunk {number} is lost", self.name))
    }

    fn copy(&self, from: LocationId, to: LocationId, source: &Envelope<T>, blank: Envelopes<T>) -> Result<Envelope<T>> {
        let mut arrival = self.blank(blank)?;
        let stream = self.stream(from, to)?;
        let bytes = source.raw().bytes();
        let mut copy = || {
            transfer::copy(&stream, source.raw().memory(), arrival.raw_mut().memory_mut(), bytes)?;
            if Device::any_is_lost() { arrival.raw().memory().check_contents() } else { Ok(()) }
        };
        // Retried if a loss that became known meanwhile corrupted the copy. If it is corrupted again, its source was
        // corrupted.
        copy().or_else(|error| if error.is_device_lost() { copy() } else { Err(error) })?;
        arrival.raw_mut().set_bytes(bytes);
        // Committed now, so that later users of the envelope wait for this copy and for no work after it.
        arrival.raw().commit_uses()?;
        source.raw().commit_uses()?;
        Ok(arrival)
    }

    /// A blank envelope that its user may write without a wait for a lost device.
    pub(super) fn blank(&self, envelope: Envelopes<T>) -> Result<Envelope<T>> {
        let mut blank = sole(envelope)?;
        if Device::any_is_lost() {
            let memory = blank.raw().memory().device().clone();
            let near = if memory.is_lost() { lock(&self.inner).places.healthy_device().cloned() } else { None };
            blank.raw_mut().replace_used_by_lost(near.as_ref().unwrap_or(&memory));
        }
        Ok(blank)
    }

    fn stream(&self, from: LocationId, to: LocationId) -> Result<Stream> {
        let _later = Deferred::new();
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.get(&(from, to)) {
            return Ok(stream.clone());
        }
        let (source, target) = {
            let inner = lock(&self.inner);
            (inner.places.all[from].device.clone(), inner.places.all[to].device.clone())
        };
        let copier = if target.is_host() { &source } else { &target };
        let name = format!("copies of {} to {}", self.name, place_name(&target));
        let stream = Stream::with_priority(copier, name, 0)?;
        streams.insert((from, to), stream.clone());
        Ok(stream)
    }

    /// Marks the hub as failed: its links get this error from now on.
    fn fail(&self, error: Error) {
        // Only the first failure is stored.
        let _ = self.failed.set(error.at(format!("hub `{}`", self.name)));
    }

    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn at(&self, place: LocationId) -> String {
        let inner = lock(&self.inner);
        inner.places.all.get(place).map_or_else(String::new, |place| place_name(&place.device).to_string())
    }

    // --- log and messages

    pub(super) fn log_to(&self, writer: Box<dyn Write + Send>) {
        self.log.set(writer);
    }

    /// Queues a line for the log, before the change that it describes. It is written after the change, when
    /// [`act`](Self::act) ends.
    pub(super) fn log_event(&self, line: impl FnOnce() -> String) {
        let mut traced = false;
        logged(|| traced = tracing::enabled!(tracing::Level::DEBUG));
        if !traced && !self.log.is_set() {
            return;
        }
        let line = line();
        if traced {
            logged(|| tracing::debug!(hub = &*self.name, "{line}"));
        }
        self.log.note(line);
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.inner).state.len()
    }
}

/// Ends the waits for chunks on a lost device.
impl<T: Plain, S: Clone + Send + Sync + 'static> LossObserver for Core<T, S> {
    fn device_lost(&self) {
        // Nothing is settled here: the calling thread may be about to enqueue a copy, and hold the locks for that.
        let mut actions = Actions::default();
        {
            let Inner { state, places } = &mut *lock(&self.inner);
            state.wake_all(&mut actions);
            let lost = places.all.iter().enumerate().filter(|(_, place)| place.device.is_lost());
            lost.for_each(|(place, _)| state.lose(place, &mut actions));
        }
        wake_all(actions.wakes);
    }

    fn hold(&self) -> Box<dyn Any> {
        let flows: Vec<_> = lock(&self.flows).running.iter().map(ExternalGuard::holding).collect();
        Box::new(flows)
    }

    fn has_waiters(&self) -> bool {
        lock(&self.inner).state.has_waiters()
    }
}

fn wake_all(wakes: Vec<Arc<Waker>>) {
    for waker in wakes {
        wake_shared(&waker);
        discard(waker);
    }
}

/// Unwraps an envelope to which there is no other reference.
pub(super) fn sole<T: Plain>(envelope: Envelopes<T>) -> Result<Envelope<T>> {
    Arc::into_inner(envelope).ok_or_else(|| Error::internal("a chunk's envelope is still shared"))
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Core<T, S> {
    pub(super) fn device_of(&self, envelope: &Envelope<T>) -> Device {
        if envelope.is_host() { Device::host() } else { envelope.device().clone() }
    }

    /// The error when chunks stay in the hub and a producer asks for one more than there are envelopes for.
    pub(super) fn too_few_envelopes(&self, too_few: TooFew, device: &Device) -> Error {
        let TooFew { chunks, envelopes } = too_few;
        let (name, needed, more) = (&self.name, too_few.needed(), too_few.needed() - envelopes);
        let place = if device.is_host() { "&Device::host()" } else { "&device" };
        let text = format!(
            "hub `{name}` has {envelopes} envelopes, too few for {chunks} chunks that stay in it, since no link consumes them: \
             it needs {needed}, one for each chunk and one to move them between locations; \
             call `hub.add_envelopes({place}, {more})`, or link the consumer first"
        );
        Error::new(ErrorKind::Setup, text)
    }

    pub(super) fn no_envelopes(&self, role: Role, device: &Device) -> Error {
        let (name, place) = (&self.name, place_name(device));
        let call = makes_envelopes(device);
        Error::new(
            ErrorKind::Setup,
            format!(
                "hub `{name}` has no envelopes on {place}, where a link {} its chunks: add some with \
                 `ChunkHub::builder(..).{call}` or `add_envelopes`",
                role.verb()
            ),
        )
    }
}

impl<T: Plain, S: 'static> fmt::Debug for Core<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkHub").field("name", &self.name).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
