//! [`find`]: finds the bottleneck of a flow in the shares of its operators' time.
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
//!
//! An operator that only waits, for a time or a condition or outside of wakeline, without any writer waiting for it, may do
//! so on purpose: one that reports once a second, or that listens for commands. It limits the flow only if no operator is
//! at its limit. The same holds for an ingress.
//!
//! The first of these that is found is the answer:
//!
//! 1. a poll that blocks a worker for long while other operators wait for one
//! 2. worker threads that are busy nearly [`ALL`] of the time, with no operator that computes for as much of it
//! 3. an operator that is at work, or makes its writer wait, nearly all of the time
//! 4. one that only waits, nearly all of the time
//! 5. a hub whose two ends take turns
//! 6. the third and fourth with [`BUSY`]
//! 7. operators that are ready and wait for a worker
//! 8. a loop, whose operators take turns since too few messages are in it

use std::time::Duration;

use super::{
    activity::Activity,
    bottleneck::{Bottleneck, Reason},
    records::{HubSummary, OperatorSummary, Summary},
};
use crate::operator::control::{Control, FlowParts, Hubs};

/// With fewer samples nothing is said.
const FEWEST: u32 = 10;
/// An operator that is busy for at least this share of the time limits the flow by itself.
const ALL: f64 = 0.85;
/// One that is busy for at least this share limits the flow if no hub is too small. So does one that waits for a device or
/// for memory, while which its envelopes are in use.
const BUSY: f64 = 0.6;
/// A share of the time that is worth mentioning.
const NOTABLE: f64 = 0.2;
/// One poll of this length blocks a worker.
const BLOCKS: Duration = Duration::from_millis(100);

/// The activities in which an operator waits neither for others of its flow nor for a worker.
const OWN: [Activity; 7] = [
    Activity::Runs,
    Activity::Device,
    Activity::Memory,
    Activity::Time,
    Activity::Condition,
    Activity::Future,
    Activity::Outside,
];
/// Those in which it neither computes nor uses a device: perhaps on purpose.
const IDLE: [Activity; 4] = [Activity::Time, Activity::Condition, Activity::Future, Activity::Outside];

pub(super) struct Finder<'a> {
    pub(super) control: &'a Control,
    pub(super) hubs: &'a Hubs,
    pub(super) summary: &'a Summary,
    pub(super) parts: Option<&'a FlowParts>,
}

pub(super) fn find(control: &Control, hubs: &Hubs, summary: &Summary) -> Option<Bottleneck> {
    let finder = Finder { control, hubs, summary, parts: control.observed.get() };
    if summary.samples < FEWEST {
        return None;
    }
    // An ingress says least: its callers may wait for an operator that is not busy all of the time.
    let idle = finder.idle(ALL).filter(|(_, activity)| *activity != Activity::Outside);
    finder
        .blocked_worker()
        .or_else(|| finder.busy_workers())
        .or_else(|| finder.at_work(ALL))
        .or_else(|| idle.map(|(number, activity)| finder.because(number, activity)))
        .or_else(|| finder.hub())
        .or_else(|| finder.at_work(BUSY))
        .or_else(|| finder.idle(BUSY).map(|(number, activity)| finder.because(number, activity)))
        .or_else(|| finder.workers())
        .or_else(|| finder.in_loop())
}

impl<'a> Finder<'a> {
    fn operators(&self) -> impl Iterator<Item = (usize, &'a OperatorSummary)> + use<'_, 'a> {
        let all = self.summary.operators.iter().enumerate();
        // The operators of a section are one task.
        all.filter(|(number, _)| !self.control.is_represented(*number))
    }

    /// Those that have not ended.
    fn open(&self) -> impl Iterator<Item = usize> + use<'_, 'a> {
        self.operators().map(|(number, _)| number).filter(|number| self.share(*number, Activity::Ended) < 0.5)
    }

    fn share(&self, operator: usize, activity: Activity) -> f64 {
        f64::from(self.summary.operators[operator].shares[activity as usize])
    }

    fn own(&self, operator: usize) -> f64 {
        OWN.iter().map(|activity| self.share(operator, *activity)).sum()
    }

    /// The largest share of an operator's time that it spends neither way, and with what.
    fn main(&self, operator: usize) -> (Activity, f64) {
        let shares = OWN.map(|activity| (activity, self.share(operator, activity)));
        shares.into_iter().max_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or((Activity::Runs, 0.0))
    }

    fn hub_summary(&self, number: usize) -> HubSummary {
        self.summary.hubs.get(number).copied().unwrap_or_default()
    }

