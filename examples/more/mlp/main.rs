//! A perceptron of four layers on a GPU, with cuBLAS: requests of any size, streamed and as a CUDA graph, compared.
//!
//! `cargo run --release -p wakeline-more-examples --example mlp -- [--device cuda:0|emulated] [--weights FILE] [--requests 20000] [--rows 64]`
//!
//! ```text
//!   requests ──> layer 0 ──> layer 1 ──> layer 2 ──> layer 3 ──> answers
//!    (host)     └──────────── one graph a bucket ───────────┘    (host)
//! ```
//!
//! The operators are the same in both runs; the only difference is `Flow::replay`. A request has 1 to `--rows` rows;
//! the graphs are for 1, 2, 4, ... rows, and a request is padded to the next size.

mod linear;
mod net;

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use clap::Parser;
use half::f16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::prelude::*;

use net::{LAYERS, Layer, Net, WIDTH};

/// Runs a perceptron on a GPU, streamed and as a graph.
#[derive(Parser)]
struct Args {
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
    /// The weights: float16, little-endian, 4 layers of 512 x 512 and 512. A missing file is created, with random
    /// weights.
    #[arg(long, default_value = "target/mlp.weights")]
    weights: PathBuf,
    /// Number of requests; default: 20000, or 50 on the emulated device.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// The maximum number of rows in a request.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    rows: u16,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Requests of every size, all taken from the same rows.
struct Requests {
    rows: Arc<Vec<f16>>,
    sizes: std::vec::IntoIter<usize>,
}

#[derive(Ports)]
struct RequestsPorts {
    #[output]
    rows: Output<Envelope<f16>>,
}

impl Operator for Requests {
    type Ports = RequestsPorts;

    async fn compute(&mut self, ports: &mut RequestsPorts, cx: &mut Cx) -> Result<()> {
        let Some(size) = self.sizes.next() else {
            cx.finish();
            return Ok(());
        };
        let mut request = ports.rows.blank().await?;
        request.set_len(size * WIDTH)?;
        request.write().await?.copy_from_slice(&self.rows[..size * WIDTH]);
        ports.rows.send(request).await?;
        Ok(())
    }
}

/// Compares the answers with the host's results.
struct Answers {
    expected: Arc<Vec<f16>>,
    /// The number of rows of each answer that are checked.
    looked_at: usize,
    rows: Arc<AtomicUsize>,
}

#[derive(Ports)]
struct AnswersPorts {
    #[input]
    answers: Input<Envelope<f16>>,
}

impl Operator for Answers {
    type Ports = AnswersPorts;

    async fn compute(&mut self, ports: &mut AnswersPorts, _cx: &mut Cx) -> Result<()> {
        let answer = ports.answers.take()?;
        let numbers = answer.read().await?;
        let looked_at = (self.looked_at * WIDTH).min(numbers.len());
        for (at, (number, expected)) in numbers[..looked_at].iter().zip(&**self.expected).enumerate() {
            let (number, expected) = (number.to_f32(), expected.to_f32());
            // The tolerance of half precision, four layers deep.
            if (number - expected).abs() > 0.02 + 0.02 * expected.abs() {
                let text = format!("row {}, number {}: {number} instead of {expected}", at / WIDTH, at % WIDTH);
                return Err(text.into());
            }
        }
        self.rows.fetch_add(numbers.len() / WIDTH, Ordering::Relaxed);
        Ok(())
    }
}

struct Load {
    rows: Arc<Vec<f16>>,
    expected: Arc<Vec<f16>>,
    sizes: Vec<usize>,
}

impl Load {
    fn new(args: &Args, requests: u32, net: &Net) -> Self {
        let mut random = StdRng::seed_from_u64(args.seed);
        let most = usize::from(args.rows);
        let sizes = (0..requests).map(|_| random.random_range(1..=most)).collect();
        let rows: Vec<_> = (0..most * WIDTH).map(|_| f16::from_f32(random.random::<f32>())).collect();
        // The host is slow: only the first two rows are computed and compared.
        let expected = Arc::new(net.on_host(&rows[..most.min(2) * WIDTH]));
        Self { rows: Arc::new(rows), expected, sizes }
    }
}

async fn run(device: &Device, net: &Arc<Net>, load: &Load, most: usize, replay: bool) -> Result<Duration> {
    let rows = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new(if replay { "replayed" } else { "streamed" });
    let requests = flow.add("requests", Requests { rows: load.rows.clone(), sizes: load.sizes.clone().into_iter() });
    let answers = Answers { expected: load.expected.clone(), looked_at: 2, rows: rows.clone() };
    let answers = flow.add("answers", answers);
    let layers: Vec<_> = (0..LAYERS).map(|n| flow.add(format!("layer {n}"), Layer::new(net, n)).on(device)).collect();
    let hub = HubOptions::bounded(4).envelopes(8).envelope_bytes(most * WIDTH * size_of::<f16>());
    flow.connect_with(requests.rows, layers[0].rows, hub);
    for two in layers.windows(2) {
        flow.connect_with(two[0].out, two[1].rows, hub);
    }
    flow.connect_with(layers[LAYERS - 1].out, answers.answers, hub);
    if replay {
        let buckets = (0..).map(|n| 1 << n).take_while(|size| *size < most).chain([most]);
        flow.replay("mlp", layers.iter().collect::<Vec<_>>()).buckets(buckets).rows(layers[0].rows, WIDTH).at_start();
    }
    let report = flow.run().await?;
    let sent: usize = load.sizes.iter().sum();
    let came = rows.load(Ordering::Relaxed);
    if came != sent {
        return Err(format!("{came} of {sent} rows were answered").into());
    }
    Ok(report.elapsed - report.setup)
}

async fn mlp(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let at_weights = |error: Error| error.at(args.weights.display().to_string());
    if !args.weights.exists() {
        Net::random(7).save(&args.weights).map_err(at_weights)?;
        println!("random weights in {}", args.weights.display());
    }
    let net = Arc::new(Net::load(&args.weights).map_err(at_weights)?);
    let requests = args.requests.unwrap_or(if device.is_cuda() { 20_000 } else { 50 });
    let load = Load::new(args, requests, &net);
    let most = usize::from(args.rows);
    let streamed = run(&device, &net, &load, most, false).await?;
    let replayed = run(&device, &net, &load, most, true).await?;
    let each_second = |took: Duration| f64::from(requests) / took.as_secs_f64();
    Ok(format!(
        "{requests} requests of 1 to {most} rows on {device} ({}): streamed {:.0} per second, replayed {:.0} per second: {:.2} times as \
         many",
        device.description(),
        each_second(streamed),
        each_second(replayed),
        streamed.as_secs_f64() / replayed.as_secs_f64()
    ))
}

#[tokio::main]
async fn main() -> ExitCode {
    match mlp(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("mlp: {error:#}");
            ExitCode::FAILURE
        }
    }
}
