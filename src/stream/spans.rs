//! [`Spans`]: the device work of one run or of one copy, as stretches of the host's time; [`SpanReader`], which reads
//! them back once the device has passed them.
//!
//! ```text
//!   a stream's Meter ──[event, event]──> SpanReader ──read()──┬──> DeviceTimes   of an operator: sums for its report
//!      while work is enqueued             later, on another   └──> Spans         of a run that a sampled message is in
//!                                         thread
//! ```
//!
//! The events come from a pool and return to it: once enough exist, nothing is allocated. The number of spans that wait
//! to be read is bounded, and what exceeds it counts as missed.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use smallvec::SmallVec;
use tokio::time::Instant;

use super::{
    axis::Axes,
    device_times::DeviceTimes,
    event_pool::{EventPool, PooledEvent},
};
use crate::sync::{Deferred, Level, Mutex, lock};

/// The device work of one run or copy.
#[derive(Debug)]
pub(crate) struct Spans {
    /// [`OpenSpans`] that exist.
    open: AtomicUsize,
    times: Mutex<SmallVec<[(Instant, Instant); 1]>>,
}

/// While it exists, spans may be added.
#[derive(Debug)]
pub(crate) struct OpenSpans(Arc<Spans>);

impl Spans {
    pub(crate) fn begin() -> OpenSpans {
        OpenSpans(Arc::new(Self { open: AtomicUsize::new(1), times: Mutex::default() }))
    }

    /// True if all of them are known.
    pub(crate) fn are_known(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    #[cfg(test)]
    pub(crate) fn known(times: impl IntoIterator<Item = (Instant, Instant)>) -> Arc<Self> {
        Arc::new(Self { open: AtomicUsize::new(0), times: Mutex::new(times.into_iter().collect()) })
    }

    pub(crate) fn times(&self) -> SmallVec<[(Instant, Instant); 1]> {
        lock(&self.times).clone()
    }
}

impl OpenSpans {
    pub(crate) fn spans(&self) -> &Arc<Spans> {
        &self.0
    }
}

impl Clone for OpenSpans {
    fn clone(&self) -> Self {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl Drop for OpenSpans {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Release);
    }
}

/// What the work of a span belongs to.
#[derive(Clone, Debug)]
pub(crate) struct SpanOwner {
    pub(crate) reader: Arc<SpanReader>,
    pub(crate) run: u64,
    pub(crate) times: Arc<DeviceTimes>,
    pub(crate) spans: SmallVec<[OpenSpans; 1]>,
}

/// A span that the device may not have passed yet.
pub(super) struct PendingSpan {
    pub(super) run: u64,
    pub(super) times: Arc<DeviceTimes>,
    pub(super) spans: SmallVec<[OpenSpans; 1]>,
    pub(super) from: PooledEvent,
    pub(super) to: PooledEvent,
    /// The stream had nothing to do when the first event was recorded, and passed it at once.
    pub(super) was_idle: bool,
    /// When the call that recorded its first event began and ended, and when that of its first operation ended.
    pub(super) began: Instant,
    pub(super) recorded: Instant,
    pub(super) enqueued: Instant,
    pub(super) stream: u64,
}

/// When a span's work ran, on the host's axis.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "how exact the axis is: checked by a test on a GPU")]
pub(crate) struct PassedSpan {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    /// How far the times before clamping lay outside of the host's: before the enqueue, after the completion was seen.
    pub(crate) outside: Duration,
}

/// A span that was read, for a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptSpan {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) run: u64,
    /// The addresses of its [`DeviceTimes`] and of its device's backend.
    pub(crate) times: usize,
    pub(crate) backend: usize,
}

/// The last spans that were read, and how many were forgotten.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptSpans {
    pub(crate) spans: VecDeque<KeptSpan>,
    pub(crate) forgotten: u64,
}

