//! [`Harness`]: a test's view of the operator under test.
//!
//! The harness asks for the steps of a flow in two turns: what is around the operator, until it rests; then the operator,
//! for one run. So a run finds all messages that were sent before, and its own messages have arrived when it is returned.
//!
//! ```text
//!   ┌─> AROUND: sources, hubs, sinks ── quiet ──> a run is to be returned, or a wait for the test: return it
//!   │                                                      │ no
//!   ├──────── a run, or a part of it ──── OPERATOR <───────┘
//!   ├── woken <── it waits for an event <────┤ refused
//!   └── it waits for the test <──────────────┘
//! ```
//!
//! The operator might have sent something since its surroundings were quiet: in a run that went on, or in a loop of its
//! own. So they are asked once more before its wait is returned.

use std::{
    any::Any, collections::HashMap, fmt, future::poll_fn, ops::Deref, pin::pin, sync::Arc, task::Poll, time::Duration,
};

use super::{
    request::{RequestEnd, TestRequest},
    sink::{AnySink, MAX_KEPT, Received, SinkQueue},
    source::{AnySource, SourceQueue},
    watchdog::Watchdog,
};
use crate::{
    condition::{PortId, Status},
    error::{Error, ErrorKind, Result},
    flow::{Advance, Handle, OperatorStatus, Report, Rest, Running, Step, Steps},
    hub::{Envelope, Message, Metadata, Reply, parcel::Load},
    memory::{Buffer, Plain},
    operator::{InputHandle, OutputHandle, Ports, permit::TURN},
};

/// The number of the operator under test in its flow: it is added first.
const OPERATOR: usize = 0;

/// The maximum number of runs in one call since an input was fed: an operator that goes on by itself might not stop.
const MAX_RUNS: u64 = 10_000;

/// An operator under test. See the [module](super).
///
/// The handles of its ports are its fields. The operator runs only in the methods that are awaited, so between them
/// nothing changes; what a device still does for an earlier run goes on.
///
/// Dropping it aborts the flow around the operator, without its outcome: [`finish`](Self::finish) returns that.
pub struct Harness<P: Ports> {
    handles: P::Handles,
    run: TestRun,
    inputs: HashMap<PortId, Box<dyn Any + Send + Sync>>,
    outputs: HashMap<PortId, Box<dyn Any + Send + Sync>>,
}

/// What a harness has put around the operator.
#[derive(Default)]
pub(super) struct Surroundings {
    /// By port: a `Vec<Arc<SourceQueue<M>>>`.
    pub(super) inputs: HashMap<PortId, Box<dyn Any + Send + Sync>>,
    /// By port: an `Arc<SinkQueue<M>>`.
    pub(super) outputs: HashMap<PortId, Box<dyn Any + Send + Sync>>,
    pub(super) sources: Vec<Arc<dyn AnySource>>,
    pub(super) sinks: Vec<Arc<dyn AnySink>>,
    /// The number of operators, which is that of hubs.
    pub(super) count: usize,
}

/// What a call of [`Harness::step`] has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stepped {
    /// The operator has run, and the device work of that run is complete. The value is the number of the run, from 1.
    Ran(u64),
    /// It cannot run until the test acts. The value is what it waits for, in words.
    Waits(Vec<String>),
    /// It has ended, and will not run again.
    Ended,
}

impl Stepped {
    /// True for [`Waits`](Self::Waits).
    pub fn is_waiting(&self) -> bool {
        matches!(self, Self::Waits(_))
    }
}

/// The operator's steps, independent of its ports.
struct TestRun {
    name: Arc<str>,
    handle: Handle,
    /// `None` once the flow ends by itself.
    steps: Option<Steps>,
    ending: Option<Running>,
    outcome: Option<Result<Report>>,
    sources: Vec<Arc<dyn AnySource>>,
    sinks: Vec<Arc<dyn AnySink>>,
    /// The numbers of the operators and hubs around it.
    around: Vec<usize>,
    turn: Turn,
    /// A run that is to be returned, once its messages have arrived.
    ran: Option<u64>,
    ended: bool,
    /// The number of steps around it in this call.
    steps_around: u64,
    /// It waits for the test, and nothing has moved since it was found to.
    rests: bool,
    watchdog: Arc<Watchdog>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Around,
    Operator,
}

