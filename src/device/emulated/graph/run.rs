//! One launch of an exec: its nodes one after the other, in an order that their edges allow.
//!
//! A GPU runs unordered nodes at the same time. Here one thread runs them one by one, in another order at every launch,
//! so that the lack of an edge becomes visible: of two consecutive launches the second makes the opposite choices. The
//! order depends only on how often the exec was launched and, in a simulation, on its seed.
//!
//! A child graph is its nodes between two empty ones. The body of a conditional node is ordered anew for each round.
//! For planned faults, a node counts as a call at the launch; within a body, each time that it runs.

use std::{collections::BTreeSet, ptr::from_mut, sync::Arc};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustc_hash::FxHashMap;

use super::{
    super::{
        faults::Plan,
        memory::Reserved,
        work::{Fault, Work},
    },
    Program,
    nodes::{Node, Task},
};
use crate::device::backend::{Address, Endpoint, GraphCondition, RawNode};

/// See the module.
pub(in super::super) struct Sequence {
    steps: Steps,
    plan: Arc<Plan>,
    order_seed: OrderSeed,
}

enum Steps {
    /// For a device with planned faults.
    Ordered(Vec<Step>),
    /// Ordered when the launch runs, by the thread that runs it: the launching thread blocks launches on all devices.
    Of(Arc<Program>),
}

enum Step {
    Work(Work),
    Alloc(Arc<Reserved>),
    Free(Arc<Reserved>),
    Conditional { when: GraphCondition, flag: Address, within: Vec<Node> },
}

/// The source of choices: a seed, and how often it was used.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderSeed {
    pub(super) seed: u64,
    pub(super) run: u64,
}

struct Turn {
    before: Vec<usize>,
    step: Option<Step>,
}

impl Sequence {
    pub(super) fn new(program: &Arc<Program>, plan: &Arc<Plan>, order_seed: OrderSeed) -> Self {
        let steps = match plan.is_empty() {
            true => Steps::Of(program.clone()),
            false => Steps::Ordered(ordered(&program.nodes, plan, order_seed)),
        };
        Self { steps, plan: plan.clone(), order_seed }
    }

    pub(in super::super) fn len(&self) -> usize {
        match &self.steps {
            Steps::Ordered(steps) => steps.len(),
            Steps::Of(program) => count(&program.nodes),
        }
    }

