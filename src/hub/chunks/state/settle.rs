//! What follows from what has happened: copies, wakes, envelopes that go.
//!
//! ```text
//!   settle ──> wanted: the oldest chunk first ──bring──> a blank: a copy is enqueued
//!                                                └─────> none: make room, if a link waits
//!                                                            └──> none anywhere, and nothing moves: one more envelope
//!          ──> trim: copies that nobody needs go home
//!          ──> wake: those who may go, who came first first
//! ```

use smallvec::SmallVec;

use super::{
    Actions, Blanks, Chunk, Copy, Link, LinkId, Move, Place, Role, Slot, Spare, State, Waits, snapshot::Snapshot,
};

/// A chunk is wanted at a place.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    chunk: usize,
    place: Place,
    /// By one who waits.
    demanded: bool,
}

/// Chunks, and the places where links wait for them.
type Demands = SmallVec<[(usize, Place); 4]>;

impl<E: Clone, S: Clone> State<E, S> {
    /// Says what follows from what has happened.
    pub(in crate::hub::chunks) fn settle(&mut self, blanks: &mut impl Blanks<E>, out: &mut Actions<E>) {
        out.freed.append(&mut self.freed);
        let mut lacking = None;
        let demands = self.demands();
        for Wanted { chunk, place, demanded } in self.wanted(&demands) {
            self.bring(chunk, place, demanded.then_some(&demands), blanks, out);
            if demanded && lacking.is_none() && self.chunks[chunk].copy(place).is_none() && blanks.count(place) == 0 {
                lacking = Some((chunk, place));
            }
        }
        // After that: a copy that was made to make room elsewhere has served by now.
        self.trim(out);
        self.clear_for_producers(&demands, blanks, out);
        if self.spare != Spare::Coming {
            let stuck = lacking.filter(|(at, place)| !self.is_used_before(*at, *place) && self.is_at_rest(blanks));
            self.spare = stuck.map_or(Spare::No, |(at, place)| Spare::Needed(self.chunks[at].number, place));
        }
        out.wakes.extend(self.links.values_mut().filter_map(|link| link.watcher.take()));
        self.wake(blanks, out, |state, snapshot, id, link, waits| {
            let may_go = || snapshot.may_go(id, link, waits.blank) || state.needs_spare(id, link);
            state.has_ended(id, blanks) || (!waits.told && may_go())
        });
    }

