//! CUDA devices: the [`Backend`] over the driver, which is loaded at run time.
//!
//! A backend owns a reference to one device's primary context, which other CUDA libraries in the process share. While
//! the backend exists, [`open`] returns the same one; dropping the last handle closes it and frees its resources. CUDA
//! is needed neither to build nor to run: without a driver, [`open`] and [`device_count`] return an error.
//!
//! | file | contents |
//! |---|---|
//! | `driver.rs` | the driver's functions, looked up once, with result codes as numbers |
//! | `context.rs` | a device's context; the meaning of result codes; the state of a device after a fault |
//! | `gate.rs` | priority for calls that need the context exclusively |
//! | `memory.rs` | the pool on the device |
//! | `pinned.rs` | page-locked host memory |
//! | `peers.rs` | copies between devices |
//! | `nvrtc.rs` | the compiler, loaded when a kernel needs it |
//! | `image.rs` | a kernel's code, compiled once per process |
//! | `kernel.rs` | a kernel on one device: loaded once, launched |
//! | `host.rs` | closures that a stream or a graph calls |
//! | `graph.rs` | graphs: built, captured, launched, changed |
//! | `event_time.rs` | how long a device takes to pass a timed event |
//! | `warm_up.rs` | empty launches that keep the next launch quick |
//!
//! Streams and events are the driver's handles as numbers; `RawStream(0)` is the legacy default stream. Only the calls
//! that the trait names wait for the device. Recording, waiting, querying, copying, filling and launching acquire no
//! lock of this crate and do not allocate.
//!
//! By the trait's contract, callers of the backend own the handles that they pass. SAFETY comments in this module rely
//! on this contract where they call a stream, an event, a graph, a node or an exec live.

mod context;
mod driver;
mod event_time;
mod gate;
mod graph;
mod host;
mod image;
mod kernel;
mod kernel_table;
mod memory;
mod nvrtc;
mod peers;
mod pinned;
#[cfg(test)]
mod tests;
mod warm_up;

use rustc_hash::{FxBuildHasher, FxHashMap};

use std::{
    ffi::{CStr, c_char, c_int, c_uint},
    fmt, ptr,
    ptr::NonNull,
    sync::{Arc, Weak},
    time::Duration,
};

pub(crate) use self::image::{check_architecture, compile as compile_kernel};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdevice_attribute, CUevent, CUevent_flags, CUstream, CUstream_flags};

use self::{
    context::Context, driver::Driver, gate::ContextGate, graph::CudaGraphs, kernel::Kernels, memory::DriverMemory,
    pinned::Pinned, warm_up::WarmUp,
};
use super::backend::{
    Address, Backend, Endpoint, ExternalNodes, ExternalWork, GraphCondition, HostCallback, HostFunction, KernelDef,
    Launch, LossHandler, MemoryInfo, NodeWork, Pattern, RawEvent, RawExec, RawGraph, RawNode, RawStream, Refused,
    StreamSpec,
};
use super::nvtx::Nvtx;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Level, Mutex, log};

/// True if the driver's library is installed, whether or not a GPU works with it.
pub(crate) fn driver_present() -> bool {
    Driver::is_installed()
}

/// The number of CUDA devices visible to this process. Fails with [`NoDevice`](ErrorKind::NoDevice) if there is no
/// driver.
pub(crate) fn device_count() -> Result<usize> {
    Driver::get()?.device_count()
}

/// The device with this ordinal. Opens it if it is not open yet, which takes some tenths of a second. Fails with
/// [`NoDevice`](ErrorKind::NoDevice) if there is no such device.
pub(crate) fn open(ordinal: usize) -> Result<Arc<CudaBackend>> {
    static OPEN: Mutex<FxHashMap<usize, Weak<CudaBackend>>> =
        Mutex::at(Level::Opening, FxHashMap::with_hasher(FxBuildHasher));
    let driver = Driver::get()?;
    let mut open = OPEN.lock();
    if let Some(backend) = open.get(&ordinal).and_then(Weak::upgrade)
        && backend.cx.lost().is_none()
    {
        return Ok(backend);
    }
    let backend = Arc::new(CudaBackend::new(driver, ordinal)?);
    for other in open.values().filter_map(Weak::upgrade) {
        if other.cx.device != backend.cx.device && other.cx.lost().is_none() {
            peers::connect((&backend.cx, &backend.memory), (&other.cx, &other.memory))?;
        }
    }
    open.insert(ordinal, Arc::downgrade(&backend));
    Ok(backend)
}

