//! [`Activity`]: what an operator does at a moment, and [`Shares`]: of how much of a time it did what.

use std::time::Duration;

use crate::{
    condition::Status,
    hub::view::{ReaderWait, WriterWait},
    operator::{
        control::{ConnectedHub, Control, Hubs},
        operator_task::SeenTask,
    },
    sync::Waited,
};

/// What an operator does at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Activity {
    /// It computes: a worker thread polls it.
    Runs,
    /// It could run, and waits for a worker thread.
    Worker,
    /// It waits for a message.
    Message,
    /// It waits for room in a hub's queue.
    Room,
    /// It waits for an envelope: for a blank one to fill, or because a message has none at the reader's location.
    Envelope,
    /// Its run waits for work on a device.
    Device,
    /// It waits for memory.
    Memory,
    /// It waits until a point in time.
    Time,
    /// It waits for a condition of its own, such as a gate.
    Condition,
    /// Its run awaits a future that wakeline does not know: a timer, a file, a response.
    Future,
    /// It waits outside of the flow: an ingress for callers, an egress for its reader.
    Outside,
    /// The flow is paused, or runs in [steps](crate::flow::Steps).
    Paused,
    /// It has ended.
    Ended,
}

impl Activity {
    pub(crate) const ALL: [Self; 13] = [
        Self::Runs,
        Self::Worker,
        Self::Message,
        Self::Room,
        Self::Envelope,
        Self::Device,
        Self::Memory,
        Self::Time,
        Self::Condition,
        Self::Future,
        Self::Outside,
        Self::Paused,
        Self::Ended,
    ];

    /// One word, as in metrics: `runs`, `worker`, `message`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Worker => "worker",
            Self::Message => "message",
            Self::Room => "room",
            Self::Envelope => "envelope",
            Self::Device => "device",
            Self::Memory => "memory",
            Self::Time => "time",
            Self::Condition => "condition",
            Self::Future => "future",
            Self::Outside => "outside",
            Self::Paused => "paused",
            Self::Ended => "ended",
        }
    }

    /// For a table.
    pub(super) fn phrase(self) -> &'static str {
        match self {
            Self::Runs => "runs",
            Self::Worker => "waits for a worker",
            Self::Message => "waits for a message",
            Self::Room => "waits for room",
            Self::Envelope => "waits for an envelope",
            Self::Device => "waits for a device",
            Self::Memory => "waits for memory",
            Self::Time => "waits for a time",
            Self::Condition => "waits for a condition",
            Self::Future => "awaits a future",
            Self::Outside => "waits outside the flow",
            Self::Paused => "paused",
            Self::Ended => "ended",
        }
    }
}

/// Of how much of a time an operator did what: each between 0 and 1, together 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares(pub(super) [f32; Activity::ALL.len()]);

impl Shares {
    /// The share of one activity.
    pub fn of(&self, activity: Activity) -> f64 {
        f64::from(self.0[activity as usize])
    }

    /// The shares above zero, largest first.
    pub fn iter(&self) -> impl Iterator<Item = (Activity, f64)> {
        let mut all: Vec<_> = Activity::ALL.into_iter().map(|activity| (activity, self.of(activity))).collect();
        all.retain(|(_, share)| *share > 0.0);
        all.sort_by(|one, other| other.1.total_cmp(&one.1));
        all.into_iter()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Shares {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter().map(|(activity, share)| (activity.word(), share)))
    }
}

