//! [`Bottleneck`]: what limits a flow. How it is found: `finder.rs`.

use std::{fmt, sync::Arc};

/// What limits a flow's throughput. `Display` is one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Bottleneck {
    /// The name of the operator or hub.
    pub at: Arc<str>,
    /// Why.
    pub reason: Reason,
    /// The sentence.
    pub sentence: String,
}

/// Why an operator or a hub limits a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reason {
    /// The operator computes on the host.
    Host,
    /// The operator's work on a device, which it or an operator behind it waits for; or the copies of the hub.
    Device,
    /// The operator waits for memory.
    Memory,
    /// The operator waits for points in time.
    Time,
    /// The operator waits for a condition of its own.
    Condition,
    /// The operator awaits a future that wakeline does not know.
    Future,
    /// The operator blocks its worker thread, which others wait for.
    BlockedWorker,
    /// The runtime has too few workers.
    Workers,
    /// The hub has too few envelopes.
    Envelopes,
    /// The hub's queue is too small: its writer and its reader take turns.
    Capacity,
    /// The ingress waits for callers outside of the flow, or the egress for its reader there.
    Outside,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}
