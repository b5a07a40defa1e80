//! [`Sender`]: the writer's end of a hub.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    Copier, Message,
    baggage::{Parcel, Since},
    envelope::RawEnvelope,
    link::HubCore,
    outbox::Stamped,
    pool::Pool,
    queue::{Answer, Full, Pushed},
    settle::refused,
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket},
    sync::{Discarded, discard},
};

/// The writer's end of a hub. Dropping it ends the reader after it has taken the queued messages.
pub(crate) struct Sender<M: Message> {
    link: Arc<HubCore<M>>,
    sent: u64,
}

impl<M: Message> Sender<M> {
    pub(super) fn new(link: Arc<HubCore<M>>) -> Self {
        Self { link, sent: 0 }
    }

    /// Whether there is room in the queue and, where the hub has them, a blank envelope.
    #[inline]
    pub(crate) fn poll_room(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        if link.failed.get().is_some() {
            return Answer::Yes;
        }
        match link.queue.poll_room(waker) {
            Answer::Yes => self.poll_blank(waker),
            other => self.unless_failed(other),
        }
    }

    /// Whether there is room in the queue and, where the hub has them, blank envelopes, for this many messages.
    pub(crate) fn poll_room_for(&self, messages: usize, waker: &Waker) -> Answer {
        self.ask_for(messages, messages);
        self.poll_until(waker, || self.has_room(messages) && self.has_blanks(messages))
    }

    /// Whether there is room in the queue for this many messages.
    pub(crate) fn poll_places(&self, messages: usize, waker: &Waker) -> Answer {
        self.poll_until(waker, || self.has_room(messages))
    }

    fn poll_until(&self, waker: &Waker, is_there: impl Fn() -> bool) -> Answer {
        let ask = || match () {
            () if self.link.failed.get().is_some() => Answer::Yes,
            () if self.poll_reader(waker) == Answer::Never => Answer::Never,
            () if is_there() => Answer::Yes,
            () => Answer::Wait,
        };
        match ask() {
            Answer::Wait => {
                // Checked again: the change may have come before the waker was registered.
                self.watch(waker);
                ask()
            }
            answer => answer,
        }
    }

