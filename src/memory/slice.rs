//! [`Slice`] and [`SliceMut`]: parts of a buffer, an envelope or a chunk.
//!
//! ```text
//!   the memory            0 ─────────────────────────────────────────── bytes      one record of uses, for all of it
//!   a view                      offset ├──── len elements ────┤                    what a kernel, a copy or a fill accesses
//!   split_at_mut          ├──── left ────┤├──────── right ────────┤                the record gets a lock of its own
//! ```
//!
//! An operation accesses the view's bytes alone: this is what the device, the race checker and a graph see. The order is
//! tracked by the whole memory. Mutable parts of one memory can be on different threads, which then enqueue work on it at
//! the same time. Its uses are therefore [shared](Memory::shared_uses) from a `split_at_mut` on: from the check of
//! the earlier uses until the new one is noted, each operation holds the use lock. Otherwise neither of two operations would
//! be ordered after the other, and the record would keep only one of them. The next operation that borrows the whole memory
//! exclusively ends this: a write, a send of its envelope, the return to its pool.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Bound, Range, RangeBounds},
};

use super::{Buffer, DeviceSlice, DeviceSliceMut, Memory, Plain, Sealed, View, ViewMut, ordering::MemoryMut};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
};

/// Borrowed elements of a [`Buffer`], an [`Envelope`](crate::Envelope) or a chunk, or a part of them: an
/// argument of a kernel, the source of a copy, memory that another library reads.
///
/// The elements are aligned for their type, as those of any Rust slice: a kernel that reads several at once, as a `float4`,
/// must check the address or get parts that begin at a multiple of four.
///
/// # Order
/// The uses are tracked for the memory as a whole. A kernel that writes one part is ordered after work that uses another
/// part, on whatever stream. For parts that are used concurrently, allocate a buffer each.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let ring = Buffer::from_slice(&stream, &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
/// let mut row = Buffer::<f32>::new(&device, 2)?;
/// stream.copy(&ring.slice(2..4)?, &mut row)?;
/// assert_eq!(row.to_vec(&stream).await?, [3.0, 4.0]);
///
/// assert!(ring.slice(4..7).is_err(), "there are six elements");
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
///
/// The host reads a part of host memory with an index: `&buffer.read().await?[2..4]`.
pub struct Slice<'a, T: Plain> {
    view: View<'a>,
    of: PhantomData<fn() -> T>,
}

/// Exclusively borrowed elements of a [`Buffer`], an [`Envelope`](crate::Envelope) or a chunk, or a part of
/// them: what a [`Slice`] is for, and for writing. A write to a part of an envelope does not change its length.
///
/// ```
/// use wakeline::{Buffer, Stream, device::{Device, Emulated}};
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let device = Device::emulated(Emulated::new());
/// let stream = Stream::new(&device)?;
/// let mut sums = Buffer::from_slice(&stream, &[1_u32, 2, 3, 4])?;
/// stream.fill(&mut sums.slice_mut(1..3)?, 0)?;
///
/// // Both halves at once: as two arguments of a kernel, or of a copy.
/// let (left, mut right) = sums.split_at_mut(2)?;
/// stream.copy(&left, &mut right)?;
/// assert_eq!(sums.to_vec(&stream).await?, [1, 0, 1, 0]);
/// # Ok::<(), wakeline::Error>(())
/// # }).unwrap();
/// ```
///
/// # Order
/// As with a [`Slice`](Slice#order): work on one half is ordered after earlier work on the other, also on another stream.
/// The parts may be on different threads. [`split_at_mut`](Self::split_at_mut) makes any number of parts.
pub struct SliceMut<'a, T: Plain> {
    view: ViewMut<'a>,
    of: PhantomData<fn() -> T>,
}

impl<T: Plain> Buffer<T> {
    /// A part of the elements, for a kernel, a copy or another library to read: see [`Slice`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a range that is not within the buffer.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Slice<'_, T>> {
        Slice::of(self.view()).slice(range)
    }

    /// A part of the elements, for a kernel, a copy, a fill or another library to write: see [`SliceMut`].
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice).
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<SliceMut<'_, T>> {
        SliceMut::of(self.view_mut()).into_slice(range)
    }

    /// The elements before `at`, and those from `at` on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `at` is greater than the length.
    pub fn split_at(&self, at: usize) -> Result<(Slice<'_, T>, Slice<'_, T>)> {
        Slice::of(self.view()).split_at(at)
    }

    /// The elements before `at`, and those from `at` on, both for writing at the same time.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `at` is greater than the length.
    pub fn split_at_mut(&mut self, at: usize) -> Result<(SliceMut<'_, T>, SliceMut<'_, T>)> {
        SliceMut::of(self.view_mut()).split_at_mut(at)
    }
}

