//! The open ends of a section's graph: copies of the messages into it and out of it, wherever their memory is.

use common::*;
use wakeline::{
    Stream,
    device::{Emulated, Faults, Simulation},
    graph::Graph,
    prelude::*,
};

/// Adds one to each element, into memory that it allocates itself.
struct Afresh;

impl Operator for Afresh {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = cx.alloc::<u32>(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut y)?;
        ports.output.send(y.into()).await?;
        Ok(())
    }
}

struct Fork;

#[derive(Ports)]
struct ForkPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output(envelope_bytes = 256)]
    left: Output<Envelope<u32>>,
    #[output(envelope_bytes = 256)]
    right: Output<Envelope<u32>>,
}

impl Operator for Fork {
    type Ports = ForkPorts;

    async fn compute(&mut self, ports: &mut ForkPorts, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        for output in [&mut ports.left, &mut ports.right] {
            let mut y = output.blank().await?;
            y.set_len(x.len())?;
            cx.stream()?.copy(&x, &mut y)?;
            output.send(y).await?;
        }
        Ok(())
    }
}

/// Takes a message at each input, and drops the two in varying order.
struct InTurns(Shared<Vec<u32>>, usize);

#[derive(Ports)]
struct TwoPorts {
    #[input]
    left: Input<Envelope<u32>>,
    #[input]
    right: Input<Envelope<u32>>,
}

impl Operator for InTurns {
    type Ports = TwoPorts;

    async fn compute(&mut self, ports: &mut TwoPorts, cx: &mut Cx) -> Result<()> {
        let (left, right) = (ports.left.take()?, ports.right.take()?);
        let stream = cx.stream()?;
        for data in [&left, &right] {
            let mut host = Buffer::pinned(&stream.device().clone(), data.len())?;
            stream.copy(data, &mut host)?;
            let values = host.read().await?.to_vec();
            lock(&self.0).push(values);
        }
        self.1 += 1;
        let [first, last] = if self.1.is_multiple_of(3) { [left, right] } else { [right, left] };
        drop(first);
        drop(last);
        Ok(())
    }
}

/// `read -> fork -> (left, right) -> end`. The memory of `left` and `right` changes places from round to round.
async fn swapped_memory(device: &Device) {
    let seen = shared();
    let mut flow = Flow::new("swapped memory");
    let rounds = 12;
    let read = flow.add("read", SendEach::new((0..rounds).map(|n| vec![n; 64])));
    let fork = flow.add("fork", Fork).on(device);
    let (left, right) = (flow.add("left", Afresh).on(device), flow.add("right", Afresh).on(device));
    let end = flow.add("end", InTurns(seen.clone(), 0)).on(device);
    flow.connect_with(read.output, fork.input, HubOptions::bounded(1).envelope_bytes(256));
    flow.connect(fork.left, left.input);
    flow.connect(fork.right, right.input);
    flow.connect(left.output, end.left);
    flow.connect(right.output, end.right);
    flow.replay("net", (&fork, &left, &right)).at_most(1);
    let report = flow.run().await.unwrap();
    assert_eq!(report.section("net").unwrap().replayed, u64::from(rounds) - 1);
    let wanted: Vec<_> = (0..rounds).flat_map(|n| [vec![n + 1; 64], vec![n + 1; 64]]).collect();
    assert_eq!(*lock(&seen), wanted);
}

// The memory of one open end is that of another in the next round. Nothing orders the two copies.
on_both!(memory_moves_from_one_open_end_to_another, async |device: Device| swapped_memory(&device).await);

/// With any order of the device's work and the tasks.
#[tokio::test(start_paused = true)]
async fn open_ends_do_not_race() {
    for seed in 0..40 {
        let simulation = Simulation::new(seed);
        let run = async {
            let device = Device::simulated(&simulation, Emulated::new()).race_checked();
            swapped_memory(&device).await;
            assert_eq!(replayed(&device, Increment).await, batches(ROWS, 1), "seed {seed}");
        };
        simulation.run(run).await;
    }
}

struct SendThese(Vec<Envelope<u32>>);

