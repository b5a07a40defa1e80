//! One graph of a section: its capture, and the copies in and out of its memory.
//!
//! For the capture, each operator gets streams of the capture, and hubs of the capture to the other operators. A port
//! on the section's boundary gets an input end with one message, or an output end that keeps the sent message. Each
//! `compute` is polled once, in the order of the messages, all within one call.
//!
//! ```text
//!   allocated before  the inputs' memory: it belongs to the section, which copies each message there
//!   allocated in it   all envelopes of the inner hubs, and what operators allocate: owned and reused by the graph
//!   sent from it      in memory of the graph: copied to a blank envelope of the destination hub
//!                     in an input's envelope: copied back to the incoming message, which is sent on
//! ```

use std::{collections::HashMap, sync::Arc};

use smallvec::SmallVec;

use super::{
    graph_table::{GraphShape, Lengths},
    plan::{BoundaryPort, SectionPlan},
};
use crate::{
    device::human,
    error::{Error, ErrorKind, Result},
    flow::drive::{FlowOperator, HubToCreate, operator},
    graph::{Capturing, Exec, Graph},
    hub::{RawEnvelope, pool::Pool},
    memory::{
        Memory,
        execution::{LaunchMemory, Opening},
        transfer,
    },
    operator::{AnyPort, erased::PortEnds},
    stream::Stream,
};

/// A graph that can be replayed.
pub(super) struct Replay {
    exec: Exec,
    inputs: Vec<InputMemory>,
    pub(super) outputs: Vec<OutputMemory>,
}

/// The memory of one input.
struct InputMemory {
    envelope: RawEnvelope,
    bytes: usize,
    /// The memory is zero from this offset on.
    zero_from: usize,
    /// Whether an operator writes to the memory.
    written: bool,
    /// The index of the node that copies into it, among the openings that `instantiate_open` gets.
    opening: usize,
}

/// One output of the graph.
pub(super) struct OutputMemory {
    pub(super) from: OutputSource,
    pub(super) bytes: usize,
    /// The size of a row in bytes. `None` if the output does not have the rows of the inputs.
    row_bytes: Option<usize>,
    /// The index of the node that copies it out, among the same openings. `None` if nothing is copied out.
    opening: Option<usize>,
}

pub(super) enum OutputSource {
    Input(usize),
    Own(RawEnvelope),
}

struct CapturedInput {
    home: Arc<Pool>,
    start: u64,
    bytes: usize,
}

struct RecordedRun {
    /// The envelope sent from each output.
    kept: Vec<RawEnvelope>,
    /// Those of the inputs, then those of the outputs.
    openings: Vec<Opening>,
    /// Whether an operator writes each input's memory.
    written: Vec<bool>,
}

/// Calls `act` with the port of an operator that has this name.
pub(super) fn with_port<R>(
    member: &mut FlowOperator,
    port: &str,
    act: impl FnOnce(&mut dyn AnyPort) -> Option<Result<R>>,
) -> Result<R> {
    let (mut act, mut done) = (Some(act), None);
    member.operator.visit(&mut |name, found| {
        if name == port
            && let Some(act) = act.take()
        {
            done = act(found);
        }
    });
    let done = done.unwrap_or_else(|| Err(Error::internal(format!("`{port}` is not on the section's boundary"))));
    done.map_err(|error| error.at(operator(&member.name)))
}

/// Captures one run of each operator, for messages of this shape.
pub(super) fn capture(
    members: &mut [FlowOperator],
    plan: &SectionPlan,
    interior: &[HubToCreate],
    shape: &GraphShape,
) -> Result<(Replay, Graph)> {
    let captured = shape.lengths.iter().map(|&bytes| {
        let memory = Memory::on(&plan.device, bytes)?;
        let start = memory.address()?.0;
        Ok(CapturedInput { home: Pool::of_one(&plan.name, memory), start, bytes })
    });
    let captured = captured.collect::<Result<Vec<_>>>()?;
    let (graph, recorded) = Graph::capture(&plan.device, |capturing| {
        let recorded = record(members, plan, interior, &captured, capturing);
        // Even after an error, the operators return to their own streams and ports.
        members.iter_mut().for_each(|member| member.operator.leave_capture());
        capturing.capture().recorder().set_label(None);
        recorded
    })?;
    let RecordedRun { kept, openings, written } = recorded;
    let sent: Vec<_> = kept.iter().map(RawEnvelope::memory).collect();
    if let Some(name) = graph.kept_by(&sent) {
        let text = "memory that was allocated in the capture, and last used by this operator, outlives the capture: a replay keeps \
                    no memory, and this memory has no contents before the first replay; allocate it earlier, for example in `start`";
        return Err(Error::new(ErrorKind::Usage, text).at(operator(&name)));
    }
    let mut outputs = Vec::with_capacity(kept.len());
    let mut next = captured.len();
    for (edge, envelope) in plan.outputs.iter().zip(kept) {
        let output = output_memory(edge, envelope, &captured, shape, &mut next);
        outputs.push(output.map_err(|error| error.at(operator(&members[edge.member].name)))?);
    }
    let inputs =
        plan.inputs.iter().zip(captured).zip(written).enumerate().map(|(opening, ((edge, captured), written))| {
            input_memory(captured, written, opening).map_err(|error| error.at(operator(&members[edge.member].name)))
        });
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    Ok((Replay { exec: graph.instantiate_open(&openings)?, inputs, outputs }, graph))
}

