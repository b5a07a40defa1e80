//! Scenario F1: a kernel that calls a function where there is none. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a call of nothing where x is `what`. The emulated device has the fault planned.
#[kernel(unsafe(cuda = "kernels/call_nowhere.cu"))]
fn call_nowhere(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_that_calls_nothing, call_nowhere);
