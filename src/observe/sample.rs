//! [`FlowSample`]: what the operators and hubs of a flow do at one moment.
//!
//! Each operator is visited once, and its hubs with it: where a flow has thousands, nearly all of the time goes to fetching
//! their state from memory.

use std::time::Instant;

use super::activity::{Activity, QUERIES, activity, polls_device, reader_waits, writer_waits};
use crate::operator::control::{ConnectedHub, Control, Hubs};

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct FlowSample {
    pub(super) operators: Vec<SeenOperator>,
    pub(super) hubs: Vec<SeenHub>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SeenOperator {
    pub(super) activity: Activity,
    pub(super) runs: u64,
    /// The number of the poll that it is in.
    pub(super) poll: Option<u32>,
    /// Its runs are in other tasks, or its ports are used there.
    pub(super) has_workers: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeenHub {
    pub(super) queued: usize,
    pub(super) is_full: bool,
    /// What its writer and its reader wait for there, if they do not compute.
    pub(super) writer: Option<Activity>,
    pub(super) reader: Option<Activity>,
}

impl FlowSample {
    /// Takes a new sample in place of the last one. Drops are deferred.
    pub(super) fn take(&mut self, control: &Control, hubs: &Hubs) {
        let Self { operators: seen, hubs: seen_hubs } = self;
        seen.clear();
        seen_hubs.clear();
        seen_hubs.resize(hubs.all.len(), SeenHub::default());
        for (number, task) in control.tasks.iter().enumerate() {
            let activity = activity(control, hubs, number);
            let (cell, now) = (task.status_cell(), task.seen());
            let (poll, has_workers) = (now.in_poll.then_some(now.polls), cell.has_workers());
            seen.push(SeenOperator { activity, runs: cell.runs(), poll, has_workers });
            for (at, hub) in hubs.numbered(number).filter(|(_, hub)| hub.to == number) {
                seen_hubs[at] = SeenHub::of(hub);
            }
        }
        let queries: Vec<_> = (0..seen.len()).filter_map(|at| Some((at, polls_device(control, at)?))).collect();
        if !queries.is_empty() {
            let since = Instant::now();
            while since.elapsed() < QUERIES {
                std::hint::spin_loop();
            }
            for (number, poll) in queries {
                if polls_device(control, number) == Some(poll) {
                    seen[number].activity = Activity::Runs;
                }
            }
        }
    }

    /// Whether an end of a hub waits for this there. One that computes does not wait, whatever the hub lacks.
    pub(super) fn waits_at(&self, hub: &ConnectedHub, seen: &SeenHub, activity: Activity) -> bool {
        let ends = [(hub.from, seen.writer), (hub.to, seen.reader)];
        let does = |end: usize| self.operators.get(end).map(|seen| seen.activity);
        ends.iter().any(|(end, wait)| *wait == Some(activity) && does(*end) == Some(activity))
    }
}

impl SeenHub {
    fn of(hub: &ConnectedHub) -> Self {
        let fill = hub.state.fill();
        Self {
            queued: fill.queued,
            is_full: fill.queued >= fill.capacity,
            writer: writer_waits(hub),
            reader: reader_waits(hub, false),
        }
    }
}
