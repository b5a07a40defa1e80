//! Open ends of a graph: copy nodes, one end of which is set for each launch.
//!
//! A small copy on a stream costs the host more than a graph launch: on an H200 (driver 580.159.04) a copy in, a launch
//! and a copy out take 8.2 us; a launch of a graph that contains both copies as nodes, with newly set ends, takes 2.2
//! us, and the device is done 1.6 us sooner (bench `graph`, `copies`). So the copies into a graph and out of it are
//! nodes, too.
//!
//! ```text
//!   captured    both ends are in the graph's memory until the outer end is set
//!   set         the outer end is memory that is passed to the next launch; or the node is disabled
//!   launched    the launch is ordered with all other uses of the outer memory, like a copy on a stream
//! ```
//!
//! The graph does not keep the memory at its open ends. A launch that is not given all of this memory is an error.

use crate::{
    device::{
        Device,
        backend::{Address, Endpoint, NodeWork, RawExec, RawNode, Refused},
        graph_ir::Kind,
        recorder::{Recorder, RecorderState},
    },
    error::{Error, ErrorKind, Result},
    memory::{Memory, graphs},
    stream::{Stream, Ticket, capture::Capture},
};

/// A captured copy node that becomes an open end of the graph.
pub(crate) struct Opening {
    node: usize,
    direction: Direction,
    within: Address,
    bytes: usize,
    /// Its ticket in the capture.
    ticket: Ticket,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

impl Opening {
    /// Copies from the outer end to this memory, before all later uses of it.
    pub(crate) fn into(recorder: &Recorder, stream: &Stream, memory: &mut Memory, bytes: usize) -> Result<Self> {
        memory.before_write(stream)?;
        let opening = Self::new(recorder, stream, Direction::In, memory, bytes)?;
        memory.note_write(&opening.ticket);
        Ok(opening)
    }

    /// Copies from this memory to the outer end.
    pub(crate) fn out_of(recorder: &Recorder, stream: &Stream, memory: &Memory, bytes: usize) -> Result<Self> {
        memory.before_read(stream)?;
        let opening = Self::new(recorder, stream, Direction::Out, memory, bytes)?;
        memory.note_read(&opening.ticket);
        Ok(opening)
    }

    /// True if the capture writes this memory after the node.
    pub(crate) fn is_written_after(&self, capture: &Capture) -> Result<bool> {
        let last = graphs::of(capture)?.last_write(self.within);
        let own = &self.ticket;
        Ok(last.is_some_and(|last| !last.stream().is(own.stream()) || last.number() != own.number()))
    }

    fn new(recorder: &Recorder, stream: &Stream, direction: Direction, memory: &Memory, bytes: usize) -> Result<Self> {
        let within = memory.address()?;
        if stream.capture().is_none() || bytes == 0 || bytes > memory.bytes() {
            let text = format!(
                "an open end of {bytes} bytes needs a captured stream and memory of at least that size: the memory \
                 has {} bytes, and the stream is `{}`",
                memory.bytes(),
                stream.name()
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
        // SAFETY: the memory is at least that long, and the callers note the ticket in it, so that the graph keeps it.
        // The copy never runs as captured: before a launch the outer end is set or the node is disabled
        // (`Execution::launch_with`). Another exec of the same graph has no open ends, and copies each byte onto
        // itself.
        let ticket = stream.enqueue_point(|backend, raw| unsafe {
            backend.copy(raw, Endpoint::Device(within), Endpoint::Device(within), bytes as u64)
        })?;
        match recorder.end_of(stream.raw())[..] {
            [node] => Ok(Self { node, direction, within, bytes, ticket }),
            _ => Err(Error::new(ErrorKind::Usage, "the captured copy is not a single node")),
        }
    }
}

/// An open end of an exec.
pub(super) struct OpenEnd {
    raw: RawNode,
    direction: Direction,
    within: Address,
    /// The maximum number of bytes.
    bytes: usize,
    on: bool,
    outer: Option<(Endpoint, usize)>,
}

/// Memory that a launch reads or writes at its open ends.
pub(crate) struct LaunchMemory<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) read: bool,
    pub(crate) written: bool,
}

impl OpenEnd {
    pub(super) fn new(recorder: &Recorder, opening: &Opening) -> Result<Self> {
        let state = recorder.state();
        let raw = raw_of(&state, opening.node).map_err(|refused| Error::new(ErrorKind::Usage, refused.why))?.0;
        Ok(Self {
            raw,
            direction: opening.direction,
            within: opening.within,
            bytes: opening.bytes,
            on: true,
            outer: None,
        })
    }

