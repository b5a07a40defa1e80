//! The calls to an emulated device: [`Backend`], on top of the machine and the memory.
//!
//! A call is checked, turned into work and enqueued into its stream. The engine decides in which order work runs;
//! threads or a simulation run it. After a fault every call fails with that fault, so memory on a lost device is never
//! reused.

use std::{ptr::NonNull, sync::Arc, thread::JoinHandle, time::Duration};

use tokio::time::Instant;

use super::{
    Emulated, WorkTimes,
    faults::FaultPlan,
    fresh_id,
    graph::EmulatedGraphs,
    lock,
    machine::{DeviceId, StreamId},
    memory::EmulatedMemory,
    queue_limit::QueueLimit,
    simulation::{self, SimulationHandle},
    work::{Work, check_copy, check_fill, check_launch, no_emulation},
    workers::Engine,
};
use crate::{
    device::{
        backend::{
            Address, Backend, Endpoint, ExternalNodes, ExternalWork, GraphCondition, HostFunction, KernelDef, Launch,
            LossHandler, MemoryInfo, NodeWork, Pattern, RawEvent, RawExec, RawGraph, RawNode, RawStream, Refused,
            StreamSpec,
        },
        work_item::own_args,
    },
    error::{Error, ErrorKind, Result},
    sync::{Level, Mutex, discard_all},
};

/// Priorities as in CUDA: lower is more urgent.
const LOWEST_PRIORITY: i32 = 0;
const HIGHEST_PRIORITY: i32 = -5;

#[derive(Debug)]
pub(super) struct EmulatedDevice {
    name: String,
    pub(super) id: DeviceId,
    legacy: StreamId,
    pub(super) engine: Arc<Engine>,
    pub(super) memory: Arc<EmulatedMemory>,
    pub(super) fault_plan: Arc<FaultPlan>,
    pub(super) times: WorkTimes,
    /// See [`graph`](super::graph).
    pub(super) graphs: Mutex<EmulatedGraphs>,
    workers: Vec<JoinHandle<()>>,
    /// Blocks calls while a stream's queue is full; `None` if queues are unlimited.
    queue_limit: Option<QueueLimit>,
    skipped: Arc<SkippedFunctions>,
}

/// Host functions that a planned fault has skipped, kept for the life of the device. A worker drops them when it ends:
/// the last handle of a device might be dropped where a user's destructor must not run.
#[derive(Default)]
pub(super) struct SkippedFunctions(Mutex<Vec<HostFunction>>);

impl SkippedFunctions {
    pub(super) fn discard(&self) {
        let skipped = std::mem::take(&mut *lock(&self.0));
        discard_all(skipped);
    }
}

impl std::fmt::Debug for SkippedFunctions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SkippedFunctions").finish_non_exhaustive()
    }
}

impl EmulatedDevice {
    pub(super) fn open(config: Emulated, engine: Arc<Engine>, name: String) -> Arc<dyn Backend> {
        let name = config.name.unwrap_or(name);
        let (id, legacy) = (fresh_id(), fresh_id());
        engine.with(|machine| machine.add_device(id, legacy));
        let skipped = Arc::<SkippedFunctions>::default();
        let workers = engine.spawn_workers(id, &name, config.workers, &skipped);
        Arc::new(Self {
            name,
            id,
            legacy,
            engine,
            memory: Arc::new(EmulatedMemory::new(config.memory)),
            fault_plan: Arc::new(FaultPlan::new(config.faults)),
            graphs: Mutex::at(Level::DriverObjects, EmulatedGraphs::default()),
            queue_limit: config.queue_depth.filter(|_| !workers.is_empty()).map(QueueLimit::new),
            workers,
            skipped,
            times: config.times,
        })
    }

    pub(super) fn check_alive(&self) -> Result<()> {
        self.engine.with(|machine| machine.check_alive(self.id))
    }

    pub(super) fn stream(&self, stream: RawStream) -> StreamId {
        if stream == RawStream(0) { self.legacy } else { stream.0 }
    }

    fn enqueue(&self, stream: RawStream, work: Work) -> Result<()> {
        self.enqueue_from(stream, &mut Some(work))
    }

    /// If the machine refuses the work, it stays in `work`: a user's destructor must not run under a lock.
    fn enqueue_from(&self, stream: RawStream, work: &mut Option<Work>) -> Result<()> {
        let stream = self.stream(stream);
        let refused = self.engine.with(|machine| {
            machine.accepts(self.id, stream)?;
            work.take().map_or(Ok(()), |work| machine.enqueue(self.id, stream, work))
        });
        refused.map_err(|error| self.at_device(error))
    }

    /// Has the stream's next work begin so much later, which is how long that work takes.
    pub(super) fn pass_time(&self, stream: RawStream, time: Duration) -> Result<()> {
        if time.is_zero() { Ok(()) } else { self.enqueue(stream, Work::Pause(time)) }
    }

