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
    condition::every,
    device::Simulation,
    flow::Branch,
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

/// A message with an envelope: the copies to a device and back, and a kernel in between.
#[tokio::test(start_paused = true)]
async fn copies_are_a_part_of_their_own() {
    let simulation = Simulation::new(1);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new().kernel_time("busy", BUSY).copy_time(COPY));
        let mut flow = Flow::new("copies");
        let read = flow.add("read", SendEach::new([vec![1_u32; 4], vec![2; 4]]));
        let work = flow.add("work", Work).on(&device);
        let write = flow.add("write", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
        flow.connect_with(read.output, work.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect(work.output, write.input);
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.snapshots().pop().unwrap()
    };
    let snapshot = simulation.run(run).await;
    let [path] = &snapshot.paths[..] else { panic!("{snapshot}") };
    assert_eq!((path.name().as_str(), path.count), ("read > work > write", 2));
    let mut messages = path.slowest.clone();
    messages.sort_by_key(|message| message.number);
    let first = messages[0].parts;
    assert_eq!((first.copy, first.device, first.host, first.queued), (2 * COPY, BUSY, ms(0), ms(0)), "{path:?}");
    assert_eq!(messages[0].latency, 2 * COPY + BUSY);
    let text = snapshot.to_string();
    assert!(text.contains("read > work > write") && text.contains("device us"), "{text}");
    let device_time = snapshot.operator("work").unwrap().device_time.unwrap();
    assert_eq!((device_time.runs, device_time.total), (2, 2 * BUSY));
    assert_eq!(snapshot.operator("write").unwrap().device_time, None);
}

/// Works on a device, and does not wait for it.
struct Work;

impl Operator for Work {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut data = ports.input.take()?;
        busy::launch(cx.stream()?, &mut data, RUNS.fetch_add(1, Ordering::Relaxed))?;
        ports.output.send(data).await?;
        Ok(())
    }
}

/// The rounds of a section that are replayed are timed as one.
#[tokio::test(start_paused = true)]
async fn a_replayed_section() {
    const GRAPH: Duration = Duration::from_millis(5);
    let simulation = Simulation::new(1);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new().graph_time(GRAPH));
        let mut flow = Flow::new("section");
        let read = flow.add("read", SendEach::new((0..4).map(|n| vec![n; 4])));
        let one = flow.add("one", Increment).on(&device);
        let two = flow.add("two", Increment).on(&device);
        let write = flow.add("write", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
        flow.connect_with(read.output, one.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect(one.output, two.input);
        flow.connect(two.output, write.input);
        flow.replay("both", (&one, &two));
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.snapshots().pop().unwrap()
    };
    let snapshot = simulation.run(run).await;
    let [path] = &snapshot.paths[..] else { panic!("{snapshot}") };
    assert_eq!((path.name().as_str(), path.count), ("read > one > two > write", 4));
    let section = &snapshot.sections[0];
    let replayed = u32::try_from(section.replayed).unwrap();
    assert!(replayed > 1, "{snapshot}");
    assert_eq!(path.parts.device, GRAPH * replayed / 4, "{path:?}");
    let work = section.device_time.unwrap();
    assert_eq!((work.runs, work.longest), (section.replayed, GRAPH));
}

fn counting(count: u64) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut numbers = 0..count;
    source(move || std::future::ready(Ok(numbers.next())))
}

/// One in 64 from its source on, and all others not at all.
#[tokio::test]
async fn one_in_so_many_is_followed() {
    let mut flow = Flow::new("sampled");
    let read = flow.add("read", counting(640));
    let pass = flow.add("pass", pass_on());
    let write = flow.add("write", sink(async |_: u64| Ok(())));
    flow.connect(read.output, pass.input);
    flow.connect(pass.output, write.input);
    let watch = Observe::new();
    flow.observe(&watch);
    flow.run().await.unwrap();
    let snapshot = watch.snapshots().pop().unwrap();
    let [path] = &snapshot.paths[..] else { panic!("{snapshot}") };
    assert_eq!((path.count, snapshot.path_counts.every), (10, 64));
    assert!(path.slowest.iter().all(|slow| slow.number % 64 == 0 && slow.number < 640), "{path:?}");
    assert!(path.p50 <= path.p99 && path.p99 <= path.max && path.max > Duration::ZERO);
    assert!(path.slowest.is_sorted_by_key(|slow| std::cmp::Reverse(slow.latency)) && path.slowest.len() == 5);
}

