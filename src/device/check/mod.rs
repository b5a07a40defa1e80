//! The race checker: a [`Backend`] around a backend, which knows order only from the calls it sees.
//!
//! Two accesses to the same bytes, one of them a write, have to be ordered by something: their stream, an event that one
//! stream recorded and the other waits for, or the host, which saw the one done before it enqueued the other. Timing is
//! no order. The checker keeps vector clocks over the streams and, for each allocation, the accesses that still matter;
//! an access that nothing orders after an earlier one is refused with an error that names both and what is missing,
//! **before** it is forwarded, so on the emulated device it never runs.
//!
//! ```text
//!   alloc, alloc_host            a region to watch           free, free_host      nothing may be in flight there
//!   copy, fill, launch           accesses: checked, forwarded, or taken back if the device refuses them
//!   event_record                 what the stream's past is, kept with the event: a later record replaces it
//!   stream_wait                  the stream's future comes after the event's past
//!   graph_add                    two nodes that no edge orders: checked against each other
//!   exec_launch                  all its nodes' accesses, as one call of the stream, after the exec's launch before
//!   query, synchronize, a host function that runs            the host comes after that
//! ```
//!
//! Beside order it knows what is there: memory that was [freed](gone), or that [nothing has written](written), streams and
//! events that were destroyed. Whoever names those is refused as well.
//!
//! It knows nothing of the framework's own tracking, so it can find it wrong. It promises no false alarm for memory that
//! comes from `alloc` and `alloc_host`, whatever stream, device or order of calls it is used with; it does not look at
//! other memory (a user's `Vec`: a copy may be done with that when the call returns, which no call shows). The host is
//! taken for one observer: that two of its threads do not know of each other is for Rust to find.
//!
//! One universe serves all devices of the process; see [`universe`](mod@universe). Its lock is never held while anything else is
//! called, so neither a driver that blocks nor a host function that runs at once can lock up with it.

mod clock;
mod gone;
mod graph;
mod shadow;
mod told;
mod universe;
mod written;

#[cfg(test)]
mod paper;
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
    clock::{Clock, Component},
    graph::Graphs,
    shadow::What,
    universe::{Key, Region, Side, Touch, Touches, Universe, universe},
};
use super::{
    backend::{
        Address, Arg, Backend, Condition, External, HostCallback, HostFunction, KernelDef, Launch, MemoryInfo,
        NodeWork, Pattern, Place, RawEvent, RawExec, RawGraph, RawNode, RawStream, Recorded, Refused, StreamSpec,
        TellsOfLoss,
    },
    emulated::simulation::SimulationHandle,
    human,
};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// The same device, watched.
pub(crate) fn checked(inner: Arc<dyn Backend>) -> Arc<dyn Backend> {
    // Two of them would know the same streams by two names.
    if inner.is_checked() { inner } else { Arc::new(Checked::new(inner)) }
}

/// See the [module](self).
struct Checked {
    inner: Arc<dyn Backend>,
    id: u64,
    name: Arc<str>,
    /// Of its allocations.
    numbers: AtomicU64,
    /// See [`graph`].
    graphs: Mutex<Graphs>,
    /// Its addresses and handles are never used for something else.
    remembers: bool,
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Checked").field(&self.inner).finish()
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        universe().remove_device(self.id);
    }
}

impl Checked {
    fn new(inner: Arc<dyn Backend>) -> Self {
        let name = Arc::<str>::from(inner.name());
        let mut universe = universe();
        let id = universe.fresh();
        universe.add_stream((id, RawStream(0)), &name, "default", false);
        let remembers = !inner.reuses_handles();
        Self { inner, id, name, numbers: AtomicU64::new(0), graphs: Mutex::default(), remembers }
    }

    fn key(&self, stream: RawStream) -> Key {
        (self.id, stream)
    }

    /// Asks the universe about a stream, unless that was destroyed.
    fn with<R>(&self, stream: RawStream, ask: impl FnOnce(&mut Universe, Component) -> Result<R>) -> Result<R> {
        let mut universe = universe();
        let asked = universe.stream(self.key(stream), &self.name).and_then(|component| ask(&mut universe, component));
        drop(universe);
        asked.or_else(|found| self.refuse(found))
    }

    /// What a stream's past is after a call that touches nothing.
    fn call(&self, stream: RawStream) -> Result<Clock> {
        self.with(stream, |universe, component| universe.call(component).map(|(clock, _)| clock.clone()))
    }

    /// Something was found: but a lost device has nothing in flight any more, and says so itself.
    fn refuse<T>(&self, error: Error) -> Result<T> {
        self.inner.memory()?;
        Err(error.at(&*self.name))
    }

