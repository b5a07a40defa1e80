//! Flows: operators and how they are joined; built, checked, run.
//!
//! ```text
//!   add, connect ──> check (all problems at once) ──> hubs ──> kernels ──> start, run, stop ──> Report
//! ```
//!
//! Where many small kernels are enqueued in one order again and again, a [`Section`] of the flow is replayed as one CUDA graph:
//! [`Flow::replay`].
//!
//! A flow within a program is talked to by an [`Ingress`], an [`Egress`], or a [`Service`], which is both: handles that are
//! used from any task or thread while it runs.

mod check;
mod checked;
mod connect;
mod door;
mod drive;
mod egress;
mod hubs;
mod ingress;
mod keeper;
mod link;
mod local;
mod report;
mod running;
mod section;
mod service;
mod spawn;
mod steps;
mod thread;
mod wiring;

use std::{
    fmt,
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

pub use checked::{Checked, Copied};
#[doc(hidden)]
pub use connect::Target;
pub use connect::{Branch, Targets};
pub use egress::Egress;
pub use ingress::{Ingress, SendError};
pub use local::LocalFlow;
pub use report::{DeviceReport, HubReport, OperatorReport, Report, SectionReport};
pub use running::Running;
#[doc(hidden)]
pub use section::AnyAdded;
pub use section::{Operators, Section};
pub use service::{ResponseFuture, Service};
pub use steps::{Step, Steps};

pub use crate::operator::{Changes, Handle, OperatorStatus};

use crate::{
    condition::{Gate, Gates, IntoCondition, PortId, When},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{Hub, HubOf, MergePolicy, Message},
    memory::Allocator,
    operator::{
        Operator, OutputHandle, PortDecl, Ports,
        control::{Control, Section as Shared},
        lane::OwnStreams,
        seat::{self, How, Seat, Setting, Surroundings},
    },
    stream::{CompletionMode, StreamPool},
    sync::lock,
};
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
    entries: Vec<Entry>,
    connections: Vec<Connection>,
    links: Vec<link::Linking>,
    sections: Vec<Section>,
    mode: CompletionMode,
    device_times: bool,
    gates: Gates,
    threads: Threads,
}

/// An operator of a flow.
struct Entry {
    name: Arc<str>,
    /// Away while the flow runs.
    seat: Option<Box<dyn Seat>>,
    ports: Vec<PortDecl>,
    place: Arc<Mutex<Place>>,
    /// It cannot leave its thread.
    stays: bool,
    /// Tasks that its runs go on in, beside its own.
    workers: usize,
}

/// Where an operator is to run.
#[derive(Debug, Default)]
struct Place {
    device: Option<Device>,
    /// Of its own streams, if one was said; and whether it was asked to have none. Both is an error.
    pool: Option<StreamPool>,
    without_own_stream: bool,
    allocator: Option<Allocator>,
    /// Away while the flow runs.
    conditions: Vec<When>,
    merge: MergePolicy,
    own_thread: Option<ThreadPlan>,
}

impl Place {
    fn streams(&self) -> OwnStreams {
        match &self.pool {
            _ if self.without_own_stream => OwnStreams::None,
            Some(pool) => OwnStreams::Pool(pool.clone()),
            None => OwnStreams::Default,
        }
    }
}

/// An operator's own thread, as asked for.
#[derive(Clone, Copy, Debug)]
struct ThreadPlan {
    core: Option<usize>,
}

struct Connection {
    from: PortId,
    to: PortId,
    hub: Hub,
    make: connect::MakeLink,
    /// Its output may have others.
    forks: bool,
}

/// An operator that was added: its ports' handles, and where it is to run.
///
/// The handles are its fields: `upper.lines`, `upper.shouted`.
#[derive(Clone)]
pub struct Added<H> {
    handles: H,
    name: Arc<str>,
    place: Arc<Mutex<Place>>,
}

