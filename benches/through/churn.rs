//! A kernel that takes about as long as a copy.

use wakeline::prelude::kernel;

/// Some rounds over all elements.
#[kernel(unsafe(cuda = "churn.cu"))]
pub(crate) fn churn(data: &mut [u32], rounds: u32) {
    for element in data {
        for _ in 0..rounds {
            *element = element.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        }
    }
}
