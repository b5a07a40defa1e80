//! [`SearchSchedule`]: when the flow's supervisor searches for groups of operators that wait only for each other.
//!
//! A search takes place a while after an operator has parked or ended, and is not repeated before another operator has:
//! an idle flow has no timer.
//!
//! ```text
//!             an operator parks               SEARCH_AFTER                          no such group
//!   AWAITS ─────────────────────> ALARM SET ───────────────> AWAITS, and searches ────────────────> AWAITS
//!      ^                              ^                          │ a running operator might hold   │ a group, in two
//!      searches
//!      └──── ends, or is reported ────┼────── end of its wait ───┘ what one waits for      <───────┘ of the same state
//!                                     └──────────────────────────┘
//! ```
//!
//! There is no search on a runtime without timers, nor in a program that aborts on a panic, since tokio reports missing
//! timers by a panic.

use std::{task::Context, time::Duration};

use tokio::time::Instant;

use super::spawn::has_timers;
use crate::{
    condition::{Alarm, after},
    operator::activity::FlowActivity,
};

/// The time between an operator's park and the search. It is short enough to report a stall before a caller times out,
/// and limits a busy flow to ten searches per second.
pub(super) const SEARCH_AFTER: Duration = Duration::from_millis(100);

/// The time until the next search after an inconclusive one.
pub(super) const SEARCH_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// An alarm that never fires if there are no timers.
#[derive(Default)]
pub(super) struct TimeLimit {
    alarm: Alarm,
    /// Determined once, when the alarm is first used.
    there_are_timers: Option<bool>,
}

impl TimeLimit {
    fn there_are_timers(&mut self) -> bool {
        // Tokio reports missing timers by a panic, which is caught in `has_timers`.
        *self.there_are_timers.get_or_insert_with(|| cfg!(panic = "unwind") && has_timers())
    }

    /// True from `due` on. Registers the waker until then.
    pub(super) fn has_passed(&mut self, due: Instant, task: &mut Context<'_>) -> bool {
        self.there_are_timers() && self.alarm.has_passed(due, task)
    }
}

/// The schedule of the searches for groups.
#[derive(Default)]
pub(super) struct SearchSchedule {
    limit: TimeLimit,
    due: Option<Instant>,
    begun: bool,
}

impl SearchSchedule {
    /// True once, a while after an operator has parked or ended. Registers the waker until then.
    pub(super) fn is_due(&mut self, activity: &FlowActivity, task: &mut Context<'_>) -> bool {
        if !std::mem::replace(&mut self.begun, true) {
            activity.await_park();
        }
        if activity.has_parked() {
            let soon = after(Instant::now(), SEARCH_AFTER);
            self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
        }
        if self.due.is_none_or(|due| !self.limit.has_passed(due, task)) {
            return false;
        }
        self.limit.alarm.stop_waiting();
        self.due = None;
        activity.await_park();
        true
    }

    /// The search was inconclusive: another one follows after this time, even if no operator parks.
    pub(super) fn again(&mut self, time: Duration) {
        self.due = Some(after(Instant::now(), time));
    }
}
