//! What is known of a flow before it runs, and may not be expected.

use super::Cycle;
use crate::sync::logged;
use std::{fmt, sync::Arc};

use crate::device::{Device, human};

/// What [`Flow::check`](crate::Flow::check) found. Prints as a list.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Checked {
    /// The places where envelopes are copied only because several readers are given the same ones.
    pub copies: Vec<Copied>,
    /// The operators whose messages lead back to them, in the order of adding.
    pub cycles: Vec<Cycle>,
}

/// A hub whose envelopes are copied for its reader, who could use others' where they are: an envelope is its reader's
/// alone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Copied {
    /// The hub's name: `split.halves -> left.half`.
    pub hub: Arc<str>,
    /// Where its reader is.
    pub device: Device,
    /// Bytes of each of its envelopes.
    pub envelope_bytes: usize,
}

impl Checked {
    pub(super) fn trace(&self, flow: &str) {
        for Copied { hub, device, envelope_bytes } in &self.copies {
            logged(|| tracing::debug!(flow, %hub, %device, envelope_bytes, "envelopes are copied for one more reader"));
        }
        for cycle in &self.cycles {
            logged(|| tracing::debug!(flow, "{cycle}"));
        }
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.copies.is_empty() && self.cycles.is_empty() {
            return write!(f, "in order; no envelope is copied for want of sharing");
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
