//! Flows: build, check and run operators and the hubs between them.
//!
//! ```text
//!   add, connect ──> check (all mistakes at once) ──> compile kernels ──> start, run, stop ──> Report
//! ```
//!
//! A [`Section`] of a flow, in which many small kernels are enqueued repeatedly in one order, can be replayed as one
//! CUDA graph: [`Flow::replay`].
//!
//! The rest of a program exchanges messages with a running flow through an [`Ingress`], an [`Egress`], or a
//! [`Service`], which combines both. These handles are usable from any task or thread.

// First, because rustdoc lists a type's methods in the order of the modules.
#[allow(clippy::module_inception, reason = "the folder's main type")]
mod flow;

mod added;
mod blank_queue;
mod check;
mod checked;

mod components;
mod connect;
mod cycles;
mod drive;
mod egress;
mod hubs;
mod ingress;
mod ingress_gate;
mod link;
mod local;
mod on_stall;
mod report;
mod running;
mod searches;
mod section;
mod service;
mod spawn;
mod starting;
mod steps;
mod supervisor;
mod thread;
mod wait_groups;
mod wiring;

use std::sync::Arc;

pub use crate::operator::section_counts::StreamReason;
pub use added::Added;
pub use checked::{Checked, Copied};
pub use connect::{Branch, Targets};
pub use cycles::{Cycle, Feed};
pub use egress::Egress;
pub use flow::Flow;
pub use ingress::Ingress;
pub use local::LocalFlow;
pub use on_stall::OnStall;
pub use report::{DeviceReport, HubReport, OperatorReport, Report, SectionReport};
pub use running::Running;
pub use section::{Operators, Section};
pub use service::{ResponseFuture, Service};
pub(crate) use steps::{Advance, Rest};
pub use steps::{Step, Steps};

#[doc(inline)]
pub use crate::operator::{Changes, Handle, OperatorStatus};

use crate::{
    condition::PortId,
    device::Device,
    error::{Error, ErrorKind, Result},
    hub::HubOptions,
    observe,
    operator::{
        PortDecl, PortKind,
        control::{Control, SectionControl},
        observed_runs::Watched,
        settings::{FlowContext, OperatorSettings, StreamSettings},
    },
    sync::{Mutex, lock},
};
use added::OperatorSlot;
use drive::OwnedOperator;
use thread::OwnThread;

/// One operator of a flow.
struct OperatorEntry {
    name: Arc<str>,
    /// `None` while the flow runs.
    operator: Option<OwnedOperator>,
    ports: Vec<PortDecl>,
    place: Arc<Mutex<OperatorSlot>>,
    /// A `LocalOperator`.
    stays: bool,
    /// The number of tasks of its concurrent runs, besides its own task.
    workers: usize,
}

struct Connection {
    from: PortId,
    to: PortId,
    hub: HubOptions,
    make: connect::MakeLink,
    /// The output may have several readers.
    forks: bool,
}

/// What is notified of a flow's runs.
pub(crate) trait FlowObserver: Send + Sync {
    /// The address of what it records to: a second observer with the same one is not added.
    fn records_to(&self) -> *const ();
    /// Adds what it wants recorded of a run that is about to begin.
    fn watches(&self, flow: &Control, watched: &mut Watched);
    /// The operators of a run are about to run.
    fn begins(&self, flow: &Handle);
    /// A run has ended, and its hubs still exist. Called also for one whose operators have not begun.
    fn ends(&self, flow: &Handle);
    /// The runtime shuts down, and with it the run: [`ends`](Self::ends) is not called. Called on any thread.
    fn cut_off(&self, flow: &Handle) {
        let _ = flow;
    }
}

/// The maximum number of checks, if conditions are added to the operators during each.
const MAX_CHECKS: usize = 16;

