//! [`Header`]: what travels with a message without being a part of it.
//!
//! ```text
//!   Parcel { message, header }
//!                      ├─ ticket:  the point in the sender's stream at which the message's own work is done
//!                      └─ baggage: null, or boxed
//!                           ├─ since: from when it has waited, where its reader asks for that
//!                           └─ load:  metadata, and the callers that wait for a response
//! ```
//!
//! The ticket is set when the message [departs](Parcel::depart) from a sender that works on a stream: the latest write
//! of that stream to the message's envelopes or, if it has no envelopes, everything that was enqueued on the stream
//! before. Waiting for it never waits for later work of the sender. A message between operators on the host has none.
//!
//! Most messages have no baggage and cost a null pointer. The [`Load`] is passed on: what an operator sends carries the
//! merged load of the messages that it took in the same run. What only some messages need belongs into the baggage.
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

use super::{Message, metadata::Metadata, reply::Reply};
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
    pub(crate) header: Header,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Header {
    pub(crate) ticket: Option<Ticket>,
    pub(crate) baggage: Option<Box<Baggage>>,
}

/// The part of a header that most messages do not have.
#[derive(Debug, Default)]
pub(crate) struct Baggage {
    /// Since when the message has waited, if its reader asks for that.
    pub(crate) since: Option<Instant>,
    pub(crate) load: Load,
}

/// The part of the baggage that is passed on to the messages made from this one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) metadata: Metadata,
    pub(crate) reply: Reply,
}

impl Load {
    /// The load of a message that has only a reply; `None` if the reply has neither callers nor a span.
    pub(crate) fn of_reply(reply: Reply) -> Option<Self> {
        (!reply.is_nothing()).then(|| Self { metadata: Metadata::default(), reply })
    }
}

impl Header {
    /// The header of a message that has not departed.
    #[inline]
    pub(crate) fn new(load: Option<Load>) -> Self {
        Self { ticket: None, baggage: load.map(|load| Box::new(Baggage { since: None, load })) }
    }

    /// The header of a copy of the message.
    pub(crate) fn for_copy(&self) -> Self {
        let load = self.baggage.as_ref().map(|baggage| baggage.load.clone());
        Self { ticket: self.ticket.clone(), ..Self::new(load) }
    }

    pub(crate) fn set_since(&mut self, since: Instant) {
        self.baggage.get_or_insert_default().since = Some(since);
    }

    pub(crate) fn since(&self) -> Option<Instant> {
        self.baggage.as_ref()?.since
    }
}

impl<M> Parcel<M> {
    #[inline]
    pub(crate) fn new(message: M, load: Option<Load>) -> Self {
        Self { message, header: Header::new(load) }
    }

    /// A copy of the parcel, for a message that stays in its hub.
    pub(crate) fn copied(&self, copy: impl FnOnce(&M) -> M) -> Self {
        Self { message: copy(&self.message), header: self.header.for_copy() }
    }
}

impl<M: Message> Parcel<M> {
    /// Called when the message leaves its sender, which works on the stream `origin`. Commits the message's uses, so
    /// that users elsewhere can be ordered after them, and sets the header's ticket.
    #[inline]
    pub(crate) fn depart(&mut self, origin: Option<&Stream>) -> Result<()> {
        let Self { message, header } = self;
        let mut committed = Ok(());
        for name in M::EVENTS {
            message.events(name, &mut |ticket| {
                if committed.is_ok() {
                    committed = ticket.commit();
                }
            });
        }
        header.ticket = None;
        let mut has_envelopes = false;
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                has_envelopes = true;
                if committed.is_ok() {
                    committed = envelope.depart(origin).map(|written| header.advance(written));
                }
            });
        }
        committed?;
        if let (false, Some(origin)) = (has_envelopes, origin) {
            header.ticket = Some(committed_end(origin)?);
        }
        Ok(())
    }
}

impl Header {
    /// The ticket covers this one as well, which is of the same stream.
    #[inline]
    fn advance(&mut self, ticket: Option<Ticket>) {
        let Some(ticket) = ticket else { return };
        if self.ticket.as_ref().is_none_or(|last| ticket.number() > last.number()) {
            self.ticket = Some(ticket);
        }
    }
}

/// The current end of a stream, committed.
fn committed_end(stream: &Stream) -> Result<Ticket> {
    let mut end = stream.ticket();
    end.commit()?;
    Ok(end)
}
