//! Devices and tasks without threads, in an order that a seed decides.
//!
//! A [`Simulation`] owns emulated devices without workers, and the tasks that use them. It runs inside whatever tokio
//! runtime awaits it, so timers are tokio's own. On a runtime whose clock is paused (`#[tokio::test(start_paused =
//! true)]`) time is virtual and a run depends on its seed alone, unless it uses page-locked memory on
//! [`Device::host`](crate::Device::host), which a thread reclaims in real time. On another executor the simulation's
//! own ticks come from a [`timer`] thread.
//!
//! ```text
//!            ┌────────────────────────────────────────────────────────────────────┐
//!            ▼                                                                    │
//!   gather: ready tasks + streams that may run ──► one of them, by the seed ──► one step: poll it, or run one entry
//!            │ none
//!            ▼
//!   ticks that are due? ──► call them, gather again
//!            │ no
//!            ▼
//!   Pending: tokio's clock goes to the next timer, whose waker makes a task ready
//! ```
//!
//! Every choice is made from lists in the order of creation, so the same seed makes the same run, and its
//! [log](Simulation::log) is the same line by line. Tasks are polled outside tokio's cooperative budget: when the
//! budget runs out depends on the thread's other work.

mod log_line;
mod task;
mod timer;
mod wakeup;

#[cfg(test)]
mod tests;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
    mem::ManuallyDrop,
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    runtime::{self, Handle},
    task::coop::unconstrained,
    time::{Instant, sleep_until},
};

pub(super) use self::log_line::LogLine;
#[allow(unused_imports, reason = "the error of a `Task`")]
pub use self::task::{Task, Unfinished};
use self::{
    task::{TaskEntry, TaskFuture, TaskId, TaskWaker},
    timer::SimulationTimer,
    wakeup::{LoopPoll, Wakeup},
};
use super::{Emulated, device::EmulatedDevice, lock, machine::StreamId, workers::Engine};
use crate::{
    clock,
    device::backend::Backend,
    error::{Error, ErrorKind},
    sync::{Level, Mutex, contained, discard, discard_all, log},
};

const ROOT: TaskId = 0;

/// The number of steps after which the loop yields to other tasks of the runtime.
const BURST: usize = 256;

/// The longest pause, 30 years: a point in time that lies farther in the future may have no [`Instant`].
const FOREVER: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Emulated devices and tasks in one seeded order, with virtual time.
///
/// Every possible order of tasks and streams is the order of some seed, and a test that fails with a seed fails with
/// that seed every time. Run it on a runtime of one thread whose clock is paused: `#[tokio::test(start_paused =
/// true)]`.
pub struct Simulation {
    core: Arc<SimulationCore>,
    seed: u64,
}

/// The state of a simulation, shared with its devices and tasks.
pub(super) struct SimulationCore {
    engine: Arc<Engine>,
    started: OnceLock<Instant>,
    /// The latest time that was read, in nanoseconds.
    latest: AtomicU64,
    wakeup: Wakeup,
    state: Mutex<State>,
}

struct State {
    random: StdRng,
    log: Vec<LogLine>,
    tasks: BTreeMap<TaskId, TaskEntry>,
    ready: BTreeSet<TaskId>,
    ticks: Vec<Tick>,
    next_task: TaskId,
    devices: u64,
    /// True from the first poll of a run to its end.
    running: bool,
    over: bool,
}

/// A function that is called at intervals while nothing else can run.
struct Tick {
    interval: Duration,
    due: Instant,
    /// The timer, and the runtime in which the loop was last polled.
    sleep: Option<(runtime::Id, TaskFuture)>,
    call: Box<dyn FnMut() -> bool + Send>,
}

enum SimulationStep {
    Root,
    Task(TaskId),
    Stream(StreamId),
}

