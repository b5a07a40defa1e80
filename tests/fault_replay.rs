//! Scenario F2: a kernel that traps in a replayed graph. The counterpart of `common/fault.rs`, and for the same reason
//! a separate test executable.

use std::time::{Duration, Instant};

use common::*;
use wakeline::{Stream, prelude::*};

gpu_tests_run_where_required!();
common::every_kernel_compiles!();

/// x += 1, and a trap where x is `what`.
#[kernel(unsafe(cuda = "kernels/trap_at.cu"))]
fn trap_at(x: &mut [u32], what: u32) {
    for x in x {
        assert_ne!(*x, what, "a trap");
        *x += 1;
    }
}

/// Keeps a GPU busy. The emulated device is held in another way.
#[kernel(unsafe(cuda = "kernels/spin_for.cu"))]
fn spin_for(x: &mut [u32], _nanoseconds: u64) {
    x[0] += 1;
}

struct Trap;

impl Operator for Trap {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut x = ports.input.take()?;
        trap_at::launch(cx.stream()?, &mut x, 7)?;
        ports.output.send(x).await?;
        Ok(())
    }
}

mod f2_a_kernel_that_traps_in_a_replay_ends_the_flow_and_names_whose_it_was {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn emulated() {
        body(common::emulated()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[ignore = "needs a GPU"]
    async fn cuda() {
        body(common::cuda()).await;
    }
}

async fn body(device: Device) {
    let bystander = Stream::named(&device, "bystander").unwrap();
    let mut word = Buffer::from_slice(&bystander, &[0_u32]).unwrap();
    bystander.completed().await.unwrap();
    let held = match device.is_cuda() {
        // 30 s: longer than anything in this test takes.
        true => spin_for::launch(&bystander, &mut word, 30_000_000_000).map(|()| None).unwrap(),
        false => Some(hold(&bystander)),
    };
    let waits = tokio::spawn(bystander.completed());

    let seen = shared();
    let mut flow = Flow::new("trap");
    let read = flow.add("read", SendEach::new((0..20).map(|n| vec![n; 16])));
    let one = flow.add("one", Increment).on(&device);
    let two = flow.add("two", Trap).on(&device);
    let collect = flow.add("collect", Collect(seen.clone()));
    flow.connect_with(read.output, one.input, HubOptions::bounded(2).envelope_bytes(64));
    flow.connect(one.output, two.input);
    flow.connect(two.output, collect.input);
    flow.replay("net", (&one, &two));
    let since = Instant::now();
    let error = within(flow.run()).await.unwrap_err();
    let waiter = within(waits).await.unwrap().unwrap_err();
    // The bound covers the whole run, hubs and capture included.
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    assert!(error.is_device_lost() && waiter.is_device_lost(), "{error}, {waiter}");
    let message = format!("{error:#}");
    assert!(message.contains("unfinished work on:") && message.contains("`net (one, two)`"), "{message}");
    // The seventh message, which traps, is replayed by then.
    let arrived = lock(&seen).len() as u32;
    assert!(arrived <= 6, "the faulted message has not arrived");
    assert_eq!(*lock(&seen), (0..arrived).map(|n| vec![n + 2; 16]).collect::<Vec<_>>(), "arrived messages are correct");
    drop(held);
    drop((flow, word, bystander));
    freed(&device).await;
}
