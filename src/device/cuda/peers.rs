//! Copies between two CUDA devices of one process.
//!
//! With unified addressing `cuMemcpyAsync` determines both ends of a copy, but memory of a pool is accessible from
//! another device only if the pool grants access. So when a device is opened, it and every other open device grant each
//! other access, if the hardware supports peer access ([`connect`]). If it does not for some pair, copies between
//! devices must name the context of each end, and the driver routes the bytes through the host; only then are the
//! devices of each copy looked up ([`contexts`]). With one device, or if all devices can access each other, the check
//! costs one relaxed load.

use std::{
    ffi::c_int,
    ptr,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys::{CUcontext, CUctx_st, CUdevice, CUpointer_attribute};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::{
    context::Context,
    driver::{Driver, DriverHandle},
    memory::DriverMemory,
};
use crate::{device::backend::Address, error::Result};

/// Set once two devices without peer access have been open at the same time.
static WITHOUT_PEER_ACCESS: AtomicBool = AtomicBool::new(false);

/// The contexts of the open devices, each with the number of backends that use it (briefly two while a backend replaces
/// another).
static OPEN: RwLock<FxHashMap<CUdevice, (DriverHandle<CUctx_st>, usize)>> =
    RwLock::new(FxHashMap::with_hasher(FxBuildHasher));

pub(super) fn register(cx: &Context) {
    let mut open = OPEN.write().unwrap_or_else(PoisonError::into_inner);
    open.entry(cx.device).or_insert_with(|| (DriverHandle::new(cx.raw()), 0)).1 += 1;
}

pub(super) fn unregister(cx: &Context) {
    let mut open = OPEN.write().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, count)) = open.get_mut(&cx.device) {
        *count -= 1;
        if *count == 0 {
            open.remove(&cx.device);
        }
    }
}

/// Grants two devices access to each other's memory, or records that the hardware does not support peer access.
pub(super) fn connect(a: (&Context, &DriverMemory), b: (&Context, &DriverMemory)) -> Result<()> {
    let reaches = |from: &Context, to: &Context| {
        let mut can: c_int = 0;
        // SAFETY: `can` outlives the call, which writes one int.
        let code = unsafe { (from.driver.device_can_access_peer)(&mut can, from.device, to.device) };
        code.is_success() && can != 0
    };
    if reaches(a.0, b.0) && reaches(b.0, a.0) {
        a.1.grant_access(a.0, b.0.device)?;
        b.1.grant_access(b.0, a.0.device)
    } else {
        WITHOUT_PEER_ACCESS.store(true, Ordering::Release);
        Ok(())
    }
}

/// The contexts of both ends of a copy, if the copy must name them.
#[inline]
pub(super) fn contexts(driver: &Driver, to: Address, from: Address) -> Option<(CUcontext, CUcontext)> {
    if WITHOUT_PEER_ACCESS.load(Ordering::Relaxed) { look_up(driver, to, from) } else { None }
}

#[cold]
fn look_up(driver: &Driver, to: Address, from: Address) -> Option<(CUcontext, CUcontext)> {
    let device = |address: Address| {
        let mut device: c_int = -1;
        // SAFETY: this attribute is an int, which the driver writes to `device` during the call; it does not access the
        // memory at the address.
        let code = unsafe {
            (driver.pointer_get_attribute)(
                ptr::from_mut(&mut device).cast(),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                address.0,
            )
        };
        code.is_success().then_some(device)
    };
    let (to, from) = (device(to)?, device(from)?);
    if to == from {
        return None;
    }
    let open = OPEN.read().unwrap_or_else(PoisonError::into_inner);
    Some((open.get(&to)?.0.raw(), open.get(&from)?.0.raw()))
}