thread_local! {
    /// `ManuallyDrop`: without a destructor it stays usable while the thread's other locals are destroyed, whose
    /// destructors can use it. Nothing leaks: [`PollGuard`] empties it.
    static CURRENT: ManuallyDrop<RefCell<Option<SimulationHandle>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

/// The simulation that is polling the calling task.
pub(crate) fn current() -> Option<SimulationHandle> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

impl Simulation {
    /// A simulation without devices or tasks.
    pub fn new(seed: u64) -> Self {
        let state = State {
            random: StdRng::seed_from_u64(seed),
            log: Vec::new(),
            tasks: BTreeMap::new(),
            ready: BTreeSet::new(),
            ticks: Vec::new(),
            next_task: ROOT + 1,
            devices: 0,
            running: false,
            over: false,
        };
        let core = Arc::new_cyclic(|core| SimulationCore {
            engine: Arc::new(Engine::simulated(core.clone())),
            started: OnceLock::new(),
            latest: AtomicU64::new(0),
            wakeup: Wakeup::new(),
            state: Mutex::at(Level::Simulation, state),
        });
        Self { core, seed }
    }

    /// The seed of this simulation.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Opens a device that this simulation runs. The numbers in default names start at 0 in each simulation.
    pub(crate) fn device(&self, config: Emulated) -> Arc<dyn Backend> {
        let mut state = lock(&self.core.state);
        let name = format!("simulated:{}", state.devices);
        state.devices += 1;
        drop(state);
        EmulatedDevice::open(config, self.core.engine.clone(), name)
    }

    /// A number that no other simulation has while a device of this simulation exists.
    pub(crate) fn engine_id(&self) -> usize {
        Arc::as_ptr(&self.core.engine).addr()
    }

    /// Runs a future, the spawned tasks and the devices until the future is done. Tasks that are not done by then
    /// continue in the next run, or end with the simulation.
    ///
    /// It works on any executor. Outside a tokio runtime, time is real, and the tasks have no tokio timers. There, the
    /// simulation's own timer, which it needs while a task waits for a stream, is a thread that lives from the first
    /// such wait to the end of the run.
    ///
    /// # Panics
    /// - If the simulation is already running.
    /// - In a tokio runtime without timers (`Builder::enable_time`), when nothing can run and a task has waited for a stream.
    ///
    /// # Cancel safety
    /// Dropping the future stops everything where it is; the tasks continue in the next run.
    pub async fn run<F: Future>(&self, future: F) -> F::Output {
        let mut root = pin!(unconstrained(future));
        let mut running = RunGuard::new(&self.core);
        self.core.restart_ticks();
        self.core.make_ready(ROOT);
        std::future::poll_fn(|cx| self.core.poll(cx, root.as_mut(), &mut running.timer)).await
    }

    /// All steps so far, one line each.
    pub fn log(&self) -> Vec<String> {
        let log = lock(&self.core.state).log.clone();
        log.iter().map(ToString::to_string).collect()
    }

    /// The number of steps so far: the length of the log.
    pub fn steps(&self) -> usize {
        lock(&self.core.state).log.len()
    }

    /// The names of the tasks that are not done, in the order of spawning, to diagnose a hang or to check that no task
    /// is left.
    pub fn unfinished(&self) -> Vec<String> {
        lock(&self.core.state).tasks.iter().map(|(id, entry)| entry.log_line(*id).to_string()).collect()
    }

    /// Spawns a task that runs beside the future of [`run`](Self::run). The seed decides when it is polled; it does not
    /// for a task of `tokio::spawn`. Dropping the returned handle detaches the task.
    pub fn spawn<F>(&self, name: impl Into<String>, future: F) -> Task<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        SimulationHandle { core: self.core.clone() }.spawn(name, future)
    }
}

