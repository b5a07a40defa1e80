//! [`OnPorts`]: conditions on one port, `.when(at_least(upper.lines, 4))`, and conditions over several ports,
//! `.when(sum([..], 3))` or `#[ports(sum(left, right) = 3)]`.
//!
//! A port that a condition names loses its default condition, other ports keep theirs. A condition identifies its ports
//! by number, and queries them through [`PortState`].
//!
//! ```text
//!   sum        a number of messages at all of the ports together
//!   each       a number of messages at each of the ports
//!   or_after   or an interval since the operator's last run, with as many messages as have arrived
//! ```
//!
//! When the senders of all ports of a `sum` have closed, the remaining messages can be taken, and then the condition is
//! `Never`; for `each`, when the senders of one of its ports have closed.

use std::{borrow::Cow, task::Context, time::Duration};

use tokio::time::Instant;

use super::{
    Alarm, Counted, IntoCondition, Need, Readiness, Since, Status, When, alarm::after, combine::Tree,
    message::messages, room::room_problem,
};
use crate::clock;

/// Identifies a port of an operator in a flow, independent of the port's message type. Convert a port's handle to it
/// for a condition over several ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortId {
    pub(crate) flow: u64,
    pub(crate) operator: usize,
    pub(crate) port: usize,
    pub(crate) name: &'static str,
}

/// The state of a port that a condition can query.
#[doc(hidden)]
#[allow(missing_docs)]
pub trait PortState {
    /// Counts the messages at an input, up to `most`; keeps the waker if there are fewer. Reserves nothing.
    fn poll_count(&mut self, most: usize, cx: &mut Context<'_>) -> Counted;
    /// Like `poll_count`, for a condition of the operator's next run: the messages counted are reserved for that run.
    fn poll_promised(&mut self, most: usize, cx: &mut Context<'_>) -> Counted {
        self.poll_count(most, cx)
    }
    /// Whether an output has room for `count` messages.
    fn poll_room(&mut self, count: usize, cx: &mut Context<'_>) -> Readiness;
    /// When the first message began to wait, if its hub records that.
    fn oldest(&self) -> Option<Instant>;
}

/// The facts known about a port before a flow runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortFacts {
    /// The capacity of its hub, or of all hubs of an input with several connections together.
    pub(crate) capacity: usize,
    pub(crate) is_input: bool,
    /// True for an input whose hubs keep the latest value.
    pub(crate) latest: bool,
}

/// Visits the operator's port with this number.
pub(crate) type VisitPort<'a> = &'a mut dyn FnMut(usize, &mut dyn FnMut(&mut dyn PortState));

/// A condition on ports. See [`at_least`], [`at_most`], [`batch`], [`room`], [`sum`] and [`each`].
#[derive(Debug)]
#[must_use = "give it to an operator with `.when(..)`"]
pub struct OnPorts {
    condition: PortCondition,
    or_after: Option<Duration>,
    last_run: Instant,
    /// The value of `last_run` before the current run.
    run_before: Instant,
    /// For a batch, and for the interval.
    alarms: [Option<Box<Alarm>>; 2],
}

#[derive(Debug)]
enum PortCondition {
    Messages(PortId, Need),
    Room(PortId, usize),
    Sum(Vec<PortId>, usize),
    Each(Vec<(PortId, usize)>),
}

impl OnPorts {
    fn new(condition: PortCondition) -> Self {
        let now = clock::now();
        Self { condition, or_after: None, last_run: now, run_before: now, alarms: [None, None] }
    }

    /// Makes the condition ready also when `interval` has passed since the operator's last run began (for the first
    /// run: since the flow began), with as many messages as have arrived, possibly none. Once all senders have closed
    /// and no message is left, the condition is `Never` nevertheless.
    pub fn or_after(mut self, interval: Duration) -> Self {
        self.or_after = Some(interval);
        self
    }

    /// Sets from when a message's wait is measured, for [`batch`].
    pub fn since(mut self, since: Since) -> Self {
        if let PortCondition::Messages(_, need) = &mut self.condition {
            need.since = since;
        }
        self
    }

    pub(super) fn start(&mut self) {
        self.last_run = Instant::now();
        self.run_before = self.last_run;
    }

    pub(super) fn claim(&mut self) {
        if self.or_after.is_some() {
            self.run_before = std::mem::replace(&mut self.last_run, Instant::now());
        }
    }

    pub(super) fn give_back(&mut self) {
        self.last_run = self.run_before;
    }

    pub(super) fn stop_waiting(&mut self) {
        self.alarms = [None, None];
    }

