//! Devices and tasks without threads, in an order that a seed decides.
//!
//! A [`Simulation`] owns emulated devices that have no workers, and the tasks that use them. It is a future itself and
//! runs inside whatever tokio runtime awaits it, so timers are tokio's own; on a runtime whose clock is paused
//! (`#[tokio::test(start_paused = true)]`) time is virtual and a run depends on its seed alone, where its memory is its
//! devices': memory that is page-locked for [`Device::host`](crate::Device::host) is swept by a thread, in real time. On another
//! executor the simulation's own ticks come from an [`alarm`].
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
//! Every choice is made over lists whose order is that of creation, so the same seed makes the same run, and its
//! [log](Simulation::log) is the same line by line. Tasks are polled outside tokio's cooperative budget, since when that
//! runs out depends on what else the thread did.

mod alarm;
mod line;
mod task;
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

pub(super) use self::line::Line;
#[allow(unused_imports, reason = "what a join can say, for whoever joins")]
pub use self::task::{Task, Unfinished};
use self::{
    alarm::Alarm,
    task::{Body, Entry, TaskId, TaskWaker},
    wakeup::{LoopPoll, Wakeup},
};
use super::{Emulated, device::Device, lock, machine::StreamId, workers::Engine};
use crate::{
    clock,
    device::backend::Backend,
    error::{Error, ErrorKind},
    sync::{Level, Mutex, contained, discard, discard_all, log},
};

/// The future that [`Simulation::run`] was given.
const ROOT: TaskId = 0;

/// How many steps before the runtime's other tasks get a turn.
const BURST: usize = 256;

/// Emulated devices and tasks in one seeded order, under virtual time.
///
/// Any order that tasks and streams can take is the order of some seed, and a seed's order can be found again: a test
/// that fails with one fails with it every time. Run it on a runtime of one thread whose clock is paused:
/// `#[tokio::test(start_paused = true)]`.
pub struct Simulation {
    core: Arc<Core>,
    seed: u64,
}

/// What runs a simulation, shared with its devices and tasks.
pub(super) struct Core {
    engine: Arc<Engine>,
    started: OnceLock<Instant>,
    /// The latest time that was read, in nanoseconds.
    latest: AtomicU64,
    wakeup: Wakeup,
    state: Mutex<State>,
}

struct State {
    random: StdRng,
    log: Vec<Line>,
    tasks: BTreeMap<TaskId, Entry>,
    ready: BTreeSet<TaskId>,
    ticks: Vec<Tick>,
    next_task: TaskId,
    devices: u64,
    /// From the first poll of a run to its end.
    running: bool,
    over: bool,
}

/// Something that wants to be called now and then while nothing happens.
struct Tick {
    interval: Duration,
    due: Instant,
    /// Of the runtime in which the loop was polled last.
    sleep: Option<(runtime::Id, Body)>,
    call: Box<dyn FnMut() -> bool + Send>,
}

enum Step {
    Root,
    Task(TaskId),
    Stream(StreamId),
}

