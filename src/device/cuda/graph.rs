//! CUDA graphs: built node by node, launched as a whole.
//!
//! | file | its idea |
//! |---|---|
//! | `graph.rs` | which graphs and execs there are, and what has to live as long as they do |
//! | `graph/node.rs` | a node for each thing that a stream can be given |
//! | `graph/capture.rs` | what other libraries enqueue, captured |
//! | `graph/conditional.rs` | graphs within nodes, which run as a flag says |
//! | `graph/exec.rs` | instantiated, launched, changed |
//!
//! Graphs, nodes and execs cross the seam as the driver's handles, as numbers. Beside each graph and exec a [`Book`] holds
//! what the driver does not: the host functions that its nodes call, the graphs within it, what is wrong with it. Launches
//! do not look there.
//!
//! ```text
//!   graph:  made ──▶ ended by its owner ──▶ destroyed     not before the last exec that was made of it: to change an
//!                                                         exec the driver looks at the nodes of the graph
//!   exec:   made ──▶ destroyed                            its launches are done, as the seam says
//! ```
//!
//! **Host functions.** A graph has those of its nodes and of its children; whoever updates an exec from it keeps it as long as
//! launches do what it does. An exec has those that single nodes of it were set to. Of a launch that is under way nobody here
//! knows which it still calls: they are let go when who set them says so, or with the exec. One that comes twice is kept once.
//!
//! **Memory** that a node makes and no node gives back is there after a launch. The driver gives it back before the next
//! one, but not when the exec ends: that is done here.
//!
//! **What cannot be undone.** The driver may refuse to take out again what was added and is not wanted: then the graph is
//! spoiled, and nothing is ever launched that comes from it.

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
    driver::{Code, Driver, Handle},
    host::Repeated,
};
use crate::{
    device::backend::{Address, HostCallback, RawExec, RawGraph, RawNode},
    error::{Error, ErrorKind, Result},
    sync::{Level, Mutex, MutexGuard, log},
};

/// The graphs of one device.
#[derive(Debug)]
pub(super) struct Graphs {
    book: Mutex<Book>,
    /// Streams to capture on, none of which is in use.
    idle: Mutex<Vec<Handle<CUstream_st>>>,
}

#[cfg(test)]
impl Graphs {
    /// Of graphs and execs.
    pub(super) fn counts(&self) -> (usize, usize) {
        let book = self.book();
        (book.graphs.len(), book.execs.len())
    }
}

#[derive(Debug, Default)]
struct Book {
    graphs: HashMap<RawGraph, Graph>,
    execs: HashMap<RawExec, Exec>,
}

#[derive(Debug, Default)]
struct Graph {
    /// What nodes of it call.
    functions: Vec<Arc<Repeated>>,
    conditionals: Vec<Conditional>,
    /// It is within a node of another, which it ends with.
    within: bool,
    /// It has nodes that make memory or give it back, so that nothing can be taken out of it.
    memory: bool,
    /// It has nodes with a graph within, ours or another library's.
    conditions: bool,
    /// Memory that nodes of it make and none gives back.
    kept: Vec<Address>,
    spoiled: Option<&'static str>,
    /// How many execs that were made of it there are.
    execs: usize,
    /// Its owner is done with it.
    ended: bool,
}

#[derive(Debug)]
struct Exec {
    of: RawGraph,
    /// What nodes of it were set to.
    set: Vec<Arc<Repeated>>,
    /// Memory that is there after a launch.
    kept: Vec<Address>,
}

impl Graph {
    /// Why it has one exec at a time and is nobody's child, if that is so: with an exec there, `cuGraphInstantiate` answers
    /// that it is not supported (801), and `cuGraphAddChildGraphNode` refuses such a child.
    fn is_single(&self) -> Option<&'static str> {
        if self.memory { Some("makes memory") } else { self.conditions.then_some("has conditions") }
    }
}

/// What has left the book, to be dropped when nothing is locked: it is the user's.
type Left = Vec<Graph>;

impl Book {
    fn graph(&mut self, graph: RawGraph) -> &mut Graph {
        self.graphs.entry(graph).or_default()
    }

    /// The graph and those within nodes of it, at any depth.
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

    /// What nodes of the graph and of those within it call.
    fn functions(&self, graph: RawGraph) -> Vec<Arc<Repeated>> {
        let graphs = self.all(graph).into_iter().filter_map(|graph| self.graphs.get(&graph));
        graphs.flat_map(|graph| graph.functions.iter().cloned()).collect()
    }

