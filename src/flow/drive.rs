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
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use futures::task::AtomicWaker;
use tokio::sync::{mpsc, oneshot};

use super::{HubReport, Report, Running, connect::MakeLink, spawn::spawn};
use crate::{
    device::{Device, ticks::TickClock},
    error::{Error, ErrorKind, Result},
    hub::link::{HubState, LinkPlan},
    kernel::Kernel,
    operator::{
        lane::OwnStreams,
        node::{Node, Rest},
        quiet::Tokens,
        seat::{Ends, How, Seat, caught},
    },
    stream::Streams,
};

/// An operator that takes part.
pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) device: Device,
    pub(super) streams: OwnStreams,
    pub(super) seat: Box<dyn Seat>,
}

/// A hub to be made.
pub(super) struct Joint {
    pub(super) plan: LinkPlan,
    pub(super) make: MakeLink,
    /// Operator and port.
    pub(super) from: (usize, &'static str),
    pub(super) to: (usize, &'static str),
}

/// A hub at work.
struct Hub {
    state: Arc<dyn HubState>,
    from: usize,
    to: usize,
}

/// The words from outside.
#[derive(Debug, Default)]
pub(super) struct Control {
    stop: AtomicBool,
    abort: AtomicBool,
    keeper: AtomicWaker,
}

impl Control {
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.keeper.wake();
    }

    pub(super) fn abort(&self) {
        self.abort.store(true, Ordering::Release);
        self.keeper.wake();
    }
}

/// How it ended, and the operators.
pub(super) struct Finished {
    pub(super) outcome: Result<Report>,
    pub(super) seats: Vec<Box<dyn Seat>>,
}

/// Begins a run in the background.
pub(super) fn launch(name: Arc<str>, crew: Vec<Member>, joints: Vec<Joint>, how: How) -> Running {
    let control = Arc::new(Control::default());
    let (tell, finished) = oneshot::channel();
    let keeper = drive(crew, joints, control.clone(), how);
    spawn(&format!("flow {name}"), async move {
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

async fn drive(mut crew: Vec<Member>, joints: Vec<Joint>, control: Arc<Control>, how: How) -> Finished {
    let clock = TickClock::start();
    let rest = Arc::new(Rest { tokens: Tokens::new(crew.len()), flow: AtomicWaker::new() });
    let nodes: Vec<_> = (0..crew.len()).map(|operator| Node::new(operator, &rest)).collect();
    let names: Vec<_> = crew.iter().map(|member| member.name.clone()).collect();
    let mut sources = vec![true; crew.len()];
    joints.iter().for_each(|joint| sources[joint.to.0] = false);

    for (member, node) in crew.iter_mut().zip(&nodes) {
        let Member { name, device, streams, seat } = member;
        seat.enter(name.clone(), device.clone(), streams.clone(), node.clone(), how);
    }
    let mut failure = None;
    let hubs = match build(&mut crew, joints) {
        Ok(hubs) => hubs,
        Err(error) => {
            failure = Some(error);
            Vec::new()
        }
    };
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
            let keeper =
                Keeper { names: &names, nodes: &nodes, hubs: &hubs, sources: &sources, rest: &rest, control: &control };
            let (crew, failed) = keeper.run(crew).await;
            failure = failed;
            crew
        }
        Some(_) => {
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
    report.hubs = hubs.iter().map(|hub| HubReport::new(hub.state.name(), hub.state.counts())).collect();
    report.untaken = report.hubs.iter().map(|hub| hub.untaken).sum();
    report.elapsed = clock.elapsed();
    let outcome = match failure {
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

/// Makes the hubs and gives each operator its ends.
fn build(crew: &mut [Member], joints: Vec<Joint>) -> Result<Vec<Hub>> {
    let mut ends: Vec<Ends> = crew.iter().map(|_| HashMap::new()).collect();
    let mut hubs = Vec::with_capacity(joints.len());
    for joint in joints {
        let (sender, receiver, state) = (joint.make)(joint.plan)?;
        ends[joint.from.0].entry(joint.from.1).or_default().push(sender);
        ends[joint.to.0].entry(joint.to.1).or_default().push(receiver);
        hubs.push(Hub { state, from: joint.from.0, to: joint.to.0 });
    }
    for (member, ends) in crew.iter_mut().zip(ends) {
        member.seat.bind(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    Ok(hubs)
}

/// Resolves when all that the flow has enqueued is done: what nobody waited for may still have failed.
async fn done(crew: &mut [Member], hubs: &[Hub], control: &Control) -> Result<()> {
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
        if control.abort.load(Ordering::Acquire) {
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
    names: &'a [Arc<str>],
    nodes: &'a [Arc<Node>],
    hubs: &'a [Hub],
    sources: &'a [bool],
    rest: &'a Rest,
    control: &'a Control,
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
        let (tell, mut ended) = mpsc::unbounded_channel();
        let mut back: Vec<Option<Member>> = crew.iter().map(|_| None).collect();
        let mut left = crew.len();
        for (index, (mut member, node)) in crew.into_iter().zip(self.nodes).enumerate() {
            let (tell, node) = (tell.clone(), node.clone());
            let task_name = member.name.clone();
            spawn(&task_name, async move {
                // Also what is dropped at an abort may panic; whatever happens, this task says that it has ended.
                let running = caught(attended(&node, &member.device, member.seat.run())).await;
                // What an abort left open. Its token goes after its ports have closed: their closing may wake others.
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
                            failure = Some(error.at(operator(&ended.member.name)));
                            self.nodes.iter().for_each(|node| node.abort());
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
                    let sources = self.nodes.iter().zip(self.sources).filter(|(_, source)| **source);
                    sources.for_each(|(node, _)| node.finish());
                }
                Next::Fail(error) => {
                    failure = Some(error);
                    self.nodes.iter().for_each(|node| node.abort());
                }
                Next::Done => self.nodes.iter().for_each(|node| node.finish()),
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
        self.rest.flow.register(task.waker());
        match ended.poll_recv(task) {
            Poll::Ready(Some(ended)) => return Poll::Ready(Next::Ended(Box::new(ended))),
            Poll::Ready(None) => return Poll::Ready(Next::Gone),
            Poll::Pending => {}
        }
        if failed {
            return Poll::Pending;
        }
        if self.control.abort.load(Ordering::Acquire) {
            return Poll::Ready(Next::Fail(aborted()));
        }
        if !stopping && self.control.stop.load(Ordering::Acquire) {
            return Poll::Ready(Next::Stop);
        }
        if self.rest.tokens.none() && self.nodes.iter().any(|node| !node.has_ended()) {
            if Node::ask_again(self.nodes) {
                return Poll::Pending;
            }
            return Poll::Ready(self.at_rest());
        }
        Poll::Pending
    }

    /// Nothing moves and nothing will: the end, or a stall?
    fn at_rest(&self) -> Next {
        let all: Vec<&dyn HubState> = self.hubs.iter().map(|hub| &*hub.state).collect();
        let mut waits: Vec<String> = Vec::new();
        let mut stuck = false;
        for (index, _) in self.nodes.iter().enumerate().filter(|(_, node)| node.is_parked()) {
            let writes =
                self.hubs.iter().filter(|hub| hub.from == index).filter_map(|hub| hub.state.writer_lacks(&all));
            let reads = self.hubs.iter().filter(|hub| hub.to == index).filter_map(|hub| hub.state.reader_lacks(&all));
            let writes: Vec<String> = writes.collect();
            stuck |= !writes.is_empty();
            let refused = self.nodes[index].is_refused().then(|| "its own `may_run` to allow it".to_string());
            let lacks: Vec<String> = writes.into_iter().chain(reads).chain(refused).collect();
            waits.push(format!("`{}` waits for {}", self.names[index], lacks.join(" and for ")));
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
