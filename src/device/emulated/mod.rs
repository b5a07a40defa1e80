//! A device without a GPU.
//!
//! It is a device and not a mock: in-order streams whose work runs at once on its own worker threads, events, host
//! functions, graphs, an address space that only copies and kernels reach, a capacity, poison, copies between several of
//! them, and faults. What is written for it and checked on it behaves the same on a GPU, except that it is slower there
//! than here to notice its mistakes.
//!
//! ```text
//!   device      the calls: `Backend`, one struct
//!     machine     which work may run: streams, events, points; no threads
//!     work        what work does: copies, fills, kernels, host functions
//!     graph       work that is launched as a whole, again and again
//!     memory      the address space
//!     workers     threads that run it        }  one or
//!     simulation  one seeded loop runs it    }  the other
//!     faults      what is to go wrong
//!     full        a queue that is full
//! ```

mod device;
mod faults;
mod full;
mod graph;
mod machine;
mod memory;
pub(crate) mod simulation;
mod work;
mod workers;

#[cfg(test)]
mod order;
#[cfg(test)]
mod tests;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

pub use faults::Faults;
pub use simulation::{Simulation, Task, Unfinished};

use super::backend::Backend;
use crate::sync::lock;

/// Threads of one device at most.
const MOST_WORKERS: usize = 256;

/// How an emulated device is made.
///
/// `Emulated::new()` is a device of 64 MiB with up to four workers. A small memory makes data larger than the device a
/// test and not a thought: `Emulated::new().memory(1 << 20)`. One worker makes streams take turns:
/// `Emulated::new().workers(1)`. Planned faults come with [`faults`](Self::faults):
/// `Emulated::new().faults(Faults::new().trap_kernel("scale", 3))`.
#[derive(Clone, Debug)]
pub struct Emulated {
    memory: u64,
    workers: usize,
    faults: Faults,
    name: Option<String>,
    queue_depth: Option<u64>,
}

impl Emulated {
    /// 64 MiB of memory, a worker for each core up to four, no faults.
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self { memory: 64 << 20, workers: cores.min(4), faults: Faults::new(), name: None, queue_depth: None }
    }

    /// The device's memory: the sum of all live allocations is never more.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// How many threads run its work: one at least, 256 at most. Any number of streams works with any number of workers. A simulated
    /// device has none.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.clamp(1, MOST_WORKERS);
        self
    }

    /// What is to go wrong.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// How many kernels, copies, fills and launches of graphs a stream takes before the call that enqueues one more waits, as
    /// on a GPU, where it is about a thousand. While such a call waits, others wait for it that make or end a stream or an
    /// event, enqueue a host function or allocate page-locked memory. Without this it is any number. A simulated device
    /// takes any number.
    ///
    /// wakeline itself waits before that many are pending, and lets the others go on.
    #[must_use]
    pub fn queue_depth(mut self, pieces: u64) -> Self {
        self.queue_depth = Some(pieces.max(16));
        self
    }

    /// A name for messages, instead of `emulated:0` and so on.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }
}

impl Default for Emulated {
    fn default() -> Self {
        Self::new()
    }
}

/// A device of this kind, with threads of its own.
pub(crate) fn open(config: Emulated) -> Arc<dyn Backend> {
    static OPENED: AtomicU64 = AtomicU64::new(0);
    let number = OPENED.fetch_add(1, Ordering::Relaxed);
    let engine = workers::threaded();
    device::Device::open(config, engine, format!("emulated:{number}"))
}

/// A number that nothing else in this process has. They grow, so their order is that of creation; and they are no
/// addresses, so that they are not a CUDA handle's either.
fn fresh_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 62);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
