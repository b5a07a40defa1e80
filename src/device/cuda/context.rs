//! A device's context, and what its driver's answers mean.
//!
//! Every call goes `enter` (is the device lost? then make its context this thread's) or, on a message's path, `lightly`
//! (which leaves the context as it is), the driver, `check`. All of it is
//! free of locks and of allocation as long as nothing fails.
//!
//! ```text
//!           a call answers with a code of a fault
//!  healthy ──────────────────────────────────────▶ lost        there is no way back
//! ```
//!
//! **After a fault.** The driver tells of a fault late and only to who asks: a kernel that traps is reported half a
//! second later by whichever call comes next, a query for instance, and from then on by every call on the context.
//! Nothing mends it within the process: the primary context cannot be retained again even after a reset. So the first
//! answer that means a fault is kept, and from then on every call of this device fails with it at once, without asking
//! the driver, also calls of other threads, and `open` does too. The host functions that will never be called now are
//! dropped at once, on a thread of their own. What the device had (memory, streams, events, modules, the context itself) is leaked: the
//! process should report and end, and a new one start.
//!
//! Whether the process's other devices are lost with it is the driver's affair. With a kernel's fault they are: from then on
//! calls on their contexts answer with its code too, also those that name nothing of the faulty device (two H200s, driver
//! 580.159.04; the driver's documentation of `CUDA_ERROR_LAUNCH_FAILED`: "This leaves the process in an inconsistent state").
//! An answer that names two devices does not say which of them it is about, so a context is lost only if calls that name
//! nothing but that context fail ([`is_faulty`](Context::is_faulty)).

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
    driver::{Code, Driver, Handle},
    host,
};
use crate::{
    device::{
        backend::{RawStream, TellsOfLoss},
        thread::DeviceThread,
    },
    error::{Error, ErrorKind, Result},
    sync::{Mutex, lock},
};

/// Devices that a fault has ended in this process, by ordinal.
static LOST: Mutex<FxHashMap<usize, Error>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

