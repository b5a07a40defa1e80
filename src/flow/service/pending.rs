//! [`PendingRequests`]: the requests of a service that are in flight, and how each is answered once.

use std::{
    any::Any,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
};

use slab::Slab;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::{
    error::{Error, ErrorKind, Result},
    flow::{Handle, ingress_gate::failed},
    hub::{
        Message, Reply,
        reply::{Caller, next_number},
    },
    mutants::{self, Mutant},
    operator::{operator_task::OperatorTask, run_context},
    sync::{Mutex, WakerCell, contained, discard, lock, logged},
};

/// The requests of one service that are in flight.
pub(super) struct PendingRequests<Res: Send + 'static> {
    pub(super) name: Arc<str>,
    pub(super) open: Mutex<Slab<Weak<PendingRequest<Res>>>>,
}

/// A request in flight, shared by all messages that may lead to its response.
pub(super) struct PendingRequest<Res: Send + 'static> {
    pending: Arc<PendingRequests<Res>>,
    slot: usize,
    number: u64,
    /// `None` once it is answered.
    answer: Mutex<Option<oneshot::Sender<Result<Res>>>>,
    state: Arc<RequestState>,
    /// The last operator that took one of those messages.
    seen_by: Mutex<Option<Arc<str>>>,
    flow: Handle,
    /// No message leads to the response any more. The request fails when the operator that dropped the last one has
    /// ended its run.
    is_deferred: bool,
}

impl<Res: Send + 'static> PendingRequests<Res> {
    /// The error for a limit of 0, the only reason for which a limit is closed.
    pub(super) fn limited_to_none() -> Error {
        Error::new(ErrorKind::Usage, "the service has a limit of 0 requests: set at least 1")
    }

    /// Called when the flow has ended: fails the requests that are not answered yet.
    pub(super) fn close(&self) {
        for request in self.requests() {
            // Calls a tracing subscriber, which may panic: the other requests must still be answered.
            contained("a request could not be closed", || request.leave("kept it until the flow ended"));
        }
    }

    fn requests(&self) -> Vec<Arc<PendingRequest<Res>>> {
        lock(&self.open).iter().filter_map(|(_, request)| request.upgrade()).collect()
    }
}

impl<Res: Send + 'static> PendingRequest<Res> {
    pub(super) fn new(
        pending: &Arc<PendingRequests<Res>>,
        answer: oneshot::Sender<Result<Res>>,
        state: Arc<RequestState>,
        flow: Handle,
    ) -> Arc<Self> {
        let (pending, answer, seen_by) = (pending.clone(), Mutex::new(Some(answer)), Mutex::default());
        Self { pending, slot: 0, number: next_number(), answer, state, seen_by, flow, is_deferred: false }.enter()
    }

    /// Enters the request in the list of its service.
    fn enter(mut self) -> Arc<Self> {
        let pending = self.pending.clone();
        let mut open = lock(&pending.open);
        let entry = open.vacant_entry();
        self.slot = entry.key();
        let request = Arc::new(self);
        entry.insert(Arc::downgrade(&request));
        request
    }

    /// Moves the request out of its destructor.
    fn deferred(&mut self) -> Arc<Self> {
        let answer = Mutex::new(lock(&self.answer).take());
        let seen_by = Mutex::new(lock(&self.seen_by).take());
        let (pending, state, flow) = (self.pending.clone(), self.state.clone(), self.flow.clone());
        Self { pending, slot: 0, number: self.number, answer, state, seen_by, flow, is_deferred: true }.enter()
    }

    /// Only the first answer counts.
    pub(super) fn answer(&self, answer: Result<Res>) {
        let waiting = lock(&self.answer).take();
        // Before the answer is sent: a caller that receives it and sends another request finds the slot free.
        self.state.end();
        // The caller may have given up. The destructor of a response is user code.
        if let Some(Err(back)) = waiting.map(|waiting| waiting.send(answer)) {
            discard(back);
        }
    }

    fn is_waiting(&self) -> bool {
        !self.state.done.load(Ordering::Acquire)
    }

    fn is_answered(&self) -> bool {
        lock(&self.answer).is_none()
    }

    /// Called when there will be no further answer. A request without an answer fails with the flow's failure or, if
    /// there is none, as unanswered. `last` describes for the log what its last operator did.
    fn leave(&self, last: &str) {
        if !self.is_waiting() {
            return;
        }
        let error = failed(&self.flow).unwrap_or_else(|| {
            let (service, operator) = (&*self.pending.name, lock(&self.seen_by).take());
            // The caller is answered even if the subscriber panics.
            logged(|| match operator.as_deref() {
                Some(operator) => {
                    tracing::warn!(service, operator, "a request was not answered: its last operator {last}")
                }
                None => tracing::warn!(service, "a request was not answered: no operator took it"),
            });
            Error::new(ErrorKind::Unanswered, "the request was dropped without an answer")
        });
        self.answer(Err(error));
    }
}

