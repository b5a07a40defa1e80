//! The state machine of a chunk hub: which link gets which chunk, which copies are made, and which envelopes are
//! freed.
//!
//! It does not depend on devices, locks or futures. On each event (a link polls, takes, commits, gives back or is
//! dropped; a copy was enqueued; an envelope was returned), [`settle`](ChunkHubState::settle) computes the consequences
//! ([`Actions`]): copies to enqueue, tasks to wake, envelopes to free. The caller carries them out with no lock held.
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
//! A chunk has a copy at any number of places. All copies are equal:
//!
//! ```text
//!   nothing ──bring: a blank is taken──> ARRIVING ──the copy is enqueued──> THERE ──taken alone──> LENT
//!      ^                                                                     │  ^                   │
//!      └──── not needed there, another place was modified, evicted ──────────┘  └─── given back ────┘
//! ```
//!
//! **Where a chunk goes next.** With a consuming link: through every modifying link, in the order of linking; then to
//! every peeking link; then to one that consumes. Without a consuming link it stays, and each link cycles through all
//! chunks. Links are served in the order of their arrival. A peek waits only for modifying links, and for these only
//! on its second turn.
//!
//! **No chunk blocks another for ever.** Chunks are ordered by the age of the blanks that they were made of. A younger
//! chunk takes an envelope only if enough are left for all that the older chunks still need there: for each link that
//! is still to modify or peek, and for one consumer, whose place is the chunk's goal. So at each of these places at
//! least one envelope is left to the chunk itself and to older ones, which leave the hub first. The goal follows
//! waiting consumers only to places where this is true as well; elsewhere a younger chunk could hold the envelope that
//! the older one needs, while it waits for the older one's envelope. If links or the flow of data have changed
//! meanwhile, copies that occupy the envelopes are dropped, or moved to another place if they are the only ones. If no
//! place has a free envelope for that and none is being returned, one more envelope is allocated ([`SpareEnvelope`]),
//! by the waiting link when it polls. This never leaves a place with more envelopes than it was given or the queue has
//! chunks.
//!
//! **Chunks that stay** need an envelope each, and one more to move them if there are several places. A producer of
//! one chunk more than that is [refused](TooFew), wherever the chunks are at that time.
//!
//! **A user's own envelope** is returned to the user once no link needs the chunk there, unless the chunk
//! [returns](ChunkRecord::returns_to) in it: then the envelope is kept beside the chunk, as the blank for the copy that
//! returns.
//!
//! **A lost device.** Its links are no longer served, and no chunk waits for them. Nothing is copied to its place, and
//! the copies there are lost. A chunk without another copy keeps its place in the queue: each link that would get it
//! takes the loss, [`Grant::lost`], instead, and a consumer that does so removes it.
//!
//! A copy that the device was to write at another place is lost, too, as soon as [its failure](Blanks::has_failed) is
//! known: no link is given a chunk that is known to be lost.

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

use self::snapshot::StateSnapshot;
use super::roles::{LinkName, Role};
use crate::mutants::{self, Mutant};

/// The number of a place: the host or a device.
pub(super) type LocationId = usize;

/// The number of a link, in the order of linking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(super) u64);

/// The source of blank envelopes.
pub(super) trait Blanks<E> {
    fn take(&mut self, place: LocationId) -> Option<E>;
    fn count(&self, place: LocationId) -> usize;
    /// The number of envelopes there, free or in use.
    fn total(&self, place: LocationId) -> usize;
    fn places(&self) -> usize;
    /// Whether the envelope was allocated by the hub there, as opposed to sent by a user.
    fn is_own(&self, place: LocationId, envelope: &E) -> bool;
    /// Whether its content is known to be lost, with a device that was to write it.
    fn has_failed(&self, envelope: &E) -> bool;
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PollRequest {
    /// For a producer: a blank, in addition to a place in the queue.
    pub(super) blank: bool,
    /// The link might also be waiting for something else, and then does not take what is available.
    pub(super) stays: bool,
}

/// A blank or a chunk that is given to a link.
#[derive(Debug)]
pub(super) struct Grant<E, S> {
    pub(super) number: u64,
    /// `None`: only a place in the queue.
    pub(super) envelope: Option<E>,
    pub(super) structure: Option<S>,
    /// The chunk's only copy was lost there: the link gets no envelope.
    pub(super) lost: Option<LocationId>,
}

/// For a hub whose chunks stay: the number of chunks, and the number of envelopes, which are too few for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooFew {
    pub(super) chunks: usize,
    pub(super) envelopes: usize,
}

