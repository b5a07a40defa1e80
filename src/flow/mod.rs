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

mod added;
mod blank_queue;
mod check;
mod checked;
mod closed;
mod components;
mod connect;
mod cycles;
mod door;
mod drive;
mod egress;
mod hubs;
mod ingress;
mod keeper;
mod link;
mod local;
mod looks;
mod on_stall;
mod report;
mod running;
mod section;
mod service;
mod spawn;
mod starting;
mod steps;
mod thread;
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
#[doc(hidden)]
pub use connect::Target;
pub use connect::{Branch, Targets};
pub use cycles::{Cycle, Feed};
pub use egress::Egress;
pub use ingress::{Ingress, SendError};
pub use local::LocalFlow;
pub use on_stall::OnStall;
pub use report::{DeviceReport, HubReport, OperatorReport, Report, SectionReport};
pub use running::Running;
#[doc(hidden)]
pub use section::AnyAdded;
pub use section::{Operators, Section};
pub use service::{ResponseFuture, Service};
pub use steps::{Step, Steps};

pub use crate::operator::{Changes, Handle, OperatorStatus};

use crate::{
    condition::{Gate, Gates, PortId},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{Hub, HubOf, Message},
    operator::{
        Operator, OutputHandle, Plan, PortDecl, Ports,
        control::{Control, Section as Shared},
        seat::{self, How, Setting, Surroundings},
    },
    stream::CompletionMode,
    sync::{Mutex, lock},
};
use added::Place;
use drive::OwnSeat;
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
    on_stall: OnStall,
    gates: Gates,
    threads: Threads,
}

/// An operator of a flow.
struct Entry {
    name: Arc<str>,
    /// Away while the flow runs.
    seat: Option<OwnSeat>,
    ports: Vec<PortDecl>,
    place: Arc<Mutex<Place>>,
    /// It cannot leave its thread.
    stays: bool,
    /// Tasks that its runs go on in, beside its own.
    workers: usize,
}

struct Connection {
    from: PortId,
    to: PortId,
    hub: Hub,
    make: connect::MakeLink,
    /// Its output may have others.
    forks: bool,
}

/// How often a flow is checked to whose operators conditions are added meanwhile.
const MOST_CHECKS: usize = 16;

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
            on_stall: OnStall::default(),
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

    /// What becomes of the flow when some of its operators have stalled: by default it fails. See [`OnStall`].
    pub fn on_stall(&mut self, on_stall: OnStall) {
        self.on_stall = on_stall;
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
        let workers = operator.workers();
        let (seat, plan, handles) = seat::seat(operator, self.id, self.entries.len());
        let (name, place) = self.add_seat(name.into(), workers, seat, plan);
        Added { handles, name, place }
    }

    fn add_seat(
        &mut self,
        name: String,
        workers: usize,
        seat: seat::Seat,
        plan: Plan,
    ) -> (Arc<str>, Arc<Mutex<Place>>) {
        let name: Arc<str> = name.into();
        let place = Arc::new(Mutex::new(Place { conditions: plan.conditions, ..Place::default() }));
        self.entries.push(Entry {
            name: name.clone(),
            seat: Some(OwnSeat::new(seat, &self.name, &name)),
            ports: plan.ports,
            place: place.clone(),
            stays: false,
            workers,
        });
        (name, place)
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
        self.planned().map(|(planned, _)| planned.checked)
    }

    /// Runs the flow to its end, on the present tokio runtime. It can be run again: the operators go on from where they
    /// are.
    ///
    /// # Errors
    /// [`Setup`](ErrorKind::Setup) with every problem of how it was put together, before anything runs; an
    /// operator's failure, with its name; [`Stalled`](ErrorKind::Stalled) if nothing can move though not all is done.
    /// What had run by then is in the error's [report](Error::report).
    ///
    /// # Cancel safety
    /// Dropping the future aborts the flow: every operator's `stop` still runs, in the background, while the runtime
    /// lives. The operators are gone with it: a further `run` is an error.
    pub async fn run(&mut self) -> Result<Report> {
        let mut running = self.launch(true, false)?;
        let outcome = (&mut running).await;
        for (operator, mut seat) in running.seats() {
            let entry = &mut self.entries[operator];
            // Those that were added while it ran come after them.
            let mut conditions = seat.conditions();
            let mut place = lock(&entry.place);
            conditions.append(&mut place.conditions);
            place.conditions = conditions;
            drop(place);
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
        let (check::Planned { links: plans, checked, sections, unbegun }, conditions) = self.planned()?;
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
            control.set_stepped();
        }
        let how = How { mode: self.mode, timed: self.device_times };
        let (gates, spawn) = (self.gates.clone(), spawn::spawner(self.threads));
        let surroundings = Arc::new(Surroundings { how, gates, control: control.clone(), spawn });
        // Before the operators take their conditions along.
        let waits = |connection: &Connection| {
            let Connection { from, to, .. } = *connection;
            (check::waits_at(self, from), check::waits_at(self, to), check::waits_for_each(self, to))
        };
        let waits: Vec<_> = self.connections.iter().map(waits).collect();
        let mut crew = Vec::with_capacity(self.entries.len());
        for (index, (entry, node)) in self.entries.iter_mut().zip(&control.nodes).enumerate() {
            let Some(mut seat) = entry.seat.take() else { continue };
            let mut place = lock(&entry.place);
            // Those that were checked. What is added from here on is for the next run.
            let own = conditions.get(index).map_or(0, |count| place.conditions.len().min(*count));
            let device = place.device.clone().unwrap_or_else(Device::host);
            let setting = Setting {
                name: entry.name.clone(),
                device: device.clone(),
                streams: place.streams(),
                allocator: place.allocator.clone(),
                conditions: place.conditions.drain(..own).collect(),
                merge: place.merge,
                may_block: place.own_thread.is_some(),
            };
            let fills = place.fills.clone();
            // Conditions of the user's are asked there.
            drop(place);
            seat.enter(setting, node.clone(), surroundings.clone());
            crew.push(drive::Member { index, name: entry.name.clone(), device, seat, fills });
        }
        let joints: Vec<_> = plans
            .into_iter()
            .zip(self.connections.iter().zip(waits))
            .map(|(mut plan, (connection, (writer_waits, reader_waits, of_each)))| {
                plan.stepped = stepped;
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::Joint {
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
        let sections = sections.into_iter().map(|plan| section::Start {
            interior: plan.interior.iter().map(|at| joints[*at].clone()).collect(),
            mode: self.mode,
            told: section::Told::new(&plan.name),
            plan,
        });
        let sections = sections.collect();
        Ok(drive::launch(drive::Start {
            flow: self.id,
            control,
            crew,
            threads,
            own_threads,
            joints,
            links,
            sections,
            unbegun,
            keep,
            on_stall: self.on_stall,
        }))
    }

    /// The flow's plan, and how many conditions each operator had in it: all those that it has by now.
    fn planned(&self) -> Result<(check::Planned, Vec<usize>)> {
        // Another thread may add conditions meanwhile, and so may those that are asked.
        let counts = || self.entries.iter().map(|entry| lock(&entry.place).conditions.len()).collect::<Vec<_>>();
        for _ in 0..MOST_CHECKS {
            let (before, planned) = (counts(), check::plan(self)?);
            if before == counts() {
                return Ok((planned, before));
            }
        }
        let text = "conditions are added to its operators each time that it is checked: add them before";
        Err(Error::new(ErrorKind::Setup, text).at(format!("flow `{}`", self.name)))
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
