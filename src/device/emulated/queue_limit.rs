//! [`QueueLimit`]: makes calls block while a stream's queue is full, like a GPU's driver.
//!
//! The driver guards a context with a reader-writer lock: launches share it, and some other calls acquire it
//! exclusively. A launch that waits for room in its stream's queue keeps the lock shared, so exclusive calls wait too
//! (measured on an H200, see `stream/backlog.rs`). Launches take precedence, as in the driver.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

const PAUSE: Duration = Duration::from_micros(50);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct QueueLimit {
    max: u64,
    /// The number of calls that wait for room.
    waiting: AtomicUsize,
}

impl QueueLimit {
    pub(super) fn new(max: u64) -> Self {
        Self { max, waiting: AtomicUsize::new(0) }
    }

    pub(super) fn max(&self) -> u64 {
        self.max
    }

    pub(super) fn wait(&self, pending: impl Fn() -> usize) {
        if (pending() as u64) < self.max {
            return;
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        while pending() as u64 >= self.max {
            thread::sleep(PAUSE);
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn wait_exclusive(&self) {
        while self.waiting.load(Ordering::Acquire) > 0 {
            thread::sleep(PAUSE);
        }
    }
}
