//! [`IngressGate`]: the entry of messages into a running flow, and the permits to send them.
//!
//! A hub wakes one writer, but an ingress has many senders. So the free slots of the hub become permits of a semaphore,
//! which wakes as many senders, in the order of their calls. A sender that finds no permit checks whether the hub has
//! room by now. If not, the hub wakes the operator, which checks again.
//!
//! ```text
//!   the hub's room ≥ slots given out = free permits + permits that senders hold and have not used
//! ```
//!
//! An unused permit goes to the next sender. So readiness can be promised: the holder of a permit sends without
//! waiting.

use std::{
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};

use super::{Handle, blank_queue::BlankQueue, starting::may_wait_for};
use crate::{
    clock,
    condition::Readiness,
    error::{CallerErrors, Error, ErrorKind, Result},
    hub::{
        Message, RawEnvelopes, SendError,
        external::SentBy,
        external_guard::Boundary,
        parcel::{Load, Parcel},
        response_transfer::ReturnedGuards,
    },
    operator::{
        Cx, ExternalSend, Output,
        activity::FlowActivity,
        pacing::Pacing,
        senders::Senders,
        shared_port::{PortRef, SharedPort},
        status_cell::IngressWait,
    },
    sync::{Deferred, DiscardOnDrop, Level, Mutex, ProxyWaker, discard, lock, logged, proxied, wake},
};

/// The most slots that are given out at once, for a hub that always has room.
const MAX: usize = 1024;

/// The state of the flow, published by the operator. Once the operator is dropped, the flow does not run again.
pub(super) enum Stage<M: Message> {
    Before,
    Open(Arc<IngressGate<M>>),
    /// A run has ended, and the next one has not begun.
    Ended(Handle),
}

/// An ingress while its flow runs.
pub(super) struct IngressGate<M: Message> {
    output: PortRef<Output<M>>,
    permits: Arc<Semaphore>,
    /// The hub's slots that have become permits, and that no message has taken yet.
    given_out: Mutex<usize>,
    blanks: BlankQueue,
    closed: Notify,
    /// The sends in progress. The operator keeps its token until all of them have ended.
    senders: Senders,
    activity: Arc<FlowActivity>,
    boundary: Arc<Boundary>,
    owner: Waker,
    /// Set if the reader expects the next message.
    pacing: Option<Arc<Pacing>>,
    /// The operator's number.
    operator: usize,
    flow: Handle,
}

/// A reserved slot for one message.
pub(super) struct SendPermit<M: Message> {
    gate: Arc<IngressGate<M>>,
    permit: OwnedSemaphorePermit,
}

impl<M: Message> Clone for Stage<M> {
    fn clone(&self) -> Self {
        match self {
            Self::Before => Self::Before,
            Self::Open(gate) => Self::Open(gate.clone()),
            Self::Ended(flow) => Self::Ended(flow.clone()),
        }
    }
}

/// The reason why the ingress is closed, for a caller outside the flow.
pub(super) fn ended(flow: &Handle) -> Error {
    failed(flow).unwrap_or_else(|| {
        let why = if flow.is_stopping() { "the flow was stopped" } else { "this ingress of the flow is closed" };
        Error::new(ErrorKind::Closed, why)
    })
}

/// The error that the flow failed with, as shown to a caller outside. The log and the flow's own error have the
/// details.
pub(super) fn failed(flow: &Handle) -> Option<Error> {
    const ABORTED: &str = "the flow was aborted";
    match flow.failure() {
        Some(failure) if failure.is_cancelled() => Some(failure.for_caller(ABORTED)),
        Some(failure) => Some(failure.for_caller("the flow has failed")),
        None => flow.is_aborted().then(|| Error::new(ErrorKind::Cancelled, ABORTED)),
    }
}

fn thread_over() -> Error {
    Error::new(ErrorKind::Usage, "this thread is exiting and cannot wait: send from another thread")
}

