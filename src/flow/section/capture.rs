//! One graph of a section: how it is captured, and what a replay copies in and out.
//!
//! In the capture each operator has streams of it, hubs of it to the others, and at the section's edge an end with one
//! message, or one that keeps what is sent. Each `compute` is polled once, in the order of their messages, all within
//! one call.
//!
//! ```text
//!   made before    the inputs' memory: it stays the section's, which copies each message there
//!   made in it     all envelopes of the hubs within, and what operators allocate: the graph's own, used again within it
//!   what came out  of the graph's memory: copied to a blank envelope of the hub that it goes to
//!                  an input's envelope, passed on: copied back to the message that came in, which goes on
//! ```

use std::sync::Arc;

use super::{
    plan::{Edge, Plan},
    table::{Lengths, Shape},
};
use crate::{
    error::{Error, ErrorKind, Result},
    flow::drive::{Joint, Member, operator},
    graph::{Capturing, Exec, Graph},
    hub::{RawEnvelope, pool::Pool},
    memory::{Memory, transfer},
    operator::{AnyPort, seat::Ends},
    stream::Stream,
};

/// A graph that can be replayed.
pub(super) struct Replay {
    exec: Exec,
    inputs: Vec<Fed>,
    pub(super) outputs: Vec<Made>,
}

/// The memory of an input.
struct Fed {
    envelope: RawEnvelope,
    bytes: usize,
    /// Up to here there may be something else than zeros.
    stale: usize,
    /// The graph writes there.
    written: bool,
}

/// What comes out.
pub(super) struct Made {
    pub(super) from: Source,
    pub(super) bytes: usize,
    /// Of each row; `None` if it does not have the rows of what goes in.
    row_bytes: Option<usize>,
}

pub(super) enum Source {
    /// It is that input's memory.
    Input(usize),
    Own(RawEnvelope),
}

/// An input's memory while it is captured.
struct Lent {
    home: Arc<Pool>,
    start: u64,
    bytes: usize,
}

/// Does something with one port of an operator.
pub(super) fn with_port<R>(
    member: &mut Member,
    port: &str,
    act: impl FnOnce(&mut dyn AnyPort) -> Option<Result<R>>,
) -> Result<R> {
    let (mut act, mut done) = (Some(act), None);
    member.seat.visit(&mut |name, found| {
        if name == port
            && let Some(act) = act.take()
        {
            done = act(found);
        }
    });
    let done = done.unwrap_or_else(|| Err(Error::new(ErrorKind::Usage, format!("`{port}` is no port on the edge"))));
    done.map_err(|error| error.at(operator(&member.name)))
}

/// Captures one run of each operator, for messages of this shape.
pub(super) fn capture(
    members: &mut [Member],
    plan: &Plan,
    interior: &[Joint],
    shape: &Shape,
) -> Result<(Replay, Graph)> {
    let lent = shape.lengths.iter().map(|&bytes| {
        let memory = Memory::on(&plan.device, bytes)?;
        let start = memory.address()?.0;
        Ok(Lent { home: Pool::of_one(&plan.name, memory), start, bytes })
    });
    let lent = lent.collect::<Result<Vec<_>>>()?;
    let (graph, kept) = Graph::capture(&plan.device, |capturing| {
        let recorded = record(members, plan, interior, &lent, capturing);
        // Whatever has happened, they go on with what is their own.
        members.iter_mut().for_each(|member| member.seat.leave_capture());
        capturing.capture().recorder().set_label(None);
        recorded
    })?;
    let sent: Vec<_> = kept.iter().map(RawEnvelope::memory).collect();
    if let Some(name) = graph.kept_by(&sent) {
        let text = "memory that was made in the capture, and that it was the last to use, is kept beyond it: a replay keeps \
                    nothing, and until there is one nothing is in that memory; let what stays be made before, in `start` say";
        return Err(Error::new(ErrorKind::Usage, text).at(operator(&name)));
    }
    let mut outputs = Vec::with_capacity(kept.len());
    for (edge, envelope) in plan.outputs.iter().zip(kept) {
        let made = made(edge, envelope, &lent, shape);
        outputs.push(made.map_err(|error| error.at(operator(&members[edge.member].name)))?);
    }
    let inputs = plan
        .inputs
        .iter()
        .zip(lent)
        .map(|(edge, lent)| fed(lent, &graph).map_err(|error| error.at(operator(&members[edge.member].name))));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    Ok((Replay { exec: graph.instantiate()?, inputs, outputs }, graph))
}

