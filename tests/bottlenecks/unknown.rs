//! Issue 20: bottlenecks that were planted without knowing the rule that names them. Each case has a flow, and the
//! operators (or hubs) and reasons that an engineer would accept as the answer; both were fixed before the first run.
//!
//! `WAKELINE_CASES=loop,copy` runs only these cases.

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{MapPorts, SinkPorts, SourcePorts, map, sink, source};
use tokio::time::sleep;
use wakeline::{
    Inputs, Running, Service, StreamPool,
    condition::{every, memory},
    memory::Allocator,
    observe::{Bottleneck, Observe, Reason},
    prelude::*,
};

use crate::ALONE;

/// How much of each flow is observed.
const WINDOW: Duration = Duration::from_millis(1500);

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Computes on the host for so long.
fn compute_for(time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn numbers() -> impl Operator<Ports = SourcePorts<u32>> {
    source(async || Ok(Some(1_u32)))
}

fn ignore() -> impl Operator<Ports = SinkPorts<u32>> {
    sink(async |_: u32| Ok(()))
}

fn pass() -> impl Operator<Ports = MapPorts<u32, u32>> {
    map(async |n: u32| Ok(n))
}

/// Passes numbers on after so much computation.
fn computes(time: Duration) -> impl Operator<Ports = MapPorts<u32, u32>> {
    map(move |n: u32| async move {
        compute_for(time);
        Ok(n)
    })
}

/// A flow that runs. Dropping it ends what runs beside it.
struct Case {
    running: Running,
    beside: Vec<tokio::task::JoinHandle<()>>,
}

impl Case {
    fn new(flow: Flow) -> Self {
        Self { running: flow.spawn().unwrap(), beside: Vec::new() }
    }
}

struct Planted {
    name: &'static str,
    make: fn(&mut Flow) -> Vec<Beside>,
    /// The names of operators or hubs, of which any will do; likewise the reasons.
    at: &'static [&'static str],
    reasons: &'static [Reason],
}

/// What runs outside of the flow.
type Beside = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

const PLANTED: [Planted; 10] = [
    // `track` keeps its own thread busy for all of the time; `join` and `show` wait for it, and `camera` for `join`.
    Planted { name: "join", make: join, at: &["track"], reasons: &[Reason::Host] },
    // Copies to the device follow each other on one stream: more envelopes would not help, and no host code is slow. The
    // name of each end of the copy, or of the hub that copies, points there.
    Planted {
        name: "copy",
        make: copy,
        at: &["load", "load.output -> scale.input", "scale"],
        reasons: &[Reason::Device],
    },
    // The graph is one for the whole section: any of its operators, or the section.
    Planted { name: "graph", make: graph, at: &["one", "two", "three", "net"], reasons: &[Reason::Device] },
    // Of three kernels on one stream only that of `middle` is slow.
    Planted { name: "stream", make: stream, at: &["middle"], reasons: &[Reason::Device] },
    // `pace` runs every 10 ms, by its own condition, with its input's queue full.
    Planted { name: "pace", make: pace, at: &["pace"], reasons: &[Reason::Time] },
    // One message goes around: no queue is ever full, and 80 % of each round is `act`'s computation.
    Planted { name: "loop", make: loop_of_one, at: &["act"], reasons: &[Reason::Host] },
    // Four callers, and a batch of eight: each batch waits until its time is over. The callers wait for answers.
    Planted { name: "batch", make: batch, at: &["pack"], reasons: &[Reason::Time, Reason::Condition] },
    // `pose` is never made to wait by a latest-value hub, and waits for its next period; `render` computes without pause.
    Planted { name: "latest", make: latest, at: &["render"], reasons: &[Reason::Host] },
    // `lookup` awaits a remote answer in each of its runs, while eight callers wait.
    Planted { name: "remote", make: remote, at: &["lookup"], reasons: &[Reason::Future] },
    // One message in 8 ms from outside, for operators that need microseconds. The ingress, or the hub behind it.
    Planted { name: "ingress", make: ingress, at: &["lines", "lines -> parse.input"], reasons: &[Reason::Outside] },
];

