//! Scenario F1: a kernel that calls an address without code. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a call of an invalid address where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/call_nowhere.cu"))]
fn call_nowhere(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_that_calls_nothing, call_nowhere);
