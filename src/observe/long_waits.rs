//! [`LongWaits`]: the operators that have waited for too long, and for no other operator that has.
//!
//! An operator that does nothing keeps those waiting that depend on it. Only the first of such a chain is found, and the
//! others are named with it:
//!
//! ```text
//!   read ──waits for a future──>  upper ──waits for a message──>  write ──waits for a message──>
//!   ^ found: "`read` waits for a future ..; `upper` and `write` wait for it"
//! ```
//!
//! An operator that waits as it should, for a time or for callers outside of the flow, is not found, and neither are those
//! behind it. A wait lasts as long as the operator has ended no run and none of its hubs has moved a message; within a
//! run that awaits something, as long as it is not polled.

use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    activity::{Activity, reader_waits, writer_waits},
    sample::SeenOperator,
};
use crate::operator::control::{Control, Hubs};

/// The longest time between two checks.
const RARELY: Duration = Duration::from_secs(10);
/// A check is made at most so often as it takes a third of a percent of a core.
const REST: u32 = 300;
/// The longest that a check may count as having taken: the thread may have been preempted.
const LONGEST: Duration = Duration::from_millis(100);
/// The number of operators that are counted behind one that waits. A thousand may have the same thousand behind them.
const MOST_BEHIND: usize = 100;
/// The number of operators that a sentence names.
const NAMED: usize = 3;

/// An operator that waits for too long.
#[derive(Debug)]
pub(super) struct LongWait {
    pub(super) operator: usize,
    pub(super) since: Instant,
    pub(super) sentence: String,
}

#[derive(Debug, Default)]
pub(super) struct LongWaits {
    /// By operator.
    seen: Vec<Option<Wait>>,
    next: Option<Instant>,
}

/// A wait of one operator.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// Its end is up to others, or to a device.
    is_suspect: bool,
    progress: (u64, u32),
    since: Instant,
    /// When it was last found to wait for an operator that waits itself.
    excused: Option<Instant>,
}

/// The state of a flow at a check.
#[derive(Clone, Copy)]
pub(super) struct Look<'a> {
    pub(super) control: &'a Control,
    pub(super) hubs: &'a Hubs,
    /// By operator.
    pub(super) seen: &'a [SeenOperator],
    pub(super) now: Instant,
}

/// Operators that have a warning of another kind: those that wait for one of them need none.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) stalled: &'a FxHashSet<usize>,
    /// They block a worker thread, which others may wait for.
    pub(super) blocking: &'a FxHashSet<usize>,
}

impl LongWaits {
    /// The long waits, if it is time for a check.
    pub(super) fn find(
        &mut self,
        look: Look<'_>,
        limit: Duration,
        every: Duration,
        known: Known<'_>,
    ) -> Option<Vec<LongWait>> {
        if limit == Duration::MAX || self.next.is_some_and(|next| look.now < next) {
            return None;
        }
        let began = Instant::now();
        self.seen.resize(look.seen.len(), None);
        let mut found = ChainFinder { look, limit, known, causes: FxHashMap::default(), seen: &mut self.seen };
        found.look_at_all();
        let first = found.first_of_each_chain();
        let rest = began.elapsed().min(LONGEST) * REST;
        self.next = Some(look.now + (limit / 8).min(RARELY).max(every).max(rest));
        Some(first)
    }

    /// Whether a wait that was found goes on.
    pub(super) fn goes_on(&self, look: Look<'_>, operator: usize, since: Instant) -> bool {
        let seen = self.seen.get(operator).copied().flatten();
        seen.is_some_and(|wait| wait.since == since && look.wait(operator) == Some((wait.is_suspect, wait.progress)))
    }
}

