//! `Flow::set_device_times`: the device time of each operator's runs, measured separately from host time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use common::*;
use wakeline::{
    Stream,
    device::{Emulated, Faults},
    prelude::*,
};

/// Blocks its stream in run `nth` until `go_on` is signalled. `began` receives the time at which that starts.
struct Busy {
    nth: u32,
    run: u32,
    /// Every run whose number is a multiple of this enqueues nothing.
    idle_every: u32,
    began: Option<tokio::sync::oneshot::Sender<Instant>>,
    go_on: Option<mpsc::Receiver<()>>,
}

impl Operator for Busy {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        self.run += 1;
        let stream = cx.stream()?;
        if self.run == self.nth {
            let (began, go_on) = (self.began.take().unwrap(), self.go_on.take().unwrap());
            stream.host_function(move || {
                let _ = began.send(Instant::now());
                let _ = go_on.recv();
            })?;
        }
        if !self.run.is_multiple_of(self.idle_every) {
            increment::launch(stream, &mut envelope)?;
        }
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// The operator, the receiver of the start time, and the sender that unblocks the stream.
fn busy(nth: u32, idle_every: u32) -> (Busy, tokio::sync::oneshot::Receiver<Instant>, mpsc::Sender<()>) {
    let ((began, has_begun), (go, go_on)) = (tokio::sync::oneshot::channel(), mpsc::channel());
    (Busy { nth, run: 0, idle_every, began: Some(began), go_on: Some(go_on) }, has_begun, go)
}

/// First enqueues work on its own buffer, which need not wait for the message's work.
struct Next(Buffer<u32>);

impl Operator for Next {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.input.take()?;
        increment::launch(cx.stream()?, &mut self.0)?;
        increment::launch(cx.stream()?, &mut envelope)?;
        ports.output.send(envelope).await?;
        Ok(())
    }
}

// Device time belongs to the operator whose work ran, not to the next one, whose stream waits for it.
on_both!(device_time_is_each_operators_own, async |device: Device| {
    let (busy, has_begun, go) = busy(3, 4);
    let mut flow = Flow::new("times");
    flow.set_device_times(true);
    let produce = flow.add("produce", SendEach::new((0..8).map(|n| vec![n; 64])));
    let busy = flow.add("busy", busy).on(&device);
    let next = flow.add("next", Next(Buffer::from_slice(&Stream::new(&device).unwrap(), &[0; 64]).unwrap()));
    let next = next.on(&device);
    let consume = flow.add("consume", Collect(shared()));
    flow.connect_with(produce.output, busy.input, HubOptions::bounded(2).envelope_bytes(256));
    flow.connect(busy.output, next.input);
    flow.connect(next.output, consume.input);
    let running = flow.spawn().unwrap();
    let began = has_begun.await.unwrap();
    // Not a wait for an event: this is the duration that is measured.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let took = began.elapsed();
    drop(go);
    let report = running.await.unwrap();

    let busy = report.operator("busy").unwrap().device.unwrap();
    // The GPU's clock and the host's clock differ.
    assert!(busy.longest >= took.mul_f64(0.99), "{:?} in {took:?}", busy.longest);
    assert!(busy.total >= busy.longest && busy.mean() <= busy.longest, "{busy:?}");
    assert_eq!((busy.runs, busy.missed), (6, 0), "two of eight runs enqueue nothing");
    let next = report.operator("next").unwrap().device.unwrap();
    assert_eq!((next.runs, next.missed), (8, 0));
    assert!(next.total < took.mul_f64(0.9), "waiting is not counted as device time: {next:?} in {took:?}");
    assert!(next.total > Duration::ZERO, "{next:?}");
    for on_host in ["produce", "consume"] {
        assert_eq!(report.operator(on_host).unwrap().device, None);
    }
    let text = report.to_string();
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_string();
    assert!(line("operator").ends_with("busy ms    device ms"), "{text}");
    assert!(line("consume").ends_with(" -"), "{text}");
    assert!(!line("next").ends_with(" -"), "{text}");
});

