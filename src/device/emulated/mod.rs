//! A device without a GPU.
//!
//! It is a complete device, not a mock. Its streams run work in order, at once, on worker threads. It has events, host
//! functions, graphs, copies between devices, a memory capacity and planned faults; only copies and kernels can access
//! its address space, and fresh and freed memory is poisoned. Code that is correct here behaves the same on a GPU,
//! where mistakes are only noticed later.
//!
//! ```text
//!   device      the calls: `Backend`, one struct
//!     machine     which work may run: streams, events, points; no threads
//!     work        the work itself: copies, fills, kernels, host functions
//!     graph       work that is launched as a whole, repeatedly
//!     memory      the address space
//!     workers     threads that run it        }  one or
//!     simulation  one seeded loop runs it    }  the other
//!     faults      planned faults
//!     queue_limit calls that block while a stream's queue is full
//! ```
//!
//! To add here, with the files to change (a fault or a counter: see CONTRIBUTING.md):
//! - a call: `../backend.rs`, `device.rs`, `../cuda/mod.rs`, `work.rs` if it enqueues; forwarded by `../check/` and
//!   `../recorder.rs`
//! - a graph node: also `graph/mod.rs`, `graph/nodes.rs` and `graph/run.rs`, and `../check/graph/` for its accesses

mod device;
mod faults;
mod graph;
mod machine;
mod memory;
mod queue_limit;
pub(crate) mod simulation;
mod work;
mod workers;

#[cfg(test)]
mod order;
#[cfg(test)]
mod tests;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

pub use faults::Faults;
pub use simulation::{Simulation, Task, Unfinished};

use super::backend::Backend;
use crate::sync::lock;

/// The maximum number of worker threads of one device.
const MAX_WORKERS: usize = 256;

/// The configuration of an emulated device.
///
/// `Emulated::new()` is a device of 64 MiB with up to four workers. A small memory makes it easy to test data larger
/// than the device: `Emulated::new().memory(1 << 20)`. With one worker, streams take turns:
/// `Emulated::new().workers(1)`. Faults are planned with [`faults`](Self::faults):
/// `Emulated::new().faults(Faults::new().trap_kernel("scale", 3))`.
#[derive(Clone, Debug)]
pub struct Emulated {
    memory: u64,
    workers: usize,
    faults: Faults,
    name: Option<String>,
    queue_depth: Option<u64>,
    times: WorkTimes,
}

/// How long work takes.
#[derive(Clone, Debug, Default)]
struct WorkTimes {
    kernels: Vec<(String, Duration)>,
    copy: Duration,
    graph: Duration,
}

impl WorkTimes {
    fn of_kernel(&self, name: &str) -> Duration {
        self.kernels.iter().find(|(known, _)| known == name).map_or(Duration::ZERO, |(_, time)| *time)
    }
}

impl Emulated {
    /// 64 MiB of memory, a worker for each core up to four, no faults.
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self {
            memory: 64 << 20,
            workers: cores.min(4),
            faults: Faults::new(),
            name: None,
            queue_depth: None,
            times: WorkTimes::default(),
        }
    }

    /// Sets the device's memory in bytes, the limit for the sum of all live allocations.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets the number of worker threads, from 1 to 256. Any number of streams works with any number of workers. A
    /// simulated device has no workers.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers.clamp(1, MAX_WORKERS);
        self
    }

    /// Sets the planned faults.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// Sets how many kernels, copies, fills and graph launches can be pending in a stream before a call that enqueues
    /// one more blocks. The minimum is 16; on a GPU it is about a thousand. While such a call blocks, calls that create
    /// or destroy a stream or an event, enqueue a host function or allocate page-locked memory block too. By default,
    /// and on a simulated device, there is no limit.
    ///
    /// wakeline itself waits before this limit is reached, so that it does not delay other calls.
    #[must_use]
    pub fn queue_depth(mut self, pieces: u64) -> Self {
        self.queue_depth = Some(pieces.max(16));
        self
    }

    /// Sets how long each launch of the kernel `name` takes, besides the time of its Rust body: in a
    /// [simulation](super::Simulation) in virtual time, otherwise a worker thread sleeps. By default nothing is added. In a
    /// simulation, each launch ends at a whole millisecond, which is what tokio's timers are exact to, and a call that
    /// blocks until work is done skips the time.
    #[must_use]
    pub fn kernel_time(mut self, name: impl Into<String>, time: Duration) -> Self {
        let name = name.into();
        self.times.kernels.retain(|(known, _)| *known != name);
        self.times.kernels.push((name, time));
        self
    }

    /// Like [`kernel_time`](Self::kernel_time), for each copy.
    #[must_use]
    pub fn copy_time(mut self, time: Duration) -> Self {
        self.times.copy = time;
        self
    }

    /// Like [`kernel_time`](Self::kernel_time), for each launch of a graph.
    #[must_use]
    pub fn graph_time(mut self, time: Duration) -> Self {
        self.times.graph = time;
        self
    }

    /// Sets the device's name in messages, in place of `emulated:0` and so on.
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

pub(crate) fn open(config: Emulated) -> Arc<dyn Backend> {
    static OPENED: AtomicU64 = AtomicU64::new(0);
    let number = OPENED.fetch_add(1, Ordering::Relaxed);
    let engine = workers::threaded();
    device::EmulatedDevice::open(config, engine, format!("emulated:{number}"))
}

/// A number that is unique in this process and differs from CUDA handles. Numbers are in the order of creation.
fn fresh_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 62);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
