//! Flows: build, check and run operators and the hubs between them.
//!
//! ```text
//!   add, connect ──> check (all problems at once) ──> hubs ──> kernels ──> start, run, stop ──> Report
//! ```
//!
//! A [`Section`] of a flow, in which many small kernels are enqueued repeatedly in one order, can be replayed as one
//! CUDA graph: [`Flow::replay`].
//!
//! The rest of a program exchanges messages with a running flow through an [`Ingress`], an [`Egress`], or a
//! [`Service`], which combines both. These handles are usable from any task or thread.

mod added;
mod blank_queue;
mod check;
mod checked;

mod components;
mod connect;
mod cycles;
mod drive;
mod egress;
mod hubs;
mod ingress;
mod ingress_gate;
mod link;
mod local;
mod on_stall;
mod report;
mod running;
mod searches;
mod section;
mod service;
mod spawn;
mod starting;
mod steps;
mod supervisor;
mod thread;
mod wait_groups;
mod wiring;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

pub use added::Added;
pub use checked::{Checked, Copied};
pub use connect::{Branch, Targets};
pub use cycles::{Cycle, Feed};
pub use egress::Egress;
pub use ingress::Ingress;
pub use local::LocalFlow;
pub use on_stall::OnStall;
pub use report::{DeviceReport, HubReport, OperatorReport, Report, SectionReport};
pub use running::Running;
pub use section::{Operators, Section};
pub use service::{ResponseFuture, Service};
pub(crate) use steps::{Advance, Rest};
pub use steps::{Step, Steps};

pub use crate::operator::{Changes, Handle, OperatorStatus};

use crate::{
    condition::{Gate, Gates, PortId},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{HubOptions, HubOptionsFor, Message},
    operator::{
        Operator, OutputHandle, Plan, PortDecl, Ports,
        control::{Control, SectionControl},
        erased,
        settings::{FlowContext, OperatorSettings, StreamSettings},
    },
    stream::CompletionMode,
    sync::{Mutex, lock},
};
use added::OperatorSlot;
use drive::OwnedOperator;
use spawn::Threads;
use thread::OwnThread;

/// Operators and the hubs between them.
///
/// ```
/// use wakeline::{Flow, operator::{map, sink, source}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let mut flow = Flow::new("double");
/// let mut numbers = 1..=3_u32;
/// let count = flow.add("count", source(move || std::future::ready(Ok(numbers.next()))));
/// let double = flow.add("double", map(async |n: u32| Ok(2 * n)));
/// let print = flow.add("print", sink(async |n: u32| { println!("{n}"); Ok(()) }));
/// flow.connect(count.output, double.input);
/// flow.connect(double.output, print.input);
/// let report = flow.run().await?;
/// assert_eq!(report.operator("double").unwrap().runs, 3);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
pub struct Flow {
    name: Arc<str>,
    id: u64,
    entries: Vec<OperatorEntry>,
    connections: Vec<Connection>,
    links: Vec<link::Linking>,
    sections: Vec<Section>,
    mode: CompletionMode,
    device_times: bool,
    on_stall: OnStall,
    gates: Gates,
    threads: Threads,
}

/// One operator of a flow.
struct OperatorEntry {
    name: Arc<str>,
    /// `None` while the flow runs.
    operator: Option<OwnedOperator>,
    ports: Vec<PortDecl>,
    place: Arc<Mutex<OperatorSlot>>,
    /// A `LocalOperator`.
    stays: bool,
    /// The number of tasks of its concurrent runs, besides its own task.
    workers: usize,
}

struct Connection {
    from: PortId,
    to: PortId,
    hub: HubOptions,
    make: connect::MakeLink,
    /// The output may have several readers.
    forks: bool,
}

/// The maximum number of checks, if conditions are added to the operators during each.
const MAX_CHECKS: usize = 16;

impl Flow {
    /// Creates an empty flow.
    pub fn new(name: impl Into<String>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Self {
            name: name.into().into(),
            id: IDS.fetch_add(1, Ordering::Relaxed),
            entries: Vec::new(),
            connections: Vec::new(),
            links: Vec::new(),
            sections: Vec::new(),
            mode: CompletionMode::default(),
            device_times: false,
            on_stall: OnStall::default(),
            gates: Gates::default(),
            threads: Threads::Any,
        }
    }

    /// The flow's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets how the streams of the flow's operators and hubs detect that their work is done. An operator may override
    /// this for its own stream.
    pub fn set_completion_mode(&mut self, mode: CompletionMode) {
        self.mode = mode;
    }

    /// Measures and reports the device time of each run's work in the operator's own stream
    /// ([`OperatorReport::device`]). Off by default. It costs two event records per run, and two for each wait for
    /// another stream in the middle of a run, about 0.12 us each. Nothing waits for the device because of it.
    pub fn set_device_times(&mut self, on: bool) {
        self.device_times = on;
    }

    /// Sets how the flow reacts when some of its operators have stalled. By default it fails. See [`OnStall`].
    pub fn set_on_stall(&mut self, on_stall: OnStall) {
        self.on_stall = on_stall;
    }

