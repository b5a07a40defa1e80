//! The measured flow: chunks that are already in page-locked envelopes go to the device, through a kernel and back.

use wakeline::{flow::Report, kernel::Grid, operator::MapPorts, prelude::*};

use crate::touch::touch;

pub(crate) use wakeline::operator::{SinkPorts, SourcePorts};

/// Sends blank envelopes unchanged: whole, and never filled.
struct Feed(usize);

impl Operator for Feed {
    type Ports = SourcePorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut chunk = ports.output.blank().await?;
        chunk.set_len(chunk.capacity())?;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.output.send(chunk).await?;
        Ok(())
    }
}

pub(crate) struct Touch;

impl Operator for Touch {
    type Ports = MapPorts<Envelope<u8>, Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut chunk = ports.input.take()?;
        touch::launch_with(grid(&chunk), cx.stream()?, &mut chunk)?;
        ports.output.send(chunk).await?;
        Ok(())
    }
}

/// One thread for each page.
fn grid(chunk: &Envelope<u8>) -> Grid {
    Grid::blocks([threads(chunk.len()).div_ceil(256), 1, 1])
}

pub(crate) fn threads(bytes: usize) -> u32 {
    (bytes / 4096).max(1) as u32
}

const BATCH: usize = 8;

#[derive(Ports)]
struct BatchPorts {
    #[input(batch = 8)]
    input: Input<Envelope<u8>>,
    #[output]
    output: Output<Envelope<u8>>,
}

/// Like [`Touch`], with several chunks in a run.
struct TouchBatch(Vec<Envelope<u8>>);

impl Operator for TouchBatch {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        self.0.extend(ports.input.take_batch()?);
        for chunk in &mut self.0 {
            touch::launch_with(grid(chunk), cx.stream()?, chunk)?;
        }
        ports.output.send_all(&mut self.0).await
    }
}

/// Waits for each chunk's arrival, as a reader must.
struct Eat;

impl Operator for Eat {
    type Ports = SinkPorts<Envelope<u8>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let chunk = ports.input.take()?;
        std::hint::black_box(chunk.read().await?[0]);
        Ok(())
    }
}

/// Sends so many bytes through each device, at once. Returns the time, without the setup before the first chunk.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only measured on CUDA devices"))]
pub(crate) async fn pass(devices: &[Device], total: usize, chunk: usize, envelopes: usize) -> f64 {
    let mut flow = Flow::new("through");
    for (at, device) in devices.iter().enumerate() {
        let feed = flow.add(format!("feed {at}"), Feed(total / chunk));
        let through = flow.add(format!("touch {at}"), Touch).on(device);
        let eat = flow.add(format!("eat {at}"), Eat);
        let hub = HubOptions::bounded(envelopes).envelopes(envelopes);
        flow.connect_with(feed.output, through.input, hub.envelope_bytes(chunk));
        flow.connect_with(through.output, eat.input, hub);
    }
    seconds(&flow.run().await.expect("the flow runs"))
}

/// Like [`pass`], with an operator that takes several chunks in a run.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only measured on CUDA devices"))]
pub(crate) async fn pass_batches(device: &Device, total: usize, chunk: usize, envelopes: usize) -> f64 {
    let mut flow = Flow::new("through");
    let feed = flow.add("feed", Feed(total / chunk));
    let through = flow.add("touch", TouchBatch(Vec::with_capacity(BATCH))).on(device);
    let eat = flow.add("eat", Eat);
    let hub = HubOptions::bounded(envelopes).envelopes(envelopes);
    flow.connect_with(feed.output, through.input, hub.envelope_bytes(chunk));
    flow.connect_with(through.output, eat.input, hub);
    seconds(&flow.run().await.expect("the flow runs"))
}

pub(crate) fn seconds(report: &Report) -> f64 {
    report.elapsed.as_secs_f64() - report.setup.as_secs_f64()
}
