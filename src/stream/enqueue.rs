//! Enqueueing: how an operation gets its place in a stream and its [`Ticket`].
//!
//! ```text
//!   make_room ─> EnqueuePermit ─> enqueue      room in the driver's queue is reserved before any lock is taken
//!   enqueue_point                              events, host functions: need no room
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use super::{
    Stream, Ticket,
    backlog::QueueSlot,
    capture,
    meter::Meter,
    order::{Launched, Order},
    spans::{OpenSpans, SpanOwner},
};
use crate::{
    device::{
        backend::{Backend, HostFunction, RawStream, host_callback},
        recorder,
        thread::DeviceThread,
    },
    error::Result,
    sync::{Deferred, DiscardOnDrop, MutexGuard, assert_may_wake, assert_unlocked, discard, lock},
};

/// The number of losses for work that reads no memory: losses do not taint such work.
const READS_NOTHING: u64 = u64::MAX;

/// A permit to enqueue one operation.
pub(crate) struct EnqueuePermit<'a> {
    pub(super) room: QueueSlot<'a>,
    /// The number of losses that the stream had noted when the permit was issued.
    pub(crate) losses: u64,
}

impl<'a> EnqueuePermit<'a> {
    #[inline]
    pub(super) fn new(room: QueueSlot<'a>, stream: &Stream) -> Self {
        Self { room, losses: stream.note_losses() }
    }
}

impl Stream {
    /// Enqueues a host function. It runs when the work before it is done, on a thread of the driver, and blocks this
    /// stream until it returns. It must not call into wakeline or the driver, and must not wait. It should capture no
    /// `Buffer`, no `Envelope` and nothing that belongs to a graph: these would be dropped on the driver's thread,
    /// where CUDA permits no calls, so that their driver resources would leak. On that thread a call that would wait
    /// for the device, and on CUDA every call that needs the driver, returns a [`Usage`](crate::ErrorKind::Usage)
    /// error. If the device is lost, the function is dropped without being called.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault.
    pub fn host_function(&self, function: impl FnOnce() + Send + 'static) -> Result<()> {
        if self.capture().is_some() {
            // Before the stream's lock is taken: a rejected function is dropped without it.
            discard(function);
            return Err(recorder::one_shot_error());
        }
        let mut function = DiscardOnDrop::new(function);
        let call = move || function.take().into_iter().for_each(|function| function());
        let mut function: Option<HostFunction> = Some(Box::new(call));
        let ticket = self.enqueue_point(|backend, raw| backend.host_function(raw, &mut function));
        // A rejected function is dropped here, without the stream's lock: it may have captured a buffer, whose drop
        // takes that lock.
        discard(function);
        ticket.map(drop)
    }

    /// Like [`host_function`](Self::host_function), for a function that can be called more than once: in a
    /// [graph](crate::graph) it is called at every launch.
    ///
    /// # Errors
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault.
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

    /// The ticket of the latest work. If code outside of wakeline may enqueue into the stream, this issues a new
    /// ticket, which includes that work.
    pub fn ticket(&self) -> Ticket {
        if self.0.driver_stream.is_shared()
            && let Ok(ticket) = self.ticket_of_all()
        {
            return ticket;
        }
        Ticket::new(self.clone(), self.0.issued.load(Ordering::Acquire))
    }

    /// A new ticket, which includes work that code outside of wakeline has enqueued.
    pub(crate) fn ticket_of_all(&self) -> Result<Ticket> {
        self.enqueue_point(|_, _| Ok(()))
    }

    /// Blocks the thread while this stream's queue is full, then acquires the locks that are held across an
    /// [`enqueue`](Self::enqueue), so that a thread that needs one of these locks does not wait for the device. Called
    /// with no lock held. `locks` acquires the locks; it may block, and may be called more than once.
    #[inline]
    pub(crate) fn make_room<L>(&self, mut locks: impl FnMut() -> L) -> Result<(EnqueuePermit<'_>, L)> {
        assert_unlocked();
        let Some((backlog, backend)) = self.0.driver_stream.backlog() else {
            let taken = locks();
            return Ok((EnqueuePermit::new(QueueSlot::UNBOUNDED, self), taken));
        };
        loop {
            // The locks come first: a thread that has reserved a slot must wait only for locks that are held briefly,
            // and `locks` may wait for a thread that needs a slot.
            let taken = locks();
            if let Some(room) = backlog.reserve() {
                return Ok((EnqueuePermit::new(room, self), taken));
            }
            drop(taken);
            let goes_on = || self.check_may_block("room in its queue").and_then(|()| self.0.device.check_process());
            if !backlog.wait(backend, goes_on)? {
                let taken = locks();
                return Ok((EnqueuePermit::new(backlog.reserve_beyond(), self), taken));
            }
        }
    }

