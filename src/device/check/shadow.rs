//! The last accesses to the bytes of one allocation.
//!
//! The bytes are divided into segments. Each segment stores its last write and the reads since. An access is forgotten
//! as soon as it cannot affect a later check:
//!
//! - a write replaces all accesses in its range: it was checked to come after all of them, so an access that comes
//!   after the write comes after them too;
//! - a read replaces the reads in its range that come before it, for the same reason;
//! - accesses that the host knows to be done come before everything that is enqueued later.
//!
//! Equal neighbours are merged, so the number of segments is bounded by the accesses that still matter, not by all
//! accesses.

use std::{collections::BTreeMap, ops::Range};

use smallvec::SmallVec;

use super::happens_before::Component;

/// One access: the stream, the number of the call in the stream, and the kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) component: Component,
    pub(super) tick: u64,
    pub(super) kind: AccessKind,
    /// The access is by a node of a graph that the call launched.
    pub(super) in_graph: bool,
}

/// The work that accesses memory, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessKind {
    Kernel(&'static str),
    /// The copy's direction.
    Copy(&'static str),
    Fill,
    /// The memory exists from then on.
    Allocation,
    /// The memory does not exist from then on.
    Free,
    /// The memory has a new owner from then on.
    Recycling,
    /// The flag of a conditional node.
    Condition,
    /// Another library's work, by the name that its caller gave it.
    External(&'static str),
}

impl AccessKind {
    /// True if the memory has a new owner afterwards and is unwritten.
    pub(super) fn is_new(self) -> bool {
        matches!(self, Self::Allocation | Self::Recycling)
    }
}

/// An earlier access that a new one is not ordered after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    pub(super) with: Stamp,
    pub(super) writes: bool,
    pub(super) bytes: Range<u64>,
}

/// The accesses to one allocation that still matter.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    /// The segments by their first byte; they do not overlap.
    segments: BTreeMap<u64, Segment>,
    /// The number of segments above which a cleanup starts.
    limit: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Segment {
    end: u64,
    write: Option<Stamp>,
    reads: SmallVec<[Stamp; 1]>,
}

impl Shadow {
    /// The first earlier access to `bytes` that conflicts with a read, or a write if `write` is set, and is not `known`
    /// to come before it.
    pub(super) fn conflict(&self, bytes: &Range<u64>, write: bool, known: impl Fn(&Stamp) -> bool) -> Option<Conflict> {
        for (start, segment) in self.touching(bytes) {
            let reads = segment.reads.iter().filter(|_| write).map(|stamp| (stamp, false));
            let mut earlier = segment.write.iter().map(|stamp| (stamp, true)).chain(reads);
            if let Some((with, writes)) = earlier.find(|(stamp, _)| !known(stamp)) {
                let bytes = bytes.start.max(*start)..bytes.end.min(segment.end);
                return Some(Conflict { with: *with, writes, bytes });
            }
        }
        None
    }

    /// Records an access that has no conflict.
    pub(super) fn mark(&mut self, bytes: &Range<u64>, write: bool, stamp: Stamp, known: impl Fn(&Stamp) -> bool) {
        if bytes.is_empty() {
            return;
        }
        self.split_at(bytes.start);
        self.split_at(bytes.end);
        if write {
            let replaced: SmallVec<[u64; 4]> = self.segments.range(bytes.clone()).map(|(start, _)| *start).collect();
            for start in replaced {
                self.segments.remove(&start);
            }
            self.segments.insert(bytes.start, Segment { end: bytes.end, write: Some(stamp), reads: SmallVec::new() });
        } else {
            self.close_gaps(bytes);
            for (_, segment) in self.segments.range_mut(bytes.clone()) {
                segment.reads.retain(|read| *read != stamp && !known(read));
                segment.reads.push(stamp);
            }
        }
        self.join(bytes);
        if self.segments.len() > self.limit.max(32) {
            self.forget(&known);
            self.limit = self.segments.len() * 2;
        }
    }

    pub(super) fn remove_access(&mut self, bytes: &Range<u64>, component: Component, tick: u64) {
        let other = |stamp: &Stamp| (stamp.component, stamp.tick) != (component, tick);
        let mut empty: SmallVec<[u64; 4]> = SmallVec::new();
        for (start, segment) in self.segments.range_mut(bytes.clone()) {
            segment.write = segment.write.filter(other);
            segment.reads.retain(|stamp| other(stamp));
            if segment.is_empty() {
                empty.push(*start);
            }
        }
        for start in empty {
            self.segments.remove(&start);
        }
    }

    /// Forgets accesses that are known to come before everything that is enqueued later.
    pub(super) fn forget(&mut self, known: impl Fn(&Stamp) -> bool) {
        self.segments.retain(|_, segment| {
            segment.write = segment.write.filter(|stamp| !known(stamp));
            segment.reads.retain(|stamp| !known(stamp));
            !segment.is_empty()
        });
        self.join(&(0..u64::MAX));
    }

    pub(super) fn stamps(&self) -> impl Iterator<Item = &Stamp> {
        self.segments.values().flat_map(|segment| segment.write.iter().chain(&segment.reads))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    fn touching(&self, bytes: &Range<u64>) -> impl Iterator<Item = (&u64, &Segment)> {
        let first = self.segments.range(..bytes.start).next_back().filter(|(_, segment)| segment.end > bytes.start);
        first.into_iter().chain(self.segments.range(bytes.start..bytes.end.max(bytes.start)))
    }

    /// Splits the segment that contains `at`, so that one starts there.
    fn split_at(&mut self, at: u64) {
        let Some((_, left)) = self.segments.range_mut(..at).next_back() else { return };
        if left.end > at {
            let right = left.clone();
            left.end = at;
            self.segments.insert(at, right);
        }
    }

    /// Adds empty segments for the bytes of the range that have none.
    fn close_gaps(&mut self, bytes: &Range<u64>) {
        let mut gaps: SmallVec<[Range<u64>; 4]> = SmallVec::new();
        let mut at = bytes.start;
        for (start, segment) in self.segments.range(bytes.clone()) {
            if at < *start {
                gaps.push(at..*start);
            }
            at = segment.end;
        }
        if at < bytes.end {
            gaps.push(at..bytes.end);
        }
        for gap in gaps {
            self.segments.insert(gap.start, Segment { end: gap.end, write: None, reads: SmallVec::new() });
        }
    }

    fn join(&mut self, bytes: &Range<u64>) {
        let left = self.segments.range(..bytes.start).next_back().map_or(bytes.start, |(start, _)| *start);
        let mut gone: SmallVec<[u64; 4]> = SmallVec::new();
        let mut grown: SmallVec<[(u64, u64); 4]> = SmallVec::new();
        let mut last: Option<(u64, &Segment, u64)> = None;
        for (start, segment) in self.segments.range(left..=bytes.end) {
            match &mut last {
                Some((_, before, end)) if *end == *start && before.has_same_accesses(segment) => {
                    *end = segment.end;
                    gone.push(*start);
                }
                _ => {
                    grown.extend(last.map(|(start, _, end)| (start, end)));
                    last = Some((*start, segment, segment.end));
                }
            }
        }
        grown.extend(last.map(|(start, _, end)| (start, end)));
        if gone.is_empty() {
            return;
        }
        for (start, end) in grown {
            if let Some(segment) = self.segments.get_mut(&start) {
                segment.end = end;
            }
        }
        for start in gone {
            self.segments.remove(&start);
        }
    }
}

impl Segment {
    fn is_empty(&self) -> bool {
        self.write.is_none() && self.reads.is_empty()
    }

    fn has_same_accesses(&self, other: &Segment) -> bool {
        self.write == other.write && self.reads == other.reads
    }
}
