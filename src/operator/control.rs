//! [`Handle`]: a flow at work, as seen and spoken to from outside and from its operators.

use std::{
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
    node::{Node, Rest},
    rest_check::RestCheck,
    shown::{Ask, InRun},
    watchers::Watcher,
};
use crate::{
    clock,
    condition::{Status, after},
    error::Error,
    hub::{
        chunks::{
            core::{ChunkState, Lack},
            roles::Role,
            state::LinkId,
        },
        link::{Holders, HubState},
        queue::Counts,
    },
    sync::{Mutex, WakerCell, contained, lock},
};

/// A flow at work: asks how it stands, pauses, resumes, stops and aborts it, from any thread or task. From
/// [`Running::handle`](crate::Running::handle) or, in one of its operators, [`Cx::flow`](crate::Cx::flow).
///
/// It keeps nothing running, and once the flow has ended it does nothing.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<Control>);

/// What a flow's task, its operators and whoever has a handle share.
pub(crate) struct Control {
    pub(crate) name: Arc<str>,
    pub(crate) names: Vec<Arc<str>>,
    /// By operator. Those of a section have one together.
    pub(crate) nodes: Vec<Arc<Node>>,
    sections: Vec<Section>,
    /// By operator: the section that it is in.
    section_of: Vec<Option<usize>>,
    pub(crate) rest: Arc<Rest>,
    /// While it runs.
    hubs: Mutex<Arc<Hubs>>,
    /// It was stepped through, and is no longer. Written before `hubs` is read, and read after `hubs` is written.
    unstepped: AtomicBool,
    stop: AtomicBool,
    /// When it is aborted unless it has ended, and how long that was after the call.
    stop_by: Mutex<Option<(Instant, Duration)>>,
    abort: AtomicBool,
    /// The nodes' own flags are written with the lock: so the last call of several at once counts for all of them.
    paused: Mutex<bool>,
    /// What it failed with.
    failure: OnceLock<Error>,
    /// The flow's own task.
    pub(crate) keeper: WakerCell,
    /// A question of the task that steps through the flow to its own task.
    pub(crate) rest_check: RestCheck,
}

/// Operators whose runs are one task's.
pub(crate) struct Section {
    pub(crate) name: Arc<str>,
    /// Their numbers.
    pub(crate) operators: Vec<usize>,
}

/// A hub at work, and the operators that it joins.
#[derive(Clone)]
pub(crate) struct Joined {
    pub(crate) state: Arc<dyn HubState>,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Its writer waits for room, its reader for messages.
    pub(crate) writer_waits: bool,
    pub(crate) reader_waits: bool,
    /// The reader's port, where it waits for a message of each connection.
    pub(crate) of_each: Option<&'static str>,
}

/// A link of one of the operators to a hub of chunks.
pub(crate) struct LinkedTo {
    pub(crate) state: Arc<dyn ChunkState>,
    pub(crate) link: LinkId,
    pub(crate) role: Role,
    pub(crate) operator: usize,
}

/// All of a flow's hubs.
#[derive(Default)]
pub(crate) struct Hubs {
    pub(crate) all: Vec<Joined>,
    pub(crate) links: Vec<LinkedTo>,
    /// By operator: those that it writes to and reads from.
    of: Vec<Vec<usize>>,
    /// By operator: its links, and the numbers of their hubs.
    links_of: Vec<Vec<(usize, usize)>>,
    /// By hub of chunks, as they come in `links`.
    of_chunks: Vec<OfChunks>,
}

/// What is known of a hub of chunks.
#[derive(Default)]
struct OfChunks {
    /// The operators with links to it.
    linked: Vec<usize>,
    /// Those, and the operators that what they send may come to. Found out when first asked for.
    reached: OnceLock<Vec<usize>>,
}

