//! [`Ingress`]: messages that enter a flow.
//!
//! A handle sends directly into the hub. The flow also has an operator for the ingress, which does no work: while a
//! handle exists it waits for an event, so that the flow neither ends nor stalls. When the last handle is dropped, it
//! closes the hub, and the operators downstream end in turn.
//!
//! ```text
//!             the flow runs                            the run ends
//!   BEFORE ──────────────────> OPEN ─────────> CLOSED ────────────────> ENDED ──> the flow is dropped: sends fail
//!   sends wait                  ^  the last handle is dropped,          │         with the reason
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
    ingress_gate::{Acquisition, CloseGateOnDrop, IngressGate, SendPermit, Stage},
};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    hub::{
        BlanksFor, Carries, Envelope, HubOptions, Message, Reply, SendError, TrySendError, external::SentBy,
        parcel::Load,
    },
    memory::Plain,
    operator::{Cx, InputHandle, Operator, Output, shared_port::SharedPort},
    sync::DiscardOnDrop,
};

impl Flow {
    /// Opens an input to code outside the flow: what is sent through the returned handle goes straight into its hub, and
    /// an operator called `name` represents the senders in the flow. See [`Ingress`].
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
        self.ingress_with(name, to, HubOptions::default())
    }

    /// Like [`ingress`](Self::ingress), with this kind of hub between the ingress and the input.
    pub fn ingress_with<M: Message>(
        &mut self,
        name: impl Into<String>,
        to: InputHandle<M>,
        hub: HubOptions,
    ) -> Ingress<M> {
        let (stage, handle) = watch::channel(Stage::Before);
        let added = self.add(name, IngressOperator { stage });
        self.connect_with(added.messages, to, hub);
        Ingress::new(self.id, handle)
    }
}

/// Sends messages into a flow, from any task or thread. Created by [`Flow::ingress`].
///
/// A flow does not end as long as a handle or a clone of it exists. When the last one is dropped, the messages that
/// were sent are processed to the end. [`Handle::stop`](crate::flow::Handle::stop) and the end of its reader also close the
/// ingress.
///
/// # Between two runs
/// A flow can [run](Flow::run) again, so a message that is sent between two runs waits for the next one, as before the
/// first. Sending fails once no run will follow: when the flow is dropped, when a flow that was [spawned](Flow::spawn)
/// has ended, and when the awaited run fails before its operators begin. A message that is waiting for room when a run
/// ends is refused with the reason.
///
/// A producer in `tokio::join!` with `flow.run()` that relies on `send` to fail at the end of the run may therefore
/// wait for another run. Spawn the flow, or drop the producer at the end of the run (`tokio::select!`).
///
/// # Order
/// Messages keep their order, and so does the device work on their envelopes. A message may be sent while that work is
/// in progress; its copy to the reader's device is ordered after it, on one stream for all messages. A message whose
/// last write does not complete therefore delays those behind it. If the device of a message was lost before the
/// message was sent, the sender gets the error. So the handles of one ingress are meant for one program. For callers
/// that do not trust each other, use a [`Service`](crate::Service), where [each waits only for its own
/// work](crate::Service#device-work-on-a-request).
///
/// A message that cannot be delivered is refused with an error for its sender, and the flow continues: its envelope is
/// too large or cannot be copied from where it is, or its memory is used by a capture. If this is known only after the
/// message was accepted, because its device was lost in the meantime, the message is dropped with a warning in the log.
///
/// # As a sink
/// An ingress is also a [`Sink`][sink]. A message carries the current [`Span`][span] of its sender: the operators
/// that process it, and the messages made from it, run inside that span.
///
/// [sink]: https://docs.rs/futures-sink/0.3/futures_sink/trait.Sink.html
/// [span]: https://docs.rs/tracing/0.1/tracing/struct.Span.html
pub struct Ingress<M: Message> {
    flow: u64,
    /// The handles are the receivers of this channel. `None`: this handle was closed.
    stage: Option<watch::Receiver<Stage<M>>>,
    permit: Acquisition<SendPermit<M>>,
}

