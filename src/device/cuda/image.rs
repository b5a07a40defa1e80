//! A kernel's code in the form that the driver loads, compiled once per process and architecture.
//!
//! CUDA C++ is compiled after a prototype that is generated from the kernel's Rust signature:
//!
//! ```text
//! #line 1 "<wakeline prototype of add>"
//! ...the structs of all kernels that are in the same file
//! extern "C" __global__ void add(float* x, unsigned long long x_len, float a);
//! #line 1 "add.cu"
//! ...the user's file, whose lines keep their numbers
//! ```
//!
//! A body with the same parameters takes its C linkage, and so its plain name, from the prototype, with or without
//! `extern "C"`. A body with `extern "C"` whose parameters differ in number, type or `const` conflicts with the
//! prototype, an error at the user's line. Without `extern "C"` such a body is an overload in C++, with another name,
//! like a misspelt one; both are found when the lookup of the function fails. Then [`missing`] compiles once more, with
//! every `__global__` made `extern "C"`, to find out whether there is a conflict: if so, that is the error, also at the
//! user's line.
//!
//! A kernel is identified by the address of its declaration. Concurrent loads compile once: later ones wait for the
//! first. A failure is stored and returned again, without another attempt.

use std::{
    collections::HashMap,
    fmt,
    path::{Component, Path, PathBuf},
    ptr,
    sync::{Arc, OnceLock},
};

use super::nvrtc::Compiler;
use crate::{
    device::{
        CudaTypes,
        backend::{KernelDef, KernelSource, Registered},
    },
    error::{Error, ErrorKind, Result},
    sync::Mutex,
};

/// Code in a form that `cuModuleLoadDataEx` takes: machine code, or PTX with its terminating NUL. Aligned for either.
#[derive(Clone)]
pub(super) struct Image(Arc<[u64]>);

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} bytes)", self.0.len() * 8)
    }
}

impl Image {
    /// A copy that is followed by at least one NUL.
    fn new(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; bytes.len() / 8 + 1];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words.into())
    }

    /// Whether machine code from the compiler has a kernel of this name: a function's code is a section named after it.
    fn has_function(&self, name: &str) -> bool {
        let section = format!(".text.{name}\0");
        bytemuck::cast_slice::<u64, u8>(&self.0).windows(section.len()).any(|bytes| bytes == section.as_bytes())
    }

    pub(super) fn as_ptr(&self) -> *const u64 {
        self.0.as_ptr()
    }
}

type CompiledImage = Arc<OnceLock<Result<Image>>>;

static IMAGES: Mutex<Option<HashMap<(usize, u32), CompiledImage>>> = Mutex::new(None);

/// The kernel's code for `sm_<arch>`, compiled if necessary.
pub(super) fn of(def: &'static KernelDef, arch: u32) -> Result<Image> {
    let slot = {
        let mut images = IMAGES.lock();
        Arc::clone(images.get_or_insert_default().entry((ptr::from_ref(def).addr(), arch)).or_default())
    };
    match slot.get_or_init(|| make(def, arch)) {
        Ok(image) => Ok(image.clone()),
        Err(error) => Err(error.clone()),
    }
}

fn make(def: &KernelDef, arch: u32) -> Result<Image> {
    match def.source {
        KernelSource::Cuda(source) => {
            let compiler = Compiler::get().map_err(|reason| {
                Error::new(ErrorKind::NoCompiler, sentence(def, &format!("cannot be compiled: {reason}")))
            })?;
            match compiler.compile(def.file, &compose(def, "", source), arch) {
                Ok(image) => Ok(Image::new(&image)),
                Err(log) => {
                    let declaration = declaration(def);
                    Err(error(
                        def,
                        &format!("does not compile for sm_{arch}; its declaration is\n{declaration}\n{log}"),
                    ))
                }
            }
        }
        KernelSource::Ptx(text) => match text.trim_end_matches('\0') {
            text if text.contains('\0') => {
                Err(error(def, &format!("cannot be loaded: its PTX ({}) contains a NUL byte", def.file)))
            }
            text => Ok(Image::new(text.as_bytes())),
        },
        // The driver receives no length, so it must not be called with data that is not an image.
        KernelSource::Cubin(bytes) if is_binary(bytes) => Ok(Image::new(bytes)),
        KernelSource::Cubin(_) => {
            Err(error(def, &format!("cannot be loaded: {} is neither a cubin nor a fat binary", def.file)))
        }
        KernelSource::None => {
            let text = "has no CUDA body: it runs on the emulated device only; declare it with \
                        `#[kernel(unsafe(cuda = \"FILE.cu\"))]`";
            Err(error(def, text))
        }
    }
}

