//! The host's access to memory, and the staging of memory that no device copies from or to directly: the memory of
//! [`Device::host`](crate::Device::host), including the user's own memory.
//!
//! This memory is not page-locked. A direct copy would block: `cuMemcpyAsync` returns only when pageable memory has
//! been copied, after all earlier work of the stream (CUDA Driver API, *API synchronization behavior*), and other users
//! of the stream would wait, too. So the memory is **staged**. For a copy to a device, the host first copies the data
//! to page-locked memory, and the device copies from there. A copy from a device arrives in page-locked memory, and the
//! host transfers it when it first accesses the memory ([`Buffer::read`](crate::Buffer::read),
//! [`Wrapped::into_inner`](super::Wrapped::into_inner)); until then, a copy onwards to a device starts from the
//! arrival. So streams never access the staged memory itself, and it can be freed as soon as its owner is dropped.
//!
//! A graph launch would not repeat the host's part of such a copy, so in a capture it is an error.

use std::{ops::Range, ptr::NonNull, sync::Arc};

use smallvec::SmallVec;

use super::{
    Location, Memory, Owned, View,
    memory::{Arrivals, StagedPart},
};
use crate::{
    error::{Error, ErrorKind, Result},
    stream::Stream,
    sync::{Deferred, Level, Mutex, lock},
};

/// Transfers the arrivals to the memory.
///
/// # Safety
/// The caller has exclusive access to `location`, host memory of `bytes` bytes, or there are no arrivals.
pub(super) unsafe fn transfer_arrivals(location: Location, bytes: usize, arrivals: &mut Arrivals) -> Result<()> {
    let Location::Host(to) = location else { return Ok(()) };
    // All or none: while one arrival is tainted, every access fails with its error until the memory is overwritten.
    let all: SmallVec<[(usize, &[u8]); 1]> = arrivals
        .iter()
        .map(|arrival| arrival.memory.host_slice().map(|from| (arrival.offset, from)))
        .collect::<Result<_>>()?;
    for (offset, from) in all {
        let count = from.len().min(bytes.saturating_sub(offset));
        // SAFETY: `count` bytes from `offset` on lie within the memory, and are at most the arrival's; the arrival is
        // separate memory.
        unsafe { to.add(offset.min(bytes)).copy_from_nonoverlapping(NonNull::from(from).cast(), count) };
    }
    arrivals.clear();
    Ok(())
}

impl Memory {
    pub(crate) fn host_range(&self) -> Result<std::ops::Range<usize>> {
        let start = self.host_pointer()?.addr().get();
        Ok(start..start + self.bytes)
    }

