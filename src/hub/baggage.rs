//! [`Baggage`]: what travels with a message without being a part of it.
//!
//! Before it is queued and after it is taken, a message with its baggage (a [`Parcel`]) stays in one `Option`. `send`
//! gets a reference to this `Option` and leaves it empty if the message was sent.
//!
//! Most messages have no baggage and cost a null pointer. A message that was given something, such as [`Metadata`],
//! carries it through every operator: what an operator sends carries the merged load of the messages that it took in
//! the same run. The callers that wait for an answer to the message, and the span in which it was sent ([`Reply`]),
//! travel in the same way.
//!
//! ```text
//!   message ──take──> the run's load: merged <──cx.insert_metadata──  operator
//!                            │ a copy
//!   message <──send──────────┘
//! ```

use tokio::time::Instant;

use super::{metadata::Metadata, reply::Reply};

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
    pub(crate) baggage: Option<Box<Baggage>>,
}

#[derive(Debug, Default)]
pub(crate) struct Baggage {
    /// Since when it has waited, if its reader asks for that.
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

impl<M> Parcel<M> {
    /// Makes a copy of the parcel, with the same load.
    pub(crate) fn copied(&self, copy: impl FnOnce(&M) -> M) -> Self {
        Self::with(copy(&self.message), self.baggage.as_ref().map(|baggage| baggage.load.clone()))
    }

    pub(crate) fn with(message: M, load: Option<Load>) -> Self {
        Self { message, baggage: load.map(|load| Box::new(Baggage { since: None, load })) }
    }
}
