//! [`WorkItem`]: a piece of work by value, to be passed to the backend later. [`OwnedArg`]: an argument by value.
//!
//! Enqueued work borrows its arguments from the call. The new work of an exec's node comes from a user's closure and is
//! passed to the backend only after the closure has returned. Until then it is stored here.

use std::sync::Arc;

use super::{
    backend::{Address, Arg, Backend, Launch, NodeWork, Scalar},
    graph_ir::{Kind, name_of},
    touched::{Touched, touched_by},
};
use crate::error::{Error, ErrorKind, Result};

/// See the [module](self).
pub(crate) struct WorkItem {
    /// The device of the node. It keeps a host function until no launch calls it any more, and is notified when this
    /// value is dropped.
    device: Arc<dyn Backend>,
    /// A kernel's arguments are in `args`.
    work: NodeWork<'static>,
    args: Box<[OwnedArg]>,
}

/// An argument of a launch by value.
#[derive(Clone, Copy)]
pub(super) enum OwnedArg {
    Slice { address: Address, len: u64, bytes: u64, write: bool },
    Scalar(Scalar),
}

pub(super) fn own_args(args: &[Arg<'_>]) -> Box<[OwnedArg]> {
    let held = args.iter().map(|arg| match *arg {
        Arg::Slice { address, len, bytes, write } => OwnedArg::Slice { address, len, bytes, write },
        Arg::Scalar(value) => OwnedArg::Scalar(Scalar::new(value)),
    });
    held.collect()
}

impl OwnedArg {
    fn arg(&self) -> Arg<'_> {
        match self {
            Self::Slice { address, len, bytes, write } => {
                Arg::Slice { address: *address, len: *len, bytes: *bytes, write: *write }
            }
            Self::Scalar(value) => Arg::Scalar(&value.bytes[..value.size]),
        }
    }
}

impl WorkItem {
    fn new(device: &Arc<dyn Backend>, work: &NodeWork<'_>) -> Self {
        let mut args: Box<[OwnedArg]> = Box::default();
        let work = match work {
            NodeWork::Kernel(Launch { kernel, grid, block, shared_bytes, args: borrowed }) => {
                args = own_args(borrowed);
                NodeWork::Kernel(Launch { kernel, grid: *grid, block: *block, shared_bytes: *shared_bytes, args: &[] })
            }
            NodeWork::Copy { to, from, bytes } => NodeWork::Copy { to: *to, from: *from, bytes: *bytes },
            NodeWork::Fill { to, pattern, bytes } => NodeWork::Fill { to: *to, pattern: *pattern, bytes: *bytes },
            NodeWork::Host(function) => NodeWork::Host(function.clone()),
            NodeWork::Empty => NodeWork::Empty,
            NodeWork::Child(graph) => NodeWork::Child(*graph),
            NodeWork::Record(event) => NodeWork::Record(*event),
            NodeWork::Wait(event) => NodeWork::Wait(*event),
            NodeWork::Free(address) => NodeWork::Free(*address),
        };
        Self { device: device.clone(), work, args }
    }

    /// Calls `take` with the work in the form in which a [`Backend`] accepts it.
    pub(crate) fn with<R>(&self, take: impl FnOnce(&NodeWork<'_>) -> R) -> R {
        match self.work {
            NodeWork::Kernel(launch) => {
                let args: Vec<_> = self.args.iter().map(OwnedArg::arg).collect();
                take(&NodeWork::Kernel(Launch { args: &args, ..launch }))
            }
            _ => take(&self.work),
        }
    }

    pub(crate) fn is(&self, kind: Kind) -> bool {
        Kind::of(&self.work) == kind
    }

    pub(crate) fn touched(&self) -> Touched {
        self.with(touched_by)
    }

    pub(crate) fn name(&self) -> String {
        name_of(&self.work)
    }
}

impl Drop for WorkItem {
    fn drop(&mut self) {
        if let NodeWork::Host(function) = &self.work {
            self.device.release_callback(function);
        }
    }
}

/// Collects the new work of an exec's node. Only one piece of work is allowed.
#[derive(Default)]
pub(super) struct WorkCollector {
    work_item: Option<WorkItem>,
    /// The error, if other work was enqueued too.
    error: Option<&'static str>,
}

impl WorkCollector {
    pub(super) fn add(&mut self, device: &Arc<dyn Backend>, work: &NodeWork<'_>) -> Result<()> {
        if self.work_item.is_some() {
            return self.refuse("a node can be set to only one piece of work, but a second one was enqueued");
        }
        self.work_item = Some(WorkItem::new(device, work));
        Ok(())
    }

    /// Makes [`work_item`](Self::work_item) fail, whatever is added later.
    pub(super) fn refuse(&mut self, text: &'static str) -> Result<()> {
        self.error.get_or_insert(text);
        Err(Error::new(ErrorKind::Usage, text))
    }

    pub(super) fn work_item(self) -> Result<Option<WorkItem>, &'static str> {
        self.error.map_or(Ok(self.work_item), Err)
    }
}