impl<Res: Send + 'static> Caller for PendingRequest<Res> {
    fn number(&self) -> u64 {
        self.number
    }

    fn is_waiting(&self) -> bool {
        Self::is_waiting(self)
    }

    fn fail(&self, error: Error) {
        self.answer(Err(error));
    }

    fn taken_over(&self) {
        self.state.taken_over.store(true, Ordering::Release);
        self.state.asker.wake();
    }

    fn seen_by(&self, operator: &Arc<str>) {
        *lock(&self.seen_by) = Some(operator.clone());
    }
}

/// Runs when the last message that could have led to the response was dropped.
impl<Res: Send + 'static> Drop for PendingRequest<Res> {
    fn drop(&mut self) {
        lock(&self.pending.open).try_remove(self.slot);
        if self.is_waiting() && !self.is_deferred && run_context::is_in_run_of(&self.flow.0.activity) {
            return run_context::defer(self.deferred());
        }
        self.leave("sent no response, or a hub dropped it");
    }
}

impl<Res: Message> PendingRequests<Res> {
    /// The requests of this service among those that a message answers.
    fn own(self: &Arc<Self>, reply: &Reply) -> Vec<Arc<PendingRequest<Res>>> {
        let requests = reply.callers().iter().filter_map(|caller| {
            let caller: Arc<dyn Any + Send + Sync> = caller.clone();
            caller.downcast::<PendingRequest<Res>>().ok()
        });
        requests.filter(|request| Arc::ptr_eq(&request.pending, self)).collect()
    }

    pub(super) fn fail(self: &Arc<Self>, reply: &Reply, error: &Error) {
        self.own(reply).iter().for_each(|request| request.answer(Err(error.clone())));
    }

    pub(super) fn answer(self: &Arc<Self>, reply: &Reply, response: Res) {
        let own = self.own(reply);
        let waiting: Vec<_> = own.iter().filter(|request| request.is_waiting()).collect();
        let service = &*self.name;
        match &waiting[..] {
            [] if mutants::is(Mutant::AnsweredTwice) => {
                if let Some(other) = self.requests().into_iter().find(|request| request.is_waiting()) {
                    other.answer(Ok(response));
                }
            }
            [] if reply.is_empty() || own.iter().any(|request| request.is_answered()) => {
                logged(|| {
                    tracing::warn!(service, "dropped a response that answers no request");
                });
                discard(response);
            }
            [] => discard(response),
            [request] => request.answer(Ok(response)),
            several => {
                logged(|| {
                    tracing::warn!(
                        service,
                        requests = several.len(),
                        "one response came for several requests, which fail: an operator that takes several messages in \
                         one run must state which of its messages answers which, with `cx.take_replies()` and `send_for`"
                    );
                });
                // The mistake is the operator's: `Usage` would blame the callers.
                let error = Error::new(
                    ErrorKind::Unanswered,
                    "the response cannot be distinguished from those to other requests",
                );
                several.iter().for_each(|request| request.answer(Err(error.clone())));
                discard(response);
            }
        }
    }
}

/// The caller's end of a request.
pub(super) struct PendingResponse<Res: 'static> {
    pub(super) response: oneshot::Receiver<Result<Res>>,
    pub(super) state: Arc<RequestState>,
    pub(super) service: Arc<str>,
    pub(super) flow: Option<Handle>,
}

impl<Res> PendingResponse<Res> {
    /// The operator of the same flow that waits for the response with this waker, and the number of the service's
    /// operator. `None` if the response may also come from outside the flow.
    pub(super) fn within(&self, waker: &Waker) -> Option<(Arc<OperatorTask>, usize)> {
        let control = &self.flow.as_ref()?.0;
        let node = control.operator_polled_with(waker)?;
        let service = control.names.iter().position(|name| *name == self.service)?;
        self.state.asker.register(&Waker::from(node.clone()));
        (!self.state.taken_over.load(Ordering::Acquire)).then(|| (node.clone(), service))
    }
}

impl<Res: 'static> Drop for PendingResponse<Res> {
    fn drop(&mut self) {
        self.state.end();
    }
}

/// The state of a request, shared by the caller's end and the flow's end.
#[derive(Default)]
pub(super) struct RequestState {
    /// The request was answered, or its caller gave up.
    done: AtomicBool,
    /// The slot within the limit, until then.
    slot: Mutex<Option<OwnedSemaphorePermit>>,
    /// User code has taken the reply.
    taken_over: AtomicBool,
    /// The caller, if it is an operator of the flow: notified when `taken_over` is set.
    asker: WakerCell,
}

impl RequestState {
    pub(super) fn new(slot: Option<OwnedSemaphorePermit>) -> Self {
        Self { slot: Mutex::new(slot), ..Self::default() }
    }

    fn end(&self) {
        self.done.store(true, Ordering::Release);
        let slot = lock(&self.slot).take();
        // Wakes the next caller, with no lock held.
        drop(slot);
    }
}
