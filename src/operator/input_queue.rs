//! [`InputQueue`]: the receiving end of a hub in an input, with what the input requires of a message.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::time::Instant;

use super::{
    operator_streams::TakenTickets, plan::Binder, ports::Traffic, run_context::RunContext, status_cell::InRun,
};
use crate::{
    condition::{Alarm, Counted, Need, Readiness, ReadyPrefix, Wanted, after},
    error::Result,
    hub::{Message, build, header::Parcel, receiver::Receiver, sender::Sender, waking::Interest},
    stream::Ticket,
    sync::{Discarded, discard, discard_all},
};

/// The messages of one connection.
pub(super) struct InputQueue<M: Message> {
    receiver: Receiver<M>,
    /// For a port that requires more of a message than its arrival.
    front: Option<Box<ReadyPrefix>>,
    /// The hub may drop messages that were promised, unless they are held.
    lossy: bool,
    /// The number of messages of a lossy hub that are promised to the next run, or to the current one. Set only by
    /// [`poll_promised`](Self::poll_promised), and void once the next wait begins.
    promised: usize,
    /// The number of the last message taken.
    last: u64,
    /// The state of the hub at the last claim that failed.
    #[cfg(debug_assertions)]
    failed_at: Option<crate::hub::queue::Version>,
}

impl<M: Message> InputQueue<M> {
    pub(super) fn new(receiver: Receiver<M>, wanted: Wanted) -> Self {
        let front = ReadyPrefix::new(wanted);
        // In a latest-value hub the newest message may be replaced by a newer one, which serves as well.
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

    /// For the next run: is there a message that may be taken, or an error to return?
    #[inline]
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.lossy || self.front.is_some() {
            return self.poll_one(cx);
        }
        self.receiver.poll(1, Interest::Change, cx.waker()).into()
    }

    fn poll_one(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.release();
        self.poll_promised(1, cx).of_one()
    }