    /// Like `poll_room`, for a writer that waits for something else and polls again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        if link.blanks.is_some() || link.failed.get().is_some() {
            return self.poll_room(waker);
        }
        self.unless_failed(link.queue.look_for_room(waker))
    }

    /// Whether there is room in the queue.
    #[inline]
    pub(crate) fn poll_queue(&self, waker: &Waker) -> Answer {
        if self.link.failed.get().is_some() {
            return Answer::Yes;
        }
        self.unless_failed(self.link.queue.poll_room(waker))
    }

    /// The hub may have failed before the waker was registered, in which case nothing would wake it.
    #[inline]
    fn unless_failed(&self, answer: Answer) -> Answer {
        if answer == Answer::Wait && self.link.failed.get().is_some() { Answer::Yes } else { answer }
    }

    /// Whether there is a blank envelope, or `Yes` if the hub has no pool of them.
    #[inline]
    pub(crate) fn poll_blank(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        let Some(blanks) = &link.blanks else { return Answer::Yes };
        if blanks.has(1) || link.failed.get().is_some() {
            return Answer::Yes;
        }
        link.queue.keep_writer(waker);
        if link.queue.reader_gone() {
            return Answer::Never;
        }
        // Checked again: one may have been returned before the waker was registered.
        if blanks.has(1) { Answer::Yes } else { self.unless_failed(Answer::Wait) }
    }

    /// Takes a blank envelope, if one is free; an error if the hub has no pool of them.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.check()?;
        match &self.link.blanks {
            Some(blanks) => blanks.take(),
            None => self.blanks().map(|_| None),
        }
    }

    /// The pool of blank envelopes, or an error that says why there is none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.link.blanks.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!(
                    "hub `{}` has no blank envelopes: set their size with `#[output(envelope_bytes = ..)]` or \
                     `Hub::envelope_bytes`",
                    self.link.name
                ),
            )
        })
    }

    /// Sends the message in `place`, if there is room; otherwise it stays there. `origin`: the stream on which its
    /// sender works.
    #[inline]
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        self.check()?;
        let Some(parcel) = place else { return Ok(()) };
        let stamped = depart(&mut parcel.message, origin)?;
        self.check_places(&mut parcel.message)?;
        if !self.has_room(1) {
            return Ok(());
        }
        let stamp = origin.filter(|_| !stamped).map(stamp_of).transpose()?;
        self.push(place, stamp)
    }

    /// Sends a message that has [departed](Way::depart), like `try_send`. `dropped` gets the message that the hub
    /// drops for it, which may be this one. Nothing is moved.
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        stamped: bool,
        origin: Option<&Stream>,
        dropped: impl FnOnce(Parcel<M>),
    ) -> Result<()> {
        self.check()?;
        if !self.has_room(1) {
            return Ok(());
        }
        let stamp = origin.filter(|_| !stamped).map(stamp_of).transpose()?;
        self.enqueue(place, stamp, dropped);
        Ok(())
    }

    /// A handle of the hub, for the steps before and after sending that run without borrowing the sender. Marks the
    /// hub as fed from outside its flow.
    pub(super) fn way(&self) -> ExternalHandle<M> {
        self.link.is_fed_from_outside();
        ExternalHandle(self.link.clone())
    }

    /// Pushes a departed message into the queue. It stays in `place` if there is no room or no reader.
    #[inline]
    pub(super) fn push(&mut self, place: &mut Option<Parcel<M>>, stamp: Option<Ticket>) -> Result<()> {
        if self.enqueue(place, stamp, discard) { self.link.pump() } else { Ok(()) }
    }

    /// Whether there may be a message to move.
    #[inline]
    fn enqueue(
        &mut self,
        place: &mut Option<Parcel<M>>,
        stamp: Option<Ticket>,
        dropped: impl FnOnce(Parcel<M>),
    ) -> bool {
        let (link, count) = (&*self.link, self.sent + 1);
        let stamped = stamp.is_some();
        if let Some(stamp) = stamp {
            link.stamps.put(count, stamp);
        }
        // Where nothing is ever moved, it can be taken at once.
        let moves = M::CARRIES_ENVELOPES && link.arrivals.is_some();
        if let Some(parcel) = place {
            link.note_time(parcel, Since::Sent);
            if !moves {
                link.note_time(parcel, Since::Arrived);
            }
        }
        let pushed = link.queue.push(place, !moves);
        match pushed {
            Pushed::In => self.sent = count,
            Pushed::InFor(number) => {
                self.sent = count;
                link.stamps.forget(number);
                place.take().map(dropped);
            }
            Pushed::Refused | Pushed::Back => {
                if stamped {
                    link.stamps.take_back(count);
                }
                if pushed == Pushed::Refused {
                    place.take().map(dropped);
                }
                return false;
            }
        }
        moves
    }

    /// Like `hand_on`, if there is room; otherwise returns the message with its stamp.
    pub(crate) fn try_hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<Result<(), Stamped<M>>> {
        let mut place = Discarded::new(parcel);
        self.check()?;
        if let Some(parcel) = place.get_mut() {
            self.check_places(&mut parcel.message)?;
        }
        if self.has_room(1) {
            self.push(place.place(), stamp.clone())?;
        }
        Ok(place.take().map_or(Ok(()), |parcel| Err((parcel, stamp))))
    }

    /// Pushes a message that was taken from another hub into this one, which always has room for it.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<()> {
        // Always succeeds: the reader closes after this sender.
        self.push(Discarded::new(parcel).place(), stamp)
    }

    /// Checks that a hub that copies nothing gets only envelopes that are at the reader's location.
    #[inline]
    pub(super) fn check_places(&self, message: &mut M) -> Result<()> {
        check_places(&self.link, message)
    }

    /// Returns the hub's error, if it has failed.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.link.check()
    }

    /// Whether there is room in the queue for this many messages, or if it drops messages instead.
    #[inline]
    pub(super) fn has_room(&self, messages: usize) -> bool {
        self.link.queue.has_room(messages)
    }

    /// Whether the hub never blocks the writer.
    pub(super) fn drops(&self) -> bool {
        self.link.queue.full() != Full::Hold
    }

    /// Whether the queue would accept one more message rather than drop it.
    pub(super) fn takes_one(&self) -> bool {
        self.link.queue.full() != Full::DropNewest || self.link.queue.len() < self.link.queue.capacity()
    }

    /// Makes this many envelopes free to copy to, by dropping older messages if needed. Returns false if the reader
    /// has too many of them.
    pub(super) fn free_arrivals(&self, count: usize) -> bool {
        let Some(arrivals) = &self.link.arrivals else { return true };
        while !arrivals.has(count) {
            if self.link.queue.full() != Full::DropOldest {
                return false;
            }
            let Some((number, old)) = self.link.queue.drop_oldest() else { return false };
            self.link.stamps.forget(number);
            discard(old);
        }
        true
    }

    /// Counts a message that is dropped before it is sent here.
    pub(super) fn refuse(&self) {
        self.link.queue.refuse();
    }

    /// Whether this many blank envelopes are free, or if the hub has no pool of them.
    pub(super) fn has_blanks(&self, count: usize) -> bool {
        self.link.blanks.as_ref().is_none_or(|blanks| blanks.has(count))
    }

    /// The envelopes that forks are copied to.
    pub(super) fn arrivals(&self) -> Option<&Arc<Pool>> {
        self.link.arrivals.as_ref()
    }

    /// A copier for the envelopes of a fork.
    pub(super) fn copier(&self) -> Copier<'_> {
        let link = &*self.link;
        Copier::new(&link.name, link.arrivals.as_ref(), link.copies.as_ref())
    }

    /// Records what is requested from now on, so that a stall can be explained.
    #[inline]
    pub(super) fn ask_for(&self, messages: usize, envelopes: usize) {
        self.link.asked.note(messages, envelopes);
    }

    pub(super) fn forks(&self) -> bool {
        self.link.forks
    }

    pub(crate) fn poll_reader(&self, waker: &Waker) -> Answer {
        self.link.queue.poll_reader(waker)
    }

    pub(crate) fn watch(&self, waker: &Waker) {
        self.link.queue.keep_writer(waker);
    }

    pub(crate) fn reader_gone(&self) -> bool {
        self.link.queue.reader_gone()
    }

    pub(crate) fn hub(&self) -> &str {
        &self.link.name
    }
}

