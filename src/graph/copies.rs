//! The copies between host and device in a captured graph.
//!
//! ```text
//!   from an input       taken out: the caller makes it, before the launch           Graph::inputs
//!                       to memory that is used before it, or beside it: an error
//!                       to other host memory: an error, since it would have to stay and nothing keeps an input
//!   from other memory   stays, if nothing in the graph writes that: it is a constant, and the graph keeps it
//!   to an output        stays, one for each
//!   to other memory     an error: the host has looked at it in the capture, and no launch does that again
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
        backend::{Address, Place},
        draft::Copies,
        touched::{Touch, clash},
    },
    error::{Error, ErrorKind, Result},
    memory::{DeviceSlice, Plain, hold::Hold},
    stream::Stream,
};

/// A copy of an input that was taken out of a graph: where it came from, and where it went.
pub struct InputCopy {
    input: usize,
    offset: usize,
    bytes: usize,
    to: Address,
    /// The graph's.
    device: Device,
    hold: Weak<Hold>,
}

impl InputCopy {
    /// Which input it was, in the order of [`Capturing::input`](super::Capturing::input).
    pub fn input(&self) -> usize {
        self.input
    }

    /// Where it began in that, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// How many bytes it copied.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it copied to: a `CUdeviceptr`.
    pub fn device_address(&self) -> u64 {
        self.to.0
    }

    /// Makes the copy, from this host memory, for the launches from now on: after those that were made before.
    ///
    /// # Errors
    /// [`Usage`](ErrorKind::Usage) for memory of a device, that is not page-locked or too small, for a captured stream, for a
    /// stream of a device that cannot copy to the graph's, and if the graph is gone;
    /// [`DeviceLost`](ErrorKind::DeviceLost) after a fault.
    pub fn copy<T: Plain>(&self, stream: &Stream, from: &(impl DeviceSlice<T> + ?Sized)) -> Result<()> {
        let hold = self.hold.upgrade();
        let hold = hold.ok_or_else(|| Error::new(ErrorKind::Usage, "an input of a graph that is gone"))?;
        if !self.device.copies_with(stream.device()) {
            let text = format!(
                "stream `{}` of {} cannot copy an input of a graph of {}: choose a stream of that device",
                stream.name(),
                stream.device(),
                self.device
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        hold.feed(stream, self.to, from.view(), self.offset, self.bytes)
    }
}

/// See the [module](self). The inputs' copies are taken out.
pub(super) fn check(sketch: &Sketch, inputs: &[Range<usize>], outputs: &[Range<usize>]) -> Result<Vec<InputCopy>> {
    let (copies, foreign) = {
        let state = sketch.recorder.state();
        let copies: Vec<_> = state
            .draft
            .all()
            .filter_map(|(at, node)| {
                let Copies { to, from, bytes } = node.copies?;
                Some((at, node.label.clone(), to, from, bytes as usize))
            })
            .collect();
        let name = |at: usize| state.draft.get(at).map(|node| node.name.clone()).unwrap_or_default();
        let foreign: Vec<_> = state.foreign.iter().map(|&(at, way, bytes)| (name(at), way, bytes)).collect();
        (copies, foreign)
    };
    let wrong = |text: String| Err(Error::new(ErrorKind::Usage, text));
    if let Some((name, way, bytes)) = foreign.first() {
        return wrong(format!(
            "external work `{name}` copies {bytes} bytes {way}: whatever host memory that is, at a launch it is not what it \
             was in the capture"
        ));
    }
    let range = |place: Place, bytes: usize| match place {
        Place::Host(start) => Some(start.addr()..start.addr() + bytes),
        Place::Device(_) => None,
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
                    "{whose}node {at} copies {bytes} bytes to the host, to no output: what the host does with them is in no \
                     graph; leave it out of the capture, or say `output`"
                ));
            }
        }
    }
    if let Some(output) = copied.iter().position(|copies| *copies != 1) {
        return wrong(format!("output {output} is copied to {} times: there has to be one copy", copied[output]));
    }
    let overlaps = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    let mut taken = Vec::new();
    for (at, _, to, from, bytes) in copies {
        let Some(from) = range(from, bytes) else { continue };
        if outputs.iter().any(|output| overlaps(output, &from)) {
            return wrong(format!(
                "node {at} copies from the host what another copies to it: no host work comes between them"
            ));
        }
        let input = inputs.iter().position(|input| input.start <= from.start && from.end <= input.end);
        let Some(input) = input else { continue };
        let Place::Device(to) = to else {
            return wrong(format!(
                "node {at} copies input {input} to the host: what is copied there would be what the input held in the capture, \
                 at every launch; copy it to the device, or do that on the host"
            ));
        };
        uses_it_first(sketch, at, input, Touch::new(Place::Device(to), bytes as u64, true))?;
        let (offset, hold) = (from.start - inputs[input].start, Arc::downgrade(&sketch.hold));
        taken.push((at, InputCopy { input, offset, bytes, to, device: sketch.capture.device().clone(), hold }));
    }
    taken.iter().try_for_each(|(at, _)| sketch.recorder.remove(*at))?;
    inputs.iter().for_each(|input| sketch.hold.reads_no_more(input));
    Ok(taken.into_iter().map(|(_, copy)| copy).collect())
}

/// An error if a node uses what an input is copied to, and does not come after that copy: taken out, it comes before all.
fn uses_it_first(sketch: &Sketch, copy: usize, input: usize, to: Touch) -> Result<()> {
    let state = sketch.recorder.state();
    let first = state
        .draft
        .all()
        .find(|(at, node)| *at != copy && !state.draft.comes_after(*at, copy) && clash(&node.touched, &[to]));
    let Some((at, node)) = first else { return Ok(()) };
    let whose = node.label.as_ref().map(|operator| format!(" of operator `{operator}`")).unwrap_or_default();
    let text = format!(
        "node {at}, `{}`{whose} uses the memory that input {input} is copied to, before that copy or beside it; an input is \
         copied before the launch: copy it to memory of its own",
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
