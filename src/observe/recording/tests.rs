use std::collections::HashMap;

use super::*;
use crate::{
    Cx, Device, Envelope, Flow, HubOptions, Operator, Result,
    condition::Gate,
    device::{Emulated, Simulation},
    observe::Observe,
    operator::{MapPorts, concurrent, map, sink, source},
    tracepoint::TraceEvent as E,
};

const LONG: Duration = Duration::from_secs(3600);

fn numbers(count: u64) -> impl Operator<Ports = crate::operator::SourcePorts<u64>> {
    let mut numbers = 0..count;
    source(move || std::future::ready(Ok(numbers.next())))
}

/// Checks what holds of each timeline that nothing is missing of. Returns how many messages were sent and taken, by hub.
fn check(timeline: &Timeline) -> Vec<(usize, usize)> {
    assert_eq!(timeline.lost, 0);
    assert!(timeline.events.is_sorted_by_key(|event| event.at));
    assert!(timeline.events.iter().all(|event| (timeline.from..=timeline.to).contains(&event.at)));
    let (mut sent, mut runs, mut polls) = (HashMap::new(), HashMap::new(), HashMap::<_, i32>::new());
    let mut counts = vec![(0, 0); timeline.hubs.len()];
    for event in &timeline.events {
        match event.event {
            E::Sent { operator, hub, message } => {
                assert_eq!(sent.insert((hub, message), operator), None, "{event:?}");
                counts[hub as usize].0 += 1;
            }
            E::Taken { hub, message, .. } => {
                assert!(sent.contains_key(&(hub, message)), "{event:?} was not sent");
                counts[hub as usize].1 += 1;
            }
            E::RunBegan { operator, run } => assert_eq!(runs.insert((operator, run), event.at), None, "{event:?}"),
            E::RunEnded { operator, run } => assert!(runs.contains_key(&(operator, run)), "{event:?}"),
            E::PollBegan { operator } => *polls.entry((event.thread, operator)).or_default() += 1,
            E::PollEnded { operator } => *polls.entry((event.thread, operator)).or_default() -= 1,
            E::Stalled | E::Failed { .. } => panic!("{event:?}"),
        }
        assert!(polls.values().all(|open| (0..=1).contains(open)), "{event:?}");
    }
    let ended = timeline.events.iter().filter(|event| matches!(event.event, E::RunEnded { .. }));
    assert_eq!(ended.count(), runs.len());
    assert!(polls.values().all(|open| *open == 0));
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn each_message_that_is_taken_was_sent() {
    const COUNT: usize = 2000;
    let watch = Observe::new().record(1 << 20);
    let mut flow = Flow::new("both");
    let read = flow.add("read", numbers(COUNT as u64));
    let several = flow.add("several", concurrent(3, Pass));
    let one = flow.add("one", map(async |number: u64| Ok(number)));
    let [left, right] = ["left", "right"].map(|name| flow.add(name, sink(async |_: u64| Ok(()))));
    flow.connect(read.output, [several.input, one.input]);
    flow.connect(several.output, left.input);
    flow.connect(one.output, right.input);
    flow.observe(&watch);
    flow.run().await.unwrap();
    let timeline = watch.timeline(LONG).remove(0);
    assert_eq!(check(&timeline), [(COUNT, COUNT); 4]);
    assert_eq!(timeline.operators.len(), 5);
    let of_several = |event: &E| matches!(event, E::RunBegan { operator: 1, .. });
    assert_eq!(timeline.events.iter().filter(|event| of_several(&event.event)).count(), COUNT);
}

#[derive(Clone)]
struct Pass;

impl Operator for Pass {
    type Ports = MapPorts<u64, u64>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let number = ports.input.take()?;
        Ok(ports.output.send(number).await?)
    }
}

