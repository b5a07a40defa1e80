//! The work of a graph's nodes by value, and the rules for replacing it.
//!
//! The nodes of a graph, an exec and a child are stored in the same way: a copy of the list is a snapshot. In an exec,
//! a conditional node contains its body's nodes; in a graph, they are in the body's own graph until a snapshot is
//! taken.

use std::sync::Arc;

use smallvec::SmallVec;

use super::super::memory::ReservedRange;
use crate::device::{
    backend::{
        Address, Emulation, Endpoint, GraphCondition, HostCallback, KernelDef, Pattern, RawEvent, RawGraph, RawNode,
        Refused,
    },
    human,
    work_item::OwnedArg,
};

/// See the module.
#[derive(Clone)]
pub(super) struct EmulatedNode {
    pub(super) id: RawNode,
    /// Nodes of the same list, each once.
    pub(super) after: SmallVec<[RawNode; 2]>,
    pub(super) work: OwnedNodeWork,
    pub(super) enabled: bool,
}

#[derive(Clone)]
pub(super) enum OwnedNodeWork {
    Kernel {
        kernel: &'static KernelDef,
        args: Box<[OwnedArg]>,
    },
    External {
        name: &'static str,
        args: Box<[OwnedArg]>,
        body: Emulation,
    },
    Copy {
        to: Endpoint,
        from: Endpoint,
        bytes: u64,
    },
    Fill {
        to: Address,
        pattern: Pattern,
        bytes: u64,
    },
    Host(HostCallback),
    Empty,
    Child(Vec<EmulatedNode>),
    Record(RawEvent),
    Wait(RawEvent),
    Alloc(Arc<ReservedRange>),
    Free(Arc<ReservedRange>),
    Conditional {
        when: GraphCondition,
        flag: Address,
        body: RawGraph,
        /// In a snapshot only.
        within: Vec<EmulatedNode>,
    },
}

impl OwnedNodeWork {
    /// The kind of node, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            OwnedNodeWork::Kernel { .. } => "a kernel",
            OwnedNodeWork::External { .. } => "external work",
            OwnedNodeWork::Copy { .. } => "a copy",
            OwnedNodeWork::Fill { .. } => "a fill",
            OwnedNodeWork::Host(_) => "a host function",
            OwnedNodeWork::Empty => "an empty node",
            OwnedNodeWork::Child(_) => "a child graph",
            OwnedNodeWork::Record(_) => "an event's record",
            OwnedNodeWork::Wait(_) => "a wait for an event",
            OwnedNodeWork::Alloc(_) => "an allocation",
            OwnedNodeWork::Free(_) => "a free",
            OwnedNodeWork::Conditional { .. } => "a conditional node",
        }
    }

    pub(super) fn is_memory(&self) -> bool {
        matches!(self, OwnedNodeWork::Alloc(_) | OwnedNodeWork::Free(_))
    }

    pub(super) fn may_be_conditional(&self) -> bool {
        match self {
            OwnedNodeWork::Child(nodes) => nodes.iter().all(|node| node.work.may_be_conditional()),
            OwnedNodeWork::Host(_)
            | OwnedNodeWork::Record(_)
            | OwnedNodeWork::Wait(_)
            | OwnedNodeWork::Alloc(_)
            | OwnedNodeWork::Free(_) => false,
            _ => true,
        }
    }

    /// The reason, if any, why `new` cannot replace this work in an exec. `whole` is set if the whole exec is updated
    /// and not a single node.
    fn refuses(&self, new: &OwnedNodeWork, whole: bool) -> Option<String> {
        match (self, new) {
            (OwnedNodeWork::Kernel { kernel, .. }, OwnedNodeWork::Kernel { kernel: new, .. }) => (!whole
                && !std::ptr::eq(*kernel, *new))
            .then(|| format!("it runs kernel `{}` and cannot run `{}`", kernel.name, new.name)),
            (OwnedNodeWork::External { name, .. }, OwnedNodeWork::External { name: new, .. }) => {
                (name != new).then(|| format!("it is external work `{name}` and cannot be `{new}`"))
            }
            (OwnedNodeWork::Copy { to, from, .. }, OwnedNodeWork::Copy { to: new_to, from: new_from, .. }) => {
                let (is, new) = (human::direction(*to, *from), human::direction(*new_to, *new_from));
                (is != new).then(|| format!("it copies {is} and cannot copy {new}"))
            }
            (OwnedNodeWork::Child(nodes), OwnedNodeWork::Child(new)) => {
                refusal(nodes, new).map(|refused| format!("in its child graph: {}", refused.why))
            }
            (OwnedNodeWork::Conditional { when, .. }, OwnedNodeWork::Conditional { when: new, .. }) => {
                (when != new).then(|| format!("its condition is {when:?} and cannot be {new:?}"))
            }
            _ if self.is_memory() || new.is_memory() => Some("memory nodes cannot be changed".into()),
            _ => (self.kind() != new.kind()).then(|| format!("it is {} and cannot be {}", self.kind(), new.kind())),
        }
    }
}

