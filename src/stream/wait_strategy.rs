//! [`WaitStrategy`]: how a waiter is notified of the end of its work. Describes the sources of notification, and when
//! each is used.
//!
//! Only the front of a stream's waiters ([`completion`](super::completion)) uses a source. It has just queried its
//! event and found the work not done:
//!
//! ```text
//!                    end far away            alarm
//!         ┌─────────────────────────> SLEEP ───────┐
//!   query ┤                                        v
//!         ├─ end near, or nothing known ───────> POLL ──── overdue ────> CALLED
//!         │                                    (or SCAN)                   ^
//!         └─ Quiet, or under a simulation ────────────────────────────────┘
//! ```
//!
//! - **POLL**: the waiting task queries its event each time it is polled, and schedules itself again, behind the other
//!   tasks of its worker; a task that polls alone queries for some microseconds at a time. No other source detects an
//!   end sooner.
//! - **SCAN**: so many tasks poll that their workers would do little else. The device's [completion
//!   monitor](super::monitor) queries the events for them, on its own thread.
//! - **SLEEP**: an alarm of the completion monitor wakes the task shortly before the end that the
//!   [forecast](super::forecast) predicts.
//! - **CALLED**: a host function on a side stream, behind a wait for the event; on the work's own stream it would delay
//!   later work. It needs no polling, but comes late.
//!
//! # Measurements
//!
//! On an H200 (driver 580.159.04, CUDA 13.0, 16 vCPUs, four workers), 2026-11-29: microseconds beyond the kernel's own
//! time, p50 (p99), and cores kept busy; bench `completion`, `latency`:
//!
//! | one waiter | 20 us | 200 us | 1 ms | 5 ms |
//! |---|---|---|---|---|
//! | a thread that spins in `cuStreamSynchronize` | 7 (13), 1.0 | 8 (20), 1.0 | 10 (21), 1.0 | 14 (32), 1.0 |
//! | the task polls | 7 (18), 1.4 | 8 (20), 1.5 | 10 (21), 1.5 | 14 (40), 1.5 |
//! | a scanning thread | 16 (35), 0.5 | 26 (219), 0.8 | 58 (338), 1.0 | 79 (334), 1.0 |
//! | a callback on a side stream | 47 (87), 0.7 | 83 (461), 0.2 | 165 (654), 0.1 | 254 (786), 0.0 |
//! | `Adaptive` | 8 (16), 1.3 | 8 (18), 1.2 | 12 (58), 0.4 | 13 (45), 0.1 |
//! | `LowLatency` | 8 (19), 1.2 | 8 (20), 1.2 | 10 (20), 1.2 | 11 (22), 1.2 |
//!
//! A sleeping thread takes hundreds of microseconds to wake, whatever wakes it. So the task that is to resume must be
//! awake when its work ends, and a scanner cannot replace it.
//!
//! The next launch after a pause is slow on any thread. So a task that polls for the end of [`LONG`] work also
//! [warms up](Streams::warm_up) the device's launches. Without that `Adaptive` took 21 (52) us at 1 ms and 28 (63) at 5 ms,
//! with it 13 (35) and 15 (37): medians of three alternating passes on that day.
//!
//! Thousands of awaits a second, and microseconds of processor time for each; `... -- many`:
//!
//! | tasks, kernels of | 8, 20 us | 64, 20 us | 64, 200 us | 512, 200 us |
//! |---|---|---|---|---|
//! | the tasks poll | 253, 16 | 386, 9 | 269, 14 | 274, 11 |
//! | a scanning thread | 222, 12 | 398, 10 | 267, 12 | 294, 13 |
//! | callbacks on side streams | 77, 26 | 77, 27 | 40, 34 | 41, 46 |
//! | `Adaptive` | 262, 15 | 400, 9 | 280, 13 | 284, 14 |
//! | tried: up to 2 tasks poll, the others are scanned | 235, 19 | 408, 11 | 273, 17 | 305, 13 |
//! | tried: up to 16 | 261, 15 | 372, 12 | 146, 34 | |
//! | tried: up to 64 | 261, 15 | 397, 9 | 284, 13 | 263, 17 |
//!
//! Either all tasks poll or all are scanned: the two slow each other down. So up to [`MAX_POLLERS`] tasks of a device poll,
//! and while anything is scanned, every new wait is scanned, too.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    task::Waker,
    time::{Duration, Instant},
};

