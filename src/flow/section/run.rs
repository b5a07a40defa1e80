//! The task of a section: its rounds, from the first message to the end.

use std::{sync::Arc, task::Context};

use smallvec::SmallVec;
use tokio::sync::mpsc;

use super::{
    capture::{OutputSource, Replay, capture, is_the_same, lengths, with_port},
    graph_table::{GraphShape, GraphTable, Route},
    plan::{Arrival, SectionPlan},
};
use crate::{
    condition::Readiness,
    error::{Error, Result, caught},
    flow::drive::{Ended, FlowOperator, HubToCreate, blamed, operator},
    graph::Graph,
    hub::RawEnvelope,
    memory::wait_for_reusable_memory,
    operator::{
        AllPorts, Blank, Flushed, SectionContext,
        control::Control,
        observed_runs::TimedRounds,
        operator_task::OperatorTask,
        poll_in_context::poll_in_context,
        run_loop::{
            RunLoop,
            next_run::{Runnable, next_run},
        },
        section_counts::{SectionCounts, StreamReason},
    },
    stream::{CompletionMode, DeviceTimes, PooledStream, Stream, StreamPool, Ticket},
    sync::{Mutex, lock, logged},
};

pub(in crate::flow) struct SectionSetup {
    pub(in crate::flow) plan: SectionPlan,
    /// The inner hubs, which each capture creates again.
    pub(in crate::flow) interior: Vec<HubToCreate>,
    pub(in crate::flow) mode: CompletionMode,
    pub(in crate::flow) stats: Arc<SectionStats>,
}

/// The part of a section's state that is visible outside its task.
#[derive(Debug, Default)]
pub(in crate::flow) struct SectionStats {
    pub(in crate::flow) name: Arc<str>,
    pub(in crate::flow) counts: Arc<SectionCounts>,
    /// The device time of its replays.
    pub(in crate::flow) work: Arc<DeviceTimes>,
    /// The ticket of its last replay.
    last: Mutex<Option<Ticket>>,
}

impl SectionStats {
    pub(in crate::flow) fn new(name: &Arc<str>) -> Arc<Self> {
        Arc::new(Self { name: name.clone(), ..Self::default() })
    }

    pub(in crate::flow) fn last(&self) -> Option<Ticket> {
        lock(&self.last).clone()
    }
}

/// The name of a section in errors: `section `net``.
pub(in crate::flow) fn place(name: &str) -> String {
    format!("section `{name}`")
}

/// Runs a section to its end, and reports the end of each of its operators.
pub(in crate::flow) async fn task(
    start: SectionSetup,
    members: Vec<FlowOperator>,
    node: Arc<OperatorTask>,
    control: Arc<Control>,
    sender: mpsc::UnboundedSender<Ended>,
) {
    let (name, device) = (start.plan.name.clone(), start.plan.device.clone());
    let mut running = SectionRun::new(start, members, &node, &control);
    let outcome = caught(poll_in_context(&node, &device, running.run())).await;
    // Before the ports are closed, so that an operator that loses a message because of that finds the reason.
    if let Err(error) = &outcome {
        control.fail(blamed(&control, error.clone(), &place(&name)));
    }
    let mut members = running.end();
    for member in &mut members {
        let closing = caught(async {
            member.operator.leave_capture();
            member.operator.close();
            Ok(())
        });
        if let Err(error) = closing.await {
            logged(
                || tracing::warn!(error = %format_args!("{error:#}"), operator = &*member.name, "closing an operator's ports panicked"),
            );
        }
        member.operator.settled().await;
    }
    node.end();
    let mut outcome = Some(outcome);
    for member in members {
        // Reported once, with the first operator.
        let outcome = outcome.take().unwrap_or(Ok(()));
        let _ = sender.send(Ended { member, place: place(&name), outcome });
    }
}

struct SectionRun {
    plan: SectionPlan,
    interior: Vec<HubToCreate>,
    mode: CompletionMode,
    stats: Arc<SectionStats>,
    members: Vec<FlowOperator>,
    run_loop: RunLoop,
    table: GraphTable<Replay>,
    /// By operator: how a replay passes its messages on. Set when the section takes its stream.
    passing: Vec<SectionContext>,
    /// The stream of the replays. Dropped after the graphs.
    stream: Option<PooledStream>,
    has_reported_rows: bool,
    /// Set if device work is timed.
    work: Option<TimedRounds>,
}

