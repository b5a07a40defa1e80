//! Scenario F1, for any fault of a kernel: every pending future of the device fails, every later call returns the
//! cause, and nothing hangs.
//!
//! A fault ends a GPU for the whole process, so each kind of fault has an executable of its own with one test, in two
//! forms: on a GPU with the real fault, on the emulated device with a planned one (which loses one device and not the
//! process). The GPU test is ignored by default: `cargo test -- --include-ignored`.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::*;
use wakeline::{Stream, prelude::*, stream::Timer};

/// Enqueues the kernel that faults at the given number.
pub type Launch = fn(&Stream, &mut Envelope<u32>, u32) -> Result<()>;

/// The number that the kernels fault at: that of the eighth message and launch.
pub const FAULT: u32 = 7;

/// A fault as two tests, `name::emulated` and `name::cuda`; `$beside`: whether a GPU reports it while it has other
/// work.
#[macro_export]
macro_rules! a_fault {
    ($name:ident, $kernel:ident) => {
        $crate::a_fault!($name, $kernel, true);
    };
    ($name:ident, $kernel:ident, $beside:expr) => {
        mod $name {
            use super::*;

            $crate::gpu_tests_run_where_required!();
            $crate::every_kernel_compiles!();

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn emulated() {
                let faults = wakeline::device::Faults::new()
                    .trap_kernel(stringify!($kernel), u64::from($crate::fault::FAULT) + 1);
                let config = wakeline::device::Emulated::new().workers(6).faults(faults);
                $crate::fault::fault($crate::emulated_with(config), true, stringify!($kernel), |stream, x, what| {
                    $kernel::launch(stream, x, what)
                })
                .await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "needs a GPU"]
            async fn cuda() {
                $crate::fault::fault($crate::cuda(), $beside, stringify!($kernel), |stream, x, what| {
                    $kernel::launch(stream, x, what)
                })
                .await;
            }
        }
    };
}

/// Keeps a GPU busy; the emulated device is blocked in another way.
#[kernel(unsafe(cuda = "../kernels/spin_for.cu"))]
fn spin_for(x: &mut [u32], _nanoseconds: u64) {
    x[0] += 1;
}

/// Increments, until it reaches the fault.
struct Faulty {
    launch: Launch,
    after: Arc<AtomicUsize>,
    stopped: Arc<AtomicUsize>,
}

