//! The checker's model of graphs: the bytes that each node accesses, and the nodes that come before it.
//!
//! A graph can have errors in its **edges**: two nodes access the same bytes, one writes, and neither depends on the
//! other. This is found when the second node is added, before the call is forwarded; for changed nodes of an exec it is
//! found at the next launch, as the exec's state between two changes never runs. A graph can also have errors in its
//! **launch**, which is one call in its stream with all accesses of its nodes: it must be ordered like any call, and
//! the bytes that a node reads must have been written by an earlier node or call.
//!
//! ```text
//!   graph_add      ancestors of the node = its predecessors and their ancestors ──► every other node: a conflict?
//!   instantiate    a snapshot
//!   exec_launch    changed nodes ──► every other node: a conflict?
//!                  comes after: its stream's past, the exec's previous launch, the events that it waits for
//!                  1. no access races with earlier calls of streams          nothing has changed if one does
//!                  2. node by node, in the order of the edges: does the memory exist? was it written? is it now?
//!                  3. from now on, all of its accesses belong to the stream's call
//! ```
//!
//! The accesses of a child or a body count as its node's, whether or not the body runs. A launch is one tick of its
//! stream's clock: an event or a host function within it counts as its end. So the checker can miss races with nodes
//! that are unordered with these, but reports no false positive.
//!
//! The lock of the graphs is never held together with the race state's, nor while the device or user code is called.

mod launch;
mod nodes;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(super) use self::nodes::{CheckedGraphs, NodeConflict};
use self::{
    launch::CheckedLaunch,
    nodes::{CheckedExec, CheckedGraph, CheckedNode, NodeAccess, NodeAction, TrackedCallback, find, replace_actions},
};
use super::{
    CheckedBackend, place,
    race_state::{Side, race_state},
    shadow::AccessKind,
    touch,
};
use crate::{
    device::{
        backend::{
            Address, Endpoint, ExternalNodes, ExternalWork, HostCallback, NodeWork, RawExec, RawGraph, RawNode,
            RawStream, Refused,
        },
        human,
    },
    error::Result,
    sync::MutexGuard,
};