impl<M: Message> Ingress<M> {
    pub(super) fn new(flow: u64, stage: watch::Receiver<Stage<M>>) -> Self {
        Self { flow, stage: Some(stage), permit: Acquisition::No }
    }

    /// Sends a message, as soon as the flow runs and the hub has room. Senders are served in the order of their calls.
    ///
    /// # Errors
    /// The error of the flow, if it has failed; [`Closed`](ErrorKind::Closed) if it was stopped, has ended and [will
    /// not run again](Self#between-two-runs), or if the reader was dropped; [`Usage`](ErrorKind::Usage) for a message
    /// that cannot be delivered to the reader; [`Stalled`](ErrorKind::Stalled) in the `start` of an operator of the
    /// same flow, which runs only once all operators have started. The message is returned in the error, unless it was
    /// lost on the way to its device.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message, unsent. A future that is kept but not polled keeps its
    /// place in the queue of senders, and later a reserved slot of the hub: drop it to release that to the next sender.
    pub async fn send(&self, message: M) -> Result<(), SendError<M>> {
        match self.permit().await {
            Ok(permit) => send_at(permit, message),
            Err(error) => Err(SendError::new(Some(message), error)),
        }
    }

    /// Sends a message if there is room now.
    ///
    /// # Errors
    /// [`Full`](TrySendError::Full) if there is no room, or if the flow does not run at the moment; otherwise
    /// [`Failed`](TrySendError::Failed) with the errors of [`Ingress::send`].
    pub fn try_send(&self, message: M) -> Result<(), TrySendError<M>> {
        match self.try_permit() {
            Ok(Some(permit)) => Ok(send_at(permit, message)?),
            Ok(None) => Err(TrySendError::Full(message)),
            Err(error) => Err(SendError::new(Some(message), error).into()),
        }
    }

    /// True if no message that is sent now can arrive, in the current run or, between two runs, in a later one.
    pub fn is_closed(&self) -> bool {
        let Some(stage) = &self.stage else { return true };
        match self.gate() {
            Some(gate) => gate.is_closed(),
            None => stage.has_changed().is_err(),
        }
    }

    fn stage(&self) -> Result<&watch::Receiver<Stage<M>>> {
        self.stage.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, "this ingress handle was closed"))
    }

    async fn permit(&self) -> Result<SendPermit<M>> {
        match self.try_permit()? {
            Some(permit) => Ok(permit),
            None => SendPermit::once_open(self.flow, self.stage()?.clone()).await,
        }
    }

    pub(super) fn try_permit(&self) -> Result<Option<SendPermit<M>>> {
        let stage = self.stage()?;
        let gate = match &*stage.borrow() {
            Stage::Open(gate) => gate.clone(),
            over if stage.has_changed().is_err() => return Err(over.refusal()),
            Stage::Before | Stage::Ended(_) => return Ok(None),
        };
        gate.try_permit()
    }

    /// Waits for the gate, until the flow runs.
    pub(super) fn wait_for_gate(
        &self,
    ) -> Result<impl Future<Output = Result<Arc<IngressGate<M>>>> + Send + Sync + use<M>> {
        Ok(IngressGate::once_open(self.flow, self.stage()?.clone()))
    }

    /// The gate, if the flow runs.
    pub(super) fn gate(&self) -> Option<Arc<IngressGate<M>>> {
        match &*self.stage.as_ref()?.borrow() {
            Stage::Open(gate) => Some(gate.clone()),
            Stage::Before | Stage::Ended(_) => None,
        }
    }

    /// Waits for a permit, for callers that poll.
    pub(super) fn wait_for_permit(&self) -> Result<impl Future<Output = Result<SendPermit<M>>> + Send + Sync + use<M>> {
        Ok(SendPermit::once_open(self.flow, self.stage()?.clone()))
    }
}

