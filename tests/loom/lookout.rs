//! Model check of `stream/watch.rs`, with `stream/completion.rs`: every interleaving of waiters whose callbacks never come and
//! of the lookout's beat. The files are included as they stand, with loom's primitives; the device is "so far the stream is".

#[allow(dead_code)]
#[path = "../../src/stream/completion.rs"]
mod completion;

#[allow(dead_code)]
#[path = "../../src/stream/watch.rs"]
mod watch;

use std::{future::poll_fn, sync::Arc, task::Poll};

use self::completion::{Completion, Place, Progress};
use self::watch::{Vigil, Visits, Watched};
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
    watched: Watched,
    done: AtomicU64,
}

struct Lookout {
    stream: Stream,
    visits: Mutex<Visits<()>>,
    /// Beats that were begun, and the most that ran at once.
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
    beats: Mutex<usize>,
}

impl Lookout {
    fn new(done: u64) -> Arc<Self> {
        let stream = Stream { completion: Completion::new(), watched: Watched::new(), done: AtomicU64::new(done) };
        let (threads, beats) = (Mutex::new(Vec::new()), Mutex::new(0));
        Arc::new(Self { stream, visits: Mutex::new(Visits::default()), threads, beats })
    }

    /// As `Lookout::watch`.
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
        let lookout = self.clone();
        let beats = thread::spawn(move || {
            let mut now = lookout.beats.lock().unwrap();
            *now += 1;
            assert_eq!(*now, 1, "two keep the beat");
            drop(now);
            // The count goes down before the beat ends, as another may begin at once.
            while lookout.beat() {
                thread::yield_now();
            }
        });
        self.threads.lock().unwrap().push(beats);
    }

    /// As `Shared::beat`.
    fn beat(&self) -> bool {
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
            *self.beats.lock().unwrap() -= 1;
        }
        goes_on
    }

    /// As `Completed`, with no source of its own: the lookout alone finds out.
    fn poll(self: &Arc<Self>, place: &mut Place, ticket: u64, waker: &std::task::Waker) -> Poll<()> {
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
        let mut place = Place::default();
        block_on(poll_fn(|cx| self.poll(&mut place, ticket, cx.waker())));
    }

    /// All beats end, and with them nothing is left to watch.
    fn end(&self) {
        loop {
            let beats = self.threads.lock().unwrap().pop();
            let Some(beats) = beats else { break };
            beats.join().unwrap();
        }
        assert!(!self.stream.watched.is_on(), "watched, and no beat is kept");
        assert!(!self.stream.completion.has_waiters());
    }
}

#[test]
fn a_waiter_that_comes_as_the_beat_ends_is_looked_after() {
    model(2, || {
        let lookout = Lookout::new(1);
        let mut place = Place::default();
        assert!(lookout.poll(&mut place, 1, noop_waker_ref()).is_pending());
        // The beat runs, and finds it gone or not.
        lookout.stream.completion.leave(&mut place).wake();
        lookout.stream.done.store(2, Ordering::Release);
        lookout.wait(2);
        lookout.end();
    });
}

/// Each in its own thread: one begins the beat, and the other is seen by it.
#[test]
fn two_that_begin_to_wait_at_once_have_one_beat() {
    model_short(1, 2, || {
        let lookout = Lookout::new(2);
        let other = {
            let lookout = lookout.clone();
            thread::spawn(move || lookout.wait(1))
        };
        lookout.wait(2);
        other.join().unwrap();
        lookout.end();
    });
}

/// The flag alone: a waiter comes while it is turned off. It is on afterwards, and one of the two has turned it on.
#[test]
fn what_comes_while_the_flag_is_turned_off_is_listed_once() {
    model(2, || {
        let (watched, waiters) = (Arc::new(Watched::new()), Arc::new(Mutex::new(0)));
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
        assert!(goes_on != begun, "the beat: {goes_on}, the waiter: {begun}");
        assert!(watched.is_on());
    });
}

/// A device that is asked for tasks that only hear of its loss.
struct Asked {
    vigil: Vigil,
    waiters: Mutex<usize>,
    work: Mutex<usize>,
    /// Beats that are kept.
    beats: Mutex<usize>,
}

impl Asked {
    fn new() -> Arc<Self> {
        let [waiters, work, beats] = [(); 3].map(|()| Mutex::new(0));
        Arc::new(Self { vigil: Vigil::new(), waiters, work, beats })
    }

    fn waits(&self) -> bool {
        *self.waiters.lock().unwrap() > 0
    }

    fn works(&self) -> bool {
        *self.work.lock().unwrap() > 0
    }

    /// As `Streams::attend`, once a waiter has registered.
    fn wait(&self) {
        *self.waiters.lock().unwrap() += 1;
        if self.vigil.attend() {
            *self.beats.lock().unwrap() += 1;
        }
    }

    /// As `Stream::put`.
    fn enqueue(&self) {
        let mut work = self.work.lock().unwrap();
        *work += 1;
        let is_armed = self.vigil.is_armed();
        drop(work);
        if is_armed && self.vigil.stir() {
            *self.beats.lock().unwrap() += 1;
        }
    }

    /// As `Streams::beat`, if there is one.
    fn beat(&self) {
        if *self.beats.lock().unwrap() > 0 && !self.vigil.beat(|| self.waits(), || self.works()) {
            *self.beats.lock().unwrap() -= 1;
        }
    }
}

/// A waiter and work come as a beat ends, for lack of either: one beat is kept afterwards.
#[test]
fn while_tasks_wait_and_work_is_in_flight_the_device_is_asked() {
    for (waited, worked) in [(false, false), (true, false), (false, true)] {
        model(2, move || {
            let asked = Asked::new();
            // A beat that is about to end.
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
            asked.beat();
            waits.join().unwrap();
            works.join().unwrap();
            assert_eq!(*asked.beats.lock().unwrap(), 1);
            *asked.work.lock().unwrap() = 0;
            asked.beat();
            assert!(*asked.beats.lock().unwrap() == 0 && asked.vigil.is_armed());
        });
    }
}