impl Drop for Simulation {
    /// Drops the simulation's tasks and marks its devices lost.
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        state.over = true;
        let (tasks, waker) = (std::mem::take(&mut state.tasks), self.core.wakeup.take_waker());
        drop(state);
        discard_all(tasks.into_values());
        discard(waker);
        let error = Error::new(ErrorKind::DeviceLost, "the simulation of this device was dropped");
        let dropped: Vec<_> = self.core.engine.with(|machine| {
            machine.devices().into_iter().flat_map(|device| machine.fail(device, error.clone())).collect()
        });
        discard_all(dropped);
        self.core.engine.notify_loss(&error);
        // Call the ticks once more, so that tasks outside the simulation notice the loss of its devices.
        let ticks = std::mem::take(&mut lock(&self.core.state).ticks);
        ticks.into_iter().for_each(|mut tick| _ = contained("a tick panicked", || _ = (tick.call)()));
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl fmt::Debug for SimulationCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct SimulationHandle {
    core: Arc<SimulationCore>,
}

impl SimulationHandle {
    pub(super) fn runs(&self, engine: &Arc<Engine>) -> bool {
        Arc::ptr_eq(&self.core.engine, engine)
    }

    /// Spawns a task of the simulation. Dropping the returned handle detaches it.
    pub(crate) fn spawn<F>(&self, name: impl Into<String>, future: F) -> Task<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (entry, slot) = TaskEntry::new(name.into(), future);
        let mut state = lock(&self.core.state);
        let id = state.next_task;
        state.next_task += 1;
        if state.over {
            drop(state);
            // The task is never polled, and its handle reports that it was aborted.
            drop(entry);
        } else {
            state.tasks.insert(id, entry);
            drop(state);
            self.core.make_ready(id);
        }
        Task::new(id, slot, &self.core)
    }

    /// Calls `call` every `interval` while nothing else can run, until it returns false. Until then, a simulation
    /// without runnable work lets time pass.
    pub(crate) fn on_idle_every(&self, interval: Duration, call: Box<dyn FnMut() -> bool + Send>) {
        let tick = Tick { interval, due: clock::now() + interval, sleep: None, call };
        lock(&self.core.state).ticks.push(tick);
        self.core.notify();
    }
}

