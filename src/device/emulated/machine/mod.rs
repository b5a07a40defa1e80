//! Streams and events as a state machine: no threads, no memory, no clock.
//!
//! It decides in which order work of any type `W` may run. Worker threads ([`workers`](super::workers)) or a seeded
//! loop ([`simulation`](super::simulation)) take the next entry of a runnable stream ([`start`](Machine::start)), run
//! it without locking the machine, and report its end ([`finish`](Machine::finish)).
//!
//! A stream counts the entries that were enqueued and those that it has passed, so a point in a stream is a number. All
//! ordering between streams has one form: an entry must not start before certain points are passed. A wait is an entry
//! with a point and no work; implicit points order the legacy default stream with the blocking streams. Nothing blocks:
//! a stream whose first entry must wait is parked, and the stream that passes the point makes it runnable.
//!
//! ```text
//!            enqueue              start               finish, nothing left
//!    Idle ─────────────► Runnable ──────► Running ──────────────────────► Idle
//!      │                  ▲    ▲             │
//!      │ must wait        │    └─────────────┤ finish, more to do
//!      │                  │ points passed    │
//!      └──────────────► Parked ◄─────────────┘ finish, but the next must wait
//! ```
//!
//! Guarantees: streams run in order; a point, once passed, stays passed; a stream that is destroyed with pending work
//! finishes it; a device that fails drops its work, answers every query with its fault, and delays no other device
//! (points of its streams count as passed).

mod run;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};

pub(super) type DeviceId = u64;
pub(super) type StreamId = u64;
pub(super) type EventId = u64;

/// A point in a stream: passed once the stream has finished its `number`th entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamPoint {
    pub(super) stream: StreamId,
    pub(super) number: u64,
}

/// A set of devices whose streams can wait for each other's events.
#[derive(Debug)]
pub(super) struct Machine<W> {
    // Trees iterate in the order of creation, which a seed relies on, and use no memory when empty.
    devices: BTreeMap<DeviceId, DeviceState>,
    streams: BTreeMap<StreamId, StreamQueue<W>>,
    events: BTreeMap<EventId, EventState>,
    /// Devices that got a runnable stream, or ended, since the last call to [`take_changed`](Self::take_changed).
    changed: Vec<DeviceId>,
}

#[derive(Debug)]
struct DeviceState {
    legacy: StreamId,
    /// The streams that are ordered with the legacy default stream.
    blocking: BTreeSet<StreamId>,
    /// Ordered by priority, then by the time at which they became runnable.
    runnable: BTreeMap<Rank, StreamId>,
    turns: u64,
    streams: usize,
    lost: Option<Error>,
    retired: bool,
}

type Rank = (i32, u64);

#[derive(Debug)]
struct StreamQueue<W> {
    device: DeviceId,
    name: Arc<str>,
    priority: i32,
    queue: VecDeque<QueueEntry<W>>,
    enqueued: u64,
    passed: u64,
    state: RunState,
    touching_memory: bool,
    /// The stream was destroyed, and is removed when its work is done.
    closing: bool,
    /// The streams to check again when a number is passed.
    waiters: BTreeMap<u64, SmallVec<[StreamId; 2]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    Idle,
    Parked,
    Runnable(Rank),
    Running,
}

#[derive(Debug)]
struct QueueEntry<W> {
    after: SmallVec<[StreamPoint; 1]>,
    kind: EntryKind<W>,
}

#[derive(Debug)]
enum EntryKind<W> {
    Wait,
    Record(EventId),
    Work(W),
}

#[derive(Debug)]
struct EventState {
    device: DeviceId,
    timed: bool,
    mark: Option<(StreamPoint, Option<Duration>)>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct LaunchEvents {
    pub(super) waits: Vec<EventId>,
    pub(super) records: Vec<EventId>,
}

/// A stream's entry that was taken to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StartedEntry<W> {
    /// A wait that is over: call [`finish`](Machine::finish).
    Waited,
    /// An event that was recorded: call [`finish`](Machine::finish).
    Recorded,
    /// Run this work, then call [`finish`](Machine::finish).
    Work(W),
}

impl<W> Default for Machine<W> {
    fn default() -> Self {
        Self { devices: BTreeMap::new(), streams: BTreeMap::new(), events: BTreeMap::new(), changed: Vec::new() }
    }
}

