//! [`Door`]: where messages come into a flow from outside, while it runs; and the places that it has for them.
//!
//! A hub wakes one writer, and here there are many. So its free places become permits of a semaphore, which
//! wakes as many as there are and in the order of asking. Who asks and finds none looks whether the hub has room by now;
//! if not, the hub wakes the operator, and that one looks again.
//!
//! ```text
//!   the hub's room ≥ places given out = permits that nobody has + permits that somebody has and has not used
//! ```
//!
//! A permit that is not used goes to the next who asks. So readiness can be promised: who has a permit sends without waiting.

use std::{
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};

use super::{Handle, SendError, blank_queue::BlankQueue, starting::may_wait_for};
use crate::{
    clock,
    condition::Readiness,
    error::{CallerErrors, Error, ErrorKind, Result},
    hub::{
        Envelope, Message,
        abroad::{Boundary, CameBack},
        baggage::{Load, Parcel},
        sender::SentBy,
    },
    memory::Plain,
    operator::{
        Cx, Departure, Output,
        lent::{Lent, Loan},
        node::Rest,
        senders::Senders,
        shown::Ask,
    },
    sync::{Deferred, Discarded, Level, Mutex, ProxyWaker, discard, lock, logged, proxied, wake},
};

/// Places that are given out at once, at most: of a hub that always has room.
const MOST: usize = 1024;

/// How far the flow is. It is published by the operator: once that is dropped, the flow runs no more.
pub(super) enum Stage<M: Message> {
    /// It has not run yet.
    Before,
    Open(Arc<Door<M>>),
    /// A run has ended, and the next one has not begun.
    Ended(Handle),
}

/// An ingress while its flow runs.
pub(super) struct Door<M: Message> {
    output: Loan<Output<M>>,
    places: Arc<Semaphore>,
    /// Places of the hub that are, or were, permits, and that no message has taken yet.
    given_out: Mutex<usize>,
    /// Those that wait for a blank envelope.
    blanks: BlankQueue,
    /// Nothing is sent any more.
    closed: Notify,
    /// Sends in progress. The operator keeps its token until this is closed.
    senders: Senders,
    rest: Arc<Rest>,
    /// Blank envelopes leave the flow here.
    boundary: Arc<Boundary>,
    /// The operator's waker, and its number.
    owner: Waker,
    desk: usize,
    flow: Handle,
}

/// A place for one message.
pub(super) struct Place<M: Message> {
    door: Arc<Door<M>>,
    permit: OwnedSemaphorePermit,
}

impl<M: Message> Clone for Stage<M> {
    fn clone(&self) -> Self {
        match self {
            Self::Before => Self::Before,
            Self::Open(door) => Self::Open(door.clone()),
            Self::Ended(flow) => Self::Ended(flow.clone()),
        }
    }
}

/// Why nothing can be sent any more, for a caller outside of the flow.
pub(super) fn ended(flow: &Handle) -> Error {
    failed(flow).unwrap_or_else(|| {
        let why = if flow.is_stopping() { "the flow was stopped" } else { "the flow takes no more messages here" };
        Error::new(ErrorKind::Closed, why)
    })
}

/// What the flow has failed with, as a caller outside of it is given it. All of it is in the log and in the flow's own error.
pub(super) fn failed(flow: &Handle) -> Option<Error> {
    const ABORTED: &str = "the flow was aborted";
    match flow.failure() {
        Some(failure) if failure.is_cancelled() => Some(failure.for_caller(ABORTED)),
        Some(failure) => Some(failure.for_caller("the flow has failed")),
        None => flow.is_aborted().then(|| Error::new(ErrorKind::Cancelled, ABORTED)),
    }
}

fn thread_over() -> Error {
    Error::new(ErrorKind::Usage, "this thread is at its end, and waits for nothing: send from another one")
}

impl<M: Message> Stage<M> {
    /// Why nothing can be sent, if no further run comes.
    pub(super) fn refusal(&self) -> Error {
        match self {
            Self::Before => Error::new(ErrorKind::Closed, "the flow was dropped before it ran"),
            Self::Open(door) => ended(&door.flow),
            Self::Ended(flow) => ended(flow),
        }
    }
}