impl SectionRun {
    fn new(start: SectionSetup, members: Vec<FlowOperator>, node: &Arc<OperatorTask>, control: &Control) -> Self {
        let SectionSetup { plan, interior, mode, stats } = start;
        let table = GraphTable::new(plan.buckets.as_deref(), plan.row_bytes.clone(), plan.most);
        let work = control.watched().and_then(|watched| watched.work.as_ref());
        let work = work.map(|work| TimedRounds::new(work, &stats.work));
        // The section's operators log their own warnings when they block.
        let run_loop = RunLoop::new(&plan.name, node, Vec::new(), true);
        Self {
            plan,
            interior,
            mode,
            stats,
            members,
            run_loop,
            table,
            passing: Vec::new(),
            stream: None,
            has_reported_rows: false,
            work,
        }
    }

    /// Returns the operators, and drops the graphs.
    fn end(self) -> Vec<FlowOperator> {
        self.members
    }

    async fn run(&mut self) -> Result<()> {
        for member in &mut self.members {
            member.operator.only_computes().map_err(|error| error.at(operator(&member.name)))?;
        }
        if self.plan.at_start {
            for shape in self.table.shapes() {
                self.capture(shape).await?;
            }
        }
        while next_run(WaitingSection { section: self }).await {
            // A hub that drops messages may have dropped this one.
            let Some(lengths) = lengths(&mut self.members, &self.plan.inputs)? else {
                self.run_loop.discard_run();
                continue;
            };
            let goes_on = match self.table.way(&lengths) {
                Route::Replayed { graph, rows } => self.replay(graph, rows).await?,
                Route::Streamed(reason) => {
                    self.report_rows(reason, &lengths);
                    self.stream(reason).await?
                }
                Route::Captured(shape) => {
                    let goes_on = self.stream(StreamReason::NoGraph).await?;
                    if goes_on && !self.has_finished() {
                        self.capture(shape).await?;
                    }
                    goes_on
                }
            };
            self.run_loop.end();
            if !goes_on || self.has_finished() {
                break;
            }
        }
        Ok(())
    }

    /// Warns once that messages have no whole number of rows: `Section::rows` may have been forgotten.
    fn report_rows(&mut self, reason: StreamReason, lengths: &[usize]) {
        if reason != StreamReason::UnevenRows || std::mem::replace(&mut self.has_reported_rows, true) {
            return;
        }
        logged(|| {
            tracing::warn!(
                section = &*self.plan.name,
                bytes = ?lengths,
                row_bytes = ?self.plan.row_bytes,
                "messages without a whole number of rows, or with different ones, fit no bucket and are streamed: see `Section::rows`"
            );
        });
    }

    fn has_finished(&self) -> bool {
        self.members.iter().any(|member| member.operator.has_finished())
    }

