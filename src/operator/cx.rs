//! [`Cx`]: an operator's context besides its ports.

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
    control::Handle,
    erased::{FlowContext, OperatorSettings, OperatorStats, StreamSettings, caught_call},
    node::{Method, OperatorTask},
    operator_streams::{OperatorStreams, OwnStreams},
    run_context::RunContext,
    spin_detector::SpinDetector,
};
use crate::{
    condition::{self, Awaited, Conditions, Gate, Need, PortId, When},
    device::{Device, ticks::Ticks},
    error::{Error, ErrorKind, Result},
    hub::{Metadata, Reply},
    memory::{Account, Allocator, Buffer, HostAccess, Plain, Reservation},
    stream::{DeviceTime, Stream, Ticket, capture::Capture},
};

/// An operator's context: its name, its device and stream, and the wait for its next run.
pub struct Cx {
    name: Arc<str>,
    device: Device,
    /// `None` on the host. Returns its streams when it is dropped, after the operator's `stop`.
    pub(crate) streams: Option<Arc<OperatorStreams>>,
    /// The stream for the operator's work, after its first use: its own, or that of the current run.
    stream: Option<Stream>,
    /// Its runs are timed on the device, if they have a stream of their own.
    timed: bool,
    node: Arc<OperatorTask>,
    /// The node's own waker, which the conditions of its runs keep. `None` while they are polled.
    waker: Option<Waker>,
    /// Its wait for the next run may be one of several concurrent waits.
    among_others: bool,
    finished: bool,
    /// A description of its last call that a replay would not repeat: one that is neither work nor a message.
    beside: Option<&'static str>,
    /// The buffers that the next run waits for.
    awaited: Awaited,
    /// The conditions of every run besides its ports.
    conditions: Option<Box<Conditions>>,
    /// Its ports describe more of what they wait for than their hubs do.
    pub(super) ports_notify: bool,
    /// Some of its ports are linked to hubs of chunks.
    pub(super) linked: bool,
    /// Its status in the node lists what it waits for besides its hubs.
    has_lacks: bool,
    context: Arc<RunContext>,
    flow: Arc<FlowContext>,
    stream_source: OwnStreams,
    /// The source of its memory, the memory reserved for the current run, and the account of its use.
    allocator: Option<Allocator>,
    reservations: Vec<Arc<Reservation>>,
    account: Arc<Account>,
    /// The ports named in its conditions.
    named: Arc<[(PortId, Option<Need>)]>,
    /// Work of its own continues elsewhere: it is not idle, whatever it waits for.
    holds_token: bool,
    /// A channel of which each task besides its own holds a sender, to detect their end.
    helpers: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
    /// The streams of these tasks.
    worker_streams: Vec<Arc<OperatorStreams>>,
    /// Whether the operator's `may_run` and `after` are called: true until they are known not to be overridden.
    asks_may_run: bool,
    calls_after: bool,
    /// The number of polls until it yields to other tasks.
    asks_left: u32,
    spin_detector: SpinDetector,
    blocking: Blocking,
    /// The error that it failed with between two runs.
    failure: Option<Error>,
    pub(crate) runs: u64,
    /// In ticks.
    pub(crate) busy: u64,
    running: bool,
    /// The start of the current run, or of the first run since it last waited.
    busy_since: Option<Ticks>,
}

impl Cx {
    pub(crate) fn new(setting: OperatorSettings, node: Arc<OperatorTask>, flow: Arc<FlowContext>) -> Self {
        let OperatorSettings { name, device, streams, allocator, conditions, merge, may_block } = setting;
        let StreamSettings { mode, timed } = flow.how;
        let reservations = condition::reservations(&conditions);
        let number = Arc::as_ptr(&flow.control).addr();
        reservations.iter().for_each(|reservation| reservation.enter(number));
        Self {
            streams: OperatorStreams::new(&name, &device, &streams, mode),
            context: Arc::new(RunContext::new(name.clone(), merge, node.clone())),
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
            stream_source: streams,
            holds_token: false,
            helpers: None,
            worker_streams: Vec::new(),
            ports_notify: false,
            linked: false,
            has_lacks: false,
            flow,
            asks_may_run: true,
            calls_after: true,
            asks_left: runs::LONGEST_STREAK,
            spin_detector: SpinDetector::default(),
            blocking: Blocking::new(may_block),
            failure: None,
            runs: 0,
            busy: 0,
            running: false,
            busy_since: None,
        }
    }

    /// The name of the operator in the flow.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device that the operator was placed on; the host by default.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The operator's own stream: taken from its pool at the first use, and the same from then on. The data that it
    /// uses is ordered onto it, and what it sends carries that order along, without a call. Messages without envelopes
    /// are ordered onto it when they are taken.
    ///
    /// The operator has no own stream if it was [added without one](crate::flow::Added::without_own_stream), or if its
    /// pool was exhausted at the first use. Then this is the stream that the first message of this run came with, which
    /// all other streams of the run's messages are joined to. If none came with a stream, it is the device's default
    /// stream, which is not sent on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream(&mut self) -> Result<&Stream> {
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = self.streams()?.stream()?;
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

