//! Random flows that fork and join, with random sections. A flow sends the same data and metadata whether its sections are
//! replayed or streamed, in every order of device work and tasks.
//!
//! `WAKELINE_SEEDS=4711 cargo test -p wakeline-tests --test devices replay_random::` repeats one seed, and
//! `WAKELINE_SEEDS=0..10000` runs many.

use common::*;
use wakeline::{
    device::{Emulated, Simulation},
    flow::Operators,
    hub::MergePolicy,
    operator::{InputHandle, OutputHandle},
    prelude::*,
};

type Data = Envelope<u32>;

/// The capacity of every envelope, in elements.
const ROOM: usize = 64;
const BYTES: usize = 4 * ROOM;

/// y[i] = a x[i] + b + i
#[kernel(unsafe(cuda = "kernels/affine.cu"))]
fn affine(x: &[u32], y: &mut [u32], a: u32, b: u32) {
    for (at, (y, x)) in y.iter_mut().zip(x).enumerate() {
        *y = a.wrapping_mul(*x).wrapping_add(b).wrapping_add(at as u32);
    }
}

/// left += right
#[kernel(unsafe(cuda = "kernels/add_to.cu"))]
fn add_to(left: &mut [u32], right: &[u32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = left.wrapping_add(*right);
    }
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn up_to(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % (n as u64 + 1)) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.up_to(n - 1) == 0
    }

    fn take<T>(&mut self, items: &mut Vec<T>) -> T {
        let at = self.up_to(items.len() - 1);
        items.swap_remove(at)
    }
}

/// How an operator processes a message.
#[derive(Clone, Copy, Debug)]
enum Method {
    InPlace,
    /// Into a blank envelope of its output.
    Blank,
    /// By way of memory that it allocates in the run.
    Scratch,
    /// Into a buffer that it allocates and sends.
    OwnBuffer,
    /// On its own stream and on a named one.
    NamedStream,
    /// With a buffer that it keeps, which each message modifies.
    Sum,
}

const METHODS: [Method; 6] =
    [Method::InPlace, Method::Blank, Method::Scratch, Method::OwnBuffer, Method::NamedStream, Method::Sum];

struct Step {
    method: Method,
    number: u32,
    sum: Option<Buffer<u32>>,
}

impl Step {
    async fn send(&mut self, mut x: Data, output: &mut Output<Data>, cx: &mut Cx) -> Result<()> {
        let (a, b) = (2 * self.number + 1, 100 * self.number);
        let own = cx.stream()?.clone();
        match self.method {
            _ if x.is_empty() => {}
            Method::InPlace => increment::launch(&own, &mut x)?,
            Method::Blank => {
                let mut y = output.blank().await?;
                y.set_len(x.len())?;
                affine::launch(&own, &x, &mut y, a, b)?;
                x = y;
            }
            Method::Scratch => {
                let mut scratch = cx.alloc::<u32>(x.len())?;
                affine::launch(&own, &x, &mut scratch, a, b)?;
                add_to::launch(&own, &mut x, &scratch)?;
            }
            Method::OwnBuffer => {
                let mut y = cx.alloc::<u32>(x.len())?;
                affine::launch(&own, &x, &mut y, a, b)?;
                x = y.into();
            }
            Method::NamedStream => {
                let named = cx.stream_named("beside")?;
                let mut scratch = cx.alloc::<u32>(x.len())?;
                affine::launch(&named, &x, &mut scratch, a, b)?;
                increment::launch(&own, &mut scratch)?;
                add_to::launch(&named, &mut x, &scratch)?;
            }
            Method::Sum => {
                let sum = self.sum.as_mut().expect("allocated in `start`");
                // The fixed length is independent of the padding.
                let mut first = cx.alloc::<u32>(4)?;
                affine::launch(&own, &x, &mut first, a, b)?;
                add_to::launch(&own, sum, &first)?;
                add_to::launch(&own, &mut x, sum)?;
            }
        }
        output.send(x).await?;
        Ok(())
    }

    fn start(&mut self, cx: &mut Cx) -> Result<()> {
        if let Method::Sum = self.method {
            self.sum = Some(Buffer::from_slice(cx.stream()?, &[self.number; 4])?);
        }
        Ok(())
    }
}

