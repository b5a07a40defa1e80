//! The plan of each hub of a flow: its size, its envelopes and its location.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use super::{
    Connection, Copied, Flow,
    check::{decl, device, hub_name, is_named, port_name, wanted},
    wiring::Wiring,
};
use crate::{
    condition::{self, Need, PortId, Room},
    device::Device,
    hub::{self, Since, build::HubPlan, chunks::roles::Role, fan, latest::EndTogether},
    operator::{PortDecl, PortKind},
    stream::StreamPool,
    sync::lock,
};

/// One plan for every connection, in the order of connecting.
pub(super) fn plans(flow: &Wiring<'_>, problems: &mut Vec<String>) -> Vec<HubPlan> {
    let (near, outputs) = (pinned_for(flow), OutputPlans::of(flow));
    within(flow).map(|connection| plan_of(flow, connection, &outputs, &near, problems)).collect()
}

/// The connections whose sizes and locations are known: those within the flow.
fn within(flow: &Flow) -> impl Iterator<Item = &Connection> {
    flow.connections.iter().filter(|connection| connection.from.flow == flow.id && connection.to.flow == flow.id)
}

/// The properties of other connections that the plan of a hub depends on. Computed once per flow, without recursion: a
/// flow may be a chain of ten thousand operators, and an output may have ten thousand readers.
struct OutputPlans<'a> {
    by_port: HashMap<PortId, OutputPlan<'a>>,
    /// By operator: the size in bytes of the largest envelope that reaches one of its inputs.
    reaching: Vec<Option<usize>>,
}

struct OutputPlan<'a> {
    /// The reader that receives the original messages.
    primary: Option<&'a Connection>,
    /// The size in bytes of the output's largest blank envelope, if a hub or a declaration sets it.
    blank_bytes: Option<usize>,
}

impl<'a> OutputPlans<'a> {
    fn of(flow: &Wiring<'a>) -> Self {
        let mut by_port = HashMap::new();
        for connection in within(flow) {
            let (port, writer) = (connection.from, device(flow, connection.from));
            by_port.entry(port).or_insert_with(|| {
                let branches = flow.leaving(port).map(|(_, branch)| branch).filter(|branch| branch.to.flow == flow.id);
                let drops = |branch: &&Connection| !wanted(flow, branch).when_full.blocks_writer();
                let primary = fan::primary(branches.clone(), drops, |branch| device(flow, branch.to) == writer);
                let blank_bytes = branches.filter_map(|branch| wanted(flow, branch).envelope_bytes).max();
                OutputPlan { primary, blank_bytes }
            });
        }
        let mut outputs = Self { by_port, reaching: vec![None; flow.entries.len()] };
        outputs.reach(flow);
        outputs
    }

    /// In descending order of size, so that the first size to reach an operator is its largest, and each connection is
    /// followed once.
    fn reach(&mut self, flow: &Wiring<'_>) {
        let blank_bytes = within(flow).filter_map(|connection| Some((self.blank_bytes(connection.from)?, connection)));
        let mut blank_bytes: Vec<_> = blank_bytes.collect();
        blank_bytes.sort_by_key(|(bytes, _)| Reverse(*bytes));
        for (bytes, connection) in blank_bytes {
            let mut open = vec![connection];
            while let Some(connection) = open.pop() {
                let reader = connection.to.operator;
                if !decl(flow, connection.to).carries_envelopes || self.reaching[reader].is_some() {
                    continue;
                }
                self.reaching[reader] = Some(bytes);
                let passed_on = flow.leaving_operator(reader).filter(|next| next.to.flow == flow.id);
                open.extend(passed_on.filter(|next| self.blank_bytes(next.from).is_none()));
            }
        }
    }

    fn blank_bytes(&self, output: PortId) -> Option<usize> {
        self.by_port.get(&output)?.blank_bytes
    }

    /// The size in bytes of the largest envelope that an output can send: a blank one, or one that is passed on.
    fn size(&self, output: PortId) -> Option<usize> {
        self.blank_bytes(output).or(self.reaching[output.operator])
    }

    /// Whether the reader of this connection receives the original messages of the output.
    fn is_primary(&self, connection: &Connection) -> bool {
        let output = self.by_port.get(&connection.from);
        let primary = output.and_then(|output| output.primary);
        !connection.forks || primary.is_none_or(|primary| std::ptr::eq(primary, connection))
    }
}

