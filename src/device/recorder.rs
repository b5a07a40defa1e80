//! A backend that runs nothing: what is enqueued into its streams becomes nodes of a graph.
//!
//! Whoever enqueues knows nothing of it: launches, copies, waits are the same calls. A stream here is the nodes that its
//! next one comes after; an event is what a stream had come to when it was recorded; a wait joins the two. So work on
//! several streams becomes a graph whose branches are as parallel as the streams were, and no more ordered than their
//! waits made them.
//!
//! ```text
//!   launch on a           node 0                     a: [0]
//!   record e on a, wait for e on b                   b: [0]
//!   launch on a, on b     nodes 1, 2, each after 0   a: [1]  b: [2]
//!   record f on b, wait for f on a                   a: [1, 2]
//!   launch on a           node 3 after 1 and 2       a: [3]
//! ```
//!
//! The driver's own capture is used for what other libraries enqueue, and for nothing else: it breaks when another call
//! of the thread's, or of another thread's, does not suit it, and does not tell which node is whose.
//!
//! Nothing here ever passes: a question whether work is done is answered with no.

mod calls;

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

pub(crate) use calls::is_called_once;
use rustc_hash::FxHashMap;
use smallvec::smallvec;

use super::{
    backend::{Address, Backend, Condition, HostCallback, NodeWork, Place, RawEvent, RawGraph, RawNode, RawStream},
    draft::{Draft, Few, Kind},
    piece::{Note, Piece},
    touched::Touch,
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, MutexGuard, lock},
};

/// See the [module](self).
pub(crate) struct Recorder {
    inner: Arc<dyn Backend>,
    /// The graph is a part of this one's, which ends it.
    within: Option<Arc<Self>>,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) graph: RawGraph,
    pub(crate) draft: Draft,
    open: bool,
    retired: bool,
    /// Why the graph is incomplete: nothing more is recorded, and it cannot be built.
    spoiled: Option<&'static str>,
    /// The driver's graph is destroyed, or about to be. Shared with the graphs within it.
    ended: Arc<AtomicBool>,
    /// The recorders of graphs within its nodes.
    bodies: Vec<Weak<Recorder>>,
    /// The driver captures into the graph, or into one within the same.
    capturing: Arc<AtomicBool>,
    handles: u64,
    streams: FxHashMap<RawStream, Lane>,
    events: FxHashMap<RawEvent, Few>,
    label: Option<Arc<str>>,
    /// Copies between host and device within other libraries' work: whose, which way, how many bytes.
    pub(crate) foreign: Vec<(usize, &'static str, u64)>,
    /// What comes is no node, but is noted.
    note: Option<Note>,
}

struct Lane {
    name: String,
    at: Few,
    /// What is enqueued into it goes nowhere.
    closed: bool,
}

impl Recorder {
    pub(crate) fn new(inner: &Arc<dyn Backend>) -> Result<Arc<Self>> {
        Ok(Self::over(inner, inner.graph_create()?, None))
    }

