//! Tests that a program which the race checker accepts has one result, in whatever order it runs.
//!
//! Random programs of fills, copies, kernels, events and the default stream run on two devices. Calls that the checker
//! refuses are left out; the rest runs in many simulated orders and on real threads, and must write the same bytes
//! every time. Without the checker the same programs write different bytes in different orders, which proves that the
//! orders differ.
//!
//! The same is tested for graphs with random nodes and edges, launched on random streams.

use std::sync::Arc;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{Emulated, Simulation, open};
use crate::device::{backend::*, check::checked};

static MIX: KernelDef = KernelDef {
    name: "mix",
    file: "",
    declared: "",
    source: KernelSource::None,
    prototype: |_| String::new(),
    body: |args| {
        let [BodyArg::Slice(to, len), BodyArg::Slice(from, _), BodyArg::Scalar(scalar)] = args else { panic!() };
        // SAFETY: the launch below passes two slices of the same length that do not overlap, the first to be written.
        let (to, from) =
            unsafe { (std::slice::from_raw_parts_mut(*to, *len), std::slice::from_raw_parts(*from, *len)) };
        for (to, from) in to.iter_mut().zip(from) {
            *to = to.wrapping_mul(5).wrapping_add(from.wrapping_mul(3)).wrapping_add(scalar.bytes[0]);
        }
    },
    number: KernelNumber::new(),
};

const BYTES: u64 = 32;
const BLOCKS: usize = 6;

/// Execs of random graphs, each with its device. Nodes that the checker refuses are left out.
fn execs(random: &mut StdRng, devices: &[Arc<dyn Backend>; 2], memory: &[Address]) -> (Vec<(usize, RawExec)>, usize) {
    let mut refused = 0;
    let mut graph = |at: usize| {
        let device = &devices[at];
        let graph = device.graph_create().unwrap();
        let mut nodes: Vec<RawNode> = Vec::new();
        for _ in 0..5 {
            let after: Vec<RawNode> = nodes.iter().copied().filter(|_| random.random_range(0..3) == 0).collect();
            let (to, other) = (random.random_range(0..BLOCKS), random.random_range(1..BLOCKS));
            let from = random.random_range(0..BYTES);
            let bytes = random.random_range(1..=(BYTES - from).min(8));
            let part = |block: usize| Address(memory[block].0 + from);
            let (target, source) = (part(to), part((to + other) % BLOCKS));
            let slice = |address, write| Arg::Slice { address, len: bytes, bytes, write };
            let scalar = [random.random::<u8>()];
            let args = [slice(target, true), slice(source, false), Arg::Scalar(&scalar)];
            let launch = Launch { kernel: &MIX, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
            let work = match random.random_range(0..4) {
                0 => NodeWork::Fill { to: target, pattern: Pattern { width: 1, bits: scalar[0].into() }, bytes },
                1 => NodeWork::Copy { to: Endpoint::Device(target), from: Endpoint::Device(source), bytes },
                _ => NodeWork::Kernel(launch),
            };
            // SAFETY: two distinct blocks, as the kernel requires, and nothing is freed before the end.
            match unsafe { device.graph_add(graph, &after, &work) } {
                Err(error) if error.is_race() => refused += 1,
                node => nodes.push(node.unwrap()),
            }
        }
        (at, device.graph_instantiate(graph).unwrap())
    };
    let execs = (0..4).map(|n| graph(n % 2)).collect();
    (execs, refused)
}

/// Runs one program on two devices. Calls that the checker refuses are left out.
fn program(seed: u64, devices: &[Arc<dyn Backend>; 2], graphs: bool) -> (Vec<u8>, usize) {
    // A separate generator, so that a program with graphs makes the same other calls as the program without graphs.
    let mut chance = StdRng::seed_from_u64(seed);
    let mut random = StdRng::seed_from_u64(seed);
    let mut streams = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        streams.push((at, RawStream(0)));
        for non_blocking in [true, true, false, false] {
            let spec = StreamSpec { name: "s".into(), priority: 0, non_blocking };
            streams.push((at, device.stream_create(&spec).unwrap()));
        }
    }
    let events: Vec<_> = (0..4).map(|n| (n % 2, devices[n % 2].event_create(false).unwrap())).collect();
    let memory: Vec<_> = (0..BLOCKS).map(|n| devices[n % 2].alloc(BYTES).unwrap()).collect();
    for (n, address) in memory.iter().enumerate() {
        let device = &devices[n % 2];
        let pattern = Pattern { width: 4, bits: 0x0123_4567 * (n as u32 + 1) };
        // SAFETY: nothing is freed before the end.
        unsafe { device.fill(RawStream(0), *address, pattern, BYTES) }.unwrap();
        device.stream_synchronize(RawStream(0)).unwrap();
    }
    let (execs, mut refused) = if graphs { execs(&mut chance, devices, &memory) } else { (Vec::new(), 0) };
    for _ in 0..80 {
        if graphs && chance.random_range(0..3) == 0 {
            let (at, exec) = execs[chance.random_range(0..execs.len())];
            let own: Vec<_> = streams.iter().filter(|(owner, _)| *owner == at).collect();
            // SAFETY: nothing is freed before the end.
            match unsafe { devices[at].exec_launch(exec, own[chance.random_range(0..own.len())].1) } {
                Err(error) if error.is_race() => refused += 1,
                launched => launched.unwrap(),
            }
        }
        let (at, on) = streams[random.random_range(0..streams.len())];
        let device = &devices[at];
        let from = random.random_range(0..BYTES);
        let bytes = random.random_range(1..=BYTES - from);
        let (to, other) = (random.random_range(0..BLOCKS), random.random_range(1..BLOCKS));
        let part = |block: usize| Address(memory[block].0 + from);
        let (target, source) = (part(to), part((to + other) % BLOCKS));
        let outcome = match random.random_range(0..10) {
            0..=2 => {
                let slice = |address, write| Arg::Slice { address, len: bytes, bytes, write };
                let scalar = [random.random::<u8>()];
                let scalar = Arg::Scalar(&scalar);
                let args = [slice(target, true), slice(source, false), scalar];
                let launch = Launch { kernel: &MIX, grid: [1; 3], block: [1; 3], shared_bytes: 0, args: &args };
                // SAFETY: two distinct blocks, as the kernel requires, and nothing is freed before the end.
                unsafe { device.launch(on, &launch) }
            }
            3 => {
                let (to, from) = (Endpoint::Device(target), Endpoint::Device(source));
                // SAFETY: nothing is freed before the end.
                unsafe { device.copy(on, to, from, bytes) }
            }
            4..=6 => {
                let own: Vec<_> = events.iter().filter(|(owner, _)| *owner == at).collect();
                device.event_record(own[random.random_range(0..own.len())].1, on)
            }
            _ => device.stream_wait(on, events[random.random_range(0..events.len())].1),
        };
        match outcome {
            Err(error) if error.is_race() => refused += 1,
            other => other.unwrap(),
        }
    }
    for (at, on) in &streams {
        devices[*at].stream_synchronize(*on).unwrap();
    }
    let mut bytes = vec![0; BYTES as usize * BLOCKS];
    for (chunk, address) in bytes.chunks_exact_mut(BYTES as usize).zip(&memory) {
        let (to, from) = (Endpoint::Host(chunk.as_mut_ptr()), Endpoint::Device(*address));
        // SAFETY: `bytes` outlives the wait.
        unsafe { devices[0].copy(RawStream(0), to, from, BYTES) }.unwrap();
        devices[0].stream_synchronize(RawStream(0)).unwrap();
    }
    (bytes, refused)
}