/// A CUDA device. See the [module](self).
pub(crate) struct CudaBackend {
    cx: Context,
    description: String,
    /// The least and the greatest priority of a stream, such as 0 and -5.
    priorities: (c_int, c_int),
    memory: DriverMemory,
    pinned: Pinned,
    kernels: Kernels,
    graphs: CudaGraphs,
    gate: ContextGate,
    /// `None` if the driver refused it: launches after a pause are then slower, and device times include that of an event.
    warm_up: Option<WarmUp>,
    /// Zero if it is unknown.
    event_time: Duration,
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend")
            .field("name", &self.cx.name)
            .field("description", &self.description)
            .field("lost", &self.cx.lost())
            .finish_non_exhaustive()
    }
}

impl CudaBackend {
    fn new(driver: &'static Driver, ordinal: usize) -> Result<Self> {
        let cx = Context::open(driver, ordinal)?;
        cx.enter()?;
        let attribute =
            |attribute| driver.attribute(cx.device, attribute).map_err(|code| cx.fail(code, "cuDeviceGetAttribute"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
            let text = "the device has no unified addressing, which wakeline requires";
            return Err(Error::new(ErrorKind::NoDevice, text).at(cx.name.clone()));
        }
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: `name` outlives the call, which writes at most as many bytes as the length passed, the last a NUL.
        let code = unsafe { (driver.device_get_name)(name.as_mut_ptr(), name.len() as c_int, cx.device) };
        cx.check(code, "cuDeviceGetName")?;
        // SAFETY: terminated by the driver or, if it wrote nothing, by the initial zeros.
        let description = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        // SAFETY: both outlive the call, which writes one int to each.
        let code = unsafe { (driver.ctx_get_stream_priority_range)(&mut least, &mut greatest) };
        cx.check(code, "cuCtxGetStreamPriorityRange")?;
        let memory = DriverMemory::open(&cx)?;
        // Nothing fails from here on, so `drop` will undo this registration.
        peers::register(&cx);
        let arch = u32::try_from(major * 10 + minor).unwrap_or(0);
        let mut backend = Self {
            cx,
            description,
            priorities: (least, greatest),
            memory,
            pinned: Pinned::default(),
            kernels: Kernels::new(arch),
            graphs: CudaGraphs::default(),
            gate: ContextGate::default(),
            warm_up: None,
            event_time: Duration::ZERO,
        };
        backend.warm_up = WarmUp::new(&backend).ok();
        if let Some(warm_up) = &backend.warm_up {
            backend.event_time = event_time::event_time(&backend, warm_up.stream());
        }
        Ok(backend)
    }

    /// Checks that a fill consists of whole, aligned patterns.
    fn check_fill(&self, to: Address, Pattern { width, .. }: Pattern, bytes: u64) -> Result<()> {
        let fits = |number: u64| number.is_multiple_of(width as u64);
        if matches!(width, 1 | 2 | 4) && fits(bytes) && fits(to.0) {
            return Ok(());
        }
        let text = format!(
            "a fill of {bytes} bytes at {to:?} with a pattern of {width} bytes: the pattern has 1, 2 or 4 bytes, which must \
             divide both the length and the address"
        );
        Err(Error::new(ErrorKind::Usage, text).at(self.cx.name.clone()))
    }
}

/// Streams and events are numbers in the backend's interface. This and `event` restore the driver's handles.
fn stream(raw: RawStream) -> CUstream {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

fn event(raw: RawEvent) -> CUevent {
    ptr::with_exposed_provenance_mut(raw.0 as usize)
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.cx.name
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn make_current(&self) -> Result<()> {
        self.cx.enter().map(|_| ())
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.memory.info(&self.cx)
    }

    fn alloc(&self, bytes: u64) -> Result<Address> {
        self.memory.alloc(&self.cx, bytes)
    }

    unsafe fn free(&self, address: Address) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.memory.free(&self.cx, address) }
    }

    /// The driver does not report the limit. Measured: 1,021 on an H200 (driver 580.159.04), 1,024 on other devices.
    fn queue_depth(&self) -> Option<u64> {
        Some(1000)
    }

    fn reuses_handles(&self) -> bool {
        true
    }

    fn granularity(&self) -> u64 {
        DriverMemory::GRANULARITY
    }

    fn alloc_on(&self, stream: RawStream, bytes: u64) -> Result<Address> {
        self.memory.alloc_on(&self.cx, stream, bytes)
    }

