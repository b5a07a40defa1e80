//! How a waiter is notified of the end of its work: the sources of notification, and when each is used.
//!
//! Only the front of a stream's waiters ([`completion`](super::completion)) uses a source. It has just queried its
//! event, and the work is not done:
//!
//! ```text
//!                    end far away            alarm
//!         ┌─────────────────────────> SLEEP ───────┐
//!   ask ──┤                                        v
//!         ├─ end near, or nothing known ───────> POLL ──── overdue ────> CALLED
//!         │                                    (or SCAN)                   ^
//!         └─ Quiet, or under a simulation ────────────────────────────────┘
//! ```
//!
//! - **POLL**: the waiting task queries its event each time it is polled, and schedules itself again, behind the other
//!   tasks of its worker; a task that polls alone queries for some microseconds at a time. Nothing detects an end
//!   sooner.
//! - **SCAN**: so many tasks poll that their workers would do little else. The device's [completion
//!   monitor](super::monitor) queries the events for them, on its own thread.
//! - **SLEEP**: an alarm of the completion monitor wakes the task shortly before the end that the
//!   [forecast](super::forecast) predicts.
//! - **CALLED**: a host function on a side stream, behind a wait for the event; on the work's own stream it would delay
//!   that. It needs no polling, but comes late.
//!
//! # Measurements
//!
//! On an H200 (driver 580.159.04, CUDA 13.0, 16 vCPUs, four workers): microseconds beyond the kernel's own time, p50
//! (p99), and cores kept busy; bench `completion`, `latency`:
//!
//! | one waiter | 20 us | 200 us | 1 ms | 5 ms |
//! |---|---|---|---|---|
//! | a thread that spins in `cuStreamSynchronize` | 6 (12), 1.0 | 6 (11), 1.0 | 6 (12), 1.0 | 7 (13), 1.0 |
//! | the task polls | 6 (12), 1.4 | 7 (10), 1.5 | 7 (10), 1.5 | 7 (12), 1.4 |
//! | a scanning thread | 12 (22), 0.4 | 24 (355), 0.8 | 161 (266), 1.0 | 181 (235), 1.0 |
//! | a callback on a side stream | 38 (797), 0.3 | 237 (892), 0.1 | 617 (961), 0.1 | 679 (1032), 0.0 |
//! | `Adaptive` | 6 (12), 1.3 | 7 (15), 1.2 | 17 (47), 0.3 | 17 (31), 0.1 |
//! | `LowLatency` | 6 (11), 1.2 | 7 (13), 1.2 | 7 (16), 1.2 | 7 (17), 1.2 |
//!
//! A thread that sleeps takes hundreds of microseconds to wake, whatever wakes it. So the task that is to resume must
//! be awake when its work ends, and a scanner cannot replace it. The 10 us that `Adaptive` loses at 1 and 5 ms it loses
//! at the next launch, not here (a launch takes 12 us in place of 3 on a worker that did not launch last); from the end
//! to the waiter it takes 4.5 us, as constant polling does.
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
//! Either all tasks poll or all are scanned: the two slow each other down. So up to [`SEATS`] tasks of a device poll,
//! and while anything is scanned, every new wait is scanned, too.

use std::{
    sync::{Arc, atomic::Ordering},
    task::Waker,
    time::{Duration, Instant},
};

use super::{
    CompletionMode, Stream, Streams,
    forecast::Expected,
    mark::Mark,
    monitor::{Alarm, Scan},
};
use crate::{error::Result, sync::wake_again};

/// How many tasks of one device poll at once.
const SEATS: usize = 64;
/// How long before the expected end a sleeper is woken: two threads have to wake, one after the other. A quarter of the
/// work's duration, within these bounds: with 250 us before an end at 5 ms, one in a hundred came 190 us late, with 500
/// us 50.
const LEAD: (Duration, Duration) = (Duration::from_micros(250), Duration::from_micros(500));
/// How long a task that polls alone queries repeatedly before it yields to its worker.
const BURST: Duration = Duration::from_micros(8);

#[derive(Debug, Default)]
pub(super) struct WaitStrategy {
    began: Option<Instant>,
    /// When the work was last found not done.
    asked: Option<Instant>,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    None,
    Poll {
        /// Until when; `None`: to the end.
        until: Option<Instant>,
        _seat: PollSlot,
    },
    Sleep {
        until: Instant,
        _alarm: Alarm,
    },
    Scan,
    Called,
}

