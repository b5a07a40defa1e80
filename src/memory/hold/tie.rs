//! [`Tie`]: what binds memory to graphs; and the [`Turn`] that whoever uses such memory takes.

use std::{cell::Cell, ops::Range, sync::Arc};

use smallvec::SmallVec;

use super::{
    super::{Home, Memory, access::Uses},
    turn::{self, Turns},
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{AtomicUsize, Condvar, Level, Mutex, Ordering, lock},
};

/// What binds memory to graphs.
pub(in crate::memory) struct Tie {
    pub(super) home: Home,
    pub(super) bytes: usize,
    /// The memory's.
    pub(in crate::memory) uses: Mutex<Uses>,
    pub(super) kept: Mutex<Kept>,
    /// The thread that it is lent to, 0 for none: changed within a [`Turn`] only.
    pub(super) lent_to: AtomicUsize,
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

static TURN: Turns = Turns { lock: Mutex::at(Level::Turn, ()), lent: AtomicUsize::new(0), returned: Condvar::new() };

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    #[cold]
    pub(in crate::memory) fn take() -> Self {
        TURN.take(|mine| MINE.replace(mine))
    }

    /// A turn at memory of which nothing is [lent](Lent) to another thread, as `is_lent` says.
    #[cold]
    pub(in crate::memory) fn take_when(is_lent: impl Fn() -> bool) -> Self {
        TURN.take_when(|mine| MINE.replace(mine), is_lent)
    }

    /// A turn at these, if graphs use any of them.
    #[inline]
    pub(in crate::memory) fn at<'m>(these: impl Iterator<Item = &'m Memory> + Clone) -> Option<Self> {
        let tied = || these.clone().filter_map(|memory| memory.tie.get());
        tied().next()?;
        Some(Self::take_when(|| these.clone().any(Memory::is_lent)))
    }
}

/// Memory of graphs that is lent to a function of the user's until this is dropped, within a turn that it takes.
#[derive(Default)]
#[must_use]
pub(in crate::memory) struct Lent(SmallVec<[Arc<Tie>; 4]>);

impl Lent {
    /// Lends these. Within a turn.
    pub(in crate::memory) fn new<'m>(these: impl Iterator<Item = &'m Memory>) -> Self {
        let mut lent = Self::default();
        for tie in these.filter_map(|memory| memory.tie.get()) {
            // Another piece of external work of this thread has it: then that one returns it.
            if tie.lent_to.load(Ordering::Relaxed) == 0 {
                tie.lent_to.store(this_thread(), Ordering::Relaxed);
                TURN.lend();
                lent.0.push(tie.clone());
            }
        }
        lent
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        let _turn = Turn::take();
        for tie in &self.0 {
            tie.lent_to.store(0, Ordering::Relaxed);
            TURN.give_back();
        }
    }
}

/// A number that no other thread has while this one lives.
fn this_thread() -> usize {
    MINE.with(|mine| std::ptr::from_ref(mine).addr())
}

impl Tie {
    /// To another thread. Within a turn.
    pub(super) fn is_lent(&self) -> bool {
        let thread = self.lent_to.load(Ordering::Relaxed);
        thread != 0 && thread != this_thread()
    }

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
