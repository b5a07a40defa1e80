//! [`Watchdogs`]: the warnings of one run, from its state at each sample.
//!
//! ```text
//!   each sample: one poll seen for too long ─────┐
//!   limit / 8:   an operator waits for too long ─┼─> begun: log, hooks   goes on: in snapshots   over: removed
//!   each sample: the supervisor found a stall ───┘
//! ```

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    long_waits::{Known, LongWaits, Look},
    sample::SeenOperator,
    warnings::{Warning, WarningCounts, WarningKind},
};
use crate::operator::control::Control;

/// The number of warnings in a snapshot.
const LISTED: usize = 64;
/// A poll is seen in so many samples at least: a process that was stopped for a while has not blocked a thread.
const SEEN: u32 = 3;
/// The time between two lines of the log about the same operator.
const LOGGED: Duration = Duration::from_secs(10);

/// When to warn. `Duration::MAX`: never.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) blocked: Duration,
    pub(super) waiting: Duration,
    pub(super) stalled: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { blocked: Duration::from_secs(1), waiting: Duration::from_secs(30), stalled: true }
    }
}

#[derive(Debug)]
pub(super) struct Watchdogs {
    limits: Limits,
    /// Those that have begun and are not over, oldest first.
    active: Vec<Active>,
    counts: WarningCounts,
    /// By operator and number of its task: a poll in progress.
    polls: FxHashMap<(usize, usize), Poll>,
    waits: LongWaits,
    /// When a line about an operator was last logged.
    logged: FxHashMap<(WarningKind, usize), Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Poll {
    number: u32,
    since: Instant,
    seen: u32,
}

/// A warning that is not over.
#[derive(Debug)]
struct Active {
    number: u64,
    kind: WarningKind,
    operators: Vec<usize>,
    since: Instant,
    began: Duration,
    sentence: String,
}

/// A warning that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) warning: Warning,
    pub(super) logs: bool,
}

/// What is the matter now.
struct Finding {
    operators: Vec<usize>,
    since: Instant,
    sentence: String,
}

