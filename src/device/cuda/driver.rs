//! The driver's functions, looked up once and called directly.
//!
//! cudarc looks up each function at its first call and panics if it is missing, and reads every result as a Rust enum
//! of the codes of CUDA 12.8. Neither is acceptable here: an old driver must be an error, and a new driver can return a
//! code that the enum does not have, which would be undefined behaviour. So this table looks up all functions once,
//! reports which one is missing, and keeps results as plain numbers ([`Code`]). A call is one load and one jump.
//!
//! The signatures are repeated here, and the compiler compares each with cudarc's binding of the same name.

use std::{
    ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void},
    fmt, ptr,
    sync::OnceLock,
};

use cudarc::driver::sys::{
    self as bindings, CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevice, CUdevice_attribute,
    CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphConditionalHandle, CUgraphEdgeData,
    CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphMem_attribute, CUgraphNode, CUgraphNodeParams, CUgraphNodeType,
    CUhostFn, CUjit_option, CUmemAccessDesc, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule,
    CUpointer_attribute, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};

use crate::{
    device::process,
    error::{Error, ErrorKind, Result},
};

/// The result code of a call to the driver or to the compiler: any number, 0 for success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Code(pub(super) u32);

impl Code {
    pub(super) const SUCCESS: Code = Code(0);
    pub(super) const INVALID_VALUE: Code = Code(1);
    pub(super) const OUT_OF_MEMORY: Code = Code(2);
    pub(super) const INVALID_CONTEXT: Code = Code(201);
    pub(super) const NOT_FOUND: Code = Code(500);
    pub(super) const NOT_READY: Code = Code(600);
    pub(super) const UNKNOWN: Code = Code(999);

    pub(super) fn is_success(self) -> bool {
        self == Code::SUCCESS
    }
}

pub(super) struct DriverHandle<T>(*mut T);

impl<T> DriverHandle<T> {
    pub(super) fn new(raw: *mut T) -> Self {
        Self(raw)
    }

    pub(super) fn raw(&self) -> *mut T {
        self.0
    }
}

impl<T> fmt::Debug for DriverHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

// SAFETY: the pointer is never dereferenced here. It is an opaque handle for the driver, whose functions may be called
// with one handle from any thread (contexts, streams, events, modules, functions and pools are all documented or used
// as thread-safe; graphs, which are not, are not stored in this type, but as numbers).
unsafe impl<T> Send for DriverHandle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for DriverHandle<T> {}

/// The address of a library's symbol. Not generic over the function's type, which would make 90 copies of it.
pub(super) fn symbol(library: &libloading::Library, name: &str) -> Option<*const ()> {
    // SAFETY: the type claims nothing about the symbol, and the address is not dereferenced here.
    unsafe { library.get::<*const ()>(name) }.ok().map(|symbol| *symbol)
}

/// Defines a struct of function pointers, and how to load it from a library. The caller's scope provides `bindings`,
/// the module with cudarc's bindings of the same functions, and `RawResult`, their return type.
macro_rules! table {
    (
        $(#[$meta:meta])*
        struct $Table:ident;
        required { $($field:ident = $symbol:ident($($arg:ty),* $(,)?);)* }
        renamed { $($old:ident = $old_symbol:ident($($old_arg:ty),* $(,)?);)* }
        optional { $($opt:ident = $opt_symbol:ident($($opt_arg:ty),* $(,)?);)* }
    ) => {
        $(#[$meta])*
        pub(super) struct $Table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> Code,)*
            $(pub(super) $old: unsafe extern "C" fn($($old_arg),*) -> Code,)*
            $(pub(super) $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> Code>,)*
        }

        // The compiler's proof that the signatures above are those of cudarc's bindings.
        $(const _: unsafe fn($($arg),*) -> RawResult = bindings::$symbol;)*
        $(const _: unsafe fn($($opt_arg),*) -> RawResult = bindings::$opt_symbol;)*

        impl $Table {
            /// Looks up all functions. The error is the name of a missing one.
            fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        let symbol = $crate::device::cuda::driver::symbol(library, stringify!($symbol)).ok_or(stringify!($symbol))?;
                        // SAFETY: the symbol is a C function of this signature (see the assertions above; `Code` has
                        // the layout of the C enum that it returns), and its library is never unloaded.
                        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn($($arg),*) -> Code>(symbol) }
                    },)*
                    $($old: {
                        let symbol = $crate::device::cuda::driver::symbol(library, stringify!($old_symbol)).ok_or(stringify!($old_symbol))?;
                        // SAFETY: as above, but without the assertion: it is the signature in the headers of CUDA 12,
                        // and the driver never changes the signature of an existing symbol.
                        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn($($old_arg),*) -> Code>(symbol) }
                    },)*
                    $($opt: $crate::device::cuda::driver::symbol(library, stringify!($opt_symbol)).map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn($($opt_arg),*) -> Code>(symbol) }
                    }),)*
                })
            }
        }
    };
}
pub(super) use table;