/// The inputs and outputs of `Map`: 1 and 1; `Fork`: 1 and 2; `Join`: 2 and 1; `Cross`: 2 and 2.
struct Map(Step);
struct Fork(Step);
struct Join(Step);
struct Cross(Step);

#[derive(Ports)]
struct OneOne {
    #[input]
    left: Input<Data>,
    #[output(envelope_bytes = BYTES)]
    one: Output<Data>,
}

#[derive(Ports)]
struct OneTwo {
    #[input]
    left: Input<Data>,
    #[output(envelope_bytes = BYTES)]
    one: Output<Data>,
    #[output(envelope_bytes = BYTES)]
    other: Output<Data>,
}

#[derive(Ports)]
struct TwoOne {
    #[input]
    left: Input<Data>,
    #[input]
    right: Input<Data>,
    #[output(envelope_bytes = BYTES)]
    one: Output<Data>,
}

#[derive(Ports)]
struct TwoTwo {
    #[input]
    left: Input<Data>,
    #[input]
    right: Input<Data>,
    #[output(envelope_bytes = BYTES)]
    one: Output<Data>,
    #[output(envelope_bytes = BYTES)]
    other: Output<Data>,
}

async fn copied(x: &Data, output: &mut Output<Data>, cx: &mut Cx) -> Result<Data> {
    let mut y = output.blank().await?;
    y.set_len(x.len())?;
    cx.stream()?.copy(x, &mut y)?;
    Ok(y)
}

fn added(left: &mut Data, right: &Data, cx: &mut Cx) -> Result<()> {
    if left.is_empty() || right.is_empty() { Ok(()) } else { add_to::launch(cx.stream()?, left, right) }
}

macro_rules! operator {
    ($name:ident, $ports_type:ident, |$step:ident, $ports:ident, $cx:ident| $body:block) => {
        impl Operator for $name {
            type Ports = $ports_type;

            async fn start(&mut self, cx: &mut Cx) -> Result<()> {
                self.0.start(cx)
            }

            async fn compute(&mut self, $ports: &mut $ports_type, $cx: &mut Cx) -> Result<()> {
                let $step = &mut self.0;
                $body
            }
        }
    };
}

operator!(Map, OneOne, |step, ports, cx| {
    let x = ports.left.take()?;
    step.send(x, &mut ports.one, cx).await
});

operator!(Fork, OneTwo, |step, ports, cx| {
    let x = ports.left.take()?;
    let other = copied(&x, &mut ports.other, cx).await?;
    step.send(x, &mut ports.one, cx).await?;
    ports.other.send(other).await?;
    Ok(())
});

operator!(Join, TwoOne, |step, ports, cx| {
    let (mut left, right) = (ports.left.take()?, ports.right.take()?);
    added(&mut left, &right, cx)?;
    step.send(left, &mut ports.one, cx).await
});

operator!(Cross, TwoTwo, |step, ports, cx| {
    let (mut left, right) = (ports.left.take()?, ports.right.take()?);
    let other = copied(&right, &mut ports.other, cx).await?;
    added(&mut left, &right, cx)?;
    ports.other.send(other).await?;
    step.send(left, &mut ports.one, cx).await
});

/// Sends a message of each length. Most have metadata: the number under the source's name, and a text under a name that
/// all sources use.
struct Numbered {
    name: String,
    lengths: Vec<usize>,
    sent: usize,
}

impl Operator for Numbered {
    type Ports = SourcePorts<Data>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let (length, n) = (self.lengths[self.sent], self.sent as u32);
        self.sent += 1;
        if self.sent == self.lengths.len() {
            cx.finish();
        }
        if n % 4 != 3 {
            cx.insert_metadata(self.name.clone(), n);
            cx.insert_metadata("any", format!("{n} of {}", self.name));
        }
        let mut envelope = ports.output.blank().await?;
        envelope.set_len(length)?;
        let data = &mut envelope.space().await?[..length];
        data.iter_mut().enumerate().for_each(|(at, x)| *x = 1000 * n + at as u32);
        ports.output.send(envelope).await?;
        Ok(())
    }
}

