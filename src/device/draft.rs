//! What is known of a graph on this side of the seam: its nodes as people know them, and what comes after what.
//!
//! Each node is in a chain, of which each node comes after the one before. So what a node comes after is one place in each
//! chain. A stream of a capture makes about one chain, and nodes share what they know of the others until they join:
//!
//! ```text
//!   chain 0    a ──> b ──────────> e ──> f        e, f: chain 1 up to d
//!              └───────> c ──> d ──┘              c, d: chain 0 up to a
//! ```

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::{
    backend::{Arg, NodeWork, Place, RawNode},
    human,
    touched::{Touched, touched_by},
};

/// The nodes of a graph, each after those that it was made to come after.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    nodes: Vec<Node>,
    /// How many nodes are in each chain.
    chains: Vec<usize>,
}

/// See [`Draft`].
#[derive(Debug)]
pub(crate) struct Node {
    /// What a successor comes after. Several, or none, where another library's work is one node here.
    pub(crate) raw: SmallVec<[RawNode; 1]>,
    pub(crate) kind: Kind,
    /// A kernel's name, or what it is.
    pub(crate) name: String,
    /// Whose it is.
    pub(crate) label: Option<Arc<str>>,
    pub(crate) after: Few,
    /// See the [module](self).
    chain: usize,
    place: usize,
    /// Directly or not.
    clock: Clock,
    /// That of those that come after it alone, once there is one.
    next: Option<Clock>,
    /// Of what it does beside that: sizes, shapes and values, but no addresses.
    pub(crate) digest: u64,
    /// Not what is in a graph within it.
    pub(crate) touched: Touched,
    /// If it is a copy.
    pub(crate) copies: Option<Copies>,
    /// It was taken out.
    pub(crate) removed: bool,
}

/// Where a copy goes to and comes from, and how much it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copies {
    pub(crate) to: Place,
    pub(crate) from: Place,
    pub(crate) bytes: u64,
}

/// Nodes, by their numbers.
pub(crate) type Few = SmallVec<[usize; 2]>;

/// The kinds of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A kernel.
    Kernel,
    /// A copy.
    Copy,
    /// A fill.
    Fill,
    /// A function of the host.
    Host,
    /// Nothing: it joins those that it comes after.
    Empty,
    /// All of another graph.
    Child,
    /// An event is recorded.
    Record,
    /// An event is waited for.
    Wait,
    /// Memory is made.
    Alloc,
    /// That is given back.
    Free,
    /// A graph that runs as a flag says.
    Conditional,
    /// Work of another library: perhaps several nodes of the driver's.
    External,
}

impl Kind {
    pub(crate) fn of(work: &NodeWork<'_>) -> Self {
        match work {
            NodeWork::Kernel(_) => Self::Kernel,
            NodeWork::Copy { .. } => Self::Copy,
            NodeWork::Fill { .. } => Self::Fill,
            NodeWork::Host(_) => Self::Host,
            NodeWork::Empty => Self::Empty,
            NodeWork::Child(_) => Self::Child,
            NodeWork::Record(_) => Self::Record,
            NodeWork::Wait(_) => Self::Wait,
            NodeWork::Free(_) => Self::Free,
        }
    }
}

/// For people: `saxpy`, `copy to device of 4096 bytes`.
pub(crate) fn name_of(work: &NodeWork<'_>) -> String {
    match work {
        NodeWork::Kernel(launch) => launch.kernel.name.into(),
        NodeWork::Copy { to, from, bytes } => format!("copy {} of {bytes} bytes", human::direction(*to, *from)),
        NodeWork::Fill { bytes, .. } => format!("fill of {bytes} bytes"),
        NodeWork::Host(_) => "host function".into(),
        NodeWork::Empty => "join".into(),
        NodeWork::Child(_) => "child graph".into(),
        NodeWork::Record(_) => "record".into(),
        NodeWork::Wait(_) => "wait".into(),
        NodeWork::Free(_) => "free".into(),
    }
}

