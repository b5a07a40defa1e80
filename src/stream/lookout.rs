//! The lookout of a device: one thread, while anybody waits there, that looks where waiting tasks do not.
//!
//! - **Alarms**: it wakes a task shortly before the end of its work is expected.
//! - **Scans**: where many wait, it asks their events for them, one after the other, until each is done or overdue.
//! - **The beat**: a callback may never come. A kernel that traps ends the device, and of all that was enqueued behind it
//!   the driver runs nothing, not even the host functions (measured on an H200: half a second later neither had run, and
//!   the fault showed only because somebody asked the event). So while anything waits, each of its streams is asked every
//!   [`INTERVAL`]; a fault then resolves everybody, and whatever was lost on the way costs an interval, not for ever. The
//!   same beat sweeps memory that was parked until its uses are over.
//!
//! It sleeps until the next alarm or beat unless it scans. Nothing waits: no thread. It ends at a beat that finds nothing
//! to do and is made again when it is needed. A device that is run by the [`Simulation`](crate::device::Simulation) whose task
//! waits has no thread at all: its loop keeps the beat, in virtual time, and there are no alarms and no scans.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Inner, Stream, completion::Completion, mark::Mark, watch::Visits};
use crate::{
    device::{Device, backend::Backend, thread::DeviceThread},
    error::said,
    sync::{Condvar, Level, Mutex, MutexGuard, contained, lock, log},
    thread_name::thread_name,
};

/// How often a stream that somebody waits for is asked. A query costs 1.25 us on an H200; the driver itself takes some
/// 590 ms to notice a trap.
const INTERVAL: Duration = Duration::from_millis(50);

/// Called at each beat until it returns false.
type Sweep = Box<dyn FnMut() -> bool + Send>;

/// See the [module](self).
pub(crate) struct Lookout {
    backend: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    list: Mutex<List>,
    /// There is something new in the list: for a thread that scans and would rather not lock it.
    news: AtomicBool,
    change: Condvar,
    /// It is asked for somebody.
    scanning: AtomicBool,
}

#[derive(Default)]
struct List {
    /// The streams that are asked at every beat, and whether one is kept.
    visits: Visits<Weak<Inner>>,
    sweeps: Vec<Sweep>,
    alarms: BTreeMap<AlarmKey, (Arc<Completion>, u64)>,
    next_alarm: u64,
    scans: Vec<Scan>,
    /// Until when the thread sleeps; `None` while it is awake.
    asleep: Option<Instant>,
    closed: bool,
}

/// When, and a number that no other alarm has.
type AlarmKey = (Instant, u64);

/// An alarm that was set. Taken back when this is dropped.
pub(super) struct Alarm {
    shared: Weak<Shared>,
    key: AlarmKey,
}

pub(super) struct Scan {
    pub(super) stream: Stream,
    pub(super) mark: Arc<Mark>,
    /// When the wait began.
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// When it was last found not done.
    pub(super) asked: Instant,
}

impl Lookout {
    pub(super) fn new(device: &Device) -> Self {
        let shared = Shared {
            name: thread_name(format!("wakeline-lookout-{}", device.name())),
            list: Mutex::at(Level::Lookout, List::default()),
            news: AtomicBool::new(false),
            change: Condvar::new(),
            scanning: AtomicBool::new(false),
        };
        Self { backend: device.backend().clone(), shared: Arc::new(shared) }
    }

    /// From now on, as long as it has waiters, the stream is asked at every beat. Called after the waiter has registered.
    pub(super) fn watch(stream: &Stream) {
        if stream.0.watched.is_on() || !stream.0.watched.start() {
            return;
        }
        let lookout = stream.0.streams.lookout();
        let mut list = lock(&lookout.shared.list);
        list.visits.add(Arc::downgrade(&stream.0));
        lookout.begin(list);
    }

    /// From now on, until it returns false, `sweep` is called at every beat.
    pub(crate) fn sweep(&self, sweep: Sweep) {
        let mut list = lock(&self.shared.list);
        list.sweeps.push(sweep);
        self.begin(list);
    }

