//! Sections of operators that are replayed as CUDA graphs: `Flow::replay`.
//!
//! Only the report distinguishes a replayed round from a streamed one: bytes, order and metadata are the same. What a
//! graph cannot hold is an error that names the operator.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::*;
use wakeline::{
    Stream,
    condition::Status,
    device::{Emulated, Simulation},
    flow::{Added, SectionReport, Step},
    graph::{Graph, NodeKind},
    memory::Allocator,
    operator::MapHandles,
    prelude::*,
};

mod bytes;
mod flows;
mod refusals;

/// y[i] = a x[i] + b + i. The result depends on the index, so padding in the output would be visible.
#[kernel(unsafe(cuda = "../kernels/affine.cu"))]
fn affine(x: &[u32], y: &mut [u32], a: u32, b: u32) {
    for (at, (y, x)) in y.iter_mut().zip(x).enumerate() {
        *y = a.wrapping_mul(*x).wrapping_add(b).wrapping_add(at as u32);
    }
}

/// left += right
#[kernel(unsafe(cuda = "../kernels/add_to.cu"))]
fn add_to(left: &mut [u32], right: &[u32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.wrapping_add(*right);
    }
}

/// Applies `affine` twice: into memory of the graph, and from there into a blank envelope of its output.
struct Affine(u32, u32);

impl Operator for Affine {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        let mut between = cx.alloc::<u32>(x.len())?;
        affine::launch(cx.stream()?, &x, &mut between, self.0, self.1)?;
        affine::launch(cx.stream()?, &between, &mut y, 3, 1)?;
        ports.output.send(y).await?;
        Ok(())
    }
}

/// Copies its input to both outputs.
struct Fork;

#[derive(Ports)]
struct ForkPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output(envelope_bytes = 4096)]
    left: Output<Envelope<u32>>,
    #[output(envelope_bytes = 4096)]
    right: Output<Envelope<u32>>,
}

impl Operator for Fork {
    type Ports = ForkPorts;

    async fn compute(&mut self, ports: &mut ForkPorts, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let (mut left, mut right) = (ports.left.blank().await?, ports.right.blank().await?);
        left.set_len(x.len())?;
        right.set_len(x.len())?;
        let stream = cx.stream()?;
        stream.copy(&x, &mut left)?;
        stream.copy(&x, &mut right)?;
        ports.left.send(left).await?;
        ports.right.send(right).await?;
        Ok(())
    }
}

/// Sends the sum of its two inputs.
struct Join;

#[derive(Ports)]
struct JoinPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<Envelope<u32>>,
    #[output]
    output: Output<Envelope<u32>>,
}

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, cx: &mut Cx) -> Result<()> {
        let (mut left, right) = (ports.left.take()?, ports.right.take()?);
        add_to::launch(cx.stream()?, &mut left, &right)?;
        ports.output.send(left).await?;
        Ok(())
    }
}

/// The number of elements in a row.
const ROW: usize = 4;

fn batches(rows: &[usize]) -> Vec<Vec<u32>> {
    let batch = |(number, rows): (usize, &usize)| (0..rows * ROW).map(|at| (1000 * number + at) as u32).collect();
    rows.iter().enumerate().map(batch).collect()
}

/// The rows of each message: every bucket, sizes between buckets, sizes above the largest, and repetitions.
const ROWS: &[usize] = &[1, 2, 4, 8, 3, 1, 7, 9, 8, 5, 2, 4, 16, 3, 8, 1];

fn section(report: &Report, name: &str) -> (u64, u64, u64) {
    let SectionReport { replayed, streamed, captured, .. } = report.section(name).unwrap().clone();
    (replayed, streamed, captured)
}

