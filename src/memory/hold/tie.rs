//! [`Tie`]: what binds memory to graphs; and the [`Turn`] that whoever uses such memory takes.

use std::{cell::Cell, ops::Range};

use super::{
    super::{Home, Memory, access::Uses},
    turn::{self, Turns},
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Level, Mutex, lock},
};

/// What binds memory to graphs.
pub(in crate::memory) struct Tie {
    pub(super) home: Home,
    pub(super) bytes: usize,
    /// The memory's.
    pub(in crate::memory) uses: Mutex<Uses>,
    pub(super) kept: Mutex<Kept>,
}

pub(super) struct Kept {
    /// Graphs, and captures that may become some.
    pub(super) graphs: usize,
    /// Those of them with nodes that use it, and with nodes that write it: counted before the node is added, since another
    /// thread, or another capture, may build and launch the graph at any time after that.
    pub(super) readers: usize,
    pub(super) writers: usize,
    /// Its owner has dropped it.
    pub(super) memory: Option<Box<Memory>>,
}

/// A [turn](super::turn) at memory that graphs use, too. Taken again by whatever has it.
pub(in crate::memory) type Turn = turn::Turn<'static>;

static TURN: Turns = Turns(Mutex::at(Level::Turn, ()));

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    #[cold]
    pub(in crate::memory) fn take() -> Self {
        TURN.take(|mine| MINE.replace(mine))
    }
}

impl Tie {
    pub(super) fn lies_in(&self, host: &Range<usize>) -> bool {
        match self.home {
            Home::Host(start) => host.contains(&start.addr().get()),
            Home::Device(_) => false,
        }
    }

    #[cold]
    pub(super) fn is_the_hosts(&self, write: bool) -> Result<()> {
        let kept = lock(&self.kept);
        if kept.writers == 0 && (!write || kept.readers == 0) {
            return Ok(());
        }
        let text = if write {
            "the host would write memory that a graph uses, or what is captured for one, and a launch may use it at any time: \
             write other memory, and copy it there on a stream"
        } else {
            "the host would look at memory that a graph writes, or what is captured for one, and a launch may write it at any \
             time: copy it out after the launch, with `Buffer::to_vec` say"
        };
        Err(Error::new(ErrorKind::Usage, text))
    }
}
