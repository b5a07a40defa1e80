//! Stream-ordered memory: the driver's own pool, on the streams themselves.
//!
//! ```text
//!   alloc on s   enqueued: the memory is valid from this point of s on; other streams wait for it, as for a write on s
//!   drop         s waits, on the device, for the uses on other streams; then the free is enqueued into s: at once if
//!                there is room, otherwise once there is, at a tick of the completion monitor or by an allocation
//!                that finds no memory
//! ```
//!
//! The driver decides which memory is reused, and when. wakeline counts the requested bytes until the free has run.

use std::sync::Arc;

use super::{
    Location, Memory, Owned,
    accounting::Extent,
    heap::{Heap, Request},
    memory::Origin,
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    stream::{Stream, Ticket, capture::Capture},
    sync::{lock, log},
};

impl Heap {
    pub(super) fn alloc_on(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        request: Request,
    ) -> Result<Owned> {
        let stream = stream.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "stream-ordered memory needs a stream: pass one to `Allocator::alloc`")
        })?;
        match self.try_alloc_on(device, bytes, stream, request) {
            Err(error) if error.is_out_of_memory() => {
                // This counts freed memory whose uses are done as free, and returning cached memory of other allocators
                // may make room.
                self.ledger.sweep(false);
                self.ledger.trim(false);
                let again = self.try_alloc_on(device, bytes, stream, request);
                again.map_err(
                    |error| {
                        if error.is_out_of_memory() { self.exhausted(bytes as u64, Some(error)) } else { error }
                    },
                )
            }
            outcome => outcome,
        }
    }

    fn try_alloc_on(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: &Stream,
        request: Request,
    ) -> Result<Owned> {
        let size = bytes as u64;
        let block = Extent { size, bytes: size };
        let mut state = lock(&self.state);
        if !state.accounting.has_room(size, request.drawn()) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no room"));
        }
        state.accounting.hand_out_new(block, request.drawn());
        drop(state);
        let mut address = None;
        let room = stream.make_room(|| ());
        let made = room.and_then(|(room, ())| {
            stream.enqueue(room, |backend, raw| {
                address = Some(backend.alloc_on(raw, size)?);
                Ok(())
            })
        });
        match (made, address) {
            (Ok(ticket), Some(address)) => {
                lock(&self.state).accounting.new_arrived(block);
                let origin = OrderedOrigin { heap: self.clone(), stream: stream.clone() };
                let location = Location::Device(address);
                let mut memory = Memory::owned(device.clone(), location, block, stream.id(), Arc::new(origin));
                memory.uses_mut().written_by(&ticket);
                Ok(memory)
            }
            (made, _) => {
                let mut state = lock(&self.state);
                state.accounting.new_failed(block, request.drawn());
                self.request_failed(state, request);
                Err(made.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::Driver, "the driver returned no address for an allocation")
                }))
            }
        }
    }
}

/// The origin of memory of the driver's own pool: the memory is freed to the pool on `stream`.
struct OrderedOrigin {
    heap: Arc<Heap>,
    stream: Stream,
}

impl Origin for OrderedOrigin {
    /// Frees the memory to the driver's pool, in stream order.
    #[cold]
    fn take_back(self: Arc<Self>, memory: Box<Memory>) {
        let Some(mut memory) = memory.unless_shared(&self) else { return };
        let Self { heap, stream } = &*self;
        let freed = free_if_room(&mut memory, stream, false);
        memory.origin = Some(self.clone());
        match freed {
            Freed::Enqueued => heap.park_with(memory, |state, memory| state.free_lists.park(memory, Some(stream.id()))),
            Freed::Not => heap.leak(&memory),
            Freed::Later => {
                heap.park_with(memory, |state, memory| state.unreturned.push((stream.clone(), memory)));
            }
        }
    }

    fn own(&self, flow: usize, bytes: u64) {
        self.heap.own(flow, bytes);
    }

    fn disown(&self, flow: usize, bytes: u64) {
        self.heap.disown(flow, bytes);
    }
}

