//! The race checker: a [`Backend`] that wraps another one and derives order only from the calls it sees.
//!
//! Two accesses to the same bytes, one of them a write, must be ordered by their stream, by an event that one stream
//! recorded and the other waits for, or by the host, which observed the completion of one before it enqueued the other.
//! The checker keeps vector clocks for the streams and, for each allocation, the accesses that still matter. An access
//! that is not ordered after a conflicting earlier one is refused **before** it is forwarded, with an error that names
//! both accesses and the missing ordering.
//!
//! ```text
//!   alloc, alloc_host            a new region                free, free_host      nothing may be in flight in it
//!   copy, fill, launch           accesses: checked, forwarded, and undone if the device refuses them
//!   event_record                 the stream's past is stored with the event; a later record replaces it
//!   stream_wait                  the stream's future comes after the event's past
//!   graph_add                    two nodes that no edge orders: checked against each other
//!   exec_launch                  its nodes' accesses, as one call of the stream, after the exec's previous launch
//!   query, synchronize, a host function that runs            the host comes after that work
//! ```
//!
//! Besides order it checks existence: a call that uses memory that was [freed](tombstones) or
//! [never written](written), or a stream or an event that was destroyed, is refused as well.
//!
//! It does not use the framework's own tracking, so it can find errors in it. It reports no false positive for memory
//! from `alloc` and `alloc_host`, whatever the streams, devices and order of calls. It does not check other memory,
//! such as a user's `Vec`: the copy might have finished when its call returns, which no call shows. The host counts as
//! one observer: preventing races between host threads is Rust's task.
//!
//! All devices of the process share one race state: see [`race_state`](mod@race_state). Its lock is not held while
//! other code is called, so neither a driver that blocks nor a host function that runs at once can deadlock with it.

mod graph;
mod happens_before;
mod race_state;
mod report;
mod shadow;
mod tombstones;
mod written;

#[cfg(test)]
pub(crate) mod mock;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use self::{
    graph::CheckedGraphs,
    happens_before::{Component, HappensBefore},
    race_state::{RaceState, Region, Side, StreamKey, Touch, Touches, race_state},
    shadow::AccessKind,
};
use tokio::time::Instant;

use super::{
    backend::{
        Address, Arg, Backend, Endpoint, ExternalNodes, ExternalWork, GraphCondition, HostCallback, HostFunction,
        KernelDef, Launch, LossHandler, MemoryInfo, NodeWork, Pattern, RawEvent, RawExec, RawGraph, RawNode, RawStream,
        Refused, StreamSpec,
    },
    emulated::simulation::SimulationHandle,
    human,
};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Wraps a device in the race checker, unless it is wrapped already.
pub(crate) fn checked(inner: Arc<dyn Backend>) -> Arc<dyn Backend> {
    // Two checkers would track the same streams under two names.
    if inner.is_checked() { inner } else { Arc::new(CheckedBackend::new(inner)) }
}

/// See the [module](self).
struct CheckedBackend {
    inner: Arc<dyn Backend>,
    id: u64,
    name: Arc<str>,
    numbers: AtomicU64,
    graphs: Mutex<CheckedGraphs>,
    /// True if the device never reuses addresses and handles.
    remembers: bool,
}

impl fmt::Debug for CheckedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CheckedBackend").field(&self.inner).finish()
    }
}

impl Drop for CheckedBackend {
    fn drop(&mut self) {
        race_state().remove_device(self.id);
    }
}

impl CheckedBackend {
    fn new(inner: Arc<dyn Backend>) -> Self {
        let name = Arc::<str>::from(inner.name());
        let mut race_state = race_state();
        let id = race_state.new_id();
        race_state.add_stream((id, RawStream(0)), &name, "default", false);
        let remembers = !inner.reuses_handles();
        Self { inner, id, name, numbers: AtomicU64::new(0), graphs: Mutex::default(), remembers }
    }

    fn key(&self, stream: RawStream) -> StreamKey {
        (self.id, stream)
    }

    /// Calls `ask` with the race state and a stream's component. Fails if the stream was destroyed.
    fn with<R>(&self, stream: RawStream, ask: impl FnOnce(&mut RaceState, Component) -> Result<R>) -> Result<R> {
        let mut race_state = race_state();
        let asked =
            race_state.stream(self.key(stream), &self.name).and_then(|component| ask(&mut race_state, component));
        drop(race_state);
        asked.or_else(|found| self.refuse(found))
    }

