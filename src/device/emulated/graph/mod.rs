//! Graphs of an emulated device: nodes that are added once and launched as a whole, repeatedly.
//!
//! ```text
//!   graph ── nodes ── instantiate ──► exec: a snapshot ── launch ──► one entry of a stream ──► a sequence of the nodes
//!     └─ a conditional node's body: a graph of its own, until the snapshot        (run.rs)
//! ```
//!
//! A node's work is checked when it is added ([`nodes`]), as if it were enqueued. A launch is one entry of its stream,
//! after the entry of the exec's previous launch, so that an exec never overlaps itself, and after the records of the
//! events that it waits for. Its events are recorded **right behind it**, when all of the graph is done; a GPU records
//! them as soon as the node is reached.
//!
//! A memory node's address is fixed, and counted against the device's memory, until the graph and its exec are
//! destroyed; a GPU counts the memory at the launch. There is memory behind it only between the nodes that allocate and
//! free it: an access outside is a fault.
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
    nodes::{Node, Task, adopt, events, find, place, refusal},
    run::OrderSeed,
};
use super::{
    device::Device,
    fresh_id, lock,
    machine::{Around, Point},
    memory::Reserved,
    work::{Work, check_copy, check_fill, check_launch, no_stand_in},
};
use crate::{
    device::{
        backend::{
            Address, ExternalWork, GraphCondition, NodeWork, RawExec, RawGraph, RawNode, RawStream, Recorded, Refused,
        },
        work_item::hold,
    },
    error::{Error, ErrorKind, Result},
};

#[derive(Default)]
pub(super) struct Graphs {
    graphs: FxHashMap<RawGraph, Graph>,
    execs: FxHashMap<RawExec, Exec>,
}

#[derive(Default)]
struct Graph {
    nodes: Vec<Node>,
    is_body: bool,
}

struct Exec {
    of: RawGraph,
    /// Shared with launches that have not begun.
    program: Arc<Program>,
    order_seed: OrderSeed,
    last: Option<Point>,
}

#[derive(Clone)]
struct Program {
    nodes: Vec<Node>,
    around: Around,
    /// It allocates memory that it does not free, so the next launch cannot allocate it again.
    leaves_memory: bool,
}

impl std::fmt::Debug for Graphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} graphs, {} execs", self.graphs.len(), self.execs.len())
    }
}

impl Graphs {
    fn graph(&self, graph: RawGraph) -> Result<&Graph> {
        self.graphs.get(&graph).ok_or_else(|| wrong(format!("no such graph on this device: {}", graph.0)))
    }

    fn exec(&mut self, exec: RawExec) -> Result<&mut Exec> {
        self.execs.get_mut(&exec).ok_or_else(|| wrong(format!("no such exec on this device: {}", exec.0)))
    }

    /// Fails if a node cannot be added after these.
    fn accepts(&self, graph: RawGraph, after: &[RawNode]) -> Result<()> {
        let nodes = &self.graph(graph)?.nodes;
        match after.iter().find(|id| place(nodes, **id).is_none()) {
            Some(stranger) => Err(wrong(format!("node {} is not of this graph", stranger.0))),
            None => Ok(()),
        }
    }

    fn push(&mut self, graph: RawGraph, after: &[RawNode], task: Task) -> Result<RawNode> {
        self.accepts(graph, after)?;
        let Some(graph) = self.graphs.get_mut(&graph) else { return Err(wrong("no such graph")) };
        if graph.is_body && !task.may_be_conditional() {
            return Err(wrong(format!("{} cannot be within a conditional node", task.kind())));
        }
        let id = RawNode(fresh_id());
        graph.nodes.push(Node::new(id, after, task));
        Ok(id)
    }

    /// The nodes of a graph as they are now, with the bodies of its conditional nodes.
    fn snapshot(&self, graph: RawGraph) -> Result<Vec<Node>> {
        let mut nodes = self.graph(graph)?.nodes.clone();
        for node in &mut nodes {
            if let Task::Conditional { body, within, .. } = &mut node.task {
                *within = self.snapshot(*body)?;
            }
        }
        Ok(nodes)
    }

