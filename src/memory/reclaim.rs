//! Reclaim: memory that was dropped while streams may still use it.
//!
//! Dropping never blocks. Memory whose tickets have all passed is freed there and then; the rest is parked with its
//! tickets and freed when they have passed: at the next allocation, and at the lookout's beat. After a fault nothing can
//! be known of the device's work any more: then it is leaked and counted, never reused.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use smallvec::SmallVec;

use super::Home;
use crate::{
    device::{Device, WeakDevice, backend::Backend},
    error::Result,
    stream::{Streams, Ticket},
};

/// Memory without an owner that a stream may still use.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) home: Home,
    pub(super) bytes: usize,
    pub(super) open: SmallVec<[Ticket; 3]>,
}

// SAFETY: `home` may be a pointer; it is only freed through, once, by whoever holds the value.
unsafe impl Send for Parked {}

/// What a device's memory is doing, and what of it waits to be freed.
pub(crate) struct Reclaim {
    device: WeakDevice,
    backend: Arc<dyn Backend>,
    parked: Mutex<Vec<Parked>>,
    sweeping: AtomicBool,
    in_use: AtomicU64,
    peak: AtomicU64,
    leaked: AtomicU64,
}

impl Reclaim {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            Arc::new(Self {
                device: device.downgrade(),
                backend: device.backend().clone(),
                parked: Mutex::default(),
                sweeping: AtomicBool::new(false),
                in_use: AtomicU64::new(0),
                peak: AtomicU64::new(0),
                leaked: AtomicU64::new(0),
            })
        })
    }

    /// A fault seen by an allocation ends the device for everybody.
    pub(super) fn heed<T>(&self, device: &Device, result: Result<T>) -> Result<T> {
        match result {
            Err(error) if error.is_device_lost() => Streams::of(device).heed(Err(error)),
            other => other,
        }
    }

    pub(super) fn counted(&self, bytes: usize) {
        let now = self.in_use.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    pub(super) fn leaked(&self) -> u64 {
        self.leaked.load(Ordering::Relaxed)
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Frees it now, or when its tickets have passed.
    pub(super) fn take(self: &Arc<Self>, mut memory: Parked) {
        if memory.open.is_empty() {
            return self.free(memory);
        }
        // Whoever waits on a ticket needs it marked; a mark made here covers all until now, never less.
        memory.open.iter_mut().for_each(|ticket| drop(ticket.commit()));
        self.parked.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        self.keep_sweeping();
    }

    /// Sees to it that the lookout sweeps while anything is parked.
    fn keep_sweeping(self: &Arc<Self>) {
        if self.sweeping.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(device) = self.device.upgrade() {
            let reclaim = self.clone();
            Streams::of(&device).lookout().sweep(Box::new(move || reclaim.beat()));
        }
    }

    /// True while anything is parked.
    fn beat(&self) -> bool {
        self.sweep();
        if !self.is_empty() {
            return true;
        }
        self.sweeping.store(false, Ordering::Release);
        // What was parked meanwhile found `sweeping` still set.
        !self.is_empty() && !self.sweeping.swap(true, Ordering::AcqRel)
    }

    fn is_empty(&self) -> bool {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Frees what is parked and done, before an allocation.
    pub(super) fn sweep_now(self: &Arc<Self>) {
        self.sweep();
        // While this had the list in its hands, the lookout may have found it empty and gone.
        if !self.is_empty() {
            self.keep_sweeping();
        }
    }

    fn sweep(&self) {
        let all = std::mem::take(&mut *self.parked.lock().unwrap_or_else(PoisonError::into_inner));
        let mut kept = Vec::new();
        for mut memory in all {
            let mut lost = false;
            memory.open.retain(|ticket| match ticket.look() {
                Ok(passed) => !passed,
                Err(error) => {
                    // Of another kind: it is asked again.
                    lost |= error.is_device_lost();
                    true
                }
            });
            if memory.open.is_empty() {
                self.free(memory);
            } else if lost {
                self.leak(&memory);
            } else {
                kept.push(memory);
            }
        }
        if !kept.is_empty() {
            self.parked.lock().unwrap_or_else(PoisonError::into_inner).append(&mut kept);
        }
    }

    fn leak(&self, memory: &Parked) {
        self.leaked.fetch_add(memory.bytes as u64, Ordering::Relaxed);
        if matches!(memory.home, Home::Device(_)) {
            self.in_use.fetch_sub(memory.bytes as u64, Ordering::Relaxed);
        }
        tracing::warn!(bytes = memory.bytes, "memory of a lost device is left to it");
    }

    fn free(&self, memory: Parked) {
        if self.device.upgrade().is_some_and(|device| device.lost().is_some()) {
            return self.leak(&memory);
        }
        let freed = match memory.home {
            // SAFETY: the address came from this backend's `alloc` (`Memory::make`), its owner is gone, and all tickets
            // of its uses have passed, so nothing enqueued touches it.
            Home::Device(address) => unsafe { self.backend.free(address) },
            // SAFETY: likewise from `alloc_host`, with this size.
            Home::Host(pointer) => unsafe { self.backend.free_host(pointer, memory.bytes) },
        };
        if matches!(memory.home, Home::Device(_)) {
            self.in_use.fetch_sub(memory.bytes as u64, Ordering::Relaxed);
        }
        if let Err(error) = freed {
            tracing::error!(%error, bytes = memory.bytes, "memory could not be given back");
        }
    }
}

impl fmt::Debug for Reclaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaim").field("in_use", &self.in_use()).field("peak", &self.peak()).finish_non_exhaustive()
    }
}
