//! The paths of messages: their times and parts in simulated flows, against what the operators note themselves.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use common::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::time::{Instant, sleep};
use wakeline::{
    Inputs,
    flow::Branch,
    device::Simulation,
    observe::{Observe, PathParts, Snapshot},
    operator::OutputHandle,
    prelude::*,
};

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// How long a launch of `busy` takes.
const BUSY: Duration = Duration::from_millis(3);
const COPY: Duration = Duration::from_millis(2);

/// When each run's launches ended.
static LAUNCHES: LazyLock<Mutex<HashMap<u32, Vec<Instant>>>> = LazyLock::new(Mutex::default);
static RUNS: AtomicU32 = AtomicU32::new(0);

#[kernel]
fn busy(out: &mut [u32], run: u32) {
    out[0] = run;
    lock(&LAUNCHES).entry(run).or_default().push(Instant::now());
}

/// What the operators note of a message.
#[derive(Clone, Debug, Message)]
struct Item {
    uid: u64,
    origin: Instant,
    stages: Vec<Stage>,
}

#[derive(Clone, Debug)]
struct Stage {
    operator: usize,
    taken: Instant,
    left: Instant,
    run: Option<u32>,
}

/// What a test finds out about a flow.
#[derive(Default)]
struct Notes {
    /// Messages that ended, with the end.
    ended: Mutex<Vec<Item>>,
    /// Messages that were sent and taken, each counted for every reader.
    sent: AtomicU64,
    taken: AtomicU64,
    uid: AtomicU64,
    /// Latest values that were read.
    read: Mutex<HashSet<(usize, u64)>>,
}

#[derive(Clone)]
struct Node {
    operator: usize,
    notes: Arc<Notes>,
    readers: Arc<AtomicU64>,
    random: Arc<Mutex<StdRng>>,
    /// Messages are now and then passed to no one.
    filters: bool,
    launches: bool,
    buffer: Arc<tokio::sync::Mutex<Option<Buffer<u32>>>>,
}

impl Node {
    async fn pause(&self) {
        let (pauses, time) = {
            let mut random = lock(&self.random);
            (random.random_bool(0.6), random.random_range(0..6))
        };
        if pauses {
            sleep(ms(time)).await;
        }
    }

    /// Launches up to two kernels, and may wait for them.
    async fn work(&self, cx: &mut Cx) -> Result<Option<u32>> {
        if !self.launches {
            return Ok(None);
        }
        let (count, waits) = {
            let mut random = lock(&self.random);
            (random.random_range(0..3), random.random_bool(0.3))
        };
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let mut buffer = self.buffer.lock().await;
        if buffer.is_none() {
            *buffer = Some(cx.alloc::<u32>(1)?);
        }
        let Some(buffer) = buffer.as_mut() else { return Ok(None) };
        for _ in 0..count {
            busy::launch(cx.stream()?, buffer, run)?;
        }
        if waits {
            cx.stream()?.completed().await?;
        }
        Ok(Some(run))
    }

    /// The oldest of those that were taken, as the run has it.
    fn merged(taken: Vec<Option<(Item, Instant)>>) -> Option<(Item, Instant)> {
        let mut oldest: Option<(Item, Instant)> = None;
        for next in taken.into_iter().flatten() {
            if oldest.as_ref().is_none_or(|(first, _)| next.0.origin < first.origin) {
                oldest = Some(next);
            }
        }
        oldest
    }

    /// `None` for a latest value that was read before.
    fn take(&self, item: Item, is_latest: bool) -> Option<(Item, Instant)> {
        if is_latest && !lock(&self.notes.read).insert((self.operator, item.uid)) {
            return None;
        }
        self.notes.taken.fetch_add(1, Ordering::Relaxed);
        Some((item, Instant::now()))
    }

    /// What goes on, or ends, after the run's work.
    async fn pass(&self, merged: Option<(Item, Instant)>, cx: &mut Cx) -> Result<Option<Item>> {
        self.pause().await;
        let run = self.work(cx).await?;
        let Some((mut item, taken)) = merged else { return Ok(None) };
        item.stages.push(Stage { operator: self.operator, taken, left: Instant::now(), run });
        item.uid = self.notes.uid.fetch_add(1, Ordering::Relaxed);
        let sends = !self.filters || lock(&self.random).random_bool(0.7);
        if sends && self.readers.load(Ordering::Relaxed) > 0 {
            return Ok(Some(item));
        }
        lock(&self.notes.ended).push(item);
        Ok(None)
    }

