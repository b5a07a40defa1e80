//! The processor time of this process.

#![allow(dead_code)]

use std::time::Duration;

/// The time used so far by all threads, including those that have ended.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(crate) fn used() -> Duration {
    #[repr(C)]
    struct Time {
        seconds: i64,
        nanoseconds: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut Time) -> i32;
    }
    const PROCESS: i32 = 2;
    let mut time = Time { seconds: 0, nanoseconds: 0 };
    // SAFETY: the C library's function, with its declaration for 64-bit Linux; `time` outlives the call.
    let answer = unsafe { clock_gettime(PROCESS, &mut time) };
    assert_eq!(answer, 0, "the clock of this process");
    Duration::new(time.seconds as u64, time.nanoseconds as u32)
}

/// Not available on this system.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub(crate) fn used() -> Duration {
    Duration::ZERO
}
