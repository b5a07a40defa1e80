//! A heap: the driver memory of one allocator, in use or free for reuse.
//!
//! ```text
//!   alloc on stream s takes the first of these that exists:
//!     a block bound to s alone                  freed after its last use on s: s comes after that use anyway
//!     an idle block
//!     a block whose uses s comes after          by its clock (s has waited for them), or they have passed
//!     a block whose uses have passed            after a query of the device, without waiting for it
//!     new memory from the driver                if necessary after idle memory of any size was returned to it
//!     a bound block that is large enough        s waits for its uses, on the device
//!     an error with the numbers
//! ```
//!
//! Memory that is handed out again starts with the uses that it ended with, so its next use comes after them on any
//! stream. No use is forgotten before it is known to have passed.
//!
//! [`reclaim`](super::reclaim) handles memory that is dropped.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::{
    Home, MOST_BYTES, Memory, Origin, Owned, Staging,
    access::Uses,
    free_lists::{Block, Bound, Taken},
    graph_memory::GraphMemory,
    heap_state::HeapState,
    ledger::Ledger,
    reclaim::first_of_each,
    wait_queue::WaitQueue,
};
use crate::{
    device::{Device, WeakDevice, backend::Backend},
    error::{Error, ErrorKind, Result},
    stream::{Stream, Streams, Ticket, WatchFlag},
    sync::{Deferred, Level, Mutex, MutexGuard, lock},
};

/// The source of a heap's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The driver, whenever more is needed.
    Unbounded,
    /// Reserved at creation: `count` blocks of `bytes` bytes.
    Blocks { bytes: u64, count: usize },
    /// The driver's own pool, on the streams themselves.
    StreamOrdered,
}

/// See the [module](self).
pub(crate) struct Heap {
    pub(super) device: WeakDevice,
    /// For messages: `cuda:0`, `the host, page-locked for cuda:0`.
    pub(super) place: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) kind: Kind,
    /// Page-locked host memory.
    host: bool,
    /// The most that it may hold of the driver's memory.
    limit: Option<u64>,
    granularity: u64,
    wants_recycled: bool,
    pub(super) state: Mutex<HeapState>,
    pub(super) line: WaitQueue,
    /// The completion monitor's tick visits it, as long as memory is bound.
    pub(super) swept: WatchFlag,
}

/// The kind of a request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Answered at once. The number of bytes that were reserved for it.
    Call(u64),
    /// Waits in the queue if no memory is free.
    WaitQueue,
}

impl RequestKind {
    #[inline]
    pub(super) fn drawn(self) -> u64 {
        match self {
            Self::Call(drawn) => drawn,
            Self::WaitQueue => 0,
        }
    }
}

impl Block for Box<Memory> {
    /// Only the location: it must not keep device or heap alive, which own it.
    type Idle = Home;

    #[inline]
    fn size(&self) -> u64 {
        self.size
    }

    #[inline]
    fn bound(&mut self) -> Bound {
        self.own_uses().bound()
    }

    fn forget_passed(&mut self) {
        self.own_uses().forget_done();
    }

    #[inline]
    fn blocker(&mut self) -> (u64, u64) {
        self.own_uses().last().unwrap_or_default()
    }
}

impl Memory {
    /// Replaces its uses with `point`: all work that comes after the point comes after them, too. (On that stream the
    /// block is found without the clock the next time.)
    fn comes_before(&mut self, point: Option<&Ticket>) {
        let mut uses = self.own_uses();
        match point.filter(|point| point.number() > 0) {
            Some(point) => {
                uses.written_by(point);
                uses.discard_contents();
            }
            None => *uses = Uses::default(),
        }
    }
}

impl Heap {
    /// Registers itself with the device. [`reserve_blocks`](Self::reserve_blocks) reserves its blocks.
    pub(super) fn new(device: &Device, ledger: &Arc<Ledger>, kind: Kind, host: bool, limit: Option<u64>) -> Arc<Self> {
        let backend = device.backend().clone();
        let limit = match kind {
            Kind::Blocks { bytes, count } => Some(bytes.saturating_mul(count as u64)),
            _ => limit,
        };
        let heap = Arc::new(Self {
            device: device.downgrade(),
            place: match (host, device.is_host()) {
                (_, true) => "the host".into(),
                (true, false) => format!("the host, page-locked for {device}"),
                (false, false) => device.to_string(),
            },
            ledger: ledger.clone(),
            kind,
            host,
            // A limit is exact to the byte.
            granularity: if host || limit.is_some() { 1 } else { backend.granularity() },
            limit,
            wants_recycled: !host && backend.wants_recycled(),
            backend,
            state: Mutex::at(Level::Heap, HeapState::new()),
            line: WaitQueue::new(),
            swept: WatchFlag::new(),
        });
        ledger.enter(&heap);
        heap
    }

