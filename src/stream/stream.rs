//! [`Stream`] and [`Ticket`]: ordered work on a device, and a point in it.
//!
//! This file defines a stream and the queries of its progress: a [`Mark`] is recorded behind a ticket, its event is
//! queried, and the result is reported to the [`Completion`]. The operations on a stream are in `enqueue.rs`,
//! `device_wait.rs` and `completed.rs`.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
};

use super::{
    Streams,
    capture::Capture,
    completion::Completion,
    driver_stream::DriverStream,
    forecast::{Forecast, Stride},
    mark::Mark,
    order::{LossState, MAX_UNMARKED, Order},
    watch::WatchFlag,
};
use crate::{
    device::{
        Device,
        backend::{Backend, RawStream, StreamSpec},
    },
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    sync::{Deferred, Level, Mutex, assert_may_wake, lock},
};

/// A queue of work on one device. A cheap handle: clones refer to the same stream.
///
/// ```
/// use wakeline::{Stream, device::{Device, Emulated}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// // ... enqueue work ...
/// stream.completed().await?;
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Stream(pub(super) Arc<StreamInner>);

pub(super) struct StreamInner {
    pub(super) device: Device,
    /// The device's backend; the recorder for a captured stream.
    pub(super) backend: Arc<dyn Backend>,
    pub(super) streams: Arc<Streams>,
    /// The capture that the stream belongs to, if any.
    pub(super) capture: Option<Arc<Capture>>,
    pub(super) driver_stream: Arc<DriverStream>,
    pub(super) raw: RawStream,
    /// Unique among all streams of the process.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) order: Mutex<Order>,
    /// The highest ticket issued, readable without the lock.
    pub(super) issued: AtomicU64,
    /// A run is timed.
    pub(super) is_timed: AtomicBool,
    pub(super) losses: LossState,
    /// Shared with callbacks. Callbacks run on the driver's thread, where no stream may be destroyed, so a callback
    /// must not hold the last reference to a stream.
    pub(super) completion: Arc<Completion>,
    /// The stream for host functions that signal completion. On the stream itself they would delay its work.
    pub(super) side: OnceLock<RawStream>,
    /// Predicts how long the stream's work takes.
    pub(super) forecast: Mutex<Forecast>,
    /// Set while the completion monitor polls the stream.
    pub(super) watched: WatchFlag,
    /// A [`CompletionMode`](super::CompletionMode), as a number.
    pub(super) mode: AtomicU8,
    pub(super) stride: Stride,
}

impl Stream {
    /// A new stream on `device`, with the default priority.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has no streams; [`DeviceLost`](ErrorKind::DeviceLost) after a
    /// fault.
    pub fn new(device: &Device) -> Result<Self> {
        Self::named(device, "stream")
    }

    /// A new stream with a name, which logs show and which errors use to list the lost work.
    ///
    /// # Errors
    /// Those of [`Stream::new`].
    pub fn named(device: &Device, name: impl Into<String>) -> Result<Self> {
        Self::with_priority(device, name.into(), 0)
    }

    pub(crate) fn with_priority(device: &Device, name: String, priority: i32) -> Result<Self> {
        let spec = StreamSpec { name: name.clone(), priority, non_blocking: true };
        let driver_stream = Streams::of(device).observe(DriverStream::new(device, &spec))?;
        Self::over(device, name, driver_stream)
    }

