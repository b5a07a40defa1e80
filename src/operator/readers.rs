//! [`Readers`]: the hubs that an output sends to, and what it waits for there.
//!
//! Most outputs have one reader, and pay only for the check of the variant: the single-hub path of each poll is inlined,
//! while the others are not (`inline(never)`), since they would use up the caller's registers.

use std::{
    fmt,
    sync::Arc,
    task::{Poll, Waker},
};

use crate::{
    error::{Error, ErrorKind, Result},
    hub::{
        Message, RawEnvelope, RawEnvelopes,
        end_waker::Interest,
        ends::{Demand, Sender},
        fan::{self, Fan, WriterEnd},
        outbox::Outbox,
        pool::Pool,
        queue::Answer,
    },
    memory::HostAccess,
};

/// The destination of an output: none, one hub or several.
pub(super) enum Readers<M: Message> {
    /// No reader: the port is closed.
    Closed,
    One(Sender<M>),
    Several(Box<Fan<M>>),
    /// For a worker, or in a capture: the messages are collected when the run has ended.
    Outbox(Outbox<M>),
}

impl<M: Message> Readers<M> {
    pub(super) fn new(mut ends: Vec<WriterEnd<M>>) -> Self {
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
    pub(super) fn poll(&mut self, demand: Demand, interest: Interest, waker: &Waker) -> Answer {
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
            Self::Outbox(outbox) if matches!(demand, Demand::Blanks(_)) => outbox.poll_blank(waker),
            Self::Outbox(_) => Answer::Yes,
        }
    }

    /// `Yes` if there is room for this message.
    pub(super) fn poll_send(&mut self, message: &mut M, waker: &Waker) -> Answer {
        let demand = Demand::Message(if let Self::Several(_) = self { fan::envelopes_in(message) } else { 1 });
        self.poll(demand, Interest::Change, waker)
    }

    /// Takes a blank envelope, and waits for one if none is free.
    pub(super) fn poll_blank(&mut self, waker: &Waker) -> Poll<Result<RawEnvelope>> {
        loop {
            if let Some(blank) = self.blank()? {
                return Poll::Ready(Ok(blank));
            }
            match self.poll(Demand::Blanks(1), Interest::Change, waker) {
                Answer::Yes => {}
                Answer::Wait => return Poll::Pending,
                Answer::Never => return Poll::Ready(Err(self.closed())),
            }
        }
    }

    /// Takes `count` blank envelopes in one step, and waits while fewer are free. The caller drops those that are in
    /// `taken` if the result is not `Ok`.
    pub(super) fn poll_blanks(&mut self, count: usize, taken: &mut RawEnvelopes, waker: &Waker) -> Poll<Result<()>> {
        match self.poll(Demand::Blanks(count), Interest::Change, waker) {
            Answer::Wait => return Poll::Pending,
            Answer::Never => return Poll::Ready(Err(self.closed())),
            Answer::Yes => {}
        }
        while taken.len() < count {
            // Those that were free stay free until now: only this writer takes them.
            let Some(blank) = self.blank()? else { return Poll::Pending };
            taken.push(blank);
        }
        Poll::Ready(Ok(()))
    }

    /// Stops waiting for a blank envelope. The waker of a hub's writer stays registered for the reader's close.
    pub(super) fn leave_blanks(&mut self) {
        if let Self::Outbox(outbox) = self {
            outbox.leave_blanks();
        }
    }

    pub(super) fn blank(&self) -> Result<Option<RawEnvelope>> {
        match self {
            Self::Closed => Err(self.closed()),
            Self::One(sender) => sender.blank(),
            Self::Several(fan) => fan.blank(),
            Self::Outbox(outbox) => outbox.blank(),
        }
    }

    pub(super) fn blanks(&self) -> Result<Arc<Pool>> {
        match self {
            Self::Closed => Err(self.closed()),
            Self::One(sender) => sender.blanks(),
            Self::Several(fan) => fan.blanks(),
            Self::Outbox(_) => Err(self.closed()),
        }
    }

    /// The access that the host has to wait for before it can copy the message that was not sent.
    pub(super) fn pending(&mut self) -> Option<HostAccess> {
        match self {
            Self::Several(fan) => fan.pending(),
            _ => None,
        }
    }

    pub(super) fn watch(&self, waker: &Waker) {
        match self {
            Self::Closed => {}
            Self::One(sender) => sender.watch(waker),
            Self::Several(fan) => fan.watch(waker),
            Self::Outbox(_) => {}
        }
    }

    /// Whether there are readers and all of them have ended.
    pub(super) fn have_ended(&self) -> bool {
        match self {
            Self::Closed | Self::Outbox(_) => false,
            Self::One(sender) => sender.reader_gone(),
            Self::Several(fan) => fan.is_closed(),
        }
    }

    /// The error for a send to a closed port, or to readers that have all ended.
    pub(super) fn closed(&self) -> Error {
        match self {
            Self::Closed | Self::Outbox(_) => Error::new(ErrorKind::Closed, "this output was closed"),
            Self::One(sender) => sender.reader_gone_error(),
            Self::Several(fan) => Error::reader_gone(format!("all {} readers have ended", fan.count())),
        }
    }
}

impl<M: Message> fmt::Debug for Readers<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::One(sender) => sender.fmt(f),
            Self::Several(fan) => fan.fmt(f),
            Self::Outbox(outbox) => outbox.fmt(f),
        }
    }
}