    /// Wakes those that wait, and are due: of those that were not woken yet, or have looked since and taken nothing. The one that
    /// came first is woken first.
    pub(super) fn wake<B: Blanks<E>>(
        &mut self,
        blanks: &B,
        out: &mut Actions<E>,
        is_due: impl Fn(&Self, &Snapshot<'_, E, S, B>, LinkId, &Link, &Waits) -> bool,
    ) {
        let snapshot = Snapshot::new(self, blanks);
        let due = |(id, link): (LinkId, &Link)| {
            let waits = link.waits.as_ref().filter(|waits| !waits.told || waits.looked)?;
            is_due(self, &snapshot, id, link, waits).then_some((waits.since, id))
        };
        let mut due: SmallVec<[(u64, LinkId); 4]> = self.each().filter_map(due).collect();
        due.sort_unstable();
        for (_, id) in due {
            if let Some(waits) = self.links.get_mut(&id).and_then(|link| link.waits.as_mut()) {
                (waits.told, waits.looked) = (true, false);
                out.wakes.push(waits.waker.clone());
            }
        }
    }

    /// Whether any link waits.
    pub(in crate::hub::chunks) fn has_waiters(&self) -> bool {
        self.links.values().any(|link| link.waits.is_some())
    }

    /// Wakes all, to look again whatever they wait for.
    pub(in crate::hub::chunks) fn wake_all(&mut self, out: &mut Actions<E>) {
        let waits = self.links.values().filter_map(|link| link.waits.as_ref());
        out.wakes.extend(waits.map(|waits| waits.waker.clone()));
    }

    /// The consumer that a chunk goes to: of those that wait one that is where it lies, or that has waited longest; of the
    /// others the same. One that has looked and taken nothing is among the others.
    fn consumer(&self, chunk: &Chunk<E, S>) -> Option<Place> {
        let rank = |link: &Link| {
            let since = link.waits.as_ref().filter(|waits| !waits.looked).map(|waits| waits.since);
            (since.is_none(), chunk.copy(link.place).is_none(), since)
        };
        self.of_role(Role::Consume).min_by_key(|(_, link)| rank(link)).map(|(_, link)| link.place)
    }

    /// Where a chunk that is to be consumed is wanted next: each place once.
    pub(super) fn next_places(&self, chunk: &Chunk<E, S>) -> SmallVec<[Place; 4]> {
        if let Some((_, link)) = self.pending(chunk, Role::Modify).next() {
            return SmallVec::from_iter([link.place]);
        }
        let mut places = SmallVec::new();
        let peeks = self.pending(chunk, Role::Peek).map(|(_, link)| link.place);
        for place in peeks.chain(self.consumer(chunk)) {
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Envelopes at a place that chunks before this one will still need.
    pub(super) fn reserved(&self, before: usize, place: Place) -> usize {
        if !self.consumes() {
            return 0;
        }
        let needs = |chunk: &&Chunk<E, S>| {
            let is_consumed =
                chunk.alone.and_then(|id| self.links.get(&id)).is_some_and(|link| link.role == Role::Consume);
            let roles = [Role::Modify, Role::Peek].into_iter().flat_map(|role| self.pending(chunk, role));
            let mut places = roles.map(|(_, link)| link.place).chain(self.consumer(chunk));
            !is_consumed && !chunk.is_lost() && chunk.copy(place).is_none() && places.any(|needed| needed == place)
        };
        let older = self.chunks.iter().take(before).filter(needs).count();
        let next = self.chunks.get(before).map_or(u64::MAX, |chunk| chunk.number);
        let to_come = self.open.iter().filter(|(number, at)| *number < next && *at != Some(place)).count();
        let is_read = || self.each().any(|(_, link)| link.role != Role::Produce && link.place == place);
        older + if to_come > 0 && is_read() { to_come } else { 0 }
    }

    /// Copies that nobody needs any more go home. Until a modification is committed all others stay: it may be given up.
    fn trim(&mut self, out: &mut Actions<E>) {
        if !self.consumes() {
            return;
        }
        for at in 0..self.chunks.len() {
            let chunk = &self.chunks[at];
            if chunk.copies.len() < 2 || chunk.alone.is_some() || chunk.moving > 0 {
                continue;
            }
            let wanted = self.next_places(chunk);
            let modified = self.pending(chunk, Role::Modify).next().is_some();
            if modified || !wanted.iter().any(|place| chunk.is_there(*place)) {
                continue;
            }
            let idle = chunk.copies.iter().filter(|copy| copy.is_idle() && !wanted.contains(&copy.place));
            let idle: SmallVec<[Place; 2]> = idle.map(|copy| copy.place).collect();
            idle.into_iter().for_each(|place| self.chunks[at].remove(place, &mut out.freed));
        }
    }

    /// The chunks that links wait for, and where: each once, by the link that came first.
    fn demands(&self) -> Demands {
        let mut waiting: SmallVec<[(usize, Place, u64); 4]> = SmallVec::new();
        for (id, link) in self.each() {
            if let Some(waits) = link.waits.as_ref().filter(|waits| !waits.looked && link.role != Role::Produce)
                && let Some(at) = self.next_for(id, link)
            {
                waiting.push((at, link.place, waits.since));
            }
        }
        waiting.sort_unstable();
        waiting.dedup_by_key(|(at, place, _)| (*at, *place));
        waiting.sort_unstable_by_key(|(.., since)| *since);
        waiting.into_iter().map(|(at, place, _)| (at, place)).collect()
    }

    /// Where chunks are wanted and are not, the most urgent first.
    fn wanted(&self, demands: &Demands) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        if self.consumes() {
            for (at, chunk) in self.chunks.iter().enumerate() {
                for place in self.next_places(chunk) {
                    let demanded = demands.contains(&(at, place));
                    wanted.push(Wanted { chunk: at, place, demanded });
                }
            }
        } else {
            wanted.extend(demands.iter().map(|(chunk, place)| Wanted { chunk: *chunk, place: *place, demanded: true }));
            // Whoever goes round them and is at work on one has another one coming; not in the envelope that a producer waits
            // for, which would be taken from there again, and again.
            let starving = self.starving();
            let reads_ahead =
                |link: &Link| link.role != Role::Produce && link.served > 0 && !starving.contains(&link.place);
            for (id, link) in self.each().filter(|(_, link)| reads_ahead(link)) {
                if let Some(at) = self.next_for(id, link).filter(|at| self.chunks[*at].number != link.last) {
                    wanted.push(Wanted { chunk: at, place: link.place, demanded: false });
                }
            }
        }
        wanted.retain(|wanted| {
            let chunk = &self.chunks[wanted.chunk];
            chunk.copy(wanted.place).is_none() && !chunk.is_lost()
        });
        wanted
    }

    /// Takes a blank for a copy of a chunk at a place, if there is one. `demands` of a chunk that a link waits for there.
    fn bring(
        &mut self,
        at: usize,
        place: Place,
        demands: Option<&Demands>,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) {
        let chunk = &self.chunks[at];
        if chunk.alone.is_some() || chunk.copy(place).is_some() {
            return;
        }
        let Some((from, source)) = chunk.copies.iter().find_map(|copy| Some((copy.place, copy.there()?.clone())))
        else {
            return;
        };
        let left = blanks.count(place);
        // How many are reserved takes a while to find out.
        if left == 0 || left <= self.reserved(at, place) {
            if let Some(demands) = demands.filter(|_| left == 0) {
                drop(source);
                self.make_room(at, place, demands, blanks, out);
            }
            return;
        }
        let Some(blank) = blanks.take(place) else { return };
        let chunk = &mut self.chunks[at];
        chunk.copies.push(Copy { place, slot: Slot::Arriving, peeks: 0 });
        chunk.moving += 1;
        out.moves.push(Move { number: chunk.number, from, to: place, source, blank });
    }

    /// Somebody waits for a chunk at a place all of whose envelopes other chunks have: the copy of one that nobody wants
    /// there goes, or moves elsewhere if it is the only one.
    fn make_room(
        &mut self,
        for_chunk: usize,
        place: Place,
        demands: &Demands,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) {
        let in_the_way = |at: &usize| {
            let chunk = &self.chunks[*at];
            let idle = chunk.alone.is_none() && chunk.moving == 0 && chunk.copy(place).is_some_and(Copy::is_idle);
            let wanted = if self.consumes() {
                *at < for_chunk && self.next_places(chunk).contains(&place)
            } else {
                demands.contains(&(*at, place))
            };
            *at != for_chunk && idle && !wanted
        };
        // One that is on its way out already makes the room.
        let moves_out = |chunk: &Chunk<E, S>| chunk.moving > 0 && chunk.is_there(place);
        if self.chunks.iter().any(moves_out) {
            return;
        }
        // Of the youngest: it is wanted last.
        let Some(at) = (0..self.chunks.len()).rev().find(in_the_way) else { return };
        if self.chunks[at].spare() > 1 {
            return self.chunks[at].remove(place, &mut out.freed);
        }
        let has_room = |other: &Place| {
            let left = blanks.count(*other);
            *other != place && !self.is_lost(*other) && left > 0 && left > self.reserved(at, *other)
        };
        if let Some(elsewhere) = (0..blanks.places()).find(has_room) {
            self.bring(at, elsewhere, None, blanks, out);
        }
    }

    /// A chunk that comes before this one lies there. It goes on as soon as the links that are to have it ask, and is helped
    /// first if it is stuck itself.
    fn is_used_before(&self, before: usize, place: Place) -> bool {
        self.consumes() && self.chunks.iter().take(before).any(|chunk| chunk.copy(place).is_some())
    }

    /// Nothing changes until a link asks, or commits, for another reason: every envelope is at home or in a chunk that no link
    /// has, and no link that waits can go on.
    fn is_at_rest(&self, blanks: &impl Blanks<E>) -> bool {
        let is_idle =
            |chunk: &Chunk<E, S>| chunk.alone.is_none() && chunk.moving == 0 && chunk.copies.iter().all(Copy::is_idle);
        if !self.open.is_empty() || !self.lingering.is_empty() || !self.chunks.iter().all(is_idle) {
            return false;
        }
        let lie_at = |place: Place| {
            let lies = |chunk: &&Chunk<E, S>| {
                let envelope = chunk.copy(place).and_then(Copy::there);
                envelope.is_some_and(|envelope| blanks.is_own(place, envelope))
            };
            self.chunks.iter().filter(lies).count()
        };
        let is_whole = |place: Place| blanks.count(place) + lie_at(place) >= blanks.made(place);
        (0..blanks.places()).all(|place| self.is_lost(place) || is_whole(place))
            && Snapshot::new(self, blanks).all_wait()
    }

    /// The link waits for the chunk that one more envelope is needed for.
    pub(super) fn needs_spare(&self, id: LinkId, link: &Link) -> bool {
        let Spare::Needed(number, place) = self.spare else { return false };
        let waits = link.waits.as_ref().is_some_and(|waits| !waits.looked);
        waits
            && link.role != Role::Produce
            && link.place == place
            && self.next_for(id, link).is_some_and(|at| self.chunks[at].number == number)
    }

    /// Where producers wait for a blank, if there is room in the queue: the place of the first of them first.
    fn starving(&self) -> SmallVec<[Place; 2]> {
        if self.room() == 0 {
            return SmallVec::new();
        }
        let waits = |link: &Link| link.waits.as_ref().is_some_and(|waits| waits.blank);
        let starving = self.each().filter(|(_, link)| link.role == Role::Produce && waits(link));
        starving.map(|(_, link)| link.place).collect()
    }

    /// A producer waits for a blank, there is room in the queue, and chunks that stay have copies elsewhere.
    fn clear_for_producers(&mut self, demands: &Demands, blanks: &impl Blanks<E>, out: &mut Actions<E>) {
        if self.consumes() {
            return;
        }
        let Some(place) = self.starving().into_iter().find(|place| blanks.count(*place) == 0) else { return };
        let spare = self.chunks.iter().enumerate().position(|(at, chunk)| {
            let wanted = demands.contains(&(at, place));
            let idle = chunk.alone.is_none() && chunk.moving == 0 && chunk.copy(place).is_some_and(Copy::is_idle);
            idle && !wanted && chunk.spare() > 1
        });
        if let Some(at) = spare {
            self.chunks[at].remove(place, &mut out.freed);
        }
    }
}