    /// Sets the outer end. True if the node copies `bytes` bytes from now on; otherwise the node is disabled.
    pub(super) fn set(&mut self, device: &Device, exec: RawExec, memory: &Memory, bytes: usize) -> Result<bool> {
        let fits = (1..=self.bytes.min(memory.bytes())).contains(&bytes) && memory.is_at(device);
        let place = memory.endpoint(0);
        if fits && self.on && self.outer == Some((place, bytes)) {
            return Ok(true);
        }
        let backend = device.backend();
        self.outer = None;
        if fits {
            let (to, from) = match self.direction {
                Direction::In => (Endpoint::Device(self.within), place),
                Direction::Out => (place, Endpoint::Device(self.within)),
            };
            let copy = NodeWork::Copy { to, from, bytes: bytes as u64 };
            // SAFETY: both ends are at least that long. The graph's `GraphMemory` keeps the inner end. Only launches
            // that are given the outer end use it.
            let set = unsafe { backend.exec_set(exec, self.raw, &copy) }?;
            let on = set.is_ok() && (self.on || accepted(backend.exec_enable(exec, self.raw, true)?)?);
            if on {
                (self.on, self.outer) = (true, Some((place, bytes)));
                return Ok(true);
            }
        }
        if self.on {
            accepted(backend.exec_enable(exec, self.raw, false)?)?;
            self.on = false;
        }
        Ok(false)
    }

    /// Fails unless `given` contains the memory that the end was set to.
    pub(super) fn check_given(&self, given: &[LaunchMemory<'_>]) -> Result<()> {
        let covers = |given: &LaunchMemory<'_>| {
            let used = match self.direction {
                Direction::In => given.read,
                Direction::Out => given.written,
            };
            used && self
                .outer
                .is_some_and(|(at, bytes)| at == given.memory.endpoint(0) && bytes <= given.memory.bytes())
        };
        if !self.on || given.iter().any(covers) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Usage,
            "a launch was not given the memory of an open end of its graph: pass all memory that the ends were set to",
        ))
    }
}

fn accepted(refused: Result<(), Refused>) -> Result<bool> {
    refused.map(|()| true).map_err(|refused| Error::new(ErrorKind::Usage, refused.why))
}

