//! Async-native GPU pipelines on tokio.
//!
//! An application is a [`Flow`] of [`Operator`]s. Each operator is one async task. It waits for conditions, which are
//! futures; the completion of work on a CUDA stream is one of them. [Hubs](hub) connect operators: async channels of
//! device-resident [`Envelope`]s, which are copied ahead of time to the device of the next reader. The order of work on
//! the device is derived from the data: safe code needs no wait, synchronisation, event or copy for it, and cannot get
//! it wrong.
//!
//! Start with [a first flow](guide::first_flow) in the [guide]. The
//! [examples](https://github.com/wakeline/wakeline/tree/main/examples) are complete programs.
//!
//! # The map
//!
//! A layer uses those below it, never one above.
//!
//! | module | contents |
//! |---|---|
//! | [`guide`] | how to use it, in pages with complete programs; the design, the behaviours that tests are named after, measured facts |
//! | [`test`](mod@test) | a harness for tests of one operator |
//! | [`flow`] | build, check, run, embed: [`Flow`], [`Running`], [`Report`], [`Ingress`], [`Egress`], [`Service`]; [sections](Flow::replay) replayed as CUDA graphs |
//! | [`operator`] | [`Operator`], [`LocalOperator`](operator::LocalOperator), their [`Ports`](operator::Ports), [`Input`], [`Inputs`], [`Output`], [`Cx`]; [`Linked`](operator::Linked) |
//! | [`condition`] | when an operator may run |
//! | [`hub`] | [`HubOptions`], [`Envelope`], [`Message`](trait@Message): queues, envelopes, copies; [`ChunkHub`]: chunks with many readers |
//! | `config` | operators' parameters from files, the environment and the program (feature `config`) |
//! | [`graph`] | CUDA [`Graph`](graph::Graph)s: capture, nodes, [`Exec`](graph::Exec), [`Registry`](graph::Registry) |
//! | [`kernel`](mod@kernel) | typed launches: `#[kernel]`, [`Grid`](kernel::Grid) |
//! | [`memory`] | [`Buffer`] and the order of its uses; [`Allocator`](memory::Allocator)s; work of [other libraries](Stream::external) |
//! | [`stream`] | [`Stream`], [`StreamPool`], [`Ticket`](stream::Ticket), [`Completed`](stream::Completed), [`Event`](stream::Event) |
//! | [`device`] | [`Device`]: CUDA, emulated, host; the only interface to the hardware; the race checker |
//!
//! # Design rules
//!
//! - An operator enqueues and sends. It does not wait for the GPU unless it asks to.
//! - The runtime owns memory that a device may still access until the device is done with it, whatever is dropped or
//!   forgotten.
//! - An idle flow uses no CPU time. A device fault fails every pending future. No `Drop` waits for a device.
//! - The emulated device is a full device: what runs there runs on a GPU, and races are found without one.
//! - `unsafe` is confined to [`device`] and [`memory`], and to the declarations by which kernel authors vouch for their
//!   device code.
//!
//! # Glossary
//!
//! | word | meaning |
//! |---|---|
//! | flow | operators and the hubs between their ports, built, checked and run together |
//! | operator | one async task: it waits for its conditions, then runs |
//! | run | one call of an operator's `compute` |
//! | port | a field of an operator's [`Ports`](operator::Ports): an input, an output or a link to a chunk hub |
//! | condition | a future that decides when an operator may run; `claim` takes what a run needs |
//! | claim | to take what a run needs from all conditions and ports at once; if one refuses, the others get theirs back |
//! | promise | messages or room that a ready condition keeps for the operator's next run |
//! | token | held for everything that may still cause work in a flow; a flow without tokens is idle |
//! | hub | an async channel of messages, or of chunks, between ports |
//! | message | a value that travels from an output to an input, with the envelopes in it |
//! | envelope | memory on a device or the host, with its length and the order of its uses |
//! | blank | an envelope without data, which a hub or a service provides for the next message |
//! | chunk | data in a [`ChunkHub`], which several links read, modify and consume |
//! | metadata | named values that travel with a message, apart from its type |
//! | load | what travels with a message besides its value: its metadata, and the callers that wait for a response |
//! | stream | an ordered queue of work on a device, as a CUDA stream |
//! | ticket | a point in a stream: the work up to there; it completes once the device has passed it |
//! | mark | a driver event that was recorded in a stream behind a ticket, for other streams to wait for |
//! | front | the waiter with the lowest ticket of a stream: it has the device polled, and the others are woken after it |
//! | completion monitor | the thread of a device that polls for waiting tasks and for faults |
//! | tainted | said of work, and of memory it has written, that depends on work of a lost device |
//! | heap | the memory of one allocator: in use, parked while streams may still use it, or free |
//! | capture | recording the work of streams into a graph instead of running it |
//! | exec | an executable graph, which is launched, as in CUDA |
//! | section | operators whose runs are captured once and then replayed as one graph |
//! | ingress, egress | how code outside a flow sends messages into it and receives messages from it |
//! | stall | a state in which operators wait and nothing can wake them: an error that names what is missing |
//!
//! # Guarantees for safe code
//!
//! Each guarantee is listed with the tests, in the folder `tests`, that would fail without it. "Safe code" is code
//! without `unsafe` whose kernels keep to the contract of [`kernel`](macro@kernel).
//!
//! | guarantee | tests |
//! |---|---|
//! | Work that shares memory is ordered, on any streams and devices. | `streams.rs` (`s7_*`), `memory.rs` (`m1_*` to `m4_*`), `random_flows` |
//! | The race checker refuses two accesses that are unordered among the calls it sees, in every run that makes those calls, whatever the timing. It does not see what a kernel does within its arguments. | `streams.rs` (`m12_*`), the model in `device/check/reference.rs`, `random_flows` with mutants |
//! | While a host slice exists, no stream or graph launch writes its memory; while a mutable one exists, none uses it. | `graph_edges/slices.rs`, `random_flows/by_hand` |
//! | A device fault fails every future that waits for the device, with the error; on CUDA once the driver reports the fault. | `faults.rs` (`f1_*`, `f3_*`), `fault_*.rs`, `hostile_wakers.rs` |
//! | The loss of a device does not lose another one; on CUDA a kernel's fault ends all GPUs of the process. Work that still runs there keeps its memory to itself. On other devices the loss spoils work that was enqueued behind a wait for the lost device before the loss was known, and the memory that this work has written, until that is written anew. | `hostile_devices` |
//! | A drop does not wait for a device, and memory that a device might still be using is neither freed nor reused. | `dropping.rs`, `memory.rs`, `calls_that_wait.rs` |
//! | A user's waker, closure or destructor that panics or calls back harms only itself: it runs with no lock held, and the others are still called. Where values that the library keeps own each other, the destructor of the ninth level and below runs after the outer destructor has returned, which bounds the stack: a destructor that waits for one of those waits for ever. The arguments of a future that was not polled are dropped with it, as in Rust. On a device's own thread, a call that would wait for the device is an error, and on CUDA so is every call that needs the driver ([what a waker may do](CompletionMode#what-a-waker-may-do)). | `hostile_wakers.rs`, `hostile_messages.rs`, `hostile_devices`, `calls_that_wait.rs`, `hostile_flows`, `hostile_conditions`, and the lock order that every debug build asserts |
//! | A hub holds no more messages and envelopes than its limits allow, and a service keeps nothing of callers that it has answered. | `hubs.rs` (`h13`), `queues.rs` (`q1_*`), `service_loops.rs` |
//! | The caller of a service receives an error's kind, and no names, pointers or paths of the flow. What one caller sends, or keeps of its responses, ends nothing for the others, unless a response [hides an envelope](Service#envelopes-in-a-response). | `service_callers.rs`, `service_ends.rs` |
//! | Sizes, counts, names, alignments and durations at the ends of their ranges work or are errors. | `extremes` |
//! | The protocols of completion, queues, idle detection, watchers, pools, memory queues, watch values, the completion monitor, wakers, the flight recorder's rings and the simulation's loop are correct in every interleaving of their models. | `loom` |

