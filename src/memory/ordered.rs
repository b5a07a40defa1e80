//! Stream-ordered memory: the driver's own pool, on the streams themselves.
//!
//! ```text
//!   alloc on s   enqueued: the memory is there from this point of s on; others wait for it, as for a write on s
//!   drop         s waits, on the device, for the uses on others; then the free is enqueued into s
//! ```
//!
//! The driver decides what is used again and when; wakeline counts what was asked for, until the free has had its turn.

use std::sync::{Arc, OnceLock};

use super::{Home, Memory, Origin, Owned, access::Uses, heap::Heap};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    stream::{READS_NOTHING, Stream},
    sync::{lock, log},
};

impl Heap {
    pub(super) fn alloc_on(
        self: &Arc<Self>,
        device: &Device,
        bytes: usize,
        stream: Option<&Stream>,
        drawn: u64,
    ) -> Result<Owned> {
        let stream = stream.ok_or_else(|| {
            Error::new(ErrorKind::Usage, "stream-ordered memory is made on a stream: `Allocator::alloc` takes one")
        })?;
        match self.try_alloc_on(device, bytes, stream, drawn) {
            Err(error) if error.is_out_of_memory() => {
                // What is done counts as free, and what others keep may make room.
                self.ledger.sweep(false);
                self.ledger.trim(false);
                let again = self.try_alloc_on(device, bytes, stream, drawn);
                again.map_err(
                    |error| {
                        if error.is_out_of_memory() { self.exhausted(bytes as u64, Some(error)) } else { error }
                    },
                )
            }
            outcome => outcome,
        }
    }

    fn try_alloc_on(self: &Arc<Self>, device: &Device, bytes: usize, stream: &Stream, drawn: u64) -> Result<Owned> {
        let size = bytes as u64;
        let mut state = lock(&self.state);
        if !self.has_room(&state, size, drawn) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no room"));
        }
        state.count(size, size, drawn);
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
                uses.written_by(ticket);
                Ok(Owned::new(Box::new(Memory {
                    device: device.clone(),
                    home: Home::Device(address),
                    bytes,
                    size,
                    lane: stream.id(),
                    uses: uses.locked(),
                    tie: OnceLock::new(),
                    account: None,
                    origin: Origin::Ordered { heap: self.clone(), stream: stream.clone() },
                })))
            }
            (made, _) => {
                lock(&self.state).uncount(size, size, drawn);
                Err(made.err().unwrap_or_else(|| Error::new(ErrorKind::Driver, "an allocation without an address")))
            }
        }
    }
}

impl Memory {
    /// Back to the driver's pool, in its turn.
    #[cold]
    pub(super) fn go_back_in_order(mut self: Box<Self>) {
        let (Home::Device(address), Origin::Ordered { stream, .. }) = (self.home, &self.origin) else { return };
        if self.device.is_lost() {
            return self.leak();
        }
        let stream = stream.clone();
        let ordered = self.own_uses().each(|ticket| stream.wait_until_over(ticket));
        let freed = ordered.and_then(|()| {
            // Counted, but not waited for: this is a drop.
            // SAFETY: the address came from `alloc_on` on this device, its owner is gone, and the stream comes after all
            // that was enqueued with it.
            stream.put(1, READS_NOTHING, |backend, raw| unsafe { backend.free_on(raw, address) })
        });
        match freed {
            Ok(ticket) => {
                self.note_write(ticket);
                self.shelve(Some(stream.id()));
            }
            Err(error) => {
                if !error.is_device_lost() {
                    let bytes = self.bytes;
                    log(move || tracing::error!(%error, bytes, "memory could not be given back"));
                }
                self.leak();
            }
        }
    }
}