    /// The device's legacy default stream, which a CUDA program without streams uses. Every call returns the same
    /// stream. Tickets and tracking work as with any other stream.
    ///
    /// It waits for all streams of the device that were not created as non-blocking, and these wait for it. wakeline's
    /// own streams are non-blocking unless a [`StreamPool`](super::StreamPool) was built otherwise.
    ///
    /// Other users of the default stream in the process are not tracked. A wait ([`wait_for`](Self::wait_for),
    /// [`join`](Self::join), [`completed`](Self::completed)) covers all work that is in the stream at that time,
    /// regardless of its origin.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has none; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn default_of(device: &Device) -> Result<Self> {
        if device.is_host() {
            return Err(Error::new(
                ErrorKind::Usage,
                Device::instead_of_host("the host has no streams: choose a device, for example with `Device::first()`"),
            ));
        }
        device.check()?;
        let streams = Streams::of(device);
        let _later = Deferred::new();
        let mut known = lock(&streams.default);
        if let Some(inner) = known.upgrade() {
            return Ok(Self(inner));
        }
        let stream = Self::over(device, "default".into(), DriverStream::default_of(device))?;
        *known = Arc::downgrade(&stream.0);
        Ok(stream)
    }

    /// Creates a stream over a stream of the driver.
    pub(crate) fn over(device: &Device, name: String, driver_stream: Arc<DriverStream>) -> Result<Self> {
        let stream = Self::create(device, name, driver_stream, device.backend().clone(), None)?;
        stream.0.streams.register(&stream);
        Ok(stream)
    }

    /// Creates a stream of a capture over a stream of its recorder.
    pub(super) fn captured(capture: &Arc<Capture>, name: String, driver_stream: Arc<DriverStream>) -> Result<Self> {
        let backend = capture.recorder().clone();
        Self::create(capture.device(), name, driver_stream, backend, Some(capture.clone()))
    }

    fn create(
        device: &Device,
        name: String,
        driver_stream: Arc<DriverStream>,
        backend: Arc<dyn Backend>,
        capture: Option<Arc<Capture>>,
    ) -> Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let streams = Streams::of(device);
        let order = streams.observe(Order::new(&backend))?;
        Ok(Self(Arc::new(StreamInner {
            device: device.clone(),
            backend,
            streams,
            capture,
            raw: driver_stream.raw,
            driver_stream,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            name,
            order: Mutex::at(Level::StreamOrder, order),
            issued: AtomicU64::new(0),
            is_timed: AtomicBool::new(false),
            losses: LossState::default(),
            completion: Arc::new(Completion::new()),
            side: OnceLock::new(),
            forecast: Mutex::default(),
            watched: WatchFlag::new(),
            mode: AtomicU8::default(),
            stride: Stride::new(),
        })))
    }

    /// The stream's device.
    #[inline]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The stream's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The priority of its work: lower is more urgent. See [`Device::stream_priorities`].
    pub fn priority(&self) -> i32 {
        let range = self.device().stream_priorities();
        self.0.driver_stream.priority.clamp(*range.start(), *range.end())
    }

    /// The point before all work of this stream.
    pub(crate) fn beginning(&self) -> Ticket {
        Ticket::new(self.clone(), 0)
    }

    #[inline]
    pub(crate) fn streams(&self) -> &Arc<Streams> {
        &self.0.streams
    }

    /// The device's backend; the recorder for a captured stream.
    #[inline]
    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.0.backend
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.0.raw
    }

    /// The stream's number, unique in the process, from 1.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns a function that is true for a ticket if work enqueued here from now on is known to be ordered after it:
    /// the ticket belongs to this stream, it has passed, or the stream has waited for it.
    pub(crate) fn ordered_after(&self) -> impl Fn(&Ticket) -> bool + use<> {
        let (own, clock) = (self.0.id, lock(&self.0.order).clock.clone());
        move |ticket| {
            let stream = ticket.stream().0.id;
            stream == own || ticket.has_passed() || clock.reached(stream) >= ticket.number()
        }
    }

    #[inline]
    pub(crate) fn is(&self, other: &Stream) -> bool {
        self.0.id == other.0.id
    }

    /// The capture that this stream belongs to, if any.
    #[inline]
    pub(crate) fn capture(&self) -> Option<&Arc<Capture>> {
        self.0.capture.as_ref()
    }

    /// The first mark at or after a ticket, recorded now if there is none. It may cover later work, but never less.
    pub(super) fn mark(&self, number: u64) -> Result<Arc<Mark>> {
        assert_may_wake();
        let inner = &*self.0;
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        if order.marks.back().is_some_and(|mark| mark.ticket >= number) {
            let at = order.marks.partition_point(|mark| mark.ticket < number);
            return Ok(order.marks[at].clone());
        }
        inner.device.check()?;
        let before = inner.completion.passed();
        let mut passed = before;
        let made = order.new_mark(&inner.backend, inner.raw, &mut passed);
        drop(order);
        if passed > before {
            inner.completion.advance(passed);
        }
        inner.streams.observe(made)
    }

    /// The mark for another stream that waits for a ticket.
    pub(super) fn mark_for_wait(&self, number: u64) -> Result<Arc<Mark>> {
        let mark = self.mark(number)?;
        if mutants::is(Mutant::EarlyMark) {
            let order = lock(&self.0.order);
            let at = order.marks.partition_point(|earlier| earlier.ticket < mark.ticket);
            return Ok(at.checked_sub(1).map_or(mark, |before| order.marks[before].clone()));
        }
        Ok(mark)
    }

    /// Records a mark again, at the stream's current end, if the mark is the latest and the caller is its only other
    /// holder: an event that is recorded repeatedly needs no further marks. False if that is not possible.
    ///
    /// A search for the earlier mark then finds a later one, so at least one mark in [`MAX_UNMARKED`] tickets stays.
    /// The caller must pass an error to `observe` once it has released its lock.
    pub(super) fn move_mark(&self, mark: &mut Arc<Mark>) -> Result<bool> {
        assert_may_wake();
        let inner = &*self.0;
        if inner.driver_stream.is_shared() || inner.capture.is_some() {
            return Ok(false);
        }
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        inner.device.check()?;
        let before = match order.marks.len().checked_sub(2) {
            Some(before) => order.marks[before].ticket,
            None => inner.completion.passed(),
        };
        // One reference here, one in the order.
        let is_its_own = Arc::strong_count(mark) == 2 && order.marks.back().is_some_and(|last| Arc::ptr_eq(last, mark));
        if !is_its_own || order.issued.saturating_sub(before) > MAX_UNMARKED {
            return Ok(false);
        }
        if mark.ticket == order.issued {
            return Ok(true);
        }
        inner.backend.event_record(mark.event, inner.raw)?;
        order.marks.pop_back();
        order.set_mark(mark);
        order.marks.push_back(mark.clone());
        Ok(true)
    }
}

