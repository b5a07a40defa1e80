//! Two devices in one flow: hubs copy from one to the other, and each operator runs with its device current.

use std::{future::poll_fn, task::Poll};

use common::*;
use wakeline::{
    Stream,
    device::{Emulated, Faults, Simulation},
    prelude::*,
    stream::Event,
};

async fn there_and_back(first: Device, second: Device) {
    let seen = shared();
    let chunks: Vec<Vec<u32>> = (0..40).map(|n| vec![n; 1000]).collect();
    let mut flow = Flow::new("two devices");
    let produce = flow.add("produce", SendEach::new(chunks.clone()));
    let a = flow.add("a", Increment).on(&first);
    let b = flow.add("b", Increment).on(&second);
    let c = flow.add("c", Increment).on(&first);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, a.input, HubOptions::bounded(2).envelope_bytes(4000));
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

#[tokio::test]
async fn hubs_copy_between_emulated_devices_on_one_thread() {
    within(there_and_back(emulated(), emulated())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs two GPUs"]
async fn hubs_copy_between_two_gpus() {
    let gpu = |n| Device::cuda(n).unwrap().race_checked();
    within(there_and_back(gpu(0), gpu(1))).await;
}

#[tokio::test]
#[ignore = "needs a GPU"]
async fn a_missing_copy_path_between_devices_is_an_error_before_running() {
    let gpu = cuda();
    let emulated = emulated_with(Emulated::new());
    let mut flow = Flow::new("mixed");
    let produce = flow.add("produce", SendEach::new([vec![1_u32]]));
    let a = flow.add("a", Increment).on(&gpu);
    let b = flow.add("b", Increment).on(&emulated);
    let consume = flow.add("consume", Collect(shared::<Vec<u32>>()));
    flow.connect_with(produce.output, a.input, HubOptions::bounded(1).envelope_bytes(4));
    flow.connect(a.output, b.input);
    flow.connect(b.output, consume.input);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    assert!(error.to_string().contains("no copy path between"), "{error}");
}

/// Two devices. Work of `lost` is ordered after work of `sound`, and `lost` is lost while that work is pending.
struct Between {
    sound: Device,
    lost: Device,
}

impl Between {
    fn new(simulation: &Simulation) -> Self {
        let faults = Faults::new().trap_kernel("increment", 1);
        Self {
            sound: Device::simulated(simulation, Emulated::new()),
            lost: Device::simulated(simulation, Emulated::new().faults(faults)),
        }
    }

    /// Enqueues a lot of work, and then a write of 7.
    fn slow_write(&self, memory: &mut Buffer<u32>) -> Result<Stream> {
        let (stream, mut other) = (Stream::new(&self.sound)?, Buffer::<u32>::new(&self.sound, 4)?);
        for _ in 0..8 {
            stream.fill(&mut other, 0)?;
        }
        stream.fill(memory, 7)?;
        Ok(stream)
    }

    async fn lose(&self) -> Result<()> {
        let stream = Stream::new(&self.lost)?;
        increment::launch(&stream, &mut Buffer::<u32>::new(&self.lost, 4)?)?;
        let end = Event::new();
        end.record(&stream)?;
        // Polls, so that the loss is noticed while the other devices work.
        while end.query().is_ok() {
            let mut has_yielded = false;
            poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if std::mem::replace(&mut has_yielded, true) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
        Ok(())
    }
}

/// Runs the case in many orders: each must read the last write.
async fn has_the_last_write(case: impl AsyncFn(Between, &Simulation) -> Result<Vec<u32>>) {
    for seed in 0..100 {
        let simulation = Simulation::new(seed);
        let read = simulation.run(case(Between::new(&simulation), &simulation)).await.unwrap();
        assert_eq!(read, [9; 4], "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn f1_memory_last_used_by_a_lost_device_is_not_free_before_earlier_work_is_done() {
    has_the_last_write(async |devices: Between, _: &Simulation| {
        let mut memory = Buffer::<u32>::new(&devices.sound, 4)?;
        let late = devices.slow_write(&mut memory)?;
        Stream::new(&devices.lost)?.copy(&Buffer::<u32>::new(&devices.lost, 4)?, &mut memory)?;
        devices.lose().await?;
        drop(memory);
        let stream = Stream::new(&devices.sound)?;
        let mut next = stream.alloc::<u32>(4)?;
        stream.fill(&mut next, 9)?;
        late.completed().await?;
        next.to_vec(&stream).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f1_memory_is_not_reused_by_a_stream_that_is_ordered_only_through_a_lost_device() {
    has_the_last_write(async |devices: Between, _: &Simulation| {
        let mut memory = Buffer::<u32>::new(&devices.sound, 4)?;
        let late = devices.slow_write(&mut memory)?;
        let [behind, last] = [Stream::new(&devices.sound)?, Stream::new(&devices.sound)?];
        let between = Stream::new(&devices.lost)?;
        between.wait_for(&late)?;
        behind.wait_for(&between)?;
        drop(memory);
        let mut next = behind.alloc::<u32>(4)?;
        behind.fill(&mut next, 8)?;
        devices.lose().await?;
        last.fill(&mut next, 9)?;
        late.completed().await?;
        next.to_vec(&last).await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f1_work_stays_ordered_after_another_device_if_the_device_between_them_is_lost() {
    has_the_last_write(async |devices: Between, simulation: &Simulation| {
        let third = Device::simulated(simulation, Emulated::new());
        let mut memory = Buffer::<u32>::new(&devices.sound, 4)?;
        let late = devices.slow_write(&mut memory)?;
        let [behind, last] = [Stream::new(&third)?, Stream::new(&third)?];
        let eight = Buffer::from_slice(&behind, &[8; 4])?;
        let nine = Buffer::from_slice(&last, &[9; 4])?;
        let between = Stream::new(&devices.lost)?;
        between.wait_for(&late)?;
        behind.wait_for(&between)?;
        behind.copy(&eight, &mut memory)?;
        devices.lose().await?;
        last.copy(&nine, &mut memory)?;
        late.completed().await?;
        memory.to_vec(&last).await
    })
    .await;
}
