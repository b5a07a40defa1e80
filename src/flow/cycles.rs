//! Cycles: operators whose messages or chunks can return to them.
//!
//! A cycle can fail in two ways. It may fill up: messages from outside circulate until its hubs are full, and each
//! operator waits for the next. Or it may never begin: each operator waits for a message of another one before its
//! first run.
//!
//! Both are known from the connections, with one exception: an operator that overrides [`run`](crate::Operator::run)
//! may send before it takes anything. So the check lists the cycles, and a flow fails if it ends without a run of a
//! cycle that cannot begin otherwise.
//!
//! ```text
//!   operators ──> strongly connected components ──> listed: what they hold, what feeds them
//!                          │ each operator needs a message of another one in it
//!                          └──> never begin ──> at the end: no run, and `run` is not overridden? an error
//! ```
//!
//! A hub of chunks is modelled as a chain of nodes, one before each [stage](Passage::stages) of links that a chunk
//! passes:
//!
//! ```text
//!   producers ──> node ──> the first that modifies ──> node ──> those that peek ──> node ──> those that consume
//! ```

use std::{collections::HashSet, fmt, sync::Arc};

use super::{
    check::{decl, is_named},
    components::components,
    drive::FlowOperator,
    link::{self, Passage},
    wiring::Wiring,
};
use crate::{
    condition::PortId,
    error::{Error, ErrorKind},
    hub::build::HubPlan,
    operator::{PortKind, control::Control, operator_task::Method},
};

/// Operators whose messages or chunks can return to them, as found by [`Flow::check`](crate::Flow::check). `Display`
/// prints one line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cycle {
    /// The operators' names, in the order of adding.
    pub operators: Vec<Arc<str>>,
    /// The number of messages and chunks that its hubs hold together. `None` if one of them drops messages or keeps the
    /// latest: such a cycle does not fill up.
    pub holds: Option<usize>,
    /// The hubs that bring messages or chunks into it from outside.
    pub fed_by: Vec<Feed>,
    /// False if each of its operators waits for a message of the cycle before its first run. Then one of them has to
    /// send first, in its own [`run`](crate::Operator::run).
    pub begins: bool,
}

/// A hub that brings messages or chunks into a [`Cycle`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Feed {
    /// The name of the hub.
    pub hub: Arc<str>,
    /// The largest number of its envelopes in the cycle at once: all those of the hub, if the cycle passes them on
    /// without a copy and no hub of the cycle has blank ones. `None`: no limit.
    pub at_most: Option<usize>,
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.operators[..] {
            [one] => write!(f, "`{one}` is connected to itself")?,
            several => {
                let names: Vec<_> = several.iter().map(|name| format!("`{name}`")).collect();
                write!(f, "{} form a cycle", names.join(", "))?;
            }
        }
        match self.holds {
            None => write!(f, ", in which a hub drops messages: it does not fill up")?,
            Some(holds) => write!(f, ", whose hubs hold {holds} together")?,
        }
        for (at, feed) in self.fed_by.iter().enumerate() {
            write!(f, "{} {feed}", if at == 0 { "; fed by" } else { "," })?;
        }
        let at_most = self.fed_by.iter().try_fold(0, |sum: usize, feed| Some(sum.saturating_add(feed.at_most?)));
        match (self.fed_by.is_empty(), self.holds, at_most) {
            (true, ..) => write!(f, "; nothing outside feeds it")?,
            (false, Some(holds), Some(at_most)) if at_most <= holds => write!(f, ": they have room for all")?,
            (false, Some(_), _) => write!(f, ": it stalls once they are full")?,
            (false, None, _) => {}
        }
        if !self.begins {
            write!(
                f,
                "; each waits for a message of the cycle: it begins only if one sends first, in a `run` of its own"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at_most {
            Some(count) => write!(f, "`{}` with at most {count} envelopes at once", self.hub),
            None => write!(f, "`{}` with any number", self.hub),
        }
    }
}