    /// Wakes the waiters of `ticket` at that time, unless what it returns is dropped before. `None` if it cannot.
    pub(super) fn alarm(&self, at: Instant, stream: &Stream, ticket: u64) -> Option<Alarm> {
        let mut list = lock(&self.shared.list);
        let key = (at, list.next_alarm);
        list.next_alarm += 1;
        list.alarms.insert(key, (stream.0.completion.clone(), ticket));
        self.shared.news.store(true, Ordering::Release);
        let early = list.asleep.is_some_and(|until| at < until);
        let begun = self.begin(list);
        if early {
            self.shared.change.notify_one();
        }
        // Where no beat can be kept, this takes it back.
        let alarm = Alarm { shared: Arc::downgrade(&self.shared), key };
        begun.then_some(alarm)
    }

    /// True while it asks for anybody.
    pub(super) fn scans(&self) -> bool {
        self.shared.scanning.load(Ordering::Relaxed)
    }

    /// Asks the mark until it is done; once it is overdue, it is left to a callback. False if it cannot.
    pub(super) fn scan(&self, scan: Scan) -> bool {
        let mut list = lock(&self.shared.list);
        list.scans.push(scan);
        self.shared.scanning.store(true, Ordering::Relaxed);
        self.shared.news.store(true, Ordering::Release);
        let asleep = list.asleep.take().is_some();
        let begun = self.begin(list);
        if asleep {
            self.shared.change.notify_one();
        }
        begun
    }

    /// False if no beat can be kept.
    fn begin(&self, mut list: MutexGuard<'_, List>) -> bool {
        if !list.visits.begin() {
            return true;
        }
        drop(list);
        let shared = self.shared.clone();
        if let Some(simulation) = self.backend.simulation() {
            simulation.on_idle_every(INTERVAL, Box::new(move || shared.beat(false)));
            return true;
        }
        // A waker that panics ends a round and not the lookout.
        let keep = move || {
            let _device = DeviceThread::enter();
            while let Err(panic) = catch_unwind(AssertUnwindSafe(|| shared.run())) {
                let _ = said(panic);
            }
        };
        let Err(error) = std::thread::Builder::new().name(self.shared.name.clone()).spawn(keep) else { return true };
        // A subscriber is user code.
        contained("a subscriber panicked", || {
            log(
                move || tracing::error!(%error, "no thread for the lookout: a fault may go unnoticed until the next call"),
            );
        });
        let mut list = lock(&self.shared.list);
        // The next that comes tries again.
        let unwatched = list.visits.abandon();
        // What they hold is not dropped under the lock.
        let gone = (std::mem::take(&mut list.alarms), std::mem::take(&mut list.scans));
        drop(list);
        drop(gone);
        unwatched.iter().filter_map(Weak::upgrade).for_each(|stream| stream.watched.forget());
        false
    }
}

impl Shared {
    /// The thread.
    fn run(&self) {
        let mut scans: Vec<Scan> = Vec::new();
        let mut beat = Instant::now() + INTERVAL;
        let mut next = beat;
        loop {
            let now = Instant::now();
            if now >= beat {
                if !self.beat(!scans.is_empty()) {
                    return;
                }
                beat = now + INTERVAL;
            }
            if !scans.is_empty() && now < next && !self.news.load(Ordering::Acquire) {
                // One that has panicked has been told: its waiter looks itself.
                scans.retain_mut(|scan| caught(|| scan.goes_on()).unwrap_or(false));
                continue;
            }
            let mut list = lock(&self.list);
            if list.closed {
                return;
            }
            self.news.store(false, Ordering::Release);
            scans.append(&mut list.scans);
            self.scanning.store(!scans.is_empty(), Ordering::Relaxed);
            let mut due = Vec::new();
            while let Some(first) = list.alarms.first_entry()
                && first.key().0 <= now
            {
                due.push(first.remove());
            }
            next = list.alarms.first_key_value().map_or(beat, |((at, _), _)| beat.min(*at));
            if due.is_empty() && scans.is_empty() {
                list.asleep = Some(next);
                let nap = next.saturating_duration_since(Instant::now());
                list = self.change.wait_timeout(list, nap);
                list.asleep = None;
            }
            drop(list);
            for (completion, ticket) in due {
                caught(|| completion.wake(ticket));
            }
        }
    }

