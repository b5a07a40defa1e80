//! Page-locked host memory, kept for the next who asks.
//!
//! `cuMemFreeHost` waits for everything that the device has to do (measured on an H200: while a host function held up one
//! stream, it did not return), and a drop must not wait. So freed blocks become spares, and only an allocation, which
//! may block, gives spares back to the driver: when it finds none that fits and there are too many, or when memory runs
//! out. A flow that runs again also finds its envelopes page-locked already.

use std::{
    ffi::c_void,
    ptr::{self, NonNull},
};

use cudarc::driver::sys;

use super::{
    context::Context,
    driver::{Code, Driver},
};
use crate::{
    device::{host_memory, human},
    error::{Error, ErrorKind, Result},
    sync::Mutex,
};

/// Bytes of spares that an allocation leaves alone.
const KEPT: usize = 256 << 20;
/// From here on sizes go by steps of this; below, by powers of two.
const STEP: usize = 2 << 20;

/// The page-locked memory of one device.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// Longest unused first.
    spares: Mutex<Vec<Spare>>,
}

#[derive(Debug)]
struct Spare {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a spare is owned by the list alone, and nothing is read or written through it.
unsafe impl Send for Spare {}

/// What is allocated for so many bytes.
fn rounded(bytes: usize) -> usize {
    if bytes <= STEP {
        bytes.next_power_of_two().max(256)
    } else {
        bytes.checked_next_multiple_of(STEP).unwrap_or(bytes)
    }
}

/// The spares to give back so that no more than `kept` bytes are left: how many, from the front.
fn surplus(spares: &[Spare], kept: usize) -> usize {
    let mut left: usize = spares.iter().map(|spare| spare.bytes).sum();
    let too_many = spares.iter().take_while(|spare| {
        let over = left > kept;
        left -= spare.bytes;
        over
    });
    too_many.count()
}

impl Pinned {
    pub(super) fn alloc(&self, cx: &Context, bytes: usize) -> Result<NonNull<u8>> {
        let driver = cx.enter()?;
        let bytes = rounded(bytes);
        let mut spares = self.spares.lock();
        if let Some(at) = spares.iter().rposition(|spare| spare.bytes == bytes) {
            return Ok(spares.remove(at).memory);
        }
        let count = surplus(&spares, KEPT);
        let given_up: Vec<Spare> = spares.drain(..count).collect();
        drop(spares);
        give_back(cx, driver, given_up)?;

        let mut code = Code::OUT_OF_MEMORY;
        let mut memory: *mut c_void = ptr::null_mut();
        for last in [false, true] {
            // SAFETY: `memory` outlives the call, which writes one pointer.
            code = unsafe { (driver.mem_host_alloc)(&mut memory, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
            if code != Code::OUT_OF_MEMORY || last {
                break;
            }
            let all = std::mem::take(&mut *self.spares.lock());
            give_back(cx, driver, all)?;
        }
        // Numbers beyond all reason are an invalid value to some drivers.
        let beyond = code == Code::INVALID_VALUE && host_memory().is_none_or(|most| bytes as u64 > most);
        if code == Code::OUT_OF_MEMORY || beyond {
            let text = format!("asked for {bytes} bytes of page-locked host memory, and the host does not give them");
            return Err(Error::new(ErrorKind::OutOfMemory, text).at(cx.name.clone()));
        }
        cx.check(code, "cuMemHostAlloc")?;
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemHostAlloc gave no memory").at(cx.name.clone()))?;
        // SAFETY: `bytes` bytes that were allocated just now and that nobody else knows.
        unsafe { memory.write_bytes(0, bytes) };
        tracing::trace!(device = %cx.name, size = human::bytes(bytes as u64), "page-locked");
        Ok(memory)
    }

    /// Never waits.
    ///
    /// # Safety
    /// As [`Backend::free_host`](crate::device::backend::Backend::free_host).
    pub(super) unsafe fn free(&self, memory: NonNull<u8>, bytes: usize) {
        let spare = Spare { memory, bytes: rounded(bytes) };
        self.spares.lock().push(spare);
    }

    /// Gives everything back. The context must be current.
    pub(super) fn close(&self, driver: &Driver) {
        for spare in std::mem::take(&mut *self.spares.lock()) {
            // SAFETY: it came from `cuMemHostAlloc`, and the list was its only owner.
            let _ = unsafe { (driver.mem_free_host)(spare.memory.as_ptr().cast()) };
        }
    }
}

fn give_back(cx: &Context, driver: &Driver, spares: Vec<Spare>) -> Result<()> {
    for spare in spares {
        // SAFETY: it came from `cuMemHostAlloc`, and the list was its only owner.
        cx.check(unsafe { (driver.mem_free_host)(spare.memory.as_ptr().cast()) }, "cuMemFreeHost")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_few_and_never_too_small() {
        assert_eq!(rounded(1), 256);
        assert_eq!(rounded(4096), 4096);
        assert_eq!(rounded(5000), 8192);
        assert_eq!(rounded(STEP), STEP);
        assert_eq!(rounded(STEP + 1), 2 * STEP);
        assert_eq!(rounded(5 * STEP), 5 * STEP);
        assert_eq!(rounded(usize::MAX), usize::MAX);
    }

    #[test]
    fn only_what_is_too_much_goes_and_the_longest_unused_first() {
        let spares = |sizes: &[usize]| -> Vec<Spare> {
            sizes.iter().map(|bytes| Spare { memory: NonNull::dangling(), bytes: *bytes }).collect()
        };
        assert_eq!(surplus(&[], 10), 0);
        assert_eq!(surplus(&spares(&[4, 4]), 10), 0);
        assert_eq!(surplus(&spares(&[4, 4, 4]), 10), 1);
        assert_eq!(surplus(&spares(&[20]), 10), 1);
        assert_eq!(surplus(&spares(&[4, 20]), 10), 2);
    }
}
