//! CUDA graphs: built node by node, launched as a whole.
//!
//! | file | contents |
//! |---|---|
//! | `graph.rs` | the existing graphs and execs, and the resources that they keep alive |
//! | `graph/node.rs` | a node for each kind of work of a stream |
//! | `graph/capture.rs` | captures work of other libraries |
//! | `graph/conditional.rs` | conditional nodes, whose bodies run depending on a flag |
//! | `graph/exec.rs` | instantiation, launches, changes |
//!
//! Graphs, nodes and execs are the driver's handles, as numbers, in the backend's interface. For each graph and exec,
//! [`GraphRecords`] stores data that the driver does not: the host functions that its nodes call, the graphs within it,
//! and whether it is poisoned. Launches do not access these records.
//!
//! ```text
//!   graph:  created ──▶ released by its owner ──▶ destroyed     not before its last exec: to change an exec, the driver
//!                                                               reads the nodes of the graph
//!   exec:   created ──▶ destroyed                               after its launches, by the backend's contract
//! ```
//!
//! **Host functions.** A graph owns the functions of its nodes and of its children; a caller that updates an exec from
//! a graph keeps that graph while launches run its nodes. An exec owns the functions that its nodes were set to
//! individually. Which of them a running launch still calls is not known here, so they are released when the caller
//! that set them asks for it, or with the exec. A function that is set twice is stored once.
//!
//! **Memory** that a node allocates and no node frees still exists after a launch. The driver frees it before the next
//! launch, but not when the exec is destroyed: it is freed here then.
//!
//! **Failed undo.** The driver can refuse to remove nodes that were added by failed work. Such a graph is poisoned, and
//! neither it nor any graph that contains it can be launched.

mod capture;
mod conditional;
mod exec;
mod node;

use std::{collections::HashMap, ptr, sync::Arc};

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUstream_st};
use smallvec::SmallVec;

use self::conditional::Conditional;
use super::{
    CudaBackend,
    driver::{Code, Driver, DriverHandle},
    host::GraphCallback,
};
use crate::{
    device::backend::{Address, HostCallback, RawExec, RawGraph, RawNode},
    error::{Error, ErrorKind, Result},
    sync::{Level, Mutex, MutexGuard, log},
};

#[derive(Debug)]
pub(super) struct CudaGraphs {
    records: Mutex<GraphRecords>,
    /// Idle streams for captures.
    idle: Mutex<Vec<DriverHandle<CUstream_st>>>,
}

#[cfg(test)]
impl CudaGraphs {
    pub(super) fn counts(&self) -> (usize, usize) {
        let records = self.records();
        (records.graphs.len(), records.execs.len())
    }
}

#[derive(Debug, Default)]
struct GraphRecords {
    graphs: HashMap<RawGraph, CudaGraph>,
    execs: HashMap<RawExec, CudaExec>,
}

#[derive(Debug, Default)]
struct CudaGraph {
    functions: Vec<Arc<GraphCallback>>,
    conditionals: Vec<Conditional>,
    /// It is the body of a node of another graph, and is destroyed with the other graph.
    within: bool,
    /// It has nodes that allocate or free memory, so that no node can be removed.
    memory: bool,
    /// It has conditional nodes, added here or by another library.
    conditions: bool,
    /// Memory that its nodes allocate and none of them frees.
    unfreed: Vec<Address>,
    /// The reason why the graph cannot be used any more.
    poisoned: Option<&'static str>,
    execs: usize,
    ended: bool,
}

#[derive(Debug)]
struct CudaExec {
    of: RawGraph,
    set: Vec<Arc<GraphCallback>>,
    /// Memory that still exists after a launch.
    unfreed: Vec<Address>,
}

impl CudaGraph {
    /// The reason, if any, why the graph can have only one exec at a time and cannot be a child: for a second exec
    /// `cuGraphInstantiate` returns "not supported" (801), and `cuGraphAddChildGraphNode` refuses such a child.
    fn is_single(&self) -> Option<&'static str> {
        if self.memory { Some("allocates memory") } else { self.conditions.then_some("has conditional nodes") }
    }
}

/// Graphs removed from the records. They own users' closures, so they are dropped with no lock held.
type RemovedGraphs = Vec<CudaGraph>;

