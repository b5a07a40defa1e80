//! Loops of any shape, with timers, `latest` readers, services and deliberate deadlocks.
//!
//! ```text
//!   feed ──> walk_0 <──> walk_1 ──┐ ──> exit ──> [ callers ]        ticks ──> log
//!              │  ^───────────────┘                                 a ──> b ──> a: stuck
//!              └ latest ──> show, every 20 ms
//! ```
//!
//! The number of a message determines how many hops it makes and, with the plan, which way it takes. So the plan
//! determines how often each operator runs, which parts end, and which operators each deadlock consists of.

mod build;
mod operators;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use wakeline::prelude::*;

use super::{
    data::world,
    plan::{Dice, Full, Limits},
};

/// Each divides the supervisor's interval of checks for deadlocks, so that a check often happens in the middle of
/// something.
const PERIODS: [u64; 6] = [5, 10, 20, 25, 50, 100];
/// The maximum time in which a part that can end does so after a stop.
const ENDS_WITHIN: u64 = 15_000;
/// The maximum time until a deadlock exists and is found.
const FOUND_WITHIN: u64 = 6_000;
/// The hops of a message that never leaves its loop.
const ENDLESS: u32 = u32::MAX;
/// The capacity of a hub that should fill up.
const FEW: usize = 2;

#[derive(Clone, Debug)]
pub(crate) struct Loops {
    seed: u64,
    parts: Vec<Part>,
    stop: Option<Stop>,
}

/// Times in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Stop {
    at: u64,
    within: Option<u64>,
}

/// Independent parts of a flow.
#[derive(Clone, Debug)]
enum Part {
    Walk(Walk),
    Stuck(Stuck),
    /// A source that runs every so many milliseconds, endlessly or so many times.
    Ticks {
        every: u64,
        count: Option<u64>,
    },
}

#[derive(Clone, Debug)]
struct Walk {
    feed: Feed,
    hops: Vec<u32>,
    walkers: Vec<Walker>,
    show: Option<Show>,
    /// A gate: the walker that it pauses, from the start for so many milliseconds.
    gate: Option<(usize, u64)>,
}

#[derive(Clone, Debug)]
struct Walker {
    ways: [usize; 3],
    pace: Pace,
}

