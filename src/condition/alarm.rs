//! [`Alarm`]: one timer for the next moment that a condition waits for.
//!
//! The timer is created when first needed, and then reset: an operator that never waits for a time has none.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

use crate::sync::ProxyWaker;

#[derive(Debug, Default)]
pub(crate) struct Alarm(Option<Box<ProxiedSleep>>);

/// Tokio wakes through the proxy, so a user's waker that panics neither ends a worker of the runtime nor keeps other
/// timers from being woken.
#[derive(Debug)]
struct ProxiedSleep {
    sleep: Pin<Box<Sleep>>,
    proxy: ProxyWaker,
}

impl Alarm {
    /// True from `due` on. Before that, the waker is kept.
    ///
    /// # Panics
    /// On a runtime without timers. A flow that needs timers does not run there: its check reports what needs them.
    pub(crate) fn has_passed(&mut self, due: Instant, cx: &mut Context<'_>) -> bool {
        let now = Instant::now();
        if now >= due {
            return true;
        }
        let due = due.min(after(now, FAR));
        let make = || Box::new(ProxiedSleep { sleep: Box::pin(sleep_until(due)), proxy: ProxyWaker::new() });
        let ProxiedSleep { sleep, proxy } = &mut **self.0.get_or_insert_with(make);
        if sleep.deadline() != due {
            sleep.as_mut().reset(due);
        }
        // Outside the task's cooperative budget: a condition is polled repeatedly without making progress.
        let mut sleep = std::pin::pin!(tokio::task::coop::unconstrained(sleep.as_mut()));
        sleep.as_mut().poll(&mut proxy.stand_in(cx)) == Poll::Ready(())
    }

    /// Cancels the timer.
    pub(crate) fn stop_waiting(&mut self) {
        self.0 = None;
    }
}

/// Thirty years. Timers round up, and would overflow at the end of the clock's range.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// `span` after `at`, at most thirty years; `at` itself if the clock does not reach that far.
pub(crate) fn after(at: Instant, span: Duration) -> Instant {
    at.checked_add(span.min(FAR)).unwrap_or(at)
}