thread_local! {
    /// `ManuallyDrop`: without a destructor it stays usable while the thread's other locals are destroyed, and theirs ask
    /// for it. Nothing leaks: [`Polling`] empties it.
    static CURRENT: ManuallyDrop<RefCell<Option<SimulationHandle>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

/// The simulation that polls the calling task.
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
        let core = Arc::new_cyclic(|core| Core {
            engine: Arc::new(Engine::simulated(core.clone())),
            started: OnceLock::new(),
            latest: AtomicU64::new(0),
            wakeup: Wakeup::new(),
            state: Mutex::at(Level::Simulation, state),
        });
        Self { core, seed }
    }

    /// The seed it was made with.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// A device that this simulation runs. Its default name counts from 0 in each simulation.
    pub(crate) fn device(&self, config: Emulated) -> Arc<dyn Backend> {
        let mut state = lock(&self.core.state);
        let name = format!("simulated:{}", state.devices);
        state.devices += 1;
        drop(state);
        Device::open(config, self.core.engine.clone(), name)
    }

    /// A number that no other simulation has while one of the devices of this one lives.
    pub(crate) fn engine_id(&self) -> usize {
        Arc::as_ptr(&self.core.engine).addr()
    }

    /// Runs a future, the tasks that are spawned meanwhile and the devices, until the future is done. Tasks that are not
    /// done by then go on in the next run, or end with the simulation.
    ///
    /// It works on any executor. Outside a tokio runtime, time is real, and the tasks have no tokio timers. The simulation's own
    /// timer, which it needs while a task waits for a stream, is a thread there, from the first such wait to the end of the run.
    ///
    /// # Panics
    /// - If it is running already.
    /// - In a tokio runtime without timers (`Builder::enable_time`), when nothing can run and a task has waited for a stream.
    ///
    /// # Cancel safety
    /// Dropping it stops everything where it is; the tasks go on in the next run.
    pub async fn run<F: Future>(&self, future: F) -> F::Output {
        let mut root = pin!(unconstrained(future));
        let mut running = Running::new(&self.core);
        self.core.restart_ticks();
        self.core.make_ready(ROOT);
        std::future::poll_fn(|cx| self.core.poll(cx, root.as_mut(), &mut running.alarm)).await
    }

    /// What was done, step by step.
    pub fn log(&self) -> Vec<String> {
        let log = lock(&self.core.state).log.clone();
        log.iter().map(ToString::to_string).collect()
    }

    /// How many steps were done: the length of its log.
    pub fn steps(&self) -> usize {
        lock(&self.core.state).log.len()
    }

    /// The tasks that are not done, by their names, in the order of spawning: when something hangs, or at the end, when
    /// nothing should be left.
    pub fn unfinished(&self) -> Vec<String> {
        lock(&self.core.state).tasks.iter().map(|(id, entry)| entry.line(*id).to_string()).collect()
    }

    /// Spawns a task beside what [`run`](Self::run) is given: its turns are picked by the same seed, as those of
    /// `tokio::spawn` are not. Dropping what this returns lets it go on by itself.
    pub fn spawn<F>(&self, name: impl Into<String>, future: F) -> Task<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        SimulationHandle { core: self.core.clone() }.spawn(name, future)
    }
}

impl Drop for Simulation {
    /// Its tasks are dropped and its devices lost: nobody runs them any more.
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        state.over = true;
        let (tasks, waker) = (std::mem::take(&mut state.tasks), self.core.wakeup.take_waker());
        drop(state);
        discard_all(tasks.into_values());
        discard(waker);
        let error = Error::new(ErrorKind::DeviceLost, "its simulation is over");
        let dropped: Vec<_> = self.core.engine.with(|machine| {
            machine.devices().into_iter().flat_map(|device| machine.fail(device, error.again())).collect()
        });
        discard_all(dropped);
        self.core.engine.tell_of_loss(&error);
        // Once more, so that those who wait outside of it learn that its devices are lost.
        let ticks = std::mem::take(&mut lock(&self.core.state).ticks);
        ticks.into_iter().for_each(|mut tick| _ = contained("a tick panicked", || _ = (tick.call)()));
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").finish_non_exhaustive()
    }
}

/// A way into a running simulation.
#[derive(Clone, Debug)]
pub(crate) struct SimulationHandle {
    core: Arc<Core>,
}

impl SimulationHandle {
    /// Whether it runs the devices of this engine.
    pub(super) fn runs(&self, engine: &Arc<Engine>) -> bool {
        Arc::ptr_eq(&self.core.engine, engine)
    }

