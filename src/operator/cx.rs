//! [`Cx`]: an operator's context besides its ports.

use std::{
    any::Any,
    borrow::Cow,
    fmt, mem,
    sync::Arc,
    task::{Context, Waker},
};

use futures::future::BoxFuture;
use tokio::sync::mpsc;

use super::{
    control::Handle,
    observed_runs::TimedRuns,
    operator_streams::{OperatorStreams, OwnStreams},
    operator_task::{Method, OperatorTask},
    ports::{AllPorts, Ports},
    run_context::RunContext,
    run_loop::{
        EndOfRun, RunLoop,
        next_run::{Runnable, next_run},
    },
    settings::{FlowContext, OperatorSettings, OperatorStats},
};
use crate::{
    CompletionMode,
    condition::{self, Gate, Need, PortId, Readiness, When},
    device::Device,
    error::{Error, ErrorKind, Result, caught_call},
    hub::{Metadata, Reply, journey::PathSource},
    memory::{Account, Allocator, Buffer, HostAccess, Plain, Reservation},
    stream::{DeviceTime, Stream, Ticket, capture::Capture},
    sync::discard,
    tracepoint::TracedRuns,
};

/// An operator's context: its name, its device and stream, and the wait for its next run.
#[repr(C)]
pub struct Cx {
    work: WorkContext,
    pub(super) run_loop: RunLoop,
    device: Device,
    flow: Arc<FlowContext>,
    number: usize,
    begins_paths: bool,
    memory: RunMemory,
    stream_source: OwnStreams,
    /// The ports named in its conditions.
    named: Arc<[(PortId, Option<Need>)]>,
    workers: Workers,
    /// A description of its last call that a replay would not repeat, since it is neither device work nor a message.
    unreplayable: Option<&'static str>,
}

/// The streams and the run context of an operator. A capture has its own.
pub(super) struct WorkContext {
    /// `None` on the host. The streams are returned when this is dropped, after the operator's `stop`.
    streams: Option<Arc<OperatorStreams>>,
    /// The stream for the operator's work, once it has used one: its own, or that of the current run.
    stream: Option<Stream>,
    /// The tracepoints of its runs, if they are traced.
    traced: Option<Arc<TracedRuns>>,
    /// A run begins with a call of [`prepare`](Self::prepare).
    prepares: bool,
    /// Nothing is prepared besides the tracepoint.
    only_traced: bool,
    /// Whether the current run is timed on the device, with or without a journey.
    is_timed: bool,
    /// A run ends with a call of [`finish`](Self::finish).
    finishes: bool,
    context: Arc<RunContext>,
}

impl WorkContext {
    fn new(streams: Option<Arc<OperatorStreams>>, context: RunContext) -> Self {
        let samples = context.observed().is_some_and(|observed| observed.samples);
        let traced = context.observed().and_then(|observed| observed.traced.clone());
        let (is_traced, more) = (traced.is_some(), streams.is_some() || samples);
        Self {
            streams,
            stream: None,
            traced,
            prepares: is_traced || more,
            only_traced: is_traced && !more,
            is_timed: false,
            finishes: is_traced,
            context: Arc::new(context),
        }
    }

    #[inline(never)]
    fn prepare(&mut self) {
        match &self.traced {
            Some(traced) if self.only_traced => traced.begin(),
            _ => self.prepare_more(),
        }
    }

    #[inline(never)]
    fn prepare_more(&mut self) {
        if let Some(traced) = &self.traced {
            traced.begin();
        }
        if self.streams.is_some() {
            self.prepare_streams();
        }
        if let Some(observed) = self.context.observed().filter(|observed| observed.samples)
            && let Some(number) = observed.source.as_ref().and_then(PathSource::sample)
        {
            self.context.begin_sampled(number);
        }
    }

