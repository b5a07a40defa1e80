//! What is left after many: hundreds of flows in one process, each ended at a moment of its own; many messages through
//! one hub. All allocations of the process are counted, so the tests take turns.

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

/// The names of this process's threads.
fn threads() -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = names.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

/// A device that is gone has taken its threads along: its workers and its completion monitor.
async fn only_threads_of_nobody() {
    until("the device's threads have ended", || {
        !threads().iter().any(|name| name.starts_with("emulated") || name.starts_with("wakeline"))
    })
    .await;
}

/// So many flows, `at_a_time` beside each other, and all of them ended: those whose handle was dropped end by themselves.
async fn many(device: &Device, seed: u64, at_a_time: u64, flows: u64) {
    let lanes = (0..at_a_time).map(|lane| {
        let device = device.clone();
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(seed * at_a_time + lane);
            for _ in 0..flows / at_a_time {
                one(&device, &mut random).await;
                if at_a_time == 1 {
                    only_tasks(2).await;
                }
            }
        })
    });
    for lane in lanes.collect::<Vec<_>>() {
        lane.await.expect("no flow panics");
    }
    only_tasks(1).await;
    until("all memory of the device is given back", || device.memory_in_use() == 0).await;
    assert_eq!(StreamPool::default_of(device).expect("it has streams").in_use(), 0, "streams that nobody gave back");
}

async fn only_tasks(left: usize) {
    let metrics = tokio::runtime::Handle::current().metrics();
    until("all tasks have ended", || metrics.num_alive_tasks() <= left).await;
}

/// Bytes that are held when nothing goes on: the least that was seen until it became no less for a while.
async fn held_at_rest() -> i64 {
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

/// Runs a test whose process has nothing else to do; what panics as planned says nothing.
fn alone(builder: &mut Builder, test: impl Future<Output = ()> + Send + 'static) {
    let _alone = lock(&ALONE);
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("planned") {
            eprintln!("{info}");
        }
    }));
    // Of the threads for what blocks there is one, from the beginning to the end: tokio makes and ends them as it likes.
    let runtime = builder.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::MAX).build().unwrap();
    runtime.block_on(async { tokio::task::spawn_blocking(|| ()).await.unwrap() });
    wait_together(&runtime, 40);
    allocations::begin();
    runtime.block_on(async { tokio::spawn(test).await.expect("the test passes") });
    allocations::end();
}

/// So many threads that wait at the same time, once. tokio's locks (parking_lot's) keep a table that grows with those, and
/// leak the one that it outgrew: how many waited together is chance, so it grows before anything is counted.
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

/// Each so many on a device of their own, four at a time: when that is gone, too, there is as much of everything as
/// before, to the byte.
#[test]
fn l3_many_flows_leave_nothing_behind() {
    const FLOWS: u64 = quick_or_long(60, 300);
    alone(Builder::new_multi_thread().worker_threads(2), async {
        // What is made once, and kept.
        many(&device(), 0, 4, FLOWS).await;
        only_threads_of_nobody().await;
        let before = threads();
        let mut held = Vec::with_capacity(6);
        for seed in 1..=6 {
            many(&device(), seed, 4, FLOWS).await;
            only_threads_of_nobody().await;
            // A thread that has just begun still has the name of the one that made it.
            until("there are as many threads as before", || threads() == before).await;
            held.push(held_at_rest().await);
        }
        assert_eq!(held, [held[0]; 6], "bytes");
    });
}

/// One after the other on one device: what it keeps does not grow with them. A queue of its own may now and then
/// have become longer than it was, and stays so.
#[test]
fn l3_a_device_keeps_nothing_of_its_flows() {
    const FLOWS: u64 = quick_or_long(40, 100);
    const ROUNDS: usize = quick_or_long(5, 30);
    /// What all queues together may have grown by, in bytes.
    const QUEUES: i64 = 64 << 10;
    alone(Builder::new_multi_thread().worker_threads(2), async move {
        let device = device();
        many(&device, 0, 1, FLOWS).await;
        let mut held = Vec::with_capacity(ROUNDS);
        for seed in 1..=ROUNDS as u64 {
            many(&device, seed, 1, FLOWS).await;
            // The last of a kind is remembered until the next: here it is always the same.
            let mut flow = Flow::new("soak");
            let numbers = flow.add("count", Count(0)).when(count(5));
            let pass = flow.add("pass", Pass { fails_at: u32::MAX, panics: false, seen: 0 }).on(&device);
            let end = flow.add("end", sink(async |numbers: Envelope<u32>| numbers.read().await.map(drop)));
            flow.connect(numbers.numbers, pass.input);
            flow.connect(pass.output, end.input);
            within(flow.run()).await.expect("nothing is planned");
            drop(flow);
            only_tasks(1).await;
            held.push(held_at_rest().await);
        }
        drop(device);
        only_threads_of_nobody().await;
        let grown: Vec<_> = held.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let (least, all) = (grown.iter().min().copied().unwrap_or_default(), grown.iter().sum::<i64>());
        assert!(least <= 0, "every {FLOWS} flows leave bytes behind: {grown:?}");
        assert!(all < QUEUES, "that is more than queues need: {grown:?}");
    });
}

/// Sends as many as there is room for, in each run.
struct Fill {
    next: u64,
    last: u64,
}

impl Operator for Fill {
    type Ports = SourcePorts<u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        while self.next < self.last {
            if ports.output.try_send(self.next)?.is_err() {
                return Ok(());
            }
            self.next += 1;
        }
        cx.finish();
        Ok(())
    }
}

/// Takes all that is there; at each measure, what there is of allocations.
struct Drain {
    expected: u64,
    measured: Shared<(u64, i64)>,
}

impl Operator for Drain {
    type Ports = SinkPorts<u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        while let Some(number) = ports.input.try_take()? {
            assert_eq!(number, self.expected, "each once, in order");
            self.expected += 1;
            if self.expected.is_multiple_of(MEASURE) {
                lock(&self.measured).push((allocations::so_far(), allocations::held()));
            }
        }
        Ok(())
    }
}

/// Messages between two looks at what is allocated.
const MEASURE: u64 = quick_or_long(200_000, 1_000_000);

/// Through a hub of 64: from the first measure on nothing is allocated any more, and not a byte is added. The clock stands still,
/// so the flow's own task does not look at its operators meanwhile, which allocates.
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
        flow.connect_with(fill.output, drain.input, Hub::bounded(64));
        let report = flow.run().await.expect("nothing is planned");
        assert_eq!((report.operator("drain").unwrap().messages_in, report.untaken), (last, 0));
        assert!(report.operator("drain").unwrap().runs >= last / 66, "no more than the hub holds lay there");
        let measured = lock(&measured).clone();
        let (allocations, bytes): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
        assert_eq!(bytes, vec![bytes[0]; MEASURES]);
        assert_eq!(allocations, vec![allocations[0]; MEASURES]);
    });
}
