//! [`Outbox`]: buffers the messages that a worker of an operator sends, until the operator forwards them.

use std::{
    collections::VecDeque,
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
    task::Waker,
};

use super::{
    Message,
    parcel::Parcel,
    pool::{Pool, RawEnvelope, Waiter},
    queue::Answer,
};
use crate::{
    error::{Error, Result},
    stream::Stream,
    sync::discard_all,
};

/// Messages that have departed.
pub(crate) struct OutboxQueue<M: Message>(VecDeque<Parcel<M>>);

impl<M: Message> Default for OutboxQueue<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M: Message> Deref for OutboxQueue<M> {
    type Target = VecDeque<Parcel<M>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<M: Message> DerefMut for OutboxQueue<M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// Discards them one by one: several might have a destructor that panics.
impl<M: Message> Drop for OutboxQueue<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

/// Buffers what a worker sends. See the [module](self).
pub(crate) struct Outbox<M: Message> {
    backlog: OutboxQueue<M>,
    /// The operator's own blank envelopes, or the reason why there are none.
    blanks: std::result::Result<Arc<Pool>, Error>,
    /// Present while it waits for a blank envelope.
    waiter: Option<Waiter>,
}

impl<M: Message> Outbox<M> {
    pub(crate) fn new(blanks: std::result::Result<Arc<Pool>, Error>) -> Self {
        Self { backlog: OutboxQueue::default(), blanks, waiter: None }
    }

    /// Buffers the message in `place`.
    pub(crate) fn send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        let Some(parcel) = place else { return Ok(()) };
        parcel.depart(origin)?;
        self.backlog.extend(place.take());
        Ok(())
    }

    pub(crate) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.blanks.as_ref().map_err(Error::clone)?.take()
    }

    pub(crate) fn poll_blank(&mut self, waker: &Waker) -> Answer {
        match &self.blanks {
            Ok(blanks) if !blanks.has(1) && !self.waiter.get_or_insert_with(|| blanks.waiter()).poll_free(waker) => {
                Answer::Wait
            }
            _ => Answer::Yes,
        }
    }

    /// Stops waiting for a blank envelope.
    pub(crate) fn leave_blanks(&mut self) {
        self.waiter = None;
    }

    pub(crate) fn take(&mut self) -> OutboxQueue<M> {
        std::mem::take(&mut self.backlog)
    }
}

impl<M: Message> fmt::Debug for Outbox<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("messages", &self.backlog.len()).finish()
    }
}
