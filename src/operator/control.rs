//! [`Handle`]: observes and controls a running flow, from outside and from its operators.

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
    time::Duration,
};

use futures::Stream;
use tokio::time::Instant;

use super::{
    activity::{FlowActivity, IdleCheck},
    flow_devices::FlowDevices,
    observed_runs::Watched,
    operator_task::OperatorTask,
    section_counts::SectionCounts,
    status_cell::{IngressWait, RunWait},
    watchers::Watcher,
};
use crate::{
    clock,
    condition::{Status, after},
    device::ticks::TickClock,
    error::Error,
    hub::{
        chunks::{
            core::{ChunkHubView, MissingResource},
            roles::Role,
            state::LinkId,
        },
        queue::Counts,
        view::{EnvelopeHolders, HubView},
    },
    stream::DeviceTimes,
    sync::{Mutex, WakerCell, contained, lock},
    tracepoint::{OUTSIDE, TraceEvent, Tracepoints},
};

/// Controls a running flow: reports its status, pauses, resumes, stops and aborts it, from any thread or task. Obtained
/// from [`Running::handle`](crate::Running::handle) or, in one of its operators, from [`Cx::flow`](crate::Cx::flow).
///
/// It does not keep the flow running, and has no effect once the flow has ended.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<Control>);

/// The state shared by a flow's task, its operators and its handles.
pub(crate) struct Control {
    pub(crate) name: Arc<str>,
    pub(crate) names: Vec<Arc<str>>,
    /// By operator. The operators of a section share one `OperatorTask`.
    pub(crate) tasks: Vec<Arc<OperatorTask>>,
    sections: Vec<SectionControl>,
    /// By operator: the section that it belongs to.
    section_of: Vec<Option<usize>>,
    pub(crate) activity: Arc<FlowActivity>,
    /// Set while the flow runs.
    hubs: Mutex<Arc<Hubs>>,
    /// The flow is no longer stepped through. Written before `hubs` is read, and read after `hubs` is written.
    unstepped: AtomicBool,
    stop: AtomicBool,
    /// When the flow is aborted unless it has ended, and how long after the call that is.
    stop_by: Mutex<Option<(Instant, Duration)>>,
    abort: AtomicBool,
    /// The tasks' own flags are written with this lock held, so that the last of several concurrent calls determines
    /// all of them.
    paused: Mutex<bool>,
    /// The error with which the flow failed.
    failure: OnceLock<Error>,
    /// Set once the flow has ended.
    ended: AtomicBool,
    pub(crate) clock: TickClock,
    /// What observers want recorded. Set before the operators exist.
    watched: OnceLock<Watched>,
    /// What an observer shows, besides.
    pub(crate) observed: OnceLock<FlowParts>,
    /// The groups of operators that have stalled, for observers.
    stalls: Mutex<Vec<Stall>>,
    /// What the first observer of the flow has recorded of it.
    pub(crate) records: OnceLock<Arc<dyn Any + Send + Sync>>,
    /// The flow's own task.
    pub(crate) flow_task: WakerCell,
    /// A question from the task that steps through the flow to the flow's own task.
    pub(crate) idle_check: IdleCheck,
}

/// What a flow knows from its begin on, for its observers.
pub(crate) struct FlowParts {
    pub(crate) devices: FlowDevices,
    /// By operator: it was given a thread of its own, which it may block.
    pub(crate) may_block: Vec<bool>,
    /// The runtime's worker threads, if the flow's tasks may use them.
    pub(crate) workers: Option<usize>,
    /// By section.
    pub(crate) sections: Vec<SectionParts>,
}

/// What a section's task publishes.
pub(crate) struct SectionParts {
    pub(crate) counts: Arc<SectionCounts>,
    /// The device time of its replays.
    pub(crate) work: Arc<DeviceTimes>,
}

/// Operators that wait only for each other.
#[derive(Clone)]
pub(crate) struct Stall {
    pub(crate) operators: Vec<usize>,
    /// What each of them waits for.
    pub(crate) waits: Vec<String>,
    /// The flow fails with this stall.
    pub(crate) is_final: bool,
    pub(crate) since: std::time::Instant,
    /// See [`Control::progress`].
    progress: u64,
}

/// A section: operators that run in one task.
pub(crate) struct SectionControl {
    pub(crate) name: Arc<str>,
    pub(crate) operators: Vec<usize>,
}

