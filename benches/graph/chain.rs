//! A chain of 32 operators, each a small kernel in place: host time a message, streamed and replayed as one graph.
//!
//! Processor time of the whole process, of a run with many messages less one with few; on a runtime of one thread. Many are so
//! few that no stream is ever full: then the driver would spin until the device has made room, and that be counted.

use tokio::runtime::Builder;
use wakeline::{
    operator::{MapPorts, SinkPorts, SourcePorts},
    prelude::*,
};

use crate::{
    cpu,
    figure::{figure, median},
};

const STAGES: usize = 32;
/// Of a message: one warp.
const ELEMENTS: usize = 32;
const ROUNDS: usize = 15;

#[kernel(unsafe(cuda = "../stage/step.cu"))]
fn step(x: &mut [u32]) {
    x.iter_mut().for_each(|x| *x += 1);
}

/// Sends so many envelopes of its device.
struct Feed(u32);

impl Operator for Feed {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.output.blank().await?;
        x.set_len(ELEMENTS)?;
        cx.stream()?.fill(&mut x, 0)?;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.output.send(x).await
    }
}

struct Step;

impl Operator for Step {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        step::launch(cx.stream()?, &mut x)?;
        ports.output.send(x).await
    }
}

struct End;

impl Operator for End {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        ports.input.take().map(drop)
    }
}

/// Microseconds of processor time for so many messages, with all that a run costs besides.
fn run(device: &Device, messages: u32, replay: bool) -> Result<f64> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut flow = Flow::new("chain");
    let feed = flow.add("feed", Feed(messages)).on(device);
    let steps: Vec<_> = (0..STAGES).map(|n| flow.add(format!("step {n}"), Step).on(device)).collect();
    let end = flow.add("end", End).on(device);
    let hub = Hub::bounded(8).envelopes(16).envelope_bytes(ELEMENTS * size_of::<u32>());
    flow.connect_with(feed.output, steps[0].input, hub);
    for two in steps.windows(2) {
        flow.connect_with(two[0].output, two[1].input, Hub::bounded(8));
    }
    flow.connect_with(steps[STAGES - 1].output, end.input, Hub::bounded(8));
    if replay {
        flow.replay("steps", steps.iter().collect::<Vec<_>>()).buckets([ELEMENTS]).at_start();
    }
    let before = cpu::used();
    runtime.block_on(flow.run())?;
    Ok((cpu::used() - before).as_secs_f64() * 1e6)
}

/// Microseconds a message.
fn each(device: &Device, [few, many]: [u32; 2], replay: bool) -> Result<f64> {
    Ok((run(device, many, replay)? - run(device, few, replay)?) / f64::from(many - few))
}

pub(crate) fn measure(device: &Device) -> Result<()> {
    let messages = if device.is_cuda() { [20, 170] } else { [5, 25] };
    let mut all = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (way, all) in all.iter_mut().enumerate() {
            let took = each(device, messages, way == 1)?;
            if round > 0 {
                all.push(took);
            }
        }
    }
    let ratio = median(all[0].iter().zip(&all[1]).map(|(streamed, replayed)| streamed / replayed).collect());
    let [streamed, replayed] = all.map(median);
    figure("graph.chain.host", replayed, "us/message", streamed);
    figure("graph.chain.host.ratio", ratio, "fold", 10.0);
    Ok(())
}
