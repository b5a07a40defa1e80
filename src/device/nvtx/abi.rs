//! The interface between NVTX v3 and a tool: the tables that a tool fills with its functions, and the calls of those.
//!
//! Numbers, layouts and types are those of the public headers of <https://github.com/NVIDIA/NVTX>, below `c/include/nvtx3`, at
//! commit 08ff3f5b (2025), the same as in CUDA 12.9: `nvtxDetail/nvtxTypes.h` (modules, ids of functions, export tables),
//! `nvtxDetail/nvtxImpl.h` (what a tool receives), `nvToolsExt.h` (attributes of events), `nvToolsExtCuda.h`. They are fixed:
//! tools of any age work with programs of any age.
//!
//! ```text
//!   InitializeInjectionNvtx2(export_table)            the tool's, called once
//!       export_table(CALLBACKS) ─> function_table(module) ─> table ─> [ none, slot 1, slot 2, .. , none ]
//!                                                                              │
//!       *table[id] = a function of the tool  ─────────────────────────────────┘
//! ```
//!
//! A slot that stays empty is a function that the tool does not want to be called.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

/// `NVTX_VERSION`.
const VERSION: u16 = 3;
/// `NVTX_ETID_CALLBACKS` and `NVTX_ETID_VERSIONINFO`.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

/// `NvtxGetExportTableFunc_t`.
pub(super) type GetExportTable = extern "system" fn(u32) -> *const c_void;
/// `NvtxInitializeInjectionNvtxFunc_t`. Zero: the tool refuses.
pub(super) type InitializeInjection = unsafe extern "system" fn(GetExportTable) -> c_int;

/// A function of NVTX: null, or the tool's.
type ToolSlot = AtomicPtr<c_void>;

/// The modules of `NvtxCallbackModule`: for each its number, the slots of its functions, which are numbered from 1 on, and
/// the table of pointers to them, with none at its beginning and end. A tool writes to the slots without a check, and
/// perhaps to all: each exists.
macro_rules! modules {
    ($($module:literal $slots:ident $table:ident $functions:literal)*) => {
        $(
            static $slots: [ToolSlot; $functions] = [const { ToolSlot::new(ptr::null_mut()) }; $functions];
            static $table: [AtomicPtr<ToolSlot>; $functions + 2] = table(&$slots);
        )*

        /// The table of a module, and one more than the number of its functions.
        fn function_table(module: c_uint) -> Option<(&'static [AtomicPtr<ToolSlot>], c_uint)> {
            match module {
                $($module => Some((&$table, $functions + 1)),)*
                _ => None,
            }
        }
    };
}

modules! {
    1 CORE CORE_TABLE 15
    2 CUDA CUDA_TABLE 8
    3 OPENCL OPENCL_TABLE 14
    4 CUDART CUDART_TABLE 6
    5 CORE2 CORE2_TABLE 15
    6 SYNC SYNC_TABLE 6
}