impl Operator for Faulty {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        (self.launch)(cx.stream()?, &mut envelope, FAULT)?;
        ports.output.send(envelope).await?;
        Ok(())
    }

    async fn after(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        self.after.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[derive(Ports)]
pub struct DonePorts {
    #[input(done)]
    input: Input<Envelope<u32>>,
}

/// Collects the messages once their work is done.
struct CollectDone(Shared<Vec<u32>>);

impl Operator for CollectDone {
    type Ports = DonePorts;

    async fn compute(&mut self, ports: &mut DonePorts, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.input.take()?;
        lock(&self.0).push(envelope.as_slice()?.to_vec());
        Ok(())
    }
}

/// `beside`: the fault happens while the device has other work, which never ends by itself and is released only
/// afterwards.
pub async fn fault(device: Device, beside: bool, kernel: &str, launch: Launch) {
    let bystander = Stream::named(&device, "bystander").unwrap();
    let mut buffers = Vec::new();
    for _ in 0..4 {
        buffers.push(Buffer::from_slice(&bystander, &[1_u32; 64]).unwrap());
    }
    let mut here = Buffer::<u32>::pinned(&device, 64).unwrap();
    bystander.completed().await.unwrap();
    let timer = Timer::start(&bystander).unwrap();
    let mut word = Buffer::from_slice(&bystander, &[0_u32]).unwrap();
    let held = match device.is_cuda() {
        // Half a minute: longer than anything here takes.
        true if beside => spin_for::launch(&bystander, &mut word, 30_000_000_000).map(|()| None).unwrap(),
        true => None,
        false => Some(hold(&bystander)),
    };
    for buffer in &mut buffers {
        increment::launch(&bystander, buffer).unwrap();
    }
    let (carried, kept) = (buffers.pop().unwrap(), buffers.pop().unwrap());
    bystander.copy(&kept, &mut here).unwrap();
    let ticket = bystander.ticket();
    let timed = timer.stop().unwrap();
    let read = tokio::spawn(async move { here.read().await.map(drop) });
    let waiting = [
        ("a stream", tokio::spawn(bystander.completed())),
        ("a ticket", tokio::spawn(async move { ticket.completed().await })),
        ("a buffer", tokio::spawn(kept.available())),
        ("the host's read", read),
        ("a timer", tokio::spawn(async move { timed.await.map(drop) })),
    ];
    // A flow that waits at a port for a message of that work.
    let mut other = Flow::new("beside");
    let mut carried = Some(Envelope::from(carried));
    let sends = other.add("sends", source(move || std::future::ready(Ok(carried.take())))).on(&device);
    let waits = other.add("waits", CollectDone(shared())).on(&device);
    other.connect(sends.output, waits.input);
    let other = other.spawn().unwrap();

    let (seen, after, stopped) = (shared(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut flow = Flow::new("fault");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 1024])));
    let faulty = Faulty { launch, after: after.clone(), stopped: stopped.clone() };
    let faulty = flow.add("faulty", faulty).on(&device);
    let next = flow.add("next", Increment).on(&device);
    let consume = flow.add("consume", CollectDone(seen.clone()));
    flow.connect_with(produce.output, faulty.input, HubOptions::bounded(2).envelopes(4).envelope_bytes(4096));
    flow.connect(faulty.output, next.input);
    flow.connect(next.output, consume.input);
    let error = within(flow.run()).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    let message = format!("{error:#}");
    eprintln!("{message}");
    assert!(message.contains("(noticed by operator `"), "{message}");
    assert!(message.contains("unfinished work on:"), "{message}");
    let named = [format!("`faulty` (kernel `{kernel}`)"), "`faulty` (a graph)".into()];
    assert!(named.iter().any(|named| message.contains(named)), "unfinished work: {message}");
    assert!(!beside || message.contains("`bystander`"), "unfinished work: {message}");
    assert!(message.contains("start again in a new process"), "remedy: {message}");
    let cause = if device.is_cuda() { "CUDA_ERROR_" } else { "on stream `faulty`" };
    assert!(message.contains(cause), "cause: {message}");
    let arrived = lock(&seen).len() as u32;
    assert!(arrived <= FAULT, "the faulted message has not arrived");
    assert_eq!(*lock(&seen), (0..arrived).map(|n| vec![n + 2; 1024]).collect::<Vec<_>>(), "what arrived is right");
    assert_eq!(after.load(Ordering::Relaxed), FAULT as usize, "the work of that run was never done");
    assert_eq!(stopped.load(Ordering::Relaxed), 1);

    for (who, waiting) in waiting {
        let outcome = within(waiting).await.unwrap();
        if beside {
            let error = outcome.expect_err(who);
            assert!(error.is_device_lost() && error.to_string().contains(cause), "{who}: {error}");
        }
    }
    let outcome = within(other).await;
    if beside {
        let error = outcome.unwrap_err();
        assert!(error.is_device_lost() && error.to_string().contains(cause), "a flow beside it: {error}");
    }
    drop(held);

    let lost = format!("{:#}", device.lost().expect("a lost device"));
    assert!(lost.contains(cause), "{lost}");
    let [mut one, mut two] = <[_; 2]>::try_from(buffers).unwrap();
    let refused = [
        ("a new stream", Stream::new(&device).map(drop)),
        ("memory", Buffer::<u8>::new(&device, 1).map(drop)),
        ("memory of the host", Buffer::<u8>::pinned(&device, 1).map(drop)),
        ("a kernel", increment::launch(&bystander, &mut one)),
        ("a copy", bystander.copy(&one, &mut two)),
        ("a fill", bystander.fill(&mut two, 1)),
        ("a function of the host", bystander.host_function(|| panic!("it never runs"))),
        ("a timer", Timer::start(&bystander).map(drop)),
        ("a wait of the host", bystander.synchronize_blocking()),
        ("the flow, again", within(flow.run()).await.map(drop)),
    ];
    // This holds for work that was already done, too.
    let unfinished = [
        ("what a buffer is doing", one.state().map(drop)),
        ("a completion", within(bystander.completed()).await),
        ("an available buffer", within(one.available()).await),
    ];
    for (what, outcome) in refused.into_iter().chain(unfinished.into_iter().filter(|_| beside)) {
        let error = outcome.expect_err(what);
        assert!(error.is_device_lost() && error.to_string().contains(cause), "{what}: {error}");
    }
    drop((flow, one, two, kept, word, bystander));
    freed(&device).await;
}
