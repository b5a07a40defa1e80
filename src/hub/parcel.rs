//! [`Parcel`]: a message as it travels, with its [`Header`]: data that goes along without being a part of the message.
//!
//! ```text
//!   Parcel { message, header }      the header: null, or boxed
//!                      ├─ ticket:   the point in the sender's stream at which the message's own work is done
//!                      ├─ since:    when its waiting time began, if its reader records that
//!                      └─ load:     metadata, the callers that wait for a response, the journey of a sampled message
//! ```
//!
//! Most messages have no header and cost a null pointer: a parcel of a small message stays in two registers. What only
//! some messages need belongs in the header.
//!
//! The ticket is set when the message [departs](Parcel::depart) from a sender that works on a stream: everything that
//! was enqueued on the stream before. A message with envelopes needs no header for it: each envelope carries the latest
//! write of that stream to it. Waiting for a ticket never waits for later work of the sender. A message between
//! operators on the host has none.
//!
//! The [`Load`] is passed on: what an operator sends carries the merged load of the messages that it took in the same
//! run.
//!
//! ```text
//!   message ──take──> the run's load: merged <──cx.insert_metadata──  operator
//!                            │ a copy
//!   message <──send──────────┘
//! ```
//!
//! Before it is queued and after it is taken, a parcel stays in one `Option`. `send` gets a reference to this `Option`
//! and leaves it empty if the message was sent.

use tokio::time::Instant;

use super::{Message, journey::Journey, metadata::Metadata, reply::Reply};
use crate::{
    error::Result,
    stream::{Stream, Ticket},
};

/// The point from which a message's waiting time is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Since {
    /// When it could be taken: it is sent, and its copy, where the hub copies its envelopes to another location, is
    /// enqueued.
    #[default]
    Arrived,
    /// When it was sent, including the time for which the hub had no envelope to copy to.
    Sent,
}

/// A message as it is stored in a queue.
#[derive(Debug)]
pub(crate) struct Parcel<M> {
    pub(crate) message: M,
    pub(crate) header: Option<Box<Header>>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Header {
    pub(crate) ticket: Option<Ticket>,
    pub(crate) since: Option<Instant>,
    pub(crate) load: Option<Load>,
}

/// The part of a header that is passed on to the messages made from this one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) metadata: Metadata,
    pub(crate) reply: Reply,
    pub(crate) journey: Option<Box<Journey>>,
}

impl Load {
    /// The load of a message that has only a reply; `None` if the reply has neither callers nor a span.
    pub(crate) fn of_reply(reply: Reply) -> Option<Self> {
        (!reply.is_nothing()).then(|| Self { reply, ..Self::default() })
    }

    /// Adds the journey of a message from outside, if it has one.
    pub(crate) fn with_journey(load: Option<Self>, journey: Option<Journey>) -> Option<Self> {
        let Some(journey) = journey else { return load };
        Some(Self { journey: Some(Box::new(journey)), ..load.unwrap_or_default() })
    }
}

impl Header {
    // Not inline: the load, which is large, would be copied before it is known whether there is one.
    #[cold]
    #[inline(never)]
    fn boxed(load: Load) -> Box<Self> {
        Box::new(Self { load: Some(load), ..Self::default() })
    }

    /// The header of a copy of the message.
    pub(crate) fn for_copy(&self) -> Self {
        Self { ticket: self.ticket.clone(), since: None, load: self.load.clone() }
    }
}

impl<M> Parcel<M> {
    #[inline]
    pub(crate) fn new(message: M, load: Option<Load>) -> Self {
        Self { message, header: load.map(Header::boxed) }
    }

    /// A copy of the parcel with this message.
    pub(crate) fn with_message(&self, message: M) -> Self {
        Self { message, header: self.header.as_ref().map(|header| Box::new(header.for_copy())) }
    }

    /// A copy of the parcel with this message, to read a value that stays: the first one has its journey.
    pub(crate) fn read_with(&self, message: M) -> Self {
        let header = self.header.as_ref().map(|header| {
            let load = header.load.as_ref().map(|Load { metadata, reply, journey }| Load {
                metadata: metadata.clone(),
                reply: reply.clone(),
                journey: journey.as_ref().and_then(|journey| journey.read()).map(Box::new),
            });
            Box::new(Header { ticket: header.ticket.clone(), since: None, load })
        });
        Self { message, header }
    }

    /// The journey of a sampled message.
    #[inline]
    pub(crate) fn journey(&mut self) -> Option<&mut Journey> {
        self.header.as_mut()?.load.as_mut()?.journey.as_deref_mut()
    }

    #[inline]
    pub(crate) fn take_journey(&mut self) -> Option<Box<Journey>> {
        self.header.as_mut()?.load.as_mut()?.journey.take()
    }

    pub(crate) fn set_since(&mut self, since: Instant) {
        self.header.get_or_insert_default().since = Some(since);
    }

    pub(crate) fn since(&self) -> Option<Instant> {
        self.header.as_ref()?.since
    }

    /// Takes the load of a message that is taken.
    #[inline]
    pub(crate) fn take_load(&mut self) -> Option<Load> {
        self.header.take()?.load
    }
}

impl<M: Message> Parcel<M> {
    /// Called when the message leaves its sender, which works on the stream `origin`. Commits the message's uses, so
    /// that users elsewhere can be ordered after them, and sets its ticket.
    #[inline]
    pub(crate) fn depart(&mut self, origin: Option<&Stream>) -> Result<()> {
        let mut committed = Ok(());
        for name in M::EVENTS {
            self.message.events(name, &mut |ticket| {
                if committed.is_ok() {
                    committed = ticket.commit();
                }
            });
        }
        let mut has_envelopes = false;
        if M::CARRIES_ENVELOPES {
            self.message.envelopes(&mut |envelope| {
                has_envelopes = true;
                if committed.is_ok() {
                    committed = envelope.depart(origin);
                }
            });
        }
        committed?;
        match origin {
            Some(origin) if !has_envelopes => self.depart_from(origin),
            _ => Ok(()),
        }
    }

    #[inline(never)]
    fn depart_from(&mut self, origin: &Stream) -> Result<()> {
        let mut end = origin.ticket();
        end.commit()?;
        self.header.get_or_insert_default().ticket = Some(end);
        Ok(())
    }

    /// Takes the ticket of a message that is taken. The envelopes of one message are all of one stream.
    #[inline]
    pub(crate) fn take_ticket(&mut self) -> Option<Ticket> {
        let mut last: Option<Ticket> = None;
        if M::CARRIES_ENVELOPES {
            self.message.envelopes(&mut |envelope| {
                let ticket = envelope.take_ticket();
                if last.as_ref().is_none_or(|last| ticket.as_ref().is_some_and(|of| of.number() > last.number())) {
                    last = ticket;
                }
            });
        }
        last.or_else(|| self.header.as_mut()?.ticket.take())
    }
}