impl CheckedBackend {
    fn graphs(&self) -> MutexGuard<'_, CheckedGraphs> {
        self.graphs.lock()
    }

    pub(super) fn watch_graph(&self, graph: RawGraph) {
        self.graphs().graphs.insert(graph, CheckedGraph::default());
    }

    pub(super) fn forget_graph(&self, graph: RawGraph) {
        let mut graphs = self.graphs();
        // A body is removed with its node.
        if graphs.graphs.get(&graph).is_some_and(|graph| graph.within.is_some()) {
            return;
        }
        let memory = graphs.take(graph);
        let memory = graphs.orphans(memory);
        drop(graphs);
        self.end_memory(&memory);
    }

    pub(super) fn add_node(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        work: &NodeWork<'_>,
        forward: impl FnOnce(&NodeWork<'_>) -> Result<RawNode>,
    ) -> Result<RawNode> {
        let action = self.action(work)?;
        let node = self.check_node(graph, after, action)?;
        let added = match (work, node.as_ref().map(|node| &node.action)) {
            (NodeWork::Host(callback), Some(NodeAction::Host(trackers))) => {
                forward(&NodeWork::Host(trackers.watch(callback)))
            }
            _ => forward(work),
        }?;
        self.graphs().push(graph, node, &[added]);
        Ok(added)
    }

    pub(super) fn watch_memory(&self, graph: RawGraph, after: &[RawNode], id: RawNode, address: Address, bytes: u64) {
        race_state().add_region(Side::Device, address.0, self.region(bytes).unallocated());
        let action = NodeAction::Access(NodeAccess::new(
            AccessKind::Allocation,
            [place(Endpoint::Device(address), bytes, true)],
        ));
        let mut graphs = self.graphs();
        let node = graphs.node(graph, after, action);
        graphs.push(graph, node, &[id]);
        if let Some(graph) = graphs.graphs.get_mut(&graph) {
            graph.memory.push(address);
        }
    }

    pub(super) fn add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        flag: Address,
        forward: impl FnOnce() -> Result<(RawNode, RawGraph)>,
    ) -> Result<(RawNode, RawGraph)> {
        let flag = NodeAccess::new(AccessKind::Condition, [place(Endpoint::Device(flag), 4, false)]);
        let node = self.check_node(graph, after, NodeAction::Access(flag.clone()))?;
        let (added, body) = forward()?;
        let node =
            node.map(|node| CheckedNode { action: NodeAction::Conditional { flag, body, within: None }, ..node });
        let mut graphs = self.graphs();
        graphs.push(graph, node, &[added]);
        graphs.graphs.insert(body, CheckedGraph { within: Some((graph, added)), ..CheckedGraph::default() });
        Ok((added, body))
    }

    pub(super) fn add_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
        forward: impl FnOnce(ExternalWork<'_>) -> Result<ExternalNodes>,
    ) -> Result<ExternalNodes> {
        let access = NodeAccess::new(AccessKind::External(external.name), external.args.iter().filter_map(touch));
        let node = self.check_node(graph, after, NodeAction::Access(access))?;
        let recorded = forward(external)?;
        if recorded.nodes > 0 {
            self.graphs().push(graph, node, &recorded.ends);
        }
        Ok(recorded)
    }

    pub(super) fn watch_edge(&self, graph: RawGraph, before: RawNode, after: RawNode) {
        let mut graphs = self.graphs();
        if let Some(graph) = graphs.graphs.get_mut(&graph) {
            graph.order(before, after);
        }
    }

    pub(super) fn forget_node(&self, graph: RawGraph, id: RawNode) {
        let mut graphs = self.graphs();
        let Some(nodes) = graphs.graphs.get_mut(&graph).map(|graph| &mut graph.nodes) else { return };
        // A node that represents several of the driver's still has the accesses of the others.
        let at = nodes.iter().position(|node| node.ids.contains(&id) && node.ids.len() == 1);
        let Some(gone) = at.map(|at| nodes.remove(at)) else { return };
        if let NodeAction::Conditional { body, .. } = gone.action {
            graphs.take(body);
        }
    }

    fn action(&self, work: &NodeWork<'_>) -> Result<NodeAction> {
        let device = |address, bytes| place(Endpoint::Device(address), bytes, true);
        Ok(match work {
            NodeWork::Kernel(launch) => {
                let touches = launch.args.iter().filter_map(touch);
                NodeAction::Access(NodeAccess::new(AccessKind::Kernel(launch.kernel.name), touches))
            }
            NodeWork::Copy { to, from, bytes } => {
                let touches = [place(*from, *bytes, false), place(*to, *bytes, true)];
                NodeAction::Access(NodeAccess::new(AccessKind::Copy(human::direction(*to, *from)), touches))
            }
            NodeWork::Fill { to, bytes, .. } => {
                NodeAction::Access(NodeAccess::new(AccessKind::Fill, [device(*to, *bytes)]))
            }
            NodeWork::Free(address) => {
                let bytes = race_state().size_of(Side::Device, address.0).unwrap_or(0);
                NodeAction::Access(NodeAccess::new(AccessKind::Free, [device(*address, bytes)]))
            }
            NodeWork::Host(_) => NodeAction::Host(Arc::default()),
            NodeWork::Empty => NodeAction::Nothing,
            NodeWork::Child(child) => NodeAction::Child(self.graphs().snapshot(*child)),
            NodeWork::Record(event) => {
                self.check_event(*event)?;
                NodeAction::Record(*event)
            }
            NodeWork::Wait(event) => {
                self.check_event(*event)?;
                NodeAction::Wait(*event)
            }
        })
    }

    /// Creates a node and checks it against the other nodes for missing edges.
    fn check_node(&self, graph: RawGraph, after: &[RawNode], action: NodeAction) -> Result<Option<CheckedNode>> {
        let graphs = self.graphs();
        let node = graphs.node(graph, after, action);
        let conflict = node.as_ref().and_then(|node| graphs.conflict(graph, node));
        drop(graphs);
        self.refuse_conflict(conflict)?;
        Ok(node)
    }

    fn refuse_conflict(&self, conflict: Option<NodeConflict>) -> Result<()> {
        let Some(conflict) = conflict else { return Ok(()) };
        let race = race_state().unordered(&conflict);
        self.refuse(race)
    }

    /// Removes memory that is no longer used by any graph or exec.
    fn end_memory(&self, memory: &[Address]) {
        for address in memory {
            let mut race_state = race_state();
            if let Some(region) = race_state.take_region(Side::Device, address.0)
                && self.remembers
            {
                race_state.remember_freed(address.0, &region);
            }
        }
    }
}

