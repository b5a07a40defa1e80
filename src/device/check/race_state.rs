//! The race checker's state: one universe for all devices of the process.
//!
//! There is only one, because events, host memory and copies may concern several devices. Its lock is the innermost of
//! all: no backend and no user code is called under it.
//!
//! The host is one observer. Work that it has seen done comes before everything that is enqueued later, on any stream,
//! so it is kept in a single clock of the host's. An access is **known** to a new call if that clock or the stream's own
//! contains it. The streams' clocks thus hold only what was ordered on the device and not seen by the host yet.

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
    clock::{Clock, Component},
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
pub(super) type Key = (u64, RawStream);

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
    /// What the host has seen done.
    host: Clock,
    streams: FxHashMap<Key, Component>,
    pub(super) lines: FxHashMap<Component, StreamState>,
    /// Destroyed streams whose end the host has not seen.
    pub(super) retired: FxHashSet<Component>,
    /// The number of those that triggers a cleanup.
    fading_limit: usize,
    /// For each event its device, and the clock of its last record.
    events: FxHashMap<RawEvent, (u64, Option<Arc<Clock>>)>,
    pub(super) regions: Regions,
    /// The clock at the end of each exec's last launch.
    pub(super) execs: FxHashMap<(u64, RawExec), Clock>,
    pub(super) gone: Tombstones,
}

#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) device: u64,
    pub(super) device_name: Arc<str>,
    pub(super) name: Arc<str>,
    /// Ordered with the legacy default stream.
    blocking: bool,
    tick: u64,
    /// What the next call comes after, including the stream's own calls.
    clock: Clock,
    /// For a legacy default stream: the ends of blocking streams that were destroyed after its last call.
    inherited: Clock,
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
    /// It belongs to a graph, and no launch has allocated it, or one has freed it.
    pub(super) away: bool,
    borrowed: Borrowed,
}

/// When the host last borrowed memory, in terms of [`borrows`]: 0 for never.
#[derive(Clone, Copy, Debug, Default)]
struct Borrowed {
    shared: u64,
    exclusive: u64,
}

/// How many times the host has borrowed memory of any device.
static BORROWS: AtomicU64 = AtomicU64::new(0);

/// The number of borrows so far. An access of a graph that is recorded with it ends earlier borrows of the same memory.
pub(super) fn borrows() -> u64 {
    BORROWS.load(Ordering::Relaxed)
}

/// How many destroyed streams may be remembered before all regions are searched for their accesses.
const FADING: usize = if cfg!(test) { 2 } else { 64 };

static UNIVERSE: LazyLock<Mutex<RaceState>> = LazyLock::new(|| Mutex::new(RaceState::new()));

pub(super) fn race_state() -> MutexGuard<'static, RaceState> {
    UNIVERSE.lock()
}

impl RaceState {
    fn new() -> Self {
        Self {
            next: 1,
            host: Clock::default(),
            streams: FxHashMap::default(),
            lines: FxHashMap::default(),
            retired: FxHashSet::default(),
            fading_limit: FADING,
            events: FxHashMap::default(),
            regions: BTreeMap::new(),
            execs: FxHashMap::default(),
            gone: Tombstones::default(),
        }
    }

    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn add_stream(&mut self, key: Key, device_name: &Arc<str>, name: &str, blocking: bool) -> Component {
        let component = self.fresh();
        let line = StreamState {
            device: key.0,
            device_name: device_name.clone(),
            name: name.into(),
            blocking,
            tick: 0,
            clock: Clock::default(),
            inherited: Clock::default(),
        };
        self.lines.insert(component, line);
        if let Some(before) = self.streams.insert(key, component) {
            self.fade(before);
        }
        component
    }

    pub(super) fn rename_stream(&mut self, key: Key, name: &str) {
        let line = self.streams.get(&key).and_then(|component| self.lines.get_mut(component));
        if let Some(line) = line {
            line.name = name.into();
        }
    }

    /// `remember`: the handle is never reused.
    pub(super) fn remove_stream(&mut self, key: Key, remember: bool) {
        let Some(component) = self.streams.remove(&key) else { return };
        if let (true, Some(line)) = (remember, self.lines.get(&component)) {
            self.gone.end_stream(key, &line.name);
        }
        self.fade(component);
    }

    /// The component of a stream. A stream that was not created here, but by another library, counts as an ordinary
    /// one.
    pub(super) fn stream(&mut self, key: Key, device_name: &Arc<str>) -> Result<Component> {
        if let Some(component) = self.streams.get(&key) {
            return Ok(*component);
        }
        if let Some(name) = self.gone.stream(key) {
            let message = format!("stream `{name}` was destroyed: it can no longer be used");
            return Err(Error::new(ErrorKind::Usage, message));
        }
        Ok(self.add_stream(key, device_name, &format!("{:#x}", key.1.0), true))
    }

