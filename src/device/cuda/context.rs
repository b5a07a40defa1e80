//! A device's context, and the meaning of the driver's result codes.
//!
//! Every call has three steps: `enter`, which fails if the device is lost and makes its context current on this thread
//! (or, on a message's path, `call_without_context`, which leaves the current context unchanged); the driver's
//! function; `check`. Unless something fails, none of them locks or allocates.
//!
//! ```text
//!           a call returns the code of a fault
//!  healthy ──────────────────────────────────────▶ lost        permanent
//! ```
//!
//! **After a fault.** The driver reports a fault late and only when called: a kernel's trap is reported half a second
//! later by the next call, such as a query, and from then on by every call on the context. The process cannot recover:
//! the primary context cannot be retained again even after a reset. So the first code that means a fault is stored, and
//! from then on every call on this device fails with it at once, on all threads, without calling the driver; `open`
//! fails as well. Host functions that were enqueued and will never be called are dropped at once, on a separate thread.
//! The device's resources (memory, streams, events, modules, the context itself) are leaked: the process should report
//! the error and exit, and be started again.
//!
//! Whether other devices of the process are lost as well depends on the driver. After a kernel's fault they are: calls
//! on their contexts return its code too, including calls that do not involve the faulty device (two H200s, driver
//! 580.159.04; the driver's documentation of `CUDA_ERROR_LAUNCH_FAILED`: "This leaves the process in an inconsistent
//! state"). The result of a call that uses two devices does not say which of them failed, so a context counts as lost
//! only if calls that use no other context fail ([`is_faulty`](Context::is_faulty)).

use std::{
    ffi::c_int,
    mem,
    sync::{Arc, OnceLock},
    thread,
};

use cudarc::driver::{
    CudaContext,
    sys::{CUctx_st, CUdevice},
};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{
    driver::{Code, Driver, DriverHandle},
    host,
};
use crate::{
    device::{
        backend::{LossHandler, RawStream},
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result},
    sync::{Mutex, lock},
};

/// The devices that were lost in this process, by ordinal.
static LOST: Mutex<FxHashMap<usize, Error>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

pub(super) struct Context {
    pub(super) driver: &'static Driver,
    /// `cuda:0`
    pub(super) name: String,
    pub(super) device: CUdevice,
    /// Identifies this opening of the device, as the owner of host functions.
    pub(super) owner: host::FunctionOwner,
    ordinal: usize,
    raw: DriverHandle<CUctx_st>,
    primary: Arc<CudaContext>,
    lost: OnceLock<Error>,
    /// The functions to call, once, with the fault.
    loss_handlers: Arc<Mutex<Vec<LossHandler>>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("name", &self.name).field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Context {
    /// Retains the primary context of the device with this ordinal.
    pub(super) fn open(driver: &'static Driver, ordinal: usize) -> Result<Self> {
        if let Some(error) = lock(&LOST).get(&ordinal) {
            return Err(error.clone());
        }
        let name = format!("cuda:{ordinal}");
        let unusable = |code: Code, call: &str| {
            let kind = if code == Code::OUT_OF_MEMORY { ErrorKind::OutOfMemory } else { ErrorKind::NoDevice };
            let what = driver.describe(code);
            Error::new(kind, format!("the device cannot be opened: {call}: {what}")).at(name.clone())
        };
        let count = driver.device_count()?;
        let index = match c_int::try_from(ordinal) {
            Ok(index) if ordinal < count => index,
            _ => {
                let s = if count == 1 { "" } else { "s" };
                return Err(Error::new(
                    ErrorKind::NoDevice,
                    format!("{name} does not exist: the driver shows {count} device{s} (see CUDA_VISIBLE_DEVICES)"),
                ));
            }
        };
        let mut device: CUdevice = 0;
        // SAFETY: `device` outlives the call, which writes one int.
        let code = unsafe { (driver.device_get)(&mut device, index) };
        if !code.is_success() {
            return Err(unusable(code, "cuDeviceGet"));
        }
        // Briefly retained twice: cudarc reads results as an enum of the codes that it knows, so failures (a busy
        // device, no memory, a code of a newer driver) must occur in this call and not in cudarc's.
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call, which writes one pointer; `device` is the driver's.
        let code = unsafe { (driver.primary_ctx_retain)(&mut raw, device) };
        if !code.is_success() {
            return Err(unusable(code, "cuDevicePrimaryCtxRetain"));
        }
        let primary = CudaContext::new(ordinal);
        // SAFETY: this releases the one reference that was taken above; if cudarc has one too, the context stays alive.
        let _ = unsafe { (driver.primary_ctx_release)(device) };
        let primary = primary.map_err(|error| unusable(Code(error.0 as u32), "cuDevicePrimaryCtxRetain"))?;
        // SAFETY: cudarc's tracking creates events that order accesses to its own slices. There are none yet, and
        // wakeline orders all accesses itself.
        unsafe { primary.disable_event_tracking() };
        let raw = DriverHandle::new(primary.cu_ctx());
        Ok(Self {
            driver,
            name,
            device,
            owner: host::FunctionOwner::new(),
            ordinal,
            raw,
            primary,
            lost: OnceLock::new(),
            loss_handlers: Arc::default(),
        })
    }

    pub(super) fn primary(&self) -> &Arc<CudaContext> {
        &self.primary
    }

    pub(super) fn raw(&self) -> *mut CUctx_st {
        self.raw.raw()
    }

    /// Begins a call: fails at once if the device is lost, and otherwise makes its context current on the calling
    /// thread.
    #[inline]
    pub(super) fn enter(&self) -> Result<&'static Driver> {
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        host::may_call_driver()?;
        // SAFETY: `raw` is the primary context that `primary` keeps alive.
        let code = unsafe { (self.driver.ctx_set_current)(self.raw.raw()) };
        self.check(code, "cuCtxSetCurrent")?;
        Ok(self.driver)
    }

