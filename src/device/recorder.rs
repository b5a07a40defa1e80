//! A backend that runs nothing: work enqueued into its streams becomes nodes of a graph.
//!
//! A stream is represented by the nodes that its next node depends on, an event by those of the stream at the record,
//! and a wait joins the two sets. The branches of the graph are therefore as parallel as the streams were.
//!
//! ```text
//!   launch on a           node 0                     a: [0]
//!   record e on a, wait for e on b                   b: [0]
//!   launch on a, on b     nodes 1, 2, each after 0   a: [1]  b: [2]
//!   record f on b, wait for f on a                   a: [1, 2]
//!   launch on a           node 3 after 1 and 2       a: [3]
//! ```
//!
//! The driver's own capture is used only for other libraries' work: an unsuitable call on any thread makes it fail, and
//! it does not report which node belongs to which caller.
//!
//! Recorded work never completes, so queries return false.

mod calls;

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

pub(crate) use calls::one_shot_error;
use rustc_hash::FxHashMap;
use smallvec::smallvec;

use super::{
    backend::{
        Address, Backend, Endpoint, GraphCondition, HostCallback, NodeWork, RawEvent, RawGraph, RawNode, RawStream,
    },
    graph_ir::{GraphIr, Kind, NodeSet},
    touched::TouchedRange,
    work_item::{WorkCollector, WorkItem},
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, MutexGuard, lock},
};

/// See the [module](self).
pub(crate) struct Recorder {
    inner: Arc<dyn Backend>,
    /// The recorder of the outer graph, if this graph is nested. The outer graph owns the driver's graph.
    within: Option<Arc<Self>>,
    state: Mutex<RecorderState>,
}

pub(crate) struct RecorderState {
    pub(crate) graph: RawGraph,
    pub(crate) ir: GraphIr,
    open: bool,
    retired: bool,
    /// Why the graph is incomplete and cannot be built.
    poisoned: Option<&'static str>,
    /// The driver's graph is being destroyed. Shared with the recorders of nested graphs.
    ended: Arc<AtomicBool>,
    bodies: Vec<Weak<Recorder>>,
    /// The driver is capturing into this graph or into another graph with the same root.
    capturing: Arc<AtomicBool>,
    handles: u64,
    streams: FxHashMap<RawStream, RecordedStream>,
    events: FxHashMap<RawEvent, NodeSet>,
    label: Option<Arc<str>>,
    /// Copies between host and device in other libraries' work: the node, the direction, the number of bytes.
    pub(crate) external_copies: Vec<(usize, &'static str, u64)>,
    /// If set, work is stored here and does not become a node.
    collector: Option<WorkCollector>,
}

struct RecordedStream {
    name: String,
    at: NodeSet,
    closed: bool,
}

impl Recorder {
    pub(crate) fn new(inner: &Arc<dyn Backend>) -> Result<Arc<Self>> {
        Ok(Self::over(inner, inner.graph_create()?, None))
    }

    /// A recorder for the body of a node of `outer`. It records nothing if `outer` is already incomplete.
    pub(crate) fn within(outer: &Arc<Self>, graph: RawGraph) -> Arc<Self> {
        let within = Self::over(&outer.inner, graph, Some(outer.clone()));
        let mut state = outer.state();
        let poisoned = state.poisoned;
        state.bodies.push(Arc::downgrade(&within));
        drop(state);
        if let Some(why) = poisoned {
            within.poison(why);
        }
        within
    }

    fn over(inner: &Arc<dyn Backend>, graph: RawGraph, within: Option<Arc<Self>>) -> Arc<Self> {
        let shared = within.as_ref().map(|outer| {
            let state = outer.state();
            (state.capturing.clone(), state.ended.clone())
        });
        let (capturing, ended) = shared.unwrap_or_default();
        Arc::new(Self {
            inner: inner.clone(),
            within,
            state: Mutex::at(
                Level::Recorder,
                RecorderState {
                    graph,
                    ir: GraphIr::default(),
                    open: true,
                    retired: false,
                    poisoned: None,
                    ended,
                    bodies: Vec::new(),
                    capturing,
                    handles: 0,
                    streams: FxHashMap::default(),
                    events: FxHashMap::default(),
                    label: None,
                    external_copies: Vec::new(),
                    collector: None,
                },
            ),
        })
    }