    pub(super) fn add_event(&mut self, device: u64, event: RawEvent) {
        self.events.insert(event, (device, None));
    }

    /// `remember`: the handle is never reused.
    pub(super) fn remove_event(&mut self, event: RawEvent, remember: bool) {
        if self.events.remove(&event).is_some() && remember {
            self.gone.end_event(event);
        }
    }

    pub(super) fn check_event(&self, event: RawEvent) -> Result<()> {
        if self.gone.has_event(event) {
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

    /// Removes memory, even if work may still touch it.
    pub(super) fn take_region(&mut self, side: Side, start: u64) -> Option<Region> {
        self.regions.remove(&(side, start))
    }

    /// Removes memory that is about to be freed. Fails if work may still touch it, or if it was freed before.
    pub(super) fn remove_region(&mut self, side: Side, start: u64) -> Result<Option<Region>> {
        self.is_idle(side, start, "freed")?;
        let removed = self.regions.remove(&(side, start));
        if let (None, Side::Device, Some(freed)) = (&removed, side, self.gone.memory(start)) {
            return Err(Error::new(ErrorKind::InvalidMemory, format!("double free of {freed}")));
        }
        Ok(removed)
    }

    /// Records that memory was freed whose address is never reused.
    pub(super) fn bury(&mut self, start: u64, region: &Region) {
        self.gone.free(start, region.bytes, &region.describe(Side::Device));
    }

    /// Makes memory new, as it has another owner from now on. Fails if work may still touch it.
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
        if let Some(conflict) = region.shadow.conflict(&(0..region.bytes), true, |stamp| self.is_seen(stamp)) {
            let message = format!(
                "{} is {becomes} while {} may still {} bytes {:?} of it: first wait until {} has passed its call {}",
                region.describe(side),
                self.describe(&conflict.with, None),
                if conflict.writes { "write" } else { "read" },
                conflict.bytes,
                self.describe_line(conflict.with.component),
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
        // Its accesses to other devices' memory still count; without any, its streams are forgotten at once.
        self.collect_retired();
    }
}

impl RaceState {
    /// Adds a call into a stream. Returns the clock after it, and its number.
    pub(super) fn call(&mut self, component: Component) -> Result<(&Clock, u64)> {
        let before = self.before(component)?.into_owned();
        let line = self.lines.get_mut(&component).ok_or_else(unknown)?;
        line.clock = before;
        line.inherited = Clock::default();
        line.tick += 1;
        line.clock.learn(component, line.tick);
        Ok((&line.clock, line.tick))
    }

    /// Adds a call into a stream that touches memory. If it races, it is refused and nothing changes.
    pub(super) fn access(&mut self, component: Component, what: AccessKind, touches: &Touches) -> Result<u64> {
        let before = self.before(component)?;
        let new = Stamp { component, tick: 0, what, in_graph: false };
        for touch in touches {
            self.comes_after(&new, &before, touch)?;
            self.holds(&new, touch)?;
        }
        self.write(what, touches);
        let (clock, tick) = self.call(component)?;
        let clock = clock.clone();
        self.mark(Stamp { tick, ..new }, touches, &clock);
        Ok(tick)
    }

    /// Fails if a new access is not ordered after an earlier one.
    pub(super) fn comes_after(&self, new: &Stamp, before: &Clock, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return Ok(()) };
        let known = |stamp: &Stamp| self.is_seen(stamp) || before.knows(stamp.component, stamp.tick);
        let conflict = region.shadow.conflict(&bytes, touch.write, known);
        conflict.map_or(Ok(()), |conflict| Err(self.race(new, touch, region, &conflict)))
    }

    /// Fails if the memory does not exist, or if what is read was never written.
    pub(super) fn holds(&self, new: &Stamp, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return self.is_there(new, touch) };
        if region.away && !new.what.is_new() {
            return Err(self.away(new, touch, region));
        }
        if !touch.write && !region.written.has_any(&bytes) {
            return Err(self.unwritten(new, touch, region, bytes));
        }
        Ok(())
    }

    /// Records the accesses of a call with this clock.
    pub(super) fn mark(&mut self, stamp: Stamp, touches: &Touches, clock: &Clock) {
        let Self { regions, lines, host, .. } = self;
        let known = |stamp: &Stamp| {
            !lines.contains_key(&stamp.component)
                || host.knows(stamp.component, stamp.tick)
                || clock.knows(stamp.component, stamp.tick)
        };
        for touch in touches {
            if let Some((region, bytes)) = find_mut(regions, touch) {
                region.shadow.mark(&bytes, touch.write, stamp, known);
            }
        }
    }

    /// Marks what the call writes as written; for a copy, as far as its source is.
    pub(super) fn write(&mut self, what: AccessKind, touches: &Touches) {
        let held = match (what, touches.first()) {
            (AccessKind::Copy(_), Some(from)) => self.region(from).map(|(region, bytes)| {
                let parts = region.written.within(&bytes).map(|part| part.start - bytes.start..part.end - bytes.start);
                parts.collect::<SmallVec<[Range<u64>; 2]>>()
            }),
            _ => None,
        };
        for touch in touches.iter().filter(|touch| touch.write) {
            let Some((region, bytes)) = find_mut(&mut self.regions, touch) else { continue };
            if what.is_new() || (held.is_some() && touch.side == Side::Device) {
                region.written.remove(&bytes);
            }
            match &held {
                _ if what.is_new() => {}
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
                region.shadow.strip(&bytes, component, tick);
            }
        }
    }

    /// Checks an access by the host itself, now.
    pub(super) fn host_access(&mut self, touch: &Touch) -> Result<()> {
        let Some((region, bytes)) = self.region(touch) else { return Ok(()) };
        let Some(conflict) = region.shadow.conflict(&bytes, touch.write, |stamp| self.is_seen(stamp)) else {
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
            self.describe_line(conflict.with.component),
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

    /// Fails if the host may still borrow memory that a launch is about to use: it has borrowed it since the node was
    /// added. `since` is the value of [`borrows`] at that time.
    pub(super) fn is_not_borrowed(&self, new: &Stamp, touch: &Touch, since: u64) -> Result<()> {
        let Some((region, bytes)) = self.region(touch).filter(|_| touch.side == Side::Host) else { return Ok(()) };
        let Borrowed { shared, exclusive } = region.borrowed;
        let exclusive = exclusive > since;
        if !(exclusive || touch.write && shared > since) {
            return Ok(());
        }
        let message = format!(
            "{} {} bytes {bytes:?} of {}, which the host has borrowed as `{}` since the node was added; nothing orders them: \
             a launch of a graph may run while the slice is in use",
            self.describe(new, None),
            verb(touch.write),
            region.describe(touch.side),
            if exclusive { "&mut [_]" } else { "&[_]" },
        );
        Err(Error::new(ErrorKind::Race, message))
    }

    pub(super) fn record(&mut self, event: RawEvent, clock: Clock) {
        if let Some((_, recorded)) = self.events.get_mut(&event) {
            *recorded = Some(Arc::new(clock));
        }
    }

    pub(super) fn recorded(&self, event: RawEvent) -> Option<Arc<Clock>> {
        self.events.get(&event)?.1.clone()
    }

    /// Adds a call into a stream after which further calls come after `clock`.
    pub(super) fn order(&mut self, component: Component, clock: &Clock) -> Result<()> {
        self.call(component)?;
        self.learn(component, clock);
        Ok(())
    }

    /// Makes the next call into a stream come after `clock` too.
    pub(super) fn learn(&mut self, component: Component, clock: &Clock) {
        let Some(mut line) = self.lines.remove(&component) else { return };
        let news = |other, tick| self.lines.contains_key(&other) && !self.host.knows(other, tick);
        line.clock.retain(|other, tick| other == component || news(other, tick));
        line.clock.merge(clock, |other, tick| other != component && news(other, tick));
        self.lines.insert(component, line);
    }

    /// The clock at the end of all work that is in a stream now. `whole`: for the legacy default stream, including all
    /// blocking streams.
    pub(super) fn end(&self, component: Component, whole: bool) -> Result<Clock> {
        if whole {
            return self.before(component).map(Cow::into_owned);
        }
        self.lines.get(&component).map(|line| line.clock.clone()).ok_or_else(unknown)
    }

    /// Records that the host has seen this done.
    pub(super) fn observe(&mut self, clock: &Clock) {
        self.host.merge(clock, |component, _| self.lines.contains_key(&component));
        let ended: SmallVec<[Component; 4]> = self.retired.iter().copied().filter(|c| self.is_ended(*c)).collect();
        for component in ended {
            self.forget(component);
        }
    }

    /// Records that a lost device runs nothing any more. Work on other devices that its calls came after may still run.
    pub(super) fn observe_end(&mut self, device: u64) {
        let mut ends = Clock::default();
        let of_device = self.lines.iter().filter(|(_, line)| line.device == device);
        of_device.for_each(|(component, line)| ends.learn(*component, line.tick));
        self.observe(&ends);
    }

    /// What a call into a stream comes after: the stream's own past and, between the legacy default stream and the
    /// blocking ones, the past of the other side.
    pub(super) fn before(&self, component: Component) -> Result<Cow<'_, Clock>> {
        let line = self.lines.get(&component).ok_or_else(unknown)?;
        let legacy = self.streams.get(&(line.device, RawStream(0))).copied();
        let mut clock = Cow::Borrowed(&line.clock);
        let mut add = |other: Component, with: &StreamState| {
            let known = line.clock.knows(other, with.tick) || self.host.knows(other, with.tick);
            if with.tick > 0 && !known {
                clock.to_mut().merge(&with.clock, |_, _| true);
            }
        };
        if legacy == Some(component) {
            let blocking = self.lines.iter().filter(|(_, other)| other.blocking && other.device == line.device);
            blocking.for_each(|(other, with)| add(*other, with));
            clock.to_mut().merge(&line.inherited, |other, _| self.lines.contains_key(&other));
        } else if let (true, Some((other, with))) = (line.blocking, legacy.and_then(|c| self.lines.get_key_value(&c))) {
            add(*other, with);
        }
        Ok(clock)
    }

    fn is_seen(&self, stamp: &Stamp) -> bool {
        !self.lines.contains_key(&stamp.component) || self.host.knows(stamp.component, stamp.tick)
    }
}

impl RaceState {
    fn is_ended(&self, component: Component) -> bool {
        self.lines.get(&component).is_none_or(|line| line.tick == 0 || self.host.knows(component, line.tick))
    }

    /// Handles the destruction of a stream. Its past counts until the host has seen its end.
    fn fade(&mut self, component: Component) {
        if self.is_ended(component) {
            return self.forget(component);
        }
        self.retired.insert(component);
        let line = &self.lines[&component];
        if let (true, Some(legacy)) = (line.blocking, self.streams.get(&(line.device, RawStream(0))).copied()) {
            let end = line.clock.clone();
            if let Some(legacy) = self.lines.get_mut(&legacy) {
                legacy.inherited.merge(&end, |_, _| true);
            }
        }
        if self.retired.len() > self.fading_limit {
            self.collect_retired();
        }
    }

    /// Forgets destroyed streams whose end the host has not seen, but of which no region has an access either.
    fn collect_retired(&mut self) {
        let mut traces = FxHashSet::default();
        let Self { regions, lines, host, .. } = self;
        for region in regions.values_mut() {
            region
                .shadow
                .forget(|stamp| !lines.contains_key(&stamp.component) || host.knows(stamp.component, stamp.tick));
            traces.extend(region.shadow.stamps().map(|stamp| stamp.component));
        }
        let gone: Vec<_> = self.retired.difference(&traces).copied().collect();
        for component in gone {
            self.forget(component);
        }
        self.fading_limit = (self.retired.len() * 2).max(FADING);
    }

    /// Removes a stream whose work is all ordered before everything from now on.
    fn forget(&mut self, component: Component) {
        self.lines.remove(&component);
        self.retired.remove(&component);
        self.host.retain(|other, _| other != component);
        for line in self.lines.values_mut() {
            line.clock.retain(|other, _| other != component);
            line.inherited.retain(|other, _| other != component);
        }
    }
}

impl RaceState {
    pub(super) fn region(&self, touch: &Touch) -> Option<(&Region, Range<u64>)> {
        let ((_, base), region) = self.regions.range(..=(touch.side, touch.start)).next_back()?;
        Some((region, region.part(touch, *base)?))
    }
}

/// Never happens: the caller has looked up the component under the same lock.
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
        Self { device, device_name, number, bytes, shadow, written, away: false, borrowed: Borrowed::default() }
    }

    /// For page-locked host memory, which is initialised.
    pub(super) fn initialised(self) -> Self {
        Self { written: Written::all(self.bytes), ..self }
    }

    /// For memory of a graph, which launches allocate.
    pub(super) fn away(self) -> Self {
        Self { away: true, ..self }
    }

    /// The part of the allocation that is touched. An access past its end is for the device to report.
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
    pub(super) fn sizes(&self, side: Side, start: u64, key: Key) -> (usize, usize) {
        let clock = self.streams.get(&key).map_or(0, |component| self.lines[component].clock.len());
        (self.regions.get(&(side, start)).map_or(0, |region| region.shadow.len()), clock)
    }

    /// The number of a device's streams that are not forgotten.
    pub(super) fn lines_of(&self, device: u64) -> usize {
        self.lines.values().filter(|line| line.device == device).count()
    }
}
