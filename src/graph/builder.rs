//! [`Builder`]: a graph, node by node.

use std::{borrow::Borrow, fmt, sync::Arc};

use super::{Graph, Node, Sketch};
use crate::{
    device::{
        Device,
        backend::{Condition, host_callback},
        draft::Few,
        recorder::Recorder,
    },
    error::{Error, ErrorKind, Result},
    memory::{Buffer, DeviceSlice, DeviceSliceMut, Plain, execution},
    stream::Stream,
};

const INCOMPLETE: &str = "the graph is incomplete and cannot be built: the body of one of its conditionals panicked, or \
                          could not be completed";
const EXCHANGED: &str = "the body's builder was exchanged for another one";

/// A graph in the making, node by node.
///
/// A node comes after those that are named and, by itself, after those whose memory it uses: there is no need to say what a
/// stream would know, and no way to leave it out.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}, graph::Graph};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let (mut left, mut right) = (Buffer::<u8>::new(&device, 4)?, Buffer::<u8>::new(&device, 4)?);
/// let mut graph = Graph::builder(&device)?;
/// let one = graph.add(&[], |stream| stream.fill(&mut left, 1))?;
/// let two = graph.add(&[], |stream| stream.fill(&mut right, 2))?;        // beside it
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

/// A node's stream, to which a user's function adds: closed when it has returned, or has panicked, also for a clone that it
/// has kept.
struct Open<'a> {
    recorder: &'a Recorder,
    stream: &'a Stream,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.recorder.close_stream(self.stream.raw());
    }
}

/// The body of a conditional, until it is complete. Dropped before that, by a panic or an error, it makes the graph around
/// it one that cannot be built: the body's nodes may lack edges, and what they use may belong to a builder that was taken
/// away.
struct Body {
    outer: Arc<Recorder>,
    within: Arc<Recorder>,
    complete: bool,
}

impl Drop for Body {
    fn drop(&mut self) {
        if !self.complete {
            // First of all: a builder that was taken away adds nothing from here on.
            self.within.spoil(INCOMPLETE);
            self.outer.spoil(INCOMPLETE);
        }
    }
}

impl Graph {
    /// An empty graph of this device, to add nodes to.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn builder(device: &Device) -> Result<Builder> {
        Ok(Builder { sketch: Sketch::new(device)? })
    }
}

