//! The ledger of a device: all its heaps, and their total usage.

use std::{
    fmt,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    heap::{Heap, Kind},
    wait_queue::Hunger,
};
use crate::{
    device::{Device, LossObserver},
    sync::{Mutex, later, lock},
};

/// How long a refused request waits for another thread that is returning memory to the driver. Bounded: that thread may
/// be this one, further up its stack, or be in a driver call that waits for the device. Ten times what a
/// runnable thread waits for its turn on a machine with three times as many threads as cores.
const RETURN_TIMEOUT: Duration = Duration::from_millis(100);

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Ledger {
    /// Includes dropped heaps until all of their memory is returned to the driver.
    heaps: Mutex<Vec<Weak<Heap>>>,
    /// Execs that were dropped and hold memory of the driver until their launches are done.
    ending: AtomicUsize,
    /// Bytes of device memory that are handed out, or freed and still in use by the device.
    in_use: AtomicU64,
    peak: AtomicU64,
    leaked: AtomicU64,
    /// Bytes that were ever returned to the driver.
    given_back: AtomicU64,
    /// Threads that may be about to return memory to the driver.
    returners: AtomicUsize,
    pub(super) hunger: Hunger,
}

/// The ledger of a device, and its default heaps.
pub(super) struct Arena {
    pub(super) ledger: Arc<Ledger>,
    own: OnceLock<Arc<Heap>>,
    pinned: OnceLock<Arc<Heap>>,
}

impl Arena {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            let ledger: Arc<Ledger> = Arc::default();
            let observer: Weak<Ledger> = Arc::downgrade(&ledger);
            device.on_loss(observer);
            Arc::new(Self { ledger, own: OnceLock::new(), pinned: OnceLock::new() })
        })
    }

    pub(super) fn own(&self, device: &Device) -> &Arc<Heap> {
        self.own.get_or_init(|| Heap::new(device, &self.ledger, Kind::Unbounded, false, None))
    }

    pub(super) fn pinned(&self, device: &Device) -> &Arc<Heap> {
        self.pinned.get_or_init(|| Heap::new(device, &self.ledger, Kind::Unbounded, true, None))
    }
}

impl Ledger {
    pub(super) fn enter(&self, heap: &Arc<Heap>) {
        lock(&self.heaps).push(Arc::downgrade(heap));
    }

    /// All of this heap's memory was returned to the driver.
    pub(super) fn leave(&self, heap: &Heap) {
        lock(&self.heaps).retain(|known| !std::ptr::eq(known.as_ptr(), heap));
    }

    /// An exec was dropped. [`exec_has_ended`](Self::exec_has_ended) follows once the driver has its memory back.
    pub(super) fn exec_ends(&self) {
        self.ending.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn exec_has_ended(&self) {
        self.ending.fetch_sub(1, Ordering::SeqCst);
    }

    /// The heaps of device memory, or of page-locked host memory.
    pub(super) fn heaps(&self, host: bool) -> Vec<Arc<Heap>> {
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|heap| heap.is_host() == host).collect()
    }

    /// Calls `with` with the heaps. A heap whose owners drop it meanwhile is dropped here.
    pub(super) fn visit<R>(&self, host: bool, with: impl FnOnce(&[Arc<Heap>]) -> R) -> R {
        let _gives = self.returning();
        let heaps = self.heaps(host);
        with(&heaps)
    }

