//! [`Nvtx`]: names and ranges for NVIDIA's profilers (Nsight Systems, Nsight Compute, CUPTI), without their libraries.
//!
//! A program that is instrumented with NVTX contains no profiler. A profiler that starts the program puts the path of a
//! library of its own into `NVTX_INJECTION64_PATH`; the program loads it and calls its `InitializeInjectionNvtx2`, which
//! sets the functions that the profiler wants to be called ([`abi`]). This is that loader, in Rust: NVIDIA's is C code in
//! headers. Without the variable nothing is loaded. The library is never unloaded.

mod abi;

use std::{
    env,
    error::Error,
    ffi::{CStr, CString, OsStr, c_void},
    mem::ManuallyDrop,
    sync::OnceLock,
};

use rustc_hash::FxHashMap;

use self::abi::{EventAttributes, InitializeInjection, MessageName, ToolHandle};
use crate::sync::{Deferred, Mutex, lock, log};

/// The path of the profiler's library, as in `nvtxDetail/nvtxInit.h`.
const VARIABLE: &str =
    if cfg!(target_pointer_width = "64") { "NVTX_INJECTION64_PATH" } else { "NVTX_INJECTION32_PATH" };
const ENTRY_POINT: &CStr = c"InitializeInjectionNvtx2";

const DOMAIN: &CStr = c"wakeline";

/// Set by the first [`Nvtx::get`].
static NVTX: OnceLock<Option<Nvtx>> = OnceLock::new();

/// What an event shows: a category, by which profilers filter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NvtxCategory {
    /// A run of an operator, from its begin to its end.
    Run = 1,
    /// A poll of an operator's task.
    Poll = 2,
    /// A message is in a hub's queue.
    Sent = 3,
    /// A message was taken from there.
    Taken = 4,
    /// A flow stalls or fails.
    Problem = 5,
}

/// A profiler that is attached to the process.
#[derive(Debug)]
pub(crate) struct Nvtx {
    domain: ToolHandle,
    /// Each name is registered once: nothing unregisters it.
    names: Mutex<FxHashMap<Box<str>, NvtxName>>,
}

/// The registered name of events.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NvtxName {
    registered: Option<ToolHandle>,
    text: &'static CStr,
}

/// A range that may end on another thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NvtxRange(u64);

