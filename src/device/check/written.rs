//! [`Written`]: the bytes of an allocation that have been written.
//!
//! Fresh and reused device memory is unwritten. A fill, a copy or a kernel makes the bytes that it is given to write
//! written; if bytes of a copy's source are unwritten, so are their copies. A read of bytes **none of which** was ever
//! written is refused. Some of the bytes may be unwritten: the end of an envelope that is not full, padding, arguments
//! that a kernel does not access. So memory need not be cleared for the checker.
//!
//! Page-locked host memory is initialised when it is allocated: it is always written.

use std::{collections::BTreeMap, ops::Range};

use smallvec::SmallVec;

/// Disjoint ranges of bytes, none adjacent to another: their ends by their starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Written(BTreeMap<u64, u64>);

impl Written {
    pub(super) fn all(bytes: u64) -> Self {
        let mut written = Self::default();
        written.add(&(0..bytes));
        written
    }

    pub(super) fn has_any(&self, bytes: &Range<u64>) -> bool {
        self.within(bytes).next().is_some()
    }

    pub(super) fn add(&mut self, bytes: &Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let Range { mut start, mut end } = bytes.clone();
        let merged: SmallVec<[(u64, u64); 4]> = self.touching(start, end).collect();
        for (from, to) in merged {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, bytes: &Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let cut: SmallVec<[(u64, u64); 4]> = self.touching(bytes.start, bytes.end).collect();
        for (from, to) in cut {
            self.0.remove(&from);
            if from < bytes.start {
                self.0.insert(from, bytes.start);
            }
            if bytes.end < to {
                self.0.insert(bytes.end, to);
            }
        }
    }

    pub(super) fn within(&self, bytes: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let part = |(from, to): (u64, u64)| from.max(bytes.start)..to.min(bytes.end);
        self.touching(bytes.start, bytes.end).map(part).filter(|part| !part.is_empty())
    }

    /// The ranges that overlap or border on these bytes.
    fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let before = self.0.range(..start).next_back().filter(move |(_, to)| **to >= start);
        before.into_iter().chain(self.0.range(start..=end.max(start))).map(|(from, to)| (*from, *to))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares the ranges with one bit per byte.
        #[test]
        fn ranges_agree_with_one_bit_per_byte(calls in prop::collection::vec((0..3_u8, 0..40_u64, 0..20_u64), 0..40)) {
            let (mut written, mut bits) = (Written::default(), [false; 64]);
            for (call, from, bytes) in calls {
                let range = from..from + bytes;
                let of = range.start as usize..range.end as usize;
                match call {
                    0 => {
                        written.add(&range);
                        bits[of].fill(true);
                    }
                    1 => {
                        written.remove(&range);
                        bits[of].fill(false);
                    }
                    _ => {
                        prop_assert_eq!(written.has_any(&range), bits[of.clone()].contains(&true));
                        let held: Vec<u64> = written.within(&range).flatten().collect();
                        let wanted: Vec<_> = range.filter(|at| bits[*at as usize]).collect();
                        prop_assert_eq!(held, wanted);
                    }
                }
                let starts: Vec<_> = written.0.iter().collect();
                prop_assert!(starts.windows(2).all(|two| two[0].1 < two[1].0), "{:?}", written);
            }
        }
    }
}