/// A hub in use, and the operators that it connects.
#[derive(Clone)]
pub(crate) struct ConnectedHub {
    pub(crate) state: Arc<dyn HubView>,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Whether its writer waits for room, and its reader for messages.
    pub(crate) writer_waits: bool,
    pub(crate) reader_waits: bool,
    /// The reader's port, if it waits for one message from each connection.
    pub(crate) of_each: Option<&'static str>,
}

/// A link from one of the operators to a hub of chunks.
pub(crate) struct LinkedTo {
    pub(crate) state: Arc<dyn ChunkHubView>,
    pub(crate) link: LinkId,
    pub(crate) role: Role,
    pub(crate) operator: usize,
}

#[derive(Default)]
pub(crate) struct Hubs {
    pub(crate) all: Vec<ConnectedHub>,
    pub(crate) links: Vec<LinkedTo>,
    /// By operator: the hubs that it writes to or reads from.
    of: Vec<Vec<usize>>,
    /// By operator: the indices of its links, and the numbers of their hubs.
    links_of: Vec<Vec<(usize, usize)>>,
    /// By hub of chunks, in the order of their first appearance in `links`.
    of_chunks: Vec<ChunkHubOperators>,
}

/// The operators of one hub of chunks.
#[derive(Default)]
struct ChunkHubOperators {
    linked: Vec<usize>,
    /// The linked operators, and those that might receive what they send. Computed at the first use.
    reached: OnceLock<Vec<usize>>,
}

impl Hubs {
    pub(crate) fn new(all: Vec<ConnectedHub>, links: Vec<LinkedTo>, operators: usize) -> Self {
        let mut of = vec![Vec::new(); operators];
        for (at, hub) in all.iter().enumerate() {
            of[hub.from].push(at);
            if hub.to != hub.from {
                of[hub.to].push(at);
            }
        }
        let (mut numbers, mut links_of) = (HashMap::new(), vec![Vec::new(); operators]);
        let mut of_chunks: Vec<ChunkHubOperators> = Vec::new();
        for (at, link) in links.iter().enumerate() {
            let hub = *numbers.entry(link.hub()).or_insert_with(|| {
                of_chunks.push(ChunkHubOperators::default());
                of_chunks.len() - 1
            });
            links_of[link.operator].push((at, hub));
            of_chunks[hub].linked.push(link.operator);
        }
        Self { all, links, of, links_of, of_chunks }
    }

    /// An operator's links, and the numbers of their hubs.
    pub(crate) fn links_of(&self, operator: usize) -> impl Iterator<Item = (&LinkedTo, usize)> {
        self.links_of.get(operator).into_iter().flatten().map(|&(at, hub)| (&self.links[at], hub))
    }

    /// The operators with links to a hub of chunks, and those that might receive what they send. An external link, or
    /// one of another flow, counts as outside.
    pub(crate) fn reached_through(&self, hub: usize, leaves: impl Fn(usize) -> bool) -> &[usize] {
        let ChunkHubOperators { linked, reached } = &self.of_chunks[hub];
        reached.get_or_init(|| self.reached_from(linked.clone(), leaves))
    }

    /// The hubs that an operator writes to or reads from.
    pub(crate) fn of(&self, operator: usize) -> impl Iterator<Item = &ConnectedHub> {
        self.numbered(operator).map(|(_, hub)| hub)
    }

    /// The same, with their numbers.
    pub(crate) fn numbered(&self, operator: usize) -> impl Iterator<Item = (usize, &ConnectedHub)> {
        self.of.get(operator).into_iter().flatten().map(|at| (*at, &self.all[*at]))
    }

    /// A number that changes with each message that leaves a hub of the operator, and with each chunk that enters or
    /// leaves one.
    pub(crate) fn moved(&self, operator: usize) -> u64 {
        let counts = self.of(operator).map(|hub| hub.state.counts());
        let messages = counts.map(|counts| counts.taken + counts.dropped + counts.untaken);
        let chunks = self.links_of(operator).map(|(link, _)| link.state.counts()).map(|(made, gone)| made + gone);
        messages.sum::<u64>() + chunks.sum::<u64>()
    }

