//! [`RestCheck`]: a question of the task that steps through a flow to the flow's own task: has a part of the flow come to its end, or
//! stalled? Where the flow is not stepped its own task finds that out by itself.
//!
//! ```text
//!            ask              answer: operators, or waits of theirs, were ended
//!   NONE ──────────> ASKED ─────────────────────────────────────────────────────> SOMETHING
//!    ^                 └────────────────────────> NOTHING
//!    └── withdraw: the state may have changed ───────┘
//! ```

use std::sync::atomic::{AtomicU8, Ordering};

const NONE: u8 = 0;
const ASKED: u8 = 1;
const NOTHING: u8 = 2;
const SOMETHING: u8 = 3;

/// See the [module](self). Each side notifies the other one after a change.
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

    /// `moved`: operators, or waits of theirs, were ended.
    pub(crate) fn answer(&self, moved: bool) {
        let answer = if moved { SOMETHING } else { NOTHING };
        let _ = self.0.compare_exchange(ASKED, answer, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Takes back the answer that nothing has moved.
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
