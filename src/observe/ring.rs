//! [`Ring`]: the last events of one thread. The thread overwrites the oldest ones, and never waits; another thread copies them
//! meanwhile.
//!
//! This file does not depend on any device, so that a model checker can explore all of its interleavings on a CPU
//! (`tests/loom/ring.rs` includes it unchanged).
//!
//! ```text
//!            overwritten │ kept: the last `capacity` entries
//!   entries  ── 4 ── 5 ──┼── 6 ── 7 ── 8 ── 9 ──┼── 10
//!                        └ begun - capacity      └ written   └ begun
//! ```
//!
//! The writer announces an entry (`begun`) before it overwrites the slot of an older one, and publishes it (`written`)
//! after that. A reader copies entries, and then reads `begun`: what may have been overwritten during the copy is not
//! returned. Guarantee: each entry that is returned is whole and was written under its number, and all entries from the first
//! one returned up to the last one that was written before the call are returned.

use std::sync::{Arc, OnceLock};

use crate::sync::{AtomicU64, Ordering, fence};

/// Words of an entry.
pub(crate) const WORDS: usize = 3;
/// Entries that are copied between two checks.
const COPIED: u64 = 256;

pub(crate) type Entry = [u64; WORDS];
type RingSlot = [AtomicU64; WORDS];
type RingSegment<const SEGMENT: usize> = Arc<[RingSlot; SEGMENT]>;

/// See the [module](self). Memory is allocated in segments of so many entries, a power of two, as they are first used.
pub(crate) struct Ring<const SEGMENT: usize> {
    /// Entries that were begun, and that are written. Only the writer changes them.
    begun: AtomicU64,
    written: AtomicU64,
    /// A power of two.
    capacity: u64,
    segments: Box<[OnceLock<RingSegment<SEGMENT>>]>,
}

/// Writes a [`Ring`].
pub(crate) struct RingWriter<const SEGMENT: usize> {
    ring: Arc<Ring<SEGMENT>>,
    /// The number of entries that are written.
    written: u64,
    /// That of the last entry, or the first one.
    segment: RingSegment<SEGMENT>,
}

/// What a call of [`Ring::copy`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingCopy {
    /// The numbers of the first entry that was copied, and of the first that was not written yet.
    pub(crate) first: u64,
    pub(crate) end: u64,
}

impl<const SEGMENT: usize> Ring<SEGMENT> {
    /// An empty ring of at least `capacity` entries, and its only writer.
    pub(crate) fn new(capacity: usize) -> (Arc<Self>, RingWriter<SEGMENT>) {
        const { assert!(SEGMENT.is_power_of_two()) };
        let capacity = capacity.clamp(SEGMENT, 1 << 30).next_power_of_two();
        let ring = Arc::new(Self {
            begun: AtomicU64::new(0),
            written: AtomicU64::new(0),
            capacity: capacity as u64,
            segments: (0..capacity / SEGMENT).map(|_| OnceLock::new()).collect(),
        });
        let segment = ring.segment(0);
        (ring.clone(), RingWriter { ring, written: 0, segment })
    }

    /// The number of entries that were written.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// The segment of an entry.
    fn segment(&self, number: u64) -> RingSegment<SEGMENT> {
        self.segments[self.place(number).0].get_or_init(new_segment).clone()
    }

    /// Copies the entries from the number `from` on that are still there.
    pub(crate) fn copy(&self, from: u64, out: &mut Vec<Entry>) -> RingCopy {
        let end = self.written.load(Ordering::Acquire);
        let mut first = from.max(end.saturating_sub(self.capacity)).min(end);
        let (mut next, start) = (first, out.len());
        while next < end {
            let until = end.min(next + COPIED);
            out.extend((next..until).map(|number| self.read(number)));
            fence(Ordering::Acquire);
            // Of those that were just copied, the ones before this number may be torn.
            let gone = self.begun.load(Ordering::Relaxed).saturating_sub(self.capacity);
            if gone > next {
                out.drain(start..start + (gone.min(until) - first) as usize);
                first = gone.min(end);
            }
            next = until.max(first);
        }
        RingCopy { first, end }
    }

    fn read(&self, number: u64) -> Entry {
        let (segment, at) = self.place(number);
        let slot = self.segments[segment].get().map(|segment| &segment[at]);
        slot.map_or([0; WORDS], |slot| [0, 1, 2].map(|word: usize| slot[word].load(Ordering::Relaxed)))
    }

    /// The last entry that was written, unless it is overwritten meanwhile.
    pub(crate) fn last(&self) -> Option<Entry> {
        let mut last = Vec::with_capacity(1);
        self.copy(self.written().checked_sub(1)?, &mut last);
        last.pop()
    }

    fn place(&self, number: u64) -> (usize, usize) {
        let at = (number & (self.capacity - 1)) as usize;
        (at / SEGMENT, at % SEGMENT)
    }
}

impl<const SEGMENT: usize> RingWriter<SEGMENT> {
    pub(crate) fn ring(&self) -> &Arc<Ring<SEGMENT>> {
        &self.ring
    }

    /// Writes an entry, over the oldest one if the ring is full.
    pub(crate) fn push(&mut self, entry: Entry) {
        if self.is_at_end_of_segment() {
            self.segment = self.ring.segment(self.written);
        }
        self.write(entry);
    }

    /// The same, unless the entry would be the first of a segment.
    #[inline]
    pub(crate) fn push_in_segment(&mut self, entry: Entry) -> bool {
        let has_room = !self.is_at_end_of_segment();
        if has_room {
            self.write(entry);
        }
        has_room
    }

    #[inline]
    fn is_at_end_of_segment(&self) -> bool {
        (self.written as usize).is_multiple_of(SEGMENT)
    }

    #[inline]
    fn write(&mut self, entry: Entry) {
        let slot = &self.segment[self.written as usize % SEGMENT];
        self.written += 1;
        self.ring.begun.store(self.written, Ordering::Relaxed);
        // A reader that sees one of the words below sees the number above.
        fence(Ordering::Release);
        slot[0].store(entry[0], Ordering::Relaxed);
        slot[1].store(entry[1], Ordering::Relaxed);
        slot[2].store(entry[2], Ordering::Relaxed);
        self.ring.written.store(self.written, Ordering::Release);
    }
}

fn new_segment<const SEGMENT: usize>() -> RingSegment<SEGMENT> {
    Arc::new(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))))
}