    /// These operators, and those that might receive what they send. `leaves`: what the operator receives leaves the
    /// flow.
    pub(crate) fn reached_from(&self, mut next: Vec<usize>, leaves: impl Fn(usize) -> bool) -> Vec<usize> {
        let (mut reached, mut passed) = (vec![false; self.of.len()], vec![false; self.of_chunks.len()]);
        next.retain(|&operator| !std::mem::replace(&mut reached[operator], true));
        let (first, mut all) = (next.clone(), Vec::new());
        while let Some(operator) = next.pop() {
            all.push(operator);
            if leaves(operator) && !first.contains(&operator) {
                continue;
            }
            let readers = self.of(operator).filter(|hub| hub.from == operator).map(|hub| hub.to);
            let hubs = self.links_of[operator].iter().filter(|(_, hub)| !std::mem::replace(&mut passed[*hub], true));
            let linked = hubs.flat_map(|&(_, hub)| &self.of_chunks[hub].linked).copied();
            next.extend(readers.chain(linked).filter(|&other| !std::mem::replace(&mut reached[other], true)));
        }
        all
    }
}

impl LinkedTo {
    /// Identifies the hub.
    pub(crate) fn hub(&self) -> *const () {
        Arc::as_ptr(&self.state).cast()
    }
}

/// What an operator does now: an entry of [`Handle::status`] and [`Handle::changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorStatus {
    /// The operator's name.
    pub name: Arc<str>,
    /// The combined status of all of the operator's conditions. It is [`Ready`](Status::Ready) also while the operator
    /// runs and before it is first polled, [`Wait`](Status::Wait) while a run waits for other operators in its middle,
    /// for example for room, and [`Never`](Status::Never) once the operator has ended.
    pub status: Status,
    /// Whether a run is in progress.
    pub running: bool,
    /// The number of runs that have ended.
    pub runs: u64,
    /// What the operator waits for, in words.
    pub waits_for: Vec<String>,
}

impl Control {
    pub(crate) fn new(name: Arc<str>, names: Vec<Arc<str>>, sections: Vec<SectionControl>) -> Arc<Self> {
        let activity = FlowActivity::new(names.len());
        let mut tasks: Vec<_> = (0..names.len()).map(|operator| OperatorTask::new(operator, &activity)).collect();
        let mut section_of = vec![None; names.len()];
        for (number, SectionControl { operators, .. }) in sections.iter().enumerate() {
            let Some((&first, others)) = operators.split_first() else { continue };
            operators.iter().for_each(|operator| section_of[*operator] = Some(number));
            for &other in others {
                // The section's token represents it.
                tasks[other].end();
                tasks[other] = tasks[first].clone();
            }
        }
        Arc::new(Self {
            name,
            tasks,
            sections,
            section_of,
            names,
            activity,
            hubs: Mutex::default(),
            unstepped: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stop_by: Mutex::default(),
            abort: AtomicBool::new(false),
            paused: Mutex::new(false),
            failure: OnceLock::new(),
            ended: AtomicBool::new(false),
            clock: TickClock::start(),
            watched: OnceLock::new(),
            observed: OnceLock::new(),
            stalls: Mutex::default(),
            records: OnceLock::new(),
            flow_task: WakerCell::new(),
            idle_check: IdleCheck::new(),
        })
    }

    pub(crate) fn watched(&self) -> Option<&Watched> {
        self.watched.get()
    }

    pub(crate) fn watch(&self, mut watched: Watched) {
        watched.seal(self.names.len());
        if let Some(traced) = watched.traced() {
            self.tasks.iter().for_each(|task| task.trace(traced.polls(task.operator())));
        }
        let _ = self.watched.set(watched);
    }

    /// `None` if nothing traces the flow.
    pub(crate) fn traced(&self) -> Option<&Tracepoints> {
        self.watched()?.traced()
    }

    pub(crate) fn section(&self, operator: usize) -> Option<usize> {
        self.section_of.get(operator).copied().flatten()
    }

    pub(crate) fn operators_of(&self, section: usize) -> &[usize] {
        self.sections.get(section).map_or(&[], |section| &section.operators)
    }

    /// True if the operator shares its task with an earlier operator of its section, which stands for both.
    pub(crate) fn is_represented(&self, operator: usize) -> bool {
        let section = self.section(operator).map(|section| &self.sections[section]);
        section.is_some_and(|section| section.operators.first() != Some(&operator))
    }

    /// A number that grows with each run of these operators, and with each message that moves at their hubs.
    pub(crate) fn progress(&self, hubs: &Hubs, operators: &[usize]) -> u64 {
        operators.iter().map(|&operator| hubs.moved(operator) + self.tasks[operator].status_cell().runs()).sum()
    }

