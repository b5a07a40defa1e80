//! A chain of 32 operators, each a small kernel in place: host time per message, streamed and replayed as one graph.
//!
//! Measures processor time of the whole process from the end of one message to the end of a later one, within one run
//! on a single-threaded runtime: the other costs of a run, and the wait for the device at its end, are excluded. The
//! messages are so few that no stream is ever full: otherwise the driver would spin until the device has made room, and
//! that would be counted.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::runtime::Builder;
use wakeline::{
    operator::{MapPorts, SinkPorts, SourcePorts},
    prelude::*,
};

use crate::{
    cpu,
    figure::{figure, median},
    step::step,
};

const STAGES: usize = 32;
/// Per message: one warp.
const ELEMENTS: usize = 32;
const ROUNDS: usize = 15;

/// Sends so many envelopes without writing them: a message should cost only what the chain costs.
struct Feed(u32);

impl Operator for Feed {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.output.blank().await?;
        x.set_len(ELEMENTS)?;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.output.send(x).await?;
        Ok(())
    }
}

struct Step;

impl Operator for Step {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        step::launch(cx.stream()?, &mut x)?;
        ports.output.send(x).await?;
        Ok(())
    }
}

struct End {
    seen: u32,
    /// The processor time is recorded after these numbers of messages.
    at: [u32; 2],
    used: Arc<Mutex<Vec<Duration>>>,
}

impl Operator for End {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.seen += 1;
        if self.at.contains(&self.seen) {
            self.used.lock().expect("not poisoned").push(cpu::used());
        }
        ports.input.take().map(drop)
    }
}

/// Microseconds of processor time per message, for the messages after the first `few`.
fn each(device: &Device, [few, many]: [u32; 2], replay: bool) -> Result<f64> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let mut flow = Flow::new("chain");
    let feed = flow.add("feed", Feed(many)).on(device);
    let steps: Vec<_> = (0..STAGES).map(|n| flow.add(format!("step {n}"), Step).on(device)).collect();
    let used = Arc::<Mutex<Vec<Duration>>>::default();
    let end = flow.add("end", End { seen: 0, at: [few, many], used: used.clone() }).on(device);
    let hub = HubOptions::bounded(8).envelopes(16).envelope_bytes(ELEMENTS * size_of::<u32>());
    flow.connect_with(feed.output, steps[0].input, hub);
    for two in steps.windows(2) {
        flow.connect_with(two[0].output, two[1].input, HubOptions::bounded(8));
    }
    flow.connect_with(steps[STAGES - 1].output, end.input, HubOptions::bounded(8));
    if replay {
        flow.replay("steps", steps.iter().collect::<Vec<_>>()).buckets([ELEMENTS]).at_start();
    }
    runtime.block_on(flow.run())?;
    let used = used.lock().expect("not poisoned");
    let took = used[1] - used[0];
    Ok(took.as_secs_f64() * 1e6 / f64::from(many - few))
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