impl GraphRecords {
    fn graph(&mut self, graph: RawGraph) -> &mut CudaGraph {
        self.graphs.entry(graph).or_default()
    }

    /// The graph and the bodies within its nodes, at any depth.
    fn all(&self, graph: RawGraph) -> Vec<RawGraph> {
        let mut all = vec![graph];
        let mut next = 0;
        while let Some(graph) = all.get(next) {
            let conditionals = self.graphs.get(graph).into_iter().flat_map(|graph| &graph.conditionals);
            all.extend(conditionals.map(|conditional| conditional.body));
            next += 1;
        }
        all
    }

    /// The functions that nodes of the graph and of the bodies within it call.
    fn functions(&self, graph: RawGraph) -> Vec<Arc<GraphCallback>> {
        let graphs = self.all(graph).into_iter().filter_map(|graph| self.graphs.get(&graph));
        graphs.flat_map(|graph| graph.functions.iter().cloned()).collect()
    }

    fn poisoned(&self, graph: RawGraph) -> Option<&'static str> {
        self.all(graph).into_iter().find_map(|graph| self.graphs.get(&graph)?.poisoned)
    }

    fn remove(&mut self, graph: RawGraph) -> RemovedGraphs {
        self.all(graph).into_iter().filter_map(|graph| self.graphs.remove(&graph)).collect()
    }

    /// Marks the graph as released by its owner. Returns its entries if it is to be destroyed now.
    fn release_graph(&mut self, raw: RawGraph) -> Option<RemovedGraphs> {
        let graph = self.graphs.get_mut(&raw)?;
        if graph.within {
            return None;
        }
        graph.ended = true;
        (graph.execs == 0).then(|| self.remove(raw))
    }

    fn add_exec(&mut self, exec: RawExec, of: RawGraph) {
        let graph = self.graph(of);
        graph.execs += 1;
        let unfreed = graph.unfreed.clone();
        self.execs.insert(exec, CudaExec { of, set: Vec::new(), unfreed });
    }

    /// Records functions that nodes of the exec were set to.
    fn add_exec_functions(&mut self, exec: RawExec, functions: Vec<Arc<GraphCallback>>) {
        let Some(exec) = self.execs.get_mut(&exec) else { return };
        for function in functions {
            if !exec.set.iter().any(|known| Arc::ptr_eq(known, &function)) {
                exec.set.push(function);
            }
        }
    }

    /// Removes a function that nodes were set to and that no launch calls any more.
    fn release_callback(&mut self, function: &HostCallback) -> Vec<Arc<GraphCallback>> {
        self.execs.values_mut().flat_map(|exec| exec.set.extract_if(.., |known| known.is(function))).collect()
    }

    /// Records that the driver has destroyed an exec of this graph. Only then can a graph with one exec at a time have
    /// another. Returns the graph's entries if it is to be destroyed now.
    fn exec_destroyed(&mut self, of: RawGraph) -> Option<RemovedGraphs> {
        let graph = self.graphs.get_mut(&of)?;
        graph.execs -= 1;
        (graph.ended && graph.execs == 0).then(|| self.remove(of))
    }
}

impl Default for CudaGraphs {
    fn default() -> Self {
        Self { records: Mutex::at(Level::DriverObjects, GraphRecords::default()), idle: Mutex::default() }
    }
}

impl CudaGraphs {
    fn records(&self) -> MutexGuard<'_, GraphRecords> {
        self.records.lock()
    }

    fn idle(&self) -> MutexGuard<'_, Vec<DriverHandle<CUstream_st>>> {
        self.idle.lock()
    }

    /// Destroys the remaining graphs, execs and streams. The context must be current and nothing may run.
    pub(super) fn close(&self, driver: &Driver) {
        let records = std::mem::take(&mut *self.records());
        for (raw, CudaExec { unfreed, .. }) in &records.execs {
            for memory in unfreed {
                // SAFETY: memory of a graph that is no longer in use. If the graph was never launched, there is none,
                // and the driver refuses the call.
                let _ = unsafe { (driver.mem_free)(memory.0) };
            }
            // SAFETY: created by `instantiate` and not used after this: the caller is the device's destructor. This
            // applies to the calls below as well.
            let _ = unsafe { (driver.exec_destroy)(exec(*raw)) };
        }
        for (raw, _) in records.graphs.iter().filter(|(_, graph)| !graph.within) {
            // SAFETY: as above.
            let _ = unsafe { (driver.graph_destroy)(graph(*raw)) };
        }
        for stream in self.idle().drain(..) {
            // SAFETY: as above.
            let _ = unsafe { (driver.stream_destroy)(stream.raw()) };
        }
    }
}