    /// As [`poll_count`](Self::poll_count), for the next run: up to `most` of the available messages are promised to
    /// it.
    pub(super) fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let counted = self.poll_count(most, cx);
        if self.lossy {
            self.promised = self.promised.max(counted.ready.min(most));
        }
        counted
    }

    /// A wait for a run begins or is dropped: nothing is promised any more, and messages that the last run held and did
    /// not take are returned to the hub.
    pub(super) fn release(&mut self) {
        if self.lossy {
            self.promised = 0;
            self.receiver.release_unneeded();
        }
    }

    /// How many messages may be taken, up to `most`? Registers the waker, and changes nothing else: it promises nothing
    /// to a run, and a run in progress keeps what it holds.
    pub(super) fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let mut counted = match &mut self.front {
            None => loop {
                let more = Readiness::from(self.receiver.poll(most, Interest::Change, cx.waker()));
                let ready = self.receiver.len();
                // Otherwise some were dropped between the two calls, in favour of others that are in transit.
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

    /// For a latest-value hub: whether the value is available only because it is kept, and whether it is still kept.
    #[cold]
    fn kept(&mut self, counted: Counted) -> Counted {
        if self.receiver.check().is_err() || !self.is_over() {
            return Counted { once: false, ..counted };
        }
        if self.has_ended() {
            // The recorded device state belongs to a message that is not read any more.
            self.front.iter_mut().for_each(|front| front.forget());
            return Counted::NONE;
        }
        // Another value becomes ready only if none is ready yet: one that a device still works on.
        let more = if counted.ready > 0 { Readiness::NEVER } else { counted.more };
        Counted { ready: counted.ready, more, kept: counted.ready, once: false }
    }

    /// The time since which the first message has waited, if the hub records it.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.receiver.oldest()
    }

    /// As `poll`, for an operator that waits for something else: it is woken for the end, and polls again after the
    /// other event.
    #[inline]
    pub(super) fn look(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.lossy || self.front.is_some() {
            return self.poll_one(cx);
        }
        self.receiver.poll(1, Interest::Close, cx.waker()).into()
    }

    /// Is there a message that was not taken before? Also called in the middle of a run: see
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

    /// A run begins: the promised messages are available, and stay so. False if they are not available any more.
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

    /// A claim that fails finds its hub changed since the promise. One that fails again without a change would fail for
    /// ever, and its operator would wake itself for ever; this panics then, within the operator's task.
    #[cfg(debug_assertions)]
    fn note_claim(&mut self, holds: bool) {
        let now = (!holds).then(|| self.receiver.version());
        assert!(
            now.is_none() || now != self.failed_at,
            "internal error: a run was promised messages of hub `{}`, {} of them, and its claim fails again although \
             nothing has changed there (please report)",
            self.hub(),
            self.promised
        );
        self.failed_at = now;
    }

    /// Does `take` return a message, or an error?
    pub(super) fn has_one(&mut self) -> bool {
        match &mut self.front {
            None => self.receiver.len() > 0,
            Some(_) if self.lossy => self.hold(1),
            Some(front) => front.has(&self.receiver, 1),
        }
    }

    /// Takes the next message, if there is one, into `place`. `again`: also the newest one of a latest-value hub, even
    /// if it was taken before.
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
            self.release();
        }
        taken
    }

    /// Drops the messages that a worker's run has left, and returns their traffic.
    pub(super) fn leave(&mut self) -> Traffic {
        let mut left = Traffic::default();
        let mut held = Discarded::none();
        let place = held.place();
        while self.receiver.take(place, false).is_some() {
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

    /// The size in bytes of the first message, if there is one.
    pub(super) fn first_bytes(&self) -> Option<usize> {
        self.receiver.peek(0, |parcel| parcel.message.size_in_bytes())
    }

    /// The number of messages that are known to be ready to be taken.
    pub(super) fn len(&self) -> usize {
        match &self.front {
            None => self.receiver.len(),
            Some(front) => front.len(&self.receiver),
        }
    }

    /// The most that a batch takes from here: the messages that are queued when it begins. At least one, which may be
    /// an error to return, or the newest message of a latest-value hub.
    pub(super) fn most_to_take(&self) -> usize {
        self.receiver.len().max(1)
    }

    /// Registers the waker for the next change.
    pub(super) fn watch(&self, waker: &Waker) {
        self.receiver.watch(waker);
    }

    /// The error of a failed transfer, if any.
    pub(super) fn check(&self) -> Result<()> {
        self.receiver.check()
    }

    /// Whether the newest message is taken again and again.
    pub(super) fn reads_again(&self) -> bool {
        self.receiver.reads_again()
    }

    /// True if there is no message that was not taken before, and none will arrive.
    pub(super) fn is_over(&self) -> bool {
        self.receiver.is_over()
    }

    /// True if no message can be taken and none will arrive.
    pub(super) fn has_ended(&self) -> bool {
        self.receiver.has_ended()
    }

    pub(super) fn hub(&self) -> &str {
        self.receiver.hub()
    }

    /// Why no message can be taken.
    pub(super) fn lacks(&self) -> String {
        let which = if self.front.is_some() { "no message that may be taken yet" } else { "no message" };
        format!("{which} in hub `{}`", self.hub())
    }

    /// Stops waiting for devices, until it is polled again.
    pub(super) fn rest(&mut self) {
        if let Some(front) = &mut self.front {
            front.rest();
        }
    }
}

impl<M: Message> fmt::Debug for InputQueue<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputQueue").field("receiver", &self.receiver).field("front", &self.front).finish()
    }
}

/// What an input has taken, from any of its connections.
#[derive(Debug)]
pub(super) struct Intake<M: 'static> {
    /// `traffic`: all that was taken. Of that, `again` had been taken before, and `left` was left by workers.
    traffic: Traffic,
    again: Traffic,
    left: Traffic,
    tickets: TakenTickets,
    context: Arc<RunContext>,
    /// The messages of [`take_all`](Self::take_all); kept for its capacity.
    taken: Taken<M>,
}

/// Messages that were taken together. They are dropped one by one, since several may have a destructor that panics.
#[derive(Debug)]
struct Taken<M: 'static>(Vec<M>);