    pub(super) fn poll(&mut self, visit: VisitPort<'_>, cx: &mut Context<'_>) -> Status {
        let [of_batch, of_interval] = &mut self.alarms;
        // The end of the wait for a batch.
        let mut due = None;
        let asked = match &self.condition {
            PortCondition::Messages(port, need) => {
                let mut asked = Readiness::NEVER;
                visit(port.port, &mut |port| {
                    let counted = port.poll_promised(need.asks(), cx);
                    let oldest = port.oldest();
                    asked = need.readiness(counted, || oldest, of_batch, cx);
                    due = oldest.zip(need.within).map(|(oldest, within)| after(oldest, within));
                });
                asked
            }
            PortCondition::Room(port, count) => {
                let mut asked = Readiness::NEVER;
                visit(port.port, &mut |port| asked = port.poll_room(*count, cx));
                asked
            }
            PortCondition::Sum(ports, least) => {
                let counted = Counted::of_all(|| {
                    let mut counted = Counted::NONE;
                    for port in ports {
                        visit(port.port, &mut |port| counted = counted.and(port.poll_promised(*least, cx)));
                    }
                    counted
                });
                Need::at_least(*least).readiness(counted, || None, &mut None, cx)
            }
            PortCondition::Each(ports) => {
                let mut asked = Readiness::READY;
                for (port, least) in ports {
                    visit(port.port, &mut |port| {
                        let counted = port.poll_promised(*least, cx);
                        asked = asked | Need::at_least(*least).readiness(counted, || None, &mut None, cx);
                    });
                }
                asked
            }
        };
        let Some(interval) = self.or_after.filter(|_| !asked.is_ready() && !asked.is_never()) else {
            return asked.status(due);
        };
        let passes = after(self.last_run, interval);
        if of_interval.get_or_insert_default().has_passed(passes, cx) {
            return Status::Ready;
        }
        match due {
            Some(due) if asked == Readiness::WAIT_TIME => Status::WaitTime(due.min(passes)),
            _ => Status::WaitTime(passes),
        }
    }

    pub(super) fn ports(&self) -> Vec<PortId> {
        match &self.condition {
            PortCondition::Messages(port, _) | PortCondition::Room(port, _) => vec![*port],
            PortCondition::Sum(ports, _) => ports.clone(),
            PortCondition::Each(ports) => ports.iter().map(|(port, _)| *port).collect(),
        }
    }

    /// What the condition needs of its port, if it waits for messages at one port.
    fn need(&self) -> Option<Need> {
        if let PortCondition::Messages(_, need) = &self.condition { Some(*need) } else { None }
    }

    /// The number of messages that the condition waits for at a port, or for which it waits for room.
    fn count_at(&self, port: PortId) -> usize {
        match &self.condition {
            PortCondition::Messages(at, need) if *at == port => need.least,
            PortCondition::Room(at, count) if *at == port => *count,
            // All of these messages might arrive at one port.
            PortCondition::Sum(ports, count) if ports.contains(&port) => *count,
            PortCondition::Each(ports) => {
                ports.iter().filter(|(at, _)| *at == port).map(|(_, count)| *count).max().unwrap_or(0)
            }
            _ => 0,
        }
    }

    pub(super) fn problems(&self, facts: &dyn Fn(PortId) -> Option<PortFacts>, problems: &mut Vec<String>) {
        let ports = self.ports();
        if ports.is_empty() {
            problems.push("has a condition that names no port: name at least one of its ports".into());
        }
        for (at, port) in ports.iter().enumerate() {
            if ports[..at].contains(port) {
                problems.push(format!("has a condition that names port `{}` twice: name it once", port.name));
            }
        }
        let mut capacities = 0_usize;
        for (at, port) in ports.iter().enumerate() {
            let Some(PortFacts { capacity, is_input, latest }) = facts(*port) else {
                problems.push(format!(
                    "has a condition on `{}`, a port of another operator: name one of its own ports",
                    port.name
                ));
                continue;
            };
            let name = port.name;
            capacities = capacities.saturating_add(capacity);
            let room = matches!(self.condition, PortCondition::Room(..));
            if is_input == room {
                problems.push(if is_input {
                    format!("waits for room at its input `{name}`: only an output has room")
                } else {
                    format!("waits for messages at its output `{name}`: only an input has messages")
                });
            }
            let problem = match &self.condition {
                PortCondition::Messages(_, need) => need.problem(capacity, latest),
                PortCondition::Each(ports) => Need::at_least(ports[at].1).problem(capacity, latest),
                PortCondition::Room(_, count) => room_problem(*count, capacity),
                PortCondition::Sum(..) => None,
            };
            problems.extend(problem.map(|problem| format!("port `{name}` {problem}")));
        }
        if let PortCondition::Sum(_, least) = self.condition
            && let Some(problem) = Need::at_least(least).problem(capacities, false)
        {
            problems.push(format!("has a `sum` condition that {problem}"));
        }
        if self.or_after == Some(Duration::ZERO) {
            problems.push("has an `or_after` of 0 seconds: give it a longer interval".into());
        }
    }

