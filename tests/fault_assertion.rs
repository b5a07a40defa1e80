//! Scenario F1: a kernel whose assertion fails. See `common/fault.rs`.
//!
//! A GPU tells of it once all else that runs there has ended (H200, driver 580.159.04: with a kernel of 30 s beside it,
//! after 30 s; other faults are told of within half a second). So here it has nothing else to do.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a failed assertion where x is `what`. The emulated device has the fault planned.
#[kernel(unsafe(cuda = "kernels/assert_not.cu"))]
fn assert_not(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_whose_assertion_fails, assert_not, false);