/// The cycles of a flow, in the order of adding, and the numbers of the operators of cycles that cannot begin unless an
/// operator overrides `run`. `plans`: the plans of all connections.
pub(super) fn find(flow: &Wiring<'_>, plans: &[HubPlan]) -> (Vec<Cycle>, Vec<Vec<usize>>) {
    let passages = link::passages(flow);
    let edges = Edges::of(flow, &passages);
    let blanks = |at: usize| plans[at].writer_bytes.or(plans[at].reader_bytes).is_some();
    let is_envelope = |at: usize| decl(flow, flow.connections[at].from).is_envelope;
    let never = edges.never_run(flow);
    let (mut cycles, mut unbegun) = (Vec::new(), Vec::new());
    for mut members in components(&edges.leaving, |own| own.to) {
        let inside: HashSet<_> = members.iter().copied().collect();
        let own = || members.iter().flat_map(|member| &edges.leaving[*member]).filter(|own| inside.contains(&own.to));
        if own().next().is_none() {
            continue;
        }
        // Each hub once: a hub of chunks has as many edges as links.
        let mut known = HashSet::new();
        let hubs: Vec<_> = own().map(|own| own.hub).filter(|hub| known.insert(*hub)).collect();
        let drops = |hub: &Via| matches!(hub, Via::Queue(at) if !plans[*at].when_full.blocks_writer());
        let holds = (!hubs.iter().any(drops)).then(|| {
            let room = hubs.iter().map(|hub| match hub {
                Via::Queue(at) => plans[*at].capacity,
                Via::Chunks(at) => passages[*at].holds,
            });
            room.fold(0, usize::saturating_add)
        });
        let passes_on = |hub: &Via| matches!(hub, Via::Queue(at) if is_envelope(*at) && !blanks(*at));
        let passes_on = hubs.iter().all(passes_on);
        let (mut fed_by, mut known) = (Vec::new(), HashSet::new());
        let arriving = members.iter().flat_map(|member| &edges.arriving[*member]);
        let outside = arriving.filter(|from| !inside.contains(&from.from)).map(|from| from.hub);
        let by_hand = hubs.iter().filter(|hub| matches!(hub, Via::Chunks(at) if passages[*at].is_fed)).copied();
        for hub in outside.chain(by_hand).filter(|hub| known.insert(*hub)) {
            fed_by.push(match hub {
                Via::Queue(at) => {
                    let at_most = (passes_on && is_envelope(at) && blanks(at)).then_some(plans[at].envelopes);
                    Feed { hub: plans[at].name.clone(), at_most }
                }
                Via::Chunks(at) => Feed { hub: passages[at].hub.name().clone(), at_most: None },
            });
        }
        members.retain(|member| *member < flow.entries.len());
        let begins = !members.iter().all(|member| never[*member]);
        cycles.push(Cycle {
            operators: members.iter().map(|member| flow.entries[*member].name.clone()).collect(),
            holds,
            fed_by,
            begins,
        });
        if !begins {
            unbegun.push(members);
        }
    }
    (cycles, unbegun)
}

/// Returns an error if one of these cycles has never begun. All operators have ended without an error.
pub(super) fn unbegun(cycles: &[Vec<usize>], members: &[FlowOperator], control: &Control) -> Option<Error> {
    // In a flow that was stopped, a cycle might not have had the time to begin.
    if cycles.is_empty() || control.is_stopping() {
        return None;
    }
    let mut idle = vec![false; control.tasks.len()];
    for member in members {
        let runs_by_default = control.tasks[member.index].is_default(Method::Run);
        idle[member.index] = runs_by_default && member.operator.tally().runs == 0;
    }
    let cycle = cycles.iter().find(|cycle| cycle.iter().all(|operator| idle[*operator]))?;
    let names: Vec<_> = cycle.iter().map(|operator| control.whose(*operator)).collect();
    let (waits, sender) = match &names[..] {
        [one] => (format!("{one} is connected to itself and waits for its own first message"), "it"),
        several => {
            (format!("{} form a cycle in which each waits for another's first message", several.join(", ")), "one")
        }
    };
    let text = format!(
        "{waits}, so that none ever ran: override `run` in {sender} to send first, or let an input of the cycle be \
         `#[input(optional)]`, or `Inputs` with `at_least = 1` that are also fed from outside"
    );
    Some(Error::new(ErrorKind::Stalled, text))
}

