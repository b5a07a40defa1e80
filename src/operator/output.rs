//! [`Output`]: a port that sends messages, to one reader or to several.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    marker::PhantomData,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::BoxFuture;

use super::{
    handle::OutputHandle,
    operator_streams::OperatorStreams,
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{HandleVisitor, Port, Traffic},
    readers::Readers,
    run_context::RunContext,
    status_cell::RunWait,
};
use crate::{
    condition::{Readiness, Room},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{
        Carries, Envelope, Message, Outcome, RawEnvelopes, Reply, SendError, TrySendError,
        end_waker::Interest,
        ends::{Demand, MovesLater},
        external::{ExternalHandle, SentBy},
        outbox::{Outbox, OutboxQueue},
        parcel::{Load, Parcel},
        queue::Answer,
    },
    memory::{HostAccess, Plain},
    stream::Stream,
    sync::DiscardOnDrop,
};

/// A port that sends messages to one reader, or to each of several ([`Flow::connect`](crate::Flow::connect)): a field of
/// a struct that derives [`Ports`](macro@crate::Ports), marked `#[output]`.
///
/// With several readers, a message is sent when all have room: the slowest sets the pace, unless its hub drops messages
/// instead of making the writer wait. A reader that has ended is skipped; the output is closed when all have ended.
#[repr(C)]
pub struct Output<M: Message> {
    // What each message needs comes first.
    /// The room that the port waits for.
    pub(super) room: Room,
    pub(super) context: Arc<RunContext>,
    pub(super) traffic: Traffic,
    /// The stream that messages carry, if [`set_stream`](Self::set_stream) was called.
    pub(super) stream: Option<Stream>,
    /// `None` on the host.
    pub(super) streams: Option<Arc<OperatorStreams>>,
    pub(super) readers: Readers<M>,
    /// Messages that workers have sent, to be forwarded.
    pub(super) backlog: Option<Box<OutboxQueue<M>>>,
    /// The access that the host waits for before it can copy the first message of the backlog.
    pub(super) pending: Option<Box<HostAccess>>,
    /// A worker has closed the port: it closes once the messages of all other workers are sent.
    pub(super) closing: bool,
}

/// The result of an [offer](Output::offer).
#[derive(Debug)]
#[non_exhaustive]
pub struct Offer<M> {
    /// The outcome at each hub, in the order of connecting; empty if the port was closed.
    pub outcomes: Vec<Outcome>,
    /// The message, if no hub took it. `None` also if it was lost in the transfer to a reader that has ended.
    pub kept: Option<M>,
}

impl<M: Message> Output<M> {
    /// Sends a message, and waits for room if there is none. The first message of a run finds room, because the port's
    /// condition was ready.
    ///
    /// A wait for room in the middle of a run delays the messages that the operator has taken. Preferably send no more
    /// in a run than the conditions promise, or use a hub with enough capacity.
    ///
    /// The order of device work travels with the message: the next use of an envelope is ordered after all work that
    /// was enqueued on it.
    ///
    /// # Errors
    /// [`Closed`](crate::ErrorKind::Closed) if the reader has ended or the port was closed; the error of a failed
    /// transfer. The error has the message, unless it was lost in the transfer or one of several readers has received
    /// it; `?` drops it. A reader may end at any moment: an operator that returns this error because its reader has
    /// ended counts as ended, not as failed.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    #[inline]
    pub fn send(&mut self, message: M) -> impl Future<Output = Result<(), SendError<M>>> + Send {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        async move {
            match self.deliver(place.place()).await {
                Ok(()) => Ok(()),
                Err(error) => Err(unsent(place.place(), error)),
            }
        }
    }

