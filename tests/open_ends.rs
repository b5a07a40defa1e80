//! What goes into a replayed section and what comes out of it: copies of its graph, wherever the messages lie.

#[path = "common/mod.rs"]
mod common;

use common::*;
use wakeline::prelude::*;

/// Sends what it is given on, in memory that it asks for itself.
struct Afresh;

impl Operator for Afresh {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let mut y = cx.alloc::<u32>(x.len())?;
        add_one::launch(cx.stream()?, &x, &mut y)?;
        ports.output.send(y.into()).await
    }
}

/// Sends what it is given both ways.
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

/// Takes at two inputs, and drops what it took in turns: this one first, that one first.
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
            let came = host.read().await?.to_vec();
            lock(&self.0).push(came);
        }
        self.1 += 1;
        let [first, last] = if self.1 % 3 == 0 { [left, right] } else { [right, left] };
        drop(first);
        drop(last);
        Ok(())
    }
}

// What was told to one end lies at another in the next round. Nothing orders the two, and no launch runs them like that.
on_both!(memory_goes_from_one_open_end_to_another, async |device: Device| {
    let seen = shared();
    let mut flow = Flow::new("to and fro");
    let hub = Hub::bounded(1).envelope_bytes(256);
    let rounds = 12;
    let read = flow.add("read", SendEach::new((0..rounds).map(|n| vec![n; 64])));
    let fork = flow.add("fork", Fork).on(&device);
    let (left, right) = (flow.add("left", Afresh).on(&device), flow.add("right", Afresh).on(&device));
    let end = flow.add("end", InTurns(seen.clone(), 0)).on(&device);
    flow.connect_with(read.output, fork.input, hub);
    flow.connect(fork.left, left.input);
    flow.connect(fork.right, right.input);
    flow.connect(left.output, end.left);
    flow.connect(right.output, end.right);
    flow.replay("net", (&fork, &left, &right)).at_most(1);
    let report = flow.run().await.unwrap();
    assert_eq!(report.section("net").unwrap().replayed, u64::from(rounds) - 1);
    let wanted: Vec<_> = (0..rounds).flat_map(|n| [vec![n + 1; 64], vec![n + 1; 64]]).collect();
    assert_eq!(*lock(&seen), wanted);
});
