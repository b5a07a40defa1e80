//! A kernel that does nothing: only its launch costs time.

use wakeline::prelude::kernel;

#[kernel(unsafe(cuda = "nothing.cu"))]
pub(crate) fn nothing() {}
