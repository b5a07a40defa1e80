//! A GPU used by plain driver calls, as in a program without wakeline: limits are measured with it.
//!
//! Every driver error panics: a wrong limit is worse than none. The context is the device's primary one, which wakeline
//! uses, too; it must be current on each calling thread (`Gpu::enter`).

#![allow(dead_code)]

use std::{
    ffi::{CString, c_void},
    ptr, slice,
    sync::{Arc, atomic::AtomicU64},
};

use cudarc::{
    driver::{CudaContext, result, sys},
    nvrtc,
};

#[derive(Clone)]
pub(crate) struct Gpu(Arc<CudaContext>);

impl Gpu {
    /// Panics if there is no GPU: see `Device::cuda_count`.
    pub(crate) fn open() -> Self {
        Self(CudaContext::new(0).expect("the primary context"))
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) {
        self.0.bind_to_thread().expect("a context to make current");
    }

    pub(crate) fn schedule(&self) -> &'static str {
        let mut flags = 0;
        // SAFETY: the context is current; `flags` outlives the call, which writes one int.
        unsafe { sys::cuCtxGetFlags(&mut flags).result().expect("the context's flags") };
        match flags & 7 {
            0 => "auto (it spins where there are more cores than contexts)",
            1 => "spin",
            2 => "yield",
            4 => "blocking",
            _ => "unknown",
        }
    }

    /// A kernel, compiled behind its prototype: the sources of wakeline's kernels do not declare their linkage.
    pub(crate) fn kernel(&self, name: &str, parameters: &str, source: &str) -> Kernel {
        let source = format!("extern \"C\" __global__ void {name}({parameters});\n{source}");
        let code = nvrtc::compile_ptx(source).expect("a kernel that compiles");
        let code = CString::new(code.to_src().trim_end_matches('\0')).expect("text");
        let name = CString::new(name).expect("a name");
        // SAFETY: the code is terminated text. The module is never unloaded, so the function stays valid.
        unsafe {
            let module = result::module::load_data(code.as_ptr().cast()).expect("code that loads");
            Kernel(result::module::get_function(module, name).expect("the kernel in its code"))
        }
    }

    /// Zeroed device memory of this size, never freed.
    pub(crate) fn memory(&self, bytes: usize) -> u64 {
        // SAFETY: fresh memory of that size.
        unsafe {
            let memory = result::malloc_sync(bytes).expect("device memory");
            result::memset_d8_sync(memory, 0, bytes).expect("fills");
            memory
        }
    }

    /// Zeroed page-locked memory for so many elements, never freed. They are atomics because the device reads and
    /// writes them, too.
    pub(crate) fn host_memory(&self, elements: usize) -> &'static [AtomicU64] {
        let bytes = elements * size_of::<AtomicU64>();
        // SAFETY: fresh memory of that size, aligned to a page and never freed. Zeros are valid atomics.
        unsafe {
            let memory = result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE).expect("page-locked memory");
            let memory = memory.cast::<AtomicU64>();
            memory.write_bytes(0, elements);
            slice::from_raw_parts(memory, elements)
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Kernel(sys::CUfunction);

// SAFETY: a handle that any thread may use, as the driver's documentation says.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

pub(crate) struct Stream(sys::CUstream);

