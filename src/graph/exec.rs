//! [`Exec`]: an instantiated graph.

use std::{
    collections::{HashMap, HashSet},
    fmt, ptr,
};

use super::{Graph, Node, Sketch};
use crate::{
    device::{
        backend::Refused,
        graph_ir::Kind,
        touched::{Touched, clash},
        work_item::WorkItem,
    },
    error::{Error, ErrorKind, Result},
    memory::execution::{Execution, NodeResources, Opening},
    stream::{Stream, Ticket},
    sync::{Deferred, Level, Mutex, discard, lock},
};

/// An instantiated graph, which can be launched repeatedly.
///
/// Launches of one exec run one after the other, on any streams. A dropped exec is destroyed once its launches are
/// done; the drop does not wait for them.
pub struct Exec {
    /// Declared before the graph, so that it is dropped first.
    execution: Execution,
    graph: Graph,
    changes: Mutex<ExecChanges>,
}

/// The differences between an exec and its graph.
#[derive(Default)]
struct ExecChanges {
    /// The graph that the exec was last updated to.
    base: Option<Graph>,
    /// The nodes that were set since, with the memory that each accesses.
    set: HashMap<usize, Touched>,
}

impl Exec {
    pub(super) fn new(graph: &Graph, open: &[Opening]) -> Result<Self> {
        let execution = Execution::new(&graph.0.device, &graph.0.recorder, graph.resources(), open)?;
        Ok(Self { execution, graph: graph.clone(), changes: Mutex::at(Level::ExecChanges, ExecChanges::default()) })
    }

    pub(crate) fn execution(&self) -> &Execution {
        &self.execution
    }

