//! [`Mark`]: an event behind a ticket, with what the stream was ordered after when it was recorded.
//!
//! Whoever waits for a ticket or asks about it holds its mark and needs the stream no more: no lock of one stream is
//! taken for the work of another. Marks are shared (`Arc`) and come from their stream's own pool; one is used again only
//! when nobody else holds it, so an event is never recorded again under somebody who waits, and no generation number is
//! needed. Waits that the device already has keep the record they were given (`cuStreamWaitEvent` captures it).

use std::{collections::VecDeque, fmt, sync::Arc};

use super::{Devices, Streams, clock::Clock};
use crate::{device::backend::RawEvent, error::Result};

/// A recorded point of a stream.
pub(crate) struct Mark {
    pub(super) ticket: u64,
    /// The how manyth of its stream.
    pub(super) number: u64,
    pub(super) event: RawEvent,
    pub(super) clock: Clock,
    /// Other devices whose work came before, directly or not.
    pub(super) upstream: Devices,
    home: Arc<Streams>,
}

/// A stream's marks that have passed: to be used again.
#[derive(Debug, Default)]
pub(super) struct Spares(VecDeque<Arc<Mark>>);

impl Spares {
    /// As many as a stream keeps.
    const MOST: usize = 64;
    /// How many are tried before a new one is made.
    const TRIES: usize = 4;

    /// A mark that nobody else holds, its event not yet recorded for this use.
    pub(super) fn take(&mut self, streams: &Arc<Streams>) -> Result<Arc<Mark>> {
        for _ in 0..Self::TRIES.min(self.0.len()) {
            let Some(mut mark) = self.0.pop_front() else { break };
            if Arc::get_mut(&mut mark).is_some() {
                return Ok(mark);
            }
            self.0.push_back(mark);
        }
        let event = streams.backend().event_create(false)?;
        Ok(Arc::new(Mark {
            ticket: 0,
            number: 0,
            event,
            clock: Clock::default(),
            upstream: Devices::new(),
            home: streams.clone(),
        }))
    }

    pub(super) fn put(&mut self, mark: Arc<Mark>) {
        if self.0.len() < Self::MOST {
            self.0.push_back(mark);
        }
    }
}

impl Mark {
    /// Everything but the event, of a mark that was just taken.
    pub(super) fn set(this: &mut Arc<Self>, ticket: u64, number: u64, clock: &Clock, upstream: &Devices) {
        debug_assert_eq!(Arc::weak_count(this), 0);
        if let Some(mark) = Arc::get_mut(this) {
            (mark.ticket, mark.number) = (ticket, number);
            mark.clock.set(clock);
            mark.upstream.clone_from(upstream);
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.home.backend().event_destroy(self.event);
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mark").field("ticket", &self.ticket).field("event", &self.event).finish_non_exhaustive()
    }
}
