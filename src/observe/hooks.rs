//! [`WarningQueue`]: hands warnings to the log and to the user's hooks, on a thread of its own.
//!
//! ```text
//!   wakeline-observer ── offer ──> queue of 256 ──> wakeline-warnings: log, then each hook
//!                          └── full: counted as lost
//! ```
//!
//! A subscriber and a hook are user code: they may panic, block, take a snapshot, end the flow or drop the observer. So no
//! lock is held while they run, and the thread that samples never waits for them. Each [`Observe`](super::Observe) has
//! a queue; its thread ends when the queue is empty.

use std::{collections::VecDeque, fmt, sync::Arc, thread};

use super::warnings::{Warning, WarningKind};
use crate::sync::{DiscardOnDrop, Mutex, contained, lock, logged};

/// The number of warnings that may wait for the hooks.
const MOST: usize = 256;

type HookFn = Box<dyn Fn(&Warning) + Send + Sync>;

/// A function of the user's.
#[derive(Clone)]
pub(super) struct Hook(Arc<DiscardOnDrop<HookFn>>);

impl Hook {
    pub(super) fn new(call: impl Fn(&Warning) + Send + Sync + 'static) -> Self {
        Self(Arc::new(DiscardOnDrop::new(Box::new(call))))
    }

    fn call(&self, warning: &Warning) {
        contained("a hook for warnings panicked", || {
            if let Some(call) = self.0.get() {
                call(warning);
            }
        });
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// A warning, and who is to receive it.
struct Notice {
    warning: Warning,
    logs: bool,
    hooks: Vec<Hook>,
}

#[derive(Default)]
pub(super) struct WarningQueue(Mutex<Notices>);

#[derive(Default)]
struct Notices {
    notices: VecDeque<Notice>,
    /// Those refused since the log last said so.
    refused: u64,
    has_thread: bool,
}

impl WarningQueue {
    /// Has the warning logged, if `logs`, and the hooks called. Returns false if the queue is full. Never blocks.
    pub(super) fn offer(self: &Arc<Self>, warning: Warning, logs: bool, hooks: &[Hook]) -> bool {
        // A stall is logged where it is detected.
        let logs = logs && warning.kind != WarningKind::Stalled;
        if !logs && hooks.is_empty() {
            return true;
        }
        let mut waiting = lock(&self.0);
        if waiting.notices.len() == MOST {
            waiting.refused += 1;
            return false;
        }
        waiting.notices.push_back(Notice { warning, logs, hooks: hooks.to_vec() });
        if std::mem::replace(&mut waiting.has_thread, true) {
            return true;
        }
        drop(waiting);
        let queue = self.clone();
        let Err(error) = thread::Builder::new().name("wakeline-warnings".into()).spawn(move || queue.run()) else {
            return true;
        };
        let mut waiting = lock(&self.0);
        let lost = std::mem::take(&mut *waiting);
        // Those of other threads. The next thread that begins says how many.
        waiting.refused = lost.refused + lost.notices.len().saturating_sub(1) as u64;
        drop(waiting);
        drop(lost);
        logged(|| tracing::error!(%error, "cannot spawn the thread that calls the hooks for warnings"));
        false
    }

    fn run(&self) {
        loop {
            let mut waiting = lock(&self.0);
            let Some(Notice { warning, logs, hooks }) = waiting.notices.pop_front() else {
                waiting.has_thread = false;
                return;
            };
            let refused = if waiting.notices.is_empty() { std::mem::take(&mut waiting.refused) } else { 0 };
            drop(waiting);
            if refused > 0 {
                logged(|| {
                    tracing::warn!(
                        target: "wakeline::observe",
                        "{refused} warnings, which came too quickly or had no thread, were neither logged nor given to the hooks: \
                         see `Snapshot::warnings`"
                    );
                });
            }
            if logs {
                log(&warning);
            }
            hooks.iter().for_each(|hook| hook.call(&warning));
        }
    }
}

fn log(warning: &Warning) {
    logged(|| {
        tracing::warn!(
            target: "wakeline::observe",
            flow = &*warning.flow,
            kind = warning.kind.word(),
            operator = warning.operators.first().map(|name| &**name),
            since = ?warning.since,
            "{}", warning.sentence
        );
    });
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::{Receiver, channel},
        time::Duration,
    };

    use super::*;

    fn warning(number: u64) -> Warning {
        Warning {
            number,
            flow: "flow".into(),
            kind: WarningKind::Waiting,
            operators: Vec::new(),
            began: Duration::ZERO,
            since: Duration::ZERO,
            sentence: String::new(),
        }
    }

    /// A hook that reports its call, and returns or panics as the test says.
    fn blocked() -> (Hook, Receiver<u64>, std::sync::mpsc::Sender<bool>) {
        let (called, calls) = channel();
        let (proceed, wait) = channel();
        let wait = std::sync::Mutex::new(wait);
        let hook = Hook::new(move |warning| {
            let _ = called.send(warning.number);
            assert!(wait.lock().unwrap().recv().unwrap_or(true), "on purpose");
        });
        (hook, calls, proceed)
    }

    #[test]
    fn a_full_queue_refuses_and_goes_on_after_a_panic() {
        let queue = Arc::new(WarningQueue::default());
        let (hook, calls, proceed) = blocked();
        let hooks = [hook];
        assert!(queue.offer(warning(0), false, &hooks));
        assert_eq!(calls.recv(), Ok(0));
        let last = MOST as u64;
        assert!((1..=last).all(|number| queue.offer(warning(number), false, &hooks)));
        assert!(!queue.offer(warning(last + 1), false, &hooks), "there is no room for it");
        proceed.send(false).unwrap();
        assert_eq!(calls.recv(), Ok(1));
        drop(proceed);
        assert!((2..=last).all(|number| calls.recv() == Ok(number)));
        // The thread may have ended.
        assert!(queue.offer(warning(9), false, &hooks));
        assert_eq!(calls.recv(), Ok(9));
    }
}
