//! The check of a flow before it runs: all mistakes are reported together. Then the [hubs] are planned.

use std::{
    collections::{HashMap, HashSet},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread::available_parallelism,
};

use super::{Checked, Connection, Flow, cycles, hubs, link, section, spawn, thread, wiring::Wiring};
use crate::{
    condition::{self, PortFacts, PortId, Room, room_problem},
    device::Device,
    error::{Error, ErrorKind, Result, panic_message},
    hub::{HubOptions, build::HubPlan},
    operator::{PortDecl, PortKind},
    stream::StreamPool,
    sync::{lock, logged},
};

/// The plan of a flow that can run.
pub(super) struct Planned {
    /// One for every connection, in the order of connecting.
    pub(super) links: Vec<HubPlan>,
    pub(super) checked: Checked,
    pub(super) sections: Vec<section::SectionPlan>,
    /// The operators of each cycle that begins only if one of them overrides `run`.
    pub(super) unbegun: Vec<Vec<usize>>,
}

/// Finds all mistakes, or plans the flow.
pub(super) fn plan(flow: &Flow) -> Result<Planned> {
    let (flow, mut problems) = (&Wiring::new(flow), Vec::new());
    names(flow, &mut problems);
    ports(flow, &mut problems);
    pools(flow, &mut problems);
    allocators(flow, &mut problems);
    conditions(flow, &mut problems);
    timers(flow, &mut problems);
    own_threads(flow, &mut problems);
    concurrency(flow, &mut problems);
    links(flow, &mut problems);
    let sections = section::plans(flow, &mut problems);
    let mut plans = hubs::plans(flow, &mut problems);
    if problems.is_empty() {
        warn_of_small_pools(flow);
        hubs::ends_with(flow, &mut plans);
        let (cycles, unbegun) = cycles::find(flow, &plans);
        let checked = Checked { copies: hubs::copies(flow, &plans), cycles };
        return Ok(Planned { links: plans, checked, sections, unbegun });
    }
    let text = match &problems[..] {
        [one] => one.clone(),
        many => format!("{} problems:\n  - {}", many.len(), many.join("\n  - ")),
    };
    Err(Error::new(ErrorKind::Setup, text).at(format!("flow `{}`", flow.name)))
}

fn names(flow: &Flow, problems: &mut Vec<String>) {
    let mut seen = HashSet::new();
    let mut reported = HashSet::new();
    for entry in &flow.entries {
        if !seen.insert(&entry.name) && reported.insert(&entry.name) {
            problems.push(format!("two operators are named `{}`: give each its own name", entry.name));
        }
    }
}

/// Checks that every port is connected within this flow, and only once, except for `Inputs` and for outputs whose
/// messages can fork.
fn ports(flow: &Wiring<'_>, problems: &mut Vec<String>) {
    let (mut used, mut reported, mut made) = (HashSet::new(), HashSet::new(), HashMap::new());
    let alone: HashSet<_> =
        flow.connections.iter().filter(|connection| !connection.forks).map(|connection| connection.from).collect();
    for connection in &flow.connections {
        let own: Vec<PortId> = [connection.from, connection.to].into_iter().filter(|id| id.flow == flow.id).collect();
        let what = match &own[..] {
            [_, _] => None,
            [one] => Some(format!("port `{}` is connected to a port of another flow", port_name(flow, *one))),
            _ => Some("two ports of other flows are connected here".into()),
        };
        problems.extend(what.map(|what| format!("{what}: connect ports of operators that were added to this flow")));
        let times = made.entry((connection.from, connection.to)).or_insert(0);
        *times += 1;
        let is_own = own.len() == 2;
        let mut repeated = false;
        for id in own {
            let instead = match decl(flow, id).kind {
                PortKind::Inputs | PortKind::Link(_) => None,
                PortKind::Input => Some("for messages of several outputs, use an `Inputs<..>`"),
                PortKind::Output if !alone.contains(&id) => None,
                PortKind::Output => Some("connect all readers in one call, `connect(out, [one.input, other.input])`"),
            };
            let again = !used.insert((id.operator, id.port));
            match instead.filter(|_| again) {
                Some(_) if *times > 1 => repeated = is_own,
                Some(instead) if reported.insert((id.operator, id.port)) => {
                    problems.push(format!("port `{}` is connected more than once: {instead}", port_name(flow, id)));
                }
                _ => {}
            }
        }
        if repeated && *times == 2 {
            problems.push(format!(
                "output `{}` is connected to input `{}` more than once: connect the two once",
                port_name(flow, connection.from),
                port_name(flow, connection.to)
            ));
        }
    }
    for link in &flow.links {
        if link.port.flow != flow.id {
            problems.push(format!(
                "port `{}` of another flow is linked to hub `{}` here: link ports of operators that were added to this flow",
                link.port.name,
                link.hub.name()
            ));
        } else if !used.insert((link.port.operator, link.port.port)) {
            problems.push(format!("port `{}` is linked more than once: link it once", port_name(flow, link.port)));
        }
    }
    for (operator, entry) in flow.entries.iter().enumerate() {
        for (port, decl) in entry.ports.iter().enumerate() {
            if !used.contains(&(operator, port)) {
                problems.push(match decl.kind {
                    PortKind::Output => format!("output `{}.{}` is not connected", entry.name, decl.name),
                    PortKind::Link(_) => format!(
                        "port `{}.{}` is not linked to a hub: `flow.link({}.{}, &hub)`",
                        entry.name, decl.name, entry.name, decl.name
                    ),
                    _ => format!("input `{}.{}` is not connected", entry.name, decl.name),
                });
            }
        }
    }
}

