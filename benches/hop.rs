//! Cost of a hop: a chain of 32 derived operators, with statistics, that passes a 64-byte host message, against the
//! same chain of bare tokio tasks over `tokio::sync::mpsc`. Both in this process, alternating.
//!
//! ```sh
//! cargo bench -p wakeline-benches --bench hop                  # one codegen unit, thin LTO
//! cargo bench -p wakeline-benches --bench hop --profile user   # what cargo does by default, as in a user's program
//! ```

#[path = "support/figure.rs"]
mod figure;

use std::time::{Duration, Instant};

use figure::{alternate, figure};
use tokio::{runtime::Runtime, sync::mpsc};
use wakeline::prelude::*;

const CHAIN: usize = 32;
const ROUNDS: usize = 9;

type Payload = [u8; 64];

#[derive(Ports)]
struct FirstPorts {
    #[output]
    out: Output<Payload>,
}

struct First(u64);

impl Operator for First {
    type Ports = FirstPorts;

    async fn compute(&mut self, ports: &mut FirstPorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        ports.out.send([self.0 as u8; 64]).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct PassPorts {
    #[input]
    input: Input<Payload>,
    #[output]
    out: Output<Payload>,
}

struct Pass;

impl Operator for Pass {
    type Ports = PassPorts;

    async fn compute(&mut self, ports: &mut PassPorts, _cx: &mut Cx) -> Result<()> {
        let message = ports.input.take()?;
        ports.out.send(message).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct LastPorts {
    #[input]
    input: Input<Payload>,
}

struct Last(u64);

impl Operator for Last {
    type Ports = LastPorts;

    async fn compute(&mut self, ports: &mut LastPorts, _cx: &mut Cx) -> Result<()> {
        self.0 += u64::from(std::hint::black_box(ports.input.take()?)[63]);
        Ok(())
    }
}

async fn ours(capacity: usize, messages: u64) -> Duration {
    let mut flow = Flow::new("hop");
    let first = flow.add("first", First(messages));
    let mut from = first.out;
    for at in 2..CHAIN {
        let pass = flow.add(format!("pass {at}"), Pass);
        flow.connect_with(from, pass.input, HubOptions::bounded(capacity));
        from = pass.out;
    }
    let last = flow.add("last", Last(0));
    flow.connect_with(from, last.input, HubOptions::bounded(capacity));
    let began = Instant::now();
    let report = flow.run().await.expect("the flow runs");
    let took = began.elapsed();
    assert_eq!(report.operator("last").map(|last| last.messages_in), Some(messages));
    took
}

async fn bare(capacity: usize, messages: u64) -> Duration {
    let (first, mut from) = mpsc::channel::<Payload>(capacity);
    let began = Instant::now();
    let mut tasks = vec![tokio::spawn(async move {
        for left in (0..messages).rev() {
            first.send([left as u8; 64]).await.expect("the chain is alive");
        }
    })];
    for _ in 2..CHAIN {
        let (to, next) = mpsc::channel(capacity);
        let mut input = std::mem::replace(&mut from, next);
        tasks.push(tokio::spawn(async move {
            while let Some(message) = input.recv().await {
                to.send(message).await.expect("the chain is alive");
            }
        }));
    }
    let mut seen = 0;
    tasks.push(tokio::spawn(async move {
        let mut sum = 0;
        while let Some(message) = from.recv().await {
            sum += u64::from(std::hint::black_box(message)[63]);
            seen += 1;
        }
        assert_eq!(seen, messages);
        std::hint::black_box(sum);
    }));
    for task in tasks {
        task.await.expect("no task panics");
    }
    began.elapsed()
}

fn measure(name: &str, runtime: &Runtime, capacity: usize, messages: u64) {
    let per_hop = |took: Duration| took.as_secs_f64() * 1e6 / (messages as f64 * CHAIN as f64);
    let (bare, ours) = alternate(
        ROUNDS,
        || per_hop(runtime.block_on(bare(capacity, messages))),
        || per_hop(runtime.block_on(ours(capacity, messages))),
    );
    figure(&format!("{name}.hop"), ours.median, "us", bare.median);
    figure(&format!("{name}.ratio"), ours.ratio, "x", 1.0);
}

fn main() {
    if !figure::asked() {
        return;
    }
    println!("profile = {}", env!("BUILT_IN_PROFILE"));
    let current = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let two = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    measure("hop.cap1.current", &current, 1, 30_000);
    measure("hop.cap64.current", &current, 64, 60_000);
    measure("hop.cap1.two", &two, 1, 20_000);
    measure("hop.cap64.two", &two, 64, 40_000);
}
