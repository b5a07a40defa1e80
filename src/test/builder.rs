//! [`HarnessBuilder`]: the flow around an operator under test.

use std::{
    any::{Any, type_name},
    collections::HashMap,
    fmt,
    io::Write,
    marker::PhantomData,
    ops::Deref,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use super::{
    harness::{Harness, Surroundings},
    sink::{RoomForMessage, SinkQueue, TestSink},
    source::{MessageSent, SourceQueue, TestSource},
};
use crate::{
    condition::{IntoCondition, PortId},
    device::Device,
    error::{Error, ErrorKind, Result},
    flow::{Added, Flow, LocalFlow},
    hub::{ChunkHub, HubOptions, HubOptionsFor, Message, TypedHubOptions, role::ChunkRole},
    memory::Plain,
    operator::{HandleVisitor, InputHandle, LinkHandle, LocalOperator, Operator, OutputHandle, Ports},
};

/// The longest real time that a call of a harness waits for one step.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of writers of an input.
const MAX_WRITERS: usize = 1 << 16;

/// Prepares an operator for its test, under the name of its type. See the [module](super).
pub fn operator<O: Operator>(operator: O) -> HarnessBuilder<O::Ports> {
    operator_named(type_name_of::<O>(), operator)
}

/// Like [`operator`], with the name that errors and reports mention.
pub fn operator_named<O: Operator>(name: impl Into<String>, operator: O) -> HarnessBuilder<O::Ports> {
    let mut flow = Flow::new("test");
    let added = flow.add(name, operator);
    HarnessBuilder::new(flow, added)
}

/// Like [`operator`], for one that stays on its thread: a [`LocalOperator`]. As a [`LocalFlow`], it starts inside a
/// [`LocalSet`](tokio::task::LocalSet) or on a [`LocalRuntime`](tokio::runtime::LocalRuntime).
///
/// ```
/// use std::{cell::Cell, rc::Rc};
/// use wakeline::{operator::{LocalOperator, SinkPorts}, prelude::*, test};
///
/// struct Sum(Rc<Cell<u32>>);
///
/// impl LocalOperator for Sum {
///     type Ports = SinkPorts<u32>;
///
///     async fn compute(&mut self, ports: &mut SinkPorts<u32>, _cx: &mut Cx) -> Result<()> {
///         self.0.set(self.0.get() + ports.input.take()?);
///         Ok(())
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// // In a test with `#[tokio::test]`.
/// tokio::task::LocalSet::new().run_until(async {
///     let total = Rc::default();
///     let mut sum = test::local_operator(Sum(Rc::clone(&total))).start()?;
///     sum.input(sum.input).send(3)?;
///     sum.step().await?;
///     assert_eq!(total.get(), 3);
///     sum.finish().await?;
///     Ok(())
/// }).await
/// # }).unwrap_or_else(|error: Error| panic!("{error}"));
/// ```
pub fn local_operator<O: LocalOperator>(operator: O) -> HarnessBuilder<O::Ports> {
    let mut flow = LocalFlow::new("test");
    let added = flow.add_local(type_name_of::<O>(), operator);
    HarnessBuilder::new(flow.into_flow(), added)
}

fn type_name_of<O>() -> &'static str {
    let name = type_name::<O>();
    name.split('<').next().and_then(|path| path.rsplit("::").next()).unwrap_or(name)
}

/// An operator under test that has not started yet. Created by [`operator`].
///
/// The handles of its ports are its fields, as they are of an operator that was added to a flow.
///
/// It cannot be sent to another thread, where a [local operator](local_operator) must not run:
///
/// ```compile_fail,E0277
/// let builder = wakeline::test::operator(wakeline::operator::sink(async |_: u32| Ok(())));
/// std::thread::spawn(move || drop(builder));
/// ```
#[must_use = "it does nothing unless started"]
pub struct HarnessBuilder<P: Ports> {
    flow: Flow,
    added: Added<P::Handles>,
    /// By port: a `TypedHubOptions<M>`.
    hubs: HashMap<PortId, Box<dyn Any + Send + Sync>>,
    writers: HashMap<PortId, usize>,
    linked: Vec<PortId>,
    timeout: Duration,
    log: Option<Box<dyn Write + Send>>,
    here: PhantomData<Rc<()>>,
}

