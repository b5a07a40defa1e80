//! `CLOCK_MONOTONIC` in nanoseconds, and a sleep until a time of it.

use std::num::NonZeroU64;

use rustix::{
    io::Errno,
    thread::{clock_nanosleep_absolute, set_current_timer_slack},
    time::{ClockId, Timespec, clock_gettime},
};

pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Lets the sleeps of this thread end on time: the kernel's default is up to 50 us later, to join wake-ups.
pub(crate) fn wake_on_time() {
    set_current_timer_slack(NonZeroU64::new(1)).expect("a thread may set its timer slack");
}

/// Returns at once if the time has passed.
pub(crate) fn sleep_until(time: u64) {
    let time = Timespec { tv_sec: (time / 1_000_000_000) as i64, tv_nsec: (time % 1_000_000_000) as _ };
    while let Err(error) = clock_nanosleep_absolute(ClockId::Monotonic, &time) {
        assert_eq!(error, Errno::INTR, "the clock does not let this thread sleep");
    }
}
