//! [`Keeper`]: what goes on while the operators of a flow run.
//!
//! Each says through a channel how it ended. The keeper waits for those, for a word from outside (stop, abort), and for rest:
//! no operator runs and none was woken (see [`quiet`](crate::operator::quiet)). Empty queues mean that the flow is done, as a
//! cycle is when it has gone quiet; anything else is a stall, an error that says who waits for what.

use std::{
    collections::HashMap,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Wake},
};

use tokio::sync::mpsc;

use super::{
    drive::{Ended, Member, aborted, blamed, gone, operator},
    link, section,
    spawn::{Threads, guarded, spawn},
    thread::OwnThread,
};
use crate::{
    error::{Error, ErrorKind},
    operator::{
        attend::attended,
        control::{Control, Hubs},
        node::Node,
        seat::caught,
    },
};

/// What the keeper looks after while the operators run.
pub(super) struct Keeper<'a> {
    pub(super) threads: Threads,
    pub(super) own_threads: &'a [Option<OwnThread>],
    pub(super) hubs: &'a Hubs,
    pub(super) first_to_stop: &'a [bool],
    pub(super) control: &'a Arc<Control>,
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
                // Before its ports are closed: whoever loses something then finds why.
                if let Err(error) = &running {
                    control.fail(blamed(&control, error.again(), &operator(&member.name)));
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
                let _ = tell.send(Ended { place: operator(&member.name), member, outcome });
            };
            let task = guarded(self.control.clone(), operator(&name), task);
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
        let mut stopping = false;
        let mut released = Released::default();
        while left > 0 {
            let next =
                poll_fn(|task| self.poll_next(task, &mut ended, &mut released, stopping, failure.is_some())).await;
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
                Next::Done => nodes.iter().for_each(|node| node.finish()),
            }
        }
        (back.into_iter().flatten().collect(), failure)
    }

    fn poll_next(
        &self,
        task: &mut Context<'_>,
        ended: &mut mpsc::UnboundedReceiver<Ended>,
        released: &mut Released,
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
        let Control { rest, nodes, .. } = &**self.control;
        if rest.tokens.none() && nodes.iter().any(|node| !node.has_ended()) {
            if Node::ask_again(nodes) {
                return Poll::Pending;
            }
            return self.at_rest(released);
        }
        Poll::Pending
    }

    /// Nothing moves and nothing will: the end, or a stall? All who have not ended waited a moment ago. One may have been
    /// woken since, by whoever looks on from outside: that moves nothing, and it waits still.
    fn at_rest(&self, released: &mut Released) -> Poll<Next> {
        let nodes = &self.control.nodes;
        let waiting: Vec<_> = nodes.iter().enumerate().filter(|(_, node)| !node.has_ended()).collect();
        let mut waits: Vec<String> = Vec::new();
        let mut stuck = false;
        for (index, node) in &waiting {
            let lacks = self.control.lacks(*index);
            // Its ports have all that it needs, or it has none, and what it waits for beside them will not come: a gate that
            // nobody has any more. One that refuses by itself has nothing left to do.
            let elsewhere = lacks.waits_beside_its_ports() && !node.has_refused();
            stuck |= elsewhere || !lacks.room.is_empty();
            let lacks = lacks.all();
            if !lacks.is_empty() {
                waits.push(format!("{} waits for {}", self.control.whose(*index), lacks.join(" and for ")));
            }
        }
        let of_chunks = link::hubs(&self.hubs.links);
        stuck |= self.hubs.all.iter().any(|hub| hub.state.queued() > 0);
        stuck |= of_chunks.iter().any(|hub| hub.queued() > 0);
        if stuck {
            let text = format!("nothing can move any more:\n  - {}", waits.join("\n  - "));
            return Poll::Ready(Next::Fail(Error::new(ErrorKind::Stalled, text)));
        }
        // What an operator waits for in the middle of a run has ended. It may send more then, which others are to get: one
        // is told at a time, and nobody ends yet. Each is told again only if something has moved since.
        let taken: u64 = self.hubs.all.iter().map(|hub| hub.state.counts().taken).sum();
        let moved = taken + of_chunks.iter().map(|hub| hub.counts()).map(|(made, gone)| made + gone).sum::<u64>();
        if released.moved != Some(moved) {
            *released = Released { moved: Some(moved), operators: vec![false; nodes.len()] };
        }
        let next = waiting.iter().find(|(index, node)| node.waits_in_run().is_some() && !released.operators[*index]);
        let Some((index, node)) = next else { return Poll::Ready(Next::Done) };
        released.operators[*index] = true;
        // Who has refused may see that differently after this.
        nodes.iter().for_each(|node| node.may_be_asked_again());
        node.release();
        Poll::Pending
    }
}

/// Those who were told that nothing will come to them, since a message was taken last.
#[derive(Default)]
struct Released {
    /// Messages taken until then.
    moved: Option<u64>,
    operators: Vec<bool>,
}

enum Next {
    Ended(Box<Ended>),
    /// The runtime has dropped the operators' tasks.
    Gone,
    Stop,
    Fail(Error),
    Done,
}
