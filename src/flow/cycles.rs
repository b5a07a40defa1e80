//! Cycles: operators whose messages lead back to them.
//!
//! A cycle has two ways to go wrong. It fills up: what is put into it from outside goes round until its hubs have no room, and then
//! each operator waits for the next. Or it never begins: each operator waits for a message of another before its first run.
//!
//! Both are known from the connections but for one thing: an operator with a [`run`](crate::Operator::run) of its own may send
//! before it takes anything, and that is known only once it has run. So the check lists the cycles, and a flow that ends without
//! one run of a cycle that cannot begin has failed.
//!
//! ```text
//!   operators ──> strongly connected components ──> listed: what they hold, what feeds them
//!                          │ all need a message of an operator that needs one
//!                          └──> never begin ──> at the end: no run, and no `run` of their own? an error
//! ```

use std::{collections::HashSet, fmt, sync::Arc};

use super::{
    Connection,
    check::{decl, hub_name, is_named, wanted},
    drive::Member,
    hubs,
    wiring::Wiring,
};
use crate::{
    condition::PortId,
    error::{Error, ErrorKind},
    hub::queue::Full,
    operator::{PortKind, control::Control, node::Method},
};

/// Operators whose messages lead back to them, as [`Flow::check`](crate::Flow::check) finds them. Prints as a line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cycle {
    /// The operators' names, in the order of adding.
    pub operators: Vec<Arc<str>>,
    /// Messages that its hubs hold together. `None` if one of them drops messages or keeps the latest: such a cycle does not fill
    /// up.
    pub holds: Option<usize>,
    /// The names of the hubs that bring messages into it, which may be any number.
    pub fed_by: Vec<Arc<str>>,
    /// False if each of its operators waits for a message of the cycle before its first run. Then one of them has to send first, in a
    /// [`run`](crate::Operator::run) of its own.
    pub begins: bool,
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |names: &[Arc<str>]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        match &self.operators[..] {
            [one] => write!(f, "`{one}` is connected to itself")?,
            several => write!(f, "{} form a cycle", names(several))?,
        }
        match self.holds {
            None => write!(f, ", in which a hub drops messages: it does not fill up")?,
            Some(holds) => write!(f, ", whose hubs hold {holds} together")?,
        }
        match (&self.fed_by[..], self.holds) {
            ([], _) => write!(f, "; nothing outside feeds it")?,
            (fed_by, None) => write!(f, "; fed by {}", names(fed_by))?,
            (fed_by, Some(_)) => write!(f, "; fed by {} with any number: it stalls once they are full", names(fed_by))?,
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

/// The cycles of a flow, in the order of adding; and those that cannot begin without a `run` of an operator's own, as operators'
/// numbers.
pub(super) fn find(flow: &Wiring<'_>) -> (Vec<Cycle>, Vec<Vec<usize>>) {
    let edges = Edges::of(flow);
    let never = edges.never_run(flow);
    let (mut cycles, mut unbegun) = (Vec::new(), Vec::new());
    for members in edges.components() {
        let inside: HashSet<_> = members.iter().copied().collect();
        let own = || {
            members.iter().flat_map(|member| &edges.leaving[*member]).filter(|own| inside.contains(&own.to.operator))
        };
        if own().next().is_none() {
            continue;
        }
        let drops = own().any(|own| wanted(flow, own).full != Full::Hold);
        let holds = (!drops).then(|| own().map(|own| hubs::capacity(flow, own)).fold(0, usize::saturating_add));
        let arriving = members.iter().flat_map(|member| &edges.arriving[*member]);
        let fed_by = arriving.filter(|from| !inside.contains(&from.from.operator));
        let begins = !members.iter().all(|member| never[*member]);
        cycles.push(Cycle {
            operators: members.iter().map(|member| flow.entries[*member].name.clone()).collect(),
            holds,
            fed_by: fed_by.map(|connection| hub_name(flow, connection).into()).collect(),
            begins,
        });
        if !begins {
            unbegun.push(members);
        }
    }
    (cycles, unbegun)
}

/// An error if one of these cycles has never begun. All operators have ended well.
pub(super) fn unbegun(cycles: &[Vec<usize>], crew: &[Member], control: &Control) -> Option<Error> {
    // What is stopped may not have come to it.
    if cycles.is_empty() || control.is_stopping() {
        return None;
    }
    let mut idle = vec![false; control.nodes.len()];
    for member in crew {
        let runs_by_default = control.nodes[member.index].is_default(Method::Run);
        idle[member.index] = runs_by_default && member.seat.tally().runs == 0;
    }
    let cycle = cycles.iter().find(|cycle| cycle.iter().all(|operator| idle[*operator]))?;
    let names: Vec<_> = cycle.iter().map(|operator| control.whose(*operator)).collect();
    let (who, they, of) = match &names[..] {
        [one] => (format!("{one} is connected to itself"), "it waits", "itself"),
        several => (format!("{} form a cycle", several.join(", ")), "each waits", "another"),
    };
    let text = format!(
        "{who} and never ran: {they} for a message of {of} before its first run; let one of them send first, in a `run` of its own, or \
         run without a message of the cycle: `#[input(optional)]`, or an `Inputs` with `at_least = 1` that is fed from outside"
    );
    Some(Error::new(ErrorKind::Stalled, text))
}

/// A flow's connections within it, by operator. What reaches a port that is used from outside of the flow leaves it there.
struct Edges<'a> {
    leaving: Vec<Vec<&'a Connection>>,
    arriving: Vec<Vec<&'a Connection>>,
}

