//! Free lists: memory that was freed and can be handed out again, by size and by the streams that might still be using
//! it.
//!
//! ```text
//!              park                                  settle: its uses have passed
//!   in use ──────────> parked: in use by one stream or several ──────────────────> free
//!      ^                  │ take: for that stream;                                 │ take: for any stream
//!      │                  │ take_if: for a stream that comes after all uses        │ drain: back to the driver
//!      └──────────────────┴─────────────────────────────────────────────────────────┘
//! ```
//!
//! This module does not use the device: each block reports the streams that might still be using it as numbers
//! ([`Block`]). So the rule that no block is handed out too early applies to every kind of memory, and is tested below
//! against a model.
//!
//! Of the blocks that only one stream might be using, that stream takes the most recently used block, which is the most
//! likely to be cached.
//!
//! Thousands of blocks may be parked while a device lags behind, so a call inspects only one for each stream. Each
//! block is filed under one of the streams that might be using it, in the order of the last uses on that stream
//! ([`Block::blocker`]). Work on a stream completes in order: as long as the use of the first block has not passed, no
//! use of a later block has. A block that no longer waits for its stream is filed under the next stream. Blocks with
//! one user are in `sole`: if another stream cannot take the first block, it can take none of the later ones. Of the
//! blocks with several users, each request inspects a few, and the next request continues where it stopped.

use std::{collections::VecDeque, ops::Range};

use smallvec::SmallVec;

/// The streams that might still be using a freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Users {
    /// No stream uses it any more.
    None,
    /// Only the stream with this id.
    One(u64),
    /// Several streams.
    Several,
}

/// A freed block that streams might still be using.
pub(super) trait Block {
    /// The part of a block that is kept once no stream uses it any more.
    type Free;
    fn size(&self) -> u64;
    fn users(&mut self) -> Users;
    /// Forgets the uses that are known to have passed.
    fn forget_passed(&mut self);
    /// A stream that might still be using it, and the number of its last use on that stream.
    fn blocker(&mut self) -> (u64, u64);
}

/// A block that is handed out again.
pub(super) enum Taken<B: Block> {
    /// Only the requesting stream might still be using it.
    Parked(B),
    Free(B::Free),
}

/// See the [module](self).
pub(super) struct FreeLists<B: Block> {
    /// By size, ascending.
    classes: Vec<SizeClass<B>>,
    /// At this number of size classes, empty ones are removed.
    cleanup_at: usize,
}

struct SizeClass<B: Block> {
    size: u64,
    free: Vec<B::Free>,
    parked: SmallVec<[List<B>; 1]>,
}

/// The blocks that are filed under one stream, in the order of their last use there.
struct List<B> {
    stream: u64,
    /// Blocks that only work of this stream might still be using.
    sole: VecDeque<(u64, B)>,
    /// Blocks that work of other streams might still be using, too.
    several: VecDeque<(u64, B)>,
    /// The index in `several` at which the next request starts.
    next: usize,
}

/// The number of blocks with several users that a request inspects in each list.
const MAX_INSPECTED: usize = 32;
/// The minimum number of size classes at which empty ones are removed.
const CLEANUP_AT: usize = 64;

impl<B: Block> FreeLists<B> {
    pub(super) fn new() -> Self {
        Self { classes: Vec::new(), cleanup_at: CLEANUP_AT }
    }

    #[inline]
    fn find(&self, size: u64) -> Result<usize, usize> {
        self.classes.binary_search_by_key(&size, |class| class.size)
    }

    #[inline]
    fn class(&mut self, size: u64) -> &mut SizeClass<B> {
        let at = self.find(size).unwrap_or_else(|at| self.add(at, size));
        &mut self.classes[at]
    }

    #[cold]
    fn add(&mut self, mut at: usize, size: u64) -> usize {
        if self.classes.len() >= self.cleanup_at {
            self.classes.retain(|class| !class.is_empty());
            // Runs again after as many sizes again were added.
            self.cleanup_at = CLEANUP_AT.max(2 * self.classes.len());
            at = self.find(size).unwrap_or_else(|at| at);
        }
        self.classes.insert(at, SizeClass { size, free: Vec::new(), parked: SmallVec::new() });
        at
    }

