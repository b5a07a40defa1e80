//! Sections of operators that are replayed as CUDA graphs: `Flow::replay`.
//!
//! What counts is that nobody can tell a replayed round from a streamed one but by the report: the same bytes, in the same
//! order, with all that came along; and that what a graph cannot hold is an error that says whose it is.

mod common;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use common::*;
use wakeline::{
    condition::Status,
    device::{Emulated, Simulation},
    flow::{Added, SectionReport},
    graph::{Graph, NodeKind},
    memory::Allocator,
    operator::MapHandles,
    prelude::*,
};

/// y = a x + b, each b of another element: so that padding, were it kept, would show.
#[kernel(unsafe(cuda = "kernels/affine.cu"))]
fn affine(x: &[u32], y: &mut [u32], a: u32, b: u32) {
    for (at, (y, x)) in y.iter_mut().zip(x).enumerate() {
        *y = a.wrapping_mul(*x).wrapping_add(b).wrapping_add(at as u32);
    }
}

/// left += right
#[kernel(unsafe(cuda = "kernels/add_to.cu"))]
fn add_to(left: &mut [u32], right: &[u32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.wrapping_add(*right);
    }
}

/// Into a blank envelope of the hub that it sends to, by way of memory of its own.
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
        ports.output.send(y).await
    }
}

/// Sends what it is given both ways.
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
        ports.right.send(right).await
    }
}

/// Adds the right one to the left one, and passes that on.
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
        ports.output.send(left).await
    }
}

/// Rows of four elements.
const ROW: usize = 4;

fn batches(rows: &[usize]) -> Vec<Vec<u32>> {
    let batch = |(number, rows): (usize, &usize)| (0..rows * ROW).map(|at| (1000 * number + at) as u32).collect();
    rows.iter().enumerate().map(batch).collect()
}

/// The rows that are sent: every bucket, between buckets, more than the largest, and again.
const ROWS: &[usize] = &[1, 2, 4, 8, 3, 1, 7, 9, 8, 5, 2, 4, 16, 3, 8, 1];

fn section(report: &Report, name: &str) -> (u64, u64, u64) {
    let SectionReport { replayed, streamed, captured, .. } = report.section(name).unwrap().clone();
    (replayed, streamed, captured)
}

/// `read -> one -> two -> three -> collect`, a section if `replay` says so.
async fn chain(device: &Device, rows: &[usize], replay: bool) -> (Vec<Vec<u32>>, Report) {
    let seen = shared();
    let mut flow = Flow::new("chain");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let one = flow.add("one", Affine(2, 7)).on(device);
    let two = flow.add("two", Increment).on(device);
    let three = flow.add("three", Affine(5, 11)).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = Hub::bounded(2).envelope_bytes(4096);
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

on_both!(g10_a_chain_gives_the_same_bytes_replayed_as_streamed_at_every_bucket_and_between, async |device: Device| {
    let (streamed, _) = chain(&device, ROWS, false).await;
    let (replayed, report) = chain(&device, ROWS, true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(replayed.len(), ROWS.len());
    // The first of each of four buckets is streamed, and what is larger than the largest.
    assert_eq!(section(&report, "net"), (10, 6, 4));
    assert_eq!(report.operator("two").unwrap().runs, ROWS.len() as u64);
    assert!(
        report.to_string().contains("section `net`: 10 rounds replayed, 6 streamed, 4 graphs captured"),
        "{report}"
    );
});

/// `read -> fork -> (left, right) -> join -> collect`.
async fn fork_and_join(device: &Device, rows: &[usize], replay: bool) -> (Vec<Vec<u32>>, Report) {
    let seen = shared();
    let mut flow = Flow::new("fork and join");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let fork = flow.add("fork", Fork).on(device);
    let left = flow.add("left", Affine(2, 7)).on(device);
    let right = flow.add("right", Affine(3, 5)).on(device);
    let join = flow.add("join", Join).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = Hub::bounded(2).envelope_bytes(4096);
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, left.input);
    flow.connect(fork.right, right.input);
    flow.connect_with(left.output, join.left, hub);
    flow.connect_with(right.output, join.right, hub);
    flow.connect(join.output, collect.input);
    if replay {
        flow.replay("net", (&join, &left, &right, &fork)).buckets([1, 2, 4, 8]).rows(fork.input, ROW);
    }
    let report = flow.run().await.unwrap();
    let seen = lock(&seen).clone();
    (seen, report)
}

on_both!(g10_a_fork_and_join_gives_the_same_bytes_replayed_as_streamed, async |device: Device| {
    let (streamed, _) = fork_and_join(&device, ROWS, false).await;
    let (replayed, report) = fork_and_join(&device, ROWS, true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (10, 6, 4));
});

/// Which operators' nodes come after which others', by their names.
fn comes_after(graph: &Graph, later: &str, earlier: &str) -> bool {
    let nodes = graph.nodes();
    let of = |name: &str| nodes.iter().filter(|node| node.operator.as_deref() == Some(name)).collect::<Vec<_>>();
    let (later, earlier) = (of(later), of(earlier));
    assert!(!later.is_empty() && !earlier.is_empty(), "{nodes:?}");
    later.iter().any(|later| earlier.iter().any(|earlier| graph.comes_after(later.node, earlier.node)))
}

on_both!(g10_the_branches_of_a_section_stay_parallel_in_its_graph, async |device: Device| {
    let (graphs, seen) = (shared(), shared());
    let mut flow = Flow::new("branches");
    let read = flow.add("read", SendEach::new(batches(&[4, 4, 4])));
    let fork = flow.add("fork", Fork).on(&device);
    let left = flow.add("left", Affine(2, 7)).on(&device);
    let right = flow.add("right", Affine(3, 5)).on(&device);
    let join = flow.add("join", Join).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = Hub::bounded(2).envelope_bytes(4096);
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, left.input);
    flow.connect(fork.right, right.input);
    flow.connect_with(left.output, join.left, hub);
    flow.connect_with(right.output, join.right, hub);
    flow.connect(join.output, collect.input);
    let hear = graphs.clone();
    let net = flow.replay("net", (&fork, &left, &right, &join));
    net.buckets([4]).rows(fork.input, ROW).inspect(move |graph: &Graph| lock(&hear).push(graph.clone()));
    flow.run().await.unwrap();
    let graph: Graph = lock(&graphs).pop().unwrap();
    for (later, earlier) in [("left", "fork"), ("right", "fork"), ("join", "left"), ("join", "right")] {
        assert!(comes_after(&graph, later, earlier), "`{later}` after `{earlier}`: {}", graph.to_dot());
    }
    for (one, other) in [("left", "right"), ("right", "left")] {
        assert!(!comes_after(&graph, one, other), "`{one}` waits for `{other}`: {}", graph.to_dot());
    }
    assert!(graph.nodes().iter().all(|node| matches!(node.kind, NodeKind::Kernel | NodeKind::Copy)), "nothing else");
});

