//! [`Output`]: where messages go out, to one reader or to several.

use std::{
    any::Any,
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    carry::Carry,
    edge::{self, Blank, Exit, Passing},
    handle::OutputHandle,
    lane::Lane,
    plan::{Binder, Plan, PortKind, PortOptions},
    ports::{AnyPort, Flush, OutputPort, Port, Traffic},
    shown::InRun,
};
use crate::{
    condition::{self, Counted, PortState, Readiness, Room},
    error::Result,
    hub::{
        Envelope, Message, Outcome, RawEnvelope, Reply,
        baggage::Parcel,
        kept::Backlog,
        outlet::Outlet,
        queue::Answer,
        sender::{SentBy, Way},
    },
    memory::{HostAccess, Plain},
    stream::Stream,
    sync::Discarded,
};

/// Messages go out here: to one reader, or to each of several ([`Flow::connect`](crate::Flow::connect)).
///
/// With several, a message is sent when all have room: the slowest sets the pace, unless its hub drops messages instead
/// of holding the writer up. A reader that has ended is passed over; the output is closed when all have.
pub struct Output<M: Message> {
    to: Outlet<M>,
    /// What it waits for.
    room: Room,
    traffic: Traffic,
    /// `None` on the host.
    lane: Option<Arc<Lane>>,
    carry: Arc<Carry>,
    /// The stream that messages carry, if that was said.
    chosen: Option<Stream>,
    /// What workers have sent.
    backlog: Option<Box<Backlog<M>>>,
    /// What the host has to wait for before the first of those can be copied.
    pending: Option<Box<HostAccess>>,
    /// A worker has closed it.
    closes: bool,
}

/// What became of a message that was [offered](Output::offer).
#[derive(Debug)]
#[non_exhaustive]
pub struct Offer<M> {
    /// What each hub did with it, in the order of connecting; nothing if the port was closed.
    pub outcomes: Vec<Outcome>,
    /// The message, if nobody took it.
    pub kept: Option<M>,
}

impl<M: Message> Output<M> {
    /// Sends a message, waiting for room if there is none. The first of a run finds room: the port's condition said so.
    ///
    /// A wait for room in the middle of a run holds up what the operator has taken. Best sends no more in a run than its
    /// conditions promise, or has a hub with room for it.
    ///
    /// The order of device work travels with it: whoever uses an envelope next comes after all that was enqueued on it.
    ///
    /// # Errors
    /// [`Closed`](crate::ErrorKind::Closed) if the reader is gone or the port was closed; what went wrong on the way. The
    /// message is dropped then; [`try_send`](Self::try_send) gives it back. A reader may end at any moment: an operator
    /// that returns this error because its reader is gone has ended, and not failed.
    ///
    /// # Cancel safety
    /// Dropping the future before it resolves drops the message with it, unsent.
    #[inline]
    pub fn send(&mut self, message: M) -> impl Future<Output = Result<()>> + Send {
        let mut place = Discarded::new(self.parcel(message));
        async move { self.deliver(place.place()).await }
    }

    /// Sends what lies in `place`. It stays there until it lies in the queue.
    async fn deliver(&mut self, place: &mut Option<Parcel<M>>) -> Result<()> {
        loop {
            self.put(place, Outlet::try_send)?;
            let Some(parcel) = place else { return Ok(()) };
            if let Some(pending) = self.to.pending() {
                // Boxed, as it is seldom and large: every operator's future would have room for it.
                Box::pin(pending.wait()).await?;
                continue;
            }
            let answer = poll_fn(|task| {
                self.carry.poll_port(InRun::SENDS, task, |task| {
                    match self.to.poll_send(&mut parcel.message, task.waker()) {
                        Answer::Wait => Err(Readiness::WAIT),
                        answer => Ok(answer),
                    }
                })
            });
            if answer.await == Answer::Never {
                return Err(self.to.closed());
            }
        }
    }

    /// Sends a message if there is room, in all hubs whose readers have not ended; gives it back if not. So too, where
    /// several readers are on the host as it is, an envelope that a device still writes: [`send`](Self::send) waits for
    /// that.
    ///
    /// # Errors
    /// As [`Output::send`].
    pub fn try_send(&mut self, message: M) -> Result<Result<(), M>> {
        let mut place = Discarded::new(self.parcel(message));
        self.put(place.place(), Outlet::try_send)?;
        Ok(place.take().map_or(Ok(()), |parcel| Err(parcel.message)))
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
        self.deliver(Discarded::new(Parcel::with(message, Some(load))).place()).await
    }

