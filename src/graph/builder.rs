//! [`Builder`]: builds a graph node by node.

use std::{borrow::Borrow, fmt, sync::Arc};

use super::{Graph, Node, Sketch};
use crate::{
    device::{
        Device,
        backend::{GraphCondition, host_callback},
        graph_ir::NodeSet,
        recorder::Recorder,
    },
    error::{Error, ErrorKind, Result},
    memory::{Buffer, DeviceSlice, DeviceSliceMut, Plain, execution},
    stream::Stream,
};

const INCOMPLETE: &str = "the graph is incomplete and cannot be built, since the body of a conditional panicked or \
                          failed: build the graph anew";
const REPLACED: &str = "the builder of a conditional's body was replaced by another one: add nodes to the builder \
                        that the closure gets";

/// Builds a graph node by node.
///
/// A node comes after the nodes given in `after` and, automatically, after the earlier nodes that use the same memory.
/// As on a stream, this order need not be requested and cannot be left out.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let (mut left, mut right) = (Buffer::<u8>::new(&device, 4)?, Buffer::<u8>::new(&device, 4)?);
/// let mut graph = Graph::builder(&device)?;
/// let one = graph.add(&[], |stream| stream.fill(&mut left, 1))?;
/// let two = graph.add(&[], |stream| stream.fill(&mut right, 2))?;        // concurrent
/// let both = graph.add(&[], |stream| stream.copy(&left, &mut right))?;   // after both
/// let graph = graph.build()?;
/// assert!(graph.comes_after(both, one) && graph.comes_after(both, two) && !graph.comes_after(two, one));
///
/// let stream = Stream::new(&device)?;
/// graph.instantiate()?.launch(&stream)?;
/// assert_eq!(right.to_vec(&stream).await?, [1; 4]);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Builder {
    sketch: Sketch,
}

/// The stream of a node, to which a user's function adds work. It is closed when the function returns or panics,
/// including any clone that the function kept.
struct OpenStream<'a> {
    recorder: &'a Recorder,
    stream: &'a Stream,
}

impl Drop for OpenStream<'_> {
    fn drop(&mut self) {
        self.recorder.close_stream(self.stream.raw());
    }
}

/// The body of a conditional until it is complete. If it is dropped before, by a panic or an error, the outer graph
/// cannot be built: the body's nodes may lack edges, and their resources may belong to a builder that was moved out.
struct OpenBody {
    outer: Arc<Recorder>,
    within: Arc<Recorder>,
    complete: bool,
}

impl Drop for OpenBody {
    fn drop(&mut self) {
        if !self.complete {
            // The body first: a builder that was moved out adds nothing from here on.
            self.within.poison(INCOMPLETE);
            self.outer.poison(INCOMPLETE);
        }
    }
}

impl Graph {
    /// Creates a builder for a graph on `device`.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn builder(device: &Device) -> Result<Builder> {
        Ok(Builder { sketch: Sketch::new(device)? })
    }
}

impl Builder {
    /// Adds the work that `work` enqueues into the stream: a kernel, a copy, a fill, another library's work, a host
    /// callback. This adds one node, or several in sequence, and returns the last one. They come after the nodes in
    /// `after`, and after the earlier nodes that use the same memory.
    ///
    /// # Errors
    /// The error of `work`; [`Usage`](ErrorKind::Usage) for a node of another graph. Work that was enqueued before the
    /// failure stays in the graph.
    pub fn add(&mut self, after: &[Node], work: impl FnOnce(&Stream) -> Result<()>) -> Result<Node> {
        let after = self.find_all(after)?;
        let stream = self.sketch.capture.stream("node", after)?;
        {
            let _open = OpenStream { recorder: &self.sketch.recorder, stream: &stream };
            let _in = self.sketch.capture.enter();
            work(&stream)?;
        }
        let end = self.sketch.recorder.end_of(stream.raw());
        let at = match &*end {
            [at] => *at,
            _ => self.sketch.recorder.join(end)?,
        };
        Ok(self.sketch.node(at))
    }

