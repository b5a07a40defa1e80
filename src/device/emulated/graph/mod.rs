//! Graphs of an emulated device: nodes that are added once and launched as a whole, repeatedly.
//!
//! ```text
//!   graph ── nodes ── instantiate ──► exec: a snapshot ── launch ──► one entry of a stream ──► a sequence of the nodes
//!     └─ a conditional node's body: a graph of its own, until the snapshot        (run.rs)
//! ```
//!
//! A node's work is checked when it is added ([`nodes`]), as if it were enqueued. A launch is one entry of its stream,
//! after the entry of the exec's previous launch, so that an exec never overlaps itself, and after the records of the
//! events that it waits for. Its events are recorded **right behind the launch**, when the whole graph is done; a GPU
//! records an event as soon as its node is reached.
//!
//! The address of a memory node is fixed, and its memory counts against the device's capacity, until the graph and its
//! exec are destroyed; a GPU counts the memory at the launch. There is memory behind the address only between the nodes
//! that allocate and free it: an access at another time is a fault.
//!
//! A user's functions are dropped outside the lock of the table.

mod nodes;
mod run;

#[cfg(test)]
mod tests;

use rustc_hash::{FxHashMap, FxHashSet};

use std::sync::Arc;

pub(super) use self::run::Sequence;
use self::{
    nodes::{EmulatedNode, OwnedNodeWork, events, find, position, refusal, replace_work},
    run::OrderSeed,
};
use super::{
    device::EmulatedDevice,
    fresh_id, lock,
    machine::{LaunchEvents, StreamPoint},
    memory::ReservedRange,
    work::{Work, check_copy, check_fill, check_launch, no_emulation},
};
use crate::{
    device::{
        backend::{
            Address, ExternalNodes, ExternalWork, GraphCondition, NodeWork, RawExec, RawGraph, RawNode, RawStream,
            Refused,
        },
        work_item::own_args,
    },
    error::{Error, ErrorKind, Result},
};

#[derive(Default)]
pub(super) struct EmulatedGraphs {
    graphs: FxHashMap<RawGraph, EmulatedGraph>,
    execs: FxHashMap<RawExec, EmulatedExec>,
}

#[derive(Default)]
struct EmulatedGraph {
    nodes: Vec<EmulatedNode>,
    is_body: bool,
}

struct EmulatedExec {
    of: RawGraph,
    /// Shared with launches that have not begun.
    snapshot: Arc<ExecSnapshot>,
    order_seed: OrderSeed,
    last: Option<StreamPoint>,
}

#[derive(Clone)]
struct ExecSnapshot {
    nodes: Vec<EmulatedNode>,
    events: LaunchEvents,
    /// The nodes allocate memory that none of them frees, so it cannot be allocated again by a second launch.
    leaves_memory: bool,
}

impl std::fmt::Debug for EmulatedGraphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} graphs, {} execs", self.graphs.len(), self.execs.len())
    }
}

impl EmulatedGraphs {
    fn graph(&self, graph: RawGraph) -> Result<&EmulatedGraph> {
        self.graphs.get(&graph).ok_or_else(|| usage_error(format!("no such graph on this device: {}", graph.0)))
    }

    fn exec(&mut self, exec: RawExec) -> Result<&mut EmulatedExec> {
        self.execs.get_mut(&exec).ok_or_else(|| usage_error(format!("no such exec on this device: {}", exec.0)))
    }

    /// Fails if a node cannot be added to the graph after the nodes `after`.
    fn accepts(&self, graph: RawGraph, after: &[RawNode]) -> Result<()> {
        let nodes = &self.graph(graph)?.nodes;
        match after.iter().find(|id| position(nodes, **id).is_none()) {
            Some(stranger) => Err(usage_error(format!("node {} does not belong to this graph", stranger.0))),
            None => Ok(()),
        }
    }

    fn push(&mut self, graph: RawGraph, after: &[RawNode], work: OwnedNodeWork) -> Result<RawNode> {
        self.accepts(graph, after)?;
        let Some(graph) = self.graphs.get_mut(&graph) else { return Err(usage_error("no such graph")) };
        if graph.is_body && !work.may_be_conditional() {
            return Err(usage_error(format!("{} cannot be in the body of a conditional node", work.kind())));
        }
        let id = RawNode(fresh_id());
        graph.nodes.push(EmulatedNode::new(id, after, work));
        Ok(id)
    }

    /// The current nodes of a graph, including the bodies of its conditional nodes.
    fn snapshot(&self, graph: RawGraph) -> Result<Vec<EmulatedNode>> {
        let mut nodes = self.graph(graph)?.nodes.clone();
        for node in &mut nodes {
            if let OwnedNodeWork::Conditional { body, within, .. } = &mut node.work {
                *within = self.snapshot(*body)?;
            }
        }
        Ok(nodes)
    }