    pub(super) fn reserve_blocks(&self, device: &Device) -> Result<()> {
        let Kind::Blocks { bytes, count } = self.kind else { return Ok(()) };
        for _ in 0..count {
            let before = self.ledger.given_back();
            let home = match self.ask_driver(device, bytes) {
                // Cached memory may make room, and freed memory whose uses are done by now.
                Err(error) if error.is_out_of_memory() && self.ledger.make_room(self.host, before) => {
                    self.ask_driver(device, bytes)?
                }
                asked => asked?,
            };
            let mut state = lock(&self.state);
            state.held += bytes;
            state.idle += bytes;
            state.from_driver += 1;
            state.shelves.put_idle(bytes, home);
        }
        Ok(())
    }

    pub(super) fn is_host(&self) -> bool {
        self.host
    }

    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The upper limit; `None` if it is unknown.
    pub(super) fn capacity(&self) -> Option<u64> {
        self.limit.or_else(|| if self.host { None } else { Some(self.backend.memory().ok()?.total) })
    }

    /// Whether this much can ever be free here, as far as that is known.
    pub(super) fn may_ever_hold(&self, bytes: usize) -> bool {
        let least = |bound: Option<u64>| bound.is_none_or(|bound| bytes as u64 <= bound);
        let of_device = || self.backend.memory().ok().map(|memory| memory.total);
        bytes <= MOST_BYTES && least(self.limit) && (self.host || least(of_device()))
    }

    /// Whether it caches freed memory. Otherwise all of it returns to the driver, which has its own cache.
    pub(super) fn keeps(&self) -> bool {
        !self.host && self.kind == Kind::Unbounded || self.has_blocks()
    }

    pub(super) fn has_blocks(&self) -> bool {
        matches!(self.kind, Kind::Blocks { .. })
    }

    #[inline]
    pub(super) fn size_for(&self, bytes: u64) -> Result<u64> {
        match self.kind {
            Kind::Blocks { bytes: block, .. } if bytes > block => {
                let text = format!("asked for {bytes} bytes, and its blocks have {block} each: use larger blocks");
                Err(Error::new(ErrorKind::OutOfMemory, text).at(self.place.clone()))
            }
            Kind::Blocks { bytes: block, .. } => Ok(block),
            _ => Ok(size_of_class(bytes, self.granularity)),
        }
    }

    /// Memory for work on `stream`, and for work ordered after that; without a stream, for any.
    #[inline]
    pub(super) fn alloc(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        asker: RequestKind,
    ) -> Result<Owned> {
        if bytes.wrapping_sub(1) >= MOST_BYTES {
            return Err(self.never(bytes));
        }
        match GraphMemory::asked(device, stream)? {
            Some(graph_memory) if self.kind != Kind::StreamOrdered => {
                graph_memory.alloc(self, device, bytes, stream, asker)
            }
            _ => self.alloc_outside(device, bytes, stream, asker),
        }
    }

    /// Memory for use on `stream`, by any thread: of its graph if the stream is captured, and of no graph otherwise.
    pub(super) fn alloc_for(self: &Arc<Self>, stream: &Stream, bytes: usize) -> Result<Owned> {
        if bytes.wrapping_sub(1) >= MOST_BYTES {
            return Err(self.never(bytes));
        }
        match GraphMemory::asked(stream.device(), Some(stream))? {
            Some(graph_memory) => graph_memory.alloc(self, stream.device(), bytes, None, RequestKind::Call(0)),
            None => self.alloc_outside(stream.device(), bytes, Some(stream), RequestKind::Call(0)),
        }
    }

