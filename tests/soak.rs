//! Leaks: hundreds of flows in one process, each ended at a random moment, and many messages through one hub. All
//! allocations of the process are counted, so the tests run one at a time.

#[path = "../benches/support/allocations.rs"]
mod allocations;

use std::{sync::Mutex, task::Poll, time::Duration};

use common::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    runtime::{Builder, Runtime},
    sync::Barrier,
};
use wakeline::{
    condition::{Gate, count, every},
    flow::Handle,
    prelude::*,
    stream::StreamPool,
};

#[derive(Ports)]
struct CountPorts {
    #[output(envelope_bytes = 256)]
    numbers: Output<Envelope<u32>>,
}

struct Count(u32);

impl Operator for Count {
    type Ports = CountPorts;

    async fn compute(&mut self, ports: &mut CountPorts, cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        cx.insert_metadata("number", self.0);
        let mut numbers = ports.numbers.blank().await?;
        numbers.set_len(4)?;
        numbers.write().await?.fill(self.0);
        ports.numbers.send(numbers).await?;
        Ok(())
    }
}

#[derive(Ports)]
struct PassPorts {
    #[input]
    input: Input<Envelope<u32>>,
    #[output]
    output: Output<Envelope<u32>>,
}

/// Works on its device's stream, waits for it in every third run, and fails or panics at message `fails_at`.
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
        ports.output.send(numbers).await?;
        Ok(())
    }
}

async fn run_and_end(flow: Flow, gate: Gate, random: &mut StdRng) -> Result<Report> {
    let mut running = flow.spawn()?;
    let handle: Handle = running.handle();
    let yield_some = async |random: &mut StdRng| {
        for _ in 0..random.random_range(0..40) {
            tokio::task::yield_now().await;
        }
    };
    yield_some(random).await;
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
            yield_some(random).await;
            handle.resume();
            running.stop();
        }
        4 => {
            gate.pause();
            yield_some(random).await;
            gate.resume();
            yield_some(random).await;
            gate.end();
        }
        5 => {
            // Poll for the end once, stop polling, then await it.
            if let Poll::Ready(ended) = futures::poll!(&mut running) {
                return ended;
            }
            handle.stop();
        }
        _ => gate.end(),
    }
    running.await
}

async fn one_flow(device: &Device, random: &mut StdRng) {
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
        flow.connect_with(from, pass.input, HubOptions::bounded(random.random_range(1..4)));
        from = pass.output;
    }
    let end = flow.add("end", sink(async |numbers: Envelope<u32>| numbers.read().await.map(drop)));
    flow.connect(from, end.input);
    match run_and_end(flow, gate, random).await {
        Ok(_) => {}
        Err(error) if error.is_cancelled() || error.to_string().contains("planned") => {}
        Err(error) => panic!("{error}"),
    }
}

fn threads() -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = names.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

/// Waits until the workers and the completion monitor of a dropped device have ended.
async fn no_device_threads() {
    until("the device's threads have ended", || {
        !threads().iter().any(|name| name.starts_with("emulated") || name.starts_with("wakeline"))
    })
    .await;
}

/// Runs this many flows, `at_a_time` concurrently, and waits until all have ended, also those whose handle was dropped.
async fn many_flows(device: &Device, seed: u64, at_a_time: u64, flows: u64) {
    let tasks = (0..at_a_time).map(|task| {
        let device = device.clone();
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed * at_a_time + task);
            for _ in 0..flows / at_a_time {
                one_flow(&device, &mut random).await;
                if at_a_time == 1 {
                    only_tasks(2).await;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("no flow panics");
    }
    only_tasks(1).await;
    until("all memory of the device is released", || device.memory_in_use() == 0).await;
    assert_eq!(StreamPool::default_of(device).expect("a default pool").in_use(), 0, "streams not returned");
}

async fn only_tasks(left: usize) {
    let metrics = tokio::runtime::Handle::current().metrics();
    until("all tasks have ended", || metrics.num_alive_tasks() <= left).await;
}

/// The allocated bytes while nothing runs: the minimum, once it has not decreased for 100 ms.
async fn held_when_idle() -> i64 {
    let (mut least, mut since) = (allocations::held(), 0);
    while since < 100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        since += 1;
        if allocations::held() < least {
            (least, since) = (allocations::held(), 0);
        }
    }
    least
}

static ALONE: Mutex<()> = Mutex::new(());

/// Runs a test alone in the process. Planned panics print nothing.
fn alone(builder: &mut Builder, test: impl Future<Output = ()> + Send + 'static) {
    let _alone = lock(&ALONE);
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("planned") {
            eprintln!("{info}");
        }
    }));
    // One blocking thread, which lives as long as the runtime: otherwise tokio starts and ends them at any time.
    let runtime = builder.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::MAX).build().unwrap();
    runtime.block_on(async { tokio::task::spawn_blocking(|| ()).await.unwrap() });
    wait_together(&runtime, 40);
    allocations::begin();
    runtime.block_on(async { tokio::spawn(test).await.expect("the test passes") });
    allocations::end();
}

/// Lets this many threads wait at the same time, once. tokio's locks (parking_lot's) keep a table that grows with the
/// number of waiting threads, which is random, and leak the outgrown one. So it grows before the allocations are counted.
fn wait_together(runtime: &Runtime, threads: usize) {
    let all = Barrier::new(threads);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| runtime.handle().block_on(all.wait()));
        }
    });
}

