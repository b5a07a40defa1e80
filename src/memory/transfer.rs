//! Copies and fills, tracked.

use super::{DeviceSlice, DeviceSliceMut, Memory, Plain, View, ViewMut, use_lock::UseLockGuard};
use crate::{
    device::backend::{Address, Pattern},
    error::{Error, ErrorKind, Result},
    stream::{EnqueuePermit, Stream, Ticket},
};

/// Enqueues a copy of the first `bytes` bytes.
pub(crate) fn copy(stream: &Stream, from: &Memory, to: &mut Memory, bytes: usize) -> Result<()> {
    copy_bytes(stream, View::of(from, bytes), ViewMut::of(to, bytes))
}

/// So many bytes may always be copied with a part that another follows: 0.3 us at 50 GB/s, where a copy of its own costs
/// the host 2.1 us (`guide/facts.md`).
const MAX_BETWEEN: u64 = 16 << 10;

/// One of several copies that are enqueued together: of the first `bytes` bytes.
pub(crate) struct JoinedCopy<'a> {
    pub(crate) from: &'a Memory,
    pub(crate) to: &'a mut Memory,
    pub(crate) bytes: usize,
}

/// Enqueues several copies, and commits the uses of their targets. Where both the sources and the targets lie one behind the other, and the first waits for all
/// that the others wait for, one copy serves them all, together with the bytes between them, which belong to the same
/// memories.
///
/// # Errors
/// Those of a copy. The copies before the failing one were enqueued.
pub(crate) fn copy_joined(stream: &Stream, mut all: &mut [JoinedCopy<'_>]) -> Result<()> {
    while !all.is_empty() {
        let joined = 1 + all.windows(2).take_while(|two| two[0].joins(&two[1])).count();
        let (first, others) = all.split_at_mut(joined);
        match &mut *first {
            [one] => copy(stream, one.from, one.to, one.bytes)?,
            several => enqueue_joined(stream, several)?,
        }
        // Before the next copy, for which later users of these need not wait.
        first.iter_mut().try_for_each(|one| one.to.commit())?;
        all = others;
    }
    Ok(())
}

impl JoinedCopy<'_> {
    /// Whether one copy can serve this and the next, copies few bytes more, and begins no later.
    fn joins(&self, next: &Self) -> bool {
        let between = self.from.size.saturating_sub(self.bytes as u64);
        // A copy of nothing waits for nothing.
        self.bytes > 0
            && next.bytes > 0
            && between <= MAX_BETWEEN.max(self.bytes as u64 / 8)
            && self.from.size == self.to.size
            && self.from.is_before(next.from)
            && self.to.is_before(next.to)
            && [self, next].iter().all(|one| one.bytes <= one.from.bytes.min(one.to.bytes))
            && !self.from.is_staged()
            && !self.to.is_staged()
            && self.from.is_ready_no_sooner_than(next.from, false)
            && self.to.is_ready_no_sooner_than(next.to, true)
    }
}

/// Enqueues one copy for several memories that lie one behind the other: see [`JoinedCopy::joins`].
fn enqueue_joined(stream: &Stream, all: &mut [JoinedCopy<'_>]) -> Result<()> {
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return Ok(()) };
    let (target, source) = (first.to.endpoint(0), first.from.endpoint(0));
    let before: u64 = all[..all.len() - 1].iter().map(|one| one.from.size).sum();
    let bytes = before + last.bytes as u64;
    let shared = || all.iter().flat_map(|one| [one.from.shared.get(), one.to.shared.get()]);
    let (room, _use_lock) = stream.make_room(|| UseLockGuard::for_memory(shared()))?;
    // The last first: most often its uses come after those of the others, which then need no wait.
    for one in all.iter_mut().rev() {
        one.from.before_read(stream)?;
        one.to.before_overwrite(stream, one.bytes)?;
    }
    // SAFETY: at each end the memories lie one behind the other in one allocation, and the last has at least as many bytes as
    // its part (`JoinedCopy::joins`), so each end has `bytes` bytes from its start on. They stay valid until the copy is
    // done: the ticket is noted in all of them before any other code can drop them, and memory with an open ticket is not
    // freed. No one else accesses the bytes between the parts: each belongs to a memory that is read, or is written, here.
    let ticket = stream.enqueue(room, |backend, raw| unsafe { backend.copy(raw, target, source, bytes) })?;
    for one in all {
        one.from.note_read(&ticket);
        one.to.note_write(&ticket);
    }
    Ok(())
}

