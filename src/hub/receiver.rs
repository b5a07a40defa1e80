//! [`Receiver`]: the reader's end of a hub.

use std::{fmt, sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{Message, baggage::Parcel, link::HubCore, queue::Answer};
use crate::{
    error::Result,
    mutants::{self, Mutant},
    stream::Ticket,
    sync::{discard, discard_all},
};

/// The reader's end of a hub. Dropping it returns the messages that were never taken.
pub(crate) struct Receiver<M: Message>(Arc<HubCore<M>>);

impl<M: Message> Receiver<M> {
    pub(super) fn new(link: Arc<HubCore<M>>) -> Self {
        Self(link)
    }

    /// Whether there is a message to take.
    #[inline]
    pub(crate) fn poll_message(&self, waker: &Waker) -> Answer {
        if self.0.failed.get().is_some() {
            return Answer::Yes;
        }
        self.kept(match self.0.queue.poll_message(waker) {
            // Checked again: the hub may have failed before the waker was registered.
            Answer::Wait if self.0.failed.get().is_some() => Answer::Yes,
            Answer::Wait if mutants::is(Mutant::EndTooSoon) && self.0.queue.writer_gone() => Answer::Never,
            other => other,
        })
    }

    /// A latest-value hub stays readable after its writer has closed.
    #[inline]
    fn kept(&self, answer: Answer) -> Answer {
        if answer == Answer::Never && self.reads_again() && !self.has_ended() { Answer::Yes } else { answer }
    }

    /// Like `poll_message`, for a reader that waits for something else and polls again after that.
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

    /// Whether there are `count` messages to take: `Never` once the writer has closed with fewer than that, unless
    /// some are still being copied.
    pub(crate) fn poll_messages(&self, count: usize, waker: &Waker) -> Answer {
        // A hub that keeps the latest message ends when that is no longer kept.
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

    /// Since when the first message has waited, if that is recorded.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.0.times?;
        self.0.queue.peek_locked(0, |parcel| parcel.baggage.as_ref().and_then(|baggage| baggage.since)).flatten()
    }

    /// Whether there is a message that was not read before. For a hub whose newest message is read repeatedly.
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        let link = &*self.0;
        match &link.again {
            None => self.poll_message(waker),
            Some(_) => link.queue.poll_new(waker),
        }
    }

    /// Takes the first message, if it is ready, into `place`, and returns its number. `again`: for a hub that keeps
    /// the newest, also a message that was read before.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<Parcel<M>>, again: bool) -> Option<u64> {
        let link = &*self.0;
        match &link.again {
            None => link.queue.take(place),
            Some(kept) if again || link.queue.unread() > 0 => link.queue.read(place, |parcel| parcel.copied(kept.copy)),
            Some(_) => None,
        }
    }

    /// Whether the hub may drop messages that are ready to be taken.
    pub(crate) fn is_lossy(&self) -> bool {
        self.0.queue.is_lossy()
    }

    /// Whether the newest message is read repeatedly.
    pub(crate) fn reads_again(&self) -> bool {
        self.0.again.is_some()
    }

    /// Reserves the ready messages for this reader, so that none of them is dropped. Returns their number.
    pub(crate) fn hold(&self) -> usize {
        self.0.queue.hold()
    }

    /// Ends the reservation of messages that were held and not taken.
    pub(crate) fn release_unneeded(&self) {
        for (number, old) in self.0.queue.release_unneeded() {
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

    /// Registers the waker for the next change.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.0.queue.keep_reader(waker);
    }

    /// Calls `look` without the lock on the message at `at`, with its number, if it can be taken.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(u64, &mut M) -> R) -> Option<R> {
        self.0.queue.peek(at, |number, parcel| look(number, &mut parcel.message))
    }

    /// Drops the first message, and counts it as untaken.
    pub(crate) fn discard(&self) {
        self.0.queue.discard(&mut None);
    }

    /// Recounts this number of taken messages as untaken, because they were not used.
    pub(crate) fn leave(&self, messages: u64) {
        self.0.queue.leave(messages);
    }

    /// The stamp of the taken message of this number. Call it once per message.
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

    /// Like `stamp`, without the stamps that envelopes carry themselves.
    pub(crate) fn stamp_beside(&self, number: u64) -> Option<Ticket> {
        self.0.stamps.take(number, self.reads_again())
    }

    /// The stamp of the message of this number, which is still in the queue.
    pub(crate) fn stamp_of(&self, number: u64) -> Option<Ticket> {
        self.0.stamps.look(number)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.queue.ready()
    }

    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Whether there is no unread message, and none will be added.
    pub(crate) fn is_over(&self) -> bool {
        self.0.queue.has_ended()
    }

    /// Whether nothing can be taken, and nothing will be added.
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
