//! [`Ticket`]: a point in a stream's work.

use std::{fmt, sync::Arc};

use super::{Completed, Stream, mark::Mark};
use crate::error::Result;

/// A point in a stream's work.
#[derive(Clone)]
pub struct Ticket {
    stream: Stream,
    number: u64,
    /// Once somebody may wait for it: the first mark at or after it.
    mark: Option<Arc<Mark>>,
}

impl Ticket {
    #[inline]
    pub(super) fn new(stream: Stream, number: u64) -> Self {
        Self { stream, number, mark: None }
    }

    /// The stream it is a ticket of.
    #[inline]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its number: 1 for the stream's first work, 0 for none.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True once it is known that the work is done. It never asks the device: a `true` is certain, a `false` may lag.
    #[inline]
    pub fn has_passed(&self) -> bool {
        self.stream.0.completion.passed() >= self.number
    }

    /// A point of the same stream that never passes: of a device that is lost it stands for all work that may still run.
    pub(crate) fn never(&self) -> Self {
        Self::new(self.stream.clone(), u64::MAX)
    }

    /// The same point, without its mark: whoever needs that finds it with the stream.
    #[inline]
    pub(crate) fn point(&self) -> Self {
        Self::new(self.stream.clone(), self.number)
    }

    /// Becomes a later point of its stream.
    #[inline]
    pub(crate) fn advance_to(&mut self, later: &Self) {
        self.number = later.number;
        if self.mark.is_some() || later.mark.is_some() {
            self.mark.clone_from(&later.mark);
        }
    }

    /// Resolves when the work is done. A ticket that no stream and no event has waited for may wait for what is enqueued until the
    /// future is first polled, too; [`Stream::completed`] and an [`Event`](super::Event) mark their point at once.
    pub fn completed(&self) -> Completed {
        Completed::new(self.clone())
    }

    /// Marks this point now, so that whoever waits for it later waits for nothing more, and without this stream's lock.
    #[inline]
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.mark.is_none() && !self.has_passed() {
            self.mark = Some(self.stream.mark(self.number)?);
        }
        Ok(())
    }

    /// Becomes its stream's present end, marked, if it is of this one and its mark can be recorded again: nobody else has it.
    /// False if not; then it is as it was. An error is not yet heeded.
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

    /// Asks the device, now, whether the work is done.
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

    /// Asks the device how far the stream has come, up to here: so earlier tickets of it are known to have passed, too.
    pub(crate) fn look_back(&mut self) -> Result<()> {
        self.commit()?;
        self.stream.look()
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({} of {:?})", self.number, self.stream.name())
    }
}
