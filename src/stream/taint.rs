//! What the loss of another device spoils here: the work that came after its, until the loss was known.
//!
//! A wait for work of a device that is lost ends, on a device that is not, as if that work was done. What is enqueued behind
//! the wait runs, and is worth nothing. So a stream keeps which devices it came after, and since when:
//!
//! ```text
//!   wait for A ──> upstream: A, from this ticket ──┬── A is asked, and has not faulted once the wait is over: forgotten
//!                                                  └── A is lost, and the stream notes it: the tickets from then until now
//!                                                      are spoilt, for good; those that come next are not
//! ```
//!
//! A ticket is spoilt, not a stream. Work that comes after the loss is noted is spoilt only by what it reads, and it is enqueued
//! all the same: in a flow the error is for the one who asks for its result. So the losses are noted first, then the last
//! writes of the memory that is read are checked, then the work is enqueued. If any thread notes a loss in between, or one of
//! those writes is spoilt, which counts as one, the new ticket is spoilt, too.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::{Order, Room, Stream, Streams, Ticket};
use crate::{
    device::{Device, backend::RawStream},
    error::{Error, Result},
    mutants::{self, Mutant},
    sync::{Deferred, discard, lock},
};

/// Another device, which is kept until its work is known to be sound: a fault of it may still come.
#[derive(Clone)]
pub(super) struct Upstream {
    pub(super) device: Device,
    /// The first ticket that came after its work.
    pub(super) from: u64,
    /// If it has not faulted once this ticket has passed, none of that work has.
    pub(super) until: u64,
}

/// Tickets that the loss of another device has spoilt, the first and the last.
pub(super) struct Spoilt {
    from: u64,
    to: u64,
    device: Device,
}

/// With more spans of spoilt tickets than this, the two that are closest to each other become one, with what lies between.
const MOST_SPANS: usize = 256;

/// Leave to enqueue a piece of work, and what was known as it was given.
pub(crate) struct Leave<'a> {
    pub(super) room: Room<'a>,
    /// Losses that the stream had noted.
    pub(crate) losses: u64,
}

impl<'a> Leave<'a> {
    #[inline]
    pub(super) fn new(room: Room<'a>, stream: &Stream) -> Self {
        Self { room, losses: stream.note_losses() }
    }
}

impl Order {
    /// Devices upstream that are known to be lost by now have spoilt what was enqueued since the stream came after them, and
    /// nothing that comes later. Within a [`Deferred`] scope.
    #[cold]
    pub(super) fn note_losses(&mut self, stream: &super::Inner) {
        let mut at = 0;
        while let Some(upstream) = self.upstream.get(at) {
            if !upstream.device.is_lost() {
                at += 1;
                continue;
            }
            let Upstream { device, from, .. } = self.upstream.swap_remove(at);
            self.note_loss(stream, from, device);
        }
        if self.upstream.is_empty() {
            stream.crossed.store(false, Ordering::Release);
        }
    }

    /// What was enqueued from this ticket on is spoilt, and what is prepared now.
    fn note_loss(&mut self, stream: &super::Inner, from: u64, device: Device) {
        match self.spoilt.last_mut() {
            Some(last) if last.device == device && last.to + 1 >= from => {
                // What is prepared may have noted the loss first, for itself alone.
                (last.from, last.to) = (last.from.min(from), last.to.max(self.issued));
            }
            _ => self.spoilt.push(Spoilt { from, to: self.issued, device }),
        }
        if self.spoilt.len() > MOST_SPANS {
            let gaps = self.spoilt.windows(2).map(|two| two[1].from.saturating_sub(two[0].to));
            let closest = gaps.enumerate().min_by_key(|(_, gap)| *gap).map_or(0, |(at, _)| at);
            let earlier = self.spoilt.remove(closest);
            if let Some(later) = self.spoilt.get_mut(closest) {
                (later.from, later.to) = (later.from.min(earlier.from), later.to.max(earlier.to));
            }
        }
        // Before `crossed`, which is looked at first.
        stream.losses.fetch_add(1, Ordering::Release);
    }

