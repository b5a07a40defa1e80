//! wakeline: flows of a source, the stages and a sink, all on the device.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;
use wakeline::{Running, Stream, kernel::Grid, observe::Observe, prelude::*};

use crate::{CAPACITY, ELEMENTS, ENVELOPES, STAGES, Streams, Watch, Window, allocations, step::step};

#[derive(Ports)]
struct FeedPorts {
    #[output]
    out: Output<Envelope<u32>>,
}

/// Sends blank envelopes unchanged.
struct Feed;

impl Operator for Feed {
    type Ports = FeedPorts;

    async fn compute(&mut self, ports: &mut FeedPorts, _cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.out.blank().await?;
        envelope.set_len(ELEMENTS)?;
        ports.out.send(envelope).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct StagePorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output]
    out: Output<Envelope<u32>>,
}

/// Takes, launches, sends: on its own stream, or on the given one.
struct Stage(Option<Stream>);

impl Operator for Stage {
    type Ports = StagePorts;

    async fn compute(&mut self, ports: &mut StagePorts, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        let stream = match &self.0 {
            Some(shared) => shared,
            None => cx.stream()?,
        };
        let grid = Grid::blocks([1, 1, 1]).threads([ELEMENTS as u32, 1, 1]);
        step::launch_with(grid, stream, &mut envelope)?;
        ports.out.send(envelope).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct DrainPorts {
    #[input]
    input: Input<Envelope<u32>>,
}

/// Returns envelopes to the hub.
struct Drain {
    watch: Arc<Watch>,
    chain: usize,
}

impl Operator for Drain {
    type Ports = DrainPorts;

    async fn compute(&mut self, ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
        drop(ports.input.take()?);
        self.watch.passed[self.chain].0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn chain(device: &Device, streams: Streams, watch: &Arc<Watch>, number: usize, observe: Option<&Observe>) -> Flow {
    let shared = match streams {
        Streams::Own => None,
        Streams::Shared => Some(Stream::named(device, "shared").expect("a stream")),
    };
    let mut flow = Flow::new(format!("chain {number}"));
    observe.into_iter().for_each(|observe| flow.observe(observe));
    let feed = flow.add("feed", Feed).on(device);
    let hub = HubOptions::bounded(CAPACITY);
    let mut from = feed.out;
    for at in 0..STAGES {
        let stage = flow.add(format!("stage {at}"), Stage(shared.clone())).on(device);
        let hub = if at == 0 { hub.envelopes(ENVELOPES).envelope_bytes(ELEMENTS * size_of::<u32>()) } else { hub };
        flow.connect_with(from, stage.input, hub);
        from = stage.out;
    }
    let drain = flow.add("drain", Drain { watch: watch.clone(), chain: number }).on(device);
    flow.connect_with(from, drain.input, hub);
    flow
}

/// A runtime of so many threads, and as many chains on it.
pub(crate) struct Ours {
    runtime: Runtime,
    threads: usize,
    device: Device,
    streams: Streams,
    observe: Option<Observe>,
}

impl Ours {
    pub(crate) fn new(device: &Device, streams: Streams, threads: usize) -> Self {
        let mut builder = match threads {
            1 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.worker_threads(threads).enable_all().build().expect("a runtime");
        Self { runtime, threads, device: device.clone(), streams, observe: None }
    }

    /// Its flows are observed.
    pub(crate) fn observed(self, observe: Observe) -> Self {
        Self { observe: Some(observe), ..self }
    }

    fn start(&self) -> (Arc<Watch>, Vec<Running>) {
        let watch = Arc::new(Watch::new(self.threads));
        let chains =
            (0..self.threads).map(|number| chain(&self.device, self.streams, &watch, number, self.observe.as_ref()));
        let _inside = self.runtime.enter();
        let running = chains.map(|flow| flow.spawn().expect("a valid flow")).collect();
        (watch, running)
    }

    /// Waits: with one thread, this thread runs the flow meanwhile.
    fn pass(&self, time: Duration) {
        if self.threads == 1 {
            self.runtime.block_on(async { tokio::time::sleep(time).await });
        } else {
            thread::sleep(time);
        }
    }

    fn end(&self, running: Vec<Running>) -> Duration {
        let began = Instant::now();
        running.iter().for_each(|running| running.stop());
        self.runtime.block_on(async {
            for running in running {
                running.await.expect("a flow that runs");
            }
        });
        began.elapsed()
    }

    pub(crate) fn measure(&self) -> Window {
        let (watch, running) = self.start();
        let seen = watch.window(|time| self.pass(time));
        Window::new(self.threads, &seen, self.end(running))
    }

    /// Heap allocations per message, from the source to the sink.
    pub(crate) fn allocations(&self) -> f64 {
        let (watch, running) = self.start();
        watch.window(|time| self.pass(time));
        let before = watch.messages();
        allocations::begin();
        self.pass(Duration::from_millis(200));
        let (count, messages) = (allocations::end(), watch.messages() - before);
        self.end(running);
        count as f64 / messages.max(1) as f64
    }
}
