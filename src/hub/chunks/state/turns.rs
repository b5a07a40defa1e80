//! Whose turn it is: what a link is told when it asks, and given when it takes.
//!
//! Asking changes nothing but that the link waits. A link is told that it may go if what it wants is there and nobody who
//! came before it can have it, and was woken for it: those have a look first. One who has looked and does not take it
//! (its operator waits for something else, too) is in nobody's way.

use std::{sync::Arc, task::Waker};

use super::{Actions, Blanks, Chunk, Grant, Link, LinkId, Role, Slot, State, Waits};
use crate::hub::queue::Answer;

impl<E: Clone, S: Clone> State<E, S> {
    /// Free places in the queue.
    pub(super) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.chunks.len() + self.open.len())
    }

    /// The chunk that is this link's next, be it ready or not.
    pub(super) fn next_for(&self, id: LinkId, link: &Link) -> Option<usize> {
        if !self.is_served(link) {
            return None;
        }
        if link.role == Role::Consume {
            let consumed = |by: &LinkId| self.links.get(by).is_some_and(|link| link.role == Role::Consume);
            return self.chunks.iter().position(|chunk| !chunk.alone.as_ref().is_some_and(consumed));
        }
        if self.consumes() {
            return self.chunks.iter().position(|chunk| !chunk.seen.contains(&id));
        }
        let later = self.chunks.iter().position(|chunk| chunk.number > link.last);
        later.or_else(|| (!self.chunks.is_empty()).then_some(0))
    }

    /// It is this link's turn at that chunk, whoever has it now.
    pub(super) fn is_turn(&self, id: LinkId, link: &Link, chunk: &Chunk<E, S>) -> bool {
        if !self.consumes() {
            return true;
        }
        let modifies = self.pending(chunk, Role::Modify).next();
        match link.role {
            Role::Modify => modifies.is_some_and(|(first, _)| first == id),
            Role::Peek => modifies.is_none(),
            _ => modifies.is_none() && self.pending(chunk, Role::Peek).next().is_none(),
        }
    }

    /// Nobody has the chunk in a way that excludes this link.
    fn is_free(link: &Link, chunk: &Chunk<E, S>) -> bool {
        if chunk.alone.is_some() {
            return false;
        }
        match link.role {
            Role::Peek => true,
            Role::Modify => !chunk.is_peeked() && chunk.moving == 0,
            _ => chunk.copy(link.place).is_none_or(|copy| copy.peeks == 0) && chunk.moving == 0,
        }
    }

    /// Could it have now what it asks for, if nobody else asked?
    pub(super) fn is_there(&self, id: LinkId, link: &Link, blank: bool, blanks: &impl Blanks<E>) -> bool {
        if link.role == Role::Produce {
            let left = || blanks.count(link.place);
            let enough = || left() > 0 && left() > self.reserved(self.chunks.len(), link.place);
            return self.room() > 0 && (!blank || enough());
        }
        self.next_for(id, link).map(|at| &self.chunks[at]).is_some_and(|chunk| {
            self.is_turn(id, link, chunk) && Self::is_free(link, chunk) && chunk.is_there(link.place)
        })
    }

    /// One who came before this link waits for the same, and can have it: it was woken, and has not looked yet.
    fn has_precedence(&self, id: LinkId, link: &Link, blanks: &impl Blanks<E>) -> bool {
        let chunk = self.next_for(id, link);
        let came = link.waits.as_ref().map_or(u64::MAX, |waits| waits.since);
        self.links.iter().any(|(other, theirs)| {
            let Some(waits) = &theirs.waits else { return false };
            if *other == id || waits.looked || waits.since > came {
                return false;
            }
            match (link.role, theirs.role) {
                (Role::Produce, Role::Produce) => self.is_there(*other, theirs, waits.blank, blanks),
                (Role::Produce, _) | (_, Role::Produce) | (Role::Peek, Role::Peek) => false,
                _ if chunk.is_none() || self.next_for(*other, theirs) != chunk => false,
                // It waits for the peeks to end, and nobody who has peeked since it came begins once more.
                (Role::Peek, Role::Modify) if waits.since > link.served => false,
                (Role::Peek, Role::Modify) => {
                    let chunk = chunk.map(|at| &self.chunks[at]);
                    let for_peeks = |chunk: &&Chunk<E, S>| chunk.alone.is_none() && chunk.is_there(theirs.place);
                    chunk.filter(for_peeks).is_some_and(|chunk| self.is_turn(*other, theirs, chunk))
                }
                _ => self.is_there(*other, theirs, false, blanks),
            }
        })
    }

    pub(super) fn may_go(&self, id: LinkId, link: &Link, blank: bool, blanks: &impl Blanks<E>) -> bool {
        self.is_there(id, link, blank, blanks) && !self.has_precedence(id, link, blanks)
    }

    /// Nothing will come to this link any more.
    pub(in crate::hub::chunks) fn has_ended(&self, id: LinkId, blanks: &impl Blanks<E>) -> bool {
        let Some(link) = self.links.get(&id) else { return true };
        if link.role == Role::Produce {
            let unconsumed = self.had_consumer && self.count(|role| role == Role::Consume) == 0;
            let unread = self.had_reader && self.count(|role| role != Role::Produce) == 0;
            return unconsumed || (unread && (self.room() == 0 || self.is_out_of_blanks(link, blanks)));
        }
        let over = self.had_producer && self.count(|role| role == Role::Produce) == 0;
        over && match link.role {
            Role::Consume => self.chunks.is_empty(),
            // With those who consume gone too, what is in the way of other chunks stays there.
            _ if self.consumes() => {
                let unconsumed = self.had_consumer && self.count(|role| role == Role::Consume) == 0;
                unconsumed || self.chunks.iter().all(|chunk| chunk.seen.contains(&id))
            }
            _ => self.chunks.is_empty(),
        }
    }

    /// It waits for a blank, and all that there are lie in chunks that stay where they are.
    fn is_out_of_blanks(&self, link: &Link, blanks: &impl Blanks<E>) -> bool {
        let stays = |chunk: &&Chunk<E, S>| {
            chunk.copy(link.place).is_some() && chunk.copies.len() == 1 && chunk.alone.is_none() && chunk.moving == 0
        };
        let waits = link.waits.as_ref().is_some_and(|waits| waits.blank);
        waits && self.chunks.iter().filter(stays).count() >= blanks.made(link.place)
    }

    /// Asks, and changes nothing but that the link waits now. `blank`: a producer wants one, beside a place in the queue.
    ///
    /// What it was told is there stays until it can take it: nothing is settled in between.
    ///
    /// `shared` is the same waker, cloned by a caller that held no lock; without it there is no answer where one is needed that
    /// the link does not have.
    pub(in crate::hub::chunks) fn poll(
        &mut self,
        id: LinkId,
        blank: bool,
        waker: &Waker,
        shared: Option<&Arc<Waker>>,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) -> Option<Answer> {
        if self.has_ended(id, blanks) {
            self.rest(id);
            self.settle(blanks, out);
            return Some(Answer::Never);
        }
        let since = self.tick();
        let ready = self.links.get(&id).is_some_and(|link| self.may_go(id, link, blank, blanks));
        let Some(link) = self.links.get_mut(&id) else { return Some(Answer::Never) };
        if ready {
            if let Some(waits) = link.waits.as_mut() {
                waits.looked = true;
                self.wake_those_behind(blanks, out);
            }
            return Some(Answer::Yes);
        }
        match &mut link.waits {
            Some(waits) => {
                if !waits.waker.will_wake(waker) {
                    self.gone.push(std::mem::replace(&mut waits.waker, shared?.clone()));
                }
                (waits.blank, waits.told, waits.looked) = (blank, false, false);
            }
            none => *none = Some(Waits { since, waker: shared?.clone(), blank, told: false, looked: false }),
        }
        self.settle(blanks, out);
        Some(Answer::Wait)
    }

    /// One who could go may not do so: whoever waits behind it, or for the envelope that it waits for, asks again.
    fn wake_those_behind(&mut self, blanks: &impl Blanks<E>, out: &mut Actions<E>) {
        self.wake(out, |state, id, link, waits| {
            let lacks = || state.next_for(id, link).is_some_and(|at| state.chunks[at].copy(link.place).is_none());
            state.may_go(id, link, waits.blank, blanks) || lacks()
        });
    }

    /// All wakers that it keeps.
    pub(in crate::hub::chunks) fn drain_wakers(&mut self) -> Vec<Arc<Waker>> {
        let mut all = std::mem::take(&mut self.gone);
        for link in self.links.values_mut() {
            let waits = link.waits.take().map(|waits| waits.waker);
            all.extend(waits.into_iter().chain(link.watcher.take()));
        }
        all
    }

    /// The structures of all chunks: the hub is dropped.
    pub(in crate::hub::chunks) fn drain_structures(&mut self) -> Vec<S> {
        self.chunks.drain(..).chain(self.lingering.drain(..)).map(|chunk| chunk.structure).collect()
    }

    /// Wakers that were taken out, to be dropped without a lock.
    pub(in crate::hub::chunks) fn take_gone(&mut self, out: &mut Actions<E>) {
        out.gone.append(&mut self.gone);
    }

    /// It waits no longer.
    pub(in crate::hub::chunks) fn rest(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.waits.take().map(|waits| waits.waker));
        }
    }

    /// Keeps the waker for the next change.
    pub(in crate::hub::chunks) fn watch(&mut self, id: LinkId, waker: &Arc<Waker>) {
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.watcher.replace(waker.clone()));
        }
    }

    /// Takes what [`poll`](Self::poll) said is there. `None` if it is there no more.
    pub(in crate::hub::chunks) fn take(
        &mut self,
        id: LinkId,
        blank: bool,
        blanks: &mut impl Blanks<E>,
    ) -> Option<Grant<E, S>> {
        let link = self.links.get(&id)?;
        if !self.may_go(id, link, blank, blanks) {
            return None;
        }
        let (role, place) = (link.role, link.place);
        let grant = if role == Role::Produce {
            let envelope = if blank { Some(blanks.take(place)?) } else { None };
            self.chunks_made += 1;
            self.open.push((self.chunks_made, blank.then_some(place)));
            Grant { number: self.chunks_made, envelope, structure: None }
        } else {
            let at = self.next_for(id, link)?;
            let chunk = &mut self.chunks[at];
            let copy = chunk.copies.iter_mut().find(|copy| copy.place == place)?;
            let envelope = if role == Role::Peek {
                copy.peeks += 1;
                copy.there().cloned()?
            } else {
                chunk.alone = Some(id);
                match std::mem::replace(&mut copy.slot, Slot::Lent) {
                    Slot::There(envelope) => envelope,
                    // Not so: it was looked at above.
                    other => {
                        copy.slot = other;
                        return None;
                    }
                }
            };
            if role == Role::Peek && !chunk.seen.contains(&id) {
                chunk.seen.push(id);
            }
            Grant { number: chunk.number, envelope: Some(envelope), structure: Some(chunk.structure.clone()) }
        };
        let served = self.tick();
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.waits.take().map(|waits| waits.waker));
            (link.served, link.last) = (served, grant.number);
        }
        Some(grant)
    }
}
