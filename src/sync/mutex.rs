//! [`Mutex`]: std's, with an order of acquisition that debug builds assert.
//!
//! A lock made by [`Mutex::new`] is a leaf: its holder acquires no other lock. Locks that nest are made by [`Mutex::at`] with
//! their [`Level`]. A thread that acquires a lock whose level is not below those it holds panics in a debug build, whether or
//! not another thread contends: so one run of a code path checks it. A release build contains std's mutex and nothing else.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{self, PoisonError},
    time::Duration,
};

/// The order in which a thread acquires locks that nest, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "some are of CUDA devices"))]
pub(crate) enum Level {
    /// `device`: the CUDA devices that were opened. One is opened under it.
    Devices,
    /// `device/cuda`: the open devices, by their ordinals.
    Opening,
    /// `flow/door`: what an ingress has given out, while its port is asked for more.
    Ingress,
    /// `operator/lent`: a port, while one outside of the operator uses it.
    Port,
    /// `operator/lane`: an operator's streams, while one is taken or waits for another.
    Lane,
    /// `hub/chunks`: the streams that carry a hub's copies, while one is made.
    CopyStreams,
    /// `stream/held`: a device's default stream, while it is made.
    DefaultStream,
    /// `stream/held`: what other libraries' streams have to do, while the device is asked about those that are not used.
    OtherStreams,
    /// `graph/exec`: what the nodes of an exec were set to.
    ExecChanges,
    /// `memory/staging`: what has come for memory that is not page-locked and is not brought over.
    Arrivals,
    /// `memory/hold/tie`: the turn at memory that graphs use.
    Turn,
    /// `memory/execution`: an exec that was dropped before its launches were done.
    EndingExec,
    /// `memory/execution`: what the launches of an exec use.
    ExecUses,
    /// `memory/hold`: what a graph keeps.
    GraphMemory,
    /// `hub/queue`, `hub/chunks`: the messages of a hub.
    Hub,
    /// `memory/heap`: the blocks of a heap.
    Heap,
    /// `memory`: the uses of a piece of memory.
    MemoryUses,
    /// `stream/marker`: the record of an event.
    EventRecord,
    /// `stream/capture`: the streams of a capture, while one is made.
    CaptureStreams,
    /// `stream`: tickets and enqueues.
    StreamOrder,
    /// `stream/backlog`: what a stream has to do, while the device is asked.
    Backlog,
    /// `device/recorder`: the recorder of a graph that becomes a node of another one.
    ChildRecorder,
    /// `device/recorder`: the graph that is recorded.
    Recorder,
    /// `stream/lookout`: what the lookout has to do.
    Lookout,
    /// `device/cuda`, `device/emulated`: the graphs of a device; a kernel that is prepared.
    DriverObjects,
    /// `device/emulated/workers`: the machine that all emulated devices share.
    Machine,
    /// `device/emulated/simulation`: the loop that runs it.
    Simulation,
    /// Everything else: nothing is acquired under it.
    Leaf,
}

/// A mutual exclusion lock that ignores poisoning and knows its [`Level`].
pub(crate) struct Mutex<T: ?Sized> {
    #[cfg(debug_assertions)]
    level: Level,
    inner: sync::Mutex<T>,
}

/// Access to what a [`Mutex`] protects, until it is dropped.
#[must_use]
pub(crate) struct MutexGuard<'a, T: ?Sized> {
    inner: sync::MutexGuard<'a, T>,
    // Below the guard: the lock is released first.
    #[cfg(debug_assertions)]
    held: held::Held,
}

/// std's condition variable, for a [`Mutex`]. A thread waits with that one lock only.
#[derive(Debug, Default)]
pub(crate) struct Condvar(sync::Condvar);

impl<T> Mutex<T> {
    /// A leaf.
    #[inline]
    pub(crate) const fn new(value: T) -> Self {
        Self::at(Level::Leaf, value)
    }

    /// One that is acquired in the order of its level.
    #[inline]
    #[cfg_attr(not(debug_assertions), allow(unused_variables, reason = "only debug builds keep it"))]
    pub(crate) const fn at(level: Level, value: T) -> Self {
        Self {
            #[cfg(debug_assertions)]
            level,
            inner: sync::Mutex::new(value),
        }
    }

