//! [`Backlog`]: what a stream has to do must not fill the driver's queue.
//!
//! A driver's queue for a stream is bounded: on an H200 it takes 1,021 kernels, copies and launches of graphs; events, waits
//! and host functions take no place in it. The call that finds it full waits within the driver, and holds up every other
//! call there that needs the context to itself (measured): making and ending streams and events, host functions,
//! allocations of page-locked memory, on all streams. So a drop or an allocation on one thread would wait for the device
//! because another thread launches faster than the device works.
//!
//! ```text
//!   piece ... piece, event, piece ... piece, event, piece ...     an event every so many pieces: the device has passed those
//!                                                                 before it
//!   make room:  little to do ──> a place is kept ──> enqueue      before a lock is taken
//!               too much ──> the events are asked until it is less
//! ```
//!
//! A thread that has a place waits for no other place, nor for what such a thread waits for: so it enqueues soon, and however
//! many threads there are the queue is never full.

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

/// How much of one stream of the device's is enqueued and not known to be done. Several [`Stream`](super::Stream)s may share it.
pub(super) struct Backlog {
    /// Pieces that are enqueued, and places that are kept, at most.
    most: u64,
    /// Pieces between two events.
    step: u64,
    /// How many pieces are enqueued since the beginning, and, above those, how many places are kept ([`PLACE`]): one word, as
    /// every launch changes both.
    taken: AtomicU64,
    /// Up to here nothing need be asked.
    free_until: AtomicU64,
    events: Mutex<Events>,
}

/// What a kept place adds to [`Backlog::taken`]: 2^48 pieces are nine years of a million a second, and 2^16 threads have a place
/// at a time.
const PLACE: u64 = 1 << 48;

/// Pieces that are enqueued.
const fn enqueued(taken: u64) -> u64 {
    taken % PLACE
}

/// The same with the places that are kept.
const fn with_kept(taken: u64) -> u64 {
    enqueued(taken) + taken / PLACE
}

#[derive(Default)]
struct Events {
    /// How many pieces come before each, oldest first.
    open: VecDeque<(u64, RawEvent)>,
    idle: Vec<RawEvent>,
    passed: u64,
}

/// A place in the queue for one piece of work, until that is enqueued or this is dropped.
#[must_use]
pub(crate) struct Room<'b>(Option<&'b Backlog>);

impl Room<'_> {
    /// Where the queue is not bounded.
    pub(super) const ENDLESS: Self = Self(None);

    /// The place is taken: one piece was enqueued.
    #[inline]
    pub(super) fn taken(self, backend: &dyn Backend, stream: RawStream) {
        if let Some(backlog) = self.0 {
            std::mem::forget(self);
            let before = backlog.taken.fetch_sub(PLACE - 1, Ordering::Release);
            backlog.grown(backend, stream, enqueued(before), 1);
        }
    }
}

impl Drop for Room<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(backlog) = self.0 {
            backlog.taken.fetch_sub(PLACE, Ordering::Release);
        }
    }
}

impl Backlog {
    /// `None` where the queue is not bounded.
    pub(super) fn of(backend: &dyn Backend) -> Option<Arc<Self>> {
        let depth = backend.queue_depth()?.max(16);
        let most = depth - depth / 4;
        Some(Arc::new(Self {
            most,
            step: (depth / 8).max(1),
            taken: AtomicU64::new(0),
            free_until: AtomicU64::new(most),
            events: Mutex::at(Level::Backlog, Events::default()),
        }))
    }

