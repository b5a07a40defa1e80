//! Hubs: async channels of device-resident envelopes.
//!
//! A hub connects an output to an input. It is a queue and, where the messages contain envelopes, also the owner of
//! those envelopes: it allocates them once, lends them to the writer, copies written data to the reader's location
//! and takes the envelopes back.
//!
//! ```text
//!              writer's side                              reader's side
//!   pool ──> blank ──> send ──> [ queue: copy ──> envelope ] ──> take ──> last use
//!     ^                            (copy stream)     ^                        │
//!     └── once the copy is enqueued ──┘              └── the reader's pool <──┘
//! ```
//!
//! The copy is enqueued as soon as a destination envelope is free, before the reader asks for the message: while the
//! reader works on one message, the next is being copied. Only the valid part is copied. An envelope that the reader
//! passes on into a further hub still belongs to this hub and returns to its pool after its last reader there.
//!
//! A [`ChunkHub`] is the other kind of hub: several links, at several locations, produce, consume, peek at and modify
//! its chunks. It needs no flow.

// The way of a message from one operator to the next is drawn in `core.rs`.

mod blanks;
pub(crate) mod build;
pub(crate) mod chunks;
pub(crate) mod core;
pub(crate) mod end_waker;
pub(crate) mod ends;
mod envelope;
mod event_names;
pub(crate) mod external;
pub(crate) mod external_guard;
pub(crate) mod fan;
mod fork;
mod free_list;
pub(crate) mod heap_size;
mod hub_options;
pub(crate) mod journey;
pub(crate) mod latest;
pub(crate) mod message;
mod metadata;
pub(crate) mod open_work;
pub(crate) mod outbox;
pub(crate) mod parcel;
pub(crate) mod pool;
pub(crate) mod queue;
pub(crate) mod relocate;
pub(crate) mod reply;
pub(crate) mod response_transfer;
mod send_error;
#[cfg(test)]
mod tests;
pub(crate) mod view;
pub(crate) mod when_full;

pub use blanks::BlanksFor;
pub(crate) use blanks::RawEnvelopes;
pub(crate) use chunks::DestinationName;
pub use chunks::{
    Chunk, ChunkHub, ChunkHubBuilder, Consumer, Destination, Link, Modifier, Peeker, Producer, Unsent, roles as role,
};
pub use envelope::Envelope;
pub use event_names::{EventNames, knows_event};
pub use fan::Outcome;
pub(crate) use fork::ForkFn;
pub use fork::{Copier, Fork};
pub(crate) use hub_options::TypedHubOptions;
pub(crate) use hub_options::{CloneFn, DEFAULT_CAPACITY, at_least_one};
pub use hub_options::{HubOptions, HubOptionsFor, Latest};
pub use message::{Carries, Host, Message};
#[doc(hidden)]
pub use message::{EnvelopeCount, larger_element};
pub use metadata::{MergePolicy, Metadata};
pub use parcel::Since;
pub use pool::RawEnvelope;
pub use reply::Reply;
pub use send_error::{SendError, TrySendError};
