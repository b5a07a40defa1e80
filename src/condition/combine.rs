//! Either-or, `.when(any_of(a, b))`, and groups within it ([`all_of`]).
//!
//! The conditions of one operator are and-ed anyway; a tree of them is [`When`].

use std::{borrow::Cow, task::Context};

use super::{
    Condition, Status,
    port::{OnPorts, PortFacts, PortId, Show},
};

/// A condition, or several as one: what `.when(..)` takes. Made from whatever is a [`Condition`], from a
/// [`Gate`](super::Gate), from conditions on ports, and by [`any_of`] and [`all_of`].
#[derive(Debug)]
#[must_use = "give it to an operator with `.when(..)`"]
pub struct When(pub(super) Tree);

/// What can be given to `.when(..)`.
pub trait IntoCondition {
    /// The condition.
    fn into_condition(self) -> When;
}

impl<C: Condition> IntoCondition for C {
    fn into_condition(self) -> When {
        When::own(self)
    }
}

impl IntoCondition for When {
    fn into_condition(self) -> When {
        self
    }
}

/// Ready when either is: at the earlier of two times; while the other one is `Never`, that does not matter. A run that it
/// allows counts for those that were ready.
///
/// ```
/// use std::time::Duration;
/// use wakeline::{Flow, condition::{Gate, any_of, every}, operator::source};
///
/// let now = Gate::paused();
/// let mut flow = Flow::new("report");
/// let report = flow
///     .add("report", source(async || Ok(Some("all is well"))))
///     .when(any_of(every(Duration::from_secs(60)), now.clone()));
/// ```
pub fn any_of(one: impl IntoCondition, other: impl IntoCondition) -> When {
    When(Tree::Several { any: true, all: vec![Part::new(one), Part::new(other)] })
}

/// Ready when both are, as an operator's conditions are anyway: for one of the sides of [`any_of`].
pub fn all_of(one: impl IntoCondition, other: impl IntoCondition) -> When {
    When(Tree::Several { any: false, all: vec![Part::new(one), Part::new(other)] })
}

#[derive(Debug)]
pub(super) enum Tree {
    Own(Own),
    Ports(OnPorts),
    Several { any: bool, all: Vec<Part> },
}

/// Somebody's condition, whatever it is.
pub(super) struct Own(Box<dyn Condition>);

#[derive(Debug)]
pub(super) struct Part {
    when: When,
    /// As it was asked last.
    ready: bool,
}

impl Part {
    fn new(condition: impl IntoCondition) -> Self {
        Self { when: condition.into_condition(), ready: false }
    }
}

impl When {
    pub(super) fn own(condition: impl Condition) -> Self {
        Self(Tree::Own(Own(Box::new(condition))))
    }

    /// Before a flow's first run.
    pub(crate) fn start(&mut self) {
        match &mut self.0 {
            Tree::Own(own) => own.0.start(),
            Tree::Ports(ports) => ports.start(),
            Tree::Several { all, .. } => all.iter_mut().for_each(|part| part.when.start()),
        }
    }

    pub(crate) fn poll(&mut self, show: Show<'_>, cx: &mut Context<'_>) -> Status {
        match &mut self.0 {
            Tree::Own(own) => own.0.poll_status(cx),
            Tree::Ports(ports) => ports.poll(show, cx),
            // All are asked, so that each keeps the waker.
            Tree::Several { any, all } => {
                let asked = all.iter_mut().map(|part| {
                    let status = part.when.poll(show, cx);
                    part.ready = status == Status::Ready;
                    status
                });
                if *any {
                    asked.reduce(Status::or).unwrap_or(Status::Never)
                } else {
                    // One that needs another operator to act needs it whatever else it waits for.
                    let both = |one: Status, other: Status| match one.and(other) {
                        Status::WaitEvent if one == Status::Wait || other == Status::Wait => Status::Wait,
                        status => status,
                    };
                    asked.reduce(both).unwrap_or(Status::Ready)
                }
            }
        }
    }

    /// The run begins. False if it cannot be had any more; then nothing has changed.
    pub(crate) fn claim(&mut self) -> bool {
        match &mut self.0 {
            Tree::Own(own) => own.0.claim(),
            Tree::Ports(ports) => {
                ports.claim();
                true
            }
            Tree::Several { any, all } => {
                let any = *any;
                let mut claimed = Vec::with_capacity(all.len());
                for (at, part) in all.iter_mut().enumerate().filter(|(_, part)| part.ready) {
                    if part.when.claim() {
                        claimed.push(at);
                    } else if !any {
                        claimed.into_iter().rev().for_each(|at: usize| all[at].when.give_back());
                        return false;
                    } else {
                        part.ready = false;
                    }
                }
                !any || !claimed.is_empty()
            }
        }
    }

    /// The run that was claimed does not take place.
    pub(crate) fn give_back(&mut self) {
        match &mut self.0 {
            Tree::Own(own) => own.0.give_back(),
            Tree::Ports(ports) => ports.give_back(),
            Tree::Several { all, .. } => {
                all.iter_mut().filter(|part| part.ready).for_each(|part| part.when.give_back());
            }
        }
    }

    /// The run has ended.
    pub(crate) fn ended(&mut self) {
        match &mut self.0 {
            Tree::Own(own) => own.0.ended(),
            Tree::Ports(_) => {}
            Tree::Several { all, .. } => all.iter_mut().filter(|part| part.ready).for_each(|part| part.when.ended()),
        }
    }

    /// It is not waited for, until it is asked again.
    pub(crate) fn rest(&mut self) {
        match &mut self.0 {
            Tree::Own(own) => own.0.rest(),
            Tree::Ports(ports) => ports.rest(),
            Tree::Several { all, .. } => all.iter_mut().for_each(|part| part.when.rest()),
        }
    }

    pub(crate) fn asked_last(&self) -> bool {
        match &self.0 {
            Tree::Own(own) => own.0.asked_last(),
            Tree::Ports(_) => false,
            Tree::Several { all, .. } => all.iter().any(|part| part.when.asked_last()),
        }
    }

    pub(crate) fn describe(&self) -> Cow<'static, str> {
        match &self.0 {
            Tree::Own(own) => own.0.describe(),
            Tree::Ports(ports) => ports.describe(),
            Tree::Several { any, all } => {
                let each: Vec<_> = all.iter().map(|part| part.when.describe()).collect();
                each.join(if *any { " or " } else { " and " }).into()
            }
        }
    }

    /// Shows the conditions on ports in it.
    pub(crate) fn on_ports<'a>(&'a self, visit: &mut dyn FnMut(&'a OnPorts)) {
        match &self.0 {
            Tree::Own(_) => {}
            Tree::Ports(ports) => visit(ports),
            Tree::Several { all, .. } => all.iter().for_each(|part| part.when.on_ports(visit)),
        }
    }

    /// What is wrong with it, before a flow runs; what an operator `has`, `runs`, `waits for`.
    pub(crate) fn problems(&self, facts: &dyn Fn(PortId) -> Option<PortFacts>, told: &mut Vec<String>) {
        match &self.0 {
            Tree::Own(own) => told.extend(own.0.problem()),
            Tree::Ports(ports) => ports.problems(facts, told),
            Tree::Several { all, .. } => all.iter().for_each(|part| part.when.problems(facts, told)),
        }
    }
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.describe())
    }
}
