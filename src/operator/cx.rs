//! [`Cx`]: what an operator is given beside its ports.

pub(super) mod runs;

use std::{
    borrow::Cow,
    fmt,
    future::poll_fn,
    sync::Arc,
    task::{Poll, Waker},
};

use futures::future::BoxFuture;
use tokio::sync::mpsc;

use super::{
    blocking::Blocking,
    carry::Carry,
    control::Handle,
    fruitless::Fruitless,
    lane::{Lane, OwnStreams},
    node::{Method, Node},
    seat::{How, Setting, Surroundings, Tally, caught_call},
};
use crate::{
    condition::{self, Awaited, Conditions, Gate, Need, PortId, When},
    device::{Device, ticks::Ticks},
    error::{Error, ErrorKind, Result},
    hub::{Metadata, Reply},
    memory::{Account, Allocator, Buffer, HostAccess, Plain, Reservation},
    stream::{DeviceTime, Stream, Ticket, capture::Capture},
};

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
    /// What it has said last, in words, that is neither work nor a message.
    beside: Option<&'static str>,
    /// What the next run waits for.
    awaited: Awaited,
    /// What every run waits for beside its ports.
    conditions: Option<Box<Conditions>>,
    /// Its ports have more to say of what they wait for than their hubs do.
    pub(super) ports_tell: bool,
    /// Some of them are linked to hubs of chunks.
    pub(super) linked: bool,
    /// What it waits for beside its hubs stands in its node for others to read.
    told: bool,
    carry: Arc<Carry>,
    flow: Arc<Surroundings>,
    streams: OwnStreams,
    /// Where its memory comes from, what is set apart of it for the present run, and how much it has.
    allocator: Option<Allocator>,
    reservations: Vec<Arc<Reservation>>,
    account: Arc<Account>,
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
    /// Asks until it lets others have a turn.
    asks_left: u32,
    fruitless: Fruitless,
    blocking: Blocking,
    /// What it has failed with between two runs.
    failure: Option<Error>,
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
        let Setting { name, device, streams, allocator, conditions, merge, may_block } = setting;
        let How { mode, timed } = flow.how;
        let reservations = condition::reservations(&conditions);
        let number = Arc::as_ptr(&flow.control).addr();
        reservations.iter().for_each(|reservation| reservation.enter(number));
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
            beside: None,
            awaited: Awaited::new(),
            named: condition::named(&conditions).into(),
            reservations,
            allocator,
            account: Arc::new(Account::new(number)),
            conditions: Conditions::new(conditions),
            streams,
            holds_token: false,
            helpers: None,
            lanes: Vec::new(),
            ports_tell: false,
            linked: false,
            told: false,
            flow,
            asks_may_run: true,
            calls_after: true,
            asks_left: runs::LONGEST_STREAK,
            fruitless: Fruitless::default(),
            blocking: Blocking::new(may_block),
            failure: None,
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

    /// Memory for `len` elements, for work on the operator's own stream; contents unknown. It comes from the first of
    /// these that has it:
    ///
    /// 1. what a [`memory`](crate::condition::memory) condition has set apart for this run and is not drawn yet, if it is
    ///    enough: of the operator's own [allocator](crate::flow::Added::allocator) first, then of others, in the order of
    ///    the conditions;
    /// 2. the operator's own allocator, or, if it was given none, the one that its first condition names: what is left of
    ///    that for this run, and beside that what nobody has;
    /// 3. for an operator with neither: the device's own, or on the host memory of the host.
    ///
    /// It may be sent on, as an envelope, and comes back to its allocator when nobody has it any more. The report says how
    /// much the operator had of it at once.
    ///
    /// # Errors
    /// As [`Allocator::alloc`] and [`stream`](Self::stream).
    pub fn alloc<T: Plain>(&mut self, len: usize) -> Result<Buffer<T>> {
        let own = self.allocator.clone();
        let is_own = |reserved: &&Arc<Reservation>| own.as_ref().is_some_and(|own| reserved.allocator() == own);
        let of_own = self.reservations.iter().find(is_own);
        let enough = of_own.into_iter().chain(&self.reservations).find(|reserved| reserved.has::<T>(len));
        let first = if own.is_some() { of_own } else { self.reservations.first() };
        let reserved = enough.or(first).cloned();
        let from = reserved.as_ref().map(|reserved| reserved.allocator()).or(own.as_ref());
        let on_host = from.map_or(self.device.is_host(), Allocator::is_host);
        let stream = if on_host { None } else { Some(self.stream()?.clone()) };
        let made = match (reserved, own, &stream) {
            (Some(reserved), _, stream) => reserved.alloc(stream.as_ref(), len),
            (None, Some(own), stream) => own.alloc_for(stream.as_ref(), len),
            (None, None, Some(stream)) => stream.alloc(len),
            (None, None, None) => Buffer::pinned(&self.device, len),
        };
        Ok(made?.count_for(&self.account))
    }

    pub(super) fn memory_peak(&self) -> u64 {
        self.account.peak()
    }

    /// This run is the operator's last: it ends after it, as a source does that has no more.
    pub fn finish(&mut self) {
        self.finished = true;
        self.beside = Some("it calls `Cx::finish`");
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
        self.beside = Some("it calls `Cx::run_after`");
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
        self.beside = Some("it gives messages metadata of its own");
        let (name, value) = (name.into(), Metadata::value(value));
        // Dropped here, where no lock is held.
        drop(self.carry.change(|metadata| metadata.replace(name, value)));
    }

    /// Takes a named value away from what is sent from now on in this run. True if there was one.
    pub fn remove_metadata(&mut self, name: &str) -> bool {
        self.beside = Some("it takes metadata away from messages");
        self.carry.change(|metadata| metadata.take(name)).is_some()
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
        self.beside = Some("it calls `Cx::take_replies`");
        let replies = self.carry.take_replies();
        replies.iter().for_each(Reply::taken_over);
        replies
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

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The stream that its runs are timed on: its own, and no other's.
    #[inline]
    fn timed_stream(&self) -> Option<&Stream> {
        if self.timed { self.lane.as_ref()?.own() } else { None }
    }

    /// What it has failed with between two runs, if it has.
    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
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
            allocator: self.allocator.clone(),
            conditions: Vec::new(),
            merge: self.carry.policy(),
            may_block: false,
        };
        let mut worker = Self::new(setting, Node::of_worker(&self.node), self.flow.clone());
        worker.account = self.account.clone();
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

    /// Waits for what the run before was to be followed by, where no ports are waited at.
    pub(super) async fn until_awaited(&mut self) {
        if !self.awaited.is_empty() {
            poll_fn(|task| match condition::buffers(&mut self.awaited, task).is_ready() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
            .await;
        }
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
        // First: what follows may be user code that panics.
        self.reservations.iter().for_each(|reservation| reservation.release());
        self.end_run();
        self.stop_clock();
        self.carry.let_go();
        self.finished = false;
        self.awaited.clear();
        if let Some(conditions) = &mut self.conditions {
            conditions.close();
        }
    }

    /// Before its own `start`.
    pub(super) fn start_conditions(&mut self) {
        self.conditions.iter_mut().for_each(|conditions| conditions.start());
    }

    /// After the operator's own `stop`, which may have used it: what it did is tallied, and it gives back the conditions that it was
    /// given. One that panics is there in the next run, too.
    pub(super) fn stopped(mut self, tally: &mut Tally, conditions: &mut Vec<When>) -> Result<()> {
        // The last work is done by now, or lost.
        tally.device = self.device_time();
        tally.memory_peak = self.memory_peak();
        // The user's own are among them.
        let rested = caught_call(&mut || self.conditions.iter_mut().for_each(|conditions| conditions.rest()));
        let mut cx = Some(self);
        let kept = caught_call(&mut || {
            let given = cx.take().and_then(|mut cx| cx.conditions.take());
            *conditions = given.map(|conditions| conditions.into_all()).unwrap_or_default();
        });
        rested.and(kept)
    }

    pub(crate) fn carry(&self) -> &Arc<Carry> {
        &self.carry
    }

    /// From now on it works on streams of this capture, and what its messages bring along is kept apart. What it had before.
    pub(super) fn enter_capture(&mut self, capture: &Arc<Capture>) -> Result<Uncaptured> {
        let lane = self.lane()?.captured(capture);
        self.beside = None;
        let carry = Arc::new(Carry::new(self.name.clone(), self.carry.policy(), self.node.clone()));
        Ok(Uncaptured {
            lane: self.lane.replace(lane),
            carry: std::mem::replace(&mut self.carry, carry),
            stream: self.stream.take(),
            timed: std::mem::take(&mut self.timed),
        })
    }

    /// As before the capture, which was no run.
    pub(super) fn leave_capture(&mut self, before: Uncaptured) {
        let Uncaptured { lane, carry, stream, timed } = before;
        (self.lane, self.carry, self.stream, self.timed) = (lane, carry, stream, timed);
        self.running = false;
        self.stop_clock();
    }

    /// What its captured run has said beside work and messages, which a replay would not say.
    pub(super) fn said_beside(&self) -> Option<&'static str> {
        self.beside
    }
}

/// What an operator has beside a capture.
pub(super) struct Uncaptured {
    lane: Option<Arc<Lane>>,
    carry: Arc<Carry>,
    stream: Option<Stream>,
    timed: bool,
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