/// Enqueues a copy between two views of bytes, of the same length.
fn copy_bytes(stream: &Stream, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
    let bytes = from.len;
    let behind = |memory: &Memory, offset: usize| memory.bytes().saturating_sub(offset);
    let (available, room) = (behind(from.memory, from.offset), behind(&to.memory, to.offset));
    if bytes > available || bytes > room {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("cannot copy {bytes} bytes from memory of {available} bytes to memory of {room} bytes"),
        ));
    }
    if bytes == 0 {
        return Ok(());
    }
    to.memory.check_writable()?;
    if stream.capture().is_some() {
        from.memory.check_page_locked()?;
        to.memory.check_page_locked()?;
    }
    if from.memory.is_staged() {
        return from.memory.staged(stream, from.offset..from.offset + bytes, |staged, at| {
            let to = ViewMut { memory: to.memory.reborrow(), offset: to.offset + at, len: staged.len };
            copy_to(stream, staged, to)
        });
    }
    copy_to(stream, from, to)
}

/// Copies from memory that a device can copy from.
fn copy_to(stream: &Stream, from: View<'_>, mut to: ViewMut<'_>) -> Result<()> {
    if !to.memory.is_staged() {
        return enqueue(stream, from, to);
    }
    let mut arrival = Memory::pinned_for(stream, from.len)?;
    let (room, use_lock) = stream
        .make_room(|| UseLockGuard::for_memory([from.memory.shared.get(), to.memory.shared.get()].into_iter()))?;
    // Comes after earlier arrivals: they are accessed only once the last one has arrived.
    to.memory.before_overwrite(stream, to.offset, from.len)?;
    let ticket = put(stream, room, from, ViewMut::of(&mut arrival, from.len))?;
    to.memory.note_write(&ticket);
    drop(use_lock);
    to.memory.add_arrival(arrival, to.offset);
    Ok(())
}

/// Copies between memories that a device can access directly.
fn enqueue(stream: &Stream, from: View<'_>, to: ViewMut<'_>) -> Result<()> {
    let (room, _use_lock) = stream
        .make_room(|| UseLockGuard::for_memory([from.memory.shared.get(), to.memory.shared.get()].into_iter()))?;
    put(stream, room, from, to).map(drop)
}

/// Like [`enqueue`], called with room in the queue and the use lock of all memory involved: uses are inspected only
/// while both are held.
#[inline]
fn put(stream: &Stream, room: EnqueuePermit<'_>, from: View<'_>, mut to: ViewMut<'_>) -> Result<Ticket> {
    let bytes = from.len;
    from.memory.before_read(stream)?;
    to.memory.before_overwrite(stream, to.offset, bytes)?;
    let (target, source) = (to.memory.endpoint(to.offset), from.memory.endpoint(from.offset));
    // SAFETY: both have at least `bytes` bytes from their offsets on, as `copy_bytes` has checked. They stay valid until the
    // copy is done: the ticket is noted in both before any other code can drop them, and memory with an open ticket is not
    // freed.
    let ticket = stream.enqueue(room, |backend, raw| unsafe { backend.copy(raw, target, source, bytes as u64) })?;
    from.memory.note_read(&ticket);
    to.memory.note_write(&ticket);
    Ok(ticket)
}

/// The address of memory for a fill on `stream`. Unlike a copy, a fill cannot reach another device.
fn fill_address(stream: &Stream, to: &Memory) -> Result<Address> {
    let address = to.address()?;
    if to.device().shares_hardware_with(stream.device()) {
        return Ok(address);
    }
    let text = format!(
        "a stream on {} cannot fill memory on {}: use a stream on the memory's device",
        stream.device(),
        to.device()
    );
    Err(Error::new(ErrorKind::Usage, text))
}

