//! What can be known before a flow runs: every problem is found and all are reported at once; then each hub's size and
//! place follow.

use std::collections::HashSet;

use super::{Connection, Flow};
use crate::{
    condition::{self, PortFacts, PortId, room_problem},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{self, Hub, Since, link::LinkPlan},
    operator::{PortDecl, PortKind, lane::OwnStreams},
    stream::StreamPool,
    sync::lock,
};

/// A plan for every connection, in their order.
pub(super) fn plan(flow: &Flow) -> Result<Vec<LinkPlan>> {
    let mut problems = Vec::new();
    names(flow, &mut problems);
    ports(flow, &mut problems);
    pools(flow, &mut problems);
    conditions(flow, &mut problems);
    let plans = hubs(flow, &mut problems);
    if problems.is_empty() {
        warn_of_small_pools(flow);
        return Ok(plans);
    }
    let told = match &problems[..] {
        [one] => one.clone(),
        many => format!("{} problems:\n  - {}", many.len(), many.join("\n  - ")),
    };
    Err(Error::new(ErrorKind::Setup, told).at(format!("flow `{}`", flow.name)))
}

fn names(flow: &Flow, problems: &mut Vec<String>) {
    let mut seen = HashSet::new();
    let mut told = HashSet::new();
    for entry in &flow.entries {
        if !seen.insert(&entry.name) && told.insert(&entry.name) {
            problems.push(format!("two operators are named `{}`: give each its own name", entry.name));
        }
    }
}

/// Every port is connected, to this flow, and once, unless it is one for many.
fn ports(flow: &Flow, problems: &mut Vec<String>) {
    let (mut used, mut told) = (HashSet::new(), HashSet::new());
    for connection in &flow.connections {
        let own: Vec<PortId> = [connection.from, connection.to].into_iter().filter(|id| id.flow == flow.id).collect();
        let what = match &own[..] {
            [_, _] => None,
            [one] => Some(format!("port `{}` is connected to one of another flow", port_name(flow, *one))),
            _ => Some("two ports of other flows are connected here".into()),
        };
        problems.extend(what.map(|what| format!("{what}: connect ports of operators that were added to this flow")));
        for id in own {
            let again = !used.insert((id.operator, id.port)) && decl(flow, id).kind != PortKind::Inputs;
            if again && told.insert((id.operator, id.port)) {
                let inputs = if decl(flow, id).kind == PortKind::Input { ": an `Inputs<..>` can be" } else { "" };
                problems.push(format!("port `{}` is connected more than once{inputs}", port_name(flow, id)));
            }
        }
    }
    for (operator, entry) in flow.entries.iter().enumerate() {
        for (port, decl) in entry.ports.iter().enumerate() {
            if !used.contains(&(operator, port)) {
                let kind = if decl.kind == PortKind::Output { "output" } else { "input" };
                problems.push(format!("{kind} `{}.{}` is not connected", entry.name, decl.name));
            }
        }
    }
}

/// What operators wait for can happen.
fn conditions(flow: &Flow, problems: &mut Vec<String>) {
    for (operator, entry) in flow.entries.iter().enumerate() {
        let mut told = Vec::new();
        for (port, decl) in entry.ports.iter().enumerate() {
            let id = PortId { flow: flow.id, operator, port, name: decl.name };
            let facts = facts(flow, operator, id).filter(|_| !is_named(flow, id));
            let problem = facts.and_then(|PortFacts { capacity, is_input }| match is_input {
                true => decl.need.problem(capacity),
                false => room_problem(decl.need.least, capacity),
            });
            told.extend(problem.map(|problem| format!("port `{}.{}` {problem}", entry.name, decl.name)));
        }
        let mut own = Vec::new();
        for when in &lock(&entry.place).conditions {
            when.problems(&|port| facts(flow, operator, port), &mut own);
        }
        problems.extend(told);
        problems.extend(own.into_iter().map(|problem| format!("operator `{}` {problem}", entry.name)));
    }
}