    /// Into the graph within a node of another. Nothing is recorded if that one is incomplete by now.
    pub(crate) fn within(outer: &Arc<Self>, graph: RawGraph) -> Arc<Self> {
        let within = Self::over(&outer.inner, graph, Some(outer.clone()));
        let mut state = outer.state();
        let spoiled = state.spoiled;
        state.bodies.push(Arc::downgrade(&within));
        drop(state);
        if let Some(why) = spoiled {
            within.spoil(why);
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
                State {
                    graph,
                    draft: Draft::default(),
                    open: true,
                    retired: false,
                    spoiled: None,
                    ended,
                    bodies: Vec::new(),
                    capturing,
                    handles: 0,
                    streams: FxHashMap::default(),
                    events: FxHashMap::default(),
                    label: None,
                    foreign: Vec::new(),
                    note: None,
                },
            ),
        })
    }

    #[track_caller]
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Of a graph that becomes a node of another, or is compared with it: that one is locked within.
    #[track_caller]
    pub(crate) fn child_state(&self) -> MutexGuard<'_, State> {
        self.state.lock_as(Level::ChildRecorder)
    }

    /// Whose the nodes are that come from now on; before, what was said last.
    pub(crate) fn set_label(&self, label: Option<Arc<str>>) -> Option<Arc<str>> {
        std::mem::replace(&mut self.state().label, label)
    }

    /// Whose the nodes are that come now.
    pub(crate) fn label(&self) -> Option<Arc<str>> {
        self.state().label.clone()
    }

    /// Nothing more is recorded until it is opened again.
    pub(crate) fn set_open(&self, open: bool) {
        let mut state = self.state();
        state.open = open && !state.retired;
    }

    /// The graph is a part of another one's, which launches it.
    pub(crate) fn is_within(&self) -> bool {
        self.within.is_some()
    }

    /// The graph is incomplete: nothing more is recorded, neither here nor into graphs within it, and
    /// [`close`](Self::close) fails.
    pub(crate) fn spoil(&self, why: &'static str) {
        let mut state = self.state();
        state.open = false;
        state.spoiled.get_or_insert(why);
        let bodies = std::mem::take(&mut state.bodies);
        drop(state);
        // A builder that was taken away may be adding a conditional of its own right now, on another thread.
        bodies.iter().filter_map(Weak::upgrade).for_each(|body| body.spoil(why));
    }

    /// Nothing more is recorded. An error if the graph is incomplete, or if the driver captures into it right now, on another
    /// thread: such a graph is of no use.
    pub(crate) fn close(&self) -> Result<()> {
        let mut state = self.state();
        state.open = false;
        state.check_spoiled()?;
        if state.capturing.load(Ordering::Acquire) {
            let text =
                "another thread still captures another library's work into the graph: have it done before its end";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Ok(())
    }

    /// Its graph is over: nobody adds to it or makes execs of it any more. While the driver captures into it, it stays.
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

    /// The driver captures into its graph no more.
    fn captured(&self) {
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

    /// A stream whose first node comes after these.
    pub(crate) fn stream(&self, name: &str, after: Few) -> RawStream {
        let mut state = self.state();
        state.handles += 1;
        let stream = RawStream(state.handles);
        state.streams.insert(stream, Lane { name: name.into(), at: after, closed: false });
        stream
    }

    /// Nothing more is enqueued into a stream. Its end can still be waited for.
    pub(crate) fn close_stream(&self, stream: RawStream) {
        if let Some(lane) = self.state().streams.get_mut(&stream) {
            lane.closed = true;
        }
    }

    /// A stream goes on after this node.
    pub(crate) fn go_on_after(&self, stream: RawStream, node: usize) {
        self.state().come_to(stream, node);
    }

    /// What a stream has come to.
    pub(crate) fn end_of(&self, stream: RawStream) -> Few {
        self.state().streams.get(&stream).map(|lane| lane.at.clone()).unwrap_or_default()
    }

    /// Streams whose last work `stream` does not come after, and that work.
    pub(crate) fn unjoined(&self, stream: RawStream) -> Vec<(String, String)> {
        let state = self.state();
        let end = state.streams.get(&stream).map(|lane| lane.at.clone()).unwrap_or_default();
        let joined = |node: usize| end.iter().any(|&last| last == node || state.draft.comes_after(last, node));
        let name = |node: usize| state.draft.get(node).map(|node| node.name.clone()).unwrap_or_default();
        let mut streams: Vec<_> = state.streams.iter().collect();
        streams.sort_unstable_by_key(|(stream, _)| **stream);
        let open = streams.into_iter().filter_map(|(_, lane)| {
            lane.at.iter().find(|&&node| !joined(node)).map(|&node| (lane.name.clone(), name(node)))
        });
        open.collect()
    }

    /// One that adds nothing to this graph: it notes one piece of work, for whoever [takes](Self::take_noted) it.
    pub(crate) fn noting(self: &Arc<Self>) -> Arc<Self> {
        let graph = self.state().graph;
        let noting = Self::over(&self.inner, graph, Some(self.clone()));
        noting.state().note = Some(Note::default());
        noting
    }

    /// The piece of work that it has noted, if there was any; if there was more, what is wrong, whoever was told of it then.
    pub(crate) fn take_noted(&self) -> Result<Option<Piece>, &'static str> {
        // A callback in it is dropped without the lock.
        let note = self.state().note.take().unwrap_or_default();
        note.piece()
    }

    /// A node that comes after these, of whatever stream.
    ///
    /// # Safety
    /// As [`Backend::graph_add`].
    pub(crate) unsafe fn add(&self, after: Few, work: &NodeWork<'_>) -> Result<usize> {
        // SAFETY: the same contract.
        unsafe { self.add_in(&mut self.state(), after, work) }
    }

    /// # Safety
    /// As [`Backend::graph_add`].
    unsafe fn add_in(&self, state: &mut State, after: Few, work: &NodeWork<'_>) -> Result<usize> {
        state.check()?;
        let before = state.draft.raw_of(&after);
        // SAFETY: the same contract.
        let node = unsafe { self.inner.graph_add(state.graph, &before, work) }?;
        let label = state.label.clone();
        Ok(state.draft.add_work(node, work, label, after))
    }

    /// A node that joins these.
    pub(crate) fn join(&self, after: Few) -> Result<usize> {
        // SAFETY: it touches no memory.
        unsafe { self.add(after, &NodeWork::Empty) }
    }

    /// A node that calls a function of the host at each launch.
    pub(crate) fn call(&self, after: Few, function: HostCallback) -> Result<usize> {
        let _later = Deferred::new();
        // SAFETY: it touches no memory of the device's.
        unsafe { self.add(after, &NodeWork::Host(function)) }
    }

    /// `after` comes after `before`, too. False if that would be a cycle.
    pub(crate) fn order(&self, before: usize, after: usize) -> Result<bool> {
        let mut state = self.state();
        state.check()?;
        if before == after || state.draft.comes_after(before, after) {
            return Ok(false);
        }
        let (from, to) = (state.draft.raw_of(&[before]), state.draft.raw_of(&[after]));
        for from in &from {
            for to in &to {
                self.inner.graph_order(state.graph, *from, *to)?;
            }
        }
        state.draft.order(before, after);
        Ok(true)
    }

    /// Takes a node out: what came after it comes after what it came after.
    pub(crate) fn remove(&self, node: usize) -> Result<()> {
        let mut state = self.state();
        for raw in state.draft.raw_of(&[node]) {
            self.inner.graph_remove(state.graph, raw)?;
        }
        state.draft.remove(node);
        Ok(())
    }

    /// A node that the device has made already.
    pub(crate) fn added(
        &self,
        after: Few,
        kind: Kind,
        name: String,
        make: impl FnOnce(&dyn Backend, RawGraph, &[RawNode]) -> Result<RawNode>,
    ) -> Result<usize> {
        let mut state = self.state();
        state.check()?;
        let before = state.draft.raw_of(&after);
        let node = make(&*self.inner, state.graph, &before)?;
        let label = state.label.clone();
        Ok(state.draft.add(smallvec![node], kind, name, label, after))
    }

    /// A node with a graph within it.
    ///
    /// # Safety
    /// As [`Backend::graph_add_conditional`].
    pub(crate) unsafe fn add_conditional(
        &self,
        after: Few,
        when: Condition,
        flag: Address,
    ) -> Result<(usize, RawGraph)> {
        let mut body = None;
        let name = match when {
            Condition::If => "if",
            Condition::While => "while",
        };
        let node = self.added(after, Kind::Conditional, name.into(), |backend, graph, before| {
            // SAFETY: the same contract.
            let (node, within) = unsafe { backend.graph_add_conditional(graph, before, when, flag) }?;
            body = Some(within);
            Ok(node)
        })?;
        let flag = Touch::new(Place::Device(flag), 4, false);
        self.state().draft.set_touched(node, [flag].into_iter().collect());
        body.map(|body| (node, body)).ok_or_else(|| Error::new(ErrorKind::Driver, "a conditional node without a body"))
    }

    /// # Safety
    /// As [`Backend::graph_add`].
    unsafe fn enqueue(&self, stream: RawStream, work: &NodeWork<'_>) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        if let Some(note) = &mut state.note {
            return note.add(&self.inner, work);
        }
        let after = state.end_to_add(stream)?;
        // Under the same lock: a stream that is closed meanwhile adds nothing after that.
        // SAFETY: the same contract.
        let node = unsafe { self.add_in(&mut state, after, work) }?;
        state.come_to(stream, node);
        Ok(())
    }
}

impl State {
    fn check(&self) -> Result<()> {
        if self.capturing.load(Ordering::Acquire) {
            let text =
                "another library's work is captured into the same graph right now, by another thread: one at a time";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.check_spoiled()?;
        if self.open && !self.ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let text = "its capture is over: what is enqueued now would be in no graph; take another stream";
        Err(Error::new(ErrorKind::Usage, text))
    }

    fn check_spoiled(&self) -> Result<()> {
        self.spoiled.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Usage, why)))
    }

    fn lane(&self, stream: RawStream) -> Result<Few> {
        let lane = self.streams.get(&stream).map(|lane| lane.at.clone());
        lane.ok_or_else(|| Error::new(ErrorKind::Usage, "a stream that takes no part in this capture"))
    }

    /// The same, for a node to come after it.
    fn end_to_add(&self, stream: RawStream) -> Result<Few> {
        if self.streams.get(&stream).is_some_and(|lane| lane.closed) {
            let text = "a stream of a node that was added: take the one that the next node is given";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        self.lane(stream)
    }

    fn come_to(&mut self, stream: RawStream, node: usize) {
        if let Some(lane) = self.streams.get_mut(&stream) {
            lane.at = smallvec![node];
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
