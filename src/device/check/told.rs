//! What the checker says: who did what to which bytes, and what was missing.

use std::ops::Range;

use super::{
    clock::Component,
    graph::Clash,
    shadow::{Conflict, Stamp, What},
    universe::{Region, Side, Touch, Universe},
};
use crate::error::{Error, ErrorKind, Result};

impl Universe {
    /// An error if memory was there and is freed.
    pub(super) fn is_there(&self, new: &Stamp, touch: &Touch) -> Result<()> {
        let freed = self.gone.memory(touch.start).filter(|_| touch.side == Side::Device);
        freed.map_or(Ok(()), |freed| {
            let call = self.describe(new, None);
            Err(Error::new(ErrorKind::InvalidMemory, format!("{call} {} {freed}", verb(touch.write))))
        })
    }

    /// Memory of a graph's that is not there between its launches.
    pub(super) fn away(&self, new: &Stamp, touch: &Touch, region: &Region) -> Error {
        let message = format!(
            "{} {} {}, which is there within a launch of its graph only, between the nodes that make it and give it back",
            self.describe(new, None),
            verb(touch.write),
            region.describe(touch.side),
        );
        Error::new(ErrorKind::InvalidMemory, message)
    }

    pub(super) fn unwritten(&self, new: &Stamp, touch: &Touch, region: &Region, bytes: Range<u64>) -> Error {
        let call = self.describe(new, None);
        let message = format!(
            "{call} reads bytes {bytes:?} of {}, which nothing has written: fill it, copy to it, or give it to a kernel as \
             `&mut` before",
            region.describe(touch.side),
        );
        Error::new(ErrorKind::InvalidMemory, message)
    }

    pub(super) fn race(&self, new: &Stamp, touch: &Touch, region: &Region, conflict: &Conflict) -> Error {
        let component = new.component;
        let message = format!(
            "{} {} bytes {:?} of {}, which {} {}; nothing orders them: missing is a wait of {} for {} (after its call {})",
            self.describe(new, Some(conflict.with.component)),
            verb(touch.write),
            conflict.bytes,
            region.describe(touch.side),
            self.describe(&conflict.with, Some(component)),
            verb(conflict.writes),
            self.describe_line(component),
            self.describe_line(conflict.with.component),
            conflict.with.tick,
        );
        Error::new(ErrorKind::Race, message)
    }

    /// Two nodes of one graph that nothing orders.
    pub(super) fn unordered(&self, clash: &Clash) -> Error {
        let Clash { new, old, bytes } = clash;
        let touch = Touch { start: bytes.start, bytes: bytes.end - bytes.start, ..new.1 };
        let bytes = match self.region(&touch) {
            Some((region, bytes)) => format!("bytes {bytes:?} of {}", region.describe(touch.side)),
            None => format!("{} bytes at {:#x}", touch.bytes, touch.start),
        };
        let message = format!(
            "{} {} {bytes}, which {} of the same graph {}; no edge orders them: one has to come after the other",
            new.0.told(),
            verb(new.1.write),
            old.0.told(),
            verb(old.1.write),
        );
        Error::new(ErrorKind::Race, message)
    }

    /// ``kernel `uppercase` on stream `upper` ``, with its device if `other` is another's.
    pub(super) fn describe(&self, stamp: &Stamp, other: Option<Component>) -> String {
        let graph = if stamp.in_graph { " of a graph" } else { "" };
        let mut text = format!("{}{graph} on stream {}", stamp.what.told(), self.describe_line(stamp.component));
        let device = |component: &Component| self.lines.get(component).map(|line| (line.device, &line.device_name));
        if let (Some((mine, name)), Some((theirs, _))) = (device(&stamp.component), other.as_ref().and_then(device))
            && mine != theirs
        {
            text += &format!(" of {name}");
        }
        text
    }

    pub(super) fn describe_line(&self, component: Component) -> String {
        let destroyed = if self.fading.contains(&component) { " (destroyed since)" } else { "" };
        self.lines.get(&component).map_or_else(|| "?".into(), |line| format!("`{}`{destroyed}", line.name))
    }
}

impl What {
    fn told(self) -> String {
        match self {
            What::Kernel(name) => format!("kernel `{name}`"),
            What::Copy(direction) => format!("copy {direction}"),
            What::Fill => "fill".into(),
            What::Allocation => "allocation".into(),
            What::Free => "free".into(),
            What::Recycling => "handing out again".into(),
            What::Condition => "condition".into(),
            What::External(name) => format!("external work `{name}`"),
        }
    }
}

pub(super) fn verb(write: bool) -> &'static str {
    if write { "writes" } else { "reads" }
}