    /// Sends several messages in order, and removes them from `messages`; waits for room where there is none. Otherwise
    /// like [`send`](Self::send) for each.
    ///
    /// Where there is one reader and its hub has room, small envelopes are copied to it together, with fewer calls of the
    /// driver: the way to send for an operator that takes a [batch](super::Input::take_batch).
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// #[derive(Ports)]
    /// struct BatchPorts {
    ///     #[input(batch = 8)]
    ///     chunks: Input<Envelope<u8>>,
    ///     #[output]
    ///     zeroed: Output<Envelope<u8>>,
    /// }
    ///
    /// struct Zero(Vec<Envelope<u8>>);
    ///
    /// impl Operator for Zero {
    ///     type Ports = BatchPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut BatchPorts, cx: &mut Cx) -> Result<()> {
    ///         self.0.extend(ports.chunks.take_batch()?);
    ///         for chunk in &mut self.0 {
    ///             cx.stream()?.fill(chunk, 0)?;
    ///         }
    ///         ports.zeroed.send_all(&mut self.0).await
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// Those of [`send`](Self::send). The messages that were not sent stay in `messages`; those that are in a hub whose
    /// transfer has failed are lost.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves leaves the messages that were not sent in `messages`.
    pub async fn send_all(&mut self, messages: &mut Vec<M>) -> Result<()> {
        let mut unsent = UnsentMessages { left: std::mem::take(messages).into(), messages };
        loop {
            self.send_while_room(&mut unsent.left)?;
            let Some(next) = unsent.left.front_mut() else { return Ok(()) };
            match self.pending_access() {
                Some(pending) => pending.await?,
                None => self.room_for(next).await?,
            }
        }
    }

    /// Sends messages as long as there is room. The others stay in `messages`.
    fn send_while_room(&mut self, messages: &mut VecDeque<M>) -> Result<()> {
        // Where the hub may drop messages instead, each can be taken as soon as it is sent.
        let moves = match &self.readers {
            Readers::One(sender) if !sender.drops_messages() => Some(sender.moves_later()),
            _ => None,
        };
        while let Some(message) = messages.pop_front() {
            let mut place = DiscardOnDrop::new(self.parcel(message));
            let sent = self.send_if_room(place.place(), moves.is_some());
            if let Some(parcel) = place.take() {
                messages.push_front(self.context.take_back(parcel));
                sent?;
                break;
            }
            sent?;
        }
        moves.map_or(Ok(()), MovesLater::move_now)
    }

    /// Sends the message in `place`, which stays there until it is in the queue.
    async fn deliver(&mut self, place: &mut Option<Parcel<M>>) -> Result<()> {
        loop {
            self.send_if_room(place, false)?;
            let Some(parcel) = place else { return Ok(()) };
            if let Some(pending) = self.pending_access() {
                pending.await?;
                continue;
            }
            self.room_for(&mut parcel.message).await?;
        }
    }

    /// Waits for room for this message.
    async fn room_for(&mut self, message: &mut M) -> Result<()> {
        let answer = poll_fn(|task| {
            self.context.poll_port(RunWait::SENDS, task, |task| match self.readers.poll_send(message, task.waker()) {
                Answer::Wait => Err(Readiness::WAIT),
                answer => Ok(answer),
            })
        });
        if answer.await == Answer::Never { Err(self.readers.closed()) } else { Ok(()) }
    }