/// Counts the runs of one call since an input was fed.
#[derive(Default)]
struct RunCount {
    fed: u64,
    runs: u64,
}

/// Whether a call lets time pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    Passes,
    Stands,
}

impl<P: Ports> Harness<P> {
    pub(super) fn new(
        name: Arc<str>,
        handles: P::Handles,
        steps: Steps,
        around: Surroundings,
        timeout: Duration,
    ) -> Self {
        let Surroundings { inputs, outputs, sources, sinks, count } = around;
        let mut run = TestRun {
            name,
            handle: steps.handle(),
            steps: Some(steps),
            ending: None,
            outcome: None,
            sources,
            sinks,
            // The operator itself is the first.
            around: (0..=count * 2).filter(|number| *number != OPERATOR).collect(),
            turn: Turn::Around,
            ran: None,
            ended: false,
            steps_around: 0,
            rests: false,
            watchdog: Arc::new(Watchdog::new(timeout)),
        };
        run.ask(Turn::Around);
        Self { handles, run, inputs, outputs }
    }

    /// An input, to send to.
    pub fn input<M: Message>(&self, input: InputHandle<M>) -> TestInput<'_, M> {
        let queues = self.inputs.get(&input.id).and_then(|queues| queues.downcast_ref::<Vec<Arc<SourceQueue<M>>>>());
        TestInput { run: &self.run, port: input.id.name, queues, writer: 0, metadata: Metadata::default() }
    }

    /// An output, to receive from.
    pub fn output<M: Message>(&mut self, output: OutputHandle<M>) -> TestOutput<'_, M> {
        let queue = self.outputs.get(&output.id).and_then(|queue| queue.downcast_ref::<Arc<SinkQueue<M>>>());
        TestOutput { port: output.id.name, queue: queue.cloned(), run: &mut self.run }
    }

    /// Runs the operator once, as soon as it may run. All messages of the run can then be received. It waits for a device,
    /// for time and for other events, such as that a gate is opened, but not for what only the test can do: if that is
    /// missing, nothing has run, and the answer says what the operator waits for.
    ///
    /// A run that waits in its middle, for another message for example, is [`Waits`](Stepped::Waits), too. It goes on in
    /// the next call. An operator with a loop of its own that never calls [`Cx::ready`](crate::Cx::ready) has no runs to
    /// make: it goes on by itself during any call.
    ///
    /// A run that sends very many messages waits for room while 65,536 of them are kept for the test, and goes on when
    /// some were received.
    ///
    /// ```
    /// use wakeline::{operator::sink, test::{self, Stepped}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut print = test::operator(sink(async |_: String| Ok(()))).start()?;
    /// print.input(print.input).send("one".into())?;
    /// assert_eq!(print.step().await?, Stepped::Ran(1));
    /// let waits = ["a message in hub `test:input.output -> Sink.input`".to_string()];
    /// assert_eq!(print.step().await?, Stepped::Waits(waits.into()));
    /// print.input(print.input).close();
    /// assert_eq!(print.step().await?, Stepped::Ended);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The operator's failure; [`Stalled`](ErrorKind::Stalled) after the [timeout](super::HarnessBuilder::timeout).
    ///
    /// # Cancel safety
    /// A run that has begun goes on. The next call returns it if this one has not.
    pub async fn step(&mut self) -> Result<Stepped> {
        self.run.step(Time::Passes).await
    }

    /// Runs the operator as often as it may run now: until it waits for the test or for a time, or has ended. Returns
    /// which.
    ///
    /// An operator that waits for nothing, such as a source, does not stop: use [`step`](Self::step).
    ///
    /// # Errors
    /// Those of [`step`](Self::step); [`Stalled`](ErrorKind::Stalled) after 10,000 runs for which the test had sent nothing.
    ///
    /// # Cancel safety
    /// The runs so far are made.
    pub async fn settle(&mut self) -> Result<Stepped> {
        let mut count = RunCount::default();
        loop {
            match self.run.step(Time::Stands).await? {
                Stepped::Ran(_) => count.run(&self.run, "does not come to rest: make single runs, with `step`")?,
                other => return Ok(other),
            }
        }
    }

    /// The number of runs that have ended.
    pub fn runs(&self) -> u64 {
        self.run.status().runs
    }

    /// The operator's status: what it waited for when it was last asked to run.
    pub fn status(&self) -> OperatorStatus {
        self.run.status()
    }

    /// Ends the inputs, lets the operator process what was sent, and stops it. Its outputs can still be received from. The
    /// report also has the harness's own operators, which are called `test:` and the name of the port.
    ///
    /// # Errors
    /// The operator's failure, and that of its `stop`; [`Stalled`](ErrorKind::Stalled) if it does not end.
    ///
    /// # Cancel safety
    /// The inputs stay closed. Another call continues.
    pub async fn finish(&mut self) -> Result<Report> {
        self.run.finish().await
    }
}

