//! CUDA graphs: work that is recorded once and launched as one.
//!
//! A launch of a graph costs the host about as much as a launch of one kernel, however many nodes it has: on an H200 1.5 us
//! for 32 kernels that cost 102 us one by one, and the device is done with them four to eight times sooner (bench `graph`,
//! `shapes`).
//!
//! ```text
//!   Graph::capture   work that was written for streams, recorded instead of run ─┐
//!   Graph::builder   node by node                                                ├─> Graph ──instantiate──> Exec ──launch──> Ticket
//!                                                                                ┘
//! ```
//!
//! Nothing is said about order that is not known: whoever uses a buffer in a graph comes after those that must come before, as
//! on streams, and so do the graph's launches among everything else that uses it. What the nodes use stays as long as the
//! graph and its execs, whoever drops it.
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

pub use crate::device::draft::Kind as NodeKind;
use crate::{
    device::{Device, draft, recorder::Recorder},
    error::{Error, ErrorKind, Result},
    memory::{
        Memory,
        execution::{Opening, graph_ended},
        hold::Hold,
    },
    stream::{
        Streams,
        capture::{Capture, Kept},
    },
};

/// Work of one device, recorded: nodes, and what comes after what. See the [module](self).
///
/// It is made by [`Graph::capture`] or [`Graph::builder`], does not change any more, and is launched as often as one
/// likes through its [`Exec`]s.
#[derive(Clone)]
pub struct Graph(Arc<Inner>);

struct Inner {
    id: u64,
    device: Device,
    /// Before the holds: the nodes go before the memory that they use.
    recorder: Arc<Recorder>,
    hold: Arc<Hold>,
    /// With the nodes that they are.
    children: Vec<(Graph, usize)>,
    /// What graphs within its nodes use.
    bodies: Vec<Arc<Hold>>,
    /// How deep graphs are nested within its nodes: 0 without children and conditionals.
    levels: usize,
    /// Its nodes, and those of the graphs within them, each as often as it is there.
    nodes: usize,
    /// What its nodes use beside memory.
    _kept: Kept,
    inputs: Vec<InputCopy>,
}

/// The most levels of graphs within the nodes of a graph: what walks through them, here and in a driver, takes some stack a
/// level.
const MOST_LEVELS: usize = 64;

/// The most nodes within the children of a graph: the driver copies each child, so that a graph which is the child of another
/// one twice, and that one of a third, is there a billion times after thirty of them.
const MOST_WITHIN: usize = 1 << 20;

/// A node of one graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    graph: u64,
    at: usize,
}

/// What a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeInfo {
    /// The node.
    pub node: Node,
    /// A kernel's name, another library's work by the name that it was given, or what it is: `copy to device of 64 bytes`.
    pub name: String,
    /// The operator that it was captured of.
    pub operator: Option<String>,
    /// What kind of work it is.
    pub kind: NodeKind,
    /// Those that it comes after. What those come after, it comes after too.
    pub after: Vec<Node>,
}

/// A node as its recorder knows it, with its number.
type Numbered<'a> = (usize, &'a draft::Node);