    /// A wait for the access that the host needs before it can copy the message that was not sent. Boxed, since it is
    /// rare and large: every operator's future would reserve space for it.
    #[cold]
    fn pending_access(&mut self) -> Option<BoxFuture<'static, Result<()>>> {
        self.readers.pending().map(|pending| Box::pin(pending.wait()) as _)
    }

    /// Sends a message if all hubs whose readers have not ended have room.
    ///
    /// # Errors
    /// [`Full`](TrySendError::Full) if a hub has no room, or if the message is an envelope that a device still writes,
    /// and several readers on the host receive it without a copy: [`send`](Self::send) waits for both.
    /// [`Failed`](TrySendError::Failed) with the errors of [`send`](Self::send).
    pub fn try_send(&mut self, message: M) -> Result<(), TrySendError<M>> {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        if let Err(error) = self.send_if_room(place.place(), false) {
            return Err(unsent(place.place(), error).into());
        }
        match place.take() {
            None => Ok(()),
            // The last reader has ended during the call.
            Some(parcel) if self.readers.have_ended() => {
                Err(SendError::new(Some(parcel.message), self.readers.closed()).into())
            }
            Some(parcel) => Err(TrySendError::Full(self.context.take_back(parcel))),
        }
    }

    /// Sends a message as the response to some of those that were taken, and to no other: see
    /// [`Cx::take_replies`](crate::Cx::take_replies). Otherwise like [`send`](Self::send).
    ///
    /// # Errors
    /// The same as for [`Output::send`]. The error has the message, but not the reply: its callers get no response from
    /// it.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent, and its callers get no response from
    /// it.
    pub async fn send_for(&mut self, reply: Reply, message: M) -> Result<(), SendError<M>> {
        let load = self.context.load_for(reply);
        let mut place = DiscardOnDrop::new(Parcel::new(message, Some(load)));
        match self.deliver(place.place()).await {
            Ok(()) => Ok(()),
            Err(error) => Err(unsent(place.place(), error)),
        }
    }

    /// A handle of its only reader's hub.
    fn external(&self) -> Option<ExternalHandle<M>> {
        match &self.readers {
            Readers::One(sender) => Some(sender.external()),
            _ => None,
        }
    }

    /// What [`try_send_departed`](Self::try_send_departed) needs, for a sender that holds a lock only while the message
    /// is enqueued.
    pub(crate) fn departure(&self) -> ExternalSend<M> {
        let own = self.streams.as_ref().and_then(|streams| streams.own().cloned().or_else(|| streams.borrowed()));
        let context = self.context.samples_external().then(|| self.context.clone());
        ExternalSend { external: self.external(), origin: self.stream.clone().or(own), context }
    }

    /// Sends the message in `place` if there is room; otherwise it stays there. A message that the hub drops in
    /// exchange is moved to `dropped`. No user code of the message is called; the hub moves nothing before
    /// [`ExternalSend::move_queued`].
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        departed: &PreparedSend,
        dropped: &mut Option<Parcel<M>>,
    ) -> Result<()> {
        // An output that is used from outside has one reader, so no message is forked here, where the port is locked.
        match &mut self.readers {
            Readers::One(sender) if !sender.reader_gone() => {
                sender.try_send_departed(place, |parcel| *dropped = Some(parcel))?;
            }
            Readers::Several(_) => {
                return Err(Error::new(
                    ErrorKind::Usage,
                    "an output that is used from outside the flow can have only one reader",
                ));
            }
            _ => return Err(self.readers.closed()),
        }
        if place.is_none() {
            self.traffic.add(departed.bytes);
        }
        Ok(())
    }

    /// Sends the message in `place` if there is room; otherwise it stays there. `unmoved`: its hub, if there is only one,
    /// moves it later.
    #[inline(always)]
    fn send_if_room(&mut self, place: &mut Option<Parcel<M>>, unmoved: bool) -> Result<()> {
        let bytes = place.as_ref().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        self.with_origin(|readers, origin| match readers {
            Readers::One(sender) if !sender.reader_gone() && unmoved => sender.try_send_unmoved(place, origin),
            Readers::One(sender) if !sender.reader_gone() => sender.try_send(place, origin),
            _ => Self::send_otherwise(readers, place, origin),
        })?;
        if place.is_none() {
            self.traffic.add(bytes);
        }
        Ok(())
    }

    #[inline(never)]
    fn send_otherwise(readers: &mut Readers<M>, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        match readers {
            Readers::Several(fan) if !fan.is_closed() => fan.try_send(place, origin),
            Readers::Outbox(outbox) => outbox.send(place, origin),
            _ => Err(readers.closed()),
        }
    }

    /// Sends a message to each hub that has room for it, and returns the outcome for each: for an output that is
    /// `#[output(optional)]`, whose operator runs whether there is room or not.
    ///
    /// ```
    /// use wakeline::{hub::Outcome, prelude::*};
    ///
    /// #[derive(Ports)]
    /// struct TickPorts {
    ///     #[output(optional)]
    ///     ticks: Output<u64>,
    /// }
    ///
    /// /// Ticks, and counts the readers that missed one.
    /// struct Tick {
    ///     missed: usize,
    /// }
    ///
    /// impl Operator for Tick {
    ///     type Ports = TickPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut TickPorts, cx: &mut Cx) -> Result<()> {
    ///         let offer = ports.ticks.offer(1)?;
    ///         self.missed += offer.outcomes.iter().filter(|outcome| **outcome == Outcome::Full).count();
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// The error of a failed transfer, with the message as for [`send`](Self::send). A reader that has ended is not an
    /// error.
    pub fn offer(&mut self, message: M) -> Result<Offer<M>, SendError<M>> {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        let bytes = place.get().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        let outcomes = match self.with_origin(|readers, origin| Self::offer_to_each(readers, place.place(), origin)) {
            Ok(outcomes) => outcomes,
            Err(error) => return Err(unsent(place.place(), error)),
        };
        let kept = place.take().map(|parcel| self.context.take_back(parcel));
        if kept.is_none() {
            self.traffic.add(bytes);
        }
        Ok(Offer { outcomes, kept })
    }

    /// Sends the message in `place` to each hub that has room, and returns each hub's outcome. If no hub accepts or drops
    /// it, it stays there.
    fn offer_to_each(
        readers: &mut Readers<M>,
        place: &mut Option<Parcel<M>>,
        origin: Option<&Stream>,
    ) -> Result<Vec<Outcome>> {
        match readers {
            Readers::Closed => Ok(Vec::new()),
            Readers::One(sender) if sender.reader_gone() => Ok(vec![Outcome::Closed]),
            Readers::One(sender) => {
                let outcome = if sender.would_queue() { Outcome::Sent } else { Outcome::Dropped };
                let sent = sender.try_send(place, origin);
                Ok(vec![match sent {
                    Err(error) if !error.is_reader_gone() => return Err(error),
                    Ok(()) if place.is_none() => outcome,
                    // It may have ended during the call.
                    _ if sender.reader_gone() => Outcome::Closed,
                    _ => Outcome::Full,
                }])
            }
            Readers::Several(fan) => fan.offer(place, origin),
            Readers::Outbox(outbox) => {
                outbox.send(place, origin)?;
                Ok(vec![Outcome::Sent])
            }
        }
    }

    /// A message with its metadata and replies.
    #[inline]
    fn parcel(&self, message: M) -> Parcel<M> {
        Parcel::new(message, self.context.load())
    }

    /// Calls `send` with the stream that messages carry.
    #[inline]
    fn with_origin<R>(&mut self, send: impl FnOnce(&mut Readers<M>, Option<&Stream>) -> R) -> R {
        match (&self.stream, &self.streams) {
            (Some(chosen), _) => send(&mut self.readers, Some(chosen)),
            (None, None) => send(&mut self.readers, None),
            (None, Some(streams)) => match streams.own() {
                Some(own) => send(&mut self.readers, Some(own)),
                None => send(&mut self.readers, streams.borrowed().as_ref()),
            },
        }
    }

    /// Sets the stream that messages carry from now on; with `None` it is the operator's own again, which is the
    /// default.
    ///
    /// The reader gets it from [`Input::streams`](super::Input::streams). Uses of data that wakeline does not track are
    /// ordered after the work that was enqueued on this stream before the message was sent. A
    /// [named](crate::Cx::stream_named) stream is sent on only by this call.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) for a stream of another device than the operator's, where none of its work
    /// is. An operator on the host may choose any stream.
    pub fn set_stream<'a>(&mut self, stream: impl Into<Option<&'a Stream>>) -> Result<()> {
        let stream = stream.into();
        if let (Some(stream), Some(streams)) = (stream, &self.streams) {
            streams.require_own_device(stream)?;
        }
        self.stream = stream.cloned();
        Ok(())
    }

    /// Closes the output: the reader ends once it has taken what is left, and this operator ends as well.
    pub fn close(&mut self) {
        if let Readers::Outbox(outbox) = &mut self.readers {
            self.backlog = Some(Box::new(outbox.take()));
        }
        self.readers = Readers::Closed;
    }

    /// True if no message can reach a reader any more.
    pub fn is_closed(&self) -> bool {
        matches!(self.readers, Readers::Closed) || self.readers.have_ended()
    }
}

