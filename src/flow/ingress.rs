//! [`Ingress`]: messages from outside.
//!
//! Whoever has a handle sends straight into the hub: no task of the flow stands in between. Beside the hub the flow has
//! an operator for it, which does nothing but be there. While a handle lives that one waits for an event, so that the flow
//! is neither at its end nor stalled; when the last is gone it closes the hub, and the end walks on from there.
//!
//! ```text
//!             the flow runs                            it has ended
//!   BEFORE ──────────────────> OPEN ─────────> CLOSED ──────────────> ENDED
//!   sends wait                  the last handle is dropped,           sends fail, and say why
//!                               stop, the reader ends, a failure
//! ```
//!
//! **Places.** A hub wakes one writer, and here there are many. So its free places become permits of a semaphore, which
//! wakes as many as there are and in the order of asking. Who asks and finds none looks whether the hub has room by now;
//! if not, the hub wakes the operator, and that one looks again.
//!
//! ```text
//!   the hub's room ≥ places given out = permits that nobody has + permits that somebody has and has not used
//! ```
//!
//! A permit that is not used goes to the next who asks. So readiness can be promised: who has a permit sends without waiting.

use std::{
    fmt, mem,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker, ready},
};

use futures::Sink;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
use tracing::Span;
use wakeline_macros::Ports;

use super::{Flow, Handle};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::{Envelope, Hub, Message, Reply, baggage::Load},
    memory::Plain,
    operator::{
        Cx, InputHandle, Operator, Output,
        lent::{Lent, Loan},
    },
    sync::lock,
};

/// Places that are given out at once, at most: of a hub that always has room.
const MOST: usize = 1024;

impl Flow {
    /// A way in from outside: what is sent by the handle comes to this input. It adds an operator of that name, which
    /// stands for whoever has a handle. See [`Ingress`].
    ///
    /// ```
    /// use wakeline::{Flow, operator::sink};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("print");
    /// let print = flow.add("print", sink(async |line: String| { println!("{line}"); Ok(()) }));
    /// let lines = flow.ingress("lines", print.input);
    /// let running = flow.spawn()?;
    /// lines.send("from anywhere".into()).await?;
    /// drop(lines);                // nothing more will come: the flow ends
    /// running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn ingress<M: Message>(&mut self, name: impl Into<String>, to: InputHandle<M>) -> Ingress<M> {
        self.ingress_with(name, to, Hub::default())
    }

    /// As [`ingress`](Self::ingress), with a hub of another size.
    pub fn ingress_with<M: Message>(&mut self, name: impl Into<String>, to: InputHandle<M>, hub: Hub) -> Ingress<M> {
        let (stage, handle) = watch::channel(Stage::Before);
        let added = self.add(name, Entrance { stage });
        self.connect_with(added.messages, to, hub);
        Ingress::new(handle)
    }
}

/// Sends messages into a flow, from any task or thread. From [`Flow::ingress`].
///
/// A flow does not end while there is a handle (a clone is one more): it waits for what may come. When the last one is
/// dropped, what was sent goes to its end. [`Running::stop`](crate::Running::stop) closes it, too, and so does its reader's
/// end. Sends that were made before the flow runs wait until it does.
///
/// It is a [`Sink`]. What is sent takes along the present [`Span`]: the operators that handle it, and what they make of it,
/// are inside that span meanwhile.
pub struct Ingress<M: Message> {
    /// Its receivers are the handles. `None`: this one was closed.
    stage: Option<watch::Receiver<Stage<M>>>,
    /// For the [`Sink`].
    place: Asked<Place<M>>,
}

/// A message that was not sent, and why.
///
/// `?` makes the [`Error`] of it, where the message is of no further use.
pub struct SendError<M> {
    message: Option<M>,
    error: Error,
}

/// How far the flow is.
pub(super) enum Stage<M: Message> {
    Before,
    Open(Arc<Door<M>>),
    Ended(Handle),
}

/// An ingress while its flow runs.
pub(super) struct Door<M: Message> {
    output: Loan<Output<M>>,
    places: Arc<Semaphore>,
    /// Places of the hub that are, or were, permits, and that no message has taken yet.
    given_out: Mutex<usize>,
    /// A blank envelope may have come home.
    blank: Notify,
    /// Of the operator.
    owner: Waker,
    flow: Handle,
}