impl<M: Message> Stage<M> {
    /// The reason why sending fails, if there will be no further run.
    pub(super) fn refusal(&self) -> Error {
        match self {
            Self::Before => Error::new(ErrorKind::Closed, "the flow was dropped before it ran"),
            Self::Open(gate) => ended(&gate.flow),
            Self::Ended(flow) => ended(flow),
        }
    }
}

impl<M: Message> IngressGate<M> {
    pub(super) fn new(output: &SharedPort<Output<M>>, cx: &Cx) -> Arc<Self> {
        let errors = CallerErrors::new(cx.flow().name(), cx.name());
        let output = output.share();
        let reader = output.with(|output| output.departure().reader().cloned()).flatten();
        Arc::new(Self {
            output,
            permits: Arc::new(Semaphore::new(0)),
            given_out: Mutex::at(Level::Ingress, 0),
            blanks: BlankQueue::new(),
            closed: Notify::new(),
            senders: Senders::new(),
            activity: cx.operator_task().activity().clone(),
            boundary: Boundary::of_callers(cx.operator_task().activity().clone(), errors),
            owner: cx.waker(),
            pacing: Pacing::of(cx, reader),
            operator: cx.operator_task().operator(),
            flow: cx.flow(),
        })
    }

    /// The gate of the current run, or of the next one. An error if that run ends before it has opened its gate, or if
    /// there will be none.
    pub(super) async fn once_open(flow: u64, mut stage: watch::Receiver<Stage<M>>) -> Result<Arc<Self>> {
        let is_open = matches!(&*stage.borrow_and_update(), Stage::Open(_));
        {
            let mut changed = pin!(proxied(stage.changed()));
            let opened = poll_fn(|task| match clock::is_thread_over() {
                true => Poll::Ready(Err(thread_over())),
                false if is_open => Poll::Ready(Ok(())),
                // An error means that the operator was dropped: this stage is final.
                false => match changed.as_mut().poll(task) {
                    Poll::Ready(_) => Poll::Ready(Ok(())),
                    Poll::Pending => {
                        may_wait_for(flow).map_or_else(|error| Poll::Ready(Err(error)), |()| Poll::Pending)
                    }
                },
            });
            opened.await?;
        }
        match &*stage.borrow() {
            Stage::Open(gate) => Ok(gate.clone()),
            over => Err(over.refusal()),
        }
    }

    /// Resolves when the ingress is closed, with the reason.
    pub(super) async fn closed(&self) -> Error {
        loop {
            // Created before the check: it also receives notifications that come before it is polled.
            let notified = self.closed.notified();
            if self.is_closed() {
                return ended(&self.flow);
            }
            proxied(notified).await;
        }
    }

