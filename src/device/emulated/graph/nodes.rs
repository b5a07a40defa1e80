//! The work of a graph's nodes by value, and by what it may be replaced.
//!
//! The nodes of a graph, an exec and a child have the same form: a copy of the list is a snapshot. In an exec, a
//! conditional node contains its body's nodes; in a graph, they are in the body's own graph until a snapshot is taken.

use std::sync::Arc;

use smallvec::SmallVec;

use super::super::memory::Reserved;
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
pub(super) struct Node {
    pub(super) id: RawNode,
    /// Nodes of the same list, each once.
    pub(super) after: SmallVec<[RawNode; 2]>,
    pub(super) task: Task,
    pub(super) enabled: bool,
}

#[derive(Clone)]
pub(super) enum Task {
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
    Child(Vec<Node>),
    Record(RawEvent),
    Wait(RawEvent),
    Alloc(Arc<Reserved>),
    Free(Arc<Reserved>),
    Conditional {
        when: GraphCondition,
        flag: Address,
        body: RawGraph,
        /// In a snapshot only.
        within: Vec<Node>,
    },
}

impl Task {
    /// The kind of node, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Task::Kernel { .. } => "a kernel",
            Task::External { .. } => "external work",
            Task::Copy { .. } => "a copy",
            Task::Fill { .. } => "a fill",
            Task::Host(_) => "a host function",
            Task::Empty => "an empty node",
            Task::Child(_) => "a child graph",
            Task::Record(_) => "an event's record",
            Task::Wait(_) => "a wait for an event",
            Task::Alloc(_) => "an allocation",
            Task::Free(_) => "a free",
            Task::Conditional { .. } => "a conditional node",
        }
    }

    pub(super) fn is_memory(&self) -> bool {
        matches!(self, Task::Alloc(_) | Task::Free(_))
    }

    pub(super) fn may_be_conditional(&self) -> bool {
        match self {
            Task::Child(nodes) => nodes.iter().all(|node| node.task.may_be_conditional()),
            Task::Host(_) | Task::Record(_) | Task::Wait(_) | Task::Alloc(_) | Task::Free(_) => false,
            _ => true,
        }
    }

    /// Why `new` cannot replace it in an exec. `whole`: the exec is updated with another graph, not a single node.
    fn refuses(&self, new: &Task, whole: bool) -> Option<String> {
        match (self, new) {
            (Task::Kernel { kernel, .. }, Task::Kernel { kernel: new, .. }) => (!whole && !std::ptr::eq(*kernel, *new))
                .then(|| format!("it runs kernel `{}` and cannot run `{}`", kernel.name, new.name)),
            (Task::External { name, .. }, Task::External { name: new, .. }) => {
                (name != new).then(|| format!("it is external work `{name}` and cannot be `{new}`"))
            }
            (Task::Copy { to, from, .. }, Task::Copy { to: new_to, from: new_from, .. }) => {
                let (is, new) = (human::direction(*to, *from), human::direction(*new_to, *new_from));
                (is != new).then(|| format!("it copies {is} and cannot copy {new}"))
            }
            (Task::Child(nodes), Task::Child(new)) => {
                refusal(nodes, new).map(|refused| format!("in its child graph: {}", refused.why))
            }
            (Task::Conditional { when, .. }, Task::Conditional { when: new, .. }) => {
                (when != new).then(|| format!("its condition is {when:?} and cannot be {new:?}"))
            }
            _ if self.is_memory() || new.is_memory() => Some("memory nodes cannot be changed".into()),
            _ => (self.kind() != new.kind()).then(|| format!("it is {} and cannot be {}", self.kind(), new.kind())),
        }
    }
}

impl Node {
    pub(super) fn new(id: RawNode, after: &[RawNode], task: Task) -> Self {
        let mut node = Self { id, after: SmallVec::new(), task, enabled: true };
        after.iter().for_each(|before| node.comes_after(*before));
        node
    }

    pub(super) fn comes_after(&mut self, before: RawNode) {
        if !self.after.contains(&before) {
            self.after.push(before);
        }
    }

    /// Why it cannot do `new` from now on.
    pub(super) fn refuses(&self, new: &Task) -> Option<Refused> {
        let why = self.task.refuses(new, false)?;
        Some(Refused { node: Some(self.id), why })
    }
}

/// Why the nodes of an exec cannot be updated with those of another graph, if so. It names the other graph's node.
pub(super) fn refusal(nodes: &[Node], new: &[Node]) -> Option<Refused> {
    if nodes.len() != new.len() {
        let why = format!("its topology is another one: {} nodes instead of {}", new.len(), nodes.len());
        return Some(Refused { node: None, why });
    }
    let places = |nodes: &[Node], of: &Node| -> SmallVec<[usize; 2]> {
        let mut places: SmallVec<[usize; 2]> = of.after.iter().filter_map(|id| place(nodes, *id)).collect();
        places.sort_unstable();
        places
    };
    nodes.iter().zip(new).find_map(|(node, with)| {
        let refused = |why| Refused { node: Some(with.id), why };
        if places(nodes, node) != places(new, with) {
            return Some(refused("its topology is another one: it comes after other nodes".into()));
        }
        node.task.refuses(&with.task, true).map(refused).or_else(|| match (&node.task, &with.task) {
            (Task::Conditional { within, .. }, Task::Conditional { within: new, .. }) => refusal(within, new),
            _ => None,
        })
    })
}

/// Makes the nodes of an exec do what the same nodes of another graph do. They keep their ids and whether they are
/// enabled. Their old work is left in `new`, to be dropped where no lock is held.
pub(super) fn adopt(nodes: &mut [Node], new: &mut [Node]) {
    for (node, with) in nodes.iter_mut().zip(new) {
        if let (Task::Conditional { flag, within, .. }, Task::Conditional { flag: new_flag, within: new_within, .. }) =
            (&mut node.task, &mut with.task)
        {
            std::mem::swap(flag, new_flag);
            adopt(within, new_within);
        } else {
            std::mem::swap(&mut node.task, &mut with.task);
        }
    }
}

/// The position of a node in a list. Nodes are in the order of addition, and so are their ids.
pub(super) fn place(nodes: &[Node], id: RawNode) -> Option<usize> {
    nodes
        .binary_search_by(|node| {
            #[cfg(test)]
            super::tests::visit();
            node.id.cmp(&id)
        })
        .ok()
}

/// Finds a node of a snapshot, also in the bodies of its conditional nodes.
pub(super) fn find(nodes: &mut [Node], id: RawNode) -> Option<&mut Node> {
    if let Some(at) = place(nodes, id) {
        return nodes.get_mut(at);
    }
    nodes.iter_mut().find_map(|node| match &mut node.task {
        Task::Conditional { within, .. } => find(within, id),
        _ => None,
    })
}

/// The events that a launch waits for and those that it records, also in children; conditional nodes have none.
pub(super) fn events(nodes: &[Node], waits: &mut Vec<u64>, records: &mut Vec<u64>) {
    for node in nodes {
        match &node.task {
            Task::Wait(event) => waits.push(event.0),
            Task::Record(event) => records.push(event.0),
            Task::Child(nodes) => events(nodes, waits, records),
            _ => {}
        }
    }
}