/// The range as positions from 0 to `len`.
///
/// # Errors
/// [`Usage`](ErrorKind::Usage) if it is not within `0..len`, or begins after its end.
pub(crate) fn checked_range(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(first) => *first,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        // No memory has `usize::MAX` elements.
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    if start <= end && end <= len {
        return Ok(start..end);
    }
    let why = if end > len || start > len { format!("there are {len}") } else { "it begins after its end".into() };
    Err(Error::new(ErrorKind::Usage, format!("there is no part {start}..{end} of these elements: {why}")))
}

/// The position in bytes, and the number of elements, of a part of `len` elements from `offset` on. An empty part is at the
/// start, since a position behind the last element may be another allocation's.
fn part<T>(offset: usize, range: Range<usize>) -> (usize, usize) {
    if range.is_empty() { (0, 0) } else { (offset + range.start * size_of::<T>(), range.len()) }
}

impl<'a, T: Plain> Slice<'a, T> {
    pub(crate) fn of(view: View<'a>) -> Self {
        Self { view, of: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.view.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.view.len == 0
    }

    /// The device of the memory, or the device that the memory is page-locked for.
    pub fn device(&self) -> &'a Device {
        self.view.memory.device()
    }

    /// True for host memory.
    pub fn is_host(&self) -> bool {
        self.view.memory.is_host()
    }

    /// A part of these elements.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a range that is not within them.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (offset, len) = part::<T>(self.view.offset, checked_range(range, self.view.len)?);
        Ok(Self::of(View { offset, len, ..self.view }))
    }

    /// The elements before `at`, and those from `at` on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `at` is greater than the length.
    pub fn split_at(&self, at: usize) -> Result<(Self, Self)> {
        Ok((self.slice(..at)?, self.slice(at..)?))
    }
}

impl<'a, T: Plain> SliceMut<'a, T> {
    pub(crate) fn of(view: ViewMut<'a>) -> Self {
        Self { view, of: PhantomData }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.view.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.view.len == 0
    }

    /// The device of the memory, or the device that the memory is page-locked for.
    pub fn device(&self) -> &Device {
        self.view.memory.device()
    }

    /// True for host memory.
    pub fn is_host(&self) -> bool {
        self.view.memory.is_host()
    }

    /// A part of these elements, for reading.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for a range that is not within them.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Slice<'_, T>> {
        Slice::of(self.view()).slice(range)
    }

    /// A part of these elements, for writing.
    ///
    /// # Errors
    /// Those of [`slice`](Self::slice).
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<SliceMut<'_, T>> {
        SliceMut::of(self.view_mut()).into_slice(range)
    }

    /// The elements before `at`, and those from `at` on.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) if `at` is greater than the length.
    pub fn split_at(&self, at: usize) -> Result<(Slice<'_, T>, Slice<'_, T>)> {
        Slice::of(self.view()).split_at(at)
    }

    /// The elements before `at`, and those from `at` on, both for writing at the same time: for as long as these elements
    /// are borrowed, so that the parts can be split again. To use these elements afterwards, split
    /// [`slice_mut(..)`](Self::slice_mut), which borrows them.
    ///
    /// ```
    /// use wakeline::{Buffer, Stream, device::{Device, Emulated}, memory::SliceMut, prelude::*};
    ///
    /// /// Parts of this many elements; the last one may be shorter.
    /// fn parts(mut rest: SliceMut<'_, u32>, len: usize) -> Result<Vec<SliceMut<'_, u32>>> {
    ///     let mut parts = Vec::new();
    ///     while rest.len() > len {
    ///         let (part, tail) = rest.split_at_mut(len)?;
    ///         parts.push(part);
    ///         rest = tail;
    ///     }
    ///     parts.push(rest);
    ///     Ok(parts)
    /// }
    ///
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// let device = Device::emulated(Emulated::new());
    /// let mut sums = Buffer::<u32>::new(&device, 10)?;
    /// // Each part on a thread and a stream of its own.
    /// std::thread::scope(|scope| {
    ///     for (mut part, n) in parts(sums.slice_mut(..)?, 4)?.into_iter().zip(1..) {
    ///         let stream = Stream::new(&device)?;
    ///         scope.spawn(move || stream.fill(&mut part, n));
    ///     }
    ///     Ok::<_, wakeline::Error>(())
    /// })?;
    /// assert_eq!(sums.to_vec(&Stream::new(&device)?).await?, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]);
    /// # Ok::<(), wakeline::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// Those of [`split_at`](Self::split_at). The elements are no longer borrowed then.
    pub fn split_at_mut(self, at: usize) -> Result<(Self, Self)> {
        let ViewMut { memory, offset, len } = self.view;
        let (left, right) = (checked_range(..at, len)?, checked_range(at.., len)?);
        let memory: &'a Memory = memory.into_shared();
        let of = |range| {
            let (offset, len) = part::<T>(offset, range);
            Self::of(ViewMut { memory: MemoryMut::part_of(memory), offset, len })
        };
        Ok((of(left), of(right)))
    }

    /// Like [`slice_mut`](Self::slice_mut), for as long as these elements are borrowed.
    pub(crate) fn into_slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (offset, len) = part::<T>(self.view.offset, checked_range(range, self.view.len)?);
        Ok(Self::of(ViewMut { offset, len, ..self.view }))
    }
}

