//! Counts heap allocations and their bytes while enabled; otherwise it only checks the flag.

#![allow(dead_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Allocated bytes less freed bytes.
static BYTES: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// The same of this thread.
    static OWN: Cell<(u64, i64)> = const { Cell::new((0, 0)) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: i64) {
    if ON.load(Ordering::Relaxed) {
        COUNT.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
        BYTES.fetch_add(bytes, Ordering::Relaxed);
        let (allocations, held) = OWN.get();
        OWN.set((allocations + u64::from(bytes > 0), held + bytes));
    }
}

// SAFETY: each call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64);
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// The allocations of this thread so far, and the bytes that it has allocated less those that it has freed.
pub(crate) fn of_this_thread() -> (u64, i64) {
    OWN.get()
}

pub(crate) fn begin() {
    COUNT.store(0, Ordering::Relaxed);
    BYTES.store(0, Ordering::Relaxed);
    ON.store(true, Ordering::Relaxed);
}

/// Stops counting; returns the number of allocations on all threads.
pub(crate) fn end() -> u64 {
    ON.store(false, Ordering::Relaxed);
    COUNT.load(Ordering::Relaxed)
}

/// The number of allocations so far, on all threads. Counting continues.
pub(crate) fn so_far() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Bytes allocated and not freed, on all threads. Counting continues.
pub(crate) fn held() -> i64 {
    BYTES.load(Ordering::Relaxed)
}