fn simulated(program_seed: u64, seed: u64, check: bool, graphs: bool) -> (Vec<u8>, usize) {
    let simulation = Simulation::new(seed);
    let devices = [(); 2].map(|()| {
        let device = simulation.device(Emulated::new());
        if check { checked(device) } else { device }
    });
    program(program_seed, &devices, graphs)
}

fn has_one_result(programs: u64, graphs: bool) {
    let (mut refusals, mut kept) = (0, 0);
    for number in 0..programs {
        let first = simulated(number, 0, true, graphs);
        for seed in 1..6 {
            assert_eq!(simulated(number, seed, true, graphs), first, "program {number}, seed {seed}");
        }
        let threads = [(); 2].map(|()| checked(open(Emulated::new().workers(2))));
        assert_eq!(program(number, &threads, graphs), first, "program {number} on threads");
        refusals += first.1;
        kept += 80_usize.saturating_sub(first.1);
    }
    let programs = programs as usize;
    assert!(refusals > 3 * programs && kept > 30 * programs, "{refusals} refused, {kept} kept");
}

/// `.ci/full` runs these tests in a release build.
const PROGRAMS: u64 = if cfg!(debug_assertions) { 50 } else { 500 };

#[test]
fn programs_without_races_have_one_result() {
    has_one_result(PROGRAMS, false);
}

#[test]
fn programs_with_graphs_and_without_races_have_one_result() {
    has_one_result(PROGRAMS, true);
}

#[test]
fn programs_with_races_have_several_results() {
    for graphs in [false, true] {
        let several = (0..50).filter(|number| {
            let first = simulated(*number, 0, false, graphs);
            (1..6).any(|seed| simulated(*number, seed, false, graphs) != first)
        });
        assert!(several.count() > 25);
    }
}

/// A wait on the default stream for a completed event still orders the stream with all blocking streams. Tested on
/// threads, where work completes while other work is enqueued.
#[test]
fn a_wait_for_a_passed_event_orders_the_default_stream() {
    for number in [117, 138] {
        let first = simulated(number, 0, true, false);
        for _ in 0..40 {
            let threads = [(); 2].map(|()| checked(open(Emulated::new().workers(2))));
            assert_eq!(program(number, &threads, false), first, "program {number}");
        }
    }
}
