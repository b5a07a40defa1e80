//! A launch as one call of its stream, and the host functions that it calls.

use std::{collections::VecDeque, sync::Arc};

use rustc_hash::FxHashMap;

use super::{
    super::{
        happens_before::{Component, HappensBefore},
        race_state::{RaceState, find_mut, race_state},
        shadow::{AccessKind, Stamp},
    },
    nodes::{CheckedNode, NodeAccess, NodeAction},
};
use crate::{
    device::backend::{HostCallback, RawEvent, RawExec},
    error::Result,
    sync::{Mutex, MutexGuard},
};

/// The launches for which a host function has not been called yet, oldest first. The checker does not know which exec
/// makes a call, so a call counts for the oldest launch of each exec.
#[derive(Debug, Default)]
pub(super) struct CallTracker(Mutex<VecDeque<(RawExec, HappensBefore)>>);

#[derive(Debug, Default)]
pub(super) struct CheckedLaunch {
    pub(super) accesses: Vec<NodeAccess>,
    pub(super) waits: Vec<RawEvent>,
    pub(super) records: Vec<RawEvent>,
    pub(super) trackers: Vec<Arc<CallTracker>>,
}

impl CallTracker {
    pub(super) fn lock(&self) -> MutexGuard<'_, VecDeque<(RawExec, HappensBefore)>> {
        self.0.lock()
    }

    /// Handles a call to the function: a launch has reached its node.
    fn call(&self) {
        let mut oldest: FxHashMap<RawExec, HappensBefore> = FxHashMap::default();
        self.lock().retain(|(exec, clock)| {
            let is_later = oldest.contains_key(exec);
            if !is_later {
                oldest.insert(*exec, clock.clone());
            }
            is_later
        });
        oldest.values().for_each(|clock| race_state().observe(clock));
    }

    pub(super) fn watch(self: &Arc<Self>, callback: &HostCallback) -> HostCallback {
        let (tracker, callback) = (self.clone(), callback.clone());
        Arc::new(move || {
            tracker.call();
            callback();
        })
    }
}

impl CheckedLaunch {
    pub(super) fn add(&mut self, nodes: &[CheckedNode]) {
        let mut nodes: Vec<&CheckedNode> = nodes.iter().filter(|node| node.enabled).collect();
        // A node has fewer predecessors than each of its successors, so this is a topological order.
        nodes.sort_by_key(|node| node.before.count());
        for node in nodes {
            match &node.action {
                NodeAction::Nothing => {}
                NodeAction::Access(access) => self.accesses.push(access.clone()),
                NodeAction::Host(trackers) => self.trackers.push(trackers.clone()),
                NodeAction::Child(nodes) => self.add(nodes),
                NodeAction::Record(event) => self.records.push(*event),
                NodeAction::Wait(event) => self.waits.push(*event),
                NodeAction::Conditional { flag, within, .. } => {
                    self.accesses.push(flag.clone());
                    self.add(within.as_deref().unwrap_or_default());
                }
            }
        }
    }
}

impl RaceState {
    /// Adds a launch as one call into a stream. If it races, uses memory that does not exist, or reads bytes that were
    /// never written, it is refused and nothing changes.
    pub(super) fn launch(
        &mut self,
        component: Component,
        exec: (u64, RawExec),
        launch: &CheckedLaunch,
    ) -> Result<(HappensBefore, u64)> {
        let mut past = self.execs.get(&exec).cloned().unwrap_or_default();
        for event in &launch.waits {
            if let Some(recorded) = self.recorded(*event) {
                past.merge(&recorded, |_, _| true);
            }
        }
        let mut before = self.before(component)?.into_owned();
        before.merge(&past, |_, _| true);
        let new = |kind| Stamp { component, tick: 0, kind, in_graph: true };
        for access in &launch.accesses {
            access.touches.iter().try_for_each(|touch| {
                self.check_not_borrowed(&new(access.kind), touch, access.since)?;
                self.check_ordered(&new(access.kind), &before, touch)
            })?;
        }
        self.apply(&new, &launch.accesses)?;
        self.order_after(component, &past);
        let (clock, tick) = self.call(component)?;
        let clock = clock.clone();
        for access in &launch.accesses {
            self.mark(Stamp { tick, ..new(access.kind) }, &access.touches, &clock);
        }
        self.execs.insert(exec, clock.clone());
        Ok((clock, tick))
    }

    /// Updates, node by node, which memory exists and is written. On an error nothing changes.
    fn apply(&mut self, new: &impl Fn(AccessKind) -> Stamp, accesses: &[NodeAccess]) -> Result<()> {
        let mut changed = Vec::new();
        let outcome = accesses.iter().try_for_each(|NodeAccess { kind, touches, .. }| {
            touches.iter().try_for_each(|touch| self.check_contents(&new(*kind), touch))?;
            for touch in touches.iter().filter(|touch| touch.write) {
                let Some((region, _)) = find_mut(&mut self.regions, touch) else { continue };
                changed.push((*touch, region.written.clone(), region.unallocated));
                match kind {
                    AccessKind::Allocation => region.unallocated = false,
                    AccessKind::Free => region.unallocated = true,
                    _ => {}
                }
            }
            self.write(*kind, touches);
            Ok(())
        });
        if outcome.is_err() {
            for (touch, written, unallocated) in changed.into_iter().rev() {
                if let Some((region, _)) = find_mut(&mut self.regions, &touch) {
                    (region.written, region.unallocated) = (written, unallocated);
                }
            }
        }
        outcome
    }
}
