//! [`Timeline`]: what happened in a flow in the last seconds, from the recorder's rings, the spans of device work and samples
//! of counters.

use std::sync::Arc;

use crate::tracepoint::TraceEvent;

/// The last seconds of one flow. All times are nanoseconds on the host's monotonic clock, on one axis.
#[derive(Debug)]
pub(super) struct Timeline {
    pub(super) flow: Arc<str>,
    pub(super) from: u64,
    pub(super) to: u64,
    /// The operators' names.
    pub(super) operators: Vec<Arc<str>>,
    pub(super) hubs: Vec<TimelineHub>,
    /// The threads' names.
    pub(super) threads: Vec<String>,
    /// Device work, one track each: `cuda:0 upper`; of copies, `cuda:0 copies to device` or `cuda:0 copies to host`.
    pub(super) streams: Vec<String>,
    /// The names of the devices whose memory is sampled.
    pub(super) devices: Vec<Arc<str>>,
    /// Sorted by time.
    pub(super) events: Vec<TimelineEvent>,
    /// Sorted by their begin.
    pub(super) device: Vec<TimelineSlice>,
    /// Sorted by time.
    pub(super) counters: Vec<CounterSample>,
    /// Events of these seconds that were overwritten or found no room.
    pub(super) lost: u64,
}

#[derive(Clone, Debug)]
pub(super) struct TimelineHub {
    pub(super) name: Arc<str>,
    /// In messages.
    #[allow(dead_code, reason = "for the page")]
    pub(super) capacity: usize,
}

/// An event, and the number of the thread on which it happened.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimelineEvent {
    pub(super) at: u64,
    pub(super) thread: u32,
    pub(super) event: TraceEvent,
}

/// A stretch of device work. `operator` is [`OUTSIDE`](crate::tracepoint::OUTSIDE) for a hub's copy, and for a section whose
/// runs were replayed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimelineSlice {
    pub(super) stream: u32,
    pub(super) operator: u32,
    pub(super) run: u64,
    pub(super) began: u64,
    pub(super) ended: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CounterSample {
    pub(super) at: u64,
    pub(super) counter: Counter,
    pub(super) value: f64,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counter {
    /// Messages in the queue of a hub.
    HubFill(u32),
    /// Bytes in use of a device's memory. The number is that of the device in [`Timeline::devices`].
    Memory(u32),
}
