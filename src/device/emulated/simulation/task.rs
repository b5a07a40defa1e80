//! Tasks of a simulation: what is polled, what wakes it, and what somebody may wait for.
//!
//! ```text
//!   spawned ──► ready ──► polled ──┬─► pending ──(its waker)──► ready
//!                 ▲                ├─► done: its output
//!                 │                └─► panicked: what it panicked with
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

use super::{Core, Line, lock};
use crate::{
    error::catch_panic,
    sync::{Mutex, discard, wake},
};

pub(super) type TaskId = u64;
pub(super) type Body = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A task as the loop has it.
pub(super) struct Entry {
    name: Arc<str>,
    /// Out while it is polled.
    pub(super) body: Option<Body>,
    pub(super) aborted: bool,
}

impl Entry {
    pub(super) fn new<F>(name: String, future: F) -> (Self, Arc<Slot<F::Output>>)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let slot = Arc::new(Slot::default());
        let end = End(slot.clone());
        let body = async move {
            let output = catch_panic(unconstrained(future)).await;
            end.0.put(output.map_err(Unfinished::Panicked));
        };
        (Self { name: name.into(), body: Some(Box::pin(body)), aborted: false }, slot)
    }

    /// For the log.
    pub(super) fn line(&self, id: TaskId) -> Line {
        Line::Task { id, name: self.name.clone(), aborted: self.aborted }
    }
}

/// Where a task's end is put, and who waits for it.
pub(super) struct Slot<T: 'static>(Mutex<State<T>>);

struct State<T: 'static> {
    end: Option<Result<T, Unfinished>>,
    over: bool,
    waker: Option<Waker>,
}

impl<T: 'static> Drop for State<T> {
    fn drop(&mut self) {
        discard(self.waker.take());
        // An output may hold the end of another task, and so on.
        discard(self.end.take());
    }
}

impl<T: 'static> Default for Slot<T> {
    fn default() -> Self {
        Self(Mutex::new(State { end: None, over: false, waker: None }))
    }
}

impl<T: 'static> Slot<T> {
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

/// In a task's body: when that is dropped unfinished, the slot hears of it.
struct End<T: 'static>(Arc<Slot<T>>);

impl<T: 'static> Drop for End<T> {
    fn drop(&mut self) {
        self.0.put(Err(Unfinished::Aborted));
    }
}

/// Why a task has no output.
#[non_exhaustive]
pub enum Unfinished {
    /// It was aborted, or its simulation is over.
    Aborted,
    /// It panicked with this.
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
            Unfinished::Aborted => "the task was aborted, or its simulation is over",
            Unfinished::Panicked(_) => "the task panicked",
        })
    }
}

impl std::error::Error for Unfinished {}

/// A spawned task: a future of its end.
///
/// # Cancel safety
/// Dropping it lets the task go on by itself.
pub struct Task<T: 'static> {
    id: TaskId,
    slot: Arc<Slot<T>>,
    core: Weak<Core>,
}

impl<T: 'static> Task<T> {
    pub(super) fn new(id: TaskId, slot: Arc<Slot<T>>, core: &Arc<Core>) -> Self {
        Self { id, slot, core: Arc::downgrade(core) }
    }

    /// Ends the task at its next turn.
    pub fn abort(&self) {
        if let Some(core) = self.core.upgrade() {
            core.abort(self.id);
        }
    }

    /// True once it is done, or has panicked, or is gone.
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
            None if state.over => panic!("a task's end was polled for again"),
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

/// Makes a task ready.
pub(super) struct TaskWaker {
    id: TaskId,
    core: Weak<Core>,
}

impl TaskWaker {
    pub(super) fn new(id: TaskId, core: &Arc<Core>) -> Self {
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