impl<M: Message> Door<M> {
    pub(super) fn new(output: &Lent<Output<M>>, cx: &Cx) -> Arc<Self> {
        let errors = CallerErrors::new(cx.flow().name(), cx.name());
        Arc::new(Self {
            output: output.lend(),
            places: Arc::new(Semaphore::new(0)),
            given_out: Mutex::at(Level::Ingress, 0),
            blanks: BlankQueue::new(),
            closed: Notify::new(),
            senders: Senders::new(),
            rest: cx.node().rest().clone(),
            boundary: Boundary::of_callers(cx.node().rest().clone(), errors),
            owner: cx.waker(),
            desk: cx.node().operator(),
            flow: cx.flow(),
        })
    }

    /// That of the present run, or else of the next one. An error if that ends before it has opened this, or never comes.
    pub(super) async fn once_open(flow: u64, mut stage: watch::Receiver<Stage<M>>) -> Result<Arc<Self>> {
        let is_open = matches!(&*stage.borrow_and_update(), Stage::Open(_));
        {
            let mut changed = pin!(proxied(stage.changed()));
            let opened = poll_fn(|task| match clock::is_thread_over() {
                true => Poll::Ready(Err(thread_over())),
                false if is_open => Poll::Ready(Ok(())),
                // An error is that the operator is gone: the stage is the last one.
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
            Stage::Open(door) => Ok(door.clone()),
            over => Err(over.refusal()),
        }
    }

    /// Resolves when nothing can be sent any more, with the reason.
    pub(super) async fn closed(&self) -> Error {
        loop {
            // It hears of what comes from here on, polled or not.
            let notified = self.closed.notified();
            if self.is_closed() {
                return ended(&self.flow);
            }
            proxied(notified).await;
        }
    }

    /// Whether the hub can bring a message to its reader, as far as that is known now.
    pub(super) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        self.departure()?.accepts(message, by)
    }

    fn departure(&self) -> Result<Departure<M>> {
        match self.output.with(|output| (!output.is_closed()).then(|| output.departure())).flatten() {
            Some(departure) if !self.flow.is_stopping() => Ok(departure),
            _ => Err(ended(&self.flow)),
        }
    }

    pub(super) async fn place(self: Arc<Self>) -> Result<Place<M>> {
        if let Some(place) = self.try_place()? {
            return Ok(place);
        }
        let (mut acquired, proxy) = (pin!(self.places.clone().acquire_owned()), ProxyWaker::new());
        let mut acquired = |task: &mut Context<'_>| acquired.as_mut().poll(&mut proxy.stand_in(task));
        let permit = poll_fn(|task| match self.flow.0.asker(task.waker()) {
            Some(operator) => operator.poll_asked(Ask::Room(self.desk), task, &mut acquired),
            None => acquired(task),
        });
        match permit.await {
            Ok(permit) if !self.flow.is_stopping() => Ok(Place { door: self, permit }),
            _ => Err(ended(&self.flow)),
        }
    }

    pub(super) fn try_place(self: &Arc<Self>) -> Result<Option<Place<M>>> {
        if self.is_closed() {
            return Err(ended(&self.flow));
        }
        let mut asked = self.places.clone().try_acquire_owned();
        if matches!(asked, Err(TryAcquireError::NoPermits)) && self.look() {
            asked = self.places.clone().try_acquire_owned();
        }
        match asked {
            Ok(permit) => Ok(Some(Place { door: self.clone(), permit })),
            Err(TryAcquireError::NoPermits) if !self.places.is_closed() => Ok(None),
            Err(_) => Err(ended(&self.flow)),
        }
    }

    /// Does something with the output by which `used` places get their messages, and gives out what other places the hub
    /// has by then. The operator is woken when there are more. False if nothing can be sent any more.
    fn use_places<R>(&self, used: usize, act: impl FnOnce(&mut Output<M>) -> R) -> (Option<R>, bool) {
        let _later = Deferred::new();
        // Held meanwhile: nobody else may see a place that is neither given out nor taken, nor one that is both.
        let mut given_out = lock(&self.given_out);
        let mut owner = Context::from_waker(&self.owner);
        let mut more = 0;
        // Before `act`, which may panic: those places are used however it ends.
        *given_out = given_out.saturating_sub(used);
        let used = self.output.with(|output| {
            let done = act(output);
            while *given_out + more < MOST {
                match output.poll_places(*given_out + more + 1, &mut owner) {
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
            self.places.add_permits(more);
        } else {
            self.close();
        }
        (done, open)
    }

    /// The operator was woken: there may be places, or blank envelopes. False if nothing can be sent any more.
    pub(super) fn tend(&self) -> bool {
        if !self.blanks.is_empty() && self.has_blank() && self.blanks.wake_first() {
            // After that one: another envelope may be at home, or the same, if it was dropped or is not polled.
            wake(self.owner.clone());
        }
        self.look()
    }

    /// A blank envelope is at home, or none will ever be. If not, the operator is woken when one comes.
    fn has_blank(&self) -> bool {
        let mut owner = Context::from_waker(&self.owner);
        self.output.with(|output| output.poll_has_blank(&mut owner)).is_none_or(|there| there.is_ready())
    }

    /// Are there places by now? False if nothing can be sent any more.
    fn look(&self) -> bool {
        self.use_places(0, |_| ()).1
    }

    /// No place is given out any more: from the moment on at which the flow was stopped, too, before the operator hears of it.
    pub(super) fn is_closed(&self) -> bool {
        self.places.is_closed() || self.flow.is_stopping()
    }

    /// Nothing more is sent, and whoever waits is told.
    pub(super) fn close(&self) {
        // The semaphore wakes under its lock.
        let _later = Deferred::new();
        if self.senders.close(&self.rest.tokens) {
            self.rest.flow.wake();
        }
        self.output.with(Output::close);
        self.places.close();
        self.blanks.wake_all();
        self.closed.notify_waiters();
    }
}

/// A send in progress: the flow is not at rest until this is dropped, also once the door is closed.
struct Sending<'a, M: Message>(&'a Door<M>);

impl<'a, M: Message> Sending<'a, M> {
    /// `None` once the door is closed.
    fn begin(door: &'a Door<M>) -> Option<Self> {
        door.senders.enter().then_some(Self(door))
    }
}

impl<M: Message> Drop for Sending<'_, M> {
    fn drop(&mut self) {
        let rest = &self.0.rest;
        if self.0.senders.leave(&rest.tokens) {
            rest.flow.wake();
        }
    }
}

impl<M: Message> Place<M> {
    /// One in a flow, when that runs and has it.
    pub(super) async fn once_open(flow: u64, stage: watch::Receiver<Stage<M>>) -> Result<Self> {
        Door::once_open(flow, stage).await?.place().await
    }

    /// Nothing can be sent there: its run of the flow is over, or about to be.
    pub(super) fn is_void(&self) -> bool {
        self.door.is_closed()
    }

    /// Sends without waiting. `load` is called for a message that is accepted.
    pub(super) fn send(
        self,
        mut message: Discarded<M>,
        by: SentBy,
        load: impl FnOnce(&Handle) -> Option<Load>,
    ) -> Result<(), SendError<M>> {
        let Self { door, permit } = self;
        // Dropped last: all that follows from the message has happened by then.
        let mut sending = None;
        // Dropped after the message: no moment of rest is seen in between.
        let mut came_back = CameBack::default();
        let departure = match door.departure() {
            Ok(departure) => departure,
            Err(ended) => return Err(SendError::new(message.take(), ended)),
        };
        // The message's own code, with no lock held: it may panic, which gives the permit back, or send here itself.
        if let Some(Err(refused)) = message.get_mut().map(|message| departure.accepts(message, by)) {
            return Err(SendError::new(message.take(), refused));
        }
        let load = load(&door.flow);
        let mut parcel = Discarded::none();
        *parcel.place() = message.take().map(|message| Parcel::with(message, load));
        let departed = parcel.get_mut().map(|parcel| {
            came_back.take(&mut parcel.message, |boundary| boundary.is_beside(&door.boundary));
            departure.of(&mut parcel.message)
        });
        let Some(departed) = departed else { return Err(SendError::new(None, ended(&door.flow))) };
        permit.forget();
        let (place, mut dropped) = (parcel.place(), None);
        let (sent, _) = door.use_places(1, |output| match &departed {
            Err(error) => Err(error.again()),
            Ok(departed) if !output.is_closed() && !door.flow.is_stopping() => {
                sending = Sending::begin(&door);
                match &sending {
                    Some(_) => output.try_send_departed(place, departed, &mut dropped),
                    None => Ok(()),
                }
            }
            Ok(_) => Ok(()),
        });
        let sent = sent.map(|sent| sent.and_then(|()| departure.arrive()));
        // Here, where no lock is held: a message that is dropped may send another one.
        discard(dropped);
        if let Some(parcel) = parcel.get_mut().filter(|_| !matches!(sent, Some(Err(_)))) {
            came_back.put_back(&mut parcel.message);
        }
        match (sent, parcel.take()) {
            (Some(Err(error)), left) => {
                discard(left);
                logged(|| {
                    tracing::warn!(flow = door.flow.name(), %error, "a message from outside was lost on its way into the flow");
                });
                Err(SendError::new(None, error.for_caller("the message was lost on its way into the flow")))
            }
            (_, None) => Ok(()),
            (_, Some(parcel)) => Err(SendError::new(Some(parcel.message), ended(&door.flow))),
        }
    }
}

impl<T: Plain> Door<Envelope<T>> {
    /// A blank envelope, once there is one.
    pub(super) async fn blank(&self) -> Result<Envelope<T>> {
        if let Some(blank) = self.try_blank()? {
            return Ok(blank);
        }
        let caller = self.blanks.join();
        poll_fn(|task| {
            caller.register(task.waker());
            match self.try_blank() {
                Ok(None) => Poll::Pending,
                Ok(Some(blank)) => Poll::Ready(Ok(blank)),
                Err(error) => Poll::Ready(Err(error)),
            }
        })
        .await
    }

    fn try_blank(&self) -> Result<Option<Envelope<T>>> {
        let mut owner = Context::from_waker(&self.owner);
        match self.output.with(|output| output.poll_blank(&mut owner)) {
            Some(Poll::Ready(Ok(mut blank))) => {
                self.boundary.mark(&mut blank);
                Ok(Some(blank))
            }
            Some(Poll::Pending) => Ok(None),
            Some(Poll::Ready(Err(_))) if failed(&self.flow).is_some() => Err(ended(&self.flow)),
            Some(Poll::Ready(Err(error))) if !error.is_closed() => {
                logged(|| {
                    tracing::warn!(flow = self.flow.name(), %error, "no blank envelope for a caller outside of the flow");
                });
                let message = match error.kind() {
                    ErrorKind::Usage => {
                        "there are no blank envelopes here: give their hub a size, with `Hub::envelope_bytes`"
                    }
                    _ => "there is no blank envelope",
                };
                Err(error.for_caller(message))
            }
            Some(Poll::Ready(Err(_))) | None => Err(ended(&self.flow)),
        }
    }
}

/// The end of a run, however it ends.
pub(super) struct Closing<'a, M: Message>(pub(super) &'a Door<M>);

impl<M: Message> Drop for Closing<'_, M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What is asked for with a poll: kept until it is used, given back when this is dropped.
pub(super) enum Asked<T> {
    No,
    Waiting(Pin<Box<dyn Future<Output = Result<T>> + Send + Sync>>),
    Has(T),
}

impl<T> Asked<T> {
    /// Polls what `ask` begins, unless something was asked for before. What is of an earlier run of the flow, `is_void`, is dropped
    /// and asked for again, and so is a wait for it.
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

    /// What there is; nothing is asked for any more.
    pub(super) fn take(&mut self) -> Option<T> {
        match mem::replace(self, Self::No) {
            Self::Has(it) => Some(it),
            Self::No | Self::Waiting(_) => None,
        }
    }
}
