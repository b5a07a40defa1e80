//! The kernel of each stage.

use std::time::{Duration, Instant};

use wakeline::prelude::kernel;

/// Adds one to each element, and runs for this long.
#[kernel(unsafe(cuda = "work.cu"))]
pub(crate) fn work(data: &mut [u64], nanoseconds: u64) {
    let began = Instant::now();
    data.iter_mut().for_each(|element| *element = element.wrapping_add(1));
    while began.elapsed() < Duration::from_nanos(nanoseconds) {
        std::hint::spin_loop();
    }
}