impl<P: Ports> HarnessBuilder<P> {
    fn new(flow: Flow, added: Added<P::Handles>) -> Self {
        Self {
            flow,
            added,
            hubs: HashMap::new(),
            writers: HashMap::new(),
            linked: Vec::new(),
            timeout: TIMEOUT,
            log: None,
            here: PhantomData,
        }
    }

    /// Puts the operator on a device; the default is the host. See [`Added::on`].
    pub fn on(self, device: &Device) -> Self {
        self.with(|operator| operator.on(device))
    }

    /// Adds a condition. See [`Added::when`].
    pub fn when(self, condition: impl IntoCondition) -> Self {
        self.with(|operator| operator.when(condition))
    }

    /// Sets anything else that can be set for an operator in a flow.
    ///
    /// ```
    /// use wakeline::{condition::at_least, hub::MergePolicy, operator::sink, prelude::*, test};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let sum = sink(async |_: u32| Ok(()));
    /// let mut sum = test::operator(sum)
    ///     .with(|sum| {
    ///         let numbers = sum.input;
    ///         sum.when(at_least(numbers, 2)).merge_metadata(MergePolicy::Raise)
    ///     })
    ///     .start()?;
    /// sum.input(sum.input).send(1)?;
    /// assert!(sum.step().await?.is_waiting());
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub fn with(self, set: impl FnOnce(Added<P::Handles>) -> Added<P::Handles>) -> Self {
        Self { added: set(self.added), ..self }
    }

    /// Sets the hub between the test and an input.
    pub fn input_hub<M: Message>(mut self, input: InputHandle<M>, hub: impl HubOptionsFor<M>) -> Self {
        self.hubs.insert(input.id, Box::new(hub.typed()));
        self
    }

    /// Sets the hub between an output and the test. An operator that gets blank envelopes at an output whose attribute
    /// has no `envelope_bytes` needs it: `HubOptions::default().envelope_bytes(4096)`.
    pub fn output_hub<M: Message>(mut self, output: OutputHandle<M>, hub: impl HubOptionsFor<M>) -> Self {
        self.hubs.insert(output.id, Box::new(hub.typed()));
        self
    }

    /// Connects an [`Inputs`](crate::Inputs) port to this number of writers, which are numbered from 0; the default is
    /// one, and 65,536 are the most. See [`TestInput::writer`](super::TestInput::writer).
    pub fn writers<M: Message>(mut self, input: InputHandle<M>, count: usize) -> Self {
        self.writers.insert(input.id, count);
        self
    }

    /// Links a port to a hub of chunks. See [`Flow::link`].
    pub fn link<K, T, S>(mut self, port: LinkHandle<K, T, S>, hub: &ChunkHub<T, S>) -> Self
    where
        K: ChunkRole,
        T: Plain,
        S: Clone + Send + Sync + 'static,
    {
        self.flow.link(port, hub);
        self.linked.push(port.into());
        self
    }

    /// Sets the longest real time that a call of the harness takes for one run of the operator. This includes what the run
    /// waits for: a device, a timer, a gate, or anything else outside the operator. The default is ten seconds.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Writes a line for each step. See [`Steps::log_to`](crate::flow::Steps::log_to).
    pub fn log_to(self, writer: impl Write + Send + 'static) -> Self {
        Self { log: Some(Box::new(writer)), ..self }
    }

    /// Connects each port to the test, and starts the operator, which runs in the calls of the harness. Call it in a
    /// tokio runtime.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every mistake, such as a port that has to be [linked](Self::link).
    pub fn start(self) -> Result<Harness<P>> {
        let Self { mut flow, added, mut hubs, writers, linked, timeout, log, here: _ } = self;
        let (name, handles) = (added.name().to_owned(), *added);
        let mut visitor = Connecting {
            name: &name,
            device: added.device(),
            flow: &mut flow,
            hubs: &mut hubs,
            writers: &writers,
            linked: &linked,
            problems: Vec::new(),
            around: Surroundings::default(),
        };
        P::visit_handles(handles, &mut visitor);
        let Connecting { problems, around, .. } = visitor;
        if !problems.is_empty() {
            return Err(Error::new(ErrorKind::Setup, problems.join("; ")));
        }
        let mut steps = flow.steps()?;
        if let Some(writer) = log {
            steps = steps.log_to(writer);
        }
        Ok(Harness::new(name.into(), handles, steps, around, timeout))
    }
}

