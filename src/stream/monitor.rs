//! The completion monitor of a device: a thread that runs while there are waiters, and polls the streams that no
//! waiting task polls.
//!
//! - **Alarms**: it wakes a task shortly before its work is expected to end.
//! - **Scans**: if many tasks wait, it queries their events in turn until each is done or overdue.
//! - **The tick**: a callback may never come. After a kernel that traps, the driver runs nothing that was enqueued
//!   behind it, not even host functions (measured on an H200: half a second later none of it had run, and the fault
//!   showed only because the event was queried). So while anything waits, each of its streams is queried every
//!   [`INTERVAL`]: a fault then fails every pending future, and a lost notification costs at most one interval. The
//!   same tick sweeps memory that was parked until its uses are over.
//!
//! Unless it scans, the thread sleeps until the next alarm or tick. Without waiters there is no thread: it ends at a
//! tick that finds nothing to do, and is spawned again when needed. A device that a
//! [`Simulation`](crate::device::Simulation) runs has no such thread: the simulation's loop runs the tick in virtual
//! time, without alarms and scans.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

use super::{completion::Completion, mark::Mark, watch::WatchList};
use crate::{
    device::{Device, backend::Backend, thread::DeviceThread},
    error::panic_message,
    sync::{Condvar, Level, Mutex, MutexGuard, contained, lock, log},
    thread_name::thread_name,
};

/// The interval at which a stream with waiters is queried. A query costs 1.25 us on an H200; the driver itself takes
/// about 590 ms to report a trap.
const INTERVAL: Duration = Duration::from_millis(50);

/// Called at each tick until it returns false.
type Sweep = Box<dyn FnMut() -> bool + Send>;

/// See the [module](self).
pub(crate) struct CompletionMonitor {
    backend: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    list: Mutex<List>,
    /// True if the list has changed: lets a scanning thread avoid locking it.
    changed: AtomicBool,
    wake_up: Condvar,
    scanning: AtomicBool,
}

#[derive(Default)]
struct List {
    /// The streams that are queried at every tick, and whether the ticks run.
    streams: WatchList<Weak<dyn Monitored>>,
    sweeps: Vec<Sweep>,
    alarms: BTreeMap<AlarmKey, AlarmTarget>,
    next_alarm: u64,
    scans: Vec<Scan>,
    /// The time until which the thread sleeps; `None` while it is awake.
    asleep: Option<Instant>,
    closed: bool,
}

/// A stream, as the monitor sees it. This keeps the monitor independent of streams, which use it.
pub(super) trait Monitored: Send + Sync {
    /// Queries the device for the stream's progress. After a fault, fails its waiters.
    fn poll_progress(&self);

    /// True if the stream is to be polled at the next tick; false if it has no waiters.
    fn is_still_watched(&self) -> bool;

    /// Called if no tick can run. The next waiter starts the ticks again.
    fn unwatch(&self);

    /// Queries the mark of a scan. False once the scan is over: the mark has passed, or a callback takes over.
    fn poll_scan(&self, scan: &mut ScanProgress) -> bool;
}

/// The time, and a number unique among the alarms.
type AlarmKey = (Instant, u64);

/// What an alarm wakes.
enum AlarmTarget {
    /// The waiters of a ticket.
    Waiters(Arc<Completion>, u64),
    Task(Waker),
}

impl AlarmTarget {
    fn wake(self) {
        match self {
            Self::Waiters(completion, ticket) => completion.wake(ticket),
            Self::Task(waker) => waker.wake(),
        }
    }
}

/// A pending alarm, cancelled on drop.
pub(crate) struct WakeAlarm {
    shared: Weak<Shared>,
    key: AlarmKey,
}

/// A mark that the monitor queries continuously.
pub(super) struct Scan {
    pub(super) stream: Arc<dyn Monitored>,
    pub(super) progress: ScanProgress,
}

pub(super) struct ScanProgress {
    pub(super) mark: Arc<Mark>,
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// When the mark was last found not passed.
    pub(super) last_pending: Instant,
}

impl CompletionMonitor {
    pub(super) fn new(device: &Device) -> Self {
        let shared = Shared {
            name: thread_name(format!("wakeline-monitor-{}", device.name())),
            list: Mutex::at(Level::CompletionMonitor, List::default()),
            changed: AtomicBool::new(false),
            wake_up: Condvar::new(),
            scanning: AtomicBool::new(false),
        };
        Self { backend: device.backend().clone(), shared: Arc::new(shared) }
    }