    /// Waits, like a driver, until the stream's queue has room for one more entry.
    pub(super) fn wait_for_room(&self, stream: RawStream) {
        let Some(queue_limit) = &self.queue_limit else { return };
        let stream = self.stream(stream);
        // A lost device has nothing pending.
        queue_limit.wait(|| self.engine.with(|machine| machine.pending(stream, Work::occupies_queue)));
    }

    /// Called where a driver needs its context exclusively: waits, like a driver, for the calls that wait for room.
    fn wait_exclusive(&self) {
        if let Some(queue_limit) = &self.queue_limit {
            queue_limit.wait_exclusive();
        }
    }

    pub(super) fn at_device(&self, error: Error) -> Error {
        error.at(&self.name)
    }
}

impl Drop for EmulatedDevice {
    fn drop(&mut self) {
        self.engine.close_device(self.id, std::mem::take(&mut self.workers));
    }
}

impl Backend for EmulatedDevice {
    fn simulation(&self) -> Option<SimulationHandle> {
        simulation::current().filter(|simulation| simulation.runs(&self.engine))
    }

    fn when_lost(&self, handler: LossHandler) {
        self.engine.when_lost(self.id, handler);
    }

    fn has_ended(&self) -> bool {
        self.engine.has_ended(self.id)
    }

    fn queue_depth(&self) -> Option<u64> {
        self.queue_limit.as_ref().map(QueueLimit::max)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!("emulated, {}", crate::device::human::bytes(self.memory.info().total))
    }

    fn make_current(&self) -> Result<()> {
        self.check_alive()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.check_alive()?;
        Ok(self.memory.info())
    }

    fn alloc(&self, bytes: u64) -> Result<Address> {
        self.check_alive()?;
        self.memory.alloc(bytes, self.fault_plan.next_allocation_fails()).map_err(|error| self.at_device(error))
    }

    unsafe fn free(&self, address: Address) -> Result<()> {
        self.check_alive()?;
        self.memory.free(address).map_err(|error| self.at_device(error))
    }

    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address> {
        let stream = self.stream(stream);
        self.engine.with(|machine| machine.accepts(self.id, stream)).map_err(|error| self.at_device(error))?;
        self.alloc(bytes)
    }

    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()> {
        self.check_alive()?;
        self.enqueue(stream, Work::Free { address, memory: self.memory.clone() })
    }

    fn wants_recycled(&self) -> bool {
        true
    }

    unsafe fn recycle(&self, stream: Option<RawStream>, address: Address, bytes: u64) -> Result<()> {
        self.check_alive()?;
        let fill = Work::Recycle { address, bytes };
        match stream {
            Some(stream) => self.enqueue(stream, fill),
            None => {
                // SAFETY: no enqueued work accesses the memory, and the caller has exclusive access.
                unsafe { fill.run(&|| true) }.map_err(|fault| self.at_device(Error::new(ErrorKind::Driver, fault.0)))
            }
        }
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.check_alive()?;
        self.wait_exclusive();
        self.memory.alloc_host(bytes).map_err(|error| self.at_device(error))
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        self.check_alive()?;
        self.memory.free_host(memory, bytes).map_err(|error| self.at_device(error))
    }

    fn stream_priorities(&self) -> (i32, i32) {
        (LOWEST_PRIORITY, HIGHEST_PRIORITY)
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream> {
        self.wait_exclusive();
        let id = fresh_id();
        let priority = spec.priority.clamp(HIGHEST_PRIORITY, LOWEST_PRIORITY);
        self.engine
            .with(|machine| machine.add_stream(self.id, id, spec.name.clone(), priority, spec.non_blocking))
            .map_err(|error| self.at_device(error))?;
        Ok(RawStream(id))
    }

    fn stream_rename(&self, stream: RawStream, name: &str) {
        if stream != RawStream(0) {
            self.engine.with(|machine| machine.rename_stream(stream.0, name));
        }
    }

    fn stream_destroy(&self, stream: RawStream) {
        if stream != RawStream(0) {
            self.wait_exclusive();
            self.engine.with(|machine| machine.close_stream(stream.0));
        }
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        let stream = self.stream(stream);
        let ends = self.engine.with(|machine| machine.ends(self.id, stream)).map_err(|error| self.at_device(error))?;
        Ok(ends.is_empty())
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        self.engine.synchronize(self.id, self.stream(stream)).map_err(|error| self.at_device(error))
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        self.wait_exclusive();
        let id = fresh_id();
        self.engine.with(|machine| machine.add_event(self.id, id, timed)).map_err(|error| self.at_device(error))?;
        Ok(RawEvent(id))
    }

    fn event_destroy(&self, event: RawEvent) {
        self.wait_exclusive();
        self.engine.with(|machine| machine.remove_event(event.0));
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let stream = self.stream(stream);
        self.engine.with(|machine| machine.record(self.id, event.0, stream)).map_err(|error| self.at_device(error))
    }

    fn event_query(&self, event: RawEvent) -> Result<bool> {
        self.engine.with(|machine| machine.is_recorded(self.id, event.0)).map_err(|error| self.at_device(error))
    }

    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration> {
        self.engine.with(|machine| machine.elapsed(self.id, from.0, to.0)).map_err(|error| self.at_device(error))
    }

    fn event_instant(&self, event: RawEvent) -> Option<Result<Instant>> {
        let reached = self.engine.with(|machine| machine.reached(self.id, event.0));
        Some(reached.map(|at| self.engine.instant(at)).map_err(|error| self.at_device(error)))
    }

    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let stream = self.stream(stream);
        self.engine.with(|machine| machine.wait(self.id, stream, event.0)).map_err(|error| self.at_device(error))
    }