/// The result of [`take_all`](Intake::take_all).
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
        let (tickets, context) = (TakenTickets::new(binder.streams.clone()), binder.context.clone());
        Self {
            traffic: Traffic::default(),
            again: Traffic::default(),
            left: Traffic::default(),
            tickets,
            context,
            taken: Taken(Vec::new()),
        }
    }

    #[inline]
    pub(super) fn begin(&mut self) {
        self.tickets.begin(self.traffic.messages);
    }

    /// Called when the operator begins to wait for the next message.
    #[inline]
    pub(super) fn release_unneeded(&self) {
        self.context.release_between_runs();
    }

    /// A wait for a message, perhaps in the middle of a run: true if there is one, false if none will arrive.
    pub(super) fn poll_received(
        &self,
        task: &mut Context<'_>,
        ask: impl FnOnce(&mut Context<'_>) -> Readiness,
    ) -> Poll<bool> {
        self.context.poll_port(InRun::RECEIVES, task, |task| match ask(task) {
            Readiness::READY => Ok(true),
            Readiness::NEVER => Ok(false),
            _ if self.context.node().take_release() => Ok(false),
            asked => Err(asked),
        })
    }

    /// Takes the next message, if there is one, counts it and notes its ticket. `again`: also the newest one of a
    /// latest-value hub, even if it was taken before.
    #[inline]
    pub(super) fn take(&mut self, from: &mut InputQueue<M>, again: bool) -> Result<Option<M>> {
        let mut place = Discarded::none();
        self.take_into(place.place(), from, again)?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// As `take`, into `place`, where the message stays together with its used baggage.
    #[inline]
    pub(super) fn take_into(
        &mut self,
        place: &mut Option<Parcel<M>>,
        from: &mut InputQueue<M>,
        again: bool,
    ) -> Result<()> {
        let before = from.last;
        from.take(place, again)?;
        let Some(Parcel { message, header }) = place else { return Ok(()) };
        self.traffic.count(message);
        if from.last == before {
            self.again.count(message);
        }
        if let Some(ticket) = header.ticket.take() {
            self.tickets.note(message, ticket, self.traffic.messages)?;
        }
        self.context.receive(header.baggage.take())
    }

    /// Takes the messages that `next` returns, until it returns none; those that the caller does not use are dropped.
    pub(super) fn take_all(&mut self, mut next: impl FnMut(&mut Self) -> Result<Option<M>>) -> Result<Batch<'_, M>> {
        // One by one also on an error or a panic.
        let mut taken = std::mem::replace(&mut self.taken, Taken(Vec::new()));
        while let Some(message) = next(self)? {
            taken.0.push(message);
        }
        self.taken = taken;
        Ok(Batch(self.taken.0.drain(..)))
    }

    /// Takes the next message, if there is one, in the operator's place: its metadata goes to `context`.
    pub(super) fn take_for(&mut self, from: &mut InputQueue<M>, context: &RunContext) -> Result<Option<M>> {
        let mut place = Discarded::none();
        from.take(place.place(), false)?;
        let Some(Parcel { message, header }) = place.get_mut() else { return Ok(None) };
        self.traffic.count(message);
        context.gather(header.baggage.take().map(|baggage| baggage.load))?;
        Ok(place.take().map(|parcel| parcel.message))
    }

    /// Passes the next message to a worker, with its header. False if there is none.
    pub(super) fn hand_over(&mut self, from: &mut InputQueue<M>, inlet: &mut Inlet<M>, again: bool) -> Result<bool> {
        let (mut place, before) = (Discarded::none(), from.last);
        from.take(place.place(), again)?;
        let Some(parcel) = place.get_mut() else { return Ok(false) };
        self.traffic.count(&parcel.message);
        if from.last == before {
            self.again.count(&parcel.message);
        }
        place.take().map_or(Ok(()), |parcel| inlet.0.hand_on(parcel))?;
        Ok(true)
    }

    /// Accounts for messages that workers have left of those passed to them.
    pub(super) fn left(&mut self, from: &InputQueue<M>, left: Traffic) {
        // The newest message of a latest-value hub remains available for the next run.
        if !from.reads_again() {
            self.left.messages += left.messages;
            self.left.bytes = self.left.bytes.saturating_add(left.bytes);
            from.receiver.leave(left.messages);
        }
    }

    /// Counts each message once, however often it was taken, and none that workers have left.
    pub(super) fn traffic(&self) -> Traffic {
        self.traffic.without(self.again).without(self.left)
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = Option<&Ticket>> {
        self.tickets.all(self.traffic.messages)
    }
}

/// What an input waits for, if that is not one message.
#[derive(Debug)]
pub(super) struct Waits {
    need: Need,
    /// Another condition waits for its messages, and this one does not.
    off: bool,
    alarm: Option<Box<Alarm>>,
    /// The last result, and the deadline of its wait for a batch.
    asked: Readiness,
    due: Option<Instant>,
}

impl Waits {
    /// `None` if the port waits for one message.
    pub(super) fn new(need: Need, off: bool) -> Option<Box<Self>> {
        (off || !need.is_default())
            .then(|| Box::new(Self { need, off, alarm: None, asked: Readiness::READY, due: None }))
    }

    pub(super) fn poll<M: Message>(&mut self, connections: &mut [InputQueue<M>], cx: &mut Context<'_>) -> Readiness {
        if self.off || self.need.optional {
            for connection in connections {
                connection.release();
                // This notifies latest-value hubs of the operator's other inputs of the end of these hubs.
                if connection.reads_again() {
                    let _ = connection.has_ended();
                }
            }
            return Readiness::READY;
        }
        connections.iter_mut().for_each(InputQueue::release);
        let counted = poll_promised(connections, self.need.asks(), cx);
        self.asked = self.need.readiness(counted, || oldest(connections), &mut self.alarm, cx);
        let waits = self.need.within.filter(|_| self.asked == Readiness::WAIT_TIME);
        self.due = waits.and_then(|within| Some(after(oldest(connections)?, within)));
        self.asked
    }

    /// The deadline of its wait for a batch.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) fn lacks(&self) -> Option<String> {
        (!self.asked.is_ready()).then(|| self.need.describe())
    }

    /// The number of messages that are promised to a run: all that are available, if no number was set.
    pub(super) fn batch(&self) -> usize {
        let Need { least, within, .. } = self.need;
        if least > 1 || within.is_some() { least } else { usize::MAX }
    }

    pub(super) fn rest(&mut self) {
        self.alarm = None;
    }
}

