//! [`Face`]: what tells a wait at a port in the middle of a run from all others.
//!
//! There are two wakers. The operator's future is polled with its [`Face`], and whoever it awaits something of keeps a
//! clone of that. Its ports keep the node's own instead. So a wait at a port in the middle of a run can be told from all
//! others: if nobody has a clone of the face, nothing but the flow's other operators can wake this one, and it gives its
//! token back while it waits, as between two runs.

use std::{
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Wake, Waker},
};

use super::{
    super::{
        only_others::Decision,
        shown::{Ask, InRun},
    },
    Node,
};
use crate::{condition::Readiness, sync::lock};

/// What an operator's future is polled with, in place of the node's own waker.
struct Face(Arc<Node>);

impl Wake for Face {
    fn wake(self: Arc<Self>) {
        self.0.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_by_ref();
    }
}

/// A face that is worn, with the waker made of it. Taken off when it is dropped.
pub(in super::super) struct Worn {
    face: Arc<Face>,
    pub(super) waker: Waker,
}

impl Worn {
    /// Another face in place of this one. Whoever has a clone of the old one can still wake the operator by it.
    pub(super) fn renew(&mut self) {
        let node = self.face.0.clone();
        self.face = Arc::new(Face(node));
        self.waker = Waker::from(self.face.clone());
        self.face.0.face.store(Arc::as_ptr(&self.face).addr(), Ordering::Relaxed);
    }

    /// How many clones of its waker are kept, beside its own.
    pub(super) fn clones(&self) -> usize {
        Arc::strong_count(&self.face).saturating_sub(2)
    }
}

impl Drop for Worn {
    fn drop(&mut self) {
        self.face.0.face.store(0, Ordering::Relaxed);
    }
}

impl Node {
    /// For the operator's future to be polled with.
    pub(in super::super) fn wear_face(self: &Arc<Self>) -> Worn {
        let face = Arc::new(Face(self.clone()));
        self.face.store(Arc::as_ptr(&face).addr(), Ordering::Relaxed);
        Worn { waker: Waker::from(face.clone()), face }
    }

    /// Whether that is the face, as the operator's future was given it. A combinator has a waker of its own, and polls
    /// again only what was woken by that.
    #[inline]
    pub(crate) fn is_face(&self, waker: &Waker) -> bool {
        let face = self.face.load(Ordering::Relaxed);
        // None is worn by an operator that has ended; and a waker that does nothing may have no data.
        face != 0 && waker.data().addr() == face
    }

    /// A wait at a port, maybe in the middle of a run: polled with `own`, the node's waker. `wait` says what is waited for.
    #[cold]
    pub(in super::super) fn poll_port<T>(
        &self,
        own: &Waker,
        what: InRun,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> std::result::Result<T, Readiness>,
    ) -> Poll<T> {
        let ours = self.is_face(task.waker());
        let answer = if ours { wait(&mut Context::from_waker(own)) } else { wait(task) };
        match answer {
            Ok(answer) => {
                if self.shown.in_run().is_some() {
                    // Beside this one the present poll may have come to other waits.
                    let others = *lock(&self.in_poll);
                    match others {
                        None => self.show_running(),
                        Some(others) => self.show_in_run(others),
                    }
                    self.end_of_wait();
                }
                Poll::Ready(answer)
            }
            Err(asked) => {
                let alone = ours && asked.needs_others();
                self.note_wait(alone);
                let mut in_poll = lock(&self.in_poll);
                let all = in_poll.map_or(what, |others| others.and(what));
                *in_poll = Some(all);
                drop(in_poll);
                self.show_in_run(all);
                Poll::Pending
            }
        }
    }

    fn show_in_run(&self, what: InRun) {
        if self.shown.show_in_run(what) {
            self.rest.watchers.tell(self.operator);
        }
    }

    /// A wait for what only others of its flow can give, though one from outside would ask for it in the same way. `wait` keeps the
    /// node's waker.
    pub(crate) fn poll_asked<T>(
        self: &Arc<Self>,
        ask: Ask,
        task: &mut Context<'_>,
        wait: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let among = lock(&self.in_poll).is_some_and(InRun::asks);
        self.shown.set_asked(ask, among);
        self.poll_port(&Waker::from(self.clone()), InRun::ASKS, task, |task| match wait(task) {
            Poll::Ready(answer) => Ok(answer),
            Poll::Pending => Err(Readiness::WAIT),
        })
    }

    /// The next wait is another one.
    #[inline]
    pub(in super::super) fn end_of_wait(&self) {
        self.only_others.end_of_wait();
    }

    /// The operator waits in the present poll; `for_others`: for nothing but others of its flow.
    pub(in super::super) fn note_wait(&self, for_others: bool) {
        self.only_others.note(for_others);
    }

    /// The present poll has come to a wait at a port, or beside one.
    #[inline]
    pub(in super::super) fn has_noted_wait(&self) -> bool {
        self.only_others.waits()
    }

    /// What it waits for in the middle of a run, if it does.
    pub(crate) fn waits_in_run(&self) -> Option<InRun> {
        self.shown.in_run()
    }

    /// Nothing will come to it: the message that it waits for in the middle of a run.
    pub(crate) fn release(self: &Arc<Self>) {
        self.released.store(true, Ordering::Release);
        self.wake_by_ref();
    }

    /// Asked where it waits for a message: it is told once, and for good where it is to end.
    pub(in super::super) fn take_release(&self) -> bool {
        self.released.swap(false, Ordering::AcqRel) || self.is_finishing()
    }

    /// The poll in which it came to wait at a port is over. False if it says nothing: another one follows at once.
    #[cold]
    pub(super) fn end_wait(&self, pending: bool, worn: &mut Worn) -> bool {
        // The next poll comes to all waits again that are still waited for.
        *lock(&self.in_poll) = None;
        match self.only_others.decide(pending, || worn.clones()) {
            Decision::KeepToken => true,
            Decision::Park => {
                self.park();
                true
            }
            Decision::Renew => {
                // A channel that was looked at once, say, keeps a clone and is waited for no more. Whatever is still waited
                // for is polled again and takes one of the new face.
                worn.renew();
                worn.face.0.wake_by_ref();
                false
            }
        }
    }
}
