//! Model check of `stream/watch.rs`, with `stream/completion.rs`: waiters whose callbacks never come, and the monitor's
//! tick. The device is modelled by the last completed ticket.

#[allow(dead_code)]
#[path = "../../src/stream/completion.rs"]
mod completion;

#[allow(dead_code)]
#[path = "../../src/stream/watch.rs"]
mod watch;

use std::{future::poll_fn, sync::Arc, task::Poll};

use self::completion::{Completion, Progress, WaiterSlot};
use self::watch::{FaultWatch, WatchFlag, WatchList};
use crate::sync::{model, model_short};
use futures::task::noop_waker_ref;
use loom::{
    future::block_on,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

struct Stream {
    completion: Completion,
    watched: WatchFlag,
    done: AtomicU64,
}

struct CompletionMonitor {
    stream: Stream,
    visits: Mutex<WatchList<()>>,
    /// The tickers: their threads, and how many run at once.
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
    ticks: Mutex<usize>,
}

impl CompletionMonitor {
    fn new(done: u64) -> Arc<Self> {
        let stream = Stream { completion: Completion::new(), watched: WatchFlag::new(), done: AtomicU64::new(done) };
        let (threads, ticks) = (Mutex::new(Vec::new()), Mutex::new(0));
        Arc::new(Self { stream, visits: Mutex::new(WatchList::default()), threads, ticks })
    }

    /// As in `CompletionMonitor::watch`.
    fn watch(self: &Arc<Self>) {
        if self.stream.watched.is_on() || !self.stream.watched.start() {
            return;
        }
        let mut visits = self.visits.lock().unwrap();
        visits.add(());
        if !visits.begin() {
            return;
        }
        drop(visits);
        let monitor = self.clone();
        let ticks = thread::spawn(move || {
            let mut now = monitor.ticks.lock().unwrap();
            *now += 1;
            assert_eq!(*now, 1, "two tickers run");
            drop(now);
            // The count is decremented before the ticker ends, as another may start at once.
            while monitor.tick() {
                thread::yield_now();
            }
        });
        self.threads.lock().unwrap().push(ticks);
    }

    /// As in `Shared::tick`.
    fn tick(&self) -> bool {
        let streams = self.visits.lock().unwrap().take();
        assert!(streams.len() <= 1, "the stream is listed twice");
        let mut kept = Vec::new();
        for () in streams {
            let done = self.stream.done.load(Ordering::Acquire);
            self.stream.completion.advance(done);
            let is_needed = || self.stream.completion.has_waiters();
            if is_needed() || self.stream.watched.stop(is_needed) {
                kept.push(());
            }
        }
        let mut visits = self.visits.lock().unwrap();
        let goes_on = visits.finish(kept, false);
        if !goes_on {
            *self.ticks.lock().unwrap() -= 1;
        }
        goes_on
    }

    /// As in `Completed`, without a source of its own: only the monitor notices the completion.
    fn poll(self: &Arc<Self>, place: &mut WaiterSlot, ticket: u64, waker: &std::task::Waker) -> Poll<()> {
        match self.stream.completion.poll(place, ticket, waker) {
            Progress::Wait { .. } => {
                self.watch();
                Poll::Pending
            }
            Progress::Passed => Poll::Ready(()),
            Progress::Failed => unreachable!("no fault"),
        }
    }

    fn wait(self: &Arc<Self>, ticket: u64) {
        let mut place = WaiterSlot::default();
        block_on(poll_fn(|cx| self.poll(&mut place, ticket, cx.waker())));
    }

    /// All tickers end, and then no stream is watched.
    fn end(&self) {
        loop {
            let ticks = self.threads.lock().unwrap().pop();
            let Some(ticks) = ticks else { break };
            ticks.join().unwrap();
        }
        assert!(!self.stream.watched.is_on(), "watched, but no ticker runs");
        assert!(!self.stream.completion.has_waiters());
    }
}

#[test]
fn a_waiter_that_registers_while_the_ticker_ends_is_watched() {
    model(2, || {
        let monitor = CompletionMonitor::new(1);
        let mut place = WaiterSlot::default();
        assert!(monitor.poll(&mut place, 1, noop_waker_ref()).is_pending());
        // The tick runs, and finds the waiter or does not.
        monitor.stream.completion.leave(&mut place).wake();
        monitor.stream.done.store(2, Ordering::Release);
        monitor.wait(2);
        monitor.end();
    });
}

/// Two waiters, each in its own thread: one starts the ticker, and the other is seen by it.
#[test]
fn two_waiters_at_once_start_one_ticker() {
    model_short(1, 2, || {
        let monitor = CompletionMonitor::new(2);
        let other = {
            let monitor = monitor.clone();
            thread::spawn(move || monitor.wait(1))
        };
        monitor.wait(2);
        other.join().unwrap();
        monitor.end();
    });
}

/// The flag alone: a waiter registers while the flag is cleared. It is set afterwards, and exactly one of the two has
/// set it.
#[test]
fn a_waiter_that_registers_while_the_flag_is_cleared_is_listed_once() {
    model(2, || {
        let (watched, waiters) = (Arc::new(WatchFlag::new()), Arc::new(Mutex::new(0)));
        assert!(watched.start());
        let waits = {
            let (watched, waiters) = (watched.clone(), waiters.clone());
            thread::spawn(move || {
                *waiters.lock().unwrap() += 1;
                !watched.is_on() && watched.start()
            })
        };
        let goes_on = watched.stop(|| *waiters.lock().unwrap() > 0);
        let begun = waits.join().unwrap();
        assert!(goes_on != begun, "the tick: {goes_on}, the waiter: {begun}");
        assert!(watched.is_on());
    });
}

/// A device that is queried on behalf of tasks that only need to learn of its loss.
struct Asked {
    vigil: FaultWatch,
    waiters: Mutex<usize>,
    work: Mutex<usize>,
    /// Running tickers.
    ticks: Mutex<usize>,
}

impl Asked {
    fn new() -> Arc<Self> {
        let [waiters, work, ticks] = [(); 3].map(|()| Mutex::new(0));
        Arc::new(Self { vigil: FaultWatch::new(), waiters, work, ticks })
    }

    fn waits(&self) -> bool {
        *self.waiters.lock().unwrap() > 0
    }

    fn works(&self) -> bool {
        *self.work.lock().unwrap() > 0
    }

    /// As in `Streams::waiter_added`, once a waiter has registered.
    fn wait(&self) {
        *self.waiters.lock().unwrap() += 1;
        if self.vigil.waiter_added() {
            *self.ticks.lock().unwrap() += 1;
        }
    }

    /// As in `Stream::put`.
    fn enqueue(&self) {
        let mut work = self.work.lock().unwrap();
        *work += 1;
        let is_armed = self.vigil.is_armed();
        drop(work);
        if is_armed && self.vigil.work_added() {
            *self.ticks.lock().unwrap() += 1;
        }
    }

    /// As in `Streams::tick`, if a ticker runs.
    fn tick(&self) {
        if *self.ticks.lock().unwrap() > 0 && !self.vigil.tick(|| self.waits(), || self.works()) {
            *self.ticks.lock().unwrap() -= 1;
        }
    }
}

/// A waiter and work arrive while a ticker ends, because one of them was missing: one ticker runs afterwards.
#[test]
fn the_device_is_queried_while_tasks_wait_and_work_is_in_flight() {
    for (waited, worked) in [(false, false), (true, false), (false, true)] {
        model(2, move || {
            let asked = Asked::new();
            // A ticker that is about to end.
            asked.wait();
            *asked.waiters.lock().unwrap() = usize::from(waited);
            *asked.work.lock().unwrap() = usize::from(worked);
            let waits = {
                let asked = asked.clone();
                thread::spawn(move || asked.wait())
            };
            let works = {
                let asked = asked.clone();
                thread::spawn(move || asked.enqueue())
            };
            asked.tick();
            waits.join().unwrap();
            works.join().unwrap();
            assert_eq!(*asked.ticks.lock().unwrap(), 1);
            *asked.work.lock().unwrap() = 0;
            asked.tick();
            assert!(*asked.ticks.lock().unwrap() == 0 && asked.vigil.is_armed());
        });
    }
}