    /// Adds a block that no stream uses any more.
    #[inline]
    pub(super) fn put_free(&mut self, size: u64, block: B::Free) {
        self.class(size).free.push(block);
    }

    /// Adds a block that stream `to` or, if `to` is `None`, several streams might still be using.
    #[inline]
    pub(super) fn park(&mut self, mut block: B, to: Option<u64>) {
        let (stream, number) = block.blocker();
        self.class(block.size()).put(block, (to.unwrap_or(stream), number), to.is_some());
    }

    /// Takes a block of exactly this size that no stream except `stream` might still be using.
    #[inline]
    pub(super) fn take(&mut self, size: u64, stream: Option<u64>) -> Option<Taken<B>> {
        let at = self.find(size).ok()?;
        let class = &mut self.classes[at];
        if let Some(stream) = stream
            && let Some(list) = class.parked.iter_mut().find(|list| list.stream == stream)
            && let Some((_, block)) = list.sole.pop_back()
        {
            return Some(Taken::Parked(block));
        }
        class.free.pop().map(Taken::Free)
    }

    /// Takes a parked block of exactly this size for which `ready` is true. If `ready` is true for a block with one
    /// user, it must be true for all blocks with the same user that were used earlier.
    pub(super) fn take_if(&mut self, size: u64, ready: impl Fn(&B) -> bool) -> Option<B> {
        let at = self.find(size).ok()?;
        self.classes[at].parked.iter_mut().find_map(|list| list.take_if(&ready))
    }

    /// Takes the block that was parked first, among the blocks of the smallest sufficient size.
    pub(super) fn take_parked(&mut self, least: u64) -> Option<B> {
        let from = self.find(least).unwrap_or_else(|at| at);
        let mut lists = self.classes[from..].iter_mut().flat_map(|class| &mut class.parked);
        // In each list the first is the oldest. Among the lists the choice is arbitrary.
        lists.find_map(|list| list.sole.pop_front().or_else(|| list.several.pop_front()).map(|(_, block)| block))
    }

    /// The first block of each list of parked blocks, of this size or of all sizes. After [`settle`](Self::settle) none
    /// of them was known to have passed.
    pub(super) fn firsts(&self, size: Option<u64>) -> impl Iterator<Item = &B> {
        self.lists(size).filter_map(VecDeque::front).map(|(_, block)| block)
    }

    /// The first and the last block of each list.
    pub(super) fn ends(&self) -> impl Iterator<Item = &B> {
        let lasts = self.lists(None).filter(|blocks| blocks.len() > 1).filter_map(VecDeque::back);
        self.firsts(None).chain(lasts.map(|(_, block)| block))
    }

    fn lists(&self, size: Option<u64>) -> impl Iterator<Item = &VecDeque<(u64, B)>> {
        let lists = self.classes[self.range(size)].iter().flat_map(|class| &class.parked);
        lists.flat_map(|list| [&list.sole, &list.several])
    }

    fn range(&self, size: Option<u64>) -> Range<usize> {
        match size.map(|size| self.find(size)) {
            None => 0..self.classes.len(),
            Some(Ok(at)) => at..at + 1,
            Some(Err(_)) => 0..0,
        }
    }

    /// Finds blocks whose uses have passed, of this size or of all sizes. `settled` is called with each block that no
    /// stream uses any more, and returns the part of the block to keep.
    pub(super) fn settle(&mut self, size: Option<u64>, mut settled: impl FnMut(B) -> Option<B::Free>) {
        let range = self.range(size);
        for class in &mut self.classes[range] {
            let mut moved: SmallVec<[B; 8]> = SmallVec::new();
            for list in &mut class.parked {
                list.take_passed(&mut moved);
            }
            for mut block in moved {
                match block.users() {
                    Users::None => class.free.extend(settled(block)),
                    users => {
                        let under = block.blocker();
                        class.put(block, under, users != Users::Several);
                    }
                }
            }
            class.parked.retain(|list| !list.is_empty());
        }
    }

