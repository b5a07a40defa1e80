//! Builds the flow of a plan, runs it, and checks the outcome.

use std::{collections::BTreeMap, time::Duration};

use wakeline::{
    HubOptions, Running,
    condition::{Gate, batch, every, memory},
    device::{Emulated, Faults, Simulation},
    flow::{Added, Handle},
    memory::Allocator,
    operator::{InputHandle, MapHandles, OutputHandle, Ports, concurrent},
    prelude::*,
    stream::CompletionMode,
};

use super::{
    data::{COUNTED_ROUND, Head, Message, PASS, ROUND, World, world},
    ends::*,
    operators::*,
    plan::{self, BYTES, Dice, Ending, Fault, Full, HubPlan, Kind, Make, Plan, Route, Runs, Sink, Work},
};

pub(crate) struct Ran {
    pub(crate) devices: Vec<Device>,
    /// `None` if it was not awaited.
    pub(crate) outcome: Option<Result<Report>>,
}

#[derive(Default)]
struct Sockets {
    input: Option<InputHandle<Message>>,
    output: Option<OutputHandle<Message>>,
    back: Option<InputHandle<Message>>,
    forth: Option<OutputHandle<Message>>,
}

struct Builder<'a> {
    plan: &'a Plan,
    simulation: &'a Simulation,
    devices: Vec<Device>,
    flow: Flow,
    gates: Vec<Gate>,
    /// The operators of its section.
    replayed: Vec<Added<MapHandles<Message, Message>>>,
}

pub(crate) fn devices(plan: &Plan, simulation: &Simulation) -> Vec<Device> {
    let open = |faults: &Vec<Fault>| {
        let faults = faults.iter().fold(Faults::new(), |faults, fault| match fault {
            Fault::Trap(kernel, nth) => faults.trap_kernel(*kernel, *nth),
            Fault::Copy(nth) => faults.fail_copy(*nth),
            Fault::Alloc(nth) => faults.fail_alloc(*nth),
            Fault::LostFunction(nth) => faults.lose_host_function(*nth),
        });
        Device::simulated(simulation, Emulated::new().memory(1 << 20).faults(faults)).race_checked()
    };
    plan.devices.iter().map(open).collect()
}

pub(crate) async fn run(plan: &Plan, simulation: &Simulation, watch: impl FnOnce(Handle)) -> Ran {
    let devices = devices(plan, simulation);
    let flow = Flow::new(format!("seed {}", plan.seed));
    let mut builder =
        Builder { plan, simulation, devices: devices.clone(), flow, gates: Vec::new(), replayed: Vec::new() };
    builder.build();
    let Builder { flow, gates, .. } = builder;
    let mut running = match flow.spawn() {
        Ok(running) => running,
        Err(error) => return Ran { devices, outcome: Some(Err(error)) },
    };
    watch(running.handle());
    let seed = plan.seed;
    drop(simulation.spawn("gates", async move { work_gates(gates, seed).await }));
    let outcome = match plan.ending {
        Ending::ByItself => Some(running.await),
        Ending::Stop(after) => Some(end(&mut running, after, |running| running.stop()).await),
        Ending::Abort(after) => Some(end(&mut running, after, |running| running.abort()).await),
        Ending::Drop(after) => {
            turns(after).await;
            drop(running);
            None
        }
    };
    Ran { devices, outcome }
}

async fn end(running: &mut Running, after: u32, how: fn(&Running)) -> Result<Report> {
    turns(after).await;
    how(running);
    running.await
}

/// Pauses and resumes the gates, and finally opens them.
async fn work_gates(gates: Vec<Gate>, seed: u64) {
    let mut dice = Dice::new(!seed);
    for _ in 0..dice.up_to(5) {
        let Some(gate) = gates.get(dice.up_to(gates.len())) else { continue };
        turns(dice.up_to(40) as u32).await;
        gate.pause();
        turns(dice.up_to(40) as u32).await;
        gate.resume();
    }
}