    /// Checks a call's accesses, forwards it, and takes them back if that fails.
    fn access(
        &self,
        stream: RawStream,
        what: What,
        touches: &Touches,
        forward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (component, tick) = self.with(stream, |universe, component| {
            universe.access(component, what, touches).map(|tick| (component, tick))
        })?;
        forward().inspect_err(|_| universe().undo(component, tick, touches))
    }

    fn check_event(&self, event: RawEvent) -> Result<()> {
        let known = universe().check_event(event);
        known.or_else(|gone| self.refuse(gone))
    }

    fn region(&self, bytes: u64) -> Region {
        Region::new(self.id, self.name.clone(), self.numbers.fetch_add(1, Ordering::Relaxed) + 1, bytes)
    }

    /// Takes a region out before its memory goes: afterwards somebody else might already have got it.
    fn release(&self, side: Side, start: u64, forward: impl FnOnce() -> Result<()>) -> Result<()> {
        let removed = universe().remove_region(side, start);
        let region = match removed {
            Ok(region) => region,
            Err(race) => return self.refuse(race),
        };
        self.released(side, start, region, forward())
    }

    fn released(&self, side: Side, start: u64, region: Option<Region>, freed: Result<()>) -> Result<()> {
        let Some(region) = region else { return freed };
        match freed {
            Err(_) => universe().add_region(side, start, region),
            Ok(()) if self.remembers && side == Side::Device => universe().bury(start, &region),
            Ok(()) => {}
        }
        freed
    }
}

fn place(place: Place, bytes: u64, write: bool) -> Touch {
    match place {
        Place::Host(pointer) => Touch { side: Side::Host, start: pointer.addr() as u64, bytes, write },
        Place::Device(address) => Touch { side: Side::Device, start: address.0, bytes, write },
    }
}

fn touch(arg: &Arg<'_>) -> Option<Touch> {
    match arg {
        Arg::Slice { address, bytes, write, .. } => Some(place(Place::Device(*address), *bytes, *write)),
        Arg::Scalar(_) => None,
    }
}

