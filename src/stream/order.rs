//! [`Order`]: the state of a stream that changes with each enqueue, under the stream's lock.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use smallvec::SmallVec;

use super::{
    mark::{Mark, MarkPool, VectorClock},
    meter::Meter,
};
use crate::{
    device::{
        Device,
        backend::{Backend, RawStream},
    },
    error::Result,
    mutants::{self, Mutant},
};

/// The state that changes with each enqueue.
pub(super) struct Order {
    pub(super) issued: u64,
    pub(super) clock: VectorClock,
    /// The marks, oldest first. Marks that have passed are recycled.
    pub(super) marks: VecDeque<Arc<Mark>>,
    /// The number of marks recorded so far.
    marked: u64,
    pool: MarkPool,
    /// Set if an operator's runs on this stream are timed.
    pub(super) meter: Option<Box<Meter>>,
    /// Other devices that this stream is ordered after, directly or not, and whose work is not yet known to be valid.
    pub(super) upstream: SmallVec<[Upstream; 1]>,
    /// The tickets that were tainted by the loss of such a device, oldest first.
    pub(super) tainted: Vec<Tainted>,
    pub(super) launches: RecentLaunches,
}

/// The losses of upstream devices, readable without the lock.
#[derive(Default)]
pub(super) struct LossState {
    /// Set once the stream has waited for another device whose work is not yet known to be valid.
    pub(super) has_upstream_work: AtomicBool,
    /// The number of losses of upstream devices that the stream has noted.
    pub(super) count: AtomicU64,
}

/// Another device, kept until its work is known to be valid, since it may still fault.
#[derive(Clone)]
pub(super) struct Upstream {
    pub(super) device: Device,
    /// The first ticket that is ordered after the device's work.
    pub(super) from: u64,
    /// If the device has not faulted when this ticket has passed, the work that this stream waited for is valid.
    pub(super) until: u64,
}

/// The first and the last of the tickets that the loss of another device has tainted.
pub(super) struct Tainted {
    from: u64,
    to: u64,
    device: Device,
}

/// With more spans of tainted tickets than this, the two closest spans are merged, including the tickets between them.
pub(super) const MAX_TAINTED_SPANS: usize = 256;

/// The maximum number of consecutive tickets without a mark after a mark was recorded again.
pub(super) const MAX_UNMARKED: u64 = 64;

impl Order {
    pub(super) fn new(backend: &Arc<dyn Backend>) -> Result<Self> {
        let mut pool = MarkPool::default();
        pool.grow(backend)?;
        Ok(Self {
            issued: 0,
            clock: VectorClock::default(),
            marks: VecDeque::new(),
            marked: 0,
            pool,
            meter: None,
            upstream: SmallVec::new(),
            tainted: Vec::new(),
            launches: RecentLaunches::default(),
        })
    }

    /// Records a new mark. If no task polls, marks accumulate until the pool is empty. The device is then queried for
    /// its progress, which may raise `passed`. If it has not passed half of the marks, the pool grows: recycling one
    /// mark at a time would need a query each time.
    pub(super) fn new_mark(
        &mut self,
        backend: &Arc<dyn Backend>,
        stream: RawStream,
        passed: &mut u64,
    ) -> Result<Arc<Mark>> {
        self.forget(*passed);
        let mut mark = loop {
            if let Some(mark) = self.pool.take() {
                break mark;
            }
            if let Some(middle) = self.marks.get(self.marks.len() / 2)
                && backend.event_query(middle.event)?
            {
                *passed = middle.ticket;
            }
            if !self.forget(*passed) {
                self.pool.grow(backend)?;
            }
        };
        backend.event_record(mark.event, stream)?;
        self.set_mark(&mut mark);
        self.marks.push_back(mark.clone());
        Ok(mark)
    }

    /// Sets the fields of a mark that was just recorded.
    pub(super) fn set_mark(&mut self, mark: &mut Arc<Mark>) {
        self.marked += 1;
        let upstream = self.upstream.iter().map(|upstream| upstream.device.downgrade());
        Mark::set(mark, self.issued, self.marked, &self.clock, upstream);
    }

    /// Recycles the marks up to ticket `passed`. False if there are none.
    fn forget(&mut self, passed: u64) -> bool {
        if self.marks.front().is_none_or(|mark| mark.ticket > passed) {
            return false;
        }
        let done = self.marks.partition_point(|mark| mark.ticket <= passed);
        self.marks.drain(..done).for_each(|mark| self.pool.put(mark));
        true
    }

    /// Notes upstream devices that are known to be lost: they have tainted the work that was enqueued since the stream
    /// was ordered after them, but not later work. Called within a [`Deferred`](crate::sync::Deferred) scope.
    #[cold]
    pub(super) fn note_losses(&mut self, losses: &LossState) {
        let mut at = 0;
        while let Some(upstream) = self.upstream.get(at) {
            if !upstream.device.is_lost() {
                at += 1;
                continue;
            }
            let Upstream { device, from, .. } = self.upstream.swap_remove(at);
            self.note_loss(losses, from, device);
        }
        if self.upstream.is_empty() {
            losses.has_upstream_work.store(false, Ordering::Release);
        }
    }

