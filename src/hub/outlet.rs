//! [`Outlet`]: what an output sends to, be it nobody, one hub or several.
//!
//! Most outputs have one reader, and pay for no more than the look at which of the three it is: what they ask for each
//! message is inlined, and what the others do is not (`inline(never)`), for it would fill the caller's registers.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    Message, Outcome,
    baggage::Parcel,
    envelope::RawEnvelope,
    fan::{End, Fan},
    kept::{Kept, Stamped},
    pool::Pool,
    queue::Answer,
    sender::{Sender, Way},
};
use crate::{
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    stream::{Stream, Ticket},
    sync::discard,
};

pub(crate) enum Outlet<M: Message> {
    /// The port was closed.
    Nobody,
    One(Sender<M>),
    Several(Box<Fan<M>>),
    /// Of one of several workers: what it sends is passed on when its run has ended.
    Kept(Kept<M>),
}

impl<M: Message> Outlet<M> {
    pub(crate) fn new(mut ends: Vec<End<M>>) -> Self {
        let fork = ends.iter().find_map(|end| end.fork);
        match (ends.len(), fork) {
            (0, _) => Self::Nobody,
            (1, _) | (_, None) => Self::One(ends.remove(0).sender),
            (_, Some(fork)) => {
                let senders = ends.into_iter().map(|end| end.sender).collect();
                Self::Several(Box::new(Fan::new(senders, fork)))
            }
        }
    }

    /// Room for so many messages, and as many blank envelopes where there are such?
    #[inline]
    pub(crate) fn poll_room(&self, messages: usize, waker: &Waker) -> Answer {
        match self {
            Self::One(sender) if messages == 1 => sender.poll_room(waker),
            _ => self.poll_room_otherwise(messages, waker),
        }
    }

    #[inline(never)]
    fn poll_room_otherwise(&self, messages: usize, waker: &Waker) -> Answer {
        match self {
            Self::Nobody => Answer::Never,
            Self::One(sender) => sender.poll_room_for(messages, waker),
            Self::Several(fan) => fan.poll_room(messages, waker),
            Self::Kept(_) => Answer::Yes,
        }
    }

