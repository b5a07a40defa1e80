//! The checker's data for a graph.
//!
//! Nodes are numbered in the order of addition, and numbers are never reused. The numbers of a node's predecessors are
//! a bit set, so that checking whether two nodes are ordered is one lookup.

use std::{fmt, ops::Range, sync::Arc};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::{
    super::{
        race_state::{Touch, Touches, borrows},
        shadow::AccessKind,
    },
    launch::CallTracker,
};
use crate::device::backend::{Address, HostCallback, RawEvent, RawExec, RawGraph, RawNode};

#[derive(Debug, Default)]
pub(in super::super) struct CheckedGraphs {
    pub(super) graphs: FxHashMap<RawGraph, CheckedGraph>,
    pub(super) execs: FxHashMap<RawExec, CheckedExec>,
    /// The functions that nodes of execs were set to, by address, each with the wrapper that the device calls instead.
    pub(super) set: Vec<(usize, TrackedCallback)>,
}

/// A wrapper of a callback that reports its calls to the checker.
pub(super) struct TrackedCallback(pub(super) HostCallback);

impl fmt::Debug for TrackedCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrackedCallback").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(super) struct CheckedGraph {
    pub(super) nodes: Vec<CheckedNode>,
    pub(super) numbers: usize,
    /// If this is a body: its outer graph and conditional node.
    pub(super) within: Option<(RawGraph, RawNode)>,
    pub(super) memory: Vec<Address>,
}

#[derive(Debug)]
pub(super) struct CheckedExec {
    pub(super) nodes: Vec<CheckedNode>,
    /// Nodes that were changed since the last launch: their edges have not been checked yet.
    pub(super) changed: Vec<RawNode>,
    pub(super) memory: Vec<Address>,
}

#[derive(Clone, Debug)]
pub(super) struct CheckedNode {
    /// The driver's nodes: several, if another library's work became several nodes.
    pub(super) ids: SmallVec<[RawNode; 1]>,
    pub(super) number: usize,
    /// The numbers of the nodes that come before this one.
    pub(super) before: Bits,
    pub(super) action: NodeAction,
    pub(super) enabled: bool,
}

#[derive(Clone, Debug)]
pub(super) enum NodeAction {
    Nothing,
    Access(NodeAccess),
    Host(Arc<CallTracker>),
    Child(Vec<CheckedNode>),
    Record(RawEvent),
    Wait(RawEvent),
    Conditional {
        flag: NodeAccess,
        body: RawGraph,
        /// The body's nodes, in a snapshot only; otherwise they are in the body's graph.
        within: Option<Vec<CheckedNode>>,
    },
}

/// The memory that a node accesses. A copy's source is first.
#[derive(Clone, Debug)]
pub(super) struct NodeAccess {
    pub(super) kind: AccessKind,
    pub(super) touches: Touches,
    /// The value of [`borrows`] when the node was added or set.
    pub(super) since: u64,
}

/// Two accesses in one graph that no edge orders.
#[derive(Clone, Debug)]
pub(in super::super) struct NodeConflict {
    pub(in super::super) new: (AccessKind, Touch),
    pub(in super::super) old: (AccessKind, Touch),
    pub(in super::super) bytes: Range<u64>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    fn has(&self, number: usize) -> bool {
        self.0.get(number / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    pub(super) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    fn add(&mut self, number: usize) {
        if self.0.len() <= number / 64 {
            self.0.resize(number / 64 + 1, 0);
        }
        self.0[number / 64] |= 1 << (number % 64);
    }

    fn add_all(&mut self, other: &Bits) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(mine, other)| *mine |= other);
    }
}

impl NodeAccess {
    pub(super) fn new(kind: AccessKind, touches: impl IntoIterator<Item = Touch>) -> Self {
        Self { kind, touches: touches.into_iter().collect(), since: borrows() }
    }