#![deny(missing_docs)]
#![deny(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Code that the macros generate names the crate by its external path.
extern crate self as wakeline;

// First, because rustdoc lists a type's methods in the order of the modules.
pub mod stream;

mod clock;
pub mod condition;
#[cfg(feature = "config")]
#[cfg_attr(docsrs, doc(cfg(feature = "config")))]
pub mod config;
#[allow(unsafe_code)]
pub mod device;
mod error;
pub mod flow;
pub mod graph;
// Pages, and no code: built for the documentation and its tests only.
#[cfg(doc)]
pub mod guide;
pub mod hub;
pub mod kernel;
#[allow(unsafe_code)]
pub mod memory;
#[cfg(not(wakeline_mutants))]
mod mutants;
#[cfg(wakeline_mutants)]
pub mod mutants;
pub mod observe;
pub mod operator;
mod sync;
pub mod test;
mod thread_name;
#[allow(dead_code, reason = "being built")]
mod tracepoint;

#[cfg(feature = "config")]
#[doc(inline)]
pub use config::Config;
/// The version of cudarc that [`Stream::from_cudarc`] and similar functions use.
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use cudarc;
#[doc(inline)]
pub use device::Device;
pub use error::{Error, ErrorKind, Result};
#[doc(inline)]
pub use flow::{Egress, Flow, Ingress, Report, Running, Service};
#[doc(inline)]
pub use hub::{ChunkHub, Envelope, Fork, Host, HubOptions, Message};
#[doc(inline)]
pub use memory::Buffer;
#[doc(inline)]
pub use operator::{Cx, Input, Inputs, Operator, Output};
#[doc(inline)]
pub use stream::{CompletionMode, Stream, StreamPool};
pub use wakeline_macros::{Message, Ports, kernel};

