//! The race checker's state, shared by all devices of the process.
//!
//! There is one state, as events, host memory and copies can involve several devices. Its lock is a leaf: neither a
//! backend nor user code is called while it is held.
//!
//! The host is one observer. Work that the host has observed to be done comes before everything that is enqueued later,
//! on any stream, so it is stored in a single clock, the host's. An access is **known** to a new call if the host's
//! clock or the stream's own clock includes it. The streams' clocks therefore contain only work that was ordered on the
//! device and that the host has not observed yet.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::{
    happens_before::{Component, HappensBefore},
    report::verb,
    shadow::{AccessKind, Shadow, Stamp},
    tombstones::Tombstones,
    written::Written,
};
use crate::{
    device::{
        backend::{RawEvent, RawExec, RawStream},
        human,
    },
    error::{Error, ErrorKind, Result},
    sync::{Mutex, MutexGuard},
};

/// A stream of one checked device.
pub(super) type StreamKey = (u64, RawStream);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Device,
    Host,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) side: Side,
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) write: bool,
}

pub(super) type Regions = BTreeMap<(Side, u64), Region>;

pub(super) type Touches = SmallVec<[Touch; 4]>;

#[derive(Debug)]
pub(super) struct RaceState {
    next: Component,
    /// The work that the host has observed to be done.
    host: HappensBefore,
    streams: FxHashMap<StreamKey, Component>,
    pub(super) stream_states: FxHashMap<Component, StreamState>,
    /// Destroyed streams whose end the host has not observed.
    pub(super) retired: FxHashSet<Component>,
    /// The number of `retired` streams above which a cleanup starts.
    retired_limit: usize,
    /// For each event, its device and the clock of its last record.
    events: FxHashMap<RawEvent, (u64, Option<Arc<HappensBefore>>)>,
    pub(super) regions: Regions,
    /// The clock at the end of each exec's last launch.
    pub(super) execs: FxHashMap<(u64, RawExec), HappensBefore>,
    pub(super) tombstones: Tombstones,
}

#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) device: u64,
    pub(super) device_name: Arc<str>,
    pub(super) name: Arc<str>,
    /// Ordered with the legacy default stream.
    blocking: bool,
    tick: u64,
    /// The calls that the stream's next call comes after, including the stream's own.
    clock: HappensBefore,
    /// For a legacy default stream: the ends of blocking streams that were destroyed after its last call.
    inherited: HappensBefore,
}

#[derive(Debug)]
pub(super) struct Region {
    device: u64,
    device_name: Arc<str>,
    /// A number per device, for messages.
    number: u64,
    bytes: u64,
    shadow: Shadow,
    pub(super) written: Written,
    /// The memory belongs to a graph, and no launch has allocated it, or a launch has freed it.
    pub(super) unallocated: bool,
    borrowed: Borrowed,
}

/// The values of [`borrows`] at the host's last borrows of a region; 0 for never.
#[derive(Clone, Copy, Debug, Default)]
struct Borrowed {
    shared: u64,
    exclusive: u64,
}

/// The number of times that the host has borrowed memory, on all devices.
static BORROWS: AtomicU64 = AtomicU64::new(0);

/// The number of borrows so far. A graph's access that is recorded with this number ends earlier borrows of the same
/// memory.
pub(super) fn borrows() -> u64 {
    BORROWS.load(Ordering::Relaxed)
}

/// The number of destroyed streams that are remembered before all regions are searched for their accesses.
const MAX_RETIRED: usize = if cfg!(test) { 2 } else { 64 };

static RACE_STATE: LazyLock<Mutex<RaceState>> = LazyLock::new(|| Mutex::new(RaceState::new()));

pub(super) fn race_state() -> MutexGuard<'static, RaceState> {
    RACE_STATE.lock()
}

impl RaceState {
    fn new() -> Self {
        Self {
            next: 1,
            host: HappensBefore::default(),
            streams: FxHashMap::default(),
            stream_states: FxHashMap::default(),
            retired: FxHashSet::default(),
            retired_limit: MAX_RETIRED,
            events: FxHashMap::default(),
            regions: BTreeMap::new(),
            execs: FxHashMap::default(),
            tombstones: Tombstones::default(),
        }
    }

