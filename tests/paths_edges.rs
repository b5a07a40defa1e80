//! Paths, device times and the time of emulated work, at their edges.

use std::time::Duration;

use common::*;
use tokio::time::{Instant, sleep};
use wakeline::{
    Stream,
    device::{Emulated, Simulation},
    hub::TrySendError,
    observe::{Observe, Snapshot},
    operator::SinkPorts,
    prelude::*,
};

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[kernel]
fn work(out: &mut [u32]) {
    out[0] += 1;
}

fn counting(count: u64) -> impl Operator<Ports = SourcePorts<u64>> {
    let mut numbers = 0..count;
    source(move || std::future::ready(Ok(numbers.next())))
}

/// Runs a flow with all its messages followed. Returns its last snapshot, and how many messages its hubs dropped.
async fn observed(simulation: &Simulation, make: impl FnOnce(&mut Flow)) -> (Snapshot, u64) {
    let run = async {
        let mut flow = Flow::new("flow");
        make(&mut flow);
        let watch = Observe::new().paths(1);
        flow.observe(&watch);
        let report = flow.run().await.unwrap();
        (watch.snapshots().pop().unwrap(), report.hubs.iter().map(|hub| hub.dropped).sum())
    };
    simulation.run(run).await
}

/// Works on its device, before and after a pause.
#[derive(Clone, Default)]
struct OnDevice {
    external: bool,
    elsewhere: bool,
    waits: bool,
    pause: Duration,
}

impl Operator for OnDevice {
    type Ports = SinkPorts<u64>;

    async fn compute(&mut self, ports: &mut SinkPorts<u64>, cx: &mut Cx) -> Result<()> {
        ports.input.take()?;
        let stream = cx.stream()?.clone();
        let other = if self.external || self.elsewhere { Stream::new(stream.device())? } else { stream.clone() };
        let mut buffer = Buffer::from_slice(&other, &[0_u32; 4])?;
        if self.external {
            other.completed().await?;
            let call = stream.external("external").write(&mut buffer);
            let call = call.emulated(|[mut to]| to.as_mut_slice::<u32>().fill(1));
            // SAFETY: nothing is enqueued.
            unsafe { call.enqueue(|_, _| Ok(()))? };
        } else {
            work::launch(&stream, &mut buffer)?;
        }
        if self.waits {
            stream.completed().await?;
        }
        if self.elsewhere {
            work::launch(&other, &mut buffer)?;
        }
        if !self.pause.is_zero() {
            sleep(self.pause).await;
        }
        work::launch(&stream, &mut buffer)?;
        stream.completed().await
    }
}

/// The thread of the observer reads device times also where no message is followed.
#[tokio::test]
async fn device_times_are_read_without_paths() {
    let device = Device::emulated(Emulated::new());
    let mut flow = Flow::new("flow");
    let on_device = flow.add("on device", OnDevice::default()).on(&device);
    let numbers = flow.ingress("numbers", on_device.input);
    let watch = Observe::new().paths(0).every(ms(1));
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let runs = || watch.snapshots()[0].operator("on device").unwrap().device_time.unwrap().runs;
    numbers.send(1).await.unwrap();
    until("the device time of a run is read", || !watch.snapshots().is_empty() && runs() > 0).await;
    drop(numbers);
    running.await.unwrap();
    assert_eq!(runs(), 1);
}

/// A flow whose report has the device time of every run also has it where an observer looks at it seldom.
#[tokio::test]
async fn an_observer_that_rests_leaves_the_report_complete() {
    const RUNS: u64 = 4500;
    let device = Device::emulated(Emulated::new());
    let mut flow = Flow::new("flow");
    let read = flow.add("read", counting(RUNS));
    let write = flow.add("write", OnDevice::default()).on(&device);
    flow.connect(read.output, write.input);
    flow.set_device_times(true);
    flow.observe(&Observe::new().every(Duration::MAX));
    let report = flow.run().await.unwrap();
    let device_time = report.operator("write").unwrap().device.unwrap();
    assert_eq!((device_time.runs, device_time.missed), (RUNS, 0));
}

