//! A queue that is full, as a GPU's driver has it.
//!
//! The driver guards a context with a lock that launches share and that other calls need to themselves, and a launch that
//! waits for room in its stream's queue keeps its share meanwhile: so those calls wait, too (measured on an H200, see
//! `stream/backlog.rs`). Launches go first, as there.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

const PAUSE: Duration = Duration::from_micros(50);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Full {
    most: u64,
    /// Calls that wait for room.
    waiting: AtomicUsize,
}

impl Full {
    pub(super) fn new(most: u64) -> Self {
        Self { most, waiting: AtomicUsize::new(0) }
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Until there is room.
    pub(super) fn wait(&self, pending: impl Fn() -> usize) {
        if (pending() as u64) < self.most {
            return;
        }
        self.waiting.fetch_add(1, Ordering::AcqRel);
        while pending() as u64 >= self.most {
            thread::sleep(PAUSE);
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Until none waits for room.
    pub(super) fn alone(&self) {
        while self.waiting.load(Ordering::Acquire) > 0 {
            thread::sleep(PAUSE);
        }
    }
}
