//! Scenario F1: a kernel whose assertion fails. See `common/fault.rs`.
//!
//! A GPU reports a failed assertion only once all other work there has ended (H200, driver 580.159.04: after 30 s with
//! a kernel of 30 s beside it; other faults are reported within half a second). So this test runs no other work.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a failed assertion where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/assert_not.cu"))]
fn assert_not(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_whose_assertion_fails, assert_not, false);
