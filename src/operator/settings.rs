//! [`OperatorSettings`] and [`FlowContext`], which a flow gives its operators, and [`OperatorStats`], which they
//! report.

use std::sync::Arc;

use futures::future::BoxFuture;

use super::{Traffic, control::Control, operator_streams::OwnStreams, ports::AllPorts};
use crate::{
    condition::{Gates, When},
    device::Device,
    hub::MergePolicy,
    memory::Allocator,
    stream::{CompletionMode, DeviceTime},
};

/// The statistics of an operator for one run of its flow.
#[derive(Clone, Debug, Default)]
pub(crate) struct OperatorStats {
    pub(crate) runs: u64,
    /// How long it was busy, in ticks.
    pub(crate) busy: u64,
    pub(crate) received: Traffic,
    pub(crate) sent: Traffic,
    pub(crate) device: Option<DeviceTime>,
    /// The peak, in bytes, of the memory that it allocated and had in use.
    pub(crate) memory_peak: u64,
}

/// The settings with which an operator was added.
pub(crate) struct OperatorSettings {
    pub(crate) name: Arc<str>,
    /// Its number in the flow.
    pub(crate) number: usize,
    /// No message reaches it: its own begin paths.
    pub(crate) begins_paths: bool,
    pub(crate) device: Device,
    pub(crate) streams: OwnStreams,
    pub(crate) allocator: Option<Allocator>,
    pub(crate) conditions: Vec<When>,
    pub(crate) merge: MergePolicy,
    /// The operator has a thread of its own.
    pub(crate) may_block: bool,
}

impl OperatorStats {
    pub(super) fn add_traffic(&mut self, ports: &mut dyn AllPorts) {
        ports.visit_all(&mut |_, port| {
            let traffic = port.stats().traffic;
            let sum = if port.is_output() { &mut self.sent } else { &mut self.received };
            sum.messages += traffic.messages;
            sum.bytes = sum.bytes.saturating_add(traffic.bytes);
        });
    }
}

/// The context that all operators of a flow share.
pub(crate) struct FlowContext {
    /// All tasks of the flow stay on one thread.
    pub(crate) is_local: bool,
    pub(crate) streams: StreamSettings,
    pub(crate) gates: Gates,
    pub(crate) control: Arc<Control>,
    /// Spawns a named task on the executor of the flow's other tasks.
    pub(crate) spawn: Spawn,
}

pub(crate) type Spawn = fn(&str, BoxFuture<'static, ()>);

/// A flow's settings for its operators' streams.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamSettings {
    pub(crate) mode: CompletionMode,
    /// The report has the device time of the operators' runs.
    pub(crate) timed: bool,
}