/// Made after the rule was changed for what the first ten showed, and before they ran for the first time.
const FURTHER: [Planted; 5] = [
    // The task outside takes a result in 8 ms; `work` needs microseconds. The egress, or the hub before it.
    Planted { name: "egress", make: egress, at: &["results", "work.output -> results"], reasons: &[Reason::Outside] },
    // `stage` waits for memory nearly always, but only because `consume` keeps it while it computes: more memory would lie
    // in the queue.
    Planted { name: "memory", make: memory_of_messages, at: &["consume"], reasons: &[Reason::Host] },
    // Every second message goes to `slow`; `route` and `quick` wait for it.
    Planted { name: "router", make: router, at: &["slow"], reasons: &[Reason::Host] },
    // The kernel on the second device takes 6 ms, those on the first before and behind it 1 ms.
    Planted { name: "devices", make: two_devices, at: &["middle"], reasons: &[Reason::Device] },
    // 16 messages take the source some 60 ms and the store, with its flush, 90 ms; the queue has room for two flushes.
    Planted { name: "flush", make: flush, at: &["store"], reasons: &[Reason::Host] },
];

/// Made after the rule was changed for the others. The rule was changed with flows like `workers` and `bystanders` in mind.
const LAST: [Planted; 5] = [
    // Chunks instead of queues: `fill` waits for a blank one, `drain` for one that `solve` has computed.
    Planted { name: "chunks", make: chunks, at: &["solve"], reasons: &[Reason::Host] },
    // The queue drops: the source has its own period and is never made to wait, `detect` awaits its kernel without pause.
    Planted { name: "dropping", make: dropping, at: &["detect"], reasons: &[Reason::Device] },
    // Ten chains that compute, and four workers. Any operator will do.
    Planted {
        name: "workers",
        make: few_workers,
        at: &["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"],
        reasons: &[Reason::Workers],
    },
    // The device work of `infer` is what each of the requests in turn waits for; only two are admitted at once.
    Planted { name: "limit", make: limit, at: &["infer"], reasons: &[Reason::Device] },
    // The camera's own wait of 16 ms limits the flow: not the report once in 400 ms, nor the commands that never come.
    Planted { name: "bystanders", make: bystanders, at: &["camera"], reasons: &[Reason::Future] },
];

#[derive(Ports)]
struct JoinPorts {
    #[input]
    frames: Input<u32>,
    #[input]
    tracks: Input<u32>,
    #[output]
    output: Output<u32>,
}

struct Join;

impl Operator for Join {
    type Ports = JoinPorts;

    async fn compute(&mut self, ports: &mut JoinPorts, _cx: &mut Cx) -> Result<()> {
        let sum = ports.frames.take()? + ports.tracks.take()?;
        Ok(ports.output.send(sum).await?)
    }
}

/// A fast branch with a deep queue, and one with a blocking library on a thread of its own.
fn join(flow: &mut Flow) -> Vec<Beside> {
    let camera = flow.add("camera", numbers());
    let radar = flow.add("radar", numbers());
    let track = flow.add(
        "track",
        map(async |n: u32| {
            thread::sleep(ms(6));
            Ok(n)
        }),
    );
    let join = flow.add("join", Join);
    let show = flow.add("show", ignore());
    flow.connect_with(camera.output, join.frames, HubOptions::bounded(64));
    flow.connect(radar.output, track.input);
    flow.connect(track.output, join.tracks);
    flow.connect(join.output, show.input);
    track.on_own_thread();
    Vec::new()
}

#[kernel]
fn light(values: &mut [u32]) {
    values[0] += 1;
}

#[kernel]
fn heavy(values: &mut [u32]) {
    values[0] += 1;
}

/// Fills envelopes on the host.
struct Load;