impl Hubs {
    pub(crate) fn new(all: Vec<Joined>, links: Vec<LinkedTo>, operators: usize) -> Self {
        let mut of = vec![Vec::new(); operators];
        for (at, hub) in all.iter().enumerate() {
            of[hub.from].push(at);
            if hub.to != hub.from {
                of[hub.to].push(at);
            }
        }
        let (mut numbers, mut links_of) = (HashMap::new(), vec![Vec::new(); operators]);
        let mut of_chunks: Vec<OfChunks> = Vec::new();
        for (at, link) in links.iter().enumerate() {
            let hub = *numbers.entry(link.hub()).or_insert_with(|| {
                of_chunks.push(OfChunks::default());
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

    /// The operators with links to a hub of chunks, and those that what they send may come to. A link by hand, or of another flow,
    /// counts as one that is outside.
    pub(crate) fn reached_through(&self, hub: usize) -> &[usize] {
        let OfChunks { linked, reached } = &self.of_chunks[hub];
        reached.get_or_init(|| self.reached_from(linked.clone()))
    }

    /// Those that an operator writes to and reads from.
    pub(crate) fn of(&self, operator: usize) -> impl Iterator<Item = &Joined> {
        self.of.get(operator).into_iter().flatten().map(|at| &self.all[*at])
    }

    /// Changes with each message that goes out of a hub of an operator's, and each chunk that comes or goes.
    pub(crate) fn moved(&self, operator: usize) -> u64 {
        let counts = self.of(operator).map(|hub| hub.state.counts());
        let messages = counts.map(|counts| counts.taken + counts.dropped + counts.untaken);
        let chunks = self.links_of(operator).map(|(link, _)| link.state.counts()).map(|(made, gone)| made + gone);
        messages.sum::<u64>() + chunks.sum::<u64>()
    }

    /// These operators, and those that what they send may come to.
    pub(crate) fn reached_from(&self, mut next: Vec<usize>) -> Vec<usize> {
        let (mut reached, mut passed) = (vec![false; self.of.len()], vec![false; self.of_chunks.len()]);
        next.retain(|&operator| !std::mem::replace(&mut reached[operator], true));
        let mut all = Vec::new();
        while let Some(operator) = next.pop() {
            all.push(operator);
            let readers = self.of(operator).filter(|hub| hub.from == operator).map(|hub| hub.to);
            let hubs = self.links_of[operator].iter().filter(|(_, hub)| !std::mem::replace(&mut passed[*hub], true));
            let linked = hubs.flat_map(|&(_, hub)| &self.of_chunks[hub].linked).copied();
            next.extend(readers.chain(linked).filter(|&other| !std::mem::replace(&mut reached[other], true)));
        }
        all
    }
}

impl LinkedTo {
    /// Which hub that is.
    pub(crate) fn hub(&self) -> *const () {
        Arc::as_ptr(&self.state).cast()
    }
}

/// How an operator stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorStatus {
    /// Its name.
    pub name: Arc<str>,
    /// What all of its conditions say together: [`Ready`](Status::Ready) also while it runs, and before its first turn;
    /// [`Never`](Status::Never) once it has ended; [`Wait`](Status::Wait) while a run of it waits for others in its middle,
    /// for room say.
    pub status: Status,
    /// Whether a run is under way.
    pub running: bool,
    /// Runs that have ended.
    pub runs: u64,
    /// What it waits for, in words.
    pub waits_for: Vec<String>,
}

impl Control {
    pub(crate) fn new(name: Arc<str>, names: Vec<Arc<str>>, sections: Vec<Section>) -> Arc<Self> {
        let rest = Rest::new(names.len());
        let mut nodes: Vec<_> = (0..names.len()).map(|operator| Node::new(operator, &rest)).collect();
        let mut section_of = vec![None; names.len()];
        for (number, Section { operators, .. }) in sections.iter().enumerate() {
            let Some((&first, others)) = operators.split_first() else { continue };
            operators.iter().for_each(|operator| section_of[*operator] = Some(number));
            for &other in others {
                // Its token is the section's.
                nodes[other].end();
                nodes[other] = nodes[first].clone();
            }
        }
        Arc::new(Self {
            name,
            nodes,
            sections,
            section_of,
            names,
            rest,
            hubs: Mutex::default(),
            unstepped: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stop_by: Mutex::default(),
            abort: AtomicBool::new(false),
            paused: Mutex::new(false),
            failure: OnceLock::new(),
            keeper: WakerCell::new(),
            rest_check: RestCheck::new(),
        })
    }

    /// The section that an operator is in.
    pub(crate) fn section(&self, operator: usize) -> Option<usize> {
        self.section_of.get(operator).copied().flatten()
    }

    /// The operators of a section, by its number.
    pub(crate) fn operators_of(&self, section: usize) -> &[usize] {
        self.sections.get(section).map_or(&[], |section| &section.operators)
    }

    /// Another operator has its node, too, and comes before it.
    pub(crate) fn is_counted(&self, operator: usize) -> bool {
        let section = self.section(operator).map(|section| &self.sections[section]);
        section.is_some_and(|section| section.operators.first() != Some(&operator))
    }

    /// `two`, or `two` of section `net`.
    pub(crate) fn whose(&self, operator: usize) -> String {
        let name = &self.names[operator];
        match self.section(operator) {
            Some(section) => format!("`{name}` of section `{}`", self.sections[section].name),
            None => format!("`{name}`"),
        }
    }

    /// The operator that waits with this waker, in the middle of a run.
    pub(crate) fn asker(&self, waker: &Waker) -> Option<&Arc<Node>> {
        self.nodes.iter().find(|node| node.is_face(waker))
    }

    pub(crate) fn set_hubs(&self, hubs: Hubs) {
        *lock(&self.hubs) = Arc::new(hubs);
        // `unstep` may have found no hubs.
        if self.unstepped.load(Ordering::Acquire) {
            self.unstep_hubs();
        }
    }

    pub(crate) fn hubs(&self) -> Arc<Hubs> {
        lock(&self.hubs).clone()
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.keeper.wake();
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

    /// When it is to have ended, and how long that was after the call.
    pub(crate) fn stop_by(&self) -> Option<(Instant, Duration)> {
        *lock(&self.stop_by)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(crate) fn abort(&self) {
        self.abort.store(true, Ordering::Release);
        // Not only the flow's task: from here on no run begins.
        self.nodes.iter().for_each(|node| node.abort());
        self.keeper.wake();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.abort.load(Ordering::Acquire)
    }

    /// It fails with this, unless it has failed before. Said before anything is let go, so that whoever loses something
    /// with it finds why. What it has failed with.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let mut first = false;
        let failure = self.failure.get_or_init(|| {
            first = true;
            error
        });
        // Callers outside of the flow hear the kind alone, and a `Running` may have been dropped. The cause's `Display` and the
        // subscriber are user code.
        if first {
            contained("the log of a flow's failure panicked", || {
                if failure.is_cancelled() {
                    tracing::debug!(flow = &*self.name, error = %failure, "the flow has ended early");
                } else {
                    tracing::warn!(flow = &*self.name, error = %failure, "the flow has failed");
                }
            });
        }
        failure.again()
    }

    fn set_paused(&self, paused: bool) {
        let mut now = lock(&self.paused);
        if std::mem::replace(&mut *now, paused) == paused {
            return;
        }
        self.nodes.iter().for_each(|node| node.set_paused(paused));
        drop(now);
        // A waker is user code: with no lock held. Each reads the flags as the last call has left them.
        self.nodes.iter().for_each(Wake::wake_by_ref);
    }

    /// No run begins unless it is asked for. Its hubs are made so that none moves anything by itself.
    pub(crate) fn set_stepped(&self) {
        self.nodes.iter().for_each(|node| node.set_stepped(true));
    }

    /// Every operator and every hub goes on by itself, also those hubs that the flow's task has yet to make.
    pub(crate) fn unstep(&self) {
        self.unstepped.store(true, Ordering::Release);
        // The hubs first: once all operators wait for each other, the flow is at its end.
        self.unstep_hubs();
        self.nodes.iter().for_each(|node| node.set_stepped(false));
    }

    /// A task steps through the flow.
    pub(crate) fn is_stepped(&self) -> bool {
        self.nodes.iter().any(|node| node.permit().is_some())
    }

    /// Each operator that has not ended waits for others of the flow, no envelope or link of the flow's is outside, and no message is
    /// entering.
    pub(crate) fn is_quiet(&self) -> bool {
        let none_is_outside = self.rest.outside() == 0 && !self.rest.has_message_entering();
        none_is_outside && self.nodes.iter().all(|node| node.has_ended() || node.rests())
    }

    fn unstep_hubs(&self) {
        self.hubs().all.iter().for_each(|hub| hub.state.go_on());
    }

    pub(crate) fn is_paused(&self) -> bool {
        *lock(&self.paused)
    }

    /// What an operator waits for, if it waits.
    pub(crate) fn lacks(&self, operator: usize) -> Lacks {
        let hubs = self.hubs();
        let holders = Around { control: self, hubs: &hubs };
        // In the middle of a run it is not what its ports were declared to wait for, but one of the two.
        let in_run = self.nodes[operator].shown().in_run();
        let sends = |declared| in_run.map_or(declared, InRun::sends);
        let receives = |declared| in_run.map_or(declared, InRun::receives);
        let from = hubs.of(operator).filter(|hub| hub.from == operator && sends(hub.writer_waits));
        let to = hubs.of(operator).filter(|hub| hub.to == operator && receives(hub.reader_waits));
        let mut room: Vec<_> = from.filter_map(|hub| hub.state.writer_lacks(&holders)).collect();
        let lacking = to.filter_map(|hub| Some((hub.of_each, hub.state.reader_lacks(in_run.is_some(), &holders)?)));
        let (ports, mut messages): (Vec<_>, Vec<_>) = lacking.unzip();
        // Once for each port, after the last hub that lacks a message. A run that waits in its middle waits for any of them.
        let mut said = Vec::new();
        for (lack, port) in messages.iter_mut().zip(ports).rev() {
            let Some(port) = port.filter(|port| in_run.is_none() && !said.contains(port)) else { continue };
            said.push(port);
            let open = hubs
                .of(operator)
                .filter(|hub| hub.to == operator && hub.of_each == Some(port) && !hub.state.has_ended());
            if open.count() > 1 {
                lack.push_str(&format!(" (`{port}` waits for one of each connection; `at_least = 1` runs on any)"));
            }
        }
        for (linked, _) in hubs.links_of(operator) {
            match linked.state.lacks(linked.link, &holders) {
                None => {}
                Some(Lack::Room(lack)) => room.push(lack),
                Some(Lack::Chunk(lack)) => messages.push(lack),
            }
        }
        let shown = self.nodes[operator].shown();
        let asked = shown.asked().into_iter().map(|ask| match ask {
            Ask::Answer(desk) => format!("an answer of its own flow's service `{}`", self.names[desk]),
            Ask::Room(desk) => {
                let full =
                    hubs.of(desk).filter(|hub| hub.from == desk).find_map(|hub| hub.state.writer_lacks(&holders));
                full.unwrap_or_else(|| format!("room at `{}`, which another handle has reserved", self.names[desk]))
            }
        });
        Lacks { room, messages, asked: asked.collect(), more: shown.lacks() }
    }

    pub(crate) fn status(&self, operator: usize) -> OperatorStatus {
        let shown = self.nodes[operator].shown();
        let (status, running) = shown.status();
        let waits = matches!(status, Status::Wait | Status::WaitEvent | Status::WaitTime(_));
        let mut waits_for = if waits { self.lacks(operator).all() } else { Vec::new() };
        // That, and nothing beside it: what comes next is asked once it goes on.
        if self.is_paused() && waits {
            waits_for.push("the flow to be resumed".into());
        }
        OperatorStatus { name: self.names[operator].clone(), status, running, runs: shown.runs(), waits_for }
    }
}

/// A flow's operators and hubs, as the holders of its envelopes.
struct Around<'a> {
    control: &'a Control,
    hubs: &'a Hubs,
}

impl Around<'_> {
    /// The hubs of an operator whose messages carry envelopes.
    fn of(&self, operator: usize) -> impl Iterator<Item = &Joined> {
        self.hubs.of(operator).filter(|hub| hub.state.carries_envelopes())
    }

    /// Whether an operator has sent as many messages with envelopes as it has taken. The readers of one output are sent the same:
    /// so the most that any is sent.
    fn has_passed_on_all(&self, operator: usize) -> bool {
        let taken: u64 = self.of(operator).filter(|hub| hub.to == operator).map(|hub| hub.state.counts().taken).sum();
        let sent = self.of(operator).filter(|hub| hub.from == operator).map(|hub| {
            let Counts { taken, dropped, untaken } = hub.state.counts();
            taken + dropped + untaken + hub.state.queued() as u64
        });
        sent.max().is_some_and(|sent| sent >= taken)
    }
}

impl Holders for Around<'_> {
    fn each_hub(&self, show: &mut dyn FnMut(&dyn HubState)) {
        self.hubs.all.iter().for_each(|hub| show(&*hub.state));
    }

    /// The writer, if it waits in the middle of a run; the reader, and those that it may have passed them on to.
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
        let writes = self.control.nodes[own.from].shown().in_run().is_some() && !found.contains(&own.from);
        found.extend(writes.then_some(own.from));
        found.sort_unstable();
        found.into_iter().map(|operator| self.control.whose(operator)).collect()
    }
}

