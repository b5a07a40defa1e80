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
//! From an operator on one device to an operator on another, in the files of this folder or of the one that is named:
//!
//! ```text
//!   send     Output (operator/output.rs) makes a Parcel (header.rs): the message and its header
//!              v
//!            Outlet (outlet.rs): one Sender, or several in a Fan (fan.rs), with a fork for each further reader
//!              v
//!            Sender (sender.rs): is there room? `Parcel::depart` commits the message's uses and sets its ticket
//!              v
//!            HubCore (core.rs)
//!              │  the queue blocks when it is full, no message in it waits to be moved, and the hub is not stepped
//!              ├── yes ──> move ──> push, ready to be taken
//!              └── no ───> push ──> move, now or when an envelope returns (`pump`): `begin_move`, `end_move`
//!
//!   move       each RawEnvelope (raw_envelope.rs) of the message is replaced with one of the reader's Pool (pool.rs);
//!              `transfer::copy` (memory/transfer.rs) enqueues the copy: Stream (stream/enqueue.rs) ──> Backend (device/)
//!   push       Queue (queue.rs), under its lock; it wakes the reader: HubSide (waking.rs)
//!              v
//!   wait     OperatorTask (operator/node.rs) is woken; RunLoop (operator/run_loop.rs) polls and claims the ports through
//!              OperatorRuns (operator/cx.rs): Input (operator/input.rs) ──> InputQueue ──> Receiver (receiver.rs)
//!              v
//!            `compute` begins
//!              v
//!   take     Input ──> Intake (operator/intake.rs) ──> InputQueue ──> Receiver ──> Queue, under its lock; the ticket and
//!              the load of the header go to the operator's streams and its RunContext
//! ```
//!
//! Nothing waits for the copy: the memory's record of uses orders the reader's work after it. An envelope that is
//! dropped returns its memory to its pool, which moves a message that waits for it.
//!
//! A [`ChunkHub`] is the other kind of hub: several links, at several locations, produce, consume, peek at and modify
//! its chunks. It needs no flow.

pub(crate) mod build;
pub(crate) mod chunks;
pub(crate) mod core;
pub(crate) mod ends;
mod envelope;
mod event_names;
pub(crate) mod external;
pub(crate) mod external_guard;
pub(crate) mod fan;
mod fork;
mod free_list;
pub(crate) mod heap_size;
mod hub_kind;
pub(crate) mod hub_side;
pub(crate) mod latest;
pub(crate) mod message;
mod metadata;
pub(crate) mod open_work;
pub(crate) mod outbox;
pub(crate) mod parcel;
pub(crate) mod pool;
pub(crate) mod queue;
pub(crate) mod reply;
pub(crate) mod response_transfer;
#[cfg(test)]
mod tests;
pub(crate) mod view;

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
pub(crate) use hub_kind::{CloneFn, DEFAULT_CAPACITY, at_least_one};
pub use hub_kind::{Hub, HubKind, HubOf, Latest};
pub use message::{Host, Message};
pub use metadata::{MergePolicy, Metadata};
pub use parcel::Since;
pub use pool::RawEnvelope;
pub use reply::Reply;