#[derive(Debug)]
struct PollSlot {
    streams: Arc<Streams>,
    /// Whether it counts against the limit.
    limited: bool,
}

impl PollSlot {
    fn take(streams: &Arc<Streams>, most: Option<usize>) -> Option<Self> {
        if let Some(most) = most {
            let more = |taken: usize| (taken < most).then_some(taken + 1);
            streams.seats.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        }
        streams.pollers.fetch_add(1, Ordering::Relaxed);
        Some(Self { streams: streams.clone(), limited: most.is_some() })
    }
}

impl Drop for PollSlot {
    fn drop(&mut self) {
        self.streams.pollers.fetch_sub(1, Ordering::Relaxed);
        self.streams.seats.fetch_sub(usize::from(self.limited), Ordering::Relaxed);
    }
}

impl WaitStrategy {
    /// Queries the device, and if the work is not done arranges for `waker` to be called when it is, or before. True if
    /// the work is done.
    pub(super) fn make(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker) -> Result<bool> {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let alone = matches!(self.state, State::Poll { .. }) && stream.streams().pollers.load(Ordering::Relaxed) <= 1;
        loop {
            let asking = Instant::now();
            let is_done = if self.asked.is_none() { stream.ask_first(mark)? } else { stream.ask(mark)? };
            if is_done {
                stream.forecast().found(mark.number, began, self.asked, Instant::now());
                return Ok(true);
            }
            self.asked = Some(asking);
            if !alone || asking - now >= BURST {
                break;
            }
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
        if matches!(self.state, State::None) {
            // In a forked child process no worker would ever signal the end.
            stream.device().check_process()?;
        }
        let now = self.asked.unwrap_or(began);
        match (&self.state, mode) {
            (State::Scan | State::Called, _) => return Ok(()),
            (_, CompletionMode::Quiet) => return self.call(stream, mark),
            (State::Poll { .. }, CompletionMode::LowLatency) => {}
            (_, CompletionMode::LowLatency) => {
                if let Some(seat) = PollSlot::take(stream.streams(), None) {
                    self.state = State::Poll { until: None, _seat: seat };
                }
            }
            (State::Sleep { until, .. }, _) if now < *until => return Ok(()),
            (State::Poll { until, .. }, _) if until.is_none_or(|until| now < until) => {}
            (State::Poll { .. }, _) => return self.call(stream, mark),
            (State::None | State::Sleep { .. }, _) => return self.choose(stream, mark, waker, began, now),
        }
        if matches!(self.state, State::Poll { .. }) {
            wake_again(waker);
        }
        Ok(())
    }

    /// `Adaptive`, at the first query or after an alarm.
    fn choose(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker, began: Instant, now: Instant) -> Result<()> {
        let monitor = stream.streams().monitor();
        let expected = stream.forecast().expect(mark.number, began);
        let until = match expected {
            Some(Expected { at, spread }) => {
                let lead = (at.saturating_duration_since(began) / 4).clamp(LEAD.0, LEAD.1);
                let lead = lead + (2 * spread).min(lead);
                if let Some(from) = at.checked_sub(lead)
                    && from > now
                {
                    let Some(alarm) = monitor.alarm(from, stream, mark.ticket) else { return self.call(stream, mark) };
                    self.state = State::Sleep { until: from, _alarm: alarm };
                    return Ok(());
                }
                at.max(now) + lead
            }
            None => now + LEAD.0,
        };
        if !monitor.scans()
            && let Some(seat) = PollSlot::take(stream.streams(), Some(SEATS))
        {
            self.state = State::Poll { until: Some(until), _seat: seat };
            wake_again(waker);
            return Ok(());
        }
        self.state = State::Scan;
        let scan = Scan { stream: stream.clone(), mark: mark.clone(), began, until, asked: now };
        if monitor.scan(scan) { Ok(()) } else { self.call(stream, mark) }
    }

    fn call(&mut self, stream: &Stream, mark: &Arc<Mark>) -> Result<()> {
        self.state = State::Called;
        stream.call_back(mark)
    }

    pub(super) fn end(&mut self) {
        self.state = State::None;
    }
}
