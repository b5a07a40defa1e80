//! [`Sweeping`]: whether the lookout's beat comes by a heap, which it does while memory there is bound to streams.
//!
//! ```text
//!          memory is bound: start                    nothing is bound: stop
//!   off ──────────────────────────────> on ──────────────────────────────────> off ──> still nothing? the beat ends
//!    ^                                  ^                                               │ some was bound in between
//!    └──────────────────────────────────┴───────────────────────────────────────────────┘ start, if no one else did
//! ```
//!
//! [`is_on`](Sweeping::is_on) is asked under the heap's lock, beside the change that binds memory, and `stop` looks at the
//! heap under its lock after it has said `off`. So of the two, whichever has the lock later sees the other, and exactly one
//! of them goes on with the beat.
//!
//! Knows no device: `tests/loom_memory.rs` includes it as it stands.

use crate::sync::{AtomicBool, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Sweeping(AtomicBool);

impl Sweeping {
    pub(super) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Under the heap's lock.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Memory is bound. True if it is for the caller to have the heap swept at every beat.
    #[must_use]
    pub(super) fn start(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// A beat has found nothing bound. True if it goes on all the same.
    #[must_use]
    pub(super) fn stop(&self, has_bound: impl FnOnce() -> bool) -> bool {
        self.0.store(false, Ordering::Release);
        has_bound() && self.start()
    }
}
