//! Recording and recycling of a stream's marks.

use std::sync::Arc;

use super::{Inner, Order, Stream, mark::Mark};
use crate::{
    error::Result,
    mutants::{self, Mutant},
    sync::{Deferred, assert_may_wake, lock},
};

/// The limit of tickets without a mark that re-recording a mark may leave.
pub(super) const NEAR: u64 = 64;

impl Stream {
    /// The first mark at or after a ticket, recorded now if there is none. It may cover later work, never less.
    pub(super) fn mark(&self, number: u64) -> Result<Arc<Mark>> {
        assert_may_wake();
        let inner = &*self.0;
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        if order.marks.back().is_some_and(|mark| mark.ticket >= number) {
            let at = order.marks.partition_point(|mark| mark.ticket < number);
            return Ok(order.marks[at].clone());
        }
        inner.device.check()?;
        let before = inner.completion.passed();
        let mut passed = before;
        let made = order.new_mark(inner, &mut passed);
        drop(order);
        if passed > before {
            inner.completion.advance(passed);
        }
        inner.streams.observe(made)
    }

    /// The mark for another stream that waits for a ticket.
    pub(super) fn mark_for_wait(&self, number: u64) -> Result<Arc<Mark>> {
        let mark = self.mark(number)?;
        if mutants::is(Mutant::EarlyMark) {
            let order = lock(&self.0.order);
            let at = order.marks.partition_point(|earlier| earlier.ticket < mark.ticket);
            return Ok(at.checked_sub(1).map_or(mark, |before| order.marks[before].clone()));
        }
        Ok(mark)
    }

    /// Records a mark again, at the stream's current end, if it is the latest and the caller is its only other holder:
    /// an event that is recorded repeatedly needs no further marks. False if it cannot.
    ///
    /// A search for an earlier mark then finds a later one, so one mark in [`NEAR`] tickets stays. The caller must pass
    /// an error to `observe`, once it has released its lock.
    pub(super) fn move_mark(&self, mark: &mut Arc<Mark>) -> Result<bool> {
        assert_may_wake();
        let inner = &*self.0;
        if inner.held.is_shared() || inner.streams.capture().is_some() {
            return Ok(false);
        }
        let _later = Deferred::new();
        let mut order = lock(&inner.order);
        inner.device.check()?;
        let before = match order.marks.len().checked_sub(2) {
            Some(before) => order.marks[before].ticket,
            None => inner.completion.passed(),
        };
        // One reference here, one in the order.
        let is_its_own = Arc::strong_count(mark) == 2 && order.marks.back().is_some_and(|last| Arc::ptr_eq(last, mark));
        if !is_its_own || order.issued.saturating_sub(before) > NEAR {
            return Ok(false);
        }
        if mark.ticket == order.issued {
            return Ok(true);
        }
        inner.streams.backend().event_record(mark.event, inner.raw)?;
        order.marks.pop_back();
        order.marked += 1;
        let Order { issued, marked, clock, upstream, marks, .. } = &mut *order;
        Mark::set(mark, *issued, *marked, clock, upstream);
        marks.push_back(mark.clone());
        Ok(true)
    }
}

impl Order {
    /// Without polling, marks pile up until no spare is left. The device is then queried for its progress, which may
    /// raise `passed`. If it has not passed half of the marks, the pool grows: recycling one mark at a time would need
    /// a query each time.
    fn new_mark(&mut self, stream: &Inner, passed: &mut u64) -> Result<Arc<Mark>> {
        let backend = stream.streams.backend();
        self.forget(*passed);
        let mut mark = loop {
            if let Some(mark) = self.spares.take() {
                break mark;
            }
            if let Some(middle) = self.marks.get(self.marks.len() / 2)
                && backend.event_query(middle.event)?
            {
                *passed = middle.ticket;
            }
            if !self.forget(*passed) {
                self.spares.grow(&stream.streams)?;
            }
        };
        backend.event_record(mark.event, stream.raw)?;
        self.marked += 1;
        Mark::set(&mut mark, self.issued, self.marked, &self.clock, &self.upstream);
        self.marks.push_back(mark.clone());
        Ok(mark)
    }

    /// Recycles the marks up to this ticket. False if there are none.
    fn forget(&mut self, passed: u64) -> bool {
        if self.marks.front().is_none_or(|mark| mark.ticket > passed) {
            return false;
        }
        let done = self.marks.partition_point(|mark| mark.ticket <= passed);
        self.marks.drain(..done).for_each(|mark| self.spares.put(mark));
        true
    }
}
