//! What a hub of chunks does: the [state machine](super::state) under a lock, the envelopes, the copies.
//!
//! Whoever makes something happen carries out what follows from it, on its own thread, with no lock held: enqueues
//! copies, lets envelopes go home, wakes. An envelope that comes home is such an event, too. Nobody else runs a hub.

mod log;
mod seat;
mod seen;

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

use log::Log;
pub(super) use seat::Seat;
pub(crate) use seen::{ChunkState, Lack};
use smallvec::SmallVec;

use super::{
    roles::{LinkName, Role},
    state::{Actions, Blanks, LinkId, Move, Place, State, TooFew},
};
use crate::{
    device::{Device, HearsOfLoss, human},
    error::{Error, ErrorKind, Result},
    hub::{
        abroad::{Abroad, Boundary, Lender},
        envelope::Envelope,
        pool::Pool,
    },
    memory::{Plain, transfer},
    stream::Stream,
    sync::{Deferred, Discarded, Level, Mutex, discard, discard_all, lock, logged, wake_shared},
};

/// An envelope, which those who peek share.
type Envelopes<T> = Arc<Envelope<T>>;

/// What stands beside a chunk's data. It may hold hubs of chunks of its own.
pub(super) type Structure<S> = Arc<Discarded<S>>;

/// What is shared by all who have to do with a hub.
pub(crate) struct Core<T: Plain, S: 'static> {
    pub(super) name: Arc<str>,
    /// Of each envelope.
    pub(super) bytes: usize,
    inner: Mutex<Inner<T, S>>,
    /// For the copies from one place to another.
    streams: Mutex<HashMap<(Place, Place), Stream>>,
    failed: OnceLock<Error>,
    log: Log,
    flows: Mutex<Flows>,
    counts: Counts,
    /// Itself, for what its envelopes keep.
    own: Weak<Self>,
}

struct Inner<T: Plain, S: 'static> {
    state: State<Envelopes<T>, Structure<S>>,
    places: Places<T>,
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

/// Places by their numbers.
struct Places<T> {
    all: Vec<PlaceOf>,
    /// Why the first copy failed that did for the loss of a device.
    lost: OnceLock<Error>,
    of: std::marker::PhantomData<fn() -> T>,
}

struct PlaceOf {
    device: Device,
    pool: Option<Arc<Pool>>,
    /// The hub is notified of the device's loss.
    hears_of_loss: bool,
}

/// What has passed.
#[derive(Debug, Default)]
struct Counts {
    produced: AtomicU64,
    consumed: AtomicU64,
    copied: AtomicU64,
    copied_bytes: AtomicU64,
}

/// The flows that it has links in, and who holds them from outside.
#[derive(Default)]
struct Flows {
    running: Vec<Arc<Boundary>>,
    outside: HashMap<LinkId, Vec<Abroad>>,
    /// By the address of its [`Out`], of an envelope that was taken out by hand: the flows that have begun since. Those that
    /// ran then have a mark on the envelope.
    out: HashMap<usize, Vec<Abroad>>,
}

/// An envelope that was taken out by hand, until it has come home.
struct Out<T: Plain, S: Clone + Send + Sync + 'static> {
    core: Weak<Core<T, S>>,
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Out<T, S> {
    /// It is shared, and stays where it is.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Lender for Out<T, S> {
    fn lend(&self) {}

    fn regain(&self) {
        if let Some(core) = self.core.upgrade() {
            let held = lock(&core.flows).out.remove(&self.address());
            // A flow's task is woken, without the lock.
            drop(held);
        }
    }

    /// No flow can begin that would wait for it.
    fn has_ended(&self) -> bool {
        self.core.strong_count() == 0
    }

    fn release(&self, is: &dyn Fn(&Boundary) -> bool) -> SmallVec<[Abroad; 1]> {
        let mut taken = SmallVec::new();
        let Some(core) = self.core.upgrade() else { return taken };
        let held: SmallVec<[_; 2]> = lock(&core.flows)
            .out
            .get(&self.address())
            .into_iter()
            .flatten()
            .map(|held| held.boundary().clone())
            .collect();
        // That may acquire another hub's lock.
        for boundary in held.into_iter().filter(|boundary| is(boundary)) {
            let mut flows = lock(&core.flows);
            let held = flows.out.get_mut(&self.address()).into_iter();
            taken.extend(held.flat_map(|held| held.extract_if(.., |held| Arc::ptr_eq(held.boundary(), &boundary))));
        }
        taken
    }
}

