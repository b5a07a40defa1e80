//! A section's task: its rounds, from the first message to the end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Context,
};

use smallvec::SmallVec;
use tokio::sync::mpsc;

use super::{
    capture::{Replay, Source, capture, is_the_same, lengths, with_port},
    plan::{Arrival, Plan},
    table::{Shape, Table, Way},
};
use crate::{
    condition::Readiness,
    error::{Error, ErrorKind, Result},
    flow::drive::{Ended, Joint, Member, blamed, operator},
    graph::Graph,
    hub::RawEnvelope,
    memory::memory_passes,
    operator::{Blank, Flushed, Passing, attend::attended, control::Control, node::Node, rounds::Rounds, seat::caught},
    stream::{CompletionMode, PooledStream, Stream, StreamPool, Ticket},
    sync::{Mutex, lock, logged},
};

/// A section that is to run.
pub(in crate::flow) struct Start {
    pub(in crate::flow) plan: Plan,
    /// The hubs within, to be made again in each capture.
    pub(in crate::flow) interior: Vec<Joint>,
    pub(in crate::flow) mode: CompletionMode,
    pub(in crate::flow) told: Arc<Told>,
}

/// What is known of a section outside of its task.
#[derive(Debug, Default)]
pub(in crate::flow) struct Told {
    pub(in crate::flow) name: Arc<str>,
    replayed: AtomicU64,
    streamed: AtomicU64,
    captured: AtomicU64,
    /// The end of its replays.
    last: Mutex<Option<Ticket>>,
}

impl Told {
    pub(in crate::flow) fn new(name: &Arc<str>) -> Arc<Self> {
        Arc::new(Self { name: name.clone(), ..Self::default() })
    }

    /// Rounds that were replayed and streamed, and graphs that were captured.
    pub(in crate::flow) fn counts(&self) -> [u64; 3] {
        [&self.replayed, &self.streamed, &self.captured].map(|count| count.load(Ordering::Relaxed))
    }

    pub(in crate::flow) fn last(&self) -> Option<Ticket> {
        lock(&self.last).clone()
    }
}

/// `section `net``
pub(in crate::flow) fn place(name: &str) -> String {
    format!("section `{name}`")
}

/// Runs a section to its end, and says so of each of its operators.
pub(in crate::flow) async fn task(
    start: Start,
    members: Vec<Member>,
    node: Arc<Node>,
    control: Arc<Control>,
    tell: mpsc::UnboundedSender<Ended>,
) {
    let (name, device) = (start.plan.name.clone(), start.plan.device.clone());
    let mut running = Running::new(start, members, &node);
    let outcome = caught(attended(&node, &device, running.run())).await;
    // Before its ports are closed: whoever loses something then finds why.
    if let Err(error) = &outcome {
        control.fail(blamed(&control, error.again(), &place(&name)));
    }
    let mut members = running.end();
    for member in &mut members {
        let closing = caught(async {
            member.seat.leave_capture();
            member.seat.close();
            Ok(())
        });
        if let Err(error) = closing.await {
            logged(|| tracing::warn!(%error, operator = &*member.name, "closing an operator's ports panicked"));
        }
        member.seat.settled().await;
    }
    node.end();
    let mut outcome = Some(outcome);
    for member in members {
        // Said once, with the first of them.
        let outcome = outcome.take().unwrap_or(Ok(()));
        let _ = tell.send(Ended { member, place: place(&name), outcome });
    }
}

struct Running {
    plan: Plan,
    interior: Vec<Joint>,
    mode: CompletionMode,
    told: Arc<Told>,
    members: Vec<Member>,
    rounds: Rounds,
    table: Table<Replay>,
    /// How it passes messages on for each operator: once it has a stream for that.
    passing: Vec<Passing>,
    /// Of the replays. After the graphs, in the order of dropping.
    stream: Option<PooledStream>,
    count: u64,
    has_told_of_rows: bool,
}

impl Running {
    fn new(start: Start, members: Vec<Member>, node: &Arc<Node>) -> Self {
        let Start { plan, interior, mode, told } = start;
        let table = Table::new(plan.buckets.as_deref(), plan.row_bytes.clone(), plan.most);
        let (rounds, passing) = (Rounds::new(node), Vec::new());
        Self {
            plan,
            interior,
            mode,
            told,
            members,
            rounds,
            table,
            passing,
            stream: None,
            count: 0,
            has_told_of_rows: false,
        }
    }

    /// Its operators back. What it has captured goes.
    fn end(self) -> Vec<Member> {
        self.members
    }

