//! The memory that one operator has in use.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in use, and their peak.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// A number that identifies its flow.
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