    pub(super) fn needs_timers(&self) -> bool {
        self.or_after.is_some() || self.need().is_some_and(|need| need.within.is_some())
    }

    pub(super) fn describe(&self) -> Cow<'static, str> {
        let names =
            |ports: &[PortId]| ports.iter().map(|port| format!("`{}`", port.name)).collect::<Vec<_>>().join(", ");
        let mut text = match &self.condition {
            PortCondition::Messages(port, need) => format!("{} at `{}`", need.describe(), port.name),
            PortCondition::Room(port, count) => format!("room for {} at `{}`", messages(*count), port.name),
            PortCondition::Sum(ports, least) => format!("{} at {} together", messages(*least), names(ports)),
            PortCondition::Each(ports) => {
                let each = ports.iter().map(|(port, least)| format!("{} at `{}`", messages(*least), port.name));
                each.collect::<Vec<_>>().join(" and ")
            }
        };
        if let Some(interval) = self.or_after {
            text.push_str(&format!(", or {interval:?} since its last run"));
        }
        text.into()
    }
}

/// The ports that conditions name.
pub(crate) fn named_ports(conditions: &[When]) -> Vec<(PortId, Option<Need>)> {
    let mut named = Vec::new();
    for when in conditions {
        when.on_ports(&mut |ports| named.extend(ports.ports().into_iter().map(|port| (port, ports.need()))));
    }
    named
}

/// The highest number of messages, or of room, that any condition waits for at a port; 0 if none names it.
pub(crate) fn count_at(conditions: &[When], port: PortId) -> usize {
    let mut most = 0;
    for when in conditions {
        when.on_ports(&mut |ports| most = most.max(ports.count_at(port)));
    }
    most
}

impl IntoCondition for OnPorts {
    fn into_condition(self) -> When {
        When(Tree::Ports(self))
    }
}

/// Ready with at least `count` messages at an input or, when its senders have closed, with the remaining ones.
///
/// ```
/// use wakeline::{Flow, condition::at_least, operator::sink};
///
/// let mut flow = Flow::new("pairs");
/// let pairs = flow.add("pairs", sink(async |_: u32| Ok(())));
/// let pairs = pairs.clone().when(at_least(pairs.input, 2));
/// ```
pub fn at_least(input: impl Into<PortId>, count: usize) -> OnPorts {
    OnPorts::new(PortCondition::Messages(input.into(), Need::at_least(count)))
}

/// Ready with at least one message and at most `count` messages at an input: for an operator that does not take every
/// message, and must not run while more are queued. Holoscan's `front_stage_max_size`.
pub fn at_most(input: impl Into<PortId>, count: usize) -> OnPorts {
    OnPorts::new(PortCondition::Messages(input.into(), Need { most: Some(count), ..Need::default() }))
}

/// Ready with a batch of `count` messages at an input, or with fewer once the oldest of them has waited for `within`.
///
/// The operator takes them with [`Input::take_batch`](crate::Input::take_batch).
pub fn batch(input: impl Into<PortId>, count: usize, within: Duration) -> OnPorts {
    OnPorts::new(PortCondition::Messages(input.into(), Need { within: Some(within), ..Need::at_least(count) }))
}

/// Ready with room for `count` messages at an output, in each of its connected queues.
pub fn room(output: impl Into<PortId>, count: usize) -> OnPorts {
    OnPorts::new(PortCondition::Room(output.into(), count))
}

/// Ready with at least `count` messages at these inputs together.
///
/// ```
/// use wakeline::{condition::sum, prelude::*};
///
/// #[derive(Ports)]
/// struct BothPorts {
///     #[input(capacity = 4)]
///     left: Input<u32>,
///     #[input(capacity = 4)]
///     right: Input<f32>,
/// }
/// # struct Both;
/// # impl Operator for Both {
/// #     type Ports = BothPorts;
/// #     async fn compute(&mut self, _ports: &mut BothPorts, _cx: &mut Cx) -> Result<()> { Ok(()) }
/// # }
///
/// let mut flow = Flow::new("both");
/// let both = flow.add("both", Both);
/// let both = both.clone().when(sum([both.left.into(), both.right.into()], 3));
/// ```
pub fn sum(inputs: impl IntoIterator<Item = PortId>, count: usize) -> OnPorts {
    OnPorts::new(PortCondition::Sum(inputs.into_iter().collect(), count))
}

/// Ready with at least the given number of messages at each of these inputs.
pub fn each(inputs: impl IntoIterator<Item = (PortId, usize)>) -> OnPorts {
    OnPorts::new(PortCondition::Each(inputs.into_iter().collect()))
}