#[tokio::test]
async fn nothing_is_followed_where_it_is_turned_off() {
    let mut flow = Flow::new("off");
    let read = flow.add("read", counting(10));
    let write = flow.add("write", sink(async |_: u64| Ok(())));
    flow.connect(read.output, write.input);
    let watch = Observe::new().paths(0).device_times(false);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let snapshot = watch.snapshots().pop().unwrap();
    assert!(snapshot.paths.is_empty() && snapshot.path_counts.every == 0, "{snapshot}");
}

/// Messages that a full hub drops are counted, and so are latest values that a newer one has replaced. A value that is
/// read again does not count again.
#[tokio::test(start_paused = true)]
async fn dropped_and_replaced_messages_are_counted_apart() {
    let simulation = Simulation::new(1);
    let run = async {
        let mut flow = Flow::new("drops");
        let read = flow.add("read", counting(10));
        let slow = sink(async |_: u64| {
            sleep(ms(5)).await;
            Ok(())
        });
        let write = flow.add("write", slow);
        flow.connect_with(read.output, write.input, HubOptions::drop_newest(2));
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        let report = flow.run().await.unwrap();
        let snapshot = watch.snapshots().pop().unwrap();
        let dropped: u64 = report.hubs.iter().map(|hub| hub.dropped).sum();
        assert!(dropped > 0 && snapshot.path_counts.dropped == dropped, "{snapshot}");
        assert_eq!(snapshot.paths[0].count + dropped, 10);

        let mut flow = Flow::new("latest");
        let setting = flow.add("setting", source(hold_after_one()));
        let numbers = flow.add("numbers", counting(10));
        let both = flow.add("both", Both);
        flow.connect_with(setting.output, both.setting, HubOptions::latest());
        flow.connect(numbers.output, both.numbers);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.snapshots().pop().unwrap()
    };
    let snapshot = simulation.run(run).await;
    let count = |name: &str| snapshot.paths.iter().find(|path| path.name() == name).map_or(0, |path| path.count);
    // In the run in which both are new, the older one continues.
    assert_eq!(count("setting > both") + count("numbers > both"), 10, "{snapshot}");
    assert_eq!(count("setting > both"), 1, "{snapshot}");
    assert_eq!(snapshot.path_counts.dropped, 0, "{snapshot}");
}

/// The reader takes the first value, reads the newest one 45 ms later, and so on: of ten values, one a tick of 10 ms, those
/// between are replaced before they are read.
#[tokio::test]
async fn a_value_that_a_newer_one_replaces_is_counted_as_dropped() {
    let simulation = Simulation::new(1);
    let run = async {
        let mut flow = Flow::new("latest");
        let read = flow.add("read", counting(10)).when(every(ms(10)));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sees = seen.clone();
        let slow = sink(move |number: u64| {
            lock(&sees).push(number);
            async {
                sleep(ms(45)).await;
                Ok(())
            }
        });
        let write = flow.add("write", slow);
        flow.connect_with(read.output, write.input, HubOptions::latest());
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        flow.run().await.unwrap();
        let mut seen = lock(&seen).clone();
        seen.dedup();
        (watch.snapshots().pop().unwrap(), seen.len() as u64)
    };
    let (snapshot, seen) = simulation.run(run).await;
    assert!((2..9).contains(&seen), "{seen}");
    assert_eq!((snapshot.paths[0].count, snapshot.path_counts.dropped), (seen, 10 - seen), "{snapshot}");
}

fn hold_after_one() -> impl FnMut() -> std::future::Ready<Result<Option<u64>>> + Send + 'static {
    let mut once = Some(7);
    move || std::future::ready(Ok(once.take()))
}

#[derive(Ports)]
struct BothPorts {
    #[input]
    setting: Input<u64>,
    #[input]
    numbers: Input<u64>,
}

struct Both;

impl Operator for Both {
    type Ports = BothPorts;

    async fn compute(&mut self, ports: &mut BothPorts, _cx: &mut Cx) -> Result<()> {
        assert_eq!(ports.setting.take()?, 7);
        ports.numbers.take()?;
        Ok(())
    }
}

/// From outside: each message of an ingress begins a path, and a service's request as well.
#[tokio::test]
async fn messages_from_outside_begin_paths() {
    let mut flow = Flow::new("outside");
    let write = flow.add("write", sink(async |_: u64| Ok(())));
    let numbers = flow.ingress("numbers", write.input);
    let double = flow.add("double", map(async |n: u64| Ok(2 * n)));
    let service = flow.service("twice", double.input, double.output);
    let watch = Observe::new().paths(1);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    for n in 0..3 {
        numbers.send(n).await.unwrap();
        assert_eq!(service.ask(n).await.unwrap(), 2 * n);
    }
    drop((numbers, service));
    running.await.unwrap();
    let snapshot = watch.snapshots().pop().unwrap();
    let paths: Vec<_> = snapshot.paths.iter().map(|path| (path.name(), path.count)).collect();
    assert!(paths.contains(&("numbers > write".to_string(), 3)), "{paths:?}");
    assert!(paths.contains(&("twice > double".to_string(), 3)), "{paths:?}");
}

