//! Scenarios H: hubs whose chunks several links share, used through the ports of a flow's operators.

use common::{
    chunks::{Drain, DrainPorts, Fill, See},
    emulated, freed, increment, lock, on_both, shared, sink, square, until, within,
};
use futures::FutureExt;
use wakeline::{
    Stream, condition,
    device::Simulation,
    flow::Added,
    observe::{LinkRole, Observe},
    operator::{Consume, LinkHandle, Modify, Peek, Produce, concurrent, map},
    prelude::*,
};

use common::Shared;

fn host() -> Device {
    Device::host()
}

fn hub(device: &Device, queue: usize, envelopes: usize) -> ChunkHub<u32> {
    let hub = ChunkHub::builder("numbers").elements(4).queue(queue);
    hub.host_envelopes(envelopes).envelopes(device, envelopes).build().unwrap()
}

#[derive(Ports)]
struct ChangePorts {
    #[modify]
    numbers: Modify<u32>,
}

/// Adds one on its device, in the given number of runs.
struct AddOne(u32);

impl Operator for AddOne {
    type Ports = ChangePorts;

    async fn compute(&mut self, ports: &mut ChangePorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        increment::launch(cx.stream()?, ports.numbers.get_mut()?)
    }
}

/// Adds one on its device, before other links get the chunk.
struct AddFirst(ChunkHub<u32>);

impl Operator for AddFirst {
    type Ports = ChangePorts;

    async fn compute(&mut self, ports: &mut ChangePorts, cx: &mut Cx) -> Result<()> {
        cx.finish();
        increment::launch(cx.stream()?, ports.numbers.get_mut()?)?;
        ports.numbers.commit()?;
        self.0.flow_freely();
        Ok(())
    }
}

on_both!(h1_produced_modified_and_peeked_at, async |device: Device| {
    let (hub, seen) = (hub(&device, 1, 1), shared());
    let mut flow = Flow::new("h1");
    let fill = flow.add("fill", Fill([vec![1, 2, 3]].into()));
    let add = flow.add("add", AddFirst(hub.clone())).on(&device);
    let see = flow.add("see", See(1, seen.clone()));
    flow.link(fill.numbers, &hub);
    flow.link(add.numbers, &hub);
    flow.link(see.numbers, &hub);
    // The chunk stays, and the links would get it in the order in which they wait. `flow_to` puts `add` first.
    hub.flow_to(&[&add.numbers]).unwrap();
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [[2, 3, 4]]);
    assert_eq!(report.operator("add").unwrap().messages_in, 1);
    assert_eq!(report.operator("see").unwrap().bytes_in, 12);
    assert_eq!(device.memory_peak(), 16);
    drop((hub, flow));
    freed(&device).await;
});

#[derive(Ports)]
struct FilterPorts {
    #[consume]
    from: Consume<u32>,
    #[produce(by_hand)]
    to: Produce<u32>,
}

struct Odd;

impl Operator for Odd {
    type Ports = FilterPorts;

    async fn compute(&mut self, ports: &mut FilterPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.from.get()?.read().await?[0];
        ports.to.get_mut()?.fill_from(&[number]).await?;
        if number % 2 == 1 {
            ports.to.commit()?;
        }
        Ok(())
    }
}

on_both!(h2_a_filter_commits_what_it_lets_pass, async |device: Device| {
    let (numbers, odd, seen) = (hub(&device, 2, 2), hub(&device, 2, 2), shared());
    let mut flow = Flow::new("h2");
    let fill = flow.add("fill", Fill::each(1..=5));
    let filter = flow.add("filter", Odd);
    let drain = flow.add("drain", Drain(seen.clone())).on(&host());
    flow.link(fill.numbers, &numbers);
    flow.link(filter.from, &numbers);
    flow.link(filter.to, &odd);
    flow.link(drain.numbers, &odd);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), [[1], [3], [5]]);
    assert_eq!(report.operator("filter").unwrap().messages_in, 5);
    assert_eq!(report.operator("filter").unwrap().messages_out, 3);
    assert_eq!(report.hubs.iter().map(|hub| hub.passed).collect::<Vec<_>>(), [5, 3]);
    assert_eq!(report.untaken, 0);
});

async fn passes(device: &Device, envelopes: usize) {
    let (hub, seen) = (hub(device, 4, envelopes), shared());
    let mut flow = Flow::new("h3");
    let fill = flow.add("fill", Fill::each(0..100));
    let add = flow.add("add", AddOne(u32::MAX)).on(device);
    let drain = flow.add("drain", Drain(seen.clone()));
    flow.link(fill.numbers, &hub);
    flow.link(add.numbers, &hub);
    flow.link(drain.numbers, &hub);
    let watch = Observe::new();
    flow.observe(&watch);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(lock(&seen).concat(), (1..=100).collect::<Vec<_>>());
    let snapshot = watch.snapshots().pop().unwrap();
    let of = &snapshot.chunk_hubs[0];
    let links: Vec<_> = of.links.iter().map(|link| (&*link.operator, link.role)).collect();
    assert_eq!(
        links,
        [("fill", LinkRole::Produces), ("add", LinkRole::Modifies), ("drain", LinkRole::Consumes)],
        "{snapshot}"
    );
    assert_eq!((&*of.name, of.queued, of.capacity, of.envelopes), ("numbers", 0, 4, 2 * envelopes), "{snapshot}");
    assert_eq!((of.produced, of.consumed, snapshot.chunk_hubs.len()), (100, 100, 1));
    drop(watch);
    assert_eq!(report.operator("add").unwrap().runs, 100, "once for each chunk");
    assert_eq!(device.memory_peak(), 16 * envelopes as u64);
    drop((hub, flow));
    freed(device).await;
}