    /// Takes out free blocks with their sizes, the largest first, until `enough` returns true. `enough` is called with
    /// the size of each block.
    pub(super) fn drain_free(&mut self, mut enough: impl FnMut(u64) -> bool) -> Vec<(u64, B::Free)> {
        let mut drained = Vec::new();
        'all: for class in self.classes.iter_mut().rev() {
            while let Some(block) = class.free.pop() {
                drained.push((class.size, block));
                if enough(class.size) {
                    break 'all;
                }
            }
        }
        drained
    }

    /// Takes out the parked blocks for which `which` is true.
    pub(super) fn drain_parked(&mut self, which: impl Fn(&B) -> bool) -> Vec<B> {
        let mut drained = Vec::new();
        let lists = self.classes.iter_mut().flat_map(|class| &mut class.parked);
        for blocks in lists.flat_map(|list| [&mut list.sole, &mut list.several]) {
            let (gone, kept): (Vec<_>, Vec<_>) =
                std::mem::take(blocks).into_iter().partition(|(_, block)| which(block));
            drained.extend(gone.into_iter().map(|(_, block)| block));
            blocks.extend(kept);
        }
        drained
    }
}

impl<B: Block> SizeClass<B> {
    #[inline]
    fn put(&mut self, block: B, under: (u64, u64), sole: bool) {
        let (stream, number) = under;
        let at = self.parked.iter().position(|list| list.stream == stream).unwrap_or_else(|| self.add(stream));
        let list = &mut self.parked[at];
        let blocks = if sole { &mut list.sole } else { &mut list.several };
        if blocks.back().is_none_or(|(last, _)| *last <= number) {
            blocks.push_back((number, block));
        } else {
            let at = blocks.partition_point(|(other, _)| *other <= number);
            blocks.insert(at, (number, block));
        }
    }

    #[cold]
    fn add(&mut self, stream: u64) -> usize {
        self.parked.push(List { stream, sole: VecDeque::new(), several: VecDeque::new(), next: 0 });
        self.parked.len() - 1
    }

    fn is_empty(&self) -> bool {
        self.free.is_empty() && self.parked.is_empty()
    }
}

impl<B: Block> List<B> {
    fn take_if(&mut self, ready: &impl Fn(&B) -> bool) -> Option<B> {
        if self.sole.front().is_some_and(|(_, first)| ready(first)) {
            return self.sole.pop_front().map(|(_, block)| block);
        }
        let from = if self.next < self.several.len() { self.next } else { 0 };
        let found = self.several.iter().skip(from).take(MAX_INSPECTED).position(|(_, block)| ready(block));
        match found {
            Some(at) => self.several.remove(from + at).map(|(_, block)| block),
            None => {
                self.next = from + MAX_INSPECTED;
                None
            }
        }
    }