type RawResult = bindings::CUresult;

table! {
    struct Functions;
    required {
        init = cuInit(c_uint);
        device_get = cuDeviceGet(*mut CUdevice, c_int);
        device_get_count = cuDeviceGetCount(*mut c_int);
        device_get_name = cuDeviceGetName(*mut c_char, c_int, CUdevice);
        device_get_attribute = cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        device_can_access_peer = cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        primary_ctx_retain = cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        primary_ctx_release = cuDevicePrimaryCtxRelease_v2(CUdevice);
        // Never called here, but by cudarc's `CudaContext`, which would panic without it.
        _ctx_get_current = cuCtxGetCurrent(*mut CUcontext);
        ctx_set_current = cuCtxSetCurrent(CUcontext);
        ctx_synchronize = cuCtxSynchronize();
        ctx_get_stream_priority_range = cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);

        mem_get_info = cuMemGetInfo_v2(*mut usize, *mut usize);
        mem_alloc = cuMemAlloc_v2(*mut CUdeviceptr, usize);
        mem_free = cuMemFree_v2(CUdeviceptr);
        mem_alloc_from_pool_async = cuMemAllocFromPoolAsync(*mut CUdeviceptr, usize, CUmemoryPool, CUstream);
        mem_free_async = cuMemFreeAsync(CUdeviceptr, CUstream);
        mem_pool_create = cuMemPoolCreate(*mut CUmemoryPool, *const CUmemPoolProps);
        mem_pool_destroy = cuMemPoolDestroy(CUmemoryPool);
        mem_pool_trim_to = cuMemPoolTrimTo(CUmemoryPool, usize);
        mem_pool_get_attribute = cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        mem_pool_set_attribute = cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, *mut c_void);
        mem_pool_set_access = cuMemPoolSetAccess(CUmemoryPool, *const CUmemAccessDesc, usize);
        mem_host_alloc = cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        mem_free_host = cuMemFreeHost(*mut c_void);
        pointer_get_attribute = cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);

        stream_create = cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        stream_destroy = cuStreamDestroy_v2(CUstream);
        stream_query = cuStreamQuery(CUstream);
        stream_synchronize = cuStreamSynchronize(CUstream);
        stream_wait_event = cuStreamWaitEvent(CUstream, CUevent, c_uint);
        event_create = cuEventCreate(*mut CUevent, c_uint);
        event_destroy = cuEventDestroy_v2(CUevent);
        event_record = cuEventRecord(CUevent, CUstream);
        event_query = cuEventQuery(CUevent);

        memcpy_async = cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        memcpy_htod_async = cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        memcpy_dtoh_async = cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        memcpy_peer_async = cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        memset_d8_async = cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        memset_d16_async = cuMemsetD16Async(CUdeviceptr, c_ushort, usize, CUstream);
        memset_d32_async = cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream);

        module_load_data_ex = cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
        module_get_function = cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        module_unload = cuModuleUnload(CUmodule);
        func_set_attribute = cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        launch_kernel = cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void,
        );
        launch_host_func = cuLaunchHostFunc(CUstream, CUhostFn, *mut c_void);

        graph_create = cuGraphCreate(*mut CUgraph, c_uint);
        graph_destroy = cuGraphDestroy(CUgraph);
        graph_add_kernel_node = cuGraphAddKernelNode_v2(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_KERNEL_NODE_PARAMS,
        );
        graph_add_memcpy_node = cuGraphAddMemcpyNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_MEMCPY3D, CUcontext,
        );
        graph_add_memset_node = cuGraphAddMemsetNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_MEMSET_NODE_PARAMS, CUcontext,
        );
        graph_add_host_node = cuGraphAddHostNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_HOST_NODE_PARAMS,
        );
        graph_add_empty_node = cuGraphAddEmptyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
        graph_add_child_node = cuGraphAddChildGraphNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUgraph);
        graph_add_record_node = cuGraphAddEventRecordNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent,
        );
        graph_add_wait_node = cuGraphAddEventWaitNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent);
        graph_add_alloc_node = cuGraphAddMemAllocNode(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *mut CUDA_MEM_ALLOC_NODE_PARAMS,
        );
        graph_add_free_node = cuGraphAddMemFreeNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUdeviceptr);
        graph_destroy_node = cuGraphDestroyNode(CUgraphNode);
        graph_get_nodes = cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        graph_node_get_type = cuGraphNodeGetType(CUgraphNode, *mut CUgraphNodeType);
        graph_memcpy_node_get_params = cuGraphMemcpyNodeGetParams(CUgraphNode, *mut CUDA_MEMCPY3D);
        graph_child_node_get_graph = cuGraphChildGraphNodeGetGraph(CUgraphNode, *mut CUgraph);
        stream_begin_capture = cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        stream_end_capture = cuStreamEndCapture(CUstream, *mut CUgraph);

        graph_instantiate = cuGraphInstantiateWithParams(
            *mut CUgraphExec, CUgraph, *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
        );
        exec_destroy = cuGraphExecDestroy(CUgraphExec);
        exec_upload = cuGraphUpload(CUgraphExec, CUstream);
        exec_launch = cuGraphLaunch(CUgraphExec, CUstream);
        exec_update = cuGraphExecUpdate_v2(CUgraphExec, CUgraph, *mut CUgraphExecUpdateResultInfo);
        exec_set_kernel = cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, *const CUDA_KERNEL_NODE_PARAMS);
        exec_set_memcpy = cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, *const CUDA_MEMCPY3D, CUcontext);
        exec_set_memset = cuGraphExecMemsetNodeSetParams(
            CUgraphExec, CUgraphNode, *const CUDA_MEMSET_NODE_PARAMS, CUcontext,
        );
        exec_set_host = cuGraphExecHostNodeSetParams(CUgraphExec, CUgraphNode, *const CUDA_HOST_NODE_PARAMS);
        exec_set_child = cuGraphExecChildGraphNodeSetParams(CUgraphExec, CUgraphNode, CUgraph);
        exec_set_record = cuGraphExecEventRecordNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
        exec_set_wait = cuGraphExecEventWaitNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
        exec_set_enabled = cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, c_uint);
        device_graph_mem_trim = cuDeviceGraphMemTrim(CUdevice);
        device_get_graph_mem_attribute = cuDeviceGetGraphMemAttribute(CUdevice, CUgraphMem_attribute, *mut c_void);
    }
    // These names have other signatures in the headers of CUDA 13: cudarc binds these only for older versions.
    renamed {
        event_elapsed_time = cuEventElapsedTime(*mut f32, CUevent, CUevent);
        graph_add_dependencies = cuGraphAddDependencies(CUgraph, *const CUgraphNode, *const CUgraphNode, usize);
        graph_node_get_dependencies = cuGraphNodeGetDependencies(CUgraphNode, *mut CUgraphNode, *mut usize);
        graph_node_get_dependents = cuGraphNodeGetDependentNodes(CUgraphNode, *mut CUgraphNode, *mut usize);
    }
    optional {
        // CUDA 12.3 and later.
        stream_begin_capture_to_graph = cuStreamBeginCaptureToGraph(
            CUstream, CUgraph, *const CUgraphNode, *const CUgraphEdgeData, usize, CUstreamCaptureMode,
        );
        stream_get_capture_info = cuStreamGetCaptureInfo_v3(
            CUstream, *mut CUstreamCaptureStatus, *mut u64, *mut CUgraph, *mut *const CUgraphNode,
            *mut *const CUgraphEdgeData, *mut usize,
        );
        // Conditional nodes exist since CUDA 12.4; earlier versions of these functions refuse them.
        graph_conditional_handle_create = cuGraphConditionalHandleCreate(
            *mut CUgraphConditionalHandle, CUgraph, CUcontext, c_uint, c_uint,
        );
        graph_add_node = cuGraphAddNode_v2(
            *mut CUgraphNode, CUgraph, *const CUgraphNode, *const CUgraphEdgeData, usize, *mut CUgraphNodeParams,
        );
        // CUDA 12.4 and later.
        func_load = cuFuncLoad(CUfunction);
        func_get_param_info = cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    }
}