    /// Whether the hub can deliver a message to its reader, as far as that is known now.
    pub(super) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        self.departure()?.accepts(message, by)
    }

    fn departure(&self) -> Result<ExternalSend<M>> {
        match self.output.with(|output| (!output.is_closed()).then(|| output.departure())).flatten() {
            Some(departure) if !self.flow.is_stopping() => Ok(departure),
            _ => Err(ended(&self.flow)),
        }
    }

    pub(super) async fn permit(self: Arc<Self>) -> Result<SendPermit<M>> {
        if let Some(permit) = self.try_permit()? {
            return Ok(permit);
        }
        let (mut acquired, proxy) = (pin!(self.permits.clone().acquire_owned()), ProxyWaker::new());
        let mut acquired = |task: &mut Context<'_>| acquired.as_mut().poll(&mut proxy.stand_in(task));
        let permit = poll_fn(|task| match self.flow.0.operator_polled_with(task.waker()) {
            Some(operator) => operator.poll_ingress_wait(IngressWait::Room(self.operator), task, &mut acquired),
            None => acquired(task),
        });
        match permit.await {
            Ok(permit) if !self.flow.is_stopping() => Ok(SendPermit { gate: self, permit }),
            _ => Err(ended(&self.flow)),
        }
    }

    pub(super) fn try_permit(self: &Arc<Self>) -> Result<Option<SendPermit<M>>> {
        if self.is_closed() {
            return Err(ended(&self.flow));
        }
        let mut acquired = self.permits.clone().try_acquire_owned();
        if matches!(acquired, Err(TryAcquireError::NoPermits)) && self.add_permits() {
            acquired = self.permits.clone().try_acquire_owned();
        }
        match acquired {
            Ok(permit) => Ok(Some(SendPermit { gate: self.clone(), permit })),
            Err(TryAcquireError::NoPermits) if !self.permits.is_closed() => Ok(None),
            Err(_) => Err(ended(&self.flow)),
        }
    }

    /// Calls `act` with the output, which puts messages into `used` slots, and turns further free slots into permits.
    /// The operator is woken when more slots are free. Returns false if the ingress is closed.
    fn use_slots<R>(&self, used: usize, act: impl FnOnce(&mut Output<M>) -> R) -> (Option<R>, bool) {
        let _later = Deferred::new();
        // Held during `act`: no sender may see a slot that is neither given out nor taken, or both.
        let mut given_out = lock(&self.given_out);
        let mut owner = Context::from_waker(&self.owner);
        let mut more = 0;
        // Before `act`, which may panic: those slots are used in any case.
        *given_out = given_out.saturating_sub(used);
        let used = self.output.with(|output| {
            let done = act(output);
            while *given_out + more < MAX {
                match output.poll_queue_room(*given_out + more + 1, &mut owner) {
                    Readiness::READY => more += 1,
                    Readiness::NEVER => return (done, false),
                    _ => break,
                }
            }
            (done, !output.is_closed())
        });
        *given_out += more;
        drop(given_out);
        let (done, open) = used.map_or((None, false), |(done, open)| (Some(done), open));
        if open {
            self.permits.add_permits(more);
        } else {
            self.close();
        }
        (done, open)
    }

    /// Called when the operator was woken, since there might be slots or blank envelopes. Returns false if the ingress
    /// is closed.
    pub(super) fn on_wake(&self) -> bool {
        let needed = self.blanks.least_needed();
        if needed.and_then(|needed| self.free_blanks(needed)).is_some_and(|free| self.blanks.wake_first(free)) {
            // Polled again after that caller: further envelopes might be in the pool, or the same ones if the caller
            // did not take them.
            wake(self.owner.clone());
        }
        self.add_permits()
    }

    /// The number of blank envelopes in the pool, if there are `needed`; `usize::MAX` if there never will be. `None` if
    /// there are fewer now: the operator is woken when one is returned.
    fn free_blanks(&self, needed: usize) -> Option<usize> {
        let mut owner = Context::from_waker(&self.owner);
        match self.output.with(|output| output.poll_free_blanks(needed, &mut owner)) {
            Some(Poll::Ready(free)) => Some(free),
            Some(Poll::Pending) => None,
            None => Some(usize::MAX),
        }
    }

    /// Turns the hub's free slots into permits. Returns false if the ingress is closed.
    fn add_permits(&self) -> bool {
        self.use_slots(0, |_| ()).1
    }

    /// True if no permit is given out any more, from the moment at which the flow is stopped.
    pub(super) fn is_closed(&self) -> bool {
        self.permits.is_closed() || self.flow.is_stopping()
    }

    pub(super) fn close(&self) {
        // The semaphore wakes under its lock.
        let _later = Deferred::new();
        if self.senders.close(&self.activity.tokens) {
            self.activity.flow.wake();
        }
        self.output.with(Output::close);
        self.permits.close();
        self.blanks.wake_all();
        self.closed.notify_waiters();
    }
}

/// A send in progress: the flow is not at rest until this is dropped, even if the gate is closed.
struct Sending<'a, M: Message>(&'a IngressGate<M>);