/// Two captures of the same code have the same, unless the host has decided differently.
fn digest_of(work: &NodeWork<'_>) -> u64 {
    let mut digest = DefaultHasher::new();
    match work {
        NodeWork::Kernel(launch) => {
            (launch.grid, launch.block, launch.shared_bytes).hash(&mut digest);
            for arg in launch.args {
                match arg {
                    Arg::Slice { len, bytes, write, .. } => (len, bytes, write).hash(&mut digest),
                    Arg::Scalar(bytes) => bytes.hash(&mut digest),
                }
            }
        }
        NodeWork::Fill { pattern, bytes, .. } => (pattern.width, pattern.bits, bytes).hash(&mut digest),
        // All that there is to say of the others is in their names.
        _ => {}
    }
    digest.finish()
}

impl Draft {
    /// A node that does this.
    pub(crate) fn add_work(&mut self, raw: RawNode, work: &NodeWork<'_>, label: Option<Arc<str>>, after: Few) -> usize {
        let node = self.add(smallvec![raw], Kind::of(work), name_of(work), label, after);
        self.nodes[node].digest = digest_of(work);
        self.nodes[node].touched = touched_by(work);
        if let NodeWork::Copy { to, from, bytes } = *work {
            self.nodes[node].copies = Some(Copies { to, from, bytes });
        }
        node
    }

