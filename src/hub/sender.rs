//! [`Sender`]: the writer's end of a hub.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    Copier, Message,
    baggage::{Parcel, Since},
    envelope::RawEnvelope,
    kept::Stamped,
    link::Link,
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

/// The writer's end. Dropping it ends the reader, after what lies in the queue.
pub(crate) struct Sender<M: Message> {
    link: Arc<Link<M>>,
    /// Messages.
    sent: u64,
}

impl<M: Message> Sender<M> {
    pub(super) fn new(link: Arc<Link<M>>) -> Self {
        Self { link, sent: 0 }
    }

    /// Room in the queue, and a blank envelope where the hub has such?
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

    /// Room in the queue for so many, and blank envelopes where the hub has such?
    pub(crate) fn poll_room_for(&self, messages: usize, waker: &Waker) -> Answer {
        self.ask_for(messages, messages);
        self.poll_until(waker, || self.has_room(messages) && self.has_blanks(messages))
    }

    /// Room in the queue for so many?
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
                // Asked again: it may have come before the waker was kept.
                self.watch(waker);
                ask()
            }
            answer => answer,
        }
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, waker: &Waker) -> Answer {
        let link = &*self.link;
        if link.blanks.is_some() || link.failed.get().is_some() {
            return self.poll_room(waker);
        }
        self.unless_failed(link.queue.look_for_room(waker))
    }

    /// Room in the queue?
    #[inline]
    pub(crate) fn poll_queue(&self, waker: &Waker) -> Answer {
        if self.link.failed.get().is_some() {
            return Answer::Yes;
        }
        self.unless_failed(self.link.queue.poll_room(waker))
    }

    /// It may have failed before the waker was kept: then nobody wakes it.
    #[inline]
    fn unless_failed(&self, answer: Answer) -> Answer {
        if answer == Answer::Wait && self.link.failed.get().is_some() { Answer::Yes } else { answer }
    }

    /// A blank envelope, where the hub has such?
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
        // Asked again: one may have come home before the waker was kept.
        if blanks.has(1) { Answer::Yes } else { self.unless_failed(Answer::Wait) }
    }

    /// A blank envelope, if there is one; an error if the hub has none at all.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.check()?;
        match &self.link.blanks {
            Some(blanks) => blanks.take(),
            None => self.blanks().map(|_| None),
        }
    }

    /// The blank envelopes, or why there are none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        self.link.blanks.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!(
                    "hub `{}` has no blank envelopes: say how large they are, with `#[output(envelope_bytes = ..)]` or \
                     `Hub::envelope_bytes`",
                    self.link.name
                ),
            )
        })
    }

    /// Sends what lies in `place`, if there is room; otherwise it stays there. `origin`: the stream that it carries.
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

    /// Sends a message that has [departed](Way::depart), as `try_send`. What the hub drops for it, be it this one, is
    /// `dropped`; nothing is moved.
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

    /// For what is done to a message before it is sent, and to the hub after it, without this.
    pub(super) fn way(&self) -> Way<M> {
        self.link.is_fed_from_outside();
        Way(self.link.clone())
    }

    /// Puts a message that has departed into the queue; it stays in `place` if there is no room or no reader.
    #[inline]
    pub(super) fn push(&mut self, place: &mut Option<Parcel<M>>, stamp: Option<Ticket>) -> Result<()> {
        if self.enqueue(place, stamp, discard) { self.link.pump() } else { Ok(()) }
    }

    /// True if there may be something to move.
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

    /// As `hand_on`, if there is room; otherwise it comes back with its stamp.
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

    /// Puts a message that came out of another hub into this one, which is always there for it.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<()> {
        // Its reader ends after it.
        self.push(Discarded::new(parcel).place(), stamp)
    }

    /// Where nothing is copied, every envelope is where the reader is.
    #[inline]
    pub(super) fn check_places(&self, message: &mut M) -> Result<()> {
        check_places(&self.link, message)
    }

    /// What went wrong on the way, if something did.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        self.link.check()
    }

    /// Room in the queue for so many, or does it drop some?
    #[inline]
    pub(super) fn has_room(&self, messages: usize) -> bool {
        self.link.queue.has_room(messages)
    }

    /// Never holds the writer up?
    pub(super) fn drops(&self) -> bool {
        self.link.queue.full() != Full::Hold
    }

    /// Whether it would take one more, or drop that.
    pub(super) fn takes_one(&self) -> bool {
        self.link.queue.full() != Full::DropNewest || self.link.queue.len() < self.link.queue.capacity()
    }

    /// Sees to so many envelopes to copy to, at the cost of older messages. False if the reader has too many of them.
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

    /// A message is dropped before it is sent here.
    pub(super) fn refuse(&self) {
        self.link.queue.refuse();
    }

    /// So many blank envelopes, where the hub has such?
    pub(super) fn has_blanks(&self, count: usize) -> bool {
        self.link.blanks.as_ref().is_none_or(|blanks| blanks.has(count))
    }

    /// The envelopes that forks are copied to.
    pub(super) fn arrivals(&self) -> Option<&Arc<Pool>> {
        self.link.arrivals.as_ref()
    }

    /// Makes the copies of a fork's envelopes.
    pub(super) fn copier(&self) -> Copier<'_> {
        let link = &*self.link;
        Copier::new(&link.name, link.arrivals.as_ref(), link.copies.as_ref())
    }

    /// What is asked for from now on, in case that it does not come.
    #[inline]
    pub(super) fn ask_for(&self, messages: usize, envelopes: usize) {
        self.link.asked.note(messages, envelopes);
    }

    /// Whether what is sent here are forks.
    pub(super) fn forks(&self) -> bool {
        self.link.forks
    }

    /// Is there a reader?
    pub(crate) fn poll_reader(&self, waker: &Waker) -> Answer {
        self.link.queue.poll_reader(waker)
    }

    /// Keeps the waker for the next change.
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

