//! What is done so that a waiter learns of the end: the sources, and when each is used.
//!
//! Only the front of a stream's waiters ([`completion`](super::completion)) makes an effort. It has just asked its event
//! and the work is not done:
//!
//! ```text
//!                    end far away            alarm
//!         ┌─────────────────────────> SLEEP ───────┐
//!   ask ──┤                                        v
//!         ├─ end near, or nothing known ───────> POLL ──── budget spent ────> CALLED
//!         │                                    (or SCAN)                        ^
//!         └─ Quiet, or under a simulation ──────────────────────────────────────┘
//! ```
//!
//! - **POLL**: the waiting task asks its event each time it is polled, and has itself polled again, behind whatever else
//!   its worker has to do. It never blocks. Nothing learns of an end sooner.
//! - **SCAN**: so many tasks poll already that the next would only take their workers' time: the device's
//!   [lookout](super::lookout) asks for it, on its own thread, together with all others.
//! - **SLEEP**: an alarm of the lookout's wakes the task shortly before the end that the
//!   [forecast](super::forecast) gives.
//! - **CALLED**: a host function on a stream at the side of the work's, behind a wait for the event; on the work's own
//!   stream it would hold it up. It needs nothing until it comes, and comes late.

use std::{
    sync::{Arc, atomic::Ordering},
    task::Waker,
    time::{Duration, Instant},
};

use super::{CompletionMode, Stream, Streams, lookout::Scan, mark::Mark};
use crate::{device::emulated, error::Result};

/// How long before an expected end a sleeper is woken, how long past it somebody still looks, and how long where nothing
/// is known.
const LEAD: Duration = Duration::from_micros(250);

/// What one waiter is doing.
#[derive(Debug, Default)]
pub(super) struct Effort {
    /// When it began to wait.
    began: Option<Instant>,
    /// When it last found its work not done.
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
        _seat: Option<Seat>,
    },
    Sleep {
        until: Instant,
    },
    Scan,
    Called,
}

/// One of the polling tasks of a device.
#[derive(Debug)]
struct Seat(Arc<Streams>);

impl Seat {
    fn take(streams: &Arc<Streams>, most: usize) -> Option<Self> {
        let taken = streams.pollers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < most).then_some(n + 1));
        taken.ok().map(|_| Self(streams.clone()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.pollers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Effort {
    /// Asks the device, and if the work is not done sees to it that `waker` is called when it is, or before. True if it
    /// is done.
    pub(super) fn make(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker) -> Result<bool> {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let streams = stream.streams();
        let alone = matches!(self.state, State::Poll { .. }) && streams.pollers.load(Ordering::Relaxed) <= 1;
        let burst = Duration::from_nanos(if alone { tune::get(tune::BURST) } else { 0 });
        loop {
            if stream.ask(mark)? {
                stream.forecast().found(mark.number, began, self.asked, Instant::now());
                return Ok(true);
            }
            let asked = Instant::now();
            self.asked = Some(asked);
            if asked - now >= burst {
                break;
            }
            std::hint::spin_loop();
        }
        self.wait(stream, mark, waker, began)?;
        Ok(false)
    }

    fn wait(&mut self, stream: &Stream, mark: &Arc<Mark>, waker: &Waker, began: Instant) -> Result<()> {
        let now = self.asked.unwrap_or(began);
        match stream.completion_mode() {
            _ if emulated::simulation::current().is_some() => return self.call(stream, mark),
            CompletionMode::Quiet => return self.call(stream, mark),
            CompletionMode::LowLatency => {
                if !matches!(self.state, State::Poll { .. }) {
                    self.poll(Seat::take(stream.streams(), usize::MAX), None);
                }
            }
            CompletionMode::Adaptive => {}
        }
        match &self.state {
            State::Scan | State::Called => return Ok(()),
            State::Sleep { until } if now < *until => return Ok(()),
            State::Poll { until, .. } if until.is_none_or(|until| now < until) => {
                waker.wake_by_ref();
                return Ok(());
            }
            State::Poll { .. } => return self.call(stream, mark),
            State::None | State::Sleep { .. } => {}
        }
        let lead = Duration::from_nanos(tune::get(tune::LEAD));
        let expected = stream.forecast().expect(mark.number, began);
        let (until, sleep) = match expected {
            Some(expected) => {
                let lead = lead + (2 * expected.spread).min(lead);
                (expected.at.max(now) + lead, expected.at.checked_sub(lead).filter(|at| *at > now))
            }
            None => (now + LEAD, None),
        };
        if let Some(until) = sleep {
            stream.streams().lookout().alarm(until, stream, mark.ticket);
            self.state = State::Sleep { until };
        } else if let Some(seat) = Seat::take(stream.streams(), tune::get(tune::SEATS) as usize) {
            self.poll(Some(seat), Some(until));
            waker.wake_by_ref();
        } else {
            let scan = Scan { stream: stream.clone(), mark: mark.clone(), began, until, asked: now };
            stream.streams().lookout().scan(scan);
            self.state = State::Scan;
        }
        Ok(())
    }

    fn poll(&mut self, seat: Option<Seat>, until: Option<Instant>) {
        self.state = State::Poll { until, _seat: seat };
    }

    fn call(&mut self, stream: &Stream, mark: &Arc<Mark>) -> Result<()> {
        self.state = State::Called;
        stream.call_back(mark)
    }

    /// Nothing more to do.
    pub(super) fn end(&mut self) {
        self.state = State::None;
    }
}

pub(super) mod tune {
    use std::sync::OnceLock;
    pub(crate) const SEATS: usize = 0;
    pub(crate) const BURST: usize = 1;
    pub(crate) const LEAD: usize = 2;
    pub(crate) fn get(n: usize) -> u64 {
        static V: OnceLock<[u64; 3]> = OnceLock::new();
        V.get_or_init(|| {
            let of =
                |name: &str, default: u64| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default);
            [of("WL_SEATS", 8), of("WL_BURST", 8000), of("WL_LEAD", 250_000)]
        })[n]
    }
}