/// `read -> one -> collect` with one operator, its hub's envelopes of 4096 bytes each.
async fn alone<O>(
    device: &Device,
    rows: &[usize],
    operator: O,
    settle: impl FnOnce(&mut Flow, &Added<Io>),
) -> Result<Ran>
where
    O: Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
{
    let seen = shared();
    let mut flow = Flow::new("alone");
    let read = flow.add("read", SendEach::new(batches(rows)));
    let one = flow.add("one", operator).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = Hub::bounded(1).envelope_bytes(4096);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    settle(&mut flow, &one);
    let report = flow.run().await?;
    let seen = lock(&seen).clone();
    Ok((seen, report))
}

type Io = MapHandles<Envelope<u32>, Envelope<u32>>;
type Ran = (Vec<Vec<u32>>, Report);

on_both!(an_envelope_that_is_changed_in_place_crosses_the_edge_again, async |device: Device| {
    let rows = [4, 3, 4, 1, 2, 4];
    let replayed = alone(&device, &rows, Increment, |flow, one| {
        flow.replay("net", one).buckets([4]).rows(one.input, ROW);
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = alone(&device, &rows, Increment, |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (5, 1, 1));
});

/// Sends the sum of all that it is given.
struct Total;

impl Operator for Total {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut total = ports.output.blank().await?;
        total.set_len(1)?;
        sum::launch(cx.stream()?, &x, &mut total)?;
        ports.output.send(total).await
    }
}

on_both!(what_does_not_have_the_rows_of_the_inputs_is_sent_whole, async |device: Device| {
    let rows = [8, 8, 1, 5, 2, 8, 3];
    let replayed = alone(&device, &rows, Total, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW).whole(one.output);
    });
    let (replayed, report) = replayed.await.unwrap();
    let sums: Vec<_> = batches(&rows).iter().map(|batch| vec![batch.iter().sum::<u32>()]).collect();
    assert_eq!(replayed, sums);
    assert_eq!(section(&report, "net"), (6, 1, 1));

    let unsaid = alone(&device, &rows, Total, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW);
    });
    let told = unsaid.await.err().unwrap().to_string();
    says(&told, &["operator `one`: port `output`", "it sends 1 elements for 8 rows", "say `.whole(..)`"]);
});

