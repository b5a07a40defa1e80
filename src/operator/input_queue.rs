//! [`InputQueue`]: the receiving end of a hub in an input, with what the input requires of a message.
//!
//! If the hub may drop messages, the messages that a run needs are promised and reserved: a poll promises messages to the
//! next run, and the run's claim reserves them until they are taken or [released](InputQueue::release).

use std::{
    fmt,
    task::{Context, Waker},
};

use tokio::time::Instant;

use crate::{
    condition::{Counted, MessageRequirement, Readiness, ReadyPrefix},
    error::Result,
    hub::{
        Message, build,
        end_waker::Interest,
        ends::{Receiver, Sender},
        parcel::Parcel,
    },
    sync::{DiscardOnDrop, discard},
};

/// A worker's connection: both ends of a private hub, which the operator's dispatcher sends to.
pub(super) type WorkerEnd<M> = (Sender<M>, Receiver<M>);

/// The messages of one connection.
pub struct InputQueue<M: Message> {
    receiver: Receiver<M>,
    /// For a worker: the end through which the dispatcher sends the worker's messages.
    feed: Option<Sender<M>>,
    /// Present if the port waits for more than a message's arrival.
    ready_prefix: Option<Box<ReadyPrefix>>,
    /// The hub may drop promised messages that are not reserved.
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
    pub(super) fn new(receiver: Receiver<M>, wanted: MessageRequirement) -> Self {
        let ready_prefix = ReadyPrefix::new(wanted);
        // In a latest-value hub a newer message may replace the promised one: the run takes the newer one.
        let lossy = receiver.is_lossy() && (ready_prefix.is_some() || !receiver.keeps_latest());
        Self {
            receiver,
            feed: None,
            ready_prefix,
            lossy,
            promised: 0,
            last: 0,
            #[cfg(debug_assertions)]
            failed_at: None,
        }
    }

    /// The queue of a worker.
    pub(super) fn of_worker((feed, receiver): WorkerEnd<M>, wanted: MessageRequirement) -> Self {
        Self { feed: Some(feed), ..Self::new(receiver, wanted) }
    }

    /// Creates an end for a worker.
    pub(super) fn worker_end(&self) -> WorkerEnd<M> {
        build::private(self.hub())
    }

    /// Creates an end that has this one message.
    pub(super) fn end_with(&self, message: M) -> Result<Receiver<M>> {
        let (mut sender, receiver) = self.worker_end();
        sender.forward(Parcel::new(message, None))?;
        Ok(receiver)
    }

    /// For the next run: ready if a message can be taken, or an error returned.
    #[inline]
    pub(super) fn poll(&mut self, interest: Interest, cx: &mut Context<'_>) -> Readiness {
        if self.lossy || self.ready_prefix.is_some() {
            return self.poll_one(cx);
        }
        self.receiver.poll(1, interest, cx.waker()).into()
    }

    fn poll_one(&mut self, cx: &mut Context<'_>) -> Readiness {
        self.release();
        self.poll_promised(1, cx).of_one()
    }

