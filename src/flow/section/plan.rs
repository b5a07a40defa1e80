//! The plan of a section, and its check before the flow runs.
//!
//! ```text
//!   connections    both ends within ──> interior      one end within ──> the boundary, an input or an output
//!   operators      sorted so that each comes after the operators whose messages it takes
//! ```

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, HashSet},
    sync::Arc,
};

use super::{Inspect, Section, Settings, USUAL_SHAPES, graph_table::Lengths};
use crate::{
    condition::{PortId, Room},
    device::Device,
    flow::{Connection, added::OperatorSlot, check, link, wiring::Wiring},
    operator::{PortDecl, PortKind},
    sync::{Mutex, lock},
};

/// A section that can run.
#[derive(Clone)]
pub(in crate::flow) struct SectionPlan {
    pub(in crate::flow) name: Arc<str>,
    /// The operators' numbers in the flow, in the order of their messages.
    pub(in crate::flow) members: Vec<usize>,
    pub(super) device: Device,
    pub(super) inputs: Vec<BoundaryPort>,
    pub(super) outputs: Vec<BoundaryPort>,
    /// In the order of the operators, and of the ports of each.
    pub(super) arrivals: Vec<Arrival>,
    pub(in crate::flow) interior: Vec<usize>,
    pub(super) buckets: Option<Vec<usize>>,
    pub(super) row_bytes: Lengths,
    pub(super) at_start: bool,
    pub(super) most: usize,
    pub(super) checked: bool,
    pub(super) inspect: Option<Inspect>,
}

#[derive(Clone, Copy)]
pub(super) enum Arrival {
    /// At this input of the section.
    Boundary(usize),
    /// From another operator of the section, by their positions in the order.
    Within { from: usize, to: usize },
}

/// A port on the section's boundary.
#[derive(Clone)]
pub(super) struct BoundaryPort {
    /// The position of its operator in the order.
    pub(super) member: usize,
    pub(super) port: &'static str,
    pub(super) element_bytes: usize,
    /// For an output: its messages do not have the rows of the inputs.
    pub(super) whole: bool,
}

/// A plan for each of a flow's sections.
pub(in crate::flow) fn plans(flow: &Wiring<'_>, problems: &mut Vec<String>) -> Vec<SectionPlan> {
    let (mut names, mut taken) = (HashSet::new(), HashSet::new());
    let numbers = flow.entries.iter().enumerate().map(|(number, entry)| (Arc::as_ptr(&entry.place), number));
    let numbers: HashMap<_, _> = numbers.collect();
    let mut plans = Vec::new();
    for section in &flow.sections {
        let before = problems.len();
        let mut problem = |what: String| problems.push(format!("section `{}`: {what}", section.name));
        if !names.insert(&section.name) {
            problem("another section has the same name: give each its own".into());
        }
        let Some(members) =
            members(section, |place| numbers.get(&Arc::as_ptr(place)).copied(), &mut taken, &mut problem)
        else {
            continue;
        };
        let plan = Planner::new(flow, &members, &section.settings).plan(section, &mut problem);
        if problems.len() == before {
            plans.extend(plan);
        }
    }
    plans
}

/// The numbers of its operators. `number`: the number of an operator, if it belongs to the flow.
fn members(
    section: &Section,
    number: impl Fn(&Arc<Mutex<OperatorSlot>>) -> Option<usize>,
    taken: &mut HashSet<usize>,
    problem: &mut impl FnMut(String),
) -> Option<Vec<usize>> {
    let (mut members, mut own, mut wrong) = (Vec::new(), HashSet::new(), false);
    for (name, place) in &section.members {
        let what = match number(place) {
            None => format!("operator `{name}` belongs to another flow: name operators of this flow"),
            Some(at) if !own.insert(at) => format!("operator `{name}` is named twice: name it once"),
            Some(at) if !taken.insert(at) => format!("operator `{name}` is also in another section: it can be in one"),
            Some(at) => {
                members.push(at);
                continue;
            }
        };
        problem(what);
        wrong = true;
    }
    if members.is_empty() && !wrong {
        problem("it has no operators: name at least one".into());
    }
    (!wrong && !members.is_empty()).then_some(members)
}

struct Planner<'a> {
    flow: &'a Wiring<'a>,
    members: &'a [usize],
    settings: &'a Settings,
    own: HashSet<usize>,
    interior: Vec<(usize, &'a Connection)>,
    /// By operator: its incoming connections within the section.
    before: HashMap<usize, Vec<&'a Connection>>,
}