impl Look<'_> {
    fn activity(&self, operator: usize) -> Activity {
        self.seen[operator].activity
    }

    /// Whether the operator's wait is suspect, and a number that stays while it goes on. `None` if it does not wait.
    fn wait(&self, operator: usize) -> Option<(bool, (u64, u32))> {
        let activity = self.seen.get(operator)?.activity;
        let is_suspect = match activity {
            Activity::Runs | Activity::Ended => return None,
            Activity::Time | Activity::Outside | Activity::Paused => false,
            _ => true,
        };
        // The other operators of a section share the task.
        if self.control.is_represented(operator) {
            return None;
        }
        let task = &self.control.tasks[operator];
        let in_run = task.status_cell().status().1;
        let awaits = matches!(activity, Activity::Future | Activity::Device | Activity::Memory);
        let polls = match in_run && awaits {
            true => task.workers().iter().fold(task.seen().polls, |sum, worker| sum.wrapping_add(worker.polls)),
            false => 0,
        };
        let own = [operator];
        let all = self.control.section(operator).map_or(&own[..], |section| self.control.operators_of(section));
        Some((is_suspect, (self.control.progress(self.hubs, all), polls)))
    }

    /// The operators that this one waits for.
    fn causes(&self, operator: usize) -> Vec<usize> {
        let in_run = self.control.tasks[operator].status_cell().status().1;
        let own = |at: usize| self.control.first_of(at) == operator;
        let of_one = [operator];
        let all = self.control.section(operator).map_or(&of_one[..], |section| self.control.operators_of(section));
        let hubs = all.iter().flat_map(|at| self.hubs.of(*at));
        let causes = hubs.filter_map(|hub| match self.activity(operator) {
            Activity::Message if own(hub.to) && (in_run || hub.reader_waits) => {
                (reader_waits(hub, in_run) == Some(Activity::Message)).then_some(hub.from)
            }
            Activity::Room | Activity::Envelope if own(hub.from) => writer_waits(hub).map(|_| hub.to),
            _ => None,
        });
        let mut causes: Vec<_> = causes.map(|at| self.control.first_of(at)).filter(|at| *at != operator).collect();
        causes.sort_unstable();
        causes.dedup();
        causes
    }
}

struct ChainFinder<'a> {
    look: Look<'a>,
    limit: Duration,
    known: Known<'a>,
    seen: &'a mut Vec<Option<Wait>>,
    /// The operators that one waits for, if it has waited for half of the limit.
    causes: FxHashMap<usize, Vec<usize>>,
}

impl ChainFinder<'_> {
    fn look_at_all(&mut self) {
        let now = self.look.now;
        for operator in 0..self.seen.len() {
            let before = self.seen[operator];
            let wait = self.look.wait(operator).map(|(is_suspect, progress)| match before {
                Some(before) if (before.is_suspect, before.progress) == (is_suspect, progress) => before,
                _ => Wait { is_suspect, progress, since: now, excused: None },
            });
            self.seen[operator] = wait;
            if wait.is_some_and(|wait| wait.is_suspect && now - wait.since >= self.limit / 2) {
                let causes = match self.look.activity(operator) {
                    Activity::Worker => self.known.blocking.iter().copied().collect(),
                    _ => self.look.causes(operator),
                };
                self.causes.insert(operator, causes);
            }
        }
    }

    /// Whether others that wait for this operator are excused. They may have begun to wait a little earlier.
    fn holds_others_up(&self, operator: usize) -> bool {
        let waits = |wait: Wait| self.look.now - wait.since >= self.limit / 2;
        let Known { stalled, blocking } = self.known;
        stalled.contains(&operator) || blocking.contains(&operator) || self.seen[operator].is_some_and(waits)
    }

    fn first_of_each_chain(&mut self) -> Vec<LongWait> {
        let now = self.look.now;
        let (mut first, mut waiting_for) = (Vec::new(), FxHashMap::<usize, Vec<usize>>::default());
        let mut all: Vec<_> = self.causes.keys().copied().filter(|at| !self.known.stalled.contains(at)).collect();
        all.sort_unstable();
        // Those whose chains have a first one, which need not be suspect.
        let mut open = Vec::new();
        for &operator in &all {
            let held_up: Vec<_> =
                self.causes[&operator].iter().copied().filter(|cause| self.holds_others_up(*cause)).collect();
            let Some(wait) = &mut self.seen[operator] else { continue };
            if held_up.is_empty() {
                let since = wait.excused.unwrap_or(wait.since).max(wait.since);
                if now - since >= self.limit {
                    first.push(operator);
                }
                open.push(operator);
                continue;
            }
            wait.excused = Some(now);
            for cause in held_up {
                waiting_for.entry(cause).or_default().push(operator);
                open.extend(
                    (!self.causes.contains_key(&cause) || self.known.stalled.contains(&cause)).then_some(cause),
                );
            }
        }
        // The others wait for each other in a circle: one of them is found.
        let mut reached = FxHashSet::default();
        reach(&waiting_for, open, usize::MAX, &mut reached);
        for operator in all {
            let is_long = self.seen[operator].is_some_and(|wait| now - wait.since >= self.limit);
            if is_long && !reached.contains(&operator) {
                first.push(operator);
                reach(&waiting_for, vec![operator], usize::MAX, &mut reached);
            }
        }
        let found = first.into_iter().filter_map(|operator| {
            let mut behind = FxHashSet::default();
            reach(&waiting_for, vec![operator], MOST_BEHIND, &mut behind);
            behind.remove(&operator);
            let mut behind: Vec<_> = behind.into_iter().collect();
            behind.sort_unstable();
            let since = self.seen[operator]?.since;
            Some(LongWait { operator, since, sentence: self.sentence(operator, &behind) })
        });
        found.collect()
    }

    fn sentence(&self, operator: usize, behind: &[usize]) -> String {
        let (control, activity) = (self.look.control, self.look.activity(operator));
        let what = match &control.status(operator).waits_for[..] {
            [] => thing(activity).to_string(),
            several => several.join(" and for "),
        };
        let whose = |at: &usize| control.whose(*at);
        let mut sentence = format!("{} waits for {what}: {}", control.whose(operator), self.remedy(operator));
        if !behind.is_empty() {
            let verb = if behind.len() == 1 { "waits" } else { "wait" };
            let names = list(behind.iter().map(whose), "and");
            sentence.push_str(&format!("; {names} {verb} for it"));
        }
        sentence
    }

    /// Who would have to do what.
    fn remedy(&self, operator: usize) -> String {
        let (look, control) = (self.look, self.look.control);
        let causes = self.causes.get(&operator).map_or(&[][..], |causes| causes);
        let doing = |at: &usize| format!("{}, which {},", control.whose(*at), state(look.activity(*at)));
        let who = match causes {
            [] => "another operator".into(),
            some => list(some.iter().map(doing), "or"),
        };
        match look.activity(operator) {
            Activity::Message => format!("{who} would have to send one"),
            Activity::Room => format!("{who} would have to take a message"),
            Activity::Envelope => format!("{who} would have to drop an envelope"),
            Activity::Device => "that work would have to end; look for a kernel that does not".into(),
            Activity::Memory => "memory of that allocator would have to be freed".into(),
            Activity::Condition => "that condition would have to become ready".into(),
            Activity::Worker => {
                "a worker thread of the runtime would have to poll it: look for tasks that block theirs, or give the \
                 runtime more"
                    .into()
            }
            _ => "that future would have to complete; a timeout around it would turn this into an error".into(),
        }
    }
}