    pub(super) fn new_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn add_stream(
        &mut self,
        key: StreamKey,
        device_name: &Arc<str>,
        name: &str,
        blocking: bool,
    ) -> Component {
        let component = self.new_id();
        let state = StreamState {
            device: key.0,
            device_name: device_name.clone(),
            name: name.into(),
            blocking,
            tick: 0,
            clock: HappensBefore::default(),
            inherited: HappensBefore::default(),
        };
        self.stream_states.insert(component, state);
        if let Some(before) = self.streams.insert(key, component) {
            self.retire(before);
        }
        component
    }

    pub(super) fn rename_stream(&mut self, key: StreamKey, name: &str) {
        let state = self.streams.get(&key).and_then(|component| self.stream_states.get_mut(component));
        if let Some(state) = state {
            state.name = name.into();
        }
    }

    /// `remember` is set if the handle is never reused.
    pub(super) fn remove_stream(&mut self, key: StreamKey, remember: bool) {
        let Some(component) = self.streams.remove(&key) else { return };
        if let (true, Some(state)) = (remember, self.stream_states.get(&component)) {
            self.tombstones.end_stream(key, &state.name);
        }
        self.retire(component);
    }

    /// The component of a stream. A stream that another library created counts as an ordinary one.
    pub(super) fn stream(&mut self, key: StreamKey, device_name: &Arc<str>) -> Result<Component> {
        if let Some(component) = self.streams.get(&key) {
            return Ok(*component);
        }
        if let Some(name) = self.tombstones.stream(key) {
            let message = format!("stream `{name}` was destroyed: it can no longer be used");
            return Err(Error::new(ErrorKind::Usage, message));
        }
        Ok(self.add_stream(key, device_name, &format!("{:#x}", key.1.0), true))
    }

    pub(super) fn add_event(&mut self, device: u64, event: RawEvent) {
        self.events.insert(event, (device, None));
    }

    /// `remember` is set if the handle is never reused.
    pub(super) fn remove_event(&mut self, event: RawEvent, remember: bool) {
        if self.events.remove(&event).is_some() && remember {
            self.tombstones.end_event(event);
        }
    }

    pub(super) fn check_event(&self, event: RawEvent) -> Result<()> {
        if self.tombstones.has_event(event) {
            let message = "the event was destroyed: it can no longer be recorded, queried or waited for";
            return Err(Error::new(ErrorKind::Usage, message));
        }
        Ok(())
    }

    pub(super) fn add_region(&mut self, side: Side, start: u64, region: Region) {
        self.regions.insert((side, start), region);
    }

    /// The size of the memory that begins at this address.
    pub(super) fn size_of(&self, side: Side, start: u64) -> Option<u64> {
        self.regions.get(&(side, start)).map(|region| region.bytes)
    }

    /// Removes memory, even if work might still access it.
    pub(super) fn take_region(&mut self, side: Side, start: u64) -> Option<Region> {
        self.regions.remove(&(side, start))
    }

    /// Removes memory that is about to be freed. Fails if work might still access it, or if it was freed before.
    pub(super) fn remove_region(&mut self, side: Side, start: u64) -> Result<Option<Region>> {
        self.is_idle(side, start, "freed")?;
        let removed = self.regions.remove(&(side, start));
        if let (None, Side::Device, Some(freed)) = (&removed, side, self.tombstones.memory(start)) {
            return Err(Error::new(ErrorKind::InvalidMemory, format!("double free of {freed}")));
        }
        Ok(removed)
    }

    /// Records that memory was freed. Its address is never reused.
    pub(super) fn remember_freed(&mut self, start: u64, region: &Region) {
        self.tombstones.free(start, region.bytes, &region.describe(Side::Device));
    }