impl Nvtx {
    /// The attached profiler, loaded by the first call. `None` if there is none: the usual case. No lock may be held, since
    /// the first call may log.
    #[inline]
    pub(crate) fn get() -> Option<&'static Nvtx> {
        if NVTX.get().is_some() {
            return Self::loaded();
        }
        // What is wrong is logged when it is known: a subscriber may begin a flow.
        let _later = Deferred::new();
        NVTX.get_or_init(Nvtx::from_environment).as_ref()
    }

    /// The attached profiler, if it is loaded already.
    #[inline]
    pub(crate) fn loaded() -> Option<&'static Nvtx> {
        NVTX.get().and_then(Option::as_ref)
    }

    #[cold]
    fn from_environment() -> Option<Nvtx> {
        let path = env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        Nvtx::load(&path)
            .inspect_err(|problem| {
                let text = format!(
                    "{VARIABLE}={}: {problem}. The profiler sees no names and ranges of wakeline",
                    path.display()
                );
                log(move || tracing::warn!("{text}"));
            })
            .ok()
    }

    fn load(path: &OsStr) -> Result<Nvtx, String> {
        // SAFETY: the library is one that the user has a profiler inject, which is made to be loaded into any program.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| format!("the library was not loaded: {}", error.source().unwrap_or(&error)))?;
        // Never unloaded: its functions may be called until the process ends.
        let library = ManuallyDrop::new(library);
        // SAFETY: the type of NVTX's entry point.
        let initialize =
            unsafe { library.get::<InitializeInjection>(ENTRY_POINT.to_bytes_with_nul()) }.map_err(|_| {
                format!("the library is none for NVTX 3: it has no function `{}`", ENTRY_POINT.to_string_lossy())
            })?;
        // SAFETY: the library's entry point.
        unsafe { Nvtx::attach(*initialize) }
            .ok_or_else(|| format!("the library refuses: `{}` returned 0", ENTRY_POINT.to_string_lossy()))
    }

    /// Attaches a tool. `None` if it refuses.
    ///
    /// # Safety
    /// `initialize` is a tool's `InitializeInjectionNvtx2`.
    unsafe fn attach(initialize: InitializeInjection) -> Option<Nvtx> {
        // SAFETY: the caller's contract.
        if unsafe { initialize(abi::get_export_table) } == 0 {
            return None;
        }
        // SAFETY: a tool was initialised. A tool that creates no domains receives null, which is the default domain.
        let domain = unsafe { abi::domain_create_a(DOMAIN.as_ptr()) };
        let domain = ToolHandle(domain.unwrap_or(std::ptr::null_mut()));
        for (category, name) in [
            (NvtxCategory::Run, c"run"),
            (NvtxCategory::Poll, c"poll"),
            (NvtxCategory::Sent, c"sent"),
            (NvtxCategory::Taken, c"taken"),
            (NvtxCategory::Problem, c"problem"),
        ] {
            // SAFETY: as above, with its domain.
            unsafe { abi::domain_name_category_a(domain.0, category as u32, name.as_ptr()) };
        }
        Some(Nvtx { domain, names: Mutex::new(FxHashMap::default()) })
    }

    /// Registers the name of events. Takes a lock.
    pub(crate) fn register(&self, name: &str) -> NvtxName {
        if let Some(known) = lock(&self.names).get(name) {
            return *known;
        }
        // Kept for ever, as the tool keeps what was registered.
        let text: &'static CStr = Box::leak(terminated(name).into_boxed_c_str());
        // SAFETY: a tool was initialised, and has made the domain.
        let registered = unsafe { abi::domain_register_string_a(self.domain.0, text.as_ptr()) };
        let registered = registered.filter(|handle| !handle.is_null()).map(ToolHandle);
        *lock(&self.names).entry(name.into()).or_insert(NvtxName { registered, text })
    }

    /// Begins a range that may end on another thread. `None` if the tool takes no such ranges.
    pub(crate) fn start(&self, category: NvtxCategory, name: NvtxName, payload: u64) -> Option<NvtxRange> {
        let attributes = name.attributes(category, payload);
        // SAFETY: a tool was initialised, the domain and the name are its own, and the attributes outlive the call.
        unsafe { abi::domain_range_start_ex(self.domain.0, &attributes) }.map(NvtxRange)
    }

    pub(crate) fn end(&self, NvtxRange(range): NvtxRange) {
        // SAFETY: as in `start`.
        unsafe { abi::domain_range_end(self.domain.0, range) };
    }

    /// Begins a range of this thread, within those that were pushed and not popped.
    pub(crate) fn push(&self, category: NvtxCategory, name: NvtxName, payload: u64) {
        let attributes = name.attributes(category, payload);
        // SAFETY: as in `start`.
        unsafe { abi::domain_range_push_ex(self.domain.0, &attributes) };
    }

    /// Ends the range that this thread has pushed last.
    pub(crate) fn pop(&self) {
        // SAFETY: as in `start`.
        unsafe { abi::domain_range_pop(self.domain.0) };
    }

    /// Marks an instant of this thread.
    pub(crate) fn mark(&self, category: NvtxCategory, name: NvtxName, payload: u64) {
        let attributes = name.attributes(category, payload);
        // SAFETY: as in `start`.
        unsafe { abi::domain_mark_ex(self.domain.0, &attributes) };
    }

    /// Names a stream of CUDA, a `CUstream`. Another name replaces the first.
    pub(crate) fn name_stream(&self, stream: *mut c_void, name: &str) {
        let name = terminated(name);
        // SAFETY: a tool was initialised; it copies the name, and only compares the handle.
        unsafe { abi::name_cu_stream_a(stream, name.as_ptr()) };
    }
}

impl NvtxName {
    fn attributes(self, category: NvtxCategory, payload: u64) -> EventAttributes {
        let name = self.registered.map_or(MessageName::Text(self.text.as_ptr()), MessageName::Registered);
        EventAttributes::new(category as u32, name, payload)
    }
}

/// Up to the first NUL, where text ends for a tool.
fn terminated(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

#[cfg(test)]
mod tests;