/// What gives a hub envelopes there.
pub(crate) fn makes_envelopes(device: &Device) -> &'static str {
    if device.is_host() { "host_envelopes(2)" } else { "envelopes(&device, 2)" }
}

/// `the host`, `cuda:0`
pub(super) fn place_name(device: &Device) -> &str {
    if device.is_host() { "the host" } else { device.name() }
}

impl<T: Plain> Places<T> {
    fn new() -> Self {
        Self { all: Vec::new(), lost: OnceLock::new(), of: std::marker::PhantomData }
    }

    /// The number of a place; a new one if it has none.
    fn number(&mut self, device: &Device) -> Place {
        self.find(device).unwrap_or_else(|| {
            self.all.push(PlaceOf { device: device.clone(), pool: None, hears_of_loss: false });
            self.all.len() - 1
        })
    }

    fn find(&self, device: &Device) -> Option<Place> {
        self.all.iter().position(|place| place.device == *device)
    }

    fn count(&self, place: Place) -> usize {
        self.all.get(place).and_then(|place| place.pool.as_ref()).map_or(0, |pool| pool.count())
    }
}

impl<T: Plain> Blanks<Envelopes<T>> for Places<T> {
    fn take(&mut self, place: Place) -> Option<Envelopes<T>> {
        let pool = self.all.get(place)?.pool.as_ref()?;
        pool.take().ok()?.map(|raw| Arc::new(Envelope::of_raw(raw)))
    }

    fn count(&self, place: Place) -> usize {
        self.all.get(place).and_then(|place| place.pool.as_ref()).map_or(0, |pool| pool.idle())
    }

    fn made(&self, place: Place) -> usize {
        Self::count(self, place)
    }

    fn places(&self) -> usize {
        self.all.len()
    }

    fn is_own(&self, place: Place, envelope: &Envelopes<T>) -> bool {
        let pool = self.all.get(place).and_then(|place| place.pool.as_ref());
        pool.is_some_and(|pool| std::ptr::eq(envelope.raw().home().as_ptr(), Arc::as_ptr(pool)))
    }

