//! [`Looks`]: when the keeper of a flow looks for groups of operators that wait for each other alone.
//!
//! A while after an operator has parked or ended, and not again before another one has: an idle flow has no timer.
//!
//! ```text
//!             an operator parks               LOOK_AFTER                          no such group
//!   AWAITS ─────────────────────> ALARM SET ───────────────> AWAITS, and looks ───────────────────> AWAITS
//!      ^                              ^                          │ an operator that runs might     │ a group, in two looks
//!      └──── ends, or is reported ────┼────── end of its wait ───┘ hold what one waits for <───────┘ at the same state
//!                                     └──────────────────────────┘
//! ```
//!
//! On a runtime without timers there are no looks; nor where a panic would abort the process, since tokio says by a panic that it
//! has none.

use std::{task::Context, time::Duration};

use tokio::time::Instant;

use super::spawn::has_timers;
use crate::{
    condition::{Alarm, after},
    operator::node::Rest,
};

/// How long after an operator has parked the keeper looks for groups: users who wait for an answer hear of a stall before
/// they give up, and a flow at work pays for a look ten times a second.
pub(super) const LOOK_AFTER: Duration = Duration::from_millis(100);

/// After a look that could not tell.
pub(super) const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// An alarm, where there are timers.
#[derive(Default)]
pub(super) struct TimeLimit {
    alarm: Alarm,
    /// Asked once, at the first moment that is waited for.
    there_are_timers: Option<bool>,
}

impl TimeLimit {
    fn there_are_timers(&mut self) -> bool {
        // Tokio is asked by way of a panic, which ends here.
        *self.there_are_timers.get_or_insert_with(|| cfg!(panic = "unwind") && has_timers())
    }

    /// True from `due` on. Until then the waker is kept.
    pub(super) fn has_passed(&mut self, due: Instant, task: &mut Context<'_>) -> bool {
        self.there_are_timers() && self.alarm.has_passed(due, task)
    }
}

/// When the keeper looks for groups.
#[derive(Default)]
pub(super) struct Looks {
    limit: TimeLimit,
    due: Option<Instant>,
    begun: bool,
}

impl Looks {
    /// An operator has parked, or ended, since the last look, and a while has passed. Until then the waker is kept.
    pub(super) fn is_due(&mut self, rest: &Rest, task: &mut Context<'_>) -> bool {
        if !std::mem::replace(&mut self.begun, true) {
            rest.await_park();
        }
        if rest.has_parked() {
            let soon = after(Instant::now(), LOOK_AFTER);
            self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
        }
        if self.due.is_none_or(|due| !self.limit.has_passed(due, task)) {
            return false;
        }
        self.limit.alarm.rest();
        self.due = None;
        rest.await_park();
        true
    }

    /// The look did not settle it: another one follows after this time, also if no operator parks.
    pub(super) fn again(&mut self, time: Duration) {
        self.due = Some(after(Instant::now(), time));
    }
}
