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
    stream::Stream,
    sync::{AtomicBool, AtomicUsize, Condvar, Level, Mutex, Ordering, lock},
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
    /// Whether the function that it is lent to may write it. Changed only with the use lock held.
    lent_to_write: AtomicBool,
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

/// Whether memory is lent at all. On a thread that has lent some, this is true.
#[inline]
pub(super) fn is_any_lent() -> bool {
    USE_LOCK.lent.load(Ordering::Relaxed) > 0
}

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
    /// Lends these pieces of memory, each with whether the function may write it. Called with the lock held.
    pub(super) fn new<'m>(these: impl Iterator<Item = (&'m Arc<SharedUses>, bool)>) -> Self {
        let mut lent = Self::default();
        for (shared_uses, write) in these {
            // It may be declared several times, in parts, or already be lent for reading to an outer function on this
            // thread. The first that has lent it returns it.
            if shared_uses.lent_to.load(Ordering::Relaxed) == 0 {
                shared_uses.lent_to.store(this_thread(), Ordering::Relaxed);
                USE_LOCK.lend();
                lent.0.push(shared_uses.clone());
            }
            shared_uses.lent_to_write.fetch_or(write, Ordering::Relaxed);
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
            shared_uses.lent_to_write.store(false, Ordering::Relaxed);
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
        Self {
            location,
            bytes,
            of_node: false,
            uses,
            state,
            lent_to: AtomicUsize::new(0),
            lent_to_write: AtomicBool::new(false),
        }
    }

    pub(super) fn of_node(location: Location, bytes: usize) -> Self {
        Self { of_node: true, ..Self::new(location, bytes, Uses::default()) }
    }

    /// True if the memory is lent to another thread. Called with the lock held.
    pub(super) fn is_lent(&self) -> bool {
        let thread = self.lent_to.load(Ordering::Relaxed);
        thread != 0 && thread != this_thread()
    }

    /// Fails for a use by a function that the memory is lent to, which this thread has called, unless both only read. The
    /// work of that function is noted later, as if it came after all other uses, and these would be forgotten.
    pub(super) fn check_not_lent(&self, stream: &Stream, write: bool) -> Result<()> {
        let is_mine = self.lent_to.load(Ordering::Relaxed) == this_thread();
        if !is_mine || !(write || self.lent_to_write.load(Ordering::Relaxed)) {
            return Ok(());
        }
        let text = format!(
            "stream `{}` would use memory that external work declares, in part or in a graph, from within the function of \
             that work: use it before or after `External::enqueue`",
            stream.name()
        );
        Err(Error::new(ErrorKind::Usage, text))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Buffer,
        device::{Device, Emulated},
        graph::Graph,
        memory::DeviceSlice,
    };

    /// What external work does while its function runs: the part that it declares is lent, and the function uses the
    /// other part on another stream.
    #[test]
    fn memory_that_is_lent_to_this_thread_is_not_used_by_it() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let mut x = Buffer::from_slice(&stream, &[1_u32; 8]).unwrap();
        let mut other = Buffer::<u32>::new(&device, 4).unwrap();
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut x, 3)).unwrap();
        let exec = graph.instantiate().unwrap();
        let (left, mut right) = x.split_at_mut(4).unwrap();
        let lent = {
            let _use_lock = UseLockGuard::acquire();
            LentUses::new(left.view().memory.shared.get().into_iter().map(|shared| (shared, true)))
        };
        let before = left.view().memory.uses().all().len();
        let refused = [
            stream.fill(&mut right, 2),
            stream.copy(&right, &mut other),
            stream.copy(&other, &mut right),
            exec.launch(&stream).map(drop),
            Graph::capture(&device, |capture| capture.stream().fill(&mut right, 2)).map(drop),
        ];
        for outcome in refused {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains("from within the function of that work"), "{error}");
        }
        assert_eq!(left.view().memory.uses().all().len(), before, "nothing was noted");
        drop(lent);
        let lent = {
            let _use_lock = UseLockGuard::acquire();
            LentUses::new(left.view().memory.shared.get().into_iter().map(|shared| (shared, false)))
        };
        stream.copy(&right, &mut other).expect("both only read");
        assert_eq!(stream.fill(&mut right, 2).unwrap_err().kind(), ErrorKind::Usage);
        drop(lent);
        stream.fill(&mut right, 2).unwrap();
        exec.launch(&stream).unwrap();
        assert_eq!(futures::executor::block_on(x.to_vec(&stream)).unwrap(), [3; 8]);
    }
}