use super::{
    Stream, Streams,
    forecast::{Expected, Forecast},
    mark::Mark,
    monitor::{Monitored, Scan, ScanProgress, WakeAlarm},
    stream::StreamInner,
};
use crate::{
    device::backend::{RawStream, StreamSpec},
    error::Result,
    sync::{MutexGuard, has_more_workers, lock, wake_again},
};

/// The maximum number of tasks per device that poll at once.
const MAX_POLLERS: usize = 64;
/// The bounds of the lead with which a sleeper is woken before the expected end: two threads have to wake, one after
/// the other. The lead is a quarter of the work's duration within these bounds. With a lead of 250 us before an end at
/// 5 ms, one wakeup in a hundred was 190 us late; with 500 us, 50 us late.
const LEAD: (Duration, Duration) = (Duration::from_micros(250), Duration::from_micros(500));
/// After work of this duration, the next launch would be slow: see [`Backend::warm_up`](crate::device::backend::Backend).
/// After even longer work, that does not matter.
const LONG: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(100));
/// How long a task that polls alone queries repeatedly before it yields to its worker: the longer time if it is polled
/// again [`AT_ONCE`], since the worker had nothing else to do, and the runtime has other workers. A yield wakes another worker, to no use: with the short time
/// alone, one waiter kept 1.30 cores busy in place of 1.09.
const BURST: (Duration, Duration) = (Duration::from_micros(8), Duration::from_micros(40));
const AT_ONCE: Duration = Duration::from_micros(2);

/// How the host learns that a stream's work is done: how soon, and at what cost.
///
/// Median (99th percentile) microseconds from the end of a kernel of 20 us, 1 ms and 5 ms, launch included, to the task
/// that awaits it, and cores kept busy, on an H200 with 16 processors. A thread that spins in `cuStreamSynchronize`
/// needs 7 to 14 us and a core (bench `completion`):
///
/// | | 20 us | 1 ms | 5 ms |
/// |---|---|---|---|
/// | `Adaptive` | 8 (16), 1.3 | 12 (58), 0.4 | 13 (45), 0.1 |
/// | `LowLatency` | 8 (19), 1.2 | 10 (20), 1.2 | 11 (22), 1.2 |
/// | `Quiet` | 51 (187), 0.8 | 175 (659), 0.1 | 253 (795), 0.0 |
///
/// Except with `Quiet`, a task that polls for the end of work of 0.5 to 100 ms launches an empty kernel, `wakeline_warm_up`,
/// every 100 us on a stream for this alone: the launch that follows the work is then quick.
///
/// # What a waker may do
/// A waker is called on the thread that detects the completion: that of a polling task, the device's completion
/// monitor, or, from a host function, a worker or the driver's thread. The wakers of runtimes are safe on each: they
/// schedule a task and return. A waker that runs its task at once, inside `wake`, runs it on that thread, and the
/// device waits for it as for a host function. Therefore no wakeline call blocks on the device's own threads:
/// enqueueing into a stream whose queue is full, [`synchronize_blocking`](crate::Stream::synchronize_blocking) and
/// [`Kernel::load_blocking`](crate::kernel::Kernel::load_blocking) return a [`Usage`](crate::ErrorKind::Usage) error
/// there. On the driver's callback thread CUDA permits no calls at all: every call that needs the driver is a `Usage`
/// error there, and driver resources that are dropped there are leaked until the process ends. Such a waker should wake
/// a task of a runtime, which then enqueues the work.
///
/// ```
/// use wakeline::{Flow, Stream, device::{Device, Emulated}, stream::CompletionMode};
///
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// stream.set_completion_mode(CompletionMode::LowLatency);
/// // All streams of a flow:
/// let mut flow = Flow::new("overnight");
/// flow.set_completion_mode(CompletionMode::Quiet);
/// # Ok::<(), wakeline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Sleeps while the predicted end is far away, then polls.
    #[default]
    Adaptive,
    /// Polls as long as there are waiters: the lowest latency, but it may keep a core busy. In a flow, the reader of an
    /// [`Ingress`](crate::Ingress) is also awake when the next message is expected, if they come at a regular pace.
    LowLatency,
    /// Never polls: the device calls back. The cheapest for long work, with the highest latency.
    Quiet,
}

impl Stream {
    /// How the host learns that work on this stream is done.
    pub fn completion_mode(&self) -> CompletionMode {
        match self.0.mode.load(Ordering::Relaxed) {
            1 => CompletionMode::LowLatency,
            2 => CompletionMode::Quiet,
            _ => CompletionMode::Adaptive,
        }
    }