#[tokio::test(start_paused = true)]
async fn messages_that_are_dropped_and_those_from_outside() {
    let watch = Observe::new().record(65_536);
    let mut flow = Flow::new("drops");
    let take = flow.add(
        "take",
        sink(async |_: u64| {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(())
        }),
    );
    let ingress = flow.ingress_with("in", take.input, HubOptions::drop_oldest(2));
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    for number in 0..10 {
        ingress.send(number).await.unwrap();
    }
    drop(ingress);
    running.await.unwrap();
    let timeline = watch.timeline(LONG).remove(0);
    let sent = timeline.events.iter().filter(
        |event| matches!(event.event, E::Sent { operator: OUTSIDE, hub: 0, message } if (1..=10).contains(&message)),
    );
    assert_eq!(sent.count(), 10);
    let taken = timeline.events.iter().filter_map(|event| match event.event {
        E::Taken { operator: 0, hub: 0, message } => Some(message),
        _ => None,
    });
    let taken: Vec<_> = taken.collect();
    assert!(taken.len() < 10 && taken.is_sorted() && taken.ends_with(&[9, 10]), "{taken:?}");
}

#[tokio::test]
async fn a_poll_and_a_run_that_panic_have_an_end() {
    let watch = Observe::new().record(1024);
    let mut flow = Flow::new("panics");
    let read = flow.add("read", numbers(3));
    let take = flow.add("take", sink(async |number: u64| if number == 1 { panic!("planned") } else { Ok(()) }));
    flow.connect(read.output, take.input);
    flow.observe(&watch);
    flow.run().await.unwrap_err();
    let timeline = watch.timeline(LONG).remove(0);
    let count = |is: fn(&E) -> bool| timeline.events.iter().filter(|event| is(&event.event)).count();
    assert_eq!(count(|event| matches!(event, E::Failed { operator: 1 })), 1);
    for operator in [0, 1] {
        let open = timeline.events.iter().map(|event| match event.event {
            E::PollBegan { operator: of } | E::RunBegan { operator: of, .. } => i32::from(of == operator),
            E::PollEnded { operator: of } | E::RunEnded { operator: of, .. } => -i32::from(of == operator),
            _ => 0,
        });
        assert_eq!(open.sum::<i32>(), 0, "{operator}");
    }
}

/// Fills what it gets, and does not wait for it.
struct Fill;

impl Operator for Fill {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let mut data = ports.input.take()?;
        cx.stream()?.fill(&mut data, 0)?;
        Ok(ports.output.send(data).await?)
    }
}

/// The same in a loop of its own: its device work is in no run.
struct FillAll;

impl Operator for FillAll {
    type Ports = MapPorts<Envelope<u32>, Envelope<u32>>;

    async fn start(&mut self, cx: &mut Cx) -> Result<()> {
        cx.stream().map(drop)
    }

    async fn run(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        while let Some(mut data) = ports.input.recv().await? {
            cx.stream()?.fill(&mut data, 0)?;
            ports.output.send(data).await?;
        }
        Ok(())
    }

    async fn compute(&mut self, _ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        unreachable!("`run` does not call it")
    }
}

struct Send(u64);

impl Operator for Send {
    type Ports = crate::operator::SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let Some(left) = self.0.checked_sub(1) else {
            cx.finish();
            return Ok(());
        };
        self.0 = left;
        let mut data = ports.output.blank().await?;
        data.space().await?[..4].fill(7);
        data.set_len(4)?;
        Ok(ports.output.send(data).await?)
    }
}