fn device() -> Device {
    Device::emulated(Emulated::new().workers(2))
}

/// Each round uses a new device. After it, the process has exactly as many threads and allocated bytes as before.
#[test]
fn l3_many_flows_leave_nothing_behind() {
    const FLOWS: u64 = quick_or_long(60, 300);
    alone(Builder::new_multi_thread().worker_threads(2), async {
        // Allocations that are made once and kept.
        many_flows(&device(), 0, 4, FLOWS).await;
        no_device_threads().await;
        let before = threads();
        let mut held = Vec::with_capacity(6);
        for seed in 1..=6 {
            many_flows(&device(), seed, 4, FLOWS).await;
            no_device_threads().await;
            // A new thread at first has the name of the thread that started it.
            until("there are as many threads as before", || threads() == before).await;
            held.push(held_when_idle().await);
        }
        assert_eq!(held, [held[0]; 6], "bytes");
    });
}

/// Flows run one after the other on one device, which keeps nothing of them. Only its queues may grow, and stay so.
#[test]
fn l3_a_device_keeps_nothing_of_its_flows() {
    const FLOWS: u64 = quick_or_long(40, 100);
    const ROUNDS: usize = quick_or_long(5, 30);
    /// The growth that is allowed for all queues together, in bytes.
    const QUEUES: i64 = 64 << 10;
    alone(Builder::new_multi_thread().worker_threads(2), async move {
        let device = device();
        many_flows(&device, 0, 1, FLOWS).await;
        let mut held = Vec::with_capacity(ROUNDS);
        for seed in 1..=ROUNDS as u64 {
            many_flows(&device, seed, 1, FLOWS).await;
            // The device keeps the latest of some values until they are replaced: each round ends with the same flow.
            let mut flow = Flow::new("soak");
            let numbers = flow.add("count", Count(0)).when(count(5));
            let pass = flow.add("pass", Pass { fails_at: u32::MAX, panics: false, seen: 0 }).on(&device);
            let end = flow.add("end", sink(async |numbers: Envelope<u32>| numbers.read().await.map(drop)));
            flow.connect(numbers.numbers, pass.input);
            flow.connect(pass.output, end.input);
            within(flow.run()).await.expect("no failure is planned");
            drop(flow);
            only_tasks(1).await;
            held.push(held_when_idle().await);
        }
        drop(device);
        no_device_threads().await;
        let grown: Vec<_> = held.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, total) = (grown.iter().min().copied().unwrap_or_default(), grown.iter().sum::<i64>());
        assert!(least <= 0, "every {FLOWS} flows leak bytes: {grown:?}");
        assert!(total < QUEUES, "more growth than queues need: {grown:?}");
    });
}

/// In each run, sends numbers until the hub is full.
struct Fill {
    next: u64,
    last: u64,
}

impl Operator for Fill {
    type Ports = SourcePorts<u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        while self.next < self.last {
            if !fits(ports.output.try_send(self.next))? {
                return Ok(());
            }
            self.next += 1;
        }
        cx.finish();
        Ok(())
    }
}

/// In each run, takes all queued messages. Every `MEASURE` messages, records the number of allocations and the held bytes.
struct Drain {
    expected: u64,
    measured: Shared<(u64, i64)>,
}

impl Operator for Drain {
    type Ports = SinkPorts<u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        while let Some(number) = ports.input.try_take()? {
            assert_eq!(number, self.expected, "each number once, in order");
            self.expected += 1;
            if self.expected.is_multiple_of(MEASURE) {
                // Of this thread, on which the whole flow runs: the test harness allocates on another one.
                lock(&self.measured).push(allocations::of_this_thread());
            }
        }
        Ok(())
    }
}

/// Messages between two measurements of the allocations.
const MEASURE: u64 = quick_or_long(200_000, 1_000_000);

/// Through a hub of 64 messages: after the first measurement nothing is allocated. The clock is paused, so the flow's
/// supervisor, which allocates, does not inspect its operators meanwhile.
#[test]
fn q1_many_messages_in_constant_memory() {
    const MEASURES: usize = quick_or_long(3, 20);
    let last = MEASURES as u64 * MEASURE + 100;
    alone(Builder::new_current_thread().start_paused(true), async move {
        let measured: Shared<(u64, i64)> = shared();
        lock(&measured).reserve(MEASURES);
        let mut flow = Flow::new("q1");
        let fill = flow.add("fill", Fill { next: 0, last });
        let drain = flow.add("drain", Drain { expected: 0, measured: measured.clone() });
        flow.connect_with(fill.output, drain.input, HubOptions::bounded(64));
        let report = flow.run().await.expect("no failure is planned");
        assert_eq!((report.operator("drain").unwrap().messages_in, report.untaken), (last, 0));
        assert!(report.operator("drain").unwrap().runs >= last / 66, "a run took more than the hub holds");
        let measured = lock(&measured).clone();
        let (allocations, bytes): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
        assert_eq!(bytes, vec![bytes[0]; MEASURES]);
        assert_eq!(allocations, vec![allocations[0]; MEASURES]);
    });
}
