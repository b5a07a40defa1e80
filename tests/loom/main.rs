//! Model checks: every interleaving of a protocol. Each includes the files that it checks as they stand, and `crate::sync` is
//! [`sync`] there, loom's primitives in place of std's.

#![allow(clippy::duplicate_mod, clippy::module_inception, reason = "each model includes, by its name, what it checks")]

mod sync;

mod blanks;
mod completion;
mod face;
mod lookout;
mod memory;
mod pool;
mod queue;
mod quiet;
mod turn;
mod wakeup;
mod watch;
