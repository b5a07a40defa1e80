//! Scenario F1: a kernel whose stack overflows. See `common/fault.rs`.

use common::a_fault;
use wakeline::prelude::*;

/// x += 1, and a recursion deeper than any stack where x is `what`. On the emulated device the fault is injected.
#[kernel(unsafe(cuda = "kernels/overflow_at.cu"))]
fn overflow_at(x: &mut [u32], _what: u32) {
    for x in x {
        *x += 1;
    }
}

a_fault!(f1_a_kernel_whose_stack_overflows, overflow_at);