const fn table<const SLOTS: usize, const ENTRIES: usize>(
    slots: &'static [ToolSlot; SLOTS],
) -> [AtomicPtr<ToolSlot>; ENTRIES] {
    let mut table = [const { AtomicPtr::new(ptr::null_mut()) }; ENTRIES];
    let mut id = 1;
    while id <= SLOTS {
        table[id] = AtomicPtr::new(ptr::from_ref(&slots[id - 1]).cast_mut());
        id += 1;
    }
    table
}

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct CallbackExports {
    struct_size: usize,
    function_table: unsafe extern "system" fn(c_uint, *mut *mut c_void, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionExports {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_tool_version: extern "system" fn(u32),
}

static CALLBACK_EXPORTS: CallbackExports =
    CallbackExports { struct_size: size_of::<CallbackExports>(), function_table: get_function_table };

static VERSION_EXPORTS: VersionExports = VersionExports {
    struct_size: size_of::<VersionExports>(),
    version: VERSION as u32,
    reserved: 0,
    set_tool_version: ignore_version,
};

/// What a tool is initialised with.
pub(super) extern "system" fn get_export_table(table: u32) -> *const c_void {
    match table {
        CALLBACKS => ptr::from_ref(&CALLBACK_EXPORTS).cast(),
        VERSION_INFO => ptr::from_ref(&VERSION_EXPORTS).cast(),
        _ => ptr::null(),
    }
}

/// # Safety
/// `out_table` and `out_size` are null or valid for a write.
unsafe extern "system" fn get_function_table(
    module: c_uint,
    out_table: *mut *mut c_void,
    out_size: *mut c_uint,
) -> c_int {
    let Some((table, size)) = function_table(module) else { return 0 };
    if !out_size.is_null() {
        // SAFETY: the caller's contract.
        unsafe { out_size.write(size) };
    }
    if !out_table.is_null() {
        // SAFETY: the caller's contract.
        unsafe { out_table.write(table.as_ptr().cast_mut().cast()) };
    }
    1
}

extern "system" fn ignore_version(_version: u32) {}

/// `nvtxDomainHandle_t` and `nvtxStringHandle_t`: the tool's, opaque.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ToolHandle(pub(super) *mut c_void);

// SAFETY: never dereferenced here, and NVTX's functions, which take it, may be called by any thread.
unsafe impl Send for ToolHandle {}
// SAFETY: as above.
unsafe impl Sync for ToolHandle {}

/// `nvtxEventAttributes_t`.
#[derive(Debug)]
#[repr(C)]
pub(super) struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

const PAYLOAD_UNSIGNED_INT64: i32 = 1;
const MESSAGE_ASCII: i32 = 1;
const MESSAGE_REGISTERED: i32 = 3;

/// The name of an event.
pub(super) enum MessageName {
    Registered(ToolHandle),
    Text(*const c_char),
}

impl EventAttributes {
    pub(super) fn new(category: u32, name: MessageName, payload: u64) -> Self {
        let (message_type, message) = match name {
            MessageName::Registered(ToolHandle(handle)) => (MESSAGE_REGISTERED, handle.cast_const()),
            MessageName::Text(text) => (MESSAGE_ASCII, text.cast()),
        };
        Self {
            version: VERSION,
            size: size_of::<Self>() as u16,
            category,
            color_type: 0,
            color: 0,
            payload_type: PAYLOAD_UNSIGNED_INT64,
            reserved: 0,
            payload,
            message_type,
            message,
        }
    }
}

/// Functions that call the tool's, if it has set one: by the slots of the module and the function's id.
///
/// # Safety
/// A tool was initialised. Pointers are null or valid during the call, text is terminated, and handles are the tool's.
macro_rules! functions {
    ($($name:ident = $slots:ident[$id:literal]($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        pub(super) unsafe fn $name($($argument: $type),*) -> Option<$result> {
            type Function = unsafe extern "system" fn($($type),*) -> $result;
            let tool = $slots[$id - 1].load(Ordering::Acquire);
            // SAFETY: null, or what the tool has set for this id, which is a function of this type.
            let function = unsafe { mem::transmute::<*mut c_void, Option<Function>>(tool) }?;
            // SAFETY: the caller's contract.
            Some(unsafe { function($($argument),*) })
        }
    )*};
}

functions! {
    name_cu_stream_a = CUDA[5](stream: *mut c_void, name: *const c_char) -> ();
    domain_mark_ex = CORE2[1](domain: *mut c_void, attributes: *const EventAttributes) -> ();
    domain_range_start_ex = CORE2[2](domain: *mut c_void, attributes: *const EventAttributes) -> u64;
    domain_range_end = CORE2[3](domain: *mut c_void, range: u64) -> ();
    domain_range_push_ex = CORE2[4](domain: *mut c_void, attributes: *const EventAttributes) -> c_int;
    domain_range_pop = CORE2[5](domain: *mut c_void) -> c_int;
    domain_name_category_a = CORE2[8](domain: *mut c_void, category: u32, name: *const c_char) -> ();
    domain_register_string_a = CORE2[10](domain: *mut c_void, text: *const c_char) -> *mut c_void;
    domain_create_a = CORE2[12](name: *const c_char) -> *mut c_void;
}