on_both!(padding_is_zero_whatever_was_there_before, async |device: Device| {
    /// Sends the sum of all that it is given, and leaves something else where that was.
    struct Sum;

    impl Operator for Sum {
        type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let mut x = ports.input.take()?;
            let mut total = ports.output.blank().await?;
            total.set_len(1)?;
            sum::launch(cx.stream()?, &x, &mut total)?;
            increment::launch(cx.stream()?, &mut x)?;
            ports.output.send(total).await
        }
    }

    let rows = [8, 8, 1, 5, 2, 8, 3];
    let replayed = alone(&device, &rows, Sum, |flow, one| {
        flow.replay("net", one).buckets([8]).rows(one.input, ROW).whole(one.output);
    });
    let (replayed, report) = replayed.await.unwrap();
    let sums: Vec<_> = batches(&rows).iter().map(|batch| vec![batch.iter().sum::<u32>()]).collect();
    assert_eq!(replayed, sums);
    assert_eq!(section(&report, "net"), (6, 1, 1));
});

on_both!(without_buckets_every_length_has_its_graph_until_there_are_too_many, async |device: Device| {
    let rows = [3, 5, 7, 3, 5, 7, 7, 3];
    let replayed = alone(&device, &rows, Affine(2, 3), |flow, one| {
        flow.replay("net", one).at_most(2);
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = alone(&device, &rows, Affine(2, 3), |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    // 3 and 5 have one each; the three sevens have none.
    assert_eq!(section(&report, "net"), (3, 5, 2));
});

on_both!(captured_at_the_start_no_round_that_fits_is_streamed, async |device: Device| {
    let rows = [1, 2, 3, 9];
    let replayed = alone(&device, &rows, Affine(2, 3), |flow, one| {
        flow.replay("net", one).buckets([2, 4]).rows(one.input, ROW).at_start();
    });
    let (replayed, report) = replayed.await.unwrap();
    let (streamed, _) = alone(&device, &rows, Affine(2, 3), |_, _| {}).await.unwrap();
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 2));
});

on_both!(within_a_section_messages_are_of_any_type, async |device: Device| {
    /// An envelope, and what the host has to say of it.
    #[derive(Message)]
    struct Scaled {
        #[envelope]
        data: Envelope<u32>,
        by: u32,
        why: String,
    }

    struct Decide;

    #[derive(Ports)]
    struct DecidePorts {
        #[input]
        input: Input<Envelope<u32>>,
        #[output]
        scaled: Output<Scaled>,
        #[output]
        note: Output<u32>,
    }

    impl Operator for Decide {
        type Ports = DecidePorts;

        async fn compute(&mut self, ports: &mut DecidePorts, _cx: &mut Cx) -> Result<()> {
            let data = ports.input.take()?;
            ports.scaled.send(Scaled { data, by: 6, why: "it was said".into() }).await?;
            ports.note.send(7).await
        }
    }

    struct Scale;

    #[derive(Ports)]
    struct ScalePorts {
        #[input]
        scaled: Input<Scaled>,
        #[input]
        note: Input<u32>,
        #[output(envelope_bytes = 4096)]
        output: Output<Envelope<u32>>,
    }

    impl Operator for Scale {
        type Ports = ScalePorts;

        async fn compute(&mut self, ports: &mut ScalePorts, cx: &mut Cx) -> Result<()> {
            let (Scaled { data, by, why }, add) = (ports.scaled.take()?, ports.note.take()?);
            assert_eq!(why, "it was said");
            let mut y = ports.output.blank().await?;
            y.set_len(data.len())?;
            affine::launch(cx.stream()?, &data, &mut y, by, add)?;
            ports.output.send(y).await
        }
    }

    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("any type");
        let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 2])));
        let decide = flow.add("decide", Decide).on(&device);
        let scale = flow.add("scale", Scale).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, decide.input, Hub::bounded(1).envelope_bytes(4096));
        flow.connect(decide.scaled, scale.scaled);
        flow.connect(decide.note, scale.note);
        flow.connect(scale.output, collect.input);
        if replay {
            flow.replay("net", (&decide, &scale)).buckets([2]).rows(decide.input, ROW);
        }
        let report = flow.run().await.unwrap();
        let seen = lock(&seen).clone();
        (seen, report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 1));
});

/// Takes at two inputs and sends at two outputs: the sum, and the right one by itself.
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
        ports.more.send(more).await
    }
}

on_both!(a_section_has_several_inputs_and_several_outputs, async |device: Device| {
    let run = async |replay: bool| {
        let (both, more) = (shared(), shared());
        let mut flow = Flow::new("cross");
        let hub = Hub::bounded(1).envelope_bytes(4096);
        let left = flow.add("left", SendEach::new(batches(&[2, 1, 2, 3])));
        let right = flow.add("right", SendEach::new(batches(&[2, 1, 1, 3])));
        let cross = flow.add("cross", Cross).on(&device);
        let first = flow.add("both", Collect(both.clone()));
        let second = flow.add("more", Collect(more.clone()));
        let other = flow.add("more of it", Collect(more.clone()));
        flow.connect_with(left.output, cross.left, hub);
        flow.connect_with(right.output, cross.right, hub);
        flow.connect(cross.both, first.input);
        // Out of a section a message may go to several readers.
        flow.connect(cross.more, [second.input, other.input]);
        if replay {
            flow.replay("net", &cross).buckets([3]).rows(cross.left, ROW).rows(cross.right, ROW);
        }
        let report = flow.run().await.unwrap();
        let mut more = lock(&more).clone();
        more.sort();
        let both = lock(&both).clone();
        (both, more, report)
    };
    let (both, more, _) = run(false).await;
    let (replayed_both, replayed_more, report) = run(true).await;
    assert_eq!((replayed_both, &replayed_more), (both, &more));
    assert_eq!(more.len(), 8);
    // The third round has two rows at one input and one at the other: no bucket is right for both.
    assert_eq!(section(&report, "net"), (2, 2, 1));
});

