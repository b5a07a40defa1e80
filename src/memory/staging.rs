//! Memory that no device copies from or to by itself: that of [`Device::host`](crate::Device::host), the user's own among it.
//!
//! It is not page-locked. A device would stop for it: `cuMemcpyAsync` returns only when such memory has been copied, after all
//! that its stream has to do before (CUDA Driver API, *API synchronization behavior*), and whatever else wants the stream
//! would wait that long, too. So it is **staged**. A copy to a device is made in page-locked memory, now, and goes on from
//! there. A copy from a device arrives in page-locked memory, and is brought over when the host looks first
//! ([`Buffer::read`](crate::Buffer::read), [`Wrapped::into_inner`](super::Wrapped::into_inner)); what is copied on to a device
//! before that goes straight from there. So streams never touch it, and it is free as soon as its owner is gone.
//!
//! No launch of a graph would do the host's part again: in a capture such copies are errors.

use std::{
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::{Home, Memory, Owned};
use crate::{
    error::{Error, ErrorKind, Result},
    stream::Stream,
    sync::{Deferred, Level, Mutex, MutexGuard, lock},
};

type Pieces = SmallVec<[Arc<Owned>; 1]>;

/// What has come from devices for a piece of memory, oldest first, and is not yet brought over. Made when the first comes.
#[derive(Default)]
pub(super) struct Staging(OnceLock<Box<Mutex<Pieces>>>);

impl Staging {
    fn pieces(&self) -> &Mutex<Pieces> {
        self.0.get_or_init(|| Box::new(Mutex::at(Level::Arrivals, Pieces::new())))
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        lock(self.pieces())
    }

    fn get_mut(&mut self) -> &mut Pieces {
        self.pieces();
        self.0.get_mut().expect("just made").get_mut()
    }

    #[inline]
    fn none_came(&self) -> bool {
        self.0.get().is_none()
    }

    pub(super) fn into_inner(mut self) -> Pieces {
        self.0.get_mut().map(|pieces| std::mem::take(pieces.get_mut())).unwrap_or_default()
    }
}

/// Writes what has arrived to where it belongs.
///
/// # Safety
/// The caller has exclusive access to `home`, memory of the host of `bytes` bytes; or nothing has arrived.
pub(super) unsafe fn bring_over(home: Home, bytes: usize, arrivals: &mut Pieces) -> Result<()> {
    let Home::Host(to) = home else { return Ok(()) };
    // All or none: while one of them is spoilt every look is its error, until the memory is written anew.
    let all: SmallVec<[&[u8]; 1]> = arrivals.iter().map(|arrival| arrival.host_slice()).collect::<Result<_>>()?;
    for from in all {
        // SAFETY: no longer than either; the arrival is memory of its own.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len().min(bytes)) };
    }
    arrivals.clear();
    Ok(())
}

impl Memory {
    /// True if no device copies from or to it by itself.
    #[inline]
    pub(super) fn is_staged(&self) -> bool {
        self.device.is_host()
    }

    /// An error for memory that devices cannot copy from and to as it is.
    pub(crate) fn is_page_locked(&self) -> Result<()> {
        if !self.is_staged() {
            return Ok(());
        }
        let text = "this memory of the host is not page-locked for a device, and what is copied to or from it goes through \
                    other memory, which no launch of a graph does: copy it to `Buffer::pinned(&device, ..)`";
        Err(Error::new(ErrorKind::Usage, text))
    }

    /// What it holds, and what is on its way to it, is worth nothing any more. Nothing touches it.
    pub(super) fn forget_arrivals(&mut self) {
        // Neither is dropped under a lock.
        let uses = std::mem::take(&mut *self.own_uses());
        drop((uses, std::mem::take(&mut self.staging)));
    }

    /// Of memory whose uses are done: the same for what has come for it and is not yet brought over.
    pub(super) fn forget_work_on_arrivals(&self) {
        if self.staging.none_came() {
            return;
        }
        let arrivals = self.staging.lock().clone();
        for arrival in arrivals {
            // Dropped after the lock.
            let open = arrival.uses().all();
            arrival.uses().forget_passed();
            drop(open);
        }
    }

    /// Shows where `stream` can copy its first `bytes` bytes from: what has come for it last and is not yet brought over;
    /// before that, if that is not all of it, what came earlier, or a copy that is made now.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) while something is on its way from a device that `stream`'s cannot copy from.
    pub(super) fn staged(
        &self,
        stream: &Stream,
        bytes: usize,
        mut show: impl FnMut(&Memory, usize) -> Result<()>,
    ) -> Result<()> {
        let first = self.host_pointer()?;
        // Allocated without the lock, where a copy of the host's is needed: that may take a while.
        let mut blank = None;
        let (now, arrivals) = loop {
            let _later = Deferred::new();
            let mut arrivals = self.staging.lock();
            if arrivals.iter().any(|arrival| !arrival.device().copies_with(stream.device())) {
                // Nothing can be copied on from there: it goes by way of the host, once it is here.
                // SAFETY: as in `Memory::bring_over`.
                unsafe { bring_over(self.home, self.bytes, &mut arrivals) }?;
            }
            let whole = arrivals.iter().rposition(|arrival| arrival.bytes() >= bytes);
            // Nothing more comes meanwhile, as that needs the value exclusively; and what is brought over stays as it is.
            let on_their_way: SmallVec<[_; 1]> = arrivals[whole.unwrap_or(0)..].iter().cloned().collect();
            if whole.is_some() {
                break (None, on_their_way);
            }
            let Some(mut copy) = blank.take() else {
                drop(arrivals);
                blank = Some(Memory::pinned_for(stream, bytes)?);
                continue;
            };
            self.device.backend().host_access(first.as_ptr(), self.bytes, false)?;
            // SAFETY: the memory is this value's own and that long, as `copy` has checked. No stream writes to it, the host does
            // so through the value alone, which is borrowed, and what arrives is brought over under the lock held here.
            let host = unsafe { std::slice::from_raw_parts(first.as_ptr(), bytes) };
            copy.host_slice_mut()?.copy_from_slice(host);
            break (Some(copy), on_their_way);
        };
        now.iter().try_for_each(|copy| show(copy, bytes))?;
        arrivals.iter().try_for_each(|arrival| show(arrival, arrival.bytes().min(bytes)))
    }

    /// Something is on its way to it: enqueued, not here.
    pub(super) fn arrives(&mut self, arrival: Owned) {
        let arrivals = self.staging.get_mut();
        // What it covers whole is worth nothing any more.
        arrivals.retain(|before| before.bytes() > arrival.bytes());
        arrivals.push(Arc::new(arrival));
    }

    /// What has arrived, before the host looks. Nothing that writes to it is in flight.
    pub(super) fn bring_over(&self) -> Result<()> {
        if self.staging.none_came() {
            return Ok(());
        }
        let _later = Deferred::new();
        // A second look at the same time waits here until it is there.
        let mut arrivals = self.staging.lock();
        if arrivals.is_empty() {
            return Ok(());
        }
        // SAFETY: the memory is this value's own. No slice of it is out that was made before these came: they come by
        // `arrives`, which needs the value exclusively; and none is made before they are brought over, under this lock.
        unsafe { bring_over(self.home, self.bytes, &mut arrivals) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        Buffer,
        device::{Device, Emulated, Faults},
        memory::{DeviceSlice, DeviceSliceMut, transfer},
    };

    /// The loss of a device becomes known after the last write of the memory was found to be sound, and before what arrived is
    /// looked at.
    #[test]
    fn arrivals_stay_when_one_of_them_is_spoilt() {
        let (device, lost) =
            (Device::emulated(Emulated::new()), Device::emulated(Emulated::new().faults(Faults::new().fail_copy(1))));
        let (stream, of_lost) = (Stream::new(&device).unwrap(), Stream::new(&lost).unwrap());
        let [sound, anew] = [2, 3].map(|value| Buffer::from_slice(&stream, &[value; 8]).unwrap());
        let (mut mine, back) = Buffer::wrap(vec![1_u8; 8]).unwrap();
        stream.copy(&sound, &mut mine).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        of_lost.host_function(move || _ = wait.recv()).unwrap();
        let mut spoilt = Buffer::<u8>::new(&lost, 8).unwrap();
        of_lost.copy(&Buffer::<u8>::new(&lost, 8).unwrap(), &mut spoilt).unwrap();
        transfer::copy(&stream, spoilt.view().memory, mine.view_mut().memory, 4).unwrap();
        drop(go);
        assert!(of_lost.synchronize_blocking().is_err() && stream.synchronize_blocking().is_err());
        for look in 0..3 {
            let error = mine.view().memory.bring_over().expect_err("one of the arrivals is spoilt");
            assert!(error.is_device_lost(), "look {look}: {error}");
            assert_eq!(mine.view().memory.staging.lock().len(), 2, "look {look}");
        }
        stream.copy(&anew, &mut mine).unwrap();
        stream.synchronize_blocking().unwrap();
        assert_eq!(mine.as_slice().unwrap(), [3; 8]);
        drop(mine);
        assert_eq!(futures::executor::block_on(back.into_inner()).unwrap(), [3; 8]);
    }
}