    /// Resets memory for a new owner. Fails if work might still access it.
    pub(super) fn renew_region(&mut self, side: Side, start: u64) -> Result<()> {
        self.is_idle(side, start, "reused")?;
        if let Some(region) = self.regions.get_mut(&(side, start)) {
            region.shadow = Shadow::default();
            region.written = Written::default();
        }
        Ok(())
    }

    fn is_idle(&self, side: Side, start: u64, becomes: &str) -> Result<()> {
        let Some(region) = self.regions.get(&(side, start)) else { return Ok(()) };
        if let Some(conflict) = region.shadow.conflict(&(0..region.bytes), true, |stamp| self.is_observed(stamp)) {
            let message = format!(
                "{} is {becomes} while {} might still {} bytes {:?} of it: first wait until {} has passed its call {}",
                region.describe(side),
                self.describe(&conflict.with, None),
                if conflict.writes { "write" } else { "read" },
                conflict.bytes,
                self.describe_stream(conflict.with.component),
                conflict.with.tick,
            );
            return Err(Error::new(ErrorKind::Race, message));
        }
        Ok(())
    }

    pub(super) fn remove_device(&mut self, device: u64) {
        let streams: Vec<_> = self.streams.keys().copied().filter(|(owner, _)| *owner == device).collect();
        for stream in streams {
            self.remove_stream(stream, false);
        }
        self.events.retain(|_, (owner, _)| *owner != device);
        self.regions.retain(|_, region| region.device != device);
        self.execs.retain(|(owner, _), _| *owner != device);
        // The device's accesses to other devices' memory still count. If there are none, its streams are forgotten at
        // once.
        self.collect_retired();
    }
}

impl RaceState {
    /// Adds a call into a stream. Returns the clock after it, and its number.
    pub(super) fn call(&mut self, component: Component) -> Result<(&HappensBefore, u64)> {
        let before = self.before(component)?.into_owned();
        let state = self.stream_states.get_mut(&component).ok_or_else(unknown)?;
        state.clock = before;
        state.inherited = HappensBefore::default();
        state.tick += 1;
        state.clock.include(component, state.tick);
        Ok((&state.clock, state.tick))
    }

    /// Adds a call that accesses memory into a stream. If the call races, it is refused and nothing changes.
    pub(super) fn access(&mut self, component: Component, kind: AccessKind, touches: &Touches) -> Result<u64> {
        let before = self.before(component)?;
        let new = Stamp { component, tick: 0, kind, in_graph: false };
        for touch in touches {
            self.check_ordered(&new, &before, touch)?;
            self.check_contents(&new, touch)?;
        }
        self.write(kind, touches);
        let (clock, tick) = self.call(component)?;
        let clock = clock.clone();
        self.mark(Stamp { tick, ..new }, touches, &clock);
        Ok(tick)
    }

