//! Streams: ordered work on a device, counted in tickets.
//!
//! A [`Stream`] runs its operations in order; streams run concurrently. Every operation gets a [`Ticket`], a number
//! that counts up within its stream. Everything else here is built on "ticket n has passed": order between streams
//! (`stream_b` waits for a ticket of `stream_a`), completion (a [`Completed`] future resolves when its ticket has
//! passed) and the lifetime of memory (it is free once the tickets of its uses have passed).
//!
//! ```text
//!   enqueue ─> ticket 1, 2, 3, 4 ...         under the stream's lock: ticket and enqueue are one step
//!   mark    ─> an event after ticket 3       recorded where a wait may need it, with a snapshot of the stream's clock
//!   wait    ─> the device waits for a mark   unless the order is implied already
//! ```
//!
//! A stream's clock holds, for each other stream, the ticket up to which this stream is ordered after it. Clocks are
//! lower bounds: a missing entry costs a redundant wait, never a race. A wait merges the snapshot that was taken with
//! the mark, never the other stream's current clock.
//!
//! Order is transitive only through streams of one device. A device guarantees the order of its work only while it
//! lives: when it is lost, waits for its work end, even if the work that it was waiting for on a third device has not
//! passed. A wait for a stream of another device therefore merges no snapshot, and memory keeps earlier uses on other
//! devices (`memory::uses::Uses`).
//!
//! The loss of another device taints tickets, too: see `stream/taint.rs`.

mod backlog;
pub(crate) mod capture;
mod clock;
mod completed;
pub(crate) mod completion;
mod current;
mod event;
mod forecast;
mod held;
mod join;
mod launches;
mod mark;
mod marks;
mod meter;
mod mode;
mod monitor;
mod pool;
mod streams;
mod stride;
mod taint;
mod ticket;
mod timer;
mod wait_strategy;
mod watch;

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use smallvec::SmallVec;

use backlog::QueueSlot;
use clock::Clock;
pub use completed::Completed;
use completion::Completion;
pub use event::Event;
use forecast::Forecast;
pub(crate) use held::Held;
pub use join::Point;
pub(crate) use launches::Launched;
use launches::Launches;
use mark::{Mark, Spares};
pub use meter::DeviceTime;
use meter::Meter;
use mode::AtomicMode;
pub use mode::CompletionMode;
pub use pool::{PooledStream, StreamPool, StreamPoolBuilder};
pub(crate) use streams::Streams;
use stride::Stride;
pub(crate) use taint::EnqueuePermit;
use taint::{Tainted, Upstream, Wait};
pub use ticket::Ticket;
pub use timer::Timer;
pub(crate) use watch::WatchFlag;