/// What an operator waits for, in words.
pub(crate) struct Lacks {
    pub(crate) room: Vec<String>,
    messages: Vec<String>,
    pub(crate) asked: Vec<String>,
    more: Vec<String>,
}

impl Lacks {
    pub(crate) fn waits_beside_its_ports(&self) -> bool {
        self.room.is_empty() && self.messages.is_empty() && self.asked.is_empty() && !self.more.is_empty()
    }

    pub(crate) fn all(self) -> Vec<String> {
        self.room.into_iter().chain(self.messages).chain(self.asked).chain(self.more).collect()
    }
}

impl Handle {
    /// The flow's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How each of its operators stands, in the order of adding.
    pub fn status(&self) -> Vec<OperatorStatus> {
        (0..self.0.nodes.len()).map(|operator| self.0.status(operator)).collect()
    }

    /// Each operator as it stands now, and then whenever it stands otherwise, until the flow has ended. One who is slower
    /// than the operators gets each one's latest state and not all that were in between.
    pub fn changes(&self) -> Changes {
        let watcher = self.0.rest.watchers.add(self.0.nodes.len());
        // One that shows something at this moment may not have seen that somebody has come.
        self.0.nodes.iter().filter(|node| !node.is_parked_until_it_sees()).for_each(Wake::wake_by_ref);
        Changes { watcher, control: self.0.clone(), also: Vec::new() }
    }