    fn has_failed(&self, envelope: &Envelopes<T>) -> bool {
        let failed = Device::any_is_lost().then(|| envelope.raw().memory().check_contents()).and_then(Result::err);
        let has_failed = failed.is_some();
        // The first one stays.
        failed.into_iter().for_each(|error| _ = self.lost.set(error));
        has_failed
    }
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Core<T, S> {
    pub(super) fn new(name: Arc<str>, bytes: usize, capacity: usize) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            name,
            bytes,
            inner: Mutex::at(Level::Hub, Inner { state: State::new(capacity), places: Places::new() }),
            streams: Mutex::at(Level::CopyStreams, HashMap::new()),
            failed: OnceLock::new(),
            log: Log::default(),
            flows: Mutex::default(),
            counts: Counts::default(),
            own: own.clone(),
        })
    }

    /// Allocates so many more envelopes at a place, for the links that wait there.
    pub(super) fn add_envelopes(&self, device: &Device, count: usize, near: Option<&Device>) -> Result<()> {
        self.allocate(device, count, near)?;
        self.tell(|| format!("{count} envelopes more on {}", place_name(device)));
        self.act(|_, _, _| ());
        Ok(())
    }

    /// Allocates the envelope without which no chunk would move any more, for the link that [claimed](State::claim_spare) it.
    fn add_spare(&self, device: &Device) -> Result<()> {
        let added = self.allocate(device, 1, None);
        if added.is_ok() {
            self.tell(|| format!("1 envelope more on {}: all others hold later chunks", place_name(device)));
        }
        self.act(|state, _, _| state.spare_came());
        added
    }

    fn allocate(&self, device: &Device, count: usize, near: Option<&Device>) -> Result<()> {
        let at = || format!("hub `{}` needs {count} envelopes of {}", self.name, human::bytes(self.bytes as u64));
        let (pool, near) = {
            let mut inner = lock(&self.inner);
            let place = self.place(&mut inner.places, device)?;
            // Host memory is page-locked for a device that is there.
            let is_one = |device: &&Device| !device.is_host() && !device.is_lost();
            let other = inner.places.all.iter().map(|place| &place.device).find(is_one);
            let near = near.or(other).unwrap_or(device).clone();
            (inner.places.all[place].pool.clone(), near)
        };
        let failed = |error: Error| error.at(format!("{} on {}", at(), place_name(device)));
        match pool {
            Some(pool) => pool.add(count, device, &near).map_err(failed)?,
            None => {
                let made = Pool::new(&self.name, count, self.bytes, device, &near).map_err(failed)?;
                let core = self.own.clone();
                made.listen(Box::new(move || {
                    if let Some(core) = core.upgrade() {
                        core.act(|_, _, _| ());
                    }
                }));
                let mut inner = lock(&self.inner);
                let place = inner.places.number(device);
                // Somebody may have been quicker: its envelopes stay, and these are another pool's.
                match &inner.places.all[place].pool {
                    None => inner.places.all[place].pool = Some(made),
                    Some(pool) => {
                        let pool = pool.clone();
                        drop(inner);
                        pool.add(count, device, &near).map_err(failed)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The number of a place, which all others can be copied to and from.
    fn place(&self, places: &mut Places<T>, device: &Device) -> Result<Place> {
        if let Some(other) = places.all.iter().map(|place| &place.device).find(|other| !other.copies_with(device)) {
            let text = format!("hub `{}`: {device} and {other} are devices of different makes", self.name);
            return Err(Error::new(ErrorKind::Setup, text));
        }
        Ok(places.number(device))
    }

    /// How many envelopes there are at a place, wherever they are now.
    pub(super) fn envelopes(&self, device: &Device) -> usize {
        let inner = lock(&self.inner);
        inner.places.find(device).map_or(0, |place| inner.places.count(place))
    }

    /// A new link. `name`: of a port's.
    pub(super) fn link(self: &Arc<Self>, role: Role, device: &Device, name: Option<LinkName>) -> Result<Seat<T, S>> {
        let (id, name, place, hears) = {
            let mut inner = lock(&self.inner);
            let place = self.place(&mut inner.places, device)?;
            let (id, name) = inner.state.link(role, place, name);
            // It holds the flows before their operators find that they wait for it.
            if let LinkName::Hand(_) = name {
                let mut flows = lock(&self.flows);
                let held = flows.running.iter().map(Abroad::holding).collect();
                flows.outside.insert(id, held);
            }
            (id, name, place, std::mem::replace(&mut inner.places.all[place].hears_of_loss, true))
        };
        if !hears {
            let own: Weak<Self> = self.own.clone();
            device.tell_when_lost(own);
        }
        self.act(|state, _, out| {
            // Before it was to be notified of that.
            if device.is_lost() {
                state.lose(place, out);
            }
            // Those whom nothing could come to now may have to be told.
            if role == Role::Produce {
                state.wake_all(out);
            }
        });
        Ok(Seat { core: self.clone(), id, name, role, place, device: device.clone(), forgotten: Default::default() })
    }

    /// A flow that has links here runs: whoever has links elsewhere may cause something in it.
    pub(super) fn join(&self, flow: &Arc<dyn Lender>) {
        let boundary = Boundary::of_program(flow.clone());
        let mut flows = lock(&self.flows);
        let Flows { outside, out, .. } = &mut *flows;
        outside.values_mut().chain(out.values_mut()).for_each(|held| held.push(Abroad::holding(&boundary)));
        flows.running.push(boundary);
    }

    /// That flow has ended.
    pub(super) fn leave(&self, flow: &Arc<dyn Lender>) {
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

    /// An envelope is taken out by hand: what it is marked with, for the flows that run and for those that begin before it
    /// comes home.
    fn goes_out(&self) -> SmallVec<[Arc<Boundary>; 2]> {
        let out = Arc::new(Out { core: self.own.clone() });
        let mut flows = lock(&self.flows);
        let before = flows.out.insert(out.address(), Vec::new());
        let running: SmallVec<[_; 2]> = flows.running.iter().cloned().collect();
        drop(flows);
        // Of one that lay there. Nothing of a flow's is let go under the lock.
        drop(before);
        running.into_iter().chain([Boundary::of_program(out)]).collect()
    }

    /// Of the marks of an envelope that comes into the hub: it is one of the hub's flows, or says that it was taken out here.
    fn waits(&self, boundary: &Boundary) -> bool {
        let flows = lock(&self.flows);
        flows.running.iter().any(|flow| flow.is_beside(boundary)) || flows.out.contains_key(&boundary.address())
    }

    pub(super) fn set_flow(&self, flow: Option<Vec<LinkName>>) {
        self.tell(|| match &flow {
            None => "data flows as the links say".into(),
            Some(links) => format!("data flows to {} of its links alone", links.len()),
        });
        self.act(|state, _, _| state.set_flow(flow));
    }

    // --- what happens

    /// Changes something, and does what follows from it.
    fn act<R>(
        &self,
        change: impl FnOnce(&mut State<Envelopes<T>, Structure<S>>, &mut Places<T>, &mut Actions<Envelopes<T>>) -> R,
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

    /// Enqueues a copy, and says so.
    fn enqueue(&self, copy: Move<Envelopes<T>>, out: &mut Actions<Envelopes<T>>) {
        let Move { number, from, to, source, blank } = copy;
        let bytes = source.raw().bytes();
        let arrival = match self.copy(from, to, &source, blank) {
            Ok(arrival) => {
                self.counts.copied.fetch_add(1, Ordering::Relaxed);
                self.counts.copied_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                let size = || human::bytes(bytes as u64);
                self.tell(|| format!("chunk {number}: {} from {} to {}", size(), self.at(from), self.at(to)));
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
            // What cannot be copied is not tried again.
            state.wake_all(out);
        } else {
            state.settle(places, out);
        }
    }

    /// A copy failed for the loss of a device: what lies there is lost, and the hub goes on without that place.
    #[cold]
    fn copy_lost(&self, error: Error, number: u64, [from, to]: [Place; 2], out: &mut Actions<Envelopes<T>>) {
        self.tell(|| format!("chunk {number}: not copied from {} to {}: {error}", self.at(from), self.at(to)));
        let Inner { state, places } = &mut *lock(&self.inner);
        // The first one stays.
        let _ = places.lost.set(error);
        let is_lost = |place: &Place| places.all[*place].device.is_lost();
        let lost: SmallVec<[Place; 2]> = [from, to].into_iter().filter(is_lost).collect();
        if lost.is_empty() {
            // Another device was lost while it wrote to the source.
            state.spoilt(number, from);
        }
        lost.into_iter().for_each(|place| state.lose(place, out));
    }

    /// Of a chunk whose only copy was lost there.
    fn lost_chunk(&self, number: u64, place: Place) -> Error {
        let known = {
            let places = &lock(&self.inner).places;
            let device = places.all.get(place).and_then(|place| place.device.lost());
            device.or_else(|| places.lost.get().map(Error::again))
        };
        let cause = known.unwrap_or_else(|| Error::new(ErrorKind::DeviceLost, "its device is lost"));
        cause.at(format!("hub `{}`: the only copy of chunk {number} is lost", self.name))
    }

    fn copy(&self, from: Place, to: Place, source: &Envelope<T>, blank: Envelopes<T>) -> Result<Envelope<T>> {
        let mut arrival = sole(blank)?;
        let stream = self.stream(from, to)?;
        let bytes = source.raw().bytes();
        let mut copy = || {
            transfer::copy(&stream, source.raw().memory(), arrival.raw_mut().memory_mut(), bytes)?;
            if Device::any_is_lost() { arrival.raw().memory().check_contents() } else { Ok(()) }
        };
        // Spoilt by a loss that became known meanwhile, it is made again. Spoilt once more, it is by what it was copied from.
        copy().or_else(|error| if error.is_device_lost() { copy() } else { Err(error) })?;
        arrival.raw_mut().set_bytes(bytes);
        // Marked now: whoever waits for it waits for this copy and for none after it.
        arrival.raw().mark()?;
        source.raw().mark()?;
        Ok(arrival)
    }

    fn stream(&self, from: Place, to: Place) -> Result<Stream> {
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

    /// Nothing passes any more.
    fn fail(&self, error: Error) {
        // The first failure stays.
        let _ = self.failed.set(error.at(format!("hub `{}`", self.name)));
    }

    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.again()))
    }

    fn at(&self, place: Place) -> String {
        let inner = lock(&self.inner);
        inner.places.all.get(place).map_or_else(String::new, |place| place_name(&place.device).to_string())
    }

    // --- for people

    pub(super) fn log_to(&self, writer: Box<dyn Write + Send>) {
        self.log.set(writer);
    }

    /// Notes a line, before the change that it tells of: the log's writer has it after that, as [`act`](Self::act) ends.
    pub(super) fn tell(&self, line: impl FnOnce() -> String) {
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

/// Whoever waits for a chunk on that device waits for nothing.
impl<T: Plain, S: Clone + Send + Sync + 'static> HearsOfLoss for Core<T, S> {
    fn device_lost(&self) {
        // Nothing else: somebody may be about to enqueue a copy, with what that needs locked.
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
        let flows: Vec<_> = lock(&self.flows).running.iter().map(Abroad::holding).collect();
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

/// The envelope, which nobody else has.
pub(super) fn sole<T: Plain>(envelope: Envelopes<T>) -> Result<Envelope<T>> {
    Arc::into_inner(envelope).ok_or_else(|| Error::new(ErrorKind::Usage, "an envelope is still shared"))
}

impl<T: Plain, S: Clone + Send + Sync + 'static> Core<T, S> {
    /// Where an envelope lies.
    pub(super) fn device_of(&self, envelope: &Envelope<T>) -> Device {
        if envelope.is_host() { Device::host() } else { envelope.device().clone() }
    }

    /// Its chunks stay, and a producer asks for one more than there are envelopes for.
    pub(super) fn too_few_envelopes(&self, too_few: TooFew, device: &Device) -> Error {
        let TooFew { chunks, made } = too_few;
        let (name, needed, more) = (&self.name, too_few.needed(), too_few.needed() - made);
        let place = if device.is_host() { "&Device::host()" } else { "&device" };
        let text = format!(
            "hub `{name}` has {made} envelopes, too few for {chunks} chunks that stay in it, since no link consumes them: \
             {needed} suffice, one for each chunk and one to move them from place to place; \
             `hub.add_envelopes({place}, {more})`, or link the consumer before"
        );
        Error::new(ErrorKind::Setup, text)
    }

    pub(super) fn no_envelopes(&self, role: Role, device: &Device) -> Error {
        let (name, place) = (&self.name, place_name(device));
        let made = makes_envelopes(device);
        Error::new(
            ErrorKind::Setup,
            format!(
                "hub `{name}` has no envelopes on {place}, where a link {} its chunks: give it some, \
                 `ChunkHub::builder(..).{made}`, or `add_envelopes`",
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