/// The handles of the operator's ports.
impl<P: Ports> Deref for HarnessBuilder<P> {
    type Target = P::Handles;

    fn deref(&self) -> &P::Handles {
        &self.added
    }
}

impl<P: Ports> fmt::Debug for HarnessBuilder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HarnessBuilder").field("operator", &self.added.name()).finish_non_exhaustive()
    }
}

/// Connects each port to an operator of the harness.
struct Connecting<'a> {
    name: &'a str,
    device: Option<Device>,
    flow: &'a mut Flow,
    hubs: &'a mut HashMap<PortId, Box<dyn Any + Send + Sync>>,
    writers: &'a HashMap<PortId, usize>,
    linked: &'a [PortId],
    problems: Vec<String>,
    around: Surroundings,
}

impl Connecting<'_> {
    fn hub<M: Message>(&mut self, port: PortId) -> TypedHubOptions<M> {
        let set = self.hubs.remove(&port).and_then(|hub| hub.downcast::<TypedHubOptions<M>>().ok());
        set.map_or_else(|| HubOptions::default().typed(), |hub| *hub)
    }

    fn place<H>(&self, added: Added<H>) -> Added<H> {
        match &self.device {
            Some(device) => added.on(device),
            None => added,
        }
    }

    fn device(&self) -> Device {
        self.device.clone().unwrap_or_else(Device::host)
    }
}

impl HandleVisitor for Connecting<'_> {
    fn input<M: Message>(&mut self, handle: InputHandle<M>) {
        let (port, hub) = (handle.id.name, self.hub::<M>(handle.id));
        let count = self.writers.get(&handle.id).copied();
        if count.is_some_and(|count| count > MAX_WRITERS) {
            self.problems
                .push(format!("input `{port}` of operator `{}` has more than {MAX_WRITERS} writers", self.name));
            return;
        }
        let queues = (0..count.unwrap_or(1)).map(|writer| {
            let name = if count.is_some() { format!("test:{port}:{writer}") } else { format!("test:{port}") };
            let queue = SourceQueue::<M>::new(port);
            let added = self.flow.add(name, TestSource { queue: queue.clone(), device: self.device() });
            let added = self.place(added.when(MessageSent(queue.clone())));
            self.flow.connect_with(added.output, handle, hub);
            queue
        });
        let queues: Vec<_> = queues.collect();
        self.around.add_input(handle.id, queues);
    }

    fn output<M: Message>(&mut self, handle: OutputHandle<M>) {
        let mut hub = self.hub::<M>(handle.id);
        hub.options.reads_anywhere = true;
        let queue = SinkQueue::<M>::new(handle.id.name);
        let sink = TestSink { queue: queue.clone(), device: self.device() };
        let added = self.flow.add(format!("test:{}", handle.id.name), sink);
        let added = self.place(added.when(RoomForMessage(queue.clone())));
        self.flow.connect_with(handle, added.input, hub);
        self.around.add_output(handle.id, queue);
    }

    fn link(&mut self, port: PortId) {
        if !self.linked.contains(&port) {
            self.problems.push(format!(
                "port `{}` of operator `{}` is not linked to a hub of chunks: `.link(handle of the port, &hub)` before \
                 `.start()`",
                port.name, self.name
            ));
        }
    }
}

impl Surroundings {
    fn add_input<M: Message>(&mut self, port: PortId, queues: Vec<Arc<SourceQueue<M>>>) {
        self.count += queues.len();
        self.sources.extend(queues.iter().map(|queue| queue.clone() as _));
        self.inputs.insert(port, Box::new(queues));
    }

    fn add_output<M: Message>(&mut self, port: PortId, queue: Arc<SinkQueue<M>>) {
        self.count += 1;
        self.sinks.push(queue.clone());
        self.outputs.insert(port, Box::new(queue));
    }
}
