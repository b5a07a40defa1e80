//! [`Backlog`]: keeps a stream's pending work from filling the driver's queue.
//!
//! The driver's queue for a stream is bounded: on an H200 it holds 1,021 kernels, copies and graph launches; events,
//! waits and host functions take no slot in it. A call that finds the queue full blocks within the driver, and so does
//! every other call that needs the context exclusively, on all streams (measured): creating and destroying streams and
//! events, host functions, allocations of page-locked memory. A drop or an allocation on one thread would wait for the
//! device because another thread enqueues faster than the device works.
//!
//! ```text
//!   op ... op, event, op ... op, event, op ...     an event every `step` operations: once it has passed, all
//!                                                  operations before it have
//!   make room:  room left ──> a slot is reserved ──> enqueue     before a lock is taken
//!               full ──> the events are queried until there is room
//! ```
//!
//! A thread that holds a slot waits neither for another slot nor for a thread that needs one, so it enqueues soon. The
//! queue is never full, however many threads enqueue.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    device::backend::{Backend, RawEvent, RawStream},
    error::Result,
    sync::{Level, Mutex, assert_unlocked, lock},
};

/// The amount of a raw stream's work that is enqueued and not known to be done. Several [`Stream`](super::Stream)s may
/// share it.
pub(super) struct Backlog {
    /// The limit of enqueued operations and reserved slots together.
    max: u64,
    /// The number of operations between two events.
    step: u64,
    /// The number of operations enqueued so far and, in the upper bits, of reserved slots ([`SLOT`]): one word, since
    /// every launch changes both.
    taken: AtomicU64,
    /// Below this count a reservation succeeds without querying events.
    free_until: AtomicU64,
    events: Mutex<Events>,
}

/// What a reserved slot adds to [`Backlog::taken`]. 2^48 operations last nine years at a million a second, and 2^16
/// threads can hold a slot at a time.
const SLOT: u64 = 1 << 48;

const fn enqueued(taken: u64) -> u64 {
    taken % SLOT
}

/// The number of operations enqueued plus the number of slots reserved.
const fn with_reserved(taken: u64) -> u64 {
    enqueued(taken) + taken / SLOT
}

#[derive(Default)]
struct Events {
    /// Each event with the number of operations before it, oldest first.
    open: VecDeque<(u64, RawEvent)>,
    idle: Vec<RawEvent>,
    passed: u64,
}

/// A slot in the queue for one operation, reserved until the operation is enqueued or the slot is dropped.
#[must_use]
pub(crate) struct QueueSlot<'b>(Option<&'b Backlog>);

impl QueueSlot<'_> {
    pub(super) const UNBOUNDED: Self = Self(None);

    /// Consumes the slot: one operation was enqueued.
    #[inline]
    pub(super) fn fill(self, backend: &dyn Backend, stream: RawStream) {
        if let Some(backlog) = self.0 {
            std::mem::forget(self);
            let before = backlog.taken.fetch_sub(SLOT - 1, Ordering::Release);
            backlog.mark_if_due(backend, stream, enqueued(before), 1);
        }
    }
}

impl Drop for QueueSlot<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(backlog) = self.0 {
            backlog.taken.fetch_sub(SLOT, Ordering::Release);
        }
    }
}

impl Backlog {
    /// `None` if the queue has no bound.
    pub(super) fn of(backend: &dyn Backend) -> Option<Arc<Self>> {
        let depth = backend.queue_depth()?.max(16);
        let max = depth - depth / 4;
        Some(Arc::new(Self {
            max,
            step: (depth / 8).max(1),
            taken: AtomicU64::new(0),
            free_until: AtomicU64::new(max),
            events: Mutex::at(Level::Backlog, Events::default()),
        }))
    }