    /// Fails if a new access is not ordered after an earlier one.
    pub(super) fn check_ordered(&self, new: &Stamp, before: &HappensBefore, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return Ok(()) };
        let known = |stamp: &Stamp| self.is_observed(stamp) || before.includes(stamp.component, stamp.tick);
        let conflict = region.shadow.conflict(&bytes, touch.write, known);
        conflict.map_or(Ok(()), |conflict| Err(self.race(new, touch, region, &conflict)))
    }

    /// Fails if the memory does not exist, or if none of the bytes to be read was ever written.
    pub(super) fn check_contents(&self, new: &Stamp, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return self.check_not_freed(new, touch) };
        if region.unallocated && !new.kind.is_new() {
            return Err(self.unallocated(new, touch, region));
        }
        if !touch.write && !region.written.has_any(&bytes) {
            return Err(self.unwritten(new, touch, region, bytes));
        }
        Ok(())
    }

    /// Records the accesses of a call whose clock is `clock`.
    pub(super) fn mark(&mut self, stamp: Stamp, touches: &Touches, clock: &HappensBefore) {
        let Self { regions, stream_states, host, .. } = self;
        let known = |stamp: &Stamp| {
            !stream_states.contains_key(&stamp.component)
                || host.includes(stamp.component, stamp.tick)
                || clock.includes(stamp.component, stamp.tick)
        };
        for touch in touches {
            if let Some((region, bytes)) = find_mut(regions, touch) {
                region.shadow.mark(&bytes, touch.write, stamp, known);
            }
        }
    }

    /// Marks the bytes that the call writes as written; for a copy, only those whose source bytes are.
    pub(super) fn write(&mut self, kind: AccessKind, touches: &Touches) {
        let held = match (kind, touches.first()) {
            (AccessKind::Copy(_), Some(from)) => self.region(from).map(|(region, bytes)| {
                let parts = region.written.within(&bytes).map(|part| part.start - bytes.start..part.end - bytes.start);
                parts.collect::<SmallVec<[Range<u64>; 2]>>()
            }),
            _ => None,
        };
        for touch in touches.iter().filter(|touch| touch.write) {
            let Some((region, bytes)) = find_mut(&mut self.regions, touch) else { continue };
            if kind.is_new() || (held.is_some() && touch.side == Side::Device) {
                region.written.remove(&bytes);
            }
            match &held {
                _ if kind.is_new() => {}
                None => region.written.add(&bytes),
                Some(held) => held.iter().for_each(|part| {
                    region.written.add(&(bytes.start + part.start..(bytes.start + part.end).min(bytes.end)));
                }),
            }
        }
    }

    /// Removes the accesses of call `tick`, which the device refused.
    pub(super) fn undo(&mut self, component: Component, tick: u64, touches: &Touches) {
        for touch in touches {
            if let Some((region, bytes)) = find_mut(&mut self.regions, touch) {
                region.shadow.remove_access(&bytes, component, tick);
            }
        }
    }

    /// Checks an access by the host itself, now.
    pub(super) fn host_access(&mut self, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return Ok(()) };
        let Some(conflict) = region.shadow.conflict(&bytes, touch.write, |stamp| self.is_observed(stamp)) else {
            return Ok(());
        };
        let message = format!(
            "the host {} bytes {:?} of {}, which {} {}; nothing orders them: first wait until {} \
             has passed its call {}",
            verb(touch.write),
            conflict.bytes,
            region.describe(touch.side),
            self.describe(&conflict.with, None),
            verb(conflict.writes),
            self.describe_stream(conflict.with.component),
            conflict.with.tick,
        );
        Err(Error::new(ErrorKind::Race, message))
    }

    /// Records that the host borrows memory, without a known end.
    pub(super) fn host_borrow(&mut self, touch: &Touch) {
        let number = BORROWS.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some((region, _)) = find_mut(&mut self.regions, touch) {
            let Borrowed { shared, exclusive } = &mut region.borrowed;
            *(if touch.write { exclusive } else { shared }) = number;
        }
    }

    /// Fails if the host might still borrow memory that a launch is about to use, as it has borrowed the memory since
    /// the node was added. `since` is the value of [`borrows`] when the node was added.
    pub(super) fn check_not_borrowed(&self, new: &Stamp, touch: &Touch, since: u64) -> Result<()> {
        let Some((region, bytes)) = self.region(touch).filter(|_| touch.side == Side::Host) else { return Ok(()) };
        let Borrowed { shared, exclusive } = region.borrowed;
        let exclusive = exclusive > since;
        if !(exclusive || touch.write && shared > since) {
            return Ok(());
        }
        let message = format!(
            "{} {} bytes {bytes:?} of {}, which the host has borrowed as `{}` since the node was added; nothing orders them: \
             a launch of the graph might run while the slice is in use",
            self.describe(new, None),
            verb(touch.write),
            region.describe(touch.side),
            if exclusive { "&mut [_]" } else { "&[_]" },
        );
        Err(Error::new(ErrorKind::Race, message))
    }

    pub(super) fn record(&mut self, event: RawEvent, clock: HappensBefore) {
        if let Some((_, recorded)) = self.events.get_mut(&event) {
            *recorded = Some(Arc::new(clock));
        }
    }

    pub(super) fn recorded(&self, event: RawEvent) -> Option<Arc<HappensBefore>> {
        self.events.get(&event)?.1.clone()
    }

    /// Adds a call into a stream after which further calls come after `clock`.
    pub(super) fn order(&mut self, component: Component, clock: &HappensBefore) -> Result<()> {
        self.call(component)?;
        self.order_after(component, clock);
        Ok(())
    }

    /// Makes the next call into a stream come after `clock` too.
    pub(super) fn order_after(&mut self, component: Component, clock: &HappensBefore) {
        let Some(mut state) = self.stream_states.remove(&component) else { return };
        let news = |other, tick| self.stream_states.contains_key(&other) && !self.host.includes(other, tick);
        state.clock.retain(|other, tick| other == component || news(other, tick));
        state.clock.merge(clock, |other, tick| other != component && news(other, tick));
        self.stream_states.insert(component, state);
    }

    /// The clock at the end of all work that is now in a stream. `whole` is set to include all blocking streams for the
    /// legacy default stream.
    pub(super) fn end(&self, component: Component, whole: bool) -> Result<HappensBefore> {
        if whole {
            return self.before(component).map(Cow::into_owned);
        }
        self.stream_states.get(&component).map(|state| state.clock.clone()).ok_or_else(unknown)
    }

    /// Records that the host has observed the calls in `clock` to be done.
    pub(super) fn observe(&mut self, clock: &HappensBefore) {
        self.host.merge(clock, |component, _| self.stream_states.contains_key(&component));
        let ended: SmallVec<[Component; 4]> = self.retired.iter().copied().filter(|c| self.is_ended(*c)).collect();
        for component in ended {
            self.forget(component);
        }
    }

    /// Records that a lost device runs no work any more. Work on other devices that its calls came after might still be
    /// running.
    pub(super) fn observe_end(&mut self, device: u64) {
        let mut ends = HappensBefore::default();
        let of_device = self.stream_states.iter().filter(|(_, state)| state.device == device);
        of_device.for_each(|(component, state)| ends.include(*component, state.tick));
        self.observe(&ends);
    }

    /// The calls that a new call into a stream comes after: the stream's own past and, between the legacy default
    /// stream and the blocking streams, the past of the other side.
    pub(super) fn before(&self, component: Component) -> Result<Cow<'_, HappensBefore>> {
        let state = self.stream_states.get(&component).ok_or_else(unknown)?;
        let legacy = self.streams.get(&(state.device, RawStream(0))).copied();
        let mut clock = Cow::Borrowed(&state.clock);
        let mut add = |other: Component, with: &StreamState| {
            let known = state.clock.includes(other, with.tick) || self.host.includes(other, with.tick);
            if with.tick > 0 && !known {
                clock.to_mut().merge(&with.clock, |_, _| true);
            }
        };
        if legacy == Some(component) {
            let blocking =
                self.stream_states.iter().filter(|(_, other)| other.blocking && other.device == state.device);
            blocking.for_each(|(other, with)| add(*other, with));
            clock.to_mut().merge(&state.inherited, |other, _| self.stream_states.contains_key(&other));
        } else if let (true, Some((other, with))) =
            (state.blocking, legacy.and_then(|c| self.stream_states.get_key_value(&c)))
        {
            add(*other, with);
        }
        Ok(clock)
    }

    fn is_observed(&self, stamp: &Stamp) -> bool {
        !self.stream_states.contains_key(&stamp.component) || self.host.includes(stamp.component, stamp.tick)
    }
}

