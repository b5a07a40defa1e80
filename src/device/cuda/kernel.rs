//! Kernels on one device: found by their declaration, launched with their arguments.
//!
//! A module contains the code of one kernel and stays loaded while the device is open. The first launch on a device
//! loads it (through `image.rs`, which compiles) and enters it into the device's table, where later launches find it
//! without a lock. Concurrent launches load it once. A kernel that cannot be compiled or found remains an error; a load
//! that failed for lack of memory can be retried. A closed device drops its table, and loads kernels again when it is
//! reopened.
//!
//! Prototypes ensure that a CUDA C++ body agrees with its Rust signature. PTX and cubins compiled elsewhere are not
//! checked in this way, and the driver would read past the arguments. So if the driver can report a function's
//! parameters, a launch compares their sizes, a few integers, with the sizes that it passes.

use std::{
    collections::HashMap,
    ffi::{CString, c_int, c_uint, c_void},
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS, CUfunc_st, CUfunction_attribute, CUjit_option, CUmod_st, CUstream};
use smallvec::SmallVec;

use super::{
    context::Context,
    driver::{Code, Driver, DriverHandle},
    image,
    kernel_table::KernelTable,
};
use crate::{
    device::{
        backend::{Arg, KernelDef, KernelSource, Launch},
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result},
    sync::{Deferred, Level, Mutex, MutexGuard, is_unlocked},
};

/// The dynamic shared memory that a launch may use without a change of the function's attribute.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

type Sizes = SmallVec<[usize; 16]>;

#[derive(Debug)]
pub(super) struct Kernels {
    /// `90` for `sm_90`.
    arch: u32,
    loaded: KernelTable<Loaded>,
    /// The outcome of each load, or a load in progress, by the kernel's number.
    attempts: Mutex<HashMap<usize, Attempt>>,
}

type Attempt = Arc<OnceLock<Result<()>>>;

#[derive(Debug)]
struct Loaded {
    module: DriverHandle<CUmod_st>,
    function: DriverHandle<CUfunc_st>,
    /// `None` if the driver does not report them (before CUDA 12.4).
    sizes: Option<Sizes>,
    /// The dynamic shared memory that launches may currently use.
    shared_bytes: AtomicU32,
    /// Held while `shared_bytes` grows.
    growing: Mutex<()>,
}

impl Kernels {
    pub(super) fn new(arch: u32) -> Self {
        Self { arch, loaded: KernelTable::new(), attempts: Mutex::at(Level::DriverObjects, HashMap::new()) }
    }

    pub(super) fn load(&self, cx: &Context, def: &'static KernelDef) -> Result<()> {
        self.find(cx, def).map(drop)
    }

    /// The loaded kernel. Loads it if necessary.
    #[inline]
    fn find(&self, cx: &Context, def: &'static KernelDef) -> Result<&Loaded> {
        let number = def.number.get();
        match self.loaded.get(number) {
            Some(loaded) => Ok(loaded),
            None => self.find_or_load(cx, def, number),
        }
    }

    #[cold]
    fn find_or_load(&self, cx: &Context, def: &'static KernelDef, number: usize) -> Result<&Loaded> {
        cx.enter()?;
        // Logs are deferred until the attempt has an outcome, as a subscriber might launch this kernel.
        let _later = is_unlocked().then(Deferred::new);
        let attempt = self.attempts().entry(number).or_default().clone();
        let outcome = attempt.get_or_init(|| {
            // Loading can make the driver wait for all work on the device.
            let name = def.name;
            DeviceThread::may_wait(|| format!("kernel `{name}` would be loaded, which waits for {},", cx.name))?;
            self.loaded.set(number, Loaded::new(cx, def, self.arch)?);
            Ok(())
        });
        if let Err(error) = outcome {
            if error.kind() != ErrorKind::Kernel {
                let mut attempts = self.attempts();
                // Only this attempt: another thread might have begun a new one.
                if attempts.get(&number).is_some_and(|there| Arc::ptr_eq(there, &attempt)) {
                    attempts.remove(&number);
                }
            }
            return Err(error.clone());
        }
        self.loaded
            .get(number)
            .ok_or_else(|| image::error(def, "was loaded but is not in the table: internal error (please report)"))
    }