/// `read -> one -> two -> three -> collect`. With `replay`, the middle three form a section.
async fn chain(device: &Device, rows: &[usize], replay: bool) -> (Vec<Vec<u32>>, Report) {
    let seen = shared();
    let mut flow = Flow::new("chain");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let one = flow.add("one", Affine(2, 7)).on(device);
    let two = flow.add("two", Increment).on(device);
    let three = flow.add("three", Affine(5, 11)).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(2).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, two.input, hub);
    flow.connect(two.output, three.input);
    flow.connect_with(three.output, collect.input, hub);
    if replay {
        flow.replay("net", [&three, &one, &two]).buckets([8, 1, 2, 4]).rows(one.input, ROW);
    }
    let report = flow.run().await.unwrap();
    let seen = lock(&seen).clone();
    (seen, report)
}

/// `read -> fork -> (left, right) -> join -> collect`.
async fn fork_and_join(device: &Device, rows: &[usize], replay: bool) -> (Vec<Vec<u32>>, Report) {
    fork_and_join_inspected(device, rows, replay, |_| ()).await
}

/// [`fork_and_join`], with `inspect` called for each graph.
async fn fork_and_join_inspected(
    device: &Device,
    rows: &[usize],
    replay: bool,
    inspect: impl Fn(&Graph) + Send + Sync + 'static,
) -> (Vec<Vec<u32>>, Report) {
    let seen = shared();
    let mut flow = Flow::new("fork and join");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let fork = flow.add("fork", Fork).on(device);
    let left = flow.add("left", Affine(2, 7)).on(device);
    let right = flow.add("right", Affine(3, 5)).on(device);
    let join = flow.add("join", Join).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(2).envelope_bytes(4096);
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, left.input);
    flow.connect(fork.right, right.input);
    flow.connect_with(left.output, join.left, hub);
    flow.connect_with(right.output, join.right, hub);
    flow.connect(join.output, collect.input);
    if replay {
        let net = flow.replay("net", (&join, &left, &right, &fork));
        net.buckets([1, 2, 4, 8]).rows(fork.input, ROW).inspect(inspect);
    }
    let report = flow.run().await.unwrap();
    let seen = lock(&seen).clone();
    (seen, report)
}

/// `read -> one -> collect`, where `operator` is `one`. The hubs' envelopes have 4096 bytes.
async fn run_one<O>(
    device: &Device,
    rows: &[usize],
    operator: O,
    configure: impl FnOnce(&mut Flow, &Added<Io>),
) -> Result<RunResult>
where
    O: Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
{
    let seen = shared();
    let mut flow = Flow::new("one");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let one = flow.add("one", operator).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    configure(&mut flow, &one);
    let report = flow.run().await?;
    let seen = lock(&seen).clone();
    Ok((seen, report))
}

type Io = MapHandles<Envelope<u32>, Envelope<u32>>;
type RunResult = (Vec<Vec<u32>>, Report);

/// Sends the sum of its two inputs at one output, and the right input plus one at the other.
struct Cross;

#[derive(Ports)]
struct CrossPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<Envelope<u32>>,
    #[output]
    both: Output<Envelope<u32>>,
    #[output(envelope_bytes = 4096)]
    more: Output<Envelope<u32>>,
}

impl Operator for Cross {
    type Ports = CrossPorts;

    async fn compute(&mut self, ports: &mut CrossPorts, cx: &mut Cx) -> Result<()> {
        let (mut left, right) = (ports.left.take()?, ports.right.take()?);
        let mut more = ports.more.blank().await?;
        more.set_len(right.len())?;
        let stream = cx.stream()?;
        add_one::launch(stream, &right, &mut more)?;
        add_to::launch(stream, &mut left, &right)?;
        ports.both.send(left).await?;
        ports.more.send(more).await?;
        Ok(())
    }
}

/// True if a node of operator `later` depends on a node of operator `earlier`.
fn comes_after(graph: &Graph, later: &str, earlier: &str) -> bool {
    let nodes = graph.nodes();
    let of = |name: &str| nodes.iter().filter(|node| node.operator.as_deref() == Some(name)).collect::<Vec<_>>();
    let (later, earlier) = (of(later), of(earlier));
    assert!(!later.is_empty() && !earlier.is_empty(), "{nodes:?}");
    later.iter().any(|later| earlier.iter().any(|earlier| graph.comes_after(later.node, earlier.node)))
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "no `{part}` in: {text}"));
}
