//! One run of a flow, from its hubs to its report.
//!
//! One task keeps the flow (`drive`); each operator has a task of its own, which says through a channel how it ended and
//! gives the operator back. The keeper waits for those, for a word from outside (stop, abort), and for rest.
//!
//! ```text
//!   hubs, kernels ──> start, one by one ──> all run ──> stop, one by one ──> report
//!         │ error           │ error            │ first error: abort the others
//!         └─────────────────┴──────────────────┴──> stop, one by one ──> that error
//! ```
//!
//! Before the `stop`s of a flow that went well, all that was enqueued is waited for: its last work may have failed too.
//!
//! Rest: no operator runs and none was woken (see [`quiet`](crate::operator::quiet)). Empty queues mean that the flow is
//! done, as a cycle is when it has gone quiet; anything else is a stall, an error that says who waits for what.

use std::{
    collections::HashMap,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use tokio::sync::{mpsc, oneshot};

use super::{MakeLink, Report, Running, spawn::spawn};
use crate::{
    device::{Device, ticks::TickClock},
    error::{Error, ErrorKind, Result},
    hub::link::LinkPlan,
    kernel::Kernel,
    operator::{
        control::{Control, Joined},
        node::Node,
        seat::{Ends, Seat, caught},
    },
    stream::Streams,
};

/// An operator that takes part, in its surroundings.
pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) device: Device,
    pub(super) seat: Box<dyn Seat>,
}

