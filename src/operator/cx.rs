//! [`Cx`]: what an operator is given beside its ports.

use std::{
    borrow::Cow,
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use futures::future::BoxFuture;
use smallvec::SmallVec;
use tokio::sync::mpsc;

use super::{
    Ports,
    carry::Carry,
    control::Handle,
    fruitless::Fruitless,
    lane::{Lane, OwnStreams},
    node::{Method, Node},
    permit::Permit,
    seat::{How, Setting, Surroundings},
};
use crate::{
    condition::{self, Awaited, Conditions, Gate, Need, PortId, PortState, Readiness, Status, When},
    device::{Device, ticks::Ticks},
    error::{Error, ErrorKind, Result},
    hub::{Metadata, Reply},
    memory::HostAccess,
    stream::{DeviceTime, Stream, Ticket},
};

/// As many runs as tokio lets a task have operations at a stretch.
pub(super) const LONGEST_STREAK: u32 = 128;

/// An operator's surroundings: its name, its device and stream, and the wait for its next run.
pub struct Cx {
    name: Arc<str>,
    device: Device,
    /// `None` on the host. Gives its streams back when it is dropped, after the operator's `stop`.
    pub(crate) lane: Option<Arc<Lane>>,
    /// The stream for its work, once asked for: its own, or this run's.
    stream: Option<Stream>,
    /// Its runs are timed on the device, where they have a stream of their own.
    timed: bool,
    node: Arc<Node>,
    /// The node's own waker, for what its runs wait for to keep. Away while that is asked.
    waker: Option<Waker>,
    /// Its wait for the next run may be one of several things that it waits for.
    among_others: bool,
    finished: bool,
    /// What the next run waits for.
    awaited: Awaited,
    /// What every run waits for beside its ports.
    conditions: Option<Box<Conditions>>,
    /// Its ports have more to say of what they wait for than their hubs do.
    pub(super) ports_tell: bool,
    /// What it waits for beside its hubs stands in its node for others to read.
    told: bool,
    carry: Arc<Carry>,
    flow: Arc<Surroundings>,
    streams: OwnStreams,
    /// The ports that its conditions name.
    named: Arc<[(PortId, Option<Need>)]>,
    /// Work of its own goes on elsewhere: it is not at rest, whatever it waits for.
    holds_token: bool,
    /// The tasks that it has beside its own: each has the sending half.
    helpers: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
    /// Theirs.
    lanes: Vec<Arc<Lane>>,
    /// Whether the operator's `may_run` and `after` are called: until it is known that it has none of its own.
    asks_may_run: bool,
    calls_after: bool,
    /// Runs since it last let others have a turn.
    streak: u32,
    fruitless: Fruitless,
    pub(crate) runs: u64,
    /// In ticks.
    pub(crate) busy: u64,
    /// In a run.
    running: bool,
    /// When the present run began, or the first of those since it last waited.
    busy_since: Option<Ticks>,
}

impl Cx {
    pub(crate) fn new(setting: Setting, node: Arc<Node>, flow: Arc<Surroundings>) -> Self {
        let Setting { name, device, streams, conditions, merge } = setting;
        let How { mode, timed } = flow.how;
        Self {
            lane: Lane::new(&name, &device, &streams, mode),
            carry: Arc::new(Carry::new(name.clone(), merge, node.clone())),
            name,
            device,
            stream: None,
            timed,
            waker: Some(Waker::from(node.clone())),
            among_others: false,
            node,
            finished: false,
            awaited: Awaited::new(),
            named: condition::named(&conditions).into(),
            conditions: Conditions::new(conditions),
            streams,
            holds_token: false,
            helpers: None,
            lanes: Vec::new(),
            ports_tell: false,
            told: false,
            flow,
            asks_may_run: true,
            calls_after: true,
            streak: 0,
            fruitless: Fruitless::default(),
            runs: 0,
            busy: 0,
            running: false,
            busy_since: None,
        }
    }

    /// The operator's name in the flow.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device it was put on; the host if none.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The operator's own stream: taken from its pool at its first use, the same ever after. What it touches is ordered
    /// onto it, and what it sends carries that order along, without a call. Messages without envelopes are ordered onto it
    /// as they are taken.
    ///
    /// If it has none of its own, because it [was asked not to](crate::flow::Added::without_own_stream) or because its
    /// pool was used up when it asked first: the stream that the first message of this run came with, which all others
    /// join; and if none came with one, the device's default stream, which is not sent on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream(&mut self) -> Result<&Stream> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = self.lane()?.stream()?;
                if self.running
                    && let Some(timed) = self.timed_stream()
                {
                    timed.begin_run();
                }
                stream
            }
        };
        Ok(self.stream.insert(stream))
    }

    /// A further stream of the operator's, from its pool: the same for the same name, and another than
    /// [`stream`](Self::stream). Outputs carry it only after [`Output::set_stream`](super::Output::set_stream), and
    /// messages without envelopes are not ordered onto it by themselves: [`Stream::join`] them.
    ///
    /// It is given back with the operator's own stream, when the flow ends.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host or without streams of its own, or if its pool is used up;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream_named(&mut self, name: &str) -> Result<Stream> {
        self.lane()?.named(name)
    }

    fn lane(&self) -> Result<&Lane> {
        self.lane.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!("`{}` is on the host, which has no streams: put it on a device with `.on(&device)`", self.name),
            )
        })
    }

    /// This run is the operator's last: it ends after it, as a source does that has no more.
    pub fn finish(&mut self) {
        self.finished = true;
    }

    /// The operator's next run also waits for this, with all its other conditions: for the data of a buffer that no
    /// message carries. It is woken when that is available, or, with an error where it uses the buffer, when the device
    /// is lost.
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// /// Sends what its device has computed, and never waits in the middle of a run.
    /// struct Results {
    ///     results: Buffer<f32>,
    /// }
    ///
    /// #[derive(Ports)]
    /// struct ResultsPorts {
    ///     #[output]
    ///     first: Output<f32>,
    /// }
    ///
    /// impl Operator for Results {
    ///     type Ports = ResultsPorts;
    ///
    ///     async fn start(&mut self, cx: &mut Cx) -> Result<()> {
    ///         cx.run_after(self.results.available());
    ///         Ok(())
    ///     }
    ///
    ///     async fn compute(&mut self, ports: &mut ResultsPorts, cx: &mut Cx) -> Result<()> {
    ///         cx.finish();
    ///         ports.first.send(self.results.as_slice()?[0]).await
    ///     }
    /// }
    /// ```
    pub fn run_after(&mut self, available: HostAccess) {
        self.awaited.push(available);
    }

    /// Wakes the operator, to ask its conditions and its [`may_run`](super::Operator::may_run) again: for whoever changes
    /// what that depends on. It holds no flow up: one in which nobody can run meanwhile is at its end.
    pub fn waker(&self) -> Waker {
        Waker::from(self.node.clone())
    }

    /// The flow that it is part of: to ask how it stands, to stop it.
    pub fn flow(&self) -> Handle {
        Handle(self.flow.control.clone())
    }

    /// The gate of that name, made by [`Flow::gate`](crate::Flow::gate).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the flow has none of that name; the message has those that it has.
    pub fn gate(&self, name: &str) -> Result<Gate> {
        self.flow.gates.find(name)
    }

    /// The named values that came with the messages of this run, as merged so far; what is sent takes them along.
    ///
    /// Of an operator that awaits its ports in a loop of its own ([`run`](super::Operator::run)), outside of a run, those of
    /// the message that it took last.
    pub fn metadata(&self) -> Metadata {
        self.carry.metadata()
    }

    /// Gives what is sent from now on in this run a named value: in place of what came in under that name, if something did.
    ///
    /// ```
    /// use wakeline::prelude::*;
    /// # #[derive(Ports)]
    /// # struct CameraPorts {
    /// #     #[output]
    /// #     frames: Output<Vec<u8>>,
    /// # }
    /// # struct Camera(u64);
    /// impl Operator for Camera {
    ///     type Ports = CameraPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut CameraPorts, cx: &mut Cx) -> Result<()> {
    ///         self.0 += 1;
    ///         cx.insert_metadata("frame", self.0);        // anywhere downstream: cx.metadata().get::<u64>("frame")
    ///         ports.frames.send(vec![0; 64]).await
    ///     }
    /// }
    /// ```
    pub fn insert_metadata<T: Send + Sync + 'static>(&mut self, name: impl Into<Cow<'static, str>>, value: T) {
        self.carry.change(|metadata| metadata.insert(name, value));
    }

    /// Takes a named value away from what is sent from now on in this run. True if there was one.
    pub fn remove_metadata(&mut self, name: &str) -> bool {
        self.carry.change(|metadata| metadata.remove(name))
    }

    /// Who waits for answers to the messages that this run has taken: one entry a message, in the order of taking, empty
    /// for a message that nobody waits for. For an operator that takes several messages in a run and makes several of
    /// them: it says which of its own answers which with [`Output::send_for`](super::Output::send_for). Whoever is taken
    /// away here is answered by nothing else that the run sends.
    ///
    /// It need not be called where one message is made of one: that one carries the callers along by itself.
    ///
    /// ```
    /// use wakeline::prelude::*;
    ///
    /// #[derive(Ports)]
    /// struct LongestPorts {
    ///     #[input]
    ///     words: Input<String>,
    ///     #[output]
    ///     marked: Output<String>,
    /// }
    ///
    /// /// Marks the longest of all words that are there.
    /// struct Longest;
    ///
    /// impl Operator for Longest {
    ///     type Ports = LongestPorts;
    ///
    ///     async fn compute(&mut self, ports: &mut LongestPorts, cx: &mut Cx) -> Result<()> {
    ///         let words: Vec<String> = ports.words.take_batch()?.collect();
    ///         let longest = words.iter().map(String::len).max();
    ///         for (word, reply) in words.into_iter().zip(cx.take_replies()) {
    ///             let marked = if Some(word.len()) == longest { word + "!" } else { word };
    ///             ports.marked.send_for(reply, marked).await?;
    ///         }
    ///         Ok(())
    ///     }
    /// }
    /// ```
    pub fn take_replies(&mut self) -> Vec<Reply> {
        self.carry.take_replies()
    }

    /// Waits until the operator may run, and begins the run: all conditions are ready and what they promise is claimed.
    /// False if it may never run again. For operators that override [`run`](super::Operator::run).
    ///
    /// # Cancel safety
    /// Nothing is taken from a port before it resolves; dropping it changes nothing. While it waits, and for nothing else
    /// beside it (a timer, a channel: in a `select!`, say), the operator counts as one that waits for others: a flow of
    /// which all do is at its end.
    pub async fn ready<P: Ports>(&mut self, ports: &mut P) -> bool {
        self.asks_may_run = false;
        self.among_others = true;
        self.until_ready(ports, |_, _| true).await
    }

    /// Whether a run has ended after which [`after`](Self::after) is to be called.
    #[inline]
    pub(super) fn has_run(&self) -> bool {
        self.calls_after && self.running
    }

    /// A run has ended.
    pub(super) fn end_of_run(&mut self) -> EndOfRun {
        self.end_run();
        self.stop_clock();
        let last = self.lane.as_ref().map(|lane| lane.run_ends()).unwrap_or_default();
        EndOfRun { node: self.node.clone(), last }
    }

    /// From now on whether the operator's `after` is called.
    pub(super) fn calls_after(&mut self, calls: bool) {
        self.calls_after = calls;
    }

    /// As [`ready`](Self::ready), with what the operator's own `may_run` has to say.
    #[inline]
    pub(super) async fn until_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        mut may_run: impl FnMut(&P, &Cx) -> bool,
    ) -> bool {
        self.carry.let_go();
        let waker = self.waker.take();
        let mut asking = Asking { cx: self, ports, waits: false, waker };
        poll_fn(|task| {
            let own = asking.waker.as_ref().filter(|_| asking.cx.node.is_face(task.waker()));
            let task = &mut Context::from_waker(own.unwrap_or(task.waker()));
            let asked = asking.cx.poll_ready(asking.ports, &mut may_run, task);
            asking.waits = asked.is_pending();
            // The end of one run is the beginning of the next, if it does not have to wait.
            if asked != Poll::Ready(true) {
                asking.cx.stop_clock();
            }
            asked
        })
        .await
    }

    #[inline]
    fn poll_ready<P: Ports>(
        &mut self,
        ports: &mut P,
        may_run: &mut impl FnMut(&P, &Cx) -> bool,
        task: &mut Context<'_>,
    ) -> Poll<bool> {
        self.end_run();
        if self.finished || self.node.is_finishing() {
            if let Some(permit) = self.held_by() {
                permit.leave(self.last());
            }
            return Poll::Ready(false);
        }
        // An operator that is always ready lets others have a turn now and then, also where tokio's budget is off.
        self.streak += 1;
        if self.streak == LONGEST_STREAK {
            self.streak = 0;
            self.fruitless.look(&self.name, self.runs, ports, task);
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.node.is_aborted() {
            // What it does is dropped at the next poll.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.node.is_held() && !self.may_begin() {
            return Poll::Pending;
        }
        let budget = ready!(tokio::task::coop::poll_proceed(task));
        self.node.resume();
        let mut asked = ports.poll_ready(task);
        if self.conditions.is_some() || !self.awaited.is_empty() {
            asked = asked | self.poll_more(ports, task);
        }
        if !asked.is_ready() {
            return self.wait(asked, ports);
        }
        budget.made_progress();
        if self.asks_may_run || self.conditions.as_ref().is_some_and(|conditions| conditions.any_last()) {
            let asked = self.poll_last(ports, may_run, task);
            if !asked.is_ready() {
                return self.wait_refused(asked);
            }
        }
        if !self.claim(ports) {
            // Another task was quicker: look again, after it.
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(permit) = self.held_by() {
            permit.begin();
        }
        self.begin();
        Poll::Ready(true)
    }

    /// Who steps through its runs.
    #[inline]
    fn held_by(&self) -> Option<&Permit> {
        if self.node.is_held() { self.node.permit() } else { None }
    }

    /// It is paused, or stepped through: may a run begin all the same?
    #[cold]
    fn may_begin(&mut self) -> bool {
        let paused = self.node.is_paused();
        let mut lacks = Vec::new();
        if let Some(permit) = self.node.permit() {
            if permit.come(self.holds_token, || self.last()) {
                if !paused {
                    return true;
                }
                permit.refuse();
            }
            lacks.push("its turn to be stepped".into());
        }
        // Not at rest: somebody may let it go on.
        self.tell(lacks);
        self.node.show(Status::WaitEvent);
        false
    }

    /// A run begins.
    #[inline]
    fn begin(&mut self) {
        if self.lane.is_some() {
            self.begin_on_device();
        }
        self.carry.begin();
        self.node.show_running();
        self.running = true;
        if self.busy_since.is_none() {
            self.busy_since = Some(Ticks::now());
        }
    }

    #[inline(never)]
    fn begin_on_device(&mut self) {
        if self.lane.as_ref().is_some_and(|lane| lane.begin()) {
            self.stream = None;
        }
        if let Some(stream) = self.timed_stream() {
            stream.begin_run();
        }
    }

    /// A worker's run begins: what it needs was handed to its ports.
    pub(super) fn begin_run<P: Ports>(&mut self, ports: &mut P) {
        let _ = ports.claim();
        self.begin();
    }

    /// Asks what is waited for beside the ports.
    #[cold]
    fn poll_more<P: Ports>(&mut self, ports: &mut P, task: &mut Context<'_>) -> Readiness {
        let mut asked = condition::buffers(&mut self.awaited, task);
        if let Some(conditions) = &mut self.conditions {
            asked = asked | conditions.poll(&mut |port, ask| ask_port(ports, port, ask), task);
            // One that runs for a message or for something else would go on for the other for ever.
            if self.flow.control.is_stopping() && have_ended(ports) {
                asked = Readiness::NEVER;
            }
        }
        asked
    }

    /// It may not run yet, or never again.
    #[inline]
    fn wait<P: Ports>(&mut self, asked: Readiness, ports: &mut P) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        match asked {
            Readiness::WAIT if self.conditions.is_none() && !self.ports_tell => {
                self.tell(Vec::new());
                self.node.show(Status::Wait);
            }
            _ => self.show(asked, ports),
        }
        // Otherwise what it waits for comes by itself: the flow is not at rest.
        if let Some(permit) = self.held_by() {
            permit.refuse();
            return Poll::Pending;
        }
        let for_others = asked.needs_others() && !self.holds_token;
        if self.among_others {
            self.node.note_wait(for_others);
        } else if for_others {
            self.node.park();
        }
        Poll::Pending
    }

    #[cold]
    fn show<P: Ports>(&mut self, asked: Readiness, ports: &mut P) {
        let mut due = None;
        if asked == Readiness::WAIT_TIME {
            due = self.conditions.as_ref().and_then(|conditions| conditions.due());
            ports.visit(&mut |_, port| due = due.max(port.due()));
        }
        let mut lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        if !self.awaited.is_empty() {
            lacks.push("a buffer's data".into());
        }
        ports.visit(&mut |name, port| lacks.extend(port.lacks().map(|lacks| format!("{lacks} at `{name}`"))));
        self.tell(lacks);
        self.node.show(asked.status(due));
    }

    /// For others to read: what it waits for beside its hubs.
    #[inline]
    fn tell(&mut self, lacks: Vec<String>) {
        if self.told || !lacks.is_empty() {
            self.told = !lacks.is_empty();
            self.node.shown.set_lacks(lacks);
        }
    }

    /// Asks what has no waker, and the operator itself, when all else is ready.
    #[cold]
    fn poll_last<P: Ports>(
        &mut self,
        ports: &mut P,
        may_run: &mut impl FnMut(&P, &Cx) -> bool,
        task: &mut Context<'_>,
    ) -> Readiness {
        // A port that has what it waits for keeps no waker; but the next message is a reason to ask again. Kept first, so
        // that none comes unseen.
        ports.visit(&mut |_, port| port.watch(task.waker()));
        let mut asked = Readiness::READY;
        if let Some(conditions) = &mut self.conditions {
            asked = conditions.poll_last(&mut |port, ask| ask_port(ports, port, ask), task);
        }
        let mut lacks = self.conditions.as_ref().map(|conditions| conditions.lacks()).unwrap_or_default();
        if asked.is_ready() && self.asks_may_run {
            if !may_run(ports, self) {
                asked = Readiness::WAIT;
                lacks.push("its own `may_run` to allow it".into());
            }
            self.asks_may_run = !self.node.is_default(Method::MayRun);
        }
        self.tell(lacks);
        self.node.answered(asked.is_ready());
        asked
    }

    /// Everything was ready but what has no waker.
    #[cold]
    fn wait_refused(&mut self, asked: Readiness) -> Poll<bool> {
        if asked.is_never() {
            return Poll::Ready(false);
        }
        self.node.show(asked.status(self.conditions.as_ref().and_then(|conditions| conditions.due())));
        if let Some(permit) = self.held_by() {
            permit.refuse();
            return Poll::Pending;
        }
        let for_others = asked.needs_others() && !self.holds_token;
        if self.among_others {
            self.node.note_wait(for_others);
        } else if for_others {
            self.node.park_refused();
        }
        Poll::Pending
    }

    /// Takes what the run needs, all of it or nothing.
    #[inline]
    fn claim<P: Ports>(&mut self, ports: &mut P) -> bool {
        let Some(conditions) = &mut self.conditions else { return ports.claim() };
        if !conditions.claim() {
            return false;
        }
        let claimed = ports.claim();
        if !claimed {
            conditions.give_back();
        }
        claimed
    }

    /// The present run's end, if there is one.
    #[inline]
    pub(super) fn end_run(&mut self) {
        if !std::mem::take(&mut self.running) {
            return;
        }
        self.runs += 1;
        self.carry.end();
        self.node.shown.ran(self.runs);
        if let Some(conditions) = &mut self.conditions {
            conditions.ended();
        }
        if let Some(stream) = self.timed_stream() {
            stream.end_run();
        }
    }

    #[inline]
    pub(super) fn stop_clock(&mut self) {
        if let Some(since) = self.busy_since.take() {
            self.busy += Ticks::now().since(since);
        }
    }

    /// Said by the trait's own methods: the operator has not written this one.
    pub(super) fn not_written(&self, method: Method) {
        self.node.set_default(method);
    }

    /// What the device spent on its runs, where that is measured.
    pub(super) fn device_time(&self) -> Option<DeviceTime> {
        if !self.timed || self.device.is_host() {
            return None;
        }
        Some(self.timed_stream().and_then(Stream::device_time).unwrap_or_default())
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The stream that its runs are timed on: its own, and no other's.
    #[inline]
    fn timed_stream(&self) -> Option<&Stream> {
        if self.timed { self.lane.as_ref()?.own() } else { None }
    }

    /// The last work of each stream that it has used.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.lane.iter().chain(&self.lanes).flat_map(|lane| lane.last()).collect()
    }

    /// The surroundings of one of several workers: streams and messages' loads of its own.
    pub(super) fn worker(&mut self, number: usize) -> Self {
        let setting = Setting {
            name: format!("{} #{}", self.name, number + 1).into(),
            device: self.device.clone(),
            streams: self.streams.clone(),
            conditions: Vec::new(),
            merge: self.carry.policy(),
        };
        let worker = Self::new(setting, Node::alone(), self.flow.clone());
        self.lanes.extend(worker.lane.clone());
        worker
    }

    /// Work of its own goes on elsewhere, or does no longer.
    pub(super) fn holds_token(&mut self, holds: bool) {
        self.holds_token = holds;
    }

    /// For a task beside its own, to be dropped at its end.
    pub(super) fn helper(&mut self) -> mpsc::Sender<()> {
        self.helpers.get_or_insert_with(|| mpsc::channel(1)).0.clone()
    }

    /// Resolves once the tasks beside its own are gone.
    pub(super) async fn settled(&mut self) {
        if let Some((own, mut helpers)) = self.helpers.take() {
            drop(own);
            let _ = helpers.recv().await;
        }
    }

    /// Begins a task of this name where the flow's others are.
    pub(super) fn spawn(&self, name: &str, task: BoxFuture<'static, ()>) {
        (self.flow.spawn)(name, task);
    }

    /// It has said that it wants no further run.
    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    pub(super) fn named(&self) -> &Arc<[(PortId, Option<Need>)]> {
        &self.named
    }

    /// The last run's time, if it ended with an error.
    pub(crate) fn close(&mut self) {
        self.end_run();
        self.stop_clock();
        self.carry.let_go();
        self.finished = false;
        self.awaited.clear();
        if let Some(conditions) = &mut self.conditions {
            conditions.rest();
        }
    }

    /// The conditions that it was given.
    pub(super) fn into_conditions(mut self) -> Vec<When> {
        self.conditions.take().map(|conditions| conditions.into_all()).unwrap_or_default()
    }

    pub(crate) fn carry(&self) -> &Arc<Carry> {
        &self.carry
    }
}