/// The handles of the operator's ports.
impl<P: Ports> Deref for Harness<P> {
    type Target = P::Handles;

    fn deref(&self) -> &P::Handles {
        &self.handles
    }
}

impl<P: Ports> fmt::Debug for Harness<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness").field("operator", &self.run.name).finish_non_exhaustive()
    }
}

impl TestRun {
    fn ask(&mut self, turn: Turn) {
        self.turn = turn;
        if let Some(steps) = &mut self.steps {
            match turn {
                Turn::Around => steps.ask_only(&self.around),
                Turn::Operator => steps.ask_only(&[OPERATOR]),
            }
        }
    }

    /// Runs the operator once, if it may run without the test.
    async fn step(&mut self, time: Time) -> Result<Stepped> {
        let stepped = self.step_until(time, || false).await?;
        stepped.ok_or_else(|| Error::internal("a step of a test's harness has stopped"))
    }

    /// Like [`step`](Self::step), but returns `None` in the middle of a run once `stop` is true. The timeout limits all of
    /// it: a run that sends without end has many steps, none of which waits.
    async fn step_until(&mut self, time: Time, stop: impl Fn() -> bool) -> Result<Option<Stepped>> {
        self.steps_around = 0;
        let watchdog = self.watchdog.clone();
        match watchdog.watch(self.advance_until(time, stop)).await {
            Some(stepped) => stepped,
            None => Err(self.timed_out()),
        }
    }

    async fn advance_until(&mut self, time: Time, stop: impl Fn() -> bool) -> Result<Option<Stepped>> {
        self.rests = false;
        loop {
            if self.handle.failure().is_some() {
                self.outcome().await?;
            }
            let Some(steps) = &mut self.steps else { return Ok(Some(Stepped::Ended)) };
            match steps.advance().await {
                Advance::Over => {
                    self.ended = true;
                    self.outcome().await?;
                    return Ok(Some(self.ran.take().map_or(Stepped::Ended, Stepped::Ran)));
                }
                Advance::Step(step) => {
                    self.note(&step);
                    // All messages of a run that has ended arrive before it is returned.
                    if self.ran.is_none() && !self.ended && stop() {
                        return Ok(None);
                    }
                }
                Advance::Quiet if self.turn == Turn::Around => {
                    if self.ran.is_some() || self.ended {
                        self.ask(Turn::Around);
                        return Ok(Some(self.ran.take().map_or(Stepped::Ended, Stepped::Ran)));
                    }
                    if let Some(waits) = self.waits(time).filter(|_| self.rests) {
                        self.ask(Turn::Around);
                        return Ok(Some(Stepped::Waits(waits)));
                    }
                    self.ask(Turn::Operator);
                }
                Advance::Quiet => {
                    let Rest::Waits(was_idle) = steps.rest().await else {
                        self.ask(Turn::Around);
                        continue;
                    };
                    self.rests = self.waits(time).is_some();
                    if let Some(steps) = self.steps.as_mut().filter(|_| !self.rests) {
                        steps.wait_for_event(was_idle).await;
                    }
                    self.ask(Turn::Around);
                }
            }
        }
    }

