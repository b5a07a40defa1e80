//! Turns: the answer that a link gets when it polls, and the grant that it gets when it takes.
//!
//! Polling changes nothing except that the link waits. The link may proceed if what it waits for is available and no
//! link ahead of it was woken for the same: such a link polls first. A link that does not take what it was offered
//! (its operator also waits for something else) blocks no other link.

use std::{ops::Deref, sync::Arc, task::Waker};

use super::{
    Actions, Blanks, ChunkCopy, ChunkHubState, ChunkRecord, CopyState, Grant, LinkId, LinkRecord, LinkWait,
    PollRequest, Role, snapshot::StateSnapshot,
};
use crate::hub::queue::Answer;

impl<E: Clone + Deref, S: Clone> ChunkHubState<E, S> {
    pub(super) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.chunks.len() + self.open.len())
    }

    /// The link's next chunk, whether it is ready or not.
    pub(super) fn next_for(&self, id: LinkId, link: &LinkRecord) -> Option<usize> {
        if !link.is_served {
            return None;
        }
        if link.role == Role::Consume {
            let consumed = |by: &LinkId| self.links.get(by).is_some_and(|link| link.role == Role::Consume);
            return self.chunks.iter().position(|chunk| !chunk.held_by.as_ref().is_some_and(consumed));
        }
        if self.consumes() {
            return self.chunks.iter().position(|chunk| !chunk.is_seen_by(id));
        }
        let later = self.chunks.iter().position(|chunk| chunk.number > link.last);
        later.or_else(|| (!self.chunks.is_empty()).then_some(0))
    }

    /// Whether this link will get nothing more.
    pub(in crate::hub::chunks) fn has_ended(&self, id: LinkId, blanks: &impl Blanks<E>) -> bool {
        let Some(link) = self.links.get(&id) else { return true };
        if link.role == Role::Produce {
            let unconsumed = self.had_consumer && self.counts.of(Role::Consume) == 0;
            let unread = self.had_reader && self.counts.of_readers() == 0;
            return unconsumed || (unread && (self.room() == 0 || self.is_out_of_blanks(link, blanks)));
        }
        let over = self.had_producer && self.counts.of(Role::Produce) == 0;
        over && match link.role {
            Role::Consume => self.chunks.is_empty(),
            // Without consumers, chunks that block others stay in the hub.
            _ if self.consumes() => {
                let unconsumed = self.had_consumer && self.counts.of(Role::Consume) == 0;
                unconsumed || self.chunks.iter().all(|chunk| chunk.is_seen_by(id))
            }
            _ => self.chunks.is_empty(),
        }
    }

    /// Whether the link waits for a blank while each envelope of the hub is the only copy of a chunk that stays.
    fn is_out_of_blanks(&self, link: &LinkRecord, blanks: &impl Blanks<E>) -> bool {
        let is_own = |copy: &ChunkCopy<E>| copy.there().is_some_and(|envelope| blanks.is_own(copy.place, envelope));
        let stays = |chunk: &&ChunkRecord<E, S>| {
            chunk.held_by.is_none() && chunk.moving == 0 && matches!(&chunk.copies[..], [copy] if is_own(copy))
        };
        let waits = link.waits.as_ref().is_some_and(|waits| waits.blank);
        waits && self.chunks.iter().filter(stays).count() >= self.envelopes(blanks).1
    }

    /// Polls for the link, which changes nothing except that the link waits now.
    ///
    /// A chunk or blank that is reported as available remains so until the link can take it, since nothing is settled
    /// in between.
    ///
    /// `shared` is the same waker, cloned by a caller that held no lock. Without it, `None` is returned if the link
    /// does not have a required waker yet.
    pub(in crate::hub::chunks) fn poll(
        &mut self,
        id: LinkId,
        PollRequest { blank, stays }: PollRequest,
        waker: &Waker,
        shared: Option<&Arc<Waker>>,
        blanks: &mut impl Blanks<E>,
        out: &mut Actions<E>,
    ) -> Option<Answer> {
        if self.links.get(&id).is_some_and(|link| self.is_lost(link.place)) {
            // The link gets the error of its device.
            return Some(Answer::Wait);
        }
        if self.has_ended(id, blanks) {
            self.rest(id);
            self.settle(blanks, out);
            return Some(Answer::Never);
        }
        let since = self.tick();
        let ready =
            self.links.get(&id).is_some_and(|link| StateSnapshot::new(self, blanks).may_proceed(id, link, blank));
        let Some(link) = self.links.get_mut(&id) else { return Some(Answer::Never) };
        if ready {
            match &mut link.waits {
                Some(waits) => {
                    if !waits.waker.will_wake(waker) {
                        self.gone.push(std::mem::replace(&mut waits.waker, shared?.clone()));
                    }
                    // Only once: two links of two hubs, each with the chunk that the other one lacks, would otherwise
                    // wake each other with each poll.
                    if !std::mem::replace(&mut waits.offered, true) {
                        self.wake_those_behind(blanks, out);
                    }
                }
                // The link might be waiting for something else, and must be woken if the hub ends meanwhile.
                none if stays => {
                    *none = Some(LinkWait { since, waker: shared?.clone(), blank, woken: true, offered: true });
                }
                None => {}
            }
            return Some(Answer::Yes);
        }
        match &mut link.waits {
            Some(waits) => {
                if !waits.waker.will_wake(waker) {
                    self.gone.push(std::mem::replace(&mut waits.waker, shared?.clone()));
                }
                (waits.blank, waits.woken, waits.offered) = (blank, false, false);
            }
            none => *none = Some(LinkWait { since, waker: shared?.clone(), blank, woken: false, offered: false }),
        }
        self.settle(blanks, out);
        Some(Answer::Wait)
    }

    /// Called when a link that may proceed might not do so. Wakes the links behind it, and those that wait for the
    /// envelope that it blocks, to poll again.
    fn wake_those_behind(&mut self, blanks: &impl Blanks<E>, out: &mut Actions<E>) {
        self.wake(blanks, out, |state, snapshot, id, link, waits| {
            let lacks = || match link.role {
                // The copy that was offered might be evicted to make room for it.
                Role::Produce => waits.blank && blanks.count(link.place) == 0 && state.room() > 0,
                _ => state.next_for(id, link).is_some_and(|at| state.chunks[at].copy(link.place).is_none()),
            };
            !waits.woken && (snapshot.may_proceed(id, link, waits.blank) || lacks())
        });
    }

    pub(in crate::hub::chunks) fn drain_wakers(&mut self) -> Vec<Arc<Waker>> {
        let mut all = std::mem::take(&mut self.gone);
        for link in self.links.values_mut() {
            let waits = link.waits.take().map(|waits| waits.waker);
            all.extend(waits.into_iter().chain(link.watcher.take()));
        }
        all
    }

    /// Removes and returns the structures of all chunks when the hub is dropped.
    pub(in crate::hub::chunks) fn drain_structures(&mut self) -> Vec<S> {
        self.chunks.drain(..).chain(self.lingering.drain(..)).map(|chunk| chunk.structure).collect()
    }

    /// Moves removed wakers to `out`, to be dropped without a lock.
    pub(in crate::hub::chunks) fn take_gone(&mut self, out: &mut Actions<E>) {
        out.gone.append(&mut self.gone);
    }

    pub(in crate::hub::chunks) fn rest(&mut self, id: LinkId) {
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.waits.take().map(|waits| waits.waker));
        }
    }

    pub(in crate::hub::chunks) fn watch(&mut self, id: LinkId, waker: &Arc<Waker>) {
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.watcher.replace(waker.clone()));
        }
    }

    /// Takes the chunk or blank that [`poll`](Self::poll) reported. `None` if it is no longer available.
    pub(in crate::hub::chunks) fn take(
        &mut self,
        id: LinkId,
        blank: bool,
        blanks: &mut impl Blanks<E>,
    ) -> Option<Grant<E, S>> {
        let link = self.links.get(&id)?;
        if !StateSnapshot::new(self, blanks).may_proceed(id, link, blank) {
            return None;
        }
        let (role, place) = (link.role, link.place);
        if self.is_lost(place) {
            return None;
        }
        let grant = if role == Role::Produce {
            let envelope = if blank { Some(blanks.take(place)?) } else { None };
            self.chunks_made += 1;
            self.open.push((self.chunks_made, blank.then_some(place)));
            Grant { number: self.chunks_made, envelope, structure: None, lost: None }
        } else if let Some(at) = self.next_for(id, link).filter(|at| self.chunks[*at].is_lost()) {
            self.take_loss(id, role, at)
        } else {
            let at = self.next_for(id, link)?;
            let chunk = &mut self.chunks[at];
            let copy = chunk.copies.iter_mut().find(|copy| copy.place == place)?;
            let envelope = if role == Role::Peek {
                copy.peeks += 1;
                copy.there().cloned()?
            } else {
                chunk.held_by = Some(id);
                match std::mem::replace(&mut copy.slot, CopyState::Lent) {
                    CopyState::There(envelope) => envelope,
                    // Unreachable: this was checked above.
                    other => {
                        copy.slot = other;
                        return None;
                    }
                }
            };
            if role == Role::Peek {
                chunk.set_seen(id, true);
            }
            Grant {
                number: chunk.number,
                envelope: Some(envelope),
                structure: Some(chunk.structure.clone()),
                lost: None,
            }
        };
        if role == Role::Consume || (role != Role::Produce && !self.consumes()) {
            self.passed_over = 0;
        }
        let served = self.tick();
        if let Some(link) = self.links.get_mut(&id) {
            self.gone.extend(link.waits.take().map(|waits| waits.waker));
            (link.served, link.last) = (served, grant.number);
        }
        Some(grant)
    }

    /// Gives the link the loss of a chunk in place of the chunk; a consuming link removes the chunk.
    #[cold]
    fn take_loss(&mut self, id: LinkId, role: Role, at: usize) -> Grant<E, S> {
        let chunk = &mut self.chunks[at];
        let (number, lost) = (chunk.number, chunk.lost_at);
        let structure = if role == Role::Consume {
            let mut out = Actions::default();
            let structure = self.consumed(number, &mut out);
            self.freed.append(&mut out.freed);
            structure
        } else {
            chunk.set_seen(id, true);
            None
        };
        Grant { number, envelope: None, structure, lost }
    }
}
