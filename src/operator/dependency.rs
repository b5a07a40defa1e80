//! [`Dependency`]: what an operator of a running flow waits for, and for which other operators.
//!
//! The analysis of [closed groups](crate::flow) is based on it. It errs on the safe side: an operator that might be
//! able to continue is [`Active`](Dependency::Active), or waits for too many others, never for too few.

use super::{
    control::{Control, Hubs},
    status_cell::{IngressWait, RunWait},
};
use crate::{
    hub::view::{ReaderWait, WriterWait},
    mutants::{self, Mutant},
};

/// How an operator depends on the others of its flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dependency {
    /// It has ended, or an earlier operator of its section represents it: the operators of a section share a task.
    Ended,
    /// It runs, is about to poll its conditions, or waits for something that no other operator has to cause.
    Active,
    /// It makes no progress until one of these operators acts.
    Waits(Vec<usize>),
}

/// The state of all operators of a flow, by their numbers, and counters that distinguish it from an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dependencies {
    pub(crate) all: Vec<Dependency>,
    /// For each operator: the runs that have ended, and the messages that its hubs have moved, which show progress
    /// within a run.
    runs: Vec<u64>,
    moved: Vec<u64>,
    /// True if a wait can end, or turn into a wait for other operators, without any operator parking. Such a wait is
    /// for an envelope that might be outside or with an operator that received it in a way unknown to the flow; for
    /// room that an external handle has reserved; or, in the middle of a run, for room in one of several hubs.
    pub(crate) unsure: bool,
}

impl Dependencies {
    /// True if these operators have not moved since `other` was taken.
    pub(crate) fn are_as_in(&self, other: &Self, operators: &[usize]) -> bool {
        let is_as_in = |at: usize| {
            self.all[at] == other.all[at] && self.runs[at] == other.runs[at] && self.moved[at] == other.moved[at]
        };
        operators.iter().all(|&at| is_as_in(at))
    }
}

/// The facts collected about one operator's wait.
struct DependencySearch<'a> {
    control: &'a Control,
    hubs: &'a Hubs,
    /// The operators that it waits for.
    on: Vec<usize>,
    /// It lacks an envelope.
    envelope: bool,
    /// A hub is about to deliver a message to it, or to give it room.
    moves: bool,
    /// The wait can end without waking an operator: check again later.
    unsure: bool,
}

impl Control {
    /// The state of every operator. `at_rest`: no operator holds a token, so that a wait for something outside its
    /// ports does not make an operator active. Returns `None` while a message from outside is in transit to an
    /// operator.
    pub(crate) fn dependencies(&self, at_rest: bool) -> Option<Dependencies> {
        if self.activity.has_message_entering() {
            return None;
        }
        let hubs = self.hubs();
        let mut unsure = false;
        // Read before the operators: of two passes the second one sees what has moved during the first.
        let moved = (0..self.tasks.len()).map(|operator| hubs.moved(operator)).collect();
        let all =
            (0..self.tasks.len()).map(|operator| self.dependency(operator, at_rest, &hubs, &mut unsure)).collect();
        let runs = self.tasks.iter().map(|task| task.status_cell().runs()).collect();
        Some(Dependencies { all, runs, moved, unsure })
    }

    fn dependency(&self, operator: usize, at_rest: bool, hubs: &Hubs, unsure: &mut bool) -> Dependency {
        let task = &self.tasks[operator];
        if task.has_ended() || self.is_represented(operator) {
            return Dependency::Ended;
        }
        let cell = task.status_cell();
        // Any event might end a wait in user code, for example a change that another operator makes in shared memory.
        let idle = task.is_idle() || mutants::is(Mutant::WakeUnseen);
        if !idle || (!at_rest && (task.has_refused() || cell.waits_elsewhere())) {
            return Dependency::Active;
        }
        let mut found =
            DependencySearch { control: self, hubs, on: Vec::new(), envelope: false, moves: false, unsure: false };
        match self.section(operator) {
            None => found.add(operator),
            Some(section) => self.operators_of(section).iter().for_each(|&member| found.add(member)),
        }
        *unsure |= found.unsure;
        if found.envelope && self.activity.outside() > 0 {
            *unsure = true;
            return Dependency::Active;
        }
        if found.moves {
            return Dependency::Active;
        }
        // Any operator that is in a run might hold the envelope.
        if found.envelope {
            let in_run = |other: &usize| self.tasks[*other].status_cell().status().1 && !self.tasks[*other].is_idle();
            let holders: Vec<_> = (0..self.tasks.len()).filter(in_run).collect();
            *unsure |= !holders.is_empty();
            found.on.extend(holders);
        }
        let DependencySearch { mut on, envelope, .. } = found;
        // A wait that nothing is known about might end by itself.
        if on.is_empty() && !envelope {
            return Dependency::Active;
        }
        on.retain(|&other| self.first_of(other) != operator);
        on.iter_mut().for_each(|other| *other = self.first_of(*other));
        on.sort_unstable();
        on.dedup();
        Dependency::Waits(on)
    }

