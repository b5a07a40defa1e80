//! Hubs: async channels of device-resident envelopes.
//!
//! A hub connects an output to an input. It is a queue and, where the messages contain envelopes, also the owner of
//! those envelopes: it allocates them once, lends them to the writer, copies written data to the reader's location
//! and takes the envelopes back.
//!
//! ```text
//!              writer's side                       reader's side
//!   pool ──> blank ──> send ──> [ queue: copy ──> envelope ] ──> take
//!     ^                            (copy stream)     |             |
//!     └── returned, after the copy has read it ──────┘  returned ──┘ after its last use
//! ```
//!
//! The copy is enqueued as soon as a destination envelope is free, before the reader asks for the message: while the
//! reader works on one message, the next is being copied. Only the valid part is copied. An envelope that the reader
//! passes on into a further hub still belongs to this hub and returns to its pool after its last reader there.
//!
//! # The way of a message
//!
//! From an operator on one device to an operator on another:
//!
//! ```text
//!   send       Output (operator/output.rs) ──> Outlet (outlet.rs): one hub, or a Fan of several
//!                 │ Parcel (header.rs): the message and its header; `depart` commits its uses and sets its ticket
//!                 v
//!   move       Sender (sender.rs), a handle of HubCore (core.rs)
//!                 │ an envelope of the reader's Pool (pool.rs) takes the place of the message's RawEnvelope
//!                 │ (raw_envelope.rs), and the copy is enqueued; without a free one the message waits in the queue
//!                 v
//!   push       Queue (queue.rs), under its lock, once ── the reader's waker (waking.rs) ──┐
//!                                                                                         v
//!   wait                                   RunLoop (operator/run_loop.rs) polls Input (operator/input.rs), which
//!                                          polls InputQueue (operator/input_queue.rs), and Receiver (receiver.rs)
//!                                                                                         │ ready: claim, run
//!                                                                                         v
//!   take       Queue, under its lock, once ──> Intake (operator/intake.rs): the header's load and ticket ──> compute
//! ```
//!
//! Until then nothing waits for the copy: the memory's record of uses orders the reader's work after it. Dropping the
//! envelope returns its memory to the pool, which moves a message that waits for it.
//!
//! A [`ChunkHub`] is the other kind of hub: several links, at several locations, produce, consume, peek at and modify
//! its chunks. It needs no flow.

pub(crate) mod build;
pub(crate) mod carried;
pub(crate) mod chunks;
pub(crate) mod core;
pub(crate) mod crossing;
mod envelope;
mod event_names;
pub(crate) mod external;
pub(crate) mod external_guard;
pub(crate) mod fan;
mod fork;
mod free_list;
pub(crate) mod header;
mod kind;
pub(crate) mod message;
mod metadata;
pub(crate) mod outbox;
pub(crate) mod outlet;
pub(crate) mod pool;
pub(crate) mod queue;
mod raw_envelope;
pub(crate) mod receiver;
pub(crate) mod reply;
pub(crate) mod sender;
pub(crate) mod settle;
#[cfg(test)]
mod tests;
pub(crate) mod view;
pub(crate) mod waking;

#[doc(hidden)]
pub use chunks::DestinationName;
pub use chunks::{
    Chunk, ChunkHub, ChunkHubBuilder, Consumer, Destination, Link, Modifier, Peeker, Producer, Unsent, roles as role,
};
pub use envelope::Envelope;
pub use event_names::{EventNames, knows_event};
pub use fan::Outcome;
pub(crate) use fork::ForkFn;
pub use fork::{Copier, Fork};
pub use header::Since;
pub(crate) use kind::{AgainFn, DEFAULT_CAPACITY, at_least_one};
pub use kind::{Hub, HubKind, HubOf, Latest};
pub use message::{Host, Message};
pub use metadata::{MergePolicy, Metadata};
pub use raw_envelope::RawEnvelope;
pub use reply::Reply;
