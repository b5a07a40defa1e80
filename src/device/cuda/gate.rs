//! [`ContextGate`]: gives priority to the few calls that need the context exclusively.
//!
//! The driver guards a context with a reader-writer lock that prefers readers: launches share it, and creating or
//! destroying a stream or an event acquires it exclusively. If eight threads launch in a loop, one of them always holds
//! the lock: on an H200 `cuEventCreate` then took 320 ms, `cuEventCreate` and `cuEventDestroy` together 2.3 s, and a
//! flow that started while others ran could hardly create its streams (uncontended, such a call takes 0.2 us). Limiting
//! the number of launching threads would cost more than it gains: eight launch 1.8 times as much as three.
//!
//! So a call that needs the context exclusively registers here, and launches by this crate wait until it is done, for
//! some microseconds. Otherwise the gate costs a launch one load.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

#[derive(Debug, Default)]
pub(super) struct ContextGate {
    /// The number of exclusive calls that have begun.
    begun: AtomicUsize,
    /// The number of exclusive calls that have ended.
    ended: AtomicUsize,
}

/// A guard for an exclusive call. Launches wait while it exists.
pub(super) struct ExclusiveCall<'a>(&'a ContextGate);

impl ContextGate {
    /// Begins an exclusive call, which must take only microseconds once it has the context.
    pub(super) fn exclusive(&self) -> ExclusiveCall<'_> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        ExclusiveCall(self)
    }

    /// Whether launches would wait.
    pub(super) fn is_pending(&self) -> bool {
        self.ended.load(Ordering::Relaxed) != self.begun.load(Ordering::Relaxed)
    }

    /// Waits for pending exclusive calls. Call this before a launch.
    #[inline]
    pub(super) fn wait_for_exclusive(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        if self.ended.load(Ordering::Relaxed) != begun {
            self.wait(begun);
        }
    }

    /// Waits until as many exclusive calls have ended as had begun.
    #[cold]
    fn wait(&self, begun: usize) {
        /// Some microseconds. Afterwards this thread yields, as the thread of the exclusive call might have been
        /// preempted.
        const SPINS: u32 = 1000;
        /// The limit, including yields. A launch that blocks on a full queue also blocks the exclusive call. Other
        /// launches then continue after some hundredths of a second.
        const MAX_SPINS: u32 = 20_000;
        for spin in 0..MAX_SPINS {
            if self.ended.load(Ordering::Relaxed).wrapping_sub(begun) <= usize::MAX / 2 {
                return;
            }
            if spin < SPINS {
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

impl Drop for ExclusiveCall<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}