    pub(super) fn host_pointer(&self) -> Result<NonNull<u8>> {
        match self.location {
            Location::Host(pointer) => Ok(pointer),
            Location::Device(_) => Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "the host cannot access memory on {}: send the envelope to an operator on the host, or copy it \
                     to a `Buffer::pinned` with `Stream::copy`",
                    self.device
                ),
            )),
        }
    }

    /// The bytes, for reading by the host. Fails if a write is in flight.
    pub(crate) fn host_slice(&self) -> Result<&[u8]> {
        let pointer = self.host_pointer()?;
        self.check_not_in_graph(false)?;
        self.check_no_use_in_flight(false)?;
        self.transfer_arrivals()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, false)?;
        self.note_borrow(pointer, false);
        // SAFETY: the memory is owned by this value, `bytes` long and initialised (`Backend` requires it). The device
        // does not write to it while `&self` is borrowed: no write is in flight; no node of a graph, or of a capture
        // that may become a graph, writes it (`check_not_in_graph`: a node is counted from before it is added until it
        // can no longer be launched); and a new write, or a new node that writes, needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), self.bytes) })
    }

    /// The bytes, for writing by the host. Fails if a use is in flight.
    pub(crate) fn host_slice_mut(&mut self) -> Result<&mut [u8]> {
        let pointer = self.host_pointer()?;
        self.check_writable()?;
        self.check_not_in_graph(true)?;
        self.check_no_use_in_flight(true)?;
        self.transfer_arrivals()?;
        self.device.backend().host_access(pointer.as_ptr(), self.bytes, true)?;
        self.note_borrow(pointer, true);
        // SAFETY: as in `host_slice`. The device neither reads nor writes it, no node of a graph or of a capture uses
        // it, and any new use needs this value, which is borrowed exclusively.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), self.bytes) })
    }

    fn check_no_use_in_flight(&self, write: bool) -> Result<()> {
        // Forgotten tickets may be the last handles of a stream.
        let _later = Deferred::new();
        let mut uses = self.uses();
        uses.forget_settled();
        let open = uses.open(write);
        drop(uses);
        for (mut ticket, taint_matters) in open {
            if ticket.query()? {
                if taint_matters {
                    ticket.check_taint()?;
                }
            } else {
                let stream = ticket.stream().name().to_string();
                return Err(Error::new(
                    ErrorKind::Usage,
                    format!(
                        "the host cannot access memory that stream `{stream}` still uses: await `read()` or \
                         `write()` first"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// True if all enqueued work on the memory is done and valid. These uses are then forgotten, together with the
    /// order that their streams carry. Queries the device without waiting for it.
    ///
    /// # Errors
    /// The error of the enqueued work.
    pub(crate) fn forget_work(&mut self) -> Result<bool> {
        // Kept until the end, so that no ticket is dropped under the lock.
        let all = self.uses_mut().all();
        let open = self.uses_mut().open(true);
        for (mut ticket, taint_matters) in open {
            if !ticket.query()? {
                return Ok(false);
            }
            // A tainted read does not affect the memory.
            if taint_matters {
                ticket.check_taint()?;
            }
        }
        if !all.is_empty() {
            self.uses_mut().forget_passed();
            self.forget_work_on_arrivals();
        }
        Ok(true)
    }

    /// Fails for memory that devices cannot copy from and to directly.
    pub(crate) fn check_page_locked(&self) -> Result<()> {
        if !self.is_staged() {
            return Ok(());
        }
        let text = "this host memory is not page-locked for a device, so the host takes part in its copies, which a \
                    graph launch cannot repeat: use memory from `Buffer::pinned(&device, ..)`";
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// Forgets the completed uses of arrivals that are not yet transferred.
    pub(super) fn forget_work_on_arrivals(&self) {
        let Some(arrivals) = self.arrivals.get() else { return };
        let arrivals = lock(arrivals).clone();
        for arrival in arrivals {
            // Dropped after the lock is released.
            let open = arrival.memory.uses().all();
            arrival.memory.uses().forget_passed();
            drop(open);
        }
    }

    /// Calls `show` with each piece of memory from which `stream` must copy to get the bytes of `range`: the last arrival
    /// that is not yet transferred and, if it does not cover the range, before it earlier arrivals or a copy that is made
    /// now. The arguments are a view of bytes, and their position in the range.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) while data is on its way from a device that the stream's device cannot copy from.
    pub(super) fn staged(
        &self,
        stream: &Stream,
        range: Range<usize>,
        mut show: impl FnMut(View<'_>, usize) -> Result<()>,
    ) -> Result<()> {
        let first = self.host_pointer()?;
        let bytes = range.len();
        // If a copy on the host is needed, its memory is allocated without the lock, since an allocation may take long.
        let mut blank = None;
        let (now, arrivals) = loop {
            let _later = Deferred::new();
            let mut arrivals = lock(self.arrivals());
            if arrivals.iter().any(|arrival| !arrival.memory.device().copies_with(stream.device())) {
                // The stream's device cannot copy from the arrival, so a completed arrival is transferred to the host
                // memory first. SAFETY: as in `Memory::transfer_arrivals`.
                unsafe { transfer_arrivals(self.location, self.bytes, &mut arrivals) }?;
            }
            let covers = |arrival: &StagedPart| {
                let there = arrival.range();
                there.start <= range.start && range.end <= there.end
            };
            let whole = arrivals.iter().rposition(covers);
            // No arrival with bytes of the range is added in the meantime, since that needs exclusive access to them, and a
            // transfer does not change the contents of an arrival.
            let on_their_way: Arrivals = arrivals[whole.unwrap_or(0)..].iter().cloned().collect();
            if whole.is_some() {
                break (None, on_their_way);
            }
            let Some(mut copy) = blank.take() else {
                drop(arrivals);
                blank = Some(Memory::pinned_for(stream, bytes)?);
                continue;
            };
            self.device.backend().host_access(first.as_ptr(), self.bytes, false)?;
            // SAFETY: the memory is owned by this value, and the range lies within it, as `copy_bytes` has checked. No
            // stream writes to it, the host writes only through the value, of which the range is borrowed, and arrivals are
            // transferred under the lock held here.
            let host = unsafe { std::slice::from_raw_parts(first.add(range.start).as_ptr(), bytes) };
            copy.host_slice_mut()?.copy_from_slice(host);
            break (Some(copy), on_their_way);
        };
        now.iter().try_for_each(|copy| show(View::of(copy, bytes), 0))?;
        arrivals.iter().try_for_each(|arrival| {
            let there = arrival.range();
            let (start, end) = (there.start.max(range.start), there.end.min(range.end));
            if start >= end {
                return Ok(());
            }
            show(View { memory: &arrival.memory, offset: start - there.start, len: end - start }, start - range.start)
        })
    }

    fn arrivals(&self) -> &Mutex<Arrivals> {
        self.arrivals.get_or_init(|| Box::new(Mutex::at(Level::Arrivals, Arrivals::new())))
    }

    /// Adds an arrival whose copy was enqueued, for the bytes from `offset` on, to which the caller has exclusive access.
    pub(super) fn add_arrival(&self, arrival: Owned, offset: usize) {
        let arrival = StagedPart { memory: Arc::new(arrival), offset };
        let new = arrival.range();
        let mut arrivals = lock(self.arrivals());
        // Arrivals that the new one covers completely are no longer needed. Dropped without the lock.
        let is_covered = |before: &StagedPart| {
            let old = before.range();
            new.start <= old.start && old.end <= new.end
        };
        let covered: Arrivals = arrivals.iter().filter(|before| is_covered(before)).cloned().collect();
        arrivals.retain(|before| !is_covered(before));
        arrivals.push(arrival);
        drop(arrivals);
        drop(covered);
    }

    /// Transfers the arrivals before an access by the host. No write to the memory is in flight.
    pub(super) fn transfer_arrivals(&self) -> Result<()> {
        let Some(arrivals) = self.arrivals.get() else { return Ok(()) };
        let _later = Deferred::new();
        // A concurrent access waits here until the transfer is done.
        let mut arrivals = lock(arrivals);
        if arrivals.is_empty() {
            return Ok(());
        }
        // SAFETY: the memory is owned by this value. No slice of the memory exists: a slice that was made before these
        // arrivals has ended, as an arrival is added only with exclusive access to its bytes, and no slice is made before
        // they are transferred, under this lock.
        unsafe { transfer_arrivals(self.location, self.bytes, &mut arrivals) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        Buffer,
        device::{Device, Emulated, Faults},
        memory::DeviceSlice,
    };

    /// The loss of a device becomes known after the last write of the memory was found to be valid, and before the
    /// arrivals are accessed.
    #[test]
    fn arrivals_stay_while_one_is_tainted() {
        let (device, lost) =
            (Device::emulated(Emulated::new()), Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1))));
        let (stream, of_lost) = (Stream::new(&device).unwrap(), Stream::new(&lost).unwrap());
        let [sound, anew] = [2, 3].map(|value| Buffer::from_slice(&stream, &[value; 8]).unwrap());
        let (mut mine, back) = Buffer::wrap(vec![1_u8; 8]).unwrap();
        stream.copy(&sound, &mut mine).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        of_lost.host_function(move || _ = wait.recv()).unwrap();
        let mut tainted = Buffer::<u8>::new(&lost, 8).unwrap();
        of_lost.copy(&Buffer::<u8>::new(&lost, 8).unwrap(), &mut tainted).unwrap();
        stream.copy(&tainted.slice(..4).unwrap(), &mut mine.slice_mut(..4).unwrap()).unwrap();
        drop(go);
        assert!(of_lost.synchronize_blocking().is_err() && stream.synchronize_blocking().is_err());
        for look in 0..3 {
            let error = mine.view().memory.transfer_arrivals().expect_err("one of the arrivals is tainted");
            assert!(error.is_device_lost(), "look {look}: {error}");
            assert_eq!(lock(mine.view().memory.arrivals()).len(), 2, "look {look}");
        }
        stream.copy(&anew, &mut mine).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(mine.as_slice().unwrap(), [3; 8]);
        drop(mine);
        assert_eq!(futures::executor::block_on(back.into_inner()).unwrap(), [3; 8]);
    }
}