/// Whose the first node is at whose place there is another, or none.
fn first_of_others(
    mine: &[Numbered<'_>],
    theirs: &[Numbered<'_>],
    same: impl Fn(&draft::Node, &draft::Node) -> bool,
) -> Option<(Option<Arc<str>>, String)> {
    let both = mine.iter().zip(theirs).position(|((_, one), (_, other))| !same(one, other));
    let at = both.unwrap_or(mine.len().min(theirs.len()));
    let (at, node) = mine.get(at).or(theirs.get(at))?;
    Some((node.label.clone(), format!("node {at}, `{}`", node.name)))
}

/// A graph in the making: what both ways to make one have in common. Dropped, it ends its capture.
struct Sketch {
    id: u64,
    recorder: Arc<Recorder>,
    hold: Arc<Hold>,
    capture: Arc<Capture>,
    children: Vec<(Graph, usize)>,
    bodies: Vec<Arc<Hold>>,
    /// Of how many conditionals within each other it is the body.
    around: usize,
    /// As [`Inner::levels`].
    levels: usize,
    /// Nodes within its children, at all levels.
    within: usize,
    /// Of a conditional's body: those within the nodes of the graphs around it, as it was begun.
    beside: usize,
    /// Nobody else has the recorder's graph.
    owns: bool,
}

impl Sketch {
    fn new(device: &Device) -> Result<Self> {
        if device.is_host() {
            let text = "the host has no graphs: choose a device, `Device::first()` say";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        device.check()?;
        let recorder = Streams::of(device).heed(Recorder::new(device.backend()))?;
        let mut sketch = Self::over(device, recorder);
        sketch.owns = true;
        Ok(sketch)
    }

    fn over(device: &Device, recorder: Arc<Recorder>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let capture = Capture::new(device, recorder.clone());
        let hold = Hold::new(&capture);
        let launched = Arc::downgrade(&hold);
        capture.set_launches(move || launched.upgrade().map(|hold| hold.open_launches()).unwrap_or_default());
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            recorder,
            hold,
            capture,
            children: Vec::new(),
            bodies: Vec::new(),
            around: 0,
            levels: 0,
            within: 0,
            beside: 0,
            owns: false,
        }
    }

    fn node(&self, at: usize) -> Node {
        Node { graph: self.id, at }
    }

    /// Its number, if it is one of this graph.
    fn find(&self, node: Node) -> Result<usize> {
        if node.graph == self.id && self.recorder.state().draft.get(node.at).is_some() {
            return Ok(node.at);
        }
        Err(Error::new(ErrorKind::Usage, "a node of another graph, or one that was taken out"))
    }

    /// The levels within a node that holds a graph with so many: an error if those are too many.
    fn levels_with(&self, within: usize) -> Result<usize> {
        let levels = within + 1;
        if self.around + levels <= MOST_LEVELS {
            return Ok(levels);
        }
        let text = format!(
            "graphs within graphs, {} levels deep: at most {MOST_LEVELS}, conditionals and children together; put nodes that run \
             one after another beside each other in one graph",
            self.around + levels
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// The nodes within its children, this one among them: an error if those are too many.
    fn nodes_with(&self, child: &Graph) -> Result<usize> {
        let within = self.within.saturating_add(child.0.nodes);
        let all = self.beside.saturating_add(within);
        if all <= MOST_WITHIN {
            return Ok(within);
        }
        let text = format!(
            "{all} nodes within the children of a graph, at all levels: at most {MOST_WITHIN}; launch a child several times \
             instead of adding it as often"
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn end(&self) {
        if !self.capture.is_over() {
            self.capture.end();
            self.hold.capture_ended(&self.capture);
        }
    }

    /// The graph, as it is now.
    fn finish(mut self, inputs: Vec<InputCopy>) -> Graph {
        self.end();
        self.owns = false;
        let own = self.recorder.state().draft.all().count();
        Graph(Arc::new(Inner {
            id: self.id,
            device: self.capture.device().clone(),
            recorder: self.recorder.clone(),
            hold: self.hold.clone(),
            children: std::mem::take(&mut self.children),
            bodies: std::mem::take(&mut self.bodies),
            levels: self.levels,
            nodes: self.within.saturating_add(own),
            _kept: self.capture.take_kept(),
            inputs,
        }))
    }
}

impl Drop for Sketch {
    fn drop(&mut self) {
        self.end();
        if self.owns {
            self.recorder.retire();
            graph_ended(self.capture.device());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Streams of its capture may have been kept.
        self.recorder.retire();
        graph_ended(&self.device);
    }
}

impl Graph {
    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its nodes, in the order of adding. [`Builder::order`] may have put one before others that were added earlier.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        let node = |at: usize| Node { graph: self.0.id, at };
        let state = self.0.recorder.state();
        let of = |(at, known): (usize, &draft::Node)| NodeInfo {
            node: node(at),
            name: known.name.clone(),
            operator: known.label.as_deref().map(String::from),
            kind: known.kind,
            after: known.after.iter().map(|&at| node(at)).collect(),
        };
        state.draft.all().map(of).collect()
    }

    /// True if `node` comes after `before`, directly or not.
    pub fn comes_after(&self, node: Node, before: Node) -> bool {
        let mine = node.graph == self.0.id && before.graph == self.0.id;
        mine && self.0.recorder.state().draft.comes_after(node.at, before.at)
    }

    /// The copies of its inputs, which were taken out of it: see [`Capturing::input`].
    pub fn inputs(&self) -> &[InputCopy] {
        &self.0.inputs
    }

    /// Bytes of memory that it keeps for itself: what was allocated and dropped in its capture.
    pub fn own_bytes(&self) -> u64 {
        self.0.hold.bytes()
    }

    /// As it can be launched. This is slow: some microseconds a node. Several of one graph are launched beside each other
    /// where they write no memory that both of them use. A graph that makes memory ([`Builder::alloc`]) or has conditions
    /// ([`Builder::run_if`], [`Builder::run_while`]) has one at a time.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a second one of such a graph; [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`OutOfMemory`](ErrorKind::OutOfMemory);
    /// [`Driver`](ErrorKind::Driver) for what the driver does not make an exec of.
    pub fn instantiate(&self) -> Result<Exec> {
        Exec::new(self, &[])
    }

    /// The same, with open ends.
    pub(crate) fn instantiate_open(&self, open: &[Opening]) -> Result<Exec> {
        Exec::new(self, open)
    }

    /// Who used last what was made in its capture, and what somebody keeps beside this.
    pub(crate) fn kept_by(&self, beside: &[&Memory]) -> Option<Arc<str>> {
        self.0.hold.kept_by(beside)
    }

    /// It alone keeps some of the memory from before that its nodes use.
    pub(crate) fn is_left_alone(&self) -> bool {
        self.0.hold.is_left_alone()
    }

    /// Who uses memory from before, beside this, that nodes of another capture of the same code do not use, or not in that way.
    pub(crate) fn memory_differs_from(&self, beside: &[&Memory], other: &Self) -> Option<Arc<str>> {
        self.0.hold.differs_from(beside, &other.0.hold)
    }

    /// The first node that does something else than the one of another capture of the same code, addresses left aside: whose
    /// it is, and what it is. Of several operators that whose own nodes are others; where one does more or less, those after it
    /// stand elsewhere, and are no others.
    pub(crate) fn differs_from(&self, other: &Self) -> Option<(Option<Arc<str>>, String)> {
        let (mine, theirs) = (self.0.recorder.child_state(), other.0.recorder.state());
        let [mine, theirs] = [&mine, &theirs].map(|state| state.draft.all().collect::<Vec<_>>());
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
    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.0.hold
    }

    /// Its own, and those of its children, and of theirs: each once.
    fn holds(&self) -> Vec<Arc<Hold>> {
        let (mut holds, mut found, mut visited) = (Vec::new(), HashSet::new(), HashSet::new());
        let mut open = vec![self];
        while let Some(graph) = open.pop() {
            // One graph may be a child in many places.
            if !visited.insert(ptr::from_ref(&*graph.0)) {
                continue;
            }
            let own = [&graph.0.hold].into_iter().chain(&graph.0.bodies);
            holds.extend(own.filter(|hold| found.insert(Arc::as_ptr(hold))).cloned());
            open.extend(graph.0.children.iter().rev().map(|(child, _)| child));
        }
        holds
    }

    /// Whether some of these are its own, or its children's.
    fn has_any_of(&self, holds: &[Arc<Hold>]) -> bool {
        let holds: HashSet<_> = holds.iter().map(Arc::as_ptr).collect();
        self.holds().iter().any(|hold| holds.contains(&Arc::as_ptr(hold)))
    }

    /// For people: what a node is and whose.
    fn describe(&self, at: usize) -> String {
        let state = self.0.recorder.state();
        match state.draft.get(at) {
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
        // Not within the call: a writer may come here again.
        let nodes = self.0.recorder.state().draft.all().count();
        f.debug_struct("Graph").field("device", &self.0.device.name()).field("nodes", &nodes).finish_non_exhaustive()
    }
}