    /// Held by a thread that may return memory to the driver, from before that memory can be found nowhere else.
    pub(super) fn returning(&self) -> ReturnGuard<'_> {
        self.returners.fetch_add(1, Ordering::SeqCst);
        ReturnGuard(self)
    }

    pub(super) fn add(&self, bytes: u64) {
        let now = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Replaces `before` bytes in use with `after`. No change if a stream reuses its own block.
    #[inline]
    pub(super) fn change(&self, before: u64, after: u64) {
        match after.checked_sub(before) {
            Some(0) => {}
            Some(more) => self.add(more),
            None => _ = self.in_use.fetch_sub(before - after, Ordering::Relaxed),
        }
    }

    pub(super) fn leak(&self, bytes: u64) {
        self.leaked.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(super) fn leaked(&self) -> u64 {
        self.leaked.load(Ordering::Relaxed)
    }

    /// Bytes of device memory in blocks that are not handed out: other allocators cannot get them.
    pub(super) fn spare_blocks(&self) -> u64 {
        let spare = |heap: &Arc<Heap>| heap.limit().map_or(0, |limit| limit.saturating_sub(heap.used()));
        self.visit(false, |heaps| heaps.iter().filter(|heap| heap.has_blocks()).map(spare).sum())
    }

    /// Queries the device for which of the bound memory is done.
    pub(super) fn sweep(&self, host: bool) {
        self.visit(host, |heaps| heaps.iter().for_each(|heap| heap.sweep()));
    }

    /// Returns idle memory to the driver, and the number of bytes to the caller.
    pub(super) fn trim(&self, host: bool) -> u64 {
        self.visit(host, |heaps| heaps.iter().map(|heap| heap.trim()).sum())
    }

    /// Called when the driver has no more memory. Returns freed memory that is done or cached to the driver, also of
    /// dropped allocators, and waits at most [`RETURN_TIMEOUT`] for other threads that are returning some. True if any
    /// was returned since [`given_back`](Self::given_back) was `before`.
    pub(super) fn make_room(&self, host: bool, before: u64) -> bool {
        self.sweep(host);
        self.trim(host);
        let until = Instant::now() + RETURN_TIMEOUT;
        while self.is_leaving() && Instant::now() < until {
            thread::yield_now();
        }
        self.given_back() > before
    }

    pub(super) fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::SeqCst)
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.given_back.fetch_add(bytes, Ordering::SeqCst);
    }

    /// If no memory is handed out: a number. Between two calls with the same number, none was handed out.
    pub(super) fn idle_mark(&self, host: bool) -> Option<u64> {
        let _gives = self.returning();
        let all = lock(&self.heaps).clone();
        let all: Vec<_> = all.iter().map(Weak::upgrade).collect();
        let is_leaving = self.ending.load(Ordering::SeqCst) > 0 || all.iter().any(Option::is_none);
        let of_kind = all.iter().flatten().filter(|heap| heap.is_host() == host);
        if is_leaving { None } else { of_kind.map(|heap| heap.idle_mark()).sum() }
    }

    /// True while a thread returns memory to the driver, or may be about to.
    fn is_leaving(&self) -> bool {
        self.returners.load(Ordering::SeqCst) > 0 || lock(&self.heaps).iter().any(|heap| heap.strong_count() == 0)
    }

    /// Memory became free: wakes the waiting tasks.
    #[inline]
    pub(super) fn notify(&self) {
        if self.is_hungry() {
            self.wake();
        }
    }

    /// The same where a lock may be held: runs at the end of a `Deferred` scope.
    pub(super) fn notify_later(self: &Arc<Self>) {
        if self.is_hungry() {
            let ledger = self.clone();
            later("a waker panicked", move || ledger.notify());
        }
    }

    #[inline]
    pub(super) fn is_hungry(&self) -> bool {
        self.hunger.is_any()
    }

    #[cold]
    fn wake(&self) {
        self.each(|heap| heap.wake());
    }

    fn each(&self, with: impl Fn(&Heap)) {
        let _gives = self.returning();
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|heap| with(heap));
    }
}

/// See [`Ledger::returning`].
pub(super) struct ReturnGuard<'a>(&'a Ledger);

impl Drop for ReturnGuard<'_> {
    fn drop(&mut self) {
        self.0.returners.fetch_sub(1, Ordering::SeqCst);
    }
}

impl LossObserver for Ledger {
    fn device_lost(&self) {
        self.each(Heap::wake_all);
    }

    fn has_waiters(&self) -> bool {
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.iter().any(|heap| heap.has_waiters())
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("in_use", &self.in_use()).field("peak", &self.peak()).finish_non_exhaustive()
    }
}