/// An error if a second capture is not the same as the first.
pub(super) fn is_the_same(first: &(Replay, Graph), again: &(Replay, Graph)) -> Result<()> {
    let ((first, graph), (second, again)) = (first, again);
    let other_memory = || {
        let differs = graph.memory_differs_from(&first.fed(), again);
        differs.or_else(|| again.memory_differs_from(&second.fed(), graph))
    };
    let (whose, what) = match graph.differs_from(again) {
        Some((whose, node)) => (whose, format!("{node} is not the same")),
        None => match other_memory() {
            Some(whose) => (Some(whose), "it uses other memory the second time".into()),
            None => return Ok(()),
        },
    };
    let text = format!(
        "captured twice, {what}: the host decides that anew in each run, and every replay would do as it did when it was \
         captured; let it come with a message, or leave the operator out of the section"
    );
    let error = Error::new(ErrorKind::Usage, text);
    Err(match whose {
        Some(name) => error.at(operator(&name)),
        None => error,
    })
}

/// What was sent from each output.
fn record(
    members: &mut [Member],
    plan: &Plan,
    interior: &[Joint],
    lent: &[Lent],
    capturing: &Capturing,
) -> Result<Vec<RawEnvelope>> {
    let capture = capturing.capture();
    let streams = members
        .iter_mut()
        .map(|member| member.seat.enter_capture(capture).map_err(|error| error.at(operator(&member.name))));
    let streams = streams.collect::<Result<Vec<Stream>>>()?;
    let mut ends: Vec<Ends> = members.iter().map(|_| Ends::new()).collect();
    for (edge, lent) in plan.inputs.iter().zip(lent) {
        let Some(mut envelope) = lent.home.take()? else { return Err(missing()) };
        envelope.set_bytes(lent.bytes);
        let member = &mut members[edge.member];
        let end = with_port(member, edge.port, |port| port.entry().map(|entry| entry.feed(envelope)))?;
        ends[edge.member].entry(edge.port).or_default().push(end);
    }
    for edge in &plan.outputs {
        let (member, stream) = (&mut members[edge.member], &streams[edge.member]);
        let end = with_port(member, edge.port, |port| port.exit().map(|exit| Ok(exit.keep(stream))))?;
        ends[edge.member].entry(edge.port).or_default().push(end);
    }
    let place = |number: usize| plan.members.iter().position(|member| *member == number).ok_or_else(missing);
    for Joint { plan, make, from, to, .. } in interior {
        let (writer, reader) = (place(from.0)?, place(to.0)?);
        let mut plan = plan.clone();
        (plan.captured, plan.stepped) = (Some(streams[writer].clone()), false);
        let (sender, receiver, _) = make(plan)?;
        ends[writer].entry(from.1).or_default().push(sender);
        ends[reader].entry(to.1).or_default().push(receiver);
    }
    for (member, ends) in members.iter_mut().zip(ends) {
        member.seat.bind_captured(ends).map_err(|error| error.at(operator(&member.name)))?;
    }
    for member in members.iter_mut() {
        capture.recorder().set_label(Some(member.name.clone()));
        member.seat.run_captured().map_err(|error| error.at(operator(&member.name)))?;
    }
    let kept = plan.outputs.iter().map(|edge| {
        let sent = with_port(&mut members[edge.member], edge.port, |port| port.exit().map(|exit| Ok(exit.kept())));
        sent?.pop().ok_or_else(missing)
    });
    let kept = kept.collect::<Result<Vec<_>>>()?;
    capturing.join()?;
    Ok(kept)
}

fn missing() -> Error {
    Error::new(ErrorKind::Usage, "what the section was planned with is not there")
}