/// The driver's node, if it is a single one.
pub(super) fn raw_of(state: &RecorderState, node: usize) -> Result<(RawNode, Kind), Refused> {
    match state.ir.get(node).map(|node| (node.kind, &*node.raw)) {
        Some((kind, [raw])) if kind != Kind::External => Ok((*raw, kind)),
        _ => Err(Refused {
            node: None,
            why: "the node is another library's work, which may be several nodes of the driver".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{
        Buffer,
        device::{Device, Emulated},
        graph::{Exec, Graph},
        memory::{Owned, transfer},
    };

    const BYTES: usize = 64;

    fn device() -> Device {
        Device::emulated(Emulated::new().workers(4)).race_checked()
    }

    /// Copies in and out again, and zeros the second half in between.
    fn halves(device: &Device) -> Exec {
        let mut within = Memory::on(device, BYTES).unwrap();
        let (graph, openings) = Graph::capture(device, |capturing| {
            let (recorder, stream) = (capturing.capture().recorder(), capturing.stream());
            let into = Opening::into(recorder, stream, &mut within, BYTES)?;
            assert!(!into.is_written_after(capturing.capture())?);
            transfer::zero(stream, &mut within, BYTES / 2, BYTES)?;
            assert!(into.is_written_after(capturing.capture())?);
            Ok([into, Opening::out_of(recorder, stream, &within, BYTES)?])
        })
        .unwrap();
        graph.instantiate_open(&openings).unwrap()
    }

    fn filled(stream: &Stream, value: u8) -> Owned {
        Buffer::from_slice(stream, &[value; BYTES]).unwrap().into_memory()
    }

    /// Enqueues a copy to the host, to be read when the stream is done.
    fn copied(stream: &Stream, from: &Memory) -> Owned {
        let mut host = Memory::pinned(stream.device(), from.bytes()).unwrap();
        transfer::copy(stream, from, &mut host, from.bytes()).unwrap();
        host
    }

    fn read(stream: &Stream, from: &Memory) -> Vec<u8> {
        let host = copied(stream, from);
        stream.synchronize_blocking().unwrap();
        host.host_slice().unwrap().to_vec()
    }

    fn reads(memory: &mut Memory) -> LaunchMemory<'_> {
        LaunchMemory { memory, read: true, written: false }
    }

    fn writes(memory: &mut Memory) -> LaunchMemory<'_> {
        LaunchMemory { memory, read: false, written: true }
    }

    fn half(first: u8) -> Vec<u8> {
        [[first; BYTES / 2], [0; BYTES / 2]].concat()
    }

    /// Blocks a stream until it is dropped.
    fn graph_memory(stream: &Stream) -> mpsc::Sender<()> {
        let (go, wait) = mpsc::channel();
        stream.host_function(move || _ = wait.recv()).unwrap();
        go
    }

    #[test]
    fn a_launch_without_the_memory_that_an_end_was_set_to_is_refused() {
        let device = device();
        let (stream, exec) = (Stream::new(&device).unwrap(), halves(&device));
        let exec = exec.execution();
        let (mut from, mut to, mut other) = (filled(&stream, 1), filled(&stream, 2), filled(&stream, 3));
        let refused = |given: &mut [LaunchMemory<'_>]| {
            let error = exec.launch_with(&stream, given).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains("not given the memory of an open end"), "{error}");
        };
        refused(&mut []);
        refused(&mut [reads(&mut from), writes(&mut to)]);
        assert!(exec.set_open_end(0, &from, BYTES).unwrap());
        refused(&mut [reads(&mut from), writes(&mut to)]);
        assert!(exec.set_open_end(1, &to, BYTES).unwrap());
        assert!(exec.launch(&stream).is_err());
        refused(&mut [reads(&mut from)]);
        refused(&mut [writes(&mut to)]);
        refused(&mut [reads(&mut other), writes(&mut to)]);
        refused(&mut [reads(&mut from), writes(&mut other)]);
        refused(&mut [writes(&mut from), writes(&mut to)]);
        refused(&mut [reads(&mut from), reads(&mut to)]);
        exec.set_open_end(2, &to, BYTES).unwrap_err();
        // The launches run as set, and the refused ones had no effect.
        for _ in 0..2 {
            exec.launch_with(&stream, &mut [reads(&mut from), writes(&mut to)]).unwrap();
        }
        assert_eq!(
            [read(&stream, &from), read(&stream, &to), read(&stream, &other)],
            [vec![1; BYTES], half(1), vec![3; BYTES]]
        );
        // Set to other memory, so the earlier memory is refused.
        assert!(exec.set_open_end(0, &other, BYTES).unwrap());
        refused(&mut [reads(&mut from), writes(&mut to)]);
        exec.launch_with(&stream, &mut [reads(&mut other), writes(&mut to)]).unwrap();
        assert_eq!(read(&stream, &to), half(3));
    }

    #[test]
    fn an_end_that_cannot_copy_is_disabled_until_it_is_set_to_memory_that_it_can_copy() {
        let (device, elsewhere) = (device(), Device::emulated(Emulated::new()).race_checked());
        let (stream, exec) = (Stream::new(&device).unwrap(), halves(&device));
        let exec = exec.execution();
        let (mut from, mut to) = (filled(&stream, 1), filled(&stream, 2));
        let pinned = Memory::pinned(&device, BYTES).unwrap();
        let own = Buffer::wrap(vec![7_u8; BYTES]).unwrap().0.into_memory();
        let abroad = filled(&Stream::new(&elsewhere).unwrap(), 8);
        let short = Memory::on(&device, BYTES / 2).unwrap();
        let long = Memory::on(&device, 2 * BYTES).unwrap();
        assert!(exec.set_open_end(1, &to, BYTES).unwrap());
        for round in 1.. {
            assert!(exec.set_open_end(0, &from, BYTES).unwrap());
            exec.launch_with(&stream, &mut [reads(&mut from), writes(&mut to)]).unwrap();
            assert_eq!(read(&stream, &to), half(round));
            let (memory, bytes) = match round {
                1 => (&pinned, BYTES),
                2 => (&own, BYTES),
                3 => (&abroad, BYTES),
                4 => (&short, BYTES),
                5 => (&long, BYTES + 1),
                6 => (&from, 0),
                _ => break,
            };
            assert!(!exec.set_open_end(0, memory, bytes).unwrap(), "{round}");
            assert!(!exec.set_open_end(0, memory, bytes).unwrap(), "{round}, again");
            // The memory that was set before is dropped, and nothing is copied from there.
            from = filled(&stream, round + 1);
            to = filled(&stream, 9);
            assert!(exec.set_open_end(1, &to, BYTES).unwrap());
            exec.launch_with(&stream, &mut [writes(&mut to)]).unwrap();
            assert_eq!(read(&stream, &to), half(round));
        }
        assert!(!exec.set_open_end(1, &pinned, BYTES).unwrap());
        let mut unread = filled(&stream, 9);
        exec.launch_with(&stream, &mut [reads(&mut from), writes(&mut unread)]).unwrap();
        assert_eq!(read(&stream, &unread), [9; BYTES]);
    }

    #[test]
    fn an_end_that_is_set_to_fewer_bytes_copies_only_those() {
        let device = device();
        let (stream, exec) = (Stream::new(&device).unwrap(), halves(&device));
        let exec = exec.execution();
        let (mut from, mut to) = (filled(&stream, 1), filled(&stream, 2));
        for (bytes, wanted) in [(BYTES, half(1)), (8, [&[1; 8][..], &[2; BYTES - 8]].concat()), (BYTES, half(1))] {
            to = filled(&stream, 2);
            assert!(exec.set_open_end(0, &from, BYTES).unwrap() && exec.set_open_end(1, &to, bytes).unwrap());
            exec.launch_with(&stream, &mut [reads(&mut from), writes(&mut to)]).unwrap();
            assert_eq!(read(&stream, &to), wanted);
        }
        from = filled(&stream, 3);
        assert!(exec.set_open_end(0, &from, 8).unwrap());
        exec.launch_with(&stream, &mut [reads(&mut from), writes(&mut to)]).unwrap();
        let wanted = [&[3; 8][..], &[1; BYTES / 2 - 8], &[0; BYTES / 2]].concat();
        assert_eq!(read(&stream, &to), wanted);
    }

    #[test]
    fn memory_given_to_a_launch_is_ordered_with_all_other_uses() {
        let device = device();
        let [one, two, three] = ["one", "two", "three"].map(|name| Stream::named(&device, name).unwrap());
        let (first, second) = (halves(&device), halves(&device));
        let (first, second) = (first.execution(), second.execution());
        let mut changed = Buffer::from_slice(&one, &[1_u8; BYTES]).unwrap();
        let (mut between, mut last) = (filled(&one, 2), filled(&two, 3));
        // A graph that writes what the first reads.
        let (fill, ()) = Graph::capture(&device, |capturing| capturing.stream().fill(&mut changed, 4)).unwrap();
        let fill = fill.instantiate().unwrap();
        let mut from = changed.into_memory();
        assert!(first.set_open_end(0, &from, BYTES).unwrap() && first.set_open_end(1, &between, BYTES).unwrap());
        assert!(second.set_open_end(0, &between, BYTES).unwrap() && second.set_open_end(1, &last, BYTES).unwrap());
        let held = [&one, &two, &three].map(graph_memory);
        fill.launch(&three).unwrap();
        first.launch_with(&one, &mut [reads(&mut from), writes(&mut between)]).unwrap();
        second.launch_with(&two, &mut [reads(&mut between), writes(&mut last)]).unwrap();
        let came = copied(&three, &last);
        // Written again on other streams, behind these launches.
        transfer::zero(&three, &mut from, 0, BYTES).unwrap();
        transfer::zero(&one, &mut between, 0, BYTES).unwrap();
        transfer::zero(&one, &mut last, 0, BYTES).unwrap();
        // And dropped, while all of that waits.
        drop((from, between, last));
        drop(held);
        three.synchronize_blocking().unwrap();
        assert_eq!(came.host_slice().unwrap(), half(4));
    }

    #[test]
    fn one_launch_reads_and_writes_the_same_memory() {
        let device = device();
        let (stream, exec) = (Stream::new(&device).unwrap(), halves(&device));
        let (exec, other) = (exec.execution(), Stream::new(&device).unwrap());
        let mut message = filled(&other, 5);
        assert!(exec.set_open_end(0, &message, BYTES).unwrap() && exec.set_open_end(1, &message, BYTES).unwrap());
        let held = graph_memory(&other);
        let before = copied(&other, &message);
        exec.launch_with(&stream, &mut [LaunchMemory { memory: &mut message, read: true, written: true }]).unwrap();
        let after = copied(&other, &message);
        drop(held);
        other.synchronize_blocking().unwrap();
        assert_eq!(before.host_slice().unwrap(), [5; BYTES]);
        assert_eq!(after.host_slice().unwrap(), half(5));
    }
}