    #[track_caller]
    pub(crate) fn state(&self) -> MutexGuard<'_, RecorderState> {
        lock(&self.state)
    }

    /// Like [`state`](Self::state), for a caller that has locked another recorder: that of a graph which this graph is
    /// added to or compared with.
    #[track_caller]
    pub(crate) fn child_state(&self) -> MutexGuard<'_, RecorderState> {
        self.state.lock_as(Level::ChildRecorder)
    }

    /// Sets the owner of the nodes added from now on and returns the previous one.
    pub(crate) fn set_label(&self, label: Option<Arc<str>>) -> Option<Arc<str>> {
        std::mem::replace(&mut self.state().label, label)
    }

    /// The owner of the nodes added now.
    pub(crate) fn label(&self) -> Option<Arc<str>> {
        self.state().label.clone()
    }

    /// Allows or forbids recording. A retired recorder is never opened again.
    pub(crate) fn set_open(&self, open: bool) {
        let mut state = self.state();
        state.open = open && !state.retired;
    }

    /// True if the graph is part of another one, which launches it.
    pub(crate) fn is_within(&self) -> bool {
        self.within.is_some()
    }

    /// Stops recording into this graph and the graphs within it, and makes [`close`](Self::close) fail.
    pub(crate) fn poison(&self, why: &'static str) {
        let mut state = self.state();
        state.open = false;
        state.poisoned.get_or_insert(why);
        let bodies = std::mem::take(&mut state.bodies);
        drop(state);
        // Another thread might be adding a conditional through a builder that was moved out of its closure.
        bodies.iter().filter_map(Weak::upgrade).for_each(|body| body.poison(why));
    }

    /// Stops recording. Fails if the graph is incomplete, or if another thread is capturing into it through the driver.
    pub(crate) fn close(&self) -> Result<()> {
        let mut state = self.state();
        state.open = false;
        state.check_poisoned()?;
        if state.capturing.load(Ordering::Acquire) {
            let text = "another thread is still capturing another library's work into the graph: wait for that \
                        thread before the capture ends";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Ok(())
    }

    /// Ends the graph. If the driver is capturing into it, the driver's graph is destroyed when the capture has ended.
    pub(crate) fn retire(&self) {
        let mut state = self.state();
        state.open = false;
        let retired = std::mem::replace(&mut state.retired, true);
        let (graph, capturing) = (state.graph, state.capturing.load(Ordering::Acquire));
        if self.within.is_none() {
            state.ended.store(true, Ordering::Release);
        }
        drop(state);
        if !retired && !capturing && self.within.is_none() {
            self.inner.graph_destroy(graph);
        }
    }

    /// The driver's capture into the graph has ended.
    fn capture_ended(&self) {
        let mut root = self;
        while let Some(outer) = &root.within {
            root = outer;
        }
        let state = root.state();
        state.capturing.store(false, Ordering::Release);
        let (retired, graph) = (state.retired, state.graph);
        drop(state);
        if retired {
            self.inner.graph_destroy(graph);
        }
    }

    /// Adds a stream whose first node depends on these nodes.
    pub(crate) fn stream(&self, name: &str, after: NodeSet) -> RawStream {
        let mut state = self.state();
        state.handles += 1;
        let stream = RawStream(state.handles);
        state.streams.insert(stream, RecordedStream { name: name.into(), at: after, closed: false });
        stream
    }

    /// Makes enqueuing into the stream an error. Other streams can still wait for its end.
    pub(crate) fn close_stream(&self, stream: RawStream) {
        if let Some(stream_end) = self.state().streams.get_mut(&stream) {
            stream_end.closed = true;
        }
    }

    /// Makes the stream's next node depend on this node.
    pub(crate) fn continue_after(&self, stream: RawStream, node: usize) {
        self.state().advance(stream, node);
    }

    /// The nodes that the stream's next node would depend on.
    pub(crate) fn end_of(&self, stream: RawStream) -> NodeSet {
        self.state().streams.get(&stream).map(|stream_end| stream_end.at.clone()).unwrap_or_default()
    }

    /// The streams whose last work is not ordered before the end of `stream`, each with the name of that work.
    pub(crate) fn unjoined(&self, stream: RawStream) -> Vec<(String, String)> {
        let state = self.state();
        let end = state.streams.get(&stream).map(|stream_end| stream_end.at.clone()).unwrap_or_default();
        let joined = |node: usize| end.iter().any(|&last| last == node || state.ir.comes_after(last, node));
        let name = |node: usize| state.ir.get(node).map(|node| node.name.clone()).unwrap_or_default();
        let mut streams: Vec<_> = state.streams.iter().collect();
        streams.sort_unstable_by_key(|(stream, _)| **stream);
        let open = streams.into_iter().filter_map(|(_, stream_end)| {
            stream_end.at.iter().find(|&&node| !joined(node)).map(|&node| (stream_end.name.clone(), name(node)))
        });
        open.collect()
    }

    /// A recorder that adds nothing to this graph. It stores one piece of work for [`take_collected`](Self::take_collected).
    pub(crate) fn collecting(self: &Arc<Self>) -> Arc<Self> {
        let graph = self.state().graph;
        let collecting = Self::over(&self.inner, graph, Some(self.clone()));
        collecting.state().collector = Some(WorkCollector::default());
        collecting
    }

    /// Takes the stored work, if any. Fails if more than one piece was enqueued, even if that call's error was ignored.
    pub(crate) fn take_collected(&self) -> Result<Option<WorkItem>, &'static str> {
        // Callbacks of the collector are dropped outside the lock.
        let collector = self.state().collector.take().unwrap_or_default();
        collector.work_item()
    }

    /// Adds a node that depends on these nodes, outside any stream.
    ///
    /// # Safety
    /// The contract of [`Backend::graph_add`].
    pub(crate) unsafe fn add(&self, after: NodeSet, work: &NodeWork<'_>) -> Result<usize> {
        // SAFETY: the same contract.
        unsafe { self.add_in(&mut self.state(), after, work) }
    }

    /// # Safety
    /// The contract of [`Backend::graph_add`].
    unsafe fn add_in(&self, state: &mut RecorderState, after: NodeSet, work: &NodeWork<'_>) -> Result<usize> {
        state.check()?;
        let before = state.ir.raw_of(&after);
        // SAFETY: the same contract.
        let node = unsafe { self.inner.graph_add(state.graph, &before, work) }?;
        let label = state.label.clone();
        Ok(state.ir.add_work(node, work, label, after))
    }

    pub(crate) fn join(&self, after: NodeSet) -> Result<usize> {
        // SAFETY: it touches no memory.
        unsafe { self.add(after, &NodeWork::Empty) }
    }

    /// Adds a node that calls a host function at each launch.
    pub(crate) fn call(&self, after: NodeSet, function: HostCallback) -> Result<usize> {
        let _later = Deferred::new();
        // SAFETY: it touches no device memory.
        unsafe { self.add(after, &NodeWork::Host(function)) }
    }

    /// Makes `after` depend on `before` too. Returns false, and changes nothing, if that would create a cycle.
    pub(crate) fn order(&self, before: usize, after: usize) -> Result<bool> {
        let mut state = self.state();
        state.check()?;
        if before == after || state.ir.comes_after(before, after) {
            return Ok(false);
        }
        let (from, to) = (state.ir.raw_of(&[before]), state.ir.raw_of(&[after]));
        for from in &from {
            for to in &to {
                self.inner.graph_order(state.graph, *from, *to)?;
            }
        }
        state.ir.order(before, after);
        Ok(true)
    }

    /// Removes a node. Its successors then depend on its predecessors.
    pub(crate) fn remove(&self, node: usize) -> Result<()> {
        let mut state = self.state();
        for raw in state.ir.raw_of(&[node]) {
            self.inner.graph_remove(state.graph, raw)?;
        }
        state.ir.remove(node);
        Ok(())
    }

    /// Adds a node that `make` creates on the device.
    pub(crate) fn add_with(
        &self,
        after: NodeSet,
        kind: Kind,
        name: String,
        make: impl FnOnce(&dyn Backend, RawGraph, &[RawNode]) -> Result<RawNode>,
    ) -> Result<usize> {
        let mut state = self.state();
        state.check()?;
        let before = state.ir.raw_of(&after);
        let node = make(&*self.inner, state.graph, &before)?;
        let label = state.label.clone();
        Ok(state.ir.add(smallvec![node], kind, name, label, after))
    }

    /// Adds a conditional node with a nested graph.
    ///
    /// # Safety
    /// The contract of [`Backend::graph_add_conditional`].
    pub(crate) unsafe fn add_conditional(
        &self,
        after: NodeSet,
        when: GraphCondition,
        flag: Address,
    ) -> Result<(usize, RawGraph)> {
        let mut body = None;
        let name = match when {
            GraphCondition::If => "if",
            GraphCondition::While => "while",
        };
        let node = self.add_with(after, Kind::Conditional, name.into(), |backend, graph, before| {
            // SAFETY: the same contract.
            let (node, within) = unsafe { backend.graph_add_conditional(graph, before, when, flag) }?;
            body = Some(within);
            Ok(node)
        })?;
        let flag = TouchedRange::new(Endpoint::Device(flag), 4, false);
        self.state().ir.set_touched(node, [flag].into_iter().collect());
        body.map(|body| (node, body)).ok_or_else(|| {
            Error::new(
                ErrorKind::Driver,
                "internal error: the backend added a conditional node without a body (please report)",
            )
        })
    }

    /// # Safety
    /// The contract of [`Backend::graph_add`].
    unsafe fn enqueue(&self, stream: RawStream, work: &NodeWork<'_>) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        if let Some(collector) = &mut state.collector {
            return collector.add(&self.inner, work);
        }
        let after = state.end_to_add(stream)?;
        // Under the same lock, so that nothing is added to a closed stream.
        // SAFETY: the same contract.
        let node = unsafe { self.add_in(&mut state, after, work) }?;
        state.advance(stream, node);
        Ok(())
    }
}

