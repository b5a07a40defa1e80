//! Async-native GPU pipelines on tokio.
//!
//! An application is a [`Flow`] of [`Operator`]s. Each operator is one async task; what it waits for are conditions, and
//! conditions are futures. The completion of work on a CUDA stream is a waker. Operators are joined by [hubs](hub):
//! async channels of device-resident [`Envelope`]s, which are copied to where the next reader is, ahead of time. Nobody
//! writes a wait, a synchronise, an event or a copy to get the order right, and nobody can get it wrong in safe code.
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
//! - Idle costs nothing. A fault resolves everybody. Nothing blocks in a `Drop`.
//! - The emulated device is a device: what runs there runs on a GPU, and a race is found without one.
//! - `unsafe` is in [`device`] and [`memory`], and where a kernel's author vouches for its device code.

#![deny(missing_docs)]
#![deny(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// What the macros generate names the crate from outside.
extern crate self as wakeline;

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
pub mod operator;
#[cfg(feature = "planted")]
#[doc(hidden)]
pub mod planted;
#[cfg(not(feature = "planted"))]
mod planted;
pub mod stream;
mod sync;
mod thread_name;

#[cfg(feature = "config")]
pub use config::Config;
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
        condition::{EventField, Readiness, knows_event},
        device::backend::{BodyArg, KernelDef, Known, Prototype, Source},
        hub::RawEnvelope,
        kernel::{Registered, kernel},
        memory::launch::Call,
        operator::{AnyPort, Binder, InputPort, LinkPort, OutputPort, Plan, Port, PortOptions},
    };
    pub use inventory;
}

// The README's program is one of the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
