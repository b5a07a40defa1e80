//! Order between streams: work on one stream waits, on the device, for work on other streams.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::{Event, Stream, Ticket, capture};
use crate::{
    device::{Device, WeakDevice},
    error::{Error, ErrorKind, Result},
    mutants::{self, Mutant},
    sync::{Deferred, assert_may_wake, lock},
};

/// With more upstream devices than this, a wait removes those that are no longer needed.
const MANY_UPSTREAM: usize = 16;

impl Stream {
    /// Work enqueued here from now on waits, on the device, for all work that was enqueued into `other` before this
    /// call.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the two devices have different backends; [`DeviceLost`](ErrorKind::DeviceLost)
    /// after a fault, or if the last work of `other` is ordered after work of a device that has been lost.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        self.wait(&other.ticket())
    }

    /// Work enqueued here from now on waits, on the device, for each of these points: for a [`Stream`], all work that
    /// was enqueued before this call; for a [`Ticket`], no later work. `None` and points of this stream itself are
    /// skipped. The default stream is joined only if it is listed (see [`Stream::default_of`]).
    ///
    /// Work on buffers and envelopes is ordered without this call.
    ///
    /// ```
    /// use wakeline::{Stream, device::{Device, Emulated}};
    ///
    /// let device = Device::emulated(Emulated::new());
    /// let [main, left, right] = [Stream::new(&device)?, Stream::new(&device)?, Stream::new(&device)?];
    /// main.join([&left, &right])?;
    /// main.join([Some(left.ticket()), None])?;
    /// main.join([Stream::default_of(&device)?])?;
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Usage`](crate::ErrorKind::Usage) if a device has a different backend;
    /// [`DeviceLost`](crate::ErrorKind::DeviceLost) after a fault. The points before the failing one have been joined.
    pub fn join<P: Point>(&self, points: impl IntoIterator<Item = P>) -> Result<()> {
        points.into_iter().filter_map(|point| point.ticket()).try_for_each(|ticket| self.wait(&ticket))
    }

    /// Orders work enqueued from now on after `ticket`, so that it can read the data that the ticket's work wrote.
    /// Makes no call to the device if the order is already implied. Fails if the ticket is known to be tainted by the
    /// loss of another device.
    #[inline]
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.wait_and(ticket, true)
    }

    /// Like [`wait`](Self::wait), for work that is being prepared, where `ticket` may belong to this stream. A ticket
    /// that is known to be tainted is no error, but taints the new work. `outlives` is true if the memory that the
    /// ticket's work wrote survives the loss of the ticket's device.
    #[inline]
    pub(crate) fn wait_to_read(&self, ticket: &Ticket, outlives: bool) -> Result<()> {
        let waited = if self.is(ticket.stream()) { ticket.check_known_taint() } else { self.wait_and(ticket, true) };
        waited.or_else(|error| self.read_tainted(ticket, outlives, error))
    }

    /// Like [`wait`](Self::wait), for work that does not read the data that the ticket's work wrote: whether the ticket
    /// is tainted does not matter.
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
            ticket.check_known_taint()?;
        }
        if ticket.has_passed() {
            // Checked again: a loss may have been noted since.
            let may_be_tainted = inner.device != other.device || ticket.stream().may_be_tainted_by();
            return if reads && may_be_tainted { self.order_after_passed(ticket) } else { Ok(()) };
        }
        if !reads && ticket.has_ended() {
            return Ok(());
        }
        if (inner.capture.is_some() || other.capture.is_some()) && !capture::share_capture(self, ticket, reads)? {
            return Ok(());
        }
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        if order.clock.reached(other.id) >= ticket.number() {
            // The stream has waited for this ticket before. If the ticket's device is lost, work enqueued since then is
            // tainted, and so is the data that would be read now.
            return if reads && inner.device != other.device { other.device.check() } else { Ok(()) };
        }
        if !inner.device.copies_with(&other.device) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "a stream on {} cannot wait for work on {}: the devices have different backends",
                    inner.device, other.device
                ),
            ));
        }
        let late;
        let mark = match ticket.marked() {
            Some(mark) => mark,
            None => {
                // Acquires one order lock after the other, never both.
                drop(order);
                late = ticket.stream().mark_for_wait(ticket.number())?;
                order = lock(&inner.order);
                &late
            }
        };
        // Each device is checked once. If a lost device has tainted the ticket, the wait fails. A loss from now on is
        // noted later.
        let mut upstream: SmallVec<[Device; 1]> = mark.upstream.iter().filter_map(WeakDevice::upgrade).collect();
        upstream.retain(|device| !device.is_lost());
        if reads && upstream.len() < mark.upstream.len() {
            drop(order);
            ticket.check_known_taint()?;
            order = lock(&inner.order);
        }
        inner.device.check()?;
        other.device.check()?;
        if let Some(meter) = &mut order.meter {
            meter.wait(inner.raw);
        }
        let done = inner.backend.stream_wait(inner.raw, mark.event);
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
        // A wait has a ticket, too: work that is ordered after this stream from now on is also ordered after `ticket`.
        order.issued += 1;
        inner.issued.store(order.issued, Ordering::Release);
        let issued = order.issued;
        self.order_after(&mut order, upstream.into_iter(), &other.device, issued, issued);
        let are_many = order.upstream.len() > MANY_UPSTREAM && inner.capture.is_none();
        drop(order);
        if are_many {
            // Waiters get the errors, so they are ignored here.
            let mut last = self.ticket();
            let _ = last.query_progress().and_then(|()| last.check_taint());
        }
        Ok(())
    }
}

/// A point in a stream's work: a [`Ticket`], the record of an [`Event`], the current end of a [`Stream`], a reference
/// to any of these, or `None`.
///
/// Sealed.
pub trait Point: Sealed {
    #[doc(hidden)]
    fn ticket(&self) -> Option<Ticket>;
}

mod sealed {
    #[allow(unreachable_pub, reason = "public in a private module: that is what seals it")]
    pub trait Sealed {}
}
use sealed::Sealed;

impl Sealed for Stream {}
impl Sealed for Ticket {}
impl Sealed for Event {}
impl<P: Sealed> Sealed for &P {}
impl<P: Sealed> Sealed for Option<P> {}

impl Point for Stream {
    fn ticket(&self) -> Option<Ticket> {
        Some(Stream::ticket(self))
    }
}

impl Point for Ticket {
    fn ticket(&self) -> Option<Ticket> {
        Some(self.clone())
    }
}

impl Point for Event {
    fn ticket(&self) -> Option<Ticket> {
        Event::ticket(self)
    }
}

impl<P: Point> Point for &P {
    fn ticket(&self) -> Option<Ticket> {
        (**self).ticket()
    }
}

impl<P: Point> Point for Option<P> {
    fn ticket(&self) -> Option<Ticket> {
        self.as_ref().and_then(Point::ticket)
    }
}