    /// The graph that the exec was instantiated from.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Uploads the exec to the device, in stream order. Without this call, the first launch uploads it.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch).
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        self.execution.upload(stream)
    }

    /// Enqueues a launch into a stream. The launch comes after all earlier uses of the memory that its nodes use, and
    /// later uses of that memory come after the launch. To wait for it, use the ticket:
    /// `exec.launch(&stream)?.completed().await?`.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a stream on another device or of a capture; [`Race`](ErrorKind::Race) if the
    /// race checker finds a race; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn launch(&self, stream: &Stream) -> Result<Ticket> {
        self.execution.launch(stream)
    }

    /// Updates the exec to `graph`, for later launches. `graph` must have the same nodes in the same order; their
    /// parameters may differ, as in a capture of the same code with other buffers. Nodes of other libraries can only be
    /// changed in this way. An update undoes all earlier changes by [`set`](Self::set). The replaced resources are
    /// released once the earlier launches are done, except for the resources of the graph that the exec was
    /// instantiated from.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the update is not possible, with the node and the reason. In this case, the exec
    /// is unchanged.
    pub fn update(&self, graph: &Graph) -> Result<()> {
        if graph.device() != self.execution.device() {
            let text = format!(
                "an exec on {} cannot be updated to a graph on {}: build the graph on the exec's device",
                self.execution.device(),
                graph.device()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let _later = Deferred::new();
        // Held across both steps, so that a concurrent `set` is either checked against the new graph or undone.
        let mut changes = lock(&self.changes);
        let updated = self.execution.update(&graph.0.recorder, graph.resources())?;
        updated.map_err(|refused| wrong(&refused, graph))?;
        changes.set.clear();
        let before = changes.base.replace(graph.clone());
        drop(changes);
        discard(before);
        Ok(())
    }

    /// Replaces the work of one node by the work item that `work` enqueues, for later launches. The new work must be of
    /// the same kind. The change takes effect after `work` returns. No lock is held while `work` runs: it may launch
    /// this exec, which is still unchanged. The resources of the node's previous work are released once the launches
    /// that use them are done. The graph's edges do not change.
    ///
    /// ```
    /// # use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let device = Device::emulated(Emulated::new());
    /// # let stream = Stream::new(&device)?;
    /// # let mut data = Buffer::from_slice(&stream, &[0_u8; 8])?;
    /// let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7))?;
    /// let exec = graph.instantiate()?;
    /// exec.set(graph.nodes()[0].node, |stream| stream.fill(&mut data, 8))?;
    /// exec.launch(&stream)?;
    /// assert_eq!(data.to_vec(&stream).await?, [8; 8]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The error of `work`; [`Usage`](ErrorKind::Usage) for a node of another graph, for no work item or more than one,
    /// for work of another kind or with another kernel, for memory that another node also uses if no edge orders the
    /// two nodes ([`Builder::order`](super::Builder::order) adds one), and for nodes that cannot be changed
    /// individually, such as those of other libraries. In these cases, the exec is unchanged.
    pub fn set(&self, node: Node, work: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let at = self.find(node)?;
        let recorder = &self.graph.0.recorder;
        let sketch = Sketch::over(self.execution.device(), recorder.collecting());
        let stream = sketch.capture.stream("set", Default::default())?;
        {
            let _in = sketch.capture.enter();
            work(&stream)?;
        }
        // Collects the uses outside of the exec that `work` must come after: once the node is set, launches come after
        // these uses.
        sketch.end();
        let work_item = sketch.recorder.take_collected().map_err(|why| self.not_changed(at, why))?;
        let Some(work_item) = work_item else { return Err(self.not_changed(at, "the closure enqueued no work")) };
        let graph_memories = std::iter::once(sketch.graph_memory.clone()).collect();
        let mut with = NodeResources { graph_memories, kept: sketch.capture.take_kept(), work_item: Some(work_item) };
        let _later = Deferred::new();
        let set = self.change(at, &mut with);
        // If the change was refused, the resources are dropped here, after the lock is released.
        discard(with);
        set
    }

    /// Sets a node to the work in `with`. If this is refused, `with` is unchanged.
    fn change(&self, at: usize, with: &mut NodeResources) -> Result<()> {
        // Held until the new work is noted below, since a concurrent change must be checked against it.
        let mut changes = lock(&self.changes);
        let Some(new) = &with.work_item else { return Ok(()) };
        let touched = new.touched();
        if let Some(why) = self.kernel_mismatch(&changes, at, new).or_else(|| self.clash(&changes, at, &touched)) {
            return Err(self.not_changed(at, &why));
        }
        let set = self.execution.set(&self.graph.0.recorder, at, with)?;
        set.map_err(|refused| self.not_changed(at, &refused.why))?;
        changes.set.insert(at, touched);
        Ok(())
    }

    /// The reason to refuse work with another kernel, which only some drivers accept.
    fn kernel_mismatch(&self, changes: &ExecChanges, at: usize, work_item: &WorkItem) -> Option<String> {
        let base = changes.base.as_ref().unwrap_or(&self.graph);
        let place = self.graph.node_indices().into_iter().position(|number| number == at)?;
        let its = *base.node_indices().get(place)?;
        let state = base.0.recorder.state();
        let node = state.ir.get(its).filter(|node| node.kind == Kind::Kernel && work_item.is(Kind::Kernel))?;
        let new = work_item.name();
        (node.name != new).then(|| format!("it runs kernel `{}` and cannot run `{new}`", node.name))
    }

    /// The reason to refuse work that accesses the same memory as another node if no edge orders the two.
    fn clash(&self, changes: &ExecChanges, at: usize, touched: &Touched) -> Option<String> {
        if touched.is_empty() {
            return None;
        }
        let base = changes.base.as_ref().unwrap_or(&self.graph);
        let its = base.node_indices();
        let apart = |(place, other): (usize, usize)| {
            let apart = self.graph.0.recorder.state().ir.are_unordered(at, other);
            apart.then_some((other, *its.get(place)?))
        };
        let mut others = self.graph.node_indices().into_iter().enumerate().filter_map(apart);
        others.find_map(|(other, its)| {
            let clashes = match changes.set.get(&other) {
                Some(set) => clash(set, touched),
                None => clash(&base.touched(its), touched),
            };
            clashes.then(|| {
                let other = self.graph.describe(other);
                format!(
                    "{other} uses the same memory, and no edge orders the two nodes: add an edge with `Builder::order`"
                )
            })
        })
    }

    /// Sets whether later launches run a node (a kernel, a copy or a fill) or skip it. Initially all nodes are enabled.
    /// An [update](Self::update) does not change this.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node of another graph, or of another kind.
    pub fn enable(&self, node: Node, enabled: bool) -> Result<()> {
        let at = self.find(node)?;
        let done = self.execution.enable(&self.graph.0.recorder, at, enabled)?;
        done.map_err(|refused| self.not_changed(at, &refused.why))
    }

    fn find(&self, node: Node) -> Result<usize> {
        let known = node.graph == self.graph.0.id && self.graph.0.recorder.state().ir.get(node.at).is_some();
        if known {
            Ok(node.at)
        } else {
            Err(Error::new(
                ErrorKind::Usage,
                "the node belongs to another graph: use a node of the graph that the exec was instantiated from",
            ))
        }
    }

    fn not_changed(&self, at: usize, why: &str) -> Error {
        Error::new(ErrorKind::Usage, format!("{} is not changed: {why}", self.graph.describe(at)))
    }
}

impl Graph {
    fn node_indices(&self) -> Vec<usize> {
        self.0.recorder.state().ir.all().map(|(at, _)| at).collect()
    }

    /// The memory that a node reads and writes, including that of nested graphs. Each graph is visited only once,
    /// although several paths may lead to it.
    fn touched(&self, at: usize) -> Touched {
        let mut touched = self.0.recorder.state().ir.get(at).map(|node| node.touched.clone()).unwrap_or_default();
        let mut visited = HashSet::new();
        let mut open: Vec<&Graph> =
            self.0.children.iter().filter(|(_, node)| *node == at).map(|(child, _)| child).collect();
        while let Some(graph) = open.pop() {
            if visited.insert(ptr::from_ref(&*graph.0)) {
                let state = graph.0.recorder.state();
                state.ir.all().for_each(|(_, node)| touched.extend_from_slice(&node.touched));
                drop(state);
                open.extend(graph.0.children.iter().map(|(child, _)| child));
            }
        }
        touched
    }

    /// The resources that launches of the graph's nodes use, including the graph itself with its events and callbacks.
    fn resources(&self) -> NodeResources {
        NodeResources { graph_memories: self.graph_memories().into(), kept: vec![self.0.clone()], work_item: None }
    }
}

fn wrong(refused: &Refused, graph: &Graph) -> Error {
    let at = refused.node.and_then(|raw| {
        let state = graph.0.recorder.state();
        state.ir.all().find(|(_, node)| node.raw.contains(&raw)).map(|(at, _)| at)
    });
    let place = at.map(|at| format!(", at {}", graph.describe(at))).unwrap_or_default();
    Error::new(ErrorKind::Usage, format!("the exec is not updated{place}: {}", refused.why))
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec").field("graph", &self.graph).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::{Device, Emulated},
        memory::Buffer,
    };

    #[test]
    fn a_graph_with_many_parents_is_visited_once() {
        let device = Device::emulated(Emulated::new());
        let mut data = Buffer::<u8>::new(&device, 4).unwrap();
        let (mut graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7)).unwrap();
        // 4,096 paths lead to the innermost graph.
        for _ in 0..12 {
            let mut outer = Graph::builder(&device).unwrap();
            outer.child(&[], &graph).unwrap();
            outer.child(&[], &graph).unwrap();
            graph = outer.build().unwrap();
        }
        let touched: Vec<_> = graph.node_indices().into_iter().map(|at| graph.touched(at).len()).collect();
        assert_eq!(touched, [1, 1]);
    }

    #[test]
    fn a_node_that_is_set_again_has_one_change() {
        let device = Device::emulated(Emulated::new());
        let [mut one, mut other] = [0, 1].map(|_| Buffer::<u8>::new(&device, 4).unwrap());
        let (graph, ()) = Graph::capture(&device, |capture| {
            capture.stream().fill(&mut one, 1)?;
            capture.stream().fill(&mut other, 1)
        })
        .unwrap();
        let exec = graph.instantiate().unwrap();
        for value in 2..5 {
            exec.set(graph.nodes()[0].node, |stream| stream.fill(&mut one, value)).unwrap();
        }
        exec.set(graph.nodes()[1].node, |stream| stream.fill(&mut other, 2)).unwrap();
        assert_eq!(lock(&exec.changes).set.len(), 2);
        exec.update(&graph).unwrap();
        assert!(lock(&exec.changes).set.is_empty());
    }
}
