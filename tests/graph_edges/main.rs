//! Edge cases of graphs, from an adversarial review. Tests named `holds_..` passed from the start; each of the others
//! once exposed a defect.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use common::graph::*;
use common::*;
use wakeline::{
    Stream,
    device::{Emulated, Faults},
    graph::{Graph, GraphEvent, Node},
    memory::Allocator,
    prelude::*,
};

/// An async body as two tests, `name::emulated` and `name::cuda`. It is given a device and a stream of that device, and
/// runs in a separate process: a body that hangs may hold a lock that all tests share, and one that aborts ends only
/// its own process.
macro_rules! alone {
    ($name:ident, $body:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn emulated() {
                in_a_process(concat!(module_path!(), "::emulated"), common::emulated, $body);
            }

            #[test]
            #[ignore = "needs a GPU"]
            fn cuda() {
                in_a_process(concat!(module_path!(), "::cuda"), common::cuda, $body);
            }
        }
    };
}

mod bodies;
mod copies;
mod launches;
mod memory;
mod sets;
mod slices;

fn in_a_process(path: &str, device: impl FnOnce() -> Device, body: impl AsyncFnOnce(Device, Stream)) {
    // Test names do not include the crate.
    let name = path.split_once("::").map_or(path, |(_, name)| name);
    common::alone::in_a_process(name, || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(within(async {
            let device = device();
            let stream = Stream::new(&device).unwrap();
            body(device, stream).await;
        }));
    });
}

fn traps_at_increment() -> Device {
    emulated_with(Emulated::new().workers(4).faults(Faults::new().trap_kernel("increment", 1)))
}

fn first(graph: &Graph) -> Node {
    graph.nodes()[0].node
}

/// Whether an allocation returns memory at this address, that is, whether the memory is free.
fn is_handed_out(device: &Device, address: u64) -> bool {
    // Several allocations: other free memory of the same size may be returned first.
    let asked: Vec<_> = (0..16).map(|_| Buffer::<u32>::new(device, 64).unwrap()).collect();
    asked.iter().any(|buffer| buffer.device_address().unwrap() == address)
}

/// A graph of one fill node.
fn fills(data: &mut Buffer<u32>, value: u32) -> Graph {
    let device = data.device().clone();
    Graph::capture(&device, |capture| capture.stream().fill(data, value)).unwrap().0
}

/// A graph that copies its input to its own memory, and adds it to `sum`.
fn adds_input(input: &Buffer<u32>, sum: &mut Buffer<u32>) -> Result<Graph> {
    let device = sum.device().clone();
    let captured = Graph::capture(&device, |capture| {
        capture.input(input)?;
        let mut x = capture.stream().alloc::<u32>(64)?;
        capture.stream().copy(input, &mut x)?;
        add_to::launch(capture.stream(), sum, &x)
    });
    captured.map(|(graph, ())| graph)
}