    /// As `poll_room`, of a writer that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_room(&self, messages: usize, waker: &Waker) -> Answer {
        match self {
            Self::One(sender) if messages == 1 => sender.look_for_room(waker),
            _ => self.poll_room(messages, waker),
        }
    }

    /// Room for so many messages, whether there are blank envelopes or not?
    pub(crate) fn poll_places(&self, messages: usize, waker: &Waker) -> Answer {
        match self {
            Self::Nobody => Answer::Never,
            Self::One(sender) => sender.poll_places(messages, waker),
            Self::Several(fan) => fan.poll_places(messages, waker),
            Self::Kept(_) => Answer::Yes,
        }
    }

    /// Anybody to send to?
    #[inline(never)]
    pub(crate) fn poll_open(&self, waker: &Waker) -> Answer {
        match self {
            Self::Nobody => Answer::Never,
            Self::One(sender) => sender.poll_reader(waker),
            Self::Several(fan) => fan.poll_readers(waker),
            Self::Kept(_) => Answer::Yes,
        }
    }

    /// Room for this message?
    // `&mut`, as below: who awaits it need not share messages between threads.
    pub(crate) fn poll_send(&mut self, message: &mut M, waker: &Waker) -> Answer {
        match self {
            Self::Nobody => Answer::Never,
            Self::One(sender) => sender.poll_queue(waker),
            Self::Several(fan) => fan.poll_send(message, waker),
            Self::Kept(_) => Answer::Yes,
        }
    }

    /// A blank envelope, where there are such?
    pub(crate) fn poll_blank(&mut self, waker: &Waker) -> Answer {
        match self {
            Self::Nobody => Answer::Never,
            Self::One(sender) => sender.poll_blank(waker),
            Self::Several(fan) => fan.poll_blank(waker),
            Self::Kept(kept) => kept.poll_blank(waker),
        }
    }

    /// A blank envelope is waited for no longer. A hub's writer keeps its waker for the reader's end.
    pub(crate) fn leave_blanks(&mut self) {
        if let Self::Kept(kept) = self {
            kept.leave_blanks();
        }
    }

    /// A blank envelope, if there is one; an error if there are none at all.
    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        match self {
            Self::Nobody => Err(self.closed()),
            Self::One(sender) => sender.blank(),
            Self::Several(fan) => fan.blank(),
            Self::Kept(kept) => kept.blank(),
        }
    }

    /// The same for one of several workers, who takes its blank envelopes from here.
    pub(crate) fn for_worker(&self) -> Self {
        Self::Kept(Kept::new(self.blanks()))
    }

    /// The blank envelopes, or why there are none.
    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        match self {
            Self::Nobody => Err(self.closed()),
            Self::One(sender) => sender.blanks(),
            Self::Several(fan) => fan.blanks(),
            Self::Kept(_) => Err(self.closed()),
        }
    }

    /// Sends what lies in `place`, if there is room; otherwise it stays there. `origin`: the stream that it carries.
    #[inline]
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        match self {
            Self::One(sender) if !sender.reader_gone() => sender.try_send(place, origin),
            _ => self.try_send_otherwise(place, origin),
        }
    }

    /// As `try_send`, from outside of the flow: what the hub drops for it lies in `dropped` then. An output that is used from
    /// outside has one reader, so no message is forked here, where the port is locked.
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        stamped: bool,
        origin: Option<&Stream>,
        dropped: &mut Option<Parcel<M>>,
    ) -> Result<()> {
        match self {
            Self::One(sender) if !sender.reader_gone() => {
                sender.try_send_departed(place, stamped, origin, |parcel| *dropped = Some(parcel))
            }
            Self::Several(_) => Err(Error::new(ErrorKind::Usage, "an output that is used from outside has one reader")),
            _ => Err(self.closed()),
        }
    }

    /// To its one reader.
    pub(crate) fn way(&self) -> Option<Way<M>> {
        match self {
            Self::One(sender) => Some(sender.way()),
            _ => None,
        }
    }

    #[inline(never)]
    fn try_send_otherwise(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        match self {
            Self::Several(fan) if !fan.is_closed() => fan.try_send(place, origin),
            Self::Kept(kept) => kept.send(place, origin),
            _ => Err(self.closed()),
        }
    }

    /// Sends what lies in `place` to whoever has room: what each did. If nobody took it, it stays there.
    pub(crate) fn offer(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<Vec<Outcome>> {
        match self {
            Self::Nobody => Ok(Vec::new()),
            Self::One(sender) if sender.reader_gone() => Ok(vec![Outcome::Closed]),
            Self::One(sender) => {
                let takes = if sender.takes_one() { Outcome::Sent } else { Outcome::Dropped };
                sender.try_send(place, origin)?;
                Ok(vec![if place.is_none() { takes } else { Outcome::Full }])
            }
            Self::Several(fan) => fan.offer(place, origin),
            Self::Kept(kept) => {
                kept.send(place, origin)?;
                Ok(vec![Outcome::Sent])
            }
        }
    }

    /// Sends what a worker has sent: it has departed. It comes back, with its stamp, if there is no room.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>, stamp: Option<Ticket>) -> Result<Result<(), Stamped<M>>> {
        match self {
            Self::One(sender) if !sender.reader_gone() => sender.try_hand_on(parcel, stamp),
            Self::Several(fan) if !fan.is_closed() => fan.hand_on(parcel, stamp),
            _ => {
                discard(parcel);
                Err(self.closed())
            }
        }
    }

    /// What the host has to wait for before it can copy the message that came back.
    pub(crate) fn pending(&mut self) -> Option<HostAccess> {
        match self {
            Self::Several(fan) => fan.pending(),
            _ => None,
        }
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        match self {
            Self::Nobody => {}
            Self::One(sender) => sender.watch(waker),
            Self::Several(fan) => fan.watch(waker),
            Self::Kept(_) => {}
        }
    }

    /// There are readers, and all have ended.
    pub(crate) fn readers_gone(&self) -> bool {
        match self {
            Self::Nobody | Self::Kept(_) => false,
            Self::One(sender) => sender.reader_gone(),
            Self::Several(fan) => fan.is_closed(),
        }
    }

    /// Why nothing can be sent.
    pub(crate) fn closed(&self) -> Error {
        match self {
            Self::Nobody | Self::Kept(_) => Error::new(ErrorKind::Closed, "this output was closed"),
            Self::One(sender) => Error::reader_gone(format!("the reader of hub `{}` has ended", sender.hub())),
            Self::Several(fan) => Error::reader_gone(format!("all {} readers have ended", fan.count())),
        }
    }
}

impl<M: Message> fmt::Debug for Outlet<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("closed"),
            Self::One(sender) => sender.fmt(f),
            Self::Several(fan) => fan.fmt(f),
            Self::Kept(kept) => kept.fmt(f),
        }
    }
}
