//! The kernel of a stage.

use wakeline::prelude::kernel;

#[kernel(unsafe(cuda = "step.cu"))]
pub(crate) fn step(x: &mut [u32]) {
    x.iter_mut().for_each(|x| *x = x.wrapping_add(1));
}
