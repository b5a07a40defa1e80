//! Streams: ordered work on a device, counted in tickets.
//!
//! A [`Stream`] runs what is put into it one after the other; streams run beside each other. Every piece of work gets
//! a [`Ticket`], a number of its stream. "Ticket n has passed" is what everything else here is made of: order between
//! streams (`stream_b` waits for a ticket of `stream_a`), completion (a [`Completed`] future resolves when a ticket has
//! passed), the life of memory (it is free when the tickets of its uses have passed).
//!
//! ```text
//!   enqueue ─> ticket 1, 2, 3, 4 ...         under the stream's lock: ticket and enqueue are one step
//!   mark    ─> an event after ticket 3       recorded where somebody may wait for it, with the stream's clock of then
//!   wait    ─> the device waits for a mark   unless the order is implied already
//! ```
//!
//! A stream's clock says, for each other stream, up to which ticket this one is ordered after it. Clocks are lower
//! bounds: forgetting costs a wait, never a race. A wait merges the snapshot that was taken with the mark, never the
//! other stream's present clock.
//!
//! Order goes by way of streams of one device only. What a device keeps in order is so while it lives: once it is lost, waits for
//! its work end though what that was to come after, on a third device, has not passed. So a wait for a stream of another device
//! merges no snapshot, and memory keeps the uses that came before on other devices (`memory::access::Uses`).
//!
//! What the loss of another device spoils is a matter of tickets, too: see `stream/taint.rs`.

mod backlog;
pub(crate) mod capture;
mod clock;
mod completed;
pub(crate) mod completion;
mod current;
mod effort;
mod forecast;
mod held;
mod join;
mod launches;
mod lookout;
mod mark;
mod marker;
mod marks;
mod meter;
mod mode;
mod pool;
mod streams;
mod stride;
mod taint;
mod ticket;
mod timer;
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

use backlog::Room;
use clock::Clock;
pub use completed::Completed;
use completion::Completion;
use forecast::Forecast;
pub(crate) use held::Held;
pub use join::Point;
pub(crate) use launches::Launched;
use launches::Launches;
use mark::{Mark, Spares};
pub use marker::Event;
pub use meter::DeviceTime;
use meter::Meter;
use mode::AtomicMode;
pub use mode::CompletionMode;
pub use pool::{PooledStream, StreamPool, StreamPoolBuilder};
pub(crate) use streams::Streams;
use stride::Stride;
pub(crate) use taint::Leave;
use taint::{Spoilt, Upstream, Wait};
pub use ticket::Ticket;
pub use timer::Timer;
pub(crate) use watch::Watched;

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
    /// Of all streams of the process.
    id: u64,
    name: String,
    order: Mutex<Order>,
    /// The highest ticket handed out, for a look without the lock.
    issued: AtomicU64,
    /// Shared with callbacks: those run on the driver's thread, where no stream may be destroyed, so they must not be
    /// the last to hold one.
    completion: Arc<Completion>,
    /// Carries the host functions that signal: on the stream itself they would hold it up.
    side: OnceLock<RawStream>,
    /// How long its work takes.
    forecast: Mutex<Forecast>,
    /// On the lookout's list.
    watched: Watched,
    /// Has waited for another device, whose work is not known to be sound.
    crossed: AtomicBool,
    /// How many of those it has noted as lost.
    losses: AtomicU64,
    mode: AtomicMode,
    stride: Stride,
}

/// What changes with each enqueue.
struct Order {
    issued: u64,
    clock: Clock,
    /// Oldest first; those that have passed go.
    marks: VecDeque<Arc<Mark>>,
    /// How many marks there ever were.
    marked: u64,
    spares: Spares,
    /// Where the runs of an operator are timed.
    meter: Option<Box<Meter>>,
    /// Other devices whose work this stream has come after, directly or not, and is not yet known to be sound.
    upstream: SmallVec<[Upstream; 1]>,
    /// What those of them have spoilt that were lost, oldest first.
    spoilt: Vec<Spoilt>,
    launches: Launches,
}

