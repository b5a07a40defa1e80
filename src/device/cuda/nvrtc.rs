//! The CUDA C++ compiler, loaded when the first kernel needs it.
//!
//! NVRTC comes with the CUDA toolkit, not with the driver: a machine may well have a GPU and no compiler, and run
//! kernels that were compiled beforehand. So a missing library is an error of the kernel that wants it, not of the
//! device. It is looked for under the names of CUDA 13 and 12, where the linker looks and then in the toolkit that
//! `CUDA_PATH` or `CUDA_HOME` names, or in `/usr/local/cuda`; that toolkit's headers are on the include path too.
//!
//! The result is machine code for the device's architecture or, where the compiler is older than the device, PTX for
//! the newest architecture before it that the compiler knows.

use std::{
    env,
    ffi::{CStr, CString, c_char, c_int},
    mem,
    path::{Path, PathBuf},
    ptr,
    sync::OnceLock,
};

use cudarc::nvrtc::sys::{self as bindings, nvrtcProgram};

use super::driver::{Code, table};

type Answer = bindings::nvrtcResult;

table! {
    /// The functions of the compiler that wakeline calls.
    struct Functions;
    required {
        create_program = nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        destroy_program = nvrtcDestroyProgram(*mut nvrtcProgram);
        compile_program = nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        get_program_log_size = nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        get_program_log = nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        get_ptx_size = nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        get_ptx = nvrtcGetPTX(nvrtcProgram, *mut c_char);
        get_cubin_size = nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        get_cubin = nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        get_num_supported_archs = nvrtcGetNumSupportedArchs(*mut c_int);
        get_supported_archs = nvrtcGetSupportedArchs(*mut c_int);
    }
    renamed {}
    optional {}
}

const COMPILATION: Code = Code(6);

/// The loaded compiler of this process.
pub(super) struct Compiler {
    functions: Functions,
    error_string: Option<unsafe extern "C" fn(u32) -> *const c_char>,
}

impl Compiler {
    /// The compiler, or one line that says why there is none.
    pub(super) fn get() -> Result<&'static Compiler, &'static str> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        COMPILER.get_or_init(Compiler::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Compiler, String> {
        let Some(library) = candidates().find_map(|path| load_library(&path)) else {
            return Err(
                "there is no NVRTC (libnvrtc.so) on this machine to compile it with: install the CUDA toolkit, \
                        or set CUDA_PATH to where it is, or give the kernel PTX or a cubin made beforehand"
                    .into(),
            );
        };
        // Never unloaded, because the table below points into it.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let functions = Functions::load(library).map_err(|symbol| {
            format!("NVRTC on this machine has no `{symbol}`: it is too old, install CUDA 12 or newer")
        })?;
        type Text = unsafe extern "C" fn(u32) -> *const c_char;
        // SAFETY: `const char *nvrtcGetErrorString(nvrtcResult)`; a C enum is passed as an `unsigned int`. Not through
        // cudarc, whose enum lacks what newer compilers answer.
        let error_string = unsafe { library.get::<Text>("nvrtcGetErrorString") }.map(|found| *found).ok();
        Ok(Compiler { functions, error_string })
    }

    /// Compiles `source` for `sm_<arch>`: machine code or PTX, as the driver loads it. `name` is the program's name in
    /// the log. The error is the compiler's log.
    pub(super) fn compile(&self, name: &str, source: &str, arch: u32) -> Result<Vec<u8>, String> {
        let cstring = |what: &str, text: &str| CString::new(text).map_err(|_| format!("{what} has a NUL byte in it"));
        let (source, name) = (cstring("its source", source)?, cstring("its file name", name)?);
        let (target, machine_code) = self.target(arch)?;
        let mut options = vec![cstring("an option", &target)?, c"--std=c++17".to_owned()];
        for include in toolkits().map(|root| root.join("include")).filter(|path| path.is_dir()) {
            options.push(cstring("CUDA_PATH", &format!("--include-path={}", include.display()))?);
        }
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect::<Vec<_>>();
        let program = Program::new(self, &source, &name)?;
        // SAFETY: a live program; as many options as said, all terminated and alive.
        let code = unsafe { (self.functions.compile_program)(program.raw, options.len() as c_int, options.as_ptr()) };
        let log = program.log();
        if !code.is_success() {
            return Err(match log {
                Some(log) if code == COMPILATION => log,
                Some(log) => format!("{}\n{log}", self.describe(code)),
                None => self.describe(code),
            });
        }
        if let Some(log) = log {
            crate::sync::log(move || tracing::debug!(%log, "compiled with remarks"));
        }
        let Functions { get_cubin_size, get_cubin, get_ptx_size, get_ptx, .. } = self.functions;
        let result =
            if machine_code { program.read(get_cubin_size, get_cubin) } else { program.read(get_ptx_size, get_ptx) };
        result.map_err(|code| format!("the compiler gave no result: {}", self.describe(code)))
    }

    /// The option for an architecture, and whether it gives machine code.
    fn target(&self, arch: u32) -> Result<(String, bool), String> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call, which writes one int.
        let code = unsafe { (self.functions.get_num_supported_archs)(&mut count) };
        let mut known: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        let code = if code.is_success() && !known.is_empty() {
            // SAFETY: the call writes as many ints as it counted a moment ago, and there is room for them.
            unsafe { (self.functions.get_supported_archs)(known.as_mut_ptr()) }
        } else {
            code
        };
        if !code.is_success() {
            return Err(format!("the compiler does not say what it compiles for: {}", self.describe(code)));
        }
        let newest =
            known.into_iter().filter_map(|known| u32::try_from(known).ok()).filter(|&known| known <= arch).max();
        match newest {
            Some(known) if known == arch => Ok((format!("--gpu-architecture=sm_{arch}"), true)),
            Some(known) => Ok((format!("--gpu-architecture=compute_{known}"), false)),
            None => Err(format!("NVRTC on this machine does not compile for sm_{arch} any more: install an older one")),
        }
    }

    fn describe(&self, code: Code) -> String {
        let text = self.error_string.map(|function| {
            // SAFETY: it takes any number and returns a string constant or null.
            unsafe { function(code.0) }
        });
        match text {
            Some(text) if !text.is_null() => {
                // SAFETY: the compiler's constant: terminated, never freed.
                let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
                format!("{text} ({})", code.0)
            }
            _ => format!("NVRTC code {}", code.0),
        }
    }
}