/// A reference to the hub, for calling a message's code without borrowing the port.
pub(crate) struct ExternalHandle<M: Message>(Arc<HubCore<M>>);

impl<M: Message> ExternalHandle<M> {
    /// As [`depart`]. After it, [`Sender::try_send_departed`] calls no code of the message.
    pub(crate) fn depart(&self, message: &mut M, origin: Option<&Stream>) -> Result<bool> {
        self.0.check()?;
        depart(message, origin)
    }

    /// Checks that the hub can move a message from outside to its reader. If not, the hub continues to work, and the
    /// error does not mention anything of the flow.
    pub(crate) fn accepts(&self, message: &mut M, by: SentBy) -> Result<()> {
        if !M::CARRIES_ENVELOPES {
            return Ok(());
        }
        let link = &*self.0;
        let (mut problem, mut copied) = (Ok(()), 0);
        message.envelopes(&mut |envelope| {
            copied += usize::from(!envelope.memory().is_at(&link.reader));
            if problem.is_ok() {
                problem = link.accepts_one(envelope).and_then(|()| by.may_send(envelope, &link.reader));
            }
        });
        let most = link.arrivals.as_ref().map_or(usize::MAX, |arrivals| arrivals.count());
        if copied > most {
            return Err(refused(
                ErrorKind::Usage,
                &format!("it has {copied} envelopes, and at most {most} are allowed"),
            ));
        }
        problem
    }

