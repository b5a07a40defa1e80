//! [`Mutex`]: std's mutex, with an order of acquisition that debug builds assert.
//!
//! A lock made by [`Mutex::new`] is a leaf: its holder acquires no other lock. Locks that nest are made by
//! [`Mutex::at`] with their [`Level`]. In a debug build, a thread panics if it acquires a lock whose level is not below
//! those of the locks it holds, whether or not another thread contends: a single run of a code path checks its lock
//! order. A release build contains only std's mutex.

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
    /// `observe`: the observed flows; the records of a run, while it is sampled.
    Records,
    /// `observe`: the paths of a run, while they are collected.
    Paths,
    /// `device`: the CUDA devices that were opened. Held while one is opened.
    Devices,
    /// `device/cuda`: the open devices, by their ordinals.
    Opening,
    /// `flow/ingress_gate`: the envelopes that an ingress has handed out, while its port is asked for more.
    Ingress,
    /// `operator/shared_port`: a port, while it is used outside of its operator.
    Port,
    /// `operator/operator_streams`: an operator's streams, while one is taken or waits for another.
    OperatorStreams,
    /// `hub/chunks`: the streams of a hub's copies, while one is created.
    CopyStreams,
    /// `stream/stream`: a device's default stream, while it is created.
    DefaultStream,
    /// `stream/driver_stream`: the pending work of other libraries' streams, while unused ones are queried.
    OtherStreams,
    /// `graph/exec`: the work that nodes of an exec were set to.
    ExecChanges,
    /// `memory/host`: data that has arrived for pageable memory and is not copied there yet.
    Arrivals,
    /// `memory/shared_uses`: the lock on uses of memory that graphs share.
    UseLock,
    /// `memory/execution`: an exec that was dropped before its launches were done.
    EndingExec,
    /// `memory/execution`: the resources that the launches of an exec use.
    ExecUses,
    /// `memory/graph_memory`: the memory that a graph keeps.
    GraphMemory,
    /// `hub/queue`, `hub/chunks`: the messages of a hub.
    Hub,
    /// `memory/heap`: the blocks of a heap.
    Heap,
    /// `memory`: the uses of a piece of memory.
    MemoryUses,
    /// `stream/event`: the record of an event.
    EventRecord,
    /// `stream/capture`: the streams of a capture, while one is created.
    CaptureStreams,
    /// `stream/order`: tickets and enqueues.
    StreamOrder,
    /// `stream/spans`: the timed work of a flow, while it is read.
    SpanReader,
    /// `stream/backlog`: a stream's pending work, while the device is queried.
    Backlog,
    /// `device/recorder`: the recorder of a graph that becomes a node of another one.
    ChildRecorder,
    /// `device/recorder`: the graph that is recorded.
    Recorder,
    /// `stream/monitor`: the completion monitor's tasks.
    CompletionMonitor,
    /// `device/cuda`, `device/emulated`: the graphs of a device; a kernel that is being prepared.
    DriverObjects,
    /// `device/emulated/workers`: the machine that all emulated devices share.
    Machine,
    /// `device/emulated/simulation`: the loop that runs a simulation.
    Simulation,
    /// All other locks: nothing is acquired under them.
    Leaf,
}

/// A mutual exclusion lock that ignores poisoning and has a [`Level`].
pub(crate) struct Mutex<T: ?Sized> {
    #[cfg(debug_assertions)]
    level: Level,
    inner: sync::Mutex<T>,
}

/// Access to the value that a [`Mutex`] protects. Dropping the guard releases the lock.
#[must_use]
pub(crate) struct MutexGuard<'a, T: ?Sized> {
    inner: sync::MutexGuard<'a, T>,
    // Declared after the guard, so that the lock is released first.
    #[cfg(debug_assertions)]
    held: held::HeldLock,
}

/// std's condition variable, for a [`Mutex`]. A waiting thread holds no other lock.
#[derive(Debug, Default)]
pub(crate) struct Condvar(sync::Condvar);

impl<T> Mutex<T> {
    /// Creates a leaf lock.
    #[inline]
    pub(crate) const fn new(value: T) -> Self {
        Self::at(Level::Leaf, value)
    }

