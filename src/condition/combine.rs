//! Disjunction, `.when(any_of(a, b))`, and groups within it ([`all_of`]).
//!
//! The conditions of one operator are combined with "and" by default; a tree of them is [`When`].

use std::{borrow::Cow, collections::VecDeque, sync::Arc, task::Context};

use super::{
    Alarm, Condition, Status,
    conditions::{claim_all, for_each},
    port::{OnPorts, PortFacts, PortId, VisitPort},
};
use crate::{memory::Reservation, sync::discard};

/// What `.when(..)` takes: a condition, or several combined into one. Made from any [`Condition`], from a
/// [`Gate`](super::Gate), from conditions on ports, and by [`any_of`] and [`all_of`].
#[derive(Debug)]
#[must_use = "give it to an operator with `.when(..)`"]
pub struct When(pub(super) Tree);

/// What can be given to `.when(..)`. Every [`Condition`] can. Implement it for a type that stands for a combination of
/// conditions; for a condition of your own, implement [`Condition`].
pub trait IntoCondition {
    /// The condition.
    fn into_condition(self) -> When;
}

impl<C: Condition> IntoCondition for C {
    fn into_condition(self) -> When {
        When::boxed(self)
    }
}

impl IntoCondition for When {
    fn into_condition(self) -> When {
        self
    }
}

/// Ready when either side is ready; of two times, at the earlier one. A side that is `Never` has no effect unless both
/// are. A run claims the sides that were ready.
///
/// If one side is a period, the operator and its flow continue to run after its messages have ended. For "this many
/// messages, or after this long" use [`batch`](super::batch) or, for several ports,
/// [`or_after`](super::OnPorts::or_after): with these, the operator ends with its messages. A run that the other side
/// has allowed might find no message: use [`try_take`](crate::Input::try_take).
///
/// Directly nested `any_of` form one level, and so do directly nested [`all_of`]. The flow's check rejects more than 64
/// alternating levels.
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
    When::several(true, one.into_condition(), other.into_condition())
}

/// Ready when both sides are ready, like the conditions of an operator by default. Use it for one side of [`any_of`].
pub fn all_of(one: impl IntoCondition, other: impl IntoCondition) -> When {
    When::several(false, one.into_condition(), other.into_condition())
}

/// Describes the conditions that need tokio's timers.
pub(crate) fn needing_timers(conditions: &[When]) -> Vec<Cow<'static, str>> {
    let mut all = Vec::new();
    conditions.iter().for_each(|when| when.needing_timers(&mut all));
    all
}

/// The memory that these conditions reserve for an operator's runs.
pub(crate) fn reservations(conditions: &[When]) -> Vec<Arc<Reservation>> {
    let mut all = Vec::new();
    conditions.iter().for_each(|when| when.reservations(&mut |reservation| all.push(reservation.clone())));
    all
}

#[derive(Debug)]
pub(super) enum Tree {
    Boxed(BoxedCondition),
    Ports(OnPorts),
    Several {
        any: bool,
        /// Never contains a `Several` with the same `any`: its parts are merged into this one.
        all: VecDeque<Part>,
        /// 1, or one more than the depth of the deepest part.
        depth: usize,
    },
}

/// The limit of alternating levels of [`any_of`] and [`all_of`], since every operation on them is recursive.
const MOST_DEPTH: usize = 64;

/// Replaces conditions that are nested too deeply.
struct TooDeep;

impl Condition for TooDeep {
    fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
        Status::Never
    }

    fn problem(&self) -> Option<String> {
        Some(format!(
            "nests `any_of` and `all_of` more than {MOST_DEPTH} levels deep: use fewer levels, or one \
             `Condition` of your own"
        ))
    }

    fn describe(&self) -> Cow<'static, str> {
        "conditions that are nested too deeply".into()
    }
}

/// A condition of any type.
pub(super) struct BoxedCondition {
    condition: Box<dyn Condition>,
    is_polled_last: bool,
    /// The timer for [`Status::WaitTime`], so that conditions need none of their own.
    alarm: Alarm,
}

impl BoxedCondition {
    fn poll(&mut self, cx: &mut Context<'_>) -> Status {
        match self.condition.poll_status(cx) {
            Status::WaitTime(due) if self.alarm.has_passed(due, cx) => Status::Ready,
            status => status,
        }
    }

    fn stop_waiting(&mut self) {
        self.alarm.stop_waiting();
        self.condition.stop_waiting();
    }
}