impl TooFew {
    /// The number of envelopes that is enough.
    pub(super) fn needed(self) -> usize {
        self.chunks.saturating_add(1)
    }
}

/// A copy to enqueue. Both envelopes are returned with [`ChunkHubState::arrived`].
#[derive(Debug)]
pub(super) struct Move<E> {
    pub(super) number: u64,
    pub(super) from: LocationId,
    pub(super) to: LocationId,
    pub(super) source: E,
    pub(super) blank: E,
}

/// The actions to carry out once no lock is held.
#[derive(Debug)]
pub(super) struct Actions<E> {
    pub(super) moves: Vec<Move<E>>,
    pub(super) wakes: Vec<Arc<Waker>>,
    pub(super) freed: Vec<E>,
    /// Wakers that are no longer needed, to be dropped.
    pub(super) gone: Vec<Arc<Waker>>,
}

impl<E> Default for Actions<E> {
    fn default() -> Self {
        Self { moves: Vec::new(), wakes: Vec::new(), freed: Vec::new(), gone: Vec::new() }
    }
}

#[derive(Debug)]
struct LinkRecord {
    role: Role,
    name: LinkName,
    place: LocationId,
    /// The link is dropped, but chunks that it was given are still in use.
    retired: bool,
    /// Chunks are given to it: it is not retired, and data flows to it.
    is_served: bool,
    waits: Option<LinkWait>,
    /// Woken by the next change of any kind.
    watcher: Option<Arc<Waker>>,
    /// When it was last served.
    served: u64,
    /// The chunk that it was last given.
    last: u64,
}

#[derive(Debug)]
struct LinkWait {
    since: u64,
    waker: Arc<Waker>,
    /// For a blank, in addition to a place in the queue.
    blank: bool,
    /// The link was woken, and has not polled since.
    woken: bool,
    /// The link was offered a chunk or blank. If it has not taken it, the link also waits for something else.
    offered: bool,
}

#[derive(Debug)]
struct ChunkRecord<E, S> {
    number: u64,
    structure: S,
    copies: SmallVec<[ChunkCopy<E>; 2]>,
    /// The link that has exclusive access.
    held_by: Option<LinkId>,
    moving: usize,
    /// Sorted.
    seen: SmallVec<[LinkId; 4]>,
    /// Where a copy of it was lost, if one was.
    lost_at: Option<LocationId>,
    /// The place of the consumer that it goes to: envelopes there are reserved for it.
    goal: Option<LocationId>,
    /// It was sent in the user's own envelope, which does not count as the hub's.
    is_sent: bool,
    /// The place of the user's own envelope, in which the chunk returns.
    returns_to: Option<LocationId>,
    /// That envelope, while it holds no copy.
    returns_in: Option<E>,
}

/// The links that may take a chunk next.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// The first link that is still to modify the chunk.
    modify: Option<LinkId>,
    /// A link is still to peek at the chunk, and none is to modify it.
    peek: bool,
    /// For a chunk that stays: any link.
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

#[derive(Clone, Copy, Debug, Default)]
struct RoleCounts([usize; 4]);

impl RoleCounts {
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
struct ChunkCopy<E> {
    place: LocationId,
    slot: CopyState<E>,
    peeks: usize,
}

#[derive(Debug)]
enum CopyState<E> {
    Arriving,
    There(E),
    Lent,
    /// Lost with its device while links peek at it; kept until the peeks end.
    Lost,
}

/// The state of the one additional envelope that is allocated when no chunk can move without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpareEnvelope {
    No,
    /// The chunk of this number needs it, at this place, for a waiting link.
    Needed(u64, LocationId),
    /// It is being allocated.
    Coming,
}