/// The messages that [`Output::send_all`] has not sent yet. Dropping it gives them back.
struct UnsentMessages<'a, M> {
    left: VecDeque<M>,
    messages: &'a mut Vec<M>,
}

impl<M> Drop for UnsentMessages<'_, M> {
    fn drop(&mut self) {
        *self.messages = std::mem::take(&mut self.left).into();
    }
}

/// The error of a send that has failed, with the message if it is still in `place`.
#[cold]
fn unsent<M: Message>(place: &mut Option<Parcel<M>>, error: Error) -> SendError<M> {
    SendError::new(place.take().map(|parcel| parcel.message), error)
}

/// See [`Output::departure`].
pub(crate) struct ExternalSend<M: Message> {
    /// The hub, if there is only one.
    external: Option<ExternalHandle<M>>,
    origin: Option<Stream>,
    /// Set if its messages are sampled.
    context: Option<Arc<RunContext>>,
}

/// A message that is ready to be enqueued.
pub(crate) struct PreparedSend {
    bytes: u64,
}

impl<M: Message> ExternalSend<M> {
    /// Where the messages are read, if there is only one hub.
    pub(crate) fn reader(&self) -> Option<&Device> {
        self.external.as_ref().map(ExternalHandle::reader)
    }

    /// Whether the hub can transfer the message to its reader.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage), for the sender `by`.
    pub(crate) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        self.external.as_ref().map_or(Ok(()), |hub| hub.accepts(message, by))
    }

    /// The load of an accepted message, with its journey if it is sampled.
    pub(crate) fn with_journey(&self, load: Option<Load>) -> Option<Load> {
        let journey = self.context.as_ref().and_then(|context| context.begin_external_journey());
        Load::with_journey(load, journey)
    }

    /// Prepares an accepted message: all user code of the message that a send calls is called here.
    pub(crate) fn prepare(&self, parcel: &mut Parcel<M>) -> Result<PreparedSend> {
        let bytes = parcel.message.size_in_bytes() as u64;
        if let Some(hub) = &self.external {
            hub.depart(parcel, self.origin.as_ref())?;
        }
        Ok(PreparedSend { bytes })
    }

    /// Lets the hub move its messages.
    pub(crate) fn move_queued(&self) -> Result<()> {
        self.external.as_ref().map_or(Ok(()), ExternalHandle::pump)
    }
}