    /// Moves the messages that can be moved, where messages are moved at all.
    pub(crate) fn pump(&self) -> Result<()> {
        if M::CARRIES_ENVELOPES && self.0.arrivals.is_some() { self.0.pump() } else { Ok(()) }
    }
}

/// The sender of a message from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentBy {
    /// The program that feeds the flow through an ingress.
    Feeder,
    /// One of several callers of a service, which do not trust each other.
    Caller,
}

impl SentBy {
    /// Checks that a caller keeps no means to touch its request later, and that the request does not make an operator
    /// on the host fail.
    fn may_send(self, envelope: &RawEnvelope, reader: &Device) -> Result<()> {
        let memory = envelope.memory();
        if self == Self::Feeder {
            return Ok(());
        }
        if memory.is_in_graph() {
            let why = "a graph may use the memory of an envelope at any time: copy the data to other memory first";
            return Err(refused(ErrorKind::Usage, why));
        }
        if memory.is_read_only() && memory.is_at(reader) {
            let why = "the memory of an envelope was wrapped read-only, and an operator may write to it: copy the data to \
                       other memory first, such as a blank envelope of the service";
            return Err(refused(ErrorKind::Usage, why));
        }
        Ok(())
    }
}

/// See [`Sender::check_places`].
fn check_places<M: Message>(link: &HubCore<M>, message: &mut M) -> Result<()> {
    if !M::CARRIES_ENVELOPES {
        return Ok(());
    }
    if let Some(arrivals) = &link.arrivals {
        return check_count(link, arrivals.count(), message);
    }
    let mut misplaced = None;
    message.envelopes(&mut |envelope| {
        if !envelope.memory().is_at(&link.reader) {
            misplaced.get_or_insert_with(|| link.misplaced(envelope));
        }
    });
    misplaced.map_or(Ok(()), |error| Err(link.fail(error)))
}

/// Checks that all of a message's envelopes can be copied at once, as they must be before it is read.
fn check_count<M: Message>(link: &HubCore<M>, most: usize, message: &mut M) -> Result<()> {
    if M::IS_ENVELOPE {
        return Ok(());
    }
    let mut copied = 0;
    message.envelopes(&mut |envelope| copied += usize::from(!envelope.memory().is_at(&link.reader)));
    if copied <= most {
        return Ok(());
    }
    let text = format!(
        "a message has {copied} envelopes to copy, but the hub has only {most}: set `Hub::envelopes` to at least {copied}"
    );
    Err(link.fail(Error::new(ErrorKind::Usage, text)))
}

/// Called when a message leaves its sender, which works on the stream `origin`. Commits the message's uses, so that
/// users elsewhere can be ordered after them. Returns true if its envelopes carry stamps.
#[inline]
pub(crate) fn depart<M: Message>(message: &mut M, origin: Option<&Stream>) -> Result<bool> {
    let (mut ready, mut stamped) = (Ok(()), false);
    for name in M::EVENTS {
        message.events(name, &mut |ticket| {
            if ready.is_ok() {
                ready = ticket.commit();
            }
        });
    }
    if M::CARRIES_ENVELOPES {
        message.envelopes(&mut |envelope| {
            stamped = true;
            if ready.is_ok() {
                ready = envelope.depart(origin);
            }
        });
    }
    ready.map(|()| stamped)
}

/// The stamp for a message without envelopes that is sent now.
pub(super) fn stamp_of(origin: &Stream) -> Result<Ticket> {
    let mut stamp = origin.ticket();
    stamp.commit()?;
    Ok(stamp)
}

impl<M: Message> Drop for Sender<M> {
    fn drop(&mut self) {
        self.link.queue.close_writer();
    }
}

impl<M: Message> fmt::Debug for Sender<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link.fmt(f)
    }
}
