//! A kernel that runs for a given time.

use std::time::Duration;

use wakeline::prelude::kernel;

/// Runs for this long, on one thread.
#[kernel(unsafe(cuda = "spin.cu"))]
pub(crate) fn spin(count: &mut [u64], nanoseconds: u64) {
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_nanos(nanoseconds) {
        std::hint::spin_loop();
    }
    count[0] = count[0].wrapping_add(1);
}