/// A hub, for a sender that calls a message's code without the port.
pub(crate) struct Way<M: Message>(Arc<Link<M>>);

impl<M: Message> Way<M> {
    /// As [`depart`]. Afterwards [`Sender::try_send_departed`] calls no code of the message's.
    pub(crate) fn depart(&self, message: &mut M, origin: Option<&Stream>) -> Result<bool> {
        self.0.check()?;
        depart(message, origin)
    }

    /// Whether the hub can bring a message from outside to where it is read. The hub goes on if not, and the error names
    /// nothing of the flow's.
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
            return Err(refused(ErrorKind::Usage, &format!("it has {copied} envelopes, and at most {most} are taken")));
        }
        problem
    }

    /// Moves what can be moved, where messages are moved at all.
    pub(crate) fn pump(&self) -> Result<()> {
        if M::CARRIES_ENVELOPES && self.0.arrivals.is_some() { self.0.pump() } else { Ok(()) }
    }
}

/// The sender of a message from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentBy {
    /// The program that feeds the flow, by an ingress.
    Feeder,
    /// One of several callers of a service, which do not trust each other.
    Caller,
}

impl SentBy {
    /// A caller keeps nothing by which it could still touch its request, and gives nothing that an operator on the host
    /// would fail on.
    fn may_send(self, envelope: &RawEnvelope, reader: &Device) -> Result<()> {
        let memory = envelope.memory();
        if self == Self::Feeder {
            return Ok(());
        }
        if memory.is_of_graphs() {
            let why =
                "a graph uses the memory of an envelope, and may do so at any time: copy it to other memory first";
            return Err(refused(ErrorKind::Usage, why));
        }
        if memory.is_read_only() && memory.is_at(reader) {
            let why = "the memory of an envelope was wrapped to be read only, and an operator may write there: copy it to \
                       other memory first, a blank envelope of the service's say";
            return Err(refused(ErrorKind::Usage, why));
        }
        Ok(())
    }
}

/// See [`Sender::check_places`].
fn check_places<M: Message>(link: &Link<M>, message: &mut M) -> Result<()> {
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

/// All of a message's envelopes are copied before it is read.
fn check_count<M: Message>(link: &Link<M>, most: usize, message: &mut M) -> Result<()> {
    if M::IS_ENVELOPE {
        return Ok(());
    }
    let mut copied = 0;
    message.envelopes(&mut |envelope| copied += usize::from(!envelope.memory().is_at(&link.reader)));
    if copied <= most {
        return Ok(());
    }
    let text = format!(
        "a message of {copied} envelopes cannot be copied to the {most} of the hub: give it as many, with `Hub::envelopes`"
    );
    Err(link.fail(Error::new(ErrorKind::Usage, text)))
}

/// A message leaves its sender, which works on the stream `origin`: what was done to it is marked, for whoever comes after
/// that elsewhere. True if its envelopes carry that.
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

/// The stamp of a message without envelopes that is sent now.
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