    fn take(&mut self, graph: RawGraph, gone: &mut Vec<Graph>) {
        let Some(taken) = self.graphs.remove(&graph) else { return };
        for node in &taken.nodes {
            if let Task::Conditional { body, .. } = &node.task {
                self.take(*body, gone);
            }
        }
        gone.push(taken);
    }
}

impl Graph {
    fn has_memory(&self) -> bool {
        self.nodes.iter().any(|node| node.task.is_memory())
    }

    /// The reason why it has only one exec at a time and cannot be a child, as on a GPU.
    fn is_single(&self) -> Option<&'static str> {
        let has_conditions = || self.nodes.iter().any(|node| matches!(node.task, Task::Conditional { .. }));
        if self.has_memory() { Some("makes memory") } else { has_conditions().then_some("has conditions") }
    }

    /// The memory at this address, if it is not freed yet and `after` depends on its allocation.
    fn to_free(&self, address: Address, after: &[RawNode]) -> Result<Arc<Reserved>> {
        let made = self.nodes.iter().find_map(|node| match &node.task {
            Task::Alloc(memory) if memory.address() == address => Some((node.id, memory.clone())),
            _ => None,
        });
        let (made, memory) =
            made.ok_or_else(|| wrong(format!("{address:?} was not allocated by a memory node of this graph")))?;
        if self.nodes.iter().any(|node| matches!(&node.task, Task::Free(freed) if Arc::ptr_eq(freed, &memory))) {
            return Err(wrong(format!("{address:?} is freed twice")));
        }
        if !self.comes_after(after, made) {
            return Err(wrong(format!("{address:?} is freed by a node that does not depend on its allocation")));
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
                left.extend(place(&self.nodes, id).iter().flat_map(|at| &self.nodes[*at].after));
            }
        }
        false
    }
}

impl Program {
    fn new(nodes: Vec<Node>) -> Self {
        let mut program = Self { nodes, around: Around::default(), leaves_memory: false };
        program.changed();
        program
    }

    /// Called after a change of the nodes, and not at each launch, as a launch blocks launches on all devices.
    fn changed(&mut self) {
        self.around = Around::default();
        events(&self.nodes, &mut self.around.waits, &mut self.around.records);
        let count = |is: fn(&Task) -> bool| self.nodes.iter().filter(|node| is(&node.task)).count();
        self.leaves_memory = count(|task| matches!(task, Task::Alloc(_))) > count(|task| matches!(task, Task::Free(_)));
    }
}

impl Exec {
    /// The program of later launches: earlier ones keep theirs.
    fn program(&mut self) -> &mut Program {
        Arc::make_mut(&mut self.program)
    }
}

impl Device {
    pub(super) fn new_graph(&self) -> Result<RawGraph> {
        self.alive().map_err(|error| self.here(error))?;
        let graph = RawGraph(fresh_id());
        lock(&self.graphs).graphs.insert(graph, Graph::default());
        Ok(graph)
    }

