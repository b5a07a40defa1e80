//! The consequences of events: copies, wakes, envelopes to free.
//!
//! ```text
//!   settle ──> wanted: the oldest chunk first ──bring──> a blank: a copy is enqueued
//!                                                └─────> none: make room, if a link waits
//!                                                            └──> none anywhere, and nothing moves: one more envelope
//!          ──> trim: copies that are not needed are freed
//!          ──> wake: links that may go, in the order of their arrival
//! ```

use std::ops::Deref;

use smallvec::SmallVec;

use super::{
    Actions, Blanks, ChunkCopy, ChunkHubState, ChunkRecord, CopyState, LinkId, LinkRecord, LinkWait, LocationId, Move,
    Role, SpareEnvelope, TooFew, snapshot::StateSnapshot,
};

/// A chunk is wanted at a place.
#[derive(Clone, Copy, Debug)]
struct WantedCopy {
    chunk: usize,
    place: LocationId,
    /// By a link that waits.
    demanded: bool,
}

/// Chunks, the places where links wait for them, and since when the first of these links waits.
type Demands = SmallVec<[(usize, LocationId, u64); 4]>;

/// Since when a link waits there for that chunk, if one does.
fn demanded_since(demands: &Demands, chunk: usize, at: LocationId) -> Option<u64> {
    demands.iter().find(|(of, place, _)| (*of, *place) == (chunk, at)).map(|(.., since)| *since)
}

/// Places of consumers, and since when the first consumer there waits: [`u64::MAX`] if none does.
type Consumers = SmallVec<[(LocationId, u64); 2]>;

impl<E: Clone + Deref, S: Clone> ChunkHubState<E, S> {
    pub(in crate::hub::chunks) fn settle(&mut self, blanks: &mut impl Blanks<E>, out: &mut Actions<E>) {
        self.lose_failed(blanks);
        out.freed.append(&mut self.freed);
        let mut lacking = None;
        let consumers = self.consumers();
        self.choose_goals(&consumers, blanks);
        let demands = self.demands();
        // Before copies that no link waits for yet.
        self.clear_for_producers(&demands, blanks, out);
        for WantedCopy { chunk, place, demanded } in self.wanted(&demands, &consumers) {
            self.bring(chunk, place, demanded.then_some(&demands), blanks, out);
            if demanded && lacking.is_none() && self.chunks[chunk].copy(place).is_none() && blanks.count(place) == 0 {
                lacking = Some((chunk, place));
            }
        }
        // After that: copies that were made to make room elsewhere have served their purpose.
        self.trim(out);
        if self.spare != SpareEnvelope::Coming {
            let stuck = lacking.filter(|(at, place)| !self.is_used_before(*at, *place) && self.is_at_rest(blanks));
            self.spare =
                stuck.map_or(SpareEnvelope::No, |(at, place)| SpareEnvelope::Needed(self.chunks[at].number, place));
        }
        out.wakes.extend(self.links.values_mut().filter_map(|link| link.watcher.take()));
        self.wake(blanks, out, |state, snapshot, id, link, waits| {
            let may_proceed = || {
                snapshot.may_proceed(id, link, waits.blank)
                    || state.needs_spare(id, link)
                    || (waits.blank && snapshot.is_refused(link))
            };
            state.has_ended(id, blanks) || (!waits.woken && may_proceed())
        });
    }

