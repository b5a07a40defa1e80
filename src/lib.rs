//! Async-native GPU pipelines on tokio.

pub mod device;
mod error;

pub use error::{Error, ErrorKind, Result};
