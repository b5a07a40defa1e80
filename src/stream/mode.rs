//! [`CompletionMode`]: what a stream's completions may cost, and what they are to bring.

use std::sync::atomic::{AtomicU8, Ordering};

/// How a stream learns that its work is done: how soon, and at what cost to the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Looks when an end is near, sleeps when it is not.
    #[default]
    Adaptive,
    /// Looks all the time while somebody waits: soonest, and it may keep a core busy.
    LowLatency,
    /// Never looks again and again: the device calls back. Cheapest while work is long, and latest.
    Quiet,
}

/// A mode that may be set while others read it.
#[derive(Debug)]
pub(super) struct AtomicMode(AtomicU8);

impl AtomicMode {
    pub(super) fn new(mode: CompletionMode) -> Self {
        Self(AtomicU8::new(mode as u8))
    }

    pub(super) fn get(&self) -> CompletionMode {
        match self.0.load(Ordering::Relaxed) {
            1 => CompletionMode::LowLatency,
            2 => CompletionMode::Quiet,
            _ => CompletionMode::Adaptive,
        }
    }

    pub(super) fn set(&self, mode: CompletionMode) {
        self.0.store(mode as u8, Ordering::Relaxed);
    }
}
