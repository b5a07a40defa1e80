//! Host cost of a stage: 16 operators in a chain, each launching one small kernel in place, against a loop of plain
//! driver calls (wait for the previous stage if it is on another stream, launch, record). Both in this process,
//! alternating, on 1, 3, 8 and all threads, each thread with a chain of its own.
//!
//! ```text
//! cargo bench -p wakeline-benches --bench stage                                  everything
//! cargo bench -p wakeline-benches --bench stage -- own 3                         own or shared (streams); 1, 3, 8 or all (threads)
//! cargo bench -p wakeline-benches --bench stage -- allocations                   heap allocations per message
//! cargo bench -p wakeline-benches --bench stage -- observed                      what observing costs a stage
//! ```
//!
//! Needs a CUDA device. With `WAKELINE_DEVICE=emulated` wakeline runs on the emulated device, which only checks that
//! the bench works (it also allocates for each operation); limits are then 0.
//!
//! Streams share the few channels between a context and its device, 8 by default, and in one channel a wait blocks what
//! follows it. So the bench requests 32: the device must not be the limit.
//!
//! Host time per stage is time x threads / (stages x messages), and `cpu` is its processor time. `lag` is how long the
//! device still works after the host has stopped: where it is long (a stream holds 1024 launches), the device was the
//! limit and not the host.

#[path = "../support/allocations.rs"]
mod allocations;
mod bare;
#[path = "../support/cpu.rs"]
mod cpu;
#[path = "../support/figure.rs"]
mod figure;
#[path = "../support/gpu.rs"]
mod gpu;
mod ours;
mod step;

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use wakeline::{Device, device::Emulated, observe::Observe};

use bare::Bare;
use figure::{alternate, figure, median};
use gpu::{Gpu, Kernel};
use ours::Ours;

const STAGES: usize = 16;
/// Per message: one warp.
const ELEMENTS: usize = 32;
/// The maximum in flight in one chain.
const ENVELOPES: usize = 64;
/// Messages that a hub queues.
const CAPACITY: usize = 8;
const ROUNDS: usize = 5;
/// Messages of each chain before it counts as warm, and the time after that.
const WARM: (u64, Duration) = (300, Duration::from_millis(50));
const MEASURED: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Streams {
    /// One stream per stage.
    Own,
    /// One stream per chain.
    Shared,
}

/// On a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

/// Messages that have passed each chain.
struct Watch {
    passed: Vec<Counter>,
    stop: AtomicBool,
}

impl Watch {
    fn new(chains: usize) -> Self {
        Self { passed: (0..chains).map(|_| Counter::default()).collect(), stop: AtomicBool::new(false) }
    }

    fn messages(&self) -> u64 {
        self.passed.iter().map(|chain| chain.0.load(Ordering::Relaxed)).sum()
    }

    /// Waits until all chains are warm, and then counts for a while.
    fn window(&self, pass: impl Fn(Duration)) -> Seen {
        let began = Instant::now();
        while self.passed.iter().any(|chain| chain.0.load(Ordering::Relaxed) < WARM.0) {
            assert!(began.elapsed() < Duration::from_secs(60), "no message passes");
            pass(Duration::from_millis(5));
        }
        pass(WARM.1);
        let (before, cpu, began) = (self.messages(), cpu::used(), Instant::now());
        pass(MEASURED);
        Seen { messages: self.messages() - before, took: began.elapsed(), cpu: cpu::used() - cpu }
    }
}

struct Seen {
    messages: u64,
    took: Duration,
    cpu: Duration,
}

#[derive(Clone, Copy, Default)]
struct Window {
    /// Host time per stage, in microseconds.
    stage: f64,
    /// Processor time per stage, in microseconds.
    cpu: f64,
    /// In milliseconds.
    lag: f64,
}

impl Window {
    fn new(threads: usize, seen: &Seen, lag: Duration) -> Self {
        let a_stage = |time: Duration| time.as_secs_f64() * 1e6 / (seen.messages.max(1) as f64 * STAGES as f64);
        Self { stage: a_stage(seen.took) * threads as f64, cpu: a_stage(seen.cpu), lag: lag.as_secs_f64() * 1e3 }
    }
}