impl<W> Machine<W> {
    pub(super) fn add_device(&mut self, device: DeviceId, legacy: StreamId) {
        let fresh = DeviceState {
            legacy,
            blocking: BTreeSet::new(),
            runnable: BTreeMap::new(),
            turns: 0,
            streams: 1,
            lost: None,
            retired: false,
        };
        self.devices.insert(device, fresh);
        self.streams.insert(legacy, StreamQueue::new(device, "default".into(), 0));
    }

    /// Removes a device with its streams and events once its work is done. Called once, as the device's last call.
    pub(super) fn retire(&mut self, device: DeviceId) {
        let streams = self.streams_of(device);
        if let Some(device) = self.devices.get_mut(&device) {
            device.retired = true;
        }
        for stream in streams {
            self.close_stream(stream);
        }
        self.events.retain(|_, event| event.device != device);
    }

    pub(super) fn is_running(&self) -> bool {
        self.streams.values().any(|stream| stream.state == RunState::Running)
    }

    /// All devices that are not removed.
    pub(super) fn devices(&self) -> Vec<DeviceId> {
        self.devices.keys().copied().collect()
    }

    /// True if a device is retired and its last stream has been removed.
    pub(super) fn is_over(&self, device: DeviceId) -> bool {
        !self.devices.contains_key(&device)
    }

    pub(super) fn add_stream(
        &mut self,
        device: DeviceId,
        stream: StreamId,
        name: String,
        priority: i32,
        non_blocking: bool,
    ) -> Result<()> {
        self.check_alive(device)?;
        let Some(owner) = self.devices.get_mut(&device) else { return Err(unknown("device", device)) };
        owner.streams += 1;
        if !non_blocking {
            owner.blocking.insert(stream);
        }
        self.streams.insert(stream, StreamQueue::new(device, name, priority));
        Ok(())
    }

    pub(in super::super) fn rename_stream(&mut self, id: StreamId, name: &str) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.name = name.into();
        }
    }

    pub(super) fn close_stream(&mut self, stream: StreamId) {
        let Some(closed) = self.streams.get_mut(&stream) else { return };
        closed.closing = true;
        if closed.is_done() {
            self.remove_stream(stream);
        }
    }

    fn remove_stream(&mut self, stream: StreamId) {
        let Some(gone) = self.streams.remove(&stream) else { return };
        debug_assert!(gone.queue.is_empty() && gone.waiters.is_empty());
        let Some(device) = self.devices.get_mut(&gone.device) else { return };
        device.blocking.remove(&stream);
        device.streams -= 1;
        if device.retired && device.streams == 0 {
            self.devices.remove(&gone.device);
            // Workers that wait for the end of the device must check again.
            self.changed.push(gone.device);
        }
    }

    pub(super) fn add_event(&mut self, device: DeviceId, event: EventId, timed: bool) -> Result<()> {
        self.check_alive(device)?;
        self.events.insert(event, EventState { device, timed, mark: None });
        Ok(())
    }

    pub(super) fn remove_event(&mut self, event: EventId) {
        self.events.remove(&event);
    }
}

impl<W> Machine<W> {
    pub(super) fn enqueue(&mut self, device: DeviceId, stream: StreamId, work: W) -> Result<()> {
        self.push(device, stream, SmallVec::new(), EntryKind::Work(work)).map(drop)
    }

    /// Enqueues a launch: work after a point of any stream and the last records of some events, followed by records of
    /// other events. Takes the work only if nothing is refused.
    pub(super) fn launch(
        &mut self,
        device: DeviceId,
        stream: StreamId,
        last: Option<StreamPoint>,
        events: &LaunchEvents,
        work: &mut Option<W>,
    ) -> Result<StreamPoint> {
        self.accepts(device, stream)?;
        if events.records.iter().any(|event| self.events.get(event).is_none_or(|event| event.device != device)) {
            return Err(Error::new(
                ErrorKind::Driver,
                "the graph records an event that was destroyed or belongs to another device",
            ));
        }
        let mut after: SmallVec<[StreamPoint; 1]> = last.into_iter().collect();
        for event in &events.waits {
            let event = self.events.get(event).ok_or_else(|| unknown("event", *event))?;
            self.check_alive(event.device)?;
            after.extend(event.mark.map(|(point, _)| point));
        }
        after.retain(|point| !self.is_passed(*point));
        let Some(work) = work.take() else { return Err(Error::new(ErrorKind::Driver, "there is nothing to launch")) };
        let number = self.push(device, stream, after, EntryKind::Work(work))?;
        for event in &events.records {
            self.record(device, *event, stream)?;
        }
        Ok(StreamPoint { stream, number })
    }