/// An ELF file, or a fat binary, with at least a header.
fn is_binary(bytes: &[u8]) -> bool {
    bytes.len() >= 64 && (bytes.starts_with(b"\x7fELF") || bytes.starts_with(&0xba55_ed50_u32.to_le_bytes()))
}

/// Compiles the kernel for `sm_<arch>`, if its code is CUDA C++, and finds its function.
pub(crate) fn compile(def: &'static KernelDef, arch: u32) -> Result<()> {
    if !matches!(def.source, KernelSource::Cuda(_)) {
        return Ok(());
    }
    if of(def, arch)?.has_function(def.name) { Ok(()) } else { Err(missing(def, arch)) }
}

/// An error of this kernel. `what` continues the sentence that begins with the kernel's name.
pub(super) fn error(def: &KernelDef, what: &str) -> Error {
    Error::new(ErrorKind::Kernel, sentence(def, what))
}

fn sentence(def: &KernelDef, what: &str) -> String {
    format!("`{}` (declared at {}) {what}", def.name, def.declared)
}

/// Fails if there is no compiler, or none for `sm_<arch>`.
pub(crate) fn check_architecture(arch: u32) -> Result<()> {
    let compiler = Compiler::get().map_err(|reason| Error::new(ErrorKind::NoCompiler, reason))?;
    let mut known = compiler.architectures().map_err(|text| Error::new(ErrorKind::NoCompiler, text))?;
    known.sort_unstable();
    if known.contains(&arch) {
        return Ok(());
    }
    let known: Vec<_> = known.iter().map(|arch| format!("sm_{arch}")).collect();
    let text = format!("NVRTC on this machine does not compile for sm_{arch}, only for {}", known.join(", "));
    Err(Error::new(ErrorKind::Usage, text))
}

/// The error for a kernel whose image does not contain its function.
pub(super) fn missing(def: &KernelDef, arch: u32) -> Error {
    const STRICT: &str = "#undef __global__\n#define __global__ extern \"C\" __attribute__((global))\n";
    if let (KernelSource::Cuda(source), Ok(compiler)) = (def.source, Compiler::get())
        && let Err(log) = compiler.compile(def.file, &compose(def, STRICT, source), arch)
        // Other errors of the strict compilation (for a template, for example) are not the cause.
        && log.contains("linkage")
        && log.contains(&format!("\"{}\"", def.name))
    {
        let declaration = declaration(def);
        return error(def, &format!("does not agree with its declaration, which is\n{declaration}\n{log}"));
    }
    error(def, &format!("was not found: there is no function `{}` in {}", def.name, def.file))
}

fn declaration(def: &KernelDef) -> String {
    (def.prototype)(&mut CudaTypes::new())
}

/// The source text for NVRTC: the types and the prototype, `between`, the user's source. The types are those of all
/// kernels of the file, whose bodies are compiled too.
pub(super) fn compose(def: &KernelDef, between: &str, source: &str) -> String {
    let mut types = CudaTypes::new();
    let function = (def.prototype)(&mut types);
    types.of_other_kernels();
    let file = file(def);
    for Registered(other) in inventory::iter::<Registered> {
        if matches!(other.source, KernelSource::Cuda(_)) && !ptr::eq(*other, def) && self::file(other) == file {
            (other.prototype)(&mut types);
        }
    }
    let types = types.finish();
    let types = types.trim_end();
    let newline = if types.is_empty() { "" } else { "\n" };
    format!(
        "#line 1 \"<wakeline prototype of {}>\"\n{types}{newline}extern \"C\" __global__ {function};\n{between}#line 1 \"{}\"\n{source}",
        def.name,
        def.file.replace('\\', "\\\\").replace('"', "\\\"")
    )
}

/// The path of the kernel's file: in the attribute, it is relative to the file of the declaration.
fn file(def: &KernelDef) -> PathBuf {
    let declared = Path::new(def.declared).parent().unwrap_or(Path::new(""));
    let mut path = PathBuf::new();
    for part in declared.join(def.file).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if matches!(path.components().next_back(), Some(Component::Normal(_))) => {
                path.pop();
            }
            part => path.push(part),
        }
    }
    path
}
