//! Flows: operators and how they are joined; built, checked, run.
//!
//! ```text
//!   add, connect ──> check (all problems at once) ──> hubs ──> kernels ──> start, run, stop ──> Report
//! ```
//!
//! A flow within a program is talked to by an [`Ingress`], an [`Egress`], or a [`Service`], which is both: handles that are
//! used from any task or thread while it runs.

mod check;
mod door;
mod drive;
mod egress;
mod ingress;
mod report;
mod running;
mod service;
mod spawn;

use std::{
    any::Any,
    fmt,
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

pub use egress::Egress;
pub use ingress::{Ingress, SendError};
pub use report::{OperatorReport, Report};
pub use running::Running;
pub use service::{ResponseFuture, Service};

pub use crate::operator::{Changes, Handle, OperatorStatus};

use crate::{
    condition::{Gate, Gates, IntoCondition, PortId, When},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{
        Hub, MergePolicy, Message,
        link::{self, HubState, LinkPlan},
    },
    operator::{
        InputHandle, Operator, OutputHandle, PortDecl, Ports,
        control::Control,
        lane::OwnStreams,
        seat::{self, How, Seat, Setting, Surroundings},
    },
    stream::{CompletionMode, StreamPool},
    sync::lock,
};

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
    gates: Gates,
}

/// An operator of a flow.
struct Entry {
    name: Arc<str>,
    /// Away while the flow runs.
    seat: Option<Box<dyn Seat>>,
    ports: Vec<PortDecl>,
    place: Arc<Mutex<Place>>,
}

/// Where an operator is to run.
#[derive(Debug, Default)]
struct Place {
    device: Option<Device>,
    streams: OwnStreams,
    /// Away while the flow runs.
    conditions: Vec<When>,
    merge: MergePolicy,
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
            gates: Gates::default(),
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
        let (seat, plan, handles) = seat::seat(operator, self.id, self.entries.len());
        let place = Arc::new(Mutex::new(Place { conditions: plan.conditions, ..Place::default() }));
        self.entries.push(Entry { name: name.clone(), seat: Some(seat), ports: plan.ports, place: place.clone() });
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
        let mut running = self.launch()?;
        let outcome = (&mut running).await;
        for (entry, mut seat) in self.entries.iter_mut().zip(running.seats()) {
            lock(&entry.place).conditions = seat.conditions();
            entry.seat = Some(seat);
        }
        outcome
    }

    /// Runs the flow in the background, on the present tokio runtime.
    ///
    /// # Errors
    /// As [`run`](Self::run), for what can be known before anything runs.
    pub fn spawn(mut self) -> Result<Running> {
        self.launch()
    }

    fn launch(&mut self) -> Result<Running> {
        let plans = check::plan(self)?;
        spawn::require_runtime()?;
        if self.entries.iter().any(|entry| entry.seat.is_none()) {
            let text = format!("flow `{}` was aborted: its operators are gone", self.name);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let control = Control::new(self.name.clone(), self.entries.iter().map(|entry| entry.name.clone()).collect());
        let how = How { mode: self.mode, timed: self.device_times };
        let surroundings = Arc::new(Surroundings { how, gates: self.gates.clone(), control: control.clone() });
        let mut crew = Vec::with_capacity(self.entries.len());
        for (entry, node) in self.entries.iter_mut().zip(&control.nodes) {
            let Some(mut seat) = entry.seat.take() else { continue };
            let mut place = lock(&entry.place);
            let device = place.device.clone().unwrap_or_else(Device::host);
            let setting = Setting {
                name: entry.name.clone(),
                device: device.clone(),
                streams: place.streams.clone(),
                conditions: std::mem::take(&mut place.conditions),
                merge: place.merge,
            };
            seat.enter(setting, node.clone(), surroundings.clone());
            crew.push(drive::Member { name: entry.name.clone(), device, seat });
        }
        let hubs = plans
            .into_iter()
            .zip(&self.connections)
            .map(|(plan, connection)| {
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                let waits = check::waits_for(self, connection.to);
                drive::Joint {
                    plan,
                    make: connection.make,
                    from: port(connection.from),
                    to: port(connection.to),
                    waits,
                }
            })
            .collect();
        Ok(drive::launch(control, crew, hubs))
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
