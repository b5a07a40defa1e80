//! [`compile_all`]: compiles the program's kernels without a GPU.

use super::Kernel;
use crate::error::{Error, ErrorKind, Result};

/// Compiles the CUDA C++ body of every kernel of this program for an architecture such as `"sm_90"`.
///
/// This needs NVRTC, the compiler library of the CUDA toolkit, but neither a GPU nor a driver: a test that calls it
/// checks all kernels on any machine, for example in continuous integration. It compiles what a launch would compile,
/// behind the same generated declaration, so it also finds a body whose parameters differ from the Rust signature.
/// Kernels with PTX or a cubin are not compiled.
///
/// The program's kernels are those of all crates that are linked into this executable. Compiling takes some ten
/// milliseconds a kernel, on this thread; a kernel is compiled once per process and architecture.
///
/// ```no_run
/// #[test]
/// #[ignore = "needs NVRTC"]
/// fn every_kernel_compiles() {
///     wakeline::kernel::compile_all("sm_90").unwrap();
/// }
/// ```
///
/// NVRTC is searched for in the linker's path (`LD_LIBRARY_PATH`), then in the toolkit that `CUDA_PATH` names.
///
/// # Errors
/// - [`Kernel`](ErrorKind::Kernel): some kernels do not compile. The message has each of them, with its declaration in
///   CUDA C++ and the compiler's log.
/// - [`NoCompiler`](ErrorKind::NoCompiler): there is no NVRTC, or this program was built without the feature `cuda`.
/// - [`Usage`](ErrorKind::Usage): `architecture` is not one, or NVRTC does not know it.
pub fn compile_all(architecture: &str) -> Result<()> {
    let number = number(architecture)?;
    let mut kernels: Vec<_> = Kernel::all().collect();
    // In the order of the sources: the linker's is arbitrary.
    kernels.sort_by_key(|kernel| {
        let (file, line) = kernel.0.declared.rsplit_once(':').unwrap_or_default();
        (file, line.parse::<u32>().unwrap_or(0), kernel.name())
    });
    let errors = compile(&kernels, number)?;
    if errors.is_empty() {
        return Ok(());
    }
    let mut text = format!("{} of {} kernels do not compile for {architecture}:", errors.len(), kernels.len());
    for error in &errors {
        text += "\n\n";
        text += error.message();
    }
    Err(Error::new(ErrorKind::Kernel, text))
}

/// 90 for `sm_90`.
fn number(architecture: &str) -> Result<u32> {
    let digits = architecture.strip_prefix("sm_").unwrap_or_default();
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
    number.ok_or_else(|| {
        let text = format!(
            "`{architecture}` is not an architecture that kernels are compiled for: write `sm_` and the device's compute \
             capability without its dot and without a suffix, such as `sm_90`"
        );
        Error::new(ErrorKind::Usage, text)
    })
}

#[cfg(feature = "cuda")]
fn compile(kernels: &[Kernel], architecture: u32) -> Result<Vec<Error>> {
    use crate::device::cuda;
    cuda::check_architecture(architecture)?;
    Ok(kernels.iter().filter_map(|kernel| cuda::compile_kernel(kernel.0, architecture).err()).collect())
}

#[cfg(not(feature = "cuda"))]
fn compile(_kernels: &[Kernel], _architecture: u32) -> Result<Vec<Error>> {
    Err(Error::new(ErrorKind::NoCompiler, "this program was built without wakeline's feature `cuda`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_sm_and_a_number() {
        assert_eq!(number("sm_90").unwrap(), 90);
        for other in ["", "sm_", "90", "sm_90a", "compute_90", "sm_+9", "sm_99999999999", "SM_90"] {
            let error = number(other).unwrap_err();
            assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("such as `sm_90`"), "{error}");
        }
    }

    #[test]
    fn without_a_compiler_the_kind_says_so() {
        if let Err(error) = compile(&[], 90) {
            assert_eq!(error.kind(), ErrorKind::NoCompiler, "{error}");
        }
    }
}