on_both!(what_comes_with_a_message_goes_on_with_what_is_replayed_of_it, async |device: Device| {
    struct Number(u32);

    impl Operator for Number {
        type Ports = SourcePorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            self.0 += 1;
            if self.0 == 4 {
                cx.finish();
            }
            if self.0 != 3 {
                cx.insert_metadata("number", self.0);
            }
            let mut envelope = ports.output.blank().await?;
            envelope.space().await?[..4].fill(self.0);
            envelope.set_len(4)?;
            ports.output.send(envelope).await
        }
    }

    struct Check(Shared<(Option<u32>, u32)>);

    impl Operator for Check {
        type Ports = SinkPorts<Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let envelope = ports.input.take()?;
            let number = cx.metadata().get::<u32>("number").copied();
            let first = envelope.read().await?[0];
            lock(&self.0).push((number, first));
            Ok(())
        }
    }

    let seen = shared();
    let mut flow = Flow::new("metadata");
    let read = flow.add("read", Number(0));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Affine(1, 0)).on(&device);
    let check = flow.add("check", Check(seen.clone()));
    let hub = Hub::bounded(1).envelope_bytes(64);
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect_with(two.output, check.input, hub);
    flow.replay("net", (&one, &two));
    let report = flow.run().await.unwrap();
    assert_eq!(section(&report, "net"), (3, 1, 1));
    // 3 (x + 1) + 1, the first element of each.
    assert_eq!(*lock(&seen), [(Some(1), 7), (Some(2), 10), (None, 13), (Some(4), 16)]);
});

/// What a flow with `operator` in a section fails with; and with `at_start`, before anything was streamed.
async fn refused<O>(device: &Device, at_start: bool, operator: O) -> String
where
    O: Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
{
    let ran = alone(device, &[2, 2, 2], operator, |flow, one| {
        let net = flow.replay("net", one);
        net.buckets([2]).rows(one.input, ROW).checked();
        if at_start {
            net.at_start();
        }
    });
    let error = ran.await.expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    let told = error.to_string();
    assert!(told.starts_with("section `net`: operator `one`: "), "{told}");
    told
}

/// An operator that does one thing which no graph can hold, beside what it is there for.
struct Odd<F>(F);

impl<F> Operator for Odd<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        (self.0)(&mut x, cx).await?;
        ports.output.send(x).await
    }
}

fn odd<F>(act: F) -> Odd<F>
where
    F: for<'a> FnMut(&'a mut Envelope<u32>, &'a mut Cx) -> futures::future::BoxFuture<'a, Result<()>> + Send + 'static,
{
    Odd(act)
}

