//! [`Backend`] for [`Recorder`]: every call that enqueues work adds a node.

use std::{ptr::NonNull, sync::atomic::Ordering, time::Duration};

use super::{
    super::{
        backend::{
            Address, Backend, Endpoint, ExternalNodes, ExternalWork, HostCallback, HostFunction, KernelDef, Launch,
            MemoryInfo, NodeWork, Pattern, RawEvent, RawStream, StreamSpec,
        },
        graph_ir::{Kind, NodeSet},
        touched::touched_by_args,
    },
    Recorder,
};
use crate::error::{Error, ErrorKind, Result};

pub(crate) fn one_shot_error() -> Error {
    let text = "each launch of a captured graph calls its host functions, but this host function can be called only \
                once: use `host_callback`";
    Error::new(ErrorKind::Usage, text)
}

impl Backend for Recorder {
    fn name(&self) -> &str {
        self.inner.name()
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
        self.inner.alloc(bytes)
    }

    unsafe fn free(&self, address: Address) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.inner.free(address) }
    }

    fn alloc_on(&self, _stream: RawStream, _bytes: u64) -> Result<Address> {
        let text = "stream-ordered memory in a capture is not supported, as it could have another owner at the \
                    second launch: use another allocator, whose memory the graph keeps alive";
        Err(Error::new(ErrorKind::Usage, text))
    }

    unsafe fn free_on(&self, _stream: RawStream, _address: Address) -> Result<()> {
        Err(Error::new(
            ErrorKind::Usage,
            "stream-ordered memory cannot be freed in a capture: drop it before the capture begins or after it ends",
        ))
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.inner.alloc_host(bytes)
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.inner.free_host(memory, bytes) }
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream> {
        Ok(self.stream(&spec.name, NodeSet::new()))
    }

    fn stream_destroy(&self, _stream: RawStream) {}

    fn stream_query(&self, _stream: RawStream) -> Result<bool> {
        Ok(false)
    }

    fn stream_synchronize(&self, _stream: RawStream) -> Result<()> {
        Err(Error::new(
            ErrorKind::Usage,
            "captured work does not run until its graph is launched: wait for a launch instead",
        ))
    }

    fn event_create(&self, _timed: bool) -> Result<RawEvent> {
        let mut state = self.state();
        state.handles += 1;
        let event = RawEvent(state.handles);
        state.events.insert(event, NodeSet::new());
        Ok(event)
    }

    fn event_destroy(&self, event: RawEvent) {
        self.state().events.remove(&event);
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        let at = state.stream_end(stream)?;
        match state.events.get_mut(&event) {
            Some(mark) => *mark = at,
            None => {
                // An event of the device, which is recorded at each launch.
                drop(state);
                // SAFETY: a record touches no memory; the caller that enqueued it keeps the event alive.
                unsafe { self.enqueue(stream, &NodeWork::Record(event)) }?;
            }
        }
        Ok(())
    }

    fn event_query(&self, _event: RawEvent) -> Result<bool> {
        Ok(false)
    }

    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration> {
        self.inner.event_elapsed(from, to)
    }

    fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        let Some(mark) = state.events.get(&event).cloned() else {
            drop(state);
            // SAFETY: a wait touches no memory; the caller that enqueued it keeps the event alive.
            return unsafe { self.enqueue(stream, &NodeWork::Wait(event)) };
        };
        let at = state.stream_end(stream)?;
        let joined = state.ir.last_of(at.into_iter().chain(mark));
        if let Some(stream_end) = state.streams.get_mut(&stream) {
            stream_end.at = joined;
        }
        Ok(())
    }

    unsafe fn copy(&self, stream: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.enqueue(stream, &NodeWork::Copy { to, from, bytes }) }
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.enqueue(stream, &NodeWork::Fill { to, pattern, bytes }) }
    }

    fn load(&self, kernel: &'static KernelDef) -> Result<()> {
        self.inner.load(kernel)
    }

    unsafe fn launch(&self, stream: RawStream, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.enqueue(stream, &NodeWork::Kernel(*launch)) }
    }

    unsafe fn external(&self, stream: RawStream, external: ExternalWork<'_>) -> Result<()> {
        let mut state = self.state();
        state.check()?;
        if let Some(collector) = &mut state.collector {
            return collector.refuse(
                "a node cannot be set to another library's work: capture the graph again and update the whole exec",
            );
        }
        let (after, graph, label) = (state.end_to_add(stream)?, state.graph, state.label.clone());
        let before = state.ir.raw_of(&after);
        state.capturing.store(true, Ordering::Release);
        drop(state);
        let (name, touched) = (external.name, touched_by_args(external.args));
        // SAFETY: the same contract. While `capturing` is set, nothing else is added to the graph.
        let recorded = unsafe { self.inner.graph_external(graph, &before, external) };
        self.capture_ended();
        let mut state = self.state();
        let ExternalNodes { ends, nodes, host_copies } = recorded?;
        if nodes == 0 {
            return Ok(());
        }
        let raw = ends.into_iter().collect();
        let node = state.ir.add(raw, Kind::External, name.into(), label, after);
        state.ir.set_touched(node, touched);
        state.external_copies.extend(host_copies.into_iter().map(|(way, bytes)| (node, way, bytes)));
        state.advance(stream, node);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_context(&self) -> Option<&std::sync::Arc<cudarc::driver::CudaContext>> {
        self.inner.cuda_context()
    }

    fn host_function(&self, _stream: RawStream, _function: &mut Option<HostFunction>) -> Result<()> {
        Err(one_shot_error())
    }

    fn host_callback(&self, stream: RawStream, function: HostCallback) -> Result<()> {
        // SAFETY: it touches no device memory.
        unsafe { self.enqueue(stream, &NodeWork::Host(function)) }
    }

    fn reuses_handles(&self) -> bool {
        self.inner.reuses_handles()
    }

    fn is_checked(&self) -> bool {
        self.inner.is_checked()
    }

    fn host_access(&self, memory: *const u8, bytes: usize, write: bool) -> Result<()> {
        self.inner.host_access(memory, bytes, write)
    }

    fn host_borrow(&self, memory: *const u8, bytes: usize, exclusive: bool) {
        self.inner.host_borrow(memory, bytes, exclusive);
    }
}