    /// Polls the stream at every tick as long as it has waiters.
    pub(super) fn watch(&self, stream: Weak<dyn Monitored>) {
        let mut list = lock(&self.shared.list);
        list.streams.add(stream);
        self.begin(list);
    }

    /// Calls `sweep` at every tick until it returns false.
    pub(crate) fn sweep(&self, sweep: Sweep) {
        let mut list = lock(&self.shared.list);
        list.sweeps.push(sweep);
        self.begin(list);
    }

    /// Wakes the waiters of `ticket` at time `at`, unless the returned alarm is dropped before. `None` if no thread
    /// could be spawned.
    pub(super) fn alarm(&self, at: Instant, completion: Arc<Completion>, ticket: u64) -> Option<WakeAlarm> {
        self.set_alarm(at, AlarmTarget::Waiters(completion, ticket))
    }

    /// Like [`alarm`](Self::alarm), for one task.
    pub(crate) fn alarm_for(&self, at: Instant, task: Waker) -> Option<WakeAlarm> {
        self.set_alarm(at, AlarmTarget::Task(task))
    }

    fn set_alarm(&self, at: Instant, target: AlarmTarget) -> Option<WakeAlarm> {
        let mut list = lock(&self.shared.list);
        let key = (at, list.next_alarm);
        list.next_alarm += 1;
        list.alarms.insert(key, target);
        self.shared.changed.store(true, Ordering::Release);
        let early = list.asleep.is_some_and(|until| at < until);
        let begun = self.begin(list);
        if early {
            self.shared.wake_up.notify_one();
        }
        // If no tick can run, dropping the alarm cancels it.
        let alarm = WakeAlarm { shared: Arc::downgrade(&self.shared), key };
        begun.then_some(alarm)
    }

    /// True while the monitor scans.
    pub(super) fn scans(&self) -> bool {
        self.shared.scanning.load(Ordering::Relaxed)
    }

    /// Queries a mark until it has passed. If it is overdue, a callback takes over. False if no thread could be
    /// spawned.
    pub(super) fn scan(&self, scan: Scan) -> bool {
        let mut list = lock(&self.shared.list);
        list.scans.push(scan);
        self.shared.scanning.store(true, Ordering::Relaxed);
        self.shared.changed.store(true, Ordering::Release);
        let asleep = list.asleep.take().is_some();
        let begun = self.begin(list);
        if asleep {
            self.shared.wake_up.notify_one();
        }
        begun
    }

    /// Starts the ticks unless they run already. False if this fails.
    fn begin(&self, mut list: MutexGuard<'_, List>) -> bool {
        if !list.streams.begin() {
            return true;
        }
        drop(list);
        let shared = self.shared.clone();
        if let Some(simulation) = self.backend.simulation() {
            simulation.on_idle_every(INTERVAL, Box::new(move || shared.tick(false)));
            return true;
        }
        // A panicking waker ends one round, not the monitor.
        let keep = move || {
            wake_on_time();
            let _device = DeviceThread::enter();
            while let Err(panic) = catch_unwind(AssertUnwindSafe(|| shared.run())) {
                let _ = panic_message(panic);
            }
        };
        let Err(error) = std::thread::Builder::new().name(self.shared.name.clone()).spawn(keep) else { return true };
        // A subscriber is user code.
        contained("a subscriber panicked", || {
            log(
                move || tracing::error!(error = %format_args!("{error:#}"), "cannot spawn the completion monitor's thread: a device fault may go unnoticed until the next call"),
            );
        });
        let mut list = lock(&self.shared.list);
        // The next waiter tries again.
        let unwatched = list.streams.abandon();
        // Dropped after the lock is released.
        let gone = (std::mem::take(&mut list.alarms), std::mem::take(&mut list.scans));
        drop(list);
        drop(gone);
        unwatched.iter().filter_map(Weak::upgrade).for_each(|stream| stream.unwatch());
        false
    }
}

