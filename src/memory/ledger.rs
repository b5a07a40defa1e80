//! The ledger of a device: all its heaps, and what they have in use together.

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
    line::Hunger,
};
use crate::{
    device::{Device, HearsOfLoss},
    sync::{Mutex, later, lock},
};

/// How long a request that the driver has refused waits for another thread that is giving memory back. Not for ever: that thread may be
/// this one, further up its stack, or in a driver's call that waits for the device. Ten times as long as a thread that can run has to
/// wait for its turn where there are three times as many threads as cores.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Ledger {
    /// Those that have ended, too, until all that they had is the driver's again.
    heaps: Mutex<Vec<Weak<Heap>>>,
    /// Execs that were dropped, and have memory of the driver's until their launches are done.
    ending: AtomicUsize,
    /// Bytes of device memory that are handed out, or freed and not yet done with.
    in_use: AtomicU64,
    peak: AtomicU64,
    leaked: AtomicU64,
    /// Bytes that were ever given back to the driver.
    given_back: AtomicU64,
    /// Threads that may be about to give some back.
    givers: AtomicUsize,
    pub(super) hunger: Hunger,
}

/// What a device keeps: its ledger, and the heaps that everything comes from that names no other.
pub(super) struct Arena {
    pub(super) ledger: Arc<Ledger>,
    own: OnceLock<Arc<Heap>>,
    pinned: OnceLock<Arc<Heap>>,
}

impl Arena {
    pub(super) fn of(device: &Device) -> Arc<Self> {
        device.extension(|device| {
            let ledger: Arc<Ledger> = Arc::default();
            let hears: Weak<Ledger> = Arc::downgrade(&ledger);
            device.tell_when_lost(hears);
            Arc::new(Self { ledger, own: OnceLock::new(), pinned: OnceLock::new() })
        })
    }

    /// The device's memory.
    pub(super) fn own(&self, device: &Device) -> &Arc<Heap> {
        self.own.get_or_init(|| Heap::new(device, &self.ledger, Kind::Unbounded, false, None))
    }

    /// Page-locked memory of the host.
    pub(super) fn pinned(&self, device: &Device) -> &Arc<Heap> {
        self.pinned.get_or_init(|| Heap::new(device, &self.ledger, Kind::Unbounded, true, None))
    }
}

impl Ledger {
    pub(super) fn enter(&self, heap: &Arc<Heap>) {
        lock(&self.heaps).push(Arc::downgrade(heap));
    }

    /// What this heap had is the driver's again.
    pub(super) fn leave(&self, heap: &Heap) {
        lock(&self.heaps).retain(|known| !std::ptr::eq(known.as_ptr(), heap));
    }

    /// An exec was dropped; and then all that it had is the driver's again.
    pub(super) fn exec_ends(&self) {
        self.ending.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn exec_has_ended(&self) {
        self.ending.fetch_sub(1, Ordering::SeqCst);
    }

    /// Those of the device's memory, or of page-locked memory of the host.
    pub(super) fn heaps(&self, host: bool) -> Vec<Arc<Heap>> {
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.into_iter().filter(|heap| heap.is_host() == host).collect()
    }

    /// The same, for a moment: a heap that its owners let go of meanwhile is dropped here.
    pub(super) fn visit<R>(&self, host: bool, with: impl FnOnce(&[Arc<Heap>]) -> R) -> R {
        let _gives = self.gives();
        let heaps = self.heaps(host);
        with(&heaps)
    }

    /// To be held by a thread that may give memory back to the driver: from before that memory is found nowhere else.
    pub(super) fn gives(&self) -> Gives<'_> {
        self.givers.fetch_add(1, Ordering::SeqCst);
        Gives(self)
    }

    pub(super) fn add(&self, bytes: u64) {
        let now = self.in_use.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// So much where that was. A block that is used again by its stream changes nothing here.
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

    /// Bytes of device memory in blocks that nobody has: no other allocator gets them.
    pub(super) fn spare_blocks(&self) -> u64 {
        let spare = |heap: &Arc<Heap>| heap.limit().map_or(0, |limit| limit.saturating_sub(heap.used()));
        self.visit(false, |heaps| heaps.iter().filter(|heap| heap.has_blocks()).map(spare).sum())
    }

    /// Asks the device what of all that is bound is done.
    pub(super) fn sweep(&self, host: bool) {
        self.visit(host, |heaps| heaps.iter().for_each(|heap| heap.sweep()));
    }

    /// Gives what is idle back to the driver: so many bytes.
    pub(super) fn trim(&self, host: bool) -> u64 {
        self.visit(host, |heaps| heaps.iter().map(|heap| heap.trim()).sum())
    }

    /// The driver has no more memory: gives back what is done with and what is kept, and what allocators had that are gone; and
    /// waits, for at most [`LEAVES_WITHIN`], for what another thread is giving back. True if it has been given some since
    /// [`given_back`](Self::given_back) was `before`.
    pub(super) fn make_room(&self, host: bool, before: u64) -> bool {
        self.sweep(host);
        self.trim(host);
        let until = Instant::now() + LEAVES_WITHIN;
        while self.is_leaving() && Instant::now() < until {
            thread::yield_now();
        }
        self.given_back() > before
    }

    /// Bytes that were given back to the driver so far.
    pub(super) fn given_back(&self) -> u64 {
        self.given_back.load(Ordering::SeqCst)
    }

    /// So many bytes are the driver's again.
    pub(super) fn give_back(&self, bytes: u64) {
        self.given_back.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Where no memory is out, so that none will come back: a number. Between two looks with the same number none was out.
    pub(super) fn idle_mark(&self, host: bool) -> Option<u64> {
        let _gives = self.gives();
        let all = lock(&self.heaps).clone();
        let all: Vec<_> = all.iter().map(Weak::upgrade).collect();
        let is_leaving = self.ending.load(Ordering::SeqCst) > 0 || all.iter().any(Option::is_none);
        let of_kind = all.iter().flatten().filter(|heap| heap.is_host() == host);
        if is_leaving { None } else { of_kind.map(|heap| heap.idle_mark()).sum() }
    }

    /// A thread gives some back to the driver, or may be about to.
    fn is_leaving(&self) -> bool {
        self.givers.load(Ordering::SeqCst) > 0 || lock(&self.heaps).iter().any(|heap| heap.strong_count() == 0)
    }

    /// Memory has come free: the tasks that wait look again.
    #[inline]
    pub(super) fn tell(&self) {
        if self.is_hungry() {
            self.wake();
        }
    }

    /// The same where a lock may be held: in a `Deferred` scope at its end.
    pub(super) fn tell_later(self: &Arc<Self>) {
        if self.is_hungry() {
            let ledger = self.clone();
            later("a waker panicked", move || ledger.tell());
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
        let _gives = self.gives();
        let all: Vec<_> = lock(&self.heaps).iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|heap| with(heap));
    }
}

/// See [`Ledger::gives`].
pub(super) struct Gives<'a>(&'a Ledger);

impl Drop for Gives<'_> {
    fn drop(&mut self) {
        self.0.givers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HearsOfLoss for Ledger {
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
