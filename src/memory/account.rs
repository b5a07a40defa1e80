//! What one operator has in use of the memory that it allocates.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in use, and the most at once.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Its flow, by whatever number.
    flow: usize,
    in_use: AtomicU64,
    peak: AtomicU64,
}

impl Account {
    pub(crate) fn new(flow: usize) -> Self {
        Self { flow, ..Self::default() }
    }

    pub(super) fn flow(&self) -> usize {
        self.flow
    }

    pub(super) fn take(&self, bytes: u64) {
        let now = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}