/// A message that goes around for ever is not followed for ever, and paths beyond the 64th are one.
#[tokio::test(start_paused = true)]
async fn what_is_kept_is_bounded() {
    let simulation = Simulation::new(1);
    let run = async {
        let mut flow = Flow::new("rounds");
        let read = flow.add("read", counting(1));
        let around = flow.add("around", Around(0));
        flow.connect(read.output, around.items);
        flow.connect_with(around.again, around.items, HubOptions::bounded(2));
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        flow.run().await.unwrap();
        let snapshot = watch.snapshots().pop().unwrap();
        assert_eq!((snapshot.paths.len(), snapshot.path_counts.lost), (0, 1), "{snapshot}");

        let mut flow = Flow::new("many");
        let read = flow.add("read", counting(2));
        let mut inputs = Vec::new();
        for n in 0..80 {
            inputs.push(flow.add(format!("write {n}"), sink(async |_: u64| Ok(()))).input);
        }
        flow.connect(read.output, inputs);
        flow.observe(&watch);
        flow.run().await.unwrap();
        watch.snapshots().pop().unwrap()
    };
    let snapshot = simulation.run(run).await;
    assert_eq!(snapshot.paths.len(), 65, "{snapshot}");
    let other = &snapshot.paths[64];
    assert_eq!((other.name().as_str(), other.count), ("other", 32));
}

#[derive(Ports)]
struct AroundPorts {
    #[input(at_least = 1)]
    items: Inputs<u64>,
    #[output]
    again: Output<u64>,
}

struct Around(u32);

impl Operator for Around {
    type Ports = AroundPorts;

    async fn compute(&mut self, ports: &mut AroundPorts, _cx: &mut Cx) -> Result<()> {
        let Some((_, item)) = ports.items.try_take_any()? else { return Ok(()) };
        self.0 += 1;
        if self.0 < 1000 {
            ports.again.send(item).await?;
        }
        Ok(())
    }
}

/// Workers of a concurrent operator are one operator on a path.
#[tokio::test]
async fn concurrent_runs() {
    let mut flow = Flow::new("concurrent");
    let read = flow.add("read", counting(20));
    let work = flow.add("work", wakeline::operator::concurrent(3, Yield));
    let write = flow.add("write", sink(async |_: u64| Ok(())));
    flow.connect(read.output, work.input);
    flow.connect(work.output, write.input);
    let watch = Observe::new().paths(1);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let snapshot = watch.snapshots().pop().unwrap();
    let paths: Vec<_> = snapshot.paths.iter().map(|path| (path.name(), path.count)).collect();
    assert_eq!(paths, [("read > work > write".to_string(), 20)]);
}

#[derive(Clone)]
struct Yield;

impl Operator for Yield {
    type Ports = MapPorts<u64, u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let n = ports.input.take()?;
        tokio::task::yield_now().await;
        ports.output.send(n).await?;
        Ok(())
    }
}

// On a real device the parts are not known beforehand, but they are the whole.
on_both!(parts_of_real_work, async |device: Device| {
    let mut flow = Flow::new("real");
    let read = flow.add("read", SendEach::new((0..200).map(|n| vec![n; 1024])));
    let work = flow.add("work", Increment).on(&device);
    let write = flow.add("write", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
    flow.connect_with(read.output, work.input, HubOptions::bounded(2).envelope_bytes(4096));
    flow.connect(work.output, write.input);
    let watch = Observe::new().paths(1);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let snapshot = watch.snapshots().pop().unwrap();
    let [path] = &snapshot.paths[..] else { panic!("{snapshot}") };
    assert_eq!((path.name().as_str(), path.count), ("read > work > write", 200));
    assert!(path.slowest.iter().all(|slow| slow.parts.total() == slow.latency), "{path:?}");
    let parts = path.parts;
    assert!(parts.device > ms(0) && parts.copy > ms(0) && parts.host + parts.queued > ms(0), "{parts:?}");
    let device_time = snapshot.operator("work").unwrap().device_time.unwrap();
    assert_eq!((device_time.runs, device_time.missed), (200, 0));
});
