//! [`Supervisor`]: monitors the operators of a running flow.
//!
//! Each operator reports its end through a channel. The supervisor waits for these reports, for a stop or an abort, and
//! for rest: no operator runs and none has been woken (see [`idle`](crate::operator::idle)). At rest with empty
//! queues, the flow is done, for example an idle cycle. Any other rest is a stall: an error that says which operator
//! waits for what.
//!
//! A part of the flow may be at rest while the rest continues: a loop next to a timer, a deadlock in a service. So the
//! supervisor also [searches](super::searches) for [groups](wait_groups) of operators that wait only for each other,
//! which end or stall by the same rules.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Wake},
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    OnStall,
    drive::{Ended, FlowOperator, aborted, blamed, operator, overdue, runtime_shut_down},
    link,
    searches::{SEARCH_AFTER, SEARCH_AGAIN_AFTER, SearchSchedule, TimeLimit},
    section,
    spawn::{Threads, guarded, spawn},
    thread::OwnThread,
    wait_groups,
};
use crate::{
    error::{Error, ErrorKind, caught},
    hub::{
        chunks::{core::ChunkHubView, roles::Role},
        view::HubView,
    },
    operator::{
        control::{Control, Hubs},
        operator_task::OperatorTask,
        poll_in_context::poll_in_context,
    },
    sync::logged,
    tracepoint::TraceEvent,
};

pub(super) struct Supervisor<'a> {
    pub(super) threads: Threads,
    pub(super) own_threads: &'a [Option<OwnThread>],
    pub(super) hubs: &'a Hubs,
    pub(super) first_to_stop: &'a [bool],
    pub(super) control: &'a Arc<Control>,
    pub(super) on_stall: OnStall,
}

