//! Tainted work: work that was enqueued after work of another device that was then lost, before the loss was known.
//!
//! When a device is lost, waits for its work on other devices end as if the work were done. Work that is enqueued
//! behind such a wait runs, but its results are invalid. So a stream records which devices it is ordered after, and
//! since which ticket:
//!
//! ```text
//!   wait for A ──> upstream: A, from this ticket ──┬── after the wait, A is queried and has not faulted: forgotten
//!                                                  └── A is lost, and the stream notes it: the tickets from then until
//!                                                      now are tainted, for good; later ones are not
//! ```
//!
//! Tickets are tainted, not streams. Work enqueued after the loss is noted is tainted only by what it reads, and it is
//! enqueued nevertheless: in a flow, the error is reported to the consumer of its result. So losses are noted first,
//! then the last writes of the memory that is read are checked, then the work is enqueued. If any thread notes a loss
//! in between, or one of those writes is tainted (which counts as a loss), the new ticket is tainted, too.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::{
    Stream, Streams, Ticket,
    order::{Order, Upstream},
};
use crate::{
    device::{Device, backend::RawStream},
    error::{Error, Result},
    mutants::{self, Mutant},
    sync::{Deferred, discard, lock},
};

impl Stream {
    /// True if the stream has waited for another device whose work is not yet known to be valid.
    pub(crate) fn has_upstream(&self) -> bool {
        self.0.losses.has_upstream_work.load(Ordering::Acquire)
    }

    /// Notes the upstream devices that are known to be lost, so that they do not taint later work. Returns the number
    /// of losses noted so far.
    #[inline]
    pub(super) fn note_losses(&self) -> u64 {
        if self.0.losses.has_upstream_work.load(Ordering::Acquire) {
            self.note_losses_now();
        }
        self.0.losses.count.load(Ordering::Acquire)
    }

    #[cold]
    fn note_losses_now(&self) {
        let _later = Deferred::new();
        lock(&self.0.order).note_losses(&self.0.losses);
    }

    /// True if the stream is ordered after work of another device that is lost or may yet turn out to be lost.
    #[inline]
    pub(super) fn may_be_tainted_by(&self) -> bool {
        self.0.losses.has_upstream_work.load(Ordering::Acquire) || self.0.losses.count.load(Ordering::Acquire) > 0
    }

    /// Fails if a ticket of this stream is known to be tainted. Queries no device.
    #[cold]
    fn check_known_taint(&self, number: u64) -> Result<()> {
        // The device stays in the order: no handle is dropped here, where locks may be held.
        lock(&self.0.order).tainted_by(number).map_or(Ok(()), Device::check)
    }

    #[cold]
    fn is_tainted(&self, number: u64) -> bool {
        lock(&self.0.order).tainted_by(number).is_some()
    }

    /// Fails if a ticket of this stream is tainted. Work that is ordered after another device's work is invalid if that
    /// device faulted: the wait ended, but the other work did not complete. So the upstream devices are queried before
    /// the ticket is reported as done.
    #[inline]
    pub(super) fn check_taint(&self, number: u64) -> Result<()> {
        if self.may_be_tainted_by() { self.query_upstream(number) } else { Ok(()) }
    }

    #[cold]
    fn query_upstream(&self, number: u64) -> Result<()> {
        if mutants::is(Mutant::FaultUnheard) {
            return Ok(());
        }
        // Read before the devices are queried: a ticket that has passed by then is either tainted or never will be.
        let passed = self.0.completion.passed();
        let order = lock(&self.0.order);
        // Both lists are read under one lock: a loss that is noted moves from one to the other.
        order.tainted_by(number).map_or(Ok(()), Device::check)?;
        let upstream = order.upstream.clone();
        drop(order);
        let (mut sound, mut healthy) = (Ok(()), SmallVec::<[&Upstream; 4]>::new());
        for queried in &upstream {
            let device = &queried.device;
            let answer = device.check().and_then(|()| {
                Streams::of(device).observe(device.backend().stream_query(RawStream::DEFAULT)).map(drop)
            });
            match answer {
                Ok(()) => healthy.push(queried),
                Err(error) if queried.from <= number && sound.is_ok() => sound = Err(error),
                Err(_) => {}
            }
        }
        if !healthy.is_empty() {
            let mut order = lock(&self.0.order);
            // Entries that were added since stay.
            let is_healthy = |known: &Upstream| {
                let is_same = |queried: &&Upstream| queried.device == known.device && queried.from == known.from;
                known.until <= passed && healthy.iter().any(is_same)
            };
            // The copies are dropped below, so no last handle is dropped here.
            order.upstream.retain(|known| !is_healthy(known));
            if order.upstream.is_empty() {
                self.0.losses.has_upstream_work.store(false, Ordering::Release);
            }
        }
        drop(healthy);
        discard(upstream);
        sound
    }