impl<H> Added<H> {
    /// Puts the operator on a device: its stream is there, and hubs bring envelopes there. On the host if never called.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        lock(&self.place).device = Some(device.clone());
        self
    }

    /// Takes the operator's streams from this pool, and not from its device's default one. Several operators may share a
    /// pool; one whose maximum is below their number is warned of when the flow runs, and a pool of another device is an
    /// error then.
    ///
    /// ```
    /// use wakeline::{prelude::*, operator::sink};
    ///
    /// # let device = Device::emulated(Emulated::new());
    /// let urgent = StreamPool::builder(&device).name("urgent").priority(-1).build()?;
    /// let mut flow = Flow::new("two");
    /// let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).streams(&urgent);
    /// let two = flow.add("two", sink(async |_: u32| Ok(()))).on(&device).streams(&urgent);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    #[must_use]
    pub fn streams(self, pool: &StreamPool) -> Self {
        lock(&self.place).pool = Some(pool.clone());
        self
    }

    /// Takes the memory that the operator asks for ([`Cx::alloc`](crate::Cx::alloc)) from this allocator, and not from its
    /// device's own. One of another device is an error when the flow runs.
    ///
    /// ```
    /// use wakeline::{prelude::*, memory::Allocator, operator::sink};
    ///
    /// # let device = Device::emulated(Emulated::new());
    /// let scratch = Allocator::blocks(&device, 1 << 20, 4)?;
    /// let mut flow = Flow::new("one");
    /// let one = flow.add("one", sink(async |_: u32| Ok(()))).on(&device).allocator(&scratch);
    /// # Ok::<(), wakeline::Error>(())
    /// ```
    #[must_use]
    pub fn allocator(self, allocator: &Allocator) -> Self {
        lock(&self.place).allocator = Some(allocator.clone());
        self
    }

    /// Gives the operator no stream of its own: it works on the streams of the messages that it is given. See
    /// [`Cx::stream`](crate::Cx::stream). With a [pool](Self::streams) as well that is an error when the flow runs.
    #[must_use]
    pub fn without_own_stream(self) -> Self {
        lock(&self.place).without_own_stream = true;
        self
    }

    /// The operator runs only when this is ready, too: with all that its ports wait for, and whatever else was said so. A
    /// port that the condition names loses its default condition.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wakeline::{Flow, condition::{count, every}, operator::source};
    ///
    /// let mut flow = Flow::new("ten ticks");
    /// let ticks = flow
    ///     .add("ticks", source(async || Ok(Some(()))))
    ///     .when(every(Duration::from_millis(10)))
    ///     .when(count(10));
    /// ```
    ///
    /// See [`condition`](crate::condition) for all there are.
    #[must_use]
    pub fn when(self, condition: impl IntoCondition) -> Self {
        lock(&self.place).conditions.push(condition.into_condition());
        self
    }

    /// What happens where the operator takes several messages in one run that have [`Metadata`](crate::hub::Metadata) of the
    /// same name; [`MergePolicy::Update`] if nothing is said.
    #[must_use]
    pub fn merge_metadata(self, policy: MergePolicy) -> Self {
        lock(&self.place).merge = policy;
        self
    }

    /// Runs the operator on a thread of its own, which has its name: `start`, every run, `may_run`, `after` and `stop`, and
    /// the drop of what an abort interrupts. For one that blocks, or whose library wants to be called from one thread
    /// alone. The thread begins with the flow and is gone when the flow has ended.
    ///
    /// It may block as long as it likes: the runtime's other tasks go on meanwhile, on a runtime of one thread too. Only
    /// its own flow may have to wait for it: for its messages, and, when it is stopped or aborted, for the end of what it
    /// is doing, since it is dropped at its next `await`. Tokio's timers, sockets and `tokio::spawn` work there as
    /// anywhere, and so does what refuses to block on a worker, such as `blocking_recv`.
    ///
    /// A flow that was [spawned](Flow::spawn) drops the operator there as well; [`Flow::run`] keeps it for the next
    /// run, on another thread. In a [`Simulation`](crate::device::Simulation), which has no threads, it is a task like
    /// any other.
    ///
    /// The runs of a [`concurrent`](crate::operator::concurrent) operator are tasks of their own: the two together are an
    /// error before the flow runs.
    ///
    /// ```
    /// use wakeline::{prelude::*, operator::{sink, source}};
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let mut flow = Flow::new("compress");
    /// let mut blocks = (0..4_u8).map(|n| vec![n; 1 << 10]);
    /// let read = flow.add("read", source(move || std::future::ready(Ok(blocks.next()))));
    /// let write = flow.add("write", sink(async |block: Vec<u8>| Ok(std::fs::write("/dev/null", block)?)));
    /// flow.connect(read.output, write.input);
    /// let _write = write.on_own_thread();
    /// flow.run().await?;
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn on_own_thread(self) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: None });
        self
    }

    /// As [`on_own_thread`](Self::on_own_thread), with the thread pinned to a core of the machine, counted from 0. A core
    /// that it cannot be pinned to is an error before the flow runs; so is every core where the system has no pinning
    /// (all but Linux).
    #[must_use]
    pub fn on_own_thread_pinned(self, core: usize) -> Self {
        lock(&self.place).own_thread = Some(ThreadPlan { core: Some(core) });
        self
    }

    /// The operator's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl<H> Deref for Added<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.handles
    }
}

