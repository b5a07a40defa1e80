//! Typed kernels: declared once with two bodies, and launched with checked arguments.
//!
//! [`#[kernel]`](macro@crate::kernel) on a Rust function generates a launch function whose arguments are checked at
//! compile time. On a GPU, a launch runs the CUDA C++ function of the same name; on the emulated device, it runs the
//! Rust function. A prototype generated from the Rust signature precedes the CUDA source, so a CUDA function with other
//! parameters is a compile error at its line.
//!
//! | Rust | CUDA C++ |
//! |---|---|
//! | `x: &[f32]` | `const float* x, unsigned long long x_len` |
//! | `y: &mut [f32]` | `float* y, unsigned long long y_len` |
//! | `a: f32` | `float a` |
//! | `p: Particle` | `Particle p`, a struct with [`#[derive(KernelStruct)]`](macro@KernelStruct) |
//!
//! A flow compiles and loads all kernels of the program for its devices before it runs. Outside of a flow, a kernel is
//! compiled at its first launch, or earlier by [`Kernel::load`]. [`compile_all`] compiles them all without a GPU, and
//! [`agree`](fn@agree) compares the two bodies of a kernel on random inputs.

mod agree;
mod compile;

use std::fmt;

use crate::{
    device::{
        Device,
        backend::{KernelDef, Registered},
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result, panic_message},
    stream::Streams,
};

pub use self::{
    agree::{Agreement, Comparable, ComparableElement, RandomInputs, RandomNumber, agree},
    compile::compile_all,
};
use crate::memory::shape::Shape;
pub use wakeline_macros::KernelStruct;

#[doc(inline)]
pub use crate::{
    device::KernelType,
    memory::{DeviceSlice, DeviceSliceMut},
};

/// A kernel that is declared with [`#[kernel]`](macro@crate::kernel): to load it before its first launch.
#[derive(Clone, Copy)]
pub struct Kernel(&'static KernelDef);

#[doc(hidden)]
pub fn kernel(def: &'static KernelDef) -> Kernel {
    Kernel(def)
}

impl Kernel {
    /// All kernels of the program that have code for a GPU.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let has_code = |def: &KernelDef| !matches!(def.source, crate::device::backend::KernelSource::None);
        inventory::iter::<Registered>.into_iter().map(|entry| entry.0).filter(move |def| has_code(def)).map(Kernel)
    }

    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn def(self) -> &'static KernelDef {
        self.0
    }

    /// The kernel's name, in Rust and in the device code.
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// Compiles and loads the kernel for `device` on a blocking thread, unless this process has already done so.
    ///
    /// # Errors
    /// [`Kernel`](ErrorKind::Kernel) with the compiler's log; [`Usage`](ErrorKind::Usage) outside of a tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop the compiler. The result is kept for the next call.
    pub async fn load(self, device: &Device) -> Result<()> {
        if !device.is_cuda() {
            return Ok(());
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            let text = format!(
                "kernel `{}` cannot be loaded outside of a tokio runtime: use `Kernel::load_blocking`",
                self.name()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        };
        let device = device.clone();
        let loading = runtime.spawn_blocking(move || self.load_blocking(&device));
        loading.await.map_err(|error| match error.try_into_panic() {
            Ok(panic) => {
                Error::new(ErrorKind::Panicked, panic_message(panic)).at(format!("loading kernel `{}`", self.name()))
            }
            Err(error) => {
                Error::new(ErrorKind::Kernel, format!("`{}` was not loaded: the runtime was shut down", self.name()))
                    .because(error)
            }
        })?
    }

    /// Like [`Kernel::load`], on this thread.
    ///
    /// # Errors
    /// Those of [`Kernel::load`].
    pub fn load_blocking(self, device: &Device) -> Result<()> {
        if device.is_cuda() {
            DeviceThread::may_wait(|| format!("kernel `{}` would be loaded, which waits for {device},", self.name()))?;
        }
        Streams::of(device).observe(device.backend().load(self.0))
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The shape of a launch: its blocks and threads.
///
/// By default, one thread runs for each element of the kernel's `over`. Without `over`, one runs for each element of the
/// longest slice that the kernel writes (that it reads, if it writes none), in blocks of 256 threads. See
/// [`#[kernel]`](macro@crate::kernel#what-a-launch-covers).
///
/// ```
/// use wakeline::kernel::Grid;
/// let grid = Grid::blocks([16, 16, 1]).threads([32, 8, 1]).shared_bytes(4096);
/// let one_thread_an_element_in_smaller_blocks = Grid::default().threads([64, 1, 1]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grid(Shape);

impl Grid {
    /// Sets the number of blocks in each dimension.
    #[must_use]
    pub fn blocks(blocks: [u32; 3]) -> Self {
        Self(Shape { blocks: Some(blocks), ..Shape::default() })
    }

    /// Sets the number of threads per block in each dimension.
    #[must_use]
    pub fn threads(mut self, threads: [u32; 3]) -> Self {
        self.0.threads = Some(threads);
        self
    }

    /// Sets the dynamic shared memory per block, in bytes.
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