on_both!(h3_one_envelope_a_place_works, async |device: Device| passes(&device, 1).await);
on_both!(h3_two_envelopes_a_place_work, async |device: Device| passes(&device, 2).await);

/// Squares the given number of chunks, and then directs the data to the consumer.
struct Square(u32, ChunkHub<u32>, LinkHandle<wakeline::hub::role::Consume, u32, ()>);

impl Operator for Square {
    type Ports = ChangePorts;

    async fn compute(&mut self, ports: &mut ChangePorts, cx: &mut Cx) -> Result<()> {
        let chunk = ports.numbers.get_mut()?;
        let mut squared = Buffer::<u32>::new(chunk.device(), 1)?;
        square::launch(cx.stream()?, &*chunk, &mut squared, 1)?;
        cx.stream()?.copy(&squared, chunk)?;
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
            ports.numbers.commit()?;
            self.1.flow_to(&[&self.2])?;
        }
        Ok(())
    }
}

on_both!(h4_the_flow_of_data_switches, async |device: Device| {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(5).host_envelopes(5).envelopes(&device, 1);
    let (hub, seen) = (hub.build().unwrap(), shared());
    let mut flow = Flow::new("h4");
    let fill = flow.add("fill", Fill::each(1..=5));
    let drain = flow.add("drain", Drain(seen.clone()));
    let square = flow.add("square", Square(5, hub.clone(), drain.numbers)).on(&device);
    flow.link(fill.numbers, &hub);
    flow.link(square.numbers, &hub);
    flow.link(drain.numbers, &hub);
    hub.flow_to(&[&square.numbers]).unwrap();
    within(flow.run()).await.unwrap();
    assert_eq!(lock(&seen).concat(), [1, 4, 9, 16, 25]);
});

struct Fails;

impl Operator for Fails {
    type Ports = ChangePorts;

    async fn compute(&mut self, ports: &mut ChangePorts, cx: &mut Cx) -> Result<()> {
        increment::launch(cx.stream()?, ports.numbers.get_mut()?)?;
        Err("it fails".into())
    }
}

on_both!(h5_a_run_that_fails_leaves_the_chunk_unchanged, async |device: Device| {
    let hub = hub(&device, 1, 1);
    let mut produce = hub.produce(&host()).unwrap();
    produce.with(async |blank| blank.fill_from(&[1]).await).await.unwrap();
    let mut flow = Flow::new("h5");
    let fails = flow.add("fails", Fails).on(&device);
    flow.link(fails.numbers, &hub);
    let error = within(flow.run()).await.unwrap_err();
    assert_eq!(error.to_string(), "operator `fails`: it fails");
    let seen = hub.peek(&host()).unwrap().next().await.unwrap().unwrap();
    assert_eq!(seen.read().await.unwrap(), [1]);
});

#[tokio::test]
async fn h10_setup_errors_are_reported_before_the_run_all_at_once() {
    let (device, seen) = (emulated(), shared());
    let nowhere = ChunkHub::<u32>::builder("nowhere").elements(1).host_envelopes(1).build().unwrap();
    let empty = ChunkHub::<u32>::builder("empty").elements(1).host_envelopes(1).build().unwrap();
    let mut flow = Flow::new("wrong");
    let fill = flow.add("fill", Fill::each(0..2));
    let add = flow.add("add", AddOne(1)).on(&device);
    let drain = flow.add("drain", Drain(seen.clone()));
    let again = flow.add("again", concurrent(2, Drain(seen.clone())));
    let _alone = flow.add("alone", See(1, seen));
    let round = flow.add("round", Round(1));
    flow.link(round.points, &nowhere);
    flow.link(round.sums, &nowhere);
    flow.link(round.sums, &nowhere);
    flow.link(fill.numbers, &nowhere);
    flow.link(add.numbers, &nowhere);
    flow.link(drain.numbers, &empty);
    flow.link(drain.numbers, &nowhere);
    flow.link(again.numbers, &nowhere);
    let error = flow.run().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setup);
    for part in [
        "port `alone.numbers` is not linked to a hub: `flow.link(alone.numbers, &hub)`",
        "port `drain.numbers` is linked more than once: link it once",
        &format!(
            "port `add.numbers` modifies chunks of hub `nowhere` on {}, where the hub has no envelopes: add some, \
             with `envelopes(&device, 2)` or `add_envelopes`",
            device.name()
        ),
        "no port produces chunks for hub `empty`, so `drain.numbers` would wait forever",
        "`again` has several runs at a time",
        "ports `round.points` and `round.sums` of one operator wait for the same chunk of hub `nowhere`",
    ] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    assert!(!error.to_string().contains("`round.sums` and `round.sums`"), "a double link is reported once: {error}");
}

