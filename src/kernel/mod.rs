//! Typed kernels: declared once, with two bodies, and launched with checked arguments.
//!
//! [`#[kernel]`](macro@crate::kernel) on a Rust function gives a launch whose arguments are checked when it is compiled. On a
//! GPU the launch runs the CUDA C++ function of the same name, on the emulated device the Rust function. A prototype
//! generated from the Rust signature is compiled before the CUDA source, so a body that disagrees is a compile error at
//! the author's line.
//!
//! | Rust | CUDA C++ |
//! |---|---|
//! | `x: &[f32]` | `const float* x, unsigned long long x_len` |
//! | `y: &mut [f32]` | `float* y, unsigned long long y_len` |
//! | `a: f32` | `float a` |
//!
//! A flow compiles and loads all kernels of the program for its devices before it runs; without a flow a kernel is
//! compiled at its first launch, or ahead of time with [`Kernel::load`].

use std::fmt;

use crate::{
    device::{Device, backend::KernelDef, thread::DeviceThread},
    error::{Error, ErrorKind, Result, said},
    stream::Streams,
};

use crate::memory::launch::Shape;
pub use crate::{
    device::KernelType,
    memory::{DeviceSlice, DeviceSliceMut},
};

/// A declared kernel.
#[derive(Clone, Copy)]
pub struct Kernel(&'static KernelDef);

#[doc(hidden)]
pub fn kernel(def: &'static KernelDef) -> Kernel {
    Kernel(def)
}

/// A kernel in the program's list of all.
#[doc(hidden)]
#[derive(Debug)]
pub struct Registered(pub &'static KernelDef);

inventory::collect!(Registered);

impl Kernel {
    /// All kernels of the program that have code for a GPU.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let has_code = |def: &KernelDef| !matches!(def.source, crate::device::backend::Source::None);
        inventory::iter::<Registered>.into_iter().map(|entry| entry.0).filter(move |def| has_code(def)).map(Kernel)
    }

    /// Its name, in Rust and in the device code.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// Compiles and loads it for `device`, off the runtime's workers, unless this process has done so already.
    ///
    /// # Errors
    /// [`Kernel`](ErrorKind::Kernel) with the compiler's log; [`Usage`](ErrorKind::Usage) outside of a tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop the compiler; its result is kept for the next call.
    pub async fn load(self, device: &Device) -> Result<()> {
        if !device.is_cuda() {
            return Ok(());
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            let text = format!("`{}` is loaded outside of a tokio runtime: use `Kernel::load_blocking`", self.name());
            return Err(Error::new(ErrorKind::Usage, text));
        };
        let device = device.clone();
        let loading = runtime.spawn_blocking(move || self.load_blocking(&device));
        loading.await.map_err(|error| match error.try_into_panic() {
            Ok(panic) => Error::new(ErrorKind::Panicked, said(panic)).at(format!("loading kernel `{}`", self.name())),
            Err(error) => Error::new(ErrorKind::Kernel, format!("`{}` was not loaded", self.name())).because(error),
        })?
    }

    /// As [`Kernel::load`], on this thread.
    ///
    /// # Errors
    /// As [`Kernel::load`].
    pub fn load_blocking(self, device: &Device) -> Result<()> {
        if device.is_cuda() {
            DeviceThread::may_wait(|| format!("kernel `{}` would be loaded, which waits for {device},", self.name()))?;
        }
        Streams::of(device).heed(device.backend().load(self.0))
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How many threads a launch runs, and in what shape.
///
/// The default covers the elements: blocks of 256 threads, as many as the longest slice that the kernel writes has
/// elements (the longest it reads, if it writes none), a thread for each.
///
/// ```
/// use wakeline::kernel::Grid;
/// let grid = Grid::blocks([16, 16, 1]).threads([32, 8, 1]).shared_bytes(4096);
/// let one_thread_an_element_in_smaller_blocks = Grid::default().threads([64, 1, 1]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grid(Shape);

impl Grid {
    /// So many blocks, by dimension.
    #[must_use]
    pub fn blocks(blocks: [u32; 3]) -> Self {
        Self(Shape { blocks: Some(blocks), ..Shape::default() })
    }

    /// So many threads a block, by dimension.
    #[must_use]
    pub fn threads(mut self, threads: [u32; 3]) -> Self {
        self.0.threads = Some(threads);
        self
    }

    /// So much dynamic shared memory a block, in bytes.
    #[must_use]
    pub fn shared_bytes(mut self, bytes: u32) -> Self {
        self.0.shared_bytes = bytes;
        self
    }
}

impl From<Grid> for Shape {
    fn from(grid: Grid) -> Self {
        grid.0
    }
}
