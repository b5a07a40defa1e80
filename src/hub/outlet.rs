//! [`Outlet`]: the destination of an output: none, one hub or several.
//!
//! Most outputs have one reader, and pay only for the check of the variant: the single-hub path of each message is
//! inlined, while the others are not (`inline(never)`), since they would use up the caller's registers.

use std::{fmt, sync::Arc, task::Waker};

use super::{
    Message, Outcome,
    ends::{Demand, Sender},
    external::ExternalHandle,
    fan::{self, Fan, WriterEnd},
    outbox::Outbox,
    parcel::Parcel,
    pool::{Pool, RawEnvelope},
    queue::Answer,
    waking::Interest,
};
use crate::{
    error::{Error, ErrorKind, Result},
    memory::HostAccess,
    stream::Stream,
    sync::discard,
};

pub(crate) enum Outlet<M: Message> {
    /// The port is closed.
    Closed,
    One(Sender<M>),
    Several(Box<Fan<M>>),
    /// For one of several workers: what it sends is passed on when its run has ended.
    Outbox(Outbox<M>),
}

impl<M: Message> Outlet<M> {
    pub(crate) fn new(mut ends: Vec<WriterEnd<M>>) -> Self {
        let fork = ends.iter().find_map(|end| end.fork);
        match (ends.len(), fork) {
            (0, _) => Self::Closed,
            (1, _) | (_, None) => Self::One(ends.remove(0).sender),
            (_, Some(fork)) => {
                let senders = ends.into_iter().map(|end| end.sender).collect();
                Self::Several(Box::new(Fan::new(senders, fork)))
            }
        }
    }

    /// See [`Sender::poll`].
    #[inline]
    pub(crate) fn poll(&mut self, demand: Demand, interest: Interest, waker: &Waker) -> Answer {
        match self {
            Self::One(sender) => sender.poll(demand, interest, waker),
            _ => self.poll_otherwise(demand, waker),
        }
    }

    #[inline(never)]
    fn poll_otherwise(&mut self, demand: Demand, waker: &Waker) -> Answer {
        match self {
            Self::Closed => Answer::Never,
            Self::One(sender) => sender.poll(demand, Interest::Change, waker),
            Self::Several(fan) => fan.poll(demand, waker),
            Self::Outbox(outbox) if demand == Demand::Blank => outbox.poll_blank(waker),
            Self::Outbox(_) => Answer::Yes,
        }
    }

    /// Whether there is room for this message.
    pub(crate) fn poll_send(&mut self, message: &mut M, waker: &Waker) -> Answer {
        let demand = Demand::Message(if let Self::Several(_) = self { fan::envelopes_in(message) } else { 1 });
        self.poll(demand, Interest::Change, waker)
    }