/// Returns an error if a second capture differs from the first.
pub(super) fn is_the_same(first: &(Replay, Graph), again: &(Replay, Graph)) -> Result<()> {
    let ((first, graph), (second, again)) = (first, again);
    let other_memory = || {
        let differs = graph.memory_differs_from(&first.inputs(), again);
        differs.or_else(|| again.memory_differs_from(&second.inputs(), graph))
    };
    let (whose, what) = match graph.differs_from(again) {
        Some((whose, node)) => (whose, format!("{node} is not the same")),
        None => match other_memory() {
            Some(whose) => (Some(whose), "it uses other memory the second time".into()),
            None => return Ok(()),
        },
    };
    let text = format!(
        "two captures differ: {what}. The host decided differently, but every replay repeats what was captured: pass the \
         decision in a message, or leave the operator out of the section"
    );
    let error = Error::new(ErrorKind::Usage, text);
    Err(match whose {
        Some(name) => error.at(operator(&name)),
        None => error,
    })
}

fn record(
    members: &mut [FlowOperator],
    plan: &SectionPlan,
    interior: &[HubToCreate],
    captured: &[CapturedInput],
    capturing: &Capturing,
) -> Result<RecordedRun> {
    let capture = capturing.capture();
    let recorder = capture.recorder();
    let mut openings = Vec::with_capacity(plan.inputs.len() + plan.outputs.len());
    let streams = members
        .iter_mut()
        .map(|member| member.operator.enter_capture(capture).map_err(|error| error.at(operator(&member.name))));
    let streams = streams.collect::<Result<Vec<Stream>>>()?;
    let mut ends: Vec<PortEnds> = members.iter().map(|_| PortEnds::new()).collect();
    for (edge, captured) in plan.inputs.iter().zip(captured) {
        let Some(mut envelope) = captured.home.take()? else { return Err(missing()) };
        envelope.set_bytes(captured.bytes);
        openings.push(Opening::into(recorder, &streams[edge.member], envelope.memory_mut(), captured.bytes)?);
        let member = &mut members[edge.member];
        let end = with_port(member, edge.port, |port| port.section_input().map(|input| input.captured_end(envelope)))?;
        ends[edge.member].entry(edge.port).or_default().push(end);
    }
    for edge in &plan.outputs {
        let (member, stream) = (&mut members[edge.member], &streams[edge.member]);
        let end =
            with_port(member, edge.port, |port| port.section_output().map(|output| Ok(output.captured_end(stream))))?;
        ends[edge.member].entry(edge.port).or_default().push(end);
    }
    let places: HashMap<_, _> = plan.members.iter().enumerate().map(|(place, member)| (*member, place)).collect();
    let place = |number: usize| places.get(&number).copied().ok_or_else(missing);
    for HubToCreate { plan, make, from, to, .. } in interior {
        let (writer, reader) = (place(from.0)?, place(to.0)?);
        let mut plan = plan.clone();
        (plan.captured, plan.stepped) = (Some(streams[writer].clone()), false);
        let (sender, receiver, _) = make(plan)?;
        ends[writer].entry(from.1).or_default().push(sender);
        ends[reader].entry(to.1).or_default().push(receiver);
    }
    for (member, ends) in members.iter_mut().zip(ends) {
        member.operator.bind_captured(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    for member in members.iter_mut() {
        capture.recorder().set_label(Some(member.name.clone()));
        member.operator.run_captured().map_err(|error| error.at(operator(&member.name)))?;
    }
    let kept = plan.outputs.iter().map(|edge| {
        let sent = with_port(&mut members[edge.member], edge.port, |port| {
            port.section_output().map(|output| Ok(output.captured()))
        });
        sent?.pop().ok_or_else(missing)
    });
    let kept = kept.collect::<Result<Vec<_>>>()?;
    capture.recorder().set_label(None);
    for (edge, envelope) in plan.outputs.iter().zip(&kept) {
        if is_copied_out(envelope) {
            openings.push(Opening::out_of(recorder, &streams[edge.member], envelope.memory(), envelope.bytes())?);
        }
    }
    let inputs = openings.iter().take(plan.inputs.len());
    let written = inputs.map(|opening| opening.is_written_after(capture)).collect::<Result<_>>()?;
    capturing.join()?;
    Ok(RecordedRun { kept, openings, written })
}

/// Whether a graph can copy the envelope out.
fn is_copied_out(envelope: &RawEnvelope) -> bool {
    envelope.bytes() > 0 && !envelope.memory().is_host()
}

fn missing() -> Error {
    Error::internal("the section does not match its plan")
}

/// `next`: the index of the next opening.
fn output_memory(
    edge: &BoundaryPort,
    envelope: RawEnvelope,
    captured: &[CapturedInput],
    shape: &GraphShape,
    next: &mut usize,
) -> Result<OutputMemory> {
    let bytes = envelope.bytes();
    let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at(format!("port `{}`", edge.port)));
    if envelope.memory().is_host() {
        return wrong(
            "the operator sends an envelope on the host, which a graph cannot fill: send one on the device".into(),
        );
    }
    let row_bytes = match shape.rows.filter(|_| !edge.whole) {
        None => None,
        Some(rows) if bytes.is_multiple_of(rows * edge.element_bytes) => Some(bytes / rows),
        Some(rows) => {
            let elements = bytes / edge.element_bytes;
            return wrong(format!(
                "the operator sends {} for {}, which is not a whole number per row: if its messages are not divided into the \
                 inputs' rows, declare the output with `.whole(..)`",
                human::count(elements, "element"),
                human::count(rows, "row")
            ));
        }
    };
    let passed_on = captured.iter().position(|captured| envelope.pool().ptr_eq(&Arc::downgrade(&captured.home)));
    let from = match passed_on {
        None => OutputSource::Own(envelope),
        // The envelope returns to its pool, where `input_memory` expects it.
        Some(input) => OutputSource::Input(input),
    };
    let own = (bytes > 0).then_some(*next);
    *next += usize::from(own.is_some());
    Ok(OutputMemory { from, bytes, row_bytes, opening: own })
}

fn input_memory(captured: CapturedInput, written: bool, opening: usize) -> Result<InputMemory> {
    let CapturedInput { home, start, bytes } = captured;
    let envelope = home.take()?.filter(|envelope| envelope.memory().address().is_ok_and(|address| address.0 == start));
    let Some(envelope) = envelope else {
        let text = "it keeps or swaps the envelope that it takes at the section's boundary, but each replay uses that envelope: \
                    send it on, or drop it";
        return Err(Error::new(ErrorKind::Usage, text));
    };
    // The contents are unknown.
    Ok(InputMemory { envelope, bytes, zero_from: bytes, written, opening })
}

impl Replay {
    /// Whether an operator has dropped memory that the graph uses: its next run would use other memory, or none.
    pub(super) fn is_stale(&self) -> bool {
        self.exec.graph().is_sole_owner()
    }

    /// Returns an error if the rows of an output differ in length from those in the graph of another bucket: they are
    /// not rows then.
    pub(super) fn has_same_rows(&self, other: &Self, plan: &SectionPlan, members: &[FlowOperator]) -> Result<()> {
        let outputs = plan.outputs.iter().zip(self.outputs.iter().zip(&other.outputs));
        for (edge, (one, two)) in outputs {
            let (Some(row), Some(other_row)) = (one.row_bytes, two.row_bytes) else { continue };
            if row == other_row {
                continue;
            }
            let text = format!(
                "it sends {} bytes for one bucket and {} for another, which is {row} and {other_row} bytes a row, so a replay \
                 could not cut it to the valid rows: if its messages do not have the rows of the inputs, declare it with `.whole(..)`",
                one.bytes, two.bytes
            );
            let error = Error::new(ErrorKind::Usage, text).at(format!("port `{}`", edge.port));
            return Err(error.at(operator(&members[edge.member].name)));
        }
        Ok(())
    }

    /// The memory of the inputs.
    fn inputs(&self) -> Vec<&Memory> {
        self.inputs.iter().map(|input| input.envelope.memory()).collect()
    }

    /// Enqueues a replay: copies the messages in, padded with zeros, launches the graph, and copies each output into
    /// the message whose envelope it uses, or into the output's blank envelope. `rows`: the number of valid rows.
    pub(super) fn enqueue(
        &mut self,
        stream: &Stream,
        messages: &mut [Option<RawEnvelope>],
        blanks: &mut [Option<RawEnvelope>],
        rows: Option<usize>,
    ) -> Result<()> {
        let execution = self.exec.execution();
        let (mut read, mut written) = (SmallVec::<[bool; 2]>::new(), SmallVec::<[bool; 2]>::new());
        for (input, message) in self.inputs.iter_mut().zip(messages.iter()) {
            let message = message.as_ref().ok_or_else(missing)?;
            let (bytes, to) = (message.bytes(), input.envelope.memory_mut());
            let redirected = execution.set_open_end(input.opening, message.memory(), bytes)?;
            if !redirected {
                transfer::copy(stream, message.memory(), to, bytes)?;
            }
            transfer::zero(stream, to, bytes, input.zero_from)?;
            input.zero_from = if input.written { input.bytes } else { bytes };
            read.push(redirected);
        }
        for (index, output) in self.outputs.iter().enumerate() {
            let envelope = output.goes_to(index, messages, blanks).ok_or_else(missing)?;
            let bytes = output.bytes(rows);
            envelope.set_bytes(bytes);
            written.push(match output.opening {
                Some(opening) => execution.set_open_end(opening, envelope.memory(), bytes)?,
                None => false,
            });
        }
        let mut given = SmallVec::<[LaunchMemory<'_>; 2]>::new();
        for (input, message) in messages.iter_mut().enumerate() {
            let goes_on = |output: &OutputMemory| matches!(output.from, OutputSource::Input(of) if of == input);
            let written = self.outputs.iter().zip(&written).any(|(output, written)| *written && goes_on(output));
            let memory = message.as_mut().ok_or_else(missing)?.memory_mut();
            given.push(LaunchMemory { memory, read: read[input], written });
        }
        for (blank, written) in blanks.iter_mut().zip(&written) {
            given.extend(blank.as_mut().map(|blank| LaunchMemory {
                memory: blank.memory_mut(),
                read: false,
                written: *written,
            }));
        }
        given.retain(|given| given.read || given.written);
        execution.launch_with(stream, &mut given)?;
        drop(given);
        for (index, output) in self.outputs.iter().enumerate().filter(|(index, _)| !written[*index]) {
            let from = match &output.from {
                OutputSource::Own(envelope) => envelope,
                OutputSource::Input(input) => &self.inputs[*input].envelope,
            };
            let to = output.goes_to(index, messages, blanks).ok_or_else(missing)?;
            transfer::copy(stream, from.memory(), to.memory_mut(), output.bytes(rows))?;
        }
        Ok(())
    }

    pub(super) fn upload(&self, stream: &Stream) -> Result<()> {
        self.exec.upload(stream)
    }
}

impl OutputMemory {
    /// The size of the output in bytes, for this number of valid rows.
    fn bytes(&self, rows: Option<usize>) -> usize {
        self.row_bytes.zip(rows).map_or(self.bytes, |(row, rows)| row * rows)
    }

    fn goes_to<'a>(
        &self,
        output: usize,
        messages: &'a mut [Option<RawEnvelope>],
        blanks: &'a mut [Option<RawEnvelope>],
    ) -> Option<&'a mut RawEnvelope> {
        let envelope = match self.from {
            OutputSource::Input(input) => messages.get_mut(input),
            OutputSource::Own(_) => blanks.get_mut(output),
        };
        envelope?.as_mut()
    }
}

/// The lengths of the messages that are queued at the section's boundary. `None` if an input has none.
pub(super) fn lengths(members: &mut [FlowOperator], inputs: &[BoundaryPort]) -> Result<Option<Lengths>> {
    let mut lengths = Lengths::new();
    for edge in inputs {
        let first = with_port(&mut members[edge.member], edge.port, |port| {
            port.section_input().map(|input| input.first_bytes())
        })?;
        let Some(bytes) = first else { return Ok(None) };
        lengths.push(bytes);
    }
    Ok(Some(lengths))
}
