//! Scenario F1: a kernel whose assertion fails. See `common/fault.rs`.

mod common;
#[path = "common/fault.rs"]
mod fault;

use fault::*;
use wakeline::prelude::*;

/// x += 1, and a failed assertion where x is `what`. The emulated device has the fault planned.
#[kernel(unsafe(cuda = "kernels/assert_not.cu"))]
fn assert_not(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_whose_assertion_fails, assert_not);