on_both!(what_a_capture_cannot_hold_is_an_error_that_names_the_operator, async |device: Device| {
    use futures::FutureExt;

    let waits = odd(|_, _| tokio::task::yield_now().map(Ok).boxed());
    let told = refused(&device, false, waits).await;
    assert!(told.contains("its `compute` waits for something of the host's"), "{told}");

    let awaits = odd(|x, cx| {
        async move {
            increment::launch(cx.stream()?, x)?;
            cx.stream()?.completed().await
        }
        .boxed()
    });
    let told = refused(&device, true, awaits).await;
    assert!(told.contains("the work of stream `one` is captured, and none of it has run"), "{told}");

    let looks = odd(|x, cx| {
        async move {
            let mut here = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut here)?;
            here.read().await.map(drop)
        }
        .boxed()
    });
    let told = refused(&device, false, looks).await;
    assert!(told.contains("the host can neither wait for it nor look at what it makes"), "{told}");

    let copies_back = odd(|x, cx| {
        async move {
            let mut here = Buffer::<u32>::pinned(cx.device(), x.len())?;
            cx.stream()?.copy(x, &mut here)
        }
        .boxed()
    });
    let ran = alone(&device, &[2, 2], copies_back, |flow, one| {
        flow.replay("net", one);
    });
    let told = ran.await.err().unwrap().to_string();
    assert!(told.contains("operator `one` reads data back"), "{told}");

    let calls = odd(|_, cx| async { cx.stream()?.host_function(|| {}) }.boxed());
    let told = refused(&device, false, calls).await;
    assert!(told.contains("a host function that can be called once"), "{told}");

    let pool = Allocator::stream_ordered(&device);
    let allocates = odd(move |_, cx| {
        let made = cx.stream().and_then(|stream| pool.alloc::<u32>(stream, 8).map(drop));
        async move { made }.boxed()
    });
    let told = refused(&device, false, allocates).await;
    assert!(told.contains("stream-ordered memory in a capture"), "{told}");

    let mut number = 0;
    let counts = odd(move |x, cx| {
        number += 1;
        let launched = cx.stream().and_then(|stream| {
            let mut y = stream.alloc::<u32>(x.len())?;
            affine::launch(stream, x, &mut y, number, 0)
        });
        async move { launched }.boxed()
    });
    let told = refused(&device, true, counts).await;
    assert!(told.contains("captured twice, node 1, `affine` is not the same"), "{told}");

    let ends = odd(|_, cx| {
        cx.finish();
        async { Ok(()) }.boxed()
    });
    let told = refused(&device, true, ends).await;
    assert!(told.contains("it calls `Cx::finish`, which no replay does"), "{told}");

    let mut kept = None;
    let keeps = odd(move |_, cx| {
        let filled = cx.stream().cloned().and_then(|own| {
            if kept.is_none() {
                let data = Buffer::<u32>::new(own.device(), 8)?;
                kept = Some((own, data));
            }
            kept.as_mut().map_or(Ok(()), |(stream, data)| stream.fill(data, 1))
        });
        async move { filled }.boxed()
    });
    let told = refused(&device, false, keeps).await;
    assert!(told.contains("it puts work into a stream that it has kept from an earlier run"), "{told}");

    let marks = odd(|_, cx| {
        cx.insert_metadata("mine", 1);
        async { Ok(()) }.boxed()
    });
    let told = refused(&device, false, marks).await;
    assert!(told.contains("it gives messages metadata of its own, which no replay does"), "{told}");
});

/// Of those methods that no replay calls.
struct Wordy<const WHICH: u8>;

impl<const WHICH: u8> Operator for Wordy<WHICH> {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    fn may_run(&mut self, _ports: &Self::Ports, cx: &Cx) -> bool {
        if WHICH == b'm' { true } else { Increment.may_run(_ports, cx) }
    }

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        ports.output.send(x).await
    }

    fn after(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> impl Future<Output = Result<()>> + Send {
        if WHICH != b'a' {
            drop(Increment.after(ports, cx));
        }
        async { Ok(()) }
    }
}

/// As often as it is told.
struct SendsTwice;

impl Operator for SendsTwice {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        cx.stream()?.copy(&x, &mut y)?;
        ports.output.send(x).await?;
        ports.output.send(y).await
    }
}

/// Takes nothing.
struct SendsOnly;

impl Operator for SendsOnly {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut y = ports.output.blank().await?;
        y.set_len(1)?;
        cx.stream()?.fill(&mut y, 1)?;
        ports.output.send(y).await
    }
}

on_both!(an_operator_of_a_section_computes_and_moves_one_message_each, async |device: Device| {
    let told = refused(&device, false, Wordy::<b'm'>).await;
    assert!(told.contains("it has a `may_run` of its own, which no replay does"), "{told}");
    let told = refused(&device, false, Wordy::<b'a'>).await;
    assert!(told.contains("it has a `after` of its own, which no replay does"), "{told}");
    let own = task(|ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, _| {
        use futures::FutureExt;
        async move { ports.input.recv().await.map(drop) }.boxed()
    });
    let told = refused(&device, false, own).await;
    assert!(told.contains("it has a `run` of its own, which no replay does"), "{told}");
    let told = refused(&device, true, SendsTwice).await;
    assert!(told.contains("a run of it sends 2 messages at `output`"), "{told}");
    for at_start in [true, false] {
        let told = refused(&device, at_start, SendsOnly).await;
        assert!(told.contains("a run of it takes 0 messages at `input`"), "{told}");
    }
});

/// The problems of a flow of `read -> one -> two -> collect`, the middle ones on a device.
fn problems(settle: impl FnOnce(&mut Flow, &Added<Io>, &Added<Io>, &Device)) -> String {
    let device = emulated();
    let mut flow = Flow::new("wrong");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, Hub::bounded(1).envelope_bytes(64));
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    settle(&mut flow, &one, &two, &device);
    let error = flow.check().expect_err("it is wrong");
    assert_eq!(error.kind(), ErrorKind::Setup, "{error}");
    error.to_string()
}

#[track_caller]
fn says(told: &str, what: &[&str]) {
    what.iter().for_each(|what| assert!(told.contains(what), "no `{what}` in: {told}"));
}