    fn take(&mut self, graph: RawGraph, gone: &mut Vec<EmulatedGraph>) {
        let Some(taken) = self.graphs.remove(&graph) else { return };
        for node in &taken.nodes {
            if let OwnedNodeWork::Conditional { body, .. } = &node.work {
                self.take(*body, gone);
            }
        }
        gone.push(taken);
    }
}

impl EmulatedGraph {
    fn has_memory(&self) -> bool {
        self.nodes.iter().any(|node| node.work.is_memory())
    }

    /// The reason, if any, why the graph can have only one exec at a time and cannot be a child, as on a GPU.
    fn single_exec_reason(&self) -> Option<&'static str> {
        let has_conditions = || self.nodes.iter().any(|node| matches!(node.work, OwnedNodeWork::Conditional { .. }));
        if self.has_memory() { Some("allocates memory") } else { has_conditions().then_some("has conditional nodes") }
    }

    /// The memory at this address. Fails if it was freed before, or if `after` does not depend on its allocation.
    fn allocation_to_free(&self, address: Address, after: &[RawNode]) -> Result<Arc<ReservedRange>> {
        let made = self.nodes.iter().find_map(|node| match &node.work {
            OwnedNodeWork::Alloc(memory) if memory.address() == address => Some((node.id, memory.clone())),
            _ => None,
        });
        let (made, memory) =
            made.ok_or_else(|| usage_error(format!("{address:?} was not allocated by a memory node of this graph")))?;
        if self.nodes.iter().any(|node| matches!(&node.work, OwnedNodeWork::Free(freed) if Arc::ptr_eq(freed, &memory)))
        {
            return Err(usage_error(format!("{address:?} is freed twice")));
        }
        if !self.comes_after(after, made) {
            return Err(usage_error(format!("{address:?} is freed by a node that does not depend on its allocation")));
        }
        Ok(memory)
    }

    fn comes_after(&self, after: &[RawNode], before: RawNode) -> bool {
        let (mut left, mut seen) = (after.to_vec(), FxHashSet::default());
        while let Some(id) = left.pop() {
            if id == before {
                return true;
            }
            if seen.insert(id) {
                left.extend(position(&self.nodes, id).iter().flat_map(|at| &self.nodes[*at].after));
            }
        }
        false
    }
}

impl ExecSnapshot {
    fn new(nodes: Vec<EmulatedNode>) -> Self {
        let mut snapshot = Self { nodes, events: LaunchEvents::default(), leaves_memory: false };
        snapshot.changed();
        snapshot
    }

    /// Called after a change to the nodes and not at each launch, as a launch blocks launches on all devices.
    fn changed(&mut self) {
        self.events = LaunchEvents::default();
        events(&self.nodes, &mut self.events.waits, &mut self.events.records);
        let count = |is: fn(&OwnedNodeWork) -> bool| self.nodes.iter().filter(|node| is(&node.work)).count();
        self.leaves_memory = count(|work| matches!(work, OwnedNodeWork::Alloc(_)))
            > count(|work| matches!(work, OwnedNodeWork::Free(_)));
    }
}

impl EmulatedExec {
    /// The snapshot for later launches; earlier launches keep theirs.
    fn snapshot_mut(&mut self) -> &mut ExecSnapshot {
        Arc::make_mut(&mut self.snapshot)
    }
}

impl EmulatedDevice {
    pub(super) fn new_graph(&self) -> Result<RawGraph> {
        self.check_alive().map_err(|error| self.at_device(error))?;
        let graph = RawGraph(fresh_id());
        lock(&self.graphs).graphs.insert(graph, EmulatedGraph::default());
        Ok(graph)
    }

    pub(super) fn remove_graph(&self, graph: RawGraph) {
        let mut gone = Vec::new();
        let mut graphs = lock(&self.graphs);
        // A body is removed with its node.
        if graphs.graphs.get(&graph).is_some_and(|graph| !graph.is_body) {
            graphs.take(graph, &mut gone);
        }
        drop(graphs);
        drop(gone);
    }