impl Backend for Checked {
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
        universe().add_region(Side::Device, address.0, self.region(bytes));
        Ok(address)
    }

    unsafe fn free(&self, address: Address) -> Result<()> {
        self.release(Side::Device, address.0, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.free(address) }
        })
    }

    fn queue_depth(&self) -> Option<u64> {
        self.inner.queue_depth()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address> {
        let address = self.inner.alloc_on(stream, bytes)?;
        let touches = Touches::from_iter([place(Place::Device(address), bytes, true)]);
        self.with(stream, |universe, component| {
            universe.add_region(Side::Device, address.0, self.region(bytes));
            // It is there from this point of the stream on.
            universe.access(component, What::Allocation, &touches)
        })?;
        Ok(address)
    }

    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()> {
        let bytes = universe().size_of(Side::Device, address.0).unwrap_or(0);
        let touches = Touches::from_iter([place(Place::Device(address), bytes, true)]);
        self.access(stream, What::Free, &touches, || {
            // Taken out before it goes: afterwards somebody else might already have got it.
            let region = universe().take_region(Side::Device, address.0);
            // SAFETY: as our caller vouches.
            let freed = unsafe { self.inner.free_on(stream, address) };
            self.released(Side::Device, address.0, region, freed)
        })
    }

    fn wants_recycled(&self) -> bool {
        true
    }

    unsafe fn recycle(&self, stream: Option<RawStream>, address: Address, bytes: u64) -> Result<()> {
        let Some(stream) = stream else {
            // Nobody uses it any more: its past is that of new memory.
            let renewed = universe().renew_region(Side::Device, address.0);
            return match renewed {
                // SAFETY: as our caller vouches.
                Ok(()) => unsafe { self.inner.recycle(None, address, bytes) },
                Err(race) => self.refuse(race),
            };
        };
        let touches = Touches::from_iter([place(Place::Device(address), bytes, true)]);
        self.access(stream, What::Recycling, &touches, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.recycle(Some(stream), address, bytes) }
        })
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let memory = self.inner.alloc_host(bytes)?;
        universe().add_region(Side::Host, memory.as_ptr().addr() as u64, self.region(bytes as u64).initialised());
        Ok(memory)
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        self.release(Side::Host, memory.as_ptr().addr() as u64, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.free_host(memory, bytes) }
        })
    }

    fn stream_priorities(&self) -> (i32, i32) {
        self.inner.stream_priorities()
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream> {
        let stream = self.inner.stream_create(spec)?;
        universe().add_stream(self.key(stream), &self.name, &spec.name, !spec.non_blocking);
        Ok(stream)
    }

    fn stream_rename(&self, stream: RawStream, name: &str) {
        universe().rename_stream(self.key(stream), name);
        self.inner.stream_rename(stream, name);
    }

    fn stream_destroy(&self, stream: RawStream) {
        // Before the driver may give the same handle to somebody else.
        if stream != RawStream(0) {
            universe().remove_stream(self.key(stream), self.remembers);
        }
        self.inner.stream_destroy(stream);
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        // As it is before the question: what comes in meanwhile may not be done.
        let end = self.with(stream, |universe, component| universe.end(component, false))?;
        let done = self.inner.stream_query(stream)?;
        if done {
            universe().observe(&end);
        }
        Ok(done)
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        let whole = stream == RawStream(0);
        let end = self.with(stream, |universe, component| universe.end(component, whole))?;
        self.inner.stream_synchronize(stream)?;
        universe().observe(&end);
        Ok(())
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        let event = self.inner.event_create(timed)?;
        universe().add_event(self.id, event);
        Ok(event)
    }

    fn event_destroy(&self, event: RawEvent) {
        universe().remove_event(event, self.remembers);
        self.inner.event_destroy(event);
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.check_event(event)?;
        let past = self.call(stream)?;
        self.inner.event_record(event, stream)?;
        universe().record(event, past);
        Ok(())
    }

    fn event_query(&self, event: RawEvent) -> Result<bool> {
        self.check_event(event)?;
        let past = universe().recorded(event);
        let done = self.inner.event_query(event)?;
        if let (true, Some(past)) = (done, past) {
            universe().observe(&past);
        }
        Ok(done)
    }

    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration> {
        self.inner.event_elapsed(from, to)
    }

    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let past = self.with(stream, |universe, _| universe.check_event(event).map(|()| universe.recorded(event)))?;
        self.inner.stream_wait(stream, event)?;
        let Some(past) = past else { return Ok(()) };
        self.with(stream, |universe, component| universe.order(component, &past))
    }

    unsafe fn copy(&self, stream: RawStream, to: Place, from: Place, bytes: u64) -> Result<()> {
        let touches = Touches::from_iter([place(from, bytes, false), place(to, bytes, true)]);
        self.access(stream, What::Copy(human::direction(to, from)), &touches, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.copy(stream, to, from, bytes) }
        })
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
        let touches = Touches::from_iter([place(Place::Device(to), bytes, true)]);
        self.access(stream, What::Fill, &touches, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.fill(stream, to, pattern, bytes) }
        })
    }

    fn load(&self, kernel: &'static KernelDef) -> Result<()> {
        self.inner.load(kernel)
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()> {
        let touches = launch.args.iter().filter_map(touch).collect();
        self.access(stream, What::Kernel(launch.kernel.name), &touches, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.launch(stream, launch) }
        })
    }

    unsafe fn external(&self, stream: RawStream, external: External<'_>) -> Result<()> {
        let touches = external.args.iter().filter_map(touch).collect();
        self.access(stream, What::External(external.name), &touches, || {
            // SAFETY: as our caller vouches.
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
            // SAFETY: as our caller vouches.
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
        when: Condition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        self.add_conditional(graph, after, flag, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.graph_add_conditional(graph, after, when, flag) }
        })
    }

    unsafe fn graph_external(&self, graph: RawGraph, after: &[RawNode], external: External<'_>) -> Result<Recorded> {
        self.add_external(graph, after, external, |external| {
            // SAFETY: as our caller vouches.
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
        // SAFETY: as our caller vouches.
        unsafe { self.inner.exec_destroy(exec) };
    }

    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.call(stream)?;
        self.inner.exec_upload(exec, stream)
    }

    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.launch_exec(exec, stream, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.exec_launch(exec, stream) }
        })
    }

    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        self.update_exec(exec, graph, || {
            // SAFETY: as our caller vouches.
            unsafe { self.inner.exec_update(exec, graph) }
        })
    }

    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        self.set_node(exec, node, work, |work| {
            // SAFETY: as our caller vouches.
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

    fn callback_over(&self, function: &HostCallback) {
        self.watched(function).iter().for_each(|watched| self.inner.callback_over(watched));
    }

    fn when_lost(&self, tell: TellsOfLoss) {
        self.inner.when_lost(tell);
    }

    fn has_ended(&self) -> bool {
        let has_ended = self.inner.has_ended();
        if has_ended {
            universe().observe_end(self.id);
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
                universe().observe(&past);
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
        let checked = universe().host_access(&touch);
        match checked {
            Ok(()) => self.inner.host_access(memory, bytes, write),
            Err(race) => self.refuse(race),
        }
    }

    fn host_borrow(&self, memory: *const u8, bytes: usize, exclusive: bool) {
        let touch = Touch { side: Side::Host, start: memory.addr() as u64, bytes: bytes as u64, write: exclusive };
        universe().host_borrow(&touch);
        self.inner.host_borrow(memory, bytes, exclusive);
    }
}
