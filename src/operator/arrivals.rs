//! [`Arrivals`]: the end of a hub as an input holds it, with what the input waits for beside a message.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{carry::Carry, lane::Stamps, plan::Binder, ports::Traffic, shown::InRun};
use crate::{
    condition::{Alarm, Counted, Front, Need, Readiness, Wanted, after},
    error::Result,
    hub::{Message, baggage::Parcel, link, receiver::Receiver, sender::Sender},
    stream::Ticket,
    sync::{Discarded, discard, discard_all},
};

/// Messages of one connection.
pub(super) struct Arrivals<M: Message> {
    receiver: Receiver<M>,
    /// For a port that waits for more of a message than that it is there.
    front: Option<Box<Front>>,
    /// The hub may drop what was promised, unless it is held.
    lossy: bool,
    /// Messages that the next run, or the present one, is promised of a lossy hub. Made by
    /// [`poll_promised`](Self::poll_promised) alone, and void once the next wait begins.
    promised: usize,
    /// The number of the message that was taken last.
    last: u64,
    /// The state of the hub at the last claim that failed.
    #[cfg(debug_assertions)]
    failed_at: Option<crate::hub::queue::Version>,
}

impl<M: Message> Arrivals<M> {
    pub(super) fn new(receiver: Receiver<M>, wanted: Wanted) -> Self {
        let front = Front::new(wanted);
        // The newest of a hub that keeps it may become a newer one, and that is as good.
        let lossy = receiver.is_lossy() && (front.is_some() || !receiver.reads_again());
        Self {
            receiver,
            front,
            lossy,
            promised: 0,
            last: 0,
            #[cfg(debug_assertions)]
            failed_at: None,
        }
    }