/// What is known of a port of this operator; `None` if it is of another one.
fn facts(flow: &Flow, operator: usize, port: PortId) -> Option<PortFacts> {
    if (port.flow, port.operator) != (flow.id, operator) {
        return None;
    }
    let is_input = decl(flow, port).kind != PortKind::Output;
    let own = within(flow).filter(|connection| if is_input { connection.to == port } else { connection.from == port });
    let capacities = own.map(|connection| wanted(flow, connection).capacity.unwrap_or(hub::DEFAULT_CAPACITY));
    // Messages count wherever they came from; room has to be everywhere.
    let capacity = if is_input { capacities.reduce(usize::saturating_add) } else { capacities.min() };
    Some(PortFacts { capacity: capacity?, is_input })
}

/// An operator runs only when there is a message, or room for one, at this port or one of several.
pub(super) fn waits_at(flow: &Flow, port: PortId) -> bool {
    !decl(flow, port).need.optional || is_named(flow, port)
}

/// A condition of the operator names this port: what its attribute says of what it waits for does not count.
fn is_named(flow: &Flow, port: PortId) -> bool {
    let place = lock(&flow.entries[port.operator].place);
    condition::named(&place.conditions).iter().any(|(named, _)| *named == port)
}

/// Since when messages wait at a port, if anybody wants to know.
fn times(flow: &Flow, port: PortId) -> Option<Since> {
    if !is_named(flow, port) {
        return decl(flow, port).need.times();
    }
    let place = lock(&flow.entries[port.operator].place);
    let named = condition::named(&place.conditions);
    named.into_iter().filter(|(named, _)| *named == port).find_map(|(_, need)| need?.times())
}

/// The operators that were given a pool of streams.
fn pooled(flow: &Flow) -> impl Iterator<Item = (usize, StreamPool)> {
    flow.entries.iter().enumerate().filter_map(|(operator, entry)| match &lock(&entry.place).streams {
        OwnStreams::Pool(pool) => Some((operator, pool.clone())),
        OwnStreams::Default | OwnStreams::None => None,
    })
}

/// A pool's streams are on its operators' device.
fn pools(flow: &Flow, problems: &mut Vec<String>) {
    for (operator, pool) in pooled(flow) {
        let (name, device) = (&flow.entries[operator].name, device_of(flow, operator));
        if device != *pool.device() {
            let (on, of) = (if device.is_host() { "the host" } else { device.name() }, pool.device());
            let again = if on == of.name() { ", which was opened another time" } else { "" };
            problems.push(format!(
                "operator `{name}` is on {on}, and its pool of streams `{}` is one of {of}{again}: give it a pool of its \
                 own device, or put it on the pool's",
                pool.name()
            ));
        }
    }
}

/// Whoever finds a pool used up works on others' streams: right, but seldom what was meant.
fn warn_of_small_pools(flow: &Flow) {
    let mut shared: Vec<(StreamPool, Vec<&str>)> = Vec::new();
    for (operator, pool) in pooled(flow) {
        let name = &*flow.entries[operator].name;
        match shared.iter_mut().find(|(known, _)| known.is(&pool)) {
            Some((_, sharers)) => sharers.push(name),
            None => shared.push((pool, vec![name])),
        }
    }
    for (pool, sharers) in shared {
        if pool.maximum().is_some_and(|maximum| maximum < sharers.len()) {
            tracing::warn!(
                pool = pool.name(),
                maximum = pool.maximum(),
                operators = sharers.join(", "),
                "a pool of streams has fewer than the operators that share it: some will have none of their own"
            );
        }
    }
}

/// How urgent an operator's streams are.
fn priority(flow: &Flow, operator: usize) -> i32 {
    match &lock(&flow.entries[operator].place).streams {
        OwnStreams::Pool(pool) => pool.priority(),
        OwnStreams::Default | OwnStreams::None => 0,
    }
}

/// The connections whose sizes and places can be known: those within the flow.
fn within(flow: &Flow) -> impl Iterator<Item = &Connection> {
    flow.connections.iter().filter(|connection| connection.from.flow == flow.id && connection.to.flow == flow.id)
}