    /// Adds a call that accesses no memory. Returns the stream's past after the call.
    fn call(&self, stream: RawStream) -> Result<HappensBefore> {
        self.with(stream, |race_state, component| race_state.call(component).map(|(clock, _)| clock.clone()))
    }

    /// Returns the error that was found. If the device is lost, nothing is in flight, and the loss is the error.
    fn refuse<T>(&self, error: Error) -> Result<T> {
        self.inner.memory()?;
        Err(error.at(&*self.name))
    }

    /// Checks a call's accesses, forwards it, and undoes them if that fails.
    fn access(
        &self,
        stream: RawStream,
        kind: AccessKind,
        touches: &Touches,
        forward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (component, tick) = self.with(stream, |race_state, component| {
            race_state.access(component, kind, touches).map(|tick| (component, tick))
        })?;
        forward().inspect_err(|_| race_state().undo(component, tick, touches))
    }

    fn check_event(&self, event: RawEvent) -> Result<()> {
        let known = race_state().check_event(event);
        known.or_else(|gone| self.refuse(gone))
    }

    fn region(&self, bytes: u64) -> Region {
        Region::new(self.id, self.name.clone(), self.numbers.fetch_add(1, Ordering::Relaxed) + 1, bytes)
    }

    /// Removes a region before its memory is freed: afterwards the address might already have another owner.
    fn release(&self, side: Side, start: u64, forward: impl FnOnce() -> Result<()>) -> Result<()> {
        let removed = race_state().remove_region(side, start);
        let region = match removed {
            Ok(region) => region,
            Err(race) => return self.refuse(race),
        };
        self.released(side, start, region, forward())
    }

    fn released(&self, side: Side, start: u64, region: Option<Region>, freed: Result<()>) -> Result<()> {
        let Some(region) = region else { return freed };
        match freed {
            Err(_) => race_state().add_region(side, start, region),
            Ok(()) if self.remembers && side == Side::Device => race_state().remember_freed(start, &region),
            Ok(()) => {}
        }
        freed
    }
}

fn place(place: Endpoint, bytes: u64, write: bool) -> Touch {
    match place {
        Endpoint::Host(pointer) => Touch { side: Side::Host, start: pointer.addr() as u64, bytes, write },
        Endpoint::Device(address) => Touch { side: Side::Device, start: address.0, bytes, write },
    }
}

fn touch(arg: &Arg<'_>) -> Option<Touch> {
    match arg {
        Arg::Slice { address, bytes, write, .. } => Some(place(Endpoint::Device(*address), *bytes, *write)),
        Arg::Scalar(_) => None,
    }
}

