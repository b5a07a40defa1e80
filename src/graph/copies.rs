//! The copies between host and device in a captured graph.
//!
//! ```text
//!   from an input       removed: the caller makes it before the launch              Graph::inputs
//!                       to memory that a node uses before or concurrently: an error
//!                       to other host memory: an error, as the copy would have to stay, and nothing keeps an input alive
//!   from other memory   stays, if no node writes the memory: it is a constant, which the graph keeps alive
//!   to an output        stays, exactly one for each output
//!   to other memory     an error: the host has used the data in the capture, which no launch repeats
//! ```

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Weak},
};

use super::Sketch;
use crate::{
    device::{
        Device,
        backend::{Address, Endpoint},
        graph_ir::CopyOperands,
        touched::{TouchedRange, clash},
    },
    error::{Error, ErrorKind, Result},
    memory::{DeviceSlice, Plain, graph_memory::GraphMemory},
    stream::Stream,
};

/// A copy of an input that was removed from a graph: its source and destination.
pub struct InputCopy {
    input: usize,
    offset: usize,
    bytes: usize,
    to: Address,
    device: Device,
    graph_memory: Weak<GraphMemory>,
}

impl InputCopy {
    /// The index of the input, in the order of the calls to [`Capturing::input`](super::Capturing::input).
    pub fn input(&self) -> usize {
        self.input
    }

    /// The offset of the source within the input, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The destination: a `CUdeviceptr`.
    pub fn device_address(&self) -> u64 {
        self.to.0
    }

    /// Enqueues the copy from `from`, which stands for the whole input, for later launches. The copy comes after earlier
    /// launches.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for device memory, for memory that is not page-locked, for fewer elements than the input's, for a
    /// captured stream, for a stream on a device without a copy path to the graph's device, and if the graph was
    /// dropped; [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn copy<T: Plain>(&self, stream: &Stream, from: &(impl DeviceSlice<T> + ?Sized)) -> Result<()> {
        let graph_memory = self.graph_memory.upgrade();
        let graph_memory = graph_memory.ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                "the graph of this input was dropped: keep the graph, or one of its execs, as long as you copy its \
                 inputs",
            )
        })?;
        if !self.device.copies_with(stream.device()) {
            let text = format!(
                "stream `{}` on {} has no copy path to the graph's device {}: use a stream on the graph's device",
                stream.name(),
                stream.device(),
                self.device
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        graph_memory.copy_input(stream, self.to, from.view().bytes::<T>(), self.offset, self.bytes)
    }
}

/// Host memory that was declared as an input: the addresses of its elements, and those of its whole buffer.
pub(super) struct InputRange {
    pub(super) range: Range<usize>,
    pub(super) whole: Range<usize>,
}

