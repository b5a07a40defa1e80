//! Async-native GPU pipelines on tokio.
//!
//! An application is a [`Flow`] of [`Operator`]s. Each operator is one async task; what it waits for are conditions, and
//! conditions are futures. The completion of work on a CUDA stream is a waker. Operators are joined by [hubs](hub):
//! async channels of device-resident [`Envelope`]s, which are copied to where the next reader is, ahead of time. Order on the
//! device follows from the data: safe code needs no wait, synchronise, event or copy for it, and cannot get it wrong.
//!
//! Begin with [`Flow`] and [`Operator`]; the folder `examples` has whole programs.
//!
//! # The map
//!
//! A layer uses those below it, never one above.
//!
//! | module | what it is |
//! |---|---|
//! | [`flow`] | build, check, run, embed: [`Flow`], [`Running`], [`Report`], [`Ingress`], [`Egress`], [`Service`]; [sections](Flow::replay) replayed as CUDA graphs |
//! | [`operator`] | [`Operator`], [`LocalOperator`](operator::LocalOperator), their [`Ports`](operator::Ports), [`Input`], [`Inputs`], [`Output`], [`Cx`]; [`Linked`](operator::Linked) |
//! | [`condition`] | when may an operator run |
//! | [`hub`] | [`Hub`], [`Envelope`], [`Message`](trait@Message): queues, envelopes, copies; [`ChunkHub`]: chunks that many see |
//! | `config` | with the feature of that name: operators' parameters from files, the environment and the program |
//! | [`graph`] | CUDA [`Graph`](graph::Graph)s: capture, nodes, [`Exec`](graph::Exec), [`Registry`](graph::Registry) |
//! | [`kernel`](mod@kernel) | typed launches: `#[kernel]`, [`Grid`](kernel::Grid) |
//! | [`memory`] | [`Buffer`], and who uses it when; [`Allocator`](memory::Allocator)s; work of [other libraries](Stream::external) |
//! | [`stream`] | [`Stream`], [`StreamPool`], [`Ticket`](stream::Ticket), [`Completed`](stream::Completed), [`Event`](stream::Event) |
//! | [`device`] | [`Device`]: CUDA, emulated, host; the one seam to the hardware; the race checker |
//!
//! # The tenets
//!
//! - An operator enqueues and sends; it does not wait for the GPU unless it asks.
//! - What a device may still touch is owned by the runtime until it is done, whatever is dropped or forgotten.
//! - An idle flow uses no processor. A device fault fails every pending future. Nothing waits for a device in a `Drop`.
//! - The emulated device is a device: what runs there runs on a GPU, and a race is found without one.
//! - `unsafe` is in [`device`] and [`memory`], and where a kernel's author vouches for its device code.