    /// Reserves a slot, if one is free. Never blocks.
    #[inline]
    pub(super) fn reserve(&self) -> Option<QueueSlot<'_>> {
        let before = self.taken.fetch_add(SLOT, Ordering::AcqRel);
        let room = QueueSlot(Some(self));
        (with_reserved(before) < self.free_until.load(Ordering::Relaxed)).then_some(room)
    }

    /// Queries the device, and reserves a slot if one is free. Never blocks. Also succeeds if the device's progress
    /// cannot be determined: the next call to the device reports the reason.
    pub(super) fn reserve_if_passed(&self, backend: &dyn Backend) -> Option<QueueSlot<'_>> {
        match self.query_passed(backend) {
            Some(_) => self.reserve(),
            None => Some(self.reserve_beyond()),
        }
    }

    /// Reserves a slot even if the queue is full.
    #[cold]
    pub(super) fn reserve_beyond(&self) -> QueueSlot<'_> {
        self.taken.fetch_add(SLOT, Ordering::AcqRel);
        QueueSlot(Some(self))
    }

    /// Blocks the thread while the queue is full. Returns false if the progress cannot be determined: after a fault,
    /// which the next call reports, or if no event could be recorded. In the latter case, the driver's queue is the
    /// only bound.
    ///
    /// # Errors
    /// Those of `goes_on`, which is called before each pause.
    #[cold]
    pub(super) fn wait(&self, backend: &dyn Backend, goes_on: impl Fn() -> Result<()>) -> Result<bool> {
        /// Much shorter than a queue of hundreds of operations takes to drain.
        const PAUSE: Duration = Duration::from_micros(50);
        assert_unlocked();
        while let Some(passed) = self.query_passed(backend) {
            // Reserved slots count, too, although they might never be used.
            if with_reserved(self.taken.load(Ordering::Acquire)) < passed + self.max {
                return Ok(true);
            }
            goes_on()?;
            thread::sleep(PAUSE);
        }
        Ok(false)
    }

    /// The number of operations that have passed; `None` if it cannot be determined.
    fn query_passed(&self, backend: &dyn Backend) -> Option<u64> {
        let mut events = lock(&self.events);
        while let Some((count, event)) = events.open.front().copied() {
            if !backend.event_query(event).ok()? {
                break;
            }
            events.open.pop_front();
            events.idle.push(event);
            events.passed = count;
        }
        let until = events.passed + self.max;
        self.free_until.store(until, Ordering::Relaxed);
        (!events.open.is_empty() || self.enqueued() < until).then_some(events.passed)
    }

    /// Called after `count` operations were enqueued. Never blocks.
    #[inline]
    pub(super) fn add_enqueued(&self, backend: &dyn Backend, stream: RawStream, count: u64) {
        let before = self.taken.fetch_add(count, Ordering::Relaxed);
        self.mark_if_due(backend, stream, enqueued(before), count);
    }

    #[inline]
    fn mark_if_due(&self, backend: &dyn Backend, stream: RawStream, before: u64, count: u64) {
        if before / self.step != (before + count) / self.step {
            // The next call to the device reports the error. If no event could be created, the driver's queue is the
            // only bound.
            let _ = self.mark(backend, stream);
        }
    }

    #[cold]
    fn mark(&self, backend: &dyn Backend, stream: RawStream) -> Result<()> {
        let mut events = lock(&self.events);
        // Read under the lock, so that counts ascend along the queue, and before the record, which then covers these
        // operations.
        let count = self.enqueued();
        let reusable = match events.idle.pop() {
            Some(event) => event,
            // If the stream never had much pending work, the oldest event has passed long ago.
            None => match events.open.front().copied() {
                Some((passed, oldest)) if backend.event_query(oldest)? => {
                    events.open.pop_front();
                    events.passed = passed;
                    self.free_until.store(passed + self.max, Ordering::Relaxed);
                    oldest
                }
                _ => backend.event_create(false)?,
            },
        };
        match backend.event_record(reusable, stream) {
            Ok(()) => events.open.push_back((count, reusable)),
            Err(error) => {
                events.idle.push(reusable);
                return Err(error);
            }
        }
        Ok(())
    }

    fn enqueued(&self) -> u64 {
        enqueued(self.taken.load(Ordering::Relaxed))
    }

    /// Records an event after the last operation of another library's stream whose last handle here is dropped.
    #[cfg(feature = "cuda")]
    pub(super) fn mark_end(&self, backend: &dyn Backend, stream: RawStream) {
        let events = lock(&self.events);
        let marked = events.open.back().map_or(events.passed, |(count, _)| *count);
        drop(events);
        if marked < self.enqueued() {
            // As in `mark_if_due`: the error is ignored.
            let _ = self.mark(backend, stream);
        }
    }

    /// Called after [`mark_end`](Self::mark_end). True if all work is done, or if this cannot be determined.
    #[cfg(feature = "cuda")]
    pub(super) fn is_over(&self, backend: &dyn Backend) -> bool {
        self.query_passed(backend).is_none() || lock(&self.events).open.is_empty()
    }

    /// Destroys the events. Called before the stream is destroyed.
    pub(super) fn close(&self, backend: &dyn Backend) {
        let Events { open, idle, .. } = std::mem::take(&mut *lock(&self.events));
        open.into_iter().map(|(_, event)| event).chain(idle).for_each(|event| backend.event_destroy(event));
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog").field("enqueued", &self.enqueued()).field("max", &self.max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        Buffer, Stream,
        device::{Device, Emulated},
    };

    #[test]
    fn a_stream_that_keeps_up_needs_few_events_and_never_waits() {
        let device = Device::emulated(Emulated::new().queue_depth(64));
        let stream = Stream::new(&device).unwrap();
        let mut buffer = Buffer::<u32>::new(&device, 4).unwrap();
        for _ in 0..1000 {
            stream.fill(&mut buffer, 1).unwrap();
            stream.synchronize_blocking().unwrap();
        }
        let backlog = stream.0.driver_stream.backlog().unwrap().0;
        let events = lock(&backlog.events);
        assert_eq!(backlog.taken.load(Ordering::Relaxed), 1000);
        assert!(events.open.len() + events.idle.len() <= 2, "{:?}", events.open);
    }

    #[test]
    fn host_functions_and_points_take_no_slot() {
        let device = Device::emulated(Emulated::new().queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        for _ in 0..100 {
            stream.host_function(|| ()).unwrap();
            stream.ticket().commit().unwrap();
        }
        assert_eq!(stream.0.driver_stream.backlog().unwrap().0.taken.load(Ordering::Relaxed), 0);
        drop(go);
        stream.synchronize_blocking().unwrap();
    }
}
