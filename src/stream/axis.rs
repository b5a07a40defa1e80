//! [`Axes`]: when, on the host's clock, a device passed an event.
//!
//! A backend whose events have the host's time says it itself. A CUDA device has a clock of its own, and only tells the
//! time between two of its events. So now and then an anchor is recorded: an event on an idle stream, polled between two
//! readings of the host's clock, so that its time on the host's axis is known to some microseconds. Other events are
//! placed by their distance from the newest anchor, at the rate at which the device's clock went between the oldest
//! and the newest one.
//!
//! ```text
//!   host     ──┬──────────────────────┬───────────────x──        x = anchor + distance · rate
//!              │ anchor               │ anchor        │
//!   device   ──┴──────────────────────┴───────────────e──
//! ```
//!
//! Measured (`guide/facts.md`): the readings lie 6 us apart, and the clocks drift by 24 us in 5 s.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant as SystemInstant},
};

use tokio::time::Instant;

use super::event_pool::{EventPool, PooledEvent};
use crate::device::backend::{RawEvent, RawStream, StreamSpec};

/// The time between two anchors.
const EVERY: Duration = Duration::from_millis(250);
/// Tries for an anchor, of which the one with the closest readings counts.
const TRIES: u32 = 16;
/// An anchor with readings farther apart is not used if there is a recent one.
const WIDE: Duration = Duration::from_micros(10);
/// An anchor that is so old is replaced in any case: the clocks drift by 24 us in 5 s.
const OLD: Duration = Duration::from_secs(2);
/// Polls of an event for an anchor: some milliseconds.
const POLLS: u32 = 10_000;
/// The shortest time over which a rate is measured.
const BASELINE: Duration = Duration::from_secs(2);
/// Anchors that are kept, for the rate.
const ANCHORS: usize = 16;

/// The axes of all devices.
#[derive(Default)]
pub(super) struct Axes {
    all: Vec<Axis>,
}

struct Axis {
    pool: Arc<EventPool>,
    stream: RawStream,
    anchors: VecDeque<Anchor>,
    /// The host's nanoseconds in one of the device's.
    rate: f64,
    tried: SystemInstant,
}

struct Anchor {
    event: PooledEvent,
    at: SystemInstant,
}

impl Axes {
    /// Records anchors where they are due.
    pub(super) fn adjust(&mut self) {
        self.all.iter_mut().filter(|axis| axis.tried.elapsed() >= EVERY).for_each(Axis::add_anchor);
    }

    /// When the device passed an event, which it has passed, and until when at most.
    pub(super) fn instant(&mut self, pool: &EventPool, event: RawEvent) -> Option<(Instant, Instant)> {
        if let Some(known) = pool.backend.event_instant(event) {
            return known.ok().map(|exact| (exact, exact));
        }
        let at = match self.all.iter().position(|axis| Arc::ptr_eq(&axis.pool.backend, &pool.backend)) {
            Some(known) => known,
            None => {
                self.all.push(Axis::new(pool)?);
                self.all.len() - 1
            }
        };
        let seen = SystemInstant::now();
        self.all[at].instant(event).map(|exact| (Instant::from_std(exact), Instant::from_std(seen)))
    }
}

impl Axis {
    fn new(pool: &EventPool) -> Option<Self> {
        let spec = StreamSpec { name: "anchors".into(), priority: 0, non_blocking: true };
        let stream = pool.backend.stream_create(&spec).ok()?;
        let pool = EventPool::new(&pool.backend);
        let mut axis = Self { pool, stream, anchors: VecDeque::new(), rate: 1.0, tried: SystemInstant::now() };
        axis.add_anchor();
        Some(axis)
    }

    fn add_anchor(&mut self) {
        self.tried = SystemInstant::now();
        // Where one fails, or is not passed in time, the others are not either.
        let tries = (0..TRIES).map_while(|_| self.bracket());
        let Some((width, anchor)) = tries.min_by_key(|(width, _)| *width) else { return };
        if width > WIDE && self.anchors.back().is_some_and(|last| last.at.elapsed() < OLD) {
            return;
        }
        if self.anchors.len() == ANCHORS {
            self.anchors.pop_front();
        }
        self.anchors.push_back(anchor);
        self.rate = self.measured_rate().unwrap_or(self.rate);
    }

    /// An event, and how far apart the readings around it were.
    fn bracket(&self) -> Option<(Duration, Anchor)> {
        let event = self.pool.take().ok()?;
        let before = SystemInstant::now();
        self.pool.backend.event_record(event.raw, self.stream).ok()?;
        for _ in 0..POLLS {
            if self.pool.backend.event_is_passed(event.raw).ok()? {
                let width = before.elapsed();
                return Some((width, Anchor { event, at: before + width / 2 }));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// By the last anchor: each comparison with one is a call of the driver.
    fn instant(&self, event: RawEvent) -> Option<SystemInstant> {
        let anchor = self.anchors.back()?;
        let offset = self.offset(anchor, event)? as f64 * self.rate;
        let nanos = Duration::from_nanos(offset.abs() as u64);
        if offset >= 0.0 { anchor.at.checked_add(nanos) } else { anchor.at.checked_sub(nanos) }
    }

    /// The rate between the first and the last anchor.
    fn measured_rate(&self) -> Option<f64> {
        let (first, last) = (self.anchors.front()?, self.anchors.back()?);
        let host = last.at.saturating_duration_since(first.at);
        // The readings' width is an error of the rate, the smaller the farther apart they are.
        if host < BASELINE {
            return None;
        }
        let device = self.offset(first, last.event.raw).filter(|device| *device > 0)?;
        Some(host.as_nanos() as f64 / device as f64)
    }

    /// Nanoseconds on the device from an anchor to an event.
    fn offset(&self, anchor: &Anchor, event: RawEvent) -> Option<i64> {
        let backend = &self.pool.backend;
        let nanos = |took: Duration| i64::try_from(took.as_nanos()).unwrap_or(i64::MAX);
        // Negative times are given as zero.
        match backend.event_elapsed(anchor.event.raw, event).ok()? {
            Duration::ZERO => backend.event_elapsed(event, anchor.event.raw).ok().map(|took| -nanos(took)),
            took => Some(nanos(took)),
        }
    }
}

impl Drop for Axis {
    fn drop(&mut self) {
        self.pool.backend.stream_destroy(self.stream);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::device::{backend::Backend, check::mock::MockBackend};

    const MS: Duration = Duration::from_millis(1);

    /// Each call of the driver that compares two events counts: another thread may launch without pause.
    #[test]
    fn an_event_is_compared_with_the_newest_anchor_only() {
        let device = Arc::new(MockBackend::default());
        device.answer.store(true, Ordering::Relaxed);
        let pool = EventPool::new(&(device.clone() as Arc<dyn Backend>));
        let mut axis = Axis::new(&pool).unwrap();
        let newest = axis.anchors[0].at + 10 * MS;
        axis.anchors.push_back(Anchor { event: pool.take().unwrap(), at: newest });
        let event = pool.take().unwrap();
        *device.elapsed.lock() = MS;
        let before = device.compared.load(Ordering::Relaxed);
        assert_eq!(axis.instant(event.raw), Some(newest + MS));
        assert_eq!(device.compared.load(Ordering::Relaxed) - before, 1);
        // Negative times are given as zero: the other way round.
        *device.elapsed.lock() = Duration::ZERO;
        assert_eq!(axis.instant(event.raw), Some(newest));
        assert_eq!(device.compared.load(Ordering::Relaxed) - before, 3);
    }
}