impl EmulatedNode {
    pub(super) fn new(id: RawNode, after: &[RawNode], work: OwnedNodeWork) -> Self {
        let mut node = Self { id, after: SmallVec::new(), work, enabled: true };
        after.iter().for_each(|before| node.comes_after(*before));
        node
    }

    pub(super) fn comes_after(&mut self, before: RawNode) {
        if !self.after.contains(&before) {
            self.after.push(before);
        }
    }

    /// The reason, if any, why `new` cannot replace the node's work.
    pub(super) fn refuses(&self, new: &OwnedNodeWork) -> Option<Refused> {
        let why = self.work.refuses(new, false)?;
        Some(Refused { node: Some(self.id), why })
    }
}

/// The reason, if any, why an exec's nodes cannot be updated with those of another graph. It names the other graph's
/// node.
pub(super) fn refusal(nodes: &[EmulatedNode], new: &[EmulatedNode]) -> Option<Refused> {
    if nodes.len() != new.len() {
        let why = format!("its topology is different: {} nodes instead of {}", new.len(), nodes.len());
        return Some(Refused { node: None, why });
    }
    let planned = |nodes: &[EmulatedNode], of: &EmulatedNode| -> SmallVec<[usize; 2]> {
        let mut planned: SmallVec<[usize; 2]> = of.after.iter().filter_map(|id| position(nodes, *id)).collect();
        planned.sort_unstable();
        planned
    };
    nodes.iter().zip(new).find_map(|(node, with)| {
        let refused = |why| Refused { node: Some(with.id), why };
        if planned(nodes, node) != planned(new, with) {
            return Some(refused("its topology is different: it depends on other nodes than before".into()));
        }
        node.work.refuses(&with.work, true).map(refused).or_else(|| match (&node.work, &with.work) {
            (OwnedNodeWork::Conditional { within, .. }, OwnedNodeWork::Conditional { within: new, .. }) => {
                refusal(within, new)
            }
            _ => None,
        })
    })
}

/// Gives an exec's nodes the work of the same nodes of another graph. They keep their ids and whether they are enabled.
/// The old work is left in `new`, to be dropped where no lock is held.
pub(super) fn replace_work(nodes: &mut [EmulatedNode], new: &mut [EmulatedNode]) {
    for (node, with) in nodes.iter_mut().zip(new) {
        if let (
            OwnedNodeWork::Conditional { flag, within, .. },
            OwnedNodeWork::Conditional { flag: new_flag, within: new_within, .. },
        ) = (&mut node.work, &mut with.work)
        {
            std::mem::swap(flag, new_flag);
            replace_work(within, new_within);
        } else {
            std::mem::swap(&mut node.work, &mut with.work);
        }
    }
}

/// The position of a node in a list. Nodes are in the order of addition, and so are their ids.
pub(super) fn position(nodes: &[EmulatedNode], id: RawNode) -> Option<usize> {
    nodes
        .binary_search_by(|node| {
            #[cfg(test)]
            super::tests::visit();
            node.id.cmp(&id)
        })
        .ok()
}

/// Finds a node in a snapshot or in the bodies of its conditional nodes.
pub(super) fn find(nodes: &mut [EmulatedNode], id: RawNode) -> Option<&mut EmulatedNode> {
    if let Some(at) = position(nodes, id) {
        return nodes.get_mut(at);
    }
    nodes.iter_mut().find_map(|node| match &mut node.work {
        OwnedNodeWork::Conditional { within, .. } => find(within, id),
        _ => None,
    })
}

/// Collects the events that a launch waits for and those that it records, including in children; conditional nodes have
/// none.
pub(super) fn events(nodes: &[EmulatedNode], waits: &mut Vec<u64>, records: &mut Vec<u64>) {
    for node in nodes {
        match &node.work {
            OwnedNodeWork::Wait(event) => waits.push(event.0),
            OwnedNodeWork::Record(event) => records.push(event.0),
            OwnedNodeWork::Child(nodes) => events(nodes, waits, records),
            _ => {}
        }
    }
}