/// The loaded and initialised driver of this process.
pub(super) struct Driver {
    functions: Functions,
    error_name: unsafe extern "C" fn(u32, *mut *const c_char) -> Code,
    error_string: unsafe extern "C" fn(u32, *mut *const c_char) -> Code,
}

impl std::ops::Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// The driver, loaded and initialised at the first call. Fails with [`NoDevice`](ErrorKind::NoDevice) if there is
    /// none.
    pub(super) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Driver::load).as_ref().map_err(Error::clone)
    }

    pub(super) fn is_installed() -> bool {
        Self::library().is_some()
    }

    /// The driver's library. Not loaded through cudarc, which has no function for that in a program that links the
    /// driver (cudarc's feature `dynamic-linking`, which candle sets).
    fn library() -> Option<&'static libloading::Library> {
        const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
        static LIBRARY: OnceLock<Option<libloading::Library>> = OnceLock::new();
        // SAFETY: loading NVIDIA's driver library runs its initialisers, as intended.
        let load = |name| unsafe { libloading::Library::new(name) }.ok();
        LIBRARY.get_or_init(|| NAMES.into_iter().find_map(load)).as_ref()
    }

    fn load() -> Result<Driver> {
        let none = |message: String| Error::new(ErrorKind::NoDevice, message);
        let Some(library) = Self::library() else {
            return Err(none(
                "no CUDA driver library (libcuda.so.1) on this machine: install NVIDIA's driver, or use the emulated \
                 device (WAKELINE_DEVICE=emulated)"
                    .into(),
            ));
        };
        let too_old = |symbol: &str| {
            none(format!(
                "the CUDA driver on this machine has no `{symbol}`: it is older than CUDA 12; install a newer one, or \
                 use the emulated device (WAKELINE_DEVICE=emulated)"
            ))
        };
        // Not in the table, because these two accept any number, including codes that cudarc's enum does not have.
        type Text = unsafe extern "C" fn(u32, *mut *const c_char) -> Code;
        let text = |symbol: &'static str| {
            // SAFETY: `CUresult cuGetErrorName(CUresult, const char **)` and the same for its text; a C enum of
            // unsigned values up to 999 is passed as an `unsigned int`.
            unsafe { library.get::<Text>(symbol) }.map(|found| *found).map_err(|_| too_old(symbol))
        };
        let driver = Driver {
            functions: Functions::load(library).map_err(too_old)?,
            error_name: text("cuGetErrorName")?,
            error_string: text("cuGetErrorString")?,
        };
        // SAFETY: the first call of the driver, with the only flags there are.
        let code = unsafe { (driver.init)(0) };
        if !code.is_success() {
            let what = driver.describe(code);
            return Err(none(format!(
                "the CUDA driver failed to initialise: {what}; check that `nvidia-smi` lists a GPU and check \
                 CUDA_VISIBLE_DEVICES, or use the emulated device (WAKELINE_DEVICE=emulated)"
            )));
        }
        // Once initialised, the driver does not work in a forked process.
        process::enter()?;
        Ok(driver)
    }

    pub(super) fn device_count(&self) -> Result<usize> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call, which writes one int.
        let code = unsafe { (self.device_get_count)(&mut count) };
        match usize::try_from(count) {
            Ok(count) if code.is_success() => Ok(count),
            _ => Err(Error::new(
                ErrorKind::NoDevice,
                format!("the CUDA driver failed to count its devices: {}", self.describe(code)),
            )),
        }
    }

    /// An attribute of a device, or the driver's code.
    pub(super) fn attribute(&self, device: CUdevice, attribute: CUdevice_attribute) -> Result<c_int, Code> {
        let mut value: c_int = 0;
        // SAFETY: `value` outlives the call, which writes one int.
        let code = unsafe { (self.device_get_attribute)(&mut value, attribute, device) };
        if code.is_success() { Ok(value) } else { Err(code) }
    }

    /// `CUDA_ERROR_LAUNCH_FAILED (719, unspecified launch failure)`
    pub(super) fn describe(&self, code: Code) -> String {
        let text = |function: unsafe extern "C" fn(u32, *mut *const c_char) -> Code| {
            let mut text: *const c_char = ptr::null();
            // SAFETY: `text` outlives the call, which writes one pointer: to a string constant, or null.
            let known = unsafe { function(code.0, &mut text) };
            if !known.is_success() || text.is_null() {
                return None;
            }
            // SAFETY: a constant of the driver: terminated, never freed.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (text(self.error_name), text(self.error_string)) {
            (Some(name), Some(text)) => format!("{name} ({}, {text})", code.0),
            (Some(name), None) => format!("{name} ({})", code.0),
            _ => format!("code {}, which is unknown to the driver", code.0),
        }
    }
}