impl Flow {
    /// `keep`: return the operators at the end.
    /// `stepped`: runs begin and hubs move messages only when a step requests it.
    fn launch(&mut self, keep: bool, stepped: bool) -> Result<Running> {
        let (check::Planned { links: plans, checked, sections, unbegun }, conditions) = self.planned()?;
        spawn::require_runtime(self.threads)?;
        checked.trace(&self.name);
        if self.entries.iter().any(|entry| entry.operator.is_none()) {
            let text = format!("flow `{}` was aborted and its operators were dropped: build a new flow", self.name);
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let own_threads = self.own_threads()?;
        let names = self.entries.iter().map(|entry| entry.name.clone()).collect();
        let shared =
            sections.iter().map(|plan| SectionControl { name: plan.name.clone(), operators: plan.members.clone() });
        let control = Control::new(self.name.clone(), names, shared.collect());
        if stepped {
            control.set_stepped();
        }
        let from_outside = observe::from_environment().chain(observe::attached_profiler());
        let observers: Vec<_> = self.observers.iter().cloned().chain(from_outside).collect();
        let mut watched = Watched::default();
        observers.iter().for_each(|observer| observer.watches(&control, &mut watched));
        if self.device_times {
            watched.add_report(self.entries.len());
        }
        control.watch(watched);
        let streams = StreamSettings { mode: self.mode, timed: self.device_times };
        let (gates, spawn) = (self.gates.clone(), spawn::spawner(self.threads));
        let is_local = self.threads == spawn::Threads::This;
        let surroundings = Arc::new(FlowContext { is_local, streams, gates, control: control.clone(), spawn });
        // Before the operators take their conditions.
        let waits = |connection: &Connection| {
            let Connection { from, to, .. } = *connection;
            (check::waits_at(self, from), check::waits_at(self, to), check::waits_for_each(self, to))
        };
        let waits: Vec<_> = self.connections.iter().map(waits).collect();
        let mut members = Vec::with_capacity(self.entries.len());
        for (index, (entry, node)) in self.entries.iter_mut().zip(&control.tasks).enumerate() {
            let Some(mut operator) = entry.operator.take() else { continue };
            let mut place = lock(&entry.place);
            // Only the conditions that were checked. Those that are added from now on apply to the next run.
            let own = conditions.get(index).map_or(0, |count| place.conditions.len().min(*count));
            let device = place.device.clone().unwrap_or_else(Device::host);
            let setting = OperatorSettings {
                name: entry.name.clone(),
                number: index,
                begins_paths: entry.ports.iter().all(|port| port.kind == PortKind::Output),
                device: device.clone(),
                streams: place.streams(),
                allocator: place.allocator.clone(),
                conditions: place.conditions.drain(..own).collect(),
                merge: place.merge,
                may_block: place.own_thread.is_some(),
            };
            let (fills, may_block) = (place.fills.clone(), place.own_thread.is_some());
            // `enter` calls conditions of the user's.
            drop(place);
            operator.enter(setting, node.clone(), surroundings.clone());
            members.push(drive::FlowOperator { index, name: entry.name.clone(), device, operator, may_block, fills });
        }
        let hubs_to_create: Vec<_> = plans
            .into_iter()
            .zip(self.connections.iter().zip(waits))
            .enumerate()
            .map(|(at, (mut plan, (connection, (writer_waits, reader_waits, of_each))))| {
                plan.stepped = stepped;
                let (from, to) = (connection.from.operator, connection.to.operator);
                plan.traced = control.traced().map(|traced| traced.hub(at, from, to));
                let port = |id: PortId| (id.operator, self.entries[id.operator].ports[id.port].name);
                drive::HubToCreate {
                    plan,
                    make: connection.make.clone(),
                    from: port(connection.from),
                    to: port(connection.to),
                    writer_waits,
                    reader_waits,
                    of_each,
                }
            })
            .collect();
        let links = self.links.iter().map(|link| drive::ToLink {
            linking: link.clone(),
            port: self.entries[link.port.operator].ports[link.port.port].name,
        });
        let (links, threads) = (links.collect(), self.threads);
        let sections = sections.into_iter().map(|plan| section::SectionSetup {
            interior: plan.interior.iter().map(|at| hubs_to_create[*at].clone()).collect(),
            mode: self.mode,
            stats: section::SectionStats::new(&plan.name),
            plan,
        });
        let sections = sections.collect();
        Ok(drive::launch(drive::RunSetup {
            flow: self.id,
            control,
            members,
            threads,
            own_threads,
            hubs_to_create,
            links,
            sections,
            unbegun,
            keep,
            on_stall: self.on_stall,
            observers,
        }))
    }

    /// The flow's plan, and the number of conditions of each operator that it takes into account.
    fn planned(&self) -> Result<(check::Planned, Vec<usize>)> {
        // Another thread may add conditions during the check, and so may a condition that the check calls.
        let counts = || self.entries.iter().map(|entry| lock(&entry.place).conditions.len()).collect::<Vec<_>>();
        for _ in 0..MAX_CHECKS {
            let (before, planned) = (counts(), check::plan(self)?);
            if before == counts() {
                return Ok((planned, before));
            }
        }
        let text = "conditions were added to its operators during every check: add them before the flow runs";
        Err(Error::new(ErrorKind::Setup, text).at(format!("flow `{}`", self.name)))
    }

    fn hub_names(&self) -> Vec<Arc<str>> {
        self.connections.iter().map(|connection| check::hub_name(self, connection).into()).collect()
    }

    fn own_threads(&self) -> Result<Vec<Option<OwnThread>>> {
        let threads = self.entries.iter().map(|entry| {
            let plan = lock(&entry.place).own_thread.filter(|_| !spawn::in_simulation());
            plan.map(|plan| OwnThread::start(&entry.name, plan.core)).transpose()
        });
        threads.collect()
    }
}
