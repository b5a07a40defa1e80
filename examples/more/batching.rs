//! A service that batches: requests of many callers go through the device together, and each gets its own answer.
//!
//! `cargo run --release -p wakeline-more-examples --example batching -- [--clients 200] [--requests 50] [--batch 64] [--device emulated]`
//!
//! ```text
//!   callers ──> service ──> pack ────────────> norm ──────> unpack ──> service ──> callers
//!                           up to 64 requests  one kernel   one answer for each
//!                           in one envelope    on a device
//! ```
//!
//! A request is a vector of 64 numbers, the answer its length. `pack` runs when a batch is full, or when its oldest
//! request has waited for 1 ms. The callers travel with the batch, as replies.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use tokio::task::JoinSet;
use wakeline::{condition::batch, hub::Reply, prelude::*};

/// Answers many small requests in few large batches, on a GPU.
#[derive(Parser)]
struct Args {
    /// Callers, each with one request at a time.
    #[arg(long, default_value_t = 200)]
    clients: usize,
    /// Requests of each caller.
    #[arg(long, default_value_t = 50)]
    requests: usize,
    /// The largest batch.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    /// cuda:0, cuda:1, ... or emulated; default: the first GPU, or emulated where there is no driver.
    #[arg(long)]
    device: Option<String>,
}

/// The numbers of a request.
const WIDTH: usize = 64;

/// The length of each row.
#[kernel(unsafe(cuda = "batching.cu"), over = [lengths.len()])]
fn row_lengths(rows: &[f32], lengths: &mut [f32]) {
    for (row, length) in rows.chunks_exact(WIDTH).zip(lengths) {
        *length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
    }
}

/// Requests in one envelope, and who waits for which.
#[derive(Message)]
struct Batch {
    #[envelope]
    numbers: Envelope<f32>,
    replies: Vec<Reply>,
}

#[derive(Ports)]
struct PackPorts {
    /// Its batches are a condition that is given when the operator is added.
    #[input]
    requests: Input<Vec<f32>>,
    #[output]
    batches: Output<Batch>,
}

struct Pack;

impl Operator for Pack {
    type Ports = PackPorts;

    async fn compute(&mut self, ports: &mut PackPorts, cx: &mut Cx) -> Result<()> {
        let mut numbers = ports.batches.blank::<f32>().await?;
        let space = numbers.space().await?;
        let (mut used, mut replies) = (0, Vec::new());
        while used + WIDTH <= space.len() {
            let Some(request) = ports.requests.try_take()? else { break };
            // The reply of the message that was just taken.
            let reply = cx.take_replies().into_iter().next().unwrap_or_default();
            if request.len() != WIDTH {
                let text = format!("a request has {WIDTH} numbers, this one {}", request.len());
                reply.fail(Error::new(ErrorKind::Usage, text));
                continue;
            }
            space[used..used + WIDTH].copy_from_slice(&request);
            used += WIDTH;
            replies.push(reply);
        }
        if replies.is_empty() {
            return Ok(());
        }
        numbers.set_len(used)?;
        ports.batches.send(Batch { numbers, replies }).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct NormPorts {
    #[input]
    batches: Input<Batch>,
    #[output]
    lengths: Output<Batch>,
}

struct Norm;

impl Operator for Norm {
    type Ports = NormPorts;

    async fn compute(&mut self, ports: &mut NormPorts, cx: &mut Cx) -> Result<()> {
        let (batch, mut numbers) = (ports.batches.take()?, ports.lengths.blank::<f32>().await?);
        numbers.set_len(batch.replies.len())?;
        row_lengths::launch(cx.stream()?, &batch.numbers, &mut numbers)?;
        ports.lengths.send(Batch { numbers, replies: batch.replies }).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct UnpackPorts {
    #[input]
    batches: Input<Batch>,
    #[output]
    answers: Output<f32>,
}

struct Unpack;

impl Operator for Unpack {
    type Ports = UnpackPorts;

    async fn compute(&mut self, ports: &mut UnpackPorts, _cx: &mut Cx) -> Result<()> {
        let Batch { numbers, replies } = ports.batches.take()?;
        for (reply, length) in replies.into_iter().zip(numbers.read().await?) {
            ports.answers.send_for(reply, *length).await?;
        }
        Ok(())
    }
}

async fn serve(args: &Args) -> Result<String> {
    let device = match &args.device {
        Some(name) => name.parse()?,
        None => Device::first()?,
    };
    let most = usize::from(args.batch);
    let mut flow = Flow::new("batching");
    let pack = flow.add("pack", Pack);
    let pack_requests = pack.requests;
    let pack = pack.when(batch(pack_requests, most, Duration::from_millis(1)));
    let norm = flow.add("norm", Norm).on(&device);
    let unpack = flow.add("unpack", Unpack);
    flow.connect_with(pack.batches, norm.batches, HubOptions::bounded(2).envelopes(3).envelope_bytes(most * WIDTH * 4));
    flow.connect_with(norm.lengths, unpack.batches, HubOptions::bounded(2).envelopes(3).envelope_bytes(most * 4));
    let lengths = flow.service_with("lengths", pack.requests, unpack.answers, HubOptions::bounded(4 * most));
    let running = flow.spawn()?;

    let began = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..args.clients {
        let (lengths, requests) = (lengths.clone(), args.requests);
        clients.spawn(async move {
            let mut times = Vec::with_capacity(requests);
            for request in 0..requests {
                let (x, sent) = (((client + request) % 100) as f32, Instant::now());
                let length = lengths.ask(vec![x; WIDTH]).await?;
                if length != 8.0 * x {
                    return Err(Error::other(format!("the length of 64 times {x} is {}, not {length}", 8.0 * x)));
                }
                times.push(sent.elapsed());
            }
            Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(client) = clients.join_next().await {
        match client.map_err(Error::other)? {
            Ok(more) => times.extend(more),
            // Callers get the kind of a flow's failure; the flow's own error has the cause.
            Err(error) => return Err(running.failure().unwrap_or(error)),
        }
    }
    let took = began.elapsed();
    drop(lengths);
    let report = running.await?;

    times.sort();
    let runs = report.operator("norm").map_or(0, |norm| norm.runs);
    let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
    Ok(format!(
        "{} requests in {runs} batches on {}: {:.0} requests/s, p50 {:.1?}, p99 {:.1?}",
        times.len(),
        device.name(),
        times.len() as f64 / took.as_secs_f64(),
        at(50),
        at(99)
    ))
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve(&Args::parse()).await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("batching: {error:#}");
            ExitCode::FAILURE
        }
    }
}