    /// Like [`poll_count`](Self::poll_count), and promises up to `most` of the available messages to the next run.
    pub(super) fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let counted = self.poll_count(most, cx);
        if self.lossy {
            self.promised = self.promised.max(counted.ready.min(most));
        }
        counted
    }

    /// Revokes all promises, and releases messages that were reserved for the last run and not taken. Called when a wait
    /// for a run begins or is dropped.
    pub(super) fn release(&mut self) {
        if self.lossy {
            self.promised = 0;
            self.receiver.release_reserved();
        }
    }

    /// Counts the messages that can be taken, up to `most`. Registers the waker, and changes nothing else: it promises
    /// nothing to a run, and a run in progress keeps its reserved messages.
    pub(super) fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        let mut counted = match &mut self.ready_prefix {
            None => loop {
                let more = Readiness::from(self.receiver.poll(most, Interest::Change, cx.waker()));
                let ready = self.receiver.len();
                // Otherwise some were dropped between the two calls, in favour of others that are in transit.
                if ready >= most || !more.is_ready() || self.receiver.check().is_err() {
                    break Counted::new(ready, more);
                }
            },
            Some(prefix) => prefix.poll_count(&self.receiver, most, cx),
        };
        if self.keeps_latest() {
            counted = self.count_latest(counted);
        }
        counted
    }

    /// For a latest-value hub: whether the value is available only because it is kept, and whether it is still kept.
    #[cold]
    fn count_latest(&mut self, counted: Counted) -> Counted {
        if self.receiver.check().is_err() || !self.is_over() {
            return Counted { has_queue: false, ..counted };
        }
        if self.has_ended() {
            // The recorded device state belongs to a message that is not read any more.
            self.ready_prefix.iter_mut().for_each(|prefix| prefix.forget());
            return Counted::NONE;
        }
        // Another value becomes ready only if none is ready yet: one that a device still works on.
        let more = if counted.ready > 0 { Readiness::NEVER } else { counted.more };
        Counted { ready: counted.ready, more, already_read: counted.ready, has_queue: false }
    }

    /// The time since which the first message has waited, if the hub records it.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.receiver.oldest()
    }

    /// Ready if there is a message that was not taken before. Also called in the middle of a run: see
    /// [`poll_count`](Self::poll_count).
    pub(super) fn poll_new(&mut self, cx: &mut Context<'_>) -> Readiness {
        if self.keeps_latest() {
            let new = Readiness::from(self.receiver.poll_new(cx.waker()));
            if !new.is_ready() {
                return new;
            }
        }
        self.poll_count(1, cx).of_one()
    }

    /// Reserves the promised messages, as a run begins. False if they are no longer available.
    #[inline]
    pub(super) fn claim(&mut self) -> bool {
        self.promised == 0 || self.claim_promised()
    }

    #[cold]
    fn claim_promised(&mut self) -> bool {
        let succeeds = self.reserve(self.promised);
        #[cfg(debug_assertions)]
        self.note_claim(succeeds);
        succeeds
    }

    #[cold]
    fn reserve(&mut self, count: usize) -> bool {
        let reserved = self.receiver.reserve_ready();
        let available = match &mut self.ready_prefix {
            None => reserved >= count,
            Some(prefix) => prefix.has(&self.receiver, count),
        };
        available || self.receiver.check().is_err()
    }

    /// A claim can fail only if the hub has changed since the promise. If it fails again without a change, it would fail
    /// for ever, and its operator would wake itself for ever. This panics instead, within the operator's task.
    #[cfg(debug_assertions)]
    fn note_claim(&mut self, succeeds: bool) {
        let now = (!succeeds).then(|| self.receiver.version());
        assert!(
            now.is_none() || now != self.failed_at,
            "internal error: hub `{}` promised {} messages to a run, but the claim failed twice although nothing has \
             changed in the hub (please report)",
            self.hub(),
            self.promised
        );
        self.failed_at = now;
    }

    /// True if `take` returns a message, or an error.
    pub(super) fn has_message(&mut self) -> bool {
        match &mut self.ready_prefix {
            None => self.receiver.len() > 0,
            Some(_) if self.lossy => self.reserve(1),
            Some(prefix) => prefix.has(&self.receiver, 1),
        }
    }

    /// Takes the next message, if there is one, into `place`. `reread`: also the newest one of a latest-value hub, even
    /// if it was taken before.
    #[inline]
    pub(super) fn take(&mut self, place: &mut Option<Parcel<M>>, reread: bool) -> Result<()> {
        let taken = match self.ready_prefix {
            None => {
                self.receiver.check()?;
                self.receiver.take(place, reread)
            }
            Some(_) => self.take_ready(place, reread)?,
        };
        self.last = taken.unwrap_or(self.last);
        Ok(())
    }

    #[inline(never)]
    fn take_ready(&mut self, place: &mut Option<Parcel<M>>, reread: bool) -> Result<Option<u64>> {
        let Some(prefix) = &mut self.ready_prefix else { return Ok(None) };
        if self.lossy {
            self.receiver.reserve_ready();
        }
        let taken = prefix.take(&self.receiver, place, reread);
        if self.promised == 0 {
            self.release();
        }
        taken
    }

    /// Drops all messages, after a call of `dropped` for each.
    pub(super) fn clear(&mut self, mut dropped: impl FnMut(&M)) {
        let mut taken = DiscardOnDrop::none();
        let place = taken.place();
        while self.receiver.take(place, false).is_some() {
            if let Some(parcel) = place {
                dropped(&parcel.message);
            }
            discard(place.take());
        }
        if let Some(prefix) = &mut self.ready_prefix {
            prefix.forget();
        }
    }

    /// The size in bytes of the first message, if there is one.
    pub(super) fn first_bytes(&self) -> Option<usize> {
        self.receiver.peek(0, |parcel| parcel.message.size_in_bytes())
    }

    /// The number of the last message taken.
    #[inline]
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Puts a message into the queue of a worker.
    pub(super) fn feed(&mut self, parcel: Parcel<M>) -> Result<()> {
        self.feed.as_mut().map_or(Ok(()), |feed| feed.forward(parcel))
    }

    /// Recounts this number of taken messages as untaken.
    pub(super) fn count_untaken(&self, messages: u64) {
        self.receiver.recount_untaken(messages);
    }

    /// The number of messages that are known to be ready to be taken.
    pub(super) fn len(&self) -> usize {
        match &self.ready_prefix {
            None => self.receiver.len(),
            Some(prefix) => prefix.len(&self.receiver),
        }
    }

    /// The most that a batch takes from here: the messages that are queued when it begins. At least one, which may be
    /// an error to return, or the newest message of a latest-value hub.
    pub(super) fn batch_limit(&self) -> usize {
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
    pub(super) fn keeps_latest(&self) -> bool {
        self.receiver.keeps_latest()
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
        self.receiver.hub_name()
    }

    /// Why no message can be taken.
    pub(super) fn describe_wait(&self) -> String {
        let which = if self.ready_prefix.is_some() { "no ready message" } else { "no message" };
        format!("{which} in hub `{}`", self.hub())
    }

    /// Stops waiting for devices, until it is polled again.
    pub(super) fn idle(&mut self) {
        if let Some(prefix) = &mut self.ready_prefix {
            prefix.stop_waiting();
        }
    }
}

impl<M: Message> fmt::Debug for InputQueue<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputQueue")
            .field("receiver", &self.receiver)
            .field("ready_prefix", &self.ready_prefix)
            .finish()
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    /// A queue with a promise that is never renewed, and its sender.
    fn promised(messages: usize) -> (Sender<u64>, InputQueue<u64>) {
        let (sender, receiver) = build::private("any");
        let queue =
            InputQueue { lossy: true, promised: messages, ..InputQueue::new(receiver, MessageRequirement::default()) };
        (sender, queue)
    }

    #[test]
    #[should_panic(expected = "internal error: hub `any` promised 1 messages to a run, but the claim failed twice")]
    fn a_claim_that_fails_twice_without_a_change_panics() {
        let (_sender, mut queue) = promised(1);
        assert!(!queue.claim());
        let _ = queue.claim();
    }

    #[test]
    fn a_claim_that_fails_again_after_a_change_is_accepted() {
        let (mut sender, mut queue) = promised(3);
        assert!(!queue.claim());
        for claimed in [false, false, true, true] {
            sender.forward(Parcel::new(1, None)).unwrap();
            assert_eq!(queue.claim(), claimed);
        }
    }
}
