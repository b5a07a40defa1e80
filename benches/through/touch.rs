//! A kernel that writes one byte of each page.

use wakeline::prelude::kernel;

#[kernel(unsafe(cuda = "touch.cu"))]
pub(crate) fn touch(data: &mut [u8]) {
    data.iter_mut().step_by(4096).for_each(|byte| *byte = byte.wrapping_add(1));
}
