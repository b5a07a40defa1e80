//! The state machine of a hub of chunks: who is given which chunk, what is copied where, and what goes home.
//!
//! It knows no device, no lock and no future. Something happens (a link asks, takes, commits, gives back, goes; a copy
//! has been enqueued; an envelope came home), and [`settle`](State::settle) says what to do about it ([`Actions`]): copies
//! to enqueue, tasks to wake, envelopes to let go. Whoever carries that out holds no lock meanwhile.
//!
//! ```text
//!   take: a place in the queue, and a blank
//!     │
//!     v      dropped
//!   BLANK ────────────> nothing
//!     │ commit
//!     v       take alone: modify, consume
//!   FREE ──────────────────────────────────> ALONE
//!    │ ^ <──── commit, or given back ────────┘  │ commit of a consumer
//!    │ │                                        v            the last peek ends
//!    │ └─ the last peek ends ─── PEEKED    LINGERING (if peeked) ──────────────────> nothing
//!    └── take: peek, any number ────^
//! ```
//!
//! Of one chunk there is a copy at each of any number of places, always equal:
//!
//! ```text
//!   nothing ──bring: a blank is taken──> ARRIVING ──the copy is enqueued──> THERE ──taken alone──> LENT
//!      ^                                                                     │  ^                   │
//!      └──── nobody needs it there, another place was modified, evicted ─────┘  └─── given back ────┘
//! ```
//!
//! **Where a chunk goes next.** With a consuming link: through every modifying link, in the order of linking; then to
//! every peeking link; then to one that consumes. Without one it stays, and links go round all chunks, each link in turn.
//! Who came first is served first; a peek waits for no one but for who would modify, and that only for its second turn.
//!
//! **No chunk holds another up for ever.** They are as old as the blanks that they were made of. A younger chunk takes an
//! envelope only where enough are left for all that the older ones still need there: for each link that is still to modify or
//! peek, and for one consumer, the chunk's goal. So of the envelopes at each such place at least one is left to the chunk
//! itself and to older ones, which leave the hub first. The goal follows the consumers that wait only to places where that
//! is true as well; elsewhere a younger chunk could have the envelope that the older one needs, and wait for that one's. Where the links or the flow of data
//! were changed meanwhile, copies that are in the way are dropped, or moved to another place if they are the only ones.
//! Where no place has an envelope free for that and none is on its way home, one more envelope is allocated ([`Spare`]):
//! by the link that waits, as it is polled. That leaves no place with more envelopes than it was given or the queue has
//! chunks.
//!
//! **Chunks that stay** need an envelope each, and one more to move them where there are several places. A producer of one
//! chunk more than that is [refused](TooFew), wherever the chunks lie at that time.
//!
//! **A user's own envelope** goes back to the user once no link needs the chunk there, unless the chunk is to
//! [return](Chunk::returns_to) in it: then it is kept beside the chunk, and is the blank for the copy that comes back.
//!
//! **A device that is lost.** Its links are served no more, and no chunk waits for them. Nothing is copied to its place, and
//! the copies there are gone. A chunk that had no other keeps its place in the queue: each link that comes to it takes the
//! loss, [`Grant::lost`], in its stead, and it leaves the queue as a consumer does.
//!
//! A copy that the device was to write at another place is lost, too, as soon as [its failure](Blanks::has_failed) is known: so
//! no link is given a chunk that is known to be lost.

mod settle;
mod snapshot;
mod turns;

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    ops::Deref,
    sync::Arc,
    task::Waker,
};

use smallvec::SmallVec;

use self::snapshot::Snapshot;
use super::roles::{LinkName, Role};
use crate::mutants::{self, Mutant};

/// The number of a place.
pub(super) type Place = usize;

/// A link, as long as it is there: in the order of linking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(super) u64);