    /// Taints the work that was enqueued from ticket `from` on, and the work that is being prepared now.
    pub(super) fn note_loss(&mut self, losses: &LossState, from: u64, device: Device) {
        match self.tainted.last_mut() {
            Some(last) if last.device == device && last.to + 1 >= from => {
                // Work that was being prepared may have noted the loss first, for itself alone.
                (last.from, last.to) = (last.from.min(from), last.to.max(self.issued));
            }
            _ => self.tainted.push(Tainted { from, to: self.issued, device }),
        }
        if self.tainted.len() > MAX_TAINTED_SPANS {
            let gaps = self.tainted.windows(2).map(|two| two[1].from.saturating_sub(two[0].to));
            let closest = gaps.enumerate().min_by_key(|(_, gap)| *gap).map_or(0, |(at, _)| at);
            let earlier = self.tainted.remove(closest);
            if let Some(later) = self.tainted.get_mut(closest) {
                (later.from, later.to) = (later.from.min(earlier.from), later.to.max(earlier.to));
            }
        }
        // Before `has_upstream_work` is cleared: readers load `has_upstream_work` first.
        losses.count.fetch_add(1, Ordering::Release);
    }

    /// Taints a ticket because a loss was noted while its work was being prepared.
    #[cold]
    pub(super) fn taint(&mut self, number: u64) {
        if let Some(last) = self.tainted.last_mut() {
            last.to = last.to.max(number);
        }
    }

    /// The lost device that is known to have tainted a ticket.
    pub(super) fn tainted_by(&self, number: u64) -> Option<&Device> {
        if mutants::is(Mutant::FaultUnheard) {
            return None;
        }
        let noted = self.tainted.iter().find(|span| (span.from..=span.to).contains(&number)).map(|span| &span.device);
        noted.or_else(|| {
            let lost = self.upstream.iter().find(|upstream| upstream.from <= number && upstream.device.is_lost());
            lost.map(|upstream| &upstream.device)
        })
    }
}

/// The number of launches that are remembered.
const REMEMBERED: usize = 4;

/// What was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launched {
    Kernel(&'static str),
    Graph,
}

/// A ring of the latest launches, each different from its predecessor, with the ticket of its last repetition.
#[derive(Debug, Default)]
pub(super) struct RecentLaunches {
    last: [Option<(u64, Launched)>; REMEMBERED],
    newest: usize,
}

impl RecentLaunches {
    #[inline]
    pub(super) fn note(&mut self, ticket: u64, launched: Launched) {
        if self.last[self.newest].is_some_and(|(_, newest)| newest != launched) {
            self.newest = (self.newest + 1) % REMEMBERED;
        }
        self.last[self.newest] = Some((ticket, launched));
    }

    /// The launches after this ticket, oldest first, in parentheses; empty if there are none.
    pub(super) fn after(&self, passed: u64) -> impl fmt::Display + use<> {
        let oldest_first = (1..=REMEMBERED).filter_map(|at| self.last[(self.newest + at) % REMEMBERED]);
        let open: Vec<_> = oldest_first.filter(|(ticket, _)| *ticket > passed).map(|(_, launched)| launched).collect();
        UnfinishedLaunches(open)
    }
}

struct UnfinishedLaunches(Vec<Launched>);

impl fmt::Display for UnfinishedLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.0.split_first() else { return Ok(()) };
        // If all remembered launches are unfinished, earlier ones may be unfinished, too.
        let before = if self.0.len() == REMEMBERED { ".., " } else { "" };
        write!(f, " ({before}{first}")?;
        others.iter().try_for_each(|other| write!(f, ", {other}"))?;
        f.write_str(")")
    }
}

impl fmt::Display for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(name) => write!(f, "kernel `{name}`"),
            Self::Graph => f.write_str("a graph"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Launched::*, *};

    #[test]
    fn launches_that_may_not_be_done_are_named_oldest_first() {
        let mut launches = RecentLaunches::default();
        assert_eq!(launches.after(0).to_string(), "");
        launches.note(1, Kernel("a"));
        assert_eq!(launches.after(0).to_string(), " (kernel `a`)");
        launches.note(3, Graph);
        launches.note(4, Graph);
        assert_eq!(launches.after(0).to_string(), " (kernel `a`, a graph)");
        assert_eq!(launches.after(3).to_string(), " (a graph)");
        assert_eq!(launches.after(4).to_string(), "");
        launches.note(5, Kernel("a"));
        launches.note(6, Kernel("b"));
        launches.note(9, Kernel("c"));
        assert_eq!(launches.after(0).to_string(), " (.., a graph, kernel `a`, kernel `b`, kernel `c`)");
        assert_eq!(launches.after(5).to_string(), " (kernel `b`, kernel `c`)");
    }
}
