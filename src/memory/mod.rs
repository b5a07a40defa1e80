//! Device memory and page-locked host memory, usable by any stream without races.
//!
//! Each piece of memory records its last write and the reads since, each as a ticket. An operation first makes its
//! stream wait, on the device, for the uses that it must come after: a read for the last write, a write for the reads
//! too. The host reads and writes only after `.await`, or where nothing is in flight.
//!
//! ```text
//!   write on a:  a waits for the last write and all reads;   last write = a's ticket, no reads
//!   read  on b:  b waits for the last write;                 reads += b's ticket
//!   drop:        back to its heap, which hands it out again for work that comes after its last uses
//! ```
//!
//! If a device is lost, every write that was ordered after its work is tainted, and so is all work that reads the
//! result. A write that overwrites all of the memory is ordered after the tainted write but is not tainted by it: the
//! memory is valid again. The same holds for the first use of freed memory that is handed out again, and of an envelope
//! that returned to its pool.
//!
//! The reads are a set: a single "read" event that is recorded again would forget the earlier of two readers.

// The files, from the bottom up; no two files import each other.
//
// | | |
// |---|---|
// | `uses`, `location` | the recorded uses of a piece of memory, and where it is |
// | `accounting`, `stats`, `free_lists`, `wait_queue` | the parts of a heap: byte counts, freed memory, waiting tasks |
// | `memory`, `state` | a piece of memory, its owner, the origin that it returns to; whether a device is using it |
// | `graphs`, `shared_uses`, `use_lock` | the interface to graphs |
// | `ordering` | the waits of an operation for the uses that it comes after |
// | `heap`, `reclaim`, `ordered` | the heap of an allocator, memory that is dropped, the driver's own pool |
// | `arena`, `alloc` | all heaps of a device, and which memory a request gets |
// | `slab` | pieces of one allocation |
// | `plain`, `buffer`, `slice`, `allocator`, `host`, `wrapped` | typed memory and its parts, the host's access, the user's own memory |
// | `waiting`, `reserve` | tasks and operators that wait for memory |
// | `transfer`, `launch`, `shape`, `external`, `cudarc` | the operations |
// | `graph_memory`, `execution` | the memory that a graph keeps, and its launches |

// First, because rustdoc lists a type's methods in the order of the modules.
mod external;

mod accounting;
mod alloc;
mod allocator;
mod arena;
mod buffer;
#[cfg(feature = "cuda")]
mod cudarc;
pub(crate) mod execution;
mod free_lists;
pub(crate) mod graph_memory;
mod graphs;
mod heap;
mod host;
pub(crate) mod launch;
mod location;
#[allow(clippy::module_inception, reason = "the folder's main type")]
mod memory;
mod ordered;
mod ordering;
mod plain;
mod reclaim;
mod reserve;
pub(crate) mod shape;
mod shared_uses;
mod slab;
mod slice;
mod state;
mod stats;
pub(crate) mod transfer;
mod use_lock;
mod uses;
mod wait_queue;
mod waiting;
mod wrapped;

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use self::cudarc::CudarcSlice;
pub(crate) use accounting::Account;
pub use allocator::Allocator;
pub(crate) use allocator::check_capacity;
pub(crate) use buffer::Sealed;
pub use buffer::{Buffer, DeviceSlice, DeviceSliceMut, View, ViewMut};
pub use external::{Addresses, EmulatedSlice, External, RoomForSlice};
pub(crate) use location::Location;
pub(crate) use memory::{MAX_BYTES, Memory, Owned};
pub use plain::Plain;
pub(crate) use plain::{bytes_of, elements, elements_mut};
#[doc(hidden)]
pub use reserve::Reservation;
pub(crate) use reserve::{MemoryWait, ReserveBlocker};
pub(crate) use slice::checked_range;
pub use slice::{Slice, SliceMut};
pub use state::BufferState;
pub use stats::MemoryStats;
pub use uses::HostAccess;
pub(crate) use waiting::wait_for_reusable_memory;
pub use wrapped::Wrapped;
