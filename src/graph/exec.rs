//! [`Exec`]: a graph as it is launched.

use std::fmt;

use super::{Graph, Node, Sketch};
use crate::{
    device::{
        backend::Refused,
        draft::Kind,
        piece::Piece,
        touched::{Touched, clash},
    },
    error::{Error, ErrorKind, Result},
    memory::execution::{Execution, Opening, Use},
    stream::{Stream, Ticket},
    sync::{Level, Mutex, lock},
};

/// A graph as it can be launched, again and again.
///
/// Launches of one exec come one after the other, on whatever streams. Dropped, it is ended once its launches are done;
/// nobody waits for that.
pub struct Exec {
    /// Before the graph: it goes first.
    execution: Execution,
    graph: Graph,
    changes: Mutex<Changes>,
}

/// What an exec does that its graph does not.
#[derive(Default)]
struct Changes {
    /// What it was updated to be.
    base: Option<Graph>,
    /// What nodes were set to since.
    set: Vec<Change>,
    /// How many there ever were.
    count: u64,
}

/// What a node was set to, or may be about to.
struct Change {
    number: u64,
    node: usize,
    touched: Touched,
    /// It is.
    done: bool,
}

impl Exec {
    pub(super) fn new(graph: &Graph, open: &[Opening]) -> Result<Self> {
        let execution = Execution::new(&graph.0.device, &graph.0.recorder, graph.used(), open)?;
        Ok(Self { execution, graph: graph.clone(), changes: Mutex::at(Level::ExecChanges, Changes::default()) })
    }

    pub(crate) fn execution(&self) -> &Execution {
        &self.execution
    }