    /// Called when work that is being prepared reads data that `ticket` wrote, and [`wait_to_read`](Self::wait_to_read)
    /// got an error. The new work is tainted if `ticket` is known to be tainted, or if it completed on a device that
    /// has been lost since, unless its memory `outlives` the loss. Otherwise returns the error.
    #[cold]
    pub(super) fn read_tainted(&self, ticket: &Ticket, outlives: bool, error: Error) -> Result<()> {
        let (inner, other) = (&*self.0, &*ticket.stream().0);
        let _later = Deferred::new();
        let mut lost = lock(&other.order).tainted_by(ticket.number()).cloned();
        if lost.is_none() && ticket.has_passed() && other.device.is_lost() && other.device != inner.device {
            if outlives && ticket.is_settled() {
                return Ok(());
            }
            lost = Some(other.device.clone());
        }
        let Some(device) = lost else { return Err(error) };
        let mut order = lock(&inner.order);
        let next = order.issued + 1;
        order.note_loss(&inner.losses, next, device);
        drop(order);
        self.wait_until_over(ticket)
    }

    /// Records that work enqueued here from ticket `from` on is ordered after work of other devices, up to a wait with
    /// ticket `until`.
    pub(super) fn order_after(
        &self,
        order: &mut Order,
        upstream: impl Iterator<Item = Device>,
        of: &Device,
        from: u64,
        until: u64,
    ) {
        for device in upstream.chain([of.clone()]) {
            if device == self.0.device {
                continue;
            }
            match order.upstream.iter_mut().find(|upstream| upstream.device == device) {
                Some(known) => known.until = known.until.max(until),
                None => {
                    order.upstream.push(Upstream { device, from, until });
                    self.0.losses.has_upstream_work.store(true, Ordering::Release);
                }
            }
        }
    }

    /// Called when work here reads the result of a ticket of another stream that has passed. No wait is needed, but
    /// this stream is now also ordered after the work on other devices that the ticket was ordered after.
    #[cold]
    pub(super) fn order_after_passed(&self, ticket: &Ticket) -> Result<()> {
        let (inner, other) = (&*self.0, &*ticket.stream().0);
        if inner.device != other.device {
            other.device.check()?;
        }
        let upstream = lock(&other.order).upstream.clone();
        // Checked after the list is read: a loss that was noted in between is found here.
        let known = ticket.check_known_taint();
        if known.is_ok() {
            let before = |upstream: &&Upstream| upstream.from <= ticket.number();
            let devices = upstream.iter().filter(before).map(|upstream| upstream.device.clone());
            let mut order = lock(&inner.order);
            let from = order.issued + 1;
            self.order_after(&mut order, devices, &other.device, from, 0);
        }
        discard(upstream);
        known
    }
}

impl Ticket {
    /// True once nothing is left to query: the ticket has passed, and no other device's fault can have tainted it.
    pub(crate) fn is_settled(&self) -> bool {
        self.has_passed() && !self.stream().has_upstream() && !self.is_tainted()
    }

    /// Like [`is_settled`](Self::is_settled), for work that does not read the data that the ticket wrote: the ticket
    /// has passed and it is known whether it is tainted, or it [has ended](Self::has_ended) with its device.
    pub(crate) fn is_over(&self) -> bool {
        (self.has_passed() && (!self.stream().has_upstream() || self.is_tainted())) || self.has_ended()
    }