#[test]
fn what_is_wrong_with_a_section_is_said_before_anything_runs() {
    let told = problems(|flow, one, two, _| {
        let _ = flow.replay("net", (one, two)).buckets([]);
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0);
    });
    says(&told, &["section `net`: its list of buckets is empty", "section `net`: another has the same name"]);
    says(&told, &["operator `one` is in another section, too"]);

    let told = problems(|flow, one, two, _| {
        flow.replay("net", one).buckets([0, 1]).rows(two.input, 4).rows(one.input, 0).whole(two.output);
    });
    says(&told, &["a bucket of 0 rows holds nothing", "a row of 0 elements at `input`"]);
    says(
        &told,
        &["the rows of `two.input` are said, which is none of the ports on its edge", "whole messages of `two.output`"],
    );

    let told = problems(|flow, one, _, _| {
        flow.replay("start", one).at_start();
    });
    says(&told, &["section `start`: it is to be captured at the start, when nobody knows the sizes yet"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two, one));
    });
    says(&told, &["operator `one` is named twice"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&Device::host());
        flow.replay("net", (one, two));
    });
    says(&told, &["operator `two` is on the host, which has no graphs"]);

    let told = problems(|flow, one, two, _| {
        let _ = two.clone().on(&emulated());
        flow.replay("net", (one, two));
    });
    says(&told, &["a graph is one device's"]);

    let told = problems(|flow, one, two, _| {
        let _ = one.clone().on_own_thread();
        let _ = two.clone().when(wakeline::condition::count(3));
        flow.replay("net", (one, two));
    });
    says(&told, &["operator `one` has a thread of its own", "operator `two` has a condition of its own"]);

    let told = problems(|flow, one, two, device| {
        let elsewhere = Flow::new("other").add("far", Increment).on(device);
        flow.replay("net", (one, two, &elsewhere));
        flow.replay("nobody", Vec::<&Added<Io>>::new());
    });
    says(&told, &["operator `far` is one of another flow", "section `nobody`: it has no operators"]);
}

#[test]
fn a_section_hangs_together_and_waits_for_nobody_of_its_own() {
    let device = emulated();
    let hub = Hub::bounded(1).envelope_bytes(64);

    let mut flow = Flow::new("apart");
    let (mut ends, mut all) = (Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let read = flow.add(format!("read {name}"), SendEach::new(batches(&[1])));
        let one = flow.add(name, Increment).on(&device);
        let collect = flow.add(format!("collect {name}"), Collect(shared()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect(one.output, collect.input);
        all.push(one);
        ends.push(collect);
    }
    flow.replay("net", [&all[0], &all[1]]);
    says(&flow.check().unwrap_err().to_string(), &["nothing within it leads from `one` to `two` or back"]);

    let mut flow = Flow::new("around");
    let read = flow.add("read", SendEach::new(batches(&[1])));
    let fork = flow.add("fork", Fork).on(&device);
    let around = flow.add("around", Increment);
    let join = flow.add("join", Join).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, join.left);
    flow.connect(fork.right, around.input);
    flow.connect_with(around.output, join.right, hub);
    flow.connect(join.output, collect.input);
    flow.replay("net", (&fork, &join));
    says(
        &flow.check().unwrap_err().to_string(),
        &["`join` takes what `fork` sends by way of `around`", "wait for itself"],
    );

    let mut flow = Flow::new("numbers");
    let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>)))).on(&device);
    let double = flow.add("double", map(async |n: u32| Ok(2 * n))).on(&device);
    let end = flow.add("end", sink(async |_: u32| Ok(()))).on(&device);
    flow.connect(numbers.output, double.input);
    flow.connect(double.output, end.input);
    flow.replay("net", &double);
    let told = flow.check().unwrap_err().to_string();
    says(&told, &["the messages at `double.input`, on its edge, are no envelopes", "the messages at `double.output`"]);

    let mut flow = Flow::new("source");
    let numbers = flow.add("numbers", source(|| std::future::ready(Ok(None::<u32>)))).on(&device);
    let end = flow.add("end", sink(async |_: u32| Ok(()))).on(&device);
    flow.connect(numbers.output, end.input);
    flow.replay("net", (&numbers, &end));
    says(&flow.check().unwrap_err().to_string(), &["no message comes into it from outside"]);
}

on_both!(two_sections_of_one_flow_replay_beside_each_other, async |device: Device| {
    let run = async |replay: bool| {
        let seen = shared();
        let mut flow = Flow::new("two");
        let hub = Hub::bounded(2).envelope_bytes(4096);
        let read = flow.add("read", SendEach::new(batches(&[2; 20])));
        let one = flow.add("one", Affine(2, 3)).on(&device);
        let between = flow.add("between", Increment).on(&device);
        let two = flow.add("two", Affine(5, 7)).on(&device);
        let three = flow.add("three", Increment).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, between.input, hub);
        flow.connect(between.output, two.input);
        flow.connect_with(two.output, three.input, hub);
        flow.connect(three.output, collect.input);
        if replay {
            flow.replay("first", &one).at_most(1);
            flow.replay("second", (&two, &three)).buckets([2, 4]).rows(two.input, ROW);
        }
        let report = flow.run().await.unwrap();
        let seen = lock(&seen).clone();
        (seen, report)
    };
    let (streamed, _) = run(false).await;
    let (replayed, report) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!([section(&report, "first"), section(&report, "second")], [(19, 1, 1); 2]);
});