    /// Changes how the host learns that work is done, for waits that begin from now on.
    pub fn set_completion_mode(&self, mode: CompletionMode) {
        self.0.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// Makes the completion monitor poll the stream as long as it has waiters. Called after a waiter has registered.
    pub(super) fn watch(&self) {
        if self.0.watched.is_on() || !self.0.watched.start() {
            return;
        }
        let stream: Weak<StreamInner> = Arc::downgrade(&self.0);
        self.0.streams.monitor().watch(stream);
    }
}

impl StreamInner {
    pub(super) fn forecast(&self) -> MutexGuard<'_, Forecast> {
        lock(&self.forecast)
    }

    /// Enqueues a callback on a side stream, behind a wait for the mark.
    fn request_callback(&self, mark: &Mark) -> Result<()> {
        if !self.completion.arm(mark.ticket) {
            return Ok(());
        }
        let armed = self.side().and_then(|side| {
            let backend = self.device.backend();
            backend.stream_wait(side, mark.event)?;
            let (completion, number) = (self.completion.clone(), mark.ticket);
            backend.host_function(side, &mut Some(Box::new(move || completion.wake(number))))
        });
        if armed.is_err() {
            self.completion.disarm(mark.ticket);
        }
        self.streams.observe(armed)
    }

    fn side(&self) -> Result<RawStream> {
        if let Some(side) = self.side.get() {
            return Ok(*side);
        }
        let backend = self.device.backend();
        let name = format!("{}, signals", self.name);
        let spec = StreamSpec { name, priority: self.driver_stream.priority, non_blocking: true };
        let created = backend.stream_create(&spec)?;
        if self.side.set(created).is_err() {
            backend.stream_destroy(created);
        }
        Ok(*self.side.get().unwrap_or(&created))
    }
}

impl Monitored for StreamInner {
    fn poll_progress(&self) {
        match self.query_progress() {
            // All registered waiters have been failed. This covers waiters that have registered since.
            Err(error) if error.is_device_lost() => self.completion.fail(),
            // After any other error, for example because the stream is being captured, it is queried again.
            Err(error) => {
                tracing::warn!(stream = self.name, error = %format_args!("{error:#}"), "cannot query the progress of a stream")
            }
            Ok(()) => {}
        }
    }

    fn is_still_watched(&self) -> bool {
        // A waiter first registers, and then starts the watch.
        let has_waiters = || self.completion.has_waiters();
        has_waiters() || self.watched.stop(has_waiters)
    }

    fn unwatch(&self) {
        self.watched.forget();
    }

