//! Allocation: which memory a request gets.
//!
//! ```text
//!   alloc on stream s takes the first of these that exists:
//!     a block that is parked for s alone        freed after its last use on s: s comes after that use anyway
//!     a free block
//!     a block whose uses s comes after          by its clock (s has waited for them), or they have passed
//!     a block whose uses have passed            after a query of the device, without waiting for it
//!     new memory from the driver                if necessary after free memory of any size was returned to it
//!     a parked block that is large enough       s waits for its uses, on the device
//!     an error with the numbers
//! ```
//!
//! Reused memory keeps its recorded uses, so its next use comes after them on any stream. A use is forgotten only once
//! it is known to have passed.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{
    Location, MAX_BYTES, Memory, Owned,
    accounting::Extent,
    arena::Arena,
    free_lists::Taken,
    graphs::{self, CaptureMemory},
    heap::{Heap, HeapKind, HeapState, Request},
    reclaim::first_of_each,
    uses::Uses,
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    stream::{Stream, Streams, Ticket},
    sync::{Deferred, MutexGuard, lock},
};

impl Memory {
    /// Device memory, contents unknown.
    pub(crate) fn on(device: &Device, bytes: usize) -> Result<Owned> {
        if device.is_host() {
            let text = "the host has no device memory: choose a device, for example with `Device::first()`, or use \
                        `Buffer::pinned`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Arena::of(device).device_heap(device).alloc(device, bytes, None, Request::UNRESERVED)
    }

    /// Page-locked host memory that `device` copies to and from at full speed.
    pub(crate) fn pinned(device: &Device, bytes: usize) -> Result<Owned> {
        Arena::of(device).pinned_heap(device).alloc(device, bytes, None, Request::UNRESERVED)
    }

    /// Like [`on`](Self::on), for work that is about to be enqueued on `stream`: the memory belongs to a graph only if
    /// `stream` is captured, regardless of other captures on this thread.
    pub(crate) fn on_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).device_heap(device).alloc_for(stream, bytes)
    }

    /// Like [`on_for`](Self::on_for), for page-locked host memory.
    pub(crate) fn pinned_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).pinned_heap(device).alloc_for(stream, bytes)
    }

    /// Replaces the memory's uses with `point`: all work after the point comes after these uses, too. A later request
    /// on the point's stream finds the block without consulting the clock.
    fn comes_before(&mut self, point: Option<&Ticket>) {
        let mut uses = self.uses_mut();
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
    pub(super) fn allocate_blocks(&self, device: &Device) -> Result<()> {
        let HeapKind::Blocks { bytes, count } = self.kind else { return Ok(()) };
        for _ in 0..count {
            let before = self.ledger.totals.returned();
            let location = match self.ask_driver(device, bytes) {
                // Returning cached memory, and freed memory whose uses are done by now, may make room.
                Err(error) if error.is_out_of_memory() && self.ledger.make_room(self.is_host(), before) => {
                    self.ask_driver(device, bytes)?
                }
                asked => asked?,
            };
            let mut state = lock(&self.state);
            state.accounting.add_free(bytes);
            state.free_lists.put_free(bytes, location);
        }
        Ok(())
    }

    /// Memory for work on `stream` and for work ordered after it; without a stream, for work on any stream.
    #[inline]
    pub(super) fn alloc(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        if bytes.wrapping_sub(1) >= MAX_BYTES {
            return Err(self.never(bytes));
        }
        match graphs::serving(device, stream)? {
            Some(capture) if self.kind != HeapKind::StreamOrdered => {
                self.alloc_captured(&*capture, device, bytes, stream, request)
            }
            _ => self.alloc_outside(device, bytes, stream, request),
        }
    }

    /// Memory for use on `stream` by any thread. It belongs to the stream's graph if the stream is captured, and to no
    /// graph otherwise.
    pub(super) fn alloc_for(self: &Arc<Self>, stream: &Stream, bytes: usize) -> Result<Owned> {
        if bytes.wrapping_sub(1) >= MAX_BYTES {
            return Err(self.never(bytes));
        }
        match graphs::serving(stream.device(), Some(stream))? {
            Some(capture) => self.alloc_captured(&*capture, stream.device(), bytes, None, Request::UNRESERVED),
            None => self.alloc_outside(stream.device(), bytes, Some(stream), Request::UNRESERVED),
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

    /// Memory that belongs to the graph of a capture.
    pub(super) fn alloc_captured(
        self: &Arc<Self>,
        capture: &dyn CaptureMemory,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        self.check_stream(device, stream)?;
        // Host memory is written now and read by the launches, so it cannot be reused within the capture. A request
        // with a reservation must draw on it.
        if let (Some(stream), false, 0) = (stream, self.is_host(), request.drawn())
            && let Some(again) = capture.reuse(&**self, bytes, stream)?
        {
            return Ok(again);
        }
        let mut memory = self.alloc_outside(device, bytes, None, request)?;
        capture.adopt(&mut memory)?;
        Ok(memory)
    }

    #[inline]
    fn check_stream(&self, device: &Device, stream: Option<&Stream>) -> Result<()> {
        match stream {
            Some(stream) if stream.device() != device && !self.is_host() => {
                let text = format!(
                    "memory on {device} was requested for a stream on {}: use an allocator of the stream's device",
                    stream.device()
                );
                Err(Error::new(ErrorKind::Usage, text))
            }
            _ => Ok(()),
        }
    }

    /// Memory that belongs to no graph.
    #[inline]
    fn alloc_outside(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        device.check()?;
        self.check_stream(device, stream)?;
        let stream = stream.filter(|_| !self.is_host());
        if self.kind == HeapKind::StreamOrdered {
            return self.alloc_on(device, bytes, stream, request);
        }
        let size = self.size_for(bytes as u64)?;
        let mut state = lock(&self.state);
        if (state.accounting.reserved() == 0 || state.accounting.has_room(size, request.drawn()))
            && let Some(taken) = state.free_lists.take(size, stream.map(Stream::id))
        {
            return self.hand_out(state, device, taken, bytes, size, stream, request);
        }
        drop(state);
        self.alloc_slowly(device, bytes, size, stream, request)
    }

    #[cold]
    fn alloc_slowly(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        // A forgotten ticket may be the last handle of its stream.
        let _later = Deferred::new();
        // Without tracking, a request may get any block that no tracked device uses, so that the checker finds the
        // race.
        let untracked = !device.tracked() && !self.is_host();
        let past = stream.map(Stream::ordered_after);
        // Comes after all work that the clock covered.
        let point = stream.map(Stream::ticket);
        let comes_after = |ticket: &Ticket| match &past {
            Some(past) => past(ticket),
            None => ticket.has_passed(),
        };
        let is_left = |ticket: &Ticket| untracked && !ticket.stream().device().tracked();
        let ready = |memory: &Memory| memory.uses().all_are(|ticket| is_left(ticket) || comes_after(ticket));
        let take = || {
            let mut state = lock(&self.state);
            let room = state.accounting.has_room(size, request.drawn());
            let free = if room { state.free_lists.take(size, stream.map(Stream::id)) } else { None };
            let taken = free.or_else(|| {
                let mut memory = if room || !self.has_blocks() {
                    state.free_lists.take_if(size, |memory| ready(memory))
                } else {
                    None
                }?;
                if !untracked {
                    memory.comes_before(point.as_ref());
                }
                Some(Taken::Parked(memory))
            });
            taken.map(|taken| self.hand_out(state, device, taken, bytes, size, stream, request))
        };
        if let Some(taken) = take() {
            return taken;
        }
        let first: SmallVec<[Ticket; 4]> = first_of_each(lock(&self.state).free_lists.firsts(Some(size)));
        if !first.is_empty() {
            self.observe(first, Some(size));
            if let Some(taken) = take() {
                return taken;
            }
        }
        let mut refused = None;
        if !self.has_blocks() {
            match self.alloc_new(device, bytes, size, stream.map_or(0, Stream::id), request) {
                Err(error) if error.is_out_of_memory() => refused = Some(error),
                new => return new,
            }
        }
        if let Some(stream) = stream
            && let Some(taken) = self.alloc_behind(device, bytes, size, stream, request)
        {
            return taken;
        }
        // Memory may have become free since the last attempt.
        take().unwrap_or_else(|| Err(self.exhausted(bytes as u64, refused)))
    }

    fn alloc_new(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: u64,
        request: Request,
    ) -> Result<Owned> {
        let before = self.ledger.totals.returned();
        let mut asked = self.try_new(device, bytes, size, stream, request);
        if let Err(error) = &asked
            && error.is_out_of_memory()
        {
            // This frees memory whose uses are done, or returns it to the driver if its allocator was dropped.
            // Returning free memory of other sizes or allocators may make room.
            if self.ledger.make_room(self.is_host(), before) {
                asked = self.try_new(device, bytes, size, stream, request);
            }
            if size > bytes as u64 && asked.as_ref().is_err_and(Error::is_out_of_memory) {
                asked = self.try_new(device, bytes, bytes as u64, stream, request);
            }
        }
        asked
    }

    fn try_new(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: u64,
        request: Request,
    ) -> Result<Owned> {
        let mut state = lock(&self.state);
        if !state.accounting.has_room(size, request.drawn()) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no room"));
        }
        let excess = state.accounting.excess(size);
        let returning = (excess > 0).then(|| self.ledger.returning());
        let evicted = if excess > 0 { state.evict(excess) } else { Vec::new() };
        let block = Extent { size, bytes: bytes as u64 };
        state.accounting.hand_out_new(block, request.drawn());
        drop(state);
        let has_evicted = !evicted.is_empty();
        self.release(evicted);
        drop(returning);
        let asked = self.ask_driver(device, size);
        if has_evicted {
            // The driver may have got back more memory than it allocates here.
            self.ledger.notify_later();
        }
        match asked {
            Ok(location) => {
                lock(&self.state).accounting.new_arrived(block);
                Ok(Memory::owned(device.clone(), location, block, stream, self.clone()))
            }
            Err(error) => {
                let mut state = lock(&self.state);
                state.accounting.new_failed(block, request.drawn());
                self.request_failed(state, request);
                Err(error)
            }
        }
    }

    /// Called when a request fails after its memory was counted or taken: wakes the tasks that checked the heap in the
    /// meantime.
    #[cold]
    pub(super) fn request_failed(&self, mut state: MutexGuard<'_, HeapState>, request: Request) {
        // A queued task would wake itself, and the tasks of two queues would wake each other. A queued task notifies
        // when it leaves the queue.
        if request != Request::Queued {
            state.accounting.refuse();
            drop(state);
            self.ledger.notify_later();
        }
    }

    /// Takes a parked block that fits, and makes the stream wait for its uses.
    fn alloc_behind(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        size: u64,
        stream: &Stream,
        request: Request,
    ) -> Option<Result<Owned>> {
        let mut state = lock(&self.state);
        if self.has_blocks() && !state.accounting.has_room(size, request.drawn()) {
            return None;
        }
        // The completion monitor may have freed a block since.
        let free = if self.has_blocks() { state.free_lists.take(size, None) } else { None };
        if let Some(taken) = free {
            return Some(self.hand_out(state, device, taken, bytes, size, Some(stream), request));
        }
        let mut memory = state.free_lists.take_parked(size)?;
        drop(state);
        // Not under the lock: a wait may wake tasks.
        let waited = memory.uses_mut().each(|ticket| stream.wait_until_over(ticket));
        let point = stream.ticket();
        let mut state = lock(&self.state);
        if let Err(error) = waited {
            state.free_lists.park(memory, None);
            self.request_failed(state, request);
            return Some(Err(error));
        }
        memory.comes_before(Some(&point));
        Some(self.hand_out(state, device, Taken::Parked(memory), bytes, size, Some(stream), request))
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
        request: Request,
    ) -> Result<Owned> {
        let id = stream.map_or(0, Stream::id);
        let (mut memory, was_parked) = match taken {
            Taken::Parked(mut memory) => {
                memory.discard_contents();
                state.accounting.hand_out_parked(memory.extent(), bytes as u64, request.drawn());
                drop(state);
                memory.bytes = bytes;
                memory.stream = id;
                (Owned::new(memory), true)
            }
            Taken::Free(location) => {
                let block = Extent { size, bytes: bytes as u64 };
                state.accounting.hand_out_free(block, request.drawn());
                drop(state);
                (Memory::owned(device.clone(), location, block, id, self.clone()), false)
            }
        };
        if self.wants_recycled
            && let Err(error) = self.recycle(&mut memory, stream.filter(|_| was_parked))
        {
            // Returns the reservation to the caller.
            lock(&self.state).accounting.restore(request.drawn());
            return Err(error);
        }
        Ok(memory)
    }

    /// Marks the contents as invalid, so that reading them is detected as an error.
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

    fn ask_driver(&self, device: &Device, size: u64) -> Result<Location> {
        device.check_process()?;
        let made = if self.is_host() {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            self.backend.alloc_host(size).map(Location::Host)
        } else {
            self.backend.alloc(size).map(Location::Device)
        };
        self.observe_loss(device, made)
    }

    /// If an allocation reports a fault, the device is lost for all users.
    pub(super) fn observe_loss<T>(&self, device: &Device, result: Result<T>) -> Result<T> {
        match result {
            Err(error) if error.is_device_lost() => Streams::of(device).observe(Err(error)),
            other => other,
        }
    }
}