    #[inline]
    pub(crate) fn into_inner(self) -> T {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    #[inline]
    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(debug_assertions)]
        let held = held::Held::acquire(self.level, std::any::type_name::<T>(), true);
        MutexGuard {
            inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner),
            #[cfg(debug_assertions)]
            held,
        }
    }

    /// As [`lock`](Self::lock), with another level than its own, for one of several locks of one kind that are held together.
    #[inline]
    #[track_caller]
    #[cfg_attr(not(debug_assertions), allow(unused_variables, reason = "only debug builds look at it"))]
    pub(crate) fn lock_as(&self, level: Level) -> MutexGuard<'_, T> {
        #[cfg(debug_assertions)]
        let held = held::Held::acquire(level, std::any::type_name::<T>(), true);
        MutexGuard {
            inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner),
            #[cfg(debug_assertions)]
            held,
        }
    }

    /// `None` if it is held, by this thread or another. It never blocks, so it asserts no order.
    #[cfg(test)]
    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(sync::TryLockError::WouldBlock) => return None,
        };
        #[cfg(debug_assertions)]
        let held = held::Held::acquire(self.level, std::any::type_name::<T>(), false);
        Some(MutexGuard {
            inner,
            #[cfg(debug_assertions)]
            held,
        })
    }

    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Default> Default for Mutex<T> {
    /// A leaf.
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// Without what it protects: a writer is user code, and runs with no lock held.
impl<T: ?Sized> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Releases the lock while it waits, and acquires it again.
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        #[cfg(debug_assertions)]
        guard.held.assert_alone();
        MutexGuard { inner: self.0.wait(guard.inner).unwrap_or_else(PoisonError::into_inner), ..guard }
    }

    /// As [`wait`](Self::wait), where the thread may hold other locks, which keeps other threads from those, too.
    pub(crate) fn wait_with_others<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard { inner: self.0.wait(guard.inner).unwrap_or_else(PoisonError::into_inner), ..guard }
    }

    /// As [`wait`](Self::wait), for so long at most.
    pub(crate) fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
        #[cfg(debug_assertions)]
        guard.held.assert_alone();
        MutexGuard { inner: self.0.wait_timeout(guard.inner, time).unwrap_or_else(PoisonError::into_inner).0, ..guard }
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Asserts, in a debug build, that this thread holds none of the crate's locks: user code is about to run.
#[inline]
#[track_caller]
pub(crate) fn assert_unlocked() {
    #[cfg(debug_assertions)]
    held::assert_none();
}

/// Whether this thread holds none of the crate's locks. Known in a debug build only, true in others.
#[inline]
pub(crate) fn is_unlocked() -> bool {
    #[cfg(debug_assertions)]
    return held::is_none();
    #[cfg(not(debug_assertions))]
    true
}

/// The locks that a thread holds.
#[cfg(debug_assertions)]
mod held {
    use std::{
        cell::{Cell, RefCell},
        marker::PhantomData,
        panic::Location,
    };

    use super::Level;

    /// More than ever nest.
    const MOST: usize = 24;

    #[derive(Clone, Copy)]
    struct Entry {
        key: u64,
        level: Level,
        name: &'static str,
        at: &'static Location<'static>,
    }

    thread_local! {
        // Neither has a destructor, so both are there for destructors that run at the thread's end.
        static HELD: RefCell<[Option<Entry>; MOST]> = const { RefCell::new([None; MOST]) };
        static KEYS: Cell<u64> = const { Cell::new(0) };
    }

    /// One of them. `None`: too many for the table.
    pub(super) struct Held(Option<u64>, PhantomData<*mut ()>);

    impl Held {
        #[track_caller]
        pub(super) fn acquire(level: Level, name: &'static str, in_order: bool) -> Self {
            let new = Entry { key: KEYS.replace(KEYS.get() + 1), level, name, at: Location::caller() };
            let wrong = HELD.with_borrow(|held| held.iter().flatten().find(|held| held.level >= level).copied());
            if let Some(wrong) = wrong.filter(|_| in_order && !std::thread::panicking()) {
                refuse(&new, &wrong);
            }
            HELD.with_borrow_mut(|held| {
                let free = held.iter_mut().find(|held| held.is_none());
                Self(free.map(|free| free.insert(new).key), PhantomData)
            })
        }

        /// A thread that sleeps with another lock held would keep everyone from it.
        #[track_caller]
        pub(super) fn assert_alone(&self) {
            let other = HELD.with_borrow(|held| held.iter().flatten().find(|held| Some(held.key) != self.0).copied());
            if let Some(other) = other.filter(|_| !std::thread::panicking()) {
                panic!("a thread waits for a condition and holds {other}");
            }
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let Some(key) = self.0 else { return };
            HELD.with_borrow_mut(|held| {
                if let Some(mine) = held.iter_mut().find(|held| held.is_some_and(|held| held.key == key)) {
                    *mine = None;
                }
            });
        }
    }

    #[track_caller]
    pub(super) fn assert_none() {
        let held = HELD.with_borrow(|held| held.iter().flatten().last().copied());
        if let Some(held) = held.filter(|_| !std::thread::panicking()) {
            panic!("user code would run with a lock held: {held}");
        }
    }

    pub(super) fn is_none() -> bool {
        HELD.with_borrow(|held| held.iter().all(Option::is_none))
    }

    #[cold]
    #[track_caller]
    fn refuse(new: &Entry, held: &Entry) -> ! {
        panic!("locks in the wrong order: {new}, with this held: {held}")
    }

    impl std::fmt::Display for Entry {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{:?} ({}) at {}", self.level, self.name, self.at)
        }
    }
}