    /// False only if the operator certainly holds no request: it has ended, or it waits for its next run and no message
    /// is queued for it.
    fn may_hold_a_request(&self, operator: usize, hubs: &Hubs) -> bool {
        let task = &self.tasks[operator];
        if task.has_ended() {
            return false;
        }
        let waits_for_a_run = task.is_idle() && task.waits_in_run().is_none() && !task.status_cell().has_workers();
        let mut before = hubs.of(operator).filter(|hub| hub.to == operator);
        let is_linked = hubs.links_of(operator).next().is_some();
        !waits_for_a_run || is_linked || before.any(|hub| hub.state.queued() > 0 || hub.state.keeps_latest())
    }

    /// True if everything that the operator receives leaves the flow: a service's callers get it, in memory of their own.
    fn leaves(&self, operator: usize) -> bool {
        self.tasks[operator].status_cell().passes_responses_on()
    }

    /// The operator, or the first of its section.
    pub(crate) fn first_of(&self, operator: usize) -> usize {
        self.section(operator).and_then(|section| self.operators_of(section).first().copied()).unwrap_or(operator)
    }
}

impl DependencySearch<'_> {
    fn add(&mut self, operator: usize) {
        let cell = self.control.tasks[operator].status_cell();
        let in_run = cell.in_run();
        let sends = |declared| in_run.map_or(declared, RunWait::sends);
        let receives = |declared| in_run.map_or(declared, RunWait::receives);
        // It is not known what its workers wait for, or which of its inputs has too few or too many messages.
        let workers = cell.has_workers();
        let any = workers || (in_run.is_none() && !cell.lacks().is_empty());
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
        // It sends to one of these hubs. Room in another hub wakes no operator, but can break up a closed group.
        self.unsure |= in_run.is_some() && full > 1;
        for ask in cell.ingress_waits() {
            match ask {
                IngressWait::Answer(desk) => {
                    // A response that has come back is queued for the ingress (`desk`) or held by it, or the operator
                    // has just been woken for it.
                    let mut before = self.hubs.of(desk).filter(|hub| hub.to == desk);
                    self.moves |= before.any(|hub| hub.state.queued() > 0)
                        || self.control.tasks[desk].is_at_work()
                        || !self.control.tasks[operator].is_idle();
                    let behind = self.hubs.reached_from(vec![desk], |other| self.control.leaves(other)).into_iter();
                    let may_hold = |&other: &usize| other != desk && self.control.may_hold_a_request(other, self.hubs);
                    self.on.extend(behind.filter(may_hold));
                }
                // If there is room, another handle has reserved it: one that might be outside, and might release it.
                IngressWait::Room(desk) => {
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
                let reached = self.hubs.reached_through(hub, |other| self.control.leaves(other));
                self.wait_for_holders(reached);
            }
        }
        if !holders.is_empty() {
            self.envelope = true;
            let reached = self.hubs.reached_from(holders, |other| self.control.leaves(other));
            self.wait_for_holders(&reached);
        }
    }

    /// Adds those of the operators that might hold an envelope or a chunk.
    fn wait_for_holders(&mut self, reached: &[usize]) {
        let (control, hubs) = (self.control, self.hubs);
        let might_hold = |&&operator: &&usize| {
            // First the queue: a response that was taken from it is held until everything in it has left.
            let mut before = hubs.of(operator).filter(|hub| hub.to == operator);
            !control.leaves(operator)
                || before.any(|hub| hub.state.queued() > 0)
                || control.tasks[operator].status_cell().holds_a_response()
        };
        self.on.extend(reached.iter().filter(might_hold));
    }
}