    pub(super) fn end_graph(&self, graph: RawGraph) {
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
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, after)?;
        let task = match work {
            NodeWork::Free(address) => Task::Free(graphs.graph(graph)?.to_free(*address, after)?),
            work => self.task(&graphs, work)?,
        };
        graphs.push(graph, after, task)
    }

    pub(super) fn add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, after)?;
        let memory = Arc::new(Reserved::new(&self.memory, bytes, self.plan.allocation())?);
        let address = memory.address();
        Ok((graphs.push(graph, after, Task::Alloc(memory))?, address))
    }

    pub(super) fn add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        self.alive()?;
        if !flag.0.is_multiple_of(4) {
            return Err(wrong(format!("the flag of a condition at {flag:?} is not an aligned `u32`")));
        }
        let body = RawGraph(fresh_id());
        let mut graphs = lock(&self.graphs);
        let node = graphs.push(graph, after, Task::Conditional { when, flag, body, within: Vec::new() })?;
        graphs.graphs.insert(body, Graph { nodes: Vec::new(), is_body: true });
        Ok((node, body))
    }

    pub(super) fn add_external(&self, graph: RawGraph, after: &[RawNode], work: ExternalWork<'_>) -> Result<Recorded> {
        self.alive()?;
        let ExternalWork { name, args, emulated, .. } = work;
        let body = emulated.ok_or_else(no_stand_in)?;
        let task = Task::External { name, args: hold(args), body };
        // If it is refused, it is dropped outside the lock.
        let kept = task.clone();
        let node = lock(&self.graphs).push(graph, after, task);
        drop(kept);
        Ok(Recorded { ends: [node?].into_iter().collect(), nodes: 1, ..Recorded::default() })
    }

    pub(super) fn add_edge(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        graphs.accepts(graph, &[before, after])?;
        if graphs.graph(graph)?.comes_after(&[before], after) {
            return Err(wrong(format!("node {} already comes before node {}: this makes a cycle", after.0, before.0)));
        }
        let nodes = graphs.graphs.get_mut(&graph).map(|graph| &mut graph.nodes);
        if let Some(nodes) = nodes
            && let Some(at) = place(nodes, after)
        {
            nodes[at].comes_after(before);
        }
        Ok(())
    }

    pub(super) fn remove_node(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        self.alive()?;
        let mut gone = Vec::new();
        let mut graphs = lock(&self.graphs);
        if graphs.graph(graph)?.has_memory() {
            return Err(wrong("nodes of a graph that makes memory cannot be removed"));
        }
        let nodes = graphs.graphs.get_mut(&graph).map(|graph| &mut graph.nodes);
        let Some((nodes, at)) = nodes.and_then(|nodes| {
            let at = place(nodes, node)?;
            Some((nodes, at))
        }) else {
            return Err(wrong(format!("node {} is not of this graph", node.0)));
        };
        let removed = nodes.remove(at);
        for other in nodes {
            if let Some(edge) = other.after.iter().position(|before| *before == node) {
                other.after.remove(edge);
                removed.after.iter().for_each(|before| other.comes_after(*before));
            }
        }
        if let Task::Conditional { body, .. } = &removed.task {
            graphs.take(*body, &mut gone);
        }
        drop(graphs);
        drop((removed, gone));
        Ok(())
    }

    /// Makes a task by value, after the checks of the call that would enqueue it.
    fn task(&self, graphs: &Graphs, work: &NodeWork<'_>) -> Result<Task> {
        Ok(match work {
            NodeWork::Kernel(launch) => {
                check_launch(launch).map_err(|error| error.at(format!("kernel `{}`", launch.kernel.name)))?;
                Task::Kernel { kernel: launch.kernel, args: hold(launch.args) }
            }
            NodeWork::Copy { to, from, bytes } => {
                check_copy(*bytes)?;
                Task::Copy { to: *to, from: *from, bytes: *bytes }
            }
            NodeWork::Fill { to, pattern, bytes } => {
                check_fill(*to, *pattern, *bytes)?;
                Task::Fill { to: *to, pattern: *pattern, bytes: *bytes }
            }
            NodeWork::Host(callback) => Task::Host(callback.clone()),
            NodeWork::Empty => Task::Empty,
            NodeWork::Child(child) => {
                if let Some(what) = graphs.graph(*child)?.is_single() {
                    return Err(wrong(format!("a graph that {what} cannot be a child of another")));
                }
                Task::Child(graphs.snapshot(*child)?)
            }
            NodeWork::Record(event) => {
                if self.engine.with(|machine| machine.owner_of(event.0))? != self.id {
                    return Err(wrong("an event can only be recorded by a graph of its own device"));
                }
                Task::Record(*event)
            }
            NodeWork::Wait(event) => {
                self.engine.with(|machine| machine.owner_of(event.0))?;
                Task::Wait(*event)
            }
            NodeWork::Free(address) => {
                return Err(wrong(format!("{address:?} is freed where memory nodes are not allowed")));
            }
        })
    }
}