/// Enqueues the free if the stream's queue has room. `asks` is true if the device may be queried for room.
fn free_if_room(memory: &mut Memory, stream: &Stream, asks: bool) -> Freed {
    let Location::Device(address) = memory.location else { return Freed::Not };
    if memory.device.is_lost() {
        return Freed::Not;
    }
    let Some(permit) = stream.room_if_any(asks) else { return Freed::Later };
    let ordered = memory.uses_mut().each(|ticket| stream.wait_until_over(ticket));
    let freed = ordered.and_then(|()| {
        // SAFETY: the address came from `alloc_on` of this device, its owner was dropped, and the stream comes after all
        // work that was enqueued with it.
        stream.enqueue(permit, |backend, raw| unsafe { backend.free_on(raw, address) })
    });
    match freed {
        Ok(ticket) => {
            memory.note_write(&ticket);
            Freed::Enqueued
        }
        Err(error) => {
            if !error.is_device_lost() {
                let bytes = memory.bytes;
                log(
                    move || tracing::error!(error = %format_args!("{error:#}"), bytes, "memory could not be given back"),
                );
            }
            Freed::Not
        }
    }
}

/// The outcome of freeing memory that was dropped.
enum Freed {
    /// Enqueued on the stream.
    Enqueued,
    /// The stream's queue is full.
    Later,
    /// Failed: the memory is leaked.
    Not,
}

impl Heap {
    /// Enqueues the frees of memory that was dropped while its stream's queue was full, where there is room now. The
    /// memory counts as parked the whole time, so a task that checks in between finds that it will become free.
    pub(super) fn retry_frees(&self) {
        if !Capture::may_query_device() {
            return;
        }
        let unreturned = std::mem::take(&mut lock(&self.state).unreturned);
        let mut full: Option<u64> = None;
        for (stream, mut memory) in unreturned {
            // If the queue of a stream is full, it is not queried again for more memory of the same stream.
            let is_full = full == Some(stream.id());
            let freed = if is_full { Freed::Later } else { free_if_room(&mut memory, &stream, true) };
            let mut state = lock(&self.state);
            match freed {
                Freed::Enqueued => state.free_lists.park(memory, Some(stream.id())),
                Freed::Later => {
                    full = Some(stream.id());
                    state.unreturned.push((stream, memory));
                }
                Freed::Not => {
                    state.accounting.leak_parked(memory.extent());
                    drop(state);
                    self.leaked(&memory);
                }
            }
        }
    }

    /// The end of the stream whose queue had no room for a free: once it has passed, there is room.
    pub(super) fn queue_end(&self) -> Option<Ticket> {
        let stream = lock(&self.state).unreturned.first()?.0.clone();
        Some(stream.ticket())
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use crate::{
        Stream,
        device::{Device, Emulated, backend::Pattern},
        memory::{Allocator, Memory},
    };

    /// A thread that has reserved room in the queue enqueues under the stream's lock without waiting, however much
    /// memory other threads have dropped since.
    #[test]
    fn drops_take_no_queue_room_that_another_thread_has_reserved() {
        let device = Device::emulated(Emulated::new().queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let pool = Allocator::stream_ordered(&device);
        let all: Vec<_> = (0..64).map(|_| pool.alloc::<u32>(&stream, 4).unwrap()).collect();
        stream.synchronize_blocking().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        let (report, enqueued) = mpsc::channel();
        let (memory, on) = (Memory::on(&device, 16).unwrap(), stream.clone());
        let fills = std::thread::spawn(move || {
            let address = memory.address().unwrap();
            let (leave, ()) = on.make_room(|| ()).unwrap();
            drop(all);
            let zero = Pattern { width: 1, bits: 0 };
            // SAFETY: `memory` has this length, and lives until the stream is done.
            let filled = on.enqueue(leave, |backend, raw| unsafe { backend.fill(raw, address, zero, 16) });
            report.send(()).unwrap();
            (memory, filled)
        });
        let in_time = enqueued.recv_timeout(Duration::from_secs(10)).is_ok();
        drop(go);
        let (_memory, filled) = fills.join().unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(filled.is_ok() && in_time, "it waited for room in the stream's queue: {filled:?}");
        // Memory that found no room is freed once there is room.
        while pool.stats().waiting > 0 {
            std::thread::yield_now();
        }
    }
}