/// The primary context of one device.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    /// `cuda:0`
    pub(super) name: String,
    pub(super) device: CUdevice,
    /// Whose host functions: this opening of the device.
    pub(super) owner: host::Owner,
    ordinal: usize,
    raw: Handle<CUctx_st>,
    primary: Arc<CudaContext>,
    lost: OnceLock<Error>,
    /// Called once with the fault.
    tells: Arc<Mutex<Vec<TellsOfLoss>>>,
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
            return Err(error.again());
        }
        let name = format!("cuda:{ordinal}");
        let unusable = |code: Code, call: &str| {
            let kind = if code == Code::OUT_OF_MEMORY { ErrorKind::OutOfMemory } else { ErrorKind::NoDevice };
            let what = driver.describe(code);
            Error::new(kind, format!("it cannot be opened: {call}: {what}")).at(name.clone())
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
        // Retained twice for a moment: cudarc reads answers as an enum of the codes that it knows, so whatever may fail
        // here (a busy device, no memory, a code of a newer driver) fails in this call and not in cudarc's.
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` outlives the call, which writes one pointer; `device` is the driver's.
        let code = unsafe { (driver.primary_ctx_retain)(&mut raw, device) };
        if !code.is_success() {
            return Err(unusable(code, "cuDevicePrimaryCtxRetain"));
        }
        let primary = CudaContext::new(ordinal);
        // SAFETY: it gives back the one reference that was taken above; where cudarc has one too, the context lives on.
        let _ = unsafe { (driver.primary_ctx_release)(device) };
        let primary = primary.map_err(|error| unusable(Code(error.0 as u32), "cuDevicePrimaryCtxRetain"))?;
        // SAFETY: cudarc's tracking makes events that order its own slices. There are none yet, and wakeline orders all
        // accesses itself.
        unsafe { primary.disable_event_tracking() };
        let raw = Handle::new(primary.cu_ctx());
        Ok(Self {
            driver,
            name,
            device,
            owner: host::Owner::new(),
            ordinal,
            raw,
            primary,
            lost: OnceLock::new(),
            tells: Arc::default(),
        })
    }

    /// As cudarc has it.
    pub(super) fn primary(&self) -> &Arc<CudaContext> {
        &self.primary
    }

    pub(super) fn raw(&self) -> *mut CUctx_st {
        self.raw.raw()
    }

    /// Begins a call: an error at once if the device is lost, else its context is the calling thread's.
    #[inline]
    pub(super) fn enter(&self) -> Result<&'static Driver> {
        if let Some(error) = self.lost.get() {
            return Err(error.again());
        }
        host::may_call_driver()?;
        // SAFETY: `raw` is the primary context that `primary` keeps alive.
        let code = unsafe { (self.driver.ctx_set_current)(self.raw.raw()) };
        self.check(code, "cuCtxSetCurrent")?;
        Ok(self.driver)
    }

    /// Makes a call that needs no current context, as far as is known: `cuEventQuery`, and `cuEventRecord` and
    /// `cuStreamWaitEvent` on a stream that was made (tried on a thread without a context, driver 580.159.04). A driver
    /// that wants one all the same is given it. The default stream is that of the current context.
    #[inline]
    pub(super) fn lightly(&self, stream: Option<RawStream>, call: impl Fn(&'static Driver) -> Code) -> Result<Code> {
        match self.lost.get() {
            Some(error) => return Err(error.again()),
            None if stream == Some(RawStream::DEFAULT) => return self.enter().map(call),
            None => host::may_call_driver()?,
        }
        match call(self.driver) {
            Code::INVALID_CONTEXT => self.enter().map(call),
            code => Ok(code),
        }
    }

    /// Ends a call: what the driver answered.
    #[inline]
    pub(super) fn check(&self, code: Code, call: &str) -> Result<()> {
        if code.is_success() { Ok(()) } else { Err(self.fail(code, call)) }
    }

    /// Ends a query: true for done, false for not ready.
    #[inline]
    pub(super) fn check_ready(&self, code: Code, call: &str) -> Result<bool> {
        match code {
            Code::SUCCESS => Ok(true),
            Code::NOT_READY => Ok(false),
            code => Err(self.fail(code, call)),
        }
    }

    /// The error that `code` means. If it means a fault of this device, that is lost from here on.
    #[cold]
    pub(super) fn fail(&self, code: Code, call: &str) -> Error {
        let what = self.driver.describe(code);
        match kind(code) {
            // The driver's "unknown" is a fault if it stays.
            _ if code == Code::UNKNOWN && self.is_faulty() => self.lose(&what, call),
            // A call that names another device (a wait, a copy, a graph's launch) may answer with that one's fault.
            ErrorKind::DeviceLost if self.is_faulty() => self.lose(&what, call),
            ErrorKind::DeviceLost => {
                let text =
                    format!("{what}, reported by {call}: another device that it uses is lost, and this one is not");
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

    /// Whether a fault has ended this context. A fault stays, and `cuMemGetInfo`, which names nothing but the current context,
    /// answers with its code from then on, also where no other call has reported it yet (H200, driver 580.159.04: traps,
    /// illegal and misaligned addresses, assertions). The context is made current first: calls that are made
    /// [lightly](Self::lightly) leave that of another device.
    #[cold]
    fn is_faulty(&self) -> bool {
        if self.lost.get().is_some() {
            return true;
        }
        // SAFETY: `raw` is the primary context that `primary` keeps alive.
        let current = unsafe { (self.driver.ctx_set_current)(self.raw.raw()) };
        !current.is_success() || self.memory_info().is_err()
    }

    fn lose(&self, what: &str, call: &str) -> Error {
        let mut first = false;
        let error = self.lost.get_or_init(|| {
            first = true;
            let text = format!(
                "{what}, reported by {call}; all its work is lost and it takes no more in this process: start a new one"
            );
            Error::new(ErrorKind::DeviceLost, text).at(self.name.clone())
        });
        lock(&LOST).entry(self.ordinal).or_insert_with(|| error.again());
        if first {
            // After `lost` is set, so that a function that is enqueued meanwhile is either seen there or sees that itself.
            // Whoever has met the fault may hold locks that a destructor of the user's asks for.
            let (owner, tells, fault) = (self.owner, self.tells.clone(), error.again());
            let thread = thread::Builder::new().name(format!("{} is lost", self.name));
            let told = thread.spawn(move || {
                // One waker after the other is called here, of all streams.
                let _device = DeviceThread::enter();
                // Whoever waits may do so for what no further call asks about: the answer that told of the fault may have
                // gone unread, as where an event is destroyed.
                let tells = std::mem::take(&mut *lock(&tells));
                tells.iter().for_each(|tell| tell(fault.again()));
                host::drop_all(owner);
            });
            if told.is_err() {
                host::drop_all(owner);
            }
        }
        error.again()
    }

    /// See [`Backend::when_lost`](crate::device::backend::Backend::when_lost).
    pub(super) fn when_lost(&self, tell: TellsOfLoss) {
        lock(&self.tells).push(tell);
    }

    /// The fault that ended the device, if one has.
    pub(super) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    /// Free and total bytes as the driver sees them. The context must be current.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), Code> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both outlive the call, which writes one `size_t` to each.
        let code = unsafe { (self.driver.mem_get_info)(&mut free, &mut total) };
        if code.is_success() { Ok((free as u64, total as u64)) } else { Err(code) }
    }

    /// Keeps the context for ever: after a fault, or where the driver may not be called.
    pub(super) fn leak(&self) {
        mem::forget(Arc::clone(&self.primary));
    }
}

/// What kind of failure a code is, by itself.
fn kind(code: Code) -> ErrorKind {
    match code.0 {
        2 => ErrorKind::OutOfMemory,
        // The driver or the context is gone: DEINITIALIZED, CONTEXT_IS_DESTROYED.
        4 | 709 => ErrorKind::DeviceLost,
        // The hardware: ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED.
        214 | 220 | 226 => ErrorKind::DeviceLost,
        // A kernel: ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION,
        // MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK.
        700 | 702 | 710 | 714..=719 | 721 => ErrorKind::DeviceLost,
        // The server that shares the device: MPS_RPC_FAILURE, MPS_CLIENT_TERMINATED.
        806 | 810 => ErrorKind::DeviceLost,
        _ => ErrorKind::Driver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_told_from_failures() {
        for fault in [214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719] {
            assert_eq!(kind(Code(fault)), ErrorKind::DeviceLost, "{fault}");
        }
        // Launch too large, cooperative launch too large, not found, capture errors, unknown: the device lives on.
        for failure in [1, 400, 500, 701, 720, 800, 900, 999, 123_456] {
            assert_eq!(kind(Code(failure)), ErrorKind::Driver, "{failure}");
        }
        assert_eq!(kind(Code::OUT_OF_MEMORY), ErrorKind::OutOfMemory);
    }
}