    /// The error for a size that no allocator can serve.
    #[cold]
    fn never(&self, bytes: usize) -> Error {
        if bytes == 0 {
            return Error::new(ErrorKind::Usage, "zero-length allocation: ask for at least one element");
        }
        let text = format!("asked for {bytes} bytes, more than any address space holds: ask for less");
        Error::new(ErrorKind::OutOfMemory, text).at(self.place.clone())
    }

    #[inline]
    pub(super) fn alloc_outside(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        asker: RequestKind,
    ) -> Result<Owned> {
        device.check()?;
        let stream = stream.filter(|_| !self.host);
        if let Some(stream) = stream
            && stream.device() != device
        {
            let text = format!("memory of {device} for a stream of {}: choose one of its own device", stream.device());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        if self.kind == Kind::StreamOrdered {
            return self.alloc_on(device, bytes, stream, asker);
        }
        let size = self.size_for(bytes as u64)?;
        let mut state = lock(&self.state);
        if (state.reserved == 0 || self.has_room(&state, size, asker))
            && let Some(taken) = state.shelves.take(size, stream.map(Stream::id))
        {
            return self.hand_out(state, device, taken, bytes, size, stream, asker);
        }
        drop(state);
        self.alloc_slowly(device, bytes, size, stream, asker)
    }

    #[cold]
    fn alloc_slowly(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: Option<&Stream>,
        asker: RequestKind,
    ) -> Result<Owned> {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        // Without tracking, a request may get any block that no tracked device uses, so that the checker finds the
        // race.
        let untracked = !device.tracked() && !self.host;
        let past = stream.map(Stream::past);
        // Behind everything that the clock knew of.
        let point = stream.map(Stream::ticket);
        let comes_after = |ticket: &Ticket| match &past {
            Some(past) => past(ticket),
            None => ticket.has_passed(),
        };
        let is_left = |ticket: &Ticket| untracked && !ticket.stream().device().tracked();
        let ready = |memory: &Memory| memory.uses().all_are(|ticket| is_left(ticket) || comes_after(ticket));
        let take = || {
            let mut state = lock(&self.state);
            let room = self.has_room(&state, size, asker);
            let idle = if room { state.shelves.take(size, stream.map(Stream::id)) } else { None };
            let taken = idle.or_else(|| {
                let mut memory = if room || !self.has_blocks() {
                    state.shelves.take_if(size, |memory| ready(memory))
                } else {
                    None
                }?;
                if !untracked {
                    memory.comes_before(point.as_ref());
                }
                Some(Taken::Bound(memory))
            });
            taken.map(|taken| self.hand_out(state, device, taken, bytes, size, stream, asker))
        };
        if let Some(taken) = take() {
            return taken;
        }
        let first: SmallVec<[Ticket; 4]> = first_of_each(lock(&self.state).shelves.firsts(Some(size)));
        if !first.is_empty() {
            self.observe(first, Some(size));
            if let Some(taken) = take() {
                return taken;
            }
        }
        let mut refused = None;
        if !self.has_blocks() {
            match self.alloc_new(device, bytes, size, stream.map_or(0, Stream::id), asker) {
                Err(error) if error.is_out_of_memory() => refused = Some(error),
                new => return new,
            }
        }
        if let Some(stream) = stream
            && let Some(taken) = self.alloc_behind(device, bytes, size, stream, asker)
        {
            return taken;
        }
        // Also without waiting on a stream.
        take().unwrap_or_else(|| Err(self.exhausted(bytes as u64, refused)))
    }

    fn alloc_new(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        lane: u64,
        asker: RequestKind,
    ) -> Result<Owned> {
        let before = self.ledger.given_back();
        let mut asked = self.try_new(device, bytes, size, lane, asker);
        if let Err(error) = &asked
            && error.is_out_of_memory()
        {
            // Freed memory whose uses are done is idle now (or the driver's, if its allocator was dropped). Idle memory
            // of other sizes or allocators may make room.
            if self.ledger.make_room(self.host, before) {
                asked = self.try_new(device, bytes, size, lane, asker);
            }
            if size > bytes as u64 && asked.as_ref().is_err_and(Error::is_out_of_memory) {
                asked = self.try_new(device, bytes, bytes as u64, lane, asker);
            }
        }
        asked
    }

    fn try_new(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        lane: u64,
        asker: RequestKind,
    ) -> Result<Owned> {
        let mut state = lock(&self.state);
        if !self.has_room(&state, size, asker) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no room"));
        }
        let over = self.limit.map_or(0, |limit| (state.held + size).saturating_sub(limit));
        let returning = (over > 0).then(|| self.ledger.returning());
        let given_up = if over > 0 { state.drain_idle(over) } else { Vec::new() };
        // Before it is allocated, so that no other request takes the same room.
        state.count(size, bytes as u64, asker.drawn());
        drop(state);
        let has_given_up = !given_up.is_empty();
        self.release(given_up);
        drop(returning);
        let asked = self.ask_driver(device, size);
        if has_given_up {
            // The driver may have got more back than it gives out here.
            self.ledger.notify_later();
        }
        match asked {
            Ok(home) => {
                let mut state = lock(&self.state);
                state.came_from_driver();
                drop(state);
                if !self.host {
                    self.ledger.add(bytes as u64);
                }
                Ok(self.memory(device, home, bytes, size, lane))
            }
            Err(error) => {
                let mut state = lock(&self.state);
                state.uncount(size, bytes as u64, asker.drawn());
                self.request_failed(state, asker);
                Err(error)
            }
        }
    }