// SAFETY: a handle that any thread may use, as the driver's documentation says.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new() -> Self {
        Self(result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream"))
    }

    /// # Safety
    /// The arguments are the kernel's: each of 8 bytes, each pointer to memory that stays valid until the kernel is
    /// done.
    pub(crate) unsafe fn launch(&self, kernel: Kernel, threads: u32, arguments: &[u64]) {
        let mut pointers = [ptr::null_mut::<c_void>(); 4];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = ptr::from_ref(argument).cast_mut().cast();
        }
        let pointers = &mut pointers[..arguments.len()];
        // SAFETY: a live function and stream; the caller vouches for the arguments, which the driver copies before it
        // returns.
        unsafe { result::launch_kernel(kernel.0, (1, 1, 1), (threads, 1, 1), 0, self.0, pointers).expect("launches") };
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// `to` is device memory of the same size, which stays valid until the copy is done.
    pub(crate) unsafe fn copy_in(&self, to: u64, from: &'static [AtomicU64]) {
        // SAFETY: a live stream; `from` is never freed; the caller vouches for `to`.
        unsafe { result::memcpy_htod_async(to, from, self.0).expect("copies") };
    }

    /// Enqueues a copy to page-locked memory.
    ///
    /// # Safety
    /// `from` is device memory of the same size, which stays valid until the copy is done.
    pub(crate) unsafe fn copy_out(&self, to: &'static [AtomicU64], from: u64) {
        let (target, bytes) = (to.as_ptr().cast_mut().cast(), size_of_val(to));
        // SAFETY: a live stream; `to` is never freed, and atomics may change behind a shared reference; the caller
        // vouches for `from`.
        unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, self.0).result().expect("copies") };
    }

    pub(crate) fn record(&self, event: &Event) {
        // SAFETY: both are live.
        unsafe { result::event::record(event.0, self.0).expect("records") };
    }

    pub(crate) fn wait(&self, event: &Event) {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are live.
        unsafe { result::stream::wait_event(self.0, event.0, flags).expect("waits") };
    }

    /// Calls `function`, on a driver thread, when the work before it is done. It must not call the driver.
    pub(crate) fn host_function<F: FnOnce() + Send + 'static>(&self, function: F) {
        unsafe extern "C" fn call<F: FnOnce()>(function: *mut c_void) {
            // SAFETY: boxed below, and taken by this one call.
            unsafe { Box::from_raw(function.cast::<F>())() }
        }
        let function = Box::into_raw(Box::new(function));
        // SAFETY: a live stream; `call` takes its argument once.
        unsafe { result::stream::launch_host_function(self.0, call::<F>, function.cast()).expect("enqueues") };
    }

    /// The handle as other libraries take it.
    pub(crate) fn raw(&self) -> *mut c_void {
        self.0.cast()
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: it is live.
        unsafe { result::stream::synchronize(self.0).expect("synchronises") };
    }
}

impl Stream {
    /// Starts a capture: later work of this thread on this stream, and on streams that wait for it, becomes a graph.
    pub(crate) fn begin_capture(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: it is live.
        unsafe { result::stream::begin_capture(self.0, mode).expect("begins a capture") };
    }

    pub(crate) fn end_capture(&self) -> Graph {
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        // SAFETY: its capture has begun on this thread; the graph lives as long as its exec.
        unsafe {
            let graph = result::stream::end_capture(self.0).expect("a capture that ends well");
            let exec = result::graph::instantiate(graph, flags).expect("a graph that can be launched");
            result::graph::destroy(graph).expect("ends");
            Graph(exec)
        }
    }
}

pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: used by one thread at a time.
unsafe impl Send for Graph {}

impl Graph {
    pub(crate) fn launch(&self, stream: &Stream) {
        // SAFETY: both are live.
        unsafe { result::graph::launch(self.0, stream.0).expect("launches") };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by `end_capture`, and not used after this.
        unsafe { result::graph::exec_destroy(self.0).expect("ends") };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and not used after this.
        unsafe { result::stream::destroy(self.0).expect("ends") };
    }
}

pub(crate) struct Event(sys::CUevent);

// SAFETY: a handle that any thread may use, as the driver's documentation says.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new() -> Self {
        Self(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).expect("an event"))
    }

    pub(crate) fn timed() -> Self {
        Self(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).expect("an event"))
    }

    /// A thread that synchronises with it sleeps.
    pub(crate) fn blocking() -> Self {
        let (blocking, plain) =
            (sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let mut event = ptr::null_mut();
        // SAFETY: `event` outlives the call, which writes one handle; the flags may be combined.
        unsafe { sys::cuEventCreate(&mut event, blocking as u32 | plain as u32).result().expect("an event") };
        Self(event)
    }

    /// Waits for its last record.
    pub(crate) fn synchronize(&self) {
        // SAFETY: it is live.
        unsafe { result::event::synchronize(self.0).expect("synchronises") };
    }

    pub(crate) fn is_done(&self) -> bool {
        // SAFETY: it is live.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => true,
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => false,
            Err(error) => panic!("the device is lost: {error:?}"),
        }
    }

    /// Microseconds from `earlier` to this event. Both must be timed, and done.
    pub(crate) fn since(&self, earlier: &Self) -> f64 {
        // SAFETY: both are live.
        f64::from(unsafe { result::event::elapsed(earlier.0, self.0).expect("a time") }) * 1e3
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new` or `timed`, and not used after this.
        unsafe { result::event::destroy(self.0).expect("ends") };
    }
}