/// An operator's conditions are dropped together: a panic of one destructor is contained here.
impl Drop for BoxedCondition {
    fn drop(&mut self) {
        discard(std::mem::replace(&mut self.condition, Box::new(DroppedCondition)));
    }
}

/// Replaces a condition that is being dropped.
struct DroppedCondition;

impl Condition for DroppedCondition {
    fn poll_status(&mut self, _: &mut Context<'_>) -> Status {
        Status::Never
    }
}

#[derive(Debug)]
pub(super) struct Part {
    when: When,
    /// The result of the last poll.
    ready: bool,
}

impl Part {
    fn new(when: When) -> Self {
        Self { when, ready: false }
    }
}

impl When {
    pub(super) fn boxed(condition: impl Condition) -> Self {
        // Called only here: it is user code, which may answer differently the next time.
        let is_polled_last = condition.is_polled_last();
        Self(Tree::Boxed(BoxedCondition { condition: Box::new(condition), is_polled_last, alarm: Alarm::default() }))
    }

    fn several(any: bool, one: Self, other: Self) -> Self {
        let depth = one.depth(any).max(other.depth(any));
        if depth > MOST_DEPTH {
            return Self::boxed(TooDeep);
        }
        // If built in a loop, the longer side may be either one.
        let all = match (one.0, other.0) {
            (Tree::Several { any: a, mut all, .. }, Tree::Several { any: b, all: mut more, .. })
                if a == any && b == any =>
            {
                if all.len() < more.len() {
                    all.into_iter().rev().for_each(|part| more.push_front(part));
                    more
                } else {
                    all.extend(more);
                    all
                }
            }
            (Tree::Several { any: a, mut all, .. }, other) if a == any => {
                all.push_back(Part::new(Self(other)));
                all
            }
            (one, Tree::Several { any: b, mut all, .. }) if b == any => {
                all.push_front(Part::new(Self(one)));
                all
            }
            (one, other) => [one, other].map(|tree| Part::new(Self(tree))).into(),
        };
        Self(Tree::Several { any, all, depth })
    }

    /// The depth of an `any_of` or `all_of` that contains this.
    fn depth(&self, within_any: bool) -> usize {
        match &self.0 {
            Tree::Several { any, depth, .. } => depth + usize::from(*any != within_any),
            Tree::Boxed(_) | Tree::Ports(_) => 1,
        }
    }