impl<'a> Planner<'a> {
    fn new(flow: &'a Wiring<'a>, members: &'a [usize], settings: &'a Settings) -> Self {
        let own: HashSet<usize> = members.iter().copied().collect();
        let has = |port: PortId| port.flow == flow.id && own.contains(&port.operator);
        let interior = flow.connections.iter().enumerate();
        let interior: Vec<_> = interior.filter(|(_, connection)| has(connection.from) && has(connection.to)).collect();
        let mut before: HashMap<_, Vec<_>> = HashMap::new();
        for (_, connection) in &interior {
            before.entry(connection.to.operator).or_default().push(*connection);
        }
        Self { flow, members, settings, own, interior, before }
    }

    fn plan(&self, section: &Section, problem: &mut impl FnMut(String)) -> Option<SectionPlan> {
        let device = self.operators(problem)?;
        self.sizes(problem);
        let order = self.order(problem)?;
        self.is_connected(problem);
        self.is_one_step(problem);
        let (mut inputs, mut outputs, mut arrivals) = (Vec::new(), Vec::new(), Vec::new());
        let places: HashMap<_, _> = order.iter().enumerate().map(|(at, operator)| (*operator, at)).collect();
        let whole: HashSet<_> = self.settings.whole.iter().collect();
        for (member, &operator) in order.iter().enumerate() {
            for (port, decl) in self.flow.entries[operator].ports.iter().enumerate() {
                let id = PortId { flow: self.flow.id, operator, port, name: decl.name };
                self.port(id, decl, problem);
                for link in self.before(operator).iter().filter(|link| link.to == id) {
                    let from = places.get(&link.from.operator);
                    arrivals.extend(from.map(|from| Arrival::Within { from: *from, to: member }));
                }
                if self.is_at_boundary(id, problem) {
                    let edge = BoundaryPort {
                        member,
                        port: decl.name,
                        element_bytes: decl.element_bytes.max(1),
                        whole: whole.contains(&id) || self.settings.buckets.is_none(),
                    };
                    if !decl.is_envelope {
                        problem(format!(
                            "the messages at `{}`, on its boundary, are not plain envelopes: only `Envelope<T>` can cross it; \
                             add the operator on the other side to the section, or leave this one out",
                            check::port_name(self.flow, id)
                        ));
                    }
                    if decl.kind == PortKind::Output {
                        outputs.push(edge);
                    } else {
                        arrivals.push(Arrival::Boundary(inputs.len()));
                        inputs.push((id, edge));
                    }
                }
            }
        }
        if inputs.is_empty() {
            problem("no message enters it from outside, so it would never run: connect one of its inputs to an operator outside".into());
        }
        self.named_ports(&inputs, &outputs, &order, problem);
        // If a port is named several times, the last one counts.
        let rows: HashMap<_, _> = self.settings.rows.iter().copied().collect();
        let rows = |id: &PortId| rows.get(id).map_or(1, |rows| (*rows).max(1));
        let row_bytes = inputs.iter().map(|(id, edge)| rows(id).saturating_mul(edge.element_bytes));
        let row_bytes: Lengths = row_bytes.collect();
        let most = self.settings.buckets.iter().flatten().max();
        if let Some(rows) = most.filter(|rows| row_bytes.iter().any(|row| row.checked_mul(**rows).is_none())) {
            problem(format!("a bucket of {rows} rows is larger than any memory: use smaller buckets or rows"));
        }
        Some(SectionPlan {
            name: section.name.clone(),
            interior: self.interior.iter().map(|(at, _)| *at).collect(),
            members: order,
            device,
            inputs: inputs.into_iter().map(|(_, edge)| edge).collect(),
            outputs,
            arrivals,
            buckets: self.settings.buckets.clone(),
            row_bytes,
            at_start: self.settings.at_start,
            most: self.settings.most.unwrap_or(USUAL_SHAPES),
            checked: self.settings.checked,
            inspect: self.settings.inspect.clone(),
        })
    }

    fn name(&self, operator: usize) -> &str {
        &self.flow.entries[operator].name
    }

    fn has(&self, port: PortId) -> bool {
        port.flow == self.flow.id && self.own.contains(&port.operator)
    }

    fn before(&self, operator: usize) -> &[&'a Connection] {
        self.before.get(&operator).map_or(&[], |before| before)
    }

