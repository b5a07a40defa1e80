//! [`Stand`]: what an operator of a flow at work waits for others of it for, and which others those are.
//!
//! The analysis of [closed groups](crate::flow) rests on it. So it errs on one side: an operator that might be able to go on is
//! [`Active`](Stand::Active), or waits for too many others, never for too few.

use super::{
    control::{Control, Hubs},
    shown::{Ask, InRun},
};
use crate::{
    hub::link::{ReaderWait, WriterWait},
    mutants::{self, Mutant},
};

/// How an operator stands to the others of its flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stand {
    /// It has ended, or stands for another one: those of a section share a task.
    Ended,
    /// It runs, is about to look, or waits for something that comes by itself.
    Active,
    /// It does nothing until one of these operators acts.
    Waits(Vec<usize>),
}

/// The state of all operators of a flow, by their numbers, and what tells it from an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stands {
    pub(crate) all: Vec<Stand>,
    /// Of each operator: runs that have ended, and what its hubs have moved, which shows one that goes on within a run.
    runs: Vec<u64>,
    moved: Vec<u64>,
    /// Some operator waits for an envelope, which one that is in a run may have been given in a way that the flow does not know, or
    /// which may be outside; for room that a handle outside has reserved; or, in the middle of a run, for room in one of several hubs.
    /// What ends such a wait, or makes it one for other operators, may be no operator's park.
    pub(crate) unsure: bool,
}

impl Stands {
    /// These operators have not moved since the other look.
    pub(crate) fn are_as_in(&self, other: &Self, operators: &[usize]) -> bool {
        let is_as_in = |at: usize| {
            self.all[at] == other.all[at] && self.runs[at] == other.runs[at] && self.moved[at] == other.moved[at]
        };
        operators.iter().all(|&at| is_as_in(at))
    }
}

/// What is collected of one operator.
struct Found<'a> {
    control: &'a Control,
    hubs: &'a Hubs,
    on: Vec<usize>,
    /// It lacks an envelope.
    envelope: bool,
    /// A hub is about to bring it a message, or has room that it may be given.
    moves: bool,
    /// The end of that wakes no operator: to be looked at again.
    unsure: bool,
}

impl Control {
    /// How all operators stand, `at_rest` if none of them can act before another one has: then a wait for something beside its ports
    /// makes none active. `None` where the answer would mean nothing: a message from outside is on its way to an operator.
    pub(crate) fn stands(&self, at_rest: bool) -> Option<Stands> {
        if self.rest.has_message_entering() {
            return None;
        }
        let hubs = self.hubs();
        let mut unsure = false;
        // Before they are looked at: of two looks the second one sees what has moved while the first one was made.
        let moved = (0..self.nodes.len()).map(|operator| hubs.moved(operator)).collect();
        let all = (0..self.nodes.len()).map(|operator| self.stand(operator, at_rest, &hubs, &mut unsure)).collect();
        let runs = self.nodes.iter().map(|node| node.shown().runs()).collect();
        Some(Stands { all, runs, moved, unsure })
    }

    fn stand(&self, operator: usize, at_rest: bool, hubs: &Hubs, unsure: &mut bool) -> Stand {
        let node = &self.nodes[operator];
        if node.has_ended() || self.is_counted(operator) {
            return Stand::Ended;
        }
        let shown = node.shown();
        // Anything may end a wait of the user's own: what another operator does by way of shared memory, say.
        let rests = node.rests() || mutants::is(Mutant::WakeUnseen);
        if !rests || (!at_rest && (node.has_refused() || shown.waits_elsewhere())) {
            return Stand::Active;
        }
        let mut found = Found { control: self, hubs, on: Vec::new(), envelope: false, moves: false, unsure: false };
        match self.section(operator) {
            None => found.add(operator),
            Some(section) => self.operators_of(section).iter().for_each(|&member| found.add(member)),
        }
        *unsure |= found.unsure;
        if found.envelope && self.rest.outside() > 0 {
            *unsure = true;
            return Stand::Active;
        }
        if found.moves {
            return Stand::Active;
        }
        // An envelope may be with an operator that is in a run, whichever way it came there.
        if found.envelope {
            let in_run = |other: &usize| self.nodes[*other].shown().status().1 && !self.nodes[*other].rests();
            let holders: Vec<_> = (0..self.nodes.len()).filter(in_run).collect();
            *unsure |= !holders.is_empty();
            found.on.extend(holders);
        }
        let Found { mut on, envelope, .. } = found;
        // Of one of which nothing is known it is not known either that nothing ends its wait.
        if on.is_empty() && !envelope {
            return Stand::Active;
        }
        on.retain(|&other| self.first_of(other) != operator);
        on.iter_mut().for_each(|other| *other = self.first_of(*other));
        on.sort_unstable();
        on.dedup();
        Stand::Waits(on)
    }

