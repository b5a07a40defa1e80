//! Latency of a paced pipeline: every millisecond 64 KiB of page-locked memory in, three kernels of 10 us, 64 KiB out,
//! and a sink on the host that reads the first elements. wakeline and hand-written ways, alternating in one process.
//!
//! ```text
//! cargo bench -p wakeline-benches --bench paced                             everything: about six minutes
//! cargo bench -p wakeline-benches --bench paced -- messages=3000 flows=1 busy=0 way=ours,spin
//!
//! messages=20000   of each flow, for each way
//! passes=4         in which the ways alternate; the messages are divided among them
//! flows=1,64       at once
//! busy=0,1         0: on an idle machine; 1: with all other cores busy, for 1 flow
//! way=...          ours, lowlatency; by hand spin, block, callback (bare.rs describes them)
//! feeders=N        threads that feed: by default one for each 16 flows
//! workers=4        threads of the runtime
//! ```
//!
//! A feeder sleeps by `clock_nanosleep` until each message is due. The phases of the flows are spread evenly over the
//! millisecond. 64 flows have four feeders: by hand a feeder makes six driver calls a message, for which a single one
//! would have 16 us.
//!
//! - **Latency** is the time from just before the send until the sink has the data. What the feeder does before that,
//!   such as waiting for an envelope, is not part of it.
//! - **Lateness** is how late the feeder was, either because it woke late or because its previous send took long. A way
//!   that cannot keep up shows there: the feeder waits until a message may be on its way.
//! - **Cores** and **cpu** (microseconds of processor time a message) are those of the whole process: the feeders, the
//!   runtime, the threads of the driver and of wakeline, and those of the way. They are not reported for a busy machine:
//!   the threads that keep it busy belong to the process, too.
//!
//! The limit is the figure of `spin`; with several flows, that of the hand-written way with the lowest p99.
//!
//! `ours` is a flow of an ingress, three operators with a kernel each and a sink. Streams share the few channels
//! between a context and its device, 8 by default; so the bench requests 32, for all ways.
//!
//! Without a CUDA device, or with `WAKELINE_DEVICE=emulated`, wakeline runs on the emulated device with few messages,
//! which only checks that the bench works; limits are then 0. Linux only.

mod bare;
mod clock;
#[path = "../support/cpu.rs"]
mod cpu;
mod feed;
#[path = "../support/figure.rs"]
mod figure;
#[path = "../support/gpu.rs"]
mod gpu;
mod ours;
#[path = "../support/picture.rs"]
mod picture;
mod work;

use std::{
    panic, process, str,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use hdrhistogram::Histogram;
use plotters::prelude::SeriesLabelPosition;
use tokio::runtime::Runtime;
use wakeline::{CompletionMode, Device, device::Emulated};

use bare::Bare;
use feed::{Outcome, Plan};
use figure::figure;
use gpu::Gpu;
use picture::Labels;

/// 64 KiB.
const ELEMENTS: usize = 8192;
const KERNELS: u64 = 3;
/// Of each kernel.
const NANOSECONDS: u64 = 10_000;
const THREADS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Ours,
    LowLatency,
    Spin,
    Block,
    Callback,
}

impl Way {
    const ALL: [Self; 5] = [Self::Ours, Self::LowLatency, Self::Spin, Self::Block, Self::Callback];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::LowLatency => "lowlatency",
            Self::Spin => "spin",
            Self::Block => "block",
            Self::Callback => "callback",
        }
    }

    /// Its name in the picture.
    fn label(self) -> &'static str {
        match self {
            Self::Ours => "wakeline",
            Self::LowLatency => "wakeline, LowLatency",
            Self::Spin => "a thread spins",
            Self::Block => "a thread blocks",
            Self::Callback => "tokio tasks, a host callback",
        }
    }

    fn is_by_hand(self) -> bool {
        !matches!(self, Self::Ours | Self::LowLatency)
    }
}

