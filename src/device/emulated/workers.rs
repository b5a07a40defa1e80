//! The threads that run the work that the [machine](super::machine) makes runnable.
//!
//! All threaded devices of the process share one machine, so that a stream on one device can wait for an event of
//! another; each device has its own worker threads. A worker locks the machine to take and to finish work, but not
//! while the work runs. No worker waits for an event: it takes other work, or sleeps until there is some.
//!
//! ```text
//!   call ──► machine ──► condvar of the device ──► a worker: start ─ run ─ finish ──► machine ──► other condvars
//! ```
//!
//! A call that makes a stream runnable wakes one sleeping worker of its device, and a worker that leaves more work
//! behind wakes the next.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, LazyLock, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use super::{
    device::SkippedFunctions,
    lock,
    machine::{DeviceId, Machine, StartedEntry, StreamId},
    simulation::{LogLine, SimulationCore},
    work::{Description, Fault, Work},
};
use crate::{
    device::{backend::LossHandler, process::is_fork, thread::DeviceThread},
    error::{Error, ErrorKind, Result},
    sync::{Condvar, Level, Mutex, MutexGuard, contained, discard_all, log},
    thread_name::thread_name,
};

/// A machine, and the threads that wait for it.
pub(super) struct Engine {
    state: Mutex<EngineState>,
    /// Notified when a stream passes a point, if a call waits.
    passed: Condvar,
    /// If set, there are no threads: the simulation runs the machine.
    simulation: Option<Weak<SimulationCore>>,
    /// The functions to call when the simulation ends.
    loss_handlers: Mutex<Vec<(DeviceId, LossHandler)>>,
}

#[derive(Debug, Default)]
pub(super) struct EngineState {
    pub(super) machine: Machine<Work>,
    workers: FxHashMap<DeviceId, Workers>,
    waiting_calls: usize,
    /// The streams of a simulation in which time passes, and the number of the pause.
    pauses: BTreeMap<StreamId, u64>,
    pauses_begun: u64,
}

#[derive(Debug)]
struct Workers {
    name: Arc<str>,
    work_available: Arc<Condvar>,
    sleeping: usize,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("state", &self.state).finish_non_exhaustive()
    }
}

static THREADED: LazyLock<Arc<Engine>> = LazyLock::new(|| Arc::new(Engine::new(None)));
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The engine of all devices that have threads.
pub(super) fn threaded() -> Arc<Engine> {
    THREADED.clone()
}

fn now() -> Duration {
    STARTED.elapsed()
}

impl Engine {
    fn new(simulation: Option<Weak<SimulationCore>>) -> Self {
        Self {
            state: Mutex::at(Level::Machine, EngineState::default()),
            passed: Condvar::new(),
            simulation,
            loss_handlers: Mutex::default(),
        }
    }

    pub(super) fn simulated(simulation: Weak<SimulationCore>) -> Self {
        Self::new(Some(simulation))
    }

    /// The time on tokio's clock of a time of the machine.
    pub(super) fn instant(&self, at: Duration) -> tokio::time::Instant {
        let simulation = self.simulation.as_ref().and_then(Weak::upgrade);
        simulation.map_or_else(|| tokio::time::Instant::from_std(*STARTED), |simulation| simulation.started()) + at
    }

    /// Changes the machine, and then wakes the threads that the change concerns.
    pub(super) fn with<R>(&self, change: impl FnOnce(&mut Machine<Work>) -> R) -> R {
        let mut state = lock(&self.state);
        let result = change(&mut state.machine);
        let changed = state.notify_workers(None) && self.simulation.is_some();
        if changed && state.waiting_calls > 0 {
            // A call that waits in a simulation runs work itself.
            self.passed.notify_all();
        }
        drop(state);
        if changed {
            self.notify_simulation();
        }
        result
    }

    /// Wakes a simulation's loop after a change: the loop might be asleep on another thread.
    fn notify_simulation(&self) {
        if let Some(simulation) = self.simulation.as_ref().and_then(Weak::upgrade) {
            simulation.notify();
        }
    }

    /// See [`Backend::when_lost`](crate::device::backend::Backend::when_lost). A device with its own threads is lost
    /// only by a fault of its work, which its streams report.
    pub(super) fn when_lost(&self, device: DeviceId, handler: LossHandler) {
        if self.simulation.is_some() {
            lock(&self.loss_handlers).push((device, handler));
        }
    }

    /// Reports that all devices are lost with this error.
    pub(super) fn notify_loss(&self, error: &Error) {
        let handlers = std::mem::take(&mut *lock(&self.loss_handlers));
        handlers
            .into_iter()
            .for_each(|(_, handler)| _ = contained("a loss handler panicked", || handler(error.clone())));
    }

    /// True if a fault has ended the device and none of its work is still running.
    pub(super) fn has_ended(&self, device: DeviceId) -> bool {
        lock(&self.state).machine.has_ended(device)
    }

