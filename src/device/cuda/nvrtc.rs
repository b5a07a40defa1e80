//! The CUDA C++ compiler, loaded when the first kernel needs it.
//!
//! NVRTC is part of the CUDA toolkit, not of the driver: a machine can have a GPU but no compiler, and run precompiled
//! kernels. So a missing library is an error of the kernel that needs it, not of the device. It is searched for under
//! the names of CUDA 13 and 12, in the linker's search path and then in the toolkit that `CUDA_PATH` or `CUDA_HOME`
//! names, or in `/usr/local/cuda`; that toolkit's headers are on the include path as well.
//!
//! The result is machine code for the device's architecture or, if the compiler is older than the device, PTX for the
//! newest earlier architecture that the compiler supports.

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

type RawResult = bindings::nvrtcResult;

table! {
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

pub(super) struct Compiler {
    functions: Functions,
    error_string: Option<unsafe extern "C" fn(u32) -> *const c_char>,
}

impl Compiler {
    /// The compiler. The error is a one-line reason why there is none.
    pub(super) fn get() -> Result<&'static Compiler, &'static str> {
        static COMPILER: OnceLock<Result<Compiler, String>> = OnceLock::new();
        COMPILER.get_or_init(Compiler::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Compiler, String> {
        let Some(library) = candidates().find_map(|path| load_library(&path)) else {
            return Err(
                "NVRTC (libnvrtc.so) was not found on this machine: install the CUDA toolkit, set CUDA_PATH to the \
                 folder of an installed one or LD_LIBRARY_PATH to that of the library, or give the kernel PTX or a cubin"
                    .into(),
            );
        };
        // Never unloaded, as the table below points into the library.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let functions = Functions::load(library).map_err(|symbol| {
            format!("NVRTC on this machine is too old, as it has no `{symbol}`: install CUDA 12 or newer")
        })?;
        type Text = unsafe extern "C" fn(u32) -> *const c_char;
        // SAFETY: `const char *nvrtcGetErrorString(nvrtcResult)`; a C enum is passed as an `unsigned int`. Not called
        // through cudarc, whose enum lacks the codes of newer compilers.
        let error_string = unsafe { library.get::<Text>("nvrtcGetErrorString") }.map(|found| *found).ok();
        Ok(Compiler { functions, error_string })
    }

    /// Compiles `source` for `sm_<arch>` to machine code or PTX, which the driver can load. `name` is the program's
    /// name in the log. The error is the compiler's log.
    pub(super) fn compile(&self, name: &str, source: &str, arch: u32) -> Result<Vec<u8>, String> {
        let cstring = |what: &str, text: &str| CString::new(text).map_err(|_| format!("{what} contains a NUL byte"));
        let (source, name) = (cstring("its source", source)?, cstring("its file name", name)?);
        let (target, machine_code) = self.target(arch)?;
        let mut options = vec![cstring("an option", &target)?, c"--std=c++17".to_owned()];
        for include in toolkits().map(|root| root.join("include")).filter(|path| path.is_dir()) {
            options.push(cstring("CUDA_PATH", &format!("--include-path={}", include.display()))?);
        }
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect::<Vec<_>>();
        let program = Program::new(self, &source, &name)?;
        // SAFETY: a live program; as many options as the count passed, all terminated and alive.
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
        result.map_err(|code| format!("NVRTC returned no result: {}", self.describe(code)))
    }

    /// The compiler's option for an architecture, and whether the result is machine code.
    fn target(&self, arch: u32) -> Result<(String, bool), String> {
        let newest = self.architectures()?.into_iter().filter(|&known| known <= arch).max();
        match newest {
            Some(known) if known == arch => Ok((format!("--gpu-architecture=sm_{arch}"), true)),
            Some(known) => Ok((format!("--gpu-architecture=compute_{known}"), false)),
            None => Err(format!("NVRTC on this machine no longer compiles for sm_{arch}: install an older version")),
        }
    }

    /// The architectures that this compiler has machine code for: 90 for `sm_90`.
    pub(super) fn architectures(&self) -> Result<Vec<u32>, String> {
        let mut count: c_int = 0;
        // SAFETY: `count` outlives the call, which writes one int.
        let code = unsafe { (self.functions.get_num_supported_archs)(&mut count) };
        let mut known: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        let code = if code.is_success() && !known.is_empty() {
            // SAFETY: the call writes as many ints as counted above, and there is room for them.
            unsafe { (self.functions.get_supported_archs)(known.as_mut_ptr()) }
        } else {
            code
        };
        if code.is_success() {
            Ok(known.into_iter().filter_map(|known| u32::try_from(known).ok()).collect())
        } else {
            Err(format!("NVRTC failed to list its architectures: {}", self.describe(code)))
        }
    }

    fn describe(&self, code: Code) -> String {
        let text = self.error_string.map(|function| {
            // SAFETY: it takes any number and returns a string constant or null.
            unsafe { function(code.0) }
        });
        match text {
            Some(text) if !text.is_null() => {
                // SAFETY: a constant of the compiler: terminated, never freed.
                let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
                format!("{text} ({})", code.0)
            }
            _ => format!("NVRTC code {}", code.0),
        }
    }
}

/// A program of the compiler, destroyed on drop. It borrows its source and name, which NVRTC can read until then.
struct Program<'a> {
    compiler: &'a Compiler,
    raw: nvrtcProgram,
    _text: (&'a CStr, &'a CStr),
}

impl<'a> Program<'a> {
    fn new(compiler: &'a Compiler, source: &'a CStr, name: &'a CStr) -> Result<Self, String> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` outlives the call, which writes one handle; both strings are terminated and outlive the
        // program; without headers, the arrays of headers may be null.
        let code = unsafe {
            (compiler.functions.create_program)(&mut raw, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        if !code.is_success() {
            return Err(format!("NVRTC failed to create a program: {}", compiler.describe(code)));
        }
        Ok(Self { compiler, raw, _text: (source, name) })
    }

    fn log(&self) -> Option<String> {
        let Functions { get_program_log_size, get_program_log, .. } = self.compiler.functions;
        let bytes = self.read(get_program_log_size, get_program_log).ok()?;
        let text = CStr::from_bytes_until_nul(&bytes).map_or_else(|_| &bytes[..], CStr::to_bytes);
        let text = String::from_utf8_lossy(text).trim_end().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// Calls a pair of functions that return a size and then as many bytes.
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
        // SAFETY: the call writes as many bytes as the size above, as nothing was compiled in between.
        let code = unsafe { get(self.raw, result.as_mut_ptr().cast()) };
        if code.is_success() { Ok(result) } else { Err(code) }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and not used after this.
        let _ = unsafe { (self.compiler.functions.destroy_program)(&mut self.raw) };
    }
}

fn toolkits() -> impl Iterator<Item = PathBuf> {
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let usual = cfg!(unix).then(|| PathBuf::from("/usr/local/cuda"));
    named.filter(|path| !path.as_os_str().is_empty()).chain(usual)
}

fn load_library(path: &Path) -> Option<libloading::Library> {
    // SAFETY: loading NVIDIA's compiler library runs its initialisers, as intended.
    let library = unsafe { libloading::Library::new(path) }.ok()?;
    // The compiler later loads a library of built-in functions by its bare name. If the compiler itself was not found
    // by a bare name, neither would that library be, unless it is already loaded.
    let beside = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    for entry in beside.filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.")) {
        // SAFETY: as above.
        if let Ok(builtins) = unsafe { libloading::Library::new(entry.path()) } {
            mem::forget(builtins);
        }
    }
    Some(library)
}

/// The candidate paths of the compiler's library, in order of preference.
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