    /// Returns the gate called `name`, which is open at first, for use with `.when(..)`. Operators find it by its name,
    /// with [`Cx::gate`](crate::Cx::gate). The same name returns the same gate.
    ///
    /// ```
    /// use wakeline::{Flow, operator::source};
    ///
    /// let mut flow = Flow::new("camera");
    /// let gate = flow.gate("recording");
    /// let frames = flow.add("frames", source(async || Ok(Some(0_u8)))).when(gate);
    /// ```
    pub fn gate(&mut self, name: impl Into<String>) -> Gate {
        self.gates.get(name.into())
    }

    /// Adds an operator under a unique name, and returns the handles of its ports.
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        let workers = operator.workers();
        let (operator, plan, handles) = erased::boxed(operator, self.id, self.entries.len());
        let (name, place) = self.add_boxed(name.into(), workers, operator, plan);
        Added { handles, name, place }
    }

    fn add_boxed(
        &mut self,
        name: String,
        workers: usize,
        operator: erased::BoxedOperator,
        plan: Plan,
    ) -> (Arc<str>, Arc<Mutex<OperatorSlot>>) {
        let name: Arc<str> = name.into();
        let place = Arc::new(Mutex::new(OperatorSlot { conditions: plan.conditions, ..OperatorSlot::default() }));
        self.entries.push(OperatorEntry {
            name: name.clone(),
            operator: Some(OwnedOperator::new(operator, &self.name, &name)),
            ports: plan.ports,
            place: place.clone(),
            stays: false,
            workers,
        });
        (name, place)
    }

    /// Connects an output to an input through a hub. By default the hub queues one message and has two envelopes on each
    /// side, of the size in the output's declaration or of the envelopes that are passed on. If an operator waits for
    /// several messages or for room for several, the queue holds that many messages and has one envelope more.
    ///
    /// An output can also be connected to several inputs, each through a hub of its own:
    ///
    /// ```
    /// use wakeline::{Flow, HubOptions, operator::{sink, source}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("two");
    /// let mut words = ["one", "two"].into_iter();
    /// let read = flow.add("read", source(move || std::future::ready(Ok(words.next()))));
    /// let print = flow.add("print", sink(async |word: &str| { println!("{word}"); Ok(()) }));
    /// let count = flow.add("count", sink(async |word: &str| { println!("{}", word.len()); Ok(()) }));
    /// flow.connect(read.output, [print.input, count.input]);
    /// # flow.run().await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// Every message then goes to each input, and must be [`Fork`](crate::Fork): host data is cloned, and an envelope,
    /// which is exclusive to its reader, is copied on the device to another envelope of the hub. One reader gets the
    /// original message: of those whose hubs make the writer wait (of all, if none does), the first on the writer's device,
    /// otherwise the last. [`check`](Self::check) lists these copies. The writer waits for the slowest reader.
    ///
    /// An [`Input`](crate::Input) is connected once, [`Inputs`](crate::Inputs) any number of times.
    ///
    /// Mistakes, such as a port that is connected already, are reported together when the flow runs.
    pub fn connect<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>) {
        self.connect_with(from, to, HubOptions::default());
    }

    /// Like [`connect`](Self::connect), with this kind of hub for each input that has none of its own
    /// ([`InputHandle::with`](crate::operator::InputHandle::with)).
    pub fn connect_with<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>, hub: impl HubOptionsFor<M>) {
        for connect::Target { to, hub, make, forks } in to.targets(hub.typed()) {
            self.connections.push(Connection { from: from.id, to, hub, make, forks });
        }
    }

    /// Reports what can be known without running the flow: mistakes, and properties that may be unexpected.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every mistake in the setup, like [`run`](Self::run).
    pub fn check(&self) -> Result<Checked> {
        self.planned().map(|(planned, _)| planned.checked)
    }

    /// Runs the flow to its end, on the current tokio runtime. It can be run again: the operators keep their state.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every mistake in the setup, before anything runs; the failure of an operator,
    /// with its name; [`Stalled`](ErrorKind::Stalled) if no operator can make progress although work is left. The error
    /// has a [report](Error::report) of what had run.
    ///
    /// # Cancel safety
    /// Dropping the future aborts the flow: every operator's `stop` still runs in the background, as long as the
    /// runtime does. The operators are dropped, and a further `run` is an error.
    pub async fn run(&mut self) -> Result<Report> {
        let mut running = self.launch(true, false)?;
        let outcome = (&mut running).await;
        for (at, mut operator) in running.operators() {
            let entry = &mut self.entries[at];
            // Conditions that were added during the run come after them.
            let mut conditions = operator.conditions();
            let mut place = lock(&entry.place);
            conditions.append(&mut place.conditions);
            place.conditions = conditions;
            drop(place);
            entry.operator = Some(operator);
        }
        outcome
    }

    /// Runs the flow in the background, on the current tokio runtime. Each operator is dropped after its `stop`, before
    /// the [`Running`] resolves.
    ///
    /// # Errors
    /// Those of [`run`](Self::run) for mistakes that are found before anything runs.
    pub fn spawn(mut self) -> Result<Running> {
        self.launch(false, false)
    }

    /// `keep`: return the operators at the end.
    /// `stepped`: runs begin and hubs move messages only when a step requests it.
    fn launch(&mut self, keep: bool, stepped: bool) -> Result<Running> {
        let (check::Planned { links: plans, checked, sections, unbegun }, conditions) = self.planned()?;
        spawn::require_runtime(self.threads)?;
        checked.trace(&self.name);
        if self.entries.iter().any(|entry| entry.operator.is_none()) {
            let text = format!("flow `{}` was aborted and its operators were dropped: build a new flow", self.name);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let own_threads = self.own_threads()?;
        let names = self.entries.iter().map(|entry| entry.name.clone()).collect();
        let shared =
            sections.iter().map(|plan| SectionControl { name: plan.name.clone(), operators: plan.members.clone() });
        let control = Control::new(self.name.clone(), names, shared.collect());
        if stepped {
            control.set_stepped();
        }
        let streams = StreamSettings { mode: self.mode, timed: self.device_times };
        let (gates, spawn) = (self.gates.clone(), spawn::spawner(self.threads));
        let surroundings = Arc::new(FlowContext { streams, gates, control: control.clone(), spawn });
        // Before the operators take their conditions.
        let waits = |connection: &Connection| {
            let Connection { from, to, .. } = *connection;
            (check::waits_at(self, from), check::waits_at(self, to), check::waits_for_each(self, to))
        };
        let waits: Vec<_> = self.connections.iter().map(waits).collect();
        let mut members = Vec::with_capacity(self.entries.len());
        for (index, (entry, node)) in self.entries.iter_mut().zip(&control.tasks).enumerate() {
            let Some(mut operator) = entry.operator.take() else { continue };
            let mut place = lock(&entry.place);
            // Only the conditions that were checked. Those that are added from now on apply to the next run.
            let own = conditions.get(index).map_or(0, |count| place.conditions.len().min(*count));
            let device = place.device.clone().unwrap_or_else(Device::host);
            let setting = OperatorSettings {
                name: entry.name.clone(),
                device: device.clone(),
                streams: place.streams(),
                allocator: place.allocator.clone(),
                conditions: place.conditions.drain(..own).collect(),
                merge: place.merge,
                may_block: place.own_thread.is_some(),
            };
            let fills = place.fills.clone();
            // `enter` calls conditions of the user's.
            drop(place);
            operator.enter(setting, node.clone(), surroundings.clone());
            members.push(drive::FlowOperator { index, name: entry.name.clone(), device, operator, fills });
        }
        let hubs_to_create: Vec<_> = plans
            .into_iter()
            .zip(self.connections.iter().zip(waits))
            .map(|(mut plan, (connection, (writer_waits, reader_waits, of_each)))| {
                plan.stepped = stepped;
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::HubToCreate {
                    plan,
                    make: connection.make.clone(),
                    from: port(connection.from),
                    to: port(connection.to),
                    writer_waits,
                    reader_waits,
                    of_each,
                }
            })
            .collect();
        let links = self.links.iter().map(|link| drive::ToLink {
            linking: link.clone(),
            port: self.entries[link.port.operator].ports[link.port.port].name,
        });
        let (links, threads) = (links.collect(), self.threads);
        let sections = sections.into_iter().map(|plan| section::SectionSetup {
            interior: plan.interior.iter().map(|at| hubs_to_create[*at].clone()).collect(),
            mode: self.mode,
            stats: section::SectionStats::new(&plan.name),
            plan,
        });
        let sections = sections.collect();
        Ok(drive::launch(drive::RunSetup {
            flow: self.id,
            control,
            members,
            threads,
            own_threads,
            hubs_to_create,
            links,
            sections,
            unbegun,
            keep,
            on_stall: self.on_stall,
        }))
    }

    /// The flow's plan, and the number of conditions of each operator that it takes into account.
    fn planned(&self) -> Result<(check::Planned, Vec<usize>)> {
        // Another thread may add conditions during the check, and so may a condition that the check calls.
        let counts = || self.entries.iter().map(|entry| lock(&entry.place).conditions.len()).collect::<Vec<_>>();
        for _ in 0..MAX_CHECKS {
            let (before, planned) = (counts(), check::plan(self)?);
            if before == counts() {
                return Ok((planned, before));
            }
        }
        let text = "conditions were added to its operators during every check: add them before the flow runs";
        Err(Error::new(ErrorKind::Setup, text).at(format!("flow `{}`", self.name)))
    }

    fn hub_names(&self) -> Vec<Arc<str>> {
        self.connections.iter().map(|connection| check::hub_name(self, connection).into()).collect()
    }

    fn own_threads(&self) -> Result<Vec<Option<OwnThread>>> {
        let threads = self.entries.iter().map(|entry| {
            let plan = lock(&entry.place).own_thread.filter(|_| !spawn::in_simulation());
            plan.map(|plan| OwnThread::start(&entry.name, plan.core)).transpose()
        });
        threads.collect()
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow")
            .field("name", &self.name)
            .field("operators", &self.entries.iter().map(|entry| &*entry.name).collect::<Vec<_>>())
            .field("hubs", &self.connections.len())
            .finish()
    }
}
