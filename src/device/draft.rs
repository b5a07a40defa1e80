//! What is known of a graph on this side of the seam: its nodes as people know them, and what comes after what.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use smallvec::{SmallVec, smallvec};

use super::{
    backend::{Arg, NodeWork, Place, RawNode},
    human,
};

/// The nodes of a graph, each after those that it was made to come after.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    nodes: Vec<Node>,
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
    /// All that it comes after, directly or not.
    ancestors: Set,
    /// Of what it does beside that: sizes, shapes and values, but no addresses.
    pub(crate) digest: u64,
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
        if let NodeWork::Copy { to, from, bytes } = *work {
            self.nodes[node].copies = Some(Copies { to, from, bytes });
        }
        node
    }

    pub(crate) fn add(
        &mut self,
        raw: SmallVec<[RawNode; 1]>,
        kind: Kind,
        name: String,
        label: Option<Arc<str>>,
        after: Few,
    ) -> usize {
        let mut ancestors = Set::default();
        for &node in &after {
            ancestors.add_all(&self.nodes[node].ancestors);
            ancestors.add(node);
        }
        self.nodes.push(Node { raw, kind, name, label, after, ancestors, digest: 0, copies: None, removed: false });
        self.nodes.len() - 1
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
        self.nodes.get(node).is_some_and(|node| node.ancestors.has(before))
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
        let mut gained = self.nodes[before].ancestors.clone();
        gained.add(before);
        for at in 0..self.nodes.len() {
            if at == after || self.nodes[at].ancestors.has(after) {
                self.nodes[at].ancestors.add_all(&gained);
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
            self.nodes[at].ancestors.remove(node);
        }
    }
}

/// A set of small numbers.
#[derive(Clone, Debug, Default)]
struct Set(Vec<u64>);

impl Set {
    fn has(&self, number: usize) -> bool {
        self.0.get(number / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    fn add(&mut self, number: usize) {
        if self.0.len() <= number / 64 {
            self.0.resize(number / 64 + 1, 0);
        }
        self.0[number / 64] |= 1 << (number % 64);
    }

    fn remove(&mut self, number: usize) {
        if let Some(word) = self.0.get_mut(number / 64) {
            *word &= !(1 << (number % 64));
        }
    }

    fn add_all(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(word, other)| *word |= other);
    }
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

    proptest! {
        #[test]
        fn what_comes_after_what(
            edges in prop::collection::vec(prop::collection::vec(0..16_usize, 0..3), 1..16),
            more in prop::collection::vec((0..16_usize, 0..16_usize), 0..6),
            out in 0..16_usize,
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
        }
    }
}