/// A place for one message.
pub(super) struct Place<M: Message> {
    door: Arc<Door<M>>,
    permit: OwnedSemaphorePermit,
}

impl<M: Message> Ingress<M> {
    pub(super) fn new(stage: watch::Receiver<Stage<M>>) -> Self {
        Self { stage: Some(stage), place: Asked::No }
    }

    /// Sends a message, once there is room for it, and the flow runs. Who asks first is served first.
    ///
    /// # Errors
    /// If the flow has failed, that; [`Closed`](ErrorKind::Closed) if it was stopped, has ended, or if the reader is gone.
    /// The message comes back, unless it was lost on the way to its device.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    pub async fn send(&self, message: M) -> Result<(), SendError<M>> {
        match self.place().await {
            Ok(place) => place.send(message, Load::of_reply(Reply::nobody(span()))),
            Err(error) => Err(SendError { message: Some(message), error }),
        }
    }

    /// Sends a message if there is room now; gives it back if not, and also before the flow runs.
    ///
    /// # Errors
    /// As [`Ingress::send`].
    pub fn try_send(&self, message: M) -> Result<Result<(), M>, SendError<M>> {
        match self.try_place() {
            Ok(Some(place)) => place.send(message, Load::of_reply(Reply::nobody(span()))).map(Ok),
            Ok(None) => Ok(Err(message)),
            Err(error) => Err(SendError { message: Some(message), error }),
        }
    }

    /// True if nothing that is sent can arrive any more.
    pub fn is_closed(&self) -> bool {
        match self.stage.as_ref().map(|stage| stage.borrow().clone()) {
            Some(Stage::Open(door)) => door.places.is_closed(),
            Some(Stage::Before) => self.stage.as_ref().is_some_and(|stage| stage.has_changed().is_err()),
            Some(Stage::Ended(_)) | None => true,
        }
    }

    fn stage(&self) -> Result<&watch::Receiver<Stage<M>>> {
        self.stage.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "this handle of an ingress was closed"))
    }

    async fn place(&self) -> Result<Place<M>> {
        match self.try_place()? {
            Some(place) => Ok(place),
            None => place(self.stage()?.clone()).await,
        }
    }

    pub(super) fn try_place(&self) -> Result<Option<Place<M>>> {
        let stage = self.stage()?;
        let door = match &*stage.borrow() {
            Stage::Open(door) => door.clone(),
            Stage::Before if stage.has_changed().is_err() => return Err(never_ran()),
            Stage::Before => return Ok(None),
            Stage::Ended(flow) => return Err(ended(flow)),
        };
        door.try_place()
    }

    /// A place, some time: for those who poll.
    pub(super) fn some_place(&self) -> Result<impl Future<Output = Result<Place<M>>> + Send + Sync + use<M>> {
        Ok(place(self.stage()?.clone()))
    }
}

impl<T: Plain> Ingress<Envelope<T>> {
    /// A blank envelope of the hub's, to fill and to send: what is written there need not be copied to be sent. It is waited
    /// for, and so is the flow's beginning.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if nobody said how large the hub's envelopes are (give
    /// [`ingress_with`](Flow::ingress_with) a [`Hub::envelope_bytes`]); otherwise as [`Ingress::send`].
    ///
    /// # Cancel safety
    /// An envelope is taken only as the future resolves: dropping it loses none.
    pub async fn blank(&self) -> Result<Envelope<T>> {
        let door = door(self.stage()?.clone()).await?;
        loop {
            let notified = door.blank.notified();
            if let Some(blank) = door.try_blank()? {
                return Ok(blank);
            }
            notified.await;
        }
    }
}

impl<T: Plain> Door<Envelope<T>> {
    fn try_blank(&self) -> Result<Option<Envelope<T>>> {
        let mut owner = Context::from_waker(&self.owner);
        match self.output.with(|output| output.poll_blank(&mut owner)) {
            Some(Poll::Ready(Ok(blank))) => {
                // There may be another, for another one who waits.
                self.blank.notify_one();
                Ok(Some(blank))
            }
            Some(Poll::Pending) => Ok(None),
            Some(Poll::Ready(Err(error))) if !error.is_closed() => Err(error),
            Some(Poll::Ready(Err(_))) | None => Err(ended(&self.flow)),
        }
    }
}

