//! [`Node`]: an operator's task as its wakers see it.
//!
//! Everything that an operator awaits is polled with the node's waker, which wakes the tokio task behind it and keeps
//! the [tokens](super::quiet) right. The node also carries the two words from outside: end after this run, and abort.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::task::AtomicWaker;

use super::quiet::{Parking, Tokens};
use crate::error::{Error, ErrorKind, Result};

/// What all nodes of a flow share.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) tokens: Tokens,
    /// The flow's own task: woken when the last token is given back.
    pub(crate) flow: AtomicWaker,
}

/// One operator's task.
pub(crate) struct Node {
    /// The waker of the task that polls it first: tokio's are the same for all of a task's life.
    task: OnceLock<Waker>,
    /// For a task whose waker changes all the same.
    changed: AtomicBool,
    other: AtomicWaker,
    parking: Parking,
    rest: Arc<Rest>,
    finish: AtomicBool,
    abort: AtomicBool,
    ended: AtomicBool,
}

impl Node {
    pub(crate) fn new(operator: usize, rest: &Arc<Rest>) -> Arc<Self> {
        Arc::new(Self {
            task: OnceLock::new(),
            changed: AtomicBool::new(false),
            other: AtomicWaker::new(),
            parking: Parking::new(operator),
            rest: rest.clone(),
            finish: AtomicBool::new(false),
            abort: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    /// For work beside a flow's runs: no other operator's rest depends on it.
    pub(crate) fn alone() -> Arc<Self> {
        Self::new(0, &Arc::new(Rest { tokens: Tokens::new(1), flow: AtomicWaker::new() }))
    }

    /// Before the ports are asked.
    pub(crate) fn begin(&self) {
        self.parking.begin(&self.rest.tokens);
    }

    /// Nothing was ready.
    pub(crate) fn park(&self) {
        if self.parking.park(&self.rest.tokens) {
            self.rest.flow.wake();
        }
    }

    /// It waits no longer, whoever says so.
    pub(crate) fn unpark(&self) {
        if self.parking.wake(&self.rest.tokens) {
            self.rest.flow.wake();
        }
    }

    pub(crate) fn is_parked(&self) -> bool {
        self.parking.is_parked()
    }

    /// No run after the present one.
    pub(crate) fn finish(self: &Arc<Self>) {
        self.finish.store(true, Ordering::Release);
        self.wake_by_ref();
    }

    pub(crate) fn is_finishing(&self) -> bool {
        self.finish.load(Ordering::Acquire)
    }

    /// Drops what it is doing.
    pub(crate) fn abort(self: &Arc<Self>) {
        self.abort.store(true, Ordering::Release);
        self.wake_by_ref();
    }

    /// The operator has ended: its token goes for good.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) && self.parking.end(&self.rest.tokens) {
            self.rest.flow.wake();
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Polls a future of the operator's, with the node's waker. Once it is aborted, an error in its place.
    pub(crate) fn poll<T>(
        &self,
        waker: &Waker,
        task: &mut Context<'_>,
        future: impl FnOnce(&mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        if !self.task.get_or_init(|| task.waker().clone()).will_wake(task.waker()) {
            self.changed.store(true, Ordering::Release);
            self.other.register(task.waker());
        }
        if self.abort.load(Ordering::Acquire) {
            return Poll::Ready(Err(Error::new(ErrorKind::Cancelled, "the flow was aborted")));
        }
        future(&mut Context::from_waker(waker))
    }
}

impl Wake for Node {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.unpark();
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
        if self.changed.load(Ordering::Acquire) {
            self.other.wake();
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("parking", &self.parking).field("ended", &self.ended).finish_non_exhaustive()
    }
}