    fn poll_scan(&self, scan: &mut ScanProgress) -> bool {
        let now = Instant::now();
        match self.query(&scan.mark) {
            Ok(true) => {
                self.forecast().found(scan.mark.number, scan.began, Some(scan.last_pending), now);
                false
            }
            // Every pending waiter has been failed.
            Err(error) if error.is_device_lost() => false,
            _ if !self.completion.has_waiters() => false,
            _ if now < scan.until => {
                scan.last_pending = now;
                true
            }
            _ => {
                // If no callback can be enqueued, the tick notifies the waiter.
                let _ = self.request_callback(&scan.mark);
                false
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct WaitStrategy {
    began: Option<Instant>,
    /// When the work was last found not done.
    last_pending: Option<Instant>,
    source: NotifySource,
}

#[derive(Debug, Default)]
enum NotifySource {
    #[default]
    None,
    Poll {
        /// When to stop polling; `None` to poll to the end.
        until: Option<Instant>,
        _slot: PollSlot,
    },
    Sleep {
        until: Instant,
        _alarm: WakeAlarm,
    },
    Scan,
    Called,
}

#[derive(Debug)]
struct PollSlot {
    streams: Arc<Streams>,
    /// True if it counts against the limit.
    limited: bool,
}

impl PollSlot {
    fn take(streams: &Arc<Streams>, max: Option<usize>) -> Option<Self> {
        if let Some(max) = max {
            let more = |taken: usize| (taken < max).then_some(taken + 1);
            streams.poll_slots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        }
        streams.pollers.fetch_add(1, Ordering::Relaxed);
        Some(Self { streams: streams.clone(), limited: max.is_some() })
    }
}

impl Drop for PollSlot {
    fn drop(&mut self) {
        self.streams.pollers.fetch_sub(1, Ordering::Relaxed);
        self.streams.poll_slots.fetch_sub(usize::from(self.limited), Ordering::Relaxed);
    }
}

impl WaitStrategy {
    /// Queries the device. True if the work is done; if not, `waker` will be called when it is done or earlier.
    pub(super) fn arrange(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker) -> Result<bool> {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let alone =
            matches!(self.source, NotifySource::Poll { .. }) && stream.streams().pollers.load(Ordering::Relaxed) <= 1;
        let at_once = alone && self.last_pending.is_some_and(|last| now - last < AT_ONCE);
        let burst = if at_once && has_more_workers() { BURST.1 } else { BURST.0 };
        loop {
            let querying = Instant::now();
            let is_done =
                if self.last_pending.is_none() { stream.0.query_first(mark)? } else { stream.0.query(mark)? };
            if is_done {
                stream.0.forecast().found(mark.number, began, self.last_pending, Instant::now());
                return Ok(true);
            }
            self.last_pending = Some(querying);
            if !alone || querying - now >= burst {
                break;
            }
        }
        if matches!(self.source, NotifySource::Poll { .. }) && (LONG.0..LONG.1).contains(&(now - began)) {
            stream.streams().warm_up(now);
        }
        self.wait(stream, mark, waker, began)?;
        Ok(false)
    }

    /// Chooses what to do next for work that is not done.
    fn wait(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker, began: Instant) -> Result<()> {
        let mode = match stream.device().backend().simulation() {
            // A simulation runs in virtual time.
            Some(_) => CompletionMode::Quiet,
            None => stream.completion_mode(),
        };
        if matches!(self.source, NotifySource::None) {
            // In a forked child process, no worker would signal the end.
            stream.device().check_process()?;
        }
        let now = self.last_pending.unwrap_or(began);
        match (&self.source, mode) {
            (NotifySource::Scan | NotifySource::Called, _) => return Ok(()),
            (_, CompletionMode::Quiet) => return self.call(stream, mark),
            (NotifySource::Poll { .. }, CompletionMode::LowLatency) => {}
            (_, CompletionMode::LowLatency) => {
                if let Some(slot) = PollSlot::take(stream.streams(), None) {
                    self.source = NotifySource::Poll { until: None, _slot: slot };
                }
            }
            (NotifySource::Sleep { until, .. }, _) if now < *until => return Ok(()),
            (NotifySource::Poll { until, .. }, _) if until.is_none_or(|until| now < until) => {}
            (NotifySource::Poll { .. }, _) => return self.call(stream, mark),
            (NotifySource::None | NotifySource::Sleep { .. }, _) => {
                return self.choose(stream, mark, waker, began, now);
            }
        }
        if matches!(self.source, NotifySource::Poll { .. }) {
            wake_again(waker);
        }
        Ok(())
    }

    /// `Adaptive`, at the first query or after an alarm.
    fn choose(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker, began: Instant, now: Instant) -> Result<()> {
        let monitor = stream.streams().monitor();
        let expected = stream.0.forecast().expect(mark.number, began);
        let until = match expected {
            Some(Expected { at, spread }) => {
                let lead = (at.saturating_duration_since(began) / 4).clamp(LEAD.0, LEAD.1);
                let lead = lead + (2 * spread).min(lead);
                if let Some(from) = at.checked_sub(lead)
                    && from > now
                {
                    let Some(alarm) = monitor.alarm(from, stream.0.completion.clone(), mark.ticket) else {
                        return self.call(stream, mark);
                    };
                    self.source = NotifySource::Sleep { until: from, _alarm: alarm };
                    return Ok(());
                }
                at.max(now) + lead
            }
            None => now + LEAD.0,
        };
        if !monitor.scans()
            && let Some(slot) = PollSlot::take(stream.streams(), Some(MAX_POLLERS))
        {
            self.source = NotifySource::Poll { until: Some(until), _slot: slot };
            wake_again(waker);
            return Ok(());
        }
        self.source = NotifySource::Scan;
        let progress = ScanProgress { mark: mark.clone(), began, until, last_pending: now };
        let scan = Scan { stream: stream.0.clone(), progress };
        if monitor.scan(scan) { Ok(()) } else { self.call(stream, mark) }
    }

    fn call(&mut self, stream: &Stream, mark: &Arc<Mark>) -> Result<()> {
        self.source = NotifySource::Called;
        stream.0.request_callback(mark)
    }

    pub(super) fn end(&mut self) {
        self.source = NotifySource::None;
    }
}
