//! [`Mark`]: an event behind a ticket, with a snapshot of the stream's order from when it was recorded.
//!
//! A waiter for a ticket holds the ticket's mark and does not need the stream: work on one stream acquires no lock of
//! another. Marks are shared (`Arc`) and come from a pool of their stream. A mark is reused only when no ticket holds
//! it, so an event is never recorded again while a waiter uses it, and no generation number is needed. Waits that are
//! already enqueued on the device keep the record (`cuStreamWaitEvent` captures it).

use std::{collections::VecDeque, fmt, sync::Arc};

use smallvec::SmallVec;

use crate::{
    device::{
        WeakDevice,
        backend::{Backend, RawEvent},
    },
    error::Result,
};

/// For each other stream, the ticket up to which one stream is ordered after it. The clock is a lower bound: a missing
/// entry costs a redundant wait, never an order. Entries are sorted by stream, so that two clocks merge in one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct VectorClock(SmallVec<[(u64, u64); 8]>);

/// The maximum number of entries. Entries of the oldest streams are removed first.
const MAX_ENTRIES: usize = 8;

impl VectorClock {
    #[inline]
    pub(super) fn reached(&self, stream: u64) -> u64 {
        self.0.binary_search_by_key(&stream, |(of, _)| *of).map_or(0, |at| self.0[at].1)
    }

    pub(super) fn reach(&mut self, stream: u64, ticket: u64) {
        match self.0.binary_search_by_key(&stream, |(of, _)| *of) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(ticket),
            Err(mut at) => {
                if self.0.len() == MAX_ENTRIES {
                    self.0.remove(0);
                    at = at.saturating_sub(1);
                }
                self.0.insert(at, (stream, ticket));
            }
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        let mut at = 0;
        for (stream, ticket) in &other.0 {
            while self.0.get(at).is_some_and(|(of, _)| of < stream) {
                at += 1;
            }
            match self.0.get(at) {
                Some((of, _)) if of == stream => self.0[at].1 = self.0[at].1.max(*ticket),
                _ if self.0.len() < MAX_ENTRIES => self.0.insert(at, (*stream, *ticket)),
                // Older than every entry of a full clock.
                _ if at == 0 => {}
                _ => {
                    self.0.remove(0);
                    at -= 1;
                    self.0.insert(at, (*stream, *ticket));
                }
            }
        }
    }

    /// Becomes a copy of `other`, in the memory it already has.
    pub(super) fn set(&mut self, other: &Self) {
        self.0.clear();
        self.0.extend_from_slice(&other.0);
    }
}

/// A recorded point of a stream.
pub(crate) struct Mark {
    pub(super) ticket: u64,
    /// The sequence number among the marks of the stream.
    pub(super) number: u64,
    pub(super) event: RawEvent,
    pub(super) clock: VectorClock,
    /// Other devices whose work the mark is ordered after, directly or not. The stream keeps the devices that are still
    /// needed alive.
    pub(super) upstream: SmallVec<[WeakDevice; 1]>,
    backend: Arc<dyn Backend>,
}

/// A stream's marks that have passed, for reuse.
///
/// The pool starts with some marks and doubles when it runs out: creating a mark is the only call on a message's path
/// that blocks other threads (see `device/cuda/gate.rs`).
#[derive(Debug, Default)]
pub(super) struct MarkPool {
    /// Marks that are probably free.
    idle: VecDeque<Arc<Mark>>,
    /// Marks that a ticket still held at the last check: events and memory may hold marks for long.
    held: VecDeque<Arc<Mark>>,
    made: usize,
}

impl MarkPool {
    /// The initial number of marks.
    const FIRST: usize = 16;

    /// The number of held marks that each call checks: more than one, so that marks return faster than they are taken.
    const CHECKS: usize = 2;

