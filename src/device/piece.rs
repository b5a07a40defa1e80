//! [`Piece`]: one piece of work by value, to be handed to the seam later; and [`Held`], an argument by value.
//!
//! Work that is enqueued borrows its arguments from the call. What a node of an exec is to do from now on is heard from a
//! user's closure, and handed over only once that has returned: so it is held here meanwhile, and the host's function with it.

use std::sync::Arc;

use super::{
    backend::{Address, Arg, Backend, Launch, NodeWork, Scalar},
    draft::{Kind, name_of},
};
use crate::error::{Error, ErrorKind, Result};

/// See the [module](self).
pub(crate) struct Piece {
    /// Whose nodes may be set to it. It is told when it is dropped, and kept until no launch does it any more.
    device: Arc<dyn Backend>,
    /// A kernel's arguments are beside it.
    work: NodeWork<'static>,
    args: Box<[Held]>,
}

/// An argument of a launch, until its turn has come.
#[derive(Clone, Copy)]
pub(super) enum Held {
    Slice { address: Address, len: u64, bytes: u64, write: bool },
    Scalar(Scalar),
}

/// Arguments by value.
pub(super) fn hold(args: &[Arg<'_>]) -> Box<[Held]> {
    let held = args.iter().map(|arg| match *arg {
        Arg::Slice { address, len, bytes, write } => Held::Slice { address, len, bytes, write },
        Arg::Scalar(value) => Held::Scalar(Scalar::new(value)),
    });
    held.collect()
}

impl Held {
    fn arg(&self) -> Arg<'_> {
        match self {
            Self::Slice { address, len, bytes, write } => {
                Arg::Slice { address: *address, len: *len, bytes: *bytes, write: *write }
            }
            Self::Scalar(value) => Arg::Scalar(&value.bytes[..value.size]),
        }
    }
}

impl Piece {
    fn new(device: &Arc<dyn Backend>, work: &NodeWork<'_>) -> Self {
        let mut args: Box<[Held]> = Box::default();
        let work = match work {
            NodeWork::Kernel(Launch { kernel, grid, block, shared_bytes, args: lent }) => {
                args = hold(lent);
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

    /// As the seam takes it.
    pub(crate) fn with<R>(&self, take: impl FnOnce(&NodeWork<'_>) -> R) -> R {
        match self.work {
            NodeWork::Kernel(launch) => {
                let args: Vec<_> = self.args.iter().map(Held::arg).collect();
                take(&NodeWork::Kernel(Launch { args: &args, ..launch }))
            }
            _ => take(&self.work),
        }
    }

    pub(crate) fn is(&self, kind: Kind) -> bool {
        Kind::of(&self.work) == kind
    }

    /// For people.
    pub(crate) fn name(&self) -> String {
        name_of(&self.work)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let NodeWork::Host(function) = &self.work {
            self.device.callback_over(function);
        }
    }
}

/// What a node of an exec is to do: one piece of work.
#[derive(Default)]
pub(super) struct Note {
    piece: Option<Piece>,
    /// There was other work, too.
    wrong: Option<&'static str>,
}

impl Note {
    pub(super) fn add(&mut self, device: &Arc<dyn Backend>, work: &NodeWork<'_>) -> Result<()> {
        if self.piece.is_some() {
            return self.refuse("one piece of work: a node does one thing, and this is the second");
        }
        self.piece = Some(Piece::new(device, work));
        Ok(())
    }

    /// It is not to be, whatever else comes.
    pub(super) fn refuse(&mut self, text: &'static str) -> Result<()> {
        self.wrong.get_or_insert(text);
        Err(Error::new(ErrorKind::Usage, text))
    }

    pub(super) fn piece(self) -> Result<Option<Piece>, &'static str> {
        self.wrong.map_or(Ok(self.piece), Err)
    }
}
