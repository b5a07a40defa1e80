//! [`Slab`]: pieces of memory that lie one behind the other in one allocation, so that one copy can serve several of them.
//!
//! ```text
//!   [ piece 0 ][ piece 1 ][ piece 2 ] ..     each is used and dropped like any other memory, with its own record of uses
//!   └ one allocation, returned to its heap once the last piece was dropped, with the uses of all pieces
//! ```

use std::{any::Any, sync::Arc};

use super::{Memory, Owned, accounting::Extent, memory::Origin};
use crate::{
    device::backend::MAX_ALIGNMENT,
    error::{Error, ErrorKind, Result},
};

/// See the [module](self).
struct Slab {
    whole: Owned,
}

impl Memory {
    /// `count` pieces of `bytes` bytes each, one behind the other in memory that `alloc` allocates.
    ///
    /// # Errors
    /// Those of `alloc`; [`Usage`](ErrorKind::Usage) for memory of a capture, whose uses are recorded as a whole.
    pub(crate) fn slab(
        count: usize,
        bytes: usize,
        alloc: impl FnOnce(usize) -> Result<Owned>,
    ) -> Result<impl Iterator<Item = Owned>> {
        let size = bytes.checked_next_multiple_of(MAX_ALIGNMENT).unwrap_or(usize::MAX);
        let whole = alloc(size.saturating_mul(count))?;
        if whole.shared.get().is_some() {
            return Err(Error::new(ErrorKind::Usage, "memory of a capture is not split into envelopes"));
        }
        let slab = Arc::new(Slab { whole });
        Ok((0..count).map(move |at| {
            let Slab { whole } = &*slab;
            let extent = Extent { size: size as u64, bytes: bytes as u64 };
            let mut piece =
                Self::owned(whole.device.clone(), whole.location.behind(at * size), extent, 0, slab.clone());
            // Memory that was used before is handed out with uses that all later uses come after.
            *piece.uses_mut() = whole.uses().clone();
            piece
        }))
    }

    /// Whether `next` lies directly behind this memory, in the same allocation.
    pub(super) fn is_before(&self, next: &Self) -> bool {
        let (Some(origin), Some(other)) = (&self.origin, &next.origin) else { return false };
        let is_slab = (&**origin as &dyn Any).is::<Slab>();
        is_slab
            && std::ptr::addr_eq(Arc::as_ptr(origin), Arc::as_ptr(other))
            && self.location.behind(self.size as usize) == next.location
    }
}

impl Origin for Slab {
    fn take_back(self: Arc<Self>, piece: Box<Memory>) {
        let Some(mut piece) = piece.unless_shared(&self) else { return };
        let uses = std::mem::take(&mut *piece.uses_mut());
        // Later users of the whole memory wait for all uses of its pieces, whichever was last, as they would for reads.
        for ticket in uses.all() {
            let noted = self.whole.uses().read_by(&ticket);
            drop(noted);
        }
    }

    fn own(&self, flow: usize, bytes: u64) {
        if let Some(origin) = &self.whole.origin {
            origin.own(flow, bytes);
        }
    }

    fn disown(&self, flow: usize, bytes: u64) {
        if let Some(origin) = &self.whole.origin {
            origin.disown(flow, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        device::{Device, Emulated},
        graph::Graph,
        memory::transfer,
        stream::Stream,
    };

    fn slab(device: &Device) -> Result<Vec<Owned>> {
        Memory::slab(8, 100, |bytes| Memory::on(device, bytes)).map(Iterator::collect)
    }

    #[test]
    fn pieces_lie_one_behind_the_other_and_are_freed_after_the_last_use_of_all() {
        let device = Device::emulated(Emulated::new().workers(2));
        let stream = Stream::new(&device).unwrap();
        let (mut pieces, other) = (slab(&device).unwrap(), slab(&device).unwrap());
        assert!(pieces.windows(2).all(|two| two[0].is_before(&two[1])));
        assert!(!pieces[0].is_before(&pieces[2]) && !pieces[7].is_before(&other[0]));
        let one = Memory::on(&device, 8 * MAX_ALIGNMENT).unwrap();
        assert!(!one.is_before(&pieces[0]));
        drop((one, other));
        let (go, held) = mpsc::channel::<()>();
        stream.host_function(move || _ = held.recv()).unwrap();
        transfer::zero(&stream, &mut pieces[3], 0, 100).unwrap();
        drop(pieces);
        assert_eq!(device.memory_stats().waiting, 8 * MAX_ALIGNMENT as u64, "the device may still use one of them");
        drop(go);
        stream.synchronize_blocking().unwrap();
        // Freed by a sweep.
        while device.memory_in_use() > 0 {
            std::thread::yield_now();
        }
    }

    /// One copy for several pieces begins no later than that of the first alone.
    #[test]
    fn a_copy_does_not_wait_for_the_uses_of_other_pieces() {
        let device = Device::emulated(Emulated::new().workers(4));
        let [copies, other] = [(); 2].map(|()| Stream::new(&device).unwrap());
        for (is_source, is_read) in [(true, false), (false, false), (true, true)] {
            let (mut from, mut to) = (slab(&device).unwrap(), slab(&device).unwrap());
            let (go, held) = mpsc::channel::<()>();
            other.host_function(move || _ = held.recv()).unwrap();
            let used = if is_source { &mut from[1] } else { &mut to[1] };
            transfer::zero(&other, used, 0, 100).unwrap();
            used.commit().unwrap();
            if is_read {
                // Afterwards, on the same stream, but a read does not wait for a read.
                transfer::copy(&other, &from[0], &mut Memory::on(&device, 100).unwrap(), 100).unwrap();
                from[0].commit().unwrap();
            }
            let mut all: Vec<_> =
                from.iter().zip(&mut to).map(|(from, to)| transfer::JoinedCopy { from, to, bytes: 100 }).collect();
            transfer::copy_joined(&copies, &mut all).unwrap();
            futures::executor::block_on(to[0].host_access(false).wait()).unwrap();
            assert!(!to[1].state().unwrap().is_available());
            drop(go);
            futures::executor::block_on(to[7].host_access(false).wait()).unwrap();
        }
    }

    /// A graph knows the memory of its capture as a whole.
    #[test]
    fn memory_of_a_capture_is_not_split() {
        let device = Device::emulated(Emulated::new());
        let (_graph, refused) = Graph::capture(&device, |_| Ok(slab(&device).is_err())).unwrap();
        assert!(refused);
    }
}