on_both!(g11_flows_capture_at_once_while_others_allocate_and_make_streams, async |device: Device| {
    let (streamed, _) = chain(&device, &[1, 2, 3, 4, 5, 6, 7, 8], false).await;
    let done = Arc::new(AtomicBool::new(false));
    let busy = std::thread::spawn({
        let (device, done) = (device.clone(), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                let stream = Stream::new(&device).unwrap();
                let mut data = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
                increment::launch(&stream, &mut data).unwrap();
                stream.synchronize_blocking().unwrap();
            }
        }
    });
    let flows: Vec<_> = (0..2)
        .map(|_| {
            let device = device.clone();
            tokio::spawn(async move { chain(&device, &[1, 2, 3, 4, 5, 6, 7, 8], true).await })
        })
        .collect();
    for flow in flows {
        let (replayed, report) = flow.await.unwrap();
        assert_eq!(replayed, streamed);
        assert_eq!(section(&report, "net"), (4, 4, 4));
    }
    done.store(true, Ordering::Relaxed);
    busy.join().unwrap();
});

on_both!(a_section_runs_again_and_uses_what_its_operators_keep, async |device: Device| {
    /// Adds what it has from before, which the flow's owner may use too.
    struct Add(Buffer<u32>);

    impl Operator for Add {
        type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

        async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
            let mut x = ports.input.take()?;
            add_to::launch(cx.stream()?, &mut x, &self.0)?;
            ports.output.send(x).await
        }
    }

    let stream = Stream::new(&device).unwrap();
    let weights = Buffer::from_slice(&stream, &[100; 64]).unwrap();
    let seen = shared();
    let mut flow = Flow::new("again");
    let read = flow
        .add(
            "read",
            source({
                let device = device.clone();
                let mut left = 0;
                move || {
                    left += 1;
                    let batch = (left % 4 != 0).then(|| Buffer::from_slice(&Stream::new(&device)?, &[left; 8]));
                    std::future::ready(batch.transpose().map(|batch| batch.map(Envelope::from)))
                }
            }),
        )
        .on(&device);
    let one = flow.add("one", Add(weights)).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect(read.output, one.input);
    flow.connect_with(one.output, collect.input, Hub::bounded(1).envelope_bytes(64));
    flow.replay("net", &one);
    for _ in 0..2 {
        let report = flow.run().await.unwrap();
        assert_eq!(section(&report, "net"), (2, 1, 1));
    }
    let firsts: Vec<_> = lock(&seen).iter().map(|data: &Vec<u32>| data[0]).collect();
    assert_eq!(firsts, [101, 102, 103, 105, 106, 107]);
});

on_both!(a_section_that_cannot_go_on_is_named_with_what_it_waits_for, async |device: Device| {
    let mut flow = Flow::new("stalled");
    let hub = Hub::bounded(1).envelope_bytes(64);
    let read = flow.add("read", SendEach::new(batches(&[1, 1])));
    let never = flow.add(
        "never",
        task(|ports: &mut SourcePorts<Envelope<u32>>, _| {
            use futures::FutureExt;
            // It neither sends nor ends, and waits for a blank that it has itself.
            async move {
                let _first = ports.output.blank().await?;
                let _second = ports.output.blank().await?;
                ports.output.blank().await.map(drop)
            }
            .boxed()
        }),
    );
    let cross = flow.add("cross", Cross).on(&device);
    let both = flow.add("both", Collect(shared()));
    let more = flow.add("more", Collect(shared()));
    flow.connect_with(read.output, cross.left, hub);
    flow.connect_with(never.output, cross.right, hub);
    flow.connect(cross.both, both.input);
    flow.connect(cross.more, more.input);
    flow.replay("net", &cross);
    let error = flow.run().await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    says(&error.to_string(), &["`cross` of section `net` waits for a message in hub `never.output -> cross.right`"]);
});