/// Checks that the hubs of chunks have what their links need, and that the linked operators may have links.
fn links(flow: &Wiring<'_>, problems: &mut Vec<String>) {
    if flow.links.iter().any(|link| link.port.flow != flow.id) {
        return;
    }
    let optional = |port| decl(flow, port).need.optional;
    let filled: Vec<_> = flow.entries.iter().flat_map(|entry| lock(&entry.place).fills.clone()).collect();
    link::problems(&flow.links, |port| port_name(flow, port), |port| device(flow, port), optional, &filled, problems);
    for link in &flow.links {
        let (port, entry) = (port_name(flow, link.port), &flow.entries[link.port.operator]);
        if entry.workers > 0 {
            problems.push(format!(
                "port `{port}` is linked to a hub of chunks, but `{}` has several runs at a time, which would share its \
                 chunk: remove either the port or `concurrent`",
                entry.name
            ));
        }
        if is_named(flow, link.port) {
            problems.push(format!(
                "a condition names port `{port}`, which is linked to a hub of chunks and waits for its chunk by itself: \
                 make the port `optional`, or remove the condition"
            ));
        }
    }
}

/// Checks that the conditions of operators can become ready.
fn conditions(flow: &Wiring<'_>, problems: &mut Vec<String>) {
    for (operator, entry) in flow.entries.iter().enumerate() {
        let ids = entry.ports.iter().enumerate();
        let ids = ids.map(|(port, decl)| PortId { flow: flow.id, operator, port, name: decl.name });
        let known: Vec<_> = ids.map(|id| (id, facts(flow, id))).collect();
        for ((id, facts), decl) in known.iter().zip(&entry.ports) {
            let default =
                if decl.kind == PortKind::Output { decl.room == Room::default() } else { decl.need.is_default() };
            if default || matches!(decl.kind, PortKind::Link(_)) || is_named(flow, *id) {
                continue;
            }
            let problem = facts.and_then(|PortFacts { capacity, latest, .. }| match (decl.kind, decl.room) {
                // Whether a hub has enough room is checked with the hub's plan.
                (PortKind::Output, Room::For(0)) => room_problem(0, capacity),
                (PortKind::Output, _) => None,
                _ => decl.need.problem(capacity, latest),
            });
            problems.extend(problem.map(|problem| format!("port `{}.{}` {problem}", entry.name, decl.name)));
        }
        let mut own = Vec::new();
        let find = |port| known.iter().find(|(id, _)| *id == port).and_then(|(_, facts)| *facts);
        // User-defined conditions are called with no lock held, and put back even if one panics.
        let mut conditions = std::mem::take(&mut lock(&entry.place).conditions);
        let asked =
            catch_unwind(AssertUnwindSafe(|| conditions.iter().for_each(|when| when.problems(&find, &mut own))));
        let mut place = lock(&entry.place);
        conditions.append(&mut place.conditions);
        place.conditions = conditions;
        drop(place);
        if let Err(panic) = asked {
            own.push(format!("has a condition that panicked as it was checked: {}", panic_message(panic)));
        }
        problems.extend(own.into_iter().map(|problem| format!("operator `{}` {problem}", entry.name)));
    }
}