    /// Makes a call that is known to need no current context: `cuEventQuery`, and `cuEventRecord` and
    /// `cuStreamWaitEvent` on a created stream (tested on a thread without a context, driver 580.159.04). If a driver
    /// requires a current context, the call is repeated with one. The default stream belongs to the current context, so
    /// it needs `enter`.
    #[inline]
    pub(super) fn call_without_context(
        &self,
        stream: Option<RawStream>,
        call: impl Fn(&'static Driver) -> Code,
    ) -> Result<Code> {
        match self.lost.get() {
            Some(error) => return Err(error.clone()),
            None if stream == Some(RawStream::DEFAULT) => return self.enter().map(call),
            None => host::may_call_driver()?,
        }
        match call(self.driver) {
            Code::INVALID_CONTEXT => self.enter().map(call),
            code => Ok(code),
        }
    }

    #[inline]
    pub(super) fn check(&self, code: Code, call: &str) -> Result<()> {
        if code.is_success() { Ok(()) } else { Err(self.fail(code, call)) }
    }

    /// Converts the result of a query: true if the work is done, false if it is not.
    #[inline]
    pub(super) fn check_ready(&self, code: Code, call: &str) -> Result<bool> {
        match code {
            Code::SUCCESS => Ok(true),
            Code::NOT_READY => Ok(false),
            code => Err(self.fail(code, call)),
        }
    }

    /// The error for `code`. If it means a fault of this device, the device is lost from here on.
    #[cold]
    pub(super) fn fail(&self, code: Code, call: &str) -> Error {
        let what = self.driver.describe(code);
        match kind(code) {
            // The code "unknown" is a fault if it persists.
            _ if code == Code::UNKNOWN && self.is_faulty() => self.mark_lost(&what, call),
            // A call that also uses another device (a wait, a copy, a graph launch) can report the other device's
            // fault.
            ErrorKind::DeviceLost if self.is_faulty() => self.mark_lost(&what, call),
            ErrorKind::DeviceLost => {
                let text =
                    format!("{what}, reported by {call}: another device that the call uses is lost, but not this one");
                Error::new(ErrorKind::DeviceLost, text).at(self.name.clone())
            }
            ErrorKind::OutOfMemory => {
                let numbers = match self.memory_info() {
                    Ok((free, total)) => format!("{free} of {total} bytes are free"),
                    Err(_) => "the driver does not say how much is free".into(),
                };
                Error::new(ErrorKind::OutOfMemory, format!("{call}: {what}; {numbers}")).at(self.name.clone())
            }
            kind => Error::new(kind, format!("{call}: {what}")).at(self.name.clone()),
        }
    }

    /// True if a fault has ended this context. A fault persists, and `cuMemGetInfo`, which uses only the current
    /// context, returns its code from then on, even if no other call has reported it yet (H200, driver 580.159.04:
    /// traps, illegal and misaligned addresses, assertions). The context is made current first: after
    /// [`call_without_context`](Self::call_without_context), another device's context might be current.
    #[cold]
    fn is_faulty(&self) -> bool {
        if self.lost.get().is_some() {
            return true;
        }
        // SAFETY: `raw` is the primary context that `primary` keeps alive.
        let current = unsafe { (self.driver.ctx_set_current)(self.raw.raw()) };
        !current.is_success() || self.memory_info().is_err()
    }

    fn mark_lost(&self, what: &str, call: &str) -> Error {
        let mut first = false;
        let error = self.lost.get_or_init(|| {
            first = true;
            let text = format!(
                "{what}, reported by {call}; all work on the device is lost, and this process cannot use it again: start a \
                 new process"
            );
            Error::new(ErrorKind::DeviceLost, text).at(self.name.clone())
        });
        lock(&LOST).entry(self.ordinal).or_insert_with(|| error.clone());
        if first {
            // After `lost` is set, so that a function that is enqueued concurrently is either dropped here or fails
            // with the loss. On a separate thread, as the caller can hold locks that a user's destructor needs.
            let (owner, loss_handlers, fault) = (self.owner, self.loss_handlers.clone(), error.clone());
            let thread = thread::Builder::new().name(format!("{} is lost", self.name));
            let notified = thread.spawn(move || {
                // The wakers of all streams are called here, one after the other.
                let _device = DeviceThread::enter();
                // A task might be waiting for work that no further call will query, and the result that reported the
                // fault might have been ignored, such as when an event is destroyed.
                let loss_handlers = std::mem::take(&mut *lock(&loss_handlers));
                loss_handlers.iter().for_each(|handler| handler(fault.clone()));
                host::drop_all(owner);
            });
            if notified.is_err() {
                host::drop_all(owner);
            }
        }
        error.clone()
    }

    /// See [`Backend::when_lost`](crate::device::backend::Backend::when_lost).
    pub(super) fn when_lost(&self, handler: LossHandler) {
        lock(&self.loss_handlers).push(handler);
    }

    pub(super) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    /// The driver's free and total bytes. The context must be current.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), Code> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both outlive the call, which writes one `size_t` to each.
        let code = unsafe { (self.driver.mem_get_info)(&mut free, &mut total) };
        if code.is_success() { Ok((free as u64, total as u64)) } else { Err(code) }
    }

