//! CUDA graphs: work that is recorded once and launched as a whole.
//!
//! A graph launch costs the host about as much as the launch of one kernel, regardless of the number of nodes: on an
//! H200, 2.7 us for 32 kernels in a line that cost 133 us one by one, and they are done after 22 us instead of 137
//! ([performance](crate::guide::performance)).
//!
//! ```text
//!   Graph::capture   what is enqueued on streams ─┐
//!   Graph::builder   node by node                ─┴─> Graph ─instantiate─> Exec ─launch─> Ticket
//! ```
//!
//! The order is derived from the uses of buffers, as on streams: among the nodes of a graph, and between its launches
//! and all other work. The graph and its execs keep the resources of their nodes alive, even if they are dropped
//! elsewhere.
//!
//! ```
//! use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let device = Device::emulated(Emulated::new());
//! let stream = Stream::new(&device)?;
//! let mut data = Buffer::from_slice(&stream, &[0_u8; 8])?;
//! let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7))?;
//! let exec = graph.instantiate()?;
//! exec.launch(&stream)?.completed().await?;
//! assert_eq!(data.to_vec(&stream).await?, [7; 8]);
//! # Ok::<(), wakeline::Error>(())
//! # }).unwrap();
//! ```

mod builder;
mod capture;
mod copies;
mod dot;
mod event;
mod exec;
mod registry;

use std::{
    collections::HashSet,
    fmt, ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

pub use builder::Builder;
pub use capture::Capturing;
pub use copies::InputCopy;
pub use event::GraphEvent;
pub use exec::Exec;
pub use registry::Registry;

pub use crate::device::graph_ir::Kind as NodeKind;
use crate::{
    device::{Device, graph_ir, recorder::Recorder},
    error::{Error, ErrorKind, Result},
    memory::{
        Memory,
        execution::{Opening, graph_ended},
        graph_memory::GraphMemory,
    },
    stream::{
        Streams,
        capture::{Capture, KeptAlive},
    },
};

/// Recorded work of one device: nodes and the order between them. See the [module](self).
///
/// Created by [`Graph::capture`] or [`Graph::builder`]. A graph is immutable, and is launched any number of times
/// through its [`Exec`]s.
#[derive(Clone)]
pub struct Graph(Arc<Inner>);

struct Inner {
    id: u64,
    device: Device,
    /// Declared before the memory, so that the nodes are dropped before the memory that they use.
    recorder: Arc<Recorder>,
    graph_memory: Arc<GraphMemory>,
    /// The children, each with the index of its node.
    children: Vec<(Graph, usize)>,
    /// The memory of conditionals' bodies.
    bodies: Vec<Arc<GraphMemory>>,
    /// The depth of graphs nested within its nodes: 0 without children and conditionals.
    levels: usize,
    /// The number of nodes, including those of nested graphs, each counted as often as it occurs.
    nodes: usize,
    /// The resources of the nodes other than memory.
    _kept: KeptAlive,
    inputs: Vec<InputCopy>,
}

/// The maximum depth of nested graphs: traversals, here and in the driver, use stack for each level.
const MAX_LEVELS: usize = 64;

/// The maximum number of nodes within the children of a graph. The driver copies each child: if each graph contains the
/// previous one twice, then after thirty levels there are a billion copies of the first.
const MAX_NESTED_NODES: usize = 1 << 20;

/// Identifies a node of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    graph: u64,
    at: usize,
}

/// Describes a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeInfo {
    /// The node.
    pub node: Node,
    /// The kernel's name, the name given to another library's work, or a description: `copy to device of 64 bytes`.
    pub name: String,
    /// The operator that the node was captured from.
    pub operator: Option<String>,
    /// The kind of work.
    pub kind: NodeKind,
    /// The direct predecessors.
    pub after: Vec<Node>,
}

type Numbered<'a> = (usize, &'a graph_ir::IrNode);