    /// Called when memory that was counted or taken is free again after all: tasks that checked meanwhile check again.
    #[cold]
    pub(super) fn request_failed(&self, mut state: MutexGuard<'_, HeapState>, asker: RequestKind) {
        // A task in the queue would wake itself, and tasks in two queues would wake each other. It notifies when it
        // leaves.
        if asker != RequestKind::WaitQueue {
            state.refused += 1;
            drop(state);
            self.ledger.notify_later();
        }
    }

    /// A bound block that fits, after making the stream wait for its uses.
    fn alloc_behind(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: &Stream,
        asker: RequestKind,
    ) -> Option<Result<Owned>> {
        let mut state = lock(&self.state);
        if self.has_blocks() && !self.has_room(&state, size, asker) {
            return None;
        }
        // The completion monitor may have found an idle block meanwhile.
        let idle = if self.has_blocks() { state.shelves.take(size, None) } else { None };
        if let Some(taken) = idle {
            return Some(self.hand_out(state, device, taken, bytes, size, Some(stream), asker));
        }
        let mut memory = state.shelves.take_bound(size)?;
        drop(state);
        // Not under the lock: a wait may wake tasks.
        let waited = memory.own_uses().each(|ticket| stream.wait_until_over(ticket));
        let point = stream.ticket();
        let mut state = lock(&self.state);
        if let Err(error) = waited {
            state.shelves.put_bound(memory, None);
            self.request_failed(state, asker);
            return Some(Err(error));
        }
        memory.comes_before(Some(&point));
        Some(self.hand_out(state, device, Taken::Bound(memory), bytes, size, Some(stream), asker))
    }

    #[allow(clippy::too_many_arguments, reason = "one path, taken from three places")]
    #[inline]
    fn hand_out(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, HeapState>,
        device: &Device,
        taken: Taken<Box<Memory>>,
        bytes: usize,
        size: u64,
        stream: Option<&Stream>,
        asker: RequestKind,
    ) -> Result<Owned> {
        state.reserved -= asker.drawn();
        state.reused += 1;
        let lane = stream.map_or(0, Stream::id);
        let (mut memory, was_bound) = match taken {
            Taken::Bound(mut memory) => {
                memory.discard_contents();
                let before = memory.bytes as u64;
                state.bound -= memory.size;
                state.waiting -= before;
                state.use_instead(before, bytes as u64);
                drop(state);
                if !self.host {
                    self.ledger.change(before, bytes as u64);
                }
                memory.bytes = bytes;
                memory.lane = lane;
                (Owned::new(memory), true)
            }
            Taken::Idle(home) => {
                state.idle -= size;
                state.use_instead(0, bytes as u64);
                drop(state);
                if !self.host {
                    self.ledger.add(bytes as u64);
                }
                (self.memory(device, home, bytes, size, lane), false)
            }
        };
        if self.wants_recycled
            && let Err(error) = self.recycle(&mut memory, stream.filter(|_| was_bound))
        {
            // The caller has its reservation back.
            lock(&self.state).reserved += asker.drawn();
            return Err(error);
        }
        Ok(memory)
    }