    /// For the next run: is there a message that may be taken, or an error to give?
    #[inline]
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.lossy || self.front.is_some() {
            return self.poll_one(cx);
        }
        self.receiver.poll_message(cx.waker()).into()
    }

    fn poll_one(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.release();
        self.poll_promised(1, cx).of_one()
    }

    /// As [`poll_count`](Self::poll_count), for the next run: up to `most` of the messages that are there are promised to it.
    pub(super) fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let counted = self.poll_count(most, cx);
        if self.lossy {
            self.promised = self.promised.max(counted.ready.min(most));
        }
        counted
    }

    /// A wait for a run begins, or is given up: nothing is promised, and messages that the last run held and did not take are
    /// the hub's again.
    pub(super) fn release(&mut self) {
        if self.lossy {
            self.promised = 0;
            self.receiver.let_go();
        }
    }

    /// How many messages may be taken, asked about `most` of them? Registers the waker, and changes nothing else: no run is
    /// promised anything by it, and a present run keeps what it holds.
    pub(super) fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let mut counted = match &mut self.front {
            None => loop {
                let more = Readiness::from(self.receiver.poll_messages(most, cx.waker()));
                let ready = self.receiver.len();
                // Else some were dropped between the two questions, for others that are on their way.
                if ready >= most || !more.is_ready() || self.receiver.check().is_err() {
                    break Counted::new(ready, more);
                }
            },
            Some(front) => front.poll_count(&self.receiver, most, cx),
        };
        if self.reads_again() {
            counted = self.kept(counted);
        }
        counted
    }

    /// Of a hub that keeps the latest: whether that is there only because it is kept, and whether it is kept any longer.
    #[cold]
    fn kept(&mut self, counted: Counted) -> Counted {
        if self.receiver.check().is_err() || !self.is_over() {
            return Counted { once: false, ..counted };
        }
        if self.has_ended() {
            // What is known of devices is of a message that is not read any more.
            self.front.iter_mut().for_each(|front| front.forget());
            return Counted::NONE;
        }
        // Others come only where none is there yet: one that a device still works on.
        let more = if counted.ready > 0 { Readiness::NEVER } else { counted.more };
        Counted { ready: counted.ready, more, kept: counted.ready, once: false }
    }

    /// Since when the first message has waited, where the hub writes that down.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.receiver.oldest()
    }

    /// As `poll`, where the operator waits for something else: woken for the end, it asks again after that.
    #[inline]
    pub(super) fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.lossy || self.front.is_some() {
            return self.poll_one(cx);
        }
        self.receiver.look_for_message(cx.waker()).into()
    }

    /// Is there a message that was not taken before? Asked in the middle of a run as well: see
    /// [`poll_count`](Self::poll_count).
    pub(super) fn poll_new(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.reads_again() {
            let new = Readiness::from(self.receiver.poll_new(cx.waker()));
            if !new.is_ready() {
                return new;
            }
        }
        self.poll_count(1, cx).of_one()
    }

    /// A run begins: what was promised is there, and stays. False if it is not there any more.
    #[inline]
    pub(super) fn claim(&mut self) -> bool {
        self.promised == 0 || self.claim_promised()
    }

    #[cold]
    fn claim_promised(&mut self) -> bool {
        let holds = self.hold(self.promised);
        #[cfg(debug_assertions)]
        self.note_claim(holds);
        holds
    }

    #[cold]
    fn hold(&mut self, count: usize) -> bool {
        let held = self.receiver.hold();
        let is_there = match &mut self.front {
            None => held >= count,
            Some(front) => front.has(&self.receiver, count),
        };
        is_there || self.receiver.check().is_err()
    }

    /// A claim that fails finds its hub changed since the promise; one that fails again without a change will fail for ever, and
    /// its operator wakes itself for ever. Panics then, within the operator's task.
    #[cfg(debug_assertions)]
    fn note_claim(&mut self, holds: bool) {
        let now = (!holds).then(|| self.receiver.version());
        assert!(
            now.is_none() || now != self.failed_at,
            "internal error: a run is promised messages of hub `{}`, {} of them, and its claim fails again though nothing has \
             changed there (please report)",
            self.hub(),
            self.promised
        );
        self.failed_at = now;
    }

    /// Does `take` give a message, or an error?
    pub(super) fn has_one(&mut self) -> bool {
        match &mut self.front {
            None => self.receiver.len() > 0,
            Some(_) if self.lossy => self.hold(1),
            Some(front) => front.has(&self.receiver, 1),
        }
    }

    /// Takes the next message, if there is one, into `place`. `again`: also the newest that was taken before, of a hub that
    /// keeps it.
    #[inline]
    fn take(&mut self, place: &mut Option<Parcel<M>>, again: bool) -> Result<()> {
        let taken = match self.front {
            None => {
                self.receiver.check()?;
                self.receiver.take(place, again)
            }
            Some(_) => self.take_at_front(place, again)?,
        };
        self.last = taken.unwrap_or(self.last);
        Ok(())
    }

    #[inline(never)]
    fn take_at_front(&mut self, place: &mut Option<Parcel<M>>, again: bool) -> Result<Option<u64>> {
        let Some(front) = &mut self.front else { return Ok(None) };
        if self.lossy {
            self.receiver.hold();
        }
        let taken = front.take(&self.receiver, place, again);
        if self.promised == 0 {
            // Held for this alone.
            self.release();
        }
        taken
    }

    /// Drops what is there, of a worker's run that has ended: what it was.
    pub(super) fn leave(&mut self) -> Traffic {
        let mut left = Traffic::default();
        let mut held = Discarded::none();
        let place = held.place();
        while let Some(number) = self.receiver.take(place, false) {
            let _ = self.receiver.stamp_beside(number);
            if let Some(parcel) = place {
                left.count(&parcel.message);
            }
            discard(place.take());
        }
        if let Some(front) = &mut self.front {
            front.forget();
        }
        left
    }

    /// Bytes of the first message, if there is one.
    pub(super) fn first_bytes(&self) -> Option<usize> {
        self.receiver.peek(0, |_, message| message.size_in_bytes())
    }

    /// The stamp of the message that was taken last. Asked once.
    #[inline]
    fn stamp(&self, message: &mut M) -> Option<Ticket> {
        self.receiver.stamp(message, self.last)
    }

    /// Messages that are known to be such as may be taken.
    pub(super) fn len(&self) -> usize {
        match &self.front {
            None => self.receiver.len(),
            Some(front) => front.len(&self.receiver),
        }
    }

    /// How many messages a batch takes from here at most: those that are in the queue as it begins. At least one, which may
    /// be an error to return, or the newest of a hub that keeps it.
    pub(super) fn most_to_take(&self) -> usize {
        self.receiver.len().max(1)
    }

    /// Keeps the waker for the next change.
    pub(super) fn watch(&self, waker: &Waker) {
        self.receiver.watch(waker);
    }

    /// What went wrong on the way, if something did.
    pub(super) fn check(&self) -> Result<()> {
        self.receiver.check()
    }

    /// The newest is taken again and again.
    pub(super) fn reads_again(&self) -> bool {
        self.receiver.reads_again()
    }

    /// True if nothing can be taken that was not taken before, and nothing will come.
    pub(super) fn is_over(&self) -> bool {
        self.receiver.is_over()
    }

    /// True if nothing can be taken and nothing will come.
    pub(super) fn has_ended(&self) -> bool {
        self.receiver.has_ended()
    }

    pub(super) fn hub(&self) -> &str {
        self.receiver.hub()
    }

    /// Why there is nothing to take.
    pub(super) fn lacks(&self) -> String {
        let which = if self.front.is_some() { "no message that may be taken yet" } else { "no message" };
        format!("{which} in hub `{}`", self.hub())
    }

    /// Waits for no device, until it is polled again.
    pub(super) fn rest(&mut self) {
        if let Some(front) = &mut self.front {
            front.rest();
        }
    }
}

