//! [`Mark`]: an event behind a ticket, with what the stream was ordered after when it was recorded.
//!
//! Whoever waits for a ticket or asks about it holds its mark and needs the stream no more: no lock of one stream is
//! taken for the work of another. Marks are shared (`Arc`) and come from their stream's own pool; one is used again only
//! when nobody else holds it, so an event is never recorded again under somebody who waits, and no generation number is
//! needed. Waits that the device already has keep the record they were given (`cuStreamWaitEvent` captures it).

use std::{collections::VecDeque, fmt, sync::Arc};

use smallvec::SmallVec;

use super::{Streams, clock::Clock, taint::Upstream};
use crate::{
    device::{WeakDevice, backend::RawEvent},
    error::Result,
};

/// A recorded point of a stream.
pub(crate) struct Mark {
    pub(super) ticket: u64,
    /// The how manyth of its stream.
    pub(super) number: u64,
    pub(super) event: RawEvent,
    pub(super) clock: Clock,
    /// Other devices whose work came before, directly or not. The stream keeps those that are still needed.
    pub(super) upstream: SmallVec<[WeakDevice; 1]>,
    home: Arc<Streams>,
}

/// A stream's marks that have passed: to be used again.
///
/// As many are made at once as there are, and some from the start: making one is the only call on a message's path that
/// holds others up (see `device/cuda/gate.rs`).
#[derive(Debug, Default)]
pub(super) struct Spares {
    idle: VecDeque<Arc<Mark>>,
    made: usize,
}

impl Spares {
    /// How many there are from the start.
    const FIRST: usize = 16;

    /// A mark that nobody else holds, for this ticket; its event is not yet recorded for this use. Those that somebody does go to the back, so
    /// that each is passed over once a round.
    pub(super) fn take(&mut self) -> Option<Arc<Mark>> {
        for _ in 0..self.idle.len() {
            let mut mark = self.idle.pop_front()?;
            if Arc::get_mut(&mut mark).is_some() {
                return Some(mark);
            }
            self.idle.push_back(mark);
        }
        None
    }

    pub(super) fn put(&mut self, mark: Arc<Mark>) {
        self.idle.push_back(mark);
    }

    /// Doubles their number.
    pub(super) fn grow(&mut self, streams: &Arc<Streams>) -> Result<()> {
        for _ in 0..self.made.max(Self::FIRST) {
            let event = streams.backend().event_create(false)?;
            self.made += 1;
            // In front: they are known to be nobody's.
            self.idle.push_front(Arc::new(Mark {
                ticket: 0,
                number: 0,
                event,
                clock: Clock::default(),
                upstream: SmallVec::new(),
                home: streams.clone(),
            }));
        }
        Ok(())
    }
}

impl Mark {
    /// Everything but the event, of a mark that was just taken.
    pub(super) fn set(this: &mut Arc<Self>, ticket: u64, number: u64, clock: &Clock, upstream: &[Upstream]) {
        let Some(mark) = Arc::get_mut(this) else { unreachable!("`Spares::take` gives out none that others hold") };
        (mark.ticket, mark.number) = (ticket, number);
        mark.clock.set(clock);
        mark.upstream.clear();
        mark.upstream.extend(upstream.iter().map(|upstream| upstream.device.downgrade()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, Emulated};

    #[test]
    fn marks_that_are_held_for_long_are_not_replaced_again_and_again() {
        let device = Device::emulated(Emulated::new());
        let streams = Streams::of(&device);
        let (mut spares, mut held) = (Spares::default(), Vec::new());
        for turn in 0..10_000 {
            let mark = loop {
                match spares.take() {
                    Some(mark) => break mark,
                    None => spares.grow(&streams).unwrap(),
                }
            };
            if turn < 400 {
                held.push(mark.clone());
            }
            spares.put(mark);
        }
        assert!(spares.made <= 1024, "{} for one at a time", spares.made);
    }
}