/// For work that reads nothing: what was noted before it makes no difference.
pub(crate) const READS_NOTHING: u64 = u64::MAX;

/// With more devices to come after than this, a wait looks for those that are no longer needed.
const MANY: usize = 16;

impl Stream {
    /// A new stream on `device`, with the default priority.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for the host, which has none; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn new(device: &Device) -> Result<Self> {
        Self::named(device, "stream")
    }

    /// A new stream with a name for logs and for errors that list whose work was lost.
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
        streams.heed(spares.grow(&streams))?;
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
                    spoilt: Vec::new(),
                    launches: Launches::default(),
                },
            ),
            issued: AtomicU64::new(0),
            completion: Arc::new(Completion::new()),
            side: OnceLock::new(),
            forecast: Mutex::default(),
            watched: Watched::new(),
            crossed: AtomicBool::new(false),
            losses: AtomicU64::new(0),
            mode: AtomicMode::new(CompletionMode::default()),
            stride: Stride::new(),
        }));
        stream.0.streams.enter(&stream);
        Ok(stream)
    }

    /// The device it is on.
    #[inline]
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How it learns that its work is done.
    pub fn completion_mode(&self) -> CompletionMode {
        self.0.mode.get()
    }

    /// Changes how it learns that its work is done, for waits that begin from now on.
    pub fn set_completion_mode(&self, mode: CompletionMode) {
        self.0.mode.set(mode);
    }

    /// Resolves when all that was enqueued until now is done. What is enqueued between this call and the first poll is not waited
    /// for.
    pub fn completed(&self) -> Completed {
        let mut ticket = self.ticket();
        if self.capture().is_none() {
            // Marked now: at the first poll it would wait for what is enqueued until then. An error is the poll's.
            let _ = ticket.commit();
        }
        Completed::new(ticket)
    }

    /// Waits, blocking the thread, until all that was enqueued is done. For places without a runtime: in async code
    /// await [`completed`](Self::completed).
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault; [`Usage`](ErrorKind::Usage) for a stream of a capture, in a host
    /// function, in a waker that a device calls, and in the destructors that these lead to: see [`CompletionMode`].
    pub fn synchronize_blocking(&self) -> Result<()> {
        // In a fork of the process no worker would ever be done.
        self.0.device.check_process()?;
        self.not_captured()?;
        self.may_wait("all of its work")?;
        let ticket = self.ticket();
        self.0.streams.heed(self.0.streams.backend().stream_synchronize(self.0.raw))?;
        self.0.completion.advance(ticket.number());
        ticket.sound()
    }

    /// Work enqueued here from now on waits, on the device, for all that was enqueued into `other` until now.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices are of different makes, [`DeviceLost`](ErrorKind::DeviceLost)
    /// after a fault, or if the last work of `other` came after that of a device that was lost then.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        self.wait(&other.ticket())
    }

    /// Enqueues a function of the host: it runs when the work before it is done, on a thread of the driver's, and
    /// holds up this stream until it returns. It must not call into wakeline or the driver, nor wait for anything, and
    /// what it captures should hold no `Buffer`, no `Envelope` and nothing of a graph's: those would be dropped there, and
    /// on CUDA, where the driver permits no calls there, what they have of the driver's is leaked. A call that would wait for
    /// the device, and on CUDA every call that needs the driver, is a [`Usage`](ErrorKind::Usage) error there. It is dropped
    /// without being called if the device is lost.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        if self.capture().is_some() {
            // Before the stream's lock: what is refused is dropped without.
            discard(function);
            return Err(recorder::is_called_once());
        }
        let function = Discarded::new(function);
        let call = move || function.take().into_iter().for_each(|function| function());
        let mut function: Option<HostFunction> = Some(Box::new(call));
        let ticket = self.enqueue_point(|backend, raw| backend.host_function(raw, &mut function));
        // What is refused goes here, without the stream's lock: it may have captured a buffer, whose drop takes that.
        discard(function);
        ticket.map(drop)
    }

    /// As [`host_function`](Self::host_function), for a function that can be called again: in a [graph](crate::graph) it is,
    /// at every launch.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn host_callback(&self, function: impl Fn() + Send + Sync + 'static) -> Result<()> {
        // A device that refuses it lets go of what it has of it, under its recorder's lock.
        let _later = Deferred::new();
        let function = host_callback(function);
        // Two of it: what is refused is dropped without the stream's lock.
        let given = function.clone();
        let ticket = self.enqueue_point(|backend, raw| backend.host_callback(raw, given));
        discard(function);
        ticket.map(drop)
    }

    /// The ticket of the latest work. Where others put work into the stream too, unseen, one that comes after that.
    pub fn ticket(&self) -> Ticket {
        if self.0.held.is_shared()
            && let Ok(ticket) = self.enqueue_point(|_, _| Ok(()))
        {
            return ticket;
        }
        Ticket::new(self.clone(), self.0.issued.load(Ordering::Acquire))
    }

    /// The point before all of its work.
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

    /// Its number among all streams of the process, from 1.
    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether work that is enqueued here from now on comes after a ticket, as far as that is known now: it is one of this
    /// stream, it has passed, or the device was made to wait for it.
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

    /// Waits, blocking the thread, while the device has too much to do in this stream, and takes the locks that are held
    /// across an [`enqueue`](Self::enqueue): so a thread that needs one of those does not wait for the device. To be called
    /// with no lock held. `locks` may wait, and may be called again.
    #[inline]
    pub(crate) fn make_room<L>(&self, mut locks: impl FnMut() -> L) -> Result<(Leave<'_>, L)> {
        assert_unlocked();
        let Some((backlog, backend)) = self.0.held.backlog() else {
            let taken = locks();
            return Ok((Leave::new(Room::ENDLESS, self), taken));
        };
        loop {
            // A thread that has a place waits for short locks alone: what `locks` waits for may itself need a place.
            let taken = locks();
            if let Some(room) = backlog.keep() {
                return Ok((Leave::new(room, self), taken));
            }
            drop(taken);
            let goes_on = || self.may_wait("room in its queue").and_then(|()| self.0.device.check_process());
            if !backlog.wait(backend, goes_on)? {
                let taken = locks();
                return Ok((Leave::new(backlog.keep_beyond(), self), taken));
            }
        }
    }

    /// Leave to enqueue a piece of work that reads nothing, unless the device has too much to do in this stream. `asks`: how much
    /// it has is asked. Never waits: for a drop.
    pub(crate) fn room_if_any(&self, asks: bool) -> Option<Leave<'_>> {
        let room = match self.0.held.backlog() {
            Some((backlog, backend)) if asks => backlog.keep_now(backend)?,
            Some((backlog, _)) => backlog.keep()?,
            None => Room::ENDLESS,
        };
        Some(Leave { room, losses: READS_NOTHING })
    }

    /// An error on a thread that a device cannot go on without.
    #[cold]
    fn may_wait(&self, what: &str) -> Result<()> {
        DeviceThread::may_wait(|| format!("stream `{}` of {} would wait for {what}", self.name(), self.device()))
    }

    /// Puts one piece of work into the stream and gives it the next ticket, as one step. Never waits: there is room.
    #[inline]
    pub(crate) fn enqueue(
        &self,
        leave: Leave<'_>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(leave, None, work)
    }

    /// The same for a launch.
    #[inline]
    pub(crate) fn enqueue_launch(
        &self,
        leave: Leave<'_>,
        what: Launched,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(leave, Some(what), work)
    }

    #[inline]
    fn enqueue_as(
        &self,
        leave: Leave<'_>,
        launched: Option<Launched>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        let ticket = self.put(leave.losses, launched, work)?;
        leave.room.taken(self.0.held.backend(), self.0.raw);
        Ok(ticket)
    }

    /// The same for what takes no place in the device's queue, and reads nothing that was written before: events, host
    /// functions, nothing at all. Never waits.
    #[inline]
    pub(crate) fn enqueue_point(&self, work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>) -> Result<Ticket> {
        self.put(READS_NOTHING, None, work)
    }

    /// Puts it in, with the order's lock. `losses`: how many were noted before it was found to read nothing that is spoilt.
    fn put(
        &self,
        losses: u64,
        launched: Option<Launched>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        assert_may_wake();
        let inner = &*self.0;
        // A simulation's loop is woken by work for its devices.
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        inner.device.check()?;
        if inner.crossed.load(Ordering::Relaxed) {
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
            return self.0.streams.heed(Err(error));
        }
        if let Some(launched) = launched {
            let ticket = order.issued + 1;
            order.launches.note(ticket, launched);
        }
        Ok(self.issue(order, 0, losses))
    }

    /// The ticket of work that was put in without the order's lock, by a function of the user's: also where the device was lost
    /// meanwhile.
    pub(crate) fn ticket_after_work(&self, pieces: u64, losses: u64) -> Ticket {
        assert_may_wake();
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        if self.0.crossed.load(Ordering::Relaxed) {
            order.note_losses(&self.0);
        }
        self.issue(order, pieces, losses)
    }

    /// The next ticket.
    #[inline]
    fn issue(&self, mut order: MutexGuard<'_, Order>, pieces: u64, losses: u64) -> Ticket {
        let inner = &*self.0;
        capture::note_work(self);
        order.issued += 1;
        let number = order.issued;
        if losses < inner.losses.load(Ordering::Relaxed) {
            order.spoil(number);
        }
        inner.issued.store(number, Ordering::Release);
        let is_armed = inner.streams.vigil.is_armed();
        drop(order);
        if is_armed {
            inner.streams.stir();
        }
        if pieces > 0
            && let Some((backlog, backend)) = inner.held.backlog()
        {
            backlog.grew(backend, inner.raw, pieces);
        }
        Ticket::new(self.clone(), number)
    }

    /// An operator's run begins: what it puts in here is timed.
    pub(crate) fn begin_run(&self) {
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        order.meter.get_or_insert_with(|| Meter::new(&self.0.streams)).begin_run();
    }

    /// Work is about to be put into it that does not go through [`enqueue`](Self::enqueue).
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
            // Who waits for the stream's last work waits for its time, too.
            order.issued += 1;
            self.0.issued.store(order.issued, Ordering::Release);
        }
    }

    /// What its runs took, once. Never waits: what is not done is not measured.
    pub(crate) fn device_time(&self) -> Option<DeviceTime> {
        let meter = lock(&self.0.order).meter.take();
        meter.map(|mut meter| meter.sums())
    }

    /// Work enqueued from now on comes after `ticket`, and may read what that has written. Says nothing to the device where
    /// that is implied already. An error if the ticket is known to be spoilt by the loss of another device.
    #[inline]
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.wait_and(ticket, true)
    }

    /// The same for work that is prepared now, and a ticket that may be one of this stream. If that is known to be spoilt it is
    /// no error: the work is spoilt, too. `outlives`: what the ticket has written lies where the loss of its device does not reach.
    #[inline]
    pub(crate) fn wait_to_read(&self, ticket: &Ticket, outlives: bool) -> Result<()> {
        let waited = if self.is(ticket.stream()) { ticket.check_known() } else { self.wait_and(ticket, true) };
        waited.or_else(|error| self.read_spoilt(ticket, outlives, error))
    }

    /// The same for work that reads nothing of what the ticket has written: whether that is spoilt makes no difference.
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
            // Looked at again: a loss may have been noted meanwhile.
            let may_be_spoilt = inner.device != other.device || ticket.stream().is_doubtful();
            return if reads && may_be_spoilt { self.come_after_passed(ticket) } else { Ok(()) };
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
            // It has waited for that before. What it enqueued since then is spoilt if that device is lost; what it reads now
            // would be, too.
            return if reads && inner.device != other.device { other.device.check() } else { Ok(()) };
        }
        if !inner.device.copies_with(&other.device) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("{} cannot wait for {}: they are devices of different makes", inner.device, other.device),
            ));
        }
        let late;
        let mark = match ticket.marked() {
            Some(mark) => mark,
            None => {
                // One lock after the other, never both.
                drop(order);
                late = ticket.stream().mark_for_wait(ticket.number())?;
                order = lock(&inner.order);
                &late
            }
        };
        // Each is looked at once. Of those that are lost none has spoilt the ticket, or this is an error; those that are lost
        // from now on are noted later.
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
            // Either device may be the one that is lost.
            return inner.streams.heed(other.streams.heed(Err(error)));
        }
        // What another device keeps in order is so only while that device lives: see `memory::access::Uses`.
        if inner.device == other.device {
            order.clock.merge(&mark.clock);
        }
        order.clock.reach(other.id, mark.ticket);
        if mutants::is(Mutant::PresentClock) {
            order.clock.reach(other.id, other.issued.load(Ordering::Acquire));
        }
        // A wait has a ticket too: whoever comes after this stream now comes after what it waits for.
        order.issued += 1;
        inner.issued.store(order.issued, Ordering::Release);
        self.come_after(&mut order, upstream.into_iter(), &other.device, Wait::Enqueued);
        let are_many = order.upstream.len() > MANY && inner.streams.capture().is_none();
        drop(order);
        if are_many {
            // What they say is for those who wait.
            let mut last = self.ticket();
            let _ = last.look_back().and_then(|()| last.sound());
        }
        Ok(())
    }

    /// Asks the device whether a mark of this stream's has passed. An error means that the device is lost.
    fn ask(&self, mark: &Mark) -> Result<bool> {
        assert_may_wake();
        let inner = &*self.0;
        if inner.completion.passed() >= mark.ticket {
            return Ok(true);
        }
        inner.device.check()?;
        self.not_captured()?;
        let mut passed = inner.streams.heed(inner.device.backend().event_query(mark.event))?;
        passed |= mutants::is(Mutant::EarlyCompletion);
        if passed {
            inner.completion.advance(mark.ticket);
        }
        Ok(passed)
    }

    /// As [`ask`](Self::ask), for the first time. If the mark has passed, a task that comes to ask one after the other is behind the
    /// device: so one further on is asked about as well, and those between need not be.
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
        // What is wrong with the device is no matter of work that is done.
        if let Some(Ok(passed)) = further.map(|further| self.ask(&further)) {
            inner.stride.found(passed);
        }
        Ok(true)
    }

    /// Asks the device how far the stream is. An error means that the device is lost.
    fn look(&self) -> Result<()> {
        loop {
            let passed = self.0.completion.passed();
            let order = lock(&self.0.order);
            // Those that have passed stay until another one is made.
            let next = order.marks.partition_point(|mark| mark.ticket <= passed);
            let next = order.marks.get(next).cloned();
            drop(order);
            match next {
                Some(mark) if self.ask(&mark)? => {}
                _ => return self.0.device.check(),
            }
        }
    }

    /// Has a callback say when the mark has passed: on a stream at this one's side, behind a wait for the mark.
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
        self.0.streams.heed(armed)
    }

    fn forecast(&self) -> MutexGuard<'_, Forecast> {
        lock(&self.0.forecast)
    }

    /// It has waited for another device, whose work is not known to be sound.
    pub(crate) fn has_crossed(&self) -> bool {
        self.0.crossed.load(Ordering::Acquire)
    }
}

/// Dropped only by a panic out of a call that enqueues: its work may be there, so there is a ticket that comes after it.
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

/// It may keep the last handle of a device, its own or one upstream, and the end of a device may drop functions of the user's and
/// wake a simulation: those wait for the end of a [`Deferred`] scope. So a function that drops tickets under a lock opens one first.
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