impl<'a, M: Message> Sending<'a, M> {
    /// `None` once the gate is closed.
    fn begin(gate: &'a IngressGate<M>) -> Option<Self> {
        gate.senders.enter().then_some(Self(gate))
    }
}

impl<M: Message> Drop for Sending<'_, M> {
    fn drop(&mut self) {
        let activity = &self.0.activity;
        if self.0.senders.leave(&activity.tokens) {
            activity.flow.wake();
        }
    }
}

impl<M: Message> SendPermit<M> {
    pub(super) async fn once_open(flow: u64, stage: watch::Receiver<Stage<M>>) -> Result<Self> {
        IngressGate::once_open(flow, stage).await?.permit().await
    }

    /// True if the permit cannot be used: the flow's run has ended, or is about to.
    pub(super) fn is_void(&self) -> bool {
        self.gate.is_closed()
    }

    /// Sends without waiting. `load` is called for a message that is accepted.
    pub(super) fn send(
        self,
        mut message: DiscardOnDrop<M>,
        by: SentBy,
        load: impl FnOnce(&Handle) -> Option<Load>,
    ) -> Result<(), SendError<M>> {
        let Self { gate, permit } = self;
        // Dropped last, after all consequences of the send.
        let mut sending = None;
        // Dropped after the message, so that the flow does not appear to be at rest in between.
        let mut came_back = ReturnedGuards::default();
        let departure = match gate.departure() {
            Ok(departure) => departure,
            Err(ended) => return Err(SendError::new(message.take(), ended)),
        };
        // Runs the message's own code, with no lock held: it may panic, which returns the permit, or send a message.
        if let Some(Err(refused)) = message.get_mut().map(|message| departure.accepts(message, by)) {
            return Err(SendError::new(message.take(), refused));
        }
        let load = departure.with_journey(load(&gate.flow));
        let mut parcel = DiscardOnDrop::none();
        *parcel.place() = message.take().map(|message| Parcel::new(message, load));
        let departed = parcel.get_mut().map(|parcel| {
            came_back.take(&mut parcel.message, |boundary| boundary.has_flow_of(&gate.boundary));
            departure.prepare(parcel)
        });
        let Some(departed) = departed else { return Err(SendError::new(None, ended(&gate.flow))) };
        permit.forget();
        let (place, mut dropped) = (parcel.place(), None);
        gate.pacing.iter().for_each(|pacing| pacing.note_send());
        let (sent, _) = gate.use_slots(1, |output| match &departed {
            Err(error) => Err(error.clone()),
            Ok(departed) if !output.is_closed() && !gate.flow.is_stopping() => {
                sending = Sending::begin(&gate);
                match &sending {
                    Some(_) => output.try_send_departed(place, departed, &mut dropped),
                    None => Ok(()),
                }
            }
            Ok(_) => Ok(()),
        });
        let sent = sent.map(|sent| sent.and_then(|()| departure.move_queued()));
        // Dropped with no lock held, since the drop of a message may send another one.
        discard(dropped);
        if let Some(parcel) = parcel.get_mut() {
            came_back.put_back(&mut parcel.message);
        }
        match (sent, parcel.take()) {
            (Some(Err(error)), left) => {
                let fate = match left {
                    Some(_) => "could not be sent into the flow",
                    None => "was lost on its way into the flow",
                };
                logged(|| {
                    tracing::warn!(flow = gate.flow.name(), error = %format_args!("{error:#}"), "a message from outside {fate}");
                });
                let error = error.for_caller(&format!("the message {fate}"));
                Err(SendError::new(left.map(|parcel| parcel.message), error))
            }
            (_, None) => Ok(()),
            (_, Some(parcel)) => Err(SendError::new(Some(parcel.message), ended(&gate.flow))),
        }
    }
}

