//! Cost of noticing a completion: bare implementations with plain driver calls, and wakeline in each mode, alternating
//! in one process.
//!
//! ```text
//! cargo bench -p wakeline-benches --bench completion                             everything
//! cargo bench -p wakeline-benches --bench completion -- latency                  one part: latency, many, chain or idle
//! cargo bench -p wakeline-benches --bench completion -- many adaptive scan       with these sources only: sync, poll, scan, callback, side;
//!                                                            adaptive, lowlatency, quiet
//! ```
//!
//! `latency` draws `completion.svg`.
//!
//! Needs a CUDA device. With `WAKELINE_DEVICE=emulated` wakeline runs on the emulated device, which only checks that
//! the bench works; limits are then 0.

mod chain;
#[path = "../support/cpu.rs"]
mod cpu;
#[path = "../support/figure.rs"]
mod figure;
#[path = "../support/gpu.rs"]
mod gpu;
mod latency;
mod many;
#[path = "../support/picture.rs"]
mod picture;
mod scanner;
mod source;
mod spin;

use std::{
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;
use wakeline::{Device, device::Emulated};

use figure::figure;
use gpu::Gpu;
use source::{Bare, Source, Waiter};

const PARTS: [&str; 4] = ["latency", "many", "chain", "idle"];

pub(crate) struct Bench {
    runtime: Runtime,
    device: Device,
    /// `None` on the emulated device.
    bare: Option<Bare>,
    sources: Vec<Source>,
}

impl Bench {
    fn waiter(&self, source: Source) -> Waiter {
        Waiter::new(source, &self.device, self.bare.as_ref())
    }
}

/// The parts and sources named on the command line; all of a kind if none of it is named.
fn wanted() -> (Vec<&'static str>, Vec<Source>) {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    for word in &words {
        if !PARTS.contains(&&**word) && Source::ALL.iter().all(|source| source.name() != word) {
            eprintln!("completion: `{word}` is neither a part nor a source: see the top of benches/completion/main.rs");
            std::process::exit(2);
        }
    }
    let named = |name: &str| words.iter().any(|word| word == name);
    let mut parts: Vec<_> = PARTS.into_iter().filter(|part| named(part)).collect();
    if parts.is_empty() {
        parts = PARTS.to_vec();
    }
    let mut sources: Vec<_> = Source::ALL.into_iter().filter(|source| named(source.name())).collect();
    if sources.is_empty() {
        sources = Source::ALL.to_vec();
    }
    (parts, sources)
}

/// Percent of a core that the process uses while idle.
fn idle(time: Duration) -> f64 {
    thread::sleep(Duration::from_millis(300));
    let (cpu, began) = (cpu::used(), Instant::now());
    thread::sleep(time);
    (cpu::used() - cpu).as_secs_f64() / began.elapsed().as_secs_f64() * 100.0
}

fn main() {
    if !figure::asked() {
        return;
    }
    let (parts, mut sources) = wanted();
    let emulated = std::env::var("WAKELINE_DEVICE").is_ok_and(|device| device == "emulated");
    if !emulated
        && Device::cuda_count() == 0
        && let Err(error) = Device::cuda(0)
    {
        return println!("completion: not measured: {error:#}");
    }
    let gpu = (!emulated).then(Gpu::open);
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(gpu) = gpu.clone() {
        // The bare implementations call the driver on the workers.
        builder.on_thread_start(move || gpu.enter());
    }
    let runtime = builder.worker_threads(4).enable_all().build().expect("a runtime");
    // With a context, but without wakeline.
    let idle_limit = if gpu.is_some() && parts.contains(&"idle") { idle(Duration::from_secs(2)) } else { 0.0 };

    let device = if emulated { Device::emulated(Emulated::new()) } else { Device::cuda(0).expect("the device") };
    spin::spin::kernel().load_blocking(&device).expect("a kernel that compiles");
    let bare = gpu.map(|gpu| {
        println!("completion: how a synchronising thread waits: {}", gpu.schedule());
        Bare::new(gpu)
    });
    if bare.is_none() {
        sources.retain(|source| !source.is_bare());
    }
    let bench = Bench { runtime, device, bare, sources };

    for part in parts {
        match part {
            "latency" => latency::run(&bench),
            "many" => many::run(&bench),
            "chain" => chain::run(&bench),
            _ => {
                // Streams that have had work, and stay alive.
                let mut waiters: Vec<_> = bench.sources.iter().map(|source| bench.waiter(*source)).collect();
                for waiter in &mut waiters {
                    bench.runtime.block_on(async {
                        for _ in 0..100 {
                            waiter.once(Duration::from_micros(200)).await;
                        }
                    });
                }
                figure("completion.idle", idle(Duration::from_secs(5)), "% of a core", idle_limit);
            }
        }
    }
}