    /// A place, if there is one. Never waits.
    #[inline]
    pub(super) fn keep(&self) -> Option<Room<'_>> {
        let before = self.taken.fetch_add(PLACE, Ordering::AcqRel);
        let room = Room(Some(self));
        (with_kept(before) < self.free_until.load(Ordering::Relaxed)).then_some(room)
    }

    /// A place, if there is one now: asks the device, and never waits for it. Also where there is no saying how much it has to
    /// do: then the next call there finds why.
    pub(super) fn keep_now(&self, backend: &dyn Backend) -> Option<Room<'_>> {
        match self.look(backend) {
            Some(_) => self.keep(),
            None => Some(self.keep_beyond()),
        }
    }

    /// A place even if there is none.
    #[cold]
    pub(super) fn keep_beyond(&self) -> Room<'_> {
        self.taken.fetch_add(PLACE, Ordering::AcqRel);
        Room(Some(self))
    }

    /// Waits, blocking the thread, while the device has too much to do. False if there is no saying how much it has: after a
    /// fault, which the next call reports, or where there is no event; then the driver's queue is the only bound, as without
    /// this.
    ///
    /// # Errors
    /// Of `goes_on`, which is asked before each pause.
    #[cold]
    pub(super) fn wait(&self, backend: &dyn Backend, goes_on: impl Fn() -> Result<()>) -> Result<bool> {
        /// A queue of hundreds of pieces lasts far longer.
        const PAUSE: Duration = Duration::from_micros(50);
        assert_unlocked();
        while let Some(passed) = self.look(backend) {
            // Those that are kept may not come to be enqueued.
            if with_kept(self.taken.load(Ordering::Acquire)) < passed + self.most {
                return Ok(true);
            }
            goes_on()?;
            thread::sleep(PAUSE);
        }
        Ok(false)
    }

    /// How many pieces have passed. `None` if that cannot be found out.
    fn look(&self, backend: &dyn Backend) -> Option<u64> {
        let mut events = lock(&self.events);
        while let Some((pieces, event)) = events.open.front().copied() {
            if !backend.event_query(event).ok()? {
                break;
            }
            events.open.pop_front();
            events.idle.push(event);
            events.passed = pieces;
        }
        let until = events.passed + self.most;
        self.free_until.store(until, Ordering::Relaxed);
        (!events.open.is_empty() || self.enqueued() < until).then_some(events.passed)
    }

    /// After so many pieces. Never waits for the device.
    #[inline]
    pub(super) fn grew(&self, backend: &dyn Backend, stream: RawStream, pieces: u64) {
        let before = self.taken.fetch_add(pieces, Ordering::Relaxed);
        self.grown(backend, stream, enqueued(before), pieces);
    }

    #[inline]
    fn grown(&self, backend: &dyn Backend, stream: RawStream, before: u64, pieces: u64) {
        if before / self.step != (before + pieces) / self.step {
            // An error is the device's, or there is no event: then the driver's queue is the only bound, as without this.
            let _ = self.mark(backend, stream);
        }
    }

    #[cold]
    fn mark(&self, backend: &dyn Backend, stream: RawStream) -> Result<()> {
        let mut events = lock(&self.events);
        // Read under the lock, so that they grow along the queue, and before the record: it comes after them.
        let pieces = self.enqueued();
        let reusable = match events.idle.pop() {
            Some(event) => event,
            // Where little was ever pending, the oldest has passed long since.
            None => match events.open.front().copied() {
                Some((passed, oldest)) if backend.event_query(oldest)? => {
                    events.open.pop_front();
                    events.passed = passed;
                    self.free_until.store(passed + self.most, Ordering::Relaxed);
                    oldest
                }
                _ => backend.event_create(false)?,
            },
        };
        match backend.event_record(reusable, stream) {
            Ok(()) => events.open.push_back((pieces, reusable)),
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

    /// Another library's stream, whose last handle here is dropped: an event after its last piece.
    #[cfg(feature = "cuda")]
    pub(super) fn mark_end(&self, backend: &dyn Backend, stream: RawStream) {
        let events = lock(&self.events);
        let marked = events.open.back().map_or(events.passed, |(pieces, _)| *pieces);
        drop(events);
        if marked < self.enqueued() {
            // As in `grown`.
            let _ = self.mark(backend, stream);
        }
    }

    /// After [`mark_end`](Self::mark_end): true if all of it is done, or if it cannot be found out.
    #[cfg(feature = "cuda")]
    pub(super) fn is_over(&self, backend: &dyn Backend) -> bool {
        self.look(backend).is_none() || lock(&self.events).open.is_empty()
    }

    /// The stream is about to be ended.
    pub(super) fn close(&self, backend: &dyn Backend) {
        let Events { open, idle, .. } = std::mem::take(&mut *lock(&self.events));
        open.into_iter().map(|(_, event)| event).chain(idle).for_each(|event| backend.event_destroy(event));
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog").field("enqueued", &self.enqueued()).field("most", &self.most).finish_non_exhaustive()
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
        let backlog = stream.0.held.backlog().unwrap().0;
        let events = lock(&backlog.events);
        assert_eq!(backlog.taken.load(Ordering::Relaxed), 1000);
        assert!(events.open.len() + events.idle.len() <= 2, "{:?}", events.open);
    }

    #[test]
    fn host_functions_and_points_take_no_place() {
        let device = Device::emulated(Emulated::new().queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        for _ in 0..100 {
            stream.host_function(|| ()).unwrap();
            stream.ticket().commit().unwrap();
        }
        assert_eq!(stream.0.held.backlog().unwrap().0.taken.load(Ordering::Relaxed), 0);
        drop(go);
        stream.synchronize_blocking().unwrap();
    }
}