    #[inline(never)]
    fn prepare_streams(&mut self) {
        if self.streams.as_ref().is_some_and(|streams| streams.begin()) {
            self.stream = None;
        }
        if let Some(work) = self.context.observed().and_then(|observed| observed.work.as_ref()) {
            self.is_timed = work.is_due();
            self.finishes = self.is_timed || self.traced.is_some();
            if self.is_timed {
                self.begin_timed(work);
            }
        }
    }

    /// Times the run that begins, if it is to be timed and the operator has a stream of its own.
    #[inline(never)]
    fn begin_timed(&self, work: &TimedRuns) {
        if let Some(stream) = work.stream() {
            work.begin(stream, None);
        }
    }

    /// The operator has its own stream since a moment ago, in a run.
    #[cold]
    fn has_stream(&self) {
        if let Some(work) = self.context.observed().and_then(|observed| observed.work.as_ref()) {
            if self.is_timed {
                self.begin_timed(work);
            }
            self.context.time_work();
        }
    }

    #[inline(never)]
    fn finish(&self) {
        if self.is_timed {
            self.finish_timed();
        }
        if let Some(traced) = &self.traced {
            traced.end();
        }
    }

    #[inline(never)]
    fn finish_timed(&self) {
        if let Some(stream) = self.streams.as_ref().and_then(|streams| streams.own()) {
            stream.end_run();
        }
    }
}

/// The source of an operator's memory, the memory reserved for the current run, and the account of its use.
struct RunMemory {
    allocator: Option<Allocator>,
    reservations: Vec<Arc<Reservation>>,
    account: Arc<Account>,
}

/// What a task besides the operator's own owned when it ended.
pub(super) type LeftByTask = Box<dyn Any + Send>;

/// The tasks of an operator besides its own one.
#[derive(Default)]
struct Workers {
    /// A channel through which each of these tasks returns what it owns when it ends.
    returned: Option<(mpsc::UnboundedSender<LeftByTask>, mpsc::UnboundedReceiver<LeftByTask>)>,
    streams: Vec<Arc<OperatorStreams>>,
}

impl Cx {
    /// True if the flow's tasks stay on one thread.
    pub(crate) fn is_local(&self) -> bool {
        self.flow.is_local
    }

    /// How waits for work on the flow's streams are notified.
    pub(crate) fn completion_mode(&self) -> CompletionMode {
        self.flow.streams.mode
    }

    pub(crate) fn new(setting: OperatorSettings, task: Arc<OperatorTask>, flow: Arc<FlowContext>) -> Self {
        let OperatorSettings { name, number, begins_paths, device, streams, allocator, conditions, merge, may_block } =
            setting;
        let own_streams = OperatorStreams::new(&name, &device, &streams, flow.streams.mode);
        let mut context = RunContext::new(name.clone(), merge, task.clone());
        context.observe(
            flow.control
                .watched()
                .and_then(|watched| watched.of_operator(number, task.is_worker(), begins_paths, own_streams.as_ref())),
        );
        let reservations = condition::reservations(&conditions);
        let flow_number = Arc::as_ptr(&flow.control).addr();
        reservations.iter().for_each(|reservation| reservation.set_flow(flow_number));
        Self {
            work: WorkContext::new(own_streams, context),
            number,
            begins_paths,
            named: condition::named_ports(&conditions).into(),
            memory: RunMemory { allocator, reservations, account: Arc::new(Account::new(flow_number)) },
            run_loop: RunLoop::new(&name, &task, conditions, may_block),
            device,
            stream_source: streams,
            workers: Workers::default(),
            unreplayable: None,
            flow,
        }
    }

    /// The name of the operator in the flow.
    pub fn name(&self) -> &str {
        &self.run_loop.name
    }