use crate::{
    device::{
        Device, WeakDevice,
        backend::{Backend, HostFunction, RawStream, StreamSpec, host_callback},
        recorder,
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    sync::{Deferred, Discarded, Level, Mutex, MutexGuard, assert_may_wake, assert_unlocked, discard, lock},
};

/// A queue of work on one device. A cheap handle: clones are the same stream.
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
pub struct Stream(Arc<Inner>);

pub(crate) struct Inner {
    device: Device,
    streams: Arc<Streams>,
    held: Arc<Held>,
    raw: RawStream,
    /// Unique among all streams of the process.
    id: u64,
    name: String,
    order: Mutex<Order>,
    /// The highest ticket issued, readable without the lock.
    issued: AtomicU64,
    /// Shared with callbacks. Callbacks run on the driver's thread, where no stream may be destroyed, so a callback
    /// must not hold the last reference to a stream.
    completion: Arc<Completion>,
    /// Carries the host functions that signal completion; on the stream itself they would delay its work.
    side: OnceLock<RawStream>,
    /// Predicts how long the stream's work takes.
    forecast: Mutex<Forecast>,
    /// Whether the stream is on the completion monitor's list.
    watched: WatchFlag,
    /// Set once the stream has waited for another device whose work is not yet known to be valid.
    has_upstream_work: AtomicBool,
    /// How many losses of such devices the stream has noted.
    losses: AtomicU64,
    mode: AtomicMode,
    stride: Stride,
}

/// The state that changes with each enqueue.
struct Order {
    issued: u64,
    clock: Clock,
    /// Oldest first; marks that have passed are recycled.
    marks: VecDeque<Arc<Mark>>,
    /// How many marks were ever recorded.
    marked: u64,
    spares: Spares,
    /// Set where an operator's runs are timed.
    meter: Option<Box<Meter>>,
    /// Other devices that this stream is ordered after, directly or not, and whose work is not yet known to be valid.
    upstream: SmallVec<[Upstream; 1]>,
    /// The tickets that were tainted by the loss of such a device, oldest first.
    tainted: Vec<Tainted>,
    launches: Launches,
}

/// For work that reads no memory: losses noted before it do not taint it.
pub(crate) const READS_NOTHING: u64 = u64::MAX;

/// With more upstream devices than this, a wait checks which of them are no longer needed.
const MANY: usize = 16;

impl Stream {
    /// A new stream on `device`, with the default priority.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has no streams; [`DeviceLost`](ErrorKind::DeviceLost) after a
    /// fault.
    pub fn new(device: &Device) -> Result<Self> {
        Self::named(device, "stream")
    }

    /// A new stream with a name, which logs show and which errors use to list the work that was lost.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn named(device: &Device, name: impl Into<String>) -> Result<Self> {
        Self::with_priority(device, name.into(), 0)
    }

    pub(crate) fn with_priority(device: &Device, name: String, priority: i32) -> Result<Self> {
        let spec = StreamSpec { name: name.clone(), priority, non_blocking: true };
        Self::over(device, name, Held::new(device, &spec)?)
    }

    pub(crate) fn over(device: &Device, name: String, held: Arc<Held>) -> Result<Self> {
        Self::among(Streams::of(device), device, name, held)
    }

    fn among(streams: Arc<Streams>, device: &Device, name: String, held: Arc<Held>) -> Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let mut spares = Spares::default();
        streams.observe(spares.grow(&streams))?;
        let stream = Self(Arc::new(Inner {
            device: device.clone(),
            streams,
            raw: held.raw,
            held,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            name,
            order: Mutex::at(
                Level::StreamOrder,
                Order {
                    issued: 0,
                    clock: Clock::default(),
                    marks: VecDeque::new(),
                    marked: 0,
                    spares,
                    meter: None,
                    upstream: SmallVec::new(),
                    tainted: Vec::new(),
                    launches: Launches::default(),
                },
            ),
            issued: AtomicU64::new(0),
            completion: Arc::new(Completion::new()),
            side: OnceLock::new(),
            forecast: Mutex::default(),
            watched: WatchFlag::new(),
            has_upstream_work: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            mode: AtomicMode::new(CompletionMode::default()),
            stride: Stride::new(),
        }));
        stream.0.streams.enter(&stream);
        Ok(stream)
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

    /// How the host learns that work on this stream is done.
    pub fn completion_mode(&self) -> CompletionMode {
        self.0.mode.get()
    }

    /// Changes how the host learns that work is done, for waits that begin from now on.
    pub fn set_completion_mode(&self, mode: CompletionMode) {
        self.0.mode.set(mode);
    }

    /// Resolves when all work that was enqueued before this call is done. Work that is enqueued between this call and
    /// the first poll is not waited for.
    pub fn completed(&self) -> Completed {
        let mut ticket = self.ticket();
        if self.capture().is_none() {
            // The mark is recorded now, not at the first poll, which would include later work. An error is reported by
            // the poll.
            let _ = ticket.commit();
        }
        Completed::new(ticket)
    }

    /// Blocks the thread until all work that was enqueued before this call is done. Meant for code without a runtime;
    /// in async code await [`completed`](Self::completed).
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`Usage`](ErrorKind::Usage) for a stream under capture, and
    /// in a host function, in a waker that a device thread calls, and in destructors that run there: see
    /// [`CompletionMode`].
    pub fn synchronize_blocking(&self) -> Result<()> {
        // In a forked child process no worker thread exists that could complete the work.
        self.0.device.check_process()?;
        self.not_captured()?;
        self.may_wait("all of its work")?;
        let ticket = self.ticket();
        self.0.streams.observe(self.0.streams.backend().stream_synchronize(self.0.raw))?;
        self.0.completion.advance(ticket.number());
        ticket.sound()
    }

    /// Work enqueued here from now on waits, on the device, for all work that was enqueued into `other` before this
    /// call.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices have different backends; [`DeviceLost`](ErrorKind::DeviceLost)
    /// after a fault, or if the last work of `other` is ordered after work of a device that has been lost.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        self.wait(&other.ticket())
    }

    /// Enqueues a host function. It runs when the work before it is done, on a thread of the driver, and blocks this
    /// stream until it returns. It must not call into wakeline or the driver, and must not wait. What it captures
    /// should hold no `Buffer`, no `Envelope` and nothing that belongs to a graph: these would be dropped on the
    /// driver's thread, where CUDA permits no calls, so that their driver resources would leak. A call there that would
    /// wait for the device, and on CUDA every call that needs the driver, returns a [`Usage`](ErrorKind::Usage) error.
    /// If the device is lost, the function is dropped without being called.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        if self.capture().is_some() {
            // Before the stream's lock is taken: a rejected function is dropped without it.
            discard(function);
            return Err(recorder::is_called_once());
        }
        let function = Discarded::new(function);
        let call = move || function.take().into_iter().for_each(|function| function());
        let mut function: Option<HostFunction> = Some(Box::new(call));
        let ticket = self.enqueue_point(|backend, raw| backend.host_function(raw, &mut function));
        // A rejected function is dropped here, without the stream's lock: it may have captured a buffer, whose drop
        // takes that lock.
        discard(function);
        ticket.map(drop)
    }

    /// As [`host_function`](Self::host_function), for a function that can be called more than once: in a
    /// [graph](crate::graph) it is called at every launch.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn host_callback(&self, function: impl Fn() + Send + Sync + 'static) -> Result<()> {
        // A device that rejects the function drops its clone under its recorder's lock.
        let _later = Deferred::new();
        let function = host_callback(function);
        // A second handle, so that a rejected function is dropped without the stream's lock.
        let given = function.clone();
        let ticket = self.enqueue_point(|backend, raw| backend.host_callback(raw, given));
        discard(function);
        ticket.map(drop)
    }

    /// The ticket of the latest work. If other libraries enqueue into the stream too, unseen, a new ticket after their
    /// work.
    pub fn ticket(&self) -> Ticket {
        if self.0.held.is_shared()
            && let Ok(ticket) = self.enqueue_point(|_, _| Ok(()))
        {
            return ticket;
        }
        Ticket::new(self.clone(), self.0.issued.load(Ordering::Acquire))
    }

    /// The point before all work of this stream.
    pub(crate) fn beginning(&self) -> Ticket {
        Ticket::new(self.clone(), 0)
    }

    #[inline]
    pub(crate) fn streams(&self) -> &Arc<Streams> {
        &self.0.streams
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.0.raw
    }

    /// The stream's number, unique in the process, from 1.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether work enqueued here from now on is ordered after a ticket, as far as is known now: the ticket is one of
    /// this stream, it has passed, or the device was made to wait for it.
    pub(crate) fn past(&self) -> impl Fn(&Ticket) -> bool + use<> {
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

    /// Blocks the thread while this stream's queue is full, then takes the locks that are held across an
    /// [`enqueue`](Self::enqueue), so that a thread that needs one of these locks does not wait for the device. Call it
    /// with no lock held. `locks` may block, and may be called more than once.
    #[inline]
    pub(crate) fn make_room<L>(&self, mut locks: impl FnMut() -> L) -> Result<(EnqueuePermit<'_>, L)> {
        assert_unlocked();
        let Some((backlog, backend)) = self.0.held.backlog() else {
            let taken = locks();
            return Ok((EnqueuePermit::new(QueueSlot::ENDLESS, self), taken));
        };
        loop {
            // The locks come first: a thread that has reserved a slot may wait for short locks only, and `locks` may
            // wait for a thread that needs a slot.
            let taken = locks();
            if let Some(room) = backlog.keep() {
                return Ok((EnqueuePermit::new(room, self), taken));
            }
            drop(taken);
            let goes_on = || self.may_wait("room in its queue").and_then(|()| self.0.device.check_process());
            if !backlog.wait(backend, goes_on)? {
                let taken = locks();
                return Ok((EnqueuePermit::new(backlog.keep_beyond(), self), taken));
            }
        }
    }

    /// A permit to enqueue one operation that reads nothing, unless this stream's queue is full. With `asks`, the
    /// device is queried first. Never blocks: meant for a drop.
    pub(crate) fn room_if_any(&self, asks: bool) -> Option<EnqueuePermit<'_>> {
        let room = match self.0.held.backlog() {
            Some((backlog, backend)) if asks => backlog.keep_now(backend)?,
            Some((backlog, _)) => backlog.keep()?,
            None => QueueSlot::ENDLESS,
        };
        Some(EnqueuePermit { room, losses: READS_NOTHING })
    }

    /// An error on a thread that the device depends on.
    #[cold]
    fn may_wait(&self, what: &str) -> Result<()> {
        DeviceThread::may_wait(|| format!("stream `{}` of {} would wait for {what}", self.name(), self.device()))
    }

    /// Enqueues one operation and issues the next ticket as one step. Never blocks: the permit holds a slot.
    #[inline]
    pub(crate) fn enqueue(
        &self,
        leave: EnqueuePermit<'_>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(leave, None, work)
    }

    /// The same for a launch.
    #[inline]
    pub(crate) fn enqueue_launch(
        &self,
        leave: EnqueuePermit<'_>,
        what: Launched,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(leave, Some(what), work)
    }

    #[inline]
    fn enqueue_as(
        &self,
        leave: EnqueuePermit<'_>,
        launched: Option<Launched>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        let ticket = self.put(leave.losses, launched, work)?;
        leave.room.taken(self.0.held.backend(), self.0.raw);
        Ok(ticket)
    }

    /// The same for an operation that takes no slot in the device's queue and reads no memory written before: events,
    /// host functions, nothing at all. Never blocks.
    #[inline]
    pub(crate) fn enqueue_point(&self, work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>) -> Result<Ticket> {
        self.put(READS_NOTHING, None, work)
    }

    /// Enqueues under the order lock. `losses`: how many losses were noted before the work was found to read nothing
    /// tainted.
    fn put(
        &self,
        losses: u64,
        launched: Option<Launched>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        assert_may_wake();
        let inner = &*self.0;
        // Enqueueing for a simulated device wakes the simulation's loop.
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        inner.device.check()?;
        if inner.has_upstream_work.load(Ordering::Relaxed) {
            order.note_losses(inner);
        }
        if let Some(meter) = &mut order.meter {
            meter.work(inner.raw);
        }
        let unwinding = Unwinding { issued: &mut order.issued, of: &inner.issued };
        let done = work(inner.streams.backend(), inner.raw);
        std::mem::forget(unwinding);
        if let Err(error) = done {
            drop(order);
            return self.0.streams.observe(Err(error));
        }
        if let Some(launched) = launched {
            let ticket = order.issued + 1;
            order.launches.note(ticket, launched);
        }
        Ok(self.issue(order, 0, losses))
    }

    /// The ticket of work that a user function enqueued without the order lock. Also issued if the device was lost
    /// meanwhile.
    pub(crate) fn ticket_after_work(&self, pieces: u64, losses: u64) -> Ticket {
        assert_may_wake();
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        if self.0.has_upstream_work.load(Ordering::Relaxed) {
            order.note_losses(&self.0);
        }
        self.issue(order, pieces, losses)
    }

    #[inline]
    fn issue(&self, mut order: MutexGuard<'_, Order>, pieces: u64, losses: u64) -> Ticket {
        let inner = &*self.0;
        capture::note_work(self);
        order.issued += 1;
        let number = order.issued;
        if losses < inner.losses.load(Ordering::Relaxed) {
            order.taint(number);
        }
        inner.issued.store(number, Ordering::Release);
        let is_armed = inner.streams.vigil.is_armed();
        drop(order);
        if is_armed {
            inner.streams.work_added();
        }
        if pieces > 0
            && let Some((backlog, backend)) = inner.held.backlog()
        {
            backlog.grew(backend, inner.raw, pieces);
        }
        Ticket::new(self.clone(), number)
    }

    /// An operator's run begins: work enqueued from now on is timed.
    pub(crate) fn begin_run(&self) {
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        order.meter.get_or_insert_with(|| Meter::new(&self.0.streams)).begin_run();
    }

    /// Work that does not go through [`enqueue`](Self::enqueue) is about to be enqueued.
    pub(crate) fn begin_work(&self) {
        let _later = Deferred::new();
        if let Some(meter) = &mut lock(&self.0.order).meter {
            meter.work(self.0.raw);
        }
    }

    pub(crate) fn end_run(&self) {
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        if order.meter.as_mut().is_some_and(|meter| meter.end_run(self.0.raw)) {
            // A waiter for the stream's last work also waits for its timing event.
            order.issued += 1;
            self.0.issued.store(order.issued, Ordering::Release);
        }
    }

    /// What the runs took; reports once. Never blocks: runs that are not done are not measured.
    pub(crate) fn device_time(&self) -> Option<DeviceTime> {
        let meter = lock(&self.0.order).meter.take();
        meter.map(|mut meter| meter.sums())
    }

    /// Orders work enqueued from now on after `ticket`, so that it may read what that wrote. Issues no call to the
    /// device if the order is already implied. An error if the ticket is known to be tainted by the loss of another
    /// device.
    #[inline]
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.wait_and(ticket, true)
    }

    /// The same for work that is being prepared, where `ticket` may be one of this stream. A ticket that is known to be
    /// tainted is no error: it taints the new work. `outlives`: the memory that the ticket wrote survives the loss of
    /// its device.
    #[inline]
    pub(crate) fn wait_to_read(&self, ticket: &Ticket, outlives: bool) -> Result<()> {
        let waited = if self.is(ticket.stream()) { ticket.check_known() } else { self.wait_and(ticket, true) };
        waited.or_else(|error| self.read_tainted(ticket, outlives, error))
    }

    /// The same for work that does not read what the ticket wrote: whether that is tainted does not matter.
    #[inline]
    pub(crate) fn wait_until_over(&self, ticket: &Ticket) -> Result<()> {
        self.wait_and(ticket, false)
    }

    fn wait_and(&self, ticket: &Ticket, reads: bool) -> Result<()> {
        assert_may_wake();
        let (inner, other) = (&*self.0, &*ticket.stream().0);
        if inner.id == other.id || ticket.number() == 0 {
            return Ok(());
        }
        if reads {
            ticket.check_known()?;
        }
        if ticket.has_passed() {
            // Checked again: a loss may have been noted meanwhile.
            let may_be_tainted = inner.device != other.device || ticket.stream().may_be_tainted_by();
            return if reads && may_be_tainted { self.come_after_passed(ticket) } else { Ok(()) };
        }
        if !reads && ticket.has_ended() {
            return Ok(());
        }
        if (inner.streams.capture().is_some() || other.streams.capture().is_some())
            && !capture::is_one_of_both(self, ticket, reads)?
        {
            return Ok(());
        }
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        if order.clock.reached(other.id) >= ticket.number() {
            // The stream has waited for this before. If that device is lost, work enqueued since then is tainted, and
            // so is what would be read now.
            return if reads && inner.device != other.device { other.device.check() } else { Ok(()) };
        }
        if !inner.device.copies_with(&other.device) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} cannot wait for {}: they have different backends", inner.device, other.device),
            ));
        }
        let late;
        let mark = match ticket.marked() {
            Some(mark) => mark,
            None => {
                // Takes one order lock after the other, never both.
                drop(order);
                late = ticket.stream().mark_for_wait(ticket.number())?;
                order = lock(&inner.order);
                &late
            }
        };
        // Each device is checked once. If a lost one has tainted the ticket, this is an error; one that is lost from
        // now on is noted later.
        let mut upstream: SmallVec<[Device; 1]> = mark.upstream.iter().filter_map(WeakDevice::upgrade).collect();
        upstream.retain(|device| !device.is_lost());
        if reads && upstream.len() < mark.upstream.len() {
            drop(order);
            ticket.check_known()?;
            order = lock(&inner.order);
        }
        inner.device.check()?;
        other.device.check()?;
        if let Some(meter) = &mut order.meter {
            meter.wait(inner.raw);
        }
        let done = inner.streams.backend().stream_wait(inner.raw, mark.event);
        if let Err(error) = done {
            drop(order);
            // Either device may be the lost one.
            return inner.streams.observe(other.streams.observe(Err(error)));
        }
        // An order through another device holds only while that device lives: see `memory::uses::Uses`.
        if inner.device == other.device {
            order.clock.merge(&mark.clock);
        }
        order.clock.reach(other.id, mark.ticket);
        if mutants::is(Mutant::PresentClock) {
            order.clock.reach(other.id, other.issued.load(Ordering::Acquire));
        }
        // A wait has a ticket, too: work ordered after this stream now is ordered after what this waits for.
        order.issued += 1;
        inner.issued.store(order.issued, Ordering::Release);
        self.come_after(&mut order, upstream.into_iter(), &other.device, Wait::Enqueued);
        let are_many = order.upstream.len() > MANY && inner.streams.capture().is_none();
        drop(order);
        if are_many {
            // The results are for waiters: ignored here.
            let mut last = self.ticket();
            let _ = last.recheck().and_then(|()| last.sound());
        }
        Ok(())
    }

    /// Queries the device whether a mark of this stream has passed. An error means that the device is lost.
    fn ask(&self, mark: &Mark) -> Result<bool> {
        assert_may_wake();
        let inner = &*self.0;
        if inner.completion.passed() >= mark.ticket {
            return Ok(true);
        }
        inner.device.check()?;
        self.not_captured()?;
        let mut passed = inner.streams.observe(inner.device.backend().event_query(mark.event))?;
        passed |= mutants::is(Mutant::EarlyCompletion);
        if passed {
            inner.completion.advance(mark.ticket);
        }
        Ok(passed)
    }

    /// As [`ask`](Self::ask), for the first query of a wait. If the mark has passed, a task that queries mark by mark
    /// is behind the device, so this queries a mark further on as well; the marks between then need no query.
    fn ask_first(&self, mark: &Mark) -> Result<bool> {
        let inner = &*self.0;
        let known = inner.completion.passed() >= mark.ticket;
        if known || !self.ask(mark)? {
            return Ok(known);
        }
        let Some(stride) = inner.stride.next() else { return Ok(true) };
        let order = lock(&inner.order);
        let next = order.marks.partition_point(|other| other.ticket <= mark.ticket);
        let further = order.marks.range(next..).take(stride).next_back().cloned();
        drop(order);
        // An error here does not affect work that is done.
        if let Some(Ok(passed)) = further.map(|further| self.ask(&further)) {
            inner.stride.found(passed);
        }
        Ok(true)
    }

    /// Queries the device for the stream's progress. An error means that the device is lost.
    fn look(&self) -> Result<()> {
        loop {
            let passed = self.0.completion.passed();
            let order = lock(&self.0.order);
            // Marks that have passed stay in the list until the next mark is recorded.
            let next = order.marks.partition_point(|mark| mark.ticket <= passed);
            let next = order.marks.get(next).cloned();
            drop(order);
            match next {
                Some(mark) if self.ask(&mark)? => {}
                _ => return self.0.device.check(),
            }
        }
    }

    /// Arranges a callback for when the mark has passed, on a side stream behind a wait for the mark.
    fn call_back(&self, mark: &Mark) -> Result<()> {
        if !self.0.completion.arm(mark.ticket) {
            return Ok(());
        }
        let armed = self.0.side().and_then(|side| {
            let backend = self.0.device.backend();
            backend.stream_wait(side, mark.event)?;
            let (completion, number) = (self.0.completion.clone(), mark.ticket);
            backend.host_function(side, &mut Some(Box::new(move || completion.wake(number))))
        });
        if armed.is_err() {
            self.0.completion.disarm(mark.ticket);
        }
        self.0.streams.observe(armed)
    }

    fn forecast(&self) -> MutexGuard<'_, Forecast> {
        lock(&self.0.forecast)
    }

    /// True if the stream has waited for another device whose work is not yet known to be valid.
    pub(crate) fn has_upstream(&self) -> bool {
        self.0.has_upstream_work.load(Ordering::Acquire)
    }
}