    /// Records that these operators have stalled, until one of them makes progress. `is_final`: the flow fails with it.
    #[cold]
    pub(crate) fn note_stall(&self, operators: &[usize], waits: &[String], is_final: bool) {
        let (operators, waits, since) = (operators.to_vec(), waits.to_vec(), std::time::Instant::now());
        let new = Stall { progress: self.progress(&self.hubs(), &operators), operators, waits, is_final, since };
        let mut stalls = lock(&self.stalls);
        let same = |stall: &&mut Stall| stall.operators == new.operators && stall.progress == new.progress;
        if let Some(before) = stalls.iter_mut().find(same) {
            before.is_final |= is_final;
            return;
        }
        stalls.retain(|stall| !stall.operators.iter().any(|operator| new.operators.binary_search(operator).is_ok()));
        stalls.push(new);
    }

    /// The groups that have stalled and made no progress since.
    pub(crate) fn stalls(&self) -> Vec<Stall> {
        // Counted without the lock: it nests with no other.
        let mut stalls = lock(&self.stalls).clone();
        if !stalls.is_empty() {
            let hubs = self.hubs();
            stalls.retain(|stall| stall.is_final || stall.progress == self.progress(&hubs, &stall.operators));
        }
        stalls
    }

    /// The operator's name in messages: `` `two` ``, or `` `two` of section `net` ``.
    pub(crate) fn whose(&self, operator: usize) -> String {
        let name = &self.names[operator];
        match self.section(operator) {
            Some(section) => format!("`{name}` of section `{}`", self.sections[section].name),
            None => format!("`{name}`"),
        }
    }

    /// The operator whose future is being polled with this waker.
    pub(crate) fn operator_polled_with(&self, waker: &Waker) -> Option<&Arc<OperatorTask>> {
        self.tasks.iter().find(|task| task.is_probe_waker(waker))
    }

    pub(crate) fn set_hubs(&self, hubs: Hubs) {
        *lock(&self.hubs) = Arc::new(hubs);
        // `unstep` might have run before the hubs were set.
        if self.unstepped.load(Ordering::Acquire) {
            self.unstep_hubs();
        }
    }

    pub(crate) fn hubs(&self) -> Arc<Hubs> {
        lock(&self.hubs).clone()
    }

    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// The error with which the flow has failed.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// The name of a section, by its number.
    pub(crate) fn section_name(&self, section: usize) -> &Arc<str> {
        &self.sections[section].name
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.flow_task.wake();
    }

    pub(crate) fn stop_within(&self, time: Duration) {
        let due = after(clock::now(), time);
        let mut stop_by = lock(&self.stop_by);
        if stop_by.is_none_or(|(before, _)| due < before) {
            *stop_by = Some((due, time));
        }
        drop(stop_by);
        self.stop();
    }

    /// When the flow is aborted, and how long after the call that is.
    pub(crate) fn stop_by(&self) -> Option<(Instant, Duration)> {
        *lock(&self.stop_by)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(crate) fn abort(&self) {
        self.abort.store(true, Ordering::Release);
        // Abort the tasks here, not only in the flow's task: from now on no run begins.
        self.tasks.iter().for_each(|task| task.abort());
        self.flow_task.wake();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.abort.load(Ordering::Acquire)
    }

    /// Records the error with which the flow fails, unless it has failed before; returns the recorded error. Called
    /// before any resource is released, so that a caller that loses its access can find the reason.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.fail_at(None, error)
    }

    /// The same, for the failure of one operator.
    pub(crate) fn fail_at(&self, operator: Option<usize>, error: Error) -> Error {
        let mut first = false;
        let failure = self.failure.get_or_init(|| {
            first = true;
            error
        });
        // Logged, since callers outside of the flow get only the error's kind, and the `Running` might have been
        // dropped. The cause's `Display` and the tracing subscriber are user code.
        if first {
            if let Some(traced) = self.traced().filter(|_| !failure.is_cancelled()) {
                let operator = operator.and_then(|operator| operator.try_into().ok()).unwrap_or(OUTSIDE);
                traced.record(TraceEvent::Failed { operator });
            }
            contained("the log of a flow's failure panicked", || {
                if failure.is_cancelled() {
                    tracing::debug!(flow = &*self.name, error = %format_args!("{failure:#}"), "the flow has ended early");
                } else {
                    tracing::warn!(flow = &*self.name, error = %format_args!("{failure:#}"), "the flow has failed");
                }
            });
        }
        failure.clone()
    }

