//! [`Output`]: a port that sends messages, to one reader or to several.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

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
    error::{Error, ErrorKind, Result},
    hub::{
        Envelope, Message, Outcome, Reply,
        end_waker::Interest,
        ends::Demand,
        external::{ExternalHandle, SentBy},
        outbox::{Outbox, OutboxQueue},
        parcel::Parcel,
        queue::Answer,
    },
    memory::{HostAccess, Plain},
    stream::Stream,
    sync::DiscardOnDrop,
};

/// A port that sends messages: to one reader, or to each of several ([`Flow::connect`](crate::Flow::connect)).
///
/// With several readers, a message is sent when all have room: the slowest sets the pace, unless its hub drops messages
/// instead of making the writer wait. A reader that has ended is skipped; the output is closed when all have ended.
pub struct Output<M: Message> {
    pub(super) readers: Readers<M>,
    /// The room that the port waits for.
    pub(super) room: Room,
    pub(super) traffic: Traffic,
    /// `None` on the host.
    pub(super) streams: Option<Arc<OperatorStreams>>,
    pub(super) context: Arc<RunContext>,
    /// The stream that messages carry, if [`set_stream`](Self::set_stream) was called.
    pub(super) stream: Option<Stream>,
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
    /// The message, if no hub took it.
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
    /// transfer. The message is dropped then; [`try_send`](Self::try_send) returns it instead. A reader may end at any
    /// moment: an operator that returns this error because its reader has ended counts as ended, not as failed.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    #[inline]
    pub fn send(&mut self, message: M) -> impl Future<Output = Result<()>> + Send {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        async move { self.deliver(place.place()).await }
    }

    /// Sends the message in `place`, which stays there until it is in the queue.
    async fn deliver(&mut self, place: &mut Option<Parcel<M>>) -> Result<()> {
        loop {
            self.send_if_room(place)?;
            let Some(parcel) = place else { return Ok(()) };
            if let Some(pending) = self.readers.pending() {
                // Boxed, since it is rare and large: every operator's future would reserve space for it.
                Box::pin(pending.wait()).await?;
                continue;
            }
            let answer = poll_fn(|task| {
                self.context.poll_port(RunWait::SENDS, task, |task| {
                    match self.readers.poll_send(&mut parcel.message, task.waker()) {
                        Answer::Wait => Err(Readiness::WAIT),
                        answer => Ok(answer),
                    }
                })
            });
            if answer.await == Answer::Never {
                return Err(self.readers.closed());
            }
        }
    }

    /// Sends a message if all hubs whose readers have not ended have room; otherwise returns it. It is also returned if
    /// it is an envelope that a device still writes, and several readers on the host receive it without a copy:
    /// [`send`](Self::send) waits for that.
    ///
    /// # Errors
    /// The same as for [`Output::send`].
    pub fn try_send(&mut self, message: M) -> Result<Result<(), M>> {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        self.send_if_room(place.place())?;
        Ok(place.take().map_or(Ok(()), |parcel| Err(parcel.message)))
    }

    /// Sends a message as the response to some of those that were taken, and to no other: see
    /// [`Cx::take_replies`](crate::Cx::take_replies). Otherwise like [`send`](Self::send).
    ///
    /// # Errors
    /// The same as for [`Output::send`].
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent, and its callers get no response from
    /// it.
    pub async fn send_for(&mut self, reply: Reply, message: M) -> Result<()> {
        let load = self.context.load_for(reply);
        self.deliver(DiscardOnDrop::new(Parcel::new(message, Some(load))).place()).await
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
        ExternalSend { external: self.external(), origin: self.stream.clone().or(own) }
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

    /// Sends the message in `place` if there is room; otherwise it stays there.
    #[inline]
    fn send_if_room(&mut self, place: &mut Option<Parcel<M>>) -> Result<()> {
        let bytes = place.as_ref().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        self.with_origin(|readers, origin| match readers {
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
    /// The error of a failed transfer. A reader that has ended is not an error.
    pub fn offer(&mut self, message: M) -> Result<Offer<M>> {
        let mut place = DiscardOnDrop::new(self.parcel(message));
        let bytes = place.get().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        let outcomes = self.with_origin(|readers, origin| Self::offer_to_each(readers, place.place(), origin))?;
        let kept = place.take().map(|parcel| parcel.message);
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
                sender.try_send(place, origin)?;
                Ok(vec![if place.is_none() { outcome } else { Outcome::Full }])
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

/// See [`Output::departure`].
pub(crate) struct ExternalSend<M: Message> {
    /// The hub, if there is only one.
    external: Option<ExternalHandle<M>>,
    origin: Option<Stream>,
}

/// A message that is ready to be enqueued.
pub(crate) struct PreparedSend {
    bytes: u64,
}

impl<M: Message> ExternalSend<M> {
    /// Whether the hub can transfer the message to its reader.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage), for the sender `by`.
    pub(crate) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        self.external.as_ref().map_or(Ok(()), |hub| hub.accepts(message, by))
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

    /// Ready if the hub has a blank envelope available, or will never have one.
    pub(crate) fn poll_has_blank(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.readers.poll(Demand::Blank, Interest::Change, cx.waker()) {
            Answer::Wait => Poll::Pending,
            Answer::Yes | Answer::Never => Poll::Ready(()),
        }
    }
}

/// A future that waits for a blank envelope; dropping it removes its waker.
struct WaitsForBlank<'a, M: Message>(&'a mut Output<M>);

impl<M: Message> Drop for WaitsForBlank<'_, M> {
    fn drop(&mut self) {
        self.0.readers.leave_blanks();
    }
}

impl<T: Plain> Output<Envelope<T>> {
    /// Takes a blank envelope of the hub, to fill and to send. The first one of a run is available, because the port's
    /// condition was ready; for a second one the call waits.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if the size of the hub's envelopes was not set;
    /// [`Closed`](crate::ErrorKind::Closed) if the reader has ended.
    ///
    /// # Cancel safety
    /// An envelope is taken only when the future resolves: dropping the future loses none.
    pub fn blank(&mut self) -> impl Future<Output = Result<Envelope<T>>> + Send {
        async move {
            if let Some(raw) = self.readers.blank()? {
                return Ok(Envelope::of_raw(raw));
            }
            let context = self.context.clone();
            let waits = WaitsForBlank(self);
            poll_fn(|task| {
                context.poll_port(RunWait::SENDS, task, |task| match waits.0.poll_blank(task) {
                    Poll::Ready(blank) => Ok(blank),
                    Poll::Pending => Err(Readiness::WAIT),
                })
            })
            .await
        }
    }

    pub(crate) fn poll_blank(&mut self, cx: &mut Context<'_>) -> Poll<Result<Envelope<T>>> {
        loop {
            if let Some(raw) = self.readers.blank()? {
                return Poll::Ready(Ok(Envelope::of_raw(raw)));
            }
            match self.readers.poll(Demand::Blank, Interest::Change, cx.waker()) {
                Answer::Yes => {}
                Answer::Wait => return Poll::Pending,
                Answer::Never => return Poll::Ready(Err(self.readers.closed())),
            }
        }
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