fn hubs(flow: &Flow, problems: &mut Vec<String>) -> Vec<LinkPlan> {
    let near = pinned_for(flow);
    let plans = within(flow).map(|connection| {
        let name = format!("{} -> {}", port_name(flow, connection.from), port_name(flow, connection.to));
        let hub = wanted(flow, connection);
        let (writer, reader) = (device(flow, connection.from), device(flow, connection.to));
        let mut sized = |what: &str, number: Option<usize>, default: usize| {
            hub::at_least_one(what, number.unwrap_or(default)).unwrap_or_else(|_| {
                problems.push(format!("hub `{name}`: its {what} is 0, and nothing could ever pass: at least 1"));
                default
            })
        };
        let capacity = sized("capacity", hub.capacity, hub::DEFAULT_CAPACITY);
        let envelopes = sized("number of envelopes", hub.envelopes, hub::DEFAULT_ENVELOPES);
        if let Some(bytes) = hub.envelope_bytes {
            sized("envelopes' size", Some(bytes), 1);
            let PortDecl { carries_envelopes, element_bytes, .. } = *decl(flow, connection.from);
            if !carries_envelopes {
                problems.push(format!("hub `{name}`: it is given a size of envelopes, and its messages carry none"));
            } else if (1..element_bytes).contains(&bytes) {
                problems.push(format!("hub `{name}`: its envelopes' {bytes} bytes hold no element of {element_bytes}"));
            }
        }
        if !writer.copies_with(&reader) {
            problems.push(format!(
                "hub `{name}`: {writer} and {reader} are devices of different makes: put an operator on the host between"
            ));
        }
        let carries = decl(flow, connection.from).carries_envelopes;
        let elsewhere = carries && writer != reader;
        let reader_bytes = match size(flow, connection, &mut Vec::new()) {
            _ if !elsewhere => None,
            Some(bytes) => Some(bytes),
            None => {
                problems.push(format!(
                    "hub `{name}`: nobody says how large its envelopes are, and `{}` is not passed any on: write \
                     `#[output(envelope_bytes = ..)]` or `Hub::envelope_bytes`",
                    flow.entries[connection.from.operator].name
                ));
                None
            }
        };
        let near = [&reader, &writer].into_iter().find(|device| !device.is_host()).unwrap_or(&near).clone();
        LinkPlan {
            name: name.into(),
            capacity,
            envelopes,
            writer_bytes: hub.envelope_bytes.filter(|_| carries),
            reader_bytes,
            writer,
            reader,
            near,
            mode: flow.mode,
            priority: priority(flow, connection.from.operator).min(priority(flow, connection.to.operator)),
            times: times(flow, connection.to),
        }
    });
    plans.collect()
}

/// What `connect_with` said, then what the ports' attributes say.
fn wanted(flow: &Flow, connection: &Connection) -> Hub {
    connection.hub.or(decl(flow, connection.to).hub).or(decl(flow, connection.from).hub)
}

/// Bytes of the largest envelope that a hub can be given: its own blanks', or of those that its writer is passed.
fn size(flow: &Flow, connection: &Connection, seen: &mut Vec<PortId>) -> Option<usize> {
    if let Some(bytes) = wanted(flow, connection).envelope_bytes {
        return Some(bytes);
    }
    if seen.contains(&connection.from) {
        return None;
    }
    seen.push(connection.from);
    let writer = connection.from.operator;
    let passed_on = within(flow).filter(|other| other.to.operator == writer && decl(flow, other.to).carries_envelopes);
    passed_on.filter_map(|other| size(flow, other, seen)).max()
}

/// Host memory between two operators on the host may later be copied to a device of the flow.
fn pinned_for(flow: &Flow) -> Device {
    let devices = flow.entries.iter().filter_map(|entry| lock(&entry.place).device.clone());
    devices.into_iter().find(|device| !device.is_host()).unwrap_or_else(Device::host)
}

fn device(flow: &Flow, port: PortId) -> Device {
    device_of(flow, port.operator)
}

fn device_of(flow: &Flow, operator: usize) -> Device {
    lock(&flow.entries[operator].place).device.clone().unwrap_or_else(Device::host)
}

fn decl(flow: &Flow, port: PortId) -> &PortDecl {
    &flow.entries[port.operator].ports[port.port]
}

fn port_name(flow: &Flow, port: PortId) -> String {
    format!("{}.{}", flow.entries[port.operator].name, decl(flow, port).name)
}