    fn count_sent(&self) {
        self.notes.sent.fetch_add(self.readers.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[derive(Ports)]
struct TwoPorts {
    #[input]
    first: Input<Item>,
    #[input]
    second: Input<Item>,
    #[output]
    output: Output<Item>,
}

/// Takes one from each.
struct Two {
    node: Node,
    latest: bool,
}

impl Operator for Two {
    type Ports = TwoPorts;

    async fn compute(&mut self, ports: &mut TwoPorts, cx: &mut Cx) -> Result<()> {
        let first = self.node.take(ports.first.take()?, false);
        self.node.pause().await;
        let second = self.node.take(ports.second.take()?, self.latest);
        if let Some(item) = self.node.pass(Node::merged(vec![first, second]), cx).await? {
            self.node.count_sent();
            ports.output.send(item).await?;
        }
        Ok(())
    }
}

/// Takes one, and sends one or none.
struct One(Node);

impl Operator for One {
    type Ports = MapPorts<Item, Item>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let taken = self.0.take(ports.input.take()?, false);
        if let Some(item) = self.0.pass(taken, cx).await? {
            self.0.count_sent();
            ports.output.send(item).await?;
        }
        Ok(())
    }
}

/// Takes one, and ends it.
struct Last(Node);

impl Operator for Last {
    type Ports = SinkPorts<Item>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let taken = self.0.take(ports.input.take()?, false);
        self.0.pass(taken, cx).await.map(drop)
    }
}

#[derive(Ports)]
struct RoundPorts {
    #[input(at_least = 1)]
    items: Inputs<Item>,
    #[output]
    again: Output<Item>,
    #[output]
    output: Output<Item>,
}

/// Sends a message around, some times.
struct Round(Node);

impl Operator for Round {
    type Ports = RoundPorts;

    async fn compute(&mut self, ports: &mut RoundPorts, cx: &mut Cx) -> Result<()> {
        let Some((_, item)) = ports.items.try_take_any()? else { return Ok(()) };
        let taken = self.0.take(item, false);
        let Some(item) = self.0.pass(taken, cx).await? else { return Ok(()) };
        let again = lock(&self.0.random).random_bool(0.5);
        if again {
            self.0.notes.sent.fetch_add(1, Ordering::Relaxed);
            return Ok(ports.again.send(item).await?);
        }
        self.0.count_sent();
        Ok(ports.output.send(item).await?)
    }
}

fn emit(node: Node, mut left: u32) -> impl Operator<Ports = SourcePorts<Item>> {
    source(move || {
        let node = node.clone();
        let is_over = left == 0;
        left = left.saturating_sub(1);
        async move {
            if is_over {
                return Ok(None);
            }
            node.pause().await;
            node.count_sent();
            let (uid, origin) = (node.notes.uid.fetch_add(1, Ordering::Relaxed), Instant::now());
            let stage = Stage { operator: node.operator, taken: origin, left: origin, run: None };
            Ok(Some(Item { uid, origin, stages: vec![stage] }))
        }
    })
}

/// Makes a flow, and keeps what the test has to know of it.
struct Maker {
    flow: Flow,
    random: StdRng,
    device: Device,
    notes: Arc<Notes>,
    nodes: Vec<Node>,
    outputs: Vec<Written>,
}

/// An output, and the inputs that read from it.
struct Written {
    node: Node,
    output: OutputHandle<Item>,
    readers: Vec<Branch<Item>>,
}

impl Maker {
    fn new(seed: u64, simulation: &Simulation) -> Self {
        let config = Emulated::new().kernel_time("busy", BUSY).copy_time(COPY);
        Self {
            flow: Flow::new("paths"),
            random: StdRng::seed_from_u64(seed),
            device: Device::simulated(simulation, config),
            notes: Arc::default(),
            nodes: Vec::new(),
            outputs: Vec::new(),
        }
    }

    fn node(&mut self) -> Node {
        let node = Node {
            operator: self.nodes.len(),
            notes: self.notes.clone(),
            readers: Arc::default(),
            random: Arc::new(Mutex::new(StdRng::seed_from_u64(self.random.random()))),
            filters: self.random.random_bool(0.2),
            launches: false,
            buffer: Arc::default(),
        };
        self.nodes.push(node.clone());
        node
    }

