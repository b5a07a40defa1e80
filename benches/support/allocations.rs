//! Counts heap allocations and their bytes while it is told to, and otherwise only asks whether it is.

#![allow(dead_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
/// What was allocated less what was given back.
static BYTES: AtomicI64 = AtomicI64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: i64) {
    if ON.load(Ordering::Relaxed) {
        COUNT.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
        BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: each call goes to the system's allocator as it is.
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

/// From now on.
pub(crate) fn begin() {
    COUNT.store(0, Ordering::Relaxed);
    BYTES.store(0, Ordering::Relaxed);
    ON.store(true, Ordering::Relaxed);
}

/// How many there were, on all threads.
pub(crate) fn end() -> u64 {
    ON.store(false, Ordering::Relaxed);
    COUNT.load(Ordering::Relaxed)
}

/// How many there were so far, on all threads. Goes on counting.
pub(crate) fn so_far() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Bytes that were allocated and not given back, on all threads. Goes on counting.
pub(crate) fn held() -> i64 {
    BYTES.load(Ordering::Relaxed)
}