/// A message that a reader has received: data and metadata.
type Received = (Vec<u32>, Vec<(String, Option<u32>, Option<String>)>);

struct Reader(Shared<Received>);

impl Operator for Reader {
    type Ports = SinkPorts<Data>;

    async fn compute(&mut self, ports: &mut Self::Ports, cx: &mut Cx) -> Result<()> {
        let x = ports.input.take()?;
        let metadata = cx.metadata();
        let values =
            metadata.names().map(|name| (name.to_string(), metadata.get(name).copied(), metadata.get(name).cloned()));
        let received = (x.read().await?.to_vec(), values.collect());
        lock(&self.0).push(received);
        Ok(())
    }
}

/// The flow of a seed.
#[derive(Debug)]
struct Plan {
    seed: u64,
    /// For each source, the lengths of its messages.
    sources: Vec<Vec<usize>>,
    operators: Vec<PlannedOperator>,
    sections: Vec<PlannedSection>,
}

#[derive(Debug)]
struct PlannedOperator {
    method: Method,
    /// The numbers of the outputs that it reads. The sources' outputs come first, then those of each operator.
    inputs: Vec<usize>,
    outputs: usize,
    device: usize,
    policy: MergePolicy,
    own_stream: bool,
    capacity: usize,
    /// A second reader receives the messages of its first input.
    also_read: bool,
}

#[derive(Debug)]
struct PlannedSection {
    members: Vec<usize>,
    buckets: Option<Vec<usize>>,
    at_start: bool,
    checked: bool,
}

impl Plan {
    /// `devices`: any two, for the check of the sections.
    fn new(seed: u64, devices: &[Device]) -> Self {
        let mut dice = Dice(seed);
        let messages = 1 + dice.up_to(9);
        let mut lengths = || (0..messages).map(|_| 4 * [0, 1, 2, 3, 4, 5, 8, 16][dice.up_to(7)]).collect::<Vec<_>>();
        let one = lengths();
        // The first two sources have the same lengths, so that most rounds fit one bucket.
        let sources: Vec<_> = [one.clone(), one, lengths()].into();
        let sources: Vec<_> = sources.into_iter().take(1 + dice.up_to(2)).collect();
        let mut open: Vec<usize> = (0..sources.len()).collect();
        let (mut output_count, mut operators) = (sources.len(), Vec::new());
        for _ in 0..2 + dice.up_to(7) {
            let several = open.len() > 1 && dice.one_in(2);
            let inputs = (0..1 + usize::from(several)).map(|_| dice.take(&mut open)).collect();
            let outputs = 1 + usize::from(dice.one_in(3));
            open.extend(output_count..output_count + outputs);
            output_count += outputs;
            let method = METHODS[dice.up_to(METHODS.len() - 1)];
            operators.push(PlannedOperator {
                method,
                inputs,
                outputs,
                device: usize::from(dice.one_in(5)),
                policy: if dice.one_in(3) { MergePolicy::Reject } else { MergePolicy::Update },
                own_stream: !dice.one_in(8) || matches!(method, Method::NamedStream),
                capacity: 1 + dice.up_to(2),
                also_read: dice.one_in(6),
            });
        }
        let mut plan = Self { seed, sources, operators, sections: Vec::new() };
        for _ in 0..2 {
            plan.add_section(&mut dice, devices);
        }
        plan
    }

    /// The operator that has this output; `None` for the output of a source.
    fn owner(&self, output: usize) -> Option<usize> {
        let mut first = self.sources.len();
        self.operators.iter().position(|operator| {
            let owns = (first..first + operator.outputs).contains(&output);
            first += operator.outputs;
            owns
        })
    }