impl<H> fmt::Debug for Added<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Added").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Flow {
    /// An empty flow.
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
            gates: Gates::default(),
            threads: Threads::Any,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the streams of its operators and hubs learn that their work is done. An operator may set another for its own.
    pub fn set_completion_mode(&mut self, mode: CompletionMode) {
        self.mode = mode;
    }

    /// Whether the device's time for the work that each run of an operator puts into the operator's own stream is measured
    /// and reported
    /// ([`OperatorReport::device`]); off by default. It costs two event records a run, and two for each wait for another
    /// stream in the middle of it, some 0.12 us each; nothing waits for the device because of it.
    pub fn device_times(&mut self, on: bool) {
        self.device_times = on;
    }

    /// A gate that operators find by its name, with [`Cx::gate`](crate::Cx::gate): to be given to `.when(..)`, open at first.
    /// The same for the same name.
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

    /// Adds an operator under a name of its own, and returns its ports' handles.
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        let name: Arc<str> = name.into().into();
        let workers = operator.workers();
        let (seat, plan, handles) = seat::seat(operator, self.id, self.entries.len());
        let place = Arc::new(Mutex::new(Place { conditions: plan.conditions, ..Place::default() }));
        self.entries.push(Entry {
            name: name.clone(),
            seat: Some(seat),
            ports: plan.ports,
            place: place.clone(),
            stays: false,
            workers,
        });
        Added { handles, name, place }
    }

    /// Joins an output to an input by a hub: a queue of one, two envelopes on each side, sizes from the output's
    /// declaration or from the envelopes that are passed on; a longer queue, with one envelope more than messages, where
    /// an operator waits for several messages or for room for several. Or to several inputs, each by a hub of its own:
    ///
    /// ```
    /// use wakeline::{Flow, Hub, operator::{sink, source}};
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
    /// Then every message goes to each of them, and must be [`Fork`](crate::Fork): host data is cloned, and an envelope,
    /// which is its reader's alone, is copied to another of the hub's, on the device. One reader gets the message itself: of
    /// those that hold the writer up the first that is where it is, else the last. [`check`](Self::check) lists the copies that this makes. The
    /// writer waits for the slowest.
    ///
    /// An [`Input`](crate::Input) is connected once, [`Inputs`](crate::Inputs) any number of times.
    ///
    /// What is wrong with it (a port of another flow, or one that is connected already) is reported when the flow runs,
    /// with everything else that is.
    pub fn connect<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>) {
        self.connect_with(from, to, Hub::default());
    }

    /// As [`connect`](Self::connect), with a hub of another kind for each input that has none of its own
    /// ([`InputHandle::with`](crate::operator::InputHandle::with)).
    pub fn connect_with<M: Message>(&mut self, from: OutputHandle<M>, to: impl Targets<M>, hub: impl HubOf<M>) {
        for connect::Target { to, hub, make, forks } in to.targets(hub.kind()) {
            self.connections.push(Connection { from: from.id, to, hub, make, forks });
        }
    }

    /// Finds out what can be known without running: what is wrong, and what may not be expected.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every problem of how it was put together, as [`run`](Self::run).
    pub fn check(&self) -> Result<Checked> {
        check::plan(self).map(|planned| planned.checked)
    }

    /// Runs the flow to its end, on the present tokio runtime. It can be run again: the operators go on from where they
    /// are.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every problem of how it was put together, before anything runs; an
    /// operator's failure, with its name; [`Stalled`](ErrorKind::Stalled) if nothing can move though not all is done.
    ///
    /// # Cancel safety
    /// Dropping the future aborts the flow: every operator's `stop` still runs, in the background, while the runtime
    /// lives. The operators are gone with it: a further `run` is an error.
    pub async fn run(&mut self) -> Result<Report> {
        let mut running = self.launch(true, false)?;
        let outcome = (&mut running).await;
        for (operator, mut seat) in running.seats() {
            let entry = &mut self.entries[operator];
            lock(&entry.place).conditions = seat.conditions();
            entry.seat = Some(seat);
        }
        outcome
    }

    /// Runs the flow in the background, on the present tokio runtime. Each operator is dropped after its `stop`, before
    /// the [`Running`] resolves.
    ///
    /// # Errors
    /// As [`run`](Self::run), for what can be known before anything runs.
    pub fn spawn(mut self) -> Result<Running> {
        self.launch(false, false)
    }

    /// `keep`: the operators are wanted back.
    /// `stepped`: no run begins, and no hub moves anything, but by hand.
    fn launch(&mut self, keep: bool, stepped: bool) -> Result<Running> {
        let check::Planned { links: plans, checked, sections } = check::plan(self)?;
        spawn::require_runtime(self.threads)?;
        checked.trace(&self.name);
        if self.entries.iter().any(|entry| entry.seat.is_none()) {
            let text = format!("flow `{}` was aborted: its operators are gone", self.name);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let own_threads = self.own_threads()?;
        let names = self.entries.iter().map(|entry| entry.name.clone()).collect();
        let shared = sections.iter().map(|plan| Shared { name: plan.name.clone(), operators: plan.members.clone() });
        let control = Control::new(self.name.clone(), names, shared.collect());
        if stepped {
            control.set_stepped(true);
        }
        let how = How { mode: self.mode, timed: self.device_times };
        let (gates, spawn) = (self.gates.clone(), spawn::spawner(self.threads));
        let surroundings = Arc::new(Surroundings { how, gates, control: control.clone(), spawn });
        let mut crew = Vec::with_capacity(self.entries.len());
        for (index, (entry, node)) in self.entries.iter_mut().zip(&control.nodes).enumerate() {
            let Some(mut seat) = entry.seat.take() else { continue };
            let mut place = lock(&entry.place);
            let device = place.device.clone().unwrap_or_else(Device::host);
            let setting = Setting {
                name: entry.name.clone(),
                device: device.clone(),
                streams: place.streams(),
                allocator: place.allocator.clone(),
                conditions: std::mem::take(&mut place.conditions),
                merge: place.merge,
            };
            seat.enter(setting, node.clone(), surroundings.clone());
            crew.push(drive::Member { index, name: entry.name.clone(), device, seat });
        }
        let joints: Vec<_> = plans
            .into_iter()
            .zip(&self.connections)
            .map(|(mut plan, connection)| {
                plan.stepped = stepped;
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::Joint {
                    plan,
                    make: connection.make.clone(),
                    from: port(connection.from),
                    to: port(connection.to),
                    writer_waits: check::waits_at(self, connection.from),
                    reader_waits: check::waits_at(self, connection.to),
                }
            })
            .collect();
        let links = self.links.iter().map(|link| drive::ToLink {
            linking: link.clone(),
            port: self.entries[link.port.operator].ports[link.port.port].name,
        });
        let (links, threads) = (links.collect(), self.threads);
        let sections = sections.into_iter().map(|plan| section::Start {
            interior: plan.interior.iter().map(|at| joints[*at].clone()).collect(),
            mode: self.mode,
            told: section::Told::new(&plan.name),
            plan,
        });
        let sections = sections.collect();
        Ok(drive::launch(drive::Start { control, crew, threads, own_threads, joints, links, sections, keep }))
    }

    fn hub_names(&self) -> Vec<Arc<str>> {
        self.connections.iter().map(|connection| check::hub_name(self, connection).into()).collect()
    }

    /// The threads of those operators that have one of their own.
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
