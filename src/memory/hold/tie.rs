//! [`Tie`]: what binds memory to graphs; and the [`Turn`] that whoever uses such memory takes.

use std::{cell::Cell, ops::Range};

use super::super::{Home, Memory, access::Uses};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, MutexGuard, lock},
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

/// A turn at memory that graphs use, too: from the look at its uses to the note of a new one. Taken again by whoever has it.
#[must_use]
pub(in crate::memory) struct Turn {
    taken: Option<MutexGuard<'static, ()>>,
    /// What is woken meanwhile is woken after it. Below the guard, so that it ends later.
    _later: Deferred,
}

static TURN: Mutex<()> = Mutex::at(Level::Turn, ());

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    #[cold]
    pub(in crate::memory) fn take() -> Self {
        let _later = Deferred::new();
        let taken = if MINE.replace(true) { None } else { Some(lock(&TURN)) };
        Self { taken, _later }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.taken.is_some() {
            MINE.set(false);
        }
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
