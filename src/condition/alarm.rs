//! [`Alarm`]: one timer for whatever a condition waits for next.
//!
//! It is made when it is needed first, and set again rather than made again: an operator that never waits for a time has
//! none, and one that does has one.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

use crate::sync::ProxyWaker;

/// A timer that can be set to another time.
#[derive(Debug, Default)]
pub(crate) struct Alarm(Option<Box<Timer>>);

/// Tokio wakes by the proxy: a waker of the user's that panics ends no worker of the runtime, and keeps no other timer from its wake.
#[derive(Debug)]
struct Timer {
    sleep: Pin<Box<Sleep>>,
    proxy: ProxyWaker,
}

impl Alarm {
    /// True from `due` on. Before that the waker is kept.
    ///
    /// # Panics
    /// As tokio's timers do on a runtime without them. A flow is not run there: its check reports what needs timers.
    pub(crate) fn has_passed(&mut self, due: Instant, cx: &mut Context<'_>) -> bool {
        let now = Instant::now();
        if now >= due {
            return true;
        }
        let due = due.min(after(now, FAR));
        let make = || Box::new(Timer { sleep: Box::pin(sleep_until(due)), proxy: ProxyWaker::new() });
        let Timer { sleep, proxy } = &mut **self.0.get_or_insert_with(make);
        if sleep.deadline() != due {
            sleep.as_mut().reset(due);
        }
        // Not a matter of the task's budget: a condition is asked again and again without anything being done.
        let mut sleep = std::pin::pin!(tokio::task::coop::unconstrained(sleep.as_mut()));
        sleep.as_mut().poll(&mut proxy.stand_in(cx)) == Poll::Ready(())
    }

    /// Wakes nobody any more.
    pub(crate) fn rest(&mut self) {
        self.0 = None;
    }
}

/// Thirty years: far enough. Timers round up and would overflow at the clock's end.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// `span` after `at`; where no clock goes that far, in thirty years.
pub(crate) fn after(at: Instant, span: Duration) -> Instant {
    at.checked_add(span.min(FAR)).unwrap_or(at)
}