/// Dropped only when a call that enqueues panics: its work may have been enqueued, so a ticket is issued after it.
struct Unwinding<'a> {
    issued: &'a mut u64,
    of: &'a AtomicU64,
}

impl Drop for Unwinding<'_> {
    #[cold]
    fn drop(&mut self) {
        *self.issued += 1;
        self.of.store(*self.issued, Ordering::Release);
    }
}

impl Inner {
    fn side(&self) -> Result<RawStream> {
        if let Some(side) = self.side.get() {
            return Ok(*side);
        }
        let backend = self.device.backend();
        let name = format!("{}, signals", self.name);
        let spec = StreamSpec { name, priority: self.held.priority, non_blocking: true };
        let made = backend.stream_create(&spec)?;
        if self.side.set(made).is_err() {
            backend.stream_destroy(made);
        }
        Ok(*self.side.get().unwrap_or(&made))
    }
}

/// It may hold the last handle of a device, its own or an upstream one. Dropping that may drop user functions and wake
/// a simulation; both are deferred to the end of a [`Deferred`] scope. A function that drops tickets under a lock must
/// open such a scope first.
impl Drop for Inner {
    fn drop(&mut self) {
        assert_may_wake();
        if self.order.get_mut().issued > self.completion.passed() {
            self.streams.leave(&self.device, self.raw);
        }
        let backend = self.device.backend();
        if let Some(side) = self.side.get() {
            backend.stream_destroy(*side);
        }
    }
}

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