/// Puts one chunk into a hub in `start`, and then adds to it.
struct Begin(Option<u32>, ChunkHub<u32>, u32);

impl Operator for Begin {
    type Ports = ChangePorts;

    async fn start(&mut self, _cx: &mut Cx) -> Result<()> {
        let Some(number) = self.0 else { return Ok(()) };
        self.1.produce(&host())?.with(async |blank| blank.fill_from(&[number]).await).await?;
        Ok(())
    }

    async fn compute(&mut self, ports: &mut ChangePorts, cx: &mut Cx) -> Result<()> {
        self.2 -= 1;
        if self.2 == 0 {
            cx.finish();
        }
        increment::launch(cx.stream()?, ports.numbers.get_mut()?)
    }
}

on_both!(an_operator_fills_a_hub_in_its_start, async |device: Device| {
    for (number, says) in [(Some(7), true), (None, true), (Some(7), false)] {
        let hub = hub(&device, 1, 1);
        let mut flow = Flow::new("begin");
        let mut begin = flow.add("begin", Begin(number, hub.clone(), 5)).on(&device);
        if says {
            begin = begin.fills(&hub);
        }
        flow.link(begin.numbers, &hub);
        let ran = within(flow.run()).await;
        match (number, says) {
            (Some(_), true) => {
                ran.unwrap();
                let seen = hub.peek(&host()).unwrap().next().await.unwrap().unwrap();
                assert_eq!(seen.read().await.unwrap(), [12]);
            }
            (_, says) => {
                let error = ran.unwrap_err();
                let text = if says {
                    "operator `begin`: invalid use: `start` committed no chunk to hub `numbers`, although the operator declares `.fills(&hub)`"
                } else {
                    "or mark the operator whose `start` fills the hub with `.fills(&hub)`"
                };
                assert!(error.to_string().contains(text), "{error}");
                assert_eq!(error.kind(), if says { ErrorKind::Usage } else { ErrorKind::Setup });
            }
        }
    }
});