    /// The device that the operator was placed on; the host by default.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The operator's own stream: taken from its pool at the first use, and the same from then on. The data that it
    /// uses is ordered onto it, and the messages that it sends carry that order along, without a call. Messages without
    /// envelopes are ordered onto it when they are taken.
    ///
    /// The operator has no own stream if it was [added without one](crate::flow::Added::without_own_stream), or if its
    /// pool was exhausted at the first use. Then this is the stream that the run's first message came with, joined to
    /// those of the run's other messages. If no message came with a stream, this is the device's default stream, which
    /// sent messages do not carry.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for an operator on the host; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn stream(&mut self) -> Result<&Stream> {
        let stream = match self.work.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = self.own_streams()?.stream()?;
                if self.run_loop.is_running() {
                    self.work.has_stream();
                }
                stream
            }
        };
        Ok(self.work.stream.insert(stream))
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
        self.own_streams()?.named(name)
    }

    fn own_streams(&self) -> Result<&OperatorStreams> {
        self.work.streams.as_deref().ok_or_else(|| {
            let name = self.name();
            let text = format!(
                "operator `{name}` is on the host, which has no streams: put it on a device with `.on(&device)`"
            );
            Error::new(ErrorKind::Usage, Device::instead_of_host(&text))
        })
    }

    /// Allocates memory for `len` elements, for work on the operator's own stream; the contents are undefined. The
    /// memory comes from the first of these sources that has enough:
    ///
    /// 1. memory that a [`memory`](crate::condition::memory) condition has reserved for this run, as far as it is not
    ///    allocated yet: first from the operator's own [allocator](crate::flow::Added::allocator), then from others, in
    ///    the order of the conditions;
    /// 2. the operator's own allocator or, if it has none, the one that its first `memory` condition names: the rest of
    ///    its reservation for this run, and beyond that memory that is not reserved;
    /// 3. for an operator with neither: the device's own memory or, on the host, host memory.
    ///
    /// The memory can be sent on, as an envelope, and returns to its allocator when its last user drops it. The report
    /// gives the operator's peak use.
    ///
    /// # Errors
    /// Those of [`Allocator::alloc`] and [`stream`](Self::stream).
    pub fn alloc<T: Plain>(&mut self, len: usize) -> Result<Buffer<T>> {
        let own = self.memory.allocator.clone();
        let is_own = |reserved: &&Arc<Reservation>| own.as_ref().is_some_and(|own| reserved.allocator() == own);
        let of_own = self.memory.reservations.iter().find(is_own);
        let enough = of_own.into_iter().chain(&self.memory.reservations).find(|reserved| reserved.has::<T>(len));
        let first = if own.is_some() { of_own } else { self.memory.reservations.first() };
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
        Ok(made?.charged_to(&self.memory.account))
    }

    /// Makes this run the operator's last one: the operator ends after the run, like a source that has no more data.
    pub fn finish(&mut self) {
        self.run_loop.finish();
        self.unreplayable = Some("it calls `Cx::finish`");
    }

    /// Makes the operator's next run wait also for `available`, the data of a buffer that no message carries, besides
    /// all its other conditions. The operator is woken when the data is available, or when the device is lost; in that
    /// case its use of the buffer fails with the error.
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
    ///         ports.first.send(self.results.as_slice()?[0]).await?;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    pub fn run_after(&mut self, available: HostAccess) {
        self.run_loop.run_after(available);
        self.unreplayable = Some("it calls `Cx::run_after`");
    }

    /// A waker that makes the operator poll its conditions and its [`may_run`](super::Operator::may_run) again, for
    /// code that changes what these depend on. The waker does not keep the flow running: a flow in which no operator
    /// can run ends.
    pub fn waker(&self) -> Waker {
        Waker::from(self.run_loop.task.clone())
    }

    /// A handle to the operator's flow, to query its status or to stop it.
    pub fn flow(&self) -> Handle {
        Handle(self.flow.control.clone())
    }

    /// The gate called `name`, created by [`Flow::gate`](crate::Flow::gate).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the flow has no such gate; the message lists its gates.
    pub fn gate(&self, name: &str) -> Result<Gate> {
        self.flow.gates.find(name)
    }

    /// The named values that came with the messages taken so far in this run, merged; the messages that the operator
    /// sends carry them along.
    ///
    /// Outside of a run, in an operator that awaits its ports in a loop of its own ([`run`](super::Operator::run)),
    /// these are the values of the message that it took last.
    pub fn metadata(&self) -> Metadata {
        self.work.context.metadata()
    }

    /// Adds a named value to the messages that are sent from now on in this run. It replaces a value of the same name.
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
    ///         // Anywhere downstream: cx.metadata().get::<u64>("frame")
    ///         cx.insert_metadata("frame", self.0);
    ///         ports.frames.send(vec![0; 64]).await?;
    ///         Ok(())
    ///     }
    /// }
    /// ```
    pub fn insert_metadata<T: Send + Sync + 'static>(&mut self, name: impl Into<Cow<'static, str>>, value: T) {
        self.unreplayable = Some("it calls `Cx::insert_metadata`");
        let (name, value) = (name.into(), Metadata::value(value));
        // The old value is dropped here, where no lock is held.
        drop(self.work.context.change(|metadata| metadata.replace(name, value)));
    }

    /// Removes a named value from the messages that are sent from now on in this run. True if there was one.
    pub fn remove_metadata(&mut self, name: &str) -> bool {
        self.unreplayable = Some("it calls `Cx::remove_metadata`");
        self.work.context.change(|metadata| metadata.take(name)).is_some()
    }

    /// The messages that are sent from now on in this run carry this metadata, and no other.
    pub(crate) fn replace_metadata(&mut self, metadata: Metadata) {
        self.unreplayable = Some("it replaces the metadata");
        drop(self.work.context.change(|own| std::mem::replace(own, metadata)));
    }

    /// Takes the replies of the messages that this run has taken: one entry per message, in the order of taking, empty
    /// for a message for which no caller waits. It is for an operator that takes several messages in a run and sends
    /// several: [`Output::send_for`](super::Output::send_for) sends a message as the response to one of them. No other
    /// message that the run sends answers a reply taken here.
    ///
    /// The call is not needed where one message is made from one other: that carries the callers along automatically.
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
    /// /// Marks the longest of all queued words.
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
        self.unreplayable = Some("it calls `Cx::take_replies`");
        let replies = self.work.context.take_replies();
        replies.iter().for_each(Reply::taken_over);
        replies
    }

    /// Waits until all conditions are ready, claims what they promise, and begins a run. False if the operator can
    /// never run again. For operators that override [`run`](crate::Operator::run).
    ///
    /// # Cancel safety
    /// Nothing is taken from a port before the future resolves; dropping it changes nothing. While the operator waits
    /// only for this, and not also for a timer or a channel (in a `select!`, say), it counts as waiting for other
    /// operators: a flow in which every operator waits like that ends.
    pub async fn ready<P: Ports>(&mut self, ports: &mut P) -> bool {
        // If this fails, the next run gets the error.
        let _ = self.run_loop.commit(ports);
        self.run_loop.is_one_of_several_waits();
        self.until_ready(ports, |_, _| true).await
    }

    /// Like [`ready`](Self::ready), but also calls the operator's own `may_run`.
    #[inline]
    pub(super) async fn until_ready<P: Ports>(&mut self, ports: &mut P, may_run: impl FnMut(&P, &Cx) -> bool) -> bool {
        self.work.context.release_unneeded();
        if self.run_loop.linked {
            ports.visit(&mut |_, port| port.linked().into_iter().for_each(|port| port.release()));
        }
        next_run(OperatorRuns { cx: self, ports, may_run }).await
    }

    #[inline]
    fn begin_run(&mut self) {
        if self.work.prepares {
            self.work.prepare();
        }
        self.work.context.begin();
        self.run_loop.begin();
    }

    /// Begins a run of a worker or in a section: its messages were claimed elsewhere and are already at its ports.
    pub(super) fn begin_claimed(&mut self, ports: &mut dyn AllPorts) {
        let _ = ports.claim_all();
        self.begin_run();
    }

    /// Ends the current run, if there is one.
    #[inline]
    fn end_run(&mut self) {
        if self.run_loop.end() {
            self.work.context.end();
            if self.work.finishes {
                self.work.finish();
            }
        }
    }

    /// Ends a run after which the operator does not wait for the next one.
    pub(super) fn finish_run(&mut self) {
        self.end_run();
        self.run_loop.stop_clock();
    }

    /// Ends a run before its device work and `after`, which belong to it.
    pub(super) fn end_of_run(&mut self) -> EndOfRun {
        self.finish_run();
        self.work.context.extend_run();
        let last = self.work.streams.as_ref().map(|streams| streams.run_ends()).unwrap_or_default();
        EndOfRun { task: self.run_loop.task.clone(), last }
    }

    /// Called by the trait's default methods, to record that the operator does not override this one.
    pub(super) fn uses_default(&self, method: Method) {
        self.run_loop.task.set_default(method);
    }

    /// The device time of the operator's runs, if it is measured.
    fn device_time(&self) -> Option<DeviceTime> {
        if !self.flow.streams.timed || self.device.is_host() {
            return None;
        }
        let work = self.work.context.observed()?.work.as_ref()?;
        work.settle();
        Some(work.times().sums())
    }

    pub(crate) fn operator_task(&self) -> &Arc<OperatorTask> {
        &self.run_loop.task
    }

    pub(crate) fn context(&self) -> &Arc<RunContext> {
        &self.work.context
    }

    /// `None` on the host.
    pub(super) fn streams(&self) -> Option<&Arc<OperatorStreams>> {
        self.work.streams.as_ref()
    }

    /// The ports named in its conditions.
    pub(super) fn named(&self) -> &Arc<[(PortId, Option<Need>)]> {
        &self.named
    }

    /// The ticket of the last work on each stream that the operator has used.
    pub(crate) fn last(&self) -> Vec<Ticket> {
        self.work.streams.iter().chain(&self.workers.streams).flat_map(|streams| streams.last()).collect()
    }

    /// Creates the context of a worker, with streams and metadata of its own.
    pub(super) fn worker(&mut self, number: usize) -> Self {
        let setting = OperatorSettings {
            name: format!("{} #{}", self.name(), number + 1).into(),
            number: self.number,
            begins_paths: self.begins_paths,
            device: self.device.clone(),
            streams: self.stream_source.clone(),
            allocator: self.memory.allocator.clone(),
            conditions: Vec::new(),
            merge: self.work.context.policy(),
            may_block: false,
        };
        let mut worker = Self::new(setting, OperatorTask::of_worker(&self.run_loop.task), self.flow.clone());
        worker.memory.account = self.memory.account.clone();
        self.workers.streams.extend(worker.work.streams.clone());
        worker
    }

    /// A sender for another task of the operator, which returns what it owns and drops the sender at its end.
    pub(super) fn helper(&mut self) -> mpsc::UnboundedSender<LeftByTask> {
        self.workers.returned.get_or_insert_with(mpsc::unbounded_channel).0.clone()
    }

    /// Waits until the other tasks of the operator have ended, and drops what they owned. Called after a failure is
    /// recorded: the callers of requests that are dropped here receive it.
    pub(super) async fn settled(&mut self) {
        if let Some((own, mut returned)) = self.workers.returned.take() {
            drop(own);
            while let Some(returned) = returned.recv().await {
                discard(returned);
            }
        }
    }

    /// Spawns a task called `name` on the executor of the flow's other tasks.
    pub(super) fn spawn(&self, name: &str, task: BoxFuture<'static, ()>) {
        (self.flow.spawn)(name, task);
    }

    /// Ends the last run, also after an error, and stops its clock.
    pub(crate) fn close(&mut self) {
        // First, since the calls below might be user code that panics.
        self.memory.reservations.iter().for_each(|reservation| reservation.release());
        self.finish_run();
        self.work.context.release_unneeded();
        self.run_loop.close();
    }

    /// Called after the operator's own `stop`, which might have used the context: records the operator's statistics,
    /// and returns its conditions for the next run of the flow. A condition that panics is returned as well.
    pub(super) fn stopped(mut self, stats: &mut OperatorStats, conditions: &mut Vec<When>) -> Result<()> {
        // By now the operator's last work is done, or lost.
        stats.device = self.device_time();
        stats.memory_peak = self.memory.account.peak();
        // These include the user's own conditions.
        let rested = caught_call(&mut || self.run_loop.release_conditions());
        let mut cx = Some(self);
        let returned = caught_call(&mut || {
            *conditions = cx.take().map(|cx| cx.run_loop.into_conditions()).unwrap_or_default();
        });
        rested.and(returned)
    }

    /// Makes the operator work on streams of `capture`, with metadata of its own. Returns the previous context.
    pub(super) fn enter_capture(&mut self, capture: &Arc<Capture>) -> Result<WorkContext> {
        let streams = self.own_streams()?.captured(capture);
        self.unreplayable = None;
        let (name, policy) = (self.run_loop.name.clone(), self.work.context.policy());
        let context = RunContext::new(name, policy, self.run_loop.task.clone());
        Ok(mem::replace(&mut self.work, WorkContext::new(Some(streams), context)))
    }

    /// Restores the context from before the capture, which was not a run.
    pub(super) fn leave_capture(&mut self, before: WorkContext) {
        self.work = before;
        self.run_loop.discard_run();
        self.run_loop.stop_clock();
    }

    /// A description of what its captured run has done besides device work and messages, which a replay would not
    /// repeat.
    pub(super) fn unreplayable(&self) -> Option<&'static str> {
        self.unreplayable
    }
}