    /// Leaks the context, after a fault or where the driver must not be called.
    pub(super) fn leak(&self) {
        mem::forget(Arc::clone(&self.primary));
    }
}

/// The kind of failure that a code alone indicates.
fn kind(code: Code) -> ErrorKind {
    match code.0 {
        2 => ErrorKind::OutOfMemory,
        // The driver or the context was destroyed: DEINITIALIZED, CONTEXT_IS_DESTROYED.
        4 | 709 => ErrorKind::DeviceLost,
        // Hardware errors: ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED.
        214 | 220 | 226 => ErrorKind::DeviceLost,
        // A kernel's faults: ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION,
        // MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK.
        700 | 702 | 710 | 714..=719 | 721 => ErrorKind::DeviceLost,
        // Faults of the server that shares the device: MPS_RPC_FAILURE, MPS_CLIENT_TERMINATED.
        806 | 810 => ErrorKind::DeviceLost,
        _ => ErrorKind::Driver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_distinguished_from_failures() {
        for fault in [214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
            assert_eq!(kind(Code(fault)), ErrorKind::DeviceLost, "{fault}");
        }
        // Launch too large, cooperative launch too large, not found, capture errors, unknown: the device stays usable.
        for failure in [1, 400, 500, 701, 720, 800, 900, 999, 123_456] {
            assert_eq!(kind(Code(failure)), ErrorKind::Driver, "{failure}");
        }
        assert_eq!(kind(Code::OUT_OF_MEMORY), ErrorKind::OutOfMemory);
    }
}
