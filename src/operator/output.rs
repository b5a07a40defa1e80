//! [`Output`]: one hub's end, where messages go out.

use std::{
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    carry::Carry,
    handle::OutputHandle,
    lane::Lane,
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{AnyPort, OutputPort, Port, Traffic},
};
use crate::{
    condition::{self, Counted, PortState, Readiness},
    error::{Error, ErrorKind, Result},
    hub::{
        Envelope, Message, Reply,
        baggage::{Load, Parcel},
        link::Sender,
        queue::Answer,
    },
    memory::Plain,
    stream::Stream,
};

/// Messages go out here.
pub struct Output<M: Message> {
    /// `None` once closed.
    sender: Option<Sender<M>>,
    traffic: Traffic,
    /// `None` on the host.
    lane: Option<Arc<Lane>>,
    carry: Arc<Carry>,
    /// It waits for no room: something else does, or nothing.
    off: bool,
    /// The stream that messages carry, if that was said.
    chosen: Option<Stream>,
}

impl<M: Message> Output<M> {
    /// Sends a message, waiting for room if there is none. The first of a run finds room: the port's condition said so.
    ///
    /// A wait for room in the middle of a run counts as work under way: a flow whose operators all wait so is not told
    /// to be stalled. Send no more in a run than its conditions promise, or give the hub room for it.
    ///
    /// The order of device work travels with it: whoever uses an envelope next comes after all that was enqueued on it.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if the reader is gone or the port was closed; what went wrong on the way. The
    /// message is dropped then; [`try_send`](Self::try_send) gives it back. A reader may end at any moment: an operator
    /// that returns this error because its reader is gone has ended, and not failed.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    pub async fn send(&mut self, message: M) -> Result<()> {
        self.send_with(message, |output| output.carry.load()).await
    }

    async fn send_with(&mut self, mut message: M, load: impl Fn(&Self) -> Option<Load>) -> Result<()> {
        loop {
            let load = load(self);
            match self.try_send_with(message, load)? {
                Ok(()) => return Ok(()),
                Err(back) => message = back,
            }
            let answer = poll_fn(|cx| match self.sender.as_ref().map(|sender| sender.poll_queue(cx.waker())) {
                Some(Answer::Wait) => Poll::Pending,
                answer => Poll::Ready(answer),
            });
            if let None | Some(Answer::Never) = answer.await {
                return Err(self.closed());
            }
        }
    }

    /// Sends a message if there is room; gives it back if not.
    ///
    /// # Errors
    /// As [`Output::send`].
    pub fn try_send(&mut self, message: M) -> Result<Result<(), M>> {
        self.try_send_with(message, self.carry.load())
    }

    /// Sends a message as the answer to some of those that were taken, and to no other: see
    /// [`Cx::take_replies`](crate::Cx::take_replies). Otherwise as [`send`](Self::send).
    ///
    /// # Errors
    /// As [`Output::send`].
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent, and its callers are not answered by it.
    pub async fn send_for(&mut self, reply: Reply, message: M) -> Result<()> {
        let load = self.carry.load_for(reply);
        self.send_with(message, |_| Some(load.clone())).await
    }

    /// Sends a message with a load that is not the run's.
    pub(crate) fn try_send_with(&mut self, message: M, load: Option<Load>) -> Result<Result<(), M>> {
        let Some(sender) = self.sender.as_ref().filter(|sender| !sender.reader_gone()) else {
            return Err(self.closed());
        };
        let bytes = message.size_in_bytes() as u64;
        let parcel = Parcel::with(message, load);
        let number = self.traffic.messages + 1;
        let origin = |stream| Some((stream, number));
        let sent = match (&self.chosen, &self.lane) {
            (Some(chosen), _) => sender.try_send(parcel, origin(chosen))?,
            (None, None) => sender.try_send(parcel, None)?,
            (None, Some(lane)) => match lane.own() {
                Some(own) => sender.try_send(parcel, origin(own))?,
                None => sender.try_send(parcel, lane.lent().as_ref().and_then(origin))?,
            },
        };
        if sent.is_ok() {
            self.traffic.messages += 1;
            self.traffic.bytes += bytes;
        }
        Ok(sent.map_err(|parcel| parcel.message))
    }

    /// From now on messages carry this stream; with `None` the operator's own again, as they do without a call.
    ///
    /// It is what the reader sees in [`Input::streams`](super::Input::streams); and whatever it touches that wakeline does not track comes after
    /// what was put into this stream before the message was sent. A [named](crate::Cx::stream_named) stream is sent on only
    /// by this.
    pub fn set_stream<'a>(&mut self, stream: impl Into<Option<&'a Stream>>) {
        self.chosen = stream.into().cloned();
    }

    /// Says that nothing more will be sent: the reader ends once it has taken what is left, and so does this operator.
    pub fn close(&mut self) {
        self.sender = None;
    }

    /// True if nothing that is sent can arrive any more.
    pub fn is_closed(&self) -> bool {
        self.sender.as_ref().is_none_or(Sender::reader_gone)
    }

    fn closed(&self) -> Error {
        match &self.sender {
            None => Error::new(ErrorKind::Closed, "this output was closed"),
            Some(sender) => Error::new(ErrorKind::Closed, format!("the reader of hub `{}` has ended", sender.hub())),
        }
    }
}