    /// Creates a lock that is acquired in the order of its level.
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
        let held = held::HeldLock::acquire(self.level, std::any::type_name::<T>(), true);
        MutexGuard {
            inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner),
            #[cfg(debug_assertions)]
            held,
        }
    }

    /// Like [`lock`](Self::lock), at another level, for one of several locks of the same kind that are held together.
    #[inline]
    #[track_caller]
    #[cfg_attr(not(debug_assertions), allow(unused_variables, reason = "only debug builds check it"))]
    pub(crate) fn lock_as(&self, level: Level) -> MutexGuard<'_, T> {
        #[cfg(debug_assertions)]
        let held = held::HeldLock::acquire(level, std::any::type_name::<T>(), true);
        MutexGuard {
            inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner),
            #[cfg(debug_assertions)]
            held,
        }
    }

    /// `None` if the lock is held, by this thread or another. It never blocks, so it asserts no order.
    #[cfg(test)]
    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(sync::TryLockError::WouldBlock) => return None,
        };
        #[cfg(debug_assertions)]
        let held = held::HeldLock::acquire(self.level, std::any::type_name::<T>(), false);
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
    /// Creates a leaf lock.
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// Does not print the protected value: the writer is user code, which must run with no lock held.
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

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        #[cfg(debug_assertions)]
        guard.held.assert_alone();
        MutexGuard { inner: self.0.wait(guard.inner).unwrap_or_else(PoisonError::into_inner), ..guard }
    }

    /// Like [`wait`](Self::wait), but the thread may hold other locks, which stay locked during the wait.
    pub(crate) fn wait_with_others<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard { inner: self.0.wait(guard.inner).unwrap_or_else(PoisonError::into_inner), ..guard }
    }

    /// Like [`wait`](Self::wait), with a timeout.
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

/// Asserts, in a debug build, that this thread holds none of the crate's locks. Call it before user code runs.
#[inline]
#[track_caller]
pub(crate) fn assert_unlocked() {
    #[cfg(debug_assertions)]
    held::assert_none();
}

/// True if this thread holds none of the crate's locks. Release builds do not track locks and return true.
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

    /// More than the number of locks that ever nest.
    const MOST: usize = 24;

    #[derive(Clone, Copy)]
    struct LockEntry {
        key: u64,
        level: Level,
        name: &'static str,
        at: &'static Location<'static>,
    }

    thread_local! {
        // Neither has a destructor, so both can be used in destructors that run at the thread's end.
        static HELD: RefCell<[Option<LockEntry>; MOST]> = const { RefCell::new([None; MOST]) };
        static KEYS: Cell<u64> = const { Cell::new(0) };
    }

    /// An entry of the table; `None` if the table was full.
    pub(super) struct HeldLock(Option<u64>, PhantomData<*mut ()>);

    impl HeldLock {
        #[track_caller]
        pub(super) fn acquire(level: Level, name: &'static str, in_order: bool) -> Self {
            let new = LockEntry { key: KEYS.replace(KEYS.get() + 1), level, name, at: Location::caller() };
            let wrong = HELD.with_borrow(|held| held.iter().flatten().find(|held| held.level >= level).copied());
            if let Some(wrong) = wrong.filter(|_| in_order && !std::thread::panicking()) {
                refuse(&new, &wrong);
            }
            HELD.with_borrow_mut(|held| {
                let free = held.iter_mut().find(|held| held.is_none());
                Self(free.map(|free| free.insert(new).key), PhantomData)
            })
        }

        /// Asserts that no other lock is held: a thread that sleeps with one would block all other threads that need
        /// it.
        #[track_caller]
        pub(super) fn assert_alone(&self) {
            let other = HELD.with_borrow(|held| held.iter().flatten().find(|held| Some(held.key) != self.0).copied());
            if let Some(other) = other.filter(|_| !std::thread::panicking()) {
                panic!("a thread would wait for a condition variable while it holds {other}");
            }
        }
    }

    impl Drop for HeldLock {
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
    fn refuse(new: &LockEntry, held: &LockEntry) -> ! {
        panic!("lock order violated: {new} would be acquired while {held} is held")
    }

    impl std::fmt::Display for LockEntry {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{:?} ({}) at {}", self.level, self.name, self.at)
        }
    }
}