    /// What a message needs to be sent by [`try_send_departed`](Self::try_send_departed), for a sender that holds a lock
    /// only while the message is enqueued.
    pub(crate) fn departure(&self) -> Departure<M> {
        let own = self.lane.as_ref().and_then(|lane| lane.own().cloned().or_else(|| lane.lent()));
        Departure { way: self.to.way(), origin: self.chosen.clone().or(own) }
    }

    /// Sends what lies in `place` if there is room; otherwise it stays there. What the hub drops for it comes to lie in
    /// `dropped`. No code of the message's runs; the hub moves nothing before [`Departure::arrive`].
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        departed: &Departed,
        dropped: &mut Option<Parcel<M>>,
    ) -> Result<()> {
        self.to.try_send_departed(place, departed.stamped, departed.origin.as_ref(), dropped)?;
        if place.is_none() {
            self.traffic.add(departed.bytes);
        }
        Ok(())
    }

    /// Sends what lies in `place` if there is room; otherwise it stays there.
    #[inline]
    fn put(
        &mut self,
        place: &mut Option<Parcel<M>>,
        send: impl FnOnce(&mut Outlet<M>, &mut Option<Parcel<M>>, Option<&Stream>) -> Result<()>,
    ) -> Result<()> {
        let bytes = place.as_ref().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        self.carrying(|to, origin| send(to, place, origin))?;
        if place.is_none() {
            self.traffic.add(bytes);
        }
        Ok(())
    }

    /// Sends a message to whoever has room for it, and tells what became of it at each: for an output that is
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
    /// What went wrong on the way. Readers that have ended are none.
    pub fn offer(&mut self, message: M) -> Result<Offer<M>> {
        let mut place = Discarded::new(self.parcel(message));
        let bytes = place.get().map_or(0, |parcel| parcel.message.size_in_bytes() as u64);
        let outcomes = self.carrying(|to, origin| to.offer(place.place(), origin))?;
        let kept = place.take().map(|parcel| parcel.message);
        if kept.is_none() {
            self.traffic.add(bytes);
        }
        Ok(Offer { outcomes, kept })
    }

    /// A message with what it takes along.
    #[inline]
    fn parcel(&self, message: M) -> Parcel<M> {
        Parcel::with(message, self.carry.load())
    }

    /// Does something with the stream that messages carry.
    #[inline]
    fn carrying<R>(&mut self, send: impl FnOnce(&mut Outlet<M>, Option<&Stream>) -> R) -> R {
        match (&self.chosen, &self.lane) {
            (Some(chosen), _) => send(&mut self.to, Some(chosen)),
            (None, None) => send(&mut self.to, None),
            (None, Some(lane)) => match lane.own() {
                Some(own) => send(&mut self.to, Some(own)),
                None => send(&mut self.to, lane.lent().as_ref()),
            },
        }
    }

    /// From now on messages carry this stream; with `None` the operator's own again, as they do without a call.
    ///
    /// It is what the reader sees in [`Input::streams`](super::Input::streams); and whatever it touches that wakeline does not track comes after
    /// what was put into this stream before the message was sent. A [named](crate::Cx::stream_named) stream is sent on only
    /// by this.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) for a stream of another device than the operator's, which its work is not on. An
    /// operator on the host may choose any.
    pub fn set_stream<'a>(&mut self, stream: impl Into<Option<&'a Stream>>) -> Result<()> {
        let stream = stream.into();
        if let (Some(stream), Some(lane)) = (stream, &self.lane) {
            lane.require_own_device(stream)?;
        }
        self.chosen = stream.cloned();
        Ok(())
    }

    /// Says that nothing more will be sent: the reader ends once it has taken what is left, and so does this operator.
    pub fn close(&mut self) {
        if let Outlet::Kept(kept) = &mut self.to {
            self.backlog = Some(Box::new(kept.take()));
        }
        self.to = Outlet::Nobody;
    }

    /// True if nothing that is sent can arrive any more.
    pub fn is_closed(&self) -> bool {
        matches!(self.to, Outlet::Nobody) || self.to.readers_gone()
    }
}