/// The capacity and kind of a port's hubs. `None` if it is not connected.
fn facts(flow: &Wiring<'_>, port: PortId) -> Option<PortFacts> {
    if decl(flow, port).kind == PortKind::Output {
        // Every hub must have room; a hub that drops messages has room for any number.
        let own = flow.leaving(port).map(|(_, connection)| connection).filter(|own| own.to.flow == flow.id);
        let room =
            own.map(
                |own| if wanted(flow, own).when_full.blocks_writer() { hubs::capacity(flow, own) } else { usize::MAX },
            );
        return Some(PortFacts { capacity: room.min()?, is_input: false, latest: false });
    }
    // The messages of all connections are counted together.
    let own = || flow.arriving(port.operator).filter(|own| own.to == port && own.from.flow == flow.id);
    let capacity = own().map(|own| hubs::capacity(flow, own)).reduce(usize::saturating_add)?;
    let latest = own().all(|own| wanted(flow, own).when_full.keeps_latest());
    Some(PortFacts { capacity, is_input: true, latest })
}

/// Whether the operator runs only when this port, or one of several, has a message or room for one.
pub(super) fn waits_at(flow: &Flow, port: PortId) -> bool {
    !decl(flow, port).need.optional || is_named(flow, port)
}

/// The name of a port whose operator runs only when each of its connections has a message.
pub(super) fn waits_for_each(flow: &Flow, port: PortId) -> Option<&'static str> {
    let decl = decl(flow, port);
    let of_each = decl.kind == PortKind::Inputs && decl.need.is_default() && !is_named(flow, port);
    of_each.then_some(decl.name)
}

/// Whether a condition of the operator names this port, which replaces the condition of the port's attribute.
pub(super) fn is_named(flow: &Flow, port: PortId) -> bool {
    let place = lock(&flow.entries[port.operator].place);
    condition::named_ports(&place.conditions).iter().any(|(named, _)| *named == port)
}

fn pooled(flow: &Flow) -> impl Iterator<Item = (usize, StreamPool)> {
    flow.entries.iter().enumerate().filter_map(|(operator, entry)| Some((operator, lock(&entry.place).pool.clone()?)))
}

/// Checks that a pool's streams belong to the device of its operators, and that an operator with a pool is not set to
/// have no stream.
fn pools(flow: &Flow, problems: &mut Vec<String>) {
    for (operator, pool) in pooled(flow) {
        let (name, device) = (&flow.entries[operator].name, device_of(flow, operator));
        if lock(&flow.entries[operator].place).without_own_stream {
            problems.push(format!(
                "operator `{name}` has the stream pool `{}`, but is set to have no stream of its own: remove either \
                 `.streams(..)` or `.without_own_stream()`",
                pool.name()
            ));
        }
        if device != *pool.device() {
            let (on, of) = (if device.is_host() { "the host" } else { device.name() }, pool.device());
            let again = if on == of.name() { ", which was opened another time" } else { "" };
            problems.push(format!(
                "operator `{name}` is on {on}, but its stream pool `{}` is on {of}{again}: use a pool on the operator's \
                 device, or put the operator on the pool's",
                pool.name()
            ));
        }
    }
}

/// Checks that an allocator's memory is on its operator's device or on the host, and that memory is reserved for one
/// run at a time.
fn allocators(flow: &Flow, problems: &mut Vec<String>) {
    for (operator, entry) in flow.entries.iter().enumerate() {
        let (name, device, place) = (&entry.name, device_of(flow, operator), lock(&entry.place));
        let reserved = condition::reservations(&place.conditions);
        let named = reserved.iter().map(|reserved| (reserved.allocator(), "waits for memory of", "name"));
        let given = place.allocator.iter().map(|allocator| (allocator, "is given", "give it"));
        for (allocator, does, instead) in given.chain(named) {
            if !allocator.is_host() && *allocator.device() != device {
                let on = if device.is_host() { "the host" } else { device.name() };
                problems.push(format!(
                    "operator `{name}` is on {on}, but {does} {allocator}: {instead} an allocator on its own device"
                ));
            }
        }
        // Each condition would reserve the same memory, and each could take it from the other again and again.
        for (at, one) in reserved.iter().enumerate() {
            let own = || reserved.iter().filter(|other| other.allocator() == one.allocator());
            if own().count() > 1 && !reserved[..at].iter().any(|before| before.allocator() == one.allocator()) {
                let each: Vec<_> = own().map(|own| own.asked().to_string()).collect();
                problems.push(format!(
                    "operator `{name}` waits for {} bytes of {}, in several conditions: combine them into one \
                     `.when(memory(..))`, for the total that a run needs",
                    each.join(" and for "),
                    one.allocator()
                ));
            }
        }
        if entry.workers > 0 && !reserved.is_empty() {
            problems.push(format!(
                "operator `{name}` has several runs at a time, but memory is reserved for one run: remove either \
                 `concurrent` or `.when(memory(..))`"
            ));
        }
    }
}

