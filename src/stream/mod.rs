//! Streams: ordered work on a device, counted in tickets.
//!
//! A [`Stream`] runs its operations in order; streams run concurrently. Every operation gets a [`Ticket`], a number
//! that counts up within its stream. Everything else here is built on "ticket n has passed": order between streams
//! (`stream_b` waits for a ticket of `stream_a`), completion (a [`Completed`] future resolves when its ticket has
//! passed) and the lifetime of memory (it is free once the tickets of its uses have passed).
//!
//! ```text
//!   enqueue ─> ticket 1, 2, 3, 4 ...         under the stream's lock: ticket and enqueue are one step
//!   mark    ─> an event after ticket 3       recorded where a wait may need it, with a snapshot of the stream's clock
//!   wait    ─> the device waits for a mark   unless the order is implied already
//! ```
//!
//! A stream's clock holds, for each other stream, the ticket up to which this stream is ordered after it. Clocks are
//! lower bounds: a missing entry costs a redundant wait, never a race. A wait merges the snapshot that was taken with
//! the mark, never the other stream's current clock.
//!
//! Order is transitive only through streams of one device. A device guarantees the order of its work only while it
//! lives: when it is lost, waits for its work end, even if that work was itself waiting for work on a third device that
//! has not passed. A wait for a stream of another device therefore merges no snapshot, and memory keeps earlier uses on
//! other devices.

// Those uses are in `memory::uses::Uses`. The loss of another device taints tickets, too: see `taint.rs`. The path of a
// completion is drawn in `completed.rs`.

// First, because rustdoc lists a type's methods in the order of the modules.
#[allow(clippy::module_inception, reason = "the folder's main type")]
mod stream;

mod axis;
mod backlog;
pub(crate) mod capture;
mod completed;
pub(crate) mod completion;
mod current;
mod device_times;
mod device_wait;
mod driver_stream;
mod enqueue;
mod event;
mod event_pool;
mod forecast;
mod mark;
mod meter;
mod monitor;
mod order;
mod pool;
mod spans;
mod streams;
mod taint;
mod wait_strategy;
mod watch;

pub use completed::Completed;
pub use device_times::DeviceTime;
pub(crate) use device_times::DeviceTimes;
pub use device_wait::Point;
pub(crate) use driver_stream::DriverStream;
pub(crate) use enqueue::EnqueuePermit;
pub use event::{Event, Timer};
pub(crate) use monitor::WakeAlarm;
pub(crate) use order::Launched;
pub use pool::{PooledStream, StreamPool, StreamPoolBuilder};
#[cfg(all(test, feature = "cuda"))]
pub(crate) use spans::PassedSpan;
pub(crate) use spans::{KeptSpan, KeptSpans, OpenSpans, SpanOwner, SpanReader, Spans};
pub use stream::{Stream, Ticket};
pub(crate) use streams::Streams;
pub use wait_strategy::CompletionMode;
pub(crate) use watch::WatchFlag;