    /// Takes a mark that no ticket holds. Its event is not yet recorded for the new use. A call checks few marks,
    /// however many are held: each mark once after its return, and then [`CHECKS`](Self::CHECKS) held marks in turn.
    pub(super) fn take(&mut self) -> Option<Arc<Mark>> {
        for _ in 0..self.held.len().min(Self::CHECKS) {
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

    pub(super) fn grow(&mut self, backend: &Arc<dyn Backend>) -> Result<()> {
        for _ in 0..self.made.max(Self::FIRST) {
            let event = backend.event_create(false)?;
            self.made += 1;
            // At the front, as they are known to be free.
            self.idle.push_front(Arc::new(Mark {
                ticket: 0,
                number: 0,
                event,
                clock: VectorClock::default(),
                upstream: SmallVec::new(),
                backend: backend.clone(),
            }));
        }
        Ok(())
    }
}

impl Mark {
    /// Sets everything but the event of a mark that was just taken.
    pub(super) fn set(
        this: &mut Arc<Self>,
        ticket: u64,
        number: u64,
        clock: &VectorClock,
        upstream: impl Iterator<Item = WeakDevice>,
    ) {
        let Some(mark) = Arc::get_mut(this) else { unreachable!("`MarkPool::take` returns only free marks") };
        (mark.ticket, mark.number) = (ticket, number);
        mark.clock.set(clock);
        mark.upstream.clear();
        mark.upstream.extend(upstream);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.backend.event_destroy(self.event);
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mark").field("ticket", &self.ticket).field("event", &self.event).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::device::{Device, Emulated};

    fn clock(entries: &[(u64, u64)]) -> VectorClock {
        let mut clock = VectorClock::default();
        entries.iter().for_each(|(stream, ticket)| clock.reach(*stream, *ticket));
        clock
    }

    proptest! {
        /// A merged clock never claims more than the two clocks and, if no entry was removed, never less.
        #[test]
        fn a_merge_knows_what_both_knew(a in vec((0..50_u64, 1..9_u64), 0..40), b in vec((0..50_u64, 1..9_u64), 0..40)) {
            let (a, b) = (clock(&a), clock(&b));
            let mut both = a.clone();
            both.merge(&b);
            let fits = (0..50).filter(|stream| a.reached(*stream).max(b.reached(*stream)) > 0).count() <= MAX_ENTRIES;
            for stream in 0..50 {
                let most = a.reached(stream).max(b.reached(stream));
                prop_assert!(both.reached(stream) <= most);
                prop_assert!(!fits || both.reached(stream) == most);
            }
            prop_assert!(both.0.len() <= MAX_ENTRIES && both.0.is_sorted_by(|x, y| x.0 < y.0));
        }
    }

    #[test]
    fn marks_that_are_held_for_long_are_not_replaced_again_and_again() {
        let device = Device::emulated(Emulated::new());
        let backend = device.backend();
        let (mut pool, mut held) = (MarkPool::default(), Vec::new());
        for turn in 0..10_000 {
            let mark = loop {
                match pool.take() {
                    Some(mark) => break mark,
                    None => pool.grow(backend).unwrap(),
                }
            };
            if turn < 400 {
                held.push(mark.clone());
            }
            pool.put(mark);
        }
        assert!(pool.made <= 1024, "{} for one at a time", pool.made);
    }

    /// Marks that are held for long are not checked at each take; once they are free they are reused.
    #[test]
    fn a_take_checks_few_held_marks() {
        let device = Device::emulated(Emulated::new());
        let backend = device.backend();
        let (mut pool, mut held) = (MarkPool::default(), Vec::new());
        let take = |pool: &mut MarkPool| loop {
            match pool.take() {
                Some(mark) => break mark,
                None => pool.grow(backend).unwrap(),
            }
        };
        for _ in 0..1000 {
            let mark = take(&mut pool);
            held.push(mark.clone());
            pool.put(mark);
        }
        // Each is checked once, and not again.
        let made = pool.made;
        for round in 0..made + 100 {
            let mark = take(&mut pool);
            pool.put(mark);
            if round < made {
                continue;
            }
            let passed_over = pool.idle.iter().filter(|mark| Arc::strong_count(mark) > 1).count();
            assert_eq!(passed_over, 0, "of {} that are looked at", pool.idle.len());
        }
        held.clear();
        let all: Vec<_> = (0..made).map(|_| take(&mut pool)).collect();
        assert_eq!((all.len(), pool.made), (made, made), "no mark is created");
    }
}