fn plan_of(
    flow: &Wiring<'_>,
    connection: &Connection,
    outputs: &OutputPlans<'_>,
    near: &Device,
    problems: &mut Vec<String>,
) -> HubPlan {
    let name = hub_name(flow, connection);
    let hub = wanted(flow, connection);
    let (writer, reader) = (device(flow, connection.from), device(flow, connection.to));
    let forks = !outputs.is_primary(connection);
    let PortDecl { carries_envelopes: carries, element_bytes, envelopes: each, .. } = *decl(flow, connection.from);
    let mut problem = |what: String| problems.push(format!("hub `{name}`: {what}"));

    let mut sized = |what: &str, number: Option<usize>, default: usize| {
        hub::at_least_one(what, number.unwrap_or(default)).unwrap_or_else(|_| {
            problem(format!("its {what} is 0, so no message could pass: set at least 1"));
            default
        })
    };
    let least = needs(flow, connection);
    let capacity = sized("capacity", hub.capacity, least);
    // Only one hub lends the writer its blank envelopes.
    let writer_bytes = outputs.blank_bytes(connection.from).filter(|_| carries && !forks);
    // A concurrent run keeps the envelopes that it has filled until its turn to send.
    let workers = flow.entries[connection.from.operator].workers;
    let messages_kept = writer_bytes.map_or(0, |_| workers.saturating_mul(needs_at(flow, connection.from).max(1)));
    let for_kept = if messages_kept > 0 { messages_kept.saturating_add(1).saturating_mul(each.usual()) } else { 0 };
    let usual = hub.default_envelopes(least, each.usual()).max(for_kept);
    let envelopes = sized("number of envelopes", hub.envelopes, usual);
    if let Some(bytes) = hub.envelope_bytes {
        sized("envelope size", Some(bytes), 1);
        if !carries {
            problem("it has an envelope size, but its messages carry no envelopes: remove the size".into());
        } else if (1..element_bytes).contains(&bytes) {
            problem(format!(
                "its envelopes of {bytes} bytes are too small for one element of {element_bytes} bytes: enlarge them"
            ));
        }
    }
    let needs = hub.default_envelopes(least, each.certain());
    if carries && !hub.when_full.blocks_writer() && envelopes < needs {
        let one = if each.certain() == 1 { "one".into() } else { each.certain().to_string() };
        problem(format!(
            "it drops messages so that its writer never waits, but with {envelopes} envelopes the writer would wait: it \
             needs {needs}, {one} for each message that it queues, {one} for the writer and {one} for the reader"
        ));
    }
    if !writer.copies_with(&reader) {
        problem(format!("no copy path between {writer} and {reader}: put an operator on the host between them"));
    }
    let elsewhere = carries && (forks || (writer != reader && !hub.reads_anywhere));
    let reader_bytes = match outputs.size(connection.from) {
        _ if !elsewhere => None,
        Some(bytes) => Some(bytes),
        None => {
            problem(format!(
                "the size of its envelopes is not set, and `{}` receives none to pass on: set it with \
                 `#[output(envelope_bytes = ..)]` or `HubOptions::envelope_bytes`",
                flow.entries[connection.from.operator].name
            ));
            None
        }
    };
    let kept = messages_kept.saturating_mul(each.certain());
    if envelopes < kept {
        let writer = &flow.entries[connection.from.operator].name;
        problem(format!(
            "`{writer}` has {workers} runs at a time, which keep {kept} envelopes until their turn to send, but the hub has \
             {envelopes}: set {kept} or more with `HubOptions::envelopes`"
        ));
    }
    let room = needs_at(flow, connection.from);
    let waits = || format!("`{}` waits for room for {room} messages", port_name(flow, connection.from));
    // The number of messages that a condition waits for was checked with the operator's other conditions.
    if room > capacity && hub.when_full.blocks_writer() && !is_named(flow, connection.from) {
        problem(format!(
            "{}, but its queue holds at most {capacity}: give the hub a capacity of {room} or more",
            waits()
        ));
    }
    let lent = writer_bytes.is_some() || (carries && forks);
    let for_room = room.saturating_mul(each.certain());
    let passes = writer_bytes.is_some() || reader_bytes.is_some();
    let waited_for = certainly_needs(flow, connection.to);
    let for_waited = waited_for.saturating_mul(each.certain());
    if passes && each.certain() > envelopes {
        let each = each.certain();
        problem(format!(
            "each of its messages has {each} envelopes or more, but the hub has {envelopes}: set {each} or more with \
             `HubOptions::envelopes`"
        ));
    } else {
        if lent && for_room > envelopes {
            problem(format!(
                "{}, but the hub has {envelopes} envelopes: set {for_room} or more with `HubOptions::envelopes`",
                waits()
            ));
        }
        if passes && for_waited > envelopes {
            let waits = format!("`{}` waits for {waited_for} messages", port_name(flow, connection.to));
            problem(format!(
                "{waits}, but the hub has {envelopes} envelopes: set {for_waited} or more with `HubOptions::envelopes`"
            ));
        }
    }
    let near = [&reader, &writer].into_iter().find(|device| !device.is_host()).unwrap_or(near).clone();
    HubPlan {
        name: name.into(),
        capacity,
        when_full: hub.when_full,
        ends_with: None,
        envelopes,
        writer_bytes,
        reader_bytes,
        forks,
        reads_anywhere: hub.reads_anywhere && !forks,
        writer,
        reader,
        near,
        mode: flow.mode,
        priority: priority(flow, connection.from.operator).min(priority(flow, connection.to.operator)),
        wait_time_origin: wait_time_origin(flow, connection.to),
        stepped: false,
        captured: None,
        traced: None,
    }
}

