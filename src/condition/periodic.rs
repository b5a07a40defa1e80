//! [`Every`], `.when(every(Duration::from_millis(10)))`: one run per period, the first at once.
//!
//! ```text
//!            0         10        20        30        40        50        60 ms
//!   due      |         |         |         |         |         |         |
//!   CatchUp  x         x════════════════════════xx   x         x         x      no tick is lost
//!   Spaced   x         x════════════════════════x         x         x           10 ms from one to the next
//!   Skip     x         x════════════════════════x    x         x         x      one run for all missed ticks
//! ```
//!
//! The clock is tokio's: if it is paused, every run is exactly on time, otherwise within the timers' resolution of a
//! millisecond. With a period below that, runs come in bursts if missed ticks are made up for.

use std::{borrow::Cow, task::Context, time::Duration};

use tokio::time::Instant;

use super::{Condition, Status, alarm::after};

/// What happens to ticks that are missed during a long run or a wait for something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissedTicks {
    /// Missed ticks are made up for by one run each, in immediate succession. Holoscan's `CatchUpMissedTicks`.
    #[default]
    CatchUp,
    /// The starts of two runs are at least one period apart. Holoscan's `MinTimeBetweenTicks`.
    Spaced,
    /// One immediate run replaces all missed ticks; later runs are again at multiples of the period after the first
    /// run. Holoscan's `NoCatchUpMissedTicks`.
    Skip,
}

/// The condition that [`every`] creates.
#[derive(Debug)]
pub struct Every {
    period: Duration,
    missed: MissedTicks,
    /// `None` before the first run.
    due: Option<Instant>,
    /// The value of `due` before the current run.
    before: Option<Instant>,
}

/// Allows one run per period, the first at once. Missed ticks are made up for unless [`missed`](Every::missed) sets
/// another policy.
///
/// ```
/// use std::time::Duration;
/// use wakeline::{Flow, condition::{MissedTicks, every}, operator::source};
///
/// let mut flow = Flow::new("clock");
/// let tick = flow
///     .add("tick", source(async || Ok(Some(()))))
///     .when(every(Duration::from_millis(10)).missed(MissedTicks::Skip));
/// ```
///
/// A period of 0 is an error when the flow is run, and so is a runtime without timers (`enable_all` or `enable_time`
/// enables them).
pub fn every(period: Duration) -> Every {
    Every { period, missed: MissedTicks::default(), due: None, before: None }
}

impl Every {
    /// Sets what happens to missed ticks.
    #[must_use]
    pub fn missed(mut self, missed: MissedTicks) -> Self {
        self.missed = missed;
        self
    }
}

impl Condition for Every {
    fn start(&mut self) {
        self.due = None;
    }

    fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
        self.due.map_or(Status::Ready, Status::WaitTime)
    }

    fn claim(&mut self) -> bool {
        let now = Instant::now();
        self.before = self.due;
        let due = self.due.unwrap_or(now);
        self.due = Some(match self.missed {
            MissedTicks::CatchUp => after(due, self.period),
            MissedTicks::Spaced => after(now, self.period),
            MissedTicks::Skip => {
                let period = self.period.max(Duration::from_nanos(1));
                let into = now.duration_since(due).as_nanos() % period.as_nanos();
                // Shorter than a period, so the conversions do not truncate.
                let into = Duration::new((into / 1_000_000_000) as u64, (into % 1_000_000_000) as u32);
                after(now, period - into)
            }
        });
        true
    }

    fn give_back(&mut self) {
        self.due = self.before;
    }

    fn problem(&self) -> Option<String> {
        self.period.is_zero().then(|| "runs every 0 seconds: give it a period, or remove the condition".into())
    }

    fn needs_timers(&self) -> bool {
        true
    }

    fn describe(&self) -> Cow<'static, str> {
        format!("its next tick, one every {:?}", self.period).into()
    }
}