    pub(crate) fn set_touched(&mut self, node: usize, touched: Touched) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.touched = touched;
        }
    }

    /// Whether no edge orders the two.
    pub(crate) fn are_apart(&self, one: usize, other: usize) -> bool {
        one != other && !self.comes_after(one, other) && !self.comes_after(other, one)
    }

    pub(crate) fn add(
        &mut self,
        raw: SmallVec<[RawNode; 1]>,
        kind: Kind,
        name: String,
        label: Option<Arc<str>>,
        after: Few,
    ) -> usize {
        let (chain, place, clock) = self.come_after(&after);
        self.nodes.push(Node {
            raw,
            kind,
            name,
            label,
            after,
            chain,
            place,
            clock,
            next: None,
            digest: 0,
            touched: Touched::new(),
            copies: None,
            removed: false,
        });
        self.nodes.len() - 1
    }

    /// The place of a new node that comes after these, and its clock.
    fn come_after(&mut self, after: &[usize]) -> (usize, usize, Clock) {
        let is_last = |draft: &Self, chain: usize, place: usize| draft.chains[chain] == place + 1;
        // It goes on in the chain of one of them, if that is the last there.
        let goes_on = after.iter().copied().find(|at| is_last(self, self.nodes[*at].chain, self.nodes[*at].place));
        let mut others: Few = after.iter().copied().filter(|at| Some(*at) != goes_on).collect();
        others.retain(|at| goes_on.is_none_or(|last| !self.comes_after(last, *at)));
        let clock = match (goes_on, &*others) {
            (None, []) => Clock::default(),
            (Some(last), []) => self.nodes[last].clock.clone(),
            (None, [one]) => self.clock_after(*one),
            _ => self.clock_of_join(goes_on, &others),
        };
        // Or in any whose last node it comes after: what forks and joins again and again needs few.
        let chain = goes_on
            .map(|at| self.nodes[at].chain)
            .or_else(|| clock.iter().find(|(chain, place)| is_last(self, *chain, *place)).map(|(chain, _)| *chain));
        let chain = chain.unwrap_or_else(|| {
            self.chains.push(0);
            self.chains.len() - 1
        });
        self.chains[chain] += 1;
        (chain, self.chains[chain] - 1, clock)
    }

    /// The clock of a node that comes after this one alone, in another chain.
    fn clock_after(&mut self, at: usize) -> Clock {
        let node = &mut self.nodes[at];
        let (chain, place, clock) = (node.chain, node.place, &node.clock);
        node.next.get_or_insert_with(|| latest(clock.iter().copied().chain([(chain, place)]))).clone()
    }

    /// That of a node that comes after all of these, in the chain of the first.
    fn clock_of_join(&self, goes_on: Option<usize>, others: &[usize]) -> Clock {
        let nodes = || goes_on.iter().chain(others).map(|at| &self.nodes[*at]);
        // What they share is looked at once.
        let clocks: FxHashMap<_, _> = nodes().map(|node| (node.clock.as_ptr(), &node.clock)).collect();
        let shared = clocks.values().flat_map(|clock| clock.iter().copied());
        latest(shared.chain(others.iter().map(|at| (self.nodes[*at].chain, self.nodes[*at].place))))
    }

    pub(crate) fn get(&self, node: usize) -> Option<&Node> {
        self.nodes.get(node).filter(|node| !node.removed)
    }

    /// With their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &Node)> {
        self.nodes.iter().enumerate().filter(|(_, node)| !node.removed)
    }

    /// Whether `node` comes after `before`, directly or not.
    pub(crate) fn comes_after(&self, node: usize, before: usize) -> bool {
        let (Some(node), Some(before)) = (self.nodes.get(node), self.get(before)) else { return false };
        match node.chain == before.chain {
            true => before.place < node.place,
            false => place_in(&node.clock, before.chain).is_some_and(|place| before.place <= place),
        }
    }

    /// Without those that another of them comes after anyway.
    pub(crate) fn last_of(&self, nodes: impl IntoIterator<Item = usize>) -> Few {
        let mut last = Few::new();
        for node in nodes {
            if last.iter().any(|&other| other == node || self.comes_after(other, node)) {
                continue;
            }
            last.retain(|other| !self.comes_after(node, *other));
            last.push(node);
        }
        last
    }

    /// The driver's nodes that a successor of these comes after.
    pub(crate) fn raw_of(&self, nodes: &[usize]) -> SmallVec<[RawNode; 4]> {
        nodes.iter().flat_map(|&node| self.nodes[node].raw.iter().copied()).collect()
    }

    /// `after` comes after `before`, too. It does not come before it: whoever asks has looked.
    pub(crate) fn order(&mut self, before: usize, after: usize) {
        if !self.nodes[after].after.contains(&before) {
            self.nodes[after].after.push(before);
        }
        let gained = self.clock_after(before);
        // Those that shared a clock do so afterwards.
        let mut known: FxHashMap<*const (usize, usize), (Clock, Clock)> = FxHashMap::default();
        for at in 0..self.nodes.len() {
            if at == after || self.comes_after(at, after) {
                let node = &mut self.nodes[at];
                let old = node.clock.clone();
                let (_, new) = known
                    .entry(old.as_ptr())
                    .or_insert_with(|| (old.clone(), latest(old.iter().chain(&*gained).copied())));
                (node.clock, node.next) = (new.clone(), None);
            }
        }
    }

    /// What came after it comes after what it came after.
    pub(crate) fn remove(&mut self, node: usize) {
        self.nodes[node].removed = true;
        let before = std::mem::take(&mut self.nodes[node].after);
        for at in 0..self.nodes.len() {
            if let Some(place) = self.nodes[at].after.iter().position(|after| *after == node) {
                self.nodes[at].after.remove(place);
                for other in &before {
                    if !self.nodes[at].after.contains(other) {
                        self.nodes[at].after.push(*other);
                    }
                }
            }
        }
    }
}

/// How far a node has come in each chain that it is not in itself: the chain, and the last place in it that the node comes after.
/// Sorted by the chains. Nodes of the same clock share it.
type Clock = Arc<[(usize, usize)]>;

fn place_in(clock: &Clock, chain: usize) -> Option<usize> {
    clock.binary_search_by_key(&chain, |(chain, _)| *chain).ok().map(|at| clock[at].1)
}

