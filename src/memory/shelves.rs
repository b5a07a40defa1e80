//! Shelves: memory that was freed and may be handed out again, by its size and by what may still use it.
//!
//! ```text
//!              put                                   settle: all of it has passed
//!   in use ──────────> bound to one stream, or several ─────────────────────────> idle
//!      ^                  │ take: for that stream;                                 │ take: for anybody
//!      │                  │ take_if: for one that comes after all of it            │ drain: back to the driver
//!      └──────────────────┴─────────────────────────────────────────────────────────┘
//! ```
//!
//! It knows no device: what a block is bound to it says itself ([`Block`]), in numbers. So the rule that no block is handed
//! out too early is tested here against a model (below), and every kind of memory goes by it.
//!
//! The block that was freed last is taken first: it is the one that caches still know.

use std::collections::VecDeque;

use smallvec::SmallVec;

/// What a block that was freed is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    /// Nothing may use it any more.
    Idle,
    /// Work of this stream.
    To(u64),
    /// Work of several.
    ToSeveral,
}

/// A block that was freed, while something may still use it.
pub(super) trait Block {
    /// What is kept of it when nothing may use it any more.
    type Idle;
    /// Its size.
    fn size(&self) -> u64;
    fn bound(&mut self) -> Bound;
    /// Forgets the uses that are known to have passed.
    fn forget_passed(&mut self);
}

/// A block that is handed out again.
pub(super) enum Taken<B: Block> {
    /// It is used by nothing but work of the stream that it is for.
    Bound(B),
    Idle(B::Idle),
}

/// See the [module](self).
pub(super) struct Shelves<B: Block> {
    /// By their size, ascending.
    all: Vec<Shelf<B>>,
}

struct Shelf<B: Block> {
    size: u64,
    idle: Vec<B::Idle>,
    /// One a stream, and one for what is bound to several; in each the longest free first.
    bound: SmallVec<[(u64, VecDeque<B>); 2]>,
}

/// No stream has this number.
const SEVERAL: u64 = 0;
/// How many shelves there may be before those that are empty go.
const TIDY: usize = 64;

impl<B: Block> Shelves<B> {
    pub(super) fn new() -> Self {
        Self { all: Vec::new() }
    }

    #[inline]
    fn find(&self, size: u64) -> Result<usize, usize> {
        self.all.binary_search_by_key(&size, |shelf| shelf.size)
    }

    #[inline]
    fn shelf(&mut self, size: u64) -> &mut Shelf<B> {
        let at = self.find(size).unwrap_or_else(|at| self.add(at, size));
        &mut self.all[at]
    }

    #[cold]
    fn add(&mut self, at: usize, size: u64) -> usize {
        self.all.insert(at, Shelf { size, idle: Vec::new(), bound: SmallVec::new() });
        at
    }

    /// A block that nothing may use any more.
    #[inline]
    pub(super) fn put_idle(&mut self, size: u64, block: B::Idle) {
        self.shelf(size).idle.push(block);
    }

    /// One that this stream may use, or, without one, several.
    #[inline]
    pub(super) fn put_bound(&mut self, block: B, to: Option<u64>) {
        self.shelf(block.size()).put(block, to.unwrap_or(SEVERAL));
    }

    /// A block of exactly this size that is bound to nothing but this stream, or to nothing.
    #[inline]
    pub(super) fn take(&mut self, size: u64, stream: Option<u64>) -> Option<Taken<B>> {
        let at = self.find(size).ok()?;
        let shelf = &mut self.all[at];
        if let Some(stream) = stream
            && let Some((_, blocks)) = shelf.bound.iter_mut().find(|(to, _)| *to == stream)
            && let Some(block) = blocks.pop_back()
        {
            return Some(Taken::Bound(block));
        }
        shelf.idle.pop().map(Taken::Idle)
    }

    /// A bound block of exactly this size of which `ready` says that it can be had.
    pub(super) fn take_if(&mut self, size: u64, ready: impl Fn(&B) -> bool) -> Option<B> {
        let at = self.find(size).ok()?;
        self.all[at].bound.iter_mut().find_map(|(_, blocks)| {
            let at = blocks.iter().position(&ready)?;
            blocks.remove(at)
        })
    }

    /// The bound block that has been free for the longest time, of those of the smallest size that is enough.
    pub(super) fn take_bound(&mut self, least: u64) -> Option<B> {
        let from = self.find(least).unwrap_or_else(|at| at);
        let mut shelves = self.all[from..].iter_mut();
        // In each list the first is the oldest; of several lists any will do.
        shelves.find_map(|shelf| shelf.bound.iter_mut().find_map(|(_, blocks)| blocks.pop_front()))
    }

    /// All that is bound.
    pub(super) fn bound(&self) -> impl Iterator<Item = &B> {
        self.all.iter().flat_map(|shelf| shelf.bound.iter().flat_map(|(_, blocks)| blocks))
    }