    pub(super) fn record(&mut self, device: DeviceId, event: EventId, stream: StreamId) -> Result<()> {
        let owner = self.events.get(&event).ok_or_else(|| unknown("event", event))?.device;
        if owner != device {
            return Err(Error::new(ErrorKind::Driver, "an event can only be recorded on a stream of its own device"));
        }
        let number = self.push(device, stream, SmallVec::new(), EntryKind::Record(event))?;
        if let Some(event) = self.events.get_mut(&event) {
            event.mark = Some((StreamPoint { stream, number }, None));
        }
        Ok(())
    }

    /// Makes a stream wait for an event's last record, even if the event is recorded again or destroyed afterwards.
    pub(super) fn wait(&mut self, device: DeviceId, stream: StreamId, event: EventId) -> Result<()> {
        self.check_alive(device)?;
        self.check_stream(device, stream)?;
        let event = self.events.get(&event).ok_or_else(|| unknown("event", event))?;
        self.check_alive(event.device)?;
        let open = event.mark.map(|(point, _)| point).filter(|point| !self.is_passed(*point));
        // On the legacy default stream even a wait that is already over counts as work: it waits for all blocking
        // streams, and they wait for it (CUDA C++ Programming Guide, legacy default stream).
        if open.is_none() && self.devices.get(&device).is_none_or(|device| device.legacy != stream) {
            return Ok(());
        }
        self.push(device, stream, open.into_iter().collect(), EntryKind::Wait).map(drop)
    }

    fn push(
        &mut self,
        device: DeviceId,
        stream: StreamId,
        mut after: SmallVec<[StreamPoint; 1]>,
        kind: EntryKind<W>,
    ) -> Result<u64> {
        self.check_alive(device)?;
        self.check_stream(device, stream)?;
        let owner = &self.devices[&device];
        // The legacy default stream waits for all blocking streams, and they wait for it.
        if stream == owner.legacy {
            after.extend(owner.blocking.iter().filter_map(|other| self.tail(*other)));
        } else if owner.blocking.contains(&stream) {
            after.extend(self.tail(owner.legacy));
        }
        let Some(target) = self.streams.get_mut(&stream) else { return Err(unknown("stream", stream)) };
        target.enqueued += 1;
        target.queue.push_back(QueueEntry { after, kind });
        let number = target.enqueued;
        if target.state == RunState::Idle {
            self.update_state(stream);
        }
        Ok(number)
    }

    /// The end of a stream, if it has work pending.
    fn tail(&self, stream: StreamId) -> Option<StreamPoint> {
        let found = self.streams.get(&stream)?;
        (found.passed < found.enqueued).then_some(StreamPoint { stream, number: found.enqueued })
    }
}

