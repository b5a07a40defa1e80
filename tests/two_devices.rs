//! Two devices in one flow: hubs copy from one to the other, and each operator's device is current when it runs.

mod common;

use common::*;
use wakeline::{device::Emulated, prelude::*};

/// Through both devices and back to the first, many chunks, on few envelopes.
async fn there_and_back(first: Device, second: Device) {
    let seen = shared();
    let chunks: Vec<Vec<u32>> = (0..40).map(|n| vec![n; 1000]).collect();
    let mut flow = Flow::new("two devices");
    let produce = flow.add("produce", SendEach::new(chunks.clone()));
    let a = flow.add("a", Increment).on(&first);
    let b = flow.add("b", Increment).on(&second);
    let c = flow.add("c", Increment).on(&first);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, a.input, Hub::bounded(2).envelope_bytes(4000));
    flow.connect(a.output, b.input);
    flow.connect(b.output, c.input);
    flow.connect(c.output, consume.input);
    flow.run().await.unwrap();

    let expected: Vec<Vec<u32>> = chunks.iter().map(|chunk| chunk.iter().map(|n| n + 3).collect()).collect();
    assert_eq!(*lock(&seen), expected);
    assert_eq!(first.memory_peak(), 2 * 2 * 4000, "the envelopes of two hubs");
    assert_eq!(second.memory_peak(), 2 * 4000, "the envelopes of one hub");
    drop(flow);
    freed(&first).await;
    freed(&second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hubs_copy_between_emulated_devices() {
    within(there_and_back(emulated(), emulated())).await;
}

/// Both devices on one worker.
#[tokio::test]
async fn hubs_copy_between_emulated_devices_on_one_thread() {
    within(there_and_back(emulated(), emulated())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hubs_copy_between_gpus() {
    if Device::cuda_count() < 2 {
        eprintln!("skipped: fewer than two GPUs");
        return;
    }
    let gpu = |n| Device::cuda(n).unwrap().race_checked();
    within(there_and_back(gpu(0), gpu(1))).await;
}

#[tokio::test]
async fn devices_of_different_makes_are_an_error_before_running() {
    let Some(gpu) = cuda() else { return };
    let emulated = emulated_with(Emulated::new());
    let mut flow = Flow::new("mixed");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let a = flow.add("a", Increment).on(&gpu);
    let b = flow.add("b", Increment).on(&emulated);
    let consume = flow.add("consume", Collect(shared::<Vec<u32>>()));
    flow.connect_with(produce.output, a.input, Hub::bounded(1).envelope_bytes(4));
    flow.connect(a.output, b.input);
    flow.connect(b.output, consume.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("different makes"), "{error}");
}
