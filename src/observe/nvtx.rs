//! A flow's runs as NVTX events, if a profiler is attached to the process: see [`Nvtx`].
//!
//! A run may end on another thread than it began on: it is a range with a begin and an end. A poll is one of a thread's
//! nested ranges: what an operator enqueues there, a profiler attributes to it. Messages are marks.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::{
    device::nvtx::{Nvtx, NvtxCategory, NvtxName, NvtxRange},
    flow::FlowObserver,
    operator::{Handle, control::Control, observed_runs::Watched},
    sync::{AtomicU64, Mutex, Ordering, lock},
    tracepoint::{OUTSIDE, PackedEvent, TraceEvent, TraceSink},
};

/// Shows one run of a flow to a profiler.
struct NvtxObserver {
    nvtx: &'static Nvtx,
    sink: OnceLock<Arc<NvtxSink>>,
}

/// The observer of a flow that begins, if a profiler is attached.
pub(crate) fn attached_profiler() -> Option<Arc<dyn FlowObserver>> {
    let nvtx = Nvtx::get()?;
    Some(Arc::new(NvtxObserver { nvtx, sink: OnceLock::new() }))
}

impl FlowObserver for NvtxObserver {
    fn records_to(&self) -> *const () {
        std::ptr::from_ref(self.nvtx).cast()
    }

    fn watches(&self, flow: &Control, watched: &mut Watched) {
        let operators = flow.names.iter().map(|name| TracedRanges::new(self.nvtx.register(name))).collect();
        let sink = NvtxSink { nvtx: self.nvtx, flow: self.nvtx.register(&flow.name), operators, hubs: OnceLock::new() };
        let sink = self.sink.get_or_init(|| Arc::new(sink));
        watched.sinks.push(Box::new(sink.clone()));
    }

    fn begins(&self, flow: &Handle) {
        let names = flow.0.hubs().all.iter().map(|hub| self.nvtx.register(hub.state.name())).collect();
        if let Some(sink) = self.sink.get() {
            let _ = sink.hubs.set(names);
        }
    }

    fn ends(&self, _flow: &Handle) {
        self.sink.get().into_iter().for_each(|sink| sink.end_ranges());
    }
}

#[derive(Debug)]
struct NvtxSink {
    nvtx: &'static Nvtx,
    flow: NvtxName,
    operators: Box<[TracedRanges]>,
    /// Set when the operators begin.
    hubs: OnceLock<Box<[NvtxName]>>,
}

/// The ranges of one operator.
#[derive(Debug)]
struct TracedRanges {
    name: NvtxName,
    /// The number of the run that began last.
    last: AtomicU64,
    /// Runs that have not ended, by their numbers.
    open: Mutex<SmallVec<[(u64, NvtxRange); 2]>>,
}

impl TracedRanges {
    fn new(name: NvtxName) -> Self {
        Self { name, last: AtomicU64::new(0), open: Mutex::new(SmallVec::new()) }
    }
}

impl NvtxSink {
    /// Ends the ranges of runs that did not end: they were aborted.
    fn end_ranges(&self) {
        for operator in &self.operators {
            let open = std::mem::take(&mut *lock(&operator.open));
            open.into_iter().for_each(|(_, range)| self.nvtx.end(range));
        }
    }

    fn mark_message(&self, category: NvtxCategory, hub: u32, message: u64) {
        if let Some(name) = self.hubs.get().and_then(|hubs| hubs.get(hub as usize)) {
            self.nvtx.mark(category, *name, message);
        }
    }

    fn mark_problem(&self, name: NvtxName) {
        self.nvtx.mark(NvtxCategory::Problem, name, 0);
    }

    fn operator(&self, operator: u32) -> Option<&TracedRanges> {
        self.operators.get(operator as usize)
    }
}

impl TraceSink for NvtxSink {
    fn takes_late(&self) -> bool {
        false
    }

    fn record(&self, _at: u64, event: PackedEvent) {
        let Some(event) = event.unpack(&[]) else { return };
        match event {
            TraceEvent::RunBegan { operator, run } => {
                let Some(operator) = self.operator(operator) else { return };
                operator.last.store(run, Ordering::Relaxed);
                if let Some(range) = self.nvtx.start(NvtxCategory::Run, operator.name, run) {
                    lock(&operator.open).push((run, range));
                }
            }
            TraceEvent::RunEnded { operator, run } => {
                let Some(operator) = self.operator(operator) else { return };
                let mut open = lock(&operator.open);
                let ended = open.iter().position(|(number, _)| *number == run).map(|at| open.swap_remove(at));
                drop(open);
                ended.into_iter().for_each(|(_, range)| self.nvtx.end(range));
            }
            TraceEvent::PollBegan { operator } => {
                let Some(operator) = self.operator(operator) else { return };
                self.nvtx.push(NvtxCategory::Poll, operator.name, operator.last.load(Ordering::Relaxed));
            }
            TraceEvent::PollEnded { operator } => {
                if self.operator(operator).is_some() {
                    self.nvtx.pop();
                }
            }
            TraceEvent::Sent { hub, message, .. } => self.mark_message(NvtxCategory::Sent, hub, message),
            TraceEvent::Taken { hub, message, .. } => self.mark_message(NvtxCategory::Taken, hub, message),
            TraceEvent::Stalled => self.mark_problem(self.flow),
            TraceEvent::Failed { operator: OUTSIDE } => self.mark_problem(self.flow),
            TraceEvent::Failed { operator } => {
                self.mark_problem(self.operator(operator).map_or(self.flow, |operator| operator.name));
            }
        }
    }
}