    fn attempts(&self) -> MutexGuard<'_, HashMap<usize, Attempt>> {
        self.attempts.lock()
    }

    /// Finds a launch's function, loads it if necessary, and prepares its parameters for the driver. The context is
    /// current afterwards.
    #[inline]
    pub(super) fn prepare<'a>(&'a self, cx: &Context, launch: &'a Launch<'_>) -> Result<Prepared<'a>> {
        let loaded = self.find(cx, launch.kernel)?;
        cx.enter()?;
        if launch.shared_bytes > DEFAULT_SHARED_BYTES {
            loaded.grow_shared(cx, launch)?;
        }
        let mut params: SmallVec<[*mut c_void; 16]> = SmallVec::new();
        for arg in launch.args {
            match arg {
                Arg::Slice { address, len, .. } => {
                    params.push(ptr::from_ref(&address.0).cast_mut().cast());
                    params.push(ptr::from_ref(len).cast_mut().cast());
                }
                Arg::Scalar(scalar) => params.push(scalar.as_ptr().cast_mut().cast()),
            }
        }
        if let Some(sizes) = &loaded.sizes
            && !passed_sizes(launch.args).eq(sizes.iter().copied())
        {
            return Err(loaded.wrong_parameters(launch, sizes));
        }
        Ok(Prepared { loaded, launch, params })
    }

    /// # Safety
    /// The contract of [`Backend::launch`](crate::device::backend::Backend::launch).
    pub(super) unsafe fn launch(&self, cx: &Context, stream: CUstream, launch: &Launch<'_>) -> Result<()> {
        let mut prepared = self.prepare(cx, launch)?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the function belongs to this context and its module stays loaded. The caller guarantees that the
        // arguments are those of the declaration and stay valid; for the parameters see `Prepared`. The driver copies
        // them before it returns.
        let code = unsafe {
            (cx.driver.launch_kernel)(
                prepared.loaded.function.raw(),
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared_bytes,
                stream,
                prepared.params.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        prepared.check(cx, code, "cuLaunchKernel")
    }

    /// Unloads all modules. The context must be current and nothing may run.
    pub(super) fn close(&self, driver: &Driver) {
        for loaded in self.loaded.iter() {
            // SAFETY: loaded by `Loaded::new` and not used after this: the caller is the device's destructor, which
            // runs once and while no launch is in progress.
            let _ = unsafe { (driver.module_unload)(loaded.module.raw()) };
        }
    }
}

/// A launch prepared for the driver: a loaded function, and pointers to its parameters within the launch's arguments.
/// Their number and sizes are those of the function: a CUDA C++ body has its declaration's parameters or does not
/// compile, and for other bodies both were compared. The driver copies the values that they point to.
pub(super) struct Prepared<'a> {
    loaded: &'a Loaded,
    launch: &'a Launch<'a>,
    params: SmallVec<[*mut c_void; 16]>,
}

impl Prepared<'_> {
    /// The parameters of a graph's node. Valid as long as `self`.
    pub(super) fn node(&mut self) -> CUDA_KERNEL_NODE_PARAMS {
        let ([gx, gy, gz], [bx, by, bz]) = (self.launch.grid, self.launch.block);
        CUDA_KERNEL_NODE_PARAMS {
            func: self.loaded.function.raw(),
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: self.launch.shared_bytes,
            kernelParams: self.params.as_mut_ptr(),
            extra: ptr::null_mut(),
            // Used only without `func`.
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        }
    }

    #[inline]
    pub(super) fn check(&self, cx: &Context, code: Code, call: &str) -> Result<()> {
        if code.is_success() { Ok(()) } else { Err(failed(cx, self.launch, code, call)) }
    }
}

impl Loaded {
    fn new(cx: &Context, def: &'static KernelDef, arch: u32) -> Result<Self> {
        let image = image::of(def, arch)?;
        let driver = cx.enter()?;
        let module = load_module(cx, driver, def, &image)?;
        let found = Self::find(cx, driver, def, arch, &module);
        match found {
            Ok((function, sizes)) => Ok(Self {
                module,
                function,
                sizes,
                shared_bytes: AtomicU32::new(DEFAULT_SHARED_BYTES),
                growing: Mutex::at(Level::DriverObjects, ()),
            }),
            Err(error) => {
                if cx.lost().is_none() {
                    // SAFETY: loaded above, and no function of it is in use.
                    let _ = unsafe { (driver.module_unload)(module.raw()) };
                }
                Err(error)
            }
        }
    }

