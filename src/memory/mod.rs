//! Device memory and page-locked host memory, usable by any stream without races.
//!
//! Each piece of memory records its last write and the reads since, each as a ticket. An operation first makes its
//! stream wait, on the device, for the uses that it must come after: a read for the last write, a write for the reads
//! too. The host reads and writes only after `.await`, or where nothing is in flight.
//!
//! ```text
//!   write on a:  a waits for the last write and all reads;   last write = a's ticket, no reads
//!   read  on b:  b waits for the last write;                 reads += b's ticket
//!   drop:        back to its heap, which hands it out again for work that comes after its last uses (see `heap`)
//! ```
//!
//! If a device is lost, every write that was ordered after its work is tainted, and so is all work that reads the
//! result. A write that overwrites all of the memory is ordered after the tainted write, but not tainted by it: the
//! memory is valid again. The same holds for the first use of memory that was freed, and of an envelope that returned
//! to its pool.
//!
//! The reads are a set: re-recording a single "read" event would forget the earlier of two readers.

mod accounting;
mod alloc;
mod allocator;
mod arena;
mod buffer;
#[cfg(feature = "cuda")]
mod cudarc;
pub(crate) mod execution;
mod external;
mod free_lists;
pub(crate) mod graph_memory;
mod graphs;
mod heap;
mod host;
pub(crate) mod launch;
mod location;
mod ordered;
mod ordering;
mod piece;
mod plain;
mod reclaim;
mod reserve;
mod shared_uses;
mod state;
mod stats;
pub(crate) mod transfer;
mod use_lock;
mod uses;
mod wait_queue;
mod waiting;
mod wrapped;

pub(crate) use accounting::Account;
pub use allocator::Allocator;
pub(crate) use allocator::can_hold;
pub(crate) use buffer::Sealed;
pub use buffer::{Buffer, DeviceSlice, DeviceSliceMut, View, ViewMut};
pub use external::{Addresses, EmulatedSlice, External, RoomForSlice};
pub(crate) use location::Location;
pub(crate) use piece::{MAX_BYTES, Memory, Owned};
pub use plain::Plain;
pub(crate) use plain::{bytes_of, elements, elements_mut};
#[doc(hidden)]
pub use reserve::Reservation;
pub(crate) use reserve::{ReserveBlocker, Wait};
pub use state::BufferState;
pub use stats::MemoryStats;
pub use uses::HostAccess;
pub(crate) use waiting::memory_passes;
pub use wrapped::Wrapped;