#[derive(Clone, Copy, Debug)]
enum Pace {
    AtOnce,
    Every(u64),
    Sleeps(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feed {
    Source,
    Ingress,
    Service,
}

/// A reader of what walker 0 sends on its first way.
#[derive(Clone, Copy, Debug)]
struct Show {
    hub: Full,
    every: Option<u64>,
    /// The number of messages of a tick source that triggers the runs.
    ticks: Option<u64>,
}

#[derive(Clone, Debug)]
enum Stuck {
    /// It waits for a request and for its own messages to come back.
    Exchange {
        feed: Feed,
        /// A single request, whose source ends.
        once: bool,
        echoes: usize,
        back: Full,
        in_run: bool,
    },
    /// Walkers that make two messages of each one, in hubs without room for them.
    Flood { ways: Vec<[usize; 3]> },
    /// One branch has no room for what precedes the first message of the other, and both are taken in pairs.
    Pairs { relays: usize },
    /// A reader holds all of a hub's envelopes.
    Kept,
}

/// The way, one of three, that a message takes with so many hops left.
fn way(number: u64, left: u32) -> usize {
    Dice::new(token(number, left)).up_to(2)
}

/// Encodes a message: its number, and the hops left.
fn token(number: u64, left: u32) -> u64 {
    number << 32 | u64::from(left)
}

fn parts_of(token: u64) -> (u64, u32) {
    (token >> 32, token as u32)
}

impl Walk {
    /// How often each walker runs, and how often each of its ways is taken.
    fn visits(&self) -> Vec<(u64, [u64; 3])> {
        let mut visits = vec![(0, [0; 3]); self.walkers.len()];
        for (number, hops) in self.hops.iter().enumerate() {
            let mut at = 0;
            visits[at].0 += 1;
            for left in (1..=*hops).rev() {
                let way = way(number as u64, left);
                visits[at].1[way] += 1;
                at = self.walkers[at].ways[way];
                visits[at].0 += 1;
            }
        }
        visits
    }

    fn is_endless(&self) -> bool {
        self.hops.contains(&ENDLESS)
    }
}

impl Stuck {
    /// The operators that wait only for each other.
    fn operators(&self, part: usize) -> BTreeSet<String> {
        let mut names = BTreeSet::from([format!("log{part}")]);
        let several = |name: &str, count: usize| (0..count).map(|at| format!("{name}{part}_{at}")).collect::<Vec<_>>();
        match self {
            Self::Exchange { feed, once, echoes, .. } => {
                if *feed == Feed::Service {
                    names.clear();
                }
                names.insert(format!("exchange{part}"));
                names.extend(several("echo", *echoes));
                names.extend((*feed == Feed::Source && !once).then(|| format!("feed{part}")));
            }
            Self::Flood { ways } => {
                names.extend(several("walk", ways.len()));
                names.extend(["feed", "exit"].map(|name| format!("{name}{part}")));
            }
            Self::Pairs { relays } => {
                names.extend(["feed", "split", "join"].map(|name| format!("{name}{part}")));
                names.extend(several("relay", *relays));
            }
            Self::Kept => names = ["fill", "window"].map(|name| format!("{name}{part}")).into(),
        }
        names
    }
}

impl Loops {
    pub(crate) fn new(seed: u64, limits: Limits) -> Self {
        let mut dice = Dice::new(seed);
        let mut parts: Vec<_> =
            (0..dice.between(1, limits.operators.min(3))).map(|_| Part::new(&mut dice, limits)).collect();
        // An envelope may be held outside the flow, or by an operator in the middle of a run.
        let hides_envelopes = |part: &Part| match part {
            Part::Walk(walk) => walk.feed != Feed::Source || walk.is_endless(),
            Part::Stuck(Stuck::Exchange { feed, .. }) => *feed == Feed::Service,
            _ => false,
        };
        if parts.iter().any(hides_envelopes) {
            parts.retain(|part| !matches!(part, Part::Stuck(Stuck::Kept)));
        }
        let mut plan = Self { seed, parts, stop: None };
        let ends = plan.ends() || plan.stuck().next().is_some();
        if !ends || dice.one_in(4) {
            plan.stop = Some(plan.a_stop(&mut dice));
        }
        plan
    }

    /// A flow that is stopped at a random moment.
    pub(crate) fn stopped(seed: u64) -> Self {
        let mut plan = Self::new(seed, Limits::default());
        plan.stop = Some(plan.a_stop(&mut Dice::new(!seed)));
        plan
    }

    fn a_stop(&self, dice: &mut Dice) -> Stop {
        let at = 1 + dice.up_to(500) as u64;
        let soon = dice.up_to(400) as u64;
        let within = match dice.up_to(2) {
            0 if self.endless().next().is_none() => None,
            1 if self.endless().next().is_none() => Some(ENDS_WITHIN),
            _ => Some(soon),
        };
        Stop { at, within }
    }

    fn walks(&self) -> impl Iterator<Item = (usize, &Walk)> {
        self.parts.iter().enumerate().filter_map(|(at, part)| match part {
            Part::Walk(walk) => Some((at, walk)),
            _ => None,
        })
    }

    fn endless(&self) -> impl Iterator<Item = (usize, &Walk)> {
        self.walks().filter(|(_, walk)| walk.is_endless())
    }

    fn stuck(&self) -> impl Iterator<Item = BTreeSet<String>> {
        self.parts.iter().enumerate().filter_map(|(at, part)| match part {
            Part::Stuck(stuck) => Some(stuck.operators(at)),
            _ => None,
        })
    }

    /// It may be stopped before a deadlock exists.
    fn may_end(&self) -> bool {
        let sure = |part: &Part| match part {
            Part::Stuck(Stuck::Exchange { feed, .. }) => *feed != Feed::Service,
            Part::Stuck(stuck) => !matches!(stuck, Stuck::Kept),
            _ => false,
        };
        self.stop.is_some() && !self.parts.iter().any(sure)
    }

    /// It ends without a stop.
    fn ends(&self) -> bool {
        self.parts.iter().all(|part| match part {
            Part::Walk(walk) => !walk.is_endless(),
            Part::Stuck(_) => false,
            Part::Ticks { count, .. } => count.is_some(),
        })
    }
}

impl fmt::Display for Loops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts.iter().enumerate().try_for_each(|(at, part)| writeln!(f, "  part {at}: {part:?}"))?;
        write!(f, "  {:?}", self.stop)
    }
}

