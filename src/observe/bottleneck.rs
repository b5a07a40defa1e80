//! [`Bottleneck`]: what limits a flow, found in the shares of its operators' time.
//!
//! An operator that waits for a message waits for the operators before it, and one that waits for room or for an
//! envelope for those behind it. So the operator that spends the most time neither way is the one that the others wait
//! for: it computes, or waits for a device, for memory, for a time, for a condition. If every operator waits for others
//! most of the time, they take turns, because a hub between them is too small.
//!
//! ```text
//!   read  ── waits for room 90 % ──>  upper  ── runs 95 % ──>  write  waits for messages 92 %
//!                                       ^ the bottleneck
//! ```

use std::{fmt, sync::Arc, time::Duration};

use super::{
    activity::Activity,
    records::{HubSummary, OperatorSummary, Summary},
};
use crate::operator::control::{Control, Hubs};

/// With fewer samples nothing is said.
const FEWEST: u32 = 20;
/// An operator that is busy for at least this share of the time limits the flow by itself.
const ALL: f64 = 0.85;
/// One that is busy for at least this share limits the flow if no hub is too small. So does one that waits for a device or
/// for memory, while which its envelopes are in use.
const BUSY: f64 = 0.6;
/// A share of the time that is worth mentioning.
const NOTABLE: f64 = 0.2;
/// One poll of this length blocks a worker.
const BLOCKS: Duration = Duration::from_millis(100);

/// What limits a flow's throughput. `Display` is one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Bottleneck {
    /// The name of the operator or hub.
    pub at: Arc<str>,
    /// Why.
    pub reason: Reason,
    /// The sentence.
    pub sentence: String,
}

/// Why an operator or a hub limits a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Reason {
    /// The operator computes on the host.
    Host,
    /// The operator's work on a device, which it or an operator behind it waits for.
    Device,
    /// The operator waits for memory.
    Memory,
    /// The operator waits for points in time.
    Time,
    /// The operator waits for a condition of its own.
    Condition,
    /// The operator awaits a future that wakeline does not know.
    Future,
    /// The operator blocks its worker thread, which others wait for.
    BlockedWorker,
    /// The runtime has too few workers.
    Workers,
    /// The hub has too few envelopes.
    Envelopes,
    /// The hub's queue is too small: its writer and its reader take turns.
    Capacity,
    /// The ingress waits for callers outside of the flow.
    Outside,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// The activities in which an operator waits neither for others of its flow nor for a worker.
const OWN: [Activity; 6] =
    [Activity::Runs, Activity::Device, Activity::Memory, Activity::Time, Activity::Condition, Activity::Future];

struct Finder<'a> {
    control: &'a Control,
    hubs: &'a Hubs,
    summary: &'a Summary,
}

pub(super) fn find(control: &Control, hubs: &Hubs, summary: &Summary) -> Option<Bottleneck> {
    let finder = Finder { control, hubs, summary };
    if summary.samples < FEWEST {
        return None;
    }
    finder
        .blocked_worker()
        .or_else(|| finder.busiest(ALL))
        .or_else(|| finder.hub())
        .or_else(|| finder.busiest(BUSY))
        .or_else(|| finder.waiting())
}