    fn set_paused(&self, paused: bool) {
        let mut now = lock(&self.paused);
        if std::mem::replace(&mut *now, paused) == paused {
            return;
        }
        self.tasks.iter().for_each(|task| task.set_paused(paused));
        drop(now);
        // Wakers are user code: no lock is held. Each woken operator reads the flags that the last call has set.
        self.tasks.iter().for_each(Wake::wake_by_ref);
    }

    /// Lets no run begin unless it is requested. The flow's hubs are created so that they move nothing by themselves.
    pub(crate) fn set_stepped(&self) {
        self.tasks.iter().for_each(|task| task.set_stepped(true));
    }

    /// Lets every operator and every hub continue by itself, also hubs that the flow's task has yet to create.
    pub(crate) fn unstep(&self) {
        self.unstepped.store(true, Ordering::Release);
        // The hubs first: once all operators wait for each other, the flow ends.
        self.unstep_hubs();
        self.tasks.iter().for_each(|task| task.set_stepped(false));
    }

    pub(crate) fn is_stepped(&self) -> bool {
        self.tasks.iter().any(|task| task.permit().is_some())
    }

    /// True if each operator that has not ended waits for other operators, no envelope or link of the flow is outside,
    /// and no message is entering.
    pub(crate) fn is_idle(&self) -> bool {
        let none_is_outside = self.activity.outside() == 0 && !self.activity.has_message_entering();
        none_is_outside && self.tasks.iter().all(|task| task.has_ended() || task.is_idle())
    }

    fn unstep_hubs(&self) {
        self.hubs().all.iter().for_each(|hub| hub.state.stop_stepping());
    }

    pub(crate) fn is_paused(&self) -> bool {
        *lock(&self.paused)
    }

    /// What an operator waits for, if it waits.
    pub(crate) fn lacks(&self, operator: usize) -> WaitDescription {
        let hubs = self.hubs();
        let holders = FlowHolders { control: self, hubs: &hubs };
        // In the middle of a run, what it sends or receives counts, not what its ports were declared to wait for.
        let in_run = self.tasks[operator].status_cell().in_run();
        let sends = |declared| in_run.map_or(declared, RunWait::sends);
        let receives = |declared| in_run.map_or(declared, RunWait::receives);
        let from = hubs.of(operator).filter(|hub| hub.from == operator && sends(hub.writer_waits));
        let to = hubs.of(operator).filter(|hub| hub.to == operator && receives(hub.reader_waits));
        let mut room: Vec<_> = from.filter_map(|hub| hub.state.writer_lacks(&holders)).collect();
        let lacking = to.filter_map(|hub| Some((hub.of_each, hub.state.reader_lacks(in_run.is_some(), &holders)?)));
        let (ports, mut messages): (Vec<_>, Vec<_>) = lacking.unzip();
        // Added once for each port, to its last hub that lacks a message. A run that waits in its middle waits for any
        // of the connections.
        let mut said = Vec::new();
        for (lack, port) in messages.iter_mut().zip(ports).rev() {
            let Some(port) = port.filter(|port| in_run.is_none() && !said.contains(port)) else { continue };
            said.push(port);
            let open = hubs
                .of(operator)
                .filter(|hub| hub.to == operator && hub.of_each == Some(port) && !hub.state.has_ended());
            if open.count() > 1 {
                lack.push_str(&format!(
                    " (`{port}` waits for one from each connection; with `at_least = 1` it waits for one from any)"
                ));
            }
        }
        for (linked, _) in hubs.links_of(operator) {
            match linked.state.lacks(linked.link, &holders) {
                None => {}
                Some(MissingResource::Room(lack)) => room.push(lack),
                Some(MissingResource::Chunk(lack)) => messages.push(lack),
            }
        }
        let cell = self.tasks[operator].status_cell();
        let asked = cell.ingress_waits().into_iter().map(|ask| match ask {
            IngressWait::Answer(desk) => format!("a response from its own flow's service `{}`", self.names[desk]),
            IngressWait::Room(desk) => {
                let full =
                    hubs.of(desk).filter(|hub| hub.from == desk).find_map(|hub| hub.state.writer_lacks(&holders));
                full.unwrap_or_else(|| format!("room at `{}`, which another handle has reserved", self.names[desk]))
            }
        });
        WaitDescription { room, messages, asked: asked.collect(), more: cell.lacks() }
    }

