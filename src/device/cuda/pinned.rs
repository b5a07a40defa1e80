//! Page-locked host memory, kept until the device is closed.
//!
//! `cuMemFreeHost` waits for all work on the device, including host functions that block, and locks the driver's
//! context while it waits: launches, copies, event records, and the creation and destruction of streams and events
//! block on every thread (measured on an H200). So it is called neither by a drop, nor by an ordinary allocation, nor
//! by a background thread. Freed blocks become spares. They do not accumulate:
//!
//! - sizes are rounded up to classes, so that few spares have a size that is never requested again;
//! - if there are more than [`MAX_SPARE_BYTES`] bytes of spares, an allocation can use a larger one;
//! - if the host is out of memory, an allocation can also use a larger one. If there is none, all spares are freed,
//!   which waits for the device, and the allocation is retried.
//!
//! A flow that runs again also reuses its page-locked envelopes.

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

/// With more bytes of spares than this, an allocation can use a larger spare.
const MAX_SPARE_BYTES: usize = 256 << 20;
/// Size classes above this size are multiples of it, at most eight per doubling; size classes below are powers of two.
const STEP: usize = 2 << 20;

#[derive(Debug, Default)]
pub(super) struct Pinned {
    blocks: Mutex<PinnedBlocks>,
}

#[derive(Debug, Default)]
struct PinnedBlocks {
    /// Free blocks, least recently used first.
    spares: Vec<PinnedBlock>,
    /// Blocks in use for allocations that are smaller than the block.
    larger: Vec<PinnedBlock>,
}

