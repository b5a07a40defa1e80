//! Scenario F1: a kernel that writes where there is no memory. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a write far beyond its end where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/write_nowhere.cu"))]
fn write_nowhere(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_that_writes_nowhere, write_nowhere);