impl Part {
    fn new(dice: &mut Dice, limits: Limits) -> Self {
        match dice.up_to(7) {
            0 | 1 => Self::Ticks { every: dice.of(&PERIODS), count: dice.one_in(2).then(|| dice.up_to(20) as u64) },
            2 | 3 => Self::Stuck(match dice.up_to(5) {
                0 => Stuck::Flood { ways: ways(dice, limits) },
                1 => Stuck::Pairs { relays: dice.up_to(2) },
                2 => Stuck::Kept,
                _ => {
                    let feed = dice.of(&[Feed::Source, Feed::Source, Feed::Service]);
                    let once = dice.one_in(2);
                    Stuck::Exchange {
                        feed,
                        once,
                        echoes: dice.up_to(3),
                        back: dice.of(&[Full::Hold, Full::DropOldest, Full::Latest]),
                        // A message taken by a run no longer counts as waiting.
                        in_run: feed == Feed::Source && !once && dice.one_in(2),
                    }
                }
            }),
            _ => Self::Walk(Walk::new(dice, limits)),
        }
    }
}

impl Walk {
    fn new(dice: &mut Dice, limits: Limits) -> Self {
        let feed = dice.of(&[Feed::Source, Feed::Source, Feed::Ingress, Feed::Service]);
        let endless = feed == Feed::Source && dice.one_in(6);
        let hops = (0..dice.between(1, limits.messages.min(5) as usize))
            .map(|_| if endless { ENDLESS } else { dice.up_to(6) as u32 })
            .collect();
        let ways = ways(dice, limits);
        let walker = |ways| {
            let period = dice.of(&PERIODS);
            // Without a delay time would not advance.
            let pace = match dice.up_to(5) {
                0 => Pace::Sleeps(period),
                1 | 2 => Pace::Every(period),
                _ if endless => Pace::Every(period),
                _ => Pace::AtOnce,
            };
            Walker { ways, pace }
        };
        let walkers: Vec<_> = ways.into_iter().map(walker).collect();
        let hub = dice.of(&[Full::Latest, Full::Latest, Full::Hold, Full::DropOldest]);
        let (period, ticks) = (Some(dice.of(&PERIODS)), Some(dice.up_to(20) as u64));
        let show = match dice.up_to(5) {
            0 => Some(Show { hub: Full::Latest, every: None, ticks }),
            1 if hub != Full::Latest => Some(Show { hub, every: None, ticks: None }),
            2 | 3 => Some(Show { hub, every: period, ticks: None }),
            _ => None,
        };
        let gate = dice.one_in(5).then(|| (dice.up_to(walkers.len() - 1), 1 + dice.up_to(1000) as u64));
        Self { feed, hops, walkers, show, gate }
    }
}

/// A random graph in which each walker can be reached from the first.
fn ways(dice: &mut Dice, limits: Limits) -> Vec<[usize; 3]> {
    let last = dice.up_to(limits.operators.min(4) - 1);
    let mut any = || dice.up_to(last);
    (0..=last).map(|at| [if at < last { at + 1 } else { any() }, any(), any()]).collect()
}

/// Answers to requests, by their numbers.
type Answers = Vec<(u64, Result<u64>)>;

pub(crate) struct Ran {
    pub(crate) devices: Vec<Device>,
    outcome: Result<Report>,
    took: u64,
    shown: BTreeMap<usize, Shown>,
    /// The answers of each call to a service that is not stuck.
    answers: Answers,
}

/// The last message that a walker has sent to its reader, and the last that the reader saw.
#[derive(Clone, Default)]
struct Shown(Arc<AtomicU64>, Arc<AtomicU64>);

/// The operators that an error lists.
fn listed(error: &Error) -> BTreeSet<String> {
    let text = error.to_string();
    let each = text.split("\n  - ").skip(1);
    each.filter_map(|line| line.split('`').nth(1)).map(str::to_string).collect()
}