    /// After a step of the operator, its surroundings may have something to do.
    fn note(&mut self, step: &Step) {
        self.rests = false;
        match step {
            Step::Ran { operator, run } if *operator == self.name => self.ran = Some(*run),
            Step::Began { operator, .. } if *operator == self.name => {}
            Step::Ended { operator } if *operator == self.name => self.ended = true,
            _ => {
                self.steps_around += 1;
                return;
            }
        }
        self.ask(Turn::Around);
    }

    /// What the operator waits for, if that does not come by itself.
    fn waits(&self, time: Time) -> Option<Vec<String>> {
        let task = self.handle.0.tasks.get(OPERATOR)?;
        let status = self.status();
        let for_time = time == Time::Stands && matches!(status.status, Status::WaitTime(_));
        (task.is_idle() || for_time).then_some(status.waits_for)
    }

    fn status(&self) -> OperatorStatus {
        let mut status = self.handle.0.status(OPERATOR);
        status.waits_for.retain(|lacks| lacks != TURN);
        status
    }

    /// The outcome of the flow, which ends by itself from now on.
    async fn outcome(&mut self) -> Result<Report> {
        if let Some(steps) = self.steps.take() {
            self.ending = Some(steps.run_on());
        }
        if let Some(ending) = &mut self.ending {
            let outcome = ending.await;
            (self.ending, self.outcome) = (None, Some(outcome));
        }
        self.outcome.clone().unwrap_or_else(|| Err(Error::internal("a test's flow has no outcome")))
    }

    async fn finish(&mut self) -> Result<Report> {
        self.sources.iter().for_each(|source| source.close());
        // Sources do not run again after `stop`, so what they have must be taken before.
        let mut count = RunCount::default();
        while !self.is_drained() && matches!(self.step(Time::Passes).await?, Stepped::Ran(_)) {
            if count.run(self, "has not taken all messages").is_err() {
                break;
            }
        }
        self.handle.stop();
        let (watchdog, handle, sinks) = (self.watchdog.clone(), self.handle.clone(), self.sinks.clone());
        let outcome = {
            let mut outcome = pin!(self.outcome());
            let ended = poll_fn(|task| {
                sinks.iter().for_each(|sink| sink.register(task.waker()));
                match outcome.as_mut().poll(task) {
                    Poll::Pending if is_full(&handle, &sinks) => Poll::Ready(None),
                    polled => polled.map(Some),
                }
            });
            watchdog.watch(ended).await.flatten()
        };
        outcome.unwrap_or_else(|| Err(self.timed_out()))
    }

    /// True if the operator has all that was sent.
    fn is_drained(&self) -> bool {
        let hubs = self.handle.0.hubs();
        let queued = hubs.all.iter().any(|hub| hub.to == OPERATOR && hub.state.queued() > 0);
        !queued && self.sources.iter().all(|source| source.has_ended())
    }

    fn what_it_does(&self) -> String {
        let status = self.status();
        match &status.waits_for[..] {
            [] if status.running => "is in a run".into(),
            [] => status.status.to_string(),
            waits => format!("waits for {}", waits.join(" and for ")),
        }
    }