/// Independent of the order in which the operators run.
#[tokio::test]
async fn h10_too_few_envelopes_for_chunks_that_stay_fail_every_run() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed);
        let ran = simulation.run(async {
            let device = Device::simulated(&simulation, Emulated::new());
            let mut flow = Flow::new("stays");
            let hub = hub(&device, 4, 1);
            let fill = flow.add("fill", Fill::each(0..2));
            let near = flow.add("near", See(100, shared()));
            let far = flow.add("far", AddOne(100)).on(&device);
            flow.link(fill.numbers, &hub);
            flow.link(near.numbers, &hub);
            flow.link(far.numbers, &hub);
            flow.run().await
        });
        let error = ran.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setup);
        for text in ["operator `fill`", "has 2 envelopes, too few for 2 chunks that stay in it", "it needs 3,"] {
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

#[derive(Ports)]
struct RoundPorts {
    #[peek]
    points: Peek<u32>,
    #[modify]
    sums: Modify<u32>,
}

/// Adds the points to the sums, in the given number of rounds.
struct Round(u32);

#[kernel]
fn add_to(points: &[u32], sums: &mut [u32]) {
    sums.iter_mut().zip(points).for_each(|(sum, point)| *sum += point);
}

impl Operator for Round {
    type Ports = RoundPorts;

    async fn compute(&mut self, ports: &mut RoundPorts, cx: &mut Cx) -> Result<()> {
        self.0 -= 1;
        if self.0 == 0 {
            cx.finish();
        }
        add_to::launch(cx.stream()?, ports.points.get()?, ports.sums.get_mut()?)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn h11_one_hub_is_peeked_at_and_another_modified_round_after_round() {
    let device = emulated();
    let (points, sums) = (hub(&device, 1, 1), hub(&device, 1, 1));
    let log = shared();
    let mut flow = Flow::new("rounds");
    let fill = flow.add("fill", Fill([vec![1, 2, 3]].into()));
    let zero = flow.add("zero", Fill([vec![0, 0, 0]].into()));
    let rounds: Vec<Added<_>> = (0..2).map(|n| flow.add(format!("round {n}"), Round(500)).on(&device)).collect();
    flow.link(fill.numbers, &points);
    flow.link(zero.numbers, &sums);
    for round in &rounds {
        flow.link(round.points, &points);
        flow.link(round.sums, &sums);
    }
    points.log_to(Lines(log.clone()));
    within(flow.run()).await.unwrap();
    let seen = sums.peek(&host()).unwrap().next().await.unwrap().unwrap();
    assert_eq!(seen.read().await.unwrap(), [1000, 2000, 3000]);
    let copies = lock(&log).iter().filter(|line| line.contains("from the host to")).count();
    assert_eq!(copies, 1, "the chunk that is peeked at is copied once");
}

struct Lines(Shared<String>);

impl std::io::Write for Lines {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).push(String::from_utf8_lossy(data).into());
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[derive(Ports)]
struct PassPorts {
    #[consume]
    numbers: Consume<u32>,
    #[output(capacity = 4)]
    out: Output<Envelope<u32>>,
}

struct TakeOut;

impl Operator for TakeOut {
    type Ports = PassPorts;

    async fn compute(&mut self, ports: &mut PassPorts, _cx: &mut Cx) -> Result<()> {
        let envelope = ports.numbers.take()?;
        ports.out.send(envelope).await?;
        Ok(())
    }
}

#[tokio::test]
async fn h15_an_envelope_is_sent_through_a_queue_and_goes_home() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(9).host_envelopes(1).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("h15");
    let fill = flow.add("fill", Fill::each(1..=20));
    let pass = flow.add("pass", TakeOut);
    let kept = seen.clone();
    let read = flow.add(
        "read",
        sink(move |envelope: Envelope<u32>| {
            lock(&kept).push(envelope.as_slice().unwrap()[0]);
            std::future::ready(Ok(()))
        }),
    );
    flow.link(fill.numbers, &hub);
    flow.link(pass.numbers, &hub);
    flow.connect(pass.out, read.input);
    within(flow.run()).await.unwrap();
    assert_eq!(*lock(&seen), (1..=20).collect::<Vec<_>>());
    assert_eq!(hub.envelopes(&host()), 1);
}

#[tokio::test]
async fn h15_starvation_names_both_hubs() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(9).host_envelopes(2).build().unwrap();
    let mut flow = Flow::new("starves");
    let fill = flow.add("fill", Fill::each(1..=20));
    let pass = flow.add("pass", TakeOut);
    // `read` waits for three messages, and the hub has two envelopes.
    let read = flow.add("read", map(async |_: Envelope<u32>| Ok(())));
    let end = flow.add("end", sink(async |(): ()| Ok(())));
    let input = read.input;
    let read = read.when(wakeline::condition::at_least(input, 3));
    flow.link(fill.numbers, &hub);
    flow.link(pass.numbers, &hub);
    flow.connect(pass.out, read.input);
    flow.connect(read.output, end.input);
    let error = within(flow.run()).await.unwrap_err();
    assert!(error.is_stalled(), "{error}");
    let text = "`fill` waits for a blank envelope of hub `numbers` on the host: 2 of the 2 envelopes of hub `numbers` \
                at this location are in use, 2 of them in hub `pass.out -> read.input`";
    assert!(error.to_string().contains(text), "{error}");
}

#[tokio::test]
async fn a_link_outside_keeps_the_flow_until_it_is_dropped() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let seen = shared();
    let mut produce = hub.produce(&host()).unwrap();
    let mut flow = Flow::new("held");
    let drain = flow.add("drain", Drain(seen.clone()));
    flow.link(drain.numbers, &hub);
    let mut running = flow.spawn().unwrap();
    for number in 0..3 {
        until("the operator waits", || running.status()[0].waits_for == ["a chunk of hub `numbers` on the host"]).await;
        assert!((&mut running).now_or_never().is_none());
        produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap();
    }
    drop(produce);
    within(running).await.unwrap();
    assert_eq!(lock(&seen).concat(), [0, 1, 2]);
}

#[tokio::test]
async fn a_consumer_outside_takes_what_a_flow_produces() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    let mut flow = Flow::new("out");
    let fill = flow.add("fill", Fill::each(0..10));
    flow.link(fill.numbers, &hub);
    let running = flow.spawn().unwrap();
    let (mut kept, mut seen) = (Vec::new(), Vec::new());
    while let Some(chunk) = within(consume.next()).await.unwrap() {
        // The envelope is outside the hub, and the flow still accounts for it.
        let envelope = chunk.into_envelope().unwrap();
        seen.extend_from_slice(within(envelope.read()).await.unwrap());
        kept.push(envelope);
        tokio::task::yield_now().await;
        if kept.len() == 2 {
            kept.clear();
        }
    }
    assert_eq!(seen, (0..10).collect::<Vec<_>>());
    drop((consume, kept));
    within(running).await.unwrap();
}

#[tokio::test]
async fn a_flow_that_is_stopped_drains_its_chunks() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(4).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("stopped");
    let fill = flow.add("fill", Fill::each(0..u32::from(u16::MAX)));
    let drain = flow.add("drain", Drain(seen.clone()));
    flow.link(fill.numbers, &hub);
    flow.link(drain.numbers, &hub);
    let running = flow.spawn().unwrap();
    until("some chunks have passed", || lock(&seen).len() > 20).await;
    running.stop();
    let report = within(running).await.unwrap();
    let count = lock(&seen).len() as u64;
    assert_eq!(report.operator("fill").unwrap().messages_out, count, "no chunk is lost");
    assert_eq!((report.hubs[0].passed, report.untaken, hub.len()), (count, 0, 0));
}

