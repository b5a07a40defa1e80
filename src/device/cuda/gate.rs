//! [`Gate`]: lets the few calls that need the context to themselves through.
//!
//! The driver guards a context with a lock that launches share and that making or ending a stream or an event takes for
//! itself; and whoever shares it goes first. Where eight threads launch one after the other there is always one inside:
//! on an H200 `cuEventCreate` then took 320 ms, `cuEventCreate` and `cuEventDestroy` together 2.3 s, and a flow that
//! started beside others that ran hardly came to its streams (alone such a call takes 0.2 us). Letting fewer threads launch
//! would cost more than it gains: eight launch 1.8 times as much as three.
//!
//! So whoever needs the context to itself says so here, and launches of ours wait until it has had it: some
//! microseconds. A launch that nobody holds up pays one load.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// One for each context.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// Calls that need the context to themselves: how many have come, and how many of them have gone.
    come: AtomicUsize,
    gone: AtomicUsize,
}

/// While it lives, launches wait.
pub(super) struct Alone<'a>(&'a Gate);

impl Gate {
    /// For a call that takes microseconds once it has the context.
    pub(super) fn alone(&self) -> Alone<'_> {
        self.come.fetch_add(1, Ordering::Relaxed);
        Alone(self)
    }

    /// Before a launch.
    #[inline]
    pub(super) fn pass(&self) {
        let come = self.come.load(Ordering::Relaxed);
        if self.gone.load(Ordering::Relaxed) != come {
            self.wait(come);
        }
    }

    /// For those that had come, or as many others.
    #[cold]
    fn wait(&self, come: usize) {
        /// Some microseconds; whoever is inside may have lost its processor, perhaps to this thread.
        const SPINS: u32 = 1000;
        /// A launch that a full channel holds up holds up who needs the context to itself: then the others go on after
        /// some hundredths of a second.
        const MOST: u32 = 20_000;
        for spin in 0..MOST {
            if self.gone.load(Ordering::Relaxed).wrapping_sub(come) <= usize::MAX / 2 {
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

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.gone.fetch_add(1, Ordering::Relaxed);
    }
}
