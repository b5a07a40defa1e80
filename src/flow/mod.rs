//! Flows: operators and how they are joined; built, checked, run.
//!
//! ```text
//!   add, connect ──> check (all problems at once) ──> hubs ──> kernels ──> start, run, stop ──> Report
//! ```

mod check;
mod drive;
mod local;
mod report;
mod running;
mod spawn;
mod thread;

use std::{
    any::Any,
    fmt,
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

pub use local::LocalFlow;
pub use report::{OperatorReport, Report};
pub use running::Running;

use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{
        Hub, Message,
        link::{self, HubState, LinkPlan},
    },
    operator::{
        InputHandle, Operator, OutputHandle, PortDecl, PortId, Ports,
        lane::OwnStreams,
        seat::{self, How, Seat},
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
    mode: CompletionMode,
    device_times: bool,
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
}

/// Where an operator is to run.
#[derive(Debug, Default)]
struct Place {
    device: Option<Device>,
    streams: OwnStreams,
    own_thread: Option<ThreadPlan>,
}

/// An operator's own thread, as asked for.
#[derive(Clone, Copy, Debug)]
struct ThreadPlan {
    core: Option<usize>,
}

/// One end of a hub, for the port that it belongs to.
type End = Box<dyn Any + Send>;
type MakeLink = fn(LinkPlan) -> Result<(End, End, Arc<dyn HubState>)>;

struct Connection {
    from: PortId,
    to: PortId,
    hub: Hub,
    make: MakeLink,
}

fn make_link<M: Message>(plan: LinkPlan) -> Result<(End, End, Arc<dyn HubState>)> {
    let (sender, receiver, state) = link::link::<M>(plan)?;
    Ok((Box::new(sender), Box::new(receiver), state))
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
        lock(&self.place).streams = OwnStreams::Pool(pool.clone());
        self
    }

    /// Gives the operator no stream of its own: it works on the streams of the messages that it is given. See
    /// [`Cx::stream`](crate::Cx::stream).
    #[must_use]
    pub fn without_own_stream(self) -> Self {
        lock(&self.place).streams = OwnStreams::None;
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
            mode: CompletionMode::default(),
            device_times: false,
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

    /// Adds an operator under a name of its own, and returns its ports' handles.
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        let name: Arc<str> = name.into().into();
        let place = Arc::new(Mutex::new(Place::default()));
        let (seat, ports, handles) = seat::seat(operator, self.id, self.entries.len());
        self.entries.push(Entry { name: name.clone(), seat: Some(seat), ports, place: place.clone(), stays: false });
        Added { handles, name, place }
    }

    /// Joins an output to an input by a hub: a queue of one, two envelopes on each side, sizes from the output's
    /// declaration or from the envelopes that are passed on.
    ///
    /// An output is connected once, and so is an [`Input`](crate::Input); [`Inputs`](crate::Inputs) any number of times.
    ///
    /// What is wrong with it (a port of another flow, or one that is connected already) is reported when the flow runs,
    /// with everything else that is.
    pub fn connect<M: Message>(&mut self, from: OutputHandle<M>, to: InputHandle<M>) {
        self.connect_with(from, to, Hub::default());
    }

    /// As [`connect`](Self::connect), with a hub of another size.
    pub fn connect_with<M: Message>(&mut self, from: OutputHandle<M>, to: InputHandle<M>, hub: Hub) {
        self.connections.push(Connection { from: from.id, to: to.id, hub, make: make_link::<M> });
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
        let mut running = self.launch(true)?;
        let outcome = (&mut running).await;
        for (operator, seat) in running.seats() {
            self.entries[operator].seat = Some(seat);
        }
        outcome
    }

    /// Runs the flow in the background, on the present tokio runtime. Each operator is dropped after its `stop`, before
    /// the [`Running`] resolves.
    ///
    /// # Errors
    /// As [`run`](Self::run), for what can be known before anything runs.
    pub fn spawn(mut self) -> Result<Running> {
        self.launch(false)
    }

    /// `keep`: the operators are wanted back.
    fn launch(&mut self, keep: bool) -> Result<Running> {
        let plans = check::plan(self)?;
        spawn::require_runtime(self.threads)?;
        let own_threads = self.own_threads()?;
        let crew = self.entries.iter_mut().enumerate().map(|(index, entry)| {
            let (device, streams) = {
                let place = lock(&entry.place);
                (place.device.clone().unwrap_or_else(Device::host), place.streams.clone())
            };
            let seat = entry.seat.take().ok_or_else(|| {
                Error::new(ErrorKind::Usage, format!("flow `{}` was aborted: its operators are gone", self.name))
            })?;
            Ok(drive::Member { index, name: entry.name.clone(), device, streams, seat })
        });
        let crew = crew.collect::<Result<Vec<_>>>()?;
        let joints = plans
            .into_iter()
            .zip(&self.connections)
            .map(|(plan, connection)| {
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::Joint { plan, make: connection.make, from: port(connection.from), to: port(connection.to) }
            })
            .collect();
        let how = How { mode: self.mode, timed: self.device_times };
        Ok(drive::launch(drive::Start {
            name: self.name.clone(),
            crew,
            threads: self.threads,
            own_threads,
            joints,
            how,
            keep,
        }))
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