    /// Runs in a second.
    pub(super) fn rate(&self, operator: usize) -> f64 {
        let runs = self.control.tasks[operator].status_cell().runs();
        let before = self.summary.operators.get(operator).map_or(runs, |operator| operator.runs);
        runs.saturating_sub(before) as f64 / self.summary.window.as_secs_f64().max(0.001)
    }

    /// Messages in a second.
    pub(super) fn passes(&self, hub: usize) -> f64 {
        let passed = self.hubs.all[hub].state.counts().taken.saturating_sub(self.hub_summary(hub).passed);
        passed as f64 / self.summary.window.as_secs_f64().max(0.001)
    }

    /// The largest share of the time for which a queue before the operator was full.
    fn pressed(&self, operator: usize) -> f64 {
        self.before(operator).map(|hub| hub.full).fold(0.0, f64::max)
    }

    fn before(&self, operator: usize) -> impl Iterator<Item = HubSummary> + use<'_, 'a> {
        let before = self.hubs.numbered(operator).filter(move |(_, hub)| hub.to == operator && hub.from != operator);
        before.map(|(number, _)| self.hub_summary(number))
    }

    /// The largest share of the time for which an operator behind it waited for its messages.
    fn starves(&self, operator: usize) -> f64 {
        let behind = self.hubs.numbered(operator).filter(|(_, hub)| hub.from == operator && hub.to != operator);
        behind.map(|(number, _)| self.hub_summary(number).message).fold(0.0, f64::max)
    }

    /// It only waits, without any writer that waits for it.
    fn is_idle(&self, operator: usize) -> bool {
        let activity = self.main(operator).0;
        IDLE.contains(&activity) && self.before(operator).all(|hub| hub.room < NOTABLE)
    }

    fn most(&self, activity: Activity) -> Option<(usize, f64)> {
        let shares = self.operators().map(|(number, _)| (number, self.share(number, activity)));
        shares.max_by(|one, other| one.1.total_cmp(&other.1))
    }