/// Checks the copies as described in the [module documentation](self), and removes the copies of inputs.
pub(super) fn check(sketch: &Sketch, inputs: &[InputRange], outputs: &[Range<usize>]) -> Result<Vec<InputCopy>> {
    let (copies, foreign) = {
        let state = sketch.recorder.state();
        let copies: Vec<_> = state
            .ir
            .all()
            .filter_map(|(at, node)| {
                let CopyOperands { to, from, bytes } = node.copies?;
                Some((at, node.label.clone(), to, from, bytes as usize))
            })
            .collect();
        let name = |at: usize| state.ir.get(at).map(|node| node.name.clone()).unwrap_or_default();
        let foreign: Vec<_> = state.external_copies.iter().map(|&(at, way, bytes)| (name(at), way, bytes)).collect();
        (copies, foreign)
    };
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
    if let Some((name, way, bytes)) = foreign.first() {
        return wrong(format!(
            "external work `{name}` copies {bytes} bytes {way}, which a launch cannot repeat, since wakeline does \
             not track the host memory: leave the copy out of the capture"
        ));
    }
    let range = |place: Endpoint, bytes: usize| match place {
        Endpoint::Host(start) => Some(start.addr()..start.addr() + bytes),
        Endpoint::Device(_) => None,
    };
    let mut copied = vec![0; outputs.len()];
    for (at, label, to, _, bytes) in &copies {
        let Some(to) = range(*to, *bytes) else { continue };
        match outputs.iter().position(|output| output.start <= to.start && to.end <= output.end) {
            Some(output) => copied[output] += 1,
            None => {
                let whose = label
                    .as_ref()
                    .map(|operator| format!("operator `{operator}` reads data back: "))
                    .unwrap_or_default();
                return wrong(format!(
                    "{whose}node {at} copies {bytes} bytes to host memory that is not an output: a launch does not \
                     repeat the host's use of the data; leave the copy out of the capture, or declare the memory \
                     with `Capturing::output`"
                ));
            }
        }
    }
    if let Some(output) = copied.iter().position(|copies| *copies != 1) {
        return wrong(format!(
            "output {output} is written by {} copies: exactly one copy must write it",
            copied[output]
        ));
    }
    let overlaps = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    let (mut taken, mut stay) = (Vec::new(), Vec::new());
    for (at, _, to, from, bytes) in copies {
        let Some(from) = range(from, bytes) else { continue };
        if outputs.iter().any(|output| overlaps(output, &from)) {
            return wrong(format!(
                "node {at} copies from host memory that is an output, which the host cannot access between the two \
                 copies: copy from the device memory instead"
            ));
        }
        let input =
            inputs.iter().position(|InputRange { range, .. }| range.start <= from.start && from.end <= range.end);
        let Some(input) = input else {
            if let Some(input) = inputs.iter().position(|input| overlaps(&input.range, &from)) {
                return wrong(format!(
                    "node {at} copies {bytes} bytes of which only a part is input {input}: declare all of them as one \
                     input, or copy each part by itself"
                ));
            }
            stay.push(from);
            continue;
        };
        let Endpoint::Device(to) = to else {
            return wrong(format!(
                "node {at} copies input {input} to host memory: every launch would copy the data that the input had \
                 during the capture; copy the input to the device, or copy it on the host"
            ));
        };
        check_not_used_before(sketch, at, input, TouchedRange::new(Endpoint::Device(to), bytes as u64, true))?;
        let (offset, graph_memory) = (from.start - inputs[input].range.start, Arc::downgrade(&sketch.graph_memory));
        taken.push((at, InputCopy { input, offset, bytes, to, device: sketch.capture.device().clone(), graph_memory }));
    }
    taken.iter().try_for_each(|(at, _)| sketch.recorder.remove(*at))?;
    // The copies that stay still read their memory, which may be another part of an input's buffer.
    let removed = inputs.iter().filter(|input| !stay.iter().any(|from| overlaps(&input.whole, from)));
    removed.for_each(|input| sketch.graph_memory.forget_reads(&input.whole));
    Ok(taken.into_iter().map(|(_, copy)| copy).collect())
}

/// Fails if a node uses the destination of an input's copy without coming after the copy, since the removed copy is
/// made before all nodes.
fn check_not_used_before(sketch: &Sketch, copy: usize, input: usize, to: TouchedRange) -> Result<()> {
    let state = sketch.recorder.state();
    let first = state
        .ir
        .all()
        .find(|(at, node)| *at != copy && !state.ir.comes_after(*at, copy) && clash(&node.touched, &[to]));
    let Some((at, node)) = first else { return Ok(()) };
    let whose = node.label.as_ref().map(|operator| format!(" of operator `{operator}`")).unwrap_or_default();
    let text = format!(
        "node {at}, `{}`{whose} uses the destination of input {input} before the captured copy or concurrently with \
         it, but inputs are copied before the launch: copy the input to memory of its own",
        node.name
    );
    Err(Error::new(ErrorKind::Usage, text))
}

impl fmt::Debug for InputCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InputCopy")
            .field("input", &self.input)
            .field("offset", &self.offset)
            .field("bytes", &self.bytes)
            .field("to", &self.to)
            .finish()
    }
}