impl SimulationCore {
    fn poll<F: Future>(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        mut root: Pin<&mut F>,
        timer: &mut Option<SimulationTimer>,
    ) -> Poll<F::Output> {
        let polling = PollGuard::new(self, cx);
        let waker = Waker::from(Arc::new(TaskWaker::new(ROOT, self)));
        for _ in 0..BURST {
            match self.choose(Some(&polling.in_loop)) {
                Some(SimulationStep::Root) => {
                    self.log_step(LogLine::Root);
                    if let Poll::Ready(output) = root.as_mut().poll(&mut Context::from_waker(&waker)) {
                        lock(&self.state).ready.remove(&ROOT);
                        return Poll::Ready(output);
                    }
                }
                Some(SimulationStep::Task(id)) => self.poll_task(id),
                Some(SimulationStep::Stream(stream)) => self.step_stream(stream),
                None if self.poll_ticks(cx, timer) => {}
                None if polling.in_loop.may_sleep() => return Poll::Pending,
                None => {}
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Chooses the next step by the seed: any step for the loop, only a stream's entry for other callers.
    fn choose(&self, in_loop: Option<&LoopPoll<'_>>) -> Option<SimulationStep> {
        // Before the checks: they might miss changes from now on.
        in_loop.inspect(|in_loop| in_loop.observe());
        let streams = self.engine.with(|machine| machine.all_runnable());
        let mut state = lock(&self.state);
        let ready = if in_loop.is_some() { state.ready.len() } else { 0 };
        if ready + streams.len() == 0 {
            return None;
        }
        let choice = state.random.random_range(0..ready + streams.len());
        if let Some(stream) = choice.checked_sub(ready) {
            return Some(SimulationStep::Stream(streams[stream]));
        }
        let id = state.ready.iter().nth(choice).copied()?;
        state.ready.remove(&id);
        Some(if id == ROOT { SimulationStep::Root } else { SimulationStep::Task(id) })
    }

    /// Lets time pass in a stream whose entry has begun.
    pub(super) fn pause(self: Arc<Self>, stream: StreamId, number: u64, time: Duration) {
        let core = Arc::downgrade(&self);
        let end = move || {
            if let Some(core) = core.upgrade() {
                core.engine.end_pause(stream, number);
            }
            false
        };
        SimulationHandle { core: self }.on_idle_every(time.min(FOREVER), Box::new(end));
    }

    fn step_stream(&self, stream: StreamId) {
        self.engine.step_one(stream, || self.now(), |line| self.log_step(line));
    }

    /// Runs one entry of some stream, for a call that waits. False if no stream is runnable.
    pub(super) fn step_streams(&self) -> bool {
        let Some(SimulationStep::Stream(stream)) = self.choose(None) else { return false };
        self.step_stream(stream);
        true
    }

    fn poll_task(self: &Arc<Self>, id: TaskId) {
        let mut state = lock(&self.state);
        let Some(entry) = state.tasks.get_mut(&id) else { return };
        let (body, log_line) = (entry.body.take(), entry.log_line(id));
        let aborted = entry.aborted;
        state.log.push(log_line);
        drop(state);
        let Some(mut body) = body else { return };
        let waker = Waker::from(Arc::new(TaskWaker::new(id, self)));
        // The future's own panic is caught for the task's handle. One that arrives here is a destructor's, and ends the
        // task.
        let mut ready = false;
        let mut poll = || ready = body.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let done = aborted || !contained("a task panicked as it ended", &mut poll) || ready;
        let mut state = lock(&self.state);
        let body = match state.tasks.get_mut(&id) {
            Some(entry) if !done => {
                entry.body = Some(body);
                return;
            }
            _ => body,
        };
        state.tasks.remove(&id);
        state.ready.remove(&id);
        drop(state);
        contained("a task panicked as it was dropped", || drop(body));
    }

    /// Called before a run: timers and times belong to a runtime and its clock, and the runtime of this run might be
    /// another one.
    fn restart_ticks(&self) {
        let now = clock::now();
        let mut timers = Vec::new();
        for tick in &mut lock(&self.state).ticks {
            timers.extend(tick.sleep.take());
            tick.due = tick.due.min(now + tick.interval);
        }
        // The timers hold a waker of the user's.
        discard_all(timers);
    }

    /// Calls the ticks that are due, and arranges a wakeup for the next one. True if one was called.
    fn poll_ticks(self: &Arc<Self>, cx: &mut Context<'_>, timer: &mut Option<SimulationTimer>) -> bool {
        let mut called = false;
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        let mut taken = TicksGuard { core: self, ticks: std::mem::take(&mut lock(&self.state).ticks) };
        // The old runtime might no longer be driven.
        let elsewhere = |sleep: &mut (runtime::Id, TaskFuture)| Some(sleep.0) != runtime;
        discard_all(taken.ticks.iter_mut().filter_map(|tick| tick.sleep.take_if(elsewhere)).collect::<Vec<_>>());
        taken.ticks.retain_mut(|tick| {
            if !tick.is_due(cx, runtime) {
                return true;
            }
            called = true;
            tick.sleep = None;
            tick.due = clock::now() + tick.interval;
            (tick.call)()
        });
        if runtime.is_none() {
            let next = taken.ticks.iter().filter(|tick| tick.sleep.is_none()).map(|tick| tick.due).min();
            self.set_timer(timer, next.map(Instant::into_std));
        }
        called
    }

    fn set_timer(self: &Arc<Self>, timer: &mut Option<SimulationTimer>, at: Option<std::time::Instant>) {
        if timer.is_none() && at.is_some() {
            match SimulationTimer::new(Arc::downgrade(self)) {
                Ok(made) => *timer = Some(made),
                // The next poll retries.
                Err(error) => log(move || {
                    tracing::error!(error = %format_args!("{error:#}"), "could not start a simulation's timer thread: device faults might go unnoticed");
                }),
            }
        }
        if let Some(timer) = timer {
            timer.set(at);
        }
    }

    /// A random number from the seed, for a caller that chooses an order itself.
    pub(super) fn random_seed(&self) -> u64 {
        lock(&self.state).random.random()
    }

    /// When its time began.
    pub(super) fn started(&self) -> Instant {
        *self.started.get_or_init(clock::now)
    }

    fn log_step(&self, log_line: LogLine) {
        lock(&self.state).log.push(log_line);
    }

    /// The time on tokio's clock since the first call. It never goes back, even outside a runtime whose clock is
    /// paused. In the destructor of a thread-local, where there is no clock, it is the latest time that was read.
    fn now(&self) -> Duration {
        let latest = match Handle::try_current() {
            Err(error) if error.is_thread_local_destroyed() => self.latest.load(Ordering::Relaxed),
            _ => {
                let now = Instant::now();
                let passed = now.duration_since(*self.started.get_or_init(|| now)).as_nanos();
                let passed = u64::try_from(passed).unwrap_or(u64::MAX);
                self.latest.fetch_max(passed, Ordering::Relaxed).max(passed)
            }
        };
        Duration::from_nanos(latest)
    }

    fn make_ready(&self, id: TaskId) {
        let mut state = lock(&self.state);
        if id == ROOT || state.tasks.contains_key(&id) {
            state.ready.insert(id);
        }
        drop(state);
        self.notify();
    }

    fn abort(&self, id: TaskId) {
        if let Some(entry) = lock(&self.state).tasks.get_mut(&id) {
            entry.aborted = true;
        }
        self.make_ready(id);
    }

    /// Reports a change, so that the loop checks for work again.
    pub(super) fn notify(&self) {
        self.wakeup.notify();
    }
}

impl Tick {
    /// `runtime` is the current tokio runtime, if any, whose timers are used.
    fn is_due(&mut self, cx: &mut Context<'_>, runtime: Option<runtime::Id>) -> bool {
        let due = self.due;
        let Some(runtime) = runtime else { return due <= clock::now() };
        let (_, sleep) = self.sleep.get_or_insert_with(|| (runtime, Box::pin(unconstrained(sleep_until(due)))));
        sleep.as_mut().poll(cx).is_ready()
    }
}

/// Owns the ticks while they are polled. If cloning the caller's waker panics, they are put back for the next poll.
struct TicksGuard<'a> {
    core: &'a SimulationCore,
    ticks: Vec<Tick>,
}

impl Drop for TicksGuard<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        // Ticks that were added during the poll come last.
        self.ticks.append(&mut state.ticks);
        state.ticks = std::mem::take(&mut self.ticks);
    }
}

struct RunGuard<'a> {
    core: &'a SimulationCore,
    /// The source of ticks outside a tokio runtime.
    timer: Option<SimulationTimer>,
}

impl<'a> RunGuard<'a> {
    fn new(core: &'a SimulationCore) -> Self {
        let before = std::mem::replace(&mut lock(&core.state).running, true);
        assert!(!before, "`Simulation::run` was called while the simulation was running: it runs one future at a time");
        Self { core, timer: None }
    }
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        lock(&self.core.state).running = false;
    }
}

/// A guard for one poll of the loop, during which the simulation is the thread's current one.
struct PollGuard<'a> {
    in_loop: LoopPoll<'a>,
    before: Option<SimulationHandle>,
}

impl<'a> PollGuard<'a> {
    fn new(core: &'a Arc<SimulationCore>, cx: &Context<'_>) -> Self {
        let in_loop = core.wakeup.begin(cx.waker().clone());
        let before = CURRENT.with(|current| current.replace(Some(SimulationHandle { core: core.clone() })));
        Self { in_loop, before }
    }
}

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        let before = self.before.take();
        let polled = CURRENT.try_with(|current| current.replace(before));
        drop(polled);
    }
}