/// An operator that waits for its next run.
struct OperatorRuns<'a, P, F> {
    cx: &'a mut Cx,
    ports: &'a mut P,
    may_run: F,
}

impl<P: Ports, F: FnMut(&P, &Cx) -> bool> OperatorRuns<'_, P, F> {
    #[cold]
    fn ask_last(&mut self, task: &mut Context<'_>) -> Readiness {
        let (asked, lacks, asks) = self.cx.run_loop.poll_without_waker(self.ports, task);
        let allowed = asks.then(|| (self.may_run)(self.ports, self.cx));
        self.cx.run_loop.finish_last_poll(asked, lacks, allowed)
    }
}

// Always inlined: as calls, they cost a hop between operators 2.5 % more instructions.
#[allow(clippy::inline_always, reason = "measured: each is called in one place for each type of operator")]
impl<P: Ports, F: FnMut(&P, &Cx) -> bool> Runnable for OperatorRuns<'_, P, F> {
    #[inline(always)]
    fn parts(&mut self) -> (&mut RunLoop, Option<&mut dyn AllPorts>) {
        (&mut self.cx.run_loop, Some(self.ports))
    }

    #[inline(always)]
    fn poll_ready(&mut self, task: &mut Context<'_>) -> Readiness {
        let asked = self.ports.poll_ready(task);
        if !self.cx.run_loop.has_conditions() {
            return asked;
        }
        asked | self.cx.run_loop.poll_conditions(self.ports, self.cx.flow.control.is_stopping(), task)
    }

    #[inline(always)]
    fn poll_last(&mut self, task: &mut Context<'_>) -> Readiness {
        if self.cx.run_loop.has_last_poll() { self.ask_last(task) } else { Readiness::READY }
    }

    #[inline(always)]
    fn claim(&mut self) -> bool {
        self.cx.run_loop.claim(self.ports)
    }

    #[inline(always)]
    fn begin(&mut self) {
        self.cx.begin_run();
    }

    #[inline(always)]
    fn end(&mut self) {
        self.cx.end_run();
    }

    fn last_work(&self) -> Vec<Ticket> {
        self.cx.last()
    }
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx")
            .field("name", &self.name())
            .field("device", &self.device)
            .field("runs", &self.run_loop.runs())
            .finish_non_exhaustive()
    }
}
