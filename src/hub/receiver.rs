//! [`Receiver`]: the reader's end of a hub.

use std::{fmt, sync::Arc, task::Waker};

use tokio::time::Instant;

use super::{Message, core::HubCore, header::Parcel, queue::Answer, waking::Interest};
use crate::{
    error::Result,
    mutants::{self, Mutant},
    sync::{discard, discard_all},
};

/// The reader's end of a hub. Dropping it returns the messages that were never taken.
pub(crate) struct Receiver<M: Message>(Arc<HubCore<M>>);

impl<M: Message> Receiver<M> {
    pub(super) fn new(hub: Arc<HubCore<M>>) -> Self {
        Self(hub)
    }

    /// Whether there are `count` messages to take, or the hub has failed. `Never` once the writer has closed with fewer
    /// than that, unless some are still being moved.
    #[inline]
    pub(crate) fn poll(&self, count: usize, interest: Interest, waker: &Waker) -> Answer {
        let hub = &*self.0;
        if hub.has_failed() {
            return Answer::Yes;
        }
        // A hub that keeps the latest message ends when that is no longer kept.
        if count > 1 && !(self.reads_again() && self.has_ended()) {
            return self.poll_several(count, waker);
        }
        let answer = match hub.queue.poll_message(interest, waker) {
            // Checked again: the hub may have failed before the waker was registered.
            Answer::Wait if hub.has_failed() => Answer::Yes,
            Answer::Wait if mutants::is(Mutant::EndTooSoon) && hub.queue.writer_gone() => Answer::Never,
            other => other,
        };
        // A latest-value hub stays readable after its writer has closed.
        if answer == Answer::Never && self.reads_again() && !self.has_ended() { Answer::Yes } else { answer }
    }

    #[inline(never)]
    fn poll_several(&self, count: usize, waker: &Waker) -> Answer {
        let queue = &self.0.queue;
        let ask = || {
            if self.0.has_failed() || queue.ready() >= count {
                Answer::Yes
            } else if queue.writer_gone() && queue.len() < count && queue.len() == queue.ready() {
                Answer::Never
            } else {
                Answer::Wait
            }
        };
        match ask() {
            Answer::Wait => {
                queue.keep_reader(waker);
                ask()
            }
            answer => answer,
        }
    }

    /// Since when the first message has waited, if that is recorded.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.0.times?;
        self.0.queue.peek_locked(0, Parcel::since).flatten()
    }

    /// Whether there is a message that was not read before. For a hub whose newest message is read repeatedly.
    pub(crate) fn poll_new(&self, waker: &Waker) -> Answer {
        let hub = &*self.0;
        match &hub.again {
            None => self.poll(1, Interest::Change, waker),
            Some(_) => hub.queue.poll_new(waker),
        }
    }

    /// Takes the first message, if it is ready, into `place`, and returns its number. `again`: for a hub that keeps
    /// the newest, also a message that was read before.
    #[inline]
    pub(crate) fn take(&self, place: &mut Option<Parcel<M>>, again: bool) -> Option<u64> {
        let hub = &*self.0;
        match &hub.again {
            None => hub.queue.take(place),
            Some(kept) if again || hub.queue.unread() > 0 => {
                hub.queue.read(place, |parcel| parcel.with_message((kept.copy)(&parcel.message)))
            }
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
        self.0.queue.release_unneeded().into_iter().for_each(discard);
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

    /// Calls `look` without the lock on the message at `at`, if it can be taken.
    pub(crate) fn peek<R>(&self, at: usize, look: impl FnOnce(&mut Parcel<M>) -> R) -> Option<R> {
        self.0.queue.peek(at, look)
    }

    /// Drops the first message, and counts it as untaken.
    pub(crate) fn discard(&self) {
        self.0.queue.discard(&mut None);
    }

    /// Recounts this number of taken messages as untaken, because they were not used.
    pub(crate) fn leave(&self, messages: u64) {
        self.0.queue.leave(messages);
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