struct Arguments {
    messages: u64,
    passes: u64,
    flows: Vec<usize>,
    busy: Vec<bool>,
    ways: Vec<Way>,
    feeders: Option<usize>,
    workers: usize,
}

impl Arguments {
    /// The defaults.
    fn new(emulated: bool) -> Self {
        Self {
            messages: if emulated { 400 } else { 20_000 },
            passes: if emulated { 2 } else { 4 },
            flows: if emulated { vec![1, 8] } else { vec![1, 64] },
            busy: vec![false, true],
            ways: Way::ALL.into_iter().filter(|way| !(emulated && way.is_by_hand())).collect(),
            feeders: None,
            workers: 4,
        }
    }

    /// `None` if it is no argument.
    fn set(&mut self, argument: &str) -> Option<()> {
        fn list<T: str::FromStr>(values: &str) -> Option<Vec<T>> {
            values.split(',').map(|value| value.parse().ok()).collect()
        }
        let positive = |value: &str| value.parse().ok().filter(|value| *value > 0);
        let (name, value) = argument.split_once('=')?;
        match name {
            "messages" => self.messages = positive(value)? as u64,
            "passes" => self.passes = positive(value)? as u64,
            "flows" => self.flows = value.split(',').map(positive).collect::<Option<_>>()?,
            "busy" => self.busy = list::<u8>(value)?.into_iter().map(|busy| busy != 0).collect(),
            "way" => {
                let known = |name: &str| Way::ALL.into_iter().find(|way| way.name() == name);
                let ways: Vec<_> = value.split(',').map(known).collect::<Option<_>>()?;
                self.ways.retain(|way| ways.contains(way));
            }
            "feeders" => self.feeders = Some(positive(value)?),
            "workers" => self.workers = positive(value)?,
            _ => return None,
        }
        Some(())
    }
}

struct Bench {
    arguments: Arguments,
    runtime: Runtime,
    device: Device,
    /// `None` on the emulated device.
    bare: Option<Bare>,
}

impl Bench {
    fn pass(&self, way: Way, plan: &Plan, outcome: &mut Outcome) {
        let ours = |mode, outcome| ours::pass(&self.runtime, &self.device, mode, plan, outcome);
        match (way, &self.bare) {
            (Way::Ours, _) => ours(CompletionMode::default(), outcome),
            (Way::LowLatency, _) => ours(CompletionMode::LowLatency, outcome),
            (Way::Spin, Some(bare)) => bare.spin(plan, outcome),
            (Way::Block, Some(bare)) => bare.block(plan, outcome),
            (Way::Callback, Some(bare)) => bare.callback(&self.runtime, plan, outcome),
            (_, None) => unreachable!("hand-written ways are for a GPU"),
        }
    }

    fn measure(&self, flows: usize, busy: bool) {
        let Arguments { messages, passes, ways, feeders, .. } = &self.arguments;
        let plan = Plan { flows, messages: messages.div_ceil(*passes), feeders: feeders.unwrap_or(flows.div_ceil(16)) };
        let mut each: Vec<_> = ways.iter().map(|way| (*way, Outcome::none())).collect();
        let mut all_passes = || {
            for _ in 0..*passes {
                for (way, outcome) in &mut each {
                    self.pass(*way, &plan, outcome);
                }
            }
        };
        if busy {
            beside_load(all_passes)
        } else {
            all_passes()
        }

        let name = format!("{flows}{}", if busy { ".busy" } else { "" });
        print(&name, flows, busy, &each);
        let title = format!(
            "{flows} x 64 KiB every millisecond through {}{} ({})",
            self.device,
            if busy { ", all other cores busy" } else { "" },
            self.device.description()
        );
        let lines: Vec<_> = each.iter().map(|(way, outcome)| (way.label(), tail(&outcome.latency))).collect();
        let labels = Labels {
            title: &title,
            x: "latency from the send to the sink, in microseconds",
            y: "share of the messages that took as long or longer",
            names: SeriesLabelPosition::UpperRight,
        };
        let to = picture::draw(&format!("paced-{name}"), &labels, &lines).expect("the picture");
        println!("paced.{name}: {}", to.display());
    }
}