impl Operator for Load {
    type Ports = SourcePorts<Envelope<u32>>;

    async fn compute(&mut self, ports: &mut Self::Ports, _cx: &mut Cx) -> Result<()> {
        let mut envelope = ports.output.blank().await?;
        envelope.fill_from(&[1; 8]).await?;
        Ok(ports.output.send(envelope).await?)
    }
}

fn loaded() -> HubOptions {
    HubOptions::bounded(2).envelope_bytes(32)
}

fn lights() -> impl Operator<Ports = MapPorts<Envelope<u32>, Envelope<u32>>> {
    map_with(async |mut envelope: Envelope<u32>, cx: &mut Cx| {
        light::launch(cx.stream()?, &mut envelope)?;
        Ok(envelope)
    })
}

fn read() -> impl Operator<Ports = SinkPorts<Envelope<u32>>> {
    sink(async |envelope: Envelope<u32>| {
        envelope.read().await?;
        Ok(())
    })
}

/// A copy takes 6 ms, the kernel nothing. What comes out stays on the device.
fn copy(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new().copy_time(ms(6)));
    let load = flow.add("load", Load);
    let scale = flow.add("scale", lights()).on(&device);
    let keep = flow.add("keep", sink(async |_: Envelope<u32>| Ok(()))).on(&device);
    flow.connect_with(load.output, scale.input, loaded());
    flow.connect(scale.output, keep.input);
    Vec::new()
}

/// A replayed section whose graph takes 6 ms.
fn graph(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new().graph_time(ms(6)));
    let load = flow.add("load", Load);
    let [one, two, three] = ["one", "two", "three"].map(|name| flow.add(name, lights()).on(&device));
    let read = flow.add("read", read());
    flow.connect_with(load.output, one.input, loaded());
    flow.connect(one.output, two.input);
    flow.connect(two.output, three.input);
    flow.connect(three.output, read.input);
    flow.replay("net", (&one, &two, &three));
    Vec::new()
}

/// Three kernels in a row, of operators that share one stream.
fn stream(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new().kernel_time("heavy", ms(6)));
    let one = StreamPool::builder(&device).maximum(1).build().unwrap();
    let load = flow.add("load", Load);
    let first = flow.add("first", lights()).on(&device).streams(&one);
    let middle = map_with(async |mut envelope: Envelope<u32>, cx: &mut Cx| {
        heavy::launch(cx.stream()?, &mut envelope)?;
        Ok(envelope)
    });
    let middle = flow.add("middle", middle).on(&device).streams(&one);
    let last = flow.add("last", lights()).on(&device).streams(&one);
    let read = flow.add("read", read());
    flow.connect_with(load.output, first.input, loaded());
    flow.connect(first.output, middle.input);
    flow.connect(middle.output, last.input);
    flow.connect(last.output, read.input);
    Vec::new()
}

/// A periodic operator behind fast ones.
fn pace(flow: &mut Flow) -> Vec<Beside> {
    let capture = flow.add("capture", numbers());
    let decode = flow.add("decode", pass());
    let pace = flow.add("pace", pass()).when(every(ms(10)));
    let show = flow.add("show", ignore());
    flow.connect(capture.output, decode.input);
    flow.connect_with(decode.output, pace.input, HubOptions::bounded(8));
    flow.connect(pace.output, show.input);
    Vec::new()
}

#[derive(Ports)]
struct PlanPorts {
    #[input(at_least = 1)]
    states: Inputs<u32>,
    #[output]
    output: Output<u32>,
}

struct Plan;

impl Operator for Plan {
    type Ports = PlanPorts;

    async fn compute(&mut self, ports: &mut PlanPorts, _cx: &mut Cx) -> Result<()> {
        let Some((_, state)) = ports.states.try_take_any()? else { return Ok(()) };
        compute_for(ms(1));
        Ok(ports.output.send(state).await?)
    }
}