impl<'a> Edges<'a> {
    fn of(flow: &Wiring<'a>) -> Self {
        let operators = 0..flow.entries.len();
        let goes_on = |own: &&Connection| !decl(flow, own.to).lent;
        let leaving = operators.clone().map(|operator| flow.leaving_operator(operator).filter(goes_on).collect());
        let arriving = operators.map(|operator| flow.arriving(operator).filter(goes_on).collect());
        Self { leaving: leaving.collect(), arriving: arriving.collect() }
    }

    /// The operators that run only after another one of them has.
    fn never_run(&self, flow: &Wiring<'_>) -> Vec<bool> {
        let operators = 0..self.leaving.len();
        let mut never = vec![true; operators.len()];
        let needs: Vec<_> = operators.clone().map(|operator| self.needs(flow, operator)).collect();
        let mut open: Vec<_> = operators.collect();
        // An operator that can run may let those behind it run.
        while let Some(operator) = open.pop() {
            if never[operator] && !needs[operator].iter().any(|need| need.depends_on(&never)) {
                never[operator] = false;
                open.extend(self.leaving[operator].iter().map(|own| own.to.operator));
            }
        }
        never
    }

    /// What an operator waits for before its first run, at each of its inputs.
    fn needs(&self, flow: &Wiring<'_>, operator: usize) -> Vec<Needs> {
        let ports = flow.entries[operator].ports.iter().enumerate();
        let waits = ports.filter(|(port, decl)| {
            let id = PortId { flow: flow.id, operator, port: *port, name: decl.name };
            matches!(decl.kind, PortKind::Input | PortKind::Inputs) && !decl.need.optional && !is_named(flow, id)
        });
        waits
            .map(|(port, decl)| Needs {
                writers: self.arriving[operator]
                    .iter()
                    .filter(|own| own.to.port == port)
                    .map(|own| own.from.operator)
                    .collect(),
                any: decl.kind == PortKind::Inputs && decl.need.together,
            })
            .collect()
    }

    /// The strongly connected components, each in the order of adding. Without recursion: a flow may be a chain of ten thousand
    /// operators.
    fn components(&self) -> Vec<Vec<usize>> {
        let count = self.leaving.len();
        // By the order in which a walk along the connections leaves them, the last first, and then against the connections.
        let (mut left, mut seen) = (Vec::with_capacity(count), vec![false; count]);
        for start in 0..count {
            let mut walk = Vec::new();
            if !std::mem::replace(&mut seen[start], true) {
                walk.push((start, self.leaving[start].iter()));
            }
            while let Some((operator, next)) = walk.last_mut() {
                match next.next().map(|own| own.to.operator) {
                    Some(to) if !std::mem::replace(&mut seen[to], true) => walk.push((to, self.leaving[to].iter())),
                    Some(_) => {}
                    None => {
                        left.push(*operator);
                        walk.pop();
                    }
                }
            }
        }
        let (mut components, mut found) = (Vec::new(), vec![false; count]);
        for start in left.into_iter().rev() {
            if std::mem::replace(&mut found[start], true) {
                continue;
            }
            let (mut members, mut open) = (Vec::new(), vec![start]);
            while let Some(operator) = open.pop() {
                members.push(operator);
                let before = self.arriving[operator].iter().map(|own| own.from.operator);
                open.extend(before.filter(|from| !std::mem::replace(&mut found[*from], true)));
            }
            members.sort_unstable();
            components.push(members);
        }
        components.sort_unstable();
        components
    }
}

/// What is waited for at one input.
struct Needs {
    writers: Vec<usize>,
    /// One of them is enough.
    any: bool,
}

impl Needs {
    fn depends_on(&self, never: &[bool]) -> bool {
        let mut writers = self.writers.iter().map(|writer| never[*writer]);
        if self.any { writers.all(|never| never) } else { writers.any(|never| never) }
    }
}
