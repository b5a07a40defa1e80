//! A tool within this process: its entry point fills the tables, and its functions write down their calls.

use std::{
    ffi::{c_char, c_int, c_uint},
    ptr,
    sync::Mutex as StdMutex,
};

use super::*;

static CALLS: StdMutex<Vec<String>> = StdMutex::new(Vec::new());

fn calls() -> Vec<String> {
    std::mem::take(&mut CALLS.lock().unwrap())
}

/// # Safety
/// `text` is terminated.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

unsafe extern "system" fn domain_create_a(name: *const c_char) -> *mut c_void {
    // SAFETY: the name of the domain.
    CALLS.lock().unwrap().push(format!("domain {}", unsafe { text(name) }));
    ptr::without_provenance_mut(7)
}

unsafe extern "system" fn name_cu_stream_a(stream: *mut c_void, name: *const c_char) {
    // SAFETY: the name of the stream.
    CALLS.lock().unwrap().push(format!("stream {} {}", stream.addr(), unsafe { text(name) }));
}

unsafe extern "system" fn push(domain: *mut c_void, attributes: *const EventAttributes) -> c_int {
    // SAFETY: what a caller of NVTX passes.
    let attributes = unsafe { &*attributes };
    CALLS.lock().unwrap().push(format!("push {} {attributes:?}", domain.addr()));
    0
}

/// The tool's entry point: it asks for all tables, and checks that all slots exist.
extern "system" fn accept(exports: abi::GetExportTable) -> c_int {
    assert!(exports(0).is_null() && exports(2).is_null() && exports(4).is_null());
    let callbacks = exports(1).cast::<usize>();
    let versions = exports(3).cast::<usize>();
    // SAFETY: a struct that begins with its size, and then has a version or a function.
    let (size, version) = unsafe { (*versions, *versions.add(1).cast::<u32>()) };
    assert_eq!((size, version), (2 * size_of::<usize>() + 8, 3));
    // SAFETY: as above.
    let size = unsafe { *callbacks };
    assert_eq!(size, 2 * size_of::<usize>());
    type FunctionTable = unsafe extern "system" fn(c_uint, *mut *mut *mut *mut c_void, *mut c_uint) -> c_int;
    // SAFETY: as above.
    let function_table = unsafe { *callbacks.add(1).cast::<FunctionTable>() };
    let mut tables = Vec::new();
    for (module, sizes) in [(1, 16), (2, 9), (3, 15), (4, 7), (5, 16), (6, 7)] {
        let (mut table, mut entries) = (ptr::null_mut(), 0);
        // SAFETY: both outlive the call.
        assert_eq!(unsafe { function_table(module, &mut table, &mut entries) }, 1);
        assert_eq!(entries, sizes, "of module {module}");
        // SAFETY: null is allowed.
        assert_eq!(unsafe { function_table(module, ptr::null_mut(), ptr::null_mut()) }, 1);
        for id in 0..=entries as usize {
            // SAFETY: the table has one more entry than it tells.
            let slot = unsafe { *table.add(id) };
            assert_eq!(slot.is_null(), id == 0 || id == entries as usize, "slot {id} of module {module}");
        }
        tables.push(table);
    }
    // SAFETY: null is allowed.
    assert_eq!(unsafe { function_table(7, ptr::null_mut(), ptr::null_mut()) }, 0);
    for (module, id, function) in
        [(2, 5, name_cu_stream_a as *mut c_void), (5, 4, push as *mut c_void), (5, 12, domain_create_a as *mut c_void)]
    {
        // SAFETY: a slot of the table.
        unsafe { *(*tables[module - 1].add(id)) = function };
    }
    1
}

extern "system" fn refuse(_exports: abi::GetExportTable) -> c_int {
    0
}

#[test]
fn a_tool_receives_what_it_asks_for() {
    // SAFETY: tools' entry points.
    let (none, nvtx) = unsafe { (Nvtx::attach(refuse), Nvtx::attach(accept)) };
    assert!(none.is_none());
    // As in a program, it lives until the process ends.
    static NVTX: OnceLock<Nvtx> = OnceLock::new();
    let nvtx = NVTX.get_or_init(|| nvtx.unwrap());
    assert_eq!(calls(), ["domain wakeline"]);

    nvtx.name_stream(ptr::without_provenance_mut(64), "upper");
    nvtx.name_stream(ptr::without_provenance_mut(64), "até\0more");
    assert_eq!(calls(), ["stream 64 upper", "stream 64 até"]);

    // It registers no strings, and takes no other calls.
    let name = nvtx.register("upper");
    assert_eq!(nvtx.register("upper").text.as_ptr(), name.text.as_ptr());
    assert!(nvtx.start(NvtxCategory::Run, name, 1).is_none());
    nvtx.end(NvtxRange(1));
    nvtx.push(NvtxCategory::Poll, name, u64::MAX);
    nvtx.pop();
    nvtx.mark(NvtxCategory::Sent, name, 1);
    let expected = EventAttributes::new(2, MessageName::Text(name.text.as_ptr()), u64::MAX);
    assert_eq!(calls(), [format!("push 7 {expected:?}")]);
}

#[test]
#[cfg(target_pointer_width = "64")]
fn an_event_has_the_layout_of_nvtx_3() {
    assert_eq!(size_of::<EventAttributes>(), 48);
    let handle = ToolHandle(ptr::without_provenance_mut(0x55));
    let attributes = EventAttributes::new(2, MessageName::Registered(handle), 9);
    // SAFETY: 12 words, of which the ninth ends with padding.
    let words = |at: usize| unsafe { ptr::from_ref(&attributes).cast::<u32>().add(at).read() };
    assert_eq!(words(0), 48 << 16 | 3, "size and version");
    assert_eq!([words(1), words(2), words(3), words(4), words(5)], [2, 0, 0, 1, 0], "category, colour, payload's type");
    assert_eq!([words(6), words(7)], [9, 0], "payload");
    assert_eq!([words(8), words(10), words(11)], [3, 0x55, 0], "message");
}

#[test]
fn a_library_that_does_not_work_is_named() {
    let missing = Nvtx::load(OsStr::new("/no/such/library.so")).unwrap_err();
    assert!(missing.contains("was not loaded") && missing.contains("/no/such/library.so"), "{missing}");
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::ffi::OsStrExt;
        let other = Nvtx::load(OsStr::new("libc.so.6")).unwrap_err();
        assert!(other.contains("no function `InitializeInjectionNvtx2`"), "{other}");
        let odd = Nvtx::load(OsStr::from_bytes(b"/no/\xff.so")).unwrap_err();
        assert!(odd.contains("was not loaded"), "{odd}");
    }
}
