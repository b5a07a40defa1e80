//! A clock for statistics: cheap to read, converted to time at the end.
//!
//! A run of an operator can take as little as 50 ns, and reading the system clock twice costs about as much. On x86-64
//! the processor's time-stamp counter is read instead; it runs at a constant rate on every processor that CUDA
//! supports. The length of its ticks follows from a span measured with both clocks, the whole run of the flow. On other
//! architectures a tick is a nanosecond of the system clock. Use it for statistics only: two cores can disagree by some
//! ticks.

use std::time::{Duration, Instant};

/// A point in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticks(u64);

/// Measures the length of a tick.
#[derive(Debug)]
pub(crate) struct TickClock {
    began: Instant,
    ticks: Ticks,
}

impl Ticks {
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(crate) fn now() -> Self {
        // SAFETY: every x86-64 processor has the instruction, and it only reads a counter.
        Self(unsafe { std::arch::x86_64::_rdtsc() })
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn now() -> Self {
        static ZERO: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        let since = ZERO.get_or_init(Instant::now).elapsed();
        Self(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The counter's value.
    #[inline]
    pub(crate) fn count(self) -> u64 {
        self.0
    }

    /// The point at which the counter had this value.
    pub(crate) fn of_count(count: u64) -> Self {
        Self(count)
    }

    /// Ticks from `earlier` to this.
    #[inline]
    pub(crate) fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl TickClock {
    pub(crate) fn start() -> Self {
        Self { began: Instant::now(), ticks: Ticks::now() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The duration of `ticks` ticks, by the average length of a tick since `start`.
    pub(crate) fn duration(&self, ticks: u64) -> Duration {
        let span = Ticks::now().since(self.ticks).max(1);
        self.elapsed().mul_f64(ticks as f64 / span as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_as_long_as_the_systems_clock_says() {
        let clock = TickClock::start();
        let from = Ticks::now();
        while clock.elapsed() < Duration::from_millis(5) {
            std::hint::spin_loop();
        }
        let took = clock.duration(Ticks::now().since(from));
        assert!(took >= Duration::from_millis(4) && took <= clock.elapsed(), "{took:?}");
    }
}