    /// Runs each operator once. Returns false if one of them cannot run any more.
    async fn stream(&mut self, reason: StreamReason) -> Result<bool> {
        for member in &mut self.members {
            if !member.operator.round().await.map_err(|error| error.at(operator(&member.name)))? {
                return Ok(false);
            }
        }
        self.stats.counts.add_streamed(reason);
        self.table.retain(|replay| !replay.is_stale());
        Ok(true)
    }

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
        let passing = self
            .members
            .iter()
            .map(|member| Ok(SectionContext { context: member.operator.context()?, stream: stream.clone() }));
        self.passing = passing.collect::<Result<_>>()?;
        self.stream = Some(taken);
        Ok(stream)
    }

    /// Captures a graph. If there is no memory for it, waits for memory that streams are using.
    async fn captured(&mut self, shape: &GraphShape) -> Result<(Replay, Graph)> {
        loop {
            match capture(&mut self.members, &self.plan, &self.interior, shape) {
                Err(error) if error.is_out_of_memory() => {
                    if !wait_for_reusable_memory(&self.plan.device).await {
                        return Err(error);
                    }
                }
                outcome => return outcome,
            }
        }
    }

    async fn capture(&mut self, shape: GraphShape) -> Result<()> {
        // Evicted first: the new graph may need the memory of the old one.
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
            replay.has_same_rows(other, &self.plan, &self.members)?;
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
        self.stats.counts.add_captured();
        self.table.add(shape, replay);
        Ok(())
    }

    /// Launches the graph instead of running the operators. Returns false if an output has no reader any more.
    async fn replay(&mut self, graph: usize, rows: Option<usize>) -> Result<bool> {
        let stream = self.own_stream()?;
        let messages = self.take()?;
        self.passing.iter().for_each(|passing| passing.context.trace_replay(false));
        let first = self.passing[0].context.clone();
        first.within(|| self.enqueue(messages, graph, rows, &stream))?;
        let sent = self.flush().await;
        self.passing.iter().for_each(|passing| passing.context.trace_replay(true));
        if sent.as_ref().is_err_and(Error::is_reader_gone) {
            return Ok(false);
        }
        sent?;
        self.passing.iter().for_each(|passing| passing.context.release_unneeded());
        self.members.iter_mut().for_each(|member| member.operator.count_run());
        self.stats.counts.add_replayed();
        Ok(true)
    }

    /// Takes a message at each input. The metadata and replies of the messages are propagated as if the operators ran.
    fn take(&mut self) -> Result<SmallVec<[Option<RawEnvelope>; 2]>> {
        let Self { plan, members, passing, .. } = self;
        let mut messages = SmallVec::new();
        for arrival in &plan.arrivals {
            match *arrival {
                Arrival::Boundary(input) => {
                    let edge = &plan.inputs[input];
                    let (member, passing) = (&mut members[edge.member], &passing[edge.member]);
                    let taken =
                        with_port(member, edge.port, |port| port.section_input().map(|input| input.take(passing)))?;
                    messages.push(Some(taken));
                }
                Arrival::Within { from, to } => {
                    let gathered = passing[to].context.gather(passing[from].context.load());
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
        let Self { plan, members, table, stats, passing, work, .. } = self;
        let replay = table.get(graph).ok_or_else(|| Error::internal("the section has no graph of that number"))?;
        let mut blanks: SmallVec<[Option<RawEnvelope>; 2]> = SmallVec::new();
        for (output, edge) in replay.outputs.iter().zip(&plan.outputs) {
            let OutputSource::Own(like) = &output.from else {
                blanks.push(None);
                continue;
            };
            let member = &mut members[edge.member];
            let blank = with_port(member, edge.port, |port| port.section_output().map(|output| output.take_blank()))?;
            blanks.push(Some(match blank {
                Blank::Taken(envelope) if envelope.memory().bytes() >= output.bytes => envelope,
                // The operator sends memory of its own, which may be larger than the hub's envelopes.
                Blank::Taken(_) | Blank::NoPool => RawEnvelope::on(stream, like.memory().bytes())?,
                Blank::AllInUse => return Err(gone()),
            }));
        }
        let timed = work
            .as_mut()
            .and_then(|work| work.next(passing.iter().filter_map(|passing| passing.context.journey_work()).collect()));
        let is_timed = timed.is_some();
        timed.into_iter().for_each(|owner| stream.begin_run(owner));
        let launched = replay.enqueue(stream, &mut messages, &mut blanks, rows);
        if is_timed {
            stream.end_run();
        }
        launched?;
        for ((output, edge), blank) in replay.outputs.iter().zip(&plan.outputs).zip(blanks) {
            let envelope = match output.from {
                OutputSource::Input(input) => messages[input].take(),
                OutputSource::Own(_) => blank,
            };
            let envelope = envelope.ok_or_else(|| Error::internal("two outputs of the section send one envelope"))?;
            with_port(&mut members[edge.member], edge.port, |port| {
                port.section_output().map(|output| output.send(envelope, &passing[edge.member]))
            })?;
        }
        *lock(&stats.last) = Some(stream.ticket());
        Ok(())
    }

    /// Waits until all outputs have sent their messages.
    async fn flush(&mut self) -> Result<()> {
        let Self { run_loop, members, plan, .. } = self;
        run_loop
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

/// A section that waits for its next run: for a message at each of its inputs, and for room at each output.
struct WaitingSection<'a> {
    section: &'a mut SectionRun,
}

impl Runnable for WaitingSection<'_> {
    fn parts(&mut self) -> (&mut RunLoop, Option<&mut dyn AllPorts>) {
        (&mut self.section.run_loop, None)
    }

    fn poll_ready(&mut self, task: &mut Context<'_>) -> Readiness {
        let SectionRun { members, plan, .. } = &mut *self.section;
        let mut asked = Readiness::READY;
        for edge in plan.inputs.iter().chain(&plan.outputs) {
            members[edge.member].operator.visit(&mut |name, port| {
                if name == edge.port {
                    asked = asked
                        | match port.section_input() {
                            Some(input) => input.poll_message(task),
                            None => port.poll_room(1, task),
                        };
                }
            });
        }
        asked
    }

    /// Always ready: the section's operators have no `may_run`.
    fn poll_last(&mut self, _task: &mut Context<'_>) -> Readiness {
        Readiness::READY
    }

    /// Takes nothing: the run takes the messages, since a hub that drops messages may have dropped one by then.
    fn claim(&mut self) -> bool {
        true
    }

    fn begin(&mut self) {
        self.section.run_loop.begin();
    }

    fn end(&mut self) {
        self.section.run_loop.end();
    }

    fn last_work(&self) -> Vec<Ticket> {
        let SectionRun { members, stats, .. } = &*self.section;
        members.iter().flat_map(|member| member.operator.last()).chain(stats.last()).collect()
    }
}

fn gone() -> Error {
    Error::internal("the section lost its envelope")
}
