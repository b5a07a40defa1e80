//! Devices: the one seam to the hardware, and what stands behind it.

pub(crate) mod backend;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