/// Runs of the workers of one operator, whose device work has gaps, count once each.
#[tokio::test(start_paused = true)]
async fn runs_of_workers_count_once() {
    let simulation = Simulation::new(1);
    let device = Device::simulated(&simulation, Emulated::new().kernel_time("work", ms(2)));
    let (snapshot, _) = observed(&simulation, |flow| {
        let read = flow.add("read", counting(12));
        let operator = OnDevice { elsewhere: true, ..OnDevice::default() };
        let write = flow.add("write", wakeline::operator::concurrent(3, operator)).on(&device);
        flow.connect(read.output, write.input);
    })
    .await;
    let device_time = snapshot.operator("write").unwrap().device_time.unwrap();
    assert_eq!((device_time.runs, device_time.longest, device_time.total), (12, ms(4), 12 * ms(4)));
}

/// External work begins when its own call has ended, and not when the next one has.
#[tokio::test(start_paused = true)]
async fn external_work_is_device_time() {
    let simulation = Simulation::new(1);
    let emulated = Emulated::new().kernel_time("external", ms(10)).kernel_time("work", ms(1));
    let device = Device::simulated(&simulation, emulated);
    let (snapshot, _) = observed(&simulation, |flow| {
        let read = flow.add("read", counting(1));
        let operator = OnDevice { external: true, pause: ms(6), ..OnDevice::default() };
        let write = flow.add("write", operator).on(&device);
        flow.connect(read.output, write.input);
    })
    .await;
    assert_eq!(snapshot.paths[0].parts.device, ms(11), "{snapshot}");
}

#[derive(Ports)]
struct BatchPorts {
    #[input]
    input: Input<u64>,
    #[output]
    output: Output<u64>,
}

/// Sends three messages for each.
struct Triple(Vec<u64>);

impl Operator for Triple {
    type Ports = BatchPorts;

    async fn compute(&mut self, ports: &mut BatchPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        self.0.extend([number; 3]);
        ports.output.send_all(&mut self.0).await
    }
}

fn slow(time: Duration) -> impl Operator<Ports = SinkPorts<u64>> {
    sink(move |_: u64| async move {
        sleep(time).await;
        Ok(())
    })
}

/// A message that finds no room and is sent later is not dropped.
#[tokio::test(start_paused = true)]
async fn a_message_that_waits_for_room_is_not_dropped() {
    let (snapshot, _) = observed(&Simulation::new(1), |flow| {
        let read = flow.add("read", counting(5));
        let triple = flow.add("triple", Triple(Vec::new()));
        let write = flow.add("write", slow(ms(1)));
        flow.connect(read.output, triple.input);
        flow.connect_with(triple.output, write.input, HubOptions::bounded(1));
    })
    .await;
    assert_eq!((snapshot.paths[0].count, snapshot.path_counts.dropped), (15, 0), "{snapshot}");
}

#[derive(Ports)]
struct TriesPorts {
    #[input]
    input: Input<u64>,
    #[output(optional)]
    output: Output<u64>,
}

/// Sends what there is room for.
struct Tries;

impl Operator for Tries {
    type Ports = TriesPorts;

