//! Scenarios F: faults and cancellation, injected on the emulated device.

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use common::*;
use futures::{FutureExt, task::noop_waker_ref};
use tokio::sync::{mpsc, oneshot};
use wakeline::{
    Stream,
    device::{Emulated, Faults},
    prelude::*,
};

fn faulty(faults: Faults) -> Device {
    emulated_with(Emulated::new().workers(4).faults(faults))
}

/// x *= 2
#[kernel]
fn double(x: &mut [u32]) {
    for x in x {
        *x = x.wrapping_mul(2);
    }
}

/// As [`Increment`], with [`double`].
struct Double;

impl Operator for Double {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        double::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// Polls a future at most `times` times, and yields to other tasks in between. Drops it if it is still pending.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = Box::pin(future);
    for _ in 0..times {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(noop_waker_ref())) {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// Increments, and holds its stream from run `nth` on; the hold is sent over a channel.
struct HoldsAt {
    nth: u32,
    run: u32,
    held: Option<oneshot::Sender<Hold>>,
    stopped: Arc<AtomicBool>,
}

impl Operator for HoldsAt {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        self.run += 1;
        if self.run == self.nth {
            let _ = self.held.take().unwrap().send(hold(cx.stream()?));
        }
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.store(true, Ordering::Relaxed);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f1_a_trap_in_the_middle_of_a_flow() {
    let device = faulty(Faults::new().trap_kernel("increment", 3));
    let (held, is_held) = oneshot::channel();
    let stopped = Arc::new(AtomicBool::new(false));
    let mut flow = Flow::new("f1");
    let produce = flow.add("produce", SendEach::new((0..20).map(|n| vec![n; 64])));
    let traps = HoldsAt { nth: 3, run: 0, held: Some(held), stopped: stopped.clone() };
    let traps = flow.add("traps", traps).on(&device);
    let after = flow.add("after", Double).on(&device);
    let seen = shared();
    let (noted, mut is_held) = (seen.clone(), Some(is_held));
    let mut taken = 0;
    let consume = flow.add(
        "consume",
        sink(move |envelope: Envelope<u32>| {
            taken += 1;
            // All work for the third message is enqueued by now, and held.
            let held = if taken == 3 { is_held.take() } else { None };
            let noted = noted.clone();
            async move {
                if let Some(held) = held {
                    drop(held.await);
                }
                let data = envelope.read().await?.to_vec();
                lock(&noted).push(data);
                Ok(())
            }
        }),
    );
    flow.connect_with(produce.output, traps.input, HubOptions::default().envelope_bytes(256));
    flow.connect(traps.output, after.input);
    flow.connect(after.output, consume.input);

    // Unrelated work on the same device: one stream is held, and never released.
    let bystander = Stream::named(&device, "bystander").unwrap();
    let buffer = Buffer::<u32>::from_slice(&bystander, &[1, 2, 3]).unwrap();
    bystander.completed().await.unwrap();
    let never = hold(&bystander);
    let waiting = {
        let bystander = bystander.clone();
        [tokio::spawn(bystander.completed()), tokio::spawn(async move { buffer.to_vec(&bystander).await.map(drop) })]
    };
    // A flow on another device, which continues.
    let other = emulated();
    let census = Census::default();
    let numbers = census.clone();
    let mut beside = Flow::new("beside");
    let endless = beside.add("endless", source(move || ready(Ok(Some(numbers.message(0))))));
    let count = beside.add("count", sink(|_: Counted| ready(Ok(())))).on(&other);
    beside.connect(endless.output, count.input);
    let beside = beside.spawn().unwrap();

    let began = Instant::now();
    let error = within(flow.run()).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    let message = format!("{error:#}");
    assert!(message.contains("(noticed by operator `"), "{message}");
    for unfinished in ["`traps`", "`after`", "`bystander`"] {
        assert!(message.contains(unfinished), "unfinished work: {unfinished} in {message}");
    }
    assert!(message.contains("kernel `increment` on stream `traps`"), "the failed kernel is named: {message}");
    assert_eq!(*lock(&seen), [[2; 64], [4; 64]], "the messages before it have arrived");
    assert!(stopped.load(Ordering::Relaxed));

    for waiting in waiting {
        let error = within(waiting).await.unwrap().unwrap_err();
        assert!(error.is_device_lost(), "{error}");
    }
    drop(never);
    assert!(device.lost().unwrap().is_device_lost());
    assert!(Stream::new(&device).unwrap_err().is_device_lost());
    assert!(Buffer::<u8>::new(&device, 1).unwrap_err().is_device_lost());
    assert!(bystander.completed().await.unwrap_err().is_device_lost());
    assert!(within(flow.run()).await.unwrap_err().is_device_lost(), "the flow cannot run again on a lost device");

    assert!(other.lost().is_none());
    beside.stop();
    within(beside).await.unwrap();
    drop(flow);
    freed(&device).await;
}

/// Two operators on a device between two on the host, with fewer envelopes than messages.
fn two_steps(device: &Device, chunks: u32) -> (Flow, Shared<Vec<u32>>, Vec<Vec<u32>>) {
    let seen = shared();
    let mut flow = Flow::new("two steps");
    let produce = flow.add("produce", SendEach::new((0..chunks).map(|n| vec![n; 64])));
    let first = flow.add("first", Increment).on(device);
    let second = flow.add("second", Double).on(device);
    let consume = flow.add("consume", Collect(seen.clone()));
    flow.connect_with(produce.output, first.input, HubOptions::bounded(2).envelopes(3).envelope_bytes(256));
    flow.connect(first.output, second.input);
    flow.connect(second.output, consume.input);
    (flow, seen, (0..chunks).map(|n| vec![2 * (n + 1); 64]).collect())
}

/// Each launch of a flow traps in turn: messages that arrived before are correct, and nothing hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f1_a_trap_at_every_launch() {
    for kernel in ["increment", "double"] {
        for nth in 1..=6 {
            let device = faulty(Faults::new().trap_kernel(kernel, nth));
            let (mut flow, seen, wanted) = two_steps(&device, 5);
            let outcome = within(flow.run()).await;
            let seen = std::mem::take(&mut *lock(&seen));
            assert_eq!(seen, wanted[..seen.len()], "trap {nth} of {kernel}");
            if nth == 6 {
                outcome.expect("there are five launches");
                assert_eq!(seen.len(), 5);
            } else {
                let error = outcome.unwrap_err();
                assert!(error.is_device_lost(), "{error}");
                assert!(error.to_string().contains(&format!("kernel `{kernel}` on stream")), "{error}");
                assert!(error.to_string().contains(&format!("` (kernel `{kernel}`)")), "{error}");
                assert!(error.to_string().contains("unfinished work on: `"), "{error}");
                assert!(seen.len() < nth as usize, "the trapped message has not arrived");
            }
            drop(flow);
            freed(&device).await;
        }
    }
}

/// Traps, and returns only once its device is lost.
struct TrapsAlone {
    fails_itself: bool,
    stopped: Arc<AtomicBool>,
}

impl Operator for TrapsAlone {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        let mut data = Buffer::<u32>::new(cx.device(), 64)?;
        increment::launch(cx.stream()?, &mut data)?;
        // This call does not report the fault to wakeline, and the loop does not yield to other tasks.
        while cx.device().memory().is_ok() {
            std::thread::yield_now();
        }
        if self.fails_itself {
            return Err("for a reason of its own".into());
        }
        loop {
            tokio::task::yield_now().await;
        }
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.stopped.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The flow itself may be the first to notice the fault: it fails all pending futures and stops all operators.
#[tokio::test]
async fn f1_a_fault_that_no_call_has_reported() {
    for fails_itself in [false, true] {
        let device = faulty(Faults::new().trap_kernel("increment", 1));
        let stopped = Arc::new(AtomicBool::new(false));
        let mut flow = Flow::new("f1");
        let _ = flow.add("alone", TrapsAlone { fails_itself, stopped: stopped.clone() }).on(&device);
        let error = within(flow.run()).await.unwrap_err();
        let message = format!("{error:#}");
        if fails_itself {
            assert_eq!(message, "operator `alone`: for a reason of its own");
        } else {
            assert!(error.is_device_lost(), "{message}");
            assert!(message.contains("unfinished work on: `alone`"), "{message}");
            assert!(device.lost().is_some());
        }
        assert!(stopped.load(Ordering::Relaxed), "its stop has run, fails_itself: {fails_itself}");
    }
}

/// Host callbacks are lost: awaited completions resolve nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f3_a_callback_that_never_comes() {
    let lost = (1..=100).fold(Faults::new(), |faults, nth| faults.lose_host_function(nth));
    let device = faulty(lost);
    let stream = Stream::named(&device, "stream").unwrap();
    for round in 0..5 {
        let mut data = Buffer::from_slice(&stream, &vec![round; 1 << 16]).unwrap();
        increment::launch(&stream, &mut data).unwrap();
        within(stream.completed()).await.unwrap();
        assert_eq!(within(data.to_vec(&stream)).await.unwrap(), vec![round + 1; 1 << 16]);
    }
    let (mut flow, seen, wanted) = two_steps(&device, 10);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), wanted);
    drop(flow);
    freed(&device).await;
}