    /// Those of this size.
    pub(super) fn bound_of(&self, size: u64) -> impl Iterator<Item = &B> {
        let shelf = self.find(size).ok().map(|at| &self.all[at]);
        shelf.into_iter().flat_map(|shelf| shelf.bound.iter().flat_map(|(_, blocks)| blocks))
    }

    /// Finds what has passed. `idle` is given each block that is bound to nothing any more, and says what is kept of it.
    pub(super) fn settle(&mut self, mut idle: impl FnMut(B) -> Option<B::Idle>) {
        for shelf in &mut self.all {
            let mut moved: SmallVec<[B; 8]> = SmallVec::new();
            for (to, blocks) in &mut shelf.bound {
                for _ in 0..blocks.len() {
                    let Some(mut block) = blocks.pop_front() else { break };
                    block.forget_passed();
                    match block.bound() {
                        Bound::ToSeveral => blocks.push_back(block),
                        Bound::To(stream) if stream == *to => blocks.push_back(block),
                        // On another list from now on, or on none.
                        _ => moved.push(block),
                    }
                }
            }
            for mut block in moved {
                match block.bound() {
                    Bound::Idle => shelf.idle.extend(idle(block)),
                    Bound::To(stream) => shelf.put(block, stream),
                    Bound::ToSeveral => shelf.put(block, SEVERAL),
                }
            }
            shelf.bound.retain(|(_, blocks)| !blocks.is_empty());
        }
        if self.all.len() > TIDY {
            self.all.retain(|shelf| !shelf.is_empty());
        }
    }

    /// Takes idle blocks out, with their sizes, the largest first, until `enough` says so; it is shown each size.
    pub(super) fn drain_idle(&mut self, mut enough: impl FnMut(u64) -> bool) -> Vec<(u64, B::Idle)> {
        let mut drained = Vec::new();
        'all: for shelf in self.all.iter_mut().rev() {
            while let Some(block) = shelf.idle.pop() {
                drained.push((shelf.size, block));
                if enough(shelf.size) {
                    break 'all;
                }
            }
        }
        drained
    }

    /// Takes those out of what is bound of which `which` says so.
    pub(super) fn drain_bound(&mut self, which: impl Fn(&B) -> bool) -> Vec<B> {
        let mut drained = Vec::new();
        for (_, blocks) in self.all.iter_mut().flat_map(|shelf| &mut shelf.bound) {
            let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(blocks).into_iter().partition(&which);
            drained.extend(gone);
            blocks.extend(kept);
        }
        drained
    }
}

impl<B: Block> Shelf<B> {
    #[inline]
    fn put(&mut self, block: B, to: u64) {
        match self.bound.iter_mut().find(|(stream, _)| *stream == to) {
            Some((_, blocks)) => blocks.push_back(block),
            None => self.bound_first(block, to),
        }
    }

    #[cold]
    fn bound_first(&mut self, block: B, to: u64) {
        self.bound.push((to, VecDeque::from([block])));
    }

    fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.bound.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const STREAMS: usize = 4;

    /// What the host has seen pass, by stream.
    type Seen = Rc<RefCell<[u64; STREAMS]>>;

    /// A block bound to plain numbers: the last use on each stream.
    #[derive(Debug)]
    struct Numbered {
        id: usize,
        size: u64,
        uses: BTreeMap<usize, u64>,
        seen: Seen,
    }

    impl Block for Numbered {
        type Idle = Self;

        fn size(&self) -> u64 {
            self.size
        }

        fn bound(&mut self) -> Bound {
            let mut uses = self.uses.keys();
            match (uses.next(), uses.next()) {
                (None, _) => Bound::Idle,
                (Some(stream), None) => Bound::To(*stream as u64 + 1),
                _ => Bound::ToSeveral,
            }
        }

        fn forget_passed(&mut self) {
            let seen = self.seen.borrow();
            self.uses.retain(|stream, ticket| seen[*stream] < *ticket);
        }
    }

    fn put(shelves: &mut Shelves<Numbered>, mut block: Numbered) {
        match block.bound() {
            Bound::Idle => shelves.put_idle(block.size, block),
            Bound::To(stream) => shelves.put_bound(block, Some(stream)),
            Bound::ToSeveral => shelves.put_bound(block, None),
        }
    }

