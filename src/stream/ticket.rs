//! [`Ticket`]: a point in a stream's work.

use std::{fmt, sync::Arc};

use super::{Completed, Stream, mark::Mark};
use crate::error::Result;

/// A point in a stream's work.
#[derive(Clone)]
pub struct Ticket {
    stream: Stream,
    number: u64,
    /// The first mark at or after the ticket, once a wait may need it.
    mark: Option<Arc<Mark>>,
}

impl Ticket {
    #[inline]
    pub(super) fn new(stream: Stream, number: u64) -> Self {
        Self { stream, number, mark: None }
    }

    /// The stream that the ticket belongs to.
    #[inline]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The ticket's number: 1 for the stream's first work, 0 for none.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True once the work is known to be done. Never queries the device: a `true` is certain, a `false` may lag.
    #[inline]
    pub fn has_passed(&self) -> bool {
        self.stream.0.completion.passed() >= self.number
    }

    /// A point of the same stream that never passes: on a lost device it represents all work that may still run.
    pub(crate) fn never(&self) -> Self {
        Self::new(self.stream.clone(), u64::MAX)
    }

    /// The same point without its mark, which can be found through the stream.
    #[inline]
    pub(crate) fn point(&self) -> Self {
        Self::new(self.stream.clone(), self.number)
    }

    #[inline]
    pub(crate) fn advance_to(&mut self, later: &Self) {
        self.number = later.number;
        if self.mark.is_some() || later.mark.is_some() {
            self.mark.clone_from(&later.mark);
        }
    }

    /// Resolves when the work is done. If no stream and no event has waited for the ticket, it may also wait for work
    /// that is enqueued before the first poll; [`Stream::completed`] and an [`Event`](super::Event) mark their point at
    /// once.
    pub fn completed(&self) -> Completed {
        Completed::new(self.clone())
    }

    /// Marks this point now, so that later waits cover no later work, and need no lock of this stream.
    #[inline]
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.mark.is_none() && !self.has_passed() {
            self.mark = Some(self.stream.mark(self.number)?);
        }
        Ok(())
    }

    /// Becomes its stream's current end, marked, if it belongs to `stream` and its mark can be recorded again, having
    /// no other holder. Otherwise returns false and changes nothing. The caller must pass an error to `observe`.
    pub(super) fn move_to_end(&mut self, stream: &Stream) -> Result<bool> {
        let Some(mark) = self.mark.as_mut().filter(|_| self.stream.is(stream)) else { return Ok(false) };
        let moved = stream.move_mark(mark)?;
        if moved {
            self.number = mark.ticket;
        }
        Ok(moved)
    }

    /// Its mark, if it was committed.
    #[inline]
    pub(super) fn marked(&self) -> Option<&Arc<Mark>> {
        self.mark.as_ref()
    }

    /// Queries the device whether the work is done.
    pub(crate) fn look(&mut self) -> Result<bool> {
        if self.has_passed() {
            return Ok(true);
        }
        self.commit()?;
        match &self.mark {
            Some(mark) => self.stream.ask_first(mark),
            None => Ok(true),
        }
    }

    /// Queries the stream's progress up to here, so that earlier tickets are known to have passed, too.
    pub(crate) fn recheck(&mut self) -> Result<()> {
        self.commit()?;
        self.stream.look()
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({} of {:?})", self.number, self.stream.name())
    }
}