/// Where blank envelopes come from.
pub(super) trait Blanks<E> {
    fn take(&mut self, place: Place) -> Option<E>;
    fn count(&self, place: Place) -> usize;
    /// How many there are, wherever they are now.
    fn made(&self, place: Place) -> usize;
    /// How many places there are.
    fn places(&self) -> usize;
    /// This one is counted in what was made there: it was not sent by a user.
    fn is_own(&self, place: Place, envelope: &E) -> bool;
    /// What it holds is known to be lost, with a device that was to write it.
    fn has_failed(&self, envelope: &E) -> bool;
}

/// What a link asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asks {
    /// A producer: a blank, beside a place in the queue.
    pub(super) blank: bool,
    /// It may wait for something else, too, and not take what is there.
    pub(super) stays: bool,
}

/// What a link is given: a blank, or a chunk.
#[derive(Debug)]
pub(super) struct Grant<E, S> {
    pub(super) number: u64,
    /// None: a place in the queue alone.
    pub(super) envelope: Option<E>,
    pub(super) structure: Option<S>,
    /// The chunk's only copy was lost there: the link is given no envelope.
    pub(super) lost: Option<Place>,
}

/// Of a hub whose chunks stay: so many chunks, and so many envelopes, which do not suffice for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooFew {
    pub(super) chunks: usize,
    pub(super) made: usize,
}

impl TooFew {
    /// How many envelopes suffice.
    pub(super) fn needed(self) -> usize {
        self.chunks.saturating_add(1)
    }
}

/// A copy to be enqueued. Both come back with [`State::arrived`].
#[derive(Debug)]
pub(super) struct Move<E> {
    pub(super) number: u64,
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) source: E,
    pub(super) blank: E,
}

/// What is to be done, once no lock is held.
#[derive(Debug)]
pub(super) struct Actions<E> {
    pub(super) moves: Vec<Move<E>>,
    pub(super) wakes: Vec<Arc<Waker>>,
    pub(super) freed: Vec<E>,
    /// Wakers that nothing is to wake any more, to be dropped.
    pub(super) gone: Vec<Arc<Waker>>,
}

impl<E> Default for Actions<E> {
    fn default() -> Self {
        Self { moves: Vec::new(), wakes: Vec::new(), freed: Vec::new(), gone: Vec::new() }
    }
}

#[derive(Debug)]
struct Link {
    role: Role,
    name: LinkName,
    place: Place,
    /// Nobody asks for it any more; what it was given is still out.
    retired: bool,
    /// Chunks are given to it: it is not retired, and data flows to it.
    is_served: bool,
    waits: Option<Waits>,
    /// Whoever wants to hear of the next change, be it what it may.
    watcher: Option<Arc<Waker>>,
    /// When it was served last.
    served: u64,
    /// The chunk that it was given last.
    last: u64,
}

#[derive(Debug)]
struct Waits {
    since: u64,
    waker: Arc<Waker>,
    /// For a blank, beside a place in the queue.
    blank: bool,
    /// It was woken, and has not asked since.
    told: bool,
    /// It could have had what it waits for, and did not take it: it waits for something else, too.
    looked: bool,
}

#[derive(Debug)]
struct Chunk<E, S> {
    number: u64,
    structure: S,
    copies: SmallVec<[Copy<E>; 2]>,
    /// Who has it alone.
    alone: Option<LinkId>,
    /// Copies of it that are being enqueued.
    moving: usize,
    /// Sorted.
    seen: SmallVec<[LinkId; 4]>,
    /// Where a copy of it was lost, if one was.
    lost_at: Option<Place>,
    /// The place of the consumer that it goes to: envelopes there are reserved for it.
    goal: Option<Place>,
    /// The user's own envelope was sent: it is none of the hub's.
    is_sent: bool,
    /// The place of the user's own envelope, which the chunk is to come back into; and that envelope, while no copy lies there.
    returns_to: Option<Place>,
    returns_in: Option<E>,
}