    /// Adds an empty node, which joins the nodes that it comes after.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node of another graph.
    pub fn join(&mut self, after: &[Node]) -> Result<Node> {
        let after = self.find_all(after)?;
        self.sketch.recorder.join(after).map(|at| self.sketch.node(at))
    }

    /// Adds a host function, which is called at each launch. It must not call into wakeline or the driver, and must not
    /// block: it runs on a thread of the driver.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node of another graph.
    pub fn host(&mut self, after: &[Node], function: impl Fn() + Send + Sync + 'static) -> Result<Node> {
        // Wrapped first, so that a panic in the destructor of a refused function does not leave this call.
        let function = host_callback(function);
        let after = self.find_all(after)?;
        self.sketch.recorder.call(after, function).map(|at| self.sketch.node(at))
    }

    /// Adds another graph as one node.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a graph on another device, for a graph that allocates memory or has
    /// conditionals, for a node of another graph, for graphs nested more than 64 levels deep (conditionals and children
    /// together), and for more than 1,048,576 nodes within a graph's children, at all levels.
    pub fn child(&mut self, after: &[Node], graph: &Graph) -> Result<Node> {
        let after = self.find_all(after)?;
        let device = self.sketch.capture.device();
        if graph.device() != device {
            let text = format!(
                "a graph on {} cannot be a child of a graph on {device}: build both on one device",
                graph.device()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let (levels_with, nodes_with) = (self.sketch.levels_with(graph.0.levels)?, self.sketch.nodes_with(graph)?);
        let Sketch { recorder, graph_memory, children, capture, levels, nested_nodes, .. } = &mut self.sketch;
        let stream = capture.stream("child", after)?;
        // The node comes after the nodes of this graph that use the same memory, including earlier nodes with the same
        // child.
        let graph_memories = graph.graph_memories();
        graph_memories.iter().try_for_each(|other| graph_memory.before_all_of(other, &stream))?;
        let twins = children.iter().filter(|(child, _)| child.has_any_of(&graph_memories)).map(|(_, at)| *at);
        let end = recorder.end_of(stream.raw());
        let after = recorder.state().ir.last_of(end.into_iter().chain(twins));
        // The capture keeps the child, too, before the node exists: the outer graph keeps a body's capture even if the
        // body's builder is moved.
        capture.keep(graph.0.clone());
        let at = execution::add_child(recorder, after, &graph.0.recorder)?;
        (*levels, *nested_nodes) = (levels_with.max(*levels), nodes_with);
        recorder.continue_after(stream.raw(), at);
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        graph_memories.iter().for_each(|other| graph_memory.note_all_of(other, &ticket));
        children.push((graph.clone(), at));
        Ok(self.sketch.node(at))
    }

    /// Adds a node that allocates memory at each launch. Returns the node and the memory, for nodes that come after it.
    /// The driver reuses the memory for graphs that do not run at the same time. The memory is freed by
    /// [`free`](Self::free) or, if that is not called, after the last node of the graph that uses it. A graph with such
    /// a node has one [`Exec`](super::Exec) at a time.
    ///
    /// ```
    /// use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// # let device = Device::emulated(Emulated::new());
    /// # let stream = Stream::new(&device)?;
    /// # let mut data = Buffer::from_slice(&stream, &[0_u8; 4])?;
    /// let mut graph = Graph::builder(&device)?;
    /// let (_, mut scratch) = graph.alloc::<u8>(&[], 4)?;
    /// graph.add(&[], |stream| stream.fill(&mut scratch, 1))?;
    /// graph.add(&[], |stream| stream.copy(&scratch, &mut data))?;
    /// graph.free(&[], scratch)?;
    /// graph.build()?.instantiate()?.launch(&stream)?;
    /// # assert_eq!(data.to_vec(&stream).await?, [1; 4]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a length of 0 or a node of another graph;
    /// [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn alloc<T: Plain>(&mut self, after: &[Node], len: usize) -> Result<(Node, Buffer<T>)> {
        let after = self.find_all(after)?;
        let Sketch { recorder, graph_memory, capture, .. } = &self.sketch;
        let stream = capture.stream("allocation", after)?;
        let (at, buffer) = execution::add_alloc(recorder, graph_memory, &stream, len)?;
        Ok((self.sketch.node(at), buffer))
    }

    /// Adds a node that frees memory from [`alloc`](Self::alloc), after the nodes that use it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for memory that no node of this graph allocates.
    pub fn free<T: Plain>(&mut self, after: &[Node], buffer: Buffer<T>) -> Result<Node> {
        let after = self.find_all(after)?;
        let Sketch { recorder, graph_memory, capture, .. } = &self.sketch;
        let stream = capture.stream("free", after)?;
        execution::add_free(recorder, graph_memory, &stream, buffer).map(|at| self.sketch.node(at))
    }

    /// Adds a conditional: the nodes that `body` adds run once if the first element of the flag is not 0 when the
    /// conditional is reached. It comes after all nodes so far. A graph with a conditional has one
    /// [`Exec`](super::Exec) at a time, and cannot be a child of another graph.
    ///
    /// If `body` returns an error, the nodes that it added stay in the graph. If it panics, or replaces its builder by
    /// another one, the graph can no longer be built.
    ///
    /// ```
    /// use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let device = Device::emulated(Emulated::new());
    /// let stream = Stream::new(&device)?;
    /// let mut flag = Buffer::from_slice(&stream, &[0_u32])?;
    /// let mut data = Buffer::from_slice(&stream, &[0_u8; 4])?;
    /// let mut graph = Graph::builder(&device)?;
    /// graph.run_if(&[], &flag, |body| body.add(&[], |stream| stream.fill(&mut data, 1)).map(drop))?;
    /// let exec = graph.build()?.instantiate()?;
    /// exec.launch(&stream)?;
    /// assert_eq!(data.to_vec(&stream).await?, [0; 4]);
    /// stream.fill(&mut flag, 1)?;
    /// exec.launch(&stream)?;
    /// assert_eq!(data.to_vec(&stream).await?, [1; 4]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// Those of [`add`](Self::add); [`Usage`](ErrorKind::Usage) for a flag that is not on the graph's device, for a
    /// driver without conditional nodes (before CUDA 12.4), and for graphs nested more than 64 levels deep
    /// (conditionals and children together).
    pub fn run_if<F: DeviceSlice<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        flag: &F,
        body: impl FnOnce(&mut Builder) -> Result<()>,
    ) -> Result<Node> {
        self.conditional::<_, F>(after, GraphCondition::If, flag, |builder, _| body(builder))
    }

