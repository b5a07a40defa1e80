//! [`StateSnapshot`]: answers to the questions that `settle` asks about each waiting link, computed once while the state
//! does not change.
//!
//! A link may proceed if what it waits for is available and no link ahead of it can take that. Answering this for one
//! link visits all links, so the answers that links share are cached here:
//!
//! ```text
//!   of each chunk:  the link that modifies it next, and whether one is to peek at it     (Turn)
//!                   for each role, since when the first link that can take it waits      (First)
//!   of each place:  whether blanks are left for producers
//! ```
//!
//! All links together then need as many visits as there are links, times the chunks that they wait for.

use std::{
    cell::{Cell, OnceCell, RefCell},
    ops::Deref,
};

use smallvec::SmallVec;

use super::{Blanks, ChunkHubState, ChunkRecord, LinkId, LinkRecord, LocationId, Role, Turn};

/// See the module.
pub(super) struct StateSnapshot<'a, E, S, B> {
    state: &'a ChunkHubState<E, S>,
    blanks: &'a B,
    /// By chunk.
    turns: SmallVec<[Cell<Option<Turn>>; 4]>,
    has_blanks: RefCell<SmallVec<[(LocationId, bool); 2]>>,
    firsts: OnceCell<Firsts>,
    /// There are envelopes for one more chunk, even if the producers commit all their blanks.
    has_enough: OnceCell<bool>,
}

/// The time since when the first link waits, among the links that could take what they wait for if there were no other
/// links, and that were not offered it yet.
struct Firsts {
    produce: u64,
    /// By chunk.
    chunks: SmallVec<[First; 4]>,
}

/// The same times for one chunk; [`NONE`] if there is no such link.
#[derive(Clone, Copy)]
struct First {
    peek: u64,
    modify: u64,
    consume: u64,
    /// A modifying link that waits only for the end of all peeks.
    modify_after_peeks: u64,
}

const NONE: u64 = u64::MAX;

impl<'a, E: Clone + Deref, S: Clone, B: Blanks<E>> StateSnapshot<'a, E, S, B> {
    pub(super) fn new(state: &'a ChunkHubState<E, S>, blanks: &'a B) -> Self {
        Self {
            state,
            blanks,
            turns: state.chunks.iter().map(|_| Cell::new(None)).collect(),
            has_blanks: RefCell::default(),
            firsts: OnceCell::new(),
            has_enough: OnceCell::new(),
        }
    }

    /// Whether it is this link's turn at the chunk `at`, regardless of which link has the chunk now.
    fn is_turn(&self, id: LinkId, link: &LinkRecord, at: usize) -> bool {
        let turn = &self.turns[at];
        let known = turn.get().unwrap_or_else(|| self.state.turn(&self.state.chunks[at]));
        turn.set(Some(known));
        known.is_of(id, link.role)
    }

    /// Whether no other link uses the chunk in a way that excludes this link.
    fn is_free(link: &LinkRecord, chunk: &ChunkRecord<E, S>) -> bool {
        if chunk.held_by.is_some() {
            return false;
        }
        match link.role {
            Role::Peek => true,
            Role::Modify => !chunk.is_peeked() && chunk.moving == 0,
            _ => chunk.copy(link.place).is_none_or(|copy| copy.peeks == 0) && chunk.moving == 0,
        }
    }

    /// Whether blanks are left for producers at `place`, beyond those that chunks still need there.
    fn has_blanks(&self, place: LocationId) -> bool {
        let known = self.has_blanks.borrow().iter().find(|(of, _)| *of == place).map(|(_, has)| *has);
        known.unwrap_or_else(|| {
            let left = self.blanks.count(place);
            let has = left > 0 && left > self.state.reserved(self.state.chunks.len(), place);
            self.has_blanks.borrow_mut().push((place, has));
            has
        })
    }

    fn has_enough(&self) -> bool {
        *self.has_enough.get_or_init(|| self.state.too_few(self.state.open.len(), self.blanks).is_none())
    }

    /// Returns true for a producer whose chunk would get no envelope.
    pub(super) fn is_refused(&self, link: &LinkRecord) -> bool {
        link.role == Role::Produce && !self.has_enough() && self.state.too_few(0, self.blanks).is_some()
    }

    /// Whether the link could take what it waits for now if no other link waited.
    pub(super) fn is_there(&self, id: LinkId, link: &LinkRecord, blank: bool) -> bool {
        if link.role == Role::Produce {
            return self.state.room() > 0 && (!blank || (self.has_blanks(link.place) && self.has_enough()));
        }
        self.state.next_for(id, link).is_some_and(|at| self.is_there_of(id, link, at))
    }

    fn is_there_of(&self, id: LinkId, link: &LinkRecord, at: usize) -> bool {
        let chunk = &self.state.chunks[at];
        Self::is_free(link, chunk) && (chunk.is_there(link.place) || chunk.is_lost()) && self.is_turn(id, link, at)
    }

    fn firsts(&self) -> &Firsts {
        self.firsts.get_or_init(|| {
            let none = First { peek: NONE, modify: NONE, consume: NONE, modify_after_peeks: NONE };
            let mut firsts = Firsts { produce: NONE, chunks: SmallVec::from_elem(none, self.state.chunks.len()) };
            for (id, link) in self.state.each() {
                let Some(waits) = link.waits.as_ref().filter(|waits| !waits.offered) else { continue };
                if link.role == Role::Produce {
                    if self.is_there(id, link, waits.blank) {
                        firsts.produce = firsts.produce.min(waits.since);
                    }
                    continue;
                }
                let Some(at) = self.state.next_for(id, link) else { continue };
                let first = &mut firsts.chunks[at];
                if self.is_there_of(id, link, at) {
                    let of_role = match link.role {
                        Role::Peek => &mut first.peek,
                        Role::Modify => &mut first.modify,
                        _ => &mut first.consume,
                    };
                    *of_role = waits.since.min(*of_role);
                }
                let chunk = &self.state.chunks[at];
                if link.role == Role::Modify
                    && chunk.held_by.is_none()
                    && chunk.is_there(link.place)
                    && self.is_turn(id, link, at)
                {
                    first.modify_after_peeks = first.modify_after_peeks.min(waits.since);
                }
            }
            firsts
        })
    }

    /// Whether a link that has waited longer than this one can take the same chunk or blank: it was woken for that, and
    /// has not polled yet.
    fn has_precedence(&self, id: LinkId, link: &LinkRecord) -> bool {
        let came = link.waits.as_ref().map_or(NONE, |waits| waits.since);
        let firsts = self.firsts();
        if link.role == Role::Produce {
            return firsts.produce < came;
        }
        let Some(first) = self.state.next_for(id, link).map(|at| &firsts.chunks[at]) else { return false };
        match link.role {
            // A modifying link waits for the peeks to end: a link that has peeked since then begins no further peek.
            Role::Peek => {
                first.consume < came || (first.modify_after_peeks < came && first.modify_after_peeks <= link.served)
            }
            _ => first.peek.min(first.modify).min(first.consume) < came,
        }
    }

    /// Whether the link may take what it waits for now.
    pub(super) fn may_proceed(&self, id: LinkId, link: &LinkRecord, blank: bool) -> bool {
        self.is_there(id, link, blank) && !self.has_precedence(id, link)
    }

    /// Whether no waiting link can take what it waits for, apart from links that were offered it already.
    pub(super) fn all_wait(&self) -> bool {
        let firsts = self.firsts();
        firsts.produce == NONE
            && firsts.chunks.iter().all(|first| first.peek.min(first.modify).min(first.consume) == NONE)
    }
}
