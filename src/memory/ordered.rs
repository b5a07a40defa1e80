//! Stream-ordered memory: the driver's own pool, on the streams themselves.
//!
//! ```text
//!   alloc on s   enqueued: the memory is valid from this point of s on; others wait for it, as for a write on s
//!   drop         s waits, on the device, for the uses on others; then the free is enqueued into s: at once if there is
//!                room, otherwise once there is, at a tick of the completion monitor or by an allocation that
//!                finds no memory
//! ```
//!
//! The driver decides what is reused and when. wakeline counts the requested bytes until the free has run.

use std::sync::{Arc, OnceLock};

use super::{
    Home, Memory, Origin, Owned, Staging,
    access::Uses,
    heap::{Heap, RequestKind},
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
        asker: RequestKind,
    ) -> Result<Owned> {
        let stream = stream.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "stream-ordered memory needs a stream: pass one to `Allocator::alloc`")
        })?;
        match self.try_alloc_on(device, bytes, stream, asker) {
            Err(error) if error.is_out_of_memory() => {
                // Freed memory whose uses are done is counted as free now, and other allocators' cached memory may make
                // room.
                self.ledger.sweep(false);
                self.ledger.trim(false);
                let again = self.try_alloc_on(device, bytes, stream, asker);
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
        asker: RequestKind,
    ) -> Result<Owned> {
        let size = bytes as u64;
        let mut state = lock(&self.state);
        if !self.has_room(&state, size, asker) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no room"));
        }
        state.count(size, size, asker.drawn());
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
                lock(&self.state).came_from_driver();
                self.ledger.add(size);
                let mut uses = Uses::default();
                uses.written_by(&ticket);
                Ok(Owned::new(Box::new(Memory {
                    device: device.clone(),
                    home: Home::Device(address),
                    bytes,
                    size,
                    lane: stream.id(),
                    uses: uses.locked(),
                    shared_uses: OnceLock::new(),
                    staging: Staging::default(),
                    account: None,
                    origin: Origin::Ordered { heap: self.clone(), stream: stream.clone() },
                })))
            }
            (made, _) => {
                let mut state = lock(&self.state);
                state.uncount(size, size, asker.drawn());
                self.request_failed(state, asker);
                Err(made.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::Driver, "the driver returned no address for an allocation")
                }))
            }
        }
    }
}

impl Memory {
    /// Frees it to the driver's pool, in stream order.
    #[cold]
    pub(super) fn go_back_in_order(mut self: Box<Self>) {
        match self.free_if_room(false) {
            Freed::InTurn(stream) => self.shelve(Some(stream)),
            Freed::Not => self.leak(),
            Freed::Later => self.bind(|state, memory| state.aside.push(memory)),
        }
    }

    /// Enqueues the free, if the stream's queue has room. `asks`: the device may be queried for room.
    fn free_if_room(&mut self, asks: bool) -> Freed {
        let (Home::Device(address), Origin::Ordered { stream, .. }) = (self.home, &self.origin) else {
            return Freed::Not;
        };
        if self.device.is_lost() {
            return Freed::Not;
        }
        let stream = stream.clone();
        let Some(leave) = stream.room_if_any(asks) else { return Freed::Later };
        let ordered = self.own_uses().each(|ticket| stream.wait_until_over(ticket));
        let freed = ordered.and_then(|()| {
            // SAFETY: the address came from `alloc_on` of this device, its owner was dropped, and the stream comes
            // after all work that was enqueued with it.
            stream.enqueue(leave, |backend, raw| unsafe { backend.free_on(raw, address) })
        });
        match freed {
            Ok(ticket) => {
                self.note_write(&ticket);
                Freed::InTurn(stream.id())
            }
            Err(error) => {
                if !error.is_device_lost() {
                    let bytes = self.bytes;
                    log(move || tracing::error!(%error, bytes, "memory could not be given back"));
                }
                Freed::Not
            }
        }
    }
}

/// The outcome of freeing memory that was dropped.
enum Freed {
    /// Enqueued on this stream.
    InTurn(u64),
    /// The stream's queue is full.
    Later,
    /// Refused: the memory is leaked.
    Not,
}

impl Heap {
    /// Enqueues the frees of memory that was dropped while its stream's queue was full, where there is room now. The
    /// memory counts as bound all the while: a task that checks meanwhile finds that it will become free.
    pub(super) fn retry_frees(&self) {
        if !Capture::may_query_device() {
            return;
        }
        let aside = std::mem::take(&mut lock(&self.state).aside);
        let mut full: Option<u64> = None;
        for mut memory in aside {
            let lane = memory.lane;
            // One answer for all further memory of the same stream.
            let freed = if full == Some(lane) { Freed::Later } else { memory.free_if_room(true) };
            let mut state = lock(&self.state);
            match freed {
                Freed::InTurn(stream) => state.shelves.put_bound(memory, Some(stream)),
                Freed::Later => {
                    full = Some(lane);
                    state.aside.push(memory);
                }
                Freed::Not => {
                    state.unbinds(&memory);
                    drop(state);
                    memory.leak();
                }
            }
        }
    }

    /// The end of the stream whose queue had no room for a free: once that has passed, there is room.
    pub(super) fn queue_end(&self) -> Option<Ticket> {
        let stream = match &lock(&self.state).aside.first()?.origin {
            Origin::Ordered { stream, .. } => stream.clone(),
            _ => return None,
        };
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
        // Memory that found no room is freed when there is some.
        while pool.stats().waiting > 0 {
            std::thread::yield_now();
        }
    }
}
