//! Detects an operator that keeps its worker busy: [`SpinDetector`], one that runs again and again without effect, and
//! [`BusyClock`], one that blocks its thread.
//!
//! # Without effect
//!
//! Conditions are level-triggered: a message that a run leaves in its hub allows the next run at once, and so does a
//! port that the operator does not wait for. An operator that takes one message in several runs relies on that; one
//! that neither takes nor sends spins. After a thousand runs in a row a warning is logged. If a message remains at an
//! input that the operator waits for, only taking it can end this: after about a hundred times as many runs that is an
//! error.
//!
//! An operator whose condition is ready but refuses each claim spins as well, without a run: the same number of refused
//! claims in a row is an error.
//!
//! ```text
//!   runs or claims in a row     1,024           131,072
//!   nothing moves               warning
//!   nor is a message taken      warning         error
//!   each claim is refused                       error
//! ```
//!
//! The check is made where the operator yields anyway, once in [`MAX_STREAK`] turns. Runs that take longer, or that
//! wait in the middle, do work other than at their ports: they do not count as spinning.
//!
//! # For long
//!
//! A run that computes for long, reads a file or calls a blocking library occupies its thread: other tasks of that
//! thread wait meanwhile. The time for which an operator is busy without a pause is measured anyway, for the report. A
//! busy stretch that began and ended in one poll of the task blocked the thread. The third long one is logged, with the
//! operator's name: the first may have compiled a kernel or filled a cache.
//!
//! An operator with a [thread of its own](crate::flow::Added::on_own_thread) may block.

use std::{borrow::Cow, task::Context, time::Duration};

use tokio::time::Instant;

use super::ports::AllPorts;
use crate::{
    clock,
    device::ticks::{TickClock, Ticks},
    error::{Error, ErrorKind},
    sync::logged,
};

/// The number of runs in a row, equal to the number of operations in a row that tokio allows a task.
pub(super) const MAX_STREAK: u32 = 128;

/// Checks in a row that find no message moved, before a warning: a thousand runs.
const WARN_AFTER: u32 = 1000_u32.div_ceil(MAX_STREAK);

/// Runs, or refused claims, in a row before an error.
const MAX_RUNS: u32 = WARN_AFTER * MAX_STREAK * 128;

/// A run that does nothing takes less than this.
const QUICK: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(super) struct SpinDetector {
    /// Runs, and messages taken and sent, at the last check.
    runs: u64,
    moved: u64,
    /// `checks`: checks in a row that found no message moved. `left`: of these, the last in a row that also found a
    /// message left and no run that had waited.
    checks: u32,
    left: u32,
    checked: Option<Instant>,
    /// Claims refused in a row: the operator has neither run nor waited since the first.
    refused: u32,
    /// The number of runs at the last refused claim.
    refused_after: u64,
}

impl SpinDetector {
    /// Called once in [`MAX_STREAK`] turns. `in_one_poll`: no run has waited in its middle since the operator last
    /// waited.
    #[cold]
    pub(super) fn check(
        &mut self,
        operator: &str,
        runs: u64,
        in_one_poll: bool,
        ports: &mut dyn AllPorts,
        task: &mut Context<'_>,
    ) -> Option<Error> {
        let (mut moved, mut left, mut allows) = (0, None, None);
        let (mut inputs, mut over) = (false, true);
        ports.visit_all(&mut |name, port| {
            moved += port.stats().traffic.messages;
            if !port.is_output() {
                inputs = true;
                over &= port.has_ended();
                if left.is_none() && port.poll_count(1, task).ready > 0 {
                    left = Some(name);
                }
                if allows.is_none() && port.allows_runs(task) {
                    allows = Some(name);
                }
            }
        });
        let ran = runs - std::mem::replace(&mut self.runs, runs);
        let stands_still = std::mem::replace(&mut self.moved, moved) == moved;
        // An operator that waits in between has at most one run for each turn in which it waits.
        let never_waits = ran > u64::from(MAX_STREAK) * 3 / 4;
        // Tokio's clock: a run that waits on a timer takes time on it even where the clock is paused.
        let now = clock::now();
        let quick = self.checked.replace(now).is_some_and(|before| now - before < MAX_STREAK * QUICK);
        if !stands_still || !never_waits || !quick {
            (self.checks, self.left) = (0, 0);
            return None;
        }
        self.checks = self.checks.saturating_add(1);
        self.left = if in_one_poll && allows.is_some() { self.left + 1 } else { 0 };
        if self.left == MAX_RUNS / MAX_STREAK
            && let Some(port) = allows
        {
            let text = format!(
                "{MAX_RUNS} runs in a row have left the messages there, and sent none: take one in each run, or say with \
                 `.when(..)` when it is to run"
            );
            return Some(Error::new(ErrorKind::Usage, text).at(format!("input `{port}`")));
        }
        if self.checks == WARN_AFTER {
            warn(operator, allows.or(left), inputs && over);
        }
        None
    }

