//! [`Ingress`]: messages from outside.
//!
//! Whoever has a handle sends straight into the hub: no task of the flow stands in between. Beside the hub the flow has
//! an operator for it, which does nothing but be there. While a handle lives that one waits for an event, so that the flow
//! is neither at its end nor stalled; when the last is gone it closes the hub, and the end walks on from there.
//!
//! ```text
//!             the flow runs                            the run is over
//!   BEFORE ──────────────────> OPEN ─────────> CLOSED ────────────────> ENDED ──> the flow is dropped: sends fail,
//!   sends wait                  ^  the last handle is dropped,          │         and say why
//!                               │  stop, the reader ends, a failure     │ sends wait
//!                               └──────── the flow runs again ──────────┘
//! ```

use std::{
    fmt, mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use futures::Sink;
use tokio::sync::watch;
use tracing::Span;
use wakeline_macros::Ports;

use super::{
    Flow,
    door::{Asked, Closing, Door, Place, Stage},
};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::{Envelope, Hub, Message, Reply, baggage::Load, sender::SentBy},
    memory::Plain,
    operator::{Cx, InputHandle, Operator, Output, lent::Lent},
    sync::Discarded,
};

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
        Ingress::new(self.id, handle)
    }
}

/// Sends messages into a flow, from any task or thread. From [`Flow::ingress`].
///
/// A flow does not end while there is a handle (a clone is one more): it waits for what may come. When the last one is
/// dropped, what was sent goes to its end. [`Running::stop`](crate::Running::stop) closes it, too, and so does its reader's
/// end.
///
/// # Between two runs
/// A flow can [run](Flow::run) again, so a message that is sent while it does not run waits for the next run, as before the
/// first. It is refused once no run will follow: when the flow is dropped, and when one that was [spawned](Flow::spawn) has
/// ended; also when the run that it waits for fails before its operators begin. A message that waits for room when a run
/// ends is refused with the reason.
///
/// A producer beside `flow.run()`, in `tokio::join!` say, that relies on `send` to fail at the end of the run may therefore
/// wait for another run. Spawn the flow, or drop the producer with the run (`tokio::select!`).
///
/// # Order
/// Messages keep their order, and so does the device work on their envelopes: a message is sent while that is under way, and
/// its copy to the reader's device comes after it, on a stream that makes the copies of all messages. So a message whose last
/// write does not end holds up those behind it, and the end of its device before it was sent is its sender's error. Handles
/// of one ingress are therefore for one program; for several callers that do not trust each other there is a
/// [`Service`](crate::Service), where [each waits for its own](crate::Service#device-work-on-a-request).
///
/// A message that cannot be brought to the reader is refused with an error for its sender, and the flow goes on: its envelope
/// is too large, lies where nothing copies from, or its memory is used by a capture. Where that is known only after the
/// message was accepted, since the device of its memory was lost meanwhile, it is dropped with a warning in the log.
///
/// # As a sink
/// It is a [`Sink`]. What is sent takes along the present [`Span`]: the operators that handle it, and what they make of it,
/// are inside that span meanwhile.
pub struct Ingress<M: Message> {
    /// Its number.
    flow: u64,
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

impl<M: Message> Ingress<M> {
    pub(super) fn new(flow: u64, stage: watch::Receiver<Stage<M>>) -> Self {
        Self { flow, stage: Some(stage), place: Asked::No }
    }

    /// Sends a message, once there is room for it, and the flow runs. Who asks first is served first.
    ///
    /// # Errors
    /// If the flow has failed, that; [`Closed`](ErrorKind::Closed) if it was stopped, has ended and
    /// [runs no more](Self#between-two-runs), or if the reader is gone;
    /// [`Usage`](ErrorKind::Usage) for a message that cannot be brought to the reader; [`Stalled`](ErrorKind::Stalled) in the
    /// `start` of an operator of the same flow, which runs once all operators have started.
    /// The message comes back, unless it was lost on the way to its device.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent. A future that is kept and not polled keeps
    /// its turn, and a place of the hub's once there is one: drop it to release that to the next sender.
    pub async fn send(&self, message: M) -> Result<(), SendError<M>> {
        match self.place().await {
            Ok(place) => send_at(place, message),
            Err(error) => Err(SendError::new(Some(message), error)),
        }
    }