    /// The bytes that both access, if one writes them.
    fn conflict(&self, old: &NodeAccess) -> Option<NodeConflict> {
        self.touches.iter().find_map(|new| {
            old.touches.iter().filter(|old| old.side == new.side && (old.write || new.write)).find_map(|with| {
                let end = |touch: &Touch| touch.start.saturating_add(touch.bytes);
                let bytes = new.start.max(with.start)..end(new).min(end(with));
                let conflict = NodeConflict { new: (self.kind, *new), old: (old.kind, *with), bytes };
                (!conflict.bytes.is_empty()).then_some(conflict)
            })
        })
    }
}

impl CheckedNode {
    fn is_unordered_with(&self, other: &CheckedNode) -> bool {
        self.number != other.number && !self.before.has(other.number) && !other.before.has(self.number)
    }

    /// True if `id` is this node or a node in its body.
    fn has(&self, id: RawNode) -> bool {
        self.ids.contains(&id)
            || matches!(&self.action, NodeAction::Conditional { within: Some(nodes), .. } if nodes.iter().any(|node| node.has(id)))
    }
}

impl CheckedGraph {
    /// Makes the node `after`, and all nodes that come after it, come after `before`.
    pub(super) fn order(&mut self, before: RawNode, after: RawNode) {
        let find = |id| self.nodes.iter().find(|node| node.ids.contains(&id));
        let Some((before, after)) = find(before).zip(find(after).map(|node| node.number)) else { return };
        let mut ancestors = before.before.clone();
        ancestors.add(before.number);
        for node in self.nodes.iter_mut().filter(|node| node.number == after || node.before.has(after)) {
            node.before.add_all(&ancestors);
        }
    }
}

impl CheckedExec {
    pub(super) fn change(&mut self, id: RawNode) {
        if !self.changed.contains(&id) {
            self.changed.push(id);
        }
    }
}

impl CheckedGraphs {
    /// Creates a node that comes after others, without adding it. `None` if the graph is unknown to the checker.
    pub(super) fn node(&self, graph: RawGraph, after: &[RawNode], action: NodeAction) -> Option<CheckedNode> {
        let graph = self.graphs.get(&graph)?;
        let mut before = Bits::default();
        for node in graph.nodes.iter().filter(|node| node.ids.iter().any(|id| after.contains(id))) {
            before.add_all(&node.before);
            before.add(node.number);
        }
        Some(CheckedNode { ids: SmallVec::new(), number: graph.numbers, before, action, enabled: true })
    }

    pub(super) fn push(&mut self, graph: RawGraph, node: Option<CheckedNode>, ids: &[RawNode]) {
        let Some((graph, node)) = self.graphs.get_mut(&graph).zip(node) else { return };
        graph.numbers += 1;
        graph.nodes.push(CheckedNode { ids: ids.into(), ..node });
    }

    /// The conflict that a node would have if it were added, because an edge is missing.
    pub(super) fn conflict(&self, graph: RawGraph, new: &CheckedNode) -> Option<NodeConflict> {
        let found = self.graphs.get(&graph)?;
        self.conflict_among(&found.nodes, new, &self.accesses(&new.action)).or_else(|| {
            // The accesses of a body count as its node's, and must be ordered in the outer graph too.
            let (mut within, accesses) = (found.within, self.accesses(&new.action));
            while let Some((outer, node)) = within {
                let outer = self.graphs.get(&outer)?;
                let node = outer.nodes.iter().find(|other| other.ids.contains(&node))?;
                if let Some(conflict) = self.conflict_among(&outer.nodes, node, &accesses) {
                    return Some(conflict);
                }
                within = outer.within;
            }
            None
        })
    }

    /// The same for an exec that is about to be launched. The exec's state between two changes never runs.
    pub(super) fn exec_conflict(&self, exec: RawExec) -> Option<NodeConflict> {
        let CheckedExec { nodes, changed, .. } = self.execs.get(&exec)?;
        changed.iter().find_map(|id| self.conflict_in(nodes, *id))
    }