    /// A loss was noted while this work was prepared.
    #[cold]
    pub(super) fn spoil(&mut self, number: u64) {
        if let Some(last) = self.spoilt.last_mut() {
            last.to = last.to.max(number);
        }
    }

    /// The lost device that has spoilt a ticket, as far as that is known.
    fn spoilt_by(&self, number: u64) -> Option<&Device> {
        if mutants::is(Mutant::FaultUnheard) {
            return None;
        }
        let noted = self.spoilt.iter().find(|span| (span.from..=span.to).contains(&number)).map(|span| &span.device);
        noted.or_else(|| {
            let lost = self.upstream.iter().find(|upstream| upstream.from <= number && upstream.device.is_lost());
            lost.map(|upstream| &upstream.device)
        })
    }
}

impl Stream {
    /// Notes the devices upstream that are known to be lost by now: what is enqueued from here on they do not spoil. How many
    /// there ever were.
    #[inline]
    pub(super) fn note_losses(&self) -> u64 {
        if self.0.crossed.load(Ordering::Acquire) {
            self.note_losses_now();
        }
        self.0.losses.load(Ordering::Acquire)
    }

    #[cold]
    fn note_losses_now(&self) {
        let _later = Deferred::new();
        lock(&self.0.order).note_losses(&self.0);
    }

    /// Whether it came after another device's work that may yet turn out to be lost, or has.
    #[inline]
    pub(super) fn is_doubtful(&self) -> bool {
        self.0.crossed.load(Ordering::Acquire) || self.0.losses.load(Ordering::Acquire) > 0
    }

    /// The error of the lost device that has spoilt a ticket of this stream. Asks no device.
    #[cold]
    fn check_spoilt(&self, number: u64) -> Result<()> {
        // The device stays in the order: no handle is dropped here, where locks may be held.
        lock(&self.0.order).spoilt_by(number).map_or(Ok(()), Device::check)
    }

    #[cold]
    fn is_spoilt(&self, number: u64) -> bool {
        lock(&self.0.order).spoilt_by(number).is_some()
    }

    /// Work that came after another device's is worth nothing if that device faulted: the wait for it then ended, but
    /// not the work. So before it is called done, those devices are asked.
    #[inline]
    pub(super) fn sound(&self, number: u64) -> Result<()> {
        if self.is_doubtful() { self.ask_upstream(number) } else { Ok(()) }
    }

    #[cold]
    fn ask_upstream(&self, number: u64) -> Result<()> {
        if mutants::is(Mutant::FaultUnheard) {
            return Ok(());
        }
        // Before the devices are asked: by then what has passed is spoilt, or never will be.
        let passed = self.0.completion.passed();
        let order = lock(&self.0.order);
        // With one look at both: a loss that is noted goes from one to the other.
        order.spoilt_by(number).map_or(Ok(()), Device::check)?;
        let upstream = order.upstream.clone();
        drop(order);
        let (mut sound, mut well) = (Ok(()), SmallVec::<[&Upstream; 4]>::new());
        for asked in &upstream {
            let device = &asked.device;
            let answer = device
                .check()
                .and_then(|()| Streams::of(device).heed(device.backend().stream_query(RawStream::DEFAULT)).map(drop));
            match answer {
                Ok(()) => well.push(asked),
                Err(error) if asked.from <= number && sound.is_ok() => sound = Err(error),
                Err(_) => {}
            }
        }
        if !well.is_empty() {
            let mut order = lock(&self.0.order);
            // Not what the stream has come after since then.
            let is_well = |known: &Upstream| {
                let is_same = |asked: &&Upstream| asked.device == known.device && asked.from == known.from;
                known.until <= passed && well.iter().any(is_same)
            };
            // The copies are dropped below: none of them is the last here.
            order.upstream.retain(|known| !is_well(known));
            if order.upstream.is_empty() {
                self.0.crossed.store(false, Ordering::Release);
            }
        }
        drop(well);
        discard(upstream);
        sound
    }

