//! [`SharedUses`]: the uses of memory that graphs share; and the [`UseLock`] that each use of such memory takes.

use std::{cell::Cell, ops::Range, sync::Arc};

use smallvec::SmallVec;

use super::{
    super::{Home, Memory, access::Uses},
    use_lock::{self, UseLocks},
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{AtomicUsize, Condvar, Level, Mutex, Ordering, lock},
};

/// The uses of memory that graphs share with its owner.
pub(in crate::memory) struct SharedUses {
    pub(super) home: Home,
    pub(super) bytes: usize,
    /// The memory's uses.
    pub(in crate::memory) uses: Mutex<Uses>,
    pub(super) kept: Mutex<SharedState>,
    /// The thread that it is lent to, 0 for none. Changed only with a [`UseLock`] held.
    pub(super) lent_to: AtomicUsize,
}

pub(super) struct SharedState {
    /// Graphs, and captures that may become graphs.
    pub(super) graphs: usize,
    /// How many of them have nodes that use it, and nodes that write it. Counted before the node is added, since
    /// another thread, or another capture, may build and launch the graph at any time after that.
    pub(super) readers: usize,
    pub(super) writers: usize,
    /// The memory, once its owner has dropped it.
    pub(super) memory: Option<Box<Memory>>,
}

/// The [use lock](super::use_lock). A thread that holds it may take it again.
pub(in crate::memory) type UseLock = use_lock::UseLock<'static>;

static USE_LOCKS: UseLocks =
    UseLocks { lock: Mutex::at(Level::UseLock, ()), lent: AtomicUsize::new(0), returned: Condvar::new() };

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

impl UseLock {
    #[cold]
    pub(in crate::memory) fn take() -> Self {
        USE_LOCKS.take(|mine| MINE.replace(mine))
    }

    /// Takes the lock once `is_lent` is false: none of the memory to be used is [lent](LentUses) to another thread.
    #[cold]
    pub(in crate::memory) fn take_when(is_lent: impl Fn() -> bool) -> Self {
        USE_LOCKS.take_when(|mine| MINE.replace(mine), is_lent)
    }

    /// Takes the lock, if graphs use any of these.
    #[inline]
    pub(in crate::memory) fn at<'m>(these: impl Iterator<Item = &'m Memory> + Clone) -> Option<Self> {
        let tied = || these.clone().filter_map(|memory| memory.shared_uses.get());
        tied().next()?;
        Some(Self::take_when(|| these.clone().any(Memory::is_lent)))
    }
}

/// Memory of graphs that is lent to a user's function until this is dropped, which takes the lock.
#[derive(Default)]
#[must_use]
pub(in crate::memory) struct LentUses(SmallVec<[Arc<SharedUses>; 4]>);

impl LentUses {
    /// Lends these. Call it with the lock held.
    pub(in crate::memory) fn new<'m>(these: impl Iterator<Item = &'m Memory>) -> Self {
        let mut lent = Self::default();
        for shared_uses in these.filter_map(|memory| memory.shared_uses.get()) {
            // If an outer piece of external work of this thread has lent it, that one returns it.
            if shared_uses.lent_to.load(Ordering::Relaxed) == 0 {
                shared_uses.lent_to.store(this_thread(), Ordering::Relaxed);
                USE_LOCKS.lend();
                lent.0.push(shared_uses.clone());
            }
        }
        lent
    }
}

impl Drop for LentUses {
    fn drop(&mut self) {
        if self.0.is_empty() {
            return;
        }
        let _use_lock = UseLock::take();
        for shared_uses in &self.0 {
            shared_uses.lent_to.store(0, Ordering::Relaxed);
            USE_LOCKS.give_back();
        }
    }
}

/// A number that no other thread has while this one lives.
fn this_thread() -> usize {
    MINE.with(|mine| std::ptr::from_ref(mine).addr())
}

impl SharedUses {
    /// To another thread. Call it with the lock held.
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
            "the host would write memory that a graph or a capture uses, and a launch may use it at any time: \
             write other memory, and copy it there on a stream"
        } else {
            "the host would read memory that a graph or a capture writes, and a launch may write it at any time: copy it \
             after the launch, for example with `Buffer::to_vec`"
        };
        Err(Error::new(ErrorKind::Usage, text))
    }
}