    async fn compute(&mut self, ports: &mut TriesPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        match ports.output.try_send(number) {
            Err(TrySendError::Failed(error)) => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// The path of a message that finds no room ends at the operator that keeps it.
#[tokio::test(start_paused = true)]
async fn a_message_that_finds_no_room_ends_there() {
    let (snapshot, _) = observed(&Simulation::new(1), |flow| {
        let read = flow.add("read", counting(5));
        let tries = flow.add("tries", Tries);
        let write = flow.add("write", slow(ms(1)));
        flow.connect(read.output, tries.input);
        flow.connect_with(tries.output, write.input, HubOptions::bounded(1));
    })
    .await;
    let counts: Vec<_> = snapshot.paths.iter().map(|path| (path.operators.len(), path.count)).collect();
    assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), 5, "{counts:?}");
    assert_eq!(snapshot.path_counts.dropped, 0, "{snapshot}");
}

/// A message that one of several readers' hubs drops is dropped there, and only there.
#[tokio::test(start_paused = true)]
async fn one_of_several_readers_loses_messages() {
    for slow_first in [true, false] {
        let (snapshot, dropped) = observed(&Simulation::new(1), |flow| {
            let read = flow.add("read", counting(10));
            let [one, two] = [slow_first, !slow_first].map(|is_slow| if is_slow { ms(5) } else { ms(0) });
            let one = flow.add("one", slow(one));
            let two = flow.add("two", slow(two));
            flow.connect_with(read.output, [one.input, two.input], HubOptions::drop_newest(1));
        })
        .await;
        let taken: u64 = snapshot.paths.iter().map(|path| path.count).sum();
        assert!(dropped > 0);
        assert_eq!((taken, snapshot.path_counts.dropped), (20 - dropped, dropped), "{snapshot}");
    }
}

/// Takes an envelope on its device.
struct Uses;

impl Operator for Uses {
    type Ports = SinkPorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut data = ports.input.take()?;
        let stream = cx.stream()?;
        work::launch(stream, &mut data)?;
        stream.completed().await
    }
}

#[tokio::test(start_paused = true)]
async fn copies_for_several_readers() {
    let simulation = Simulation::new(1);
    let [one, two] =
        [(); 2].map(|()| Device::simulated(&simulation, Emulated::new().kernel_time("work", ms(3)).copy_time(ms(2))));
    let (snapshot, _) = observed(&simulation, |flow| {
        let read = flow.add("read", SendEach::new([vec![1_u32; 4]]));
        let a = flow.add("a", Uses).on(&one);
        let b = flow.add("b", Uses).on(&two);
        flow.connect_with(read.output, [a.input, b.input], HubOptions::bounded(1).envelope_bytes(16));
    })
    .await;
    assert_eq!(snapshot.paths.len(), 2);
    for path in &snapshot.paths {
        assert_eq!((path.parts.copy, path.parts.device, path.max), (ms(2), ms(3), ms(5)), "{path:?}");
    }
}

/// While the operator computes between two waits for its device, the device does not work.
#[tokio::test(start_paused = true)]
async fn a_device_that_has_ended_its_work_does_not_work() {
    let simulation = Simulation::new(1);
    let device = Device::simulated(&simulation, Emulated::new().kernel_time("work", ms(3)));
    let (snapshot, _) = observed(&simulation, |flow| {
        let read = flow.add("read", counting(1));
        let write = flow.add("write", OnDevice { waits: true, pause: ms(50), ..OnDevice::default() }).on(&device);
        flow.connect(read.output, write.input);
    })
    .await;
    let parts = snapshot.paths[0].parts;
    assert_eq!((parts.device, parts.host), (ms(6), ms(50)), "{snapshot}");
}

/// An endless kernel ends where a call waits for it.
#[tokio::test(start_paused = true)]
async fn endless_work() {
    let simulation = Simulation::new(1);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new().kernel_time("work", Duration::MAX));
        let stream = Stream::new(&device).unwrap();
        let mut buffer = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
        work::launch(&stream, &mut buffer).unwrap();
        let waits = tokio::time::timeout(Duration::from_secs(10), stream.completed()).await;
        assert!(waits.is_err());
        stream.synchronize_blocking().unwrap();
    };
    simulation.run(run).await;
}

/// A call that skips the time of some work leaves that of later work as it is.
#[tokio::test(start_paused = true)]
async fn a_blocking_call_skips_the_time_of_its_own_work() {
    let simulation = Simulation::new(1);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new().kernel_time("work", ms(10)));
        let stream = Stream::new(&device).unwrap();
        let mut buffer = Buffer::from_slice(&stream, &[1_u32; 4]).unwrap();
        work::launch(&stream, &mut buffer).unwrap();
        stream.synchronize_blocking().unwrap();
        sleep(ms(5)).await;
        let began = Instant::now();
        work::launch(&stream, &mut buffer).unwrap();
        stream.completed().await.unwrap();
        assert_eq!(began.elapsed(), ms(10));
    };
    simulation.run(run).await;
}
