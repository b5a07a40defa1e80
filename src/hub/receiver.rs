//! [`Receiver`]: the reader's end of a hub.

use std::{fmt, sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{Message, baggage::Parcel, link::Link, queue::Answer};
use crate::{
    error::Result,
    mutants::{self, Mutant},
    stream::Ticket,
    sync::{discard, discard_all},
};

/// The reader's end. Dropping it hands back what was never taken.
pub(crate) struct Receiver<M: Message>(Arc<Link<M>>);

impl<M: Message> Receiver<M> {
    pub(super) fn new(link: Arc<Link<M>>) -> Self {
        Self(link)
    }

    /// A message to take?
    #[inline]
    pub(crate) fn poll_message(&self, waker: &Waker) -> Answer {
        if self.0.failed.get().is_some() {
            return Answer::Yes;
        }
        self.kept(match self.0.queue.poll_message(waker) {
            // Asked again: it may have failed before the waker was kept.
            Answer::Wait if self.0.failed.get().is_some() => Answer::Yes,
            Answer::Wait if mutants::is(Mutant::EndTooSoon) && self.0.queue.writer_gone() => Answer::Never,
            other => other,
        })
    }

    /// The latest that is kept may be read when no newer one will come.
    #[inline]
    fn kept(&self, answer: Answer) -> Answer {
        if answer == Answer::Never && self.reads_again() && !self.has_ended() { Answer::Yes } else { answer }
    }

    /// As `poll_message`, of a reader that waits for something else and asks again after that.
    #[inline]
    pub(crate) fn look_for_message(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        if link.failed.get().is_some() {
            return Answer::Yes;
        }
        self.kept(match link.queue.look_for_message(waker) {
            // As in `poll_message`.
            Answer::Wait if link.failed.get().is_some() => Answer::Yes,
            other => other,
        })
    }

    /// So many messages to take? If not, why not; once the writer is gone there are no more than are there, and what is
    /// still on its way comes first.
    pub(crate) fn poll_messages(&self, count: usize, waker: &Waker) -> Answer {
        // A hub that keeps the latest ends when that is kept no longer.
        if count <= 1 || self.reads_again() && self.has_ended() {
            return self.poll_message(waker);
        }
        let queue = &self.0.queue;
        let asked = || {
            if self.0.failed.get().is_some() || queue.ready() >= count {
                Answer::Yes
            } else if queue.writer_gone() && queue.len() < count && queue.len() == queue.ready() {
                Answer::Never
            } else {
                Answer::Wait
            }
        };
        if asked() != Answer::Wait {
            return asked();
        }
        queue.keep_reader(waker);
        asked()
    }

    /// Since when the first message has waited, if that is written down.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.0.times?;
        self.0.queue.peek_locked(0, |parcel| parcel.baggage.as_ref().and_then(|baggage| baggage.since)).flatten()
    }

    /// A message that was not read before? Of a hub whose newest is read again.
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        match &link.again {
            None => self.poll_message(waker),
            Some(_) => link.queue.poll_new(waker),
        }
    }

    /// Takes the first message, if it is there, into `place`; and its number. `again`: also one that was read before, of a
    /// hub that keeps the newest.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<Parcel<M>>, again: bool) -> Option<u64> {
        let link = &*self.0;
        match &link.again {
            None => link.queue.take(place),
            Some(kept) if again || link.queue.unread() > 0 => link.queue.read(place, |parcel| parcel.copied(kept.copy)),
            Some(_) => None,
        }
    }

    /// What can be taken may be dropped by the hub.
    pub(crate) fn is_lossy(&self) -> bool {
        self.0.queue.is_lossy()
    }

    /// The newest is read again and again.
    pub(crate) fn reads_again(&self) -> bool {
        self.0.again.is_some()
    }

    /// Makes what can be taken this reader's own, so that none of it is dropped. How many these are.
    pub(crate) fn hold(&self) -> usize {
        self.0.queue.hold()
    }

    /// What was held and not taken is the hub's again.
    pub(crate) fn let_go(&self) {
        for (number, old) in self.0.queue.let_go() {
            self.0.stamps.forget(number);
            discard(old);
        }
    }

    /// See [`Queue::version`](super::queue::Queue::version).
    #[cfg(debug_assertions)]
    pub(crate) fn version(&self) -> super::queue::Version {
        self.0.queue.version()
    }

    /// The number of the first message.
    pub(crate) fn first(&self) -> Option<u64> {
        self.0.queue.first()
    }

    /// Keeps the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.0.queue.keep_reader(waker);
    }

    /// Shows the message at `at` and its number, if it can be taken. It runs without the lock.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(u64, &mut M) -> R) -> Option<R> {
        self.0.queue.peek(at, |number, parcel| look(number, &mut parcel.message))
    }

    /// Drops the first message, which is of no use to anybody, and counts it as one that nobody took.
    pub(crate) fn discard(&self) {
        self.0.queue.discard(&mut None);
    }

    /// So many of those that were taken are of no use to anybody: nobody took them.
    pub(crate) fn leave(&self, messages: u64) {
        self.0.queue.leave(messages);
    }

    /// The stamp of the message of this number, which was taken. Asked once.
    #[inline]
    pub(crate) fn stamp(&self, message: &mut M, number: u64) -> Option<Ticket> {
        let mut last: Option<Ticket> = None;
        if M::CARRIES_ENVELOPES {
            message.envelopes(&mut |envelope| {
                let stamp = envelope.take_stamp();
                if last.as_ref().is_none_or(|last| stamp.as_ref().is_some_and(|stamp| stamp.number() > last.number())) {
                    last = stamp;
                }
            });
        }
        last.or_else(|| self.0.stamps.take(number, self.reads_again()))
    }

    /// As `stamp`, without those that envelopes carry themselves.
    pub(crate) fn stamp_beside(&self, number: u64) -> Option<Ticket> {
        self.0.stamps.take(number, self.reads_again())
    }

    /// The stamp of the message of this number, which is still in the queue.
    pub(crate) fn stamp_of(&self, number: u64) -> Option<Ticket> {
        self.0.stamps.look(number)
    }

    /// Messages that can be taken now.
    pub(crate) fn len(&self) -> usize {
        self.0.queue.ready()
    }

    /// What went wrong on the way, if something did.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// True if nothing can be taken that was not taken before, and nothing will come.
    pub(crate) fn is_over(&self) -> bool {
        self.0.queue.has_ended()
    }

    /// True if nothing can be taken and nothing will come.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    pub(crate) fn hub(&self) -> &str {
        &self.0.name
    }
}

impl<M: Message> Drop for Receiver<M> {
    fn drop(&mut self) {
        discard_all(self.0.queue.close_reader());
    }
}

impl<M: Message> fmt::Debug for Receiver<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
