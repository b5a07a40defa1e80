//! [`Keeper`]: what goes on while the operators of a flow run.
//!
//! Each says through a channel how it ended. The keeper waits for those, for a word from outside (stop, abort), and for rest:
//! no operator runs and none was woken (see [`quiet`](crate::operator::quiet)). Empty queues mean that the flow is done, as a
//! cycle is when it has gone quiet; anything else is a stall, an error that says who waits for what.
//!
//! A part of the flow may be at rest while others go on: a loop beside a timer, a deadlock in a service. So the keeper also
//! [looks](super::looks) for [groups](closed) of operators that wait for each other alone. What is found at rest ends, or is a
//! stall, as the whole flow is.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Wake},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    OnStall, closed,
    drive::{Ended, Member, aborted, blamed, gone, operator, overdue},
    link,
    looks::{LOOK_AFTER, LOOK_AGAIN_AFTER, Looks, TimeLimit},
    section,
    spawn::{Threads, guarded, spawn},
    thread::OwnThread,
};
use crate::{
    error::{Error, ErrorKind},
    hub::{
        chunks::{core::ChunkState, roles::Role},
        link::HubState,
    },
    operator::{
        attend::attended,
        control::{Control, Hubs},
        node::Node,
        seat::caught,
    },
    sync::logged,
};

/// What the keeper looks after while the operators run.
pub(super) struct Keeper<'a> {
    pub(super) threads: Threads,
    pub(super) own_threads: &'a [Option<OwnThread>],
    pub(super) hubs: &'a Hubs,
    pub(super) first_to_stop: &'a [bool],
    pub(super) control: &'a Arc<Control>,
    pub(super) on_stall: OnStall,
}