/// Lets the sleeps of this thread end on time: Linux may end them 50 us later, to join wake-ups.
fn wake_on_time() {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

impl Shared {
    fn run(&self) {
        let mut scans: Vec<Scan> = Vec::new();
        let mut tick = Instant::now() + INTERVAL;
        let mut next = tick;
        loop {
            let now = Instant::now();
            if now >= tick {
                if !self.tick(!scans.is_empty()) {
                    return;
                }
                tick = now + INTERVAL;
            }
            if !scans.is_empty() && now < next && !self.changed.load(Ordering::Acquire) {
                // A scan whose query panics is removed: its waiter was woken, and queries the device itself.
                scans.retain_mut(|scan| caught(|| scan.stream.poll_scan(&mut scan.progress)).unwrap_or(false));
                continue;
            }
            let mut list = lock(&self.list);
            if list.closed {
                return;
            }
            self.changed.store(false, Ordering::Release);
            scans.append(&mut list.scans);
            self.scanning.store(!scans.is_empty(), Ordering::Relaxed);
            let mut due = Vec::new();
            while let Some(first) = list.alarms.first_entry()
                && first.key().0 <= now
            {
                due.push(first.remove());
            }
            next = list.alarms.first_key_value().map_or(tick, |((at, _), _)| tick.min(*at));
            if due.is_empty() && scans.is_empty() {
                list.asleep = Some(next);
                let nap = next.saturating_duration_since(Instant::now());
                list = self.wake_up.wait_timeout(list, nap);
                list.asleep = None;
            }
            drop(list);
            for target in due {
                caught(|| target.wake());
            }
        }
    }

    /// Runs one tick. False if nothing is left to do, so that the ticks end.
    fn tick(&self, scanning: bool) -> bool {
        // In a simulation, the simulation's loop calls this.
        let _device = DeviceThread::enter();
        let (streams, mut sweeps) = {
            let mut list = lock(&self.list);
            (list.streams.take(), std::mem::take(&mut list.sweeps))
        };
        let mut kept = Vec::new();
        for stream in streams {
            let Some(watched) = stream.upgrade() else { continue };
            caught(|| watched.poll_progress());
            if watched.is_still_watched() {
                kept.push(stream);
            }
        }
        // A sweep that panicked is called again, since its memory still has to be swept.
        sweeps.retain_mut(|sweep| caught(sweep).unwrap_or(true));
        let mut list = lock(&self.list);
        list.sweeps.append(&mut sweeps);
        let more = scanning || !list.sweeps.is_empty() || !list.alarms.is_empty() || !list.scans.is_empty();
        list.streams.finish(kept, more) && !list.closed
    }
}

/// Contains a panic of a waker or of the destructor of wrapped user memory, so that other streams and other memory are
/// still served.
fn caught<R>(work: impl FnOnce() -> R) -> Option<R> {
    let mut done = None;
    contained("a callback of the completion monitor panicked", || done = Some(work()));
    done
}

impl WakeAlarm {
    pub(crate) fn at(&self) -> Instant {
        self.key.0
    }
}

impl Drop for WakeAlarm {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let taken_back = lock(&shared.list).alarms.remove(&self.key);
        drop(taken_back);
    }
}

impl fmt::Debug for WakeAlarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakeAlarm").field("at", &self.key.0).finish_non_exhaustive()
    }
}

impl Drop for CompletionMonitor {
    fn drop(&mut self) {
        lock(&self.shared.list).closed = true;
        self.shared.wake_up.notify_all();
    }
}

impl fmt::Debug for CompletionMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionMonitor").field("name", &self.shared.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        sync::mpsc,
        task::{Context, Waker},
    };

    use super::*;
    use crate::{
        CompletionMode, Stream,
        device::{Device, Emulated},
    };

    /// A loop that selects between a stream's work and another future begins a wait in each round.
    #[test]
    fn dropping_a_wait_cancels_its_alarm() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        stream.set_completion_mode(CompletionMode::Adaptive);
        // The earlier work took an hour, so the end is far away.
        let (began, end) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        stream.0.forecast().found(0, began, Some(end), end);
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let alarms = || lock(&stream.streams().monitor().shared.list).alarms.len();
        let mut cx = Context::from_waker(Waker::noop());
        let mut stays = pin!(stream.completed());
        assert!(stays.as_mut().poll(&mut cx).is_pending());
        assert_eq!(alarms(), 1);
        for _ in 0..100 {
            assert!(pin!(stream.completed()).poll(&mut cx).is_pending());
            assert!(stays.as_mut().poll(&mut cx).is_pending());
            assert_eq!(alarms(), 1, "of the wait that stays");
        }
        drop(go);
        stream.synchronize_blocking().unwrap();
        assert!(stays.poll(&mut cx).is_ready());
        assert_eq!(alarms(), 0);
    }

    #[test]
    fn no_call_blocks_on_the_monitor_thread() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let (sender, receiver) = mpsc::channel();
        let (clone, mut sender) = (stream.clone(), Some(sender));
        let sweep = move || {
            sender.take().into_iter().for_each(|sender| sender.send(clone.synchronize_blocking()).unwrap());
            false
        };
        stream.streams().monitor().sweep(Box::new(sweep));
        let error = receiver.recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("on thread `wakeline-monitor"), "{error}");
        assert!(stream.synchronize_blocking().is_ok());
    }
}