    /// Sends a message if there is room now; gives it back if not, and also while the flow does not run yet, or again.
    ///
    /// # Errors
    /// As [`Ingress::send`].
    pub fn try_send(&self, message: M) -> Result<Result<(), M>, SendError<M>> {
        match self.try_place() {
            Ok(Some(place)) => send_at(place, message).map(Ok),
            Ok(None) => Ok(Err(message)),
            Err(error) => Err(SendError::new(Some(message), error)),
        }
    }

    /// True if nothing that is sent can arrive any more: in the present run, or between two runs in a further one.
    pub fn is_closed(&self) -> bool {
        let Some(stage) = &self.stage else { return true };
        match self.door() {
            Some(door) => door.is_closed(),
            None => stage.has_changed().is_err(),
        }
    }

    fn stage(&self) -> Result<&watch::Receiver<Stage<M>>> {
        self.stage.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "this handle of an ingress was closed"))
    }

    async fn place(&self) -> Result<Place<M>> {
        match self.try_place()? {
            Some(place) => Ok(place),
            None => Place::once_open(self.flow, self.stage()?.clone()).await,
        }
    }

    pub(super) fn try_place(&self) -> Result<Option<Place<M>>> {
        let stage = self.stage()?;
        let door = match &*stage.borrow() {
            Stage::Open(door) => door.clone(),
            over if stage.has_changed().is_err() => return Err(over.refusal()),
            Stage::Before | Stage::Ended(_) => return Ok(None),
        };
        door.try_place()
    }

    /// Where messages come in, once the flow runs.
    pub(super) fn some_door(&self) -> Result<impl Future<Output = Result<Arc<Door<M>>>> + Send + Sync + use<M>> {
        Ok(Door::once_open(self.flow, self.stage()?.clone()))
    }

    /// Where messages come in, if the flow runs.
    pub(super) fn door(&self) -> Option<Arc<Door<M>>> {
        match &*self.stage.as_ref()?.borrow() {
            Stage::Open(door) => Some(door.clone()),
            Stage::Before | Stage::Ended(_) => None,
        }
    }

    /// A place, some time: for those who poll.
    pub(super) fn some_place(&self) -> Result<impl Future<Output = Result<Place<M>>> + Send + Sync + use<M>> {
        Ok(Place::once_open(self.flow, self.stage()?.clone()))
    }
}

impl<T: Plain> Ingress<Envelope<T>> {
    /// A blank envelope of the hub's, to fill and to send: what is written there need not be copied to be sent. It is waited
    /// for, and so is the flow's beginning.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if nobody said how large the hub's envelopes are (give
    /// [`ingress_with`](Flow::ingress_with) a [`Hub::envelope_bytes`]); otherwise as [`Ingress::send`]. The errors of the
    /// envelope's own methods are for callers as well: the kind, with a general message.
    ///
    /// # Cancel safety
    /// An envelope is taken only as the future resolves: dropping it loses none.
    pub async fn blank(&self) -> Result<Envelope<T>> {
        Door::once_open(self.flow, self.stage()?.clone()).await?.blank().await
    }
}

fn send_at<M: Message>(place: Place<M>, message: M) -> Result<(), SendError<M>> {
    place.send(Discarded::new(message), SentBy::Feeder, |_| Load::of_reply(Reply::of_span(span())))
}

/// The caller's, if it is enabled.
pub(super) fn span() -> Option<Span> {
    let span = Span::current();
    (!span.is_disabled()).then_some(span)
}

impl<M: Message> Sink<M> for Ingress<M> {
    type Error = SendError<M>;

    /// Ready means that a place is kept for this handle, until it sends or is dropped.
    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        let mut place = mem::replace(&mut self.place, Asked::No);
        let asked = place.poll(cx, Place::is_void, || match self.try_place()? {
            Some(place) => Ok(Asked::Has(place)),
            None => Ok(Asked::Waiting(Box::pin(self.some_place()?))),
        });
        self.place = place;
        asked.map_err(|error| SendError::new(None, error))
    }

    fn start_send(mut self: Pin<&mut Self>, message: M) -> Result<(), SendError<M>> {
        match self.place.take() {
            Some(place) => send_at(place, message),
            None => {
                let error = Error::new(ErrorKind::Usage, "`start_send` comes after a `poll_ready` that was ready");
                Err(SendError::new(Some(message), error))
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
        Self { flow: self.flow, stage: self.stage.clone(), place: Asked::No }
    }
}

impl<M: Message> fmt::Debug for Ingress<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingress").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

impl<M> SendError<M> {
    pub(super) fn new(message: Option<M>, error: Error) -> Self {
        Self { message, error }
    }

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