    pub(super) fn add_node(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, after)?;
        let work = match work {
            NodeWork::Free(address) => OwnedNodeWork::Free(graphs.graph(graph)?.allocation_to_free(*address, after)?),
            work => self.owned_work(&graphs, work)?,
        };
        graphs.push(graph, after, work)
    }

    pub(super) fn add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, after)?;
        let memory = Arc::new(ReservedRange::new(&self.memory, bytes, self.fault_plan.next_allocation_fails())?);
        let address = memory.address();
        Ok((graphs.push(graph, after, OwnedNodeWork::Alloc(memory))?, address))
    }

    pub(super) fn add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        self.check_alive()?;
        if !flag.0.is_multiple_of(4) {
            return Err(usage_error(format!(
                "the flag of a conditional node at {flag:?} is not aligned: it is a `u32`, at an address that 4 divides"
            )));
        }
        let body = RawGraph(fresh_id());
        let mut graphs = lock(&self.graphs);
        let node = graphs.push(graph, after, OwnedNodeWork::Conditional { when, flag, body, within: Vec::new() })?;
        graphs.graphs.insert(body, EmulatedGraph { nodes: Vec::new(), is_body: true });
        Ok((node, body))
    }

    pub(super) fn add_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        work: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        self.check_alive()?;
        let ExternalWork { name, args, emulated, .. } = work;
        let body = emulated.ok_or_else(no_emulation)?;
        let work = OwnedNodeWork::External { name, args: own_args(args), body };
        // If the node is refused, a user's closure is dropped outside the lock.
        let kept = work.clone();
        let node = lock(&self.graphs).push(graph, after, work);
        drop(kept);
        Ok(ExternalNodes { ends: [node?].into_iter().collect(), nodes: 1, ..ExternalNodes::default() })
    }

    pub(super) fn add_edge(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, &[before, after])?;
        if graphs.graph(graph)?.comes_after(&[before], after) {
            return Err(usage_error(format!(
                "node {} already comes before node {}: the new edge would create a cycle",
                after.0, before.0
            )));
        }
        let nodes = graphs.graphs.get_mut(&graph).map(|graph| &mut graph.nodes);
        if let Some(nodes) = nodes
            && let Some(at) = position(nodes, after)
        {
            nodes[at].comes_after(before);
        }
        Ok(())
    }

    pub(super) fn remove_node(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        self.check_alive()?;
        let mut gone = Vec::new();
        let mut graphs = lock(&self.graphs);
        if graphs.graph(graph)?.has_memory() {
            return Err(usage_error(
                "nodes of a graph that allocates or frees memory cannot be removed: build the graph without them",
            ));
        }
        let nodes = graphs.graphs.get_mut(&graph).map(|graph| &mut graph.nodes);
        let Some((nodes, at)) = nodes.and_then(|nodes| {
            let at = position(nodes, node)?;
            Some((nodes, at))
        }) else {
            return Err(usage_error(format!("node {} does not belong to this graph", node.0)));
        };
        let removed = nodes.remove(at);
        for other in nodes {
            if let Some(edge) = other.after.iter().position(|before| *before == node) {
                other.after.remove(edge);
                removed.after.iter().for_each(|before| other.comes_after(*before));
            }
        }
        if let OwnedNodeWork::Conditional { body, .. } = &removed.work {
            graphs.take(*body, &mut gone);
        }
        drop(graphs);
        drop((removed, gone));
        Ok(())
    }

    /// Copies a node's work, after the checks of the call that would enqueue it.
    fn owned_work(&self, graphs: &EmulatedGraphs, work: &NodeWork<'_>) -> Result<OwnedNodeWork> {
        Ok(match work {
            NodeWork::Kernel(launch) => {
                check_launch(launch).map_err(|error| error.at(format!("kernel `{}`", launch.kernel.name)))?;
                OwnedNodeWork::Kernel { kernel: launch.kernel, args: own_args(launch.args) }
            }
            NodeWork::Copy { to, from, bytes } => {
                check_copy(*bytes)?;
                OwnedNodeWork::Copy { to: *to, from: *from, bytes: *bytes }
            }
            NodeWork::Fill { to, pattern, bytes } => {
                check_fill(*to, *pattern, *bytes)?;
                OwnedNodeWork::Fill { to: *to, pattern: *pattern, bytes: *bytes }
            }
            NodeWork::Host(callback) => OwnedNodeWork::Host(callback.clone()),
            NodeWork::Empty => OwnedNodeWork::Empty,
            NodeWork::Child(child) => {
                if let Some(what) = graphs.graph(*child)?.single_exec_reason() {
                    return Err(usage_error(format!("a graph that {what} cannot be a child of another")));
                }
                OwnedNodeWork::Child(graphs.snapshot(*child)?)
            }
            NodeWork::Record(event) => {
                if self.engine.with(|machine| machine.owner_of(event.0))? != self.id {
                    return Err(usage_error("an event can only be recorded by a graph of its own device"));
                }
                OwnedNodeWork::Record(*event)
            }
            NodeWork::Wait(event) => {
                self.engine.with(|machine| machine.owner_of(event.0))?;
                OwnedNodeWork::Wait(*event)
            }
            NodeWork::Free(address) => {
                return Err(usage_error(format!("{address:?} is freed where memory nodes are not allowed")));
            }
        })
    }
}