/// With a thread that spins on every core but one.
fn beside_load(measure: impl FnOnce()) {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 1..cores {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        measure();
        stop.store(true, Ordering::Relaxed);
    });
}

fn print(name: &str, flows: usize, busy: bool, each: &[(Way, Outcome)]) {
    let by_hand = each.iter().filter(|(way, _)| way.is_by_hand());
    let limit = if flows == 1 {
        each.iter().find(|(way, _)| *way == Way::Spin)
    } else {
        by_hand.min_by_key(|(_, outcome)| outcome.latency.value_at_quantile(0.99))
    };
    if let Some((way, _)) = limit {
        println!("paced.{name}: the limit is `{}`", way.name());
    }
    for (way, outcome) in each {
        let print = |what: &str, unit: &str, of: &dyn Fn(&Outcome) -> f64| {
            let limit = limit.map_or(0.0, |(_, outcome)| of(outcome));
            figure(&format!("paced.{name}.{}.{what}", way.name()), of(outcome), unit, limit);
        };
        for (what, quantile) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("worst", 1.0)] {
            print(what, "us", &|outcome| outcome.latency.value_at_quantile(quantile) as f64 / 1e3);
        }
        for (what, quantile) in [("lateness.p50", 0.5), ("lateness.p99", 0.99), ("lateness.worst", 1.0)] {
            print(what, "us", &|outcome| outcome.lateness.value_at_quantile(quantile) as f64 / 1e3);
        }
        if !busy {
            print("cores", "cores", &Outcome::cores);
            print("cpu", "us", &Outcome::cpu_per_message);
        }
    }
}

/// For each latency, the share of the messages that took at least as long.
fn tail(latency: &Histogram<u64>) -> Vec<(f64, f64)> {
    let (mut below, all) = (0, latency.len() as f64);
    let each = latency.iter_recorded().map(|step| {
        let share = 1.0 - below as f64 / all;
        below += step.count_at_value();
        (step.value_iterated_to() as f64 / 1e3, share)
    });
    each.collect()
}

/// The device, and the GPU for what is written by hand.
fn device() -> (Device, Option<Gpu>) {
    let emulated = || (Device::emulated(Emulated::new()), None);
    if std::env::var("WAKELINE_DEVICE").is_ok_and(|device| device == "emulated") {
        return emulated();
    }
    match Device::cuda(0) {
        Ok(device) => (device, Some(Gpu::open())),
        Err(error) => {
            println!("paced: only wakeline, on the emulated device: {error:#}");
            emulated()
        }
    }
}

fn main() {
    if !figure::asked() {
        return;
    }
    // A thread that panics would leave those waiting that wait for its messages.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        report(panic);
        process::abort();
    }));
    if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        // SAFETY: no other thread that could read the environment has been started, and no driver has been loaded.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    }
    let (device, gpu) = device();
    let mut arguments = Arguments::new(gpu.is_none());
    for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with("--")) {
        if arguments.set(&argument).is_none() {
            eprintln!("paced: `{argument}` is not an argument: see the top of benches/paced/main.rs");
            process::exit(2);
        }
    }
    work::work::kernel().load_blocking(&device).expect("a kernel that compiles");
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(gpu) = gpu.clone() {
        // The tasks of `callback` call the driver on the workers.
        builder.on_thread_start(move || gpu.enter());
    }
    let runtime = builder.worker_threads(arguments.workers).enable_all().build().expect("a runtime");
    let bare = gpu.map(|gpu| {
        gpu.enter();
        Bare::new(&gpu, arguments.flows.iter().copied().max().unwrap_or(1))
    });
    let bench = Bench { arguments, runtime, device, bare };
    for busy in &bench.arguments.busy {
        for flows in &bench.arguments.flows {
            if !busy || *flows == 1 {
                bench.measure(*flows, *busy);
            }
        }
    }
}