impl StreamInner {
    /// True if a mark of this stream has passed. Queries the device; an error means that the device is lost.
    pub(super) fn query(&self, mark: &Mark) -> Result<bool> {
        assert_may_wake();
        if self.completion.passed() >= mark.ticket {
            return Ok(true);
        }
        self.device.check()?;
        self.check_not_captured()?;
        let mut passed = self.streams.observe(self.backend.event_query(mark.event))?;
        passed |= mutants::is(Mutant::EarlyCompletion);
        if passed {
            self.completion.advance(mark.ticket);
        }
        Ok(passed)
    }

    /// Like [`query`](Self::query), for the first query of a wait. If the mark has passed, the task is probably behind
    /// the device, so this queries a later mark as well; if that has passed, too, the marks in between need no query.
    pub(super) fn query_first(&self, mark: &Mark) -> Result<bool> {
        let known = self.completion.passed() >= mark.ticket;
        if known || !self.query(mark)? {
            return Ok(known);
        }
        let Some(stride) = self.stride.next() else { return Ok(true) };
        let order = lock(&self.order);
        let next = order.marks.partition_point(|other| other.ticket <= mark.ticket);
        let further = order.marks.range(next..).take(stride).next_back().cloned();
        drop(order);
        // An error here does not affect work that is done.
        if let Some(Ok(passed)) = further.map(|further| self.query(&further)) {
            self.stride.found(passed);
        }
        Ok(true)
    }

    /// Queries the device for the stream's progress. An error means that the device is lost.
    pub(super) fn query_progress(&self) -> Result<()> {
        loop {
            let passed = self.completion.passed();
            let order = lock(&self.order);
            // Marks that have passed stay in the list until the next mark is recorded.
            let next = order.marks.partition_point(|mark| mark.ticket <= passed);
            let next = order.marks.get(next).cloned();
            drop(order);
            match next {
                Some(mark) if self.query(&mark)? => {}
                _ => return self.device.check(),
            }
        }
    }
}