    fn find(
        cx: &Context,
        driver: &Driver,
        def: &KernelDef,
        arch: u32,
        module: &DriverHandle<CUmod_st>,
    ) -> Result<(DriverHandle<CUfunc_st>, Option<Sizes>)> {
        let name =
            CString::new(def.name).map_err(|_| image::error(def, "cannot be loaded: its name contains a NUL byte"))?;
        let mut function = ptr::null_mut();
        // SAFETY: a loaded module and a terminated name; `function` outlives the call, which writes one handle.
        let code = unsafe { (driver.module_get_function)(&mut function, module.raw(), name.as_ptr()) };
        if code == Code::NOT_FOUND {
            return Err(image::missing(def, arch));
        }
        cx.check(code, "cuModuleGetFunction")?;
        if let Some(load) = driver.func_load {
            // Loaded now and not at the first launch, as loading can wait for the device.
            // SAFETY: a function of a loaded module.
            cx.check(unsafe { load(function) }, "cuFuncLoad")?;
        }
        // Code that was compiled here was checked against its prototype; code compiled elsewhere was not.
        let made_before = !matches!(def.source, KernelSource::Cuda(_));
        let sizes = driver.func_get_param_info.filter(|_| made_before).and_then(|info| {
            let mut sizes = Sizes::new();
            loop {
                let (mut offset, mut size) = (0_usize, 0_usize);
                // SAFETY: a function of a loaded module; both results outlive the call. For an index past the last
                // parameter the driver returns "invalid value", which ends the loop.
                match unsafe { info(function, sizes.len(), &mut offset, &mut size) } {
                    Code::SUCCESS if sizes.len() < 4096 => sizes.push(size),
                    Code::INVALID_VALUE => return Some(sizes),
                    _ => return None,
                }
            }
        });
        Ok((DriverHandle::new(function), sizes))
    }

    /// Allows launches to use this much dynamic shared memory.
    fn grow_shared(&self, cx: &Context, launch: &Launch<'_>) -> Result<()> {
        let wanted = launch.shared_bytes;
        if wanted <= self.shared_bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        let _growing = self.growing.lock();
        if wanted <= self.shared_bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        // SAFETY: a function of a loaded module. The value only grows, under the lock above.
        let code = unsafe {
            (cx.driver.func_set_attribute)(
                self.function.raw(),
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                c_int::try_from(wanted).unwrap_or(c_int::MAX),
            )
        };
        if !code.is_success() {
            return Err(failed(cx, launch, code, "cuFuncSetAttribute"));
        }
        self.shared_bytes.store(wanted, Ordering::Release);
        Ok(())
    }

    #[cold]
    fn wrong_parameters(&self, launch: &Launch<'_>, sizes: &Sizes) -> Error {
        let passed: Sizes = passed_sizes(launch.args).collect();
        let text = format!(
            "takes parameters of {sizes:?} bytes in {}, but its declaration passes {passed:?} (a slice is a pointer \
             and a 64-bit length): make both agree",
            launch.kernel.file
        );
        image::error(launch.kernel, &text)
    }
}

/// The sizes of the parameters that are passed for the arguments.
fn passed_sizes(args: &[Arg<'_>]) -> impl Iterator<Item = usize> {
    args.iter().flat_map(|arg| {
        let (first, second) = match arg {
            Arg::Slice { .. } => (8, Some(8)),
            Arg::Scalar(scalar) => (scalar.len(), None),
        };
        [Some(first), second].into_iter().flatten()
    })
}

/// The error of a refused launch. Unless it is a fault of earlier work, it includes the launch's shape.
#[cold]
fn failed(cx: &Context, launch: &Launch<'_>, code: Code, call: &str) -> Error {
    let error = cx.fail(code, call);
    if error.is_device_lost() {
        return error;
    }
    error.at(format!(
        "kernel `{}`, grid {:?}, block {:?}, {} bytes of shared memory",
        launch.kernel.name, launch.grid, launch.block, launch.shared_bytes
    ))
}

fn load_module(cx: &Context, driver: &Driver, def: &KernelDef, image: &image::Image) -> Result<DriverHandle<CUmod_st>> {
    // The log of the driver's compiler, for PTX.
    let mut log = vec![0_u8; 16 * 1024];
    let mut options = [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
    let mut module = ptr::null_mut();
    // SAFETY: the image is machine code with a header that has its length, or terminated text (see `Image`). Two
    // options with their values: a buffer that outlives the call and, as a number in place of a pointer, its size.
    let code = unsafe {
        (driver.module_load_data_ex)(
            &mut module,
            image.as_ptr().cast(),
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if code.is_success() {
        return Ok(DriverHandle::new(module));
    }
    let error = cx.fail(code, "cuModuleLoadDataEx");
    if error.kind() != ErrorKind::Driver {
        return Err(error);
    }
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]);
    let text = format!("cannot be loaded from {}: {}\n{}", def.file, driver.describe(code), log.trim_end());
    Err(image::error(def, text.trim_end()).at(cx.name.clone()))
}