async fn door<M: Message>(mut stage: watch::Receiver<Stage<M>>) -> Result<Arc<Door<M>>> {
    let stage = stage.wait_for(|stage| !matches!(stage, Stage::Before)).await.map_err(|_| never_ran())?;
    match &*stage {
        Stage::Open(door) => Ok(door.clone()),
        Stage::Ended(flow) => Err(ended(flow)),
        Stage::Before => Err(never_ran()),
    }
}

async fn place<M: Message>(stage: watch::Receiver<Stage<M>>) -> Result<Place<M>> {
    door(stage).await?.place().await
}

/// Why nothing can be sent any more.
pub(super) fn ended(flow: &Handle) -> Error {
    flow.failure().unwrap_or_else(|| {
        let why = if flow.is_stopping() { "was stopped" } else { "takes no more messages here" };
        Error::new(ErrorKind::Closed, format!("flow `{}` {why}", flow.name()))
    })
}

fn never_ran() -> Error {
    Error::new(ErrorKind::Closed, "the flow was dropped before it ran")
}

/// The caller's, if there is one that anybody looks at.
pub(super) fn span() -> Option<Span> {
    let span = Span::current();
    (!span.is_disabled()).then_some(span)
}

impl<M: Message> Door<M> {
    pub(super) fn new(output: &Lent<Output<M>>, cx: &Cx) -> Arc<Self> {
        Arc::new(Self {
            output: output.lend(),
            places: Arc::new(Semaphore::new(0)),
            given_out: Mutex::new(0),
            blank: Notify::new(),
            owner: cx.waker(),
            flow: cx.flow(),
        })
    }

    async fn place(self: Arc<Self>) -> Result<Place<M>> {
        if let Some(place) = self.try_place()? {
            return Ok(place);
        }
        match self.places.clone().acquire_owned().await {
            Ok(permit) => Ok(Place { door: self, permit }),
            Err(_) => Err(ended(&self.flow)),
        }
    }

    fn try_place(self: &Arc<Self>) -> Result<Option<Place<M>>> {
        let mut asked = self.places.clone().try_acquire_owned();
        if matches!(asked, Err(TryAcquireError::NoPermits)) && self.give_out(0) {
            asked = self.places.clone().try_acquire_owned();
        }
        match asked {
            Ok(permit) => Ok(Some(Place { door: self.clone(), permit })),
            Err(TryAcquireError::NoPermits) if !self.places.is_closed() => Ok(None),
            Err(_) => Err(ended(&self.flow)),
        }
    }

    /// `used` places have their messages. Gives out what other places the hub has; the operator is woken when there are
    /// more. False if nothing can be sent any more.
    fn give_out(&self, used: usize) -> bool {
        let mut given_out = lock(&self.given_out);
        *given_out -= used;
        let mut owner = Context::from_waker(&self.owner);
        let mut more = 0;
        let open = self.output.with(|output| {
            while *given_out + more < MOST {
                match output.poll_places(*given_out + more + 1, &mut owner) {
                    Readiness::READY => more += 1,
                    Readiness::NEVER => return false,
                    _ => break,
                }
            }
            !output.is_closed()
        });
        *given_out += more;
        drop(given_out);
        match open {
            Some(true) => self.places.add_permits(more),
            _ => self.close(),
        }
        open == Some(true)
    }

    /// The operator was woken: there may be places, or blank envelopes. False if nothing can be sent any more.
    pub(super) fn tend(&self) -> bool {
        self.blank.notify_one();
        self.give_out(0)
    }

    /// Nothing more is sent, and whoever waits is told.
    pub(super) fn close(&self) {
        self.output.with(Output::close);
        self.places.close();
        self.blank.notify_waiters();
    }
}

impl<M: Message> Place<M> {
    pub(super) fn flow(&self) -> &Handle {
        &self.door.flow
    }

    /// Sends without waiting.
    pub(super) fn send(self, message: M, load: Option<Load>) -> Result<(), SendError<M>> {
        let Self { door, permit } = self;
        let mut message = Some(message);
        let sent = door.output.with(|output| match message.take_if(|_| !output.is_closed()) {
            Some(message) => output.try_send_with(message, load),
            None => Ok(Ok(())),
        });
        permit.forget();
        door.give_out(1);
        match sent {
            Some(Err(error)) => return Err(SendError { message: None, error }),
            Some(Ok(Err(back))) => message = Some(back),
            Some(Ok(Ok(()))) | None => {}
        }
        match message {
            None => Ok(()),
            Some(message) => Err(SendError { message: Some(message), error: ended(&door.flow) }),
        }
    }
}