impl CheckedBackend {
    pub(super) fn watch_exec(&self, exec: RawExec, of: RawGraph) {
        let mut graphs = self.graphs();
        let nodes = graphs.snapshot(of);
        let memory = graphs.graphs.get(&of).map(|graph| graph.memory.clone()).unwrap_or_default();
        graphs.execs.insert(exec, CheckedExec { nodes, changed: Vec::new(), memory });
    }

    pub(super) fn forget_exec(&self, exec: RawExec) {
        let mut graphs = self.graphs();
        let memory = graphs.execs.remove(&exec).map(|exec| exec.memory).unwrap_or_default();
        let memory = graphs.orphans(memory);
        drop(graphs);
        race_state().execs.remove(&(self.id, exec));
        self.end_memory(&memory);
    }

    /// Checks a launch, forwards it, and undoes its accesses if that fails.
    pub(super) fn launch_exec(
        &self,
        exec: RawExec,
        stream: RawStream,
        forward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut launch = CheckedLaunch::default();
        let mut graphs = self.graphs();
        let conflict = graphs.exec_conflict(exec);
        if let Some(exec) = graphs.execs.get_mut(&exec).filter(|_| conflict.is_none()) {
            exec.changed.clear();
            launch.add(&exec.nodes);
        }
        drop(graphs);
        self.refuse_conflict(conflict)?;
        launch.waits.iter().chain(&launch.records).try_for_each(|event| self.check_event(*event))?;
        let key = (self.id, exec);
        let (component, clock, tick, before) = self.with(stream, |race_state, component| {
            let before = race_state.execs.get(&key).cloned();
            let (clock, tick) = race_state.launch(component, key, &launch)?;
            Ok((component, clock, tick, before))
        })?;
        // The device may call the functions before `forward` returns.
        launch.trackers.iter().for_each(|trackers| trackers.lock().push_back((exec, clock.clone())));
        if let Err(error) = forward() {
            launch.trackers.iter().for_each(|trackers| trackers.lock().retain(|(_, launched)| *launched != clock));
            let mut race_state = race_state();
            launch.accesses.iter().for_each(|access| race_state.undo(component, tick, &access.touches));
            if race_state.execs.get(&key) == Some(&clock) {
                race_state.execs.insert(key, before.unwrap_or_default());
            }
            return Err(error);
        }
        launch.records.iter().for_each(|event| race_state().record(*event, clock.clone()));
        Ok(())
    }

    pub(super) fn update_exec(
        &self,
        exec: RawExec,
        graph: RawGraph,
        forward: impl FnOnce() -> Result<Result<(), Refused>>,
    ) -> Result<Result<(), Refused>> {
        let outcome = forward()?;
        if outcome.is_ok() {
            let mut graphs = self.graphs();
            let new = graphs.snapshot(graph);
            if let Some(exec) = graphs.execs.get_mut(&exec) {
                replace_actions(&mut exec.nodes, new);
            }
        }
        Ok(outcome)
    }

    pub(super) fn set_node(
        &self,
        exec: RawExec,
        id: RawNode,
        work: &NodeWork<'_>,
        forward: impl FnOnce(&NodeWork<'_>) -> Result<Result<(), Refused>>,
    ) -> Result<Result<(), Refused>> {
        let action = self.action(work)?;
        let outcome = match (work, &action) {
            (NodeWork::Host(callback), NodeAction::Host(trackers)) => {
                let watched = trackers.watch(callback);
                let outcome = forward(&NodeWork::Host(watched.clone()))?;
                if outcome.is_ok() {
                    self.graphs().set.push((Arc::as_ptr(callback).addr(), TrackedCallback(watched)));
                }
                outcome
            }
            _ => forward(work)?,
        };
        if let (Ok(()), Some(exec)) = (&outcome, self.graphs().execs.get_mut(&exec))
            && let Some(node) = find(&mut exec.nodes, id)
        {
            node.action = action;
            exec.change(id);
        }
        Ok(outcome)
    }

    /// Takes the wrappers that the device calls in place of `function`, which is to be released.
    pub(super) fn watched(&self, function: &HostCallback) -> Vec<HostCallback> {
        let of = Arc::as_ptr(function).addr();
        self.graphs().set.extract_if(.., |(known, _)| *known == of).map(|(_, TrackedCallback(by))| by).collect()
    }

    pub(super) fn enable_node(&self, exec: RawExec, id: RawNode, enabled: bool) {
        if let Some(exec) = self.graphs().execs.get_mut(&exec)
            && let Some(node) = find(&mut exec.nodes, id)
        {
            node.enabled = enabled;
            exec.change(id);
        }
    }
}
