//! Model checks: every interleaving of a protocol. Each model includes the files that it checks unchanged, and
//! `crate::sync` is [`sync`] there, with loom's primitives in place of std's.

#![allow(clippy::duplicate_mod, clippy::module_inception, reason = "each model includes, by name, what it checks")]

mod sync;

mod blanks;
mod completion;
mod idle;
mod memory;
mod monitor;
mod pool;
mod probe_waker;
mod queue;
mod ring;
mod spinning;
mod use_lock;
mod wakeup;
mod watch;