    /// Checks the operators, and returns their device.
    fn operators(&self, problem: &mut impl FnMut(String)) -> Option<Device> {
        let device = check::device_of(self.flow, self.members[0]);
        for &operator in self.members {
            let (name, entry) = (self.name(operator), &self.flow.entries[operator]);
            let own = check::device_of(self.flow, operator);
            if own.is_host() {
                problem(format!(
                    "operator `{name}` is on the host, which has no graphs: put it on a device with `.on(&device)`"
                ));
            } else if own != device && !device.is_host() {
                let first = self.name(self.members[0]);
                problem(format!(
                    "`{first}` is on {device} and `{name}` on {own}, but a graph belongs to one device: make two sections"
                ));
            }
            if entry.workers > 0 {
                problem(format!(
                    "operator `{name}` has several runs at a time, but a section has one: add it without `concurrent`"
                ));
            }
            if entry.stays {
                problem(format!("operator `{name}` is a `LocalOperator`: make it an `Operator`"));
            }
            let place = lock(&entry.place);
            if place.own_thread.is_some() {
                problem(format!(
                    "operator `{name}` has its own thread, but a section is one task: remove `on_own_thread`"
                ));
            }
            if !place.conditions.is_empty() {
                problem(format!(
                    "operator `{name}` has a condition of its own, but a section runs when there is a message at each of its \
                     inputs: move the condition to an operator upstream of the section"
                ));
            }
        }
        (!device.is_host()).then_some(device)
    }

    fn sizes(&self, problem: &mut impl FnMut(String)) {
        let Settings { buckets, rows, at_start, most, .. } = self.settings;
        match buckets {
            Some(buckets) if buckets.is_empty() => {
                problem("its list of buckets is empty: list at least one, or remove `buckets`".into())
            }
            Some(buckets) if buckets.contains(&0) => problem("a bucket of 0 rows holds nothing: use at least 1".into()),
            Some(_) if most.is_some() => {
                problem("it has both buckets and a limit on graphs: remove either `buckets` or `at_most`".into());
            }
            None if *at_start => problem(
                "it is set to be captured at the start, when the sizes are not known yet: set them with `buckets`"
                    .into(),
            ),
            None if !rows.is_empty() => problem("it has rows but no buckets: set both, or neither".into()),
            _ => {}
        }
        for (port, _) in rows.iter().filter(|(_, elements)| *elements == 0) {
            problem(format!("a row of 0 elements at `{}`: use at least 1", port.name));
        }
    }

    /// Sorts the operators so that each comes after those whose messages it takes.
    fn order(&self, problem: &mut impl FnMut(String)) -> Option<Vec<usize>> {
        // Of the operators that can be next, the one that was added first is chosen.
        let mut waits: HashMap<usize, usize> =
            self.members.iter().map(|operator| (*operator, self.before(*operator).len())).collect();
        let mut after: HashMap<usize, Vec<usize>> = HashMap::new();
        for (_, link) in &self.interior {
            after.entry(link.from.operator).or_default().push(link.to.operator);
        }
        let first = self.members.iter().filter(|operator| self.before(**operator).is_empty());
        let mut next: BinaryHeap<_> = first.map(|operator| Reverse(*operator)).collect();
        let mut order: Vec<usize> = Vec::new();
        while let Some(Reverse(operator)) = next.pop() {
            order.push(operator);
            waits.remove(&operator);
            for reader in after.get(&operator).into_iter().flatten() {
                if let Some(left) = waits.get_mut(reader) {
                    *left -= 1;
                    if *left == 0 {
                        next.push(Reverse(*reader));
                    }
                }
            }
        }
        if waits.is_empty() {
            return Some(order);
        }
        let mut left: Vec<_> = waits.into_keys().collect();
        left.sort_unstable();
        let names: Vec<_> = left.iter().map(|operator| format!("`{}`", self.name(*operator))).collect();
        problem(format!(
            "{} take each other's messages: a graph cannot have loops, so leave one of them out",
            names.join(", ")
        ));
        None
    }

    fn is_connected(&self, problem: &mut impl FnMut(String)) {
        let mut beside: HashMap<usize, Vec<usize>> = HashMap::new();
        for (_, Connection { from, to, .. }) in &self.interior {
            beside.entry(from.operator).or_default().push(to.operator);
            beside.entry(to.operator).or_default().push(from.operator);
        }
        let mut open = vec![self.members[0]];
        let mut reached: HashSet<usize> = open.iter().copied().collect();
        while let Some(operator) = open.pop() {
            let others = beside.get(&operator).into_iter().flatten();
            open.extend(others.copied().filter(|other| reached.insert(*other)));
        }
        if let Some(apart) = self.members.iter().find(|member| !reached.contains(member)) {
            let (first, apart) = (self.name(self.members[0]), self.name(*apart));
            problem(format!("no path within it leads from `{first}` to `{apart}` or back: make two sections"));
        }
    }

    /// The operator, and those of the section whose messages lead to it.
    fn leading_to(&self, operator: usize) -> HashSet<usize> {
        let (mut found, mut open) = (HashSet::from([operator]), vec![operator]);
        while let Some(operator) = open.pop() {
            let before = self.before(operator).iter().map(|link| link.from.operator);
            open.extend(before.filter(|other| found.insert(*other)));
        }
        found
    }