    /// Takes the blocks from the front that no longer belong in their list: this stream no longer uses them, or has
    /// become their only user.
    fn take_passed(&mut self, passed: &mut SmallVec<[B; 8]>) {
        for (blocks, sole) in [(&mut self.sole, true), (&mut self.several, false)] {
            while let Some((number, first)) = blocks.front_mut() {
                first.forget_passed();
                let stays = match first.users() {
                    Users::None => false,
                    Users::One(stream) => sole && stream == self.stream,
                    Users::Several => !sole && first.blocker() == (self.stream, *number),
                };
                if stays {
                    break;
                }
                passed.extend(blocks.pop_front().map(|(_, block)| block));
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.sole.is_empty() && self.several.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::{Cell, RefCell},
        collections::BTreeMap,
        rc::Rc,
    };

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const STREAMS: usize = 4;

    /// The highest ticket that the host knows to have passed, by stream.
    type Seen = Rc<RefCell<[u64; STREAMS]>>;

    /// A block whose users are plain numbers: the last use on each stream.
    #[derive(Debug)]
    struct Numbered {
        id: usize,
        size: u64,
        uses: BTreeMap<usize, u64>,
        seen: Seen,
        /// How often this block, or another, was inspected.
        inspections: Rc<Cell<usize>>,
    }

    impl Block for Numbered {
        type Free = Self;

        fn size(&self) -> u64 {
            self.size
        }

        fn users(&mut self) -> Users {
            let mut uses = self.uses.keys();
            match (uses.next(), uses.next()) {
                (None, _) => Users::None,
                (Some(stream), None) => Users::One(*stream as u64 + 1),
                _ => Users::Several,
            }
        }

        fn forget_passed(&mut self) {
            self.inspections.set(self.inspections.get() + 1);
            let seen = self.seen.borrow();
            self.uses.retain(|stream, ticket| seen[*stream] < *ticket);
        }

        fn blocker(&mut self) -> (u64, u64) {
            self.uses.last_key_value().map_or((0, 0), |(stream, ticket)| (*stream as u64 + 1, *ticket))
        }
    }

    impl FreeLists<Numbered> {
        fn parked(&self) -> impl Iterator<Item = &Numbered> {
            self.lists(None).flatten().map(|(_, block)| block)
        }

        fn free(&self) -> usize {
            self.classes.iter().map(|class| class.free.len()).sum()
        }
    }

    fn put(lists: &mut FreeLists<Numbered>, mut block: Numbered) {
        match block.users() {
            Users::None => lists.put_free(block.size, block),
            Users::One(stream) => lists.park(block, Some(stream)),
            Users::Several => lists.park(block, None),
        }
    }

    fn block(taken: Taken<Numbered>) -> Numbered {
        match taken {
            Taken::Parked(block) | Taken::Free(block) => block,
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// Uses the block at this index of those in use (modulo their number) on a stream.
        Use(usize, usize),
        Free(usize),
        Alloc(usize, u64),
        /// One stream waits for the end of another.
        Wait(usize, usize),
        /// The host sees this much more of a stream pass.
        Pass(usize, u64),
        Settle(Option<u64>),
    }

    fn op() -> impl Strategy<Value = Op> {
        let stream = || 0..STREAMS;
        prop_oneof![
            4 => (0..8_usize, stream()).prop_map(|(at, on)| Op::Use(at, on)),
            3 => (0..8_usize).prop_map(Op::Free),
            4 => (stream(), 1..3_u64).prop_map(|(on, size)| Op::Alloc(on, size)),
            1 => (stream(), stream()).prop_map(|(one, other)| Op::Wait(one, other)),
            1 => (stream(), 1..4_u64).prop_map(|(of, more)| Op::Pass(of, more)),
            1 => prop_oneof![Just(None), (1..3_u64).prop_map(Some)].prop_map(Op::Settle),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 500 } else { 5000 }))]

        /// A block is handed out only to a stream that comes after all of its uses, or after they have passed; and if
        /// there is such a block, one is handed out.
        #[test]
        fn no_block_is_handed_out_too_early_and_none_is_overlooked(ops in vec(op(), 1..80)) {
            let seen = Seen::default();
            let mut lists = FreeLists::<Numbered>::new();
            let mut issued = [0_u64; STREAMS];
            // What each stream comes after: for each other stream, up to which ticket.
            let mut clocks = [[0_u64; STREAMS]; STREAMS];
            let mut in_use: Vec<Numbered> = Vec::new();
            // The model: all uses of each freed block, never forgotten.
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
                        put(&mut lists, block);
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
                        let taken = lists.take(size, Some(on as u64 + 1)).map(block).or_else(|| lists.take_if(size, known));
                        prop_assert_eq!(taken.is_some(), could, "free blocks: {:?}", free);
                        let block = taken.unwrap_or_else(|| {
                            next += 1;
                            past.insert(next, [0; STREAMS]);
                            Numbered { id: next, size, uses: BTreeMap::new(), seen: seen.clone(), inspections: Rc::default() }
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
                    Op::Settle(size) => {
                        let mut idle = 0;
                        let passes = |uses: &[u64; STREAMS]| (0..STREAMS).all(|of| uses[of] <= seen.borrow()[of]);
                        let passed = free.keys().filter(|id| passes(&past[id])).count();
                        let before = lists.free();
                        lists.settle(size, |block| {
                            idle += 1;
                            Some(block)
                        });
                        if size.is_none() {
                            prop_assert_eq!(lists.free(), passed, "before: {}", before);
                        }
                        prop_assert!(idle <= free.len());
                    }
                    _ => {}
                }
                let parked = lists.parked().count();
                prop_assert!(parked <= free.len());
            }
            let bound = lists.drain_parked(|_| true).len();
            prop_assert_eq!(bound + lists.drain_free(|_| false).len(), free.len(), "none is lost");
        }
    }

