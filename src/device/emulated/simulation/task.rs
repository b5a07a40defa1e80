//! Tasks of a simulation: their bodies, wakers and handles.
//!
//! ```text
//!   spawned ──► ready ──► polled ──┬─► pending ──(its waker)──► ready
//!                 ▲                ├─► done: its output
//!                 │                └─► panicked: the panic's payload
//!   abort ────────┘ at its next turn it is dropped instead of polled: aborted
//! ```

use std::{
    any::Any,
    fmt,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, Wake, Waker},
};

use tokio::task::coop::unconstrained;

use super::{LogLine, SimulationCore, lock};
use crate::{
    error::catch_panic,
    sync::{Mutex, discard, wake},
};

pub(super) type TaskId = u64;
pub(super) type TaskFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) struct TaskEntry {
    name: Arc<str>,
    /// `None` while it is polled.
    pub(super) body: Option<TaskFuture>,
    pub(super) aborted: bool,
}

impl TaskEntry {
    pub(super) fn new<F>(name: String, future: F) -> (Self, Arc<OutputSlot<F::Output>>)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let slot = Arc::new(OutputSlot::default());
        let end = AbortOnDrop(slot.clone());
        let body = async move {
            let output = catch_panic(unconstrained(future)).await;
            end.0.put(output.map_err(Unfinished::Panicked));
        };
        (Self { name: name.into(), body: Some(Box::pin(body)), aborted: false }, slot)
    }

    pub(super) fn log_line(&self, id: TaskId) -> LogLine {
        LogLine::Task { id, name: self.name.clone(), aborted: self.aborted }
    }
}

/// A task's result, and the waker of the task that is awaiting it.
pub(super) struct OutputSlot<T: 'static>(Mutex<State<T>>);

struct State<T: 'static> {
    end: Option<Result<T, Unfinished>>,
    over: bool,
    waker: Option<Waker>,
}

impl<T: 'static> Drop for State<T> {
    fn drop(&mut self) {
        discard(self.waker.take());
        // An output can own the handle of another task, and so on.
        discard(self.end.take());
    }
}

impl<T: 'static> Default for OutputSlot<T> {
    fn default() -> Self {
        Self(Mutex::new(State { end: None, over: false, waker: None }))
    }
}

impl<T: 'static> OutputSlot<T> {
    fn put(&self, end: Result<T, Unfinished>) {
        let mut state = lock(&self.0);
        if state.over {
            return;
        }
        state.over = true;
        state.end = Some(end);
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(wake);
    }
}

/// A part of a task's future. If the future is dropped unfinished, this marks the slot aborted.
struct AbortOnDrop<T: 'static>(Arc<OutputSlot<T>>);

impl<T: 'static> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.put(Err(Unfinished::Aborted));
    }
}

/// The reason why a task has no output.
#[non_exhaustive]
pub enum Unfinished {
    /// The task was aborted, or its simulation was dropped.
    Aborted,
    /// The task panicked with this payload.
    Panicked(Box<dyn Any + Send>),
}

impl fmt::Debug for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unfinished::Aborted => "Aborted",
            Unfinished::Panicked(_) => "Panicked",
        })
    }
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unfinished::Aborted => "the task was aborted, or its simulation was dropped",
            Unfinished::Panicked(_) => "the task panicked",
        })
    }
}

impl std::error::Error for Unfinished {}

/// A task of a [`Simulation`](super::Simulation): a future of its output.
///
/// # Cancel safety
/// Dropping it detaches the task.
pub struct Task<T: 'static> {
    id: TaskId,
    slot: Arc<OutputSlot<T>>,
    core: Weak<SimulationCore>,
}

impl<T: 'static> Task<T> {
    pub(super) fn new(id: TaskId, slot: Arc<OutputSlot<T>>, core: &Arc<SimulationCore>) -> Self {
        Self { id, slot, core: Arc::downgrade(core) }
    }

    /// Aborts the task: it is dropped when it would next be polled.
    pub fn abort(&self) {
        if let Some(core) = self.core.upgrade() {
            core.abort(self.id);
        }
    }

    /// True once the task is done, has panicked or was aborted.
    pub fn is_finished(&self) -> bool {
        lock(&self.slot.0).over
    }
}

impl<T: 'static> Future for Task<T> {
    type Output = Result<T, Unfinished>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = cx.waker().clone();
        let mut state = lock(&self.slot.0);
        let old = match state.end.take() {
            Some(end) => return Poll::Ready(end),
            None if state.over => panic!("`Task` polled after completion"),
            None => state.waker.replace(waker),
        };
        drop(state);
        discard(old);
        Poll::Pending
    }
}

impl<T: 'static> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("id", &self.id).finish_non_exhaustive()
    }
}

pub(super) struct TaskWaker {
    id: TaskId,
    core: Weak<SimulationCore>,
}

impl TaskWaker {
    pub(super) fn new(id: TaskId, core: &Arc<SimulationCore>) -> Self {
        Self { id, core: Arc::downgrade(core) }
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(core) = self.core.upgrade() {
            core.make_ready(self.id);
        }
    }
}