    /// Starts with one operator and adds those that are connected to it, as long as the flow's check accepts the section.
    fn add_section(&mut self, dice: &mut Dice, devices: &[Device]) {
        let is_free = |plan: &Self, at: usize| plan.sections.iter().all(|section| !section.members.contains(&at));
        let mut free: Vec<_> = (0..self.operators.len()).filter(|at| is_free(self, *at)).collect();
        if free.is_empty() {
            return;
        }
        let first = dice.take(&mut free);
        let buckets = match dice.up_to(3) {
            0 => None,
            1 => Some(vec![16]),
            2 => Some(vec![4, 2, 8]),
            _ => Some(vec![1, 2, 4, 8, 16]),
        };
        let at_start = buckets.is_some() && dice.one_in(2);
        self.sections.push(PlannedSection { members: vec![first], buckets, at_start, checked: dice.one_in(3) });
        for at in free {
            let is_member = |output: &usize| self.owner(*output).is_some_and(|owner| self.last().contains(&owner));
            let feeds =
                |member: &usize| self.operators[*member].inputs.iter().any(|input| self.owner(*input) == Some(at));
            let joined = self.operators[at].inputs.iter().any(is_member) || self.last().iter().any(feeds);
            if !joined || self.operators[at].device != self.operators[first].device || dice.one_in(6) {
                continue;
            }
            self.sections.last_mut().unwrap().members.push(at);
            if let Err(error) = Built::new(self, devices, true).flow.check() {
                let text = error.to_string();
                let expected = ["it would wait for itself", "is connected to operators of it and to others"];
                assert!(expected.iter().any(|part| text.contains(part)), "{text}\n{self:#?}");
                self.sections.last_mut().unwrap().members.pop();
            }
        }
    }

    fn last(&self) -> &[usize] {
        self.sections.last().map_or(&[], |section| &section.members)
    }
}

/// An added operator of any type.
type Any = Box<dyn Operators>;

/// The flow of a plan, and the messages that its readers have received.
struct Built {
    flow: Flow,
    received: Vec<Shared<Received>>,
}

impl Built {
    fn new(plan: &Plan, devices: &[Device], replayed: bool) -> Self {
        let mut flow = Flow::new(format!("seed {}", plan.seed));
        let mut outputs: Vec<Option<OutputHandle<Data>>> = Vec::new();
        for (at, lengths) in plan.sources.iter().enumerate() {
            let name = format!("source {at}");
            let source = Numbered { name: name.clone(), lengths: lengths.clone(), sent: 0 };
            outputs.push(Some(flow.add(name, source).output));
        }
        let (mut added, mut firsts, mut received) = (Vec::new(), Vec::new(), Vec::new());
        for (at, planned) in plan.operators.iter().enumerate() {
            let step = Step { method: planned.method, number: at as u32 + 1, sum: None };
            macro_rules! place {
                ($operator:expr, $inputs:tt, $outputs:tt) => {{
                    let mut placed = flow.add(format!("operator {at}"), $operator).on(&devices[planned.device]);
                    placed = placed.merge_metadata(planned.policy);
                    if !planned.own_stream {
                        placed = placed.without_own_stream();
                    }
                    place!(@ports placed, ins, $inputs);
                    place!(@ports placed, outs, $outputs);
                    (ins, outs, Box::new(placed))
                }};
                (@ports $placed:ident, $name:ident, [$($port:ident),*]) => {
                    let $name = vec![$($placed.$port),*];
                };
            }
            let (ins, outs, any): (Vec<InputHandle<Data>>, Vec<OutputHandle<Data>>, Any) =
                match (planned.inputs.len(), planned.outputs) {
                    (1, 1) => place!(Map(step), [left], [one]),
                    (1, _) => place!(Fork(step), [left], [one, other]),
                    (_, 1) => place!(Join(step), [left, right], [one]),
                    _ => place!(Cross(step), [left, right], [one, other]),
                };
            let hub = HubOptions::bounded(planned.capacity).envelope_bytes(BYTES);
            for (input, from) in ins.iter().zip(&planned.inputs) {
                let output = outputs[*from].take().unwrap();
                if planned.also_read && *from == planned.inputs[0] {
                    received.push(shared());
                    let also = flow.add(format!("also {at}"), Reader(received[received.len() - 1].clone()));
                    flow.connect_with(output, [*input, also.input], hub);
                } else {
                    flow.connect_with(output, *input, hub);
                }
            }
            firsts.push(ins);
            outputs.extend(outs.into_iter().map(Some));
            added.push(Some(any));
        }
        for (at, output) in outputs.into_iter().enumerate() {
            let Some(output) = output else { continue };
            received.push(shared());
            let reads = flow.add(format!("reads {at}"), Reader(received[received.len() - 1].clone()));
            flow.connect_with(output, reads.input, HubOptions::bounded(2).envelope_bytes(BYTES));
        }
        for (number, planned) in plan.sections.iter().enumerate().filter(|_| replayed) {
            let members: Vec<_> = planned.members.iter().filter_map(|at| added[*at].take()).collect();
            let section = flow.replay(format!("section {number}"), members);
            if let Some(buckets) = &planned.buckets {
                section.buckets(buckets.clone());
                for member in &planned.members {
                    let outside =
                        |from: &usize| !plan.owner(*from).is_some_and(|owner| planned.members.contains(&owner));
                    let inputs = firsts[*member].iter().zip(&plan.operators[*member].inputs);
                    for (input, _) in inputs.filter(|(_, from)| outside(from)) {
                        section.rows(*input, 4);
                    }
                }
            }
            if planned.at_start {
                section.at_start();
            }
            if planned.checked {
                section.checked();
            }
        }
        Self { flow, received }
    }
}