fn measure(name: &str, device: &Device, bare: Option<(&Gpu, Kernel)>, streams: Streams, threads: usize) {
    let ours = Ours::new(device, streams, threads);
    let bare = bare.map(|(gpu, kernel)| Bare::new(gpu, kernel, streams, threads));
    let (mut limits, mut owns) = (Vec::new(), Vec::new());
    let mut limit = || {
        limits.push(bare.as_ref().map_or(Window::default(), Bare::measure));
        limits[limits.len() - 1].stage
    };
    let mut own = || {
        owns.push(ours.measure());
        owns[owns.len() - 1].stage
    };
    let (limit, own) = alternate(ROUNDS, &mut limit, &mut own);
    figure(name, own.median, "us", limit.median);
    if bare.is_some() {
        figure(&format!("{name}.ratio"), own.ratio, "x", 1.0);
    }
    // The first round is discarded.
    let of = |windows: &[Window], part: fn(&Window) -> f64| median(windows[1..].iter().map(part).collect());
    let beside = |what: &str, unit: &str, part: fn(&Window) -> f64| {
        figure(&format!("{name}.{what}"), of(&owns, part), unit, of(&limits, part));
    };
    beside("cpu", "us", |window| window.cpu);
    beside("lag", "ms", |window| window.lag);
}

/// What observing costs a stage: following paths, and timing device work besides, beside the same chain unobserved. All
/// three take turns. `more` is the difference in host time that each makes by itself, and `more.cpu` in processor time of
/// all threads, among them the observer's.
fn measure_observed(device: &Device) {
    let ours = || Ours::new(device, Streams::Own, 1);
    let paths = Observe::new().device_times(false);
    let all = [ours(), ours().observed(paths), ours().observed(Observe::new())];
    let rounds: Vec<_> = (0..6 * ROUNDS).map(|_| all.each_ref().map(Ours::measure)).collect();
    let of = |what: &str, part: fn(&Window) -> f64| {
        for (at, name) in [(1, "paths"), (2, "device_times")] {
            let [plain, own] = [0, at].map(|which| median(rounds.iter().map(|round| part(&round[which])).collect()));
            let more = median(rounds.iter().map(|round| part(&round[at]) - part(&round[at - 1])).collect());
            figure(&format!("stage.observed.{name}{what}"), own, "us", plain);
            figure(&format!("stage.observed.more.{name}{what}"), more, "us", 0.3);
        }
    };
    of("", |window| window.stage);
    of(".cpu", |window| window.cpu);
}

fn main() {
    if !figure::asked() {
        return;
    }
    if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        // SAFETY: no other thread that could read the environment has been started, and no driver has been loaded.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    }
    let all = thread::available_parallelism().map_or(4, |cores| cores.get());
    let threads = [("1", 1), ("3", 3), ("8", 8), ("all", all)];
    let streams = [("own", Streams::Own), ("shared", Streams::Shared)];
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let named = |name: &str| words.iter().any(|word| word == name);
    let known = |word: &str| {
        matches!(word, "allocations" | "observed")
            || threads.iter().any(|(name, _)| *name == word)
            || streams.iter().any(|s| s.0 == word)
    };
    if let Some(word) = words.iter().find(|word| !known(word)) {
        eprintln!("stage: `{word}` is not an argument: see the top of benches/stage/main.rs");
        std::process::exit(2);
    }
    let any_threads = !threads.iter().any(|(name, _)| named(name));
    let any_streams = !streams.iter().any(|(name, _)| named(name));
    let times = words.is_empty() || words.iter().any(|word| !matches!(&**word, "allocations" | "observed"));

    let emulated = std::env::var("WAKELINE_DEVICE").is_ok_and(|device| device == "emulated");
    let device = match if emulated { Ok(Device::emulated(Emulated::new())) } else { Device::cuda(0) } {
        Ok(device) => device,
        Err(error) => return println!("stage: not measured: {error:#}"),
    };
    step::step::kernel().load_blocking(&device).expect("a kernel that compiles");
    let gpu = (!emulated).then(Gpu::open);
    let bare = gpu.as_ref().map(|gpu| {
        let kernel = gpu.kernel("step", "unsigned int *, unsigned long long", include_str!("step.cu"));
        (gpu, kernel)
    });

    if words.is_empty() || named("observed") {
        measure_observed(&device);
    }
    for (at, streams) in streams.into_iter().filter(|(name, _)| any_streams || named(name)) {
        if times {
            for (count, threads) in threads.into_iter().filter(|(name, _)| any_threads || named(name)) {
                measure(&format!("stage.{at}.{count}"), &device, bare, streams, threads);
            }
        }
        if words.is_empty() || named("allocations") {
            let count = Ours::new(&device, streams, 3).allocations();
            figure(&format!("stage.{at}.allocations"), count, "per message", 0.0);
        }
    }
}
