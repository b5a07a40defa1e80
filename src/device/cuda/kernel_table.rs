//! [`KernelTable`]: one value for each kernel of a device, found by the kernel's number without a lock.
//!
//! ```text
//!   bucket 0   numbers   0 ..  31      each bucket is twice as long as the one before. It is allocated at the
//!   bucket 1   numbers  32 ..  95      first write and never moved: references stay valid while values are
//!   bucket 2   numbers  96 .. 223      added
//!   ...
//! ```
//!
//! A kernel has one number for all devices of the process ([`KernelNumber`](crate::device::backend::KernelNumber)). Each device has
//! its own table, and drops all values with it.

use std::{array, sync::OnceLock};

/// Numbers in the first bucket.
const FIRST: usize = 32;
/// The number of buckets that cover every `usize`.
const BUCKETS: usize = (usize::BITS - FIRST.ilog2()) as usize;

type Bucket<T> = Box<[OnceLock<T>]>;

#[derive(Debug)]
pub(super) struct KernelTable<T>([OnceLock<Bucket<T>>; BUCKETS]);

/// The bucket of a number, and its index there.
#[inline]
fn place(number: usize) -> (usize, usize) {
    let shifted = number.saturating_add(FIRST);
    let bucket = shifted.ilog2() - FIRST.ilog2();
    (bucket as usize, shifted - (FIRST << bucket))
}

impl<T> KernelTable<T> {
    pub(super) fn new() -> Self {
        Self(array::from_fn(|_| OnceLock::new()))
    }

    #[inline]
    pub(super) fn get(&self, number: usize) -> Option<&T> {
        let (bucket, at) = place(number);
        self.0.get(bucket)?.get()?.get(at)?.get()
    }

    /// Does not replace an existing value.
    pub(super) fn set(&self, number: usize, value: T) {
        let (bucket, at) = place(number);
        let entries = self.0[bucket].get_or_init(|| (0..FIRST << bucket).map(|_| OnceLock::new()).collect());
        let _ = entries[at].set(value);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(OnceLock::get).flatten().filter_map(OnceLock::get)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        assert_eq!([0, 31, 32, 95, 96].map(place), [(0, 0), (0, 31), (1, 0), (1, 63), (2, 0)]);
        assert_eq!(place(usize::MAX).0, BUCKETS - 1);
        let mut places: Vec<_> = (0..10_000).map(place).collect();
        places.dedup();
        assert_eq!(places.len(), 10_000);
        assert!(places.iter().all(|(bucket, at)| *at < FIRST << bucket));
    }

    #[test]
    fn values_do_not_move_while_others_are_added_and_are_dropped_with_the_table() {
        let (table, value) = (KernelTable::new(), Arc::new(()));
        table.set(3, value.clone());
        let first = table.get(3).unwrap();
        thread::scope(|threads| {
            for thread in 0..4 {
                let (table, value) = (&table, &value);
                threads.spawn(move || (0..200).for_each(|number| table.set(number * 4 + thread, value.clone())));
            }
        });
        assert!(std::ptr::eq(first, table.get(3).unwrap()), "the first that was set");
        assert!(table.get(800).is_none() && table.get(usize::MAX).is_none());
        assert_eq!((table.iter().count(), Arc::strong_count(&value)), (800, 801));
        drop(table);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