    unsafe fn free_on(&self, stream: RawStream, address: Address) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.memory.free_on(&self.cx, stream, address) }
    }

    fn alloc_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.pinned.alloc(&self.cx, bytes)
    }

    unsafe fn free_host(&self, memory: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.pinned.free(memory, bytes) };
        self.cx.enter().map(drop)
    }

    fn stream_priorities(&self) -> (i32, i32) {
        self.priorities
    }

    fn stream_create(&self, spec: &StreamSpec) -> Result<RawStream> {
        let driver = self.cx.enter()?;
        let (least, greatest) = self.priorities;
        let priority = spec.priority.min(least).max(greatest);
        let flags = match spec.non_blocking {
            true => CUstream_flags::CU_STREAM_NON_BLOCKING,
            false => CUstream_flags::CU_STREAM_DEFAULT,
        };
        let mut stream = ptr::null_mut();
        let exclusive = self.gate.exclusive();
        // SAFETY: `stream` outlives the call, which writes one handle.
        let code = unsafe { (driver.stream_create)(&mut stream, flags as c_uint, priority) };
        self.cx.check(code, "cuStreamCreateWithPriority")?;
        drop(exclusive);
        let raw = RawStream(stream.expose_provenance() as u64);
        self.stream_rename(raw, &spec.name);
        Ok(raw)
    }

    fn stream_rename(&self, raw: RawStream, name: &str) {
        if let Some(nvtx) = Nvtx::loaded() {
            nvtx.name_stream(stream(raw).cast(), name);
        }
    }

    fn stream_destroy(&self, raw: RawStream) {
        // The default stream is never destroyed. After a fault, streams are leaked.
        if raw.0 == 0 {
            return;
        }
        let Ok(driver) = self.cx.enter() else { return };
        let exclusive = self.gate.exclusive();
        // SAFETY: created by `stream_create` here; its owner calls this once and no longer uses it.
        let destroyed = self.cx.check(unsafe { (driver.stream_destroy)(stream(raw)) }, "cuStreamDestroy");
        drop(exclusive);
        if let Err(error) = destroyed {
            log(move || tracing::warn!(error = %format_args!("{error:#}"), "a stream was not destroyed"));
        }
    }

    fn stream_query(&self, raw: RawStream) -> Result<bool> {
        let driver = self.cx.enter()?;
        // SAFETY: a live stream of this context.
        self.cx.check_ready(unsafe { (driver.stream_query)(stream(raw)) }, "cuStreamQuery")
    }

    fn stream_synchronize(&self, raw: RawStream) -> Result<()> {
        let driver = self.cx.enter()?;
        // SAFETY: as in `stream_query`.
        self.cx.check(unsafe { (driver.stream_synchronize)(stream(raw)) }, "cuStreamSynchronize")
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        let driver = self.cx.enter()?;
        let flags = if timed { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut event = ptr::null_mut();
        let _exclusive = self.gate.exclusive();
        // SAFETY: `event` outlives the call, which writes one handle.
        self.cx.check(unsafe { (driver.event_create)(&mut event, flags as c_uint) }, "cuEventCreate")?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    fn event_destroy(&self, raw: RawEvent) {
        let Ok(driver) = self.cx.enter() else { return };
        let exclusive = self.gate.exclusive();
        // SAFETY: created by `event_create` here; its owner calls this once and no longer uses it.
        let destroyed = self.cx.check(unsafe { (driver.event_destroy)(event(raw)) }, "cuEventDestroy");
        drop(exclusive);
        if let Err(error) = destroyed {
            log(move || tracing::warn!(error = %format_args!("{error:#}"), "an event was not destroyed"));
        }
    }

    fn event_record(&self, raw: RawEvent, at: RawStream) -> Result<()> {
        let code = self.cx.call_without_context(Some(at), |driver| {
            // SAFETY: a live event and a live stream of this context.
            unsafe { (driver.event_record)(event(raw), stream(at)) }
        })?;
        self.cx.check(code, "cuEventRecord")
    }

    fn event_query(&self, raw: RawEvent) -> Result<bool> {
        // SAFETY: a live event.
        let code = self.cx.call_without_context(None, |driver| unsafe { (driver.event_query)(event(raw)) })?;
        self.cx.check_ready(code, "cuEventQuery")
    }

    fn event_elapsed(&self, from: RawEvent, to: RawEvent) -> Result<Duration> {
        self.event_elapsed_if_passed(from, to)?.ok_or_else(|| {
            let text = "the time between two events is not known until the device has reached both";
            Error::new(ErrorKind::Usage, text).at(self.cx.name.clone())
        })
    }

    fn event_elapsed_if_passed(&self, from: RawEvent, to: RawEvent) -> Result<Option<Duration>> {
        let driver = self.cx.enter()?;
        let mut milliseconds = 0_f32;
        // SAFETY: live events; `milliseconds` outlives the call, which writes one float.
        let code = unsafe { (driver.event_elapsed_time)(&mut milliseconds, event(from), event(to)) };
        let is_passed = self.cx.check_ready(code, "cuEventElapsedTime")?;
        // Negative if the events passed in the reverse order.
        let took = || Duration::try_from_secs_f64(f64::from(milliseconds).max(0.0) / 1e3).unwrap_or_default();
        Ok(is_passed.then(took))
    }

    fn event_time(&self) -> Duration {
        self.event_time
    }

    fn stream_wait(&self, raw: RawStream, awaited: RawEvent) -> Result<()> {
        let code = self.cx.call_without_context(Some(raw), |driver| {
            // SAFETY: a live stream of this context and a live event of this or another device's.
            unsafe { (driver.stream_wait_event)(stream(raw), event(awaited), 0) }
        })?;
        self.cx.check(code, "cuStreamWaitEvent")
    }

    unsafe fn copy(&self, raw: RawStream, to: Endpoint, from: Endpoint, bytes: u64) -> Result<()> {
        let driver = self.cx.enter()?;
        if bytes == 0 {
            return Ok(());
        }
        self.gate.wait_for_exclusive();
        let (stream, bytes) = (stream(raw), bytes as usize);
        match (to, from) {
            (Endpoint::Device(to), Endpoint::Host(from)) => {
                // SAFETY: the caller guarantees both ends until the copy is done; this applies to all four cases.
                let code = unsafe { (driver.memcpy_htod_async)(to.0, from.cast_const().cast(), bytes, stream) };
                self.cx.check(code, "cuMemcpyHtoDAsync")
            }
            (Endpoint::Host(to), Endpoint::Device(from)) => {
                // SAFETY: as above.
                let code = unsafe { (driver.memcpy_dtoh_async)(to.cast(), from.0, bytes, stream) };
                self.cx.check(code, "cuMemcpyDtoHAsync")
            }
            (Endpoint::Device(to), Endpoint::Device(from)) => {
                if let Some((to_cx, from_cx)) = peers::contexts(driver, to, from) {
                    // SAFETY: as above; each context is that of the device on which the driver reports the memory.
                    let code = unsafe { (driver.memcpy_peer_async)(to.0, to_cx, from.0, from_cx, bytes, stream) };
                    return self.cx.check(code, "cuMemcpyPeerAsync");
                }
                // SAFETY: as above; with unified addressing the driver determines where each end is.
                self.cx.check(unsafe { (driver.memcpy_async)(to.0, from.0, bytes, stream) }, "cuMemcpyAsync")
            }
            (Endpoint::Host(to), Endpoint::Host(from)) => {
                let (to, from) = (to.expose_provenance() as u64, from.expose_provenance() as u64);
                // SAFETY: as above; host addresses are addresses of the unified space.
                self.cx.check(unsafe { (driver.memcpy_async)(to, from, bytes, stream) }, "cuMemcpyAsync")
            }
        }
    }

    unsafe fn fill(&self, raw: RawStream, to: Address, pattern: Pattern, bytes: u64) -> Result<()> {
        let driver = self.cx.enter()?;
        let Pattern { width, bits } = pattern;
        self.check_fill(to, pattern, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        self.gate.wait_for_exclusive();
        let (stream, count) = (stream(raw), bytes as usize / width);
        // SAFETY: the caller guarantees `bytes` bytes at `to` until the fill is done; `count` patterns are as many
        // bytes, and aligned.
        let code = unsafe {
            match width {
                1 => (driver.memset_d8_async)(to.0, bits as u8, count, stream),
                2 => (driver.memset_d16_async)(to.0, bits as u16, count, stream),
                _ => (driver.memset_d32_async)(to.0, bits, count, stream),
            }
        };
        self.cx.check(code, "cuMemsetAsync")
    }

    unsafe fn external(&self, raw: RawStream, external: ExternalWork<'_>) -> Result<()> {
        self.cx.enter()?;
        (external.call)(stream(raw).cast());
        Ok(())
    }

    fn cuda_context(&self) -> Option<&Arc<CudaContext>> {
        Some(self.cx.primary())
    }

    fn load(&self, kernel: &'static KernelDef) -> Result<()> {
        self.kernels.load(&self.cx, kernel)
    }

    unsafe fn launch(&self, raw: RawStream, launch: &Launch<'_>) -> Result<()> {
        self.gate.wait_for_exclusive();
        // SAFETY: the same contract.
        unsafe { self.kernels.launch(&self.cx, stream(raw), launch) }
    }

    fn graph_create(&self) -> Result<RawGraph> {
        self.create_graph()
    }

    fn graph_destroy(&self, graph: RawGraph) {
        self.destroy_graph(graph);
    }

    unsafe fn graph_add(&self, graph: RawGraph, after: &[RawNode], work: &NodeWork<'_>) -> Result<RawNode> {
        // SAFETY: the same contract; this applies to the calls below as well.
        unsafe { self.add_node(graph, after, work) }
    }

    fn graph_add_alloc(&self, graph: RawGraph, after: &[RawNode], bytes: u64) -> Result<(RawNode, Address)> {
        self.add_alloc(graph, after, bytes)
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        when: GraphCondition,
        flag: Address,
    ) -> Result<(RawNode, RawGraph)> {
        // SAFETY: as above.
        unsafe { self.add_conditional(graph, after, when, flag) }
    }

    unsafe fn graph_external(
        &self,
        graph: RawGraph,
        after: &[RawNode],
        external: ExternalWork<'_>,
    ) -> Result<ExternalNodes> {
        // SAFETY: as above.
        unsafe { self.capture_external(graph, after, external) }
    }

    fn graph_order(&self, graph: RawGraph, before: RawNode, after: RawNode) -> Result<()> {
        self.order_nodes(graph, before, after)
    }

    fn graph_remove(&self, graph: RawGraph, node: RawNode) -> Result<()> {
        self.remove_node(graph, node)
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawExec> {
        self.instantiate(graph)
    }

    unsafe fn exec_destroy(&self, exec: RawExec) {
        // SAFETY: as above.
        unsafe { self.destroy_exec(exec) }
    }

    fn exec_upload(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        self.upload(exec, stream)
    }

    unsafe fn exec_launch(&self, exec: RawExec, stream: RawStream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.launch_exec(exec, stream) }
    }

    unsafe fn exec_update(&self, exec: RawExec, graph: RawGraph) -> Result<Result<(), Refused>> {
        // SAFETY: as above.
        unsafe { self.update_exec(exec, graph) }
    }

    unsafe fn exec_set(&self, exec: RawExec, node: RawNode, work: &NodeWork<'_>) -> Result<Result<(), Refused>> {
        // SAFETY: as above.
        unsafe { self.set_node(exec, node, work) }
    }

    fn exec_enable(&self, exec: RawExec, node: RawNode, enabled: bool) -> Result<Result<(), Refused>> {
        self.enable_node(exec, node, enabled)
    }

    fn when_lost(&self, handler: LossHandler) {
        self.cx.when_lost(handler);
    }

    fn release_callback(&self, function: &HostCallback) {
        self.forget_callback(function);
    }

    fn host_function(&self, raw: RawStream, function: &mut Option<HostFunction>) -> Result<()> {
        host::launch(&self.cx, stream(raw), function)
    }

    fn warm_up(&self) -> Result<()> {
        self.warm_up.as_ref().map_or(Ok(()), |warm_up| warm_up.run(self))
    }
}

impl Drop for CudaBackend {
    /// Waits for enqueued work, so that host functions are called and no code is unloaded while it runs, and frees all
    /// resources. After a fault, and on a thread where the driver must not be called, it leaks them instead.
    fn drop(&mut self) {
        peers::unregister(&self.cx);
        if host::on_callback_thread() {
            let device = self.cx.name.clone();
            log(move || {
                tracing::warn!(%device, "closed by a host function, where the driver must not be called: leaked");
            });
            return self.cx.leak();
        }
        let settled = self.cx.enter().and_then(|driver| {
            // SAFETY: the context is current.
            self.cx.check(unsafe { (driver.ctx_synchronize)() }, "cuCtxSynchronize")?;
            Ok(driver)
        });
        host::drop_all(self.cx.owner);
        match settled {
            Ok(driver) => {
                self.warm_up.iter().for_each(|warm_up| warm_up.close(self));
                self.graphs.close(driver);
                self.kernels.close(driver);
                self.pinned.close(driver);
                self.memory.close(driver);
            }
            Err(error) => {
                log(
                    move || tracing::warn!(error = %format_args!("{error:#}"), "closed after a failure: its resources are leaked"),
                );
                self.cx.leak();
            }
        }
    }
}