impl<M: Message> Output<M> {
    /// Room for so many messages in the queue, whether there are blank envelopes or not?
    pub(crate) fn poll_places(&self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.sender.as_ref().map_or(Readiness::NEVER, |sender| sender.poll_room_for(count, cx.waker()).into())
    }
}

impl<T: Plain> Output<Envelope<T>> {
    /// A blank envelope of the hub's, to fill and to send. It is there: the port's condition said so before the
    /// operator ran; a second one in the same run is waited for, and as with [`send`](Self::send) that wait counts as work
    /// under way.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if nobody said how large the hub's envelopes are, [`Closed`](ErrorKind::Closed) if
    /// the reader is gone.
    ///
    /// # Cancel safety
    /// An envelope is taken only as the future resolves: dropping it loses none.
    pub async fn blank(&mut self) -> Result<Envelope<T>> {
        poll_fn(|cx| self.poll_blank(cx)).await
    }

    pub(crate) fn poll_blank(&mut self, cx: &mut Context<'_>) -> Poll<Result<Envelope<T>>> {
        loop {
            let Some(sender) = &self.sender else { return Poll::Ready(Err(self.closed())) };
            if let Some(raw) = sender.blank()? {
                return Poll::Ready(Ok(Envelope::of_raw(raw)));
            }
            match sender.poll_blank(cx.waker()) {
                Answer::Yes => {}
                Answer::Wait => return Poll::Pending,
                Answer::Never => return Poll::Ready(Err(self.closed())),
            }
        }
    }
}

impl<M: Message> fmt::Debug for Output<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Output").field(&self.sender).finish()
    }
}

impl<M: Message> OutputPort for Output<M> {}

impl<M: Message> PortState for Output<M> {
    fn poll_count(&mut self, _most: usize, _cx: &mut Context<'_>) -> Counted {
        Counted { ready: 0, more: Readiness::NEVER }
    }

    fn poll_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.sender.as_ref().map_or(Readiness::NEVER, |sender| condition::room_for(sender, count, cx))
    }

    fn oldest(&self) -> Option<Instant> {
        None
    }
}

impl<M: Message> AnyPort for Output<M> {
    fn state(&mut self) -> &mut dyn PortState {
        self
    }

    fn is_output(&self) -> bool {
        true
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    fn reader_gone(&self) -> bool {
        self.sender.as_ref().is_some_and(Sender::reader_gone)
    }

    fn watch(&mut self, waker: &Waker) {
        if let Some(sender) = &self.sender {
            sender.watch(waker);
        }
    }
}

impl<M: Message> Port for Output<M> {
    type Handle = OutputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> OutputHandle<M> {
        OutputHandle::new(plan.add::<M>(name, PortKind::Output, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let (need, off) = binder.need(name, options.need);
        let (sender, lane, carry) = (Some(binder.end(name)?), binder.lane.clone(), binder.carry.clone());
        Ok(Self { sender, traffic: Traffic::default(), lane, carry, off: off || need.optional, chosen: None })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        match &self.sender {
            _ if self.off => Readiness::READY,
            Some(sender) => condition::room_for(sender, 1, cx),
            None => Readiness::NEVER,
        }
    }

    /// This is the only writer: the room that was there still is.
    #[inline]
    fn claim(&mut self) -> bool {
        true
    }

    fn unclaim(&mut self) {}
}