    /// A permit to enqueue one operation that reads no memory; `None` if this stream's queue is full. With `query`, the
    /// device is queried first. Never blocks: meant for destructors.
    pub(crate) fn room_if_any(&self, query: bool) -> Option<EnqueuePermit<'_>> {
        let room = match self.0.driver_stream.backlog() {
            Some((backlog, backend)) if query => backlog.reserve_if_passed(backend)?,
            Some((backlog, _)) => backlog.reserve()?,
            None => QueueSlot::UNBOUNDED,
        };
        Some(EnqueuePermit { room, losses: READS_NOTHING })
    }

    /// Fails on a thread that the device depends on.
    #[cold]
    pub(super) fn check_may_block(&self, what: &str) -> Result<()> {
        DeviceThread::may_wait(|| format!("stream `{}` of {} would wait for {what}", self.name(), self.device()))
    }

    /// Enqueues one operation and issues the next ticket as one step. Never blocks: the permit holds a slot.
    #[inline]
    pub(crate) fn enqueue(
        &self,
        permit: EnqueuePermit<'_>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(permit, None, work)
    }

    /// Like [`enqueue`](Self::enqueue), for a launch.
    #[inline]
    pub(crate) fn enqueue_launch(
        &self,
        permit: EnqueuePermit<'_>,
        what: Launched,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        self.enqueue_as(permit, Some(what), work)
    }

    #[inline]
    fn enqueue_as(
        &self,
        permit: EnqueuePermit<'_>,
        launched: Option<Launched>,
        work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>,
    ) -> Result<Ticket> {
        let ticket = self.enqueue_locked(permit.losses, launched, work)?;
        permit.room.fill(self.0.driver_stream.backend(), self.0.raw);
        Ok(ticket)
    }

    /// Like [`enqueue`](Self::enqueue), for an operation that takes no slot in the driver's queue and reads no memory:
    /// an event, a host function, or nothing. Never blocks.
    #[inline]
    pub(crate) fn enqueue_point(&self, work: impl FnOnce(&dyn Backend, RawStream) -> Result<()>) -> Result<Ticket> {
        self.enqueue_locked(READS_NOTHING, None, work)
    }

    /// Enqueues under the order lock. `losses` is the number of losses that were noted before the work was found to
    /// read no tainted memory.
    fn enqueue_locked(
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
        if inner.losses.has_upstream_work.load(Ordering::Relaxed) {
            order.note_losses(&inner.losses);
        }
        if let Some(meter) = &mut order.meter {
            meter.work(inner.raw);
        }
        let unwinding = Unwinding { issued: &mut order.issued, of: &inner.issued };
        let done = work(&*inner.backend, inner.raw);
        std::mem::forget(unwinding);
        if let Err(error) = done {
            drop(order);
            return self.0.streams.observe(Err(error));
        }
        if let Some(meter) = &mut order.meter {
            meter.enqueued();
        }
        if let Some(launched) = launched {
            let ticket = order.issued + 1;
            order.launches.note(ticket, launched);
        }
        Ok(self.issue(order, 0, losses))
    }

    /// Issues the ticket of work that a user function enqueued without the order lock, even if the device has been lost
    /// since.
    pub(crate) fn ticket_after_work(&self, count: u64, losses: u64) -> Ticket {
        assert_may_wake();
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        if self.0.losses.has_upstream_work.load(Ordering::Relaxed) {
            order.note_losses(&self.0.losses);
        }
        if let Some(meter) = &mut order.meter {
            meter.enqueued_by_user();
        }
        self.issue(order, count, losses)
    }

    #[inline]
    fn issue(&self, mut order: MutexGuard<'_, Order>, count: u64, losses: u64) -> Ticket {
        let inner = &*self.0;
        capture::note_work(self);
        order.issued += 1;
        let number = order.issued;
        if losses < inner.losses.count.load(Ordering::Relaxed) {
            order.taint(number);
        }
        inner.issued.store(number, Ordering::Release);
        let is_armed = inner.streams.fault_watch.is_armed();
        drop(order);
        if is_armed && inner.capture.is_none() {
            inner.streams.work_added();
        }
        if count > 0
            && let Some((backlog, backend)) = inner.driver_stream.backlog()
        {
            backlog.add_enqueued(backend, inner.raw, count);
        }
        Ticket::new(self.clone(), number)
    }

    /// Begins a run: its work is timed.
    pub(crate) fn begin_run(&self, owner: SpanOwner) {
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        let meter = order.meter.get_or_insert_with(|| Meter::new(&self.0.backend));
        let before = meter.begin_run(owner);
        self.0.is_timed.store(true, Ordering::Relaxed);
        drop(order);
        drop(before);
    }

    /// Has the spans of the current run also go to `spans`. False if no run is timed.
    pub(crate) fn add_spans(&self, spans: &OpenSpans) -> bool {
        lock(&self.0.order).meter.as_mut().is_some_and(|meter| meter.add_spans(spans))
    }

    /// Called before work is enqueued that does not go through [`enqueue`](Self::enqueue).
    pub(crate) fn begin_work(&self) {
        let _later = Deferred::new();
        if let Some(meter) = &mut lock(&self.0.order).meter {
            meter.work(self.0.raw);
        }
    }

    /// Called when a task waits for the stream: in a run that is timed, the time from the end of its work to the next
    /// operation is not the device's.
    #[inline]
    pub(super) fn end_span(&self) {
        if self.0.is_timed.load(Ordering::Relaxed) {
            self.end_timed_span();
        }
    }

    #[cold]
    #[inline(never)]
    fn end_timed_span(&self) {
        let _later = Deferred::new();
        if let Some(meter) = &mut lock(&self.0.order).meter {
            meter.wait(self.0.raw);
        }
    }

    pub(crate) fn end_run(&self) {
        let _later = Deferred::new();
        let mut order = lock(&self.0.order);
        let Some(meter) = &mut order.meter else { return };
        let (recorded, owner) = meter.end_run(self.0.raw);
        self.0.is_timed.store(false, Ordering::Relaxed);
        if recorded {
            // A waiter for the stream's last work also waits for its timing event.
            order.issued += 1;
            self.0.issued.store(order.issued, Ordering::Release);
        }
        drop(order);
        drop(owner);
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