impl Finder<'_> {
    fn operators(&self) -> impl Iterator<Item = (usize, &OperatorSummary)> {
        let all = self.summary.operators.iter().enumerate();
        // The operators of a section are one task.
        all.filter(|(number, _)| !self.control.is_represented(*number))
    }

    fn share(&self, operator: usize, activity: Activity) -> f64 {
        f64::from(self.summary.operators[operator].shares[activity as usize])
    }

    fn own(&self, operator: usize) -> f64 {
        OWN.iter().map(|activity| self.share(operator, *activity)).sum()
    }

    fn hub_summary(&self, number: usize) -> HubSummary {
        self.summary.hubs.get(number).copied().unwrap_or_default()
    }

    /// The largest share of the time for which a queue before the operator was full.
    fn pressed(&self, operator: usize) -> f64 {
        let before = self.hubs.all.iter().enumerate().filter(|(_, hub)| hub.to == operator && hub.from != operator);
        before.map(|(number, _)| self.hub_summary(number).full).fold(0.0, f64::max)
    }

    fn most(&self, activity: Activity) -> Option<(usize, f64)> {
        let shares = self.operators().map(|(number, _)| (number, self.share(number, activity)));
        shares.max_by(|one, other| one.1.total_cmp(&other.1))
    }

    fn operator(&self, number: usize, reason: Reason, what: &str) -> Bottleneck {
        let (at, window) = (self.control.names[number].clone(), self.window());
        let full = self.pressed(number);
        let queue = if full >= NOTABLE {
            format!(": its queue was full {} of the {window};", percent(full))
        } else {
            format!(": of the {window},")
        };
        let sentence = format!("`{at}` is the bottleneck{queue} {what}");
        Bottleneck { at, reason, sentence }
    }

    fn window(&self) -> String {
        let seconds = self.summary.window.as_secs_f64();
        if seconds < 9.5 { format!("last {seconds:.1} s") } else { format!("last {seconds:.0} s") }
    }

    /// An operator that blocks a worker, if others wait for one meanwhile.
    fn blocked_worker(&self) -> Option<Bottleneck> {
        let (_, waits) = self.most(Activity::Worker)?;
        let (number, blocks) = self.operators().max_by_key(|(_, operator)| operator.longest_poll)?;
        if waits < NOTABLE || blocks.longest_poll < BLOCKS {
            return None;
        }
        let what = format!(
            "it blocked its worker thread for {} ms at a time, and others waited for one {} of their time: give it a \
             thread of its own with `.on_own_thread()`",
            blocks.longest_poll.as_millis(),
            percent(waits)
        );
        Some(self.operator(number, Reason::BlockedWorker, &what))
    }

    /// The operator that the others wait for.
    fn busiest(&self, least: f64) -> Option<Bottleneck> {
        let score = |number: usize| self.own(number) + 0.3 * self.pressed(number);
        let open = self.operators().filter(|(number, _)| self.share(*number, Activity::Ended) < 0.5);
        let (number, _) = open.max_by(|one, other| score(one.0).total_cmp(&score(other.0)))?;
        let elsewhere = self.share(number, Activity::Device) + self.share(number, Activity::Memory);
        if self.own(number) < least && elsewhere < BUSY {
            return None;
        }
        let shares = OWN.map(|activity| (activity, self.share(number, activity)));
        let (activity, share) = shares.into_iter().max_by(|one, other| one.1.total_cmp(&other.1))?;
        let share = percent(share);
        let waits = || match &self.control.status(number).waits_for[..] {
            [] => String::new(),
            waits => format!(" ({})", waits.join(", ")),
        };
        Some(match activity {
            Activity::Device => self.device(number, &share),
            Activity::Memory => {
                self.operator(number, Reason::Memory, &format!("it waited for memory {share}{}", waits()))
            }
            Activity::Time => self.operator(number, Reason::Time, &format!("it waited for its time {share}")),
            Activity::Condition => {
                self.operator(number, Reason::Condition, &format!("its condition was not met {share}{}", waits()))
            }
            Activity::Future => {
                let what = format!(
                    "its runs awaited something outside of wakeline {share}, such as a timer, a file or a response"
                );
                self.operator(number, Reason::Future, &what)
            }
            _ => self.operator(number, Reason::Host, &format!("it computed {share} of the time")),
        })
    }

    /// The operator whose device work `waits` waited for: itself, or the only nearest one before it on a device.
    fn device(&self, waits: usize, share: &str) -> Bottleneck {
        let devices = self.control.observed.get().map(|known| &known.devices[..]).unwrap_or_default();
        let on_host = |operator: usize| devices.get(operator).is_none_or(|device| device.is_host());
        let (mut found, mut open, mut seen) = (Vec::new(), vec![waits], vec![false; self.control.tasks.len()]);
        while let Some(operator) = open.pop() {
            if std::mem::replace(&mut seen[operator], true) {
                continue;
            }
            if on_host(operator) {
                open.extend(self.hubs.all.iter().filter(|hub| hub.to == operator).map(|hub| hub.from));
            } else {
                found.push(operator);
            }
        }
        let waiter = &self.control.names[waits];
        match found[..] {
            [own] if own == waits => {
                let what = format!("it waited for {} {share} of the time", devices[own].name());
                self.operator(own, Reason::Device, &what)
            }
            [before] => {
                let what = format!("`{waiter}` waited for its work on {} {share} of the time", devices[before].name());
                self.operator(before, Reason::Device, &what)
            }
            _ => {
                let what = format!(
                    "it waited for a device {share} of the time: see the device times of the operators before it"
                );
                self.operator(waits, Reason::Device, &what)
            }
        }
    }

    /// The hub whose ends take turns.
    fn hub(&self) -> Option<Bottleneck> {
        let all = self.hubs.all.iter().enumerate().map(|(number, hub)| (hub, self.hub_summary(number)));
        let turns = |summary: &HubSummary| summary.room.min(summary.message);
        let envelopes = |summary: &HubSummary| summary.envelope.min(summary.message);
        let lack = |summary: &HubSummary| envelopes(summary).max(turns(summary));
        let (hub, summary) = all.max_by(|one, other| lack(&one.1).total_cmp(&lack(&other.1)))?;
        if lack(&summary) < NOTABLE {
            return None;
        }
        let (at, fill, window) = (hub.state.name().clone(), hub.state.fill(), self.window());
        if envelopes(&summary) >= turns(&summary) {
            let sides = [fill.arrivals, fill.blanks].into_iter().flatten();
            let count = sides.min_by_key(|(free, _)| *free).map_or(1, |(_, count)| count);
            let sentence = format!(
                "hub `{at}` is the bottleneck: of the {window}, all of its {count} envelopes were in use {}: try \
                 `.envelopes({})`",
                percent(summary.envelope),
                count + 1
            );
            return Some(Bottleneck { at, reason: Reason::Envelopes, sentence });
        }
        let sentence = format!(
            "hub `{at}` is the bottleneck: of the {window}, its writer waited for room {} and its reader for a message \
             {}: its queue of {} is too small for their turns",
            percent(summary.room),
            percent(summary.message),
            fill.capacity
        );
        Some(Bottleneck { at, reason: Reason::Capacity, sentence })
    }

    /// Nothing within the flow is busy.
    fn waiting(&self) -> Option<Bottleneck> {
        let (number, share) = self.most(Activity::Worker)?;
        if share >= NOTABLE {
            let what = format!(
                "it was ready and waited for a worker thread {}: the runtime has too few, or they are busy",
                percent(share)
            );
            return Some(self.operator(number, Reason::Workers, &what));
        }
        let (number, share) = self.most(Activity::Outside)?;
        if share >= BUSY {
            let what = format!("it waited for callers outside of the flow {} of the time", percent(share));
            return Some(self.operator(number, Reason::Outside, &what));
        }
        None
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}
