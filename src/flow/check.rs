//! What can be known before a flow runs: every problem is found and all are reported at once; then each hub's size and
//! place follow.

use std::{
    collections::HashSet,
    io,
    sync::{Arc, atomic::AtomicUsize},
    thread::available_parallelism,
};

use super::{Checked, Connection, Copied, Flow, link, section, spawn, thread, wiring::Wiring};
use crate::{
    condition::{self, Need, PortFacts, PortId, Room, room_problem},
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::{self, Hub, Since, fan, link::LinkPlan, queue::Full},
    operator::{PortDecl, PortKind},
    stream::StreamPool,
    sync::lock,
};

/// What is known of a flow that can run.
pub(super) struct Planned {
    /// One for every connection, in their order.
    pub(super) links: Vec<LinkPlan>,
    /// What is worth telling.
    pub(super) checked: Checked,
    pub(super) sections: Vec<section::Plan>,
}

/// Finds every problem, or plans the flow.
pub(super) fn plan(flow: &Flow) -> Result<Planned> {
    let (flow, mut problems) = (&Wiring::new(flow), Vec::new());
    names(flow, &mut problems);
    ports(flow, &mut problems);
    pools(flow, &mut problems);
    allocators(flow, &mut problems);
    conditions(flow, &mut problems);
    own_threads(flow, &mut problems);
    links(flow, &mut problems);
    let sections = section::plans(flow, &mut problems);
    let mut plans = hubs(flow, &mut problems);
    if problems.is_empty() {
        warn_of_small_pools(flow);
        ends_with(flow, &mut plans);
        let checked = Checked { copies: copies(flow, &plans) };
        return Ok(Planned { links: plans, checked, sections });
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

/// Every port is connected, to this flow, and once, unless it is one for many, or an output whose messages can fork.
fn ports(flow: &Wiring<'_>, problems: &mut Vec<String>) {
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
            let instead = match decl(flow, id).kind {
                PortKind::Inputs | PortKind::Link(_) => None,
                PortKind::Input => Some("an `Inputs<..>` can be"),
                PortKind::Output if flow.leaving(id).all(|(_, branch)| branch.forks) => None,
                PortKind::Output => Some("name its readers together, `connect(out, [one.input, other.input])`"),
            };
            let again = !used.insert((id.operator, id.port));
            if let Some(instead) = instead.filter(|_| again && told.insert((id.operator, id.port))) {
                problems.push(format!("port `{}` is connected more than once: {instead}", port_name(flow, id)));
            }
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
            problems.push(format!("port `{}` is linked more than once: to one hub", port_name(flow, link.port)));
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

/// The hubs of chunks have what their links need, and their operators can have links.
fn links(flow: &Wiring<'_>, problems: &mut Vec<String>) {
    if flow.links.iter().any(|link| link.port.flow != flow.id) {
        return;
    }
    let optional = |port| decl(flow, port).need.optional;
    link::problems(&flow.links, |port| port_name(flow, port), |port| device(flow, port), optional, problems);
    for link in &flow.links {
        let (port, entry) = (port_name(flow, link.port), &flow.entries[link.port.operator]);
        if entry.workers > 0 {
            problems.push(format!(
                "port `{port}` is linked to a hub of chunks, and `{}` has several runs at a time, which would share its \
                 chunk: say one or the other",
                entry.name
            ));
        }
        if is_named(flow, link.port) {
            problems.push(format!(
                "a condition names port `{port}`, which is linked to a hub of chunks and waits for its chunk by itself: \
                 make it `optional`, or leave it to that"
            ));
        }
    }
}

/// What operators wait for can happen.
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
                // Whether a hub has so much room is a matter of the hub's plan.
                (PortKind::Output, Room::For(0)) => room_problem(0, capacity),
                (PortKind::Output, _) => None,
                _ => decl.need.problem(capacity, latest),
            });
            problems.extend(problem.map(|problem| format!("port `{}.{}` {problem}", entry.name, decl.name)));
        }
        let mut own = Vec::new();
        let find = |port| known.iter().find(|(id, _)| *id == port).and_then(|(_, facts)| *facts);
        for when in &lock(&entry.place).conditions {
            when.problems(&find, &mut own);
        }
        problems.extend(own.into_iter().map(|problem| format!("operator `{}` {problem}", entry.name)));
    }
}