/// Reads the spans of a flow.
pub(crate) struct SpanReader {
    pending: Mutex<Vec<PendingSpan>>,
    /// Held while spans are read.
    reading: Mutex<Axes>,
    /// Of the hubs' copies: to a device, and to the host.
    copies: [Arc<DeviceTimes>; 2],
    /// A thread reads often enough.
    has_thread: AtomicBool,
    /// All spans are placed on the host's axis and kept.
    keeps: AtomicBool,
    kept: Mutex<KeptSpans>,
}

impl SpanReader {
    /// The maximum number of spans that wait to be read. Their events take a few hundred bytes each.
    const MOST: usize = 16_384;
    /// The maximum of one operator, and without a thread that reads.
    const MOST_OF_ONE: usize = 4096;
    const MOST_WITHOUT_THREAD: usize = 128;
    /// From this number on, without a thread that reads, an operator does so before a run.
    const MANY: usize = 64;
    /// The maximum number of spans that are kept: 40 bytes each.
    const MOST_KEPT: usize = 65_536;

    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            pending: Mutex::default(),
            reading: Mutex::at(Level::SpanReader, Axes::default()),
            copies: Default::default(),
            has_thread: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
            kept: Mutex::default(),
        })
    }

    /// The times of the hubs' copies to devices, or to the host.
    pub(crate) fn copies(&self, to_host: bool) -> &Arc<DeviceTimes> {
        &self.copies[usize::from(to_host)]
    }

    /// Keeps the last spans from now on, for [`with_kept`](Self::with_kept).
    pub(crate) fn keep(&self) {
        self.keeps.store(true, Ordering::Relaxed);
    }

    /// Calls `look` with the kept spans, under a lock.
    pub(crate) fn with_kept<R>(&self, look: impl FnOnce(&mut KeptSpans) -> R) -> R {
        look(&mut lock(&self.kept))
    }

    /// A thread calls [`read`](Self::read) from now on.
    pub(crate) fn has_thread(&self) {
        self.has_thread.store(true, Ordering::Relaxed);
    }

    /// Operators read before their runs, as if there were no thread: it rests too long for every run to be timed.
    pub(crate) fn reads_before_runs(&self) {
        self.has_thread.store(false, Ordering::Relaxed);
    }

    /// Called before a run: true if there is room for its spans.
    pub(super) fn has_room(&self, times: &DeviceTimes) -> bool {
        let pending = || times.pending.load(Ordering::Relaxed);
        if self.has_thread.load(Ordering::Relaxed) {
            return pending() < Self::MOST_OF_ONE;
        }
        if pending() >= Self::MANY {
            self.read(None);
        }
        pending() < Self::MOST_WITHOUT_THREAD
    }

    pub(super) fn push(&self, span: PendingSpan) {
        let mut pending = lock(&self.pending);
        if pending.len() < Self::MOST {
            span.times.pending.fetch_add(1, Ordering::Relaxed);
            return pending.push(span);
        }
        drop(pending);
        span.times.miss(span.run);
    }

    /// Reads the spans that the devices have passed, and calls `found` with each, with a lock held. Without it, only those
    /// that the path of a message needs are placed on the host's axis.
    pub(crate) fn read(&self, mut found: Option<&mut dyn FnMut(PassedSpan)>) {
        let _later = Deferred::new();
        let mut axes = lock(&self.reading);
        let all = std::mem::take(&mut *lock(&self.pending));
        if all.is_empty() {
            return;
        }
        let (mut open, keeps) = (Vec::<PendingSpan>::new(), self.keeps.load(Ordering::Relaxed));
        // Where one is not passed, the later ones of its stream are not either.
        let mut busy = SmallVec::<[(*const EventPool, u64); 8]>::new();
        for span in all {
            let stream = (Arc::as_ptr(&span.from.pool), span.stream);
            if busy.contains(&stream) {
                open.push(span);
                continue;
            }
            match span.pool().backend.event_elapsed_if_passed(span.from.raw, span.to.raw) {
                Ok(Some(between)) => {
                    let took = span.count(between);
                    let is_wanted = found.is_some() || keeps || !span.spans.is_empty();
                    if let Some(passed) = is_wanted.then(|| span.place(took, &mut axes)).flatten() {
                        if keeps {
                            lock(&self.kept).add(span.kept(passed), Self::MOST_KEPT);
                        }
                        found.iter_mut().for_each(|found| found(passed));
                    }
                }
                Ok(None) => {
                    busy.push(stream);
                    open.push(span);
                }
                Err(_) => span.miss(),
            }
        }
        let mut pending = lock(&self.pending);
        let newer = std::mem::replace(&mut *pending, open);
        pending.extend(newer);
    }

    /// Keeps the axes of the devices exact. For a thread that reads now and then.
    pub(crate) fn adjust(&self) {
        let _later = Deferred::new();
        lock(&self.reading).adjust();
    }

    /// Counts what is not read yet as missed: there will be no later read. The devices are not kept open any more.
    pub(crate) fn close(&self) {
        self.read(None);
        let left = std::mem::take(&mut *lock(&self.pending));
        left.into_iter().for_each(PendingSpan::miss);
        let axes = std::mem::take(&mut *lock(&self.reading));
        drop(axes);
    }

    /// Reads the spans of an operator that has stopped, and counts those that are not passed as missed.
    pub(crate) fn settle(&self, times: &Arc<DeviceTimes>) {
        self.read(None);
        let is_its = |span: &mut PendingSpan| Arc::ptr_eq(&span.times, times);
        let left: Vec<_> = lock(&self.pending).extract_if(.., is_its).collect();
        left.into_iter().for_each(PendingSpan::miss);
    }
}