impl Operator for SendThese {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let envelope = self.0.remove(0);
        if self.0.is_empty() {
            cx.finish();
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

struct AddOne;

impl Operator for AddOne {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = ports.output.blank().await?;
        y.set_len(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut y)?;
        ports.output.send(y).await?;
        Ok(())
    }
}

const LEN: usize = 8;

/// Messages of these lengths, in turn in device memory, user memory, page-locked memory and read-only memory. None has
/// capacity for more.
fn own(device: &Device, rows: &[u32]) -> Vec<Envelope<u32>> {
    let stream = Stream::new(device).unwrap();
    let envelopes = batches(rows, 0).into_iter().enumerate().map(|(number, data)| {
        Envelope::from(match number % 4 {
            0 => Buffer::from_slice(&stream, &data).unwrap(),
            1 => Buffer::wrap(data).unwrap().0,
            2 => {
                let mut pinned = Buffer::pinned(device, data.len()).unwrap();
                pinned.as_mut_slice().unwrap().copy_from_slice(&data);
                pinned
            }
            _ => Buffer::wrap_read_only(data).unwrap().0,
        })
    });
    envelopes.collect()
}

fn batches(rows: &[u32], plus: u32) -> Vec<Vec<u32>> {
    let batch = |(number, rows): (usize, &u32)| (0..*rows).map(|at| 100 * number as u32 + at + plus).collect();
    rows.iter().enumerate().map(batch).collect()
}

const ROWS: &[u32] = &[8, 8, 3, 1, 5, 8, 2, 7, 4, 6, 6, 6, 1, 8, 8];

/// `read -> one -> collect`, with every round replayed. Returns the collected messages.
async fn replayed(
    device: &Device,
    one: impl Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>>,
) -> Vec<Vec<u32>> {
    let seen = shared();
    let mut flow = Flow::new("own");
    let read = flow.add("read", SendThese(own(device, ROWS)));
    let one = flow.add("one", one).on(device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(2).envelope_bytes(4 * LEN);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    flow.replay("net", &one).buckets([LEN]).at_start();
    let report = flow.run().await.unwrap();
    assert_eq!(report.section("net").unwrap().replayed, ROWS.len() as u64);
    lock(&seen).clone()
}

on_both!(messages_in_user_memory_are_replayed, async |device: Device| {
    assert_eq!(replayed(&device, AddOne).await, batches(ROWS, 1));
});

// The message's memory has no capacity for the padding of the graph's shape.
on_both!(messages_in_user_memory_are_changed_in_place, async |device: Device| {
    assert_eq!(replayed(&device, Increment).await, batches(ROWS, 1));
});

on_both!(messages_that_no_kernel_uses_pass_through, async |device: Device| {
    assert_eq!(replayed(&device, pass_on()).await, batches(ROWS, 0));
});

/// Sends an envelope without valid data to `left`, and its input plus one to `right`.
struct Sieve;

impl Operator for Sieve {
    type Ports = ForkPorts;

    async fn compute(&mut self, ports: &mut ForkPorts, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let (left, mut right) = (ports.left.blank().await?, ports.right.blank().await?);
        right.set_len(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut right)?;
        ports.left.send(left).await?;
        ports.right.send(right).await?;
        Ok(())
    }
}

on_both!(an_output_without_valid_data_is_empty, async |device: Device| {
    let (lefts, rights) = (shared(), shared());
    let mut flow = Flow::new("sieve");
    let read = flow.add("read", SendThese(own(&device, ROWS)));
    let sieve = flow.add("sieve", Sieve).on(&device);
    let (left, right) = (flow.add("left", Collect(lefts.clone())), flow.add("right", Collect(rights.clone())));
    flow.connect_with(read.output, sieve.input, HubOptions::bounded(1).envelope_bytes(4 * LEN));
    flow.connect(sieve.left, left.input);
    flow.connect(sieve.right, right.input);
    flow.replay("net", &sieve).buckets([LEN]).at_start();
    let report = flow.run().await.unwrap();
    assert_eq!(report.section("net").unwrap().replayed, ROWS.len() as u64);
    assert_eq!(*lock(&lefts), vec![Vec::<u32>::new(); ROWS.len()]);
    assert_eq!(*lock(&rights), batches(ROWS, 1));
});

// User code may launch a section's graph that it inspects: each open end copies its memory onto itself.
on_both!(a_sections_graph_can_be_launched_by_itself, async |device: Device| {
    let graphs = shared::<Graph>();
    let seen = shared();
    let mut flow = Flow::new("shown");
    let read = flow.add("read", SendThese(own(&device, ROWS)));
    let one = flow.add("one", AddOne).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    let hub = HubOptions::bounded(2).envelope_bytes(4 * LEN);
    flow.connect_with(read.output, one.input, hub);
    flow.connect_with(one.output, collect.input, hub);
    let inspected = graphs.clone();
    flow.replay("net", &one).buckets([LEN]).at_start().inspect(move |graph| lock(&inspected).push(graph.clone()));
    flow.run().await.unwrap();
    drop(flow);
    let graph = lock(&graphs).pop().unwrap();
    let (exec, stream) = (graph.instantiate().unwrap(), Stream::new(&device).unwrap());
    for _ in 0..2 {
        exec.launch(&stream).unwrap().completed().await.unwrap();
    }
});

#[tokio::test]
async fn a_device_lost_at_an_open_end_is_the_flows_error() {
    let failed = async |copy| {
        let device = emulated_with(Emulated::new().faults(Faults::new().fail_copy(copy)));
        let mut flow = Flow::new("lost");
        let read = flow.add("read", SendEach::new(batches(&[8, 3, 8], 0)));
        let one = flow.add("one", Increment).on(&device);
        let collect = flow.add("collect", Collect(shared()));
        let hub = HubOptions::bounded(1).envelope_bytes(4 * LEN);
        flow.connect_with(read.output, one.input, hub);
        flow.connect_with(one.output, collect.input, hub);
        flow.replay("net", &one).buckets([LEN]).at_start();
        within(flow.run()).await.err()
    };
    // Each message is copied four times: to the device, into the graph, out of it, to the host.
    for copy in 1..=12 {
        assert!(failed(copy).await.is_some_and(|error| error.is_device_lost()), "{copy}");
    }
    assert!(failed(13).await.is_none(), "there are only twelve copies");
}