impl Backend for CheckedBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        self.inner.description()
    }

    fn make_current(&self) -> Result<()> {
        self.inner.make_current()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: u64) -> Result<Address> {
        let address = self.inner.alloc(bytes)?;
        race_state().add_region(Side::Device, address.0, self.region(bytes));
        Ok(address)
    }

    unsafe fn free(&self, address: Address) -> Result<()> {
        self.release(Side::Device, address.0, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.free(address) }
        })
    }

    fn queue_depth(&self) -> Option<u64> {
        self.inner.queue_depth()
    }

    fn warm_up(&self) -> Result<()> {
        self.inner.warm_up()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address> {
        let address = self.inner.alloc_on(stream, bytes)?;
        let touches = Touches::from_iter([place(Endpoint::Device(address), bytes, true)]);
        self.with(stream, |race_state, component| {
            race_state.add_region(Side::Device, address.0, self.region(bytes));
            // The memory exists from this point in the stream on.
            race_state.access(component, AccessKind::Allocation, &touches)
        })?;
        Ok(address)
    }

    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()> {
        let bytes = race_state().size_of(Side::Device, address.0).unwrap_or(0);
        let touches = Touches::from_iter([place(Endpoint::Device(address), bytes, true)]);
        self.access(stream, AccessKind::Free, &touches, || {
            // Removed before the memory is freed: afterwards the address might already have another owner.
            let region = race_state().take_region(Side::Device, address.0);
            // SAFETY: guaranteed by the caller.
            let freed = unsafe { self.inner.free_on(stream, address) };
            self.released(Side::Device, address.0, region, freed)
        })
    }

    fn wants_recycled(&self) -> bool {
        true
    }

    unsafe fn recycle(&self, stream: Option<RawStream>, address: Address, bytes: u64) -> Result<()> {
        let Some(stream) = stream else {
            // The memory is no longer in use, so its history is cleared.
            let renewed = race_state().renew_region(Side::Device, address.0);
            return match renewed {
                // SAFETY: guaranteed by the caller.
                Ok(()) => unsafe { self.inner.recycle(None, address, bytes) },
                Err(race) => self.refuse(race),
            };
        };
        let touches = Touches::from_iter([place(Endpoint::Device(address), bytes, true)]);
        self.access(stream, AccessKind::Recycling, &touches, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.recycle(Some(stream), address, bytes) }
        })
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let memory = self.inner.alloc_host(bytes)?;
        race_state().add_region(Side::Host, memory.as_ptr().addr() as u64, self.region(bytes as u64).initialised());
        Ok(memory)
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        self.release(Side::Host, memory.as_ptr().addr() as u64, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.free_host(memory, bytes) }
        })
    }

    fn stream_priorities(&self) -> (i32, i32) {
        self.inner.stream_priorities()
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream> {
        let stream = self.inner.stream_create(spec)?;
        race_state().add_stream(self.key(stream), &self.name, &spec.name, !spec.non_blocking);
        Ok(stream)
    }

    fn stream_rename(&self, stream: RawStream, name: &str) {
        race_state().rename_stream(self.key(stream), name);
        self.inner.stream_rename(stream, name);
    }

    fn stream_destroy(&self, stream: RawStream) {
        // Removed before the driver can reuse the handle.
        if stream != RawStream(0) {
            race_state().remove_stream(self.key(stream), self.remembers);
        }
        self.inner.stream_destroy(stream);
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        // The end is read before the query: work that is enqueued concurrently might not be done.
        let end = self.with(stream, |race_state, component| race_state.end(component, false))?;
        let done = self.inner.stream_query(stream)?;
        if done {
            race_state().observe(&end);
        }
        Ok(done)
    }

    fn stream_is_idle(&self, stream: RawStream) -> Result<bool> {
        self.inner.stream_is_idle(stream)
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let whole = stream == RawStream(0);
        let end = self.with(stream, |race_state, component| race_state.end(component, whole))?;
        self.inner.stream_synchronize(stream)?;
        race_state().observe(&end);
        Ok(())
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        let event = self.inner.event_create(timed)?;
        race_state().add_event(self.id, event);
        Ok(event)
    }

    fn event_destroy(&self, event: RawEvent) {
        race_state().remove_event(event, self.remembers);
        self.inner.event_destroy(event);
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.check_event(event)?;
        let past = self.call(stream)?;
        self.inner.event_record(event, stream)?;
        race_state().record(event, past);
        Ok(())
    }

    fn event_query(&self, event: RawEvent) -> Result<bool> {
        self.check_event(event)?;
        let past = race_state().recorded(event);
        let done = self.inner.event_query(event)?;
        if let (true, Some(past)) = (done, past) {
            race_state().observe(&past);
        }
        Ok(done)
    }

    fn event_is_passed(&self, event: RawEvent) -> Result<bool> {
        self.inner.event_is_passed(event)
    }

    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration> {
        self.inner.event_elapsed(from, to)
    }

    fn event_elapsed_if_passed(&self, from: RawEvent, to: RawEvent) -> Result<Option<Duration>> {
        self.inner.event_elapsed_if_passed(from, to)
    }

    fn event_time(&self) -> Duration {
        self.inner.event_time()
    }

    fn event_instant(&self, event: RawEvent) -> Option<Result<Instant>> {
        self.inner.event_instant(event)
    }

    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let past =
            self.with(stream, |race_state, _| race_state.check_event(event).map(|()| race_state.recorded(event)))?;
        self.inner.stream_wait(stream, event)?;
        let Some(past) = past else { return Ok(()) };
        self.with(stream, |race_state, component| race_state.order(component, &past))
    }

    unsafe fn copy(&self, stream: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()> {
        let touches = Touches::from_iter([place(from, bytes, false), place(to, bytes, true)]);
        self.access(stream, AccessKind::Copy(human::direction(to, from)), &touches, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.copy(stream, to, from, bytes) }
        })
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
        let touches = Touches::from_iter([place(Endpoint::Device(to), bytes, true)]);
        self.access(stream, AccessKind::Fill, &touches, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.fill(stream, to, pattern, bytes) }
        })
    }

    fn load(&self, kernel: &'static KernelDef) -> Result<()> {
        self.inner.load(kernel)
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()> {
        let touches = launch.args.iter().filter_map(touch).collect();
        self.access(stream, AccessKind::Kernel(launch.kernel.name), &touches, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.launch(stream, launch) }
        })
    }

    unsafe fn external(&self, stream: RawStream, external: ExternalWork<'_>) -> Result<()> {
        let touches = external.args.iter().filter_map(touch).collect();
        self.access(stream, AccessKind::External(external.name), &touches, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.external(stream, external) }
        })
    }

    fn graph_create(&self) -> Result<RawGraph> {
        let graph = self.inner.graph_create()?;
        self.watch_graph(graph);
        Ok(graph)
    }

    fn graph_destroy(&self, graph: RawGraph) {
        self.forget_graph(graph);
        self.inner.graph_destroy(graph);
    }

    unsafe fn graph_add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        self.add_node(graph, after, work, |work| {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.graph_add(graph, after, work) }
        })
    }

    fn graph_add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        let (node, address) = self.inner.graph_add_alloc(graph, after, bytes)?;
        self.watch_memory(graph, after, node, address, bytes);
        Ok((node, address))
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        self.add_conditional(graph, after, flag, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.graph_add_conditional(graph, after, when, flag) }
        })
    }

    unsafe fn graph_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        self.add_external(graph, after, external, |external| {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.graph_external(graph, after, external) }
        })
    }

    fn graph_order(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        self.inner.graph_order(graph, before, after)?;
        self.watch_edge(graph, before, after);
        Ok(())
    }

    fn graph_remove(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        self.inner.graph_remove(graph, node)?;
        self.forget_node(graph, node);
        Ok(())
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawExec> {
        let exec = self.inner.graph_instantiate(graph)?;
        self.watch_exec(exec, graph);
        Ok(exec)
    }

    unsafe fn exec_destroy(&self, exec: RawExec) {
        self.forget_exec(exec);
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.exec_destroy(exec) };
    }

    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.call(stream)?;
        self.inner.exec_upload(exec, stream)
    }

    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.launch_exec(exec, stream, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.exec_launch(exec, stream) }
        })
    }

    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        self.update_exec(exec, graph, || {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.exec_update(exec, graph) }
        })
    }

    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        self.set_node(exec, node, work, |work| {
            // SAFETY: guaranteed by the caller.
            unsafe { self.inner.exec_set(exec, node, work) }
        })
    }

    fn exec_enable(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        let outcome = self.inner.exec_enable(exec, node, enabled)?;
        if outcome.is_ok() {
            self.enable_node(exec, node, enabled);
        }
        Ok(outcome)
    }

    fn release_callback(&self, function: &HostCallback) {
        self.watched(function).iter().for_each(|watched| self.inner.release_callback(watched));
    }

    fn when_lost(&self, handler: LossHandler) {
        self.inner.when_lost(handler);
    }

    fn has_ended(&self) -> bool {
        let has_ended = self.inner.has_ended();
        if has_ended {
            race_state().observe_end(self.id);
        }
        has_ended
    }

    fn simulation(&self) -> Option<SimulationHandle> {
        self.inner.simulation()
    }

    #[cfg(feature = "cuda")]
    fn cuda_context(&self) -> Option<&Arc<cudarc::driver::CudaContext>> {
        self.inner.cuda_context()
    }

    fn host_function(&self, stream: RawStream, function: &mut Option<HostFunction>) -> Result<()> {
        let past = self.call(stream)?;
        let watch = |function: HostFunction| -> HostFunction {
            Box::new(move || {
                race_state().observe(&past);
                function();
            })
        };
        let mut watched = function.take().map(watch);
        let taken = self.inner.host_function(stream, &mut watched);
        *function = watched;
        taken
    }

    fn is_checked(&self) -> bool {
        true
    }

    fn host_access(&self, memory: *const u8, bytes: usize, write: bool) -> Result<()> {
        let touch = Touch { side: Side::Host, start: memory.addr() as u64, bytes: bytes as u64, write };
        let checked = race_state().host_access(&touch);
        match checked {
            Ok(()) => self.inner.host_access(memory, bytes, write),
            Err(race) => self.refuse(race),
        }
    }

    fn host_borrow(&self, memory: *const u8, bytes: usize, exclusive: bool) {
        let touch = Touch { side: Side::Host, start: memory.addr() as u64, bytes: bytes as u64, write: exclusive };
        race_state().host_borrow(&touch);
        self.inner.host_borrow(memory, bytes, exclusive);
    }
}