impl<M: Message> IngressGate<M> {
    /// Takes `count` blank envelopes in one step, once so many are free.
    pub(super) async fn blanks(&self, count: usize) -> Result<RawEnvelopes> {
        if let Some(blanks) = self.try_blanks(count)? {
            return Ok(blanks);
        }
        let caller = self.blanks.join(count);
        poll_fn(|task| {
            caller.register(task.waker());
            match self.try_blanks(count) {
                Ok(None) => Poll::Pending,
                Ok(Some(blanks)) => Poll::Ready(Ok(blanks)),
                Err(error) => Poll::Ready(Err(error)),
            }
        })
        .await
    }

    fn try_blanks(&self, count: usize) -> Result<Option<RawEnvelopes>> {
        let mut owner = Context::from_waker(&self.owner);
        // Outlives the access to the output: an envelope is dropped with no lock held.
        let mut blanks = RawEnvelopes::new();
        let polled = self.output.with(|output| match output.poll_blanks(count, &mut blanks, &mut owner) {
            Poll::Pending => (Poll::Pending, output.blank_count()),
            taken => (taken, None),
        });
        match polled {
            Some((Poll::Ready(Ok(())), _)) => {
                blanks.iter_mut().for_each(|blank| self.boundary.guard_one(blank));
                Ok(Some(blanks))
            }
            Some((Poll::Pending, Some(there))) if there < count => {
                let why = format!(
                    "{count} blank envelopes at the same time are more than the {there} that the hub has: set {count} or \
                     more with `HubOptions::envelopes`"
                );
                Err(Error::new(ErrorKind::Usage, why))
            }
            Some((Poll::Pending, _)) => Ok(None),
            Some((Poll::Ready(Err(_)), _)) if failed(&self.flow).is_some() => Err(ended(&self.flow)),
            Some((Poll::Ready(Err(error)), _)) if !error.is_closed() => {
                logged(|| {
                    tracing::warn!(flow = self.flow.name(), error = %format_args!("{error:#}"), "no blank envelope for a caller outside of the flow");
                });
                let message = match error.kind() {
                    ErrorKind::Usage => {
                        "the hub has no blank envelopes: set their size with `HubOptions::envelope_bytes`"
                    }
                    _ => "no blank envelope is available",
                };
                Err(error.for_caller(message))
            }
            Some((Poll::Ready(Err(_)), _)) | None => Err(ended(&self.flow)),
        }
    }
}

/// Closes the gate when a run ends, in whatever way.
pub(super) struct CloseGateOnDrop<'a, M: Message>(pub(super) &'a IngressGate<M>);

impl<M: Message> Drop for CloseGateOnDrop<'_, M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The acquisition of a resource by polling. The resource is kept until it is taken, and released on drop.
pub(super) enum Acquisition<T> {
    No,
    Waiting(Pin<Box<dyn Future<Output = Result<T>> + Send + Sync>>),
    Has(T),
}

impl<T> Acquisition<T> {
    /// Polls the acquisition, which `ask` begins unless it is in progress. A resource or a wait that belongs to an
    /// earlier run of the flow (`is_void`) is dropped and acquired again.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        is_void: impl Fn(&T) -> bool,
        ask: impl Fn() -> Result<Self>,
    ) -> Poll<Result<()>> {
        if matches!(self, Self::Has(it) if is_void(it)) {
            *self = Self::No;
        }
        let mut is_old = !matches!(self, Self::No);
        loop {
            match self {
                Self::Has(_) => return Poll::Ready(Ok(())),
                Self::No => *self = ask()?,
                Self::Waiting(wait) => {
                    let outcome = ready!(wait.as_mut().poll(cx));
                    *self = Self::No;
                    match outcome {
                        Ok(it) if !is_old || !is_void(&it) => *self = Self::Has(it),
                        Err(error) if !is_old => return Poll::Ready(Err(error)),
                        _ => is_old = false,
                    }
                }
            }
        }
    }

    pub(super) fn take(&mut self) -> Option<T> {
        match mem::replace(self, Self::No) {
            Self::Has(it) => Some(it),
            Self::No | Self::Waiting(_) => None,
        }
    }
}
