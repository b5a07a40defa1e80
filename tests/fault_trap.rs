//! Scenario F1: a kernel that traps. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a trap where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/trap_at.cu"))]
fn trap_at(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_that_traps, trap_at);