    pub(crate) fn status(&self, operator: usize) -> OperatorStatus {
        let cell = self.tasks[operator].status_cell();
        let (status, running) = cell.status();
        let waits = matches!(status, Status::Wait | Status::WaitEvent | Status::WaitTime(_));
        let mut waits_for = if waits { self.lacks(operator).all() } else { Vec::new() };
        // Its other conditions are polled only after the flow is resumed.
        if self.is_paused() && waits {
            waits_for.push("the flow to be resumed".into());
        }
        OperatorStatus { name: self.names[operator].clone(), status, running, runs: cell.runs(), waits_for }
    }
}

/// The operators and hubs of a flow, as the possible holders of its envelopes.
struct FlowHolders<'a> {
    control: &'a Control,
    hubs: &'a Hubs,
}

impl FlowHolders<'_> {
    /// The hubs of an operator whose messages carry envelopes.
    fn of(&self, operator: usize) -> impl Iterator<Item = &ConnectedHub> {
        self.hubs.of(operator).filter(|hub| hub.state.carries_envelopes())
    }

    /// Whether an operator has sent as many messages with envelopes as it has taken. All readers of one output receive
    /// the same messages, so the largest number sent to any of them counts.
    fn has_passed_on_all(&self, operator: usize) -> bool {
        let taken: u64 = self.of(operator).filter(|hub| hub.to == operator).map(|hub| hub.state.counts().taken).sum();
        let sent = self.of(operator).filter(|hub| hub.from == operator).map(|hub| {
            let Counts { taken, dropped, untaken } = hub.state.counts();
            taken + dropped + untaken + hub.state.queued() as u64
        });
        sent.max().is_some_and(|sent| sent >= taken)
    }
}

impl EnvelopeHolders for FlowHolders<'_> {
    fn each_hub(&self, show: &mut dyn FnMut(&dyn HubView)) {
        self.hubs.all.iter().for_each(|hub| show(&*hub.state));
    }

    /// The hub's reader, the operators to which it might have passed the envelopes on, and the hub's writer if it waits
    /// in the middle of a run.
    fn keepers(&self, hub: &str) -> Vec<String> {
        let Some(own) = self.hubs.all.iter().find(|own| **own.state.name() == *hub) else { return Vec::new() };
        let mut found: Vec<usize> = Vec::new();
        let mut open = vec![own];
        while let Some(hub) = open.pop() {
            if hub.state.counts().taken > 0 && !found.contains(&hub.to) {
                found.push(hub.to);
                open.extend(self.of(hub.to).filter(|next| next.from == hub.to && !next.state.copies()));
            }
        }
        found.retain(|operator| !self.has_passed_on_all(*operator));
        let writes = self.control.tasks[own.from].status_cell().in_run().is_some() && !found.contains(&own.from);
        found.extend(writes.then_some(own.from));
        found.sort_unstable();
        found.into_iter().map(|operator| self.control.whose(operator)).collect()
    }
}

/// What an operator waits for, in words.
pub(crate) struct WaitDescription {
    pub(crate) room: Vec<String>,
    messages: Vec<String>,
    pub(crate) asked: Vec<String>,
    more: Vec<String>,
}

impl WaitDescription {
    pub(crate) fn waits_beside_its_ports(&self) -> bool {
        self.room.is_empty() && self.messages.is_empty() && self.asked.is_empty() && !self.more.is_empty()
    }

    pub(crate) fn all(self) -> Vec<String> {
        self.room.into_iter().chain(self.messages).chain(self.asked).chain(self.more).collect()
    }
}

impl Handle {
    /// The name of the flow.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The status of each operator, in the order of adding.
    pub fn status(&self) -> Vec<OperatorStatus> {
        (0..self.0.tasks.len()).map(|operator| self.0.status(operator)).collect()
    }

    /// Yields the current status of each operator, and then each change, until the flow has ended. A slow reader gets
    /// the latest status of each operator, and misses those in between.
    pub fn changes(&self) -> Changes {
        let watcher = self.0.activity.watchers.add(self.0.tasks.len());
        // An operator that publishes its status at this moment might not have seen the new watcher.
        self.0.tasks.iter().filter(|task| !task.publish_and_check_parked()).for_each(Wake::wake_by_ref);
        Changes { watcher, control: self.0.clone(), also: Vec::new() }
    }

    /// Lets no run begin until the flow is resumed. Runs in progress continue to their end.
    pub fn pause(&self) {
        self.0.set_paused(true);
    }