    /// Why nothing may be launched that comes from the graph.
    fn spoiled(&self, graph: RawGraph) -> Option<&'static str> {
        self.all(graph).into_iter().find_map(|graph| self.graphs.get(&graph)?.spoiled)
    }

    fn remove(&mut self, graph: RawGraph) -> Left {
        self.all(graph).into_iter().filter_map(|graph| self.graphs.remove(&graph)).collect()
    }

    /// The graph's owner is done with it. What is left of it if it is to be destroyed now.
    fn graph_ended(&mut self, raw: RawGraph) -> Option<Left> {
        let graph = self.graphs.get_mut(&raw)?;
        if graph.within {
            return None;
        }
        graph.ended = true;
        (graph.execs == 0).then(|| self.remove(raw))
    }

    fn exec_made(&mut self, exec: RawExec, of: RawGraph) {
        let graph = self.graph(of);
        graph.execs += 1;
        let kept = graph.kept.clone();
        self.execs.insert(exec, Exec { of, set: Vec::new(), kept });
    }

    /// Nodes of the exec were set to call these.
    fn exec_calls(&mut self, exec: RawExec, functions: Vec<Arc<Repeated>>) {
        let Some(exec) = self.execs.get_mut(&exec) else { return };
        for function in functions {
            if !exec.set.iter().any(|known| Arc::ptr_eq(known, &function)) {
                exec.set.push(function);
            }
        }
    }

    /// Takes out what no launch calls any more that nodes were set to.
    fn callback_over(&mut self, function: &HostCallback) -> Vec<Arc<Repeated>> {
        self.execs.values_mut().flat_map(|exec| exec.set.extract_if(.., |known| known.is(function))).collect()
    }

    /// The driver has destroyed an exec of this graph: only then may there be another one, where there is one at a time. What
    /// is left of the graph if it is to be destroyed now.
    fn exec_gone(&mut self, of: RawGraph) -> Option<Left> {
        let graph = self.graphs.get_mut(&of)?;
        graph.execs -= 1;
        (graph.ended && graph.execs == 0).then(|| self.remove(of))
    }
}

impl Default for Graphs {
    fn default() -> Self {
        Self { book: Mutex::at(Level::DriverObjects, Book::default()), idle: Mutex::default() }
    }
}

impl Graphs {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock()
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Handle<CUstream_st>>> {
        self.idle.lock()
    }

    /// Destroys what its owners have left behind. The context must be current and nothing may run.
    pub(super) fn close(&self, driver: &Driver) {
        let book = std::mem::take(&mut *self.book());
        for (raw, Exec { kept, .. }) in &book.execs {
            for memory in kept {
                // SAFETY: memory of a graph that nothing uses any more or, if that was never launched, none: then it is
                // refused.
                let _ = unsafe { (driver.mem_free)(memory.0) };
            }
            // SAFETY: made by `instantiate` and used by nobody after this: the caller is the destructor of the device. So
            // for the others below.
            let _ = unsafe { (driver.exec_destroy)(exec(*raw)) };
        }
        for (raw, _) in book.graphs.iter().filter(|(_, graph)| !graph.within) {
            // SAFETY: as above.
            let _ = unsafe { (driver.graph_destroy)(graph(*raw)) };
        }
        for stream in self.idle().drain(..) {
            // SAFETY: as above.
            let _ = unsafe { (driver.stream_destroy)(stream.raw()) };
        }
    }
}

/// Handles cross the seam as numbers and come back as what they were.
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