/// A hub to be made.
pub(super) struct Joint {
    pub(super) plan: LinkPlan,
    pub(super) make: MakeLink,
    /// Operator and port.
    pub(super) from: (usize, &'static str),
    pub(super) to: (usize, &'static str),
    /// The reader waits for its messages.
    pub(super) waits: bool,
}

/// How it ended, and the operators.
pub(super) struct Finished {
    pub(super) outcome: Result<Report>,
    pub(super) seats: Vec<Box<dyn Seat>>,
}

/// Begins a run in the background.
pub(super) fn launch(control: Arc<Control>, crew: Vec<Member>, joints: Vec<Joint>) -> Running {
    let (tell, finished) = oneshot::channel();
    let keeper = drive(crew, joints, control.clone());
    spawn(&format!("flow {}", control.name), async move {
        let finished = keeper.await;
        // Nobody listens to a flow whose handle was dropped.
        let _ = tell.send(finished);
    });
    Running::new(control, finished)
}

/// The task of one operator: polls `work` with the operator's waker, its device current, until it ends or is aborted.
async fn attended<T>(node: &Arc<Node>, device: &Device, work: impl Future<Output = Result<T>>) -> Result<T> {
    let waker = Waker::from(node.clone());
    let on_host = device.is_host();
    let mut work = pin!(work);
    poll_fn(|task| {
        node.poll(&waker, task, |task| {
            if !on_host && let Err(error) = device.backend().make_current() {
                // Whoever is the first to hear of a fault tells everybody, and says whose work is lost.
                return Poll::Ready(Streams::of(device).heed(Err(error)));
            }
            work.as_mut().poll(task)
        })
    })
    .await
}

/// As [`attended`], for `stop`: it runs even where the device is lost and cannot be made current. Not with the node of
/// its runs: an aborted flow's operators stop like any others.
async fn attended_to_the_end(device: &Device, work: impl Future<Output = Result<()>>) -> Result<()> {
    let mut work = pin!(work);
    let work = poll_fn(|task| {
        // What is wrong with the device is for `stop` to find, if it uses it.
        let _ = device.backend().make_current();
        work.as_mut().poll(task)
    });
    attended(&Node::alone(), &Device::host(), work).await
}

async fn drive(mut crew: Vec<Member>, joints: Vec<Joint>, control: Arc<Control>) -> Finished {
    let clock = TickClock::start();
    let first_to_stop = first_to_stop(crew.len(), &joints);
    let mut failure = None;
    match build(&mut crew, joints) {
        Ok(hubs) => control.set_hubs(hubs.into()),
        Err(error) => failure = Some(error),
    }
    let hubs = control.hubs();
    if failure.is_none() {
        failure = compile(gpus(&crew)).await.err();
    }
    let setup = clock.elapsed();
    for member in &mut crew {
        if failure.is_some() {
            break;
        }
        let Member { name, device, seat, .. } = member;
        let node = Node::alone();
        let starting = until_abort(&control, attended(&node, device, seat.start()));
        failure = starting.await.err().map(|error| error.at(operator(name)));
    }

    let crew = match failure {
        None => {
            let keeper = Keeper { hubs: &hubs, first_to_stop: &first_to_stop, control: &control };
            let (crew, failed) = keeper.run(crew).await;
            failure = failed;
            crew
        }
        Some(error) => {
            failure = Some(control.fail(error));
            crew.iter_mut().for_each(|member| member.seat.close());
            crew
        }
    };

    let mut crew = crew;
    if failure.is_none() {
        failure = done(&mut crew, &hubs, &control).await.err();
    }

    let mut report = Report { setup, ..Report::default() };
    let mut seats = Vec::with_capacity(crew.len());
    for Member { name, device, mut seat, .. } in crew {
        let stopped = attended_to_the_end(&device, seat.stop()).await;
        if let Err(error) = stopped {
            let error = error.at(operator(&name));
            match &failure {
                None => failure = Some(error),
                Some(_) => tracing::warn!(%error, "an operator's stop failed after the flow had"),
            }
        }
        report.add(name, &seat.tally(), &clock);
        seats.push(seat);
    }
    report.untaken = hubs.iter().map(|hub| hub.state.untaken() as u64).sum();
    report.elapsed = clock.elapsed();
    control.set_hubs(Arc::new([]));
    control.rest.watchers.end();
    let outcome = match failure.map(|error| control.fail(error)) {
        None => Ok(report),
        Some(error) => {
            tracing::debug!(%error, "flow failed\n{report}");
            Err(error)
        }
    };
    Finished { outcome, seats }
}

fn operator(name: &str) -> String {
    format!("operator `{name}`")
}

/// The operators that end first when the flow is to be drained: its sources; and those of loops that no source leads to,
/// which nothing else would ever end.
fn first_to_stop(operators: usize, joints: &[Joint]) -> Vec<bool> {
    let mut first = vec![true; operators];
    joints.iter().filter(|joint| joint.waits).for_each(|joint| first[joint.to.0] = false);
    let reached_from = |start: &[usize]| {
        let (mut reached, mut next) = (vec![false; operators], start.to_vec());
        while let Some(operator) = next.pop() {
            for joint in joints.iter().filter(|joint| joint.from.0 == operator) {
                if !std::mem::replace(&mut reached[joint.to.0], true) {
                    next.push(joint.to.0);
                }
            }
        }
        reached
    };
    let sources: Vec<_> = (0..operators).filter(|operator| first[*operator]).collect();
    let led_to = reached_from(&sources);
    for operator in 0..operators {
        first[operator] |= !led_to[operator] && reached_from(&[operator])[operator];
    }
    first
}

/// Makes the hubs and gives each operator its ends.
fn build(crew: &mut [Member], joints: Vec<Joint>) -> Result<Vec<Joined>> {
    let mut ends: Vec<Ends> = crew.iter().map(|_| HashMap::new()).collect();
    let mut hubs = Vec::with_capacity(joints.len());
    for joint in joints {
        let (sender, receiver, state) = (joint.make)(joint.plan)?;
        ends[joint.from.0].entry(joint.from.1).or_default().push(sender);
        ends[joint.to.0].entry(joint.to.1).or_default().push(receiver);
        hubs.push(Joined { state, from: joint.from.0, to: joint.to.0 });
    }
    for (member, ends) in crew.iter_mut().zip(ends) {
        member.seat.bind(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    Ok(hubs)
}

/// Resolves when all that the flow has enqueued is done: what nobody waited for may still have failed.
async fn done(crew: &mut [Member], hubs: &[Joined], control: &Control) -> Result<()> {
    for member in crew {
        for last in member.seat.last() {
            until_abort(control, last.completed()).await.map_err(|error| error.at(operator(&member.name)))?;
        }
    }
    for last in hubs.iter().filter_map(|hub| hub.state.last_copy()) {
        until_abort(control, last.completed()).await?;
    }
    Ok(())
}

/// The GPUs that operators are on.
fn gpus(crew: &[Member]) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for member in crew {
        if member.device.is_cuda() && !devices.contains(&member.device) {
            devices.push(member.device.clone());
        }
    }
    devices
}

/// Compiles and loads every kernel of the program for every GPU of the flow, before the first run and off the workers.
async fn compile(devices: Vec<Device>) -> Result<()> {
    for device in devices {
        for kernel in Kernel::all() {
            kernel.load(&device).await?;
        }
    }
    Ok(())
}

/// `work`, or an error once the flow is aborted.
async fn until_abort<T>(control: &Control, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = pin!(work);
    poll_fn(|task| {
        control.keeper.register(task.waker());
        if control.is_aborted() {
            return Poll::Ready(Err(aborted()));
        }
        work.as_mut().poll(task)
    })
    .await
}

fn aborted() -> Error {
    Error::new(ErrorKind::Cancelled, "the flow was aborted")
}

/// What the keeper looks after while the operators run.
struct Keeper<'a> {
    hubs: &'a [Joined],
    first_to_stop: &'a [bool],
    control: &'a Arc<Control>,
}

/// What a task says at its end.
struct Ended {
    index: usize,
    member: Member,
    outcome: Result<()>,
}

impl Keeper<'_> {
    /// Runs all operators to their ends; gives them back, and the first failure.
    async fn run(&self, crew: Vec<Member>) -> (Vec<Member>, Option<Error>) {
        let nodes = &self.control.nodes;
        let (tell, mut ended) = mpsc::unbounded_channel();
        let mut back: Vec<Option<Member>> = crew.iter().map(|_| None).collect();
        let mut left = crew.len();
        for (index, (mut member, node)) in crew.into_iter().zip(nodes).enumerate() {
            let (tell, node, control) = (tell.clone(), node.clone(), self.control.clone());
            let task_name = member.name.clone();
            spawn(&task_name, async move {
                // Also what is dropped at an abort may panic; whatever happens, this task says that it has ended.
                let running = caught(attended(&node, &member.device, member.seat.run())).await;
                // Before its ports are closed: whoever loses something then finds why.
                if let Err(error) = &running {
                    control.fail(error.again().at(operator(&member.name)));
                }
                // Its token goes after its ports have closed: their closing may wake others.
                let closing = caught(async {
                    member.seat.close();
                    Ok(())
                });
                let outcome = running.and(closing.await);
                node.end();
                let _ = tell.send(Ended { index, member, outcome });
            });
        }
        drop(tell);

        let mut failure: Option<Error> = None;
        let mut stopping = false;
        while left > 0 {
            let next = poll_fn(|task| self.poll_next(task, &mut ended, stopping, failure.is_some())).await;
            match next {
                Next::Ended(ended) => {
                    left -= 1;
                    if let Err(error) = ended.outcome {
                        // What is cancelled after a failure is not one.
                        if failure.is_none() {
                            failure = Some(self.control.fail(error.at(operator(&ended.member.name))));
                            nodes.iter().for_each(|node| node.abort());
                        }
                    }
                    back[ended.index] = Some(ended.member);
                }
                Next::Gone => {
                    failure.get_or_insert_with(|| {
                        Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran")
                    });
                    break;
                }
                Next::Stop => {
                    stopping = true;
                    let first = nodes.iter().zip(self.first_to_stop).filter(|(_, first)| **first);
                    first.for_each(|(node, _)| node.finish());
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
        stopping: bool,
        failed: bool,
    ) -> Poll<Next> {
        self.control.keeper.register(task.waker());
        self.control.rest.flow.register(task.waker());
        match ended.poll_recv(task) {
            Poll::Ready(Some(ended)) => return Poll::Ready(Next::Ended(Box::new(ended))),
            Poll::Ready(None) => return Poll::Ready(Next::Gone),
            Poll::Pending => {}
        }
        if failed {
            return Poll::Pending;
        }
        if self.control.is_aborted() {
            return Poll::Ready(Next::Fail(aborted()));
        }
        if !stopping && self.control.is_stopping() {
            return Poll::Ready(Next::Stop);
        }
        let Control { rest, nodes, .. } = &**self.control;
        if rest.tokens.none() && nodes.iter().any(|node| !node.has_ended()) {
            if Node::ask_again(nodes) {
                return Poll::Pending;
            }
            return Poll::Ready(self.at_rest());
        }
        Poll::Pending
    }

    /// Nothing moves and nothing will: the end, or a stall?
    fn at_rest(&self) -> Next {
        let mut waits: Vec<String> = Vec::new();
        let mut stuck = false;
        for (index, _) in self.control.nodes.iter().enumerate().filter(|(_, node)| node.is_parked()) {
            let lacks = self.control.lacks(index);
            stuck |= !lacks.room.is_empty();
            waits.push(format!("`{}` waits for {}", self.control.names[index], lacks.all().join(" and for ")));
        }
        stuck |= self.hubs.iter().any(|hub| hub.state.queued() > 0);
        if !stuck {
            return Next::Done;
        }
        Next::Fail(Error::new(ErrorKind::Stalled, format!("nothing can move any more:\n  - {}", waits.join("\n  - "))))
    }
}

enum Next {
    Ended(Box<Ended>),
    /// The runtime has dropped the operators' tasks.
    Gone,
    Stop,
    Fail(Error),
    Done,
}