    #[test]
    fn the_last_one_freed_is_taken_first_and_larger_ones_go_back_first() {
        let seen = Seen::default();
        let numbered =
            |id, size| Numbered { id, size, uses: BTreeMap::new(), seen: seen.clone(), inspections: Rc::default() };
        let mut lists = FreeLists::new();
        [numbered(1, 8), numbered(2, 8), numbered(3, 16)].into_iter().for_each(|block| put(&mut lists, block));
        assert_eq!(block(lists.take(8, None).unwrap()).id, 2);
        assert!(lists.take(4, None).is_none(), "only of the same size");
        assert_eq!(lists.drain_free(|size| size == 16).len(), 1);
        assert_eq!(lists.drain_free(|_| false)[0].1.id, 1);
    }
    /// While a device is far behind, the number of blocks that an allocation inspects does not grow with the number of
    /// parked blocks, and each block is found once its uses have passed.
    #[test]
    fn few_of_many_parked_blocks_are_inspected() {
        const MANY: usize = if cfg!(miri) { 500 } else { 10_000 };
        let (seen, inspections) = (Seen::default(), Rc::<Cell<usize>>::default());
        let mut lists = FreeLists::new();
        for id in 0..MANY {
            // Used by one stream, or by two that pass one after the other.
            let ticket = id as u64 + 1;
            let uses = if id % 2 == 0 { vec![(0, ticket)] } else { vec![(1, ticket), (2, ticket)] };
            let uses = uses.into_iter().collect();
            put(&mut lists, Numbered { id, size: 8, uses, seen: seen.clone(), inspections: inspections.clone() });
        }
        let ready = |block: &Numbered| {
            inspections.set(inspections.get() + 1);
            block.uses.iter().all(|(of, ticket)| *ticket <= seen.borrow()[*of])
        };
        let inspect = |lists: &mut FreeLists<Numbered>| {
            let before = inspections.get();
            let taken = lists.take_if(8, ready);
            assert!(lists.firsts(Some(8)).count() <= 2 && lists.ends().count() <= 4);
            lists.settle(Some(8), Some);
            (taken.is_some(), inspections.get() - before)
        };
        for _ in 0..100 {
            let (taken, inspections) = inspect(&mut lists);
            assert!(!taken && inspections <= 100, "{inspections}");
        }
        // Each block is moved when it passes: twice at most.
        let before = inspections.get();
        for passed in (0..=MANY as u64).step_by(100) {
            *seen.borrow_mut() = [passed; STREAMS];
            let _ = lists.take_if(8, ready).map(|block| put(&mut lists, block));
            lists.settle(None, Some);
        }
        let inspections = inspections.get() - before;
        assert!(inspections <= 3 * MANY, "{inspections}");
        assert_eq!((lists.parked().count(), lists.free()), (0, MANY));
    }

    /// Among many blocks with several users, a block that can be taken is found within the number of requests that it
    /// takes to inspect all of them.
    #[test]
    fn a_block_bound_to_several_streams_is_found_within_a_bounded_number_of_requests() {
        const MANY: usize = 10 * MAX_INSPECTED;
        let (seen, inspections) = (Seen::default(), Rc::<Cell<usize>>::default());
        let mut lists = FreeLists::new();
        for id in 0..MANY {
            let uses = [(0, 1), (1, 1)].into_iter().collect();
            put(&mut lists, Numbered { id, size: 8, uses, seen: seen.clone(), inspections: inspections.clone() });
        }
        for wanted in [MANY - 1, 3, MANY / 2] {
            let requests = 1 + (0..).take_while(|_| lists.take_if(8, |block| block.id == wanted).is_none()).count();
            assert!(requests <= MANY / MAX_INSPECTED + 1, "{requests}");
        }
    }
}