impl RecorderState {
    fn check(&self) -> Result<()> {
        if self.capturing.load(Ordering::Acquire) {
            let text = "another thread is capturing another library's work into the same graph: let only one thread \
                        at a time add to it";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.check_poisoned()?;
        if self.open && !self.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let text = "its capture is over, so no graph would contain this work: use another stream";
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn check_poisoned(&self) -> Result<()> {
        self.poisoned.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Usage, why)))
    }

    fn stream_end(&self, stream: RawStream) -> Result<NodeSet> {
        let stream_end = self.streams.get(&stream).map(|stream_end| stream_end.at.clone());
        stream_end.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "the stream does not belong to this capture: use one of the capture's streams")
        })
    }

    /// Like [`stream_end`](Self::stream_end), for adding a node: fails if the stream is closed.
    fn end_to_add(&self, stream: RawStream) -> Result<NodeSet> {
        if self.streams.get(&stream).is_some_and(|stream_end| stream_end.closed) {
            let text = "the node of this stream was already added: use the stream that is passed to the next node";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.stream_end(stream)
    }

    fn advance(&mut self, stream: RawStream, node: usize) {
        if let Some(stream_end) = self.streams.get_mut(&stream) {
            stream_end.at = smallvec![node];
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.retire();
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("of", &self.inner).finish_non_exhaustive()
    }
}
