//! [`Clock`]: for each other stream, the ticket up to which one stream is ordered after it.
//!
//! Clocks are lower bounds. A missing entry costs a wait that was implied already; it never costs order.

use smallvec::SmallVec;

/// Sorted by stream, so that two clocks merge in one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(SmallVec<[(u64, u64); 8]>);

/// The limit of entries. Beyond it, entries of the oldest streams are removed first.
const LONGEST: usize = 8;

impl Clock {
    #[inline]
    pub(super) fn reached(&self, stream: u64) -> u64 {
        self.0.binary_search_by_key(&stream, |(of, _)| *of).map_or(0, |at| self.0[at].1)
    }

    pub(super) fn reach(&mut self, stream: u64, ticket: u64) {
        match self.0.binary_search_by_key(&stream, |(of, _)| *of) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(ticket),
            Err(mut at) => {
                if self.0.len() == LONGEST {
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
                _ if self.0.len() < LONGEST => self.0.insert(at, (*stream, *ticket)),
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

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn clock(entries: &[(u64, u64)]) -> Clock {
        let mut clock = Clock::default();
        entries.iter().for_each(|(stream, ticket)| clock.reach(*stream, *ticket));
        clock
    }

    proptest! {
        /// Never more than both knew, and, if no entry was removed, never less.
        #[test]
        fn a_merge_knows_what_both_knew(a in vec((0..50_u64, 1..9_u64), 0..40), b in vec((0..50_u64, 1..9_u64), 0..40)) {
            let (a, b) = (clock(&a), clock(&b));
            let mut both = a.clone();
            both.merge(&b);
            let fits = (0..50).filter(|stream| a.reached(*stream).max(b.reached(*stream)) > 0).count() <= LONGEST;
            for stream in 0..50 {
                let most = a.reached(stream).max(b.reached(stream));
                prop_assert!(both.reached(stream) <= most);
                prop_assert!(!fits || both.reached(stream) == most);
            }
            prop_assert!(both.0.len() <= LONGEST && both.0.is_sorted_by(|x, y| x.0 < y.0));
        }
    }
}