impl KeptSpans {
    fn add(&mut self, span: KeptSpan, most: usize) {
        if self.spans.len() == most {
            self.spans.pop_front();
            self.forgotten += 1;
        }
        self.spans.push_back(span);
    }
}

impl PendingSpan {
    fn kept(&self, PassedSpan { began, ended, .. }: PassedSpan) -> KeptSpan {
        let (times, backend) = (Arc::as_ptr(&self.times).addr(), Arc::as_ptr(&self.pool().backend).addr());
        KeptSpan { began, ended, run: self.run, times, backend }
    }

    fn pool(&self) -> &EventPool {
        &self.from.pool
    }

    fn miss(self) {
        self.times.pending.fetch_sub(1, Ordering::Relaxed);
        self.times.miss(self.run);
    }

    /// How long a device with nothing else to do waited, after the first event, for the first operation to be enqueued. Both
    /// calls take a device as long to notice, so the host's clock says it.
    fn idled(&self) -> Duration {
        let since = match self.pool().backend.event_instant(self.from.raw) {
            // In a simulation that is virtual time, and a thread outside of its runtime has another clock.
            Some(Ok(passed)) => passed.max(self.began),
            _ if self.was_idle => self.recorded,
            _ => return Duration::ZERO,
        };
        self.enqueued.saturating_duration_since(since)
    }

    /// Counts the time that its work took, of that between its events, and returns it.
    fn count(&self, between: Duration) -> Duration {
        let took = between.saturating_sub(self.pool().backend.event_time() + self.idled());
        self.times.pending.fetch_sub(1, Ordering::Relaxed);
        self.times.add(self.run, took);
        took
    }

    /// Its time on the host's axis: not before it was enqueued, and not after its completion was seen.
    fn place(&self, took: Duration, axes: &mut Axes) -> Option<PassedSpan> {
        let (exact, seen) = axes.instant(self.pool(), self.to.raw)?;
        let ended = exact.clamp(self.enqueued, seen.max(self.enqueued));
        let began = exact.checked_sub(took).unwrap_or(self.began);
        let early = (self.began + self.idled()).saturating_duration_since(began);
        let outside = early.max(exact.saturating_duration_since(seen));
        // The device may begin while the call that enqueues the work still runs.
        let earliest = if self.was_idle { self.recorded } else { self.enqueued };
        let began = began.clamp(earliest.min(ended), ended);
        for OpenSpans(spans) in &self.spans {
            lock(&spans.times).push((began, ended));
        }
        Some(PassedSpan { began, ended, outside })
    }
}

impl fmt::Debug for SpanReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanReader").field("pending", &lock(&self.pending).len()).finish_non_exhaustive()
    }
}
