//! What the driver loads for a kernel: compiled once a process and architecture.
//!
//! CUDA C++ is compiled behind a prototype that comes from the kernel's Rust signature:
//!
//! ```text
//! #line 1 "<wakeline prototype of add>"
//! extern "C" __global__ void add(float* x, unsigned long long x_len, float a);
//! #line 1 "add.cu"
//! ...the user's file, whose lines keep their numbers
//! ```
//!
//! A body that agrees takes its C linkage, and so its plain name, from the prototype, whether it says `extern "C"` or not.
//! One that says so and differs in number, type or `const` of its parameters clashes with the prototype, at the user's
//! line. One that does not say so is an overload to C++, with another name, just as a misspelt one is; both show when
//! the function is looked up and is not there. Then [`missing`] compiles once more, with every `__global__` made
//! `extern "C"`, only to hear whether there is a clash: if so, that is the error, at the user's line as well.
//!
//! A kernel is known by the address of its declaration. Loaders that come at the same time compile once: the others
//! wait for the first. What failed once fails again with the same error, without another attempt.

use std::{
    collections::HashMap,
    fmt, ptr,
    sync::{Arc, OnceLock},
};

use super::nvrtc::Compiler;
use crate::{
    device::backend::{KernelDef, Source},
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
    /// A copy with at least one NUL behind it.
    fn new(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; bytes.len() / 8 + 1];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(words.into())
    }

    pub(super) fn as_ptr(&self) -> *const u64 {
        self.0.as_ptr()
    }
}

type Slot = Arc<OnceLock<Result<Image>>>;

/// By the kernel's address and the architecture.
static IMAGES: Mutex<Option<HashMap<(usize, u32), Slot>>> = Mutex::new(None);

/// The kernel's code for `sm_<arch>`: compiled now, or found.
pub(super) fn of(def: &'static KernelDef, arch: u32) -> Result<Image> {
    let slot = {
        let mut images = IMAGES.lock();
        Arc::clone(images.get_or_insert_default().entry((ptr::from_ref(def).addr(), arch)).or_default())
    };
    match slot.get_or_init(|| make(def, arch)) {
        Ok(image) => Ok(image.clone()),
        Err(error) => Err(error.again()),
    }
}

fn make(def: &KernelDef, arch: u32) -> Result<Image> {
    match def.source {
        Source::Cuda(source) => {
            let fail = |log: &str| error(def, &format!("does not compile for sm_{arch}:\n{log}"));
            let compiler = Compiler::get().map_err(|reason| error(def, &format!("cannot be compiled: {reason}")))?;
            let image = compiler.compile(def.file, &compose(def, "", source), arch).map_err(|log| fail(&log))?;
            Ok(Image::new(&image))
        }
        Source::Ptx(text) => match text.trim_end_matches('\0') {
            text if text.contains('\0') => Err(error(def, "has a NUL byte in its PTX")),
            text => Ok(Image::new(text.as_bytes())),
        },
        // The driver is told no length, so what is no image at all must not get there.
        Source::Cubin(bytes) if is_binary(bytes) => Ok(Image::new(bytes)),
        Source::Cubin(_) => Err(error(def, "has a cubin that is neither a cubin nor a fat binary")),
        Source::None => {
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

/// An error of this kernel. `what` goes on from its name.
pub(super) fn error(def: &KernelDef, what: &str) -> Error {
    Error::new(ErrorKind::Kernel, format!("`{}` (declared at {}) {what}", def.name, def.declared))
}

/// The error for a kernel whose function is not in its own image.
pub(super) fn missing(def: &KernelDef, arch: u32) -> Error {
    const STRICT: &str = "#undef __global__\n#define __global__ extern \"C\" __attribute__((global))\n";
    if let (Source::Cuda(source), Ok(compiler)) = (def.source, Compiler::get())
        && let Err(log) = compiler.compile(def.file, &compose(def, STRICT, source), arch)
        // Anything else that strict reading finds wrong (a template, say) is not what is wrong here.
        && log.contains("linkage")
        && log.contains(&format!("\"{}\"", def.name))
    {
        let prototype = (def.prototype)().function;
        return error(def, &format!("does not agree with its declaration, which is\n{prototype}\n{log}"));
    }
    error(def, &format!("is not there: no function `{}` in {}", def.name, def.file))
}

/// The text that NVRTC gets: the prototype, `between`, the user's source.
pub(super) fn compose(def: &KernelDef, between: &str, source: &str) -> String {
    let prototype = (def.prototype)();
    let types = prototype.types.trim_end();
    let newline = if types.is_empty() { "" } else { "\n" };
    format!(
        "#line 1 \"<wakeline prototype of {}>\"\n{types}{newline}extern \"C\" __global__ {};\n{between}#line 1 \"{}\"\n{source}",
        def.name,
        prototype.function,
        def.file.replace('\\', "\\\\").replace('"', "\\\"")
    )
}