impl<M: Message> Output<M> {
    #[inline]
    pub(super) fn poll_demand(&mut self, room: Room, interest: Interest, cx: &mut Context<'_>) -> Readiness {
        self.readers.poll(room.demand(), interest, cx.waker()).into()
    }

    /// Ready if the queue has room for `count` messages, regardless of blank envelopes.
    pub(crate) fn poll_queue_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.readers.poll(Demand::QueueRoom(count), Interest::Change, cx.waker()).into()
    }

    /// The number of free blank envelopes, once there are `count`. `usize::MAX` if there never will be.
    pub(crate) fn poll_free_blanks(&mut self, count: usize, cx: &mut Context<'_>) -> Poll<usize> {
        match self.readers.poll(Demand::Blanks(count), Interest::Change, cx.waker()) {
            Answer::Wait => Poll::Pending,
            Answer::Yes => Poll::Ready(self.readers.blanks().map_or(usize::MAX, |pool| pool.idle().max(count))),
            Answer::Never => Poll::Ready(usize::MAX),
        }
    }

    /// The number of blank envelopes that the hub has, free or in use. `None` if it has no pool of them.
    pub(crate) fn blank_count(&self) -> Option<usize> {
        self.readers.blanks().ok().map(|pool| pool.count())
    }
}

impl<M: Message> Output<M> {
    /// Takes a blank envelope of the hub, of length 0, to fill and to send in a message: an [`Envelope`], or a message that holds
    /// envelopes. Those that a message certainly needs, one for each `#[envelope]` field that is an envelope, are
    /// available when a run begins, because the port's condition was ready; for a further one the call waits.
    ///
    /// All blank envelopes of an output have the same size in bytes, for elements of any type. Where the messages hold
    /// envelopes of several types, the type is inferred from the use, or written: `blank::<f32>()`.
    ///
    /// ```
    /// use wakeline::{Message, prelude::*};
    ///
    /// #[derive(Message)]
    /// struct Frame {
    ///     number: u64,
    ///     #[envelope]
    ///     pixels: Envelope<u8>,
    /// }
    ///
    /// #[derive(Ports)]
    /// struct CameraPorts {
    ///     #[output(envelope_bytes = 4096)]
    ///     frames: Output<Frame>,
    /// }
    ///
    /// struct Camera(u64);
    ///
    /// impl Operator for Camera {
    ///     type Ports = CameraPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut CameraPorts, _cx: &mut Cx) -> Result<()> {
    ///         let mut pixels = ports.frames.blank().await?;
    ///         pixels.set_len(4096)?;
    ///         pixels.write().await?.fill(self.0 as u8);
    ///         self.0 += 1;
    ///         ports.frames.send(Frame { number: self.0, pixels }).await?;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    ///
    /// # How many there are
    /// By default a hub has as many envelopes on each side as its messages can have at most, times the number of
    /// messages that it queues and one more. Where a message has a list of envelopes, that number is not known: set it
    /// with [`HubOptions::envelopes`](crate::HubOptions::envelopes). A run that takes more than there are ends in a
    /// [stall](ErrorKind::Stalled), whose text names the hub and the number it needs.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if the size of the hub's envelopes was not set;
    /// [`Closed`](crate::ErrorKind::Closed) if the reader has ended.
    ///
    /// # Cancel safety
    /// An envelope is taken only when the future resolves: dropping the future loses none.
    pub fn blank<T: Plain>(&mut self) -> BlankFuture<'_, M, T>
    where
        M: Carries<T>,
    {
        BlankFuture { output: self, elements: PhantomData }
    }