//!
//! # What safe code can rely on
//!
//! Each promise with the tests that would fail without it, in the folder `tests`. "Safe code" is code without `unsafe`, with
//! kernels whose authors keep to the contract of [`kernel`](macro@kernel).
//!
//! | promise | tests |
//! |---|---|
//! | Work that shares memory is ordered, on any streams and devices. | `streams.rs` (`s7_*`), `memory.rs` (`m1_*` to `m4_*`), `random_flows` |
//! | The race checker refuses two accesses that nothing orders among the calls that it sees, in every run that makes those calls, however they are timed. What a kernel does within its arguments, it does not see. | `streams.rs` (`m12_*`), the model in `device/check/reference.rs`, `random_flows` with mutants |
//! | A slice of host memory that exists is not written, and memory that is lent to be written is not used, by streams or by launches of graphs. | `graph_edges/slices.rs`, `random_flows/by_hand` |
//! | A fault of a device fails every future that waits for it, with the error; on CUDA once the driver reports the fault. | `faults.rs` (`f1_*`, `f3_*`), `fault_*.rs`, `hostile_wakers.rs` |
//! | A device that is lost takes no other with it; on CUDA a kernel's fault ends all GPUs of the process. What still runs there has its memory to itself. On other devices it spoils the work that was enqueued behind a wait for its own before the loss was known, and the memory that this has written, until that is written anew. | `hostile_devices` |
//! | A drop does not wait for a device, and memory that a device may still use is neither freed nor handed out again. | `dropping.rs`, `memory.rs`, `calls_that_wait.rs` |
//! | A waker, a closure or a destructor of the user's that panics or calls back harms itself only: it runs with no lock held, and the others are served. Of values that the library keeps, and that hold each other in this way, from the ninth level on the inner one is dropped when the outer destructor has returned, so that the stack has an end: a destructor that waits for one below that waits for ever. The arguments of a future that was not polled are dropped with it, as Rust does. On a thread of the device's own a call that would wait for the device, and on CUDA every call that needs the driver, is an error ([what a waker may do](CompletionMode#what-a-waker-may-do)). | `hostile_{wakers,devices,messages}.rs`, `calls_that_wait.rs`, `hostile_flows`, `hostile_conditions`, and the lock order that every debug build asserts |
//! | A hub holds no more messages and envelopes than it is allowed, and a service forgets the callers that it has answered. | `hubs.rs` (`h13`), `queues.rs` (`q1_*`), `service_loops.rs` |
//! | The caller of a service is given an error's kind and no names, pointers or paths of the flow, and what one caller sends or keeps of its responses ends nothing for the others. | `service_callers.rs`, `service_ends.rs` |
//! | Sizes, counts, names, alignments and durations at the ends of their ranges are errors, or work. | `extremes` |
//! | The protocols of completion, queues, rest, watchers, pools, memory queues, watch values, the lookout, wakers and the loop of a simulation are right in every interleaving of their models. | `loom` |

#![deny(missing_docs)]
#![deny(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// What the macros generate names the crate from outside.
extern crate self as wakeline;

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
pub mod hub;
pub mod kernel;
#[allow(unsafe_code)]
pub mod memory;
#[cfg(not(wakeline_mutants))]
mod mutants;
#[cfg(wakeline_mutants)]
pub mod mutants;
pub mod operator;
pub mod stream;
mod sync;
mod thread_name;

#[cfg(feature = "config")]
pub use config::Config;
/// The version that [`Stream::from_cudarc`] and the like are for.
#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use cudarc;
pub use device::Device;
pub use error::{Error, ErrorKind, Result};
pub use flow::{Egress, Flow, Ingress, Report, Running, Service};
pub use hub::{ChunkHub, Envelope, Fork, Host, Hub, Message};
pub use memory::Buffer;
pub use operator::{Cx, Input, Inputs, Operator, Output};
pub use stream::{CompletionMode, Stream, StreamPool};
pub use wakeline_macros::{Message, Ports, kernel};

/// All that an operator and a flow need.
pub mod prelude {
    pub use crate::{
        Buffer, ChunkHub, Cx, Device, Envelope, Error, ErrorKind, Flow, Host, Hub, Input, Inputs, Message, Operator,
        Output, Report, Result, Stream, StreamPool,
        device::Emulated,
        operator::{Consume, Modify, Peek, Ports, Produce},
    };
    pub use wakeline_macros::{Ports, kernel};
}

/// What the macros generate calls. No part of the interface: it may change with any version.
#[doc(hidden)]
pub mod __private {
    pub use crate::{
        condition::{EventField, EventNames, Readiness, knows_event},
        device::backend::{BodyArg, KernelDef, Known, Prototype, Source},
        hub::{
            RawEnvelope,
            carried::{Carried, OfAnything, OfContainer},
        },
        kernel::{Registered, kernel},
        memory::launch::Call,
        operator::{AnyPort, Binder, InputPort, LinkPort, OutputPort, Plan, Port, PortOptions},
    };
    pub use inventory;
}

// The README's program is one of the documentation's tests, and so are the examples of the macros.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../macros/src/examples/message.md")]
#[doc = include_str!("../macros/src/examples/ports.md")]
struct Readme;