impl Builder {
    /// Adds what `work` enqueues into the stream: a kernel, a copy, a fill, another library's work, a host callback. One
    /// node, or several in that order, of which this is the last. It comes after `after`, and after those whose memory it
    /// uses.
    ///
    /// # Errors
    /// `work`'s own, and those of its calls; [`Usage`](ErrorKind::Usage) for a node of another graph. What was enqueued before
    /// it failed stays in the graph.
    pub fn add(&mut self, after: &[Node], work: impl FnOnce(&Stream) -> Result<()>) -> Result<Node> {
        let after = self.find_all(after)?;
        let stream = self.sketch.capture.stream("node", after)?;
        {
            let _open = Open { recorder: &self.sketch.recorder, stream: &stream };
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

    /// Adds a node that does nothing: it joins those that it comes after.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node of another graph.
    pub fn join(&mut self, after: &[Node]) -> Result<Node> {
        let after = self.find_all(after)?;
        self.sketch.recorder.join(after).map(|at| self.sketch.node(at))
    }

    /// Adds a function of the host, called at each launch. It must not call into wakeline or the driver, nor wait for
    /// anything: it runs on a thread of the driver's.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a node of another graph.
    pub fn host(&mut self, after: &[Node], function: impl Fn() + Send + Sync + 'static) -> Result<Node> {
        // What is refused is dropped as a callback is: a destructor of it that panics does not leave this call.
        let function = host_callback(function);
        let after = self.find_all(after)?;
        self.sketch.recorder.call(after, function).map(|at| self.sketch.node(at))
    }

    /// Adds all of another graph, as one node.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a graph of another device, for one that makes memory or has conditions, for a node of
    /// another graph, for graphs within each other more than 64 levels deep, conditionals and children counted together, and for
    /// more than 1,048,576 nodes within a graph's children, at all levels.
    pub fn child(&mut self, after: &[Node], graph: &Graph) -> Result<Node> {
        let after = self.find_all(after)?;
        let device = self.sketch.capture.device();
        if graph.device() != device {
            let text = format!("a graph of {} in one of {device}", graph.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let (levels_with, nodes_with) = (self.sketch.levels_with(graph.0.levels)?, self.sketch.nodes_with(graph)?);
        let Sketch { recorder, hold, children, capture, levels, within, .. } = &mut self.sketch;
        let stream = capture.stream("child", after)?;
        // After those of this graph that use the same memory, and after itself, if it is in here already.
        let holds = graph.holds();
        holds.iter().try_for_each(|other| hold.before_all_of(other, &stream))?;
        let twins = children.iter().filter(|(child, _)| child.has_any_of(&holds)).map(|(_, at)| *at);
        let end = recorder.end_of(stream.raw());
        let after = recorder.state().draft.last_of(end.into_iter().chain(twins));
        // Kept there, too, before there is a node: a body's capture is kept by the graph around it, wherever its builder goes.
        capture.keep(graph.0.clone());
        let at = execution::add_child(recorder, after, &graph.0.recorder)?;
        (*levels, *within) = (levels_with.max(*levels), nodes_with);
        recorder.go_on_after(stream.raw(), at);
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        holds.iter().for_each(|other| hold.note_all_of(other, &ticket));
        children.push((graph.clone(), at));
        Ok(self.sketch.node(at))
    }

    /// Adds a node that makes memory at each launch, and the memory, for nodes that come after it: the driver uses the same
    /// memory again for graphs that do not run at once. It is given back by [`free`](Self::free), or else by the graph's last
    /// node to use it. Such a graph has one [`Exec`](super::Exec) at a time.
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
    /// [`Usage`](ErrorKind::Usage) for no elements or a node of another graph; [`OutOfMemory`](ErrorKind::OutOfMemory).
    pub fn alloc<T: Plain>(&mut self, after: &[Node], len: usize) -> Result<(Node, Buffer<T>)> {
        let after = self.find_all(after)?;
        let Sketch { recorder, hold, capture, .. } = &self.sketch;
        let stream = capture.stream("allocation", after)?;
        let (at, buffer) = execution::add_alloc(recorder, hold, &stream, len)?;
        Ok((self.sketch.node(at), buffer))
    }

    /// Adds a node that gives back what a node of [`alloc`](Self::alloc) makes, after those that use it.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for other memory.
    pub fn free<T: Plain>(&mut self, after: &[Node], buffer: Buffer<T>) -> Result<Node> {
        let after = self.find_all(after)?;
        let Sketch { recorder, hold, capture, .. } = &self.sketch;
        let stream = capture.stream("free", after)?;
        execution::add_free(recorder, hold, &stream, buffer).map(|at| self.sketch.node(at))
    }

    /// Adds what `body` adds, to run once, if the first element of the flag is not 0 when its turn comes. It comes after all
    /// nodes so far. Such a graph has one [`Exec`](super::Exec) at a time, and is no child of another.
    ///
    /// If `body` returns an error, what it added until then stays in the graph. If it panics, or leaves another builder in the
    /// place of its own, the graph cannot be built any more.
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
    /// As [`add`](Self::add); [`Usage`](ErrorKind::Usage) for a flag that is not on the graph's device, where the driver has
    /// no such nodes (before CUDA 12.4), and for graphs within each other more than 64 levels deep, conditionals and children
    /// counted together.
    pub fn run_if<F: DeviceSlice<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        flag: &F,
        body: impl FnOnce(&mut Builder) -> Result<()>,
    ) -> Result<Node> {
        self.conditional::<_, F>(after, Condition::If, flag, |builder, _| body(builder))
    }

    /// Adds what `body` adds, to run again and again, as long as the first element of the flag is not 0 before each round. The
    /// body is given the flag: something in it should write 0 there at some time.
    ///
    /// # Errors
    /// As [`run_if`](Self::run_if), also for more than 64 levels.
    pub fn run_while<F: DeviceSliceMut<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        flag: &mut F,
        body: impl FnOnce(&mut Builder, &mut F) -> Result<()>,
    ) -> Result<Node> {
        self.conditional::<_, F>(after, Condition::While, flag, body)
    }

    fn conditional<S: Borrow<F>, F: DeviceSlice<u32> + ?Sized>(
        &mut self,
        after: &[Node],
        when: Condition,
        flag: S,
        body: impl FnOnce(&mut Builder, S) -> Result<()>,
    ) -> Result<Node> {
        self.find_all(after)?;
        self.sketch.levels_with(0)?;
        let Sketch { recorder, capture, .. } = &self.sketch;
        // What the body will use is not known yet.
        let all = {
            let state = recorder.state();
            state.draft.last_of(state.draft.all().map(|(at, _)| at))
        };
        let stream = capture.stream("conditional", all)?;
        flag.borrow().view().memory.before_read(&stream)?;
        let end = recorder.end_of(stream.raw());
        let (at, within) = execution::add_conditional(recorder, &stream, end, when, flag.borrow().view())?;
        let mut inner = Builder { sketch: Sketch::over(capture.device(), within.clone()) };
        inner.sketch.around = self.sketch.around + 1;
        inner.sketch.beside = self.sketch.beside.saturating_add(self.sketch.within);
        recorder.go_on_after(stream.raw(), at);
        // Below the builder: dropped before it.
        let mut open = Body { outer: recorder.clone(), within, complete: false };
        let id = inner.sketch.id;
        // What its nodes use is kept from here on, however it ends: memory, and events, children and bodies within it.
        let used = inner.sketch.hold.clone();
        capture.keep(used.clone());
        capture.keep(inner.sketch.capture.clone());
        self.sketch.bodies.push(used.clone());
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        flag.borrow().view().memory.note_read(&ticket);
        let made = body(&mut inner, flag);
        if inner.sketch.id != id {
            drop(open);
            return made.and(Err(Error::new(ErrorKind::Usage, EXCHANGED)));
        }
        let made = made.and_then(|()| inner.add_frees());
        // First of all: what it uses does not change from here on.
        if let Err(error) = open.within.close() {
            return made.and(Err(error));
        }
        // Launches come after what uses its memory elsewhere, and nodes after this one: also if it has failed, and stays.
        let Sketch { hold, .. } = &self.sketch;
        hold.before_all_of(&used, &stream)?;
        let ticket = stream.enqueue_point(|_, _| Ok(()))?;
        hold.note_all_of(&used, &ticket);
        self.sketch.levels = self.sketch.levels.max(inner.sketch.levels + 1);
        let inner = inner.sketch.finish(Vec::new());
        self.sketch.within = self.sketch.within.saturating_add(inner.0.nodes);
        self.sketch.children.push((inner, at));
        open.complete = true;
        made.map(|()| self.sketch.node(at))
    }

    /// One node comes after another, too.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if that makes a cycle, since `before` comes after `after` already, or for a node of another
    /// graph.
    pub fn order(&mut self, before: Node, after: Node) -> Result<()> {
        let (from, to) = (self.sketch.find(before)?, self.sketch.find(after)?);
        if self.sketch.recorder.order(from, to)? {
            return Ok(());
        }
        let state = self.sketch.recorder.state();
        let name = |at: usize| state.draft.get(at).map(|node| node.name.clone()).unwrap_or_default();
        let text = format!(
            "a cycle: node {from}, `{}`, comes after node {to}, `{}`, already, and cannot come before it",
            name(from),
            name(to)
        );
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// The graph.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`Usage`](ErrorKind::Usage) while another thread captures another
    /// library's work into it, after a conditional's body that panicked or whose builder was exchanged, and for the builder of
    /// such a body.
    pub fn build(self) -> Result<Graph> {
        if self.sketch.recorder.is_within() {
            let text = "the builder of a conditional's body: that is a part of the graph around it, and built with it";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.add_frees()?;
        self.sketch.recorder.close()?;
        Ok(self.sketch.finish(Vec::new()))
    }

    /// Adds nodes that give back what no node gives back yet.
    fn add_frees(&self) -> Result<()> {
        let Sketch { recorder, hold, capture, .. } = &self.sketch;
        execution::add_frees(recorder, hold, || capture.stream("free", Few::new()))
    }

    fn find_all(&self, nodes: &[Node]) -> Result<Few> {
        let found = nodes.iter().map(|node| self.sketch.find(*node)).collect::<Result<Few>>()?;
        Ok(self.sketch.recorder.state().draft.last_of(found))
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("of", &self.sketch.recorder).finish_non_exhaustive()
    }
}