    /// One beat. False if there is nothing left to watch: then the beat has ended.
    fn beat(&self, scanning: bool) -> bool {
        // In a simulation its loop is here.
        let _device = DeviceThread::enter();
        let (streams, mut sweeps) = {
            let mut list = lock(&self.list);
            (list.visits.take(), std::mem::take(&mut list.sweeps))
        };
        let streams: Vec<Stream> = streams.iter().filter_map(Weak::upgrade).map(Stream).collect();
        let mut kept = Vec::new();
        for stream in streams {
            let look = || match stream.look() {
                // Everybody has been told, but for whoever came in between.
                Err(error) if error.is_device_lost() => stream.0.completion.fail(),
                // Of another kind: somebody captures the stream, say. It is asked again.
                Err(error) => tracing::warn!(stream = stream.name(), %error, "a stream does not say how far it is"),
                Ok(()) => {}
            };
            caught(look);
            // A waiter registers first and asks for the watch then.
            let is_needed = || stream.0.completion.has_waiters();
            if is_needed() || stream.0.watched.stop(is_needed) {
                kept.push(Arc::downgrade(&stream.0));
            }
        }
        // One that has panicked is asked again: what it sweeps is still there.
        sweeps.retain_mut(|sweep| caught(sweep).unwrap_or(true));
        let mut list = lock(&self.list);
        list.sweeps.append(&mut sweeps);
        let more = scanning || !list.sweeps.is_empty() || !list.alarms.is_empty() || !list.scans.is_empty();
        list.visits.finish(kept, more) && !list.closed
    }
}

/// A waker, or the drop of what a user's memory was wrapped with, may panic: the others' streams and memory are still
/// looked after.
fn caught<R>(work: impl FnOnce() -> R) -> Option<R> {
    let mut done = None;
    contained("something that the lookout has called panicked", || done = Some(work()));
    done
}

impl Scan {
    fn goes_on(&mut self) -> bool {
        let now = Instant::now();
        match self.stream.ask(&self.mark) {
            Ok(true) => {
                self.stream.forecast().found(self.mark.number, self.began, Some(self.asked), now);
                false
            }
            // Everybody has been told.
            Err(error) if error.is_device_lost() => false,
            _ if !self.stream.0.completion.has_waiters() => false,
            _ if now < self.until => {
                self.asked = now;
                true
            }
            _ => {
                // What cannot be called back is left to the beat.
                let _ = self.stream.call_back(&self.mark);
                false
            }
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let taken_back = lock(&shared.list).alarms.remove(&self.key);
        drop(taken_back);
    }
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alarm").field("at", &self.key.0).finish_non_exhaustive()
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        lock(&self.shared.list).closed = true;
        self.shared.change.notify_all();
    }
}

impl fmt::Debug for Lookout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookout").field("name", &self.shared.name).finish_non_exhaustive()
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
        CompletionMode,
        device::{Device, Emulated},
    };

    /// A loop that selects between the work of a stream and something else begins a wait in each round.
    #[test]
    fn the_alarm_of_a_wait_that_is_given_up_is_taken_back() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        stream.set_completion_mode(CompletionMode::Adaptive);
        // What was done before took an hour, so the end is far away.
        let (began, end) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        stream.forecast().found(0, began, Some(end), end);
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        let alarms = || lock(&stream.streams().lookout().shared.list).alarms.len();
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
    fn its_thread_is_one_that_no_call_waits_on() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let (tell, receiver) = mpsc::channel();
        let (asks, mut waits) = (stream.clone(), Some(tell));
        let sweep = move || {
            waits.take().into_iter().for_each(|tell| tell.send(asks.synchronize_blocking()).unwrap());
            false
        };
        stream.streams().lookout().sweep(Box::new(sweep));
        let error = receiver.recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("on thread `wakeline-lookout"), "{error}");
        assert!(stream.synchronize_blocking().is_ok());
    }
}
