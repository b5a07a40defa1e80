//! Graphs are captured, launched and destroyed thousands of times without a leak, on the host or on the device.

#[path = "../benches/support/allocations.rs"]
mod allocations;

use common::*;
use wakeline::{Stream, graph::Graph, prelude::*};

gpu_tests_run_where_required!();

const ROUNDS: usize = quick_or_long(4_000, 20_000);
/// One-time allocations are made within this many rounds.
const WARM: usize = 1_000;

/// The resident set size of this process, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    4096 * pages.unwrap_or_default()
}

/// Serialises the tests, which count the allocations of all threads.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

on_both!(thousands_of_graphs_leak_nothing, async |device: Device| {
    let _alone = ALONE.lock().await;
    let (stream, side) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let mut data = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    stream.completed().await.unwrap();
    allocations::begin();
    let mut warm = None;
    for round in 0..ROUNDS {
        let capture = |capture: &mut wakeline::graph::Capturing| {
            let own = capture.stream();
            let side = capture.fork("side")?;
            let mut scratch = own.alloc::<u32>(64)?;
            own.fill(&mut scratch, 1)?;
            side.host_callback(|| ())?;
            increment::launch(own, &mut data)?;
            own.wait_for(&side)
        };
        let (graph, ()) = Graph::capture(&device, capture).unwrap();
        let exec = graph.instantiate().unwrap();
        drop(graph);
        // Dropped after the launch is done, or while it runs.
        let launched = exec.launch(if round % 2 == 0 { &stream } else { &side }).unwrap();
        if round % 8 != 0 {
            launched.completed().await.unwrap();
        }
        drop(exec);
        if round == WARM || round == ROUNDS - 1 {
            stream.completed().await.unwrap();
            side.completed().await.unwrap();
            until("the graphs' memory is returned", || device.memory_stats().in_use == 256).await;
            let now = (allocations::held(), resident(), device.memory().unwrap().free);
            let before = *warm.get_or_insert(now);
            let grown = (now.0 - before.0, now.1.saturating_sub(before.1), before.2.saturating_sub(now.2));
            assert!(grown.0 < 32 << 10, "host allocations: {grown:?}");
            assert!(grown.1 < 8 << 20, "resident: {grown:?}");
            assert!(grown.2 < 4 << 20, "on the device: {grown:?}");
        }
    }
    allocations::end();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [ROUNDS as u32; 64]);
});
