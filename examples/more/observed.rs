//! A flow to look at while it runs: it prints the URL of a live page. The page names `label`, which is too slow for the
//! others, and shows who waits for whom.
//!
//! `cargo run --release -p wakeline-more-examples --example observed -- [--seconds 600] [--device cuda:0|emulated] [--page 127.0.0.1:0]`
//!
//! ```text
//!                section `filter`: one graph
//!   camera ──> smooth ──> brighten ──┬──> label ──> log
//!   host       device     device     └──> preview
//! ```

use std::{net::SocketAddr, process::ExitCode, thread, time::Duration};

use clap::Parser;
use wakeline::{
    observe::{Observe, PageOptions},
    operator::MapPorts,
    prelude::*,
};

/// Runs a flow with one slow operator, and serves a page about it.
#[derive(Parser)]
struct Args {
    /// How long it runs.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// The address of the page; port 0 selects a free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    page: SocketAddr,
}

/// The numbers of a frame.
const FRAME: usize = 64 * 64;

#[kernel(unsafe(cuda = "observed.cu"), over = [to.len()])]
fn smooth(from: &[f32], to: &mut [f32]) {
    for i in 0..to.len() {
        let (left, right) = (from[i.saturating_sub(1)], from[(i + 1).min(from.len() - 1)]);
        to[i] = (left + from[i] + right) / 3.0;
    }
}

#[kernel(unsafe(cuda = "observed.cu"))]
fn brighten(frame: &mut [f32]) {
    frame.iter_mut().for_each(|number| *number = (1.5 * *number).min(1.0));
}

#[derive(Ports)]
struct CameraPorts {
    #[output]
    frames: Output<Envelope<f32>>,
}

struct Camera {
    frame: u32,
}

impl Operator for Camera {
    type Ports = CameraPorts;

    async fn compute(&mut self, ports: &mut CameraPorts, _cx: &mut Cx) -> Result<()> {
        let mut frame = ports.frames.blank().await?;
        frame.set_len(FRAME)?;
        frame.write().await?.fill((self.frame % 100) as f32 / 100.0);
        self.frame += 1;
        ports.frames.send(frame).await?;
        Ok(())
    }
}

struct Smooth;

impl Operator for Smooth {
    type Ports = MapPorts<Envelope<f32>, Envelope<f32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let frame = ports.input.take()?;
        let mut smoothed = ports.output.blank().await?;
        smoothed.set_len(frame.len())?;
        smooth::launch(cx.stream()?, &frame, &mut smoothed)?;
        ports.output.send(smoothed).await?;
        Ok(())
    }
}

/// The mean of a frame. It stands for a model that computes for 8 ms on the host.
async fn label(frame: Envelope<f32>) -> Result<f32> {
    let numbers = frame.read().await?;
    thread::sleep(Duration::from_millis(8));
    Ok(numbers.iter().sum::<f32>() / numbers.len() as f32)
}

async fn run(args: &Args) -> Result<Report> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let mut flow = Flow::new("observed");
    let camera = flow.add("camera", Camera { frame: 0 });
    let smooth = flow.add("smooth", Smooth).on(&device);
    let brighten = flow.add(
        "brighten",
        map_with(async |mut frame: Envelope<f32>, cx: &mut Cx| {
            brighten::launch(cx.stream()?, &mut frame)?;
            Ok(frame)
        }),
    );
    let brighten = brighten.on(&device);
    // A thread of its own, as it would block one of the runtime's.
    let label = flow.add("label", map(label)).on_own_thread();
    let preview = flow.add("preview", sink(async |frame: Envelope<f32>| frame.read().await.map(drop)));
    let log = flow.add("log", sink(async |_label: f32| Ok(())));
    let frames = HubOptions::bounded(4).envelopes(6).envelope_bytes(FRAME * size_of::<f32>());
    flow.connect_with(camera.frames, smooth.input, frames);
    flow.connect_with(smooth.output, brighten.input, frames);
    flow.connect_with(brighten.output, [label.input, preview.input], frames);
    flow.connect_with(label.output, log.input, HubOptions::bounded(4));
    flow.replay("filter", (&smooth, &brighten)).buckets([FRAME]).at_start();

    // Events are recorded for the timeline of the last two seconds, with the device work of each run.
    let watch = Observe::new().paths(1).record(65_536);
    flow.observe(&watch);
    // It is served as long as `page` is there. Viewers may stop this flow, as nothing depends on it.
    let page = watch.page_with(args.page, PageOptions::new().controls(true)).await?;
    println!("see it run at {}", page.url());
    let running = flow.spawn()?;
    let handle = running.handle();
    let seconds = Duration::from_secs(args.seconds);
    tokio::spawn(async move {
        // A flow that is stopped ends as usual: a trace that `WAKELINE_TRACE` names is saved.
        tokio::select! {
            () = tokio::time::sleep(seconds) => {}
            Ok(()) = tokio::signal::ctrl_c() => {}
        }
        handle.stop();
    });
    running.await
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Args::parse()).await {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("observed: {error:#}");
            ExitCode::FAILURE
        }
    }
}
