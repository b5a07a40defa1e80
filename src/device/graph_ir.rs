//! The host's model of a graph: its nodes with their names, and their dependencies.
//!
//! The nodes are divided into chains. Each node of a chain depends on the one before it, so the set of all nodes that a
//! node depends on is described by one position in each chain. A captured stream makes about one chain, and nodes share
//! these positions until chains join:
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
    backend::{Arg, Endpoint, NodeWork, RawNode},
    human,
    touched::{Touched, touched_by},
};

/// The nodes of a graph and their dependencies.
#[derive(Debug, Default)]
pub(crate) struct GraphIr {
    nodes: Vec<IrNode>,
    chains: Vec<usize>,
}

/// See [`GraphIr`].
#[derive(Debug)]
pub(crate) struct IrNode {
    /// The driver's nodes that a successor depends on. Several, or none, if this node is another library's work.
    pub(crate) raw: SmallVec<[RawNode; 1]>,
    pub(crate) kind: Kind,
    /// A kernel's name, or a description of the work.
    pub(crate) name: String,
    /// The owner.
    pub(crate) label: Option<Arc<str>>,
    pub(crate) after: NodeSet,
    /// The node's chain. See the [module](self).
    chain: usize,
    place: usize,
    /// All nodes that this one depends on, directly or indirectly.
    clock: ChainClock,
    /// The clock of nodes that depend on this one alone, created for the first of them.
    next: Option<ChainClock>,
    /// A digest of sizes, shapes and values, without addresses.
    pub(crate) digest: u64,
    /// The bytes that the node accesses, without those of a graph within it.
    pub(crate) touched: Touched,
    /// The operands, if it is a copy.
    pub(crate) copies: Option<CopyOperands>,
    pub(crate) removed: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyOperands {
    pub(crate) to: Endpoint,
    pub(crate) from: Endpoint,
    pub(crate) bytes: u64,
}

pub(crate) type NodeSet = SmallVec<[usize; 2]>;

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
    /// A host function.
    Host,
    /// No work: it joins its predecessors.
    Empty,
    /// Another graph as a whole.
    Child,
    /// Records an event.
    Record,
    /// Waits for an event.
    Wait,
    /// Allocates memory.
    Alloc,
    /// Frees such memory.
    Free,
    /// A graph that runs if, or while, a flag is set.
    Conditional,
    /// Work of another library: possibly several of the driver's nodes.
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

/// A name for messages: `saxpy`, `copy to device of 4096 bytes`.
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

/// A digest that is equal for two captures of the same code, unless the host made different decisions.
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
        // Other work differs only in its name.
        _ => {}
    }
    digest.finish()
}

impl GraphIr {
    pub(crate) fn add_work(
        &mut self,
        raw: RawNode,
        work: &NodeWork<'_>,
        label: Option<Arc<str>>,
        after: NodeSet,
    ) -> usize {
        let node = self.add(smallvec![raw], Kind::of(work), name_of(work), label, after);
        self.nodes[node].digest = digest_of(work);
        self.nodes[node].touched = touched_by(work);
        if let NodeWork::Copy { to, from, bytes } = *work {
            self.nodes[node].copies = Some(CopyOperands { to, from, bytes });
        }
        node
    }

    pub(crate) fn set_touched(&mut self, node: usize, touched: Touched) {
        if let Some(node) = self.nodes.get_mut(node) {
            node.touched = touched;
        }
    }

    /// True if neither node depends on the other.
    pub(crate) fn are_unordered(&self, one: usize, other: usize) -> bool {
        one != other && !self.comes_after(one, other) && !self.comes_after(other, one)
    }