fn made(edge: &Edge, envelope: RawEnvelope, lent: &[Lent], shape: &Shape) -> Result<Made> {
    let bytes = envelope.bytes();
    let wrong = |what: String| Err(Error::new(ErrorKind::Usage, what).at(format!("port `{}`", edge.port)));
    if envelope.memory().is_host() {
        return wrong("it sends an envelope of the host's, which no graph fills".into());
    }
    let row_bytes = match shape.rows.filter(|_| !edge.whole) {
        None => None,
        Some(rows) if bytes.is_multiple_of(rows * edge.element_bytes) => Some(bytes / rows),
        Some(rows) => {
            let elements = bytes / edge.element_bytes;
            return wrong(format!(
                "it sends {elements} elements for {rows} rows, which is no whole number for each: if they do not have the \
                 rows of what goes in, say `.whole(..)`"
            ));
        }
    };
    let passed_on = lent.iter().position(|lent| envelope.home().ptr_eq(&Arc::downgrade(&lent.home)));
    let from = match passed_on {
        None => Source::Own(envelope),
        // Home, where it is looked for.
        Some(input) => Source::Input(input),
    };
    Ok(Made { from, bytes, row_bytes })
}

fn fed(lent: Lent, graph: &Graph) -> Result<Fed> {
    let Lent { home, start, bytes } = lent;
    let envelope = home.take()?.filter(|envelope| envelope.memory().address().is_ok_and(|address| address.0 == start));
    let Some(envelope) = envelope else {
        let text = "it keeps the envelope that it takes on the section's edge, or swaps it: a replay has no other";
        return Err(Error::new(ErrorKind::Usage, text));
    };
    let written = graph.writes(envelope.memory());
    // Nobody knows what is there.
    Ok(Fed { envelope, bytes, stale: bytes, written })
}

impl Replay {
    /// An operator has dropped what the graph uses of its memory, for other memory or none: a run of it would not do the same.
    pub(super) fn is_stale(&self) -> bool {
        self.exec.graph().is_left_alone()
    }

    /// The memory of its inputs.
    fn fed(&self) -> Vec<&Memory> {
        self.inputs.iter().map(|fed| fed.envelope.memory()).collect()
    }

    /// Enqueues the messages into the graph's memory, padded with zeros.
    pub(super) fn feed(&mut self, stream: &Stream, messages: &[Option<RawEnvelope>]) -> Result<()> {
        for (fed, message) in self.inputs.iter_mut().zip(messages) {
            let Some(message) = message else { return Err(missing()) };
            let (bytes, to) = (message.bytes(), fed.envelope.memory_mut());
            transfer::copy(stream, message.memory(), to, bytes)?;
            transfer::zero(stream, to, bytes, fed.stale)?;
            fed.stale = if fed.written { fed.bytes } else { bytes };
        }
        Ok(())
    }

    pub(super) fn launch(&self, stream: &Stream) -> Result<()> {
        self.exec.launch(stream).map(drop)
    }

    /// Brings it to the device.
    pub(super) fn upload(&self, stream: &Stream) -> Result<()> {
        self.exec.upload(stream)
    }

    /// Enqueues what has come out of an output into an envelope.
    pub(super) fn fetch(
        &self,
        stream: &Stream,
        output: usize,
        rows: Option<usize>,
        to: &mut RawEnvelope,
    ) -> Result<()> {
        let Made { from, bytes, row_bytes } = self.outputs.get(output).ok_or_else(missing)?;
        let from = match from {
            Source::Own(envelope) => envelope,
            Source::Input(input) => &self.inputs.get(*input).ok_or_else(missing)?.envelope,
        };
        let bytes = row_bytes.zip(rows).map_or(*bytes, |(row, rows)| row * rows);
        transfer::copy(stream, from.memory(), to.memory_mut(), bytes)?;
        to.set_bytes(bytes);
        Ok(())
    }
}

/// Of messages that lie at the edge.
pub(super) fn lengths(members: &mut [Member], inputs: &[Edge]) -> Result<Option<Lengths>> {
    let mut lengths = Lengths::new();
    for edge in inputs {
        let first = with_port(&mut members[edge.member], edge.port, |port| port.entry().map(|entry| entry.first()))?;
        let Some(bytes) = first else { return Ok(None) };
        lengths.push(bytes);
    }
    Ok(Some(lengths))
}
