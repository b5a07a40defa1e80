//! Execution: the transitions of the picture in [`machine`](super).
//!
//! Only [`update_state`](Machine::update_state) decides between idle, parked and runnable. A parked stream is registered
//! with the stream and number that it waits for, so passing a point costs time only for the streams waiting for it.

use std::time::Duration;

use super::{DeviceId, EntryKind, EventState, Machine, RunState, StartedEntry, StreamId, StreamPoint};
use crate::error::Error;

impl<W> Machine<W> {
    /// Takes the next entry of a runnable stream. `now` returns the time for a record.
    pub(in super::super) fn start(
        &mut self,
        stream: StreamId,
        now: impl FnOnce() -> Duration,
    ) -> Option<StartedEntry<W>> {
        let begun = self.streams.get_mut(&stream)?;
        let RunState::Runnable(rank) = begun.state else { return None };
        let entry = begun.queue.pop_front()?;
        begun.state = RunState::Running;
        let number = begun.passed + 1;
        if let Some(device) = self.devices.get_mut(&begun.device) {
            device.runnable.remove(&rank);
        }
        Some(match entry.kind {
            EntryKind::Wait => StartedEntry::Waited,
            EntryKind::Work(work) => StartedEntry::Work(work),
            EntryKind::Record(event) => {
                // If a later record has moved the event, this record's time is not used.
                match self.events.get_mut(&event) {
                    Some(EventState { timed: true, mark: Some((point, time)), .. })
                        if *point == StreamPoint { stream, number } =>
                    {
                        *time = Some(now());
                    }
                    _ => {}
                }
                StartedEntry::Recorded
            }
        })
    }

    pub(in super::super) fn touches_memory(&mut self, stream: StreamId) {
        if let Some(begun) = self.streams.get_mut(&stream) {
            begun.touching_memory = true;
        }
    }

    pub(in super::super) fn finish(&mut self, stream: StreamId) {
        let Some(done) = self.streams.get_mut(&stream) else { return };
        debug_assert_eq!(done.state, RunState::Running);
        (done.state, done.touching_memory) = (RunState::Idle, false);
        let device = done.device;
        if self.devices.get(&device).is_some_and(|device| device.lost.is_some()) {
            return self.pass_all(device);
        }
        done.passed += 1;
        self.wake(stream);
        self.update_state(stream);
    }

    /// Ends a device with a fault. Returns its pending work, to be dropped where no lock is held. Running work might
    /// still access memory, so no stream of the device passes any point before it has ended.
    #[must_use]
    pub(in super::super) fn fail(&mut self, device: DeviceId, error: Error) -> Vec<W> {
        let mut dropped = Vec::new();
        match self.devices.get_mut(&device) {
            // The first fault stays.
            Some(failed) if failed.lost.is_none() => {
                failed.lost = Some(error);
                failed.runnable.clear();
                // Threads that wait for the device's work must check again.
                self.changed.push(device);
            }
            _ => return dropped,
        }
        // In the order of creation: destructors of the work can be users' code, whose order the seed must determine.
        for stream in self.streams.values_mut().filter(|stream| stream.device == device) {
            dropped.extend(stream.queue.drain(..).filter_map(|entry| match entry.kind {
                EntryKind::Work(work) => Some(work),
                EntryKind::Wait | EntryKind::Record(_) => None,
            }));
            if stream.state != RunState::Running {
                stream.state = RunState::Idle;
            }
        }
        self.pass_all(device);
        dropped
    }

    /// Makes all streams of a lost device pass all entries at once, as a point in one stream can stand for work in
    /// another. Does nothing while work that accesses memory is running.
    fn pass_all(&mut self, device: DeviceId) {
        if self.touches_memory_on(device) {
            return;
        }
        let streams = self.streams_of(device);
        for id in &streams {
            if let Some(stream) = self.streams.get_mut(id) {
                stream.passed = stream.enqueued;
            }
        }
        // After the loop above has emptied all streams, so that the streams woken here belong to other devices.
        for id in streams {
            self.wake(id);
            if self.streams.get(&id).is_some_and(|stream| stream.closing && stream.is_done()) {
                self.remove_stream(id);
            }
        }
    }

    /// Checks again the streams that wait for a point that `stream` has passed.
    fn wake(&mut self, stream: StreamId) {
        let Some(passed) = self.streams.get_mut(&stream) else { return };
        if passed.waiters.is_empty() {
            return;
        }
        let later = passed.waiters.split_off(&(passed.passed + 1));
        let woken = std::mem::replace(&mut passed.waiters, later);
        for waiter in woken.into_values().flatten() {
            if self.streams.get(&waiter).is_some_and(|stream| stream.state == RunState::Parked) {
                self.update_state(waiter);
            }
        }
    }

    /// Determines the next state of a stream that is not running.
    pub(super) fn update_state(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get(&id) else { return };
        let Some(head) = stream.queue.front() else {
            let closing = stream.closing;
            self.set(id, RunState::Idle);
            if closing {
                self.remove_stream(id);
            }
            return;
        };
        if let Some(point) = head.after.iter().copied().find(|point| !self.is_passed(*point)) {
            if let Some(other) = self.streams.get_mut(&point.stream) {
                other.waiters.entry(point.number).or_default().push(id);
            }
            self.set(id, RunState::Parked);
            return;
        }
        let (device, priority) = (stream.device, stream.priority);
        let Some(owner) = self.devices.get_mut(&device) else { return };
        owner.turns += 1;
        let rank = (priority, owner.turns);
        owner.runnable.insert(rank, id);
        self.changed.push(device);
        self.set(id, RunState::Runnable(rank));
    }

    fn set(&mut self, id: StreamId, state: RunState) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.state = state;
        }
    }
}
