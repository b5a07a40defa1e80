//! [`TraceClock`]: the time of events; [`TraceAxis`]: the same as nanoseconds of the host's monotonic clock.
//!
//! An event reads the processor's counter ([`Ticks`]), which costs less than half of what the system's clock does. Where
//! tokio's clock is paused, also in a simulation, it is the clock of the devices, too: events then have its times.

use std::{
    sync::LazyLock,
    time::{Duration, Instant as SystemInstant},
};

use tokio::time::Instant;

use crate::{clock, device::ticks::Ticks};

/// Readings of both clocks, the closest of which count.
const TRIES: usize = 16;
/// Some time before the process began: the zero of all axes. A paused clock may have begun before the first reading.
static ZERO: LazyLock<SystemInstant> = LazyLock::new(|| {
    let now = SystemInstant::now();
    now.checked_sub(Duration::from_secs(3600)).unwrap_or(now)
});

/// Nanoseconds on the axis of all traces.
pub(crate) fn host_nanos(at: SystemInstant) -> u64 {
    u64::try_from(at.saturating_duration_since(*ZERO).as_nanos()).unwrap_or(u64::MAX)
}

/// The clock of one flow's events.
#[derive(Debug)]
pub(crate) enum TraceClock {
    Counter(Reading),
    /// Tokio's, which is paused.
    Paused,
}

/// The counter and the system's clock at one instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    ticks: u64,
    nanos: u64,
}

impl Reading {
    fn now() -> Self {
        let tries = (0..TRIES).map(|_| {
            let before = Ticks::now();
            let nanos = host_nanos(SystemInstant::now());
            let width = Ticks::now().since(before);
            (width, Self { ticks: before.count() + width / 2, nanos })
        });
        tries.min_by_key(|(width, _)| *width).map_or(Self { ticks: 0, nanos: 0 }, |(_, reading)| reading)
    }
}

impl TraceClock {
    /// The clock for a flow that begins here. Tokio's clock counts as paused if it stands still for a moment.
    pub(crate) fn here() -> Self {
        let before = clock::now();
        let real = SystemInstant::now();
        while real.elapsed() < Duration::from_micros(1) {
            std::hint::spin_loop();
        }
        if clock::now() == before { Self::Paused } else { Self::Counter(Reading::now()) }
    }

    #[inline]
    pub(crate) fn now(&self) -> u64 {
        match self {
            Self::Counter(_) => Ticks::now().count(),
            Self::Paused => paused_now(),
        }
    }

    /// Now, as nanoseconds of the axis.
    pub(crate) fn host_now(&self) -> u64 {
        match self {
            Self::Counter(_) => host_nanos(SystemInstant::now()),
            Self::Paused => paused_now(),
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        matches!(self, Self::Paused)
    }

    pub(crate) fn axis(&self) -> TraceAxis {
        match self {
            Self::Paused => TraceAxis { from: 0, nanos: 0, rate: 1.0 },
            Self::Counter(Reading { ticks, nanos }) => {
                let now = Reading::now();
                let (ticks_between, nanos_between) =
                    (now.ticks.saturating_sub(*ticks), now.nanos.saturating_sub(*nanos));
                let rate = if ticks_between == 0 { 1.0 } else { nanos_between as f64 / ticks_between as f64 };
                TraceAxis { from: *ticks, nanos: *nanos, rate }
            }
        }
    }
}

#[cold]
fn paused_now() -> u64 {
    tokio_nanos(clock::now())
}

/// Nanoseconds of a time of tokio's clock.
pub(crate) fn tokio_nanos(at: Instant) -> u64 {
    host_nanos(at.into_std())
}

/// From a [`TraceClock`]'s times to nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceAxis {
    from: u64,
    nanos: u64,
    rate: f64,
}

impl TraceAxis {
    pub(crate) fn nanos(&self, at: u64) -> u64 {
        let between = at.wrapping_sub(self.from) as i64;
        self.nanos.saturating_add_signed((between as f64 * self.rate) as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_where_the_systems_clock_says() {
        let clock = TraceClock::here();
        assert!(matches!(clock, TraceClock::Counter(_)));
        let before = clock.host_now();
        let at = clock.now();
        let after = clock.host_now();
        while clock.host_now() < after + 2_000_000 {
            std::hint::spin_loop();
        }
        let found = clock.axis().nanos(at);
        assert!(found + 10_000 >= before && found <= after + 10_000, "{before} {found} {after}");
    }

    #[tokio::test(start_paused = true)]
    async fn events_have_the_times_of_a_paused_clock() {
        let clock = TraceClock::here();
        let before = clock.now();
        tokio::time::advance(Duration::from_secs(5)).await;
        let axis = clock.axis();
        assert_eq!(axis.nanos(clock.now()) - axis.nanos(before), 5_000_000_000);
        assert_eq!(clock.host_now(), tokio_nanos(clock::now()));
    }
}