#[derive(Debug)]
struct PinnedBlock {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: only the list owns a block, and nothing is read or written through it.
unsafe impl Send for PinnedBlock {}

fn size_class(bytes: usize) -> usize {
    if bytes <= STEP {
        return bytes.next_power_of_two().max(256);
    }
    let step = ((1_usize << bytes.ilog2()) / 8).max(STEP);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl PinnedBlocks {
    /// Takes the most recently used spare of this size. If there is none, takes the smallest larger spare, provided
    /// that there are many spares or `any` is set.
    fn take(&mut self, bytes: usize, any: bool) -> Option<NonNull<u8>> {
        if let Some(at) = self.spares.iter().rposition(|spare| spare.bytes == bytes) {
            return Some(self.spares.remove(at).memory);
        }
        if !any && self.spares.iter().map(|spare| spare.bytes).sum::<usize>() <= MAX_SPARE_BYTES {
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
        let spare = larger.map_or(PinnedBlock { memory, bytes }, |at| self.larger.swap_remove(at));
        self.spares.push(spare);
    }
}

impl Pinned {
    fn blocks(&self) -> MutexGuard<'_, PinnedBlocks> {
        lock(&self.blocks)
    }

    /// Waits for the device only if the host is out of memory and no spare is large enough.
    pub(super) fn alloc(&self, cx: &Context, bytes: usize) -> Result<NonNull<u8>> {
        let driver = cx.enter()?;
        let bytes = size_class(bytes);
        // Checked here, as different drivers refuse such sizes with different codes.
        if host_memory().is_some_and(|most| bytes as u64 > most) {
            return Err(out_of_memory(cx, bytes));
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
            DeviceThread::may_wait(|| {
                format!("an allocation of page-locked memory would wait for all work on {}", cx.name)
            })?;
            let all = std::mem::take(&mut self.blocks().spares);
            free_spares(cx, driver, all)?;
        }
        // Only the size can be an invalid value: this is how some drivers refuse huge sizes.
        if matches!(code, Code::OUT_OF_MEMORY | Code::INVALID_VALUE) {
            return Err(out_of_memory(cx, bytes));
        }
        cx.check(code, "cuMemHostAlloc")?;
        let memory = NonNull::new(memory.cast::<u8>()).ok_or_else(|| {
            Error::new(ErrorKind::Driver, "cuMemHostAlloc succeeded but returned no memory").at(cx.name.clone())
        })?;
        // SAFETY: `bytes` bytes that were just allocated and are not shared yet.
        unsafe { memory.write_bytes(0, bytes) };
        let device = cx.name.clone();
        log(move || tracing::trace!(%device, size = human::bytes(bytes as u64), "page-locked"));
        Ok(memory)
    }

    /// Never waits.
    ///
    /// # Safety
    /// The contract of [`Backend::free_host`](crate::device::backend::Backend::free_host).
    pub(super) unsafe fn free(&self, memory: NonNull<u8>, bytes: usize) {
        self.blocks().put(memory, size_class(bytes));
    }

    /// Frees all spares. The device must have completed all work, and the context must be current.
    pub(super) fn close(&self, driver: &Driver) {
        for spare in std::mem::take(&mut self.blocks().spares) {
            // SAFETY: it came from `cuMemHostAlloc`, and the list was its only owner.
            let _ = unsafe { (driver.mem_free_host)(spare.memory.as_ptr().cast()) };
        }
    }
}

#[cold]
fn out_of_memory(cx: &Context, bytes: usize) -> Error {
    let has = host_memory().map(|most| format!(", and the host has {most} bytes in total")).unwrap_or_default();
    let text = format!("asked for {bytes} bytes of page-locked host memory{has}: allocate less, or free some");
    Error::new(ErrorKind::OutOfMemory, text).at(cx.name.clone())
}

fn free_spares(cx: &Context, driver: &Driver, spares: Vec<PinnedBlock>) -> Result<()> {
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
    fn size_classes_are_few_and_large_enough() {
        assert_eq!(size_class(1), 256);
        assert_eq!(size_class(4096), 4096);
        assert_eq!(size_class(5000), 8192);
        assert_eq!(size_class(STEP), STEP);
        assert_eq!(size_class(STEP + 1), 2 * STEP);
        assert_eq!(size_class(5 * STEP), 5 * STEP);
        assert_eq!(size_class((64 << 20) + 1), 72 << 20);
        assert_eq!(size_class(usize::MAX), usize::MAX);
        // There are few of them over the whole range.
        let mut sizes: Vec<usize> = (1..=4096).map(|n| size_class(n << 20)).collect();
        sizes.dedup();
        assert!(sizes.len() < 8 * 12, "{} sizes up to 4 GiB", sizes.len());
    }

    fn block(at: usize) -> NonNull<u8> {
        NonNull::dangling().map_addr(|start| start.saturating_add(at << 32))
    }

    fn blocks(sizes: &[usize]) -> PinnedBlocks {
        let spares = sizes.iter().enumerate().map(|(at, bytes)| PinnedBlock { memory: block(at), bytes: *bytes });
        PinnedBlocks { spares: spares.collect(), larger: Vec::new() }
    }

    #[test]
    fn a_spare_of_the_same_size_is_reused_the_last_used_one_first() {
        let mut few = blocks(&[4, 8, 4]);
        assert_eq!(few.take(4, false), Some(block(2)));
        assert_eq!(few.take(4, false), Some(block(0)));
        assert_eq!(few.take(4, false), None);
        assert_eq!(few.take(16, true), None);
    }

    #[test]
    fn with_many_spares_a_larger_one_is_used_and_keeps_its_size() {
        let mut much = blocks(&[MAX_SPARE_BYTES, 16, 8]);
        assert_eq!(much.take(4, false), Some(block(2)));
        assert_eq!(much.take(MAX_SPARE_BYTES + 1, false), None);
        much.put(block(2), 4);
        assert_eq!(much.spares.last().map(|spare| spare.bytes), Some(8));
        assert!(much.larger.is_empty());
        // There are few spares, and the host is out of memory.
        let mut few = blocks(&[16, 8]);
        assert_eq!(few.take(4, false), None);
        assert_eq!(few.take(4, true), Some(block(1)));
    }
}
