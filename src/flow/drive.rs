//! One run of a flow, from its hubs to its report.
//!
//! One task keeps the flow (`drive`); each operator has a task of its own, which says through a channel how it ended and
//! gives the operator back: see [`keeper`](super::keeper).
//!
//! An operator with a [thread of its own](super::thread) is sent there for each phase, and comes back from it.
//!
//! ```text
//!   hubs, kernels ──> start, one by one ──> all run ──> stop, one by one ──> report
//!         │ error           │ error            │ first error: abort the others
//!         └─────────────────┴──────────────────┴──> stop, one by one ──> that error
//! ```
//!
//! Before the `stop`s of a flow that went well, all that was enqueued is waited for: its last work may have failed too.

use std::{
    collections::HashMap,
    future::poll_fn,
    ops::{Deref, DerefMut},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    DeviceReport, HubReport, OnStall, Report, Running, SectionReport,
    connect::MakeLink,
    cycles,
    keeper::Keeper,
    link::{self, Attached, Linking},
    looks::TimeLimit,
    section,
    spawn::{Threads, guarded, spawn},
    starting::starting,
    thread::{OwnThread, at_home},
};
use crate::{
    device::{Device, ticks::TickClock},
    error::{Error, ErrorKind, Result, said},
    hub::{chunks::core::ChunkState, link::LinkPlan, queue::Counts},
    kernel::Kernel,
    memory::memory_passes,
    operator::{
        attend::{attended, attended_to_the_end},
        control::{Control, Hubs, Joined},
        node::Node,
        seat::{Ends, Seat, Tally, caught},
    },
    sync::{discard, logged},
};

/// An operator that takes part, in its surroundings.
pub(super) struct Member {
    /// Its number in the flow.
    pub(super) index: usize,
    pub(super) name: Arc<str>,
    pub(super) device: Device,
    pub(super) seat: OwnSeat,
    /// Hubs that its `start` puts chunks into.
    pub(super) fills: Vec<Arc<dyn ChunkState>>,
}

/// An operator of a flow. Several are dropped together: with their flow, where the runtime ends, or where a flow's outcome is
/// not taken. A panic of one's destructor ends there, and is logged. An operator may own another flow, to any depth: so its
/// destructor is left to [`discard`], which calls deep ones one after another.
pub(super) struct OwnSeat(Option<Named>);

/// An operator, and the names for the log. Its destructor is the one that `discard` calls.
struct Named {
    seat: Option<Box<Seat>>,
    flow: Arc<str>,
    operator: Arc<str>,
}

impl OwnSeat {
    pub(super) fn new(seat: Seat, flow: &Arc<str>, operator: &Arc<str>) -> Self {
        Self(Some(Named { seat: Some(Box::new(seat)), flow: flow.clone(), operator: operator.clone() }))
    }

    /// Drops it. A panic of its destructor is the error.
    fn destroy(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |mut named| named.destroy())
    }
}

impl Named {
    fn destroy(&mut self) -> Result<()> {
        let seat = self.seat.take();
        catch_unwind(AssertUnwindSafe(|| drop(seat))).map_err(|panic| Error::new(ErrorKind::Panicked, said(panic)))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            let (flow, operator) = (&*self.flow, &*self.operator);
            logged(|| {
                tracing::warn!(
                    flow,
                    operator,
                    %error,
                    "an operator's destructor panicked: release what may fail in its `stop`, which can return the error"
                );
            });
        }
    }
}

impl Deref for OwnSeat {
    type Target = Seat;

    fn deref(&self) -> &Self::Target {
        match self.0.as_ref().and_then(|named| named.seat.as_deref()) {
            Some(seat) => seat,
            None => unreachable!("only `destroy`, which consumes this, and the destructor take it out"),
        }
    }
}

impl DerefMut for OwnSeat {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self.0.as_mut().and_then(|named| named.seat.as_deref_mut()) {
            Some(seat) => seat,
            None => unreachable!("only `destroy`, which consumes this, and the destructor take it out"),
        }
    }
}

impl Drop for OwnSeat {
    fn drop(&mut self) {
        discard(self.0.take());
    }
}