    fn name(node: &Node) -> String {
        format!("op {}", node.operator)
    }

    fn hub(&mut self) -> HubOptions {
        let capacity = self.random.random_range(1..4);
        match self.random.random_range(0..6) {
            0 => HubOptions::drop_oldest(capacity),
            1 => HubOptions::drop_newest(capacity),
            _ => HubOptions::bounded(capacity),
        }
    }

    fn add_source(&mut self) {
        let node = self.node();
        let count = self.random.random_range(4..12);
        let added = self.flow.add(Self::name(&node), emit(node.clone(), count));
        self.outputs.push(Written { node, output: added.output, readers: Vec::new() });
    }

    /// The number of one of the outputs so far.
    fn output(&mut self) -> usize {
        self.random.random_range(0..self.outputs.len())
    }

    fn connect(&mut self, from: usize, to: impl Into<Branch<Item>>) {
        let written = &mut self.outputs[from];
        written.node.readers.fetch_add(1, Ordering::Relaxed);
        written.readers.push(to.into());
    }

    fn add_one(&mut self) {
        let from = self.output();
        let mut node = self.node();
        node.launches = self.random.random_bool(0.5);
        let launches = node.launches;
        let added = self.flow.add(Self::name(&node), One(node.clone()));
        let added = if launches { added.on(&self.device) } else { added };
        let hub = self.hub();
        self.connect(from, added.input.with(hub));
        self.outputs.push(Written { node, output: added.output, readers: Vec::new() });
    }

    fn add_two(&mut self) {
        let (first, second) = (self.output(), self.output());
        let node = self.node();
        let latest = self.random.random_bool(0.5);
        let added = self.flow.add(Self::name(&node), Two { node: node.clone(), latest });
        let hub = self.hub();
        self.connect(first, added.first.with(hub));
        let hub = self.hub();
        let latest = if latest { added.second.with(HubOptions::latest()) } else { added.second.with(hub) };
        self.connect(second, latest);
        self.outputs.push(Written { node, output: added.output, readers: Vec::new() });
    }

    fn add_round(&mut self) {
        let from = self.output();
        let mut node = self.node();
        node.filters = false;
        let added = self.flow.add(Self::name(&node), Round(node.clone()));
        self.connect(from, added.items.with(HubOptions::bounded(1)));
        self.flow.connect_with(added.again, added.items, HubOptions::bounded(16));
        self.outputs.push(Written { node, output: added.output, readers: Vec::new() });
    }

