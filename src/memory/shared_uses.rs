//! [`SharedUses`]: the uses of memory that graphs share; and the [`UseLockGuard`] that each use of such memory takes.

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
    /// A node of a graph allocates the memory at each launch, and another node frees it.
    pub(super) of_node: bool,
    /// The memory's uses.
    pub(super) uses: Mutex<Uses>,
    pub(super) state: Mutex<SharedState>,
    /// The thread that it is lent to, 0 for none. Changed only with a [`UseLockGuard`] held.
    lent_to: AtomicUsize,
}

#[derive(Default)]
pub(super) struct SharedState {
    /// Graphs, and captures that may become graphs.
    pub(super) graphs: usize,
    /// How many of them have nodes that use it, and nodes that write it. Counted before the node is added, since
    /// another thread, or another capture, may build and launch the graph at any time after that.
    pub(super) readers: usize,
    pub(super) writers: usize,
    /// Gives the memory back, once its owner has dropped it. Called when no graph uses it any more.
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

    /// Takes the lock once `is_lent` is false: none of the memory to be used is [lent](LentUses) to another thread.
    #[cold]
    pub(super) fn acquire_when(is_lent: impl Fn() -> bool) -> Self {
        USE_LOCK.acquire_when(|mine| MINE.replace(mine), is_lent)
    }

    /// Takes the lock, if graphs use any of these pieces of memory.
    #[inline]
    pub(super) fn for_memory<'m>(these: impl Iterator<Item = Option<&'m Arc<SharedUses>>> + Clone) -> Option<Self> {
        these.clone().flatten().next()?;
        Some(Self::acquire_when(|| these.clone().flatten().any(|shared| shared.is_lent())))
    }
}

/// Memory of graphs that is lent to a user's function until this is dropped, which takes the lock.
#[derive(Default)]
#[must_use]
pub(super) struct LentUses(SmallVec<[Arc<SharedUses>; 4]>);

impl LentUses {
    /// Lends these. Call it with the lock held.
    pub(super) fn new<'m>(these: impl Iterator<Item = &'m Arc<SharedUses>>) -> Self {
        let mut lent = Self::default();
        for shared_uses in these {
            // If an outer piece of external work of this thread has lent it, that one returns it.
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

/// A number that no other thread has while this one lives.
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

    /// To another thread. Call it with the lock held.
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
            "the host would write memory that a graph or a capture uses, and a launch may use it at any time: \
             write other memory, and copy it there on a stream"
        } else {
            "the host would read memory that a graph or a capture writes, and a launch may write it at any time: copy it \
             after the launch, for example with `Buffer::to_vec`"
        };
        Err(Error::new(ErrorKind::Usage, text))
    }
}