    /// The seed for the orders of a graph's launches, from the simulation if there is one.
    pub(super) fn random_seed(&self) -> u64 {
        self.simulation.as_ref().and_then(Weak::upgrade).map_or(0, |simulation| simulation.random_seed())
    }

    /// Starts a device's workers, unless the device is simulated. If the system cannot start all of them, the device
    /// works with fewer; with none it is lost.
    pub(super) fn spawn_workers(
        self: &Arc<Self>,
        device: DeviceId,
        name: &str,
        workers: usize,
        skipped: &Arc<SkippedFunctions>,
    ) -> Vec<JoinHandle<()>> {
        let work_available = Arc::new(Condvar::new());
        lock(&self.state)
            .workers
            .insert(device, Workers { name: name.into(), work_available: work_available.clone(), sleeping: 0 });
        let workers = if self.simulation.is_some() { 0 } else { workers.max(1) };
        let mut started = Vec::new();
        for number in 0..workers {
            let (engine, work_available, skipped) = (self.clone(), work_available.clone(), skipped.clone());
            let builder = thread::Builder::new().name(thread_name(format!("{name}/{number}")));
            let life = move || {
                engine.work_loop(device, &work_available);
                skipped.discard();
            };
            match builder.spawn(life) {
                Ok(worker) => started.push(worker),
                Err(error) => {
                    let (named, text) = (name.to_string(), error.to_string());
                    log(move || {
                        tracing::error!(
                            device = named,
                            wanted = workers,
                            started = number,
                            error = text,
                            "could not start a worker thread"
                        );
                    });
                    if started.is_empty() {
                        let lost = Error::new(ErrorKind::DeviceLost, "could not start a worker thread").because(error);
                        discard_all(self.with(|machine| machine.fail(device, lost.at(name))));
                    }
                    break;
                }
            }
        }
        started
    }

    /// Handles the drop of a device's last handle: the workers end once the device's work is done. They are not joined,
    /// as the handle might be dropped under a lock, and a worker's thread-locals can have a user's destructors.
    pub(super) fn close_device(&self, device: DeviceId, workers: Vec<JoinHandle<()>>) {
        self.with(|machine| machine.retire(device));
        let handlers: Vec<_> = lock(&self.loss_handlers).extract_if(.., |(of, _)| *of == device).collect();
        drop(handlers);
        if is_fork() {
            // The threads belong to the parent process: there are none to join in the child.
            std::mem::forget(workers);
        }
    }

    /// The number of calls that sleep until work is done.
    #[cfg(test)]
    pub(super) fn waiting_calls(&self) -> usize {
        lock(&self.state).waiting_calls
    }

    /// Blocks until all work of a stream is done. In a simulation, runs work until then.
    pub(super) fn synchronize(&self, device: DeviceId, stream: StreamId) -> Result<()> {
        let mut state = lock(&self.state);
        let ends = state.machine.ends(device, stream)?;
        loop {
            state.machine.check_alive(device)?;
            if ends.iter().all(|point| state.machine.is_passed(*point)) {
                return Ok(());
            }
            if let Some(simulation) = &self.simulation {
                if state.machine.is_anything_runnable()
                    && let Some(simulation) = simulation.upgrade()
                {
                    drop(state);
                    simulation.step_streams();
                    // Dropping the core can take the lock.
                    drop(simulation);
                    state = lock(&self.state);
                    continue;
                }
                // No time passes during the call.
                if let Some((paused, number)) = state.pauses.first_key_value().map(|(at, number)| (*at, *number)) {
                    drop(state);
                    self.end_pause(paused, number);
                    state = lock(&self.state);
                    continue;
                }
                if !state.machine.is_running() || DeviceThread::is_current() {
                    let name = state.machine.stream_name(stream).cloned();
                    drop(state);
                    let name = name.as_deref().unwrap_or("?");
                    let message = format!(
                        "stream `{name}` waits for work that has not been enqueued: enqueue the work before this call, or \
                         await the stream"
                    );
                    return Err(Error::new(ErrorKind::Stalled, message));
                }
                // Another thread is running work (not this thread, further up its stack), and notifies when that is
                // done. The lock was held since the checks above, so no notification was missed.
            }
            state.waiting_calls += 1;
            state = self.passed.wait(state);
            state.waiting_calls -= 1;
        }
    }

    /// Runs one entry of a stream, for a simulation. `note` receives the entry's description.
    pub(super) fn step_one(&self, stream: StreamId, now: impl FnOnce() -> Duration, note: impl FnOnce(LogLine)) {
        let state = self.step(lock(&self.state), stream, now, |state, begun| {
            let device = state.machine.device_of(stream).and_then(|device| state.workers.get(&device));
            let device = device.map(|workers| workers.name.clone());
            let work = match begun {
                StartedEntry::Waited => Description::Wait,
                StartedEntry::Recorded => Description::Record,
                StartedEntry::Work(work) => work.describe(),
            };
            note(LogLine::Work { device, stream: state.machine.stream_name(stream).cloned(), work });
        });
        drop(state);
    }