    /// Stops waiting for a blank envelope. A hub's writer keeps its waker registered for the reader's close.
    pub(crate) fn leave_blanks(&mut self) {
        if let Self::Outbox(outbox) = self {
            outbox.leave_blanks();
        }
    }

    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        match self {
            Self::Closed => Err(self.closed()),
            Self::One(sender) => sender.blank(),
            Self::Several(fan) => fan.blank(),
            Self::Outbox(outbox) => outbox.blank(),
        }
    }

    /// An outlet for one of several workers, with the blank envelopes of this one.
    pub(crate) fn for_worker(&self) -> Self {
        Self::Outbox(Outbox::new(self.blanks()))
    }

    pub(crate) fn blanks(&self) -> Result<Arc<Pool>> {
        match self {
            Self::Closed => Err(self.closed()),
            Self::One(sender) => sender.blanks(),
            Self::Several(fan) => fan.blanks(),
            Self::Outbox(_) => Err(self.closed()),
        }
    }

    /// Sends the message in `place`, if there is room; otherwise it stays there. `origin`: the stream on which its
    /// sender works.
    #[inline]
    pub(crate) fn try_send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        match self {
            Self::One(sender) if !sender.reader_gone() => sender.try_send(place, origin),
            _ => self.try_send_otherwise(place, origin),
        }
    }

    /// Like `try_send`, from outside the flow. `dropped` gets the message that the hub drops for it. An output that
    /// is used from outside has one reader, so no message is forked here, where the port is locked.
    pub(crate) fn try_send_departed(
        &mut self,
        place: &mut Option<Parcel<M>>,
        dropped: &mut Option<Parcel<M>>,
    ) -> Result<()> {
        match self {
            Self::One(sender) if !sender.reader_gone() => {
                sender.try_send_departed(place, |parcel| *dropped = Some(parcel))
            }
            Self::Several(_) => Err(Error::new(ErrorKind::Usage, "an output that is used from outside has one reader")),
            _ => Err(self.closed()),
        }
    }

    /// A handle of its only reader's hub.
    pub(crate) fn external(&self) -> Option<ExternalHandle<M>> {
        match self {
            Self::One(sender) => Some(sender.external()),
            _ => None,
        }
    }

    #[inline(never)]
    fn try_send_otherwise(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        match self {
            Self::Several(fan) if !fan.is_closed() => fan.try_send(place, origin),
            Self::Outbox(outbox) => outbox.send(place, origin),
            _ => Err(self.closed()),
        }
    }

    /// Sends the message in `place` to each hub that has room, and returns each hub's outcome. If no hub accepts or
    /// drops it, it stays there.
    pub(crate) fn offer(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<Vec<Outcome>> {
        match self {
            Self::Closed => Ok(Vec::new()),
            Self::One(sender) if sender.reader_gone() => Ok(vec![Outcome::Closed]),
            Self::One(sender) => {
                let takes = if sender.takes_one() { Outcome::Sent } else { Outcome::Dropped };
                sender.try_send(place, origin)?;
                Ok(vec![if place.is_none() { takes } else { Outcome::Full }])
            }
            Self::Several(fan) => fan.offer(place, origin),
            Self::Outbox(outbox) => {
                outbox.send(place, origin)?;
                Ok(vec![Outcome::Sent])
            }
        }
    }

    /// Sends a departed message of a worker. Returns it if there is no room.
    pub(crate) fn hand_on(&mut self, parcel: Parcel<M>) -> Result<Result<(), Parcel<M>>> {
        match self {
            Self::One(sender) if !sender.reader_gone() => sender.try_hand_on(parcel),
            Self::Several(fan) if !fan.is_closed() => fan.hand_on(parcel),
            _ => {
                discard(parcel);
                Err(self.closed())
            }
        }
    }

    /// The access that the host has to wait for before it can copy the message that was not sent.
    pub(crate) fn pending(&mut self) -> Option<HostAccess> {
        match self {
            Self::Several(fan) => fan.pending(),
            _ => None,
        }
    }

    pub(crate) fn watch(&self, waker: &Waker) {
        match self {
            Self::Closed => {}
            Self::One(sender) => sender.watch(waker),
            Self::Several(fan) => fan.watch(waker),
            Self::Outbox(_) => {}
        }
    }

    /// Whether there are readers and all of them have ended.
    pub(crate) fn readers_gone(&self) -> bool {
        match self {
            Self::Closed | Self::Outbox(_) => false,
            Self::One(sender) => sender.reader_gone(),
            Self::Several(fan) => fan.is_closed(),
        }
    }

    /// The error that says why nothing can be sent.
    pub(crate) fn closed(&self) -> Error {
        match self {
            Self::Closed | Self::Outbox(_) => Error::new(ErrorKind::Closed, "this output was closed"),
            Self::One(sender) => Error::reader_gone(format!("the reader of hub `{}` has ended", sender.name)),
            Self::Several(fan) => Error::reader_gone(format!("all {} readers have ended", fan.count())),
        }
    }
}

impl<M: Message> fmt::Debug for Outlet<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::One(sender) => sender.fmt(f),
            Self::Several(fan) => fan.fmt(f),
            Self::Outbox(outbox) => outbox.fmt(f),
        }
    }
}