    /// No run begins until the flow is resumed. Runs that are under way go to their end, and so does what they await.
    pub fn pause(&self) {
        self.0.set_paused(true);
    }

    /// Runs may begin again.
    pub fn resume(&self) {
        self.0.set_paused(false);
    }

    /// True while it is paused.
    pub fn is_paused(&self) -> bool {
        self.0.is_paused()
    }

    /// Ends the flow by draining it: its sources do not run again, what is under way goes to its end.
    ///
    /// Sources are the operators that wait for no message. Of a loop that no source leads to every operator ends after its present
    /// run. A loop that one leads to ends once it has gone quiet, and one that never does so must ask
    /// [`is_stopping`](Self::is_stopping). A flow that is paused stays so: resume it.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// As [`stop`](Self::stop), and the flow is aborted if it has not ended after this time: it fails with
    /// [`Cancelled`](crate::ErrorKind::Cancelled), which names the operators that were left and what each of them did or waited
    /// for. Of several calls the earliest moment counts. It needs the runtime's timers (`enable_time`).
    ///
    /// What an abort does not end, this does not end either: an operator that blocks its thread, and each operator's `stop`, which
    /// runs to its end.
    pub fn stop_within(&self, time: Duration) {
        self.0.stop_within(time);
    }

    /// True once the flow is to end: [`stop`](Self::stop) was called.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping()
    }

    /// What the flow failed with, if it has: an operator's failure, an abort, a stall. From then on; what
    /// [`Running`](crate::Running) resolves with comes when every operator has stopped.
    pub fn failure(&self) -> Option<Error> {
        self.0.failure.get().map(Error::again)
    }

    /// True from the abort on, before the flow has failed with it.
    pub(crate) fn is_aborted(&self) -> bool {
        self.0.is_aborted()
    }

    /// Ends the flow at once: operators are dropped at the await they are in, then every `stop` runs. It fails with
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

/// How a flow's operators change, as a [`Stream`]. See [`Handle::changes`].
#[must_use = "it is a stream"]
pub struct Changes {
    watcher: Arc<Watcher>,
    control: Arc<Control>,
    /// Operators of a section stand as the first of them does.
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
                Some(operator) if control.is_counted(operator) => {}
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
        Control::new("flow".into(), (0..NODES).map(|node| node.to_string().into()).collect(), Vec::new())
    }

    /// How many nodes hold their operator.
    fn paused(control: &Control) -> usize {
        control.nodes.iter().filter(|node| node.is_paused()).count()
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
        let mut worn = handle.0.nodes[0].wear_face();
        let polled =
            handle.0.nodes[0].poll(&mut worn, &mut Context::from_waker(&waker), |_| Poll::<crate::Result<()>>::Pending);
        assert!(polled.is_pending());
        handle.pause();
        assert_eq!((handle.is_paused(), paused(&handle.0)), (false, 0));
    }
}