impl Keeper<'_> {
    /// Runs all operators to their ends; gives them back, and the first failure.
    pub(super) async fn run(&self, crew: Vec<Member>, sections: Vec<section::Start>) -> (Vec<Member>, Option<Error>) {
        let nodes = &self.control.nodes;
        let (tell, mut ended) = mpsc::unbounded_channel();
        let mut back: Vec<Option<Member>> = crew.iter().map(|_| None).collect();
        let mut left = crew.len();
        let mut members: Vec<Vec<Member>> = sections.iter().map(|_| Vec::new()).collect();
        for (mut member, node) in crew.into_iter().zip(nodes) {
            if let Some(section) = self.control.section(member.index) {
                members[section].push(member);
                continue;
            }
            let (tell, node, control) = (tell.clone(), node.clone(), self.control.clone());
            let (index, name) = (member.index, member.name.clone());
            let task = async move {
                // Also what is dropped at an abort may panic; whatever happens, this task says that it has ended.
                let running = caught(attended(&node, &member.device, member.seat.run())).await;
                let place = operator(&member.name);
                // Apart, so that no run is polled through it.
                let end = async {
                    // Before its ports are closed: an operator that loses a message by that finds the reason.
                    if let Err(error) = &running {
                        control.fail(blamed(&control, error.again(), &place));
                    }
                    // Its token goes after its ports have closed: their closing may wake others.
                    let closing = caught(async {
                        member.seat.close();
                        Ok(())
                    });
                    let outcome = running.and(closing.await);
                    // Also other tasks of its own are gone before it is.
                    member.seat.settled().await;
                    node.end();
                    let _ = tell.send(Ended { place: place.clone(), member, outcome });
                };
                guarded(control.clone(), place.clone(), end).await;
            };
            match &self.own_threads[index] {
                Some(thread) => thread.spawn(task),
                None => spawn(self.threads, &name, task),
            }
        }
        for (section, mut members) in sections.into_iter().zip(members) {
            let order = section.plan.members.clone();
            let places: HashMap<_, _> = order.iter().enumerate().map(|(place, index)| (*index, place)).collect();
            members.sort_by_key(|member| places.get(&member.index).copied());
            let (name, node) = (section.plan.name.clone(), nodes[order[0]].clone());
            let task = section::task(section, members, node, self.control.clone(), tell.clone());
            let task = guarded(self.control.clone(), section::place(&name), task);
            spawn(self.threads, &name, task);
        }
        drop(tell);

        let mut failure: Option<Error> = None;
        let (mut stopping, mut rest) = (false, AtRest::default());
        while left > 0 {
            let next = poll_fn(|task| self.poll_next(task, &mut ended, &mut rest, stopping, failure.is_some())).await;
            match next {
                Next::Ended(ended) => {
                    left -= 1;
                    if let Err(error) = ended.outcome {
                        // What is cancelled after a failure is not one.
                        if failure.is_none() {
                            failure = Some(self.control.fail(blamed(self.control, error, &ended.place)));
                            nodes.iter().for_each(|node| node.abort());
                        }
                    }
                    let index = ended.member.index;
                    back[index] = Some(ended.member);
                }
                Next::Gone => {
                    failure.get_or_insert_with(|| self.control.fail(gone()));
                    break;
                }
                Next::Stop => {
                    stopping = true;
                    let first = nodes.iter().zip(self.first_to_stop).filter(|(_, first)| **first);
                    first.for_each(|(node, _)| node.finish());
                    // Whoever runs for a message or for something else may have nothing but the latter left.
                    nodes.iter().for_each(Wake::wake_by_ref);
                }
                Next::Fail(error) => {
                    failure = Some(self.control.fail(error));
                    nodes.iter().for_each(|node| node.abort());
                }
                Next::Done(group) => group.iter().for_each(|&operator| nodes[operator].finish()),
            }
            if std::mem::take(&mut rest.answers) {
                self.answer(true);
            }
        }
        (back.into_iter().flatten().collect(), failure)
    }

    fn poll_next(
        &self,
        task: &mut Context<'_>,
        ended: &mut mpsc::UnboundedReceiver<Ended>,
        rest: &mut AtRest,
        stopping: bool,
        failed: bool,
    ) -> Poll<Next> {
        self.control.keeper.register(task.waker());
        self.control.rest.flow.register(task.waker());
        if !failed && self.control.is_aborted() {
            return Poll::Ready(Next::Fail(aborted(self.control)));
        }
        match ended.poll_recv(task) {
            Poll::Ready(Some(ended)) => return Poll::Ready(Next::Ended(Box::new(ended))),
            Poll::Ready(None) => return Poll::Ready(Next::Gone),
            Poll::Pending => {}
        }
        if failed {
            return Poll::Pending;
        }
        if !stopping && self.control.is_stopping() {
            return Poll::Ready(Next::Stop);
        }
        if let Some((due, time)) = self.control.stop_by()
            && rest.stop.has_passed(due, task)
        {
            return Poll::Ready(Next::Fail(self.overdue(time)));
        }
        if self.control.rest_check.is_asked() {
            let next = self.look_for_stepper(task, rest);
            if next.is_ready() {
                return next;
            }
        }
        let nodes = &self.control.nodes;
        let tokens = &self.control.rest.tokens;
        if let Some(since) = tokens.at_rest()
            && nodes.iter().any(|node| !node.has_ended())
        {
            if Node::ask_again(nodes) {
                return Poll::Pending;
            }
            let all = (0..nodes.len()).filter(|&operator| !nodes[operator].has_ended()).collect();
            let verdicts = self.judge(all, true);
            // Something from outside may have begun meanwhile. The flow's task is notified at the next rest.
            return if tokens.at_rest() == Some(since) { self.carry_out(verdicts, true, rest) } else { Poll::Pending };
        }
        // Asked again after a look: the next one may have a time.
        while rest.looks.is_due(&self.control.rest, task) {
            // Only the task that steps knows when each operator has been asked.
            if self.control.is_stepped() {
                rest.looks.again(LOOK_AGAIN_AFTER);
                if std::mem::take(&mut rest.unsure) {
                    self.control.rest_check.withdraw();
                    self.control.rest.stepper.wake();
                }
                continue;
            }
            let next = self.look_for_groups(rest);
            if next.is_ready() {
                return next;
            }
        }
        Poll::Pending
    }

    /// A task steps through the flow, and each operator has refused to run: is the flow, or a part of it, at rest?
    fn look_for_stepper(&self, task: &mut Context<'_>, rest: &mut AtRest) -> Poll<Next> {
        if self.control.rest.has_message_entering() {
            // Sends are synchronous: the message is in its queue in a moment.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = rest.releases;
        let next = if self.control.is_quiet() {
            let all =
                (0..self.control.nodes.len()).filter(|&operator| !self.control.nodes[operator].has_ended()).collect();
            let verdicts = self.judge(all, true);
            // A send from outside may have begun meanwhile.
            rest.unsure = !self.control.is_quiet();
            if rest.unsure { Poll::Pending } else { self.carry_out(verdicts, true, rest) }
        } else {
            self.look_for_groups(rest)
        };
        match &next {
            // The flow's end follows.
            Poll::Ready(Next::Fail(_)) => {}
            // After `finish`.
            Poll::Ready(_) => rest.answers = true,
            Poll::Pending => self.answer(rest.releases > before),
        }
        next
    }

    fn answer(&self, moved: bool) {
        self.control.rest_check.answer(moved);
        self.control.rest.stepper.wake();
    }

    /// The flow has not ended this long after it was asked to.
    fn overdue(&self, time: Duration) -> Error {
        let left = (0..self.control.nodes.len()).filter(|&operator| !self.control.nodes[operator].has_ended());
        let each = left.map(|operator| {
            let status = self.control.status(operator);
            let does = match &status.waits_for[..] {
                [] if status.running => "is in a run".to_string(),
                [] => status.status.to_string(),
                lacks => format!("waits for {}", lacks.join(" and for ")),
            };
            format!("{} {does}", self.control.whose(operator))
        });
        overdue(self.control, time, &each.collect::<Vec<_>>().join("\n  - "))
    }

    /// Do operators wait for each other alone, while others go on?
    fn look_for_groups(&self, rest: &mut AtRest) -> Poll<Next> {
        let Some(before) = self.control.stands(false) else {
            rest.looks.again(LOOK_AGAIN_AFTER);
            rest.unsure = true;
            return Poll::Pending;
        };
        let groups = closed::groups(&before.all).into_iter();
        let judged: Vec<_> = groups.map(|group| (self.judge(self.with_sections(&group), false), group)).collect();
        // Each operator was looked at in its turn, and may have acted since.
        let after = self.control.stands(false);
        rest.unsure = before.unsure || after.is_none();
        if rest.unsure {
            rest.looks.again(LOOK_AGAIN_AFTER);
        }
        let Some(after) = after else { return Poll::Pending };
        let unchanged = judged.into_iter().filter(|(_, group)| after.are_as_in(&before, group));
        let next = self.carry_out(unchanged.flat_map(|(verdicts, _)| verdicts), false, rest);
        if next.is_ready() {
            // None of the operators that end parks again, and others may have waited for them.
            rest.looks.again(LOOK_AFTER);
        }
        next
    }

    /// These operators do nothing any more, unless they are notified, and nothing else will change that; `all`: no other does
    /// anything either. The end, or a stall? One may have been notified since, by an observer outside of the flow: that
    /// moves nothing, and it waits still.
    fn judge(&self, group: Vec<usize>, all: bool) -> Vec<Verdict> {
        let found = self.look_at(&group);
        if !found.stuck {
            return vec![Verdict::Done(group, found.hubs_of_chunks)];
        }
        // Loops that have gone quiet are done, and their ends may be what the others wait for.
        let done = |core: Vec<usize>| {
            let found = self.look_at(&core);
            (!found.stuck).then_some(Verdict::Done(core, found.hubs_of_chunks))
        };
        let done: Vec<_> = self.cores(&group, all).into_iter().filter_map(done).collect();
        if done.is_empty() { vec![Verdict::Stalled(group, found.waits)] } else { done }
    }

    fn carry_out(&self, verdicts: impl IntoIterator<Item = Verdict>, all: bool, rest: &mut AtRest) -> Poll<Next> {
        let mut done = Vec::new();
        for verdict in verdicts {
            match verdict {
                Verdict::Done(group, hubs_of_chunks) => done.extend(self.done(group, &hubs_of_chunks, rest)),
                Verdict::Stalled(group, waits) => {
                    if let Some(error) = self.stalled(group, all, &waits, rest) {
                        return Poll::Ready(Next::Fail(error));
                    }
                }
            }
        }
        if done.is_empty() { Poll::Pending } else { Poll::Ready(Next::Done(done)) }
    }

    /// The parts of a group at rest that wait for nothing but themselves.
    fn cores(&self, group: &[usize], all: bool) -> Vec<Vec<usize>> {
        let Some(stands) = self.control.stands(all) else { return Vec::new() };
        let firsts: Vec<_> = group.iter().map(|&operator| self.control.first_of(operator)).collect();
        let mut cores = closed::cores(&stands.all, &firsts);
        cores.iter_mut().for_each(|core| *core = self.with_sections(core));
        cores.retain(|core| core.len() < group.len());
        cores
    }

    /// All operators that these are, or stand for: those of a section share a task.
    fn with_sections(&self, operators: &[usize]) -> Vec<usize> {
        let operators: HashSet<_> = operators.iter().copied().collect();
        (0..self.control.nodes.len()).filter(|at| operators.contains(&self.control.first_of(*at))).collect()
    }

    fn look_at(&self, group: &[usize]) -> Found {
        let nodes = &self.control.nodes;
        let mut waits: Vec<String> = Vec::new();
        let mut stuck = false;
        for &operator in group {
            let lacks = self.control.lacks(operator);
            // Its ports have all that it needs, or it has none, and what it waits for beside them will not come: a gate that
            // nobody has any more. One that refuses by itself has nothing left to do.
            let elsewhere = lacks.waits_beside_its_ports() && !nodes[operator].has_refused();
            stuck |= elsewhere || !lacks.room.is_empty() || !lacks.asked.is_empty();
            let lacks = lacks.all();
            if !lacks.is_empty() {
                waits.push(format!("{} waits for {}", self.control.whose(operator), lacks.join(" and for ")));
            }
        }
        let members: HashSet<_> = group.iter().copied().collect();
        let is_of_group = |operator: usize| members.contains(&operator);
        let own = self.hubs.links.iter().filter(|link| is_of_group(link.operator));
        let hubs_of_chunks = link::hubs(own);
        // What is the latest at its time need not be read.
        let message_is_left = |hub: &dyn HubState| hub.queued() > 0 && !hub.keeps_latest();
        stuck |= self.hubs.all.iter().any(|hub| is_of_group(hub.to) && message_is_left(&*hub.state));
        // A group that only produces leaves its chunks to others with links to the hub that go on: operators, or links by hand.
        let chunk_is_left = |hub: &Arc<dyn ChunkState>| {
            let links = || self.hubs.links.iter().filter(|link| Arc::ptr_eq(&link.state, hub));
            let takes = links().any(|link| is_of_group(link.operator) && link.role != Role::Produce);
            let others = links().any(|link| !is_of_group(link.operator) && !nodes[link.operator].has_ended());
            hub.queued() > 0 && (takes || !(others || self.control.rest.outside() > 0))
        };
        stuck |= hubs_of_chunks.iter().any(chunk_is_left);
        Found { stuck, waits, hubs_of_chunks }
    }

    /// These operators have nothing left to do. Those of them that end now.
    fn done(&self, group: Vec<usize>, hubs_of_chunks: &[Arc<dyn ChunkState>], rest: &mut AtRest) -> Vec<usize> {
        let nodes = &self.control.nodes;
        let members: HashSet<_> = group.iter().copied().collect();
        let is_of_group = |operator: usize| members.contains(&operator);
        // What an operator waits for in the middle of a run has ended. It may send more then, which others are to get: one
        // is told at a time, and nobody ends yet. Each is told again only if something has moved since.
        let own = self.hubs.all.iter().filter(|hub| is_of_group(hub.from) || is_of_group(hub.to));
        let taken: u64 = own.map(|hub| hub.state.counts().taken).sum();
        let moved = taken + hubs_of_chunks.iter().map(|hub| hub.counts()).map(|(made, gone)| made + gone).sum::<u64>();
        let released = rest.released.entry(group.clone()).or_default();
        if released.moved != Some(moved) {
            *released = Released { moved: Some(moved), operators: Vec::new() };
        }
        let in_run = || group.iter().copied().filter(|at| nodes[*at].waits_in_run().is_some());
        let Some(next) = in_run().find(|at| !released.operators.contains(at)) else {
            // An operator that has heard of the end and waits again ends before the others: it may still send to them.
            let first = in_run().find(|at| !nodes[*at].is_finishing());
            return first.map_or(group, |first| vec![first]);
        };
        released.operators.push(next);
        rest.releases += 1;
        // Who has refused may see that differently after this.
        nodes.iter().for_each(|node| node.may_be_asked_again());
        nodes[next].release();
        Vec::new()
    }

    /// Something is left that none of these operators will take: the error, if the flow is to fail.
    fn stalled(&self, group: Vec<usize>, all: bool, waits: &[String], rest: &mut AtRest) -> Option<Error> {
        let what = match all {
            true => "nothing can move any more",
            false => "these operators wait for each other alone, and nothing else in the flow can end that",
        };
        let error = Error::new(ErrorKind::Stalled, format!("{what}:\n  - {}", waits.join("\n  - ")));
        // What cannot move cannot be drained either.
        if self.on_stall == OnStall::Fail || self.control.is_stopping() {
            return Some(error);
        }
        let waits = waits.join("\n");
        if rest.reported.get(&group) != Some(&waits) {
            let flow = self.control.name.clone();
            logged(|| tracing::warn!(flow = &*flow, %error, "operators have stalled, and the flow goes on"));
            rest.reported.insert(group, waits);
        }
        None
    }
}

