//! Flows: operators and how they are joined; built, checked, run.
//!
//! ```text
//!   add, connect ──> check (all problems at once) ──> hubs ──> kernels ──> start, run, stop ──> Report
//! ```

mod check;
mod checked;
mod connect;
mod drive;
mod report;
mod running;
mod spawn;

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
pub use report::{HubReport, OperatorReport, Report};
pub use running::Running;

use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{Hub, HubOf, Message},
    operator::{
        Operator, OutputHandle, PortDecl, PortId, Ports,
        lane::OwnStreams,
        seat::{self, How, Seat},
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
        self.entries.push(Entry { name: name.clone(), seat: Some(seat), ports, place: place.clone() });
        Added { handles, name, place }
    }

    /// Joins an output to an input by a hub: a queue of one, two envelopes on each side, sizes from the output's
    /// declaration or from the envelopes that are passed on. Or to several inputs, each by a hub of its own:
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
        check::plan(self).map(|(_, checked)| checked)
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
        for (entry, seat) in self.entries.iter_mut().zip(running.seats()) {
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
        let (plans, checked) = check::plan(self)?;
        spawn::require_runtime()?;
        checked.trace(&self.name);
        let crew = self.entries.iter_mut().map(|entry| {
            let (device, streams) = {
                let place = lock(&entry.place);
                (place.device.clone().unwrap_or_else(Device::host), place.streams.clone())
            };
            let seat = entry.seat.take().ok_or_else(|| {
                Error::new(ErrorKind::Usage, format!("flow `{}` was aborted: its operators are gone", self.name))
            })?;
            Ok(drive::Member { name: entry.name.clone(), device, streams, seat })
        });
        let crew = crew.collect::<Result<Vec<_>>>()?;
        let hubs = plans
            .into_iter()
            .zip(&self.connections)
            .map(|(plan, connection)| {
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::Joint {
                    plan,
                    make: connection.make.clone(),
                    from: port(connection.from),
                    to: port(connection.to),
                }
            })
            .collect();
        Ok(drive::launch(self.name.clone(), crew, hubs, How { mode: self.mode, timed: self.device_times }))
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
