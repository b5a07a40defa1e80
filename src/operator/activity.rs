//! [`FlowActivity`]: everything that can still cause work in a flow, shared by the tasks of its operators.
//!
//! [`IdleCheck`] is a question from the task that steps through a flow to the flow's own task: has a part of the flow
//! ended or stalled? In a flow that is not stepped, the flow's task detects that by itself.
//!
//! ```text
//!            ask              answer: the check ended operators or waits
//!   NONE ──────────> ASKED ─────────────────────────────────────────────────────> SOMETHING
//!    ^                 └────────────────────────> NOTHING
//!    └── withdraw: the flow has moved ───────────────┘
//! ```

use std::sync::{
    Arc,
    atomic::{AtomicU8, AtomicUsize, Ordering},
};

use super::{idle::Tokens, watchers::Watchers};
use crate::{hub::external_guard::OutsideTracker, sync::WakerCell};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct FlowActivity {
    pub(crate) tokens: Tokens,
    /// The flow's own task: woken when the last token is returned.
    pub(crate) flow: WakerCell,
    /// The task that steps through the flow: woken when no envelope or link of the flow is outside any more.
    pub(crate) stepper: WakerCell,
    /// Receive the operators' changes of status.
    pub(crate) watchers: Watchers,
    /// The number of operators that have not ended.
    left: AtomicUsize,
    /// One of [`parks`].
    parks: AtomicU8,
    /// The number of envelopes that are outside the flow, plus external links to its hubs of chunks.
    outside: AtomicUsize,
}

/// Whether the flow's task is to be notified when an operator parks.
mod parks {
    pub(super) const IGNORED: u8 = 0;
    pub(super) const AWAITED: u8 = 1;
    /// An operator has parked since.
    pub(super) const SEEN: u8 = 2;
}

impl FlowActivity {
    pub(crate) fn new(operators: usize) -> Arc<Self> {
        let (flow, stepper, watchers) = (WakerCell::new(), WakerCell::new(), Watchers::default());
        let (tokens, left) = (Tokens::new(operators), AtomicUsize::new(operators));
        let (parks, outside) = (AtomicU8::new(parks::IGNORED), AtomicUsize::new(0));
        Arc::new(Self { tokens, flow, stepper, watchers, left, parks, outside })
    }

    /// Requests a notification of the flow's task when the next operator parks or ends. Call it before checking which
    /// operators are parked: an operator that parks at the same time is either seen by the check or notifies.
    pub(crate) fn await_park(&self) {
        self.parks.store(parks::AWAITED, Ordering::SeqCst);
    }

    /// Whether an operator has parked or ended since [`await_park`](Self::await_park). True only once.
    pub(crate) fn has_parked(&self) -> bool {
        let (from, to) = (parks::SEEN, parks::IGNORED);
        self.parks.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Whether the flow's task must be notified when an operator parks.
    #[inline]
    pub(super) fn is_park_awaited(&self) -> bool {
        self.parks.load(Ordering::SeqCst) == parks::AWAITED
    }

    /// Records that an operator has ended.
    pub(super) fn count_end(&self) {
        self.left.fetch_sub(1, Ordering::AcqRel);
    }

    /// Notifies the flow's task if it awaits a park.
    pub(super) fn notify_of_park(&self) {
        let (from, to) = (parks::AWAITED, parks::SEEN);
        if self.parks.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            self.flow.wake();
        }
    }

    /// True if a message from outside was accepted and is not in its queue yet.
    pub(crate) fn has_message_entering(&self) -> bool {
        self.tokens.lent() != self.outside()
    }

    /// The number of envelopes that are outside, plus external links.
    pub(crate) fn outside(&self) -> usize {
        self.outside.load(Ordering::SeqCst)
    }
}

impl OutsideTracker for FlowActivity {
    fn lend(&self) {
        self.outside.fetch_add(1, Ordering::SeqCst);
        self.tokens.lend();
    }

    fn regain(&self) {
        let last = self.tokens.regain();
        let none_is_outside = self.outside.fetch_sub(1, Ordering::SeqCst) == 1;
        if last {
            self.flow.wake();
        }
        if none_is_outside {
            self.stepper.wake();
        }
    }

    fn has_ended(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

const NONE: u8 = 0;
const ASKED: u8 = 1;
const NOTHING: u8 = 2;
const SOMETHING: u8 = 3;

/// The state of the question. Each side wakes the other after it has changed the state.
#[derive(Debug)]
pub(crate) struct IdleCheck(AtomicU8);

impl IdleCheck {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(NONE))
    }

    /// Asks the flow's task to check whether a part of the flow has ended or stalled.
    pub(crate) fn ask(&self) {
        self.0.store(ASKED, Ordering::Release);
    }

    /// True while the question is open.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Acquire) == ASKED
    }

    /// Answers the question, if it is open. `moved`: the check ended operators or waits.
    pub(crate) fn answer(&self, moved: bool) {
        let answer = if moved { SOMETHING } else { NOTHING };
        let _ = self.0.compare_exchange(ASKED, answer, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Withdraws the answer `NOTHING`, since the flow's state might have changed after it.
    pub(crate) fn withdraw(&self) {
        let _ = self.0.compare_exchange(NOTHING, NONE, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// True if there is neither a question nor an answer.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.load(Ordering::Acquire) == NONE
    }

    /// The answer: whether the check ended operators or waits. `None` until there is one.
    pub(crate) fn answered(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            SOMETHING => Some(true),
            NOTHING => Some(false),
            _ => None,
        }
    }
}
