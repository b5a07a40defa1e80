//! [`Exec`]: a graph as it is launched.

use std::{collections::HashSet, fmt, ptr};

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
    sync::{Deferred, Level, Mutex, discard, lock},
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
    /// What nodes were set to since: the bytes that each touches.
    set: Vec<(usize, Touched)>,
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
        let _later = Deferred::new();
        // Across both: a node that is set meanwhile on another thread is checked against this graph, or is forgotten.
        let mut changes = lock(&self.changes);
        let updated = self.execution.update(&graph.0.recorder, graph.used())?;
        updated.map_err(|refused| wrong(&refused, graph))?;
        changes.set.clear();
        let before = changes.base.replace(graph.clone());
        drop(changes);
        discard(before);
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
        let mut with = Use { holds, kept: sketch.capture.take_kept(), piece: Some(piece) };
        let _later = Deferred::new();
        let set = self.change(at, &mut with);
        // It is left if the change is refused. The lock is released.
        discard(with);
        set
    }

    /// A node does the piece of work in `with` from now on. That is left where it is if it is refused.
    fn change(&self, at: usize, with: &mut Use) -> Result<()> {
        // Until it is known here what the node was set to: whatever changes meanwhile would be checked against less.
        let mut changes = lock(&self.changes);
        let Some(new) = &with.piece else { return Ok(()) };
        let touched = new.touched();
        if let Some(why) = self.other_kernel(&changes, at, new).or_else(|| self.clash(&changes, at, &touched)) {
            return Err(self.not_changed(at, &why));
        }
        let set = self.execution.set(&self.graph.0.recorder, at, with)?;
        set.map_err(|refused| self.not_changed(at, &refused.why))?;
        changes.set.retain(|(node, _)| *node != at);
        changes.set.push((at, touched));
        Ok(())
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
            let clashes = match changes.set.iter().find(|(node, _)| *node == other) {
                Some((_, set)) => clash(set, touched),
                None => clash(&base.touched(its), touched),
            };
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

    /// The bytes that a node reads and writes, in a graph within it, too. Each graph is visited once: one that is in several
    /// places, at several levels, would be visited for each way that leads to it.
    fn touched(&self, at: usize) -> Touched {
        let mut touched = self.0.recorder.state().draft.get(at).map(|node| node.touched.clone()).unwrap_or_default();
        let mut visited = HashSet::new();
        let mut open: Vec<&Graph> =
            self.0.children.iter().filter(|(_, node)| *node == at).map(|(child, _)| child).collect();
        while let Some(graph) = open.pop() {
            if visited.insert(ptr::from_ref(&*graph.0)) {
                let state = graph.0.recorder.state();
                state.draft.all().for_each(|(_, node)| touched.extend_from_slice(&node.touched));
                drop(state);
                open.extend(graph.0.children.iter().map(|(child, _)| child));
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::{Device, Emulated},
        memory::Buffer,
    };

    #[test]
    fn a_graph_that_is_in_many_places_is_visited_once() {
        let device = Device::emulated(Emulated::new());
        let mut data = Buffer::<u8>::new(&device, 4).unwrap();
        let (mut graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut data, 7)).unwrap();
        // 4,096 ways lead to the innermost.
        for _ in 0..12 {
            let mut outer = Graph::builder(&device).unwrap();
            outer.child(&[], &graph).unwrap();
            outer.child(&[], &graph).unwrap();
            graph = outer.build().unwrap();
        }
        let touched: Vec<_> = graph.numbers().into_iter().map(|at| graph.touched(at).len()).collect();
        assert_eq!(touched, [1, 1]);
    }
}