    pub(crate) fn start(&mut self) {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.condition.start(),
            Tree::Ports(ports) => ports.start(),
            Tree::Several { all, .. } => for_each(all, |part| part.when.start()),
        }
    }

    pub(crate) fn poll(&mut self, visit: VisitPort<'_>, cx: &mut Context<'_>) -> Status {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.poll(cx),
            Tree::Ports(ports) => ports.poll(visit, cx),
            // Polls all of them, so that each keeps the waker.
            Tree::Several { any, all, .. } => {
                let asked = all.iter_mut().map(|part| {
                    let status = part.when.poll(visit, cx);
                    part.ready = status == Status::Ready;
                    status
                });
                if *any {
                    asked.reduce(Status::or).unwrap_or(Status::Never)
                } else {
                    // A wait for another operator takes precedence over a wait for an event.
                    let both = |one: Status, other: Status| match one.and(other) {
                        Status::WaitEvent if one == Status::Wait || other == Status::Wait => Status::Wait,
                        status => status,
                    };
                    asked.reduce(both).unwrap_or(Status::Ready)
                }
            }
        }
    }

    /// Claims what a run needs. False if it is no longer available; then nothing has changed.
    pub(crate) fn claim(&mut self) -> bool {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.condition.claim(),
            Tree::Ports(ports) => {
                ports.claim();
                true
            }
            Tree::Several { any, all, .. } => {
                let any = *any;
                let claim = |part: &mut Part| {
                    // In an `any_of`, a part that rejects the claim is left out.
                    let claimed = part.ready && part.when.claim();
                    part.ready &= claimed || !any;
                    claimed || any
                };
                let give_back = |part: &mut Part| {
                    if part.ready {
                        part.when.give_back();
                    }
                };
                let claimed = claim_all(all.make_contiguous(), claim, give_back).is_none();
                claimed && (!any || all.iter().any(|part| part.ready))
            }
        }
    }

    pub(crate) fn give_back(&mut self) {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.condition.give_back(),
            Tree::Ports(ports) => ports.give_back(),
            Tree::Several { all, .. } => {
                for_each(all.iter_mut().filter(|part| part.ready), |part| part.when.give_back());
            }
        }
    }

    pub(crate) fn ended(&mut self) {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.condition.ended(),
            Tree::Ports(_) => {}
            Tree::Several { all, .. } => for_each(all.iter_mut().filter(|part| part.ready), |part| part.when.ended()),
        }
    }

    pub(crate) fn stop_waiting(&mut self) {
        match &mut self.0 {
            Tree::Boxed(boxed) => boxed.stop_waiting(),
            Tree::Ports(ports) => ports.stop_waiting(),
            Tree::Several { all, .. } => for_each(all, |part| part.when.stop_waiting()),
        }
    }

    pub(crate) fn is_polled_last(&self) -> bool {
        match &self.0 {
            Tree::Boxed(boxed) => boxed.is_polled_last,
            Tree::Ports(_) => false,
            Tree::Several { all, .. } => all.iter().any(|part| part.when.is_polled_last()),
        }
    }

    pub(crate) fn describe(&self) -> Cow<'static, str> {
        match &self.0 {
            Tree::Boxed(boxed) => boxed.condition.describe(),
            Tree::Ports(ports) => ports.describe(),
            Tree::Several { any, all, .. } => {
                let each: Vec<_> = all.iter().map(|part| part.when.describe()).collect();
                each.join(if *any { " or " } else { " and " }).into()
            }
        }
    }

    /// Visits the memory that its conditions reserve for runs.
    pub(crate) fn reservations(&self, visit: &mut dyn FnMut(&Arc<Reservation>)) {
        match &self.0 {
            Tree::Boxed(boxed) => boxed.condition.reservation().into_iter().for_each(visit),
            Tree::Ports(_) => {}
            Tree::Several { all, .. } => all.iter().for_each(|part| part.when.reservations(visit)),
        }
    }

    /// True if the condition concerns only ports.
    pub(crate) fn is_on_ports(&self) -> bool {
        match &self.0 {
            Tree::Boxed(_) => false,
            Tree::Ports(_) => true,
            Tree::Several { all, .. } => all.iter().all(|part| part.when.is_on_ports()),
        }
    }

    /// Describes its conditions that need timers.
    fn needing_timers(&self, all: &mut Vec<Cow<'static, str>>) {
        match &self.0 {
            Tree::Boxed(boxed) => all.extend(boxed.condition.needs_timers().then(|| boxed.condition.describe())),
            Tree::Ports(ports) => all.extend(ports.needs_timers().then(|| ports.describe())),
            Tree::Several { all: parts, .. } => parts.iter().for_each(|part| part.when.needing_timers(all)),
        }
    }

    /// Visits its conditions on ports.
    pub(crate) fn on_ports<'a>(&'a self, visit: &mut dyn FnMut(&'a OnPorts)) {
        match &self.0 {
            Tree::Boxed(_) => {}
            Tree::Ports(ports) => visit(ports),
            Tree::Several { all, .. } => all.iter().for_each(|part| part.when.on_ports(visit)),
        }
    }

    /// Collects its configuration errors before a flow runs, each as the rest of a sentence about the operator: `has`,
    /// `runs`, `waits for`.
    pub(crate) fn problems(&self, facts: &dyn Fn(PortId) -> Option<PortFacts>, problems: &mut Vec<String>) {
        match &self.0 {
            Tree::Boxed(boxed) => problems.extend(boxed.condition.problem()),
            Tree::Ports(ports) => ports.problems(facts, problems),
            Tree::Several { all, .. } => all.iter().for_each(|part| part.when.problems(facts, problems)),
        }
    }
}

