//! Stream-ordered memory: the driver's own pool, on the streams themselves.
//!
//! ```text
//!   alloc on s   enqueued: the memory is there from this point of s on; others wait for it, as for a write on s
//!   drop         s waits, on the device, for the uses on others; then the free is enqueued into s: at once if its queue has
//!                room, and otherwise once it has, at a beat of the lookout or by an allocation that finds no memory
//! ```
//!
//! The driver decides what is used again and when; wakeline counts what was asked for, until the free has had its turn.

use std::sync::{Arc, OnceLock};

use super::{
    Home, Memory, Origin, Owned, Staging,
    access::Uses,
    heap::{Asker, Heap},
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
        asker: Asker,
    ) -> Result<Owned> {
        let stream = stream.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "stream-ordered memory is made on a stream: `Allocator::alloc` takes one")
        })?;
        match self.try_alloc_on(device, bytes, stream, asker) {
            Err(error) if error.is_out_of_memory() => {
                // What is done counts as free, and what others keep may make room.
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

    fn try_alloc_on(self: &Arc<Self>, device: &Device, bytes: usize, stream: &Stream, asker: Asker) -> Result<Owned> {
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
                    tie: OnceLock::new(),
                    staging: Staging::default(),
                    account: None,
                    origin: Origin::Ordered { heap: self.clone(), stream: stream.clone() },
                })))
            }
            (made, _) => {
                let mut state = lock(&self.state);
                state.uncount(size, size, asker.drawn());
                self.has_not_come(state, asker);
                Err(made.err().unwrap_or_else(|| Error::new(ErrorKind::Driver, "an allocation without an address")))
            }
        }
    }
}

impl Memory {
    /// Back to the driver's pool, in its turn.
    #[cold]
    pub(super) fn go_back_in_order(mut self: Box<Self>) {
        match self.free_if_room(false) {
            Freed::InTurn(stream) => self.shelve(Some(stream)),
            Freed::Not => self.leak(),
            Freed::Later => self.bind(|state, memory| state.aside.push(memory)),
        }
    }

    /// Enqueues the free, if the stream's queue has room. `asks`: the device is asked for that.
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
            // SAFETY: the address came from `alloc_on` on this device, its owner is gone, and the stream comes after all
            // that was enqueued with it.
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

/// What has become of the free of memory that was dropped.
enum Freed {
    /// It has its turn on this stream.
    InTurn(u64),
    /// The stream's queue has no room.
    Later,
    /// It is refused: the memory is leaked.
    Not,
}

impl Heap {
    /// Gives back what was dropped while its stream's queue had no room, where that has some now. It counts as bound all the
    /// while: a task that looks meanwhile finds that it is still to come free.
    pub(super) fn give_back_what_waits(&self) {
        if !Capture::may_ask_device() {
            return;
        }
        let aside = std::mem::take(&mut lock(&self.state).aside);
        let mut full: Option<u64> = None;
        for mut memory in aside {
            let lane = memory.lane;
            // One answer for all that follow on the same stream.
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

    /// The end of the stream whose queue has had no room for memory that waits to be given back: then it has some.
    pub(super) fn room_comes(&self) -> Option<Ticket> {
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

    /// A thread that has a place in the queue enqueues under the stream's lock, and finds it: however much memory others have
    /// dropped since.
    #[test]
    fn drops_take_no_place_that_another_thread_has() {
        let device = Device::emulated(Emulated::new().queue_depth(16));
        let stream = Stream::new(&device).unwrap();
        let pool = Allocator::stream_ordered(&device);
        let all: Vec<_> = (0..64).map(|_| pool.alloc::<u32>(&stream, 4).unwrap()).collect();
        stream.synchronize_blocking().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        stream.host_function(move || _ = wait.recv()).unwrap();
        let (tell, enqueued) = mpsc::channel();
        let (memory, on) = (Memory::on(&device, 16).unwrap(), stream.clone());
        let fills = std::thread::spawn(move || {
            let address = memory.address().unwrap();
            let (leave, ()) = on.make_room(|| ()).unwrap();
            drop(all);
            let zero = Pattern { width: 1, bits: 0 };
            // SAFETY: `memory` is as long, and lives until the stream is done.
            let filled = on.enqueue(leave, |backend, raw| unsafe { backend.fill(raw, address, zero, 16) });
            tell.send(()).unwrap();
            (memory, filled)
        });
        let in_time = enqueued.recv_timeout(Duration::from_secs(10)).is_ok();
        drop(go);
        let (_memory, filled) = fills.join().unwrap();
        stream.synchronize_blocking().unwrap();
        assert!(filled.is_ok() && in_time, "it has waited in the device's queue: {filled:?}");
        // What found no room goes back when there is some.
        while pool.stats().waiting > 0 {
            std::thread::yield_now();
        }
    }
}