/// What an operator does now. Reads its state in place; no code of the user's runs where drops are deferred.
pub(super) fn activity(control: &Control, hubs: &Hubs, operator: usize) -> Activity {
    let task = &control.tasks[operator];
    let cell = task.status_cell();
    let (status, in_run) = cell.status();
    if status == Status::Never || task.has_ended() {
        return Activity::Ended;
    }
    let SeenTask { waited, in_poll, .. } = task.seen();
    if in_poll {
        // A task that polls a device does so in one poll after the other: see `polls_device`.
        return if waited == Waited::Device { Activity::Device } else { Activity::Runs };
    }
    let elsewhere = |other: Activity| match waited {
        Waited::Device => Activity::Device,
        Waited::Memory => Activity::Memory,
        Waited::Other => other,
    };
    // At a hub of chunks; or the wait is over, and the operator is about to be polled.
    let otherwise = |wait: Activity| if task.is_woken() { Activity::Worker } else { wait };
    if in_run {
        return match cell.in_run() {
            // One whose runs are in other tasks, all of which are busy.
            Some(_) if cell.has_workers() => at_outputs(hubs, operator)
                .or_else(|| at_inputs(hubs, operator, true))
                .unwrap_or_else(|| of_workers(&task.workers())),
            Some(wait) if wait.sends() => at_outputs(hubs, operator).unwrap_or(otherwise(Activity::Room)),
            Some(wait) if wait.receives() => at_inputs(hubs, operator, true).unwrap_or(otherwise(Activity::Message)),
            Some(_) => Activity::Future,
            None if task.is_woken() => Activity::Worker,
            None => elsewhere(Activity::Future),
        };
    }
    if control.is_paused() || task.permit().is_some() {
        return Activity::Paused;
    }
    match status {
        Status::WaitTime(_) => Activity::Time,
        Status::Ready => Activity::Worker,
        // An ingress.
        Status::WaitEvent if cell.has_workers() => at_outputs(hubs, operator).unwrap_or(otherwise(Activity::Outside)),
        // One that was woken may still lack something at another port.
        _ => at_inputs(hubs, operator, false).or_else(|| at_outputs(hubs, operator)).unwrap_or_else(|| {
            // At its ports: for more messages than there are, or at a hub of chunks.
            let wait = match cell.waits_elsewhere() {
                true if cell.is_egress() => Activity::Outside,
                true => Activity::Condition,
                false => Activity::Message,
            };
            if task.is_woken() { Activity::Worker } else { elsewhere(wait) }
        }),
    }
}

/// The poll in which an operator might query a device for its work, after one that has found the work not done. That it
/// takes longer than [`QUERIES`] shows that it computes.
pub(super) fn polls_device(control: &Control, operator: usize) -> Option<u32> {
    let SeenTask { waited, in_poll, polls, .. } = control.tasks[operator].seen();
    (in_poll && waited == Waited::Device).then_some(polls)
}

/// What a concurrent operator does whose workers are all in a run. One worker that computes is enough for `Runs`, and so on in
/// the order of the branches.
fn of_workers(workers: &[SeenTask]) -> Activity {
    let any = |is: fn(&SeenTask) -> bool| workers.iter().any(is);
    if workers.is_empty() || any(|worker| worker.in_poll && worker.waited != Waited::Device) {
        Activity::Runs
    } else if any(|worker| worker.waited == Waited::Device) {
        Activity::Device
    } else if any(|worker| worker.waited == Waited::Memory) {
        Activity::Memory
    } else if any(|worker| worker.is_woken) {
        Activity::Worker
    } else {
        Activity::Future
    }
}

/// Longer than one poll queries a device: see `stream/wait_strategy.rs`.
pub(super) const QUERIES: Duration = Duration::from_micros(100);

/// What an operator waits for at its inputs.
fn at_inputs(hubs: &Hubs, operator: usize, in_run: bool) -> Option<Activity> {
    let inputs = hubs.of(operator).filter(|hub| hub.to == operator && (in_run || hub.reader_waits));
    let mut waits: Vec<_> = inputs.filter_map(|hub| reader_waits(hub, in_run)).collect();
    waits.sort_unstable_by_key(|wait| *wait != Activity::Message);
    waits.first().copied()
}

pub(super) fn reader_waits(hub: &ConnectedHub, in_run: bool) -> Option<Activity> {
    Some(match hub.state.reader_waits(in_run)? {
        ReaderWait::Message => Activity::Message,
        ReaderWait::Envelope => Activity::Envelope,
        ReaderWait::Move => Activity::Worker,
    })
}

/// What an operator waits for at its outputs.
fn at_outputs(hubs: &Hubs, operator: usize) -> Option<Activity> {
    hubs.of(operator).filter(|hub| hub.from == operator).find_map(writer_waits)
}

pub(super) fn writer_waits(hub: &ConnectedHub) -> Option<Activity> {
    Some(match hub.state.writer_waits()? {
        WriterWait::Room => Activity::Room,
        WriterWait::Blank | WriterWait::Copy => Activity::Envelope,
    })
}