#[tokio::test]
async fn when_the_consumer_ends_the_other_links_end() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(4).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("ends");
    let fill = flow.add("fill", Fill::each(0..1000));
    let see = flow.add("see", See(1000, seen.clone()));
    let first = flow.add("first", First);
    flow.link(fill.numbers, &hub);
    flow.link(see.numbers, &hub);
    flow.link(first.numbers, &hub);
    let report = within(flow.run()).await.unwrap();
    assert_eq!(report.operator("first").unwrap().runs, 1);
    assert_eq!(report.hubs[0].passed, 1);
    assert_eq!(report.untaken, hub.len() as u64);
}

struct First;

impl Operator for First {
    type Ports = DrainPorts;

    async fn compute(&mut self, _ports: &mut DrainPorts, cx: &mut Cx) -> Result<()> {
        cx.finish();
        Ok(())
    }
}

#[derive(Ports)]
struct MaybePorts {
    #[input]
    ticks: Input<u32>,
    #[consume(optional)]
    numbers: Consume<u32>,
}

struct Maybe(Shared<Option<u32>>);

impl Operator for Maybe {
    type Ports = MaybePorts;

    async fn compute(&mut self, ports: &mut MaybePorts, _cx: &mut Cx) -> Result<()> {
        ports.ticks.take()?;
        let number = match ports.numbers.has_chunk() {
            true => Some(ports.numbers.get()?.read().await?[0]),
            false => None,
        };
        assert_eq!(number.is_none(), ports.numbers.get().is_err());
        lock(&self.0).push(number);
        Ok(())
    }
}

#[tokio::test]
async fn an_optional_link_is_not_waited_for() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).host_envelopes(1).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let seen = shared();
    let mut flow = Flow::new("optional");
    let maybe = flow.add("maybe", Maybe(seen.clone()));
    flow.link(maybe.numbers, &hub);
    let ticks = flow.ingress("ticks", maybe.ticks);
    let running = flow.spawn().unwrap();
    ticks.send(0).await.unwrap();
    until("the operator has run", || lock(&seen).len() == 1).await;
    produce.with(async |blank| blank.fill_from(&[7]).await).await.unwrap();
    ticks.send(1).await.unwrap();
    drop((ticks, produce));
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [None, Some(7)]);
}

#[derive(Ports)]
struct LookPorts {
    #[peek]
    numbers: Peek<u32>,
}

/// Adds to the hub the envelope that its first run lacks.
struct AddsWhatItLacks(ChunkHub<u32>, Shared<Option<ErrorKind>>);

impl Operator for AddsWhatItLacks {
    type Ports = LookPorts;

    async fn compute(&mut self, ports: &mut LookPorts, cx: &mut Cx) -> Result<()> {
        let runs = {
            let mut seen = lock(&self.1);
            seen.push(ports.numbers.get().err().map(|error| error.kind()));
            seen.len()
        };
        if runs == 1 {
            self.0.add_envelopes(&host(), 1)?;
        }
        if runs == 3 {
            cx.finish();
        }
        Ok(())
    }
}

/// A port's error belongs to one run: the next run has a chunk once the cause is removed.
#[tokio::test]
async fn a_port_recovers_once_the_cause_of_its_error_is_removed() {
    let device = emulated();
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).envelopes(&device, 1).build().unwrap();
    // While this link exists, an envelope could reach the host, so the flow may begin.
    let on_host = hub.produce(&host()).unwrap();
    let mut on_device = hub.produce(&device).unwrap();
    let stream = Stream::new(&device).unwrap();
    on_device.with(async |blank| blank.set_len(1).and_then(|()| stream.fill(blank, 7))).await.unwrap();
    let seen = shared();
    let mut flow = Flow::new("late");
    let look = flow.add("look", AddsWhatItLacks(hub.clone(), seen.clone()));
    flow.link(look.numbers, &hub);
    let mut running = flow.spawn().unwrap();
    drop(on_host);
    within(&mut running).await.unwrap();
    assert_eq!(*lock(&seen), [Some(ErrorKind::Setup), None, None]);
}

#[tokio::test]
async fn h6_an_operator_sends_buffers_of_its_own() {
    #[derive(Ports)]
    struct MinePorts {
        #[produce(optional)]
        files: Produce<u32, &'static str>,
    }
    struct Mine(u32);
    impl Operator for Mine {
        type Ports = MinePorts;

        async fn compute(&mut self, ports: &mut MinePorts, cx: &mut Cx) -> Result<()> {
            self.0 += 1;
            if self.0 == 5 {
                cx.finish();
            }
            let mut mine = Buffer::<u32>::pinned(&Device::host(), 1)?;
            mine.as_mut_slice()?[0] = self.0;
            Ok(ports.files.send(mine, "mine").await?)
        }
    }
    let hub = ChunkHub::<u32, &'static str>::builder("files").elements(1).queue(2).build().unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    let mut flow = Flow::new("mine");
    let mine = flow.add("mine", Mine(0));
    flow.link(mine.files, &hub);
    let running = flow.spawn().unwrap();
    let mut seen = Vec::new();
    while let Some(chunk) = within(consume.next()).await.unwrap() {
        seen.push((chunk.read().await.unwrap()[0], *chunk.structure().unwrap()));
        chunk.commit().unwrap();
    }
    within(running).await.unwrap();
    assert_eq!(seen, [1, 2, 3, 4, 5].map(|number| (number, "mine")));
}