fn state(activity: Activity) -> &'static str {
    match activity {
        Activity::Paused => "is paused",
        Activity::Ended => "has ended",
        other => other.phrase(),
    }
}

/// What an operator waits for that says no more about it.
fn thing(activity: Activity) -> &'static str {
    match activity {
        Activity::Message => "a message",
        Activity::Room => "room",
        Activity::Envelope => "an envelope",
        Activity::Device => "its work on a device",
        Activity::Memory => "memory",
        Activity::Condition => "a condition",
        Activity::Worker => "a worker thread",
        _ => "a future that its run awaits",
    }
}

/// `` `a`, `b`, `c` and 3 others ``
fn list(all: impl ExactSizeIterator<Item = String>, word: &str) -> String {
    let (count, named) = (all.len(), if all.len() > NAMED + 1 { NAMED } else { NAMED + 1 });
    let mut names: Vec<_> = all.take(named).collect();
    if count > names.len() {
        let others = count - names.len();
        names.push(if count < MOST_BEHIND - 1 { format!("{others} others") } else { "many others".into() });
    }
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} {word} {last}", names.join(", ")) }
}

/// Adds those that wait for one of `open`, directly or not, until there are so many.
fn reach(
    waiting_for: &FxHashMap<usize, Vec<usize>>,
    mut open: Vec<usize>,
    most: usize,
    reached: &mut FxHashSet<usize>,
) {
    while let Some(operator) = open.pop() {
        if reached.len() >= most {
            return;
        }
        if reached.insert(operator) {
            open.extend(waiting_for.get(&operator).into_iter().flatten());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_a_few() {
        let of = |count: usize| list((0..count).map(|at| at.to_string()), "and");
        assert_eq!([1, 2, 4, 5].map(of), ["0", "0 and 1", "0, 1, 2 and 3", "0, 1, 2 and 2 others"]);
        assert_eq!(of(MOST_BEHIND), "0, 1, 2 and many others");
    }
}