    pub(crate) fn add(
        &mut self,
        raw: SmallVec<[RawNode; 1]>,
        kind: Kind,
        name: String,
        label: Option<Arc<str>>,
        after: NodeSet,
    ) -> usize {
        let (chain, place, clock) = self.place_after(&after);
        self.nodes.push(IrNode {
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

    /// The chain, place and clock of a new node that depends on these nodes.
    fn place_after(&mut self, after: &[usize]) -> (usize, usize, ChainClock) {
        let is_last = |ir: &Self, chain: usize, place: usize| ir.chains[chain] == place + 1;
        // The node continues the chain of a predecessor that is the last of its chain,
        let continued = after.iter().copied().find(|at| is_last(self, self.nodes[*at].chain, self.nodes[*at].place));
        let mut others: NodeSet = after.iter().copied().filter(|at| Some(*at) != continued).collect();
        others.retain(|at| continued.is_none_or(|last| !self.comes_after(last, *at)));
        let clock = match (continued, &*others) {
            (None, []) => ChainClock::default(),
            (Some(last), []) => self.nodes[last].clock.clone(),
            (None, [one]) => self.clock_after(*one),
            _ => self.clock_of_join(continued, &others),
        };
        // or else any chain whose last node it depends on, so that repeated forks and joins need few chains.
        let chain = continued
            .map(|at| self.nodes[at].chain)
            .or_else(|| clock.iter().find(|(chain, place)| is_last(self, *chain, *place)).map(|(chain, _)| *chain));
        let chain = chain.unwrap_or_else(|| {
            self.chains.push(0);
            self.chains.len() - 1
        });
        self.chains[chain] += 1;
        (chain, self.chains[chain] - 1, clock)
    }

    /// The clock of a node in another chain that depends on this one alone.
    fn clock_after(&mut self, at: usize) -> ChainClock {
        let node = &mut self.nodes[at];
        let (chain, place, clock) = (node.chain, node.place, &node.clock);
        node.next.get_or_insert_with(|| latest(clock.iter().copied().chain([(chain, place)]))).clone()
    }

    /// The clock of a node that depends on all of these nodes, in the chain of the first.
    fn clock_of_join(&self, continued: Option<usize>, others: &[usize]) -> ChainClock {
        let nodes = || continued.iter().chain(others).map(|at| &self.nodes[*at]);
        // Clocks that are shared are visited once.
        let clocks: FxHashMap<_, _> = nodes().map(|node| (node.clock.as_ptr(), &node.clock)).collect();
        let shared = clocks.values().flat_map(|clock| clock.iter().copied());
        latest(shared.chain(others.iter().map(|at| (self.nodes[*at].chain, self.nodes[*at].place))))
    }

    pub(crate) fn get(&self, node: usize) -> Option<&IrNode> {
        self.nodes.get(node).filter(|node| !node.removed)
    }

    /// The nodes with their numbers.
    pub(crate) fn all(&self) -> impl Iterator<Item = (usize, &IrNode)> {
        self.nodes.iter().enumerate().filter(|(_, node)| !node.removed)
    }

    /// True if `node` depends on `before`, directly or indirectly.
    pub(crate) fn comes_after(&self, node: usize, before: usize) -> bool {
        let (Some(node), Some(before)) = (self.nodes.get(node), self.get(before)) else { return false };
        match node.chain == before.chain {
            true => before.place < node.place,
            false => place_in(&node.clock, before.chain).is_some_and(|place| before.place <= place),
        }
    }

    /// The given nodes without those that another one of them depends on.
    pub(crate) fn last_of(&self, nodes: impl IntoIterator<Item = usize>) -> NodeSet {
        let mut last = NodeSet::new();
        for node in nodes {
            if last.iter().any(|&other| other == node || self.comes_after(other, node)) {
                continue;
            }
            last.retain(|other| !self.comes_after(node, *other));
            last.push(node);
        }
        last
    }

    /// The driver's nodes that a successor of the given nodes must depend on.
    pub(crate) fn raw_of(&self, nodes: &[usize]) -> SmallVec<[RawNode; 4]> {
        nodes.iter().flat_map(|&node| self.nodes[node].raw.iter().copied()).collect()
    }

    /// Makes `after` depend on `before` too. The caller has checked that this does not create a cycle.
    pub(crate) fn order(&mut self, before: usize, after: usize) {
        if !self.nodes[after].after.contains(&before) {
            self.nodes[after].after.push(before);
        }
        let gained = self.clock_after(before);
        // Nodes that shared a clock share the new one.
        let mut known: FxHashMap<*const (usize, usize), (ChainClock, ChainClock)> = FxHashMap::default();
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

    /// Removes a node. Its successors then depend on its predecessors.
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

/// The dependencies of a node in each chain but its own: the chain, and the last place in that chain that the node
/// depends on. Sorted by chain. Nodes with equal clocks share one.
type ChainClock = Arc<[(usize, usize)]>;

fn place_in(clock: &ChainClock, chain: usize) -> Option<usize> {
    clock.binary_search_by_key(&chain, |(chain, _)| *chain).ok().map(|at| clock[at].1)
}

fn latest(places: impl Iterator<Item = (usize, usize)>) -> ChainClock {
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

    fn ir(edges: &[Vec<usize>]) -> GraphIr {
        let mut ir = GraphIr::default();
        for (at, after) in edges.iter().enumerate() {
            let after = after.iter().map(|node| node % at.max(1)).filter(|_| at > 0).collect();
            ir.add(SmallVec::new(), Kind::Empty, String::new(), None, after);
        }
        ir
    }

    fn reaches(ir: &GraphIr, from: usize, to: usize) -> bool {
        ir.nodes[from].after.iter().any(|&before| before == to || reaches(ir, before, to))
    }

    /// The total length of all distinct clocks.
    fn known(ir: &GraphIr) -> usize {
        let clocks = ir.nodes.iter().flat_map(|node| [Some(&node.clock), node.next.as_ref()]).flatten();
        clocks.map(|clock| (clock.as_ptr(), clock.len())).collect::<FxHashMap<_, _>>().values().sum()
    }

    #[test]
    fn what_is_known_of_many_nodes_is_little_for_each() {
        const NODES: usize = 10_000;
        let mut row = GraphIr::default();
        let add = |ir: &mut GraphIr, after: &[usize]| {
            ir.add(SmallVec::new(), Kind::Empty, String::new(), None, after.iter().copied().collect())
        };
        (0..NODES).for_each(|at| _ = add(&mut row, at.checked_sub(1).as_slice()));
        assert!(row.comes_after(NODES - 1, 0) && !row.comes_after(0, NODES - 1));
        assert_eq!(known(&row), 0);

        // Streams that fork and join, each continuing the chain in turn; in consecutive layers, with and without a node
        // in between.
        for (wide, joins) in [(2, true), (3, true), (100, true), (100, false)] {
            let mut layers = GraphIr::default();
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
            assert!(layers.are_unordered(last[0], last[1]));
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
            let mut ir = ir(&edges);
            let count = edges.len();
            for (before, after) in more {
                let (before, after) = (before % count, after % count);
                if before != after && !ir.comes_after(before, after) {
                    ir.order(before, after);
                }
            }
            let agree = |ir: &GraphIr| {
                let live = || ir.all().map(|(at, _)| at);
                live().all(|from| live().all(|to| ir.comes_after(from, to) == reaches(ir, from, to)))
            };
            prop_assert!(agree(&ir));
            let last = ir.last_of(0..count);
            prop_assert!((0..count).all(|node| last.iter().any(|&end| end == node || ir.comes_after(end, node))));
            prop_assert!(last.iter().all(|&end| !last.iter().any(|&other| ir.comes_after(other, end))));
            ir.remove(out % count);
            prop_assert!(agree(&ir));
            for after in later {
                let live: Vec<_> = ir.all().map(|(at, _)| at).collect();
                let after = after.iter().filter_map(|at| live.get(at % live.len().max(1)).copied()).collect();
                ir.add(SmallVec::new(), Kind::Empty, String::new(), None, after);
            }
            prop_assert!(agree(&ir));
        }
    }
}
