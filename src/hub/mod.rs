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
//! # The way of a message
//!
//! From `send` in one operator to the next operator's `compute` on another device, a message is handed through ten types
//! in eight files: Output, Parcel, Readers, Sender, HubCore, Queue, Slot, Receiver, InputQueue, Input. Files without a
//! folder are in this one. Types in brackets work beside the way; the message does not pass them. While a call or a
//! future holds the message, it does so in a `DiscardOnDrop` (`sync/wakes.rs`): an `Option` that contains a panic of the
//! message's destructor.
//!
//! ```text
//!   send     Output (operator/output.rs)      makes a Parcel (parcel.rs): the message and its header, with the run's load
//!              v
//!            Readers (operator/readers.rs)    one Sender (ends.rs), the writer's end: a reference to the HubCore. With
//!              v                              several readers a [Fan] (fan.rs) forks the message for all but one of them
//!            HubCore::try_send (core.rs)      are the envelopes where the hub expects them, and is there room? Without
//!              │                              room the message stays at the output, which waits
//!              │                              Parcel::depart: [RawEnvelope]::depart commits the uses and sets the ticket
//!              │
//!              ├── nothing is to be moved ──> push as ready
//!              │
//!              │  The queue blocks its writer, none of its messages waits to be moved, and the hub is not stepped:
//!              ├── yes ──> move; if an envelope is free for each, push as ready; otherwise push, and move later
//!              └── no ───> push, then move: now, or when an envelope returns (`pump`), or in a step of a flow that runs
//!                          in steps. `Queue::begin_move` takes the message out of its slot, `Queue::end_move` puts it
//!                          back as ready, and wakes the reader
//!
//!   move     HubCore::move_message (core.rs)  for each [RawEnvelope] (pool.rs) of the message:
//!              [Pool]::take (pool.rs)         an envelope at the reader's location. There is none: the message waits
//!              [transfer::copy]               memory/transfer.rs enqueues the copy on the hub's [Stream] of a [Backend]
//!                                             the copy's uses are committed, and the new envelope replaces the old one,
//!                                             which returns to its pool once the message is pushed or put back
//!
//!   push     Queue::push (queue.rs)           under its lock, into a Slot. If the message is ready, the reader's
//!              v                              [EndWaker] (end_waker.rs) is woken after it
//!   wait     the task of the [OperatorTask] (operator/operator_task.rs) is woken: `poll_next` (operator/run_loop/next_run.rs)
//!            polls the ports through [OperatorRuns] (operator/cx.rs), and claims what the run needs; the [RunLoop]
//!            (operator/run_loop.rs) begins the run. At an input: Input::poll_ready (operator/input.rs) ──>
//!            InputQueue::poll (operator/input_queue.rs) ──> Receiver::poll (ends.rs) ──> Queue::poll_message; then
//!            Input::claim ──> InputQueue::claim
//!              v
//!            `compute` begins
//!              v
//!   take     Input::take ──> InputQueue::take ──> HubCore::take, through the Receiver ──> Queue::take, under its lock
//!              v                              the writer's [EndWaker] is woken after it
//!            Parcel::take_ticket              the ticket goes to the port's [TakenTickets]: the operator's stream waits for
//!                                             it if the message carries no envelope. The load of the header goes to the
//!                                             [RunContext] (operator/run_context.rs)
//! ```
//!
//! Nothing waits for the copy: the memory's record of uses orders the reader's work after it. An envelope that is
//! dropped returns its memory to its pool, which calls its hub: the hub moves a message that waits for an envelope.
//!
//! A [`ChunkHub`] is the other kind of hub: several links, at several locations, produce, consume, peek at and modify
//! its chunks. It needs no flow.

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
mod send_error;
#[cfg(test)]
mod tests;
pub(crate) mod view;
pub(crate) mod when_full;

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
pub use message::{Host, Message};
pub use metadata::{MergePolicy, Metadata};
pub use parcel::Since;
pub use pool::RawEnvelope;
pub use reply::Reply;
pub use send_error::{SendError, TrySendError};
