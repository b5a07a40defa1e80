//! Page-locked host memory, kept until the device is closed.
//!
//! `cuMemFreeHost` waits for everything that the device has to do, a host function that is held included, and meanwhile
//! holds the driver's context: launches, copies, records of events, making and ending streams and events all wait with it,
//! on every thread (measured on an H200). So it is called neither by a drop nor by an ordinary allocation, and not by a
//! thread at their side either. Freed blocks become spares. They do not pile up:
//!
//! - sizes go by classes, so that few spares are of a size that is never asked for again;
//! - where more than [`KEPT`] bytes are spare, a larger one serves as well;
//! - where the host has no more to give, a larger one serves, too; if there is none, and the allocation would fail, all
//!   spares are given back, and that waits.
//!
//! A flow that runs again also finds its envelopes page-locked already.

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
    device::{host_memory, human, thread::DeviceThread},
    error::{Error, ErrorKind, Result},
    sync::{Mutex, MutexGuard, lock, log},
};

/// With more bytes of spares than this, larger ones are used, too.
const KEPT: usize = 256 << 20;
/// From here on a class is a multiple of this, and there are at most eight to a doubling; below, they are powers of two.
const STEP: usize = 2 << 20;

/// The page-locked memory of one device.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    /// Longest unused first.
    spares: Vec<Spare>,
    /// In use for less than their size.
    larger: Vec<Spare>,
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
        return bytes.next_power_of_two().max(256);
    }
    let step = ((1_usize << bytes.ilog2()) / 8).max(STEP);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl Blocks {
    /// A spare of this size, the one that was used last; or, where there is much to spare or `any` will do, the smallest that
    /// is larger.
    fn take(&mut self, bytes: usize, any: bool) -> Option<NonNull<u8>> {
        if let Some(at) = self.spares.iter().rposition(|spare| spare.bytes == bytes) {
            return Some(self.spares.remove(at).memory);
        }
        if !any && self.spares.iter().map(|spare| spare.bytes).sum::<usize>() <= KEPT {
            return None;
        }
        let larger = self.spares.iter().enumerate().filter(|(_, spare)| spare.bytes > bytes);
        let (at, _) = larger.min_by_key(|(_, spare)| spare.bytes)?;
        let spare = self.spares.remove(at);
        let memory = spare.memory;
        self.larger.push(spare);
        Some(memory)
    }

    fn put(&mut self, memory: NonNull<u8>, bytes: usize) {
        let larger = self.larger.iter().position(|block| block.memory == memory);
        let spare = larger.map_or(Spare { memory, bytes }, |at| self.larger.swap_remove(at));
        self.spares.push(spare);
    }
}

impl Pinned {
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        lock(&self.blocks)
    }

    /// Waits for the device only where the host has no more to give, and no spare is large enough.
    pub(super) fn alloc(&self, cx: &Context, bytes: usize) -> Result<NonNull<u8>> {
        let driver = cx.enter()?;
        let bytes = rounded(bytes);
        // No driver is asked: each refuses so much with another code.
        if host_memory().is_some_and(|most| bytes as u64 > most) {
            return Err(refused(cx, bytes));
        }
        if let Some(memory) = self.blocks().take(bytes, false) {
            return Ok(memory);
        }
        let mut code = Code::OUT_OF_MEMORY;
        let mut memory: *mut c_void = ptr::null_mut();
        for last in [false, true] {
            // SAFETY: `memory` outlives the call, which writes one pointer.
            code = unsafe { (driver.mem_host_alloc)(&mut memory, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
            if code != Code::OUT_OF_MEMORY || last {
                break;
            }
            if let Some(memory) = self.blocks().take(bytes, true) {
                return Ok(memory);
            }
            DeviceThread::may_wait(|| format!("page-locked memory of {} would wait for all of its work", cx.name))?;
            let all = std::mem::take(&mut self.blocks().spares);
            give_back(cx, driver, all)?;
        }
        // Of what is passed only the size can be an invalid value: to some drivers one beyond all reason is.
        if matches!(code, Code::OUT_OF_MEMORY | Code::INVALID_VALUE) {
            return Err(refused(cx, bytes));
        }
        cx.check(code, "cuMemHostAlloc")?;
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Driver, "cuMemHostAlloc gave no memory").at(cx.name.clone()))?;
        // SAFETY: `bytes` bytes that were allocated just now and that nobody else knows.
        unsafe { memory.write_bytes(0, bytes) };
        let device = cx.name.clone();
        log(move || tracing::trace!(%device, size = human::bytes(bytes as u64), "page-locked"));
        Ok(memory)
    }

    /// Never waits.
    ///
    /// # Safety
    /// As [`Backend::free_host`](crate::device::backend::Backend::free_host).
    pub(super) unsafe fn free(&self, memory: NonNull<u8>, bytes: usize) {
        self.blocks().put(memory, rounded(bytes));
    }

    /// Gives everything back, after the device has done all that it had to do. The context must be current.
    pub(super) fn close(&self, driver: &Driver) {
        for spare in std::mem::take(&mut self.blocks().spares) {
            // SAFETY: it came from `cuMemHostAlloc`, and the list was its only owner.
            let _ = unsafe { (driver.mem_free_host)(spare.memory.as_ptr().cast()) };
        }
    }
}

#[cold]
fn refused(cx: &Context, bytes: usize) -> Error {
    let has = host_memory().map(|most| format!(", which has {most} in all")).unwrap_or_default();
    let text =
        format!("asked for {bytes} bytes of page-locked memory of the host{has}: ask for less, or give some back");
    Error::new(ErrorKind::OutOfMemory, text).at(cx.name.clone())
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
        assert_eq!(rounded((64 << 20) + 1), 72 << 20);
        assert_eq!(rounded(usize::MAX), usize::MAX);
        // However they grow, there are few.
        let mut sizes: Vec<usize> = (1..=4096).map(|n| rounded(n << 20)).collect();
        sizes.dedup();
        assert!(sizes.len() < 8 * 12, "{} sizes up to 4 GiB", sizes.len());
    }

    fn block(at: usize) -> NonNull<u8> {
        NonNull::dangling().map_addr(|start| start.saturating_add(at << 32))
    }

    fn blocks(sizes: &[usize]) -> Blocks {
        let spares = sizes.iter().enumerate().map(|(at, bytes)| Spare { memory: block(at), bytes: *bytes });
        Blocks { spares: spares.collect(), larger: Vec::new() }
    }

    #[test]
    fn one_of_the_same_size_serves_and_the_last_used_first() {
        let mut few = blocks(&[4, 8, 4]);
        assert_eq!(few.take(4, false), Some(block(2)));
        assert_eq!(few.take(4, false), Some(block(0)));
        assert_eq!(few.take(4, false), None);
        assert_eq!(few.take(16, true), None);
    }

    #[test]
    fn where_much_is_spare_a_larger_one_serves_and_is_known_again() {
        let mut much = blocks(&[KEPT, 16, 8]);
        assert_eq!(much.take(4, false), Some(block(2)));
        assert_eq!(much.take(KEPT + 1, false), None);
        much.put(block(2), 4);
        assert_eq!(much.spares.last().map(|spare| spare.bytes), Some(8));
        assert!(much.larger.is_empty());
        // Little is spare, and the host has no more.
        let mut few = blocks(&[16, 8]);
        assert_eq!(few.take(4, false), None);
        assert_eq!(few.take(4, true), Some(block(1)));
    }
}