    /// Runs the steps, as long as the device is `going`; a fault ends the launch.
    ///
    /// # Safety
    /// As [`Work::run`].
    pub(in super::super) unsafe fn run(self, going: &dyn Fn() -> bool) -> Result<(), Fault> {
        let Self { steps, plan, order_seed } = self;
        let steps = match steps {
            Steps::Ordered(steps) => steps,
            Steps::Of(program) => ordered(&program.nodes, &plan, order_seed),
        };
        for step in steps {
            if !going() {
                break;
            }
            match step {
                Step::Work(work) => {
                    let what = work.describe();
                    // SAFETY: guaranteed by the caller: all that comes before this node has run.
                    unsafe { work.run(going) }.map_err(|Fault(why)| Fault(format!("{what}: {why}")))?;
                }
                Step::Alloc(memory) => memory.appear().map_err(|error| Fault(format!("allocation: {error}")))?,
                Step::Free(memory) => memory.vanish(),
                Step::Conditional { when, flag, within } => {
                    let mut order_seed = OrderSeed { seed: order_seed.seed.wrapping_add(order_seed.run), run: 0 };
                    // SAFETY: guaranteed by the caller.
                    while going() && unsafe { is_raised(flag) }? {
                        let steps = Steps::Ordered(ordered(&within, &plan, order_seed));
                        // SAFETY: guaranteed by the caller.
                        unsafe { Self { steps, plan: plan.clone(), order_seed }.run(going) }?;
                        order_seed.run += 1;
                        if when == GraphCondition::If {
                            break;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// # Safety
/// As [`Work::run`].
unsafe fn is_raised(flag: Address) -> Result<bool, Fault> {
    let mut value = 0_u32;
    let to = Endpoint::Host(from_mut(&mut value).cast());
    let look = Work::Copy { to, from: Endpoint::Device(flag), bytes: 4, planned: false };
    // SAFETY: `value` has four bytes and outlives the copy; the flag is valid, as the caller guarantees.
    unsafe { look.run(&|| true) }.map_err(|Fault(why)| Fault(format!("a condition's flag: {why}")))?;
    Ok(value != 0)
}

fn count(nodes: &[Node]) -> usize {
    let of = |node: &Node| match &node.task {
        Task::Child(nodes) => count(nodes),
        Task::Empty | Task::Record(_) | Task::Wait(_) => 0,
        _ => usize::from(node.enabled),
    };
    nodes.iter().map(of).sum()
}

fn ordered(nodes: &[Node], plan: &Plan, order_seed: OrderSeed) -> Vec<Step> {
    let mut places = Vec::new();
    lay_out(nodes, plan, &[], &mut places);
    order(places, order_seed)
}

/// Appends nodes with their predecessors. Nodes without any come after `roots`.
fn lay_out(nodes: &[Node], plan: &Plan, roots: &[usize], places: &mut Vec<Turn>) {
    let mut ends: FxHashMap<RawNode, usize> = FxHashMap::default();
    let mut firsts = Vec::with_capacity(nodes.len());
    for node in nodes {
        #[cfg(test)]
        super::tests::visit();
        let first = places.len();
        firsts.push(first);
        let step = if node.enabled { step(&node.task, plan) } else { None };
        places.push(Turn { before: Vec::new(), step });
        if let Task::Child(children) = &node.task {
            lay_out(children, plan, &[first], places);
            let before = (first..places.len()).collect();
            places.push(Turn { before, step: None });
        }
        ends.insert(node.id, places.len() - 1);
    }
    // A node may depend on one that was added later.
    for (node, first) in nodes.iter().zip(firsts) {
        let before = &mut places[first].before;
        before.extend(node.after.iter().filter_map(|id| ends.get(id)));
        if before.is_empty() {
            before.extend(roots);
        }
    }
}

fn step(task: &Task, plan: &Plan) -> Option<Step> {
    let work = match task {
        Task::Kernel { kernel, args } => Work::Kernel { kernel, args: args.clone(), planned: plan.kernel(kernel.name) },
        Task::External { name, args, body } => {
            Work::External { name, args: args.clone(), body: body.clone(), planned: plan.kernel(name) }
        }
        Task::Copy { to, from, bytes } => Work::Copy { to: *to, from: *from, bytes: *bytes, planned: plan.copy() },
        Task::Fill { to, pattern, bytes } => Work::Fill { to: *to, pattern: *pattern, bytes: *bytes },
        Task::Host(_) if plan.function() => Work::Lost,
        Task::Host(callback) => {
            let callback = callback.clone();
            Work::Host(Box::new(move || callback()))
        }
        Task::Alloc(memory) => return Some(Step::Alloc(memory.clone())),
        Task::Free(memory) => return Some(Step::Free(memory.clone())),
        Task::Conditional { when, flag, within, .. } => {
            return Some(Step::Conditional { when: *when, flag: *flag, within: within.clone() });
        }
        // A launch waits for its events before it begins, and records others when it is done.
        Task::Empty | Task::Child(_) | Task::Record(_) | Task::Wait(_) => return None,
    };
    Some(Step::Work(work))
}

/// The steps in an order that respects the predecessors.
fn order(places: Vec<Turn>, order_seed: OrderSeed) -> Vec<Step> {
    let mut random = StdRng::seed_from_u64(order_seed.seed.wrapping_add(order_seed.run / 2));
    let ranks: Vec<u64> = places.iter().map(|_| random.random()).collect();
    let mut left: Vec<usize> = places.iter().map(|place| place.before.len()).collect();
    let mut then: Vec<Vec<usize>> = places.iter().map(|_| Vec::new()).collect();
    for (at, place) in places.iter().enumerate() {
        place.before.iter().for_each(|before| then[*before].push(at));
    }
    let mut ready: BTreeSet<(u64, usize)> = left
        .iter()
        .zip(&ranks)
        .enumerate()
        .filter(|(_, (left, _))| **left == 0)
        .map(|(at, (_, rank))| (*rank, at))
        .collect();
    let mut steps: Vec<Option<Step>> = places.into_iter().map(|place| place.step).collect();
    let mut ordered = Vec::with_capacity(steps.len());
    // The second of two launches prefers what the first deferred.
    while let Some((_, at)) = if order_seed.run.is_multiple_of(2) { ready.pop_first() } else { ready.pop_last() } {
        ordered.extend(steps[at].take());
        for next in &then[at] {
            left[*next] -= 1;
            if left[*next] == 0 {
                ready.insert((ranks[*next], *next));
            }
        }
    }
    ordered
}
