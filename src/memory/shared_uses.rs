//! [`SharedUses`]: the uses of memory that graphs share with its owner, or its parts with each other; and the [use lock](UseLockGuard), which each of
//! these uses acquires.

use std::{cell::Cell, ops::Range, sync::Arc};

use smallvec::SmallVec;

use super::{
    Location,
    use_lock::{UseLock, UseLockGuard},
    uses::Uses,
};
use crate::{
    error::{Error, ErrorKind, Result},
    sync::{AtomicUsize, Condvar, Level, Mutex, Ordering, lock},
};

/// The uses of memory that graphs share with its owner.
pub(super) struct SharedUses {
    pub(super) location: Location,
    pub(super) bytes: usize,
    /// True if a node of a graph allocates the memory at each launch and another node frees it.
    pub(super) of_node: bool,
    /// The memory's uses.
    pub(super) uses: Mutex<Uses>,
    pub(super) state: Mutex<SharedState>,
    /// The thread that the memory is lent to, 0 for none. Changed only with the use lock held.
    lent_to: AtomicUsize,
}

#[derive(Default)]
pub(super) struct SharedState {
    /// The number of graphs, and of captures that may become graphs, that use the memory.
    pub(super) graphs: usize,
    /// How many of these have nodes that use the memory, and nodes that write it. Counted before a node is added, since
    /// another thread or another capture may build and launch the graph at any time after that.
    pub(super) readers: usize,
    pub(super) writers: usize,
    /// Returns the memory to its origin. Set once its owner has dropped it, and called when no graph uses it any more.
    pub(super) give_back: Option<Box<dyn FnOnce() + Send>>,
}

/// The [use lock](super::use_lock).
static USE_LOCK: UseLock =
    UseLock { lock: Mutex::at(Level::UseLock, ()), lent: AtomicUsize::new(0), returned: Condvar::new() };

thread_local! {
    static MINE: Cell<bool> = const { Cell::new(false) };
}

impl UseLockGuard<'static> {
    #[cold]
    pub(super) fn acquire() -> Self {
        USE_LOCK.acquire(|mine| MINE.replace(mine))
    }

    /// Acquires the lock once `is_lent` is false, that is, when none of the memory to be used is [lent](LentUses) to
    /// another thread.
    #[cold]
    pub(super) fn acquire_when(is_lent: impl Fn() -> bool) -> Self {
        USE_LOCK.acquire_when(|mine| MINE.replace(mine), is_lent)
    }

    /// Acquires the lock if graphs use any of these pieces of memory.
    #[inline]
    pub(super) fn for_memory<'m>(these: impl Iterator<Item = Option<&'m Arc<SharedUses>>> + Clone) -> Option<Self> {
        these.clone().flatten().next()?;
        Some(Self::acquire_when(|| these.clone().flatten().any(|shared| shared.is_lent())))
    }
}

/// Memory of graphs that is lent to a user's function until this guard is dropped. The drop acquires the lock.
#[derive(Default)]
#[must_use]
pub(super) struct LentUses(SmallVec<[Arc<SharedUses>; 4]>);

impl LentUses {
    /// Lends these pieces of memory. Called with the lock held.
    pub(super) fn new<'m>(these: impl Iterator<Item = &'m Arc<SharedUses>>) -> Self {
        let mut lent = Self::default();
        for shared_uses in these {
            // If an outer piece of external work on this thread has lent it, the outer one returns it.
            if shared_uses.lent_to.load(Ordering::Relaxed) == 0 {
                shared_uses.lent_to.store(this_thread(), Ordering::Relaxed);
                USE_LOCK.lend();
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
        let _use_lock = UseLockGuard::acquire();
        for shared_uses in &self.0 {
            shared_uses.lent_to.store(0, Ordering::Relaxed);
            USE_LOCK.take_back();
        }
    }
}

/// A number that is unique to this thread while the thread lives.
fn this_thread() -> usize {
    MINE.with(|mine| std::ptr::from_ref(mine).addr())
}

impl SharedUses {
    pub(super) fn new(location: Location, bytes: usize, uses: Uses) -> Self {
        let (uses, state) = (uses.locked(), Mutex::new(SharedState::default()));
        Self { location, bytes, of_node: false, uses, state, lent_to: AtomicUsize::new(0) }
    }

    pub(super) fn of_node(location: Location, bytes: usize) -> Self {
        Self { of_node: true, ..Self::new(location, bytes, Uses::default()) }
    }

    /// True if the memory is lent to another thread. Called with the lock held.
    pub(super) fn is_lent(&self) -> bool {
        let thread = self.lent_to.load(Ordering::Relaxed);
        thread != 0 && thread != this_thread()
    }

    pub(super) fn lies_in(&self, host: &Range<usize>) -> bool {
        match self.location {
            Location::Host(start) => host.contains(&start.addr().get()),
            Location::Device(_) => false,
        }
    }

    #[cold]
    pub(super) fn check_host_access(&self, write: bool) -> Result<()> {
        let state = lock(&self.state);
        if state.writers == 0 && (!write || state.readers == 0) {
            return Ok(());
        }
        let text = if write {
            "the host cannot write memory that a graph or a capture uses, since a launch may use it at any time: \
             write to other memory, and copy the data on a stream"
        } else {
            "the host cannot read memory that a graph or a capture writes, since a launch may write it at any time: \
             copy the data after the launch, for example with `Buffer::to_vec`"
        };
        Err(Error::new(ErrorKind::Usage, text))
    }
}