/// What is known of a port; `None` if it is not connected.
fn facts(flow: &Wiring<'_>, port: PortId) -> Option<PortFacts> {
    if decl(flow, port).kind == PortKind::Output {
        // Room has to be everywhere, and one that drops messages has it for any number.
        let own = flow.leaving(port).map(|(_, connection)| connection).filter(|own| own.to.flow == flow.id);
        let room = own.map(|own| if wanted(flow, own).full == Full::Hold { capacity(flow, own) } else { usize::MAX });
        return Some(PortFacts { capacity: room.min()?, is_input: false, latest: false });
    }
    // Messages count wherever they came from.
    let own = || flow.arriving(port.operator).filter(|own| own.to == port && own.from.flow == flow.id);
    let capacity = own().map(|own| capacity(flow, own)).reduce(usize::saturating_add)?;
    let latest = own().all(|own| wanted(flow, own).full == Full::Replace);
    Some(PortFacts { capacity, is_input: true, latest })
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
    flow.entries.iter().enumerate().filter_map(|(operator, entry)| Some((operator, lock(&entry.place).pool.clone()?)))
}

/// A pool's streams are on its operators' device; and who has a pool was not asked to have no stream.
fn pools(flow: &Flow, problems: &mut Vec<String>) {
    for (operator, pool) in pooled(flow) {
        let (name, device) = (&flow.entries[operator].name, device_of(flow, operator));
        if lock(&flow.entries[operator].place).without_own_stream {
            problems.push(format!(
                "operator `{name}` is given the pool of streams `{}` and is to have no stream of its own: say one or the \
                 other, `.streams(..)` or `.without_own_stream()`",
                pool.name()
            ));
        }
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

/// An allocator's memory is on its operator's device, or of the host; and what is set apart for a run is one run's.
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
                    "operator `{name}` is on {on}, and {does} {allocator}: {instead} an allocator of its own device"
                ));
            }
        }
        // Each would be ready for the same memory, and one could take it from the other for ever.
        for (at, one) in reserved.iter().enumerate() {
            let own = || reserved.iter().filter(|other| other.allocator() == one.allocator());
            if own().count() > 1 && !reserved[..at].iter().any(|before| before.allocator() == one.allocator()) {
                let each: Vec<_> = own().map(|own| own.asked().to_string()).collect();
                problems.push(format!(
                    "operator `{name}` waits for {} bytes of {}, in several conditions: write one, `.when(memory(..))`, \
                     for as much as a run needs in all",
                    each.join(" and for "),
                    one.allocator()
                ));
            }
        }
        if entry.workers > 0 && !reserved.is_empty() {
            problems.push(format!(
                "operator `{name}` has several runs at a time, and memory is set apart for one: say one or the other, \
                 `concurrent` or `.when(memory(..))`"
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
        if entry.workers > 0 {
            problems.push(format!(
                "operator `{name}` is to have a thread of its own, and its concurrent runs go on in tasks of the runtime: \
                 say one or the other, `on_own_thread` or `concurrent`"
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
    lock(&flow.entries[operator].place).pool.as_ref().map_or(0, StreamPool::priority)
}

/// The connections whose sizes and places can be known: those within the flow.
fn within(flow: &Flow) -> impl Iterator<Item = &Connection> {
    flow.connections.iter().filter(|connection| connection.from.flow == flow.id && connection.to.flow == flow.id)
}

/// Whether of an output's readers this is the one that is sent the messages themselves.
fn is_heir(flow: &Wiring<'_>, connection: &Connection) -> bool {
    if !connection.forks {
        return true;
    }
    let writer = device(flow, connection.from);
    let branches = flow.leaving(connection.from).map(|(_, branch)| branch).filter(|branch| branch.to.flow == flow.id);
    let drops = |branch: &&Connection| wanted(flow, branch).full != Full::Hold;
    let heir = fan::heir(branches, drops, |branch| device(flow, branch.to) == writer);
    heir.is_none_or(|heir| std::ptr::eq(heir, connection))
}

fn hubs(flow: &Wiring<'_>, problems: &mut Vec<String>) -> Vec<LinkPlan> {
    let near = pinned_for(flow);
    within(flow).map(|connection| plan_of(flow, connection, &near, problems)).collect()
}

fn plan_of(flow: &Wiring<'_>, connection: &Connection, near: &Device, problems: &mut Vec<String>) -> LinkPlan {
    let name = hub_name(flow, connection);
    let hub = wanted(flow, connection);
    let (writer, reader) = (device(flow, connection.from), device(flow, connection.to));
    let forks = !is_heir(flow, connection);
    let PortDecl { carries_envelopes: carries, element_bytes, .. } = *decl(flow, connection.from);
    let mut problem = |what: String| problems.push(format!("hub `{name}`: {what}"));

    let mut sized = |what: &str, number: Option<usize>, default: usize| {
        hub::at_least_one(what, number.unwrap_or(default)).unwrap_or_else(|_| {
            problem(format!("its {what} is 0, and nothing could ever pass: at least 1"));
            default
        })
    };
    let least = needs(flow, connection);
    let capacity = sized("capacity", hub.capacity, least);
    // The writer's blanks are lent by one hub alone.
    let writer_bytes = said(flow, connection.from).filter(|_| carries && !forks);
    // A run keeps those that it has filled until it is its turn.
    let workers = flow.entries[connection.from.operator].workers;
    let kept = writer_bytes.map_or(0, |_| workers.saturating_mul(needs_at(flow, connection.from).max(1)));
    let usual = hub.default_envelopes(least).max(if kept > 0 { kept.saturating_add(1) } else { 0 });
    let envelopes = sized("number of envelopes", hub.envelopes, usual);
    if let Some(bytes) = hub.envelope_bytes {
        sized("envelopes' size", Some(bytes), 1);
        if !carries {
            problem("it is given a size of envelopes, and its messages carry none".into());
        } else if (1..element_bytes).contains(&bytes) {
            problem(format!("its envelopes' {bytes} bytes hold no element of {element_bytes}"));
        }
    }
    if carries && hub.full != Full::Hold && envelopes < hub.default_envelopes(least) {
        let needs = hub.default_envelopes(least);
        problem(format!(
            "it drops messages to hold nobody up, and its {envelopes} envelopes would: it needs {needs}, one for each \
             message that it queues, one for the writer and one for the reader"
        ));
    }
    if !writer.copies_with(&reader) {
        problem(format!("{writer} and {reader} are devices of different makes: put an operator on the host between"));
    }
    let elsewhere = carries && (forks || writer != reader);
    let reader_bytes = match size(flow, connection.from, &mut Vec::new()) {
        _ if !elsewhere => None,
        Some(bytes) => Some(bytes),
        None => {
            problem(format!(
                "nobody says how large its envelopes are, and `{}` is not passed any on: write \
                 `#[output(envelope_bytes = ..)]` or `Hub::envelope_bytes`",
                flow.entries[connection.from.operator].name
            ));
            None
        }
    };
    if envelopes < kept {
        let writer = &flow.entries[connection.from.operator].name;
        problem(format!(
            "`{writer}` has {workers} runs at a time, which keep {kept} envelopes until it is their turn, and it has \
             {envelopes}: give it {kept} or more, `Hub::envelopes`"
        ));
    }
    let room = needs_at(flow, connection.from);
    let waits = || format!("`{}` waits for room for {room} messages", port_name(flow, connection.from));
    // What a condition waits for was looked at with the others of its operator.
    if room > capacity && hub.full == Full::Hold && !is_named(flow, connection.from) {
        problem(format!("{}, and its queue holds {capacity}: give it a capacity of {room} or more", waits()));
    }
    let lent = writer_bytes.is_some() || (carries && forks);
    if lent && room > envelopes {
        problem(format!("{}, and it has {envelopes} envelopes: give it {room} or more, `Hub::envelopes`", waits()));
    }
    let passes = writer_bytes.is_some() || reader_bytes.is_some();
    let waited_for = certainly_needs(flow, connection.to);
    if passes && waited_for > envelopes {
        let waits = format!("`{}` waits for {waited_for} messages", port_name(flow, connection.to));
        problem(format!("{waits}, and it has {envelopes} envelopes: give it {waited_for} or more, `Hub::envelopes`"));
    }
    let near = [&reader, &writer].into_iter().find(|device| !device.is_host()).unwrap_or(near).clone();
    LinkPlan {
        name: name.into(),
        capacity,
        full: hub.full,
        ends_with: None,
        envelopes,
        writer_bytes,
        reader_bytes,
        forks,
        writer,
        reader,
        near,
        mode: flow.mode,
        priority: priority(flow, connection.from.operator).min(priority(flow, connection.to.operator)),
        times: times(flow, connection.to),
        stepped: false,
        captured: None,
    }
}

/// The hubs that keep the latest end together, where their reader has no other input that ends it.
fn ends_with(flow: &Flow, plans: &mut [LinkPlan]) {
    let mut inputs = vec![Vec::new(); flow.entries.len()];
    within(flow).enumerate().for_each(|(at, connection)| inputs[connection.to.operator].push(at));
    for inputs in inputs {
        if inputs.iter().all(|at| plans[*at].full == Full::Replace) {
            let open = Arc::new(AtomicUsize::new(inputs.len()));
            inputs.into_iter().for_each(|at| plans[at].ends_with = Some(open.clone()));
        }
    }
}

/// The hubs that copy what is at their readers' already: what is sent is there, or another fork of it is.
fn copies(flow: &Wiring<'_>, plans: &[LinkPlan]) -> Vec<Copied> {
    let copied = flow.connections.iter().zip(plans).enumerate().filter_map(|(at, (connection, plan))| {
        let there = flow.leaving(connection.from).any(|(other, _)| {
            let theirs = &plans[other];
            other != at && theirs.reader == plan.reader && (!theirs.forks || other < at)
        });
        let envelope_bytes = plan.reader_bytes.filter(|_| plan.forks && (there || plan.reader == plan.writer))?;
        Some(Copied { hub: plan.name.clone(), device: plan.reader.clone(), envelope_bytes })
    });
    copied.collect()
}

/// How many messages a connection's queue has to hold, by what its operators wait for there.
fn needs(flow: &Flow, connection: &Connection) -> usize {
    needs_at(flow, connection.from).max(needs_at(flow, connection.to)).max(hub::DEFAULT_CAPACITY)
}

/// How many messages, or room for how many, an operator waits for at a port.
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

/// How many messages have to lie in the one queue of a port before its operator runs, however long that takes.
fn certainly_needs(flow: &Flow, port: PortId) -> usize {
    let decl = decl(flow, port);
    let certain = |need: &Need| need.within.is_none() && !need.optional && decl.kind == PortKind::Input;
    if !is_named(flow, port) {
        return if certain(&decl.need) { decl.need.least } else { 0 };
    }
    let place = lock(&flow.entries[port.operator].place);
    let named = condition::named(&place.conditions).into_iter().filter(|(named, _)| *named == port);
    named.filter_map(|(_, need)| need.filter(certain)).map(|need| need.least).max().unwrap_or(0)
}

/// How many it holds: as many as was said, and otherwise as it has to.
fn capacity(flow: &Flow, connection: &Connection) -> usize {
    wanted(flow, connection).capacity.unwrap_or_else(|| needs(flow, connection))
}

/// What `connect_with` said, then what the ports' attributes say.
pub(super) fn wanted(flow: &Flow, connection: &Connection) -> Hub {
    connection.hub.or(decl(flow, connection.to).hub).or(decl(flow, connection.from).hub)
}

/// Bytes of the largest blank envelope that an output is said to have.
fn said(flow: &Wiring<'_>, output: PortId) -> Option<usize> {
    let branches = flow.leaving(output).filter(|(_, branch)| branch.to.flow == flow.id);
    branches.filter_map(|(_, branch)| wanted(flow, branch).envelope_bytes).max()
}

/// Bytes of the largest envelope that an output can send: a blank, or one of those that its operator is passed.
fn size(flow: &Wiring<'_>, output: PortId, seen: &mut Vec<PortId>) -> Option<usize> {
    if let Some(bytes) = said(flow, output) {
        return Some(bytes);
    }
    if seen.contains(&output) {
        return None;
    }
    seen.push(output);
    let passed_on = flow
        .arriving(output.operator)
        .filter(|other| other.from.flow == flow.id && decl(flow, other.to).carries_envelopes);
    passed_on.filter_map(|other| size(flow, other.from, seen)).max()
}

/// Host memory between two operators on the host may later be copied to a device of the flow.
fn pinned_for(flow: &Flow) -> Device {
    let devices = flow.entries.iter().filter_map(|entry| lock(&entry.place).device.clone());
    devices.into_iter().find(|device| !device.is_host()).unwrap_or_else(Device::host)
}

fn device(flow: &Flow, port: PortId) -> Device {
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