    /// The graph that it was made of.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Brings it to the device, in its turn in the stream: otherwise its first launch does.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        self.execution.upload(stream)
    }

    /// Enqueues all of it into a stream. It comes after what uses the memory of its nodes until now, and whoever uses that
    /// memory next comes after it. The ticket is for whoever wants to know when it is done:
    /// `exec.launch(&stream)?.completed().await?`.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a stream of another device or of a capture; [`Race`](ErrorKind::Race) if the checker
    /// finds one; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn launch(&self, stream: &Stream) -> Result<Ticket> {
        self.execution.launch(stream)
    }

    /// Makes of it what an exec of `graph` would be, for launches from now on. The graph has the same nodes in the same order,
    /// whose parameters may be others: a capture of the same code with other buffers, say. This is what there is for
    /// the nodes of other libraries. What a node was [`set`](Self::set) to before is forgotten; what launches used until now
    /// is let go when they are done, but for what its own graph keeps.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if it cannot be, with the node and the reason; it is as it was then.
    pub fn update(&self, graph: &Graph) -> Result<()> {
        if graph.device() != self.execution.device() {
            let text = format!("an exec of {} cannot become one of {}", self.execution.device(), graph.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let updated = self.execution.update(&graph.0.recorder, graph.used())?;
        updated.map_err(|refused| wrong(&refused, graph))?;
        let mut changes = lock(&self.changes);
        changes.set.clear();
        let before = changes.base.replace(graph.clone());
        drop(changes);
        drop(before);
        Ok(())
    }

    /// Gives one node of its graph other work of the same kind, for launches from now on: the work that `work` enqueues, one
    /// piece. Nothing has changed before `work` has returned, and nothing is locked while it runs: it may launch this exec,
    /// as it was. What the node was set to before is let go when the launches that use it are done. The graph's edges stay as
    /// they are.
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
    /// `work`'s own; [`Usage`](ErrorKind::Usage) for a node that is not this graph's, for no work or more than one piece, for
    /// work of another kind or of another kernel, for memory that another node uses, too, where no edge orders the two
    /// ([`Builder::order`](super::Builder::order) makes one), and for nodes that cannot be changed one by one, as those of
    /// other libraries. It is as it was then.
    pub fn set(&self, node: Node, work: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let at = self.find(node)?;
        let recorder = &self.graph.0.recorder;
        let sketch = Sketch::over(self.execution.device(), recorder.noting());
        let stream = sketch.capture.stream("set", Default::default())?;
        {
            let _in = sketch.capture.enter();
            work(&stream)?;
        }
        // Launches come after what it met outside from the moment on when it is set.
        sketch.end();
        let piece = sketch.recorder.take_noted().map_err(|why| self.not_changed(at, why))?;
        let Some(piece) = piece else { return Err(self.not_changed(at, "nothing was enqueued for it")) };
        let holds = std::iter::once(sketch.hold.clone()).collect();
        let used = Use { holds, kept: sketch.capture.take_kept(), piece: None };
        let number = self.plan(at, &piece)?;
        let set = self.execution.set(recorder, at, piece, used);
        self.settle(number, matches!(set, Ok(Ok(()))));
        set?.map_err(|refused| self.not_changed(at, &refused.why))
    }

    /// A node is about to be set to this: counted from here on, in case another thread sets another one. The number of the
    /// change.
    fn plan(&self, at: usize, piece: &Piece) -> Result<u64> {
        let mut changes = lock(&self.changes);
        let touched = piece.touched();
        if let Some(why) = self.other_kernel(&changes, at, piece).or_else(|| self.clash(&changes, at, &touched)) {
            return Err(self.not_changed(at, &why));
        }
        changes.count += 1;
        let number = changes.count;
        changes.set.push(Change { number, node: at, touched, done: false });
        Ok(number)
    }

    /// It was set, or not.
    fn settle(&self, number: u64, done: bool) {
        let mut changes = lock(&self.changes);
        // It may be that an update has overtaken it.
        let Some(change) = changes.set.iter_mut().find(|change| change.number == number) else { return };
        change.done = done;
        let node = change.node;
        changes.set.retain(|other| match done {
            true => other.node != node || other.number >= number || !other.done,
            false => other.number != number,
        });
    }

    /// An error for another kernel: some drivers would take it, and others not.
    fn other_kernel(&self, changes: &Changes, at: usize, piece: &Piece) -> Option<String> {
        let base = changes.base.as_ref().unwrap_or(&self.graph);
        let place = self.graph.numbers().into_iter().position(|number| number == at)?;
        let its = *base.numbers().get(place)?;
        let state = base.0.recorder.state();
        let node = state.draft.get(its).filter(|node| node.kind == Kind::Kernel && piece.is(Kind::Kernel))?;
        let new = piece.name();
        (node.name != new).then(|| format!("it runs kernel `{}` and cannot run `{new}`", node.name))
    }

    /// An error where another node would touch the same bytes as this one, and no edge orders the two.
    fn clash(&self, changes: &Changes, at: usize, touched: &Touched) -> Option<String> {
        if touched.is_empty() {
            return None;
        }
        let base = changes.base.as_ref().unwrap_or(&self.graph);
        let its = base.numbers();
        let apart = |(place, other): (usize, usize)| {
            let apart = self.graph.0.recorder.state().draft.are_apart(at, other);
            apart.then_some((other, *its.get(place)?))
        };
        let mut others = self.graph.numbers().into_iter().enumerate().filter_map(apart);
        others.find_map(|(other, its)| {
            let set = || changes.set.iter().filter(|change| change.node == other);
            let clashes = set().any(|change| clash(&change.touched, touched))
                || !set().any(|change| change.done) && clash(&base.touched(its), touched);
            clashes.then(|| {
                let other = self.graph.describe(other);
                format!("{other} uses the same memory, and no edge orders the two: order them in the graph")
            })
        })
    }

    /// Whether launches from now on run a node (a kernel, a copy or a fill) or pass over it. All are on at first; an
    /// [update](Self::update) leaves them as they are.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node that is not this graph's, or of another kind.
    pub fn enable(&self, node: Node, enabled: bool) -> Result<()> {
        let at = self.find(node)?;
        let done = self.execution.enable(&self.graph.0.recorder, at, enabled)?;
        done.map_err(|refused| self.not_changed(at, &refused.why))
    }

    fn find(&self, node: Node) -> Result<usize> {
        let known = node.graph == self.graph.0.id && self.graph.0.recorder.state().draft.get(node.at).is_some();
        if known { Ok(node.at) } else { Err(Error::new(ErrorKind::Usage, "a node of another graph")) }
    }

    fn not_changed(&self, at: usize, why: &str) -> Error {
        Error::new(ErrorKind::Usage, format!("{} is not changed: {why}", self.graph.describe(at)))
    }
}

impl Graph {
    /// The numbers of its nodes.
    fn numbers(&self) -> Vec<usize> {
        self.0.recorder.state().draft.all().map(|(at, _)| at).collect()
    }

    /// The bytes that a node reads and writes, in a graph within it, too.
    fn touched(&self, at: usize) -> Touched {
        let mut touched = self.0.recorder.state().draft.get(at).map(|node| node.touched.clone()).unwrap_or_default();
        for (child, _) in self.0.children.iter().filter(|(_, node)| *node == at) {
            child.numbers().into_iter().for_each(|at| touched.extend(child.touched(at)));
        }
        touched
    }

    /// What launches use that do what its nodes do: also the graph itself, with its events and callbacks.
    fn used(&self) -> Use {
        Use { holds: self.holds().into(), kept: vec![self.0.clone()], piece: None }
    }
}

fn wrong(refused: &Refused, graph: &Graph) -> Error {
    let at = refused.node.and_then(|raw| {
        let state = graph.0.recorder.state();
        state.draft.all().find(|(_, node)| node.raw.contains(&raw)).map(|(at, _)| at)
    });
    let place = at.map(|at| format!(", at {}", graph.describe(at))).unwrap_or_default();
    Error::new(ErrorKind::Usage, format!("the exec is not updated{place}: {}", refused.why))
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec").field("graph", &self.graph).finish_non_exhaustive()
    }
}