impl RaceState {
    fn is_ended(&self, component: Component) -> bool {
        self.stream_states
            .get(&component)
            .is_none_or(|state| state.tick == 0 || self.host.includes(component, state.tick))
    }

    /// Handles the destruction of a stream. Its past counts until the host has observed its end.
    fn retire(&mut self, component: Component) {
        if self.is_ended(component) {
            return self.forget(component);
        }
        self.retired.insert(component);
        let state = &self.stream_states[&component];
        if let (true, Some(legacy)) = (state.blocking, self.streams.get(&(state.device, RawStream(0))).copied()) {
            let end = state.clock.clone();
            if let Some(legacy) = self.stream_states.get_mut(&legacy) {
                legacy.inherited.merge(&end, |_, _| true);
            }
        }
        if self.retired.len() > self.retired_limit {
            self.collect_retired();
        }
    }

    /// Forgets destroyed streams whose end the host has not observed, if no region has an access of theirs.
    fn collect_retired(&mut self) {
        let mut traces = FxHashSet::default();
        let Self { regions, stream_states, host, .. } = self;
        for region in regions.values_mut() {
            region.shadow.forget(|stamp| {
                !stream_states.contains_key(&stamp.component) || host.includes(stamp.component, stamp.tick)
            });
            traces.extend(region.shadow.stamps().map(|stamp| stamp.component));
        }
        let without_trace: Vec<_> = self.retired.difference(&traces).copied().collect();
        for component in without_trace {
            self.forget(component);
        }
        self.retired_limit = (self.retired.len() * 2).max(MAX_RETIRED);
    }