    /// False only for one that holds no message of another: it has ended, or waits for its next run, and nothing lies before it.
    fn may_hold_a_request(&self, operator: usize, hubs: &Hubs) -> bool {
        let node = &self.nodes[operator];
        if node.has_ended() {
            return false;
        }
        let waits_for_a_run = node.rests() && node.waits_in_run().is_none() && !node.shown().has_workers();
        let mut before = hubs.of(operator).filter(|hub| hub.to == operator);
        let is_linked = hubs.links_of(operator).next().is_some();
        !waits_for_a_run || is_linked || before.any(|hub| hub.state.queued() > 0 || hub.state.keeps_latest())
    }

    /// The operator, or the first of its section.
    pub(crate) fn first_of(&self, operator: usize) -> usize {
        self.section(operator).and_then(|section| self.operators_of(section).first().copied()).unwrap_or(operator)
    }
}

impl Found<'_> {
    fn add(&mut self, operator: usize) {
        let shown = self.control.nodes[operator].shown();
        let in_run = shown.in_run();
        let sends = |declared| in_run.map_or(declared, InRun::sends);
        let receives = |declared| in_run.map_or(declared, InRun::receives);
        // What its workers wait for is not known; nor which input it is that has too few messages, or too many.
        let workers = shown.has_workers();
        let any = workers || (in_run.is_none() && !shown.lacks().is_empty());
        let (mut holders, mut full) = (Vec::new(), 0);
        for hub in self.hubs.of(operator) {
            if hub.from == operator && (workers || sends(hub.writer_waits)) {
                match hub.state.writer_waits() {
                    Some(WriterWait::Blank | WriterWait::Copy) => holders.push(operator),
                    Some(WriterWait::Room) => {
                        self.on.push(hub.to);
                        full += 1;
                    }
                    None if workers => self.on.push(hub.to),
                    None => {}
                }
            }
            if hub.to == operator && (workers || receives(hub.reader_waits)) {
                match hub.state.reader_waits(in_run.is_some()) {
                    Some(ReaderWait::Envelope) => holders.push(operator),
                    Some(ReaderWait::Message) => self.on.push(hub.from),
                    Some(ReaderWait::Move) => self.moves = true,
                    None if any => self.on.push(hub.from),
                    None => {}
                }
            }
        }
        // It sends to one of these. That another one has room again wakes nothing, and may leave a closed group.
        self.unsure |= in_run.is_some() && full > 1;
        for ask in shown.asked() {
            match ask {
                Ask::Answer(desk) => {
                    // What has come back lies before the desk, or is with it, or this one has just been woken with it.
                    let mut before = self.hubs.of(desk).filter(|hub| hub.to == desk);
                    self.moves |= before.any(|hub| hub.state.queued() > 0)
                        || self.control.nodes[desk].is_at_work()
                        || !self.control.nodes[operator].rests();
                    let behind = self.hubs.reached_from(vec![desk]).into_iter();
                    let may_hold = |&other: &usize| other != desk && self.control.may_hold_a_request(other, self.hubs);
                    self.on.extend(behind.filter(may_hold));
                }
                // Room that there is has been reserved by another handle, which may be outside and may release it.
                Ask::Room(desk) => {
                    for hub in self.hubs.of(desk).filter(|hub| hub.from == desk) {
                        match hub.state.writer_waits() {
                            Some(WriterWait::Room) => self.on.push(hub.to),
                            _ => (self.moves, self.unsure) = (true, true),
                        }
                    }
                }
            }
        }
        for (own, hub) in self.hubs.links_of(operator) {
            if own.state.lacks(own.link, &()).is_some() {
                self.envelope = true;
                self.on.extend_from_slice(self.hubs.reached_through(hub));
            }
        }
        if !holders.is_empty() {
            self.envelope = true;
            self.on.extend(self.hubs.reached_from(holders));
        }
    }
}