impl Builder<'_> {
    fn build(&mut self) {
        let modes = [CompletionMode::Adaptive, CompletionMode::LowLatency, CompletionMode::Quiet];
        self.flow.set_completion_mode(modes[self.plan.mode % modes.len()]);
        let mut sockets: Vec<_> = (0..self.plan.nodes.len()).map(|node| self.add(node)).collect();
        for from in 0..sockets.len() {
            self.connect(from, &mut sockets);
        }
        if let (Some(plan), [first, ..]) = (&self.plan.section, &self.replayed[..]) {
            let section = self.flow.replay("section", self.replayed.iter().collect::<Vec<_>>());
            match &plan.buckets {
                Ok(buckets) => section.buckets(buckets.clone()).rows(first.input, 1),
                Err(most) => section.at_most(*most),
            };
            if plan.at_start {
                section.at_start();
            }
            if plan.checked {
                section.checked();
            }
        }
    }

    fn me(&self, node: usize) -> Me {
        let plan = self.plan;
        let loops = plan.nodes.iter().find_map(|other| match other.kind {
            Kind::Rounds { body, .. } if body == Some(node) => Some(ROUND),
            Kind::Quiet { body } if body == Some(node) => Some(COUNTED_ROUND),
            _ => None,
        });
        Me {
            node,
            mark: loops.unwrap_or(PASS),
            own_stream: plan.nodes[node].own_stream,
            near: self.devices[plan.nodes[node].device.unwrap_or(0)].clone(),
            dice: Dice::new(plan.seed.wrapping_mul(1009) + node as u64),
            in_section: plan.in_section(node),
        }
    }

    fn settle<H>(&mut self, node: usize, mut added: Added<H>) -> Added<H> {
        let plan = &self.plan.nodes[node];
        if let Some(device) = plan.device {
            added = added.on(&self.devices[device]);
            if !plan.own_stream {
                added = added.without_own_stream();
            }
        }
        if let (Some(blocks), Some(device)) = (plan.blocks, plan.device) {
            // If a fault of this allocation is planned, it uses the device's memory instead.
            if let Ok(blocks) = Allocator::blocks(&self.devices[device], BYTES as u64, blocks) {
                added = added.when(memory(&blocks, BYTES as u64));
            }
        }
        if plan.own_thread {
            added = added.on_own_thread();
        }
        if let Some(millis) = plan.every {
            added = added.when(every(Duration::from_millis(millis)));
        }
        if plan.gate {
            let gate = Gate::open();
            self.gates.push(gate.clone());
            added = added.when(gate);
        }
        added
    }

    fn place<O: Operator>(&mut self, node: usize, operator: O) -> Added<<O::Ports as Ports>::Handles> {
        let added = self.flow.add(self.plan.name(node), operator);
        self.settle(node, added)
    }

    fn add(&mut self, node: usize) -> Sockets {
        let me = self.me(node);
        let work = match self.plan.nodes[node].kind {
            Kind::Relay { work, .. } => work,
            _ => Work::InPlace,
        };
        let relay = Relay { me: me.clone(), work };
        macro_rules! sockets {
            ($operator:expr, $($socket:ident: $port:ident),*) => {{
                let added = self.place(node, $operator);
                let mut sockets = Sockets::default();
                $(sockets.$socket = Some(added.$port);)*
                sockets
            }};
        }
        match self.plan.nodes[node].kind.clone() {
            Kind::Source { messages, make: Make::FromIngress } => {
                let added = self.place(node, FromIngress(me.clone()));
                let ingress = self.flow.ingress(format!("in{node}"), added.input);
                drop(self.simulation.spawn("ingress", tell(me, messages, ingress)));
                Sockets { output: Some(added.output), ..Sockets::default() }
            }
            Kind::Source { messages, make } => sockets!(Source { me, messages, make }, output: output),
            Kind::Relay { .. } if self.plan.in_section(node) => {
                let added = self.place(node, relay);
                let sockets = Sockets { input: Some(added.input), output: Some(added.output), ..Sockets::default() };
                self.replayed.push(added);
                sockets
            }
            Kind::Relay { hints: Some(hints), .. } => {
                let added = self.place(node, HintedRelay { relay, last: 0 });
                let source = self.flow.add(format!("hints{node}"), HintSource { to: node, left: hints.count });
                match hints.full {
                    Full::Hold => self.flow.connect(source.output, added.hints),
                    Full::DropNewest => self.flow.connect_with(source.output, added.hints, HubOptions::drop_newest(1)),
                    Full::DropOldest => self.flow.connect_with(source.output, added.hints, HubOptions::drop_oldest(2)),
                    Full::Latest => self.flow.connect_with(source.output, added.hints, HubOptions::latest()),
                }
                Sockets { input: Some(added.input), output: Some(added.output), ..Sockets::default() }
            }
            Kind::Relay { work: Work::After, .. } => {
                sockets!(AfterRelay { relay, here: None }, input: input, output: output)
            }
            Kind::Relay { done, runs: Runs::Several { count, ordered }, .. } => {
                macro_rules! several {
                    ($operator:expr) => {{
                        let several = concurrent(count, $operator);
                        sockets!(if ordered { several } else { several.unordered() }, input: input, output: output)
                    }};
                }
                if done { several!(DoneRelay(relay)) } else { several!(relay) }
            }
            Kind::Relay { done: true, .. } => sockets!(DoneRelay(relay), input: input, output: output),
            Kind::Relay { .. } => sockets!(relay, input: input, output: output),
            Kind::Batch { most, within } => {
                let added = self.place(node, Batch { relay, most });
                let input = added.input;
                let output = added.output;
                let _added = added.when(batch(input, most, Duration::from_millis(within)));
                Sockets { input: Some(input), output: Some(output), ..Sockets::default() }
            }
            Kind::Keep { count } => sockets!(Keep { relay, count }, input: input, output: output),
            Kind::Merge { each: true } => sockets!(MergeEach(relay), input: inputs, output: output),
            Kind::Merge { each: false } => sockets!(MergeAny(relay), input: inputs, output: output),
            Kind::Rounds { laps, .. } => {
                sockets!(Rounds { relay, laps }, input: input, output: output, back: back, forth: forth)
            }
            Kind::Quiet { .. } => sockets!(Quiet(relay), input: inputs, output: output, back: inputs, forth: forth),
            Kind::Sink(Sink::Done) => sockets!(DoneSink(me), input: input),
            Kind::Sink(Sink::Impatient) => sockets!(Impatient(me), input: input),
            Kind::Sink(Sink::Outside) => Sockets::default(),
            Kind::Sink(sink) => sockets!(Last { me, sink }, input: input),
        }
    }

    fn connect(&mut self, from: usize, sockets: &mut [Sockets]) {
        let plan = self.plan;
        let mut to_all = Vec::new();
        for edge in plan.edges.iter().filter(|edge| edge.from == from) {
            let hub = hub(edge.hub);
            if let Some(forth) = sockets[from].forth.filter(|_| is_body_of(plan, edge.to, from))
                && let Some(input) = sockets[edge.to].input
            {
                self.flow.connect_with(forth, input, hub);
            } else if is_body_of(plan, from, edge.to) {
                if let (Some(output), Some(back)) = (sockets[from].output, sockets[edge.to].back) {
                    self.flow.connect_with(output, back, hub);
                }
            } else if let Kind::Sink(Sink::Outside) = plan.nodes[edge.to].kind
                && let Some(output) = sockets[from].output
            {
                let egress = self.flow.egress_with(plan.name(edge.to), output, hub);
                drop(self.simulation.spawn("outside", outside(self.me(edge.to), egress)));
            } else if let Some(input) = sockets[edge.to].input {
                to_all.push(input.with(hub));
            }
        }
        let Some(output) = sockets[from].output else { return };
        match &to_all[..] {
            [] => {}
            [one] => self.flow.connect(output, *one),
            _ => self.flow.connect(output, to_all),
        }
    }
}