    /// Ends a pause of a stream, unless a call has ended it.
    pub(super) fn end_pause(&self, stream: StreamId, number: u64) {
        let mut state = lock(&self.state);
        if state.pauses.get(&stream) != Some(&number) {
            return;
        }
        state.pauses.remove(&stream);
        state.machine.finish(stream);
        let notifies = state.notify_workers(None);
        if state.waiting_calls > 0 {
            self.passed.notify_all();
        }
        drop(state);
        if notifies {
            self.notify_simulation();
        }
    }

    fn work_loop(&self, device: DeviceId, work_available: &Condvar) {
        let _device = DeviceThread::enter();
        let mut state = lock(&self.state);
        loop {
            if let Some(stream) = state.machine.next(device) {
                state = self.step(state, stream, now, |_, _| ());
            } else if state.machine.is_over(device) {
                return;
            } else {
                state.add_sleeping(device, 1);
                state = work_available.wait(state);
                state.add_sleeping(device, -1);
            }
        }
    }

    fn step<'a>(
        &'a self,
        mut state: MutexGuard<'a, EngineState>,
        stream: StreamId,
        now: impl FnOnce() -> Duration,
        note: impl FnOnce(&EngineState, &StartedEntry<Work>),
    ) -> MutexGuard<'a, EngineState> {
        let Some(begun) = state.machine.start(stream, now) else { return state };
        note(&state, &begun);
        if let (StartedEntry::Work(Work::Pause(time)), Some(simulation)) = (&begun, &self.simulation) {
            let (time, simulation) = (*time, simulation.upgrade());
            state.pauses_begun += 1;
            let number = state.pauses_begun;
            state.pauses.insert(stream, number);
            drop(state);
            // It finishes later. The end of a simulation fails its devices.
            simulation.into_iter().for_each(|simulation| simulation.pause(stream, number, time));
            return lock(&self.state);
        }
        // A simulation's thread counts as the device's thread while the entry runs.
        let _device = DeviceThread::enter();
        let device = state.machine.device_of(stream);
        let mut dropped = Vec::new();
        if let StartedEntry::Work(work) = begun {
            if work.touches_memory() {
                state.machine.touches_memory(stream);
            }
            if let Some(device) = device.filter(|device| state.machine.runnable(*device) > 0) {
                state.wake_one(device);
            }
            drop(state);
            let description = work.describe();
            // SAFETY: the machine returned the work once, in its stream's order, and what the caller that enqueued it
            // guaranteed holds until the stream has passed it, which is when `finish` is called below.
            let outcome =
                unsafe { work.run(&|| device.is_some_and(|device| self.with(|m| m.check_alive(device)).is_ok())) };
            state = lock(&self.state);
            if let (Err(cause), Some(device)) = (outcome, device) {
                let error = state.fault(device, stream, description, cause);
                dropped = state.machine.fail(device, error);
            }
        }
        state.machine.finish(stream);
        let notifies = state.notify_workers(device) && self.simulation.is_some();
        if state.waiting_calls > 0 {
            self.passed.notify_all();
        }
        if notifies || !dropped.is_empty() {
            drop(state);
            if notifies {
                // The loop, which might be on another thread, runs streams that became runnable.
                self.notify_simulation();
            }
            // Runs users' destructors: outside the lock, and after all waiting threads were notified of the fault.
            discard_all(dropped);
            state = lock(&self.state);
        }
        state
    }
}

impl EngineState {
    /// Wakes a worker for each change, except on the `own` device of a worker that continues anyway. True if there was
    /// a change.
    fn notify_workers(&mut self, own: Option<DeviceId>) -> bool {
        let changed = self.machine.take_changed();
        for device in &changed {
            let device = *device;
            if self.machine.is_over(device) {
                if let Some(workers) = self.workers.remove(&device) {
                    workers.work_available.notify_all();
                }
            } else if own != Some(device) {
                self.wake_one(device);
            }
        }
        !changed.is_empty()
    }

    fn wake_one(&self, device: DeviceId) {
        if let Some(workers) = self.workers.get(&device).filter(|workers| workers.sleeping > 0) {
            workers.work_available.notify_one();
        }
    }

    fn add_sleeping(&mut self, device: DeviceId, change: isize) {
        if let Some(workers) = self.workers.get_mut(&device) {
            workers.sleeping = workers.sleeping.saturating_add_signed(change);
        }
    }

    fn fault(&self, device: DeviceId, stream: StreamId, work: Description, cause: Fault) -> Error {
        let stream = self.machine.stream_name(stream).map_or("?", |name| name);
        let what = format!("{work} on stream `{stream}` failed");
        let error = Error::new(ErrorKind::DeviceLost, what).because(cause);
        match self.workers.get(&device) {
            Some(workers) => error.at(&*workers.name),
            None => error,
        }
    }
}
