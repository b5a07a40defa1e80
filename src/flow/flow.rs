//! [`Flow`], and the methods that every program calls.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Added, Checked, Connection, FlowObserver, OnStall, OperatorEntry, Report, Running, Section, Targets,
    added::OperatorSlot, connect, drive::OwnedOperator, link::Linking, spawn::Threads,
};
use crate::{
    condition::{Gate, Gates},
    error::Result,
    hub::{HubOptions, HubOptionsFor, Message},
    operator::{Operator, OutputHandle, Plan, Ports, erased},
    stream::CompletionMode,
    sync::{Mutex, lock},
};

/// A pipeline: operators, and the hubs that connect them. [Add](Self::add) and [connect](Self::connect) operators, then
/// [`run`](Self::run) or [`spawn`](Self::spawn) it.
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
    pub(super) name: Arc<str>,
    pub(super) id: u64,
    pub(super) entries: Vec<OperatorEntry>,
    pub(super) connections: Vec<Connection>,
    pub(super) links: Vec<Linking>,
    pub(super) sections: Vec<Section>,
    pub(super) mode: CompletionMode,
    pub(super) device_times: bool,
    pub(super) on_stall: OnStall,
    pub(super) gates: Gates,
    pub(super) threads: Threads,
    pub(super) observers: Vec<Arc<dyn FlowObserver>>,
}

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
            observers: Vec::new(),
        }
    }

    /// Adds an operator under a unique name, and returns the handles of its ports.
    pub fn add<O: Operator>(&mut self, name: impl Into<String>, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        let workers = operator.workers();
        let (operator, plan, handles) = erased::boxed(operator, self.id, self.entries.len());
        let (name, place) = self.add_boxed(name.into(), workers, operator, plan);
        Added { handles, name, place }
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
    /// [`Setup`](crate::ErrorKind::Setup) with every mistake in the setup, like [`run`](Self::run).
    pub fn check(&self) -> Result<Checked> {
        self.planned().map(|(planned, _)| planned.checked)
    }

    /// Runs the flow to its end, on the current tokio runtime. It can be run again: the operators keep their state.
    ///
    /// # Errors
    /// [`Setup`](crate::ErrorKind::Setup) with every mistake in the setup, before anything runs; the failure of an operator,
    /// with its name; [`Stalled`](crate::ErrorKind::Stalled) if no operator can make progress although work is left. The error
    /// has a [report](crate::Error::report) of what had run.
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

    /// Sets how the streams of the flow's operators and hubs detect that their work is done. An operator may override
    /// this for its own stream.
    pub fn set_completion_mode(&mut self, mode: CompletionMode) {
        self.mode = mode;
    }

    /// Measures and reports the device time of each run's work in the operator's own stream
    /// ([`OperatorReport::device`](super::OperatorReport::device)). Off by default. It costs two timed event records per run, and two for each wait for
    /// another stream in the middle of a run, 1.3 us each on an H200 (`guide/facts.md`). Nothing waits for the device because of it.
    pub fn set_device_times(&mut self, on: bool) {
        self.device_times = on;
    }

    /// False if the flow has one that records to the same place.
    pub(crate) fn add_observer(&mut self, observer: Arc<dyn FlowObserver>) -> bool {
        let is_new = self.observers.iter().all(|other| other.records_to() != observer.records_to());
        if is_new {
            self.observers.push(observer);
        }
        is_new
    }

    /// Sets how the flow reacts when some of its operators have stalled. By default it fails. See [`OnStall`].
    pub fn set_on_stall(&mut self, on_stall: OnStall) {
        self.on_stall = on_stall;
    }

    /// The flow's name.
    pub fn name(&self) -> &str {
        &self.name
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
