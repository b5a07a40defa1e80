//! Against the bus: chunks of several sizes, several devices, and memory growth over 64 GiB.

use tokio::runtime::Runtime;
use wakeline::Device;

use crate::{
    bare::{ByHand, Pairs, copy_on_all},
    figure::{alternate, figure},
    flow::{pass, pass_batches},
    memory,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;
const ROUNDS: usize = 7;

fn rate(total: usize, seconds: f64) -> f64 {
    total as f64 / seconds / 1e9
}

fn first() -> Option<Device> {
    Device::cuda(0).inspect_err(|error| println!("through: not measured: {error:#}")).ok()
}

/// Rates per direction, with both directions at once.
pub(crate) fn sizes(runtime: &Runtime) {
    let Some(device) = first() else { return };
    // Small chunks are limited by the host cost of a copy and a launch: fewer of them are enough.
    let sizes = [
        ("64KiB", 64 * KIB, 32, GIB / 2),
        ("256KiB", 256 * KIB, 32, 2 * GIB),
        ("1MiB", MIB, 16, 4 * GIB),
        ("4MiB", 4 * MIB, 8, 4 * GIB),
        ("16MiB", 16 * MIB, 4, 4 * GIB),
    ];
    for (name, chunk, envelopes, total) in sizes {
        let pairs = Pairs::new(0, chunk, envelopes);
        let (bare, ours) = alternate(
            ROUNDS,
            || rate(total, pairs.copy(total)),
            || rate(total, runtime.block_on(pass(std::slice::from_ref(&device), total, chunk, envelopes))),
        );
        figure(&format!("through.{name}"), ours.median, "GB/s", bare.median);
        figure(&format!("through.{name}.ratio"), ours.ratio, "x", 1.0);
    }
}

/// Small chunks, which are limited by the calls of the host: rates per direction, against the same copies and kernels
/// enqueued by hand.
pub(crate) fn small(runtime: &Runtime) {
    let Some(device) = first() else { return };
    let devices = std::slice::from_ref(&device);
    for (name, chunk, envelopes, total) in [("64KiB", 64 * KIB, 32, GIB / 2), ("256KiB", 256 * KIB, 32, 2 * GIB)] {
        let hand = ByHand::new(chunk, envelopes);
        let measure = |way: &str, ours: &dyn Fn() -> f64| {
            let (hand, ours) = alternate(ROUNDS, || rate(total, hand.pass(total)), || rate(total, ours()));
            figure(&format!("through.{name}.{way}"), ours.median, "GB/s", hand.median);
            figure(&format!("through.{name}.{way}.ratio"), ours.ratio, "x", 1.0);
        };
        measure("streamed", &|| runtime.block_on(pass(devices, total, chunk, envelopes)));
        measure("batches", &|| runtime.block_on(pass_batches(&device, total, chunk, envelopes)));
    }
}

/// All GPUs at once: the sum of their rates.
pub(crate) fn devices(runtime: &Runtime) {
    let count = Device::cuda_count();
    if count < 2 {
        return println!("through.devices: not measured: {count} GPU");
    }
    let devices: Vec<_> = (0..count).map(|at| Device::cuda(at).expect("a GPU")).collect();
    for (name, chunk, envelopes) in [("1MiB", MIB, 16), ("4MiB", 4 * MIB, 8)] {
        let (total, pairs) = (4 * GIB, (0..count).map(|at| Pairs::new(at, chunk, envelopes)).collect::<Vec<_>>());
        let (bare, ours) = alternate(
            ROUNDS,
            || rate(total * count, copy_on_all(&pairs, total)),
            || rate(total * count, runtime.block_on(pass(&devices, total, chunk, envelopes))),
        );
        figure(&format!("through.{count}x{name}"), ours.median, "GB/s", bare.median);
        figure(&format!("through.{count}x{name}.ratio"), ours.ratio, "x", 1.0);
    }
}

/// 64 GiB in 16 flows in sequence: memory after the first against memory after the last, and the peak memory of the
/// device.
pub(crate) fn constant(runtime: &Runtime) {
    let Some(device) = first() else { return };
    let (chunk, envelopes, part) = (4 * MIB, 8, 4 * GIB);
    let run = || runtime.block_on(pass(std::slice::from_ref(&device), part, chunk, envelopes));
    let peak_before = device.memory_peak();
    run();
    let (host, free) = (memory::resident(), device.memory().expect("the driver's answer").free);
    for _ in 1..64 * GIB / part {
        run();
    }
    let (host_after, free_after) = (memory::resident(), device.memory().expect("the driver's answer").free);
    figure("through.constant.host_growth", (host_after as f64 - host as f64) / MIB as f64, "MiB", 0.0);
    figure("through.constant.device_growth", (free as f64 - free_after as f64) / MIB as f64, "MiB", 0.0);
    // On the device each chunk has one envelope: it is written, touched and read in place.
    let envelopes = (envelopes * chunk) as f64 / MIB as f64;
    let peak = device.memory_peak();
    if peak_before <= peak / 2 {
        figure("through.constant.device_peak", peak as f64 / MIB as f64, "MiB", envelopes);
    } else {
        println!("through.constant.device_peak: not measured: a larger part ran before: run `constant` alone");
    }
}