    fn block(taken: Taken<Numbered>) -> Numbered {
        match taken {
            Taken::Bound(block) | Taken::Idle(block) => block,
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// The block in use at that place (counted modulo) is used on a stream.
        Use(usize, usize),
        Free(usize),
        Alloc(usize, u64),
        /// One stream waits for another's end.
        Wait(usize, usize),
        /// The host sees so much more of a stream pass.
        Pass(usize, u64),
        Settle,
    }

    fn op() -> impl Strategy<Value = Op> {
        let stream = || 0..STREAMS;
        prop_oneof![
            4 => (0..8_usize, stream()).prop_map(|(at, on)| Op::Use(at, on)),
            3 => (0..8_usize).prop_map(Op::Free),
            4 => (stream(), 1..3_u64).prop_map(|(on, size)| Op::Alloc(on, size)),
            1 => (stream(), stream()).prop_map(|(one, other)| Op::Wait(one, other)),
            1 => (stream(), 1..4_u64).prop_map(|(of, more)| Op::Pass(of, more)),
            1 => Just(Op::Settle),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// A block is handed out only to a stream that comes after all of its uses, or when they have passed; and if there
        /// is such a block, one is handed out.
        #[test]
        fn no_block_is_handed_out_too_early_and_none_is_overlooked(ops in vec(op(), 1..80)) {
            let seen = Seen::default();
            let mut shelves = Shelves::<Numbered>::new();
            let mut issued = [0_u64; STREAMS];
            // What each stream comes after: for each other, up to which ticket.
            let mut clocks = [[0_u64; STREAMS]; STREAMS];
            let mut in_use: Vec<Numbered> = Vec::new();
            // The model: all uses of each freed block, however old, never forgotten.
            let mut past: BTreeMap<usize, [u64; STREAMS]> = BTreeMap::new();
            let (mut free, mut next): (BTreeMap<usize, u64>, usize) = (BTreeMap::new(), 0);
            for op in ops {
                match op {
                    Op::Use(at, on) if !in_use.is_empty() => {
                        let at = at % in_use.len();
                        issued[on] += 1;
                        clocks[on][on] = issued[on];
                        in_use[at].uses.insert(on, issued[on]);
                        past.get_mut(&in_use[at].id).unwrap()[on] = issued[on];
                    }
                    Op::Free(at) if !in_use.is_empty() => {
                        let mut block = in_use.swap_remove(at % in_use.len());
                        block.forget_passed();
                        free.insert(block.id, block.size);
                        put(&mut shelves, block);
                    }
                    Op::Alloc(on, size) => {
                        let has_all = |uses: &[u64; STREAMS]| {
                            (0..STREAMS).all(|of| uses[of] <= seen.borrow()[of].max(clocks[on][of]))
                        };
                        let could = free.iter().any(|(id, of)| *of == size && has_all(&past[id]));
                        let known = |block: &Numbered| {
                            let known = |(of, ticket): (&usize, &u64)| *ticket <= seen.borrow()[*of].max(clocks[on][*of]);
                            block.uses.iter().all(known)
                        };
                        let taken = shelves.take(size, Some(on as u64 + 1)).map(block).or_else(|| shelves.take_if(size, known));
                        prop_assert_eq!(taken.is_some(), could, "of those that are free: {:?}", free);
                        let block = taken.unwrap_or_else(|| {
                            next += 1;
                            past.insert(next, [0; STREAMS]);
                            Numbered { id: next, size, uses: BTreeMap::new(), seen: seen.clone() }
                        });
                        prop_assert_eq!(block.size, size);
                        prop_assert!(has_all(&past[&block.id]), "too early: {:?}", block);
                        free.remove(&block.id);
                        in_use.push(block);
                    }
                    Op::Wait(one, other) if one != other => {
                        let theirs = clocks[other];
                        clocks[one].iter_mut().zip(theirs).for_each(|(own, their)| *own = their.max(*own));
                    }
                    Op::Pass(of, more) => {
                        let passed = (seen.borrow()[of] + more).min(issued[of]);
                        seen.borrow_mut()[of] = passed;
                    }
                    Op::Settle => {
                        let mut idle = 0;
                        shelves.settle(|block| {
                            idle += 1;
                            Some(block)
                        });
                        prop_assert!(shelves.bound().all(|block| !block.uses.is_empty()));
                        prop_assert!(idle <= free.len());
                    }
                    _ => {}
                }
                let shelved = shelves.bound().count();
                prop_assert!(shelved <= free.len());
            }
            let bound = shelves.drain_bound(|_| true).len();
            prop_assert_eq!(bound + shelves.drain_idle(|_| false).len(), free.len(), "none is lost");
        }
    }

    #[test]
    fn the_last_one_freed_is_taken_first_and_larger_ones_go_back_first() {
        let seen = Seen::default();
        let numbered = |id, size| Numbered { id, size, uses: BTreeMap::new(), seen: seen.clone() };
        let mut shelves = Shelves::new();
        [numbered(1, 8), numbered(2, 8), numbered(3, 16)].into_iter().for_each(|block| put(&mut shelves, block));
        assert_eq!(block(shelves.take(8, None).unwrap()).id, 2);
        assert!(shelves.take(4, None).is_none(), "only of the same size");
        assert_eq!(shelves.drain_idle(|size| size == 16).len(), 1);
        assert_eq!(shelves.drain_idle(|_| false)[0].1.id, 1);
    }
}
