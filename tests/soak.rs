//! A thousand flows in one process, each ended at a moment of its own: nothing of them is left.

mod common;

#[path = "../benches/support/allocations.rs"]
mod allocations;

use std::{task::Poll, time::Duration};

use common::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wakeline::{
    condition::{Gate, count, every},
    flow::Handle,
    prelude::*,
};

#[derive(Ports)]
struct CountPorts {
    #[output(envelope_bytes = 256)]
    numbers: Output<Envelope<u32>>,
}

/// Sends envelopes without an end.
struct Count(u32);

impl Operator for Count {
    type Ports = CountPorts;

    async fn compute(&mut self, ports: &mut CountPorts, cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        cx.insert_metadata("number", self.0);
        let mut numbers = ports.numbers.blank().await?;
        numbers.set_len(4)?;
        numbers.write().await?.fill(self.0);
        ports.numbers.send(numbers).await
    }
}

#[derive(Ports)]
struct PassPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output]
    output: Output<Envelope<u32>>,
}

/// Works on its device's stream, waits for it now and then, and fails or panics at some message.
struct Pass {
    fails_at: u32,
    panics: bool,
    seen: u32,
}

impl Operator for Pass {
    type Ports = PassPorts;

    async fn compute(&mut self, ports: &mut PassPorts, cx: &mut Cx) -> Result<()> {
        let mut numbers = ports.input.take()?;
        self.seen += 1;
        if self.seen == self.fails_at {
            assert!(!self.panics, "planned");
            return Err("planned".into());
        }
        let stream = cx.stream()?;
        stream.fill(&mut numbers, self.seen)?;
        if self.seen.is_multiple_of(3) {
            stream.ticket().completed().await?;
        }
        ports.output.send(numbers).await
    }
}

/// How a flow's life goes on and ends.
async fn lead(flow: Flow, gate: Gate, random: &mut StdRng) -> Result<Report> {
    let mut running = flow.spawn()?;
    let handle: Handle = running.handle();
    let some_turns = async |random: &mut StdRng| {
        for _ in 0..random.random_range(0..40) {
            tokio::task::yield_now().await;
        }
    };
    some_turns(random).await;
    match random.random_range(0..7) {
        0 => running.stop(),
        1 => running.abort(),
        2 => {
            drop(running);
            return Ok(Report::default());
        }
        3 => {
            handle.pause();
            let _ = handle.status();
            some_turns(random).await;
            handle.resume();
            running.stop();
        }
        4 => {
            gate.pause();
            some_turns(random).await;
            gate.resume();
            some_turns(random).await;
            gate.end();
        }
        5 => {
            // Asked for its end, given up, and asked again.
            if let Poll::Ready(ended) = futures::poll!(&mut running) {
                return ended;
            }
            handle.stop();
        }
        _ => gate.end(),
    }
    running.await
}

async fn one(device: &Device, random: &mut StdRng) {
    let mut flow = Flow::new("soak");
    let gate = flow.gate("numbers");
    let mut numbers = flow.add("count", Count(0)).when(gate.clone());
    if random.random_bool(0.3) {
        numbers = numbers.when(count(random.random_range(0..60)));
    }
    if random.random_bool(0.2) {
        numbers = numbers.when(every(Duration::from_micros(100)));
    }
    let mut from = numbers.numbers;
    for at in 0..random.random_range(1..4) {
        let fails_at = if random.random_bool(0.2) { random.random_range(1..20) } else { u32::MAX };
        let pass = Pass { fails_at, panics: random.random_bool(0.5), seen: 0 };
        let pass = flow.add(format!("pass {at}"), pass).on(device);
        flow.connect_with(from, pass.input, Hub::bounded(random.random_range(1..4)));
        from = pass.output;
    }
    let end = flow.add("end", sink(async |numbers: Envelope<u32>| numbers.read().await.map(drop)));
    flow.connect(from, end.input);
    match lead(flow, gate, random).await {
        Ok(_) => {}
        Err(error) if error.is_cancelled() || error.to_string().contains("planned") => {}
        Err(error) => panic!("{error}"),
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// `flows` flows, several at a time; then what there is of tasks, threads and bytes once all has come to rest.
async fn round(device: &Device, seed: u64, flows: u64) -> (usize, usize, i64) {
    const AT_A_TIME: u64 = 4;
    let lanes = (0..AT_A_TIME).map(|lane| {
        let device = device.clone();
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed * AT_A_TIME + lane);
            for _ in 0..flows / AT_A_TIME {
                one(&device, &mut random).await;
            }
        })
    });
    for lane in lanes.collect::<Vec<_>>() {
        lane.await.expect("no flow panics");
    }
    // Those whose handle was dropped end in the background.
    let metrics = tokio::runtime::Handle::current().metrics();
    while metrics.num_alive_tasks() > 1 || device.memory_in_use() > 0 {
        tokio::task::yield_now().await;
    }
    (metrics.num_alive_tasks(), threads(), allocations::held())
}

#[test]
fn l3_a_thousand_flows_leave_nothing_behind() {
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("planned") {
            eprintln!("{info}");
        }
    }));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    allocations::begin();
    let device = Device::emulated(Emulated::new().workers(2));
    runtime.block_on(async {
        let task = tokio::spawn(async move {
            // What is made once, and kept.
            let mut before = round(&device, 0, 200).await;
            let mut grown = Vec::new();
            for seed in 1..=5 {
                let after = round(&device, seed, 200).await;
                assert_eq!(after.0, before.0, "tasks");
                grown.push(after.2 - before.2);
                before = after;
            }
            // A queue of the runtime's may have grown once; a flow that leaves something behind shows in every round.
            let least = grown.iter().min().copied().unwrap_or_default();
            assert!(least <= 0, "bytes that 200 flows left behind, five times: {grown:?}");
            assert_eq!(device.memory_in_use(), 0);
        });
        task.await.unwrap();
    });
}