/// A loop in which one message goes around.
fn loop_of_one(flow: &mut Flow) -> Vec<Beside> {
    let mut first = Some(1);
    let begin = flow.add("begin", source(move || std::future::ready(Ok(first.take()))));
    let plan = flow.add("plan", Plan);
    let act = flow.add("act", computes(ms(4)));
    flow.connect(begin.output, plan.states);
    flow.connect(plan.output, act.input);
    flow.connect_with(act.output, plan.states, HubOptions::bounded(4));
    Vec::new()
}

#[derive(Ports)]
struct PackPorts {
    #[input(batch = 8, within = "20ms")]
    requests: Input<u32>,
    #[output]
    answers: Output<u32>,
}

struct Pack;

impl Operator for Pack {
    type Ports = PackPorts;

    async fn compute(&mut self, ports: &mut PackPorts, cx: &mut Cx) -> Result<()> {
        let numbers = ports.requests.take_batch()?.collect::<Vec<_>>();
        for (number, reply) in numbers.into_iter().zip(cx.take_replies()) {
            ports.answers.send_for(reply, number).await?;
        }
        Ok(())
    }
}

/// Callers that ask again as soon as they have an answer.
fn callers(service: Service<u32, u32>, count: usize) -> Vec<Beside> {
    let caller = |_| -> Beside {
        let service = service.clone();
        Box::pin(async move { while service.ask(1).await.is_ok() {} })
    };
    (0..count).map(caller).collect()
}

/// A batch that is larger than the number of callers.
fn batch(flow: &mut Flow) -> Vec<Beside> {
    let pack = flow.add("pack", Pack);
    let pass = flow.add("pass", pass());
    flow.connect(pack.answers, pass.input);
    let service = flow.service_with("squares", pack.requests, pass.output, HubOptions::bounded(64));
    callers(service, 4)
}

/// A reader of a latest value that is slower than its writer.
fn latest(flow: &mut Flow) -> Vec<Beside> {
    let pose = flow.add("pose", numbers()).when(every(ms(2)));
    let render = flow.add("render", computes(ms(8)));
    let show = flow.add("show", ignore());
    flow.connect_with(pose.output, render.input, HubOptions::latest());
    flow.connect(render.output, show.input);
    Vec::new()
}

/// A service with an operator that asks another one.
fn remote(flow: &mut Flow) -> Vec<Beside> {
    let parse = flow.add("parse", pass());
    let lookup = flow.add(
        "lookup",
        map(async |n: u32| {
            sleep(ms(5)).await;
            Ok(n)
        }),
    );
    let encode = flow.add("encode", pass());
    flow.connect(parse.output, lookup.input);
    flow.connect(lookup.output, encode.input);
    let service = flow.service_with("ask", parse.input, encode.output, HubOptions::bounded(16));
    callers(service, 8)
}

/// A slow sender.
fn ingress(flow: &mut Flow) -> Vec<Beside> {
    let parse = flow.add("parse", computes(Duration::from_micros(50)));
    let store = flow.add("store", ignore());
    flow.connect(parse.output, store.input);
    let lines = flow.ingress_with("lines", parse.input, HubOptions::bounded(16));
    vec![Box::pin(async move {
        while lines.send(1).await.is_ok() {
            sleep(ms(8)).await;
        }
    })]
}

/// A task outside is slow to take what comes out.
fn egress(flow: &mut Flow) -> Vec<Beside> {
    let read = flow.add("read", numbers());
    let work = flow.add("work", pass());
    flow.connect(read.output, work.input);
    let mut results = flow.egress("results", work.output);
    vec![Box::pin(async move {
        while results.recv().await.is_some() {
            sleep(ms(8)).await;
        }
    })]
}