    /// The claim of `what` was refused, after `runs` runs. Returns an error once only refusals happen.
    #[cold]
    pub(super) fn refused(&mut self, runs: u64, what: Option<Cow<'_, str>>) -> Option<Error> {
        if std::mem::replace(&mut self.refused_after, runs) != runs {
            self.refused = 0;
        }
        self.refused += 1;
        if self.refused < MAX_RUNS {
            return None;
        }
        let text = match what {
            Some(what) => format!(
                "its condition ({what}) is ready, and has refused {MAX_RUNS} claims in a row: `claim` must succeed \
                 for what `poll_status` reports as ready, and `poll_status` must wait for what is not available any more"
            ),
            None => {
                let text = format!("its ports are ready, and have refused {MAX_RUNS} claims in a row");
                return Some(Error::internal(text));
            }
        };
        Some(Error::new(ErrorKind::Usage, text))
    }

    /// The operator waits: the next turn has a new cause.
    #[inline]
    pub(super) fn waits(&mut self) {
        self.refused = 0;
    }
}

fn warn(operator: &str, left: Option<&str>, over: bool) {
    let times = WARN_AFTER * MAX_STREAK;
    logged(|| match left {
        Some(port) => tracing::warn!(
            operator,
            port,
            "an operator has run {times} times in a row and taken nothing new, though there is a message: take it, or \
             say with `.when(..)` when it is to run"
        ),
        None if over => tracing::warn!(
            operator,
            "an operator has run {times} times in a row since all of its inputs have ended: it waits for none of \
             them, so call `cx.finish()` once they have ended"
        ),
        None => tracing::warn!(
            operator,
            "an operator has run {times} times in a row and had nothing to take and nothing to send: all that it waits \
             for is always there, so say with `.when(..)` when it is to run"
        ),
    });
}

/// In ticks: shorter than [`BLOCKS`], whatever the frequency of the machine's clock.
const LONG: u64 = 20_000_000;

/// A poll of this length delays other tasks. Tokio recommends a thousandth of it.
const BLOCKS: Duration = Duration::from_millis(100);

/// The number of such stretches before a warning is logged.
const TIMES: u32 = 3;

/// Measures how long an operator is busy.
#[derive(Debug)]
pub(super) struct BusyClock {
    /// The operator has a thread of its own.
    may_block: bool,
    clock: TickClock,
    /// Long stretches that blocked the thread.
    times: u32,
    /// In ticks, all stretches that have ended.
    total: u64,
    /// The start of the current stretch.
    since: Option<Ticks>,
}

impl BusyClock {
    pub(super) fn new(may_block: bool) -> Self {
        Self { may_block, clock: TickClock::start(), times: 0, total: 0, since: None }
    }

    /// True if the clock did not run.
    #[inline]
    pub(super) fn start(&mut self) -> bool {
        let starts = self.since.is_none();
        if starts {
            self.since = Some(Ticks::now());
        }
        starts
    }

    /// Ends the stretch, if there is one. Returns its length in ticks if it was long: see [`blocked`](Self::blocked).
    #[inline]
    pub(super) fn stop(&mut self) -> Option<u64> {
        let busy = Ticks::now().since(self.since.take()?);
        self.total += busy;
        (busy > LONG).then_some(busy)
    }

    /// In ticks.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// A worker of the operator was busy for this time, in ticks.
    pub(super) fn add(&mut self, busy: u64) {
        self.total += busy;
    }

    /// A long stretch began and ended in one poll of the operator's task.
    pub(super) fn blocked(&mut self, operator: &str, ticks: u64) {
        let took = self.clock.duration(ticks);
        if self.may_block || took < BLOCKS {
            return;
        }
        self.times = self.times.saturating_add(1);
        if self.times == TIMES {
            logged(|| {
                tracing::warn!(
                    operator,
                    ?took,
                    "an operator blocks its worker, now for the third time: nothing else runs there meanwhile; give it a \
                     thread of its own with `.on_own_thread()`, or call what blocks in `tokio::task::spawn_blocking`"
                );
            });
        }
    }
}