    /// Wakes the waiting links that are due, in the order of their arrival. Skips links that were woken before,
    /// unless they were offered something since and took nothing.
    pub(super) fn wake<B: Blanks<E>>(
        &mut self,
        blanks: &B,
        out: &mut Actions<E>,
        is_due: impl Fn(&Self, &StateSnapshot<'_, E, S, B>, LinkId, &LinkRecord, &LinkWait) -> bool,
    ) {
        let snapshot = StateSnapshot::new(self, blanks);
        let due = |(id, link): (LinkId, &LinkRecord)| {
            let waits = link.waits.as_ref().filter(|waits| !waits.woken || waits.offered)?;
            is_due(self, &snapshot, id, link, waits).then_some((waits.since, id))
        };
        let mut due: SmallVec<[(u64, LinkId); 4]> = self.each().filter_map(due).collect();
        due.sort_unstable();
        for (_, id) in due {
            if let Some(waits) = self.links.get_mut(&id).and_then(|link| link.waits.as_mut()) {
                (waits.woken, waits.offered) = (true, false);
                out.wakes.push(waits.waker.clone());
            }
        }
    }

    pub(in crate::hub::chunks) fn has_waiters(&self) -> bool {
        self.links.values().any(|link| link.waits.is_some())
    }

    /// Wakes all links that were not woken yet, to poll again whatever they wait for.
    pub(in crate::hub::chunks) fn wake_all(&mut self, out: &mut Actions<E>) {
        let waits = self.links.values_mut().filter_map(|link| link.waits.as_mut());
        for waits in waits.filter(|waits| !waits.woken || waits.offered) {
            (waits.woken, waits.offered) = (true, false);
            out.wakes.push(waits.waker.clone());
        }
    }

    /// The places of consumers, and since when the first consumer of each place waits. A consumer that was offered
    /// a chunk and did not take it, because it also waits for something else, does not count: it must not block others.
    ///
    /// Two consumers of two hubs, each with the chunk that the other one lacks, would lose these chunks to each other
    /// again and again. So if chunks went to other consumers more often than there are consumers, and none has taken
    /// one meanwhile, the first waiting consumer gets it, whether or not it was offered one before. The order of
    /// consumers is the same in all hubs of a flow.
    fn consumers(&self) -> Consumers {
        let mut places = Consumers::new();
        let is_contested = self.is_contested();
        for (_, link) in self.of_role(Role::Consume) {
            let since = match &link.waits {
                Some(_) if is_contested => link.name.order(),
                Some(waits) if !waits.offered => waits.since,
                _ => u64::MAX,
            };
            match places.iter_mut().find(|(place, _)| *place == link.place) {
                Some((_, first)) => *first = since.min(*first),
                None => places.push((link.place, since)),
            }
        }
        places
    }

    /// Whether chunks that had been offered to links went to other links more often than there are links, and no chunk
    /// was taken meanwhile.
    fn is_contested(&self) -> bool {
        let rivals = if self.consumes() { self.counts.of(Role::Consume) } else { self.counts.of_readers() };
        self.passed_over > rivals
    }

    /// Where chunks stay, the equivalent of the rule for [consumers](Self::consumers): the chunk that the first link
    /// waits for, whether or not it was offered before, and where. This demand precedes all others, so that they cannot
    /// evict the chunk.
    fn first_contested(&self) -> Option<(usize, LocationId, u64)> {
        if self.consumes() || !self.is_contested() {
            return None;
        }
        let waiting = self.each().filter(|(_, link)| link.waits.is_some() && link.role != Role::Produce);
        // Some links get no chunk, and contest none.
        let next = waiting.filter_map(|(id, link)| Some((link.name.order(), self.next_for(id, link)?, link.place)));
        next.min().map(|(_, at, place)| (at, place, 0))
    }

    /// Chooses the consumer that each chunk goes to, preferring in this order: one that waits, one at a place where
    /// the chunk is, the one that has waited longest. The choice is changed later only where that is
    /// [safe](Self::is_safe).
    fn choose_goals(&mut self, consumers: &Consumers, blanks: &impl Blanks<E>) {
        for at in 0..self.chunks.len() {
            let chunk = &self.chunks[at];
            let is_contested = self.is_contested();
            let elsewhere = |place: LocationId| !is_contested && chunk.copy(place).is_none();
            let rank = |(place, since): &(LocationId, u64)| (*since == u64::MAX, elsewhere(*place), *since);
            let kept = chunk.goal.filter(|goal| consumers.iter().any(|(place, _)| place == goal));
            let first = consumers.iter().min_by_key(|consumer| rank(consumer));
            let goal = match (kept, first) {
                (None, _) => {
                    let safe = |place: LocationId| self.is_safe(at, place, blanks);
                    consumers.iter().min_by_key(|consumer| (!safe(consumer.0), rank(consumer))).map(|(place, _)| *place)
                }
                (Some(kept), Some((first, _))) if *first != kept && self.is_safe(at, *first, blanks) => Some(*first),
                _ => kept,
            };
            if let Some(before) = kept.filter(|_| goal != kept) {
                let offered =
                    |link: &LinkRecord| link.place == before && link.waits.as_ref().is_some_and(|waits| waits.offered);
                let is_passed_over = self.of_role(Role::Consume).any(|(_, link)| offered(link));
                self.passed_over += usize::from(is_passed_over && !is_contested);
            }
            self.chunks[at].goal = goal;
        }
    }

    /// Whether at least one of the envelopes at that place is left to this chunk and to older ones: the chunk gets
    /// there once those have left the hub. The envelopes that [`reserved`](Self::reserved) keeps are enough to keep
    /// this true for each place where the chunk is wanted.
    fn is_safe(&self, at: usize, place: LocationId, blanks: &impl Blanks<E>) -> bool {
        let chunk = &self.chunks[at];
        let holds = |chunk: &&ChunkRecord<E, S>| {
            let copy = chunk.copy(place);
            copy.is_some_and(|copy| copy.there().is_none_or(|envelope| blanks.is_own(place, envelope)))
        };
        let younger = self.chunks.iter().skip(at + 1).filter(holds).count();
        let to_come = self.open.iter().filter(|(number, at)| *number > chunk.number && *at == Some(place)).count();
        chunk.has_envelope(place) || younger + to_come < blanks.total(place)
    }

    /// The places where a chunk is needed next, each once. For hubs whose chunks are consumed.
    pub(super) fn next_places(&self, chunk: &ChunkRecord<E, S>) -> SmallVec<[LocationId; 4]> {
        if let Some((_, link)) = self.pending(chunk, Role::Modify).next() {
            return SmallVec::from_iter([link.place]);
        }
        let mut places = SmallVec::new();
        let peeks = self.pending(chunk, Role::Peek).map(|(_, link)| link.place);
        for place in peeks.chain(chunk.goal) {
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Where links are still to modify a chunk or to peek at it, and where it is consumed.
    fn places_to_come<'a>(&'a self, chunk: &'a ChunkRecord<E, S>) -> impl Iterator<Item = LocationId> + 'a {
        let roles = [Role::Modify, Role::Peek].into_iter().flat_map(|role| self.pending(chunk, role));
        roles.map(|(_, link)| link.place).chain(chunk.goal)
    }

    /// The number of envelopes at a place that chunks before this one will still need: for links that are to modify
    /// or peek, and at the goal.
    pub(super) fn reserved(&self, before: usize, place: LocationId) -> usize {
        if !self.consumes() {
            return 0;
        }
        let needs = |chunk: &&ChunkRecord<E, S>| {
            let is_consumed =
                chunk.held_by.and_then(|id| self.links.get(&id)).is_some_and(|link| link.role == Role::Consume);
            let mut places = self.places_to_come(chunk);
            !is_consumed && !chunk.is_lost() && !chunk.has_envelope(place) && places.any(|needed| needed == place)
        };
        let older = self.chunks.iter().take(before).filter(needs).count();
        let next = self.chunks.get(before).map_or(u64::MAX, |chunk| chunk.number);
        let to_come = self.open.iter().filter(|(number, at)| *number < next && *at != Some(place)).count();
        let is_read = || self.each().any(|(_, link)| link.role != Role::Produce && link.place == place);
        older + if to_come > 0 && is_read() { to_come } else { 0 }
    }

    /// The number of blanks at a place that are not available to this chunk, for which a link has waited since `since`:
    /// other chunks get them first.
    fn kept(&self, at: usize, place: LocationId, since: u64, blanks: &impl Blanks<E>) -> usize {
        if self.consumes() {
            return self.reserved(at, place);
        }
        let before = self.starved().filter(|(first, of)| *of == place && *first < since).count();
        if before > 0 && self.room() > 0 && self.too_few(self.open.len(), blanks).is_none() { before } else { 0 }
    }

    /// Producers that wait for a blank: since when, and where.
    fn starved(&self) -> impl Iterator<Item = (u64, LocationId)> {
        self.each().filter_map(|(_, link)| {
            let waits =
                link.waits.as_ref().filter(|waits| waits.blank && !waits.offered && link.role == Role::Produce)?;
            Some((waits.since, link.place))
        })
    }

    /// Frees copies that are no longer needed. Until a modification is committed all others are kept, since it may be
    /// dropped.
    fn trim(&mut self, out: &mut Actions<E>) {
        if !self.consumes() {
            return;
        }
        for at in 0..self.chunks.len() {
            let chunk = &self.chunks[at];
            if chunk.copies.len() < 2 || chunk.held_by.is_some() || chunk.moving > 0 {
                continue;
            }
            let wanted = self.next_places(chunk);
            let modified = self.pending(chunk, Role::Modify).next().is_some();
            if modified || !wanted.iter().any(|place| chunk.is_there(*place)) {
                continue;
            }
            let idle = chunk.copies.iter().filter(|copy| copy.is_idle() && !wanted.contains(&copy.place));
            let idle: SmallVec<[LocationId; 2]> = idle.map(|copy| copy.place).collect();
            idle.into_iter().for_each(|place| self.chunks[at].remove(place, &mut out.freed));
        }
    }

    /// The chunks that links wait for, and where: each once, for the link that has waited longest.
    fn demands(&self) -> Demands {
        let mut waiting = Demands::new();
        for (id, link) in self.each() {
            if let Some(waits) = link.waits.as_ref().filter(|waits| !waits.offered && link.role != Role::Produce)
                && let Some(at) = self.next_for(id, link)
            {
                waiting.push((at, link.place, waits.since));
            }
        }
        waiting.extend(self.first_contested());
        waiting.sort_unstable();
        waiting.dedup_by_key(|(at, place, _)| (*at, *place));
        waiting.sort_unstable_by_key(|(.., since)| *since);
        waiting
    }

    /// The places where chunks are wanted and are not, the most urgent first.
    fn wanted(&self, demands: &Demands, consumers: &Consumers) -> Vec<WantedCopy> {
        let mut wanted = Vec::new();
        if self.consumes() {
            let first = consumers.iter().min_by_key(|(_, since)| *since).filter(|_| self.is_contested());
            let first = first.map(|(place, _)| *place);
            for (at, chunk) in self.chunks.iter().enumerate() {
                for place in self.next_places(chunk) {
                    let demanded = demanded_since(demands, at, place).is_some();
                    wanted.push(WantedCopy { chunk: at, place, demanded });
                }
                // A consumer waits, but not at the chunk's goal, or the one there is not the first of those that
                // contest the chunk: the goal changes once an envelope is free at the other place.
                let waits = |place: LocationId| consumers.iter().any(|(at, since)| *at == place && *since != u64::MAX);
                let goes_on = |goal: &LocationId| first.map_or(!waits(*goal), |first| first != *goal);
                if let Some(goal) = chunk.goal.filter(goes_on) {
                    let may_have =
                        |place: LocationId| place != goal && waits(place) && first.is_none_or(|first| first == place);
                    let elsewhere = demands.iter().filter(|(of, place, _)| *of == at && may_have(*place));
                    wanted.extend(elsewhere.map(|(_, place, _)| WantedCopy {
                        chunk: at,
                        place: *place,
                        demanded: true,
                    }));
                }
            }
        } else {
            wanted.extend(demands.iter().map(|(chunk, place, _)| WantedCopy {
                chunk: *chunk,
                place: *place,
                demanded: true,
            }));
            // A link that cycles through the chunks gets its next chunk ahead of time, while it uses another.
            for (id, link) in self.each().filter(|(_, link)| link.role != Role::Produce && link.served > 0) {
                if let Some(at) = self.next_for(id, link).filter(|at| self.chunks[*at].number != link.last) {
                    wanted.push(WantedCopy { chunk: at, place: link.place, demanded: false });
                }
            }
        }
        wanted.retain(|wanted| {
            let chunk = &self.chunks[wanted.chunk];
            chunk.copy(wanted.place).is_none() && !chunk.is_lost()
        });
        wanted
    }

    /// Takes a blank for a copy of a chunk at a place, if there is one. `demands` for a chunk that a link waits for
    /// there.
    fn bring(
        &mut self,
        at: usize,
        place: LocationId,
        demands: Option<&Demands>,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) {
        let chunk = &self.chunks[at];
        if chunk.held_by.is_some() || chunk.copy(place).is_some() {
            return;
        }
        let Some((from, source)) = chunk.copies.iter().find_map(|copy| Some((copy.place, copy.there()?.clone())))
        else {
            return;
        };
        let left = blanks.count(place);
        let returns = chunk.has_envelope(place);
        let since = demands.and_then(|demands| demanded_since(demands, at, place)).unwrap_or(u64::MAX);
        // Checked last, since `kept` is expensive.
        if !returns && (left == 0 || left <= self.kept(at, place, since, blanks)) {
            if let Some(demands) = demands.filter(|_| left == 0) {
                drop(source);
                self.make_room(at, place, demands, blanks, out);
            }
            return;
        }
        let chunk = &mut self.chunks[at];
        let own = if returns { chunk.returns_in.take() } else { None };
        let Some(blank) = own.or_else(|| blanks.take(place)) else { return };
        chunk.copies.push(ChunkCopy { place, slot: CopyState::Arriving, peeks: 0 });
        chunk.moving += 1;
        out.moves.push(Move { number: chunk.number, from, to: place, source, blank });
    }

    /// Called when a link waits for a chunk at a place where other chunks have all envelopes. Frees a copy that no
    /// link wants there, or moves it elsewhere if it is the only one.
    fn make_room(
        &mut self,
        for_chunk: usize,
        place: LocationId,
        demands: &Demands,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) {
        let in_the_way = |at: &usize| {
            let chunk = &self.chunks[*at];
            let idle = chunk.held_by.is_none() && chunk.moving == 0 && Self::is_idle_own(chunk, place, blanks);
            let wanted = if self.consumes() {
                // An older one would have the first claim on the envelope that it frees.
                *at < for_chunk && self.places_to_come(chunk).any(|needed| needed == place)
            } else {
                demanded_since(demands, *at, place).is_some()
            };
            *at != for_chunk && idle && !wanted
        };
        // The youngest, since it is wanted last.
        if let Some(at) = (0..self.chunks.len()).rev().find(in_the_way) {
            let offered = |(id, link): (LinkId, &LinkRecord)| {
                let offered = link.place == place && link.waits.as_ref().is_some_and(|waits| waits.offered);
                offered && link.role != Role::Produce && self.next_for(id, link) == Some(at)
            };
            let is_passed_over = !self.consumes() && !self.is_contested() && self.each().any(offered);
            let goes = self.evict(at, place, demands, blanks, out);
            self.passed_over += usize::from(goes && is_passed_over);
        }
    }

    /// Whether an unused copy is there, in an envelope of the hub. A user's envelope makes no room: no other chunk
    /// may use it, and a chunk that returns in it would do so at once.
    fn is_idle_own(chunk: &ChunkRecord<E, S>, place: LocationId, blanks: &impl Blanks<E>) -> bool {
        let copy = chunk.copy(place).filter(|copy| copy.is_idle());
        copy.and_then(ChunkCopy::there).is_some_and(|envelope| blanks.is_own(place, envelope))
    }

    /// Frees the copy of a chunk at a place, or moves it elsewhere if it is the only one. Returns true if it does so
    /// now.
    fn evict(
        &mut self,
        at: usize,
        place: LocationId,
        demands: &Demands,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) -> bool {
        // A copy that is already being moved away makes the room.
        let moves_out = |chunk: &ChunkRecord<E, S>| chunk.moving > 0 && chunk.is_there(place);
        if self.chunks.iter().any(moves_out) {
            return false;
        }
        if self.chunks[at].spare() > 1 {
            self.chunks[at].remove(place, &mut out.freed);
            return true;
        }
        let has_room = |other: &LocationId| {
            let left = blanks.count(*other);
            *other != place && !self.is_lost(*other) && left > 0 && left > self.kept(at, *other, u64::MAX, blanks)
        };
        if let Some(elsewhere) = (0..blanks.places()).find(has_room) {
            self.bring(at, elsewhere, None, blanks, out);
            return true;
        }
        // A copy that no link waits for makes room elsewhere. Where chunks are consumed, `trim` frees such copies.
        let is_extra = |chunk: &ChunkRecord<E, S>| chunk.held_by.is_none() && chunk.moving == 0 && chunk.spare() > 1;
        let extra = self.chunks.iter().enumerate().filter(|(_, chunk)| !self.consumes() && is_extra(chunk));
        let copies = extra.flat_map(|(of, chunk)| chunk.copies.iter().map(move |copy| (of, copy)));
        let unused = |(of, copy): &(usize, &ChunkCopy<E>)| {
            copy.place != place
                && Self::is_idle_own(&self.chunks[*of], copy.place, blanks)
                && demanded_since(demands, *of, copy.place).is_none()
        };
        if let Some((of, from)) = copies.filter(unused).map(|(of, copy)| (of, copy.place)).next() {
            self.chunks[of].remove(from, &mut out.freed);
        }
        false
    }

    /// Whether an older chunk has a copy at `place`. That chunk makes progress as soon as the links that are to get it
    /// poll; if it is stuck itself, it gets the additional envelope first.
    fn is_used_before(&self, before: usize, place: LocationId) -> bool {
        self.consumes() && self.chunks.iter().take(before).any(|chunk| chunk.copy(place).is_some())
    }

    /// Whether nothing changes until a link polls or commits for another reason: every envelope is free or in a chunk
    /// that no link has, and no waiting link can make progress.
    fn is_at_rest(&self, blanks: &impl Blanks<E>) -> bool {
        let is_idle = |chunk: &ChunkRecord<E, S>| {
            chunk.held_by.is_none() && chunk.moving == 0 && chunk.copies.iter().all(ChunkCopy::is_idle)
        };
        if !self.open.is_empty() || !self.lingering.is_empty() || !self.chunks.iter().all(is_idle) {
            return false;
        }
        let lie_at = |place: LocationId| {
            let lies = |chunk: &&ChunkRecord<E, S>| {
                let envelope = chunk.copy(place).and_then(ChunkCopy::there);
                envelope.is_some_and(|envelope| blanks.is_own(place, envelope))
            };
            self.chunks.iter().filter(lies).count()
        };
        let is_whole = |place: LocationId| blanks.count(place) + lie_at(place) >= blanks.total(place);
        (0..blanks.places()).all(|place| self.is_lost(place) || is_whole(place))
            && StateSnapshot::new(self, blanks).all_wait()
    }

    /// Whether the link waits for the chunk that needs one more envelope.
    pub(super) fn needs_spare(&self, id: LinkId, link: &LinkRecord) -> bool {
        let SpareEnvelope::Needed(number, place) = self.spare else { return false };
        let waits = link.waits.as_ref().is_some_and(|waits| !waits.offered);
        waits
            && link.role != Role::Produce
            && link.place == place
            && self.next_for(id, link).is_some_and(|at| self.chunks[at].number == number)
    }

    /// If a producer waits for a blank at a place where chunks that stay have all envelopes, makes one of them give
    /// up its envelope, unless a link that came before the producer waits for it there.
    fn clear_for_producers(&mut self, demands: &Demands, blanks: &mut impl Blanks<E>, out: &mut Actions<E>) {
        if self.consumes() || self.room() == 0 || self.too_few(self.open.len(), blanks).is_some() {
            return;
        }
        let starved = self.starved().filter(|(_, place)| blanks.count(*place) == 0);
        let Some((since, place)) = starved.min() else { return };
        let in_the_way = |(_, chunk): &(usize, &ChunkRecord<E, S>)| {
            chunk.held_by.is_none() && chunk.moving == 0 && Self::is_idle_own(chunk, place, blanks)
        };
        let idle = self.chunks.iter().enumerate().filter(in_the_way);
        let idle = idle.filter(|(at, _)| demanded_since(demands, *at, place).is_none_or(|demand| since < demand));
        // Preferably one with another copy, which then need not be copied.
        if let Some((at, _)) = idle.min_by_key(|(_, chunk)| chunk.spare() == 1) {
            self.evict(at, place, demands, blanks, out);
        }
    }

    /// The number of places where the hub has envelopes, and of envelopes in all, without places that are lost.
    pub(super) fn envelopes(&self, blanks: &impl Blanks<E>) -> (usize, usize) {
        let totals = (0..blanks.places()).filter(|place| !self.is_lost(*place)).map(|place| blanks.total(place));
        totals.filter(|total| *total > 0).fold((0, 0), |(places, sum), total| (places + 1, sum + total))
    }

    /// Where chunks stay, each has an envelope, and one is free to move them between places. Returns the numbers if
    /// there are too few envelopes for one chunk more than there are, and `open` more. Returns `None` where chunks
    /// need not move, or may be consumed.
    pub(in crate::hub::chunks) fn too_few(&self, open: usize, blanks: &impl Blanks<E>) -> Option<TooFew> {
        if self.had_consumer || self.counts.of_readers() == 0 || self.room() == 0 {
            return None;
        }
        let chunks = self.chunks.iter().filter(|chunk| !chunk.is_sent).count() + open + 1;
        let (places, envelopes) = self.envelopes(blanks);
        (places > 1 && chunks > 1 && envelopes <= chunks).then_some(TooFew { chunks, envelopes })
    }
}
