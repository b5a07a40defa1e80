//! Capture: work that was written for streams, recorded instead of run.

use std::{fmt, ops::Range, sync::Arc};

use super::{Graph, Sketch, copies};
use crate::{
    device::Device,
    error::{Error, ErrorKind, Result},
    memory::{DeviceSlice, DeviceSliceMut, Memory, Plain},
    stream::{Stream, capture::Capture},
};

const EXCHANGED: &str = "the capture was exchanged for another one: use each in its own closure";

/// A capture that goes on: its streams, and what the host gives it and takes of it.
pub struct Capturing {
    origin: Stream,
    sketch: Sketch,
    inputs: Vec<Range<usize>>,
    outputs: Vec<Range<usize>>,
}

impl Graph {
    /// Records what `work` enqueues into the capture's streams, and runs none of it. The capture ends when `work` returns,
    /// whatever it returns: it cannot be held across an await. What other threads do meanwhile is no part of it, except for what
    /// they enqueue on a stream of the capture.
    ///
    /// Buffers that are allocated and dropped in it are the graph's own, used again within it where its edges order the uses;
    /// others stay as long as the graph, whoever drops them.
    ///
    /// # Errors
    /// `work`'s own; [`Usage`](ErrorKind::Usage) for a branch that is not joined, for the host, for a [`Capturing`] that was
    /// exchanged for another one, and for a copy to or from the host that the launches would not do right: of memory that is not
    /// page-locked for a device, and see [`Capturing::input`] and [`Capturing::output`]. What cannot be captured is an error of the
    /// call itself: waiting for work of the capture, reading what it makes, stream-ordered memory.
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
            return Err(Error::new(ErrorKind::Usage, EXCHANGED));
        }
        let Capturing { origin, sketch, inputs, outputs } = capturing;
        // Whoever has kept a stream adds nothing to what is looked at from here on.
        sketch.recorder.close()?;
        if let Some((stream, work)) = sketch.recorder.unjoined(origin.raw()).first() {
            let text = format!(
                "stream `{stream}` was not joined: nothing comes after its `{work}`; let the capture's own stream wait for \
                 it, `capture.stream().wait_for(&{stream})`"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        let inputs = copies::check(&sketch, &inputs, &outputs)?;
        Ok((sketch.finish(inputs), made))
    }
}

impl Capturing {
    /// The stream that the capture begins and ends with.
    pub fn stream(&self) -> &Stream {
        &self.origin
    }

    /// Another stream of the capture, whose work comes after what is in [`stream`](Self::stream) now. What it does has to be
    /// joined: `capture.stream().wait_for(&other)`, or by data that it writes and the other reads.
    ///
    /// # Errors
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn fork(&self, name: &str) -> Result<Stream> {
        let other = self.sketch.capture.stream(name, Default::default())?;
        other.wait_for(&self.origin)?;
        Ok(other)
    }

    /// What it is made with, for those who capture what others have written.
    pub(crate) fn capture(&self) -> &Arc<Capture> {
        &self.sketch.capture
    }

    /// All of its streams are joined.
    pub(crate) fn join(&self) -> Result<()> {
        self.sketch.capture.streams().iter().try_for_each(|stream| self.origin.wait_for(stream))
    }

    /// Says that the copies from this host memory are the inputs': they are taken out of the graph, and each is one of
    /// [`Graph::inputs`], by which the caller copies to where it went, from any page-locked memory. Copies from other
    /// page-locked memory stay: the graph keeps that memory, and what it holds is copied again at each launch.
    ///
    /// What is copied lies where it is until it is copied again, or a node writes there; so from here on no memory of the
    /// capture is used twice. The copy is made before the launch, so no node may use that memory before it in the capture:
    /// that is an error of [`Graph::capture`].
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for memory of a device or that is not page-locked, and once memory of the capture was used
    /// twice: say it first.
    pub fn input<T: Plain>(&mut self, from: &(impl DeviceSlice<T> + ?Sized)) -> Result<()> {
        let memory = from.view().memory;
        of_the_host(memory, "an input")?;
        self.sketch.hold.keep_apart()?;
        self.inputs.push(memory.host_range()?);
        self.sketch.hold.keep(memory);
        Ok(())
    }

    /// Says that this host memory is an output: exactly one copy of the graph goes there. A copy to any other host memory
    /// would mean that the host did something with it in the capture, which no launch does again, and is an error.
    ///
    /// As long as there is the graph a launch may write it at any time: the host looks at a copy,
    /// [`Buffer::to_vec`](crate::Buffer::to_vec).
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for memory of a device or that is not page-locked.
    pub fn output<T: Plain>(&mut self, to: &mut (impl DeviceSliceMut<T> + ?Sized)) -> Result<()> {
        let memory = to.view().memory;
        of_the_host(memory, "an output")?;
        self.outputs.push(memory.host_range()?);
        self.sketch.hold.keep(memory);
        Ok(())
    }
}

fn of_the_host(memory: &Memory, what: &str) -> Result<()> {
    if memory.is_host() {
        return memory.is_page_locked();
    }
    let text =
        format!("{what} is page-locked memory of the host, `Buffer::pinned`, and this lies on {}", memory.location());
    Err(Error::new(ErrorKind::Usage, text))
}

impl fmt::Debug for Capturing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capturing").field("stream", &self.origin).finish_non_exhaustive()
    }
}
