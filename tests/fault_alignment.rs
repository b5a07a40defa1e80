//! Scenario F1: a kernel that writes to a misaligned address. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a misaligned write where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/write_askew.cu"))]
fn write_askew(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_that_writes_askew, write_askew);
