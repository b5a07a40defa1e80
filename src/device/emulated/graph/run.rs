//! One launch of an exec: its nodes run one after another, in an order that their edges allow.
//!
//! A GPU runs unordered nodes at the same time. Here one thread runs them one by one, in a different order at every
//! launch, so that a missing edge becomes visible: of two consecutive launches, the second makes the opposite choices.
//! The order depends only on the number of the exec's launches and, in a simulation, on its seed.
//!
//! A child graph becomes its nodes between two empty ones. The body of a conditional node is ordered anew for each
//! iteration. For planned faults, a node counts as one call per launch; in a body, each time that it runs.

use std::{collections::BTreeSet, ptr::from_mut, sync::Arc};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustc_hash::FxHashMap;

use super::{
    super::{
        faults::FaultPlan,
        memory::ReservedRange,
        work::{Fault, Work},
    },
    ExecSnapshot,
    nodes::{EmulatedNode, OwnedNodeWork},
};
use crate::device::backend::{Address, Endpoint, GraphCondition, RawNode};

/// See the module.
pub(in super::super) struct Sequence {
    steps: LaunchSteps,
    fault_plan: Arc<FaultPlan>,
    order_seed: OrderSeed,
}

enum LaunchSteps {
    /// Ordered by the launch itself, for a device with planned faults: the nodes are counted in the order of the
    /// launches.
    Ordered(Vec<LaunchStep>),
    /// Not ordered until the launch runs, on the thread that runs it: the launching thread blocks launches on all
    /// devices.
    Unordered(Arc<ExecSnapshot>),
}

enum LaunchStep {
    Work(Work),
    Alloc(Arc<ReservedRange>),
    Free(Arc<ReservedRange>),
    Conditional { when: GraphCondition, flag: Address, within: Vec<EmulatedNode> },
}

/// The seed of the order, and the number of earlier launches that used it.
#[derive(Clone, Copy, Debug)]
pub(super) struct OrderSeed {
    pub(super) seed: u64,
    pub(super) run: u64,
}

struct PlannedStep {
    before: Vec<usize>,
    step: Option<LaunchStep>,
}

impl Sequence {
    pub(super) fn new(snapshot: &Arc<ExecSnapshot>, fault_plan: &Arc<FaultPlan>, order_seed: OrderSeed) -> Self {
        let steps = match fault_plan.is_empty() {
            true => LaunchSteps::Unordered(snapshot.clone()),
            false => LaunchSteps::Ordered(ordered(&snapshot.nodes, fault_plan, order_seed)),
        };
        Self { steps, fault_plan: fault_plan.clone(), order_seed }
    }

    pub(in super::super) fn len(&self) -> usize {
        match &self.steps {
            LaunchSteps::Ordered(steps) => steps.len(),
            LaunchSteps::Unordered(snapshot) => count(&snapshot.nodes),
        }
    }