/// A stream is dropped before its callback: no unrelated task is woken, and memory is returned.
#[tokio::test]
async fn f3_a_callback_after_its_stream_is_dropped() {
    let device = emulated();
    for _ in 0..100 {
        let stream = Stream::named(&device, "short").unwrap();
        let mut data = Buffer::<u32>::new(&device, 64).unwrap();
        increment::launch(&stream, &mut data).unwrap();
        polled(stream.completed(), 1).await;
        drop((data, stream));
    }
    freed(&device).await;
}

on_both!(f4_a_dropped_completion, async |device: Device| {
    let stream = Stream::named(&device, "stream").unwrap();
    let mut data = Buffer::from_slice(&stream, &[1_u32; 64]).unwrap();
    let held = hold(&stream);
    increment::launch(&stream, &mut data).unwrap();
    for times in 0..20 {
        assert!(polled(stream.completed(), times).await.is_none(), "the stream is held");
        assert!(polled(data.to_vec(&stream), times).await.is_none(), "the stream is held");
    }
    let kept = stream.completed();
    drop(held);
    kept.await.unwrap();
    assert_eq!(data.to_vec(&stream).await.unwrap(), [2; 64]);
});

// The future and the owner of memory are both dropped while the device uses it: it is kept until the work is done, and
// then returned.
on_both!(f4_dropped_with_the_memory_it_waited_for, async |device: Device| {
    let stream = Stream::named(&device, "stream").unwrap();
    let held = hold(&stream);
    let mut here = Buffer::<u32>::pinned(&device, 64).unwrap();
    let mut there = Buffer::<u32>::new(&device, 64).unwrap();
    increment::launch(&stream, &mut there).unwrap();
    stream.copy(&there, &mut here).unwrap();
    assert!(here.as_slice().is_err(), "the copy has not completed");
    assert!(polled(here.read(), 3).await.is_none());
    drop((here, there));
    assert_eq!(device.memory_in_use(), 256);
    drop(held);
    freed(&device).await;
});