impl Watchdogs {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            active: Vec::new(),
            counts: WarningCounts::default(),
            polls: FxHashMap::default(),
            waits: LongWaits::default(),
            logged: FxHashMap::default(),
        }
    }

    /// Looks at a run. Drops are deferred.
    pub(super) fn look(&mut self, look: Look<'_>, every: Duration) -> Vec<Begun> {
        let mut begun = Vec::new();
        let stalls = Self::stalls(look.control);
        let stalled: FxHashSet<_> = stalls.iter().flat_map(|stall| &stall.operators).copied().collect();
        if self.limits.stalled {
            self.update(WarningKind::Stalled, stalls, look.control, look.now, &mut begun);
        }
        let mut blocking = FxHashSet::default();
        if self.limits.blocked < Duration::MAX {
            let blocked = self.blocked(look);
            blocking.extend(blocked.iter().filter_map(|finding| finding.operators.first().copied()));
            self.update(WarningKind::Blocked, blocked, look.control, look.now, &mut begun);
        }
        let known = Known { stalled: &stalled, blocking: &blocking };
        match self.waits.find(look, self.limits.waiting, every, known) {
            Some(found) => {
                let found = found.into_iter().map(|wait| Finding {
                    operators: Self::with_section(look.control, wait.operator),
                    since: wait.since,
                    sentence: wait.sentence,
                });
                let found = found.collect();
                self.update(WarningKind::Waiting, found, look.control, look.now, &mut begun);
            }
            None => {
                let waits = &self.waits;
                let goes_on = |active: &Active| waits.goes_on(look, active.operators[0], active.since);
                self.active.retain(|active| active.kind != WarningKind::Waiting || goes_on(active));
            }
        }
        begun
    }

    /// The run has ended. Only a stall that ended it goes on.
    pub(super) fn end(&mut self, control: &Control) -> Vec<Begun> {
        let (now, mut begun) = (Instant::now(), Vec::new());
        self.active.retain(|active| active.kind == WarningKind::Stalled);
        if self.limits.stalled {
            let stalls = Self::stalls(control);
            self.update(WarningKind::Stalled, stalls, control, now, &mut begun);
        }
        begun
    }

    /// A warning that has begun was not handed on.
    pub(super) fn count_lost(&mut self) {
        self.counts.lost += 1;
    }

    pub(super) fn counts(&self) -> WarningCounts {
        self.counts
    }

    /// The warnings that are not over, oldest first.
    pub(super) fn listed(&self, control: &Control) -> Vec<Warning> {
        let now = Instant::now();
        self.active.iter().take(LISTED).map(|active| active.warning(control, now)).collect()
    }

    /// The polls that take too long.
    fn blocked(&mut self, Look { control, seen, now, .. }: Look<'_>) -> Vec<Finding> {
        let before = std::mem::take(&mut self.polls);
        let may_block = |operator| control.observed.get().is_some_and(|known| known.may_block[operator]);
        let mut found: Vec<Finding> = Vec::new();
        for (operator, SeenOperator { poll, has_workers, .. }) in seen.iter().enumerate() {
            if poll.is_none() && !has_workers || may_block(operator) || control.is_represented(operator) {
                continue;
            }
            let workers = control.tasks[operator].workers();
            let is_concurrent = !workers.is_empty();
            let polls = workers.iter().map(|worker| worker.in_poll.then_some(worker.polls));
            for (at, poll) in std::iter::once(*poll).chain(polls).enumerate() {
                let Some(number) = poll else { continue };
                let seen = before.get(&(operator, at)).filter(|poll| poll.number == number);
                let poll = match seen {
                    Some(poll) => Poll { seen: poll.seen.saturating_add(1), ..*poll },
                    None => Poll { number, since: now, seen: 1 },
                };
                self.polls.insert((operator, at), poll);
                if poll.seen < SEEN || now - poll.since < self.limits.blocked {
                    continue;
                }
                match found.last_mut().filter(|found| found.operators[0] == operator) {
                    Some(found) => found.since = found.since.min(poll.since),
                    None => found.push(Finding {
                        operators: Self::with_section(control, operator),
                        since: poll.since,
                        sentence: blocks(control, operator, is_concurrent),
                    }),
                }
            }
        }
        found
    }

    fn stalls(control: &Control) -> Vec<Finding> {
        let stalls = control.stalls().into_iter().map(|stall| Finding {
            sentence: format!(
                "operators wait only for each other, and no other operator can release them: {}",
                stall.waits.join("; ")
            ),
            operators: stall.operators,
            since: stall.since,
        });
        stalls.collect()
    }

    fn with_section(control: &Control, operator: usize) -> Vec<usize> {
        control.section(operator).map_or(vec![operator], |section| control.operators_of(section).to_vec())
    }

    /// Replaces the active warnings of one kind by those found.
    fn update(
        &mut self,
        kind: WarningKind,
        found: Vec<Finding>,
        control: &Control,
        now: Instant,
        begun: &mut Vec<Begun>,
    ) {
        let found = found.into_iter().map(|Finding { operators, since, sentence }| ((since, operators), sentence));
        let mut found: BTreeMap<_, _> = found.collect();
        self.active.retain_mut(|active| {
            if active.kind != kind {
                return true;
            }
            let key = (active.since, std::mem::take(&mut active.operators));
            let Some(((_, operators), sentence)) = found.remove_entry(&key) else { return false };
            (active.operators, active.sentence) = (operators, sentence);
            true
        });
        for ((since, operators), sentence) in found {
            let began = control.clock.elapsed().saturating_sub(now.saturating_duration_since(since));
            let number = WarningKind::ALL.into_iter().map(|kind| self.counts.of(kind)).sum();
            self.counts.add(kind);
            let active = Active { number, kind, operators, since, began, sentence };
            let key = (kind, active.operators.first().copied().unwrap_or_default());
            let logs = self.logged.get(&key).is_none_or(|before| now - *before >= LOGGED);
            if logs {
                self.logged.insert(key, now);
            }
            begun.push(Begun { warning: active.warning(control, now), logs });
            self.active.push(active);
        }
    }
}

impl Active {
    fn warning(&self, control: &Control, now: Instant) -> Warning {
        Warning {
            number: self.number,
            flow: control.name.clone(),
            kind: self.kind,
            operators: self.operators.iter().map(|operator| control.names[*operator].clone()).collect(),
            began: self.began,
            since: now.saturating_duration_since(self.since),
            sentence: self.sentence.clone(),
        }
    }
}

/// The sentence about an operator that blocks its thread.
fn blocks(control: &Control, operator: usize, is_concurrent: bool) -> String {
    let elsewhere = "make the blocking call in `tokio::task::spawn_blocking`";
    match control.section(operator) {
        Some(section) => format!(
            "section `{}` blocks a worker thread of the runtime, which delays the other tasks there: {elsewhere}",
            control.section_name(section)
        ),
        None => {
            let name = &control.names[operator];
            let own = if is_concurrent { "" } else { "give it a thread of its own with `.on_own_thread()`, or " };
            format!(
                "`{name}` blocks a worker thread of the runtime, which delays the other tasks there: {own}{elsewhere}"
            )
        }
    }
}
