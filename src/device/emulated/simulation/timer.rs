//! The timer of a simulation that runs on an executor without tokio timers.
//!
//! It is one thread, which lives from the first time that a run needs it to the end of the run.

use std::{
    io,
    sync::{Arc, Weak},
    thread,
    time::Instant,
};

use super::{SimulationCore, lock};
use crate::{
    device::thread::DeviceThread,
    sync::{Condvar, Mutex},
};

/// A timer thread, which ends when this is dropped.
pub(super) struct SimulationTimer(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    change: Condvar,
}

struct State {
    at: Option<Instant>,
    over: bool,
}

impl SimulationTimer {
    pub(super) fn new(core: Weak<SimulationCore>) -> io::Result<Self> {
        let state = Mutex::new(State { at: None, over: false });
        let shared = Arc::new(Shared { state, change: Condvar::new() });
        let timer = Self(shared.clone());
        thread::Builder::new().name("wakeline-sim".into()).spawn(move || shared.run(&core))?;
        Ok(timer)
    }

    /// Sets or clears the time at which the loop is woken, in place of the time that was set before.
    pub(super) fn set(&self, at: Option<Instant>) {
        let mut state = lock(&self.0.state);
        if state.at != at {
            state.at = at;
            drop(state);
            self.0.change.notify_one();
        }
    }
}

impl Drop for SimulationTimer {
    fn drop(&mut self) {
        lock(&self.0.state).over = true;
        self.0.change.notify_one();
    }
}

impl Shared {
    fn run(&self, core: &Weak<SimulationCore>) {
        // The loop's waker might poll the simulation on this thread.
        let _device = DeviceThread::enter();
        let mut state = lock(&self.state);
        while !state.over {
            let Some(at) = state.at else {
                state = self.change.wait(state);
                continue;
            };
            let nap = at.saturating_duration_since(Instant::now());
            if !nap.is_zero() {
                state = self.change.wait_timeout(state, nap);
                continue;
            }
            state.at = None;
            drop(state);
            let Some(core) = core.upgrade() else { return };
            core.notify();
            drop(core);
            state = lock(&self.state);
        }
    }
}