    fn add_sink(&mut self, from: usize) {
        let mut node = self.node();
        node.launches = self.random.random_bool(0.3);
        let launches = node.launches;
        let added = self.flow.add(Self::name(&node), Last(node.clone()));
        let added = if launches { added.on(&self.device) } else { added };
        let hub = self.hub();
        self.connect(from, added.input.with(hub));
    }
}

/// The latency and the parts, instant by instant.
fn by_force(item: &Item) -> (Duration, PathParts) {
    let launches = lock(&LAUNCHES);
    let work = |stage: &Stage| {
        let ends = stage.run.and_then(|run| launches.get(&run)).cloned().unwrap_or_default();
        ends.into_iter().map(|end| (end - BUSY, end))
    };
    let (origin, last) = (item.origin, &item.stages[item.stages.len() - 1]);
    let end = work(last).map(|(_, end)| end).fold(last.left, Instant::max);
    let mut parts = PathParts::default();
    let mut at = origin;
    while at < end {
        let is_in = |(from, to): (Instant, Instant)| from <= at && at < to;
        let part = match () {
            () if item.stages.iter().flat_map(work).any(is_in) => &mut parts.device,
            () if item.stages.iter().any(|stage| is_in((stage.taken, stage.left))) => &mut parts.host,
            () => &mut parts.queued,
        };
        *part += ms(1);
        at += ms(1);
    }
    (end - origin, parts)
}

fn names(item: &Item) -> Vec<String> {
    let mut names = Vec::new();
    for stage in &item.stages {
        let name = format!("op {}", stage.operator);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn check(seed: u64, notes: &Notes, snapshot: &Snapshot) {
    let mut expected = BTreeMap::<Vec<String>, Vec<(Duration, PathParts)>>::new();
    for item in lock(&notes.ended).iter() {
        expected.entry(names(item)).or_default().push(by_force(item));
    }
    let found = snapshot.paths.iter().map(|path| path.operators.iter().map(ToString::to_string).collect::<Vec<_>>());
    let mut found: Vec<_> = found.collect();
    found.sort();
    assert_eq!(found, expected.keys().cloned().collect::<Vec<_>>(), "seed {seed}");
    for path in &snapshot.paths {
        let name = path.name();
        let operators: Vec<_> = path.operators.iter().map(ToString::to_string).collect();
        let mut all = expected.remove(&operators).unwrap();
        all.sort_by_key(|(latency, _)| *latency);
        assert_eq!(path.count, all.len() as u64, "seed {seed}, {name}");
        for (share, found) in [(0.5, path.p50), (0.9, path.p90), (0.99, path.p99), (0.999, path.p999)] {
            let rank = ((share * all.len() as f64).ceil() as usize).clamp(1, all.len());
            let exact = all[rank - 1].0;
            assert!(found >= exact && found <= exact.mul_f64(1.0625), "seed {seed}, {name}: {found:?}, not {exact:?}");
        }
        assert_eq!(path.max, all[all.len() - 1].0, "seed {seed}, {name}");
        let parts = |of: fn(&PathParts) -> Duration| {
            let sum: Duration = all.iter().map(|(_, parts)| of(parts)).sum();
            sum.div_f64(all.len() as f64)
        };
        assert_eq!(path.parts.queued, parts(|parts| parts.queued), "seed {seed}, {name}");
        assert_eq!(path.parts.host, parts(|parts| parts.host), "seed {seed}, {name}");
        assert_eq!(path.parts.device, parts(|parts| parts.device), "seed {seed}, {name}");
        assert_eq!(path.parts.copy, Duration::ZERO, "seed {seed}, {name}");
        // Each of the slowest is one of the slowest that are expected.
        let mut slowest = all.split_off(all.len().saturating_sub(path.slowest.len()));
        let mut rest = all;
        for slow in path.slowest.iter().rev() {
            let known = (slow.latency, slow.parts);
            let at = slowest.iter().position(|other| *other == known).map(|at| slowest.swap_remove(at));
            let at = at.or_else(|| {
                let tie = rest.iter().position(|other| *other == known)?;
                Some(rest.swap_remove(tie))
            });
            assert!(at.is_some(), "seed {seed}, {name}: {slow:?} is none of {slowest:?}");
            assert_eq!(slow.parts.total(), slow.latency);
        }
    }
    let lost = notes.sent.load(Ordering::Relaxed) - notes.taken.load(Ordering::Relaxed);
    let counts = snapshot.path_counts;
    // What is not sent, since its reader has ended, is not dropped either.
    assert!(counts.dropped <= lost, "seed {seed}: {lost}, {counts:?}");
    assert_eq!((counts.every, counts.lost), (1, 0));
}

async fn random_flow(seed: u64) -> bool {
    let simulation = Simulation::new(seed);
    let run = async {
        let mut maker = Maker::new(seed, &simulation);
        for _ in 0..maker.random.random_range(1..3) {
            maker.add_source();
        }
        for _ in 0..maker.random.random_range(1..5) {
            match maker.random.random_range(0..6) {
                0 | 1 => maker.add_two(),
                2 => maker.add_round(),
                _ => maker.add_one(),
            }
        }
        for at in 0..maker.outputs.len() {
            if maker.outputs[at].readers.is_empty() || maker.random.random_bool(0.3) {
                maker.add_sink(at);
            }
        }
        for Written { output, readers, .. } in maker.outputs {
            maker.flow.connect(output, readers);
        }
        let watch = Observe::new().paths(1);
        maker.flow.observe(&watch);
        match maker.flow.run().await {
            Ok(_) => {
                let snapshot = watch.snapshots().pop().unwrap();
                check(seed, &maker.notes, &snapshot);
                true
            }
            // Not every flow that is made at random can run to its end.
            Err(error) if error.kind() == ErrorKind::Stalled => false,
            Err(error) => panic!("seed {seed}: {error:#}"),
        }
    };
    simulation.run(run).await
}

#[tokio::test(start_paused = true)]
async fn paths_of_random_flows_are_as_their_operators_saw_them() {
    let seeds = std::env::var("PATH_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(150);
    let mut complete = 0;
    for seed in 0..seeds {
        complete += u64::from(random_flow(seed).await);
    }
    assert!(complete > seeds / 2, "only {complete} of {seeds} flows ran to their end");
}