    /// Takes `count` blank envelopes in one step. The caller drops those that are in `taken` if the result is not `Ok`.
    pub(crate) fn poll_blanks(
        &mut self,
        count: usize,
        taken: &mut RawEnvelopes,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        self.readers.poll_blanks(count, taken, cx.waker())
    }
}

/// The future of a blank envelope, from [`Output::blank`]. It is a type of its own so that a call for a message without
/// envelopes is one error.
#[must_use = "it does nothing unless it is awaited"]
pub struct BlankFuture<'a, M: Message, T> {
    output: &'a mut Output<M>,
    elements: PhantomData<fn() -> T>,
}

impl<M: Message, T: Plain> Future for BlankFuture<'_, M, T> {
    type Output = Result<Envelope<T>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Output { readers, context, .. } = &mut *self.output;
        if let Some(raw) = readers.blank()? {
            return Poll::Ready(Ok(Envelope::of_raw(raw)));
        }
        let polled = context.poll_port(RunWait::SENDS, cx, |task| match readers.poll_blank(task.waker()) {
            Poll::Ready(blank) => Ok(blank),
            Poll::Pending => Err(Readiness::WAIT),
        });
        polled.map_ok(Envelope::of_raw)
    }
}

/// Removes its waker.
impl<M: Message, T> Drop for BlankFuture<'_, M, T> {
    fn drop(&mut self) {
        self.output.readers.leave_blanks();
    }
}

impl<M: Message, T> fmt::Debug for BlankFuture<'_, M, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlankFuture").field(&self.output).finish()
    }
}

impl<M: Message> fmt::Debug for Output<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Output").field(&self.readers).finish()
    }
}

impl<M: Message> Port for Output<M> {
    type Handle = OutputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> OutputHandle<M> {
        OutputHandle::new(plan.add::<M>(name, PortKind::Output, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let room = if binder.need(name, options.need).1 { Room::Unconditional } else { options.room };
        // The output of a worker, or in a capture, is bound to an outbox that collects its messages.
        let readers = if binder.has::<Outbox<M>>(name) {
            Readers::Outbox(binder.end(name)?)
        } else {
            Readers::new(binder.ends(name)?)
        };
        let (streams, context) = (binder.streams.clone(), binder.context.clone());
        Ok(Self {
            readers,
            room,
            traffic: Traffic::default(),
            streams,
            context,
            stream: None,
            backlog: None,
            pending: None,
            closing: false,
        })
    }

    #[inline]
    fn poll_ready(&mut self, before: Readiness, cx: &mut Context<'_>) -> Readiness {
        self.poll_demand(self.room, before.interest(), cx)
    }

    /// This port is the only writer: the room is still there.
    #[inline]
    fn claim(&mut self) -> bool {
        true
    }

    fn give_back(&mut self) {}

    fn visit_handle(handle: OutputHandle<M>, visitor: &mut impl HandleVisitor) {
        visitor.output(handle);
    }
}
