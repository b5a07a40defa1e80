//! [`Exec`]: a graph as it is launched.

use std::fmt;

use super::{Graph, Node, Sketch};
use crate::{
    device::backend::Refused,
    error::{Error, ErrorKind, Result},
    memory::execution::{Execution, Opening, Use},
    stream::{Stream, Ticket},
};

/// A graph as it can be launched, again and again.
///
/// Launches of one exec come one after the other, on whatever streams. Dropped, it is ended once its launches are done;
/// nobody waits for that.
pub struct Exec {
    /// Before the graph: it goes first.
    execution: Execution,
    graph: Graph,
}

impl Exec {
    pub(super) fn new(graph: &Graph, open: &[Opening]) -> Result<Self> {
        let execution = Execution::new(&graph.0.device, &graph.0.recorder, graph.used(), open)?;
        Ok(Self { execution, graph: graph.clone() })
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
        updated.map_err(|refused| wrong(&refused, graph))
    }

    /// Gives one node of its graph other work of the same kind, for launches from now on: the work that `work` enqueues, one
    /// piece. Nothing has changed before `work` has returned, and nothing is locked while it runs: it may launch this exec,
    /// as it was. What the node was set to before is let go when the launches that use it are done.
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
    /// work of another kind or of another kernel, and for nodes that cannot be changed one by one, as those of other
    /// libraries. It is as it was then.
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
        let set = self.execution.set(recorder, at, piece, used)?;
        set.map_err(|refused| self.not_changed(at, &refused.why))
    }

    /// Whether launches from now on run a node (a kernel, a copy or a fill) or pass over it. All are on at first.
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