impl std::fmt::Debug for BoxedCondition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.condition.describe())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::sync::{Mutex, lock};

    /// A condition that is set by the test, and counts its open claims.
    #[derive(Clone, Default)]
    struct Leaf(Arc<Mutex<LeafState>>);

    #[derive(Default)]
    struct LeafState {
        is_ready: bool,
        refuses: bool,
        /// Claims that were neither given back nor used.
        open: i32,
    }

    impl Leaf {
        fn set(&self, is_ready: bool, refuses: bool) {
            let mut state = lock(&self.0);
            (state.is_ready, state.refuses) = (is_ready, refuses);
        }

        fn open(&self) -> i32 {
            lock(&self.0).open
        }
    }

    impl Condition for Leaf {
        fn poll_status(&mut self, _cx: &mut Context<'_>) -> Status {
            if lock(&self.0).is_ready { Status::Ready } else { Status::Wait }
        }

        fn claim(&mut self) -> bool {
            let mut state = lock(&self.0);
            assert!(state.is_ready && state.open == 0);
            state.open += i32::from(!state.refuses);
            !state.refuses
        }

        fn give_back(&mut self) {
            lock(&self.0).open -= 1;
        }

        fn ended(&mut self) {
            lock(&self.0).open -= 1;
        }
    }

    #[derive(Clone, Debug)]
    enum Shape {
        Leaf(usize),
        Several { any: bool, both: Box<[Shape; 2]> },
    }

    const LEAVES: usize = 6;

    impl Shape {
        fn any() -> impl Strategy<Value = Self> {
            let several = |shape: BoxedStrategy<Self>| {
                let two = (any::<bool>(), shape.clone(), shape);
                two.prop_map(|(any, one, other)| Self::Several { any, both: Box::new([one, other]) })
            };
            Just(Self::Leaf(0)).prop_recursive(4, 12, 2, move |shape| several(shape.boxed()))
        }

        /// Gives each leaf a unique number; false if there are too many.
        fn number(&mut self, next: &mut usize) -> bool {
            match self {
                Self::Leaf(at) => {
                    *at = *next;
                    *next += 1;
                    *at < LEAVES
                }
                Self::Several { both, .. } => both.iter_mut().all(|shape| shape.number(next)),
            }
        }

        fn when(&self, leaves: &[Leaf]) -> When {
            match self {
                Self::Leaf(at) => leaves[*at].clone().into_condition(),
                Self::Several { any: true, both } => any_of(both[0].when(leaves), both[1].when(leaves)),
                Self::Several { any: false, both } => all_of(both[0].when(leaves), both[1].when(leaves)),
            }
        }

        fn is_ready(&self, leaves: &[(bool, bool)]) -> bool {
            match self {
                Self::Leaf(at) => leaves[*at].0,
                Self::Several { any: true, both } => both.iter().any(|shape| shape.is_ready(leaves)),
                Self::Several { any: false, both } => both.iter().all(|shape| shape.is_ready(leaves)),
            }
        }

        /// The leaves that claim something for a run; `None` if it does not take place.
        fn claims(&self, leaves: &[(bool, bool)]) -> Option<Vec<usize>> {
            let ready = |shape: &&Self| shape.is_ready(leaves);
            match self {
                Self::Leaf(at) => (!leaves[*at].1).then(|| vec![*at]),
                Self::Several { any: true, both } => {
                    let claims = both.iter().filter(ready).filter_map(|shape| shape.claims(leaves));
                    claims.reduce(|one, other| [one, other].concat())
                }
                Self::Several { any: false, both } => Some([both[0].claims(leaves)?, both[1].claims(leaves)?].concat()),
            }
        }
    }

    proptest! {
        /// An `all_of` claims all or nothing, an `any_of` whatever is available; each claim is given back or used.
        #[test]
        fn what_is_claimed_is_given_back_or_used(
            mut shape in Shape::any(),
            steps in prop::collection::vec((prop::array::uniform6((any::<bool>(), any::<bool>())), any::<bool>()), 1..20),
        ) {
            prop_assume!(shape.number(&mut 0));
            let leaves: [Leaf; LEAVES] = Default::default();
            let open = || (0..LEAVES).filter(|at| leaves[*at].open() == 1).collect::<Vec<_>>();
            let mut when = shape.when(&leaves);
            let mut cx = Context::from_waker(std::task::Waker::noop());
            for (states, runs) in steps {
                leaves.iter().zip(states).for_each(|(leaf, (is_ready, refuses))| leaf.set(is_ready, refuses));
                let status = when.poll(&mut |_, _| unreachable!("there are no ports"), &mut cx);
                prop_assert_eq!(status == Status::Ready, shape.is_ready(&states));
                if status != Status::Ready {
                    continue;
                }
                let claims = shape.claims(&states);
                prop_assert_eq!(when.claim(), claims.is_some());
                prop_assert_eq!(open(), claims.clone().unwrap_or_default());
                if claims.is_some() {
                    if runs { when.ended() } else { when.give_back() }
                }
                prop_assert!(leaves.iter().all(|leaf| leaf.open() == 0));
            }
        }
    }
}