/// Handles are numbers in the backend's interface. These functions convert to and from the driver's types.
fn graph(raw: RawGraph) -> CUgraph {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

fn node(raw: RawNode) -> CUgraphNode {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

fn exec(raw: RawExec) -> CUgraphExec {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

fn raw_graph(graph: CUgraph) -> RawGraph {
    RawGraph(graph.expose_provenance() as u64)
}

fn raw_node(node: CUgraphNode) -> RawNode {
    RawNode(node.expose_provenance() as u64)
}

/// Nodes for a call of the driver: without duplicates, and in order, which matters for updates of execs.
type Nodes = SmallVec<[CUgraphNode; 8]>;

fn nodes(raw: &[RawNode]) -> Nodes {
    let mut nodes = Nodes::new();
    for node in raw.iter().copied().map(node) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    nodes
}

impl CudaBackend {
    /// See [`Backend::graph_create`](crate::device::backend::Backend::graph_create); the same applies to the other
    /// methods.
    pub(super) fn create_graph(&self) -> Result<RawGraph> {
        let driver = self.cx.enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: `graph` outlives the call, which writes one handle; there are no flags.
        self.cx.check(unsafe { (driver.graph_create)(&mut graph, 0) }, "cuGraphCreate")?;
        let raw = raw_graph(graph);
        self.graphs.records().graphs.insert(raw, CudaGraph::default());
        Ok(raw)
    }

    pub(super) fn destroy_graph(&self, raw: RawGraph) {
        // The guard is dropped at the end of the statement: the entries are dropped later and run user code.
        let removed = self.graphs.records().release_graph(raw);
        if removed.is_some() {
            self.destroy(raw);
        }
    }

    pub(super) fn forget_callback(&self, function: &HostCallback) {
        // As above.
        let gone = self.graphs.records().release_callback(function);
        drop(gone);
    }

    fn destroy(&self, raw: RawGraph) {
        let Ok(driver) = self.cx.enter() else { return };
        // SAFETY: created by `create_graph`, or by the driver for this module; its owner has released it, and its last
        // exec was destroyed.
        if let Err(error) = self.cx.check(unsafe { (driver.graph_destroy)(graph(raw)) }, "cuGraphDestroy") {
            log(move || tracing::warn!(error = %format_args!("{error:#}"), "a graph was not destroyed"));
        }
    }

    /// The nodes of a graph, in the order in which they were added.
    fn nodes_of(&self, graph: CUgraph) -> Result<Vec<CUgraphNode>> {
        // SAFETY: a live graph, and room for as many nodes as the count passed.
        self.list("cuGraphGetNodes", |nodes, count| unsafe { (self.cx.driver.graph_get_nodes)(graph, nodes, count) })
    }

    /// The direct successors of a node.
    fn dependents_of(&self, node: CUgraphNode) -> Result<Vec<CUgraphNode>> {
        self.list("cuGraphNodeGetDependentNodes", |nodes, count| {
            // SAFETY: a live node, and room for as many nodes as the count passed.
            unsafe { (self.cx.driver.graph_node_get_dependents)(node, nodes, count) }
        })
    }

    /// The direct predecessors of a node.
    fn dependencies_of(&self, node: CUgraphNode) -> Result<Vec<CUgraphNode>> {
        self.list("cuGraphNodeGetDependencies", |nodes, count| {
            // SAFETY: a live node, and room for as many nodes as the count passed.
            unsafe { (self.cx.driver.graph_node_get_dependencies)(node, nodes, count) }
        })
    }

    /// Calls a function that fills an array of nodes: first without an array, for their number.
    fn list(&self, call: &str, ask: impl Fn(*mut CUgraphNode, *mut usize) -> Code) -> Result<Vec<CUgraphNode>> {
        self.cx.enter()?;
        let mut count = 0;
        self.cx.check(ask(ptr::null_mut(), &mut count), call)?;
        let mut nodes = vec![ptr::null_mut(); count];
        if count > 0 {
            self.cx.check(ask(nodes.as_mut_ptr(), &mut count), call)?;
            nodes.truncate(count);
        }
        Ok(nodes)
    }

    pub(super) fn order_nodes(&self, raw: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        let (before, after) = (node(before), node(after));
        // The driver refuses an edge that already exists.
        if self.dependents_of(before)?.contains(&after) {
            return Ok(());
        }
        self.add_edges(raw, &[before], &[after])
    }

    /// Adds edges, which must not exist yet.
    fn add_edges(&self, raw: RawGraph, from: &[CUgraphNode], to: &[CUgraphNode]) -> Result<()> {
        let (driver, count) = (self.cx.enter()?, from.len().min(to.len()));
        if count == 0 {
            return Ok(());
        }
        // SAFETY: a live graph and nodes of it, at least `count` in each array.
        let code = unsafe { (driver.graph_add_dependencies)(graph(raw), from.as_ptr(), to.as_ptr(), count) };
        self.cx.check(code, "cuGraphAddDependencies")
    }

    /// Removes a node. Its successors become successors of its predecessors.
    pub(super) fn remove_node(&self, raw: RawGraph, gone: RawNode) -> Result<()> {
        let driver = self.cx.enter()?;
        let (is_conditional, memory) = {
            let mut records = self.graphs.records();
            let graph = records.graph(raw);
            (graph.conditionals.iter().any(|conditional| conditional.node == gone), graph.memory)
        };
        if is_conditional {
            // The condition's handle would remain, and the driver does not instantiate a graph with a handle that no
            // node uses.
            return Err(self.usage("a conditional node cannot be removed from a graph: build the graph without it"));
        }
        if memory {
            return Err(self.usage(
                "nodes of a graph that allocates or frees memory cannot be removed: build the graph without them",
            ));
        }
        let gone = node(gone);
        let after = self.dependents_of(gone)?;
        let (mut from, mut to) = (Nodes::new(), Nodes::new());
        for before in self.dependencies_of(gone)? {
            let known = self.dependents_of(before)?;
            for &after in after.iter().filter(|after| !known.contains(after)) {
                from.push(before);
                to.push(after);
            }
        }
        self.add_edges(raw, &from, &to)?;
        // SAFETY: a node of this graph, which the caller, who owns the graph, does not use again.
        self.cx.check(unsafe { (driver.graph_destroy_node)(gone) }, "cuGraphDestroyNode")
    }

    /// Marks a graph as unusable.
    fn poison(&self, graph: RawGraph, why: &'static str) {
        self.graphs.records().graph(graph).poisoned = Some(why);
    }

    fn check_not_poisoned(&self, graph: RawGraph) -> Result<()> {
        let poisoned = self.graphs.records().poisoned(graph);
        poisoned.map_or(Ok(()), |why| Err(self.usage(&format!("the graph cannot be used any more: {why}"))))
    }

    /// Fails for a graph that cannot be a child of another.
    fn check_child(&self, child: RawGraph) -> Result<()> {
        self.check_not_poisoned(child)?;
        self.check_not_body(child)?;
        match self.graphs.records().graph(child).is_single() {
            Some(what) => Err(self.usage(&format!("a graph that {what} cannot be a child of another"))),
            None => Ok(()),
        }
    }

    /// Fails for a graph that is a part of another one.
    fn check_not_body(&self, graph: RawGraph) -> Result<()> {
        let within = self.graphs.records().graph(graph).within;
        if !within {
            return Ok(());
        }
        Err(self.usage("the body of a conditional node can run only as part of its graph: instantiate that graph"))
    }

    fn usage(&self, text: &str) -> Error {
        Error::new(ErrorKind::Usage, text).at(self.cx.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::cuda::host::FunctionOwner;

    const GRAPH: RawGraph = RawGraph(1);
    const BODY: RawGraph = RawGraph(2);
    const INNER: RawGraph = RawGraph(3);

    /// A function that nodes call, and a counter that it holds.
    fn function() -> (Arc<GraphCallback>, Arc<AtomicUsize>) {
        let inside = Arc::new(AtomicUsize::new(0));
        let function: HostCallback = Arc::new({
            let inside = Arc::clone(&inside);
            move || {
                inside.fetch_add(1, Ordering::SeqCst);
            }
        });
        (GraphCallback::of(FunctionOwner::new(), &function), inside)
    }

    /// A graph with a body that contains another body.
    fn nested() -> GraphRecords {
        let mut records = GraphRecords::default();
        records.graphs.insert(GRAPH, CudaGraph::default());
        for (outer, body) in [(GRAPH, BODY), (BODY, INNER)] {
            records.graph(outer).conditionals.push(Conditional { node: RawNode(9), body, loop_setter: None });
            records.graphs.insert(body, CudaGraph { within: true, ..CudaGraph::default() });
        }
        records
    }

    #[test]
    fn a_graph_stays_while_an_exec_of_it_does() {
        let mut records = nested();
        records.graph(GRAPH).unfreed.push(Address(0x100));
        records.add_exec(RawExec(7), GRAPH);
        records.add_exec(RawExec(8), GRAPH);
        assert!(records.release_graph(GRAPH).is_none(), "two execs of it live");
        let execs = [RawExec(7), RawExec(8)].map(|exec| records.execs.remove(&exec).expect("made above"));
        assert!(execs.iter().all(|exec| exec.of == GRAPH && exec.unfreed == [Address(0x100)]));
        assert_eq!(records.graph(GRAPH).execs, 2, "the driver has them until it says otherwise");
        assert!(records.exec_destroyed(GRAPH).is_none(), "one exec of it lives");
        assert_eq!(records.exec_destroyed(GRAPH).map(|removed| removed.len()), Some(3));
        assert!(records.graphs.is_empty() && records.exec_destroyed(GRAPH).is_none());
    }

    #[test]
    fn a_graph_without_execs_is_removed_at_once_and_a_body_only_with_its_graph() {
        let mut records = nested();
        assert!(records.release_graph(INNER).is_none() && records.release_graph(BODY).is_none());
        assert_eq!(records.graphs.len(), 3);
        assert_eq!(records.release_graph(GRAPH).map(|removed| removed.len()), Some(3));
        assert!(records.graphs.is_empty());
        assert!(records.release_graph(GRAPH).is_none(), "twice");
    }

    #[test]
    fn functions_that_an_exec_may_call_are_kept() {
        let mut records = nested();
        let [(outer, outside), (inner, inside)] = [(); 2].map(|()| function());
        records.graph(GRAPH).functions.push(outer);
        records.graph(INNER).functions.push(inner);
        records.add_exec(RawExec(7), GRAPH);
        let made: [(HostCallback, _); 2] = [(); 2].map(|()| {
            let function: HostCallback = Arc::new(|| ());
            let callback = GraphCallback::of(FunctionOwner::new(), &function);
            (function, callback)
        });
        for (_, callback) in &made {
            records.add_exec_functions(RawExec(7), vec![Arc::clone(callback), Arc::clone(callback)]);
        }
        assert_eq!(records.execs[&RawExec(7)].set.len(), 2, "one that comes twice is kept once");
        assert!(records.release_graph(GRAPH).is_none());
        assert_eq!([&outside, &inside].map(Arc::strong_count), [2; 2]);
        // One function is removed: the other one and the graph's stay.
        assert_eq!(records.release_callback(&made[0].0).len(), 1);
        assert_eq!(records.release_callback(&made[0].0).len(), 0, "twice");
        assert_eq!(made.each_ref().map(|(_, callback)| Arc::strong_count(callback)), [1, 2]);
        drop(records.execs.remove(&RawExec(7)));
        drop(records.exec_destroyed(GRAPH));
        assert_eq!([&outside, &inside].map(Arc::strong_count), [1; 2]);
    }

    #[test]
    fn predecessors_are_passed_once_and_in_order() {
        let [one, two] = [RawNode(0x20), RawNode(0x10)];
        assert_eq!(nodes(&[one, two, one, two]).as_slice(), [node(one), node(two)]);
    }

    #[test]
    fn a_spoiled_body_spoils_the_whole_graph() {
        let mut records = nested();
        assert_eq!(records.poisoned(GRAPH), None);
        records.graph(INNER).poisoned = Some("why");
        assert_eq!(records.poisoned(GRAPH), Some("why"));
    }
}