/// Whose turn it is at a chunk that is to be consumed.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// The first of those that are to modify it.
    modify: Option<LinkId>,
    /// One is to peek at it, if none is to modify it.
    peek: bool,
    /// Of a chunk that stays: each link's.
    any: bool,
}

impl Turn {
    fn is_of(&self, id: LinkId, role: Role) -> bool {
        match role {
            _ if self.any => true,
            Role::Modify => self.modify == Some(id),
            Role::Peek => self.modify.is_none(),
            _ => self.modify.is_none() && !self.peek,
        }
    }
}

/// How many links do that, by [`Role`].
#[derive(Clone, Copy, Debug, Default)]
struct Counts([usize; 4]);

impl Counts {
    fn of(&self, role: Role) -> usize {
        self.0[role as usize]
    }

    fn of_readers(&self) -> usize {
        self.of(Role::Consume) + self.of(Role::Peek) + self.of(Role::Modify)
    }

    fn add(&mut self, role: Role) {
        self.0[role as usize] += 1;
    }

    fn remove(&mut self, role: Role) {
        self.0[role as usize] -= 1;
    }
}

#[derive(Debug)]
struct Copy<E> {
    place: Place,
    slot: Slot<E>,
    peeks: usize,
}

#[derive(Debug)]
enum Slot<E> {
    Arriving,
    There(E),
    Lent,
    /// Lost with its device while links peek at it, until they end.
    Lost,
}

/// One more envelope, without which nothing would move any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spare {
    No,
    /// The chunk of this number needs it, at this place, for a link that waits.
    Needed(u64, Place),
    /// It is being allocated.
    Coming,
}