/// See [`Output::departure`].
pub(crate) struct Departure<M: Message> {
    /// To the one reader.
    way: Option<Way<M>>,
    origin: Option<Stream>,
}

/// A message that is ready to be enqueued.
pub(crate) struct Departed {
    bytes: u64,
    /// Its envelopes are marked with the stream.
    stamped: bool,
    origin: Option<Stream>,
}

impl<M: Message> Departure<M> {
    /// Whether the hub can bring the message to its reader.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage), for who has sent it.
    pub(crate) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        self.way.as_ref().map_or(Ok(()), |way| way.accepts(message, by))
    }

    /// Prepares a message that is accepted: all of its code that a send calls is called here.
    pub(crate) fn of(&self, message: &mut M) -> Result<Departed> {
        let bytes = message.size_in_bytes() as u64;
        let stamped = match &self.way {
            Some(way) => way.depart(message, self.origin.as_ref())?,
            None => false,
        };
        Ok(Departed { bytes, stamped, origin: self.origin.clone() })
    }

    /// The hub moves what can be moved.
    pub(crate) fn arrive(&self) -> Result<()> {
        self.way.as_ref().map_or(Ok(()), Way::pump)
    }
}

impl<M: Message> Output<M> {
    /// Room for so many messages in the queue, whether there are blank envelopes or not?
    pub(crate) fn poll_places(&self, count: usize, cx: &mut Context<'_>) -> Readiness {
        self.to.poll_places(count, cx.waker()).into()
    }

    /// Ready if a blank envelope is at home, or none will ever come.
    pub(crate) fn poll_has_blank(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.to.poll_blank(cx.waker()) {
            Answer::Wait => Poll::Pending,
            Answer::Yes | Answer::Never => Poll::Ready(()),
        }
    }
}

/// A future that waits for a blank envelope: its waker goes with it.
struct WaitsForBlank<'a, M: Message>(&'a mut Output<M>);

impl<M: Message> Drop for WaitsForBlank<'_, M> {
    fn drop(&mut self) {
        self.0.to.leave_blanks();
    }
}

impl<T: Plain> Output<Envelope<T>> {
    /// A blank envelope of the hub's, to fill and to send. It is there: the port's condition said so before the
    /// operator ran; a second one in the same run is waited for.
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if nobody said how large the hub's envelopes are, [`Closed`](crate::ErrorKind::Closed) if
    /// the reader is gone.
    ///
    /// # Cancel safety
    /// An envelope is taken only as the future resolves: dropping it loses none.
    pub fn blank(&mut self) -> impl Future<Output = Result<Envelope<T>>> + Send {
        async move {
            if let Some(raw) = self.to.blank()? {
                return Ok(Envelope::of_raw(raw));
            }
            let carry = self.carry.clone();
            let waits = WaitsForBlank(self);
            poll_fn(|task| {
                carry.poll_port(InRun::SENDS, task, |task| match waits.0.poll_blank(task) {
                    Poll::Ready(blank) => Ok(blank),
                    Poll::Pending => Err(Readiness::WAIT),
                })
            })
            .await
        }
    }

    pub(crate) fn poll_blank(&mut self, cx: &mut Context<'_>) -> Poll<Result<Envelope<T>>> {
        loop {
            if let Some(raw) = self.to.blank()? {
                return Poll::Ready(Ok(Envelope::of_raw(raw)));
            }
            match self.to.poll_blank(cx.waker()) {
                Answer::Yes => {}
                Answer::Wait => return Poll::Pending,
                Answer::Never => return Poll::Ready(Err(self.to.closed())),
            }
        }
    }
}

impl<M: Message> fmt::Debug for Output<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Output").field(&self.to).finish()
    }
}

impl<M: Message> OutputPort for Output<M> {}

impl<M: Message> PortState for Output<M> {
    fn poll_count(&mut self, _most: usize, _cx: &mut Context<'_>) -> Counted {
        Counted::NONE
    }

    fn poll_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness {
        condition::room_for(&self.to, Room::For(count), cx)
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
        self.to.readers_gone()
    }

    fn watch(&mut self, waker: &Waker) {
        self.to.watch(waker);
    }

    fn spread(&mut self) -> Result<(Vec<Box<dyn Any + Send>>, Option<Box<dyn Any + Send>>)> {
        Ok((vec![Box::new(self.to.for_worker())], None))
    }