impl Device {
    pub(super) fn new_exec(&self, graph: RawGraph) -> Result<RawExec> {
        self.alive()?;
        let seed = self.engine.draw();
        let mut graphs = lock(&self.graphs);
        let found = graphs.graph(graph)?;
        if found.is_body {
            return Err(wrong("the body of a conditional node can run only as part of its graph"));
        }
        if let Some(what) = found.is_single()
            && graphs.execs.values().any(|exec| exec.of == graph)
        {
            return Err(wrong(format!("a graph that {what} has one exec at a time: drop the existing one first")));
        }
        let program = Arc::new(Program::new(graphs.snapshot(graph)?));
        let exec = RawExec(fresh_id());
        graphs.execs.insert(exec, Exec { of: graph, program, order_seed: OrderSeed { seed, run: 0 }, last: None });
        Ok(exec)
    }

    pub(super) fn end_exec(&self, exec: RawExec) {
        let gone = lock(&self.graphs).execs.remove(&exec);
        drop(gone);
    }

    /// There is nothing to upload: only checks the arguments.
    pub(super) fn upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        lock(&self.graphs).exec(exec)?;
        let stream = self.stream(stream);
        self.engine.with(|machine| machine.accepts(self.id, stream))
    }

    pub(super) fn launch_exec(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        let exec = graphs.exec(exec)?;
        if exec.last.is_some() && exec.program.leaves_memory {
            return Err(wrong("the previous launch has left memory that no node frees"));
        }
        // Held by the exec too, so no user's value is dropped here.
        let mut work = Some(Work::Graph(Box::new(Sequence::new(&exec.program, &self.plan, exec.order_seed))));
        let (stream, last, around) = (self.stream(stream), exec.last, &exec.program.around);
        let launched = self.engine.with(|machine| machine.launch(self.id, stream, last, around, &mut work))?;
        exec.last = Some(launched);
        exec.order_seed.run += 1;
        Ok(())
    }

    pub(super) fn update_exec(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        let mut new = graphs.snapshot(graph)?;
        let exec = graphs.exec(exec)?;
        let refused = refusal(&exec.program.nodes, &new);
        if refused.is_none() {
            let program = exec.program();
            adopt(&mut program.nodes, &mut new);
            program.changed();
        }
        drop(graphs);
        drop(new);
        Ok(refused.map_or(Ok(()), Err))
    }

    pub(super) fn set_node(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        self.alive()?;
        if let NodeWork::Free(_) = work {
            return Ok(Err(Refused { node: Some(node), why: "memory nodes cannot be changed".into() }));
        }
        let mut graphs = lock(&self.graphs);
        let mut task = self.task(&graphs, work)?;
        let program = graphs.exec(exec)?.program();
        let found = find(&mut program.nodes, node).ok_or_else(|| no_node(node))?;
        let refused = found.refuses(&task);
        if refused.is_none() {
            std::mem::swap(&mut found.task, &mut task);
            if matches!(task, Task::Record(_) | Task::Wait(_) | Task::Child(_)) {
                program.changed();
            }
        }
        drop(graphs);
        drop(task);
        Ok(refused.map_or(Ok(()), Err))
    }

    pub(super) fn enable_node(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        self.alive()?;
        let mut graphs = lock(&self.graphs);
        let found = find(&mut graphs.exec(exec)?.program().nodes, node).ok_or_else(|| no_node(node))?;
        if !matches!(found.task, Task::Kernel { .. } | Task::Copy { .. } | Task::Fill { .. }) {
            let why = format!("only kernels, copies and fills can be disabled, and it is {}", found.task.kind());
            return Ok(Err(Refused { node: Some(node), why }));
        }
        found.enabled = enabled;
        Ok(Ok(()))
    }
}

fn no_node(node: RawNode) -> Error {
    wrong(format!("node {} is not of the graph that this exec was made of", node.0))
}

fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, message)
}