/// The second run of the flow has new links to the same hub.
#[tokio::test]
async fn a_flow_with_links_runs_again() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("twice");
    let fill = flow.add("fill", Fill::each(1..=4));
    let drain = flow.add("drain", Drain(seen.clone())).on_own_thread();
    flow.link(fill.numbers, &hub);
    flow.link(drain.numbers, &hub);
    assert_eq!(within(flow.run()).await.unwrap().hubs[0].passed, 4);
    // `fill` has no data left and produces an empty chunk.
    assert_eq!(within(flow.run()).await.unwrap().hubs[0].passed, 1);
    assert_eq!(lock(&seen).concat(), [1, 2, 3, 4]);
}

/// Takes chunks in pairs.
struct Pairs(ChunkHub<u32>, Shared<u32>);

impl Operator for Pairs {
    type Ports = DrainPorts;

    fn may_run(&mut self, _ports: &DrainPorts, _cx: &Cx) -> bool {
        lock(&self.1).len() % 2 == 1 || self.0.len() >= 2
    }

    async fn compute(&mut self, ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.numbers.get()?.read().await?[0];
        lock(&self.1).push(number);
        Ok(())
    }
}

#[tokio::test]
async fn may_run_is_called_again_when_the_hub_changes() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(3).host_envelopes(3).build().unwrap();
    let seen = shared();
    let mut flow = Flow::new("pairs");
    let pairs = flow.add("pairs", Pairs(hub.clone(), seen.clone()));
    flow.link(pairs.numbers, &hub);
    let mut produce = hub.produce(&host()).unwrap();
    let running = flow.spawn().unwrap();
    for number in 0..4 {
        produce.with(async |blank| blank.fill_from(&[number]).await).await.unwrap();
        let wanted = (number as usize).next_multiple_of(2);
        until("pairs are taken", || lock(&seen).len() == wanted).await;
    }
    drop(produce);
    within(running).await.unwrap();
    assert_eq!(*lock(&seen), [0, 1, 2, 3]);
}

/// The hub itself makes the copies, between the steps.
#[tokio::test]
async fn a_flow_with_links_is_stepped_through() {
    let (device, seen) = (emulated(), shared());
    let hub = hub(&device, 2, 1);
    let mut flow = Flow::new("steps");
    let fill = flow.add("fill", Fill::each(1..=2));
    let add = flow.add("add", AddOne(u32::MAX)).on(&device);
    let drain = flow.add("drain", Drain(seen.clone()));
    flow.link(fill.numbers, &hub);
    flow.link(add.numbers, &hub);
    flow.link(drain.numbers, &hub);
    let (mut steps, mut seen_steps) = (flow.steps().unwrap(), Vec::new());
    while let Some(step) = within(steps.next()).await {
        seen_steps.push(step.to_string());
    }
    let wanted = [
        "fill: run 1",
        "add: run 1",
        "drain: run 1",
        "fill: run 2",
        "fill: ended",
        "add: run 2",
        "drain: run 2",
        "add: ended",
        "drain: ended",
    ];
    assert_eq!(seen_steps, wanted);
    assert_eq!(lock(&seen).concat(), [2, 3]);
    within(steps.run_on()).await.unwrap();
}

/// Returns an envelope that was taken out by hand by a link that no longer exists.
async fn taken_out(hub: &ChunkHub<u32>) -> Envelope<u32> {
    let (mut produce, mut consume) = (hub.produce(&host()).unwrap(), hub.consume(&host()).unwrap());
    produce.with(async |blank| blank.fill_from(&[7]).await).await.unwrap();
    within(consume.next()).await.unwrap().unwrap().into_envelope().unwrap()
}

#[tokio::test]
async fn an_envelope_that_was_taken_out_before_a_flow_begins_is_waited_for() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).host_envelopes(1).build().unwrap();
    for _ in 0..2 {
        let taken = taken_out(&hub).await;
        let seen = shared();
        let mut flow = Flow::new("later");
        let (fill, drain) = (flow.add("fill", Fill::each(0..3)), flow.add("drain", Drain(seen.clone())));
        flow.link(fill.numbers, &hub);
        flow.link(drain.numbers, &hub);
        let mut running = flow.spawn().unwrap();
        until("the operator waits for the envelope", || !running.status()[0].waits_for.is_empty()).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
            assert!((&mut running).now_or_never().is_none(), "the flow waits for the envelope's return");
        }
        drop(taken);
        within(running).await.unwrap();
        assert_eq!(lock(&seen).concat(), [0, 1, 2]);
    }
}

