//! [`Tombstones`]: memory that was freed, streams and events that were destroyed.
//!
//! A call that uses one of these is refused, whatever the timing, with an error that names the object and, for memory,
//! the thread that freed it. This works only on the emulated device, where addresses and handles are never reused. On a
//! GPU nothing is remembered, as the driver or another library can reuse them; use compute-sanitizer there.
//!
//! A stream can be destroyed with work in it. The accesses of that work are remembered until the host has observed the
//! end of the work, or of other work ordered after it. Without such an order, a later use or free of the memory is an
//! error.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use super::race_state::StreamKey;
use crate::device::backend::RawEvent;

/// The number of entries of each kind that are remembered.
const MAX_REMEMBERED: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Tombstones {
    memory: BoundedMap<u64, Freed>,
    streams: BoundedMap<StreamKey, Arc<str>>,
    events: BoundedMap<RawEvent, ()>,
}

#[derive(Debug)]
struct Freed {
    bytes: u64,
    /// The memory, and the thread that freed it.
    description: String,
}

/// A map of the latest [`MAX_REMEMBERED`] entries, which never change.
#[derive(Debug)]
struct BoundedMap<K, V> {
    all: BTreeMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V> Default for BoundedMap<K, V> {
    fn default() -> Self {
        Self { all: BTreeMap::new(), order: VecDeque::new() }
    }
}

impl<K: Copy + Ord, V> BoundedMap<K, V> {
    fn insert(&mut self, key: K, value: V) {
        if self.all.insert(key, value).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }
}

impl Tombstones {
    /// Records that memory was freed. `which` describes it in messages.
    pub(super) fn free(&mut self, start: u64, bytes: u64, which: &str) {
        let thread = std::thread::current();
        let by = thread.name().map_or_else(|| "a thread".into(), |name| format!("thread `{name}`"));
        self.memory.insert(start, Freed { bytes, description: format!("{which}, which {by} has freed") });
    }

    pub(super) fn end_stream(&mut self, key: StreamKey, name: &Arc<str>) {
        self.streams.insert(key, name.clone());
    }

    pub(super) fn end_event(&mut self, event: RawEvent) {
        self.events.insert(event, ());
    }

    /// A description of the memory that was at this address, if any, and of the thread that freed it.
    pub(super) fn memory(&self, start: u64) -> Option<&str> {
        let (base, freed) = self.memory.all.range(..=start).next_back()?;
        (start - base < freed.bytes).then_some(&*freed.description)
    }

    pub(super) fn stream(&self, key: StreamKey) -> Option<&Arc<str>> {
        self.streams.all.get(&key)
    }

    pub(super) fn has_event(&self, event: RawEvent) -> bool {
        self.events.all.contains_key(&event)
    }
}