impl<M: Message> Ingress<M> {
    /// Waits for a blank envelope of the hub, and for the flow to run. Sending a filled blank envelope, by itself or in
    /// a message that holds it, needs no copy on the host.
    ///
    /// `T` is inferred or written, as with [`Output::blank`](crate::Output::blank).
    ///
    /// For messages with one envelope. A call for a message that may hold several does not compile: callers that each
    /// hold one envelope and wait for the next would wait for each other forever. [`blanks`](Self::blanks) takes all
    /// envelopes of a message at the same time. For the same reason, send or drop an envelope before waiting for another
    /// one of the same hub.
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, Message, operator::sink, prelude::*};
    ///
    /// #[derive(Message)]
    /// struct Frame {
    ///     number: u64,
    ///     #[envelope]
    ///     pixels: Envelope<u8>,
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("frames");
    /// let print = flow.add("print", sink(async |frame: Frame| {
    ///     println!("{}: {:?}", frame.number, frame.pixels.read().await?);
    ///     Ok(())
    /// }));
    /// let frames = flow.ingress_with("frames", print.input, HubOptions::bounded(2).envelope_bytes(4096));
    /// let running = flow.spawn()?;
    /// let mut pixels = frames.blank().await?;
    /// pixels.set_len(3)?;
    /// pixels.write().await?.fill(7);
    /// frames.send(Frame { number: 1, pixels }).await?;
    /// drop(frames);
    /// running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// A message with two envelopes:
    ///
    /// ```compile_fail
    /// # use wakeline::{Ingress, Message, prelude::*};
    /// #[derive(Message)]
    /// struct Frame {
    ///     #[envelope]
    ///     pixels: Envelope<u8>,
    ///     #[envelope]
    ///     mask: Envelope<u8>,
    /// }
    ///
    /// async fn take(frames: Ingress<Frame>) -> Result<Envelope<u8>> {
    ///     frames.blank().await // error: a message of this type may hold several envelopes
    /// }
    /// # fn main() {
    /// #     let run = |frames| tokio::runtime::Runtime::new().unwrap().block_on(take(frames));
    /// #     std::hint::black_box::<fn(Ingress<Frame>) -> Result<Envelope<u8>>>(run);
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the size of the hub's envelopes is not set (see
    /// [`ingress_with`](Flow::ingress_with) and [`HubOptions::envelope_bytes`]); otherwise those of [`Ingress::send`]. The
    /// errors of the envelope's own methods have only the kind and a general message.
    ///
    /// # Cancel safety
    /// An envelope is taken only when the future resolves: dropping the future loses none.
    pub async fn blank<T: Plain>(&self) -> Result<Envelope<T>>
    where
        M: Carries<T>,
    {
        const {
            assert!(
                M::ENVELOPES.usual() == 1,
                "a message of this type may hold several envelopes: take all of a message with `blanks`, at the same time"
            );
        }
        self.blanks().await.map(|(blank,)| blank)
    }

    /// Waits for all the blank envelopes of a message, and for the flow to run. It takes all of them at the same time,
    /// or waits and takes none.
    ///
    /// `B` is a tuple or an array of [`Envelope`]s, most often inferred. It has at least as many as the message certainly
    /// holds: one for each `#[envelope]` field that is an envelope. Fewer do not compile. A message with an option or a
    /// list of envelopes may hold more: take those at the same time, too.
    ///
    /// Callers that take the same number are served in the order of their calls. One that takes more than others may
    /// wait longer.
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, Message, operator::sink, prelude::*};
    ///
    /// #[derive(Message)]
    /// struct Frame {
    ///     #[envelope]
    ///     pixels: Envelope<u8>,
    ///     #[envelope]
    ///     depths: Envelope<f32>,
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("frames");
    /// let print = flow.add("print", sink(async |frame: Frame| {
    ///     println!("{:?}, {:?}", frame.pixels.read().await?, frame.depths.read().await?);
    ///     Ok(())
    /// }));
    /// let frames = flow.ingress_with("frames", print.input, HubOptions::bounded(2).envelope_bytes(4096));
    /// let running = flow.spawn()?;
    /// let (mut pixels, mut depths) = frames.blanks().await?;
    /// pixels.fill_from(&[1, 2, 3]).await?;
    /// depths.fill_from(&[0.5]).await?;
    /// frames.send(Frame { pixels, depths }).await?;
    /// drop(frames);
    /// running.await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the hub has fewer envelopes than `B` (see [`HubOptions::envelopes`]); otherwise
    /// those of [`blank`](Self::blank).
    ///
    /// # Cancel safety
    /// The envelopes are taken only when the future resolves: dropping the future loses none.
    pub async fn blanks<B: BlanksFor<M>>(&self) -> Result<B> {
        const {
            assert!(
                B::COUNT >= M::ENVELOPES.certain(),
                "a message of this type holds more envelopes: take all of a message at the same time"
            );
        }
        let gate = IngressGate::once_open(self.flow, self.stage()?.clone()).await?;
        let blanks = B::of_raw(&mut gate.blanks(B::COUNT).await?.into_iter());
        blanks.ok_or_else(|| Error::internal("an ingress gave fewer blank envelopes than were asked for"))
    }
}

