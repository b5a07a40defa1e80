//! Detects operators that keep their worker thread busy. [`SpinDetector`] finds one that runs again and again without
//! effect, and [`BusyClock`] one that blocks its thread.
//!
//! # Spinning
//!
//! Conditions are level-triggered: a message that a run leaves in its hub allows the next run at once, and so does a
//! port that the operator does not wait for. An operator that takes one message in several runs relies on that; one
//! that neither takes nor sends spins. After a thousand such runs in a row a warning is logged. If a message remains at
//! an input that the operator waits for, only taking it can end the spinning: about a hundred times as many runs are an
//! error.
//!
//! An operator whose condition is ready but refuses each claim spins as well, without running: that number of refused
//! claims in a row is an error.
//!
//! ```text
//!   runs or claims in a row     1,024           131,072
//!   nothing moves               warning
//!   nor is a message taken      warning         error
//!   each claim is refused                       error
//! ```
//!
//! The check is made where the operator yields anyway, once in [`MAX_STREAK`] turns. Runs that take a millisecond or
//! more, or that wait in the middle, have an effect other than at their ports: they do not count as spinning.
//!
//! # Blocking
//!
//! A run that computes for a long time, reads a file or calls a blocking library occupies its thread, and the other
//! tasks of the thread wait. The time for which an operator is busy without a pause is measured anyway, for the report.
//! A busy stretch that began and ended in one poll of the task blocked the thread. The third long stretch is logged,
//! with the operator's name: the first might have compiled a kernel or filled a cache.
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

/// An upper bound for a run that does nothing.
const QUICK: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub(super) struct SpinDetector {
    /// Runs, and messages taken and sent, at the last check.
    runs: u64,
    moved: u64,
    /// `checks`: checks in a row that found no message moved. `left`: the latest of these in a row that also found a
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
                "{MAX_RUNS} runs in a row have taken no message here and sent none: take at least one in each run, or \
                 limit when the operator runs with `.when(..)`"
            );
            return Some(Error::new(ErrorKind::Usage, text).at(format!("input `{port}`")));
        }
        if self.checks == WARN_AFTER {
            warn(operator, allows.or(left), inputs && over);
        }
        None
    }

    /// Counts a refused claim of the condition `what`, after `runs` runs. `waited`: the operator has waited since the
    /// last one, so that this claim has a new cause. Returns an error after too many in a row.
    #[cold]
    pub(super) fn refused(&mut self, runs: u64, waited: bool, what: Option<Cow<'_, str>>) -> Option<Error> {
        if std::mem::replace(&mut self.refused_after, runs) != runs || waited {
            self.refused = 0;
        }
        self.refused += 1;
        if self.refused < MAX_RUNS {
            return None;
        }
        let text = match what {
            Some(what) => format!(
                "its condition ({what}) was ready and refused the claim {MAX_RUNS} times in a row: `claim` must \
                 succeed when `poll_status` has returned `Ready`, and `poll_status` must return a wait when `claim` \
                 would fail"
            ),
            None => {
                let text = format!("its ports were ready and refused the claim {MAX_RUNS} times in a row");
                return Some(Error::internal(text));
            }
        };
        Some(Error::new(ErrorKind::Usage, text))
    }
}

fn warn(operator: &str, left: Option<&str>, over: bool) {
    let times = WARN_AFTER * MAX_STREAK;
    logged(|| match left {
        Some(port) => tracing::warn!(
            operator,
            port,
            "an operator has run {times} times in a row without taking the message at this port: take it, or limit \
             when the operator runs with `.when(..)`"
        ),
        None if over => tracing::warn!(
            operator,
            "an operator has run {times} times in a row since all of its inputs ended, because it waits for none of \
             them: call `cx.finish()` once they have ended"
        ),
        None => tracing::warn!(
            operator,
            "an operator has run {times} times in a row without taking or sending a message, because its conditions \
             are always ready: limit when it runs with `.when(..)`"
        ),
    });
}

/// In ticks: shorter than [`BLOCKS`], whatever the frequency of the machine's clock.
const LONG: u64 = 20_000_000;

/// A poll of this length delays other tasks. Tokio recommends at most a thousandth of it.
const BLOCKS: Duration = Duration::from_millis(100);

/// The number of such polls before a warning is logged.
const TIMES: u32 = 3;

/// Measures how long an operator is busy. Two readings of the clock a hop, some 20 of its 200 ns; tried: to measure a random
/// one of eight short stretches. Where a few long ones are among many short ones, that found a quarter of their time.
#[derive(Debug)]
pub(super) struct BusyClock {
    /// The operator has a thread of its own.
    may_block: bool,
    clock: TickClock,
    /// Long stretches that blocked the thread.
    times: u32,
    /// The length of all stretches that have ended, in ticks.
    total: u64,
    /// The start of the current stretch.
    since: Option<Ticks>,
}

impl BusyClock {
    pub(super) fn new(may_block: bool) -> Self {
        Self { may_block, clock: TickClock::start(), times: 0, total: 0, since: None }
    }

    /// Starts the clock. True if it was not running.
    #[inline]
    pub(super) fn start(&mut self) -> bool {
        let starts = self.since.is_none();
        if starts {
            self.since = Some(Ticks::now());
        }
        starts
    }

    /// Ends the stretch, if there is one, at the returned time. Also returns its length in ticks if it was long: see
    /// [`blocked`](Self::blocked).
    #[inline]
    pub(super) fn stop(&mut self) -> Option<(Ticks, Option<u64>)> {
        let since = self.since.take()?;
        let now = Ticks::now();
        let busy = now.since(since);
        self.total += busy;
        Some((now, (busy > LONG).then_some(busy)))
    }

    /// The length of all stretches that have ended, in ticks.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Adds the time for which a worker of the operator was busy, in ticks.
    pub(super) fn add(&mut self, busy: u64) {
        self.total += busy;
    }

    /// Called when a long stretch began and ended in one poll of the operator's task: the third is logged.
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
                    "an operator has blocked its worker thread for the third time, which delays the other tasks there: \
                     give it a thread of its own with `.on_own_thread()`, or make the blocking call in \
                     `tokio::task::spawn_blocking`"
                );
            });
        }
    }
}
