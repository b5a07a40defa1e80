//! [`Checked`]: properties of a flow that are known before it runs and may be unexpected.

use super::Cycle;
use crate::sync::logged;
use std::{fmt, sync::Arc};

use crate::device::{Device, human};

/// The result of [`Flow::check`](crate::Flow::check). `Display` prints a list.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Checked {
    /// The hubs whose envelopes are copied only because an output has several readers.
    pub copies: Vec<Copied>,
    /// The cycles of operators whose messages can return to them, in the order of adding.
    pub cycles: Vec<Cycle>,
}

/// A hub whose envelopes are copied although its reader could use another reader's on the same device: an envelope is
/// exclusive to its reader.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Copied {
    /// The name of the hub: `split.halves -> left.half`.
    pub hub: Arc<str>,
    /// The device of its reader.
    pub device: Device,
    /// The size of each of its envelopes, in bytes.
    pub envelope_bytes: usize,
}

impl Checked {
    pub(super) fn trace(&self, flow: &str) {
        for Copied { hub, device, envelope_bytes } in &self.copies {
            logged(
                || tracing::debug!(flow, %hub, %device, envelope_bytes, "envelopes are copied for a further reader"),
            );
        }
        for cycle in &self.cycles {
            logged(|| tracing::debug!(flow, "{cycle}"));
        }
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.copies.is_empty() && self.cycles.is_empty() {
            return write!(f, "no mistakes; no envelope is copied for a further reader");
        }
        let copies = self.copies.iter().map(|copied| copied as &dyn fmt::Display);
        let lines = copies.chain(self.cycles.iter().map(|cycle| cycle as &dyn fmt::Display));
        for (at, line) in lines.enumerate() {
            let end = if at > 0 { "\n" } else { "" };
            write!(f, "{end}{line}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = human::bytes(self.envelope_bytes as u64);
        write!(f, "hub `{}`: each envelope, of up to {size}, is copied to another on {}", self.hub, self.device)
    }
}