/// Checks that the runtime has timers if operators need them. A flow that is checked outside a runtime is not run
/// there.
fn timers(flow: &Flow, problems: &mut Vec<String>) {
    let mut waits = Vec::new();
    for (operator, entry) in flow.entries.iter().enumerate() {
        let ids = entry.ports.iter().enumerate();
        let ids = ids.map(|(port, decl)| (PortId { flow: flow.id, operator, port, name: decl.name }, decl));
        for (id, decl) in ids.filter(|(_, decl)| decl.need.within.is_some()) {
            if !is_named(flow, id) {
                waits.push((&entry.name, format!("{} at `{}`", decl.need.describe(), decl.name)));
            }
        }
        let own = condition::needing_timers(&lock(&entry.place).conditions);
        waits.extend(own.into_iter().map(|condition| (&entry.name, condition.into_owned())));
    }
    if !waits.is_empty() && !spawn::has_timers() {
        problems.extend(waits.into_iter().map(|(name, condition)| {
            format!(
                "operator `{name}` waits for {condition}, but this tokio runtime has no timers: build it with `enable_time` or \
                 `enable_all`"
            )
        }));
    }
}

/// Checks that operators with their own thread can be moved there, and that the cores to pin them to exist.
fn own_threads(flow: &Flow, problems: &mut Vec<String>) {
    for entry in &flow.entries {
        let Some(plan) = lock(&entry.place).own_thread else { continue };
        let name = &entry.name;
        if entry.stays {
            problems.push(format!(
                "operator `{name}` is set to run on its own thread, but a `LocalOperator` stays on its flow's thread: \
                 make it an `Operator`, or remove `on_own_thread`"
            ));
        }
        if entry.workers > 0 {
            problems.push(format!(
                "operator `{name}` is set to run on its own thread, but its concurrent runs are tasks of the runtime: \
                 remove either `on_own_thread` or `concurrent`"
            ));
        }
        // There are no threads in a simulation.
        let Some(core) = plan.core.filter(|_| !spawn::in_simulation()) else { continue };
        if let Err(error) = thread::try_core(core) {
            problems.push(match error.kind() {
                io::ErrorKind::Unsupported => format!(
                    "operator `{name}` is set to be pinned to core {core}, but this system does not support pinning: \
                     use `on_own_thread`"
                ),
                _ => format!(
                    "operator `{name}` is set to be pinned to core {core}, but this process has no such core: cores are \
                     counted from 0, and the process has {}",
                    available_parallelism().map_or("fewer".to_string(), |count| count.to_string())
                ),
            });
        }
    }
}

/// Checks the number of concurrent runs: each is a clone of the operator and a task.
fn concurrency(flow: &Flow, problems: &mut Vec<String>) {
    /// The most concurrent runs of one operator.
    const MAX_WORKERS: usize = 1 << 16;
    for entry in flow.entries.iter().filter(|entry| entry.workers > MAX_WORKERS) {
        problems.push(format!(
            "operator `{}` is set to {} runs at a time, each with a clone of the operator: use at most {MAX_WORKERS}",
            entry.name, entry.workers
        ));
    }
}

/// Warns of pools with fewer streams than operators: an operator that gets none works on the streams of others, which
/// is correct, but rarely intended.
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
            logged(|| {
                tracing::warn!(
                    pool = pool.name(),
                    maximum = pool.maximum(),
                    operators = sharers.join(", "),
                    "a pool has fewer streams than operators that share it: some operators will have no stream of their own"
                );
            });
        }
    }
}

/// The hub of a connection: the settings of `connect_with` come first, then those of the ports' attributes.
pub(super) fn wanted(flow: &Flow, connection: &Connection) -> HubOptions {
    connection.hub.or(decl(flow, connection.to).hub).or(decl(flow, connection.from).hub)
}

pub(super) fn device(flow: &Flow, port: PortId) -> Device {
    device_of(flow, port.operator)
}

pub(super) fn device_of(flow: &Flow, operator: usize) -> Device {
    lock(&flow.entries[operator].place).device.clone().unwrap_or_else(Device::host)
}

pub(super) fn decl(flow: &Flow, port: PortId) -> &PortDecl {
    &flow.entries[port.operator].ports[port.port]
}

pub(super) fn hub_name(flow: &Flow, connection: &Connection) -> String {
    format!("{} -> {}", port_name(flow, connection.from), port_name(flow, connection.to))
}

pub(super) fn port_name(flow: &Flow, port: PortId) -> String {
    format!("{}.{}", flow.entries[port.operator].name, decl(flow, port).name)
}