/// A hub to be made.
#[derive(Clone)]
pub(super) struct Joint {
    pub(super) plan: LinkPlan,
    pub(super) make: MakeLink,
    /// Operator and port.
    pub(super) from: (usize, &'static str),
    pub(super) to: (usize, &'static str),
    /// Its writer waits for room, its reader for messages.
    pub(super) writer_waits: bool,
    pub(super) reader_waits: bool,
    /// The reader's port, where it waits for a message of each connection.
    pub(super) of_each: Option<&'static str>,
}

/// A link of a port to a hub of chunks, to be made.
pub(super) struct ToLink {
    pub(super) linking: Linking,
    /// The port's name.
    pub(super) port: &'static str,
}

/// What a task says at its end.
pub(super) struct Ended {
    pub(super) member: Member,
    /// Its own, or its section.
    pub(super) place: String,
    pub(super) outcome: Result<()>,
}

/// How a run ended, and the operators by their numbers, where they are wanted back.
pub(super) struct Finished {
    pub(super) outcome: Result<Report>,
    pub(super) seats: Vec<(usize, OwnSeat)>,
}

/// A run that is about to begin.
pub(super) struct Start {
    /// Its number.
    pub(super) flow: u64,
    pub(super) control: Arc<Control>,
    pub(super) crew: Vec<Member>,
    pub(super) threads: Threads,
    /// By the operators' numbers: those that have one.
    pub(super) own_threads: Vec<Option<OwnThread>>,
    pub(super) joints: Vec<Joint>,
    pub(super) links: Vec<ToLink>,
    pub(super) sections: Vec<section::Start>,
    /// Operators of cycles that begin only by a `run` of their own.
    pub(super) unbegun: Vec<Vec<usize>>,
    /// The operators are wanted back. Otherwise each is dropped after its `stop`, where that ran.
    pub(super) keep: bool,
    pub(super) on_stall: OnStall,
}

/// Begins a run in the background.
pub(super) fn launch(start: Start) -> Running {
    let (tell, finished) = oneshot::channel();
    let (control, failing) = (start.control.clone(), start.control.clone());
    let threads = start.threads;
    let watched = Watched(control.clone());
    spawn(threads, &format!("flow {}", control.name), async move {
        let mut driven = None;
        guarded(failing.clone(), "its own task".into(), async { driven = Some(drive(start, watched, &tell).await) })
            .await;
        let finished = driven.unwrap_or_else(|| {
            let outcome = Err(failing.fail(gone()));
            Finished { outcome, seats: Vec::new() }
        });
        // Nobody listens to a flow whose handle was dropped.
        let _ = tell.send(finished);
    });
    Running::new(control, finished)
}

/// The changes of a flow's operators end with it, and also if the runtime ends before, be it before the flow was polled.
struct Watched(Arc<Control>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.rest.watchers.end();
    }
}

async fn drive(start: Start, watched: Watched, tell: &oneshot::Sender<Finished>) -> Finished {
    let Start { flow, control, mut crew, threads, own_threads, joints, links, sections, unbegun, keep, on_stall } =
        start;
    let told: Vec<_> = sections.iter().map(|section| section.told.clone()).collect();
    let _watched = watched;
    let clock = TickClock::start();
    let first_to_stop = first_to_stop(crew.len(), &joints, &links);
    let mut failure = None;
    let mut hubs = Hubs::default();
    // What a hand-written port does as it is bound is user code.
    let building = caught(async {
        let build = build(&mut crew, joints, links, &control);
        hubs = until_over(&control, || "its hubs wait for memory".into(), build).await?;
        Ok(())
    });
    match building.await {
        Ok(()) => control.set_hubs(hubs),
        Err(error) => failure = Some(error),
    }
    let (hubs, devices) = (control.hubs(), devices(&crew));
    let chunk_hubs = link::hubs(&hubs.links);
    let before: Vec<_> = chunk_hubs.iter().map(|hub| hub.counts()).collect();
    let attached = Attached::new(chunk_hubs.clone(), control.rest.clone());
    if failure.is_none() {
        failure = until_over(&control, || "its kernels are compiled".into(), compile(&devices)).await.err();
    }
    let setup = clock.elapsed();
    let mut started = Vec::with_capacity(crew.len());
    for member in crew {
        if failure.is_some() {
            started.push(member);
            continue;
        }
        let (node, name) = (Node::alone(), member.name.clone());
        let starting = at_home(own_threads[member.index].as_ref(), first_phase(member, flow, node.clone()));
        let left = || format!("`{name}` is in its `start`");
        let outcome = match abortable(&control, &node, left, starting).await {
            Some((member, outcome)) => {
                started.push(member);
                outcome
            }
            None => Err(gone()),
        };
        failure = outcome.err().map(|error| error.at(operator(&name)));
    }

    let mut crew = started;
    if let Some(error) = failure.take() {
        failure = Some(control.fail(error));
    }
    if failure.is_none() {
        let keeper = Keeper {
            threads,
            own_threads: &own_threads,
            hubs: &hubs,
            first_to_stop: &first_to_stop,
            control: &control,
            on_stall,
        };
        (crew, failure) = keeper.run(crew, sections).await;
    } else {
        for member in &mut crew {
            let closing = caught(async {
                member.seat.close();
                Ok(())
            });
            if let Err(error) = closing.await {
                logged(|| tracing::warn!(%error, operator = &*member.name, "closing an operator's ports panicked"));
            }
        }
    }
    if failure.is_none() {
        failure = cycles::unbegun(&unbegun, &crew, &control);
    }
    if failure.is_none() {
        failure = done(&mut crew, &told, &hubs, &control).await.err().map(|error| control.fail(error));
    }

    let mut report = Report { setup, ..Report::default() };
    let mut seats = Vec::with_capacity(crew.len());
    for member in crew {
        let (index, name) = (member.index, member.name.clone());
        let keep = keep && !tell.is_closed();
        let stopping = at_home(own_threads[index].as_ref(), last_phase(member, keep));
        let stopped = match stopping.await {
            Some((tally, seat, stopped)) => {
                report.add(name.clone(), &tally, &clock);
                seats.extend(seat.map(|seat| (index, seat)));
                stopped
            }
            None => Err(gone()),
        };
        if let Err(error) = stopped {
            let error = error.at(operator(&name));
            match &failure {
                None => failure = Some(error),
                Some(_) => logged(|| tracing::warn!(%error, "an operator's stop failed after the flow had")),
            }
        }
    }
    for thread in own_threads.into_iter().flatten() {
        thread.end().await;
    }
    report.hubs = hubs.all.iter().map(|hub| HubReport::new(hub.state.name(), hub.state.counts())).collect();
    report.devices = devices.iter().map(DeviceReport::new).collect();
    for (hub, (_, consumed)) in chunk_hubs.iter().zip(before) {
        let counts = Counts { taken: hub.counts().1 - consumed, dropped: 0, untaken: hub.queued() as u64 };
        report.hubs.push(HubReport::new(hub.name(), counts));
    }
    report.sections = told.iter().map(|section| SectionReport::new(section)).collect();
    drop(attached);
    report.untaken = report.hubs.iter().map(|hub| hub.untaken).sum();
    report.elapsed = clock.elapsed();
    control.set_hubs(Hubs::default());
    let outcome = match failure.map(|error| control.fail(error)) {
        None => Ok(report),
        Some(error) => {
            logged(|| tracing::debug!(%error, "flow failed\n{report}"));
            Err(error.attach(report))
        }
    };
    Finished { outcome, seats }
}

/// An operator's `start`.
async fn first_phase(mut member: Member, flow: u64, node: Arc<Node>) -> (Member, Result<()>) {
    let Member { device, seat, name, .. } = &mut member;
    let outcome = caught(starting(flow, name.clone(), attended(&node, device, seat.start()))).await;
    let filled = outcome.and_then(|()| link::are_filled(&member.fills));
    (member, filled)
}

/// An operator's `stop`. It comes back if it is to be kept, and is dropped here if not.
async fn last_phase(member: Member, keep: bool) -> (Tally, Option<OwnSeat>, Result<()>) {
    let Member { device, mut seat, .. } = member;
    let stopped = attended_to_the_end(&device, seat.stop()).await;
    let tally = seat.tally();
    if keep {
        return (tally, Some(seat), stopped);
    }
    (tally, None, stopped.and(seat.destroy()))
}

pub(super) fn operator(name: &str) -> String {
    format!("operator `{name}`")
}

/// The operators that end first when the flow is to be drained: its sources; and those of loops that no source leads to,
/// which nothing else would ever end.
fn first_to_stop(operators: usize, joints: &[Joint], links: &[ToLink]) -> Vec<bool> {
    let links: Vec<_> = links.iter().map(|link| link.linking.clone()).collect();
    let drained: Vec<_> = link::drained_through(&links).collect();
    let mut first = vec![true; operators];
    joints.iter().filter(|joint| joint.reader_waits).for_each(|joint| first[joint.to.0] = false);
    drained.iter().for_each(|(_, reader)| first[*reader] = false);
    let mut behind = vec![Vec::new(); operators];
    let joined = joints.iter().map(|joint| (joint.from.0, joint.to.0));
    joined.chain(drained).for_each(|(from, to)| behind[from].push(to));
    let reached_from = |start: Vec<usize>| {
        let (mut reached, mut next) = (vec![false; operators], start);
        while let Some(operator) = next.pop() {
            for &operator in &behind[operator] {
                if !std::mem::replace(&mut reached[operator], true) {
                    next.push(operator);
                }
            }
        }
        reached
    };
    let led_to = reached_from((0..operators).filter(|operator| first[*operator]).collect());
    let looks = (0..operators).filter(|operator| !first[*operator] && !led_to[*operator]);
    for operator in looks.collect::<Vec<_>>() {
        first[operator] = reached_from(vec![operator])[operator];
    }
    first
}

/// Makes the hubs and gives each operator its ends. Where there is no memory for one, what streams still use is waited for.
async fn build(crew: &mut [Member], joints: Vec<Joint>, links: Vec<ToLink>, control: &Control) -> Result<Hubs> {
    let mut ends: Vec<Ends> = crew.iter().map(|_| HashMap::new()).collect();
    let mut hubs = Vec::with_capacity(joints.len());
    for joint in joints {
        let (sender, receiver, state) = loop {
            let plan = &joint.plan;
            match (joint.make)(plan.clone()) {
                Err(error) if error.is_out_of_memory() => {
                    if !memory_passes(&plan.writer).await && !memory_passes(&plan.reader).await {
                        return Err(error);
                    }
                }
                made => break made?,
            }
        };
        ends[joint.from.0].entry(joint.from.1).or_default().push(sender);
        ends[joint.to.0].entry(joint.to.1).or_default().push(receiver);
        let Joint { from, to, writer_waits, reader_waits, of_each, .. } = joint;
        // Within a section a round waits at the edge.
        let waits = control.section(from.0).is_none_or(|section| control.section(to.0) != Some(section));
        let (writer_waits, reader_waits) = (writer_waits && waits, reader_waits && waits);
        hubs.push(Joined { state, from: from.0, to: to.0, writer_waits, reader_waits, of_each });
    }
    let mut linked = Vec::with_capacity(links.len());
    for ToLink { linking, port } in links {
        let operator = linking.port.operator;
        let (end, link) = linking.make(&crew[operator].device)?;
        ends[operator].entry(port).or_default().push(end);
        linked.push(link);
    }
    for (member, ends) in crew.iter_mut().zip(ends) {
        member.seat.bind(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    Ok(Hubs::new(hubs, linked, crew.len()))
}

/// Resolves when all that the flow has enqueued is done: what nobody waited for may still have failed.
async fn done(crew: &mut [Member], sections: &[Arc<section::Told>], hubs: &Hubs, control: &Control) -> Result<()> {
    let enqueued = || "work that was enqueued is not done".to_string();
    for section in sections {
        if let Some(last) = section.last() {
            let done = until_over(control, enqueued, last.completed()).await;
            done.map_err(|error| blamed(control, error, &section::place(&section.name)))?;
        }
    }
    for member in crew {
        for last in member.seat.last() {
            let done = until_over(control, enqueued, last.completed()).await;
            done.map_err(|error| blamed(control, error, &operator(&member.name)))?;
        }
    }
    for last in hubs.all.iter().filter_map(|hub| hub.state.last_copy()) {
        until_over(control, enqueued, last.completed()).await?;
    }
    for last in link::hubs(&hubs.links).into_iter().flat_map(|hub| hub.last_copies()) {
        // A hub of chunks goes on without a device that it has lost: what was lost with it is an error of the links that were to
        // have it.
        match until_over(control, enqueued, last.completed()).await {
            Err(error) if !error.is_device_lost() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The devices that operators are on, the host left out.
fn devices(crew: &[Member]) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for member in crew {
        if !member.device.is_host() && !devices.contains(&member.device) {
            devices.push(member.device.clone());
        }
    }
    devices
}

/// Compiles and loads every kernel of the program for every GPU of the flow, before the first run and off the workers.
async fn compile(devices: &[Device]) -> Result<()> {
    for device in devices.iter().filter(|device| device.is_cuda()) {
        for kernel in Kernel::all() {
            kernel.load(device).await?;
        }
    }
    Ok(())
}

/// When a flow is over before it has ended.
struct Limit<'a> {
    control: &'a Control,
    /// Of [`stop_within`](crate::flow::Handle::stop_within).
    stop: TimeLimit,
}

impl<'a> Limit<'a> {
    fn of(control: &'a Control) -> Self {
        Self { control, stop: TimeLimit::default() }
    }

    /// Once the flow is aborted, or was to have ended by now: the error. Until then the waker is kept. `left`: what there is yet
    /// to do, in words.
    fn is_over(&mut self, left: impl FnOnce() -> String, task: &mut Context<'_>) -> Option<Error> {
        self.control.keeper.register(task.waker());
        if self.control.is_aborted() {
            return Some(aborted(self.control));
        }
        let (due, time) = self.control.stop_by()?;
        self.stop.has_passed(due, task).then(|| overdue(self.control, time, &left()))
    }
}

/// `work`, or an error once the flow is over. `left`: what there is yet to do, in words.
async fn until_over<T>(
    control: &Control,
    left: impl Fn() -> String,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let (mut work, mut limit) = (pin!(work), Limit::of(control));
    poll_fn(|task| match limit.is_over(&left, task) {
        Some(error) => Poll::Ready(Err(error)),
        None => work.as_mut().poll(task),
    })
    .await
}

/// `work`, whose node is aborted once the flow is over.
async fn abortable<T>(
    control: &Control,
    node: &Arc<Node>,
    left: impl Fn() -> String,
    work: impl Future<Output = T>,
) -> T {
    let (mut work, mut limit, mut is_over) = (pin!(work), Limit::of(control), false);
    poll_fn(|task| {
        if !is_over && let Some(error) = limit.is_over(&left, task) {
            is_over = true;
            control.fail(error);
            node.abort();
        }
        work.as_mut().poll(task)
    })
    .await
}

/// The flow has not ended this long after it was asked to.
pub(super) fn overdue(control: &Control, time: Duration, left: &str) -> Error {
    let name = &control.name;
    let text = format!("flow `{name}` did not end within {time:?} of `stop`, and was aborted:\n  - {left}");
    Error::new(ErrorKind::Cancelled, text)
}

/// Of what has failed at this place. An abort is no operator's failure; and a lost device is known to those that use it next: its
/// error says which work was unfinished, and this place only noticed it.
pub(super) fn blamed(control: &Control, error: Error, place: &str) -> Error {
    match error.kind() {
        ErrorKind::Cancelled if control.is_aborted() => aborted(control),
        ErrorKind::DeviceLost => error.noticed_by(place),
        _ => error.at(place),
    }
}

pub(super) fn aborted(control: &Control) -> Error {
    Error::new(ErrorKind::Cancelled, format!("flow `{}` was aborted", control.name))
}

pub(super) fn gone() -> Error {
    Error::new(ErrorKind::Cancelled, "the runtime ended while the flow ran")
}
