//! Open ends of a graph: copies, nodes of it, one end of which is told anew for each launch.
//!
//! A small copy on a stream costs the host more than a launch of a graph does, 5.4 us beside 2.1 on an H200; one that is a
//! node of the graph costs 1.2 us if it is another than last time, and nothing if not (driver 580.159.04). So what goes into a
//! graph and what comes out of it are nodes, too.
//!
//! ```text
//!   captured    from within to within: both ends are the graph's, until one is told
//!   told        that end is some memory that a launch is about to be given, or the node is off
//!   launched    with that memory: it is in order with whoever uses it, as with a copy on a stream
//! ```
//!
//! The graph keeps nothing that lies at an open end. So a launch is an error unless it is given all of that.

use super::Execution;
use crate::{
    device::{
        backend::{Address, NodeWork, Place, RawExec, RawNode, Refused},
        recorder::Recorder,
    },
    error::{Error, ErrorKind, Result},
    memory::{Memory, hold::Hold},
    stream::{Stream, Streams, Ticket, capture::Capture},
    sync::lock,
};

/// A node of a capture that is to be an open end of the graph.
pub(crate) struct Opening {
    node: usize,
    way: Way,
    within: Address,
    bytes: usize,
    /// Its place in the capture.
    ticket: Ticket,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    In,
    Out,
}

impl Opening {
    /// What is told is copied to this memory, before whatever uses it from here on.
    pub(crate) fn into(recorder: &Recorder, stream: &Stream, memory: &mut Memory, bytes: usize) -> Result<Self> {
        memory.before_write(stream)?;
        let opening = Self::new(recorder, stream, Way::In, memory, bytes)?;
        memory.note_write(opening.ticket.clone());
        Ok(opening)
    }

    /// This memory is copied to what is told.
    pub(crate) fn out_of(recorder: &Recorder, stream: &Stream, memory: &Memory, bytes: usize) -> Result<Self> {
        memory.before_read(stream)?;
        let opening = Self::new(recorder, stream, Way::Out, memory, bytes)?;
        memory.note_read(opening.ticket.clone());
        Ok(opening)
    }

    /// Whether the capture writes this memory after it.
    pub(crate) fn is_written_after(&self, capture: &Capture) -> Result<bool> {
        Hold::writes_after(capture, self.within, &self.ticket)
    }

    fn new(recorder: &Recorder, stream: &Stream, way: Way, memory: &Memory, bytes: usize) -> Result<Self> {
        let within = memory.address()?;
        if stream.capture().is_none() || bytes == 0 || bytes > memory.bytes() {
            let text = format!("an open end of {bytes} bytes of memory of {} on `{}`", memory.bytes(), stream.name());
            return Err(Error::new(ErrorKind::Usage, text));
        }
        // SAFETY: the memory is as long; whoever calls this notes the ticket in it, so that the graph keeps it. It is not run
        // like this: no launch comes before the other end is told, or the node is off (`Execution::launch_with`).
        let ticket = stream.enqueue(|backend, raw| unsafe {
            backend.copy(raw, Place::Device(within), Place::Device(within), bytes as u64)
        })?;
        match recorder.end_of(stream.raw())[..] {
            [node] => Ok(Self { node, way, within, bytes, ticket }),
            _ => Err(Error::new(ErrorKind::Usage, "a copy that is no node")),
        }
    }
}

/// An open end of an exec.
pub(super) struct End {
    raw: RawNode,
    way: Way,
    within: Address,
    /// At most.
    bytes: usize,
    on: bool,
    told: Option<(Place, usize)>,
}

/// What a launch is given: what it reads and writes at its open ends.
pub(crate) struct Given<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) read: bool,
    pub(crate) written: bool,
}

impl End {
    pub(super) fn new(recorder: &Recorder, opening: &Opening) -> Result<Self> {
        let state = recorder.state();
        let raw = super::raw_of(&state, opening.node).map_err(|refused| Error::new(ErrorKind::Usage, refused.why))?.0;
        Ok(Self { raw, way: opening.way, within: opening.within, bytes: opening.bytes, on: true, told: None })
    }

    /// True if the node copies these bytes from now on; if not, it is off.
    fn tell(&mut self, execution: &Execution, exec: RawExec, memory: &Memory, bytes: usize) -> Result<bool> {
        let fits = (1..=self.bytes.min(memory.bytes())).contains(&bytes) && memory.is_at(&execution.device);
        let place = memory.place();
        if fits && self.on && self.told == Some((place, bytes)) {
            return Ok(true);
        }
        let backend = execution.device.backend();
        self.told = None;
        if fits {
            let (to, from) = match self.way {
                Way::In => (Place::Device(self.within), place),
                Way::Out => (place, Place::Device(self.within)),
            };
            let copy = NodeWork::Copy { to, from, bytes: bytes as u64 };
            // SAFETY: both ends are as long. The one within is kept by the graph's hold. The other is used by launches alone
            // that are given it.
            let set = unsafe { backend.exec_set(exec, self.raw, &copy) }?;
            let on = set.is_ok() && (self.on || wrong(backend.exec_enable(exec, self.raw, true)?)?);
            if on {
                (self.on, self.told) = (true, Some((place, bytes)));
                return Ok(true);
            }
        }
        if self.on {
            wrong(backend.exec_enable(exec, self.raw, false)?)?;
            self.on = false;
        }
        Ok(false)
    }

    /// Whether a launch that is given all of this may copy as it was told.
    pub(super) fn is_covered(&self, given: &[Given<'_>]) -> Result<()> {
        let covers = |given: &Given<'_>| {
            let used = match self.way {
                Way::In => given.read,
                Way::Out => given.written,
            };
            used && self.told.is_some_and(|(at, bytes)| at == given.memory.place() && bytes <= given.memory.bytes())
        };
        if !self.on || given.iter().any(covers) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Usage, "a launch of a graph with an open end that is not given what lies there"))
    }
}

fn wrong(refused: Result<(), Refused>) -> Result<bool> {
    refused.map(|()| true).map_err(|refused| Error::new(ErrorKind::Usage, refused.why))
}

impl Execution {
    /// Launches from now on copy so many bytes to this memory, or from it, at an open end, and are to be given it. False if its
    /// node cannot: then they copy nothing there.
    pub(crate) fn tell(&self, end: usize, memory: &Memory, bytes: usize) -> Result<bool> {
        self.device.check()?;
        let told = {
            let mut uses = lock(&self.uses);
            match uses.ends.get_mut(end) {
                Some(end) => end.tell(self, self.raw, memory, bytes),
                None => Err(Error::new(ErrorKind::Usage, "an open end that is not there")),
            }
        };
        if told.is_err() { Streams::of(&self.device).heed(told) } else { told }
    }
}