/// Runs the flow of a plan. Returns the messages of each reader, and the report.
async fn run(plan: &Plan, devices: &[Device], replayed: bool) -> (Vec<Vec<Received>>, Report) {
    let Built { mut flow, received } = Built::new(plan, devices, replayed);
    let ran = tokio::time::timeout(std::time::Duration::from_secs(100), flow.run()).await;
    let report = ran.unwrap_or_else(|_| panic!("the flow hangs: {plan:#?}"));
    let report = report.unwrap_or_else(|error| panic!("{error}\n{plan:#?}"));
    (received.iter().map(|received| lock(received).clone()).collect(), report)
}

/// Like [`run`], in a simulation with the plan's seed.
fn simulated(plan: &Plan, replayed: bool) -> (Vec<Vec<Received>>, Report) {
    let simulation = Simulation::new(plan.seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(simulation.run(async {
        let devices = [0, 1].map(|_| Device::simulated(&simulation, Emulated::new()).race_checked());
        run(plan, &devices, replayed).await
    }))
}

/// The seeds in `WAKELINE_SEEDS`: `4711`, or `0..100000`.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("WAKELINE_SEEDS") else { return 0..quick_or_long(40, 200) };
    let number = |text: &str| text.parse().expect("WAKELINE_SEEDS is a seed, or a range");
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&text)..number(&text) + 1,
    }
}

#[test]
fn g10_random_sections_send_the_same_replayed_as_streamed_in_simulations() {
    let (mut replayed_sections, mut large_sections) = (0, 0);
    let (seeds, devices) = (seeds(), [emulated(), emulated()]);
    for seed in seeds.clone() {
        let plan = Plan::new(seed, &devices);
        let ((streamed, _), (replayed, report)) = (simulated(&plan, false), simulated(&plan, true));
        assert_eq!(replayed, streamed, "seed {seed}: {plan:#?}\n{report}");
        replayed_sections += report.sections.iter().filter(|section| section.replayed > 0).count();
        large_sections += plan.sections.iter().filter(|section| section.members.len() > 2).count();
    }
    let seeds = seeds.count();
    println!("{seeds} seeds: {replayed_sections} sections replayed, {large_sections} of more than two operators");
    let enough = replayed_sections > seeds / 2 && large_sections > seeds / 5;
    assert!(seeds < 40 || enough, "too few sections: {replayed_sections} replayed, {large_sections} large");
}

on_both!(g10_random_sections_send_the_same_replayed_as_streamed_on_devices, async |device: Device| {
    let devices = [device.clone(), device];
    for seed in 0..20 {
        let plan = Plan::new(seed, &devices);
        let ((streamed, _), (replayed, report)) = (run(&plan, &devices, false).await, run(&plan, &devices, true).await);
        assert_eq!(replayed, streamed, "seed {seed}: {plan:#?}\n{report}");
    }
});