#[tokio::test(start_paused = true)]
async fn device_work_has_the_number_of_its_run() {
    const COPY: Duration = Duration::from_millis(3);
    let simulation = Simulation::new(1);
    let watch = Observe::new().paths(1).record(65_536);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new().copy_time(COPY));
        let mut flow = Flow::new("work");
        let read = flow.add("read", Send(3));
        let work = flow.add("work", Fill).on(&device);
        let write = flow.add("write", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
        flow.connect_with(read.output, work.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect(work.output, write.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
        device.name().to_string()
    };
    let device = simulation.run(run).await;
    let timeline = watch.timeline(LONG).remove(0);
    check(&timeline);
    let of = |track: &str| {
        let stream = timeline.streams.iter().position(|name| *name == format!("{device} {track}")).unwrap();
        timeline.device.iter().filter(|slice| slice.stream == stream as u32).collect::<Vec<_>>()
    };
    assert_eq!(
        of("work").iter().map(|slice| (slice.operator, slice.run)).collect::<Vec<_>>(),
        [(1, 0), (1, 1), (1, 2)]
    );
    for slice in of("work") {
        let began = E::RunBegan { operator: 1, run: slice.run };
        let began = timeline.events.iter().find(|event| event.event == began).unwrap();
        assert!(began.at <= slice.began && slice.began <= slice.ended, "{slice:?}");
    }
    for way in ["copies to device", "copies to host"] {
        let copies = of(way);
        assert_eq!(copies.len(), 3, "{way}");
        assert!(copies.iter().all(|copy| copy.ended - copy.began == COPY.as_nanos() as u64), "{copies:?}");
    }
}

#[tokio::test]
async fn device_work_of_an_operator_without_runs_has_the_number_zero() {
    let simulation = Simulation::new(1);
    let watch = Observe::new().paths(1).record(65_536);
    let run = async {
        let device = Device::simulated(&simulation, Emulated::new());
        let mut flow = Flow::new("work");
        let read = flow.add("read", Send(3));
        let work = flow.add("work", FillAll).on(&device);
        let write = flow.add("write", sink(async |data: Envelope<u32>| data.read().await.map(drop)));
        flow.connect_with(read.output, work.input, HubOptions::bounded(1).envelope_bytes(16));
        flow.connect(work.output, write.input);
        flow.observe(&watch);
        flow.run().await.unwrap();
    };
    simulation.run(run).await;
    let timeline = watch.timeline(LONG).remove(0);
    let runs: Vec<_> = timeline.device.iter().filter(|slice| slice.operator == 1).map(|slice| slice.run).collect();
    assert_eq!(runs, [0, 0, 0]);
}

/// Sampled by the observer's thread.
#[tokio::test]
async fn how_full_the_hubs_are_and_the_memory_in_use() {
    let watch = Observe::new().record(1024).every(Duration::from_millis(1));
    let gate = Gate::paused();
    let device = Device::emulated(Emulated::new());
    let mut flow = Flow::new("full");
    let read = flow.add("read", Send(10));
    let work = flow.add("work", Fill).on(&device).when(gate.clone());
    let write = flow.add("write", sink(async |_: Envelope<u32>| Ok(())));
    flow.connect_with(read.output, work.input, HubOptions::bounded(2).envelope_bytes(4096));
    flow.connect(work.output, write.input);
    flow.observe(&watch);
    let running = flow.spawn().unwrap();
    let is_full = |sample: &CounterSample| (sample.counter, sample.value) == (Counter::HubFill(0), 2.0);
    let timeline = loop {
        tokio::task::yield_now().await;
        if let Some(timeline) = watch.timeline(LONG).pop().filter(|timeline| timeline.counters.iter().any(is_full)) {
            break timeline;
        }
    };
    assert!(timeline.counters.is_sorted_by_key(|sample| sample.at));
    assert_eq!(&*timeline.devices[0], device.name());
    let memory = timeline.counters.iter().filter(|sample| sample.counter == Counter::Memory(0));
    assert!(memory.clone().count() > 0 && memory.map(|sample| sample.value).all(|bytes| bytes >= 4096.0));
    assert_eq!((timeline.hubs[0].capacity, timeline.hubs.len()), (2, 2));
    gate.resume();
    running.await.unwrap();
    // A window in which nothing changes still has the last values.
    let last = watch.timeline(Duration::ZERO).remove(0);
    assert!(last.counters.iter().any(|sample| sample.counter == Counter::HubFill(0) && sample.at == last.from));
}