    /// What the test can do about a wait that only it can end.
    fn what_to_do(&self) -> &'static str {
        // The hubs of the inputs begin at the harness's own operators.
        if self.status().waits_for.iter().any(|wait| wait.contains("`test:")) {
            "send to its inputs, `.input(..).send(..)`, or end them, `.input(..).close()`"
        } else {
            "the test has to act on that: for example, resume a gate through a handle that it keeps, or fill a hub of chunks"
        }
    }

    #[cold]
    fn timed_out(&self) -> Error {
        let (status, name) = (self.status(), &self.name);
        let what_to_do = match self.sinks.iter().find_map(|sink| sink.full()) {
            Some(port) => {
                let does = self.what_it_does();
                return Error::new(
                    ErrorKind::Stalled,
                    format!(
                        "operator `{name}` {does}; output `{port}` keeps {MAX_KEPT} messages, the maximum: receive them, \
                         `.output(..).drain()`"
                    ),
                );
            }
            None if status.running && self.steps_around > 0 => format!(
                "the run goes on, and {} messages were moved in this call: if it sends without end, receive with `recv`, \
                 which returns before its end; otherwise raise `timeout`",
                self.steps_around
            ),
            None if !status.running && status.status == Status::WaitEvent => {
                "let that happen before the call or, from another task, during it (for a gate: `gate.resume()`), or raise \
                 `timeout`"
                    .into()
            }
            None => {
                "pause the clock for a test of time (`#[tokio::test(start_paused = true)]`), or raise `timeout`".into()
            }
        };
        let limit = self.watchdog.limit();
        let text = format!("no step within {limit:?}: operator `{name}` {}; {what_to_do}", self.what_it_does());
        Error::new(ErrorKind::Stalled, text)
    }

    fn no_port(&self, port: &str) -> Error {
        let text =
            format!("port `{port}` belongs to another operator than `{}`: use the handles of this harness", self.name);
        Error::new(ErrorKind::Usage, text)
    }
}

/// Whether an output has sent a message that cannot be kept.
fn is_full(handle: &Handle, sinks: &[Arc<dyn AnySink>]) -> bool {
    let hubs = handle.0.hubs();
    sinks.iter().filter_map(|sink| sink.full()).any(|port| {
        let reader = format!("test:{port}.input");
        hubs.all.iter().any(|hub| hub.state.name().ends_with(&reader) && hub.state.queued() > 0)
    })
}

impl RunCount {
    /// Counts one run.
    ///
    /// # Errors
    /// [`Stalled`](ErrorKind::Stalled) if there were too many: the operator has run so often, and `what`.
    fn run(&mut self, run: &TestRun, what: &str) -> Result<()> {
        let fed = run.sources.iter().map(|source| source.fed()).sum();
        if std::mem::replace(&mut self.fed, fed) != fed {
            self.runs = 0;
        }
        self.runs += 1;
        if self.runs < MAX_RUNS {
            return Ok(());
        }
        let text = format!("operator `{}` has run {MAX_RUNS} times without a new message, and {what}", run.name);
        Err(Error::new(ErrorKind::Stalled, text))
    }
}

/// An input of the operator under test. Created by [`Harness::input`].
#[must_use = "it sends nothing by itself"]
pub struct TestInput<'a, M: Message> {
    run: &'a TestRun,
    port: &'static str,
    queues: Option<&'a Vec<Arc<SourceQueue<M>>>>,
    writer: usize,
    metadata: Metadata,
}