impl<W> Machine<W> {
    pub(super) fn check_alive(&self, device: DeviceId) -> Result<()> {
        match self.devices.get(&device) {
            Some(DeviceState { lost: Some(error), .. }) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// True if a fault has ended a device and no work that is still running there accesses memory. No more work starts
    /// there.
    pub(super) fn has_ended(&self, device: DeviceId) -> bool {
        let is_lost = self.devices.get(&device).is_some_and(|device| device.lost.is_some());
        is_lost && !self.touches_memory_on(device)
    }

    pub(super) fn touches_memory_on(&self, device: DeviceId) -> bool {
        self.streams.values().any(|stream| stream.device == device && stream.touching_memory)
    }

    /// Fails if the stream refuses work, for a caller that must not lose its work.
    pub(super) fn accepts(&self, device: DeviceId, stream: StreamId) -> Result<()> {
        self.check_alive(device)?;
        self.check_stream(device, stream)
    }

    fn check_stream(&self, device: DeviceId, stream: StreamId) -> Result<()> {
        match self.streams.get(&stream) {
            Some(found) if found.device == device && (!found.closing || self.devices[&device].retired) => Ok(()),
            _ => Err(unknown("stream", stream)),
        }
    }

    pub(super) fn is_passed(&self, point: StreamPoint) -> bool {
        self.streams.get(&point.stream).is_none_or(|stream| stream.passed >= point.number)
    }

    /// The points at which all work of a stream is done; for the legacy default stream, of all blocking streams too.
    pub(super) fn ends(&self, device: DeviceId, stream: StreamId) -> Result<SmallVec<[StreamPoint; 1]>> {
        self.check_alive(device)?;
        self.check_stream(device, stream)?;
        let mut ends: SmallVec<[StreamPoint; 1]> = self.tail(stream).into_iter().collect();
        let owner = &self.devices[&device];
        if stream == owner.legacy {
            ends.extend(owner.blocking.iter().filter_map(|other| self.tail(*other)));
        }
        Ok(ends)
    }

    pub(super) fn owner_of(&self, event: EventId) -> Result<DeviceId> {
        self.events.get(&event).map(|event| event.device).ok_or_else(|| unknown("event", event))
    }

    /// True if an event's last record is passed, or if the event was never recorded.
    pub(super) fn is_recorded(&self, device: DeviceId, event: EventId) -> Result<bool> {
        self.check_alive(device)?;
        let event = self.events.get(&event).ok_or_else(|| unknown("event", event))?;
        self.check_alive(event.device)?;
        Ok(event.mark.is_none_or(|(point, _)| self.is_passed(point)))
    }

    pub(super) fn elapsed(&self, device: DeviceId, from: EventId, to: EventId) -> Result<Duration> {
        let (from, to) = (self.reached(device, from)?, self.reached(device, to)?);
        Ok(to.saturating_sub(from))
    }

    /// When an event was reached, on the clock of the machine's engine.
    pub(super) fn reached(&self, device: DeviceId, event: EventId) -> Result<Duration> {
        self.check_alive(device)?;
        let found = self.events.get(&event).ok_or_else(|| unknown("event", event))?;
        match found.mark {
            _ if !found.timed => {
                Err(Error::new(ErrorKind::Driver, "the event was created without timing, so it has no time"))
            }
            Some((point, Some(time))) if self.is_passed(point) => Ok(time),
            _ => {
                Err(Error::new(ErrorKind::Driver, "the time of an event is not known until the device has reached it"))
            }
        }
    }

    pub(super) fn stream_name(&self, stream: StreamId) -> Option<&Arc<str>> {
        self.streams.get(&stream).map(|stream| &stream.name)
    }

    /// The number of a stream's pending entries for which `is` returns true.
    pub(super) fn pending(&self, stream: StreamId, is: impl Fn(&W) -> bool) -> usize {
        let queue = self.streams.get(&stream).map(|stream| &stream.queue);
        queue.map_or(0, |queue| {
            queue.iter().filter(|entry| matches!(&entry.kind, EntryKind::Work(work) if is(work))).count()
        })
    }

    fn streams_of(&self, device: DeviceId) -> Vec<StreamId> {
        self.streams.iter().filter(|(_, stream)| stream.device == device).map(|(id, _)| *id).collect()
    }

    pub(super) fn device_of(&self, stream: StreamId) -> Option<DeviceId> {
        self.streams.get(&stream).map(|stream| stream.device)
    }

    /// The number of a device's runnable streams.
    pub(super) fn runnable(&self, device: DeviceId) -> usize {
        self.devices.get(&device).map_or(0, |device| device.runnable.len())
    }

    /// The stream that a device runs next.
    pub(super) fn next(&self, device: DeviceId) -> Option<StreamId> {
        self.devices.get(&device)?.runnable.values().next().copied()
    }

    pub(super) fn is_anything_runnable(&self) -> bool {
        self.devices.values().any(|device| !device.runnable.is_empty())
    }

    pub(super) fn all_runnable(&self) -> Vec<StreamId> {
        let mut streams: Vec<_> = self.devices.values().flat_map(|device| device.runnable.values().copied()).collect();
        streams.sort_unstable();
        streams
    }

    /// Takes the devices that got a runnable stream, or ended, since the last call; a device is listed once per change.
    pub(super) fn take_changed(&mut self) -> Vec<DeviceId> {
        std::mem::take(&mut self.changed)
    }
}

impl<W> StreamQueue<W> {
    fn new(device: DeviceId, name: String, priority: i32) -> Self {
        Self {
            device,
            name: name.into(),
            priority,
            queue: VecDeque::new(),
            enqueued: 0,
            passed: 0,
            state: RunState::Idle,
            touching_memory: false,
            closing: false,
            waiters: BTreeMap::new(),
        }
    }
}

impl<W> StreamQueue<W> {
    /// True if the stream has no pending or running work; on a lost device, if none of the device's work is running.
    fn is_done(&self) -> bool {
        self.state == RunState::Idle && self.passed == self.enqueued
    }
}

fn unknown(what: &str, id: u64) -> Error {
    Error::new(ErrorKind::Driver, format!("{what} {id} does not exist on this device, or was destroyed"))
}