    /// A task of the simulation's. Dropping what this returns lets it go on by itself.
    pub(crate) fn spawn<F>(&self, name: impl Into<String>, future: F) -> Task<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (entry, slot) = Entry::new(name.into(), future);
        let mut state = lock(&self.core.state);
        let id = state.next_task;
        state.next_task += 1;
        if state.over {
            drop(state);
            // Never to be polled: its join says so.
            drop(entry);
        } else {
            state.tasks.insert(id, entry);
            drop(state);
            self.core.make_ready(id);
        }
        Task::new(id, slot, &self.core)
    }

    /// Calls `call` every `interval` while nothing else happens, until it returns false. While there is one of these, a
    /// simulation that can do nothing lets time pass instead of standing still.
    pub(crate) fn on_idle_every(&self, interval: Duration, call: Box<dyn FnMut() -> bool + Send>) {
        let tick = Tick { interval, due: clock::now() + interval, sleep: None, call };
        lock(&self.core.state).ticks.push(tick);
        self.core.stir();
    }
}

/// The loop.
impl Core {
    fn poll<F: Future>(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        mut root: Pin<&mut F>,
        alarm: &mut Option<Alarm>,
    ) -> Poll<F::Output> {
        let polling = Polling::new(self, cx);
        let waker = Waker::from(Arc::new(TaskWaker::new(ROOT, self)));
        for _ in 0..BURST {
            match self.choose(Some(&polling.in_loop)) {
                Some(Step::Root) => {
                    self.note(Line::Root);
                    if let Poll::Ready(output) = root.as_mut().poll(&mut Context::from_waker(&waker)) {
                        lock(&self.state).ready.remove(&ROOT);
                        return Poll::Ready(output);
                    }
                }
                Some(Step::Task(id)) => self.poll_task(id),
                Some(Step::Stream(stream)) => self.step_stream(stream),
                None if self.poll_ticks(cx, alarm) => {}
                None if polling.in_loop.may_sleep() => return Poll::Pending,
                None => {}
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// What to do next, by the seed: for the loop any step, for others that of a stream.
    fn choose(&self, in_loop: Option<&LoopPoll<'_>>) -> Option<Step> {
        // First of all: what comes in from now on may be missed below.
        in_loop.inspect(|in_loop| in_loop.observe());
        let streams = self.engine.with(|machine| machine.all_runnable());
        let mut state = lock(&self.state);
        let ready = if in_loop.is_some() { state.ready.len() } else { 0 };
        if ready + streams.len() == 0 {
            return None;
        }
        let choice = state.random.random_range(0..ready + streams.len());
        if let Some(stream) = choice.checked_sub(ready) {
            return Some(Step::Stream(streams[stream]));
        }
        let id = state.ready.iter().nth(choice).copied()?;
        state.ready.remove(&id);
        Some(if id == ROOT { Step::Root } else { Step::Task(id) })
    }

    fn step_stream(&self, stream: StreamId) {
        self.engine.step_one(stream, || self.now(), |line| self.note(line));
    }

    /// One entry of some stream, for a call that waits. False if there is none.
    pub(super) fn step_streams(&self) -> bool {
        let Some(Step::Stream(stream)) = self.choose(None) else { return false };
        self.step_stream(stream);
        true
    }

    fn poll_task(self: &Arc<Self>, id: TaskId) {
        let mut state = lock(&self.state);
        let Some(entry) = state.tasks.get_mut(&id) else { return };
        let (body, line) = (entry.body.take(), entry.line(id));
        let aborted = entry.aborted;
        state.log.push(line);
        drop(state);
        let Some(mut body) = body else { return };
        let waker = Waker::from(Arc::new(TaskWaker::new(id, self)));
        // What its future panics with is its join's; what remains is a destructor, which ends the task.
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

    /// Before a run: timers belong to a runtime and times to its clock, and this may be another one than last time.
    fn restart_ticks(&self) {
        let now = clock::now();
        let mut timers = Vec::new();
        for tick in &mut lock(&self.state).ticks {
            timers.extend(tick.sleep.take());
            tick.due = tick.due.min(now + tick.interval);
        }
        // They have a waker of the user's.
        discard_all(timers);
    }

    /// Calls the ticks that are due, and sees to it that the next one wakes us. True if there was one.
    fn poll_ticks(self: &Arc<Self>, cx: &mut Context<'_>, alarm: &mut Option<Alarm>) -> bool {
        let mut called = false;
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        let mut taken = Taken { core: self, ticks: std::mem::take(&mut lock(&self.state).ticks) };
        // The run has moved: nothing may drive that runtime any more.
        let elsewhere = |sleep: &mut (runtime::Id, Body)| Some(sleep.0) != runtime;
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
            self.set_alarm(alarm, next.map(Instant::into_std));
        }
        called
    }

    fn set_alarm(self: &Arc<Self>, alarm: &mut Option<Alarm>, at: Option<std::time::Instant>) {
        if alarm.is_none() && at.is_some() {
            match Alarm::new(Arc::downgrade(self)) {
                Ok(made) => *alarm = Some(made),
                // The next poll tries again.
                Err(error) => log(move || {
                    tracing::error!(%error, "no thread for a simulation's ticks: a fault may go unnoticed");
                }),
            }
        }
        if let Some(alarm) = alarm {
            alarm.set(at);
        }
    }

    /// A number that the seed decides, for what chooses an order by itself.
    pub(super) fn draw(&self) -> u64 {
        lock(&self.state).random.random()
    }

    fn note(&self, line: Line) {
        lock(&self.state).log.push(line);
    }

    /// The time on tokio's clock since it was first asked. It does not go back where the clock is another: outside a runtime
    /// whose clock is paused. Where there is none, in the destructor of a thread-local, it is the latest that was read.
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
        self.stir();
    }

    fn abort(&self, id: TaskId) {
        if let Some(entry) = lock(&self.state).tasks.get_mut(&id) {
            entry.aborted = true;
        }
        self.make_ready(id);
    }

    /// Something has changed: the loop is to look, unless it is going to anyway.
    pub(super) fn stir(&self) {
        self.wakeup.notify();
    }
}

impl Tick {
    /// `runtime`: the one with the timers, where there is one.
    fn is_due(&mut self, cx: &mut Context<'_>, runtime: Option<runtime::Id>) -> bool {
        let due = self.due;
        let Some(runtime) = runtime else { return due <= clock::now() };
        let (_, sleep) = self.sleep.get_or_insert_with(|| (runtime, Box::pin(unconstrained(sleep_until(due)))));
        sleep.as_mut().poll(cx).is_ready()
    }
}

/// The ticks, while they are polled. The clone of the caller's waker may panic: then they are there for the next poll.
struct Taken<'a> {
    core: &'a Core,
    ticks: Vec<Tick>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.core.state);
        // Those that came in meanwhile stand behind.
        self.ticks.append(&mut state.ticks);
        state.ticks = std::mem::take(&mut self.ticks);
    }
}

/// The time of one run.
struct Running<'a> {
    core: &'a Core,
    /// What makes ticks where no runtime does.
    alarm: Option<Alarm>,
}

impl<'a> Running<'a> {
    fn new(core: &'a Core) -> Self {
        let before = std::mem::replace(&mut lock(&core.state).running, true);
        assert!(!before, "a simulation runs one future at a time");
        Self { core, alarm: None }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.core.state).running = false;
    }
}

/// The time of one poll of the loop: this thread is in the simulation.
struct Polling<'a> {
    in_loop: LoopPoll<'a>,
    before: Option<SimulationHandle>,
}

impl<'a> Polling<'a> {
    fn new(core: &'a Arc<Core>, cx: &Context<'_>) -> Self {
        let in_loop = core.wakeup.begin(cx.waker().clone());
        let before = CURRENT.with(|current| current.replace(Some(SimulationHandle { core: core.clone() })));
        Self { in_loop, before }
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        let before = self.before.take();
        let polled = CURRENT.try_with(|current| current.replace(before));
        drop(polled);
    }
}