    /// Adds a loop: the nodes that `body` adds run repeatedly as long as the first element of the flag is not 0 before
    /// an iteration. The body gets the flag, and must set it to 0 eventually.
    ///
    /// # Errors
    /// Those of [`run_if`](Self::run_if).
    pub fn run_while<F: DeviceSliceMut<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        flag: &mut F,
        body: impl FnOnce(&mut Builder, &mut F) -> Result<()>,
    ) -> Result<Node> {
        self.conditional::<_, F>(after, GraphCondition::While, flag, body)
    }

    fn conditional<S: Borrow<F>, F: DeviceSlice<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        when: GraphCondition,
        flag: S,
        body: impl FnOnce(&mut Builder, S) -> Result<()>,
    ) -> Result<Node> {
        self.find_all(after)?;
        self.sketch.levels_with(0)?;
        let Sketch { recorder, capture, .. } = &self.sketch;
        // The conditional comes after all nodes, as it is not known yet which memory the body will use.
        let all = {
            let state = recorder.state();
            state.ir.last_of(state.ir.all().map(|(at, _)| at))
        };
        let stream = capture.stream("conditional", all)?;
        flag.borrow().view().memory.before_read(&stream)?;
        let end = recorder.end_of(stream.raw());
        let (at, within) = execution::add_conditional(recorder, &stream, end, when, flag.borrow().view())?;
        let mut inner = Builder { sketch: Sketch::over(capture.device(), within.clone()) };
        inner.sketch.depth = self.sketch.depth + 1;
        inner.sketch.outer_nested_nodes = self.sketch.outer_nested_nodes.saturating_add(self.sketch.nested_nodes);
        recorder.continue_after(stream.raw(), at);
        // Declared after the builder, so that it is dropped first.
        let mut open = OpenBody { outer: recorder.clone(), within, complete: false };
        let id = inner.sketch.id;
        // From here on the resources of the body's nodes (memory, events, children and nested bodies) are kept, whether
        // or not the body succeeds.
        let used = inner.sketch.graph_memory.clone();
        capture.keep(used.clone());
        capture.keep(inner.sketch.capture.clone());
        self.sketch.bodies.push(used.clone());
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        flag.borrow().view().memory.note_read(&ticket);
        let made = body(&mut inner, flag);
        if inner.sketch.id != id {
            drop(open);
            return made.and(Err(Error::new(ErrorKind::Usage, REPLACED)));
        }
        let made = made.and_then(|()| inner.add_frees());
        // The body is closed first, so that its resources do not change from here on.
        if let Err(error) = open.within.close() {
            return made.and(Err(error));
        }
        // Launches come after other uses of the body's memory, and later nodes after the conditional. This holds even
        // if the body failed, as its nodes stay.
        let Sketch { graph_memory, .. } = &self.sketch;
        graph_memory.before_all_of(&used, &stream)?;
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        graph_memory.note_all_of(&used, &ticket);
        self.sketch.levels = self.sketch.levels.max(inner.sketch.levels + 1);
        let inner = inner.sketch.finish(Vec::new());
        self.sketch.nested_nodes = self.sketch.nested_nodes.saturating_add(inner.0.nodes);
        self.sketch.children.push((inner, at));
        open.complete = true;
        made.map(|()| self.sketch.node(at))
    }

    /// Adds an edge, so that `before` runs before `after`.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the edge makes a cycle, as `before` already comes after `after`, or for a node of
    /// another graph.
    pub fn order(&mut self, before: Node, after: Node) -> Result<()> {
        let (from, to) = (self.sketch.find(before)?, self.sketch.find(after)?);
        if self.sketch.recorder.order(from, to)? {
            return Ok(());
        }
        let state = self.sketch.recorder.state();
        let name = |at: usize| state.ir.get(at).map(|node| node.name.clone()).unwrap_or_default();
        let text = format!(
            "the edge would make a cycle: node {from}, `{}`, already comes after node {to}, `{}`, and cannot come \
             before it",
            name(from),
            name(to)
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// Builds the graph.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`Usage`](ErrorKind::Usage) while another thread captures
    /// another library's work into it, after a conditional's body that panicked or whose builder was replaced, and for
    /// the builder of a conditional's body.
    pub fn build(self) -> Result<Graph> {
        if self.sketch.recorder.is_within() {
            let text = "a conditional's body cannot be built by itself: it is built with the outer graph";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.add_frees()?;
        self.sketch.recorder.close()?;
        Ok(self.sketch.finish(Vec::new()))
    }

    /// Adds nodes that free memory that no other node frees.
    fn add_frees(&self) -> Result<()> {
        let Sketch { recorder, graph_memory, capture, .. } = &self.sketch;
        execution::add_frees(recorder, graph_memory, || capture.stream("free", NodeSet::new()))
    }

    fn find_all(&self, nodes: &[Node]) -> Result<NodeSet> {
        let found = nodes.iter().map(|node| self.sketch.find(*node)).collect::<Result<NodeSet>>()?;
        Ok(self.sketch.recorder.state().ir.last_of(found))
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("of", &self.sketch.recorder).finish_non_exhaustive()
    }
}
