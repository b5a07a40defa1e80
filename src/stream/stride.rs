//! [`Stride`]: how far beyond a passed mark a stream is queried.
//!
//! Each query costs a driver call, some 4,400 cycles of a lock that all calls of a device share (measured on an H200).
//! A task that is behind the device finds each mark passed; a task that keeps up finds that no further mark has. So the
//! stride doubles if the mark that far ahead has passed, too, and halves if not; if not even the next mark has passed,
//! none is queried for a while.

use std::sync::atomic::{AtomicI32, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Stride(AtomicI32);

/// How many marks are found passed before the next one is queried again.
const PAUSE: i32 = 15;

const LONGEST: i32 = 32;

impl Stride {
    pub(super) fn new() -> Self {
        Self(AtomicI32::new(1))
    }

    /// A mark has passed. Returns how many marks ahead to query, if any.
    pub(super) fn next(&self) -> Option<usize> {
        // Only a heuristic: of two concurrent changes one may be lost.
        let stride = self.0.load(Ordering::Relaxed);
        if stride <= 0 {
            self.0.store(stride + 1, Ordering::Relaxed);
        }
        usize::try_from(stride).ok().filter(|stride| *stride > 0)
    }

    /// Notes whether that mark has passed.
    pub(super) fn found(&self, passed: bool) {
        let stride = self.0.load(Ordering::Relaxed).max(1);
        let next = match passed {
            true => (2 * stride).min(LONGEST),
            false if stride == 1 => -PAUSE,
            false => stride / 2,
        };
        self.0.store(next, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_where_marks_have_passed_and_pauses_where_not() {
        let stride = Stride::new();
        let mut grows = Vec::new();
        for _ in 0..7 {
            grows.extend(stride.next());
            stride.found(true);
        }
        assert_eq!(grows, [1, 2, 4, 8, 16, 32, 32]);
        let mut shrinks = Vec::new();
        for _ in 0..6 {
            shrinks.extend(stride.next());
            stride.found(false);
        }
        assert_eq!(shrinks, [32, 16, 8, 4, 2, 1]);
        let pause = std::iter::repeat_with(|| stride.next()).take_while(Option::is_none).count();
        assert_eq!(pause, PAUSE as usize + 1);
    }
}
