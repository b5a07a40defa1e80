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
//! Memory that is handed out again starts with the uses that it ended with, so its next use comes after them on any
//! stream. No use is forgotten before it is known to have passed.

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
            let text = "the host has no device memory: choose a device, `Device::first()` say, or `Buffer::pinned`";
            return Err(Error::new(ErrorKind::Usage, text));
        }
        Arena::of(device).device_heap(device).alloc(device, bytes, None, Request::UNRESERVED)
    }

    /// Page-locked host memory that `device` copies to and from at full speed.
    pub(crate) fn pinned(device: &Device, bytes: usize) -> Result<Owned> {
        Arena::of(device).pinned_heap(device).alloc(device, bytes, None, Request::UNRESERVED)
    }

    /// As [`on`](Self::on), for work that is about to be enqueued on `stream`: the memory belongs to a graph only if
    /// that stream is captured, whatever else the thread captures.
    pub(crate) fn on_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).device_heap(device).alloc_for(stream, bytes)
    }

    /// As [`on_for`](Self::on_for), page-locked on the host.
    pub(crate) fn pinned_for(stream: &Stream, bytes: usize) -> Result<Owned> {
        let device = stream.device();
        Arena::of(device).pinned_heap(device).alloc_for(stream, bytes)
    }

    /// Replaces its uses with `point`: all work that comes after the point comes after them, too. (On that stream the
    /// block is found without the clock the next time.)
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
                // Cached memory may make room, and freed memory whose uses are done by now.
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

    /// Memory for work on `stream`, and for work ordered after that; without a stream, for any.
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

    /// Memory for use on `stream`, by any thread: of its graph if the stream is captured, and of no graph otherwise.
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

    /// Memory of a capture's graph.
    pub(super) fn alloc_captured(
        self: &Arc<Self>,
        capture: &dyn CaptureMemory,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        self.check_stream(device, stream)?;
        // Host memory holds data that the launches read: it is written now, so it cannot be reused. And a reservation
        // must be drawn.
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
                let text =
                    format!("memory of {device} for a stream of {}: choose one of its own device", stream.device());
                Err(Error::new(ErrorKind::Usage, text))
            }
            _ => Ok(()),
        }
    }

    /// Memory of no graph.
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
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        // Without tracking, a request may get any block that no tracked device uses, so that the checker finds the
        // race.
        let untracked = !device.tracked() && !self.is_host();
        let past = stream.map(Stream::ordered_after);
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
        // Also without waiting on a stream.
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
            // Freed memory whose uses are done is free now (or the driver's, if its allocator was dropped). Free memory
            // of other sizes or allocators may make room.
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
            // The driver may have got more back than it gives out here.
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

    /// Called when memory that was counted or taken is free again after all: tasks that checked meanwhile check again.
    #[cold]
    pub(super) fn request_failed(&self, mut state: MutexGuard<'_, HeapState>, request: Request) {
        // A task in the queue would wake itself, and tasks in two queues would wake each other. It notifies when it
        // leaves.
        if request != Request::Queued {
            state.accounting.refuse();
            drop(state);
            self.ledger.notify_later();
        }
    }

    /// A parked block that fits, after making the stream wait for its uses.
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
        // The completion monitor may have found a free block meanwhile.
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
            // The caller has its reservation back.
            lock(&self.state).accounting.restore(request.drawn());
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

    /// A fault reported by an allocation ends the device for all users.
    pub(super) fn observe_loss<T>(&self, device: &Device, result: Result<T>) -> Result<T> {
        match result {
            Err(error) if error.is_device_lost() => Streams::of(device).observe(Err(error)),
            other => other,
        }
    }
}
