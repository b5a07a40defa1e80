//! [`Kept`]: what one of several workers of an operator sends, until the operator passes it on.

use std::{
    collections::VecDeque,
    fmt,
    ops::{Deref, DerefMut},
    sync::Arc,
    task::Waker,
};

use super::{
    Message,
    baggage::Parcel,
    envelope::RawEnvelope,
    pool::{Pool, Waiter},
    queue::Answer,
    sender::{depart, stamp_of},
};
use crate::{
    error::{Error, Result},
    stream::{Stream, Ticket},
    sync::discard_all,
};

/// A message that has departed, with its stamp, if it does not carry that itself.
pub(crate) type Stamped<M> = (Parcel<M>, Option<Ticket>);

/// Those of them that were not passed on yet.
pub(crate) struct Backlog<M: Message>(VecDeque<Stamped<M>>);

impl<M: Message> Default for Backlog<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M: Message> Deref for Backlog<M> {
    type Target = VecDeque<Stamped<M>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<M: Message> DerefMut for Backlog<M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// One by one: several may have a destructor that panics.
impl<M: Message> Drop for Backlog<M> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

/// See the module.
pub(crate) struct Kept<M: Message> {
    backlog: Backlog<M>,
    /// The operator's own blank envelopes, or why there are none.
    blanks: std::result::Result<Arc<Pool>, Error>,
    /// While it waits for one of them.
    waiter: Option<Waiter>,
}

impl<M: Message> Kept<M> {
    pub(crate) fn new(blanks: std::result::Result<Arc<Pool>, Error>) -> Self {
        Self { backlog: Backlog::default(), blanks, waiter: None }
    }

    /// Keeps what lies in `place`.
    pub(super) fn send(&mut self, place: &mut Option<Parcel<M>>, origin: Option<&Stream>) -> Result<()> {
        let Some(parcel) = place else { return Ok(()) };
        let stamped = depart(&mut parcel.message, origin)?;
        let stamp = origin.filter(|_| !stamped).map(stamp_of).transpose()?;
        self.backlog.extend(place.take().map(|parcel| (parcel, stamp)));
        Ok(())
    }

    pub(super) fn blank(&self) -> Result<Option<RawEnvelope>> {
        self.blanks.as_ref().map_err(Error::again)?.take()
    }

    pub(super) fn poll_blank(&mut self, waker: &Waker) -> Answer {
        match &self.blanks {
            Ok(blanks) if !blanks.has(1) && !self.waiter.get_or_insert_with(|| blanks.waiter()).poll_home(waker) => {
                Answer::Wait
            }
            _ => Answer::Yes,
        }
    }

    /// It waits for a blank envelope no longer.
    pub(super) fn leave_blanks(&mut self) {
        self.waiter = None;
    }

    /// All that was sent.
    pub(crate) fn take(&mut self) -> Backlog<M> {
        std::mem::take(&mut self.backlog)
    }
}

impl<M: Message> fmt::Debug for Kept<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("messages", &self.backlog.len()).finish()
    }
}
