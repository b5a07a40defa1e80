//! [`Node`]: an operator's task as its wakers see it.
//!
//! Everything that an operator awaits is polled with the node's waker, which wakes the tokio task behind it and keeps
//! the [tokens](super::quiet) right. The node also carries the two words from outside: end after this run, and abort.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use futures::task::AtomicWaker;

use super::{
    quiet::{Parking, Tokens, Woken},
    shown::Shown,
    watchers::Watchers,
};
use crate::condition::Status;
use crate::error::{Error, ErrorKind, Result};

/// What all nodes of a flow share.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) tokens: Tokens,
    /// The flow's own task: woken when the last token is given back.
    pub(crate) flow: AtomicWaker,
    /// Those who want to hear what operators wait for.
    pub(crate) watchers: Watchers,
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
    paused: AtomicBool,
    ended: AtomicBool,
    /// The methods of the operator that are the trait's own: a bit for each.
    defaults: AtomicU8,
    asked: AtomicU8,
    agreed: AtomicBool,
    operator: usize,
    pub(super) shown: Shown,
}

/// A method that an operator may write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    Run = 1,
    MayRun = 2,
    After = 4,
}

/// What the operator's `may_run` said. One that says no may depend on what others do, and nobody wakes it for that: if
/// others were still at work then, it is asked once more when all are at rest; and if one that had said no says yes
/// (`agreed`), all the others again.
///
/// ```text
///             no                 at rest             no
///   ALLOWED ─────────> REFUSED ─────────> AGAIN ─────────> REFUSED_AGAIN    all of these: there is no reason to ask
///      ^                  │ yes             │ yes               │ yes
///      └──────────────────┴─────────────────┴───────────────────┘ agreed
/// ```
mod asked {
    pub(super) const ALLOWED: u8 = 0;
    pub(super) const REFUSED: u8 = 1;
    pub(super) const AGAIN: u8 = 2;
    pub(super) const REFUSED_AGAIN: u8 = 3;
}

impl Rest {
    pub(crate) fn new(operators: usize) -> Arc<Self> {
        let (flow, watchers) = (AtomicWaker::new(), Watchers::default());
        Arc::new(Self { tokens: Tokens::new(operators), flow, watchers })
    }
}

impl Node {
    pub(crate) fn new(operator: usize, rest: &Arc<Rest>) -> Arc<Self> {
        Arc::new(Self {
            task: OnceLock::new(),
            changed: AtomicBool::new(false),
            other: AtomicWaker::new(),
            parking: Parking::new(&rest.tokens, operator),
            rest: rest.clone(),
            finish: AtomicBool::new(false),
            abort: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            defaults: AtomicU8::new(0),
            asked: AtomicU8::new(asked::ALLOWED),
            agreed: AtomicBool::new(false),
            operator,
            shown: Shown::new(),
        })
    }

    /// For work beside a flow's runs: no other operator's rest depends on it.
    pub(crate) fn alone() -> Arc<Self> {
        Self::new(0, &Rest::new(1))
    }

    /// Before the ports are asked, and when nobody waits at them any longer, whoever says so.
    #[inline]
    pub(crate) fn resume(&self) {
        self.parking.resume(&self.rest.tokens);
    }

    /// Nothing was ready.
    pub(crate) fn park(&self) {
        if self.parking.park(&self.rest.tokens) {
            self.rest.flow.wake();
        }
    }

    /// Everything was ready, but the operator itself said no.
    pub(super) fn park_refused(&self) {
        // All others are at rest: that is no reason to ask it again.
        if self.parking.is_last(&self.rest.tokens) {
            self.asked.store(asked::REFUSED_AGAIN, Ordering::Release);
        }
        self.park();
    }

    /// For all to see: why it does not run.
    #[inline]
    pub(super) fn show(&self, status: Status) {
        if self.shown.show(status) {
            self.rest.watchers.tell(self.operator);
        }
    }

    /// For all to see: it runs.
    #[inline]
    pub(super) fn show_running(&self) {
        if self.shown.running() {
            self.rest.watchers.tell(self.operator);
        }
    }

    pub(crate) fn shown(&self) -> &Shown {
        &self.shown
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

    /// No run begins while it is paused.
    pub(crate) fn set_paused(self: &Arc<Self>, paused: bool) {
        self.paused.store(paused, Ordering::Release);
        self.wake_by_ref();
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.abort.load(Ordering::Acquire)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Drops what it is doing.
    pub(crate) fn abort(self: &Arc<Self>) {
        self.abort.store(true, Ordering::Release);
        self.wake_by_ref();
    }

    /// The operator has ended: its token goes for good.
    pub(crate) fn end(&self) {
        self.show(Status::Never);
        if !self.ended.swap(true, Ordering::AcqRel) && self.parking.end(&self.rest.tokens) {
            self.rest.flow.wake();
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(super) fn set_default(&self, method: Method) {
        self.defaults.fetch_or(method as u8, Ordering::Relaxed);
    }

    pub(super) fn is_default(&self, method: Method) -> bool {
        self.defaults.load(Ordering::Relaxed) & method as u8 != 0
    }

    /// Its `may_run` has answered.
    pub(super) fn answered(&self, allowed: bool) {
        let before = self.asked.load(Ordering::Acquire);
        let now = match (allowed, before) {
            (true, asked::ALLOWED) => return,
            (true, _) => {
                self.agreed.store(true, Ordering::Release);
                asked::ALLOWED
            }
            (false, asked::AGAIN) => asked::REFUSED_AGAIN,
            (false, _) => asked::REFUSED,
        };
        self.asked.store(now, Ordering::Release);
    }

    /// It waits for nothing but its own `may_run`.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_parked() && matches!(self.asked.load(Ordering::Acquire), asked::REFUSED | asked::REFUSED_AGAIN)
    }

    /// All are at rest: asks those again who have said no, if there is a reason to. False if there is none.
    pub(crate) fn ask_again(nodes: &[Arc<Self>]) -> bool {
        let mut reason = false;
        for node in nodes {
            reason |= node.asked.load(Ordering::Acquire) == asked::REFUSED;
            reason |= node.agreed.swap(false, Ordering::AcqRel);
        }
        let refused: Vec<_> = nodes.iter().filter(|node| reason && node.is_refused()).collect();
        for node in &refused {
            node.asked.store(asked::AGAIN, Ordering::Release);
        }
        refused.iter().for_each(|node| node.wake_by_ref());
        !refused.is_empty()
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
        // From here on a wake is a reason for another poll. After the waker is kept: one that came before is seen below.
        self.parking.begin(&self.rest.tokens);
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
        let Woken { first, last } = self.parking.wake(&self.rest.tokens);
        if last {
            self.rest.flow.wake();
        }
        if !first {
            return;
        }
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