    /// Lets runs begin again.
    pub fn resume(&self) {
        self.0.set_paused(false);
    }

    /// True while the flow is paused.
    pub fn is_paused(&self) -> bool {
        self.0.is_paused()
    }

    /// Ends the flow by draining it: its sources do not run again, and messages in progress are processed to the end.
    ///
    /// Sources are the operators that do not wait for messages. In a loop that is not fed by a source, every operator
    /// ends after its current run. A loop that is fed by a source ends once it is idle; one that never becomes idle
    /// must check [`is_stopping`](Self::is_stopping). A paused flow stays paused: resume it.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Like [`stop`](Self::stop), but aborts the flow if it has not ended after `time`: the flow then fails with
    /// [`Cancelled`](crate::ErrorKind::Cancelled), and the error names each operator that had not ended and what it did
    /// or waited for. Of several calls the earliest deadline counts. The runtime's timers must be enabled
    /// (`enable_time`).
    ///
    /// An abort does not end an operator that blocks its thread, nor an operator's `stop`, which runs to its end.
    pub fn stop_within(&self, time: Duration) {
        self.0.stop_within(time);
    }

    /// True once [`stop`](Self::stop) was called and the flow is to end.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping()
    }

    /// The error with which the flow has failed, if it has: an operator's failure, an abort, a stall. It is available
    /// at once, while [`Running`](crate::Running) resolves only when every operator has stopped.
    pub fn failure(&self) -> Option<Error> {
        self.0.failure.get().cloned()
    }

    /// True once the flow has ended: every operator has stopped, or the runtime was shut down.
    pub fn has_ended(&self) -> bool {
        self.0.has_ended()
    }

    /// True from the abort on, even before the flow has failed with it.
    pub(crate) fn is_aborted(&self) -> bool {
        self.0.is_aborted()
    }

    /// Ends the flow at once: operators are dropped at their current await, then every `stop` runs. The flow fails with
    /// [`Cancelled`](crate::ErrorKind::Cancelled).
    pub fn abort(&self) {
        self.0.abort();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.0.name).field("paused", &self.is_paused()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The status changes of a flow's operators, as a [`Stream`][stream]. See [`Handle::changes`].
///
/// [stream]: https://docs.rs/futures-core/0.3/futures_core/stream/trait.Stream.html
#[must_use = "it is a stream"]
pub struct Changes {
    watcher: Arc<Watcher>,
    control: Arc<Control>,
    /// Operators of a section whose status is to be yielded: it changes with that of the section's first operator.
    also: Vec<usize>,
}

impl Stream for Changes {
    type Item = OperatorStatus;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<OperatorStatus>> {
        let Self { watcher, control, also } = self.get_mut();
        if let Some(operator) = also.pop() {
            return Poll::Ready(Some(control.status(operator)));
        }
        loop {
            match ready!(watcher.poll_next(cx)) {
                None => return Poll::Ready(None),
                Some(operator) if control.is_represented(operator) => {}
                Some(operator) => {
                    if let Some(section) = control.section(operator) {
                        also.extend(control.sections[section].operators[1..].iter().rev());
                    }
                    return Poll::Ready(Some(control.status(operator)));
                }
            }
        }
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("flow", &self.control.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    const NODES: usize = 64;

    fn control() -> Arc<Control> {
        Control::new("flow".into(), (0..NODES).map(|task| task.to_string().into()).collect(), Vec::new())
    }

    fn paused(control: &Control) -> usize {
        control.tasks.iter().filter(|task| task.is_paused()).count()
    }

    #[test]
    fn a_flow_that_is_resumed_by_a_waker_of_its_pause_is_resumed_whole() {
        struct Resumes(Weak<Control>);

        impl Wake for Resumes {
            fn wake(self: Arc<Self>) {
                self.0.upgrade().into_iter().for_each(|control| Handle(control).resume());
            }
        }

        let handle = Handle(control());
        let waker = Arc::new(Resumes(Arc::downgrade(&handle.0))).into();
        let mut probe = handle.0.tasks[0].install_probe_waker();
        let polled = handle.0.tasks[0]
            .poll(&mut probe, &mut Context::from_waker(&waker), |_| Poll::<crate::Result<()>>::Pending);
        assert!(polled.is_pending());
        handle.pause();
        assert_eq!((handle.is_paused(), paused(&handle.0)), (false, 0));
    }
}
