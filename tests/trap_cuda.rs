//! Scenario F1 on a GPU: a kernel that traps.
//!
//! A binary of its own, with one test: a trap ends the GPU for the whole process. Without a GPU it says so and passes;
//! with `REQUIRE_CUDA=1` it fails.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use common::*;
use wakeline::prelude::*;

/// x += 1, and a trap where x is `what`.
#[kernel(unsafe(cuda = "kernels/trap.cu"))]
fn trap_at(x: &mut [u32], what: u32) {
    for x in x {
        assert_ne!(*x, what);
        *x += 1;
    }
}

/// Increments, until it meets a seven.
struct Traps {
    stopped: Arc<AtomicUsize>,
}

impl Operator for Traps {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        trap_at::launch(cx.stream()?, &mut envelope, 7)?;
        ports.output.send(envelope).await
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

async fn trap(device: Device) {
    let (seen, stopped) = (shared(), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("trap");
    let produce = flow.add("produce", Produce::new((0..20).map(|n| vec![n; 1024])));
    let traps = flow.add("traps", Traps { stopped: stopped.clone() }).on(&device);
    let after = flow.add("after", Increment).on(&device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, traps.input, Hub::bounded(2).envelopes(4).envelope_bytes(4096));
    flow.connect(traps.output, after.input);
    flow.connect(after.output, consume.input);

    // Somebody else's work on the device, which never ends by itself: it waits for what the trap keeps from happening.
    let bystander = Stream::named(&device, "bystander").unwrap();
    let held = hold(&bystander);
    let waiting = tokio::spawn(bystander.completed());

    let began = Instant::now();
    let error = tokio::time::timeout(Duration::from_secs(30), flow.run()).await.expect("it hangs").unwrap_err();
    eprintln!("after {:?}: {error}", began.elapsed());
    // Compiling the kernels is part of the run, so this is not the second that the driver has.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    let told = error.to_string();
    assert!(told.starts_with("operator `"), "{told}");
    assert!(told.contains("unfinished was the work of"), "{told}");
    assert!(told.contains("`traps`"), "{told}");
    let arrived = lock(&seen).len();
    assert!(arrived <= 7, "what trapped has not arrived");
    assert_eq!(*lock(&seen), (0..arrived as u32).map(|n| vec![n + 2; 1024]).collect::<Vec<_>>());
    assert_eq!(stopped.load(Ordering::Relaxed), 1);

    drop(held);
    assert!(within(waiting).await.unwrap().unwrap_err().is_device_lost(), "nobody waits for ever");
    assert!(device.lost().unwrap().is_device_lost());
    assert!(Stream::new(&device).unwrap_err().is_device_lost());
    assert!(Buffer::<u8>::new(&device, 1).unwrap_err().is_device_lost());
    assert!(Buffer::<u8>::pinned(&device, 1).unwrap_err().is_device_lost());
    assert!(bystander.completed().await.unwrap_err().is_device_lost());
    let began = Instant::now();
    assert!(within(flow.run()).await.unwrap_err().is_device_lost(), "nor does the flow run again");
    assert!(began.elapsed() < Duration::from_secs(5));
    drop((flow, bystander));
    freed(&device).await;
}

mod f1_a_trap_in_the_middle_of_a_flow {
    use super::*;

    /// The same with the Rust body, whose panic is a trap.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn emulated() {
        trap(common::emulated_with(wakeline::device::Emulated::new().workers(4))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn cuda() {
        if let Some(device) = common::cuda() {
            trap(device).await;
        }
    }
}
