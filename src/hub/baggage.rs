//! What travels with a message and is no part of it: [`Baggage`].
//!
//! Until it lies in a queue a message with its baggage, a [`Parcel`], stays in one place, an `Option`; and so when it was
//! taken out. Whoever sends is given that place, and leaves it empty if the message has gone.
//!
//! Most messages have none, and pay for a null pointer. A message that has been given something ([`Metadata`], say) takes it
//! along through every operator: what an operator sends carries what came with the messages that it took in the same run.
//! So do those who wait for an answer to it, and the span that it was sent in ([`Reply`]).
//!
//! ```text
//!   message ──take──> the run's load: merged <──cx.insert_metadata──  operator
//!                            │ a copy
//!   message <──send──────────┘
//! ```

use tokio::time::Instant;

use super::{metadata::Metadata, reply::Reply};

/// Since when a message has waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Since {
    /// Since it could be taken: sent, and, where the hub brings its envelopes to another place, on its way there.
    #[default]
    Arrived,
    /// Since it was sent, also while the hub had no envelope to bring it in.
    Sent,
}

/// A message as it lies in a queue.
#[derive(Debug)]
pub(crate) struct Parcel<M> {
    pub(crate) message: M,
    pub(crate) baggage: Option<Box<Baggage>>,
}

/// What lies beside a message.
#[derive(Debug, Default)]
pub(crate) struct Baggage {
    /// Since when it has waited, where its reader wants to know.
    pub(crate) since: Option<Instant>,
    pub(crate) load: Load,
}

/// What goes on with whatever is made from a message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Load {
    pub(crate) metadata: Metadata,
    pub(crate) reply: Reply,
}

impl Load {
    /// What a message takes along for whoever waits for its answer; `None` for nobody and no span.
    pub(crate) fn of_reply(reply: Reply) -> Option<Self> {
        (!reply.is_nothing()).then(|| Self { metadata: Metadata::default(), reply })
    }
}

impl<M> Parcel<M> {
    /// Another of it, which takes along the same.
    pub(crate) fn copied(&self, copy: impl FnOnce(&M) -> M) -> Self {
        Self::with(copy(&self.message), self.baggage.as_ref().map(|baggage| baggage.load.clone()))
    }

    pub(crate) fn with(message: M, load: Option<Load>) -> Self {
        Self { message, baggage: load.map(|load| Box::new(Baggage { since: None, load })) }
    }
}