impl EmulatedDevice {
    pub(super) fn new_exec(&self, graph: RawGraph) -> Result<RawExec> {
        self.check_alive()?;
        let seed = self.engine.random_seed();
        let mut graphs = lock(&self.graphs);
        let found = graphs.graph(graph)?;
        if found.is_body {
            return Err(usage_error(
                "the body of a conditional node can run only as part of its graph: instantiate that graph",
            ));
        }
        if let Some(what) = found.single_exec_reason()
            && graphs.execs.values().any(|exec| exec.of == graph)
        {
            return Err(usage_error(format!(
                "a graph that {what} can have only one exec at a time: drop the existing exec first"
            )));
        }
        let snapshot = Arc::new(ExecSnapshot::new(graphs.snapshot(graph)?));
        let exec = RawExec(fresh_id());
        graphs
            .execs
            .insert(exec, EmulatedExec { of: graph, snapshot, order_seed: OrderSeed { seed, run: 0 }, last: None });
        Ok(exec)
    }

    pub(super) fn remove_exec(&self, exec: RawExec) {
        let gone = lock(&self.graphs).execs.remove(&exec);
        drop(gone);
    }

    /// Only checks the arguments, as there is nothing to upload.
    pub(super) fn upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        lock(&self.graphs).exec(exec)?;
        let stream = self.stream(stream);
        self.engine.with(|machine| machine.accepts(self.id, stream))
    }

    pub(super) fn launch_exec(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        let exec = graphs.exec(exec)?;
        if exec.last.is_some() && exec.snapshot.leaves_memory {
            return Err(usage_error(
                "the graph cannot be launched again: the previous launch allocated memory that no node frees; add a node that frees it",
            ));
        }
        // The exec shares the snapshot, so no user's value is dropped here.
        self.pass_time(stream, self.times.graph)?;
        let mut work = Some(Work::Graph(Box::new(Sequence::new(&exec.snapshot, &self.fault_plan, exec.order_seed))));
        let (stream, last, events) = (self.stream(stream), exec.last, &exec.snapshot.events);
        let launched = self.engine.with(|machine| machine.launch(self.id, stream, last, events, &mut work))?;
        exec.last = Some(launched);
        exec.order_seed.run += 1;
        Ok(())
    }

    pub(super) fn update_exec(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        let mut new = graphs.snapshot(graph)?;
        let exec = graphs.exec(exec)?;
        let refused = refusal(&exec.snapshot.nodes, &new);
        if refused.is_none() {
            let snapshot = exec.snapshot_mut();
            replace_work(&mut snapshot.nodes, &mut new);
            snapshot.changed();
        }
        drop(graphs);
        drop(new);
        Ok(refused.map_or(Ok(()), Err))
    }

    pub(super) fn set_node(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        self.check_alive()?;
        if let NodeWork::Free(_) = work {
            return Ok(Err(Refused { node: Some(node), why: "memory nodes cannot be changed".into() }));
        }
        let mut graphs = lock(&self.graphs);
        let mut work = self.owned_work(&graphs, work)?;
        let snapshot = graphs.exec(exec)?.snapshot_mut();
        let found = find(&mut snapshot.nodes, node).ok_or_else(|| no_node(node))?;
        let refused = found.refuses(&work);
        if refused.is_none() {
            std::mem::swap(&mut found.work, &mut work);
            if matches!(work, OwnedNodeWork::Record(_) | OwnedNodeWork::Wait(_) | OwnedNodeWork::Child(_)) {
                snapshot.changed();
            }
        }
        drop(graphs);
        drop(work);
        Ok(refused.map_or(Ok(()), Err))
    }

    pub(super) fn enable_node(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        self.check_alive()?;
        let mut graphs = lock(&self.graphs);
        let found = find(&mut graphs.exec(exec)?.snapshot_mut().nodes, node).ok_or_else(|| no_node(node))?;
        if !matches!(found.work, OwnedNodeWork::Kernel { .. } | OwnedNodeWork::Copy { .. } | OwnedNodeWork::Fill { .. })
        {
            let why = format!("only kernels, copies and fills can be disabled, but this node is {}", found.work.kind());
            return Ok(Err(Refused { node: Some(node), why }));
        }
        found.enabled = enabled;
        Ok(Ok(()))
    }
}

fn no_node(node: RawNode) -> Error {
    usage_error(format!("node {} does not belong to the graph that this exec was instantiated from", node.0))
}

fn usage_error(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, message)
}