/// Enqueues a fill of the bytes `from..until` with zeros.
pub(crate) fn zero(stream: &Stream, to: &mut Memory, from: usize, until: usize) -> Result<()> {
    let until = until.min(to.bytes());
    if from >= until {
        return Ok(());
    }
    let start = Address(fill_address(stream, to)?.0 + from as u64);
    let (room, _use_lock) = stream.make_room(|| to.use_lock())?;
    to.before_overwrite(stream, if from == 0 { until } else { 0 })?;
    let zeros = Pattern { width: 1, bits: 0 };
    // SAFETY: the bytes are within the memory, as was just checked. It stays valid until the fill is done, as the
    // ticket is noted in it.
    let ticket =
        stream.enqueue(room, |backend, raw| unsafe { backend.fill(raw, start, zeros, (until - from) as u64) })?;
    to.note_write(&ticket);
    Ok(())
}

impl Stream {
    /// Enqueues a copy of all elements, between any two places. For a part of a buffer or an envelope, copy from or to a
    /// [`Slice`](super::Slice) of it. This never waits for the stream: host memory that is
    /// not page-locked is copied through page-locked memory, in part by the host.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the lengths differ or there is no copy path between the devices, and in a capture
    /// for host memory that is not page-locked; [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no page-locked
    /// memory for staging; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn copy<T: Plain>(
        &self,
        from: &(impl DeviceSlice<T> + ?Sized),
        to: &mut (impl DeviceSliceMut<T> + ?Sized),
    ) -> Result<()> {
        let (from, to) = (from.view(), to.view_mut());
        if from.len != to.len {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("cannot copy {} elements to {} elements: the lengths must be equal", from.len, to.len),
            ));
        }
        copy_bytes(self, from.bytes::<T>(), to.bytes::<T>())
    }

    /// Enqueues a fill of device memory: every element becomes `value`. Supports elements of 1, 2 or 4 bytes, and
    /// larger elements whose bytes repeat such a pattern (zero does).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for host memory, memory of another device, or a value that is not such a pattern; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn fill<T: Plain>(&self, to: &mut (impl DeviceSliceMut<T> + ?Sized), value: T) -> Result<()> {
        let mut to = to.view_mut();
        let bytes = to.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let pattern = pattern_of(bytemuck::bytes_of(&value)).ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                "a fill repeats a pattern of 1, 2 or 4 bytes, which this value is not: use a kernel",
            )
        })?;
        let address = Address(fill_address(self, &to.memory)?.0 + to.offset as u64);
        let (room, _use_lock) = self.make_room(|| to.memory.use_lock())?;
        to.memory.before_overwrite(self, to.offset, bytes)?;
        // SAFETY: the view's elements, `bytes` bytes from its offset on, lie within the memory. The address is a multiple of
        // the pattern's width, which divides the size of an element and so the offset. The memory stays valid until the fill
        // is done, as the ticket is noted in it.
        let ticket = self.enqueue(room, |backend, raw| unsafe { backend.fill(raw, address, pattern, bytes as u64) })?;
        to.memory.note_write(&ticket);
        Ok(())
    }
}

fn pattern_of(value: &[u8]) -> Option<Pattern> {
    let repeats =
        |width: usize| value.len().is_multiple_of(width) && value.chunks(width).all(|part| part == &value[..width]);
    let width = [1, 2, 4].into_iter().find(|width| *width <= value.len() && repeats(*width))?;
    let mut bits = [0; 4];
    bits[..width].copy_from_slice(&value[..width]);
    Some(Pattern { width, bits: u32::from_le_bytes(bits) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_the_shortest_that_repeats() {
        assert_eq!(pattern_of(&[7]), Some(Pattern { width: 1, bits: 7 }));
        assert_eq!(pattern_of(&1.5_f32.to_le_bytes()), Some(Pattern { width: 4, bits: 1.5_f32.to_bits() }));
        assert_eq!(pattern_of(&0_f64.to_le_bytes()), Some(Pattern { width: 1, bits: 0 }));
        assert_eq!(pattern_of(&[1, 2, 1, 2, 1, 2]), Some(Pattern { width: 2, bits: 0x0201 }));
        assert_eq!(pattern_of(&0.1_f64.to_le_bytes()), None);
        assert_eq!(pattern_of(&[1, 2, 3]), None);
    }
}
