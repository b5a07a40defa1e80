//! Model check of `device/emulated/simulation/wakeup.rs`: a simulation's loop and threads that change its work.

#[allow(dead_code)]
#[path = "../../src/device/emulated/simulation/wakeup.rs"]
mod wakeup;

use std::{future::poll_fn, task::Poll};

use self::wakeup::Wakeup;
use crate::sync::model;
use loom::{
    future::block_on,
    sync::{Arc, Mutex},
    thread,
};

/// A simulation that polls tasks and runs streams.
struct Simulation {
    wakeup: Wakeup,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Tasks that are ready.
    tasks: usize,
    /// Entries of streams that can run.
    runnable: usize,
    /// Entries behind those, one each.
    parked: usize,
    done: usize,
}

impl Simulation {
    fn new(runnable: usize, parked: usize) -> Arc<Self> {
        let work = Mutex::new(Work { runnable, parked, ..Work::default() });
        Arc::new(Self { wakeup: Wakeup::new(), work })
    }

    /// As in `Core::make_ready`.
    fn make_ready(&self) {
        self.work.lock().unwrap().tasks += 1;
        self.wakeup.notify();
    }

    /// As in `Engine::step`: returns false if no entry can run.
    fn step_streams(&self) -> bool {
        let mut work = self.work.lock().unwrap();
        if work.runnable == 0 {
            return false;
        }
        work.runnable -= 1;
        drop(work);
        // The entry runs here.
        let mut work = self.work.lock().unwrap();
        work.done += 1;
        if work.parked > 0 {
            work.parked -= 1;
            work.runnable += 1;
        }
        drop(work);
        // A stream may run now, or a task has waited for this entry.
        self.wakeup.notify();
        true
    }

    fn poll_task(&self) -> bool {
        let mut work = self.work.lock().unwrap();
        let is_ready = work.tasks > 0;
        if is_ready {
            work.tasks -= 1;
            work.done += 1;
        }
        is_ready
    }

    /// As in `Core::poll`, until so much is done.
    fn run(&self, all: usize) {
        block_on(poll_fn(|cx| {
            let polling = self.wakeup.begin(cx.waker().clone());
            loop {
                polling.observe();
                if self.step_streams() || self.poll_task() {
                    continue;
                }
                if self.work.lock().unwrap().done == all {
                    return Poll::Ready(());
                }
                if polling.may_sleep() {
                    return Poll::Pending;
                }
            }
        }));
    }
}

/// A lost wakeup would let the loop sleep for ever, which loom reports as a deadlock.
#[test]
fn a_wake_is_not_lost() {
    model(2, || {
        let simulation = Simulation::new(0, 0);
        let others = [(); 2].map(|()| {
            let simulation = simulation.clone();
            thread::spawn(move || simulation.make_ready())
        });
        simulation.run(2);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// A thread makes a task ready and then runs one entry of a stream, like a call that waits. The entry that becomes
/// runnable by this is left to the loop.
#[test]
fn a_thread_that_runs_streams_hides_no_work_from_the_loop() {
    model(2, || {
        let simulation = Simulation::new(1, 1);
        let other = {
            let simulation = simulation.clone();
            thread::spawn(move || {
                simulation.make_ready();
                simulation.step_streams();
            })
        };
        simulation.run(3);
        other.join().unwrap();
    });
}