/// The read of every second message is dropped while pending, with its envelope; the others return the right data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_a_dropped_read_of_an_envelope() {
    let device = emulated();
    let (held, is_held) = mpsc::unbounded_channel();
    let mut flow = Flow::new("f4");
    let produce = flow.add("produce", SendEach::new((0..40).map(|n| vec![n; 64])));
    let holds = flow.add(
        "holds",
        task(move |ports: &mut MapPorts<Envelope<u32>, Envelope<u32>>, cx| {
            let held = held.clone();
            async move {
                while cx.ready(ports).await {
                    let mut envelope = ports.input.take()?;
                    held.send(hold(cx.stream()?)).unwrap();
                    increment::launch(cx.stream()?, &mut envelope)?;
                    ports.output.send(envelope).await?;
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let holds = holds.on(&device);
    let is_held = Arc::new(tokio::sync::Mutex::new(is_held));
    let mut number = 0;
    let consume = flow.add(
        "consume",
        sink(move |envelope: Envelope<u32>| {
            let (is_held, this) = (is_held.clone(), number);
            number += 1;
            async move {
                let held = is_held.lock().await.recv().await.unwrap();
                assert!(polled(envelope.read(), this as usize % 5).await.is_none(), "the stream is held");
                if this % 2 == 0 {
                    drop(envelope);
                    drop(held);
                } else {
                    drop(held);
                    assert_eq!(envelope.read().await?, [this + 1; 64]);
                }
                Ok(())
            }
        }),
    );
    flow.connect_with(produce.output, holds.input, HubOptions::default().envelope_bytes(256));
    flow.connect(holds.output, consume.input);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("consume").unwrap().runs, 40);
    drop(flow);
    freed(&device).await;
}

/// A cancelled send drops its own message and no other; a cancelled receive drops none.
#[tokio::test]
async fn f4_dropped_sends_and_receives() {
    let (census, sent, received) = (Census::default(), shared(), shared());
    let mut flow = Flow::new("f4");
    let (counted, noted) = (census.clone(), sent.clone());
    let write = flow.add(
        "write",
        task(move |ports: &mut SourcePorts<Counted>, _| {
            let (census, noted) = (counted.clone(), noted.clone());
            async move {
                for number in 0..1000 {
                    let times = 1 + number as usize % 3;
                    if let Some(outcome) = polled(ports.output.send(census.message(number)), times).await {
                        outcome?;
                        lock(&noted).push(number);
                    }
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let noted = received.clone();
    let read = flow.add(
        "read",
        task(move |ports: &mut SinkPorts<Counted>, _| {
            let noted = noted.clone();
            async move {
                for times in (0..4).cycle() {
                    match polled(ports.input.recv(), times).await {
                        None => tokio::task::yield_now().await,
                        Some(message) => match message? {
                            Some(message) => lock(&noted).push(message.number),
                            None => break,
                        },
                    }
                }
                Ok(())
            }
            .boxed()
        }),
    );
    flow.connect_with(write.output, read.input, HubOptions::bounded(2));
    let report = within(flow.run()).await.unwrap();
    let (sent, received) = (lock(&sent), lock(&received));
    assert!(sent.len() > 100 && sent.len() < 1000, "some were cancelled, and some were not: {}", sent.len());
    assert_eq!(*sent, *received);
    assert_eq!(report.operator("write").unwrap().messages_out, sent.len() as u64);
    assert_eq!(census.live(), 0);
}

#[tokio::test]
async fn f4_a_dropped_blank_loses_no_envelope() {
    let mut flow = Flow::new("f4");
    let write = flow.add(
        "write",
        task(move |ports: &mut SourcePorts<Envelope<u32>>, _| {
            async move {
                for _ in 0..10 {
                    let (one, two) = (ports.output.blank().await?, ports.output.blank().await?);
                    assert!(polled(ports.output.blank(), 3).await.is_none(), "both envelopes are in use");
                    drop((one, two));
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let read = flow.add("read", Collect(shared()));
    flow.connect_with(write.output, read.input, HubOptions::default().envelope_bytes(64));
    within(flow.run()).await.unwrap();
}

/// An operator that polls `ready`, drops the future and does something else is still active: its flow does not count it
/// as waiting.
#[tokio::test]
async fn f4_a_dropped_ready() {
    #[derive(Ports)]
    struct BothPorts {
        #[input]
        input: Input<u32>,
        #[output]
        output: Output<u32>,
    }
    let (go, may_go) = oneshot::channel::<()>();
    let (asked, has_asked) = oneshot::channel::<()>();
    let (mut may_go, mut asked) = (Some(may_go), Some(asked));
    let seen = shared();
    let noted = seen.clone();
    let mut flow = Flow::new("f4");
    let busy = flow.add(
        "busy",
        task(move |ports: &mut BothPorts, cx| {
            let (may_go, asked) = (may_go.take().unwrap(), asked.take().unwrap());
            async move {
                assert!(cx.ready(ports).now_or_never().is_none(), "no message has arrived");
                asked.send(()).unwrap();
                // A task outside the flow signals this later.
                may_go.await.unwrap();
                for number in 0..3 {
                    ports.output.send(number).await?;
                    assert_eq!(ports.input.recv().await?, Some(number));
                }
                Ok(())
            }
            .boxed()
        }),
    );
    let back = flow.add(
        "back",
        map(move |number: u32| {
            lock(&noted).push(number);
            ready(Ok(number))
        }),
    );
    flow.connect(busy.output, back.input);
    flow.connect_with(back.output, busy.input, HubOptions::bounded(3));
    let running = flow.spawn().unwrap();
    has_asked.await.unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    go.send(()).expect("the operator still waits");
    let report = within(running).await.unwrap();
    assert_eq!(*lock(&seen), [0, 1, 2]);
    assert_eq!(report.operator("busy").unwrap().messages_out, 3);
}

/// A flow is aborted after every possible number of steps: whatever each operator was awaiting, nothing leaks.
#[tokio::test]
async fn f4_abort_at_every_await_point() {
    let device = emulated();
    let mut completed = 0;
    for steps in 0..400 {
        let (flow, _, _) = two_steps(&device, 6);
        let running = flow.spawn().unwrap();
        for _ in 0..steps {
            tokio::task::yield_now().await;
        }
        running.abort();
        match within(running).await {
            Ok(_) => completed += 1,
            Err(error) => assert!(error.is_cancelled(), "after {steps} steps: {error}"),
        }
    }
    assert!(completed < 400, "none was aborted");
    freed(&device).await;
    assert_eq!(device.memory().unwrap().free, 64 << 20);
    assert!(device.lost().is_none());
}

/// Allocates memory in every run and keeps it, since dropped memory would be reused.
struct Scratch {
    stopped: Arc<AtomicUsize>,
    kept: Vec<Buffer<u32>>,
}

impl Operator for Scratch {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        let mut scratch = Buffer::<u32>::new(cx.device(), envelope.len())?;
        let stream = cx.stream()?;
        add_one::launch(stream, &envelope, &mut scratch)?;
        stream.copy(&scratch, &mut envelope)?;
        self.kept.push(scratch);
        ports.output.send(envelope).await?;
        Ok(())
    }

    async fn stop(&mut self, _cx: &mut Cx) -> Result<()> {
        self.kept.clear();
        self.stopped.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Each allocation of a flow fails in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f5_an_allocation_fails() {
    // Two envelopes, and one buffer in each of four runs.
    for nth in 1..=7 {
        let device = faulty(Faults::new().fail_alloc(nth));
        let (seen, stopped) = (shared(), Arc::new(AtomicUsize::new(0)));
        let mut flow = Flow::new("f5");
        let produce = flow.add("produce", SendEach::new((0..4).map(|n| vec![n; 64])));
        let scratch = flow.add("scratch", Scratch { stopped: stopped.clone(), kept: Vec::new() }).on(&device);
        let consume = flow.add("consume", Collect(seen.clone()));
        flow.connect_with(produce.output, scratch.input, HubOptions::default().envelope_bytes(256));
        flow.connect(scratch.output, consume.input);
        let outcome = within(flow.run()).await;
        if nth == 7 {
            outcome.expect("there are six allocations");
            assert_eq!(*lock(&seen), (0..4).map(|n| vec![n + 1; 64]).collect::<Vec<_>>());
        } else {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            let place = if nth <= 2 { "hub `produce.output -> scratch.input`" } else { "operator `scratch`" };
            assert!(error.to_string().starts_with(place), "{nth}: {error}");
            assert!(error.to_string().contains("256"), "the sizes are in the message: {error}");
            assert!(device.lost().is_none(), "the device is not lost");
        }
        assert_eq!(stopped.load(Ordering::Relaxed), 1, "{nth}");
        freed(&device).await;
        if nth < 7 {
            within(flow.run()).await.expect("the next run can allocate");
            drop(flow);
            freed(&device).await;
        }
    }
}

/// Each copy of a flow fails in turn: the device is lost, and all pending futures fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f5_a_copy_fails() {
    for nth in 1..=9 {
        let device = faulty(Faults::new().fail_copy(nth));
        let (mut flow, seen, wanted) = two_steps(&device, 4);
        let outcome = within(flow.run()).await;
        let seen = std::mem::take(&mut *lock(&seen));
        assert_eq!(seen, wanted[..seen.len()], "arrived messages are correct");
        if nth == 9 {
            outcome.expect("there are eight copies");
        } else {
            let error = outcome.unwrap_err();
            assert!(error.is_device_lost(), "{error}");
            assert!(error.to_string().contains("copy to "), "{error}");
            assert!(error.to_string().contains("unfinished work on: `"), "{error}");
        }
        drop(flow);
        freed(&device).await;
    }
}