    fn conflict_in(&self, nodes: &[CheckedNode], id: RawNode) -> Option<NodeConflict> {
        let node = nodes.iter().find(|node| node.enabled && node.has(id))?;
        self.conflict_among(nodes, node, &self.accesses(&node.action)).or_else(|| match &node.action {
            NodeAction::Conditional { within: Some(nodes), .. } if !node.ids.contains(&id) => {
                self.conflict_in(nodes, id)
            }
            _ => None,
        })
    }

    fn conflict_among(
        &self,
        nodes: &[CheckedNode],
        new: &CheckedNode,
        accesses: &[&NodeAccess],
    ) -> Option<NodeConflict> {
        nodes.iter().filter(|other| other.enabled && new.is_unordered_with(other)).find_map(|other| {
            let earlier = self.accesses(&other.action);
            accesses.iter().find_map(|new| earlier.iter().find_map(|old| new.conflict(old)))
        })
    }

    fn accesses<'a>(&'a self, action: &'a NodeAction) -> Vec<&'a NodeAccess> {
        let of = |nodes: &'a [CheckedNode]| {
            nodes.iter().filter(|node| node.enabled).flat_map(|node| self.accesses(&node.action))
        };
        match action {
            NodeAction::Access(access) => vec![access],
            NodeAction::Child(nodes) => of(nodes).collect(),
            NodeAction::Conditional { flag, within: Some(nodes), .. } => [flag].into_iter().chain(of(nodes)).collect(),
            NodeAction::Conditional { flag, body, within: None } => {
                let nodes = self.graphs.get(body).map_or(&[][..], |body| &body.nodes);
                [flag].into_iter().chain(of(nodes)).collect()
            }
            NodeAction::Nothing | NodeAction::Host(_) | NodeAction::Record(_) | NodeAction::Wait(_) => Vec::new(),
        }
    }

    pub(super) fn snapshot(&self, graph: RawGraph) -> Vec<CheckedNode> {
        let mut nodes = self.graphs.get(&graph).map(|graph| graph.nodes.clone()).unwrap_or_default();
        for node in &mut nodes {
            if let NodeAction::Conditional { body, within, .. } = &mut node.action {
                *within = Some(self.snapshot(*body));
            }
        }
        nodes
    }

    /// Removes a graph and the bodies of its conditional nodes. Returns its memory.
    pub(super) fn take(&mut self, graph: RawGraph) -> Vec<Address> {
        let Some(gone) = self.graphs.remove(&graph) else { return Vec::new() };
        for node in &gone.nodes {
            if let NodeAction::Conditional { body, .. } = node.action {
                self.take(body);
            }
        }
        gone.memory
    }

    /// The addresses in `memory` that no graph or exec uses any more.
    pub(super) fn orphans(&self, mut memory: Vec<Address>) -> Vec<Address> {
        let execs = self.execs.values().flat_map(|exec| &exec.memory);
        let kept: FxHashSet<_> = self.graphs.values().flat_map(|graph| &graph.memory).chain(execs).collect();
        memory.retain(|address| !kept.contains(address));
        memory
    }
}

pub(super) fn find(nodes: &mut [CheckedNode], id: RawNode) -> Option<&mut CheckedNode> {
    let node = nodes.iter_mut().find(|node| node.has(id))?;
    if node.ids.contains(&id) {
        return Some(node);
    }
    match &mut node.action {
        NodeAction::Conditional { within: Some(nodes), .. } => find(nodes, id),
        _ => None,
    }
}

/// Gives an exec's nodes the actions of the same nodes of another graph.
pub(super) fn replace_actions(nodes: &mut [CheckedNode], new: Vec<CheckedNode>) {
    for (node, with) in nodes.iter_mut().zip(new) {
        match (&mut node.action, with.action) {
            (
                NodeAction::Conditional { flag, within: Some(nodes), .. },
                NodeAction::Conditional { flag: new_flag, within: Some(new), .. },
            ) => {
                *flag = new_flag;
                replace_actions(nodes, new);
            }
            (action, new) => *action = new,
        }
    }
}