/// Shows one of the ports, by its number.
fn ask_port<P: Ports>(ports: &mut P, number: usize, ask: &mut dyn FnMut(&mut dyn PortState)) {
    let mut at = 0;
    ports.visit(&mut |_, port| {
        if at == number {
            ask(port.state());
        }
        at += 1;
    });
}

/// What a run leaves behind: work of its device.
pub(super) struct EndOfRun {
    node: Arc<Node>,
    last: SmallVec<[Ticket; 2]>,
}

impl EndOfRun {
    /// What the operator does when that work is done, too. `after` was called, which runs nothing of an `async fn`, and
    /// says whether there is one: false if not.
    pub(super) async fn then(self, after: impl Future<Output = Result<()>>) -> Result<bool> {
        if self.node.is_default(Method::After) {
            return Ok(false);
        }
        for last in self.last {
            last.completed().await?;
        }
        after.await.map(|()| true)
    }
}

/// It has inputs, and nothing will come to any of them.
fn have_ended<P: Ports>(ports: &mut P) -> bool {
    let (mut any, mut all) = (false, true);
    ports.visit(&mut |_, port| {
        any |= !port.is_output();
        all &= port.is_output() || port.has_ended();
    });
    any && all
}

/// A wait for the next run. Given up in the middle, it is no wait any more: the operator goes on with something else.
struct Asking<'a, P: Ports> {
    cx: &'a mut Cx,
    ports: &'a mut P,
    waits: bool,
    waker: Option<Waker>,
}

impl<P: Ports> Asking<'_, P> {
    #[cold]
    fn give_up(&mut self) {
        self.ports.visit(&mut |_, port| port.rest());
        self.cx.awaited.iter_mut().for_each(HostAccess::rest);
        self.cx.conditions.iter_mut().for_each(|conditions| conditions.rest());
        self.cx.node.resume();
    }
}

impl<P: Ports> Drop for Asking<'_, P> {
    #[inline]
    fn drop(&mut self) {
        self.cx.waker = self.waker.take();
        if self.waits {
            self.give_up();
        }
    }
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx")
            .field("name", &self.name)
            .field("device", &self.device)
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}