/// Messages that carry memory of a small pool.
fn memory_of_messages(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new());
    let blocks = Allocator::blocks(&device, 1 << 10, 2).unwrap();
    let read = flow.add("read", numbers());
    let stage = map_with(async |_: u32, cx: &mut Cx| Ok(Host(cx.alloc::<u8>(1 << 10)?)));
    let stage = flow.add("stage", stage).on(&device).allocator(&blocks).when(memory(&blocks, 1 << 10));
    let consume = flow.add(
        "consume",
        sink(async |kept: Host<Buffer<u8>>| {
            compute_for(ms(5));
            drop(kept);
            Ok(())
        }),
    );
    flow.connect(read.output, stage.input);
    flow.connect_with(stage.output, consume.input, HubOptions::bounded(4));
    Vec::new()
}

#[derive(Ports)]
struct RoutePorts {
    #[input]
    input: Input<u32>,
    #[output]
    even: Output<u32>,
    #[output]
    odd: Output<u32>,
}

struct Route(u64);

impl Operator for Route {
    type Ports = RoutePorts;

    async fn compute(&mut self, ports: &mut RoutePorts, _cx: &mut Cx) -> Result<()> {
        self.0 += 1;
        let number = ports.input.take()?;
        let to = if self.0.is_multiple_of(2) { &mut ports.even } else { &mut ports.odd };
        Ok(to.send(number).await?)
    }
}

/// One of two targets is slow.
fn router(flow: &mut Flow) -> Vec<Beside> {
    let read = flow.add("read", numbers());
    let route = flow.add("route", Route(0));
    let quick = flow.add("quick", ignore());
    let slow = flow.add(
        "slow",
        sink(async |_: u32| {
            compute_for(ms(6));
            Ok(())
        }),
    );
    flow.connect(read.output, route.input);
    flow.connect_with(route.even, quick.input, HubOptions::bounded(4));
    flow.connect_with(route.odd, slow.input, HubOptions::bounded(4));
    Vec::new()
}

/// A chain over two devices.
fn two_devices(flow: &mut Flow) -> Vec<Beside> {
    let times = || Emulated::new().kernel_time("heavy", ms(6)).kernel_time("light", ms(1));
    let [one, two] = [(); 2].map(|()| Device::emulated(times()));
    let load = flow.add("load", Load);
    let first = flow.add("first", lights()).on(&one);
    let middle = map_with(async |mut envelope: Envelope<u32>, cx: &mut Cx| {
        heavy::launch(cx.stream()?, &mut envelope)?;
        Ok(envelope)
    });
    let middle = flow.add("middle", middle).on(&two);
    let last = flow.add("last", lights()).on(&one);
    let read = flow.add("read", read());
    flow.connect_with(load.output, first.input, loaded());
    flow.connect(first.output, middle.input);
    flow.connect(middle.output, last.input);
    flow.connect(last.output, read.input);
    Vec::new()
}

/// A sink that is quick, except for every sixteenth message.
fn flush(flow: &mut Flow) -> Vec<Beside> {
    let poll = flow.add(
        "poll",
        source(async || {
            sleep(ms(3)).await;
            Ok(Some(1))
        }),
    );
    let parse = flow.add("parse", pass());
    let mut stored = 0_u64;
    let store = flow.add(
        "store",
        sink(move |_: u32| {
            stored += 1;
            if stored.is_multiple_of(16) {
                thread::sleep(ms(90));
            }
            std::future::ready(Ok(()))
        }),
    );
    flow.connect(poll.output, parse.input);
    flow.connect_with(parse.output, store.input, HubOptions::bounded(32));
    store.on_own_thread();
    Vec::new()
}

#[derive(Ports)]
struct FillPorts {
    #[produce]
    tiles: Produce<u32>,
}

struct Fill;

impl Operator for Fill {
    type Ports = FillPorts;

    async fn compute(&mut self, ports: &mut FillPorts, _cx: &mut Cx) -> Result<()> {
        ports.tiles.get_mut()?.fill_from(&[1]).await
    }
}

#[derive(Ports)]
struct SolvePorts {
    #[consume]
    tiles: Consume<u32>,
    #[produce]
    solved: Produce<u32>,
}