    /// Removes a stream all of whose work is ordered before every later call.
    fn forget(&mut self, component: Component) {
        self.stream_states.remove(&component);
        self.retired.remove(&component);
        self.host.retain(|other, _| other != component);
        for state in self.stream_states.values_mut() {
            state.clock.retain(|other, _| other != component);
            state.inherited.retain(|other, _| other != component);
        }
    }
}

impl RaceState {
    pub(super) fn region(&self, touch: &Touch) -> Option<(&Region, Range<u64>)> {
        let ((_, base), region) = self.regions.range(..=(touch.side, touch.start)).next_back()?;
        Some((region, region.part(touch, *base)?))
    }
}

/// Not reached: the caller has looked up the component under the same lock.
fn unknown() -> Error {
    Error::internal("a stream is unknown to the race checker")
}

pub(super) fn find_mut<'a>(regions: &'a mut Regions, touch: &Touch) -> Option<(&'a mut Region, Range<u64>)> {
    let ((_, base), region) = regions.range_mut(..=(touch.side, touch.start)).next_back()?;
    let bytes = region.part(touch, *base)?;
    Some((region, bytes))
}

impl Region {
    pub(super) fn new(device: u64, device_name: Arc<str>, number: u64, bytes: u64) -> Self {
        let (shadow, written) = (Shadow::default(), Written::default());
        Self { device, device_name, number, bytes, shadow, written, unallocated: false, borrowed: Borrowed::default() }
    }

    /// For page-locked host memory, which is initialised.
    pub(super) fn initialised(self) -> Self {
        Self { written: Written::all(self.bytes), ..self }
    }

    /// For memory of a graph, which its launches allocate.
    pub(super) fn unallocated(self) -> Self {
        Self { unallocated: true, ..self }
    }

    /// The part of the allocation that is accessed. The device reports an access past the end.
    fn part(&self, touch: &Touch, base: u64) -> Option<Range<u64>> {
        let start = touch.start.checked_sub(base)?;
        let end = start.saturating_add(touch.bytes).min(self.bytes);
        (start < end).then_some(start..end)
    }

    pub(super) fn describe(&self, side: Side) -> String {
        let kind = match side {
            Side::Device => "device memory",
            Side::Host => "pinned host memory",
        };
        format!("{kind} #{} ({}, {})", self.number, self.device_name, human::bytes(self.bytes))
    }
}

#[cfg(test)]
impl RaceState {
    /// The number of segments of an allocation and of entries of a stream's clock.
    pub(super) fn sizes(&self, side: Side, start: u64, key: StreamKey) -> (usize, usize) {
        let clock = self.streams.get(&key).map_or(0, |component| self.stream_states[component].clock.len());
        (self.regions.get(&(side, start)).map_or(0, |region| region.shadow.len()), clock)
    }

    /// The number of a device's streams that are not forgotten.
    pub(super) fn lines_of(&self, device: u64) -> usize {
        self.stream_states.values().filter(|state| state.device == device).count()
    }
}
