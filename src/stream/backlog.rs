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
//!   enqueue:  little to do ──> enqueued                           one load and one comparison
//!             too much ──> the events are asked until it is less  before a lock is taken, outside the driver
//! ```

use std::{
    collections::VecDeque,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crate::{
    device::backend::{Backend, RawEvent, RawStream},
    error::Result,
    sync::{Level, Mutex, lock},
};

/// How much of one stream of the device's is enqueued and not known to be done. Several [`Stream`](super::Stream)s may share it.
pub(super) struct Backlog {
    /// With fewer pieces than this a call that holds nothing goes on; one that holds a lock has a few more.
    low: u64,
    high: u64,
    /// Pieces between two events.
    step: u64,
    enqueued: AtomicU64,
    /// Up to here nothing need be asked.
    free_until: AtomicU64,
    events: Mutex<Events>,
}

#[derive(Default)]
struct Events {
    /// How many pieces come before each, oldest first.
    open: VecDeque<(u64, RawEvent)>,
    idle: Vec<RawEvent>,
    passed: u64,
}

/// What a caller holds while it waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    Nothing,
    Locks,
}

impl Backlog {
    /// `None` where the queue is not bounded.
    pub(super) fn of(backend: &dyn Backend) -> Option<Box<Self>> {
        let most = backend.queue_depth()?.max(16);
        let low = most - most / 4;
        Some(Box::new(Self {
            low,
            high: most - most / 8,
            step: (most / 16).max(1),
            enqueued: AtomicU64::new(0),
            free_until: AtomicU64::new(low),
            events: Mutex::at(Level::Backlog, Events::default()),
        }))
    }

    /// Before a piece of work: waits, blocking the thread, while the device has too much to do. After a fault it returns: the
    /// next call says so.
    #[inline]
    pub(super) fn make_room(&self, backend: &dyn Backend, holds: Holds) {
        if self.enqueued.load(Ordering::Relaxed) >= self.free_until.load(Ordering::Relaxed) {
            self.wait(backend, holds);
        }
    }

    #[cold]
    fn wait(&self, backend: &dyn Backend, holds: Holds) {
        /// A queue of hundreds of pieces lasts far longer.
        const PAUSE: Duration = Duration::from_micros(50);
        let most = if holds == Holds::Nothing { self.low } else { self.high };
        loop {
            match self.look(backend) {
                Some(passed) if self.enqueued.load(Ordering::Relaxed) >= passed + most => thread::sleep(PAUSE),
                _ => return,
            }
        }
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
        self.free_until.store(events.passed + self.low, Ordering::Relaxed);
        (!events.open.is_empty()).then_some(events.passed)
    }

    /// After so many pieces. Never waits for the device.
    #[inline]
    pub(super) fn grew(&self, backend: &dyn Backend, stream: RawStream, pieces: u64) {
        let before = self.enqueued.fetch_add(pieces, Ordering::Relaxed);
        if before / self.step != (before + pieces) / self.step {
            // An error is the device's, or there is no event: then the driver's queue is the only bound, as without this.
            let _ = self.mark(backend, stream);
        }
    }

    #[cold]
    fn mark(&self, backend: &dyn Backend, stream: RawStream) -> Result<()> {
        let mut events = lock(&self.events);
        // Read under the lock, so that they grow along the queue, and before the record: it comes after them.
        let pieces = self.enqueued.load(Ordering::Relaxed);
        let reusable = match events.idle.pop() {
            Some(event) => event,
            // Where little was ever pending, the oldest has passed long since.
            None => match events.open.front().copied() {
                Some((passed, oldest)) if backend.event_query(oldest)? => {
                    events.open.pop_front();
                    events.passed = passed;
                    self.free_until.store(passed + self.low, Ordering::Relaxed);
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

    /// The stream is about to be ended.
    pub(super) fn close(&self, backend: &dyn Backend) {
        let Events { open, idle, .. } = std::mem::take(&mut *lock(&self.events));
        open.into_iter().map(|(_, event)| event).chain(idle).for_each(|event| backend.event_destroy(event));
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog").field("enqueued", &self.enqueued).field("low", &self.low).finish_non_exhaustive()
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
        let backlog = stream.0.held.backlog().unwrap();
        let events = lock(&backlog.events);
        assert_eq!(backlog.enqueued.load(Ordering::Relaxed), 1000);
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
        assert_eq!(stream.0.held.backlog().unwrap().enqueued.load(Ordering::Relaxed), 0);
        drop(go);
        stream.synchronize_blocking().unwrap();
    }
}
