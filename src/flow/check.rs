//! What can be known before a flow runs: every problem is found and all are reported at once; then each hub's size and
//! place follow.

use std::{collections::HashSet, io, thread::available_parallelism};

use super::{Connection, Flow, spawn, thread};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{self, Hub, link::LinkPlan},
    operator::{PortDecl, PortId, PortKind, lane::OwnStreams},
    stream::StreamPool,
    sync::lock,
};

/// A plan for every connection, in their order.
pub(super) fn plan(flow: &Flow) -> Result<Vec<LinkPlan>> {
    let mut problems = Vec::new();
    names(flow, &mut problems);
    ports(flow, &mut problems);
    pools(flow, &mut problems);
    own_threads(flow, &mut problems);
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

/// Who gets a thread of its own can go there, and each core that one is to be pinned to is there.
fn own_threads(flow: &Flow, problems: &mut Vec<String>) {
    for entry in &flow.entries {
        let Some(plan) = lock(&entry.place).own_thread else { continue };
        let name = &entry.name;
        if entry.stays {
            problems.push(format!(
                "operator `{name}` is to have a thread of its own, and a `LocalOperator` stays on its flow's: make it an \
                 `Operator`, or leave it there"
            ));
        }
        // In a simulation there are no threads.
        let Some(core) = plan.core.filter(|_| !spawn::in_simulation()) else { continue };
        if let Err(error) = thread::try_core(core) {
            problems.push(match error.kind() {
                io::ErrorKind::Unsupported => format!(
                    "operator `{name}` is to be pinned to core {core}, and this system has no pinning: leave it \
                     unpinned, with `on_own_thread`"
                ),
                _ => format!(
                    "operator `{name}` is to be pinned to core {core}, and this process has no such core: cores are \
                     counted from 0, and it has {}",
                    available_parallelism().map_or("less".to_string(), |count| count.to_string())
                ),
            });
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