    /// Checks that no path outside the section leads from one of its operators to another, except back to an operator
    /// that the message came from: such a path is a loop through the section, and its message belongs to a later round.
    fn is_one_step(&self, problem: &mut impl FnMut(String)) {
        let joined = self.flow.connections.iter().filter(|joined| joined.from.flow == joined.to.flow);
        let joined = joined.map(|joined| (joined.from.operator, joined.to.operator));
        let mut after: HashMap<usize, Vec<usize>> = HashMap::new();
        joined.chain(link::drained_through(&self.flow.links)).for_each(|(from, to)| {
            after.entry(from).or_default().push(to);
        });
        let after = |operator: usize| after.get(&operator).into_iter().flatten().copied();
        let outside = |operator: &usize| !self.own.contains(operator);
        for &member in self.members {
            let mut next: Vec<usize> = after(member).filter(outside).collect();
            if next.is_empty() {
                continue;
            }
            let (before, mut seen) = (self.leading_to(member), HashSet::new());
            while let Some(operator) = next.pop() {
                if !seen.insert(operator) {
                    continue;
                }
                for to in after(operator) {
                    if outside(&to) {
                        next.push(to);
                    } else if !before.contains(&to) {
                        let (from, through, to) = (self.name(member), self.name(operator), self.name(to));
                        problem(format!(
                            "`{to}` takes messages that `{from}` sends by way of `{through}`, which is not in the section: it \
                             would wait for itself; add `{through}` to it, or make two sections"
                        ));
                        return;
                    }
                }
            }
        }
    }

    /// Checks that a port waits for one message, or for room for one.
    fn port(&self, port: PortId, decl: &PortDecl, problem: &mut impl FnMut(String)) {
        let name = || check::port_name(self.flow, port);
        let waits = match decl.kind {
            PortKind::Link(_) => {
                problem(format!("`{}` is linked to a hub of chunks, which a graph cannot contain", name()));
                return;
            }
            PortKind::Output => decl.room != Room::default(),
            PortKind::Input | PortKind::Inputs => {
                !decl.need.is_default() || decl.requirement.done || decl.requirement.event.is_some()
            }
        };
        if waits {
            problem(format!(
                "`{}` waits for something other than one message, or room for one: in a section, a run has one message per port",
                name()
            ));
        }
    }

    /// Whether the port connects an operator to one outside the section.
    fn is_at_boundary(&self, port: PortId, problem: &mut impl FnMut(String)) -> bool {
        let flow = self.flow;
        let (mut inside, mut outside) = (0, 0);
        let mut count = |connection: &Connection, other: PortId| {
            if self.has(other) {
                inside += 1;
                if !check::wanted(flow, connection).when_full.blocks_writer() {
                    let hub = check::hub_name(flow, connection);
                    problem(format!(
                        "hub `{hub}` drops messages or keeps the latest: within a section each is taken once"
                    ));
                }
            } else {
                outside += 1;
            }
        };
        flow.leaving(port).for_each(|(_, connection)| count(connection, connection.to));
        let arriving = flow.arriving(port.operator).filter(|connection| connection.to == port);
        arriving.for_each(|connection| count(connection, connection.from));
        let name = || check::port_name(flow, port);
        if inside > 0 && outside > 0 {
            problem(format!(
                "`{}` is connected to operators of it and to others: add those to it, or give the operator another port for them",
                name()
            ));
        }
        if outside > 0 && check::decl(flow, port).kind == PortKind::Inputs {
            problem(format!("`{}`, on its boundary, is an `Inputs`: make it an `Input`", name()));
        }
        outside > 0
    }

    /// Checks that the ports named in the settings are on the boundary.
    fn named_ports(
        &self,
        inputs: &[(PortId, BoundaryPort)],
        outputs: &[BoundaryPort],
        order: &[usize],
        problem: &mut impl FnMut(String),
    ) {
        let mut not_there = |port: &PortId, what: &str| {
            let known = port.flow == self.flow.id && port.operator < self.flow.entries.len();
            let name = if known { check::port_name(self.flow, *port) } else { port.name.into() };
            problem(format!("{what} of `{name}` are set, but this is not a port on its boundary"));
        };
        let inputs: HashSet<_> = inputs.iter().map(|(id, _)| id).collect();
        for (port, _) in self.settings.rows.iter().filter(|(port, _)| !inputs.contains(port)) {
            not_there(port, "the rows");
        }
        let outputs: HashSet<_> = outputs.iter().map(|edge| (order[edge.member], edge.port)).collect();
        for port in &self.settings.whole {
            if port.flow != self.flow.id || !outputs.contains(&(port.operator, port.name)) {
                not_there(port, "whole messages");
            }
        }
    }
}