fn is_body_of(plan: &Plan, node: usize, other: usize) -> bool {
    matches!(plan.nodes[other].kind, Kind::Rounds { body, .. } | Kind::Quiet { body } if body == Some(node))
}

fn hub(plan: HubPlan) -> HubOptions {
    let mut hub = match (plan.full, plan.capacity) {
        (Full::Hold, None) => HubOptions::default(),
        (Full::Hold | Full::Latest, capacity) => HubOptions::bounded(capacity.unwrap_or(1)),
        (Full::DropNewest, capacity) => HubOptions::drop_newest(capacity.unwrap_or(1)),
        (Full::DropOldest, capacity) => HubOptions::drop_oldest(capacity.unwrap_or(1)),
    };
    if let Some(envelopes) = plan.envelopes {
        hub = hub.envelopes(envelopes);
    }
    if plan.sized {
        hub = hub.envelope_bytes(BYTES);
    }
    hub
}

pub(crate) fn judge(plan: &Plan, ran: &Ran) -> Vec<String> {
    let mut wrong = Vec::new();
    let lost = ran.devices.iter().any(|device| device.lost().is_some());
    if lost && !plan.has_faults() {
        wrong.push("a device was lost without a fault".into());
    }
    let complete = match &ran.outcome {
        None => false,
        Some(Ok(report)) => {
            if lost {
                wrong.push("a device was lost, but the flow succeeded".into());
            }
            judge_hubs(plan, report, &mut wrong);
            judge_section(plan, report, &mut wrong);
            true
        }
        Some(Err(error)) => {
            let meant = match error.kind() {
                ErrorKind::DeviceLost => lost,
                // Memory that a lost device may still access is not reused, on other devices either.
                ErrorKind::OutOfMemory => plan.may_run_out() || lost,
                ErrorKind::Cancelled => matches!(plan.ending, Ending::Abort(_)),
                _ => false,
            };
            if !meant {
                wrong.push(format!("the flow failed: {error:#}"));
            }
            false
        }
    };
    world(|world| {
        wrong.append(&mut world.wrong);
        for (node, accepted) in world.accepted.iter().filter(|_| complete) {
            let sent = world.sent.get(node).copied().unwrap_or_default();
            if sent != *accepted {
                wrong.push(format!("{} accepted {accepted} numbers, but sent {sent}", plan.name(*node)));
            }
        }
        if !lost {
            wrong.append(&mut world.wrong_on_devices);
        }
        for (node, routes) in sinks(plan).filter(|(node, _)| !lost || plan.nodes[*node].device.is_none()) {
            judge_sink(plan, world, node, routes, complete, &mut wrong);
        }
    });
    wrong
}