    /// An additional stream of the operator, from its pool: the same one for the same name, and different from
    /// [`stream`](Self::stream). Outputs carry it only after [`Output::set_stream`](super::Output::set_stream), and
    /// messages without envelopes are not ordered onto it automatically: [`Stream::join`] them.
    ///
    /// It is returned together with the operator's own stream, when the flow ends.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host or without streams of its own, or if its pool is
    /// exhausted; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream_named(&mut self, name: &str) -> Result<Stream> {
        self.streams()?.named(name)
    }

    fn streams(&self) -> Result<&OperatorStreams> {
        self.streams.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!("`{}` is on the host, which has no streams: put it on a device with `.on(&device)`", self.name),
            )
        })
    }

    /// Allocates memory for `len` elements, for work on the operator's own stream; the contents are undefined. It comes
    /// from the first of these that has it:
    ///
    /// 1. what a [`memory`](crate::condition::memory) condition has reserved for this run and was not allocated yet, if
    ///    it is enough: first of the operator's own [allocator](crate::flow::Added::allocator), then of others, in the
    ///    order of the conditions;
    /// 2. the operator's own allocator or, if it has none, the one that its first condition names: the rest of its
    ///    reservation for this run, and beyond that memory that is not reserved;
    /// 3. for an operator with neither: the device's own memory or, on the host, host memory.
    ///
    /// It may be sent on, as an envelope, and returns to its allocator when its last user drops it. The report gives
    /// the peak of the operator's use.
    ///
    /// # Errors
    /// As for [`Allocator::alloc`] and [`stream`](Self::stream).
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
        Ok(made?.charged_to(&self.account))
    }

    pub(super) fn memory_peak(&self) -> u64 {
        self.account.peak()
    }

    /// Makes this run the operator's last one: it ends after the run, as a source does that has no more data.
    pub fn finish(&mut self) {
        self.finished = true;
        self.beside = Some("it calls `Cx::finish`");
    }

    /// Makes the operator's next run wait for this too, besides all its other conditions: for the data of a buffer that
    /// no message carries. The operator is woken when the data is available, or when the device is lost; then its use
    /// of the buffer fails with the error.
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

    /// Wakes the operator, to poll its conditions and its [`may_run`](super::Operator::may_run) again. For code that
    /// changes what these depend on. The waker does not keep the flow running: a flow in which no operator can run
    /// ends.
    pub fn waker(&self) -> Waker {
        Waker::from(self.node.clone())
    }

    /// A handle to the operator's flow, to query its status or to stop it.
    pub fn flow(&self) -> Handle {
        Handle(self.flow.control.clone())
    }

    /// The gate of that name, made by [`Flow::gate`](crate::Flow::gate).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the flow has no gate of that name; the message lists its gates.
    pub fn gate(&self, name: &str) -> Result<Gate> {
        self.flow.gates.find(name)
    }

    /// The named values that came with the messages of this run, merged so far; the messages that it sends carry them
    /// along.
    ///
    /// In an operator that awaits its ports in a loop of its own ([`run`](super::Operator::run)), outside of a run,
    /// these are the values of the message that it took last.
    pub fn metadata(&self) -> Metadata {
        self.context.metadata()
    }

    /// Adds a named value to what is sent from now on in this run. It replaces a value that came in under that name.
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
        // The old value is dropped here, where no lock is held.
        drop(self.context.change(|metadata| metadata.replace(name, value)));
    }

    /// Removes a named value from what is sent from now on in this run. True if there was one.
    pub fn remove_metadata(&mut self, name: &str) -> bool {
        self.beside = Some("it takes metadata away from messages");
        self.context.change(|metadata| metadata.take(name)).is_some()
    }

    /// Takes the replies of the messages that this run has taken, to the callers that wait for a response: one entry
    /// per message, in the order of taking, empty for a message without a caller. It is for an operator that takes
    /// several messages in a run and sends several: with [`Output::send_for`](super::Output::send_for) it assigns each
    /// of its messages to the one that it responds to. A reply that is taken here is not answered by anything else that
    /// the run sends.
    ///
    /// The call is not needed where one message is made of one other: that carries the callers along automatically.
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
        let replies = self.context.take_replies();
        replies.iter().for_each(Reply::taken_over);
        replies
    }

    /// Called by the trait's default methods: the operator does not override this one.
    pub(super) fn not_written(&self, method: Method) {
        self.node.set_default(method);
    }

    /// The device time of its runs, if that is measured.
    pub(super) fn device_time(&self) -> Option<DeviceTime> {
        if !self.timed || self.device.is_host() {
            return None;
        }
        Some(self.timed_stream().and_then(Stream::device_time).unwrap_or_default())
    }

    pub(crate) fn node(&self) -> &Arc<OperatorTask> {
        &self.node
    }

    /// The stream that its runs are timed on: only its own one.
    #[inline]
    fn timed_stream(&self) -> Option<&Stream> {
        if self.timed { self.streams.as_ref()?.own() } else { None }
    }

    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }

    /// The ticket of the last work on each stream that it has used.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.streams.iter().chain(&self.worker_streams).flat_map(|streams| streams.last()).collect()
    }

    /// The context of one of several workers, with streams and metadata of its own.
    pub(super) fn worker(&mut self, number: usize) -> Self {
        let setting = OperatorSettings {
            name: format!("{} #{}", self.name, number + 1).into(),
            device: self.device.clone(),
            streams: self.stream_source.clone(),
            allocator: self.allocator.clone(),
            conditions: Vec::new(),
            merge: self.context.policy(),
            may_block: false,
        };
        let mut worker = Self::new(setting, OperatorTask::of_worker(&self.node), self.flow.clone());
        worker.account = self.account.clone();
        self.worker_streams.extend(worker.streams.clone());
        worker
    }

    pub(super) fn holds_token(&mut self, holds: bool) {
        self.holds_token = holds;
    }

    /// A sender for a task besides its own, which drops it at its end.
    pub(super) fn helper(&mut self) -> mpsc::Sender<()> {
        self.helpers.get_or_insert_with(|| mpsc::channel(1)).0.clone()
    }

    /// Resolves once the tasks besides its own have ended.
    pub(super) async fn settled(&mut self) {
        if let Some((own, mut helpers)) = self.helpers.take() {
            drop(own);
            let _ = helpers.recv().await;
        }
    }

    /// Spawns a task of this name on the executor of the flow's other tasks.
    pub(super) fn spawn(&self, name: &str, task: BoxFuture<'static, ()>) {
        (self.flow.spawn)(name, task);
    }

    /// Waits for the buffers of [`run_after`](Self::run_after), where no ports are polled.
    pub(super) async fn until_awaited(&mut self) {
        if !self.awaited.is_empty() {
            poll_fn(|task| match condition::buffers(&mut self.awaited, task).is_ready() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
            .await;
        }
    }

    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    pub(super) fn named(&self) -> &Arc<[(PortId, Option<Need>)]> {
        &self.named
    }

    /// Ends the last run, also after an error, and stops its clock.
    pub(crate) fn close(&mut self) {
        // First, since what follows may be user code that panics.
        self.reservations.iter().for_each(|reservation| reservation.release());
        self.end_run();
        self.stop_clock();
        self.context.release_unneeded();
        self.finished = false;
        self.awaited.clear();
        if let Some(conditions) = &mut self.conditions {
            conditions.close();
        }
    }

    /// Called before the operator's own `start`.
    pub(super) fn start_conditions(&mut self) {
        self.conditions.iter_mut().for_each(|conditions| conditions.start());
    }

    /// Called after the operator's own `stop`, which may have used the context: records its statistics, and returns the
    /// conditions that it was given, for the next run of the flow. A condition that panics is returned as well.
    pub(super) fn stopped(mut self, tally: &mut OperatorStats, conditions: &mut Vec<When>) -> Result<()> {
        // The last work is done by now, or lost.
        tally.device = self.device_time();
        tally.memory_peak = self.memory_peak();
        // These include the user's own conditions.
        let rested = caught_call(&mut || self.conditions.iter_mut().for_each(|conditions| conditions.rest()));
        let mut cx = Some(self);
        let kept = caught_call(&mut || {
            let given = cx.take().and_then(|mut cx| cx.conditions.take());
            *conditions = given.map(|conditions| conditions.into_all()).unwrap_or_default();
        });
        rested.and(kept)
    }

    pub(crate) fn context(&self) -> &Arc<RunContext> {
        &self.context
    }

    /// From now on the operator works on streams of this capture, and the metadata of its messages is kept apart.
    /// Returns the previous state.
    pub(super) fn enter_capture(&mut self, capture: &Arc<Capture>) -> Result<Uncaptured> {
        let streams = self.streams()?.captured(capture);
        self.beside = None;
        let context = Arc::new(RunContext::new(self.name.clone(), self.context.policy(), self.node.clone()));
        Ok(Uncaptured {
            streams: self.streams.replace(streams),
            context: std::mem::replace(&mut self.context, context),
            stream: self.stream.take(),
            timed: std::mem::take(&mut self.timed),
        })
    }

    /// Restores the state from before the capture, which was not a run.
    pub(super) fn leave_capture(&mut self, before: Uncaptured) {
        let Uncaptured { streams, context, stream, timed } = before;
        (self.streams, self.context, self.stream, self.timed) = (streams, context, stream, timed);
        self.running = false;
        self.stop_clock();
    }

    /// What its captured run has done besides work and messages, which a replay would not repeat.
    pub(super) fn said_beside(&self) -> Option<&'static str> {
        self.beside
    }
}

/// The state that an operator has outside of a capture.
pub(super) struct Uncaptured {
    streams: Option<Arc<OperatorStreams>>,
    context: Arc<RunContext>,
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