impl Loops {
    pub(crate) fn judge(&self, ran: &Ran) -> Vec<String> {
        let mut found = world(|world| std::mem::take(&mut world.wrong));
        let outcome = match &ran.outcome {
            Ok(report) => self.judge_end(report, ran),
            Err(error) if error.kind() == ErrorKind::Stalled => self.judge_stall(error, ran),
            Err(error) if error.kind() == ErrorKind::Cancelled => self.judge_overdue(error, ran),
            Err(_) => Err("the flow failed".into()),
        };
        if let Err(what) = outcome {
            let error = ran.outcome.as_ref().err().map_or("the flow ended".into(), |error| format!("{error:#}"));
            found.push(format!("{what}: after {} ms {error}", ran.took));
        }
        let fails = ran.outcome.as_ref().err().map(Error::kind);
        for (number, answer) in &ran.answers {
            let right = match answer {
                Ok(answer) => answer == number,
                Err(error) => {
                    fails == Some(error.kind())
                        || (error.kind() == ErrorKind::Closed && (self.stop.is_some() || fails.is_some()))
                }
            };
            if !right {
                found.push(format!("request {number} got the answer {answer:?}"));
            }
        }
        found
    }

    /// The time by which it must have ended after its stop, in milliseconds.
    fn limit(&self) -> Option<u64> {
        self.stop.and_then(|Stop { at, within }| Some(at + within?))
    }

    fn judge_end(&self, report: &Report, ran: &Ran) -> Result<(), String> {
        if let Some(stuck) = self.stuck().next().filter(|_| !self.may_end()) {
            return Err(format!("a deadlock of {stuck:?} was not found"));
        }
        if self.endless().next().is_some() {
            return Err("an endless loop ended".into());
        }
        if self.stop.is_some_and(|stop| ran.took > stop.at + ENDS_WITHIN) {
            return Err("it did not end after the stop".into());
        }
        for (part, Shown(sent, seen)) in &ran.shown {
            let last_is_seen =
                self.walks().any(|(at, walk)| at == *part && walk.show.is_some_and(|show| show.ticks.is_none()));
            let (sent, seen) = (sent.load(Ordering::Relaxed), seen.load(Ordering::Relaxed));
            if last_is_seen && sent != seen {
                return Err(format!("show{part} saw {seen:x} last instead of {sent:x}"));
            }
        }
        // A stopped flow takes only what was sent by then.
        for (part, walk) in self.walks().filter(|_| self.stop.is_none()) {
            let each = walk.visits().into_iter().enumerate().map(|(at, count)| (format!("walk{part}_{at}"), count.0));
            for (name, count) in each.chain([(format!("exit{part}"), walk.hops.len() as u64)]) {
                let runs = report.operator(&name).map_or(0, |operator| operator.runs);
                if runs != count {
                    return Err(format!("{name} ran {runs} times instead of {count}"));
                }
            }
        }
        Ok(())
    }

    fn judge_stall(&self, error: &Error, ran: &Ran) -> Result<(), String> {
        let mut listed = listed(error);
        // A stopped flow ends its sources.
        if self.stop.is_some() {
            listed.retain(|name| !name.starts_with("feed"));
        }
        let alone = error.to_string().contains("wait only for each other");
        let is_it = |mut stuck: BTreeSet<String>| {
            stuck.retain(|name| self.stop.is_none() || !name.starts_with("feed"));
            if alone { listed == stuck } else { listed.is_superset(&stuck) }
        };
        if !self.stuck().any(is_it) {
            return Err("a stall was reported that does not exist".into());
        }
        if ran.took > self.stop.map_or(0, |stop| stop.at) + FOUND_WITHIN {
            return Err("the deadlock was found too late".into());
        }
        Ok(())
    }

    fn judge_overdue(&self, error: &Error, ran: &Ran) -> Result<(), String> {
        let listed = listed(error);
        let Some(limit) = self.limit() else { return Err("it was cancelled".into()) };
        if ran.took != limit || listed.is_empty() {
            return Err(format!("it was aborted, but not after {limit} ms"));
        }
        for (part, walk) in self.endless() {
            let is_listed = |at: usize| listed.contains(&format!("walk{part}_{at}"));
            let left: Vec<_> = (0..walk.walkers.len()).filter(|at| is_listed(*at)).collect();
            // A circulating message may reach each walker that it can be sent to.
            if left.is_empty() || left.iter().any(|at| !walk.walkers[*at].ways.iter().all(|to| is_listed(*to))) {
                return Err(format!("part {part} was not listed"));
            }
        }
        if self.endless().next().is_none() && self.stop.is_some_and(|stop| stop.within >= Some(ENDS_WITHIN)) {
            return Err("it did not end after the stop".into());
        }
        Ok(())
    }
}