/// The sender with which a dispatcher passes the messages of one connection to a worker.
pub(super) struct Inlet<M: Message>(Sender<M>);

impl<M: Message> Inlet<M> {
    pub(super) fn put(&mut self, message: M) -> Result<()> {
        self.0.hand_on(Parcel::new(message, None))
    }
}

impl<M: Message> InputQueue<M> {
    /// Creates a worker's end, and the inlet for its messages.
    pub(super) fn spread(&self) -> (Receiver<M>, Inlet<M>) {
        let (sender, receiver) = build::private(self.receiver.hub());
        (receiver, Inlet(sender))
    }
}

/// Over all connections of one port. All are polled, so that each keeps the waker.
pub(super) fn poll_count<M: Message>(connections: &mut [InputQueue<M>], most: usize, cx: &mut Context<'_>) -> Counted {
    of_all(connections, |connection| connection.poll_count(most, cx))
}

/// As [`poll_count`], for the next run.
pub(super) fn poll_promised<M: Message>(
    connections: &mut [InputQueue<M>],
    most: usize,
    cx: &mut Context<'_>,
) -> Counted {
    of_all(connections, |connection| connection.poll_promised(most, cx))
}

fn of_all<M: Message>(
    connections: &mut [InputQueue<M>],
    mut ask: impl FnMut(&mut InputQueue<M>) -> Counted,
) -> Counted {
    Counted::of_all(|| connections.iter_mut().map(&mut ask).fold(Counted::NONE, Counted::and))
}

/// Whether these connections of one port have messages that allow the operator's runs for as long as it takes none of
/// them. This is a query only: see [`InputQueue::poll_count`].
#[cold]
pub(super) fn allows_runs<M: Message>(
    connections: &mut [InputQueue<M>],
    waits: Option<&Waits>,
    cx: &mut Context<'_>,
) -> bool {
    let need = waits.map_or_else(Need::default, |waits| waits.need);
    // The newest message of a latest-value hub is available whether it is taken or not.
    if need.optional || connections.iter().any(InputQueue::reads_again) {
        return false;
    }
    let counted = poll_count(connections, need.asks(), cx);
    need.readiness(counted, || None, &mut None, cx).is_ready()
}

pub(super) fn oldest<M: Message>(connections: &[InputQueue<M>]) -> Option<Instant> {
    connections.iter().filter_map(InputQueue::oldest).min()
}

/// A wait for messages of these connections; a wait for a device ends with it.
pub(super) struct Wait<'a, M: Message>(pub(super) &'a mut [InputQueue<M>]);

impl<M: Message> Drop for Wait<'_, M> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(InputQueue::rest);
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    /// An input with a promise that is never renewed, and its sender.
    fn promised(messages: usize) -> (Inlet<u64>, InputQueue<u64>) {
        let (sender, receiver) = build::private("any");
        let arrivals = InputQueue { lossy: true, promised: messages, ..InputQueue::new(receiver, Wanted::default()) };
        (Inlet(sender), arrivals)
    }

    #[test]
    #[should_panic(
        expected = "internal error: a run was promised messages of hub `any`, 1 of them, and its claim fails again"
    )]
    fn a_claim_that_fails_twice_without_a_change_panics() {
        let (_inlet, mut arrivals) = promised(1);
        assert!(!arrivals.claim());
        let _ = arrivals.claim();
    }

    #[test]
    fn a_claim_that_fails_again_after_a_change_is_accepted() {
        let (mut inlet, mut arrivals) = promised(3);
        assert!(!arrivals.claim());
        for claimed in [false, false, true, true] {
            inlet.put(1).unwrap();
            assert_eq!(arrivals.claim(), claimed);
        }
    }
}