#[derive(Clone, Copy)]
struct Edge {
    from: usize,
    to: usize,
    hub: Via,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Via {
    Queue(usize),
    Chunks(usize),
}

/// A flow's connections and hubs of chunks, as edges by operator and node. Connections to a port that is used from
/// outside the flow are left out.
struct Edges {
    leaving: Vec<Vec<Edge>>,
    arriving: Vec<Vec<Edge>>,
    /// What each node of a chunk hub waits for. The nodes are numbered after the operators.
    nodes: Vec<Needs>,
    /// By operator: the nodes of the hubs whose chunks it waits for.
    waits: Vec<Vec<usize>>,
}

impl Edges {
    fn of(flow: &Wiring<'_>, passages: &[Passage]) -> Self {
        let operators = flow.entries.len();
        let mut all = Vec::new();
        let (mut nodes, mut waits) = (Vec::new(), vec![Vec::new(); operators]);
        for (at, own) in flow.connections.iter().enumerate().filter(|(_, own)| !decl(flow, own.to).shared) {
            all.push(Edge { from: own.from.operator, to: own.to.operator, hub: Via::Queue(at) });
        }
        for (at, passage) in passages.iter().enumerate() {
            let hub = Via::Chunks(at);
            // If there is no chunk yet, one producer suffices. Each link of a stage has the chunk before the next
            // stage.
            let mut before = Needs { writers: passage.producers.clone(), any: true };
            for (number, stage) in passage.stages.iter().enumerate() {
                let node = operators + nodes.len();
                all.extend(before.writers.iter().map(|from| Edge { from: *from, to: node, hub }));
                all.extend(stage.iter().map(|link| Edge { from: node, to: link.operator, hub }));
                let reads = stage.iter().filter(|link| !decl(flow, **link).need.optional);
                reads.for_each(|link| waits[link.operator].push(node));
                nodes.push(if number == 0 && passage.is_filled { Needs::default() } else { before });
                before = Needs { writers: stage.iter().map(|link| link.operator).collect(), any: false };
            }
        }
        let mut leaving = vec![Vec::new(); operators + nodes.len()];
        let mut arriving = leaving.clone();
        for edge in all {
            leaving[edge.from].push(edge);
            arriving[edge.to].push(edge);
        }
        Self { leaving, arriving, nodes, waits }
    }

    /// For each operator and node: true if it runs only after another one for which this is true.
    fn never_run(&self, flow: &Wiring<'_>) -> Vec<bool> {
        let (all, operators) = (0..self.leaving.len(), flow.entries.len());
        let mut never = vec![true; all.len()];
        let of = |node: usize| match node.checked_sub(operators) {
            Some(at) => vec![self.nodes[at].clone()],
            None => self.needs(flow, node),
        };
        let needs: Vec<_> = all.clone().map(of).collect();
        let mut open: Vec<_> = all.collect();
        // An operator that can run may enable the operators after it.
        while let Some(operator) = open.pop() {
            if never[operator] && !needs[operator].iter().any(|need| need.depends_on(&never)) {
                never[operator] = false;
                open.extend(self.leaving[operator].iter().map(|own| own.to));
            }
        }
        never
    }

    /// The writers that an operator waits for before its first run, for each of its inputs.
    fn needs(&self, flow: &Wiring<'_>, operator: usize) -> Vec<Needs> {
        let ports = flow.entries[operator].ports.iter().enumerate();
        let waits = ports.filter(|(port, decl)| {
            let id = PortId { flow: flow.id, operator, port: *port, name: decl.name };
            matches!(decl.kind, PortKind::Input | PortKind::Inputs) && !decl.need.optional && !is_named(flow, id)
        });
        let chunks = self.waits[operator].iter().map(|node| Needs { writers: vec![*node], any: false });
        let messages = waits.map(|(port, decl)| Needs {
            writers: self.arriving[operator]
                .iter()
                .filter(|own| matches!(own.hub, Via::Queue(at) if flow.connections[at].to.port == port))
                .map(|own| own.from)
                .collect(),
            any: decl.kind == PortKind::Inputs && decl.need.together,
        });
        messages.chain(chunks).collect()
    }
}

/// The writers that one input or one hub of chunks waits for.
#[derive(Clone, Default)]
struct Needs {
    writers: Vec<usize>,
    /// One of them suffices.
    any: bool,
}

impl Needs {
    fn depends_on(&self, never: &[bool]) -> bool {
        let mut writers = self.writers.iter().map(|writer| never[*writer]);
        if self.any { writers.all(|never| never) } else { writers.any(|never| never) }
    }
}
