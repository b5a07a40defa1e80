//! What is there no more: memory that was freed, streams and events that were destroyed.
//!
//! A call that names one of these is a mistake whatever the timing was, and is refused with what it was and who ended it.
//! That is known only where an address or a handle is never used for something else again: on the emulated device. On a
//! GPU a driver, or another library that shares it, may have given it to somebody else; there nothing is remembered, and
//! compute-sanitizer looks.
//!
//! A stream may be destroyed with work in it: that still runs, and what it touches stays watched until the host has seen
//! its end, or something that was made to come after it. Who forgot to see to that before can do it no more, and is told
//! so when the memory is touched or freed.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use super::universe::Key;
use crate::device::backend::RawEvent;

/// How many of each kind are remembered.
const MOST: usize = 1024;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gone {
    /// By their first byte.
    memory: Latest<u64, Freed>,
    streams: Latest<Key, Arc<str>>,
    events: Latest<RawEvent, ()>,
}

#[derive(Debug)]
struct Freed {
    bytes: u64,
    /// Which it was, and who freed it.
    told: String,
}

/// The latest of things that come and never change.
#[derive(Debug)]
struct Latest<K, V> {
    all: BTreeMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V> Default for Latest<K, V> {
    fn default() -> Self {
        Self { all: BTreeMap::new(), order: VecDeque::new() }
    }
}

impl<K: Copy + Ord, V> Latest<K, V> {
    fn note(&mut self, key: K, value: V) {
        if self.all.insert(key, value).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }
}

impl Gone {
    /// Memory was freed. `which`: for people.
    pub(super) fn free(&mut self, start: u64, bytes: u64, which: &str) {
        let thread = std::thread::current();
        let by = thread.name().map_or_else(|| "a thread".into(), |name| format!("thread `{name}`"));
        self.memory.note(start, Freed { bytes, told: format!("{which}, which {by} has freed") });
    }

    pub(super) fn end_stream(&mut self, key: Key, name: &Arc<str>) {
        self.streams.note(key, name.clone());
    }

    pub(super) fn end_event(&mut self, event: RawEvent) {
        self.events.note(event, ());
    }

    /// The memory that lay there, if there was some: which, and who freed it.
    pub(super) fn memory(&self, start: u64) -> Option<&str> {
        let (base, freed) = self.memory.all.range(..=start).next_back()?;
        (start - base < freed.bytes).then_some(&*freed.told)
    }

    pub(super) fn stream(&self, key: Key) -> Option<&Arc<str>> {
        self.streams.all.get(&key)
    }

    pub(super) fn has_event(&self, event: RawEvent) -> bool {
        self.events.all.contains_key(&event)
    }
}