/// A paused flow gives up its position at a hub that it shares.
#[tokio::test]
async fn h12_a_paused_flow_keeps_no_chunk_from_another_one() {
    let hub = ChunkHub::<u32>::builder("food").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&Device::host()).unwrap();
    let eater = |name: &str| {
        let mut flow = Flow::new(name);
        let seen = shared();
        let eat = flow.add("eat", Eats(seen.clone()));
        flow.link(eat.food, &hub);
        (flow.spawn().unwrap(), seen)
    };
    let (paused, seen_by_paused) = eater("paused");
    until("the operator waits", || paused.status().iter().all(|eat| eat.status == wakeline::condition::Status::Wait))
        .await;
    paused.pause();
    let (runs, seen) = eater("runs");
    for number in 0..6 {
        within(produce.with(async |blank| blank.fill_from(&[number]).await)).await.unwrap();
    }
    until("the other flow has all chunks", || lock(&seen).len() == 6).await;
    assert_eq!(lock(&seen_by_paused).len(), 0);
    paused.resume();
    drop(runs);
    within(produce.with(async |blank| blank.fill_from(&[7]).await)).await.unwrap();
    until("the flow continues", || lock(&seen_by_paused).len() == 1).await;
}

#[derive(Ports)]
struct EatPorts {
    #[consume]
    food: Consume<u32>,
}

struct Eats(Shared<()>);

impl Operator for Eats {
    type Ports = EatPorts;

    async fn compute(&mut self, ports: &mut EatPorts, _: &mut Cx) -> Result<()> {
        ports.food.get()?;
        lock(&self.0).push(());
        Ok(())
    }
}

#[derive(Ports)]
struct MovePorts {
    #[consume]
    from: Consume<u32>,
    #[produce]
    to: Produce<u32>,
}

struct Move;

impl Operator for Move {
    type Ports = MovePorts;

    async fn compute(&mut self, ports: &mut MovePorts, _cx: &mut Cx) -> Result<()> {
        ports.from.get()?;
        ports.to.get_mut()?.set_len(1)
    }
}

/// One of two consumers is blocked by something else, at the same place as the other one or elsewhere. The other one
/// gets all chunks, and the flow ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_is_blocked_by_something_else_blocks_no_other_one() {
    for on_device in [false, true] {
        for held_by in ["a gate", "a full hub"] {
            let device = emulated();
            let hub = |name: &str, queue| {
                let builder = ChunkHub::<u32>::builder(name).elements(1).queue(queue);
                builder.envelopes(&device, 4).host_envelopes(4).build().unwrap()
            };
            let (numbers, full, seen) = (hub("numbers", 2), hub("full", 1), shared());
            let mut flow = Flow::new("held");
            let gate = condition::Gate::paused();
            let fill = flow.add("fill", Fill::each(1..=20));
            let drains = flow.add("drains", Drain(seen.clone()));
            match held_by {
                "a gate" => {
                    let held = flow.add("held", Drain(shared())).when(gate.clone());
                    let held = if on_device { held.on(&device) } else { held };
                    flow.link(held.numbers, &numbers);
                }
                _ => {
                    let held = flow.add("held", Move);
                    let held = if on_device { held.on(&device) } else { held };
                    flow.link(held.from, &numbers);
                    flow.link(held.to, &full);
                }
            }
            flow.link(fill.numbers, &numbers);
            flow.link(drains.numbers, &numbers);
            let outcome = within(flow.run()).await;
            outcome.unwrap_or_else(|error| panic!("on a device {on_device}, held by {held_by}: {error}"));
            assert!(numbers.is_empty());
        }
    }
}

/// An operator that never runs again, but continues with other work, keeps no chunk from others.
#[tokio::test]
async fn a_link_of_an_operator_that_never_runs_again_blocks_no_other_one() {
    let hub = ChunkHub::<u32>::builder("numbers").elements(1).queue(2).host_envelopes(2).build().unwrap();
    let mut produce = hub.produce(&host()).unwrap();
    let (never, goes_on) = tokio::sync::oneshot::channel();
    let (ends, end) = tokio::sync::oneshot::channel::<()>();
    let (mut never, mut end) = (Some(never), Some(end));
    let gate = condition::Gate::open();
    let mut flow = Flow::new("ends");
    let last = flow.add(
        "last",
        common::task(move |ports: &mut DrainPorts, cx| {
            let (never, end) = (never.take().unwrap(), end.take().unwrap());
            async move {
                assert!(!cx.ready(ports).await);
                never.send(()).unwrap();
                end.await.unwrap();
                Ok(())
            }
            .boxed()
        }),
    );
    flow.link(last.when(gate.clone()).numbers, &hub);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    until("the operator waits for a chunk", || !handle.status()[0].waits_for.is_empty()).await;
    gate.end();
    within(goes_on).await.unwrap();
    let mut consume = hub.consume(&host()).unwrap();
    produce.with(async |blank| blank.fill_from(&[7]).await).await.unwrap().unwrap();
    within(consume.next()).await.unwrap().unwrap().commit().unwrap();
    ends.send(()).unwrap();
    drop((produce, consume));
    within(running).await.unwrap();
}