    /// Runs the steps until one faults or `is_alive` returns false.
    ///
    /// # Safety
    /// The contract of [`Work::run`].
    pub(in super::super) unsafe fn run(self, is_alive: &dyn Fn() -> bool) -> Result<(), Fault> {
        let Self { steps, fault_plan, order_seed } = self;
        let steps = match steps {
            LaunchSteps::Ordered(steps) => steps,
            LaunchSteps::Unordered(snapshot) => ordered(&snapshot.nodes, &fault_plan, order_seed),
        };
        for step in steps {
            if !is_alive() {
                break;
            }
            match step {
                LaunchStep::Work(work) => {
                    let what = work.describe();
                    // SAFETY: guaranteed by the caller: all that comes before this node has run.
                    unsafe { work.run(is_alive) }.map_err(|Fault(why)| Fault(format!("{what}: {why}")))?;
                }
                LaunchStep::Alloc(memory) => memory.map().map_err(|error| Fault(format!("allocation: {error:#}")))?,
                LaunchStep::Free(memory) => memory.unmap(),
                LaunchStep::Conditional { when, flag, within } => {
                    let mut order_seed = OrderSeed { seed: order_seed.seed.wrapping_add(order_seed.run), run: 0 };
                    // SAFETY: guaranteed by the caller.
                    while is_alive() && unsafe { is_flag_set(flag) }? {
                        let steps = LaunchSteps::Ordered(ordered(&within, &fault_plan, order_seed));
                        // SAFETY: guaranteed by the caller.
                        unsafe { Self { steps, fault_plan: fault_plan.clone(), order_seed }.run(is_alive) }?;
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
/// The contract of [`Work::run`].
unsafe fn is_flag_set(flag: Address) -> Result<bool, Fault> {
    let mut value = 0_u32;
    let to = Endpoint::Host(from_mut(&mut value).cast());
    let look = Work::Copy { to, from: Endpoint::Device(flag), bytes: 4, planned: false };
    // SAFETY: `value` has four bytes and outlives the copy; the flag is valid, as the caller guarantees.
    unsafe { look.run(&|| true) }.map_err(|Fault(why)| Fault(format!("a condition's flag: {why}")))?;
    Ok(value != 0)
}

fn count(nodes: &[EmulatedNode]) -> usize {
    let of = |node: &EmulatedNode| match &node.work {
        OwnedNodeWork::Child(nodes) => count(nodes),
        OwnedNodeWork::Empty | OwnedNodeWork::Record(_) | OwnedNodeWork::Wait(_) => 0,
        _ => usize::from(node.enabled),
    };
    nodes.iter().map(of).sum()
}

fn ordered(nodes: &[EmulatedNode], fault_plan: &FaultPlan, order_seed: OrderSeed) -> Vec<LaunchStep> {
    let mut planned = Vec::new();
    flatten(nodes, fault_plan, &[], &mut planned);
    order(planned, order_seed)
}

/// Appends nodes with their predecessors. Nodes without predecessors come after `roots`.
fn flatten(nodes: &[EmulatedNode], fault_plan: &FaultPlan, roots: &[usize], planned: &mut Vec<PlannedStep>) {
    let mut ends: FxHashMap<RawNode, usize> = FxHashMap::default();
    let mut firsts = Vec::with_capacity(nodes.len());
    for node in nodes {
        #[cfg(test)]
        super::tests::visit();
        let first = planned.len();
        firsts.push(first);
        let step = if node.enabled { step(&node.work, fault_plan) } else { None };
        planned.push(PlannedStep { before: Vec::new(), step });
        if let OwnedNodeWork::Child(children) = &node.work {
            flatten(children, fault_plan, &[first], planned);
            let before = (first..planned.len()).collect();
            planned.push(PlannedStep { before, step: None });
        }
        ends.insert(node.id, planned.len() - 1);
    }
    // A node can depend on a node that was added later.
    for (node, first) in nodes.iter().zip(firsts) {
        let before = &mut planned[first].before;
        before.extend(node.after.iter().filter_map(|id| ends.get(id)));
        if before.is_empty() {
            before.extend(roots);
        }
    }
}

fn step(work: &OwnedNodeWork, fault_plan: &FaultPlan) -> Option<LaunchStep> {
    let work = match work {
        OwnedNodeWork::Kernel { kernel, args } => {
            Work::Kernel { kernel, args: args.clone(), planned: fault_plan.next_kernel_fails(kernel.name) }
        }
        OwnedNodeWork::External { name, args, body } => {
            Work::External { name, args: args.clone(), body: body.clone(), planned: fault_plan.next_kernel_fails(name) }
        }
        OwnedNodeWork::Copy { to, from, bytes } => {
            Work::Copy { to: *to, from: *from, bytes: *bytes, planned: fault_plan.next_copy_fails() }
        }
        OwnedNodeWork::Fill { to, pattern, bytes } => Work::Fill { to: *to, pattern: *pattern, bytes: *bytes },
        OwnedNodeWork::Host(_) if fault_plan.next_function_is_lost() => Work::SkippedHost,
        OwnedNodeWork::Host(callback) => {
            let callback = callback.clone();
            Work::Host(Box::new(move || callback()))
        }
        OwnedNodeWork::Alloc(memory) => return Some(LaunchStep::Alloc(memory.clone())),
        OwnedNodeWork::Free(memory) => return Some(LaunchStep::Free(memory.clone())),
        OwnedNodeWork::Conditional { when, flag, within, .. } => {
            return Some(LaunchStep::Conditional { when: *when, flag: *flag, within: within.clone() });
        }
        // A launch waits for its events before it begins, and records others when it is done.
        OwnedNodeWork::Empty | OwnedNodeWork::Child(_) | OwnedNodeWork::Record(_) | OwnedNodeWork::Wait(_) => {
            return None;
        }
    };
    Some(LaunchStep::Work(work))
}

/// The steps in an order that respects the predecessors.
fn order(planned: Vec<PlannedStep>, order_seed: OrderSeed) -> Vec<LaunchStep> {
    let mut random = StdRng::seed_from_u64(order_seed.seed.wrapping_add(order_seed.run / 2));
    let ranks: Vec<u64> = planned.iter().map(|_| random.random()).collect();
    let mut left: Vec<usize> = planned.iter().map(|entry| entry.before.len()).collect();
    let mut successors: Vec<Vec<usize>> = planned.iter().map(|_| Vec::new()).collect();
    for (at, entry) in planned.iter().enumerate() {
        entry.before.iter().for_each(|before| successors[*before].push(at));
    }
    let mut ready: BTreeSet<(u64, usize)> = left
        .iter()
        .zip(&ranks)
        .enumerate()
        .filter(|(_, (left, _))| **left == 0)
        .map(|(at, (_, rank))| (*rank, at))
        .collect();
    let mut steps: Vec<Option<LaunchStep>> = planned.into_iter().map(|entry| entry.step).collect();
    let mut ordered = Vec::with_capacity(steps.len());
    // The second of two launches prefers the nodes that the first deferred.
    while let Some((_, at)) = if order_seed.run.is_multiple_of(2) { ready.pop_first() } else { ready.pop_last() } {
        ordered.extend(steps[at].take());
        for next in &successors[at] {
            left[*next] -= 1;
            if left[*next] == 0 {
                ready.insert((ranks[*next], *next));
            }
        }
    }
    ordered
}