/// Two hundred runs; the first one's work is held.
struct Ahead {
    buffer: Buffer<u32>,
    hold: Option<tokio::sync::oneshot::Sender<Hold>>,
    runs: Arc<AtomicUsize>,
}

impl Operator for Ahead {
    type Ports = ();

    async fn compute(&mut self, _ports: &mut (), cx: &mut Cx) -> Result<()> {
        let stream = cx.stream()?;
        if let Some(here) = self.hold.take() {
            let _ = here.send(hold(stream));
        }
        increment::launch(stream, &mut self.buffer)?;
        if self.runs.fetch_add(1, Ordering::Relaxed) + 1 == 200 {
            cx.finish();
        }
        Ok(())
    }
}

// The flow does not wait for a device that is far behind, and the storage for its timestamps is bounded.
on_both!(device_time_of_more_runs_than_are_stored, async |device: Device| {
    let stream = Stream::new(&device).unwrap();
    let buffer = Buffer::from_slice(&stream, &[0_u32; 64]).unwrap();
    stream.completed().await.unwrap();
    let (hold, is_held) = tokio::sync::oneshot::channel();
    let runs = Arc::new(AtomicUsize::new(0));
    let mut flow = Flow::new("times");
    flow.set_device_times(true);
    let _ = flow.add("ahead", Ahead { buffer, hold: Some(hold), runs: runs.clone() }).on(&device);
    let running = flow.spawn().unwrap();
    let held = is_held.await.unwrap();
    until("all runs have returned, and none of their work is done", || runs.load(Ordering::Relaxed) == 200).await;
    drop(held);
    let report = running.await.unwrap();
    let ahead = report.operator("ahead").unwrap();
    let times = ahead.device.unwrap();
    assert_eq!(ahead.runs, 200);
    assert_eq!(times.runs + times.missed, 200, "{times:?}");
    assert!(times.missed > 0 && times.runs >= 100, "{times:?}");
});

on_both!(device_time_is_off_by_default, async |device: Device| {
    let mut flow = Flow::new("times");
    let produce = flow.add("produce", SendEach::new([vec![1_u32; 64]]));
    let add = flow.add("add", Increment).on(&device);
    let consume = flow.add("consume", Collect(shared()));
    flow.connect_with(produce.output, add.input, HubOptions::default().envelope_bytes(256));
    flow.connect(add.output, consume.input);
    let report = flow.run().await.unwrap();
    assert!(report.operators.iter().all(|operator| operator.device.is_none()));
    assert!(report.to_string().lines().skip(1).take(3).all(|line| line.ends_with(" -")), "{report}");

    // The next run of the same flow.
    flow.set_device_times(true);
    let report = flow.run().await.unwrap();
    assert_eq!(report.operator("add").unwrap().device.unwrap().runs, 0, "there is no work to time");
});

/// A fault at any launch: timing neither hangs nor hides the error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f1_a_fault_while_runs_are_timed() {
    for nth in 1..=5 {
        let faults = Faults::new().trap_kernel("increment", nth);
        let device = emulated_with(Emulated::new().workers(4).faults(faults));
        let mut flow = Flow::new("times");
        flow.set_device_times(true);
        let produce = flow.add("produce", SendEach::new((0..5).map(|n| vec![n; 64])));
        let add = flow.add("add", Increment).on(&device);
        let consume = flow.add("consume", Collect(shared()));
        flow.connect_with(produce.output, add.input, HubOptions::bounded(2).envelope_bytes(256));
        flow.connect(add.output, consume.input);
        let error = within(flow.run()).await.unwrap_err();
        assert!(error.is_device_lost(), "{error}");
        assert!(error.to_string().contains("kernel `increment` on stream `add`"), "{error}");
        drop(flow);
        freed(&device).await;
    }
}