    async fn run(&mut self) -> Result<()> {
        for member in &mut self.members {
            member.seat.only_computes().map_err(|error| error.at(operator(&member.name)))?;
        }
        if self.plan.at_start {
            for shape in self.table.shapes() {
                self.capture(shape).await?;
            }
        }
        while self.next().await {
            // A hub that drops messages may have done so with the one that was there.
            let Some(lengths) = lengths(&mut self.members, &self.plan.inputs)? else { continue };
            let goes_on = match self.table.way(&lengths) {
                Way::Replayed { graph, rows } => self.replay(graph, rows).await?,
                Way::Streamed => {
                    self.tell_of_rows(&lengths);
                    self.stream().await?
                }
                Way::Captured(shape) => {
                    let goes_on = self.stream().await?;
                    if goes_on && !self.has_finished() {
                        self.capture(shape).await?;
                    }
                    goes_on
                }
            };
            self.count += 1;
            self.rounds.ended(self.count);
            if !goes_on || self.has_finished() {
                break;
            }
        }
        Ok(())
    }

    /// Says once that messages have no rows: somebody may have forgotten to say how long those are.
    fn tell_of_rows(&mut self, lengths: &[usize]) {
        if self.has_told_of_rows || self.table.has_rows(lengths) {
            return;
        }
        self.has_told_of_rows = true;
        logged(|| {
            tracing::warn!(
                section = &*self.plan.name,
                bytes = ?lengths,
                row_bytes = ?self.plan.row_bytes,
                "messages that have no whole number of rows, or not the same, fit no bucket and are streamed: see `Section::rows`"
            );
        });
    }

    fn has_finished(&self) -> bool {
        self.members.iter().any(|member| member.seat.has_finished())
    }

