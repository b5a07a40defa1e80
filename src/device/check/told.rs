//! What the checker says: who did what to which bytes, and what was missing.

use std::ops::Range;

use super::{
    clock::Component,
    shadow::{Conflict, Stamp, What},
    universe::{Region, Side, Touch, Universe},
};
use crate::error::{Error, ErrorKind, Result};

impl Universe {
    /// An error if memory was there and is freed.
    pub(super) fn is_there(&self, component: Component, what: What, touch: &Touch) -> Result<()> {
        let freed = self.gone.memory(touch.start).filter(|_| touch.side == Side::Device);
        freed.map_or(Ok(()), |freed| {
            let call = self.describe(&Stamp { component, tick: 0, what }, None);
            Err(Error::new(ErrorKind::InvalidMemory, format!("{call} {} {freed}", verb(touch.write))))
        })
    }

    pub(super) fn unwritten(
        &self,
        component: Component,
        what: What,
        touch: &Touch,
        region: &Region,
        bytes: Range<u64>,
    ) -> Error {
        let call = self.describe(&Stamp { component, tick: 0, what }, None);
        let message = format!(
            "{call} reads bytes {bytes:?} of {}, which nothing has written: fill it, copy to it, or give it to a kernel as \
             `&mut` before",
            region.describe(touch.side),
        );
        Error::new(ErrorKind::InvalidMemory, message)
    }

    pub(super) fn race(
        &self,
        component: Component,
        what: What,
        touch: &Touch,
        region: &Region,
        conflict: &Conflict,
    ) -> Error {
        let new = Stamp { component, tick: 0, what };
        let message = format!(
            "{} {} bytes {:?} of {}, which {} {}; nothing orders them: missing is a wait of {} for {} (after its call {})",
            self.describe(&new, Some(conflict.with.component)),
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

    /// ``kernel `uppercase` on stream `upper` ``, with its device if `other` is another's.
    pub(super) fn describe(&self, stamp: &Stamp, other: Option<Component>) -> String {
        let what = match stamp.what {
            What::Kernel(name) => format!("kernel `{name}`"),
            What::Copy(direction) => format!("copy {direction}"),
            What::Fill => "fill".into(),
            What::Allocation => "allocation".into(),
            What::Free => "free".into(),
            What::Recycling => "handing out again".into(),
            What::External(name) => format!("external work `{name}`"),
        };
        let mut text = format!("{what} on stream {}", self.describe_line(stamp.component));
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

pub(super) fn verb(write: bool) -> &'static str {
    if write { "writes" } else { "reads" }
}
