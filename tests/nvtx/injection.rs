//! A profiler's library for NVTX v3, which writes down what it sees. The test compiles it into a library of its own. Its
//! declarations are made apart from wakeline's, from the headers of <https://github.com/NVIDIA/NVTX> at commit 08ff3f5b:
//! `nvtxDetail/nvtxTypes.h` and `nvToolsExt.h`.
//!
//! One line a call, in `NVTX_TEST_LOG`: the thread's number, the call, its arguments separated by tabs. With
//! `NVTX_TEST_REFUSES` it refuses to be initialised.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs::File,
    io::Write,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

type Function = *const c_void;
type GetExportTable = unsafe extern "C" fn(u32) -> *const Callbacks;

#[repr(C)]
pub struct Callbacks {
    struct_size: usize,
    get_module_function_table: unsafe extern "C" fn(c_int, *mut *mut *mut Function, *mut c_uint) -> c_int,
}

#[repr(C)]
pub struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved0: i32,
    payload: u64,
    message_type: i32,
    message: usize,
}

/// The handles of the domain and of strings: numbers that are no addresses.
const DOMAIN: usize = 0x1000;
const STRINGS: usize = 0x2000;

static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static RANGES: AtomicU64 = AtomicU64::new(1 << 40);

fn log(line: &str) {
    static LOG: OnceLock<Mutex<File>> = OnceLock::new();
    static THREADS: AtomicU64 = AtomicU64::new(1);
    thread_local!(static THREAD: u64 = THREADS.fetch_add(1, Ordering::Relaxed));
    let path = || std::env::var_os("NVTX_TEST_LOG").expect("the test sets it");
    let log = LOG.get_or_init(|| Mutex::new(File::create(path()).expect("the file of the log")));
    writeln!(log.lock().unwrap(), "{}\t{line}", THREAD.with(|thread| *thread)).expect("a line of the log");
}

unsafe fn text(text: *const c_char) -> String {
    unsafe { CStr::from_ptr(text) }.to_str().expect("UTF-8").to_owned()
}

/// Category, name and payload, if the attributes are valid.
unsafe fn event(domain: usize, attributes: *const EventAttributes) -> String {
    let event = unsafe { &*attributes };
    let EventAttributes { version: 3, size: 48, color_type: 0, color: 0, payload_type: 1, reserved0: 0, .. } = event
    else {
        return "error: attributes".into();
    };
    if domain != DOMAIN || event.message_type != 3 {
        return "error: no name of the domain".into();
    }
    let name = NAMES.lock().unwrap().get(event.message.wrapping_sub(STRINGS)).cloned();
    name.map_or("error: an unregistered name".into(), |name| format!("{}\t{name}\t{}", event.category, event.payload))
}

unsafe extern "C" fn domain_create_a(name: *const c_char) -> usize {
    log(&format!("domain\t{}", unsafe { text(name) }));
    DOMAIN
}

unsafe extern "C" fn domain_name_category_a(_domain: usize, category: u32, name: *const c_char) {
    log(&format!("category\t{category}\t{}", unsafe { text(name) }));
}

unsafe extern "C" fn domain_register_string_a(domain: usize, name: *const c_char) -> usize {
    assert_eq!(domain, DOMAIN);
    let name = unsafe { text(name) };
    log(&format!("register\t{name}"));
    let mut names = NAMES.lock().unwrap();
    names.push(name);
    STRINGS + names.len() - 1
}

unsafe extern "C" fn domain_mark_ex(domain: usize, attributes: *const EventAttributes) {
    log(&format!("mark\t{}", unsafe { event(domain, attributes) }));
}

unsafe extern "C" fn domain_range_start_ex(domain: usize, attributes: *const EventAttributes) -> u64 {
    let range = RANGES.fetch_add(1, Ordering::Relaxed);
    log(&format!("start\t{range}\t{}", unsafe { event(domain, attributes) }));
    range
}

unsafe extern "C" fn domain_range_end(_domain: usize, range: u64) {
    log(&format!("end\t{range}"));
}

thread_local!(static DEPTH: Cell<c_int> = const { Cell::new(0) });

unsafe extern "C" fn domain_range_push_ex(domain: usize, attributes: *const EventAttributes) -> c_int {
    log(&format!("push\t{}", unsafe { event(domain, attributes) }));
    DEPTH.replace(DEPTH.get() + 1)
}

unsafe extern "C" fn domain_range_pop(domain: usize) -> c_int {
    assert_eq!(domain, DOMAIN);
    DEPTH.set(DEPTH.get() - 1);
    log(&format!("pop\t{}", DEPTH.get()));
    DEPTH.get()
}

unsafe extern "C" fn name_cu_stream_a(stream: usize, name: *const c_char) {
    log(&format!("stream\t{stream}\t{}", unsafe { text(name) }));
}

/// # Safety
/// `exports` is NVTX's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(exports: GetExportTable) -> c_int {
    if std::env::var_os("NVTX_TEST_REFUSES").is_some() {
        return 0;
    }
    let callbacks = unsafe { &*exports(1) };
    if callbacks.struct_size < size_of::<Callbacks>() {
        return 0;
    }
    const CUDA: c_int = 2;
    const CORE2: c_int = 5;
    for (module, id, function) in [
        (CUDA, 5, name_cu_stream_a as Function),
        (CORE2, 1, domain_mark_ex as Function),
        (CORE2, 2, domain_range_start_ex as Function),
        (CORE2, 3, domain_range_end as Function),
        (CORE2, 4, domain_range_push_ex as Function),
        (CORE2, 5, domain_range_pop as Function),
        (CORE2, 8, domain_name_category_a as Function),
        (CORE2, 10, domain_register_string_a as Function),
        (CORE2, 12, domain_create_a as Function),
    ] {
        let (mut table, mut size) = (std::ptr::null_mut(), 0);
        if unsafe { (callbacks.get_module_function_table)(module, &mut table, &mut size) } == 0 || id >= size as usize {
            return 0;
        }
        unsafe { *(*table.add(id)) = function };
    }
    1
}
