//! Model check of `device/emulated/simulation/wakeup.rs`: every interleaving of a simulation's loop and of threads that change
//! what it has to do. The file is included as it stands, with loom's primitives.

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

/// A simulation that has tasks to poll and streams to run.
struct Simulation {
    wakeup: Wakeup,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Tasks that are ready.
    tasks: usize,
    /// Entries of streams that may run.
    runnable: usize,
    /// Entries that come after those, one each.
    parked: usize,
    done: usize,
}

impl Simulation {
    fn new(runnable: usize, parked: usize) -> Arc<Self> {
        let work = Mutex::new(Work { runnable, parked, ..Work::default() });
        Arc::new(Self { wakeup: Wakeup::new(), work })
    }

    /// As `Core::make_ready`.
    fn make_ready(&self) {
        self.work.lock().unwrap().tasks += 1;
        self.wakeup.notify();
    }

    /// As `Engine::step`: false if nothing may run.
    fn step_streams(&self) -> bool {
        let mut work = self.work.lock().unwrap();
        if work.runnable == 0 {
            return false;
        }
        work.runnable -= 1;
        drop(work);
        // It is carried out here.
        let mut work = self.work.lock().unwrap();
        work.done += 1;
        if work.parked > 0 {
            work.parked -= 1;
            work.runnable += 1;
        }
        drop(work);
        // A stream may run, or a task has waited for this one.
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

    /// As `Core::poll`, until so much is done.
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

/// Were it lost, the loop would sleep for ever, which loom reports as a deadlock.
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

/// A thread makes a task ready and then runs one entry of a stream, as a call that waits does. The entry that this makes
/// runnable is the loop's.
#[test]
fn a_thread_that_carries_out_streams_hides_nothing_from_the_loop() {
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