/// A program in the compiler, destroyed with this. It borrows its source and name, which NVRTC may look at later.
struct Program<'a> {
    compiler: &'a Compiler,
    raw: nvrtcProgram,
    _text: (&'a CStr, &'a CStr),
}

impl<'a> Program<'a> {
    fn new(compiler: &'a Compiler, source: &'a CStr, name: &'a CStr) -> Result<Self, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call, which writes one handle; both strings are terminated and outlive the
        // program; there are no headers, so there need be no arrays of them.
        let code = unsafe {
            (compiler.functions.create_program)(&mut raw, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        if !code.is_success() {
            return Err(format!("the compiler takes no program: {}", compiler.describe(code)));
        }
        Ok(Self { compiler, raw, _text: (source, name) })
    }

    /// The compiler's log, if it says anything.
    fn log(&self) -> Option<String> {
        let Functions { get_program_log_size, get_program_log, .. } = self.compiler.functions;
        let bytes = self.read(get_program_log_size, get_program_log).ok()?;
        let text = CStr::from_bytes_until_nul(&bytes).map_or_else(|_| &bytes[..], CStr::to_bytes);
        let text = String::from_utf8_lossy(text).trim_end().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// One of the pairs of functions that give a size and then as many bytes.
    fn read(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> Code,
        get: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> Code,
    ) -> Result<Vec<u8>, Code> {
        let mut bytes = 0_usize;
        // SAFETY: a live program; `bytes` outlives the call, which writes one `size_t`.
        let code = unsafe { size(self.raw, &mut bytes) };
        if !code.is_success() {
            return Err(code);
        }
        let mut result = vec![0_u8; bytes];
        // SAFETY: the call writes as many bytes as were asked for a moment ago, and nothing compiled in between.
        let code = unsafe { get(self.raw, result.as_mut_ptr().cast()) };
        if code.is_success() { Ok(result) } else { Err(code) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used by nobody after this.
        let _ = unsafe { (self.compiler.functions.destroy_program)(&mut self.raw) };
    }
}

/// Where a CUDA toolkit may be.
fn toolkits() -> impl Iterator<Item = PathBuf> {
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let usual = cfg!(unix).then(|| PathBuf::from("/usr/local/cuda"));
    named.filter(|path| !path.as_os_str().is_empty()).chain(usual)
}

/// The compiler's library at a path, if it is there.
fn load_library(path: &Path) -> Option<libloading::Library> {
    // SAFETY: loading NVIDIA's compiler library runs its initialisers, which is what loading it is for.
    let library = unsafe { libloading::Library::new(path) }.ok()?;
    // It loads a library of built-in functions later, by its bare name. Beside a compiler that was not found by a bare
    // name that one would not be found either, unless it is there already.
    let beside = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    for entry in beside.filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.")) {
        // SAFETY: as above.
        if let Ok(builtins) = unsafe { libloading::Library::new(entry.path()) } {
            mem::forget(builtins);
        }
    }
    Some(library)
}

/// Where the compiler's library may be, best first.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let (names, folder): (&[&str], &str) = if cfg!(windows) {
        (&["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"], "bin")
    } else {
        (&["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"], "lib64")
    };
    let plain = names.iter().map(PathBuf::from);
    let installed = toolkits().flat_map(move |root| names.iter().map(move |name| root.join(folder).join(name)));
    plain.chain(installed)
}