/// Of each chain the last place.
fn latest(places: impl Iterator<Item = (usize, usize)>) -> Clock {
    let mut places: Vec<_> = places.collect();
    places.sort_unstable_by(|one, other| other.cmp(one));
    places.dedup_by_key(|(chain, _)| *chain);
    places.reverse();
    places.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn draft(edges: &[Vec<usize>]) -> Draft {
        let mut draft = Draft::default();
        for (at, after) in edges.iter().enumerate() {
            let after = after.iter().map(|node| node % at.max(1)).filter(|_| at > 0).collect();
            draft.add(SmallVec::new(), Kind::Empty, String::new(), None, after);
        }
        draft
    }

    fn reaches(draft: &Draft, from: usize, to: usize) -> bool {
        draft.nodes[from].after.iter().any(|&before| before == to || reaches(draft, before, to))
    }

    /// What its nodes know of each other, in places of chains.
    fn known(draft: &Draft) -> usize {
        let clocks = draft.nodes.iter().flat_map(|node| [Some(&node.clock), node.next.as_ref()]).flatten();
        clocks.map(|clock| (clock.as_ptr(), clock.len())).collect::<FxHashMap<_, _>>().values().sum()
    }

    #[test]
    fn what_is_known_of_many_nodes_is_little_for_each() {
        const NODES: usize = 10_000;
        let mut row = Draft::default();
        let add = |draft: &mut Draft, after: &[usize]| {
            draft.add(SmallVec::new(), Kind::Empty, String::new(), None, after.iter().copied().collect())
        };
        (0..NODES).for_each(|at| _ = add(&mut row, at.checked_sub(1).as_slice()));
        assert!(row.comes_after(NODES - 1, 0) && !row.comes_after(0, NODES - 1));
        assert_eq!(known(&row), 0);

        // Streams that part and meet, which goes on first by turns; in one layer after the other, without and with a node in
        // between.
        for (wide, joins) in [(2, true), (3, true), (100, true), (100, false)] {
            let mut layers = Draft::default();
            let mut last = vec![add(&mut layers, &[])];
            while layers.nodes.len() < NODES {
                let from = if joins { Some(add(&mut layers, &last)) } else { None };
                let mut branches: Vec<_> = (0..wide).collect();
                branches.rotate_left(layers.nodes.len() % wide);
                let ends = branches.iter().map(|branch| match from {
                    Some(from) => {
                        let first = add(&mut layers, &[from]);
                        add(&mut layers, &[first])
                    }
                    None => add(&mut layers, &[last[branch % last.len()]]),
                });
                last = ends.collect();
            }
            assert!(layers.comes_after(layers.nodes.len() - 1, 0));
            assert!(layers.are_apart(last[0], last[1]));
            let known = known(&layers);
            assert!(known <= 4 * NODES, "{wide} wide, {joins}: {known} for {NODES} nodes");
        }
    }

    proptest! {
        #[test]
        fn what_comes_after_what(
            edges in prop::collection::vec(prop::collection::vec(0..16_usize, 0..3), 1..16),
            more in prop::collection::vec((0..16_usize, 0..16_usize), 0..6),
            out in 0..16_usize,
            later in prop::collection::vec(prop::collection::vec(0..24_usize, 0..3), 0..8),
        ) {
            let mut draft = draft(&edges);
            let count = edges.len();
            for (before, after) in more {
                let (before, after) = (before % count, after % count);
                if before != after && !draft.comes_after(before, after) {
                    draft.order(before, after);
                }
            }
            let agree = |draft: &Draft| {
                let live = || draft.all().map(|(at, _)| at);
                live().all(|from| live().all(|to| draft.comes_after(from, to) == reaches(draft, from, to)))
            };
            prop_assert!(agree(&draft));
            let last = draft.last_of(0..count);
            prop_assert!((0..count).all(|node| last.iter().any(|&end| end == node || draft.comes_after(end, node))));
            prop_assert!(last.iter().all(|&end| !last.iter().any(|&other| draft.comes_after(other, end))));
            draft.remove(out % count);
            prop_assert!(agree(&draft));
            for after in later {
                let live: Vec<_> = draft.all().map(|(at, _)| at).collect();
                let after = after.iter().filter_map(|at| live.get(at % live.len().max(1)).copied()).collect();
                draft.add(SmallVec::new(), Kind::Empty, String::new(), None, after);
            }
            prop_assert!(agree(&draft));
        }
    }
}