    /// Work that is prepared here reads what a ticket has written, and may not: it is spoilt if that is known to be spoilt, or if
    /// it was done on a device that was lost since, unless it [outlives](Self::wait_to_read) that. Otherwise this is the error.
    #[cold]
    pub(super) fn read_spoilt(&self, ticket: &Ticket, outlives: bool, error: Error) -> Result<()> {
        let (inner, other) = (&*self.0, &*ticket.stream().0);
        let _later = Deferred::new();
        let mut lost = lock(&other.order).spoilt_by(ticket.number()).cloned();
        if lost.is_none() && ticket.has_passed() && other.device.is_lost() && other.device != inner.device {
            if outlives && ticket.is_settled() {
                return Ok(());
            }
            lost = Some(other.device.clone());
        }
        let Some(device) = lost else { return Err(error) };
        let mut order = lock(&inner.order);
        let next = order.issued + 1;
        order.note_loss(inner, next, device);
        drop(order);
        self.wait_until_over(ticket)
    }

    /// What is enqueued here from now on came after work of other devices.
    pub(super) fn come_after(
        &self,
        order: &mut Order,
        upstream: impl Iterator<Item = Device>,
        of: &Device,
        wait: Wait,
    ) {
        let (from, until) = match wait {
            Wait::Enqueued => (order.issued, order.issued),
            Wait::NotNeeded => (order.issued + 1, 0),
        };
        for device in upstream.chain([of.clone()]) {
            if device == self.0.device {
                continue;
            }
            match order.upstream.iter_mut().find(|upstream| upstream.device == device) {
                Some(known) => known.until = known.until.max(until),
                None => {
                    order.upstream.push(Upstream { device, from, until });
                    self.0.crossed.store(true, Ordering::Release);
                }
            }
        }
    }

    /// A ticket of another stream has passed, whose work is read here. There is nothing to wait for; but what that came after,
    /// on other devices, this stream now comes after, too.
    #[cold]
    pub(super) fn come_after_passed(&self, ticket: &Ticket) -> Result<()> {
        let (inner, other) = (&*self.0, &*ticket.stream().0);
        if inner.device != other.device {
            other.device.check()?;
        }
        let upstream = lock(&other.order).upstream.clone();
        // After that: one that was noted as lost meanwhile is found here.
        let known = ticket.check_known();
        if known.is_ok() {
            let before = |upstream: &&Upstream| upstream.from <= ticket.number();
            let devices = upstream.iter().filter(before).map(|upstream| upstream.device.clone());
            self.come_after(&mut lock(&inner.order), devices, &other.device, Wait::NotNeeded);
        }
        discard(upstream);
        known
    }
}

/// How a stream comes after a ticket.
pub(super) enum Wait {
    /// The device waits for it: that is the stream's last ticket.
    Enqueued,
    /// It has passed.
    NotNeeded,
}

impl Ticket {
    /// True once nothing more need be asked: it has passed, and no other device's fault can have spoilt it.
    pub(crate) fn is_settled(&self) -> bool {
        self.has_passed() && !self.stream().has_crossed() && !self.is_spoilt()
    }

    /// The same for work that reads nothing that it wrote: it has passed, and whether it is spoilt is known; or it
    /// [has ended](Self::has_ended) with its device.
    pub(crate) fn is_over(&self) -> bool {
        (self.has_passed() && (!self.stream().has_crossed() || self.is_spoilt())) || self.has_ended()
    }