impl<M: Message> fmt::Debug for Arrivals<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrivals").field("receiver", &self.receiver).field("front", &self.front).finish()
    }
}

/// What an input has taken: of whichever of its connections.
#[derive(Debug)]
pub(super) struct Intake<M: 'static> {
    /// All that was taken; and of that what had been taken before, or was left by workers.
    traffic: Traffic,
    again: Traffic,
    left: Traffic,
    stamps: Stamps,
    carry: Arc<Carry>,
    /// What [`take_all`](Self::take_all) gives out; kept for its room.
    taken: Taken<M>,
}

/// Messages that were taken together. They are dropped one by one: several may have a destructor that panics.
#[derive(Debug)]
struct Taken<M: 'static>(Vec<M>);

/// What [`take_all`](Intake::take_all) gives out.
#[derive(Debug)]
pub(super) struct Batch<'a, M: 'static>(std::vec::Drain<'a, M>);

impl<M: 'static> Drop for Taken<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

impl<M: 'static> Drop for Batch<'_, M> {
    fn drop(&mut self) {
        discard_all(self.0.by_ref());
    }
}

impl<M: 'static> Iterator for Batch<'_, M> {
    type Item = M;

    #[inline]
    fn next(&mut self) -> Option<M> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl<M: 'static> ExactSizeIterator for Batch<'_, M> {}

impl<M: Message> Intake<M> {
    pub(super) fn new(binder: &Binder<'_>) -> Self {
        let (stamps, carry) = (Stamps::new(binder.lane.clone()), binder.carry.clone());
        Self {
            traffic: Traffic::default(),
            again: Traffic::default(),
            left: Traffic::default(),
            stamps,
            carry,
            taken: Taken(Vec::new()),
        }
    }

    /// A run begins.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.stamps.begin(self.traffic.messages);
    }

    /// The next message is waited for.
    #[inline]
    pub(super) fn let_go(&self) {
        self.carry.let_go_between_runs();
    }

    /// A wait for a message, which may be one in the middle of a run: true if there is one, false if none will come.
    pub(super) fn poll_received(
        &self,
        task: &mut Context<'_>,
        ask: impl FnOnce(&mut Context<'_>) -> Readiness,
    ) -> Poll<bool> {
        self.carry.poll_port(InRun::RECEIVES, task, |task| match ask(task) {
            Readiness::READY => Ok(true),
            Readiness::NEVER => Ok(false),
            _ if self.carry.node().take_release() => Ok(false),
            asked => Err(asked),
        })
    }

    /// The next message, if there is one: counted, and its stamp noted. `again`: also the newest that was taken before, of
    /// a hub that keeps it.
    #[inline]
    pub(super) fn take(&mut self, from: &mut Arrivals<M>, again: bool) -> Result<Option<M>> {
        let mut place = Discarded::none();
        self.take_into(place.place(), from, again)?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// As `take`, into `place`, where it lies beside what has come with it and is no longer of use.
    #[inline]
    pub(super) fn take_into(
        &mut self,
        place: &mut Option<Parcel<M>>,
        from: &mut Arrivals<M>,
        again: bool,
    ) -> Result<()> {
        let before = from.last;
        from.take(place, again)?;
        let Some(Parcel { message, baggage }) = place else { return Ok(()) };
        self.traffic.count(message);
        if from.last == before {
            self.again.count(message);
        }
        if let Some(stamp) = from.stamp(message) {
            self.stamps.note(message, stamp, self.traffic.messages)?;
        }
        self.carry.receive(baggage.take())
    }

    /// The messages that `next` finds, until it finds none; what of them is not used is dropped.
    pub(super) fn take_all(&mut self, mut next: impl FnMut(&mut Self) -> Result<Option<M>>) -> Result<Batch<'_, M>> {
        // Also on an error or a panic it is dropped one by one.
        let mut taken = std::mem::replace(&mut self.taken, Taken(Vec::new()));
        while let Some(message) = next(self)? {
            taken.0.push(message);
        }
        self.taken = taken;
        Ok(Batch(self.taken.0.drain(..)))
    }

    /// The next message, if there is one, for one who takes it in the operator's place: what it brings along is `carry`'s.
    pub(super) fn take_for(&mut self, from: &mut Arrivals<M>, carry: &Carry) -> Result<Option<M>> {
        let mut place = Discarded::none();
        from.take(place.place(), false)?;
        let Some(Parcel { message, baggage }) = place.get_mut() else { return Ok(None) };
        self.traffic.count(message);
        // Whoever looks for it finds none of a run.
        let _ = from.stamp(message);
        carry.gather(baggage.take().map(|baggage| baggage.load))?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// Puts the next message where a worker finds it, with all that came with it. False if there is none.
    pub(super) fn hand_over(&mut self, from: &mut Arrivals<M>, inlet: &mut Inlet<M>, again: bool) -> Result<bool> {
        let (mut place, before) = (Discarded::none(), from.last);
        from.take(place.place(), again)?;
        let Some(parcel) = place.get_mut() else { return Ok(false) };
        self.traffic.count(&parcel.message);
        if from.last == before {
            self.again.count(&parcel.message);
        }
        let stamp = from.receiver.stamp_beside(from.last);
        place.take().map_or(Ok(()), |parcel| inlet.0.hand_on(parcel, stamp))?;
        Ok(true)
    }

    /// Workers have left so much of what was handed over to them.
    pub(super) fn left(&mut self, from: &Arrivals<M>, left: Traffic) {
        // The newest of a hub that keeps it is there for the next run.
        if !from.reads_again() {
            self.left.messages += left.messages;
            self.left.bytes = self.left.bytes.saturating_add(left.bytes);
            from.receiver.leave(left.messages);
        }
    }

    /// Each message once, however often it was taken, and none that workers have left.
    pub(super) fn traffic(&self) -> Traffic {
        self.traffic.without(self.again).without(self.left)
    }

    /// The streams that this run's messages came from.
    pub(super) fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.stamps.all(self.traffic.messages)
    }
}

/// What an input waits for, where that is not one message.
#[derive(Debug)]
pub(super) struct Waits {
    need: Need,
    /// Something else waits for its messages, and this does not.
    off: bool,
    alarm: Option<Box<Alarm>>,
    /// What it said last, and until when it waits for a batch.
    asked: Readiness,
    due: Option<Instant>,
}

impl Waits {
    /// `None` for one message.
    pub(super) fn new(need: Need, off: bool) -> Option<Box<Self>> {
        (off || !need.is_default())
            .then(|| Box::new(Self { need, off, alarm: None, asked: Readiness::READY, due: None }))
    }

    pub(super) fn poll<M: Message>(&mut self, connections: &mut [Arrivals<M>], cx: &mut Context<'_>) -> Readiness {
        if self.off || self.need.optional {
            for connection in connections {
                connection.release();
                // Hubs that keep the latest for the operator's other inputs learn here that these have ended.
                if connection.reads_again() {
                    let _ = connection.has_ended();
                }
            }
            return Readiness::READY;
        }
        connections.iter_mut().for_each(Arrivals::release);
        let counted = poll_promised(connections, self.need.asks(), cx);
        self.asked = self.need.readiness(counted, || oldest(connections), &mut self.alarm, cx);
        let waits = self.need.within.filter(|_| self.asked == Readiness::WAIT_TIME);
        self.due = waits.and_then(|within| Some(after(oldest(connections)?, within)));
        self.asked
    }

    /// Until when it waits for a batch.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// What it waits for, if that is not there.
    pub(super) fn lacks(&self) -> Option<String> {
        (!self.asked.is_ready()).then(|| self.need.describe())
    }

    /// How many messages a run is promised: all that are there, if no number was said.
    pub(super) fn batch(&self) -> usize {
        let Need { least, within, .. } = self.need;
        if least > 1 || within.is_some() { least } else { usize::MAX }
    }

    pub(super) fn rest(&mut self) {
        self.alarm = None;
    }
}

/// Where a dispatcher puts the messages of one connection for a worker.
pub(super) struct Inlet<M: Message>(Sender<M>);

impl<M: Message> Inlet<M> {
    pub(super) fn put(&mut self, message: M) -> Result<()> {
        self.0.hand_on(Parcel::with(message, None), None)
    }
}

impl<M: Message> Arrivals<M> {
    /// A worker's end, and where its messages are put.
    pub(super) fn spread(&self) -> (Receiver<M>, Inlet<M>) {
        let (sender, receiver) = link::private(self.receiver.hub());
        (receiver, Inlet(sender))
    }
}

/// Of all connections of one port. All are asked, so that each keeps the waker.
pub(super) fn poll_count<M: Message>(connections: &mut [Arrivals<M>], most: usize, cx: &mut Context<'_>) -> Counted {
    of_all(connections, |connection| connection.poll_count(most, cx))
}

/// As [`poll_count`], for the next run.
pub(super) fn poll_promised<M: Message>(connections: &mut [Arrivals<M>], most: usize, cx: &mut Context<'_>) -> Counted {
    of_all(connections, |connection| connection.poll_promised(most, cx))
}

fn of_all<M: Message>(connections: &mut [Arrivals<M>], mut ask: impl FnMut(&mut Arrivals<M>) -> Counted) -> Counted {
    Counted::of_all(|| connections.iter_mut().map(&mut ask).fold(Counted::NONE, Counted::and))
}

/// Messages lie at these connections of one port that allow the operator's runs for as long as it takes none of them. A
/// question: see [`Arrivals::poll_count`].
#[cold]
pub(super) fn allows_runs<M: Message>(
    connections: &mut [Arrivals<M>],
    waits: Option<&Waits>,
    cx: &mut Context<'_>,
) -> bool {
    let need = waits.map_or_else(Need::default, |waits| waits.need);
    // The newest of a hub that keeps it is there whether it is taken or not.
    if need.optional || connections.iter().any(Arrivals::reads_again) {
        return false;
    }
    let counted = poll_count(connections, need.asks(), cx);
    need.readiness(counted, || None, &mut None, cx).is_ready()
}

pub(super) fn oldest<M: Message>(connections: &[Arrivals<M>]) -> Option<Instant> {
    connections.iter().filter_map(Arrivals::oldest).min()
}

/// A wait for messages of these connections; what waits for a device waits no longer than it.
pub(super) struct Wait<'a, M: Message>(pub(super) &'a mut [Arrivals<M>]);

impl<M: Message> Drop for Wait<'_, M> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(Arrivals::rest);
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    /// An input with a promise that is never renewed, and what sends to it.
    fn promised(messages: usize) -> (Inlet<u64>, Arrivals<u64>) {
        let (sender, receiver) = link::private("any");
        let arrivals = Arrivals { lossy: true, promised: messages, ..Arrivals::new(receiver, Wanted::default()) };
        (Inlet(sender), arrivals)
    }

    #[test]
    #[should_panic(
        expected = "internal error: a run is promised messages of hub `any`, 1 of them, and its claim fails again"
    )]
    fn a_claim_that_fails_twice_for_the_same_reason_is_found() {
        let (_inlet, mut arrivals) = promised(1);
        assert!(!arrivals.claim());
        let _ = arrivals.claim();
    }

    #[test]
    fn a_claim_that_fails_again_after_a_change_is_not_taken_for_one() {
        let (mut inlet, mut arrivals) = promised(3);
        assert!(!arrivals.claim());
        for claimed in [false, false, true, true] {
            inlet.put(1).unwrap();
            assert_eq!(arrivals.claim(), claimed);
        }
    }
}