    /// Waits for a message at each input of the edge, and for room at each output.
    async fn next(&mut self) -> bool {
        let Self { rounds, members, plan, told, .. } = self;
        let last = |members: &Vec<Member>| {
            members.iter().flat_map(|member| member.seat.last()).chain(told.last()).collect::<Vec<_>>()
        };
        let ask = |members: &mut Vec<Member>, task: &mut Context<'_>| {
            let mut asked = Readiness::READY;
            for (edges, is_output) in [(&plan.inputs, false), (&plan.outputs, true)] {
                for edge in edges {
                    members[edge.member].seat.visit(&mut |name, port| {
                        if name == edge.port {
                            asked = asked
                                | if is_output {
                                    port.state().poll_room(1, task)
                                } else {
                                    port.let_go();
                                    port.state().poll_promised(1, task).more
                                };
                        }
                    });
                }
            }
            asked
        };
        rounds.next(members, last, ask).await
    }

    /// Each operator runs once. False if one can no longer.
    async fn stream(&mut self) -> Result<bool> {
        for member in &mut self.members {
            if !member.seat.round().await.map_err(|error| error.at(operator(&member.name)))? {
                return Ok(false);
            }
        }
        self.told.streamed.fetch_add(1, Ordering::Relaxed);
        self.table.retain(|replay| !replay.is_stale());
        Ok(true)
    }

    /// The stream of its replays: taken when the first of them is made ready.
    fn own_stream(&mut self) -> Result<Stream> {
        if let Some(pooled) = &self.stream {
            return Ok(pooled.stream().clone());
        }
        let names: Vec<_> = self.members.iter().map(|member| &*member.name).collect();
        let name = format!("{} ({})", self.plan.name, names.join(", "));
        let pool = StreamPool::default_of(&self.plan.device)?;
        let taken = pool.take_as(&name)?.ok_or_else(|| pool.used_up())?;
        taken.set_completion_mode(self.mode);
        let stream = taken.stream().clone();
        let passing =
            self.members.iter().map(|member| Ok(Passing { carry: member.seat.carry()?, stream: stream.clone() }));
        self.passing = passing.collect::<Result<_>>()?;
        self.stream = Some(taken);
        Ok(stream)
    }

    /// Captures it. Where there is no memory for that, what streams still use is waited for.
    async fn captured(&mut self, shape: &Shape) -> Result<(Replay, Graph)> {
        loop {
            match capture(&mut self.members, &self.plan, &self.interior, shape) {
                Err(error) if error.is_out_of_memory() => {
                    if !memory_passes(&self.plan.device).await {
                        return Err(error);
                    }
                }
                made => return made,
            }
        }
    }

    async fn capture(&mut self, shape: Shape) -> Result<()> {
        // Before: the new graph may need the other's memory.
        if let Some((evicted, replay)) = self.table.evict() {
            drop(replay);
            logged(|| {
                tracing::debug!(
                    section = &*self.plan.name,
                    bytes = ?evicted.lengths,
                    graphs = self.plan.most,
                    "evicted the least recently used graph for other lengths"
                );
            });
        }
        let first = self.captured(&shape).await?;
        if self.plan.checked {
            let again = self.captured(&shape).await?;
            is_the_same(&first, &again)?;
        }
        let (replay, graph) = first;
        if let Some(other) = self.table.any() {
            replay.cuts_as(other, &self.plan, &self.members)?;
        }
        if let Some(inspect) = self.plan.inspect.as_ref().and_then(|inspect| inspect.get()) {
            inspect(&graph);
        }
        replay.upload(&self.own_stream()?)?;
        logged(|| {
            tracing::debug!(
                section = &*self.plan.name,
                rows = shape.rows,
                nodes = graph.nodes().len(),
                own_bytes = graph.own_bytes(),
                "captured"
            );
        });
        self.told.captured.fetch_add(1, Ordering::Relaxed);
        self.table.add(shape, replay);
        Ok(())
    }

    /// One launch in place of all operators' runs. False if nobody takes what comes out any more.
    async fn replay(&mut self, graph: usize, rows: Option<usize>) -> Result<bool> {
        let stream = self.own_stream()?;
        let messages = self.take()?;
        let first = self.passing[0].carry.clone();
        first.within(|| self.enqueue(messages, graph, rows, &stream))?;
        let sent = self.flush().await;
        self.passing.iter().for_each(|passing| passing.carry.let_go());
        if sent.as_ref().is_err_and(Error::is_reader_gone) {
            return Ok(false);
        }
        sent?;
        self.members.iter_mut().for_each(|member| member.seat.count_run());
        self.told.replayed.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// Takes a message at each input. What they bring along goes the operators' way, as it would if they ran.
    fn take(&mut self) -> Result<SmallVec<[Option<RawEnvelope>; 2]>> {
        let Self { plan, members, passing, .. } = self;
        let mut messages = SmallVec::new();
        for arrival in &plan.arrivals {
            match *arrival {
                Arrival::Outside(input) => {
                    let edge = &plan.inputs[input];
                    let (member, passing) = (&mut members[edge.member], &passing[edge.member]);
                    let taken = with_port(member, edge.port, |port| port.entry().map(|entry| entry.take(passing)))?;
                    messages.push(Some(taken));
                }
                Arrival::Within { from, to } => {
                    let gathered = passing[to].carry.gather(passing[from].carry.load());
                    gathered.map_err(|error| error.at(operator(&members[to].name)))?;
                }
            }
        }
        Ok(messages)
    }

    fn enqueue(
        &mut self,
        mut messages: SmallVec<[Option<RawEnvelope>; 2]>,
        graph: usize,
        rows: Option<usize>,
        stream: &Stream,
    ) -> Result<()> {
        let Self { plan, members, table, told, passing, .. } = self;
        let replay = table.get(graph).ok_or_else(|| Error::new(ErrorKind::Usage, "a graph that is not there"))?;
        let mut blanks: SmallVec<[Option<RawEnvelope>; 2]> = SmallVec::new();
        for (made, edge) in replay.outputs.iter().zip(&plan.outputs) {
            let Source::Own(like) = &made.from else {
                blanks.push(None);
                continue;
            };
            let member = &mut members[edge.member];
            let blank = with_port(member, edge.port, |port| port.exit().map(|exit| exit.blank()))?;
            blanks.push(Some(match blank {
                Blank::Lent(envelope) if envelope.memory().bytes() >= made.bytes => envelope,
                // What it sends is its own, and may be larger than the hub's.
                Blank::Lent(_) | Blank::PassedOn => RawEnvelope::on(stream, like.memory().bytes())?,
                Blank::AllOut => return Err(gone()),
            }));
        }
        replay.enqueue(stream, &mut messages, &mut blanks, rows)?;
        for ((made, edge), blank) in replay.outputs.iter().zip(&plan.outputs).zip(blanks) {
            let envelope = match made.from {
                Source::Input(input) => messages[input].take(),
                Source::Own(_) => blank,
            };
            let envelope =
                envelope.ok_or_else(|| Error::new(ErrorKind::Usage, "an envelope that goes to two outputs"))?;
            with_port(&mut members[edge.member], edge.port, |port| {
                port.exit().map(|exit| exit.send(envelope, &passing[edge.member]))
            })?;
        }
        *lock(&told.last) = Some(stream.ticket());
        Ok(())
    }

    /// Waits until all outputs have sent what they were given.
    async fn flush(&mut self) -> Result<()> {
        let Self { rounds, members, plan, .. } = self;
        rounds
            .until_sent(|task| {
                let mut flushed = Flushed::default();
                for edge in &plan.outputs {
                    let member = &mut members[edge.member];
                    let polled = with_port(member, edge.port, |port| Some(Ok(port.poll_flush(task))));
                    flushed.add(polled.unwrap_or_else(|error| Ok(Err(error))));
                }
                flushed.all()
            })
            .await
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Usage, "an envelope that was there is there no more")
}