/// What operators at rest are.
enum Verdict {
    /// They have nothing left to do.
    Done(Vec<usize>, Vec<Arc<dyn ChunkState>>),
    /// Something is left that none of them will take, and what each waits for.
    Stalled(Vec<usize>, Vec<String>),
}

/// What a look at operators at rest has found.
struct Found {
    /// Something is left that none of them will take.
    stuck: bool,
    /// What each waits for, in words.
    waits: Vec<String>,
    hubs_of_chunks: Vec<Arc<dyn ChunkState>>,
}

/// What is known of operators that were found at rest.
#[derive(Default)]
struct AtRest {
    looks: Looks,
    /// Of [`stop_within`](crate::flow::Handle::stop_within).
    stop: TimeLimit,
    /// By group.
    released: HashMap<Vec<usize>, Released>,
    /// Waits that were ended so.
    releases: u64,
    /// The last look could not tell.
    unsure: bool,
    /// [`RestCheck`](crate::operator::rest_check::RestCheck) is to be answered once the next action is carried out.
    answers: bool,
    /// Of each group that has stalled: what was reported.
    reported: HashMap<Vec<usize>, String>,
}

/// Members of a group that were released since a message was taken last: their waits in a run have ended.
#[derive(Default)]
struct Released {
    /// Messages taken until then.
    moved: Option<u64>,
    operators: Vec<usize>,
}

enum Next {
    Ended(Box<Ended>),
    /// The runtime has dropped the operators' tasks.
    Gone,
    Stop,
    Fail(Error),
    /// These have nothing left to do.
    Done(Vec<usize>),
}