    fn kept(&mut self) -> Option<Box<dyn Any + Send>> {
        match &mut self.to {
            Outlet::Kept(kept) => Some(Box::new((kept.take(), false))),
            // The worker has closed it.
            _ => Some(Box::new((self.backlog.take().map(|kept| *kept).unwrap_or_default(), true))),
        }
    }

    fn accept(&mut self, kept: Box<dyn Any + Send>) {
        let Ok(kept) = kept.downcast::<(Backlog<M>, bool)>() else { return };
        let (mut kept, closes) = *kept;
        self.backlog.get_or_insert_default().append(&mut kept);
        self.closes |= closes;
    }

    fn exit(&mut self) -> Option<&mut dyn Exit> {
        if M::IS_ENVELOPE { Some(self) } else { None }
    }

    fn closes(&self) -> bool {
        self.closes
    }

    fn settle(&mut self) {
        if std::mem::take(&mut self.closes) {
            self.close();
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Flush {
        loop {
            if let Some(pending) = &mut self.pending {
                let Poll::Ready(done) = Pin::new(&mut **pending).poll(cx) else { return Err(Readiness::WAIT_EVENT) };
                self.pending = None;
                if done.is_err() {
                    return Ok(done);
                }
            }
            let Some(first) = self.backlog.as_mut().and_then(|backlog| backlog.pop_front()) else {
                return Ok(Ok(()));
            };
            let mut first = Discarded::new(first);
            let (mut answer, mut bytes) = (Answer::Wait, 0);
            if let Some((parcel, _)) = first.get_mut() {
                answer = self.to.poll_send(&mut parcel.message, cx.waker());
                bytes = parcel.message.size_in_bytes() as u64;
            }
            let back = match (answer, first.take()) {
                (Answer::Wait, first) => first,
                (_, None) => None,
                (_, Some((parcel, stamp))) => match self.to.hand_on(parcel, stamp) {
                    Ok(sent) => sent.err(),
                    Err(error) => return Ok(Err(error)),
                },
            };
            let Some(back) = back else {
                self.traffic.add(bytes);
                continue;
            };
            self.backlog.get_or_insert_default().push_front(back);
            self.pending = self.to.pending().map(Box::new);
            if self.pending.is_some() {
                continue;
            }
            if answer != Answer::Wait {
                // Another was quicker.
                cx.waker().wake_by_ref();
            }
            return Err(Readiness::WAIT);
        }
    }
}

impl<M: Message> Exit for Output<M> {
    fn blank(&mut self) -> Result<Blank> {
        edge::blank(&self.to)
    }

    fn send(&mut self, envelope: RawEnvelope, passing: &Passing) -> Result<()> {
        edge::send(&mut self.backlog, envelope, passing)
    }

    fn keep(&mut self, stream: &Stream) -> Box<dyn Any + Send> {
        edge::keep(&self.to, stream)
    }

    fn kept(&mut self) -> Vec<RawEnvelope> {
        edge::kept(&mut self.to)
    }
}

impl<M: Message> Port for Output<M> {
    type Handle = OutputHandle<M>;

    fn declare(plan: &mut Plan, name: &'static str, options: PortOptions) -> OutputHandle<M> {
        OutputHandle::new(plan.add::<M>(name, PortKind::Output, options))
    }

    fn bind(binder: &mut Binder<'_>, name: &'static str, options: PortOptions) -> Result<Self> {
        let room = if binder.need(name, options.need).1 { Room::Unconditional } else { options.room };
        // Of a worker's, or in a capture, it keeps what is sent.
        let to = if binder.has::<Outlet<M>>(name) { binder.end(name)? } else { Outlet::new(binder.ends(name)?) };
        let (lane, carry) = (binder.lane.clone(), binder.carry.clone());
        Ok(Self {
            to,
            room,
            traffic: Traffic::default(),
            lane,
            carry,
            chosen: None,
            backlog: None,
            pending: None,
            closes: false,
        })
    }

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Readiness {
        condition::room_for(&self.to, self.room, cx)
    }

    #[inline]
    fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        condition::look_for_room(&self.to, self.room, cx)
    }

    /// This is the only writer: the room that was there still is.
    #[inline]
    fn claim(&mut self) -> bool {
        true
    }

    fn unclaim(&mut self) {}
}
