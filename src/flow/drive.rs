//! One run of a flow, from its hubs to its report.
//!
//! The flow has a task (`drive`), and so does each operator. An operator's task reports its end through a channel,
//! which also returns the operator: see [`supervisor`](super::supervisor).
//!
//! An operator with its [own thread](super::thread) is sent to that thread for each phase, and returned.
//!
//! ```text
//!   hubs, kernels ──> start, one by one ──> all run ──> stop, one by one ──> report
//!         │ error           │ error            │ first error: abort the others
//!         └─────────────────┴──────────────────┴──> stop, one by one ──> that error
//! ```
//!
//! If no operator has failed, all enqueued work is awaited before the `stop`s, since the last of it might still fail.

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

use tokio::{runtime, sync::oneshot};

use super::{
    DeviceReport, FlowObserver, Handle, HubReport, OnStall, Report, Running, SectionReport,
    connect::MakeLink,
    cycles,
    link::{self, Attached, Linking},
    searches::TimeLimit,
    section,
    spawn::{Threads, guarded, in_simulation, spawn},
    starting::starting,
    supervisor::Supervisor,
    thread::{OwnThread, run_on_own_thread},
};
use crate::{
    device::{Device, ticks::TickClock},
    error::{Error, ErrorKind, Result, caught, panic_message},
    hub::{build::HubPlan, chunks::core::ChunkHubView, queue::Counts},
    kernel::Kernel,
    memory::wait_for_reusable_memory,
    operator::{
        control::{ConnectedHub, Control, FlowParts, Hubs, SectionParts},
        erased::{BoxedOperator, PortEnds},
        flow_devices::FlowDevices,
        operator_task::OperatorTask,
        poll_in_context::{poll_in_context, poll_stop_in_context},
        settings::OperatorStats,
    },
    sync::{discard, logged},
};

/// An operator during a run of its flow.
pub(super) struct FlowOperator {
    pub(super) index: usize,
    pub(super) name: Arc<str>,
    pub(super) device: Device,
    pub(super) operator: OwnedOperator,
    /// It was given a thread of its own, which it may block.
    pub(super) may_block: bool,
    /// The hubs that the operator's `start` puts chunks into.
    pub(super) fills: Vec<Arc<dyn ChunkHubView>>,
}

/// An operator of a flow. Several are dropped together: with their flow, when the runtime ends, or when a flow's
/// outcome is not received. So a panic in a destructor is caught and logged. An operator may own another flow, nested
/// to any depth, so its destructor is left to [`discard`], which calls deeply nested ones one after another.
pub(super) struct OwnedOperator(Option<Named>);

/// An operator, and its names for the log. `discard` calls its destructor.
struct Named {
    operator: Option<Box<BoxedOperator>>,
    flow: Arc<str>,
    name: Arc<str>,
}

impl OwnedOperator {
    pub(super) fn new(operator: BoxedOperator, flow: &Arc<str>, name: &Arc<str>) -> Self {
        Self(Some(Named { operator: Some(Box::new(operator)), flow: flow.clone(), name: name.clone() }))
    }

    /// Drops the operator. A panic of its destructor becomes the error.
    fn destroy(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |mut named| named.destroy())
    }
}

impl Named {
    fn destroy(&mut self) -> Result<()> {
        let operator = self.operator.take();
        catch_unwind(AssertUnwindSafe(|| drop(operator)))
            .map_err(|panic| Error::new(ErrorKind::Panicked, panic_message(panic)))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Err(error) = self.destroy() {
            let (flow, operator) = (&*self.flow, &*self.name);
            logged(|| {
                tracing::warn!(
                    flow,
                    operator,
                    error = %format_args!("{error:#}"),
                    "an operator's destructor panicked: move cleanup that can fail into its `stop`, which can return an error"
                );
            });
        }
    }
}

impl Deref for OwnedOperator {
    type Target = BoxedOperator;

    fn deref(&self) -> &Self::Target {
        match self.0.as_ref().and_then(|named| named.operator.as_deref()) {
            Some(operator) => operator,
            None => unreachable!("only the destructor and `destroy`, which consumes `self`, take the operator"),
        }
    }
}

impl DerefMut for OwnedOperator {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self.0.as_mut().and_then(|named| named.operator.as_deref_mut()) {
            Some(operator) => operator,
            None => unreachable!("only the destructor and `destroy`, which consumes `self`, take the operator"),
        }
    }
}