on_both!(a_section_is_stepped_through_and_stopped_like_an_operator, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("steps");
    let hub = Hub::bounded(1).envelope_bytes(64);
    let read = flow.add("read", SendEach::new(batches(&[1, 1])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", (&one, &two));
    let mut steps = flow.steps().unwrap();
    let mut runs = Vec::new();
    while let Some(step) = steps.next().await {
        runs.push(step.to_string());
    }
    let of = |name: &str| runs.iter().filter(|run| run.starts_with(&format!("{name}:"))).cloned().collect::<Vec<_>>();
    assert_eq!(of("one"), ["one: run 1", "one: run 2", "one: ended"], "{runs:?}");
    assert_eq!(of("two"), [""; 0], "it is one with the other");
    let report = steps.run_on().await.unwrap();
    assert_eq!(section(&report, "net"), (1, 1, 1));
    assert_eq!(*lock(&seen), [[2, 3, 4, 5], [1002, 1003, 1004, 1005]]);

    let (mut flow, many) = (Flow::new("stop"), vec![vec![1_u32; 4]; 100_000]);
    let read = flow.add("read", SendEach::new(many));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Increment).on(&device);
    let collect = flow.add("collect", Collect(shared()));
    flow.connect_with(read.output, one.input, hub);
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", [&one, &two]);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    let mut changes = handle.changes();
    until("some rounds", || handle.status()[1].runs > 3).await;
    handle.stop();
    let mut told = [Vec::new(), Vec::new()];
    while let Some(status) = futures::StreamExt::next(&mut changes).await {
        match &*status.name {
            "one" => told[0].push(status.status),
            "two" => told[1].push(status.status),
            _ => {}
        }
    }
    assert_eq!(told.map(|told| told.last().copied()), [Some(Status::Never); 2], "both are told of, to the end");
    let report = running.await.unwrap();
    let (replayed, ..) = section(&report, "net");
    assert!(replayed > 2 && report.untaken == 0, "what was sent was replayed: {report}");
    assert_eq!(report.operator("read").unwrap().messages_out, report.operator("collect").unwrap().messages_in);
});

on_both!(an_output_may_fan_out_within_a_section_and_a_port_take_many, async |device: Device| {
    struct Sums;

    #[derive(Ports)]
    struct SumsPorts {
        #[input]
        parts: Inputs<Envelope<u32>>,
        #[output]
        output: Output<Envelope<u32>>,
    }

    impl Operator for Sums {
        type Ports = SumsPorts;

        async fn compute(&mut self, ports: &mut SumsPorts, cx: &mut Cx) -> Result<()> {
            let mut parts = ports.parts.take()?;
            let mut sum = parts.next().expect("one of each connection");
            for part in parts {
                add_to::launch(cx.stream()?, &mut sum, &part)?;
            }
            ports.output.send(sum).await
        }
    }

    let run = async |replay: bool| {
        let (seen, graphs) = (shared(), shared());
        let mut flow = Flow::new("fan out");
        let hub = Hub::bounded(1).envelope_bytes(4096);
        let read = flow.add("read", SendEach::new(batches(&[2, 2, 1, 2])));
        let one = flow.add("one", Increment).on(&device);
        let left = flow.add("left", Affine(2, 7)).on(&device);
        let right = flow.add("right", Increment).on(&device);
        let sums = flow.add("sums", Sums).on(&device);
        let collect = flow.add("collect", Collect(seen.clone()));
        flow.connect_with(read.output, one.input, hub);
        flow.connect(one.output, [left.input, right.input]);
        flow.connect_with(left.output, sums.parts, hub);
        flow.connect(right.output, sums.parts);
        flow.connect(sums.output, collect.input);
        if replay {
            let hear = graphs.clone();
            let net = flow.replay("net", (&one, &left, &right, &sums));
            net.buckets([2]).rows(one.input, ROW).inspect(move |graph: &Graph| lock(&hear).push(graph.clone()));
        }
        let report = flow.run().await.unwrap();
        let (seen, graph) = (lock(&seen).clone(), lock(&graphs).pop());
        (seen, report, graph)
    };
    let (streamed, ..) = run(false).await;
    let (replayed, report, graph) = run(true).await;
    assert_eq!(replayed, streamed);
    assert_eq!(section(&report, "net"), (3, 1, 1));
    let graph = graph.expect("it was captured");
    // One of the two is sent a copy: that is a node, too, beside those that lead in and out.
    assert_eq!(graph.nodes().iter().filter(|node| node.kind == NodeKind::Copy).count(), 3, "{}", graph.to_dot());
    assert!(!comes_after(&graph, "left", "right"), "{}", graph.to_dot());
});

/// In any order of what the device and the tasks do.
#[tokio::test(start_paused = true)]
async fn whatever_comes_first_the_bytes_are_the_same() {
    let rows = [1, 2, 3, 1, 9, 4, 2];
    let plain = emulated();
    let (chained, _) = chain(&plain, &rows, false).await;
    let (joined, _) = fork_and_join(&plain, &rows, false).await;
    for seed in 0..40 {
        let simulation = Simulation::new(seed);
        let run = async {
            let device = Device::simulated(&simulation, Emulated::new()).race_checked();
            let (both, report) = chain(&device, &rows, true).await;
            assert_eq!(both, chained, "seed {seed}");
            assert_eq!(section(&report, "net"), (3, 4, 3), "seed {seed}");
            let (both, _) = fork_and_join(&device, &rows, true).await;
            assert_eq!(both, joined, "seed {seed}");
        };
        simulation.run(run).await;
    }
}