/// What operators and flows commonly need. Its names do not collide with those of `futures::prelude`, `tokio` and the
/// standard library, except for [`Result`], which has the standard one's parameters; so [`crate::Stream`] is not
/// here.
pub mod prelude {
    #[doc(no_inline)]
    pub use crate::{
        Buffer, ChunkHub, Cx, Device, Envelope, Error, ErrorKind, Flow, Host, HubOptions, Input, Inputs, Message,
        Operator, Output, Report, Result, Service, StreamPool,
        condition::{Gate, every},
        device::Emulated,
        kernel::Grid,
        operator::{
            Consume, Modify, Peek, Ports, Produce, map, map_with, sink, sink_with, source, source_with, with_state,
        },
    };
    #[doc(no_inline)]
    pub use wakeline_macros::{KernelStruct, Ports, kernel};
}

/// Called by code that the macros generate. Not part of the public API: it may change in any version.
#[doc(hidden)]
pub mod __private {
    pub use crate::{
        condition::{EventField, Readiness},
        device::CudaTypes,
        device::backend::{BodyArg, KernelDef, KernelNumber, KernelSource, Registered},
        hub::{
            EnvelopeCount, EventNames, RawEnvelope,
            heap_size::{HeapSize, OfAnything, OfContainer},
            knows_event, larger_element,
        },
        kernel::kernel,
        memory::{
            launch::{Call, PassAny, PassKernelType, ScalarOf},
            shape::{ExtentOperand, SliceLength},
        },
        operator::{AnyPort, Binder, HandleVisitor, InputPort, LinkPort, OutputPort, Plan, Port, PortOptions},
    };
    pub use bytemuck;
    pub use inventory;
}