    pub(super) fn operator(&self, number: usize, reason: Reason, what: &str) -> Bottleneck {
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

    pub(super) fn window(&self) -> String {
        let seconds = self.summary.window.as_secs_f64();
        if seconds < 9.5 { format!("last {seconds:.1} s") } else { format!("last {seconds:.0} s") }
    }

    fn has_own_thread(&self, operator: usize) -> bool {
        self.parts.is_some_and(|parts| parts.may_block.get(operator).is_some_and(|has| *has))
    }

    /// An operator that blocks a worker, if others wait for one meanwhile.
    fn blocked_worker(&self) -> Option<Bottleneck> {
        let (_, waits) = self.most(Activity::Worker)?;
        let blocking = self.operators().filter(|(number, _)| !self.has_own_thread(*number));
        let (number, blocks) = blocking.max_by_key(|(_, operator)| operator.longest_poll)?;
        if waits < NOTABLE || blocks.longest_poll < BLOCKS {
            return None;
        }
        let what = format!(
            "it blocked its worker thread for up to {} ms at a time, and others waited for one {} of their time: give it a \
             thread of its own with `.on_own_thread()`",
            blocks.longest_poll.as_millis(),
            percent(waits)
        );
        Some(self.operator(number, Reason::BlockedWorker, &what))
    }

    /// The operator that the others wait for.
    fn at_work(&self, least: f64) -> Option<Bottleneck> {
        let elsewhere = |number: usize| self.share(number, Activity::Device) + self.share(number, Activity::Memory);
        let busy = self.open().filter(|number| self.own(*number) >= least || elsewhere(*number) >= BUSY);
        let busy: Vec<_> = busy.filter(|number| !self.is_idle(*number)).collect();
        let score = |number: usize| self.own(number) + 0.3 * self.pressed(number).max(self.starves(number));
        // Memory may be kept by the messages that an operator behind it is too slow for.
        let lacks_memory = |number: usize| self.main(number).0 == Activity::Memory;
        let is_kept = |number: usize| {
            let mut others = busy.iter().filter(|other| !lacks_memory(**other));
            lacks_memory(number) && others.any(|other| self.leads_to(number, *other))
        };
        let all = busy.iter().filter(|number| !is_kept(**number)).map(|number| (*number, score(*number)));
        let (number, _) = all.max_by(|one, other| one.1.total_cmp(&other.1))?;
        Some(self.because(number, self.main(number).0))
    }

    /// The operator that only waits, if it does so for this share of the time, and what it waits for. Of several, those that
    /// wait for its messages and its rate decide: one that runs a tenth as often counts half as much.
    fn idle(&self, least: f64) -> Option<(usize, Activity)> {
        let fastest = self.open().map(|number| self.sends(number)).fold(f64::MIN_POSITIVE, f64::max);
        let often = |number: usize| (self.sends(number) / fastest).max(0.001).powf(0.3);
        let score = |number: usize| (self.own(number) + self.starves(number)) * often(number);
        let idle = self.open().filter(|number| self.own(*number) >= BUSY && self.is_idle(*number));
        let (number, _) = idle.map(|number| (number, score(number))).max_by(|one, other| one.1.total_cmp(&other.1))?;
        (self.own(number) >= least).then(|| (number, self.main(number).0))
    }

    /// Its runs in a second, or the messages that it sends if there are more: an ingress has no runs.
    fn sends(&self, operator: usize) -> f64 {
        let behind = self.hubs.numbered(operator).filter(|(_, hub)| hub.from == operator);
        behind.map(|(number, _)| self.passes(number)).fold(self.rate(operator), f64::max)
    }

    /// Why an operator limits the flow.
    fn because(&self, number: usize, activity: Activity) -> Bottleneck {
        let share = percent(self.share(number, activity));
        let waits = || match &self.control.status(number).waits_for[..] {
            [] => String::new(),
            waits => format!(" ({})", waits.join(", ")),
        };
        match activity {
            Activity::Device => self.device(number, self.share(number, activity)),
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
            Activity::Outside => {
                let is_egress = self.control.tasks[number].status_cell().is_egress();
                let whom = if is_egress { "its reader" } else { "callers" };
                let what = format!("it waited for {whom} outside of the flow {share} of the time");
                self.operator(number, Reason::Outside, &what)
            }
            _ => self.operator(number, Reason::Host, &format!("it computed {share} of the time")),
        }
    }

    /// The operators that compute keep all workers of the runtime busy.
    fn busy_workers(&self) -> Option<Bottleneck> {
        let workers = self.parts?.workers? as f64;
        let runs = |number: usize| self.share(number, Activity::Runs);
        let shared: Vec<_> = self.open().filter(|number| !self.has_own_thread(*number)).collect();
        let busy = shared.iter().map(|number| runs(*number)).sum::<f64>() / workers;
        let most = shared.into_iter().max_by(|one, other| runs(*one).total_cmp(&runs(*other)))?;
        let what = || {
            let (busy, own) = (percent(busy.min(1.0)), percent(runs(most)));
            format!("it computed {own} of the time, and with the others kept all {workers} worker threads busy {busy}")
        };
        (busy >= ALL && runs(most) < ALL).then(|| self.operator(most, Reason::Workers, &what()))
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

    /// Operators that are ready wait for a worker.
    fn workers(&self) -> Option<Bottleneck> {
        let (number, share) = self.most(Activity::Worker)?;
        let what = || {
            let share = percent(share);
            format!("it was ready and waited for a worker thread {share}: the runtime has too few, or they are busy")
        };
        (share >= NOTABLE).then(|| self.operator(number, Reason::Workers, &what()))
    }

    /// The operator of a loop that takes the longest of its operators, if nearly always one of them is busy.
    fn in_loop(&self) -> Option<Bottleneck> {
        // Each look for a loop goes through the flow: only for operators that count.
        let busy: Vec<_> = self.open().filter(|number| self.own(*number) > 0.01).collect();
        if busy.iter().map(|number| self.own(*number)).sum::<f64>() < BUSY {
            return None;
        }
        let loops: Vec<_> = busy.into_iter().filter(|number| self.leads_to(*number, *number)).collect();
        let longest = loops.iter().copied().max_by(|one, other| self.own(*one).total_cmp(&self.own(*other)))?;
        if loops.iter().map(|number| self.own(*number)).sum::<f64>() < BUSY {
            return None;
        }
        let (activity, _) = self.main(longest);
        let mut found = self.because(longest, activity);
        found.sentence.push_str(", and is in a loop whose operators took turns: too few messages are in it");
        Some(found)
    }

    /// Whether messages of `from` may come to `to`.
    pub(super) fn leads_to(&self, from: usize, to: usize) -> bool {
        let (mut open, mut seen) = (vec![from], vec![false; self.control.tasks.len()]);
        while let Some(operator) = open.pop() {
            for hub in self.hubs.of(operator).filter(|hub| hub.from == operator) {
                if hub.to == to {
                    return true;
                }
                if !std::mem::replace(&mut seen[hub.to], true) {
                    open.push(hub.to);
                }
            }
        }
        false
    }
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}