struct Solve;

impl Operator for Solve {
    type Ports = SolvePorts;

    async fn compute(&mut self, ports: &mut SolvePorts, _cx: &mut Cx) -> Result<()> {
        let number = ports.tiles.get()?.read().await?[0];
        compute_for(ms(6));
        ports.solved.get_mut()?.fill_from(&[number]).await
    }
}

#[derive(Ports)]
struct DrainPorts {
    #[consume]
    solved: Consume<u32>,
}

struct Drain;

impl Operator for Drain {
    type Ports = DrainPorts;

    async fn compute(&mut self, ports: &mut DrainPorts, _cx: &mut Cx) -> Result<()> {
        ports.solved.get()?.read().await.map(drop)
    }
}

/// Operators between hubs of chunks.
fn chunks(flow: &mut Flow) -> Vec<Beside> {
    let hub = |name| ChunkHub::<u32>::builder(name).elements(1).host_envelopes(3).build().unwrap();
    let (tiles, solved) = (hub("tiles"), hub("solved"));
    let fill = flow.add("fill", Fill);
    let solve = flow.add("solve", Solve);
    let drain = flow.add("drain", Drain);
    flow.link(fill.tiles, &tiles);
    flow.link(solve.tiles, &tiles);
    flow.link(solve.solved, &solved);
    flow.link(drain.solved, &solved);
    Vec::new()
}

/// A queue that drops what is too much.
fn dropping(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new().kernel_time("heavy", ms(8)));
    let sense = flow.add("sense", numbers()).when(every(ms(2)));
    let detect = flow.add(
        "detect",
        map_with(async |n: u32, cx: &mut Cx| {
            let mut found = cx.alloc::<u32>(1)?;
            let stream = cx.stream()?;
            heavy::launch(stream, &mut found)?;
            stream.completed().await?;
            Ok(n)
        }),
    );
    let act = flow.add("act", ignore());
    let detect = detect.on(&device);
    flow.connect_with(sense.output, detect.input, HubOptions::drop_oldest(4));
    flow.connect(detect.output, act.input);
    Vec::new()
}

/// More operators that compute than workers.
fn few_workers(flow: &mut Flow) -> Vec<Beside> {
    for name in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"] {
        let source = flow.add(
            name,
            source(async || {
                compute_for(ms(2));
                tokio::task::yield_now().await;
                Ok(Some(1))
            }),
        );
        let sink = flow.add(format!("{name} end"), ignore());
        flow.connect(source.output, sink.input);
    }
    Vec::new()
}

#[derive(Message)]
struct Request {
    number: u32,
    #[envelope]
    data: Envelope<u32>,
}

/// A service that admits two requests at once.
fn limit(flow: &mut Flow) -> Vec<Beside> {
    let device = Device::emulated(Emulated::new().kernel_time("heavy", ms(6)));
    let infer = flow.add(
        "infer",
        map_with(async |mut request: Request, cx: &mut Cx| {
            heavy::launch(cx.stream()?, &mut request.data)?;
            Ok(request)
        }),
    );
    let unload = flow.add(
        "unload",
        map(async |request: Request| {
            request.data.read().await?;
            Ok(request.number)
        }),
    );
    let infer = infer.on(&device);
    flow.connect(infer.output, unload.input);
    let requests = HubOptions::bounded(8).envelopes(8).envelope_bytes(32);
    let service = flow.service_with("infer requests", infer.input, unload.output, requests).limit(2);
    let caller = |_| -> Beside {
        let service = service.clone();
        Box::pin(async move {
            while let Ok(mut data) = service.blank().await {
                data.fill_from(&[1]).await.unwrap();
                if service.ask(Request { number: 1, data }).await.is_err() {
                    return;
                }
            }
        })
    };
    (0..8).map(caller).collect()
}

#[derive(Ports)]
struct DetectPorts {
    #[input]
    frames: Input<u32>,
    #[input(optional)]
    commands: Input<u32>,
    #[output]
    found: Output<u32>,
    #[output]
    state: Output<u32>,
}

