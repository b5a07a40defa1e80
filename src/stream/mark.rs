//! [`Mark`]: an event behind a ticket, with what the stream was ordered after when it was recorded.
//!
//! A waiter for a ticket holds the ticket's mark and does not need the stream: no lock of one stream is taken for work
//! on another. Marks are shared (`Arc`) and come from a pool of their stream. A mark is reused only when no ticket
//! holds it, so an event is never recorded again while a waiter uses it, and no generation number is needed. Waits that
//! are already enqueued on the device keep their record (`cuStreamWaitEvent` captures it).

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
    /// Its sequence number among the marks of its stream.
    pub(super) number: u64,
    pub(super) event: RawEvent,
    pub(super) clock: Clock,
    /// Other devices whose work this is ordered after, directly or not. The stream keeps those that are still needed.
    pub(super) upstream: SmallVec<[WeakDevice; 1]>,
    home: Arc<Streams>,
}

/// A stream's marks that have passed, for reuse.
///
/// The pool starts with some marks and doubles when it runs out: creating a mark is the only call on a message's path
/// that blocks other threads (see `device/cuda/gate.rs`).
#[derive(Debug, Default)]
pub(super) struct Spares {
    /// Marks that may be free.
    idle: VecDeque<Arc<Mark>>,
    /// Marks that a ticket still held at the last check: events and memory may hold theirs for long.
    held: VecDeque<Arc<Mark>>,
    made: usize,
}

impl Spares {
    /// The initial number of marks.
    const FIRST: usize = 16;

    /// How many held marks each call checks: more than one, so that marks return faster than they are taken.
    const LOOKS: usize = 2;

    /// A mark that no ticket holds; its event is not yet recorded for this use. However many marks are held, a call
    /// checks few: each once when it returns, and then [`LOOKS`](Self::LOOKS) in turn.
    pub(super) fn take(&mut self) -> Option<Arc<Mark>> {
        for _ in 0..self.held.len().min(Self::LOOKS) {
            let mut mark = self.held.pop_front()?;
            let list = if Arc::get_mut(&mut mark).is_some() { &mut self.idle } else { &mut self.held };
            list.push_back(mark);
        }
        while let Some(mut mark) = self.idle.pop_front() {
            if Arc::get_mut(&mut mark).is_some() {
                return Some(mark);
            }
            self.held.push_back(mark);
        }
        None
    }

    pub(super) fn put(&mut self, mark: Arc<Mark>) {
        self.idle.push_back(mark);
    }

    pub(super) fn grow(&mut self, streams: &Arc<Streams>) -> Result<()> {
        for _ in 0..self.made.max(Self::FIRST) {
            let event = streams.backend().event_create(false)?;
            self.made += 1;
            // In front: they are known to be free.
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
    /// Sets everything but the event of a mark that was just taken.
    pub(super) fn set(this: &mut Arc<Self>, ticket: u64, number: u64, clock: &Clock, upstream: &[Upstream]) {
        let Some(mark) = Arc::get_mut(this) else { unreachable!("`Spares::take` returns only free marks") };
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

    /// Marks that are held for long are not checked at each take; once they are free they are reused.
    #[test]
    fn a_take_checks_few_held_marks() {
        let device = Device::emulated(Emulated::new());
        let streams = Streams::of(&device);
        let (mut spares, mut held) = (Spares::default(), Vec::new());
        let take = |spares: &mut Spares| loop {
            match spares.take() {
                Some(mark) => break mark,
                None => spares.grow(&streams).unwrap(),
            }
        };
        for _ in 0..1000 {
            let mark = take(&mut spares);
            held.push(mark.clone());
            spares.put(mark);
        }
        // Each is checked once, and not again.
        let made = spares.made;
        for round in 0..made + 100 {
            let mark = take(&mut spares);
            spares.put(mark);
            if round < made {
                continue;
            }
            let passed_over = spares.idle.iter().filter(|mark| Arc::strong_count(mark) > 1).count();
            assert_eq!(passed_over, 0, "of {} that are looked at", spares.idle.len());
        }
        held.clear();
        let all: Vec<_> = (0..made).map(|_| take(&mut spares)).collect();
        assert_eq!((all.len(), spares.made), (made, made), "no mark is created");
    }
}
