//! [`Location`]: where a piece of memory is.

use std::ptr::NonNull;

use crate::device::backend::{Address, Endpoint};

/// The location of a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Device(Address),
    Host(NonNull<u8>),
}

// SAFETY: a plain address. Code that accesses the memory must own or borrow it.
unsafe impl Send for Location {}
// SAFETY: as above.
unsafe impl Sync for Location {}

impl Location {
    /// The location this many bytes behind it.
    pub(super) fn behind(self, bytes: usize) -> Self {
        match self {
            Self::Device(address) => Self::Device(Address(address.0 + bytes as u64)),
            Self::Host(pointer) => Self::Host(pointer.map_addr(|start| start.saturating_add(bytes))),
        }
    }

    /// One end of a copy, this many bytes behind the start.
    pub(super) fn endpoint(self, offset: usize) -> Endpoint {
        match self {
            Self::Device(address) => Endpoint::Device(Address(address.0 + offset as u64)),
            Self::Host(pointer) => Endpoint::Host(pointer.as_ptr().wrapping_add(offset)),
        }
    }
}