    /// True once the ticket's device is lost and no longer runs: the work's results are invalid, and it accesses no
    /// memory.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.stream().device().has_ended()
    }

    /// True if the work no longer accesses memory: the ticket has passed or [has ended](Self::has_ended). Queries only
    /// lost devices.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.has_passed() || self.has_ended()
    }

    /// True if the ticket is known to be tainted.
    #[inline]
    pub(crate) fn is_tainted(&self) -> bool {
        self.stream().may_be_tainted_by() && self.stream().is_tainted(self.number())
    }

    /// Fails if the ticket is known to be tainted by another device's loss. Queries no device.
    #[inline]
    pub(crate) fn check_known_taint(&self) -> Result<()> {
        if self.stream().may_be_tainted_by() { self.stream().check_known_taint(self.number()) } else { Ok(()) }
    }

    /// Fails if the ticket is tainted by another device's fault. Queries the upstream devices.
    pub(crate) fn check_taint(&self) -> Result<()> {
        self.stream().check_taint(self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ErrorKind,
        device::{Emulated, Faults},
        stream::order::MAX_TAINTED_SPANS,
    };

    /// Orders a stream after another device that is then lost, and returns once the host knows of the loss.
    fn come_after_a_loss(stream: &Stream, before_it: impl FnOnce()) {
        let device = Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1)));
        let other = Stream::new(&device).unwrap();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        other.host_function(move || _ = wait.recv()).unwrap();
        let mut data = crate::Buffer::<u8>::new(&device, 8).unwrap();
        other.copy(&crate::Buffer::<u8>::new(&device, 8).unwrap(), &mut data).unwrap();
        stream.wait_for(&other).unwrap();
        before_it();
        drop(go);
        assert!(other.synchronize_blocking().is_err());
    }

    /// Work that was found to read nothing tainted before a loss was known, and is enqueued after another thread has
    /// noted the loss.
    #[test]
    fn work_prepared_while_a_loss_is_noted_is_tainted() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let mut permit = None;
        come_after_a_loss(&stream, || permit = Some(stream.make_room(|| ()).unwrap().0));
        let noted = stream.enqueue_point(|_, _| Ok(())).unwrap();
        let prepared = stream.enqueue(permit.unwrap(), |_, _| Ok(())).unwrap();
        let (permit, ()) = stream.make_room(|| ()).unwrap();
        let next = stream.enqueue(permit, |_, _| Ok(())).unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(prepared.check_taint().is_err() && next.check_taint().is_ok());
        // It is in the same span as the other one, although it reads nothing.
        assert!(noted.check_taint().is_err());
    }

    /// The device is lost while a user function enqueues work, which may still run.
    #[test]
    fn work_enqueued_while_its_device_is_lost_has_a_ticket() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        device.set_lost(Error::new(ErrorKind::DeviceLost, "test"));
        assert!(stream.enqueue_point(|_, _| Ok(())).is_err());
        let ticket = stream.ticket_after_work(1, 0);
        assert!(ticket.number() > 0 && !ticket.has_passed());
    }

    /// A loss becomes known while work is prepared that reads what the same device tainted on another stream: it is
    /// noted for that work first, and then for everything ordered after the device.
    #[test]
    fn a_loss_that_is_noted_twice_taints_earlier_work() {
        let device = Device::emulated(Emulated::new());
        let (stream, beside) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let mut before = None;
        come_after_a_loss(&stream, || {
            let early = stream.enqueue_point(|_, _| Ok(())).unwrap();
            beside.wait_for(&stream).unwrap();
            let read = beside.enqueue_point(|_, _| Ok(())).unwrap();
            before = Some((early, read, stream.make_room(|| ()).unwrap().0));
        });
        let (early, read, permit) = before.unwrap();
        stream.wait_to_read(&read, false).unwrap();
        let prepared = stream.enqueue(permit, |_, _| Ok(())).unwrap();
        let (permit, ()) = stream.make_room(|| ()).unwrap();
        let next = stream.enqueue(permit, |_, _| Ok(())).unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(early.check_taint().is_err() && prepared.check_taint().is_err() && next.check_taint().is_ok());
    }

    /// A stream is ordered after one device after another that is lost: what it keeps of them is bounded.
    #[test]
    fn many_losses_are_kept_in_few_spans() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let mut tainted = Vec::new();
        for round in 0..3 * MAX_TAINTED_SPANS {
            let mut work = None;
            come_after_a_loss(&stream, || work = stream.enqueue_point(|_, _| Ok(())).ok());
            stream.synchronize_blocking().unwrap_err();
            tainted.extend(work);
            let sound = stream.enqueue_point(|_, _| Ok(())).unwrap();
            stream.synchronize_blocking().unwrap();
            assert!(sound.check_taint().is_ok() && sound.is_settled(), "round {round}");
            assert!(
                tainted.iter().all(|ticket| ticket.check_taint().is_err() && !ticket.is_settled() && ticket.is_over())
            );
            let order = lock(&stream.0.order);
            assert!(order.tainted.len() <= MAX_TAINTED_SPANS && order.upstream.is_empty());
        }
    }
}
