//! The checker's messages: which call accessed which bytes, and which ordering is missing.

use std::ops::Range;

use super::{
    graph::NodeConflict,
    happens_before::Component,
    race_state::{RaceState, Region, Side, Touch},
    shadow::{AccessKind, Conflict, Stamp},
};
use crate::error::{Error, ErrorKind, Result};

impl RaceState {
    /// Fails if the memory has been freed.
    pub(super) fn check_not_freed(&self, new: &Stamp, touch: &Touch) -> Result<()> {
        let freed = self.tombstones.memory(touch.start).filter(|_| touch.side == Side::Device);
        freed.map_or(Ok(()), |freed| {
            let call = self.describe(new, None);
            Err(Error::new(ErrorKind::InvalidMemory, format!("{call} {} {freed}", verb(touch.write))))
        })
    }

    /// The error for accessing a graph's memory while no launch has allocated it.
    pub(super) fn unallocated(&self, new: &Stamp, touch: &Touch, region: &Region) -> Error {
        let message = format!(
            "{} {} {}, which exists only within a launch of its graph, between the nodes that allocate and free it",
            self.describe(new, None),
            verb(touch.write),
            region.describe(touch.side),
        );
        Error::new(ErrorKind::InvalidMemory, message)
    }

    pub(super) fn unwritten(&self, new: &Stamp, touch: &Touch, region: &Region, bytes: Range<u64>) -> Error {
        let call = self.describe(new, None);
        let message = format!(
            "{call} reads bytes {bytes:?} of {}, which nothing has written: fill it, copy to it, or pass it to a kernel as \
             `&mut` first",
            region.describe(touch.side),
        );
        Error::new(ErrorKind::InvalidMemory, message)
    }

    pub(super) fn race(&self, new: &Stamp, touch: &Touch, region: &Region, conflict: &Conflict) -> Error {
        let component = new.component;
        let message = format!(
            "{} {} bytes {:?} of {}, which {} {}; nothing orders them: make {} wait for {} after its call {}",
            self.describe(new, Some(conflict.with.component)),
            verb(touch.write),
            conflict.bytes,
            region.describe(touch.side),
            self.describe(&conflict.with, Some(component)),
            verb(conflict.writes),
            self.describe_stream(component),
            self.describe_stream(conflict.with.component),
            conflict.with.tick,
        );
        Error::new(ErrorKind::Race, message)
    }

    /// The error for two nodes of one graph that no edge orders.
    pub(super) fn unordered(&self, conflict: &NodeConflict) -> Error {
        let NodeConflict { new, old, bytes } = conflict;
        let touch = Touch { start: bytes.start, bytes: bytes.end - bytes.start, ..new.1 };
        let bytes = match self.region(&touch) {
            Some((region, bytes)) => format!("bytes {bytes:?} of {}", region.describe(touch.side)),
            None => format!("{} bytes at {:#x}", touch.bytes, touch.start),
        };
        let message = format!(
            "{} {} {bytes}, which {} of the same graph {}; no edge orders them: make one depend on the other",
            new.0.describe(),
            verb(new.1.write),
            old.0.describe(),
            verb(old.1.write),
        );
        Error::new(ErrorKind::Race, message)
    }

    /// ``kernel `uppercase` on stream `upper` ``, followed by the device if `other` is on another device.
    pub(super) fn describe(&self, stamp: &Stamp, other: Option<Component>) -> String {
        let graph = if stamp.in_graph { " of a graph" } else { "" };
        let mut text = format!("{}{graph} on stream {}", stamp.kind.describe(), self.describe_stream(stamp.component));
        let device =
            |component: &Component| self.stream_states.get(component).map(|state| (state.device, &state.device_name));
        if let (Some((mine, name)), Some((theirs, _))) = (device(&stamp.component), other.as_ref().and_then(device))
            && mine != theirs
        {
            text += &format!(" of {name}");
        }
        text
    }

    pub(super) fn describe_stream(&self, component: Component) -> String {
        let destroyed = if self.retired.contains(&component) { " (destroyed since)" } else { "" };
        self.stream_states.get(&component).map_or_else(|| "?".into(), |state| format!("`{}`{destroyed}", state.name))
    }
}

impl AccessKind {
    fn describe(self) -> String {
        match self {
            AccessKind::Kernel(name) => format!("kernel `{name}`"),
            AccessKind::Copy(direction) => format!("copy {direction}"),
            AccessKind::Fill => "fill".into(),
            AccessKind::Allocation => "allocation".into(),
            AccessKind::Free => "free".into(),
            AccessKind::Recycling => "reuse of memory".into(),
            AccessKind::Condition => "condition".into(),
            AccessKind::External(name) => format!("external work `{name}`"),
        }
    }
}

pub(super) fn verb(write: bool) -> &'static str {
    if write { "writes" } else { "reads" }
}
