//! [`ProbeWaker`]: distinguishes a wait at a port in the middle of a run from all other waits.
//!
//! There are two wakers. The operator's future is polled with its [`ProbeWaker`], and everything that it awaits keeps a
//! clone of that waker. Its ports keep the waker of the [`OperatorTask`] instead. So if no clone of the probe waker is
//! kept, only other operators of the flow can wake this one, and it returns its token while it waits, as between two
//! runs.

use std::{
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Wake, Waker},
};

use super::{
    super::{
        idle::Decision,
        status_cell::{IngressWait, RunWait},
    },
    OperatorTask, state,
};
use crate::{condition::Readiness, sync::lock};

/// The waker that an operator's future is polled with, in place of the [`OperatorTask`]'s own waker.
struct ProbeWaker(Arc<OperatorTask>);

impl Wake for ProbeWaker {
    fn wake(self: Arc<Self>) {
        self.0.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_by_ref();
    }
}

/// The current probe waker of an operator, with the `Waker` made of it. Dropping the guard removes it from the task.
pub(in super::super) struct ProbeGuard {
    probe: Arc<ProbeWaker>,
    pub(super) waker: Waker,
}

impl ProbeGuard {
    /// Replaces the probe waker by a new one. Clones of the old one can still wake the operator.
    pub(super) fn renew(&mut self) {
        let task = self.probe.0.clone();
        self.probe = Arc::new(ProbeWaker(task));
        self.waker = Waker::from(self.probe.clone());
        self.probe.0.poll.probe_addr.store(Arc::as_ptr(&self.probe).addr(), Ordering::Relaxed);
    }

    /// The number of clones of the waker that are kept, besides its own.
    pub(super) fn clones(&self) -> usize {
        Arc::strong_count(&self.probe).saturating_sub(2)
    }
}

impl Drop for ProbeGuard {
    fn drop(&mut self) {
        self.probe.0.poll.probe_addr.store(0, Ordering::Relaxed);
    }
}

impl OperatorTask {
    /// Creates the waker with which the operator's future is polled.
    pub(in super::super) fn install_probe_waker(self: &Arc<Self>) -> ProbeGuard {
        let probe = Arc::new(ProbeWaker(self.clone()));
        self.poll.probe_addr.store(Arc::as_ptr(&probe).addr(), Ordering::Relaxed);
        ProbeGuard { waker: Waker::from(probe.clone()), probe }
    }

    /// Whether `waker` is the probe waker that the operator's future was given. A combinator has a waker of its own,
    /// and polls again only what that waker has woken.
    #[inline]
    pub(crate) fn is_probe_waker(&self, waker: &Waker) -> bool {
        let probe_addr = self.poll.probe_addr.load(Ordering::Relaxed);
        // An operator that has ended has no probe waker; and the data of a no-op waker can be null.
        probe_addr != 0 && waker.data().addr() == probe_addr
    }

    /// Polls a wait at a port, possibly in the middle of a run, with `own`, the task's own waker. `what` is what the
    /// run waits for.
    #[cold]
    pub(in super::super) fn poll_port<T>(
        &self,
        own: &Waker,
        what: RunWait,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> std::result::Result<T, Readiness>,
    ) -> Poll<T> {
        let ours = self.is_probe_waker(task.waker());
        let answer = if ours { wait(&mut Context::from_waker(own)) } else { wait(task) };
        match answer {
            Ok(answer) => {
                if self.status.in_run().is_some() {
                    // The current poll might have reached other waits besides this one.
                    let others = *lock(&self.in_run);
                    match others {
                        None => self.publish_running(),
                        Some(others) => self.publish_in_run(others),
                    }
                    self.end_of_wait();
                }
                Poll::Ready(answer)
            }
            Err(asked) => {
                let alone = ours && asked.needs_others();
                self.note_wait(alone);
                let mut in_run = lock(&self.in_run);
                let all = in_run.map_or(what, |others| others.and(what));
                *in_run = Some(all);
                drop(in_run);
                self.publish_in_run(all);
                Poll::Pending
            }
        }
    }

    fn publish_in_run(&self, what: RunWait) {
        if self.status.set_in_run(what) {
            self.activity.watchers.notify(self.operator);
        }
    }

    /// Polls a wait that only other operators of the flow can end, though the run makes its request like an external
    /// caller. `wait` keeps the task's own waker.
    pub(crate) fn poll_ingress_wait<T>(
        self: &Arc<Self>,
        ask: IngressWait,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let among = lock(&self.in_run).is_some_and(RunWait::asks);
        self.status.add_ingress_wait(ask, among);
        self.poll_port(&Waker::from(self.clone()), RunWait::ASKS, task, |task| match wait(task) {
            Poll::Ready(answer) => Ok(answer),
            Poll::Pending => Err(Readiness::WAIT),
        })
    }

    #[inline]
    pub(in super::super) fn end_of_wait(&self) {
        self.poll.waits.end_of_wait();
    }

    /// Notes that the operator waits in the current poll. `for_others`: only for other operators of its flow.
    pub(in super::super) fn note_wait(&self, for_others: bool) {
        self.poll.waits.note(for_others);
    }

    /// True if the current poll has reached a wait at a port, or one that is polled beside a port.
    #[inline]
    pub(in super::super) fn has_noted_wait(&self) -> bool {
        self.poll.waits.any()
    }

    /// What the operator waits for in the middle of a run, if it is in a run and waits.
    pub(crate) fn waits_in_run(&self) -> Option<RunWait> {
        self.status.in_run()
    }

    /// Ends the operator's wait for a message in the middle of a run, since no message will arrive.
    pub(crate) fn release(self: &Arc<Self>) {
        self.set(state::RELEASED, true);
        self.wake_by_ref();
    }

    /// Whether to end the operator's wait for a message: true once per [`release`](Self::release), and always once the
    /// operator is to end.
    pub(in super::super) fn take_release(&self) -> bool {
        self.has(state::RELEASED) && self.take(state::RELEASED) || self.is_finishing()
    }

    /// Called after a poll that reached a wait at a port. Returns false if the poll decides nothing, since another poll
    /// follows at once.
    #[cold]
    pub(super) fn end_wait(&self, pending: bool, probe: &mut ProbeGuard) -> bool {
        // The next poll reaches all waits again that are still pending.
        *lock(&self.in_run) = None;
        match self.poll.waits.decide(pending, || probe.clones()) {
            Decision::KeepToken => true,
            Decision::Park => {
                self.park();
                true
            }
            Decision::Renew => {
                // For example, a channel that was polled once keeps a clone although nothing waits for it any more. All
                // waits that are still pending are polled again, and take a clone of the new waker.
                probe.renew();
                probe.probe.0.wake_by_ref();
                false
            }
        }
    }
}