/// A stream may hold the last handle of a device, its own or an upstream device. Dropping the handle may drop user
/// functions and wake a simulation; both are deferred to the end of a [`Deferred`] scope. A function that drops tickets
/// under a lock must open a `Deferred` scope first.
impl Drop for StreamInner {
    fn drop(&mut self) {
        assert_may_wake();
        if self.capture.is_none() && self.order.get_mut().issued > self.completion.passed() {
            self.streams.note_dropped(&self.device, self.raw, Capture::may_query_device());
        }
        let backend = self.device.backend();
        if let Some(side) = self.side.get() {
            backend.stream_destroy(*side);
        }
    }
}

/// A point in a stream's work, to await or to order other work after.
#[derive(Clone)]
pub struct Ticket {
    stream: Stream,
    number: u64,
    /// The first mark at or after the ticket, once a wait may need it.
    mark: Option<Arc<Mark>>,
}

impl Ticket {
    #[inline]
    pub(super) fn new(stream: Stream, number: u64) -> Self {
        Self { stream, number, mark: None }
    }

    /// The stream that the ticket belongs to.
    #[inline]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The ticket's number: 1 for the stream's first work, 0 for none.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True once the work is known to be done. Never queries the device: a `true` is certain, a `false` may lag.
    #[inline]
    pub fn has_passed(&self) -> bool {
        self.stream.0.completion.passed() >= self.number
    }

    /// Whether work that waits for this point also waits for `other`, which is not later, or is behind the same mark.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let until = self.mark.as_ref().map_or(self.number, |mark| mark.ticket.max(self.number));
        self.stream.is(&other.stream) && other.number <= until
    }

    /// A point of the same stream that never passes: on a lost device it represents all work that might still be
    /// running.
    pub(crate) fn never(&self) -> Self {
        Self::new(self.stream.clone(), u64::MAX)
    }

    /// The same point without its mark, which can be found through the stream.
    #[inline]
    pub(crate) fn unmarked(&self) -> Self {
        Self::new(self.stream.clone(), self.number)
    }

    #[inline]
    pub(crate) fn advance_to(&mut self, later: &Self) {
        self.number = later.number;
        if self.mark.is_some() || later.mark.is_some() {
            self.mark.clone_from(&later.mark);
        }
    }

    /// Marks this point now, so that later waits cover no later work, and need no lock of this stream.
    #[inline]
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.mark.is_none() && !self.has_passed() {
            self.mark = Some(self.stream.mark(self.number)?);
        }
        Ok(())
    }

    /// Moves the ticket and its mark to the stream's current end, if the ticket belongs to `stream` and its mark can be
    /// recorded again, having no other holder. Otherwise returns false and changes nothing. The caller must pass an
    /// error to `observe`.
    pub(super) fn move_to_end(&mut self, stream: &Stream) -> Result<bool> {
        let Some(mark) = self.mark.as_mut().filter(|_| self.stream.is(stream)) else { return Ok(false) };
        let moved = stream.move_mark(mark)?;
        if moved {
            self.number = mark.ticket;
        }
        Ok(moved)
    }

    /// The ticket's mark, if it was committed.
    #[inline]
    pub(super) fn marked(&self) -> Option<&Arc<Mark>> {
        self.mark.as_ref()
    }

    /// True if the work is done. Queries the device.
    pub(crate) fn query(&mut self) -> Result<bool> {
        if self.has_passed() {
            return Ok(true);
        }
        self.commit()?;
        match &self.mark {
            Some(mark) => self.stream.0.query_first(mark),
            None => Ok(true),
        }
    }

    /// Queries the stream's progress up to this ticket, so that earlier tickets are known to have passed, too.
    pub(crate) fn query_progress(&mut self) -> Result<()> {
        self.commit()?;
        self.stream.0.query_progress()
    }
}

/// Two handles are equal if they refer to the same stream.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.is(other)
    }
}

impl Eq for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.0.device.name())
            .field("name", &self.0.name)
            .field("issued", &self.0.issued.load(Ordering::Relaxed))
            .field("passed", &self.0.completion.passed())
            .finish()
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({} of {:?})", self.number, self.stream.name())
    }
}