/// A link that sees a copy and does not take it leaves the envelope to a producer that has waited longer.
#[tokio::test]
async fn a_copy_that_was_seen_and_not_taken_makes_room_for_a_producer() {
    let device = emulated();
    let builder = ChunkHub::<u32>::builder("numbers").elements(1).queue(3);
    let hub = builder.host_envelopes(2).envelopes(&device, 1).build().unwrap();
    let (mut on_host, mut on_device) = (hub.produce(&host()).unwrap(), hub.produce(&device).unwrap());
    let gate = condition::Gate::paused();
    let mut flow = Flow::new("looks");
    let sees = flow.add("sees", See(1, shared())).on(&device).when(gate.clone());
    flow.link(sees.numbers, &hub);
    let running = flow.spawn().unwrap();
    let handle = running.handle();
    until("the operator waits for a chunk", || !handle.status()[0].waits_for.is_empty()).await;
    // The chunk is copied to the device, and the operator is not polled before this task waits.
    on_host.with(async |blank| blank.fill_from(&[7]).await).await.unwrap().unwrap();
    assert!(within(on_device.next()).await.unwrap().is_some());
    running.abort();
    drop(gate);
    let _ = within(running).await;
}

#[derive(Ports)]
struct AgainPorts {
    #[input]
    again: Input<u32>,
    #[produce]
    numbers: Produce<u32>,
}

struct Again;

impl Operator for Again {
    type Ports = AgainPorts;

    async fn compute(&mut self, ports: &mut AgainPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.again.take()?;
        ports.numbers.get_mut()?.fill_from(&[number]).await
    }
}

#[derive(Ports)]
struct MarkPorts {
    #[input]
    again: Input<u32>,
    #[modify]
    numbers: Modify<u32>,
}

struct Mark;

impl Operator for Mark {
    type Ports = MarkPorts;

    async fn compute(&mut self, ports: &mut MarkPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.again.take()?;
        ports.numbers.get_mut()?.fill_from(&[number]).await
    }
}

#[derive(Ports)]
struct TellPorts {
    #[consume]
    numbers: Consume<u32>,
    #[output]
    seen: Output<u32>,
}

struct Tell;

impl Operator for Tell {
    type Ports = TellPorts;

    async fn compute(&mut self, ports: &mut TellPorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.numbers.get()?.read().await?[0];
        ports.seen.send(number).await?;
        Ok(())
    }
}

/// A cycle may go through a hub of chunks: from a producer to a consumer, or from a link that modifies to a later one.
#[tokio::test]
async fn q8_the_check_lists_cycles_through_hubs_of_chunks() {
    let of_host = |queue| ChunkHub::builder("numbers").elements(4).queue(queue).host_envelopes(2).build().unwrap();
    let never = "each waits for a message of the cycle: it begins only if one sends first, in a `run` of its own";
    let fed = "fed by `numbers` with any number: it stalls once they are full";
    // Without links by hand, two envelopes bound the chunks in the queue of five. A link by hand may send envelopes of
    // its own.
    for (by_hand, holds, rest) in [(false, 3, format!("nothing outside feeds it; {never}")), (true, 6, fed.into())] {
        let hub = of_host(5);
        let producer = by_hand.then(|| hub.produce(&host()).unwrap());
        let mut flow = Flow::new("q8");
        let again = flow.add("again", Again);
        let tell = flow.add("tell", Tell);
        flow.link(again.numbers, &hub);
        flow.link(tell.numbers, &hub);
        flow.connect(tell.seen, again.again);
        let text = flow.check().unwrap().to_string();
        assert_eq!(text, format!("`again`, `tell` form a cycle, whose hubs hold {holds} together; {rest}"));
        drop(producer);
        if !by_hand {
            let error = within(flow.run()).await.unwrap_err();
            let text = error.to_string();
            assert!(
                error.is_stalled()
                    && text.contains("`again`, `tell` form a cycle in which each waits for another's first message"),
                "{text}"
            );
        }
    }

    let hub = of_host(1);
    let mut flow = Flow::new("q8");
    let fill = flow.add("fill", Fill::each(0..3));
    let mark = flow.add("mark", Mark);
    let tell = flow.add("tell", Tell);
    flow.link(fill.numbers, &hub);
    flow.link(mark.numbers, &hub);
    flow.link(tell.numbers, &hub);
    flow.connect(tell.seen, mark.again);
    let text = flow.check().unwrap().to_string();
    assert_eq!(text, format!("`mark`, `tell` form a cycle, whose hubs hold 2 together; {fed}; {never}"));

    // Links that modify chunks that stay form no cycle.
    let mut flow = Flow::new("q8");
    let hub = of_host(1);
    let (fill, one, two) = (flow.add("fill", Fill::each(0..1)), flow.add("one", AddOne(1)), flow.add("two", AddOne(1)));
    flow.link(fill.numbers, &hub);
    flow.link(one.numbers, &hub);
    flow.link(two.numbers, &hub);
    assert!(flow.check().unwrap().cycles.is_empty());
}