impl<M: Message> TestInput<'_, M> {
    /// Sends a message, which the operator can take in its next run. There is no limit on the number of messages, so this
    /// never waits: those that find no room in the input's hub follow later. Envelopes that are elsewhere are copied to
    /// the operator's device.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if the operator or this input has ended; the operator's failure;
    /// [`Usage`](ErrorKind::Usage) for a port or a writer that does not exist.
    pub fn send(self, message: M) -> Result<()> {
        self.send_for(Reply::default(), message)
    }

    /// Sends a message as a request, whose answer [`TestOutput::answer`] receives: as the first operator of a
    /// [service](crate::Flow::service) gets it. Otherwise like [`send`](Self::send). An operator that takes several requests
    /// in one run finds as many as its hub holds: the size of the port's batch, or set by
    /// [`HarnessBuilder::input_hub`](super::HarnessBuilder::input_hub).
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    ///
    /// ```
    /// use wakeline::{operator::map, test};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut double = test::operator(map(async |n: u32| Ok(2 * n))).start()?;
    /// let request = double.input(double.input).request(21)?;
    /// assert_eq!(*double.output(double.output).answer(&request).await?, 42);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn request(self, message: M) -> Result<TestRequest> {
        let (request, reply) = TestRequest::new();
        self.send_for(reply, message)?;
        Ok(request)
    }

    fn send_for(mut self, reply: Reply, message: M) -> Result<()> {
        if let Some(failure) = self.run.handle.failure() {
            return Err(failure);
        }
        if self.run.ended {
            let text = format!("operator `{}` has ended: input `{}` takes no message", self.run.name, self.port);
            return Err(Error::new(ErrorKind::Closed, text));
        }
        let metadata = std::mem::take(&mut self.metadata);
        self.queue()?.send(message, Load { metadata, reply, journey: None })
    }

    /// Ends the input: after the messages that were sent, no more will come.
    pub fn close(self) {
        if let Ok(queue) = self.queue() {
            queue.close();
        }
    }

    /// Adds a named value to the metadata of the message that is sent next.
    pub fn metadata<T: Send + Sync + 'static>(mut self, name: &'static str, value: T) -> Self {
        self.metadata.insert(name, value);
        self
    }

    /// The writer that sends, counted from 0, of an input that has several: see
    /// [`HarnessBuilder::writers`](super::HarnessBuilder::writers).
    pub fn writer(self, writer: usize) -> Self {
        Self { writer, ..self }
    }

    fn queue(&self) -> Result<&SourceQueue<M>> {
        let queues = self.queues.ok_or_else(|| self.run.no_port(self.port))?;
        queues.get(self.writer).map(|queue| &**queue).ok_or_else(|| {
            let text = format!(
                "input `{}` has no writer {}, as it has {}: set their number with `.writers(handle of the port, count)` before \
                 `.start()`",
                self.port,
                self.writer,
                queues.len()
            );
            Error::new(ErrorKind::Usage, text)
        })
    }
}

impl<T: Plain> TestInput<'_, Envelope<T>> {
    /// Sends an envelope with these elements. See [`send`](Self::send).
    ///
    /// # Errors
    /// Those of [`send`](Self::send), and of allocating host memory.
    pub fn send_slice(self, data: &[T]) -> Result<()> {
        // An envelope without data still has memory.
        let mut envelope = Envelope::from(Buffer::<T>::pinned(&crate::Device::host(), data.len().max(1))?);
        envelope.as_mut_space()?[..data.len()].copy_from_slice(data);
        envelope.set_len(data.len())?;
        self.send(envelope)
    }
}

impl<M: Message> fmt::Debug for TestInput<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestInput").field("port", &self.port).field("writer", &self.writer).finish_non_exhaustive()
    }
}

/// An output of the operator under test. Created by [`Harness::output`].
#[must_use = "it receives nothing by itself"]
pub struct TestOutput<'a, M: Message> {
    run: &'a mut TestRun,
    port: &'static str,
    queue: Option<Arc<SinkQueue<M>>>,
}