    /// True once its device is lost and runs nothing any more: what it did is worth nothing, and it touches no memory.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        self.stream().device().has_ended()
    }

    /// True if it touches no memory any more: it has passed, or [has ended](Self::has_ended). Asks no device that is not lost.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.has_passed() || self.has_ended()
    }

    /// Whether that is known.
    #[inline]
    pub(crate) fn is_spoilt(&self) -> bool {
        self.stream().is_doubtful() && self.stream().is_spoilt(self.number())
    }

    /// An error if what was done here is worth nothing, since another device that it came after is known to be lost. Asks no
    /// device.
    #[inline]
    pub(crate) fn check_known(&self) -> Result<()> {
        if self.stream().is_doubtful() { self.stream().check_spoilt(self.number()) } else { Ok(()) }
    }

    /// An error if what was done here is worth nothing, since another device that it came after has faulted: those are asked.
    pub(crate) fn sound(&self) -> Result<()> {
        self.stream().sound(self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ErrorKind,
        device::{Emulated, Faults},
    };

    /// Makes a stream come after another device that is then lost, and returns once the host knows of that.
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

    /// Work that was found to read nothing spoilt before a loss was known is enqueued after another thread has noted that.
    #[test]
    fn work_that_is_prepared_as_a_loss_is_noted_is_spoilt() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let mut leave = None;
        come_after_a_loss(&stream, || leave = Some(stream.make_room(|| ()).unwrap().0));
        let noted = stream.enqueue_point(|_, _| Ok(())).unwrap();
        let prepared = stream.enqueue(leave.unwrap(), |_, _| Ok(())).unwrap();
        let (leave, ()) = stream.make_room(|| ()).unwrap();
        let next = stream.enqueue(leave, |_, _| Ok(())).unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(prepared.sound().is_err() && next.sound().is_ok());
        // In the span with the other one, though it reads nothing.
        assert!(noted.sound().is_err());
    }

    /// The device is lost while a function of the user's puts work in, which may still run.
    #[test]
    fn work_that_is_there_as_its_device_is_lost_has_a_ticket() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        device.set_lost(Error::new(ErrorKind::DeviceLost, "test"));
        assert!(stream.enqueue_point(|_, _| Ok(())).is_err());
        let ticket = stream.ticket_after_work(1, 0);
        assert!(ticket.number() > 0 && !ticket.has_passed());
    }

    /// A loss becomes known while work is prepared that reads what the same device spoilt on another stream: it is noted for that
    /// work first, and then for all that came after the device.
    #[test]
    fn a_loss_that_is_noted_twice_spoils_what_came_before() {
        let device = Device::emulated(Emulated::new());
        let (stream, beside) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
        let mut before = None;
        come_after_a_loss(&stream, || {
            let early = stream.enqueue_point(|_, _| Ok(())).unwrap();
            beside.wait_for(&stream).unwrap();
            let read = beside.enqueue_point(|_, _| Ok(())).unwrap();
            before = Some((early, read, stream.make_room(|| ()).unwrap().0));
        });
        let (early, read, leave) = before.unwrap();
        stream.wait_to_read(&read, false).unwrap();
        let prepared = stream.enqueue(leave, |_, _| Ok(())).unwrap();
        let (leave, ()) = stream.make_room(|| ()).unwrap();
        let next = stream.enqueue(leave, |_, _| Ok(())).unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(early.sound().is_err() && prepared.sound().is_err() && next.sound().is_ok());
    }

    /// A stream comes after one device after another that is lost: what it keeps of them is bounded.
    #[test]
    fn many_losses_are_kept_in_few_spans() {
        let stream = Stream::new(&Device::emulated(Emulated::new())).unwrap();
        let mut spoilt = Vec::new();
        for round in 0..3 * MOST_SPANS {
            let mut work = None;
            come_after_a_loss(&stream, || work = stream.enqueue_point(|_, _| Ok(())).ok());
            stream.synchronize_blocking().unwrap_err();
            spoilt.extend(work);
            let sound = stream.enqueue_point(|_, _| Ok(())).unwrap();
            stream.synchronize_blocking().unwrap();
            assert!(sound.sound().is_ok() && sound.is_settled(), "round {round}");
            assert!(spoilt.iter().all(|ticket| ticket.sound().is_err() && !ticket.is_settled() && ticket.is_over()));
            let order = lock(&stream.0.order);
            assert!(order.spoilt.len() <= MOST_SPANS && order.upstream.is_empty());
        }
    }
}
