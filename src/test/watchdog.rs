//! [`Watchdog`]: a limit on the real time that a future may be pending, also where tokio's clock is paused.
//!
//! One thread for all tests of the process wakes the tasks whose time is over.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, OnceLock, Weak, mpsc},
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use crate::sync::{Mutex, WakerCell, lock};

/// The limits of one task, one at a time.
pub(super) struct Watchdog {
    limit: Duration,
    timer: OnceLock<Arc<WatchdogTimer>>,
}

#[derive(Default)]
struct WatchdogTimer {
    state: Mutex<TimerState>,
    waker: WakerCell,
}

#[derive(Default)]
struct TimerState {
    /// When the pending future is to be polled again.
    due: Option<Instant>,
    /// The thread will look at it again.
    listed: bool,
}

impl Watchdog {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, timer: OnceLock::new() }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// The future's output, or `None` if it is pending for too long. The future is then dropped.
    pub(super) async fn watch<F: Future>(&self, future: F) -> Option<F::Output> {
        /// Also when the future is dropped.
        struct Disarm<'a>(&'a Watchdog);

        impl Drop for Disarm<'_> {
            fn drop(&mut self) {
                if let Some(timer) = self.0.timer.get() {
                    lock(&timer.state).due = None;
                }
            }
        }

        let _disarm = Disarm(self);
        let mut future = pin!(future);
        let mut due = None;
        poll_fn(|task| {
            if let Poll::Ready(output) = future.as_mut().poll(task) {
                return Poll::Ready(Some(output));
            }
            let now = Instant::now();
            // A limit beyond the end of time is none.
            let Some(due) = *due.get_or_insert_with(|| now.checked_add(self.limit)) else { return Poll::Pending };
            if now >= due {
                return Poll::Ready(None);
            }
            let timer = self.timer.get_or_init(Arc::default);
            timer.waker.register(task.waker());
            if timer.arm(due) {
                WatchdogTimer::enlist(timer);
            }
            Poll::Pending
        })
        .await
    }
}

impl WatchdogTimer {
    /// Returns true if the thread has to be given the timer.
    fn arm(&self, due: Instant) -> bool {
        let mut state = lock(&self.state);
        state.due = Some(due);
        !std::mem::replace(&mut state.listed, true)
    }

    fn enlist(timer: &Arc<Self>) {
        static TIMERS: OnceLock<mpsc::Sender<Weak<WatchdogTimer>>> = OnceLock::new();
        let timers = TIMERS.get_or_init(|| {
            let (sender, receiver) = mpsc::channel();
            let started = thread::Builder::new().name("wakeline-test".into()).spawn(move || run(&receiver));
            if let Err(error) = started {
                tracing::warn!(%error, "could not start the thread that limits how long a test's harness waits");
            }
            sender
        });
        // Without the thread there is no limit.
        let _ = timers.send(Arc::downgrade(timer));
    }

    /// When to look at it again: never, unless it is armed again. Its limit is constant, so a wait that begins in the
    /// meantime is not over before that.
    fn wake_if_due(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.state);
        match state.due {
            Some(due) if due > now => return Some(due),
            due => {
                state.listed = false;
                drop(state);
                if due.is_some() {
                    self.waker.wake();
                }
            }
        }
        None
    }
}

fn run(timers: &mpsc::Receiver<Weak<WatchdogTimer>>) {
    let mut all: Vec<(Instant, Weak<WatchdogTimer>)> = Vec::new();
    loop {
        let next = all.iter().map(|(at, _)| *at).min();
        let new = match next {
            None => timers.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            Some(at) => timers.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        let now = Instant::now();
        match new {
            Ok(timer) => all.push((now, timer)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        all.retain_mut(|(at, timer)| {
            if *at > now {
                return true;
            }
            let next = timer.upgrade().and_then(|timer| timer.wake_if_due(now));
            next.inspect(|next| *at = *next).is_some()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the thread would use a core for a harness with a tiny limit.
    #[test]
    fn the_thread_forgets_a_timer_that_is_not_armed() {
        let (timer, now) = (WatchdogTimer::default(), Instant::now());
        assert!(timer.arm(now + Duration::from_secs(1)));
        assert!(!timer.arm(now + Duration::from_secs(2)), "the thread has it");
        assert_eq!(timer.wake_if_due(now), Some(now + Duration::from_secs(2)));
        assert_eq!(timer.wake_if_due(now + Duration::from_secs(2)), None);
        lock(&timer.state).due = None;
        assert!(timer.arm(now));
        lock(&timer.state).due = None;
        assert_eq!(timer.wake_if_due(now), None, "it is idle");
    }

    #[tokio::test]
    async fn each_wait_has_the_limit() {
        for limit in [Duration::from_nanos(1), Duration::from_millis(10)] {
            let watchdog = Watchdog::new(limit);
            for _ in 0..3 {
                assert!(watchdog.watch(std::future::pending::<()>()).await.is_none());
            }
            assert_eq!(watchdog.watch(std::future::ready(1)).await, Some(1));
        }
    }
}