/// Makes the hubs of one reader that keep the latest message end together, if the reader has no other input whose end
/// ends it. The reader still waits for the queues of optional inputs.
pub(super) fn ends_with(flow: &Flow, plans: &mut [HubPlan]) {
    let mut inputs = vec![Vec::new(); flow.entries.len()];
    let mut end_alone = vec![false; flow.entries.len()];
    for (at, connection) in within(flow).enumerate() {
        let reader = connection.to.operator;
        inputs[reader].push(at);
        end_alone[reader] |= !plans[at].when_full.keeps_latest() && !decl(flow, connection.to).need.optional;
    }
    // A chunk that is waited for also ends the reader.
    for link in flow.links.iter().filter(|link| link.role != Role::Produce && !decl(flow, link.port).need.optional) {
        end_alone[link.port.operator] = true;
    }
    for (inputs, end_alone) in inputs.into_iter().zip(end_alone) {
        let latest = inputs.iter().filter(|at| plans[**at].when_full.keeps_latest()).count();
        if !end_alone && latest > 0 {
            let all = Arc::new(EndTogether::new(latest));
            inputs.into_iter().for_each(|at| plans[at].ends_with = Some(all.clone()));
        }
    }
}

/// The hubs that copy envelopes although their data is already on the reader's device, in the original message or in
/// another fork.
pub(super) fn copies(flow: &Wiring<'_>, plans: &[HubPlan]) -> Vec<Copied> {
    let all = || flow.connections.iter().zip(plans);
    // First the devices that the original messages go to; then, in the order of the connections, those of the forks.
    let mut there: HashMap<PortId, Vec<&Device>> = HashMap::new();
    for (connection, plan) in all().filter(|(_, plan)| !plan.forks) {
        there.entry(connection.from).or_default().push(&plan.reader);
    }
    let copied = all().filter(|(_, plan)| plan.forks).filter_map(|(connection, plan)| {
        let there = there.entry(connection.from).or_default();
        let is_there = there.contains(&&plan.reader);
        if !is_there {
            there.push(&plan.reader);
        }
        let envelope_bytes = plan.reader_bytes.filter(|_| is_there || plan.reader == plan.writer)?;
        Some(Copied { hub: plan.name.clone(), device: plan.reader.clone(), envelope_bytes })
    });
    copied.collect()
}

/// The number of messages that a connection's queue has to hold for the conditions of its operators.
fn needs(flow: &Flow, connection: &Connection) -> usize {
    needs_at(flow, connection.from).max(needs_at(flow, connection.to)).max(hub::DEFAULT_CAPACITY)
}

/// The number of messages, or of messages to have room for, that an operator waits for at a port.
fn needs_at(flow: &Flow, port: PortId) -> usize {
    if is_named(flow, port) {
        return condition::count_at(&lock(&flow.entries[port.operator].place).conditions, port);
    }
    let PortDecl { kind, need, room, .. } = *decl(flow, port);
    match (kind, room) {
        (PortKind::Output, Room::For(count)) => count,
        (PortKind::Input | PortKind::Inputs, _) if !need.optional => need.least,
        _ => 0,
    }
}

/// The number of messages that have to be in the only queue of a port before its operator runs, without a time limit.
fn certainly_needs(flow: &Flow, port: PortId) -> usize {
    let decl = decl(flow, port);
    let certain = |need: &Need| need.within.is_none() && !need.optional && decl.kind == PortKind::Input;
    if !is_named(flow, port) {
        return if certain(&decl.need) { decl.need.least } else { 0 };
    }
    let place = lock(&flow.entries[port.operator].place);
    let named = condition::named_ports(&place.conditions).into_iter().filter(|(named, _)| *named == port);
    named.filter_map(|(_, need)| need.filter(certain)).map(|need| need.least).max().unwrap_or(0)
}

/// The capacity of a connection's queue: as set, otherwise as needed.
pub(super) fn capacity(flow: &Flow, connection: &Connection) -> usize {
    wanted(flow, connection).capacity.unwrap_or_else(|| needs(flow, connection))
}

/// The device that host memory is pinned for: memory between two operators on the host might later be copied to it.
fn pinned_for(flow: &Flow) -> Device {
    let devices = flow.entries.iter().filter_map(|entry| lock(&entry.place).device.clone());
    devices.into_iter().find(|device| !device.is_host()).unwrap_or_else(Device::host)
}

fn priority(flow: &Flow, operator: usize) -> i32 {
    lock(&flow.entries[operator].place).pool.as_ref().map_or(0, StreamPool::priority)
}

/// The time that is recorded for messages at a port, if a condition needs it.
fn wait_time_origin(flow: &Flow, port: PortId) -> Option<Since> {
    if !is_named(flow, port) {
        return decl(flow, port).need.times();
    }
    let place = lock(&flow.entries[port.operator].place);
    let named = condition::named_ports(&place.conditions);
    named.into_iter().filter(|(named, _)| *named == port).find_map(|(_, need)| need?.times())
}
