//! candle beside wakeline: an operator that computes with tensors, on the host and, with the feature `cuda`, on a GPU.
//!
//! ```sh
//! cargo run --release --manifest-path examples/candle/Cargo.toml
//! cargo run --release --manifest-path examples/candle/Cargo.toml --features cuda
//! ```

#[cfg(feature = "cuda")]
mod on_a_gpu;
mod on_the_host;

use std::sync::atomic::{AtomicUsize, Ordering};

use wakeline::{
    operator::{MapPorts, sink, source},
    prelude::*,
};

const COLUMNS: usize = 4;

/// The rows that were checked.
static ROWS: AtomicUsize = AtomicUsize::new(0);

/// Rows of numbers through the operator: each comes back with a sum of one.
async fn run(device: &Device, normalise: impl Operator<Ports = MapPorts<Envelope<f32>, Envelope<f32>>>) -> Result<()> {
    let mut flow = Flow::new("candle");
    let mut messages = (1..=8).map(|first| (first..).take(2 * COLUMNS).map(|n: u16| f32::from(n)).collect::<Vec<_>>());
    let rows = flow.add(
        "rows",
        source(move || {
            let message = messages.next().map(|rows| Ok(Envelope::from(Buffer::wrap(rows)?.0)));
            std::future::ready(message.transpose())
        }),
    );
    let normalise = flow.add("normalise", normalise);
    let normalise = if device.is_host() { normalise } else { normalise.on(device) };
    let check = flow.add(
        "check",
        sink(async |rows: Envelope<f32>| {
            for row in rows.read().await?.chunks(COLUMNS) {
                let sum: f32 = row.iter().sum();
                if (sum - 1.0).abs() > 1e-5 {
                    return Err(format!("{row:?} has a sum of {sum}").into());
                }
                ROWS.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }),
    );
    let bytes = HubOptions::default().envelope_bytes(2 * COLUMNS * size_of::<f32>());
    flow.connect_with(rows.output, normalise.input, bytes.clone());
    flow.connect_with(normalise.output, check.input, bytes);
    flow.run().await?;
    println!("{} rows on {device}", ROWS.swap(0, Ordering::Relaxed));
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    run(&Device::host(), on_the_host::Normalise { columns: COLUMNS }).await?;
    #[cfg(feature = "cuda")]
    {
        let candle = candle_core::Device::new_cuda_with_stream(0).map_err(Error::other)?;
        let candle = candle.as_cuda_device().map_err(Error::other)?.clone();
        run(&Device::cuda(0)?, on_a_gpu::Normalise { columns: COLUMNS, candle }).await?;
    }
    Ok(())
}
