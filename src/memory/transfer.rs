//! Copies and fills, tracked.

use super::{DeviceSlice, DeviceSliceMut, Memory, Plain, hold::Turn};
use crate::{
    device::backend::{Address, Pattern},
    error::{Error, ErrorKind, Result},
    stream::{Leave, Stream, Ticket},
};

/// Enqueues a copy of the first `bytes` bytes.
pub(crate) fn copy(stream: &Stream, from: &Memory, to: &mut Memory, bytes: usize) -> Result<()> {
    if bytes > from.bytes() || bytes > to.bytes() {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("a copy of {bytes} bytes from memory of {} to memory of {}", from.bytes(), to.bytes()),
        ));
    }
    if bytes == 0 {
        return Ok(());
    }
    to.writable()?;
    if stream.capture().is_some() {
        from.is_page_locked()?;
        to.is_page_locked()?;
    }
    if from.is_staged() {
        return from.staged(stream, bytes, |staged, bytes| copy_to(stream, staged, to, bytes));
    }
    copy_to(stream, from, to, bytes)
}

/// From where a device can copy from.
fn copy_to(stream: &Stream, from: &Memory, to: &mut Memory, bytes: usize) -> Result<()> {
    if !to.is_staged() {
        return enqueue(stream, from, to, bytes);
    }
    let mut arrival = Memory::pinned_for(stream, bytes)?;
    let (room, turn) = stream.make_room(|| Turn::at([from, &*to].into_iter()))?;
    // After what is on its way already: what has arrived is looked at when the last of it has.
    to.before_overwrite(stream, bytes)?;
    let ticket = put(stream, room, from, &mut arrival, bytes)?;
    to.note_write(&ticket);
    drop(turn);
    to.arrives(arrival);
    Ok(())
}

/// Between memories that a device can copy between.
fn enqueue(stream: &Stream, from: &Memory, to: &mut Memory, bytes: usize) -> Result<()> {
    let (room, _turn) = stream.make_room(|| Turn::at([from, &*to].into_iter()))?;
    put(stream, room, from, to, bytes).map(drop)
}

/// The same with leave, and within a turn of all that the copy must come after: no use is looked at before both.
#[inline]
fn put(stream: &Stream, room: Leave<'_>, from: &Memory, to: &mut Memory, bytes: usize) -> Result<Ticket> {
    from.before_read(stream)?;
    to.before_overwrite(stream, bytes)?;
    // SAFETY: both are at least `bytes` long, as the caller has checked. They stay valid until the copy is done: the ticket
    // is noted in both before anybody else can drop them, and memory with an open ticket is parked, not freed.
    let ticket =
        stream.enqueue(room, |backend, raw| unsafe { backend.copy(raw, to.place(), from.place(), bytes as u64) })?;
    from.note_read(&ticket);
    to.note_write(&ticket);
    Ok(ticket)
}

/// The start of memory that a fill on this stream reaches: a fill is no copy, and reaches no other device.
fn fillable(stream: &Stream, to: &Memory) -> Result<Address> {
    let address = to.address()?;
    if to.device().shares_hardware_with(stream.device()) {
        return Ok(address);
    }
    let text =
        format!("a fill on {} of memory of {}: fill it on a stream of its own device", stream.device(), to.device());
    Err(Error::new(ErrorKind::Usage, text))
}

/// Enqueues zeros for the bytes from `from` to before `until`.
pub(crate) fn zero(stream: &Stream, to: &mut Memory, from: usize, until: usize) -> Result<()> {
    let until = until.min(to.bytes());
    if from >= until {
        return Ok(());
    }
    let start = Address(fillable(stream, to)?.0 + from as u64);
    let (room, _turn) = stream.make_room(|| to.turn())?;
    to.before_overwrite(stream, if from == 0 { until } else { 0 })?;
    let zeros = Pattern { width: 1, bits: 0 };
    // SAFETY: the bytes lie in the memory, as was just seen to; it stays valid until the fill is done, as the ticket is
    // noted in it.
    let ticket =
        stream.enqueue(room, |backend, raw| unsafe { backend.fill(raw, start, zeros, (until - from) as u64) })?;
    to.note_write(&ticket);
    Ok(())
}

impl Stream {
    /// Enqueues a copy of all elements, between any two places. It never waits for the stream: memory of the host that is not
    /// page-locked is copied by way of memory that is, by the host itself in part.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if the lengths differ or the devices are of different makes, and in a capture for memory of
    /// the host that is not page-locked; [`OutOfMemory`](ErrorKind::OutOfMemory) if there is no page-locked memory to go by;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn copy<T: Plain>(
        &self,
        from: &(impl DeviceSlice<T> + ?Sized),
        to: &mut (impl DeviceSliceMut<T> + ?Sized),
    ) -> Result<()> {
        let (from, to) = (from.view(), to.view_mut());
        if from.len != to.len {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("a copy of {} elements into {}: the lengths must be the same", from.len, to.len),
            ));
        }
        copy(self, from.memory, to.memory, from.len * size_of::<T>())
    }

    /// Enqueues a fill of device memory: every element becomes `value`. For elements of 1, 2 or 4 bytes, and for larger
    /// ones that repeat such a pattern, as zero does.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for memory of the host or of another device, or for a value that repeats no 4 bytes;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn fill<T: Plain>(&self, to: &mut (impl DeviceSliceMut<T> + ?Sized), value: T) -> Result<()> {
        let to = to.view_mut();
        let bytes = to.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let pattern = pattern_of(bytemuck::bytes_of(&value)).ok_or_else(|| {
            Error::new(ErrorKind::Usage, "a fill repeats 1, 2 or 4 bytes and this value does not: use a kernel")
        })?;
        let address = fillable(self, to.memory)?;
        let (room, _turn) = self.make_room(|| to.memory.turn())?;
        to.memory.before_overwrite(self, bytes)?;
        // SAFETY: the memory is `bytes` long; it stays valid until the fill is done, as the ticket is noted in it.
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