/// The first node that differs from the node at the same position in the other list, or that has no counterpart: its
/// operator and its description.
fn first_of_others(
    mine: &[Numbered<'_>],
    theirs: &[Numbered<'_>],
    same: impl Fn(&graph_ir::IrNode, &graph_ir::IrNode) -> bool,
) -> Option<(Option<Arc<str>>, String)> {
    let both = mine.iter().zip(theirs).position(|((_, one), (_, other))| !same(one, other));
    let at = both.unwrap_or(mine.len().min(theirs.len()));
    let (at, node) = mine.get(at).or(theirs.get(at))?;
    Some((node.label.clone(), format!("node {at}, `{}`", node.name)))
}

/// A graph under construction, by a capture or by a builder. Dropping it ends its capture.
struct Sketch {
    id: u64,
    recorder: Arc<Recorder>,
    graph_memory: Arc<GraphMemory>,
    capture: Arc<Capture>,
    children: Vec<(Graph, usize)>,
    bodies: Vec<Arc<GraphMemory>>,
    /// The number of conditionals that this graph is nested in, as a body.
    depth: usize,
    /// See [`Inner::levels`].
    levels: usize,
    /// The number of nodes within the children, at all levels.
    nested_nodes: usize,
    /// For the body of a conditional: the number of nodes within the children of the outer graphs when the body was
    /// begun.
    outer_nested_nodes: usize,
    /// True while this is the only owner of the recorder's graph.
    owns_recorder: bool,
}

impl Sketch {
    fn new(device: &Device) -> Result<Self> {
        if device.is_host() {
            let text = "the host has no graphs: choose a device, for example with `Device::first()`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let recorder = Streams::of(device).observe(Recorder::new(device.backend()))?;
        let mut sketch = Self::over(device, recorder);
        sketch.owns_recorder = true;
        Ok(sketch)
    }

    fn over(device: &Device, recorder: Arc<Recorder>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let capture = Capture::new(device, recorder.clone());
        let graph_memory = GraphMemory::new(&capture);
        let launched = Arc::downgrade(&graph_memory);
        capture.set_launches(move || {
            launched.upgrade().map(|graph_memory| graph_memory.open_launches()).unwrap_or_default()
        });
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            recorder,
            graph_memory,
            capture,
            children: Vec::new(),
            bodies: Vec::new(),
            depth: 0,
            levels: 0,
            nested_nodes: 0,
            outer_nested_nodes: 0,
            owns_recorder: false,
        }
    }

    fn node(&self, at: usize) -> Node {
        Node { graph: self.id, at }
    }

    /// The index of a node of this graph.
    fn find(&self, node: Node) -> Result<usize> {
        if node.graph == self.id && self.recorder.state().ir.get(node.at).is_some() {
            return Ok(node.at);
        }
        Err(Error::new(
            ErrorKind::Usage,
            "the node belongs to another graph, or was removed: use a node that this builder returned",
        ))
    }

    /// The depth of a node that contains a graph of depth `within`. Fails if it exceeds the limit.
    fn levels_with(&self, within: usize) -> Result<usize> {
        let levels = within + 1;
        if self.depth + levels <= MAX_LEVELS {
            return Ok(levels);
        }
        let text = format!(
            "graphs are nested {} levels deep, and at most {MAX_LEVELS} are allowed, conditionals and children \
             together: put nodes that run one after another into one graph instead of nesting them",
            self.depth + levels
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// The number of nodes within the children including `child`. Fails if it exceeds the limit.
    fn nodes_with(&self, child: &Graph) -> Result<usize> {
        let within = self.nested_nodes.saturating_add(child.0.nodes);
        let all = self.outer_nested_nodes.saturating_add(within);
        if all <= MAX_NESTED_NODES {
            return Ok(within);
        }
        let text = format!(
            "the children of a graph would contain {all} nodes at all levels, and at most {MAX_NESTED_NODES} are \
             allowed: launch a child several times instead of adding it several times"
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn end(&self) {
        if !self.capture.is_over() {
            self.capture.end();
            self.graph_memory.capture_ended(&self.capture);
        }
    }

    fn finish(mut self, inputs: Vec<InputCopy>) -> Graph {
        self.end();
        self.owns_recorder = false;
        let own = self.recorder.state().ir.all().count();
        Graph(Arc::new(Inner {
            id: self.id,
            device: self.capture.device().clone(),
            recorder: self.recorder.clone(),
            graph_memory: self.graph_memory.clone(),
            children: std::mem::take(&mut self.children),
            bodies: std::mem::take(&mut self.bodies),
            levels: self.levels,
            nodes: self.nested_nodes.saturating_add(own),
            _kept: self.capture.take_kept(),
            inputs,
        }))
    }
}

impl Drop for Sketch {
    fn drop(&mut self) {
        self.end();
        if self.owns_recorder {
            self.recorder.retire();
            graph_ended(self.capture.device());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Streams of the capture that user code has kept add no more nodes.
        self.recorder.retire();
        graph_ended(&self.device);
    }
}

impl Graph {
    /// The graph's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The nodes, in the order in which they were added. [`Builder::order`] may have ordered a node before earlier
    /// ones.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        let node = |at: usize| Node { graph: self.0.id, at };
        let state = self.0.recorder.state();
        let of = |(at, known): (usize, &graph_ir::IrNode)| NodeInfo {
            node: node(at),
            name: known.name.clone(),
            operator: known.label.as_deref().map(String::from),
            kind: known.kind,
            after: known.after.iter().map(|&at| node(at)).collect(),
        };
        state.ir.all().map(of).collect()
    }

    /// True if `node` comes after `before`, directly or not.
    pub fn comes_after(&self, node: Node, before: Node) -> bool {
        let mine = node.graph == self.0.id && before.graph == self.0.id;
        mine && self.0.recorder.state().ir.comes_after(node.at, before.at)
    }

    /// The copies of the inputs, which were removed from the graph: see [`Capturing::input`].
    pub fn inputs(&self) -> &[InputCopy] {
        &self.0.inputs
    }

    /// The size in bytes of the graph's own memory, which was allocated and dropped in its capture.
    pub fn own_bytes(&self) -> u64 {
        self.0.graph_memory.bytes()
    }

    /// Creates an exec, which can be launched. This is slow: some microseconds per node. Several execs of one graph run
    /// concurrently unless one writes memory that another uses. A graph that allocates memory ([`Builder::alloc`]) or
    /// has conditionals ([`Builder::run_if`], [`Builder::run_while`]) has one exec at a time.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a second exec of a graph that has only one at a time;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`OutOfMemory`](ErrorKind::OutOfMemory);
    /// [`Driver`](ErrorKind::Driver) if the driver does not instantiate the graph.
    pub fn instantiate(&self) -> Result<Exec> {
        Exec::new(self, &[])
    }

    /// Like [`instantiate`](Self::instantiate), with open ends.
    pub(crate) fn instantiate_open(&self, open: &[Opening]) -> Result<Exec> {
        Exec::new(self, open)
    }

    /// The label of the last node that uses memory that was allocated in the capture and still has an owner, except for
    /// the memory in `beside`.
    pub(crate) fn kept_by(&self, beside: &[&Memory]) -> Option<Arc<str>> {
        self.0.graph_memory.kept_by(beside)
    }

    /// True if the graph is the only owner of some memory that its nodes use and that was allocated before the capture.
    pub(crate) fn is_sole_owner(&self) -> bool {
        self.0.graph_memory.is_sole_owner()
    }

    /// The label of a node that uses memory allocated before the capture, except for the memory in `beside`, that the
    /// nodes of another capture of the same code do not use in the same way.
    pub(crate) fn memory_differs_from(&self, beside: &[&Memory], other: &Self) -> Option<Arc<str>> {
        self.0.graph_memory.differs_from(beside, &other.0.graph_memory)
    }

    /// The first node that differs, apart from addresses, from its counterpart in another capture of the same code: its
    /// operator and its description. Nodes are compared per operator first, since an operator that adds or omits nodes
    /// shifts the nodes of later operators, which do not differ.
    pub(crate) fn differs_from(&self, other: &Self) -> Option<(Option<Arc<str>>, String)> {
        let (mine, theirs) = (self.0.recorder.child_state(), other.0.recorder.state());
        let [mine, theirs] = [&mine, &theirs].map(|state| state.ir.all().collect::<Vec<_>>());
        let anywhere = first_of_others(&mine, &theirs, |one, other| {
            (&one.name, &one.label, &one.after, one.digest) == (&other.name, &other.label, &other.after, other.digest)
        })?;
        let of_one = mine.iter().chain(&theirs).find_map(|(_, node)| {
            let [mine, theirs] = [&mine, &theirs]
                .map(|all| all.iter().filter(|(_, other)| other.label == node.label).copied().collect::<Vec<_>>());
            first_of_others(&mine, &theirs, |one, other| (&one.name, one.digest) == (&other.name, other.digest))
        });
        of_one.or(Some(anywhere))
    }

    #[cfg(test)]
    pub(crate) fn graph_memory(&self) -> &Arc<GraphMemory> {
        &self.0.graph_memory
    }

    /// The memory of this graph and of its children, at all levels, each once.
    fn graph_memories(&self) -> Vec<Arc<GraphMemory>> {
        let (mut graph_memories, mut found, mut visited) = (Vec::new(), HashSet::new(), HashSet::new());
        let mut open = vec![self];
        while let Some(graph) = open.pop() {
            // A graph may be a child in several places.
            if !visited.insert(ptr::from_ref(&*graph.0)) {
                continue;
            }
            let own = [&graph.0.graph_memory].into_iter().chain(&graph.0.bodies);
            graph_memories.extend(own.filter(|graph_memory| found.insert(Arc::as_ptr(graph_memory))).cloned());
            open.extend(graph.0.children.iter().rev().map(|(child, _)| child));
        }
        graph_memories
    }

    fn has_any_of(&self, graph_memories: &[Arc<GraphMemory>]) -> bool {
        let graph_memories: HashSet<_> = graph_memories.iter().map(Arc::as_ptr).collect();
        self.graph_memories().iter().any(|graph_memory| graph_memories.contains(&Arc::as_ptr(graph_memory)))
    }

    /// Describes a node and its operator, for messages.
    fn describe(&self, at: usize) -> String {
        let state = self.0.recorder.state();
        match state.ir.get(at) {
            Some(node) => match &node.label {
                Some(operator) => format!("node {at}, `{}` of operator `{operator}`", node.name),
                None => format!("node {at}, `{}`", node.name),
            },
            None => format!("node {at}"),
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Counted first, so that no lock is held while the writer, which is user code, runs.
        let nodes = self.0.recorder.state().ir.all().count();
        f.debug_struct("Graph").field("device", &self.0.device.name()).field("nodes", &nodes).finish_non_exhaustive()
    }
}