#[cfg(test)]
thread_local! {
    /// How many links were looked at.
    pub(super) static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// See the module.
#[derive(Debug)]
pub(super) struct State<E, S> {
    capacity: usize,
    links: BTreeMap<LinkId, Link>,
    counts: Counts,
    /// Of those that are served.
    served: Counts,
    chunks: VecDeque<Chunk<E, S>>,
    /// Consumed, and still peeked at.
    lingering: Vec<Chunk<E, S>>,
    /// Places of the queue that are a producer's who has not committed yet: the chunk's number, and where its blank is.
    open: Vec<(u64, Option<Place>)>,
    /// Those whom data flows to, if it was said.
    flow: Option<Vec<LinkName>>,
    chunks_made: u64,
    links_made: u64,
    clock: u64,
    /// Wakers that were taken out: dropped by who holds no lock.
    gone: Vec<Arc<Waker>>,
    spare: Spare,
    /// Places whose device is lost.
    lost: SmallVec<[Place; 1]>,
    /// How often a chunk that a link had looked at has gone to another one since one has been taken: by a consumer, where there are
    /// some.
    passed_over: usize,
    /// Envelopes that were lost, for the next time that it settles.
    freed: Vec<E>,
    /// Once there was one.
    had_producer: bool,
    had_reader: bool,
    had_consumer: bool,
    /// Of those whom data flows to.
    flow_had_consumer: bool,
}

impl<E> Copy<E> {
    fn there(&self) -> Option<&E> {
        match &self.slot {
            Slot::There(envelope) => Some(envelope),
            Slot::Arriving | Slot::Lent | Slot::Lost => None,
        }
    }

    fn is_idle(&self) -> bool {
        self.peeks == 0 && self.there().is_some()
    }
}

impl<E, S> Chunk<E, S> {
    fn copy(&self, place: Place) -> Option<&Copy<E>> {
        self.copies.iter().find(|copy| copy.place == place)
    }

    fn is_there(&self, place: Place) -> bool {
        self.copy(place).is_some_and(|copy| copy.there().is_some())
    }

    fn is_seen_by(&self, id: LinkId) -> bool {
        self.seen.binary_search(&id).is_ok()
    }

    fn set_seen(&mut self, id: LinkId, seen: bool) {
        match self.seen.binary_search(&id) {
            Err(at) if seen => self.seen.insert(at, id),
            Ok(at) if !seen => _ = self.seen.remove(at),
            _ => {}
        }
    }

    fn is_peeked(&self) -> bool {
        self.copies.iter().any(|copy| copy.peeks > 0)
    }

    /// Copies that others could be made from.
    fn spare(&self) -> usize {
        self.copies.iter().filter(|copy| copy.there().is_some()).count()
    }

    /// No copy is left: those that there were are lost.
    fn is_lost(&self) -> bool {
        self.lost_at.is_some() && self.alone.is_none() && self.moving == 0 && self.spare() == 0
    }

    /// The copy that lies at that place is lost, if one does.
    fn lose(&mut self, place: Place, freed: &mut Vec<E>) {
        if self.returns_to == Some(place) {
            self.ends_return(freed);
        }
        let Some(at) = self.copies.iter().position(|copy| copy.place == place && copy.there().is_some()) else {
            return;
        };
        if let Slot::There(envelope) = std::mem::replace(&mut self.copies[at].slot, Slot::Lost) {
            freed.push(envelope);
        }
        if self.copies[at].peeks == 0 {
            self.copies.swap_remove(at);
        }
        self.lost_at = Some(place);
    }

    fn remove(&mut self, place: Place, freed: &mut Vec<E>) {
        if let Some(at) = self.copies.iter().position(|copy| copy.place == place)
            && let Slot::There(envelope) = self.copies.swap_remove(at).slot
        {
            self.release(place, envelope, freed);
        }
    }

    /// An envelope of this chunk is not needed at its place: it goes home, unless the chunk is to come back into it.
    fn release(&mut self, place: Place, envelope: E, freed: &mut Vec<E>) {
        if self.returns_to == Some(place) {
            freed.extend(self.returns_in.replace(envelope));
        } else {
            freed.push(envelope);
        }
    }

    /// It has an envelope there, with what it is or was.
    fn has_envelope(&self, place: Place) -> bool {
        self.copy(place).is_some() || (self.returns_to == Some(place) && self.returns_in.is_some())
    }

    /// A clone of an envelope of this chunk goes: under the lock if the chunk has that envelope, which may be taken alone next.
    /// Otherwise it may be the last.
    fn drop_clone(&self, clone: E, freed: &mut Vec<E>)
    where
        E: Deref,
    {
        let is_same = |there: &E| std::ptr::eq(&raw const **there, &raw const *clone);
        if !self.copies.iter().filter_map(Copy::there).any(is_same) {
            freed.push(clone);
        }
    }

    /// It comes back into no envelope any more.
    fn ends_return(&mut self, freed: &mut Vec<E>) {
        self.returns_to = None;
        freed.extend(self.returns_in.take());
    }
}

impl<E: Clone + Deref, S: Clone> State<E, S> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            links: BTreeMap::new(),
            counts: Counts::default(),
            served: Counts::default(),
            chunks: VecDeque::new(),
            lingering: Vec::new(),
            open: Vec::new(),
            flow: None,
            chunks_made: 0,
            links_made: 0,
            clock: 0,
            gone: Vec::new(),
            spare: Spare::No,
            lost: SmallVec::new(),
            passed_over: 0,
            freed: Vec::new(),
            had_producer: false,
            had_reader: false,
            had_consumer: false,
            flow_had_consumer: false,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    // --- links

    /// A new link. `name` of one that is known by more than its number.
    pub(super) fn link(&mut self, role: Role, place: Place, name: Option<LinkName>) -> (LinkId, LinkName) {
        self.links_made += 1;
        let id = LinkId(self.links_made);
        let name = name.unwrap_or(LinkName::Hand(id.0));
        self.had_producer |= role == Role::Produce;
        self.had_reader |= role != Role::Produce;
        self.had_consumer |= role == Role::Consume;
        let is_named = self.flow.as_ref().is_none_or(|flow| flow.contains(&name));
        self.flow_had_consumer |= is_named && role == Role::Consume;
        let is_served = !self.is_lost(place) && is_named;
        self.counts.add(role);
        if is_served {
            self.served.add(role);
        }
        // What is there already is as new to it as to anybody.
        let link =
            Link { role, name, place, retired: false, is_served, waits: None, watcher: None, served: 0, last: 0 };
        self.links.insert(id, link);
        (id, name)
    }

    /// It asks for nothing more, and nothing waits for it.
    pub(super) fn retire(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            link.retired = true;
            if std::mem::replace(&mut link.is_served, false) {
                self.served.remove(link.role);
            }
            let waits = link.waits.take().map(|waits| waits.waker);
            self.gone.extend(waits.into_iter().chain(link.watcher.take()));
        }
    }

    /// It has given back whatever it had.
    pub(super) fn unlink(&mut self, id: LinkId) {
        let link = self.links.remove(&id);
        if let Some(link) = &link {
            self.counts.remove(link.role);
            if link.is_served {
                self.served.remove(link.role);
            }
        }
        self.gone.extend(link.into_iter().flat_map(|link| {
            let waits = link.waits.map(|waits| waits.waker);
            waits.into_iter().chain(link.watcher)
        }));
        self.chunks.iter_mut().for_each(|chunk| chunk.set_seen(id, false));
    }

    /// Data flows to these alone; `None`: as inferred.
    pub(super) fn set_flow(&mut self, flow: Option<Vec<LinkName>>) {
        let names: Option<HashSet<_>> = flow.as_ref().map(|flow| flow.iter().collect());
        self.served = Counts::default();
        self.flow_had_consumer = false;
        for link in self.links.values_mut() {
            let is_named = !link.retired && names.as_ref().is_none_or(|names| names.contains(&link.name));
            self.flow_had_consumer |= is_named && link.role == Role::Consume;
            link.is_served = is_named && !self.lost.contains(&link.place);
            if link.is_served {
                self.served.add(link.role);
            }
        }
        self.flow = flow;
    }

    /// The device of that place is lost. Wakes all links, and drops nothing: envelopes go as it settles.
    pub(super) fn lose(&mut self, place: Place, out: &mut Actions<E>) {
        if self.is_lost(place) {
            return;
        }
        self.wake_all(out);
        out.wakes.extend(self.links.values_mut().filter_map(|link| link.watcher.take()));
        self.lost.push(place);
        for link in self.links.values_mut().filter(|link| link.place == place) {
            if std::mem::replace(&mut link.is_served, false) {
                self.served.remove(link.role);
            }
            self.gone.extend(link.waits.take().map(|waits| waits.waker));
        }
        let chunks = self.chunks.iter_mut().chain(&mut self.lingering);
        chunks.for_each(|chunk| chunk.lose(place, &mut self.freed));
    }

    /// The copy of a chunk at a place cannot be copied from: a device elsewhere was lost while it wrote to it.
    pub(super) fn spoilt(&mut self, number: u64, place: Place) {
        let mut freed = std::mem::take(&mut self.freed);
        if let Some(chunk) = self.find(number) {
            chunk.lose(place, &mut freed);
        }
        self.freed = freed;
    }

    /// Copies that are known to have failed are lost. A failure may become known at any time after the copy was enqueued: so this
    /// comes before a link takes a chunk or gives one back.
    pub(super) fn lose_failed(&mut self, blanks: &impl Blanks<E>) {
        let has_failed = |copy: &&Copy<E>| copy.there().is_some_and(|envelope| blanks.has_failed(envelope));
        for chunk in self.chunks.iter_mut().chain(&mut self.lingering) {
            while let Some(place) = chunk.copies.iter().find(has_failed).map(|copy| copy.place) {
                chunk.lose(place, &mut self.freed);
            }
        }
    }

    pub(super) fn is_lost(&self, place: Place) -> bool {
        self.lost.contains(&place)
    }

    /// Of a chunk whose envelope came back: it may have come to a place that is lost.
    fn lose_again(&mut self, number: u64) {
        for place in self.lost.clone() {
            self.spoilt(number, place);
        }
    }

    /// All links. Tests count how many are looked at.
    fn each(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.links.iter().map(|(id, link)| {
            #[cfg(test)]
            LOOKS.set(LOOKS.get() + 1);
            (*id, link)
        })
    }

    fn of_role(&self, role: Role) -> impl Iterator<Item = (LinkId, &Link)> {
        let links = (self.served.of(role) > 0).then(|| self.each());
        links.into_iter().flatten().filter(move |(_, link)| link.role == role && link.is_served)
    }

    /// Chunks are consumed; otherwise they stay. A hub that has lost its last consuming link, or that of its flow, keeps them for
    /// the next one: links that peek do not begin to go round.
    pub(super) fn consumes(&self) -> bool {
        match self.flow {
            None => self.had_consumer,
            Some(_) => self.flow_had_consumer,
        }
    }

    /// Links of this role that have not had the chunk.
    fn pending<'a>(&'a self, chunk: &'a Chunk<E, S>, role: Role) -> impl Iterator<Item = (LinkId, &'a Link)> {
        self.of_role(role).filter(|(id, _)| !chunk.is_seen_by(*id))
    }

    fn turn(&self, chunk: &Chunk<E, S>) -> Turn {
        if !self.consumes() {
            return Turn { modify: None, peek: false, any: true };
        }
        let modify = self.pending(chunk, Role::Modify).next().map(|(id, _)| id);
        let peek = modify.is_none() && self.pending(chunk, Role::Peek).next().is_some();
        Turn { modify, peek, any: false }
    }

    // --- what becomes of it

    /// A new chunk, in the place of the queue that was taken for it: in the order of taking.
    /// `returns`: to the place of this envelope it comes in this envelope alone.
    pub(super) fn produced(&mut self, number: u64, place: Place, envelope: E, structure: S, returns: bool) {
        let is_sent = self.open.iter().any(|(open, place)| *open == number && place.is_none());
        self.unproduced(number);
        let copies = SmallVec::from_iter([Copy { place, slot: Slot::There(envelope), peeks: 0 }]);
        let at = self.chunks.partition_point(|chunk| chunk.number < number);
        let chunk = Chunk {
            number,
            structure,
            copies,
            alone: None,
            moving: 0,
            seen: SmallVec::new(),
            lost_at: None,
            goal: None,
            is_sent,
            returns_to: returns.then_some(place),
            returns_in: None,
        };
        self.chunks.insert(at, chunk);
        self.lose_again(number);
    }

    /// A place of the queue is given back.
    pub(super) fn unproduced(&mut self, number: u64) {
        self.open.retain(|(open, _)| *open != number);
    }

    fn find(&mut self, number: u64) -> Option<&mut Chunk<E, S>> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number);
        match at {
            Ok(at) => self.chunks.get_mut(at),
            Err(_) => self.lingering.iter_mut().find(|chunk| chunk.number == number),
        }
    }

    /// A chunk has been consumed: its envelope is the link's. Its structure comes back once nobody sees it any more.
    pub(super) fn consumed(&mut self, number: u64, out: &mut Actions<E>) -> Option<S> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()?;
        let mut chunk = self.chunks.remove(at)?;
        chunk.ends_return(&mut out.freed);
        let idle: SmallVec<[Place; 2]> =
            chunk.copies.iter().filter(|copy| copy.peeks == 0).map(|copy| copy.place).collect();
        idle.into_iter().for_each(|place| chunk.remove(place, &mut out.freed));
        if chunk.copies.is_empty() {
            return Some(chunk.structure);
        }
        self.lingering.push(chunk);
        None
    }

    /// A chunk has been modified: the copies at other places are what it was, and so is the structure that is returned.
    pub(super) fn modified(
        &mut self,
        id: LinkId,
        number: u64,
        envelope: E,
        structure: S,
        out: &mut Actions<E>,
    ) -> Option<S> {
        let Some(chunk) = self.find(number) else {
            out.freed.push(envelope);
            return Some(structure);
        };
        chunk.alone = None;
        let old = std::mem::replace(&mut chunk.structure, structure);
        chunk.set_seen(id, true);
        for copy in chunk.copies.drain(..).collect::<SmallVec<[_; 2]>>() {
            match copy.slot {
                Slot::Lent | Slot::Lost => chunk.copies.push(copy),
                Slot::There(_) if mutants::is(Mutant::StaleCopy) => chunk.copies.push(copy),
                Slot::There(old) => chunk.release(copy.place, old, &mut out.freed),
                // Not so: nobody copies what somebody has alone.
                Slot::Arriving => {}
            }
        }
        out.freed.extend(Self::put_back(chunk, envelope));
        self.lose_again(number);
        Some(old)
    }

    /// What was taken alone comes back as it was, or, if `written`, as nobody is to see it, where there is another copy.
    pub(super) fn given_back(&mut self, id: LinkId, number: u64, envelope: E, written: bool, out: &mut Actions<E>) {
        let Some(chunk) = self.find(number) else { return out.freed.push(envelope) };
        chunk.alone = None;
        if written && chunk.spare() > 0 {
            let lent = chunk.copies.iter().position(|copy| matches!(copy.slot, Slot::Lent));
            match lent.map(|at| chunk.copies.swap_remove(at).place) {
                Some(place) => chunk.release(place, envelope, &mut out.freed),
                None => out.freed.push(envelope),
            }
        } else {
            out.freed.extend(Self::put_back(chunk, envelope));
        }
        self.lose_again(number);
        self.come_again(id, number);
    }

    /// Returns the envelope if none was lent.
    fn put_back(chunk: &mut Chunk<E, S>, envelope: E) -> Option<E> {
        match chunk.copies.iter_mut().find(|copy| matches!(copy.slot, Slot::Lent)) {
            Some(copy) => copy.slot = Slot::There(envelope),
            None => return Some(envelope),
        }
        None
    }

    /// The chunk is the link's next once more.
    fn come_again(&mut self, id: LinkId, number: u64) {
        if let Some(link) = self.links.get_mut(&id)
            && link.last == number
        {
            link.last = number - 1;
        }
    }

    /// A peek is over. `unseen`: it never really was. The structure comes back with the last of a chunk that was consumed.
    pub(super) fn peeked(
        &mut self,
        id: LinkId,
        number: u64,
        place: Place,
        envelope: E,
        unseen: bool,
        out: &mut Actions<E>,
    ) -> Option<S> {
        let Some(chunk) = self.find(number) else {
            out.freed.push(envelope);
            return None;
        };
        chunk.drop_clone(envelope, &mut out.freed);
        if unseen {
            chunk.set_seen(id, false);
        }
        let mut over = false;
        if let Some(copy) = chunk.copies.iter_mut().find(|copy| copy.place == place) {
            copy.peeks -= 1;
            over = copy.peeks == 0;
            if over && matches!(copy.slot, Slot::Lost) {
                chunk.remove(place, &mut out.freed);
            }
        }
        let mut structure = None;
        if over && let Some(at) = self.lingering.iter().position(|chunk| chunk.number == number) {
            let chunk = &mut self.lingering[at];
            chunk.remove(place, &mut out.freed);
            if chunk.copies.is_empty() {
                structure = Some(self.lingering.swap_remove(at).structure);
            }
        }
        if unseen {
            self.come_again(id, number);
        }
        structure
    }

    /// A copy has been enqueued: `envelope` is equal to `source` for whoever comes after. `None` if that failed.
    pub(super) fn arrived(&mut self, number: u64, to: Place, source: E, envelope: Option<E>, out: &mut Actions<E>) {
        let Some(chunk) = self.find(number) else {
            out.freed.push(source);
            out.freed.extend(envelope);
            return;
        };
        chunk.drop_clone(source, &mut out.freed);
        chunk.moving -= 1;
        match (envelope, chunk.copies.iter().position(|copy| copy.place == to)) {
            (Some(envelope), Some(at)) => chunk.copies[at].slot = Slot::There(envelope),
            (None, Some(at)) => {
                chunk.copies.swap_remove(at);
                if chunk.returns_to == Some(to) {
                    // That envelope is gone with the copy that failed.
                    chunk.ends_return(&mut out.freed);
                }
            }
            (envelope, None) => out.freed.extend(envelope),
        }
        self.lose_again(number);
    }

    /// True if this link waits for a chunk that needs one more envelope at its place: the caller allocates it with no lock
    /// held, and says [`spare_came`](Self::spare_came) however that ends.
    pub(super) fn claim_spare(&mut self, id: LinkId) -> bool {
        let claims = self.links.get(&id).is_some_and(|link| self.needs_spare(id, link));
        if claims {
            self.spare = Spare::Coming;
        }
        claims
    }

    /// What was claimed has been allocated, or could not be: then another link that waits for it tries.
    pub(super) fn spare_came(&mut self) {
        self.spare = Spare::No;
    }

    #[cfg(test)]
    pub(super) fn copies_of(&self, number: u64) -> Vec<E> {
        let chunks = self.chunks.iter().chain(&self.lingering).filter(|chunk| chunk.number == number);
        chunks.flat_map(|chunk| chunk.copies.iter().filter_map(|copy| copy.there().cloned())).collect()
    }

    // --- for people

    /// Places in the queue.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Chunks in the queue.
    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// What a link does, and where.
    pub(super) fn waits_at(&self, id: LinkId) -> Option<(Role, Place)> {
        let link = self.links.get(&id).filter(|link| link.waits.is_some())?;
        Some((link.role, link.place))
    }

    /// A link that waits would be given what it waits for, if it asked.
    pub(super) fn may_go(&self, id: LinkId, blanks: &impl Blanks<E>) -> bool {
        let waits = |link: &Link| link.waits.as_ref().map(|waits| waits.blank);
        let asked = self.links.get(&id).and_then(|link| Some((link, waits(link)?)));
        asked.is_some_and(|(link, blank)| Snapshot::new(self, blanks).may_go(id, link, blank))
    }

    /// Whom data flows to, if it was said.
    pub(super) fn flow(&self) -> Option<&[LinkName]> {
        self.flow.as_deref()
    }

    /// It was said whom data flows to, and not to this link.
    pub(super) fn is_left_out(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| !link.is_served)
    }

    /// Links of this role, whether data flows to them or not.
    pub(super) fn links_that(&self, role: Role) -> usize {
        self.counts.of(role)
    }

    /// Something can come to lie at that place without a copy: it lies there, or a producer is there.
    pub(super) fn may_lie_at(&self, place: Place) -> bool {
        let lies = self.chunks.iter().any(|chunk| chunk.has_envelope(place));
        lies || self.links.values().any(|link| link.role == Role::Produce && link.place == place)
    }

    /// The number of the chunk that is the link's next, if there is one.
    pub(super) fn next_number(&self, id: LinkId) -> Option<u64> {
        let link = self.links.get(&id)?;
        self.next_for(id, link).map(|at| self.chunks[at].number)
    }

    /// It is the link's turn at its next chunk, and nobody has that: what is missing is an envelope.
    pub(super) fn lacks_envelope(&self, id: LinkId) -> bool {
        let Some(link) = self.links.get(&id) else { return false };
        let chunk = self.next_for(id, link).map(|at| &self.chunks[at]);
        chunk.is_some_and(|chunk| {
            self.turn(chunk).is_of(id, link.role) && chunk.alone.is_none() && chunk.copy(link.place).is_none()
        })
    }
}
