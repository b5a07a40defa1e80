//! Feedback: data goes round a loop on the device until it has converged, and new data comes in meanwhile.
//!
//! `cargo run --release --example loop -- [--device cuda:0|emulated]`
//!
//! ```text
//!   ingress `new` ──> step ──> egress `done`
//!                     ^  │
//!                     └──┘  again, until the roots change no more
//! ```
//!
//! `step` runs for a message from either side, and decides once the device has finished the round. The numbers stay on
//! the device from the first round to the last.

use wakeline::prelude::*;

/// One step of Newton's method for the square roots of `numbers`; `change` becomes the largest change of a root.
#[kernel(unsafe(cuda = "loop.cu"))]
fn newton(numbers: &[f32], roots: &mut [f32], change: &mut [f32]) {
    change[0] = 0.0;
    for (root, number) in roots.iter_mut().zip(numbers) {
        let next = (*root + number / *root) / 2.0;
        change[0] = change[0].max((next - *root).abs());
        *root = next;
    }
}

#[derive(Message)]
struct Work {
    rounds: u32,
    #[envelope]
    numbers: Envelope<f32>,
    #[envelope]
    roots: Envelope<f32>,
}

#[derive(Ports)]
struct StepPorts {
    /// New work, and work that returns.
    #[input(at_least = 1)]
    work: Inputs<Work>,
    #[output]
    again: Output<Work>,
    #[output]
    done: Output<Work>,
}

/// Does a round, and decides when the device is done with it.
struct Step {
    change: Option<Buffer<f32>>,
    seen: Option<Buffer<f32>>,
    work: Option<Work>,
}

impl Operator for Step {
    type Ports = StepPorts;

    async fn compute(&mut self, ports: &mut StepPorts, cx: &mut Cx) -> Result<()> {
        let Some((_, mut work)) = ports.work.try_take_any()? else { return Ok(()) };
        let stream = cx.stream()?.clone();
        let change = match &mut self.change {
            Some(change) => change,
            none => none.insert(Buffer::new(stream.device(), 1)?),
        };
        let seen = match &mut self.seen {
            Some(seen) => seen,
            none => none.insert(Buffer::pinned(stream.device(), 1)?),
        };
        newton::launch_with(
            Grid::blocks([1, 1, 1]).threads([256, 1, 1]),
            &stream,
            &work.numbers,
            &mut work.roots,
            change,
        )?;
        stream.copy(change, seen)?;
        work.rounds += 1;
        self.work = Some(work);
        Ok(())
    }

    /// Called when the round's device work is done, so this reads without a wait.
    async fn after(&mut self, ports: &mut StepPorts, _cx: &mut Cx) -> Result<()> {
        let (Some(work), Some(seen)) = (self.work.take(), &self.seen) else { return Ok(()) };
        let to = if seen.as_slice()?[0] > 1e-3 { &mut ports.again } else { &mut ports.done };
        to.send(work).await?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = match std::env::args().skip_while(|arg| arg != "--device").nth(1) {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let mut flow = Flow::new("roots");
    let step = flow.add("step", Step { change: None, seen: None, work: None }).on(&device);
    let new = flow.ingress_with("new", step.work, HubOptions::bounded(1).envelopes(8).envelope_bytes(4 * 1000));
    // Eight envelopes are four messages: with one place more, there is always room to send one back.
    flow.connect_with(step.again, step.work, HubOptions::bounded(5));
    let mut done = flow.egress("done", step.done);
    let running = flow.spawn()?;

    let feed = tokio::spawn(async move {
        for n in 1..=10_u16 {
            let (mut numbers, mut roots) = new.blanks().await?;
            numbers.fill_from(&[f32::from(n * n); 1000]).await?;
            roots.fill_from(&[1.0; 1000]).await?;
            new.send(Work { rounds: 0, numbers, roots }).await?;
        }
        Ok::<(), Error>(()) // `new` is dropped: nothing more comes, and the loop drains
    });
    while let Some(work) = done.recv().await {
        println!("{} after {} rounds", work.roots.read().await?[999], work.rounds);
    }
    feed.await.map_err(Error::other)??;
    running.await?;
    Ok(())
}
