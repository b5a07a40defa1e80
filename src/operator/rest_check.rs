//! [`RestCheck`]: a request of the task that steps through a flow to the flow's own task, which asks whether a part of
//! the flow has ended or stalled. Where the flow is not stepped, its own task detects that by itself.
//!
//! ```text
//!            ask              answer: operators, or their waits, were ended
//!   NONE ──────────> ASKED ─────────────────────────────────────────────────────> SOMETHING
//!    ^                 └────────────────────────> NOTHING
//!    └── withdraw: the state may have changed ───────┘
//! ```

use std::sync::atomic::{AtomicU8, Ordering};

const NONE: u8 = 0;
const ASKED: u8 = 1;
const NOTHING: u8 = 2;
const SOMETHING: u8 = 3;

/// See the [module](self). Each side notifies the other after a change.
#[derive(Debug)]
pub(crate) struct RestCheck(AtomicU8);

impl RestCheck {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    pub(crate) fn ask(&self) {
        self.0.store(ASKED, Ordering::Release);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Acquire) == ASKED
    }

    /// `moved`: operators, or their waits, were ended.
    pub(crate) fn answer(&self, moved: bool) {
        let answer = if moved { SOMETHING } else { NOTHING };
        let _ = self.0.compare_exchange(ASKED, answer, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Withdraws the answer that nothing has moved.
    pub(crate) fn withdraw(&self) {
        let _ = self.0.compare_exchange(NOTHING, NONE, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.load(Ordering::Acquire) == NONE
    }

    /// `None` until there is an answer.
    pub(crate) fn answered(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            SOMETHING => Some(true),
            NOTHING => Some(false),
            _ => None,
        }
    }
}