fn sinks(plan: &Plan) -> impl Iterator<Item = (usize, &[Route])> {
    let sinks = plan.nodes.iter().enumerate().filter(|(_, node)| matches!(node.kind, Kind::Sink(_)));
    sinks.map(|(number, node)| (number, &node.routes[..]))
}

/// The messages of a sink: each at most once, in order, and if all succeeded every one that was sent.
fn judge_sink(plan: &Plan, world: &World, node: usize, routes: &[Route], complete: bool, wrong: &mut Vec<String>) {
    let name = plan.name(node);
    let mut by_route: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
    for Head { origin, number, path, .. } in world.seen.get(&node).into_iter().flatten() {
        by_route.entry((*origin, *path)).or_default().push(*number);
    }
    for route in routes {
        let mut numbers = by_route.remove(&(route.source as u32, route.path)).unwrap_or_default();
        let source = plan.name(route.source);
        if !route.ordered {
            numbers.sort_unstable();
        }
        if !numbers.is_sorted_by(|one, next| one < next) {
            wrong.push(format!("{name} got messages of {source} duplicated or out of order: {numbers:?}"));
        }
        let sent = world.sent.get(&route.source).copied().unwrap_or_default();
        if complete && !route.lossy && numbers.len() != sent as usize {
            wrong.push(format!("{name} got {numbers:?} of the {sent} messages of {source}"));
        }
        if numbers.iter().any(|number| *number > sent) {
            wrong.push(format!("{name} got {numbers:?} of {source}, which sent {sent}"));
        }
    }
    for ((origin, path), numbers) in by_route {
        wrong.push(format!("{name} got messages {numbers:?} of {origin} by an impossible route: {path:x}"));
    }
}

/// Every operator of a section ran in each of its rounds.
fn judge_section(plan: &Plan, report: &Report, wrong: &mut Vec<String>) {
    let Some(section) = report.section("section") else { return };
    for node in plan.section.iter().flat_map(|section| &section.nodes) {
        let runs = report.operator(&plan.name(*node)).map_or(0, |operator| operator.runs);
        if runs != section.replayed + section.streamed {
            wrong.push(format!("{} ran {runs} times, in {section:?}", plan.name(*node)));
        }
    }
}

/// Each message is counted once.
fn judge_hubs(plan: &Plan, report: &Report, wrong: &mut Vec<String>) {
    for hub in &report.hubs {
        let is_lossy = |edge: &plan::Edge| {
            let ends = hub.name.split(" -> ").map(|end| end.split('.').next().unwrap_or_default());
            edge.hub.full != Full::Hold && ends.eq([plan.name(edge.from), plan.name(edge.to)])
        };
        let lossy = plan.edges.iter().any(is_lossy);
        if !hub.name.starts_with("hints") && !lossy && (hub.dropped > 0 || hub.untaken > 0) {
            wrong.push(format!("hub `{}`: {} dropped, {} never taken", hub.name, hub.dropped, hub.untaken));
        }
        let writer = hub.name.split('.').next().unwrap_or_default();
        let sent = report.operator(writer).map_or(0, |operator| operator.messages_out);
        let counted = hub.passed + hub.dropped + hub.untaken;
        // Loops have two outputs; messages from outside and hints are counted elsewhere.
        let other = ["rounds", "quiet", "hints", "in"].iter().any(|name| writer.starts_with(name));
        if !other && counted != sent {
            wrong.push(format!("hub `{}` counted {counted} of {sent} messages", hub.name));
        }
    }
}