fn send_at<M: Message>(permit: SendPermit<M>, message: M) -> Result<(), SendError<M>> {
    permit.send(DiscardOnDrop::new(message), SentBy::Feeder, |_| Load::of_reply(Reply::of_span(span())))
}

/// The current span, if it is enabled.
pub(super) fn span() -> Option<Span> {
    let span = Span::current();
    (!span.is_disabled()).then_some(span)
}

impl<M: Message> Sink<M> for Ingress<M> {
    type Error = SendError<M>;

    /// When ready, a slot is reserved for this handle, until it sends or is dropped.
    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        let mut permit = mem::replace(&mut self.permit, Acquisition::No);
        let polled = permit.poll(cx, SendPermit::is_void, || match self.try_permit()? {
            Some(permit) => Ok(Acquisition::Has(permit)),
            None => Ok(Acquisition::Waiting(Box::pin(self.wait_for_permit()?))),
        });
        self.permit = permit;
        polled.map_err(|error| SendError::new(None, error))
    }

    fn start_send(mut self: Pin<&mut Self>, message: M) -> Result<(), SendError<M>> {
        match self.permit.take() {
            Some(permit) => send_at(permit, message),
            None => {
                let error = Error::new(
                    ErrorKind::Usage,
                    "`start_send` was called before `poll_ready` returned ready: poll it first",
                );
                Err(SendError::new(Some(message), error))
            }
        }
    }

    /// Always ready: `start_send` has already delivered the message.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        Poll::Ready(Ok(()))
    }

    /// Has the same effect as dropping this handle.
    fn poll_close(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Result<(), SendError<M>>> {
        self.permit = Acquisition::No;
        self.stage = None;
        Poll::Ready(Ok(()))
    }
}

/// The clone does not share a slot that this handle has reserved as a `Sink`.
impl<M: Message> Clone for Ingress<M> {
    fn clone(&self) -> Self {
        Self { flow: self.flow, stage: self.stage.clone(), permit: Acquisition::No }
    }
}

impl<M: Message> fmt::Debug for Ingress<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingress").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

/// The operator of the ingress. It ends when the last handle is dropped.
struct IngressOperator<M: Message> {
    stage: watch::Sender<Stage<M>>,
}

#[derive(Ports)]
struct IngressPorts<M: Message> {
    #[output]
    messages: SharedPort<Output<M>>,
}

impl<M: Message> Operator for IngressOperator<M> {
    type Ports = IngressPorts<M>;

    async fn run(&mut self, ports: &mut IngressPorts<M>, cx: &mut Cx) -> Result<()> {
        let gate = IngressGate::new(&ports.messages, cx);
        let _closing = CloseGateOnDrop(&gate);
        self.stage.send_replace(Stage::Open(gate.clone()));
        let mut no_handles = pin!(self.stage.closed());
        cx.attend(|task, ending| {
            let open = !ending && no_handles.as_mut().poll(task).is_pending() && gate.on_wake();
            Ok(if open { Readiness::WAIT_EVENT } else { Readiness::NEVER })
        })
        .await
    }

    /// Never called: `run` is overridden.
    async fn compute(&mut self, _ports: &mut IngressPorts<M>, _cx: &mut Cx) -> Result<()> {
        Ok(())
    }

    async fn stop(&mut self, cx: &mut Cx) -> Result<()> {
        self.stage.send_replace(Stage::Ended(cx.flow()));
        Ok(())
    }
}
