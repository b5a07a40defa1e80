//! One thread that queries all events in a loop, and sleeps only after some idle time.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::gpu::{Event, Gpu};

type Answer = Box<dyn FnOnce() + Send>;

pub(crate) struct Scanner {
    inbox: Mutex<Inbox>,
    wake: Condvar,
}

#[derive(Default)]
struct Inbox {
    new: Vec<(Arc<Event>, Answer)>,
    asleep: bool,
}

/// How long it keeps scanning without any events.
const LINGER: Duration = Duration::from_micros(100);

impl Scanner {
    /// Runs until the process ends.
    pub(crate) fn start(gpu: Gpu) -> Arc<Self> {
        let scanner = Arc::new(Self { inbox: Mutex::default(), wake: Condvar::new() });
        let own = scanner.clone();
        thread::spawn(move || {
            gpu.enter();
            own.scan();
        });
        scanner
    }

    /// Calls `answer` when the event is done.
    pub(crate) fn add(&self, event: Arc<Event>, answer: Answer) {
        let mut inbox = self.inbox();
        inbox.new.push((event, answer));
        if std::mem::take(&mut inbox.asleep) {
            self.wake.notify_one();
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scan(&self) -> ! {
        let mut open: Vec<(Arc<Event>, Answer)> = Vec::new();
        let mut idle_since = None;
        loop {
            let mut inbox = self.inbox();
            open.append(&mut inbox.new);
            if open.is_empty() {
                let since = *idle_since.get_or_insert_with(Instant::now);
                if since.elapsed() > LINGER {
                    inbox.asleep = true;
                    while inbox.asleep {
                        inbox = self.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                    }
                    idle_since = None;
                }
                drop(inbox);
                std::hint::spin_loop();
                continue;
            }
            drop(inbox);
            idle_since = None;
            let mut at = 0;
            while at < open.len() {
                if open[at].0.is_done() {
                    let (event, answer) = open.swap_remove(at);
                    drop(event);
                    answer();
                } else {
                    at += 1;
                }
            }
        }
    }
}