impl Supervisor<'_> {
    /// Runs all operators to their end. Returns the operators, and the first failure.
    pub(super) async fn run(
        &self,
        operators: Vec<FlowOperator>,
        sections: Vec<section::SectionSetup>,
    ) -> (Vec<FlowOperator>, Option<Error>) {
        let nodes = &self.control.tasks;
        let (sender, mut ended) = mpsc::unbounded_channel();
        let mut back: Vec<Option<FlowOperator>> = operators.iter().map(|_| None).collect();
        let mut left = operators.len();
        let mut members: Vec<Vec<FlowOperator>> = sections.iter().map(|_| Vec::new()).collect();
        for (mut member, node) in operators.into_iter().zip(nodes) {
            if let Some(section) = self.control.section(member.index) {
                members[section].push(member);
                continue;
            }
            let (sender, node, control) = (sender.clone(), node.clone(), self.control.clone());
            let (index, name) = (member.index, member.name.clone());
            let task = async move {
                // A drop at an abort may panic, too. The task reports its end in any case.
                let running = caught(poll_in_context(&node, &member.device, member.operator.run())).await;
                let place = operator(&member.name);
                // A separate future, so that runs are not polled through it.
                let end = async {
                    // Before its ports are closed, so that an operator that loses a message finds the reason.
                    if let Err(error) = &running {
                        control.fail_at(Some(index), blamed(&control, error.clone(), &place));
                    }
                    // The token is returned after the ports have closed, since closing them may wake others.
                    let closing = caught(async {
                        member.operator.close();
                        Ok(())
                    });
                    let outcome = running.and(closing.await);
                    // Other tasks of the operator end before it does.
                    member.operator.settled().await;
                    node.end();
                    let _ = sender.send(Ended { place: place.clone(), member, outcome });
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
            let task = section::task(section, members, node, self.control.clone(), sender.clone());
            let task = guarded(self.control.clone(), section::place(&name), task);
            spawn(self.threads, &name, task);
        }
        drop(sender);

        let mut failure: Option<Error> = None;
        let (mut stopping, mut idle) = (false, IdleSearch::default());
        while left > 0 {
            let next = poll_fn(|task| self.poll_next(task, &mut ended, &mut idle, stopping, failure.is_some())).await;
            match next {
                Next::Ended(ended) => {
                    left -= 1;
                    if let Err(error) = ended.outcome {
                        // Errors after the first failure are consequences of the abort.
                        if failure.is_none() {
                            let (at, error) = (ended.member.index, blamed(self.control, error, &ended.place));
                            failure = Some(self.control.fail_at(Some(at), error));
                            nodes.iter().for_each(|node| node.abort());
                        }
                    }
                    let index = ended.member.index;
                    back[index] = Some(ended.member);
                }
                Next::Gone => {
                    failure.get_or_insert_with(|| self.control.fail(runtime_shut_down()));
                    break;
                }
                Next::Stop => {
                    stopping = true;
                    let first = nodes.iter().zip(self.first_to_stop).filter(|(_, first)| **first);
                    first.for_each(|(node, _)| node.finish());
                    // An operator that waits for a message or for another event may now have only the event left.
                    nodes.iter().for_each(Wake::wake_by_ref);
                }
                Next::Fail(error) => {
                    failure = Some(self.control.fail(error));
                    nodes.iter().for_each(|node| node.abort());
                }
                Next::Done(group) => group.iter().for_each(|&operator| nodes[operator].finish()),
            }
            if std::mem::take(&mut idle.answers) {
                self.answer(true);
            }
        }
        (back.into_iter().flatten().collect(), failure)
    }

    fn poll_next(
        &self,
        task: &mut Context<'_>,
        ended: &mut mpsc::UnboundedReceiver<Ended>,
        idle: &mut IdleSearch,
        stopping: bool,
        failed: bool,
    ) -> Poll<Next> {
        self.control.flow_task.register(task.waker());
        self.control.activity.flow.register(task.waker());
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
            && idle.stop.has_passed(due, task)
        {
            return Poll::Ready(Next::Fail(self.overdue(time)));
        }
        if self.control.idle_check.is_asked() {
            let next = self.check_for_stepper(task, idle);
            if next.is_ready() {
                return next;
            }
        }
        let nodes = &self.control.tasks;
        let tokens = &self.control.activity.tokens;
        if let Some(since) = tokens.at_rest()
            && nodes.iter().any(|node| !node.has_ended())
        {
            if OperatorTask::ask_again(nodes) {
                return Poll::Pending;
            }
            let all = (0..nodes.len()).filter(|&operator| !nodes[operator].has_ended()).collect();
            let verdicts = self.judge(all, true);
            // A sender outside the flow may have become active meanwhile. This task is notified of the next rest.
            return if tokens.at_rest() == Some(since) { self.carry_out(verdicts, true, idle) } else { Poll::Pending };
        }
        // Checked again after a search, which may have set the time of the next one.
        while idle.searches.is_due(&self.control.activity, task) {
            // Only the task that steps knows when each operator has been asked.
            if self.control.is_stepped() {
                idle.searches.again(SEARCH_AGAIN_AFTER);
                if std::mem::take(&mut idle.unsure) {
                    self.control.idle_check.withdraw();
                    self.control.activity.stepper.wake();
                }
                continue;
            }
            let next = self.search_groups(idle);
            if next.is_ready() {
                return next;
            }
        }
        Poll::Pending
    }

    /// Called when every operator has refused the requested step. Checks whether the flow, or a part of it, is at rest.
    fn check_for_stepper(&self, task: &mut Context<'_>, idle: &mut IdleSearch) -> Poll<Next> {
        if self.control.activity.has_message_entering() {
            // Sends are synchronous: the message will be in its queue in a moment.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = idle.releases;
        let next = if self.control.is_idle() {
            let all =
                (0..self.control.tasks.len()).filter(|&operator| !self.control.tasks[operator].has_ended()).collect();
            let verdicts = self.judge(all, true);
            // A sender outside the flow may have become active meanwhile.
            idle.unsure = !self.control.is_idle();
            if idle.unsure { Poll::Pending } else { self.carry_out(verdicts, true, idle) }
        } else {
            self.search_groups(idle)
        };
        match &next {
            Poll::Ready(Next::Fail(_)) => {}
            // Answered after `finish`.
            Poll::Ready(_) => idle.answers = true,
            Poll::Pending => self.answer(idle.releases > before),
        }
        next
    }

    fn answer(&self, moved: bool) {
        self.control.idle_check.answer(moved);
        self.control.activity.stepper.wake();
    }

    /// The error of a flow that has not ended within this time of its stop.
    fn overdue(&self, time: Duration) -> Error {
        let left = (0..self.control.tasks.len()).filter(|&operator| !self.control.tasks[operator].has_ended());
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

    /// Searches for operators that wait only for each other, while others continue.
    fn search_groups(&self, idle: &mut IdleSearch) -> Poll<Next> {
        let Some(before) = self.control.dependencies(false) else {
            idle.searches.again(SEARCH_AGAIN_AFTER);
            idle.unsure = true;
            return Poll::Pending;
        };
        let groups = wait_groups::groups(&before.all).into_iter();
        let judged: Vec<_> = groups.map(|group| (self.judge(self.with_sections(&group), false), group)).collect();
        // The operators were examined one by one, and may have acted since.
        let after = self.control.dependencies(false);
        idle.unsure = before.unsure || after.is_none();
        if idle.unsure {
            idle.searches.again(SEARCH_AGAIN_AFTER);
        }
        let Some(after) = after else { return Poll::Pending };
        let unchanged = judged.into_iter().filter(|(_, group)| after.are_as_in(&before, group));
        let next = self.carry_out(unchanged.flat_map(|(verdicts, _)| verdicts), false, idle);
        if next.is_ready() {
            // Operators that end do not park again, and others may have waited for them.
            idle.searches.again(SEARCH_AFTER);
        }
        next
    }

    /// Decides whether these operators have ended or stalled. They make no progress unless they are notified. `all`: no
    /// other operator makes progress either. If a thread outside the flow has notified one of them meanwhile, that
    /// operator still counts as waiting.
    fn judge(&self, group: Vec<usize>, all: bool) -> Vec<GroupOutcome> {
        let found = self.examine(&group);
        if !found.stuck {
            return vec![GroupOutcome::Done(group, found.hubs_of_chunks)];
        }
        // Loops that have become idle are done, and the other operators might be waiting for their end.
        let done = |core: Vec<usize>| {
            let found = self.examine(&core);
            (!found.stuck).then_some(GroupOutcome::Done(core, found.hubs_of_chunks))
        };
        let done: Vec<_> = self.cores(&group, all).into_iter().filter_map(done).collect();
        if done.is_empty() { vec![GroupOutcome::Stalled(group, found.waits)] } else { done }
    }

    fn carry_out(
        &self,
        verdicts: impl IntoIterator<Item = GroupOutcome>,
        all: bool,
        idle: &mut IdleSearch,
    ) -> Poll<Next> {
        let mut done = Vec::new();
        for verdict in verdicts {
            match verdict {
                GroupOutcome::Done(group, hubs_of_chunks) => done.extend(self.done(group, &hubs_of_chunks, idle)),
                GroupOutcome::Stalled(group, waits) => {
                    if let Some(error) = self.stalled(group, all, &waits, idle) {
                        return Poll::Ready(Next::Fail(error));
                    }
                }
            }
        }
        if done.is_empty() { Poll::Pending } else { Poll::Ready(Next::Done(done)) }
    }

    /// The parts of a group at rest whose operators wait for no operator outside the part.
    fn cores(&self, group: &[usize], all: bool) -> Vec<Vec<usize>> {
        let Some(stands) = self.control.dependencies(all) else { return Vec::new() };
        let firsts: Vec<_> = group.iter().map(|&operator| self.control.first_of(operator)).collect();
        let mut cores = wait_groups::cores(&stands.all, &firsts);
        cores.iter_mut().for_each(|core| *core = self.with_sections(core));
        cores.retain(|core| core.len() < group.len());
        cores
    }

    /// These operators, and those that they represent: the operators of a section share a task.
    fn with_sections(&self, operators: &[usize]) -> Vec<usize> {
        let operators: HashSet<_> = operators.iter().copied().collect();
        (0..self.control.tasks.len()).filter(|at| operators.contains(&self.control.first_of(*at))).collect()
    }

    fn examine(&self, group: &[usize]) -> GroupFindings {
        let nodes = &self.control.tasks;
        let mut waits: Vec<String> = Vec::new();
        let mut stuck = false;
        for &operator in group {
            let lacks = self.control.lacks(operator);
            // Its ports have all that it needs, but another condition will never become ready, such as a gate without a
            // handle. An operator that refuses to run has nothing left to do.
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
        // The latest value need not have been read.
        let message_is_left = |hub: &dyn HubView| hub.queued() > 0 && !hub.keeps_latest();
        stuck |= self.hubs.all.iter().any(|hub| is_of_group(hub.to) && message_is_left(&*hub.state));
        // A group that only produces leaves its chunks to other active links of the hub: operators, or standalone
        // links.
        let chunk_is_left = |hub: &Arc<dyn ChunkHubView>| {
            let links = || self.hubs.links.iter().filter(|link| Arc::ptr_eq(&link.state, hub));
            let takes = links().any(|link| is_of_group(link.operator) && link.role != Role::Produce);
            let others = links().any(|link| !is_of_group(link.operator) && !nodes[link.operator].has_ended());
            hub.queued() > 0 && (takes || !(others || self.control.activity.outside() > 0))
        };
        stuck |= hubs_of_chunks.iter().any(chunk_is_left);
        GroupFindings { stuck, waits, hubs_of_chunks }
    }

    /// Called for operators that have nothing left to do. Returns those that end now.
    fn done(&self, group: Vec<usize>, hubs_of_chunks: &[Arc<dyn ChunkHubView>], idle: &mut IdleSearch) -> Vec<usize> {
        let nodes = &self.control.tasks;
        let members: HashSet<_> = group.iter().copied().collect();
        let is_of_group = |operator: usize| members.contains(&operator);
        // First, waits in the middle of a run are ended: the operator may send more messages. Only one operator is
        // released at a time, and none ends yet. Each is released again only if a message has moved since.
        let own = self.hubs.all.iter().filter(|hub| is_of_group(hub.from) || is_of_group(hub.to));
        let taken: u64 = own.map(|hub| hub.state.counts().taken).sum();
        let moved = taken
            + hubs_of_chunks
                .iter()
                .map(|hub| hub.counts())
                .map(|(produced, consumed)| produced + consumed)
                .sum::<u64>();
        let released = idle.released.entry(group.clone()).or_default();
        if released.moved != Some(moved) {
            *released = ReleasedWaits { moved: Some(moved), operators: Vec::new() };
        }
        let in_run = || group.iter().copied().filter(|at| nodes[*at].waits_in_run().is_some());
        let Some(next) = in_run().find(|at| !released.operators.contains(at)) else {
            // An operator that was released and waits again ends before the others: it may still send to them.
            let first = in_run().find(|at| !nodes[*at].is_finishing());
            return first.map_or(group, |first| vec![first]);
        };
        released.operators.push(next);
        idle.releases += 1;
        // An operator that has refused a step may accept the next one after this.
        nodes.iter().for_each(|node| node.may_be_asked_again());
        nodes[next].release();
        Vec::new()
    }

    /// Called for operators that have stalled. Returns the error if the flow has to fail.
    fn stalled(&self, group: Vec<usize>, all: bool, waits: &[String], idle: &mut IdleSearch) -> Option<Error> {
        let what = match all {
            true => "no operator can make progress",
            false => "these operators wait only for each other, and no other operator can release them",
        };
        let error = Error::new(ErrorKind::Stalled, format!("{what}:\n  - {}", waits.join("\n  - ")));
        let trace = || self.control.traced().into_iter().for_each(|traced| traced.record(TraceEvent::Stalled));
        // A stalled flow cannot be drained either.
        let fails = self.on_stall == OnStall::Fail || self.control.is_stopping();
        self.control.note_stall(&group, waits, fails);
        if fails {
            trace();
            return Some(error);
        }
        let waits = waits.join("\n");
        if idle.reported.get(&group) != Some(&waits) {
            trace();
            let flow = self.control.name.clone();
            logged(
                || tracing::warn!(flow = &*flow, error = %format_args!("{error:#}"), "operators have stalled; the flow continues"),
            );
            idle.reported.insert(group, waits);
        }
        None
    }
}

/// The state of a group of operators at rest.
enum GroupOutcome {
    Done(Vec<usize>, Vec<Arc<dyn ChunkHubView>>),
    /// Messages are left that none of them will take. Also describes what each operator waits for.
    Stalled(Vec<usize>, Vec<String>),
}

struct GroupFindings {
    /// There is a message or a chunk left that none of them will take.
    stuck: bool,
    waits: Vec<String>,
    hubs_of_chunks: Vec<Arc<dyn ChunkHubView>>,
}

/// The state of the search for operators at rest.
#[derive(Default)]
struct IdleSearch {
    searches: SearchSchedule,
    /// The deadline of [`stop_within`](crate::flow::Handle::stop_within).
    stop: TimeLimit,
    released: HashMap<Vec<usize>, ReleasedWaits>,
    /// The number of waits in a run that were ended.
    releases: u64,
    /// The last search was inconclusive.
    unsure: bool,
    /// [`IdleCheck`](crate::operator::activity::IdleCheck) must be answered once the next action is carried out.
    answers: bool,
    /// The report of each stalled group.
    reported: HashMap<Vec<usize>, String>,
}

/// The members of a group whose waits in a run were ended since a message was last taken.
#[derive(Default)]
struct ReleasedWaits {
    /// The number of messages taken until then.
    moved: Option<u64>,
    operators: Vec<usize>,
}

enum Next {
    Ended(Box<Ended>),
    /// The runtime has dropped the operators' tasks.
    Gone,
    Stop,
    Fail(Error),
    Done(Vec<usize>),
}