impl Drop for OwnedOperator {
    fn drop(&mut self) {
        discard(self.0.take());
    }
}

/// A hub to create.
#[derive(Clone)]
pub(super) struct HubToCreate {
    pub(super) plan: HubPlan,
    pub(super) make: MakeLink,
    pub(super) from: (usize, &'static str),
    pub(super) to: (usize, &'static str),
    /// Whether its writer waits for room, and its reader for messages.
    pub(super) writer_waits: bool,
    pub(super) reader_waits: bool,
    /// The reader's port, if it waits for a message from each connection.
    pub(super) of_each: Option<&'static str>,
}

/// A link of a port to a hub of chunks, to create.
pub(super) struct ToLink {
    pub(super) linking: Linking,
    pub(super) port: &'static str,
}

/// The report of a task at its end.
pub(super) struct Ended {
    pub(super) member: FlowOperator,
    /// The operator or section of the task, as errors name it.
    pub(super) place: String,
    pub(super) outcome: Result<()>,
}

/// The outcome of a run, and the operators by their numbers, if they are kept.
pub(super) struct Finished {
    pub(super) outcome: Result<Report>,
    pub(super) operators: Vec<(usize, OwnedOperator)>,
}

/// The parameters of a run.
pub(super) struct RunSetup {
    pub(super) flow: u64,
    pub(super) control: Arc<Control>,
    pub(super) members: Vec<FlowOperator>,
    pub(super) threads: Threads,
    /// By operator: its thread, if it has its own.
    pub(super) own_threads: Vec<Option<OwnThread>>,
    pub(super) hubs_to_create: Vec<HubToCreate>,
    pub(super) links: Vec<ToLink>,
    pub(super) sections: Vec<section::SectionSetup>,
    /// The operators of each cycle that begins only if one of them overrides `run`.
    pub(super) unbegun: Vec<Vec<usize>>,
    /// The operators are returned at the end. Otherwise each is dropped after its `stop`, if that ran.
    pub(super) keep: bool,
    pub(super) on_stall: OnStall,
    pub(super) observers: Vec<Arc<dyn FlowObserver>>,
}

/// Starts a run in the background.
pub(super) fn launch(start: RunSetup) -> Running {
    let (sender, finished) = oneshot::channel();
    let (control, failing) = (start.control.clone(), start.control.clone());
    let threads = start.threads;
    let watched = EndOnDrop { control: control.clone(), observers: start.observers.clone() };
    spawn(threads, &format!("flow {}", control.name), async move {
        let mut driven = None;
        guarded(failing.clone(), "its own task".into(), async { driven = Some(drive(start, watched, &sender).await) })
            .await;
        let finished = driven.unwrap_or_else(|| {
            let outcome = Err(failing.fail(runtime_shut_down()));
            Finished { outcome, operators: Vec::new() }
        });
        // The receiver may have been dropped with the flow's handle.
        let _ = sender.send(finished);
    });
    Running::new(control, finished)
}

/// Ends the streams of status changes with the flow, even if the runtime shuts down before the flow is polled, and has the
/// observers forget a run that is cut off so.
struct EndOnDrop {
    control: Arc<Control>,
    observers: Vec<Arc<dyn FlowObserver>>,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        let Self { control, observers } = self;
        let is_cut_off = !control.has_ended();
        if is_cut_off {
            control.fail(runtime_shut_down());
            control.end();
        }
        control.activity.watchers.end();
        if is_cut_off {
            observers.iter().for_each(|observer| observer.cut_off(&Handle(control.clone())));
        }
    }
}

async fn drive(start: RunSetup, watched: EndOnDrop, sender: &oneshot::Sender<Finished>) -> Finished {
    let RunSetup {
        flow,
        control,
        mut members,
        threads,
        own_threads,
        hubs_to_create,
        links,
        sections,
        unbegun,
        keep,
        on_stall,
        observers,
    } = start;
    let stats: Vec<_> = sections.iter().map(|section| section.stats.clone()).collect();
    let _watched = watched;
    let clock = TickClock::start();
    let first_to_stop = first_to_stop(members.len(), &hubs_to_create, &links);
    let mut failure = None;
    let mut hubs = Hubs::default();
    // Binding a hand-written port runs user code.
    let building = caught(async {
        let build = build(&mut members, hubs_to_create, links, &control);
        hubs = until_over(&control, || "its hubs are waiting for memory".into(), build).await?;
        Ok(())
    });
    match building.await {
        Ok(()) => {
            control.set_hubs(hubs);
            set_parts(&control, &members, &stats, threads);
        }
        Err(error) => failure = Some(error),
    }
    let (hubs, devices) = (control.hubs(), devices(&members));
    let chunk_hubs = link::hubs(&hubs.links);
    let before: Vec<_> = chunk_hubs.iter().map(|hub| hub.counts()).collect();
    let attached = Attached::new(chunk_hubs.clone(), control.activity.clone());
    if failure.is_none() {
        failure = until_over(&control, || "its kernels are being compiled".into(), compile(&devices)).await.err();
    }
    let setup = clock.elapsed();
    let mut started = Vec::with_capacity(members.len());
    for member in members {
        if failure.is_some() {
            started.push(member);
            continue;
        }
        let (node, name) = (OperatorTask::alone(), member.name.clone());
        let starting = run_on_own_thread(own_threads[member.index].as_ref(), first_phase(member, flow, node.clone()));
        let left = || format!("`{name}` is in its `start`");
        let outcome = match abortable(&control, &node, left, starting).await {
            Some((member, outcome)) => {
                started.push(member);
                outcome
            }
            None => Err(runtime_shut_down()),
        };
        failure = outcome.err().map(|error| error.at(operator(&name)));
    }

    let mut members = started;
    if let Some(error) = failure.take() {
        failure = Some(control.fail(error));
    }
    if failure.is_none() {
        observers.iter().for_each(|observer| observer.begins(&Handle(control.clone())));
        let supervisor = Supervisor {
            threads,
            own_threads: &own_threads,
            hubs: &hubs,
            first_to_stop: &first_to_stop,
            control: &control,
            on_stall,
        };
        (members, failure) = supervisor.run(members, sections).await;
    } else {
        for member in &mut members {
            let closing = caught(async {
                member.operator.close();
                Ok(())
            });
            if let Err(error) = closing.await {
                logged(
                    || tracing::warn!(error = %format_args!("{error:#}"), operator = &*member.name, "closing an operator's ports panicked"),
                );
            }
        }
    }
    if failure.is_none() {
        failure = cycles::unbegun(&unbegun, &members, &control);
    }
    if failure.is_none() {
        failure = done(&mut members, &stats, &hubs, &control).await.err().map(|error| control.fail(error));
    }

    let mut report = Report { setup, ..Report::default() };
    let mut operators = Vec::with_capacity(members.len());
    for member in members {
        let (index, name) = (member.index, member.name.clone());
        let keep = keep && !sender.is_closed();
        let stopping = run_on_own_thread(own_threads[index].as_ref(), last_phase(member, keep));
        let stopped = match stopping.await {
            Some((tally, operator, stopped)) => {
                report.add(name.clone(), &tally, &clock);
                operators.extend(operator.map(|operator| (index, operator)));
                stopped
            }
            None => Err(runtime_shut_down()),
        };
        if let Err(error) = stopped {
            let error = error.at(operator(&name));
            match &failure {
                None => failure = Some(error),
                Some(_) => logged(
                    || tracing::warn!(error = %format_args!("{error:#}"), "an operator's `stop` failed after the flow had failed"),
                ),
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
    report.sections = stats.iter().map(|section| SectionReport::new(section)).collect();
    drop(attached);
    report.untaken = report.hubs.iter().map(|hub| hub.untaken).sum();
    report.elapsed = clock.elapsed();
    let failure = failure.map(|error| control.fail(error));
    control.end();
    observers.iter().for_each(|observer| observer.ends(&Handle(control.clone())));
    control.observed.get().into_iter().for_each(|parts| parts.devices.release());
    control.set_hubs(Hubs::default());
    let outcome = match failure {
        None => Ok(report),
        Some(error) => {
            logged(|| tracing::debug!(error = %format_args!("{error:#}"), "flow failed\n{report}"));
            Err(error.attach(report))
        }
    };
    Finished { outcome, operators }
}

/// Sets what observers show besides.
fn set_parts(control: &Arc<Control>, members: &[FlowOperator], stats: &[Arc<section::SectionStats>], threads: Threads) {
    let mut devices = vec![Device::host(); control.tasks.len()];
    let mut may_block = vec![false; devices.len()];
    for member in members {
        devices[member.index] = member.device.clone();
        may_block[member.index] = member.may_block;
    }
    let devices = FlowDevices::new(devices);
    let parts = |stats: &Arc<section::SectionStats>| -> SectionParts {
        SectionParts { counts: stats.counts.clone(), work: stats.work.clone() }
    };
    let sections = stats.iter().map(parts).collect();
    let workers = match threads {
        _ if in_simulation() => None,
        Threads::This => Some(1),
        Threads::Any => runtime::Handle::try_current().ok().map(|runtime| runtime.metrics().num_workers()),
    };
    let _ = control.observed.set(FlowParts { devices, may_block, workers, sections });
}

async fn first_phase(mut member: FlowOperator, flow: u64, node: Arc<OperatorTask>) -> (FlowOperator, Result<()>) {
    let FlowOperator { device, operator, name, .. } = &mut member;
    let outcome = caught(starting(flow, name.clone(), poll_in_context(&node, device, operator.start()))).await;
    let filled = outcome.and_then(|()| link::are_filled(&member.fills));
    (member, filled)
}

/// Runs an operator's `stop`. Returns the operator if `keep` is set, and drops it otherwise.
async fn last_phase(member: FlowOperator, keep: bool) -> (OperatorStats, Option<OwnedOperator>, Result<()>) {
    let FlowOperator { device, mut operator, .. } = member;
    let stopped = poll_stop_in_context(&device, operator.stop()).await;
    let tally = operator.tally();
    if keep {
        return (tally, Some(operator), stopped);
    }
    (tally, None, stopped.and(operator.destroy()))
}

pub(super) fn operator(name: &str) -> String {
    format!("operator `{name}`")
}

/// The operators that end first when the flow is drained: its sources, and the operators of loops that no source leads
/// to, which nothing else would end.
fn first_to_stop(operators: usize, hubs_to_create: &[HubToCreate], links: &[ToLink]) -> Vec<bool> {
    let links: Vec<_> = links.iter().map(|link| link.linking.clone()).collect();
    let drained: Vec<_> = link::drained_through(&links).collect();
    let mut first = vec![true; operators];
    hubs_to_create
        .iter()
        .filter(|hub_to_create| hub_to_create.reader_waits)
        .for_each(|hub_to_create| first[hub_to_create.to.0] = false);
    drained.iter().for_each(|(_, reader)| first[*reader] = false);
    let mut behind = vec![Vec::new(); operators];
    let joined = hubs_to_create.iter().map(|hub_to_create| (hub_to_create.from.0, hub_to_create.to.0));
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
    let loops = (0..operators).filter(|operator| !first[*operator] && !led_to[*operator]);
    for operator in loops.collect::<Vec<_>>() {
        first[operator] = reached_from(vec![operator])[operator];
    }
    first
}

/// Creates the hubs and gives each operator its ends of them. If there is no memory for a hub, waits for memory that
/// streams are using.
async fn build(
    members: &mut [FlowOperator],
    hubs_to_create: Vec<HubToCreate>,
    links: Vec<ToLink>,
    control: &Control,
) -> Result<Hubs> {
    let mut ends: Vec<PortEnds> = members.iter().map(|_| HashMap::new()).collect();
    let mut hubs = Vec::with_capacity(hubs_to_create.len());
    for hub_to_create in hubs_to_create {
        let (sender, receiver, state) = loop {
            let plan = &hub_to_create.plan;
            match (hub_to_create.make)(plan.clone()) {
                Err(error) if error.is_out_of_memory() => {
                    if !wait_for_reusable_memory(&plan.writer).await && !wait_for_reusable_memory(&plan.reader).await {
                        return Err(error);
                    }
                }
                outcome => break outcome?,
            }
        };
        ends[hub_to_create.from.0].entry(hub_to_create.from.1).or_default().push(sender);
        ends[hub_to_create.to.0].entry(hub_to_create.to.1).or_default().push(receiver);
        let HubToCreate { from, to, writer_waits, reader_waits, of_each, .. } = hub_to_create;
        // Within a section, only the ports at its boundary are waited for.
        let waits = control.section(from.0).is_none_or(|section| control.section(to.0) != Some(section));
        let (writer_waits, reader_waits) = (writer_waits && waits, reader_waits && waits);
        hubs.push(ConnectedHub { state, from: from.0, to: to.0, writer_waits, reader_waits, of_each });
    }
    let mut linked = Vec::with_capacity(links.len());
    for ToLink { linking, port } in links {
        let operator = linking.port.operator;
        let (end, link) = linking.make(&members[operator].device)?;
        ends[operator].entry(port).or_default().push(end);
        linked.push(link);
    }
    for (member, ends) in members.iter_mut().zip(ends) {
        member.operator.bind(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    Ok(Hubs::new(hubs, linked, members.len()))
}

/// Waits until all work that the flow has enqueued is done, since work that no operator has awaited may have failed.
async fn done(
    members: &mut [FlowOperator],
    sections: &[Arc<section::SectionStats>],
    hubs: &Hubs,
    control: &Control,
) -> Result<()> {
    let enqueued = || "enqueued work has not completed".to_string();
    for section in sections {
        if let Some(last) = section.last() {
            let done = until_over(control, enqueued, last.completed()).await;
            done.map_err(|error| blamed(control, error, &section::place(&section.name)))?;
        }
    }
    for member in members {
        for last in member.operator.last() {
            let done = until_over(control, enqueued, last.completed()).await;
            done.map_err(|error| blamed(control, error, &operator(&member.name)))?;
        }
    }
    for last in hubs.all.iter().filter_map(|hub| hub.state.last_copy()) {
        until_over(control, enqueued, last.completed()).await?;
    }
    for last in link::hubs(&hubs.links).into_iter().flat_map(|hub| hub.last_copies()) {
        // A hub of chunks continues without a lost device. The loss is an error only for links whose chunks were lost
        // with it.
        match until_over(control, enqueued, last.completed()).await {
            Err(error) if !error.is_device_lost() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn devices(members: &[FlowOperator]) -> Vec<Device> {
    let mut devices: Vec<Device> = Vec::new();
    for member in members {
        if !member.device.is_host() && !devices.contains(&member.device) {
            devices.push(member.device.clone());
        }
    }
    devices
}

/// Compiles and loads every kernel of the program for every GPU of the flow, before the first run and outside the
/// runtime's workers.
async fn compile(devices: &[Device]) -> Result<()> {
    for device in devices.iter().filter(|device| device.is_cuda()) {
        for kernel in Kernel::all() {
            kernel.load(device).await?;
        }
    }
    Ok(())
}

/// The conditions that end a flow early: an abort, or the deadline of a stop.
struct Limit<'a> {
    control: &'a Control,
    /// The deadline of [`stop_within`](crate::flow::Handle::stop_within).
    stop: TimeLimit,
}

impl<'a> Limit<'a> {
    fn of(control: &'a Control) -> Self {
        Self { control, stop: TimeLimit::default() }
    }

    /// Returns the error once the flow is aborted or its deadline has passed. Registers the waker until then. `left`
    /// describes the work that is left.
    fn is_over(&mut self, left: impl FnOnce() -> String, task: &mut Context<'_>) -> Option<Error> {
        self.control.flow_task.register(task.waker());
        if self.control.is_aborted() {
            return Some(aborted(self.control));
        }
        let (due, time) = self.control.stop_by()?;
        self.stop.has_passed(due, task).then(|| overdue(self.control, time, &left()))
    }
}

/// The output of `work`, or an error once the flow is over.
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

/// The output of `work`, whose node is aborted once the flow is over.
async fn abortable<T>(
    control: &Control,
    node: &Arc<OperatorTask>,
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

pub(super) fn overdue(control: &Control, time: Duration, left: &str) -> Error {
    let name = &control.name;
    let text = format!("flow `{name}` did not end within {time:?} of `stop`, and was aborted:\n  - {left}");
    Error::new(ErrorKind::Cancelled, text)
}

/// The error of a failure at `place`. An abort is not the failure of an operator. The loss of a device is detected by
/// the next operator that uses the device: the error already names the unfinished work, and `place` only noticed the
/// loss.
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

pub(super) fn runtime_shut_down() -> Error {
    Error::new(ErrorKind::Cancelled, "the runtime shut down while the flow was running")
}