/// Nodes as the driver takes them: each once, and in their order, which counts when execs are updated.
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
    /// See [`Backend::graph_create`](crate::device::backend::Backend::graph_create); so for the others.
    pub(super) fn create_graph(&self) -> Result<RawGraph> {
        let driver = self.cx.enter()?;
        let mut graph = ptr::null_mut();
        // SAFETY: `graph` outlives the call, which writes one handle; there are no flags.
        self.cx.check(unsafe { (driver.graph_create)(&mut graph, 0) }, "cuGraphCreate")?;
        let raw = raw_graph(graph);
        self.graphs.book().graphs.insert(raw, Graph::default());
        Ok(raw)
    }

    pub(super) fn destroy_graph(&self, raw: RawGraph) {
        // The guard is gone at the end of the statement: what is dropped may do anything.
        let left = self.graphs.book().graph_ended(raw);
        if left.is_some() {
            self.destroy(raw);
        }
    }

    pub(super) fn forget_callback(&self, function: &HostCallback) {
        // As above.
        let gone = self.graphs.book().callback_over(function);
        drop(gone);
    }

    fn destroy(&self, raw: RawGraph) {
        let Ok(driver) = self.cx.enter() else { return };
        // SAFETY: made by `create_graph`, or by the driver for this file; its owner is done with it and so is the last exec
        // that was made of it.
        if let Err(error) = self.cx.check(unsafe { (driver.graph_destroy)(graph(raw)) }, "cuGraphDestroy") {
            log(move || tracing::warn!(%error, "a graph was not destroyed"));
        }
    }

    /// The nodes of a graph, in the order in which they were added.
    fn nodes_of(&self, graph: CUgraph) -> Result<Vec<CUgraphNode>> {
        // SAFETY: a live graph, and room for as many nodes as said.
        self.list("cuGraphGetNodes", |nodes, count| unsafe { (self.cx.driver.graph_get_nodes)(graph, nodes, count) })
    }

    /// The nodes that come right after a node.
    fn dependents_of(&self, node: CUgraphNode) -> Result<Vec<CUgraphNode>> {
        self.list("cuGraphNodeGetDependentNodes", |nodes, count| {
            // SAFETY: a live node, and room for as many nodes as said.
            unsafe { (self.cx.driver.graph_node_get_dependents)(node, nodes, count) }
        })
    }

    /// The nodes that a node comes right after.
    fn dependencies_of(&self, node: CUgraphNode) -> Result<Vec<CUgraphNode>> {
        self.list("cuGraphNodeGetDependencies", |nodes, count| {
            // SAFETY: a live node, and room for as many nodes as said.
            unsafe { (self.cx.driver.graph_node_get_dependencies)(node, nodes, count) }
        })
    }

    /// What a call that fills an array of nodes gives: it is called without one first, and says how many there are.
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

    /// One node comes after another, too.
    pub(super) fn order_nodes(&self, raw: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        let (before, after) = (node(before), node(after));
        // An edge that is there already would be an error.
        if self.dependents_of(before)?.contains(&after) {
            return Ok(());
        }
        self.add_edges(raw, &[before], &[after])
    }

    /// Edges that are not there yet.
    fn add_edges(&self, raw: RawGraph, from: &[CUgraphNode], to: &[CUgraphNode]) -> Result<()> {
        let (driver, count) = (self.cx.enter()?, from.len().min(to.len()));
        if count == 0 {
            return Ok(());
        }
        // SAFETY: a live graph and nodes of it, at least as many in each array as said: the seam's callers own what they
        // name.
        let code = unsafe { (driver.graph_add_dependencies)(graph(raw), from.as_ptr(), to.as_ptr(), count) };
        self.cx.check(code, "cuGraphAddDependencies")
    }

    /// Takes a node out. What came after it comes after what that came after.
    pub(super) fn remove_node(&self, raw: RawGraph, gone: RawNode) -> Result<()> {
        let driver = self.cx.enter()?;
        let (is_conditional, memory) = {
            let mut book = self.graphs.book();
            let graph = book.graph(raw);
            (graph.conditionals.iter().any(|conditional| conditional.node == gone), graph.memory)
        };
        if is_conditional {
            // Its handle would stay, and a graph with a handle that no node has is not instantiated.
            return Err(self.usage("a condition cannot be taken out of a graph: build it without"));
        }
        if memory {
            return Err(self.usage("nothing can be taken out of a graph that makes memory or gives it back"));
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
        // SAFETY: a node of this graph, which its caller, who owns the graph, does not name again.
        self.cx.check(unsafe { (driver.graph_destroy_node)(gone) }, "cuGraphDestroyNode")
    }

    /// What was added to a graph cannot be taken out of it again.
    fn spoil(&self, graph: RawGraph, why: &'static str) {
        self.graphs.book().graph(graph).spoiled = Some(why);
    }

    fn check_unspoiled(&self, graph: RawGraph) -> Result<()> {
        let spoiled = self.graphs.book().spoiled(graph);
        spoiled.map_or(Ok(()), |why| Err(self.usage(&format!("the graph cannot be used any more: {why}"))))
    }

    /// An error for a graph that cannot be within a node of another.
    fn check_child(&self, child: RawGraph) -> Result<()> {
        self.check_unspoiled(child)?;
        self.check_whole(child)?;
        match self.graphs.book().graph(child).is_single() {
            Some(what) => Err(self.usage(&format!("a graph that {what} is no child of another"))),
            None => Ok(()),
        }
    }

    /// A graph that is no part of another one, with which it would end.
    fn check_whole(&self, graph: RawGraph) -> Result<()> {
        let within = self.graphs.book().graph(graph).within;
        match within {
            true => Err(self.usage("the body of a conditional node runs as a part of its graph only")),
            false => Ok(()),
        }
    }

    fn usage(&self, text: &str) -> Error {
        Error::new(ErrorKind::Usage, text).at(self.cx.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::cuda::host::Owner;

    const GRAPH: RawGraph = RawGraph(1);
    const BODY: RawGraph = RawGraph(2);
    const INNER: RawGraph = RawGraph(3);

    /// A function that nodes call; how many of it there are.
    fn function() -> (Arc<Repeated>, Arc<AtomicUsize>) {
        let inside = Arc::new(AtomicUsize::new(0));
        let function: HostCallback = Arc::new({
            let inside = Arc::clone(&inside);
            move || {
                inside.fetch_add(1, Ordering::SeqCst);
            }
        });
        (Repeated::of(Owner::new(), &function), inside)
    }

    /// A graph with one within it, and another within that.
    fn nested() -> Book {
        let mut book = Book::default();
        book.graphs.insert(GRAPH, Graph::default());
        for (outer, body) in [(GRAPH, BODY), (BODY, INNER)] {
            book.graph(outer).conditionals.push(Conditional { node: RawNode(9), body, again: None });
            book.graphs.insert(body, Graph { within: true, ..Graph::default() });
        }
        book
    }

    #[test]
    fn a_graph_stays_while_an_exec_of_it_does() {
        let mut book = nested();
        book.graph(GRAPH).kept.push(Address(0x100));
        book.exec_made(RawExec(7), GRAPH);
        book.exec_made(RawExec(8), GRAPH);
        assert!(book.graph_ended(GRAPH).is_none(), "two execs of it live");
        let execs = [RawExec(7), RawExec(8)].map(|exec| book.execs.remove(&exec).expect("made above"));
        assert!(execs.iter().all(|exec| exec.of == GRAPH && exec.kept == [Address(0x100)]));
        assert_eq!(book.graph(GRAPH).execs, 2, "the driver has them until it says otherwise");
        assert!(book.exec_gone(GRAPH).is_none(), "one exec of it lives");
        assert_eq!(book.exec_gone(GRAPH).map(|left| left.len()), Some(3));
        assert!(book.graphs.is_empty() && book.exec_gone(GRAPH).is_none());
    }

    #[test]
    fn a_graph_without_execs_ends_at_once_and_one_within_it_only_with_it() {
        let mut book = nested();
        assert!(book.graph_ended(INNER).is_none() && book.graph_ended(BODY).is_none());
        assert_eq!(book.graphs.len(), 3);
        assert_eq!(book.graph_ended(GRAPH).map(|left| left.len()), Some(3));
        assert!(book.graphs.is_empty());
        assert!(book.graph_ended(GRAPH).is_none(), "twice");
    }

    #[test]
    fn what_an_exec_may_call_is_kept() {
        let mut book = nested();
        let [(outer, outside), (inner, inside)] = [(); 2].map(|()| function());
        book.graph(GRAPH).functions.push(outer);
        book.graph(INNER).functions.push(inner);
        book.exec_made(RawExec(7), GRAPH);
        let made: [(HostCallback, _); 2] = [(); 2].map(|()| {
            let function: HostCallback = Arc::new(|| ());
            let repeated = Repeated::of(Owner::new(), &function);
            (function, repeated)
        });
        for (_, repeated) in &made {
            book.exec_calls(RawExec(7), vec![Arc::clone(repeated), Arc::clone(repeated)]);
        }
        assert_eq!(book.execs[&RawExec(7)].set.len(), 2, "one that comes twice is kept once");
        assert!(book.graph_ended(GRAPH).is_none());
        assert_eq!([&outside, &inside].map(Arc::strong_count), [2; 2]);
        // One is over: the other and the graph's stay.
        assert_eq!(book.callback_over(&made[0].0).len(), 1);
        assert_eq!(book.callback_over(&made[0].0).len(), 0, "twice");
        assert_eq!(made.each_ref().map(|(_, repeated)| Arc::strong_count(repeated)), [1, 2]);
        drop(book.execs.remove(&RawExec(7)));
        drop(book.exec_gone(GRAPH));
        assert_eq!([&outside, &inside].map(Arc::strong_count), [1; 2]);
    }

    #[test]
    fn what_comes_before_is_said_once_and_in_order() {
        let [one, two] = [RawNode(0x20), RawNode(0x10)];
        assert_eq!(nodes(&[one, two, one, two]).as_slice(), [node(one), node(two)]);
    }

    #[test]
    fn what_is_spoiled_within_spoils_the_whole() {
        let mut book = nested();
        assert_eq!(book.spoiled(GRAPH), None);
        book.graph(INNER).spoiled = Some("why");
        assert_eq!(book.spoiled(GRAPH), Some("why"));
    }
}