#[cfg(test)]
thread_local! {
    pub(super) static VISITS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// See the module.
#[derive(Debug)]
pub(super) struct ChunkHubState<E, S> {
    capacity: usize,
    links: BTreeMap<LinkId, LinkRecord>,
    counts: RoleCounts,
    /// Of the links that are served.
    served: RoleCounts,
    chunks: VecDeque<ChunkRecord<E, S>>,
    /// Consumed, and still peeked at.
    lingering: Vec<ChunkRecord<E, S>>,
    /// Places in the queue of producers that have not committed yet: the chunk's number, and where its blank is.
    open: Vec<(u64, Option<LocationId>)>,
    /// The links that data is restricted to by `flow_to`.
    flow: Option<Vec<LinkName>>,
    chunks_made: u64,
    links_made: u64,
    clock: u64,
    /// Wakers that were removed, to be dropped with no lock held.
    gone: Vec<Arc<Waker>>,
    spare: SpareEnvelope,
    lost: SmallVec<[LocationId; 1]>,
    /// How often a chunk that had been offered to a link went to another link since a chunk was last taken (by a
    /// consumer, if there are any).
    passed_over: usize,
    /// Lost envelopes, to be freed by the next `settle`.
    freed: Vec<E>,
    /// Whether there has ever been such a link.
    had_producer: bool,
    had_reader: bool,
    had_consumer: bool,
    /// Whether there has ever been a consumer among the links that data flows to.
    flow_had_consumer: bool,
}

impl<E> ChunkCopy<E> {
    fn there(&self) -> Option<&E> {
        match &self.slot {
            CopyState::There(envelope) => Some(envelope),
            CopyState::Arriving | CopyState::Lent | CopyState::Lost => None,
        }
    }

    fn is_idle(&self) -> bool {
        self.peeks == 0 && self.there().is_some()
    }
}

impl<E, S> ChunkRecord<E, S> {
    fn copy(&self, place: LocationId) -> Option<&ChunkCopy<E>> {
        self.copies.iter().find(|copy| copy.place == place)
    }

    fn is_there(&self, place: LocationId) -> bool {
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

    /// The number of copies that others could be made from.
    fn spare(&self) -> usize {
        self.copies.iter().filter(|copy| copy.there().is_some()).count()
    }

    /// No copy is left, since they were lost.
    fn is_lost(&self) -> bool {
        self.lost_at.is_some() && self.held_by.is_none() && self.moving == 0 && self.spare() == 0
    }

    /// Drops the copy at that place, if there is one, as lost.
    fn lose(&mut self, place: LocationId, freed: &mut Vec<E>) {
        if self.returns_to == Some(place) {
            self.ends_return(freed);
        }
        let Some(at) = self.copies.iter().position(|copy| copy.place == place && copy.there().is_some()) else {
            return;
        };
        if let CopyState::There(envelope) = std::mem::replace(&mut self.copies[at].slot, CopyState::Lost) {
            freed.push(envelope);
        }
        if self.copies[at].peeks == 0 {
            self.copies.swap_remove(at);
        }
        self.lost_at = Some(place);
    }

    fn remove(&mut self, place: LocationId, freed: &mut Vec<E>) {
        if let Some(at) = self.copies.iter().position(|copy| copy.place == place)
            && let CopyState::There(envelope) = self.copies.swap_remove(at).slot
        {
            self.release(place, envelope, freed);
        }
    }

    /// Called when an envelope of this chunk is no longer needed at its place. Frees it, unless the chunk
    /// returns in it.
    fn release(&mut self, place: LocationId, envelope: E, freed: &mut Vec<E>) {
        if self.returns_to == Some(place) {
            freed.extend(self.returns_in.replace(envelope));
        } else {
            freed.push(envelope);
        }
    }

    /// Whether it has an envelope there, with its present or former content.
    fn has_envelope(&self, place: LocationId) -> bool {
        self.copy(place).is_some() || (self.returns_to == Some(place) && self.returns_in.is_some())
    }

    /// Drops a clone of an envelope of this chunk. If the chunk has that envelope, the clone is dropped under the
    /// lock, since the envelope may be taken exclusively next. Otherwise the clone may be the last reference, and is
    /// freed later.
    fn drop_clone(&self, clone: E, freed: &mut Vec<E>)
    where
        E: Deref,
    {
        let is_same = |there: &E| std::ptr::eq(&raw const **there, &raw const *clone);
        if !self.copies.iter().filter_map(ChunkCopy::there).any(is_same) {
            freed.push(clone);
        }
    }

    /// Ends its return into the user's envelope.
    fn ends_return(&mut self, freed: &mut Vec<E>) {
        self.returns_to = None;
        freed.extend(self.returns_in.take());
    }
}

impl<E: Clone + Deref, S: Clone> ChunkHubState<E, S> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            links: BTreeMap::new(),
            counts: RoleCounts::default(),
            served: RoleCounts::default(),
            chunks: VecDeque::new(),
            lingering: Vec::new(),
            open: Vec::new(),
            flow: None,
            chunks_made: 0,
            links_made: 0,
            clock: 0,
            gone: Vec::new(),
            spare: SpareEnvelope::No,
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

    /// Registers a new link. `name`: for a link that is identified by more than its number.
    pub(super) fn link(&mut self, role: Role, place: LocationId, name: Option<LinkName>) -> (LinkId, LinkName) {
        self.links_made += 1;
        let id = LinkId(self.links_made);
        let name = name.unwrap_or(LinkName::Standalone(id.0));
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
        // The link also gets chunks that are already in the hub.
        let link =
            LinkRecord { role, name, place, retired: false, is_served, waits: None, watcher: None, served: 0, last: 0 };
        self.links.insert(id, link);
        (id, name)
    }

    /// Called when the link is dropped: it takes nothing more, and no chunk waits for it.
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

    /// Removes a link that has returned everything it was given.
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

    /// Restricts the flow of data to these links; `None`: to all.
    pub(super) fn set_flow(&mut self, flow: Option<Vec<LinkName>>) {
        let names: Option<HashSet<_>> = flow.as_ref().map(|flow| flow.iter().collect());
        self.served = RoleCounts::default();
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

    /// Handles the loss of the device at `place`. Wakes all links, and drops nothing: envelopes are freed by `settle`.
    pub(super) fn lose(&mut self, place: LocationId, out: &mut Actions<E>) {
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

    /// Drops the copy of a chunk at a place: another device was lost while it wrote this copy.
    pub(super) fn lose_copy(&mut self, number: u64, place: LocationId) {
        let mut freed = std::mem::take(&mut self.freed);
        if let Some(chunk) = self.find(number) {
            chunk.lose(place, &mut freed);
        }
        self.freed = freed;
    }

    /// Drops copies that are known to have failed. A failure may become known at any time after the copy was
    /// enqueued, so this is called before a link takes a chunk or gives one back.
    pub(super) fn lose_failed(&mut self, blanks: &impl Blanks<E>) {
        let has_failed = |copy: &&ChunkCopy<E>| copy.there().is_some_and(|envelope| blanks.has_failed(envelope));
        for chunk in self.chunks.iter_mut().chain(&mut self.lingering) {
            while let Some(place) = chunk.copies.iter().find(has_failed).map(|copy| copy.place) {
                chunk.lose(place, &mut self.freed);
            }
        }
    }

    pub(super) fn is_lost(&self, place: LocationId) -> bool {
        self.lost.contains(&place)
    }

    /// Called for a chunk whose envelope has been returned, possibly to a place that is lost.
    fn lose_again(&mut self, number: u64) {
        for place in self.lost.clone() {
            self.lose_copy(number, place);
        }
    }

    /// All links. Tests count the visits.
    fn each(&self) -> impl Iterator<Item = (LinkId, &LinkRecord)> {
        self.links.iter().map(|(id, link)| {
            #[cfg(test)]
            VISITS.set(VISITS.get() + 1);
            (*id, link)
        })
    }

    fn of_role(&self, role: Role) -> impl Iterator<Item = (LinkId, &LinkRecord)> {
        let links = (self.served.of(role) > 0).then(|| self.each());
        links.into_iter().flatten().filter(move |(_, link)| link.role == role && link.is_served)
    }

    /// Whether chunks are consumed; otherwise they stay. A hub that has lost its last consuming link, or the last one
    /// that data flows to, keeps its chunks for the next one: peeking links do not begin to cycle.
    pub(super) fn consumes(&self) -> bool {
        match self.flow {
            None => self.had_consumer,
            Some(_) => self.flow_had_consumer,
        }
    }

    /// Links of this role that have not had the chunk.
    fn pending<'a>(
        &'a self,
        chunk: &'a ChunkRecord<E, S>,
        role: Role,
    ) -> impl Iterator<Item = (LinkId, &'a LinkRecord)> {
        self.of_role(role).filter(|(id, _)| !chunk.is_seen_by(*id))
    }

    fn turn(&self, chunk: &ChunkRecord<E, S>) -> Turn {
        if !self.consumes() {
            return Turn { modify: None, peek: false, any: true };
        }
        let modify = self.pending(chunk, Role::Modify).next().map(|(id, _)| id);
        let peek = modify.is_none() && self.pending(chunk, Role::Peek).next().is_some();
        Turn { modify, peek, any: false }
    }

    // --- the end of a grant

    /// Adds a new chunk in the place of the queue that was taken for it: in the order of taking. `returns`: the chunk
    /// returns to the place of this envelope only in this envelope.
    pub(super) fn produced(&mut self, number: u64, place: LocationId, envelope: E, structure: S, returns: bool) {
        let is_sent = self.open.iter().any(|(open, place)| *open == number && place.is_none());
        self.unproduced(number);
        let copies = SmallVec::from_iter([ChunkCopy { place, slot: CopyState::There(envelope), peeks: 0 }]);
        let at = self.chunks.partition_point(|chunk| chunk.number < number);
        let chunk = ChunkRecord {
            number,
            structure,
            copies,
            held_by: None,
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

    /// Gives a place in the queue back.
    pub(super) fn unproduced(&mut self, number: u64) {
        self.open.retain(|(open, _)| *open != number);
    }

    fn find(&mut self, number: u64) -> Option<&mut ChunkRecord<E, S>> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number);
        match at {
            Ok(at) => self.chunks.get_mut(at),
            Err(_) => self.lingering.iter_mut().find(|chunk| chunk.number == number),
        }
    }

    /// Removes a chunk that was consumed, whose envelope belongs to the link now. Returns its structure once no link
    /// sees the chunk any more.
    pub(super) fn consumed(&mut self, number: u64, out: &mut Actions<E>) -> Option<S> {
        let at = self.chunks.binary_search_by_key(&number, |chunk| chunk.number).ok()?;
        let mut chunk = self.chunks.remove(at)?;
        chunk.ends_return(&mut out.freed);
        let idle: SmallVec<[LocationId; 2]> =
            chunk.copies.iter().filter(|copy| copy.peeks == 0).map(|copy| copy.place).collect();
        idle.into_iter().for_each(|place| chunk.remove(place, &mut out.freed));
        if chunk.copies.is_empty() {
            return Some(chunk.structure);
        }
        self.lingering.push(chunk);
        None
    }

    /// Publishes a modified chunk. Frees the outdated copies at other places, and returns the outdated structure.
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
        chunk.held_by = None;
        let old = std::mem::replace(&mut chunk.structure, structure);
        chunk.set_seen(id, true);
        for copy in chunk.copies.drain(..).collect::<SmallVec<[_; 2]>>() {
            match copy.slot {
                CopyState::Lent | CopyState::Lost => chunk.copies.push(copy),
                CopyState::There(_) if mutants::is(Mutant::StaleCopy) => chunk.copies.push(copy),
                CopyState::There(old) => chunk.release(copy.place, old, &mut out.freed),
                // Unreachable: a chunk that is held exclusively is not copied.
                CopyState::Arriving => {}
            }
        }
        out.freed.extend(Self::put_back(chunk, envelope));
        self.lose_again(number);
        Some(old)
    }

    /// Takes back a chunk that a link held exclusively, unchanged or `written`. The written data is discarded if there
    /// is another copy.
    pub(super) fn given_back(&mut self, id: LinkId, number: u64, envelope: E, written: bool, out: &mut Actions<E>) {
        let Some(chunk) = self.find(number) else { return out.freed.push(envelope) };
        chunk.held_by = None;
        if written && chunk.spare() > 0 {
            let lent = chunk.copies.iter().position(|copy| matches!(copy.slot, CopyState::Lent));
            match lent.map(|at| chunk.copies.swap_remove(at).place) {
                Some(place) => chunk.release(place, envelope, &mut out.freed),
                None => out.freed.push(envelope),
            }
        } else {
            out.freed.extend(Self::put_back(chunk, envelope));
        }
        self.lose_again(number);
        self.offer_again(id, number);
    }

    /// Returns the envelope if none was lent.
    fn put_back(chunk: &mut ChunkRecord<E, S>, envelope: E) -> Option<E> {
        match chunk.copies.iter_mut().find(|copy| matches!(copy.slot, CopyState::Lent)) {
            Some(copy) => copy.slot = CopyState::There(envelope),
            None => return Some(envelope),
        }
        None
    }

    /// Makes the chunk the link's next again.
    fn offer_again(&mut self, id: LinkId, number: u64) {
        if let Some(link) = self.links.get_mut(&id)
            && link.last == number
        {
            link.last = number - 1;
        }
    }

    /// Ends a peek. `unseen`: it does not count. The last peek at a chunk that was consumed returns its structure.
    pub(super) fn peeked(
        &mut self,
        id: LinkId,
        number: u64,
        place: LocationId,
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
            if over && matches!(copy.slot, CopyState::Lost) {
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
            self.offer_again(id, number);
        }
        structure
    }

    /// Called when a copy was enqueued: `envelope` equals `source` for all later users. It is `None` if the enqueue
    /// failed.
    pub(super) fn arrived(
        &mut self,
        number: u64,
        to: LocationId,
        source: E,
        envelope: Option<E>,
        out: &mut Actions<E>,
    ) {
        let Some(chunk) = self.find(number) else {
            out.freed.push(source);
            out.freed.extend(envelope);
            return;
        };
        chunk.drop_clone(source, &mut out.freed);
        chunk.moving -= 1;
        match (envelope, chunk.copies.iter().position(|copy| copy.place == to)) {
            (Some(envelope), Some(at)) => chunk.copies[at].slot = CopyState::There(envelope),
            (None, Some(at)) => {
                chunk.copies.swap_remove(at);
                if chunk.returns_to == Some(to) {
                    // That envelope is lost with the failed copy.
                    chunk.ends_return(&mut out.freed);
                }
            }
            (envelope, None) => out.freed.extend(envelope),
        }
        self.lose_again(number);
    }

    /// Whether this link waits for a chunk that needs one more envelope at its place. The caller then allocates it
    /// with no lock held, and calls [`spare_came`](Self::spare_came) in any case.
    pub(super) fn claim_spare(&mut self, id: LinkId) -> bool {
        let claims = self.links.get(&id).is_some_and(|link| self.needs_spare(id, link));
        if claims {
            self.spare = SpareEnvelope::Coming;
        }
        claims
    }

    /// Called when the claimed envelope was allocated, or could not be: then another waiting link tries.
    pub(super) fn spare_came(&mut self) {
        self.spare = SpareEnvelope::No;
    }

    #[cfg(test)]
    pub(super) fn copies_of(&self, number: u64) -> Vec<E> {
        let chunks = self.chunks.iter().chain(&self.lingering).filter(|chunk| chunk.number == number);
        chunks.flat_map(|chunk| chunk.copies.iter().filter_map(|copy| copy.there().cloned())).collect()
    }

    // --- for messages

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(super) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// The role and the place of a link that waits.
    pub(super) fn waits_at(&self, id: LinkId) -> Option<(Role, LocationId)> {
        let link = self.links.get(&id).filter(|link| link.waits.is_some())?;
        Some((link.role, link.place))
    }

    /// Whether a waiting link would get what it waits for if it polled.
    pub(super) fn may_proceed(&self, id: LinkId, blanks: &impl Blanks<E>) -> bool {
        let waits = |link: &LinkRecord| link.waits.as_ref().map(|waits| waits.blank);
        let asked = self.links.get(&id).and_then(|link| Some((link, waits(link)?)));
        asked.is_some_and(|(link, blank)| StateSnapshot::new(self, blanks).may_proceed(id, link, blank))
    }

    pub(super) fn flow(&self) -> Option<&[LinkName]> {
        self.flow.as_deref()
    }

    /// Whether data does not flow to this link.
    pub(super) fn is_excluded(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| !link.is_served)
    }

    pub(super) fn link_count(&self, role: Role) -> usize {
        self.counts.of(role)
    }

    /// Whether data can get to `place` without a copy, because a chunk or a producer is there.
    pub(super) fn has_source_at(&self, place: LocationId) -> bool {
        let lies = self.chunks.iter().any(|chunk| chunk.has_envelope(place));
        lies || self.links.values().any(|link| link.role == Role::Produce && link.place == place)
    }

    /// The number of the link's next chunk, if there is one.
    pub(super) fn next_number(&self, id: LinkId) -> Option<u64> {
        let link = self.links.get(&id)?;
        self.next_for(id, link).map(|at| self.chunks[at].number)
    }

    /// Whether it is the link's turn at its next chunk, no other link has it, and only an envelope is missing.
    pub(super) fn lacks_envelope(&self, id: LinkId) -> bool {
        let Some(link) = self.links.get(&id) else { return false };
        let chunk = self.next_for(id, link).map(|at| &self.chunks[at]);
        chunk.is_some_and(|chunk| {
            self.turn(chunk).is_of(id, link.role) && chunk.held_by.is_none() && chunk.copy(link.place).is_none()
        })
    }
}