impl<M: Message> TestOutput<'_, M> {
    /// Receives the next message, and runs the operator until it has sent one. `None` if it has ended.
    ///
    /// The run in which it has sent the message is over then, with all its messages, unless it waits in its middle, for
    /// example because it sends more than the output's hub has room for. It goes on in the next call.
    ///
    /// # Errors
    /// [`Stalled`](ErrorKind::Stalled) if the operator waits for something that only the test can do, such as to send to
    /// its inputs; otherwise those of [`Harness::step`].
    ///
    /// # Cancel safety
    /// A message is taken only when the future resolves. Runs that have begun go on.
    pub async fn recv(self) -> Result<Option<Received<M>>> {
        let queue = self.queue()?.clone();
        self.next("message", || queue.take(), || !queue.is_empty()).await
    }

    /// Receives the answer to a [`request`](TestInput::request), the first message of this output that answers it, and
    /// runs the operator until it has sent one. Messages that answer other requests, or none, stay.
    ///
    /// # Errors
    /// The error with which the operator has [answered](crate::operator::Reply::fail);
    /// [`Unanswered`](ErrorKind::Unanswered) if it has dropped the request, or has ended; [`Usage`](ErrorKind::Usage) if
    /// one message answers several requests, which a [`Service`](crate::Service) cannot tell apart, and for a request
    /// whose answer was received before; otherwise those of [`recv`](Self::recv).
    ///
    /// # Cancel safety
    /// Like [`recv`](Self::recv).
    pub async fn answer(self, request: &TestRequest) -> Result<Received<M>> {
        let (queue, port, number) = (self.queue()?.clone(), self.port, request.number());
        if request.is_received() {
            return Err(Error::new(ErrorKind::Usage, "the answer to this request was received before"));
        }
        let name = self.run.name.clone();
        let unanswered = || {
            let text = format!(
                "a request was not answered: operator `{name}` has dropped it or has ended, and output `{port}` has no message \
                 for it (one that `recv` or `drain` has returned is no longer there)"
            );
            Error::new(ErrorKind::Unanswered, text)
        };
        // As behind a service, the run that drops a request decides by its own end what the caller gets.
        let handle = self.run.handle.clone();
        let end = || request.end().filter(|end| end.is_final() || !handle.0.status(OPERATOR).running);
        let take = || {
            // First: what was dropped before might have left an answer.
            let end = end().map(|end| match end {
                RequestEnd::Failed(error) => error.clone(),
                RequestEnd::Unanswered | RequestEnd::Over => handle.failure().unwrap_or_else(unanswered),
            });
            match queue.take_answer(number) {
                Some(Ok(answer)) => {
                    request.receive();
                    Some(Ok(answer))
                }
                Some(Err(several)) => {
                    let text = format!(
                        "one message of output `{port}` answers {several} requests, which a service cannot tell apart: an \
                         operator that takes several messages in one run states which of its messages answers which, with \
                         `cx.take_replies()` and `send_for`"
                    );
                    Some(Err(Error::new(ErrorKind::Usage, text)))
                }
                None => end.map(Err),
            }
        };
        let answer = self.next("answer to this request", take, || end().is_some() || queue.answers(number)).await?;
        answer.unwrap_or_else(|| Err(unanswered()))
    }

    /// Runs the operator until something can be taken; `None` if it has ended. `what` is missing otherwise.
    async fn next<T>(self, what: &str, take: impl Fn() -> Option<T>, is_there: impl Fn() -> bool) -> Result<Option<T>> {
        let mut count = RunCount::default();
        loop {
            if let Some(taken) = take() {
                return Ok(Some(taken));
            }
            // A run that sends without end, or more than the test could keep, has no end to wait for.
            let Some(stepped) = self.run.step_until(Time::Passes, &is_there).await? else { continue };
            match stepped {
                _ if is_there() => {}
                Stepped::Ran(_) => {
                    count.run(self.run, &format!("has sent no {what} to output `{}`", self.port))?;
                }
                Stepped::Ended => return Ok(None),
                Stepped::Waits(_) => {
                    let text = format!(
                        "output `{}` has no {what}, and operator `{}` {}: {}",
                        self.port,
                        self.run.name,
                        self.run.what_it_does(),
                        self.run.what_to_do()
                    );
                    return Err(Error::new(ErrorKind::Stalled, text));
                }
            }
        }
    }

    /// Receives the next message if it is there. The operator does not run.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a port of another operator.
    pub fn try_recv(self) -> Result<Option<Received<M>>> {
        Ok(self.queue()?.take())
    }

    /// Receives all messages that are there. The operator does not run.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a port of another operator.
    pub fn drain(self) -> Result<Vec<Received<M>>> {
        let queue = self.queue()?;
        Ok(std::iter::from_fn(|| queue.take()).collect())
    }

    fn queue(&self) -> Result<&Arc<SinkQueue<M>>> {
        self.queue.as_ref().ok_or_else(|| self.run.no_port(self.port))
    }
}

impl<M: Message> fmt::Debug for TestOutput<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestOutput").field("port", &self.port).finish_non_exhaustive()
    }
}