struct Detect;

impl Operator for Detect {
    type Ports = DetectPorts;

    async fn compute(&mut self, ports: &mut DetectPorts, _cx: &mut Cx) -> Result<()> {
        let frame = ports.frames.take()?;
        let command = ports.commands.try_take()?;
        compute_for(ms(3));
        ports.found.send(frame + command.unwrap_or(0)).await?;
        Ok(ports.state.send(frame).await?)
    }
}

/// A camera, and operators that seldom have anything to do.
fn bystanders(flow: &mut Flow) -> Vec<Beside> {
    let camera = flow.add(
        "camera",
        source(async || {
            sleep(ms(16)).await;
            Ok(Some(1))
        }),
    );
    let listen = flow.add("listen", source(std::future::pending::<Result<Option<u32>>>));
    let detect = flow.add("detect", Detect);
    let store = flow.add("store", ignore());
    let report = flow.add("report", ignore()).when(every(ms(400)));
    let beat = flow.add("beat", numbers()).when(every(ms(400)));
    let watch = flow.add("watch", ignore());
    flow.connect(camera.output, detect.frames);
    flow.connect(listen.output, detect.commands);
    flow.connect(detect.found, store.input);
    flow.connect_with(detect.state, report.input, HubOptions::latest());
    flow.connect(beat.output, watch.input);
    Vec::new()
}

impl Planted {
    async fn run(&self) -> Option<Bottleneck> {
        let watch = Observe::new().keep(WINDOW);
        let mut flow = Flow::new(self.name);
        let beside = (self.make)(&mut flow);
        flow.observe(&watch);
        let mut case = Case::new(flow);
        case.beside = beside.into_iter().map(tokio::spawn).collect();
        let until = Instant::now() + WINDOW + ms(200);
        tokio::time::sleep_until(until.into()).await;
        let snapshot = case.running.handle().snapshot();
        if std::env::var_os("WAKELINE_CASES").is_some() {
            println!("{snapshot}");
        }
        case.running.abort();
        let _ = case.running.await;
        case.beside.iter().for_each(tokio::task::JoinHandle::abort);
        snapshot.bottleneck
    }

    /// Prints a line of the table.
    fn is_named(&self, found: Option<&Bottleneck>) -> bool {
        let is_right = found.is_some_and(|found| self.at.contains(&&*found.at) && self.reasons.contains(&found.reason));
        let verdict = if is_right { "right" } else { "WRONG" };
        let said = found.map_or("nothing".into(), |found| format!("[{} / {:?}] {found}", found.at, found.reason));
        println!("{verdict} | {} | {:?} / {:?} | {said}", self.name, self.at, self.reasons);
        is_right
    }
}

/// The names of those that are not named rightly.
fn wrong(planted: &[Planted]) -> Vec<&str> {
    let _alone = ALONE.blocking_lock();
    let cases = std::env::var("WAKELINE_CASES").ok();
    let chosen = |case: &&Planted| cases.as_ref().is_none_or(|cases| cases.split(',').any(|name| name == case.name));
    let wrong = planted.iter().filter(chosen).filter(|case| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
        let found = runtime.block_on(case.run());
        !case.is_named(found.as_ref())
    });
    wrong.map(|case| case.name).collect()
}

#[test]
fn of_ten_bottlenecks_eight_are_named() {
    let wrong = wrong(&PLANTED);
    assert!(wrong.len() <= 2, "not named rightly: {wrong:?}");
}

#[test]
fn of_five_more_four_are_named() {
    let wrong = wrong(&FURTHER);
    assert!(wrong.len() <= 1, "not named rightly: {wrong:?}");
}

#[test]
fn of_the_last_five_four_are_named() {
    let wrong = wrong(&LAST);
    assert!(wrong.len() <= 1, "not named rightly: {wrong:?}");
}
