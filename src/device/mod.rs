//! Devices: the one seam to the hardware, and what stands behind it.

pub(crate) mod backend;
pub(crate) mod check;
pub(crate) mod emulated;
mod human;

pub use backend::MemoryInfo;
#[doc(hidden)]
pub use backend::{BodyArg, KernelDef, Prototype, Scalar, Source};
pub use emulated::{Emulated, Faults, Simulation};
