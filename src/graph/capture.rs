//! Capture: records work that was written for streams instead of running it.

use std::{fmt, ops::Range, sync::Arc};

use super::{
    Graph, Sketch,
    copies::{self, InputRange},
};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{DeviceSlice, DeviceSliceMut, Memory, Plain, View},
    stream::{Stream, capture::Capture},
};

const REPLACED: &str = "the closure's `Capturing` was replaced by another one: use each only in its own closure";

/// A capture in progress: its streams, and its inputs from and outputs to the host.
pub struct Capturing {
    origin: Stream,
    sketch: Sketch,
    inputs: Vec<InputRange>,
    outputs: Vec<Range<usize>>,
}

impl Graph {
    /// Records the work that `work` enqueues into the capture's streams, without running it. The capture ends when
    /// `work` returns, so it cannot be held across an await. Other threads take part only by enqueueing on a stream of
    /// the capture.
    ///
    /// Buffers that are allocated and dropped in the capture belong to the graph, which reuses their memory where its
    /// edges order the uses. The graph keeps the memory of all other buffers alive, even after they are dropped.
    ///
    /// # Errors
    /// The error of `work`; [`Usage`](ErrorKind::Usage) for a forked stream that is not joined, for the host, for a
    /// [`Capturing`] that was replaced by another one, and for a copy to or from the host that launches could not
    /// repeat correctly: a copy of host memory that is not page-locked for a device, and the cases in
    /// [`Capturing::input`] and [`Capturing::output`]. Calls that cannot be captured fail themselves: waiting for work
    /// of the capture, reading its results, using stream-ordered memory.
    pub fn capture<R>(device: &Device, work: impl FnOnce(&mut Capturing) -> Result<R>) -> Result<(Self, R)> {
        let sketch = Sketch::new(device)?;
        let origin = sketch.capture.stream("origin", Default::default())?;
        let mut capturing = Capturing { origin, sketch, inputs: Vec::new(), outputs: Vec::new() };
        let id = capturing.sketch.id;
        let made = {
            let _in = capturing.sketch.capture.enter();
            work(&mut capturing)?
        };
        if capturing.sketch.id != id {
            return Err(Error::new(ErrorKind::Usage, REPLACED));
        }
        let Capturing { origin, sketch, inputs, outputs } = capturing;
        // Closed before the checks below: a stream that user code has kept adds no more work.
        sketch.recorder.close()?;
        if let Some((stream, work)) = sketch.recorder.unjoined(origin.raw()).first() {
            let text = format!(
                "stream `{stream}` was not joined: the capture ends without waiting for its `{work}`; call \
                 `capture.stream().wait_for(&{stream})`"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let inputs = copies::check(&sketch, &inputs, &outputs)?;
        Ok((sketch.finish(inputs), made))
    }
}

impl Capturing {
    /// The stream on which the capture begins and ends.
    pub fn stream(&self) -> &Stream {
        &self.origin
    }

    /// Creates another stream of the capture, whose work comes after the work so far of [`stream`](Self::stream). The
    /// new stream must be joined, by `capture.stream().wait_for(&other)` or by data that it writes and the capture's
    /// own stream reads.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn fork(&self, name: &str) -> Result<Stream> {
        let other = self.sketch.capture.stream(name, Default::default())?;
        other.wait_for(&self.origin)?;
        Ok(other)
    }

    /// The capture itself, for code that captures operators.
    pub(crate) fn capture(&self) -> &Arc<Capture> {
        &self.sketch.capture
    }

    pub(crate) fn join(&self) -> Result<()> {
        self.sketch.capture.streams().iter().try_for_each(|stream| self.origin.wait_for(stream))
    }

    /// Declares host memory as an input. Copies from it are removed from the graph and become [`Graph::inputs`], with
    /// which the caller copies from any page-locked memory to the same destination. Copies from other page-locked
    /// memory stay in the graph, which keeps that memory alive: its contents are copied again at each launch. Each
    /// [part](crate::memory::Slice) of a buffer can be an input: [offsets](super::InputCopy::offset) count from its start.
    /// A copy must lie within one input or outside all.
    ///
    /// A copied input stays at its destination until it is copied again or a node overwrites it. So from this call on,
    /// the capture reuses no memory. The copy is made before the launch, so [`Graph::capture`] fails if a node uses the
    /// destination before the captured copy.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory, for memory that is not page-locked, and after the capture has
    /// reused memory: declare inputs first.
    pub fn input<T: Plain>(&mut self, from: &(impl DeviceSlice<T> + ?Sized)) -> Result<()> {
        let View { memory, offset, len } = from.view().bytes::<T>();
        check_host_memory(memory, "an input")?;
        self.sketch.graph_memory.forbid_reuse()?;
        let whole = memory.host_range()?;
        let start = whole.start + offset;
        self.inputs.push(InputRange { range: start..start + len, whole });
        self.sketch.graph_memory.keep(memory);
        Ok(())
    }

    /// Declares host memory as an output: exactly one copy in the graph must write it. Where several copies write parts of
    /// a buffer, each [part](crate::memory::SliceMut) is an output. A copy to any other host memory
    /// is an error, as it suggests that the host used the data during the capture, which no launch repeats.
    ///
    /// While the graph exists, a launch may write this memory at any time, so the host reads a copy of it:
    /// [`Buffer::to_vec`](crate::Buffer::to_vec).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory or memory that is not page-locked.
    pub fn output<T: Plain>(&mut self, to: &mut (impl DeviceSliceMut<T> + ?Sized)) -> Result<()> {
        let view = to.view().bytes::<T>();
        check_host_memory(view.memory, "an output")?;
        let start = view.memory.host_range()?.start + view.offset;
        self.outputs.push(start..start + view.len);
        self.sketch.graph_memory.keep(view.memory);
        Ok(())
    }
}

fn check_host_memory(memory: &Memory, what: &str) -> Result<()> {
    if memory.is_host() {
        return memory.check_page_locked();
    }
    let text = format!(
        "{what} must be page-locked host memory, but this memory is on {}: allocate it with `Buffer::pinned`",
        memory.location()
    );
    Err(Error::new(ErrorKind::Usage, text))
}

impl fmt::Debug for Capturing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capturing").field("stream", &self.origin).finish_non_exhaustive()
    }
}