    unsafe fn copy(&self, stream: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()> {
        self.check_alive()?;
        check_copy(bytes).map_err(|error| self.at_device(error))?;
        self.wait_for_room(stream);
        let planned = self.fault_plan.next_copy_fails();
        self.pass_time(stream, self.times.copy)?;
        self.enqueue(stream, Work::Copy { to, from, bytes, planned })
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
        self.check_alive()?;
        check_fill(to, pattern, bytes).map_err(|error| self.at_device(error))?;
        self.wait_for_room(stream);
        self.enqueue(stream, Work::Fill { to, pattern, bytes })
    }

    fn load(&self, _kernel: &'static KernelDef) -> Result<()> {
        self.check_alive()
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()> {
        self.check_alive()?;
        check_launch(launch).map_err(|error| self.at_device(error.at(format!("kernel `{}`", launch.kernel.name))))?;
        self.wait_for_room(stream);
        let planned = self.fault_plan.next_kernel_fails(launch.kernel.name);
        self.pass_time(stream, self.times.of_kernel(launch.kernel.name))?;
        self.enqueue(stream, Work::Kernel { kernel: launch.kernel, args: own_args(launch.args), planned })
    }

    unsafe fn external(&self, stream: RawStream, external: ExternalWork<'_>) -> Result<()> {
        self.check_alive()?;
        let ExternalWork { name, args, emulated, .. } = external;
        let body = emulated.ok_or_else(|| self.at_device(no_emulation()))?;
        self.wait_for_room(stream);
        let planned = self.fault_plan.next_kernel_fails(name);
        self.pass_time(stream, self.times.of_kernel(name))?;
        self.enqueue(stream, Work::External { name, args: own_args(args), body, planned })
    }

    fn host_function(&self, stream: RawStream, function: &mut Option<HostFunction>) -> Result<()> {
        self.check_alive()?;
        self.wait_exclusive();
        if self.fault_plan.next_function_is_lost() {
            self.enqueue(stream, Work::SkippedHost)?;
            lock(&self.skipped.0).extend(function.take());
            return Ok(());
        }
        let mut work = function.take().map(Work::Host);
        let taken = self.enqueue_from(stream, &mut work);
        if let Some(Work::Host(refused)) = work {
            *function = Some(refused);
        }
        taken
    }

    fn graph_create(&self) -> Result<RawGraph> {
        self.new_graph()
    }

    fn graph_destroy(&self, graph: RawGraph) {
        self.remove_graph(graph);
    }

    unsafe fn graph_add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        self.add_node(graph, after, work).map_err(|error| self.at_device(error))
    }

    fn graph_add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        self.add_alloc(graph, after, bytes).map_err(|error| self.at_device(error))
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        self.add_conditional(graph, after, when, flag).map_err(|error| self.at_device(error))
    }

    unsafe fn graph_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        self.add_external(graph, after, external).map_err(|error| self.at_device(error))
    }

    fn graph_order(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        self.add_edge(graph, before, after).map_err(|error| self.at_device(error))
    }

    fn graph_remove(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        self.remove_node(graph, node).map_err(|error| self.at_device(error))
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawExec> {
        self.new_exec(graph).map_err(|error| self.at_device(error))
    }

    unsafe fn exec_destroy(&self, exec: RawExec) {
        self.remove_exec(exec);
    }

    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.upload(exec, stream).map_err(|error| self.at_device(error))
    }

    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.wait_for_room(stream);
        self.launch_exec(exec, stream).map_err(|error| self.at_device(error))
    }

    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        self.update_exec(exec, graph).map_err(|error| self.at_device(error))
    }

    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        self.set_node(exec, node, work).map_err(|error| self.at_device(error))
    }

    fn exec_enable(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        self.enable_node(exec, node, enabled).map_err(|error| self.at_device(error))
    }
}