/// What is asked for with a poll: kept until it is used, given back when this is dropped.
pub(super) enum Asked<T> {
    No,
    Waiting(Pin<Box<dyn Future<Output = Result<T>> + Send + Sync>>),
    Has(T),
}

impl<T> Asked<T> {
    /// Polls what `ask` begins, unless something was asked for before.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, ask: impl FnOnce() -> Result<Self>) -> Poll<Result<()>> {
        if let Self::No = self {
            *self = ask()?;
        }
        if let Self::Waiting(wait) = self {
            let outcome = ready!(wait.as_mut().poll(cx));
            *self = Self::No;
            *self = Self::Has(outcome?);
        }
        Poll::Ready(Ok(()))
    }

    /// What there is; nothing is asked for any more.
    pub(super) fn take(&mut self) -> Option<T> {
        match mem::replace(self, Self::No) {
            Self::Has(it) => Some(it),
            Self::No | Self::Waiting(_) => None,
        }
    }
}

impl<M: Message> Sink<M> for Ingress<M> {
    type Error = SendError<M>;

    /// Ready means that a place is kept for this handle, until it sends or is dropped.
    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        let mut place = mem::replace(&mut self.place, Asked::No);
        let asked = place.poll(cx, || match self.try_place()? {
            Some(place) => Ok(Asked::Has(place)),
            None => Ok(Asked::Waiting(Box::pin(self.some_place()?))),
        });
        self.place = place;
        asked.map_err(|error| SendError { message: None, error })
    }

    fn start_send(mut self: Pin<&mut Self>, message: M) -> Result<(), SendError<M>> {
        match self.place.take() {
            Some(place) => place.send(message, Load::of_reply(Reply::nobody(span()))),
            None => {
                let error = Error::new(ErrorKind::Usage, "`start_send` comes after a `poll_ready` that was ready");
                Err(SendError { message: Some(message), error })
            }
        }
    }

    /// Sent is sent.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        Poll::Ready(Ok(()))
    }

    /// As if this handle were dropped.
    fn poll_close(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        self.place = Asked::No;
        self.stage = None;
        Poll::Ready(Ok(()))
    }
}

/// One more handle. A place that this one keeps as a [`Sink`] is not the other's.
impl<M: Message> Clone for Ingress<M> {
    fn clone(&self) -> Self {
        Self { stage: self.stage.clone(), place: Asked::No }
    }
}

impl<M: Message> fmt::Debug for Ingress<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingress").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
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

impl<M> SendError<M> {
    /// Why it was not sent.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The message, unless it was lost on the way to its device.
    pub fn into_message(self) -> Option<M> {
        self.message
    }
}

impl<M> From<SendError<M>> for Error {
    fn from(unsent: SendError<M>) -> Self {
        unsent.error
    }
}

impl<M> fmt::Display for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M> fmt::Debug for SendError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<M> std::error::Error for SendError<M> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

/// The operator: there while somebody may send.
struct Entrance<M: Message> {
    stage: watch::Sender<Stage<M>>,
}

#[derive(Ports)]
struct EntrancePorts<M: Message> {
    #[output]
    messages: Lent<Output<M>>,
}

/// The end of a run, however it ends.
pub(super) struct Closing<'a, M: Message>(pub(super) &'a Door<M>);

impl<M: Message> Drop for Closing<'_, M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl<M: Message> Operator for Entrance<M> {
    type Ports = EntrancePorts<M>;

    async fn run(&mut self, ports: &mut EntrancePorts<M>, cx: &mut Cx) -> Result<()> {
        let door = Door::new(&ports.messages, cx);
        let _closing = Closing(&door);
        self.stage.send_replace(Stage::Open(door.clone()));
        let mut no_handles = pin!(self.stage.closed());
        cx.attend(|task, ending| {
            let open = !ending && no_handles.as_mut().poll(task).is_pending() && door.tend();
            Ok(if open { Readiness::WAIT_EVENT } else { Readiness::NEVER })
        })
        .await
    }

    /// It has no runs.
    async fn compute(&mut self, _ports: &mut EntrancePorts<M>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.stage.send_replace(Stage::Ended(cx.flow()));
        Ok(())
    }
}