    /// Its contents become invalid; reading them is detected as an error.
    #[cold]
    fn recycle(&self, memory: &mut Memory, stream: Option<&Stream>) -> Result<()> {
        let (address, size) = (memory.address()?, memory.size);
        match stream {
            None => {
                // SAFETY: the block has this size, and this heap owns it exclusively: all its uses have passed.
                let done = unsafe { self.backend.recycle(None, address, size) };
                self.observe_loss(memory.device(), done)
            }
            Some(stream) => {
                // SAFETY: the block has this size, and stays valid until this is done, as the ticket is noted in it.
                let done = stream.enqueue_point(|backend, raw| unsafe { backend.recycle(Some(raw), address, size) })?;
                memory.note_write(&done);
                Ok(())
            }
        }
    }

    fn memory(self: &Arc<Self>, device: &Device, home: Home, bytes: usize, size: u64, lane: u64) -> Owned {
        Owned::new(Box::new(Memory {
            device: device.clone(),
            home,
            bytes,
            size,
            lane,
            uses: Uses::default().locked(),
            shared_uses: OnceLock::new(),
            staging: Staging::default(),
            account: None,
            origin: Origin::Heap(self.clone()),
        }))
    }

    /// Whether `size` more bytes may be handed out, in addition to what is reserved.
    pub(super) fn has_room(&self, state: &HeapState, size: u64, asker: RequestKind) -> bool {
        let Some(limit) = self.limit else { return true };
        // A bound block is available: its new stream waits for it on the device.
        let taken = if self.has_blocks() && !self.host { state.out() } else { state.held - state.idle };
        let others = taken.saturating_add(state.reserved.saturating_sub(asker.drawn()));
        others.saturating_add(size) <= limit
    }

    fn ask_driver(&self, device: &Device, size: u64) -> Result<Home> {
        device.check_process()?;
        let made = if self.host {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            self.backend.alloc_host(size).map(Home::Host)
        } else {
            self.backend.alloc(size).map(Home::Device)
        };
        self.observe_loss(device, made)
    }

    /// A fault reported by an allocation ends the device for all users.
    pub(super) fn observe_loss<T>(&self, device: &Device, result: Result<T>) -> Result<T> {
        match result {
            Err(error) if error.is_device_lost() => Streams::of(device).observe(Err(error)),
            other => other,
        }
    }
}

/// The size class of a request: eight classes per power of two, so that at most an eighth is wasted; from 16 MiB on,
/// steps of 2 MiB. Where the driver does not round, neither does this.
fn size_of_class(bytes: u64, granularity: u64) -> u64 {
    const LARGEST_STEP: u64 = 2 << 20;
    if granularity == 1 {
        return bytes;
    }
    let doubling = 1_u64 << bytes.max(1).ilog2();
    let step = (doubling / 8).clamp(granularity, LARGEST_STEP.max(granularity));
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl Drop for Heap {
    fn drop(&mut self) {
        // Nothing is bound: otherwise the completion monitor would hold this heap.
        let idle = self.state.get_mut().drain_idle(u64::MAX);
        // May run under the lock of another heap, if that dropped the last ticket of a stream.
        self.give_to_driver(idle);
        self.ledger.leave(self);
        // The memory is the driver's again, and other allocators' waiters may need it.
        self.ledger.notify();
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("of", &self.place).field("kind", &self.kind).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::size_of_class;

    #[test]
    fn sizes_are_few_and_waste_little() {
        assert_eq!(size_of_class(1, 512), 512);
        assert_eq!(size_of_class(513, 512), 1024);
        assert_eq!(size_of_class(4 << 20, 512), 4 << 20);
        assert_eq!(size_of_class((1 << 20) + 1, 512), (1 << 20) + (128 << 10));
        assert_eq!(size_of_class((64 << 20) + 1, 512), 66 << 20);
        assert_eq!(size_of_class(1000, 1), 1000);
        assert_eq!(size_of_class(u64::MAX, 512), u64::MAX);
        for bytes in (4096..1 << 20).step_by(4099) {
            let size = size_of_class(bytes, 512);
            assert!(size >= bytes && size - bytes <= bytes / 8, "{bytes}: {size}");
            assert_eq!(size_of_class(size, 512), size);
        }
    }
}