impl<T: Plain> Clone for Slice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Plain> Copy for Slice<'_, T> {}

impl<T: Plain> Sealed<T> for Slice<'_, T> {}

impl<T: Plain> DeviceSlice<T> for Slice<'_, T> {
    fn view(&self) -> View<'_> {
        self.view
    }
}

impl<T: Plain> Sealed<T> for SliceMut<'_, T> {}

impl<T: Plain> DeviceSlice<T> for SliceMut<'_, T> {
    fn view(&self) -> View<'_> {
        let ViewMut { memory, offset, len } = &self.view;
        View { memory, offset: *offset, len: *len }
    }
}

impl<T: Plain> DeviceSliceMut<T> for SliceMut<'_, T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { memory: self.view.memory.reborrow(), offset: self.view.offset, len: self.view.len }
    }
}

impl<T: Plain> fmt::Debug for Slice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice")
            .field("of", &std::any::type_name::<T>())
            .field("len", &self.len())
            .field("at", &self.view.memory.location())
            .finish()
    }
}

impl<T: Plain> fmt::Debug for SliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SliceMut")
            .field("of", &std::any::type_name::<T>())
            .field("len", &self.len())
            .field("at", &self.view.memory.location())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::sync::mpsc;

    use futures::FutureExt;

    use super::*;
    use crate::{Stream, device::Emulated, graph::Graph, hub::pool::Pool};

    /// Writes to each element the sum of it and of the element of `x` at the same position.
    #[crate::kernel]
    fn accumulate(x: &[u32], y: &mut [u32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = y.wrapping_add(*x));
    }

    /// An operation on parts of buffers, chosen by their numbers. The numbers are reduced to valid ones.
    #[derive(Clone, Debug)]
    struct Step {
        /// Of the stream, of the source and of the destination.
        stream: usize,
        from: usize,
        to: usize,
        at: [usize; 2],
        len: usize,
        what: What,
    }

    #[derive(Clone, Debug)]
    enum What {
        Copy,
        Fill(u32),
        Accumulate,
        /// Between the two halves of one buffer.
        CopyWithin,
        Read,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let what = prop_oneof![
            4 => Just(What::Copy),
            2 => any::<u32>().prop_map(What::Fill),
            3 => Just(What::Accumulate),
            2 => Just(What::CopyWithin),
            1 => Just(What::Read),
        ];
        let step = (0..2_usize, 0..4_usize, 0..4_usize, [any::<usize>(), any::<usize>()], any::<usize>(), what);
        let step = step.prop_map(|(stream, from, to, at, len, what)| Step { stream, from, to, at, len, what });
        proptest::collection::vec(step, 1..40)
    }

    /// Two buffers on a device, one page-locked and one that is staged, of these lengths, with their models.
    const LENGTHS: [usize; 4] = [13, 32, 21, 17];

    fn run(steps: &[Step]) -> Result<()> {
        let device = Device::emulated(Emulated::new().workers(2)).race_checked();
        let streams = [Stream::new(&device)?, Stream::new(&device)?];
        let mut models = LENGTHS.map(|len| (0..len as u32).collect::<Vec<_>>());
        let mut buffers = [
            Buffer::from_slice(&streams[0], &models[0])?,
            Buffer::from_slice(&streams[1], &models[1])?,
            Buffer::pinned(&device, LENGTHS[2])?,
            Buffer::pinned(&Device::host(), LENGTHS[3])?,
        ];
        for at in [2, 3] {
            buffers[at].as_mut_slice()?.copy_from_slice(&models[at]);
        }
        for Step { stream, from, to, at, len, what } in steps {
            let stream = &streams[*stream];
            let (mut from, mut to) = (*from, *to);
            if let What::Accumulate | What::Fill(_) = what {
                // Kernels and fills need device memory.
                (from, to) = (0, 1);
            }
            if from == to && matches!(what, What::Copy) {
                to = (to + 1) % LENGTHS.len();
            }
            // The largest part that fits both, of any length and at any position.
            let most = LENGTHS[from].min(LENGTHS[to]);
            let len = len % (most + 1);
            let range = |of: usize, at: usize| {
                let start = at % (LENGTHS[of] - len + 1);
                start..start + len
            };
            let (source, target) = (range(from, at[0]), range(to, at[1]));
            match what {
                What::Copy => {
                    let part: Vec<u32> = models[from][source.clone()].to_vec();
                    models[to][target.clone()].copy_from_slice(&part);
                    let [one, other] = buffers.get_disjoint_mut([from, to]).expect("they differ");
                    stream.copy(&one.slice(source)?, &mut other.slice_mut(target)?)?;
                }
                What::Fill(value) => {
                    models[to][target.clone()].fill(*value);
                    stream.fill(&mut buffers[to].slice_mut(target)?, *value)?;
                }
                What::Accumulate => {
                    for (from_at, to_at) in source.clone().zip(target.clone()) {
                        models[to][to_at] = models[to][to_at].wrapping_add(models[from][from_at]);
                    }
                    let [one, other] = buffers.get_disjoint_mut([from, to]).expect("they differ");
                    accumulate::launch(stream, &one.slice(source)?, &mut other.slice_mut(target)?)?;
                }
                What::CopyWithin => {
                    let middle = at[0] % (LENGTHS[from] + 1);
                    let count = (middle.min(LENGTHS[from] - middle)).min(len);
                    models[from].copy_within(..count, middle);
                    let (left, mut right) = buffers[from].split_at_mut(middle)?;
                    stream.copy(&left.slice(..count)?, &mut right.slice_mut(..count)?)?;
                }
                What::Read if buffers[from].is_host() => {
                    let read = futures::executor::block_on(buffers[from].read())?;
                    assert_eq!(read, models[from], "buffer {from}");
                }
                What::Read => {}
            }
        }
        for (at, (buffer, model)) in buffers.iter().zip(&models).enumerate() {
            let read = futures::executor::block_on(buffer.to_vec(&streams[at % 2]))?;
            assert_eq!(read, *model, "buffer {at}");
        }
        Ok(())
    }

    /// An envelope that was once used in parts does not keep the lock that all such memory shares.
    #[test]
    fn an_envelope_that_was_split_is_not_shared_after_its_return() {
        let device = Device::emulated(Emulated::new().workers(2));
        let [one, two] = [0; 2].map(|_| Stream::new(&device).unwrap());
        let pool = Pool::new(&"hub".into(), 1, 64, &device, &device).unwrap();
        let (go, held) = mpsc::channel::<()>();
        one.host_function(move || _ = held.recv()).unwrap();
        let mut envelope = pool.take().unwrap().unwrap();
        let whole = ViewMut { memory: MemoryMut::Whole(envelope.memory_mut()), offset: 0, len: 16 };
        let (mut left, mut right) = SliceMut::<u32>::of(whole).split_at_mut(8).unwrap();
        one.fill(&mut left, 1).unwrap();
        two.fill(&mut right, 2).unwrap();
        assert!(envelope.memory().shared.get().is_some(), "its parts share its uses");
        drop(envelope);
        let envelope = pool.take().unwrap().unwrap();
        assert!(envelope.memory().shared.get().is_none(), "nothing else uses it");
        assert!(
            envelope.memory().host_access(true).now_or_never().is_none(),
            "the uses of its parts are not forgotten"
        );
        drop(go);
        futures::executor::block_on(envelope.memory().host_access(true)).unwrap();
    }

    #[test]
    fn a_write_of_all_memory_ends_its_sharing_unless_a_graph_uses_it() {
        let device = Device::emulated(Emulated::new());
        let stream = Stream::new(&device).unwrap();
        let mut x = Buffer::from_slice(&stream, &[1_u32; 8]).unwrap();
        let is_shared = |x: &Buffer<u32>| x.view().memory.shared.get().is_some();
        x.split_at_mut(4).map(drop).unwrap();
        assert!(is_shared(&x));
        stream.fill(&mut x, 2).unwrap();
        assert!(!is_shared(&x));
        let (graph, ()) = Graph::capture(&device, |capture| capture.stream().fill(&mut x, 3)).unwrap();
        stream.fill(&mut x, 4).unwrap();
        assert!(is_shared(&x), "a launch may use it at any time");
        drop(graph);
        stream.fill(&mut x, 5).unwrap();
        assert!(!is_shared(&x));
    }

    proptest! {
        #[test]
        fn operations_on_parts_change_those_parts_alone(steps in steps()) {
            run(&steps).map_err(|error| TestCaseError::fail(error.to_string()))?;
        }
    }
}
